//! The clock that the programs stamp their records with.

use crate::event::Mono;

/// `CLOCK_MONOTONIC` now: the clock of `bpf_ktime_get_ns`.
#[allow(unsafe_code, reason = "clock_gettime has no safe wrapper in the standard library")]
pub fn monotonic() -> Mono {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is valid for writing; this clock exists on every Linux, so the call cannot fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    Mono(seconds.saturating_mul(1_000_000_000).saturating_add(u64::try_from(now.tv_nsec).unwrap_or(0)))
}
