//! Socket events in, room inputs out: what real connections do, and what goes wrong on them.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]
#![allow(missing_docs, reason = "tests")]

use std::net::SocketAddr;

use proptest::prelude::*;
use roomtrace::control::{ConnectionState, Control, Dropped, Judgement, Limits};
use roomtrace::event::{
    Addresses, Body, Bytes, Direction, Found, Mono, NotCaptured, SECOND, Sequence, SocketEvent, SocketId,
    StateChange, TcpState, What,
};
use roomtrace::rooms::model::Input;
use roomtrace::sglang::message::{KvPoll, Message};

const MS: u64 = SECOND / 1000;

fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// What the rooms were told, in short.
#[derive(Clone, Debug, PartialEq)]
enum Told {
    Status { room: u64, status: KvPoll, end: u32, preexisting: bool },
    Metadata { room: u64, pages: u64, required: Option<u32>, aux: Option<u32>, dummy: Option<bool> },
    Other(&'static str),
    Foreign { frames: u16, first_len: u32 },
    Lossy { direction: Direction, bytes: u64 },
    State(TcpState, TcpState),
    Acknowledged(u32),
}

fn told(input: &Input<'_>) -> Told {
    match input {
        Input::Message { decoded, end, connection, .. } => match decoded.message {
            Message::Status(s) => Told::Status {
                room: s.room,
                status: s.status,
                end: *end,
                preexisting: connection.preexisting,
            },
            Message::Metadata(m) => Told::Metadata {
                room: m.room,
                pages: m.pages,
                required: m.required,
                aux: m.aux_index,
                dummy: m.dummy,
            },
            ref m => Told::Other(m.kind().name()),
        },
        Input::Foreign { frames, first_len, .. } => Told::Foreign { frames: *frames, first_len: *first_len },
        Input::Lossy { direction, bytes, .. } => Told::Lossy { direction: *direction, bytes: *bytes },
        Input::State { change, .. } => Told::State(change.old, change.new),
        Input::Acknowledged { una, .. } => Told::Acknowledged(*una),
    }
}

/// One socket whose calls are made up, with its own clock.
struct Rig {
    control: Control,
    told: Vec<Told>,
    now: Mono,
    id: SocketId,
    /// Behind the last byte sent / received.
    sent: u32,
    received: u32,
    una: u32,
}

impl Rig {
    fn new() -> Self {
        Self::with(Limits::default())
    }

    fn with(limits: Limits) -> Self {
        Self {
            control: Control::new(limits),
            told: Vec::new(),
            now: Mono(SECOND),
            id: SocketId(7),
            sent: 1_000,
            received: 5_000,
            una: 1_000,
        }
    }

    /// A connection whose establishment is seen.
    fn open() -> Self {
        let mut rig = Self::new();
        rig.establish();
        rig
    }

    fn establish(&mut self) {
        self.state(TcpState::SynSent, TcpState::Established);
        self.told.clear();
    }

    fn event(&mut self, what: What<'_>) {
        self.now = self.now.plus(1_000);
        let event = SocketEvent {
            at: self.now,
            socket: self.id,
            netns: 0,
            addresses: Addresses { local: addr("10.0.0.1:40000"), peer: addr("10.0.0.2:50000") },
            task: None,
            what,
        };
        let told = &mut self.told;
        self.control.handle(&event, &mut |input| told.push(crate::told(&input)));
    }

    fn sequence(&self) -> Sequence {
        Sequence { write: self.sent, una: self.una, copied: self.received, rcv_nxt: self.received }
    }

    fn state(&mut self, old: TcpState, new: TcpState) {
        let sequence = self.sequence();
        self.event(What::State(StateChange { old, new, error: 0, sequence }));
    }

    fn found(&mut self, base: Option<(u32, u32)>) {
        let sequence = self.sequence();
        self.event(What::Found(Found { state: TcpState::Established, sequence, base }));
    }

    /// Reports bytes that end at `end`.
    fn report(&mut self, direction: Direction, end: u32, len: usize, body: Body<'_>) {
        let (snd_una, rcv_nxt) = (self.una, self.received.wrapping_add(1_000_000));
        let len = u32::try_from(len).unwrap();
        self.event(What::Bytes(Bytes { direction, end, len, body, snd_una, rcv_nxt }));
    }

    fn send(&mut self, bytes: &[u8]) {
        self.sent = self.sent.wrapping_add(u32::try_from(bytes.len()).unwrap());
        self.report(Direction::Sent, self.sent, bytes.len(), Body::Whole(bytes));
    }

    fn send_absent(&mut self, len: usize, why: NotCaptured) {
        self.sent = self.sent.wrapping_add(u32::try_from(len).unwrap());
        self.report(Direction::Sent, self.sent, len, Body::Absent(why));
    }

    fn receive(&mut self, bytes: &[u8]) {
        self.received = self.received.wrapping_add(u32::try_from(bytes.len()).unwrap());
        self.report(Direction::Received, self.received, bytes.len(), Body::Whole(bytes));
    }

    fn tick(&mut self, nanos: u64) {
        self.now = self.now.plus(nanos);
        let (now, told) = (self.now, &mut self.told);
        self.control.tick(now, &mut |input| told.push(crate::told(&input)));
    }

    fn told(&mut self) -> Vec<Told> {
        std::mem::take(&mut self.told)
    }

    fn rooms(&mut self) -> Vec<u64> {
        self.told()
            .into_iter()
            .filter_map(|t| match t {
                Told::Status { room, .. } | Told::Metadata { room, .. } => Some(room),
                _ => None,
            })
            .collect()
    }

    /// What was told without what depends on where a stream was joined.
    fn plain_told(&mut self) -> Vec<Told> {
        let mut told = self.told();
        for t in &mut told {
            if let Told::Status { end, preexisting, .. } = t {
                (*end, *preexisting) = (0, false);
            }
        }
        told
    }

    fn judged(&mut self) -> Vec<Judgement> {
        self.control.judgements().map(|(_, j)| j).collect()
    }

    fn dropped(&self, why: Dropped) -> u64 {
        self.control.counters().dropped().find(|(w, _)| *w == why).unwrap().1.count
    }

    fn connections(&self, state: ConnectionState) -> u64 {
        self.control.counters().connections().find(|(s, _)| *s == state).unwrap().1
    }
}

fn frame(body: &[u8], more: bool) -> Vec<u8> {
    let mut out = vec![u8::from(more)];
    if let Ok(len) = u8::try_from(body.len()) {
        out.push(len);
    } else {
        out[0] |= 2;
        out.extend_from_slice(&u64::try_from(body.len()).unwrap().to_be_bytes());
    }
    out.extend_from_slice(body);
    out
}

fn message(frames: &[&[u8]]) -> Vec<u8> {
    frames.iter().enumerate().flat_map(|(i, f)| frame(f, i + 1 < frames.len())).collect()
}

fn status(room: u64) -> Vec<u8> {
    message(&[room.to_string().as_bytes(), b"4", b"0"])
}

/// METADATA of SGLang 0.5.17 and later.
fn metadata(room: u64, pages: usize) -> Vec<u8> {
    let index: Vec<u8> = (1..=u32::try_from(pages).unwrap()).flat_map(u32::to_le_bytes).collect();
    let room = room.to_string();
    message(&[
        room.as_bytes(),
        b"10.0.0.21",
        b"41207",
        b"10.0.0.21:15847",
        &index,
        b"3",
        b"",
        b"2",
        b"0",
        b"",
    ])
}

/// A message of one of several kinds and releases.
fn some_message(kind: usize, room: u64) -> Vec<u8> {
    let text = room.to_string();
    let r = text.as_bytes();
    match kind {
        0 => status(room),
        1 => metadata(room, 20),
        2 => message(&[b"KV_STATUS", r, b"0", b"1", b"RDMA error"]),
        3 => message(&[b"ABORT_ACK", r, b"7", b"6"]),
        4 => message(&[b"ABORT", r, b"10.0.0.21", b"41207", b"3"]),
        5 => message(&[b"NixlMsgGuard", r, b"10.0.0.21", b"41207", b"3f0c2f5e-7a1d", &[7; 20], b"3", b"2"]),
        _ => message(&[r, b"10.0.0.21", b"41207", b"10.0.0.21:15847", &[9; 40], b"3", b"", b"2", b"0"]),
    }
}

fn greeting(mechanism: &[u8]) -> Vec<u8> {
    let mut out = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1];
    out.extend_from_slice(mechanism);
    out.resize(64, 0);
    out
}

fn ready(socket_type: &[u8]) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    body.push(u8::try_from(socket_type.len()).unwrap());
    body.extend_from_slice(socket_type);
    let mut out = vec![4, u8::try_from(body.len()).unwrap()];
    out.extend_from_slice(&body);
    out
}

fn handshake() -> Vec<u8> {
    [greeting(b"NULL"), ready(b"PUSH")].concat()
}

const ROOM: u64 = 5_123_456_789_012_345_678;

fn shaken() -> Rig {
    let mut rig = Rig::open();
    rig.send(&handshake());
    rig
}

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

#[test]
fn a_hole_is_told_and_the_stream_is_found_again() {
    let mut rig = shaken();
    rig.send(&status(ROOM));
    rig.told();
    rig.sent = rig.sent.wrapping_add(100);
    rig.send(&status(ROOM + 1));
    assert_eq!(rig.told(), [], "an earlier call may still come");
    rig.tick(60 * MS);
    let told = rig.told();
    assert_eq!(told[0], Told::Lossy { direction: Direction::Sent, bytes: 100 });
    assert!(matches!(told[1], Told::Status { room, .. } if room == ROOM + 1), "{told:?}");
    assert_eq!(rig.connections(ConnectionState::Acquired), 1);
    assert_eq!(rig.dropped(Dropped::Hole), 1);
}

#[test]
fn a_hole_inside_one_frame_is_told_and_the_stream_goes_on() {
    let mut rig = shaken();
    let whole = metadata(ROOM, 5_000);
    rig.send(&whole[..8192]);
    rig.sent = rig.sent.wrapping_add(5_000);
    rig.send(&whole[8192 + 5_000..]);
    rig.tick(60 * MS);
    let told = rig.told();
    assert_eq!(told[0], Told::Lossy { direction: Direction::Sent, bytes: 5_000 });
    assert!(matches!(told[1], Told::Metadata { pages: 5_000, required: Some(2), .. }), "{told:?}");
    assert_eq!(rig.connections(ConnectionState::Known), 1);
}

#[test]
fn an_uncaptured_call_across_frames_is_lossy() {
    let mut rig = shaken();
    rig.send(&status(1));
    rig.told();
    let whole = metadata(ROOM, 3_000);
    rig.send(&whole[..8192]);
    rig.send_absent(whole.len() - 8192, NotCaptured::TooLong);
    assert!(matches!(rig.told()[..], [Told::Lossy { .. }]));
    assert_eq!(rig.connections(ConnectionState::Lost), 1);
    rig.send(&status(ROOM));
    assert_eq!(rig.rooms(), [ROOM]);
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
fn a_repeated_end_is_lossy() {
    let mut rig = shaken();
    rig.send(&status(ROOM));
    let (end, again) = (rig.sent, status(ROOM + 1));
    rig.told();
    rig.report(Direction::Sent, end, again.len(), Body::Whole(&again));
    assert!(matches!(rig.told()[..], [Told::Lossy { .. }]));
    assert_eq!(rig.dropped(Dropped::Overlap), 1);
    rig.send(&status(ROOM + 2));
    assert_eq!(rig.rooms(), [ROOM + 2]);
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
fn bytes_that_nobody_reported_before_the_close_are_told() {
    let mut rig = shaken();
    rig.send(&status(ROOM));
    rig.sent = rig.sent.wrapping_add(27);
    rig.state(TcpState::Established, TcpState::Close);
    rig.told();
    rig.tick(2 * SECOND);
    assert_eq!(rig.told(), [Told::Lossy { direction: Direction::Sent, bytes: 27 }]);
    assert_eq!(rig.control.sockets(), 0);
    assert_eq!(rig.connections(ConnectionState::Known), 0);
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

#[test]
fn http_is_foreign_once_and_muted() {
    for known in [true, false] {
        let mut rig = if known { Rig::open() } else { Rig::new() };
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
    rig.send(&message(&[b"MoriMsgGuard", b"77", b"4", b"1", b""]));
    rig.send(&status(ROOM));
    let told = rig.told();
    assert_eq!(told[0], Told::Foreign { frames: 2, first_len: 5 });
    assert!(matches!(told[1], Told::Status { .. }), "mori is not foreign: {told:?}");
    let shapes: Vec<_> = rig.control.unknown_shapes().map(|(s, n)| (s.lengths.to_vec(), n)).collect();
    assert!(shapes.contains(&(vec![5, 6], 1)) && shapes.contains(&(vec![12, 2, 1, 1, 0], 1)), "{shapes:?}");
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

fn any_lossy(told: &[Told]) -> bool {
    told.iter().any(|t| matches!(t, Told::Lossy { .. }))
}

#[test]
fn what_a_hostile_peer_sends_is_no_capture_loss() {
    let oversized = [&[2][..], &(1u64 << 40).to_be_bytes(), &[0x40; 1000]].concat();
    let garbage = [0x40; 1000];
    for call in [&oversized[..], &garbage[..]] {
        let mut rig = Rig::open();
        rig.receive(&handshake());
        rig.receive(call);
        for _ in 0..50 {
            rig.receive(&garbage);
            rig.received = rig.received.wrapping_add(1 << 20);
            rig.report(Direction::Received, rig.received, 1 << 20, Body::Absent(NotCaptured::TooLong));
        }
        rig.state(TcpState::Established, TcpState::Close);
        rig.tick(2 * SECOND);
        let told = rig.told();
        assert!(!any_lossy(&told), "{told:?}");
        assert!(told.iter().filter(|t| matches!(t, Told::Foreign { .. })).count() <= 1, "{told:?}");
    }
    // A call that is too long to be captured, of many frames.
    let mut rig = Rig::open();
    rig.send(&handshake());
    rig.send_absent(1 << 20, NotCaptured::TooLong);
    rig.send(&garbage);
    assert_eq!(rig.told(), []);
    assert_eq!(rig.dropped(Dropped::NotCaptured), 1);
    // What it sends later is no more than what is known of a connection joined in its middle.
    rig.send(&status(ROOM));
    assert!(matches!(rig.told()[..], [Told::Status { preexisting: true, .. }]));
}

#[test]
fn nonsense_among_known_messages_is_no_capture_loss_but_a_hole_is() {
    let mut rig = shaken();
    for _ in 0..3 {
        rig.send(&status(ROOM));
        rig.send(&[0x40; 50]);
    }
    let told = rig.told();
    assert!(!any_lossy(&told), "{told:?}");
    assert_eq!(told.iter().filter(|t| matches!(t, Told::Foreign { .. })).count(), 1);
    assert_eq!(rig.dropped(Dropped::Malformed), 3);
    rig.send(&status(ROOM));
    rig.sent = rig.sent.wrapping_add(100);
    rig.send(&status(ROOM));
    rig.tick(60 * MS);
    assert!(any_lossy(&rig.told()));
}

#[test]
fn a_hole_at_the_beginning_of_a_connection_is_told() {
    for found in [false, true] {
        let mut rig = if found { Rig::new() } else { Rig::open() };
        if found {
            rig.found(Some((rig.sent, rig.received)));
        }
        let missing = handshake().len() + status(ROOM).len();
        rig.sent = rig.sent.wrapping_add(u32::try_from(missing).unwrap());
        rig.send(&status(ROOM + 1));
        rig.tick(60 * MS);
        let told = rig.told();
        let bytes = u64::try_from(missing).unwrap();
        assert_eq!(told[0], Told::Lossy { direction: Direction::Sent, bytes });
        assert!(matches!(told[1], Told::Status { preexisting: true, .. }), "{told:?}");
        // The greeting of the other side brings nothing of it back.
        rig.receive(&[greeting(b"NULL"), ready(b"PULL")].concat());
        rig.send(&status(ROOM + 2));
        assert!(matches!(rig.told()[..], [Told::Status { preexisting: true, .. }]));
    }
    // Where nothing is known of the beginning, a hole before anything known is told to nobody.
    let mut rig = Rig::new();
    rig.send(b"none of ours");
    rig.sent = rig.sent.wrapping_add(100);
    rig.send(&status(ROOM));
    rig.tick(60 * MS);
    assert!(!any_lossy(&rig.told()));
}

#[test]
fn sockets_given_up_are_forgotten_without_their_close() {
    let mut rig = Rig::with(Limits { sockets: 8, ..Limits::default() });
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
    assert_eq!(rig.told(), []);
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

/// Pieces of a stream with rooms counted up, as calls of random sizes.
fn splits(len: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1..200usize, 1..len)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn any_split_gives_the_same_messages(sizes in splits(60)) {
        let mut rig = Rig::open();
        let mut stream = handshake();
        for i in 0..20 {
            stream.extend(if i % 3 == 0 { metadata(ROOM + i, 100) } else { status(ROOM + i) });
        }
        let mut rest = &stream[..];
        for size in sizes.iter().cycle() {
            let (call, after) = rest.split_at((*size).min(rest.len()));
            rig.send(call);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(rig.rooms(), (ROOM..ROOM + 20).collect::<Vec<_>>());
    }

    #[test]
    fn every_lost_call_is_told_and_only_true_rooms_are_named(lost in prop::collection::vec(any::<bool>(), 40)) {
        let mut rig = shaken();
        let mut missing = 0;
        for (i, lost) in (0u64..).zip(&lost) {
            let call = if i % 4 == 0 { metadata(ROOM + i, 40) } else { status(ROOM + i) };
            if *lost {
                missing += u64::try_from(call.len()).unwrap();
                rig.sent = rig.sent.wrapping_add(u32::try_from(call.len()).unwrap());
            } else {
                rig.send(&call);
            }
        }
        rig.state(TcpState::Established, TcpState::Close);
        rig.tick(60 * MS);
        rig.tick(2 * SECOND);
        let told = rig.told();
        let told_missing: u64 =
            told.iter().map(|t| if let Told::Lossy { bytes, .. } = t { *bytes } else { 0 }).sum();
        prop_assert_eq!(told_missing, missing);
        let rooms: Vec<u64> = told
            .iter()
            .filter_map(|t| match t {
                Told::Status { room, .. } | Told::Metadata { room, .. } => Some(*room),
                _ => None,
            })
            .collect();
        // Calls begin at messages here, so not one of those that came is lost.
        let expected: Vec<u64> =
            (ROOM..).zip(&lost).filter(|(_, lost)| !**lost).map(|(room, _)| room).collect();
        prop_assert_eq!(rooms, expected);
    }

    #[test]
    fn mutated_streams_never_panic_and_stay_small(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..20),
        size in 1..300usize,
        jumps in prop::collection::vec(-300i32..300, 0..10),
    ) {
        let mut rig = Rig::open();
        let mut stream = handshake();
        for i in 0..30 {
            stream.extend(if i % 3 == 0 { metadata(ROOM + i, 100) } else { status(ROOM + i) });
        }
        for (at, byte) in &flips {
            *at.get_mut(&mut stream) = *byte;
        }
        for (i, call) in stream.chunks(size).enumerate() {
            if i % 5 == 4 && let Some(jump) = jumps.get(i / 5) {
                rig.sent = rig.sent.wrapping_add_signed(*jump);
            }
            rig.send(call);
        }
        rig.tick(SECOND);
        prop_assert!(rig.control.held_bytes() < 64 << 10);
    }

    /// Joined anywhere, cut anywhere: no message is told that was not sent, and soon all are told.
    #[test]
    fn a_stream_joined_anywhere_gives_true_messages_only(
        kinds in prop::collection::vec(0..7usize, 30),
        skip in any::<prop::sample::Index>(),
        sizes in splits(60),
        found in any::<bool>(),
    ) {
        let messages: Vec<Vec<u8>> = (ROOM..).zip(&kinds).map(|(room, kind)| some_message(*kind, room)).collect();
        let mut true_ones = Vec::new();
        for message in &messages {
            let mut alone = shaken();
            alone.send(message);
            true_ones.extend(alone.plain_told());
        }
        let stream = messages.concat();
        let mut rest = &stream[skip.index(stream.len() / 2)..];
        let mut rig = Rig::new();
        if found {
            // At once: what is cut in two follows at once as well.
            rig.found(None);
        }
        for size in sizes.iter().cycle() {
            let (call, after) = rest.split_at((*size).min(rest.len()));
            rig.send(call);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        let told = rig.plain_told();
        prop_assert!(true_ones.ends_with(&told), "{told:?} of {true_ones:?}");
    }

    #[test]
    fn random_bytes_are_no_messages(calls in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..600), 0..50)) {
        let mut idle = Rig::new();
        idle.found(None);
        idle.tick(SECOND);
        for mut rig in [Rig::open(), Rig::new(), shaken(), idle] {
            for call in &calls {
                rig.send(call);
                rig.receive(call);
            }
            rig.tick(SECOND);
            prop_assert!(rig.control.held_bytes() < 64 << 10);
            prop_assert_eq!(rig.rooms(), Vec::<u64>::new());
        }
    }
}
