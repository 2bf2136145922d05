//! The network's part of the metrics. Pure.
//!
//! Of whole ports, and of all engines' connections together: a process is never a label. What is not measured has no series.

use super::metrics::{Descriptor, Labels, Point, Source, Type, count, seconds};

/// What is measured of RDMA ports and of the engines' own connections.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NetworkMetrics {
    /// Bytes since the agent started, by port and direction (`tx`: left the host).
    pub port_bytes: Vec<(String, &'static str, u64)>,
    /// Readings by port and result.
    pub port_readings: Vec<(String, &'static str, u64)>,
    /// Time in them, nanoseconds.
    pub port_nanos: Vec<(String, u64)>,
    /// Bytes of all engines' connections that are no control connections since the agent started, by direction.
    pub connection_bytes: Vec<(&'static str, u64)>,
}

/// Every metric of the network.
pub(super) static METRICS: &[Descriptor] = &[
    Descriptor {
        name: "roomtrace_rdma_port_bytes_total",
        kind: Type::Counter,
        unit: "By",
        help: "Bytes the whole RDMA port moved while it was read: tx left it, rx arrived. Never of one room or process; time that was \
               not read adds nothing.",
        labels: &["port", "direction"],
        read: |s| {
            list(s, |m| m.port_bytes.iter().map(|(p, d, n)| (labels(p, "direction", d), count(*n))).collect())
        },
    },
    Descriptor {
        name: "roomtrace_rdma_port_readings_total",
        kind: Type::Counter,
        unit: "{reading}",
        help: "Readings of the RDMA port's counters: read, late (took more than 0.5 s, not used), refused, nonsense (a counter went \
               back, stands at the end of 32 bits, or is faster than the link).",
        labels: &["port", "result"],
        read: |s| {
            list(s, |m| m.port_readings.iter().map(|(p, r, n)| (labels(p, "result", r), count(*n))).collect())
        },
    },
    Descriptor {
        name: "roomtrace_rdma_port_read_seconds_total",
        kind: Type::Counter,
        unit: "s",
        help: "Time a thread of the agent spent in reading the RDMA port's counters, waiting included.",
        labels: &["port"],
        read: |s| {
            list(s, |m| {
                m.port_nanos.iter().map(|(p, n)| (vec![("port", p.clone().into())], seconds(*n))).collect()
            })
        },
    },
    Descriptor {
        name: "roomtrace_transfer_tcp_bytes_total",
        kind: Type::Counter,
        unit: "By",
        help: "Bytes that TCP connections of engine processes carried that are no control connections, all of them together: tx \
               acknowledged by the peer's kernel, rx received. Never of one room; time that was not read adds nothing.",
        labels: &["direction"],
        read: |s| {
            let labels = |d: &&'static str| vec![("direction", (*d).into())];
            list(s, |m| m.connection_bytes.iter().map(|(d, n)| (labels(d), count(*n))).collect())
        },
    },
];

fn list(source: &Source, of: impl FnOnce(&NetworkMetrics) -> Vec<(Labels, f64)>) -> Vec<Point> {
    let points = source.snapshot.as_ref().map(|m| of(&m.network)).unwrap_or_default();
    points.into_iter().map(|(labels, value)| Point { labels, value }).collect()
}

fn labels(port: &str, key: &'static str, value: &'static str) -> Labels {
    vec![("port", port.to_owned().into()), (key, value.into())]
}
