//! The agent is killed, ended and started again beside an engine that goes on: pins stay pinned, in the same trace and
//! the same series, and what ended meanwhile does not.
//!
//! The engine is this test program started once more: prefill and decode rank in one process that speak ZMTP to each
//! other over TCP, and above it, where requests matter, a server that is an engine's by its arguments and not by its name.
//! Needs root and BPF.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests"
)]
#![allow(missing_docs, reason = "tests")]

#[path = "support/wire.rs"]
mod wire;

use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use wire::message;

/// Names the process that is to be the engine.
const ENGINE: &str = "ROOMTRACE_TEST_ENGINE";
/// The same, for the server above it.
const SERVER: &str = "ROOMTRACE_TEST_SERVER";

/// Opens a connection to `rank` as libzmq does, with the greetings of both sides.
fn connect(rank: &TcpListener) -> (TcpStream, TcpStream) {
    let shake = |kind: &[u8; 4]| {
        let mut out = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0];
        out.extend_from_slice(b"NULL");
        out.resize(64, 0);
        out.extend_from_slice(b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04");
        out.extend_from_slice(kind);
        out
    };
    let mut push = TcpStream::connect(rank.local_addr().unwrap()).unwrap();
    let mut pull = rank.accept().unwrap().0;
    send(&mut push, &mut pull, &shake(b"PUSH"));
    send(&mut pull, &mut push, &shake(b"PULL"));
    (push, pull)
}

fn send(from: &mut TcpStream, to: &mut TcpStream, bytes: &[u8]) {
    from.write_all(bytes).unwrap();
    to.read_exact(&mut vec![0; bytes.len()]).unwrap();
}

fn pass(by: &mut (TcpStream, TcpStream), bytes: &[u8]) {
    send(&mut by.0, &mut by.1, bytes);
}

/// The engine: does what it is told on standard input until that ends.
#[test]
fn engine() {
    let Some(name) = std::env::var_os(ENGINE) else { return };
    std::fs::write("/proc/self/comm", name.as_encoded_bytes()).unwrap();
    let rank = || TcpListener::bind("127.0.0.1:0").unwrap();
    let (prefill, decode) = (rank(), rank());
    let port = decode.local_addr().unwrap().port().to_string();
    let (mut to_prefill, mut to_decode) = (None, None);
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let (what, room) = line.split_once(' ').unwrap_or((&line, ""));
        match what {
            "open" => (to_prefill, to_decode) = (Some(connect(&prefill)), Some(connect(&decode))),
            "metadata" => {
                let index: Vec<u8> = (1u32..9).flat_map(u32::to_le_bytes).collect();
                let (room, port) = (room.as_bytes(), port.as_bytes());
                let m = message(&[
                    room,
                    b"127.0.0.1",
                    port,
                    b"127.0.0.1:15847",
                    &index,
                    b"3",
                    b"",
                    b"1",
                    b"0",
                    b"",
                ]);
                pass(to_prefill.as_mut().unwrap(), &m);
            }
            "status" => pass(to_decode.as_mut().unwrap(), &message(&[room.as_bytes(), b"4", b"0"])),
            "abort" => {
                let m = message(&[b"ABORT", room.as_bytes(), b"127.0.0.1", port.as_bytes()]);
                pass(to_prefill.as_mut().unwrap(), &m);
            }
            _ => panic!("{line}"),
        }
        // Standard output proper: the test harness keeps what is printed.
        std::io::stdout().write_all(b"done\n").unwrap();
    }
}

/// The engine's HTTP server: accepts, reads and answers when it is told to, and hands everything else on to its ranks.
#[test]
fn server() {
    let Some(name) = std::env::var_os(SERVER) else { return };
    let mut ranks =
        Engine::of(Command::new(std::env::current_exe().unwrap()).args(["--exact", "engine"]), &name);
    let web = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut held = Vec::new();
    for line in std::io::stdin().lines().map_while(Result::ok) {
        match line.split_once(' ').unwrap_or((&line, "")) {
            ("port", _) => {
                let port = web.local_addr().unwrap().port();
                std::io::stdout().write_all(format!("port {port}\n").as_bytes()).unwrap();
            }
            ("accept", len) => {
                let mut stream = web.accept().unwrap().0;
                stream.read_exact(&mut vec![0; len.parse().unwrap()]).unwrap();
                held.push(stream);
            }
            ("answer", _) => {
                let body = r#"{"text":"","meta_info":{"finish_reason":{"type":"abort"}}}"#;
                let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                held.pop().unwrap().write_all(answer.as_bytes()).unwrap();
            }
            _ => drop(ranks.tell(&line)),
        }
        std::io::stdout().write_all(b"done\n").unwrap();
    }
}

struct Engine {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Engine {
    fn start(name: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        Self::of(command.args(["--exact", "engine"]), OsStr::new(name))
    }

    /// With its HTTP server above it.
    fn serving(name: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        // The arguments of a prefill server, in places where the test program makes nothing of them.
        let odd = ["--skip", "--disaggregation-mode=prefill", "--skip", "--port=1"];
        Self::of(
            command.arg0("sglang").args(["--exact", "server"]).args(odd).env(SERVER, name),
            OsStr::new(name),
        )
    }

    fn of(command: &mut Command, name: &OsStr) -> Self {
        let mut child = command
            .arg("--nocapture")
            .env(ENGINE, name)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, to, from }
    }

    /// What it says before it has done it.
    fn tell(&mut self, what: &str) -> String {
        writeln!(self.to, "{what}").unwrap();
        let mut said = String::new();
        while !said.ends_with("done\n") {
            assert!(self.from.read_line(&mut said).unwrap() > 0, "the engine has ended");
        }
        said
    }

    /// A request for a room, which is not answered.
    fn ask(&mut self, room: u64) -> TcpStream {
        let said = self.tell("port");
        let port = said.lines().find_map(|l| l.rsplit_once("port ")?.1.parse::<u16>().ok()).unwrap();
        let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let body = format!(r#"{{"text":"","rid":"r{room}","bootstrap_room":{room}}}"#);
        let request =
            format!("POST /generate HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        client.write_all(request.as_bytes()).unwrap();
        self.tell(&format!("accept {}", request.len()));
        client
    }

    fn metadata(&mut self, room: u64) {
        self.tell(&format!("metadata {room}"));
    }

    fn status(&mut self, room: u64) {
        self.tell(&format!("status {room}"));
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn get(from: SocketAddr, path: &str) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(from).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {from}\r\n\r\n").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

/// A loopback port that nobody else gets: bound for reuse and not listening, as long as the socket lives, so that an agent can
/// listen there all the same.
fn held_port() -> (socket2::Socket, SocketAddr) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, address)
}

struct Agent {
    child: Child,
    _port: socket2::Socket,
    listen: SocketAddr,
    dir: PathBuf,
    /// The first page of metrics that was served.
    first: String,
}

impl Agent {
    /// `None`: this host cannot be observed.
    fn start(dir: &Path, engine: &str) -> Option<Self> {
        let (port, listen) = held_port();
        let log = std::fs::File::options().create(true).append(true).open(dir.join("log")).unwrap();
        let child = Command::new("sh")
            // Where core dumps are to be had, none may be forbidden by a limit.
            .args(["-c", "ulimit -c unlimited; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_roomtrace")])
            .current_dir(dir)
            .args(["run", "--floor", "1s", "--engine-comm", engine, "--listen", &listen.to_string()])
            .arg("--events")
            .arg(dir.join("events"))
            .arg("--state")
            .arg(dir.join("state/file"))
            .stderr(log)
            .spawn()
            .unwrap();
        let mut agent = Self { child, _port: port, listen, dir: dir.to_owned(), first: String::new() };
        let mut ready = false;
        agent.wait("ready", |agent| {
            if agent.child.try_wait().unwrap().is_some() {
                return true;
            }
            // Whatever is served first, ready or not.
            if let Some((200, text)) = get(agent.listen, "/metrics").filter(|_| agent.first.is_empty()) {
                agent.first = text;
            }
            // It may begin to serve, and be ready, between the two questions.
            let looked = !agent.first.is_empty();
            ready = looked && get(agent.listen, "/readyz").is_some_and(|(status, _)| status == 200);
            ready
        });
        if ready {
            return Some(agent);
        }
        let log = std::fs::read_to_string(dir.join("log")).unwrap();
        assert_eq!(agent.child.wait().unwrap().code(), Some(3), "{log}");
        assert!(std::env::var_os("CI").is_none(), "the agent cannot observe here: {log}");
        eprintln!("SKIPPED: the agent cannot observe here: {log}");
        None
    }

    fn wait(&mut self, what: &str, mut until: impl FnMut(&mut Self) -> bool) {
        let end = Instant::now() + Duration::from_mins(1);
        while !until(self) {
            let log = || std::fs::read_to_string(self.dir.join("log")).unwrap_or_default();
            assert!(Instant::now() < end, "not {what} after a minute:\n{}", log());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The newest life of a room.
    fn room(&self, room: u64) -> Value {
        let end = Instant::now() + Duration::from_mins(1);
        let (status, text) = loop {
            let (status, text) = get(self.listen, &format!("/api/v1/rooms/{room}")).unwrap();
            // On a busy machine it may say that it is busy.
            if status != 503 || Instant::now() > end {
                break (status, text);
            }
        };
        if status == 404 {
            return Value::Null;
        }
        assert_eq!(status, 200, "{text}");
        let mut answer: Value = serde_json::from_str(&text).unwrap();
        answer["rooms"].as_array_mut().and_then(Vec::pop).unwrap_or(answer)
    }

    fn metrics(&self) -> String {
        get(self.listen, "/metrics").unwrap().1
    }

    /// Waits until a room is pinned, the metrics say so, and it is written down.
    fn pinned(&mut self, room: u64) -> Value {
        // Decode's view of it is overdue a moment earlier than prefill's.
        self.pinned_as(room, "transfer_not_concluded", "possible")
    }

    fn pinned_as(&mut self, room: u64, class: &str, confidence: &str) -> Value {
        self.wait("pinned", |agent| {
            let verdict = &agent.room(room)["verdict"];
            (&verdict["class"], &verdict["confidence"]) == (&class.into(), &confidence.into())
        });
        self.wait("in the metrics", |agent| has_series_of(&agent.metrics(), class, confidence));
        self.wait("written down", |agent| {
            let text = std::fs::read_to_string(agent.dir.join("state/file")).unwrap_or_default();
            let judged = format!("\"class\":\"{}\",\"confidence\":\"{}\"", camel(class), camel(confidence));
            text.split("\"room\":").any(|r| r.starts_with(&room.to_string()) && r.contains(&judged))
        });
        // It is not told again by the next agent.
        self.wait("told", |agent| agent.events(room).iter().any(|e| e == "room_pinned"));
        self.room(room)
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn end(mut self) {
        assert!(Command::new("kill").arg(self.child.id().to_string()).status().unwrap().success());
        assert!(self.child.wait().unwrap().success());
    }

    /// Names of the events of a room.
    fn events(&self, room: u64) -> Vec<String> {
        let text = std::fs::read_to_string(self.dir.join("events")).unwrap();
        // The last line may be half written.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let lines = whole.lines().map(|l| serde_json::from_str::<Value>(l).unwrap());
        let room = room.to_string();
        let of_it = lines.filter(|r| r["room"].as_str() == Some(&room));
        of_it.map(|r| r["event"].as_str().unwrap().to_owned()).collect()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A label as the state file writes it.
fn camel(label: &str) -> String {
    let word = |w: &str| w[..1].to_uppercase() + &w[1..];
    label.split('_').map(word).collect()
}

/// Whether rooms are pinned as ours is. Others may be on this host.
fn has_series(metrics: &str) -> bool {
    has_series_of(metrics, "transfer_not_concluded", "possible")
}

fn has_series_of(metrics: &str, class: &str, confidence: &str) -> bool {
    let labels = format!(r#"{{role="prefill",verdict="{class}",confidence="{confidence}",owed_instance="#);
    metrics.lines().any(|l| l.starts_with(&format!("roomtrace_rooms_pinned{labels}")))
}

/// What the metrics say of pinned and restored rooms.
fn pinned(metrics: &str) -> String {
    let about = |l: &&str| l.contains("pinned") || l.starts_with("roomtrace_state");
    metrics.lines().filter(about).collect::<Vec<_>>().join("\n")
}

/// Seconds since the epoch.
fn moment(time: &Value) -> f64 {
    let time: jiff::Timestamp = time.as_str().unwrap().parse().unwrap();
    time.as_duration().as_secs_f64()
}

fn value(metrics: &str, series: &str) -> f64 {
    let line = metrics.lines().find_map(|l| l.strip_prefix(series));
    line.unwrap_or_else(|| panic!("no {series} in\n{metrics}")).trim().parse().unwrap()
}

#[test]
fn pins_outlive_the_agent() {
    let dir = tempfile::tempdir().unwrap();
    // The agent sees the whole host, and another run of this test may be on it.
    let first = 7_123_456_000_000_000_000 + 1000 * u64::from(std::process::id());
    let comm = format!("rt-re-{}", std::process::id() % 100_000);
    let mut engine = Engine::start(&comm);
    let Some(mut agent) = Agent::start(dir.path(), &comm) else { return };
    engine.tell("open");
    engine.metadata(first);
    engine.status(first);
    let pin = first + 1;
    engine.metadata(pin);
    let before = agent.pinned(pin);
    assert_eq!(before["restored"], Value::Null);

    for kill in [true, false, true] {
        if kill {
            agent.kill();
        } else {
            agent.end();
        }
        agent = Agent::start(dir.path(), &comm).unwrap();
        let after = agent.room(pin);
        assert!(
            has_series(&agent.first),
            "at the first look: {after}\n{}\n{:?}",
            pinned(&agent.first),
            agent.events(pin)
        );
        assert_eq!(after["pinned"], true, "{after}");
        for key in ["trace_id", "incarnation", "completeness"] {
            assert_eq!(after[key], before[key], "{key}");
        }
        for key in ["class", "confidence", "group", "owed_by", "act_on"] {
            assert_eq!(after["verdict"][key], before["verdict"][key], "{key}");
        }
        for key in ["state", "phase", "ranks", "sessions", "required", "got"] {
            assert_eq!(after["views"]["prefill"][key], before["views"]["prefill"][key], "{key}");
        }
        // Each agent compares the clocks for itself.
        let same = |a: &Value, b: &Value| (moment(a) - moment(b)).abs() < 0.001;
        assert!(same(&after["opened_at"], &before["opened_at"]), "{after}");
        assert!(same(&after["verdict"]["since"], &before["verdict"]["since"]), "{after}");
        assert!(after["restored"]["from"].is_string(), "{after}");
        assert!(value(&agent.first, "roomtrace_state_restored{what=\"pinned_rooms\"}") >= 1.0);
    }
    // The room goes on where it was.
    engine.status(pin);
    agent.wait("closed", |agent| agent.room(pin)["outcome"] == "success");
    assert_eq!(agent.room(pin)["recovered"], true);
    agent.wait("told", |agent| agent.events(pin).last().is_some_and(|e| e == "room_closed"));
    let told = agent.events(pin).iter().filter(|e| *e == "room_pinned").count();
    assert_eq!(told, 1, "told once, by several agents: {:?}", agent.events(pin));

    // One that ends while nobody looks: something passed, more is not known.
    let ends = first + 2;
    engine.metadata(ends);
    agent.pinned(ends);
    agent.kill();
    engine.status(ends);
    agent = Agent::start(dir.path(), &comm).unwrap();
    let after = agent.room(ends);
    assert_eq!((&after["pinned"], &after["verdict"]["class"]), (&false.into(), &"unknown".into()), "{after}");
    assert_eq!(after["completeness"], "lossy");
    agent.wait("told", |agent| agent.events(ends).last().is_some_and(|e| e == "verdict_changed"));
    assert_eq!(agent.events(ends).first().unwrap(), "room_pinned");
    let whole = first + 3;
    engine.metadata(whole);
    engine.status(whole);
    agent.wait("followed again", |agent| agent.room(whole)["outcome"] == "success");

    // One whose engine ends while nobody looks.
    let dies = first + 4;
    engine.metadata(dies);
    agent.pinned(dies);
    agent.end();
    drop(engine);
    agent = Agent::start(dir.path(), &comm).unwrap();
    let after = agent.room(dies);
    assert!(after["closed_at"].is_string() && after["outcome"].is_null(), "{after}");
    assert!(value(&agent.first, "roomtrace_state_dropped_total{reason=\"process\"}") >= 1.0);
    agent.end();
}

/// A pin that rests on an open request: as long as nothing passes on the request's connection it is as sure after a restart
/// as before; what passes while nobody looks is not guessed.
#[test]
fn a_pin_with_an_open_request_outlives_the_agent() {
    let dir = tempfile::tempdir().unwrap();
    let pin = 7_223_456_000_000_000_000 + 1000 * u64::from(std::process::id());
    let comm = format!("rt-rq-{}", std::process::id() % 100_000);
    let mut engine = Engine::serving(&comm);
    let Some(mut agent) = Agent::start(dir.path(), &comm) else { return };
    let server = engine.child.id();
    agent.wait("the engine known", |agent| {
        let status: Value = serde_json::from_str(&get(agent.listen, "/status").unwrap().1).unwrap();
        let processes = status["engines"]["processes"].as_array().cloned().unwrap_or_default();
        processes.iter().any(|p| p["pid"] == server && p["role"] == "prefill")
    });
    engine.tell("open");
    engine.metadata(pin - 1);
    engine.status(pin - 1);
    let client = engine.ask(pin);
    engine.tell(&format!("abort {pin}"));
    let before = agent.pinned_as(pin, "abort_before_entry", "likely");
    for _ in 0..2 {
        agent.kill();
        agent = Agent::start(dir.path(), &comm).unwrap();
        let after = agent.room(pin);
        let seen = has_series_of(&agent.first, "abort_before_entry", "likely");
        assert!(seen, "at the first look: {after}\n{}", pinned(&agent.first));
        for key in ["trace_id", "incarnation", "completeness"] {
            assert_eq!(after[key], before[key], "{key}: {after}");
        }
        for key in ["class", "confidence", "group"] {
            assert_eq!(after["verdict"][key], before["verdict"][key], "{key}: {after}");
        }
        for key in ["role", "endpoint"] {
            assert_eq!(after["verdict"]["owed_by"][key], before["verdict"]["owed_by"][key], "{key}: {after}");
        }
        assert!(after["restored"]["from"].is_string(), "{after}");
    }
    // And the request is followed on: with its end the room is over.
    engine.tell("answer");
    agent.wait("closed", |agent| agent.room(pin)["closed_at"].is_string());
    let told = agent.events(pin).iter().filter(|e| *e == "room_pinned").count();
    assert_eq!(told, 1, "told once, by several agents: {:?}", agent.events(pin));
    drop(client);

    // One whose request is answered while nobody looks.
    let ends = pin + 1;
    let client = engine.ask(ends);
    engine.tell(&format!("abort {ends}"));
    agent.pinned_as(ends, "abort_before_entry", "likely");
    agent.kill();
    engine.tell("answer");
    agent = Agent::start(dir.path(), &comm).unwrap();
    let after = agent.room(ends);
    assert_ne!(after["verdict"]["confidence"], "likely", "{after}");
    drop(client);
    agent.end();
}

/// Ends of requests' bodies stand in the agent's memory for a while.
#[test]
fn the_agent_leaves_no_core_dump() {
    let dir = tempfile::tempdir().unwrap();
    let mut other = Command::new("sh");
    other.args(["-c", "ulimit -c unlimited; kill -ABRT $$"]).current_dir(dir.path());
    if !other.status().unwrap().core_dumped() {
        return eprintln!("SKIPPED: this host makes no core dumps");
    }
    let Some(mut agent) = Agent::start(dir.path(), "rt-no-engine") else { return };
    assert!(Command::new("kill").arg("-ABRT").arg(agent.child.id().to_string()).status().unwrap().success());
    let end = agent.child.wait().unwrap();
    assert_eq!((end.signal(), end.core_dumped()), (Some(6), false));
}
