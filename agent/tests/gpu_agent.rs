//! The whole agent beside an engine whose rank holds a GPU of a driver that answers as a script says: its record, its page and its picture
//! have what the GPU moved and suffered while the room waited.
//!
//! The engine is this test program started once more: prefill and decode rank in one process. Needs root and BPF.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stderr,
    reason = "tests"
)]

#[path = "support/nvml.rs"]
mod nvml;
#[path = "support/wire.rs"]
mod wire;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nvml::Driver;
use serde_json::Value;
use wire::message;

/// Names the process that is to be the engine.
const ENGINE: &str = "ROOMTRACE_TEST_GPU_ENGINE";

fn send(from: &mut TcpStream, to: &mut TcpStream, bytes: &[u8]) {
    from.write_all(bytes).unwrap();
    to.read_exact(&mut vec![0; bytes.len()]).unwrap();
}

/// The engine: asks for the room that it is given, and says nothing more until its input ends.
#[test]
fn engine() {
    let Some(name) = std::env::var_os(ENGINE) else { return };
    std::fs::write("/proc/self/comm", name.as_encoded_bytes()).unwrap();
    let rank = TcpListener::bind("127.0.0.1:0").unwrap();
    let shake = |kind: &[u8; 4]| {
        let mut out = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 0];
        out.extend_from_slice(b"NULL");
        out.resize(64, 0);
        out.extend_from_slice(b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04");
        out.extend_from_slice(kind);
        out
    };
    let mut lines = std::io::stdin().lines().map_while(Result::ok);
    let Some(room) = lines.next() else { return };
    let mut push = TcpStream::connect(rank.local_addr().unwrap()).unwrap();
    let mut pull = rank.accept().unwrap().0;
    send(&mut push, &mut pull, &shake(b"PUSH"));
    send(&mut pull, &mut push, &shake(b"PULL"));
    let index: Vec<u8> = (1u32..9).flat_map(u32::to_le_bytes).collect();
    let (ip, session): (&[u8], &[u8]) = (b"127.0.0.1", b"127.0.0.1:15847");
    let m = message(&[room.as_bytes(), ip, b"47001", session, &index, b"3", b"", b"1", b"0", b""]);
    send(&mut push, &mut pull, &m);
    assert!(lines.next().is_none());
}

/// Ended when the test is.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
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

fn wait<T>(what: &str, mut until: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_mins(1);
    loop {
        if let Some(found) = until() {
            return found;
        }
        assert!(Instant::now() < end, "not {what} after a minute");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_record_has_what_the_gpu_of_the_rank_moved_and_suffered() {
    let comm = format!("rt-gp-{}", std::process::id() % 100_000);
    let mut engine = Ended(
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "engine", "--nocapture"])
            .env(ENGINE, &comm)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let pid = engine.0.id();
    let gpu =
        |more: &str| format!("gpus=2\n1.pids={pid}\n0.gpm=1\n1.gpm=1\n1.util=40\n1.pcie_tx=2e9\n{more}");
    let driver = Driver::new(&gpu(""));
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("config.yaml");
    std::fs::write(&config, format!("gpu:\n  lib_path: {}\n", driver.lib().display())).unwrap();
    let listen = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut agent = Command::new(env!("CARGO_BIN_EXE_roomtrace"));
    agent.current_dir(dir.path()).arg("run").arg("--config").arg(&config);
    agent.args(["--floor", "1s", "--engine-comm", &comm, "--listen", &listen.to_string()]);
    let mut agent = Ended(agent.stderr(Stdio::piped()).spawn().unwrap());
    let log = BufReader::new(agent.0.stderr.take().unwrap());
    let log = std::thread::spawn(move || log.lines().map_while(Result::ok).collect::<Vec<_>>().join("\n"));
    let ready = wait("ready", || {
        let ready = get(listen, "/readyz").is_some_and(|(status, _)| status == 200);
        (ready || agent.0.try_wait().unwrap().is_some()).then_some(ready)
    });
    if !ready {
        let log = log.join().unwrap();
        assert!(std::env::var_os("CI").is_none(), "the agent cannot observe here: {log}");
        eprintln!("SKIPPED: the agent cannot observe here: {log}");
        return;
    }
    let status = || serde_json::from_str::<Value>(&get(listen, "/status")?.1).ok();
    wait("who holds the GPU", || {
        let holds = |g: &Value| g["pids"].as_array().is_some_and(|p| p.contains(&pid.into()));
        status()?["gpus"]["gpus"].as_array()?.iter().any(holds).then_some(())
    });
    // The agent sees the whole host, and another run of this test may be on it.
    let room = 7_223_456_000_000_000_000 + 1000 * u64::from(std::process::id());
    writeln!(engine.0.stdin.as_mut().unwrap(), "{room}").unwrap();
    let record = || serde_json::from_str::<Value>(&get(listen, &format!("/api/v1/rooms/{room}"))?.1).ok();
    let entry = |r: &Value| r["gpu"].as_array()?.iter().find(|g| g["link"] == "pcie").cloned();
    let moved = wait("pinned with its GPU's bytes", || {
        let r = record().filter(|r| r["pinned"] == true)?;
        entry(&r).filter(|g| g["tx_bytes"].as_u64() > Some(2_000_000_000))
    });
    assert_eq!((&moved["pid"], &moved["source"]), (&pid.into(), &"gpm".into()), "{moved}");
    assert!(moved["rx_bytes"] == 0 && moved["overlapping_rooms"] == 1, "{moved}");
    assert!(moved["series"].as_array().is_some_and(|s| !s.is_empty()), "{moved}");
    driver.script(&gpu("xids=1:79\n"));
    let hit = wait("the error", || record().filter(|r| r.to_string().contains("\"xid\"")));
    let name = moved["uuid"].as_str().unwrap();
    let evidence = hit["verdict"]["evidence"].to_string();
    assert!(evidence.contains(&format!("Xid 79 (GPU has fallen off the bus) on {name}")), "{evidence}");
    assert_eq!(hit["verdict"]["confidence"], "possible");
    let svg = dir.path().join("room.svg");
    let page = Command::new(env!("CARGO_BIN_EXE_roomtrace"))
        .args(["explain", &room.to_string(), "--api", &format!("http://{listen}"), "--svg"])
        .arg(&svg)
        .output()
        .unwrap();
    let text = String::from_utf8(page.stdout).unwrap();
    assert!(text.contains("GPU bytes against the room's phases") && text.contains("xid 79"), "{text}");
    assert!(std::fs::read_to_string(svg).unwrap().contains(&format!("{name} pcie out")));
}
