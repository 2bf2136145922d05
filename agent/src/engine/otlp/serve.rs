//! The two transports of OTLP: gRPC over HTTP/2, and protobuf over HTTP/1. Both hand a message to [`Intake`] and say what
//! became of it as the OTLP specification demands.
//!
//! Written on hyper: tonic decompresses a message without a limit and decodes it before its bytes can be kept.

use std::convert::Infallible;
use std::fmt::Write as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::{BufMut as _, Bytes, BytesMut};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use opentelemetry_proto::tonic::collector::trace::v1::{
    ExportTracePartialSuccess, ExportTraceServiceResponse,
};
use prost::Message as _;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::first::Silent;
use super::intake::{Accepted, FRAME, Intake, MAX_MESSAGE, Outcome, Protocol, RETRY, Refusal};
use super::status::{RetryInfo, Status};
use crate::accept::accept;

/// Clients of one transport at once: every process of an engine has a connection of its own.
const CONNECTIONS: usize = 256;

/// Requests of one gRPC connection at once. An exporter sends one after the other.
const STREAMS: u32 = 16;

/// Size of a request's head.
const HEAD: usize = 16 << 10;

/// Time for a request's head to arrive over HTTP, and how often a silent gRPC peer is asked whether it lives.
const ALIVE: Duration = Duration::from_secs(30);

/// How much of a message that is refused is read on and thrown away, and for how long: 16 of the longest.
const LINGER: (usize, Duration) = (16 * MAX_MESSAGE, Duration::from_secs(5));

/// Where gRPC exports traces to.
const METHOD: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// Where HTTP does.
const PATH: &str = "/v1/traces";

/// What they say that they send.
const GRPC: &str = "application/grpc";
const PROTOBUF: &str = "application/x-protobuf";

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// Serves until `stop` changes or its sender goes away.
pub(super) async fn serve(
    listener: TcpListener,
    protocol: Protocol,
    intake: Arc<Intake>,
    stop: watch::Receiver<bool>,
) {
    let (stopped, silent) = (stop.clone(), Arc::new(Silent::default()));
    let serve = |stream| {
        let served = connection(stream, protocol, Arc::clone(&silent), Arc::clone(&intake), stopped.clone());
        let intake = Arc::clone(&intake);
        async move {
            // A client's broken connection is its own affair.
            if let Ok(None) = served.await {
                intake.counters.request(protocol, Outcome::Silent);
            }
        }
    };
    accept(listener, CONNECTIONS, stop, || silent.make_way(), serve).await;
    silent.end();
}

/// `None`: closed, as nothing came on it.
async fn connection(
    stream: TcpStream,
    protocol: Protocol,
    silent: Arc<Silent>,
    intake: Arc<Intake>,
    stop: watch::Receiver<bool>,
) -> io::Result<Option<()>> {
    match protocol {
        Protocol::Grpc => {
            let Some(stream) = silent.greeted(stream).await? else { return Ok(None) };
            grpc_connection(stream, intake, stop).await;
        }
        Protocol::Http => {
            if silent.begun(&stream, ALIVE).await?.is_none() {
                return Ok(None);
            }
            http_connection(stream, intake, stop).await;
        }
    }
    Ok(Some(()))
}

async fn grpc_connection(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    intake: Arc<Intake>,
    mut stop: watch::Receiver<bool>,
) {
    let service = service_fn(move |request| {
        let intake = Arc::clone(&intake);
        async move { Ok::<_, Infallible>(grpc(&intake, request).await) }
    });
    let connection = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS)
        .max_header_list_size(u32::try_from(HEAD).unwrap_or(u32::MAX))
        .keep_alive_interval(ALIVE)
        .keep_alive_timeout(ALIVE / 3)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    // A client's broken connection is its own affair, so results are not looked at.
    tokio::select! {
        _ = connection.as_mut() => {}
        _ = stop.changed() => {
            connection.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(Duration::from_secs(1), connection).await;
        }
    }
}

async fn http_connection(stream: TcpStream, intake: Arc<Intake>, mut stop: watch::Receiver<bool>) {
    let service = service_fn(move |request| {
        let intake = Arc::clone(&intake);
        async move { Ok::<_, Infallible>(http(&intake, request).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(ALIVE)
        .max_buf_size(HEAD)
        .serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        _ = connection.as_mut() => {}
        _ = stop.changed() => {
            connection.as_mut().graceful_shutdown();
            let _ = tokio::time::timeout(Duration::from_secs(1), connection).await;
        }
    }
}

/// What the client gets when it was taken.
fn response(accepted: Accepted) -> Vec<u8> {
    let Accepted { rejected, message } = accepted;
    // A field that says nothing may not be set.
    let said = (rejected > 0 || !message.is_empty())
        .then_some(ExportTracePartialSuccess { rejected_spans: rejected, error_message: message });
    ExportTraceServiceResponse { partial_success: said }.encode_to_vec()
}

async fn grpc(intake: &Intake, request: Request<Incoming>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let kind = text(&head.headers, &header::CONTENT_TYPE);
    if head.method != Method::POST || !is_grpc(kind) {
        let refusal = Err::<(), _>(Refusal::NotServed("this port speaks gRPC".to_owned()));
        let _ = intake.count(Protocol::Grpc, refusal);
        return answer(StatusCode::UNSUPPORTED_MEDIA_TYPE, Bytes::new());
    }
    let taken = if head.uri.path() == METHOD {
        grpc_message(intake, &head.headers, body).await
    } else {
        Err(Refusal::NotServed(format!("no {}", shown(head.uri.path()))))
    };
    match intake.count(Protocol::Grpc, taken) {
        Ok(accepted) => grpc_answer(&response(accepted)),
        Err(refusal) => grpc_refusal(&refusal),
    }
}

/// `application/grpc`, also with `+proto` or parameters.
fn is_grpc(content_type: &str) -> bool {
    let kind = content_type.get(..GRPC.len());
    kind.is_some_and(|kind| kind.eq_ignore_ascii_case(GRPC))
}

/// Whether a message is gzip; both transports name the ways of compression alike. Their names have no case (RFC 9110, 8.4.1), and `x-gzip`
/// is another for `gzip` (8.4.1.3).
fn is_gzip(coding: &str) -> Result<bool, Refusal> {
    let coding = coding.trim();
    let any = |names: &[&str]| names.iter().any(|name| name.eq_ignore_ascii_case(coding));
    if any(&["", "identity"]) {
        Ok(false)
    } else if any(&["gzip", "x-gzip"]) {
        Ok(true)
    } else {
        Err(Refusal::Encoding)
    }
}

async fn grpc_message(intake: &Intake, headers: &HeaderMap, mut body: Incoming) -> Result<Accepted, Refusal> {
    let gzip = is_gzip(text(headers, &HeaderName::from_static("grpc-encoding")))?;
    let (mut frame, _permit) = intake.read(&mut body, MAX_MESSAGE + FRAME).await?;
    let cut = || Refusal::Malformed("not one whole gRPC message".to_owned());
    let head = frame.split_to(FRAME.min(frame.len()));
    let &[compressed, a, b, c, d] = head.as_ref() else { return Err(cut()) };
    if usize::try_from(u32::from_be_bytes([a, b, c, d])).ok() != Some(frame.len()) {
        return Err(cut());
    }
    match (compressed, gzip) {
        (0, _) => intake.take(frame, false).await,
        (1, true) => intake.take(frame, true).await,
        _ => Err(Refusal::Malformed("a compressed message without grpc-encoding".to_owned())),
    }
}

fn grpc_answer(message: &[u8]) -> Response<Body> {
    let mut frame = BytesMut::with_capacity(message.len() + FRAME);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.len()).unwrap_or_default());
    frame.put_slice(message);
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let body = Full::new(frame.freeze()).with_trailers(std::future::ready(Some(Ok(trailers))));
    let mut answer = Response::new(body.boxed_unsync());
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    answer
}

/// gRPC codes: `INVALID_ARGUMENT`, `RESOURCE_EXHAUSTED` (without `RetryInfo`: not to be tried again), UNIMPLEMENTED, UNAVAILABLE
/// (with `RetryInfo`: to be tried again then), CANCELLED.
const fn code(refusal: &Refusal) -> i32 {
    match refusal {
        Refusal::Malformed(_) => 3,
        Refusal::TooLarge => 8,
        Refusal::Encoding | Refusal::NotServed(_) => 12,
        Refusal::Busy | Refusal::ForwardFull => 14,
        Refusal::Slow => 1,
    }
}

fn status(refusal: &Refusal) -> Status {
    let details = if refusal.passes() { vec![RetryInfo::detail(RETRY)] } else { Vec::new() };
    Status { code: code(refusal), message: refusal.to_string(), details }
}

fn grpc_refusal(refusal: &Refusal) -> Response<Body> {
    let mut answer = answer(StatusCode::OK, Bytes::new());
    let headers = answer.headers_mut();
    let status = status(refusal);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    headers.insert("grpc-status", HeaderValue::from(status.code));
    if let Ok(message) = HeaderValue::from_str(&percent_encoded(&status.message)) {
        headers.insert("grpc-message", message);
    }
    if *refusal == Refusal::Encoding {
        headers.insert("grpc-accept-encoding", HeaderValue::from_static("identity,gzip"));
    }
    if !status.details.is_empty()
        && let Ok(details) = HeaderValue::from_str(&STANDARD_NO_PAD.encode(status.encode_to_vec()))
    {
        headers.insert("grpc-status-details-bin", details);
    }
    answer
}

/// `grpc-message`: printable ASCII but `%`.
fn percent_encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if matches!(byte, b' '..=b'~') && byte != b'%' {
            out.push(char::from(byte));
        } else {
            // Writing into a string does not fail.
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

async fn http(intake: &Intake, request: Request<Incoming>) -> Response<Body> {
    let (head, mut body) = request.into_parts();
    // A media type has no case, and may have parameters (RFC 9110, 8.3.1).
    let kind = text(&head.headers, &header::CONTENT_TYPE).split(';').next().unwrap_or_default().trim();
    let kind = kind.eq_ignore_ascii_case(PROTOBUF);
    let (found, posted) = (head.uri.path() == PATH, head.method == Method::POST);
    let (refused, taken) = match (found, posted, kind) {
        (false, _, _) => (StatusCode::NOT_FOUND, Err(format!("no {}", shown(head.uri.path())))),
        (true, false, _) => (StatusCode::METHOD_NOT_ALLOWED, Err("POST it".to_owned())),
        (true, true, true) => (StatusCode::OK, Ok(())),
        (true, true, false) => {
            (StatusCode::UNSUPPORTED_MEDIA_TYPE, Err("Content-Type: application/x-protobuf".to_owned()))
        }
    };
    let taken = match taken {
        Ok(()) => http_message(intake, &head.headers, &mut body).await,
        Err(why) => Err(Refusal::NotServed(why)),
    };
    // What has not come by now is not waited for again.
    if taken.as_ref().is_err_and(|refusal| *refusal != Refusal::Slow) {
        linger(&mut body).await;
    }
    match intake.count(Protocol::Http, taken) {
        Ok(accepted) => answer(StatusCode::OK, response(accepted).into()),
        Err(refusal) => http_refusal(&refusal, refused),
    }
}

/// Reads on for a while before a refusal. hyper closes a connection of which it has not read everything, and a client that still sends is
/// reset then: the answer can be lost with that.
async fn linger(body: &mut Incoming) {
    let (mut left, longest) = LINGER;
    let rest = async {
        while let Some(Ok(frame)) = body.frame().await
            && left > 0
        {
            left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
        }
    };
    // Whoever sends for longer is closed upon.
    let _ = tokio::time::timeout(longest, rest).await;
}

async fn http_message(
    intake: &Intake,
    headers: &HeaderMap,
    body: &mut Incoming,
) -> Result<Accepted, Refusal> {
    let gzip = is_gzip(text(headers, &header::CONTENT_ENCODING))?;
    let (message, _permit) = intake.read(body, MAX_MESSAGE).await?;
    intake.take(message, gzip).await
}

/// Every answer of this kind has a `Status` as its body (OTLP specification, "OTLP/HTTP response").
fn http_refusal(refusal: &Refusal, not_served: StatusCode) -> Response<Body> {
    let code = match refusal {
        Refusal::Malformed(_) => StatusCode::BAD_REQUEST,
        Refusal::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        Refusal::Encoding => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        Refusal::NotServed(_) => not_served,
        Refusal::Busy | Refusal::ForwardFull => StatusCode::SERVICE_UNAVAILABLE,
        Refusal::Slow => StatusCode::REQUEST_TIMEOUT,
    };
    let mut answer = answer(code, status(refusal).encode_to_vec().into());
    let headers = answer.headers_mut();
    match refusal {
        Refusal::Busy | Refusal::ForwardFull => {
            drop(headers.insert(header::RETRY_AFTER, HeaderValue::from(RETRY.as_secs())));
        }
        Refusal::Encoding => drop(headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("gzip"))),
        Refusal::NotServed(_) if code == StatusCode::METHOD_NOT_ALLOWED => {
            drop(headers.insert(header::ALLOW, HeaderValue::from_static("POST")));
        }
        // The rest of the message is not read.
        Refusal::TooLarge | Refusal::Slow => {
            drop(headers.insert(header::CONNECTION, HeaderValue::from_static("close")));
        }
        _ => {}
    }
    answer
}

fn answer(code: StatusCode, body: Bytes) -> Response<Body> {
    let mut answer = Response::new(Full::new(body).boxed_unsync());
    *answer.status_mut() = code;
    answer.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
    answer
}

fn text<'a>(headers: &'a HeaderMap, name: &HeaderName) -> &'a str {
    headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default()
}

/// A path of a client in an answer.
fn shown(path: &str) -> String {
    path.chars().take(100).collect()
}
