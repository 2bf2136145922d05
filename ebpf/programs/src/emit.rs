//! Records into the ring, filled in place. Sizes are constants, because the ring takes no others.

use aya_ebpf::helpers::generated as g;
use roomtrace_common::{
    CALLER_EVERY, CLASSES, Caller, END, Ends, PIECES, RECORD, Record, Socket, counter, flag, kind, mark,
    reason, state,
};

use crate::call::{Piece, Source};
use crate::kernel::{AF_INET6, Sock, Task, Tcp, peek};
use crate::maps::{EVENTS, count, setting};

/// `BPF_RB_NO_WAKEUP`, `BPF_RB_FORCE_WAKEUP`, `BPF_RB_AVAIL_DATA` (`include/uapi/linux/bpf.h`).
const NO_WAKEUP: u64 = 1;
const FORCE_WAKEUP: u64 = 2;
const AVAIL_DATA: u64 = 0;

/// A call that moved bytes.
#[derive(Clone, Copy)]
pub struct Moved {
    pub task: Task,
    pub way: u8,
    pub len: u32,
    pub end: u32,
}

/// A change of state, or the state of a found socket.
#[derive(Clone, Copy)]
pub struct States {
    pub kind: u8,
    pub old: u8,
    pub new: u8,
    pub at: u64,
    /// First byte of each direction, where known.
    pub base: Option<[u32; 2]>,
    /// Sequence numbers to report instead of the current ones.
    pub stand: Option<[u32; 2]>,
    /// What goes into `len` and `end`, by kind.
    pub more: [u32; 2],
}

#[inline(always)]
fn ring() -> *mut core::ffi::c_void {
    (&raw const EVENTS).cast_mut().cast()
}

/// Room for a record, or null: the ring is full, which is counted.
#[inline(always)]
pub unsafe fn reserve<const BODY: usize>() -> *mut Record {
    let record: *mut Record = g::bpf_ringbuf_reserve(ring(), (RECORD + BODY) as u64, 0).cast();
    if record.is_null() {
        count(counter::RING_FULL);
    }
    record
}

/// Hands a record over. User space is woken when the ring is a quarter full, which every eighth record of a CPU
/// looks at; below that its timer serves.
#[inline(always)]
pub unsafe fn submit(record: *mut Record) {
    let mut wake = NO_WAKEUP;
    if count(counter::RECORDS) & 7 == 0
        && g::bpf_ringbuf_query(ring(), AVAIL_DATA) >= u64::from(setting!(wake_above))
    {
        wake = FORCE_WAKEUP;
    }
    g::bpf_ringbuf_submit(record.cast(), wake);
}

/// Who `task` is.
#[inline(always)]
pub unsafe fn caller(task: Task) -> Caller {
    // Two words at a time: unaligned stores would be bytes.
    let comm: [u64; 2] = peek(task.leader().comm());
    Caller {
        cgroup: task.cgroup(),
        tgid: task.tgid(),
        tid: task.pid(),
        comm: core::mem::transmute::<[u64; 2], [u8; 16]>(comm),
    }
}

/// The two ends of a connection, and its family as a flag of the record.
#[inline(always)]
unsafe fn ends(sk: Sock, tcp: Tcp) -> (Ends, u8) {
    let (local, peer, family): ([u64; 2], [u64; 2], u8) = if sk.family() == AF_INET6 {
        (peek(sk.local_v6().cast()), peek(sk.peer_v6().cast()), flag::V6)
    } else {
        ([u64::from(sk.local_v4()), 0], [u64::from(sk.peer_v4()), 0], 0)
    };
    let ends = Ends {
        local: core::mem::transmute::<[u64; 2], [u8; 16]>(local),
        peer: core::mem::transmute::<[u64; 2], [u8; 16]>(peer),
        local_port: tcp.local_port(sk),
        peer_port: sk.peer_port(),
        netns: sk.netns(),
    };
    (ends, family)
}

/// Copies in words: both structures are made of whole ones and lie at multiples of eight. Volatile, or the compiler
/// makes a call of it.
#[inline(always)]
unsafe fn put<T, const WORDS: usize>(to: *mut T, from: *const T) {
    const { assert!(size_of::<T>() == WORDS * 8) };
    for n in 0..WORDS {
        to.cast::<u64>().add(n).write_volatile(from.cast::<u64>().add(n).read_volatile());
    }
}

/// Copies what the socket remembers of its caller and its ends.
#[inline(always)]
pub unsafe fn who_and_where(record: *mut Record, socket: *const Socket) {
    put::<Caller, 4>(&raw mut (*record).caller, &raw const (*socket).caller);
    put::<Ends, 5>(&raw mut (*record).ends, &raw const (*socket).ends);
}

/// TCP states before and after, and the zeroes behind them, in one word.
#[inline(always)]
pub unsafe fn old_and_new(record: *mut Record, old: u8, new: u8) {
    const { assert!(core::mem::offset_of!(Record, old) == RECORD - 8) };
    (&raw mut (*record).old).cast::<u64>().write(u64::from_ne_bytes([old, new, 0, 0, 0, 0, 0, 0]));
}

/// Brings up to date what the socket remembers of its ends and its caller. Mostly there is nothing to do.
#[inline(always)]
unsafe fn remind(sk: Sock, tcp: Tcp, socket: *mut Socket, task: Task) {
    if (*socket).flags & mark::NAMED == 0 {
        (*socket).flags |= mark::NAMED;
        let (ends, family) = ends(sk, tcp);
        (*socket).ends = ends;
        (*socket).family = u32::from(family);
        (*socket).calls = CALLER_EVERY;
    }
    let calls = (*socket).calls;
    (*socket).calls = calls + 1;
    if calls >= CALLER_EVERY || (*socket).caller.tid != task.pid() {
        (*socket).calls = 0;
        (*socket).caller = caller(task);
    }
}

/// Writes a change of state or a found socket. `who`: the task that it names.
#[inline(always)]
pub unsafe fn states(sk: Sock, tcp: Tcp, cookie: u64, states: &States, who: Option<Task>) {
    let record = reserve::<0>();
    if record.is_null() {
        return;
    }
    (*record).at = states.at;
    (*record).cookie = cookie;
    // In this order, because they move meanwhile: no difference between them is ever negative.
    (*record).snd_una = tcp.snd_una();
    (*record).write_seq = tcp.write_seq();
    (*record).copied_seq = tcp.copied_seq();
    (*record).rcv_nxt = tcp.rcv_nxt();
    let (ends, mut flags) = ends(sk, tcp);
    (*record).ends = ends;
    (*record).caller = match who {
        Some(task) => {
            flags |= flag::TASK;
            caller(task)
        }
        None => Caller { cgroup: 0, tgid: 0, tid: 0, comm: [0; 16] },
    };
    if let Some([write, copied]) = states.stand {
        (*record).write_seq = write;
        (*record).snd_una = write;
        (*record).copied_seq = copied;
        (*record).rcv_nxt = copied;
    }
    (*record).base = states.base.unwrap_or([0, 0]);
    if states.base.is_some() {
        flags |= flag::BASE;
    }
    (*record).flags = flags;
    (*record).len = states.more[0];
    (*record).end = states.more[1];
    (*record).error = if states.stand.is_some() { 0 } else { sk.error() };
    (*record).kind = states.kind;
    (*record).direction = 0;
    (*record).reason = reason::NONE;
    old_and_new(record, states.old, states.new);
    submit(record);
}

/// Writes a call, with its bytes if `source` names them: all of them, or of a longer one on an HTTP socket the two ends.
#[inline(always)]
pub unsafe fn bytes(sk: Sock, tcp: Tcp, socket: *mut Socket, moved: Moved, source: &Source) {
    remind(sk, tcp, socket, moved.task);
    if source.reason != reason::NONE {
        return length(tcp, socket, moved, source.reason);
    }
    if moved.len as usize > CLASSES[3] && (*socket).state == state::HTTP {
        return two_ends(tcp, socket, moved, source);
    }
    if source.pieces != 0 {
        return if moved.len as usize <= CLASSES[3] {
            scattered::<{ CLASSES[3] }, { 2 * CLASSES[3] }>(tcp, socket, moved, source)
        } else {
            scattered::<8192, 16384>(tcp, socket, moved, source)
        };
    }
    if moved.len <= CLASSES[0] as u32 {
        flat::<{ CLASSES[0] }>(tcp, socket, moved, source);
    } else if moved.len <= CLASSES[1] as u32 {
        flat::<{ CLASSES[1] }>(tcp, socket, moved, source);
    } else if moved.len <= CLASSES[2] as u32 {
        flat::<{ CLASSES[2] }>(tcp, socket, moved, source);
    } else if moved.len <= CLASSES[3] as u32 {
        flat::<{ CLASSES[3] }>(tcp, socket, moved, source);
    } else {
        flat::<{ CLASSES[4] }>(tcp, socket, moved, source);
    }
}

#[inline(always)]
unsafe fn call(record: *mut Record, tcp: Tcp, socket: *mut Socket, moved: Moved) {
    (*record).at = g::bpf_ktime_get_ns();
    (*record).cookie = (*socket).cookie;
    who_and_where(record, socket);
    (*record).flags = flag::TASK | (*socket).family as u8;
    (*record).len = moved.len;
    (*record).end = moved.end;
    // The other two lie in cache lines that this direction does not use.
    (*record).write_seq = 0;
    (*record).snd_una = tcp.snd_una();
    (*record).copied_seq = 0;
    (*record).rcv_nxt = tcp.rcv_nxt();
    (*record).base = [0, 0];
    (*record).error = 0;
    (*record).kind = kind::BYTES;
    (*record).direction = moved.way;
    (*record).reason = reason::NONE;
    old_and_new(record, 0, 0);
}

#[inline(always)]
unsafe fn length(tcp: Tcp, socket: *mut Socket, moved: Moved, why: u8) {
    count(counter::NOT_CAPTURED + u32::from(why & 15));
    let record = reserve::<0>();
    if record.is_null() {
        return;
    }
    call(record, tcp, socket, moved);
    (*record).reason = why;
    submit(record);
}

/// The same number, of which the compiler knows nothing any more: so the bound is checked in the register in which
/// the helper gets it, where the verifier sees it. Through the stack, because the record's memory is not in the cache.
#[inline(always)]
fn bounded_below(len: u32) -> u32 {
    let len = len;
    unsafe { core::ptr::read_volatile(&raw const len) }
}

/// Marks a record whose bytes could not be had after all.
#[inline(always)]
unsafe fn without(record: *mut Record, why: u8) {
    count(counter::NOT_CAPTURED + u32::from(why & 15));
    (*record).reason = why;
}

#[inline(always)]
unsafe fn flat<const BODY: usize>(tcp: Tcp, socket: *mut Socket, moved: Moved, source: &Source) {
    let record = reserve::<BODY>();
    if record.is_null() {
        return;
    }
    call(record, tcp, socket, moved);
    let len = bounded_below(moved.len);
    if len as usize > BODY {
        without(record, reason::TOO_LONG);
    } else if g::bpf_probe_read_user(record.add(1).cast(), len, source.at as *const _) != 0 {
        without(record, reason::FAULT);
    }
    submit(record);
}

/// As [`flat`], from up to [`PIECES`] pieces. The area is twice the body: for the verifier any piece may begin at
/// the body's end.
#[inline(always)]
unsafe fn scattered<const BODY: usize, const AREA: usize>(
    tcp: Tcp,
    socket: *mut Socket,
    moved: Moved,
    source: &Source,
) {
    let record = reserve::<AREA>();
    if record.is_null() {
        return;
    }
    call(record, tcp, socket, moved);
    let body: *mut u8 = record.add(1).cast();
    let len = u64::from(bounded_below(moved.len));
    let mut done = 0u64;
    let mut why = reason::VECTORS;
    for n in 0..PIECES {
        if n as u64 >= source.pieces {
            break;
        }
        let Some(piece) = source.piece(n) else {
            why = reason::FAULT;
            break;
        };
        let part = piece.len.min(len - done);
        if done > BODY as u64 || part > BODY as u64 {
            break;
        }
        if g::bpf_probe_read_user(body.add(done as usize).cast(), part as u32, piece.at as *const _) != 0 {
            why = reason::FAULT;
            break;
        }
        done += part;
        if done >= len {
            why = reason::NONE;
            break;
        }
    }
    if why == reason::VECTORS && done != 0 && (*socket).state == state::HTTP {
        ends_only(record, done.min(END as u64), 0);
    } else if why != reason::NONE {
        without(record, why);
    }
    submit(record);
}

/// The two ends of a call on an HTTP socket.
#[inline(always)]
unsafe fn two_ends(tcp: Tcp, socket: *mut Socket, moved: Moved, source: &Source) {
    let record = reserve::<{ 2 * END }>();
    if record.is_null() {
        return;
    }
    call(record, tcp, socket, moved);
    let body: *mut u8 = record.add(1).cast();
    match source.two_ends(moved.len) {
        Some([head, tail]) if copied(body, head) && copied(body.add(END), tail) => {
            ends_only(record, head.len, tail.len);
        }
        _ => without(record, reason::FAULT),
    }
    submit(record);
}

/// Copies a piece of at most [`END`] bytes.
#[inline(always)]
unsafe fn copied(to: *mut u8, piece: Piece) -> bool {
    let len = bounded_below(piece.len as u32);
    len as usize <= END && g::bpf_probe_read_user(to.cast(), len, piece.at as *const _) == 0
}

/// Marks a record that has only the ends of the call's bytes.
#[inline(always)]
unsafe fn ends_only(record: *mut Record, head: u64, tail: u64) {
    count(counter::NOT_CAPTURED + u32::from(reason::MIDDLE));
    (*record).flags |= flag::ENDS;
    (*record).head = head as u16;
    (*record).tail = tail as u16;
}
