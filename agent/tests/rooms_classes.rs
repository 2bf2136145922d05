//! Every class that frames and connections can show, from each view, with its timing.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, clippy::float_cmp, reason = "tests")]

mod rooms_support;
use rooms_support::*;
use roomtrace::event::{Direction, TcpState};
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{Completeness, Outcome, Phase, Role};
use roomtrace::sglang::message::{Backend, Kind, KvPoll, Message, PpState, StagingReq};
use roomtrace::verdict::known_issues;
use roomtrace::verdict::model::{Class, Confidence};

const ROOM: u64 = 9_000_000_000_000_000_001;

fn world(sees: Sees) -> World {
    let mut w = World::new(sees);
    w.register(&decode(0), &prefill(0));
    w
}

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
    assert_eq!(v.class, Class::TransferNotConcluded);
    assert!(readings(&v).contains(&Class::AbortIgnored));
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(2000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

// metadata_incomplete, metadata_missing

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
    let c = w.table.counters();
    let n = |role, phase| c.phases.iter().find(|p| p.role == role && p.phase == phase).unwrap().count;
    for role in [Role::Prefill, Role::Decode] {
        assert_eq!((n(role, Phase::Compute), n(role, Phase::Bootstrap), n(role, Phase::Transfer)), (1, 1, 1));
    }
}

// awaiting_prefill, transfer_not_concluded, transfer_worker_silent, receiver_silent, queued

#[test]
fn awaiting_prefill_is_all_that_decode_alone_can_say() {
    let mut w = world(Sees::Decode);
    w.metadata(ROOM, &decode(0), &prefill(0));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::AwaitingPrefill, Confidence::Possible));
    let names = readings(&v);
    for class in [
        Class::StatusLost,
        Class::PeerNotTold,
        Class::TransferNotConcluded,
        Class::TransferWorkerSilent,
        Class::Queued,
    ] {
        assert!(names.contains(&class), "{class:?}");
    }
    assert!(v.ends_by_itself.unwrap().timer.contains("WAITING"));
    assert_eq!(v.act_on.unwrap().local, Some(false));
}

#[test]
fn transfer_not_concluded_when_later_rooms_of_the_session_conclude() {
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    for n in 0..5 {
        w.healthy(n, &decode(0), &prefill(0), 20);
    }
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!(v.class, Class::TransferNotConcluded);
    assert!(v.evidence.iter().any(|e| e.contains("overtaken by at least 5")));
}

#[test]
fn transfer_worker_silent_when_one_session_stalls_and_others_go_on() {
    let mut w = world(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.to(1000);
    for n in 0..3 {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    for n in 10..40 {
        w.healthy(n, &decode(1), &prefill(0), 20);
    }
    let v = w.pinned_in_time(ROOM, 1.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::TransferWorkerSilent, Confidence::Possible));
    w.to(13_000);
    assert_eq!(w.last(ROOM).group_size, 3, "one dead worker, three rooms");
    let groups: Vec<_> = w.table.pinned().map(|s| s.verdict.unwrap().group).collect();
    assert!(groups.windows(2).all(|g| g[0] == g[1]));
}

#[test]
fn receiver_silent_after_a_foreign_message() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.to(1000);
    w.foreign(&prefill(0));
    w.wait(100);
    w.metadata(ROOM, &decode(0), &prefill(0));
    let v = w.pinned_in_time(ROOM, 1.1, 10.0);
    assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Possible));
    assert!(v.evidence.iter().any(|e| e.contains("10.9.9.9:5555")), "{:?}", v.evidence);
    // A later answer proves that the rank lives.
    w.healthy(2, &decode(0), &prefill(0), 20);
    w.wait(2000);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
}

#[test]
fn receiver_silent_names_the_bytes_before_the_first_room_without_answer() {
    let mut w = world(Sees::Prefill);
    w.foreign_from("10.9.9.7:5555", &prefill(0));
    w.wait(100);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.to(1000);
    // Answered since: the first was harmless, so these are the ones.
    w.foreign(&prefill(0));
    w.wait(100);
    w.metadata(ROOM, &decode(0), &prefill(0));
    let named = |w: &World, who: &str| w.verdict(ROOM).evidence.iter().any(|e| e.contains(who));
    w.pinned_in_time(ROOM, 1.1, 10.0);
    w.foreign_from("10.9.9.8:5555", &prefill(0));
    w.wait(2000);
    assert_eq!(w.class(ROOM), Some(Class::ReceiverSilent));
    assert!(named(&w, "10.9.9.9:5555") && !named(&w, "10.9.9.8:5555"));
    // An answer clears them all; the next are suspects again.
    w.healthy(2, &decode(0), &prefill(0), 20);
    w.wait(100);
    w.foreign_from("10.9.9.8:5555", &prefill(0));
    w.wait(2000);
    assert!(named(&w, "10.9.9.8:5555"));
}

#[test]
fn receiver_silent_when_several_rooms_of_a_rank_get_no_answer() {
    let mut w = world(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    w.register(&decode(1), &prefill(1));
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.to(1000);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.metadata(ROOM + 1, &decode(1), &prefill(0));
    w.metadata(ROOM + 2, &decode(1), &prefill(0));
    // Another rank answers: that says nothing of this one.
    w.healthy(2, &decode(1), &prefill(1), 20);
    let v = w.pinned_in_time(ROOM, 1.0, 10.0);
    assert_eq!(v.class, Class::ReceiverSilent);
    w.to(13_000);
    assert_eq!(w.last(ROOM).group_size, 3);
}

#[test]
fn an_abort_ack_after_it_proves_that_the_receive_loop_lives() {
    let mut w = world(Sees::Prefill);
    w.foreign(&prefill(0));
    w.wait(100);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    w.wait(1000);
    w.abort(ROOM + 1, &decode(0), &prefill(0), Some(1));
    w.ack(ROOM + 1, &prefill(0), &decode(0));
    let v = w.pinned_in_time(ROOM, 0.1, 10.0);
    assert_ne!(v.class, Class::ReceiverSilent);
    assert!(!v.evidence.is_empty());
}

#[test]
fn dummies_are_no_evidence_of_silence() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    for n in 0..10 {
        w.ask(100 + n, &decode(0), &prefill(0), |m| {
            m.dummy = Some(true);
            m.aux_index = None;
            m.pages = 0;
        });
    }
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(12_000);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
}

#[test]
fn a_queue_that_drains_in_order_is_queued_and_never_pinned() {
    for sees in [Sees::Prefill, Sees::Decode, Sees::Both] {
        let mut w = world(sees);
        // Forty rooms asked for at once, one concludes per second.
        for n in 0..40 {
            w.metadata(n, &decode(0), &prefill(0));
        }
        for n in 0..40 {
            w.wait(1000);
            w.status(n, &prefill(0), &decode(0), KvPoll::Success);
            if n == 20 {
                assert_eq!(w.class(30), Some(Class::Queued));
                assert!(w.table.pinned().next().is_none());
            }
        }
        w.wait(2000);
        for n in 0..40 {
            assert_eq!(w.names(n), ["room_closed"], "room {n}");
            assert_eq!(w.outcomes(n), [Outcome::Success]);
        }
    }
}

#[test]
fn a_room_that_others_overtake_is_not_queued_though_an_earlier_one_concludes() {
    let mut w = world(Sees::Prefill);
    w.metadata(1, &decode(0), &prefill(0));
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(8000);
    w.status(1, &prefill(0), &decode(0), KvPoll::Success);
    for n in 10..13 {
        w.healthy(n, &decode(0), &prefill(0), 20);
    }
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!(v.class, Class::TransferNotConcluded);
}

#[test]
fn two_that_overtake_are_the_scheduler_reordering() {
    let mut w = world(Sees::Prefill);
    w.metadata(1, &decode(0), &prefill(0));
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(8000);
    w.status(1, &prefill(0), &decode(0), KvPoll::Success);
    for n in 10..12 {
        w.healthy(n, &decode(0), &prefill(0), 20);
    }
    w.to(12_000);
    assert_eq!(w.class(ROOM), Some(Class::Queued));
    w.to(14_500);
    assert!(w.pin(ROOM).is_some(), "nothing earlier has concluded for six seconds");
}

#[test]
fn a_queue_that_stops_draining_is_pinned() {
    let mut w = world(Sees::Prefill);
    for n in 0..40 {
        w.metadata(n, &decode(0), &prefill(0));
    }
    for n in 0..20 {
        w.wait(1000);
        w.status(n, &prefill(0), &decode(0), KvPoll::Success);
    }
    w.wait(4000);
    assert!(w.pin(30).is_none());
    w.wait(2500);
    assert!(w.pin(30).is_some(), "the last answer was six seconds ago");
}

#[test]
fn a_slow_pair_raises_its_own_threshold() {
    let mut w = world(Sees::Prefill);
    for n in 0..120 {
        w.healthy(n, &decode(0), &prefill(0), 3000);
    }
    let since = w.now_s();
    w.metadata(ROOM, &decode(0), &prefill(0));
    let v = w.pinned_in_time(ROOM, since, 8.0 * 3.072 * 1.048_576);
    assert_eq!(v.confidence, Confidence::Possible);
    assert!(v.evidence.iter().any(|e| e.contains("such phases of this pair")));
}

#[test]
fn staging_without_reply_is_the_first_candidate() {
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    let m = StagingReq { room: ROOM, chunk: 0, pages: 8, session: &decode(0).session, pp_rank: None };
    w.send(&prefill(0), &decode(0), Backend::Mooncake, (r(5, 10), r(5, 23)), Message::StagingReq(m));
    w.to(11_000);
    let v = w.verdict(ROOM);
    assert_eq!(v.candidates[0].class, Class::StagingReplyMissing);
    assert_eq!(v.candidates[0].owed_by, Some(Role::Decode));
}

// ranks_disagree

#[test]
fn ranks_disagree_is_possible_at_the_floor_and_likely_at_the_ceiling() {
    for sees in [Sees::Decode, Sees::Prefill, Sees::Both] {
        let mut w = World::new(sees);
        let d = decode(0);
        for p in [prefill(0), prefill(1)] {
            w.register(&d, &p);
            w.metadata(ROOM, &d, &p);
        }
        w.to(1000);
        w.status(ROOM, &prefill(1), &d, KvPoll::Success);
        let v = w.pinned_in_time(ROOM, 1.0, 10.0);
        assert_eq!((v.class, v.confidence), (Class::RanksDisagree, Confidence::Possible));
        let owed = v.owed_by.unwrap();
        assert_eq!(owed.role, Some(Role::Prefill));
        if sees == Sees::Decode {
            // Nothing tells the two ranks of one host apart there: none is named wrongly.
            assert_eq!(owed.endpoint, None);
            assert!(v.evidence.iter().any(|e| e.contains("10.0.0.1:41000, 10.0.0.1:41001")));
        } else {
            assert_eq!(owed.endpoint, Some(prefill(0).endpoint));
        }
        w.to(60_900);
        assert_eq!(w.verdict(ROOM).confidence, Confidence::Possible);
        w.to(62_200);
        assert_eq!(w.verdict(ROOM).confidence, Confidence::Likely);
        assert_eq!(w.names(ROOM), ["room_pinned", "verdict_changed"]);
        w.status(ROOM, &prefill(0), &d, KvPoll::Success);
        w.wait(2000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    }
}

#[test]
fn one_failed_rank_fails_the_room() {
    let mut w = World::new(Sees::Both);
    let d = decode(0);
    for p in [prefill(0), prefill(1)] {
        w.metadata(ROOM, &d, &p);
    }
    w.status(ROOM, &prefill(1), &d, KvPoll::Failed);
    w.to(60_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

// status_lost, stale_endpoint, peer_lost

#[test]
fn status_lost_is_certain_when_the_connection_was_reset_before_it_arrived() {
    for sees in [Sees::Prefill, Sees::Both] {
        let mut w = world(sees);
        let (p, d) = (prefill(0), decode(0));
        w.metadata(1, &d, &p);
        w.status(1, &p, &d, KvPoll::Success);
        let una = w.sent_to(&p, &d);
        w.acknowledge(&p, &d, una);
        w.metadata(ROOM, &d, &p);
        w.tell(ROOM, &p, &d, KvPoll::Success, false);
        w.wait(300);
        let at = w.now_s();
        w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 104);
        let (found, v) = w.pin(ROOM).unwrap();
        assert_eq!(found, at, "no timer is needed");
        assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Certain));
        assert_eq!(v.candidates, []);
        assert!(v.evidence.iter().any(|e| e.contains("reset by peer")));
        assert_eq!(w.outcomes(1), [Outcome::Success]);
    }
}

#[test]
fn a_status_that_was_acknowledged_is_not_lost() {
    let mut w = world(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.metadata(ROOM, &d, &p);
    w.status(ROOM, &p, &d, KvPoll::Success);
    assert_eq!(w.outcomes(ROOM), [], "not known yet whether it arrived");
    let una = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, una);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success], "at once");
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 104);
    w.to(60_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.last(ROOM).messages.last().unwrap().acknowledged, Some(true));
}

#[test]
fn a_status_whose_delivery_nobody_can_tell_closes_after_a_second() {
    let mut w = world(Sees::Prefill);
    w.healthy(ROOM, &decode(0), &prefill(0), 10);
    w.wait(1300);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

#[test]
fn a_status_that_stays_unacknowledged_is_likely_lost() {
    let mut w = world(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.metadata(ROOM, &d, &p);
    w.status(ROOM, &p, &d, KvPoll::Success);
    let una = w.sent_to(&p, &d) - 50;
    for _ in 0..4 {
        w.wait(500);
        w.acknowledge(&p, &d, una);
    }
    assert_eq!(w.outcomes(ROOM), []);
    w.to(11_200);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Likely));
    let una = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, una);
    assert_eq!(w.names(ROOM), ["room_pinned", "room_closed"]);
}

#[test]
fn a_connect_that_succeeds_later_takes_the_refusal_back() {
    let mut w = world(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.metadata(ROOM, &d, &p);
    w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Close, 111);
    w.wait(100);
    w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Established, 0);
    w.to(11_200);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
}

#[test]
fn stale_endpoint_when_metadata_was_never_acknowledged() {
    let mut w = world(Sees::Decode);
    let (p, d) = (prefill(0), decode(0));
    let una = w.sent_to(&d, &p);
    w.acknowledge(&d, &p, una);
    w.metadata(ROOM, &d, &p);
    w.wait(200);
    w.state(&d, &p, Direction::Sent, TcpState::Established, TcpState::Close, 110);
    let (_, v) = w.pin(ROOM).unwrap();
    assert_eq!((v.class, v.confidence), (Class::StaleEndpoint, Confidence::Certain));
    assert_eq!(v.owed_by.as_ref().unwrap().role, Some(Role::Decode));
}

#[test]
fn peer_lost_at_prefill_when_every_connection_of_decode_is_gone() {
    let mut w = world(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.healthy(1, &d, &p, 5);
    w.metadata(ROOM, &d, &p);
    w.to(2000);
    w.state(&d, &p, Direction::Received, TcpState::Established, TcpState::CloseWait, 0);
    w.to(3000);
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::CloseWait, 0);
    w.to(11_200);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Possible));
    assert_eq!(v.owed_by.unwrap().endpoint, Some(d.endpoint));
    assert_eq!(v.act_on.unwrap().role, Some(Role::Prefill));
    assert!(v.candidates.iter().any(|c| c.class == Class::TransferNotConcluded));
}

#[test]
fn one_closed_connection_of_a_live_peer_is_no_loss() {
    // Decode drops its connection to a live prefill after missed heartbeats.
    let mut w = world(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.healthy(1, &d, &p, 5);
    w.metadata(ROOM, &d, &p);
    w.state(&d, &p, Direction::Received, TcpState::Established, TcpState::CloseWait, 0);
    w.to(12_000);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
}

#[test]
fn peer_lost_at_decode_ends_by_its_heartbeat() {
    let mut w = world(Sees::Decode);
    let (p, d) = (prefill(0), decode(0));
    w.metadata(ROOM, &d, &p);
    w.to(1000);
    w.state(&d, &p, Direction::Sent, TcpState::Established, TcpState::CloseWait, 0);
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Possible));
    assert!(v.ends_by_itself.unwrap().timer.contains("heartbeat"));
    w.to(200_000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
}

#[test]
fn a_restarted_prefill_takes_its_pins_with_it() {
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(20_000);
    assert!(w.last(ROOM).pinned());
    w.listener(&prefill(0));
    w.to(22_000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
    assert!(w.table.pinned().next().is_none());
}

// peer_not_told

#[test]
fn peer_not_told_when_a_pipeline_rank_of_the_same_host_failed_in_silence() {
    let mut w = world(Sees::Both);
    w.metadata(ROOM, &decode(0), &prefill(0));
    let m = PpState { room: ROOM, pp_rank: 1, status: Some(KvPoll::Failed) };
    w.send(&prefill(1), &prefill(0), Backend::Mooncake, (r(5, 22), r(5, 23)), Message::PpState(m));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.owed_by), (Class::PeerNotTold, None));
    assert_eq!(v.act_on.unwrap().role, Some(Role::Decode));
}

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

// completeness

#[test]
fn a_room_met_in_the_middle_is_never_pinned() {
    // First sight is an ABORT on a connection older than the agent: METADATA may have gone before.
    let mut w = World::new(Sees::Prefill);
    w.preexisting = true;
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.to(20_000);
    assert_eq!(w.last(ROOM).completeness, Completeness::Preexisting);
    assert_eq!(w.class(ROOM), Some(Class::Unknown), "whose ABORT it is was not seen");
    w.to(500_000);
    assert_eq!(w.names(ROOM), ["verdict_changed", "room_closed"], "mentioned once while it is open");
    // Long after the agent came, METADATA before it would have been seen.
    w.abort(ROOM + 1, &decode(0), &prefill(0), None);
    w.wait(11_500);
    assert_eq!(w.class(ROOM + 1), Some(Class::AbortBeforeEntry));
}

/// An agent that came while the connections were open, and then saw a room of its peers end.
fn late(layout: Layout, end: KvPoll) -> World {
    let mut w = World::with(Sees::Both, layout, Config::default());
    w.preexisting = true;
    w.to(2000);
    w.metadata(1, &decode(0), &prefill(0));
    w.status(1, &prefill(0), &decode(0), end);
    w
}

#[test]
fn an_abort_that_would_have_been_acknowledged_says_much_even_to_a_late_agent() {
    let mut w = late(MOONCAKE, KvPoll::Success);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.wait(9_000);
    assert_eq!(w.class(ROOM), None);
    w.wait(2_500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::AbortBeforeEntry, Confidence::Possible));
    assert_eq!(v.owed_by.unwrap().role, Some(Role::Prefill));
    assert_eq!(w.last(ROOM).completeness, Completeness::Preexisting);
    assert!(
        v.evidence.iter().any(|e| e.contains("can have gone before the agent looked")),
        "{:?}",
        v.evidence
    );
    let older = v.candidates.first().unwrap();
    assert_eq!(older.class, Class::NotApplicable);
    assert!(older.would_settle.contains("before the agent looked"));
    // An acknowledged one mostly found its room; one with a generation surely did.
    for (room, generation) in [(ROOM + 1, None), (ROOM + 2, Some(4))] {
        w.abort(room, &decode(0), &prefill(0), generation);
        if generation.is_none() {
            w.ack(room, &prefill(0), &decode(0));
        }
        w.wait(11_500);
        assert_eq!(w.class(room), Some(Class::Unknown));
        assert_eq!(w.names(room), ["verdict_changed"]);
    }
    // With generations on this connection, one without says that METADATA was never sent.
    w.abort(ROOM + 3, &decode(0), &prefill(0), None);
    w.wait(11_500);
    assert_eq!(w.last(ROOM + 3).completeness, Completeness::Full);
    assert_eq!(w.class(ROOM + 3), Some(Class::AbortBeforeEntry));
}

#[test]
fn an_abort_that_is_never_acknowledged_is_unknown_to_a_late_agent_but_mentioned() {
    let mut w = late(NIXL_OLD, KvPoll::Failed);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.wait(11_500);
    let v = w.verdict(ROOM);
    assert_eq!(v.class, Class::Unknown);
    assert_eq!(v.candidates.first().map(|c| c.class), Some(Class::AbortBeforeEntry));
    assert!(v.evidence.iter().any(|e| e.contains("silence says nothing")), "{:?}", v.evidence);
    w.wait(11_500);
    assert_eq!(w.names(ROOM), ["verdict_changed"]);
    // The same once no METADATA can be older than the agent any more.
    w.to(400_000);
    w.abort(ROOM + 1, &decode(0), &prefill(0), None);
    w.wait(11_500);
    assert_eq!(w.class(ROOM + 1), Some(Class::AbortBeforeEntry));
}

#[test]
fn a_nixl_that_says_success_acknowledges_aborts_too() {
    // Its METADATA alone could be of 0.5.17.
    let mut w = late(NIXL_NEW, KvPoll::Success);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.wait(11_500);
    assert_eq!(w.class(ROOM), Some(Class::AbortBeforeEntry));
}

#[test]
fn a_room_that_begins_after_the_agent_came_is_followed_also_on_an_idle_connection() {
    let mut w = World::new(Sees::Both);
    w.preexisting = true;
    w.to(3000);
    // The first message that the agent sees on this connection.
    w.metadata(ROOM, &decode_of(1, 2), &prefill(0));
    w.wait(11_500);
    assert_eq!(w.class(ROOM), Some(Class::MetadataIncomplete));
    assert_eq!(w.last(ROOM).completeness, Completeness::Full);
}

#[test]
fn a_room_that_begins_on_an_old_connection_is_whole() {
    let mut w = World::new(Sees::Prefill);
    w.preexisting = true;
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(11_200);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
    assert_eq!(w.last(ROOM).completeness, Completeness::Full);
}

#[test]
fn ranks_that_asked_before_the_agent_came_are_not_missing() {
    let mut w = World::new(Sees::Prefill);
    w.preexisting = true;
    w.metadata(ROOM, &decode_of(1, 2), &prefill(0));
    w.to(20_000);
    assert_eq!(w.class(ROOM), Some(Class::Unknown));
}

#[test]
fn the_end_of_a_preexisting_room_is_told_once() {
    for sees in [Sees::Prefill, Sees::Decode, Sees::Both] {
        let mut w = World::new(sees);
        w.preexisting = true;
        w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
        w.status(ROOM, &prefill(1), &decode(0), KvPoll::Success);
        w.to(5000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Success], "{:?}", w.names(ROOM));
        assert_eq!(w.last(ROOM).completeness, Completeness::Preexisting);
    }
}

#[test]
fn a_status_of_a_room_never_heard_of_opens_nothing() {
    let mut w = world(Sees::Both);
    w.to(1_000_000);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    assert_eq!(w.names(ROOM), [""; 0]);
    assert_eq!(w.table.counters().turned_away.orphans, 2);
}

#[test]
fn missing_bytes_make_it_unknown() {
    for (sees, direction) in [(Sees::Prefill, Direction::Received), (Sees::Decode, Direction::Sent)] {
        let mut w = world(sees);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(1000);
        w.lossy(&decode(0), &prefill(0), direction);
        w.to(12_000);
        assert_eq!(w.class(ROOM), Some(Class::Unknown));
        assert_eq!(w.last(ROOM).completeness, Completeness::Lossy);
        // The next room is not touched, and neither is one with another peer.
        w.metadata(ROOM + 1, &decode(0), &prefill(0));
        w.wait(12_000);
        assert!(w.last(ROOM + 1).pinned());
        w.to(500_000);
        assert_eq!(w.names(ROOM), ["verdict_changed", "room_closed"]);
    }
}

#[test]
fn a_pin_that_loses_its_certainty_has_not_recovered() {
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(11_500);
    assert!(w.last(ROOM).pinned());
    w.lossy(&decode(0), &prefill(0), Direction::Received);
    w.to(13_000);
    assert_eq!(w.names(ROOM), ["room_pinned", "verdict_changed"]);
    let s = w.last(ROOM);
    assert_eq!(w.class(ROOM), Some(Class::Unknown));
    assert!(!s.pinned() && !s.recovered && s.was_pinned);
    assert!(w.table.gauges().pinned.is_empty());
    // Its end is an end after all.
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(2000);
    assert_eq!(w.names(ROOM), ["room_pinned", "verdict_changed", "room_closed"]);
    assert!(w.last(ROOM).recovered);
}

#[test]
fn missing_bytes_of_another_peer_do_not_matter() {
    let mut w = world(Sees::Prefill);
    let mut far = decode(5);
    far.endpoint = "10.0.0.9:42005".parse().unwrap();
    w.metadata(1, &far, &prefill(0));
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(1000);
    w.lossy(&far, &prefill(0), Direction::Received);
    w.to(12_000);
    assert_eq!(w.class(1), Some(Class::Unknown));
    assert!(w.last(ROOM).pinned());
}

#[test]
fn missing_bytes_of_another_rank_at_the_same_address_do_not_matter() {
    for sees in [Sees::Prefill, Sees::Decode] {
        let direction = if sees == Sees::Prefill { Direction::Received } else { Direction::Sent };
        let mut w = world(sees);
        w.register(&decode(1), &prefill(0));
        w.metadata(1, &decode(1), &prefill(0));
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(1000);
        w.lossy(&decode(1), &prefill(0), direction);
        w.to(12_000);
        assert_eq!(w.class(1), Some(Class::Unknown));
        assert!(w.last(ROOM).pinned());
    }
}

#[test]
fn missing_bytes_of_a_connection_without_messages_touch_only_what_was_not_heard_of() {
    let host = decode(0).endpoint.ip().to_string();
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(1000);
    // More than are remembered.
    for port in 1..6000 {
        w.lossy_stranger(&host, port, &prefill(0));
        w.lossy_stranger(&format!("10.1.{}.{}", port / 250, port % 250), port, &prefill(0));
    }
    w.to(12_000);
    assert!(w.last(ROOM).pinned(), "its METADATA came on another connection");
    // Decode waits for its first word from prefill, which can have been on that one.
    let mut w = world(Sees::Decode);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(1000);
    w.lossy_stranger(&prefill(0).endpoint.ip().to_string(), 9, &decode(0));
    w.to(12_000);
    assert_eq!(w.class(ROOM), Some(Class::Unknown));
}

#[test]
fn missing_bytes_of_a_connection_that_turns_out_to_be_the_ranks_own_make_it_unknown() {
    for named in [false, true] {
        let mut w = world(Sees::Prefill);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(1000);
        // The same rank by another socket.
        let again = Rank { pid: 7777, ..decode(0) };
        w.state(&again, &prefill(0), Direction::Received, TcpState::SynRecv, TcpState::Established, 0);
        w.lossy(&again, &prefill(0), Direction::Received);
        if named {
            w.register(&again, &prefill(0));
        }
        w.to(12_000);
        assert_eq!(w.class(ROOM) == Some(Class::Unknown), named);
    }
}

#[test]
fn missing_bytes_of_a_rank_whose_metadata_is_awaited_make_it_unknown() {
    let d: Vec<_> = (0..2).map(|n| decode_of(n, 2)).collect();
    let mut w = World::new(Sees::Prefill);
    for rank in &d {
        w.register(rank, &prefill(0));
    }
    w.metadata(ROOM, &d[0], &prefill(0));
    w.wait(100);
    w.lossy(&d[1], &prefill(0), Direction::Received);
    w.to(12_000);
    assert_eq!(w.class(ROOM), Some(Class::Unknown));
}

#[test]
fn an_abort_after_missing_bytes_may_have_had_its_metadata() {
    let mut w = world(Sees::Prefill);
    w.lossy(&decode(0), &prefill(0), Direction::Received);
    w.wait(50);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.to(15_000);
    assert_eq!(w.class(ROOM), Some(Class::Unknown));
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
