//! Where the bytes of the current call lie in the caller's memory, if that can be known for certain.
//!
//! The caller's registers can lie: an `io_uring` receive completes in a thread that sits in another system call,
//! whose buffer is another connection's. So the system call must be one of eight, of this direction, and its
//! descriptor must be this very socket; anything else is a reason and no bytes.

use aya_ebpf::helpers::{self, generated as g};
use roomtrace_common::{END, PIECES, direction, reason};

use crate::kernel::{Sock, Task, load};
use crate::maps::setting;

/// Flags of a receive (`include/linux/socket.h`): those that give no record, and those that give no bytes.
pub const MSG_OOB: i32 = 0x1;
pub const MSG_PEEK: i32 = 0x2;
pub const MSG_TRUNC: i32 = 0x20;
pub const MSG_ERRQUEUE: i32 = 0x2000;

/// `PF_IO_WORKER`, `PF_USER_WORKER` and `PF_KTHREAD` (`include/linux/sched.h`).
const NOT_A_CALLER: u32 = 0x10 | 0x4000 | 0x20_0000;

/// `msg_iov` and `msg_iovlen` of `struct user_msghdr` (64-bit layout, kernel ABI).
const MSG_IOV: u64 = 16;

/// Where the bytes lie.
#[derive(Clone, Copy)]
pub struct Source {
    /// Why nothing may be read, or [`reason::NONE`].
    pub reason: u8,
    /// Number of pieces; 0: `at` is the buffer itself.
    pub pieces: u64,
    /// The buffer, or the array of pieces.
    pub at: u64,
}

/// `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Piece {
    pub at: u64,
    pub len: u64,
}

impl Source {
    #[inline(always)]
    const fn none(reason: u8) -> Self {
        Self { reason, pieces: 0, at: 0 }
    }

    /// Of the call that the current task (`task`) is in.
    #[inline(always)]
    pub unsafe fn of(sk: Sock, task: Task, flags: i32, way: u8) -> Self {
        if task.flags() & NOT_A_CALLER != 0 {
            return Self::none(reason::KERNEL_THREAD);
        }
        if flags & (MSG_OOB | MSG_TRUNC) != 0 {
            return Self::none(reason::FLAGS);
        }
        let regs = g::bpf_task_pt_regs(task.0.cast_mut().cast()) as *const u8;
        if regs.is_null() {
            return Self::none(reason::SYSCALL);
        }
        let number: u32 = load(regs, setting!(at.regs_nr));
        let (flat, flat_too, vector, message) = if way == direction::SENT {
            (setting!(calls.sendto), setting!(calls.write), setting!(calls.writev), setting!(calls.sendmsg))
        } else {
            (setting!(calls.recvfrom), setting!(calls.read), setting!(calls.readv), setting!(calls.recvmsg))
        };
        let is_flat = number == flat || number == flat_too;
        if !is_flat && number != vector && number != message {
            return Self::none(reason::SYSCALL);
        }
        let descriptor: u64 = load(regs, setting!(at.regs_arg0));
        if !task.has_open(descriptor as u32, sk.file()) {
            return Self::none(reason::OTHER_DESCRIPTOR);
        }
        let at: u64 = load(regs, setting!(at.regs_arg1));
        if is_flat {
            return Self { reason: reason::NONE, pieces: 0, at };
        }
        if number == vector {
            let pieces: u64 = load(regs, setting!(at.regs_arg2));
            return Self { reason: reason::NONE, pieces, at };
        }
        match helpers::bpf_probe_read_user((at + MSG_IOV) as *const Piece) {
            Ok(array) => Self { reason: reason::NONE, pieces: array.len, at: array.at },
            Err(_) => Self::none(reason::FAULT),
        }
    }

    /// Piece number `n`; `None` if reading it failed.
    #[inline(always)]
    pub unsafe fn piece(&self, n: usize) -> Option<Piece> {
        helpers::bpf_probe_read_user((self.at + n as u64 * 16) as *const Piece).ok()
    }

    /// Begin and end of the call's `len` bytes (more than twice [`END`]), at most [`END`] of each: of scattered ones what
    /// lies in the first piece and in that of the last byte, nothing for the end if that is not among the first
    /// [`PIECES`]. `None` if reading them failed.
    #[inline(always)]
    pub unsafe fn two_ends(&self, len: u32) -> Option<[Piece; 2]> {
        const LONGEST: u64 = END as u64;
        let len = u64::from(len);
        if self.pieces == 0 {
            let head = Piece { at: self.at, len: LONGEST };
            return Some([head, Piece { at: self.at + len - LONGEST, len: LONGEST }]);
        }
        let first = self.piece(0)?;
        let head = Piece { at: first.at, len: first.len.min(LONGEST) };
        let mut tail = Piece { at: 0, len: 0 };
        let mut done = 0u64;
        for n in 0..PIECES {
            if n as u64 >= self.pieces {
                break;
            }
            let piece = self.piece(n)?;
            // The call may have moved less than the pieces hold.
            let part = piece.len.min(len - done);
            done += part;
            if done >= len {
                tail.len = part.min(LONGEST);
                tail.at = piece.at + part - tail.len;
                break;
            }
        }
        Some([head, tail])
    }

    /// The first bytes of the call, at most 16, in `out`; how many. Of a scattered buffer: of its first piece.
    #[inline(always)]
    pub unsafe fn head(&self, len: u32, out: &mut [u8; 16]) -> u64 {
        let mut at = self.at;
        let mut n = u64::from(len);
        if self.pieces != 0 {
            let Some(first) = self.piece(0) else { return 0 };
            at = first.at;
            n = n.min(first.len);
        }
        n = n.min(16);
        if g::bpf_probe_read_user(out.as_mut_ptr().cast(), n as u32, at as *const _) == 0 { n } else { 0 }
    }
}

const _: () = assert!(PIECES > 0);
