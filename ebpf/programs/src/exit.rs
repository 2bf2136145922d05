//! The end of a thread of an engine process.

use aya_ebpf::EbpfContext as _;
use aya_ebpf::helpers::generated as g;
use aya_ebpf::programs::BtfTracePointContext;
use roomtrace_common::{Ends, kind, reason};

use crate::emit;
use crate::kernel::{Task, peek};
use crate::maps::setting;
use crate::watch;

/// `sched_process_exit(struct task_struct *p, bool group_dead)`; older kernels give `p` alone. In the context of the
/// thread that ends, with `exit_code` set and its name and process still its own. A process's first thread stays until
/// the last one has gone, so its name can be read whichever ends first.
#[inline(always)]
pub unsafe fn ended(ctx: &BtfTracePointContext) {
    let task = Task(ctx.arg(0));
    if !watch::engine(task) {
        return;
    }
    // Without the argument, two threads that end at the same moment may both find that none is left.
    let gone = if setting!(group_dead) == 0 { task.none_lives() } else { second(ctx) != 0 };
    let record = emit::reserve::<0>();
    if record.is_null() {
        return;
    }
    let name: [u64; 2] = peek(task.comm());
    (*record).at = g::bpf_ktime_get_ns();
    (*record).cookie = 0;
    (*record).caller = emit::caller(task);
    (*record).ends = Ends {
        local: core::mem::transmute::<[u64; 2], [u8; 16]>(name),
        peer: [0; 16],
        local_port: 0,
        peer_port: 0,
        netns: 0,
    };
    (*record).len = 0;
    (*record).end = 0;
    (*record).write_seq = 0;
    (*record).snd_una = 0;
    (*record).copied_seq = 0;
    (*record).rcv_nxt = 0;
    (*record).base = [0, 0];
    (*record).error = task.exit_code();
    (*record).kind = kind::EXIT;
    (*record).direction = 0;
    (*record).reason = reason::NONE;
    (*record).flags = roomtrace_common::flag::TASK;
    emit::old_and_new(record, 0, u8::from(gone));
    emit::submit(record);
}

/// The second argument, volatile: the compiler must not load it before the branch that the verifier cuts off where the
/// kernel has only one.
#[inline(always)]
unsafe fn second(ctx: &BtfTracePointContext) -> u64 {
    core::ptr::read_volatile(ctx.as_ptr().cast::<u64>().add(1))
}
