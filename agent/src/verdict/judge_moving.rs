//! What bytes that leave prefill say of a room where no other room explains them.
//!
//! Pure. Counters that stand still, a scheduler that is done with a room, a GPU that runs no kernel: all of that excludes computing and
//! queueing, and none of it excludes a transfer that goes on, slowly. Movement raises nothing; it holds back.

use crate::rooms::model::{Phase, Role};
use crate::verdict::facts::{Facts, Mover};
use crate::verdict::judge::Judgement;
use crate::verdict::judge_gpus::bytes;
use crate::verdict::model::Class;

/// Whether the room may be what moves, so that its class is not more than silence.
pub(super) fn withholds(f: &Facts, class: Class) -> bool {
    let waits = matches!(
        class,
        Class::TransferNotConcluded
            | Class::TransferWorkerSilent
            | Class::ReceiverSilent
            | Class::AbortIgnored
    );
    waits && f.role == Role::Prefill && f.phase == Phase::Transfer && f.moving.is_some()
}

/// A sentence of evidence.
pub(super) fn evidence(f: &Facts, j: &Judgement, lines: &mut Vec<String>) {
    let Some(m) = f.moving.as_ref().filter(|_| withholds(f, j.class)) else { return };
    let what = match &m.by {
        Mover::Gpu(name) => name.to_string(),
        Mover::Port(name) => format!("RDMA port {name}"),
        Mover::Process(pid) => format!("prefill process {pid} over TCP"),
    };
    let whose = match m.others {
        None => "how many other rooms its engine handed over in that time is not known: it may be this one's KV cache, slow and healthy"
            .to_owned(),
        Some(0) => "no other room of its engine was handed over in that time: it may be this one's KV cache, slow and healthy".to_owned(),
        Some(n) => format!(
            "every other room that its engine hands over ({n}) is overdue as well: one of them moves, and it may be this one"
        ),
    };
    lines.push(format!(
        "{} a second left {what} from {} to {}, and {whose}",
        bytes(m.rate),
        f.moment(m.from),
        f.moment(m.to)
    ));
}
