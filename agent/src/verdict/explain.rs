//! Words of a verdict: evidence, other readings, what to do. Made when someone reads it, never per message.
//!
//! Pure. Moments are given as seconds after the room was first seen (`+1.234 s`).

use std::net::SocketAddr;

use crate::event::{Mono, SECOND};
use crate::rooms::model::{Completeness, Phase, Role};
use crate::verdict::actions::actions;
use crate::verdict::candidates::candidates;
use crate::verdict::explain_network;
use crate::verdict::explain_requests;
use crate::verdict::explain_threads::{code, foreign_words, not_acknowledged, threads};
use crate::verdict::facts::{Dummies, Facts, Sent, Was};
use crate::verdict::judge::{
    AbortEffect, Judgement, OVERTAKEN, Who, abort_effect, acknowledges_abort, maybe_ignored, queued,
    unanswered_connect,
};
use crate::verdict::judge_gpus;
use crate::verdict::judge_moving;
use crate::verdict::model::{Class, Confidence, Party, Verdict};

impl Facts {
    /// The party that a judgement names.
    pub(crate) fn party(&self, who: Who) -> Option<Party> {
        match who {
            Who::Prefill => Some(self.prefill.clone()),
            Who::Decode => Some(self.decode.clone()),
            // Which one is not known without its REGISTER: never the one that has sent.
            Who::MissingDecode => Some(
                self.missing
                    .first()
                    .cloned()
                    .unwrap_or(Party { role: Some(Role::Decode), ..Party::default() }),
            ),
            Who::SilentPrefill => {
                let elsewhere = || self.elsewhere.as_ref().map(|e| &e.party);
                Some(self.untold.first().or_else(elsewhere).unwrap_or(&self.prefill).clone())
            }
            Who::Router => Some(Party::default()),
            Who::Nobody => None,
        }
    }

    /// A moment in words.
    pub(crate) fn moment(&self, at: Mono) -> String {
        format!("+{} s", seconds(at.since(self.opened_at)))
    }
}

/// Nanoseconds as seconds with three digits.
pub(crate) fn seconds(nanos: u64) -> String {
    format!("{}.{:03}", nanos / SECOND, nanos % SECOND / 1_000_000)
}

/// An endpoint in words.
pub(crate) fn named(party: &Party) -> String {
    let role = party.role.map_or("router or client", Role::label);
    let rank = party.rank.map(|r| format!(" rank {r}")).unwrap_or_default();
    let at = party.endpoint.map(|e: SocketAddr| format!(" at {e}")).unwrap_or_default();
    format!("{role}{rank}{at}")
}

/// The whole verdict.
pub(crate) fn explain(f: &Facts, j: &Judgement) -> Verdict {
    Verdict {
        class: j.class,
        confidence: j.confidence,
        owed_by: f.party(j.owes),
        act_on: f.party(j.act_on),
        expected: j.expected,
        candidates: candidates(f, j),
        ends_by_itself: j.ends.clone(),
        evidence: evidence(f, j),
        actions: actions(f, j),
        group: j.group,
        since: j.since,
    }
}

fn evidence(f: &Facts, j: &Judgement) -> Vec<String> {
    let mut lines = Vec::new();
    asked(f, &mut lines);
    explain_requests::evidence(f, j, &mut lines);
    judge_gpus::evidence(f, &mut lines);
    explain_network::evidence(f, &mut lines);
    judge_moving::evidence(f, j, &mut lines);
    abort(f, &mut lines);
    progress(f, j, &mut lines);
    delivery(f, &mut lines);
    threads(f, &mut lines);
    others(f, j, &mut lines);
    peers(f, &mut lines);
    limits(f, j, &mut lines);
    lines
}

fn asked(f: &Facts, lines: &mut Vec<String>) {
    let (prefill, decode) = (named(&f.prefill), named(&f.decode));
    if let Some(at) = f.bootstrap_at {
        lines.push(format!("BOOTSTRAP from {decode} to {prefill} at {}", f.moment(at)));
    }
    if let Some(at) = f.computed_at {
        lines.push(format!("STATUS 2 (computed, allocate now) from {prefill} at {}", f.moment(at)));
    }
    match f.metadata_at {
        Some(at) => {
            lines.push(format!(
                "METADATA ({} pages) from {decode} to {prefill} at {}",
                f.pages,
                f.moment(at)
            ));
        }
        None if f.prefill.endpoint.is_none() || f.decode.endpoint.is_none() => {
            lines.push("no METADATA of this room was seen".to_owned());
        }
        None => lines.push(format!("no METADATA of this room was seen between {decode} and {prefill}")),
    }
    if f.role == Role::Prefill && f.required.is_some_and(|r| r != f.got) {
        lines.push(format!(
            "{prefill} has METADATA of {} distinct sessions and waits for {}",
            f.got,
            f.required.unwrap_or_default()
        ));
    }
    for m in &f.missing {
        lines.push(format!("{} registered at {prefill} and has not sent METADATA of this room", named(m)));
    }
    if let Some(at) = f.duplicate {
        lines.push(format!(
            "a second METADATA of the same room and session with another buffer slot came at {} while the \
             first lived",
            f.moment(at)
        ));
    }
    match f.dummies {
        Dummies::Some => {}
        Dummies::All => {
            lines.push("only dummy ranks of this room are seen here: they owe nothing".to_owned());
        }
        Dummies::Unknown => lines.push(
            "an empty index frame of this layout means a dummy rank or a full cache hit: it cannot be told"
                .to_owned(),
        ),
    }
}

fn abort(f: &Facts, lines: &mut Vec<String>) {
    let Some(a) = f.abort else { return };
    let when = if a.before_metadata { "without METADATA before it" } else { "after METADATA" };
    lines.push(format!("ABORT from {} at {}, {when}", named(&f.decode), f.moment(a.at)));
    match a.acknowledged {
        Some(at) if a.before_metadata => lines.push(format!(
            "ABORT_ACK at {}: the receive loop lives, but an ABORT without effect is acknowledged too",
            f.moment(at)
        )),
        Some(at) => lines.push(format!("ABORT_ACK at {}", f.moment(at))),
        None if maybe_ignored(f) => lines.push(
            "mori before 0.5.19 drops ABORT and goes on, later releases fail the room: the messages do not tell which"
                .to_owned(),
        ),
        None if abort_effect(f.backend, f.releases) == AbortEffect::Dropped && !a.before_metadata => lines
            .push("mori before 0.5.19 drops ABORT as malformed: prefill goes on though decode has given up".to_owned()),
        None if a.generation => lines.push("no ABORT_ACK, though this ABORT asks for one".to_owned()),
        None => lines.push("no ABORT_ACK (an ABORT without generation need not get one)".to_owned()),
    }
}

fn progress(f: &Facts, j: &Judgement, lines: &mut Vec<String>) {
    for (party, status) in &f.told {
        lines.push(format!("{} said {}", named(party), status.name()));
    }
    for party in &f.untold {
        if !f.told.is_empty() {
            lines.push(format!("{} has said nothing", named(party)));
        }
    }
    if let Some(e) = f.elsewhere.as_ref().filter(|_| j.class == Class::RanksDisagree) {
        let known: Vec<_> = e.known.iter().map(ToString::to_string).collect();
        let known = if known.is_empty() { String::new() } else { format!(" ({})", known.join(", ")) };
        lines.push(format!(
            "prefill answers when all of at least {} ranks have concluded; {} of them are of this host, what the others{known} \
             have said is not seen here",
            e.ranks, e.seen
        ));
    }
    if !f.ambiguous.is_empty() {
        let list: Vec<_> = f.ambiguous.iter().map(ToString::to_string).collect();
        lines
            .push(format!("which of the prefill ranks at {} said what cannot be told here", list.join(", ")));
    }
    if let Some(at) = f.failed_inside {
        lines.push(format!("a pipeline rank of prefill reported Failed at {} inside prefill", f.moment(at)));
    }
    if let Some(at) = f.staging_wait {
        lines.push(format!("STAGING_REQ at {} has no STAGING_RSP", f.moment(at)));
    }
    if f.overdue() && !matches!(j.class, Class::NotApplicable) {
        lines.push(format!(
            "{} for {} s; overdue after {} s ({})",
            phase_words(f),
            seconds(f.running()),
            seconds(f.threshold),
            basis(f)
        ));
    }
}

fn phase_words(f: &Facts) -> &'static str {
    match f.phase {
        Phase::Conclude if f.unsent => "no STATUS seen to leave since prefill answered its request",
        Phase::Conclude if f.request.held && f.told.is_empty() => {
            "the request open since its ranks here were done"
        }
        Phase::Conclude if f.request.held => "the request open since the last STATUS of the ranks here",
        Phase::Bootstrap => "METADATA incomplete",
        Phase::Transfer => "no STATUS since METADATA was complete",
        Phase::Conclude if f.thread.is_some_and(|t| matches!(t.was, Was::Status(_))) => {
            "nothing of decode's since STATUS came"
        }
        Phase::Conclude => "not every STATUS there since the first one",
        Phase::Abort => "nothing in answer to ABORT",
        Phase::Compute => "no STATUS 2 since BOOTSTRAP",
        Phase::Done => "done",
    }
}

fn basis(f: &Facts) -> String {
    if f.samples < 100 {
        format!("the floor: only {} such phases of this pair were measured", f.samples)
    } else {
        format!("from {} such phases of this pair", f.samples)
    }
}

fn delivery(f: &Facts, lines: &mut Vec<String>) {
    for (what, sent) in [("METADATA", f.metadata_sent), ("STATUS", f.status_sent), ("ABORT", f.abort_sent)] {
        match sent {
            Sent::Unknown => {}
            Sent::Acknowledged(at) => lines.push(format!(
                "the peer's kernel has acknowledged the {what} sent at {}, which does not say that the peer read it",
                f.moment(at)
            )),
            Sent::Waiting { sent, read, again } => lines.push(not_acknowledged(f, what, (sent, read), again)),
            Sent::Lost { sent, at, error } => lines.push(format!(
                "{what} sent at {} was never acknowledged, and its connection ended at {} ({})",
                f.moment(sent),
                f.moment(at),
                errno(error)
            )),
        }
    }
    if let Some(at) = unanswered_connect(f) {
        lines.push(format!(
            "connect to {} is under way since {} and nobody answers it ({} s): what prefill has to tell decode waits for it",
            named(&f.decode),
            f.moment(at),
            f.now.since(at) / SECOND
        ));
    }
    if let Some(at) = f.cut.filter(|_| f.unsent) {
        lines.push(format!(
            "the last connection to {} ended {}, and none was made since",
            named(&f.decode),
            ago(f, at)
        ));
    }
    if let Some((at, error)) = f.refused {
        lines.push(format!(
            "connect to {} failed at {} ({}) and none has succeeded since",
            named(&f.decode),
            f.moment(at),
            errno(error)
        ));
    }
}

fn others(f: &Facts, j: &Judgement, lines: &mut Vec<String>) {
    if !matches!(f.phase, Phase::Transfer | Phase::Compute) {
        return;
    }
    let o = &f.others;
    if o.overtaken >= OVERTAKEN {
        lines.push(format!(
            "overtaken by at least {} rooms of the same session with as many pages and later METADATA",
            o.overtaken
        ));
    }
    if o.passed >= OVERTAKEN {
        lines.push(format!(
            "{} of them were asked for after prefill had said that nothing waits in it: this room was not waiting then, and \
             what is computed in chunks is not overtaken by as long prompts",
            o.passed
        ));
    }
    if j.class == Class::Queued && queued(f) {
        lines.push("rooms asked for earlier still conclude, in order: the queue drains".to_owned());
    } else if o.session_answers {
        lines.push("later rooms of the same rank and session were answered".to_owned());
    } else if o.rank_answers {
        lines.push(format!(
            "the rank answers later rooms of other sessions; {} of this session since its last answer are \
             unanswered",
            o.silent_in_session
        ));
    } else {
        let last = o.last_answer.map_or_else(|| "none was seen".to_owned(), |at| ago(f, at));
        lines.push(format!(
            "the rank has answered none of the {} rooms asked of it since its last answer ({last})",
            o.silent_at_rank
        ));
    }
    if let Some(x) = f.foreign {
        let what = foreign_words(&x);
        lines.push(format!("{what} came to {} from {}, {}", named(&f.prefill), x.peer, ago(f, x.at)));
    }
}

pub(crate) fn ago(f: &Facts, at: Mono) -> String {
    if at >= f.opened_at {
        format!("at {}", f.moment(at))
    } else {
        format!("{} s before the room began", seconds(f.opened_at.since(at)))
    }
}

fn peers(f: &Facts, lines: &mut Vec<String>) {
    for (lost, party) in [(f.prefill_lost, &f.prefill), (f.decode_lost, &f.decode)] {
        if let Some(l) = lost {
            if let Some(x) = l.exit {
                lines.push(format!(
                    "{}: its process {} ended {} ({})",
                    named(party),
                    x.tgid,
                    ago(f, x.at),
                    code(x.code)
                ));
                continue;
            }
            let what = if l.listener { "the listener closed" } else { "its last connection ended" };
            lines.push(format!("{}: {what} {}", named(party), ago(f, l.at)));
        }
    }
    if let Some(away) = f.restored {
        let passed = if f.completeness == Completeness::Lossy {
            ""
        } else {
            "; nothing that ends it can have passed meanwhile"
        };
        lines.push(format!(
            "the agent did not look from {} to {} (it was started again) and knows of earlier messages from its state \
             file{passed}",
            f.moment(away.from),
            f.moment(away.to)
        ));
    }
    match f.completeness {
        Completeness::Full => {}
        Completeness::Preexisting if f.abort.is_some_and(|a| a.before_metadata) => {
            lines.push(older_abort(f).to_owned());
        }
        Completeness::Preexisting => lines
            .push("the room may be older than the agent: messages before it cannot be excluded".to_owned()),
        Completeness::Partial => lines.push("some of its connections cannot be read".to_owned()),
        Completeness::Lossy => {
            lines.push("bytes were missed in a stretch that its messages can lie in".to_owned());
        }
    }
}

/// What METADATA before the agent's start would mean for an ABORT without any.
fn older_abort(f: &Facts) -> &'static str {
    match f.abort {
        Some(a) if a.generation => "METADATA went before the agent looked: this ABORT carries its generation",
        Some(a) if a.acknowledged.is_some() => {
            "METADATA can have gone before the agent looked, and an acknowledged ABORT mostly found its room"
        }
        _ if acknowledges_abort(f) => {
            "METADATA can have gone before the agent looked, but then this release would have acknowledged the ABORT"
        }
        _ => {
            "METADATA can have gone before the agent looked: where releases do not acknowledge an ABORT that found \
             its room, silence says nothing"
        }
    }
}

fn limits(f: &Facts, j: &Judgement, lines: &mut Vec<String>) {
    match j.class {
        Class::CompletionNotObservable => {
            lines.push(
                "this release does not say Success on the wire, and no request of the room is followed: silence says nothing"
                    .to_owned(),
            );
        }
        Class::TransferNotConcluded
        | Class::TransferWorkerSilent
        | Class::ReceiverSilent
        | Class::AbortIgnored
        | Class::AwaitingPrefill
            if j.confidence == Confidence::Possible =>
        {
            lines.push(
                "from frames alone a prefill that queues or computes looks the same: silence is `possible` only"
                    .to_owned(),
            );
        }
        Class::StagingReplyMissing => {
            lines.push("decode may wait for staging space that other rooms hold".to_owned());
        }
        Class::AbortBeforeEntry if !f.request.is_open(Role::Prefill) => {
            lines.push("a client that hung up on both sides looks the same from frames alone".to_owned());
        }
        _ => {}
    }
    if f.role == Role::Decode && !f.has_prefill {
        lines.push("prefill's side is not seen from this host".to_owned());
    }
}

/// The errno that a connection ended with (Linux, `include/uapi/asm-generic/errno.h`).
fn errno(error: u32) -> String {
    match error {
        0 => "closed".to_owned(),
        32 => "broken pipe".to_owned(),
        104 => "reset by peer".to_owned(),
        110 => "timed out".to_owned(),
        111 => "refused".to_owned(),
        113 => "no route to host".to_owned(),
        n => format!("errno {n}"),
    }
}
