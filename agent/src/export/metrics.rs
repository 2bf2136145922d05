//! The metrics: one table from which `/metrics`, OTLP and `docs/metrics.md` are all made.
//!
//! Pure. [`MetricsSnapshot`] is what the pipeline thread fills about once a second. What is not measured is
//! absent (`None`, or no entry), never zero. Room, process id and address are never labels; the one exception
//! is stated at [`PinnedRooms::owed_instance`].

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use super::counters::{Counters, Reason, Signal};
pub use super::metrics_gpu::GpuMetrics;
pub use super::metrics_network::NetworkMetrics;
use super::process::Process;
use super::{metrics_gpu, metrics_network};
use crate::event::{Direction, Mono, NotCaptured};
use crate::rooms::model::{Outcome, Role};
use crate::sglang::message::{Backend, Kind, KvPoll};
use crate::verdict::model::{Class, Confidence};

/// Debtors named at once; more are `other`.
pub const INSTANCES: usize = 100;

/// Label value for debtors beyond [`INSTANCES`].
pub const OTHER: &str = "other";

/// State of everything the pipeline measures, at one moment. Lists have one entry per combination of labels
/// (a second one for the same combination is an error of the filler and shows as a duplicate series).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MetricsSnapshot {
    /// When it was taken.
    pub at: Mono,
    /// Open views by role and KV poll state.
    pub rooms_open: Vec<(Role, KvPoll, u64)>,
    /// Pinned rooms.
    pub rooms_pinned: Vec<PinnedRooms>,
    /// Open findings by class, confidence and role of the engine (`None`: neither engine's, or not known).
    pub findings_open: Vec<(Class, Confidence, Option<Role>, u64)>,
    /// Findings that found no place since the agent started, and what was not measured for one.
    pub findings_turned_away: Option<u64>,
    /// Age of the oldest open view by role and state, nanoseconds. No entry where none is open.
    pub oldest_open: Vec<(Role, KvPoll, u64)>,
    /// Views ended since the agent started.
    pub rooms_closed: Vec<(Role, Outcome, u64)>,
    /// Rooms that became pinned since the agent started.
    pub pins: Vec<(Role, Class, u64)>,
    /// Messages decoded.
    pub messages: Vec<(Direction, Backend, Kind, u64)>,
    /// Well-formed ZMTP messages of no known shape, by the backend of their connection where known.
    pub unknown_messages: Vec<(Option<Backend>, u64)>,
    /// Bytes or records lost, by stage and reason (label values of the stages).
    pub capture_lost: Vec<(&'static str, &'static str, u64)>,
    /// Calls whose bytes were not captured.
    pub not_captured: Vec<(NotCaptured, u64)>,
    /// Engine processes seen, by role; `None`: role not known yet.
    pub engine_processes: Vec<(Option<Role>, u64)>,
    /// Connections by state (label values of the control stage).
    pub connections: Vec<(&'static str, u64)>,
    /// Requests begun, by what they ask for.
    pub requests: Vec<(&'static str, u64)>,
    /// Requests for work whose room was not seen, by reason.
    pub request_room_not_seen: Vec<(&'static str, u64)>,
    /// Requests for work whose room is none, by reason.
    pub request_room_ignored: Vec<(&'static str, u64)>,
    /// Connections let go, by reason.
    pub connections_unread: Vec<(&'static str, u64)>,
    /// Requests to the receiver of engines' spans, by transport and what became of them.
    pub span_requests: Vec<(&'static str, &'static str, u64)>,
    /// Spans that it took, by kind.
    pub spans_received: Vec<(&'static str, u64)>,
    /// Requests of engines that spans told of, by whether their room was found.
    pub span_joins: Vec<(&'static str, u64)>,
    /// Spans that wait for the rooms.
    pub spans_waiting: Option<u64>,
    /// Run time of each kernel program, nanoseconds, extrapolated from a sample of its runs.
    pub bpf_run_nanos: Vec<(String, u64)>,
    /// Runs of each kernel program.
    pub bpf_runs: Vec<(String, u64)>,
    /// What a state file held that was not taken over, by reason.
    pub state_dropped: Vec<(&'static str, u64)>,
    /// What was taken over from it at the start, by kind.
    pub state_restored: Vec<(&'static str, u64)>,
    /// Attempts to write it, by result.
    pub state_writes: Vec<(&'static str, u64)>,
    /// Its length, bytes.
    pub state_bytes: Option<u64>,
    /// What is measured of the GPUs.
    pub gpu: GpuMetrics,
    /// What is measured of RDMA ports and of the engines' own connections.
    pub network: NetworkMetrics,
    /// Batches that the optional probes saw, by what became of them.
    pub batches: Vec<(&'static str, u64)>,
    /// Engine processes that were looked at for probing, by result.
    pub probed_processes: Vec<(&'static str, u64)>,
}

/// Pinned rooms with the same labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedRooms {
    /// View that waits.
    pub role: Role,
    /// Class.
    pub verdict: Class,
    /// How sure.
    pub confidence: Confidence,
    /// Whose move is missing: the host name where its endpoint is a loopback address, else the address of the
    /// endpoint without its port; `unknown` where there is none. See [`super::owed_instance`].
    pub owed_instance: String,
    /// How many.
    pub rooms: u64,
}

/// Keeps the number of debtors bounded: a name stays admitted while it owes a room, and gives way to a new
/// one only when the table is full and it owes nothing any more.
#[derive(Debug, Default)]
pub(super) struct Instances {
    admitted: BTreeSet<String>,
}

impl Instances {
    /// Replaces names beyond the bound by [`OTHER`] and sums what then has the same labels.
    pub(super) fn bound(&mut self, pinned: &mut Vec<PinnedRooms>) {
        let owing: BTreeSet<&str> = pinned.iter().map(|p| p.owed_instance.as_str()).collect();
        for name in &owing {
            if self.admitted.len() >= INSTANCES && !self.admitted.contains(*name) {
                self.admitted.retain(|a| owing.contains(a.as_str()));
            }
            if self.admitted.len() < INSTANCES {
                self.admitted.insert((*name).to_owned());
            }
        }
        let mut summed: Vec<PinnedRooms> = Vec::with_capacity(pinned.len().min(4 * INSTANCES));
        for mut entry in pinned.drain(..) {
            if !self.admitted.contains(&entry.owed_instance) {
                OTHER.clone_into(&mut entry.owed_instance);
            }
            let same = |s: &&mut PinnedRooms| {
                s.role == entry.role
                    && s.verdict == entry.verdict
                    && s.confidence == entry.confidence
                    && s.owed_instance == entry.owed_instance
            };
            match summed.iter_mut().find(same) {
                Some(s) => s.rooms += entry.rooms,
                None => summed.push(entry),
            }
        }
        *pinned = summed;
    }
}

/// What a metric is, to Prometheus and to OTLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Type {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Distribution.
    Histogram,
}

impl Type {
    /// Its name in the reference.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Labels of one value, in the order of the descriptor.
pub(super) type Labels = Vec<(&'static str, Cow<'static, str>)>;

/// One value of a metric.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) labels: Labels,
    pub(super) value: f64,
}

/// Everything a metric can be read from.
#[derive(Clone, Debug)]
pub(super) struct Source {
    /// Latest from the pipeline; `None` before the first.
    pub(super) snapshot: Option<Arc<MetricsSnapshot>>,
    /// What the export itself lost.
    pub(super) counters: Arc<Counters>,
    /// The agent's own process.
    pub(super) process: Process,
}

/// One metric.
pub(super) struct Descriptor {
    /// Name in Prometheus text, with unit and `_total`.
    pub(super) name: &'static str,
    pub(super) kind: Type,
    /// UCUM unit, for OTLP.
    pub(super) unit: &'static str,
    pub(super) help: &'static str,
    pub(super) labels: &'static [&'static str],
    pub(super) read: fn(&Source) -> Vec<Point>,
}

impl Descriptor {
    /// Name without the suffix that encoders add themselves.
    pub(super) fn stem(&self) -> &'static str {
        self.name.strip_suffix("_total").unwrap_or(self.name)
    }
}

/// Name of the histogram, which is recorded when a view ends rather than read from a snapshot.
pub(super) const PHASE_DURATION: &str = "roomtrace_room_phase_duration_seconds";
/// Its help text.
pub(super) const PHASE_DURATION_HELP: &str =
    "Time views spent in each phase; exemplars carry the room's trace id.";
/// Its labels.
pub(super) const PHASE_DURATION_LABELS: [&str; 2] = ["role", "phase"];
/// Its bounds, seconds: from a transfer inside a rack to the engine's own timeouts of 300 s.
pub(super) const PHASE_DURATION_BOUNDS: [f64; 15] =
    [0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0];

/// Every metric but the histogram.
pub(super) fn metrics() -> impl Iterator<Item = &'static Descriptor> {
    METRICS.iter().chain(metrics_gpu::METRICS).chain(metrics_network::METRICS)
}

static METRICS: &[Descriptor] = &[
    Descriptor {
        name: "roomtrace_rooms_open",
        kind: Type::Gauge,
        unit: "{room}",
        help: "Rooms that have not ended, by the view of this host that is open.",
        labels: &["role", "state"],
        read: |s| {
            s.list(
                |m| &m.rooms_open,
                |(r, k, n)| (labels([("role", r.label()), ("state", k.name())]), count(*n)),
            )
        },
    },
    Descriptor {
        name: "roomtrace_rooms_pinned",
        kind: Type::Gauge,
        unit: "{room}",
        help: "Rooms that will not end by themselves, by verdict and by whoever owes the next move. \
               owed_instance is a host name or an address without port, at most 100 of them, then `other`.",
        labels: &["role", "verdict", "confidence", "owed_instance"],
        read: |s| s.list(|m| &m.rooms_pinned, |p| (pinned_labels(p), count(p.rooms))),
    },
    Descriptor {
        name: "roomtrace_findings_open",
        kind: Type::Gauge,
        unit: "{finding}",
        help: "What is wrong with engines, and causes that pin rooms: one dead worker is one, however many rooms it pins. \
               role `unknown`: neither engine's, or not known.",
        labels: &["class", "confidence", "role"],
        read: |s| s.list(|m| &m.findings_open, finding_point),
    },
    Descriptor {
        name: "roomtrace_findings_turned_away_total",
        kind: Type::Counter,
        unit: "{finding}",
        help: "Findings that were not opened, and ABORTs and sessions that were not measured, because a table was full.",
        labels: &[],
        read: |s| plain(s.snapshot.as_ref().and_then(|m| m.findings_turned_away).map(count)),
    },
    Descriptor {
        name: "roomtrace_oldest_open_room_age_seconds",
        kind: Type::Gauge,
        unit: "s",
        help: "Age of the oldest open room; absent while none is open.",
        labels: &["role", "state"],
        read: |s| {
            s.list(
                |m| &m.oldest_open,
                |(r, k, n)| (labels([("role", r.label()), ("state", k.name())]), seconds(*n)),
            )
        },
    },
    Descriptor {
        name: "roomtrace_rooms_closed_total",
        kind: Type::Counter,
        unit: "{room}",
        help: "Rooms that ended; outcome `unknown`: they ended where nothing could be seen of it.",
        labels: &["role", "outcome"],
        read: |s| {
            s.list(
                |m| &m.rooms_closed,
                |(r, o, n)| (labels([("role", r.label()), ("outcome", o.label())]), count(*n)),
            )
        },
    },
    Descriptor {
        name: "roomtrace_pins_total",
        kind: Type::Counter,
        unit: "{room}",
        help: "Rooms that became pinned, recovered ones included.",
        labels: &["role", "verdict"],
        read: |s| {
            s.list(
                |m| &m.pins,
                |(r, c, n)| (labels([("role", r.label()), ("verdict", c.label())]), count(*n)),
            )
        },
    },
    Descriptor {
        name: "roomtrace_messages_total",
        kind: Type::Counter,
        unit: "{message}",
        help: "Control messages decoded, as sent or received by sockets of this host.",
        labels: &["direction", "backend", "kind"],
        read: |s| {
            s.list(
                |m| &m.messages,
                |(d, b, k, n)| {
                    let direction = super::record::direction(*d);
                    (
                        labels([("direction", direction), ("backend", b.label()), ("kind", k.name())]),
                        count(*n),
                    )
                },
            )
        },
    },
    Descriptor {
        name: "roomtrace_unknown_messages_total",
        kind: Type::Counter,
        unit: "{message}",
        help: "Well-formed messages of no known shape on control connections: a newer or foreign engine.",
        labels: &["backend"],
        read: |s| {
            s.list(
                |m| &m.unknown_messages,
                |(b, n)| (labels([("backend", b.map_or("unknown", Backend::label))]), count(*n)),
            )
        },
    },
    Descriptor {
        name: "roomtrace_capture_lost_total",
        kind: Type::Counter,
        unit: "{event}",
        help: "What was lost between kernel and rooms; verdicts that rest on it become `unknown`.",
        labels: &["stage", "reason"],
        read: |s| {
            s.list(|m| &m.capture_lost, |(st, re, n)| (labels([("stage", st), ("reason", re)]), count(*n)))
        },
    },
    Descriptor {
        name: "roomtrace_not_captured_total",
        kind: Type::Counter,
        unit: "{call}",
        help: "Calls on followed connections of which not all bytes are known; `middle`: left out on purpose.",
        labels: &["reason"],
        read: |s| s.list(|m| &m.not_captured, |(r, n)| (labels([("reason", r.label())]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_engine_processes",
        kind: Type::Gauge,
        unit: "{process}",
        help: "Engine processes seen; role `unknown` until their arguments, their engine or a message tells it.",
        labels: &["role"],
        read: |s| {
            s.list(
                |m| &m.engine_processes,
                |(r, n)| (labels([("role", r.map_or("unknown", Role::label))]), count(*n)),
            )
        },
    },
    Descriptor {
        name: "roomtrace_connections",
        kind: Type::Gauge,
        unit: "{connection}",
        help: "Connections of engines by what is known of them.",
        labels: &["state"],
        read: |s| s.list(|m| &m.connections, |(st, n)| (labels([("state", st)]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_connections_unread_total",
        kind: Type::Counter,
        unit: "{connection}",
        help: "Connections that carry something that is not read, each counted once, by what that is.",
        labels: &["reason"],
        read: |s| s.list(|m| &m.connections_unread, |(r, n)| (labels([("reason", r)]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_requests_total",
        kind: Type::Counter,
        unit: "{request}",
        help: "Requests seen at HTTP ports of engines and bootstrap servers, and sent by engines, by what they ask for.",
        labels: &["route"],
        read: |s| s.list(|m| &m.requests, |(r, n)| (labels([("route", r)]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_request_room_not_seen_total",
        kind: Type::Counter,
        unit: "{request}",
        help: "Requests for work that may name a room in bytes that were not captured or cannot be read.",
        labels: &["reason"],
        read: |s| s.list(|m| &m.request_room_not_seen, |(r, n)| (labels([("reason", r)]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_request_room_ignored_total",
        kind: Type::Counter,
        unit: "{request}",
        help: "Requests for work whose room is none: the engine's own warm-up and health checks.",
        labels: &["reason"],
        read: |s| s.list(|m| &m.request_room_ignored, |(r, n)| (labels([("reason", r)]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_spans_requests_total",
        kind: Type::Counter,
        unit: "{request}",
        help: "OTLP requests to the receiver of the engines' spans, by what became of them. `busy`, `forward_full`: the client was told to come again, as the agent or whoever gets the spans is behind; `silent`: no request, a connection closed on which nothing had come.",
        labels: &["protocol", "result"],
        read: |s| {
            s.list(|m| &m.span_requests, |(p, r, n)| (labels([("protocol", p), ("result", r)]), count(*n)))
        },
    },
    Descriptor {
        name: "roomtrace_spans_received_total",
        kind: Type::Counter,
        unit: "{span}",
        help: "Spans received; `foreign` are not SGLang's scheduler's and only handed on.",
        labels: &["kind"],
        read: |s| s.list(|m| &m.spans_received, |(k, n)| (labels([("kind", k)]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_spans_engine_requests_total",
        kind: Type::Counter,
        unit: "{request}",
        help: "Requests that engines' spans told of, by whether they were joined to a room of this host.",
        labels: &["result"],
        read: |s| s.list(|m| &m.span_joins, |(r, n)| (labels([("result", r)]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_spans_waiting",
        kind: Type::Gauge,
        unit: "{span}",
        help: "Spans received that the rooms have not taken yet.",
        labels: &[],
        read: |s| plain(s.snapshot.as_ref().and_then(|m| m.spans_waiting).map(count)),
    },
    Descriptor {
        name: "roomtrace_bpf_run_seconds_total",
        kind: Type::Counter,
        unit: "s",
        help: "Time in the agent's kernel programs, extrapolated from a sample of their runs.",
        labels: &["program"],
        read: |s| s.list(|m| &m.bpf_run_nanos, |(p, n)| (vec![("program", p.clone().into())], seconds(*n))),
    },
    Descriptor {
        name: "roomtrace_bpf_runs_total",
        kind: Type::Counter,
        unit: "{run}",
        help: "Runs of the agent's kernel programs.",
        labels: &["program"],
        read: |s| s.list(|m| &m.bpf_runs, |(p, n)| (vec![("program", p.clone().into())], count(*n))),
    },
    Descriptor {
        name: "roomtrace_export_dropped_total",
        kind: Type::Counter,
        unit: "{item}",
        help: "Lines, spans and log records that did not leave the agent, or that their receiver has not taken: `rejected` also where it takes \
               a request and leaves them out (OTLP's partial success); `too_large` is one that no request has a place for, `exhausted` a receiver that is short of \
               something and does not say when to come again (a quota, or a limit that the request is above), `expired` waited too long. Of metrics: requests.",
        labels: &["signal", "reason"],
        read: |s| s.dropped(),
    },
    Descriptor {
        name: "roomtrace_state_dropped_total",
        kind: Type::Counter,
        unit: "{item}",
        help: "Files, processes, connections and rooms that a state file named and that were not taken over from it.",
        labels: &["reason"],
        read: |s| s.list(|m| &m.state_dropped, |(r, n)| (labels([("reason", r)]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_state_restored",
        kind: Type::Gauge,
        unit: "{item}",
        help: "What this agent took over from the state file when it started.",
        labels: &["what"],
        read: |s| s.list(|m| &m.state_restored, |(w, n)| (labels([("what", w)]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_state_writes_total",
        kind: Type::Counter,
        unit: "{write}",
        help: "Attempts to write the state file; result `written` or `failed`.",
        labels: &["result"],
        read: |s| s.list(|m| &m.state_writes, |(r, n)| (labels([("result", r)]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_batches_total",
        kind: Type::Counter,
        unit: "{batch}",
        help: "Batches that probed processes gave to Mooncake's transfer engine: joined (to one room), ambiguous (could be several rooms'), \
               unmatched (of no room that is known). Only with probes.mooncake.",
        labels: &["result"],
        read: |s| s.list(|m| &m.batches, |(r, n)| (labels([("result", r)]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_probed_processes",
        kind: Type::Gauge,
        unit: "{process}",
        help: "Engine processes by whether their transfer engine is probed: probed, refused (not loaded, unknown version, cannot be \
               attached: /status says why). Only with probes.mooncake.",
        labels: &["state"],
        read: |s| s.list(|m| &m.probed_processes, |(r, n)| (labels([("state", r)]), count(*n))),
    },
    Descriptor {
        name: "roomtrace_state_bytes",
        kind: Type::Gauge,
        unit: "By",
        help: "Length of the state file as last written.",
        labels: &[],
        read: |s| plain(s.snapshot.as_ref().and_then(|m| m.state_bytes).map(count)),
    },
    Descriptor {
        name: "roomtrace_build_info",
        kind: Type::Gauge,
        unit: "1",
        help: "Always 1; the labels say what runs.",
        labels: &["version"],
        read: |_| vec![Point { labels: labels([("version", env!("CARGO_PKG_VERSION"))]), value: 1.0 }],
    },
    Descriptor {
        name: "process_cpu_seconds_total",
        kind: Type::Counter,
        unit: "s",
        help: "User and system time of the agent.",
        labels: &[],
        read: |s| plain(s.process.cpu_seconds),
    },
    Descriptor {
        name: "process_resident_memory_bytes",
        kind: Type::Gauge,
        unit: "By",
        help: "Resident memory of the agent.",
        labels: &[],
        read: |s| plain(s.process.resident_bytes.map(count)),
    },
    Descriptor {
        name: "process_open_fds",
        kind: Type::Gauge,
        unit: "{descriptor}",
        help: "Open file descriptors of the agent.",
        labels: &[],
        read: |s| plain(s.process.open_fds.map(count)),
    },
    Descriptor {
        name: "process_start_time_seconds",
        kind: Type::Gauge,
        unit: "s",
        help: "When the agent started, seconds since the epoch.",
        labels: &[],
        read: |s| plain(s.process.start_seconds),
    },
];

impl Source {
    fn list<T>(
        &self,
        of: impl FnOnce(&MetricsSnapshot) -> &Vec<T>,
        point: impl Fn(&T) -> (Labels, f64),
    ) -> Vec<Point> {
        let points = |m: &Arc<MetricsSnapshot>| {
            of(m).iter().map(&point).map(|(labels, value)| Point { labels, value }).collect()
        };
        self.snapshot.as_ref().map(points).unwrap_or_default()
    }

    /// All combinations, zero included: that nothing was dropped is measured.
    fn dropped(&self) -> Vec<Point> {
        let pairs = Signal::ALL.iter().flat_map(|s| Reason::ALL.iter().map(move |r| (*s, *r)));
        pairs
            .map(|(signal, reason)| Point {
                labels: labels([("signal", signal.label()), ("reason", reason.label())]),
                value: count(self.counters.dropped(signal, reason)),
            })
            .collect()
    }
}

fn labels<const N: usize>(pairs: [(&'static str, &'static str); N]) -> Labels {
    pairs.into_iter().map(|(k, v)| (k, Cow::Borrowed(v))).collect()
}

fn pinned_labels(p: &PinnedRooms) -> Labels {
    vec![
        ("role", p.role.label().into()),
        ("verdict", p.verdict.label().into()),
        ("confidence", p.confidence.label().into()),
        ("owed_instance", p.owed_instance.clone().into()),
    ]
}

fn finding_point(f: &(Class, Confidence, Option<Role>, u64)) -> (Labels, f64) {
    let (class, confidence, role, n) = *f;
    let role = role.map_or("unknown", Role::label);
    (labels([("class", class.label()), ("confidence", confidence.label()), ("role", role)]), count(n))
}

fn plain(value: Option<f64>) -> Vec<Point> {
    value.map(|value| Point { labels: Vec::new(), value }).into_iter().collect()
}

#[allow(clippy::cast_precision_loss, reason = "Prometheus and OTLP carry doubles; exact to 2^53")]
pub(super) fn count(n: u64) -> f64 {
    n as f64
}

/// Nanoseconds as seconds.
pub(super) fn seconds(nanos: u64) -> f64 {
    count(nanos) / 1e9
}

/// The reference, as `docs/metrics.md` has it.
pub fn reference() -> String {
    let mut rows: Vec<(&str, Type, &str, String, &str)> =
        metrics().map(|d| (d.name, d.kind, d.unit, d.labels.join(", "), d.help)).collect();
    let histogram = PHASE_DURATION_LABELS.join(", ");
    rows.push((PHASE_DURATION, Type::Histogram, "s", histogram, PHASE_DURATION_HELP));
    rows.sort_by_key(|r| (r.0.starts_with("process_"), r.0));
    let row = |(name, kind, unit, labels, help): (&str, Type, &str, String, &str)| {
        let labels = if labels.is_empty() { "–".to_owned() } else { labels };
        format!("| `{name}` | {} | {unit} | {labels} | {help} |\n", kind.name())
    };
    format!(
        "# Metrics\n\n\
         Served as Prometheus text at `/metrics` (as OpenMetrics with exemplars to whoever accepts \
         `application/openmetrics-text`), and sent over OTLP under the same names without `_total` when an OTLP \
         endpoint is set.\nA series that is missing was not measured; it never means zero.\n\n\
         <!-- Generated: `cargo test -p roomtrace --test export_metrics` compares, \
         `ROOMTRACE_BLESS=1` before it rewrites. -->\n\n\
         | Name | Type | Unit | Labels | Meaning |\n|---|---|---|---|---|\n{}",
        rows.into_iter().map(row).collect::<String>()
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn pinned(instance: &str, rooms: u64) -> PinnedRooms {
        PinnedRooms {
            role: Role::Prefill,
            verdict: Class::PeerLost,
            confidence: Confidence::Likely,
            owed_instance: instance.to_owned(),
            rooms,
        }
    }

    #[test]
    fn the_hundred_and_first_debtor_is_other_and_no_room_is_lost() {
        let mut instances = Instances::default();
        let mut list: Vec<_> = (0..250).map(|n| pinned(&format!("host{n:03}"), 2)).collect();
        instances.bound(&mut list);
        assert_eq!(list.len(), INSTANCES + 1);
        assert_eq!(list.iter().map(|p| p.rooms).sum::<u64>(), 500);
        assert_eq!(list.iter().find(|p| p.owed_instance == OTHER).unwrap().rooms, 300);
    }

    #[test]
    fn a_debtor_keeps_its_name_while_it_owes_and_gives_way_afterwards() {
        let mut instances = Instances::default();
        let mut first: Vec<_> = (0..100).map(|n| pinned(&format!("z{n:03}"), 1)).collect();
        instances.bound(&mut first);
        let mut both: Vec<_> =
            (0..100).map(|n| pinned(&format!("z{n:03}"), 1)).chain([pinned("a", 1)]).collect();
        instances.bound(&mut both);
        assert!(both.iter().any(|p| p.owed_instance == "z099"));
        assert!(both.iter().any(|p| p.owed_instance == OTHER));
        let mut later = vec![pinned("a", 1)];
        instances.bound(&mut later);
        assert_eq!(later, vec![pinned("a", 1)]);
    }

    #[test]
    fn every_point_has_exactly_the_labels_of_its_descriptor() {
        let source = Source {
            snapshot: Some(Arc::new(super::super::testing::full_snapshot())),
            counters: Arc::default(),
            process: Process::default(),
        };
        for d in metrics() {
            for p in (d.read)(&source) {
                assert_eq!(p.labels.iter().map(|l| l.0).collect::<Vec<_>>(), d.labels, "{}", d.name);
            }
        }
    }
}
