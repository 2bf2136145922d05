//! Sockets that were open before: one walk over the open files of all tasks, in every network namespace.

use roomtrace_common::{mark, program, state};

use crate::announce::announce;
use crate::cost::Timer;
use crate::kernel::{Sock, TCP, Task, load};
use crate::maps::{enter, known, remember, setting};
use crate::state::{CLOSE, LISTEN, SYN_RECV, SYN_SENT};
use crate::watch;
use aya_ebpf::helpers::generated as g;

/// `struct bpf_iter__task_file` (`kernel/bpf/task_iter.c`).
#[repr(C)]
pub struct File {
    meta: *const u8,
    task: *const u8,
    number: u32,
    pad: u32,
    file: *const u8,
}

/// Runs for every open file of every task.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task_file")]
pub unsafe extern "C" fn rt_found(file: *const File) -> i32 {
    let timer = Timer::start(program::FOUND);
    found(file);
    timer.stop();
    0
}

/// The TCP socket that this file is, or null.
#[inline(always)]
pub unsafe fn tcp(at: *const File) -> Sock {
    const NONE: Sock = Sock(core::ptr::null());
    let file = (*at).file;
    if file.is_null() {
        return NONE;
    }
    let socket = g::bpf_sock_from_file(file.cast_mut().cast()) as *const u8;
    if socket.is_null() {
        return NONE;
    }
    let sk = Sock(load(socket, setting!(at.socket_sk)));
    if sk.0.is_null() || sk.protocol() != TCP { NONE } else { sk }
}

#[inline(always)]
unsafe fn found(at: *const File) {
    let task = Task((*at).task);
    let sk = tcp(at);
    if sk.0.is_null() || task.0.is_null() {
        return;
    }
    let tcp = sk.tcp();
    if tcp.0.is_null() || !(watch::engine(task) || watch::port(sk)) {
        return;
    }
    let is = match sk.state() {
        LISTEN => state::LISTENING,
        SYN_SENT => state::CONNECTING,
        CLOSE | SYN_RECV => return,
        _ => state::PENDING,
    };
    let mut socket = known(sk);
    if socket.is_null() {
        socket = remember(sk);
        if socket.is_null() {
            return;
        }
        (*socket).cookie = sk.cookie();
        (*socket).look_ups = 1;
        enter(socket, is);
    }
    if (*socket).flags & mark::OURS == 0 {
        // Known, but as anybody's: it is silent yet, or goes to a watched endpoint.
        (*socket).budget = setting!(found_budget);
    }
    (*socket).flags |= mark::WATCHED | mark::OURS;
    announce(sk, tcp, socket, [tcp.write_seq(), tcp.copied_seq()], Some(task));
}
