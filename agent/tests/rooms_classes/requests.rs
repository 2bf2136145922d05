//! Of the request: an ABORT that came too early, METADATA that did not come.

use roomtrace::rooms::Config;
use roomtrace::rooms::model::{Outcome, Phase, Role};
use roomtrace::sglang::message::{Kind, KvPoll};
use roomtrace::verdict::model::{Class, Confidence};

use super::rooms_support::*;
use super::{ROOM, world};

// abort_before_entry

#[test]
fn abort_before_entry_from_each_side() {
    for sees in [Sees::Prefill, Sees::Decode, Sees::Both] {
        let mut w = world(sees);
        w.abort(ROOM, &decode(0), &prefill(0), None);
        let v = w.pinned_in_time(ROOM, 0.0, 10.0);
        assert_eq!(v.class, Class::AbortBeforeEntry);
        assert_eq!(v.expected, Some(Kind::Status));
        assert_eq!(v.owed_by.unwrap().role, Some(Role::Prefill));
    }
}

#[test]
fn an_acknowledgement_does_not_prove_that_an_abort_without_metadata_had_effect() {
    let mut w = world(Sees::Prefill);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.ack(ROOM, &prefill(0), &decode(0));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!(v.class, Class::AbortBeforeEntry);
    assert!(v.evidence.iter().any(|e| e.contains("ABORT_ACK")));
}

#[test]
fn the_incident_metadata_then_abort_into_an_old_nixl_engine() {
    let mut w = World::with(Sees::Prefill, NIXL_OLD, Config::default());
    w.register(&decode(0), &prefill(0));
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(2000);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    let v = w.pinned_in_time(ROOM, 2.0, 10.0);
    assert_eq!(v.class, Class::AbortBeforeEntry);
    assert_eq!(v.ends_by_itself, None, "nothing empties that queue");
    let modes: Vec<_> = v.candidates.iter().flat_map(|c| c.modes).copied().collect();
    for mode in ["M17", "M20", "M21"] {
        assert!(modes.contains(&mode), "{mode} is named");
    }
    // It never ends, so it is never given up for a timer that does not exist.
    w.to(3_600_000);
    assert!(w.last(ROOM).pinned());
}

#[test]
fn metadata_racing_behind_its_abort_is_the_same_life() {
    let mut w = world(Sees::Prefill);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.ack(ROOM, &prefill(0), &decode(0));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, w.last(ROOM).incarnation), (Class::AbortBeforeEntry, 0));
}

#[test]
fn a_tombstone_of_prefill_complete_makes_an_early_abort_harmless() {
    let mut w = world(Sees::Both);
    w.bootstrap(1, &decode(0), &prefill(0));
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.to(60_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

#[test]
fn an_abort_that_finds_its_entry_and_gets_no_acknowledgement_is_no_pin() {
    for generation in [None, Some(1)] {
        for sees in [Sees::Prefill, Sees::Decode, Sees::Both] {
            let mut w = world(sees);
            w.metadata(ROOM, &decode(0), &prefill(0));
            w.abort(ROOM, &decode(0), &prefill(0), generation);
            w.to(29_000);
            assert_eq!(w.names(ROOM), [""; 0]);
            w.to(32_000);
            assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
            assert_eq!(w.names(ROOM), ["room_closed"]);
        }
    }
}

#[test]
fn mori_drops_an_abort_and_goes_on() {
    let mut w = World::with(Sees::Prefill, MORI_OLD, Config::default());
    w.register(&decode(0), &prefill(0));
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(1000);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::AbortIgnored, Confidence::Possible));
    assert!(readings(&v).contains(&Class::TransferNotConcluded));
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(2000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

// metadata_incomplete, metadata_missing

#[test]
fn metadata_incomplete_without_any_register_accuses_nobody_that_has_sent() {
    // The agent came after the connections: nobody has introduced itself.
    let mut w = World::new(Sees::Prefill);
    w.metadata(ROOM, &decode_of(0, 2), &prefill(0));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!(v.class, Class::MetadataIncomplete);
    for party in [v.owed_by.unwrap(), v.act_on.unwrap()] {
        assert_eq!((party.role, party.endpoint, party.task), (Some(Role::Decode), None, None));
    }
}

#[test]
fn metadata_incomplete_at_prefill_names_the_rank_that_has_not_sent() {
    let mut w = World::new(Sees::Prefill);
    let d: Vec<_> = (0..4).map(|n| decode_of(n, 4)).collect();
    for rank in &d {
        w.register(rank, &prefill(0));
    }
    // Another engine with the same size on another host is not it.
    let mut other = decode_of(9, 4);
    other.endpoint = "10.0.0.77:42009".parse().unwrap();
    w.register(&other, &prefill(0));
    for n in [0, 1, 3] {
        w.metadata(ROOM, &d[n], &prefill(0));
    }
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!(v.class, Class::MetadataIncomplete);
    assert_eq!(v.expected, Some(Kind::Metadata));
    let owed = v.owed_by.unwrap();
    assert_eq!((owed.role, owed.rank, owed.local), (Some(Role::Decode), Some(2), Some(false)));
    assert_eq!(v.act_on.unwrap().endpoint, Some(d[2].endpoint));
    assert!(v.ends_by_itself.unwrap().timer.contains("BOOTSTRAP"));
    let s = w.last(ROOM);
    assert_eq!(s.prefill.as_ref().map(|p| (p.got, p.required)), Some((3, Some(4))));
    assert_eq!(s.prefill.unwrap().state, KvPoll::Bootstrapping);
    // The missing one comes after all: it moves on, and starts to wait for the transfer.
    w.to(15_000);
    w.metadata(ROOM, &d[2], &prefill(0));
    assert_eq!(w.names(ROOM), ["room_pinned", "room_recovered"]);
    assert!(w.last(ROOM).recovered);
    w.to(24_900);
    assert_eq!(w.names(ROOM).len(), 2);
    w.to(26_000);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
}

#[test]
fn metadata_incomplete_is_seen_at_decode_when_its_own_rank_is_missing() {
    let mut w = World::new(Sees::Decode);
    let (d0, d1) = (decode_of(0, 2), decode_of(1, 2));
    w.register(&d0, &prefill(0));
    w.register(&d1, &prefill(0));
    w.metadata(ROOM, &d0, &prefill(0));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!(v.class, Class::MetadataIncomplete);
    assert_eq!(v.owed_by.unwrap().rank, Some(1));
}

#[test]
fn too_many_sessions_never_fire_the_equality() {
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.metadata(ROOM, &decode(1), &prefill(0));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!(v.class, Class::MetadataIncomplete);
    assert!(readings(&v).contains(&Class::DuplicateRoom));
}

#[test]
fn prefill_complete_owes_first_prefill_then_decode() {
    let mut w = world(Sees::Prefill);
    w.bootstrap(ROOM, &decode(0), &prefill(0));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.expected), (Class::TransferNotConcluded, Some(Kind::Status)));
    assert_eq!(v.owed_by.unwrap().role, Some(Role::Prefill));
    w.to(14_000);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::WaitingForInput);
    assert_eq!(w.names(ROOM), ["room_pinned", "room_recovered"]);
    assert_eq!(w.last(ROOM).prefill.unwrap().phase, Phase::Bootstrap);
    w.to(25_200);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.expected), (Class::MetadataMissing, Some(Kind::Metadata)));
    assert_eq!(v.owed_by.unwrap().role, Some(Role::Decode));
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(2000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

#[test]
fn prefill_complete_healthy() {
    let mut w = world(Sees::Both);
    w.bootstrap(ROOM, &decode(0), &prefill(0));
    w.wait(300);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::WaitingForInput);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(20);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.to(60_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
}
