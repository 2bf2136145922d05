//! Room numbers used again, dummies, releases, and what a verdict carries.

use roomtrace::rooms::Config;
use roomtrace::rooms::model::Outcome;
use roomtrace::sglang::message::{Backend, KvPoll};
use roomtrace::verdict::known_issues;
use roomtrace::verdict::model::Class;

use super::rooms_support::*;
use super::{ROOM, world};

// duplicate_room, incarnations

#[test]
fn duplicate_room_is_a_second_slot_while_the_first_lives() {
    let mut w = world(Sees::Both);
    w.ask(ROOM, &decode(0), &prefill(0), |m| m.aux_index = Some(1));
    w.wait(2000);
    w.ask(ROOM, &decode(0), &prefill(0), |m| m.aux_index = Some(2));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!(v.class, Class::DuplicateRoom);
    assert_eq!(v.owed_by.unwrap().role, None, "a router or client");
    assert_eq!(w.last(ROOM).incarnation, 0);
}

#[test]
fn the_same_metadata_again_is_no_duplicate() {
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(12_000);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
    assert_eq!(w.last(ROOM).prefill.unwrap().got, 1);
}

#[test]
fn a_number_used_again_is_the_next_incarnation() {
    for sees in [Sees::Prefill, Sees::Decode, Sees::Both] {
        let mut w = world(sees);
        for _ in 0..3 {
            w.healthy(ROOM, &decode(0), &prefill(0), 10);
            w.wait(3000);
        }
        assert_eq!(w.outcomes(ROOM), [Outcome::Success; 3]);
        let lives: Vec<_> = w.table.snapshot(ROOM).iter().map(|s| s.incarnation).collect();
        assert_eq!(lives, [0, 1, 2]);
    }
}

#[test]
fn late_metadata_of_another_rank_does_not_reopen_a_failed_room() {
    let mut w = World::new(Sees::Both);
    let (d0, d1) = (decode_of(0, 2), decode_of(1, 2));
    w.metadata(ROOM, &d0, &prefill(0));
    w.abort(ROOM, &d0, &prefill(0), Some(1));
    w.ack(ROOM, &prefill(0), &d0);
    w.wait(50);
    w.metadata(ROOM, &d1, &prefill(0));
    w.to(60_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
}

// dummies, releases

#[test]
fn a_view_of_dummies_only_is_not_applicable() {
    let mut w = world(Sees::Prefill);
    for _ in 0..2 {
        w.ask(ROOM, &decode(0), &prefill(0), |m| {
            m.dummy = Some(true);
            m.aux_index = None;
        });
    }
    w.to(15_000);
    assert_eq!(w.class(ROOM), Some(Class::NotApplicable));
    assert_eq!(w.names(ROOM), [""; 0]);
    let gauges = w.table.gauges();
    assert!(gauges.open.iter().all(|g| g.oldest_age_s.is_none()), "it does not age");
    w.to(500_000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
}

#[test]
fn decode_waits_only_for_ranks_that_are_no_dummies() {
    let mut w = World::new(Sees::Both);
    let d = decode(0);
    w.metadata(ROOM, &d, &prefill(0));
    for n in 1..4 {
        w.ask(ROOM, &d, &prefill(n), |m| {
            m.dummy = Some(true);
            m.aux_index = None;
        });
    }
    assert_eq!(w.last(ROOM).decode.unwrap().required, Some(1));
    w.status(ROOM, &prefill(0), &d, KvPoll::Success);
    w.to(20_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

#[test]
fn a_dummy_that_cannot_be_told_is_unknown() {
    let mut w = World::with(Sees::Prefill, MORI_OLD, Config::default());
    w.ask(ROOM, &decode(0), &prefill(0), |m| m.dummy = None);
    w.to(15_000);
    assert_eq!(w.class(ROOM), Some(Class::Unknown));
    assert!(w.pin(ROOM).is_none());
}

#[test]
fn old_nixl_is_never_pinned_for_silence() {
    for sees in [Sees::Prefill, Sees::Decode, Sees::Both] {
        let mut w = World::with(sees, NIXL_OLD, Config::default());
        w.register(&decode(0), &prefill(0));
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.to(15_000);
        assert_eq!(w.class(ROOM), Some(Class::CompletionNotObservable));
        assert!(w.table.gauges().open.iter().all(|g| g.oldest_age_s.is_none()));
        // The number used again: the first life ended where nobody saw it.
        w.metadata(ROOM, &decode(0), &prefill(0));
        assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
        w.to(500_000);
        assert_eq!(w.names(ROOM), ["room_closed", "room_closed"]);
    }
}

#[test]
fn old_nixl_says_failed() {
    let mut w = World::with(Sees::Both, NIXL_OLD, Config::default());
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Failed);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

// what a verdict carries

#[test]
fn actions_are_commands_that_say_what_they_hurt() {
    let mut w = world(Sees::Both);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(11_200);
    let v = w.verdict(ROOM);
    assert!(v.actions[0].command.contains(&ROOM.to_string()), "the rid is to be found by the room");
    let abort = v.actions.iter().find(|a| a.command.contains("/abort_request")).unwrap();
    assert!(abort.command.contains("http://10.0.0.1:HTTP_PORT") && abort.command.contains("FULL_RID"));
    assert!(abort.effect.contains("forgotten") && abort.blast_radius.contains("prefix"));
    assert!(v.actions.iter().any(|a| a.command == "kill -TERM 100"));
    assert!(known_issues(v.class, Some(Backend::Mori), None).iter().all(|k| k.applies == "unknown"));
}

#[test]
fn gauges_and_counters_agree_with_what_happened() {
    let mut w = world(Sees::Both);
    w.healthy(1, &decode(0), &prefill(0), 30);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(12_000);
    let g = w.table.gauges();
    assert_eq!(g.rooms, 1);
    assert_eq!(g.open.len(), 10);
    for o in &g.open {
        let expected = u64::from(o.state == KvPoll::WaitingForInput);
        assert_eq!(o.rooms, expected, "{o:?}");
        assert_eq!(o.oldest_age_s.is_some(), expected == 1);
    }
    assert_eq!(g.pinned.len(), 1);
    assert_eq!(g.pinned[0].owed_instance, "10.0.0.1:41000");
    let c = w.table.counters();
    assert_eq!(c.closed.iter().map(|(_, o, n)| if *o == Outcome::Success { *n } else { 0 }).sum::<u64>(), 2);
    assert_eq!(c.pins.iter().map(|(_, _, n)| n).sum::<u64>(), 1);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    let g = w.table.gauges();
    assert!(g.open.iter().all(|o| o.rooms == 0) && g.pinned.is_empty());
    assert_eq!(w.table.peers().len(), 1);
    assert_eq!(w.table.peers()[0].concluded, 2);
}

#[test]
fn pairs_are_told_by_their_last_room_and_how_many_there_are() {
    let mut w = world(Sees::Both);
    for (n, pair) in [(1, 0), (2, 1), (3, 0)] {
        w.metadata(n, &decode(pair), &prefill(0));
        w.status(n, &prefill(0), &decode(pair), KvPoll::Success);
        w.wait(1000);
    }
    let (latest, total) = w.table.latest_peers(1);
    assert_eq!((latest.len(), total, latest[0].concluded), (1, 2, 2));
    assert_eq!(latest[0].decode, w.table.latest_peers(9).0[0].decode);
    assert_eq!(w.table.latest_peers(9).0[1].concluded, 1);
    assert_eq!(w.table.latest_peers(0), (Vec::new(), 2));
}
