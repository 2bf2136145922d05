//! Changes of TCP state: connections that open, are refused, reset or closed, and listeners.

use aya_ebpf::helpers::generated as g;
use roomtrace_common::{Socket, counter, kind, mark, state};

use crate::announce::announce;
use crate::carried;
use crate::emit::{self, States};
use crate::kernel::{MPTCP, Sock, TCP, Task, Tcp};
use crate::maps::{count, enter, known, leave, remember, setting};
use crate::watch;

/// `include/net/tcp_states.h`.
pub const ESTABLISHED: u8 = 1;
pub const SYN_SENT: u8 = 2;
pub const SYN_RECV: u8 = 3;
pub const TIME_WAIT: u8 = 6;
pub const CLOSE: u8 = 7;
pub const LISTEN: u8 = 10;
pub const NEW_SYN_RECV: u8 = 12;

/// `sk` goes from state `old` to `new`.
#[inline(always)]
pub unsafe fn changed(sk: Sock, old: i32, new: i32) {
    let (old, new) = (old as u8, new as u8);
    let protocol = sk.protocol();
    if protocol != TCP {
        if protocol == MPTCP && new == ESTABLISHED {
            count(counter::MPTCP);
        }
        return;
    }
    let tcp = sk.tcp();
    if tcp.0.is_null() {
        return;
    }
    if new == ESTABLISHED {
        return established(sk, tcp, old);
    }
    // In the caller's context, both of them.
    if new == SYN_SENT {
        if watch::engine(Task::current()) || watch::port(sk) {
            begin(sk, tcp, old, new, state::CONNECTING, mark::ACTIVE | mark::OURS);
        } else if watch::endpoint(sk) {
            begin(sk, tcp, old, new, state::CONNECTING, mark::ACTIVE);
        }
        return;
    }
    if new == LISTEN {
        if watch::engine(Task::current()) || watch::port(sk) {
            begin(sk, tcp, old, new, state::LISTENING, mark::OURS);
        }
        return;
    }
    let socket = known(sk);
    if socket.is_null() {
        return;
    }
    if old == LISTEN && new == SYN_RECV {
        // A connection to a watched listener: what is remembered is the listener's, copied by the kernel.
        (*socket).state = state::NONE;
        (*socket).flags = mark::WATCHED | mark::OURS;
        return;
    }
    if new == CLOSE {
        carried::last(tcp, socket);
    }
    if (*socket).flags & mark::ANNOUNCED != 0 && (*socket).state != state::CARRIER {
        tell(sk, tcp, socket, old, new, None);
    }
    if new == CLOSE {
        leave(socket);
    }
}

/// A connect attempt or a listener that is to be watched.
#[inline(always)]
unsafe fn begin(sk: Sock, tcp: Tcp, old: u8, new: u8, as_what: u32, flags: u32) {
    let socket = remember(sk);
    if socket.is_null() {
        return;
    }
    (*socket).cookie = sk.cookie();
    enter(socket, as_what);
    (*socket).flags = flags | mark::WATCHED | mark::ANNOUNCED;
    tell(sk, tcp, socket, old, new, Some(Task::current()));
}

#[inline(always)]
unsafe fn established(sk: Sock, tcp: Tcp, old: u8) {
    let socket = remember(sk);
    if socket.is_null() {
        return;
    }
    // Left over from the connect attempt or the listener, if those were watched.
    let ours = (*socket).flags & mark::OURS != 0 || watch::port(sk);
    let watched = ours || (*socket).flags & mark::WATCHED != 0;
    (*socket).cookie = sk.cookie();
    (*socket).at = g::bpf_ktime_get_ns();
    (*socket).base = [tcp.write_seq(), tcp.copied_seq()];
    (*socket).look_ups = 1;
    (*socket).answered = 0;
    (*socket).budget = if watched { setting!(found_budget) } else { setting!(fresh_budget) };
    enter(socket, state::PENDING);
    let mut flags = mark::FRESH;
    if old == SYN_SENT {
        flags |= mark::ACTIVE;
    }
    if watched {
        flags |= mark::WATCHED;
    }
    if ours {
        flags |= mark::OURS;
    }
    (*socket).flags = flags;
    if watched {
        announce(sk, tcp, socket, [0, 0], None);
    }
}

#[inline(always)]
unsafe fn tell(sk: Sock, tcp: Tcp, socket: *const Socket, old: u8, new: u8, who: Option<Task>) {
    let at = g::bpf_ktime_get_ns();
    let change = States { kind: kind::STATE, old, new, at, base: None, stand: None, more: [0, 0] };
    emit::states(sk, tcp, (*socket).cookie, &change, who);
}
