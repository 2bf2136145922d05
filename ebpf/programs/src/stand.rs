//! Where the sockets stand that user space asks for: a walk over open files as in the search, of the processes that user
//! space names to the kernel.
//!
//! Not over the sockets that are remembered, which would be shorter: there are kernels that refuse every iterator over a
//! map whose values it could change.

use aya_ebpf::helpers::generated as g;
use roomtrace_common::{kind, program, state};

use crate::cost::Timer;
use crate::emit::{self, States};
use crate::maps::{ASKED, known};
use crate::search::{self, File};

/// Runs for every open file.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task_file")]
pub unsafe extern "C" fn rt_stand(file: *const File) -> i32 {
    let timer = Timer::start(program::STAND);
    stands(file);
    timer.stop();
    0
}

#[inline(always)]
unsafe fn stands(file: *const File) {
    let sk = search::tcp(file);
    if sk.0.is_null() {
        return;
    }
    let socket = known(sk);
    if socket.is_null() || (*socket).state == state::NONE {
        return;
    }
    // Taken out of the table, so that a file that two tasks share is told of once.
    if ASKED.remove((*socket).cookie).is_err() {
        return;
    }
    let tcp = sk.tcp();
    if tcp.0.is_null() {
        return;
    }
    let now = sk.state();
    let stand = States {
        kind: kind::STAND,
        old: now,
        new: now,
        at: g::bpf_ktime_get_ns(),
        base: None,
        stand: None,
        more: [tcp.retransmits(), tcp.snd_nxt()],
    };
    emit::states(sk, tcp, (*socket).cookie, &stand, None);
}
