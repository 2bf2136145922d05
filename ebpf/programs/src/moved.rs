//! A call that moved bytes: is the socket watched, may the bytes be read, what became of its judgement.

use roomtrace_common::{Socket, WHOLE, counter, direction, judgement, mark, reason, state};

use crate::announce::announce;
use crate::call::{MSG_ERRQUEUE, MSG_PEEK, Source};
use crate::emit::{self, Moved};
use crate::greeting::{self, Greeting};
use crate::http::{self, Begin};
use crate::kernel::{Sock, Task, Tcp};
use crate::maps::{JUDGEMENTS, count, enter, forget, put_aside, setting, stored};

/// Calls during which a judgement is still looked up after the greeting was recognised.
const PROBATION: u32 = 64;
/// What a call costs at least of the budget of a socket that nothing is known of.
const CALL: u32 = 1024;

/// A call on `sk` returned `result`.
#[inline(always)]
pub unsafe fn moved(sk: Sock, result: i32, flags: i32, way: u8) {
    if !sk.has_storage() || http::muted(sk, result, way) {
        return;
    }
    let socket = stored(sk);
    if socket.is_null() {
        return;
    }
    let now = (*socket).state;
    if now == state::HTTP && http::enough(sk, socket, result, way) {
        return;
    }
    if result <= 0 || flags & (MSG_PEEK | MSG_ERRQUEUE) != 0 {
        return;
    }
    if now != state::PENDING && now != state::ZMTP && now != state::HTTP {
        return;
    }
    let tcp = sk.tcp();
    if tcp.0.is_null() {
        return;
    }
    let len = result as u32;
    let task = Task::current();
    let moved = Moved { task, way, len, end: end(sk, tcp, way) };
    let mut source = Source::of(sk, task, flags, way);
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
    if (*socket).look_ups != 0
        && let Some(answer) = answer(socket)
        && !heed(sk, socket, answer)
    {
        return false;
    }
    if (*socket).state == state::PENDING && !pending(sk, socket, moved, source) {
        return false;
    }
    if (*socket).state == state::HTTP {
        http::share(sk, socket, moved, source);
    } else if moved.len > WHOLE && source.reason == reason::NONE {
        source.reason = reason::TOO_LONG;
    }
    true
}

/// Does as user space has answered; whether the socket is still followed.
#[inline(always)]
unsafe fn heed(sk: Sock, socket: *mut Socket, answer: u32) -> bool {
    if answer == judgement::ZMTP {
        if (*socket).state != state::ZMTP {
            enter(socket, state::ZMTP);
        }
        (*socket).look_ups = 0;
        return true;
    }
    if answer == judgement::HTTP && setting!(requests) != 0 {
        if (*socket).state != state::HTTP {
            http::follow(sk, socket);
        }
        return true;
    }
    if answer == judgement::NEITHER && (*socket).state == state::HTTP {
        // It began like HTTP, in fewer bytes than would have proved it.
        enter(socket, state::PENDING);
    }
    put_aside(sk, socket, counter::FOREIGN);
    false
}

/// Judges a socket by the bytes of this call, if they say something; else takes the call out of its budget. Whether to
/// ship it.
#[inline(always)]
unsafe fn pending(sk: Sock, socket: *mut Socket, moved: &Moved, source: &mut Source) -> bool {
    let flags = (*socket).flags;
    let readable = source.reason == reason::NONE;
    if flags & mark::STRANGE == 0 && readable && (http::wanted(socket) || flags & mark::FRESH != 0) {
        let mut head = [0u8; 16];
        let n = source.head(moved.len, &mut head);
        match greet(socket, moved, &head, n) {
            Greeting::Yes => {
                enter(socket, state::ZMTP);
                (*socket).look_ups = PROBATION;
                return true;
            }
            Greeting::Other if http::wanted(socket) => {
                if http::opens(&head, n) {
                    http::follow(sk, socket);
                } else {
                    (*socket).flags |= mark::STRANGE;
                    (*socket).budget = setting!(fresh_budget);
                }
                return true;
            }
            Greeting::Other if http::opens(&head, n) => {
                forget(sk, socket, counter::FOREIGN);
                return false;
            }
            Greeting::No | Greeting::Other => {
                put_aside(sk, socket, counter::FOREIGN);
                return false;
            }
            Greeting::More => {}
        }
        if http::wanted(socket) {
            let begin = http::begin(&head);
            if begin != Begin::Other {
                http::follow(sk, socket);
                http::orient(socket, moved.way, begin);
                return true;
            }
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

/// What the begin of the direction says, if this call, which begins with these `n` bytes, is part of it.
#[inline(always)]
unsafe fn greet(socket: *mut Socket, moved: &Moved, head: &[u8; 16], n: u64) -> Greeting {
    if (*socket).flags & mark::FRESH == 0 {
        return Greeting::More;
    }
    let base = if moved.way == direction::SENT { (*socket).base[0] } else { (*socket).base[1] };
    let offset = moved.end.wrapping_sub(moved.len).wrapping_sub(base);
    if offset > greeting::LAST {
        return Greeting::More;
    }
    let seen = greeting::look(offset, head, n);
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
        let spent = price > budget;
        if spent && (*socket).flags & mark::STRANGE != 0 {
            // User space has had enough of it to name it.
            put_aside(sk, socket, counter::MUTED);
            return false;
        }
        if spent && source.reason == reason::NONE {
            source.reason = if moved.len > WHOLE { reason::TOO_LONG } else { reason::BUDGET };
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
