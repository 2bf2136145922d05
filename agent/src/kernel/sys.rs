//! The few system calls that aya does not wrap.
#![allow(unsafe_code, reason = "raw system calls with pointers to locals; see each SAFETY line")]

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// An epoll set with the ring in it, edge-triggered: it reports the programs' wake-ups and not that there is
/// data, so a busy ring costs one system call per timer tick and not one per record.
pub(super) fn epoll_on(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: takes a flag, returns a new descriptor.
    let epoll = check(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?;
    // SAFETY: just created, owned by nobody else.
    let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
    let mut event = libc::epoll_event { events: (libc::EPOLLIN | libc::EPOLLET).cast_unsigned(), u64: 0 };
    // SAFETY: both descriptors are open and `event` lives across the call.
    check(unsafe {
        libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd.as_raw_fd(), &raw mut event)
    })?;
    Ok(epoll)
}

/// Waits for a wake-up; `false` when the time ran out or a signal came.
pub(super) fn epoll_wait(epoll: &OwnedFd, timeout: Duration) -> io::Result<bool> {
    let millis = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    // SAFETY: room for one event, which lives across the call.
    match check(unsafe { libc::epoll_wait(epoll.as_raw_fd(), &raw mut event, 1, millis) }) {
        Ok(n) => Ok(n > 0),
        Err(e) if e.kind() == io::ErrorKind::Interrupted => Ok(false),
        Err(e) => Err(e),
    }
}

/// `struct bpf_prog_info` (`include/uapi/linux/bpf.h`) up to `recursion_misses`.
#[repr(C)]
struct ProgInfo {
    /// Up to `run_cnt`, not looked at.
    head: [u64; 26],
    recursion_misses: u64,
}

/// Runs of the program behind `fd` that were left out because it was already running on that CPU
/// (`BPF_OBJ_GET_INFO_BY_FD`; needs no capability).
pub(super) fn recursion_misses(fd: BorrowedFd<'_>) -> io::Result<u64> {
    #[repr(C)]
    struct Attr {
        fd: u32,
        len: u32,
        info: u64,
        rest: [u64; 14],
    }
    const BPF_OBJ_GET_INFO_BY_FD: libc::c_int = 15;
    let mut info = ProgInfo { head: [0; 26], recursion_misses: 0 };
    let mut attr = Attr {
        fd: fd.as_raw_fd().cast_unsigned(),
        len: u32::try_from(size_of::<ProgInfo>()).unwrap_or_default(),
        info: (&raw mut info).addr() as u64,
        rest: [0; 14],
    };
    // SAFETY: `attr` and the `info` it points to live across the call, with their sizes.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_OBJ_GET_INFO_BY_FD, &raw mut attr, size_of::<Attr>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(info.recursion_misses)
}

/// A link of an iterator over open files to one process (`BPF_LINK_CREATE`, from Linux 6.1; aya makes only those to all of
/// them). One that is gone has no files.
pub(super) fn iterate_process(program: BorrowedFd<'_>, process: u32) -> io::Result<OwnedFd> {
    /// `link_create` of `union bpf_attr` up to `iter_info_len` (`include/uapi/linux/bpf.h`).
    #[repr(C)]
    struct Attr {
        program: u32,
        target: u32,
        attach_type: u32,
        flags: u32,
        info: u64,
        info_len: u32,
        pad: u32,
    }
    const BPF_LINK_CREATE: libc::c_int = 28;
    const BPF_TRACE_ITER: u32 = 28;
    // `task` of `union bpf_iter_link_info`: thread, process, descriptor of one.
    let info = [0, process, 0];
    let attr = Attr {
        program: program.as_raw_fd().cast_unsigned(),
        target: 0,
        attach_type: BPF_TRACE_ITER,
        flags: 0,
        info: (&raw const info).addr() as u64,
        info_len: u32::try_from(size_of_val(&info)).unwrap_or_default(),
        pad: 0,
    };
    // SAFETY: `attr` and the `info` it points to live across the call, with their sizes.
    unsafe { descriptor(BPF_LINK_CREATE, (&raw const attr).cast(), size_of::<Attr>()) }
}

/// A file whose reading runs the iterator of this link once (`BPF_ITER_CREATE`).
pub(super) fn iterator(link: BorrowedFd<'_>) -> io::Result<File> {
    const BPF_ITER_CREATE: libc::c_int = 33;
    // The link and no flags.
    let attr = [link.as_raw_fd().cast_unsigned(), 0];
    // SAFETY: `attr` lives across the call, with its size.
    unsafe { descriptor(BPF_ITER_CREATE, (&raw const attr).cast(), size_of_val(&attr)) }.map(File::from)
}

/// The new descriptor that a command of the `bpf` system call gives.
///
/// # Safety
///
/// `attr` is what the command reads, `len` bytes of it, with all that it points to.
unsafe fn descriptor(command: libc::c_int, attr: *const u8, len: usize) -> io::Result<OwnedFd> {
    // SAFETY: the caller's promise; the kernel only reads.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attr, len) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = i32::try_from(result).map_err(io::Error::other)?;
    // SAFETY: just created, owned by nobody else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Whether there is such a process, as far as this one may know.
pub(super) fn lives(process: u32) -> bool {
    let Ok(process) = i32::try_from(process) else { return false };
    // SAFETY: signal 0 is none; it only looks.
    let result = unsafe { libc::kill(process, 0) };
    result == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

/// Whether the kernel has the `bpf` system call at all and lets this process reach it: a call that can only be
/// answered by EINVAL or EPERM.
pub(super) fn bpf_reachable() -> io::Result<()> {
    // SAFETY: an unknown command with no attributes; the kernel reads nothing.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, libc::c_int::MAX, std::ptr::null_mut::<u8>(), 0usize) };
    let error = io::Error::last_os_error();
    if result >= 0 || error.raw_os_error() != Some(libc::ENOSYS) { Ok(()) } else { Err(error) }
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
