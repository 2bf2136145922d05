//! Rooms before METADATA, with what decode's engine says of itself: policy `prefill_complete`, and a decode whose scheduler stands.

use roomtrace::rooms::model::{Away, EngineGauges, Input, Role};
use roomtrace::rooms::{Config, RoomTable, SavedRooms, Survivors};
use roomtrace::sglang::message::{Kind, KvPoll};
use roomtrace::verdict::model::{Class, Confidence};

use super::ROOM;
use super::rooms_support::*;
use super::web::*;

/// Requests at both engines, and decode's BOOTSTRAP.
fn early() -> Web {
    let mut w = Web::new(Sees::Both);
    w.request(Role::Prefill, ROOM);
    w.request(Role::Decode, ROOM);
    w.wait(10);
    w.bootstrap(ROOM, &decode(0), &prefill(0));
    w
}

/// The same after prefill has said that it has computed.
fn computed() -> Web {
    let mut w = early();
    w.wait(2000);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::WaitingForInput);
    w
}

/// What decode says for `s` seconds, every 10 s.
fn decode_says(w: &mut Web, s: u64, waiting: u64, stale: bool) {
    for _ in 0..s / 10 {
        let gauges = EngineGauges {
            server: pid(Role::Decode),
            role: Some(Role::Decode),
            inflight: Some(0),
            waiting: Some(waiting),
            stale,
            ..EngineGauges::default()
        };
        let at = w.mono();
        w.input(&Input::Gauges { at, gauges: &gauges });
        w.wait(10_000);
    }
}

#[test]
fn a_long_prompt_that_computes_before_metadata_is_queued() {
    let mut w = early();
    for n in 0..75 {
        w.gauges(Role::Prefill, 0, 0, n);
        w.wait(1000);
    }
    assert!(w.pin(ROOM).is_none(), "{:?}", w.pin(ROOM));
}

#[test]
fn computed_and_forgotten_by_decode_is_likely_once_it_says_that_nothing_waits() {
    let mut w = computed();
    decode_says(&mut w, 50, 0, false);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::MetadataMissing, Confidence::Possible));
    decode_says(&mut w, 30, 0, false);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::MetadataMissing, Confidence::Likely), "{:?}", v.evidence);
    assert_eq!((v.owed_by.unwrap().role, v.expected), (Some(Role::Decode), Some(Kind::Metadata)));
}

#[test]
fn computed_while_decode_has_no_pages_is_queued() {
    let mut w = computed();
    // Its first answer is there before the floor is over.
    decode_says(&mut w, 90, 1, false);
    assert!(w.pin(ROOM).is_none(), "{:?}", w.pin(ROOM));
}

#[test]
fn a_decode_whose_scheduler_stands_before_metadata_is_stalled() {
    for policy in [false, true] {
        let mut w = if policy {
            computed()
        } else {
            let mut w = Web::new(Sees::Both);
            w.wait(5100);
            w.request(Role::Prefill, ROOM);
            w.request(Role::Decode, ROOM);
            w
        };
        // What it writes is from after the agent began to look.
        w.wait(5100);
        decode_says(&mut w, 10, 1, false);
        // Its server goes on answering with what was written then.
        decode_says(&mut w, 50, 1, true);
        assert!(w.last(ROOM).verdict.is_none_or(|v| v.confidence == Confidence::Possible), "{policy}");
        decode_says(&mut w, 30, 1, true);
        let v = w.verdict(ROOM);
        assert_eq!(
            (v.class, v.confidence),
            (Class::EngineStalled, Confidence::Likely),
            "{policy} {:?}",
            v.evidence
        );
        assert_eq!((v.owed_by.unwrap().role, v.expected), (Some(Role::Decode), Some(Kind::Metadata)));
        assert!(v.evidence.iter().any(|e| e.contains("scheduler last wrote")), "{:?}", v.evidence);
    }
}

/// Another agent goes on two seconds after this one.
fn next_agent(w: &mut Web) {
    let (from, saved) = (w.at(), serde_json::to_string(&w.table.save()).unwrap());
    let saved: SavedRooms = serde_json::from_str(&saved).unwrap();
    w.wait(2000);
    let survivors = Survivors { alive: saved.processes().collect(), ..Survivors::default() };
    let to = w.at();
    w.table = RoomTable::restore(Config::default(), saved, Away { from, to }, &survivors);
    let World { table, out, .. } = &mut w.world;
    table.returned(|_| true, &[], to, out);
}

/// Decode was told to pause before the agent looked, or between two agents: its scheduler writes nothing then, as if it stood.
#[test]
fn a_decode_that_may_have_been_paused_unseen_pages_nobody() {
    for how in ["before", "lost sight of", "between"] {
        let mut w = Web::new(Sees::Both);
        if how != "before" {
            w.wait(20_000);
        }
        let other = w.request(Role::Decode, 5);
        if how == "between" {
            decode_says(&mut w, 10, 1, false);
            next_agent(&mut w);
            w.request(Role::Prefill, ROOM);
            w.request(Role::Decode, ROOM);
        } else {
            w.request(Role::Prefill, ROOM);
            w.request(Role::Decode, ROOM);
            decode_says(&mut w, 10, 1, false);
        }
        if how == "lost sight of" {
            w.out_of_sight(other);
        }
        decode_says(&mut w, 90, 1, true);
        w.never_paged(ROOM);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::EngineStalled, Confidence::Possible), "{how}");
        assert_eq!(v.candidates.first().unwrap().class, Class::Paused, "{how} {:?}", v.candidates);
    }
}

#[test]
fn a_decode_whose_numbers_are_always_old_or_that_goes_on_is_not() {
    for (fresh, asks) in [(false, false), (true, true)] {
        let mut w = Web::new(Sees::Both);
        w.request(Role::Prefill, ROOM);
        w.request(Role::Decode, ROOM);
        decode_says(&mut w, 10, 1, !fresh);
        for n in 0..9 {
            decode_says(&mut w, 10, 1, true);
            if asks && n < 2 {
                // Another room of it is asked for.
                w.request(Role::Prefill, 100 + n);
                w.request(Role::Decode, 100 + n);
                w.healthy(100 + n, &decode(0), &prefill(0), 20);
            }
        }
        w.never_paged(ROOM);
    }
}
