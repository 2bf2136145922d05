//! HTTP of processes that user space counts among the engines: requests and the begin of answers are there, right to
//! the byte; nothing of what lies between the ends of a long call, nor of a streamed answer, ever leaves the kernel.
//!
//! The watched process is this test's own, so both ends of each connection are seen; the tests tell their sockets apart
//! by port.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::undocumented_unsafe_blocks,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::borrow_as_ptr,
    clippy::print_stdout,
    reason = "tests, with system calls of which the standard library knows nothing"
)]

#[path = "support/live.rs"]
mod live;

use std::io::{Seek as _, Write as _};
use std::mem::zeroed;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::process::Command;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use live::{Kept, Live, Seen, ok};
use roomtrace::event::{Direction, NotCaptured, SocketId, TcpState};
use roomtrace::kernel::{CaptureConfig, Judgement};

use Direction::{Received, Sent};

const END: usize = 1024;
const REQUEST: &[u8] = b"POST /generate HTTP/1.1\r\nContent-Length: 22\r\n\r\n{\"bootstrap_room\": 77}";
const OK: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n";
const STREAM: &[u8] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
const LAST: &[u8] = b"0\r\n\r\n";

/// The capture that all tests share, which counts this process among the engines.
fn watching() -> Option<MutexGuard<'static, Live>> {
    let mut live = live::shared()?;
    assert!(live.capture.watch_process(std::process::id()).unwrap());
    Some(live)
}

/// Waits until the connections of the test before are counted no longer: the kernel may need a moment to end them.
fn others_gone(live: &Live) {
    let end = Instant::now() + Duration::from_secs(10);
    while live.capture.sockets().unwrap().http > 0 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Bytes of which no two stretches are alike.
fn text(len: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(len + 8);
    let mut n = 0;
    while out.len() < len {
        out.extend_from_slice(format!("{n} ").as_bytes());
        n += 1;
    }
    out.truncate(len);
    out
}

/// What a record has of its call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Whole,
    /// How many bytes of the begin, and of the end.
    Ends(usize, usize),
    Absent(NotCaptured),
}

/// Where a call begins in its direction, its length, and what is there of it.
type Call = (usize, usize, Part);

use Part::{Absent, Ends, Whole};
const MIDDLE: Part = Absent(NotCaptured::Middle);

/// One connection and all that went through it.
struct Talk {
    client: TcpStream,
    server: TcpStream,
    asked: Vec<u8>,
    answered: Vec<u8>,
}

impl Talk {
    fn on(listener: &TcpListener) -> Self {
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        client.set_nodelay(true).unwrap();
        server.set_nodelay(true).unwrap();
        Self { client, server, asked: Vec::new(), answered: Vec::new() }
    }

    fn new() -> Self {
        Self::on(&TcpListener::bind("127.0.0.1:0").unwrap())
    }

    /// Client to server, read in one piece (none is longer than the socket's buffers).
    fn ask(&mut self, bytes: &[u8]) {
        self.client.write_all(bytes).unwrap();
        self.asked.extend_from_slice(bytes);
        self.hear(bytes.len());
    }

    /// The server reads this much, in one call.
    fn hear(&mut self, len: usize) {
        read(&self.server, len);
    }

    /// Server to client.
    fn answer(&mut self, bytes: &[u8]) {
        self.server.write_all(bytes).unwrap();
        self.answered.extend_from_slice(bytes);
        read(&self.client, bytes.len());
    }

    fn server_socket(&self, live: &Live) -> SocketId {
        let (here, there) = (self.server.local_addr().unwrap(), self.server.peer_addr().unwrap());
        live.socket(here, there).expect("the server's socket was seen")
    }

    fn client_socket(&self, live: &Live) -> SocketId {
        let (here, there) = (self.client.local_addr().unwrap(), self.client.peer_addr().unwrap());
        live.socket(here, there).expect("the client's socket was seen")
    }

    /// What the server received, and what it sent: where each call begins, and what of it is there.
    fn at_server(&self, live: &mut Live) -> (Vec<Call>, Vec<Call>) {
        live.drain();
        let socket = self.server_socket(live);
        (calls(live, socket, Received, &self.asked), calls(live, socket, Sent, &self.answered))
    }

    /// What the client sent, and what it received.
    fn at_client(&self, live: &mut Live) -> (Vec<Call>, Vec<Call>) {
        live.drain();
        let socket = self.client_socket(live);
        (calls(live, socket, Sent, &self.asked), calls(live, socket, Received, &self.answered))
    }
}

/// Waits until all of it is there, so that one call returns it.
fn read(from: &TcpStream, len: usize) {
    let mut into = vec![0; len];
    let fd = from.as_raw_fd();
    let got = unsafe { libc::recv(fd, into.as_mut_ptr().cast(), len, libc::MSG_WAITALL) };
    assert_eq!(ok(got), len);
}

/// Each call of one direction: start, length and what is there; all bytes that are there are compared with `truth`.
fn calls(live: &Live, socket: SocketId, way: Direction, truth: &[u8]) -> Vec<Call> {
    let mut base = None;
    let mut out = Vec::new();
    for event in live.of(socket) {
        let stand = match &event.what {
            Kept::State(s) if s.new == TcpState::Established => Some(s.sequence),
            Kept::Found(f) => Some(f.sequence),
            _ => None,
        };
        if let Some(s) = stand {
            base = Some(if way == Sent { s.write } else { s.copied });
        }
        let (end, len, part) = match &event.what {
            Kept::Bytes { direction, end, len, body } if *direction == way => {
                (*end, *len, body.as_ref().map_or_else(|why| Absent(*why), |_| Whole))
            }
            Kept::Ends { direction, end, len, head, tail } if *direction == way => {
                (*end, *len, Ends(head.len(), tail.len()))
            }
            _ => continue,
        };
        let len = len as usize;
        let start = end.wrapping_sub(base.expect("told of before its bytes")) as usize - len;
        let call = &truth[start..start + len];
        match &event.what {
            Kept::Bytes { body: Ok(bytes), .. } => assert_eq!(bytes, call),
            Kept::Ends { head, tail, .. } => {
                assert!(call.starts_with(head) && call.ends_with(tail), "wrong bytes at {start}: {event:?}");
            }
            _ => {}
        }
        out.push((start, len, part));
    }
    out
}

fn with_port(events: &[Seen], port: u16) -> Vec<&Seen> {
    events.iter().filter(|e| e.addresses.local.port() == port || e.addresses.peer.port() == port).collect()
}

fn parts(calls: &[Call]) -> Vec<Part> {
    calls.iter().map(|c| c.2.clone()).collect()
}

/// Asserts that the calls follow one another from the first byte to the last.
fn assert_gapless(calls: &[Call], len: usize) {
    let end = calls.iter().fold(0, |at, (start, len, _)| {
        assert_eq!(*start, at, "{calls:?}");
        start + len
    });
    assert_eq!(end, len);
}

#[test]
fn a_small_request_and_its_answer_are_there_whole_at_both_ends() {
    let Some(mut live) = watching() else { return };
    others_gone(&live);
    let before = live.capture.sockets().unwrap().http;
    let mut talk = Talk::new();
    talk.ask(REQUEST);
    talk.answer(OK);
    talk.answer(b"{}");
    let expected = (vec![(0, REQUEST.len(), Whole)], vec![(0, OK.len(), Whole), (OK.len(), 2, Whole)]);
    assert_eq!(talk.at_server(&mut live), expected);
    assert_eq!(talk.at_client(&mut live), expected);
    assert_eq!(live.capture.sockets().unwrap().http, before + 2);
    // Up to 2048 bytes are whole, more have two ends.
    for len in [1025, 2048, 2049, 8192, 8193] {
        talk.asked.clear();
        live.events.retain(|e| !matches!(e.what, Kept::Bytes { .. } | Kept::Ends { .. }));
        let mut fresh = Talk::new();
        let request = [b"POST /generate HTTP/1.1\r\n\r\n", &text(len)[..]].concat();
        fresh.ask(&request[..len]);
        let part = if len <= 2048 { Whole } else { Ends(END, END) };
        assert_eq!(fresh.at_server(&mut live).0, [(0, len, part.clone())]);
        assert_eq!(fresh.at_client(&mut live).0, [(0, len, part)]);
    }
}

#[test]
fn listeners_and_connections_from_before_are_found() {
    let Some(mut live) = watching() else { return };
    live.capture.forget_process(std::process::id());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let mut old = Talk::on(&listener);
    old.ask(REQUEST);
    old.answer(OK);
    let silent = Talk::on(&listener);
    live.drain();
    assert!(with_port(&live.events, port).is_empty(), "HTTP of any process: nothing");

    assert!(live.capture.watch_process(std::process::id()).unwrap());
    live.capture.search().unwrap();
    live.drain();
    let listens = with_port(&live.events, port)
        .into_iter()
        .any(|e| e.found().is_some_and(|f| f.state == TcpState::Listen));
    assert!(listens, "{:#?}", live.events);
    // The next on the kept-alive connection, the first on the silent one, and one that is opened now.
    old.asked.clear();
    old.answered.clear();
    for mut talk in [old, silent, Talk::on(&listener)] {
        talk.ask(REQUEST);
        talk.answer(OK);
        for n in 0..9 {
            talk.answer(&text(100 + n));
        }
        let (received, sent) = talk.at_server(&mut live);
        assert_eq!(received, [(0, REQUEST.len(), Whole)]);
        assert_eq!(sent.len(), 8, "it is known which direction answers");
        assert_eq!(parts(&sent[..3]), [Whole, Whole, MIDDLE]);
        assert_eq!(talk.at_client(&mut live).0, [(0, REQUEST.len(), Whole)]);
        assert_eq!(talk.at_client(&mut live).1.len(), 8);
    }
}

#[test]
fn of_a_long_body_the_ends_of_each_read_are_there_and_nothing_else() {
    let Some(mut live) = watching() else { return };
    let mut talk = Talk::new();
    let mut request = b"POST /generate HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n".to_vec();
    request.extend_from_slice(&text(1_000_000));
    talk.asked.clone_from(&request);
    let mut writer = talk.client.try_clone().unwrap();
    let sender = std::thread::spawn(move || writer.write_all(&request).unwrap());
    let mut into = vec![0; 256_000];
    let mut reads = Vec::new();
    while reads.iter().sum::<usize>() < talk.asked.len() {
        reads.push(ok(unsafe { libc::read(talk.server.as_raw_fd(), into.as_mut_ptr().cast(), into.len()) }));
    }
    sender.join().unwrap();
    let (received, _) = talk.at_server(&mut live);
    assert_eq!(received.iter().map(|c| c.1).collect::<Vec<_>>(), reads);
    assert_gapless(&received, talk.asked.len());
    for (_, len, part) in &received {
        assert_eq!(*part, if *len <= 2048 { Whole } else { Ends(END, END) });
    }
    let (sent, _) = talk.at_client(&mut live);
    assert_gapless(&sent, talk.asked.len());
}

#[test]
fn a_request_that_waits_for_leave_gets_its_answer_all_the_same() {
    let Some(mut live) = watching() else { return };
    let mut talk = Talk::new();
    talk.ask(b"POST /generate HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 22\r\n\r\n");
    talk.answer(b"HTTP/1.1 100 Continue\r\n\r\n");
    talk.ask(b"{\"bootstrap_room\": 77}");
    talk.answer(OK);
    talk.answer(&text(100));
    talk.answer(&text(101));
    let (received, sent) = talk.at_server(&mut live);
    assert_eq!(parts(&received), [Whole, Whole]);
    assert_eq!(parts(&sent), [Whole, Whole, Whole, MIDDLE]);
    assert_gapless(&sent, talk.answered.len());
    assert_eq!(talk.at_client(&mut live), (received, sent));
}

#[test]
fn a_request_that_comes_byte_by_byte_is_one() {
    let Some(mut live) = watching() else { return };
    let mut talk = Talk::new();
    for byte in REQUEST.chunks(1).take(30) {
        talk.ask(byte);
    }
    let (received, _) = talk.at_server(&mut live);
    assert_eq!(parts(&received), vec![Whole; 30]);
    assert_gapless(&received, 30);
}

#[test]
fn a_streamed_answer_is_muted_after_eight_calls_but_for_its_last_chunk_and_the_next_request_unmutes() {
    let Some(mut live) = watching() else { return };
    let mut talk = Talk::new();
    for round in 0..2 {
        live.events.retain(|e| e.state().is_some());
        let (asked, begun) = (talk.asked.len(), talk.answered.len());
        talk.ask(REQUEST);
        talk.answer(STREAM);
        for n in 0..499 {
            talk.answer(format!("20\r\n{n:032}\r\n").as_bytes());
        }
        talk.answer(LAST);
        for (received, sent) in [talk.at_server(&mut live), talk.at_client(&mut live)] {
            assert_eq!(received, [(asked, REQUEST.len(), Whole)], "round {round}");
            assert_eq!(sent.len(), 9, "{sent:?}");
            assert_eq!(parts(&sent[..2]), [Whole, Whole]);
            assert_eq!(parts(&sent[2..8]), vec![MIDDLE; 6]);
            assert_gapless(&sent[..8].iter().map(|c| (c.0 - begun, c.1, c.2.clone())).collect::<Vec<_>>(), {
                STREAM.len() + 7 * 38
            });
            assert_eq!(sent[8], (talk.answered.len() - LAST.len(), LAST.len(), Whole));
        }
    }
}

#[test]
fn pipelined_requests_are_all_there() {
    let Some(mut live) = watching() else { return };
    let mut talk = Talk::new();
    talk.ask(&[REQUEST, REQUEST].concat());
    talk.ask(REQUEST);
    talk.answer(OK);
    for n in 0..20 {
        talk.answer(&text(20 + n));
    }
    // In the middle of an answer: that is what unmutes, and costs eight calls more.
    talk.ask(REQUEST);
    for n in 0..20 {
        talk.answer(&text(20 + n));
    }
    let (received, sent) = talk.at_server(&mut live);
    assert_eq!(parts(&received), vec![Whole; 3]);
    assert_gapless(&received, 4 * REQUEST.len());
    assert_eq!(sent.len(), 16);
    assert_eq!(parts(&sent[8..11]), [Whole, Whole, MIDDLE]);
}

#[test]
fn of_what_this_side_asks_the_answers_are_what_it_receives() {
    let Some(mut live) = watching() else { return };
    let mut talk = Talk::new();
    let ask = b"GET /route?engine_rank=-1 HTTP/1.1\r\n\r\n";
    talk.ask(ask);
    let body = text(5000);
    talk.answer(&[OK, &body].concat());
    talk.answer(&text(3000));
    talk.answer(&text(4000));
    talk.ask(ask);
    let (sent, received) = talk.at_client(&mut live);
    assert_eq!(parts(&sent), [Whole, Whole]);
    assert_eq!(parts(&received), [Ends(END, END), Ends(END, END), MIDDLE]);
    assert_gapless(&received, talk.answered.len());
}

#[test]
fn scattered_answers_are_whole_or_have_the_ends_of_their_first_and_last_piece() {
    let Some(mut live) = watching() else { return };
    let write = |talk: &mut Talk, lens: &[usize]| {
        let pieces: Vec<Vec<u8>> = lens.iter().map(|len| text(*len)).collect();
        let out: Vec<libc::iovec> = pieces
            .iter()
            .map(|p| libc::iovec { iov_base: p.as_ptr().cast_mut().cast(), iov_len: p.len() })
            .collect();
        let sent = ok(unsafe { libc::writev(talk.server.as_raw_fd(), out.as_ptr(), out.len() as i32) });
        assert_eq!(sent, lens.iter().sum::<usize>());
        talk.answered.extend(pieces.concat());
        read(&talk.client, sent);
    };
    for (lens, part) in [
        (&[140, 60][..], Whole),
        (&[140, 1908], Whole),
        (&[140, 1909], Ends(140, END)),
        (&[3000, 10], Ends(END, 10)),
        (&[3000], Ends(END, END)),
        (&[0, 3000], Ends(0, END)),
        (&[3000, 0], Ends(END, END)),
        (&[500, 500, 500, 500, 500, 500, 500, 500], Ends(500, 500)),
        (&[500, 500, 500, 500, 500, 500, 500, 500, 9], Ends(500, 0)),
        (&[5, 5, 5, 5, 5, 5, 5, 5, 5], Ends(40, 0)),
        (&[200, 200, 200, 200, 200, 200, 200, 200, 5], Ends(END, 0)),
    ] {
        let mut talk = Talk::new();
        talk.ask(REQUEST);
        write(&mut talk, lens);
        let (_, sent) = talk.at_server(&mut live);
        assert_eq!(sent, [(0, lens.iter().sum(), part)], "{lens:?}");
    }
}

#[test]
fn scattered_requests_shorter_than_their_buffers_end_where_they_end() {
    let Some(mut live) = watching() else { return };
    let mut talk = Talk::new();
    let mut request = b"POST /generate HTTP/1.1\r\n\r\n".to_vec();
    request.extend(text(3000));
    talk.client.write_all(&request).unwrap();
    talk.asked.clone_from(&request);
    let mut peeked = vec![0u8; request.len()];
    let fd = talk.server.as_raw_fd();
    let flags = libc::MSG_PEEK | libc::MSG_WAITALL;
    assert_eq!(ok(unsafe { libc::recv(fd, peeked.as_mut_ptr().cast(), peeked.len(), flags) }), request.len());
    // The buffers hold more, and something else behind the bytes.
    let (mut a, mut b) = (vec![b'#'; 2500], vec![b'#'; 9000]);
    let mut into: Vec<libc::iovec> = [&mut a, &mut b]
        .into_iter()
        .map(|p| libc::iovec { iov_base: p.as_mut_ptr().cast(), iov_len: p.len() })
        .collect();
    let mut message: libc::msghdr = unsafe { zeroed() };
    message.msg_iov = into.as_mut_ptr();
    message.msg_iovlen = into.len();
    assert_eq!(ok(unsafe { libc::recvmsg(fd, &mut message, 0) }), request.len());
    let (received, _) = talk.at_server(&mut live);
    assert_eq!(received, [(0, request.len(), Ends(END, request.len() - 2500))]);
}

#[test]
fn calls_that_name_no_buffer_give_a_length_and_splice_out_of_a_request_a_hole() {
    let Some(mut live) = watching() else { return };
    let mut talk = Talk::new();
    talk.ask(REQUEST);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(OK).unwrap();
    file.rewind().unwrap();
    let mut at = 0;
    let sent = unsafe { libc::sendfile(talk.server.as_raw_fd(), file.as_raw_fd(), &mut at, OK.len()) };
    assert_eq!(ok(sent), OK.len());
    talk.answered.extend_from_slice(OK);
    read(&talk.client, OK.len());
    talk.answer(b"{}");
    // The first half of the next request goes into a pipe.
    talk.client.write_all(REQUEST).unwrap();
    talk.asked.extend_from_slice(REQUEST);
    let mut pipe = [0; 2];
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let mut peeked = vec![0u8; REQUEST.len()];
    let (fd, null) = (talk.server.as_raw_fd(), std::ptr::null_mut());
    let flags = libc::MSG_PEEK | libc::MSG_WAITALL;
    ok(unsafe { libc::recv(fd, peeked.as_mut_ptr().cast(), peeked.len(), flags) });
    assert_eq!(ok(unsafe { libc::splice(fd, null, pipe[1], null, 20, 0) }), 20);
    talk.hear(REQUEST.len() - 20);
    let (received, sent) = talk.at_server(&mut live);
    assert_eq!(received, [(0, REQUEST.len(), Whole), (REQUEST.len() + 20, REQUEST.len() - 20, Whole)]);
    assert_eq!(sent, [(0, OK.len(), Absent(NotCaptured::Syscall)), (OK.len(), 2, Whole)]);
}

#[test]
fn a_first_request_that_cannot_be_read_is_no_obstacle_to_the_second() {
    let Some(mut live) = watching() else { return };
    let mut talk = Talk::new();
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(REQUEST).unwrap();
    file.rewind().unwrap();
    let mut at = 0;
    let sent = unsafe { libc::sendfile(talk.client.as_raw_fd(), file.as_raw_fd(), &mut at, REQUEST.len()) };
    assert_eq!(ok(sent), REQUEST.len());
    talk.asked.extend_from_slice(REQUEST);
    talk.hear(REQUEST.len());
    talk.ask(REQUEST);
    let (sent, _) = talk.at_client(&mut live);
    assert_eq!(parts(&sent), [Absent(NotCaptured::Syscall), Whole]);
    assert_gapless(&sent, talk.asked.len());
}

#[test]
fn what_is_neither_zmtp_nor_http_1_is_shipped_until_it_can_be_named_and_not_longer() {
    let Some(mut live) = watching() else { return };
    others_gone(&live);
    let hello = [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", &text(500)[..]].concat();
    for first in [&hello[..], b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03"] {
        let before = live.capture.sockets().unwrap();
        let mut talk = Talk::new();
        talk.ask(first);
        talk.ask(b"and so on");
        let (received, _) = talk.at_server(&mut live);
        assert_eq!(received, [(0, first.len(), Whole), (first.len(), 9, Whole)]);
        assert_eq!(live.capture.sockets().unwrap().http, before.http);
        // As user space does that has named it.
        for socket in [talk.server_socket(&live), talk.client_socket(&live)] {
            live.capture.judge(socket, Judgement::Foreign).unwrap();
        }
        talk.ask(&text(100));
        assert_eq!(talk.at_server(&mut live).0.len(), 2);
        assert_eq!(talk.at_client(&mut live).0.len(), 2);
    }
    // Nobody answers: it is forgotten after a few KiB.
    let muted = live.capture.counters().unwrap().muted;
    let mut talk = Talk::new();
    talk.ask(&hello);
    for n in 0..20 {
        talk.ask(&text(1000 + n));
    }
    assert_eq!(talk.at_server(&mut live).0.len(), 5);
    assert!(live.capture.counters().unwrap().muted >= muted + 2);
}

/// The header of a transfer's piece (Mooncake's `tcp_transport.cpp`, 0.3): size, address, opcode.
fn piece(bytes: u64) -> Vec<u8> {
    [bytes, 0x7f00_0000_0000, 1].iter().flat_map(|n| n.to_le_bytes()).collect()
}

#[test]
fn a_transfer_that_begins_with_a_capital_letter_is_counted_and_http_is_not() {
    let Some(mut live) = watching() else { return };
    others_gone(&live);
    // What each end of a connection has carried last, acknowledged and received together, and whether it is closed.
    let carried = |live: &Live, socket: SocketId| {
        let last = live.carried.iter().rev().find(|c| c.socket == socket);
        last.map(|c| (c.acked + c.received, c.closed))
    };
    let ask_carried = |live: &mut Live| {
        // Acknowledged is what the other end's kernel has said so of.
        std::thread::sleep(Duration::from_millis(50));
        live.capture.ask_carried().unwrap();
        live.drain();
    };
    // `N` of 12345678, in one call and in two, of which the first would do for a method.
    for first in [24, 1] {
        let others = live.capture.sockets().unwrap();
        let mut talk = Talk::new();
        let header = piece(if first == 1 { 12_345_680 } else { 12_345_678 });
        talk.ask(&header[..first]);
        live.drain();
        let (client, server) = (talk.client_socket(&live), talk.server_socket(&live));
        let http = live.capture.sockets().unwrap().http - others.http;
        assert_eq!(http, if first == 1 { 2 } else { 0 }, "taken for HTTP");
        // As user space does that has read it, here before the next call.
        for socket in [client, server] {
            live.capture.judge(socket, Judgement::Neither).unwrap();
        }
        ask_carried(&mut live);
        // The SYN is one of the end that connected.
        let sum = |asked: usize| (Some((asked as u64 + 1, false)), Some((asked as u64, false)));
        assert_eq!((carried(&live, client), carried(&live, server)), sum(first), "nothing called since");
        talk.ask(&[&header[first..], &text(3000)].concat());
        ask_carried(&mut live);
        assert_eq!((carried(&live, client), carried(&live, server)), sum(talk.asked.len()), "first {first}");
        let now = live.capture.sockets().unwrap();
        assert_eq!((now.http, now.carriers), (others.http, others.carriers + 2));
        drop(talk);
        live.drain();
        assert!(carried(&live, client).is_some_and(|(n, closed)| closed && n >= 3025), "at its end");
    }
    // What is HTTP is not, whatever user space finds wrong with it; nor is it while nobody has judged.
    let mut talk = Talk::new();
    talk.ask(REQUEST);
    talk.answer(OK);
    live.drain();
    let (client, server) = (talk.client_socket(&live), talk.server_socket(&live));
    ask_carried(&mut live);
    for socket in [client, server] {
        live.capture.judge(socket, Judgement::Foreign).unwrap();
    }
    talk.ask(REQUEST);
    ask_carried(&mut live);
    assert_eq!((carried(&live, client), carried(&live, server)), (None, None));
}

#[test]
fn user_space_can_judge_a_found_connection_to_be_http_and_an_http_one_to_be_foreign() {
    let Some(mut live) = watching() else { return };
    live.capture.forget_process(std::process::id());
    let mut talk = Talk::new();
    talk.ask(REQUEST);
    assert!(live.capture.watch_process(std::process::id()).unwrap());
    live.capture.search().unwrap();
    live.drain();
    talk.asked.clear();
    let server = talk.server_socket(&live);
    live.capture.judge(server, Judgement::Http).unwrap();
    // Nothing says which direction asks: both are shipped with their ends, until one begins a message.
    talk.ask(&text(3000));
    for n in 0..10 {
        talk.answer(&text(3000 + n));
    }
    let (received, sent) = talk.at_server(&mut live);
    assert_eq!(received, [(0, 3000, Ends(END, END))]);
    assert_eq!(parts(&sent), vec![Ends(END, END); 10]);
    talk.answer(OK);
    for n in 0..10 {
        talk.answer(&text(100 + n));
    }
    assert_eq!(parts(&talk.at_server(&mut live).1[10..13]), [Whole, Whole, MIDDLE]);
    assert_eq!(talk.at_server(&mut live).1.len(), 18);

    live.capture.judge(server, Judgement::Foreign).unwrap();
    talk.ask(REQUEST);
    talk.answer(OK);
    let (received, sent) = talk.at_server(&mut live);
    assert_eq!((received.len(), sent.len()), (1, 18), "foreign from the next request on");
}

#[test]
fn hang_ups_are_told_with_where_the_streams_stand() {
    let Some(mut live) = watching() else { return };
    let mut talk = Talk::new();
    talk.ask(REQUEST);
    talk.answer(STREAM);
    for n in 0..20 {
        talk.answer(&text(100 + n));
    }
    talk.client.shutdown(Shutdown::Write).unwrap();
    live.drain();
    let server = talk.server_socket(&live);
    let fin = |live: &Live| {
        let states: Vec<_> = live.of(server).filter_map(Seen::state).collect();
        let opened = states.iter().find(|s| s.new == TcpState::Established).unwrap().sequence;
        states.iter().find(|s| s.new == TcpState::CloseWait).map(|s| {
            (s.sequence.write.wrapping_sub(opened.write), s.sequence.copied.wrapping_sub(opened.copied))
        })
    };
    assert!(live.until(|events| {
        events.iter().any(|e| e.socket == server && e.state().is_some_and(|s| s.new == TcpState::CloseWait))
    }));
    // Where it stood although the last calls were muted.
    assert_eq!(fin(&live), Some((talk.answered.len() as u32, talk.asked.len() as u32)));

    let mut talk = Talk::new();
    talk.ask(REQUEST);
    live.drain();
    let server = talk.server_socket(&live);
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let size = size_of::<libc::linger>() as u32;
    let client = talk.client.as_raw_fd();
    unsafe { libc::setsockopt(client, libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), size) };
    drop(talk.client);
    let reset = libc::ECONNRESET.cast_unsigned();
    assert!(live.until(|events| {
        let mut of_it = events.iter().filter(|e| e.socket == server).filter_map(Seen::state);
        of_it.any(|s| s.new == TcpState::Close && s.error == reset)
    }));
}

#[test]
fn http_of_other_processes_is_nothing_and_their_end_of_an_engines_connection_neither() {
    let Some(mut live) = watching() else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let talk =
        format!("exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET / HTTP/1.1\\r\\n\\r\\n' >&3; read -r <&3");
    let mut child = Command::new("bash").args(["-c", &talk]).spawn().unwrap();
    let (mut server, peer) = listener.accept().unwrap();
    read(&server, 18);
    server.write_all(b"HTTP/1.1 204 No Content\r\n\r\n").unwrap();
    child.wait().unwrap();
    live.drain();
    let ends = |local: SocketAddr| live.events.iter().filter(|e| e.addresses.local == local).count();
    assert!(ends(server.local_addr().unwrap()) > 0);
    assert_eq!(ends(peer), 0, "the asking process is none of the engines");

    live.capture.forget_process(std::process::id());
    let mut talk = Talk::new();
    talk.ask(REQUEST);
    talk.answer(OK);
    live.drain();
    assert!(with_port(&live.events, talk.server.local_addr().unwrap().port()).is_empty());

    // An endpoint of which METADATA told: the attempt is of interest, HTTP to it is not.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    assert!(live.capture.watch_endpoint(at).unwrap());
    let mut talk = Talk::on(&listener);
    live.capture.forget_endpoint(at);
    talk.ask(REQUEST);
    live.drain();
    let client = talk.client_socket(&live);
    assert!(live.of(client).all(|e| e.state().is_some()), "{:#?}", live.events);
}

#[test]
fn with_the_switch_off_http_is_forgotten() {
    // No other capture of this process meanwhile: its judgements and counters would be others', its sockets not.
    let Some(_alone) = watching() else { return };
    let config = CaptureConfig { requests: false, ..CaptureConfig::default() };
    let Some(mut live) = live::start(&config) else { return };
    assert!(live.capture.watch_process(std::process::id()).unwrap());
    let mut talk = Talk::new();
    talk.ask(REQUEST);
    talk.answer(OK);
    // One that was there, and of which user space says what it is.
    live.capture.forget_process(std::process::id());
    let mut old = Talk::new();
    old.ask(REQUEST);
    assert!(live.capture.watch_process(std::process::id()).unwrap());
    live.capture.search().unwrap();
    live.drain();
    let server = old.server_socket(&live);
    live.capture.judge(server, Judgement::Http).unwrap();
    old.ask(REQUEST);
    live.drain();
    let bytes = live.of(server).filter(|e| matches!(e.what, Kept::Bytes { .. })).count();
    assert_eq!(bytes, 0);
    let of_it = with_port(&live.events, talk.server.local_addr().unwrap().port());
    assert!(of_it.iter().all(|e| !matches!(e.what, Kept::Bytes { .. } | Kept::Ends { .. })), "{of_it:#?}");
    assert_eq!(live.capture.sockets().unwrap().http, 0);
}
