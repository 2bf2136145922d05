//! `/metrics`: the table of [`super::metrics`] as text, plus the histogram of phase durations.
//!
//! `prometheus-client` does both forms (Prometheus text 0.0.4, `OpenMetrics` with exemplars) and takes values
//! from a snapshot through a collector.

use std::fmt;
use std::time::SystemTime;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, prometheus_text, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::exemplar::HistogramWithExemplars;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use super::metrics::{
    Descriptor, PHASE_DURATION, PHASE_DURATION_BOUNDS, PHASE_DURATION_HELP, PHASE_DURATION_LABELS, Source,
    Type, metrics,
};
use crate::rooms::model::{Phase, Role};

type Pairs = Vec<(&'static str, &'static str)>;
type TraceLabel = Vec<(&'static str, String)>;
type Histogram = HistogramWithExemplars<TraceLabel>;

/// The histogram of phase durations, shared by whoever records and whoever shows it.
#[derive(Clone, Debug)]
pub(super) struct PhaseDurations {
    family: Family<Pairs, Histogram, fn() -> Histogram>,
}

impl Default for PhaseDurations {
    fn default() -> Self {
        Self { family: Family::new_with_constructor(|| Histogram::new(PHASE_DURATION_BOUNDS.into_iter())) }
    }
}

impl PhaseDurations {
    /// Records one phase of a view that ended at `at`, with its trace as exemplar.
    pub(super) fn observe(&self, role: Role, phase: Phase, seconds: f64, trace: String, at: SystemTime) {
        let [role_key, phase_key] = PHASE_DURATION_LABELS;
        let labels = vec![(role_key, role.label()), (phase_key, phase.label())];
        let exemplar = vec![("trace_id", trace)];
        self.family.get_or_create(&labels).observe(seconds, Some(exemplar), Some(at));
    }
}

/// A form of the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// Prometheus text 0.0.4: what a person with curl sees.
    Text,
    /// `OpenMetrics` 1.0, with exemplars: what Prometheus asks for.
    OpenMetrics,
}

impl Format {
    /// What an `Accept` header asks for.
    pub(super) fn accepted(accept: Option<&str>) -> Self {
        match accept {
            Some(a) if a.contains("application/openmetrics-text") => Self::OpenMetrics,
            _ => Self::Text,
        }
    }

    /// `Content-Type` of the answer.
    pub(super) const fn content_type(self) -> &'static str {
        match self {
            Self::Text => prometheus_text::CONTENT_TYPE,
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

/// The text, or the encoder's error (it has none for valid names, which a test covers).
pub(super) fn encode(
    source: Source,
    durations: &PhaseDurations,
    format: Format,
) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Snapshot { source }));
    registry.register(PHASE_DURATION, PHASE_DURATION_HELP.trim_end_matches('.'), durations.family.clone());
    let mut out = String::new();
    match format {
        Format::Text => prometheus_text::encode(&mut out, &registry)?,
        Format::OpenMetrics => text::encode(&mut out, &registry)?,
    }
    Ok(out)
}

#[derive(Debug)]
struct Snapshot {
    source: Source,
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        metrics().try_for_each(|d| encode_one(d, &self.source, &mut encoder))
    }
}

/// Nothing at all for a metric without values: an empty family would say "measured, none".
fn encode_one(d: &Descriptor, source: &Source, to: &mut DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
    let points = (d.read)(source);
    if points.is_empty() {
        return Ok(());
    }
    let kind = match d.kind {
        Type::Counter => MetricType::Counter,
        Type::Gauge | Type::Histogram => MetricType::Gauge,
    };
    let mut family = to.encode_descriptor(d.stem(), d.help, None, kind)?;
    for p in &points {
        let metric = if p.labels.is_empty() { None } else { Some(family.encode_family(&p.labels)?) };
        match (d.kind, metric) {
            (Type::Counter, Some(m)) => ConstCounter::new(p.value).encode(m)?,
            (_, Some(m)) => ConstGauge::new(p.value).encode(m)?,
            (Type::Counter, None) => {
                family.encode_counter::<Pairs, f64, f64>(&p.value, None)?;
            }
            (_, None) => family.encode_gauge(&p.value)?,
        }
    }
    Ok(())
}
