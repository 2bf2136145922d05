//! Reads what connections do: opened, refused, reset, gone; acknowledged; bytes missing; foreign bytes.
//!
//! Pure. A connection that nobody named in a message is none of ours and is not followed.

use std::net::IpAddr;

use crate::event::{Direction, Mono, Sequence, SocketId, StateChange, TcpState};
use crate::rooms::connections::{Awaited, Carried, ConnectionId, Known};
use crate::rooms::model::{Connection, Event};
use crate::rooms::peers::{EndpointId, ForeignMark, NONE, Source};
use crate::rooms::room::Delivery;
use crate::rooms::table::RoomTable;
use crate::sglang::message::Kind;

impl RoomTable {
    pub(crate) fn state(&mut self, at: Mono, c: &Connection, change: &StateChange, out: &mut Vec<Event>) {
        match (change.old, change.new) {
            (old, TcpState::Established) => self.established(c, old),
            (_, TcpState::SynSent) => self.connects(at, c),
            (_, TcpState::Listen) => self.listens(at, c, true),
            (TcpState::Listen, TcpState::Close) => {
                self.listens(at, c, false);
                self.listener_closed(at, c);
            }
            (TcpState::SynSent, TcpState::Close) => self.refused(at, c, change.error),
            (_, new) => self.ending(at, c, new, change, out),
        }
    }

    fn established(&mut self, c: &Connection, old: TcpState) {
        let listening = if old == TcpState::SynSent { c.addresses.peer } else { c.addresses.local };
        let Some(target) = self.peers.find(listening, c.netns) else { return };
        if self.connections.find(c.socket) == NONE {
            self.follow(c, target);
        }
        if let Some(e) = self.peers.get_mut(target) {
            (e.refused, e.connecting, e.cut) = (None, None, None);
            e.reached = true;
            e.listener_closed = None;
        }
    }

    fn connects(&mut self, at: Mono, c: &Connection) {
        if let Some(e) = self.peers.find(c.addresses.peer, c.netns).and_then(|id| self.peers.get_mut(id)) {
            e.connecting.get_or_insert(at);
            e.cut = None;
        }
    }

    fn refused(&mut self, at: Mono, c: &Connection, error: u32) {
        if let Some(e) = self.peers.find(c.addresses.peer, c.netns).and_then(|id| self.peers.get_mut(id)) {
            e.connecting = None;
        }
        // Without an error the connecting side gave up by itself.
        if error == 0 {
            return;
        }
        if let Some(e) = self.peers.find(c.addresses.peer, c.netns).and_then(|id| self.peers.get_mut(id)) {
            e.refused = Some((at, error));
        }
        self.connections.remove(c.socket);
    }

    fn listener_closed(&mut self, at: Mono, c: &Connection) {
        if let Some(e) = self.peers.find(c.addresses.local, c.netns).and_then(|id| self.peers.get_mut(id)) {
            e.listener_closed = Some(at);
        }
    }

    fn ending(
        &mut self,
        at: Mono,
        c: &Connection,
        new: TcpState,
        change: &StateChange,
        out: &mut Vec<Event>,
    ) {
        let known = self.connections.find(c.socket);
        let Some(k) = self.connections.get_mut(known) else { return };
        if std::mem::replace(&mut k.live, false) {
            let (target, origin) = (k.target, k.origin);
            self.peers.went(target, at);
            if origin != NONE {
                self.peers.went(origin, at);
            }
            self.cut(target, at);
        }
        if change.sequence != Sequence::default() {
            self.acknowledged(at, c.socket, change.sequence.una, out);
        }
        if new == TcpState::Close
            && let Some(mut k) = self.stop_following(c.socket)
            // Without any acknowledgement ever read, nothing is known of what was delivered.
            && k.una.is_some()
        {
            for lost in k.unacknowledged() {
                self.undelivered(at, lost, change.error, out);
            }
        }
    }

    /// Notes that a connection to a rank has ended, if no other one of this host is open.
    fn cut(&mut self, target: EndpointId, at: Mono) {
        let address = self.peers.address(target);
        let open = |k: &Known| k.live && k.target == target && Some(k.connection.addresses.peer) == address;
        if !self.connections.iter().any(open)
            && let Some(e) = self.peers.get_mut(target)
        {
            e.cut = Some(at);
        }
    }

    /// Follows a connection no longer.
    pub(crate) fn stop_following(&mut self, socket: SocketId) -> Option<Known> {
        let k = self.connections.remove(socket)?;
        self.unread.forget(k.target, socket);
        Some(k)
    }

    /// A sent message that the peer's kernel never had.
    fn undelivered(&mut self, at: Mono, a: Awaited, error: u32, out: &mut Vec<Event>) {
        let Some(room) = self.rooms.current(a.slot, a.generation) else { return };
        if let Some(m) = room.marks.iter_mut().rev().find(|m| m.kind == a.kind && m.end == a.end) {
            m.acknowledged = Some(false);
        }
        if let (Kind::Abort, Some(abort)) = (a.kind, &mut room.abort) {
            abort.delivery = Delivery::Lost { at, error };
            return self.assess(a.slot, at, out);
        }
        let Some(link) = room.links.get_mut(usize::from(a.link)) else { return };
        let delivery = match a.kind {
            Kind::Status => &mut link.status_delivery,
            Kind::Metadata => &mut link.metadata_delivery,
            _ => return,
        };
        *delivery = Delivery::Lost { at, error };
        self.assess(a.slot, at, out);
    }

    pub(crate) fn acknowledged(&mut self, at: Mono, socket: SocketId, una: u32, out: &mut Vec<Event>) {
        let mut acked = std::mem::take(&mut self.scratch);
        let known = self.connections.find(socket);
        if let Some(k) = self.connections.get_mut(known) {
            k.acknowledge(una, at, &mut acked);
        }
        for a in acked.drain(..) {
            self.delivered(at, a, out);
        }
        self.scratch = acked;
    }

    fn delivered(&mut self, at: Mono, a: Awaited, out: &mut Vec<Event>) {
        let Some(room) = self.rooms.current(a.slot, a.generation) else { return };
        if let Some(m) = room.marks.iter_mut().rev().find(|m| m.kind == a.kind && m.end == a.end) {
            m.acknowledged = Some(true);
        }
        if let (Kind::Abort, Some(abort)) = (a.kind, &mut room.abort) {
            abort.delivery = Delivery::Acknowledged;
            return;
        }
        let Some(link) = room.links.get_mut(usize::from(a.link)) else { return };
        match a.kind {
            Kind::Status => {
                link.status_delivery = Delivery::Acknowledged;
                self.settle(a.slot, at, out);
            }
            Kind::Metadata => link.metadata_delivery = Delivery::Acknowledged,
            _ => {}
        }
    }

    /// The listening side of a connection.
    fn listening(&mut self, c: &Connection, direction: Direction) -> Option<EndpointId> {
        if let Some(k) = self.connections.get(self.connections.find(c.socket)) {
            return Some(k.target);
        }
        let guess = match direction {
            Direction::Sent => c.addresses.peer,
            Direction::Received => c.addresses.local,
        };
        let other = match direction {
            Direction::Sent => c.addresses.local,
            Direction::Received => c.addresses.peer,
        };
        let known = self.peers.find(guess, c.netns).or_else(|| self.peers.find(other, c.netns));
        // A local port is one of few; a remote one could be anything.
        known.or_else(|| {
            (direction == Direction::Received)
                .then(|| self.peers.endpoint(guess, c.netns, &mut self.tally.turned_away))
        })
    }

    pub(crate) fn lossy(&mut self, at: Mono, c: &Connection, direction: Direction) {
        let Some(target) = self.listening(c, direction) else { return };
        let listens_here = self.peers.address(target) == Some(c.addresses.local);
        let other = if listens_here { c.addresses.peer } else { c.addresses.local };
        let known = self.connections.find(c.socket);
        let full = self.connections.is_full();
        let source = match self.connections.get_mut(known) {
            Some(k) if k.carried == Carried::Nothing => {
                k.missed = Some(at);
                Source::Stranger(other.ip())
            }
            Some(k) => source(k.carried, other.ip()),
            None if full => Source::Host(other.ip()),
            None => Source::Stranger(other.ip()),
        };
        self.peers.lose(target, source, at);
    }

    /// A message came on a connection: bytes missed of it before, when it could have been anyone's, were that
    /// rank's.
    pub(crate) fn own_up(&mut self, known: ConnectionId, other: IpAddr) {
        let Some(k) = self.connections.get_mut(known) else { return };
        if let Some(at) = k.missed.take() {
            let (target, source) = (k.target, source(k.carried, other));
            self.peers.lose(target, source, at);
        }
    }

    pub(crate) fn foreign(&mut self, at: Mono, c: &Connection, direction: Direction, what: (u16, u32)) {
        let Some(target) = self.listening(c, direction) else { return };
        let peer = if direction == Direction::Received { c.addresses.peer } else { c.addresses.local };
        let (frames, first_len) = what;
        let asked = self.peers.prefill(target).map_or(0, |p| p.answers.asked);
        let mark = ForeignMark { at, peer, frames, first_len, abort: false, unsure: false, asked };
        let read = direction == Direction::Received && self.peers.address(target) == Some(c.addresses.local);
        if read && self.peers.get(target).is_some_and(|e| e.task.is_none()) {
            self.peers.owned(target, c.task);
        }
        let Some(e) = self.peers.get_mut(target) else { return };
        if !e.suspects_foreign() {
            e.foreign = Some(mark);
        }
        // What the rank has read on after killed nobody, and hides nobody's cause.
        if read && !e.bears(&mark) {
            e.meet(mark);
            e.last_foreign = Some(mark);
            self.foreign_read(target);
        }
    }
}

/// Whose bytes a connection from `other` has lost that has carried messages.
const fn source(carried: Carried, other: IpAddr) -> Source {
    match carried {
        Carried::Rank(rank) => Source::Rank(rank),
        Carried::Nothing | Carried::Unnamed | Carried::Several => Source::Host(other),
    }
}
