//! One socket whose calls are made up, and what the rooms are told of it.

use std::net::SocketAddr;

use roomtrace::control::{ConnectionState, Control, Dropped, Judgement, Limits};
use roomtrace::event::{
    Addresses, Body, Bytes, Direction, Found, Mono, NotCaptured, SECOND, Sequence, SocketEvent, SocketId,
    StateChange, Task, TcpState, What,
};
use roomtrace::rooms::model::Input;
use roomtrace::sglang::message::{KvPoll, Message};

use super::wire::{handshake, message, metadata_from, status};

pub(crate) const MS: u64 = SECOND / 1000;

pub(crate) const ROOM: u64 = 5_123_456_789_012_345_678;

pub(crate) fn addr(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// What the rooms were told, in short.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Told {
    Status {
        room: u64,
        status: KvPoll,
        end: u32,
        preexisting: bool,
    },
    Metadata {
        room: u64,
        pages: u64,
        required: Option<u32>,
        aux: Option<u32>,
        dummy: Option<bool>,
    },
    Other(&'static str),
    /// A step of a request or at a bootstrap server, as [`super::web`] writes it.
    Web(String),
    Foreign {
        frames: u16,
        first_len: u32,
    },
    Lossy {
        direction: Direction,
        bytes: u64,
    },
    State(TcpState, TcpState),
    Acknowledged(u32),
}

pub(crate) fn told(input: &Input<'_>) -> Told {
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
        Input::Request { server, n, step, .. } => Told::Web(super::web::request(*server, *n, step)),
        Input::Bootstrap { server, n, step, .. } => Told::Web(super::web::bootstrap(*server, *n, step)),
        Input::Unreadable { why, .. } => Told::Other(why.label()),
        Input::Task(_) => Told::Other("task"),
        Input::Trouble { .. } => Told::Other("trouble"),
        Input::Stand { .. } => Told::Other("stand"),
        Input::Process { .. } => Told::Other("process"),
        Input::Gauges { .. } => Told::Other("gauges"),
        Input::Spans { .. } => Told::Other("spans"),
        Input::Gpu(_) => Told::Other("gpu"),
        Input::Network(_) => Told::Other("network"),
        Input::Batch { .. } => Told::Other("batch"),
    }
}

/// One socket whose calls are made up, with its own clock.
pub(crate) struct Rig {
    pub(crate) control: Control,
    pub(crate) told: Vec<Told>,
    pub(crate) now: Mono,
    pub(crate) id: SocketId,
    /// Behind the last byte sent / received.
    pub(crate) sent: u32,
    pub(crate) received: u32,
    pub(crate) una: u32,
    /// How far the kernel has received beyond what was read.
    pub(crate) unread: u32,
    pub(crate) task: Option<Task>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::with(Limits::default())
    }

    pub(crate) fn with(limits: Limits) -> Self {
        Self {
            control: Control::new(limits),
            told: Vec::new(),
            now: Mono(SECOND),
            id: SocketId(7),
            sent: 1_000,
            received: 5_000,
            una: 1_000,
            unread: 1_000_000,
            task: None,
        }
    }

    /// A connection whose establishment is seen.
    pub(crate) fn open() -> Self {
        let mut rig = Self::new();
        rig.establish();
        rig
    }

    pub(crate) fn establish(&mut self) {
        self.state(TcpState::SynSent, TcpState::Established);
        self.told.clear();
    }

    pub(crate) fn event(&mut self, what: What<'_>) {
        self.now = self.now.plus(1_000);
        let event = SocketEvent {
            at: self.now,
            socket: self.id,
            netns: 0,
            addresses: Addresses { local: addr("10.0.0.1:40000"), peer: addr("10.0.0.2:50000") },
            task: self.task,
            what,
        };
        let told = &mut self.told;
        self.control.handle(&event, &mut |input| told.push(super::rig::told(&input)));
    }

    pub(crate) fn sequence(&self) -> Sequence {
        Sequence { write: self.sent, una: self.una, copied: self.received, rcv_nxt: self.received }
    }

    pub(crate) fn state(&mut self, old: TcpState, new: TcpState) {
        let sequence = self.sequence();
        self.event(What::State(StateChange { old, new, error: 0, sequence }));
    }

    pub(crate) fn close(&mut self, old: TcpState, error: u32) {
        let sequence = self.sequence();
        self.event(What::State(StateChange { old, new: TcpState::Close, error, sequence }));
    }

    pub(crate) fn found(&mut self, base: Option<(u32, u32)>) {
        let sequence = self.sequence();
        self.event(What::Found(Found { state: TcpState::Established, sequence, base }));
    }

    /// Reports bytes that end at `end`.
    pub(crate) fn report(&mut self, direction: Direction, end: u32, len: usize, body: Body<'_>) {
        let (snd_una, rcv_nxt) = (self.una, self.received.wrapping_add(self.unread));
        let len = u32::try_from(len).unwrap();
        self.event(What::Bytes(Bytes { direction, end, len, body, snd_una, rcv_nxt }));
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.sent = self.sent.wrapping_add(u32::try_from(bytes.len()).unwrap());
        self.report(Direction::Sent, self.sent, bytes.len(), Body::Whole(bytes));
    }

    /// Sends or receives bytes of which the source ships `head` and `tail` bytes.
    pub(crate) fn move_ends(&mut self, direction: Direction, bytes: &[u8], head: usize, tail: usize) {
        let place = if direction == Direction::Sent { &mut self.sent } else { &mut self.received };
        *place = place.wrapping_add(u32::try_from(bytes.len()).unwrap());
        let end = *place;
        let body = if head + tail < bytes.len() {
            Body::Ends { head: &bytes[..head], tail: &bytes[bytes.len() - tail..] }
        } else {
            Body::Whole(bytes)
        };
        self.report(direction, end, bytes.len(), body);
    }

    pub(crate) fn send_absent(&mut self, len: usize, why: NotCaptured) {
        self.sent = self.sent.wrapping_add(u32::try_from(len).unwrap());
        self.report(Direction::Sent, self.sent, len, Body::Absent(why));
    }

    pub(crate) fn receive(&mut self, bytes: &[u8]) {
        self.received = self.received.wrapping_add(u32::try_from(bytes.len()).unwrap());
        self.report(Direction::Received, self.received, bytes.len(), Body::Whole(bytes));
    }

    pub(crate) fn tick(&mut self, nanos: u64) {
        self.now = self.now.plus(nanos);
        let (now, told) = (self.now, &mut self.told);
        self.control.tick(now, &mut |input| told.push(super::rig::told(&input)));
    }

    pub(crate) fn told(&mut self) -> Vec<Told> {
        std::mem::take(&mut self.told)
    }

    pub(crate) fn rooms(&mut self) -> Vec<u64> {
        self.told()
            .into_iter()
            .filter_map(|t| match t {
                Told::Status { room, .. } | Told::Metadata { room, .. } => Some(room),
                _ => None,
            })
            .collect()
    }

    /// What was told without what depends on where a stream was joined.
    pub(crate) fn plain_told(&mut self) -> Vec<Told> {
        let mut told = self.told();
        for t in &mut told {
            if let Told::Status { end, preexisting, .. } = t {
                (*end, *preexisting) = (0, false);
            }
        }
        told
    }

    pub(crate) fn judged(&mut self) -> Vec<Judgement> {
        self.control.judgements().map(|(_, j)| j).collect()
    }

    pub(crate) fn dropped(&self, why: Dropped) -> u64 {
        self.control.counters().dropped().find(|(w, _)| *w == why).unwrap().1.count
    }

    pub(crate) fn connections(&self, state: ConnectionState) -> u64 {
        self.control.counters().connections().find(|(s, _)| *s == state).unwrap().1
    }
}

/// METADATA whose rank needs two.
pub(crate) fn metadata(room: u64, pages: usize) -> Vec<u8> {
    metadata_from("10.0.0.21", room, pages, 2)
}

/// A message of one of several kinds and releases.
pub(crate) fn some_message(kind: usize, room: u64) -> Vec<u8> {
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

/// A connection whose handshake is done.
pub(crate) fn shaken() -> Rig {
    let mut rig = Rig::open();
    rig.send(&handshake());
    rig
}

pub(crate) fn any_lossy(told: &[Told]) -> bool {
    told.iter().any(|t| matches!(t, Told::Lossy { .. }))
}
