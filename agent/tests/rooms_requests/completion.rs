//! Rooms that open and close by their requests.

use roomtrace::http::event::{Outcome as Answer, Rooms, Side};
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{LegEnd, Outcome, Phase, Role};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::ROOM;
use super::rooms_support::*;
use super::web::*;

#[test]
fn a_room_without_control_traffic_appears_and_ends_with_its_request() {
    for role in [Role::Prefill, Role::Decode] {
        let mut w = Web::new(Sees::Both);
        let key = w.ask_for(role, &[ROOM], "abc-1");
        let s = w.last(ROOM);
        let view = if role == Role::Prefill { s.prefill } else { s.decode }.unwrap();
        assert_eq!((view.state, view.phase, view.terminal), (KvPoll::Bootstrapping, Phase::Bootstrap, None));
        assert_eq!(s.request.as_ref().unwrap().rid.as_deref(), Some("abc-1"));
        w.wait(500);
        w.answered(key, 400, Answer::Error);
        w.wait(3000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
        let leg = w.leg(ROOM, role).unwrap();
        assert_eq!((leg.status, leg.ended.unwrap().1), (Some(400), LegEnd::Error));
        assert!(w.table.open().next().is_none());
    }
}

#[test]
fn a_batch_is_as_many_rooms_and_checks_are_none() {
    let mut w = Web::new(Sees::Prefill);
    let key = w.ask_for(Role::Prefill, &[ROOM, ROOM + 1, ROOM + 2], "");
    assert_eq!(w.table.open().count(), 3);
    w.ignored(Role::Prefill);
    w.odd(Role::Prefill, Rooms::None);
    w.not_seen(Role::Prefill);
    assert_eq!(w.table.open().count(), 3);
    w.finished(key);
    w.wait(3000);
    assert_eq!(w.table.open().count(), 0);
    assert_eq!(w.outcomes(ROOM + 2), [Outcome::Success]);
}

#[test]
fn requests_open_no_more_rooms_than_there_is_space_for() {
    let config = Config { max_rooms: 4, ..Config::default() };
    let mut w = Web::bare(Sees::Prefill, MOONCAKE, config);
    w.know();
    for n in 0..10 {
        w.request(Role::Prefill, n + 1);
    }
    assert_eq!(w.table.open().count(), 4);
    assert_eq!(w.table.counters().turned_away.rooms, 6);
}

#[test]
fn frames_join_the_room_that_the_request_opened() {
    let mut w = Web::new(Sees::Prefill);
    let key = w.request(Role::Prefill, ROOM);
    w.wait(50);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(50);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    // Prefill answers when its side has ended: until then it is not over.
    w.wait(1500);
    assert_eq!(w.outcomes(ROOM), []);
    w.finished(key);
    w.wait(1500);
    assert_eq!((w.names(ROOM), w.outcomes(ROOM)), (vec!["room_closed"], vec![Outcome::Success]));
    let s = w.last(ROOM);
    assert_eq!((s.incarnation, s.messages.len()), (0, 2));
    assert!(s.opened_at < s.messages[0].at);
}

#[test]
fn the_request_joins_the_room_that_frames_opened() {
    let mut w = Web::new(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(100);
    let key = w.request(Role::Prefill, ROOM);
    assert!(w.leg(ROOM, Role::Prefill).is_some());
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.finished(key);
    w.wait(2000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

#[test]
fn where_success_is_not_on_the_wire_prefills_answer_says_it() {
    for (status, answer, outcome) in [
        (200, Answer::Finished, Outcome::Success),
        (200, Answer::Unknown, Outcome::Success),
        (200, Answer::Aborted, Outcome::Failed),
        (200, Answer::Error, Outcome::Failed),
        (500, Answer::Unknown, Outcome::Failed),
    ] {
        let mut w = Web::with(Sees::Prefill, NIXL_OLD);
        let key = w.request(Role::Prefill, ROOM);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(4000);
        w.answered(key, status, answer);
        w.wait(3000);
        assert_eq!(w.names(ROOM), ["room_closed"], "{status} {answer:?}");
        assert_eq!(w.outcomes(ROOM), [outcome], "{status} {answer:?}");
    }
}

/// Prefill has answered, and decode generates for a minute and a half without streaming: nothing is wrong.
#[test]
fn where_success_is_not_on_the_wire_decode_may_generate_for_long() {
    let mut w = Web::with(Sees::Both, NIXL_OLD);
    let prefills = w.request(Role::Prefill, ROOM);
    let decodes = w.request(Role::Decode, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(400);
    w.finished(prefills);
    w.wait(90_000);
    assert!(w.pin(ROOM).is_none(), "{:?}", w.pin(ROOM));
    w.finished(decodes);
    w.wait(3000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    // Nor where the router drops prefill's request once decode has the room: that cannot be told from giving it up.
    let prefills = w.request(Role::Prefill, ROOM + 1);
    w.request(Role::Decode, ROOM + 1);
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    w.wait(400);
    w.hung_up(prefills, Side::Client);
    w.wait(45_000);
    w.never_paged(ROOM + 1);
}

/// M17 where decode's answer is all that tells of the end: decode says nothing more, and its timers are over.
#[test]
fn where_success_is_not_on_the_wire_decodes_answer_says_that_prefill_holds() {
    let mut w = Web::with(Sees::Both, NIXL_OLD);
    w.request(Role::Prefill, ROOM);
    let decodes = w.request(Role::Decode, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(400);
    w.finished(decodes);
    w.wait(12_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::ConcludedButHeld, Confidence::Possible));
    assert_eq!(v.ends_by_itself, None);
    w.wait(60_000);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Likely);
}

#[test]
fn where_success_is_not_on_the_wire_decodes_first_byte_says_it() {
    let mut w = Web::with(Sees::Decode, NIXL_OLD);
    let key = w.request(Role::Decode, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(400);
    w.first_byte(key);
    w.wait(1000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    // The head of an error is an answer too: its end comes at once.
    let key = w.request(Role::Decode, ROOM + 1);
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    w.first_byte(key);
    w.answered(key, 500, Answer::Error);
    w.wait(3000);
    assert_eq!(w.outcomes(ROOM + 1), [Outcome::Failed]);
}

#[test]
fn completion_is_not_observable_only_where_no_request_is_followed() {
    let class = |requested: bool, lost: bool| {
        let mut w = Web::with(Sees::Prefill, NIXL_OLD);
        if requested {
            let key = w.request(Role::Prefill, ROOM);
            w.metadata(ROOM, &decode(0), &prefill(0));
            if lost {
                w.out_of_sight(key);
            }
        } else {
            w.metadata(ROOM, &decode(0), &prefill(0));
        }
        w.to(12_000);
        let v = w.verdict(ROOM);
        assert_eq!(v.confidence, Confidence::Possible);
        v.class
    };
    assert_eq!(class(false, false), Class::CompletionNotObservable);
    assert_eq!(class(true, true), Class::CompletionNotObservable);
    assert_eq!(class(true, false), Class::TransferNotConcluded);
}

#[test]
fn a_room_lost_sight_of_ends_unknown_if_nothing_else_tells_of_it() {
    let mut w = Web::new(Sees::Prefill);
    let key = w.request(Role::Prefill, ROOM);
    w.out_of_sight(key);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
}

#[test]
fn a_mooncake_room_whose_request_has_ended_is_not_pinned_at_prefill() {
    let mut w = Web::new(Sees::Prefill);
    let key = w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(15_000);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
    w.hung_up(key, Side::Client);
    w.wait(7000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
    assert!(w.last(ROOM).recovered);
    w.never_paged(ROOM);
}

#[test]
fn a_number_used_again_after_its_request_is_another_life() {
    let mut w = Web::with(Sees::Prefill, NIXL_OLD);
    let key = w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.finished(key);
    w.wait(3000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    w.request(Role::Prefill, ROOM);
    assert_eq!(w.last(ROOM).incarnation, 1);
}

#[test]
fn a_decode_rank_that_has_a_room_again_begins_its_next_life() {
    for order in ["metadata first", "request first"] {
        let mut w = Web::new(Sees::Both);
        w.serve(ROOM, 20);
        w.wait(5000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Success], "{order}");
        // Retracted: decode asks prefill itself. Its end and the server's are both seen.
        let c = w.connection(server(Role::Prefill), false, Some(task(decode(0).pid)));
        let s = roomtrace::rooms::model::Connection {
            socket: roomtrace::event::SocketId(c.socket.0 + 100_000),
            addresses: roomtrace::event::Addresses { local: c.addresses.peer, peer: c.addresses.local },
            task: Some(task(pid(Role::Prefill))),
            ..c
        };
        if order == "metadata first" {
            w.metadata(ROOM, &decode(0), &prefill(0));
        }
        w.ask_on(c, false, &work(&[ROOM], "r-1"));
        let key = w.ask_on(s, true, &work(&[ROOM], "r-1"));
        if order == "request first" {
            w.metadata(ROOM, &decode(0), &prefill(0));
        }
        w.wait(11_000);
        let life = w.last(ROOM);
        assert_eq!((life.incarnation, life.closed_at), (1, None), "{order}");
        assert_ne!(w.class(ROOM), Some(Class::DuplicateRoom), "{order}");
        w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
        w.finished(key);
        w.wait(3000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Success; 2], "{order}");
    }
}

#[test]
fn both_ends_of_a_connection_are_one_request() {
    let mut w = Web::new(Sees::Prefill);
    let key = w.request(Role::Prefill, ROOM);
    let mut client = w.connection(server(Role::Prefill), false, None);
    let used = w.last(ROOM).request.unwrap().prefill.unwrap();
    client.addresses.local = "10.0.0.9:1025".parse().unwrap();
    let other = w.ask_on(client, false, &work(&[ROOM], "r-1"));
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(11_000);
    assert_eq!(w.leg(ROOM, Role::Prefill), Some(used));
    assert_ne!(w.class(ROOM), Some(Class::DuplicateRoom));
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.finished(key);
    w.finished(other);
    w.wait(2000);
    assert_eq!(w.names(ROOM).last(), Some(&"room_closed"));
    assert!(w.table.open().next().is_none());
}

#[test]
fn two_requests_with_one_room_are_a_duplicate_and_end_with_the_last() {
    let mut w = Web::new(Sees::Prefill);
    let one = w.request(Role::Prefill, ROOM);
    w.wait(2000);
    let two = w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(13_000);
    assert_eq!(w.class(ROOM), Some(Class::DuplicateRoom));
    w.never_paged(ROOM);
    w.finished(two);
    w.wait(3000);
    assert_eq!(w.outcomes(ROOM), []);
    w.finished(one);
    w.wait(3000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

/// What becomes of a second request with the room says nothing of the first: not its answer, nor that it was refused.
#[test]
fn a_second_request_that_is_refused_does_not_end_the_first() {
    for (status, decode_too) in [(400, false), (503, true), (0, false)] {
        let mut w = Web::new(Sees::Both);
        let one = w.request(Role::Prefill, ROOM);
        let d = w.request(Role::Decode, ROOM);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(500);
        for role in [Role::Prefill, Role::Decode] {
            if role == Role::Decode && !decode_too {
                continue;
            }
            let two = w.ask_for(role, &[ROOM], "r-2");
            w.wait(200);
            if status == 0 {
                w.hung_up(two, Side::Client);
            } else {
                w.first_byte(two);
                w.answered(two, status, Answer::Error);
            }
        }
        let leg = w.leg(ROOM, Role::Prefill).unwrap();
        assert_eq!((leg.first_byte, leg.ended, leg.out_of_sight), (None, None, false), "{status}");
        // Prefill computes for a long time.
        for n in 0..45 {
            w.gauges(Role::Prefill, 1, 0, 1000 * n);
            w.wait(2000);
        }
        assert!(w.pin(ROOM).is_none(), "{status}: {:?}", w.pin(ROOM));
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::Queued, Confidence::Possible), "{status}");
        let says = |what: &str| v.evidence.iter().any(|e| e.contains(what));
        assert!(says("another request with this room came at +0."), "{status}: {:?}", v.evidence);
        assert!(says(if status == 0 { "was given up" } else { "was refused with" }), "{:?}", v.evidence);
        assert!(!says("its answer began"), "{:?}", v.evidence);
        w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
        w.finished(one);
        w.finished(d);
        w.wait(3000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Success], "{status}");
    }
}

/// M28 behind a request that was refused is what it is without one.
#[test]
fn a_pin_behind_a_refused_second_request_keeps_its_class() {
    let mut w = Web::new(Sees::Prefill);
    w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(300);
    let two = w.request(Role::Prefill, ROOM);
    w.first_byte(two);
    w.answered(two, 503, Answer::Error);
    for _ in 0..45 {
        w.gauges(Role::Prefill, 1, 0, 7);
        w.wait(2000);
    }
    let v = w.verdict(ROOM);
    assert_eq!(
        (v.class, v.confidence),
        (Class::TransferNotConcluded, Confidence::Likely),
        "{:?}",
        v.evidence
    );
}

/// One that is served, or that is still open, is a duplicate; it goes on where the first is given up.
#[test]
fn the_second_request_goes_on_where_the_first_ends() {
    for first in ["served", "given up"] {
        let mut w = Web::new(Sees::Prefill);
        let one = w.request(Role::Prefill, ROOM);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(300);
        let two = w.request(Role::Prefill, ROOM);
        let begun = w.at();
        w.wait(300);
        if first == "served" {
            w.finished(one);
        } else {
            w.hung_up(one, Side::Client);
        }
        assert_eq!(w.leg(ROOM, Role::Prefill).unwrap().begun, begun, "{first}");
        w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
        w.wait(70_000);
        // It holds the room; that prefill has two of them is why, where both count.
        let v = w.verdict(ROOM);
        let class = if first == "served" { Class::DuplicateRoom } else { Class::ConcludedButHeld };
        assert_eq!(v.class, class, "{first}");
        w.answered(two, 500, Answer::Error);
        w.wait(3000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Success], "{first}");
    }
}
