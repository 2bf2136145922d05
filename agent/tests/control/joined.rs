//! Connections that were there before the agent: joined where that is certain, and nothing is believed too early.

use roomtrace::control::{ConnectionState, Judgement};
use roomtrace::event::{Addresses, Body, Bytes, Direction, SECOND, SocketEvent, What};
use roomtrace::rooms::model::Input;
use roomtrace::sglang::message::KvPoll;

use super::rig::{MS, ROOM, Rig, Told, addr, metadata};
use super::wire::{frame, handshake, message, status};

#[test]
fn a_connection_that_was_there_is_joined_at_the_first_whole_call() {
    let mut rig = Rig::new();
    rig.found(Some((10, 20)));
    rig.send(&status(ROOM));
    let end = rig.sent;
    assert_eq!(rig.told(), [Told::Status { room: ROOM, status: KvPoll::Success, end, preexisting: true }]);
    assert_eq!(rig.judged(), [Judgement::Zmtp]);
    assert_eq!(rig.connections(ConnectionState::Acquired), 1);
}

#[test]
fn a_connection_found_at_its_very_beginning_is_no_older_than_the_agent() {
    let mut rig = Rig::new();
    rig.found(Some((1_000, 5_000)));
    rig.send(&[handshake(), status(ROOM)].concat());
    assert!(matches!(rig.told()[..], [Told::Status { preexisting: false, .. }]));
    // First sight without any word of its beginning, but with its greeting.
    let mut rig = Rig::new();
    rig.send(&handshake());
    rig.send(&status(ROOM));
    assert!(matches!(rig.told()[..], [Told::Status { preexisting: false, .. }]));
}

#[test]
fn a_call_joined_in_the_middle_of_a_batch_shows_its_next_messages() {
    let mut rig = Rig::new();
    let batch: Vec<u8> = (0..80).flat_map(|i| metadata(ROOM + i, 8)).collect();
    rig.send(&batch[50..]);
    let rooms = rig.rooms();
    // The second message proves where a boundary is; from the third on everything is handed on.
    assert_eq!(rooms, (ROOM + 2..ROOM + 80).collect::<Vec<_>>());
}

#[test]
fn the_tail_of_an_acknowledgement_is_not_taken_for_a_status() {
    let room = ROOM.to_string();
    let ack = message(&[b"ABORT_ACK", room.as_bytes(), b"0", b"4"]);
    let mut rig = Rig::new();
    rig.send(&[&ack[4..], &ack[..], &ack[..]].concat());
    assert_eq!(rig.told(), [Told::Other("ABORT_ACK"), Told::Other("ABORT_ACK")]);
}

/// METADATA of a release that does not exist yet, and STATUS of SGLang 0.4.5 with a room that a test drew.
fn weak_ones() -> [Vec<u8>; 2] {
    let room = ROOM.to_string();
    let newer = [room.as_bytes(), b"10.0.0.21", b"41207", b"10.0.0.21:15847", b"1234", b"3", b"", b"2", b"0"];
    let newer = message(&[&newer[..], &[b"", b"new"]].concat());
    [newer, message(&[b"77", b"4"])]
}

#[test]
fn a_stream_that_stood_still_is_believed_at_its_next_byte() {
    for (call, found, idle) in
        weak_ones().iter().flat_map(|c| [(c, true, true), (c, true, false), (c, false, true)])
    {
        for direction in [Direction::Sent, Direction::Received] {
            let mut rig = Rig::new();
            if found {
                rig.found(None);
            }
            rig.tick(if idle { SECOND } else { MS });
            match direction {
                Direction::Sent => rig.send(call),
                Direction::Received => rig.receive(call),
            }
            assert_eq!(rig.told().len(), usize::from(found && idle), "found {found}, idle {idle}");
        }
    }
}

#[test]
fn a_connection_is_watched_since_it_was_found_and_not_since_its_first_message() {
    let mut rig = Rig::new();
    rig.found(None);
    let found = rig.now;
    rig.tick(3600 * SECOND);
    let mut since = None;
    let call = status(ROOM);
    let event = SocketEvent {
        at: rig.now,
        socket: rig.id,
        netns: 0,
        addresses: Addresses { local: addr("10.0.0.1:40000"), peer: addr("10.0.0.2:50000") },
        task: None,
        what: What::Bytes(Bytes {
            direction: Direction::Sent,
            end: rig.sent.wrapping_add(u32::try_from(call.len()).unwrap()),
            len: u32::try_from(call.len()).unwrap(),
            body: Body::Whole(&call),
            snd_una: rig.una,
            rcv_nxt: rig.received,
        }),
    };
    rig.control.handle(&event, &mut |input| {
        if let Input::Message { connection, .. } = input {
            since = Some((connection.preexisting, connection.since));
        }
    });
    assert_eq!(since, Some((true, found)));
}

#[test]
fn a_stream_that_moved_on_or_had_bytes_under_way_is_not_believed() {
    let [newer, _] = weak_ones();
    // Not all of it acknowledged.
    let mut rig = Rig::new();
    rig.una = rig.sent.wrapping_sub(100);
    rig.found(None);
    rig.tick(SECOND);
    rig.send(&newer);
    assert_eq!(rig.told(), []);
    // A call was missed in between.
    let mut rig = Rig::new();
    rig.found(None);
    rig.tick(SECOND);
    rig.sent = rig.sent.wrapping_add(100);
    rig.send(&newer);
    assert_eq!(rig.told(), []);
    // Only its very next byte: after bytes that are none of ours it is doubted again.
    let mut rig = Rig::new();
    rig.found(None);
    rig.tick(SECOND);
    rig.send(b"none of ours");
    rig.send(&newer);
    assert_eq!(rig.told(), []);
}

#[test]
fn the_tail_of_a_status_is_not_taken_for_one() {
    for idle in [false, true] {
        let mut rig = Rig::new();
        rig.found(None);
        rig.tick(if idle { SECOND } else { 0 });
        let whole = status(ROOM);
        let (_, tail) = whole.split_at(frame(ROOM.to_string().as_bytes(), true).len());
        rig.send(tail);
        rig.send(&status(ROOM + 1));
        assert_eq!(rig.rooms(), [ROOM + 1]);
    }
}

#[test]
fn what_only_begins_like_a_message_proves_nothing() {
    let mut rig = Rig::new();
    let other = message(&[b"77", b"hello"]);
    rig.send(&other[..4]);
    rig.send(&other[4..]);
    rig.send(&other);
    // Two digits at the end of some longer message.
    rig.send(&message(&[b"128", b"0"]));
    assert_eq!(rig.told(), []);
    assert_eq!(rig.connections(ConnectionState::Pending), 1);
    rig.send(&status(ROOM));
    assert_eq!(rig.rooms(), [ROOM]);
}

#[test]
fn a_body_that_is_none_hides_the_stream_for_a_while_only() {
    let mut rig = Rig::new();
    // Begins like METADATA with an index of 60 MB.
    rig.send(b"\x01\x0277\x03\0\0\0\0\x03\x93\x87\0");
    let mut calls = 0u64;
    while rig.told.is_empty() && calls < 250 {
        rig.send(&metadata(ROOM + calls, 200));
        calls += 1;
    }
    assert!((10..30).contains(&calls), "{calls}");
    assert_eq!(rig.rooms(), [ROOM + calls - 1]);
}
