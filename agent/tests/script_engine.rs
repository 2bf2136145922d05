//! An engine that a script of its own has started within itself, in the cgroup of a pod, beside the agent as it is run: it is
//! found by its schedulers, its requests are read, and what passes at its port that cannot be read is named. Needs root and BPF.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests"
)]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

const CONTAINER: &str = "c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00c0ffee00";
const POD: &str = "3ca9f1e6-2b1d-4b7e-9a55-0f6f5e2d9c11";

/// A loopback port that nobody else gets: bound for reuse and not listening, as long as the socket lives, so that another process can
/// listen there all the same.
fn held_port() -> (socket2::Socket, SocketAddr) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, address)
}

/// A cgroup with the path of a pod's container below one of this test's own.
struct Cgroup {
    levels: Vec<PathBuf>,
}

impl Cgroup {
    /// `None`: this host has none that can be written.
    fn new() -> Option<Self> {
        let root = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].map(Path::new);
        let root = root.into_iter().find(|r| r.join("cgroup.procs").exists())?;
        let own = format!("rt{}", std::process::id());
        let mut group = Self { levels: Vec::new() };
        let mut path = root.to_owned();
        for part in [&own, "kubepods", "burstable", &format!("pod{POD}"), CONTAINER] {
            path.push(part);
            std::fs::create_dir(&path).ok()?;
            group.levels.push(path.clone());
        }
        Some(group)
    }

    fn procs(&self) -> PathBuf {
        self.levels.last().unwrap().join("cgroup.procs")
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // Processes that have just been killed leave it in a moment.
        for level in self.levels.iter().rev() {
            for _ in 0..500 {
                if std::fs::remove_dir(level).is_ok() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

struct Engine {
    child: Child,
    _port: socket2::Socket,
    port: u16,
}

impl Engine {
    fn start(prefix: &str, cgroup: Option<&Cgroup>, dp_ranks: &str) -> Self {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/engine");
        let (held, port) = held_port();
        let port = port.port();
        let mut child = Command::new("sh")
            .args(["-c", "[ -z \"$PROCS\" ] || echo $$ > \"$PROCS\" && exec python3 -B \"$0\" \"$@\""])
            .arg(fixtures.join("my_launch.py"))
            .args(["--disaggregation-mode", "prefill"])
            .env("PROCS", cgroup.map(Cgroup::procs).unwrap_or_default())
            .env("PYTHONPATH", &fixtures)
            .env("PREFIX", prefix)
            .env("RANKS", "DP0_TP0 DP1_TP0")
            .env("HELPERS", "detokenizer")
            .env("DP_RANKS", dp_ranks)
            .env("PORT", port.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut up = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut up).unwrap();
        assert_eq!(up.split_ascii_whitespace().count(), 3, "{up}");
        Self { child, _port: held, port }
    }

    /// Sends a request; the connection stays open with it.
    fn post(&self, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let length = body.len();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\
                            Connection: close\r\n\r\n"
        );
        stream.write_all((head + body).as_bytes()).unwrap();
        stream
    }

    /// The same, until it is answered.
    fn ask(&self, path: &str, body: &str) {
        let mut answer = String::new();
        self.post(path, body).read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn get(from: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(from).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {from}\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    (head.split(' ').nth(1) == Some("200")).then(|| body.to_owned())
}

struct Agent {
    child: Child,
    _port: socket2::Socket,
    listen: SocketAddr,
    log: PathBuf,
}

impl Agent {
    /// `None`: this host cannot be observed.
    fn start(dir: &Path, prefix: &str) -> Option<Self> {
        let (port, listen) = held_port();
        let log = dir.join("log");
        let child = Command::new(env!("CARGO_BIN_EXE_roomtrace"))
            .args([
                "run",
                "--floor",
                "1s",
                "--no-state",
                "--engine-comm",
                prefix,
                "--listen",
                &listen.to_string(),
            ])
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut agent = Self { child, _port: port, listen, log };
        let mut ready = false;
        agent.wait("ready", |agent| {
            ready = get(agent.listen, "/readyz").is_some();
            ready || agent.child.try_wait().unwrap().is_some()
        });
        if !ready {
            let log = std::fs::read_to_string(&agent.log).unwrap();
            assert_eq!(agent.child.wait().unwrap().code(), Some(3), "{log}");
            assert!(std::env::var_os("CI").is_none(), "the agent cannot observe here: {log}");
            eprintln!("SKIPPED: the agent cannot observe here: {log}");
            return None;
        }
        Some(agent)
    }

    fn wait(&mut self, what: &str, mut until: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + Duration::from_mins(1);
        while !until(self) {
            let log = || std::fs::read_to_string(&self.log).unwrap_or_default();
            assert!(Instant::now() < end, "not {what} after a minute:\n{}\n{:#}", log(), self.engines());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn engines(&self) -> Value {
        let status = get(self.listen, "/status").unwrap_or_default();
        serde_json::from_str::<Value>(&status).map_or(Value::Null, |mut s| s["engines"].take())
    }

    /// The newest life of a room.
    fn room(&self, room: u64) -> Value {
        let text = get(self.listen, &format!("/api/v1/rooms/{room}")).unwrap_or_default();
        let mut answer: Value = serde_json::from_str(&text).unwrap_or_default();
        answer["rooms"].as_array_mut().and_then(Vec::pop).unwrap_or(answer)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn what_a_script_has_started_is_read_as_any_engine() {
    let prefix = format!("s{}::", std::process::id() % 1_000_000);
    let room = 7_223_456_000_000_000_000 + 1000 * u64::from(std::process::id());
    let dir = tempfile::tempdir().unwrap();
    let cgroup = Cgroup::new();
    if cgroup.is_none() {
        eprintln!("SKIPPED: no cgroup can be made here");
        assert!(std::env::var_os("CI").is_none(), "in CI every test must run");
    }
    let engine = Engine::start(&prefix, cgroup.as_ref(), &format!("{{\"{}\":1}}", room + 1));
    let Some(mut agent) = Agent::start(dir.path(), &prefix) else { return };

    // It is found, with its ranks and its pod; its port is not, for its arguments name none.
    let server = engine.child.id();
    let mut of_engine = Vec::new();
    agent.wait("found", |agent| {
        let engines = agent.engines();
        of_engine = engines["processes"].as_array().cloned().unwrap_or_default();
        of_engine.len() == 4
    });
    for p in &of_engine {
        assert_eq!((&p["server"], &p["role"]), (&server.into(), &"prefill".into()), "{p}");
        if cgroup.is_some() {
            assert_eq!((&p["container"], &p["pod_uid"]), (&CONTAINER.into(), &POD.into()), "{p}");
        }
    }
    assert!(of_engine.iter().any(|p| p["pid"] == server));

    // A request at its port, from its begin to its end.
    engine.ask("/generate", &format!("{{\"text\":\"x\",\"bootstrap_room\":{room}}}"));
    agent.wait("read", |agent| agent.room(room)["request"]["prefill"]["how"] == "finished");

    // Another stays open, and the DP ranks of both come over sockets of their own, told and asked for.
    let held = [room + 1, room + 2]
        .map(|room| engine.post("/generate", &format!("{{\"text\":\"hold\",\"bootstrap_room\":{room}}}")));
    agent.wait("open", |agent| {
        [room + 1, room + 2].iter().all(|room| agent.room(*room)["request"]["prefill"]["how"] == "open")
    });
    engine.ask("/query_dp_ranks", &format!("{{\"bootstrap_rooms\":[{}]}}", room + 1));
    engine.ask("/register_dp_rank", &format!("{{\"bootstrap_room\":{},\"dp_rank\":3}}", room + 2));
    for (room, rank) in [(room + 1, 1), (room + 2, 3)] {
        let line = format!("DP rank {rank} of prefill registered for it");
        agent.wait(&line, |agent| agent.room(room)["verdict"]["evidence"].to_string().contains(&line));
    }
    drop(held);

    // HTTP/2 without a negotiation, from a client that speaks it, is named and told in words.
    let client = Command::new("curl")
        .args(["-sS", "-m", "5", "--http2-prior-knowledge"])
        .arg(format!("http://127.0.0.1:{}/generate", engine.port))
        .output();
    if !client.is_ok_and(|c| !String::from_utf8_lossy(&c.stderr).contains("does not support")) {
        eprintln!("SKIPPED: no curl with HTTP/2 here");
        return;
    }
    agent.wait("named", |agent| {
        let metrics = get(agent.listen, "/metrics").unwrap_or_default();
        let http2 =
            metrics.lines().find(|l| l.contains("connections_unread_total{") && l.contains("\"http2\""));
        http2.is_some_and(|l| !l.ends_with(" 0") && !l.ends_with(" 0.0"))
    });
    agent.wait("told", |agent| {
        let log = std::fs::read_to_string(&agent.log).unwrap();
        log.contains("speak HTTP/2 (gRPC)") && log.contains(&format!("127.0.0.1:{}", engine.port))
    });
}
