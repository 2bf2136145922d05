//! Every way to send and to receive on a watched connection: never a wrong byte in a record, and every byte that
//! is in none shows as a hole or as a length with its reason.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    clippy::undocumented_unsafe_blocks,
    clippy::cast_possible_truncation,
    clippy::borrow_as_ptr,
    clippy::ptr_as_ptr,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::many_single_char_names,
    reason = "tests, with system calls of which the standard library knows nothing"
)]

#[path = "support/live.rs"]
mod live;

use std::collections::BTreeMap;
use std::io::{Read as _, Seek as _, Write as _};
use std::mem::zeroed;
use std::os::fd::AsRawFd as _;
use std::sync::MutexGuard;
use std::time::Duration;

use live::{Coverage, Kept, Live, Pair, ok};
use roomtrace::event::{Direction, NotCaptured, TcpState};

const TEXT: &[u8] = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";

fn start() -> Option<MutexGuard<'static, Live>> {
    live::shared()
}

fn pause() {
    std::thread::sleep(Duration::from_millis(20));
}

/// What is expected where `lost` bytes are seen by length only.
fn absent(length: usize, why: NotCaptured, lost: usize) -> Coverage {
    Coverage { length, captured: length - lost, absent: BTreeMap::from([(why, lost)]), ..Coverage::default() }
}

fn iov(parts: &mut [&mut [u8]]) -> Vec<libc::iovec> {
    parts.iter_mut().map(|p| libc::iovec { iov_base: p.as_mut_ptr().cast(), iov_len: p.len() }).collect()
}

fn message(iov: &mut [libc::iovec]) -> libc::msghdr {
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = iov.as_mut_ptr();
    message.msg_iovlen = iov.len();
    message
}

#[test]
fn flat_calls_are_captured_whole() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    let (c, s) = pair.fds();
    // Each size class and its borders.
    for len in [1, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 8191, 8192] {
        let bytes: Vec<u8> = (0..len).map(|n| (n % 251) as u8).collect();
        pair.send(&bytes);
        pair.read(len);
    }
    let mut into = [0u8; 100];
    assert_eq!(ok(unsafe { libc::write(c, TEXT.as_ptr().cast(), 10) }), 10);
    pair.sent.extend_from_slice(&TEXT[..10]);
    pause();
    assert_eq!(ok(unsafe { libc::read(s, into.as_mut_ptr().cast(), 100) }), 10);
    let (sent, received) = pair.coverage(&mut live);
    sent.assert_whole();
    received.assert_whole();
}

#[test]
fn longer_calls_are_seen_by_length() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    pair.send(&vec![b'x'; 8193]);
    pair.send(TEXT);
    let mut into = vec![0u8; 20_000];
    let mut got = 0;
    pause();
    while got < 8193 + TEXT.len() {
        got += pair.server.read(&mut into).unwrap();
    }
    let (sent, received) = pair.coverage(&mut live);
    assert_eq!(sent, absent(sent.length, NotCaptured::TooLong, 8193));
    assert_eq!((received.holes, received.overlaps, received.wrong.len()), (0, 0, 0));
}

#[test]
fn scattered_buffers_are_followed() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    let (c, s) = pair.fds();
    let mut long = vec![b'L'; 3000];
    let mut text = TEXT.to_vec();
    let (a, rest) = text.split_at_mut(4);
    let (b, d) = rest.split_at_mut(0);
    let mut out = iov(&mut [a, b, d]);
    let total = TEXT.len();
    assert_eq!(ok(unsafe { libc::writev(c, out.as_ptr(), 3) }), total);
    pair.sent.extend_from_slice(TEXT);
    pause();
    let (mut x, mut y) = ([0u8; 5], [0u8; 200]);
    let into = iov(&mut [&mut x, &mut y]);
    assert_eq!(ok(unsafe { libc::readv(s, into.as_ptr(), 2) }), total);

    let head = message(&mut out);
    assert_eq!(ok(unsafe { libc::sendmsg(c, &head, 0) }), total);
    pair.sent.extend_from_slice(TEXT);
    pause();
    let mut into = iov(&mut [&mut x, &mut y]);
    let mut head = message(&mut into);
    assert_eq!(ok(unsafe { libc::recvmsg(s, &mut head, 0) }), total);

    // More than 256 bytes, and a receive shorter than its buffers.
    let mut text = TEXT.to_vec();
    let out = iov(&mut [&mut text, &mut long]);
    assert_eq!(ok(unsafe { libc::writev(c, out.as_ptr(), 2) }), total + 3000);
    pair.sent.extend_from_slice(TEXT);
    pair.sent.extend_from_slice(&long);
    pause();
    let (mut x, mut y) = ([0u8; 1000], [0u8; 7000]);
    let into = iov(&mut [&mut x, &mut y]);
    assert_eq!(ok(unsafe { libc::readv(s, into.as_ptr(), 2) }), total + 3000);
    let (sent, received) = pair.coverage(&mut live);
    sent.assert_whole();
    received.assert_whole();
}

#[test]
fn more_pieces_than_are_followed_give_a_length() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    let (c, _) = pair.fds();
    let mut parts = [[b'p'; 3]; 9];
    let mut parts: Vec<&mut [u8]> = parts.iter_mut().map(<[u8; 3]>::as_mut_slice).collect();
    let out = iov(&mut parts);
    assert_eq!(ok(unsafe { libc::writev(c, out.as_ptr(), 9) }), 27);
    pair.sent.extend_from_slice(&[b'p'; 27]);
    pair.read(27);
    let (sent, received) = pair.coverage(&mut live);
    assert_eq!(sent, absent(sent.length, NotCaptured::Vectors, 27));
    received.assert_whole();
}

#[test]
fn calls_that_name_no_buffer_give_a_length() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    let (c, _) = pair.fds();
    // sendmmsg: two messages, two calls of the hook.
    let (mut one, mut two) = (*b"first--", *b"second-");
    let (mut a, mut b) = (iov(&mut [&mut one]), iov(&mut [&mut two]));
    let mut both: [libc::mmsghdr; 2] = unsafe { zeroed() };
    both[0].msg_hdr = message(&mut a);
    both[1].msg_hdr = message(&mut b);
    assert_eq!(unsafe { libc::sendmmsg(c, both.as_mut_ptr(), 2, 0) }, 2);
    pair.sent.extend_from_slice(b"first--second-");
    // sendfile
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(TEXT).unwrap();
    file.rewind().unwrap();
    let mut at = 0;
    assert_eq!(ok(unsafe { libc::sendfile(c, file.as_raw_fd(), &mut at, 30) }), 30);
    pair.sent.extend_from_slice(&TEXT[..30]);
    // splice into the socket
    let mut pipe = [0; 2];
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    ok(unsafe { libc::write(pipe[1], TEXT.as_ptr().cast(), 20) });
    let spliced = unsafe { libc::splice(pipe[0], std::ptr::null_mut(), c, std::ptr::null_mut(), 20, 0) };
    assert_eq!(ok(spliced), 20);
    pair.sent.extend_from_slice(&TEXT[..20]);
    pair.send(b"after");
    pair.read(14 + 30 + 20 + 5);
    let (sent, received) = pair.coverage(&mut live);
    assert_eq!(sent, absent(sent.length, NotCaptured::Syscall, 14 + 30 + 20));
    received.assert_whole();
}

#[test]
fn splice_out_of_the_socket_leaves_a_hole() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    let (_, s) = pair.fds();
    pair.send(&TEXT[..20]);
    pause();
    let mut pipe = [0; 2];
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let spliced = unsafe { libc::splice(s, std::ptr::null_mut(), pipe[1], std::ptr::null_mut(), 8, 0) };
    assert_eq!(ok(spliced), 8);
    pair.read(12);
    pair.send(b"after");
    pair.read(5);
    let (sent, received) = pair.coverage(&mut live);
    sent.assert_whole();
    let length = received.length;
    assert_eq!(received, Coverage { length, captured: length - 8, holes: 8, ..Coverage::default() });
}

#[test]
fn peeking_is_no_receive_and_truncated_or_urgent_bytes_are_not_read() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    let (c, s) = pair.fds();
    let mut into = [b'#'; 64];
    let mut recv = |n, flags| ok(unsafe { libc::recv(s, into.as_mut_ptr().cast(), n, flags) });
    pair.send(&TEXT[..10]);
    pause();
    assert_eq!(recv(10, libc::MSG_PEEK), 10);
    assert_eq!(recv(10, 0), 10);
    pair.send(&TEXT[..10]);
    pause();
    // TCP drops these six without touching the buffer.
    assert_eq!(recv(6, libc::MSG_TRUNC), 6);
    assert_eq!(recv(64, 0), 4);
    // Whole before its time: a receive that waits for two sends.
    pair.send(&TEXT[..5]);
    let mut second = pair.client.try_clone().unwrap();
    let later = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        second.write_all(&TEXT[5..10]).unwrap();
    });
    assert_eq!(recv(10, libc::MSG_WAITALL), 10);
    later.join().unwrap();
    pair.sent.extend_from_slice(&TEXT[5..10]);
    let (sent, received) = pair.coverage(&mut live);
    sent.assert_whole();
    assert_eq!(received, absent(received.length, NotCaptured::Flags, 6));

    // An urgent byte: no wrong byte, whatever else.
    assert_eq!(ok(unsafe { libc::send(c, b"!".as_ptr().cast(), 1, libc::MSG_OOB) }), 1);
    pair.sent.push(b'!');
    pause();
    unsafe { libc::recv(s, into.as_mut_ptr().cast(), 1, libc::MSG_OOB) };
    pair.send(b"after");
    pause();
    pair.server.set_nonblocking(true).unwrap();
    while pair.server.read(&mut into).is_ok_and(|n| n > 0) {}
    let (sent, received) = pair.coverage(&mut live);
    sent.assert_whole();
    assert!(received.wrong.is_empty(), "{received:?}");
}

#[test]
fn short_sends_count_what_was_accepted_and_failed_calls_give_nothing() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    pair.client.set_nonblocking(true).unwrap();
    pair.server.set_nonblocking(true).unwrap();
    let mut into = vec![0u8; 1 << 20];
    assert!(pair.server.read(&mut into).is_err(), "nothing there: EAGAIN");
    let big = vec![b'z'; 8000];
    loop {
        match pair.client.write(&big) {
            Ok(n) => pair.sent.extend_from_slice(&big[..n]),
            Err(e) => {
                assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock);
                break;
            }
        }
    }
    pair.server.set_nonblocking(false).unwrap();
    let mut got = live::GREETING.len();
    while got < pair.sent.len() {
        got += pair.server.read(&mut into[..4096]).unwrap();
        live.drain();
    }
    let (sent, received) = pair.coverage(&mut live);
    sent.assert_whole();
    received.assert_whole();
}

#[test]
fn zero_copy_sends_are_bytes_and_their_notices_are_none() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    let (c, _) = pair.fds();
    let one = 1i32;
    let set = unsafe { libc::setsockopt(c, libc::SOL_SOCKET, libc::SO_ZEROCOPY, (&raw const one).cast(), 4) };
    assert_eq!(set, 0);
    let bytes = vec![b'Q'; 5000];
    assert_eq!(ok(unsafe { libc::send(c, bytes.as_ptr().cast(), 5000, libc::MSG_ZEROCOPY) }), 5000);
    pair.sent.extend_from_slice(&bytes);
    pair.read(5000);
    pause();
    let mut control = [0u8; 200];
    let mut notice: libc::msghdr = unsafe { zeroed() };
    notice.msg_control = control.as_mut_ptr().cast();
    notice.msg_controllen = control.len();
    unsafe { libc::recvmsg(c, &mut notice, libc::MSG_ERRQUEUE) };
    let (sent, received) = pair.coverage(&mut live);
    sent.assert_whole();
    received.assert_whole();
}

#[test]
fn a_fin_does_not_move_the_bytes_before_it() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    pair.send(b"last words");
    pair.client.shutdown(std::net::Shutdown::Write).unwrap();
    pause();
    // This receive takes the FIN too, which counts one in the kernel's sequence numbers.
    let mut into = [0u8; 100];
    assert_eq!(pair.server.read(&mut into).unwrap(), 10);
    assert_eq!(pair.server.read(&mut into).unwrap(), 0);
    let (sent, received) = pair.coverage(&mut live);
    sent.assert_whole();
    received.assert_whole();
    let (local, peer) = pair.addresses();
    let server = live.socket(peer, local).unwrap();
    let fin =
        |live: &Live| live.of(server).filter_map(live::Seen::state).any(|s| s.new == TcpState::CloseWait);
    assert!(fin(&live), "the FIN is reported");
}

#[test]
fn a_reset_is_reported_with_its_error_and_what_was_not_acknowledged() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    pair.send(b"abc");
    pause();
    let (_, s) = pair.fds();
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let size = size_of::<libc::linger>() as u32;
    unsafe { libc::setsockopt(s, libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), size) };
    let (local, peer) = pair.addresses();
    drop(pair.server);
    let reset = |events: &[live::Seen]| {
        events
            .iter()
            .filter(|e| e.addresses.local == local && e.addresses.peer == peer)
            .filter_map(live::Seen::state)
            .any(|s| s.new == TcpState::Close && s.error == libc::ECONNRESET.cast_unsigned())
    };
    assert!(live.until(reset), "{:#?}", live.events);
}

#[test]
fn a_descriptor_passed_to_a_child_is_followed_in_the_child() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    let (c, _) = pair.fds();
    // The child only makes system calls, which is allowed after fork in a process with threads.
    let child = unsafe { libc::fork() };
    if child == 0 {
        unsafe {
            libc::send(c, b"from child".as_ptr().cast(), 10, 0);
            libc::_exit(0);
        }
    }
    let mut status = 0;
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    pair.sent.extend_from_slice(b"from child");
    pair.read(10);
    let (sent, received) = pair.coverage(&mut live);
    sent.assert_whole();
    received.assert_whole();
    let by_child = live.events.iter().any(|e| {
        matches!(&e.what, Kept::Bytes { body: Ok(b), direction: Direction::Sent, .. } if b == b"from child")
            && e.task.is_some_and(|t| t.tgid == child.cast_unsigned())
    });
    assert!(by_child, "the record names the process that called");
}

#[test]
fn ipv6_and_mapped_addresses_are_told_apart() {
    let Some(mut live) = start() else { return };
    let mut six = Pair::new("::1");
    six.send(TEXT);
    six.read(TEXT.len());
    let (sent, received) = six.coverage(&mut live);
    sent.assert_whole();
    received.assert_whole();
    assert!(six.addresses().0.is_ipv6());

    // A server on `::` that an IPv4 client reaches: its socket is IPv6 with mapped addresses.
    let listener = std::net::TcpListener::bind("[::]:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let client = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let (server, _) = listener.accept().unwrap();
    assert!(server.local_addr().unwrap().is_ipv6());
    let mut mapped = Pair { client, server, sent: Vec::new() };
    mapped.send(live::GREETING);
    mapped.send(TEXT);
    mapped.read(live::GREETING.len() + TEXT.len());
    assert!(mapped.addresses().0.is_ipv4());
    let (sent, received) = mapped.coverage(&mut live);
    sent.assert_whole();
    received.assert_whole();
}

#[test]
fn greetings_in_pieces_are_recognised_and_others_are_muted() {
    let Some(mut live) = start() else { return };
    for pieces in [&[10usize, 1, 53][..], &[11, 53], &[1, 9, 54], &[64], &[5, 5, 54]] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        client.set_nodelay(true).unwrap();
        let mut pair = Pair { client, server, sent: Vec::new() };
        let mut whole = live::GREETING.to_vec();
        whole.resize(64, 0);
        let mut rest = &whole[..];
        for n in pieces {
            let (now, later) = rest.split_at(*n);
            pair.send(now);
            pair.read(*n);
            rest = later;
        }
        let (sent, received) = pair.coverage(&mut live);
        sent.assert_whole();
        received.assert_whole();
    }
    let before = live.capture.counters().unwrap().foreign;
    let known = live.events.len();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    for first in [&b"GET / HTTP/1.1\r\n"[..], b"\xff\0\0\0\0\0\0\0\0\0 not ZMTP", b"\x16\x03\x01"] {
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let mut pair = Pair { client, server, sent: Vec::new() };
        pair.send(first);
        pair.read(first.len());
        pair.send(b"more");
        pair.read(4);
    }
    live.drain();
    let port = listener.local_addr().unwrap().port();
    let of_it = live.events[known..]
        .iter()
        .filter(|e| e.addresses.local.port() == port || e.addresses.peer.port() == port)
        .count();
    assert_eq!(of_it, 0, "not one record of a connection that does not begin as ZMTP does");
    assert!(live.capture.counters().unwrap().foreign >= before + 6);
}

#[test]
fn mptcp_is_counted_as_not_visible() {
    let Some(mut live) = start() else { return };
    let socket = || unsafe { libc::socket(libc::AF_INET, libc::SOCK_STREAM, libc::IPPROTO_MPTCP) };
    let (server, client) = (socket(), socket());
    if server < 0 {
        println!("not tried: this kernel has no MPTCP");
        return;
    }
    let mut address: libc::sockaddr_in = unsafe { zeroed() };
    address.sin_family = libc::AF_INET as u16;
    address.sin_addr.s_addr = u32::from_ne_bytes([127, 0, 0, 1]);
    let mut size = size_of::<libc::sockaddr_in>() as u32;
    let at = (&raw mut address).cast::<libc::sockaddr>();
    unsafe {
        assert_eq!(libc::bind(server, at, size), 0);
        assert_eq!(libc::listen(server, 1), 0);
        assert_eq!(libc::getsockname(server, at, &mut size), 0);
    }
    let before = live.capture.counters().unwrap().mptcp;
    assert_eq!(unsafe { libc::connect(client, at, size) }, 0);
    let accepted = unsafe { libc::accept(server, std::ptr::null_mut(), std::ptr::null_mut()) };
    let mut into = [0u8; 100];
    unsafe {
        libc::send(client, live::GREETING.as_ptr().cast(), 10, 0);
        libc::recv(accepted, into.as_mut_ptr().cast(), 100, 0);
    }
    live.drain();
    let port = u16::from_be(address.sin_port);
    assert!(
        live.events.iter().all(|e| e.addresses.peer.port() != port || !matches!(e.what, Kept::Bytes { .. }))
    );
    assert!(live.capture.counters().unwrap().mptcp > before, "{:?}", live.capture.counters());
}

/// Sends of each of the two threads, and their length.
const EACH: usize = 10_000;
const LEN: usize = 48;

#[test]
fn two_senders_on_one_socket_never_give_bytes_that_pass_for_right() {
    let Some(mut live) = start() else { return };
    let mut pair = Pair::new("127.0.0.1");
    let mut reader = pair.server.try_clone().unwrap();
    let reader = std::thread::spawn(move || {
        let mut all = vec![0u8; 2 * EACH * LEN];
        for part in all.chunks_mut(4096) {
            reader.read_exact(part).unwrap();
        }
        all
    });
    let senders: Vec<_> = (0..2u8)
        .map(|who| {
            let mut socket = pair.client.try_clone().unwrap();
            std::thread::spawn(move || {
                for n in 0..EACH {
                    let mut bytes = [b'a' + who; LEN];
                    bytes[..8].copy_from_slice(&(n as u64).to_be_bytes());
                    socket.write_all(&bytes).unwrap();
                }
            })
        })
        .collect();
    while senders.iter().any(|s| !s.is_finished()) || !reader.is_finished() {
        live.drain();
        std::thread::sleep(Duration::from_millis(1));
    }
    pair.sent.extend(reader.join().unwrap());
    let (sent, received) = pair.coverage(&mut live);
    received.assert_whole();
    println!("two senders: {} holes, {} overlaps, {} misplaced", sent.holes, sent.overlaps, sent.wrong.len());
    // Bytes can be attributed to a neighbour's place only where the sequence numbers also show a hole before and
    // an overlap behind: whoever uses the offsets knows that this stretch is not to be trusted.
    assert!(sent.wrong.is_empty() || (sent.holes > 0 && sent.overlaps > 0), "{sent:?}");
    assert!(sent.wrong.len() * LEN <= sent.holes, "{sent:?}");
}
