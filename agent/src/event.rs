//! What every source (kernel hooks, packet captures, recordings) delivers: one closed enum.
//!
//! Pure data: no I/O, no clock, no unsafe code.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// Nanoseconds on the source's monotonic clock. From the kernel: `CLOCK_MONOTONIC` (`bpf_ktime_get_ns`).
/// From a packet capture: the packet's own time stamp, nanoseconds since the epoch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Mono(pub u64);

impl Mono {
    /// Nanoseconds from `earlier` to `self`, zero when the order is the other way round.
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// This moment moved on by `nanos`, saturating.
    #[must_use]
    pub const fn plus(self, nanos: u64) -> Self {
        Self(self.0.saturating_add(nanos))
    }
}

/// One second in the unit of [`Mono`].
pub const SECOND: u64 = 1_000_000_000;

/// Names one end of one TCP connection: the kernel's socket cookie, or a number that `replay` made up for
/// each end it saw. Two ends of one connection on one host have two of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SocketId(pub u64);

/// Addresses of one end. IPv4-mapped IPv6 addresses are already turned into IPv4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Addresses {
    /// This end.
    pub local: SocketAddr,
    /// The other end (unspecified address and port 0 for a listening socket).
    pub peer: SocketAddr,
}

/// `comm` of a task: at most 15 bytes and a NUL (kernel: `TASK_COMM_LEN`).
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub struct Comm(pub [u8; 16]);

impl Comm {
    /// The name up to its NUL, invalid UTF-8 replaced.
    pub fn to_text(self) -> String {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(self.0.len());
        String::from_utf8_lossy(self.0.get(..end).unwrap_or_default()).into_owned()
    }
}

impl From<Comm> for String {
    fn from(comm: Comm) -> Self {
        comm.to_text()
    }
}

impl From<String> for Comm {
    fn from(text: String) -> Self {
        let mut comm = Self::default();
        comm.0.iter_mut().take(15).zip(text.bytes()).for_each(|(to, from)| *to = from);
        comm
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.to_text())
    }
}

/// Who made the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Task {
    /// Process id, host numbering.
    pub tgid: u32,
    /// Thread id, host numbering.
    pub tid: u32,
    /// Name of the process: `comm` of its main thread (I/O threads of every engine have the same name).
    pub comm: Comm,
    /// Cgroup v2 id, 0 when unknown.
    pub cgroup: u64,
}

/// Which way bytes went, seen from the socket that reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Direction {
    /// Accepted by a send call of this socket.
    Sent,
    /// Returned by a receive call of this socket.
    Received,
}

/// One thing that a source delivers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event<'a> {
    /// Something happened to a socket.
    Socket(SocketEvent<'a>),
    /// Something happened to a thread of an engine process.
    Task(TaskEvent),
    /// What a connection of an engine process has carried that is no control connection.
    Carried(Carried),
}

/// What TCP has counted on a connection of an engine process that carries neither ZMTP nor HTTP, since it was opened. A SYN and a FIN
/// count one each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// When it was read.
    pub at: Mono,
    /// Which connection.
    pub socket: SocketId,
    /// The process that made the last call on it that was looked at (host numbering), 0 for none.
    pub process: u32,
    /// Bytes that the peer's kernel has acknowledged (`tcp_info`'s `tcpi_bytes_acked`).
    pub acked: u64,
    /// Bytes received (`tcpi_bytes_received`).
    pub received: u64,
    /// It was opened while the source looked: all of it passed since then.
    pub opened: bool,
    /// It is closed: there will be no more.
    pub closed: bool,
}

/// One thing that happened to one thread of an engine process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskEvent {
    /// When.
    pub at: Mono,
    /// Which thread, of which process.
    pub task: Task,
    /// The thread's own name (that in `task` is its process's).
    pub name: Comm,
    /// What happened.
    pub what: TaskChange,
}

/// The closed set of things that happen to a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TaskChange {
    /// It has ended.
    Exited {
        /// As `wait` would have it (kernel: `task_struct.exit_code`): the signal in the low seven bits, the status above
        /// the eighth. Of a thread that returned: 0.
        code: u32,
        /// It was the last of its process: the process is gone.
        process: bool,
    },
}

/// One thing that happened to one socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketEvent<'a> {
    /// When.
    pub at: Mono,
    /// To which socket.
    pub socket: SocketId,
    /// Network namespace inode, 0 when unknown.
    pub netns: u32,
    /// Its addresses.
    pub addresses: Addresses,
    /// The task in whose context it happened, where that task is the socket's user.
    pub task: Option<Task>,
    /// What happened.
    pub what: What<'a>,
}

/// The closed set of things that happen to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What<'a> {
    /// A call moved bytes.
    Bytes(Bytes<'a>),
    /// The connection changed state.
    State(StateChange),
    /// A socket that was there before the source began to look.
    Found(Found),
    /// TCP had trouble with it.
    Trouble(Trouble),
    /// Where it stands, because somebody asked.
    Stand(Stand),
}

/// Bytes accepted by a send or returned by a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes<'a> {
    /// Which way.
    pub direction: Direction,
    /// TCP sequence number just behind the last of these bytes (absolute, 32 bits, wraps); the sequence
    /// number of a byte is the same at both ends. `start = end - len`.
    pub end: u32,
    /// How many bytes the call moved.
    pub len: u32,
    /// The bytes, or why they are not here.
    pub body: Body<'a>,
    /// First byte of this socket's own stream that the peer's kernel has not acknowledged.
    pub snd_una: u32,
    /// Next byte expected from the peer.
    pub rcv_nxt: u32,
}

/// Bytes of a call: whole, its two ends, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// All `len` bytes.
    Whole(&'a [u8]),
    /// Of a call on an HTTP connection its first and its last bytes; together fewer than `len`, either may be empty. What
    /// lies between them never leaves the kernel.
    Ends {
        /// The first bytes.
        head: &'a [u8],
        /// The last bytes.
        tail: &'a [u8],
    },
    /// Only the length is known.
    Absent(NotCaptured),
}

/// Why the bytes of a call are not in its record. Each is a label value of `roomtrace_not_captured_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum NotCaptured {
    /// Longer than 8192 bytes: libzmq never lets such a call cross a frame's end, so lengths suffice.
    TooLong,
    /// The system call is not one of those whose arguments name a buffer (splice, sendfile, sendmmsg, …).
    Syscall,
    /// The call ran in an io_uring or kernel thread: the task's registers say nothing about it.
    KernelThread,
    /// The descriptor in the call's first argument is not this socket: its buffer is not this stream's.
    OtherDescriptor,
    /// A receive with TRUNC or OOB: the buffer does not hold these bytes of the stream.
    Flags,
    /// The buffer is scattered over more pieces than the program follows.
    Vectors,
    /// Reading the caller's memory failed.
    Fault,
    /// The connection had used up what may be captured before it is judged.
    Budget,
    /// The packet was cut short by the capture's snap length.
    Snaplen,
    /// The middle of a call, or a later call of an answer, on an HTTP connection: left out on purpose.
    Middle,
}

impl NotCaptured {
    /// Every reason, in label order.
    pub const ALL: [Self; 10] = [
        Self::TooLong,
        Self::Syscall,
        Self::KernelThread,
        Self::OtherDescriptor,
        Self::Flags,
        Self::Vectors,
        Self::Fault,
        Self::Budget,
        Self::Snaplen,
        Self::Middle,
    ];

    /// The label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::TooLong => "too_long",
            Self::Syscall => "syscall",
            Self::KernelThread => "kernel_thread",
            Self::OtherDescriptor => "other_descriptor",
            Self::Flags => "flags",
            Self::Vectors => "vectors",
            Self::Fault => "fault",
            Self::Budget => "budget",
            Self::Snaplen => "snaplen",
            Self::Middle => "middle",
        }
    }
}

/// TCP states, by the kernel's numbers (`include/net/tcp_states.h`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u8)]
#[allow(missing_docs, reason = "the names are the protocol's own")]
pub enum TcpState {
    Established = 1,
    SynSent = 2,
    SynRecv = 3,
    FinWait1 = 4,
    FinWait2 = 5,
    TimeWait = 6,
    Close = 7,
    CloseWait = 8,
    LastAck = 9,
    Listen = 10,
    Closing = 11,
    NewSynRecv = 12,
    /// A number the kernel's header of 6.18 does not have.
    Other = 255,
}

impl TcpState {
    /// From the kernel's number.
    pub const fn from_kernel(n: u8) -> Self {
        match n {
            1 => Self::Established,
            2 => Self::SynSent,
            3 => Self::SynRecv,
            4 => Self::FinWait1,
            5 => Self::FinWait2,
            6 => Self::TimeWait,
            7 => Self::Close,
            8 => Self::CloseWait,
            9 => Self::LastAck,
            10 => Self::Listen,
            11 => Self::Closing,
            12 => Self::NewSynRecv,
            _ => Self::Other,
        }
    }
}

/// A change of TCP state. `SynSent → Established` is a connection this side opened, `SynRecv → Established`
/// one it accepted, `SynSent → Close` with error 111 one that was refused, `Established → Close` with 104 a
/// reset, `Established → CloseWait` a FIN from the peer, `Listen → Close` a listener that went away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateChange {
    /// State before.
    pub old: TcpState,
    /// State after.
    pub new: TcpState,
    /// `sk_err` at that moment: an errno, 0 for none.
    pub error: u32,
    /// Sequence numbers at that moment.
    pub sequence: Sequence,
}

/// Sequence numbers of one socket at one moment (absolute, 32 bits, wrapping).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sequence {
    /// Behind the last byte accepted for sending (`write_seq`; a FIN counts one).
    pub write: u32,
    /// First byte the peer's kernel has not acknowledged (`snd_una`).
    pub una: u32,
    /// Behind the last byte returned to a reader (`copied_seq`).
    pub copied: u32,
    /// Next byte expected from the peer (`rcv_nxt`).
    pub rcv_nxt: u32,
}

/// A socket found at start (task_file iterator), or the first sight of a connection in the middle of a
/// capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its state.
    pub state: TcpState,
    /// Where its two streams stand: bytes before these are gone.
    pub sequence: Sequence,
    /// Sequence number of the first byte ever sent / received on it, where the kernel could tell it
    /// (`None`: not known, the stream is joined in its middle).
    pub base: Option<(u32, u32)>,
}

/// Trouble that TCP itself had with a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Trouble {
    /// It sent again what was not acknowledged (kernel: tracepoint `tcp_retransmit_skb`).
    Retransmitted {
        /// First byte not acknowledged at that moment.
        una: u32,
        /// Behind the last byte accepted for sending.
        write: u32,
    },
    /// It sent a reset (kernel: `tcp_send_reset`).
    ResetSent,
    /// It got a reset (kernel: `tcp_receive_reset`).
    ResetReceived,
}

/// Where a socket stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stand {
    /// Its state.
    pub state: TcpState,
    /// Sequence numbers: `write - una` bytes are not acknowledged, `rcv_nxt - copied` bytes are not read.
    pub sequence: Sequence,
    /// Behind the last byte that left: `write - sent` bytes wait in this host's kernel (`snd_nxt`).
    pub sent: u32,
    /// Retransmissions under way of the byte at `una` (`icsk_retransmits`).
    pub retransmits: u32,
}
