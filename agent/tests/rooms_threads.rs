//! What ended threads and processes, and TCP's own troubles, make of rooms: every rule, and what takes it back.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::many_single_char_names,
    reason = "tests; decode ranks, prefill ranks, worlds, as in the other tests"
)]

mod rooms_support;
use proptest::prelude::*;
use rooms_support::*;
use roomtrace::event::{
    Comm, Direction, Sequence, SocketId, Stand, Task, TaskChange, TaskEvent, TcpState, Trouble,
};
use roomtrace::rooms::model::{Away, Input, Outcome, Role};
use roomtrace::rooms::{Config, RoomTable, SavedRooms, Survivors};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence, Verdict};

const ROOM: u64 = 9_000_000_000_000_000_001;
/// `wait` status of a process killed by SIGKILL.
const KILLED: u32 = 9;

fn world(sees: Sees) -> World {
    let mut w = World::new(sees);
    w.register(&decode(0), &prefill(0));
    w
}

fn exits(w: &mut World, pid: u32, tid: u32, code: u32, process: bool) {
    let name = Comm::from("sglang::schedul".to_owned());
    let task = Task { tgid: pid, tid, comm: name, cgroup: 0 };
    let event = TaskEvent { at: w.mono(), task, name, what: TaskChange::Exited { code, process } };
    w.input(&Input::Task(event));
}

/// A thread of `rank` returns.
fn thread(w: &mut World, rank: &Rank, tid: u32) {
    exits(w, rank.pid, tid, 0, false);
}

fn process(w: &mut World, rank: &Rank, code: u32) {
    exits(w, rank.pid, rank.pid, code, true);
}

fn trouble(w: &mut World, from: &Rank, to: &Rank, trouble: Trouble) {
    let connection = w.end(from, to, Direction::Sent);
    let at = w.mono();
    w.input(&Input::Trouble { at, connection, trouble });
}

fn again(w: &mut World, from: &Rank, to: &Rank, una: u32) {
    let write = w.sent_to(from, to);
    trouble(w, from, to, Trouble::Retransmitted { una, write });
}

/// Where the end stands that `to` has of the connection from `from`: `unread` bytes before `rcv_nxt`.
fn stands(w: &mut World, from: &Rank, to: &Rank, copied: u32, unread: u32) {
    let socket = w.end(from, to, Direction::Received).socket;
    let sequence = Sequence { write: 1, una: 1, copied, rcv_nxt: copied.wrapping_add(unread) };
    let stand = Stand { state: TcpState::Established, sequence, sent: 1, retransmits: 0 };
    let at = w.mono();
    w.input(&Input::Stand { at, socket, stand });
}

fn says(v: &Verdict, what: &str) -> bool {
    v.evidence.iter().any(|e| e.contains(what))
}

/// Nothing certain or likely is said of a room for this long.
fn quiet(w: &mut World, room: u64, ms: u64) {
    w.wait(ms);
    w.never_paged(room);
}

// receiver_silent

/// A rank that worked, and then a foreign message and the end of a thread `gap` ms later.
fn foreign_then_death(w: &mut World, gap: u64) {
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

// transfer_worker_silent

/// One session of two stalls after a thread has ended; `others` rooms of the other are answered.
fn worker(sees: Sees, rooms: u64, others: u64) -> World {
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
fn one_room_of_a_session_may_only_be_long_until_three_have_overtaken_it() {
    let mut w = worker(Sees::Prefill, 1, 1);
    let v = w.pinned_in_time(ROOM, 1.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::TransferWorkerSilent, Confidence::Likely));
    for n in 100..103 {
        w.healthy(n, &decode(1), &prefill(0), 20);
    }
    w.wait(1500);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Certain);
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
    w.to(12_500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::TransferWorkerSilent, Confidence::Likely));
    assert!(says(&v, "still acknowledges ABORTs"), "{:?}", v.evidence);
    w.to(63_000);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Certain);
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
fn a_rank_that_says_nothing_since_a_thread_ended_is_likely_and_leaves_open_which_it_was() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.to(1000);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(100);
    thread(&mut w, &prefill(0), 24_000);
    let v = w.pinned_in_time(ROOM, 1.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::TransferWorkerSilent, Confidence::Likely));
    assert!(readings(&v).contains(&Class::ReceiverSilent));
    assert!(says(&v, "is not known"), "{:?}", v.evidence);
    // What came after it may be unread as well.
    for n in 1..4 {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    w.wait(12_000);
    let v = w.verdict(ROOM + 3);
    assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Likely));
    assert!(readings(&v).contains(&Class::TransferWorkerSilent));
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

// One thread, one finding

#[test]
fn a_dead_thread_is_one_finding_with_the_rooms_that_it_pins() {
    let mut w = world(Sees::Prefill);
    foreign_then_death(&mut w, 21);
    assert_eq!(w.table.findings(), [], "nothing is missed yet");
    for n in 0..3 {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    w.wait(12_000);
    let open = w.table.findings();
    assert_eq!(open.len(), 1, "{open:#?}");
    let f = &open[0];
    assert_eq!((f.class, f.confidence, f.room_count), (Class::ThreadDied, Confidence::Certain, 3));
    assert_eq!((f.rooms.clone(), f.group), (vec![ROOM, ROOM + 1, ROOM + 2], w.verdict(ROOM).group));
    assert_eq!(f.engine.endpoint, Some(prefill(0).endpoint));
    for part in ["thread 23357", "10.9.9.9:5555", "ms before"] {
        assert!(f.evidence.iter().any(|e| e.contains(part)), "{part}: {:?}", f.evidence);
    }
    let names: Vec<_> = w.table.finding_events().map(|e| (e.name(), e.finding().class)).collect();
    assert_eq!(names.last(), Some(&("finding_opened", Class::ThreadDied)), "{names:?}");
    // The rank answers: it lives.
    w.healthy(2, &decode(0), &prefill(0), 20);
    w.wait(2500);
    assert!(w.table.findings().iter().all(|f| f.class != Class::ThreadDied), "{:#?}", w.table.findings());
}

#[test]
fn the_finding_of_a_dead_thread_ends_with_its_process() {
    let mut w = worker(Sees::Prefill, 2, 2);
    w.to(13_000);
    assert_eq!(w.table.findings()[0].class, Class::ThreadDied);
    process(&mut w, &prefill(0), 15);
    w.wait(2500);
    assert_eq!(w.table.findings(), []);
    let closed: Vec<_> = w.table.closed_findings().map(|f| (f.class, f.room_count)).collect();
    assert_eq!(closed, [(Class::ThreadDied, 2)]);
}

#[test]
fn threads_that_nobody_misses_are_no_finding() {
    let mut w = world(Sees::Prefill);
    for n in 0..30 {
        w.healthy(n, &decode(0), &prefill(0), 20);
        thread(&mut w, &prefill(0), 25_000 + u32::try_from(n).unwrap());
        w.wait(500);
    }
    assert_eq!(w.table.findings(), []);
}

// Processes

#[test]
fn the_end_of_a_process_ends_its_views_at_once() {
    for (sees, rank) in [(Sees::Prefill, prefill(0)), (Sees::Decode, decode(0))] {
        let mut w = world(sees);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.to(20_000);
        assert!(w.last(ROOM).pinned());
        process(&mut w, &rank, KILLED);
        w.wait(100);
        assert_eq!(w.outcomes(ROOM), [Outcome::Unknown], "{sees:?}");
        assert!(w.table.pinned().next().is_none());
    }
}

#[test]
fn a_pin_ends_with_both_processes_although_decode_never_listened() {
    let mut w = world(Sees::Both);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(20_000);
    assert!(w.last(ROOM).pinned());
    process(&mut w, &prefill(0), KILLED);
    w.wait(200);
    assert!(w.last(ROOM).pinned(), "decode still waits");
    process(&mut w, &decode(0), KILLED);
    w.wait(200);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
}

#[test]
fn a_view_of_two_ranks_is_over_with_the_last_of_them() {
    let mut w = World::new(Sees::Prefill);
    for p in [prefill(0), prefill(1)] {
        w.metadata(ROOM, &decode(0), &p);
    }
    w.to(1000);
    process(&mut w, &prefill(0), KILLED);
    w.wait(200);
    assert_eq!(w.outcomes(ROOM), []);
    process(&mut w, &prefill(1), KILLED);
    w.wait(200);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
}

#[test]
fn a_survivor_that_has_a_heartbeat_ends_its_room_itself() {
    let mut w = world(Sees::Both);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(2000);
    process(&mut w, &prefill(0), 1 << 8);
    w.to(12_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Possible));
    assert!(v.ends_by_itself.as_ref().unwrap().timer.contains("heartbeat"));
    assert!(says(&v, "process 100 ended") && says(&v, "status 1"), "{:?}", v.evidence);
}

#[test]
fn a_survivor_without_any_timer_is_certainly_pinned_and_at_once() {
    // Neither heartbeat nor waiting timeout before 0.5.3.
    let layout =
        Layout { backend: NIXL_OLD.backend, register: (r(4, 7), r(5, 2)), metadata: (r(4, 7), r(5, 2)) };
    let mut w = World::with(Sees::Both, layout, Config::default());
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(2000);
    process(&mut w, &prefill(0), KILLED);
    w.wait(200);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Certain));
    assert_eq!((v.ends_by_itself, v.act_on.unwrap().role), (None, Some(Role::Decode)));
    w.wait(60_000);
    assert_eq!(w.names(ROOM), ["room_pinned"], "it stays what it is");
}

#[test]
fn a_queued_room_of_a_dead_decode_ends_by_itself() {
    let mut w = World::new(Sees::Both);
    w.ask(ROOM, &decode_of(0, 2), &prefill(0), |m| m.required = Some(2));
    w.to(1000);
    process(&mut w, &decode_of(0, 2), KILLED);
    w.to(12_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Possible));
    assert!(v.ends_by_itself.unwrap().timer.contains("BOOTSTRAP"));
}

#[test]
fn a_status_to_a_decode_that_has_ended_is_not_lost() {
    let mut w = world(Sees::Both);
    let (p, d) = (prefill(0), decode(0));
    w.healthy(1, &d, &p, 20);
    let una = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, una);
    w.metadata(ROOM, &d, &p);
    w.to(2000);
    process(&mut w, &d, KILLED);
    w.tell(ROOM, &p, &d, KvPoll::Success, false);
    w.wait(10);
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 104);
    w.wait(60_000);
    assert!(w.pin(ROOM).is_none(), "{:?}", w.names(ROOM));
    // Lost first: a pin until nobody waits for it any more.
    w.metadata(ROOM + 1, &d, &p);
    let una = w.sent_to(&p, &d);
    w.status(ROOM + 2, &p, &d, KvPoll::Success);
    w.acknowledge(&p, &d, una);
    w.tell(ROOM + 1, &p, &d, KvPoll::Success, false);
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 104);
    assert_eq!(w.class(ROOM + 1), Some(Class::StatusLost));
    process(&mut w, &d, KILLED);
    w.wait(200);
    assert_eq!(w.outcomes(ROOM + 1), [Outcome::Unknown]);
}

#[test]
fn a_restarted_rank_is_a_new_rank() {
    let mut w = world(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    foreign_then_death(&mut w, 21);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    w.to(14_000);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Certain);
    process(&mut w, &prefill(0), 15);
    w.wait(500);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
    let again = Rank { pid: 700, ..prefill(0) };
    w.register(&decode(1), &again);
    w.metadata(ROOM + 2, &decode(1), &again);
    w.wait(11_000);
    let v = w.verdict(ROOM + 2);
    assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Possible));
    assert!(!says(&v, "thread"), "{:?}", v.evidence);
}

#[test]
fn ends_that_nobody_knows_anything_of_change_nothing() {
    let mut w = world(Sees::Both);
    exits(&mut w, 9999, 9999, 0, true);
    exits(&mut w, 9999, 10_000, 0, false);
    w.metadata(ROOM, &decode(0), &prefill(0));
    thread(&mut w, &prefill(0), 24_000);
    thread(&mut w, &prefill(0), 24_000);
    process(&mut w, &prefill(5), KILLED);
    w.to(5000);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(2000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.table.counters().turned_away.threads, 0);
}

#[test]
fn more_ends_than_are_kept_are_counted() {
    let mut w = world(Sees::Prefill);
    for n in 0..100 {
        thread(&mut w, &prefill(0), 50_000 + n);
    }
    assert_eq!(w.table.counters().turned_away.threads, 36);
    for n in 0..300 {
        exits(&mut w, 100_000 + n, 200_000 + n, 0, false);
    }
    assert_eq!(w.table.counters().turned_away.threads, 36 + 45);
}

// TCP

/// A rank that has an acknowledged connection to decode and then says STATUS into a black hole.
fn black_hole(sees: Sees) -> (World, u32) {
    let mut w = world(sees);
    let (p, d) = (prefill(0), decode(0));
    w.healthy(1, &d, &p, 20);
    let una = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, una);
    w.metadata(ROOM, &d, &p);
    w.to(2000);
    w.tell(ROOM, &p, &d, KvPoll::Success, false);
    (w, una)
}

#[test]
fn a_status_into_a_black_hole_is_likely_lost_within_two_seconds() {
    let (mut w, una) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    // As the kernel does it: 0.2 s, 0.6 s, 1.4 s, 3 s after the message.
    for ms in [2200, 2600] {
        w.to(ms);
        again(&mut w, &p, &d, una);
    }
    w.to(3100);
    assert!(w.pin(ROOM).is_none(), "not yet");
    assert_eq!(w.outcomes(ROOM), [], "nor over");
    w.to(3400);
    let (_, v) = w.pin(ROOM).unwrap();
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Likely));
    assert!(says(v, "has not acknowledged the STATUS") && says(v, "2 retransmissions"), "{:?}", v.evidence);
    assert_eq!(v.act_on.as_ref().unwrap().role, Some(Role::Decode));
    for ms in [3400, 5000, 8000] {
        w.to(ms);
        again(&mut w, &p, &d, una);
    }
    // The kernel gives up.
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 110);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Certain));
    assert!(says(&v, "timed out"));
}

#[test]
fn a_reset_is_only_told_by_the_end_of_the_connection_what_it_cost() {
    let (mut w, una) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.to(2200);
    again(&mut w, &p, &d, una);
    w.wait(50);
    trouble(&mut w, &p, &d, Trouble::ResetReceived);
    assert!(w.pin(ROOM).is_none(), "it may have been acknowledged since");
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 104);
    let (_, v) = w.pin(ROOM).unwrap();
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Certain));
    assert!(says(v, "reset by peer"));
}

#[test]
fn a_retransmission_that_arrives_is_nothing() {
    let (mut w, una) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.to(2200);
    again(&mut w, &p, &d, una);
    w.to(2600);
    let end = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, end);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    w.to(60_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.last(ROOM).messages.last().unwrap().acknowledged, Some(true));
}

#[test]
fn a_retransmission_of_what_lies_behind_the_status_is_nothing() {
    let (mut w, _) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    let end = w.sent_to(&p, &d);
    for ms in [2200, 2600, 3400, 5000] {
        w.to(ms);
        again(&mut w, &p, &d, end);
    }
    assert_eq!(w.names(ROOM), ["room_closed"]);
}

#[test]
fn progress_starts_the_clock_of_retransmissions_anew() {
    let (mut w, una) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.to(2200);
    again(&mut w, &p, &d, una);
    w.to(2900);
    again(&mut w, &p, &d, una + 50);
    w.to(3700);
    assert!(w.pin(ROOM).is_none(), "the first byte went through");
    w.to(4200);
    assert_eq!(w.verdict(ROOM).class, Class::StatusLost);
}

#[test]
fn metadata_into_a_half_open_connection_is_a_stale_endpoint() {
    let mut w = world(Sees::Decode);
    let (p, d) = (prefill(0), decode(0));
    let una = w.sent_to(&d, &p);
    w.acknowledge(&d, &p, una);
    w.metadata(ROOM, &d, &p);
    for ms in [200, 600, 1400] {
        w.to(ms);
        again(&mut w, &d, &p, una);
    }
    let (at, v) = w.pin(ROOM).unwrap();
    assert!(at < 1.5);
    assert_eq!((v.class, v.confidence), (Class::StaleEndpoint, Confidence::Likely));
    assert!(says(v, "has not acknowledged the METADATA"), "{:?}", v.evidence);
    let end = w.sent_to(&d, &p);
    w.acknowledge(&d, &p, end);
    w.wait(1500);
    assert_eq!(w.names(ROOM), ["room_pinned", "room_recovered"]);
}

#[test]
fn an_abort_into_a_half_open_connection_leaves_prefill_waiting() {
    let mut w = world(Sees::Decode);
    let (p, d) = (prefill(0), decode(0));
    w.metadata(ROOM, &d, &p);
    let una = w.sent_to(&d, &p);
    w.acknowledge(&d, &p, una);
    w.to(1000);
    w.abort(ROOM, &d, &p, Some(1));
    for ms in [1200, 1600, 2400] {
        w.to(ms);
        again(&mut w, &d, &p, una);
    }
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StaleEndpoint, Confidence::Likely));
    assert!(says(&v, "has not acknowledged the ABORT"), "{:?}", v.evidence);
    w.to(40_000);
    assert!(w.last(ROOM).pinned(), "nothing has told prefill");
    let end = w.sent_to(&d, &p);
    w.acknowledge(&d, &p, end);
    w.wait(2000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

#[test]
fn a_stand_says_what_a_retransmission_says() {
    let (mut w, una) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    let socket = w.end(&p, &d, Direction::Sent).socket;
    let write = w.sent_to(&p, &d);
    for ms in [2500, 3600] {
        w.to(ms);
        let sequence = Sequence { write, una, copied: 1, rcv_nxt: 1 };
        let stand = Stand { state: TcpState::Established, sequence, sent: write, retransmits: 3 };
        let at = w.mono();
        w.input(&Input::Stand { at, socket, stand });
    }
    w.to(3800);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Likely));
    assert!(says(&v, "3 retransmissions"));
    let sequence = Sequence { write, una: write, copied: 1, rcv_nxt: 1 };
    let stand = Stand { state: TcpState::Established, sequence, sent: write, retransmits: 0 };
    let at = w.mono();
    w.input(&Input::Stand { at, socket, stand });
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

#[test]
fn unread_bytes_show_that_a_rank_does_not_read() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.metadata(ROOM, &decode(0), &prefill(0));
    for ms in [11_500, 12_500, 13_500, 14_600] {
        w.to(ms);
        stands(&mut w, &decode(0), &prefill(0), 1000, 300);
        if ms == 12_500 {
            assert_eq!(w.verdict(ROOM).confidence, Confidence::Possible, "a second is nothing");
        }
    }
    w.wait(1500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Likely));
    assert!(says(&v, "does not read: 300 bytes"), "{:?}", v.evidence);
    // It reads on, if slowly.
    stands(&mut w, &decode(0), &prefill(0), 1100, 200);
    w.wait(1500);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Possible);
}

#[test]
fn a_fin_is_no_unread_byte() {
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    let socket = w.end(&decode(0), &prefill(0), Direction::Received).socket;
    for ms in [11_500, 12_500, 15_600] {
        w.to(ms);
        let sequence = Sequence { write: 1, una: 1, copied: 1000, rcv_nxt: 1001 };
        let stand = Stand { state: TcpState::CloseWait, sequence, sent: 1, retransmits: 0 };
        let at = w.mono();
        w.input(&Input::Stand { at, socket, stand });
    }
    quiet(&mut w, ROOM, 2000);
}

#[test]
fn several_unread_sockets_of_a_process_are_a_stalled_engine() {
    let mut w = world(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    w.metadata(ROOM, &decode(0), &prefill(0));
    for ms in [11_500, 15_000] {
        w.to(ms);
        stands(&mut w, &decode(0), &prefill(0), 1000, 300);
        stands(&mut w, &decode(1), &prefill(0), 2000, 100);
    }
    w.wait(1500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::EngineStalled, Confidence::Likely));
    assert!(says(&v, "2 sockets"));
}

#[test]
fn a_status_that_decode_does_not_read_is_decodes() {
    let mut w = world(Sees::Both);
    let (p, d) = (prefill(0), decode(0));
    w.healthy(1, &d, &p, 20);
    w.metadata(ROOM, &d, &p);
    w.wait(100);
    w.tell(ROOM, &p, &d, KvPoll::Success, false);
    for ms in [5000, 9000, 13_000] {
        w.to(ms);
        stands(&mut w, &p, &d, 500, 100);
    }
    w.wait(1500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Likely));
    assert_eq!(v.owed_by.unwrap().role, Some(Role::Decode));
}

#[test]
fn only_connections_that_overdue_rooms_wait_on_are_asked_about() {
    let mut w = world(Sees::Both);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.metadata(ROOM, &decode(0), &prefill(0));
    assert_eq!(w.table.asks(), []);
    w.to(11_500);
    assert!(w.last(ROOM).pinned());
    let mut expected = vec![
        w.end(&decode(0), &prefill(0), Direction::Sent).socket,
        w.end(&decode(0), &prefill(0), Direction::Received).socket,
        w.end(&prefill(0), &decode(0), Direction::Received).socket,
    ];
    expected.sort_unstable();
    assert_eq!(w.table.asks(), expected);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(1500);
    assert_eq!(w.table.asks(), []);
}

#[test]
fn not_more_than_64_are_asked_about_at_a_time_and_all_in_turn() {
    let mut w = World::new(Sees::Prefill);
    for n in 0..100 {
        w.metadata(u64::from(n) + 1, &decode(n), &prefill(0));
    }
    w.to(12_000);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..5 {
        let asked = w.table.asks();
        assert_eq!(asked.len(), 64);
        seen.extend(asked);
        w.wait(1000);
    }
    assert_eq!(seen.len(), 100);
}

// engine_stalled

/// A rank that has stopped: rooms of two sessions, none answered for `ms`.
fn stalled(watched: bool) -> World {
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

// Restart of the agent

#[test]
fn a_dead_receive_loop_is_still_known_after_a_restart() {
    let mut w = world(Sees::Prefill);
    foreign_then_death(&mut w, 21);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(15_000);
    let before = w.verdict(ROOM);
    let saved: SavedRooms = serde_json::from_str(&serde_json::to_string(&w.table.save()).unwrap()).unwrap();
    let away = Away { from: w.mono(), to: w.mono().plus(1_000_000_000) };
    for alive in [true, false] {
        let pids = [100, 200].into();
        let survivors = if alive {
            Survivors { alive: pids, gone: [].into() }
        } else {
            Survivors { alive: [].into(), gone: pids }
        };
        let mut table = RoomTable::restore(Config::default(), saved.clone(), away, &survivors);
        let mut out = Vec::new();
        table.returned(|_| true, &[], away.to, &mut out);
        table.tick(away.to.plus(3_000_000_000), &mut out);
        let room = table.snapshot(ROOM).pop().unwrap();
        if alive {
            let after = room.verdict.unwrap();
            assert_eq!((after.class, after.confidence), (before.class, before.confidence));
            assert_eq!(after.group, before.group);
            assert!(says(&after, "thread 23357"), "{:?}", after.evidence);
        } else {
            assert_eq!(room.outcome, Some(Outcome::Unknown));
        }
    }
}

// Whatever comes

#[derive(Clone, Debug)]
enum Op {
    Metadata(u64, u8, u8),
    Status(u64, u8, u8, bool),
    Abort(u64, u8, u8),
    Ack(u64, u8, u8),
    Foreign(u8),
    Exit { pid: u32, tid: u32, code: u32, process: bool },
    Again { d: u8, p: u8, back: bool, una: u32 },
    Reset { d: u8, p: u8, back: bool },
    Stand { socket: u64, una: u32, copied: u32, rcv_nxt: u32, retransmits: u32, state: u8 },
    Close { d: u8, p: u8, back: bool, error: u32 },
    Restart,
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    let (room, n) = (0u64..6, 0u8..3);
    prop_oneof![
        8 => (room.clone(), n.clone(), n.clone()).prop_map(|(r, d, p)| Op::Metadata(r, d, p)),
        6 => (room.clone(), n.clone(), n.clone(), any::<bool>()).prop_map(|(r, p, d, a)| Op::Status(r, p, d, a)),
        2 => (room.clone(), n.clone(), n.clone()).prop_map(|(r, d, p)| Op::Abort(r, d, p)),
        2 => (room, n.clone(), n.clone()).prop_map(|(r, p, d)| Op::Ack(r, p, d)),
        2 => n.clone().prop_map(Op::Foreign),
        6 => (prop_oneof![100u32..103, 200u32..203, Just(7u32)], 100u32..110, prop_oneof![Just(0u32), Just(9), Just(256)],
              prop::bool::weighted(0.2))
            .prop_map(|(pid, tid, code, process)| Op::Exit { pid, tid, code, process }),
        4 => (n.clone(), n.clone(), any::<bool>(), any::<u32>())
            .prop_map(|(d, p, back, una)| Op::Again { d, p, back, una: una % 3000 }),
        1 => (n.clone(), n.clone(), any::<bool>()).prop_map(|(d, p, back)| Op::Reset { d, p, back }),
        4 => (1000u64..1012, any::<u32>(), any::<u32>(), any::<u32>(), 0u32..5, 1u8..13)
            .prop_map(|(socket, una, copied, rcv_nxt, retransmits, state)| Op::Stand {
                socket, una: una % 3000, copied, rcv_nxt, retransmits, state
            }),
        1 => (n.clone(), n, any::<bool>(), prop_oneof![Just(0u32), Just(104), Just(110)])
            .prop_map(|(d, p, back, error)| Op::Close { d, p, back, error }),
        1 => Just(Op::Restart),
        6 => prop_oneof![1u64..500, 5000u64..15_000, 60_000u64..150_000].prop_map(Op::Wait),
    ]
}

fn apply(w: &mut World, op: &Op) {
    let pair =
        |d: u8, p: u8, back: bool| if back { (prefill(p), decode(d)) } else { (decode(d), prefill(p)) };
    match *op {
        Op::Metadata(room, d, p) => w.metadata(room, &decode(d), &prefill(p)),
        Op::Status(room, p, d, arrives) => w.tell(room, &prefill(p), &decode(d), KvPoll::Success, arrives),
        Op::Abort(room, d, p) => w.abort(room, &decode(d), &prefill(p), Some(1)),
        Op::Ack(room, p, d) => w.ack(room, &prefill(p), &decode(d)),
        Op::Foreign(p) => w.foreign(&prefill(p)),
        Op::Exit { pid, tid, code, process } => exits(w, pid, tid, code, process),
        Op::Again { d, p, back, una } => {
            let (from, to) = pair(d, p, back);
            again(w, &from, &to, una);
        }
        Op::Reset { d, p, back } => {
            let (from, to) = pair(d, p, back);
            trouble(w, &from, &to, Trouble::ResetReceived);
            trouble(w, &from, &to, Trouble::ResetSent);
        }
        Op::Stand { socket, una, copied, rcv_nxt, retransmits, state } => {
            let sequence = Sequence { write: una.wrapping_add(10), una, copied, rcv_nxt };
            let stand = Stand { state: TcpState::from_kernel(state), sequence, sent: una, retransmits };
            let at = w.mono();
            w.input(&Input::Stand { at, socket: SocketId(socket), stand });
        }
        Op::Close { d, p, back, error } => {
            let (from, to) = pair(d, p, back);
            w.state(&from, &to, Direction::Sent, TcpState::Established, TcpState::Close, error);
        }
        Op::Restart => {
            let saved = w.table.save();
            let away = Away { from: w.mono(), to: w.mono() };
            let survivors = Survivors { alive: (100..103).chain(200..203).collect(), gone: [].into() };
            w.table = RoomTable::restore(Config::default(), saved, away, &survivors);
            let mut out = std::mem::take(&mut w.out);
            w.table.returned(|s| s.0 % 3 != 0, &[], away.to, &mut out);
            w.out = out;
        }
        Op::Wait(ms) => {
            w.wait(ms);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    /// No order of ends, troubles and messages breaks anything, and what is told stays in order.
    #[test]
    fn nothing_breaks_in_any_order(ops in prop::collection::vec(op(), 1..60)) {
        let mut w = World::new(Sees::Both);
        for op in &ops {
            apply(&mut w, op);
            prop_assert!(w.table.asks().len() <= 64);
            let _ = w.table.open().count();
        }
        for s in w.table.pinned() {
            let v = s.verdict.unwrap();
            if v.class == Class::ReceiverSilent && v.confidence == Confidence::Certain {
                prop_assert!(v.evidence.iter().any(|e| e.contains("thread ")));
            }
        }
        for pid in (100..103).chain(200..203) {
            exits(&mut w, pid, pid, 9, true);
        }
        w.wait(1000);
        let left: Vec<_> = w.table.pinned().collect();
        prop_assert!(left.is_empty(), "nobody is left whom it would concern: {:#?}", left);
    }
}
