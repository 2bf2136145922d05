//! What an engine's own numbers may settle: they must be of now, and of a time in which the room was there.

use super::rooms_support::*;
use super::web::*;
use roomtrace::rooms::model::{EngineGauges, Input, Outcome, Role};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

const ROOM: u64 = 7_000_000_000_000_000_031;

fn transfers(w: &mut Web, room: u64) {
    w.metadata(room, &decode(0), &prefill(0));
}

fn succeeds(w: &mut Web, room: u64) {
    w.status(room, &prefill(0), &decode(0), KvPoll::Success);
    let end = w.sent_to(&prefill(0), &decode(0));
    w.acknowledge(&prefill(0), &decode(0), end);
}

fn verdict(w: &Web, room: u64) -> Option<(Class, Confidence)> {
    w.last(room).verdict.map(|v| (v.class, v.confidence))
}

/// That decode waits for what prefill computes is no pin, where both are seen.
#[test]
fn what_prefill_computes_pins_nothing_at_decode_either() {
    let mut w = Web::new(Sees::Both);
    w.gauges(Role::Prefill, 0, 0, 0);
    w.wait(15_000);
    w.request(Role::Prefill, ROOM);
    w.request(Role::Decode, ROOM);
    transfers(&mut w, ROOM);
    // Asked as rarely as engines are after their first minute.
    for n in 1..7 {
        w.gauges(Role::Prefill, 0, 0, n);
        w.wait(15_000);
    }
    assert!(w.pin(ROOM).is_none(), "{:?}", w.pin(ROOM));
    assert_eq!(w.events(ROOM).len(), 0, "{:?}", w.names(ROOM));
    assert_eq!(verdict(&w, ROOM).map(|v| v.0), Some(Class::Queued));
}

/// A room that has failed while its server holds the request is one that the engine may count.
#[test]
fn a_count_that_a_held_room_explains_is_not_told_again() {
    let mut w = Web::new(Sees::Prefill);
    w.serve(1, 20);
    w.gauges(Role::Prefill, 0, 0, 0);
    w.request(Role::Prefill, ROOM);
    transfers(&mut w, ROOM);
    w.wait(20);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Failed);
    for _ in 0..10 {
        w.gauges(Role::Prefill, 1, 0, 0);
        w.wait(15_000);
    }
    assert_eq!(w.class(ROOM), Some(Class::ConcludedButHeld));
    assert!(
        w.table.findings().iter().all(|f| f.class != Class::GaugeUnexplained),
        "{:?}",
        w.table.findings()
    );
}

/// A request for several rooms is answered when the last of them is over.
#[test]
fn rooms_of_one_request_wait_for_each_other() {
    let mut w = Web::new(Sees::Prefill);
    let rooms = [ROOM, ROOM + 1, ROOM + 2];
    let key = w.ask_for(Role::Prefill, &rooms, "");
    for room in rooms {
        transfers(&mut w, room);
    }
    w.wait(20);
    for room in &rooms[..2] {
        succeeds(&mut w, *room);
    }
    for n in 0..8 {
        w.gauges(Role::Prefill, 1, 0, n);
        w.wait(15_000);
        for room in &rooms[..2] {
            assert_eq!(w.pin(*room), None, "{n}");
        }
    }
    succeeds(&mut w, rooms[2]);
    w.wait(8000);
    assert!(rooms[..2].iter().all(|room| w.pin(*room).is_none()), "the answer is on its way");
    w.wait(4000);
    for room in rooms {
        assert_eq!(verdict(&w, room), Some((Class::ConcludedButHeld, Confidence::Possible)));
    }
    w.wait(60_000);
    assert_eq!(verdict(&w, ROOM), Some((Class::ConcludedButHeld, Confidence::Likely)));
    w.finished(key);
    w.wait(3000);
    for room in rooms {
        assert_eq!(w.outcomes(room), [Outcome::Success]);
    }
}

#[test]
fn that_nothing_waits_must_have_been_said_when_the_request_was_there() {
    let mut w = Web::new(Sees::Both);
    w.wait(5000);
    w.gauges(Role::Decode, 0, 0, 0);
    w.wait(1000);
    w.request(Role::Prefill, ROOM);
    w.request(Role::Decode, ROOM);
    w.wait(5000);
    // It may be on its way to the scheduler still.
    w.gauges(Role::Decode, 0, 0, 0);
    w.wait(7000);
    assert_eq!(verdict(&w, ROOM), Some((Class::Queued, Confidence::Possible)));
    w.gauges(Role::Decode, 0, 1, 0);
    w.wait(2000);
    assert_eq!(verdict(&w, ROOM), Some((Class::Queued, Confidence::Possible)));
    w.gauges(Role::Decode, 0, 0, 0);
    w.wait(2000);
    assert_eq!(verdict(&w, ROOM), Some((Class::MetadataMissing, Confidence::Possible)));
}

/// The scheduler counts fewer requests than its server has: this one may still be cut into tokens, or its pictures fetched.
#[test]
fn what_the_scheduler_may_not_have_yet_is_never_likely_by_its_counts() {
    let mut w = Web::new(Sees::Prefill);
    let pinned = ROOM + 1;
    w.request(Role::Prefill, pinned);
    transfers(&mut w, pinned);
    w.request(Role::Prefill, ROOM);
    transfers(&mut w, ROOM);
    for n in 0..5 {
        w.gauges(Role::Prefill, 1, 0, 7);
        w.wait(11_000);
        for room in [ROOM, pinned] {
            let v = verdict(&w, room);
            assert_eq!(v, Some((Class::TransferNotConcluded, Confidence::Possible)), "{n}");
        }
    }
    // No picture takes a minute.
    for _ in 0..2 {
        w.gauges(Role::Prefill, 1, 0, 7);
        w.wait(11_000);
    }
    assert_eq!(verdict(&w, pinned), Some((Class::TransferNotConcluded, Confidence::Likely)));
    // What is likely stays so when another request comes that is not counted yet.
    w.request(Role::Prefill, ROOM + 2);
    w.gauges(Role::Prefill, 1, 0, 7);
    w.wait(2000);
    assert_eq!(verdict(&w, pinned), Some((Class::TransferNotConcluded, Confidence::Likely)));
    // Counted both.
    let mut w = Web::new(Sees::Prefill);
    for room in [ROOM, pinned] {
        w.request(Role::Prefill, room);
        transfers(&mut w, room);
    }
    for _ in 0..3 {
        w.gauges(Role::Prefill, 2, 0, 7);
        w.wait(11_000);
    }
    assert_eq!(verdict(&w, ROOM), Some((Class::TransferNotConcluded, Confidence::Likely)));
}

/// METADATA is there, and the request is still being sent to prefill: counters that stand still are about another room.
#[test]
fn a_request_that_has_not_come_is_never_likely_by_counters() {
    let mut w = Web::new(Sees::Prefill);
    w.request(Role::Prefill, ROOM + 1);
    transfers(&mut w, ROOM + 1);
    w.wait(1000);
    transfers(&mut w, ROOM);
    for n in 0..3 {
        w.gauges(Role::Prefill, 1, 0, 7);
        w.wait(11_000);
        assert_eq!(verdict(&w, ROOM).map(|v| v.1), Some(Confidence::Possible), "{n}");
    }
    assert_eq!(verdict(&w, ROOM + 1), Some((Class::TransferNotConcluded, Confidence::Likely)));
}

/// A page may take a millisecond to be moved, which no counter shows.
#[test]
fn what_is_long_to_move_is_not_likely_before_it_can_have_been() {
    let mut w = Web::new(Sees::Prefill);
    w.request(Role::Prefill, ROOM);
    w.ask(ROOM, &decode(0), &prefill(0), |m| m.pages = 60_000);
    for n in 0..8 {
        w.gauges(Role::Prefill, 1, 0, 7);
        w.wait(11_000);
        let sure = if n < 6 { Confidence::Possible } else { Confidence::Likely };
        assert_eq!(verdict(&w, ROOM), Some((Class::TransferNotConcluded, sure)), "{n}");
    }
}

/// Nor by rooms that pass it, whatever waits inside.
#[test]
fn what_the_scheduler_may_not_have_yet_is_not_passed() {
    let mut w = Web::new(Sees::Prefill);
    w.request(Role::Prefill, ROOM);
    transfers(&mut w, ROOM);
    for n in 0..50 {
        w.serve(n + 1, 20);
        // Between rooms nothing is in flight.
        w.gauges(Role::Prefill, 0, 0, n);
        w.wait(1000);
        if let Some((_, v)) = w.pin(ROOM) {
            assert_eq!(v.confidence, Confidence::Possible, "{n}: {:?}", v.evidence);
        }
    }
}

#[test]
fn counters_must_have_stood_still_since_the_room_began() {
    let begin = || {
        let mut w = Web::new(Sees::Prefill);
        // Another one is pinned: something is in flight.
        for _ in 0..4 {
            w.gauges(Role::Prefill, 1, 0, 7);
            w.wait(15_000);
        }
        w.request(Role::Prefill, ROOM);
        transfers(&mut w, ROOM);
        w.wait(2000);
        w.gauges(Role::Prefill, 2, 0, 7);
        w.wait(9000);
        assert_eq!(verdict(&w, ROOM), Some((Class::TransferNotConcluded, Confidence::Possible)));
        w
    };
    // It is being computed.
    let mut w = begin();
    w.gauges(Role::Prefill, 1, 0, 8);
    w.wait(2000);
    assert_eq!(verdict(&w, ROOM), Some((Class::Queued, Confidence::Possible)));
    let mut w = begin();
    w.gauges(Role::Prefill, 2, 0, 7);
    w.wait(2000);
    assert_eq!(verdict(&w, ROOM), Some((Class::TransferNotConcluded, Confidence::Likely)));
}

#[test]
fn what_may_be_old_settles_nothing() {
    let mut w = Web::new(Sees::Both);
    let other = ROOM + 1;
    for room in [ROOM, other] {
        w.request(Role::Prefill, room);
        w.request(Role::Decode, room);
    }
    transfers(&mut w, ROOM);
    for _ in 0..6 {
        for role in [Role::Prefill, Role::Decode] {
            let gauges = EngineGauges {
                server: pid(role),
                role: Some(role),
                inflight: Some(1),
                waiting: Some(0),
                running: Some(0),
                progress: Some(7),
                stale: true,
                ..EngineGauges::default()
            };
            let at = w.mono();
            w.input(&Input::Gauges { at, gauges: &gauges });
        }
        w.wait(15_000);
        for room in [ROOM, other] {
            assert!(
                verdict(&w, room).is_none_or(|(_, sure)| sure == Confidence::Possible),
                "{:?}",
                verdict(&w, room)
            );
        }
    }
}

/// Of several DP ranks the counters are sums: that one of them works says nothing of a room of another, which is shown, and pages nobody.
#[test]
fn counters_of_several_ranks_that_move_hide_no_room() {
    for (ranks, expected) in [
        (vec![(0, 1)], (Class::Queued, Confidence::Possible)),
        (vec![(0, 0), (1, 1)], (Class::TransferNotConcluded, Confidence::Possible)),
    ] {
        let mut w = Web::new(Sees::Prefill);
        w.request(Role::Prefill, ROOM);
        transfers(&mut w, ROOM);
        for n in 0..30 {
            let gauges = EngineGauges {
                server: pid(Role::Prefill),
                role: Some(Role::Prefill),
                inflight: Some(1),
                inflight_by_dp: ranks.clone(),
                waiting: Some(0),
                running: Some(1),
                progress: Some(n),
                ..EngineGauges::default()
            };
            let at = w.mono();
            w.input(&Input::Gauges { at, gauges: &gauges });
            w.wait(1000);
        }
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), expected, "{:?}", v.evidence);
        assert!(
            !v.evidence.iter().any(|e| e.contains("the queue drains")),
            "nothing has concluded: {:?}",
            v.evidence
        );
        w.never_paged(ROOM);
    }
}
