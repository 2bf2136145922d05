//! What holds for every sequence of requests and messages.

use proptest::prelude::*;
use roomtrace::http::event::{Control, Outcome as Answer, Side};
use roomtrace::rooms::model::{Away, Role};
use roomtrace::rooms::{Config, RoomTable, SavedRooms, Survivors};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::rooms_support::*;
use super::web::*;

#[derive(Clone, Copy, Debug)]
enum Op {
    Ask { room: u64, prefill: bool, known: bool },
    End { which: usize, how: u8 },
    FirstByte(usize),
    Metadata(u64),
    Status { room: u64, failed: bool },
    Abort { room: u64, generation: bool },
    Ack(u64),
    Control { prefill: bool, stop: bool },
    Gauges { inflight: u64, waiting: u64, progress: u64 },
    Restart { there: bool },
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let room = 1u64..5;
    prop_oneof![
        6 => (room.clone(), any::<bool>(), prop::bool::weighted(0.9))
            .prop_map(|(room, prefill, known)| Op::Ask { room, prefill, known }),
        6 => (0usize..8, 0u8..7).prop_map(|(which, how)| Op::End { which, how }),
        1 => (0usize..8).prop_map(Op::FirstByte),
        5 => room.clone().prop_map(Op::Metadata),
        4 => (room.clone(), any::<bool>()).prop_map(|(room, failed)| Op::Status { room, failed }),
        3 => (room.clone(), any::<bool>()).prop_map(|(room, generation)| Op::Abort { room, generation }),
        2 => room.prop_map(Op::Ack),
        1 => (any::<bool>(), any::<bool>()).prop_map(|(prefill, stop)| Op::Control { prefill, stop }),
        1 => (0u64..3, 0u64..2, 0u64..3).prop_map(|(inflight, waiting, progress)| Op::Gauges { inflight, waiting, progress }),
        1 => any::<bool>().prop_map(|there| Op::Restart { there }),
        6 => prop_oneof![1u64..500, 5000u64..15_000, 60_000u64..400_000].prop_map(Op::Wait),
    ]
}

fn end(w: &mut Web, key: Key, how: u8) {
    match how {
        0 => w.finished(key),
        1 => w.answered(key, 200, Answer::Aborted),
        2 => w.answered(key, 500, Answer::Error),
        3 => w.answered(key, 200, Answer::Unknown),
        4 => w.hung_up(key, Side::Client),
        5 => w.hung_up(key, Side::Unknown),
        _ => w.out_of_sight(key),
    }
}

fn restart(w: &mut Web, there: bool) {
    let saved: SavedRooms = serde_json::from_str(&serde_json::to_string(&w.table.save()).unwrap()).unwrap();
    let survivors = Survivors { alive: saved.processes().collect(), ..Survivors::default() };
    let away = Away { from: w.at(), to: w.at() };
    w.table = RoomTable::restore(Config::default(), saved, away, &survivors);
    let now = w.at();
    let World { table, out, .. } = &mut w.world;
    table.returned(|s| there || s.0 < 5_000_000, &[], now, out);
    w.know();
}

fn run(sees: Sees, layout: Layout, ops: &[Op]) -> (Web, Vec<Key>) {
    let mut w = Web::with(sees, layout);
    w.outlives = false;
    let mut keys: Vec<Key> = Vec::new();
    let role = |prefill| if prefill { Role::Prefill } else { Role::Decode };
    let (p, d) = (prefill(0), decode(0));
    for op in ops {
        match *op {
            Op::Ask { room, prefill, known } => {
                let role = role(prefill);
                if !w.sees(role) {
                    continue;
                }
                let address = if known { server(role) } else { "10.0.0.7:30000".parse().unwrap() };
                let connection = w.connection(address, true, known.then(|| task(pid(role))));
                keys.push(w.ask_on(connection, true, &work(&[room], "r")));
            }
            Op::End { which, how } if which < keys.len() => {
                let key = keys.remove(which);
                end(&mut w, key, how);
            }
            Op::FirstByte(which) if which < keys.len() => w.first_byte(keys[which]),
            Op::End { .. } | Op::FirstByte(_) => {}
            Op::Metadata(room) => w.metadata(room, &d, &p),
            Op::Status { room, failed } => {
                w.status(room, &p, &d, if failed { KvPoll::Failed } else { KvPoll::Success });
            }
            Op::Abort { room, generation } => w.abort(room, &d, &p, generation.then_some(1)),
            Op::Ack(room) => w.ack(room, &p, &d),
            Op::Control { prefill, stop } => {
                let call = if stop { Control::Pause(None) } else { Control::Resume };
                w.call(role(prefill), &call, Some(200));
            }
            Op::Gauges { inflight, waiting, progress } => {
                w.gauges(Role::Prefill, inflight, waiting, progress);
            }
            Op::Restart { there } => restart(&mut w, there),
            Op::Wait(ms) => {
                w.wait(ms);
            }
        }
    }
    (w, keys)
}

fn sees() -> impl Strategy<Value = Sees> {
    prop_oneof![Just(Sees::Prefill), Just(Sees::Decode), Just(Sees::Both)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn a_request_that_has_ended_at_prefill_pins_nothing_there(
        sees in sees(), layout in 0usize..4, ops in prop::collection::vec(op(), 1..80)
    ) {
        let layout = [MOONCAKE, NIXL_NEW, NIXL_OLD, MORI_OLD][layout];
        let (mut w, keys) = run(sees, layout, &ops);
        for (i, key) in keys.into_iter().enumerate() {
            end(&mut w, key, u8::try_from(i % 6).unwrap());
        }
        w.wait(30_000);
        for s in w.table.pinned() {
            let v = s.verdict.as_ref().unwrap();
            let ended = s.request.as_ref().and_then(|r| r.prefill).is_some_and(|l| l.ended.is_some());
            // Decode that waits for it is pinned there.
            prop_assert!(!ended || v.class == Class::PeerNotTold || s.decode.is_some(), "{s:?}");
            if ended && s.prefill.is_some() && s.decode.is_none() {
                prop_assert!(false, "{s:?}");
            }
        }
    }

    #[test]
    fn silence_is_never_more_than_possible(
        sees in sees(), layout in 0usize..4, rooms in 1u64..6, ms in 10_000u64..300_000
    ) {
        let layout = [MOONCAKE, NIXL_NEW, NIXL_OLD, MORI_OLD][layout];
        let mut w = Web::with(sees, layout);
        w.outlives = false;
        for room in 1..=rooms {
            w.request(Role::Prefill, room);
            w.request(Role::Decode, room);
            w.metadata(room, &decode(0), &prefill(0));
        }
        w.wait(ms);
        for s in w.table.pinned() {
            prop_assert_eq!(s.verdict.unwrap().confidence, Confidence::Possible);
        }
    }
}
