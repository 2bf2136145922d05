//! What holds for every sequence of inputs.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod rooms_support;
use std::collections::HashMap;

use proptest::prelude::*;
use rooms_support::*;
use roomtrace::event::{Direction, TcpState};
use roomtrace::rooms::model::{Away, Event, FindingEvent, Phase, Role, RoomSnapshot};
use roomtrace::rooms::{Config, RoomTable, SavedRooms, Survivors};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

#[derive(Clone, Debug)]
enum Op {
    Register(u8, u8),
    Metadata { room: u64, d: u8, p: u8, aux: u32, dummy: Option<bool>, required: u32, preexisting: bool },
    Status { room: u64, p: u8, d: u8, status: u8, arrives: bool },
    Abort { room: u64, d: u8, p: u8, generation: Option<u64> },
    Ack { room: u64, p: u8, d: u8 },
    Bootstrap { room: u64, d: u8, p: u8 },
    State { d: u8, p: u8, back: bool, received: bool, old: u8, new: u8, error: u32 },
    Listener(bool, u8),
    Acknowledge { d: u8, p: u8, back: bool, una: u32 },
    Lossy { d: u8, p: u8, received: bool },
    Foreign(u8),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let room = 0u64..6;
    let n = 0u8..3;
    prop_oneof![
        1 => (n.clone(), n.clone()).prop_map(|(d, p)| Op::Register(d, p)),
        8 => (room.clone(), n.clone(), n.clone(), 0u32..3, prop::option::weighted(0.9, prop::bool::weighted(0.1)),
              1u32..3, any::<bool>())
            .prop_map(|(room, d, p, aux, dummy, required, preexisting)| Op::Metadata {
                room, d, p, aux, dummy, required, preexisting
            }),
        8 => (room.clone(), n.clone(), n.clone(), 0u8..5, any::<bool>())
            .prop_map(|(room, p, d, status, arrives)| Op::Status { room, p, d, status, arrives }),
        3 => (room.clone(), n.clone(), n.clone(), prop::option::of(0u64..3))
            .prop_map(|(room, d, p, generation)| Op::Abort { room, d, p, generation }),
        3 => (room.clone(), n.clone(), n.clone()).prop_map(|(room, p, d)| Op::Ack { room, p, d }),
        1 => (room.clone(), n.clone(), n.clone()).prop_map(|(room, d, p)| Op::Bootstrap { room, d, p }),
        2 => (n.clone(), n.clone(), any::<bool>(), any::<bool>(), 1u8..12, 1u8..12, prop_oneof![Just(0u32), Just(104), Just(111)])
            .prop_map(|(d, p, back, received, old, new, error)| Op::State { d, p, back, received, old, new, error }),
        1 => (any::<bool>(), n.clone()).prop_map(|(prefill, n)| Op::Listener(prefill, n)),
        3 => (n.clone(), n.clone(), any::<bool>(), any::<u32>())
            .prop_map(|(d, p, back, una)| Op::Acknowledge { d, p, back, una: una % 5000 }),
        1 => (n.clone(), n.clone(), any::<bool>()).prop_map(|(d, p, received)| Op::Lossy { d, p, received }),
        1 => n.prop_map(Op::Foreign),
        6 => prop_oneof![1u64..500, 5000u64..15_000, 60_000u64..500_000].prop_map(Op::Wait),
    ]
}

fn apply(w: &mut World, op: &Op) {
    let direction = |received| if received { Direction::Received } else { Direction::Sent };
    match *op {
        Op::Register(d, p) => w.register(&decode_of(d, 2), &prefill(p)),
        Op::Metadata { room, d, p, aux, dummy, required, preexisting } => {
            w.preexisting = preexisting;
            w.ask(room, &decode_of(d, 2), &prefill(p), |m| {
                m.aux_index = Some(aux);
                m.dummy = dummy;
                m.required = Some(required);
            });
        }
        Op::Status { room, p, d, status, arrives } => {
            let status = KvPoll::from_wire(u64::from(status)).unwrap();
            w.tell(room, &prefill(p), &decode_of(d, 2), status, arrives);
        }
        Op::Abort { room, d, p, generation } => w.abort(room, &decode_of(d, 2), &prefill(p), generation),
        Op::Ack { room, p, d } => w.ack(room, &prefill(p), &decode_of(d, 2)),
        Op::Bootstrap { room, d, p } => w.bootstrap(room, &decode_of(d, 2), &prefill(p)),
        Op::State { d, p, back, received, old, new, error } => {
            let (d, p) = (decode_of(d, 2), prefill(p));
            let (from, to) = if back { (p, d) } else { (d, p) };
            let (old, new) = (TcpState::from_kernel(old), TcpState::from_kernel(new));
            w.state(&from, &to, direction(received), old, new, error);
        }
        Op::Listener(is_prefill, n) => w.listener(&if is_prefill { prefill(n) } else { decode_of(n, 2) }),
        Op::Acknowledge { d, p, back, una } => {
            let (d, p) = (decode_of(d, 2), prefill(p));
            let (from, to) = if back { (p, d) } else { (d, p) };
            w.acknowledge(&from, &to, una);
        }
        Op::Lossy { d, p, received } => w.lossy(&decode_of(d, 2), &prefill(p), direction(received)),
        Op::Foreign(p) => w.foreign(&prefill(p)),
        Op::Wait(ms) => {
            w.wait(ms);
        }
    }
}

/// Events of each life of each room alternate as they should.
fn events_are_sane(out: &[Event]) {
    let mut lives: HashMap<(u64, u32), Option<bool>> = HashMap::new();
    for e in out {
        let s = e.snapshot();
        let pinned = lives.entry((s.room, s.incarnation)).or_insert(Some(false));
        let was = pinned.unwrap_or_else(|| panic!("{} of room {} after it closed", e.name(), s.room));
        *pinned = match e {
            Event::Pinned(_) => {
                assert!(!was && s.pinned(), "pinned twice");
                Some(true)
            }
            Event::VerdictChanged(_) => {
                let unknown = s.verdict.as_ref().is_some_and(|v| v.class == Class::Unknown);
                assert!(unknown || (was && s.pinned()));
                assert!(!s.recovered);
                Some(s.pinned())
            }
            Event::Recovered(_) => {
                assert!(was && !s.pinned() && s.closed_at.is_none() && s.recovered);
                assert!(s.verdict.as_ref().is_none_or(|v| v.class != Class::Unknown));
                Some(false)
            }
            Event::Scheduled(_) => panic!("no span was given"),
            Event::Closed(_) => {
                assert!(!s.pinned() && s.closed_at.is_some() && s.outcome.is_some());
                None
            }
        };
    }
}

fn table_is_sane(w: &World, max_rooms: usize) {
    let open: Vec<_> = w.table.open().collect();
    assert!(open.len() <= max_rooms);
    let gauges = w.table.gauges();
    assert_eq!(gauges.rooms, open.len() as u64);
    for g in &gauges.open {
        let n = open
            .iter()
            .filter_map(|s| if g.role == Role::Prefill { s.prefill.as_ref() } else { s.decode.as_ref() })
            .filter(|v| v.state == g.state && v.phase != Phase::Done)
            .count();
        assert_eq!(g.rooms, n as u64, "{:?} {:?}", g.role, g.state);
    }
    let pinned: Vec<_> = w.table.pinned().collect();
    assert_eq!(pinned.len(), open.iter().filter(|s| s.pinned()).count());
    assert_eq!(gauges.pinned.iter().map(|g| g.rooms).sum::<u64>(), pinned.len() as u64);
    for s in &pinned {
        let v = s.verdict.as_ref().unwrap();
        let same = pinned.iter().filter(|o| o.verdict.as_ref().unwrap().group == v.group).count();
        assert_eq!(s.group_size as usize, same);
        assert!(!v.evidence.is_empty() && !v.actions.is_empty());
    }
    findings_are_sane(w, &pinned);
    for room in 0..6 {
        let lives = w.table.snapshot(room);
        assert!(lives.windows(2).all(|l| l[0].incarnation < l[1].incarnation));
        assert!(lives.iter().rev().skip(1).all(|s| s.closed_at.is_some()), "one life at a time");
    }
}

/// Every cause of pins is one finding with exactly its rooms; the others have none that are pinned.
fn findings_are_sane(w: &World, pinned: &[RoomSnapshot]) {
    let mut causes: HashMap<u64, Vec<&RoomSnapshot>> = HashMap::new();
    for s in pinned {
        causes.entry(s.verdict.as_ref().unwrap().group).or_default().push(s);
    }
    let findings = w.table.findings();
    assert!(findings.windows(2).all(|f| f[0].since <= f[1].since), "oldest first");
    for f in &findings {
        assert!(f.closed_at.is_none() && f.class.finds() && !f.evidence.is_empty() && !f.actions.is_empty());
        let Some(rooms) = causes.remove(&f.group) else {
            // M19 shows only when its rooms are over.
            assert!(!f.class.pins() || f.class == Class::ConcludedButHeld, "{f:?}");
            continue;
        };
        let verdicts = rooms.iter().map(|s| s.verdict.as_ref().unwrap());
        assert!(verdicts.clone().all(|v| v.class == f.class));
        assert_eq!(verdicts.map(|v| v.confidence).max(), Some(f.confidence));
        let mut numbers: Vec<u64> = rooms.iter().map(|s| s.room).collect();
        let mut listed = f.rooms.clone();
        numbers.sort_unstable();
        listed.sort_unstable();
        assert_eq!((&listed, f.room_count as usize), (&numbers, numbers.len()));
    }
    assert!(causes.is_empty(), "pins without a finding: {causes:?}");
    assert_eq!(w.table.finding_gauges().iter().map(|g| g.findings).sum::<u64>(), findings.len() as u64);
}

/// What was told of findings is what there is.
fn finding_events_are_sane(w: &mut World, open: &mut HashMap<u64, (Class, Confidence)>) {
    let told: Vec<FindingEvent> = w.table.finding_events().collect();
    for e in &told {
        let f = e.finding();
        let now = (f.class, f.confidence);
        match e {
            FindingEvent::Opened(_) => {
                assert_ne!(open.insert(f.group, now), Some(now), "told twice");
            }
            FindingEvent::Closed(_) => {
                assert!(f.closed_at.is_some());
                assert!(open.remove(&f.group).is_some(), "closed though not open");
            }
        }
    }
    let is: HashMap<_, _> = w.table.findings().iter().map(|f| (f.group, (f.class, f.confidence))).collect();
    assert_eq!(*open, is);
}

fn run(sees: Sees, layout: Layout, max_rooms: usize, ops: &[Op]) -> World {
    let config = Config { max_rooms, max_closed: 64, max_connections: 12, ..Config::default() };
    let mut w = World::with(sees, layout, config);
    w.outlives = false;
    for op in ops {
        apply(&mut w, op);
    }
    w
}

/// The table as another agent goes on with it that has been started a moment later, with every process and connection
/// still there.
fn restart(w: &mut World, max_rooms: usize) {
    let config = Config { max_rooms, max_closed: 64, max_connections: 12, ..Config::default() };
    let text = serde_json::to_string(&w.table.save()).unwrap();
    let saved: SavedRooms = serde_json::from_str(&text).unwrap();
    let alive = saved.processes().collect();
    let survivors = Survivors { alive, ..Survivors::default() };
    let away = Away { from: w.mono(), to: w.mono() };
    w.table = RoomTable::restore(config, saved, away, &survivors);
    w.table.returned(|_| true, &[], w.mono(), &mut w.out);
}

fn sees() -> impl Strategy<Value = Sees> {
    prop_oneof![Just(Sees::Prefill), Just(Sees::Decode), Just(Sees::Both)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_sequence_keeps_the_rules(
        sees in sees(), layout in 0usize..5, max_rooms in 1usize..8, ops in prop::collection::vec(op(), 1..120)
    ) {
        let layout = [MOONCAKE, NIXL_NEW, NIXL_OLD, MORI_OLD, MORI_OPEN][layout];
        let mut w = run(sees, layout, max_rooms, &ops);
        events_are_sane(&w.out);
        table_is_sane(&w, max_rooms);
        let mut open = HashMap::new();
        finding_events_are_sane(&mut w, &mut open);
        // Long after, all that ends by a timer has ended, and everything by the day after.
        w.wait(500_000);
        table_is_sane(&w, max_rooms);
        events_are_sane(&w.out);
        finding_events_are_sane(&mut w, &mut open);
    }

    #[test]
    fn the_same_inputs_give_the_same_events(
        sees in sees(), ops in prop::collection::vec(op(), 1..80)
    ) {
        let (a, b) = (run(sees, MOONCAKE, 5, &ops), run(sees, MOONCAKE, 5, &ops));
        prop_assert_eq!(&a.out, &b.out);
    }
    #[test]
    fn a_restart_loses_no_room_and_no_pin(
        sees in sees(), layout in 0usize..5, before in prop::collection::vec(op(), 1..80),
        after in prop::collection::vec(op(), 1..40)
    ) {
        let layout = [MOONCAKE, NIXL_NEW, NIXL_OLD, MORI_OLD, MORI_OPEN][layout];
        let mut w = run(sees, layout, 8, &before);
        w.wait(2000);
        let (old, told) = (w.table.open().collect::<Vec<_>>(), w.out.len());
        restart(&mut w, 8);
        for was in &old {
            let is = w.last(was.room);
            prop_assert_eq!((is.incarnation, is.opened_at), (was.incarnation, was.opened_at));
            prop_assert_eq!(&is.messages, &was.messages);
            prop_assert!(is.restored.is_some());
            // Others are looked at rarely, and anew now.
            if was.pinned() {
                let verdict = |s: &RoomSnapshot| s.verdict.as_ref().map(|v| (v.class, v.confidence, v.since));
                prop_assert_eq!((is.pinned(), verdict(&is)), (true, verdict(was)));
                prop_assert_eq!((&is.prefill, &is.decode), (&was.prefill, &was.decode));
                prop_assert!(!w.out[told..].iter().any(|e| e.snapshot().room == was.room));
            }
        }
        table_is_sane(&w, 8);
        // What was open is taken as told.
        let mut open = w.table.findings().iter().map(|f| (f.group, (f.class, f.confidence))).collect();
        drop(w.table.finding_events());
        for op in &after {
            apply(&mut w, op);
        }
        events_are_sane(&w.out);
        table_is_sane(&w, 8);
        finding_events_are_sane(&mut w, &mut open);
        w.wait(500_000);
        events_are_sane(&w.out);
        finding_events_are_sane(&mut w, &mut open);
    }
}
