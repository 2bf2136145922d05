//! The GPUs' part of the metrics. Pure.
//!
//! All of it is of whole devices. A link that is not measured has no series.

use std::sync::Arc;

use super::metrics::{Descriptor, Labels, Point, Source, Type, count, seconds};

/// What is measured of the GPUs. `gpu` is the driver's name for good (`GPU-…`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuMetrics {
    /// Bytes moved since the agent started, by GPU, link and direction (`tx`: left the GPU).
    pub copy_bytes: Vec<(Arc<str>, &'static str, &'static str, u64)>,
    /// Errors of the device, by GPU and number.
    pub xids: Vec<(Arc<str>, u64, u64)>,
    /// Calls to the driver, by GPU and result.
    pub calls: Vec<(Arc<str>, &'static str, u64)>,
    /// Time in them, nanoseconds.
    pub call_nanos: Vec<(Arc<str>, u64)>,
    /// Readings that tell nothing, by GPU and reason.
    pub unusable: Vec<(Arc<str>, &'static str, u64)>,
    /// 1 where a GPU cannot be read now, by reason.
    pub unreadable: Vec<(Arc<str>, &'static str, u64)>,
}

/// Every metric of a GPU.
pub(super) static METRICS: &[Descriptor] = &[
    Descriptor {
        name: "roomtrace_gpu_copy_bytes_total",
        kind: Type::Counter,
        unit: "By",
        help: "Bytes the whole GPU moved while it was read: tx left it, rx arrived. Never of one room or process; time that was not \
               read adds nothing.",
        labels: &["gpu", "link", "direction"],
        read: |s| {
            let labels = |g: &Arc<str>, l, d| labels(g, [("link", l), ("direction", d)]);
            list(s, |m| m.copy_bytes.iter().map(|(g, l, d, n)| (labels(g, *l, *d), count(*n))).collect())
        },
    },
    Descriptor {
        name: "roomtrace_gpu_xid_total",
        kind: Type::Counter,
        unit: "{error}",
        help: "Errors (Xid) of the GPU since the agent started, by NVIDIA's number; 999: beyond 64 different ones, or unknown to the driver.",
        labels: &["gpu", "xid"],
        read: |s| {
            list(s, |m| {
                let point = |(g, xid, n): &(Arc<str>, u64, u64)| {
                    (vec![("gpu", g.to_string().into()), ("xid", xid.to_string().into())], count(*n))
                };
                m.xids.iter().map(point).collect()
            })
        },
    },
    Descriptor {
        name: "roomtrace_gpu_calls_total",
        kind: Type::Counter,
        unit: "{call}",
        help: "Readings asked of the GPU's driver: answered, late (took more than 0.5 s, not used), refused.",
        labels: &["gpu", "result"],
        read: |s| {
            list(s, |m| m.calls.iter().map(|(g, r, n)| (labels(g, [("result", *r)]), count(*n))).collect())
        },
    },
    Descriptor {
        name: "roomtrace_gpu_call_seconds_total",
        kind: Type::Counter,
        unit: "s",
        help: "Time threads of the agent spent in calls to the GPU's driver, waiting included.",
        labels: &["gpu"],
        read: |s| list(s, |m| m.call_nanos.iter().map(|(g, n)| (labels(g, []), seconds(*n))).collect()),
    },
    Descriptor {
        name: "roomtrace_gpu_unusable_readings_total",
        kind: Type::Counter,
        unit: "{reading}",
        help: "Readings of the GPU that tell nothing: ambiguous (a counter may have gone round more than once), nonsense.",
        labels: &["gpu", "reason"],
        read: |s| {
            list(s, |m| m.unusable.iter().map(|(g, r, n)| (labels(g, [("reason", *r)]), count(*n))).collect())
        },
    },
    Descriptor {
        name: "roomtrace_gpu_unreadable",
        kind: Type::Gauge,
        unit: "1",
        help: "1 while the GPU cannot be read: lost (it does not answer), hanging (a call to its driver does not come back).",
        labels: &["gpu", "reason"],
        read: |s| {
            list(s, |m| {
                m.unreadable.iter().map(|(g, r, n)| (labels(g, [("reason", *r)]), count(*n))).collect()
            })
        },
    },
];

fn list(source: &Source, of: impl FnOnce(&GpuMetrics) -> Vec<(Labels, f64)>) -> Vec<Point> {
    let points = source.snapshot.as_ref().map(|m| of(&m.gpu)).unwrap_or_default();
    points.into_iter().map(|(labels, value)| Point { labels, value }).collect()
}

fn labels<const N: usize>(gpu: &Arc<str>, rest: [(&'static str, &'static str); N]) -> Labels {
    let rest = rest.into_iter().map(|(k, v)| (k, v.into()));
    std::iter::once(("gpu", gpu.to_string().into())).chain(rest).collect()
}
