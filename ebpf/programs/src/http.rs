//! HTTP on sockets of engine processes: does a call begin it, which direction asks, how much of a call is shipped.
//!
//! Whole calls and ends only where the rules of `call` let bytes be read at all. Parses nothing: what the bytes say
//! is user space's business.

use roomtrace_common::{
    ANSWER_BYTES, ANSWER_CALLS, LAST_CHUNK, MUTED_SLOTS, Socket, direction, mark, reason, state,
};

use crate::call::Source;
use crate::emit::Moved;
use crate::kernel::Sock;
use crate::maps::{MUTED, enter, setting};

const GET: u32 = u32::from_ne_bytes(*b"GET ");
const PUT: u32 = u32::from_ne_bytes(*b"PUT ");
const POST: u32 = u32::from_ne_bytes(*b"POST");
const HEAD: u32 = u32::from_ne_bytes(*b"HEAD");
const PATC: u32 = u32::from_ne_bytes(*b"PATC");
const DELE: u32 = u32::from_ne_bytes(*b"DELE");
const ETE: u32 = u32::from_ne_bytes(*b"TE /");
const OPTI: u32 = u32::from_ne_bytes(*b"OPTI");
const ONS: u32 = u32::from_ne_bytes(*b"ONS ");
const CONN: u32 = u32::from_ne_bytes(*b"CONN");
const TRAC: u32 = u32::from_ne_bytes(*b"TRAC");
const HTTP: u32 = u32::from_ne_bytes(*b"HTTP");
const ONE_ONE: u32 = u32::from_ne_bytes(*b"/1.1");
const ONE_ZERO: u32 = u32::from_ne_bytes(*b"/1.0");

/// What a call begins with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Begin {
    /// A request.
    Request,
    /// An answer.
    Answer,
    /// Neither, or the middle of one.
    Other,
}

/// Whether HTTP on this socket is to be followed.
#[inline(always)]
pub unsafe fn wanted(socket: *const Socket) -> bool {
    setting!(requests) != 0 && (*socket).flags & mark::OURS != 0
}

/// What stands in [`MUTED`] for one direction of a socket: never zero, and never another socket's, for cookies are given
/// out once.
#[inline(always)]
const fn key(cookie: u64, way: u8) -> u64 {
    cookie | (1 + way as u64) << 62
}

/// Where it would stand. Cookies come in runs of 4096 for each CPU (`include/linux/cookie.h`).
#[inline(always)]
unsafe fn slot(cookie: u64) -> *mut u64 {
    (&raw mut MUTED).cast::<u64>().add((cookie ^ cookie >> 12) as usize & (MUTED_SLOTS - 1))
}

/// Whether this call belongs to an answer of which enough was shipped. Asked before anything else is looked at, so that
/// a streamed answer costs what an unrelated connection does.
#[inline(always)]
pub unsafe fn muted(sk: Sock, result: i32, way: u8) -> bool {
    let cookie = sk.cookie_there();
    *slot(cookie) == key(cookie, way) && result > LAST_CHUNK as i32
}

/// The same, from what is remembered of the socket: another one has its place in the table.
#[inline(always)]
pub unsafe fn enough(sk: Sock, socket: *const Socket, result: i32, way: u8) -> bool {
    let answers = if way == direction::SENT { mark::ANSWERS } else { mark::ASKS };
    let enough =
        (*socket).answered >= ANSWER_CALLS && result > LAST_CHUNK as i32 && (*socket).flags & answers != 0;
    if enough {
        mute(sk, way);
    }
    enough
}

#[inline(always)]
unsafe fn mute(sk: Sock, way: u8) {
    let cookie = sk.cookie_there();
    *slot(cookie) = key(cookie, way);
}

/// A new answer begins.
#[inline(always)]
unsafe fn unmute(sk: Sock, socket: *mut Socket) {
    (*socket).answered = 0;
    let cookie = sk.cookie_there();
    let slot = slot(cookie);
    // Of either direction.
    if *slot << 2 == cookie << 2 {
        *slot = 0;
    }
}

/// Whether a direction that begins with these `n` bytes carries HTTP/1, as far as they go: with a method (RFC 9110, section 9.3;
/// RFC 5789) or, where it answers, with its version. A capital letter alone proves nothing: the pieces of a transfer begin with
/// their size, of which one in ten has such a byte. Methods that are not among these user space knows.
#[inline(always)]
pub fn opens(head: &[u8; 16], n: u64) -> bool {
    if n == 0 {
        return false;
    }
    let some = if n < 4 { (u32::MAX >> (32 - 8 * n as u32)).to_le() } else { u32::MAX };
    let first = word(head, 0) & some;
    let is = |begin: u32| first == begin & some;
    is(POST)
        || is(GET)
        || is(HTTP)
        || is(PUT)
        || is(HEAD)
        || is(DELE)
        || is(OPTI)
        || is(PATC)
        || is(CONN)
        || is(TRAC)
}

/// What a call somewhere in a stream begins with. Stricter than [`opens`], because any byte can stand there: a method
/// and the begin of its target, or a version.
#[inline(always)]
pub fn begin(head: &[u8; 16]) -> Begin {
    let (first, second) = (word(head, 0), word(head, 4));
    let request = if first == GET || first == PUT {
        head[4] == b'/'
    } else if first == POST || first == HEAD {
        head[4] == b' ' && head[5] == b'/'
    } else if first == PATC {
        head[4] == b'H' && head[5] == b' ' && head[6] == b'/'
    } else {
        (first == DELE && second == ETE) || (first == OPTI && second == ONS)
    };
    if request {
        Begin::Request
    } else if first == HTTP && (second == ONE_ONE || second == ONE_ZERO) {
        Begin::Answer
    } else {
        Begin::Other
    }
}

/// Four bytes as a number: comparing arrays would be a call.
#[inline(always)]
fn word(head: &[u8; 16], at: usize) -> u32 {
    u32::from_ne_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]])
}

/// From now on the socket carries HTTP.
#[inline(always)]
pub unsafe fn follow(sk: Sock, socket: *mut Socket) {
    enter(socket, state::HTTP);
    // User space may change its mind at any later request: these are few.
    (*socket).look_ups = 1;
    unmute(sk, socket);
    let flags = (*socket).flags;
    if flags & mark::FRESH != 0 {
        (*socket).flags |= if flags & mark::ACTIVE != 0 { mark::ASKS } else { mark::ANSWERS };
    }
}

/// Learns from a call that begins a message which direction asks, where that is not known.
#[inline(always)]
pub unsafe fn orient(socket: *mut Socket, way: u8, begin: Begin) {
    if (*socket).flags & (mark::ASKS | mark::ANSWERS) != 0 || begin == Begin::Other {
        return;
    }
    let sends = (way == direction::SENT) == (begin == Begin::Request);
    (*socket).flags |= if sends { mark::ASKS } else { mark::ANSWERS };
}

/// Decides how much of a call on an HTTP socket is shipped: may take the bytes out of the record.
#[inline(always)]
pub unsafe fn share(sk: Sock, socket: *mut Socket, moved: &Moved, source: &mut Source) {
    if (*socket).flags & (mark::ASKS | mark::ANSWERS) == 0 {
        let mut head = [0u8; 16];
        if source.reason == reason::NONE {
            source.head(moved.len, &mut head);
        }
        orient(socket, moved.way, begin(&head));
    }
    let flags = (*socket).flags;
    let (asks, answers) =
        if moved.way == direction::SENT { (mark::ASKS, mark::ANSWERS) } else { (mark::ANSWERS, mark::ASKS) };
    if flags & asks != 0 {
        unmute(sk, socket);
    } else if flags & answers != 0 {
        let before = (*socket).answered;
        if before < ANSWER_CALLS {
            (*socket).answered = before + 1;
        }
        if before >= ANSWER_BYTES && moved.len > LAST_CHUNK && source.reason == reason::NONE {
            source.reason = reason::MIDDLE;
        }
    } else {
        // Either may be a request.
        let budget = (*socket).budget;
        (*socket).budget = budget.saturating_sub(moved.len);
        if moved.len > budget && source.reason == reason::NONE {
            source.reason = reason::BUDGET;
        }
    }
}
