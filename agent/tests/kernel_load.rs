//! Under load nothing is lost, or it is counted; and a killed agent leaves nothing behind.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    reason = "tests"
)]

#[path = "support/live.rs"]
mod live;

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use aya::programs::loaded_programs;
use live::Pair;
use roomtrace::event::{Body, Direction, Event, SocketId, What};
use roomtrace::kernel::CaptureConfig;

const PER_SECOND: u64 = 20_000;
/// A STATUS message on the wire.
const LEN: usize = 28;

#[test]
fn twenty_thousand_sends_a_second_lose_nothing_uncounted() {
    load(Duration::from_secs(3));
}

#[test]
#[ignore = "takes half a minute; `cargo xtask bench` runs it"]
fn twenty_thousand_sends_a_second_for_half_a_minute_lose_nothing_uncounted() {
    load(Duration::from_secs(30));
}

/// Every send and receive of `time` is in the ring once and in its place, or counted as lost.
fn load(time: Duration) {
    let Some(mut live) = live::start(&CaptureConfig::default()) else { return };
    let pair = Pair::new("127.0.0.1");
    live.drain();
    let (local, peer) = pair.addresses();
    let ids = [(local, peer), (peer, local)].map(|(a, b)| live.socket(a, b).unwrap());
    let (mut client, mut server) = (pair.client, pair.server);
    let all = PER_SECOND * time.as_secs();
    let sender = std::thread::spawn(move || {
        let begun = Instant::now();
        let mut sent = 0u64;
        while sent < all {
            // As many as are due, then a short sleep: the rate holds on a machine that is busy with other things.
            let due = u64::try_from(begun.elapsed().as_micros()).unwrap() * PER_SECOND / 1_000_000;
            while sent < due.min(all) {
                let mut message = [0u8; LEN];
                message[..8].copy_from_slice(&sent.to_be_bytes());
                client.write_all(&message).unwrap();
                sent += 1;
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        sent
    });
    let receiver = std::thread::spawn(move || {
        let mut into = [0u8; 8192];
        let mut all = 0;
        loop {
            match server.read(&mut into).unwrap() {
                0 => return all,
                n => all += n,
            }
        }
    });

    let mut tallies = [Tally::default(), Tally::default()];
    while !receiver.is_finished() {
        live.capture.wait(Duration::from_millis(10)).unwrap();
        while drain(&mut live, ids, &mut tallies) == 1000 {}
    }
    let sent = sender.join().unwrap();
    let bytes = sent * LEN as u64;
    assert_eq!(receiver.join().unwrap() as u64, bytes);
    // A record that another CPU is still writing hides those behind it.
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        while drain(&mut live, ids, &mut tallies) > 0 {}
        if tallies.iter().all(|t| t.bytes + t.holes >= bytes) || Instant::now() > end {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    let counters = live.capture.counters().unwrap();
    println!("{sent} sends, {tallies:?}, ring full {}", counters.ring_full);
    assert_eq!(sent, all);
    for tally in &tallies {
        assert_eq!(tally.misplaced, 0);
        assert_eq!(tally.bytes + tally.holes, bytes, "every byte is in a record or in a hole");
        assert_eq!(tally.holes > 0, tally.holes > 0 && counters.ring_full > 0, "a hole is a counted loss");
    }
    let cost = live.capture.cost().unwrap();
    let send = cost.iter().find(|c| c.name == "rt_send").unwrap();
    assert!(send.runs >= sent, "every run is counted: {send:?}");
    assert!(send.samples > 0 && send.samples <= send.runs / 100 && send.sampled_seconds > 0.0, "{send:?}");
    if counters.ring_full == 0 {
        assert_eq!(tallies.map(|t| t.holes), [0, 0]);
        assert_eq!(counters.malformed + counters.recursion, 0);
    }
}

/// One direction: how many bytes came, how many are missing, how many records carry a wrong number.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    end: Option<u32>,
    bytes: u64,
    holes: u64,
    misplaced: u64,
}

fn drain(live: &mut live::Live, ids: [SocketId; 2], tallies: &mut [Tally; 2]) -> usize {
    live.capture.drain(1000, &mut |event| {
        let Event::Socket(event) = event else { return };
        let What::Bytes(bytes) = event.what else { return };
        let Some(n) = ids.iter().position(|id| *id == event.socket) else { return };
        let tally = &mut tallies[n];
        let start = bytes.end.wrapping_sub(bytes.len);
        tally.holes += u64::from(start.wrapping_sub(tally.end.unwrap_or(start)));
        tally.end = Some(bytes.end);
        tally.bytes += u64::from(bytes.len);
        if let (Body::Whole(body), Direction::Sent) = (bytes.body, bytes.direction) {
            let number = u64::from_be_bytes(body[..8].try_into().unwrap());
            let expected = (tally.bytes + tally.holes) / LEN as u64 - 1;
            tally.misplaced += u64::from(number != expected);
        }
    })
}

#[test]
fn a_killed_agent_leaves_nothing_behind() {
    if live::start(&CaptureConfig::default()).is_none() {
        return;
    }
    let before = programs();
    let pinned = pins();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "--ignored", "--nocapture", "captures_until_it_is_killed"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("CAPTURING") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "the child ended");
    }
    let during = programs();
    assert!(during.difference(&before).count() >= 4, "{during:?}");
    assert_eq!(pins(), pinned, "nothing pinned while it runs");
    child.kill().unwrap();
    child.wait().unwrap();
    // The kernel frees programs a moment after their last user is gone.
    let new: BTreeSet<_> = during.difference(&before).copied().collect();
    // (Nor do those of the test beside this one go before it ends.)
    let end = Instant::now() + Duration::from_mins(2);
    while new.intersection(&programs()).next().is_some() {
        assert!(Instant::now() < end, "still loaded: {:?}", new.intersection(&programs()));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(pins(), pinned, "nothing pinned afterwards");
    // And a connection opened now is as before.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    client.write_all(b"x").unwrap();
}

#[test]
#[ignore = "the child of the test above"]
fn captures_until_it_is_killed() {
    let _live = live::start(&CaptureConfig::default()).unwrap();
    println!("CAPTURING");
    std::thread::sleep(Duration::from_mins(1));
}

/// Ids of this project's programs that are loaded (other tests may load some meanwhile).
fn programs() -> BTreeSet<u32> {
    loaded_programs()
        .filter_map(Result::ok)
        .filter(|p| p.name_as_str().is_some_and(|n| n.starts_with("rt_")))
        .map(|p| p.id())
        .collect()
}

fn pins() -> BTreeSet<std::path::PathBuf> {
    std::fs::read_dir("/sys/fs/bpf").into_iter().flatten().flatten().map(|e| e.path()).collect()
}
