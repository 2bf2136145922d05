//! What a verdict rests on: the facts of one room as one role's view has them, collected at one moment.
//!
//! Plain data. Collected by [`crate::rooms`], judged by [`crate::verdict::judge`], worded by
//! [`crate::verdict::explain`].

use std::net::SocketAddr;
use std::sync::Arc;

use crate::event::{Comm, Mono, SECOND};
use crate::rooms::model::{Away, Completeness, GpuWindow, LegView, NetworkWindow, Phase, Role};
use crate::rooms::peers::{Exit, ForeignMark};
use crate::sglang::message::{Backend, KvPoll, Releases};
use crate::verdict::model::Party;

/// Whether the ranks asked owe anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dummies {
    /// Some of them do.
    Some,
    /// All of them are dummies.
    All,
    /// It rests on ranks of which the layout cannot tell.
    Unknown,
}

/// An ABORT of this room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AbortFact {
    pub(crate) at: Mono,
    pub(crate) generation: bool,
    pub(crate) before_metadata: bool,
    pub(crate) acknowledged: Option<Mono>,
}

/// What became of a sent message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Sent {
    /// Not sent from this host, or nothing known.
    #[default]
    Unknown,
    /// The peer's kernel has it.
    Acknowledged(Mono),
    /// The peer's kernel had not acknowledged it when last looked, with when it was sent, when that was, and how often it was sent
    /// again.
    Waiting { sent: Mono, read: Mono, again: Option<AgainFact> },
    /// Its connection ended before the peer's kernel had it.
    Lost { sent: Mono, at: Mono, error: u32 },
}

impl Sent {
    /// Since when it is known that the peer's kernel will not have it by itself: it was sent again after the floor, and that was
    /// not acknowledged either; or nothing was for the ceiling. Retransmissions come ever more rarely, each after twice the time
    /// (RFC 6298, 5.5), so that one from before tells nothing of a network that has come back since.
    pub(crate) fn undeliverable(self, limits: &Limits) -> Option<Mono> {
        let Self::Waiting { sent, read, again } = self else { return None };
        let late = sent.plus(limits.floor);
        let tried = again.into_iter().flat_map(|a| a.last).filter(|at| *at >= late).map(|at| at.plus(ANSWER));
        tried.chain([sent.plus(limits.ceiling)]).filter(|at| read >= *at).min()
    }
}

/// A retransmission that arrives is acknowledged within this: the longest way around the world, and 200 ms for an acknowledgement
/// that is put off (`TCP_DELACK_MAX`, Linux, `include/net/tcp.h`).
const ANSWER: u64 = SECOND;

/// Retransmissions of a message that the peer's kernel does not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AgainFact {
    pub(crate) since: Mono,
    pub(crate) count: u32,
    /// The last one and the one before, not later than they were.
    pub(crate) last: [Mono; 2],
}

/// What the prefill rank did with other rooms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Others {
    /// Rooms of the same session, METADATA later, at least as many pages, concluded.
    pub(crate) overtaken: u32,
    /// The same over all sessions of the rank.
    pub(crate) overtaken_at_rank: u32,
    /// The same of those with at least as many pages.
    pub(crate) as_long_at_rank: u32,
    /// Of `overtaken`, those asked for after prefill's engine had said that nothing waits in it, this room among it.
    pub(crate) passed: u32,
    /// Last time a room of the same session with earlier METADATA concluded.
    pub(crate) drained: Option<Mono>,
    /// The same over all sessions of the rank.
    pub(crate) drained_at_rank: Option<Mono>,
    /// A later METADATA of the same session was answered.
    pub(crate) session_answers: bool,
    /// A later METADATA of any session was answered, or a later ABORT acknowledged.
    pub(crate) rank_answers: bool,
    /// METADATA of this session, and of the rank, after the last that was answered.
    pub(crate) silent_in_session: u32,
    pub(crate) silent_at_rank: u32,
    /// When the rank last answered anything.
    pub(crate) last_answer: Option<Mono>,
}

/// Ranks of prefill that have a say in a room and are not seen from this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Elsewhere {
    /// Ranks that must agree.
    pub(crate) ranks: u32,
    /// Those of this host.
    pub(crate) seen: u32,
    /// Endpoints of the others, as far as they are known.
    pub(crate) known: Vec<SocketAddr>,
    /// The one that is silent: named where there is only one.
    pub(crate) party: Party,
}

/// Something foreign on the rank's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ForeignFact {
    pub(crate) at: Mono,
    pub(crate) peer: SocketAddr,
    pub(crate) frames: u16,
    /// Bytes of its first frame.
    pub(crate) first_len: u32,
    /// It is an ABORT, which the rank's release does not bear (M4).
    pub(crate) abort: bool,
    /// Or may bear: which it is of several its messages do not tell, and the engine does not say it.
    pub(crate) unsure: bool,
}

impl ForeignFact {
    pub(crate) const fn of(m: &ForeignMark) -> Self {
        Self {
            at: m.at,
            peer: m.peer,
            frames: m.frames,
            first_len: m.first_len,
            abort: m.abort,
            unsure: m.unsure,
        }
    }
}

/// A thread that ended while its process lives, and that is missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ThreadFact {
    pub(crate) tgid: u32,
    pub(crate) tid: u32,
    pub(crate) name: Comm,
    pub(crate) at: Mono,
    /// As `wait` would have it.
    pub(crate) code: u32,
    pub(crate) was: Was,
    /// Names the cause.
    pub(crate) group: u64,
}

/// What a thread was, as far as what is missed tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Was {
    /// It ended right after something foreign had come to its rank: it was the one that reads.
    Reader(ForeignFact),
    /// The same of a decode rank: it took STATUS in.
    Status(ForeignFact),
    /// The rank still answers other sessions, or only acknowledges ABORTs, and not this session: its transfer worker.
    Worker {
        /// Other sessions were answered.
        answered: bool,
    },
    /// The rank answers nothing at all.
    Unknown {
        /// This room's METADATA had come before it ended.
        asked_before: bool,
    },
}

/// A rank that says nothing although all its threads are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StallFact {
    /// When its process last sent anything.
    pub(crate) spoke: Mono,
    /// Rooms that it owes.
    pub(crate) rooms: u32,
    /// To several sessions, or of several kinds.
    pub(crate) several: bool,
    /// ABORTs among it.
    pub(crate) aborts: bool,
}

/// Bytes that came to a rank of this host and that nobody reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct UnreadFact {
    pub(crate) bytes: u64,
    /// Sockets of its process that are not read.
    pub(crate) sockets: u32,
    pub(crate) since: Mono,
}

/// A peer that went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LostFact {
    pub(crate) at: Mono,
    /// Its listener closed on this host (its process is gone), not only its connections.
    pub(crate) listener: bool,
    /// Its process was seen to end.
    pub(crate) exit: Option<Exit>,
}

/// An engine that stands still on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stopped {
    pub(crate) role: Role,
    pub(crate) since: Mono,
    /// What stands it still.
    pub(crate) why: &'static str,
}

/// The request behind the room, and what its engines did with others. Pairs: prefill's, decode's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub(crate) struct RequestFacts {
    pub(crate) rid: Option<String>,
    pub(crate) prefill: Option<LegView>,
    pub(crate) decode: Option<LegView>,
    /// HTTP server of the engine, where it is known.
    pub(crate) servers: [Option<SocketAddr>; 2],
    /// Begun at the engine of this host, in sight and not over.
    pub(crate) open: [bool; 2],
    /// Known never to have come to the engine of this host.
    pub(crate) never_begun: [bool; 2],
    /// It has not come to the prefill engine of this host, the requests of which are seen: it may be on its way.
    pub(crate) not_come: bool,
    /// A second request with this room came while the first was open, and is open or was served.
    pub(crate) duplicate: Option<Mono>,
    /// Such a one came and was refused or given up, with its status.
    pub(crate) refused: Option<(Mono, (Mono, Option<u16>))>,
    /// Prefill's DP rank that registered for the room.
    pub(crate) dp_rank: Option<u32>,
    /// The frames say that the view is over, and its request is still open.
    pub(crate) held: bool,
    /// Requests that began later at the view's engine and have finished.
    pub(crate) later_finished: u32,
    /// Rooms whose request began later there and whose METADATA has come.
    pub(crate) later_asked: u32,
    /// A request that began earlier at prefill, of no pinned room, is still open.
    pub(crate) ahead: bool,
    /// An engine of the room stands still now.
    pub(crate) stopped: Option<Stopped>,
    /// How long the engines stood still since the phase began, nanoseconds.
    pub(crate) stood: u64,
    /// Requests that wait in the engine, as it says.
    pub(crate) waiting: [Option<u64>; 2],
    /// Requests that wait in prefill, at least one, as it says or has said within the last seconds. The count may be old: enough to
    /// hold a verdict back, never to raise one.
    pub(crate) said_to_wait: Option<u64>,
    /// None does, as it has said when the room's own had been there for the floor.
    pub(crate) none_waits: [bool; 2],
    /// Another room of the same request is not over at prefill.
    pub(crate) siblings: bool,
    /// The request may have more rooms than were seen.
    pub(crate) maybe_more: bool,
}

impl RequestFacts {
    /// The leg at this engine.
    pub(crate) const fn leg(&self, role: Role) -> Option<&LegView> {
        match role {
            Role::Prefill => self.prefill.as_ref(),
            Role::Decode => self.decode.as_ref(),
        }
    }

    /// Whether the leg at this engine of this host is open.
    pub(crate) const fn is_open(&self, role: Role) -> bool {
        let [prefill, decode] = self.open;
        match role {
            Role::Prefill => prefill,
            Role::Decode => decode,
        }
    }

    /// Whether this engine of this host is known never to have got the request.
    pub(crate) const fn never(&self, role: Role) -> bool {
        let [prefill, decode] = self.never_begun;
        match role {
            Role::Prefill => prefill,
            Role::Decode => decode,
        }
    }
}

/// What prefill's scheduler says by its spans, of the room's last request there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SpanFacts {
    /// End of `prefill_forward`, of the last rank that said so, where a scheduler still holds the request.
    pub(crate) computed: Option<Mono>,
    /// End of `prefill_transfer_kv_cache`.
    pub(crate) transferred: Option<Mono>,
}

/// What the GPUs of a room's engines say, each of them as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GpuFacts {
    /// All of prefill's: a time in which none of them did anything, since the phase began and until now.
    pub(crate) silent: Option<SilentFact>,
    /// Prefill has said, the room being there for the floor, that nothing waits in it.
    pub(crate) clear: bool,
    /// When any of prefill's was last seen computing.
    pub(crate) works: Option<Mono>,
    /// Readings over the room's window, for the words; not for judging.
    pub(crate) windows: Vec<GpuWindow>,
}

/// See [`GpuFacts::silent`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SilentFact {
    pub(crate) from: Mono,
    pub(crate) to: Mono,
    /// How much of that was read, nanoseconds; less where the agent was started again in between.
    pub(crate) read: u64,
    /// GPUs.
    pub(crate) gpus: u32,
}

/// Bytes that leave prefill's side and that no other room of its engine explains.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MovingFact {
    /// Of what: a GPU, an RDMA port, the TCP connections of a process.
    pub(crate) by: Mover,
    /// More out than in, bytes a second over the time that was read.
    pub(crate) rate: u64,
    pub(crate) from: Mono,
    pub(crate) to: Mono,
    /// Other rooms in hand-over there, every one of which is overdue as well; `None`: not known, because it was not read for so long.
    pub(crate) others: Option<u32>,
}

/// See [`MovingFact`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mover {
    /// By its name.
    Gpu(Arc<str>),
    /// By its name.
    Port(Arc<str>),
    /// Connections of this process.
    Process(u32),
}

/// Timers and limits that the judge needs, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) floor: u64,
    pub(crate) ceiling: u64,
    pub(crate) bootstrap_timeout: u64,
    pub(crate) waiting_timeout: u64,
}

/// Everything.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub(crate) struct Facts {
    pub(crate) room: u64,
    pub(crate) now: Mono,
    pub(crate) opened_at: Mono,
    pub(crate) role: Role,
    pub(crate) has_prefill: bool,
    pub(crate) has_decode: bool,
    pub(crate) limits: Limits,
    pub(crate) phase: Phase,
    pub(crate) since: Mono,
    pub(crate) threshold: u64,
    pub(crate) samples: u32,
    pub(crate) backend: Option<Backend>,
    pub(crate) releases: Option<Releases>,
    pub(crate) completeness: Completeness,
    /// It was taken over from the agent before.
    pub(crate) restored: Option<Away>,
    pub(crate) dummies: Dummies,
    /// Success of this rank is to be seen on the wire.
    pub(crate) observable: bool,
    pub(crate) got: u32,
    pub(crate) required: Option<u32>,
    pub(crate) metadata_at: Option<Mono>,
    pub(crate) pages: u64,
    pub(crate) bootstrap_at: Option<Mono>,
    pub(crate) computed_at: Option<Mono>,
    pub(crate) abort: Option<AbortFact>,
    pub(crate) duplicate: Option<Mono>,
    pub(crate) failed_inside: Option<Mono>,
    pub(crate) staging_wait: Option<Mono>,
    /// The prefill rank and the decode rank that it is about.
    pub(crate) prefill: Party,
    pub(crate) decode: Party,
    /// Decode's session.
    pub(crate) session: String,
    /// Decode ranks that registered at this prefill rank and have not sent METADATA.
    pub(crate) missing: Vec<Party>,
    /// Prefill ranks (or decode endpoints) that were told and that were not.
    pub(crate) told: Vec<(Party, KvPoll)>,
    pub(crate) untold: Vec<Party>,
    /// Where prefill holds the request on although all its ranks here have told: ranks of it elsewhere.
    pub(crate) elsewhere: Option<Elsewhere>,
    /// Endpoints of these ranks, where it cannot be told which is which.
    pub(crate) ambiguous: Vec<SocketAddr>,
    pub(crate) others: Others,
    pub(crate) foreign: Option<ForeignFact>,
    pub(crate) metadata_sent: Sent,
    pub(crate) status_sent: Sent,
    pub(crate) abort_sent: Sent,
    /// A thread of the prefill rank, on this host, whose end may be why it is silent.
    pub(crate) thread: Option<ThreadFact>,
    /// Requests that wait in decode for their KV, as its engine has said since a STATUS came that nobody takes in.
    pub(crate) in_transfer: Option<u64>,
    pub(crate) stall: Option<StallFact>,
    pub(crate) unread_prefill: Option<UnreadFact>,
    pub(crate) unread_decode: Option<UnreadFact>,
    /// Prefill has answered its request, so it is done with the room, and a STATUS cannot have left: no connection to decode stood.
    pub(crate) unsent: bool,
    /// A connect to decode's endpoint failed and none has succeeded since.
    pub(crate) refused: Option<(Mono, u32)>,
    /// Since when a connect of prefill to it is under way that nobody answers.
    pub(crate) connecting: Option<Mono>,
    /// When the last connection to it ended, if none was open or tried since.
    pub(crate) cut: Option<Mono>,
    /// A connection to decode's endpoint was ever open.
    pub(crate) decode_reached: bool,
    pub(crate) prefill_lost: Option<LostFact>,
    pub(crate) decode_lost: Option<LostFact>,
    /// Since when it is pinned, if it is.
    pub(crate) pinned_since: Option<Mono>,
    /// The request behind it.
    pub(crate) request: RequestFacts,
    /// Prefill's own numbers: nothing computes although something is in flight (`Some(true)`), or it does.
    pub(crate) engine_idle: Option<bool>,
    /// By the same it may be computing, also where a long forward pass hides it.
    pub(crate) may_compute: bool,
    /// When prefill's scheduler last wrote its numbers, where its server still answers with those.
    pub(crate) wrote: Option<Mono>,
    /// The same of decode's.
    pub(crate) decode_wrote: Option<Mono>,
    /// A call that stood decode still can have passed unseen since then.
    pub(crate) decode_may_be_paused: bool,
    /// Prefill's scheduler, by its spans.
    pub(crate) spans: SpanFacts,
    /// GPUs.
    pub(crate) gpu: GpuFacts,
    /// Bytes leave prefill now that no other room of its engine explains.
    pub(crate) moving: Option<MovingFact>,
    /// Ports and connections over the room's window, for the words; not for judging.
    pub(crate) network: Vec<NetworkWindow>,
}

impl Facts {
    /// How long the phase has lasted, times not counted in which an engine stood still.
    pub(crate) fn running(&self) -> u64 {
        self.now.since(self.since).saturating_sub(self.request.stood)
    }

    /// Whether the phase has lasted longer than its threshold.
    pub(crate) fn overdue(&self) -> bool {
        self.running() >= self.threshold
    }
}
