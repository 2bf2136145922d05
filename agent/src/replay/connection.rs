//! One TCP connection as a capture shows it: two ends, two directions, and the states both kernels must have gone
//! through.
//!
//! No I/O, no clock. States follow `net/ipv4/tcp_input.c` and `tcp.c`: the events are those that
//! `inet_sock_set_state` would have given, with TIME-WAIT seen as `Close` (the kernel hands the connection to a
//! time-wait socket and closes this one).

use super::Repairs;
use super::direction::{Flow, Name, Way, emit};
use super::packet::Segment;
use super::unacked::Store;
use crate::event::{Found, Mono, Sequence, SocketEvent, StateChange, TcpState, What};

// errno values of Linux (`include/uapi/asm-generic/errno.h`), as `tcp_reset` sets them in `sk_err`.
const EPIPE: u32 = 32;
const ECONNRESET: u32 = 104;
const ECONNREFUSED: u32 = 111;

/// One end.
#[derive(Debug)]
struct End {
    name: Name,
    state: TcpState,
    /// Its initial sequence number, if its SYN was seen or acknowledged.
    isn: Option<u32>,
}

/// One connection. Index 0 is the end that was seen sending first.
#[derive(Debug)]
pub(super) struct Connection {
    ends: [End; 2],
    /// What each end sends.
    ways: [Way; 2],
    established: bool,
    /// Time of its last segment.
    pub(super) last: Mono,
    /// Whether the table has it on its list of connections with gaps.
    pub(super) listed: bool,
}

/// Which end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    A,
    B,
}

impl Side {
    const fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// Where a connection's events go.
pub(super) struct Out<'a, S> {
    pub(super) at: Mono,
    pub(super) store: &'a mut Store,
    pub(super) repairs: &'a mut Repairs,
    pub(super) sink: &'a mut S,
}

impl Connection {
    /// A connection first seen in this segment, which `a` sends. `None`: the segment shows no connection (a reset, or
    /// without acknowledgement).
    pub(super) fn first_seen<S: FnMut(SocketEvent<'_>)>(
        a: Name,
        b: Name,
        s: &Segment<'_>,
        out: &mut Out<'_, S>,
    ) -> Option<Self> {
        if s.rst || (!s.syn && s.ack.is_none()) {
            return None;
        }
        let end = |name| End { name, state: TcpState::Close, isn: None };
        let mut c = Self {
            ends: [end(a), end(b)],
            ways: [Way::default(), Way::default()],
            established: false,
            last: out.at,
            listed: false,
        };
        if !s.syn {
            c.found(s, out);
        }
        Some(c)
    }

    /// Whether the connection was there before the capture began.
    pub(super) fn was_found(&self) -> bool {
        self.established && self.ends.iter().all(|e| e.isn.is_none())
    }

    /// Whether both ends are gone.
    pub(super) fn is_closed(&self) -> bool {
        self.established && self.ends.iter().all(|e| e.state == TcpState::Close)
    }

    /// Whether a segment must belong to a later connection between the same ports.
    pub(super) fn is_replaced_by(&self, from: Side, s: &Segment<'_>) -> bool {
        if s.syn {
            return self.established && self.end(from).isn != Some(s.seq)
                || self.end(from).isn.is_some_and(|isn| isn != s.seq);
        }
        self.is_closed() && s.len > 0 && !s.rst && self.way(from).is_far(s.seq)
    }

    /// A segment that `from` sends.
    pub(super) fn segment<S: FnMut(SocketEvent<'_>)>(
        &mut self,
        from: Side,
        s: &Segment<'_>,
        out: &mut Out<'_, S>,
    ) {
        self.last = out.at;
        if s.rst {
            return self.reset(from, s, out);
        }
        if s.syn {
            self.syn(from, s, out);
        } else if !self.established {
            self.establish(from, s, out);
        }
        if !self.established || self.is_closed() {
            return;
        }
        if let Some(ack) = s.ack {
            self.acknowledge(from, ack, out);
        }
        self.carry(from, out, |way, flow| way.segment(s, flow));
    }

    /// Goes on with gaps that lasted too long, or with all of them if `now`.
    pub(super) fn give_up<S: FnMut(SocketEvent<'_>)>(&mut self, now: bool, out: &mut Out<'_, S>) {
        for side in [Side::A, Side::B] {
            self.carry(side, out, |way, flow| way.give_up(now, flow));
        }
    }

    /// Whether a gap keeps something back.
    pub(super) fn waits(&self) -> bool {
        self.ways.iter().any(Way::waits)
    }

    /// Both ends are gone without a packet that says so: another connection has taken their ports.
    pub(super) fn replaced<S: FnMut(SocketEvent<'_>)>(&mut self, out: &mut Out<'_, S>) {
        self.give_up(true, out);
        for side in [Side::A, Side::B] {
            self.enter(side, TcpState::Close, 0, out);
        }
        self.forget(out.store);
    }

    /// Lets go of everything kept.
    pub(super) fn forget(&mut self, store: &mut Store) {
        for way in &mut self.ways {
            way.clear(store);
        }
    }

    fn end(&self, side: Side) -> &End {
        let [a, b] = &self.ends;
        match side {
            Side::A => a,
            Side::B => b,
        }
    }

    fn end_mut(&mut self, side: Side) -> &mut End {
        let [a, b] = &mut self.ends;
        match side {
            Side::A => a,
            Side::B => b,
        }
    }

    fn way(&self, side: Side) -> &Way {
        let [a, b] = &self.ways;
        match side {
            Side::A => a,
            Side::B => b,
        }
    }

    fn way_mut(&mut self, side: Side) -> &mut Way {
        let [a, b] = &mut self.ways;
        match side {
            Side::A => a,
            Side::B => b,
        }
    }

    /// Joins a connection in its middle.
    fn found<S: FnMut(SocketEvent<'_>)>(&mut self, s: &Segment<'_>, out: &mut Out<'_, S>) {
        self.way_mut(Side::A).join(s.seq);
        self.way_mut(Side::B).join(s.ack.unwrap_or_default());
        self.established = true;
        for side in [Side::A, Side::B] {
            self.end_mut(side).state = TcpState::Established;
            let found = Found { state: TcpState::Established, sequence: self.sequence(side), base: None };
            emit(out.sink, out.at, &self.end(side).name, What::Found(found));
        }
    }

    /// A SYN with or without acknowledgement, new or sent again.
    fn syn<S: FnMut(SocketEvent<'_>)>(&mut self, from: Side, s: &Segment<'_>, out: &mut Out<'_, S>) {
        if self.end(from).isn.is_none() {
            self.end_mut(from).isn = Some(s.seq);
            self.way_mut(from).open(s.seq.wrapping_add(1));
        }
        if self.established {
            return;
        }
        match s.ack {
            None if self.end(from).state == TcpState::Close => self.enter(from, TcpState::SynSent, 0, out),
            None => {}
            Some(ack) => {
                let peer = from.other();
                if self.end(peer).isn.is_none() {
                    self.end_mut(peer).isn = Some(ack.wrapping_sub(1));
                    self.way_mut(peer).open(ack);
                    self.end_mut(peer).state = TcpState::SynSent;
                }
                self.way_mut(peer).syn_acknowledged(ack);
                if self.end(from).state == TcpState::Close {
                    self.end_mut(from).state = TcpState::SynRecv;
                }
            }
        }
    }

    /// The first segment after the SYNs: both ends now have the connection.
    fn establish<S: FnMut(SocketEvent<'_>)>(&mut self, from: Side, s: &Segment<'_>, out: &mut Out<'_, S>) {
        let (Some(ack), peer) = (s.ack, from.other()) else { return };
        for (side, seq) in [(from, s.seq), (peer, ack)] {
            // Its SYN was not captured: the other end's acknowledgement, or this first segment, tells it.
            if self.end(side).isn.is_none() {
                self.end_mut(side).isn = Some(seq.wrapping_sub(1));
                self.way_mut(side).open(seq);
            }
        }
        self.established = true;
        let opener = if self.end(from).state == TcpState::SynSent { from } else { peer };
        for side in [opener, opener.other()] {
            let end = self.end_mut(side);
            if end.state == TcpState::Close {
                end.state = TcpState::SynRecv;
            }
            let isn = end.isn.unwrap_or_default();
            let (at, peer_isn) = (isn.wrapping_add(1), self.end(side.other()).isn.unwrap_or_default());
            let base = peer_isn.wrapping_add(1);
            let sequence = Sequence { write: at, una: at, copied: base, rcv_nxt: base };
            let end = self.end_mut(side);
            let change = StateChange { old: end.state, new: TcpState::Established, error: 0, sequence };
            end.state = TcpState::Established;
            emit(out.sink, out.at, &end.name, What::State(change));
        }
    }

    /// `from` has acknowledged what its peer sent.
    fn acknowledge<S: FnMut(SocketEvent<'_>)>(&mut self, from: Side, ack: u32, out: &mut Out<'_, S>) {
        let peer = from.other();
        let had_fin = self.way(peer).fin_acked();
        self.carry(peer, out, |way, flow| way.acknowledged(ack, flow));
        if had_fin || !self.way(peer).fin_acked() {
            return;
        }
        match self.end(from).state {
            TcpState::Established => self.enter(from, TcpState::CloseWait, 0, out),
            TcpState::FinWait1 => self.enter(from, TcpState::Closing, 0, out),
            TcpState::FinWait2 => self.enter(from, TcpState::Close, 0, out),
            _ => {}
        }
        match self.end(peer).state {
            TcpState::FinWait1 => self.enter(peer, TcpState::FinWait2, 0, out),
            TcpState::Closing | TcpState::LastAck => self.enter(peer, TcpState::Close, 0, out),
            _ => {}
        }
        if self.is_closed() {
            self.forget(out.store);
        }
    }

    /// Does something to what `side` sends, and sees whether its FIN came in its turn.
    fn carry<S: FnMut(SocketEvent<'_>)>(
        &mut self,
        side: Side,
        out: &mut Out<'_, S>,
        act: impl FnOnce(&mut Way, &mut Flow<'_, S>),
    ) {
        let Self { ends: [a, b], ways: [from_a, from_b], .. } = self;
        let (sender, way, receiver, back) = match side {
            Side::A => (a, from_a, b, from_b),
            Side::B => (b, from_b, a, from_a),
        };
        let had_fin = way.fin_sent();
        let mut flow = Flow {
            at: out.at,
            sender: &sender.name,
            receiver: &receiver.name,
            reverse: back.una(),
            store: &mut *out.store,
            repairs: &mut *out.repairs,
            sink: &mut *out.sink,
        };
        act(way, &mut flow);
        if !had_fin && way.fin_sent() {
            match self.end(side).state {
                TcpState::Established => self.enter(side, TcpState::FinWait1, 0, out),
                TcpState::CloseWait => self.enter(side, TcpState::LastAck, 0, out),
                _ => {}
            }
        }
    }

    /// A reset that `from` sends (`tcp_reset`, and `tcp_rcv_synsent_state_process` for refused connects).
    fn reset<S: FnMut(SocketEvent<'_>)>(&mut self, from: Side, s: &Segment<'_>, out: &mut Out<'_, S>) {
        let peer = from.other();
        if !self.established {
            let refused = self.end(peer).state == TcpState::SynSent;
            if refused && s.ack.map(|a| a.wrapping_sub(1)) != self.end(peer).isn {
                out.repairs.resets_ignored += 1;
                return;
            }
            self.established = true;
            // An end that never got beyond SYN-RECEIVED has no socket of its own to report on.
            for side in [from, peer] {
                if self.end(side).state != TcpState::SynSent {
                    self.end_mut(side).state = TcpState::Close;
                }
            }
            self.enter(peer, TcpState::Close, ECONNREFUSED, out);
            self.enter(from, TcpState::Close, 0, out);
            return self.forget(out.store);
        }
        if !self.way(from).in_window(s.seq) {
            out.repairs.resets_ignored += 1;
            return;
        }
        self.give_up(true, out);
        let error = if self.end(peer).state == TcpState::CloseWait { EPIPE } else { ECONNRESET };
        self.enter(from, TcpState::Close, 0, out);
        self.enter(peer, TcpState::Close, error, out);
        self.forget(out.store);
    }

    /// Moves an end to another state and says so.
    fn enter<S: FnMut(SocketEvent<'_>)>(
        &mut self,
        side: Side,
        new: TcpState,
        error: u32,
        out: &mut Out<'_, S>,
    ) {
        let old = self.end(side).state;
        if old == new {
            return;
        }
        self.end_mut(side).state = new;
        let change = StateChange { old, new, error, sequence: self.sequence(side) };
        emit(out.sink, out.at, &self.end(side).name, What::State(change));
    }

    /// The sequence numbers of one end.
    fn sequence(&self, side: Side) -> Sequence {
        let (own, peer) = (self.way(side), self.way(side.other()));
        Sequence { write: own.next(), una: own.una(), copied: peer.una(), rcv_nxt: peer.una() }
    }
}
