//! What of this a restarted agent still knows.

use roomtrace::rooms::model::{Away, Outcome};
use roomtrace::rooms::{Config, RoomTable, SavedRooms, Survivors};

use super::receivers::foreign_then_death;
use super::rooms_support::*;
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
