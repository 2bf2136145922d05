//! Threads of engines that ended, beside what the engines say in numbers and what their requests show.

use super::rooms_support::*;
use super::web::*;
use roomtrace::event::{Comm, Task, TaskChange, TaskEvent};
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
