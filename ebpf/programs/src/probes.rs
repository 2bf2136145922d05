//! Optional probes on Mooncake's transfer engine: what a process asks it to move, and when it is done with it.
//!
//! An object of its own, loaded only where the operator has switched the probes on. They read the caller's memory and never
//! change it. No policy: which layout the requests have, and whose they are, user space knows.
//!
//! Arguments as the C++ functions take them on x86-64 (System V): both return a `Status` through a hidden pointer, so `rdi` is
//! its place, `rsi` the engine, `rdx` the batch, and `rcx` of `submitTransfer` the vector, whose first two words are where its
//! elements begin and end.
#![no_std]
#![no_main]

use aya_ebpf::helpers::generated as g;
use aya_ebpf::macros::{map, uprobe};
use aya_ebpf::maps::{PerCpuArray, RingBuf};
use aya_ebpf::programs::ProbeContext;
use roomtrace_common::batch::{Batch, HEAD, PIECE, PIECES, counter, kind};

/// Records for user space; its size is set when loading.
#[map]
static BATCHES: RingBuf = RingBuf::with_byte_size(1 << 20, 0);

/// See [`counter`].
#[map]
static PROBE_COUNTERS: PerCpuArray<u64> = PerCpuArray::with_max_entries(counter::COUNT, 0);

/// A record with requests.
#[repr(C)]
struct Piece {
    head: Batch,
    requests: [u8; PIECE],
}

/// `TransferEngine::submitTransfer(BatchID, const std::vector<TransferRequest>&)`.
#[uprobe]
pub fn rt_submit(ctx: ProbeContext) -> u32 {
    let begun = now();
    if let (Some(batch), Some(vector)) = (ctx.arg::<u64>(2), ctx.arg::<*const u64>(3)) {
        unsafe { submitted(begun, batch, vector) };
    }
    count(counter::SUBMITS, 1);
    count(counter::SUBMIT_NANOS, now() - begun);
    0
}

/// `TransferEngine::freeBatchID(BatchID)`.
#[uprobe]
pub fn rt_free(ctx: ProbeContext) -> u32 {
    let begun = now();
    if let Some(batch) = ctx.arg::<u64>(2) {
        unsafe { short(begun, batch, kind::FREE, 0) };
    }
    count(counter::FREES, 1);
    count(counter::FREE_NANOS, now() - begun);
    0
}

/// The vector in pieces, in order.
#[inline(always)]
unsafe fn submitted(at: u64, batch: u64, vector: *const u64) {
    let mut bounds = [0u64; 2];
    if read(bounds.as_mut_ptr().cast(), size_of::<[u64; 2]>() as u32, vector as u64) != 0 || bounds[1] < bounds[0] {
        return short(at, batch, kind::UNREADABLE, 0);
    }
    let total = bounds[1] - bounds[0];
    let mut n = 0;
    while n < PIECES {
        let offset = n * PIECE as u64;
        if offset >= total && n > 0 {
            return;
        }
        let left = total - offset;
        let len = if left > PIECE as u64 { PIECE as u64 } else { left };
        if !piece(at, batch, total, offset, bounds[0] + offset, len as u32) {
            return;
        }
        n += 1;
    }
}

/// Ships one piece; `false`: it could not be read, or there was no room for it.
#[inline(always)]
unsafe fn piece(at: u64, batch: u64, total: u64, offset: u64, from: u64, len: u32) -> bool {
    let Some(mut entry) = BATCHES.reserve::<Piece>(0) else {
        count(counter::RING_FULL, 1);
        return false;
    };
    let record = entry.as_mut_ptr();
    let failed = read((&raw mut (*record).requests).cast(), len, from) != 0;
    let kind = if failed { kind::UNREADABLE } else { kind::SUBMIT };
    (*record).head = head(at, batch, kind, total);
    (*record).head.offset = offset;
    (*record).head.len = if failed { 0 } else { len };
    entry.submit(0);
    !failed
}

/// A record without requests.
#[inline(always)]
unsafe fn short(at: u64, batch: u64, kind: u32, total: u64) {
    match BATCHES.reserve::<Batch>(0) {
        Some(mut entry) => {
            entry.as_mut_ptr().write(head(at, batch, kind, total));
            entry.submit(0);
        }
        None => count(counter::RING_FULL, 1),
    }
}

#[inline(always)]
unsafe fn head(at: u64, batch: u64, kind: u32, total: u64) -> Batch {
    let task = g::bpf_get_current_pid_tgid();
    Batch { at, batch, total, offset: 0, tgid: (task >> 32) as u32, tid: task as u32, kind, len: 0, pad: [0; 2] }
}

/// Reads at most [`PIECE`] bytes of the caller's memory.
#[inline(always)]
unsafe fn read(to: *mut core::ffi::c_void, len: u32, from: u64) -> i64 {
    // Through the stack: the verifier follows the very value that is compared and then handed over.
    let len = core::ptr::read_volatile(&raw const len);
    if len > PIECE as u32 {
        return -1;
    }
    g::bpf_probe_read_user(to, len, from as *const core::ffi::c_void)
}

#[inline(always)]
fn now() -> u64 {
    unsafe { g::bpf_ktime_get_ns() }
}

#[inline(always)]
fn count(index: u32, by: u64) {
    if let Some(value) = PROBE_COUNTERS.get_ptr_mut(index) {
        unsafe { *value += by };
    }
}

const _: () = assert!(size_of::<Piece>() == HEAD + PIECE);

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
