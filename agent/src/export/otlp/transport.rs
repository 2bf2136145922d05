//! Requests of this agent's own to a receiver, over one shared connection: encoded, compressed, sent, and what their answer means.
//!
//! A resource is kept for each process, as it is read while the process lives. Trying again is up to the queue above, which knows what is
//! flagged and for how long to keep it.

use std::collections::VecDeque;
use std::io::Write as _;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
use opentelemetry_proto::transform::logs::tonic::group_logs_by_resource_and_scope;
use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;
use opentelemetry_sdk::logs::{LogBatch, SdkLogRecord};
use opentelemetry_sdk::trace::SpanData;
use prost::Message;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::config::Protocol;
use super::forward::Payload;
use super::raw::{self, Taken};
use super::resource::{ProcessKey, Resources};
use super::settings::{OtlpError, Target};
use super::{logs, spans};
use crate::export::counters::Signal;

/// Resources kept: engine processes a host can sensibly have. The least recently used one makes room.
const RESOURCES: usize = 64;

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
    Http(reqwest::Client),
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
            Protocol::HttpProtobuf => super::tls::http_client(target).map(Self::Http).map_err(wrong),
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

/// Something that can be exported: spans, log records.
pub(super) trait Export: Clone + Send + Sync + 'static {
    const SIGNAL: Signal;

    /// The request that carries a batch.
    fn request(batch: Vec<Self>, resource: &ResourceAttributesWithSchema) -> impl Message;

    /// Upper bound of its encoded size.
    fn size(&self) -> usize;
}

impl Export for SpanData {
    const SIGNAL: Signal = Signal::Traces;

    fn request(batch: Vec<Self>, resource: &ResourceAttributesWithSchema) -> impl Message {
        ExportTraceServiceRequest { resource_spans: group_spans_by_resource_and_scope(batch, resource) }
    }

    fn size(&self) -> usize {
        spans::size(self)
    }
}

impl Export for SdkLogRecord {
    const SIGNAL: Signal = Signal::Logs;

    fn request(batch: Vec<Self>, resource: &ResourceAttributesWithSchema) -> impl Message {
        let scope = spans::scope();
        let entries: Vec<_> = batch.iter().map(|r| (r, &scope)).collect();
        let batch = LogBatch::new(&entries);
        ExportLogsServiceRequest { resource_logs: group_logs_by_resource_and_scope(&batch, resource) }
    }

    fn size(&self) -> usize {
        logs::size(self)
    }
}

/// What goes over the wire for a request with `count` items.
///
/// # Errors
/// Compressing into memory does not fail.
pub(super) fn payload(target: &Target, request: &impl Message, count: u64) -> std::io::Result<Payload> {
    let plain = request.encode_to_vec();
    let bytes = if target.gzip {
        let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
        gzip.write_all(&plain)?;
        gzip.finish()?
    } else {
        plain
    };
    Ok(Payload { bytes: Bytes::from(bytes), gzip: target.gzip, spans: count })
}

/// One signal's way to its receiver. Resources by process, the most recently used in front.
pub(super) struct Exporter {
    target: Target,
    wire: Wire,
    resources: Resources,
    kept: VecDeque<(Option<ProcessKey>, Arc<ResourceAttributesWithSchema>)>,
}

impl Exporter {
    pub(super) fn new(target: Target, wire: Wire, resources: Resources) -> Self {
        Self { target, wire, resources, kept: VecDeque::new() }
    }

    pub(super) fn endpoint(&self) -> &str {
        &self.target.endpoint
    }

    /// Sends a batch that is all of one process.
    ///
    /// # Errors
    /// What is to be done about it.
    pub(super) async fn send<T: Export>(
        &mut self,
        process: Option<ProcessKey>,
        batch: Vec<T>,
    ) -> Result<Taken, Failure> {
        let count = batch.len() as u64;
        // Apart, so that the request as it was before it was encoded is not there while its answer is waited for.
        let payload = {
            let resource = self.resource(process);
            let request = T::request(batch, &resource);
            payload(&self.target, &request, count).map_err(|e| Failure::Never { why: e.to_string() })?
        };
        raw::send(&self.target, &self.wire, &payload, T::SIGNAL).await
    }

    fn resource(&mut self, process: Option<ProcessKey>) -> Arc<ResourceAttributesWithSchema> {
        let known = self.kept.iter().position(|(key, _)| *key == process).and_then(|at| self.kept.remove(at));
        let resource =
            known.map_or_else(|| Arc::new((&self.resources.of(process)).into()), |(_, known)| known);
        self.kept.truncate(RESOURCES - 1);
        self.kept.push_front((process, Arc::clone(&resource)));
        resource
    }
}
