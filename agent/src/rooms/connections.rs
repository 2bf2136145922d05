//! Control connections: whose they are, and which of the messages sent on them the peer's kernel has.
//!
//! Pure. "The peer's kernel acknowledged", never "the peer read".

use std::collections::VecDeque;

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::event::{Mono, SocketId};
use crate::rooms::model::Connection;
use crate::rooms::peers::{EndpointId, NONE, PairId, SessionId};
use crate::sglang::message::{Backend, Kind, Releases};
use crate::verdict::facts::AgainFact;

/// Messages of one connection whose acknowledgement is awaited: a libzmq queue holds 1000 before it blocks.
const MAX_AWAITED: usize = 1024;

/// The same for a connection of which no acknowledgement was ever read.
const MAX_AWAITED_BLIND: usize = 64;

/// A sent message that its peer has not acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Awaited {
    /// Unwrapped sequence number behind it.
    pub(crate) end: u64,
    /// When it was sent.
    pub(crate) at: Mono,
    pub(crate) slot: u32,
    pub(crate) generation: u32,
    pub(crate) kind: Kind,
    /// The link of the room that it belongs to.
    pub(crate) link: u16,
}

/// Retransmissions of the first byte that is not acknowledged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Again {
    /// When it was first sent again, as far as is known.
    pub(crate) since: Mono,
    /// How often.
    pub(crate) count: u32,
    /// When it was sent again last, and the time before: not later than it was.
    #[serde(default)]
    pub(crate) last: [Mono; 2],
}

impl Again {
    /// As a verdict takes it.
    pub(crate) const fn fact(self) -> AgainFact {
        AgainFact { since: self.since, count: self.count, last: self.last }
    }
}

/// Whose messages a connection has carried.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Carried {
    /// None was ever decoded: it may be anyone's.
    #[default]
    Nothing,
    /// A rank's that no message has named yet.
    Unnamed,
    /// This rank's.
    Rank(EndpointId),
    /// More than one rank's: bytes of it can be either's.
    Several,
}

/// One end of one connection.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) connection: Connection,
    /// The listening side.
    pub(crate) target: EndpointId,
    /// The connecting side's rank, once a message named it.
    pub(crate) origin: EndpointId,
    /// Session of the decode rank that sends on it.
    pub(crate) session: SessionId,
    /// Pair of `target` and `session`.
    pub(crate) pair: PairId,
    pub(crate) backend: Option<Backend>,
    pub(crate) releases: Option<Releases>,
    pub(crate) carried: Carried,
    /// When bytes were last missed while nothing was known of whose they were.
    pub(crate) missed: Option<Mono>,
    pub(crate) live: bool,
    /// An ABORT with a generation was seen: one without means that no METADATA was sent.
    pub(crate) generations: bool,
    /// Unwrapped `snd_una` and when it was read.
    pub(crate) una: Option<(u64, Mono)>,
    /// What was sent again, as long as the peer's kernel has not taken it.
    pub(crate) again: Option<Again>,
    /// Last unwrapped sequence number, what others are unwrapped against.
    reference: Option<u64>,
    awaited: VecDeque<Awaited>,
}

impl Known {
    /// Unwraps a 32-bit sequence number: the nearest to the last one.
    pub(crate) fn unwrap(&mut self, seq: u32) -> u64 {
        let reference = *self.reference.get_or_insert((1 << 32) | u64::from(seq));
        #[allow(
            clippy::cast_possible_truncation,
            clippy::cast_possible_wrap,
            reason = "difference modulo 2^32"
        )]
        let delta = seq.wrapping_sub(reference as u32) as i32;
        let value = reference.saturating_add_signed(i64::from(delta));
        self.reference = Some(reference.max(value));
        value
    }

    /// Notes that a message named the rank at the connecting side.
    pub(crate) fn carries(&mut self, rank: EndpointId) {
        self.carried = match self.carried {
            Carried::Nothing if rank == NONE => Carried::Unnamed,
            Carried::Nothing | Carried::Unnamed if rank != NONE => Carried::Rank(rank),
            Carried::Rank(known) if rank != NONE && rank != known => Carried::Several,
            known => known,
        };
    }

    /// Remembers a sent message. Returns whether the oldest had to be forgotten.
    pub(crate) fn await_ack(&mut self, awaited: Awaited) -> bool {
        let limit = if self.una.is_some() { MAX_AWAITED } else { MAX_AWAITED_BLIND };
        let full = self.awaited.len() >= limit;
        if full {
            self.awaited.pop_front();
        }
        self.awaited.push_back(awaited);
        full && self.una.is_some()
    }

    /// Messages whose acknowledgement is awaited, oldest first.
    pub(crate) fn awaited(&self) -> impl DoubleEndedIterator<Item = &Awaited> {
        self.awaited.iter()
    }

    /// What sequence numbers are unwrapped against.
    pub(crate) const fn reference(&self) -> Option<u64> {
        self.reference
    }

    /// Goes on from there.
    pub(crate) fn resume(&mut self, reference: Option<u64>, awaited: VecDeque<Awaited>) {
        self.reference = reference;
        self.awaited = awaited;
    }

    /// Takes what is acknowledged by `una`.
    pub(crate) fn acknowledge(&mut self, una: u32, at: Mono, acked: &mut Vec<Awaited>) {
        let una = self.unwrap(una);
        let newest = self.una.map_or(una, |(old, _)| old.max(una));
        if self.una.is_some_and(|(old, _)| newest > old) {
            self.again = None;
        }
        self.una = Some((newest, at));
        while let Some(a) = self.awaited.front().copied().filter(|a| a.end <= newest) {
            self.awaited.pop_front();
            acked.push(a);
        }
    }

    /// Notes that the first byte not acknowledged was sent again, `count` times more, the last time not before `at`. Nothing where
    /// no message waits for its acknowledgement.
    pub(crate) fn sent_again(&mut self, at: Mono, count: u32) {
        if self.awaited.is_empty() {
            return;
        }
        let again = self.again.get_or_insert(Again { since: at, count: 0, last: [at; 2] });
        again.count = again.count.saturating_add(count);
        again.last = [at, again.last[0]];
    }

    /// Takes all that was never acknowledged.
    pub(crate) fn unacknowledged(&mut self) -> VecDeque<Awaited> {
        std::mem::take(&mut self.awaited)
    }
}

/// Index of a connection, as long as it is followed; [`NONE`] where it is not.
pub(crate) type ConnectionId = u32;

/// All connections that carried something of interest.
#[derive(Debug)]
pub(crate) struct Connections {
    by_socket: HashMap<SocketId, ConnectionId>,
    slots: Vec<Option<Known>>,
    free: Vec<ConnectionId>,
    max: usize,
}

impl Connections {
    pub(crate) fn new(max: usize) -> Self {
        Self { by_socket: HashMap::new(), slots: Vec::new(), free: Vec::new(), max }
    }

    pub(crate) fn find(&self, socket: SocketId) -> ConnectionId {
        self.by_socket.get(&socket).copied().unwrap_or(NONE)
    }

    pub(crate) fn get(&self, id: ConnectionId) -> Option<&Known> {
        self.slots.get(id as usize).and_then(Option::as_ref)
    }

    pub(crate) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut Known> {
        self.slots.get_mut(id as usize).and_then(Option::as_mut)
    }

    /// Follows a connection from now on; [`NONE`] when there is no space.
    pub(crate) fn insert(&mut self, connection: &Connection, target: EndpointId) -> ConnectionId {
        if self.by_socket.len() >= self.max {
            return NONE;
        }
        let known = Known {
            connection: *connection,
            target,
            origin: NONE,
            session: NONE,
            pair: NONE,
            backend: None,
            releases: None,
            carried: Carried::Nothing,
            missed: None,
            live: true,
            generations: false,
            una: None,
            again: None,
            reference: None,
            awaited: VecDeque::new(),
        };
        let id = self.free.pop().unwrap_or_else(|| u32::try_from(self.slots.len()).unwrap_or(NONE));
        if self.slots.len() <= id as usize {
            self.slots.push(None);
        }
        if let Some(place) = self.slots.get_mut(id as usize) {
            *place = Some(known);
        }
        self.by_socket.insert(connection.socket, id);
        id
    }

    pub(crate) fn remove(&mut self, socket: SocketId) -> Option<Known> {
        let id = self.by_socket.remove(&socket)?;
        self.free.push(id);
        self.slots.get_mut(id as usize)?.take()
    }

    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Known> {
        self.slots.iter().flatten()
    }

    /// A process is gone.
    pub(crate) fn disown(&mut self, tgid: u32) {
        for k in self.slots.iter_mut().flatten() {
            k.connection.task = k.connection.task.filter(|t| t.tgid != tgid);
        }
    }

    /// Whether connections that carry messages may not be followed for lack of space.
    pub(crate) fn is_full(&self) -> bool {
        self.by_socket.len() >= self.max
    }

    pub(crate) fn len(&self) -> usize {
        self.by_socket.len()
    }
}
