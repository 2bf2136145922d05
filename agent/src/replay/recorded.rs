//! Recordings: what the rooms were told, as lines of JSON, so that a field report can be played again.
//!
//! Format and reader; pure but for the reader it is given. A recording holds decoded fields only, nothing of what they were
//! decoded from. Its first line is a [`Head`], each other a [`Line`]. The format is a contract of its own: a field that is
//! new has a default, a line that is not known is passed over and counted.

use std::io::{self, BufRead};

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::event::{Direction, Mono, SECOND, SocketId, Stand, StateChange, TaskEvent, Trouble};
use crate::gpu::model::Reading;
use crate::http::event as web;
use crate::network::model as network;
use crate::rooms::model::{
    BatchNews, BootstrapStep, Connection, EngineGauges, EngineProcess, Input, RequestStep, Unreadable,
};
use crate::sglang::message::Decoded;
use crate::spans::SchedulerSpan;

/// Version of the format. A new one only where an older agent would misread the file.
pub const VERSION: u32 = 1;

/// Longest line that is read, bytes: a batch of 4096 rooms with ids of 128 bytes has less.
const LINE_MAX: u64 = 1 << 20;

/// Key of a head, by which a recording is told from other files.
pub const WORD: &str = "roomtrace_recording";

/// First line of a recording.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// [`VERSION`].
    #[serde(rename = "roomtrace_recording")]
    pub version: u32,
    /// Version of the agent that wrote it.
    pub agent: String,
    /// Host.
    pub host: String,
    /// Wall clock − monotonic clock when it was begun, nanoseconds.
    pub offset: i64,
    /// Which run of the agent it is of.
    pub run: u64,
    /// Which part of the recording this file is, from 0.
    pub part: u64,
}

/// One input, owned as far as it must be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "as in `Input`")]
pub enum Line<'a> {
    Message {
        at: Mono,
        connection: Connection,
        direction: Direction,
        end: u32,
        #[serde(borrow)]
        decoded: Decoded<'a>,
    },
    Foreign {
        at: Mono,
        connection: Connection,
        direction: Direction,
        frames: u16,
        first_len: u32,
    },
    Lossy {
        at: Mono,
        connection: Connection,
        direction: Direction,
        bytes: u64,
    },
    State {
        at: Mono,
        connection: Connection,
        change: StateChange,
    },
    Acknowledged {
        at: Mono,
        socket: SocketId,
        una: u32,
    },
    Request {
        at: Mono,
        connection: Connection,
        server: bool,
        n: u64,
        step: OwnedRequestStep,
    },
    Bootstrap {
        at: Mono,
        connection: Connection,
        server: bool,
        n: u64,
        step: OwnedBootstrapStep,
    },
    Unreadable {
        at: Mono,
        connection: Connection,
        why: Unreadable,
    },
    Task(TaskEvent),
    Trouble {
        at: Mono,
        connection: Connection,
        trouble: Trouble,
    },
    Stand {
        at: Mono,
        socket: SocketId,
        stand: Stand,
    },
    Process {
        at: Mono,
        process: EngineProcess,
    },
    Gauges {
        at: Mono,
        gauges: EngineGauges,
    },
    Spans {
        at: Mono,
        offset: i64,
        spans: Vec<SchedulerSpan>,
    },
    Gpu(Reading),
    Network(network::Reading),
    Batch {
        at: Mono,
        pid: u32,
        #[serde(default)]
        room: Option<RecordedRoom>,
        news: BatchNews,
    },
    /// So many lines are missing here.
    Dropped {
        lines: u64,
    },
}

/// [`RequestStep`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "as there")]
pub enum OwnedRequestStep {
    Asked { work: web::Work },
    FirstBodyByte,
    Answered { status: Option<u16>, how: web::AnswerEnd, outcome: web::Outcome },
    HungUp { by: web::Side, answer_begun: bool },
    OutOfSight,
    Control { call: web::Control, status: Option<u16> },
}

/// [`BootstrapStep`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "as there")]
pub enum OwnedBootstrapStep {
    Rank(web::RankRegistration),
    Query(web::RouteQuery),
    DpQuery,
    RankIs(std::net::SocketAddr),
    Topology(web::Topology),
    DpRank {
        #[serde(with = "crate::room_text")]
        room: u64,
        rank: u32,
    },
    DpRanks(Vec<RoomRank>),
    Refused(u16),
    HungUp(web::Side),
    OutOfSight,
}

/// A room, as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedRoom(#[serde(with = "crate::room_text")] u64);

/// A room and its DP rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomRank(#[serde(with = "crate::room_text")] u64, u32);

impl<'a> From<&Input<'a>> for Line<'a> {
    fn from(input: &Input<'a>) -> Self {
        match *input {
            Input::Message { at, connection, direction, end, decoded } => {
                Self::Message { at, connection, direction, end, decoded: *decoded }
            }
            Input::Foreign { at, connection, direction, frames, first_len } => {
                Self::Foreign { at, connection, direction, frames, first_len }
            }
            Input::Lossy { at, connection, direction, bytes } => {
                Self::Lossy { at, connection, direction, bytes }
            }
            Input::State { at, connection, change } => Self::State { at, connection, change },
            Input::Acknowledged { at, socket, una } => Self::Acknowledged { at, socket, una },
            Input::Request { at, connection, server, n, step } => {
                Self::Request { at, connection, server, n, step: (&step).into() }
            }
            Input::Bootstrap { at, connection, server, n, step } => {
                Self::Bootstrap { at, connection, server, n, step: (&step).into() }
            }
            Input::Unreadable { at, connection, why } => Self::Unreadable { at, connection, why },
            Input::Task(task) => Self::Task(task),
            Input::Trouble { at, connection, trouble } => Self::Trouble { at, connection, trouble },
            Input::Stand { at, socket, stand } => Self::Stand { at, socket, stand },
            Input::Process { at, process } => Self::Process { at, process: process.clone() },
            Input::Gauges { at, gauges } => Self::Gauges { at, gauges: gauges.clone() },
            Input::Spans { at, offset, spans } => Self::Spans { at, offset, spans: spans.to_vec() },
            Input::Gpu(reading) => Self::Gpu(reading.clone()),
            Input::Network(reading) => Self::Network(reading.clone()),
            Input::Batch { at, pid, room, news } => {
                Self::Batch { at, pid, room: room.map(RecordedRoom), news }
            }
        }
    }
}

impl From<&RequestStep<'_>> for OwnedRequestStep {
    fn from(step: &RequestStep<'_>) -> Self {
        match *step {
            RequestStep::Asked { work } => Self::Asked { work: work.clone() },
            RequestStep::FirstBodyByte => Self::FirstBodyByte,
            RequestStep::Answered { status, how, outcome } => Self::Answered { status, how, outcome },
            RequestStep::HungUp { by, answer_begun } => Self::HungUp { by, answer_begun },
            RequestStep::OutOfSight => Self::OutOfSight,
            RequestStep::Control { call, status } => Self::Control { call: call.clone(), status },
        }
    }
}

impl OwnedRequestStep {
    const fn step(&self) -> RequestStep<'_> {
        match *self {
            Self::Asked { ref work } => RequestStep::Asked { work },
            Self::FirstBodyByte => RequestStep::FirstBodyByte,
            Self::Answered { status, how, outcome } => RequestStep::Answered { status, how, outcome },
            Self::HungUp { by, answer_begun } => RequestStep::HungUp { by, answer_begun },
            Self::OutOfSight => RequestStep::OutOfSight,
            Self::Control { ref call, status } => RequestStep::Control { call, status },
        }
    }
}

impl From<&BootstrapStep<'_>> for OwnedBootstrapStep {
    fn from(step: &BootstrapStep<'_>) -> Self {
        match *step {
            BootstrapStep::Rank(rank) => Self::Rank(rank.clone()),
            BootstrapStep::Query(query) => Self::Query(*query),
            BootstrapStep::DpQuery => Self::DpQuery,
            BootstrapStep::RankIs(at) => Self::RankIs(at),
            BootstrapStep::Topology(topology) => Self::Topology(*topology),
            BootstrapStep::DpRank { room, rank } => Self::DpRank { room, rank },
            BootstrapStep::DpRanks(ranks) => {
                Self::DpRanks(ranks.iter().map(|(room, rank)| RoomRank(*room, *rank)).collect())
            }
            BootstrapStep::Refused(status) => Self::Refused(status),
            BootstrapStep::HungUp(side) => Self::HungUp(side),
            BootstrapStep::OutOfSight => Self::OutOfSight,
        }
    }
}

impl OwnedBootstrapStep {
    fn with<R>(&self, take: impl FnOnce(BootstrapStep<'_>) -> R) -> R {
        let pairs: Vec<(u64, u32)>;
        take(match self {
            Self::Rank(rank) => BootstrapStep::Rank(rank),
            Self::Query(query) => BootstrapStep::Query(query),
            Self::DpQuery => BootstrapStep::DpQuery,
            Self::RankIs(at) => BootstrapStep::RankIs(*at),
            Self::Topology(topology) => BootstrapStep::Topology(topology),
            Self::DpRank { room, rank } => BootstrapStep::DpRank { room: *room, rank: *rank },
            Self::DpRanks(ranks) => {
                pairs = ranks.iter().map(|r| (r.0, r.1)).collect();
                BootstrapStep::DpRanks(&pairs)
            }
            Self::Refused(status) => BootstrapStep::Refused(*status),
            Self::HungUp(side) => BootstrapStep::HungUp(*side),
            Self::OutOfSight => BootstrapStep::OutOfSight,
        })
    }
}

impl Line<'_> {
    /// When it was.
    pub const fn at(&self) -> Option<Mono> {
        match self {
            Self::Message { at, .. }
            | Self::Foreign { at, .. }
            | Self::Lossy { at, .. }
            | Self::State { at, .. }
            | Self::Acknowledged { at, .. }
            | Self::Request { at, .. }
            | Self::Bootstrap { at, .. }
            | Self::Unreadable { at, .. }
            | Self::Trouble { at, .. }
            | Self::Stand { at, .. }
            | Self::Process { at, .. }
            | Self::Gauges { at, .. }
            | Self::Batch { at, .. }
            | Self::Spans { at, .. } => Some(*at),
            Self::Task(task) => Some(task.at),
            Self::Gpu(reading) => Some(reading.at),
            Self::Network(reading) => Some(reading.at),
            Self::Dropped { .. } => None,
        }
    }

    /// The connection, where it names one with its addresses.
    const fn connection_mut(&mut self) -> Option<&mut Connection> {
        match self {
            Self::Message { connection, .. }
            | Self::Foreign { connection, .. }
            | Self::Lossy { connection, .. }
            | Self::State { connection, .. }
            | Self::Request { connection, .. }
            | Self::Bootstrap { connection, .. }
            | Self::Unreadable { connection, .. }
            | Self::Trouble { connection, .. } => Some(connection),
            _ => None,
        }
    }

    /// Gives it as what the rooms take; nothing where lines are missing.
    fn give(&self, take: &mut impl FnMut(&Input<'_>)) {
        take(&match *self {
            Self::Message { at, connection, direction, end, ref decoded } => {
                Input::Message { at, connection, direction, end, decoded }
            }
            Self::Foreign { at, connection, direction, frames, first_len } => {
                Input::Foreign { at, connection, direction, frames, first_len }
            }
            Self::Lossy { at, connection, direction, bytes } => {
                Input::Lossy { at, connection, direction, bytes }
            }
            Self::State { at, connection, change } => Input::State { at, connection, change },
            Self::Acknowledged { at, socket, una } => Input::Acknowledged { at, socket, una },
            Self::Request { at, connection, server, n, ref step } => {
                Input::Request { at, connection, server, n, step: step.step() }
            }
            Self::Bootstrap { at, connection, server, n, ref step } => {
                return step.with(|step| take(&Input::Bootstrap { at, connection, server, n, step }));
            }
            Self::Unreadable { at, connection, why } => Input::Unreadable { at, connection, why },
            Self::Task(task) => Input::Task(task),
            Self::Trouble { at, connection, trouble } => Input::Trouble { at, connection, trouble },
            Self::Stand { at, socket, stand } => Input::Stand { at, socket, stand },
            Self::Process { at, ref process } => Input::Process { at, process },
            Self::Gauges { at, ref gauges } => Input::Gauges { at, gauges },
            Self::Spans { at, offset, ref spans } => Input::Spans { at, offset, spans },
            Self::Gpu(ref reading) => Input::Gpu(reading),
            Self::Network(ref reading) => Input::Network(reading),
            Self::Batch { at, pid, room, news } => {
                Input::Batch { at, pid, room: room.map(|room| room.0), news }
            }
            Self::Dropped { .. } => return,
        });
    }
}

/// Why a recording cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The file cannot be read.
    #[error("cannot read: {0}")]
    Io(#[from] io::Error),
    /// It begins with no head.
    #[error("is no recording: its first line is not what `roomtrace run --record` writes ({0})")]
    Head(serde_json::Error),
    /// Of another version.
    #[error(
        "is a recording of version {0}, this program reads version {VERSION} (replay it with the one that wrote it)"
    )]
    Version(u32),
}

/// What was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Read {
    /// Lines taken.
    pub lines: u64,
    /// Lines that are none that this version knows, or that are longer than any.
    pub unknown: u64,
    /// Lines that the recording itself says are missing.
    pub dropped: u64,
    /// The last line is cut short: the agent was killed, or the disk was full.
    pub cut: bool,
    /// When the last of them was.
    pub last: Option<Mono>,
}

/// Connections remembered while reading, to be told of lines that are missing: at most this many.
const CONNECTIONS: usize = 65_536;

/// A part of a recording, or two that follow each other.
#[derive(Debug)]
pub struct Reader<R> {
    parts: Vec<R>,
    head: Head,
    line: Vec<u8>,
    /// Something is missing before what comes next: connections that are older and not known yet had a beginning.
    joined: bool,
    since: Mono,
    connections: HashMap<SocketId, Connection>,
    last: Mono,
}

impl<R: BufRead> Reader<R> {
    /// Reads the head of `current` and, where it belongs before it, that of `before`.
    ///
    /// # Errors
    ///
    /// [`RecordingError`].
    pub fn new(mut current: R, before: Option<R>) -> Result<Self, RecordingError> {
        let head = head(&mut current)?;
        let before = before.and_then(|mut part| Some((self::head(&mut part).ok()?, part)));
        let before = before.filter(|(h, _)| h.run == head.run && h.part + 1 == head.part);
        let first = before.as_ref().map_or(head.part, |(h, _)| h.part);
        // The last is taken first.
        let parts = std::iter::once(current).chain(before.map(|(_, part)| part)).collect();
        let (connections, line) = (HashMap::new(), Vec::new());
        Ok(Self { parts, head, line, joined: first > 0, since: Mono(0), connections, last: Mono(0) })
    }

    /// The head of the current part.
    pub const fn head(&self) -> &Head {
        &self.head
    }

    /// Gives `sink` everything in order.
    ///
    /// # Errors
    ///
    /// [`RecordingError::Io`].
    pub fn run(mut self, sink: &mut impl FnMut(Mono, &Input<'_>)) -> Result<Read, RecordingError> {
        let mut read = Read::default();
        while let Some(mut part) = self.parts.pop() {
            loop {
                self.line.clear();
                let n = io::Read::take(&mut part, LINE_MAX).read_until(b'\n', &mut self.line)?;
                if n == 0 {
                    break;
                }
                if self.line.last() != Some(&b'\n') {
                    read.cut |= u64::try_from(n).is_ok_and(|n| n < LINE_MAX);
                    read.unknown += 1;
                    continue;
                }
                let line = std::mem::take(&mut self.line);
                match serde_json::from_slice(&line) {
                    Ok(parsed) => self.take(parsed, &mut read, sink),
                    Err(_) => read.unknown += 1,
                }
                self.line = line;
            }
        }
        read.last = (read.lines > 0).then_some(self.last);
        Ok(read)
    }

    fn take(&mut self, mut line: Line<'_>, read: &mut Read, sink: &mut impl FnMut(Mono, &Input<'_>)) {
        let Some(at) = line.at() else {
            let Line::Dropped { lines } = line else { return };
            read.dropped = read.dropped.saturating_add(lines);
            (self.joined, self.since) = (true, Mono(u64::MAX));
            for connection in std::mem::take(&mut self.connections).into_values() {
                for direction in [Direction::Sent, Direction::Received] {
                    sink(self.last, &Input::Lossy { at: self.last, connection, direction, bytes: 0 });
                }
            }
            return;
        };
        if self.joined && (self.since == Mono(u64::MAX) || read.lines == 0) {
            self.since = at;
        }
        read.lines += 1;
        self.last = self.last.max(at);
        if let Some(connection) = line.connection_mut() {
            let older = self.joined && connection.since < self.since;
            connection.preexisting |= older;
            let connection = *connection;
            let known = self.connections.contains_key(&connection.socket);
            if !known && self.connections.len() < CONNECTIONS {
                self.connections.insert(connection.socket, connection);
            }
            line.give(&mut |input| sink(at, input));
            // Opened among the lines that are missing, it may have carried what an open room waits for; and the end that
            // sends and the end that receives a message do not stand side by side.
            let near = at.since(self.since) < SECOND;
            if self.joined && near || read.dropped > 0 && older && !known {
                for direction in [Direction::Sent, Direction::Received] {
                    sink(at, &Input::Lossy { at, connection, direction, bytes: 0 });
                }
            }
            return;
        }
        line.give(&mut |input| sink(at, input));
    }
}

fn head(part: &mut impl BufRead) -> Result<Head, RecordingError> {
    let mut line = Vec::new();
    io::Read::take(part, LINE_MAX).read_until(b'\n', &mut line)?;
    let head: Head = serde_json::from_slice(&line).map_err(RecordingError::Head)?;
    if head.version == VERSION { Ok(head) } else { Err(RecordingError::Version(head.version)) }
}

/// Turns inputs into lines, in memory; whoever owns the pipeline fetches them and writes them down.
#[derive(Debug)]
pub struct Recorder {
    lines: Vec<u8>,
    max: usize,
    dropped: u64,
}

impl Recorder {
    /// At most `max` bytes wait to be fetched.
    pub const fn new(max: usize) -> Self {
        Self { lines: Vec::new(), max, dropped: 0 }
    }

    /// Takes one input down.
    pub fn record(&mut self, input: &Input<'_>) {
        let before = self.lines.len();
        if before >= self.max || serde_json::to_writer(&mut self.lines, &Line::from(input)).is_err() {
            self.lines.truncate(before);
            self.dropped = self.dropped.saturating_add(1);
            return;
        }
        self.lines.push(b'\n');
    }

    /// Whole lines since the last call; `room` is used for the next ones.
    pub fn fetch(&mut self, mut room: Vec<u8>) -> Vec<u8> {
        room.clear();
        std::mem::replace(&mut self.lines, room)
    }

    /// Whether there is something to fetch.
    pub const fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Inputs that found no place.
    pub const fn dropped(&self) -> u64 {
        self.dropped
    }
}
