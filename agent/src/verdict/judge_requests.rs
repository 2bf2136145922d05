//! What the request behind a room, pauses and the engine's own numbers say of it.
//!
//! Pure. A request at prefill that is still open excludes the harmless readings of a room that was given up; one that is
//! over ends the room there. That prefill queues or computes is excluded only by what others show: requests and rooms that
//! came later and are done, counters that stand still.

use crate::event::{Mono, SECOND};
use crate::rooms::model::{Completeness, LegEnd, LegView, Phase, Role};
use crate::sglang::message::{Kind, KvPoll};
use crate::verdict::facts::Facts;
use crate::verdict::judge::{
    AbortEffect, Draft, Judgement, OVERTAKEN, Who, abort_effect, bootstrap_applies, bootstrap_timer,
    maybe_ignored, queued, waiting_timer,
};
use crate::verdict::judge_gpus;
use crate::verdict::judge_moving;
use crate::verdict::judge_spans;
use crate::verdict::model::{Class, Confidence};

/// So long after an ABORT prefill has computed what it was computing, where nothing waits before this room: the same time
/// that the inflight count is given (verdicts, "Inflight gauge above the room count").
const COMPUTED: u64 = 45 * SECOND;

/// A prompt of more pages may take longer than that to compute (at 64 tokens each, the largest usual page).
const SHORT_PROMPT: u64 = 1024;

/// A page may take so long to be moved: 64 tokens of 20 KB each, the smallest models' over TCP at 10 Gbit/s, or one token of the largest.
const PAGE: u64 = SECOND / 1000;

/// Fewer concluded rooms of a pair say nothing of what is usual ("cold start").
const WARM: u32 = 100;

/// How a leg ended other than with what was asked for.
fn failed(leg: &LegView) -> Option<(Mono, LegEnd)> {
    let (at, how) = leg.ended?;
    let refused = leg.status.is_some_and(|s| s >= 400);
    (refused || !matches!(how, LegEnd::Finished | LegEnd::Answered)).then_some((at, how))
}

/// Prefill's request is over, and decode, on this host, still waits (M10, M11, M37, M40). Needs no clock of a phase.
pub(super) fn not_told(f: &Facts) -> Option<Judgement> {
    if f.role != Role::Decode || f.completeness != Completeness::Full || f.abort.is_some() {
        return None;
    }
    // A server that ended has hung up on all of its requests: decode notices by itself (`lost_peer`).
    let (at, _) = f.request.leg(Role::Prefill).and_then(failed).filter(|_| f.prefill_lost.is_none())?;
    // METADATA that is younger has a request of its own on the way.
    let from = f.metadata_at.map_or(at, |m| m.max(at));
    if f.now.since(from) < f.limits.floor || !f.told.is_empty() {
        return None;
    }
    // Without its request in sight decode may have been let go in silence, which it was before 0.5.13. Where Success is not on
    // the wire the room may have been handed over before its request was dropped, and decode generates.
    let sure = f.request.is_open(Role::Decode) && f.observable;
    let confidence = if sure { Confidence::Certain } else { Confidence::Possible };
    let j = Draft::new(Class::PeerNotTold, confidence, Who::Nobody, Some(Kind::Status));
    Some(j.act_on(Who::Decode).ends(waiting_timer(f)).since(from.plus(f.limits.floor)).done(f))
}

/// Long enough by the clock on the wall, not by that of engines that stood still meanwhile.
pub(super) fn paused(f: &Facts) -> Option<Judgement> {
    let wall = f.now.since(f.since) >= f.threshold;
    if !wall || f.pinned_since.is_some() {
        return None;
    }
    let who = match f.request.stopped.map(|s| s.role) {
        Some(Role::Prefill) => Who::Prefill,
        Some(Role::Decode) => Who::Decode,
        None => Who::Nobody,
    };
    Some(Draft::new(Class::Paused, Confidence::Possible, who, None).done(f))
}

/// Whether the view's completion can be seen at its engine's HTTP port.
pub(super) fn observable(f: &Facts) -> bool {
    f.request.is_open(f.role)
}

/// Whether prefill has answered, so that the room has been handed over, and Success is not on the wire: decode has it and
/// generates, which can take any time and shows nothing where the answer is not streamed.
pub(super) fn handed_over_unseen(f: &Facts) -> bool {
    let answered = f.request.leg(Role::Prefill).is_some_and(|l| l.ended.is_some() && failed(l).is_none());
    f.role == Role::Decode && !f.observable && answered
}

/// When decode answered a room that prefill still holds: where Success is not on the wire, so that nothing else tells of it.
fn answered_by_decode(f: &Facts) -> Option<Mono> {
    let leg = f.request.leg(Role::Decode).filter(|l| failed(l).is_none())?;
    let (at, _) = leg.ended?;
    let holds = f.role == Role::Prefill && !f.observable && f.request.is_open(Role::Prefill);
    (holds && f.phase == Phase::Transfer && f.now.since(at) >= f.limits.floor).then_some(at)
}

/// Readings that the request or the numbers give, before the phase is judged by frames alone.
pub(super) fn by_request(f: &Facts) -> Option<Judgement> {
    if let Some(j) = duplicate(f) {
        return Some(j);
    }
    if f.request.held && !f.told.is_empty() {
        return Some(held(f));
    }
    if let Some(at) = answered_by_decode(f) {
        // M17. Nobody says anything more, and decode's timers are over with its room.
        let late = f.now.since(at) >= f.limits.ceiling || f.engine_idle == Some(true);
        let confidence = if late { Confidence::Likely } else { Confidence::Possible };
        return Some(Draft::new(Class::ConcludedButHeld, confidence, Who::Prefill, None).done(f));
    }
    match f.phase {
        Phase::Abort => aborted(f),
        Phase::Bootstrap if f.metadata_at.is_none() && f.bootstrap_at.is_none() => without_metadata(f),
        Phase::Bootstrap if f.metadata_at.is_none() => computed_without_metadata(f),
        Phase::Compute | Phase::Transfer => transfer(f),
        _ => None,
    }
}

/// Every status of the ranks here was told, and the request is still open (M15, M17, M34; M30 where others are elsewhere).
fn held(f: &Facts) -> Judgement {
    // Nothing queues and nothing computes once the worker is done, unless the request is for rooms that were not seen.
    let [none_waits, _] = f.request.none_waits;
    let done = !f.request.maybe_more || (f.engine_idle == Some(true) && none_waits);
    let late = done && f.running() >= f.limits.ceiling.max(f.threshold);
    let confidence = if late { Confidence::Likely } else { Confidence::Possible };
    // Prefill answers when the last of its ranks has concluded; when one has failed, at once.
    if f.elsewhere.is_some() && f.told.iter().all(|(_, status)| *status == KvPoll::Success) {
        let j = Draft::new(Class::RanksDisagree, confidence, Who::SilentPrefill, Some(Kind::Status));
        return j.ends(waiting_timer(f).filter(|_| !generates(f))).done(f);
    }
    Draft::new(Class::ConcludedButHeld, confidence, Who::Prefill, None).done(f)
}

/// Whether decode has begun to answer: then it waits for nothing any more.
fn generates(f: &Facts) -> bool {
    f.request.leg(Role::Decode).is_some_and(|leg| leg.first_byte.is_some() && failed(leg).is_none())
}

fn duplicate(f: &Facts) -> Option<Judgement> {
    f.request.duplicate?;
    if f.phase == Phase::Abort {
        return None;
    }
    let j = Draft::new(Class::DuplicateRoom, Confidence::Possible, Who::Router, Some(Kind::Status));
    Some(j.act_on(Who::Prefill).ends(waiting_timer(f)).done(f))
}

fn aborted(f: &Facts) -> Option<Judgement> {
    let open = f.request.is_open(Role::Prefill);
    if maybe_ignored(f) {
        // A release that does not drop it has failed the room long since.
        return open.then(|| {
            Draft::new(Class::AbortIgnored, Confidence::Possible, Who::Prefill, Some(Kind::Status)).done(f)
        });
    }
    if f.metadata_at.is_none() && f.request.never(Role::Prefill) {
        // Nobody waits for anything: should the request come after all, the room is looked at anew.
        return Some(Draft::new(Class::NotApplicable, Confidence::Possible, Who::Nobody, None).done(f));
    }
    None
}

/// A request and nothing else.
fn without_metadata(f: &Facts) -> Option<Judgement> {
    let leg = f.request.leg(f.role);
    let open = f.request.is_open(f.role);
    // Of a batch whose answer has begun for another room it waits all the same, if the answer's end has not passed unseen.
    if !open && leg.is_none_or(|l| l.ended.is_some() || l.out_of_sight) {
        return None;
    }
    let begun = leg.map_or(f.since, |l| l.begun);
    let timer = bootstrap_timer(f, begun).filter(|t| t.at > f.now);
    let draft = |class, confidence, who| {
        Draft::new(class, confidence, who, Some(Kind::Metadata)).ends(timer.clone()).done(f)
    };
    if f.role == Role::Prefill && !f.has_decode && f.request.never(Role::Decode) {
        return Some(draft(Class::MetadataMissing, Confidence::Possible, Who::Router));
    }
    let [_, none_waits] = f.request.none_waits;
    if none_waits {
        // Its server may still be at work on it: no count of its scheduler shows that.
        let late = open && f.now.since(begun).saturating_sub(f.request.stood) >= f.limits.ceiling;
        let confidence = if late { Confidence::Likely } else { Confidence::Possible };
        return Some(draft(Class::MetadataMissing, confidence, Who::Decode));
    }
    if let Some(confidence) = decode_stalled(f, begun) {
        return Some(draft(Class::EngineStalled, confidence, Who::Decode));
    }
    // Decode takes pages for its requests in turn; later ones of which it has asked show that it has some.
    let passed = f.request.later_asked >= OVERTAKEN;
    let expired = bootstrap_applies(f.backend, f.releases)
        && f.now.since(begun) >= f.limits.bootstrap_timeout.saturating_add(f.limits.ceiling);
    if passed || expired {
        return Some(draft(Class::MetadataMissing, Confidence::Possible, Who::Decode));
    }
    Some(draft(Class::Queued, Confidence::Possible, Who::Decode))
}

/// `prefill_complete`: prefill has computed and said so, and decode does not ask. Here decode has had the request since before.
fn computed_without_metadata(f: &Facts) -> Option<Judgement> {
    let computed = f.computed_at?;
    let draft = |class, confidence| {
        let ends = bootstrap_timer(f, f.since).filter(|t| t.at > f.now);
        Draft::new(class, confidence, Who::Decode, Some(Kind::Metadata)).ends(ends).done(f)
    };
    if !f.request.is_open(f.role) {
        return None;
    }
    let [_, none_waits] = f.request.none_waits;
    if none_waits {
        let late = f.now.since(computed).saturating_sub(f.request.stood) >= f.limits.ceiling;
        return Some(draft(
            Class::MetadataMissing,
            if late { Confidence::Likely } else { Confidence::Possible },
        ));
    }
    if let Some(confidence) = decode_stalled(f, computed) {
        return Some(draft(Class::EngineStalled, confidence));
    }
    let [_, waiting] = f.request.waiting;
    let waits = waiting.is_some_and(|n| n > 0) && f.request.later_asked < OVERTAKEN;
    waits.then(|| draft(Class::Queued, Confidence::Possible))
}

/// Whether decode's scheduler stands still: its server answers, all the time since `since`, with numbers that it wrote before, and no
/// step takes as long. It has asked for nothing since either. It may do so on purpose where a call that pauses it can have passed
/// unseen.
fn decode_stalled(f: &Facts, since: Mono) -> Option<Confidence> {
    let long = |at: Mono| f.now.since(at).saturating_sub(f.request.stood) >= f.limits.ceiling;
    let stands = f.decode_wrote.is_some_and(long)
        && long(since)
        && f.request.later_asked == 0
        && f.request.stopped.is_none();
    stands.then_some(if f.decode_may_be_paused { Confidence::Possible } else { Confidence::Likely })
}

fn transfer(f: &Facts) -> Option<Judgement> {
    if f.role == Role::Decode {
        return None;
    }
    let draft = |class, confidence, who| {
        Draft::new(class, confidence, who, Some(Kind::Status)).ends(waiting_timer(f))
    };
    if f.request.never(Role::Prefill) {
        // M40: it cannot fail what it never got. The request may still wait at the server's door.
        let j = draft(Class::PeerNotTold, Confidence::Possible, Who::Nobody);
        return Some(j.act_on(Who::Decode).done(f));
    }
    if queued(f) {
        return None;
    }
    let computes = f.engine_idle == Some(false) || judge_gpus::works_off_a_queue(f);
    if computes && !overtaken(f) && !judge_spans::computed(f) {
        return Some(draft(Class::Queued, Confidence::Possible, Who::Prefill).done(f));
    }
    let dropped = abort_effect(f.backend, f.releases) == AbortEffect::Dropped;
    if f.abort.is_some() && dropped && f.request.is_open(Role::Prefill) {
        return Some(draft(Class::AbortIgnored, Confidence::Possible, Who::Prefill).done(f));
    }
    None
}

/// Passed by rooms that came later. Where too few of the pair have concluded to know what is usual, the open request is
/// the second source.
fn overtaken(f: &Facts) -> bool {
    let warm = f.samples >= WARM || f.request.is_open(Role::Prefill);
    f.others.overtaken >= OVERTAKEN && warm
}

/// Whether prefill is shown not to queue or compute a room although it computes. At a moment nothing waited there, so what
/// had been asked for long before was computed then or was done; rooms that came after that moment, with as many pages,
/// are done themselves. One that is computed in chunks takes the room of each batch first (`add_chunked_req`,
/// `managers/schedule_policy.py` of 0.5.23), so it was not computed: it is being handed over, and its session's later
/// rooms have passed it there.
fn passed(f: &Facts) -> bool {
    f.others.passed >= OVERTAKEN && f.request.is_open(Role::Prefill)
}

/// Whether prefill is shown not to queue or compute a room of which no page count tells how long it takes.
fn neither_queued_nor_computing(f: &Facts) -> bool {
    let a = f.abort.map_or(f.since, |a| a.at);
    let long = f.now.since(a).saturating_sub(f.request.stood) >= COMPUTED;
    // The next in turn and short, or passed by requests whose length is not known.
    let alone = !f.request.ahead && f.pages <= SHORT_PROMPT;
    f.engine_idle == Some(true)
        || overtaken(f)
        || (long && f.engine_idle != Some(false) && (alone || f.request.later_finished >= OVERTAKEN))
}

/// Whether counters that stand still speak of this room: the engine has its request, and its pages can have been moved by now,
/// which no counter tells.
fn stuck(f: &Facts) -> bool {
    f.engine_idle == Some(true)
        && !f.request.not_come
        && f.running() >= f.limits.floor.saturating_add(f.pages.saturating_mul(PAGE))
}

/// Raises what a second source settles.
pub(super) fn weigh(f: &Facts, mut j: Judgement) -> Judgement {
    // What is not pinned yet waits for its engine to go on.
    let stands = f.request.stopped.is_some() && f.pinned_since.is_none();
    if j.confidence != Confidence::Possible || stands {
        return j;
    }
    // What moves may be this very room.
    if judge_moving::withholds(f, j.class) {
        return j;
    }
    let likely = match j.class {
        Class::AbortBeforeEntry => {
            let asked = f.metadata_at.is_some() || f.completeness != Completeness::Full;
            f.request.is_open(Role::Prefill) && (!asked || neither_queued_nor_computing(f))
        }
        Class::AbortIgnored => f.request.is_open(Role::Prefill) && (passed(f) || f.engine_idle == Some(true)),
        // A prompt that computes, or that priorities keep waiting, is overtaken as well, and its request is open as well:
        // only the engine's own numbers exclude both.
        Class::TransferNotConcluded | Class::TransferWorkerSilent if judge_gpus::silent(f) => true,
        Class::TransferNotConcluded | Class::TransferWorkerSilent | Class::ReceiverSilent => {
            passed(f) || stuck(f) || judge_spans::computed(f)
        }
        _ => false,
    };
    if likely {
        j.confidence = Confidence::Likely;
    }
    j
}
