//! What a scripted agent answers to `roomtrace top`: of the unit tests in `src/cli/top` and of `tests/top_terminal.rs`.
//!
//! Rooms are made from the record that the exporters' tests hold letter by letter.
#![allow(
    dead_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "tests; each test file uses its part"
)]

use serde_json::{Value, json};

/// Of a pinned room, as the agent writes it.
const RECORD: &str = include_str!("../fixtures/export/room_pinned.json");
/// Of a finding.
const FINDING: &str = include_str!("../fixtures/export/finding_opened.json");

/// Seconds between two looks of the counters below.
pub(crate) const STEP: u64 = 2;

/// What one room is told by.
pub(crate) struct Room {
    pub(crate) number: &'static str,
    pub(crate) age: f64,
    /// Class and confidence; `None`: nothing is overdue.
    pub(crate) verdict: Option<(&'static str, &'static str)>,
    pub(crate) pinned: bool,
    /// Role and rank of who owes, the message, and its address.
    pub(crate) owes: Option<(&'static str, u32, &'static str, &'static str)>,
    pub(crate) rid: Option<&'static str>,
}

const fn room(
    number: &'static str,
    age: f64,
    verdict: Option<(&'static str, &'static str)>,
    pinned: bool,
    owes: Option<(&'static str, u32, &'static str, &'static str)>,
) -> Room {
    Room { number, age, verdict, pinned, owes, rid: None }
}

/// The rooms of the story: a receive thread that died and pins three, an ABORT, a silent one; two that wait; two healthy ones.
pub(crate) const ROOMS: &[Room] = &[
    Room {
        rid: Some("chatcmpl-7f3a"),
        ..room(
            "5123456789012345678",
            192.4,
            Some(("receiver_silent", "certain")),
            true,
            Some(("prefill", 3, "STATUS", "10.0.0.1:41207")),
        )
    },
    room(
        "18446744073709551615",
        188.0,
        Some(("receiver_silent", "certain")),
        true,
        Some(("prefill", 3, "STATUS", "10.0.0.1:41207")),
    ),
    room(
        "7",
        12.1,
        Some(("abort_before_entry", "likely")),
        true,
        Some(("prefill", 0, "STATUS", "10.0.0.1:4000")),
    ),
    room(
        "6006006006006006006",
        47.0,
        Some(("transfer_worker_silent", "possible")),
        true,
        Some(("prefill", 0, "STATUS", "10.0.0.1:4000")),
    ),
    room("812", 31.0, Some(("concluded_but_held", "possible")), true, None),
    room(
        "4100000000000000001",
        75.5,
        Some(("queued", "likely")),
        false,
        Some(("decode", 1, "METADATA", "10.0.0.2:39871")),
    ),
    room("4100000000000000002", 21.0, Some(("unknown", "possible")), false, None),
    room("91", 0.4, None, false, None),
    room("4200000000000000000", 1.9, None, false, None),
];

/// The record of a room.
pub(crate) fn record(room: &Room) -> Value {
    let mut r: Value = serde_json::from_str(RECORD).unwrap();
    r["room"] = room.number.into();
    r["age_s"] = room.age.into();
    r["pinned"] = room.pinned.into();
    r["event"] = if room.pinned { "room_pinned" } else { "room_open" }.into();
    r["request"] = room.rid.map_or(Value::Null, |rid| json!({"rid": rid, "prefill": null, "decode": null}));
    let Some((class, confidence)) = room.verdict else {
        r["verdict"] = Value::Null;
        return r;
    };
    r["verdict"]["class"] = class.into();
    r["verdict"]["confidence"] = confidence.into();
    r["verdict"]["evidence"] = json!([format!("evidence of {}", room.number)]);
    if class == "receiver_silent" {
        r["verdict"]["group"] = "00000000000000aa".into();
        r["verdict"]["group_size"] = 2.into();
        r["verdict"]["ends_by_itself"] = Value::Null;
    }
    if let Some((role, rank, what, at)) = room.owes {
        r["verdict"]["expected"] = what.into();
        r["verdict"]["owed_by"]["role"] = role.into();
        r["verdict"]["owed_by"]["rank"] = rank.into();
        r["verdict"]["owed_by"]["endpoint"] = at.into();
        r["views"]["prefill"]["ranks"][0]["endpoint"] =
            if role == "prefill" { at } else { "10.0.0.1:4000" }.into();
    } else {
        r["verdict"]["expected"] = Value::Null;
        r["verdict"]["owed_by"] = Value::Null;
    }
    for m in r["views"]["prefill"]["messages"].as_array_mut().unwrap() {
        m["peer"] = "10.0.0.2:39871".into();
    }
    r
}

/// A page of rooms.
pub(crate) fn list(rooms: &[Value]) -> Value {
    json!({ "rooms": rooms, "next": null })
}

/// The rooms of [`ROOMS`] that are pinned; overdue; neither.
pub(crate) fn lists() -> [Value; 3] {
    let of =
        |wanted: &dyn Fn(&&Room) -> bool| list(&ROOMS.iter().filter(wanted).map(record).collect::<Vec<_>>());
    [of(&|r| r.pinned), of(&|r| !r.pinned && r.verdict.is_some()), of(&|r| !r.pinned)]
}

/// The findings of the story.
pub(crate) fn findings() -> Value {
    let mut dead: Value = serde_json::from_str(FINDING).unwrap();
    dead["class"] = "receiver_silent".into();
    dead["confidence"] = "certain".into();
    dead["group"] = "00000000000000aa".into();
    dead["engine"]["rank"] = 3.into();
    dead["engine"]["endpoint"] = "10.0.0.1:41207".into();
    dead["rooms"] = json!(["5123456789012345678", "18446744073709551615"]);
    dead["evidence"] =
        json!(["thread 2817 of sglang::schedul ended with code 1 right after a foreign frame"]);
    let mut gauge: Value = serde_json::from_str(FINDING).unwrap();
    gauge["class"] = "gauge_unexplained".into();
    gauge["confidence"] = "possible".into();
    gauge["group"] = "00000000000000bb".into();
    gauge["rooms"] = json!([]);
    gauge["room_count"] = 0.into();
    gauge["evidence"] = json!(["the engine counts 2 requests in flight, 1 room can be one of them"]);
    json!({ "findings": [dead, gauge], "total": 2, "closed": [] })
}

/// `/status`, as far as `top` reads it, at look `n`.
pub(crate) fn status(n: u64) -> Value {
    let pair = |decode: &str, concluded: Value, last: f64| {
        json!({
            "prefill": "10.0.0.1:4000", "decode": decode, "session": "s", "decode_rank": 0, "backend": "mooncake",
            "concluded": concluded, "last_concluded_s": last,
        })
    };
    json!({
        "version": "0.1.0", "host": "node-a", "uptime_s": 273_930 + STEP * n,
        "capture": {
            "hook": "sock",
            "missing": [{"program": "stand", "not_known": "unread bytes", "why": "the kernel has no iterator"}],
        },
        "rooms": {"views_open": 9, "overdue": 2, "closed_kept": 100, "connections": 12},
        "peers": {"total": 3, "listed": [
            pair("10.0.0.2:39871", (40_000 + 1_624 * n).into(), 0.2),
            pair("10.0.0.2:39872", (100 + 3 * n).into(), 7.0),
            pair("10.0.0.3:39871", Value::Null, 4000.0),
        ]},
    })
}

/// `/metrics`, as far as `top` reads them, at look `n`.
pub(crate) fn metrics(n: u64) -> String {
    let cpu = [0.024, 0.012].map(|per_look| per_look * f64::from(u32::try_from(n).unwrap()));
    format!(
        "# HELP roomtrace_rooms_open Rooms that have not ended.\n# TYPE roomtrace_rooms_open gauge\n\
         roomtrace_rooms_open{{role=\"prefill\",state=\"WaitingForInput\"}} 9\n\
         roomtrace_rooms_open{{role=\"decode\",state=\"Failed\"}} 0\n\
         roomtrace_rooms_pinned{{role=\"prefill\",verdict=\"receiver_silent\",confidence=\"certain\",owed_instance=\"10.0.0.1\"}} 2\n\
         roomtrace_rooms_pinned{{role=\"prefill\",verdict=\"abort_before_entry\",confidence=\"likely\",owed_instance=\"10.0.0.1\"}} 1\n\
         roomtrace_rooms_pinned{{role=\"prefill\",verdict=\"transfer_worker_silent\",confidence=\"possible\",owed_instance=\"10.0.0.1\"}} 2\n\
         roomtrace_oldest_open_room_age_seconds{{role=\"prefill\",state=\"WaitingForInput\"}} 192.4\n\
         roomtrace_rooms_closed_total{{role=\"prefill\",outcome=\"success\"}} {}\n\
         roomtrace_rooms_closed_total{{role=\"prefill\",outcome=\"failed\"}} {}\n\
         roomtrace_messages_total{{direction=\"sent\",backend=\"mooncake\",kind=\"STATUS\"}} {}\n\
         roomtrace_capture_lost_total{{stage=\"kernel\",reason=\"ring_full\"}} {}\n\
         roomtrace_capture_lost_total{{stage=\"rooms\",reason=\"rooms\"}} 0\n\
         roomtrace_export_dropped_total{{signal=\"events\",reason=\"queue_full\"}} 0\n\
         roomtrace_bpf_run_seconds_total{{program=\"recvmsg\"}} {}\n\
         roomtrace_bpf_run_seconds_total{{program=\"sendmsg\"}} 2\n\
         process_cpu_seconds_total {}\nprocess_resident_memory_bytes 43000000\nprocess_start_time_seconds 1700000000\n",
        90_000 + 1_624 * n,
        50 + 6 * n,
        700_000 + 8_200 * n,
        12 + 6 * n,
        3.0 + cpu[1],
        100.0 + cpu[0],
    )
}
