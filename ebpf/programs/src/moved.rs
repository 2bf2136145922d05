//! A call that moved bytes: is the socket watched, may the bytes be read, what became of its judgement.

use roomtrace_common::{Socket, counter, direction, judgement, mark, reason, state};

use crate::announce::announce;
use crate::call::{MSG_ERRQUEUE, MSG_PEEK, Source};
use crate::emit::{self, Moved};
use crate::greeting::{self, Greeting};
use crate::kernel::{Sock, Task, Tcp};
use crate::maps::{JUDGEMENTS, count, enter, forget, known};

/// Calls during which a judgement is still looked up after the greeting was recognised.
const PROBATION: u32 = 64;
/// What a call costs at least of the budget of a socket that nothing is known of.
const CALL: u32 = 1024;

/// A call on `sk` returned `result`.
#[inline(always)]
pub unsafe fn moved(sk: Sock, result: i32, flags: i32, way: u8) {
    let socket = known(sk);
    if socket.is_null() {
        return;
    }
    if result <= 0 || flags & (MSG_PEEK | MSG_ERRQUEUE) != 0 {
        return;
    }
    let now = (*socket).state;
    if now != state::PENDING && now != state::ZMTP {
        return;
    }
    let tcp = sk.tcp();
    if tcp.0.is_null() {
        return;
    }
    let len = result as u32;
    let task = Task::current();
    let moved = Moved { task, way, len, end: end(sk, tcp, way) };
    let mut source = Source::of(sk, task, len, flags, way);
    if !judge(sk, socket, &moved, &mut source) {
        return;
    }
    announce(sk, tcp, socket, stand(tcp, &moved), None);
    emit::bytes(sk, tcp, socket, moved, &source);
}

/// Sequence number behind the call's last byte.
#[inline(always)]
unsafe fn end(sk: Sock, tcp: Tcp, way: u8) -> u32 {
    if way == direction::SENT {
        return tcp.write_seq();
    }
    // The receive that drains the stream also takes the FIN, which counts one. Read in this order: once the FIN
    // is marked, `rcv_nxt` is behind it.
    let done = sk.done();
    let copied = tcp.copied_seq();
    if done && copied == tcp.rcv_nxt() { copied.wrapping_sub(1) } else { copied }
}

/// Where the two streams stood before the call.
#[inline(always)]
unsafe fn stand(tcp: Tcp, moved: &Moved) -> [u32; 2] {
    let start = moved.end.wrapping_sub(moved.len);
    if moved.way == direction::SENT { [start, tcp.copied_seq()] } else { [tcp.write_seq(), start] }
}

/// Whether to ship this call; may change the socket's state, forget it, or take the bytes out of the record.
#[inline(always)]
unsafe fn judge(sk: Sock, socket: *mut Socket, moved: &Moved, source: &mut Source) -> bool {
    if (*socket).look_ups != 0 {
        if let Some(answer) = answer(socket) {
            if answer == judgement::FOREIGN {
                forget(sk, socket, counter::FOREIGN);
                return false;
            }
            if (*socket).state != state::ZMTP {
                enter(socket, state::ZMTP);
            }
            (*socket).look_ups = 0;
            return true;
        }
    }
    if (*socket).state == state::ZMTP {
        return true;
    }
    let flags = (*socket).flags;
    if flags & mark::FRESH != 0 {
        match greet(socket, moved, source) {
            Greeting::Yes => {
                enter(socket, state::ZMTP);
                (*socket).look_ups = PROBATION;
                return true;
            }
            Greeting::No => {
                forget(sk, socket, counter::FOREIGN);
                return false;
            }
            Greeting::More => {}
        }
    }
    pay(sk, socket, moved, source)
}

/// User space's answer, taken out of the table.
#[inline(always)]
unsafe fn answer(socket: *mut Socket) -> Option<u32> {
    if (*socket).state == state::ZMTP {
        (*socket).look_ups -= 1;
    }
    let cookie = (*socket).cookie;
    let answer = *JUDGEMENTS.get(cookie)?;
    let _ = JUDGEMENTS.remove(cookie);
    Some(answer)
}

/// What the begin of the direction says, if this call is part of it and can be read.
#[inline(always)]
unsafe fn greet(socket: *mut Socket, moved: &Moved, source: &Source) -> Greeting {
    let base = if moved.way == direction::SENT { (*socket).base[0] } else { (*socket).base[1] };
    let offset = moved.end.wrapping_sub(moved.len).wrapping_sub(base);
    let readable = source.reason == reason::NONE;
    if offset > greeting::LAST || !readable {
        return Greeting::More;
    }
    let mut head = [0u8; 16];
    let n = source.head(moved.len, &mut head);
    let seen = greeting::look(offset, &head, n);
    if seen == Greeting::More && n > 0 {
        // It begins as a greeting: user space may have it from here on.
        (*socket).flags |= mark::WATCHED;
    }
    seen
}

/// Takes the call out of the budget of a socket that is not judged yet.
#[inline(always)]
unsafe fn pay(sk: Sock, socket: *mut Socket, moved: &Moved, source: &mut Source) -> bool {
    let watched = (*socket).flags & mark::WATCHED != 0;
    let price = if watched { moved.len } else { moved.len.max(CALL) };
    let budget = (*socket).budget;
    (*socket).budget = budget.saturating_sub(price);
    if watched {
        if price > budget && source.reason == reason::NONE {
            source.reason = reason::BUDGET;
        }
        return true;
    }
    if source.reason != reason::NONE {
        count(counter::NOT_CAPTURED + u32::from(source.reason & 15));
    }
    if price >= budget {
        forget(sk, socket, counter::MUTED);
    }
    false
}
