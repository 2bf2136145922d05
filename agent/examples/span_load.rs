//! For `cargo xtask bench spans`: sends the spans of two engines for rooms that the workload makes, as fast as the rooms come, and is
//! whom the agent hands them on to.
//!
//! Prints the address of the receiver, waits for a line on standard input, sends, and prints one JSON line: what was sent, how it was
//! answered, what came out of the agent. Prefill's processes send over gRPC, decode's over HTTP, each one request after the other and at
//! most 512 spans in one, as the OpenTelemetry SDK does.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    clippy::float_arithmetic,
    reason = "a measuring tool"
)]

use std::convert::Infallible;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use axum::http::{HeaderMap, HeaderValue, Request, Response};
use bytes::{BufMut as _, Bytes, BytesMut};
use clap::Parser;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::trace::v1::Span;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tonic::client::GrpcService as _;
use tonic::transport::{Channel, Endpoint};

#[path = "../tests/spans_support/mod.rs"]
mod spans_support;
use spans_support::{Engine, Release, bytes_of};

/// Spans of one request (`OTEL_BSP_MAX_EXPORT_BATCH_SIZE`).
const BATCH: usize = 512;

/// How often a process sends what has ended (SGLang: every 0.5 s; more evenly here).
const EVERY: Duration = Duration::from_millis(100);

/// So long after a room is due its spans are sent: it has ended by then, and is still kept (the agent keeps the last 4096 that ended).
const LAG: Duration = Duration::from_millis(1500);

/// Requests of one process that wait at most; what finds no place is counted.
const WAITING: usize = 64;

const METHOD: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

#[derive(Parser)]
struct Args {
    /// The agent's receiver, gRPC.
    #[arg(long)]
    grpc: SocketAddr,
    /// The same, HTTP.
    #[arg(long)]
    http: SocketAddr,
    /// The workload's: its room numbers are made from it.
    #[arg(long)]
    seed: u64,
    /// Rooms per second.
    #[arg(long)]
    rate: u32,
    /// Seconds.
    #[arg(long)]
    seconds: u64,
}

/// What was counted.
#[derive(Default)]
struct Counts {
    sent: AtomicU64,
    spans: AtomicU64,
    bytes: AtomicU64,
    turned_away: AtomicU64,
    late: AtomicU64,
    handed_on: AtomicU64,
    handed_on_bytes: AtomicU64,
}

/// One export request.
struct Export {
    bytes: Vec<u8>,
    spans: u64,
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    let args = Args::parse();
    let counts = Arc::new(Counts::default());
    let sink = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", sink.local_addr().unwrap());
    tokio::spawn(serve(sink, Arc::clone(&counts)));
    tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await.unwrap().unwrap();
    let began = Instant::now();
    produce(&args, &counts).await;
    let took = began.elapsed().saturating_sub(LAG);
    let of = |n: &AtomicU64| n.load(Ordering::Relaxed);
    let end = Instant::now() + Duration::from_secs(20);
    while of(&counts.handed_on_bytes) < of(&counts.bytes) && Instant::now() < end {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!(
        "{}",
        serde_json::json!({
            "seconds": took.as_secs_f64(), "requests": of(&counts.sent), "spans": of(&counts.spans),
            "bytes": of(&counts.bytes), "turned_away": of(&counts.turned_away), "late": of(&counts.late),
            "handed_on": of(&counts.handed_on), "handed_on_bytes": of(&counts.handed_on_bytes),
        })
    );
}

/// Makes the spans of rooms as they are due and gives them to the processes that send.
async fn produce(args: &Args, counts: &Arc<Counts>) {
    let (mut processes, mut tasks) = (Vec::new(), Vec::new());
    for http in [false, false, true, true] {
        let (to, exports) = mpsc::channel(WAITING);
        processes.push(to);
        let counts = Arc::clone(counts);
        tasks.push(if http {
            tokio::spawn(post(args.http, exports, counts))
        } else {
            tokio::spawn(call(args.grpc, exports, counts))
        });
    }
    let all = u64::from(args.rate) * args.seconds;
    let (mut next, began) = (0, tokio::time::Instant::now());
    let mut clock = tokio::time::interval_at(began + LAG, EVERY);
    while next < all {
        let now = clock.tick().await;
        let due = ((now - began).saturating_sub(LAG).as_secs_f64() * f64::from(args.rate)) as u64;
        let wall =
            SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().saturating_sub(LAG);
        let mut spans: [Vec<Span>; 4] = Default::default();
        for n in next..due.min(all) {
            let (room, at) = (room(args.seed, n), wall.as_nanos() as u64);
            for (role, engine) in
                [Engine::prefill(Release::Hex, room, at), Engine::decode(Release::Hex, room, at)]
                    .into_iter()
                    .enumerate()
            {
                let sent = engine.sent(5, 10);
                spans[role * 2].extend(sent.front.into_iter().chain(sent.request));
                spans[role * 2 + 1].extend(sent.computed.into_iter().chain(sent.rest));
            }
        }
        next = next.max(due.min(all));
        for (to, spans) in processes.iter().zip(spans) {
            for part in spans.chunks(BATCH) {
                let export = Export { bytes: bytes_of(part.to_vec()), spans: part.len() as u64 };
                if to.try_send(export).is_err() {
                    counts.late.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }
    drop(processes);
    for task in tasks {
        task.await.unwrap();
    }
}

/// Room of the workload's `n`th request (`Stream::room` there).
const fn room(seed: u64, n: u64) -> u64 {
    let mut x = seed.wrapping_add(n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (x ^ (x >> 31)) >> 1
}

/// Counts an answer.
fn answered(counts: &Counts, export: (u64, u64), taken: bool) {
    let (spans, bytes) = export;
    if taken {
        counts.sent.fetch_add(1, Ordering::Relaxed);
        counts.spans.fetch_add(spans, Ordering::Relaxed);
        counts.bytes.fetch_add(bytes, Ordering::Relaxed);
    } else {
        counts.turned_away.fetch_add(1, Ordering::Relaxed);
    }
}

async fn post(to: SocketAddr, mut exports: mpsc::Receiver<Export>, counts: Arc<Counts>) {
    // The HTTP client wants to know its cryptography even where it speaks plain HTTP; a second call changes nothing.
    drop(rustls::crypto::ring::default_provider().install_default());
    let (client, url) = (reqwest::Client::new(), format!("http://{to}/v1/traces"));
    while let Some(Export { bytes, spans }) = exports.recv().await {
        let size = bytes.len() as u64;
        let request = client.post(&url).header("content-type", "application/x-protobuf").body(bytes);
        let taken = request.send().await.is_ok_and(|answer| answer.status().is_success());
        answered(&counts, (spans, size), taken);
    }
}

async fn call(to: SocketAddr, mut exports: mpsc::Receiver<Export>, counts: Arc<Counts>) {
    let mut channel: Channel = Endpoint::from_shared(format!("http://{to}")).unwrap().connect_lazy();
    while let Some(Export { bytes, spans }) = exports.recv().await {
        let size = bytes.len() as u64;
        let taken = exported(&mut channel, &bytes).await.is_some_and(|status| status == "0");
        answered(&counts, (spans, size), taken);
    }
}

/// A gRPC call; its status.
async fn exported(channel: &mut Channel, message: &[u8]) -> Option<HeaderValue> {
    poll_fn(|cx| channel.poll_ready(cx)).await.ok()?;
    let mut frame = BytesMut::with_capacity(message.len() + 5);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(message.len()).ok()?);
    frame.put_slice(message);
    let request = Request::post(METHOD).header("content-type", "application/grpc").header("te", "trailers");
    let answer =
        channel.call(request.body(tonic::body::Body::new(Full::new(frame.freeze()))).ok()?).await.ok()?;
    let (head, body) = answer.into_parts();
    let whole = body.collect().await.ok()?;
    let trailers = whole.trailers().and_then(|t| t.get("grpc-status"));
    trailers.or(head.headers.get("grpc-status")).cloned()
}

/// Whom the agent hands spans on to: counts them.
async fn serve(listener: TcpListener, counts: Arc<Counts>) {
    while let Ok((stream, _)) = listener.accept().await {
        let counts = Arc::clone(&counts);
        let service = service_fn(move |request: Request<Incoming>| {
            let counts = Arc::clone(&counts);
            async move {
                if let Ok(whole) = request.into_body().collect().await {
                    counts.handed_on.fetch_add(1, Ordering::Relaxed);
                    // Without gRPC's head of a message.
                    let size = (whole.to_bytes().len() as u64).saturating_sub(5);
                    counts.handed_on_bytes.fetch_add(size, Ordering::Relaxed);
                }
                let mut trailers = HeaderMap::new();
                trailers.insert("grpc-status", HeaderValue::from_static("0"));
                let body = Full::new(Bytes::from_static(&[0; 5]))
                    .with_trailers(std::future::ready(Some(Ok(trailers))));
                let mut answer = Response::new(body);
                answer.headers_mut().insert("content-type", HeaderValue::from_static("application/grpc"));
                Ok::<_, Infallible>(answer)
            }
        });
        tokio::spawn(async move {
            // The agent's end of the connection is its own affair.
            let _ = http2::Builder::new(TokioExecutor::new())
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}
