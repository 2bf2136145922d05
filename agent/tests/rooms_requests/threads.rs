//! Threads of engines that ended, beside what the engines say in numbers and what their requests show.

use super::rooms_support::*;
use super::web::*;
use roomtrace::event::{Comm, Task, TaskChange, TaskEvent};
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{EngineGauges, Input, Outcome, Role};
use roomtrace::sglang::message::{Backend, KvPoll};
use roomtrace::verdict::model::{Class, Confidence};

const ROOM: u64 = 7_000_000_000_000_000_101;

/// A thread of this rank returns.
fn thread(w: &mut Web, rank: &Rank, tid: u32) {
    let name = Comm::from("sglang::schedul".to_owned());
    let task = Task { tgid: rank.pid, tid, comm: name, cgroup: 0 };
    let what = TaskChange::Exited { code: 0, process: false };
    let at = w.at();
    w.input(&Input::Task(TaskEvent { at, task, name, what }));
}

/// A prompt of 3000 pages is asked for.
fn long(w: &mut Web, room: u64, d: &Rank) {
    w.ask(room, d, &prefill(0), |m| m.pages = 3000);
}

fn verdict(w: &Web, room: u64) -> Option<(Class, Confidence)> {
    w.last(room).verdict.map(|v| (v.class, v.confidence))
}

fn found(w: &Web, class: Class) -> bool {
    w.table.findings().iter().any(|f| f.class == class)
}

/// Prefill has answered one room. `rooms` long ones are asked for, and a second later one of its threads ends.
fn a_thread_beside(rooms: u64) -> Web {
    let mut w = Web::new(Sees::Prefill);
    w.serve(1, 20);
    w.gauges(Role::Prefill, 0, 0, 0);
    for n in 0..rooms {
        w.request(Role::Prefill, ROOM + n);
        long(&mut w, ROOM + n, &decode(0));
    }
    w.wait(1000);
    thread(&mut w, &prefill(0), 24_000);
    w
}

#[test]
fn a_thread_that_ends_while_prefill_computes_or_queues_pages_nobody() {
    for (rooms, waiting) in [(1, 0), (3, 0), (3, 2)] {
        let mut w = a_thread_beside(rooms);
        for n in 1..60 {
            w.gauges(Role::Prefill, 0, waiting, n);
            w.wait(1000);
        }
        for n in 0..rooms {
            w.never_paged(ROOM + n);
        }
        assert!(!found(&w, Class::ThreadDied), "{:#?}", w.table.findings());
    }
}

#[test]
fn a_thread_that_ends_where_something_waits_pages_nobody_though_nothing_moves() {
    let mut w = a_thread_beside(3);
    for _ in 0..60 {
        w.gauges(Role::Prefill, 1, 2, 0);
        w.wait(1000);
    }
    for n in 0..3 {
        w.never_paged(ROOM + n);
    }
}

#[test]
fn a_thread_that_ends_where_nothing_tells_whether_prefill_computes_pages_nobody() {
    let mut w = Web::new(Sees::Prefill);
    w.serve(1, 20);
    thread(&mut w, &prefill(0), 24_000);
    for n in 0..3 {
        w.request(Role::Prefill, ROOM + n);
        long(&mut w, ROOM + n, &decode(0));
    }
    w.wait(60_000);
    for n in 0..3 {
        w.never_paged(ROOM + n);
    }
    let v = w.verdict(ROOM);
    assert!(v.evidence.iter().any(|e| e.contains("thread 24000")), "{:?}", v.evidence);
}

#[test]
fn with_counters_that_stand_still_a_thread_that_ended_is_why_and_moving_ones_take_it_back() {
    let mut w = a_thread_beside(2);
    let say = |progress: &dyn Fn(u64) -> u64, from: u64, to: u64, w: &mut Web| {
        for n in from..to {
            w.gauges(Role::Prefill, 2, 0, progress(n));
            w.wait(1000);
        }
    };
    say(&|_| 0, 0, 30, &mut w);
    assert_eq!(verdict(&w, ROOM), Some((Class::TransferWorkerSilent, Confidence::Likely)));
    assert!(found(&w, Class::ThreadDied));
    // It was the other rooms' turn.
    say(&|n| n, 30, 40, &mut w);
    assert_eq!(verdict(&w, ROOM).map(|v| v.1), Some(Confidence::Possible));
    assert!(!found(&w, Class::ThreadDied), "{:#?}", w.table.findings());
}

/// Two sessions; `silent` long rooms of one, a thread ends, and the other's, as long, go on for a minute, one in `every` ms, while
/// prefill computes.
fn one_session_silent(silent: u64, every: u64) -> Web {
    let mut w = Web::new(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.healthy(2, &decode(1), &prefill(0), 20);
    for n in 0..silent {
        long(&mut w, ROOM + n, &decode(0));
    }
    w.wait(1000);
    thread(&mut w, &prefill(0), 24_000);
    for n in 0..60_000 / every {
        w.gauges(Role::Prefill, 0, 0, n);
        w.wait(every - 50);
        long(&mut w, 10 + n, &decode(1));
        w.wait(50);
        w.status(10 + n, &prefill(0), &decode(1), KvPoll::Success);
    }
    w
}

#[test]
fn two_rooms_that_others_pass_in_a_working_engine_page_nobody() {
    let w = one_session_silent(2, 6000);
    w.never_paged(ROOM);
    w.never_paged(ROOM + 1);
    assert!(!found(&w, Class::ThreadDied), "{:#?}", w.table.findings());
}

#[test]
fn a_session_that_a_working_engine_passes_again_and_again_has_a_dead_worker() {
    let w = one_session_silent(3, 1000);
    assert_eq!(verdict(&w, ROOM), Some((Class::TransferWorkerSilent, Confidence::Certain)));
    assert!(found(&w, Class::ThreadDied));
}

/// Of 0.5.15 or 0.5.16, by its messages.
const NIXL_OPEN: Layout =
    Layout { backend: Backend::Nixl, register: (r(5, 15), r(5, 16)), metadata: (r(5, 12), r(5, 16)) };

/// An ABORT comes to it, a thread ends 20 ms later, and a room is asked for; it says its version before that, or after.
fn an_abort_to(version: Option<&str>, late: bool) -> Web {
    let mut w = Web::with(Sees::Prefill, NIXL_OPEN);
    let say = |w: &mut Web| {
        let gauges = EngineGauges {
            server: pid(Role::Prefill),
            role: Some(Role::Prefill),
            version: version.map(str::to_owned),
            ..EngineGauges::default()
        };
        let at = w.at();
        w.input(&Input::Gauges { at, gauges: &gauges });
    };
    if !late {
        say(&mut w);
    }
    w.serve(1, 1000);
    w.abort(2, &decode(0), &prefill(0), None);
    w.wait(20);
    thread(&mut w, &prefill(0), 24_000);
    w.wait(500);
    say(&mut w);
    w.request(Role::Prefill, ROOM);
    long(&mut w, ROOM, &decode(0));
    w.wait(12_000);
    w
}

#[test]
fn an_abort_accuses_only_a_release_that_dies_of_it() {
    for late in [false, true] {
        let w = an_abort_to(Some("0.5.16"), late);
        w.never_paged(ROOM);
        let says = w.last(ROOM).verdict.map(|v| v.evidence).unwrap_or_default();
        assert!(says.iter().all(|e| !e.contains("an ABORT, of which")), "{says:?}");
        let w = an_abort_to(Some("0.5.15"), late);
        assert_eq!(verdict(&w, ROOM), Some((Class::ReceiverSilent, Confidence::Certain)));
    }
    let w = an_abort_to(None, false);
    w.never_paged(ROOM);
    let v = w.verdict(ROOM);
    assert_eq!(v.class, Class::ReceiverSilent);
    assert!(!v.candidates.is_empty(), "it may be long");
    assert!(v.evidence.iter().any(|e| e.contains("do not tell")), "{:?}", v.evidence);
}

/// A message that no rank sends comes to decode, and one of its threads ends 21 ms later.
fn decode_goes_deaf(sees: Sees) -> Web {
    let mut w = Web::new(sees);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.wait(1000);
    w.foreign(&decode(0));
    w.wait(21);
    thread(&mut w, &decode(0), 24_100);
    w.wait(1000);
    w
}

/// A room of which decode is told Success, and which it is to generate: its request there.
fn concludes(w: &mut Web, room: u64) -> Key {
    let of = w.sees(Role::Prefill).then(|| w.request(Role::Prefill, room));
    let key = w.request(Role::Decode, room);
    w.metadata(room, &decode(0), &prefill(0));
    w.wait(100);
    w.status(room, &prefill(0), &decode(0), KvPoll::Success);
    if let Some(of) = of {
        w.finished(of);
    }
    key
}

#[test]
fn a_status_thread_that_dies_of_a_message_pins_the_next_room_at_decode() {
    for sees in [Sees::Decode, Sees::Both] {
        let mut w = decode_goes_deaf(sees);
        concludes(&mut w, ROOM);
        let since = w.now_s();
        let v = w.pinned_in_time(ROOM, since, 10.0);
        assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Certain), "{sees:?}");
        assert_eq!(v.candidates, []);
        let owes = v.owed_by.as_ref().unwrap();
        assert_eq!((owes.role, owes.endpoint), (Some(Role::Decode), Some(decode(0).endpoint)));
        for part in ["thread 24100", "2 frames", "first of 4 bytes", "10.9.9.9:5555", "process 200"] {
            assert!(v.evidence.iter().any(|e| e.contains(part)), "{part}: {:?}", v.evidence);
        }
        assert!(v.ends_by_itself.as_ref().unwrap().timer.contains("WAITING"));
        assert!(v.actions.iter().any(|a| a.command == "kill -TERM 200"), "{:?}", v.actions);
        for n in 1..4 {
            concludes(&mut w, ROOM + n);
        }
        w.wait(12_000);
        let open = w.table.findings();
        let f = open.iter().find(|f| f.class == Class::ThreadDied).unwrap();
        assert_eq!((f.confidence, f.room_count, f.group), (Confidence::Certain, 4, v.group));
        assert_eq!(f.engine.endpoint, Some(decode(0).endpoint));
        assert!(f.evidence.iter().any(|e| e.contains("10.9.9.9:5555")), "{:?}", f.evidence);
        // Decode's timer ends it; the thread stays dead.
        w.abort(ROOM, &decode(0), &prefill(0), None);
        w.wait(60_000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Failed], "{sees:?}");
        assert!(found(&w, Class::ThreadDied));
    }
}

#[test]
fn a_room_that_decode_answers_after_all_shows_that_its_status_thread_lives() {
    let mut w = decode_goes_deaf(Sees::Decode);
    concludes(&mut w, ROOM);
    let second = concludes(&mut w, ROOM + 1);
    w.wait(12_000);
    assert!(w.last(ROOM).pinned() && found(&w, Class::ThreadDied));
    w.first_byte(second);
    w.wait(2500);
    for room in [ROOM, ROOM + 1] {
        assert_eq!(w.outcomes(room), [Outcome::Success]);
    }
    assert!(!found(&w, Class::ThreadDied), "{:#?}", w.table.findings());
    // Nor does another of these messages kill it.
    w.foreign(&decode(0));
    w.wait(21);
    thread(&mut w, &decode(0), 24_101);
    concludes(&mut w, ROOM + 2);
    w.wait(2000);
    assert_eq!(w.outcomes(ROOM + 2), [Outcome::Success]);
}

#[test]
fn decode_that_streams_soon_is_never_accused() {
    let mut w = decode_goes_deaf(Sees::Decode);
    let key = concludes(&mut w, ROOM);
    w.wait(3000);
    w.first_byte(key);
    w.wait(20_000);
    assert!(w.pin(ROOM).is_none());
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

#[test]
fn decodes_own_count_tells_whether_it_waits() {
    for (count, confidence) in [(0, Confidence::Possible), (1, Confidence::Certain)] {
        let mut w = decode_goes_deaf(Sees::Decode);
        concludes(&mut w, ROOM);
        for n in 0..14 {
            w.gauges(Role::Decode, count, 0, n);
            w.wait(1000);
        }
        assert_eq!(verdict(&w, ROOM), Some((Class::ReceiverSilent, confidence)));
    }
}

#[test]
fn one_of_two_ranks_of_decode_that_is_deaf_is_named() {
    let mut w = Web::bare(Sees::Decode, MOONCAKE, Config::default());
    w.know();
    let ranks = [decode_of(0, 2), decode_of(1, 2)];
    for d in &ranks {
        w.register(d, &prefill(0));
    }
    w.foreign(&ranks[1]);
    w.wait(21);
    thread(&mut w, &ranks[1], 24_100);
    w.request(Role::Decode, ROOM);
    for d in &ranks {
        w.metadata(ROOM, d, &prefill(0));
    }
    for d in &ranks {
        w.status(ROOM, &prefill(0), d, KvPoll::Success);
    }
    w.wait(11_500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Certain));
    assert_eq!(v.owed_by.unwrap().endpoint, Some(ranks[1].endpoint));
}
