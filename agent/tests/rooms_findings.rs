//! Findings: one cause with its rooms, rates that no room shows, and what must not be taken for either.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod rooms_support;

use rooms_support::*;
use roomtrace::event::{Direction, Mono, SECOND};
use roomtrace::rooms::findings::{MAX_CLOSED, MAX_FINDINGS, MAX_ROOMS};
use roomtrace::rooms::model::{FindingEvent, Role};
use roomtrace::rooms::{Config, RoomTable, Survivors};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence, Finding};

/// What was told since the last call.
fn told(w: &mut World) -> Vec<(&'static str, Finding)> {
    w.table.finding_events().map(|e| (e.name(), e.finding().clone())).collect()
}

fn only(w: &World) -> Finding {
    let mut all = w.table.findings();
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

fn of_class(w: &World, class: Class) -> Vec<Finding> {
    w.table.findings().into_iter().filter(|f| f.class == class).collect()
}

/// 50 rooms of one session, none answered, while the rank serves another session: a dead worker.
fn dead_worker(w: &mut World, rooms: u64) {
    w.register(&decode(0), &prefill(0));
    w.register(&decode(1), &prefill(0));
    w.healthy(900_000, &decode(0), &prefill(0), 20);
    for n in 0..rooms {
        w.metadata(1000 + n, &decode(0), &prefill(0));
    }
    for n in 0..20 {
        w.healthy(800_000 + n, &decode(1), &prefill(0), 20);
    }
}

// Grouping

#[test]
fn fifty_rooms_of_one_dead_worker_are_one_finding_with_fifty_rooms() {
    let mut w = World::new(Sees::Prefill);
    dead_worker(&mut w, 50);
    w.to(14_000);
    let f = only(&w);
    assert_eq!(
        (f.class, f.confidence, f.room_count),
        (Class::TransferWorkerSilent, Confidence::Possible, 50)
    );
    assert_eq!(f.rooms, (1000..1050).collect::<Vec<_>>(), "oldest first");
    assert_eq!((f.engine.role, f.engine.endpoint), (Some(Role::Prefill), Some(prefill(0).endpoint)));
    assert_eq!(f.group, w.verdict(1000).group);
    assert_eq!(f.closed_at, None);
    assert!(f.evidence.iter().any(|e| e.starts_with("room 1000: METADATA")), "{:?}", f.evidence);
    let opened: Vec<_> = told(&mut w);
    assert_eq!(opened.len(), 1, "fifty pins, one event: {opened:?}");
    assert_eq!((opened[0].0, opened[0].1.group), ("finding_opened", f.group));
}

#[test]
fn a_finding_ends_with_its_last_room_and_says_how_many_it_had() {
    let mut w = World::new(Sees::Prefill);
    dead_worker(&mut w, 50);
    w.to(14_000);
    told(&mut w);
    let group = only(&w).group;
    for n in 0..49 {
        w.status(1000 + n, &prefill(0), &decode(0), KvPoll::Success);
    }
    w.wait(2000);
    // With its session answering again the last one is another cause.
    w.status(1049, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(2000);
    assert_eq!(w.table.findings(), []);
    let events = told(&mut w);
    let closed: Vec<_> =
        events.iter().filter(|(name, f)| *name == "finding_closed" && f.group == group).collect();
    assert_eq!(closed.len(), 1, "{events:?}");
    let f = &closed[0].1;
    assert_eq!((f.room_count, f.rooms.len()), (50, 50));
    assert!(f.closed_at.is_some_and(|at| at > f.since));
    assert!(w.table.closed_findings().any(|c| c == f), "kept for the API");
    // Every finding that was opened was closed.
    let open = |name| events.iter().filter(|(n, _)| *n == name).count();
    assert_eq!(open("finding_closed"), open("finding_opened") + 1, "{events:?}");
}

#[test]
fn a_finding_lists_a_hundred_rooms_and_counts_all() {
    let mut w = World::new(Sees::Prefill);
    dead_worker(&mut w, 150);
    w.to(14_000);
    let f = only(&w);
    assert_eq!((f.rooms.len(), f.room_count), (MAX_ROOMS, 150));
    assert_eq!(f.rooms, (1000..1100).collect::<Vec<_>>());
    assert_eq!(w.last(1000).group_size, 150);
}

#[test]
fn what_helps_a_cause_is_not_what_ends_one_room() {
    let mut w = World::new(Sees::Prefill);
    dead_worker(&mut w, 50);
    w.to(14_000);
    let f = only(&w);
    assert!(f.actions.iter().all(|a| !a.command.contains("FULL_RID")), "{:?}", f.actions);
    assert!(f.actions.iter().any(|a| a.clears && a.command.starts_with("kill -TERM 100")), "{:?}", f.actions);
    assert!(f.actions.iter().any(|a| a.blast_radius.contains("up to 50")), "{:?}", f.actions);
    // One room alone: what its own verdict says.
    let mut w = World::new(Sees::Decode);
    w.metadata(7, &decode(0), &prefill(0));
    w.to(12_000);
    assert_eq!(only(&w).actions, w.verdict(7).actions);
}

#[test]
fn a_change_of_confidence_is_told_with_the_same_group_and_moment() {
    let mut w = World::new(Sees::Prefill);
    // Two prefill ranks owe; one has said it.
    w.metadata(7, &decode(0), &prefill(0));
    w.metadata(7, &decode(0), &prefill(1));
    w.status(7, &prefill(0), &decode(0), KvPoll::Success);
    w.to(90_000);
    let events = told(&mut w);
    let told: Vec<_> = events.iter().map(|(n, f)| (*n, f.class, f.confidence)).collect();
    assert_eq!(
        told,
        [
            ("finding_opened", Class::RanksDisagree, Confidence::Possible),
            ("finding_opened", Class::RanksDisagree, Confidence::Likely)
        ]
    );
    assert_eq!((events[0].1.group, events[0].1.since), (events[1].1.group, events[1].1.since));
}

#[test]
fn two_causes_are_two_findings_in_a_stable_order() {
    let mut w = World::new(Sees::Prefill);
    w.metadata(7, &decode(0), &prefill(0));
    w.wait(500);
    w.metadata(8, &decode(1), &prefill(1));
    w.to(13_000);
    let rooms = |w: &World| w.table.findings().into_iter().map(|f| f.rooms).collect::<Vec<_>>();
    assert_eq!(rooms(&w), [vec![7], vec![8]]);
    assert_eq!(rooms(&w), rooms(&w));
    let gauges = w.table.finding_gauges();
    assert_eq!(gauges.len(), 1);
    assert_eq!(
        (gauges[0].class, gauges[0].role, gauges[0].findings),
        (Class::TransferNotConcluded, Some(Role::Prefill), 2)
    );
}

#[test]
fn what_is_over_is_kept_within_bounds() {
    let mut w = World::new(Sees::Prefill);
    for n in 0..100_u8 {
        w.metadata(u64::from(n), &decode(n), &prefill(n));
    }
    w.to(13_000);
    assert_eq!(w.table.findings().len(), 100);
    for n in 0..100_u8 {
        w.status(u64::from(n), &prefill(n), &decode(n), KvPoll::Success);
    }
    w.wait(3000);
    assert_eq!(w.table.findings(), []);
    assert_eq!(w.table.closed_findings().count(), MAX_CLOSED);
    assert_eq!(told(&mut w).len(), 200);
    assert_eq!(w.table.findings_turned_away(), 0);
}

#[test]
fn more_causes_than_places_are_counted_and_told_when_there_is_one() {
    let mut w = World::new(Sees::Decode);
    // Seen from decode each pair of ranks is a cause of its own: 32 × 36 of them.
    let room = |p: u8, d: u8| u64::from(p) * 100 + u64::from(d);
    for p in 0..32 {
        for d in 0..36 {
            w.metadata(room(p, d), &decode(d), &prefill(p));
        }
    }
    w.to(15_000);
    assert_eq!(w.table.pinned().count(), 1152);
    assert_eq!(w.table.findings().len(), MAX_FINDINGS);
    assert_eq!(
        w.table.findings_turned_away(),
        1152 - MAX_FINDINGS as u64,
        "once each, however often looked at"
    );
    assert_eq!(told(&mut w).len(), MAX_FINDINGS);
    let waiting = |w: &World| {
        w.table.pinned().filter(|r| w.table.finding_of(r.verdict.as_ref().unwrap().group).is_none()).count()
    };
    assert_eq!(waiting(&w), 128);
    let ended: Vec<u64> = w.table.findings().iter().take(36).map(|f| f.rooms[0]).collect();
    for room in ended {
        let rank = |n: u64| u8::try_from(n).unwrap();
        w.status(room, &prefill(rank(room / 100)), &decode(rank(room % 100)), KvPoll::Success);
    }
    w.wait(3000);
    // Some of the others only queue now.
    let pinned = w.table.pinned().count();
    assert!((MAX_FINDINGS..1152 - 36).contains(&pinned), "{pinned}");
    assert_eq!(w.table.findings().len(), MAX_FINDINGS, "whoever waited has the places of those that ended");
    assert_eq!(waiting(&w), pinned - MAX_FINDINGS);
    let names: Vec<_> = told(&mut w).into_iter().map(|(n, _)| n).collect();
    let count = |name| names.iter().filter(|n| **n == name).count();
    assert!(count("finding_closed") >= 36);
    assert_eq!(count("finding_opened"), count("finding_closed"));
}

#[test]
fn a_restarted_agent_has_its_findings_and_tells_none_of_them_again() {
    let mut w = World::new(Sees::Prefill);
    dead_worker(&mut w, 50);
    w.to(14_000);
    let before = only(&w);
    let saved = w.table.save();
    let away = roomtrace::rooms::model::Away { from: w.mono(), to: Mono(w.mono().0 + SECOND) };
    let alive = [100, 200, 201].into_iter().collect();
    let survivors = Survivors { alive, ..Survivors::default() };
    let mut table = RoomTable::restore(Config::default(), saved, away, &survivors);
    let after = table.findings();
    assert_eq!(after.len(), 1);
    assert_eq!((after[0].group, after[0].class), (before.group, before.class));
    // That of its oldest pin; the first that was told may have been another of the same moment.
    assert!(after[0].since.0.abs_diff(before.since.0) < SECOND);
    assert_eq!((after[0].room_count, &after[0].rooms), (50, &before.rooms));
    let mut out = Vec::new();
    table.returned(|_| true, &[], away.to, &mut out);
    assert_eq!(table.finding_events().collect::<Vec<FindingEvent>>(), []);
    assert_eq!(table.findings().len(), 1);
}

// abort_unanswered

/// A room whose decode gives it up; `answered`: prefill says so.
fn given_up(w: &mut World, room: u64, generation: Option<u64>, answered: bool) {
    w.metadata(room, &decode(0), &prefill(0));
    w.wait(100);
    w.abort(room, &decode(0), &prefill(0), generation);
    if answered {
        w.ack(room, &prefill(0), &decode(0));
    }
}

#[test]
fn five_unanswered_aborts_are_a_rate_and_no_pin() {
    for sees in [Sees::Prefill, Sees::Decode, Sees::Both] {
        let mut w = World::new(sees);
        for n in 0..5 {
            given_up(&mut w, n, Some(n), false);
        }
        w.to(29_000);
        assert_eq!(of_class(&w, Class::AbortUnanswered), [], "{sees:?}: they may still be answered");
        w.to(33_000);
        let found = of_class(&w, Class::AbortUnanswered);
        assert_eq!(found.len(), 1, "{sees:?}");
        let f = &found[0];
        assert_eq!(f.confidence, Confidence::Possible, "whether answers of it can be seen is not known");
        assert_eq!(
            (f.engine.endpoint, f.engine.local),
            (Some(prefill(0).endpoint), Some(sees != Sees::Decode))
        );
        assert_eq!((f.rooms.len(), f.room_count), (0, 0));
        assert!(f.evidence[0].contains("5 of the last 5"), "{:?}", f.evidence);
        assert!(!f.actions.is_empty());
        for n in 0..5 {
            assert!(w.pin(n).is_none_or(|(_, v)| v.class != Class::AbortUnanswered), "never a pin");
        }
        let events = told(&mut w);
        assert!(events.iter().any(|(n, f)| *n == "finding_opened" && f.class == Class::AbortUnanswered));
    }
}

#[test]
fn a_rank_that_answers_others_is_more_surely_silent_about_these() {
    let mut w = World::new(Sees::Prefill);
    w.healthy(100, &decode(0), &prefill(0), 20);
    for n in 0..6 {
        given_up(&mut w, n, Some(n), false);
    }
    w.to(40_000);
    assert_eq!(of_class(&w, Class::AbortUnanswered)[0].confidence, Confidence::Likely);
}

#[test]
fn half_answered_too_few_or_without_generation_is_no_finding() {
    // As many answered as not.
    let mut w = World::new(Sees::Prefill);
    for n in 0..12 {
        given_up(&mut w, n, Some(n), n % 2 == 0);
    }
    w.to(60_000);
    assert_eq!(of_class(&w, Class::AbortUnanswered), []);
    // Four.
    let mut w = World::new(Sees::Prefill);
    for n in 0..4 {
        given_up(&mut w, n, Some(n), false);
    }
    w.to(60_000);
    assert_eq!(of_class(&w, Class::AbortUnanswered), []);
    // Four frames: nobody answers those where pages are released late.
    let mut w = World::new(Sees::Prefill);
    for n in 0..20 {
        given_up(&mut w, n, None, false);
    }
    w.to(60_000);
    assert_eq!(of_class(&w, Class::AbortUnanswered), []);
}

#[test]
fn silence_of_a_rank_that_is_gone_or_was_not_heard_is_no_finding() {
    let mut w = World::new(Sees::Prefill);
    for n in 0..8 {
        given_up(&mut w, n, Some(n), false);
    }
    w.lossy(&prefill(0), &decode(0), Direction::Sent);
    w.to(60_000);
    assert_eq!(of_class(&w, Class::AbortUnanswered), [], "the answers may have been missed");
    let mut w = World::new(Sees::Prefill);
    for n in 0..8 {
        given_up(&mut w, n, Some(n), false);
    }
    w.listener(&prefill(0));
    w.to(60_000);
    assert_eq!(of_class(&w, Class::AbortUnanswered), [], "it has ended");
}

#[test]
fn answers_end_it_and_so_does_time() {
    let mut w = World::new(Sees::Prefill);
    for n in 0..6 {
        given_up(&mut w, n, Some(n), false);
    }
    w.to(40_000);
    assert_eq!(of_class(&w, Class::AbortUnanswered).len(), 1);
    for n in 10..20 {
        given_up(&mut w, n, Some(n), true);
    }
    assert_eq!(of_class(&w, Class::AbortUnanswered), []);
    let closed = told(&mut w);
    assert!(closed.iter().any(|(n, f)| *n == "finding_closed" && f.class == Class::AbortUnanswered));
    let mut w = World::new(Sees::Prefill);
    for n in 0..6 {
        given_up(&mut w, n, Some(n), false);
    }
    w.to(40_000);
    assert_eq!(of_class(&w, Class::AbortUnanswered).len(), 1);
    w.to(610_000);
    assert_eq!(of_class(&w, Class::AbortUnanswered), [], "nothing of the last ten minutes");
}

// session_blacklisted

fn failed_at_once(w: &mut World, room: u64) {
    w.metadata(room, &decode(0), &prefill(0));
    w.wait(5);
    w.status(room, &prefill(0), &decode(0), KvPoll::Failed);
}

#[test]
fn three_rooms_failed_at_once_are_a_session_on_the_list() {
    for sees in [Sees::Prefill, Sees::Decode, Sees::Both] {
        let mut w = World::new(sees);
        w.register(&decode(0), &prefill(0));
        w.healthy(1, &decode(0), &prefill(0), 20);
        failed_at_once(&mut w, 10);
        failed_at_once(&mut w, 11);
        assert_eq!(of_class(&w, Class::SessionBlacklisted), [], "{sees:?}: two can be chance");
        failed_at_once(&mut w, 12);
        let found = of_class(&w, Class::SessionBlacklisted);
        assert_eq!(found.len(), 1, "{sees:?}");
        let f = &found[0];
        assert_eq!((f.confidence, f.rooms.clone(), f.room_count), (Confidence::Likely, vec![10, 11, 12], 3));
        assert!(f.evidence[0].contains(&decode(0).session), "{:?}", f.evidence);
        failed_at_once(&mut w, 13);
        assert_eq!(of_class(&w, Class::SessionBlacklisted)[0].room_count, 4);
        assert_eq!(told(&mut w).len(), 1, "told once");
    }
}

#[test]
fn success_or_a_new_registration_takes_a_session_off_the_list() {
    let list = |w: &World| of_class(w, Class::SessionBlacklisted).len();
    let mut w = World::new(Sees::Prefill);
    for n in 10..14 {
        failed_at_once(&mut w, n);
    }
    assert_eq!(list(&w), 1);
    w.healthy(20, &decode(0), &prefill(0), 20);
    assert_eq!(list(&w), 0);
    for n in 30..34 {
        failed_at_once(&mut w, n);
    }
    assert_eq!(list(&w), 1);
    w.register(&decode(0), &prefill(0));
    assert_eq!(list(&w), 0);
    let names: Vec<_> = told(&mut w).into_iter().map(|(n, _)| n).collect();
    assert_eq!(names, ["finding_opened", "finding_closed", "finding_opened", "finding_closed"]);
}

#[test]
fn other_failures_are_no_list() {
    let none = |w: &World, why: &str| assert_eq!(of_class(w, Class::SessionBlacklisted), [], "{why}");
    let mut w = World::new(Sees::Prefill);
    for n in 0..6 {
        failed_at_once(&mut w, 10 + n);
        w.healthy(100 + n, &decode(0), &prefill(0), 20);
    }
    none(&w, "a success between them");
    let mut w = World::new(Sees::Prefill);
    for n in 0..6 {
        w.metadata(n, &decode(0), &prefill(0));
        w.wait(3000);
        w.status(n, &prefill(0), &decode(0), KvPoll::Failed);
    }
    none(&w, "each after its own timeout");
    let mut w = World::new(Sees::Prefill);
    for n in 0..6 {
        w.metadata(n, &decode(0), &prefill(0));
        w.wait(5);
        w.abort(n, &decode(0), &prefill(0), Some(n));
        w.status(n, &prefill(0), &decode(0), KvPoll::Failed);
    }
    none(&w, "clients that hung up");
    let mut w = World::with(Sees::Prefill, NIXL_NEW, Config::default());
    for n in 0..6 {
        failed_at_once(&mut w, n);
    }
    none(&w, "only mooncake has such a list");
    // Two sessions in turn are two counts.
    let mut w = World::new(Sees::Prefill);
    for n in 0..4 {
        let d = decode(u8::try_from(n % 2).unwrap());
        w.metadata(n, &d, &prefill(0));
        w.status(n, &prefill(0), &d, KvPoll::Failed);
    }
    none(&w, "two of each session");
}
