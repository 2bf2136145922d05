//! What the engine's own spans say of a room that is silent on the wire.
//!
//! Pure. A stage's span is sent when the stage has ended: one that is missing says nothing by itself, the one before it that
//! has come says that prefill neither queues nor computes this room any more. A scheduler that has failed or aborted the request
//! has let it go, which the span of its thread says.

use crate::verdict::facts::Facts;

/// Whether prefill has computed this room, as its scheduler says, and has had the time since in which the KV cache is handed
/// over: no queueing and no computing is in it any more, so the ceiling holds.
pub(super) fn computed(f: &Facts) -> bool {
    let limit = f.threshold.min(f.limits.ceiling);
    f.spans.transferred.is_none() && f.spans.computed.is_some_and(|at| f.now.since(at) >= limit)
}

/// Sentences of evidence.
pub(super) fn evidence(f: &Facts, lines: &mut Vec<String>) {
    let Some(at) = f.spans.computed else { return };
    let when = if at >= f.opened_at {
        format!("at {}", f.moment(at))
    } else {
        "before its first message".to_owned()
    };
    lines.push(match f.spans.transferred {
        None => format!(
            "prefill's scheduler says that it had computed the room {when} (span prefill_forward), and no transfer span has come since; it has not let the request go"
        ),
        Some(done) if done >= f.opened_at => format!(
            "prefill's scheduler says that the KV cache was handed over at {} (span prefill_transfer_kv_cache)",
            f.moment(done)
        ),
        Some(_) => return,
    });
}
