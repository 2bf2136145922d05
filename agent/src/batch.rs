//! What an optional probe on Mooncake's transfer engine sees: a process submits a batch of writes, or is done with it.
//!
//! Pure data, and the reading of it. The layout of a request follows from the version of the library, which whoever attached
//! the probe knows ([`Layout`]); what does not fit it is refused, never guessed at.

use crate::event::Mono;

/// One record of the probes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch<'a> {
    /// When the function was entered; the same in all pieces of a batch.
    pub at: Mono,
    /// Process, in the host's numbering.
    pub pid: u32,
    /// Thread.
    pub tid: u32,
    /// The engine's own name for the batch; used again after it was freed.
    pub id: u64,
    /// What happens to it.
    pub step: Step<'a>,
}

/// What happens to a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// Its requests, or a piece of them, as they lie in memory.
    Submit {
        /// Bytes of all of them.
        total: u64,
        /// Where this piece begins.
        offset: u64,
        /// The piece.
        requests: &'a [u8],
    },
    /// Its requests could not be read.
    Unreadable,
    /// The engine is done with it: it is over, or was given up.
    Free,
}

/// Where the members of a `TransferRequest` stand (`mooncake-transfer-engine/include/transport/transport.h`, the same from 0.3.0
/// to 0.3.13.post1 up to `length`): opcode 0 (0 READ, 1 WRITE), source 8, target segment 16, target address 24, length 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Bytes from one request to the next.
    pub stride: u64,
}

/// One request of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Something is written at the other side, not read from it.
    pub write: bool,
    /// Address there.
    pub address: u64,
    /// Bytes.
    pub len: u64,
}

impl Layout {
    /// The requests of a piece. `None`: it is not laid out so.
    pub fn read(self, piece: &[u8]) -> Option<Vec<Request>> {
        let stride = usize::try_from(self.stride).ok().filter(|s| *s >= 40)?;
        let requests = piece.chunks(stride).map(|one| {
            (one.len() == stride).then_some(())?;
            let word = |at: usize| Some(u64::from_ne_bytes(one.get(at..at + 8)?.try_into().ok()?));
            let code = u32::from_ne_bytes(one.get(..4)?.try_into().ok()?);
            let (address, len) = (word(24)?, word(32)?);
            // User space ends below 2^57 (five levels of page tables).
            let sane = code <= 1 && len > 0 && address.checked_add(len).is_some_and(|end| end <= 1 << 57);
            sane.then_some(Request { write: code == 1, address, len })
        });
        requests.collect()
    }
}
