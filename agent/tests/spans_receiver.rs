//! The receiver of engines' spans against real clients and bad ones, and what it hands on.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod export_receiver;
mod spans_support;

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::poll_fn;
use std::io::Write as _;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::http::{HeaderMap, Request, Response};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry::trace::{SpanContext, SpanKind, Status, TraceFlags, TraceState};
use opentelemetry::{InstrumentationScope, SpanId, TraceId};
use opentelemetry_otlp::{
    Compression, Protocol as Wanted, SpanExporter, WithExportConfig as _, WithHttpConfig as _,
    WithTonicConfig as _,
};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanExporter as _, SpanLinks};
use prost::Message as _;
use roomtrace::engine::otlp::{Listen, MAX_MESSAGE, SpanReceiver};
use roomtrace::export::counters::{Counters, Reason, Signal};
use roomtrace::export::otlp::{ForwardConfig, Forwarder, Protocol, QueueConfig};
use roomtrace::spans::{MAX_SPANS, SchedulerSpan, What};
use spans_support::{Engine, Release, bytes_of, request_of};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::client::GrpcService as _;
use tonic::transport::{Channel, Endpoint};

const ROOM: u64 = 9_000_000_000_000_000_001;
const AT: u64 = 1_790_000_000_000_000_000;
const METHOD: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

fn anywhere() -> Listen {
    let any = Some("127.0.0.1:0".parse().unwrap());
    Listen { grpc: any, http: any }
}

async fn receiver() -> SpanReceiver {
    SpanReceiver::start(anywhere(), None).await.unwrap()
}

async fn came(receiver: &SpanReceiver) -> Vec<SchedulerSpan> {
    until(|| receiver.take()).await
}

/// Waits for what must come.
async fn until<T>(mut what: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(it) = what() {
            return it;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn spans() -> Vec<Span> {
    let sent = Engine::prefill(Release::Hex, ROOM, AT).sent(50, 100);
    [sent.front, sent.computed, sent.rest, sent.request].concat()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    to.write_all(bytes).unwrap();
    to.finish().unwrap()
}

fn results(receiver: &SpanReceiver) -> Vec<(&'static str, &'static str, u64)> {
    receiver.counters().requests().filter(|(_, _, n)| *n > 0).collect()
}

/// The HTTP client wants to know its cryptography even where it speaks plain HTTP; a second call changes nothing.
fn client() -> reqwest::Client {
    drop(rustls::crypto::ring::default_provider().install_default());
    reqwest::Client::new()
}

async fn post(to: SocketAddr, headers: &[(&str, &str)], body: Vec<u8>) -> (u16, HeaderMap, Bytes) {
    let mut request = client().post(format!("http://{to}/v1/traces")).body(body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.headers().clone(), answer.bytes().await.unwrap())
}

const PROTOBUF: (&str, &str) = ("content-type", "application/x-protobuf");

fn frame(compressed: u8, message: &[u8]) -> Vec<u8> {
    let mut frame = vec![compressed];
    frame.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
    frame.extend(message);
    frame
}

/// A gRPC call byte by byte: status, message, details, and the answer.
async fn call(
    to: SocketAddr,
    path: &str,
    headers: &[(&str, &str)],
    body: Vec<u8>,
) -> (String, HeaderMap, Bytes) {
    let mut channel: Channel = Endpoint::from_shared(format!("http://{to}")).unwrap().connect_lazy();
    poll_fn(|cx| channel.poll_ready(cx)).await.unwrap();
    let mut request = Request::post(path).header("content-type", "application/grpc").header("te", "trailers");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = tonic::body::Body::new(Full::new(Bytes::from(body)));
    let answer = channel.call(request.body(body).unwrap()).await.unwrap();
    let (head, body) = answer.into_parts();
    assert_eq!(head.status, 200);
    let whole = body.collect().await.unwrap();
    let mut all = head.headers;
    all.extend(whole.trailers().cloned().unwrap_or_default());
    let status = all.get("grpc-status").unwrap().to_str().unwrap().to_owned();
    (status, all, whole.to_bytes())
}

fn span_data() -> SpanData {
    let context = SpanContext::new(
        TraceId::from(7u128),
        SpanId::from(9u64),
        TraceFlags::SAMPLED,
        false,
        TraceState::NONE,
    );
    SpanData {
        span_context: context,
        parent_span_id: SpanId::INVALID,
        parent_span_is_remote: false,
        span_kind: SpanKind::Internal,
        name: "prefill_forward".into(),
        start_time: std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(5),
        end_time: std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(6),
        attributes: Vec::new(),
        dropped_attributes_count: 0,
        events: SpanEvents::default(),
        links: SpanLinks::default(),
        status: Status::Unset,
        instrumentation_scope: InstrumentationScope::builder("sglang server").build(),
    }
}

#[tokio::test]
async fn the_opentelemetry_sdk_is_served_over_both_transports_with_and_without_gzip() {
    let r = receiver().await;
    let at = r.listening();
    let (grpc, http) =
        (format!("http://{}", at.grpc.unwrap()), format!("http://{}/v1/traces", at.http.unwrap()));
    let tonic = || SpanExporter::builder().with_tonic().with_endpoint(&grpc);
    let post = || {
        let b = SpanExporter::builder().with_http().with_http_client(client());
        b.with_protocol(Wanted::HttpBinary).with_endpoint(&http)
    };
    for exporter in [
        tonic().build().unwrap(),
        tonic().with_compression(Compression::Gzip).build().unwrap(),
        post().build().unwrap(),
        post().with_compression(Compression::Gzip).build().unwrap(),
    ] {
        exporter.export(vec![span_data(), span_data()]).await.unwrap();
        let spans = came(&r).await;
        assert_eq!(spans.len(), 2);
        assert_eq!(spans[0].what, What::Stage("prefill_forward".into()));
        assert_eq!((spans[0].begin, spans[0].end), (5_000_000_000, 6_000_000_000));
    }
    assert_eq!(results(&r), [("grpc", "accepted", 2), ("http", "accepted", 2)]);
    assert_eq!(r.waiting(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn curl_is_served() {
    let r = receiver().await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("request");
    std::fs::write(&file, bytes_of(spans())).unwrap();
    let url = format!("http://{}/v1/traces", r.listening().http.unwrap());
    let out = std::process::Command::new("curl")
        .args([
            "-sS",
            "-o",
            "-",
            "-w",
            "%{http_code} %{content_type}",
            "-H",
            "Content-Type: application/x-protobuf",
        ])
        .arg("--data-binary")
        .arg(format!("@{}", file.display()))
        .arg(url)
        .output();
    let Ok(out) = out else { return }; // No curl here.
    assert_eq!(String::from_utf8_lossy(&out.stdout), "200 application/x-protobuf");
    assert_eq!(came(&r).await.len(), spans().len());
}

#[tokio::test]
async fn bad_requests_over_http_get_the_answers_that_the_specification_demands() {
    let r = receiver().await;
    let to = r.listening().http.unwrap();
    let good = bytes_of(spans());
    let large = vec![0; MAX_MESSAGE + 1];
    let bomb = gzip(&vec![0; 256 << 20]);
    assert!(bomb.len() < 1 << 20);
    let zipped = gzip(&good);
    let gz = ("content-encoding", "gzip");
    let json = ("content-type", "application/json");
    for (headers, body, wanted) in [
        (&[PROTOBUF][..], b"certainly no protobuf".to_vec(), 400),
        (&[PROTOBUF], good[..good.len() - 3].to_vec(), 400),
        (&[PROTOBUF, gz], good.clone(), 400),
        (&[PROTOBUF, gz], zipped[..zipped.len() - 9].to_vec(), 400),
        (&[PROTOBUF], large, 413),
        (&[PROTOBUF, gz], bomb, 413),
        (&[PROTOBUF, ("content-encoding", "zstd")], good.clone(), 415),
        (&[PROTOBUF, ("content-encoding", "deflate, gzip")], good.clone(), 415),
        (&[("content-type", "application/x-protobufs")], good.clone(), 415),
        (&[json], b"{}".to_vec(), 415),
        (&[], good.clone(), 415),
    ] {
        let (status, head, body) = post(to, headers, body).await;
        assert_eq!(status, wanted, "{headers:?}");
        assert_eq!(head["content-type"], "application/x-protobuf");
        assert!(!head.contains_key("retry-after"), "it is not worth another try");
        // google.rpc.Status: code and message.
        assert!(body.len() > 4 && body[0] == 0x08 && body[2] == 0x12, "{body:?}");
    }
    let client = client();
    let get = client.get(format!("http://{to}/v1/traces")).send().await.unwrap();
    assert_eq!((get.status().as_u16(), get.headers()["allow"].as_bytes()), (405, &b"POST"[..]));
    let logs = client.post(format!("http://{to}/v1/logs")).body("").send().await.unwrap();
    assert_eq!(logs.status(), 404);
    // It goes on.
    assert_eq!(post(to, &[PROTOBUF, gz], zipped).await.0, 200);
    assert_eq!(came(&r).await.len(), spans().len());
    assert_eq!(
        results(&r),
        [
            ("http", "accepted", 1),
            ("http", "malformed", 4),
            ("http", "too_large", 2),
            ("http", "not_served", 7)
        ]
    );
}

/// RFC 9110: neither media types (8.3.1) nor codings (8.4.1) have a case.
#[tokio::test]
async fn types_and_compressions_are_known_in_any_case_and_with_parameters() {
    let r = receiver().await;
    let at = r.listening();
    let good = bytes_of(spans());
    for kind in
        ["Application/X-Protobuf", "application/x-protobuf; charset=utf-8", "APPLICATION/X-PROTOBUF ;a=b"]
    {
        assert_eq!(post(at.http.unwrap(), &[("content-type", kind)], good.clone()).await.0, 200, "{kind}");
        assert_eq!(came(&r).await.len(), spans().len());
    }
    for coding in ["GZIP", "Gzip", "x-gzip"] {
        let headers = [PROTOBUF, ("content-encoding", coding)];
        assert_eq!(post(at.http.unwrap(), &headers, gzip(&good)).await.0, 200, "{coding}");
        assert_eq!(came(&r).await.len(), spans().len());
        let (status, ..) =
            call(at.grpc.unwrap(), METHOD, &[("grpc-encoding", coding)], frame(1, &gzip(&good))).await;
        assert_eq!(status, "0", "{coding}");
        assert_eq!(came(&r).await.len(), spans().len());
    }
    assert_eq!(post(at.http.unwrap(), &[PROTOBUF, ("content-encoding", "Identity")], good).await.0, 200);
}

/// Whatever connects and says nothing, or not all of its greeting.
#[tokio::test]
async fn silent_connections_keep_nobody_out_and_are_closed() {
    let r = receiver().await;
    let at = r.listening();
    for to in [at.grpc.unwrap(), at.http.unwrap()] {
        let mut silent = Vec::new();
        // More than are served at once.
        for n in 0..300 {
            let mut stream = tokio::net::TcpStream::connect(to).await.unwrap();
            if n % 2 == 0 && Some(to) == at.grpc {
                stream.write_all(b"PRI * HTTP/2.0").await.unwrap();
            }
            silent.push(stream);
        }
        let good = bytes_of(spans());
        if Some(to) == at.grpc {
            assert_eq!(call(to, METHOD, &[], frame(0, &good)).await.0, "0");
            // All of them, also those that nobody's place was needed for.
            for stream in &mut silent {
                // Closed, or reset where something unread lay there.
                assert!(!matches!(stream.read(&mut [0]).await, Ok(1)));
            }
            let closed = || results(&r).iter().find(|(_, result, _)| *result == "silent").map(|(_, _, n)| *n);
            until(|| (closed() == Some(300)).then_some(())).await;
        } else {
            assert_eq!(post(to, &[PROTOBUF], good).await.0, 200);
        }
    }
}

#[tokio::test]
async fn a_client_that_still_sends_gets_its_refusal_and_no_reset() {
    let r = receiver().await;
    let to = r.listening().http.unwrap();
    for (path, status) in [("/v1/traces", "413"), ("/v1/logs", "404")] {
        let mut stream = tokio::net::TcpStream::connect(to).await.unwrap();
        let length = MAX_MESSAGE + (1 << 20);
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {to}\r\nContent-Type: application/x-protobuf\r\nContent-Length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // One that is refused long before it is done.
        for _ in 0..length >> 13 {
            stream.write_all(&[0; 1 << 13]).await.unwrap();
            tokio::task::yield_now().await;
        }
        let mut answer = vec![0; 1024];
        let n = stream.read(&mut answer).await.unwrap();
        let line = String::from_utf8_lossy(&answer[..n]).lines().next().unwrap().to_owned();
        assert!(line.starts_with(&format!("HTTP/1.1 {status}")), "{line}");
    }
}

#[tokio::test]
async fn bad_requests_over_grpc_get_the_codes_that_the_specification_demands() {
    let r = receiver().await;
    let to = r.listening().grpc.unwrap();
    let good = bytes_of(spans());
    let gz = ("grpc-encoding", "gzip");
    let bomb = gzip(&vec![0; 256 << 20]);
    for (path, headers, body, code) in [
        (METHOD, &[][..], frame(0, b"certainly no protobuf"), "3"),
        (METHOD, &[], frame(0, &good[..good.len() - 1]), "3"),
        (METHOD, &[], frame(0, &good)[..20].to_vec(), "3"),
        (METHOD, &[], Vec::new(), "3"),
        (METHOD, &[], frame(1, &good), "3"),
        (METHOD, &[gz], frame(1, &good), "3"),
        (METHOD, &[gz], frame(1, &bomb), "8"),
        (METHOD, &[], frame(0, &vec![0; MAX_MESSAGE + 1]), "8"),
        (METHOD, &[("grpc-encoding", "zstd")], frame(1, &good), "12"),
        ("/opentelemetry.proto.collector.logs.v1.LogsService/Export", &[], frame(0, b""), "12"),
    ] {
        let (status, head, _) = call(to, path, headers, body).await;
        assert_eq!(status, code, "{path} {headers:?} {head:?}");
        assert!(!head.contains_key("grpc-status-details-bin"), "it is not worth another try");
    }
    for (headers, body) in
        [(&[][..], frame(0, &good)), (&[gz], frame(0, &good)), (&[gz], frame(1, &gzip(&good)))]
    {
        let (status, _, answer) = call(to, METHOD, headers, body).await;
        assert_eq!(
            (status.as_str(), &answer[..]),
            ("0", &[0, 0, 0, 0, 0][..]),
            "an empty response, as all was taken"
        );
        assert_eq!(came(&r).await.len(), spans().len());
    }
}

#[tokio::test]
async fn what_is_not_used_is_a_partial_success() {
    let r = receiver().await;
    let to = r.listening().http.unwrap();
    let nameless = Span { name: String::new(), ..spans()[0].clone() };
    let (status, _, body) = post(to, &[PROTOBUF], bytes_of(vec![nameless, spans()[0].clone()])).await;
    let partial = ExportTraceServiceResponse::decode(body).unwrap().partial_success.unwrap();
    assert_eq!((status, partial.rejected_spans), (200, 1));
    assert!(partial.error_message.contains("1 spans without"), "{}", partial.error_message);
    let many = vec![spans()[0].clone(); MAX_SPANS + 7];
    let (_, _, body) = post(to, &[PROTOBUF], bytes_of(many)).await;
    assert_eq!(ExportTraceServiceResponse::decode(body).unwrap().partial_success.unwrap().rejected_spans, 7);
    // Others' spans are no fault.
    let foreign = request_of("another tracer", spans()).encode_to_vec();
    assert!(post(to, &[PROTOBUF], foreign).await.2.is_empty());
    let counted: Vec<_> = r.counters().spans().collect();
    let n = spans().len() as u64;
    assert_eq!(
        counted,
        [("scheduler", MAX_SPANS as u64 + 1), ("foreign", n), ("invalid", 1), ("left_out", 7)]
    );
}

#[tokio::test]
async fn where_nobody_takes_them_clients_are_told_to_come_again() {
    let r = receiver().await;
    let at = r.listening();
    let body = bytes_of(vec![spans()[0].clone(); MAX_SPANS]);
    let mut sent = 0;
    let (head, answer) = loop {
        let (status, head, answer) = post(at.http.unwrap(), &[PROTOBUF], body.clone()).await;
        if status != 200 {
            assert_eq!(status, 503);
            break (head, answer);
        }
        sent += 1;
        assert!(sent < 100, "there is no limit");
    };
    assert_eq!(head["retry-after"], "1");
    assert!(answer.windows(9).any(|w| w == b"RetryInfo"));
    let (status, head, _) = call(at.grpc.unwrap(), METHOD, &[], frame(0, &body)).await;
    assert_eq!(status, "14");
    assert!(head.contains_key("grpc-status-details-bin"));
    assert_eq!(r.waiting(), sent * MAX_SPANS);
    // Once they are taken there is place again.
    for _ in 0..sent {
        assert_eq!(r.take().unwrap().len(), MAX_SPANS);
    }
    assert_eq!(post(at.http.unwrap(), &[PROTOBUF], body).await.0, 200);
    assert_eq!(results(&r).iter().filter(|(_, result, _)| *result == "busy").count(), 2);
}

/// Whoever got the spans before: keeps every request as it came.
#[derive(Clone, Default)]
struct Target {
    came: Arc<Mutex<Vec<(HeaderMap, Bytes)>>>,
    /// HTTP status, or gRPC status with details, to answer with before all is well.
    script: Arc<Mutex<VecDeque<(u16, &'static str)>>>,
}

impl Target {
    fn bodies(&self) -> Vec<Bytes> {
        self.came.lock().unwrap().iter().map(|(_, body)| body.clone()).collect()
    }

    async fn serve(&self, listener: tokio::net::TcpListener, grpc: bool) {
        while let Ok((stream, _)) = listener.accept().await {
            let target = self.clone();
            let service = service_fn(move |request| {
                let target = target.clone();
                async move { Ok::<_, Infallible>(target.answer(request, grpc).await) }
            });
            tokio::spawn(async move {
                let io = TokioIo::new(stream);
                if grpc {
                    let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                        .serve_connection(io, service)
                        .await;
                } else {
                    let _ = hyper::server::conn::http1::Builder::new().serve_connection(io, service).await;
                }
            });
        }
    }

    async fn answer(
        &self,
        request: Request<Incoming>,
        grpc: bool,
    ) -> Response<http_body_util::combinators::UnsyncBoxBody<Bytes, Infallible>> {
        assert_eq!(request.uri().path(), if grpc { METHOD } else { "/v1/traces" });
        let (head, body) = request.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        let told = self.script.lock().unwrap().pop_front();
        let mut answer = Response::new(Full::new(Bytes::new()).boxed_unsync());
        match told {
            Some((status, details)) if grpc => {
                answer.headers_mut().insert("grpc-status", status.into());
                if !details.is_empty() {
                    answer.headers_mut().insert("grpc-status-details-bin", details.parse().unwrap());
                }
            }
            Some((status, _)) => *answer.status_mut() = status.try_into().unwrap(),
            None => {
                self.came.lock().unwrap().push((head.headers, body));
                if grpc {
                    let mut trailers = HeaderMap::new();
                    trailers.insert("grpc-status", 0.into());
                    let body = Full::new(Bytes::from_static(&[0; 5]))
                        .with_trailers(std::future::ready(Some(Ok(trailers))));
                    answer = Response::new(body.boxed_unsync());
                }
            }
        }
        answer.headers_mut().insert(
            "content-type",
            if grpc { "application/grpc" } else { "application/x-protobuf" }.parse().unwrap(),
        );
        answer
    }
}

fn forward_to(address: SocketAddr, protocol: Protocol) -> ForwardConfig {
    let headers = [("x-tenant".to_owned(), roomtrace::export::otlp::Secret("blue".to_owned()))];
    ForwardConfig {
        endpoint: Some(format!("http://{address}").into()),
        protocol: Some(protocol),
        headers: headers.into(),
        ..ForwardConfig::default()
    }
}

/// A target, and a receiver that hands on to it.
async fn handing_on(
    grpc: bool,
    script: Vec<(u16, &'static str)>,
) -> (Target, SpanReceiver, Forwarder, Arc<Counters>) {
    let target = Target::default();
    target.script.lock().unwrap().extend(script);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let serving = target.clone();
    tokio::spawn(async move { serving.serve(listener, grpc).await });
    let counters = Arc::new(Counters::default());
    let protocol = if grpc { Protocol::Grpc } else { Protocol::HttpProtobuf };
    let forwarder = Forwarder::start(&forward_to(address, protocol), Arc::clone(&counters)).unwrap().unwrap();
    let receiver = SpanReceiver::start(anywhere(), Some(forwarder.handle())).await.unwrap();
    (target, receiver, forwarder, counters)
}

/// With a field that no version of OTLP has: decoding and encoding again would lose it.
fn with_unknown_field() -> Vec<u8> {
    let mut bytes = bytes_of(spans());
    bytes.extend([0xfa, 0x3f, 3, b'n', b'e', b'w']);
    bytes
}

#[tokio::test]
async fn what_is_handed_on_is_what_came_byte_by_byte() {
    let plain = with_unknown_field();
    let zipped = gzip(&plain);
    for grpc in [false, true] {
        let (target, r, _forwarder, counters) = handing_on(grpc, Vec::new()).await;
        let at = r.listening();
        let gz = ("grpc-encoding", "gzip");
        assert_eq!(post(at.http.unwrap(), &[PROTOBUF], plain.clone()).await.0, 200);
        until(|| (target.bodies().len() == 1).then_some(())).await;
        assert_eq!(
            post(at.http.unwrap(), &[PROTOBUF, ("content-encoding", "gzip")], zipped.clone()).await.0,
            200
        );
        until(|| (target.bodies().len() == 2).then_some(())).await;
        assert_eq!(call(at.grpc.unwrap(), METHOD, &[], frame(0, &plain)).await.0, "0");
        until(|| (target.bodies().len() == 3).then_some(())).await;
        assert_eq!(call(at.grpc.unwrap(), METHOD, &[gz], frame(1, &zipped)).await.0, "0");
        until(|| (target.bodies().len() == 4).then_some(())).await;
        let framed = |n: u8, b: &[u8]| Bytes::from(if grpc { frame(n, b) } else { b.to_vec() });
        let wanted = [framed(0, &plain), framed(1, &zipped), framed(0, &plain), framed(1, &zipped)];
        assert_eq!(target.bodies(), wanted);
        let encoding = if grpc { "grpc-encoding" } else { "content-encoding" };
        for (i, (head, _)) in target.came.lock().unwrap().iter().enumerate() {
            assert_eq!(head.get(encoding).is_some_and(|v| v == "gzip"), i % 2 == 1);
            assert_eq!(head["x-tenant"], "blue");
        }
        let n = 4 * spans().len() as u64;
        until(|| (counters.sent(Signal::Spans) == n).then_some(())).await;
        // And the rooms get theirs.
        for _ in 0..4 {
            assert_eq!(came(&r).await.len(), spans().len());
        }
    }
}

#[tokio::test]
async fn a_request_of_no_bytes_is_handed_on_with_its_length() {
    let (target, r, _forwarder, _) = handing_on(false, Vec::new()).await;
    assert_eq!(post(r.listening().http.unwrap(), &[PROTOBUF], Vec::new()).await.0, 200);
    until(|| (target.bodies().len() == 1).then_some(())).await;
    assert_eq!(target.bodies(), [Bytes::new()]);
    let came = target.came.lock().unwrap();
    let lengths: Vec<_> = came[0].0.get_all("content-length").iter().collect();
    assert_eq!(lengths, ["0"]);
}

#[tokio::test]
async fn what_is_refused_here_is_not_handed_on_and_foreign_spans_are() {
    let (target, r, _forwarder, _) = handing_on(false, Vec::new()).await;
    let http = r.listening().http.unwrap();
    assert_eq!(post(http, &[PROTOBUF], b"garbage".to_vec()).await.0, 400);
    let foreign = request_of("another tracer", spans()).encode_to_vec();
    assert_eq!(post(http, &[PROTOBUF], foreign.clone()).await.0, 200);
    until(|| (!target.bodies().is_empty()).then_some(())).await;
    assert_eq!(target.bodies(), [Bytes::from(foreign)]);
    // A span that is not used here may be used there: nothing is rejected, something is said.
    let nameless = Span { name: String::new(), ..spans()[0].clone() };
    let (_, _, body) = post(http, &[PROTOBUF], bytes_of(vec![nameless])).await;
    let partial = ExportTraceServiceResponse::decode(body).unwrap().partial_success.unwrap();
    assert_eq!(partial.rejected_spans, 0);
    assert!(!partial.error_message.is_empty());
}

/// `RetryInfo` of no delay.
const RETRY_NOW: &str = "CAgaLgoodHlwZS5nb29nbGVhcGlzLmNvbS9nb29nbGUucnBjLlJldHJ5SW5mbxICCgA";

#[tokio::test]
async fn failures_that_pass_are_tried_again_and_others_are_not() {
    let n = spans().len() as u64;
    for (grpc, script, sent, reason) in [
        (false, vec![(503, ""), (429, "")], true, Reason::Rejected),
        (true, vec![(14, ""), (8, RETRY_NOW)], true, Reason::Rejected),
        (false, vec![(400, "")], false, Reason::Rejected),
        (false, vec![(413, "")], false, Reason::TooLarge),
        (true, vec![(3, "")], false, Reason::Rejected),
        (true, vec![(8, "")], false, Reason::Exhausted),
    ] {
        let (target, r, _forwarder, counters) = handing_on(grpc, script.clone()).await;
        assert_eq!(post(r.listening().http.unwrap(), &[PROTOBUF], bytes_of(spans())).await.0, 200);
        if sent {
            until(|| (counters.sent(Signal::Spans) == n).then_some(())).await;
            assert_eq!(target.bodies().len(), 1, "{script:?}");
        } else {
            until(|| (counters.dropped(Signal::Spans, reason) == n).then_some(())).await;
            assert!(target.bodies().is_empty(), "{script:?}");
        }
    }
}

#[tokio::test]
async fn spans_that_the_target_leaves_out_are_counted() {
    let n = spans().len() as u64;
    for protocol in [Protocol::Grpc, Protocol::HttpProtobuf] {
        let target = export_receiver::Receiver::answering([export_receiver::Answer::Partly(2, "over quota")]);
        let address =
            if protocol == Protocol::Grpc { target.grpc_here().await } else { target.http_here().await };
        let counters = Arc::new(Counters::default());
        let forwarder =
            Forwarder::start(&forward_to(address, protocol), Arc::clone(&counters)).unwrap().unwrap();
        let r = SpanReceiver::start(anywhere(), Some(forwarder.handle())).await.unwrap();
        assert_eq!(post(r.listening().http.unwrap(), &[PROTOBUF], bytes_of(spans())).await.0, 200);
        until(|| (counters.dropped(Signal::Spans, Reason::Rejected) == 2).then_some(())).await;
        assert_eq!(counters.sent(Signal::Spans), n - 2);
        assert_eq!(target.received().traces.len(), 1);
    }
}

/// A port that refuses whoever comes until it listens, and that nobody else gets meanwhile.
fn refusing() -> (tokio::net::TcpSocket, SocketAddr) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    (socket, address)
}

/// Requests that differ.
fn numbered(n: u64) -> Vec<u8> {
    let sent = Engine::prefill(Release::Hex, ROOM + n, AT).sent(50, 100);
    bytes_of([sent.front, sent.computed, sent.rest, sent.request].concat())
}

#[tokio::test]
async fn where_a_target_has_no_place_clients_come_again_and_rooms_get_each_request_once() {
    // Nobody listens there yet.
    let (socket, address) = refusing();
    let counters = Arc::new(Counters::default());
    let queue = QueueConfig { items: 10, ..QueueConfig::default() };
    let config = ForwardConfig { queue, ..forward_to(address, Protocol::HttpProtobuf) };
    let forwarder = Forwarder::start(&config, Arc::clone(&counters)).unwrap().unwrap();
    let r = SpanReceiver::start(anywhere(), Some(forwarder.handle())).await.unwrap();
    let (grpc, http) = (r.listening().grpc.unwrap(), r.listening().http.unwrap());
    let n = spans().len() as u64;
    for k in 0..10 {
        assert_eq!(post(http, &[PROTOBUF], numbered(k)).await.0, 200);
        assert_eq!(came(&r).await.len() as u64, n);
    }
    // No more place: each is to come again, and comes; the rooms have it from the first time on.
    for again in [false, true] {
        let (status, head, answer) = post(http, &[PROTOBUF], numbered(10)).await;
        assert_eq!((status, head["retry-after"].as_bytes()), (503, &b"1"[..]));
        assert!(answer.windows(9).any(|w| w == b"RetryInfo"));
        let (status, head, _) = call(grpc, METHOD, &[], frame(0, &numbered(11))).await;
        assert_eq!(status, "14");
        assert!(head.contains_key("grpc-status-details-bin"));
        for _ in 0..2 {
            assert_eq!(r.take().map(|spans| spans.len() as u64), (!again).then_some(n));
        }
    }
    assert_eq!(counters.dropped(Signal::Spans, Reason::QueueFull), 0, "nothing was taken and lost");
    assert_eq!(
        results(&r),
        [("grpc", "forward_full", 2), ("http", "accepted", 10), ("http", "forward_full", 2)]
    );
    assert_eq!(r.counters().spans().next(), Some(("scheduler", 12 * n)), "each once");
    assert_eq!(forwarder.handle().waiting().requests, 10);
    // It comes up, and gets what was kept and what comes again, compressed anew by its client.
    let target = Target::default();
    let listener = socket.listen(1024).unwrap();
    let serving = target.clone();
    tokio::spawn(async move { serving.serve(listener, false).await });
    until(|| (counters.sent(Signal::Spans) == 10 * n).then_some(())).await;
    let gz = ("content-encoding", "gzip");
    assert_eq!(post(http, &[PROTOBUF, gz], gzip(&numbered(10))).await.0, 200);
    assert_eq!(call(grpc, METHOD, &[], frame(0, &numbered(11))).await.0, "0");
    until(|| (counters.sent(Signal::Spans) == 12 * n).then_some(())).await;
    assert!(r.take().is_none(), "the rooms had these");
    let mut wanted: Vec<Bytes> = (0..12).map(|k| numbered(k).into()).collect();
    wanted[10] = gzip(&numbered(10)).into();
    let mut bodies = target.bodies();
    bodies.sort();
    wanted.sort();
    assert_eq!(bodies, wanted);
    assert_eq!(forwarder.handle().waiting().bytes, 0);
}

#[tokio::test]
async fn what_never_fits_is_said_to_be_lost_and_counted() {
    let (_refuses, address) = refusing();
    let counters = Arc::new(Counters::default());
    let queue = QueueConfig { bytes: 100, ..QueueConfig::default() };
    let config = ForwardConfig { queue, ..forward_to(address, Protocol::HttpProtobuf) };
    let forwarder = Forwarder::start(&config, Arc::clone(&counters)).unwrap().unwrap();
    let r = SpanReceiver::start(anywhere(), Some(forwarder.handle())).await.unwrap();
    let (status, _, body) = post(r.listening().http.unwrap(), &[PROTOBUF], bytes_of(spans())).await;
    let partial = ExportTraceServiceResponse::decode(body).unwrap().partial_success.unwrap();
    let n = spans().len();
    assert_eq!((status, partial.rejected_spans), (200, i64::try_from(n).unwrap()));
    assert!(partial.error_message.contains("spans.forward.queue.bytes"), "{}", partial.error_message);
    assert_eq!(counters.dropped(Signal::Spans, Reason::QueueFull), n as u64);
    assert_eq!(came(&r).await.len(), n, "the rooms get theirs all the same");
}

#[tokio::test]
async fn what_grows_too_old_and_what_is_left_at_the_end_is_counted() {
    let (_refuses, address) = refusing();
    let n = spans().len() as u64;
    for (keep, reason) in
        [(Duration::from_millis(100), Reason::Expired), (Duration::from_mins(5), Reason::Shutdown)]
    {
        let counters = Arc::new(Counters::default());
        let queue = QueueConfig { keep, ..QueueConfig::default() };
        let config = ForwardConfig { queue, ..forward_to(address, Protocol::Grpc) };
        let forwarder = Forwarder::start(&config, Arc::clone(&counters)).unwrap().unwrap();
        let r = SpanReceiver::start(anywhere(), Some(forwarder.handle())).await.unwrap();
        assert_eq!(post(r.listening().http.unwrap(), &[PROTOBUF], bytes_of(spans())).await.0, 200);
        if reason == Reason::Expired {
            until(|| (counters.dropped(Signal::Spans, reason) == n).then_some(())).await;
        }
        r.stop().await;
        forwarder.shutdown(tokio::time::Instant::now() + Duration::from_millis(300)).await;
        assert_eq!(counters.dropped(Signal::Spans, reason), n, "{reason:?}");
    }
}

#[tokio::test]
async fn an_address_that_is_taken_is_named_with_a_way_out() {
    let first = receiver().await;
    let taken = first.listening().grpc;
    let error = SpanReceiver::start(Listen { grpc: taken, http: None }, None).await.unwrap_err().to_string();
    assert!(error.contains(&taken.unwrap().to_string()) && error.contains("spans.grpc"), "{error}");
}
