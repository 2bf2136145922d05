//! What the agent measures of itself and of the rooms, put together for metrics and `/status`.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::event::Mono;
use crate::export::metrics::{MetricsSnapshot, PinnedRooms};
use crate::export::owed_instance;
use crate::kernel::Capture;
use crate::pipeline::Pipeline;
use crate::rooms::model::Role;

/// Everything for `/metrics`. A counter that the kernel refuses to give is left out, never zero.
pub(super) fn snapshot(at: Mono, pipeline: &Pipeline, capture: &Capture, host_name: &str) -> MetricsSnapshot {
    let mut out = MetricsSnapshot { at, ..MetricsSnapshot::default() };
    rooms(&mut out, pipeline, host_name);
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
    for room in table.pinned() {
        let Some(verdict) = &room.verdict else { continue };
        let role = if room.prefill.is_some() { Role::Prefill } else { Role::Decode };
        let key = (role, verdict.class, verdict.confidence, owed_instance(verdict, host_name));
        *pinned.entry(key).or_default() += 1;
    }
    for ((role, verdict, confidence, owed_instance), rooms) in pinned {
        out.rooms_pinned.push(PinnedRooms { role, verdict, confidence, owed_instance, rooms });
    }
    let counters = table.counters();
    out.rooms_closed = counters.closed;
    out.pins = counters.pins;
}

fn kernel(out: &mut MetricsSnapshot, capture: &Capture) {
    if let Ok(counters) = capture.counters() {
        out.not_captured = counters.not_captured;
        out.capture_lost.extend([
            ("kernel", "ring_full", counters.ring_full),
            ("kernel", "storage_refused", counters.storage_refused),
            ("kernel", "recursion", counters.recursion),
            ("kernel", "malformed", counters.malformed),
            ("kernel", "endpoints_full", counters.endpoints_refused),
            ("kernel", "mptcp", counters.mptcp),
        ]);
    }
    if let Ok(costs) = capture.cost() {
        for cost in costs {
            out.bpf_runs.push((cost.name.to_owned(), cost.runs));
        }
    }
}

/// The capture's part of `/status`.
pub(super) fn status(capture: &Capture) -> Value {
    json!({
        "hook": capture.hook().name(),
        "refused": capture.refused().iter().map(|r| json!({"hook": r.hook.name(), "why": r.why})).collect::<Vec<_>>(),
    })
}

/// The message decoders' part of `/status`.
pub(super) fn control_status(pipeline: &Pipeline) -> Value {
    let counters = pipeline.control().counters();
    json!({"events": counters.events, "inputs": counters.inputs})
}

/// The room table's part of `/status`.
pub(super) fn room_status(pipeline: &Pipeline) -> Value {
    let gauges = pipeline.rooms().gauges();
    json!({"views_open": gauges.rooms, "closed_kept": gauges.closed_kept, "connections": gauges.connections})
}

fn nanos(seconds: f64) -> u64 {
    std::time::Duration::try_from_secs_f64(seconds)
        .map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX))
}
