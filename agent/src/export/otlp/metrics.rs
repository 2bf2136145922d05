//! Metrics over OTLP: the SDK's periodic reader over the same table that `/metrics` shows.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use opentelemetry::KeyValue;
use opentelemetry::metrics::{Histogram, Meter, MeterProvider as _};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::metrics::data::ResourceMetrics;
use opentelemetry_sdk::metrics::exporter::PushMetricExporter;
use opentelemetry_sdk::metrics::{PeriodicReader, SdkMeterProvider, Temporality};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::raw::{self, PARTLY, Taken};
use super::settings::{Env, Target};
use super::transport::{Failure, Wire, payload};
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
    /// Starts the reader's thread. Needs a runtime around it.
    pub(super) fn start(
        target: &Target,
        wire: &Wire,
        resource: Resource,
        published: watch::Receiver<Published>,
        counters: Arc<Counters>,
        env: Env<'_>,
    ) -> Self {
        let exporter = Told {
            target: target.clone(),
            wire: wire.clone(),
            runtime: Handle::current(),
            temporality: temporality(env),
            counters: Arc::clone(&counters),
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
        Self { provider, durations }
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

/// The standard variable for what a counter's points are measured from (OTLP exporter specification).
fn temporality(env: Env<'_>) -> Temporality {
    let name = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE";
    let Some(wanted) = env(name).filter(|wanted| !wanted.is_empty()) else { return Temporality::Cumulative };
    match wanted.to_ascii_lowercase().as_str() {
        "cumulative" => Temporality::Cumulative,
        "delta" => Temporality::Delta,
        "lowmemory" => Temporality::LowMemory,
        _ => {
            tracing::warn!(wanted, "{name} is none of cumulative, delta, lowmemory; cumulative is taken");
            Temporality::Cumulative
        }
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

/// Sends them; failures are told once a minute and counted. A lost export is not tried again: the next carries the same sums.
struct Told {
    target: Target,
    wire: Wire,
    runtime: Handle,
    temporality: Temporality,
    counters: Arc<Counters>,
    /// Of requests that were not taken, and of those that were in part.
    complaints: Mutex<(Complaint, Complaint)>,
}

impl Told {
    async fn send(&self, metrics: &ResourceMetrics) -> Result<Taken, Failure> {
        let never = |e: std::io::Error| Failure::Never { why: e.to_string() };
        let payload = payload(&self.target, &ExportMetricsServiceRequest::from(metrics), 1).map_err(never)?;
        let (target, wire) = (self.target.clone(), self.wire.clone());
        // The SDK's thread has no runtime of its own.
        let sending = async move { raw::send(&target, &wire, &payload, Signal::Metrics).await };
        let ended = |e: tokio::task::JoinError| Failure::Later { why: e.to_string(), after: None };
        self.runtime.spawn(sending).await.map_err(ended)?
    }

    fn taken(&self, taken: &Taken) {
        let now = Instant::now();
        // The unit is a request.
        self.counters.taken(Signal::Metrics, 1, taken.rejected);
        let Ok(mut complaints) = self.complaints.lock() else { return };
        let endpoint = &self.target.endpoint;
        if let Some(after) = complaints.0.works(now) {
            tracing::info!(endpoint, "OTLP metrics are delivered again after {} s", after.as_secs());
        }
        if taken.tells()
            && let Some(untold) = complaints.1.failed(now)
        {
            let (signal, rejected, why) = (Signal::Metrics.label(), taken.rejected, taken.why.as_str());
            tracing::warn!(signal, endpoint, rejected, why, untold, "{PARTLY}");
        }
    }

    fn failed(&self, failure: Failure) -> OTelSdkError {
        let (reason, why) = match failure {
            Failure::Later { why, .. } => (Reason::Expired, why),
            Failure::TooLarge { why, .. } => (Reason::TooLarge, why),
            Failure::Never { why } => (Reason::Rejected, why),
        };
        self.counters.drop_items(Signal::Metrics, reason, 1);
        let told = self.complaints.lock().ok().and_then(|mut c| c.0.failed(Instant::now()));
        if let Some(untold) = told {
            let endpoint = &self.target.endpoint;
            tracing::warn!(endpoint, why, untold, "OTLP metrics are not delivered (the agent goes on)");
        }
        OTelSdkError::InternalFailure(why)
    }
}

impl PushMetricExporter for Told {
    async fn export(&self, metrics: &ResourceMetrics) -> OTelSdkResult {
        match self.send(metrics).await {
            Ok(taken) => {
                self.taken(&taken);
                Ok(())
            }
            Err(failure) => Err(self.failed(failure)),
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _timeout: Duration) -> OTelSdkResult {
        Ok(())
    }

    fn temporality(&self) -> Temporality {
        self.temporality
    }
}
