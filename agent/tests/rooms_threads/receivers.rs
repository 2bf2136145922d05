//! Receive loops of ranks that ended: `receiver_silent`, and what takes it back.

use roomtrace::event::Direction;
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{Input, Outcome};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::rooms_support::*;
use super::{KILLED, ROOM, exits, process, quiet, says, thread, world};

/// A rank that worked, and then a foreign message and the end of a thread `gap` ms later.
pub(crate) fn foreign_then_death(w: &mut World, gap: u64) {
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.to(1000);
    w.foreign(&prefill(0));
    w.wait(gap);
    thread(w, &prefill(0), 23_357);
    w.to(3000);
}

#[test]
fn a_thread_that_ends_after_a_foreign_message_was_the_receive_loop() {
    for sees in [Sees::Prefill, Sees::Both] {
        let mut w = world(sees);
        foreign_then_death(&mut w, 21);
        w.metadata(ROOM, &decode(0), &prefill(0));
        let v = w.pinned_in_time(ROOM, 3.0, 10.0);
        assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Certain), "{sees:?}");
        assert_eq!(v.candidates, []);
        assert_eq!(v.owed_by.as_ref().unwrap().endpoint, Some(prefill(0).endpoint));
        for part in ["thread 23357", "2 frames", "first of 4 bytes", "10.9.9.9:5555", "process 100"] {
            assert!(says(&v, part), "{part}: {:?}", v.evidence);
        }
        assert!(v.ends_by_itself.as_ref().unwrap().timer.contains("BOOTSTRAP"), "it does not hear ABORT");
        assert!(v.actions.iter().any(|a| a.command == "kill -TERM 100"));
    }
}

#[test]
fn all_rooms_of_a_dead_receive_loop_are_one_cause() {
    let mut w = world(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    foreign_then_death(&mut w, 21);
    for n in 0..3 {
        w.metadata(ROOM + n, &decode(u8::try_from(n % 2).unwrap()), &prefill(0));
    }
    w.to(15_000);
    assert_eq!(w.last(ROOM).group_size, 3);
    let groups: Vec<_> = w.table.pinned().map(|s| s.verdict.unwrap().group).collect();
    assert!(groups.len() == 3 && groups.windows(2).all(|g| g[0] == g[1]));
}

#[test]
fn an_answer_to_a_later_room_takes_it_back() {
    let mut w = world(Sees::Prefill);
    foreign_then_death(&mut w, 21);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(14_000);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Certain);
    w.healthy(2, &decode(0), &prefill(0), 20);
    w.wait(1500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Possible));
}

#[test]
fn an_abort_ack_takes_it_back() {
    let mut w = world(Sees::Prefill);
    foreign_then_death(&mut w, 21);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    w.abort(ROOM + 1, &decode(0), &prefill(0), Some(1));
    w.ack(ROOM + 1, &prefill(0), &decode(0));
    w.to(14_000);
    assert_ne!(w.verdict(ROOM).class, Class::ReceiverSilent);
    assert_ne!(w.verdict(ROOM).confidence, Confidence::Certain);
}

#[test]
fn what_was_read_before_goes_on_without_the_receive_loop() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(1000);
    w.foreign(&prefill(0));
    w.wait(21);
    thread(&mut w, &prefill(0), 23_357);
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    w.to(4000);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.to(6000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    let v = w.pinned_in_time(ROOM + 1, 1.021, 10.0);
    assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Certain));
}

#[test]
fn a_thread_that_ends_long_after_or_before_a_foreign_message_is_another() {
    for late in [true, false] {
        let mut w = world(Sees::Prefill);
        w.healthy(1, &decode(0), &prefill(0), 20);
        w.to(1000);
        if !late {
            thread(&mut w, &prefill(0), 23_357);
            w.wait(5);
        }
        w.foreign(&prefill(0));
        w.wait(1200);
        if late {
            thread(&mut w, &prefill(0), 23_357);
        }
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.to(14_000);
        assert_ne!(w.verdict(ROOM).confidence, Confidence::Certain);
    }
}

#[test]
fn a_thread_of_another_process_is_no_evidence() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.to(1000);
    w.foreign(&prefill(0));
    w.wait(21);
    thread(&mut w, &prefill(1), 23_357);
    w.metadata(ROOM, &decode(0), &prefill(0));
    quiet(&mut w, ROOM, 60_000);
}

#[test]
fn among_threads_that_end_all_the_time_one_more_proves_nothing() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    for tid in 0..60 {
        w.wait(1000);
        thread(&mut w, &prefill(0), 30_000 + tid);
    }
    w.foreign(&prefill(0));
    w.wait(500);
    thread(&mut w, &prefill(0), 40_000);
    w.metadata(ROOM, &decode(0), &prefill(0));
    quiet(&mut w, ROOM, 60_000);
    assert_eq!(w.class(ROOM), Some(Class::ReceiverSilent), "as after any foreign message");
}

#[test]
fn mori_reads_on_after_what_it_does_not_know() {
    let mut w = World::with(Sees::Prefill, MORI_OPEN, Config::default());
    w.register(&decode(0), &prefill(0));
    foreign_then_death(&mut w, 21);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(15_000);
    let v = w.verdict(ROOM);
    assert_ne!(v.class, Class::ReceiverSilent);
    assert_ne!(v.confidence, Confidence::Certain);
}

#[test]
fn a_process_that_is_killed_loses_all_its_threads_and_accuses_none() {
    // Threads go first and the process seconds later, as long as its memory is being given back.
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(9000);
    w.foreign(&prefill(0));
    for tid in 0..20 {
        exits(&mut w, prefill(0).pid, 500 + tid, KILLED, false);
    }
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    quiet(&mut w, ROOM, 12_000);
    quiet(&mut w, ROOM + 1, 1000);
    process(&mut w, &prefill(0), KILLED);
    w.wait(200);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
}

#[test]
fn a_process_that_ends_in_order_accuses_none_of_its_threads() {
    // exit_group(0): every thread ends with 0, the first one of the process among them.
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.foreign(&prefill(0));
    w.metadata(ROOM, &decode(0), &prefill(0));
    for tid in [501, 502, prefill(0).pid] {
        thread(&mut w, &prefill(0), tid);
    }
    quiet(&mut w, ROOM, 12_000);
}

#[test]
fn rooms_of_a_dead_receive_loop_end_with_prefills_own_timer() {
    let mut w = world(Sees::Prefill);
    foreign_then_death(&mut w, 21);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(3000 + 355_000);
    assert!(w.last(ROOM).pinned());
    w.to(3000 + 362_000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
}

#[test]
fn a_program_that_starts_another_in_its_place_loses_its_first_thread_only() {
    // execve from a second thread: the first one ends, and the second takes its number.
    let mut w = world(Sees::Prefill);
    thread(&mut w, &prefill(0), prefill(0).pid);
    w.to(120_000);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.wait(1000);
    w.foreign(&prefill(0));
    w.wait(21);
    thread(&mut w, &prefill(0), 23_357);
    let since = w.now_s();
    w.metadata(ROOM, &decode(0), &prefill(0));
    let v = w.pinned_in_time(ROOM, since, 10.0);
    assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Certain));
}

#[test]
fn a_socket_handed_on_is_the_heirs() {
    // A launcher forks the rank, which goes on with its sockets, and ends.
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    let heir = Rank { pid: 150, ..prefill(0) };
    let end = w.end(&decode(0), &prefill(0), Direction::Received);
    w.adopt(&prefill(0), &heir);
    assert_eq!(w.end(&decode(0), &heir, Direction::Received).socket, end.socket);
    w.metadata(ROOM, &decode(0), &heir);
    process(&mut w, &prefill(0), 0);
    w.to(11_500);
    assert!(w.last(ROOM).pinned(), "the heir still owes");
    process(&mut w, &heir, 0);
    w.wait(200);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
}

/// Foreign bytes of another kind than [`World::foreign`]'s.
fn probe(w: &mut World) {
    let mut connection = w.end(&decode(98), &prefill(0), Direction::Received);
    connection.addresses.peer = "10.8.8.8:4444".parse().unwrap();
    let (at, direction) = (w.mono(), Direction::Received);
    w.input(&Input::Foreign { at, connection, direction, frames: 0, first_len: 64 });
}

#[test]
fn what_a_rank_has_read_on_after_proves_nothing() {
    let mut w = world(Sees::Prefill);
    for n in 10..15 {
        probe(&mut w);
        w.wait(500);
        w.healthy(n, &decode(0), &prefill(0), 20);
    }
    probe(&mut w);
    w.wait(45);
    thread(&mut w, &prefill(0), 23_357);
    w.metadata(ROOM, &decode(0), &prefill(0));
    quiet(&mut w, ROOM, 60_000);
    assert_eq!(w.class(ROOM), Some(Class::ReceiverSilent), "as after any foreign bytes");
}

#[test]
fn a_harmless_probe_does_not_hide_what_killed_the_receive_loop() {
    let mut w = world(Sees::Prefill);
    probe(&mut w);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.to(1000);
    w.foreign(&prefill(0));
    w.wait(10);
    probe(&mut w);
    w.wait(11);
    thread(&mut w, &prefill(0), 23_357);
    w.to(3000);
    w.metadata(ROOM, &decode(0), &prefill(0));
    let v = w.pinned_in_time(ROOM, 3.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Certain));
    assert!(says(&v, "10.9.9.9:5555"), "{:?}", v.evidence);
}

#[test]
fn a_rank_that_answers_what_came_after_a_foreign_message_has_read_on() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.foreign(&prefill(0));
    w.wait(10);
    w.healthy(2, &decode(0), &prefill(0), 20);
    w.wait(10);
    thread(&mut w, &prefill(0), 23_357);
    w.metadata(ROOM, &decode(0), &prefill(0));
    quiet(&mut w, ROOM, 60_000);
}
