//! The GPUs' side of `run` and `doctor`: what the threads that read them found, for metrics, `/status` and the operator.
//!
//! Runs on the observing thread: takes a bounded number of readings per turn and never waits for the driver.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use super::config::Config;
use crate::event::{Mono, SECOND};
use crate::export::metrics::{GpuMetrics, MetricsSnapshot};
use crate::gpu::model::{Gpu, Gpus, recovery_meaning, slowed, xid_meaning};
use crate::gpu::windows::{Link, Source};
use crate::gpu::{GpuStanding, Library, Readers, Settings, Standing, gpu_bit, look_once as look};
use crate::pipeline::Pipeline;
use crate::rooms::RoomTable;
use crate::rooms::model::Input;

/// Readings taken in one turn.
const BUDGET: usize = 1024;

/// How long `doctor` waits for the driver: to load it takes a second where GPUs are not kept awake.
const LIMIT: Duration = Duration::from_secs(10);

/// A call that is under way for longer hangs.
const HANGS: u64 = SECOND;

/// GPUs of this host.
pub(super) struct GpuReaders {
    readers: Option<Readers>,
}

fn settings(config: &Config) -> Settings {
    Settings { lib_path: config.gpu.lib_path.clone(), ..Settings::default() }
}

impl GpuReaders {
    /// Starts reading, unless it is switched off. Where that cannot be, it is said once and the agent does without.
    pub(super) fn start(config: &Config) -> Self {
        let readers = config.gpu.enabled.then(|| Readers::start(&settings(config)));
        let readers = readers.and_then(|started| {
            started.inspect_err(|error| tracing::warn!(%error, "GPUs are not read")).ok()
        });
        Self { readers }
    }

    /// Hands what was read since the last turn to the rooms.
    pub(super) fn turn(&self, pipeline: &mut Pipeline) {
        let Some(readers) = &self.readers else { return };
        for reading in readers.readings().take(BUDGET) {
            pipeline.tell(&Input::Gpu(&reading));
        }
    }

    /// What is due once a second: metrics, and how often to read.
    pub(super) fn second(&self, at: Mono, busy: bool, rooms: &RoomTable, snapshot: &mut MetricsSnapshot) {
        let Some(readers) = &self.readers else { return };
        let gpus = rooms.gpus();
        // Where nobody knows whose rooms they are, it may be any.
        let of = if busy { rooms.gpus_in_transfer().map_or(u32::MAX, bits) } else { 0 };
        readers.set_busy(of);
        let standing = readers.standing();
        snapshot
            .capture_lost
            .extend([("gpu", "readings", standing.held), ("gpu", "gpus", standing.left_out.into())]);
        snapshot.gpu = metrics(at, &standing, gpus);
    }

    /// Their part of `/status`.
    pub(super) fn status(&self, now: Mono, known: &Gpus) -> Value {
        let Some(readers) = &self.readers else { return json!({"enabled": false}) };
        let standing = readers.standing();
        let mut value = json(&standing, now);
        if let Some(gpus) = value.get_mut("gpus").and_then(Value::as_array_mut) {
            for (value, (index, _)) in gpus.iter_mut().zip(&standing.gpus) {
                let known = known.iter().find(|(i, _)| i == index);
                if let (Some(value), Some((_, gpu))) = (value.as_object_mut(), known) {
                    value.extend(health(gpu));
                }
            }
        }
        value
    }

    /// Where copy activity comes from, in a word; `None`: nowhere.
    pub(super) fn source(&self) -> Option<&'static str> {
        let standing = self.readers.as_ref()?.standing();
        matches!(standing.nvml, Library::Loaded(_))
            .then_some("the GPU driver's library (NVML), whole devices")
    }
}

fn bits(gpus: impl Iterator<Item = u32>) -> u32 {
    gpus.fold(0, |all, index| all | gpu_bit(index))
}

fn metrics(at: Mono, standing: &Standing, gpus: &Gpus) -> GpuMetrics {
    let mut out = GpuMetrics::default();
    for (_, gpu) in gpus.iter() {
        for (link, (leaving, arriving)) in &gpu.moved {
            out.copy_bytes.push((Arc::clone(&gpu.name), link.label(), "tx", *leaving));
            out.copy_bytes.push((Arc::clone(&gpu.name), link.label(), "rx", *arriving));
        }
        out.xids.extend(gpu.xid_counts.iter().map(|(xid, n)| (Arc::clone(&gpu.name), *xid, *n)));
    }
    let hanging = standing.hanging(at, HANGS);
    for gpu in standing.gpus.values() {
        let name: Arc<str> = gpu.name.as_str().into();
        let answered = gpu.calls.saturating_sub(gpu.late).saturating_sub(gpu.refused);
        for (result, n) in [("answered", answered), ("late", gpu.late), ("refused", gpu.refused)] {
            out.calls.push((Arc::clone(&name), result, n));
        }
        for (reason, n) in [("ambiguous", gpu.ambiguous), ("nonsense", gpu.nonsense)] {
            out.unusable.push((Arc::clone(&name), reason, n));
        }
        let hangs = hanging.iter().any(|(index, ..)| *index == Some(gpu.index));
        for (reason, is) in [("lost", gpu.lost), ("hanging", hangs)] {
            out.unreadable.push((Arc::clone(&name), reason, is.into()));
        }
        out.call_nanos.push((name, u64::try_from(gpu.spent.as_nanos()).unwrap_or(u64::MAX)));
    }
    out
}

/// How the reading stands.
fn json(standing: &Standing, now: Mono) -> Value {
    let (library, why, driver) = match &standing.nvml {
        Library::Looking => ("looking", None, None),
        Library::Absent(why) => ("absent", Some(why), None),
        Library::Loaded(version) => ("loaded", None, version.as_ref()),
    };
    let hanging = standing
        .hanging(now, HANGS)
        .into_iter()
        .map(|(gpu, call, since)| json!({"gpu": gpu, "call": call, "for_s": now.since(since) / SECOND}));
    json!({
        "enabled": true, "library": library, "why": why, "driver": driver,
        "of": "whole devices, never one room or process",
        "gpus": standing.gpus.values().map(gpu_json).collect::<Vec<_>>(),
        "hanging": hanging.collect::<Vec<_>>(), "events_error": standing.events_error,
        "events_refused": standing.events_refused, "events_unknown": standing.events_unknown,
        "left_out": standing.left_out, "readings_held": standing.held,
    })
}

fn gpu_json(gpu: &GpuStanding) -> Value {
    let sources: Map<String, Value> = gpu
        .sources
        .iter()
        .map(|(link, source)| (link.label().to_owned(), json!(source.map(Source::label))))
        .collect();
    json!({
        "index": gpu.index, "gpu": gpu.name, "model": gpu.model, "mig": gpu.mig,
        "virtualization": gpu.virtualization, "sources": sources, "not_read": gpu.not_read,
        "processes": gpu.processes, "lost": gpu.lost, "calls": gpu.calls, "late": gpu.late,
        "refused": gpu.refused, "nonsense": gpu.nonsense, "ambiguous": gpu.ambiguous,
        "calls_ms": gpu.spent.as_secs_f64() * 1000.0,
    })
}

fn health(gpu: &Gpu) -> Map<String, Value> {
    let xids: Map<String, Value> = gpu
        .xid_counts
        .iter()
        .map(|(xid, n)| (xid.to_string(), json!({"count": n, "meaning": xid_meaning(*xid)})))
        .collect();
    let recovery = gpu.recovery.map(|(_, action)| recovery_meaning(action));
    let slowed = gpu.clocks.map(|(_, reasons)| slowed(reasons).collect::<Vec<_>>());
    let fields = json!({
        "xids": xids, "recovery_action": recovery, "slowed_by": slowed, "pids": gpu.processes,
        "out_of_order": gpu.history.disorder(),
    });
    fields.as_object().cloned().unwrap_or_default()
}

/// What the driver has now, for `doctor`; `None`: it is switched off.
pub(super) fn look_once(config: &Config) -> Option<Standing> {
    config.gpu.enabled.then(|| look(&settings(config), LIMIT))
}

pub(super) fn doctor_json(standing: Option<&Standing>) -> Value {
    standing.map_or_else(|| json!({"enabled": false}), |s| json(s, crate::kernel::monotonic()))
}

/// That there is no driver is no fault of the host.
pub(super) fn doctor_text(out: &mut String, standing: Option<&Standing>) {
    let Some(standing) = standing else {
        let _ = writeln!(out, "--   GPUs: not read (gpu.enabled is false)");
        return;
    };
    match &standing.nvml {
        Library::Absent(why) => {
            let _ = writeln!(out, "--   GPUs: their copy activity is not measured: {why}");
        }
        Library::Looking => {}
        Library::Loaded(version) => {
            let version = version.as_deref().unwrap_or("of unknown version");
            let _ = writeln!(out, "ok   GPUs: {} with driver {version}", standing.gpus.len());
        }
    }
    for gpu in standing.gpus.values() {
        let _ = writeln!(out, "       {}", gpu_text(gpu));
        for (what, why) in &gpu.not_read {
            let _ = writeln!(out, "         not read: {what}: {why}");
        }
    }
    let all = standing.in_call.map(|(call, _)| ("GPUs".to_owned(), call));
    let each =
        standing.gpus.values().filter_map(|g| g.in_call.map(|(call, _)| (format!("GPU {}", g.index), call)));
    for (of, call) in all.into_iter().chain(each) {
        let _ = writeln!(
            out,
            "??   {of}: the driver does not come back from {call}; what it would tell is not measured"
        );
    }
}

fn gpu_text(gpu: &GpuStanding) -> String {
    let mut line = format!("{} {}", gpu.index, gpu.name);
    if let Some(model) = &gpu.model {
        let _ = write!(line, ", {model}");
    }
    for link in Link::ALL {
        if let Some(Some(source)) = gpu.sources.get(&link) {
            let _ = write!(line, ", {} by {}", link.label(), source.label());
        }
    }
    if gpu.sources.get(&Link::Pcie).is_some_and(Option::is_none) {
        line.push_str(", PCIe not measured");
    }
    if gpu.mig == Some(true) {
        line.push_str(", MIG: all instances together");
    }
    if let Some(kind) = gpu.virtualization.filter(|k| *k != "none") {
        let _ = write!(line, ", {kind}");
    }
    if let Some(n) = gpu.processes {
        let _ = write!(line, ", {n} processes");
    }
    line
}
