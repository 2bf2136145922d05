//! What the agent measures of itself and of the rooms, put together for metrics and `/status`.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::control::Dropped;
use crate::event::Mono;
use crate::export::metrics::{MetricsSnapshot, PinnedRooms};
use crate::export::owed_instance;
use crate::kernel::{Capture, ProgramCost};
use crate::pipeline::Pipeline;
use crate::rooms::RoomTable;
use crate::rooms::findings::FindingGauge;
use crate::rooms::model::Role;
use crate::sglang::Unknown;
use crate::sglang::message::Backend;
use crate::state;
use crate::verdict::model::{Class, Confidence};

/// Everything for `/metrics`. A counter that the kernel refuses to give is left out, never zero.
pub(super) fn snapshot(at: Mono, pipeline: &Pipeline, capture: &Capture, host_name: &str) -> MetricsSnapshot {
    let mut out = MetricsSnapshot { at, ..MetricsSnapshot::default() };
    rooms(&mut out, pipeline, host_name);
    control(&mut out, pipeline);
    requests(&mut out, pipeline);
    processes(&mut out, pipeline);
    kernel(&mut out, capture);
    out
}

fn rooms(out: &mut MetricsSnapshot, pipeline: &Pipeline, host_name: &str) {
    let table = pipeline.rooms();
    let gauges = table.gauges();
    for open in &gauges.open {
        out.rooms_open.push((open.role, open.state, open.rooms));
        if let Some(age) = open.oldest_age_s {
            out.oldest_open.push((open.role, open.state, nanos(age)));
        }
    }
    let mut pinned: BTreeMap<_, u64> = BTreeMap::new();
    for gauge in &gauges.pinned {
        let key = (gauge.role, gauge.class, gauge.confidence, owed_instance(&gauge.owed_instance, host_name));
        *pinned.entry(key).or_default() += gauge.rooms;
    }
    for ((role, verdict, confidence, owed_instance), rooms) in pinned {
        out.rooms_pinned.push(PinnedRooms { role, verdict, confidence, owed_instance, rooms });
    }
    let counters = table.counters();
    findings(out, table);
    out.rooms_closed = counters.closed;
    out.pins = counters.pins;
}

/// Also at zero: that nothing was found is measured.
fn findings(out: &mut MetricsSnapshot, table: &RoomTable) {
    let gauges = table.finding_gauges();
    for class in Class::ALL.into_iter().filter(|c| c.finds()) {
        for confidence in Confidence::ALL {
            for role in [Some(Role::Prefill), Some(Role::Decode), None] {
                let same = |g: &&FindingGauge| (g.class, g.confidence, g.role) == (class, confidence, role);
                let n = gauges.iter().find(same).map_or(0, |g| g.findings);
                if n > 0 || role.is_some() {
                    out.findings_open.push((class, confidence, role, n));
                }
            }
        }
    }
    out.findings_turned_away = Some(table.findings_turned_away());
}

fn processes(out: &mut MetricsSnapshot, pipeline: &Pipeline) {
    let processes = pipeline.engine_processes();
    for role in [Some(Role::Prefill), Some(Role::Decode), None] {
        let n = processes.values().filter(|r| **r == role).count();
        out.engine_processes.push((role, u64::try_from(n).unwrap_or(u64::MAX)));
    }
    out.capture_lost.push(("rooms", "engine_processes", pipeline.rooms().engine_processes_turned_away()));
}

fn control(out: &mut MetricsSnapshot, pipeline: &Pipeline) {
    let counters = pipeline.control().counters();
    out.messages.extend(counters.messages());
    out.unknown_messages.extend(counters.unknown().map(|(why, n)| {
        let backend = match why {
            Unknown::Mori => Some(Backend::Mori),
            Unknown::Nixl => Some(Backend::Nixl),
            Unknown::Layout => Some(Backend::Mooncake),
            Unknown::FirstFrame => None,
        };
        (backend, n)
    }));
    out.not_captured.extend(counters.not_captured());
    // What is foreign or not judged yet is no loss: nothing of it was wanted.
    let lost = counters.dropped().filter(|(why, _)| !matches!(why, Dropped::Foreign | Dropped::Unjudged));
    out.capture_lost.extend(lost.map(|(why, loss)| ("control", why.label(), loss.count)));
    out.capture_lost.extend([
        ("control", "evicted", counters.evicted),
        ("control", "judgements_dropped", counters.judgements_dropped),
        ("control", "endpoints_dropped", pipeline.endpoints_dropped()),
    ]);
    out.connections.extend(counters.connections().map(|(state, n)| (state.label(), n)));
    let away = pipeline.rooms().counters().turned_away;
    out.capture_lost.extend([
        ("rooms", "rooms", away.rooms),
        ("rooms", "connections", away.connections),
        ("rooms", "names", away.names),
        ("rooms", "links", away.links),
        ("rooms", "pairs", away.pairs),
        ("rooms", "registers", away.registers),
        ("rooms", "acknowledgements", away.acknowledgements),
        ("rooms", "orphans", away.orphans),
        ("rooms", "requests", away.requests),
        ("rooms", "engines", pipeline.rooms().engines_turned_away()),
    ]);
}

fn requests(out: &mut MetricsSnapshot, pipeline: &Pipeline) {
    let control = pipeline.control();
    out.connections_unread.extend(control.unread());
    let (counters, http) = (control.counters(), control.http_counters());
    out.requests.extend(counters.requests());
    out.request_room_not_seen.extend(http.not_seen().map(|(why, n)| (why.label(), n)));
    out.request_room_ignored.extend(http.ignored().map(|(why, n)| (why.label(), n)));
    out.capture_lost.extend(http.lost().map(|(why, n)| ("http", why.label(), n)));
    out.capture_lost.extend([
        ("http", "hole", counters.request_holes.count),
        ("http", "memory", counters.http_memory),
        ("http", "rooms_over_limit", http.rooms_over_limit),
        ("http", "rids", http.rids_dropped),
    ]);
}

fn kernel(out: &mut MetricsSnapshot, capture: &Capture) {
    if let Ok(counters) = capture.counters() {
        out.capture_lost.extend([
            ("kernel", "ring_full", counters.ring_full),
            ("kernel", "storage_refused", counters.storage_refused),
            ("kernel", "recursion", counters.recursion),
            ("kernel", "malformed", counters.malformed),
            ("kernel", "endpoints_full", counters.endpoints_refused),
            ("kernel", "processes_full", counters.processes_refused),
            ("kernel", "mptcp", counters.mptcp),
        ]);
    }
    if let Ok(costs) = capture.cost() {
        for cost in costs {
            out.bpf_runs.push((cost.name.to_owned(), cost.runs));
            if cost.samples > 0 {
                out.bpf_run_nanos.push((cost.name.to_owned(), whole(&cost)));
            }
        }
    }
}

/// Run time of all runs, nanoseconds, from the mean of those that were timed.
fn whole(cost: &ProgramCost) -> u64 {
    #[allow(clippy::cast_precision_loss, reason = "an estimate from a sample")]
    let seconds = cost.sampled_seconds / cost.samples as f64 * cost.runs as f64;
    nanos(seconds)
}

/// What became of the state file, for `/metrics`. Nothing of it is there where there is none.
pub(super) fn state(out: &mut MetricsSnapshot, counters: &state::Counters) {
    out.state_dropped.extend(counters.dropped().map(|(why, n)| (why.label(), n)));
    out.state_restored.extend(counters.restored());
    let (written, failed) = counters.writes();
    out.state_writes.extend([("written", written), ("failed", failed)]);
    out.state_bytes = (written > 0).then(|| counters.bytes());
    out.capture_lost.push(("state", "not_written", counters.not_written()));
}

/// The state file's part of `/status`.
pub(super) fn state_status(path: &std::path::Path, counters: &state::Counters) -> Value {
    let dropped: serde_json::Map<String, Value> =
        counters.dropped().map(|(why, n)| (why.label().to_owned(), json!(n))).collect();
    let restored: serde_json::Map<String, Value> =
        counters.restored().map(|(what, n)| (what.to_owned(), json!(n))).collect();
    let (written, failed) = counters.writes();
    json!({
        "file": path.display().to_string(), "written": written, "failed": failed, "bytes": counters.bytes(),
        "not_written": counters.not_written(), "restored": restored, "dropped": dropped,
    })
}

/// The capture's part of `/status`: hook chosen and why, sockets, losses, cost. What the kernel refuses to
/// tell is null.
pub(super) fn status(capture: &Capture) -> Value {
    let refused: Vec<_> =
        capture.refused().iter().map(|r| json!({"hook": r.hook.name(), "why": r.why})).collect();
    let missing: Vec<_> = capture
        .missing()
        .iter()
        .map(|m| json!({"program": m.name, "not_known": m.shows, "why": m.why}))
        .collect();
    let counters = capture.counters().ok().map(|c| {
        let not_captured: serde_json::Map<String, Value> =
            c.not_captured.iter().map(|(why, n)| (why.label().to_owned(), json!(n))).collect();
        json!({
            "records": c.records, "ring_full": c.ring_full, "storage_refused": c.storage_refused,
            "recursion": c.recursion, "foreign": c.foreign, "muted": c.muted, "mptcp": c.mptcp,
            "malformed": c.malformed, "endpoints_refused": c.endpoints_refused,
            "retransmissions_merged": c.retransmissions_merged,
            "processes_refused": c.processes_refused, "not_captured": not_captured,
        })
    });
    let sockets = capture.sockets().ok().map(|s| {
        json!({
            "listening": s.listening, "connecting": s.connecting, "pending": s.pending, "zmtp": s.zmtp, "http": s.http, "carriers": s.carriers,
        })
    });
    json!({
        "hook": capture.hook().name(), "refused": refused, "missing": missing, "counters": counters,
        "sockets": sockets,
    })
}

/// The message decoders' part of `/status`.
pub(super) fn control_status(pipeline: &Pipeline) -> Value {
    let counters = pipeline.control().counters();
    let dropped: serde_json::Map<String, Value> = counters
        .dropped()
        .map(|(why, loss)| (why.label().to_owned(), json!({"count": loss.count, "bytes": loss.bytes})))
        .collect();
    let connections: serde_json::Map<String, Value> =
        counters.connections().map(|(state, n)| (state.label().to_owned(), json!(n))).collect();
    let unknown: Vec<Value> = pipeline
        .control()
        .unknown_shapes()
        .map(|(shape, n)| json!({"frames": shape.frames, "lengths": shape.lengths.as_slice(), "count": n}))
        .collect();
    let unread: serde_json::Map<String, Value> =
        pipeline.control().unread().map(|(why, n)| (why.to_owned(), json!(n))).collect();
    json!({
        "unread": unread, "speechless": counters.speechless,
        "events": counters.events, "inputs": counters.inputs, "extra_frames": counters.extra_frames,
        "connections": connections, "dropped": dropped, "unknown_shapes": unknown,
    })
}

/// The part of `/status` on requests.
pub(super) fn request_status(pipeline: &Pipeline) -> Value {
    type Counts = serde_json::Map<String, Value>;
    let (counters, http) = (pipeline.control().counters(), pipeline.control().http_counters());
    let requests: Counts = counters.requests().map(|(route, n)| (route.to_owned(), json!(n))).collect();
    let not_seen: Counts = http.not_seen().map(|(why, n)| (why.label().to_owned(), json!(n))).collect();
    let ignored: Counts = http.ignored().map(|(why, n)| (why.label().to_owned(), json!(n))).collect();
    let lost: Counts = http.lost().map(|(why, n)| (why.label().to_owned(), json!(n))).collect();
    let unreadable: Counts =
        counters.unreadable().map(|(why, n)| (why.label().to_owned(), json!(n))).collect();
    json!({
        "requests": requests, "answers": http.answers, "answers_unasked": http.answers_unasked,
        "ends_concluded": http.ends_concluded, "rooms": http.rooms, "rooms_over_limit": http.rooms_over_limit,
        "rids_dropped": http.rids_dropped, "room_not_seen": not_seen, "room_ignored": ignored,
        "position_lost": lost, "lost_bytes": http.lost_bytes, "memory": counters.http_memory,
        "holes": {"count": counters.request_holes.count, "bytes": counters.request_holes.bytes},
        "unreadable": unreadable,
    })
}

/// The room table's part of `/status`.
pub(super) fn room_status(pipeline: &Pipeline) -> Value {
    let gauges = pipeline.rooms().gauges();
    json!({
        "views_open": gauges.rooms, "overdue": pipeline.rooms().overdue_keys().count(),
        "closed_kept": gauges.closed_kept, "connections": gauges.connections,
    })
}

fn nanos(seconds: f64) -> u64 {
    std::time::Duration::try_from_secs_f64(seconds)
        .map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
}
