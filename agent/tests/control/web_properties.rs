//! Any way of cutting the calls of an HTTP connection: nothing breaks, and no room is told that was not asked for.

use proptest::prelude::*;
use roomtrace::event::{Body, Direction, NotCaptured, TcpState};

use super::rig::Rig;
use super::web::{LAST, STREAM_HEAD, chunk, finished, post, server};

#[derive(Clone, Debug)]
enum Shown {
    Whole,
    Ends(usize, usize),
    Length,
    Nothing,
}

fn shown() -> impl Strategy<Value = Shown> {
    prop_oneof![
        4 => Just(Shown::Whole),
        3 => (0..300usize, 0..300usize).prop_map(|(head, tail)| Shown::Ends(head, tail)),
        1 => Just(Shown::Length),
        1 => Just(Shown::Nothing),
    ]
}

fn room(i: usize) -> u64 {
    700_000_000 + u64::try_from(i).unwrap() * 1_001
}

fn body(i: usize, filler: usize) -> String {
    let text = r#"x \" \"bootstrap_room\":13, {"#.repeat(filler);
    let room = room(i);
    if i.is_multiple_of(2) {
        format!(r#"{{"text":"{text}","rid":"r","bootstrap_room":{room}}}"#)
    } else {
        format!(r#"{{"bootstrap_room":{room},"text":"{text}"}}"#)
    }
}

/// Moves `bytes` in calls of these sizes, each shown as the list says.
fn move_bytes(rig: &mut Rig, direction: Direction, mut bytes: &[u8], cuts: &[(usize, Shown)]) {
    let mut cuts = cuts.iter().cycle();
    while !bytes.is_empty() {
        let (size, shown) = cuts.next().unwrap();
        let (call, rest) = bytes.split_at((*size).min(bytes.len()));
        bytes = rest;
        let len = u32::try_from(call.len()).unwrap();
        let place = if direction == Direction::Sent { &mut rig.sent } else { &mut rig.received };
        *place = place.wrapping_add(len);
        let end = *place;
        let body = match shown {
            Shown::Ends(head, tail) if head + tail < call.len() => {
                Body::Ends { head: &call[..*head], tail: &call[call.len() - tail..] }
            }
            Shown::Whole | Shown::Ends(..) => Body::Whole(call),
            Shown::Length => Body::Absent(NotCaptured::Middle),
            Shown::Nothing => continue,
        };
        rig.report(direction, end, call.len(), body);
    }
}

fn rooms_told(told: &[String]) -> Vec<u64> {
    told.iter()
        .filter_map(|t| t.split(" asked ").nth(1))
        .filter_map(|t| t.split([' ', ',']).next()?.parse().ok())
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn no_cut_makes_a_wrong_room(
        asks in prop::collection::vec((1..2_000usize, shown()), 1..8),
        answers in prop::collection::vec((1..500usize, shown()), 1..8),
        fillers in prop::collection::vec(0..80usize, 1..5),
        joined in any::<bool>(),
        last in 0..5u8,
    ) {
        let mut rig = if joined { Rig::new() } else { server() };
        for (i, filler) in fillers.iter().enumerate() {
            rig.una = rig.sent;
            move_bytes(&mut rig, Direction::Received, &post("/generate", &body(i, *filler)), &asks);
            let answer = if i.is_multiple_of(2) {
                finished()
            } else {
                [STREAM_HEAD, &chunk("data: {\"text\":\"HTTP/1.1 200 OK\"}\n\n"), LAST].concat()
            };
            move_bytes(&mut rig, Direction::Sent, &answer, &answers);
        }
        match last {
            0 => rig.state(TcpState::Established, TcpState::CloseWait),
            1 => rig.close(TcpState::Established, 104),
            2 => rig.close(TcpState::Established, 110),
            3 => rig.state(TcpState::Established, TcpState::FinWait1),
            _ => {}
        }
        rig.tick(20_000_000_000);
        let told = rig.web();
        let rooms = rooms_told(&told);
        let asked: Vec<u64> = (0..fillers.len()).map(room).collect();
        prop_assert!(rooms.iter().all(|room| asked.contains(room)), "{told:?}");
        prop_assert!(rooms.is_sorted(), "{told:?}");
        // Each is asked for before anything else is told of it, and ends once at most.
        for n in 0..fillers.len() {
            let of: Vec<_> = told.iter().filter(|t| t.starts_with(&format!("s{n} "))).collect();
            prop_assert!(of.first().is_none_or(|t| t.contains(" asked ")), "{told:?}");
            let ends = of.iter().filter(|t| t.contains(" answered ")).count();
            prop_assert!(ends <= 1, "{told:?}");
        }
        prop_assert!(rig.control.held_bytes() < 20_000);
    }

    #[test]
    fn any_cut_of_whole_calls_says_the_same(
        asks in prop::collection::vec(1..700usize, 1..8),
        answers in prop::collection::vec(1..200usize, 1..8),
        fillers in prop::collection::vec(0..40usize, 1..5),
    ) {
        let mut rig = server();
        for (i, filler) in fillers.iter().enumerate() {
            rig.una = rig.sent;
            let whole = |sizes: &[usize]| sizes.iter().map(|n| (*n, Shown::Whole)).collect::<Vec<_>>();
            move_bytes(&mut rig, Direction::Received, &post("/generate", &body(i, *filler)), &whole(&asks));
            move_bytes(&mut rig, Direction::Sent, &finished(), &whole(&answers));
        }
        let told = rig.web();
        prop_assert_eq!(rooms_told(&told), (0..fillers.len()).map(room).collect::<Vec<_>>());
        let done = told.iter().filter(|t| t.contains("answered 200 ContentLength Finished")).count();
        prop_assert_eq!(done, fillers.len());
    }

    #[test]
    fn noise_breaks_nothing(
        calls in prop::collection::vec((any::<bool>(), prop::collection::vec(any::<u8>(), 0..100), 0..4u8), 0..40),
    ) {
        const BEGINNINGS: [&[u8]; 4] = [b"", b"POST /generate HTTP/1.1\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"5\r\ndata: "];
        let mut rig = Rig::new();
        for (sent, bytes, beginning) in &calls {
            let bytes = [BEGINNINGS[usize::from(*beginning)], bytes].concat();
            if *sent { rig.send(&bytes) } else { rig.ask(&bytes) }
        }
        rig.tick(20_000_000_000);
    }
}
