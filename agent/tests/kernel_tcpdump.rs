//! The same run seen by tcpdump and by the kernel programs: the same bytes of the same streams at the same sequence
//! numbers, at both ends.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::cast_possible_truncation,
    reason = "tests"
)]

#[path = "support/live.rs"]
mod live;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use live::Kept;
use roomtrace::event::Direction;
use roomtrace::kernel::CaptureConfig;

/// From one address to another.
type Flow = (SocketAddr, SocketAddr);

/// Bytes by absolute sequence number (the connections here are too short to wrap), and the pieces they came in.
#[derive(Default, Debug)]
struct Stream {
    bytes: BTreeMap<u32, Option<u8>>,
    pieces: BTreeSet<(u32, u32)>,
}

impl Stream {
    fn add(&mut self, start: u32, bytes: impl Iterator<Item = Option<u8>>) {
        let mut at = start;
        for byte in bytes {
            self.bytes.insert(at, byte);
            at = at.wrapping_add(1);
        }
        self.pieces.insert((start, at));
    }

    /// The sequence numbers covered, merged into ranges.
    fn ranges(&self) -> Vec<(u32, u32)> {
        let mut out: Vec<(u32, u32)> = Vec::new();
        for at in self.bytes.keys() {
            match out.last_mut() {
                Some((_, end)) if *end == *at => *end += 1,
                _ => out.push((*at, at + 1)),
            }
        }
        out
    }
}

#[test]
fn tcpdump_and_the_programs_see_the_same_bytes() {
    let listeners = [TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("[::1]:0").unwrap()];
    let ports: Vec<u16> = listeners.iter().map(|l| l.local_addr().unwrap().port()).collect();
    let Some(mut live) = live::start(&CaptureConfig::default()) else { return };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("run.pcap");
    let filter = format!("tcp port {} or tcp port {}", ports[0], ports[1]);
    let started = Command::new("tcpdump")
        .args(["-i", "lo", "-U", "-s", "0", "-B", "65536", "--immediate-mode", "-Z", "root", "-w"])
        .arg(&file)
        .arg(&filter)
        .stderr(Stdio::piped())
        .spawn();
    let mut tcpdump = match started {
        Ok(child) => child,
        Err(e) => {
            return live::skip(&format!("tcpdump cannot be started ({e}): install the package tcpdump"));
        }
    };
    let mut said = BufReader::new(tcpdump.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("listening on") {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "tcpdump ended");
    }

    for listener in &listeners {
        for connection in 0..4 {
            talk(listener, connection, &mut live);
        }
    }
    live.drain();
    settled(&file);
    Command::new("kill").args(["-INT", &tcpdump.id().to_string()]).status().unwrap();
    tcpdump.wait().unwrap();
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("\n0 packets dropped by kernel"), "tcpdump itself must miss nothing: {rest}");

    let dumped = read_pcap(&std::fs::read(&file).unwrap());
    let (sent, received) = captured(&live, &ports);
    assert_eq!(dumped.len(), 16, "8 connections, both directions");
    let mut coinciding = 0;
    for (flow, wire) in &dumped {
        for seen in [&sent[flow], &received[flow]] {
            assert_eq!(seen.ranges(), wire.ranges(), "{flow:?}");
            let differ = seen.bytes.iter().find(|(at, b)| b.is_some() && wire.bytes[at] != **b);
            assert_eq!(differ, None, "{flow:?}");
            coinciding += seen.pieces.intersection(&wire.pieces).count();
        }
    }
    assert_eq!(sent.keys().collect::<Vec<_>>(), dumped.keys().collect::<Vec<_>>());
    assert!(coinciding > 50, "most small sends are one segment: {coinciding}");
    assert_eq!(live.capture.counters().unwrap().ring_full, 0);
}

/// Waits until tcpdump has written what it saw: on a busy machine it comes late.
fn settled(file: &std::path::Path) {
    let size = || std::fs::metadata(file).unwrap().len();
    let (mut last, mut since) = (size(), Instant::now());
    while since.elapsed() < Duration::from_secs(5) {
        std::thread::sleep(Duration::from_millis(100));
        if size() != last {
            (last, since) = (size(), Instant::now());
        }
    }
}

/// One connection with messages of many lengths both ways, some longer than what is captured.
fn talk(listener: &TcpListener, seed: u32, live: &mut live::Live) {
    let mut client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    client.set_nodelay(true).unwrap();
    client.write_all(live::GREETING).unwrap();
    server.write_all(live::GREETING).unwrap();
    let mut random = 0x9E37_79B9u32.wrapping_mul(seed + 1);
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        random
    };
    let echo = std::thread::spawn(move || {
        let mut into = vec![0u8; 8192];
        let mut n = 0u8;
        loop {
            let got = server.read(&mut into).unwrap();
            if got == 0 {
                break;
            }
            n = n.wrapping_add(1);
            if n.is_multiple_of(3) {
                server.write_all(&into[..got.min(700)]).unwrap();
            }
        }
    });
    let mut answers = client.try_clone().unwrap();
    let answers = std::thread::spawn(move || {
        let mut sink = vec![0u8; 8192];
        while answers.read(&mut sink).unwrap() > 0 {}
    });
    for _ in 0..30 {
        let len = match next() % 10 {
            0 => 8192,
            1 => 20_000 + next() % 30_000,
            n => 1 + next() % (40 * (n + 1)),
        };
        let bytes: Vec<u8> = (0..len).map(|_| next() as u8).collect();
        client.write_all(&bytes).unwrap();
        live.drain();
    }
    client.shutdown(std::net::Shutdown::Write).unwrap();
    echo.join().unwrap();
    answers.join().unwrap();
}

/// What the programs saw, at the sender and at the receiver.
fn captured(live: &live::Live, ports: &[u16]) -> (BTreeMap<Flow, Stream>, BTreeMap<Flow, Stream>) {
    let (mut sent, mut received) = (BTreeMap::<Flow, Stream>::new(), BTreeMap::<Flow, Stream>::new());
    for event in &live.events {
        let Kept::Bytes { direction, end, len, body } = &event.what else { continue };
        let (local, peer) = (event.addresses.local, event.addresses.peer);
        if !ports.contains(&local.port()) && !ports.contains(&peer.port()) {
            continue;
        }
        let (streams, flow) = match direction {
            Direction::Sent => (&mut sent, (local, peer)),
            Direction::Received => (&mut received, (peer, local)),
        };
        let stream = streams.entry(flow).or_default();
        let start = end.wrapping_sub(*len);
        match body {
            Ok(bytes) => stream.add(start, bytes.iter().map(|b| Some(*b))),
            Err(_) => stream.add(start, (0..*len).map(|_| None)),
        }
    }
    (sent, received)
}

/// TCP payloads of a classic pcap file of an Ethernet interface.
fn read_pcap(file: &[u8]) -> BTreeMap<Flow, Stream> {
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
    assert_eq!((word(0), word(20)), (0xa1b2_c3d4, 1), "pcap in this machine's byte order, Ethernet");
    let mut streams = BTreeMap::<Flow, Stream>::new();
    let mut at = 24;
    while at < file.len() {
        let (kept, length) = (word(at + 8) as usize, word(at + 12) as usize);
        assert_eq!(kept, length);
        let packet = SlicedPacket::from_ethernet(&file[at + 16..at + 16 + kept]).unwrap();
        at += 16 + kept;
        let (from, to): (IpAddr, IpAddr) = match packet.net.unwrap() {
            NetSlice::Ipv4(ip) => (ip.header().source_addr().into(), ip.header().destination_addr().into()),
            NetSlice::Ipv6(ip) => (ip.header().source_addr().into(), ip.header().destination_addr().into()),
            NetSlice::Arp(_) => panic!("ARP on the loopback interface"),
        };
        let Some(TransportSlice::Tcp(tcp)) = packet.transport else { continue };
        if !tcp.payload().is_empty() {
            let flow =
                (SocketAddr::new(from, tcp.source_port()), SocketAddr::new(to, tcp.destination_port()));
            let stream = streams.entry(flow).or_default();
            stream.add(tcp.sequence_number(), tcp.payload().iter().map(|b| Some(*b)));
        }
    }
    streams
}
