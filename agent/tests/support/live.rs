//! For tests that capture on the running kernel: starts a capture or says loudly that it cannot, keeps events,
//! and compares what they claim with the bytes that really went.
#![allow(
    dead_code,
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    clippy::undocumented_unsafe_blocks,
    clippy::cast_possible_truncation,
    clippy::missing_panics_doc,
    missing_docs,
    unreachable_pub,
    reason = "tests"
)]

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use roomtrace::event::{
    Addresses, Body, Carried, Direction, Event, Found, NotCaptured, SocketEvent, SocketId, Stand,
    StateChange, Task, TaskEvent, TcpState, Trouble, What,
};
use roomtrace::kernel::{Capture, CaptureConfig, KernelError};

/// First bytes of a ZMTP connection, as libzmq sends them.
pub const GREETING: &[u8] = b"\xff\0\0\0\0\0\0\0\x01\x7f";

/// An event that owns its bytes.
#[derive(Clone, Debug)]
pub struct Seen {
    pub socket: SocketId,
    pub netns: u32,
    pub addresses: Addresses,
    pub task: Option<Task>,
    pub what: Kept,
}

#[derive(Clone, Debug)]
pub enum Kept {
    Bytes { direction: Direction, end: u32, len: u32, body: Result<Vec<u8>, NotCaptured> },
    State(StateChange),
    Found(Found),
    Ends { direction: Direction, end: u32, len: u32, head: Vec<u8>, tail: Vec<u8> },
    Trouble(Trouble),
    Stand(Stand),
}

impl Seen {
    pub fn of(event: SocketEvent<'_>) -> Self {
        let what = match event.what {
            What::Bytes(b) => {
                let (direction, end, len) = (b.direction, b.end, b.len);
                let body = match b.body {
                    Body::Whole(bytes) => Ok(bytes.to_vec()),
                    Body::Absent(why) => Err(why),
                    Body::Ends { head, tail } => {
                        let (head, tail) = (head.to_vec(), tail.to_vec());
                        let what = Kept::Ends { direction, end, len, head, tail };
                        let (socket, netns, task) = (event.socket, event.netns, event.task);
                        return Self { socket, netns, addresses: event.addresses, task, what };
                    }
                };
                Kept::Bytes { direction, end, len, body }
            }
            What::State(s) => Kept::State(s),
            What::Found(f) => Kept::Found(f),
            What::Trouble(t) => Kept::Trouble(t),
            What::Stand(s) => Kept::Stand(s),
        };
        Self { socket: event.socket, netns: event.netns, addresses: event.addresses, task: event.task, what }
    }

    pub fn state(&self) -> Option<StateChange> {
        if let Kept::State(s) = self.what { Some(s) } else { None }
    }

    pub fn found(&self) -> Option<Found> {
        if let Kept::Found(f) = self.what { Some(f) } else { None }
    }
}

pub struct Live {
    pub capture: Capture,
    pub events: Vec<Seen>,
    pub tasks: Vec<TaskEvent>,
    pub carried: Vec<Carried>,
}

/// A capture, or `None` after saying that this machine cannot (which fails in CI).
pub fn start(config: &CaptureConfig) -> Option<Live> {
    match Capture::start(config) {
        Ok(capture) => Some(Live { capture, events: Vec::new(), tasks: Vec::new(), carried: Vec::new() }),
        Err(
            e @ (KernelError::NotPrivileged { .. } | KernelError::NoBpf { .. } | KernelError::NoHook { .. }),
        ) => {
            skip(&e.to_string());
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// One capture for all tests of a file, one test at a time: loading takes seconds in a debug build.
pub fn shared() -> Option<MutexGuard<'static, Live>> {
    static SHARED: OnceLock<Option<Mutex<Live>>> = OnceLock::new();
    let Some(live) = SHARED.get_or_init(|| start(&CaptureConfig::default()).map(Mutex::new)) else {
        skip("no capture on this machine, as said above");
        return None;
    };
    let mut live = live.lock().unwrap_or_else(PoisonError::into_inner);
    live.drain();
    live.events.clear();
    live.tasks.clear();
    live.carried.clear();
    Some(live)
}

/// Says that a test did not run; fails where `CI=true`.
pub fn skip(why: &str) {
    println!("SKIPPED: {why}");
    assert!(std::env::var("CI").as_deref() != Ok("true"), "in CI every test must run: {why}");
}

impl Live {
    /// Takes everything that was recorded until now, also what another CPU is still writing.
    pub fn drain(&mut self) {
        let Self { capture, events, tasks, carried } = self;
        let mut keep = |event: Event<'_>| match event {
            Event::Socket(event) => events.push(Seen::of(event)),
            Event::Task(event) => tasks.push(event),
            Event::Carried(told) => carried.push(told),
        };
        while capture.drain(1000, &mut keep) > 0 {}
        capture.drain_recorded(&mut keep).unwrap();
    }

    /// Takes events until `enough` or a generous time has passed.
    pub fn until(&mut self, enough: impl Fn(&[Seen]) -> bool) -> bool {
        let end = Instant::now() + Duration::from_mins(1);
        loop {
            self.drain();
            if enough(&self.events) {
                return true;
            }
            if Instant::now() > end {
                return false;
            }
            self.capture.wait(Duration::from_millis(5)).unwrap();
        }
    }

    /// The socket with this local and peer address.
    pub fn socket(&self, local: SocketAddr, peer: SocketAddr) -> Option<SocketId> {
        self.events.iter().find(|e| e.addresses.local == local && e.addresses.peer == peer).map(|e| e.socket)
    }

    pub fn of(&self, socket: SocketId) -> impl Iterator<Item = &Seen> {
        self.events.iter().filter(move |e| e.socket == socket)
    }

    /// Compares one direction of one socket with the bytes that really went; see [`Coverage`].
    pub fn coverage(&self, socket: SocketId, direction: Direction, truth: &[u8]) -> Coverage {
        let base = self
            .of(socket)
            .filter_map(Seen::state)
            .find(|s| s.new == TcpState::Established)
            .map(|s| if direction == Direction::Sent { s.sequence.write } else { s.sequence.copied })
            .expect("the connection was seen when it was established");
        let mut coverage = Coverage { length: truth.len(), ..Coverage::default() };
        let mut records: Vec<(usize, usize, Result<Vec<u8>, NotCaptured>)> = Vec::new();
        for event in self.of(socket) {
            if let Kept::Bytes { direction: d, end, len, body } = &event.what
                && *d == direction
            {
                let start = end.wrapping_sub(*len).wrapping_sub(base) as usize;
                records.push((start, start + *len as usize, body.clone()));
            }
        }
        let mut times = vec![0u8; truth.len() + 1];
        for (start, end, body) in &records {
            assert!(
                *end <= truth.len() + 1,
                "bytes beyond the end of the stream: {start}..{end} of {}",
                truth.len()
            );
            for n in &mut times[*start..*end] {
                *n = n.saturating_add(1);
            }
            if let Err(why) = body {
                *coverage.absent.entry(*why).or_default() += end - start;
            }
        }
        let bytes_with =
            |is: &dyn Fn(u8) -> bool| times[..truth.len()].iter().copied().filter(|t| is(*t)).count();
        coverage.holes = bytes_with(&|t| t == 0);
        coverage.overlaps = bytes_with(&|t| t > 1);
        for (start, end, body) in &records {
            if let Ok(bytes) = body {
                let wrong = (*start..*end).any(|n| times[n] == 1 && truth.get(n) != Some(&bytes[n - start]));
                if wrong {
                    coverage.wrong.push(*start..*end);
                } else {
                    coverage.captured += end - start;
                }
            }
        }
        coverage
    }
}

/// How one direction of a connection was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Bytes that went.
    pub length: usize,
    /// Bytes captured, and right.
    pub captured: usize,
    /// Bytes of which only the length was seen, by reason.
    pub absent: BTreeMap<NotCaptured, usize>,
    /// Bytes that no record claims.
    pub holes: usize,
    /// Bytes that two records claim.
    pub overlaps: usize,
    /// Records with bytes that never stood there.
    pub wrong: Vec<std::ops::Range<usize>>,
}

impl Coverage {
    /// All bytes captured, none twice, none wrong.
    pub fn assert_whole(&self) {
        assert_eq!(self, &Self { length: self.length, captured: self.length, ..Self::default() });
    }
}

/// A connection whose first bytes are a greeting, so that the kernel follows it.
pub struct Pair {
    pub client: TcpStream,
    pub server: TcpStream,
    /// What went from client to server so far.
    pub sent: Vec<u8>,
}

impl Pair {
    pub fn new(host: &str) -> Self {
        let listener = TcpListener::bind((host, 0)).unwrap();
        Self::on(&listener)
    }

    pub fn on(listener: &TcpListener) -> Self {
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (server, _) = listener.accept().unwrap();
        let mut pair = Self { client, server, sent: Vec::new() };
        pair.client.set_nodelay(true).unwrap();
        pair.send(GREETING);
        pair.read(GREETING.len());
        pair
    }

    /// Sends through the standard library (`sendto`).
    pub fn send(&mut self, bytes: &[u8]) {
        self.client.write_all(bytes).unwrap();
        self.sent.extend_from_slice(bytes);
    }

    /// Reads through the standard library (`recvfrom`).
    pub fn read(&mut self, n: usize) -> Vec<u8> {
        let mut bytes = vec![0; n];
        self.server.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub fn fds(&self) -> (i32, i32) {
        (self.client.as_raw_fd(), self.server.as_raw_fd())
    }

    pub fn addresses(&self) -> (SocketAddr, SocketAddr) {
        let canonical = |a: SocketAddr| SocketAddr::new(a.ip().to_canonical(), a.port());
        (canonical(self.client.local_addr().unwrap()), canonical(self.client.peer_addr().unwrap()))
    }

    /// Coverage of client → server, seen at the sender and at the receiver.
    pub fn coverage(&self, live: &mut Live) -> (Coverage, Coverage) {
        live.drain();
        let (local, peer) = self.addresses();
        let sender = live.socket(local, peer).expect("the client's socket was seen");
        let receiver = live.socket(peer, local).expect("the server's socket was seen");
        (
            live.coverage(sender, Direction::Sent, &self.sent),
            live.coverage(receiver, Direction::Received, &self.sent),
        )
    }
}

/// Result of a system call that must succeed.
pub fn ok(result: isize) -> usize {
    assert!(result >= 0, "{}", std::io::Error::last_os_error());
    result.cast_unsigned()
}
