//! The network's side of `run` and `doctor`: RDMA ports, which a thread reads, and the engines' own connections, of which the kernel
//! programs tell; for the rooms, metrics, `/status` and the operator.
//!
//! Runs on the observing thread: takes a bounded number of readings per turn and waits for no driver. Asking the kernel what
//! connections have carried is a walk over the open files of the engines' processes, four times a second at most.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::config::Config;
use super::engines::told;
use crate::event::{Event, Mono, SECOND};
use crate::export::metrics::{MetricsSnapshot, NetworkMetrics};
use crate::kernel::Capture;
use crate::network::carriers::Carriers;
use crate::network::model::Network;
use crate::network::{PortReaders, PortStanding, Settings, Standing, look_once as look};
use crate::pipeline::Pipeline;
use crate::rooms::model::Input;

/// Readings taken in one turn.
const BUDGET: usize = 1024;

/// How long `doctor` waits for the cards' drivers.
const LIMIT: Duration = Duration::from_secs(5);

/// A port that is being read for longer hangs.
const HANGS: u64 = SECOND;

/// Between two walks over connections: while rooms are in transfer, and while none is.
const BUSY: u64 = SECOND / 4;
const IDLE: u64 = SECOND;

/// So many times as long as a walk took nothing is walked after it, ten seconds at most: a walk over all processes of a large host costs
/// a percent of a core at most.
const REST: u64 = 100;
const LONGEST_REST: u64 = 10 * SECOND;

/// What moves over the network.
pub(super) struct NetworkReaders {
    ports: Option<PortReaders>,
    /// `None`: switched off.
    connections: Option<Connections>,
}

/// The engines' own connections.
#[derive(Default)]
struct Connections {
    carriers: Carriers,
    busy: bool,
    /// When the last walk began, or when it was last seen that none was needed.
    walked: Mono,
    /// How long it took.
    took: u64,
    /// The answers of the last walk are still to be taken.
    under_way: bool,
    /// What the kernel had lost by then.
    lost: u64,
}

fn settings(config: &Config) -> Settings {
    let root = config.network.rdma_path.clone();
    Settings { root: root.unwrap_or_else(|| Settings::default().root), ..Settings::default() }
}

impl NetworkReaders {
    /// Starts reading what is not switched off. Where that cannot be, it is said once and the agent does without.
    pub(super) fn start(config: &Config) -> Self {
        let ports = config.network.rdma.then(|| PortReaders::start(&settings(config)));
        let ports = ports.and_then(|started| {
            started.inspect_err(|error| tracing::warn!(%error, "RDMA ports are not read")).ok()
        });
        Self { ports, connections: config.network.tcp.then(Connections::default) }
    }

    /// Takes what the kernel tells of connections.
    pub(super) fn see(&mut self, event: &Event<'_>) {
        if let (Event::Carried(told), Some(connections)) = (event, &mut self.connections) {
            connections.carriers.take(told);
        }
    }

    /// Hands what was read since the last turn to the rooms. `drained`: nothing is left in the kernel's ring.
    pub(super) fn turn(&mut self, drained: bool, pipeline: &mut Pipeline, capture: &mut Capture) {
        for reading in self.ports.iter().flat_map(PortReaders::readings).take(BUDGET) {
            pipeline.tell(&Input::Network(&reading));
        }
        if let Some(connections) = &mut self.connections {
            connections.turn(drained, pipeline, capture);
        }
    }

    /// What is due once a second: metrics, and how often to read.
    pub(super) fn second(&mut self, busy: bool, known: &Network, snapshot: &mut MetricsSnapshot) {
        snapshot.capture_lost.push(("network", "ports", known.turned_away()));
        let mut metrics = NetworkMetrics::default();
        if let Some(ports) = &self.ports {
            ports.set_busy(busy);
            let standing = ports.standing();
            snapshot.capture_lost.push(("network", "readings", standing.held));
            fill(&mut metrics, &standing, known);
        }
        if let Some(connections) = &mut self.connections {
            connections.busy = busy;
            snapshot.capture_lost.push(("network", "connections", connections.carriers.turned_away()));
            let (sent, received) = known.carried().unzip();
            metrics.connection_bytes.extend(sent.map(|n| ("tx", n)));
            metrics.connection_bytes.extend(received.map(|n| ("rx", n)));
        }
        snapshot.network = metrics;
    }

    /// Their part of `/status`.
    pub(super) fn status(&self, now: Mono, known: &Network) -> Value {
        json!({
            "rdma": self.ports.as_ref().map(|ports| ports_json(&ports.standing(), now)),
            "tcp": self.connections.as_ref().map(|c| json!({
                "of": "all connections of an engine process that carry neither ZMTP nor HTTP",
                "processes": c.carriers.processes(), "connections": c.carriers.open(),
                "turned_away": c.carriers.turned_away(),
            })),
            "out_of_order": known.disorder(),
        })
    }

    /// Where readings come from, in words; `None`: from nowhere.
    pub(super) fn source(known: &Network) -> Option<String> {
        let ports = known.ports().next().is_some().then_some("counters of whole RDMA ports");
        let connections = known.carried().map(|_| "TCP's counters of the engines' connections");
        let all: Vec<&str> = ports.into_iter().chain(connections).collect();
        (!all.is_empty()).then(|| all.join(", "))
    }
}

impl Connections {
    fn turn(&mut self, drained: bool, pipeline: &mut Pipeline, capture: &mut Capture) {
        let now = crate::kernel::monotonic();
        if self.under_way {
            if drained {
                self.under_way = false;
                self.round(now, pipeline, capture);
            }
            return;
        }
        let rest = self.took.saturating_mul(REST).min(LONGEST_REST);
        let pause = rest.max(if self.busy { BUSY } else { IDLE });
        if now.since(self.walked) < pause {
            return;
        }
        self.walked = now;
        let some = told(capture.sockets()).is_none_or(|s| s.carriers > 0) || !self.carriers.is_empty();
        if !some {
            return self.carriers.none(now);
        }
        // Where the walk fails, what is open is not read: nobody knows what passed.
        if told(capture.ask_carried()).is_some() {
            self.under_way = true;
        }
        self.took = crate::kernel::monotonic().since(now);
    }

    /// Everything that the walk asked for has been taken.
    fn round(&mut self, now: Mono, pipeline: &mut Pipeline, capture: &Capture) {
        let lost = told(capture.counters()).map_or(u64::MAX, |c| c.ring_full.saturating_add(c.recursion));
        let missing = std::mem::replace(&mut self.lost, lost) != lost;
        let alive = |pid: u32| Path::new(&format!("/proc/{pid}")).exists();
        self.carriers.round(self.walked, now, missing, alive, &mut |reading| {
            pipeline.tell(&Input::Network(&reading));
        });
    }
}

fn fill(metrics: &mut NetworkMetrics, standing: &Standing, known: &Network) {
    for (name, port) in known.ports() {
        let (sent, received) = port.moved;
        metrics.port_bytes.push((name.to_string(), "tx", sent));
        metrics.port_bytes.push((name.to_string(), "rx", received));
    }
    for (name, port) in &standing.ports {
        let PortStanding { reads, late, refused, nonsense, spent, .. } = port;
        let read = reads.saturating_sub(*late).saturating_sub(*refused).saturating_sub(*nonsense);
        for (result, n) in [("read", read), ("late", *late), ("refused", *refused), ("nonsense", *nonsense)] {
            metrics.port_readings.push((name.clone(), result, n));
        }
        metrics.port_nanos.push((name.clone(), u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX)));
    }
}

fn ports_json(standing: &Standing, now: Mono) -> Value {
    let hanging = standing.in_call.as_ref().filter(|(_, since)| now.since(*since) > HANGS);
    let ports = standing.ports.iter().map(|(name, p)| {
        json!({
            "port": name, "active": p.active, "rate": p.rate, "reads": p.reads, "late": p.late,
            "refused": p.refused, "why": p.why, "nonsense": p.nonsense,
            "reads_ms": p.spent.as_secs_f64() * 1000.0,
        })
    });
    json!({
        "of": "whole ports, never one room or process",
        "why": standing.absent, "ports": ports.collect::<Vec<_>>(), "left_out": standing.left_out,
        "hanging": hanging.map(|(port, since)| json!({"port": port, "for_s": now.since(*since) / SECOND})),
        "readings_held": standing.held,
    })
}

/// Which ports there are now, for `doctor`; `None`: they are not read.
pub(super) fn look_once(config: &Config) -> Option<Standing> {
    config.network.rdma.then(|| look(&settings(config), LIMIT))
}

pub(super) fn doctor_json(standing: Option<&Standing>) -> Value {
    standing.map_or(Value::Null, |s| ports_json(s, crate::kernel::monotonic()))
}

/// That there is no port is no fault of the host.
pub(super) fn doctor_text(out: &mut String, standing: Option<&Standing>) {
    let Some(standing) = standing else {
        let _ = writeln!(out, "--   RDMA ports: not read (network.rdma is false)");
        return;
    };
    if let Some((port, _)) = &standing.in_call {
        let _ = writeln!(
            out,
            "??   RDMA ports: reading {port} does not come back; what moves there is not measured"
        );
    }
    if let Some(why) = &standing.absent {
        let _ = writeln!(out, "--   RDMA ports: nothing is measured: {why}");
    }
    for (name, port) in &standing.ports {
        let mark = if port.active && port.why.is_none() { "ok  " } else { "--  " };
        let state = if port.active { "active" } else { "not active" };
        let why = port.why.as_ref().map(|why| format!(", not read: {why}")).unwrap_or_default();
        let _ = writeln!(out, "{mark} RDMA port {name}: {state}, {}{why}", port.rate);
    }
}
