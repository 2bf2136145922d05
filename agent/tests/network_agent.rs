//! The whole agent beside two processes that look like a prefill and a decode rank and move known bytes over TCP, on a host whose RDMA
//! ports are a tree of files that the test advances: the room's record has what was moved, byte for byte, and nothing of what could not
//! be read.
//!
//! The engines are this test program started twice more. Needs root and BPF.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::too_many_lines,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "tests"
)]

#[path = "support/wire.rs"]
mod wire;

use std::io::{BufRead as _, BufReader, Lines, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use wire::{handshake, metadata_from};

/// Names the process that is to be an engine.
const ENGINE: &str = "ROOMTRACE_TEST_NETWORK_ENGINE";

/// What an engine says begins with this; the test harness says other things.
const SAYS: &str = "engine: ";

/// Mooncake's header in front of each piece: size, address, opcode (`mooncake-transfer-engine`, `tcp_transport.cpp`, 0.3).
fn piece(bytes: usize) -> Vec<u8> {
    let mut out = u64::try_from(bytes).unwrap().to_le_bytes().to_vec();
    out.extend_from_slice(&0x7f00_0000_0000_u64.to_le_bytes());
    out.extend_from_slice(&1_u64.to_le_bytes());
    out.resize(24 + bytes, 7);
    out
}

/// Writes a piece as the transfer engine does: the header, then at most 64 KiB at a time.
fn carry(to: &mut TcpStream, bytes: usize) {
    let piece = piece(bytes);
    to.write_all(&piece[..24]).unwrap();
    piece[24..].chunks(65_536).for_each(|chunk| to.write_all(chunk).unwrap());
}

/// Reads every connection to its end, after a greeting if there is one.
fn sink(listener: TcpListener, greeting: &'static [u8]) {
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            std::thread::spawn(move || {
                let mut stream = stream;
                stream.write_all(greeting).unwrap();
                std::io::copy(&mut stream, &mut std::io::sink())
            });
        }
    });
}

/// An engine: does what its input says, until it ends.
#[test]
fn engine() {
    let Some(name) = std::env::var_os(ENGINE) else { return };
    std::fs::write("/proc/self/comm", name.as_encoded_bytes()).unwrap();
    let listen = || TcpListener::bind("127.0.0.1:0").unwrap();
    let (rank, data) = (listen(), listen());
    println!("{SAYS}{} {}", rank.local_addr().unwrap(), data.local_addr().unwrap());
    sink(rank, Box::leak(handshake().into_boxed_slice()));
    sink(data, &[]);
    let mut open = Vec::new();
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["ask", room, of] => {
                let mut push = TcpStream::connect(of).unwrap();
                push.write_all(&handshake()).unwrap();
                push.read_exact(&mut vec![0; handshake().len()]).unwrap();
                push.write_all(&metadata_from("127.0.0.1", room.parse().unwrap(), 8, 1)).unwrap();
                open.push(push);
            }
            ["open", to] => open.push(TcpStream::connect(to).unwrap()),
            ["move", bytes] => carry(open.last_mut().unwrap(), bytes.parse().unwrap()),
            ["piece", to, bytes] => carry(&mut TcpStream::connect(to).unwrap(), bytes.parse().unwrap()),
            _ => panic!("{line}"),
        }
        println!("{SAYS}done");
    }
}

/// Ended when the test is.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Engine {
    process: Ended,
    says: Lines<BufReader<ChildStdout>>,
    rank: SocketAddr,
    data: SocketAddr,
}

impl Engine {
    fn start(comm: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "engine", "--nocapture"]).env(ENGINE, comm);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let says = BufReader::new(process.stdout.take().unwrap()).lines();
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let mut engine = Self { process: Ended(process), says, rank: nowhere, data: nowhere };
        let at = engine.said();
        let (rank, data) = at.split_once(' ').unwrap();
        (engine.rank, engine.data) = (rank.parse().unwrap(), data.parse().unwrap());
        engine
    }

    fn pid(&self) -> u32 {
        self.process.0.id()
    }

    fn said(&mut self) -> String {
        let mut lines = self.says.by_ref().map_while(Result::ok);
        lines.find_map(|line| Some(line.split_once(SAYS)?.1.to_owned())).unwrap()
    }

    fn tell(&mut self, what: &str) {
        writeln!(self.process.0.stdin.as_mut().unwrap(), "{what}").unwrap();
        assert_eq!(self.said(), "done");
    }
}

/// RDMA ports as the kernel shows them.
struct Ports(PathBuf);

impl Ports {
    fn new(root: &Path) -> Self {
        let ports = Self(root.join("mlx5_0/ports/1"));
        for directory in ["counters", "hw_counters"] {
            std::fs::create_dir_all(ports.0.join(directory)).unwrap();
        }
        ports.put("state", "4: ACTIVE").put("rate", "400 Gb/sec (4X NDR)").count(1 << 33, 5);
        ports.put("hw_counters/local_ack_timeout_err", "7");
        ports
    }

    fn put(&self, name: &str, text: &str) -> &Self {
        // In one step, as the kernel's files change.
        let new = self.0.join(format!("{name}.new"));
        std::fs::write(&new, format!("{text}\n")).unwrap();
        std::fs::rename(&new, self.0.join(name)).unwrap();
        self
    }

    fn count(&self, sent: u64, received: u64) {
        self.put("counters/port_xmit_data", &sent.to_string());
        self.put("counters/port_rcv_data", &received.to_string());
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

fn json(from: SocketAddr, path: &str) -> Option<Value> {
    serde_json::from_str(&get(from, path)?.1).ok()
}

/// Waits for something; else says what there was instead.
fn wait<T>(what: &str, mut until: impl FnMut() -> Result<T, String>) -> T {
    let end = Instant::now() + Duration::from_mins(1);
    loop {
        match until() {
            Ok(found) => return found,
            Err(instead) => assert!(Instant::now() < end, "not {what} after a minute: {instead}"),
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_record_has_what_ports_and_connections_moved_and_nothing_that_was_not_read() {
    let comm = format!("rt-nw-{}", std::process::id() % 100_000);
    let (mut prefill, mut decode) = (Engine::start(&format!("{comm}p")), Engine::start(&format!("{comm}d")));
    let dir = tempfile::tempdir().unwrap();
    let ports = Ports::new(&dir.path().join("infiniband"));
    let config = dir.path().join("config.yaml");
    let path = dir.path().join("infiniband");
    std::fs::write(&config, format!("network:\n  rdma_path: {}\n", path.display())).unwrap();
    let listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut agent = Command::new(env!("CARGO_BIN_EXE_roomtrace"));
    agent.current_dir(dir.path()).args(["run", "--no-gpu", "--config"]).arg(&config);
    agent.args(["--floor", "1s", "--engine-comm", &comm, "--listen", &listen.to_string()]);
    let mut agent = Ended(agent.stderr(Stdio::piped()).spawn().unwrap());
    let log = BufReader::new(agent.0.stderr.take().unwrap());
    let log = std::thread::spawn(move || log.lines().map_while(Result::ok).collect::<Vec<_>>().join("\n"));
    let ready = wait("ready", || {
        let ready = get(listen, "/readyz").is_some_and(|(status, _)| status == 200);
        (ready || agent.0.try_wait().unwrap().is_some()).then_some(ready).ok_or_else(String::new)
    });
    if !ready {
        let log = log.join().unwrap();
        assert!(std::env::var_os("CI").is_none(), "the agent cannot observe here: {log}");
        eprintln!("SKIPPED: the agent cannot observe here: {log}");
        return;
    }
    let port = || {
        let status = json(listen, "/status").unwrap_or_default();
        status["network"]["rdma"]["ports"][0].clone()
    };
    wait("read", || Some(port()).filter(|p| p["reads"].as_u64() > Some(2)).ok_or_else(|| port().to_string()));
    // The agent sees the whole host, and another run of this test may be on it.
    let room = 8_223_456_000_000_000_000 + 1000 * u64::from(std::process::id());
    decode.tell(&format!("ask {room} {}", prefill.rank));
    let record = || json(listen, &format!("/api/v1/rooms/{room}")).unwrap_or_default();
    let entry = |link: &str, role: &str| {
        let of = |n: &&Value| n["link"] == link && n["role"] == role;
        record()["network"].as_array().and_then(|all| all.iter().find(of).cloned()).unwrap_or_default()
    };
    wait("in transfer", || {
        (entry("rdma", "prefill") != Value::Null).then_some(()).ok_or_else(|| record().to_string())
    });
    let bytes = |link: &str, role: &str, key: &str, wanted: std::ops::RangeInclusive<u64>| {
        wait(&format!("{wanted:?} {key} of {link} at {role}"), || {
            let entry = entry(link, role);
            let is = entry[key].as_u64().is_some_and(|n| wanted.contains(&n));
            is.then(|| entry.clone())
                .ok_or_else(|| format!("{entry} {}", json(listen, "/status").unwrap()["network"]))
        })
    };

    // Over TCP: a connection that stays open, and one for each piece.
    prefill.tell(&format!("open {}", decode.data));
    let moved: u64 = [3_000_000, 1, 5_000_000]
        .map(|n| {
            prefill.tell(&format!("move {n}"));
            n + 24
        })
        .iter()
        .sum();
    // The header of the last one begins with a capital letter, its size's lowest byte, as a method of HTTP does.
    let pieces: u64 = [2_000_000, 700_000, 700_000 / 256 * 256 + u64::from(b'P')]
        .map(|n| {
            prefill.tell(&format!("piece {} {n}", decode.data));
            n + 24
        })
        .iter()
        .sum();
    let tcp = moved + pieces;
    // A SYN counts one at the end that connected, a FIN at both.
    let sent = bytes("tcp", "prefill", "tx_bytes", tcp..=tcp + 4 + 3);
    bytes("tcp", "decode", "rx_bytes", tcp..=tcp + 3);
    assert_eq!((&sent["pid"], &sent["overlapping_rooms"]), (&prefill.pid().into(), &1.into()), "{sent}");
    assert_eq!((&sent["source"], &sent["name"]), (&"counters".into(), &"connections".into()), "{sent}");

    // A port that moves 4 bytes a unit; then one whose counters are gone for a while, begin anew, and go on.
    let (mut units, first) = (1 << 33, 1_u64 << 33);
    for step in [1_000_000, 250_000_000, 3] {
        units += step;
        ports.count(units, 5);
    }
    let all = (units - first) * 4;
    let read = bytes("rdma", "prefill", "tx_bytes", all..=all);
    assert_eq!(
        (&read["name"], &read["rx_bytes"], &read["pid"]),
        (&"mlx5_0/1".into(), &0.into(), &Value::Null),
        "{read}"
    );
    std::fs::remove_file(ports.0.join("counters/port_rcv_data")).unwrap();
    wait("said", || port()["why"].as_str().map(|_| ()).ok_or_else(|| port().to_string()));
    ports.count(units + 1_000_000, 5);
    let after = |then: &Value| {
        let reads = then["reads"].as_u64().unwrap() + 3;
        wait("read again", || {
            let p = port();
            (p["why"].is_null() && p["reads"].as_u64() > Some(reads))
                .then_some(())
                .ok_or_else(|| p.to_string())
        });
    };
    after(&port());
    ports.count(units + 1_000_010, 5);
    bytes("rdma", "prefill", "tx_bytes", all + 40..=all + 40);
    ports.count(3, 5);
    wait("nonsense", || {
        (port()["nonsense"].as_u64() == Some(1)).then_some(()).ok_or_else(|| port().to_string())
    });
    ports.count(13, 5);
    ports.put("hw_counters/local_ack_timeout_err", "10");
    let read = bytes("rdma", "decode", "tx_bytes", all + 80..=all + 80);
    assert!(read["coverage"].as_f64().is_some_and(|share| share < 1.0), "{read}");

    let last = wait("errors of the port", || {
        let r = record();
        let is =
            r["pinned"] == true && r["verdict"]["evidence"].to_string().contains("3 local_ack_timeout_err");
        is.then(|| r.clone()).ok_or_else(|| r.to_string())
    });
    assert_eq!(last["verdict"]["confidence"], "possible", "{last}");
    let evidence = last["verdict"]["evidence"].to_string();
    let tells = format!(
        "TCP connections of prefill process {} that are no control connections: tcp: 10.8 MiB out",
        prefill.pid()
    );
    assert!(
        evidence.contains(&tells) && evidence.contains("RDMA port mlx5_0/1 (prefill): rdma: 957.4 MiB out"),
        "{evidence}"
    );
    // Published once a second.
    let line = format!("roomtrace_rdma_port_bytes_total{{port=\"mlx5_0/1\",direction=\"tx\"}} {}", all + 80);
    let metrics = wait("in the metrics", || {
        let metrics = get(listen, "/metrics").unwrap_or_default().1;
        metrics.contains(&line).then(|| metrics.clone()).ok_or(metrics)
    });
    assert!(metrics.contains("roomtrace_transfer_tcp_bytes_total{direction=\"rx\"}"), "{metrics}");
    let svg = dir.path().join("room.svg");
    let page = Command::new(env!("CARGO_BIN_EXE_roomtrace"))
        .args(["explain", &room.to_string(), "--api", &format!("http://{listen}"), "--svg"])
        .arg(&svg)
        .output()
        .unwrap();
    let text = String::from_utf8(page.stdout).unwrap();
    let row = format!("TCP of process {} out", prefill.pid());
    assert!(text.contains("prefill network  RDMA mlx5_0/1:") && text.contains(&row), "{text}");
    assert!(std::fs::read_to_string(svg).unwrap().contains("RDMA mlx5_0/1 out"));
}
