//! What the engines' connections carry that are no control connections: TCP's own byte counters, read at their end and in a walk over
//! open files as in the search. No call on them is looked at.

use aya_ebpf::helpers::generated as g;
use roomtrace_common::{Socket, flag, judgement, kind, mark, program, reason, state};

use crate::cost::Timer;
use crate::emit;
use crate::kernel::Tcp;
use crate::maps::{JUDGEMENTS, known, setting};
use crate::search::{self, File};

/// Runs for every open file.
#[unsafe(no_mangle)]
#[unsafe(link_section = "iter/task_file")]
pub unsafe extern "C" fn rt_carried(file: *const File) -> i32 {
    let timer = Timer::start(program::CARRIED);
    carried(file);
    timer.stop();
    0
}

#[inline(always)]
unsafe fn carried(file: *const File) {
    let sk = search::tcp(file);
    if sk.0.is_null() {
        return;
    }
    let socket = known(sk);
    if socket.is_null() || !carries(socket) {
        return;
    }
    let tcp = sk.tcp();
    if !tcp.0.is_null() {
        tell(tcp, socket, sk.state());
    }
}

/// The connection is closed: what it carried in the end.
#[inline(always)]
pub unsafe fn last(tcp: Tcp, socket: *const Socket) {
    if carries(socket) {
        tell(tcp, socket, crate::state::CLOSE);
    }
}

/// Whether it is such a connection, or begins like one and is only not judged yet, or is judged one and has made no call since.
#[inline(always)]
unsafe fn carries(socket: *const Socket) -> bool {
    let (now, flags) = ((*socket).state, (*socket).flags);
    if setting!(carriers) == 0 || flags & mark::CLOSED != 0 {
        return false;
    }
    if now == state::CARRIER {
        return true;
    }
    if flags & mark::OURS == 0 {
        return false;
    }
    if now == state::PENDING && flags & mark::STRANGE != 0 {
        return true;
    }
    let cookie = (*socket).cookie;
    now == state::HTTP && JUDGEMENTS.get(cookie).is_some_and(|answer| *answer == judgement::NEITHER)
}

#[inline(always)]
unsafe fn tell(tcp: Tcp, socket: *const Socket, new: u8) {
    let record = emit::reserve::<0>();
    if record.is_null() {
        return;
    }
    let (acked, received) = (tcp.bytes_acked(), tcp.bytes_received());
    (*record).at = g::bpf_ktime_get_ns();
    (*record).cookie = (*socket).cookie;
    emit::who_and_where(record, socket);
    (*record).len = 0;
    (*record).end = 0;
    (*record).write_seq = acked as u32;
    (*record).snd_una = (acked >> 32) as u32;
    (*record).copied_seq = received as u32;
    (*record).rcv_nxt = (received >> 32) as u32;
    (*record).base = [0, 0];
    (*record).error = 0;
    (*record).kind = kind::CARRIED;
    (*record).direction = 0;
    (*record).reason = reason::NONE;
    let base = if (*socket).flags & mark::FRESH != 0 { flag::BASE } else { 0 };
    (*record).flags = flag::TASK | base | (*socket).family as u8;
    emit::old_and_new(record, new, new);
    emit::submit(record);
}
