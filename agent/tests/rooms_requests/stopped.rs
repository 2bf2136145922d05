//! Engines of this host that do nothing any more: what they have not read is not missing, and long steps look like hangs.

use roomtrace::event::{Comm, Direction, Sequence, Stand, Task, TaskChange, TaskEvent, TcpState};
use roomtrace::http::event::Side;
use roomtrace::rooms::model::{EngineGauges, Input, Role};
use roomtrace::sglang::message::{Endpoint, Message, Metadata};
use roomtrace::verdict::model::{Class, Confidence};

use super::ROOM;
use super::rooms_support::*;
use super::web::*;

/// Both engines here, with two sessions, and a prefill that has worked; threads are watched.
fn working() -> Web {
    let mut w = Web::new(Sees::Both);
    w.register(&decode(1), &prefill(0));
    w.serve(1, 20);
    w.healthy(2, &decode(1), &prefill(0), 20);
    ends(&mut w, 4242);
    numbers(&mut w, 0, false);
    w
}

fn ends(w: &mut Web, pid: u32) {
    let name = Comm::from("sglang::schedul".to_owned());
    let task = Task { tgid: pid, tid: 23_357, comm: name, cgroup: 0 };
    let what = TaskChange::Exited { code: 0, process: false };
    let at = w.mono();
    w.input(&Input::Task(TaskEvent { at, task, name, what }));
}

fn numbers(w: &mut Web, progress: u64, stale: bool) {
    let gauges = EngineGauges {
        server: pid(Role::Prefill),
        role: Some(Role::Prefill),
        inflight: Some(0),
        waiting: Some(0),
        progress: Some(progress),
        stale,
        ..EngineGauges::default()
    };
    let at = w.mono();
    w.input(&Input::Gauges { at, gauges: &gauges });
}

/// METADATA that prefill's kernel takes and prefill does not read.
fn unread(w: &mut Web, room: u64, d: &Rank) {
    let host = d.endpoint.ip().to_string();
    let m = Metadata {
        room,
        decode: Some(Endpoint { ip: Some(d.endpoint.ip()), host: &host, port: d.endpoint.port() }),
        session: &d.session,
        pages: 8,
        aux_index: Some(3),
        dummy: Some(false),
        required: Some(d.size),
        decode_prefix_len: Some(0),
    };
    let layout = w.layout;
    w.leave(d, &prefill(0), layout.backend, layout.metadata, Message::Metadata(m), false);
}

fn lies(w: &mut Web) {
    let socket = w.end(&decode(0), &prefill(0), Direction::Received).socket;
    let sequence = Sequence { write: 1, una: 1, copied: 1000, rcv_nxt: 1300 };
    let stand = Stand { state: TcpState::Established, sequence, sent: 1, retransmits: 0 };
    let at = w.mono();
    w.input(&Input::Stand { at, socket, stand });
}

fn verdict(w: &Web) -> (Class, Confidence, Option<Role>) {
    let v = w.verdict(ROOM);
    (v.class, v.confidence, v.owed_by.and_then(|p| p.role))
}

#[test]
fn metadata_that_a_stopped_prefill_does_not_read_is_not_missing_from_decode() {
    let mut w = working();
    w.to(1000);
    for n in 0..4 {
        let d = decode(u8::try_from(n % 2).unwrap());
        w.request(Role::Prefill, ROOM + n);
        w.request(Role::Decode, ROOM + n);
        unread(&mut w, ROOM + n, &d);
    }
    for n in 0..2 {
        let una = w.sent_to(&decode(n), &prefill(0));
        w.acknowledge(&decode(n), &prefill(0), una);
    }
    let from = Some(Role::Prefill);
    w.to(12_000);
    assert_eq!(verdict(&w), (Class::ReceiverSilent, Confidence::Possible, from));
    for s in 0..20 {
        lies(&mut w);
        numbers(&mut w, 0, true);
        w.wait(5000);
        let expected = match s {
            0..9 => Some(Class::ReceiverSilent),
            9..11 => None,
            _ => Some(Class::EngineStalled),
        };
        if let Some(class) = expected {
            assert_eq!(verdict(&w), (class, Confidence::Likely, from), "{s}");
        }
    }
    assert!(w.verdict(ROOM).actions.iter().any(|a| a.command == "kill -TERM 100"));
    assert!(
        w.events(ROOM)
            .iter()
            .all(|e| { e.snapshot().verdict.as_ref().is_none_or(|v| v.class != Class::MetadataIncomplete) })
    );
}

#[test]
fn a_rank_of_decode_that_has_not_sent_is_missing_though_prefill_has_read_nothing() {
    let mut w = Web::new(Sees::Both);
    w.register(&decode_of(0, 2), &prefill(0));
    w.register(&decode_of(1, 2), &prefill(0));
    w.request(Role::Prefill, ROOM);
    unread(&mut w, ROOM, &decode_of(0, 2));
    w.to(12_000);
    assert_eq!(verdict(&w), (Class::MetadataIncomplete, Confidence::Possible, Some(Role::Decode)));
    // Of a rank that does not read, nothing can be said to be missing.
    for _ in 0..2 {
        lies(&mut w);
        w.wait(4000);
    }
    assert_eq!(verdict(&w), (Class::ReceiverSilent, Confidence::Likely, Some(Role::Prefill)));
}

#[test]
fn a_scheduler_that_writes_no_numbers_may_be_in_one_long_step() {
    let mut w = working();
    for n in 0..4 {
        w.request(Role::Prefill, ROOM + n);
        w.metadata(ROOM + n, &decode(u8::try_from(n % 2).unwrap()), &prefill(0));
    }
    for _ in 0..24 {
        w.wait(5000);
        numbers(&mut w, 0, true);
    }
    assert_eq!(verdict(&w), (Class::EngineStalled, Confidence::Possible, Some(Role::Prefill)));
    w.never_paged(ROOM);
    let v = w.verdict(ROOM);
    assert!(v.evidence.iter().any(|e| e.contains("its scheduler last wrote")), "{:?}", v.evidence);
}

#[test]
fn a_thread_that_ended_while_the_engine_computes_is_not_certainly_the_one_that_reads() {
    let mut w = working();
    w.to(1000);
    w.foreign(&prefill(0));
    w.wait(21);
    ends(&mut w, prefill(0).pid);
    w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    for n in 1..8 {
        numbers(&mut w, n, false);
        w.wait(5000);
    }
    // In the middle of a long step.
    for _ in 0..8 {
        numbers(&mut w, 7, true);
        w.wait(5000);
    }
    assert_eq!(verdict(&w), (Class::ReceiverSilent, Confidence::Possible, Some(Role::Prefill)));
    w.never_paged(ROOM);
    for _ in 0..2 {
        numbers(&mut w, 7, false);
        w.wait(1000);
    }
    assert_eq!(verdict(&w), (Class::ReceiverSilent, Confidence::Certain, Some(Role::Prefill)));
}

/// A process of this host ends.
fn dies(w: &mut Web, pid: u32) {
    let name = Comm::from("sglang::schedul".to_owned());
    let task = Task { tgid: pid, tid: pid, comm: name, cgroup: 0 };
    let what = TaskChange::Exited { code: 9, process: true };
    let at = w.mono();
    w.input(&Input::Task(TaskEvent { at, task, name, what }));
}

/// A prefill that ends has given up all of its requests, and decode's heartbeat notices: nobody need be told.
#[test]
fn a_prefill_that_ends_is_lost_and_has_failed_nothing_in_silence() {
    for server_first in [false, true] {
        let mut w = working();
        let key = w.request(Role::Prefill, ROOM);
        w.request(Role::Decode, ROOM);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(5000);
        let ranks = [prefill(0).pid, pid(Role::Prefill)];
        dies(&mut w, ranks[usize::from(server_first)]);
        w.wait(3000);
        w.hung_up(key, Side::Server);
        dies(&mut w, ranks[usize::from(!server_first)]);
        for _ in 0..25 {
            w.wait(1000);
            let v = w.last(ROOM).verdict;
            assert!(v.as_ref().is_none_or(|v| v.class == Class::PeerLost), "{v:?}");
        }
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Possible));
    }
}

/// What was pinned before keeps its cause: ending the engine is no other pin.
#[test]
fn a_pin_keeps_its_cause_when_the_engine_is_ended() {
    let mut w = working();
    let key = w.request(Role::Prefill, ROOM);
    w.request(Role::Decode, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    for _ in 0..8 {
        w.wait(10_000);
        w.gauges(Role::Prefill, 1, 0, 0);
    }
    let before = w.verdict(ROOM);
    assert_eq!((before.class, before.confidence), (Class::TransferNotConcluded, Confidence::Likely));
    dies(&mut w, prefill(0).pid);
    w.hung_up(key, Side::Server);
    dies(&mut w, pid(Role::Prefill));
    for _ in 0..25 {
        w.wait(1000);
        assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
    }
}

/// A rank that is gone, whose server goes on holding the request.
#[test]
fn a_rank_that_ends_alone_is_what_is_lost() {
    for sees in [Sees::Prefill, Sees::Both] {
        let mut w = Web::new(sees);
        w.request(Role::Prefill, ROOM);
        w.request(Role::Decode, ROOM);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(3000);
        dies(&mut w, prefill(0).pid);
        for s in 0..90 {
            w.wait(1000);
            let v = w.last(ROOM).verdict;
            assert!(v.as_ref().is_none_or(|v| v.class == Class::PeerLost), "{s} {v:?}");
        }
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Possible), "{sees:?}");
        assert_eq!(v.owed_by.and_then(|p| p.role), Some(Role::Prefill), "{sees:?}");
    }
}
