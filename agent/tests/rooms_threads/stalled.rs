//! Engines of which nothing leaves though all their threads are there.

use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::rooms_support::*;
use super::{ROOM, exits, says, world};

/// A rank that has stopped: rooms of two sessions, none answered for `ms`.
pub(crate) fn stalled(watched: bool) -> World {
    let mut w = world(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    w.healthy(1, &decode(0), &prefill(0), 20);
    if watched {
        exits(&mut w, 4242, 4243, 0, false);
    }
    for n in 0..4 {
        w.metadata(ROOM + n, &decode(u8::try_from(n % 2).unwrap()), &prefill(0));
    }
    w
}

#[test]
fn an_engine_of_which_nothing_leaves_though_all_its_threads_are_there_is_stalled() {
    let mut w = stalled(true);
    w.to(50_000);
    assert_eq!(w.class(ROOM), Some(Class::ReceiverSilent));
    w.to(63_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::EngineStalled, Confidence::Possible));
    assert!(says(&v, "none of its threads was seen to end"), "{:?}", v.evidence);
    assert!(readings(&v).contains(&Class::ReceiverSilent));
    w.status(ROOM + 3, &prefill(0), &decode(1), KvPoll::Success);
    w.wait(2000);
    assert_ne!(w.class(ROOM), Some(Class::EngineStalled), "it speaks");
}

#[test]
fn without_anyone_who_watches_threads_an_engine_is_not_called_stalled() {
    let mut w = stalled(false);
    w.to(90_000);
    assert_eq!(w.class(ROOM), Some(Class::ReceiverSilent));
}

#[test]
fn one_session_that_is_silent_is_no_stalled_engine() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    exits(&mut w, 4242, 4243, 0, false);
    for n in 0..4 {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    w.to(90_000);
    assert_eq!(w.class(ROOM), Some(Class::ReceiverSilent));
}
