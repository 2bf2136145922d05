//! Other readings of the same evidence, and what would settle each.
//!
//! Pure. The sets are those of docs/verdicts.md, "What one host can tell apart", for frames and TCP alone.

use crate::rooms::model::{Completeness, Role};
use crate::sglang::message::{Backend, Release};
use crate::verdict::explain_requests;
use crate::verdict::facts::Facts;
use crate::verdict::judge::{Judgement, Who, maybe_ignored};
use crate::verdict::model::{Candidate, Class, Confidence};

const REQUEST: &str = "the request at prefill's HTTP port: still open, ended, or never begun";
const LOADS: &str = "prefill's queue counts and progress counters (/v1/loads): waiting, computing, or still";
const THREADS: &str = "prefill's threads: the receive or transfer thread gone while the process lives";

const PAUSED: &str = "whoever runs decode: whether it was told to pause (POST /pause_generation, a weight update) while no agent looked";

const fn reading(
    class: Class,
    modes: &'static [&'static str],
    owed_by: Option<Role>,
    would_settle: &'static str,
) -> Candidate {
    Candidate { class, modes, owed_by, would_settle }
}

const P: Option<Role> = Some(Role::Prefill);
const D: Option<Role> = Some(Role::Decode);

/// Mori before 0.5.19 drops ABORT.
const IGNORED: Candidate = reading(Class::AbortIgnored, &["M6"], P, "prefill's release");

/// All other readings of `j`, most likely first.
pub(crate) fn candidates(f: &Facts, j: &Judgement) -> Vec<Candidate> {
    let mut list = match j.class {
        Class::ReceiverSilent if j.owes == Who::Decode && f.thread.is_some() => decode_takes_nothing_in(),
        // Its scheduler writes nothing: no queue is worked off, whatever it was that it last counted.
        Class::EngineStalled if j.owes == Who::Decode && f.unread_decode.is_none() => {
            let paused = f.decode_may_be_paused.then(|| reading(Class::Paused, &["M34"], D, PAUSED));
            paused.into_iter().chain(missing()).collect()
        }
        Class::ReceiverSilent | Class::EngineStalled if j.owes == Who::Decode => decode_reads_nothing(),
        // Prefill has answered: that it queues, computes or is stuck is out.
        Class::StatusLost if f.unsent => {
            vec![reading(Class::PeerLost, &["M32"], D, "whether decode's process lives (GET /health)")]
        }
        Class::TransferNotConcluded
        | Class::EngineStalled
        | Class::TransferWorkerSilent
        | Class::ReceiverSilent
        | Class::StatusLost
        | Class::AbortIgnored
        | Class::StagingReplyMissing
        | Class::DuplicateRoom => silent_prefill(f),
        Class::ConcludedButHeld => held(),
        Class::AwaitingPrefill => awaiting(f),
        Class::AbortBeforeEntry => aborted(f),
        Class::MetadataIncomplete => incomplete(),
        Class::MetadataMissing => missing(),
        // Without a room's frames, also what only decode's host can tell.
        Class::Queued if f.metadata_at.is_none() => missing(),
        Class::RanksDisagree => disagree(f),
        Class::PeerLost => lost(f),
        Class::StaleEndpoint => {
            vec![reading(Class::PeerLost, &["M33"], P, "whether prefill's process lives (GET /health)")]
        }
        Class::Unknown if abort_alone(f) => {
            vec![reading(Class::AbortBeforeEntry, &["M1", "M44"], P, REQUEST), older()]
        }
        Class::Unknown if maybe_ignored(f) => vec![IGNORED],
        _ => Vec::new(),
    };
    list.retain(|c| c.class != j.class);
    explain_requests::exclude(f, j, &mut list);
    if f.backend == Some(Backend::Mori) {
        // Its receive loop survives what it cannot read: M4, M18 and M38 are the other backends'.
        list.retain(|c| c.class != Class::ReceiverSilent);
    }
    // A proven fact leaves no other reading.
    if j.confidence == Confidence::Certain {
        list.clear();
    }
    list
}

fn silent_prefill(f: &Facts) -> Vec<Candidate> {
    let mut list = vec![
        reading(Class::TransferNotConcluded, &["M28", "M29"], P, LOADS),
        reading(Class::TransferWorkerSilent, &["M20", "M21"], P, THREADS),
        reading(Class::PeerNotTold, &["M11", "M37"], None, REQUEST),
        reading(Class::Queued, &[], P, LOADS),
    ];
    if !f.decode_reached || f.refused.is_some() || f.connecting.is_some() {
        list.push(reading(
            Class::StatusLost,
            &["M22", "M23"],
            P,
            "connects of prefill to decode's endpoint (resets, SYN without answer), or decode's agent",
        ));
    }
    list.push(reading(Class::ReceiverSilent, &["M4", "M18", "M38"], P, THREADS));
    list.push(reading(Class::EngineStalled, &["M43", "M34"], P, LOADS));
    let held: &'static [&'static str] =
        if f.backend == Some(Backend::Nixl) { &["M15", "M17"] } else { &["M15"] };
    list.push(reading(
        Class::ConcludedButHeld,
        held,
        P,
        "prefill's inflight count (/v1/loads) after its request was answered",
    ));
    if f.staging_wait.is_some() {
        list.insert(
            0,
            reading(Class::StagingReplyMissing, &["M14"], D, "STAGING_RSP, or decode's warning log"),
        );
    }
    if f.backend == Some(Backend::Mori) && f.releases.is_some_and(|r| r.min < Release::new(0, 5, 19, 0)) {
        list.push(IGNORED);
    }
    list
}

/// Bytes lie unread at decode.
fn decode_reads_nothing() -> Vec<Candidate> {
    let threads = "decode's threads: the one that reads STATUS gone, or all of them held";
    vec![
        reading(Class::ReceiverSilent, &["M19"], D, threads),
        reading(Class::EngineStalled, &["M43"], D, threads),
    ]
}

/// STATUS came to decode, and its thread is gone.
fn decode_takes_nothing_in() -> Vec<Candidate> {
    let count = "decode's transfer count (/v1/loads): whether the room is among it, or decode generates without streaming";
    vec![
        reading(Class::CompletionNotObservable, &[], None, count),
        reading(Class::ConcludedButHeld, &["M15"], D, count),
    ]
}

fn awaiting(f: &Facts) -> Vec<Candidate> {
    let mut list = vec![
        reading(Class::PeerNotTold, &["M10", "M11", "M37", "M40"], None, REQUEST),
        reading(Class::TransferNotConcluded, &["M28", "M29"], P, "an agent at prefill"),
        reading(Class::TransferWorkerSilent, &["M20", "M21"], P, "an agent at prefill, or its threads"),
        reading(Class::StatusLost, &["M22", "M23"], P, "an agent at prefill: STATUS sent or not"),
        reading(Class::ReceiverSilent, &["M4", "M18", "M38"], P, "an agent at prefill, or its threads"),
        reading(Class::RanksDisagree, &["M30"], P, "an agent at prefill"),
        reading(Class::Queued, &[], P, LOADS),
    ];
    if f.required.is_some_and(|r| r > 1) || !f.has_prefill {
        list.push(reading(
            Class::MetadataIncomplete,
            &["M7", "M8"],
            D,
            "METADATA of every decode rank: an agent at prefill, or at the other decode hosts",
        ));
    }
    list
}

fn aborted(f: &Facts) -> Vec<Candidate> {
    let held: &'static [&'static str] =
        if matches!(f.backend, Some(Backend::Mooncake | Backend::Mori)) { &["M15"] } else { &["M17"] };
    let mut list = vec![
        reading(
            Class::NotApplicable,
            &[],
            None,
            "the request at prefill's HTTP port: ended or never begun means that a client hung up and \
             nothing is owed",
        ),
        reading(Class::ConcludedButHeld, held, P, "prefill's inflight count (/v1/loads) and its release"),
        reading(Class::TransferWorkerSilent, &["M20", "M21"], P, THREADS),
    ];
    if abort_alone(f) {
        list.insert(0, older());
    }
    if f.backend == Some(Backend::Nixl) {
        list.push(reading(
            Class::ReceiverSilent,
            &["M4"],
            P,
            "whether the rank answers any later room (NIXL 0.5.13–0.5.15 dies of an ABORT)",
        ));
    }
    list
}

/// Whether an ABORT is all that was seen of a room which may have begun before the agent looked.
fn abort_alone(f: &Facts) -> bool {
    f.completeness == Completeness::Preexisting && f.abort.is_some_and(|a| a.before_metadata)
}

const fn older() -> Candidate {
    reading(
        Class::NotApplicable,
        &[],
        None,
        "prefill's debug log: `Received abort notification for room` followed by `marked as Failed` means that \
         METADATA went before the agent looked and that the room is over",
    )
}

fn incomplete() -> Vec<Candidate> {
    vec![
        reading(Class::MetadataMissing, &["M25", "M26"], D, "that decode rank's prealloc queue (/v1/loads)"),
        reading(Class::StaleEndpoint, &["M24", "M41"], D, "that decode rank's connects to prefill"),
        reading(Class::DuplicateRoom, &["M8", "M9"], None, "the router's log: a room number used twice"),
        reading(Class::Queued, &["M25"], D, "free KV pages of that decode rank (/v1/loads)"),
    ]
}

/// METADATA has not come.
fn missing() -> Vec<Candidate> {
    vec![
        reading(Class::Queued, &["M25"], D, "decode's prealloc queue and free KV pages (/v1/loads)"),
        reading(
            Class::MetadataMissing,
            &["M26", "M35", "M36"],
            D,
            "decode's prealloc queue: empty (/v1/loads)",
        ),
        reading(Class::StaleEndpoint, &["M24"], D, "decode's connects to prefill's old port"),
        reading(Class::MetadataMissing, &[], None, "the request at decode's HTTP port: whether it ever came"),
    ]
}

/// All was told, and the request is still open.
fn held() -> Vec<Candidate> {
    vec![
        reading(Class::EngineStalled, &["M43", "M34"], P, LOADS),
        reading(Class::RanksDisagree, &["M30"], P, "an agent at the other ranks of prefill"),
    ]
}

fn disagree(f: &Facts) -> Vec<Candidate> {
    let mut list = vec![
        reading(Class::TransferWorkerSilent, &["M20", "M21"], P, "threads of the silent rank"),
        reading(Class::ReceiverSilent, &["M4", "M18", "M38"], P, "threads of the silent rank"),
        reading(Class::StatusLost, &["M22", "M23"], P, "an agent at the silent rank's host"),
        reading(Class::EngineStalled, &["M43"], P, "the silent rank's process: stack, GPU"),
    ];
    if f.elsewhere.is_some() {
        let all = "an agent at the other ranks of prefill: all have concluded";
        list.push(reading(Class::ConcludedButHeld, &["M15", "M17"], P, all));
    }
    list
}

fn lost(f: &Facts) -> Vec<Candidate> {
    let mut list = match f.role {
        Role::Prefill => silent_prefill(f),
        Role::Decode => awaiting(f),
    };
    if f.got == 0 || f.required.is_some_and(|r| r != f.got) {
        list.insert(0, reading(Class::MetadataIncomplete, &["M7"], D, "whether that decode rank lives"));
    }
    list
}
