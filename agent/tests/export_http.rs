//! HTTP API: rooms and pages, bad input, a busy or ended pipeline, health.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use std::net::SocketAddr;
use std::time::Duration;

use rooms::model::RoomSnapshot;
use roomtrace::export::clock::Clock;
use roomtrace::export::{Exports, Options};
use roomtrace::{event, export, rooms, sglang, verdict};

mod export_pipeline;
#[path = "../src/export/testing.rs"]
mod testing;

use export_pipeline::{Known, Pipeline};
use testing::{EPOCH, ask, closed, finding, get, identity, pinned};
use verdict::model::Finding;

async fn started() -> (Exports, SocketAddr) {
    export_pipeline::started(identity()).await
}

fn some() -> Known {
    let again = RoomSnapshot { incarnation: 1, ..closed(3) };
    Known {
        rooms: vec![pinned(5), closed(3), again, pinned(9), closed(1)],
        findings: vec![finding(), Finding { group: 0xdef, rooms: Vec::new(), room_count: 0, ..finding() }],
        closed: vec![
            Finding { closed_at: Some(event::Mono(20_000_000_000)), ..finding() },
            Finding { group: 0xfed, closed_at: Some(event::Mono(21_000_000_000)), ..finding() },
        ],
    }
}

async fn once(at: SocketAddr, path: &str) -> (u16, serde_json::Value) {
    let (status, _, body) = get(at, path, "").await;
    (status, serde_json::from_str(&body).unwrap())
}

/// Asks again where the pipeline was too busy, as the thread that stands for it is on a busy machine.
async fn json(at: SocketAddr, path: &str) -> (u16, serde_json::Value) {
    for _ in 0..30 {
        let (status, body) = once(at, path).await;
        if status != 503 || !body.to_string().contains("busy") {
            return (status, body);
        }
    }
    once(at, path).await
}

#[tokio::test]
async fn rooms_are_listed_filtered_and_paged() {
    let (exports, at) = started().await;
    let pipeline = Pipeline::start(exports, some());
    let rooms = |v: &serde_json::Value| {
        let rooms = v["rooms"].as_array().unwrap();
        rooms.iter().map(|r| r["room"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let (status, all) = json(at, "/api/v1/rooms").await;
    assert_eq!((status, rooms(&all)), (200, ["1", "3", "3", "5", "9"].map(str::to_owned).to_vec()));
    assert!(all["next"].is_null());
    let (_, only) = json(at, "/api/v1/rooms?pinned=true").await;
    assert_eq!(rooms(&only), ["5", "9"]);
    assert_eq!(only["rooms"][0]["verdict"]["class"], "abort_before_entry");
    assert_eq!(rooms(&json(at, "/api/v1/rooms?overdue=true").await.1), [] as [&str; 0]);
    let (_, first) = json(at, "/api/v1/rooms?limit=2").await;
    assert_eq!((rooms(&first), &first["next"]), (vec!["1".to_owned(), "3".to_owned()], &"3.0".into()));
    let (_, rest) = json(at, "/api/v1/rooms?limit=100&after=3.0").await;
    assert_eq!(rooms(&rest), ["3", "5", "9"]);
    pipeline.stop();
}

#[tokio::test]
async fn findings_are_listed_open_and_over() {
    let (exports, at) = started().await;
    let pipeline = Pipeline::start(exports, some());
    let (status, all) = json(at, "/api/v1/findings").await;
    assert_eq!(status, 200);
    let groups: Vec<_> =
        all["findings"].as_array().unwrap().iter().map(|f| f["group"].as_str().unwrap()).collect();
    assert_eq!((groups, &all["total"]), (vec!["0000000000000abc", "0000000000000def"], &2.into()));
    let first = &all["findings"][0];
    assert_eq!(first["rooms"], serde_json::json!(["7", "18446744073709551615"]));
    assert_eq!(
        (&first["room_count"], &first["engine"]["pid"], &first["rank"]),
        (&2.into(), &4711.into(), &0.into())
    );
    assert_eq!(all["closed"][0]["event"], "finding_closed");
    assert_eq!(all["closed"][0]["closed_at"], "2023-11-14T22:13:40.000000000Z");
    let (_, one) = json(at, "/api/v1/findings?limit=1").await;
    assert_eq!((one["findings"].as_array().unwrap().len(), &one["total"]), (1, &2.into()));
    assert_eq!(one["closed"].as_array().unwrap().len(), 1);
    assert_eq!(one["closed"][0]["group"], "0000000000000fed", "the newest");
    for bad in ["limit=0", "limit=501", "limit=x", "what=1"] {
        assert_eq!(json(at, &format!("/api/v1/findings?{bad}")).await.0, 400, "{bad}");
    }
    pipeline.stop();
}

#[tokio::test]
async fn a_finding_is_the_same_object_in_the_api_and_on_an_event_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("events.jsonl");
    let options = Options {
        events: Some(file.clone()),
        listen: Some("127.0.0.1:0".parse().unwrap()),
        ..Options::default()
    };
    let mut exports = Exports::start(options, identity()).await.unwrap();
    let at = exports.listening().unwrap();
    let (clock, now) = (Clock::fixed(EPOCH), event::Mono(30_000_000_000));
    exports.finding_event(&rooms::model::FindingEvent::Opened(finding().into()), now, &clock);
    exports.room_event(&rooms::model::Event::Pinned(pinned(5).into()), &clock);
    let over = Finding { closed_at: Some(event::Mono(20_000_000_000)), ..finding() };
    exports.finding_event(&rooms::model::FindingEvent::Closed(over.into()), now, &clock);
    let pipeline = Pipeline::start(exports, some());
    let (_, all) = json(at, "/api/v1/findings").await;
    pipeline.stop().shutdown(Duration::from_mins(1)).await;
    let text = std::fs::read_to_string(file).unwrap();
    let lines: Vec<serde_json::Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let names: Vec<_> = lines.iter().map(|l| l["event"].as_str().unwrap()).collect();
    assert_eq!(names, ["finding_opened", "room_pinned", "finding_closed"], "one stream, in order");
    assert_eq!((&lines[0], &lines[2]), (&all["findings"][0], &all["closed"][0]));
}

#[tokio::test]
async fn one_room_is_the_same_object_as_an_event_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("events.jsonl");
    let options = Options {
        events: Some(file.clone()),
        listen: Some("127.0.0.1:0".parse().unwrap()),
        ..Options::default()
    };
    let mut exports = Exports::start(options, identity()).await.unwrap();
    let at = exports.listening().unwrap();
    exports.room_event(&rooms::model::Event::Pinned(pinned(5).into()), &Clock::fixed(EPOCH));
    let pipeline = Pipeline::start(exports, some());
    let (status, _, body) = get(at, "/api/v1/rooms/5", "").await;
    assert_eq!(status, 200);
    pipeline.stop().shutdown(Duration::from_mins(1)).await;
    assert_eq!(std::fs::read_to_string(file).unwrap(), body + "\n");
}

#[tokio::test]
async fn the_newest_incarnation_is_shown_unless_another_is_asked_for() {
    let (exports, at) = started().await;
    let pipeline = Pipeline::start(exports, some());
    assert_eq!(json(at, "/api/v1/rooms/3").await.1["incarnation"], 1);
    assert_eq!(json(at, "/api/v1/rooms/3?incarnation=0").await.1["incarnation"], 0);
    assert_eq!(json(at, "/api/v1/rooms/3?incarnation=2").await.0, 404);
    pipeline.stop();
}

#[tokio::test]
async fn bad_input_is_named_and_costs_nothing() {
    let (exports, at) = started().await;
    let pipeline = Pipeline::start(exports, some());
    for (path, status) in [
        ("/api/v1/rooms?pinned=maybe", 400),
        ("/api/v1/rooms?overdue=perhaps", 400),
        ("/api/v1/rooms?overdue=true&pinned=true", 400),
        ("/api/v1/rooms?overdue=true&closed=true", 400),
        ("/api/v1/rooms?limit=0", 400),
        ("/api/v1/rooms?limit=501", 400),
        ("/api/v1/rooms?limit=-1", 400),
        ("/api/v1/rooms?after=x", 400),
        ("/api/v1/rooms?colour=red", 400),
        ("/api/v1/rooms/abc", 400),
        ("/api/v1/rooms/-1", 400),
        ("/api/v1/rooms/18446744073709551616", 400),
        ("/api/v1/rooms/%ff", 400),
        ("/api/v1/rooms/5?incarnation=x", 400),
        ("/api/v1/rooms/4", 404),
        ("/nothing", 404),
    ] {
        let (got, body) = json(at, path).await;
        assert_eq!(got, status, "{path}: {body}");
        assert!(body["error"].as_str().is_some_and(|e| !e.is_empty()), "{path}: {body}");
    }
    let (status, _, body) =
        ask(at, "DELETE /api/v1/rooms HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n").await;
    assert_eq!((status, body.contains("error")), (405, true));
    let long = format!("GET /{} HTTP/1.1\r\nHost: a\r\n\r\n", "x".repeat(1 << 20));
    assert!((400..500).contains(&ask_torn(at, &long).await));
    assert_eq!(ask_torn(at, "\0\u{1}garbage\r\n\r\n").await, 400);
    assert_eq!(get(at, "/healthz", "").await.0, 200);
    pipeline.stop();
}

/// As `ask`, for a server that may close before it has read everything.
async fn ask_torn(at: SocketAddr, request: &str) -> u16 {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(at).await.unwrap();
    let _ = stream.write_all(request.as_bytes()).await;
    let mut answer = vec![0; 64];
    let n = stream.read(&mut answer).await.unwrap_or(0);
    let head = String::from_utf8_lossy(&answer[..n]).into_owned();
    // A reset instead of an answer is a refusal too.
    head.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(400)
}

#[tokio::test]
async fn a_pipeline_that_never_answers_gives_503_with_a_reason() {
    let (exports, at) = started().await;
    let (status, body) = once(at, "/api/v1/rooms").await;
    assert_eq!(status, 503);
    assert!(body["error"].as_str().unwrap().contains("busy"), "{body}");
    let (status, _) = once(at, "/status").await;
    assert_eq!(status, 503);
    // What does not need the pipeline still answers.
    assert_eq!(get(at, "/metrics", "").await.0, 200);
    drop(exports);
}

#[tokio::test]
async fn readiness_follows_the_agent_and_says_why_not() {
    let (exports, at) = started().await;
    assert_eq!(json(at, "/readyz").await, (503, serde_json::json!({ "error": "starting" })));
    exports.set_ready(Ok(()));
    assert_eq!(json(at, "/readyz").await, (200, serde_json::json!({ "ready": true })));
    exports.set_ready(Err("no kernel hook could be attached".to_owned()));
    assert_eq!(json(at, "/readyz").await.0, 503);
}

#[tokio::test]
async fn status_has_what_the_pipeline_says_and_what_was_exported() {
    let (exports, at) = started().await;
    let pipeline = Pipeline::start(exports, Known::default());
    let (status, body) = json(at, "/status").await;
    assert_eq!((status, &body["hook"]), (200, &"sock".into()));
    assert_eq!(body["export"]["events"]["dropped"]["queue_full"], 0);
    pipeline.stop();
}

#[tokio::test]
async fn answers_are_compressed_for_whom_asks_for_it() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let (exports, at) = started().await;
    let pipeline = Pipeline::start(exports, some());
    let (_, head, plain) = get(at, "/metrics", "").await;
    assert!(!head.contains("content-encoding") && head.contains("vary: accept-encoding"), "{head}");
    for (path, plain) in
        [("/metrics", plain.len()), ("/api/v1/rooms/5", get(at, "/api/v1/rooms/5", "").await.2.len())]
    {
        let mut stream = tokio::net::TcpStream::connect(at).await.unwrap();
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: a\r\nAccept-Encoding: gzip\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await.unwrap();
        let head = String::from_utf8_lossy(&answer).split("\r\n\r\n").next().unwrap().to_owned();
        assert!(head.contains("content-encoding: gzip"), "{head}");
        assert!(answer.len() - head.len() < plain / 2, "{path}: {} of {plain}", answer.len() - head.len());
    }
    // What comes out is what goes in. The client wants to know its cryptography even where it speaks plain HTTP.
    drop(rustls::crypto::ring::default_provider().install_default());
    let whole = json(at, "/api/v1/rooms/5").await.1;
    let unpacked = reqwest::get(format!("http://{at}/api/v1/rooms/5")).await.unwrap();
    assert_eq!(unpacked.json::<serde_json::Value>().await.unwrap(), whole);
    let (_, head, _) = get(at, "/healthz", "Accept-Encoding: gzip\r\n").await;
    assert!(!head.contains("content-encoding"), "too small to be worth it: {head}");
    pipeline.stop();
}

#[tokio::test]
async fn many_idle_clients_do_not_grow_without_bound_and_stopping_closes_them() {
    let (exports, at) = started().await;
    let mut idle = Vec::new();
    for _ in 0..150 {
        idle.push(tokio::net::TcpStream::connect(at).await.unwrap());
    }
    exports.shutdown(Duration::from_mins(1)).await;
    drop(idle);
    assert!(tokio::net::TcpStream::connect(at).await.is_err());
}

#[tokio::test]
async fn an_address_in_use_is_one_clear_error() {
    let (_exports, at) = started().await;
    let options = Options { listen: Some(at), ..Options::default() };
    let error = Exports::start(options, identity()).await.unwrap_err().to_string();
    assert!(error.contains(&at.to_string()) && error.contains("--listen"), "{error}");
}
