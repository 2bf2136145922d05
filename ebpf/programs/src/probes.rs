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

use core::ffi::c_void;
use core::mem::MaybeUninit;

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
        unsafe { short(begun, batch, kind::FREE) };
    }
    count(counter::FREES, 1);
    count(counter::FREE_NANOS, now() - begun);
    0
}

/// A vector under way.
#[repr(C)]
struct Vector {
    at: u64,
    batch: u64,
    begin: u64,
    total: u64,
}

/// The vector in pieces, in order.
#[inline(always)]
unsafe fn submitted(at: u64, batch: u64, vector: *const u64) {
    let mut bounds = MaybeUninit::<[u64; 2]>::uninit();
    let failed = read(bounds.as_mut_ptr().cast(), size_of::<[u64; 2]>() as u32, vector as u64) != 0;
    // The helper fills it whether it fails or not.
    let bounds = bounds.assume_init();
    if failed || bounds[1] < bounds[0] {
        return short(at, batch, kind::UNREADABLE);
    }
    let mut vector = Vector { at, batch, begin: bounds[0], total: bounds[1] - bounds[0] };
    // The kernel's own loop (5.17): its body is verified once, not once for each turn.
    g::bpf_loop(PIECES as u32, batch_piece as *mut c_void, (&raw mut vector).cast(), 0);
}

/// Ships one piece; 1: there is nothing behind it, it could not be read, or there was no room for it. Not exported: the kernel wants
/// callbacks static. The loader finds it by its symbol, which `cargo xtask build-ebpf` keeps by its name.
unsafe extern "C" fn batch_piece(n: u64, vector: *mut Vector) -> i64 {
    let total = (*vector).total;
    let offset = n * PIECE as u64;
    if offset >= total && n > 0 {
        return 1;
    }
    let left = total - offset;
    let len = if left > PIECE as u64 { PIECE as u32 } else { left as u32 };
    let Some(mut entry) = BATCHES.reserve::<Piece>(0) else {
        count(counter::RING_FULL, 1);
        return 1;
    };
    let record = entry.as_mut_ptr();
    let failed = read((&raw mut (*record).requests).cast(), len, (*vector).begin + offset) != 0;
    let kind = if failed { kind::UNREADABLE } else { kind::SUBMIT };
    fill(&raw mut (*record).head, (*vector).at, (*vector).batch, kind);
    (*record).head.total = total;
    (*record).head.offset = offset;
    (*record).head.len = if failed { 0 } else { len };
    entry.submit(0);
    failed as i64
}

/// A record without requests.
#[inline(always)]
unsafe fn short(at: u64, batch: u64, kind: u32) {
    match BATCHES.reserve::<Batch>(0) {
        Some(mut entry) => {
            let record = entry.as_mut_ptr();
            fill(record, at, batch, kind);
            (&raw mut (*record).total).write_volatile(0);
            (&raw mut (*record).offset).write_volatile(0);
            (&raw mut (*record).len).write_volatile(0);
            entry.submit(0);
        }
        None => count(counter::RING_FULL, 1),
    }
}

/// What all records have. Field by field, and zeros volatile: else the compiler calls loops for them.
#[inline(always)]
unsafe fn fill(record: *mut Batch, at: u64, batch: u64, kind: u32) {
    let task = g::bpf_get_current_pid_tgid();
    (*record).at = at;
    (*record).batch = batch;
    (*record).tgid = (task >> 32) as u32;
    (*record).tid = task as u32;
    (*record).kind = kind;
}

/// Reads at most [`PIECE`] bytes of the caller's memory.
#[inline(always)]
unsafe fn read(to: *mut c_void, len: u32, from: u64) -> i64 {
    // Through the stack: the verifier follows the very value that is compared and then handed over.
    let len = core::ptr::read_volatile(&raw const len);
    if len > PIECE as u32 {
        return -1;
    }
    g::bpf_probe_read_user(to, len, from as *const c_void)
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
