//! The one message that is all msgpack: an entry of the PP consensus store (SGLang
//! `disaggregation/pp_consensus_store.py` ≥ 0.5.22), `[kind, pp rank, room, status or nil]`.
//!
//! Pure. Reads exactly that array of unsigned integers and nothing else.

use super::message::{KvPoll, PpState};
use super::msgpack::uint;

/// msgpack: fixarray of four.
pub(super) const ARRAY_OF_FOUR: u8 = 0x94;
/// msgpack: nil.
const NIL: u8 = 0xc0;
/// Kinds of entry.
const PUT: u64 = 1;
const DELETE: u64 = 2;

/// Reads the frame; `None` when it is something else.
pub(super) fn read(frame: &[u8]) -> Option<PpState> {
    let [ARRAY_OF_FOUR, rest @ ..] = frame else { return None };
    let (kind, rest) = uint(rest)?;
    let (pp_rank, rest) = uint(rest)?;
    let (room, rest) = uint(rest)?;
    let pp_rank = u32::try_from(pp_rank).ok()?;
    let status = match (kind, rest) {
        (DELETE, [NIL]) => None,
        (PUT, _) => {
            let (status, []) = uint(rest)? else { return None };
            Some(KvPoll::from_wire(status)?)
        }
        _ => return None,
    };
    Some(PpState { room, pp_rank, status })
}
