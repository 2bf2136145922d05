//! What the transfer engine was asked to move for a room, as JSON: `transfer_engine` of the record.
//!
//! Pure. Bytes submitted are not bytes that arrived. What was not measured is `null`, never zero.

use serde::Serialize;

use super::clock::Clock;
use crate::rooms::model::{RoomBatches, RoomSnapshot};

#[derive(Clone, Debug, Serialize)]
pub(super) struct BatchesJson {
    role: &'static str,
    pid: u32,
    /// Bytes of the batches submitted for this room's pages and slots; `null`: none was seen, and some may have been missed.
    bytes: Option<u64>,
    /// Nothing of it can have been missed. Else there may be more.
    complete: bool,
    batches: u64,
    requests: u64,
    /// Batches that the engine is not done with.
    open: u64,
    /// Batches that could also be another room's: in none of these numbers.
    ambiguous: u64,
    /// Pages that METADATA named.
    pages: u64,
    first: Option<String>,
    last: Option<String>,
    /// When the engine was done with one, or gave it up.
    last_over: Option<String>,
}

/// `None`: no process of the room was probed when it was asked for.
pub(super) fn batches(room: &RoomSnapshot, clock: &Clock) -> Option<Vec<BatchesJson>> {
    let all: Vec<_> = room.batches.iter().map(|b| entry(b, clock)).collect();
    Some(all).filter(|all| !all.is_empty())
}

fn entry(b: &RoomBatches, clock: &Clock) -> BatchesJson {
    BatchesJson {
        role: "prefill",
        pid: b.pid,
        bytes: (b.batches > 0 || b.whole).then_some(b.bytes),
        complete: b.whole,
        batches: b.batches,
        requests: b.requests,
        open: b.batches.saturating_sub(b.over),
        ambiguous: b.ambiguous,
        pages: b.pages,
        first: b.first.map(|at| clock.rfc3339(at)),
        last: b.last.map(|at| clock.rfc3339(at)),
        last_over: b.last_over.map(|at| clock.rfc3339(at)),
    }
}
