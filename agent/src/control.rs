//! Socket events → what the rooms are told: stream offsets, ZMTP and SGLang decoding put together.
//!
//! Pure: no I/O, no clock (time is an argument), no unsafe code. Every table is bounded by [`Limits`] and
//! counts what it turns away ([`Counters`]).

mod counters;
mod flow;
mod saved;

use std::collections::VecDeque;

use counters::Shapes;
pub use counters::{ConnectionState, Counters, Dropped, Loss, Shape};
use flow::{Findings, History, Out, Unread};
use saved::Returning;
pub use saved::{SavedControl, SavedSocket};

use crate::event::{
    Addresses, Body, Bytes, Direction, Found, Mono, NotCaptured, SECOND, Sequence, SocketEvent, SocketId,
    StateChange, Task, TcpState, What,
};
use crate::rooms::model::{Connection, Input};
use crate::stream::{Call, Held, Lane, Piece, Table};
use crate::zmtp::{Confidence, Decoder, SocketType};

/// Bounds of everything that grows with traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sockets followed at a time.
    pub sockets: usize,
    /// Bytes of calls held back in all, waiting for an earlier call of the same stream.
    pub held_bytes: usize,
    /// Bytes of unfinished messages kept in all.
    pub partial_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { sockets: 65_536, held_bytes: 4 << 20, partial_bytes: 16 << 20 }
    }
}

/// What a socket turned out to be: the source may stop shipping bytes of a foreign one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// Control traffic: ship every call.
    Zmtp,
    /// HTTP of an engine or of a bootstrap server: ship the ends of what asks, and the beginning of what answers.
    Http,
    /// Nothing that is read here (another protocol, another ZMTP socket type, encrypted).
    Foreign,
}

/// A connection joined in its middle that shows no known message is foreign after so many calls …
const DOUBT_CALLS: u32 = 256;
/// … or so many bytes. A rank's connection shows one at its first call that begins at a message.
const DOUBT_BYTES: u64 = 256 << 10;

/// A stream found with nothing under way that stands still for so long has no message begun: the pieces of one
/// follow each other within microseconds.
const IDLE: u64 = SECOND / 20;

/// Judgements kept until they are fetched.
const JUDGEMENTS: usize = 65_536;

/// Messages sent and not yet acknowledged by the peer's kernel.
#[derive(Clone, Copy, Debug, Default)]
struct Unacknowledged {
    /// Nothing to tell before `una` reaches this; `None`: nothing outstanding.
    next: Option<u32>,
    /// End of the last message sent.
    last: u32,
}

impl Unacknowledged {
    fn sent(&mut self, first: u32, last: u32) {
        self.next.get_or_insert(first);
        self.last = last;
    }

    /// Whether `una` is past a message, given that nothing behind `written` was ever sent.
    fn passes(&mut self, una: u32, written: u32) -> bool {
        let Some(next) = self.next else { return false };
        // A FIN may count one. What lies further ahead is no acknowledgement but an unset field.
        if behind(una, written.wrapping_add(1)) || behind(next, una) {
            return false;
        }
        self.next = if behind(self.last, una) { Some(una.wrapping_add(1)) } else { None };
        true
    }
}

/// Whether sequence number `a` lies behind (later than) `b`.
const fn behind(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).cast_signed() > 0
}

#[derive(Debug)]
struct Stream {
    lane: Lane,
    decoder: Decoder,
    history: History,
    /// The side that sends here has said its last, so a FIN may count one.
    fin: bool,
    /// Where it stood and when, if it was found with nothing under way.
    idle: Option<(u32, Mono)>,
    /// Where it stood when it was found.
    stood: Option<u32>,
}

impl Stream {
    const fn joined() -> Self {
        Self {
            lane: Lane::new(),
            decoder: Decoder::joined(),
            history: History::at_start(false),
            fin: false,
            idle: None,
            stood: None,
        }
    }

    /// Before its first call: libzmq sends whole messages, and a rest of one would not have waited.
    fn meet(&mut self, at: Mono, start: u32) {
        let idle = self.idle.take();
        if self.lane.next().is_none_or(|next| next == start)
            && idle.is_some_and(|(stood, found)| stood == start && at.since(found) >= IDLE)
        {
            self.decoder.expect_message();
        }
    }

    fn begin(&mut self, base: Option<u32>) {
        if self.lane.next().is_none() {
            self.decoder = Decoder::at_start();
            self.history = History::at_start(base.is_some());
            if let Some(base) = base {
                self.lane.begin(base);
            }
        }
    }
}

/// One socket.
#[derive(Debug)]
struct Socket {
    addresses: Addresses,
    netns: u32,
    task: Option<Task>,
    preexisting: bool,
    /// First bytes of one of its streams are missing.
    beginning_gone: bool,
    /// Since when it is watched.
    since: Mono,
    /// Not read any more, as this.
    given_up: Option<ConnectionState>,
    judged: Option<Judgement>,
    /// As which the gauge counts it.
    counted: Option<ConnectionState>,
    sent: Stream,
    received: Stream,
    unacknowledged: Unacknowledged,
    doubt_calls: u32,
    doubt_bytes: u64,
    /// In the list of sockets with calls held back.
    waiting: bool,
    /// Closed, with these last sequence numbers.
    closed: Option<Sequence>,
}

impl Socket {
    fn joined(event: &SocketEvent<'_>) -> Self {
        Self {
            addresses: event.addresses,
            netns: event.netns,
            task: None,
            preexisting: true,
            beginning_gone: false,
            since: event.at,
            given_up: None,
            judged: None,
            counted: None,
            sent: Stream::joined(),
            received: Stream::joined(),
            unacknowledged: Unacknowledged::default(),
            doubt_calls: 0,
            doubt_bytes: 0,
            waiting: false,
            closed: None,
        }
    }

    const fn connection(&self, socket: SocketId) -> Connection {
        Connection {
            socket,
            addresses: self.addresses,
            netns: self.netns,
            task: self.task,
            preexisting: self.preexisting,
            since: self.since,
        }
    }

    const fn stream(&mut self, direction: Direction) -> &mut Stream {
        match direction {
            Direction::Sent => &mut self.sent,
            Direction::Received => &mut self.received,
        }
    }

    fn held(&self) -> usize {
        self.sent.decoder.held() + self.received.decoder.held()
    }

    /// Open, and not one call on it was reported: it says nothing, or its source does not ship what it says, as it
    /// is no greeting. Should something come after all, it is joined there.
    fn is_speechless(&self) -> bool {
        self.doubt_calls == 0 && self.state() == Some(ConnectionState::Pending)
    }

    fn state(&self) -> Option<ConnectionState> {
        if self.closed.is_some() {
            return None;
        }
        if self.given_up.is_some() {
            return self.given_up;
        }
        let is = |c| self.sent.decoder.confidence() == c || self.received.decoder.confidence() == c;
        Some(if is(Confidence::Lost) {
            ConnectionState::Lost
        } else if is(Confidence::Acquired) {
            ConnectionState::Acquired
        } else if is(Confidence::Known) {
            ConnectionState::Known
        } else {
            ConnectionState::Pending
        })
    }
}

/// What the handling of one socket shares with that of all others.
#[derive(Debug)]
struct Shared {
    limits: Limits,
    held: Held,
    /// Memory of all decoders together, bytes.
    partial: usize,
    judgements: VecDeque<(SocketId, Judgement)>,
    counters: Counters,
    shapes: Shapes,
}

/// Follows every socket from its events to messages.
#[derive(Debug)]
pub struct Control {
    sockets: Table<Socket>,
    /// Sockets with calls held back.
    waiting: Vec<SocketId>,
    shared: Shared,
    /// What another agent left, until it is confirmed.
    returning: Option<Box<Returning>>,
}

impl Control {
    /// Nothing seen yet.
    pub fn new(limits: Limits) -> Self {
        Self {
            sockets: Table::new(limits.sockets),
            waiting: Vec::new(),
            shared: Shared {
                limits,
                held: Held::new(limits.held_bytes),
                partial: 0,
                judgements: VecDeque::new(),
                counters: Counters::default(),
                shapes: Shapes::default(),
            },
            returning: None,
        }
    }

    /// Takes one event and gives `sink` what it means for the rooms, in order.
    pub fn handle(&mut self, event: &SocketEvent<'_>, sink: &mut impl FnMut(Input<'_>)) {
        self.shared.counters.events += 1;
        match event.what {
            What::Bytes(bytes) => self.bytes(event, &bytes, sink),
            What::State(change) => self.state(event, change, sink),
            What::Found(found) => self.found(event, &found, sink),
            What::Trouble(_) | What::Stand(_) => {}
        }
    }

    /// Lets time pass: gives up waiting for calls that never came, forgets closed, muted and speechless sockets. Call it at
    /// least every 100 ms while events are few.
    pub fn tick(&mut self, now: Mono, sink: &mut impl FnMut(Input<'_>)) {
        let Self { sockets, waiting, shared, .. } = self;
        waiting.retain(|id| {
            let Some(socket) = sockets.get_mut(*id, Mono(0)) else { return false };
            let read = socket.given_up.is_none();
            for direction in [Direction::Sent, Direction::Received] {
                shared
                    .run(*id, socket, direction, now, sink, |lane, held, take| lane.expire(now, held, take));
            }
            socket.waiting = socket.sent.lane.is_waiting() || socket.received.lane.is_waiting();
            let (waiting, muted) = (socket.waiting, read && socket.given_up.is_some());
            if muted {
                sockets.mute(*id, now);
            }
            waiting
        });
        while let Some((id, mut socket)) = sockets.take_closed(now).or_else(|| sockets.take_muted(now)) {
            shared.retire(id, &mut socket, now, sink);
        }
        while let Some(id) = sockets.next_opened(now) {
            let speechless = sockets.get_mut(id, Mono(0)).is_some_and(|socket| socket.is_speechless());
            if speechless && let Some(mut socket) = sockets.remove(id) {
                shared.counters.speechless += 1;
                shared.retire(id, &mut socket, now, sink);
            }
        }
    }

    /// Sockets judged since the last call.
    pub fn judgements(&mut self) -> impl Iterator<Item = (SocketId, Judgement)> + '_ {
        self.shared.judgements.drain(..)
    }

    /// Counts so far.
    pub const fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Shapes of unknown messages with how often each was seen (64 of them; more are only counted).
    pub fn unknown_shapes(&self) -> impl Iterator<Item = (&Shape, u64)> {
        self.shared.shapes.iter()
    }

    /// Sockets followed now.
    pub fn sockets(&self) -> usize {
        self.sockets.len()
    }

    /// Every socket followed that is open, with what is known of it. In no order; costs a walk over all of them.
    pub fn connections(&self) -> impl Iterator<Item = (Connection, ConnectionState)> + '_ {
        self.sockets.iter().filter_map(|(id, socket)| Some((socket.connection(id), socket.state()?)))
    }

    /// Bytes held now: calls that wait for earlier ones, and unfinished messages.
    pub const fn held_bytes(&self) -> usize {
        self.shared.held.used() + self.shared.partial
    }

    /// Puts the event's socket into the table if it is not there; whether it is there now.
    fn know(&mut self, event: &SocketEvent<'_>, sink: &mut impl FnMut(Input<'_>)) -> bool {
        if self.sockets.get_mut(event.socket, event.at).is_some() {
            return true;
        }
        let mut gone = Vec::new();
        let mut evicted = |id, socket| gone.push((id, socket));
        let known = self.sockets.insert(event.socket, event.at, Socket::joined(event), &mut evicted).is_ok();
        for (id, mut socket) in gone {
            self.shared.counters.evicted += u64::from(socket.closed.is_none() && socket.given_up.is_none());
            self.shared.retire(id, &mut socket, event.at, sink);
        }
        known
    }

    fn bytes(&mut self, event: &SocketEvent<'_>, bytes: &Bytes<'_>, sink: &mut impl FnMut(Input<'_>)) {
        if !self.know(event, sink) {
            self.shared.counters.drop_bytes(Dropped::TableFull, u64::from(bytes.len));
            return;
        }
        let Some(socket) = self.sockets.get_mut(event.socket, event.at) else { return };
        let shared = &mut self.shared;
        socket.task = event.task.or(socket.task);
        if socket.given_up.is_some() {
            shared.counters.drop_bytes(Dropped::Foreign, u64::from(bytes.len));
            return;
        }
        // What drains the stream up to the peer's last byte may have taken its FIN as well.
        let drained = bytes.direction == Direction::Received && bytes.end == bytes.rcv_nxt;
        let stream = socket.stream(bytes.direction);
        stream.meet(event.at, bytes.end.wrapping_sub(bytes.len));
        let fin = stream.fin || drained;
        let call = Call { at: event.at, end: bytes.end, len: bytes.len, body: bytes.body, fin };
        shared.run(event.socket, socket, bytes.direction, event.at, sink, |lane, held, take| {
            lane.expire(event.at, held, take);
            lane.push(&call, held, take);
        });
        shared.doubt(event.socket, socket, bytes);
        shared.acknowledge(event, socket, bytes.snd_una, sink);
        if !socket.waiting && socket.stream(bytes.direction).lane.is_waiting() {
            socket.waiting = true;
            self.waiting.push(event.socket);
        }
        if socket.given_up.is_some() {
            self.sockets.mute(event.socket, event.at);
        }
    }

    fn state(&mut self, event: &SocketEvent<'_>, change: StateChange, sink: &mut impl FnMut(Input<'_>)) {
        let sequence = Some(change.sequence).filter(|s| *s != Sequence::default());
        let attempt = matches!(change.new, TcpState::SynSent | TcpState::SynRecv | TcpState::NewSynRecv);
        let opened = change.new == TcpState::Established
            && matches!(change.old, TcpState::SynSent | TcpState::SynRecv | TcpState::NewSynRecv);
        let known = if attempt || opened {
            self.know(event, sink)
        } else {
            self.sockets.get_mut(event.socket, event.at).is_some()
        };
        let mut stranger = Socket::joined(event);
        let Some(socket) = self.sockets.get_mut(event.socket, event.at).filter(|_| known) else {
            stranger.preexisting = !(attempt || opened || change.old == TcpState::Listen);
            stranger.task = event.task;
            self.shared.pass_on(event, &stranger, change, sink);
            return;
        };
        socket.task = socket.task.or(event.task);
        socket.addresses = event.addresses;
        if attempt || opened {
            socket.preexisting = false;
        }
        if opened {
            socket.sent.begin(sequence.map(|s| s.write));
            socket.received.begin(sequence.map(|s| s.copied));
        }
        socket.sent.fin |= sent_fin(change.new);
        socket.received.fin |= received_fin(change.new);
        if let Some(sequence) = sequence {
            self.shared.acknowledge(event, socket, sequence.una, sink);
        }
        if change.new == TcpState::Close && socket.closed.is_none() {
            socket.closed = Some(change.sequence);
            self.sockets.close(event.socket, event.at);
        }
        if opened {
            self.sockets.opened(event.socket, event.at);
        }
        let Some(socket) = self.sockets.get_mut(event.socket, event.at) else { return };
        self.shared.recount(socket);
        self.shared.pass_on(event, socket, change, sink);
    }

    fn found(&mut self, event: &SocketEvent<'_>, found: &Found, sink: &mut impl FnMut(Input<'_>)) {
        if self.returns(event, found, sink) {
            return;
        }
        // What calls and state changes have told already is newer.
        let known = self.sockets.get_mut(event.socket, event.at).is_some();
        if known || found.state == TcpState::Listen || !self.know(event, sink) {
            return;
        }
        let Some(socket) = self.sockets.get_mut(event.socket, event.at) else { return };
        // Whose it is, also if nothing is ever said on it.
        socket.task = event.task;
        let Sequence { write, una, copied, rcv_nxt } = found.sequence;
        socket.sent.idle = (write == una).then_some((write, event.at));
        socket.received.idle = (copied == rcv_nxt).then_some((copied, event.at));
        (socket.sent.stood, socket.received.stood) = (Some(write), Some(copied));
        if let Some((sent, received)) = found.base {
            // The kernel's counters take the SYN of the side that opened for a byte.
            let at_start = |now: u32, base: u32| now.wrapping_sub(base) <= 1;
            let sent = at_start(found.sequence.write, sent);
            let received = at_start(found.sequence.copied, received);
            if sent {
                socket.sent.begin(Some(found.sequence.write));
            }
            if received {
                socket.received.begin(Some(found.sequence.copied));
            }
            socket.preexisting = !(sent && received);
        }
        self.shared.recount(socket);
        if let Some(returning) = &mut self.returning {
            returning.meet(socket.connection(event.socket));
        }
    }
}

/// States in which this side has sent its FIN.
const fn sent_fin(state: TcpState) -> bool {
    use TcpState::{Close, Closing, FinWait1, FinWait2, LastAck, TimeWait};
    matches!(state, FinWait1 | FinWait2 | Closing | TimeWait | LastAck | Close)
}

/// States in which the peer's FIN has come.
const fn received_fin(state: TcpState) -> bool {
    use TcpState::{Close, CloseWait, Closing, LastAck, TimeWait};
    matches!(state, CloseWait | Closing | TimeWait | LastAck | Close)
}

impl Shared {
    /// Lets one lane of a socket do something and follows the pieces that come out of it.
    fn run(
        &mut self,
        id: SocketId,
        socket: &mut Socket,
        direction: Direction,
        now: Mono,
        sink: &mut impl FnMut(Input<'_>),
        act: impl FnOnce(&mut Lane, &mut Held, &mut dyn FnMut(Piece<'_>)),
    ) {
        let connection = socket.connection(id);
        let findings = Findings { beginning_gone: socket.beginning_gone, ..Findings::default() };
        let Stream { lane, decoder, history, .. } = socket.stream(direction);
        let others = self.partial.saturating_sub(decoder.held());
        let mut out = Out {
            connection,
            direction,
            history,
            counters: &mut self.counters,
            shapes: &mut self.shapes,
            sink,
            findings,
        };
        act(lane, &mut self.held, &mut |piece| flow::take(decoder, &mut out, now, piece));
        if others + decoder.held() > self.limits.partial_bytes && decoder.is_unfinished() {
            decoder.lose();
            out.broken();
            out.not_understood(now, Dropped::Memory, decoder.take_unsynced());
        }
        self.partial = others + decoder.held();
        let findings = out.findings;
        if direction == Direction::Sent
            && let Some((first, last)) = findings.ends
        {
            socket.unacknowledged.sent(first, last);
        }
        self.conclude(id, socket, &findings);
    }

    /// Draws from a stretch what it says of the connection.
    fn conclude(&mut self, id: SocketId, socket: &mut Socket, findings: &Findings) {
        socket.beginning_gone |= findings.beginning_gone;
        socket.preexisting &= !findings.greeted;
        socket.preexisting |= socket.beginning_gone;
        if let Some(Unread::Unsupported(dialect)) = findings.unread {
            self.counters.count_unsupported(dialect);
            self.give_up(id, socket, ConnectionState::Unsupported);
        } else if let Some(Unread::NotZmtp) = findings.unread {
            self.counters.not_zmtp += 1;
            self.give_up(id, socket, ConnectionState::Foreign);
        } else if findings.ready == Some(SocketType::Other) {
            self.counters.other_socket_types += 1;
            self.give_up(id, socket, ConnectionState::Foreign);
        } else if findings.ready.is_some() || findings.acquired {
            self.judge(id, socket, Judgement::Zmtp);
        }
        self.recount(socket);
    }

    fn give_up(&mut self, id: SocketId, socket: &mut Socket, as_what: ConnectionState) {
        self.partial = self.partial.saturating_sub(socket.held());
        socket.given_up = Some(as_what);
        for stream in [&mut socket.sent, &mut socket.received] {
            stream.decoder.kill();
            stream.lane.discard(&mut self.held);
        }
        self.judge(id, socket, Judgement::Foreign);
    }

    fn judge(&mut self, id: SocketId, socket: &mut Socket, judgement: Judgement) {
        if socket.judged == Some(judgement) {
            return;
        }
        socket.judged = Some(judgement);
        if self.judgements.len() < JUDGEMENTS {
            self.judgements.push_back((id, judgement));
        } else {
            self.counters.judgements_dropped += 1;
        }
    }

    /// Gives up a connection joined in its middle that shows nothing known for long, or as long as its source ships
    /// bytes of what is not judged.
    fn doubt(&mut self, id: SocketId, socket: &mut Socket, bytes: &Bytes<'_>) {
        if socket.given_up.is_some() || socket.state() != Some(ConnectionState::Pending) {
            return;
        }
        socket.doubt_calls = socket.doubt_calls.saturating_add(1);
        // A large body of what may be a message is no reason for doubt.
        let unfinished = socket.sent.decoder.is_unfinished() || socket.received.decoder.is_unfinished();
        if !unfinished {
            socket.doubt_bytes = socket.doubt_bytes.saturating_add(u64::from(bytes.len));
        }
        let spent = matches!(bytes.body, Body::Absent(NotCaptured::Budget)) && !unfinished;
        if spent || socket.doubt_calls > DOUBT_CALLS || socket.doubt_bytes > DOUBT_BYTES {
            self.counters.unrecognised += 1;
            self.give_up(id, socket, ConnectionState::Foreign);
            self.recount(socket);
        }
    }

    fn acknowledge(
        &mut self,
        event: &SocketEvent<'_>,
        socket: &mut Socket,
        una: u32,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        let Some(written) = socket.sent.lane.next() else { return };
        if socket.unacknowledged.passes(una, written) {
            self.counters.inputs += 1;
            sink(Input::Acknowledged { at: event.at, socket: event.socket, una });
        }
    }

    fn pass_on(
        &mut self,
        event: &SocketEvent<'_>,
        socket: &Socket,
        change: StateChange,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        self.counters.inputs += 1;
        sink(Input::State { at: event.at, connection: socket.connection(event.socket), change });
    }

    /// Ends the following of a socket.
    fn retire(&mut self, id: SocketId, socket: &mut Socket, now: Mono, sink: &mut impl FnMut(Input<'_>)) {
        let last = socket.closed.filter(|s| *s != Sequence::default());
        let ends = [(Direction::Sent, last.map(|s| s.write)), (Direction::Received, last.map(|s| s.copied))];
        for (direction, end) in ends {
            self.run(id, socket, direction, now, sink, |lane, held, take| lane.finish(end, held, take));
        }
        self.partial = self.partial.saturating_sub(socket.held());
        self.counters.move_connection(socket.counted.take(), None);
    }

    /// Brings the gauge of connections up to date.
    fn recount(&mut self, socket: &mut Socket) {
        let state = socket.state();
        if state != socket.counted {
            self.counters.move_connection(socket.counted, state);
            socket.counted = state;
        }
    }
}
