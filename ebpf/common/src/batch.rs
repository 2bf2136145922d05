//! Records of the optional probes on Mooncake's transfer engine (`ebpf/programs/src/probes.rs`).

/// Bytes of the request vector that one record carries: a whole number of requests in each layout that is known (48 and
/// 56 bytes a request), and with the head a round number.
pub const PIECE: usize = 4032;

/// Pieces of one vector that are shipped at most; what is behind them is only counted, by the length of the vector.
pub const PIECES: u64 = 128;

/// [`Batch::kind`].
pub mod kind {
    /// A piece of the requests of a batch that is being submitted.
    pub const SUBMIT: u32 = 1;
    /// The engine asks to free a batch: it is over, or given up.
    pub const FREE: u32 = 2;
    /// A batch is being submitted, and its requests cannot be read.
    pub const UNREADABLE: u32 = 3;
}

/// Index of a counter.
pub mod counter {
    /// Runs of the program at `submitTransfer`.
    pub const SUBMITS: u32 = 0;
    /// Time of all of them, nanoseconds.
    pub const SUBMIT_NANOS: u32 = 1;
    /// Runs of the program at `freeBatchID`.
    pub const FREES: u32 = 2;
    /// Time of all of them, nanoseconds.
    pub const FREE_NANOS: u32 = 3;
    /// Records that the full ring refused.
    pub const RING_FULL: u32 = 4;
    /// How many counters there are.
    pub const COUNT: u32 = 5;
}

/// Head of a record; behind it, of a [`kind::SUBMIT`], [`Batch::len`] bytes of requests as they lie in the caller's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// `CLOCK_MONOTONIC`, nanoseconds: the same in all pieces of a vector.
    pub at: u64,
    /// The engine's own name for the batch: the address of its description, used again after it was freed.
    pub batch: u64,
    /// Length of the whole vector, bytes.
    pub total: u64,
    /// Where in it this piece begins.
    pub offset: u64,
    /// Process.
    pub tgid: u32,
    /// Thread.
    pub tid: u32,
    /// [`kind`].
    pub kind: u32,
    /// Length of this piece.
    pub len: u32,
    /// Rounds the head up.
    pub pad: [u64; 2],
}

/// Length of [`Batch`].
pub const HEAD: usize = 64;

const _: () = assert!(size_of::<Batch>() == HEAD && PIECE.is_multiple_of(48) && PIECE.is_multiple_of(56));
