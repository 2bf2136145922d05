//! A server with several HTTP workers (`--tokenizer-worker-num`) is one engine: whichever of them a call or a request comes to.

use roomtrace::http::event::{Control, PauseMode};
use roomtrace::rooms::model::Role;
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::ROOM;
use super::rooms_support::*;
use super::web::*;

/// Workers of prefill's server.
const WORKERS: [u32; 2] = [95, 96];

fn know(w: &mut Web) {
    for worker in WORKERS {
        w.process(worker, pid(Role::Prefill), None);
    }
}

fn by(w: &mut Web, worker: u32, room: u64) -> Key {
    let connection = w.connection(server(Role::Prefill), true, Some(task(worker)));
    w.ask_on(connection, true, &work(&[room], "r-1"))
}

fn call(w: &mut Web, worker: u32, call: &Control) {
    let connection = w.connection(server(Role::Prefill), true, Some(task(worker)));
    w.call_on(connection, call, Some(200));
}

/// One room of each worker, asked for by METADATA.
fn rooms(w: &mut Web) -> [u64; 2] {
    let rooms = [ROOM, ROOM + 1];
    for (worker, room) in WORKERS.into_iter().zip(rooms) {
        by(w, worker, room);
        w.metadata(room, &decode(0), &prefill(0));
    }
    rooms
}

#[test]
fn one_pause_stops_the_clocks_of_all_workers_rooms() {
    // The look through the process table comes first, or after the requests, or after the pause too.
    for known in 0..3 {
        let mut w = Web::new(Sees::Prefill);
        if known == 0 {
            know(&mut w);
        }
        let rooms = rooms(&mut w);
        if known == 1 {
            know(&mut w);
        }
        call(&mut w, WORKERS[1], &Control::Pause(Some(PauseMode::InPlace)));
        // Success goes out, and the answers are held: that would be `concluded_but_held`.
        w.status(rooms[0], &prefill(0), &decode(0), KvPoll::Success);
        w.wait(3000);
        if known == 2 {
            know(&mut w);
        }
        w.wait(100_000);
        for room in rooms {
            assert_eq!(w.class(room), Some(Class::Paused), "{known}: {room}");
            assert!(w.pin(room).is_none(), "{known}: {:?}", w.pin(room));
        }
        call(&mut w, WORKERS[0], &Control::Resume);
        w.wait(90_000);
        for room in rooms {
            assert!(w.pin(room).is_some(), "{known}: {room}");
        }
    }
}

#[test]
fn what_the_engine_says_in_numbers_counts_for_all_workers_rooms() {
    for late in [false, true] {
        let mut w = Web::new(Sees::Prefill);
        w.serve(1, 20);
        if !late {
            know(&mut w);
        }
        let rooms = rooms(&mut w);
        w.wait(3000);
        know(&mut w);
        for _ in 0..5 {
            w.gauges(Role::Prefill, 2, 0, 7);
            w.wait(5000);
        }
        for room in rooms {
            let v = w.last(room).verdict.unwrap();
            assert_eq!(v.confidence, Confidence::Likely, "{late}: {v:?}");
            assert!(!w.last(room).numbers.is_empty(), "{late}: {room}");
        }
    }
}

#[test]
fn a_worker_that_ends_is_not_the_engines_end() {
    let mut w = Web::new(Sees::Prefill);
    know(&mut w);
    let rooms = rooms(&mut w);
    call(&mut w, WORKERS[1], &Control::Pause(Some(PauseMode::InPlace)));
    w.table.forget_process(WORKERS[1]);
    w.wait(60_000);
    assert_eq!(w.class(rooms[0]), Some(Class::Paused), "its pause outlives it");
    assert!(w.pin(rooms[0]).is_none());
    // Another in its place is the same engine's.
    w.process(97, pid(Role::Prefill), None);
    by(&mut w, 97, ROOM + 2);
    w.metadata(ROOM + 2, &decode(0), &prefill(0));
    w.wait(30_000);
    assert_eq!(w.class(ROOM + 2), Some(Class::Paused));
}
