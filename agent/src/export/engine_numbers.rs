//! What a room's engines said in numbers while it was open, as JSON: `engine_numbers` of the record.
//!
//! Pure. Numbers are of a whole engine; what it does not tell is `null`, never zero.

use serde::Serialize;

use super::clock::Clock;
use crate::rooms::model::RoomSnapshot;

#[derive(Clone, Debug, Serialize)]
pub(super) struct EngineNumbersJson {
    role: &'static str,
    /// First and last answer of this content, one after the other.
    from: String,
    to: String,
    answers: u32,
    /// Requests whose KV is being handed over.
    inflight: Option<u64>,
    /// Requests before that, whose peer has not answered yet.
    bootstrap: Option<u64>,
    waiting: Option<u64>,
    running: Option<u64>,
    paused: Option<u64>,
    /// Whether what grows while it computes did between these answers and the one before; `null`: not known.
    progress_moves: Option<bool>,
    /// Counts can be up to 30 s older than the answer.
    stale: bool,
}

/// Empty: they said nothing, or nobody asked.
pub(super) fn numbers(room: &RoomSnapshot, clock: &Clock) -> Vec<EngineNumbersJson> {
    let json = |n: &crate::rooms::model::EngineNumbers| EngineNumbersJson {
        role: n.role.label(),
        from: clock.rfc3339(n.from),
        to: clock.rfc3339(n.to),
        answers: n.answers,
        inflight: n.inflight,
        bootstrap: n.bootstrap,
        waiting: n.waiting,
        running: n.running,
        paused: n.paused,
        progress_moves: n.moves,
        stale: n.stale,
    };
    room.numbers.iter().map(json).collect()
}
