//! OTLP receivers in this process: gRPC and HTTP, plain and TLS, that answer as a test tells them to.
#![allow(dead_code, reason = "each test file uses its part")]

use std::collections::VecDeque;
use std::io::Read as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use opentelemetry_proto::tonic::collector::logs::v1::logs_service_server::{LogsService, LogsServiceServer};
use opentelemetry_proto::tonic::collector::logs::v1::{
    ExportLogsPartialSuccess, ExportLogsServiceRequest, ExportLogsServiceResponse,
};
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_server::{
    MetricsService, MetricsServiceServer,
};
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsPartialSuccess, ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{
    TraceService, TraceServiceServer,
};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceRequest, ExportTraceServiceResponse,
};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use opentelemetry_proto::tonic::logs::v1::LogRecord;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::net::TcpListener;
use tonic::codec::CompressionEncoding;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Certificate, Identity, Server, ServerTlsConfig};
use tonic::{Code, Request, Response, Status};

/// How to answer one request.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// gRPC code.
    Code(Code),
    /// HTTP status, with `Retry-After` seconds.
    Http(u16, Option<u64>),
    /// Never.
    Hang,
    /// Taken but for so many, and what is said of it.
    Partly(i64, &'static str),
}

/// An answer that says what of a request was not taken.
trait Partial {
    fn partial(rejected: i64, why: &str) -> Self;
}

impl Partial for ExportTraceServiceResponse {
    fn partial(rejected_spans: i64, why: &str) -> Self {
        let partial = ExportTracePartialSuccess { rejected_spans, error_message: why.to_owned() };
        Self { partial_success: Some(partial) }
    }
}

impl Partial for ExportLogsServiceResponse {
    fn partial(rejected_log_records: i64, why: &str) -> Self {
        let partial = ExportLogsPartialSuccess { rejected_log_records, error_message: why.to_owned() };
        Self { partial_success: Some(partial) }
    }
}

impl Partial for ExportMetricsServiceResponse {
    fn partial(rejected_data_points: i64, why: &str) -> Self {
        let partial = ExportMetricsPartialSuccess { rejected_data_points, error_message: why.to_owned() };
        Self { partial_success: Some(partial) }
    }
}

/// What came.
#[derive(Clone, Debug, Default)]
pub(crate) struct Received {
    pub(crate) traces: Vec<ExportTraceServiceRequest>,
    pub(crate) logs: Vec<ExportLogsServiceRequest>,
    pub(crate) metrics: Vec<ExportMetricsServiceRequest>,
    /// Headers or metadata of each request that came, accepted or not.
    pub(crate) heads: Vec<Vec<(String, String)>>,
    /// When each came.
    pub(crate) times: Vec<std::time::Instant>,
}

#[derive(Clone, Default)]
pub(crate) struct Receiver {
    received: Arc<Mutex<Received>>,
    /// Answers to give before accepting everything.
    script: Arc<Mutex<VecDeque<Answer>>>,
}

/// Server certificate and key, PEM, and the authority that signed it.
pub(crate) struct Certificates {
    pub(crate) ca: String,
    pub(crate) cert: String,
    pub(crate) key: String,
    /// The authority whose clients alone may come; `None`: everybody may.
    pub(crate) clients: Option<String>,
}

/// An authority made now, and a certificate of `localhost` by it.
pub(crate) fn certificates() -> Certificates {
    let ca_key = rcgen::KeyPair::generate().unwrap();
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca = params.self_signed(&ca_key).unwrap();
    let issuer = rcgen::Issuer::new(params, ca_key);
    let key = rcgen::KeyPair::generate().unwrap();
    let names = vec!["localhost".to_owned()];
    let cert = rcgen::CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap();
    Certificates { ca: ca.pem(), cert: cert.pem(), key: key.serialize_pem(), clients: None }
}

impl Receiver {
    pub(crate) fn answering(script: impl IntoIterator<Item = Answer>) -> Self {
        let receiver = Self::default();
        receiver.script.lock().unwrap().extend(script);
        receiver
    }

    pub(crate) fn received(&self) -> Received {
        self.received.lock().unwrap().clone()
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        let traces = self.received().traces;
        let resources = traces.into_iter().flat_map(|t| t.resource_spans);
        resources.flat_map(|r| r.scope_spans).flat_map(|s| s.spans).collect()
    }

    pub(crate) fn records(&self) -> Vec<LogRecord> {
        let logs = self.received().logs;
        let resources = logs.into_iter().flat_map(|t| t.resource_logs);
        resources.flat_map(|r| r.scope_logs).flat_map(|s| s.log_records).collect()
    }

    /// Rooms of the spans with this name.
    pub(crate) fn rooms(&self, name: &str) -> Vec<String> {
        let spans = self.spans().into_iter().filter(|s| s.name == name);
        spans.map(|s| text(&s.attributes, "sglang.pd.room").unwrap()).collect()
    }

    fn note(&self, head: Vec<(String, String)>) -> Option<Answer> {
        let mut received = self.received.lock().unwrap();
        received.heads.push(head);
        received.times.push(std::time::Instant::now());
        self.script.lock().unwrap().pop_front()
    }

    async fn grpc<T, R: Default + Partial>(
        &self,
        request: Request<T>,
        keep: impl FnOnce(&mut Received, T),
    ) -> Result<Response<R>, Status> {
        let head = request.metadata().clone().into_headers();
        let answer = match self.note(pairs(&head)) {
            Some(Answer::Code(code)) => return Err(Status::new(code, "as the test says")),
            Some(Answer::Hang) => std::future::pending().await,
            Some(Answer::Partly(rejected, why)) => R::partial(rejected, why),
            Some(Answer::Http(..)) | None => R::default(),
        };
        keep(&mut self.received.lock().unwrap(), request.into_inner());
        Ok(Response::new(answer))
    }

    /// Serves gRPC on `listener`; messages above `limit` bytes are refused.
    pub(crate) fn serve_grpc(self, listener: TcpListener, tls: Option<&Certificates>, limit: usize) {
        let mut server = Server::builder();
        if let Some(c) = tls {
            let identity = Identity::from_pem(&c.cert, &c.key);
            let mut tls = ServerTlsConfig::new().identity(identity);
            if let Some(clients) = &c.clients {
                tls = tls.client_ca_root(Certificate::from_pem(clients));
            }
            server = server.tls_config(tls).unwrap();
        }
        let gzip = CompressionEncoding::Gzip;
        let traces = TraceServiceServer::new(self.clone());
        let logs = LogsServiceServer::new(self.clone());
        let metrics = MetricsServiceServer::new(self);
        let router = server
            .add_service(traces.accept_compressed(gzip).max_decoding_message_size(limit))
            .add_service(logs.accept_compressed(gzip).max_decoding_message_size(limit))
            .add_service(metrics.accept_compressed(gzip).max_decoding_message_size(limit));
        tokio::spawn(async move { router.serve_with_incoming(TcpIncoming::from(listener)).await });
    }

    /// gRPC on a free port.
    pub(crate) async fn grpc_here(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        self.clone().serve_grpc(listener, None, 4 << 20);
        at
    }

    fn http_app(&self) -> axum::Router {
        axum::Router::new().route("/v1/{signal}", axum::routing::post(take)).with_state(self.clone())
    }

    /// HTTP on a free port.
    pub(crate) async fn http_here(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let app = self.http_app();
        tokio::spawn(async move { axum::serve(listener, app).await });
        at
    }

    /// TLS on a free port, with HTTP or gRPC in it.
    pub(crate) async fn tls_here(&self, http: bool, c: &Certificates) -> u16 {
        if http {
            return self.https_here(c).await.port();
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        self.clone().serve_grpc(listener, Some(c), 4 << 20);
        port
    }

    /// HTTP over TLS on a free port.
    async fn https_here(&self, c: &Certificates) -> SocketAddr {
        use rustls::pki_types::pem::PemObject as _;
        use rustls::pki_types::{CertificateDer, PrivateKeyDer};
        use rustls::server::WebPkiClientVerifier;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let cert = CertificateDer::from_pem_slice(c.cert.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(c.key.as_bytes()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .unwrap();
        let config = match &c.clients {
            None => config.with_no_client_auth(),
            Some(pem) => {
                let mut roots = rustls::RootCertStore::empty();
                roots.add(CertificateDer::from_pem_slice(pem.as_bytes()).unwrap()).unwrap();
                let asks = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                config.with_client_cert_verifier(asks.build().unwrap())
            }
        };
        let config = config.with_single_cert(vec![cert], key).unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let app = self.http_app();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, app) = (acceptor.clone(), app.clone());
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let service = hyper_util::service::TowerToHyperService::new(app);
                    let io = hyper_util::rt::TokioIo::new(stream);
                    let _ = hyper::server::conn::http1::Builder::new().serve_connection(io, service).await;
                });
            }
        });
        at
    }
}

async fn take(
    State(r): State<Receiver>,
    Path(signal): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> (StatusCode, HeaderMap, Vec<u8>) {
    let mut back = HeaderMap::new();
    let answer = match r.note(pairs(&headers)) {
        Some(Answer::Http(status, after)) => {
            if let Some(after) = after {
                back.insert("retry-after", after.into());
            }
            return (StatusCode::from_u16(status).unwrap(), back, Vec::new());
        }
        Some(Answer::Hang) => std::future::pending().await,
        // The answers of all signals are alike.
        Some(Answer::Partly(rejected, why)) => {
            ExportTraceServiceResponse::partial(rejected, why).encode_to_vec()
        }
        Some(Answer::Code(_)) | None => Vec::new(),
    };
    let body = if headers.get("content-encoding").is_some_and(|e| e == "gzip") {
        let mut plain = Vec::new();
        flate2::read::GzDecoder::new(&body[..]).read_to_end(&mut plain).unwrap();
        plain
    } else {
        body.to_vec()
    };
    let mut received = r.received.lock().unwrap();
    match signal.as_str() {
        "traces" => received.traces.push(ExportTraceServiceRequest::decode(&body[..]).unwrap()),
        "logs" => received.logs.push(ExportLogsServiceRequest::decode(&body[..]).unwrap()),
        "metrics" => received.metrics.push(ExportMetricsServiceRequest::decode(&body[..]).unwrap()),
        _ => return (StatusCode::NOT_FOUND, back, Vec::new()),
    }
    (StatusCode::OK, back, answer)
}

fn pairs(headers: &HeaderMap) -> Vec<(String, String)> {
    let texts = headers.iter().map(|(k, v)| (k.as_str().to_owned(), v.to_str().unwrap_or("").to_owned()));
    texts.collect()
}

#[tonic::async_trait]
impl TraceService for Receiver {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        self.grpc(request, |to, r| to.traces.push(r)).await
    }
}

#[tonic::async_trait]
impl LogsService for Receiver {
    async fn export(
        &self,
        request: Request<ExportLogsServiceRequest>,
    ) -> Result<Response<ExportLogsServiceResponse>, Status> {
        self.grpc(request, |to, r| to.logs.push(r)).await
    }
}

#[tonic::async_trait]
impl MetricsService for Receiver {
    async fn export(
        &self,
        request: Request<ExportMetricsServiceRequest>,
    ) -> Result<Response<ExportMetricsServiceResponse>, Status> {
        self.grpc(request, |to, r| to.metrics.push(r)).await
    }
}

/// An attribute as text.
pub(crate) fn text(attributes: &[KeyValue], key: &str) -> Option<String> {
    let value = attributes.iter().find(|kv| kv.key == key)?.value.as_ref()?.value.as_ref()?;
    Some(match value {
        any_value::Value::StringValue(s) => s.clone(),
        any_value::Value::BoolValue(b) => b.to_string(),
        any_value::Value::IntValue(n) => n.to_string(),
        other => format!("{other:?}"),
    })
}

/// An attribute of a resource as text.
pub(crate) fn resource_text(resource: Option<&Resource>, key: &str) -> Option<String> {
    text(&resource?.attributes, key)
}

/// Waits for something that other threads bring about.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..6000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("waited a minute in vain: {what}");
}
