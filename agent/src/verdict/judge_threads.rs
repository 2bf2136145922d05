//! What ended threads and processes, and TCP's own troubles, make of a room (docs/verdicts.md, "With threads and TCP").
//!
//! Pure. A thread that ended is a fact, and that it is missed is another: only both together get above `possible`.

use crate::event::Mono;
use crate::rooms::model::{Phase, Role};
use crate::sglang::message::{Backend, Kind, Release};
use crate::verdict::facts::{Facts, LostFact, Sent, ThreadFact, UnreadFact, Was};
use crate::verdict::judge::{
    Draft, Judgement, SILENT_RANK, SILENT_SESSION, Who, bootstrap_applies, bootstrap_timer, queued, separate,
    waiting_timer,
};
use crate::verdict::model::{Class, Confidence};

/// A session of which as many rooms are silent since a thread ended, while its engine works, ...
const SILENT_BUSY: u32 = 3;
/// ... and which so many as long ones of other sessions, asked for later, have passed: by no order of a queue alone, which puts
/// three rooms of one session last among as many only once in 165 times. As many are written down for the next agent.
const PASSED_BUSY: u32 = 8;

/// From this many sockets on it is not one connection that nobody reads, but a process that reads nothing.
const SEVERAL_SOCKETS: u32 = 2;

/// Facts that need no timer.
pub(crate) fn proven(f: &Facts) -> Option<Judgement> {
    not_delivered(f).or_else(|| orphaned(f))
}

/// What is overdue, with what threads and sockets say of it.
pub(crate) fn seen(f: &Facts) -> Option<Judgement> {
    // What stands still on purpose says nothing by its silence.
    if f.request.stopped.is_some() {
        return None;
    }
    if let Some(j) = deaf(f) {
        return Some(j);
    }
    if queued(f) {
        return None;
    }
    // Bytes that lie unread say more than a thread that may be any.
    let dead = dead_thread(f);
    if dead.as_ref().is_some_and(|j| j.confidence > Confidence::Possible) {
        return dead;
    }
    unread(f).or(dead).or_else(|| stalled(f))
}

/// The peer's kernel does not take a message. A network that is away for a while delivers it by itself, when TCP next sends it:
/// [`Sent::undeliverable`].
fn not_delivered(f: &Facts) -> Option<Judgement> {
    let stuck = |sent: Sent| sent.undeliverable(&f.limits);
    // A view of prefill that is over leaves it to decode's to say.
    let told = if f.role == Role::Prefill || f.has_prefill { stuck(f.status_sent) } else { None };
    if let Some(at) = told {
        let j = Draft::new(Class::StatusLost, Confidence::Likely, Who::Prefill, Some(Kind::Status));
        return Some(j.act_on(Who::Decode).ends(waiting_timer(f)).since(at).done(f));
    }
    if f.role == Role::Prefill {
        return None;
    }
    let (at, kind) = match f.phase {
        Phase::Transfer | Phase::Bootstrap => (stuck(f.metadata_sent)?, Kind::Metadata),
        // The network gave it up; a reset would say that prefill is gone, and its rooms with it.
        Phase::Abort => match f.abort_sent {
            Sent::Lost { at, error: 101 | 110 | 113, .. } => (at, Kind::Abort),
            sent => (stuck(sent)?, Kind::Abort),
        },
        _ => return None,
    };
    let j = Draft::new(Class::StaleEndpoint, Confidence::Likely, Who::Decode, Some(kind));
    let ends = if kind == Kind::Metadata { waiting_timer(f) } else { None };
    Some(j.ends(ends).since(at).done(f))
}

/// The peer's process was seen to end, and nothing in this engine will end the room.
fn orphaned(f: &Facts) -> Option<Judgement> {
    let (who, lost, survivor) = match f.role {
        Role::Prefill => (Who::Decode, f.decode_lost, Who::Prefill),
        Role::Decode => (Who::Prefill, f.prefill_lost, Who::Decode),
    };
    let LostFact { at, .. } = lost.filter(|l| l.exit.is_some() && l.at >= f.opened_at)?;
    let before_pin = f.pinned_since.is_none_or(|p| at <= p);
    if !before_pin || !never_ends(f) {
        return None;
    }
    let expected = if f.role == Role::Prefill { Kind::Metadata } else { Kind::Status };
    let j = Draft::new(Class::PeerLost, Confidence::Certain, who, Some(expected));
    Some(j.act_on(survivor).since(at).done(f))
}

/// Whether no timer of this release ends the room of a survivor (facts of the releases: docs/verdicts.md, `peer_lost`).
fn never_ends(f: &Facts) -> bool {
    let before = |minor, patch| f.releases.is_some_and(|r| r.max < Release::new(0, minor, patch, 0));
    match (f.role, f.phase) {
        // What is queued fails when its KV cannot be written.
        (Role::Prefill, Phase::Bootstrap) => !bootstrap_applies(f.backend, f.releases) && before(5, 18),
        // Neither heartbeat nor waiting timeout.
        (Role::Decode, Phase::Transfer | Phase::Conclude) => match f.backend {
            Some(Backend::Nixl) => before(5, 3),
            Some(Backend::Mooncake) => before(4, 7),
            _ => false,
        },
        _ => false,
    }
}

/// STATUS has come to decode, and the thread that takes it in was dead.
fn deaf(f: &Facts) -> Option<Judgement> {
    let t = f.thread.filter(|t| matches!(t.was, Was::Status(_)) && f.phase == Phase::Conclude)?;
    let confidence = match (f.in_transfer, f.request.is_open(Role::Decode)) {
        // It has taken in whatever came.
        (Some(0), _) => Confidence::Possible,
        // Its client has had nothing yet.
        (_, true) => Confidence::Certain,
        // Whether decode has answered is not seen.
        (_, false) => Confidence::Likely,
    };
    let j = Draft::new(Class::ReceiverSilent, confidence, Who::Decode, Some(Kind::Status));
    Some(Judgement { group: t.group, ..j.ends(waiting_timer(f)).done(f) })
}

/// A thread ended, and what it did is not done any more.
fn dead_thread(f: &Facts) -> Option<Judgement> {
    let t = f.thread.filter(|_| f.role == Role::Prefill)?;
    // Others have concluded this very room: no queue and no computing is left.
    let disagree = f.phase == Phase::Conclude && !f.untold.is_empty();
    let aborted = f.phase == Phase::Abort && matches!(t.was, Was::Reader(_));
    if !disagree && !aborted && !matches!(f.phase, Phase::Transfer | Phase::Compute) {
        return None;
    }
    // There is nobody left to whom a worker could write: `lost_peer`.
    let lost = f.decode_lost.filter(|l| l.at >= f.opened_at);
    if !matches!(t.was, Was::Reader(_)) && lost.is_some_and(|l| f.pinned_since.is_none_or(|p| l.at < p)) {
        return None;
    }
    let (class, confidence) = match t.was {
        // Its answers are not on the wire, but requests that came later were answered.
        Was::Reader(_) if !f.observable && f.request.later_finished > 0 => return None,
        // While it computes a long prompt is silent as well, and the thread may be another.
        Was::Reader(_) if f.may_compute => (Class::ReceiverSilent, Confidence::Possible),
        // An ABORT that may have harmed nobody.
        Was::Reader(x) if x.unsure => (Class::ReceiverSilent, Confidence::Possible),
        Was::Reader(_) => (Class::ReceiverSilent, Confidence::Certain),
        Was::Status(_) => return None,
        Was::Worker { .. } => (Class::TransferWorkerSilent, worker(f, t, disagree)),
        Was::Unknown { asked_before } => {
            // A receive loop dies of what it has read: without anything foreign since the last answer it was hardly that.
            let answered = f.others.last_answer;
            let foreign = f.foreign.is_some_and(|x| answered.is_none_or(|a| x.at >= a));
            let worker = asked_before || disagree || !foreign;
            let class = if worker { Class::TransferWorkerSilent } else { separate(f) };
            // That a thread ended says nothing of a rank that is silent because it computes, or because it queues: whether it does
            // neither is for its numbers to say (`judge_requests::weigh`), or for ranks that have concluded the room.
            (class, if disagree { Confidence::Likely } else { Confidence::Possible })
        }
    };
    // What a dead reader does not hear, ABORT included, only prefill's own timer ends.
    let from = f.metadata_at.unwrap_or(f.since);
    let ends = if class == Class::ReceiverSilent { bootstrap_timer(f, from) } else { waiting_timer(f) };
    let j = Draft::new(class, confidence, Who::Prefill, Some(Kind::Status)).ends(ends);
    // One thread is one cause, whatever its end is called in each room.
    Some(Judgement { group: t.group, ..j.done(f) })
}

/// How sure it is that a session's worker is dead.
fn worker(f: &Facts, t: ThreadFact, disagree: bool) -> Confidence {
    let o = &f.others;
    // One room may be of a long prompt, whoever passes it: that the thread was its session's only its session can show.
    let several = o.silent_in_session >= SILENT_SESSION;
    // Short ones pass a long one as well.
    let as_long = o.as_long_at_rank > 0;
    match t.was {
        _ if disagree => Confidence::Certain,
        // What a working engine has not done yet it may do later, in whatever order.
        Was::Worker { answered: true } if works(f) => {
            let many = o.silent_in_session >= SILENT_BUSY && o.as_long_at_rank >= PASSED_BUSY;
            if many { Confidence::Certain } else { Confidence::Possible }
        }
        // Others, and asked for later: a queue drains in order.
        Was::Worker { answered: true } => match (several, as_long) {
            (true, true) => Confidence::Certain,
            (true, false) | (false, true) => Confidence::Likely,
            (false, false) => Confidence::Possible,
        },
        // An ABORT_ACK says that the rank reads, and nothing of its queue: its numbers do.
        _ if several && f.engine_idle == Some(true) && f.now.since(t.at.max(f.since)) >= f.limits.ceiling => {
            Confidence::Certain
        }
        _ => Confidence::Possible,
    }
}

/// Whether prefill computes, or may, or something waits in it, as it says.
fn works(f: &Facts) -> bool {
    f.may_compute || f.engine_idle == Some(false) || f.request.said_to_wait.is_some()
}

/// Bytes lie in this host's kernel that their rank does not read.
fn unread(f: &Facts) -> Option<Judgement> {
    // What prefill waits for may be among what it does not read.
    let bootstrap = f.phase == Phase::Bootstrap && f.role == Role::Prefill;
    let waits =
        bootstrap || matches!(f.phase, Phase::Transfer | Phase::Compute | Phase::Conclude | Phase::Abort);
    let (who, u) = match f.role {
        // What lies unread at decode may be the very STATUS.
        Role::Decode if f.untold.is_empty() || !f.has_prefill => (Who::Decode, f.unread_decode),
        Role::Prefill if f.phase != Phase::Conclude => (Who::Prefill, f.unread_prefill),
        _ => return None,
    };
    let UnreadFact { sockets, .. } = u.filter(|_| waits)?;
    let several = sockets >= SEVERAL_SOCKETS || f.backend == Some(Backend::Mori);
    let several = several || (who == Who::Prefill && nothing_runs(f));
    let class = if several { Class::EngineStalled } else { Class::ReceiverSilent };
    let j = Draft::new(class, Confidence::Likely, who, Some(Kind::Status));
    let ends = if bootstrap { bootstrap_timer(f, f.since) } else { waiting_timer(f) };
    Some(j.ends(ends).done(f))
}

/// Whether, beside the thread that reads, the scheduler of prefill stands still as well, all threads being there: it sends
/// nothing, and its server answers with numbers as old as that.
fn nothing_runs(f: &Facts) -> bool {
    let long = |at: Mono| f.now.since(at) >= f.limits.ceiling;
    long(f.since) && f.stall.is_some_and(|s| long(s.spoke)) && f.wrote.is_some_and(long)
}

/// All threads are there, and nothing leaves the engine, to whomever it owes something.
fn stalled(f: &Facts) -> Option<Judgement> {
    let s = f.stall.filter(|_| f.role == Role::Prefill)?;
    let still = f.now.since(s.spoke) >= f.limits.ceiling && s.rooms >= SILENT_RANK && s.several;
    // By its own numbers it computes.
    let moves = f.engine_idle == Some(false);
    if !still || moves || !matches!(f.phase, Phase::Transfer | Phase::Compute) {
        return None;
    }
    let idle = f.engine_idle == Some(true);
    let confidence = if idle { Confidence::Likely } else { Confidence::Possible };
    let j = Draft::new(Class::EngineStalled, confidence, Who::Prefill, Some(Kind::Status));
    Some(j.ends(waiting_timer(f)).done(f))
}
