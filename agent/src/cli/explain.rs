//! One room as a page for a person at three in the morning: summary line, why, time line, what is owed, what is
//! known and unknown, what to do. Pure: text from the JSON record that scripts get, so both say the same.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]

use std::fmt::Write as _;

use serde_json::Value;

use super::chart;

/// The page. `record` is a room's JSON record, `findings` are those that are open; a missing key reads as "not known".
pub(super) fn page(record: &Value, findings: &[Value]) -> String {
    let mut out = summary(record, findings);
    out.push('\n');
    why(&mut out, record);
    time_line(&mut out, record);
    chart::draw(&mut out, record);
    standing(&mut out, record);
    known(&mut out, record);
    if !closed(record) {
        candidates(&mut out, record);
        actions(&mut out, record);
        log_lines(&mut out, record);
    }
    upstream(&mut out, record);
    out
}

/// The first line, as in `rooms`: who owes what to whom, whether it ends by itself, what to do.
pub(super) fn summary(record: &Value, findings: &[Value]) -> String {
    let verdict = &record["verdict"];
    let mut parts =
        vec![format!("room {}{}{} {}", text(&record["room"]), rid(record), life(record), state(record))];
    if let Some(owes) = owes(record).filter(|_| !closed(record)) {
        parts.push(owes);
    }
    if record["pinned"].as_bool() == Some(true) {
        parts.push(match verdict["ends_by_itself"]["at"].as_str() {
            Some(at) => {
                format!("ends by itself at {} ({})", clock(at), text(&verdict["ends_by_itself"]["timer"]))
            }
            None => "never ends by itself".to_owned(),
        });
        parts.extend(shared(verdict, findings));
        if let Some(pages) = pages(record) {
            parts.push(format!("holds {pages} pages"));
        }
        let actions = list(&verdict["actions"]);
        // The first that clears it; finding out comes before it in the list below.
        if let Some(act) = actions.iter().find(|a| a["clears"].as_bool() == Some(true)).or(actions.first()) {
            parts.push(format!("do: {}", text(&act["command"])));
        }
        if let Some(issue) = applicable(record).next() {
            parts.push(format!("upstream: {}", text(&issue["url"])));
        }
    }
    parts.join(" · ")
}

/// How many rooms hang on the same cause, and what it is where an engine's own finding tells more than the verdict.
fn shared(verdict: &Value, findings: &[Value]) -> Option<String> {
    let size = verdict["group_size"].as_u64().unwrap_or(1);
    let cause = cause(verdict, findings).map(|f| {
        let first = list(&f["evidence"]).first().map_or_else(|| party(&f["engine"]), |e| text(e).to_owned());
        format!("cause: {} ({first})", text(&f["class"]))
    });
    match (size, cause) {
        (2.., Some(cause)) => Some(format!("1 of {size} rooms, {cause}")),
        (2.., None) => Some(format!(
            "1 of {size} rooms, cause: {} of {}",
            text(&verdict["class"]),
            party(&verdict["owed_by"])
        )),
        (_, cause) => cause,
    }
}

/// The finding that stands for this room's cause under another name, or one of the process or endpoint that owes.
fn cause<'a>(verdict: &Value, findings: &'a [Value]) -> Option<&'a Value> {
    let group = |f: &&Value| f["group"] == verdict["group"] && f["class"] != verdict["class"];
    let owes = &verdict["owed_by"];
    let same = |f: &Value, key: &str| !owes[key].is_null() && f["engine"][key] == owes[key];
    let engine = |f: &&Value| {
        let explains = ["thread_died", "engine_paused", "nothing_readable"];
        explains.iter().any(|c| f["class"] == **c) && (same(f, "pid") || same(f, "endpoint"))
    };
    findings.iter().find(group).or_else(|| findings.iter().find(engine))
}

/// One line for each open finding, and how many there are beyond them.
pub(super) fn finding_lines(findings: &[Value], total: usize) -> String {
    let mut out = String::new();
    for f in findings {
        out.push_str(&finding_line(f));
        out.push('\n');
    }
    let beyond = total.saturating_sub(findings.len());
    if beyond > 0 {
        let _ = writeln!(out, "(and {beyond} more findings)");
    }
    out
}

/// What is wrong, with whom, since when, how many rooms hang on it, what to do.
fn finding_line(f: &Value) -> String {
    let mut parts = vec![
        format!("finding {} {}", text(&f["confidence"]), text(&f["class"])),
        format!("{} since {}", party(&f["engine"]), f["since"].as_str().map_or("?", clock)),
    ];
    if let Some(count @ 1..) = f["room_count"].as_u64() {
        let rooms: Vec<&str> = list(&f["rooms"]).iter().take(3).map(text).collect();
        let more = if count > rooms.len() as u64 { ", …" } else { "" };
        let plural = if count == 1 { "room" } else { "rooms" };
        parts.push(format!("{count} {plural} ({}{more})", rooms.join(", ")));
    } else {
        parts.extend(list(&f["evidence"]).first().map(|e| text(e).to_owned()));
    }
    let actions = list(&f["actions"]);
    let act = actions.iter().find(|a| a["clears"].as_bool() == Some(true)).or(actions.first());
    parts.extend(act.map(|a| format!("do: {}", text(&a["command"]))));
    parts.join(" · ")
}

/// KV pages that METADATA asked for.
fn pages(record: &Value) -> Option<u64> {
    let messages =
        ["prefill", "decode"].into_iter().flat_map(|role| list(&record["views"][role]["messages"]));
    messages.filter_map(|m| m["pages"].as_u64()).max()
}

/// Upstream reports that are not known to be fixed in this engine.
fn applicable(record: &Value) -> impl Iterator<Item = &Value> {
    list(&record["verdict"]["known_issues"]).iter().filter(|i| i["applies"].as_str() != Some("no"))
}

fn closed(record: &Value) -> bool {
    record["closed_at"].is_string()
}

fn rid(record: &Value) -> String {
    record["request"]["rid"].as_str().map_or_else(String::new, |rid| format!(" (rid {rid})"))
}

fn life(record: &Value) -> String {
    match record["incarnation"].as_u64() {
        Some(n @ 1..) => format!(" (life {})", n.saturating_add(1)),
        _ => String::new(),
    }
}

fn state(record: &Value) -> String {
    let age = record["age_s"].as_f64().map_or_else(String::new, |s| format!(" {s:.0} s"));
    let verdict = &record["verdict"];
    match (record["pinned"].as_bool(), record["closed_at"].as_str()) {
        (Some(true), _) => {
            format!("PINNED {} {}{age}", text(&verdict["confidence"]), text(&verdict["class"]))
        }
        (_, Some(_)) => {
            let outcome = record["outcome"].as_str().unwrap_or("ended, how is not known");
            let recovered = if record["recovered"].as_bool() == Some(true) {
                ", recovered after it was pinned"
            } else {
                ""
            };
            format!("closed: {outcome} after{age}{recovered}")
        }
        _ => match verdict["class"].as_str() {
            Some(class) => format!("open{age}: {class}"),
            None => format!("open{age}, nothing overdue"),
        },
    }
}

fn owes(record: &Value) -> Option<String> {
    let verdict = &record["verdict"];
    let class = verdict["class"].as_str()?;
    if verdict["owed_by"].is_null() {
        return record["pinned"].as_bool()?.then(|| format!("nobody owes a move ({class})"));
    }
    let what = verdict["expected"].as_str().unwrap_or("the next move");
    let to = match verdict["owed_by"]["role"].as_str() {
        Some("prefill") => peer_of(record, "decode"),
        Some("decode") => peer_of(record, "prefill"),
        _ => None,
    };
    let to = to.map_or_else(String::new, |to| format!(" to {to}"));
    Some(format!("{} owes {what}{to}", party(&verdict["owed_by"])))
}

/// The other side, as the messages name it.
fn peer_of(record: &Value, role: &str) -> Option<String> {
    let own = &record["views"][role]["ranks"][0]["endpoint"];
    let other = if role == "decode" { "prefill" } else { "decode" };
    let seen = record["views"][other]["messages"].as_array()?.first().map(|m| &m["peer"]);
    let endpoint = own.as_str().or_else(|| seen.and_then(Value::as_str));
    Some(endpoint.map_or_else(|| role.to_owned(), |e| format!("{role} {e}")))
}

fn party(party: &Value) -> String {
    let mut out = party["role"].as_str().unwrap_or("someone outside the engines").to_owned();
    if let Some(rank) = party["rank"].as_u64() {
        let _ = write!(out, " rank {rank}");
    }
    if let Some(endpoint) = party["endpoint"].as_str() {
        let _ = write!(out, " {endpoint}");
    }
    let mut who: Vec<String> = Vec::new();
    if let Some(pid) = party["pid"].as_u64() {
        who.push(
            party["comm"].as_str().map_or_else(|| format!("pid {pid}"), |comm| format!("pid {pid} {comm}")),
        );
    }
    if let Some(ranks) = party["rank_names"].as_str() {
        who.push(ranks.to_owned());
    }
    if let Some(pod) = party["pod_uid"].as_str() {
        who.push(format!("pod {pod}"));
    }
    if let Some(container) = party["container"].as_str() {
        // As the container tools show it.
        who.push(format!("container {}", container.get(..12).unwrap_or(container)));
    }
    if who.is_empty() && party["local"].as_bool() == Some(false) {
        who.push("another host".to_owned());
    }
    if !who.is_empty() {
        let _ = write!(out, " ({})", who.join(", "));
    }
    out
}

fn why(out: &mut String, record: &Value) {
    let verdict = &record["verdict"];
    let Some(class) = verdict["class"].as_str() else { return };
    let was = if closed(record) { "what was judged" } else { "why" };
    let _ = writeln!(out, "\n{was}: {class}, {}", text(&verdict["confidence"]));
    for line in list(&verdict["evidence"]) {
        let _ = writeln!(out, "  - {}", text(line));
    }
}

/// Messages of both views in order of time, each with direction and peer.
fn time_line(out: &mut String, record: &Value) {
    let mut lines: Vec<(&str, String)> = Vec::new();
    for role in ["prefill", "decode"] {
        for m in list(&record["views"][role]["messages"]) {
            lines.push((m["time"].as_str().unwrap_or_default(), message(role, m)));
        }
    }
    request(&mut lines, record);
    stages(&mut lines, record);
    gpus(&mut lines, record);
    network(&mut lines, record);
    batches(&mut lines, record);
    lines.sort_by(|a, b| a.0.cmp(b.0));
    let opened = record["opened_at"].as_str().unwrap_or_default();
    let _ = writeln!(out, "\ntime line (UTC, and seconds since the first sign of the room)");
    for (time, line) in &lines {
        let _ = writeln!(out, "  {} {:>9} {line}", clock(time), since(opened, time));
    }
    doubted(out, record);
    if let Some(n @ 1..) = record["messages_dropped"].as_u64() {
        let _ = writeln!(out, "  ({n} more messages were not kept)");
    }
    if let Some(closed) = record["closed_at"].as_str() {
        let outcome = record["outcome"].as_str().unwrap_or("how is not known");
        let _ = writeln!(out, "  {} {:>9} ended: {outcome}", clock(closed), since(opened, closed));
    } else if let Some(now) = record["time"].as_str() {
        let _ = writeln!(out, "  {} {:>9} now", clock(now), since(opened, now));
    }
}

/// The request at each engine: begun, answer begun, over.
fn request<'a>(lines: &mut Vec<(&'a str, String)>, record: &'a Value) {
    for role in ["prefill", "decode", "unplaced", "unplaced_too"] {
        let leg = &record["request"][role];
        let who = if role.starts_with("unplaced") { "engine" } else { role };
        let mut line = |key: &str, what: String| {
            if let Some(at) = leg[key].as_str() {
                lines.push((at, format!("{who:7} {what}")));
            }
        };
        line("begun", "request  begun".to_owned());
        line("first_byte", "request  first byte of its answer".to_owned());
        let status = leg["status"].as_u64().map(|s| format!(", status {s}")).unwrap_or_default();
        line("ended", format!("request  {}{status}", text(&leg["how"])));
        if leg["out_of_sight"].as_bool() == Some(true) {
            line("begun", "request  (lost sight of later: its end is not known)".to_owned());
        }
    }
}

/// Stages of the request, as the engines' schedulers say: each where it ended, for that is what its span tells.
fn stages<'a>(lines: &mut Vec<(&'a str, String)>, record: &'a Value) {
    for stage in list(&record["scheduler"]["stages"]) {
        let Some(ended) = stage["ended"].as_str() else { continue };
        let role = stage["role"].as_str().unwrap_or("engine");
        let begun = stage["begun"].as_str().unwrap_or(ended);
        let times = match stage["spans"].as_u64() {
            Some(n @ 2..) => format!(", {n} spans"),
            _ => String::new(),
        };
        let line = format!("{role:7} stage    {} over, begun {}{times}", text(&stage["stage"]), clock(begun));
        lines.push((ended, line));
    }
}

/// Spans that are not on the time line, as their times cannot be of this room.
fn doubted(out: &mut String, record: &Value) {
    for request in list(&record["scheduler"]["requests"]) {
        let names: Vec<&str> =
            list(&request["times_not_believed"]).iter().filter_map(Value::as_str).collect();
        if !names.is_empty() {
            let role = request["role"].as_str().unwrap_or("engine");
            let names = names.join(", ");
            let _ = writeln!(
                out,
                "  ({role}: times of these spans are not believed, they cannot be of this room: {names})"
            );
        }
    }
}

/// What GPUs moved while the KV cache could, where that time ends, and what they suffered.
fn gpus<'a>(lines: &mut Vec<(&'a str, String)>, record: &'a Value) {
    for gpu in list(&record["gpu"]) {
        let role = gpu["role"].as_str().unwrap_or("engine");
        if let (Some(at), Some(out), Some(into)) =
            (gpu["transfer"][1].as_str(), gpu["tx_bytes"].as_u64(), gpu["rx_bytes"].as_u64())
        {
            let others = of_rooms(&gpu["overlapping_rooms"]);
            let from = gpu["window"][0].as_str().map_or("?", clock);
            let name = format!("{} {}", text(&gpu["uuid"]), text(&gpu["link"]));
            lines.push((
                at,
                format!(
                    "{role:7} GPU      {name}: {out} bytes out, {into} in since {from}{others} (whole GPU)"
                ),
            ));
        }
        for t in list(&gpu["troubles"]) {
            let Some(at) = t["from"].as_str() else { continue };
            let number = t["value"].as_u64().map(|n| format!(" {n}")).unwrap_or_default();
            let meaning = t["meaning"].as_str().map(|m| format!(" ({m})")).unwrap_or_default();
            let line =
                format!("{role:7} GPU      {}: {}{number}{meaning}", text(&gpu["uuid"]), text(&t["what"]));
            // Every link of a GPU carries it.
            if !lines.contains(&(at, line.clone())) {
                lines.push((at, line));
            }
        }
    }
}

/// The same of RDMA ports and of the ranks' connections.
fn network<'a>(lines: &mut Vec<(&'a str, String)>, record: &'a Value) {
    for entry in list(&record["network"]) {
        let role = entry["role"].as_str().unwrap_or("engine");
        let name = chart::name(entry);
        if let (Some(at), Some(out), Some(into)) =
            (entry["transfer"][1].as_str(), entry["tx_bytes"].as_u64(), entry["rx_bytes"].as_u64())
        {
            let others = of_rooms(&entry["overlapping_rooms"]);
            let from = entry["window"][0].as_str().map_or("?", clock);
            let whole = if entry["link"] == "tcp" { "all together" } else { "whole port" };
            let line = format!(
                "{role:7} network  {name}: {out} bytes out, {into} in since {from}{others} ({whole})"
            );
            lines.push((at, line));
        }
        for t in list(&entry["troubles"]) {
            let Some(at) = t["from"].as_str() else { continue };
            let n = t["value"].as_u64().unwrap_or_default();
            lines.push((
                at,
                format!("{role:7} network  {name}: {n} {} ({})", text(&t["what"]), text(&t["meaning"])),
            ));
        }
    }
}

/// Of how many rooms a reading is.
fn of_rooms(overlapping: &Value) -> String {
    match overlapping.as_u64() {
        Some(1) => String::new(),
        Some(n) => format!(", of {n} rooms"),
        None => ", of all rooms".to_owned(),
    }
}

/// What the transfer engine was asked to move for this room, where the last of it was submitted.
fn batches<'a>(lines: &mut Vec<(&'a str, String)>, record: &'a Value) {
    for e in list(&record["transfer_engine"]) {
        let role = e["role"].as_str().unwrap_or("engine");
        let least = if e["complete"].as_bool() == Some(true) { "" } else { "at least " };
        let ambiguous = match e["ambiguous"].as_u64() {
            Some(n @ 1..) => format!(", {n} more batches may be this room's or another's"),
            _ => String::new(),
        };
        let at = e["last"].as_str().or(record["time"].as_str());
        let (Some(at), Some(bytes)) = (at, e["bytes"].as_u64()) else {
            if let Some(at) = at {
                let line = format!("{role:7} MOONCAKE what was submitted is not measured{ambiguous}");
                lines.push((at, line));
            }
            continue;
        };
        let (batches, open) =
            (e["batches"].as_u64().unwrap_or_default(), e["open"].as_u64().unwrap_or_default());
        let line = format!(
            "{role:7} MOONCAKE {least}{bytes} bytes submitted for this room in {batches} batches, {open} of them not over{ambiguous}"
        );
        lines.push((at, line));
    }
}

fn message(role: &str, m: &Value) -> String {
    let (verb, preposition) = match m["direction"].as_str() {
        Some("sent") => ("sent", "to"),
        _ => ("received", "from"),
    };
    let mut out = format!("{role:7} {verb:8} {} {preposition} {}", text(&m["kind"]), text(&m["peer"]));
    if let Some(status) = m["status"].as_str() {
        let _ = write!(out, "  {status}");
    }
    if let Some(rank) = m["rank"].as_u64() {
        let _ = write!(out, "  prefill rank {rank}");
    }
    if let Some(pages) = m["pages"].as_u64() {
        let _ = write!(out, "  {pages} pages");
    }
    if m["dummy"].as_bool() == Some(true) {
        out.push_str("  dummy");
    }
    if m["acknowledged"].as_bool() == Some(false) {
        out.push_str("  NOT acknowledged by the peer's kernel");
    }
    out
}

fn standing(out: &mut String, record: &Value) {
    out.push_str("\nwhere it stands\n");
    for role in ["prefill", "decode"] {
        let view = &record["views"][role];
        if view.is_null() {
            let _ = writeln!(out, "  {role}: not seen from this host");
            continue;
        }
        let what = if role == "prefill" { "sessions" } else { "statuses" };
        let counts = match (view["got"].as_u64(), view["required"].as_u64()) {
            (Some(got), Some(required)) => format!(", {got} of {required} {what}"),
            (Some(got), None) => format!(", {got} {what}, how many are required is not known"),
            _ => String::new(),
        };
        let _ = writeln!(
            out,
            "  {role}: {} in phase {} since {}{counts}",
            text(&view["state"]),
            text(&view["phase"]),
            view["phase_since"].as_str().map_or("?", clock)
        );
        for rank in list(&view["ranks"]) {
            let mut line = rank["rank"].as_u64().map_or_else(|| "rank".to_owned(), |n| format!("rank {n}"));
            for (name, value) in [("", &rank["endpoint"]), ("session ", &rank["session"])] {
                if let Some(value) = value.as_str() {
                    let _ = write!(line, " {name}{value}");
                }
            }
            if let Some(pid) = rank["pid"].as_u64() {
                let _ = write!(line, " pid {pid} {}", rank["comm"].as_str().unwrap_or_default());
            }
            if rank["dummy"].as_bool() == Some(true) {
                line.push_str(" (dummy: owes nothing)");
            }
            let _ = writeln!(out, "    {line}: {}", text(&rank["state"]));
        }
    }
}

fn known(out: &mut String, record: &Value) {
    out.push_str("\nknown and unknown\n");
    let seen = match record["completeness"].as_str() {
        Some("full") => "every control message of this room on this host was seen",
        Some("preexisting") => "the room was open before the agent looked: earlier messages are not known",
        Some("partial") => "some connections or ranks of this room cannot be read from here",
        Some("lossy") => "bytes were missed in a stretch that messages of this room can lie in",
        _ => "how much was seen is not known",
    };
    let _ = writeln!(out, "  - {seen}");
    if let (Some(from), Some(to)) = (record["restored"]["from"].as_str(), record["restored"]["to"].as_str()) {
        let _ = writeln!(
            out,
            "  - the agent was started again: it did not look from {} to {} and knows of earlier messages from its state file",
            clock(from),
            clock(to)
        );
    }
    if let Some(min) = record["releases"]["min"].as_str() {
        let _ = writeln!(
            out,
            "  - {} messages as of engine release {min} to {}",
            record["backend"].as_str().unwrap_or("?"),
            text(&record["releases"]["max"])
        );
    }
    for role in ["prefill", "decode"] {
        if record["views"][role].is_null() {
            let _ =
                writeln!(out, "  - the {role} side is not on this host: ask the agent there for this room");
        }
    }
    for (key, name) in [
        ("request", "the request at the engines' HTTP ports"),
        ("gpu", "GPU copy activity"),
        ("network", "bytes of RDMA ports and transfer connections"),
        ("scheduler", "scheduler spans"),
    ] {
        if record[key].is_null() {
            let _ = writeln!(out, "  - not measured: {name}");
        }
    }
}

fn candidates(out: &mut String, record: &Value) {
    let candidates = list(&record["verdict"]["candidates"]);
    if candidates.is_empty() {
        return;
    }
    out.push_str("\nlooks the same from here\n");
    for c in candidates {
        let modes: Vec<&str> = list(&c["modes"]).iter().filter_map(Value::as_str).collect();
        let owes = c["owed_by"].as_str().map_or_else(String::new, |r| format!(", {r} would owe"));
        let _ = writeln!(
            out,
            "  - {} ({}){owes}; settled by: {}",
            text(&c["class"]),
            modes.join(" "),
            text(&c["would_settle"])
        );
    }
}

fn actions(out: &mut String, record: &Value) {
    let actions = list(&record["verdict"]["actions"]);
    if actions.is_empty() {
        return;
    }
    out.push_str("\nwhat to do\n");
    for (n, a) in actions.iter().enumerate() {
        let clears =
            if a["clears"].as_bool() == Some(true) { "clears it" } else { "does not clear it by itself" };
        let _ = writeln!(out, "  {}. {}", n.saturating_add(1), text(&a["command"]));
        let _ = writeln!(
            out,
            "     {} ({clears}); costs others: {}",
            text(&a["effect"]),
            text(&a["blast_radius"])
        );
    }
}

fn upstream(out: &mut String, record: &Value) {
    let mut issues = applicable(record).peekable();
    if issues.peek().is_none() {
        return;
    }
    out.push_str("\nupstream\n");
    for i in issues {
        let fixed = i["fixed_in"].as_str().map_or_else(String::new, |r| format!(", fixed in {r}"));
        let _ =
            writeln!(out, "  - {}{fixed}; applies to this engine: {}", text(&i["url"]), text(&i["applies"]));
    }
}

/// Log lines of the engine that would tell more (SGLang 0.5.23 `disaggregation/*/conn.py`, `prefill.py`, `decode.py`).
fn log_lines(out: &mut String, record: &Value) {
    let lines: &[&str] = match record["verdict"]["class"].as_str() {
        Some("abort_before_entry" | "abort_ignored") => &[
            "prefill, debug: `ignoring (already completed or unknown)`",
            "prefill: `timed out after …s in KVPoll.Bootstrapping`",
        ],
        Some("metadata_incomplete" | "metadata_missing") => &[
            "prefill: `timed out after …s in KVPoll.Bootstrapping`",
            "decode: `Decode handshake failed for request`",
        ],
        Some("transfer_not_concluded" | "transfer_worker_silent" | "ranks_disagree") => &[
            "prefill, critical: `Transfer thread failed because of`",
            "prefill: `Skip sending kv chunk for request … because page_indices is empty`",
            "prefill: `Session … failed.`",
        ],
        Some("concluded_but_held") => &[
            "decode: `Context corruption detected`",
            "prefill, every few seconds: `#inflight-req: N` that does not fall",
        ],
        Some("staging_reply_missing") => &["decode: `STAGING_REQ dropped: no receiver for room=…`"],
        Some("engine_stalled") => &["prefill, every few seconds: `Prefill batch` lines that have stopped"],
        Some("duplicate_room") => &["decode: `Context corruption detected` with both rooms"],
        Some("receiver_silent") => {
            &["prefill: a traceback of its receive thread, or `bootstrap_thread died on engine_rank=…`"]
        }
        Some("status_lost" | "awaiting_prefill" | "peer_not_told") => &[
            "prefill, warning: `Failed to sync status … of room … to …`",
            "decode: `timed out after …s in KVPoll.WaitingForInput`",
        ],
        Some("peer_lost" | "stale_endpoint") => {
            &["decode: `Lost connection with prefill instance`", "prefill: `Decode instance could be dead`"]
        }
        _ => return,
    };
    out.push_str("\nlog lines to look for (all of them name the room in decimal or the peer)\n");
    for line in lines {
        let _ = writeln!(out, "  - {line}");
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}

/// `2026-11-29T02:41:07.123456789Z` → `02:41:07.123456`.
fn clock(rfc3339: &str) -> &str {
    let time = rfc3339.split_once('T').map_or(rfc3339, |(_, time)| time);
    let time = time.strip_suffix('Z').unwrap_or(time);
    time.get(..15).unwrap_or(time)
}

fn since(from: &str, to: &str) -> String {
    let parse = |s: &str| s.parse::<jiff::Timestamp>().ok();
    match (parse(from), parse(to)) {
        (Some(from), Some(to)) => format!("{:+.3}", to.duration_since(from).as_secs_f64()),
        _ => String::new(),
    }
}
