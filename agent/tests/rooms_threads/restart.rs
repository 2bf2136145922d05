//! What of this a restarted agent still knows.

use roomtrace::rooms::model::{Away, Outcome};
use roomtrace::rooms::{Config, RoomTable, SavedRooms, Survivors};
use roomtrace::verdict::model::Class;

use super::receivers::foreign_then_death;
use super::rooms_support::*;
use super::workers::worker;
use super::{ROOM, says, world};

#[test]
fn a_dead_receive_loop_is_still_known_after_a_restart() {
    let mut w = world(Sees::Prefill);
    foreign_then_death(&mut w, 21);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(15_000);
    let before = w.verdict(ROOM);
    let saved: SavedRooms = serde_json::from_str(&serde_json::to_string(&w.table.save()).unwrap()).unwrap();
    let away = Away { from: w.mono(), to: w.mono().plus(1_000_000_000) };
    for alive in [true, false] {
        let pids = [100, 200].into();
        let survivors = if alive {
            Survivors { alive: pids, gone: [].into() }
        } else {
            Survivors { alive: [].into(), gone: pids }
        };
        let mut table = RoomTable::restore(Config::default(), saved.clone(), away, &survivors);
        let mut out = Vec::new();
        table.returned(|_| true, &[], away.to, &mut out);
        table.tick(away.to.plus(3_000_000_000), &mut out);
        let room = table.snapshot(ROOM).pop().unwrap();
        if alive {
            let after = room.verdict.unwrap();
            assert_eq!((after.class, after.confidence), (before.class, before.confidence));
            assert_eq!(after.group, before.group);
            assert!(says(&after, "thread 23357"), "{:?}", after.evidence);
        } else {
            assert_eq!(room.outcome, Some(Outcome::Unknown));
        }
    }
}

#[test]
fn the_finding_of_a_dead_thread_goes_on_without_being_told_again() {
    let mut reader = world(Sees::Prefill);
    foreign_then_death(&mut reader, 21);
    reader.metadata(ROOM, &decode(0), &prefill(0));
    reader.to(15_000);
    let mut of_session = worker(Sees::Prefill, 2, 2);
    of_session.to(13_000);
    for w in [&mut reader, &mut of_session] {
        let told = |table: &RoomTable| {
            let f = table.findings().into_iter().map(|f| (f.group, f.class, f.confidence, f.rooms));
            f.collect::<Vec<_>>()
        };
        let before = told(&w.table);
        assert_eq!((before.len(), before[0].1), (1, Class::ThreadDied));
        let text = serde_json::to_string(&w.table.save()).unwrap();
        let saved: SavedRooms = serde_json::from_str(&text).unwrap();
        let away = Away { from: w.mono(), to: w.mono().plus(1_000_000_000) };
        let survivors = Survivors { alive: saved.processes().collect(), gone: [].into() };
        let mut table = RoomTable::restore(Config::default(), saved, away, &survivors);
        assert_eq!(told(&table), before);
        table.returned(|_| true, &[], away.to, &mut Vec::new());
        for s in 0..5 {
            table.tick(away.to.plus(s * 1_000_000_000), &mut Vec::new());
        }
        assert_eq!(table.finding_events().map(|e| e.name()).collect::<Vec<_>>(), [""; 0]);
        assert_eq!(told(&table), before);
    }
}
