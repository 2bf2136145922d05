//! The bundled captures of a real engine: read to their end, and every stream equal to a second reassembly that shares
//! no code with the first.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use super::collect::{replay, states, streams};
use roomtrace::event::TcpState;

pub(crate) const NAMES: [&str; 11] = ["a", "b", "c", "f", "g", "h_closed", "l", "m", "nixl_abc", "s", "uv"];

pub(crate) fn capture(name: &str) -> Vec<u8> {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/captures");
    std::fs::read(dir.join(format!("{name}.pcap"))).unwrap()
}

/// Streams by (sender, receiver): a map from each byte's distance to the SYN to the byte. Ethernet, IPv4 and
/// little-endian microseconds, which is what the bundled captures are.
fn reference(file: &[u8]) -> (u64, BTreeMap<(SocketAddr, SocketAddr), Vec<u8>>) {
    assert_eq!(file[..4], [0xd4, 0xc3, 0xb2, 0xa1]);
    assert_eq!(file[20..24], [1, 0, 0, 0]);
    let (mut at, mut packets) = (24, 0);
    let mut bytes: BTreeMap<(SocketAddr, SocketAddr), (u32, BTreeMap<u32, u8>)> = BTreeMap::new();
    while at < file.len() {
        let len = u32::from_le_bytes(file[at + 8..at + 12].try_into().unwrap()) as usize;
        let ip = &file[at + 16 + 14..at + 16 + len];
        at += 16 + len;
        packets += 1;
        let end = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
        let tcp = &ip[usize::from(ip[0] & 15) * 4..end];
        let address = |at: usize, port: usize| {
            let ip: [u8; 4] = ip[at..at + 4].try_into().unwrap();
            SocketAddr::from((ip, u16::from_be_bytes([tcp[port], tcp[port + 1]])))
        };
        let seq = u32::from_be_bytes(tcp[4..8].try_into().unwrap());
        let stream = bytes.entry((address(12, 0), address(16, 2))).or_default();
        if tcp[13] & 2 != 0 {
            stream.0 = seq + 1;
        }
        for (i, byte) in tcp[usize::from(tcp[12] >> 4) * 4..].iter().enumerate() {
            let offset = seq.wrapping_sub(stream.0).wrapping_add(u32::try_from(i).unwrap());
            stream.1.entry(offset).or_insert(*byte);
        }
    }
    let whole = |(_, bytes): (u32, BTreeMap<u32, u8>)| {
        assert!(
            bytes.keys().copied().eq(0..u32::try_from(bytes.len()).unwrap()),
            "the fixtures have no holes"
        );
        bytes.into_values().collect()
    };
    (packets, bytes.into_iter().map(|(k, v)| (k, whole(v))).collect())
}

#[test]
fn every_capture_replays_to_its_streams() {
    for name in NAMES {
        let file = capture(name);
        let (packets, expected) = reference(&file);
        let (events, summary) = replay(&file).unwrap();
        assert_eq!((summary.packets, summary.segments), (packets, packets), "{name}");
        assert_eq!((summary.damage, summary.bytes), (None, file.len() as u64), "{name}");
        assert_eq!((summary.repairs.holes, summary.found), (0, 0), "{name}");
        let mut streams = streams(&events);
        for ((from, to), bytes) in expected.into_iter().filter(|(_, b)| !b.is_empty()) {
            for key in [(from, to, true), (to, from, false)] {
                let runs = streams.remove(&key).unwrap_or_default();
                let got: Vec<u8> = runs.iter().flat_map(|(_, b)| b.clone()).collect();
                assert!(runs.len() == 1 && got == bytes, "{name} {key:?}");
            }
        }
        assert!(streams.is_empty(), "{name}: {:?}", streams.keys());
    }
}

#[test]
fn a_capture_from_its_middle_on_still_gives_the_rest() {
    let file = capture("c");
    let (_, expected) = reference(&file);
    let (mut at, mut cut) = (24, 24);
    for n in 0.. {
        if n == 40 {
            cut = at;
            break;
        }
        at += 16 + u32::from_le_bytes(file[at + 8..at + 12].try_into().unwrap()) as usize;
    }
    let late = [&file[..24], &file[cut..]].concat();
    let (events, summary) = replay(&late).unwrap();
    assert!(summary.found > 0);
    for ((local, peer, sent), runs) in streams(&events) {
        let whole = &expected[&if sent { (local, peer) } else { (peer, local) }];
        assert_eq!(runs.len(), 1);
        assert!(whole.ends_with(&runs[0].1));
    }
}

#[test]
fn connections_of_a_real_engine_open_and_close() {
    let (events, _) = replay(&capture("a")).unwrap();
    let opened: Vec<_> = events.iter().map(|e| e.local).collect();
    let established = opened
        .into_iter()
        .collect::<std::collections::BTreeSet<_>>()
        .into_iter()
        .filter(|local| states(&events, *local).iter().any(|s| s.1 == TcpState::Established))
        .count();
    assert!(established >= 5, "{established}");
}
