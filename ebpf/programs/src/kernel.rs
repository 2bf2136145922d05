//! Typed pointers of the kernel and the members that are read from them.

use aya_ebpf::helpers::{self, generated as g};
use roomtrace_common::Endpoint;

use crate::maps::setting;

/// `AF_INET` and `AF_INET6` (`include/linux/socket.h`).
const AF_INET: u16 = 2;
pub const AF_INET6: u16 = 10;

/// `IPPROTO_TCP` and `IPPROTO_MPTCP` (`include/uapi/linux/in.h`).
pub const TCP: u16 = 6;
pub const MPTCP: u16 = 262;

/// Loads a member through a typed kernel pointer.
#[inline(always)]
pub unsafe fn load<T: Copy>(from: *const u8, at: u32) -> T {
    core::ptr::read_volatile(from.add(at as usize).cast())
}

/// Reads through an untyped pointer into kernel memory; zero if that fails.
#[inline(always)]
pub unsafe fn peek<T: Copy + Default>(from: *const u8) -> T {
    helpers::bpf_probe_read_kernel(from.cast()).unwrap_or_default()
}

/// `struct sock *`.
#[derive(Clone, Copy)]
pub struct Sock(pub *const u8);

impl Sock {
    #[inline(always)]
    pub unsafe fn family(self) -> u16 {
        load(self.0, setting!(at.sk_family))
    }

    /// IP protocol, 0 if it is no internet socket.
    #[inline(always)]
    pub unsafe fn protocol(self) -> u16 {
        let family = self.family();
        if family == AF_INET || family == AF_INET6 { load(self.0, setting!(at.sk_protocol)) } else { 0 }
    }

    #[inline(always)]
    pub unsafe fn state(self) -> u8 {
        load(self.0, setting!(at.sk_state))
    }

    #[inline(always)]
    pub unsafe fn local_port(self) -> u16 {
        load(self.0, setting!(at.sk_num))
    }

    #[inline(always)]
    pub unsafe fn peer_port(self) -> u16 {
        u16::from_be(load(self.0, setting!(at.sk_dport)))
    }

    #[inline(always)]
    pub unsafe fn local_v4(self) -> u32 {
        load(self.0, setting!(at.sk_rcv_saddr))
    }

    #[inline(always)]
    pub unsafe fn peer_v4(self) -> u32 {
        load(self.0, setting!(at.sk_daddr))
    }

    #[inline(always)]
    pub unsafe fn local_v6(self) -> *const [u8; 16] {
        self.0.add(setting!(at.sk_v6_rcv_saddr) as usize).cast()
    }

    #[inline(always)]
    pub unsafe fn peer_v6(self) -> *const [u8; 16] {
        self.0.add(setting!(at.sk_v6_daddr) as usize).cast()
    }

    /// The other end, as a key of the endpoints' table.
    #[inline(always)]
    pub unsafe fn peer(self) -> Endpoint {
        let mut address = [0u8; 16];
        if self.family() == AF_INET6 {
            address = peek(self.peer_v6().cast());
        } else {
            let v4 = self.peer_v4().to_ne_bytes();
            address[10] = 0xff;
            address[11] = 0xff;
            address[12] = v4[0];
            address[13] = v4[1];
            address[14] = v4[2];
            address[15] = v4[3];
        }
        Endpoint { address, port: self.peer_port(), pad: [0; 6] }
    }

    #[inline(always)]
    pub unsafe fn error(self) -> u32 {
        load(self.0, setting!(at.sk_err))
    }

    /// Whether a FIN was received.
    #[inline(always)]
    pub unsafe fn done(self) -> bool {
        let flags: u64 = load(self.0, setting!(at.sk_flags));
        flags >> (setting!(at.sock_done_bit) & 63) & 1 != 0
    }

    /// Whether any program has storage on it: one load, which spares most sockets the helper call.
    #[inline(always)]
    pub unsafe fn has_storage(self) -> bool {
        load::<u64>(self.0, setting!(at.sk_bpf_storage)) != 0
    }

    /// Inode number of its network namespace.
    #[inline(always)]
    pub unsafe fn netns(self) -> u32 {
        let net: *const u8 = load(self.0, setting!(at.sk_net));
        if net.is_null() { 0 } else { load(net, setting!(at.net_inum)) }
    }

    /// Its `struct file *` as a number, 0 if it has none.
    #[inline(always)]
    pub unsafe fn file(self) -> u64 {
        let socket: *const u8 = load(self.0, setting!(at.sk_socket));
        if socket.is_null() { 0 } else { load(socket, setting!(at.socket_file)) }
    }

    /// Its cookie, 0 if nobody has asked for it yet: one load.
    #[inline(always)]
    pub unsafe fn cookie_there(self) -> u64 {
        load(self.0, setting!(at.sk_cookie))
    }

    #[inline(always)]
    pub unsafe fn cookie(self) -> u64 {
        g::bpf_get_socket_cookie(self.0.cast_mut().cast())
    }

    /// As TCP socket; null if it is none.
    #[inline(always)]
    pub unsafe fn tcp(self) -> Tcp {
        Tcp(g::bpf_skc_to_tcp_sock(self.0.cast_mut().cast()).cast_const().cast())
    }
}

/// `struct tcp_sock *`.
#[derive(Clone, Copy)]
pub struct Tcp(pub *const u8);

impl Tcp {
    /// This end's port. Not `skc_num`, which is zero again by the time the socket is closed; but that where this
    /// is not set yet (a connect attempt without bind has neither).
    #[inline(always)]
    pub unsafe fn local_port(self, sk: Sock) -> u16 {
        let port: u16 = load(self.0, setting!(at.tcp_sport));
        if port == 0 { sk.local_port() } else { u16::from_be(port) }
    }

    #[inline(always)]
    pub unsafe fn write_seq(self) -> u32 {
        load(self.0, setting!(at.tcp_write_seq))
    }

    #[inline(always)]
    pub unsafe fn snd_una(self) -> u32 {
        load(self.0, setting!(at.tcp_snd_una))
    }

    #[inline(always)]
    pub unsafe fn copied_seq(self) -> u32 {
        load(self.0, setting!(at.tcp_copied_seq))
    }

    #[inline(always)]
    pub unsafe fn rcv_nxt(self) -> u32 {
        load(self.0, setting!(at.tcp_rcv_nxt))
    }

    #[inline(always)]
    pub unsafe fn snd_nxt(self) -> u32 {
        load(self.0, setting!(at.tcp_snd_nxt))
    }

    /// How often the byte at `snd_una` was sent again since it was last acknowledged (`icsk_retransmits`).
    #[inline(always)]
    pub unsafe fn retransmits(self) -> u32 {
        u32::from(load::<u8>(self.0, setting!(at.tcp_retransmits)))
    }

    /// `bytes_acked`: acknowledged by the peer's kernel since the connection was opened; a SYN or FIN that it acknowledged counts
    /// one each (RFC 4898, `tcpEStatsAppHCThruOctetsAcked`, `include/linux/tcp.h`).
    #[inline(always)]
    pub unsafe fn bytes_acked(self) -> u64 {
        load(self.0, setting!(at.tcp_bytes_acked))
    }

    /// `bytes_received`: received in order since then; a FIN counts one.
    #[inline(always)]
    pub unsafe fn bytes_received(self) -> u64 {
        load(self.0, setting!(at.tcp_bytes_received))
    }

    /// `snd_una - bytes_acked`: the first byte ever sent, or one before it where this side connected (its SYN
    /// counts). `None` if the two were torn.
    #[inline(always)]
    pub unsafe fn first_sent(self) -> Option<u32> {
        let una = self.snd_una();
        let acked: u64 = load(self.0, setting!(at.tcp_bytes_acked));
        if una == self.snd_una() { Some(una.wrapping_sub(acked as u32)) } else { None }
    }

    /// `rcv_nxt - bytes_received`: the first byte ever received. `None` if the two were torn.
    #[inline(always)]
    pub unsafe fn first_received(self) -> Option<u32> {
        let next = self.rcv_nxt();
        let received: u64 = load(self.0, setting!(at.tcp_bytes_received));
        if next == self.rcv_nxt() { Some(next.wrapping_sub(received as u32)) } else { None }
    }
}

/// `struct task_struct *`.
#[derive(Clone, Copy)]
pub struct Task(pub *const u8);

impl Task {
    #[inline(always)]
    pub unsafe fn current() -> Self {
        Self(g::bpf_get_current_task_btf().cast_const().cast())
    }

    #[inline(always)]
    pub unsafe fn flags(self) -> u32 {
        load(self.0, setting!(at.task_flags))
    }

    #[inline(always)]
    pub unsafe fn tgid(self) -> u32 {
        load(self.0, setting!(at.task_tgid))
    }

    #[inline(always)]
    pub unsafe fn pid(self) -> u32 {
        load(self.0, setting!(at.task_pid))
    }

    #[inline(always)]
    pub unsafe fn comm(self) -> *const u8 {
        self.0.add(setting!(at.task_comm) as usize)
    }

    /// As `wait` would have it.
    #[inline(always)]
    pub unsafe fn exit_code(self) -> u32 {
        load(self.0, setting!(at.task_exit_code))
    }

    /// Whether every thread of its process has begun to end.
    #[inline(always)]
    pub unsafe fn none_lives(self) -> bool {
        let signal: *const u8 = load(self.0, setting!(at.task_signal));
        !signal.is_null() && load::<u32>(signal, setting!(at.signal_live)) == 0
    }

    #[inline(always)]
    pub unsafe fn leader(self) -> Self {
        Self(load(self.0, setting!(at.task_group_leader)))
    }

    /// Id of its cgroup in the unified hierarchy, 0 if unknown.
    #[inline(always)]
    pub unsafe fn cgroup(self) -> u64 {
        let set: *const u8 = load(self.0, setting!(at.task_cgroups));
        if set.is_null() {
            return 0;
        }
        let group: *const u8 = load(set, setting!(at.css_set_dfl_cgrp));
        if group.is_null() {
            return 0;
        }
        let node: *const u8 = load(group, setting!(at.cgroup_kn));
        if node.is_null() { 0 } else { load(node, setting!(at.kernfs_node_id)) }
    }

    /// Whether descriptor `number` of this task is `file`.
    #[inline(always)]
    pub unsafe fn has_open(self, number: u32, file: u64) -> bool {
        let files: *const u8 = load(self.0, setting!(at.task_files));
        if files.is_null() {
            return false;
        }
        let table: *const u8 = load(files, setting!(at.files_fdt));
        if table.is_null() || number >= load::<u32>(table, setting!(at.fdtable_max_fds)) {
            return false;
        }
        let array: u64 = load(table, setting!(at.fdtable_fd));
        let entry: u64 = peek((array + u64::from(number) * 8) as *const u8);
        entry != 0 && entry == file
    }
}
