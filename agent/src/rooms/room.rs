//! One room: its links, its time line, and what each role's view of it amounts to.
//!
//! Pure data and arithmetic on it. A room holds numbers instead of names ([`crate::rooms::peers`]) and at most
//! [`MAX_LINKS`] links and [`MAX_MARKS`] marks. What can be serialised here is part of the state file's format
//! ([`crate::rooms::saved`]).

use serde::{Deserialize, Serialize};

use crate::event::{Direction, Mono, SocketId};
use crate::rooms::gpus::Move;
use crate::rooms::model::{Completeness, Outcome, Phase, Role, RoomBatches};
use crate::rooms::peers::{EndpointId, NONE, PairId, SessionId};
use crate::rooms::requests::legs::RoomRequest;
use crate::rooms::spans::Scheduled;
use crate::sglang::message::{Backend, Kind, KvPoll, Releases};
use crate::verdict::judge::Judgement;
use crate::verdict::model::{Class, Confidence};

/// Links of one room: prefill ranks × sessions seen on one host (16 of each side at tensor parallelism 16).
pub(crate) const MAX_LINKS: usize = 64;

/// Marks kept of one room: the first half for how it began, the last for what it hangs on.
pub(crate) const MAX_MARKS: usize = 12;

/// One message on the time line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    pub(crate) at: Mono,
    /// Unwrapped sequence number behind it (sent messages).
    pub(crate) end: u64,
    pub(crate) peer: EndpointId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rank: Option<u32>,
    pub(crate) pages: u32,
    pub(crate) kind: Kind,
    pub(crate) role: Role,
    pub(crate) direction: Direction,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) status: Option<KvPoll>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) dummy: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) acknowledged: Option<bool>,
}

/// What is known of one terminal STATUS, at one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Told {
    pub(crate) at: Mono,
    pub(crate) status: KvPoll,
}

/// Delivery of a sent message, as the sender's kernel knows it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Delivery {
    /// Nothing is known (or nothing was sent from this host).
    #[default]
    Unknown,
    /// The peer's kernel has it.
    Acknowledged,
    /// Its connection ended with an error, or for good, and the peer's kernel never had it.
    Lost {
        /// When.
        at: Mono,
        /// Errno, 0 when the connection was closed in order.
        error: u32,
    },
}

impl Delivery {
    #[allow(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
    const fn is_unknown(&self) -> bool {
        matches!(self, Self::Unknown)
    }
}

/// One prefill rank and one decode rank of a room: made by METADATA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Link {
    pub(crate) prefill: EndpointId,
    pub(crate) decode: EndpointId,
    pub(crate) session: SessionId,
    pub(crate) pair: PairId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) aux: Option<u32>,
    pub(crate) pages: u32,
    pub(crate) required: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) dummy: Option<bool>,
    /// Which prefill rank said so in STATUS.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rank: Option<u32>,
    /// The STATUS may have been another link's: nothing told the prefill ranks apart.
    pub(crate) guessed: bool,
    /// METADATA sent by a decode rank of this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sent: Option<Mono>,
    /// METADATA received by a prefill rank of this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) received: Option<Mono>,
    /// Terminal STATUS sent by a prefill rank of this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) told: Option<Told>,
    /// Terminal STATUS received by a decode rank of this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) heard: Option<Told>,
    /// The thread of this decode rank that takes STATUS in was dead when it came: it waits on (see `rooms::deaf`).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) deaf: bool,
    /// Prefill has answered its request, so it is done with the room, and no STATUS was seen to leave while no connection to this
    /// decode rank stood.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) unsent: bool,
    #[serde(default, skip_serializing_if = "Delivery::is_unknown")]
    pub(crate) metadata_delivery: Delivery,
    #[serde(default, skip_serializing_if = "Delivery::is_unknown")]
    pub(crate) status_delivery: Delivery,
    /// Sockets that METADATA and STATUS were sent on, on this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) metadata_on: Option<SocketId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) status_on: Option<SocketId>,
    /// A second METADATA with another slot came while this one lived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) duplicate: Option<Mono>,
    /// Numbers of the question at the rank and at the pair ([`crate::rooms::peers::Answers`]).
    pub(crate) numbers: (u32, u32),
}

impl Link {
    /// Whether this prefill rank owes anything.
    pub(crate) const fn owes(&self) -> bool {
        !matches!(self.dummy, Some(true))
    }

    /// Whether its STATUS has not left prefill, which is done with the room.
    pub(crate) const fn is_unsent(&self) -> bool {
        self.unsent && self.told.is_none() && self.heard.is_none()
    }

    /// When the METADATA was first seen.
    pub(crate) fn asked_at(&self) -> Mono {
        match (self.sent, self.received) {
            (Some(a), Some(b)) => a.min(b),
            (a, b) => a.or(b).unwrap_or_default(),
        }
    }
}

/// An ABORT of a room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools, reason = "four independent facts")]
pub(crate) struct Abort {
    pub(crate) at: Mono,
    /// With a generation (decode holds pages until the acknowledgement).
    pub(crate) generation: bool,
    /// METADATA had not been seen before it.
    pub(crate) before_metadata: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) acknowledged: Option<Mono>,
    /// Sent by a decode rank of this host.
    pub(crate) sent: bool,
    /// Received by a prefill rank of this host.
    pub(crate) received: bool,
    /// Socket that it was last sent on, on this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) on: Option<SocketId>,
    #[serde(default, skip_serializing_if = "Delivery::is_unknown")]
    pub(crate) delivery: Delivery,
}

/// One room in one life.
#[derive(Clone, Debug)]
#[allow(
    clippy::struct_excessive_bools,
    clippy::struct_field_names,
    reason = "independent facts; the engine's own word"
)]
pub(crate) struct Room {
    pub(crate) room: u64,
    pub(crate) incarnation: u32,
    pub(crate) generation: u32,
    pub(crate) backend: Option<Backend>,
    pub(crate) releases: Option<Releases>,
    pub(crate) completeness: Completeness,
    pub(crate) opened_at: Mono,
    pub(crate) closed: Option<(Mono, Outcome)>,
    /// Ranks of the first message.
    pub(crate) home: (EndpointId, EndpointId),
    pub(crate) has_prefill: bool,
    pub(crate) has_decode: bool,
    /// Other ranks may have asked before the agent looked.
    pub(crate) maybe_older: bool,
    /// It is in the queue of rooms that may be given up early.
    pub(crate) expendable: bool,
    pub(crate) links: Vec<Link>,
    pub(crate) bootstrap_at: Option<Mono>,
    /// STATUS 2 under `prefill_complete`.
    pub(crate) computed_at: Option<Mono>,
    pub(crate) abort: Option<Abort>,
    /// The prefill process, or the decode process, of this host is gone.
    pub(crate) prefill_gone: bool,
    pub(crate) decode_gone: bool,
    /// A pipeline rank said Failed inside the prefill instance.
    pub(crate) failed_inside: Option<Mono>,
    /// `STAGING_REQ` without `STAGING_RSP`.
    pub(crate) staging_wait: Option<Mono>,
    /// The request behind it, where one was seen at an HTTP port of this host.
    pub(crate) request: Option<Box<RoomRequest>>,
    /// What the engines' schedulers said of it.
    pub(crate) scheduled: Option<Box<Scheduled>>,
    /// When its KV cache can have moved, at prefill and at decode of this host, where GPUs are read.
    pub(crate) moves: [Move; 2],
    /// What its prefill processes submit for it, where that is probed.
    #[allow(clippy::box_collection, reason = "one word in a room, for what is mostly off")]
    pub(crate) batches: Option<Box<Vec<RoomBatches>>>,
    /// At most [`MAX_MARKS`].
    pub(crate) marks: Vec<Mark>,
    pub(crate) marks_dropped: u32,
    pub(crate) judgement: Option<Box<Judgement>>,
    pub(crate) was_pinned: bool,
    /// Phase and its beginning as last seen, per role: what the duration counters are fed from.
    pub(crate) phases: [(Phase, Mono); 2],
    /// State as last counted, per role; `None`: the view is over, or not counted yet.
    pub(crate) counted: [Option<KvPoll>; 2],
    /// Neighbours in the order of opening.
    pub(crate) previous: u32,
    pub(crate) next: u32,
}

/// What one role's view amounts to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) phase: Phase,
    pub(crate) since: Mono,
    pub(crate) state: KvPoll,
    pub(crate) got: u32,
    pub(crate) required: Option<u32>,
    pub(crate) terminal: Option<Outcome>,
}

impl Room {
    pub(crate) fn new(room: u64, incarnation: u32, at: Mono, home: (EndpointId, EndpointId)) -> Self {
        Self {
            room,
            incarnation,
            generation: 0,
            backend: None,
            releases: None,
            completeness: Completeness::Full,
            opened_at: at,
            closed: None,
            home,
            has_prefill: false,
            has_decode: false,
            maybe_older: false,
            expendable: false,
            links: Vec::new(),
            bootstrap_at: None,
            computed_at: None,
            abort: None,
            prefill_gone: false,
            decode_gone: false,
            failed_inside: None,
            staging_wait: None,
            request: None,
            scheduled: None,
            moves: [Move::default(); 2],
            batches: None,
            marks: Vec::new(),
            marks_dropped: 0,
            judgement: None,
            was_pinned: false,
            phases: [(Phase::Bootstrap, at); 2],
            counted: [None; 2],
            previous: NONE,
            next: NONE,
        }
    }

    /// Makes this the memory of a new room.
    pub(crate) fn begin(&mut self, room: u64, incarnation: u32, at: Mono, home: (EndpointId, EndpointId)) {
        let (mut links, mut marks) = (std::mem::take(&mut self.links), std::mem::take(&mut self.marks));
        links.clear();
        marks.clear();
        *self = Self { links, marks, ..Self::new(room, incarnation, at, home) };
    }

    pub(crate) const fn has(&self, role: Role) -> bool {
        match role {
            Role::Prefill => self.has_prefill,
            Role::Decode => self.has_decode,
        }
    }

    pub(crate) fn pinned(&self) -> bool {
        self.closed.is_none() && self.judgement.as_ref().is_some_and(|j| j.class.pins())
    }

    /// What it is pinned for, also while it is being closed.
    pub(crate) fn cause(&self) -> Option<(u64, Class, Confidence)> {
        self.judgement.as_deref().and_then(Judgement::cause)
    }

    /// Adds a mark; from the middle of the time line one is dropped when it is full. Returns whether so.
    pub(crate) fn mark(&mut self, mark: Mark) -> bool {
        let full = self.marks.len() >= MAX_MARKS;
        if full {
            self.marks.remove(MAX_MARKS / 2);
            self.marks_dropped = self.marks_dropped.saturating_add(1);
        }
        self.marks.push(mark);
        if mark.kind == Kind::Metadata {
            // Its answer finds a place without any allocation.
            self.marks.reserve_exact(self.marks.len().min(MAX_MARKS - self.marks.len()));
        }
        full
    }

    /// Whether every prefill rank that was asked here has the METADATA of every session that it waits for.
    pub(crate) fn complete(&self) -> bool {
        let mut received = self.links.iter().filter(|l| l.received.is_some());
        if self.links.len() == 1 {
            return received.all(|l| l.required <= 1);
        }
        if self.is_one_link_each() {
            return received.all(|l| self.contents(1, l.required));
        }
        received.all(|l| self.enough(l.prefill))
    }

    /// Whether every link is of a prefill rank of its own, as it mostly is. Compares ranks by 64 bits, so that some that
    /// are different are taken for one.
    fn is_one_link_each(&self) -> bool {
        let mut met = 0u64;
        self.links.iter().all(|l| {
            let bit = 1 << (l.prefill % u64::BITS);
            let is_new = met & bit == 0;
            met |= bit;
            is_new
        })
    }

    /// Whether this prefill rank has the METADATA of as many sessions as it waits for.
    pub(crate) fn enough(&self, prefill: EndpointId) -> bool {
        self.contents(self.sessions_at(prefill), self.required_at(prefill))
    }

    /// Whether METADATA of `got` sessions is enough for a rank that waits for `required`. Mori is content with more
    /// (`_handle_transfer_message`, `mori/conn.py`); to the others more is as bad as fewer.
    fn contents(&self, got: u32, required: u32) -> bool {
        got == required || (got > required && self.backend == Some(Backend::Mori))
    }

    /// Distinct sessions whose METADATA came to this prefill rank.
    pub(crate) fn sessions_at(&self, prefill: EndpointId) -> u32 {
        let n = self.links.iter().filter(|l| l.prefill == prefill && l.received.is_some()).count();
        u32::try_from(n).unwrap_or(u32::MAX)
    }

    /// When the last METADATA was sent of all that prefill waits for, some of it not read: it is prefill's to read then.
    pub(crate) fn unread_metadata(&self) -> Option<Mono> {
        let unread = |l: &&Link| l.sent.is_some() && l.received.is_none() && l.told.is_none();
        let lost = self.links.iter().any(|l| matches!(l.metadata_delivery, Delivery::Lost { .. }));
        let asked = |prefill| self.links.iter().filter(|l| l.prefill == prefill).count();
        let enough = |l: &Link| {
            self.contents(u32::try_from(asked(l.prefill)).unwrap_or(u32::MAX), self.required_at(l.prefill))
        };
        self.links.iter().find(unread).filter(|_| !lost && self.links.iter().all(enough))?;
        self.links.iter().map(Link::asked_at).max()
    }

    /// Distinct sessions that this prefill rank waits for.
    pub(crate) fn required_at(&self, prefill: EndpointId) -> u32 {
        self.links.iter().filter(|l| l.prefill == prefill).map(|l| l.required).max().unwrap_or(1)
    }

    /// What the views of prefill and of decode amount to, where there are any.
    pub(crate) fn views(&self) -> [Option<Progress>; 2] {
        [self.has_prefill.then(|| self.prefill_progress()), self.has_decode.then(|| self.decode_progress())]
    }

    /// What `role`'s view amounts to.
    pub(crate) fn progress(&self, role: Role) -> Progress {
        match role {
            Role::Prefill => self.prefill_progress(),
            Role::Decode => self.decode_progress(),
        }
    }

    /// Whether decode on this host has heard Success of every rank that owes it.
    pub(crate) fn all_heard(&self) -> bool {
        let mut owed = self.links.iter().filter(|l| l.sent.is_some() && l.owes()).peekable();
        owed.peek().is_some() && owed.all(|l| !l.deaf && l.heard.is_some_and(|h| h.status == KvPoll::Success))
    }

    /// How many decode ranks of this host have heard Success of every rank that owes it, if all have; else 0.
    pub(crate) fn heard_by(&self) -> u16 {
        if !self.all_heard() {
            return 0;
        }
        let owed = |l: &&Link| l.sent.is_some() && l.owes();
        let first = |(n, l): &(usize, &Link)| {
            !self.links.iter().take(*n).filter(owed).any(|before| before.session == l.session)
        };
        let ranks = self.links.iter().enumerate().filter(|(_, l)| owed(l)).filter(first).count();
        u16::try_from(ranks).unwrap_or(u16::MAX)
    }

    fn prefill_progress(&self) -> Progress {
        let (mut got, mut owed, mut told, mut lost, mut mute) = (0, 0u32, 0u32, false, false);
        let (mut last_asked, mut first_told, mut last_told) = (self.opened_at, None, self.opened_at);
        let (mut required, mut failed) = (None, None);
        for l in &self.links {
            if let Some(at) = l.received {
                got += 1;
                last_asked = last_asked.max(at);
                required = required.max(Some(l.required));
            }
            if l.received.is_none() && l.told.is_none() {
                continue;
            }
            owed += u32::from(l.owes());
            mute |= l.told.is_none();
            // Of mori's dummies some say how it went (see `match_status`), and one that failed fails the room.
            if let Some(t) = l.told {
                told += u32::from(l.owes());
                first_told = Some(first_told.map_or(t.at, |f: Mono| f.min(t.at)));
                last_told = last_told.max(t.at);
                if t.status == KvPoll::Failed {
                    failed = Some(t.at);
                }
                // A decode that is gone misses nothing.
                lost |= !self.decode_gone
                    && l.heard.is_none()
                    && matches!(l.status_delivery, Delivery::Lost { .. });
            }
        }
        let complete = got > 0 && self.complete();
        let p = |phase, since, state, terminal| Progress { phase, since, state, got, required, terminal };
        let aborted = self.abort.filter(|a| a.received);
        if let Some(at) = failed.or(self.failed_inside) {
            return p(Phase::Done, at, KvPoll::Failed, Some(Outcome::Failed));
        }
        let all_told = if owed > 0 { told == owed } else { first_told.is_some() && !mute };
        if all_told && (complete || got == 0) {
            let terminal = (!lost).then_some(Outcome::Success);
            let phase = if lost { Phase::Conclude } else { Phase::Done };
            return p(phase, last_told, KvPoll::Success, terminal);
        }
        if let Some((at, outcome)) = self.prefill_answered() {
            if outcome == Outcome::Success && self.waits_for_what_is_unsent() {
                return match aborted {
                    Some(a) => p(Phase::Done, a.at, KvPoll::Failed, Some(Outcome::Failed)),
                    None if self.prefill_gone => p(Phase::Done, at, KvPoll::Failed, Some(Outcome::Unknown)),
                    None => p(Phase::Conclude, at, KvPoll::Success, None),
                };
            }
            return p(Phase::Done, at, ended_as(outcome), Some(outcome));
        }
        let state = if complete { KvPoll::WaitingForInput } else { KvPoll::Bootstrapping };
        if self.prefill_gone {
            return p(Phase::Done, last_asked, state, Some(Outcome::Unknown));
        }
        if let Some(a) = aborted {
            return match a.acknowledged {
                Some(at) if got > 0 && !self.links.is_empty() && !a.before_metadata => {
                    p(Phase::Done, at, KvPoll::Failed, Some(Outcome::Failed))
                }
                _ => p(Phase::Abort, a.at, state, None),
            };
        }
        if let Some(at) = first_told {
            return p(Phase::Conclude, at, KvPoll::WaitingForInput, None);
        }
        if complete {
            return p(Phase::Transfer, last_asked, KvPoll::WaitingForInput, None);
        }
        match (self.bootstrap_at, self.computed_at) {
            (Some(at), None) if got == 0 => p(Phase::Compute, at, state, None),
            (_, Some(at)) if got == 0 => p(Phase::Bootstrap, at, KvPoll::WaitingForInput, None),
            _ => p(Phase::Bootstrap, self.opened_at, state, None),
        }
    }

    /// When prefill, on this host, was done with the room, as its answer to the request shows, and how. It answers when its side has
    /// ended, and aborts the room when its client hangs up; an answer that begins: see `RoomRequest::holds`.
    pub(crate) fn prefill_answered(&self) -> Option<(Mono, Outcome)> {
        let leg = self.leg(Role::Prefill).filter(|l| l.here)?;
        let answers = || leg.seen.first_byte.filter(|_| leg.alone && leg.is_open());
        leg.over().or_else(|| answers().map(|at| (at, Outcome::Success)))
    }

    /// Whether a decode rank that has neither gone nor ended the room waits for a STATUS that cannot have left.
    fn waits_for_what_is_unsent(&self) -> bool {
        self.links.iter().any(Link::is_unsent)
            && !self.decode_gone
            && !(self.has_decode && self.decode_progress().terminal.is_some())
    }

    fn decode_progress(&self) -> Progress {
        let (mut required, mut got) = (0u32, 0u32);
        let (mut last_asked, mut first_heard, mut last_heard) = (self.opened_at, None, self.opened_at);
        let mut failed = None;
        for l in &self.links {
            if let Some(at) = l.sent {
                last_asked = last_asked.max(at);
            }
            if l.sent.is_none() && l.heard.is_none() {
                continue;
            }
            required += u32::from(l.owes());
            if let Some(h) = l.heard {
                first_heard = Some(first_heard.map_or(h.at, |f: Mono| f.min(h.at)));
                if l.deaf {
                    continue;
                }
                got += u32::from(l.owes());
                last_heard = last_heard.max(h.at);
                if h.status == KvPoll::Failed {
                    failed = Some(h.at);
                }
            }
        }
        let known = (required > 0).then_some(required);
        let p =
            |phase, since, state, terminal| Progress { phase, since, state, got, required: known, terminal };
        if let Some(at) = failed {
            return p(Phase::Done, at, KvPoll::Failed, Some(Outcome::Failed));
        }
        if required > 0 && got == required {
            return p(Phase::Done, last_heard, KvPoll::Success, Some(Outcome::Success));
        }
        if let Some(a) = self.abort.filter(|a| a.sent) {
            return p(Phase::Done, a.at, KvPoll::Failed, Some(Outcome::Failed));
        }
        if let Some(leg) = self.leg(Role::Decode).filter(|l| l.here) {
            // The client may have hung up just before the engines notice: a Success that is on its way ends the room. An
            // engine that has noticed would have sent ABORT.
            let coming = |l: &Link| {
                l.sent.is_some() && l.heard.is_none() && l.told.is_some_and(|t| t.status == KvPoll::Success)
            };
            if let Some((at, outcome)) = leg.over().filter(|_| !self.links.iter().any(coming)) {
                return p(Phase::Done, at, ended_as(outcome), Some(outcome));
            }
            // It generates, so it has the KV cache.
            if let Some(at) = leg.seen.first_byte {
                return p(Phase::Done, at, KvPoll::Success, Some(Outcome::Success));
            }
        }
        if self.decode_gone {
            return p(Phase::Done, last_asked, KvPoll::WaitingForInput, Some(Outcome::Unknown));
        }
        if let Some(at) = first_heard {
            return p(Phase::Conclude, at, KvPoll::WaitingForInput, None);
        }
        if self.links.iter().any(|l| l.sent.is_some()) {
            return p(Phase::Transfer, last_asked, KvPoll::WaitingForInput, None);
        }
        match (self.bootstrap_at, self.computed_at) {
            (Some(at), None) => p(Phase::Compute, at, KvPoll::Bootstrapping, None),
            (_, Some(at)) => p(Phase::Bootstrap, at, KvPoll::WaitingForInput, None),
            _ => p(Phase::Bootstrap, self.opened_at, KvPoll::Bootstrapping, None),
        }
    }
}

/// State of a view whose request is over.
const fn ended_as(outcome: Outcome) -> KvPoll {
    match outcome {
        Outcome::Success => KvPoll::Success,
        Outcome::Failed | Outcome::Unknown => KvPoll::Failed,
    }
}
