//! What makes a socket matter before any byte of it is seen: whose it is, its ports, where it goes.

use roomtrace_common::PREFIXES;

use crate::kernel::{Sock, Task, peek};
use crate::maps::{ENDPOINTS, PORTS, PROCESSES, setting};

/// Whether this is an engine process: by the name of the thread or of the process's first thread, or because user space
/// says so.
#[inline(always)]
pub unsafe fn engine(task: Task) -> bool {
    if matches(peek(task.comm())) {
        return true;
    }
    let leader = task.leader();
    if !leader.0.is_null() && matches(peek(leader.comm())) {
        return true;
    }
    PROCESSES.get(task.tgid()).is_some()
}

/// Whether one of the two ports is among those to be followed.
#[inline(always)]
pub unsafe fn port(sk: Sock) -> bool {
    PORTS.get(sk.local_port()).is_some() || PORTS.get(sk.peer_port()).is_some()
}

/// Whether the other end is one that user space named.
#[inline(always)]
pub unsafe fn endpoint(sk: Sock) -> bool {
    let key = sk.peer();
    ENDPOINTS.get(key).is_some()
}

#[inline(always)]
fn matches(comm: [u64; 2]) -> bool {
    let used = setting!(prefixes_used);
    for n in 0..PREFIXES {
        if n as u32 >= used {
            break;
        }
        let prefix = setting!(prefixes[n]);
        if comm[0] & prefix.mask[0] == prefix.value[0] && comm[1] & prefix.mask[1] == prefix.value[1] {
            return true;
        }
    }
    false
}
