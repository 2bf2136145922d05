//! What goes into the room table and what comes out of it: closed enums and plain data.

use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::event::{
    Addresses, Direction, Mono, SECOND, SocketId, Stand, StateChange, Task, TaskEvent, Trouble,
};
use crate::gpu::model::{Reading, Trouble as GpuTrouble};
use crate::gpu::windows::{Computing, Link, Stretch, Window};
use crate::http::event as web;
use crate::network::model as network;
use crate::sglang::message::{Backend, Decoded, Kind, KvPoll, Releases};
use crate::spans::{EngineRequest, SchedulerSpan};
use crate::verdict::model::{Finding, Verdict};

/// Which side of the hand-over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Computes the prompt, sends KV.
    Prefill,
    /// Receives KV, generates.
    Decode,
}

impl Role {
    /// Label value and JSON value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// A connection as the rooms need to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Connection {
    /// Which end.
    pub socket: SocketId,
    /// Its addresses.
    pub addresses: Addresses,
    /// Network namespace, 0 when unknown.
    pub netns: u32,
    /// The process that uses it, when a call of it was seen.
    pub task: Option<Task>,
    /// Its beginning was not seen: what it carried before `since` is unknown.
    pub preexisting: bool,
    /// Since when it is watched.
    pub since: Mono,
}

/// What the stages below deliver to the rooms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Input<'a> {
    /// A message was sent or received by a socket of this host.
    Message {
        /// When.
        at: Mono,
        /// On which connection.
        connection: Connection,
        /// Sent or received by `connection.socket`.
        direction: Direction,
        /// Sequence number (32 bits, absolute) just behind the message, to compare with `una`.
        end: u32,
        /// What it says.
        decoded: &'a Decoded<'a>,
    },
    /// Well-formed ZMTP message of no known kind, or bytes that are not ZMTP at all, on a rank's port.
    Foreign {
        /// When.
        at: Mono,
        /// On which connection.
        connection: Connection,
        /// Sent or received by `connection.socket`.
        direction: Direction,
        /// Frames of it (0: not ZMTP).
        frames: u16,
        /// Bytes of its first frame.
        first_len: u32,
    },
    /// Bytes of a control connection are missing: what the verdicts of its rooms rest on has a hole.
    Lossy {
        /// When it was noticed.
        at: Mono,
        /// On which connection.
        connection: Connection,
        /// In which direction.
        direction: Direction,
        /// How many bytes (0: not known).
        bytes: u64,
    },
    /// A connection (or a listener, or an attempt) changed state.
    State {
        /// When.
        at: Mono,
        /// Which.
        connection: Connection,
        /// How.
        change: StateChange,
    },
    /// The peer's kernel has acknowledged everything before `una` on this connection.
    Acknowledged {
        /// When it was read.
        at: Mono,
        /// On which connection.
        socket: SocketId,
        /// First byte not acknowledged.
        una: u32,
    },
    /// Something about a request at an engine's HTTP port.
    Request {
        /// When.
        at: Mono,
        /// On which connection.
        connection: Connection,
        /// `connection.socket` is the server's end (an engine that is asked), not the client's (one that asks).
        server: bool,
        /// Which request of this connection.
        n: u64,
        /// What.
        step: RequestStep<'a>,
    },
    /// Something about a bootstrap server.
    Bootstrap {
        /// When.
        at: Mono,
        /// On which connection.
        connection: Connection,
        /// `connection.socket` is the server's end.
        server: bool,
        /// Which request of this connection.
        n: u64,
        /// What.
        step: BootstrapStep<'a>,
    },
    /// A connection of an engine turned out not to be readable.
    Unreadable {
        /// When.
        at: Mono,
        /// On which connection.
        connection: Connection,
        /// Why.
        why: Unreadable,
    },
    /// A thread or process of an engine has ended.
    Task(TaskEvent),
    /// TCP had trouble with a connection.
    Trouble {
        /// When.
        at: Mono,
        /// On which connection.
        connection: Connection,
        /// What.
        trouble: Trouble,
    },
    /// Where a connection stands, because [`crate::rooms::RoomTable::asks`] wanted to know.
    Stand {
        /// When.
        at: Mono,
        /// Which.
        socket: SocketId,
        /// How.
        stand: Stand,
    },
    /// A process of an engine, as the host's process table has it: once when it is first seen, again when it changed.
    Process {
        /// When.
        at: Mono,
        /// It.
        process: &'a EngineProcess,
    },
    /// What an engine says of itself in numbers, or that it could not be asked.
    Gauges {
        /// When.
        at: Mono,
        /// They.
        gauges: &'a EngineGauges,
    },
    /// Spans of engines' schedulers.
    Spans {
        /// When they came.
        at: Mono,
        /// Wall clock − monotonic clock then, nanoseconds.
        offset: i64,
        /// They.
        spans: &'a [SchedulerSpan],
    },
    /// Something that was read of a GPU of this host, as a whole.
    Gpu(&'a Reading),
    /// Something that was read of an RDMA port of this host, as a whole, or of an engine's own connections.
    Network(&'a network::Reading),
    /// Something about what a process asks its transfer engine to move.
    Batch {
        /// When.
        at: Mono,
        /// Which process.
        pid: u32,
        /// For which room; `None`: see [`BatchNews::Unclear`].
        room: Option<u64>,
        /// What.
        news: BatchNews,
    },
}

/// What an optional probe on the transfer engine shows of a room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BatchNews {
    /// A decode rank has asked for it; what is submitted for it from now on is seen.
    Asked {
        /// Pages that it named.
        pages: u64,
        /// All of them are known, and so are that rank's buffers.
        whole: bool,
    },
    /// A batch was submitted for it.
    Submitted {
        /// Bytes of it.
        bytes: u64,
        /// Requests of it.
        requests: u64,
    },
    /// One is over, or was given up.
    Over,
    /// One was submitted that can be this room's or another's.
    Ambiguous,
    /// Something of this process was missed, of any of its rooms.
    Unclear,
}

/// What a process was seen to submit for a room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoomBatches {
    /// The process.
    pub pid: u32,
    /// Since when it was looked for: the first METADATA.
    pub since: Mono,
    /// Pages that decode named.
    pub pages: u64,
    /// Nothing can have been missed.
    pub whole: bool,
    /// Batches, their requests and bytes.
    pub batches: u64,
    /// See [`Self::batches`].
    pub requests: u64,
    /// See [`Self::batches`].
    pub bytes: u64,
    /// Batches of them that are over or were given up.
    pub over: u64,
    /// Batches that may be another room's: in none of these numbers.
    pub ambiguous: u64,
    /// When the first was submitted.
    pub first: Option<Mono>,
    /// When the last was.
    pub last: Option<Mono>,
    /// When the last was over.
    pub last_over: Option<Mono>,
}

/// A step in the life of a request for work (`/generate` and its like), in this order; any but the first may be missing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RequestStep<'a> {
    /// Its last byte has passed, and this is what it says: the engine has it from now on, however long it took to come. One
    /// without a room is told as well.
    Asked {
        /// Rooms and ids.
        work: &'a web::Work,
    },
    /// The first byte of the answer's body.
    FirstBodyByte,
    /// The answer is over.
    Answered {
        /// Its status; `None`: not seen.
        status: Option<u16>,
        /// How the end is known. [`web::AnswerEnd::Unseen`]: it may not have been all.
        how: web::AnswerEnd,
        /// What it says.
        outcome: web::Outcome,
    },
    /// The connection ended before the answer did.
    HungUp {
        /// Who ended it.
        by: web::Side,
        /// The head of the answer had been seen.
        answer_begun: bool,
    },
    /// From here on nothing is known of it: its answer may have passed unseen.
    OutOfSight,
    /// A call that stops, starts or changes the engine. It has taken effect when `status` is 200.
    Control {
        /// Which.
        call: &'a web::Control,
        /// `None`: it was only asked for; else it was answered so.
        status: Option<u16>,
    },
}

/// What passes between a rank and a bootstrap server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum BootstrapStep<'a> {
    /// A prefill rank registers (answered with 200).
    Rank(&'a web::RankRegistration),
    /// Decode asks.
    Query(&'a web::RouteQuery),
    /// Decode asks which DP ranks have its rooms (`/query_dp_ranks`).
    DpQuery,
    /// It was told where a rank is.
    RankIs(SocketAddr),
    /// It was told the topology.
    Topology(&'a web::Topology),
    /// `/register_dp_rank`: this room is this DP rank's.
    DpRank {
        /// Room.
        room: u64,
        /// DP rank.
        rank: u32,
    },
    /// `/query_dp_ranks` was answered: DP ranks by room.
    DpRanks(&'a [(u64, u32)]),
    /// It was answered otherwise.
    Refused(u16),
    /// The connection ended without an answer.
    HungUp(web::Side),
    /// From here on nothing is known of it.
    OutOfSight,
}

/// Why a connection of an engine cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Unreadable {
    /// TLS.
    Tls,
    /// HTTP/2 (gRPC).
    Http2,
    /// CURVE, PLAIN or GSSAPI of ZMTP.
    ZmtpMechanism,
    /// ZMTP 1.0 or 2.0.
    ZmtpVersion,
    /// Calls whose bytes cannot be had (io_uring, splice, …).
    Calls,
    /// Neither ZMTP nor HTTP.
    Other,
}

impl Unreadable {
    /// Every cause, in label order.
    pub const ALL: [Self; 6] =
        [Self::Tls, Self::Http2, Self::ZmtpMechanism, Self::ZmtpVersion, Self::Calls, Self::Other];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Tls => "tls",
            Self::Http2 => "http2",
            Self::ZmtpMechanism => "zmtp_mechanism",
            Self::ZmtpVersion => "zmtp_version",
            Self::Calls => "calls",
            Self::Other => "other",
        }
    }
}

/// One process of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineProcess {
    /// Process id, host numbering.
    pub pid: u32,
    /// The process at the top of its engine, which serves HTTP. Its own id where it is that process, or alone.
    pub server: u32,
    /// Start time in clock ticks since boot (`/proc/PID/stat`, field 22): with `pid` it names a process for good.
    pub started: u64,
    /// `comm`.
    pub comm: String,
    /// Role, where its arguments tell (`--disaggregation-mode`).
    pub role: Option<Role>,
    /// Ranks that its title names ("TP0", "DP1 TP3 PP0"), as the engine writes them.
    pub ranks: Option<String>,
    /// Port of the engine's HTTP server, where its arguments tell (`--port`; SGLang's default is 30000).
    pub http_port: Option<u16>,
    /// Port of its bootstrap server, where its arguments tell (`--disaggregation-bootstrap-port`; SGLang's default is 8998,
    /// and only prefill has one).
    pub bootstrap_port: Option<u16>,
    /// Where it runs.
    pub place: Place,
    /// RDMA cards that its arguments name (`--disaggregation-ib-device`); none: they name none, or a file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ib_devices: Vec<String>,
}

/// Where a process runs, from its cgroup path (`/proc/PID/cgroup`) and the names of the kubelet's log files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// Container id (64 hex digits).
    pub container: Option<String>,
    /// Kubernetes pod uid.
    pub pod_uid: Option<String>,
    /// What Kubernetes calls it, where the kubelet's files tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<PodName>,
}

/// Names of a container in Kubernetes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PodName {
    /// Pod.
    pub pod: String,
    /// Its namespace.
    pub namespace: String,
    /// Container; `None`: the kubelet had to cut it.
    pub container: Option<String>,
}

/// A count is of the moment if its scheduler wrote it so shortly before the answer, nanoseconds. One that only waits for transfers
/// writes twenty times a second (`LOAD_STALL_REFRESH_S`, `managers/scheduler.py` of SGLang 0.5.23); one that computes or is paused
/// writes when that is over.
pub const FRESH: u64 = 5 * SECOND;

/// Numbers of one engine at one moment (`/v1/loads` or `/metrics`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineGauges {
    /// Process that serves HTTP.
    pub server: u32,
    /// Its role as it says.
    pub role: Option<Role>,
    /// Its release as it says.
    pub version: Option<String>,
    /// Requests whose KV is being handed over (prefill: `num_prefill_inflight_queue_reqs`), summed over DP ranks, not
    /// over TP ranks.
    pub inflight: Option<u64>,
    /// The same by DP rank, where the engine tells them apart, in the order of ranks; at most 1024.
    pub inflight_by_dp: Vec<(u32, u64)>,
    /// Requests before that, whose peer has not answered yet (prefill: bootstrap queue, decode: preallocation queue).
    pub bootstrap: Option<u64>,
    /// Requests waiting to be computed.
    pub waiting: Option<u64>,
    /// Requests running.
    pub running: Option<u64>,
    /// Requests that a pause of the engine holds back.
    pub paused: Option<u64>,
    /// Something that grows while the engine computes (`total_prefill_busy_us`, `total_prefill_uncached_tokens`).
    pub progress: Option<u64>,
    /// Where it was asked.
    pub address: Option<SocketAddr>,
    /// They can be up to 30 s old (`/metrics`; `/v1/loads` tells the state of the moment).
    pub stale: bool,
    /// Why it could not be asked.
    pub error: Option<String>,
}

/// What an engine said of itself in answers of the same content, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineNumbers {
    /// What it is to the room.
    pub role: Role,
    /// The first of them.
    pub from: Mono,
    /// The last.
    pub to: Mono,
    /// How many.
    pub answers: u32,
    /// See [`EngineGauges::inflight`].
    pub inflight: Option<u64>,
    /// See [`EngineGauges::bootstrap`].
    pub bootstrap: Option<u64>,
    /// See [`EngineGauges::waiting`].
    pub waiting: Option<u64>,
    /// See [`EngineGauges::running`].
    pub running: Option<u64>,
    /// See [`EngineGauges::paused`].
    pub paused: Option<u64>,
    /// Whether [`EngineGauges::progress`] moved; `None`: not known.
    pub moves: Option<bool>,
    /// See [`EngineGauges::stale`].
    pub stale: bool,
}

impl EngineNumbers {
    /// In hand-over, before that, waiting, running, paused.
    pub const fn counts(&self) -> [Option<u64>; 5] {
        [self.inflight, self.bootstrap, self.waiting, self.running, self.paused]
    }
}

/// How much of a room's life was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Completeness {
    /// All connections concerned were followed from their beginning or joined before the room began.
    Full,
    /// The room was open before the agent looked.
    Preexisting,
    /// Some of the connections or ranks concerned cannot be read.
    Partial,
    /// Bytes were missed in a stretch that this room's messages can lie in.
    Lossy,
}

impl Completeness {
    /// JSON and attribute value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Preexisting => "preexisting",
            Self::Partial => "partial",
            Self::Lossy => "lossy",
        }
    }
}

/// How a room ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// Success on every view.
    Success,
    /// Failed on some view.
    Failed,
    /// No longer followed: it ended where nothing could be seen of it (label `unknown`, JSON null).
    Unknown,
}

impl Outcome {
    /// Label value of `roomtrace_rooms_closed_total{outcome}`.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}

/// One message on a room's time line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageMark {
    /// When.
    pub at: Mono,
    /// Role whose socket sent or received it.
    pub role: Role,
    /// Sent or received by that role.
    pub direction: Direction,
    /// What.
    pub kind: Kind,
    /// STATUS: the state.
    pub status: Option<KvPoll>,
    /// STATUS, ABORT_ACK: the prefill rank.
    pub rank: Option<u32>,
    /// The other end: the peer's rank endpoint where known, else the peer address of the connection.
    pub peer: SocketAddr,
    /// METADATA: pages.
    pub pages: Option<u64>,
    /// METADATA: dummy.
    pub dummy: Option<bool>,
    /// Sent messages: whether the peer's kernel has acknowledged its last byte, `None` not known.
    pub acknowledged: Option<bool>,
}

/// One rank of a view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankView {
    /// Rank number, where a message named it.
    pub rank: Option<u32>,
    /// Its endpoint (PULL socket).
    pub endpoint: Option<SocketAddr>,
    /// Its session (decode ranks).
    pub session: Option<Arc<str>>,
    /// Whether it only gets told and owes nothing.
    pub dummy: Option<bool>,
    /// Its KV poll state as far as the wire tells.
    pub state: KvPoll,
    /// Process, where known on this host.
    pub task: Option<Task>,
}

/// A room as one role on this host sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// Which role.
    pub role: Role,
    /// KV poll state as far as the wire tells; for several ranks the minimum, as the engine does.
    pub state: KvPoll,
    /// This role's ranks on this host.
    pub ranks: SmallVec<[RankView; 1]>,
    /// Sessions (prefill view: those whose METADATA came; decode view: those of its own ranks).
    pub sessions: SmallVec<[Arc<str>; 1]>,
    /// Prefill view: distinct sessions required; decode view: responses required. `None`: not known.
    pub required: Option<u32>,
    /// How many of them are there.
    pub got: u32,
    /// When the phase it is in began.
    pub phase_since: Mono,
    /// Phase it is in.
    pub phase: Phase,
    /// Ended?
    pub terminal: Option<Outcome>,
}

/// Phases of a view; label values of `roomtrace_room_phase_duration_seconds{phase}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// First sign of the room → METADATA complete.
    Bootstrap,
    /// METADATA complete → terminal status (queueing, computing and transfer: the wire cannot part them).
    Transfer,
    /// Some required statuses are there, others not.
    Conclude,
    /// ABORT → ABORT_ACK.
    Abort,
    /// Policy `prefill_complete`: BOOTSTRAP → STATUS 2.
    Compute,
    /// Over.
    Done,
}

impl Phase {
    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Bootstrap => "bootstrap",
            Self::Transfer => "transfer",
            Self::Conclude => "conclude",
            Self::Abort => "abort",
            Self::Compute => "compute",
            Self::Done => "done",
        }
    }
}

/// A time in which the agent did not run, between two that share what they know through a state file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Away {
    /// When the agent before had last written down what it knew.
    pub from: Mono,
    /// When this one went on.
    pub to: Mono,
}

/// A copy of everything known of one room at one moment: what is exported, shown and explained.
#[derive(Clone, Debug, PartialEq)]
pub struct RoomSnapshot {
    /// Room number.
    pub room: u64,
    /// How often the number had been used before, as far as this agent saw.
    pub incarnation: u32,
    /// Whose messages.
    pub backend: Option<Backend>,
    /// Engine releases its messages fit.
    pub releases: Option<Releases>,
    /// First sign of it.
    pub opened_at: Mono,
    /// When this snapshot was taken.
    pub at: Mono,
    /// When it ended.
    pub closed_at: Option<Mono>,
    /// How it ended.
    pub outcome: Option<Outcome>,
    /// How much was seen.
    pub completeness: Completeness,
    /// It was taken over from the state file of the agent before: when nobody looked.
    pub restored: Option<Away>,
    /// As prefill on this host sees it.
    pub prefill: Option<View>,
    /// As decode on this host sees it.
    pub decode: Option<View>,
    /// The request behind it, as far as it was seen at HTTP ports of this host.
    pub request: Option<RequestView>,
    /// What the engines' schedulers said of it by their spans, an entry per request; none: nothing came.
    pub scheduled: Vec<EngineRequest>,
    /// GPUs of the processes involved, over the time in which its KV cache can have moved; none: none is known.
    pub gpus: Vec<GpuWindow>,
    /// RDMA ports that its engines can use and connections of its ranks, over the same time; none: none is known.
    pub network: Vec<NetworkWindow>,
    /// What its processes on this host were seen to submit for it; none: nobody looked.
    pub batches: Vec<RoomBatches>,
    /// What the room's engines said in numbers while it was open, of each in order; the latest.
    pub numbers: Vec<EngineNumbers>,
    /// Its messages in order of arrival, bounded; `messages_dropped` more were not kept.
    pub messages: SmallVec<[MessageMark; 4]>,
    /// Messages not kept.
    pub messages_dropped: u32,
    /// What is judged of it; `None` while nothing is overdue.
    pub verdict: Option<Box<Verdict>>,
    /// It was pinned before and ended or moved on after all.
    pub recovered: bool,
    /// It is pinned or was before.
    pub was_pinned: bool,
    /// Rooms pinned for the same cause, itself included (1 without a verdict).
    pub group_size: u32,
}

impl RoomSnapshot {
    /// Whether its verdict pins it.
    pub fn pinned(&self) -> bool {
        self.closed_at.is_none() && self.verdict.as_ref().is_some_and(|v| v.class.pins())
    }
}

/// The request behind a room.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestView {
    /// Request id, where one was seen.
    pub rid: Option<Box<str>>,
    /// At prefill's HTTP port.
    pub prefill: Option<LegView>,
    /// At decode's HTTP port.
    pub decode: Option<LegView>,
    /// At the HTTP port of an engine whose role is not known.
    pub unplaced: Option<LegView>,
    /// The same of another engine.
    pub unplaced_too: Option<LegView>,
}

/// One engine's part of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LegView {
    /// When all of it had come: the engine has it from then on.
    pub begun: Mono,
    /// First byte of the answer's body.
    pub first_byte: Option<Mono>,
    /// When it was over, and how.
    pub ended: Option<(Mono, LegEnd)>,
    /// Status of the answer.
    pub status: Option<u16>,
    /// It has been lost sight of: no end does not mean that it is open.
    pub out_of_sight: bool,
}

/// How one engine's part of a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum LegEnd {
    /// Answered to the last byte, with a generation.
    Finished,
    /// Answered, with an abort.
    Aborted,
    /// Answered, with an error.
    Error,
    /// Answered, and nothing visible says with what.
    Answered,
    /// The client hung up.
    ClientHungUp,
    /// The engine hung up.
    EngineHungUp,
    /// The connection ended, and nothing tells who ended it.
    HungUp,
}

impl LegEnd {
    /// JSON value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Aborted => "aborted",
            Self::Error => "error",
            Self::Answered => "answered",
            Self::ClientHungUp => "client_hung_up",
            Self::EngineHungUp => "engine_hung_up",
            Self::HungUp => "hung_up",
        }
    }
}

/// A GPU of a room's rank, over the time in which the room's KV cache can have moved. All of it is of the whole device, and of every
/// room that was handed over then: there is no reading of one room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuWindow {
    /// Its name.
    pub gpu: Arc<str>,
    /// Which side of the room holds it.
    pub role: Role,
    /// The process that holds it.
    pub pid: u32,
    /// METADATA complete.
    pub from: Mono,
    /// How the side ended, or now.
    pub to: Mono,
    /// What moved, on each link that was read then; none: not measured.
    pub links: SmallVec<[Window; 2]>,
    /// How busy it was; `None`: not measured.
    pub computing: Option<Computing>,
    /// Rooms that were being handed over at the same engine at any time of it, this one among them; `None`: not known.
    pub overlapping: Option<u32>,
    /// What it suffered then.
    pub troubles: Vec<GpuTrouble>,
    /// Readings one by one, over the whole life of the room, at most [`MAX_SERIES`] a link with neighbours put together; only where
    /// someone asked for this room.
    pub series: Vec<Stretch>,
}

/// An RDMA port that a room's engine can use, or the connections of a room's rank, over the time in which the room's KV cache can have
/// moved: of the whole port or process, and of every room that was handed over then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkWindow {
    /// The port's name (`mlx5_0/1`), or `connections`.
    pub name: Arc<str>,
    /// Which of the two.
    pub link: Link,
    /// Which side of the room.
    pub role: Role,
    /// The rank's process, whose connections they are; `None`: a port.
    pub pid: Option<u32>,
    /// METADATA complete.
    pub from: Mono,
    /// How the side ended, or now.
    pub to: Mono,
    /// What moved; `None`: not measured.
    pub moved: Option<Window>,
    /// As of [`GpuWindow::overlapping`].
    pub overlapping: Option<u32>,
    /// Errors that the port counted then.
    pub faults: Vec<network::Faults>,
    /// As of [`GpuWindow::series`].
    pub series: Vec<Stretch>,
}

/// See [`GpuWindow::series`].
pub const MAX_SERIES: usize = 128;

/// What happened to a room that others must hear of. Cheap to copy: several outputs take the same picture.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A room is pinned.
    Pinned(Arc<RoomSnapshot>),
    /// The verdict of a room changed (class, confidence or debtor). To `unknown` it is pinned no longer: what
    /// the pin rested on has a hole.
    VerdictChanged(Arc<RoomSnapshot>),
    /// A pinned room has not ended, but nothing of it is overdue any more, or it is no pin after all.
    Recovered(Arc<RoomSnapshot>),
    /// A room ended (`recovered` says whether it was pinned before).
    Closed(Arc<RoomSnapshot>),
    /// The engines' spans of a room that had ended have come.
    Scheduled(Arc<RoomSnapshot>),
}

/// What happened to a finding that others must hear of.
#[derive(Clone, Debug, PartialEq)]
pub enum FindingEvent {
    /// Something is wrong with an engine, or several rooms share a cause.
    Opened(Arc<Finding>),
    /// It is over.
    Closed(Arc<Finding>),
}

impl FindingEvent {
    /// The finding.
    pub fn finding(&self) -> &Finding {
        match self {
            Self::Opened(f) | Self::Closed(f) => f,
        }
    }

    /// JSON value of `event`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Opened(_) => "finding_opened",
            Self::Closed(_) => "finding_closed",
        }
    }
}

impl Event {
    /// The room.
    pub fn snapshot(&self) -> &RoomSnapshot {
        match self {
            Self::Pinned(s)
            | Self::VerdictChanged(s)
            | Self::Recovered(s)
            | Self::Closed(s)
            | Self::Scheduled(s) => s,
        }
    }

    /// JSON value of `event`.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Scheduled(_) => "room_scheduled",
            Self::Pinned(_) => "room_pinned",
            Self::VerdictChanged(_) => "verdict_changed",
            Self::Recovered(_) => "room_recovered",
            Self::Closed(_) => "room_closed",
        }
    }
}
