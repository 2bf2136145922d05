//! Findings on the command line: `replay`, `rooms`, `explain`.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rooms::model::RoomSnapshot;
use roomtrace::export::clock::Clock;
use roomtrace::export::query::{Findings, Query, Rooms};
use roomtrace::export::{Exports, Options};
use roomtrace::{event, export, rooms, sglang, verdict};
use verdict::model::{Class, Finding};

#[path = "../src/export/testing.rs"]
mod testing;

use testing::{EPOCH, finding, identity, pinned};

fn roomtrace(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_roomtrace")).env_clear().args(args).output().unwrap()
}

fn text(out: &Output) -> String {
    String::from_utf8(out.stdout.clone()).unwrap()
}

/// A capture of a prefill that never concludes its rooms.
const PINNED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/captures/f.pcap");
/// One in which all goes well.
const HEALTHY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/captures/a.pcap");

#[test]
fn replay_prints_findings_before_rooms_and_writes_their_events() {
    let dir = tempfile::tempdir().unwrap();
    let events = dir.path().join("events.jsonl");
    let out = roomtrace(&["replay", PINNED, "--extend", "60s", "--events", events.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    let page = text(&out);
    let place = |what: &str| page.lines().position(|l| l.starts_with(what));
    let (found, room) = (place("finding ").expect(&page), place("room ").expect(&page));
    assert!(found < room, "{page}");
    let lines: Vec<serde_json::Value> =
        std::fs::read_to_string(&events).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let of = |name: &str| lines.iter().filter(|l| l["event"] == name).cloned().collect::<Vec<_>>();
    let (opened, pins) = (of("finding_opened"), of("room_pinned"));
    assert!(!opened.is_empty() && !pins.is_empty(), "{lines:?}");
    for pin in &pins {
        let same = |f: &&serde_json::Value| {
            f["group"] == pin["verdict"]["group"] && f["class"] == pin["verdict"]["class"]
        };
        assert!(opened.iter().any(|f| same(&f)), "every pin has its finding: {pin}");
    }
    assert_eq!(opened[0]["engine"], pins[0]["verdict"]["owed_by"], "the engine of a cause is who owes");
    assert!(opened[0]["time"].as_str() >= pins[0]["time"].as_str(), "told with the pin, not before it");
}

#[test]
fn replay_of_a_healthy_capture_has_none_and_its_exit_codes_stay() {
    let out = roomtrace(&["replay", HEALTHY, "--extend", "60s", "--fail-on-pinned"]);
    assert_eq!(out.status.code(), Some(0));
    assert!(!text(&out).contains("finding "), "{}", text(&out));
    let out = roomtrace(&["replay", PINNED, "--extend", "60s", "--fail-on-pinned"]);
    assert_eq!(out.status.code(), Some(1));
}

/// An agent with these rooms and findings.
struct Agent {
    at: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<()>,
}

impl Agent {
    fn start(rooms: Vec<RoomSnapshot>, findings: Vec<Finding>) -> Self {
        let (stop, (told, hear)) = (Arc::new(AtomicBool::new(false)), std::sync::mpsc::channel());
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let listen = Some("127.0.0.1:0".parse().unwrap());
            let mut exports = runtime
                .block_on(Exports::start(Options { listen, ..Options::default() }, identity()))
                .unwrap();
            told.send(exports.listening().unwrap()).unwrap();
            while !stopped.load(Ordering::Relaxed) {
                while let Some(query) = exports.queries().try_recv() {
                    answer(query, &rooms, &findings);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Self { at: hear.recv().unwrap(), stop, thread }
    }

    fn ask(&self, args: &[&str]) -> Output {
        let api = format!("http://{}", self.at);
        let ask = || roomtrace(&[args, &["--api", &api]].concat());
        // The thread that stands for the pipeline may be too busy, on a busy machine.
        let busy = |out: &Output| String::from_utf8_lossy(&out.stderr).contains("is busy; ask again");
        (0..30).map(|_| ask()).find(|out| !busy(out)).unwrap_or_else(ask)
    }

    fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

fn answer(query: Query, rooms: &[RoomSnapshot], findings: &[Finding]) {
    let clock = Clock::fixed(EPOCH);
    match query {
        Query::Rooms { filter, reply } => {
            let wanted = rooms.iter().filter(|r| filter.pinned.is_none_or(|p| r.pinned() == p));
            let _ = reply.send(Rooms { rooms: wanted.cloned().collect(), more: false, clock });
        }
        Query::Room { room, reply } => {
            let rooms = rooms.iter().filter(|r| r.room == room).cloned().collect();
            let _ = reply.send(Rooms { rooms, more: false, clock });
        }
        Query::Findings { limit, reply } => {
            let open = findings.iter().take(limit).cloned().collect();
            let at = event::Mono(30_000_000_000);
            let _ = reply.send(Findings { open, total: findings.len() + 3, closed: Vec::new(), at, clock });
        }
        Query::First { .. } => {}
        Query::Status { reply } => drop(reply.send(serde_json::json!({}))),
    }
}

#[test]
fn rooms_shows_findings_above_rooms_and_ends_as_before() {
    let paused = Finding {
        class: Class::EnginePaused,
        group: 1,
        rooms: Vec::new(),
        room_count: 0,
        evidence: vec!["paused for 600 s".to_owned()],
        ..finding()
    };
    let agent = Agent::start(vec![pinned(7)], vec![finding(), paused.clone()]);
    let out = agent.ask(&["rooms", "--pinned"]);
    assert_eq!(out.status.code(), Some(1), "{}", String::from_utf8_lossy(&out.stderr));
    let page = text(&out);
    let lines: Vec<&str> = page.lines().collect();
    assert!(
        lines[0]
            .starts_with("finding likely transfer_worker_silent · prefill rank 0 10.0.0.2:4000 (pid 4711"),
        "{page}"
    );
    assert!(lines[0].contains("2 rooms (7, 18446744073709551615)"), "{page}");
    assert!(lines[1].contains("engine_paused") && lines[1].contains("paused for 600 s"), "{page}");
    assert_eq!(lines[2], "(and 3 more findings)");
    assert!(lines[3].starts_with("room 7 PINNED likely"), "{page}");
    let json: serde_json::Value = serde_json::from_str(&text(&agent.ask(&["rooms", "--json"]))).unwrap();
    assert_eq!(json["findings"][1]["class"], "engine_paused");
    agent.stop();
    // A finding without a pinned room is no pinned room.
    let agent = Agent::start(Vec::new(), vec![paused]);
    let out = agent.ask(&["rooms", "--pinned"]);
    assert_eq!(out.status.code(), Some(0));
    assert!(text(&out).ends_with("no pinned rooms\n"), "{}", text(&out));
    agent.stop();
}

#[test]
fn explain_says_on_its_first_line_how_many_rooms_share_the_cause_and_what_it_is() {
    let first = |rooms: Vec<RoomSnapshot>, findings: Vec<Finding>| {
        let agent = Agent::start(rooms, findings);
        let page = text(&agent.ask(&["explain", "7"]));
        agent.stop();
        page.lines().next().unwrap_or_default().to_owned()
    };
    let mut room = pinned(7);
    room.group_size = 12;
    let line = first(vec![room.clone()], Vec::new());
    assert!(
        line.contains("1 of 12 rooms, cause: abort_before_entry of prefill rank 0 10.0.0.2:4000"),
        "{line}"
    );
    // What killed it is known: that is the cause.
    let fact = "thread 23357 died after a frame from 10.9.9.9:5555";
    let died = Finding { class: Class::ThreadDied, group: 9, evidence: vec![fact.to_owned()], ..finding() };
    let line = first(vec![room.clone()], vec![died.clone()]);
    assert!(line.contains(&format!("1 of 12 rooms, cause: thread_died ({fact})")), "{line}");
    // Of another process it is not.
    let mut other = died;
    other.engine.task = Some(testing::task(4712));
    other.engine.endpoint = Some(testing::endpoint(4001));
    let line = first(vec![room], vec![other]);
    assert!(line.contains("1 of 12 rooms, cause: abort_before_entry"), "{line}");
}

/// What a bundle holds, by name.
fn unpack(path: &std::path::Path) -> std::collections::BTreeMap<String, String> {
    let file = std::fs::File::open(path).unwrap();
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(file));
    let mut files = std::collections::BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let name = entry.path().unwrap().to_string_lossy().trim_start_matches("roomtrace-bundle/").to_owned();
        let mut content = String::new();
        std::io::Read::read_to_string(&mut entry, &mut content).unwrap();
        files.insert(name, content);
    }
    files
}

#[test]
fn a_bundle_holds_what_the_agent_knows_and_under_other_names_if_wanted() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("roomtrace.yaml");
    std::fs::write(&config, "export: {trace_salt: s3cret-salt, otlp: {headers: {x-key: s3cret-key}}}\n")
        .unwrap();
    let agent = Agent::start(vec![pinned(7)], vec![finding()]);
    let bundle = |name: &str, more: &[&str]| {
        let out = dir.path().join(name);
        let args = ["bundle", "--out", out.to_str().unwrap(), "--config", config.to_str().unwrap()];
        let said = agent.ask(&[&args, more].concat());
        assert_eq!(said.status.code(), Some(0), "{}", String::from_utf8_lossy(&said.stderr));
        (out, text(&said))
    };
    let (plain, said) = bundle("plain.tar.gz", &[]);
    assert!(said.contains("--anonymous replaces them"), "{said}");
    let files = unpack(&plain);
    for name in ["versions.json", "status.json", "config.yaml", "findings.json", "metrics.txt"] {
        assert!(files.contains_key(name), "{name} of {:?}", files.keys());
    }
    assert!(files["explain-7-0.txt"].starts_with("room 7 PINNED"), "{}", files["explain-7-0.txt"]);
    assert!(files["rooms-pinned.json"].contains("10.0.0.2:4000"));
    assert!(files.values().all(|f| !f.contains("s3cret")), "no secret is in it");
    assert_eq!(std::fs::metadata(&plain).unwrap().permissions().mode() & 0o777, 0o600);

    let files = unpack(&bundle("anonymous.tar.gz", &["--anonymous"]).0);
    for (name, content) in &files {
        for real in ["10.0.0.2", "node-a", "c0ffeec0ffee"] {
            assert!(!content.contains(real), "{real} in {name}: {content}");
        }
    }
    assert!(files["rooms-pinned.json"].contains("198.18.0."), "addresses are still addresses");

    // It does not write over another, and without an agent there is none.
    let again = agent.ask(&["bundle", "--out", plain.to_str().unwrap()]);
    assert_eq!(again.status.code(), Some(2));
    agent.stop();
    let gone = dir.path().join("gone.tar.gz");
    let out = roomtrace(&["bundle", "--out", gone.to_str().unwrap(), "--api", "http://127.0.0.1:1"]);
    assert_eq!((out.status.code(), gone.exists()), (Some(3), false));
}
