//! Whatever comes in whatever order: no panic, and nothing certain without its fact.

use proptest::prelude::*;
use roomtrace::event::{Direction, Sequence, SocketId, Stand, TcpState, Trouble};
use roomtrace::rooms::model::{Away, Input};
use roomtrace::rooms::{Config, RoomTable, Survivors};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::rooms_support::*;
use super::{again, exits, trouble};

#[derive(Clone, Debug)]
enum Op {
    Metadata(u64, u8, u8),
    Status(u64, u8, u8, bool),
    Abort(u64, u8, u8),
    Ack(u64, u8, u8),
    Foreign(u8),
    Exit { pid: u32, tid: u32, code: u32, process: bool },
    Again { d: u8, p: u8, back: bool, una: u32 },
    Reset { d: u8, p: u8, back: bool },
    Stand { socket: u64, una: u32, copied: u32, rcv_nxt: u32, retransmits: u32, state: u8 },
    Close { d: u8, p: u8, back: bool, error: u32 },
    Restart,
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let (room, n) = (0u64..6, 0u8..3);
    prop_oneof![
        8 => (room.clone(), n.clone(), n.clone()).prop_map(|(r, d, p)| Op::Metadata(r, d, p)),
        6 => (room.clone(), n.clone(), n.clone(), any::<bool>()).prop_map(|(r, p, d, a)| Op::Status(r, p, d, a)),
        2 => (room.clone(), n.clone(), n.clone()).prop_map(|(r, d, p)| Op::Abort(r, d, p)),
        2 => (room, n.clone(), n.clone()).prop_map(|(r, p, d)| Op::Ack(r, p, d)),
        2 => n.clone().prop_map(Op::Foreign),
        6 => (prop_oneof![100u32..103, 200u32..203, Just(7u32)], 100u32..110, prop_oneof![Just(0u32), Just(9), Just(256)],
              prop::bool::weighted(0.2))
            .prop_map(|(pid, tid, code, process)| Op::Exit { pid, tid, code, process }),
        4 => (n.clone(), n.clone(), any::<bool>(), any::<u32>())
            .prop_map(|(d, p, back, una)| Op::Again { d, p, back, una: una % 3000 }),
        1 => (n.clone(), n.clone(), any::<bool>()).prop_map(|(d, p, back)| Op::Reset { d, p, back }),
        4 => (1000u64..1012, any::<u32>(), any::<u32>(), any::<u32>(), 0u32..5, 1u8..13)
            .prop_map(|(socket, una, copied, rcv_nxt, retransmits, state)| Op::Stand {
                socket, una: una % 3000, copied, rcv_nxt, retransmits, state
            }),
        1 => (n.clone(), n, any::<bool>(), prop_oneof![Just(0u32), Just(104), Just(110)])
            .prop_map(|(d, p, back, error)| Op::Close { d, p, back, error }),
        1 => Just(Op::Restart),
        6 => prop_oneof![1u64..500, 5000u64..15_000, 60_000u64..150_000].prop_map(Op::Wait),
    ]
}

fn apply(w: &mut World, op: &Op) {
    let pair =
        |d: u8, p: u8, back: bool| if back { (prefill(p), decode(d)) } else { (decode(d), prefill(p)) };
    match *op {
        Op::Metadata(room, d, p) => w.metadata(room, &decode(d), &prefill(p)),
        Op::Status(room, p, d, arrives) => w.tell(room, &prefill(p), &decode(d), KvPoll::Success, arrives),
        Op::Abort(room, d, p) => w.abort(room, &decode(d), &prefill(p), Some(1)),
        Op::Ack(room, p, d) => w.ack(room, &prefill(p), &decode(d)),
        Op::Foreign(p) => w.foreign(&prefill(p)),
        Op::Exit { pid, tid, code, process } => exits(w, pid, tid, code, process),
        Op::Again { d, p, back, una } => {
            let (from, to) = pair(d, p, back);
            again(w, &from, &to, una);
        }
        Op::Reset { d, p, back } => {
            let (from, to) = pair(d, p, back);
            trouble(w, &from, &to, Trouble::ResetReceived);
            trouble(w, &from, &to, Trouble::ResetSent);
        }
        Op::Stand { socket, una, copied, rcv_nxt, retransmits, state } => {
            let sequence = Sequence { write: una.wrapping_add(10), una, copied, rcv_nxt };
            let stand = Stand { state: TcpState::from_kernel(state), sequence, sent: una, retransmits };
            let at = w.mono();
            w.input(&Input::Stand { at, socket: SocketId(socket), stand });
        }
        Op::Close { d, p, back, error } => {
            let (from, to) = pair(d, p, back);
            w.state(&from, &to, Direction::Sent, TcpState::Established, TcpState::Close, error);
        }
        Op::Restart => {
            let saved = w.table.save();
            let away = Away { from: w.mono(), to: w.mono() };
            let survivors = Survivors { alive: (100..103).chain(200..203).collect(), gone: [].into() };
            w.table = RoomTable::restore(Config::default(), saved, away, &survivors);
            let mut out = std::mem::take(&mut w.out);
            w.table.returned(|s| s.0 % 3 != 0, &[], away.to, &mut out);
            w.out = out;
        }
        Op::Wait(ms) => {
            w.wait(ms);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// No order of ends, troubles and messages breaks anything, and what is told stays in order.
    #[test]
    fn nothing_breaks_in_any_order(ops in prop::collection::vec(op(), 1..60)) {
        let mut w = World::new(Sees::Both);
        w.outlives = false;
        for op in &ops {
            apply(&mut w, op);
            prop_assert!(w.table.asks().len() <= 64);
            let _ = w.table.open().count();
        }
        // What is pinned is judged anew each second: its evidence may be newer until then.
        w.wait(1_100);
        for s in w.table.pinned() {
            let v = s.verdict.unwrap();
            if v.class == Class::ReceiverSilent && v.confidence == Confidence::Certain {
                prop_assert!(v.evidence.iter().any(|e| e.contains("thread ")));
            }
        }
        for pid in (100..103).chain(200..203) {
            exits(&mut w, pid, pid, 9, true);
        }
        w.wait(1000);
        let left: Vec<_> = w.table.pinned().collect();
        prop_assert!(left.is_empty(), "nobody is left whom it would concern: {:#?}", left);
    }
}
