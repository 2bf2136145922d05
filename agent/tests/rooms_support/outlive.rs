//! Whatever is pinned when a test ends must be pinned by an agent that is started again there, for the same reason, as
//! surely, by the same debtor; and stay so as long as it does where the agent was never gone.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use roomtrace::event::{Mono, SECOND};
use roomtrace::rooms::model::{Role, RoomSnapshot};
use roomtrace::rooms::{RoomTable, SavedRooms, Survivors};
use roomtrace::verdict::model::{Class, Confidence, Party};

use super::World;

/// How long nobody looks.
const AWAY: u64 = SECOND;
/// How long both are followed after that.
const AFTER: u64 = 5 * SECOND;

/// What alerts are made of.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pin {
    incarnation: u32,
    class: Class,
    confidence: Confidence,
    owed_by: Option<Debtor>,
    act_on: Option<Debtor>,
    group: u64,
    since: Mono,
}

type Debtor = (Option<Role>, Option<u32>, Option<SocketAddr>, Option<u32>);

fn debtor(p: &Party) -> Debtor {
    (p.role, p.rank, p.endpoint, p.task.map(|t| t.tgid))
}

fn pin(table: &RoomTable, room: u64) -> Option<Pin> {
    let s: RoomSnapshot = table.snapshot(room).pop()?;
    let v = s.verdict.filter(|v| v.class.pins() && s.closed_at.is_none())?;
    Some(Pin {
        incarnation: s.incarnation,
        class: v.class,
        confidence: v.confidence,
        owed_by: v.owed_by.as_ref().map(debtor),
        act_on: v.act_on.as_ref().map(debtor),
        group: v.group,
        since: v.since,
    })
}

/// Ends the agent, starts another `AWAY` later, and compares it with the one that goes on.
pub(super) fn check(w: &mut World) {
    let pinned: Vec<u64> = w.table.keys(Some(true)).map(|(room, _)| room).collect();
    if pinned.is_empty() {
        return;
    }
    let text = serde_json::to_string(&w.table.save()).unwrap();
    let saved: SavedRooms = serde_json::from_str(&text).unwrap();
    let all: BTreeSet<u32> = saved.processes().collect();
    let (gone, alive) = all.into_iter().partition(|pid| w.ended.contains(pid));
    let survivors = Survivors { alive, gone };
    let (from, to) = (w.mono(), w.mono().plus(AWAY));
    let away = roomtrace::rooms::model::Away { from, to };
    let mut other = RoomTable::restore(w.config, saved, away, &survivors);
    w.table.tick(to, &mut w.out);
    other.returned(|_| true, &[], to, &mut Vec::new());
    for late in [0, AFTER] {
        w.table.tick(to.plus(late), &mut w.out);
        other.tick(to.plus(late), &mut Vec::new());
        let labels = |t: &RoomTable| t.gauges().pinned;
        for room in &pinned {
            let (was, is) = (pin(&w.table, *room), pin(&other, *room));
            let evidence = |t: &RoomTable| {
                t.snapshot(*room).pop().map(|s| {
                    (s.outcome, s.completeness, s.verdict.map(|v| (v.class, v.confidence, v.evidence)))
                })
            };
            assert!(
                was == is,
                "OUTLIVE room {room}, {late} ns later:\n{was:?}\n{:#?}\nand after a restart\n{is:?}\n{:#?}",
                evidence(&w.table),
                evidence(&other)
            );
        }
        assert_eq!(labels(&w.table), labels(&other), "OUTLIVE");
    }
}
