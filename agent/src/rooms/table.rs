//! The room table: takes [`Input`]s, keeps rooms, says [`Event`]s.
//!
//! Pure: no I/O, no clock, no unsafe code. Every table in it is bounded and counts what it turns away.

use std::net::SocketAddr;

use crate::event::{Mono, SECOND};
use crate::rooms::counts::{Counters, Gauges};
use crate::rooms::model::{Event, Input, RoomSnapshot};
use crate::sglang::message::{Backend, Releases};

/// Limits and times of the room table. Times are nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Nothing is overdue before this, whatever the statistics say.
    pub floor: u64,
    /// Phases without queueing or computing are overdue after this at the latest.
    pub ceiling: u64,
    /// Overdue after this many times the p99 of the phase.
    pub factor: u64,
    /// Open rooms.
    pub max_rooms: usize,
    /// Closed rooms whose details are kept.
    pub max_closed: usize,
    /// Connections.
    pub max_connections: usize,
    /// `SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT` of the engines.
    pub bootstrap_timeout: u64,
    /// `SGLANG_DISAGGREGATION_WAITING_TIMEOUT` of the engines.
    pub waiting_timeout: u64,
    /// How long after an engine timer a room that ends unseen is still followed.
    pub margin: u64,
    /// A room is forgotten after this, even if it never ended.
    pub forget_after: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            floor: 10 * SECOND,
            ceiling: 60 * SECOND,
            factor: 8,
            max_rooms: 131_072,
            max_closed: 4096,
            max_connections: 65_536,
            bootstrap_timeout: 300 * SECOND,
            waiting_timeout: 300 * SECOND,
            margin: 60 * SECOND,
            forget_after: 86_400 * SECOND,
        }
    }
}

/// A prefill rank and a decode rank that hand rooms over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Prefill rank's endpoint.
    pub prefill: SocketAddr,
    /// Decode rank's endpoint.
    pub decode: SocketAddr,
    /// Decode rank's session.
    pub session: String,
    /// Decode's tensor-parallel rank and size, where a REGISTER named them.
    pub decode_rank: Option<(u32, u32)>,
    /// Whose messages.
    pub backend: Option<Backend>,
    /// Engine releases they fit.
    pub releases: Option<Releases>,
    /// Rooms that concluded between them.
    pub concluded: u64,
    /// When the last of them concluded.
    pub last_concluded: Option<Mono>,
}

/// All rooms of this host.
#[derive(Debug)]
pub struct RoomTable {
    config: Config,
    now: Mono,
}

impl RoomTable {
    /// An empty table.
    pub fn new(config: Config) -> Self {
        Self { config, now: Mono(0) }
    }

    /// Takes one input; what others must hear of is appended to `out`.
    pub fn handle(&mut self, input: &Input<'_>, out: &mut Vec<Event>) {
        let _ = (input, out);
    }

    /// Lets time pass: what is overdue at `now` is judged. To be called about every 100 ms; its cost is
    /// bounded by what is due, never by the number of open rooms.
    pub fn tick(&mut self, now: Mono, out: &mut Vec<Event>) {
        let _ = out;
        self.now = self.now.max(now);
    }

    /// Every incarnation of a room number that is still kept, oldest first.
    pub fn snapshot(&self, room: u64) -> Vec<RoomSnapshot> {
        let _ = (room, self.config);
        Vec::new()
    }

    /// Open rooms, oldest first.
    pub fn open(&self) -> impl Iterator<Item = RoomSnapshot> + '_ {
        std::iter::empty()
    }

    /// Pinned rooms.
    pub fn pinned(&self) -> impl Iterator<Item = RoomSnapshot> + '_ {
        std::iter::empty()
    }

    /// Gauges of this moment.
    pub fn gauges(&self) -> Gauges {
        Gauges::default()
    }

    /// Counters since start.
    pub fn counters(&self) -> Counters {
        Counters::default()
    }

    /// Pairs of ranks that have handed rooms over.
    pub fn peers(&self) -> Vec<Peer> {
        Vec::new()
    }
}
