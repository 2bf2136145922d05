//! An `io_uring` receive on one watched socket completes while its thread sits in `read` on another: the thread's
//! registers then name the other connection's buffer. The bytes must not be taken for the first one's.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::undocumented_unsafe_blocks,
    clippy::cast_possible_truncation,
    reason = "tests, with raw io_uring: `include/uapi/linux/io_uring.h`"
)]

#[path = "support/live.rs"]
mod live;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use live::{Coverage, Live, Pair, ok};
use roomtrace::event::NotCaptured;

const IORING_OFF_SQES: i64 = 0x1000_0000;
const IORING_OP_RECV: u8 = 27;

#[repr(C)]
#[derive(Default)]
struct Params {
    /// Entries and settings.
    head: [u32; 10],
    /// Offsets in the submission ring: head, tail, mask, entries, flags, dropped, array.
    submission: [u32; 10],
    completion: [u32; 10],
}

#[repr(C)]
#[derive(Default)]
struct Entry {
    opcode: u8,
    flags: u8,
    priority: u16,
    fd: i32,
    offset: u64,
    address: u64,
    len: u32,
    message_flags: u32,
    rest: [u64; 4],
}

/// Submits one receive and does not wait for it. `None`: this machine has no `io_uring` for us.
fn submit_receive(fd: i32, into: &mut [u8]) -> Option<OwnedFd> {
    let mut params = Params::default();
    let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 4, &raw mut params) };
    if ring < 0 {
        return None;
    }
    let ring = unsafe { OwnedFd::from_raw_fd(ring as i32) };
    let map = |at: i64| {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let memory =
            unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, libc::MAP_SHARED, ring.as_raw_fd(), at) };
        assert_ne!(memory, libc::MAP_FAILED);
        memory
    };
    let (submission, entries) = (map(0), map(IORING_OFF_SQES));
    let entry = Entry {
        opcode: IORING_OP_RECV,
        fd,
        address: into.as_mut_ptr() as u64,
        len: into.len() as u32,
        ..Entry::default()
    };
    unsafe {
        entries.cast::<Entry>().write(entry);
        submission.byte_add(params.submission[6] as usize).cast::<u32>().write(0);
        submission.byte_add(params.submission[1] as usize).cast::<u32>().write_volatile(1);
        let nothing = std::ptr::null::<u8>();
        ok(libc::syscall(libc::SYS_io_uring_enter, ring.as_raw_fd(), 1, 0, 0, nothing, 0) as isize);
    }
    Some(ring)
}

/// Waits for what must come, and no longer than that can take.
fn until(holds: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !holds() && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Receives on `ringed` through `io_uring` while this thread sits in `read` on `read`. `false`: no `io_uring` here.
fn receive_while_reading(ringed: &mut Pair, read: &mut Pair) -> bool {
    let mut by_ring = [0u8; 64];
    let Some(_ring) = submit_receive(ringed.fds().1, &mut by_ring) else {
        live::skip("io_uring is switched off on this machine");
        return false;
    };
    let (mut to_ringed, mut to_read) = (ringed.client.try_clone().unwrap(), read.client.try_clone().unwrap());
    // What the kernel says of this thread while it sits in that call.
    let sits = format!("{} {:#x} ", libc::SYS_read, read.fds().1);
    let call = format!("/proc/self/task/{}/syscall", unsafe { libc::gettid() });
    let last = by_ring[14..].as_ptr() as usize;
    let sender = std::thread::spawn(move || {
        until(|| std::fs::read_to_string(&call).is_ok_and(|call| call.starts_with(&sits)));
        to_ringed.write_all(b"REAL-URING-DATA").unwrap();
        until(|| unsafe { (last as *const u8).read_volatile() } != 0);
        to_read.write_all(b"for-read").unwrap();
    });
    let mut by_read = *b"STALE-STACK-SECRET----";
    let got = unsafe { libc::read(read.fds().1, by_read.as_mut_ptr().cast(), by_read.len()) };
    sender.join().unwrap();
    assert_eq!((ok(got), &by_ring[..15]), (8, &b"REAL-URING-DATA"[..]));
    ringed.sent.extend_from_slice(b"REAL-URING-DATA");
    read.sent.extend_from_slice(b"for-read");
    true
}

#[test]
fn a_receive_through_io_uring_never_gives_another_connections_bytes() {
    let Some(mut live) = live::shared() else { return };
    let (mut ringed, mut read) = (Pair::new("127.0.0.1"), Pair::new("127.0.0.1"));
    if !receive_while_reading(&mut ringed, &mut read) {
        return;
    }
    assert_length_only(&mut live, &ringed, &read);
}

#[test]
fn nor_does_one_on_an_http_connection() {
    let Some(mut live) = live::shared() else { return };
    assert!(live.capture.watch_process(std::process::id()).unwrap());
    let pair = || {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut pair = Pair { client, server: listener.accept().unwrap().0, sent: Vec::new() };
        pair.send(b"POST /generate HTTP/1.1\r\n\r\n");
        pair.read(27);
        pair
    };
    let (mut ringed, mut read) = (pair(), pair());
    if receive_while_reading(&mut ringed, &mut read) {
        assert_length_only(&mut live, &ringed, &read);
    }
    live.capture.forget_process(std::process::id());
}

fn assert_length_only(live: &mut Live, ringed: &Pair, read: &Pair) {
    let (sent, received) = ringed.coverage(live);
    sent.assert_whole();
    let absent = BTreeMap::from([(NotCaptured::OtherDescriptor, 15)]);
    let length = received.length;
    assert_eq!(received, Coverage { length, captured: length - 15, absent, ..Coverage::default() });
    let (sent, received) = read.coverage(live);
    sent.assert_whole();
    received.assert_whole();
}
