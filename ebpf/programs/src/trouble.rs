//! Trouble that TCP itself has with a watched socket: sent again, reset.
//!
//! A socket that user space has not been told of leaves after one look-up, so the rate is that of the trouble of watched
//! connections. A black hole is no flood: TCP waits twice as long each time. Where losses are repaired in a row, one
//! record in [`TROUBLE_EVERY`] stands for all. A reset ends its connection, and a connection has only one end.

use aya_ebpf::helpers::{self, generated as g};
use roomtrace_common::{Socket, TROUBLE_EVERY, counter, kind, mark, state, trouble};

use crate::emit::{self, States};
use crate::kernel::Sock;
use crate::maps::{count, known};
use crate::state::{LISTEN, NEW_SYN_RECV, TIME_WAIT};

/// `sk` sends a segment again.
#[inline(always)]
pub unsafe fn retransmitted(sk: Sock) {
    let socket = told(sk);
    if socket.is_null() {
        return;
    }
    let now = g::bpf_ktime_get_ns();
    if now - (*socket).trouble_at < TROUBLE_EVERY {
        count(counter::RETRANSMISSIONS_MERGED);
        return;
    }
    (*socket).trouble_at = now;
    tell(sk, socket, trouble::RETRANSMITTED, now);
}

/// The first argument of a program is null, although the verifier of some kernels believes that it never is, and takes
/// out the test: so a copy is tested of which it knows nothing.
#[inline(always)]
pub unsafe fn is_null(arguments: *const u64) -> bool {
    !matches!(helpers::bpf_probe_read_kernel(arguments), Ok(first) if first != 0)
}

/// `sk` sent or got a reset.
#[inline(always)]
pub unsafe fn reset(sk: Sock, which: u8) {
    let socket = told(sk);
    if !socket.is_null() {
        tell(sk, socket, which, g::bpf_ktime_get_ns());
    }
}

/// What is remembered of `sk`, if user space knows it. Null also for what is no full socket, whose later members are
/// not there, and for listeners: what they answer with a reset was never theirs, and a scan would be a flood.
#[inline(always)]
unsafe fn told(sk: Sock) -> *mut Socket {
    let state = sk.state();
    if state == TIME_WAIT || state == NEW_SYN_RECV || state == LISTEN {
        return core::ptr::null_mut();
    }
    let socket = known(sk);
    if !socket.is_null()
        && ((*socket).flags & mark::ANNOUNCED == 0 || (*socket).state == state::CARRIER)
    {
        return core::ptr::null_mut();
    }
    socket
}

#[inline(always)]
unsafe fn tell(sk: Sock, socket: *const Socket, which: u8, at: u64) {
    let tcp = sk.tcp();
    if tcp.0.is_null() {
        return;
    }
    let new = sk.state();
    let states = States { kind: kind::TROUBLE, old: which, new, at, base: None, stand: None, more: [0, 0] };
    emit::states(sk, tcp, (*socket).cookie, &states, None);
}
