//! Facts → class, confidence, debtor. The rules are those of docs/verdicts.md, in its order.
//!
//! Pure. Silence alone never gets above `possible`.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::event::{Mono, SECOND};
use crate::rooms::model::{Completeness, Phase, Role};
use crate::sglang::message::{Backend, Kind, Release, Releases};
use crate::verdict::facts::{AbortFact, Dummies, Facts, LostFact, Sent};
use crate::verdict::judge_requests;
use crate::verdict::judge_threads;
use crate::verdict::model::{Class, Confidence, EndsByItself};

/// As many later rooms must have concluded before being passed says anything: schedulers reorder a few
/// (longest prefix match, priority, shortest first).
pub(crate) const OVERTAKEN: u32 = 3;

/// As many unanswered rooms must there be before a rank is called silent without another sign.
pub(super) const SILENT_RANK: u32 = 3;

/// The same for one session of a rank that answers others.
pub(super) const SILENT_SESSION: u32 = 2;

/// After an ABORT decode holds its pages this long at most (`..._DEFERRED_DECODE_KV_RELEASE_TIMEOUT`, 30 s by
/// default in 0.5.19–0.5.23), and a room whose ABORT had an entry to fail is over.
pub(crate) const ABORT_RELEASE: u64 = 30 * SECOND;

/// A decode engine notices a dead prefill by its heartbeat: two misses at five seconds each, and the time of
/// the requests (`SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL`, `..._MAX_FAILURE`).
pub(crate) const HEARTBEAT: u64 = 20 * SECOND;

/// Who owes, or on whom to act.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Who {
    /// The prefill rank.
    Prefill,
    /// The decode rank.
    Decode,
    /// The decode rank that has not sent its METADATA.
    MissingDecode,
    /// The prefill rank that has not said how it ended.
    SilentPrefill,
    /// Neither engine: a router or client.
    Router,
    /// Nobody.
    Nobody,
}

/// A verdict without its words; those are made when someone reads it. Part of the state file's format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Judgement {
    /// View that it was judged from.
    pub(crate) role: Role,
    pub(crate) class: Class,
    pub(crate) confidence: Confidence,
    pub(crate) owes: Who,
    /// Endpoint of the debtor, for the change of debtor and the instance label.
    pub(crate) owes_at: Option<SocketAddr>,
    pub(crate) act_on: Who,
    pub(crate) expected: Option<Kind>,
    /// Not in the file: found anew at the first look.
    #[serde(skip)]
    pub(crate) ends: Option<EndsByItself>,
    pub(crate) group: u64,
    pub(crate) since: Mono,
}

impl Judgement {
    /// What it pins its room for, if it pins it.
    pub(crate) fn cause(&self) -> Option<(u64, Class, Confidence)> {
        self.class.pins().then_some((self.group, self.class, self.confidence))
    }

    /// Whether others must hear that `self` took the place of `old`.
    pub(crate) fn differs(&self, old: &Self) -> bool {
        (self.class, self.confidence, self.owes_at) != (old.class, old.confidence, old.owes_at)
    }
}

/// Bootstrap timeout: prefill, from the making of the sender (`disaggregation/common/conn.py`).
pub(crate) const BOOTSTRAP_TIMER: &str =
    "prefill's SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, 300 s by default";
/// Waiting timeout: decode, from METADATA; from 0.5.13 it sends ABORT when it expires.
const WAITING_TIMER: &str = "decode's SGLANG_DISAGGREGATION_WAITING_TIMEOUT, 300 s by default";
const HEARTBEAT_TIMER: &str =
    "decode's heartbeat (SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL, _MAX_FAILURE), 20 s by default";

const fn release(minor: u16, patch: u16) -> Release {
    Release::new(0, minor, patch, 0)
}

fn at_least(releases: Option<Releases>, wanted: Release) -> bool {
    releases.is_some_and(|r| r.min >= wanted)
}

fn below(releases: Option<Releases>, wanted: Release) -> bool {
    releases.is_some_and(|r| r.max < wanted)
}

/// Whether a room's Success can be seen on the wire: always but with NIXL, there from 0.5.23 on.
pub(crate) fn success_on_wire(backend: Option<Backend>, releases: Option<Releases>) -> bool {
    backend != Some(Backend::Nixl) || at_least(releases, release(5, 23))
}

/// What an ABORT does to a room whose METADATA was complete before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AbortEffect {
    /// The entry is there and fails.
    Fails,
    /// It is dropped (M6: mori 0.5.13–0.5.18 calls it malformed).
    Dropped,
    /// One of the two: the release is not known closely enough (mori from 0.5.14 to 0.5.21 has one layout).
    MayBeDropped,
    /// It may find no entry although METADATA came (M44: NIXL up to 0.5.21).
    MayVanish,
}

/// See [`AbortEffect`].
pub(crate) fn abort_effect(backend: Option<Backend>, releases: Option<Releases>) -> AbortEffect {
    match backend {
        Some(Backend::Mooncake) => AbortEffect::Fails,
        Some(Backend::Mori) if below(releases, release(5, 19)) => AbortEffect::Dropped,
        Some(Backend::Mori) if at_least(releases, release(5, 19)) => AbortEffect::Fails,
        Some(Backend::Mori) => AbortEffect::MayBeDropped,
        Some(Backend::Nixl) if at_least(releases, release(5, 22)) => AbortEffect::Fails,
        _ => AbortEffect::MayVanish,
    }
}

/// Whether prefill acknowledges the ABORT of a room whose METADATA it has. Mooncake always did; the others do with
/// deferred release, which NIXL has on from 0.5.21 (so where it says Success on the wire) and mori from 0.5.22
/// (`common/conn.py`).
pub(crate) fn acknowledges_abort(f: &Facts) -> bool {
    match f.backend {
        Some(Backend::Mooncake) => true,
        Some(Backend::Nixl) => f.observable || at_least(f.releases, release(5, 21)),
        Some(Backend::Mori) => at_least(f.releases, release(5, 22)),
        Some(Backend::Shared) | None => false,
    }
}

/// Whether prefill fails a room by itself that never got past Bootstrapping: not in NIXL before 0.5.18.
pub(crate) fn bootstrap_applies(backend: Option<Backend>, releases: Option<Releases>) -> bool {
    backend != Some(Backend::Nixl) || at_least(releases, release(5, 18))
}

/// Prefill's own timer for a room that never got past Bootstrapping; none in NIXL before 0.5.18.
pub(crate) fn bootstrap_timer(f: &Facts, from: Mono) -> Option<EndsByItself> {
    bootstrap_applies(f.backend, f.releases)
        .then(|| EndsByItself { timer: BOOTSTRAP_TIMER, at: from.plus(f.limits.bootstrap_timeout) })
}

/// Decode's timer; it helps prefill only where ABORT exists (from 0.5.13), and only while it is not past.
pub(super) fn waiting_timer(f: &Facts) -> Option<EndsByItself> {
    let from = f.metadata_at?;
    let at = from.plus(f.limits.waiting_timeout);
    let told = f.role == Role::Decode || at_least(f.releases, release(5, 13));
    // A lost decode tells nothing more. One that is judged here lives, also when its last connection went with prefill.
    let lives = f.role == Role::Decode || f.decode_lost.is_none();
    (told && at > f.now && lives).then_some(EndsByItself { timer: WAITING_TIMER, at })
}

/// Judges one view. `None`: nothing is overdue.
pub(crate) fn judge(f: &Facts) -> Option<Judgement> {
    if let Some(j) = proven(f).or_else(|| judge_requests::not_told(f)) {
        return Some(j);
    }
    if f.request.held && f.request.siblings && !f.told.is_empty() {
        return None; // Its request waits for another room.
    }
    if let Some(lost) = rank_gone(f) {
        let since = lost.at.plus(f.limits.floor);
        let j = Draft::new(Class::PeerLost, Confidence::Possible, Who::Prefill, Some(Kind::Status));
        return (f.now >= since).then(|| j.act_on(Who::Prefill).since(since).done(f));
    }
    if f.role == Role::Decode && f.phase == Phase::Abort && f.has_prefill {
        return None; // Of that only that the ABORT does not arrive is decode's to say.
    }
    if !f.overdue() && !still_waits(f) {
        return judge_requests::paused(f);
    }
    let j = not_a_pin(f).or_else(|| transport(f)).or_else(|| lost_peer(f));
    let j = j.or_else(|| judge_requests::by_request(f)).unwrap_or_else(|| by_phase(f));
    Some(judge_requests::weigh(f, j))
}

/// Facts that need no timer.
fn proven(f: &Facts) -> Option<Judgement> {
    if let Sent::Lost { at, .. } = f.status_sent {
        let j = Draft::new(Class::StatusLost, Confidence::Certain, Who::Prefill, Some(Kind::Status));
        return Some(j.act_on(Who::Decode).ends(waiting_timer(f)).since(at).done(f));
    }
    // Where prefill's process was seen to end, no address is stale: `lost_peer`.
    let ended = f.prefill_lost.is_some_and(|l| l.exit.is_some());
    if let (Sent::Lost { at, .. }, Phase::Transfer | Phase::Bootstrap, false) =
        (f.metadata_sent, f.phase, ended)
    {
        let j = Draft::new(Class::StaleEndpoint, Confidence::Certain, Who::Decode, Some(Kind::Metadata));
        return Some(j.ends(waiting_timer(f)).since(at).done(f));
    }
    judge_threads::proven(f)
}

/// Overdue, but no pin.
fn not_a_pin(f: &Facts) -> Option<Judgement> {
    let silent = |class| Some(Draft::new(class, Confidence::Possible, Who::Nobody, None).done(f));
    match f.completeness {
        Completeness::Preexisting if unanswered_abort(f) => {}
        Completeness::Lossy | Completeness::Preexisting | Completeness::Partial => {
            return silent(Class::Unknown);
        }
        Completeness::Full => {}
    }
    match f.dummies {
        Dummies::All => return silent(Class::NotApplicable),
        Dummies::Unknown => return silent(Class::Unknown),
        Dummies::Some => {}
    }
    if maybe_ignored(f) && !judge_requests::observable(f) {
        return silent(Class::Unknown);
    }
    let waits = matches!(f.phase, Phase::Transfer | Phase::Conclude);
    let unseen = !judge_requests::observable(f) || judge_requests::handed_over_unseen(f);
    if waits && !f.observable && unseen {
        return silent(Class::CompletionNotObservable);
    }
    None
}

/// Whether an ABORT is unanswered that prefill would have answered had it found the room: then it says much even
/// where METADATA can have gone before the agent looked.
fn unanswered_abort(f: &Facts) -> bool {
    let silent = |a: AbortFact| a.before_metadata && !a.generation && a.acknowledged.is_none();
    f.phase == Phase::Abort && f.abort.is_some_and(silent) && acknowledges_abort(f)
}

/// Whether an ABORT has either failed the room or been dropped, and nothing tells which.
pub(crate) fn maybe_ignored(f: &Facts) -> bool {
    f.phase == Phase::Abort
        && f.abort.is_some_and(|a| !a.before_metadata)
        && abort_effect(f.backend, f.releases) == AbortEffect::MayBeDropped
}

/// Such an ABORT ends no wait that was too long before it.
fn still_waits(f: &Facts) -> bool {
    let long = f.metadata_at.is_some_and(|at| f.now.since(at) >= f.threshold);
    maybe_ignored(f) && (long || f.pinned_since.is_some())
}

/// Someone dead, or something in the way of the message.
fn transport(f: &Facts) -> Option<Judgement> {
    if let Some(j) = judge_threads::seen(f) {
        return Some(j);
    }
    // Of a room whose view at prefill is over, because its request was answered, decode's is left to say it.
    let prefill_here = f.role == Role::Prefill || f.has_prefill;
    if !prefill_here || f.phase == Phase::Bootstrap || f.phase == Phase::Abort {
        return None;
    }
    let lost = Draft::new(Class::StatusLost, Confidence::Likely, Who::Prefill, Some(Kind::Status));
    if let Some(at) = unreachable(f) {
        return Some(lost.act_on(Who::Decode).ends(waiting_timer(f)).since(at).done(f));
    }
    if let Sent::Waiting { .. } = f.status_sent {
        // TCP may yet deliver it: `judge_threads::not_delivered`.
        let late = Draft::new(Class::StatusLost, Confidence::Possible, Who::Prefill, Some(Kind::Status));
        return Some(late.act_on(Who::Decode).ends(waiting_timer(f)).done(f));
    }
    None
}

/// Since when a connect to the endpoint that waits for a STATUS has had no answer for too long. The first SYN that was sent again
/// (after 1 s) or the second (after 3 s) gets through to a host that is merely busy.
pub(crate) fn unanswered_connect(f: &Facts) -> Option<Mono> {
    f.connecting.filter(|at| f.now.since(*at) >= f.limits.floor)
}

/// When the endpoint that waits for a STATUS last refused the connect that was to bring it, or let it go without an answer; or when
/// the connection ended on which it would have left.
fn unreachable(f: &Facts) -> Option<Mono> {
    let refused = f.refused.map(|(at, _)| at).filter(|at| *at >= f.opened_at || f.unsent);
    let unanswered = || unanswered_connect(f).map(|at| at.plus(f.limits.floor).max(f.since));
    let cut = || f.cut.filter(|_| f.unsent).map(|at| at.max(f.since));
    let at = refused.or_else(unanswered).or_else(cut)?;
    // Nobody is left who waits: `lost_peer`. Where its port alone is closed, the process may live.
    let before_pin = |at: Mono| at >= f.opened_at && f.pinned_since.is_none_or(|p| at < p);
    let went = |l: LostFact| l.at <= at && before_pin(l.at) && (l.exit.is_some() || !l.listener);
    if f.decode_lost.is_some_and(went) {
        return None;
    }
    // An endpoint that was reached before may be again by the time that prefill has a STATUS for it (libzmq reconnects
    // up to 0.5.13).
    let told = f.unsent || !f.told.is_empty() || !matches!(f.status_sent, Sent::Unknown);
    (told || !f.decode_reached).then_some(at)
}

/// A peer that went while the room was open, before it was pinned for another cause.
fn lost_peer(f: &Facts) -> Option<Judgement> {
    if f.phase == Phase::Abort {
        return None;
    }
    let before_pin = |at: Mono| at >= f.opened_at && f.pinned_since.is_none_or(|p| at <= p);
    let (who, lost, survivor) = match f.role {
        Role::Prefill => (Who::Decode, f.decode_lost, Who::Prefill),
        Role::Decode => (Who::Prefill, f.prefill_lost, Who::Decode),
    };
    let lost = lost.filter(|l| before_pin(l.at))?;
    let ends = match f.role {
        Role::Prefill if f.phase == Phase::Bootstrap => bootstrap_timer(f, f.since),
        Role::Prefill => None,
        Role::Decode => Some(EndsByItself { timer: HEARTBEAT_TIMER, at: lost.at.plus(HEARTBEAT) }),
    };
    let expected = match f.role {
        Role::Prefill if f.phase == Phase::Bootstrap => Some(Kind::Metadata),
        // It has sent all that was its to send; what it owed is to take the KV.
        Role::Prefill => None,
        Role::Decode => Some(Kind::Status),
    };
    let draft = Draft::new(Class::PeerLost, Confidence::Possible, who, expected);
    // Not before it went, or the next look would find it gone after the pin.
    let since = lost.at.max(f.since.plus(f.threshold));
    Some(draft.act_on(survivor).ends(ends).since(since).done(f))
}

/// The rank of prefill that had the room has ended, and its server, which lives, still has the request.
fn rank_gone(f: &Facts) -> Option<LostFact> {
    let held = f.role == Role::Prefill && f.request.held && f.told.is_empty();
    f.prefill_lost.filter(|l| held && l.exit.is_some())
}

fn by_phase(f: &Facts) -> Judgement {
    if let Some(at) = f.failed_inside.filter(|_| f.role == Role::Decode) {
        let j = Draft::new(Class::PeerNotTold, Confidence::Likely, Who::Nobody, Some(Kind::Status));
        return j.act_on(Who::Decode).ends(waiting_timer(f)).since(at).done(f);
    }
    if f.duplicate.is_some() && f.phase != Phase::Abort {
        let j = Draft::new(Class::DuplicateRoom, Confidence::Possible, Who::Router, Some(Kind::Status));
        return j.act_on(Who::Prefill).ends(waiting_timer(f)).done(f);
    }
    match f.phase {
        Phase::Abort => aborted(f),
        Phase::Bootstrap if f.computed_at.is_some() && f.got == 0 => metadata_missing(f),
        Phase::Bootstrap => metadata_incomplete(f),
        Phase::Conclude | Phase::Done => concluding(f),
        Phase::Compute | Phase::Transfer => waiting(f),
    }
}

/// ABORT, and nothing came of it.
fn aborted(f: &Facts) -> Judgement {
    let from = f.abort.map_or(f.since, |a: AbortFact| a.at);
    // M44 (NIXL up to 0.5.21) reaches the inflight queue, which no timer empties.
    let never = f.backend == Some(Backend::Nixl) && !at_least(f.releases, release(5, 22));
    let ends = if never { None } else { bootstrap_timer(f, from) };
    let j = Draft::new(Class::AbortBeforeEntry, Confidence::Possible, Who::Prefill, Some(Kind::Status));
    j.act_on(Who::Prefill).ends(ends).done(f)
}

fn metadata_incomplete(f: &Facts) -> Judgement {
    let ends = bootstrap_timer(f, f.since);
    // Nothing came at all: then it is the rank that the room is known from.
    let who = if f.missing.is_empty() && f.got == 0 { Who::Decode } else { Who::MissingDecode };
    let j = Draft::new(Class::MetadataIncomplete, Confidence::Possible, who, Some(Kind::Metadata));
    j.act_on(who).ends(ends).done(f)
}

/// `prefill_complete`: prefill is done and said so, decode has not asked.
fn metadata_missing(f: &Facts) -> Judgement {
    let j = Draft::new(Class::MetadataMissing, Confidence::Possible, Who::Decode, Some(Kind::Metadata));
    j.ends(bootstrap_timer(f, f.since)).done(f)
}

/// Some ranks have said how it ended, others not.
fn concluding(f: &Facts) -> Judgement {
    let late = f.running() >= f.limits.ceiling.max(f.threshold);
    // No queueing and no computing is left once one rank has concluded: the ceiling excludes both.
    let confidence = if late { Confidence::Likely } else { Confidence::Possible };
    if f.untold.is_empty() || f.unsent {
        // Prefill has told all; decode, on this host too, has not heard. Or what it has to tell has not left.
        let j = Draft::new(Class::StatusLost, confidence, Who::Prefill, Some(Kind::Status));
        return j.act_on(Who::Decode).ends(waiting_timer(f)).done(f);
    }
    let j = Draft::new(Class::RanksDisagree, confidence, Who::SilentPrefill, Some(Kind::Status));
    j.act_on(Who::SilentPrefill).ends(waiting_timer(f)).done(f)
}

/// All was asked, nothing was said.
fn waiting(f: &Facts) -> Judgement {
    let class = if queued(f) {
        Class::Queued
    } else if let Some(j) = staging(f) {
        return j;
    } else if f.role == Role::Decode {
        if f.missing.is_empty() { Class::AwaitingPrefill } else { return metadata_incomplete(f) }
    } else {
        match separate(f) {
            _ if refuses_for_good(f) => {
                let j = Draft::new(Class::StatusLost, Confidence::Possible, Who::Prefill, Some(Kind::Status));
                return j.act_on(Who::Decode).ends(waiting_timer(f)).done(f);
            }
            Class::TransferNotConcluded if ignores_abort(f) => Class::AbortIgnored,
            class => class,
        }
    };
    let j = Draft::new(class, Confidence::Possible, Who::Prefill, Some(Kind::Status));
    j.ends(waiting_timer(f)).done(f)
}

/// Whether decode's endpoint refused before this room, and was never reached: prefill's socket to it does not connect anew (from
/// 0.5.14), so that nothing leaves for it, nor is seen to be tried.
fn refuses_for_good(f: &Facts) -> bool {
    f.refused.is_some() && !f.decode_reached && f.decode_lost.is_none()
}

/// Prefill has computed and asks decode where to put it, and decode does not say (M14). Decode may wait for room that others
/// hold, so it stays silence.
fn staging(f: &Facts) -> Option<Judgement> {
    f.staging_wait.filter(|at| f.now.since(*at) >= f.limits.floor)?;
    let (class, who) = (Class::StagingReplyMissing, Who::Decode);
    Some(Draft::new(class, Confidence::Possible, who, Some(Kind::StagingRsp)).ends(waiting_timer(f)).done(f))
}

/// Whether prefill has dropped decode's ABORT and goes on for nobody (M6).
fn ignores_abort(f: &Facts) -> bool {
    f.abort.is_some_and(|a| !a.before_metadata) && abort_effect(f.backend, f.releases) == AbortEffect::Dropped
}

/// A queue that drains in order: rooms asked for earlier still conclude, those asked for later do not.
pub(super) fn queued(f: &Facts) -> bool {
    let lately = |at: Option<Mono>| at.is_some_and(|at| f.now.since(at) < f.limits.floor / 2);
    let o = &f.others;
    (lately(o.drained) && o.overtaken < OVERTAKEN)
        || (lately(o.drained_at_rank) && o.overtaken_at_rank < OVERTAKEN && !o.session_answers)
}

/// Which silence it is (facts, "Reading a stuck room").
pub(super) fn separate(f: &Facts) -> Class {
    let o = &f.others;
    if o.session_answers {
        return Class::TransferNotConcluded;
    }
    if o.rank_answers {
        let several = o.silent_in_session >= SILENT_SESSION;
        return if several { Class::TransferWorkerSilent } else { Class::TransferNotConcluded };
    }
    let silent_rank = o.silent_at_rank >= SILENT_RANK;
    if f.backend == Some(Backend::Mori) {
        // Its receive loop logs whatever it cannot read and goes on (`_start_bootstrap_thread`, `mori/conn.py`);
        // a transfer that blocks holds up every room behind it (M21).
        return if silent_rank { Class::TransferWorkerSilent } else { Class::TransferNotConcluded };
    }
    let foreign = f.foreign.is_some_and(|x| o.last_answer.is_none_or(|a| x.at >= a));
    if foreign || silent_rank { Class::ReceiverSilent } else { Class::TransferNotConcluded }
}

/// A judgement in the making.
pub(super) struct Draft {
    class: Class,
    confidence: Confidence,
    owes: Who,
    act_on: Who,
    expected: Option<Kind>,
    ends: Option<EndsByItself>,
    since: Option<Mono>,
}

impl Draft {
    pub(super) const fn new(class: Class, confidence: Confidence, owes: Who, expected: Option<Kind>) -> Self {
        Self { class, confidence, owes, act_on: owes, expected, ends: None, since: None }
    }

    pub(super) const fn act_on(mut self, who: Who) -> Self {
        self.act_on = who;
        self
    }

    pub(super) const fn ends(mut self, ends: Option<EndsByItself>) -> Self {
        self.ends = ends;
        self
    }

    /// From when it holds, where a fact and not the clock says so.
    pub(super) const fn since(mut self, at: Mono) -> Self {
        self.since = Some(at);
        self
    }

    pub(super) fn done(self, f: &Facts) -> Judgement {
        let owes_at = f.party(self.owes).and_then(|p| p.endpoint);
        Judgement {
            role: f.role,
            class: self.class,
            confidence: self.confidence,
            owes: self.owes,
            owes_at,
            act_on: self.act_on,
            expected: self.expected,
            ends: self.ends,
            group: group(f, self.class, owes_at),
            since: self.since.unwrap_or_else(|| f.since.plus(f.threshold)),
        }
    }
}

/// Names a cause: the same on every run and after a restart, so it is hashed from texts (FNV-1a, 64 bits).
fn group(f: &Facts, class: Class, owes_at: Option<SocketAddr>) -> u64 {
    use std::fmt::Write as _;
    let mut hash = Fnv(0xcbf2_9ce4_8422_2325);
    let endpoint = |at: Option<SocketAddr>| at.map_or_else(String::new, |a| a.to_string());
    let prefill = endpoint(f.prefill.endpoint);
    let decode = endpoint(f.decode.endpoint);
    let _ = write!(hash, "{}|", class.label());
    let _ = match class {
        // Ranks of which only the engine is known.
        Class::RanksDisagree if owes_at.is_none() && f.elsewhere.is_some() => {
            write!(hash, "{prefill}|elsewhere")
        }
        // One rank, or one peer that went.
        Class::ReceiverSilent | Class::EngineStalled | Class::RanksDisagree | Class::PeerLost => {
            write!(hash, "{}", endpoint(owes_at))
        }
        // One endpoint that cannot be reached.
        Class::StatusLost => write!(hash, "{decode}"),
        // One room by its nature.
        Class::DuplicateRoom | Class::PeerNotTold => write!(hash, "{}", f.room),
        Class::MetadataIncomplete => write!(hash, "{prefill}|{}", endpoint(owes_at)),
        Class::AbortBeforeEntry => write!(hash, "{prefill}"),
        // One worker or connection: a rank and a session.
        _ => write!(hash, "{prefill}|{}", f.session),
    };
    hash.0
}

struct Fnv(u64);

impl std::fmt::Write for Fnv {
    fn write_str(&mut self, s: &str) -> std::fmt::Result {
        for b in s.bytes() {
            self.0 = (self.0 ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3);
        }
        Ok(())
    }
}
