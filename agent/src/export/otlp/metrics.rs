//! Metrics over OTLP: the SDK's periodic reader over the same table that `/metrics` shows.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use opentelemetry::KeyValue;
use opentelemetry::metrics::{Histogram, Meter, MeterProvider as _};
use opentelemetry_otlp::MetricExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::metrics::data::ResourceMetrics;
use opentelemetry_sdk::metrics::exporter::PushMetricExporter;
use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider, Temporality};
use tokio::sync::watch;

use super::OtlpError;
use super::partial::{Hearing, PARTLY, Taken};
use super::settings::{Env, Target};
use super::transport::{Failure, Wire, metric_exporter};
use crate::export::complaint::Complaint;
use crate::export::counters::{Counters, Reason, Signal};
use crate::export::http::Published;
use crate::export::metrics::{
    Descriptor, PHASE_DURATION, PHASE_DURATION_BOUNDS, PHASE_DURATION_HELP, PHASE_DURATION_LABELS, Point,
    Source, Type, metrics,
};
use crate::export::process::Process;
use crate::rooms::model::{Phase, Role};

/// Default of `OTEL_METRIC_EXPORT_INTERVAL`.
const INTERVAL: Duration = Duration::from_mins(1);

/// The reader and the one instrument that is recorded directly.
#[derive(Debug)]
pub(super) struct Metrics {
    provider: SdkMeterProvider,
    durations: Histogram<f64>,
}

impl Metrics {
    /// Starts the reader's thread.
    ///
    /// # Errors
    /// [`OtlpError::Build`].
    pub(super) fn start(
        target: &Target,
        wire: &Wire,
        resource: Resource,
        published: watch::Receiver<Published>,
        counters: Arc<Counters>,
        env: Env<'_>,
    ) -> Result<Self, OtlpError> {
        let inner = metric_exporter(target, wire)
            .map_err(|e| OtlpError::Build { endpoint: target.endpoint.clone(), why: e.to_string() })?;
        let exporter = Told {
            inner,
            wire: wire.clone(),
            endpoint: target.endpoint.clone(),
            counters: Arc::clone(&counters),
            hearing: Hearing::new(),
            complaints: Mutex::default(),
        };
        let every =
            env("OTEL_METRIC_EXPORT_INTERVAL").and_then(|v| v.parse().ok()).map(Duration::from_millis);
        let every = every.filter(|e| !e.is_zero()).unwrap_or(INTERVAL);
        let reader = PeriodicReader::builder(exporter).with_interval(every).build();
        let provider = SdkMeterProvider::builder().with_reader(reader).with_resource(resource).build();
        let meter = provider.meter("roomtrace");
        let source = Shared { published, counters };
        for d in metrics() {
            observe(&meter, d, source.clone());
        }
        let durations = meter
            .f64_histogram(PHASE_DURATION)
            .with_unit("s")
            .with_description(PHASE_DURATION_HELP)
            .with_boundaries(PHASE_DURATION_BOUNDS.to_vec())
            .build();
        Ok(Self { provider, durations })
    }

    /// Records one phase.
    pub(super) fn observe(&self, role: Role, phase: Phase, seconds: f64) {
        let [role_key, phase_key] = PHASE_DURATION_LABELS;
        self.durations.record(
            seconds,
            &[KeyValue::new(role_key, role.label()), KeyValue::new(phase_key, phase.label())],
        );
    }

    /// Sends the last values; blocks, for at most `grace`.
    pub(super) fn shutdown(self, grace: Duration) {
        // What it would say has been said by the exporter.
        let _ = self.provider.shutdown_with_timeout(grace);
    }
}

#[derive(Clone)]
struct Shared {
    published: watch::Receiver<Published>,
    counters: Arc<Counters>,
}

impl Shared {
    fn points(&self, d: &Descriptor) -> Vec<Point> {
        let snapshot = self.published.borrow().snapshot.clone();
        // Only the process metrics look at the process.
        let process = if d.name.starts_with("process_") { Process::read() } else { Process::default() };
        (d.read)(&Source { snapshot, counters: Arc::clone(&self.counters), process })
    }
}

fn observe(meter: &Meter, d: &'static Descriptor, source: Shared) {
    let name = d.stem();
    match d.kind {
        Type::Counter => {
            let counter = meter.f64_observable_counter(name).with_unit(d.unit).with_description(d.help);
            counter
                .with_callback(move |o| source.points(d).iter().for_each(|p| o.observe(p.value, &labels(p))))
                .build();
        }
        Type::Gauge | Type::Histogram => {
            let gauge = meter.f64_observable_gauge(name).with_unit(d.unit).with_description(d.help);
            gauge
                .with_callback(move |o| source.points(d).iter().for_each(|p| o.observe(p.value, &labels(p))))
                .build();
        }
    }
}

fn labels(p: &Point) -> Vec<KeyValue> {
    p.labels.iter().map(|(k, v)| KeyValue::new(*k, v.clone().into_owned())).collect()
}

/// The exporter, with its failures told once a minute and counted. A lost export is not tried again: the next
/// carries the same sums.
struct Told {
    inner: MetricExporter,
    wire: Wire,
    endpoint: String,
    counters: Arc<Counters>,
    hearing: Hearing,
    /// Of requests that were not taken, and of those that were in part.
    complaints: Mutex<(Complaint, Complaint)>,
}

impl Told {
    fn look(&self, result: &OTelSdkResult, taken: &Taken) {
        let now = Instant::now();
        let Ok(mut complaints) = self.complaints.lock() else { return };
        let (complaint, partly) = &mut *complaints;
        match result {
            Ok(()) => {
                // The unit is a request.
                self.counters.taken(Signal::Metrics, 1, taken.rejected);
                if taken.tells()
                    && let Some(untold) = partly.failed(now)
                {
                    let (endpoint, rejected, why) = (&self.endpoint, taken.rejected, taken.why.as_str());
                    tracing::warn!(signal = "metrics", endpoint, rejected, why, untold, "{PARTLY}");
                }
                if let Some(after) = complaint.works(now) {
                    tracing::info!(
                        endpoint = self.endpoint,
                        "OTLP metrics are delivered again after {} s",
                        after.as_secs()
                    );
                }
            }
            Err(e) => {
                let (reason, why) = match self.wire.failure(&e.to_string()) {
                    Failure::Later { why, .. } => (Reason::Expired, why),
                    Failure::TooLarge { why, surely: true } => (Reason::TooLarge, why),
                    Failure::TooLarge { why, surely: false } => (Reason::Exhausted, why),
                    Failure::Never { why } => (Reason::Rejected, why),
                };
                self.counters.drop_items(Signal::Metrics, reason, 1);
                if let Some(untold) = complaint.failed(now) {
                    tracing::warn!(
                        endpoint = self.endpoint,
                        why,
                        untold,
                        "OTLP metrics are not delivered (the agent goes on)"
                    );
                }
            }
        }
    }
}

impl PushMetricExporter for Told {
    async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
        let (result, taken) = self.hearing.hear(self.inner.export(metrics)).await;
        self.look(&result, &taken);
        result
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.inner.force_flush()
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.inner.shutdown_with_timeout(timeout)
    }

    fn temporality(&self) -> Temporality {
        self.inner.temporality()
    }
}
