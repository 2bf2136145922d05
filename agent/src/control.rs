//! Socket events → what the rooms are told: stream offsets, ZMTP, SGLang and HTTP decoding put together.
//!
//! Pure: no I/O, no clock (time is an argument), no unsafe code. Every table is bounded by [`Limits`] and
//! counts what it turns away ([`Counters`]).

mod batches;
mod counters;
mod ends;
mod flow;
mod judge;
mod saved;
mod socket;
mod web;

use std::collections::VecDeque;

pub use batches::BatchCounts;
use batches::Batches;
use counters::Shapes;
pub use counters::{ConnectionState, Counters, Dropped, Loss, Shape};
use flow::{Findings, Out};
use judge::begin_web;
use saved::Returning;
pub use saved::{SavedControl, SavedSocket};
use socket::{Socket, Stream, Unacknowledged};
use web::{Heard, Web};

use crate::batch::{Batch, Layout};
use crate::event::{
    Bytes, Direction, Found, Mono, Sequence, SocketEvent, SocketId, Stand, StateChange, TcpState, Trouble,
    What,
};
use crate::rooms::model::{Connection, Input};
use crate::stream::{Call, Held, Lane, Piece, Table};
use crate::zmtp::Decoder;

/// Bounds of everything that grows with traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sockets followed at a time.
    pub sockets: usize,
    /// Bytes of calls held back in all, waiting for an earlier call of the same stream.
    pub held_bytes: usize,
    /// Bytes of unfinished messages, heads and bodies kept in all.
    pub partial_bytes: usize,
    /// Whether HTTP is read: requests at engines' ports and at bootstrap servers. Otherwise it is foreign.
    pub requests: bool,
}

impl Default for Limits {
    fn default() -> Self {
        Self { sockets: 65_536, held_bytes: 4 << 20, partial_bytes: 16 << 20, requests: true }
    }
}

/// What a socket turned out to be: the source may stop shipping bytes of a foreign one. One that was judged may still turn
/// out to be foreign: the later judgement counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// Control traffic: ship every call.
    Zmtp,
    /// HTTP of an engine or of a bootstrap server: ship the ends of what asks, and the beginning of what answers.
    Http,
    /// Nothing that is read here (another protocol, another ZMTP socket type, encrypted).
    Foreign,
    /// The same of one that was taken for HTTP by its first byte, and is none.
    Neither,
}

/// Whether sequence number `a` lies behind (later than) `b`.
const fn behind(a: u32, b: u32) -> bool {
    a.wrapping_sub(b).cast_signed() > 0
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
    http: crate::http::Counters,
    shapes: Shapes,
    /// Joins what the optional probes see; `None`: they are off.
    batches: Option<Box<Batches>>,
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
                http: crate::http::Counters::default(),
                shapes: Shapes::default(),
                batches: None,
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
            What::Trouble(trouble) => self.trouble(event, trouble, sink),
            What::Stand(stand) => self.stand(event, &stand, sink),
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

    /// From now on remembers who asked prefill processes for what, so that [`Self::batch`] can tell whose a batch is.
    pub fn follow_batches(&mut self) {
        self.shared.batches.get_or_insert_default();
    }

    /// The batches of this process are seen from now on.
    pub fn watch_batches(&mut self, pid: u32, layout: Layout) {
        if let Some(batches) = &mut self.shared.batches {
            batches.watch(pid, layout);
        }
    }

    /// The process has ended.
    pub fn forget_batches(&mut self, pid: u32) {
        if let Some(batches) = &mut self.shared.batches {
            batches.forget(pid);
        }
    }

    /// Takes what a probe saw. To be given in the order of time, also among socket events.
    pub fn batch(&mut self, batch: &Batch<'_>, sink: &mut impl FnMut(Input<'_>)) {
        if let Some(batches) = &mut self.shared.batches {
            batches.take(batch, sink);
        }
    }

    /// Records of the probes were lost.
    pub fn lost_batches(&mut self, at: Mono, sink: &mut impl FnMut(Input<'_>)) {
        if let Some(batches) = &mut self.shared.batches {
            batches.lost(at, sink);
        }
    }

    /// What became of batches; `None`: the probes are off.
    pub fn batch_counts(&self) -> Option<BatchCounts> {
        self.shared.batches.as_ref().map(|b| b.counts)
    }

    /// Sockets judged since the last call.
    pub fn judgements(&mut self) -> impl Iterator<Item = (SocketId, Judgement)> + '_ {
        self.shared.judgements.drain(..)
    }

    /// Counts so far.
    pub const fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Counts of what was read as HTTP.
    pub const fn http_counters(&self) -> &crate::http::Counters {
        &self.shared.http
    }

    /// Connections let go, by reason; each counts once.
    pub fn unread(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let Shared { counters, http, .. } = &self.shared;
        let zmtp = counters.unsupported().map(|(dialect, n)| (dialect.label(), n));
        let is_not_http = |why: web::Unread| why == web::Unread::NotHttp;
        let not_http: u64 = http.unread().filter(|(why, _)| is_not_http(*why)).map(|(_, n)| n).sum();
        let http = http.unread().filter(move |(why, _)| !is_not_http(*why)).map(|(why, n)| (why.label(), n));
        zmtp.chain(http).chain([
            ("other_socket_type", counters.other_socket_types),
            ("neither", counters.not_zmtp.saturating_add(not_http)),
            ("unrecognised", counters.unrecognised),
        ])
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
        let Some(socket) = self.sockets.get_mut(event.socket, event.at) else {
            if self.know(event, sink) {
                return self.bytes(event, bytes, sink);
            }
            self.shared.counters.drop_bytes(Dropped::TableFull, u64::from(bytes.len));
            return;
        };
        let shared = &mut self.shared;
        socket.task = event.task.or(socket.task);
        if socket.given_up.is_some() {
            shared.counters.drop_bytes(Dropped::Foreign, u64::from(bytes.len));
            return;
        }
        // What drains the stream up to the peer's last byte may have taken its FIN as well.
        let drained = bytes.direction == Direction::Received && bytes.end == bytes.rcv_nxt;
        shared.before_request(event, socket, bytes, sink);
        let mutes = socket.requests().is_some_and(|requests| requests != bytes.direction);
        let stream = socket.stream(bytes.direction);
        stream.meet(event.at, bytes.end.wrapping_sub(bytes.len));
        let fin = if mutes { stream.fin && drained } else { stream.fin || drained };
        let call = Call { at: event.at, end: bytes.end, len: bytes.len, body: bytes.body, fin };
        shared.run(event.socket, socket, bytes.direction, event.at, sink, |lane, held, take| {
            if mutes {
                return lane.push_on(&call, held, take);
            }
            lane.expire(event.at, held, take);
            lane.push(&call, held, take);
        });
        shared.after_fin(event, socket, sink);
        shared.doubt(event.at, event.socket, socket, bytes, sink);
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
        self.shared.end_requests(event, socket, change, sink);
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

    /// TCP had trouble with a socket.
    fn trouble(&mut self, event: &SocketEvent<'_>, trouble: Trouble, sink: &mut impl FnMut(Input<'_>)) {
        let Some(socket) = self.sockets.get_mut(event.socket, event.at) else { return };
        if socket.given_up.is_some() {
            return;
        }
        if let Trouble::Retransmitted { una, .. } = trouble {
            self.shared.acknowledge(event, socket, una, sink);
        }
        self.shared.counters.inputs += 1;
        sink(Input::Trouble { at: event.at, connection: socket.connection(event.socket), trouble });
    }

    /// Somebody asked where a socket stands.
    fn stand(&mut self, event: &SocketEvent<'_>, stand: &Stand, sink: &mut impl FnMut(Input<'_>)) {
        let Some(socket) = self.sockets.get_mut(event.socket, event.at) else { return };
        if socket.given_up.is_some() {
            return;
        }
        self.shared.acknowledge(event, socket, stand.sequence.una, sink);
        self.shared.counters.inputs += 1;
        sink(Input::Stand { at: event.at, socket: event.socket, stand: *stand });
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
        let others = self.partial.saturating_sub(socket.held());
        let may_be_http = self.limits.requests && socket.judged.is_none() && socket.given_up.is_none();
        let Socket { sent, received, web, .. } = &mut *socket;
        let (Stream { lane, decoder, history, .. }, other) = match direction {
            Direction::Sent => (sent, received),
            Direction::Received => (received, sent),
        };
        let mut out = Out {
            connection,
            direction,
            history,
            counters: &mut self.counters,
            shapes: &mut self.shapes,
            batches: self.batches.as_deref_mut(),
            sink,
            findings,
        };
        let http = &mut self.http;
        let mut heard = Heard::default();
        act(lane, &mut self.held, &mut |piece| {
            if web.is_none() && may_be_http {
                *web = begin_web(decoder, &mut other.decoder, direction, &piece).map(Box::new);
                if let Some(web) = web {
                    // It may not be muted yet.
                    heard.judged |= web.is_joined();
                    out.not_zmtp(now, &piece);
                }
            }
            let Some(web) = web else { return flow::take(decoder, &mut out, now, piece) };
            let mut out = web::Out { connection, counters: out.counters, http, sink: out.sink };
            heard.add(web.take(direction, now, piece, &mut out));
        });
        let held = |decoder: &Decoder, web: &Option<Box<Web>>| {
            decoder.held() + other.decoder.held() + web.as_ref().map_or(0, |web| web.held())
        };
        if others + held(decoder, web) > self.limits.partial_bytes {
            if decoder.is_unfinished() {
                decoder.lose();
                out.broken();
                out.not_understood(now, Dropped::Memory, decoder.take_unsynced());
            } else if let Some(web) = web.as_mut().filter(|web| web.is_unfinished()) {
                out.counters.http_memory += 1;
                web.lose_sight(
                    now,
                    &mut web::Out { connection, counters: out.counters, http, sink: out.sink },
                );
            }
        }
        self.partial = others + held(decoder, web);
        let findings = out.findings;
        if direction == Direction::Sent
            && let Some((first, last)) = findings.ends
        {
            socket.unacknowledged.sent(first, last);
        }
        self.conclude(now, id, socket, &findings, sink);
        self.conclude_web(now, id, socket, heard, sink);
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
        self.with_web(id, socket, sink, |web, out| web.lose_sight(now, out));
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
