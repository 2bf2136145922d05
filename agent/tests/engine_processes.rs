//! Engines found on the running host: processes that are started, named and placed as an engine's are, and a server that
//! answers as an engine's does. A Python package of the same name stands for the engine.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests"
)]

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use roomtrace::engine::{Engines, Report, Scanner, Settings};
use roomtrace::rooms::model::{EngineGauges, EngineProcess, Role};

const LOADS: &str = r#"{"version":"0.5.23","loads":[{"dp_rank":0,"timestamp":1.5,"num_running_reqs":0,"num_waiting_reqs":0,
    "total_prefill_busy_us":4711,"total_prefill_uncached_tokens":1,
    "disaggregation":{"mode":"prefill","prefill_bootstrap_queue_reqs":2,"prefill_inflight_queue_reqs":1}}]}"#;

const METRICS: &str = "# TYPE sglang:num_prefill_inflight_queue_reqs gauge\n\
    sglang:num_prefill_inflight_queue_reqs{engine_type=\"prefill\",tp_rank=\"0\"} 3.0\n";

/// A name that no other process of this host has.
fn prefix(test: &str) -> String {
    format!("rt{}{test}::", std::process::id())
}

/// A loopback port that nobody else gets: bound for reuse and not listening, as long as the socket lives, so that a server can
/// listen there all the same.
fn held_port() -> (socket2::Socket, SocketAddr) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, address)
}

struct Fake {
    server: Child,
    _port: socket2::Socket,
    ranks: Vec<u32>,
    port: u16,
    folder: tempfile::TempDir,
}

impl Fake {
    /// `before`: a program that starts it. `None`: this host cannot.
    fn start(prefix: &str, before: &[&str], loads: Option<&str>, metrics: Option<&str>) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: Option<&str>| -> PathBuf {
            let path = folder.path().join(name);
            text.inspect(|t| std::fs::write(&path, t).unwrap());
            path
        };
        let (held, port) = held_port();
        let port = port.port();
        let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/engine");
        let line: Vec<String> = before
            .iter()
            .copied()
            .chain(["python3", "-B", "-m", "sglang.launch_server", "--disaggregation-mode", "prefill"])
            .chain(["--disaggregation-bootstrap-port=9000", "--port"])
            .map(str::to_owned)
            .chain([port.to_string()])
            .collect();
        let (program, args) = line.split_first().unwrap();
        let spawned = Command::new(program)
            .args(args)
            .env("PYTHONPATH", package)
            .env("PREFIX", prefix)
            .env("RANKS", "DP0_TP0 DP1_TP0")
            .env("LOADS", file("loads", loads))
            .env("METRICS", file("metrics", metrics))
            .env("CHUNKED", "1")
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut server) = spawned else {
            return skip(&format!("cannot start {program}"));
        };
        let mut up = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut up).unwrap();
        let ranks: Vec<u32> = up.split_ascii_whitespace().map(|p| p.parse().unwrap()).collect();
        if ranks.is_empty() {
            return skip(&format!("{program} cannot start the engine"));
        }
        Some(Self { server, _port: held, ranks, port, folder })
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        drop(self.server.kill());
        drop(self.server.wait());
    }
}

/// Says that a test did not run; fails where `CI=true`.
fn skip(why: &str) -> Option<Fake> {
    eprintln!("SKIPPED: {why}");
    assert!(std::env::var("CI").as_deref() != Ok("true"), "in CI every test must run: {why}");
    None
}

/// Reports until one is as wanted, in a generous time.
fn until<T>(engines: &Engines, mut wanted: impl FnMut(Report) -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = engines.reports().find_map(&mut wanted) {
            return found;
        }
        assert!(began.elapsed() < Duration::from_mins(1), "{:?}", engines.standing());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn settings(prefix: &str) -> Settings {
    Settings {
        prefixes: vec![prefix.to_owned()],
        ask_every: Some(Duration::from_secs(5)),
        proc: "/proc".into(),
        pod_names: None,
    }
}

fn gauges(engines: &Engines) -> EngineGauges {
    // An answer that a busy machine holds up for a second is none; it is asked again.
    let late = |g: &EngineGauges| g.error.as_ref().is_some_and(|e| e.contains("longer than 1 s"));
    until(engines, |r| if let Report::Gauges(g) = r { Some(g).filter(|g| !late(g)) } else { None })
}

#[test]
fn an_engine_is_found_asked_and_missed_when_it_ends() {
    let prefix = prefix("a");
    let Some(mut fake) = Fake::start(&prefix, &[], Some(LOADS), None) else { return };
    let engines = Engines::start(&settings(&prefix)).unwrap();
    let mut found: Vec<EngineProcess> = Vec::new();
    until(&engines, |r| {
        if let Report::Process(p) = r {
            found.push(p);
        }
        (found.len() == 3).then_some(())
    });
    let server = fake.server.id();
    for p in &found {
        assert_eq!((p.server, p.role), (server, Some(Role::Prefill)), "{p:?}");
        assert_eq!((p.http_port, p.bootstrap_port), (Some(fake.port), Some(9000)), "{p:?}");
        assert!(p.started > 0, "{p:?}");
    }
    let ranks = |pid: u32| found.iter().find(|p| p.pid == pid).unwrap().ranks.clone();
    assert_eq!(ranks(server), None);
    assert_eq!(ranks(fake.ranks[0]).as_deref(), Some("DP0 TP0"));
    assert_eq!(ranks(fake.ranks[1]).as_deref(), Some("DP1 TP0"));
    let g = gauges(&engines);
    assert_eq!((g.server, g.error.as_deref(), g.inflight, g.bootstrap), (server, None, Some(1), Some(2)));
    assert_eq!(g.address, Some(format!("127.0.0.1:{}", fake.port).parse().unwrap()));
    // What stays the same is not told again; what ends is.
    drop(fake.server.kill());
    drop(fake.server.wait());
    engines.look_soon();
    let mut gone = Vec::new();
    until(&engines, |r| {
        match r {
            Report::Gone(pid) => gone.push(pid),
            // A rank that outlives its server for a moment is another's, or nobody's.
            Report::Process(p) => assert_ne!(p.server, server, "told again: {p:?}"),
            Report::Gauges(_) => {}
        }
        engines.look_soon();
        (gone.len() == 3).then_some(())
    });
    // That look is still to be written down, and a question under way to be answered.
    let began = Instant::now();
    while !engines.standing().asked.is_empty() {
        assert!(began.elapsed() < Duration::from_mins(1), "{:?}", engines.standing());
        engines.look_soon();
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn where_there_are_no_loads_metrics_are_read() {
    let prefix = prefix("b");
    let Some(fake) = Fake::start(&prefix, &[], None, Some(METRICS)) else { return };
    let engines = Engines::start(&settings(&prefix)).unwrap();
    let g = gauges(&engines);
    assert_eq!((g.inflight, g.stale, g.role), (Some(3), true, Some(Role::Prefill)), "{g:?}");
    // Too long an answer is no answer.
    let new = fake.folder.path().join("new");
    std::fs::write(&new, vec![b'x'; 300 << 10]).unwrap();
    std::fs::rename(new, fake.folder.path().join("metrics")).unwrap();
    let late = |e: &String| e.contains("longer than 1 s");
    let g = until(&engines, |r| if let Report::Gauges(g) = r { g.error.filter(|e| !late(e)) } else { None });
    assert!(g.contains("404") && g.contains("longer than 256 KiB"), "{g}");
}

#[test]
fn an_engine_in_another_network_namespace_is_named_as_such_and_not_asked() {
    let prefix = prefix("c");
    let Some(_fake) = Fake::start(&prefix, &["unshare", "--net"], Some(LOADS), None) else { return };
    let engines = Engines::start(&settings(&prefix)).unwrap();
    let why = gauges(&engines).error.unwrap();
    assert!(why.contains("another network namespace"), "{why}");
}

#[test]
fn an_engine_that_is_never_to_be_asked_is_not() {
    let prefix = prefix("d");
    let Some(_fake) = Fake::start(&prefix, &[], Some(LOADS), None) else { return };
    let engines = Engines::start(&Settings { ask_every: None, ..settings(&prefix) }).unwrap();
    until(&engines, |r| matches!(r, Report::Process(_)).then_some(()));
    while engines.standing().looks < 2 {
        engines.look_soon();
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(engines.reports().all(|r| matches!(r, Report::Process(_))));
    assert!(engines.standing().asked.is_empty());
}

#[test]
fn a_look_reads_what_others_may_read_and_nothing_of_what_has_not_changed() {
    let prefix = prefix("e");
    let Some(fake) = Fake::start(&prefix, &[], None, None) else { return };
    let mut scanner = Scanner::new("/proc", &[prefix]);
    let first = scanner.look().unwrap();
    assert_eq!(first.processes.len(), 3, "{first:?}");
    // Time that this thread ran, nanoseconds.
    let ran = || -> u64 {
        let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        stat.split(' ').next().unwrap().parse().unwrap()
    };
    let began = ran();
    for _ in 0..50 {
        let again = scanner.look().unwrap();
        assert_eq!((again.processes, again.targets), (first.processes.clone(), first.targets.clone()));
    }
    let each = (ran() - began) / 50_000;
    eprintln!(
        "{each} µs for a look at {} processes, with {} of an engine",
        first.looked_at,
        first.processes.len()
    );
    drop(fake);
}
