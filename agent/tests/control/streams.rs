//! Connections seen from their beginning: every message once, in order, with its acknowledgement.

use roomtrace::control::{ConnectionState, Judgement};
use roomtrace::event::{Body, Direction, NotCaptured, SECOND, SocketId, TcpState};
use roomtrace::sglang::message::KvPoll;

use super::rig::{ROOM, Rig, Told, metadata, shaken};
use super::wire::{greeting, handshake, ready, status};

#[test]
fn a_connection_from_its_beginning() {
    let mut rig = Rig::open();
    rig.send(&greeting(b"NULL")[..10]);
    rig.send(&greeting(b"NULL")[10..11]);
    rig.send(&greeting(b"NULL")[11..]);
    rig.receive(&[greeting(b"NULL"), ready(b"PULL")].concat());
    // READY and the first message may share one call.
    rig.send(&[ready(b"PUSH"), status(ROOM)].concat());
    let end = rig.sent;
    assert_eq!(rig.told(), [Told::Status { room: ROOM, status: KvPoll::Success, end, preexisting: false }]);
    assert_eq!(rig.judged(), [Judgement::Zmtp]);
    assert_eq!(rig.connections(ConnectionState::Known), 1);
}

#[test]
fn metadata_of_200_000_pages_as_libzmq_sends_it() {
    let mut rig = shaken();
    let whole = metadata(ROOM, 200_000);
    let tail = whole.len() - 13;
    rig.send(&whole[..8192]);
    rig.send_absent(tail - 8192, NotCaptured::TooLong);
    rig.send(&whole[tail..]);
    rig.send(&status(1));
    let told = rig.told();
    let expected =
        Told::Metadata { room: ROOM, pages: 200_000, required: Some(2), aux: Some(3), dummy: Some(false) };
    assert_eq!(told[0], expected);
    assert!(matches!(told[1], Told::Status { room: 1, .. }));
    assert_eq!(told.len(), 2, "{told:?}");
}

#[test]
fn metadata_received_in_partial_reads_also_when_joined_at_it() {
    for joined in [false, true] {
        let mut rig = if joined { Rig::new() } else { Rig::open() };
        if !joined {
            rig.receive(&handshake());
        }
        let whole = metadata(ROOM, 200_000);
        let tail = whole.len() - 13;
        rig.receive(&whole[..8192]);
        for len in [300_000, tail - 8192 - 300_000] {
            rig.received = rig.received.wrapping_add(u32::try_from(len).unwrap());
            rig.report(Direction::Received, rig.received, len, Body::Absent(NotCaptured::TooLong));
        }
        rig.receive(&whole[tail..]);
        assert!(matches!(rig.told()[..], [Told::Metadata { pages: 200_000, required: Some(2), .. }]));
    }
}

#[test]
fn eighty_messages_in_one_call() {
    let mut rig = shaken();
    let call: Vec<u8> = (0..80).flat_map(|i| metadata(ROOM + i, 8)).collect();
    rig.send(&call);
    assert_eq!(rig.rooms(), (ROOM..ROOM + 80).collect::<Vec<_>>());
    // And as full buffers that cut messages in two.
    for piece in call.chunks(97) {
        rig.send(piece);
    }
    assert_eq!(rig.rooms(), (ROOM..ROOM + 80).collect::<Vec<_>>());
}

#[test]
fn calls_out_of_order_are_put_in_order() {
    let mut rig = shaken();
    let held = rig.control.held_bytes();
    let (first, second, third) = (status(ROOM), metadata(ROOM + 1, 8), status(ROOM + 2));
    let start = rig.sent;
    let end = |n: usize| start.wrapping_add(u32::try_from(n).unwrap());
    let (a, b) = (first.len(), first.len() + second.len());
    let c = b + third.len();
    rig.report(Direction::Sent, end(c), third.len(), Body::Whole(&third));
    rig.report(Direction::Sent, end(b), second.len(), Body::Whole(&second));
    rig.report(Direction::Sent, end(a), first.len(), Body::Whole(&first));
    assert_eq!(rig.rooms(), [ROOM, ROOM + 1, ROOM + 2]);
    rig.tick(SECOND);
    assert_eq!(rig.told(), []);
    assert_eq!(rig.control.held_bytes(), held);
}

#[test]
fn sequence_numbers_wrap() {
    let mut rig = Rig::new();
    rig.sent = u32::MAX - 100;
    rig.una = rig.sent;
    rig.establish();
    rig.send(&handshake());
    for i in 0..10 {
        rig.send(&status(ROOM + i));
    }
    assert_eq!(rig.rooms(), (ROOM..ROOM + 10).collect::<Vec<_>>());
    assert!(rig.sent < 1_000);
}

#[test]
fn a_fin_counts_one() {
    let mut rig = Rig::open();
    rig.receive(&handshake());
    rig.state(TcpState::Established, TcpState::CloseWait);
    // The call that drains the stream reports the FIN as well.
    let last = status(ROOM);
    rig.received = rig.received.wrapping_add(u32::try_from(last.len()).unwrap() + 1);
    rig.report(Direction::Received, rig.received, last.len(), Body::Whole(&last));
    rig.state(TcpState::LastAck, TcpState::Close);
    rig.tick(2 * SECOND);
    let told = rig.told();
    assert!(matches!(told[1], Told::Status { room: ROOM, .. }), "{told:?}");
    assert!(!told.iter().any(|t| matches!(t, Told::Lossy { .. })), "{told:?}");
    assert_eq!(rig.control.sockets(), 0);
}

#[test]
fn a_connection_closed_in_the_middle_of_a_frame_says_nothing_more() {
    let mut rig = shaken();
    rig.send(&metadata(ROOM, 8)[..40]);
    rig.state(TcpState::Established, TcpState::Close);
    rig.tick(2 * SECOND);
    assert_eq!(rig.told(), [Told::State(TcpState::Established, TcpState::Close)]);
    assert_eq!(rig.control.held_bytes(), 0);
}

#[test]
fn acknowledgements_are_told_once_they_pass_a_message() {
    let mut rig = shaken();
    rig.una = rig.sent;
    rig.send(&status(ROOM));
    let first = rig.sent;
    rig.told();
    rig.una = first.wrapping_sub(1);
    rig.receive(b"");
    assert_eq!(rig.told(), []);
    rig.una = first;
    rig.send(&status(ROOM + 1));
    assert_eq!(rig.told()[1..], [Told::Acknowledged(first)]);
    // What the kernel took without an answer before the reset is not acknowledged.
    rig.state(TcpState::Established, TcpState::Close);
    assert_eq!(rig.told(), [Told::State(TcpState::Established, TcpState::Close)]);
}

#[test]
fn an_unset_field_acknowledges_nothing() {
    let mut rig = Rig::new();
    (rig.sent, rig.una) = (3_000_000_000, 3_000_000_000);
    rig.establish();
    rig.send(&handshake());
    rig.una = 0;
    rig.send(&status(ROOM));
    rig.send(&status(ROOM + 1));
    assert!(!rig.told().iter().any(|t| matches!(t, Told::Acknowledged(_))));
}

#[test]
fn attempts_and_listeners_pass_through() {
    let mut rig = Rig::new();
    rig.state(TcpState::Close, TcpState::SynSent);
    rig.state(TcpState::SynSent, TcpState::Close);
    rig.id = SocketId(8);
    rig.state(TcpState::Listen, TcpState::Close);
    assert_eq!(
        rig.told(),
        [
            Told::State(TcpState::Close, TcpState::SynSent),
            Told::State(TcpState::SynSent, TcpState::Close),
            Told::State(TcpState::Listen, TcpState::Close),
        ]
    );
    rig.tick(2 * SECOND);
    assert_eq!(rig.control.sockets(), 0);
}
