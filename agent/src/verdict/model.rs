//! What a verdict is. The names are fixed: dashboards and alerts use them.

use std::net::SocketAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::event::{Mono, Task};
use crate::rooms::model::{Place, Role};
use crate::sglang::message::{Backend, Kind, Releases};

/// Class of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "described in docs/verdicts.md, one section each")]
pub enum Class {
    AbortBeforeEntry,
    MetadataIncomplete,
    AwaitingPrefill,
    TransferNotConcluded,
    TransferWorkerSilent,
    ReceiverSilent,
    PeerLost,
    StatusLost,
    StaleEndpoint,
    RanksDisagree,
    DuplicateRoom,
    /// Named only as a candidate until their evidence is collected.
    AbortIgnored,
    MetadataMissing,
    PeerNotTold,
    EngineStalled,
    ConcludedButHeld,
    StagingReplyMissing,
    /// Without a room: a request in the engine's inflight queue that no room explains (M39, M42).
    LocalGhost,
    /// Not pins.
    Queued,
    Paused,
    CompletionNotObservable,
    NotApplicable,
    Unknown,
    /// Findings of an engine, never of a room.
    AbortUnanswered,
    SessionBlacklisted,
    GaugeUnexplained,
    ThreadDied,
    EnginePaused,
    NothingReadable,
    RankNotRegistered,
    QueryUnanswered,
}

impl Class {
    /// Every class.
    pub const ALL: [Self; 31] = [
        Self::AbortBeforeEntry,
        Self::MetadataIncomplete,
        Self::AwaitingPrefill,
        Self::TransferNotConcluded,
        Self::TransferWorkerSilent,
        Self::ReceiverSilent,
        Self::PeerLost,
        Self::StatusLost,
        Self::StaleEndpoint,
        Self::RanksDisagree,
        Self::DuplicateRoom,
        Self::AbortIgnored,
        Self::MetadataMissing,
        Self::PeerNotTold,
        Self::EngineStalled,
        Self::ConcludedButHeld,
        Self::StagingReplyMissing,
        Self::LocalGhost,
        Self::Queued,
        Self::Paused,
        Self::CompletionNotObservable,
        Self::NotApplicable,
        Self::Unknown,
        Self::AbortUnanswered,
        Self::SessionBlacklisted,
        Self::GaugeUnexplained,
        Self::ThreadDied,
        Self::EnginePaused,
        Self::NothingReadable,
        Self::RankNotRegistered,
        Self::QueryUnanswered,
    ];

    /// JSON, label and `error.type` value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::AbortBeforeEntry => "abort_before_entry",
            Self::MetadataIncomplete => "metadata_incomplete",
            Self::AwaitingPrefill => "awaiting_prefill",
            Self::TransferNotConcluded => "transfer_not_concluded",
            Self::TransferWorkerSilent => "transfer_worker_silent",
            Self::ReceiverSilent => "receiver_silent",
            Self::PeerLost => "peer_lost",
            Self::StatusLost => "status_lost",
            Self::StaleEndpoint => "stale_endpoint",
            Self::RanksDisagree => "ranks_disagree",
            Self::DuplicateRoom => "duplicate_room",
            Self::AbortIgnored => "abort_ignored",
            Self::MetadataMissing => "metadata_missing",
            Self::PeerNotTold => "peer_not_told",
            Self::EngineStalled => "engine_stalled",
            Self::ConcludedButHeld => "concluded_but_held",
            Self::StagingReplyMissing => "staging_reply_missing",
            Self::LocalGhost => "local_ghost",
            Self::Queued => "queued",
            Self::Paused => "paused",
            Self::CompletionNotObservable => "completion_not_observable",
            Self::NotApplicable => "not_applicable",
            Self::Unknown => "unknown",
            Self::AbortUnanswered => "abort_unanswered",
            Self::SessionBlacklisted => "session_blacklisted",
            Self::GaugeUnexplained => "gauge_unexplained",
            Self::ThreadDied => "thread_died",
            Self::EnginePaused => "engine_paused",
            Self::NothingReadable => "nothing_readable",
            Self::RankNotRegistered => "rank_not_registered",
            Self::QueryUnanswered => "query_unanswered",
        }
    }

    /// Whether a room with this class counts as pinned.
    pub const fn pins(self) -> bool {
        !matches!(
            self,
            Self::Queued
                | Self::Paused
                | Self::CompletionNotObservable
                | Self::NotApplicable
                | Self::Unknown
                | Self::LocalGhost
                | Self::AbortUnanswered
                | Self::SessionBlacklisted
                | Self::GaugeUnexplained
                | Self::ThreadDied
                | Self::EnginePaused
                | Self::NothingReadable
                | Self::RankNotRegistered
                | Self::QueryUnanswered
        )
    }
}

impl Class {
    /// Whether a finding can have this class: what pins rooms, and what is wrong with an engine.
    pub const fn finds(self) -> bool {
        !matches!(
            self,
            Self::Queued | Self::Paused | Self::CompletionNotObservable | Self::NotApplicable | Self::Unknown
        )
    }
}

/// How sure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Confidence {
    /// Silence alone: shown and counted, never paged.
    Possible,
    /// The next move is owed and a second source excludes queueing, computing, pausing.
    Likely,
    /// A fact excludes every other reading.
    Certain,
}

impl Confidence {
    /// Every one, least first.
    pub const ALL: [Self; 3] = [Self::Possible, Self::Likely, Self::Certain];

    /// JSON and label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Possible => "possible",
            Self::Likely => "likely",
            Self::Certain => "certain",
        }
    }
}

/// Someone who owes a move, or on whom to act.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Party {
    /// Role; `None` when it is neither engine (a router, a client).
    pub role: Option<Role>,
    /// Rank, where known.
    pub rank: Option<u32>,
    /// Rank endpoint, where known.
    pub endpoint: Option<SocketAddr>,
    /// Its process on this host, where seen.
    pub task: Option<Task>,
    /// Whether it runs on this host; `None` not known.
    pub local: Option<bool>,
    /// That process was seen to end.
    pub ended: bool,
    /// HTTP server of its engine, where one was seen.
    pub http: Option<SocketAddr>,
    /// Container and pod that its process runs in, where the host's process table tells.
    pub place: Option<Arc<Place>>,
    /// Ranks that the title of its process names ("DP1 TP3").
    pub rank_names: Option<Arc<str>>,
    /// Its transfer back end, where a finding is about it and its messages have shown it.
    pub backend: Option<Backend>,
    /// Its release, the same way: as it says itself, else what its messages leave.
    pub releases: Option<Releases>,
}

/// Another reading of the same evidence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Class.
    pub class: Class,
    /// Pin modes, as in docs/verdicts.md ("M20").
    pub modes: &'static [&'static str],
    /// Who would owe the next move.
    pub owed_by: Option<Role>,
    /// What would settle it.
    pub would_settle: &'static str,
}

/// An engine timer that ends the room without help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndsByItself {
    /// Which timer, with its default ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, 300 s by default").
    pub timer: &'static str,
    /// When, if the engine runs with the default.
    pub at: Mono,
}

/// Something to do, as a command that works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Action {
    /// Command line.
    pub command: String,
    /// What it does.
    pub effect: String,
    /// Whom else it hurts.
    pub blast_radius: String,
    /// Whether it clears this pin.
    pub clears: bool,
}

/// What is judged of a room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Class.
    pub class: Class,
    /// How sure.
    pub confidence: Confidence,
    /// Who owes the next move; `None`: nobody.
    pub owed_by: Option<Party>,
    /// On whom to act.
    pub act_on: Option<Party>,
    /// The message or move that is owed.
    pub expected: Option<Kind>,
    /// Other readings.
    pub candidates: Vec<Candidate>,
    /// Timer that will end it, `None`: never ends by itself.
    pub ends_by_itself: Option<EndsByItself>,
    /// Facts it rests on, one sentence each.
    pub evidence: Vec<String>,
    /// What to do.
    pub actions: Vec<Action>,
    /// Names the cause: rooms with the same group share it.
    pub group: u64,
    /// Since when it holds.
    pub since: Mono,
}

/// Something wrong with an engine, or the common cause of several pinned rooms: one dead worker is one finding with as
/// many rooms as it pins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Names the cause; that of a pinned room's verdict where it has rooms. The same on every run and after a restart.
    pub group: u64,
    /// Class.
    pub class: Class,
    /// How sure.
    pub confidence: Confidence,
    /// The engine, or the rank, that it is about.
    pub engine: Party,
    /// Rooms that hang on it, oldest first, at most 100.
    pub rooms: Vec<u64>,
    /// How many there are.
    pub room_count: u32,
    /// Since when.
    pub since: Mono,
    /// When it ended.
    pub closed_at: Option<Mono>,
    /// Facts it rests on, one sentence each.
    pub evidence: Vec<String>,
    /// What to do.
    pub actions: Vec<Action>,
}

/// Known upstream reports are matched by class, backend and release (`verdict/known_issues.json`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownIssue {
    /// Link.
    pub url: String,
    /// First release without it.
    pub fixed_in: Option<String>,
    /// Whether it applies: `yes`, `no` or `unknown`.
    pub applies: &'static str,
}
