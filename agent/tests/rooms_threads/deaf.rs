//! Decode ranks whose status thread ended, by frames alone.

use roomtrace::event::Direction;
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{Input, Outcome};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::rooms_support::*;
use super::{KILLED, ROOM, process, thread, world};

/// A message that no rank sends comes to decode, and a thread of `rank` ends 21 ms later.
fn deaf(w: &mut World, rank: &Rank) {
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.wait(1000);
    w.foreign(&decode(0));
    w.wait(21);
    thread(w, rank, 24_100);
    w.wait(1000);
}

#[test]
fn a_room_whose_status_nobody_takes_in_is_no_success() {
    let mut w = world(Sees::Both);
    deaf(&mut w, &decode(0));
    w.healthy(ROOM, &decode(0), &prefill(0), 20);
    let since = w.now_s();
    let v = w.pinned_in_time(ROOM, since, 10.0);
    // Whether decode has answered is not seen.
    assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Likely));
    assert!(readings(&v).contains(&Class::CompletionNotObservable));
    w.to(300_000);
    assert_eq!(w.outcomes(ROOM), []);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.wait(1000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
    w.healthy(ROOM + 1, &decode(0), &prefill(0), 20);
    w.wait(12_000);
    assert!(w.last(ROOM + 1).pinned(), "its timer has confirmed it");
    process(&mut w, &decode(0), KILLED);
    w.wait(2000);
    assert_eq!(w.outcomes(ROOM + 1).len(), 1);
    assert!(w.table.findings().iter().all(|f| f.class != Class::ThreadDied));
}

#[test]
fn a_room_that_outlives_decodes_timer_without_abort_was_taken_in() {
    let mut w = world(Sees::Decode);
    deaf(&mut w, &decode(0));
    w.healthy(ROOM, &decode(0), &prefill(0), 20);
    w.wait(355_000);
    assert!(w.last(ROOM).pinned());
    w.wait(10_000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
    w.healthy(ROOM + 1, &decode(0), &prefill(0), 20);
    assert_eq!(w.outcomes(ROOM + 1), [Outcome::Success]);
}

#[test]
fn a_status_that_came_while_the_thread_died_is_not_taken_in_either() {
    let mut w = world(Sees::Both);
    let two = [prefill(0), prefill(1)];
    w.register(&decode(0), &two[1]);
    for p in &two {
        w.metadata(ROOM, &decode(0), p);
    }
    w.foreign(&decode(0));
    w.wait(5);
    w.status(ROOM, &two[0], &decode(0), KvPoll::Success);
    w.wait(16);
    thread(&mut w, &decode(0), 24_100);
    w.status(ROOM, &two[1], &decode(0), KvPoll::Success);
    w.wait(12_000);
    assert_eq!(w.class(ROOM), Some(Class::ReceiverSilent));
}

#[test]
fn what_a_status_thread_does_not_die_of_accuses_nobody() {
    let closes = |mut w: World| {
        w.healthy(ROOM, &decode(0), &prefill(0), 20);
        w.wait(1500);
        assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    };
    // A thread of another process; one that ends long after; bytes that libzmq keeps to itself.
    let mut w = world(Sees::Both);
    deaf(&mut w, &decode(1));
    closes(w);
    let mut w = world(Sees::Both);
    w.foreign(&decode(0));
    w.wait(1500);
    thread(&mut w, &decode(0), 24_100);
    closes(w);
    let mut w = world(Sees::Both);
    let connection = w.end(&decode(98), &decode(0), Direction::Received);
    let (at, direction) = (w.mono(), Direction::Received);
    w.input(&Input::Foreign { at, connection, direction, frames: 0, first_len: 64 });
    w.wait(21);
    thread(&mut w, &decode(0), 24_100);
    closes(w);
    // NIXL from 0.5.23 on logs what it cannot read.
    let mut w = World::with(Sees::Both, NIXL_NEW, Config::default());
    w.register(&decode(0), &prefill(0));
    deaf(&mut w, &decode(0));
    closes(w);
}
