//! What is not read here is named and let go; everything is bounded.

use roomtrace::control::{ConnectionState, Dropped, Judgement, Limits};
use roomtrace::event::{NotCaptured, SECOND, SocketId, TcpState};

use super::rig::{ROOM, Rig, Told, metadata, shaken};
use super::wire::{greeting, handshake, message, ready, status};

const WITHOUT_REQUESTS: Limits =
    Limits { sockets: 8, held_bytes: 4 << 20, partial_bytes: 16 << 20, requests: false };

#[test]
fn http_is_foreign_once_and_muted_where_requests_are_not_read() {
    for known in [true, false] {
        let mut rig = Rig::with(WITHOUT_REQUESTS);
        if known {
            rig.establish();
        }
        let request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
        rig.receive(request);
        rig.receive(request);
        let first_len = u32::try_from(request.len()).unwrap();
        assert_eq!(rig.told(), [Told::Foreign { frames: 0, first_len }]);
        assert_eq!(rig.judged(), [Judgement::Foreign]);
        assert_eq!(rig.connections(ConnectionState::Foreign), 1);
        assert_eq!(rig.dropped(Dropped::Foreign), 1);
        rig.state(TcpState::Established, TcpState::Close);
        rig.tick(2 * SECOND);
        assert_eq!(rig.dropped(Dropped::Hole), 0);
        assert_eq!(rig.control.sockets(), 0);
    }
}

#[test]
fn dialects_that_are_not_read_are_named() {
    let zmtp2 = b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05\0\0";
    for (bytes, name) in [
        (greeting(b"CURVE"), "curve"),
        (greeting(b"PLAIN"), "plain"),
        (greeting(b"GSSAPI"), "other_mechanism"),
        (zmtp2.to_vec(), "zmtp2"),
        (vec![1, 0], "zmtp1"),
    ] {
        let mut rig = Rig::open();
        rig.receive(&bytes);
        rig.receive(&bytes);
        let named: Vec<_> = rig.control.counters().unsupported().filter(|(_, n)| *n > 0).collect();
        assert!(matches!(named[..], [(dialect, 1)] if dialect.label() == name), "{named:?}");
        assert_eq!(rig.connections(ConnectionState::Unsupported), 1);
        assert_eq!(rig.judged(), [Judgement::Foreign]);
    }
}

#[test]
fn other_socket_types_are_foreign() {
    let mut rig = Rig::open();
    rig.send(&[greeting(b"NULL"), ready(b"DEALER"), status(ROOM)].concat());
    rig.send(&status(ROOM));
    assert_eq!(rig.judged(), [Judgement::Foreign]);
    assert_eq!(rig.control.counters().other_socket_types, 1);
}

#[test]
fn a_message_of_no_known_kind_is_foreign_with_its_shape() {
    let mut rig = shaken();
    rig.send(&message(&[b"hello", b"secret"]));
    rig.send(&message(&[b"MoriMsgGuard", b"77", b"4", b"", b""]));
    rig.send(&status(ROOM));
    let told = rig.told();
    assert_eq!(told[0], Told::Foreign { frames: 2, first_len: 5 });
    assert!(matches!(told[1], Told::Status { .. }), "mori is not foreign: {told:?}");
    let shapes: Vec<_> = rig.control.unknown_shapes().map(|(s, n)| (s.lengths.to_vec(), n)).collect();
    assert!(shapes.contains(&(vec![5, 6], 1)) && shapes.contains(&(vec![12, 2, 1, 0, 0], 1)), "{shapes:?}");
}

#[test]
fn malformed_bytes_cost_that_connection_only() {
    let mut rig = shaken();
    rig.send(&[0x40; 50]);
    assert_eq!(rig.told(), [Told::Foreign { frames: 0, first_len: 50 }]);
    assert_eq!(rig.dropped(Dropped::Malformed), 1);
    rig.send(&status(ROOM));
    assert_eq!(rig.rooms(), [ROOM]);
}

#[test]
fn sockets_given_up_are_forgotten_without_their_close() {
    let mut rig = Rig::with(WITHOUT_REQUESTS);
    let request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
    for (id, bytes) in [(1, &request[..]), (2, &greeting(b"CURVE")[..])] {
        rig.id = SocketId(id);
        rig.establish();
        rig.receive(bytes);
    }
    rig.tick(5 * SECOND);
    // Bytes that were on their way do not make it a new one, and keep it for a while.
    rig.receive(request);
    rig.tick(6 * SECOND);
    assert_eq!(rig.connections(ConnectionState::Foreign), 0);
    assert_eq!(rig.connections(ConnectionState::Unsupported), 1);
    rig.tick(11 * SECOND);
    assert_eq!((rig.control.sockets(), rig.connections(ConnectionState::Unsupported)), (0, 0));
    let counters = rig.control.counters();
    assert_eq!((counters.not_zmtp, counters.unsupported().map(|(_, n)| n).sum::<u64>()), (1, 1));
    // They are the first to make room.
    for id in 10..100 {
        rig.id = SocketId(id);
        rig.establish();
        rig.receive(request);
    }
    assert_eq!((rig.control.sockets(), rig.connections(ConnectionState::Foreign)), (8, 8));
    assert_eq!(rig.control.counters().not_zmtp, 91);
    assert_eq!((rig.control.counters().evicted, rig.dropped(Dropped::TableFull)), (0, 0));
}

#[test]
fn a_connection_that_shows_nothing_known_is_given_up() {
    let mut rig = Rig::new();
    for i in 0..300u32 {
        rig.send(&i.to_be_bytes().repeat(300));
    }
    assert_eq!(rig.judged(), [Judgement::Foreign]);
    assert_eq!(rig.control.counters().unrecognised, 1);
    assert_eq!(rig.told(), [Told::Other("other")]);
}

#[test]
fn a_connection_that_never_greets_is_not_pending_for_ever() {
    let mut rig = Rig::open();
    rig.tick(29 * SECOND);
    assert_eq!((rig.control.sockets(), rig.connections(ConnectionState::Pending)), (1, 1));
    // The kernel ships nothing of what does not begin as a greeting, not even its close.
    rig.tick(2 * SECOND);
    assert_eq!((rig.control.sockets(), rig.connections(ConnectionState::Pending)), (0, 0));
    assert_eq!((rig.control.counters().speechless, rig.judged()), (1, vec![]));
    // Nothing was decided: what is said after all is followed, as of a connection that was there.
    rig.send(&status(ROOM));
    assert_eq!(rig.rooms(), [ROOM]);
    // One that greets stays, and so does one that was found in silence: its greeting is long over.
    for id in [8, 9] {
        rig.id = SocketId(id);
        if id == 8 {
            rig.establish();
            rig.send(&greeting(b"NULL")[..10]);
        } else {
            rig.found(None);
        }
    }
    rig.tick(31 * SECOND);
    assert_eq!((rig.control.sockets(), rig.connections(ConnectionState::Pending)), (3, 2));
}

#[test]
fn a_connection_whose_budget_is_spent_is_not_pending() {
    let mut rig = Rig::new();
    rig.send_absent(100, NotCaptured::Vectors);
    assert_eq!(rig.connections(ConnectionState::Pending), 1);
    rig.send_absent(100, NotCaptured::Budget);
    assert_eq!(rig.connections(ConnectionState::Pending), 0);
    assert_eq!((rig.connections(ConnectionState::Foreign), rig.control.counters().unrecognised), (1, 1));
    assert_eq!(rig.judged(), [Judgement::Foreign]);
    // A connection that is known has no budget.
    let mut rig = shaken();
    rig.send_absent(100, NotCaptured::Budget);
    assert_eq!(rig.connections(ConnectionState::Foreign), 0);
}

#[test]
fn a_full_table_turns_away_and_counts() {
    let mut rig = Rig::with(Limits { sockets: 2, ..Limits::default() });
    for id in 0..5 {
        rig.id = SocketId(id);
        rig.send(&status(ROOM + id));
    }
    assert_eq!(rig.rooms(), [ROOM, ROOM + 1]);
    assert_eq!(rig.dropped(Dropped::TableFull), 3);
    // A closed socket makes room.
    rig.id = SocketId(0);
    rig.state(TcpState::Established, TcpState::Close);
    rig.id = SocketId(9);
    rig.send(&status(ROOM + 9));
    assert_eq!(rig.rooms(), [ROOM + 9]);
}

#[test]
fn unfinished_messages_are_bounded_over_all_connections() {
    let limits = Limits { partial_bytes: 100_000, held_bytes: 50_000, ..Limits::default() };
    let mut rig = Rig::with(limits);
    for id in 0..1_000 {
        rig.id = SocketId(id);
        rig.send(&handshake());
        rig.send(&metadata(ROOM, 500)[..1_000]);
        // And calls that wait for earlier ones.
        rig.sent = rig.sent.wrapping_add(10);
        rig.send(&[0; 1_000]);
    }
    assert!(rig.control.held_bytes() <= 150_000 + 10_000, "{}", rig.control.held_bytes());
    assert!(rig.dropped(Dropped::Memory) > 0);
}
