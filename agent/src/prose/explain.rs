//! One room explained to a person at three in the morning: summary line, why, time line, what is owed, what is
//! known and unknown, what to do. Pure: text from the JSON record that scripts get, so both say the same.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]

use std::fmt::Write as _;

use serde_json::Value;

use super::time_line::time_line;
use super::{chart, clock, counted, list, seconds, text};

/// Which part of the explanation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum About {
    /// Why it is judged so.
    Why,
    /// What happened, in order of time.
    Time,
    /// Where each side stands.
    Standing,
    /// What was seen and what was not.
    Known,
    /// Other readings of the same evidence.
    Candidates,
    /// What to do.
    Actions,
    /// Log lines of the engine to look for.
    Log,
    /// Upstream reports.
    Upstream,
}

/// One part, as the text has it.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) about: About,
    /// A blank line, a title, and lines that are indented.
    text: String,
}

impl Part {
    pub(crate) fn title(&self) -> &str {
        self.text.trim_start().lines().next().unwrap_or_default()
    }

    /// Its lines without the first indentation.
    pub(crate) fn lines(&self) -> impl Iterator<Item = &str> {
        self.text.trim_start().lines().skip(1).map(|l| l.strip_prefix("  ").unwrap_or(l))
    }
}

/// The whole. `record` is a room's JSON record, `findings` are those that are open; a missing key reads as "not known".
pub(crate) fn page(record: &Value, findings: &[Value]) -> String {
    let mut out = summary(record, findings);
    out.push('\n');
    for part in parts(record) {
        if part.about == About::Standing {
            chart::draw(&mut out, record);
        }
        out.push_str(&part.text);
    }
    out
}

/// What stands below the first line, each part that has something to say.
pub(crate) fn parts(record: &Value) -> Vec<Part> {
    type Write = fn(&mut String, &Value);
    let all: [(About, Write); 8] = [
        (About::Why, why),
        (About::Time, time_line),
        (About::Standing, standing),
        (About::Known, known),
        (About::Candidates, candidates),
        (About::Actions, actions),
        (About::Log, log_lines),
        (About::Upstream, upstream),
    ];
    let open_only = [About::Candidates, About::Actions, About::Log];
    let told = all.into_iter().filter(|(about, _)| !closed(record) || !open_only.contains(about));
    let part = |(about, write): (About, Write)| {
        let mut text = String::new();
        write(&mut text, record);
        Part { about, text }
    };
    told.map(part).filter(|p| !p.text.is_empty()).collect()
}

/// The first line in its parts: who owes what to whom, whether it ends by itself, what to do.
#[derive(Debug)]
pub(crate) struct Head<'a> {
    /// `room 7 (rid …)`.
    name: String,
    pub(crate) state: String,
    pub(crate) owes: Option<String>,
    pub(crate) ends: Option<String>,
    /// How many rooms hang on the same cause.
    pub(crate) shared: Option<String>,
    pub(crate) holds: Option<String>,
    /// The first action that clears it; finding out comes before it in the list below.
    pub(crate) act: Option<&'a Value>,
    upstream: Option<&'a str>,
}

impl<'a> Head<'a> {
    pub(crate) fn of(record: &'a Value, findings: &[Value]) -> Self {
        let verdict = &record["verdict"];
        let pinned = record["pinned"].as_bool() == Some(true);
        Self {
            name: format!("room {}{}{}", text(&record["room"]), rid(record), life(record)),
            state: state(record),
            owes: owes(record).filter(|_| !closed(record)),
            ends: pinned.then(|| ends(record)),
            shared: shared(verdict, findings).filter(|_| pinned),
            holds: pages(record)
                .filter(|_| pinned)
                .map(|pages| format!("holds {}", counted(pages, "page", "pages"))),
            act: first_act(verdict).filter(|_| pinned),
            upstream: applicable(record).next().filter(|_| pinned).map(|issue| text(&issue["url"])),
        }
    }

    fn line(self) -> String {
        let first = Some(format!("{} {}", self.name, self.state));
        let act = self.act.map(|a| format!("do: {}", text(&a["command"])));
        let upstream = self.upstream.map(|url| format!("upstream: {url}"));
        let parts = [first, self.owes, self.ends, self.shared, self.holds, act, upstream];
        parts.into_iter().flatten().collect::<Vec<_>>().join(" · ")
    }
}

/// Whether it ends by itself: once the engine's timer should have, that it did not, for then the timer is set longer than known, or gone
/// with what held it.
fn ends(record: &Value) -> String {
    let timer = &record["verdict"]["ends_by_itself"];
    let Some(at) = timer["at"].as_str() else { return "never ends by itself".to_owned() };
    let late = record["time"].as_str().and_then(|now| seconds(at, now));
    let (at, timer) = (clock(at), text(&timer["timer"]));
    if late.is_some_and(|late| late > TIMER_GRACE) {
        return format!("was due to end by itself at {at} ({timer}); it did not");
    }
    format!("ends by itself at {at} ({timer})")
}

/// Seconds that an engine may take to look at its timers.
const TIMER_GRACE: f64 = 5.0;

/// The first line, as in `rooms`.
pub(crate) fn summary(record: &Value, findings: &[Value]) -> String {
    Head::of(record, findings).line()
}

/// The first action that clears it, else the first.
pub(crate) fn first_act(of: &Value) -> Option<&Value> {
    let actions = list(&of["actions"]);
    actions.iter().find(|a| a["clears"].as_bool() == Some(true)).or(actions.first())
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
pub(crate) fn finding_lines(findings: &[Value], total: usize) -> String {
    let mut out = String::new();
    for f in findings {
        out.push_str(&finding_line(f));
        out.push('\n');
    }
    let beyond = total.saturating_sub(findings.len());
    if beyond > 0 {
        let _ = writeln!(out, "(and {})", counted(beyond as u64, "more finding", "more findings"));
    }
    out
}

/// What is wrong, with whom, since when, how many rooms hang on it, what to do.
pub(crate) fn finding_line(f: &Value) -> String {
    let mut parts = vec![
        format!("finding {} {}", text(&f["confidence"]), text(&f["class"])),
        format!("{} since {}", party(&f["engine"]), f["since"].as_str().map_or("?", clock)),
    ];
    if let Some(count @ 1..) = f["room_count"].as_u64() {
        let rooms: Vec<&str> = list(&f["rooms"]).iter().take(3).map(text).collect();
        let more = if count > rooms.len() as u64 { ", …" } else { "" };
        parts.push(format!("{} ({}{more})", counted(count, "room", "rooms"), rooms.join(", ")));
    } else {
        parts.extend(list(&f["evidence"]).first().map(|e| text(e).to_owned()));
    }
    parts.extend(first_act(f).map(|a| format!("do: {}", text(&a["command"]))));
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

/// Who owes which move to whom, as the first line says it.
pub(crate) fn owes(record: &Value) -> Option<String> {
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

pub(crate) fn party(party: &Value) -> String {
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
    if let (Some(pod), Some(namespace)) = (party["pod"].as_str(), party["namespace"].as_str()) {
        // As `kubectl` takes it.
        who.push(format!("pod {namespace}/{pod}"));
    } else if let Some(pod) = party["pod_uid"].as_str() {
        who.push(format!("pod {pod}"));
    }
    if let Some(container) = party["container_name"].as_str() {
        who.push(format!("container {container}"));
    } else if let Some(container) = party["container"].as_str() {
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
    let numbers = list(&record["engine_numbers"]);
    for role in ["prefill", "decode"] {
        if !record["views"][role].is_null() && !numbers.iter().any(|n| n["role"] == role) {
            let _ = writeln!(
                out,
                "  - not measured: what {role}'s engine says in numbers (/v1/loads, /metrics): no answer while the room was open; \
                 /status says why"
            );
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
        let modes = if modes.is_empty() { String::new() } else { format!(" ({})", modes.join(" ")) };
        let owes = c["owed_by"].as_str().map_or_else(String::new, |r| format!(", {r} would owe"));
        let _ =
            writeln!(out, "  - {}{modes}{owes}; settled by: {}", text(&c["class"]), text(&c["would_settle"]));
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

pub(super) fn since(from: &str, to: &str) -> String {
    seconds(from, to).map_or_else(String::new, |s| format!("{s:+.3}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_timer_that_has_passed_is_no_promise() {
        let line = |now: &str, timer: Value| {
            let record = json!({
                "room": "7", "pinned": true, "time": now,
                "verdict": {"class": "status_lost", "ends_by_itself": timer}
            });
            summary(&record, &[])
        };
        let timer = json!({"timer": "a timer, 300 s by default", "at": "2026-01-01T02:52:24Z"});
        let promise = " · ends by itself at 02:52:24 (a timer, 300 s by default)";
        for now in ["2026-01-01T02:47:00Z", "2026-01-01T02:52:27Z"] {
            let line = line(now, timer.clone());
            assert!(line.contains(promise), "{line}");
        }
        let late = line("2026-01-01T02:57:00Z", timer);
        let told = " · was due to end by itself at 02:52:24 (a timer, 300 s by default); it did not";
        assert!(late.contains(told) && !late.contains(promise), "{late}");
        let none = line("2026-01-01T02:57:00Z", Value::Null);
        assert!(none.contains(" · never ends by itself"), "{none}");
    }

    #[test]
    fn one_is_not_many() {
        assert_eq!(finding_lines(&[], 1), "(and 1 more finding)\n");
        assert_eq!(finding_lines(&[], 2), "(and 2 more findings)\n");
        let record =
            |pages: u64| json!({"pinned": true, "views": {"decode": {"messages": [{"pages": pages}]}}});
        let one = summary(&record(1), &[]);
        assert!(one.contains("holds 1 page") && !one.contains("pages"), "{one}");
        assert!(summary(&record(8), &[]).contains("holds 8 pages"));
    }

    #[test]
    fn an_engine_of_this_host_that_told_nothing_in_numbers_is_not_measured() {
        let said = |views: &Value, numbers: &Value| {
            let mut out = String::new();
            known(&mut out, &json!({"views": views, "engine_numbers": numbers}));
            let told = |role| out.contains(&format!("not measured: what {role}'s engine says in numbers"));
            [told("prefill"), told("decode")]
        };
        let (both, own) = (json!({"prefill": {}, "decode": {}}), json!({"prefill": {}, "decode": null}));
        let of = |role: &str| json!([{"role": role, "inflight": 1}]);
        assert_eq!(said(&both, &Value::Null), [true, true]);
        assert_eq!(said(&both, &of("decode")), [true, false]);
        assert_eq!(said(&own, &Value::Null), [true, false], "decode's agent is asked for decode's");
        assert_eq!(said(&own, &of("prefill")), [false, false]);
    }
}
