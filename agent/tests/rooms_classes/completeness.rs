//! What was there before the agent, and what the capture missed, is never called pinned.

use roomtrace::event::{Direction, TcpState};
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{Completeness, Outcome, Role};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::rooms_support::*;
use super::{ROOM, world};

#[test]
fn a_room_met_in_the_middle_is_never_pinned() {
    // First sight is an ABORT on a connection older than the agent: METADATA may have gone before.
    let mut w = World::new(Sees::Prefill);
    w.preexisting = true;
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.to(20_000);
    assert_eq!(w.last(ROOM).completeness, Completeness::Preexisting);
    assert_eq!(w.class(ROOM), Some(Class::Unknown), "whose ABORT it is was not seen");
    assert_eq!(w.table.overdue_keys().collect::<Vec<_>>(), [(ROOM, 0)], "overdue, and no pin");
    w.to(500_000);
    assert_eq!(w.names(ROOM), ["verdict_changed", "room_closed"], "mentioned once while it is open");
    // Long after the agent came, METADATA before it would have been seen.
    w.abort(ROOM + 1, &decode(0), &prefill(0), None);
    w.wait(11_500);
    assert_eq!(w.class(ROOM + 1), Some(Class::AbortBeforeEntry));
    assert_eq!(w.table.overdue_keys().count(), 0, "a pinned room is listed as pinned");
}

/// An agent that came while the connections were open, and then saw a room of its peers end.
fn late(layout: Layout, end: KvPoll) -> World {
    let mut w = World::with(Sees::Both, layout, Config::default());
    w.preexisting = true;
    w.to(2000);
    w.metadata(1, &decode(0), &prefill(0));
    w.status(1, &prefill(0), &decode(0), end);
    w
}

#[test]
fn an_abort_that_would_have_been_acknowledged_says_much_even_to_a_late_agent() {
    let mut w = late(MOONCAKE, KvPoll::Success);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.wait(9_000);
    assert_eq!(w.class(ROOM), None);
    w.wait(2_500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::AbortBeforeEntry, Confidence::Possible));
    assert_eq!(v.owed_by.unwrap().role, Some(Role::Prefill));
    assert_eq!(w.last(ROOM).completeness, Completeness::Preexisting);
    assert!(
        v.evidence.iter().any(|e| e.contains("can have gone before the agent looked")),
        "{:?}",
        v.evidence
    );
    let older = v.candidates.first().unwrap();
    assert_eq!(older.class, Class::NotApplicable);
    assert!(older.would_settle.contains("before the agent looked"));
    // An acknowledged one mostly found its room; one with a generation surely did.
    for (room, generation) in [(ROOM + 1, None), (ROOM + 2, Some(4))] {
        w.abort(room, &decode(0), &prefill(0), generation);
        if generation.is_none() {
            w.ack(room, &prefill(0), &decode(0));
        }
        w.wait(11_500);
        assert_eq!(w.class(room), Some(Class::Unknown));
        assert_eq!(w.names(room), ["verdict_changed"]);
    }
    // With generations on this connection, one without says that METADATA was never sent.
    w.abort(ROOM + 3, &decode(0), &prefill(0), None);
    w.wait(11_500);
    assert_eq!(w.last(ROOM + 3).completeness, Completeness::Full);
    assert_eq!(w.class(ROOM + 3), Some(Class::AbortBeforeEntry));
}

#[test]
fn an_abort_that_is_never_acknowledged_is_unknown_to_a_late_agent_but_mentioned() {
    let mut w = late(NIXL_OLD, KvPoll::Failed);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.wait(11_500);
    let v = w.verdict(ROOM);
    assert_eq!(v.class, Class::Unknown);
    assert_eq!(v.candidates.first().map(|c| c.class), Some(Class::AbortBeforeEntry));
    assert!(v.evidence.iter().any(|e| e.contains("silence says nothing")), "{:?}", v.evidence);
    w.wait(11_500);
    assert_eq!(w.names(ROOM), ["verdict_changed"]);
    // The same once no METADATA can be older than the agent any more.
    w.to(400_000);
    w.abort(ROOM + 1, &decode(0), &prefill(0), None);
    w.wait(11_500);
    assert_eq!(w.class(ROOM + 1), Some(Class::AbortBeforeEntry));
}

#[test]
fn a_nixl_that_says_success_acknowledges_aborts_too() {
    // Its METADATA alone could be of 0.5.17.
    let mut w = late(NIXL_NEW, KvPoll::Success);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.wait(11_500);
    assert_eq!(w.class(ROOM), Some(Class::AbortBeforeEntry));
}

#[test]
fn a_room_that_begins_after_the_agent_came_is_followed_also_on_an_idle_connection() {
    let mut w = World::new(Sees::Both);
    w.preexisting = true;
    w.to(3000);
    // The first message that the agent sees on this connection.
    w.metadata(ROOM, &decode_of(1, 2), &prefill(0));
    w.wait(11_500);
    assert_eq!(w.class(ROOM), Some(Class::MetadataIncomplete));
    assert_eq!(w.last(ROOM).completeness, Completeness::Full);
}

#[test]
fn a_room_that_begins_on_an_old_connection_is_whole() {
    let mut w = World::new(Sees::Prefill);
    w.preexisting = true;
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(11_200);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
    assert_eq!(w.last(ROOM).completeness, Completeness::Full);
}

#[test]
fn ranks_that_asked_before_the_agent_came_are_not_missing() {
    let mut w = World::new(Sees::Prefill);
    w.preexisting = true;
    w.metadata(ROOM, &decode_of(1, 2), &prefill(0));
    w.to(20_000);
    assert_eq!(w.class(ROOM), Some(Class::Unknown));
}

#[test]
fn the_end_of_a_preexisting_room_is_told_once() {
    for sees in [Sees::Prefill, Sees::Decode, Sees::Both] {
        let mut w = World::new(sees);
        w.preexisting = true;
        w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
        w.status(ROOM, &prefill(1), &decode(0), KvPoll::Success);
        w.to(5000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Success], "{:?}", w.names(ROOM));
        assert_eq!(w.last(ROOM).completeness, Completeness::Preexisting);
    }
}

#[test]
fn a_status_of_a_room_never_heard_of_opens_nothing() {
    let mut w = world(Sees::Both);
    w.to(1_000_000);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    assert_eq!(w.names(ROOM), [""; 0]);
    assert_eq!(w.table.counters().turned_away.orphans, 2);
}

#[test]
fn missing_bytes_make_it_unknown() {
    for (sees, direction) in [(Sees::Prefill, Direction::Received), (Sees::Decode, Direction::Sent)] {
        let mut w = world(sees);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(1000);
        w.lossy(&decode(0), &prefill(0), direction);
        w.to(12_000);
        assert_eq!(w.class(ROOM), Some(Class::Unknown));
        assert_eq!(w.last(ROOM).completeness, Completeness::Lossy);
        // The next room is not touched, and neither is one with another peer.
        w.metadata(ROOM + 1, &decode(0), &prefill(0));
        w.wait(12_000);
        assert!(w.last(ROOM + 1).pinned());
        w.to(500_000);
        assert_eq!(w.names(ROOM), ["verdict_changed", "room_closed"]);
    }
}

#[test]
fn a_pin_that_loses_its_certainty_has_not_recovered() {
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(11_500);
    assert!(w.last(ROOM).pinned());
    w.lossy(&decode(0), &prefill(0), Direction::Received);
    w.to(13_000);
    assert_eq!(w.names(ROOM), ["room_pinned", "verdict_changed"]);
    let s = w.last(ROOM);
    assert_eq!(w.class(ROOM), Some(Class::Unknown));
    assert!(!s.pinned() && !s.recovered && s.was_pinned);
    assert!(w.table.gauges().pinned.is_empty());
    // Its end is an end after all.
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(2000);
    assert_eq!(w.names(ROOM), ["room_pinned", "verdict_changed", "room_closed"]);
    assert!(w.last(ROOM).recovered);
}

#[test]
fn missing_bytes_of_another_peer_do_not_matter() {
    let mut w = world(Sees::Prefill);
    let mut far = decode(5);
    far.endpoint = "10.0.0.9:42005".parse().unwrap();
    w.metadata(1, &far, &prefill(0));
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(1000);
    w.lossy(&far, &prefill(0), Direction::Received);
    w.to(12_000);
    assert_eq!(w.class(1), Some(Class::Unknown));
    assert!(w.last(ROOM).pinned());
}

#[test]
fn missing_bytes_of_another_rank_at_the_same_address_do_not_matter() {
    for sees in [Sees::Prefill, Sees::Decode] {
        let direction = if sees == Sees::Prefill { Direction::Received } else { Direction::Sent };
        let mut w = world(sees);
        w.register(&decode(1), &prefill(0));
        w.metadata(1, &decode(1), &prefill(0));
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(1000);
        w.lossy(&decode(1), &prefill(0), direction);
        w.to(12_000);
        assert_eq!(w.class(1), Some(Class::Unknown));
        assert!(w.last(ROOM).pinned());
    }
}

#[test]
fn missing_bytes_of_a_connection_without_messages_touch_only_what_was_not_heard_of() {
    let host = decode(0).endpoint.ip().to_string();
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(1000);
    // More than are remembered.
    for port in 1..6000 {
        w.lossy_stranger(&host, port, &prefill(0));
        w.lossy_stranger(&format!("10.1.{}.{}", port / 250, port % 250), port, &prefill(0));
    }
    w.to(12_000);
    assert!(w.last(ROOM).pinned(), "its METADATA came on another connection");
    // Decode waits for its first word from prefill, which can have been on that one.
    let mut w = world(Sees::Decode);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(1000);
    w.lossy_stranger(&prefill(0).endpoint.ip().to_string(), 9, &decode(0));
    w.to(12_000);
    assert_eq!(w.class(ROOM), Some(Class::Unknown));
}

#[test]
fn missing_bytes_of_a_connection_that_turns_out_to_be_the_ranks_own_make_it_unknown() {
    for named in [false, true] {
        let mut w = world(Sees::Prefill);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(1000);
        // The same rank by another socket.
        let again = Rank { pid: 7777, ..decode(0) };
        w.state(&again, &prefill(0), Direction::Received, TcpState::SynRecv, TcpState::Established, 0);
        w.lossy(&again, &prefill(0), Direction::Received);
        if named {
            w.register(&again, &prefill(0));
        }
        w.to(12_000);
        assert_eq!(w.class(ROOM) == Some(Class::Unknown), named);
    }
}

#[test]
fn missing_bytes_of_a_rank_whose_metadata_is_awaited_make_it_unknown() {
    let d: Vec<_> = (0..2).map(|n| decode_of(n, 2)).collect();
    let mut w = World::new(Sees::Prefill);
    for rank in &d {
        w.register(rank, &prefill(0));
    }
    w.metadata(ROOM, &d[0], &prefill(0));
    w.wait(100);
    w.lossy(&d[1], &prefill(0), Direction::Received);
    w.to(12_000);
    assert_eq!(w.class(ROOM), Some(Class::Unknown));
}

#[test]
fn an_abort_after_missing_bytes_may_have_had_its_metadata() {
    let mut w = world(Sees::Prefill);
    w.lossy(&decode(0), &prefill(0), Direction::Received);
    w.wait(50);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.to(15_000);
    assert_eq!(w.class(ROOM), Some(Class::Unknown));
}
