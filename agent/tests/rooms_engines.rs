//! What engines say of themselves against what is seen of them: whose a process is, counts that no room explains, rooms that
//! are not counted, engines that cannot be read.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod rooms_support;

use roomtrace::control::Limits;
use roomtrace::event::{
    Addresses, Direction, Event as Happened, Found, Mono, SECOND, Sequence, SocketEvent, SocketId, TcpState,
    What,
};
use roomtrace::http::event::{Rooms, WhereSeen, Work};
use roomtrace::pipeline::Pipeline;
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{
    Connection, EngineGauges, EngineProcess, FindingEvent, Input, Place, RequestStep, Role, Unreadable,
};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence, Finding};

use rooms_support::*;

const SERVER: u32 = 90;
const ROOM: u64 = 7_000_000_000_000_000_001;

fn place() -> Place {
    Place {
        container: Some("c".repeat(64)),
        pod_uid: Some("3ca9f1e6-2b1d-4b7e-9a55-0f6f5e2d9c11".to_owned()),
        name: None,
    }
}

/// The world's prefill ranks 100 … as processes of one engine, its server above them.
fn engine(w: &mut World, role: Option<Role>, ranks: u8) {
    let process = |pid, ranks: Option<String>| EngineProcess {
        pid,
        server: SERVER,
        started: 1000 + u64::from(pid),
        comm: "sglang::schedul".to_owned(),
        role,
        ranks,
        http_port: Some(30000),
        place: place(),
        ..EngineProcess::default()
    };
    let at = w.mono();
    w.input(&Input::Process { at, process: &process(SERVER, None) });
    for n in 0..ranks {
        let rank = process(100 + u32::from(n), Some(format!("DP{n} TP0")));
        w.input(&Input::Process { at, process: &rank });
    }
}

fn gauges(inflight: u64) -> EngineGauges {
    EngineGauges {
        server: SERVER,
        role: Some(Role::Prefill),
        version: Some("0.5.23".to_owned()),
        inflight: Some(inflight),
        bootstrap: Some(0),
        waiting: Some(0),
        running: Some(0),
        progress: Some(4711),
        address: Some("127.0.0.1:30000".parse().unwrap()),
        ..EngineGauges::default()
    }
}

/// Answers every 15 s for `s` seconds, and what is found is kept.
fn answers(w: &mut World, s: u64, g: impl Fn(u64) -> EngineGauges) {
    for n in 0..=s / 15 {
        if n > 0 {
            w.wait(15_000);
        }
        let at = w.mono();
        w.input(&Input::Gauges { at, gauges: &g(n) });
    }
}

fn findings(w: &World) -> Vec<Finding> {
    w.table
        .findings()
        .into_iter()
        .filter(|f| f.room_count == 0 || f.class == Class::GaugeUnexplained)
        .collect()
}

fn only(w: &World) -> Finding {
    let mut all = findings(w);
    assert_eq!(all.len(), 1, "{all:?}");
    all.pop().unwrap()
}

fn says(f: &Finding, what: &str) -> bool {
    f.evidence.iter().any(|e| e.contains(what))
}

// processes

#[test]
fn a_debtor_is_named_with_its_container_pod_and_ranks() {
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    let (p, d) = (prefill(0), decode(0));
    w.metadata(1, &d, &p);
    w.status(1, &p, &d, KvPoll::Success);
    w.metadata(ROOM, &d, &p);
    w.wait(20_000);
    let (_, v) = w.pin(ROOM).unwrap();
    let owes = v.owed_by.as_ref().unwrap();
    assert_eq!(owes.place.as_deref(), Some(&place()));
    assert_eq!(owes.rank_names.as_deref(), Some("DP0 TP0"));
    assert_eq!(w.table.server_of(100), Some(SERVER));
    assert_eq!(w.table.server_of(101), None);
    assert_eq!(w.table.role_of_process(100), Some(Role::Prefill));
    // What is known of it stays when it has ended: its rooms are still there.
    w.table.forget_process(100);
    assert_eq!(w.verdict(ROOM).owed_by.unwrap().place.as_deref(), Some(&place()));
    assert_eq!(w.table.engine_processes().count(), 1, "the server is left");
}

#[test]
fn a_role_that_arguments_do_not_tell_is_what_the_engine_says() {
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, None, 1);
    assert_eq!(w.table.role_of_process(100), None);
    let at = w.mono();
    w.input(&Input::Gauges { at, gauges: &gauges(0) });
    assert_eq!(w.table.role_of_process(100), Some(Role::Prefill));
}

#[test]
fn a_room_has_what_its_engine_said_in_numbers_while_it_was_open() {
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    let (p, d) = (prefill(0), decode(0));
    // Before the room.
    answers(&mut w, 15, |n| EngineGauges { progress: Some(n), ..gauges(0) });
    w.wait(5000);
    w.metadata(ROOM, &d, &p);
    let begun = w.mono();
    answers(&mut w, 45, |_| gauges(1));
    let told = w.table.details(ROOM).remove(0).numbers;
    let [first, rest @ ..] = &told[..] else { panic!("{told:?}") };
    assert_eq!((first.role, first.inflight, first.moves), (Role::Prefill, Some(1), Some(true)), "{told:?}");
    assert!(told.iter().all(|n| n.from >= begun), "{told:?}");
    assert!(matches!(rest, [n] if n.moves == Some(false) && n.inflight == Some(1)), "{told:?}");
}

#[test]
fn processes_are_bounded_and_the_ended_make_room() {
    let mut w = World::new(Sees::Prefill);
    let at = w.mono();
    for pid in 1..=1024 {
        let process = EngineProcess { pid, server: pid, ..EngineProcess::default() };
        w.input(&Input::Process { at, process: &process });
    }
    let more = EngineProcess { pid: 5000, server: 5000, ..EngineProcess::default() };
    w.input(&Input::Process { at, process: &more });
    assert_eq!((w.table.server_of(5000), w.table.engine_processes_turned_away()), (None, 1));
    w.table.forget_process(17);
    w.input(&Input::Process { at, process: &more });
    assert_eq!((w.table.server_of(5000), w.table.server_of(17)), (Some(5000), None));
}

// gauge_unexplained

#[test]
fn a_request_older_than_the_agent_is_found_within_a_minute() {
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    w.wait(1000);
    answers(&mut w, 30, |_| gauges(1));
    assert!(findings(&w).is_empty(), "not yet: {:?}", findings(&w));
    w.wait(15_000);
    let rank = connection(1, 100, "10.0.0.1:50000", "10.0.0.2:42000", true);
    let router = connection(2, SERVER, "10.0.0.1:30000", "10.0.0.9:5555", true);
    let us = connection(3, SERVER, "127.0.0.1:30000", "127.0.0.1:30000", true);
    w.table.open_connections(SERVER, vec![(rank, true), (router, true), (us, true)]);
    let at = w.mono();
    w.input(&Input::Gauges { at, gauges: &gauges(1) });
    assert!(w.now_s() < 60.0);
    let f = only(&w);
    assert_eq!((f.class, f.confidence), (Class::GaugeUnexplained, Confidence::Likely));
    assert_eq!((f.engine.task.unwrap().tgid, f.engine.role), (SERVER, Some(Role::Prefill)));
    assert_eq!(f.engine.place.as_deref(), Some(&place()));
    assert!(says(&f, "1 in its inflight queue") && says(&f, "older than the agent"), "{:?}", f.evidence);
    assert!(
        says(&f, "stood still") && says(&f, "10.0.0.2:42000") && says(&f, "10.0.0.9:5555"),
        "{:?}",
        f.evidence
    );
    assert!(
        !says(&f, "127.0.0.1:30000"),
        "the agent's own question is none of its clients: {:?}",
        f.evidence
    );
    assert!(f.actions.iter().any(|a| a.command.contains("http://127.0.0.1:30000/v1/loads")));
    let told: Vec<_> = w.table.finding_events().collect();
    assert!(matches!(told.as_slice(), [FindingEvent::Opened(_)]), "{told:?}");
    // It ends.
    answers(&mut w, 0, |_| gauges(0));
    assert!(findings(&w).is_empty());
    let told: Vec<_> = w.table.finding_events().collect();
    assert!(matches!(told.as_slice(), [FindingEvent::Closed(_)]), "{told:?}");
}

fn connection(id: u64, pid: u32, local: &str, peer: &str, preexisting: bool) -> Connection {
    let task =
        roomtrace::event::Task { tgid: pid, tid: pid, comm: roomtrace::event::Comm::default(), cgroup: 0 };
    Connection {
        socket: SocketId(id),
        addresses: Addresses { local: local.parse().unwrap(), peer: peer.parse().unwrap() },
        netns: 1,
        task: Some(task),
        preexisting,
        since: Mono(START),
    }
}

#[test]
fn rooms_that_are_seen_explain_a_count() {
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    w.metadata(ROOM, &decode(0), &prefill(0));
    answers(&mut w, 90, |_| gauges(1));
    assert!(findings(&w).is_empty(), "{:?}", findings(&w));
    // A second one is not explained by it.
    answers(&mut w, 60, |_| gauges(2));
    assert!(says(&only(&w), "2 in its inflight queue") && says(&only(&w), "1 of which"));
    assert!(!says(&only(&w), "older than the agent"));
}

#[test]
fn a_room_of_an_unknown_process_explains_one_too() {
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    // Rank 5 is no process that is known.
    w.metadata(ROOM, &decode(0), &prefill(5));
    answers(&mut w, 90, |_| gauges(1));
    assert!(findings(&w).is_empty(), "{:?}", findings(&w));
}

#[test]
fn a_count_that_falls_or_an_engine_that_computes_is_no_finding() {
    let falls = |n: u64| gauges(if n.is_multiple_of(3) { 1 } else { 2 });
    // What it computes is not seen.
    let computes = |n: u64| EngineGauges { progress: Some(n), ..gauges(1) };
    let paused = |_| EngineGauges { paused: Some(3), ..gauges(1) };
    let asks: [&dyn Fn(u64) -> EngineGauges; 3] = [&falls, &computes, &paused];
    for (n, asks) in asks.into_iter().enumerate() {
        let mut w = World::new(Sees::Prefill);
        engine(&mut w, Some(Role::Prefill), 1);
        answers(&mut w, 300, asks);
        assert!(findings(&w).is_empty(), "{n}: {:?}", findings(&w));
    }
}

/// Rooms come and go beside it, and the engine's counters move.
#[test]
fn a_request_older_than_the_agent_is_found_beside_others() {
    let (p, d) = (prefill(0), decode(0));
    // A room each 15 s, over 12 s before the engine is asked; in the other case it is over just then, and may be counted still.
    let run = |early: bool, inflight: &dyn Fn(u64) -> u64| {
        let mut w = World::new(Sees::Prefill);
        engine(&mut w, Some(Role::Prefill), 1);
        for n in 0..8 {
            let (before, after) = if early { (2_000, 13_000) } else { (14_500, 500) };
            w.wait(before);
            w.healthy(100 + n, &d, &p, 10);
            w.wait(after);
            let at = w.mono();
            let gauges = EngineGauges { progress: Some(n * 1000), ..gauges(inflight(n)) };
            w.input(&Input::Gauges { at, gauges: &gauges });
        }
        w
    };
    let w = run(true, &|_| 1);
    let f = only(&w);
    assert_eq!((f.class, f.confidence), (Class::GaugeUnexplained, Confidence::Possible));
    assert!(says(&f, "at least 1") && says(&f, "older than the agent"), "{:?}", f.evidence);
    // One of those that are just over may be counted still.
    let w = run(false, &|_| 1);
    assert!(findings(&w).is_empty(), "{:?}", findings(&w));
    // Others that it counts meanwhile do not hide it.
    assert_eq!(only(&run(true, &|n| 1 + n % 2)).confidence, Confidence::Possible);
    // What is gone at times is not one that stays.
    let w = run(true, &|n| u64::from(n % 3 != 2));
    assert!(findings(&w).is_empty(), "{:?}", findings(&w));
}

#[test]
fn a_count_may_be_high_while_a_room_is_open() {
    let (p, d) = (prefill(0), decode(0));
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    answers(&mut w, 30, |_| gauges(1));
    // It may be the one that is counted, or not be counted yet.
    w.metadata(ROOM, &d, &p);
    answers(&mut w, 0, |_| gauges(1));
    w.status(ROOM, &p, &d, KvPoll::Success);
    assert!(findings(&w).is_empty(), "{:?}", findings(&w));
    w.wait(12_000);
    answers(&mut w, 15, |_| gauges(1));
    assert_eq!(only(&w).class, Class::GaugeUnexplained);
}

#[test]
fn a_request_that_waits_for_metadata_and_is_older_than_the_agent_is_possible() {
    let waits = |_| EngineGauges { bootstrap: Some(1), ..gauges(0) };
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    answers(&mut w, 45, waits);
    let f = only(&w);
    assert_eq!((f.class, f.confidence), (Class::GaugeUnexplained, Confidence::Possible));
    assert!(
        says(&f, "num_prefill_bootstrap_queue_reqs") && says(&f, "older than the agent"),
        "{:?}",
        f.evidence
    );
    answers(&mut w, 0, |_| gauges(0));
    assert!(findings(&w).is_empty());
    // A room that is seen explains it, wherever it waits.
    w.metadata(ROOM, &decode(0), &prefill(0));
    answers(&mut w, 90, waits);
    assert!(findings(&w).iter().all(|f| f.class != Class::GaugeUnexplained), "{:?}", findings(&w));
}

/// A request that waits at another engine of the host says nothing of this one's count.
#[test]
fn a_request_at_another_engine_explains_nothing() {
    let (mut w, other) = (World::new(Sees::Prefill), 190);
    engine(&mut w, Some(Role::Prefill), 1);
    let at = w.mono();
    let process = EngineProcess {
        pid: other,
        server: other,
        started: 1,
        comm: "python".to_owned(),
        role: Some(Role::Prefill),
        http_port: Some(31000),
        ..EngineProcess::default()
    };
    w.input(&Input::Process { at, process: &process });
    let rooms = Rooms::Named {
        rooms: [Some(ROOM)].into_iter().collect(),
        complete: true,
        maybe_more: false,
        seen: WhereSeen::Whole,
    };
    let work = Work { rooms, rids: Vec::new() };
    let connection = connection(9, other, "10.0.0.1:31000", "10.0.0.9:5556", false);
    let step = RequestStep::Asked { work: &work };
    w.input(&Input::Request { at, connection, server: true, n: 0, step });
    answers(&mut w, 60, |_| gauges(1));
    assert_eq!(only(&w).class, Class::GaugeUnexplained);
}

#[test]
fn without_progress_counters_or_from_an_old_count_it_is_possible() {
    let untold = |_| EngineGauges { progress: None, version: Some("0.5.22".to_owned()), ..gauges(1) };
    let stale = |_| EngineGauges { stale: true, ..gauges(1) };
    let waits = |_| EngineGauges { waiting: Some(1), ..gauges(1) };
    let asks: [&dyn Fn(u64) -> EngineGauges; 3] = [&untold, &stale, &waits];
    for asks in asks {
        let mut w = World::new(Sees::Prefill);
        engine(&mut w, Some(Role::Prefill), 1);
        answers(&mut w, 60, asks);
        assert_eq!(only(&w).confidence, Confidence::Possible);
    }
}

#[test]
fn data_parallel_ranks_are_compared_each_for_itself() {
    let two = |_| EngineGauges { inflight_by_dp: vec![(0, 0), (1, 1)], ..gauges(1) };
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 2);
    // The room is at DP0, the count at DP1.
    w.metadata(ROOM, &decode(0), &prefill(0));
    answers(&mut w, 60, two);
    assert_eq!(only(&w).class, Class::GaugeUnexplained);
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 2);
    w.metadata(ROOM, &decode(0), &prefill(1));
    answers(&mut w, 60, two);
    assert!(findings(&w).is_empty(), "{:?}", findings(&w));
}

#[test]
fn one_request_without_any_wire_on_an_old_release_is_a_ghost() {
    let old = |_| EngineGauges { version: Some("0.5.20".to_owned()), ..gauges(1) };
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    answers(&mut w, 60, old);
    assert_eq!((only(&w).class, only(&w).confidence), (Class::LocalGhost, Confidence::Possible));
    // With ranks that it has handed rooms over to, it can be one of theirs.
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    w.healthy(1, &decode(0), &prefill(0), 10);
    answers(&mut w, 60, old);
    assert_eq!(only(&w).class, Class::GaugeUnexplained);
    assert!(says(&only(&w), "10.0.0.2:42000") && says(&only(&w), "28652"), "{:?}", only(&w).evidence);
}

#[test]
fn a_failed_question_changes_nothing_and_the_end_of_the_engine_ends_it() {
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    answers(&mut w, 60, |_| gauges(1));
    let failed =
        EngineGauges { server: SERVER, error: Some("no answer".to_owned()), ..EngineGauges::default() };
    answers(&mut w, 60, |_| failed.clone());
    assert_eq!(findings(&w).len(), 1);
    w.table.forget_process(SERVER);
    assert!(findings(&w).is_empty());
    // Another engine begins anew, and what is said of one that is not known is no matter.
    answers(&mut w, 90, |_| gauges(1));
    assert!(findings(&w).is_empty());
}

#[test]
fn decode_and_engines_without_a_role_are_not_judged_by_their_counts() {
    for role in [Some(Role::Decode), None] {
        let mut w = World::new(Sees::Both);
        engine(&mut w, role, 1);
        answers(&mut w, 120, |_| EngineGauges { role, ..gauges(1) });
        assert!(findings(&w).is_empty());
    }
}

#[test]
fn pinned_rooms_that_their_engine_does_not_count_are_named() {
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(20_000);
    assert!(w.pin(ROOM).is_some());
    answers(&mut w, 30, |_| gauges(0));
    let uncounted = |w: &World| w.table.findings().into_iter().find(|f| f.class == Class::GaugeUnexplained);
    assert_eq!(uncounted(&w), None);
    answers(&mut w, 30, |_| gauges(0));
    let f = uncounted(&w).unwrap();
    assert_eq!((f.rooms.as_slice(), f.confidence), (&[ROOM][..], Confidence::Possible));
    // Once it counts it, all is as it seems.
    answers(&mut w, 0, |_| gauges(1));
    assert_eq!(uncounted(&w), None);
}

/// It was empty already when the room began: its request has never come to its scheduler.
#[test]
fn a_pinned_room_of_an_engine_that_has_been_empty_all_along_is_named() {
    let uncounted = |w: &World| w.table.findings().into_iter().find(|f| f.class == Class::GaugeUnexplained);
    let run = |sees, stale| {
        let mut w = World::new(sees);
        engine(&mut w, Some(Role::Prefill), 1);
        let g = move |_| EngineGauges { stale, ..gauges(0) };
        answers(&mut w, 60, g);
        w.metadata(ROOM, &decode(0), &prefill(0));
        answers(&mut w, 45, g);
        assert!(w.pin(ROOM).is_some());
        assert_eq!(uncounted(&w), None, "its server may be at work on it for a minute");
        answers(&mut w, 30, g);
        w
    };
    let f = uncounted(&run(Sees::Prefill, false)).unwrap();
    assert_eq!((f.rooms.as_slice(), f.confidence), (&[ROOM][..], Confidence::Possible));
    // What can be old may have stood at nothing since before the room.
    assert_eq!(uncounted(&run(Sees::Prefill, true)), None);
    // From decode's host alone the room's prefill is another's.
    assert_eq!(uncounted(&run(Sees::Decode, false)), None);
}

/// From the sockets that a source finds at its start: the connections of an engine that nobody says anything on.
#[test]
fn idle_connections_that_the_source_finds_are_named() {
    let mut pipeline = Pipeline::new(Limits::default(), Config::default());
    let second = |n: u64| Mono(START + n * SECOND);
    let found = |c: Connection| SocketEvent {
        at: second(0),
        socket: c.socket,
        netns: c.netns,
        addresses: c.addresses,
        task: c.task,
        what: What::Found(Found { state: TcpState::Established, sequence: Sequence::default(), base: None }),
    };
    for c in [
        connection(1, 100, "10.0.0.1:50000", "10.0.0.2:42000", true),
        connection(2, SERVER, "10.0.0.1:30000", "10.0.0.9:5555", true),
        connection(3, 777, "10.0.0.1:50001", "10.0.0.3:42000", true),
    ] {
        pipeline.take(&Happened::Socket(found(c)));
    }
    for pid in [SERVER, 100] {
        let (http_port, role) = (Some(30000), Some(Role::Prefill));
        let process = EngineProcess { pid, server: SERVER, role, http_port, ..EngineProcess::default() };
        pipeline.tell(&Input::Process { at: second(1), process: &process });
    }
    for n in 0..4 {
        pipeline.tell(&Input::Gauges { at: second(2 + 15 * n), gauges: &gauges(1) });
    }
    let all = pipeline.rooms().findings();
    let [f] = all.as_slice() else { panic!("{all:?}") };
    assert!(says(f, "10.0.0.2:42000") && says(f, "10.0.0.9:5555"), "{:?}", f.evidence);
    assert!(!says(f, "10.0.0.3"), "another process's: {:?}", f.evidence);
}

// nothing_readable

fn unreadable(w: &mut World, why: Unreadable) {
    let (at, connection) = (w.mono(), connection(9, SERVER, "10.0.0.1:30000", "10.0.0.9:5555", false));
    w.input(&Input::Unreadable { at, connection, why });
}

#[test]
fn an_engine_of_which_nothing_can_be_read_is_named_with_the_cause() {
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    unreadable(&mut w, Unreadable::Tls);
    unreadable(&mut w, Unreadable::Tls);
    w.wait(55_000);
    assert!(findings(&w).is_empty(), "it is given time");
    w.wait(15_000);
    let f = only(&w);
    assert_eq!((f.class, f.confidence), (Class::NothingReadable, Confidence::Possible));
    assert!(says(&f, "2 tls"), "{:?}", f.evidence);
    answers(&mut w, 15, |_| gauges(1));
    w.wait(10_000);
    assert_eq!(only(&w).confidence, Confidence::Likely, "by its own count it works");
    // The first message that can be read ends it.
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(10_000);
    assert!(findings(&w).iter().all(|f| f.class != Class::NothingReadable), "{:?}", findings(&w));
}

#[test]
fn an_engine_that_can_be_read_or_need_not_be_is_not_blind() {
    // Messages are read, though its front is encrypted.
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    unreadable(&mut w, Unreadable::Tls);
    w.healthy(1, &decode(0), &prefill(0), 10);
    w.wait(120_000);
    assert!(findings(&w).is_empty(), "{:?}", findings(&w));
    // It hands nothing over.
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, None, 1);
    unreadable(&mut w, Unreadable::Tls);
    w.wait(120_000);
    assert!(findings(&w).is_empty());
    // Its other connections are none of ours, and it is idle.
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    unreadable(&mut w, Unreadable::Other);
    w.wait(120_000);
    assert!(findings(&w).is_empty());
    // One connection may turn out to be readable.
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    unreadable(&mut w, Unreadable::Tls);
    let idle = connection(1, 100, "10.0.0.1:50000", "10.0.0.2:42000", true);
    w.table.open_connections(SERVER, vec![(idle, true)]);
    w.wait(120_000);
    assert!(findings(&w).is_empty());
}

#[test]
fn an_engine_that_works_unseen_is_blindness_also_without_a_connection() {
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 1);
    w.table.open_connections(SERVER, Vec::new());
    let busy = |n| EngineGauges { running: Some(2), progress: Some(n), ..gauges(0) };
    answers(&mut w, 90, busy);
    let f = only(&w);
    assert_eq!((f.class, f.confidence), (Class::NothingReadable, Confidence::Likely));
    assert!(says(&f, "no open connection"), "{:?}", f.evidence);
    w.table.mptcp_met(3);
    w.wait(10_000);
    assert!(says(&only(&w), "3 mptcp"), "{:?}", only(&w).evidence);
}

#[test]
fn any_numbers_are_taken() {
    let mut w = World::new(Sees::Prefill);
    engine(&mut w, Some(Role::Prefill), 2);
    let odd = EngineGauges {
        inflight: Some(u64::MAX),
        inflight_by_dp: vec![(0, u64::MAX), (0, u64::MAX), (9, u64::MAX)],
        bootstrap: Some(u64::MAX),
        version: Some("x".repeat(64)),
        ..gauges(0)
    };
    answers(&mut w, 90, |n| if n.is_multiple_of(2) { odd.clone() } else { gauges(0) });
    let connection = w.end(&decode(0), &prefill(0), Direction::Received);
    for why in Unreadable::ALL {
        let at = w.mono();
        w.input(&Input::Unreadable { at, connection, why });
    }
}
