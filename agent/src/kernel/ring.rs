//! Plain data crossing the border to the kernel: reading records out of the ring, and the wrappers that let
//! shared structures be map keys, values and constants.
#![allow(unsafe_code, reason = "reinterprets plain repr(C) integers as bytes and back; see each SAFETY line")]

use std::mem::size_of;

use roomtrace_common::batch::{Batch, HEAD};
use roomtrace_common::{COST_SLOTS, Cost, Endpoint, RECORD, Record, Settings, program};

/// Lets shared structures be used as map keys, values and constants (aya's trait cannot be implemented for
/// another crate's type).
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(super) struct Plain<T>(pub(super) T);

// SAFETY: repr(C) structures of integers without implicit padding; every bit pattern is a value.
unsafe impl aya::Pod for Plain<Settings> {}
// SAFETY: as above.
unsafe impl aya::Pod for Plain<Endpoint> {}
// SAFETY: as above.
unsafe impl aya::Pod for Plain<Costs> {}

/// The programs' own cost: per CPU, per program.
pub(super) type Costs = [[Cost; program::COUNT]; COST_SLOTS];

/// The head of a record.
pub(super) fn record(head: &[u8]) -> Option<Record> {
    if head.len() != RECORD {
        return None;
    }
    // SAFETY: the length is that of `Record` (asserted where it is defined), which is plain repr(C) integers;
    // `read_unaligned` asks nothing of the alignment.
    Some(unsafe { head.as_ptr().cast::<Record>().read_unaligned() })
}

/// The head of a record of the optional probes.
pub(super) fn batch(head: &[u8]) -> Option<Batch> {
    if head.len() != HEAD {
        return None;
    }
    // SAFETY: the length is that of `Batch` (asserted where it is defined), which is plain repr(C) integers;
    // `read_unaligned` asks nothing of the alignment.
    Some(unsafe { head.as_ptr().cast::<Batch>().read_unaligned() })
}

/// The bytes of a record, as the programs would write them.
#[cfg(test)]
pub(super) fn bytes_of(record: &Record) -> &[u8] {
    // SAFETY: a reference to plain integers without padding, read as bytes for as long as it lives.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(record).cast(), size_of::<Record>()) }
}

const _: () = assert!(size_of::<Plain<Settings>>() == size_of::<Settings>());
