//! Transfer workers that ended: `transfer_worker_silent`, and what is no evidence of it.

use roomtrace::rooms::model::Outcome;
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::rooms_support::*;
use super::{ROOM, quiet, says, thread, world};

/// One session of two stalls after a thread has ended; `others` rooms of the other are answered.
pub(crate) fn worker(sees: Sees, rooms: u64, others: u64) -> World {
    let mut w = world(sees);
    w.register(&decode(1), &prefill(0));
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.healthy(2, &decode(1), &prefill(0), 20);
    w.to(1000);
    for n in 0..rooms {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    w.wait(100);
    thread(&mut w, &prefill(0), 24_000);
    for n in 10..10 + others {
        w.healthy(n, &decode(1), &prefill(0), 20);
    }
    w
}

#[test]
fn a_thread_that_ends_while_one_session_falls_silent_was_its_worker() {
    for sees in [Sees::Prefill, Sees::Both] {
        let mut w = worker(sees, 2, 2);
        let v = w.pinned_in_time(ROOM, 1.0, 10.0);
        assert_eq!((v.class, v.confidence), (Class::TransferWorkerSilent, Confidence::Certain), "{sees:?}");
        assert!(says(&v, "thread 24000") && says(&v, "other sessions of the rank were"), "{:?}", v.evidence);
        w.to(13_000);
        assert_eq!(w.last(ROOM).group_size, 2, "one dead worker, two rooms");
    }
}

#[test]
fn one_room_of_a_session_may_only_be_long_whoever_overtakes_it() {
    let mut w = worker(Sees::Prefill, 1, 1);
    let v = w.pinned_in_time(ROOM, 1.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::TransferWorkerSilent, Confidence::Likely));
    for n in 100..103 {
        w.healthy(n, &decode(1), &prefill(0), 20);
    }
    w.wait(1500);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Likely);
    // A second one of the session shows that it is the session.
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    for n in 103..106 {
        w.healthy(n, &decode(1), &prefill(0), 20);
    }
    w.wait(1500);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Certain);
}

#[test]
fn a_long_prompt_that_short_ones_overtake_after_some_thread_has_ended_is_not_paged() {
    let mut w = world(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.healthy(2, &decode(1), &prefill(0), 20);
    w.ask(ROOM, &decode(0), &prefill(0), |m| m.pages = 4000);
    thread(&mut w, &prefill(0), 24_000);
    for n in 10..60 {
        w.healthy(n, &decode(1), &prefill(0), 1000);
    }
    w.never_paged(ROOM);
    // Two long ones of the session: likely, for short ones pass both.
    w.ask(ROOM + 1, &decode(0), &prefill(0), |m| m.pages = 4000);
    w.healthy(60, &decode(1), &prefill(0), 20);
    w.wait(12_000);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Likely);
}

#[test]
fn rooms_of_others_that_were_asked_before_only_show_a_queue() {
    let mut w = world(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.healthy(2, &decode(1), &prefill(0), 20);
    // Ten rooms that take ten seconds each stand before two of the other session.
    for n in 10..20 {
        w.metadata(n, &decode(1), &prefill(0));
    }
    for n in 0..2 {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    thread(&mut w, &prefill(0), 24_000);
    for n in 10..20 {
        w.wait(10_000);
        w.status(n, &prefill(0), &decode(1), KvPoll::Success);
    }
    w.never_paged(ROOM);
    w.never_paged(ROOM + 1);
}

#[test]
fn acknowledged_aborts_show_that_it_was_not_the_receive_loop() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.to(1000);
    for n in 0..3 {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    thread(&mut w, &prefill(0), 24_000);
    w.wait(1000);
    w.abort(ROOM + 2, &decode(0), &prefill(0), Some(1));
    w.ack(ROOM + 2, &prefill(0), &decode(0));
    w.to(63_000);
    let v = w.verdict(ROOM);
    // That it computes all that long only its numbers exclude.
    assert_eq!((v.class, v.confidence), (Class::TransferWorkerSilent, Confidence::Possible));
    assert!(says(&v, "still acknowledges ABORTs"), "{:?}", v.evidence);
}

#[test]
fn an_answer_of_the_session_takes_it_back() {
    let mut w = worker(Sees::Prefill, 2, 5);
    w.to(12_500);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Certain);
    w.healthy(3, &decode(0), &prefill(0), 20);
    w.wait(1500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Possible));
}

#[test]
fn a_thread_that_ended_before_the_last_answer_is_no_evidence() {
    let mut w = world(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    w.healthy(1, &decode(0), &prefill(0), 20);
    thread(&mut w, &prefill(0), 24_000);
    w.wait(100);
    w.healthy(2, &decode(0), &prefill(0), 20);
    for n in 0..2 {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    for n in 10..14 {
        w.healthy(n, &decode(1), &prefill(0), 20);
    }
    quiet(&mut w, ROOM, 60_000);
    assert_eq!(w.class(ROOM), Some(Class::TransferWorkerSilent), "by its silence alone");
}

#[test]
fn threads_of_a_pool_are_no_evidence() {
    let mut w = world(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    w.healthy(1, &decode(0), &prefill(0), 20);
    // A pool that has lost its threads before, without harm.
    for n in 0..10 {
        thread(&mut w, &prefill(0), 25_000 + n);
        w.wait(1000);
        w.healthy(100 + u64::from(n), &decode(0), &prefill(0), 20);
    }
    for n in 0..2 {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    thread(&mut w, &prefill(0), 26_000);
    for n in 10..14 {
        w.healthy(n, &decode(1), &prefill(0), 20);
    }
    quiet(&mut w, ROOM, 60_000);
}

#[test]
fn threads_that_end_when_an_engine_has_started_are_no_evidence() {
    let mut w = world(Sees::Prefill);
    // The first rooms compile kernels for minutes, and what had set the engine up ends.
    for n in 0..3 {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    thread(&mut w, &prefill(0), 24_000);
    quiet(&mut w, ROOM, 90_000);
}

#[test]
fn a_rank_that_says_nothing_since_a_thread_ended_leaves_open_which_it_was() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.to(1000);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(100);
    thread(&mut w, &prefill(0), 24_000);
    let v = w.pinned_in_time(ROOM, 1.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::TransferWorkerSilent, Confidence::Possible));
    assert!(readings(&v).contains(&Class::ReceiverSilent));
    assert!(says(&v, "is not known"), "{:?}", v.evidence);
    // What came after it may be unread as well, and nothing was there that a receive loop dies of.
    for n in 1..4 {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    w.wait(12_000);
    let v = w.verdict(ROOM + 3);
    assert_eq!((v.class, v.confidence), (Class::TransferWorkerSilent, Confidence::Possible));
    assert!(readings(&v).contains(&Class::ReceiverSilent));
    assert_eq!(w.last(ROOM).group_size, 4);
}

#[test]
fn a_room_alone_after_a_thread_of_an_idle_engine_ended_may_only_be_long() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.to(5000);
    thread(&mut w, &prefill(0), 24_000);
    w.to(3_600_000);
    w.metadata(ROOM, &decode(0), &prefill(0));
    quiet(&mut w, ROOM, 40_000);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(2000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

#[test]
fn a_queue_that_drains_is_no_dead_worker() {
    let mut w = world(Sees::Prefill);
    for n in 0..40 {
        w.metadata(n, &decode(0), &prefill(0));
    }
    for n in 0..40 {
        w.wait(1000);
        w.status(n, &prefill(0), &decode(0), KvPoll::Success);
        if n % 7 == 0 {
            thread(&mut w, &prefill(0), 27_000 + u32::try_from(n).unwrap());
        }
    }
    for n in 0..40 {
        w.never_paged(n);
    }
}

#[test]
fn ranks_that_disagree_and_a_dead_worker_in_the_silent_one() {
    let mut w = World::new(Sees::Prefill);
    let d = decode(0);
    for p in [prefill(0), prefill(1)] {
        w.register(&d, &p);
        w.metadata(1, &d, &p);
        w.status(1, &p, &d, KvPoll::Success);
    }
    w.to(1000);
    for p in [prefill(0), prefill(1)] {
        w.metadata(ROOM, &d, &p);
    }
    thread(&mut w, &prefill(0), 24_000);
    w.wait(100);
    w.status(ROOM, &prefill(1), &d, KvPoll::Success);
    let v = w.pinned_in_time(ROOM, 1.1, 10.0);
    assert_eq!((v.class, v.confidence), (Class::TransferWorkerSilent, Confidence::Likely));
    assert_eq!(v.owed_by.unwrap().endpoint, Some(prefill(0).endpoint));
}
