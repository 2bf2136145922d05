//! The OTLP exporters of `opentelemetry-otlp` over one shared connection, and what their errors mean.
//!
//! One exporter per resource, since an exporter has one; the connection below is shared. The SDK's own retry
//! is off: the queue above does better, as it knows what is flagged and for how long to keep it.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue, Request, Response};
use opentelemetry_http::{Bytes, HttpClient, HttpError};
use opentelemetry_otlp::{
    Compression, ExporterBuildError, LogExporter, MetricExporter, Protocol as Wanted, RetryPolicy,
    SpanExporter, WithExportConfig, WithHttpConfig, WithTonicConfig,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::logs::{LogBatch, LogExporter as _, SdkLogRecord};
use opentelemetry_sdk::trace::{SpanData, SpanExporter as _};
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::config::Protocol;
use super::partial::{Hearing, Taken};
use super::resource::{ProcessKey, Resources};
use super::settings::{OtlpError, Target};
use super::{logs, spans};
use crate::export::counters::Signal;

/// Exporters kept: engine processes a host can sensibly have. The least recently used one makes room.
const EXPORTERS: usize = 64;

/// A connection that is not there after this does not come.
pub(super) const CONNECT: Duration = Duration::from_secs(5);

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// Worth another try, not before the given time if the receiver named one.
    Later { why: String, after: Option<Duration> },
    /// The request is too large: worth another try in halves. Not `surely`: the receiver may only be short of
    /// something, so a request that cannot be halved is worth another try as it is.
    TooLarge { why: String, surely: bool },
    /// The receiver will never take it.
    Never { why: String },
}

/// The connection of one signal.
#[derive(Clone, Debug)]
pub(super) enum Wire {
    Grpc(Channel),
    Http(Arc<Recorder>),
}

impl Wire {
    /// Prepares it; connects when there is something to send.
    ///
    /// # Errors
    /// [`OtlpError::Build`].
    pub(super) fn open(target: &Target) -> Result<Self, OtlpError> {
        let wrong = |why: String| OtlpError::Build { endpoint: target.endpoint.clone(), why };
        match target.protocol {
            Protocol::Grpc => grpc_channel(target).map(Self::Grpc).map_err(|e| wrong(chain(&e))),
            Protocol::HttpProtobuf => {
                let client = super::tls::http_client(target).map_err(wrong)?;
                Ok(Self::Http(Arc::new(Recorder::new(client, target))))
            }
        }
    }

    /// The meaning of an exporter's error.
    pub(super) fn failure(&self, error: &str) -> Failure {
        match self {
            Self::Grpc(_) => grpc_failure(error),
            Self::Http(recorder) => recorder.failure(error),
        }
    }
}

fn grpc_channel(target: &Target) -> Result<Channel, tonic::transport::Error> {
    let mut endpoint = Endpoint::from_shared(target.endpoint.clone())?
        .timeout(target.timeout)
        .connect_timeout(CONNECT.min(target.timeout))
        // Only while a request waits, so that no server finds it too often: a connection that a vanished host
        // left open is given up before the request's own limit, and the next request gets a new one.
        .http2_keep_alive_interval(target.timeout / 2)
        .keep_alive_timeout(target.timeout / 4);
    if target.endpoint.starts_with("https://") {
        let mut tls = ClientTlsConfig::new();
        tls = match &target.tls.ca {
            Some(ca) => tls.ca_certificate(Certificate::from_pem(ca)),
            None => tls.with_webpki_roots(),
        };
        if let Some((cert, key)) = &target.tls.identity {
            tls = tls.identity(Identity::from_pem(cert, key));
        }
        endpoint = endpoint.tls_config(tls)?;
    }
    Ok(endpoint.connect_lazy())
}

/// gRPC: the exporter tells the code only as text (`… failed with gRPC code: Unavailable`), followed by the
/// source where the failure arose on this side. Which codes are worth another try says the OTLP
/// specification ("OTLP/gRPC response"); it makes that depend on `RetryInfo` for `ResourceExhausted`, which the
/// exporter does not show, so that is tried again, for the bounded time everything is.
fn grpc_failure(error: &str) -> Failure {
    let why = error.to_owned();
    let code = error.split_once("gRPC code: ").map_or("", |(_, rest)| rest);
    let (code, local) = code.split_once(':').map_or((code, false), |(code, _)| (code, true));
    match code.trim() {
        // tonic's servers answer the one to a message above their limit, Go's the other.
        "OutOfRange" => Failure::TooLarge { why, surely: true },
        "ResourceExhausted" => Failure::TooLarge { why, surely: false },
        "Cancelled" | "DeadlineExceeded" | "Aborted" | "Unavailable" | "DataLoss" => {
            Failure::Later { why, after: None }
        }
        // The connection broke under the request.
        "Unknown" | "Internal" if local => Failure::Later { why, after: None },
        _ => Failure::Never { why },
    }
}

/// Error with its sources.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut out = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        out = format!("{out}: {source}");
        next = source.source();
    }
    out
}

/// HTTP client below the exporters. It sets the configured headers, and keeps what the exporter's error leaves
/// out: status, `Retry-After`, cause. A signal has one request under way at a time, so "the last" is the one.
#[derive(Debug)]
pub(super) struct Recorder {
    client: reqwest::Client,
    runtime: tokio::runtime::Handle,
    headers: Vec<(HeaderName, HeaderValue)>,
    last: Mutex<Option<HttpFailure>>,
}

#[derive(Clone, Debug)]
struct HttpFailure {
    /// `None`: no answer.
    status: Option<u16>,
    retry_after: Option<Duration>,
    why: String,
}

impl Recorder {
    fn new(client: reqwest::Client, target: &Target) -> Self {
        let runtime = tokio::runtime::Handle::current();
        Self { client, runtime, headers: target.headers.clone(), last: Mutex::new(None) }
    }

    /// Sends a request that no exporter made; the body of its answer.
    ///
    /// # Errors
    /// What is to be done about it.
    pub(super) async fn send_as_is(&self, mut request: Request<Bytes>) -> Result<Bytes, Failure> {
        for (name, value) in &self.headers {
            request.headers_mut().insert(name.clone(), value.clone());
        }
        match HttpClient::send_bytes(&self.client, request).await {
            Ok(answer) if answer.status().is_success() => Ok(answer.into_body()),
            Ok(answer) => Err(status_failure(
                answer.status().as_u16(),
                retry_after(&answer),
                format!("answer {}", answer.status()),
            )),
            Err(e) => Err(Failure::Later { why: chain(&*e), after: None }),
        }
    }

    fn remember(&self, failure: Option<HttpFailure>) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = failure;
    }

    fn failure(&self, error: &str) -> Failure {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(HttpFailure { status, retry_after, why }) = last else {
            return Failure::Never { why: error.to_owned() };
        };
        match status {
            None => Failure::Later { why, after: None },
            Some(status) => status_failure(status, retry_after, why),
        }
    }

    async fn send(&self, mut request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        for (name, value) in &self.headers {
            request.headers_mut().insert(name.clone(), value.clone());
        }
        let client = self.client.clone();
        // Metrics are sent from a thread of the SDK that has no runtime of its own.
        let sent = self.runtime.spawn(async move { HttpClient::send_bytes(&client, request).await }).await?;
        self.remember(match &sent {
            Ok(answer) if answer.status().is_success() => None,
            Ok(answer) => Some(HttpFailure {
                status: Some(answer.status().as_u16()),
                retry_after: retry_after(answer),
                why: format!("answer {}", answer.status()),
            }),
            Err(e) => Some(HttpFailure { status: None, retry_after: None, why: chain(&**e) }),
        });
        sent
    }
}

impl HttpClient for Recorder {
    // What `#[async_trait]` would write.
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        Box::pin(self.send(request))
    }
}

/// OTLP specification, "OTLP/HTTP response".
const fn status_failure(status: u16, after: Option<Duration>, why: String) -> Failure {
    match status {
        413 => Failure::TooLarge { why, surely: true },
        429 | 502..=504 => Failure::Later { why, after },
        _ => Failure::Never { why },
    }
}

/// `Retry-After` in seconds. (The form with a date is left to the ordinary back-off.)
fn retry_after(answer: &Response<Bytes>) -> Option<Duration> {
    let seconds = answer.headers().get("retry-after")?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// Something that can be exported: spans, log records.
pub(super) trait Export: Clone + Send + Sync + 'static {
    type Exporter: Send + Sync;
    const SIGNAL: Signal;

    fn exporter(
        target: &Target,
        wire: &Wire,
        resource: &Resource,
    ) -> Result<Self::Exporter, ExporterBuildError>;

    fn export(with: &Self::Exporter, batch: Vec<Self>) -> impl Future<Output = OTelSdkResult> + Send;

    /// Upper bound of its encoded size.
    fn size(&self) -> usize;
}

impl Export for SpanData {
    type Exporter = SpanExporter;
    const SIGNAL: Signal = Signal::Traces;

    fn exporter(
        target: &Target,
        wire: &Wire,
        resource: &Resource,
    ) -> Result<SpanExporter, ExporterBuildError> {
        let mut exporter = match wire {
            Wire::Grpc(channel) => grpc(SpanExporter::builder().with_tonic(), target, channel).build()?,
            Wire::Http(client) => http(SpanExporter::builder().with_http(), target, client).build()?,
        };
        exporter.set_resource(resource);
        Ok(exporter)
    }

    async fn export(with: &SpanExporter, batch: Vec<Self>) -> OTelSdkResult {
        with.export(batch).await
    }

    fn size(&self) -> usize {
        spans::size(self)
    }
}

impl Export for SdkLogRecord {
    type Exporter = LogExporter;
    const SIGNAL: Signal = Signal::Logs;

    fn exporter(
        target: &Target,
        wire: &Wire,
        resource: &Resource,
    ) -> Result<LogExporter, ExporterBuildError> {
        let mut exporter = match wire {
            Wire::Grpc(channel) => grpc(LogExporter::builder().with_tonic(), target, channel).build()?,
            Wire::Http(client) => http(LogExporter::builder().with_http(), target, client).build()?,
        };
        exporter.set_resource(resource);
        Ok(exporter)
    }

    async fn export(with: &LogExporter, batch: Vec<Self>) -> OTelSdkResult {
        let scope = spans::scope();
        let entries: Vec<_> = batch.iter().map(|r| (r, &scope)).collect();
        with.export(LogBatch::new(&entries)).await
    }

    fn size(&self) -> usize {
        logs::size(self)
    }
}

/// Exporter of metrics.
///
/// # Errors
/// What the builder says.
pub(super) fn metric_exporter(target: &Target, wire: &Wire) -> Result<MetricExporter, ExporterBuildError> {
    match wire {
        Wire::Grpc(channel) => grpc(MetricExporter::builder().with_tonic(), target, channel).build(),
        Wire::Http(client) => http(MetricExporter::builder().with_http(), target, client).build(),
    }
}

fn grpc<B: WithExportConfig + WithTonicConfig>(builder: B, target: &Target, channel: &Channel) -> B {
    let headers: Vec<_> = target
        .headers
        .iter()
        .filter_map(|(name, value)| {
            let key = AsciiMetadataKey::from_bytes(name.as_str().as_bytes()).ok()?;
            Some((key, AsciiMetadataValue::try_from(value.as_bytes()).ok()?))
        })
        .collect();
    let builder = builder
        .with_channel(channel.clone())
        .with_timeout(target.timeout)
        .with_retry_policy(RetryPolicy::disabled())
        // After the exporter has added those of the environment, so that configured ones win.
        .with_interceptor(move |mut request: tonic::Request<()>| {
            for (key, value) in &headers {
                request.metadata_mut().insert(key.clone(), value.clone());
            }
            Ok(request)
        });
    if target.gzip { builder.with_compression(Compression::Gzip) } else { builder }
}

fn http<B: WithExportConfig + WithHttpConfig>(builder: B, target: &Target, client: &Arc<Recorder>) -> B {
    let builder = builder
        .with_shared_http_client(Arc::clone(client) as Arc<dyn HttpClient>)
        .with_protocol(Wanted::HttpBinary)
        .with_endpoint(target.endpoint.clone())
        .with_timeout(target.timeout)
        .with_retry_policy(RetryPolicy::disabled());
    if target.gzip { builder.with_compression(Compression::Gzip) } else { builder }
}

/// Exporters by process, the most recently used in front.
pub(super) struct Exporters<T: Export> {
    target: Target,
    wire: Wire,
    resources: Resources,
    hearing: Hearing,
    kept: VecDeque<(Option<ProcessKey>, T::Exporter)>,
}

impl<T: Export> Exporters<T> {
    pub(super) fn new(target: Target, wire: Wire, resources: Resources) -> Self {
        Self { target, wire, resources, hearing: Hearing::new(), kept: VecDeque::new() }
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.target.endpoint
    }

    /// Sends a batch that is all of one process.
    ///
    /// # Errors
    /// What is to be done about it.
    pub(super) async fn send(
        &mut self,
        process: Option<ProcessKey>,
        batch: Vec<T>,
    ) -> Result<Taken, Failure> {
        // The exporter has this time limit too; this one also covers waiting for the connection.
        let limit = self.target.timeout + CONNECT;
        let hearing = self.hearing.clone();
        let exporter = self.exporter(process).map_err(|e| Failure::Never { why: e.to_string() })?;
        let (sent, taken) = hearing.hear(tokio::time::timeout(limit, T::export(exporter, batch))).await;
        match sent {
            Ok(Ok(())) => Ok(taken),
            Ok(Err(e)) => Err(self.wire.failure(&e.to_string())),
            Err(_) => {
                Err(Failure::Later { why: format!("no answer within {} s", limit.as_secs()), after: None })
            }
        }
    }

    fn exporter(&mut self, process: Option<ProcessKey>) -> Result<&T::Exporter, ExporterBuildError> {
        let known = self.kept.iter().position(|(key, _)| *key == process).and_then(|at| self.kept.remove(at));
        let entry = match known {
            Some(entry) => entry,
            None => (process, T::exporter(&self.target, &self.wire, &self.resources.of(process))?),
        };
        self.kept.truncate(EXPORTERS - 1);
        self.kept.push_front(entry);
        self.kept.front().map(|(_, e)| e).ok_or_else(|| {
            // Cannot be: it was just put there.
            ExporterBuildError::InternalFailure("no exporter".to_owned())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grpc(text: &str) -> Failure {
        grpc_failure(&format!("Operation failed: TonicTracesClient export failed with gRPC code: {text}"))
    }

    #[test]
    fn codes_are_told_apart_as_the_specification_says() {
        for code in ["Unavailable", "Cancelled", "DeadlineExceeded", "Aborted", "DataLoss"] {
            assert!(matches!(grpc(code), Failure::Later { .. }), "{code}");
        }
        for code in
            ["InvalidArgument", "Unauthenticated", "PermissionDenied", "Unimplemented", "Unknown", "NotFound"]
        {
            assert!(matches!(grpc(code), Failure::Never { .. }), "{code}");
        }
        for code in ["OutOfRange", "ResourceExhausted"] {
            assert!(matches!(grpc(code), Failure::TooLarge { .. }), "{code}");
        }
        assert!(matches!(grpc("Unavailable: tcp connect error: refused"), Failure::Later { .. }));
        assert!(matches!(grpc("Unknown: transport error: broken pipe"), Failure::Later { .. }));
    }
}
