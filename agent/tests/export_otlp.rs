//! OTLP end to end, against receivers in this process: what arrives, and what happens when it does not.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::metrics::v1::{metric, number_data_point};
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use rooms::model::Event;
use roomtrace::export::clock::Clock;
use roomtrace::export::counters::{Reason, Signal};
use roomtrace::export::otlp::{Compression, OtlpConfig, Protocol, QueueConfig, Secret, TlsConfig};
use roomtrace::export::{Exports, Options};
use roomtrace::{event, export, rooms, sglang, verdict};
use tokio::net::{TcpListener, TcpSocket};
use tonic::Code;

mod export_receiver;
#[path = "../src/export/testing.rs"]
mod testing;

use export_receiver::{Answer, Certificates, Receiver, certificates, resource_text, text, until};
use testing::{EPOCH, closed, full_snapshot, identity, life, pinned};

const GRACE: Duration = Duration::from_secs(30);

fn to(endpoint: String) -> OtlpConfig {
    OtlpConfig {
        endpoint: Some(endpoint.into()),
        timeout: Some(Duration::from_secs(5)),
        ..OtlpConfig::default()
    }
}

fn over_http(endpoint: String) -> OtlpConfig {
    OtlpConfig { protocol: Some(Protocol::HttpProtobuf), ..to(endpoint) }
}

async fn started(otlp: OtlpConfig) -> Exports {
    Exports::start(Options { otlp, ..Options::default() }, identity()).await.unwrap()
}

fn tell(exports: &mut Exports, events: impl IntoIterator<Item = Event>) {
    let clock = Clock::fixed(EPOCH);
    events.into_iter().for_each(|e| exports.room_event(&e, &clock));
}

fn nanos(seconds: u64) -> u64 {
    EPOCH.unsigned_abs() + seconds * event::SECOND
}

/// Ids, times, attributes, resource, status, events: letter by letter.
fn check_life(r: &Receiver) {
    let received = r.received();
    for traces in &received.traces {
        for resource in &traces.resource_spans {
            let of = |key| resource_text(resource.resource.as_ref(), key);
            assert_eq!(of("service.name").as_deref(), Some("sglang"));
            assert_eq!(of("process.pid").as_deref(), Some("4711"));
            assert_eq!(of("host.id").as_deref(), Some("id-a"));
            assert_eq!(resource.scope_spans[0].scope.as_ref().unwrap().name, "roomtrace");
        }
    }
    let spans = r.spans();
    let trace = export::trace_id::trace_id(7, "").to_bytes().to_vec();
    assert!(spans.iter().all(|s| s.trace_id == trace && s.span_id.iter().any(|b| *b != 0)));
    let told: Vec<_> = spans.iter().filter(|s| s.name == "room_pinned").collect();
    assert_eq!(told.len(), 2);
    assert_ne!(told[0].span_id, told[1].span_id);
    let first =
        told.iter().find(|s| text(&s.attributes, "sglang.pd.confidence").unwrap() == "likely").unwrap();
    assert_eq!((first.start_time_unix_nano, first.end_time_unix_nano), (nanos(0), nanos(12)));
    assert_eq!(first.status.as_ref().unwrap().code(), StatusCode::Error);
    for (key, value) in [
        ("sglang.pd.room", "7"),
        ("sglang.pd.role", "prefill"),
        ("sglang.pd.pinned", "true"),
        ("sglang.pd.verdict", "abort_before_entry"),
        ("sglang.pd.owed_by", "prefill rank 0 at 10.0.0.2:4000 pid 4711"),
        ("sglang.pd.completeness", "full"),
        ("error.type", "abort_before_entry"),
        ("network.peer.address", "10.0.0.2"),
        ("network.peer.port", "4242"),
    ] {
        assert_eq!(text(&first.attributes, key).as_deref(), Some(value), "{key}");
    }
    let root = spans.iter().find(|s| s.name == "kv_transfer").unwrap();
    assert_eq!((root.start_time_unix_nano, root.end_time_unix_nano), (nanos(0), nanos(20)));
    assert!(root.parent_span_id.is_empty());
    assert_eq!(first.parent_span_id, root.span_id);
    assert_eq!(text(&root.attributes, "sglang.pd.pinned").as_deref(), Some("true"));
    assert_eq!(root.events.iter().map(|e| e.name.as_str()).collect::<Vec<_>>(), ["METADATA", "STATUS"]);
    assert_eq!(root.events[1].time_unix_nano, nanos(2));
    let children: Vec<_> = spans.iter().filter(|s| s.name == "transfer").collect();
    assert_eq!(children.len(), 2);
    assert!(children.iter().all(|s| s.parent_span_id == root.span_id));
    let records = r.records();
    let names: Vec<_> = records.iter().map(|l| l.event_name.as_str()).collect();
    assert_eq!(names, ["room_pinned", "verdict_changed", "room_closed"]);
    assert!(records.iter().all(|l| l.trace_id == trace && l.span_id == root.span_id));
    assert_eq!(records[0].time_unix_nano, nanos(12));
    assert_eq!(records[0].severity_text, "ERROR");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rooms_life_arrives_over_grpc() {
    let receiver = Receiver::default();
    let mut exports = started(to(format!("http://{}", receiver.grpc_here().await))).await;
    tell(&mut exports, life(7));
    exports.shutdown(GRACE).await;
    check_life(&receiver);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rooms_life_arrives_over_http_with_gzip_and_headers() {
    let receiver = Receiver::default();
    let config = OtlpConfig {
        headers: [("X-Tenant".to_owned(), Secret("blue".to_owned()))].into(),
        compression: Some(Compression::Gzip),
        ..over_http(format!("http://{}/", receiver.http_here().await))
    };
    let mut exports = started(config).await;
    tell(&mut exports, life(7));
    exports.shutdown(GRACE).await;
    check_life(&receiver);
    for head in receiver.received().heads {
        let has = |k: &str, v: &str| head.iter().any(|(hk, hv)| hk == k && hv == v);
        assert!(has("x-tenant", "blue") && has("content-encoding", "gzip"), "{head:?}");
        assert!(has("content-type", "application/x-protobuf"), "{head:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_and_gzip_work_over_grpc() {
    let receiver = Receiver::default();
    let config = OtlpConfig {
        headers: [("authorization".to_owned(), Secret("Bearer x".to_owned()))].into(),
        compression: Some(Compression::Gzip),
        ..to(format!("http://{}", receiver.grpc_here().await))
    };
    let mut exports = started(config).await;
    tell(&mut exports, [Event::Pinned(pinned(7).into())]);
    exports.shutdown(GRACE).await;
    assert_eq!(receiver.rooms("room_pinned"), ["7"]);
    for head in receiver.received().heads {
        assert!(head.contains(&("authorization".to_owned(), "Bearer x".to_owned())), "{head:?}");
        assert!(head.contains(&("grpc-encoding".to_owned(), "gzip".to_owned())), "{head:?}");
    }
}

/// And neither an error nor the address on the wire holds it.
#[tokio::test(flavor = "multi_thread")]
async fn a_login_in_the_endpoint_arrives_as_basic_authorization() {
    for http in [false, true] {
        let receiver = Receiver::default();
        let config = if http {
            over_http(format!("http://me:secret@{}", receiver.http_here().await))
        } else {
            to(format!("http://me:secret@{}", receiver.grpc_here().await))
        };
        let mut exports = started(config).await;
        tell(&mut exports, [Event::Pinned(pinned(7).into())]);
        exports.shutdown(GRACE).await;
        assert_eq!(receiver.rooms("room_pinned"), ["7"]);
        for head in receiver.received().heads {
            assert!(
                head.contains(&("authorization".to_owned(), "Basic bWU6c2VjcmV0".to_owned())),
                "{head:?}"
            );
            assert!(!format!("{head:?}").contains("secret"), "{head:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_trusts_the_given_authority_and_no_other() {
    let (mine, other) = (certificates(), certificates());
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, pem: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, pem).unwrap();
        path
    };
    let (right, wrong) = (file("right.pem", &mine.ca), file("wrong.pem", &other.ca));
    for http in [false, true] {
        let receiver = Receiver::default();
        let port = receiver.tls_here(http, &mine).await;
        let protocol = Some(if http { Protocol::HttpProtobuf } else { Protocol::Grpc });
        let config = |ca: &std::path::Path| OtlpConfig {
            protocol,
            tls: TlsConfig { ca: Some(ca.to_owned()), ..TlsConfig::default() },
            // Without a scheme it is TLS.
            ..to(format!("localhost:{port}"))
        };
        let mut exports = started(config(&wrong)).await;
        tell(&mut exports, [Event::Pinned(pinned(1).into())]);
        let counters = exports.counters();
        exports.shutdown(Duration::from_secs(2)).await;
        assert_eq!(counters.dropped(Signal::Traces, Reason::Shutdown), 1, "http: {http}");
        let mut exports = started(config(&right)).await;
        tell(&mut exports, [Event::Pinned(pinned(2).into())]);
        exports.shutdown(GRACE).await;
        assert_eq!(receiver.rooms("room_pinned"), ["2"], "http: {http}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_asks_who_comes_is_shown_the_given_certificate() {
    let (receivers, mine, other) = (certificates(), certificates(), certificates());
    let asks = Certificates { clients: Some(mine.ca.clone()), ..receivers };
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, pem: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, pem).unwrap();
        Some(path)
    };
    let ca = file("ca.pem", &asks.ca);
    let shown = |name: &str, c: &Certificates| TlsConfig {
        ca: ca.clone(),
        cert: file(&format!("{name}.pem"), &c.cert),
        key: file(&format!("{name}.key"), &c.key),
    };
    let (right, wrong) = (shown("mine", &mine), shown("other", &other));
    let none = TlsConfig { ca: ca.clone(), ..TlsConfig::default() };
    for http in [false, true] {
        let receiver = Receiver::default();
        let port = receiver.tls_here(http, &asks).await;
        let protocol = Some(if http { Protocol::HttpProtobuf } else { Protocol::Grpc });
        for (room, tls) in [(1, &none), (2, &wrong), (3, &right)] {
            let config = OtlpConfig { protocol, tls: tls.clone(), ..to(format!("localhost:{port}")) };
            let mut exports = started(config).await;
            tell(&mut exports, [Event::Pinned(pinned(room).into())]);
            let counters = exports.counters();
            exports.shutdown(if room == 3 { GRACE } else { Duration::from_secs(2) }).await;
            assert_eq!(
                counters.dropped(Signal::Traces, Reason::Shutdown),
                u64::from(room != 3),
                "{room}, http: {http}"
            );
        }
        assert_eq!(receiver.rooms("room_pinned"), ["3"], "http: {http}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_pinned_room_is_lost_in_an_outage_with_a_small_queue_and_drops_are_counted() {
    // It refuses whoever comes until it listens, and nobody else gets its port meanwhile.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let at = socket.local_addr().unwrap();
    let queue = QueueConfig { items: 64, ..QueueConfig::default() };
    let mut exports = started(OtlpConfig { queue, ..to(format!("http://{at}")) }).await;
    let counters = exports.counters();
    for n in 0..1000 {
        tell(&mut exports, [Event::Closed(closed(n).into())]);
        if n % 50 == 0 {
            tell(&mut exports, [Event::Pinned(pinned(n).into())]);
        }
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    let receiver = Receiver::default();
    receiver.clone().serve_grpc(socket.listen(1024).unwrap(), None, 4 << 20);
    until("delivery after the outage", || receiver.rooms("room_pinned").len() == 20).await;
    exports.shutdown(GRACE).await;
    let mut rooms: Vec<u64> = receiver.rooms("room_pinned").iter().map(|r| r.parse().unwrap()).collect();
    rooms.sort_unstable();
    assert_eq!(rooms, (0..20).map(|n| n * 50).collect::<Vec<_>>());
    assert_eq!(receiver.records().len(), 20);
    let arrived = receiver.spans().len() as u64;
    assert_eq!(counters.sent(Signal::Traces), arrived);
    let dropped = counters.dropped(Signal::Traces, Reason::QueueFull);
    assert!(dropped > 0);
    assert!(arrived <= 64 * 4, "more than the queue holds: {arrived}");
    // Each room gives four spans once it has ended; an event dropped before it became spans counts once.
    assert!(arrived + dropped <= 1000 * 4 + 20, "{arrived} + {dropped}");
    assert!(receiver.rooms("kv_transfer").len() as u64 + dropped >= 1000, "{arrived} + {dropped}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_that_hangs_costs_only_what_it_was_to_get() {
    let receiver = Receiver::answering(vec![Answer::Hang; 100]);
    let config = OtlpConfig {
        timeout: Some(Duration::from_secs(1)),
        ..to(format!("http://{}", receiver.grpc_here().await))
    };
    let dir = tempfile::tempdir().unwrap();
    let events = dir.path().join("events");
    let options = Options { otlp: config, events: Some(events.clone()), ..Options::default() };
    let mut exports = Exports::start(options, identity()).await.unwrap();
    let counters = exports.counters();
    // Far more than all queues hold; a call that waited for anything would not come back.
    for n in 0..20_000 {
        tell(&mut exports, [Event::Pinned(pinned(n).into())]);
    }
    exports.shutdown(Duration::from_secs(3)).await;
    assert!(receiver.spans().is_empty());
    for signal in [Signal::Traces, Signal::Logs] {
        let lost: u64 = Reason::ALL.iter().map(|r| counters.dropped(signal, *r)).sum();
        assert_eq!(lost, 20_000, "{signal:?}");
    }
    let lost = || Reason::ALL.iter().map(|r| counters.dropped(Signal::Events, *r)).sum::<u64>();
    // The thread that writes them may still have to count what it leaves out.
    until("the last event", || counters.sent(Signal::Events) + lost() == 20_000).await;
    let lines = std::fs::read_to_string(events).unwrap().lines().count() as u64;
    assert_eq!(lines, counters.sent(Signal::Events));
    assert_eq!(lines + lost(), 20_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn unavailable_is_tried_again_and_arrives_once() {
    for code in [Code::Unavailable, Code::ResourceExhausted, Code::DeadlineExceeded] {
        let receiver = Receiver::answering([Answer::Code(code), Answer::Code(code)]);
        let mut exports = started(to(format!("http://{}", receiver.grpc_here().await))).await;
        let counters = exports.counters();
        tell(&mut exports, [Event::Closed(closed(7).into())]);
        until("delivery after errors", || counters.sent(Signal::Traces) == 4).await;
        exports.shutdown(GRACE).await;
        assert_eq!(receiver.rooms("kv_transfer"), ["7"], "{code:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_refused_for_good_is_counted_and_not_tried_again() {
    let grpc = Receiver::answering(vec![Answer::Code(Code::InvalidArgument); 2]);
    let http = Receiver::answering(vec![Answer::Http(400, None); 2]);
    let configs = [
        (grpc.clone(), to(format!("http://{}", grpc.grpc_here().await))),
        (http.clone(), over_http(format!("http://{}", http.http_here().await))),
    ];
    for (receiver, config) in configs {
        let mut exports = started(config).await;
        let counters = exports.counters();
        tell(&mut exports, [Event::Pinned(pinned(1).into())]);
        until("refusal of both", || {
            counters.dropped(Signal::Traces, Reason::Rejected) == 1
                && counters.dropped(Signal::Logs, Reason::Rejected) == 1
        })
        .await;
        tell(&mut exports, [Event::Pinned(pinned(2).into())]);
        exports.shutdown(GRACE).await;
        assert_eq!(receiver.rooms("room_pinned"), ["2"]);
    }
}

/// What is logged by the thread that the test runs on.
#[derive(Clone, Default)]
struct Logged(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Logged {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Logged {
    fn lines(&self, with: &str) -> usize {
        String::from_utf8_lossy(&self.0.lock().unwrap()).lines().filter(|line| line.contains(with)).count()
    }
}

/// Nothing of it is sent again, and the operator hears of it once.
#[tokio::test]
async fn what_a_receiver_leaves_out_of_a_request_is_counted_and_told_once() {
    for http in [false, true] {
        let logged = Logged::default();
        let writer = logged.clone();
        let subscriber =
            tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
        let _guard = tracing::subscriber::set_default(subscriber);
        let receiver = Receiver::answering(vec![Answer::Partly(3, "over quota"); 2]);
        let config = if http {
            over_http(format!("http://{}", receiver.http_here().await))
        } else {
            to(format!("http://{}", receiver.grpc_here().await))
        };
        let mut exports = started(config).await;
        let counters = exports.counters();
        for n in [7, 8, 9] {
            tell(&mut exports, [Event::Closed(closed(n).into())]);
            let done = || counters.sent(Signal::Traces) + counters.dropped(Signal::Traces, Reason::Rejected);
            until("an answer", || done() == 4 * (n - 6)).await;
        }
        exports.shutdown(GRACE).await;
        assert_eq!(receiver.rooms("kv_transfer"), ["7", "8", "9"], "http: {http}");
        assert_eq!(counters.dropped(Signal::Traces, Reason::Rejected), 6, "http: {http}");
        assert_eq!(counters.sent(Signal::Traces), 6, "http: {http}");
        let lost: u64 = Reason::ALL.iter().map(|r| counters.dropped(Signal::Traces, *r)).sum();
        assert_eq!(lost, 6, "http: {http}");
        assert_eq!(logged.lines("rejected=3 why=\"over quota\""), 1, "http: {http}");
    }
}

/// More than was sent, less than nothing, or words alone, which are no loss.
#[tokio::test(flavor = "multi_thread")]
async fn a_receiver_cannot_make_the_counts_wrong() {
    for (rejected, lost) in [(i64::MAX, 4), (-5, 0), (0, 0)] {
        let receiver = Receiver::answering([Answer::Partly(rejected, "deprecated")]);
        let mut exports = started(to(format!("http://{}", receiver.grpc_here().await))).await;
        let counters = exports.counters();
        tell(&mut exports, [Event::Closed(closed(7).into())]);
        let done = || counters.sent(Signal::Traces) + counters.dropped(Signal::Traces, Reason::Rejected);
        until("an answer", || done() == 4).await;
        exports.shutdown(GRACE).await;
        assert_eq!(counters.dropped(Signal::Traces, Reason::Rejected), lost, "{rejected}");
        assert_eq!(counters.sent(Signal::Traces), 4 - lost, "{rejected}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_that_are_taken_in_part_are_counted() {
    for http in [false, true] {
        // Nothing else is sent than the last metrics.
        let receiver = Receiver::answering([Answer::Partly(2, "too many series")]);
        let config = if http {
            over_http(format!("http://{}", receiver.http_here().await))
        } else {
            to(format!("http://{}", receiver.grpc_here().await))
        };
        let exports = started(config).await;
        let counters = exports.counters();
        exports.shutdown(GRACE).await;
        assert_eq!(receiver.received().metrics.len(), 1, "http: {http}");
        assert_eq!(counters.dropped(Signal::Metrics, Reason::Rejected), 1, "http: {http}");
        assert_eq!(counters.sent(Signal::Metrics), 0, "http: {http}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quota_for_metrics_is_not_called_a_size() {
    for (code, reason) in [(Code::ResourceExhausted, Reason::Exhausted), (Code::OutOfRange, Reason::TooLarge)]
    {
        // Nothing else is sent than the last metrics.
        let receiver = Receiver::answering([Answer::Code(code)]);
        let exports = started(to(format!("http://{}", receiver.grpc_here().await))).await;
        let counters = exports.counters();
        exports.shutdown(GRACE).await;
        for other in Reason::ALL {
            let dropped = counters.dropped(Signal::Metrics, other);
            assert_eq!(dropped, u64::from(other == reason), "{code:?} {}", other.label());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn http_429_is_tried_again_not_before_the_time_it_names() {
    let receiver = Receiver::answering([Answer::Http(429, Some(3))]);
    let mut exports = started(over_http(format!("http://{}", receiver.http_here().await))).await;
    let counters = exports.counters();
    tell(&mut exports, [Event::Closed(closed(7).into())]);
    until("delivery after 429", || counters.sent(Signal::Traces) == 4).await;
    let times = receiver.received().times;
    assert!(times[1] - times[0] >= Duration::from_secs(3));
    exports.shutdown(GRACE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_too_large_for_the_receiver_are_split() {
    let receiver = Receiver::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    receiver.clone().serve_grpc(listener, None, 64 << 10);
    let mut exports = started(to(format!("http://{at}"))).await;
    let counters = exports.counters();
    for n in 0..300 {
        tell(&mut exports, [Event::Closed(closed(n).into())]);
    }
    until("all in small requests", || counters.sent(Signal::Traces) == 1200).await;
    exports.shutdown(GRACE).await;
    assert_eq!(receiver.rooms("kv_transfer").len(), 300);
    assert!(receiver.received().traces.len() > 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_item_that_no_request_can_hold_is_dropped_alone() {
    let receiver = Receiver::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap();
    receiver.clone().serve_grpc(listener, None, 8 << 10);
    let mut exports = started(to(format!("http://{at}"))).await;
    let counters = exports.counters();
    let mut large = pinned(1);
    large.messages = vec![large.messages[0]; 128].into();
    tell(
        &mut exports,
        [Event::Pinned(pinned(0).into()), Event::Pinned(large.into()), Event::Pinned(pinned(2).into())],
    );
    until("the small ones", || counters.sent(Signal::Traces) == 2).await;
    exports.shutdown(GRACE).await;
    let mut rooms = receiver.rooms("room_pinned");
    rooms.sort_unstable();
    assert_eq!(rooms, ["0", "2"]);
    assert_eq!(counters.dropped(Signal::Traces, Reason::TooLarge), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_file_holds_the_same_as_the_wire_and_reads_back() {
    let receiver = Receiver::default();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("otlp.jsonl");
    let config =
        OtlpConfig { file: Some(file.clone()), ..to(format!("http://{}", receiver.grpc_here().await)) };
    let mut exports = started(config).await;
    tell(&mut exports, life(7));
    let opened = rooms::model::FindingEvent::Opened(testing::finding().into());
    exports.finding_event(&opened, event::Mono(12_000_000_000), &Clock::fixed(EPOCH));
    exports.shutdown(GRACE).await;
    let written = std::fs::read_to_string(&file).unwrap();
    let mut spans = Vec::new();
    let mut records = Vec::new();
    for line in written.lines() {
        if line.starts_with("{\"resourceSpans\"") {
            let r: ExportTraceServiceRequest = serde_json::from_str(line).unwrap();
            spans.extend(r.resource_spans.into_iter().flat_map(|r| r.scope_spans).flat_map(|s| s.spans));
        } else {
            let r: ExportLogsServiceRequest = serde_json::from_str(line).unwrap();
            records
                .extend(r.resource_logs.into_iter().flat_map(|r| r.scope_logs).flat_map(|s| s.log_records));
        }
    }
    let found: Vec<_> = records.iter().filter(|r| r.event_name == "finding_opened").collect();
    assert_eq!(found.len(), 1, "a finding is a log record: {records:?}");
    assert!(found[0].trace_id.is_empty(), "and of no room's trace");
    assert_eq!((spans, records), (receiver.spans(), receiver.records()));
    let hex = export::trace_id::trace_id(7, "").to_string();
    assert!(written.contains(&format!("\"traceId\":\"{hex}\"")), "{written}");
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_waits_instead_of_dropping() {
    let receiver = Receiver::default();
    let dir = tempfile::tempdir().unwrap();
    let (file, events) = (dir.path().join("otlp"), dir.path().join("events"));
    let queue = QueueConfig { items: 16, ..QueueConfig::default() };
    let otlp = OtlpConfig {
        queue,
        file: Some(file.clone()),
        ..to(format!("http://{}", receiver.grpc_here().await))
    };
    let options = Options { otlp, events: Some(events.clone()), ..Options::default() };
    let mut exports = Exports::start(options, identity()).await.unwrap();
    let exports = tokio::task::spawn_blocking(move || {
        let clock = Clock::of_replay();
        (0..6000).for_each(|n| exports.room_event_wait(&Event::Closed(closed(n).into()), &clock));
        exports
    });
    exports.await.unwrap().shutdown(Duration::from_mins(1)).await;
    let lines = |path| std::fs::read_to_string(path).unwrap().lines().count();
    assert_eq!((lines(file), lines(events)), (6000, 6000));
    assert_eq!(receiver.rooms("kv_transfer").len(), 6000);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_arrive_with_the_last_values_at_the_end() {
    for http in [false, true] {
        let receiver = Receiver::default();
        let config = if http {
            over_http(format!("http://{}", receiver.http_here().await))
        } else {
            to(format!("http://{}", receiver.grpc_here().await))
        };
        let mut exports = started(config).await;
        exports.publish(full_snapshot());
        tell(&mut exports, [Event::Closed(closed(7).into())]);
        exports.shutdown(GRACE).await;
        let metrics = receiver.received().metrics;
        let last = &metrics.last().unwrap().resource_metrics[0];
        assert_eq!(resource_text(last.resource.as_ref(), "service.name").as_deref(), Some("roomtrace"));
        let all: Vec<_> = last.scope_metrics.iter().flat_map(|s| &s.metrics).collect();
        let named = |name: &str| all.iter().find(|m| m.name == name).unwrap_or_else(|| panic!("no {name}"));
        let Some(metric::Data::Gauge(gauge)) = &named("roomtrace_rooms_pinned").data else {
            panic!("no gauge")
        };
        assert_eq!(gauge.data_points[0].value, Some(number_data_point::Value::AsDouble(2.0)));
        assert_eq!(text(&gauge.data_points[0].attributes, "owed_instance").as_deref(), Some("node-a"));
        let Some(metric::Data::Sum(sum)) = &named("roomtrace_rooms_closed").data else { panic!("no sum") };
        assert!(sum.is_monotonic);
        let Some(metric::Data::Histogram(h)) = &named("roomtrace_room_phase_duration_seconds").data else {
            panic!("no histogram")
        };
        assert!(h.data_points.iter().any(|p| text(&p.attributes, "phase").as_deref() == Some("transfer")));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unusable_configuration_is_one_clear_error() {
    for (config, needle) in [
        (to("http://".to_owned()), "export.otlp.endpoint"),
        (to("unix:///run/x".to_owned()), "unix:///run/x"),
        (to("ftp://host:1".to_owned()), "http or https"),
        (to("ftp://me:secret@host:1".to_owned()), "ftp://<hidden>@host:1"),
        (
            OtlpConfig {
                tls: TlsConfig { ca: Some("/nonexistent/ca.pem".into()), ..TlsConfig::default() },
                ..to("https://localhost:1".to_owned())
            },
            "/nonexistent/ca.pem",
        ),
        (OtlpConfig { file: Some("/nonexistent/otlp".into()), ..OtlpConfig::default() }, "/nonexistent/otlp"),
    ] {
        let options = Options { otlp: config, ..Options::default() };
        let error = Exports::start(options, identity()).await.unwrap_err().to_string();
        assert!(error.contains(needle) && !error.contains("secret"), "{error}");
    }
}

/// Run by the test below, in a process of its own: variables cannot be set safely in this one.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a part of the_standard_environment_variables_are_enough"]
async fn child_with_environment() {
    let mut exports = started(OtlpConfig::default()).await;
    tell(&mut exports, life(7));
    exports.shutdown(GRACE).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_standard_environment_variables_are_enough() {
    let receiver = Receiver::default();
    let (grpc, http) = (receiver.grpc_here().await, receiver.http_here().await);
    let child = tokio::task::spawn_blocking(move || {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_with_environment", "--ignored"])
            .env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{grpc}"))
            .env("OTEL_EXPORTER_OTLP_HEADERS", "tenant=general")
            .env("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", format!("http://{http}/v1/logs"))
            .env("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "http/protobuf")
            .env("OTEL_EXPORTER_OTLP_LOGS_HEADERS", "tenant=logs%20only")
            .env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod")
            .env("OTEL_SERVICE_NAME", "my-roomtrace")
            .output()
            .unwrap()
    });
    let output = child.await.unwrap();
    assert!(output.status.success(), "{output:?}");
    check_life(&receiver);
    let received = receiver.received();
    let of = |head: &Vec<(String, String)>, key: &str| -> Vec<String> {
        head.iter().filter(|(k, _)| k == key).map(|(_, v)| v.clone()).collect()
    };
    let tenants: Vec<_> = received.heads.iter().map(|h| of(h, "tenant")).collect();
    assert!(tenants.contains(&vec!["general".to_owned()]), "{tenants:?}");
    assert!(tenants.contains(&vec!["logs only".to_owned()]), "{tenants:?}");
    assert!(tenants.iter().all(|t| t.len() == 1), "{tenants:?}");
    let spans = received.traces[0].resource_spans[0].resource.as_ref();
    assert_eq!(resource_text(spans, "deployment.environment.name").as_deref(), Some("prod"));
    let metrics = received.metrics[0].resource_metrics[0].resource.as_ref();
    assert_eq!(resource_text(metrics, "service.name").as_deref(), Some("my-roomtrace"));
}
