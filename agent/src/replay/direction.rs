//! One direction of one connection: puts its segments in order and keeps what is not acknowledged.
//!
//! No I/O, no clock. Sequence numbers are TCP's own (32 bits, wrapping); "before" and "after" are by the sign of their
//! difference (RFC 9293, section 3.4). Everything held is bounded, per direction and in all.

use std::collections::VecDeque;

use super::Repairs;
use super::packet::Segment;
use super::unacked::{Kind, Store, Unacked};
use crate::event::{
    Addresses, Body, Bytes, Direction, Mono, NotCaptured, SECOND, SocketEvent, SocketId, What,
};

/// Most bytes held out of order per direction; then the gap before them is given up.
const MAX_HELD: usize = 1 << 20;
/// Most segments held out of order per direction.
const MAX_HELD_SEGMENTS: usize = 1024;
/// How long a gap may stay that the peer has acknowledged, so that the capture must have lost it: longer than packets
/// change order between the queues of one capture.
const ACKED_GAP: u64 = SECOND / 10;
/// How long a gap may stay where no acknowledgement is captured at all: longer than the first retransmissions take
/// (RFC 6298: from 1 s, and Linux from 0.2 s).
const BLIND_GAP: u64 = 2 * SECOND;
/// An acknowledgement this far ahead of anything seen is not believed: beyond the largest window TCP allows
/// (RFC 7323: 1 GiB), rounded down to keep the sign of differences.
const MAX_AHEAD: i32 = 1 << 29;

/// `a - b` on the circle of sequence numbers.
pub(super) const fn diff(a: u32, b: u32) -> i32 {
    a.wrapping_sub(b).cast_signed()
}

/// One end as events name it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Name {
    pub(super) socket: SocketId,
    pub(super) addresses: Addresses,
}

/// Where a direction's events go: the time, both ends, and how far the other direction is acknowledged.
pub(super) struct Flow<'a, S> {
    pub(super) at: Mono,
    pub(super) sender: &'a Name,
    pub(super) receiver: &'a Name,
    /// The sender's `rcv_nxt`, which is the receiver's `snd_una`.
    pub(super) reverse: u32,
    pub(super) store: &'a mut Store,
    pub(super) repairs: &'a mut Repairs,
    pub(super) sink: &'a mut S,
}

impl<S: FnMut(SocketEvent<'_>)> Flow<'_, S> {
    fn sent(&mut self, end: u32, len: u32, body: Body<'_>, una: u32) {
        let bytes = Bytes { direction: Direction::Sent, end, len, body, snd_una: una, rcv_nxt: self.reverse };
        emit(self.sink, self.at, self.sender, What::Bytes(bytes));
    }
}

/// Gives one event of `end` to `sink`. A capture knows neither task nor network namespace.
pub(super) fn emit(sink: &mut impl FnMut(SocketEvent<'_>), at: Mono, end: &Name, what: What<'_>) {
    sink(SocketEvent { at, socket: end.socket, netns: 0, addresses: end.addresses, task: None, what });
}

/// A segment that came before its turn. A FIN is one without bytes.
#[derive(Debug)]
struct Held {
    seq: u32,
    len: u32,
    payload: Vec<u8>,
}

/// The bytes that one end sends.
#[derive(Debug, Default)]
pub(super) struct Way {
    /// Where it stands, once anything is known of it.
    at: Option<Position>,
    held: VecDeque<Held>,
    held_bytes: usize,
    /// Since when there is a gap at `next`.
    gap_since: Option<Mono>,
    unacked: Unacked,
    fin: Option<u32>,
    fin_sent: bool,
}

#[derive(Clone, Copy, Debug)]
struct Position {
    /// Next sequence number in order.
    next: u32,
    /// Behind the highest byte seen.
    high: u32,
    /// Highest acknowledgement by the peer; the start before there is one.
    acked: u32,
    ack_seen: bool,
    /// Joined in its middle and no byte seen yet.
    joined: bool,
}

impl Position {
    /// First byte not acknowledged; the end of what was seen where no acknowledgement was.
    const fn una(&self) -> u32 {
        if self.ack_seen { self.acked } else { self.next }
    }
}

impl Way {
    /// Fixes where the stream begins, as a SYN says.
    pub(super) fn open(&mut self, seq: u32) {
        self.at = Some(Position { next: seq, high: seq, acked: seq, ack_seen: false, joined: false });
    }

    /// The peer acknowledges the SYN.
    pub(super) fn syn_acknowledged(&mut self, ack: u32) {
        if let Some(p) = self.at.as_mut().filter(|p| p.acked == ack) {
            p.ack_seen = true;
        }
    }

    /// Fixes where the stream is joined, if nothing is known of it yet.
    pub(super) fn join(&mut self, seq: u32) {
        self.at.get_or_insert(Position { next: seq, high: seq, acked: seq, ack_seen: false, joined: true });
    }

    /// Behind the last byte in order (a FIN counts one), 0 when nothing is known.
    pub(super) fn next(&self) -> u32 {
        self.at.map_or(0, |p| p.next)
    }

    /// First byte that the peer's kernel has not acknowledged. Where the capture holds no acknowledgement, nothing is
    /// claimed to be unacknowledged.
    pub(super) fn una(&self) -> u32 {
        self.at.map_or(0, |p| p.una())
    }

    /// Whether the FIN came in its turn.
    pub(super) const fn fin_sent(&self) -> bool {
        self.fin_sent
    }

    /// Whether the peer's kernel has the FIN.
    pub(super) fn fin_acked(&self) -> bool {
        self.fin_sent && self.at.is_some_and(|p| p.ack_seen && diff(p.acked, p.next) >= 0)
    }

    /// Whether a gap keeps something back.
    pub(super) fn waits(&self) -> bool {
        !self.held.is_empty()
    }

    /// Whether a reset with this sequence number would be heeded (`tcp_sequence` in `net/ipv4/tcp_input.c`).
    pub(super) fn in_window(&self, seq: u32) -> bool {
        let Some(p) = self.at else { return true };
        diff(seq, p.high) <= MAX_AHEAD && (!p.ack_seen || diff(seq, p.acked) >= 0)
    }

    /// Whether `seq` is nowhere near what was seen of this stream.
    pub(super) fn is_far(&self, seq: u32) -> bool {
        self.at.is_some_and(|p| diff(seq, p.high).unsigned_abs() > 1 << 20)
    }

    /// A segment of this direction.
    pub(super) fn segment<S: FnMut(SocketEvent<'_>)>(&mut self, s: &Segment<'_>, flow: &mut Flow<'_, S>) {
        let seq = s.seq.wrapping_add(u32::from(s.syn));
        self.join(seq);
        let Some(p) = &mut self.at else { return };
        let end = seq.wrapping_add(s.len);
        let fin = s.fin && self.fin.is_none();
        if fin {
            self.fin = Some(end);
        }
        if diff(end, p.high) > 0 {
            p.high = end;
        }
        // A keepalive probe has the sequence number before the next byte's; seen first, it set the start one too low.
        if p.joined && s.len > 0 && diff(seq, p.next) == 1 && self.held.is_empty() {
            p.next = seq;
        }
        let ahead = diff(seq, p.next);
        if self.fin_sent {
            flow.repairs.retransmitted += u64::from(s.len > 0 || s.fin);
        } else if ahead > 0 && (s.len > 0 || fin) {
            if s.len > 0 {
                self.hold(seq, s.len, s.payload, flow);
            }
            if fin {
                self.hold(end, 0, &[], flow);
            }
            self.bound(flow);
        } else {
            self.in_order(seq, s.len, s.payload, flow);
            self.drain(flow);
        }
    }

    /// The peer acknowledges everything before `ack`.
    pub(super) fn acknowledged<S: FnMut(SocketEvent<'_>)>(&mut self, ack: u32, flow: &mut Flow<'_, S>) {
        self.join(ack);
        let Some(p) = &mut self.at else { return };
        let seen = if diff(p.high, p.acked) > 0 { p.high } else { p.acked };
        if diff(ack, seen) > MAX_AHEAD || diff(ack, p.acked) < 0 {
            return;
        }
        p.acked = ack;
        p.ack_seen = true;
        if diff(ack, p.next) > 0 {
            self.gap_since.get_or_insert(flow.at);
        }
        self.release(flow);
    }

    /// Gives up a gap that has lasted long enough, or any if `now` (at the end of the capture or the connection).
    pub(super) fn give_up<S: FnMut(SocketEvent<'_>)>(&mut self, now: bool, flow: &mut Flow<'_, S>) {
        while let (Some(p), Some(first)) = (self.at, self.held.front()) {
            let acked = p.ack_seen && diff(p.acked, first.seq) >= 0;
            let patience = match (p.ack_seen, acked) {
                (_, true) => ACKED_GAP,
                (false, false) => BLIND_GAP,
                // The peer lacks it too: it will be sent again.
                (true, false) => u64::MAX,
            };
            let waited = self.gap_since.map_or(0, |since| flow.at.since(since));
            if !now && waited < patience {
                return;
            }
            self.jump(flow);
        }
    }

    /// Bytes that are next, or were seen in part.
    fn in_order<S: FnMut(SocketEvent<'_>)>(
        &mut self,
        seq: u32,
        len: u32,
        payload: &[u8],
        flow: &mut Flow<'_, S>,
    ) {
        let Some(p) = &mut self.at else { return };
        let old = diff(p.next, seq).max(0).cast_unsigned().min(len);
        flow.repairs.retransmitted += u64::from(old > 0);
        let (new, payload) = (len - old, payload.get(old as usize..).unwrap_or_default());
        if new == 0 {
            return;
        }
        let captured = u32::try_from(payload.len()).unwrap_or(new).min(new);
        let start = p.next;
        p.next = start.wrapping_add(new);
        p.joined = false;
        let una = p.una();
        let blind = !p.ack_seen;
        if captured > 0 {
            flow.sent(start.wrapping_add(captured), captured, Body::Whole(payload), una);
            self.unacked.push_whole(start, payload, blind, flow.store, flow.repairs);
        }
        if captured < new {
            flow.repairs.snaplen += 1;
            let (end, absent) = (start.wrapping_add(new), NotCaptured::Snaplen);
            flow.sent(end, new - captured, Body::Absent(absent), una);
            self.unacked.push(start.wrapping_add(captured), new - captured, Kind::Absent(absent));
        }
        if p.ack_seen && diff(p.acked, start) > 0 {
            self.release(flow);
        }
    }

    /// Everything held that is now in order, then the FIN.
    fn drain<S: FnMut(SocketEvent<'_>)>(&mut self, flow: &mut Flow<'_, S>) {
        while self.held.front().is_some_and(|h| diff(h.seq, self.next()) <= 0) {
            let Some(held) = self.held.pop_front() else { break };
            self.held_bytes -= held.payload.len();
            flow.store.give_back(held.payload.len());
            self.in_order(held.seq, held.len, &held.payload, flow);
        }
        if let Some(p) = &mut self.at
            && self.fin == Some(p.next)
            && !self.fin_sent
        {
            p.next = p.next.wrapping_add(1);
            if diff(p.next, p.high) > 0 {
                p.high = p.next;
            }
            self.fin_sent = true;
        }
        let behind = self.at.is_some_and(|p| p.ack_seen && diff(p.acked, p.next) > 0);
        self.gap_since = (behind || self.waits()).then_some(flow.at);
    }

    /// Keeps a segment until its turn comes.
    fn hold<S>(&mut self, seq: u32, len: u32, payload: &[u8], flow: &mut Flow<'_, S>) {
        let next = self.next();
        let place = self.held.partition_point(|h| diff(h.seq, next) <= diff(seq, next));
        let before = place.checked_sub(1).and_then(|i| self.held.get(i));
        if before.is_some_and(|h| h.seq == seq && h.len >= len) {
            flow.repairs.retransmitted += 1;
            return;
        }
        self.gap_since.get_or_insert(flow.at);
        flow.repairs.reordered += 1;
        flow.store.take(payload.len());
        self.held_bytes += payload.len();
        self.held.insert(place, Held { seq, len, payload: payload.to_vec() });
    }

    /// Gives up gaps until what is held fits.
    fn bound<S: FnMut(SocketEvent<'_>)>(&mut self, flow: &mut Flow<'_, S>) {
        while !self.held.is_empty()
            && (self.held_bytes > MAX_HELD || self.held.len() > MAX_HELD_SEGMENTS || flow.store.full())
        {
            flow.repairs.window_overflow += 1;
            self.jump(flow);
        }
    }

    /// Gives up the gap at `next`: goes on with what is held.
    fn jump<S: FnMut(SocketEvent<'_>)>(&mut self, flow: &mut Flow<'_, S>) {
        let (Some(p), Some(first)) = (&mut self.at, self.held.front()) else { return };
        let missing = diff(first.seq, p.next);
        if missing > 0 {
            flow.repairs.holes += 1;
            self.unacked.push(p.next, missing.cast_unsigned(), Kind::Hole);
            p.next = first.seq;
        }
        self.drain(flow);
    }

    /// Hands the receiver what the peer's kernel is now known to have.
    fn release<S: FnMut(SocketEvent<'_>)>(&mut self, flow: &mut Flow<'_, S>) {
        let Some(p) = self.at else { return };
        let (at, receiver, una, sink) = (flow.at, flow.receiver, flow.reverse, &mut *flow.sink);
        self.unacked.release(p.acked, flow.store, &mut |end, len, body| {
            let bytes =
                Bytes { direction: Direction::Received, end, len, body, snd_una: una, rcv_nxt: p.acked };
            emit(sink, at, receiver, What::Bytes(bytes));
        });
    }

    /// Lets go of everything kept.
    pub(super) fn clear(&mut self, store: &mut Store) {
        store.give_back(self.held_bytes);
        self.held_bytes = 0;
        self.held.clear();
        self.gap_since = None;
        self.unacked.clear(store);
    }
}
