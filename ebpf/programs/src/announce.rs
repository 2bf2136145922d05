//! Tells user space of a socket once, before anything else of it.

use aya_ebpf::helpers::generated as g;
use roomtrace_common::{Socket, kind, mark};

use crate::emit::{self, States};
use crate::kernel::{Sock, Task, Tcp};
use crate::state::{ESTABLISHED, SYN_RECV, SYN_SENT};

/// Tells of it unless that was done. `stand`: where its two streams stand.
#[inline(always)]
pub unsafe fn announce(sk: Sock, tcp: Tcp, socket: *mut Socket, stand: [u32; 2], who: Option<Task>) {
    if (*socket).flags & mark::ANNOUNCED != 0 {
        return;
    }
    (*socket).flags |= mark::ANNOUNCED;
    let told = if (*socket).flags & mark::FRESH != 0 {
        let opened = (*socket).flags & mark::ACTIVE != 0;
        States {
            kind: kind::STATE,
            old: if opened { SYN_SENT } else { SYN_RECV },
            new: ESTABLISHED,
            at: (*socket).at,
            base: None,
            stand: Some((*socket).base),
            more: [0, 0],
        }
    } else {
        let state = sk.state();
        States {
            kind: kind::FOUND,
            old: state,
            new: state,
            at: g::bpf_ktime_get_ns(),
            base: base(tcp),
            stand: Some(stand),
            more: [0, 0],
        }
    };
    emit::states(sk, tcp, (*socket).cookie, &told, who);
}

/// First byte of each direction, where that is certain: the socket's own counter of acknowledged bytes includes
/// its SYN on the side that connected, and which side that was the kernel does not say. So only while nothing
/// has been sent, or the SYN alone.
#[inline(always)]
unsafe fn base(tcp: Tcp) -> Option<[u32; 2]> {
    let sent = tcp.first_sent()?;
    let received = tcp.first_received()?;
    let written = tcp.write_seq();
    if written.wrapping_sub(sent) <= 1 { Some([written, received]) } else { None }
}
