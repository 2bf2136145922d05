//! The time line of a room: messages, requests, stages, GPUs, network, transfer engine and the engines' own numbers in one order.
//! Pure: text from the JSON record that scripts get.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]

use std::fmt::Write as _;

use serde_json::Value;

use super::explain::since;
use super::{chart, clock, list, text};

/// Messages of both views in order of time, each with direction and peer.
pub(super) fn time_line(out: &mut String, record: &Value) {
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
    numbers(&mut lines, record);
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

/// What the engines said in numbers, where they said it last.
fn numbers<'a>(lines: &mut Vec<(&'a str, String)>, record: &'a Value) {
    for n in list(&record["engine_numbers"]) {
        let Some(at) = n["to"].as_str() else { continue };
        let role = n["role"].as_str().unwrap_or("engine");
        let names = [
            ("inflight", "in hand-over"),
            ("bootstrap", "before it"),
            ("waiting", "waiting"),
            ("running", "running"),
        ];
        let paused = n["paused"].as_u64().filter(|n| *n > 0).map(|n| format!("{n} paused"));
        let count = |(key, name): (&str, &str)| Some(format!("{} {name}", n[key].as_u64()?));
        let mut said: Vec<String> = names.into_iter().filter_map(count).chain(paused).collect();
        said.extend(
            n["progress_moves"]
                .as_bool()
                .map(|moves| format!("progress counters {}", if moves { "move" } else { "stand still" })),
        );
        if said.is_empty() {
            continue;
        }
        let times = match n["answers"].as_u64() {
            Some(n @ 2..) => format!(", {n} answers"),
            _ => String::new(),
        };
        let times = n["from"]
            .as_str()
            .filter(|from| *from != at)
            .map_or(times.clone(), |from| format!("{times} since {}", clock(from)));
        let old = if n["stale"].as_bool() == Some(true) { " (counts up to 30 s old)" } else { "" };
        lines.push((at, format!("{role:7} says     {}{times}{old}", said.join(", "))));
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_an_engine_says_stands_where_it_said_it_last() {
        let numbers = |to: &str, moves: Option<bool>, stale| {
            json!({"role": "prefill", "from": "2026-11-29T02:41:07Z", "to": to, "answers": 3, "inflight": 1, "bootstrap": null,
                   "waiting": 0, "running": null, "paused": 0, "progress_moves": moves, "stale": stale})
        };
        let record = json!({
            "opened_at": "2026-11-29T02:41:00Z",
            "engine_numbers": [numbers("2026-11-29T02:41:37Z", Some(false), false), numbers("2026-11-29T02:41:07Z", None, true)],
        });
        let mut out = String::new();
        time_line(&mut out, &record);
        let lines: Vec<&str> = out.lines().filter(|l| l.contains("says")).map(str::trim).collect();
        assert_eq!(
            lines,
            [
                "02:41:07    +7.000 prefill says     1 in hand-over, 0 waiting, 3 answers (counts up to 30 s old)",
                "02:41:37   +37.000 prefill says     1 in hand-over, 0 waiting, progress counters stand still, 3 answers since 02:41:07",
            ]
        );
    }
}
