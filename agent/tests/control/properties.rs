//! Properties of any stream, however it is split, cut, damaged or made up.

use proptest::prelude::*;
use roomtrace::event::{SECOND, TcpState};

use super::rig::{MS, ROOM, Rig, Told, metadata, shaken, some_message};
use super::wire::{handshake, status};

/// Pieces of a stream with rooms counted up, as calls of random sizes.
fn splits(len: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1..200usize, 1..len)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_split_gives_the_same_messages(sizes in splits(60)) {
        let mut rig = Rig::open();
        let mut stream = handshake();
        for i in 0..20 {
            stream.extend(if i % 3 == 0 { metadata(ROOM + i, 100) } else { status(ROOM + i) });
        }
        let mut rest = &stream[..];
        for size in sizes.iter().cycle() {
            let (call, after) = rest.split_at((*size).min(rest.len()));
            rig.send(call);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(rig.rooms(), (ROOM..ROOM + 20).collect::<Vec<_>>());
    }

    #[test]
    fn every_lost_call_is_told_and_only_true_rooms_are_named(lost in prop::collection::vec(any::<bool>(), 40)) {
        let mut rig = shaken();
        let mut missing = 0;
        for (i, lost) in (0u64..).zip(&lost) {
            let call = if i % 4 == 0 { metadata(ROOM + i, 40) } else { status(ROOM + i) };
            if *lost {
                missing += u64::try_from(call.len()).unwrap();
                rig.sent = rig.sent.wrapping_add(u32::try_from(call.len()).unwrap());
            } else {
                rig.send(&call);
            }
        }
        rig.state(TcpState::Established, TcpState::Close);
        rig.tick(60 * MS);
        rig.tick(2 * SECOND);
        let told = rig.told();
        let told_missing: u64 =
            told.iter().map(|t| if let Told::Lossy { bytes, .. } = t { *bytes } else { 0 }).sum();
        prop_assert_eq!(told_missing, missing);
        let rooms: Vec<u64> = told
            .iter()
            .filter_map(|t| match t {
                Told::Status { room, .. } | Told::Metadata { room, .. } => Some(*room),
                _ => None,
            })
            .collect();
        // Calls begin at messages here, so not one of those that came is lost.
        let expected: Vec<u64> =
            (ROOM..).zip(&lost).filter(|(_, lost)| !**lost).map(|(room, _)| room).collect();
        prop_assert_eq!(rooms, expected);
    }

    #[test]
    fn mutated_streams_never_panic_and_stay_small(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..20),
        size in 1..300usize,
        jumps in prop::collection::vec(-300i32..300, 0..10),
    ) {
        let mut rig = Rig::open();
        let mut stream = handshake();
        for i in 0..30 {
            stream.extend(if i % 3 == 0 { metadata(ROOM + i, 100) } else { status(ROOM + i) });
        }
        for (at, byte) in &flips {
            *at.get_mut(&mut stream) = *byte;
        }
        for (i, call) in stream.chunks(size).enumerate() {
            if i % 5 == 4 && let Some(jump) = jumps.get(i / 5) {
                rig.sent = rig.sent.wrapping_add_signed(*jump);
            }
            rig.send(call);
        }
        rig.tick(SECOND);
        prop_assert!(rig.control.held_bytes() < 64 << 10);
    }

    /// Joined anywhere, cut anywhere: no message is told that was not sent, and soon all are told.
    #[test]
    fn a_stream_joined_anywhere_gives_true_messages_only(
        kinds in prop::collection::vec(0..7usize, 30),
        skip in any::<prop::sample::Index>(),
        sizes in splits(60),
        found in any::<bool>(),
    ) {
        let messages: Vec<Vec<u8>> = (ROOM..).zip(&kinds).map(|(room, kind)| some_message(*kind, room)).collect();
        let mut true_ones = Vec::new();
        for message in &messages {
            let mut alone = shaken();
            alone.send(message);
            true_ones.extend(alone.plain_told());
        }
        let stream = messages.concat();
        let mut rest = &stream[skip.index(stream.len() / 2)..];
        let mut rig = Rig::new();
        if found {
            // At once: what is cut in two follows at once as well.
            rig.found(None);
        }
        for size in sizes.iter().cycle() {
            let (call, after) = rest.split_at((*size).min(rest.len()));
            rig.send(call);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        let told = rig.plain_told();
        prop_assert!(true_ones.ends_with(&told), "{told:?} of {true_ones:?}");
    }

    #[test]
    fn random_bytes_are_no_messages(calls in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..600), 0..50)) {
        let mut idle = Rig::new();
        idle.found(None);
        idle.tick(SECOND);
        for mut rig in [Rig::open(), Rig::new(), shaken(), idle] {
            for call in &calls {
                rig.send(call);
                rig.receive(call);
            }
            rig.tick(SECOND);
            prop_assert!(rig.control.held_bytes() < 64 << 10);
            prop_assert_eq!(rig.rooms(), Vec::<u64>::new());
        }
    }
}
