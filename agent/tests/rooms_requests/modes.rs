//! Modes that only several sources together tell: what later rooms pass at prefill, M4, M15, M19.

use roomtrace::event::{Comm, Task, TaskChange, TaskEvent};
use roomtrace::http::event::Side;
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{EngineGauges, Input, Role};
use roomtrace::sglang::message::{Backend, KvPoll};
use roomtrace::verdict::known::known_issues;
use roomtrace::verdict::model::{Class, Confidence, Finding};

use super::ROOM;
use super::rooms_support::*;
use super::web::*;

/// NIXL 0.5.13–0.5.14 by its REGISTER.
const NIXL_M4: Layout =
    Layout { backend: Backend::Nixl, register: (r(5, 13), r(5, 14)), metadata: (r(5, 12), r(5, 16)) };

/// Seconds in which the engine computes and answers `healthy` rooms of `pages`, with `waiting` requests in it.
fn busy(w: &mut Web, from: u64, rooms: u64, waiting: u64, pages: u64) {
    for n in from..from + rooms {
        w.gauges(Role::Prefill, 1, waiting, n);
        w.ask(n, &decode(0), &prefill(0), |m| m.pages = pages);
        w.wait(1000);
        w.status(n, &prefill(0), &decode(0), KvPoll::Success);
    }
}

fn found(w: &Web, class: Class) -> Option<Finding> {
    w.table.findings().into_iter().find(|f| f.class == class)
}

// what later rooms pass

#[test]
fn passed_by_rooms_that_came_when_nothing_waited_it_is_no_queue_and_no_computing() {
    let mut w = Web::new(Sees::Prefill);
    w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    busy(&mut w, 1, 12, 0, 8);
    assert_eq!(
        w.verdict(ROOM).confidence,
        Confidence::Possible,
        "it may still be on its way to the scheduler"
    );
    busy(&mut w, 20, 4, 0, 8);
    w.wait(1500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Likely));
    assert!(v.evidence.iter().any(|e| e.contains("nothing waits in it")), "{:?}", v.evidence);
    assert!(!readings(&v).contains(&Class::Queued));
}

#[test]
fn passed_while_something_waits_by_shorter_ones_or_without_its_request_it_is_possible() {
    for (waiting, pages, requested) in [(1, 8, true), (0, 7, true), (0, 8, false)] {
        let mut w = Web::new(Sees::Prefill);
        if requested {
            w.request(Role::Prefill, ROOM);
        }
        w.metadata(ROOM, &decode(0), &prefill(0));
        busy(&mut w, 1, 40, waiting, pages);
        w.never_paged(ROOM);
    }
}

#[test]
fn numbers_that_can_be_old_tell_no_moment() {
    let mut w = Web::new(Sees::Prefill);
    w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    for n in 1..40 {
        let gauges = EngineGauges {
            server: pid(Role::Prefill),
            role: Some(Role::Prefill),
            inflight: Some(1),
            waiting: Some(0),
            stale: true,
            ..EngineGauges::default()
        };
        let at = w.at();
        w.input(&Input::Gauges { at, gauges: &gauges });
        w.healthy(n, &decode(0), &prefill(0), 1000);
    }
    w.never_paged(ROOM);
}

// M4

/// Rooms of NIXL with their requests, an ABORT, and whether a thread ends 20 ms after it; then later rooms.
fn after_an_abort(layout: Layout, dies: bool) -> Web {
    let mut w = Web::with(Sees::Prefill, layout);
    let p = w.request(Role::Prefill, 1);
    w.metadata(1, &decode(0), &prefill(0));
    w.wait(1000);
    w.finished(p);
    w.wait(1000);
    w.abort(2, &decode(0), &prefill(0), None);
    w.wait(20);
    if dies {
        let name = Comm::from("sglang::schedul".to_owned());
        let task = Task { tgid: prefill(0).pid, tid: 24_000, comm: name, cgroup: 0 };
        let what = TaskChange::Exited { code: 0, process: false };
        let at = w.at();
        w.input(&Input::Task(TaskEvent { at, task, name, what }));
    }
    w.wait(500);
    w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(12_000);
    w
}

#[test]
fn an_abort_that_kills_the_receive_thread_of_nixl_is_named() {
    let w = after_an_abort(NIXL_M4, true);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Certain));
    assert!(v.evidence.iter().any(|e| e.contains("an ABORT, of which")), "{:?}", v.evidence);
    assert!(v.evidence.iter().any(|e| e.contains("thread 24000")), "{:?}", v.evidence);
    let last = w.last(ROOM);
    let issues = known_issues(v.class, last.backend, last.releases);
    assert!(issues.iter().any(|i| i.url.ends_with("/30352") && i.applies == "yes"), "{issues:?}");
}

#[test]
fn an_abort_of_another_release_or_without_a_dead_thread_kills_nothing() {
    for (layout, dies) in [(NIXL_OLD, true), (NIXL_M4, false)] {
        let w = after_an_abort(layout, dies);
        assert!(w.last(ROOM).verdict.is_none_or(|v| v.confidence < Confidence::Certain));
    }
}

// M19, M15

/// Every STATUS has come to decode; its ABORT comes 20 s later.
fn aborted_late(how: &str) -> Finding {
    let mut w = Web::new(Sees::Decode);
    let key = w.request(Role::Decode, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(20_000);
    match how {
        "hung up" => w.hung_up(key, Side::Client),
        "lost sight of" => w.out_of_sight(key),
        _ => {}
    }
    w.abort(ROOM, &decode(0), &prefill(0), Some(1));
    found(&w, Class::ConcludedButHeld).unwrap()
}

#[test]
fn an_abort_of_a_room_whose_client_still_waits_is_that_of_a_dead_status_thread() {
    assert_eq!(aborted_late("").confidence, Confidence::Certain);
}

#[test]
fn an_abort_after_a_hang_up_may_be_a_pause_or_lost_aux_data() {
    for how in ["hung up", "lost sight of"] {
        let f = aborted_late(how);
        assert_eq!(f.confidence, Confidence::Likely, "{how}");
        assert!(f.evidence.iter().any(|e| e.contains("M15")), "{:?}", f.evidence);
    }
}

/// Every STATUS that came to the first `here` of decode's two ranks is there; the client waits, or hangs up after 15 s.
fn aborted_late_by_two(here: u8, registered: bool, hangs_up: bool) -> Finding {
    let mut w = Web::bare(Sees::Decode, MOONCAKE, Config::default());
    w.know();
    let key = w.request(Role::Decode, ROOM);
    for d in (0..here).map(|n| decode_of(n, 2)) {
        if registered {
            w.register(&d, &prefill(0));
        }
        w.metadata(ROOM, &d, &prefill(0));
    }
    for n in 0..here {
        w.status(ROOM, &prefill(0), &decode_of(n, 2), KvPoll::Success);
    }
    w.wait(if hangs_up { 15_000 } else { 300_000 });
    if hangs_up {
        w.hung_up(key, Side::Client);
    }
    w.abort(ROOM, &decode_of(0, 2), &prefill(0), Some(1));
    found(&w, Class::ConcludedButHeld).unwrap()
}

#[test]
fn a_rank_that_has_all_aborts_for_one_elsewhere_and_is_not_accused() {
    for (registered, hangs_up) in [(true, false), (true, true), (false, false)] {
        let f = aborted_late_by_two(1, registered, hangs_up);
        assert_eq!(f.confidence, Confidence::Possible, "{registered} {hangs_up}");
        assert!(f.actions.iter().all(|a| !a.clears && !a.command.contains("kill")), "{:?}", f.actions);
        let says = if registered { "its REGISTER says 2" } else { "no REGISTER of it was seen" };
        assert!(f.evidence[1].starts_with("1 ranks of decode were seen here"), "{:?}", f.evidence);
        assert!(f.evidence[1].contains(says), "{:?}", f.evidence);
    }
}

#[test]
fn ranks_of_decode_that_are_all_here_have_nobody_to_wait_for() {
    for (hangs_up, confidence) in [(false, Confidence::Certain), (true, Confidence::Likely)] {
        let f = aborted_late_by_two(2, true, hangs_up);
        assert_eq!(f.confidence, confidence);
        assert!(f.actions.iter().any(|a| a.command == "kill -TERM 200"), "{:?}", f.actions);
    }
}

/// Answers of decode every 15 s for `s` seconds.
fn transfers(w: &mut Web, s: u64, count: u64) {
    for _ in 0..=s / 15 {
        w.gauges(Role::Decode, count, count, 0);
        w.wait(15_000);
    }
}

#[test]
fn decode_that_counts_a_transfer_whose_status_has_come_holds_it() {
    let mut w = Web::new(Sees::Decode);
    transfers(&mut w, 0, 0);
    w.request(Role::Decode, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    transfers(&mut w, 60, 1);
    let f = found(&w, Class::ConcludedButHeld).unwrap();
    assert_eq!((f.confidence, f.engine.role), (Confidence::Possible, Some(Role::Decode)));
    assert!(f.evidence.iter().any(|e| e.contains("M15")), "{:?}", f.evidence);
    transfers(&mut w, 0, 0);
    assert_eq!(found(&w, Class::ConcludedButHeld), None);
}

/// A room that waits at another decode engine explains nothing at this one.
#[test]
fn a_room_of_another_decode_engine_hides_nothing() {
    let mut w = Web::new(Sees::Decode);
    w.process(95, 95, Some(Role::Decode));
    w.process(decode(1).pid, 95, None);
    w.register(&decode(1), &prefill(0));
    transfers(&mut w, 0, 0);
    w.request(Role::Decode, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.metadata(ROOM + 1, &decode(1), &prefill(0));
    // One that only its request tells of.
    let place = "10.0.0.2:30001".parse().unwrap();
    let connection = w.connection(place, true, Some(task(95)));
    w.ask_on(connection, true, &work(&[ROOM + 2], "r-2"));
    transfers(&mut w, 60, 1);
    assert!(found(&w, Class::ConcludedButHeld).is_some());
}

#[test]
fn decode_that_waits_for_an_open_room_or_has_what_is_older_holds_nothing() {
    let mut w = Web::new(Sees::Decode);
    w.serve(1, 20);
    transfers(&mut w, 120, 1);
    assert_eq!(found(&w, Class::ConcludedButHeld), None, "it was there from the first answer on");
    transfers(&mut w, 0, 0);
    w.request(Role::Decode, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    transfers(&mut w, 120, 1);
    assert_eq!(found(&w, Class::ConcludedButHeld), None);
}

// upstream reports of findings

#[test]
fn findings_know_the_release_that_their_rooms_and_their_engine_show() {
    let mut w = Web::with(Sees::Both, MOONCAKE);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(12_000);
    let f = &w.table.findings()[0];
    assert_eq!(f.engine.backend, Some(Backend::Mooncake));
    assert_eq!(f.engine.releases.map(|r| r.max), Some(r(5, 23)));
    let issues = known_issues(f.class, f.engine.backend, f.engine.releases);
    assert!(!issues.is_empty() && issues.iter().all(|i| i.applies == "no"), "{issues:?}");
}
