//! Of the transfer: who is silent, who only queues, which ranks disagree.

use roomtrace::rooms::model::{Outcome, Role};
use roomtrace::sglang::message::{Backend, Kind, KvPoll, Message, StagingReq, StagingRsp};
use roomtrace::verdict::model::{Class, Confidence};

use super::rooms_support::*;
use super::{ROOM, world};

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

// staging_reply_missing

#[test]
fn staging_without_reply_is_decodes_to_give() {
    for sees in [Sees::Prefill, Sees::Decode, Sees::Both] {
        let mut w = world(sees);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(2000);
        let m = StagingReq { room: ROOM, chunk: 0, pages: 8, session: &decode(0).session, pp_rank: None };
        w.send(&prefill(0), &decode(0), Backend::Mooncake, (r(5, 10), r(5, 23)), Message::StagingReq(m));
        w.to(11_500);
        // It has had less than the floor to answer.
        assert_ne!(w.class(ROOM), Some(Class::StagingReplyMissing), "{sees:?}");
        if sees != Sees::Decode {
            assert_eq!(w.verdict(ROOM).candidates[0].class, Class::StagingReplyMissing);
        }
        w.to(14_000);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::StagingReplyMissing, Confidence::Possible), "{sees:?}");
        assert_eq!(v.owed_by.unwrap().role, Some(Role::Decode));
        assert_eq!((v.act_on.unwrap().role, v.expected), (Some(Role::Decode), Some(Kind::StagingRsp)));
        w.never_paged(ROOM);
    }
}

#[test]
fn a_staging_reply_takes_it_back() {
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    let session = &decode(0).session;
    let m = StagingReq { room: ROOM, chunk: 0, pages: 8, session, pp_rank: None };
    w.send(&prefill(0), &decode(0), Backend::Mooncake, (r(5, 10), r(5, 23)), Message::StagingReq(m));
    w.to(12_000);
    assert_eq!(w.class(ROOM), Some(Class::StagingReplyMissing));
    let m = StagingRsp { room: ROOM, chunk: 0, offset: 0, round: 0, end: 8, session };
    w.send(&decode(0), &prefill(0), Backend::Mooncake, (r(5, 10), r(5, 23)), Message::StagingRsp(m));
    w.wait(2000);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
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
        assert!(
            !v.evidence.iter().any(|e| e.contains("distinct sessions")),
            "each rank has its one: {:?}",
            v.evidence
        );
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
