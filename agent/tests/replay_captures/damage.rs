//! Files cut short, damaged, of another kind, or unreadable: one clear message, and nothing before the place lost.

use std::io::{self, Cursor, Read};

use proptest::prelude::*;
use roomtrace::replay::{Damage, Progress, Replay, ReplayError};

use super::collect::{Event, Said, replay};
use super::fixtures::capture;
use super::talk::{CLIENT, SERVER, Talk};
use super::write::{Layer, PcapNg, pcap};

fn talk() -> Talk {
    let mut talk = Talk::v4();
    talk.handshake().data(CLIENT, b"hello").data(SERVER, b"world!").ack(CLIENT);
    talk
}

fn pcapng(talk: &Talk) -> PcapNg {
    let mut f = PcapNg::new(false);
    f.interface(101, 0, Some(9), None);
    for p in talk.packets(Layer::Raw(101), false) {
        f.enhanced(0, p.at, &p, true);
    }
    f
}

/// Cut at every byte: the packets before the cut are all there, and the cut is named.
#[test]
fn cut_at_every_byte() {
    for file in [talk().file(), pcapng(&talk()).bytes] {
        let (whole, _) = replay(&file).unwrap();
        let mut packets_before = 0;
        for cut in 0..file.len() {
            match replay(&file[..cut]) {
                Err(ReplayError::Empty) => assert_eq!(cut, 0),
                Err(ReplayError::HeaderCut { length }) => assert!(length == cut as u64 && cut < 24),
                Err(other) => panic!("{other}"),
                Ok((events, summary)) => {
                    assert!(summary.packets >= packets_before);
                    packets_before = summary.packets;
                    assert_eq!(said(&events), said(&whole)[..events.len()]);
                    let Some(Damage::CutShort { offset, need, have }) = summary.damage else {
                        assert_eq!((summary.damage, summary.bytes), (None, cut as u64));
                        continue;
                    };
                    assert_eq!(offset + have, cut as u64);
                    assert!(have < need);
                    assert_eq!(summary.bytes, offset);
                }
            }
        }
        assert_eq!(packets_before, 5);
    }
}

fn said(events: &[Event]) -> Vec<Said> {
    events.iter().map(|e| e.said.clone()).collect()
}

#[test]
fn absurd_lengths_end_the_replay_where_they_stand() {
    let mut file = talk().file();
    let third = 24 + (16 + 52) * 2;
    file[third + 8..third + 12].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes());
    let (events, summary) = replay(&file).unwrap();
    assert_eq!(summary.damage, Some(Damage::Length { offset: third as u64, length: 0x7fff_ffff }));
    assert_eq!((summary.packets, events.len()), (2, 1));

    let good = pcapng(&talk()).bytes;
    for (length, expected) in [
        (0_u32, Damage::Length { offset: good.len() as u64, length: 0 }),
        (13, Damage::Length { offset: good.len() as u64, length: 13 }),
        (0xffff_fff0, Damage::Length { offset: good.len() as u64, length: 0xffff_fff0 }),
    ] {
        let mut file = good.clone();
        file.extend(6_u32.to_le_bytes());
        file.extend(length.to_le_bytes());
        file.extend([0; 64]);
        let (_, summary) = replay(&file).unwrap();
        assert_eq!((summary.packets, summary.damage), (6, Some(expected)));
    }
    // An unknown block may be long, but has to be there.
    let mut file = good.clone();
    file.extend(0x77_u32.to_le_bytes());
    file.extend(0xffff_fff0_u32.to_le_bytes());
    let (_, summary) = replay(&file).unwrap();
    let cut = Damage::CutShort { offset: good.len() as u64, need: 0xffff_fff0, have: 8 };
    assert_eq!((summary.packets, summary.damage), (6, Some(cut)));
}

#[test]
fn blocks_that_contradict_themselves_are_named() {
    let mut f = pcapng(&talk());
    let at = f.bytes.len() as u64;
    f.block(6, &[0xff; 24]);
    let (_, summary) = replay(&f.bytes).unwrap();
    assert_eq!((summary.packets, summary.damage), (6, Some(Damage::Block { offset: at, kind: 6 })));
    let text = summary.damage.unwrap().to_string();
    assert!(text.contains(&at.to_string()), "{text}");
    assert_eq!(summary.damage.unwrap().offset(), at);
}

#[test]
fn other_kinds_of_file_are_named() {
    for (bytes, word) in [
        (&b"\x1f\x8b\x08\0\0\0\0\0\0\0"[..], "gunzip"),
        (b"\x28\xb5\x2f\xfd whatever", "unzstd"),
        (b"{\"event\":\"room_pinned\"}", "JSON"),
        (b"\x7fELF\x02\x01\x01\0", "7f 45 4c 46"),
        (b"hello, this is plain text", "68 65 6c 6c 6f"),
        (b"x", "78"),
        (&[0; 64], "00 00 00 00"),
    ] {
        let error = replay(bytes).unwrap_err();
        assert!(matches!(error, ReplayError::NotACapture { .. }), "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    assert!(matches!(replay(&[]).unwrap_err(), ReplayError::Empty));
    assert!(matches!(
        replay(&[0xd4, 0xc3, 0xb2, 0xa1, 2]).unwrap_err(),
        ReplayError::HeaderCut { length: 5 }
    ));
}

#[test]
fn paths_that_hold_no_file() {
    let missing = Replay::open("/no/such/file.pcap").unwrap_err();
    assert!(matches!(missing, ReplayError::Open { .. }));
    assert!(missing.to_string().contains("/no/such/file.pcap"), "{missing}");
    assert!(matches!(Replay::open(".").unwrap_err(), ReplayError::NotAFile { .. }));
}

/// A file that cannot be read beyond some byte.
struct Failing(Cursor<Vec<u8>>);

impl Read for Failing {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        match self.0.read(buf)? {
            0 => Err(io::Error::other("the disk is gone")),
            n => Ok(n),
        }
    }
}

#[test]
fn a_failing_disk_loses_nothing_before() {
    let file = talk().file();
    let mut replay = Replay::from_reader(Failing(Cursor::new(file.clone()))).unwrap();
    let mut events = 0;
    let error = replay.run(&mut |_| events += 1).unwrap_err();
    assert!(matches!(error, ReplayError::Read { offset, .. } if offset == file.len() as u64), "{error}");
    assert_eq!((replay.summary().packets, events), (6, 7));
    assert_eq!(replay.step(&mut |_| ()).unwrap(), Progress::End);
}

/// One byte at a time, as from a slow pipe.
struct Slow(Cursor<Vec<u8>>);

impl Read for Slow {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let n = buf.len().min(1);
        self.0.read(&mut buf[..n])
    }
}

#[test]
fn a_slow_pipe_gives_the_same() {
    let file = pcap(1, false, true, &talk().packets(Layer::Ethernet, true));
    let mut events = 0;
    let summary =
        Replay::from_reader(Slow(Cursor::new(file.clone()))).unwrap().run(&mut |_| events += 1).unwrap();
    let (all, whole) = replay(&file).unwrap();
    assert_eq!((events, summary), (all.len(), whole));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// A real capture with bytes changed, cut out and put in: no panic, and the summary adds up.
    #[test]
    fn mutated_captures(
        name in prop::sample::select(&["a", "g", "h_closed", "nixl_abc"][..]),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..40),
        ng: bool,
    ) {
        let mut file = if ng { pcapng(&talk()).bytes } else { capture(name) };
        for (place, byte, what) in changes {
            let at = place.index(file.len());
            match what {
                0 => file[at] = byte,
                1 => { file.remove(at); }
                _ => file.insert(at, byte),
            }
        }
        if let Ok((_, summary)) = replay(&file) {
            let s = summary.skipped;
            let skipped = s.not_ip + s.not_tcp + s.fragments + s.cut_headers + s.malformed + s.link_type + s.time_resolution;
            prop_assert_eq!(summary.packets, summary.segments + skipped);
            prop_assert!(summary.damage.is_some() || summary.bytes == file.len() as u64);
        }
    }

    /// Any bytes after a good header.
    #[test]
    fn any_bytes(tail in prop::collection::vec(any::<u8>(), 0..400), ng: bool) {
        let mut file = if ng { PcapNg::new(false).bytes } else { pcap(1, false, false, &[]) };
        file.extend(tail);
        let _ = replay(&file);
    }
}
