//! Words for what requests, pauses and an engine's own numbers say, and the readings that they exclude.
//!
//! Pure.

use crate::event::Mono;
use crate::rooms::model::{LegEnd, LegView, Role};
use crate::verdict::explain::seconds;
use crate::verdict::facts::Facts;
use crate::verdict::judge::{Judgement, OVERTAKEN};
use crate::verdict::model::{Candidate, Class, Confidence};

/// Sentences of evidence.
pub(super) fn evidence(f: &Facts, j: &Judgement, lines: &mut Vec<String>) {
    for role in [Role::Prefill, Role::Decode] {
        match f.request.leg(role) {
            Some(leg) => lines.push(leg_words(f, role, leg)),
            None if f.request.never(role) => lines.push(format!(
                "no request of this room came to {} on this host, whose every request was seen since before the room began",
                role.label()
            )),
            None => {}
        }
    }
    if let Some(at) = f.request.duplicate {
        lines.push(format!(
            "a second request with this room came at {} while the first was open",
            f.moment(at)
        ));
    }
    if let Some((came, (at, status))) = f.request.refused.filter(|_| f.request.duplicate.is_none()) {
        let how = status.map_or_else(|| "was given up".to_owned(), |s| format!("was refused with {s}"));
        lines.push(format!(
            "another request with this room came at {} while the first was open, and {how} at {}: that says nothing of the first",
            f.moment(came),
            f.moment(at)
        ));
    }
    if f.request.held && f.request.maybe_more {
        lines.push(
            "not all of the request was seen: it may be for more rooms (n, several prompts), and wait for those"
                .to_owned(),
        );
    }
    if let Some(rank) = f.request.dp_rank {
        lines.push(format!("DP rank {rank} of prefill registered for it"));
    }
    pauses(f, lines);
    others(f, j, lines);
    crate::verdict::judge_spans::evidence(f, lines);
}

fn leg_words(f: &Facts, role: Role, leg: &LegView) -> String {
    let request = plain_rid(f).map_or_else(|| "the request".to_owned(), |rid| format!("request {rid}"));
    let begun = format!("{request} came to {} {}", role.label(), moment(f, leg.begun));
    match leg.ended {
        Some((at, how)) => {
            let status = leg.status.map(|s| format!(" with {s}")).unwrap_or_default();
            format!("{begun} and {}{status} {}", end_words(how), moment(f, at))
        }
        None if leg.out_of_sight => format!("{begun}; it has been lost sight of since"),
        None => {
            let byte = leg.first_byte.map_or_else(
                || "no byte of its answer has come".to_owned(),
                |at| format!("its answer began {}", moment(f, at)),
            );
            format!("{begun} and is open for {} s: {byte}", seconds(f.now.since(leg.begun)))
        }
    }
}

/// A moment that may lie before the room's first sign.
fn moment(f: &Facts, at: Mono) -> String {
    if at >= f.opened_at {
        format!("at {}", f.moment(at))
    } else {
        format!("{} s before the room's first message", seconds(f.opened_at.since(at)))
    }
}

const fn end_words(how: LegEnd) -> &'static str {
    match how {
        LegEnd::Finished => "was answered",
        LegEnd::Aborted => "was answered with an abort",
        LegEnd::Error => "was answered with an error",
        LegEnd::Answered => "was answered (with what was not seen)",
        LegEnd::ClientHungUp => "its client hung up",
        LegEnd::EngineHungUp => "the engine hung up",
        LegEnd::HungUp => "its connection ended",
    }
}

fn pauses(f: &Facts, lines: &mut Vec<String>) {
    if let Some(s) = f.request.stopped {
        lines.push(format!("the {} engine is {} since {}", s.role.label(), s.why, moment(f, s.since)));
    }
    if f.request.stood > 0 {
        lines.push(format!(
            "its engines stood still, or worked off what had piled up meanwhile, for {} s of that time, which are not counted",
            seconds(f.request.stood)
        ));
    }
}

fn others(f: &Facts, j: &Judgement, lines: &mut Vec<String>) {
    let r = &f.request;
    match f.engine_idle {
        Some(true) => lines.push(
            "prefill's progress counters stand still with requests in flight and none waiting: it neither computes nor queues"
                .to_owned(),
        ),
        Some(false) => lines.push("prefill's progress counters move: it computes".to_owned()),
        None => {}
    }
    if r.is_open(Role::Prefill) && j.class == Class::AbortBeforeEntry {
        lines.push(
            "the open request excludes a client that hung up on both sides: prefill aborts a request whose client is gone"
                .to_owned(),
        );
        if f.metadata_at.is_some() && !r.ahead && j.confidence == Confidence::Likely {
            lines.push("no request that came to prefill before it is still under way".to_owned());
        }
    }
    if r.later_finished >= OVERTAKEN && j.role == Role::Prefill {
        lines.push(format!("{} requests that came to prefill later have been answered", r.later_finished));
    }
    if j.class == Class::MetadataMissing && r.later_asked >= OVERTAKEN {
        lines.push(format!("METADATA of {} rooms whose request came later has come", r.later_asked));
    }
    if let ([_, Some(n)], Class::MetadataMissing | Class::Queued) = (r.waiting, j.class) {
        lines.push(format!("decode says that {n} requests wait in it"));
    }
}

/// Takes out the readings that the request excludes.
pub(super) fn exclude(f: &Facts, j: &Judgement, list: &mut Vec<Candidate>) {
    if f.request.is_open(Role::Prefill) {
        // It has not ended there, so decode need not be told; and nobody has hung up.
        list.retain(|c| c.class != Class::PeerNotTold);
        if j.confidence > Confidence::Possible {
            list.retain(|c| c.class != Class::NotApplicable);
        }
    }
    if j.confidence > Confidence::Possible {
        list.retain(|c| c.class != Class::Queued);
    }
    if f.engine_idle == Some(true) {
        list.retain(|c| c.class != Class::EngineStalled);
    }
}

/// The request id, where it can stand in a sentence or a command as it is.
pub(super) fn plain_rid(f: &Facts) -> Option<&str> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
    f.request.rid.as_deref().filter(|rid| !rid.is_empty() && rid.chars().all(plain))
}
