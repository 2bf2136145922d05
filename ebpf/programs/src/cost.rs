//! What the programs themselves cost: every run counted, one in [`SAMPLE_EVERY`] timed.

use aya_ebpf::helpers::generated as g;
use roomtrace_common::{COST_SLOTS, Cost, SAMPLE_EVERY};

use crate::maps::COSTS;

/// Runs from the first line of a program to its last.
pub struct Timer {
    slot: *mut Cost,
    begun: u64,
}

impl Timer {
    #[inline(always)]
    pub fn start(program: usize) -> Self {
        unsafe {
            let cpu = g::bpf_get_smp_processor_id() as usize & (COST_SLOTS - 1);
            let slot = &raw mut COSTS[cpu][program];
            let runs = (*slot).runs + 1;
            (*slot).runs = runs;
            let begun = if runs & (SAMPLE_EVERY - 1) == 0 { g::bpf_ktime_get_ns() } else { 0 };
            Self { slot, begun }
        }
    }

    #[inline(always)]
    pub fn stop(self) {
        if self.begun != 0 {
            unsafe {
                (*self.slot).sampled += 1;
                (*self.slot).nanos += g::bpf_ktime_get_ns() - self.begun;
            }
        }
    }
}
