//! TCP's own evidence: what was sent again and again, what was reset, what lies unread.
//!
//! Pure: no I/O, no clock (time is an argument). Which message it is about follows from its place in the stream
//! ([`crate::rooms::connections`]). "The peer's kernel has it", never "the peer has read it".

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::event::{Mono, SECOND, SocketId, Stand, TcpState, Trouble};
use crate::rooms::connections::{Again, Awaited, Known};
use crate::rooms::model::{Connection, Event};
use crate::rooms::peers::EndpointId;
use crate::rooms::table::RoomTable;
use crate::sglang::message::Kind;
use crate::verdict::facts::{Sent, UnreadFact};

/// Connections named by one [`RoomTable::asks`].
const MAX_ASKS: usize = 64;
/// Pinned rooms, and connections on which something was sent again, looked at by one [`RoomTable::asks`].
const MAX_ASKING: usize = 4096;
/// Rooms looked at anew because of one retransmission.
const MAX_LOOKS: usize = 64;
/// Sockets with unread bytes remembered.
const MAX_UNREAD: usize = 1024;

/// Bytes that came and that nobody has read. Part of the state file's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pile {
    /// First byte that was not read, and since when it has been seen lying there.
    copied: u32,
    since: Mono,
    bytes: u32,
}

/// Sockets of ranks of this host whose bytes are not read, by rank.
#[derive(Debug, Default)]
pub(crate) struct Unread(BTreeMap<(EndpointId, SocketId), Pile>);

impl Unread {
    /// Notes where the reader of a socket stands. Returns whether there was no place for it.
    fn note(&mut self, key: (EndpointId, SocketId), copied: u32, bytes: u32, at: Mono) -> bool {
        if bytes == 0 {
            self.0.remove(&key);
            return false;
        }
        let new = Pile { copied, since: at, bytes };
        let full = self.0.len() >= MAX_UNREAD;
        match self.0.get_mut(&key) {
            // It reads, if slowly.
            Some(p) if p.copied != copied => *p = new,
            Some(p) => p.bytes = bytes,
            None if full => return true,
            None => {
                self.0.insert(key, new);
            }
        }
        false
    }

    pub(crate) fn forget(&mut self, rank: EndpointId, socket: SocketId) {
        self.0.remove(&(rank, socket));
    }

    /// What lies unread on a socket.
    pub(crate) fn at(&self, rank: EndpointId, socket: SocketId) -> Option<Pile> {
        self.0.get(&(rank, socket)).copied()
    }

    /// Takes that back.
    pub(crate) fn resume(&mut self, key: (EndpointId, SocketId), pile: Pile) {
        if self.0.len() < MAX_UNREAD {
            self.0.insert(key, pile);
        }
    }

    fn of(&self, rank: EndpointId) -> impl Iterator<Item = &Pile> {
        self.0.range((rank, SocketId(0))..=(rank, SocketId(u64::MAX))).map(|(_, p)| p)
    }
}

impl RoomTable {
    /// Connections of which [`crate::rooms::model::Input::Stand`] would help now: those that overdue rooms wait on, and those on which
    /// something was sent again, for that it has arrived shows in no call. At most 64; to be asked about once a second, each time
    /// others where there are more.
    pub fn asks(&self) -> Vec<SocketId> {
        let mut sockets: BTreeSet<SocketId> = BTreeSet::new();
        let mut ranks: BTreeSet<EndpointId> = BTreeSet::new();
        let turn = usize::try_from(self.now.0 / SECOND).unwrap_or_default();
        let behind = turn.wrapping_mul(MAX_ASKING) % self.pinned.len().max(1);
        let slots = self.pinned.iter().skip(behind).chain(self.pinned.iter().take(behind)).take(MAX_ASKING);
        for room in slots.filter_map(|slot| self.rooms.get(*slot)) {
            for l in &room.links {
                sockets.extend(l.metadata_on.filter(|_| l.heard.is_none()));
                sockets.extend(l.status_on.filter(|_| l.heard.is_none()));
                ranks.extend([l.prefill, l.decode]);
            }
            sockets.extend(room.abort.filter(|a| a.acknowledged.is_none()).and_then(|a| a.on));
            ranks.extend([room.home.0, room.home.1]);
        }
        if !ranks.is_empty() {
            let reads = |k: &&Known| k.live && ranks.contains(&k.target) && self.reads(k);
            sockets.extend(self.connections.iter().filter(reads).map(|k| k.connection.socket));
        }
        let again = self.connections.iter().filter(|k| k.again.is_some()).map(|k| k.connection.socket);
        sockets.extend(again.take(MAX_ASKING));
        sockets.retain(|s| self.connections.get(self.connections.find(*s)).is_some_and(|k| k.live));
        let first = turn.wrapping_mul(MAX_ASKS) % sockets.len().max(1);
        sockets.iter().skip(first).chain(sockets.iter().take(first)).take(MAX_ASKS).copied().collect()
    }

    /// Whether this end of a connection is the listening rank's, which reads it.
    fn reads(&self, k: &Known) -> bool {
        self.peers.address(k.target) == Some(k.connection.addresses.local)
    }

    /// TCP had trouble.
    pub(crate) fn trouble(
        &mut self,
        at: Mono,
        connection: &Connection,
        trouble: Trouble,
        out: &mut Vec<Event>,
    ) {
        match trouble {
            Trouble::Retransmitted { una, .. } => {
                self.acknowledged(at, connection.socket, una, out);
                self.sent_again(at, connection.socket, 1);
                self.look_at_undelivered(at, connection.socket);
            }
            // The change of state that follows says what was acknowledged by then. What is known of it here may be older,
            // and would have a message lost that arrived.
            Trouble::ResetReceived | Trouble::ResetSent => {}
        }
    }

    /// The first byte that is not acknowledged was sent again, `count` times more, the last time not before `at`.
    fn sent_again(&mut self, at: Mono, socket: SocketId, count: u32) {
        let known = self.connections.find(socket);
        if let Some(k) = self.connections.get_mut(known) {
            k.sent_again(at, count);
        }
    }

    /// Has rooms looked at whose message the peer's kernel will not have by itself, whatever the threshold of their phase.
    fn look_at_undelivered(&mut self, at: Mono, socket: SocketId) {
        let Some(k) = self.connections.get(self.connections.find(socket)) else { return };
        let Some((_, read)) = k.una else { return };
        let again = k.again.map(Again::fact);
        let limits = self.config.limits();
        let concerned = |a: &&Awaited| {
            let waits = Sent::Waiting { sent: a.at, read, again };
            matches!(a.kind, Kind::Status | Kind::Metadata | Kind::Abort)
                && waits.undeliverable(&limits).is_some()
        };
        let rooms: SmallVec<[(u32, u32); 4]> =
            k.awaited().filter(concerned).take(MAX_LOOKS).map(|a| (a.slot, a.generation)).collect();
        for (slot, generation) in rooms {
            // One that is pinned is looked at every second.
            if self.rooms.current(slot, generation).is_some_and(|room| !room.pinned()) {
                self.wheel.set(slot, at, at);
            }
        }
    }

    /// Where a connection stands.
    pub(crate) fn stand(&mut self, at: Mono, socket: SocketId, stand: &Stand, out: &mut Vec<Event>) {
        let s = stand.sequence;
        if stand.state == TcpState::Listen || self.connections.find(socket) == crate::rooms::peers::NONE {
            return;
        }
        let before = self.connections.get(self.connections.find(socket)).and_then(|k| k.una);
        self.acknowledged(at, socket, s.una, out);
        let Some(k) = self.connections.get(self.connections.find(socket)) else { return };
        let seen = k.again.map_or(0, |a| a.count);
        if stand.retransmits > seen {
            // Some time since it was last looked at.
            let not_before = before.map_or(at, |(_, read)| read.min(at));
            self.sent_again(not_before, socket, stand.retransmits - seen);
        }
        self.look_at_undelivered(at, socket);
        let Some(k) = self.connections.get(self.connections.find(socket)) else { return };
        if self.reads(k) {
            // A FIN counts as a byte of the stream that nobody reads.
            let fin = !matches!(stand.state, TcpState::Established | TcpState::FinWait1 | TcpState::FinWait2);
            let bytes = s.rcv_nxt.wrapping_sub(s.copied).saturating_sub(u32::from(fin));
            // Behind by half the numbers there are: not behind at all.
            let bytes = if bytes > u32::MAX / 2 { 0 } else { bytes };
            if self.unread.note((k.target, socket), s.copied, bytes, at) {
                self.tally.turned_away.unread += 1;
            }
        }
    }

    /// What a rank of this host has not read for a while, with what the other ranks of its process have not.
    pub(crate) fn unread_at(&self, rank: EndpointId, now: Mono) -> Option<UnreadFact> {
        let long = |p: &&Pile| now.since(p.since) >= UNREAD_FOR;
        let own: SmallVec<[&Pile; 4]> = self.unread.of(rank).filter(long).collect();
        let since = own.iter().map(|p| p.since).min()?;
        let bytes = own.iter().map(|p| u64::from(p.bytes)).sum();
        let tgid = self.peers.get(rank).and_then(|e| e.task).map(|t| t.tgid);
        let others = tgid.map_or(&[][..], |t| self.peers.of_process(t)).iter().filter(|id| **id != rank);
        let sockets = own.len() + others.flat_map(|id| self.unread.of(*id)).filter(long).count();
        Some(UnreadFact { bytes, sockets: u32::try_from(sockets).unwrap_or(u32::MAX), since })
    }

    /// Whether the peer's kernel does not take what was sent on this socket.
    pub(crate) fn stuck(&self, on: Option<SocketId>) -> bool {
        let known = on.map(|s| self.connections.find(s));
        known.and_then(|k| self.connections.get(k)).is_some_and(|k| k.again.is_some())
    }
}

/// A socket is read within microseconds; one that is not for this long has nobody who reads it.
const UNREAD_FOR: u64 = 3 * SECOND;
