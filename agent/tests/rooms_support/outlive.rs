//! Whatever is pinned when a test ends must be pinned by an agent that is started again there, for the same reason, as
//! surely, by the same debtor; and stay so as long as it does where the agent was never gone.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use roomtrace::event::{Mono, SECOND};
use roomtrace::rooms::model::{Away, Role, RoomSnapshot};
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

/// Of a process that has ended the number is not kept: another may have it.
fn debtor(p: &Party, ended: &BTreeSet<u32>) -> Debtor {
    (p.role, p.rank, p.endpoint, p.task.map(|t| t.tgid).filter(|pid| !ended.contains(pid)))
}

fn pin(table: &RoomTable, room: u64, ended: &BTreeSet<u32>) -> Option<Pin> {
    let s: RoomSnapshot = table.snapshot(room).pop()?;
    let v = s.verdict.filter(|v| v.class.pins() && s.closed_at.is_none())?;
    Some(Pin {
        incarnation: s.incarnation,
        class: v.class,
        confidence: v.confidence,
        owed_by: v.owed_by.as_ref().map(|p| debtor(p, ended)),
        act_on: v.act_on.as_ref().map(|p| debtor(p, ended)),
        group: v.group,
        since: v.since,
    })
}

/// Ends the agent, starts another `AWAY` later, and compares it with the one that goes on.
pub(super) fn check(w: &mut World) {
    // GPUs are not read on here, so that what rests on their quiet goes at once where the agent goes on, and not in the next one.
    let quiet: BTreeSet<u64> =
        w.table.keys(Some(true)).map(|(room, _)| room).filter(|r| rests_on_quiet(&w.table, *r)).collect();
    // What is about to end has ended then.
    w.wait(2000);
    let pinned: Vec<u64> =
        w.table.keys(Some(true)).map(|(room, _)| room).filter(|room| !quiet.contains(room)).collect();
    if pinned.is_empty() {
        return;
    }
    let text = serde_json::to_string(&w.table.save()).unwrap();
    let saved: SavedRooms = serde_json::from_str(&text).unwrap();
    let all: BTreeSet<u32> = saved.processes().collect();
    let (gone, alive) = all.into_iter().partition(|pid| w.ended.contains(pid));
    let survivors = Survivors { alive, gone };
    let (from, to) = (w.mono(), w.mono().plus(AWAY));
    let mut other = RoomTable::restore(w.config, saved, Away { from, to }, &survivors);
    w.table.tick(to, &mut w.out);
    other.returned(|_| true, &[], to, &mut Vec::new());
    for late in [0, AFTER] {
        w.table.tick(to.plus(late), &mut w.out);
        other.tick(to.plus(late), &mut Vec::new());
        let mut all_same = quiet.is_empty();
        for room in &pinned {
            let (was, is) = (pin(&w.table, *room, &w.ended), pin(&other, *room, &w.ended));
            if rests_on_having_seen_everything(&w.table, *room) {
                assert!(is.is_none_or(|is| is.confidence == Confidence::Possible), "room {room}");
                all_same = false;
                continue;
            }
            let verdict = |t: &RoomTable| {
                let s = t.snapshot(*room).pop()?;
                Some((s.outcome, s.completeness, s.verdict.map(|v| (v.class, v.confidence, v.evidence))))
            };
            assert!(
                was == is,
                "room {room} does not outlive the agent, {} s later:\n{was:#?}\n{:#?}\nand in the next one\n{is:#?}\n{:#?}",
                late / SECOND,
                verdict(&w.table),
                verdict(&other)
            );
        }
        let labels = |t: &RoomTable| {
            let mut pinned = t.gauges().pinned;
            pinned.sort_by_key(|g| (g.role, g.class, g.confidence, g.owed_instance.clone()));
            pinned
        };
        assert!(
            !all_same || labels(&w.table) == labels(&other),
            "{:#?} {:#?}",
            labels(&w.table),
            labels(&other)
        );
    }
}

/// What GPUs did that nobody reads any more is not known to go on.
fn rests_on_quiet(table: &RoomTable, room: u64) -> bool {
    let verdict = table.snapshot(room).pop().and_then(|s| s.verdict);
    verdict.is_some_and(|v| v.evidence.iter().any(|e| e.contains("ran no kernel")))
}

/// That a request never came is not known any more once nobody has looked for a while: what rests on it gets weaker.
fn rests_on_having_seen_everything(table: &RoomTable, room: u64) -> bool {
    let verdict = table.snapshot(room).pop().and_then(|s| s.verdict);
    verdict.is_some_and(|v| v.evidence.iter().any(|e| e.starts_with("no request of this room came to")))
}
