//! What the control stage counts. Plain data: label values and numbers for the exporter.

use std::hash::Hash;

use arrayvec::ArrayVec;
use hashbrown::HashMap;

use crate::event::{Direction, NotCaptured};
use crate::http::event::Route;
use crate::rooms::model::Unreadable;
use crate::sglang::Unknown;
use crate::sglang::message::{Backend, Kind};
use crate::zmtp::{Multipart, Unsupported};

/// Why bytes of a socket did not become messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dropped {
    /// The table of sockets was full.
    TableFull,
    /// The socket carries nothing that is read here.
    Foreign,
    /// A hole in the sequence numbers.
    Hole,
    /// Two calls that report the same bytes.
    Overlap,
    /// A call without bytes that is not wholly inside one frame's body.
    NotCaptured,
    /// Bytes that no ZMTP stream has.
    Malformed,
    /// Passed over while out of step, until a known message.
    OutOfStep,
    /// Passed over on a connection that is not (yet) known to be control traffic.
    Unjudged,
    /// Unfinished messages of all connections together had grown too large.
    Memory,
}

impl Dropped {
    /// Every reason.
    pub const ALL: [Self; 9] = [
        Self::TableFull,
        Self::Foreign,
        Self::Hole,
        Self::Overlap,
        Self::NotCaptured,
        Self::Malformed,
        Self::OutOfStep,
        Self::Unjudged,
        Self::Memory,
    ];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::TableFull => "table_full",
            Self::Foreign => "foreign",
            Self::Hole => "hole",
            Self::Overlap => "overlap",
            Self::NotCaptured => "not_captured",
            Self::Malformed => "malformed",
            Self::OutOfStep => "out_of_step",
            Self::Unjudged => "unjudged",
            Self::Memory => "memory",
        }
    }
}

/// How often something was dropped, and how many bytes in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Loss {
    /// Times.
    pub count: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What a connection is at the moment; label values of `roomtrace_connections{state}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConnectionState {
    /// Not judged yet.
    Pending,
    /// Followed from its greeting.
    Known,
    /// Joined in its middle.
    Acquired,
    /// Out of step.
    Lost,
    /// Nothing that is read here.
    Foreign,
    /// A ZMTP dialect that is not read.
    Unsupported,
    /// HTTP.
    Http,
    /// Looks like HTTP, and no request has been seen yet.
    HttpPending,
    /// HTTP; where its next request begins is not known.
    HttpLost,
}

impl ConnectionState {
    /// Every state.
    pub const ALL: [Self; 9] = [
        Self::Pending,
        Self::Known,
        Self::Acquired,
        Self::Lost,
        Self::Foreign,
        Self::Unsupported,
        Self::Http,
        Self::HttpPending,
        Self::HttpLost,
    ];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Known => "known",
            Self::Acquired => "acquired",
            Self::Lost => "lost",
            Self::Foreign => "foreign",
            Self::Unsupported => "unsupported",
            Self::Http => "http",
            Self::HttpPending => "http_pending",
            Self::HttpLost => "http_lost",
        }
    }
}

/// Counts since the start; what is a gauge says so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Socket events taken in.
    pub events: u64,
    /// Inputs given to the rooms.
    pub inputs: u64,
    /// Frames behind the last one of the newest layout.
    pub extra_frames: u64,
    /// Connections that turned out to be no ZMTP.
    pub not_zmtp: u64,
    /// Connections of ZMTP socket types other than PUSH and PULL.
    pub other_socket_types: u64,
    /// Connections joined in their middle that showed no known message for long, or within their source's budget.
    pub unrecognised: u64,
    /// Connections forgotten because no call on them was reported while a handshake may take: nobody spoke, or what
    /// was said is no greeting and therefore not shipped.
    pub speechless: u64,
    /// Idle sockets that made room in a full table.
    pub evicted: u64,
    /// HTTP connections that were joined anew because unfinished heads and bodies had grown too large together.
    pub http_memory: u64,
    /// Bytes of requests that no call brought.
    pub request_holes: Loss,
    /// Judgements that nobody fetched in time.
    pub judgements_dropped: u64,
    messages: [[[u64; Kind::ALL.len()]; 4]; 2],
    unknown: [u64; Unknown::ALL.len()],
    unsupported: [u64; Unsupported::ALL.len()],
    not_captured: [u64; NotCaptured::ALL.len()],
    dropped: [Loss; Dropped::ALL.len()],
    connections: [u64; ConnectionState::ALL.len()],
    requests: [u64; Route::LABELS.len()],
    unreadable: [u64; Unreadable::ALL.len()],
}

const DIRECTIONS: [Direction; 2] = [Direction::Sent, Direction::Received];
const BACKENDS: [Backend; 4] = [Backend::Mooncake, Backend::Nixl, Backend::Mori, Backend::Shared];

impl Counters {
    /// Decoded messages by direction, backend and kind; combinations never seen are left out.
    pub fn messages(&self) -> impl Iterator<Item = (Direction, Backend, Kind, u64)> + '_ {
        DIRECTIONS.into_iter().zip(&self.messages).flat_map(|(direction, backends)| {
            BACKENDS.into_iter().zip(backends).flat_map(move |(backend, kinds)| {
                Kind::ALL
                    .into_iter()
                    .zip(kinds)
                    .filter(|(_, n)| **n > 0)
                    .map(move |(kind, n)| (direction, backend, kind, *n))
            })
        })
    }

    /// Messages not decoded, by reason.
    pub fn unknown(&self) -> impl Iterator<Item = (Unknown, u64)> + '_ {
        Unknown::ALL.into_iter().zip(self.unknown)
    }

    /// Connections in a dialect that is not read.
    pub fn unsupported(&self) -> impl Iterator<Item = (Unsupported, u64)> + '_ {
        Unsupported::ALL.into_iter().zip(self.unsupported)
    }

    /// Calls whose bytes were not captured, by reason.
    pub fn not_captured(&self) -> impl Iterator<Item = (NotCaptured, u64)> + '_ {
        NotCaptured::ALL.into_iter().zip(self.not_captured)
    }

    /// What was dropped, by reason.
    pub fn dropped(&self) -> impl Iterator<Item = (Dropped, Loss)> + '_ {
        Dropped::ALL.into_iter().zip(self.dropped)
    }

    /// Requests begun, by what they ask for.
    pub fn requests(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        Route::LABELS.into_iter().zip(self.requests)
    }

    /// Connections that the rooms were told cannot be read, by cause. Each counts once.
    pub fn unreadable(&self) -> impl Iterator<Item = (Unreadable, u64)> + '_ {
        Unreadable::ALL.into_iter().zip(self.unreadable)
    }

    /// Gauge: open connections by state. Those that are not read count until they have been quiet for a while:
    /// their close may not be told.
    pub fn connections(&self) -> impl Iterator<Item = (ConnectionState, u64)> + '_ {
        ConnectionState::ALL.into_iter().zip(self.connections)
    }

    pub(super) fn count_message(&mut self, direction: Direction, backend: Backend, kind: Kind) {
        let kinds = self.messages.get_mut(direction as usize).and_then(|b| b.get_mut(backend as usize));
        if let Some(n) = kinds.and_then(|k| k.get_mut(kind as usize)) {
            *n += 1;
        }
    }

    pub(super) fn count_unknown(&mut self, reason: Unknown) {
        if let Some(n) = self.unknown.get_mut(reason as usize) {
            *n += 1;
        }
    }

    pub(super) fn count_unsupported(&mut self, dialect: Unsupported) {
        if let Some(n) = self.unsupported.get_mut(dialect as usize) {
            *n += 1;
        }
    }

    pub(super) fn count_not_captured(&mut self, reason: NotCaptured) {
        if let Some(n) = self.not_captured.get_mut(reason as usize) {
            *n += 1;
        }
    }

    pub(super) fn count_request(&mut self, route: Route) {
        if let Some(n) = self.requests.get_mut(route.index()) {
            *n += 1;
        }
    }

    pub(super) const fn count_request_hole(&mut self, bytes: u64) {
        self.request_holes.count += 1;
        self.request_holes.bytes = self.request_holes.bytes.saturating_add(bytes);
    }

    pub(super) fn count_unreadable(&mut self, why: Unreadable) {
        if let Some(n) = self.unreadable.get_mut(why as usize) {
            *n += 1;
        }
    }

    pub(super) fn drop_bytes(&mut self, why: Dropped, bytes: u64) {
        if let Some(loss) = self.dropped.get_mut(why as usize) {
            loss.count += 1;
            loss.bytes = loss.bytes.saturating_add(bytes);
        }
    }

    pub(super) fn move_connection(&mut self, from: Option<ConnectionState>, to: Option<ConnectionState>) {
        if let Some(n) = from.and_then(|s| self.connections.get_mut(s as usize)) {
            *n = n.saturating_sub(1);
        }
        if let Some(n) = to.and_then(|s| self.connections.get_mut(s as usize)) {
            *n += 1;
        }
    }
}

/// Lengths kept of an unknown message's frames.
const LENGTHS: usize = 8;
/// Unknown shapes kept.
const SHAPES: usize = 64;

/// A shape of messages that no layout has: counts and lengths, no bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Frames of the message.
    pub frames: u32,
    /// Lengths of its first frames.
    pub lengths: ArrayVec<u64, LENGTHS>,
}

/// Unknown shapes and how often each was seen.
#[derive(Clone, Debug, Default)]
pub(super) struct Shapes {
    seen: HashMap<Shape, u64>,
}

impl Shapes {
    /// Counts a shape; new ones only while there is room.
    pub(super) fn count(&mut self, parts: &Multipart<'_>) {
        let lengths = parts.frames().take(LENGTHS).map(|f| f.len).collect();
        let shape = Shape { frames: parts.count(), lengths };
        if let Some(n) = self.seen.get_mut(&shape) {
            *n += 1;
        } else if self.seen.len() < SHAPES {
            self.seen.insert(shape, 1);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Shape, u64)> {
        self.seen.iter().map(|(shape, n)| (shape, *n))
    }
}
