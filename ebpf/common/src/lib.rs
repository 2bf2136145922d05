//! Records that the kernel programs write and the agent reads: plain `repr(C)` data, no padding left implicit.
//!
//! No code that acts, no unsafe code. The checked-in object is built from this file: after a change here run
//! `cargo xtask build-ebpf` (`--check` finds a stale object).
#![no_std]

pub mod batch;

/// Longest call whose bytes are shipped. libzmq reads and sends batches of messages in pieces of exactly this
/// size (`in_batch_size`, `out_batch_size` in libzmq's `src/config.hpp`).
pub const WHOLE: u32 = 8192;

/// Of a longer call on an HTTP connection the two ends are shipped, each this long.
pub const END: usize = 1024;

/// Sizes of the body areas of a record: constant, because `bpf_ringbuf_reserve` takes only constants.
pub const CLASSES: [usize; 5] = [64, 256, 1024, 2 * END, WHOLE as usize];

/// Of an HTTP answer so many calls are shipped with their bytes: its head and, where that came alone, what follows it.
pub const ANSWER_BYTES: u32 = 2;

/// So many calls of an HTTP answer are shipped, the later ones by their length; then none, but those of [`LAST_CHUNK`].
pub const ANSWER_CALLS: u32 = 8;

/// Calls of at most so many bytes are always shipped, for one of them may end a streamed answer: its last chunk is five
/// bytes (RFC 9112, section 7.1), with room for an extension.
pub const LAST_CHUNK: u32 = 16;

/// How many pieces of a scattered buffer (`struct iovec`) are followed.
pub const PIECES: usize = 8;

/// How many comm prefixes can be given.
pub const PREFIXES: usize = 8;

/// Whose call it is is asked for again after this many calls of one thread on one socket.
pub const CALLER_EVERY: u32 = 64;

/// Of one socket, retransmissions are reported at least this far apart, in nanoseconds. Less than the shortest time
/// after which an unanswered retransmission is repeated (200 ms, `TCP_RTO_MIN` in the kernel's `include/net/tcp.h`), so
/// only those are left out that come in a row because a loss is being repaired.
pub const TROUBLE_EVERY: u64 = 100_000_000;

/// How many sockets can be asked for at once.
pub const ASKED: usize = 64;

/// Of this many runs of a program one is timed.
pub const SAMPLE_EVERY: u64 = 128;

/// CPUs that have their own cost slot; higher numbers share one (the counts are then approximate).
pub const COST_SLOTS: usize = 128;

/// Places of the table in which the programs find sockets whose answer is muted without a look-up. Sockets that share
/// one cost more, nothing else.
pub const MUTED_SLOTS: usize = 4096;

/// [`Record::kind`].
pub mod kind {
    /// A call moved bytes.
    pub const BYTES: u8 = 1;
    /// A change of TCP state.
    pub const STATE: u8 = 2;
    /// A socket that was there before.
    pub const FOUND: u8 = 3;
    /// Where a socket stands, because user space asked: its TCP state in `old`, `snd_nxt` in `end`,
    /// `icsk_retransmits` in `len`.
    pub const STAND: u8 = 4;
    /// TCP had trouble ([`crate::trouble`] in `old`, the TCP state in `new`).
    pub const TROUBLE: u8 = 5;
    /// A thread has ended: its own name in `ends.local`, its exit code in `error`, 1 in `new` if its process is gone
    /// with it. There is no socket: the other fields but `at` and `caller` are zero.
    pub const EXIT: u8 = 6;
    /// What a socket in [`crate::state::CARRIER`] has carried since it was opened: bytes that the peer's kernel has acknowledged
    /// in `write_seq` (low half) and `snd_una` (high half), bytes received in `copied_seq` and `rcv_nxt`; its TCP state in
    /// `new`. Flag [`crate::flag::BASE`]: it was opened while the programs ran. `caller` is the one of its last call that was looked at.
    pub const CARRIED: u8 = 7;
}

/// [`Record::old`] of a [`kind::TROUBLE`].
pub mod trouble {
    /// Sent again.
    pub const RETRANSMITTED: u8 = 1;
    /// Sent a reset.
    pub const RESET_SENT: u8 = 2;
    /// Got a reset.
    pub const RESET_RECEIVED: u8 = 3;
}

/// [`Record::direction`], and index of the two directions wherever there is an array of two.
pub mod direction {
    /// Accepted by a send.
    pub const SENT: u8 = 0;
    /// Returned by a receive.
    pub const RECEIVED: u8 = 1;
}

/// [`Record::reason`]: why a record carries no bytes.
pub mod reason {
    /// It does carry them.
    pub const NONE: u8 = 0;
    /// Longer than [`crate::WHOLE`].
    pub const TOO_LONG: u8 = 1;
    /// Not one of the eight system calls, or one of the other direction.
    pub const SYSCALL: u8 = 2;
    /// Kernel or `io_uring` thread.
    pub const KERNEL_THREAD: u8 = 3;
    /// The descriptor in the first argument is another file.
    pub const OTHER_DESCRIPTOR: u8 = 4;
    /// A receive with TRUNC or OOB.
    pub const FLAGS: u8 = 5;
    /// More pieces than [`crate::PIECES`].
    pub const VECTORS: u8 = 6;
    /// Reading the caller's memory failed.
    pub const FAULT: u8 = 7;
    /// The connection used up what is shipped before it is judged.
    pub const BUDGET: u8 = 8;
    /// A later call of an HTTP answer. (Counted under this number too: calls of which the two ends were shipped.)
    pub const MIDDLE: u8 = 9;
}

/// [`Record::flags`].
pub mod flag {
    /// The task fields say something.
    pub const TASK: u8 = 1;
    /// `base` says something.
    pub const BASE: u8 = 2;
    /// Addresses are IPv6 (else IPv4 in the first four bytes).
    pub const V6: u8 = 4;
    /// Not the whole body follows but `head` bytes of its begin and, [`crate::END`] behind the record, `tail` bytes of its end.
    pub const ENDS: u8 = 8;
}

/// Whose call it is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caller {
    /// Cgroup id of the task.
    pub cgroup: u64,
    /// Process id (host numbering).
    pub tgid: u32,
    /// Thread id (host numbering).
    pub tid: u32,
    /// Name of the process (its main thread).
    pub comm: [u8; 16],
}

/// The two ends of a connection, which no call changes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// This end's address: 4 or 16 bytes.
    pub local: [u8; 16],
    /// The other end's address.
    pub peer: [u8; 16],
    /// This end's port, host order.
    pub local_port: u16,
    /// The other end's port, host order.
    pub peer_port: u16,
    /// Network namespace inode.
    pub netns: u32,
}

/// Head of every record in the ring. The captured bytes follow it directly.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// `bpf_ktime_get_ns`.
    pub at: u64,
    /// Socket cookie.
    pub cookie: u64,
    /// As it was at most [`CALLER_EVERY`] calls of the thread on this socket ago (flag [`flag::TASK`]).
    pub caller: Caller,
    /// Where it goes.
    pub ends: Ends,
    /// Bytes moved by the call.
    pub len: u32,
    /// Sequence number behind the call's last byte.
    pub end: u32,
    /// `write_seq`; 0 where bytes moved.
    pub write_seq: u32,
    /// `snd_una`.
    pub snd_una: u32,
    /// `copied_seq`; 0 where bytes moved.
    pub copied_seq: u32,
    /// `rcv_nxt`.
    pub rcv_nxt: u32,
    /// Sequence number of the first byte of each direction (flag [`flag::BASE`]).
    pub base: [u32; 2],
    /// `sk_err`.
    pub error: u32,
    /// See [`kind`].
    pub kind: u8,
    /// See [`direction`].
    pub direction: u8,
    /// See [`reason`].
    pub reason: u8,
    /// See [`flag`].
    pub flags: u8,
    /// TCP state before (of a state change), or now (of a found socket).
    pub old: u8,
    /// TCP state after.
    pub new: u8,
    /// How many bytes of the call's begin are there (flag [`flag::ENDS`]).
    pub head: u16,
    /// How many bytes of the call's end are there.
    pub tail: u16,
    /// Zero.
    pub pad: [u8; 2],
}

/// Size of [`Record`] in the ring.
pub const RECORD: usize = 136;
const _: () = assert!(size_of::<Record>() == RECORD);

/// [`Socket::state`].
pub mod state {
    /// Only just accepted from a listener, or closed and about to be used again.
    pub const NONE: u32 = 0;
    /// A listener of a watched process.
    pub const LISTENING: u32 = 1;
    /// A connect attempt of a watched process or to a watched endpoint.
    pub const CONNECTING: u32 = 2;
    /// Open, not judged yet.
    pub const PENDING: u32 = 3;
    /// Carries ZMTP.
    pub const ZMTP: u32 = 4;
    /// Carries HTTP.
    pub const HTTP: u32 = 5;
    /// Belongs to an engine process and carries neither: its calls are not looked at, its bytes are counted by TCP itself.
    pub const CARRIER: u32 = 6;
    /// How many there are.
    pub const COUNT: usize = 7;
}

/// [`Socket::flags`].
pub mod mark {
    /// Belongs to an engine process or goes to a watched endpoint or port: its states are reported before it is
    /// judged, and it is not muted for want of budget.
    pub const WATCHED: u32 = 1;
    /// The agent has been told of this socket.
    pub const ANNOUNCED: u32 = 2;
    /// Seen from its first byte on: `base` says something.
    pub const FRESH: u32 = 4;
    /// This side connected.
    pub const ACTIVE: u32 = 8;
    /// It is closed: not counted among the open ones any more. What it had received can still be read.
    pub const CLOSED: u32 = 16;
    /// `ends` and `family` say something.
    pub const NAMED: u32 = 32;
    /// Belongs to an engine process or has a configured port: HTTP on it is followed too.
    pub const OURS: u32 = 64;
    /// Begins neither as ZMTP nor as HTTP does: user space is to say what it is.
    pub const STRANGE: u32 = 128;
    /// HTTP requests are what it sends.
    pub const ASKS: u32 = 256;
    /// HTTP requests are what it receives. (Neither: not known yet.)
    pub const ANSWERS: u32 = 512;
}

/// What the kernel remembers of a watched socket, in its socket storage. No entry: a foreign socket.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Socket {
    /// Cookie, so that the helper is called once.
    pub cookie: u64,
    /// When it was established.
    pub at: u64,
    /// When a retransmission of it was last reported.
    pub trouble_at: u64,
    /// See [`mark`]; changed atomically.
    pub flags: u32,
    /// See [`state`].
    pub state: u32,
    /// Sequence number of the first byte of each direction.
    pub base: [u32; 2],
    /// Bytes that may still be shipped before it is judged.
    pub budget: u32,
    /// Calls for which user space's judgement is still looked up.
    pub look_ups: u32,
    /// [`flag::V6`] or 0.
    pub family: u32,
    /// Calls of the thread of `caller` since it was asked for.
    pub calls: u32,
    /// Calls of the answer's direction since the last one of the requests' (at most [`ANSWER_CALLS`]).
    pub answered: u32,
    /// Zero.
    pub pad: u32,
    /// Who made the last call, so that it need not be asked for each time.
    pub caller: Caller,
    /// Read once as well.
    pub ends: Ends,
}

/// User space's answer about a pending socket.
pub mod judgement {
    /// Follow it.
    pub const ZMTP: u32 = 1;
    /// Forget it.
    pub const FOREIGN: u32 = 2;
    /// Follow it as HTTP.
    pub const HTTP: u32 = 3;
    /// As [`FOREIGN`]; it carries neither ZMTP nor HTTP, whatever it began like.
    pub const NEITHER: u32 = 4;
}

/// An address and port to which connect attempts are reported.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// IPv6, or IPv4 mapped into it.
    pub address: [u8; 16],
    /// Host order.
    pub port: u16,
    /// Zero.
    pub pad: [u8; 6],
}

/// One per-CPU counter each, in the map `COUNTERS`.
pub mod counter {
    /// Records that the full ring refused.
    pub const RING_FULL: u32 = 0;
    /// Sockets that could not be remembered (storage refused).
    pub const STORAGE_REFUSED: u32 = 1;
    /// Sockets that user space's judgement or the greeting turned away.
    pub const FOREIGN: u32 = 2;
    /// Sockets that were muted because nothing readable came within their budget.
    pub const MUTED: u32 = 3;
    /// MPTCP sockets established: their bytes are not visible.
    pub const MPTCP: u32 = 4;
    /// Records written.
    pub const RECORDS: u32 = 5;
    /// Calls on watched sockets without bytes, or without those between their ends, by reason: this plus
    /// [`crate::reason`].
    pub const NOT_CAPTURED: u32 = 6;
    /// Sockets that entered a state: this plus [`crate::state`].
    pub const ENTERED: u32 = 16;
    /// Sockets that left a state: this plus [`crate::state`].
    pub const LEFT: u32 = 24;
    /// Retransmissions that were not reported because the socket's last one was reported less than
    /// [`crate::TROUBLE_EVERY`] before.
    pub const RETRANSMISSIONS_MERGED: u32 = 32;
    /// How many there are.
    pub const COUNT: u32 = 33;
}

/// The programs, in the order of their cost slots.
pub mod program {
    /// `sock_send_length`.
    pub const SEND: usize = 0;
    /// `sock_recv_length`.
    pub const RECEIVE: usize = 1;
    /// `inet_sock_set_state`.
    pub const STATE: usize = 2;
    /// `iter/task_file`.
    pub const FOUND: usize = 3;
    /// `iter/task_file` again, for those that user space asks for.
    pub const STAND: usize = 4;
    /// `sched_process_exit`.
    pub const EXIT: usize = 5;
    /// `tcp_retransmit_skb`.
    pub const RETRANSMIT: usize = 6;
    /// `tcp_send_reset`.
    pub const RESET_SENT: usize = 7;
    /// `tcp_receive_reset`.
    pub const RESET_RECEIVED: usize = 8;
    /// `iter/task_file` once more, for what the engines' other connections have carried.
    pub const CARRIED: usize = 9;
    /// How many there are.
    pub const COUNT: usize = 10;
    /// Their names in the object (which also has `rt_empty`, that does nothing, to measure against).
    pub const NAMES: [&str; COUNT] = [
        "rt_send",
        "rt_receive",
        "rt_state",
        "rt_found",
        "rt_stand",
        "rt_exit",
        "rt_retransmit",
        "rt_reset_sent",
        "rt_reset_received",
        "rt_carried",
    ];
}

/// Own cost of one program on one CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    /// Runs.
    pub runs: u64,
    /// Runs that were timed.
    pub sampled: u64,
    /// Nanoseconds of the timed runs.
    pub nanos: u64,
    /// Zero; keeps two slots to a cache line.
    pub pad: u64,
}

/// What user space hands over as the constant `SETTINGS` before loading.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Settings {
    /// Where the kernel's structures keep what the programs read.
    pub at: Offsets,
    /// System call numbers of this machine.
    pub calls: Calls,
    /// Above this many bytes in the ring user space is woken.
    pub wake_above: u32,
    /// Bytes shipped of a socket found at start before it is judged.
    pub found_budget: u32,
    /// Bytes shipped of a new connection before it is judged.
    pub fresh_budget: u32,
    /// How many of `prefixes` count.
    pub prefixes_used: u32,
    /// 1: this kernel's `sched_process_exit` says in its second argument whether the process is gone.
    pub group_dead: u32,
    /// 1: HTTP of engine processes is followed; 0: it is forgotten.
    pub requests: u32,
    /// 1: engine processes' connections that carry neither ZMTP nor HTTP are remembered for what they carry; 0: forgotten.
    pub carriers: u32,
    /// Comm prefixes of engine processes.
    pub prefixes: [Prefix; PREFIXES],
}

const _: () = assert!(
    size_of::<Settings>()
        == size_of::<Offsets>() + size_of::<Calls>() + 7 * size_of::<u32>() + PREFIXES * size_of::<Prefix>(),
    "padding would be left implicit: add or take a word"
);

/// A comm prefix as two words of value and mask.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Prefix {
    /// The bytes.
    pub value: [u64; 2],
    /// 0xff for each byte that counts.
    pub mask: [u64; 2],
}

macro_rules! words {
    ($(#[$meta:meta])* pub struct $name:ident { $($(#[$fm:meta])* $field:ident),* $(,)? }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $name { $($(#[$fm])* pub $field: u32),* }
    };
}

words! {
    /// Numbers of the eight system calls whose arguments name a buffer.
    #[allow(missing_docs, reason = "the names are those of the system calls")]
    pub struct Calls { read, write, readv, writev, sendto, recvfrom, sendmsg, recvmsg }
}

words! {
    /// Byte offsets of members of kernel structures (and one bit number), from the running kernel's BTF.
    #[allow(missing_docs, reason = "the names are the kernel's, `structure_member`")]
    pub struct Offsets {
        sk_family, sk_state, sk_num, sk_dport, sk_daddr, sk_rcv_saddr, sk_v6_daddr, sk_v6_rcv_saddr, sk_net,
        sk_protocol, sk_err, sk_flags, sk_socket, sk_bpf_storage, sk_cookie,
        net_inum,
        socket_sk, socket_file,
        tcp_sport, tcp_write_seq, tcp_snd_una, tcp_copied_seq, tcp_rcv_nxt, tcp_bytes_acked, tcp_bytes_received,
        tcp_snd_nxt, tcp_retransmits,
        task_exit_code, task_signal,
        /// 0 where [`Settings::group_dead`] is 1: not needed then.
        signal_live,
        task_flags, task_files, task_tgid, task_pid, task_comm, task_group_leader, task_cgroups,
        css_set_dfl_cgrp, cgroup_kn, kernfs_node_id,
        files_fdt, fdtable_max_fds, fdtable_fd,
        regs_nr, regs_arg0, regs_arg1, regs_arg2, regs_arg3,
        /// Bit of `SOCK_DONE` in `sk_flags`: a FIN was received.
        sock_done_bit,
    }
}
