//! The kernel programs: which sockets matter, and what goes through them.
//!
//! They read and never change what they watch. Six programs without which there is no capture: bytes sent, bytes
//! received, changes of TCP state, a search for sockets that are already open, where those stand that are asked for, and what
//! the engines' other connections have carried.
//! Four more where the kernel has their tracepoints: the end of a thread, segments sent again, resets sent and received.
//! What is not a watched socket leaves after one look-up in its socket storage.
//!
//! Pointers to kernel structures come typed from the kernel; members are loaded directly at offsets that user
//! space took from the kernel's BTF (`SETTINGS`, constant for the verifier), which the verifier checks against
//! the type and which costs no helper call. All unsafe code here rests on that: the kernel refuses the program
//! if a load could go astray.
#![no_std]
#![no_main]

mod announce;
mod call;
mod carried;
mod cost;
mod emit;
mod exit;
mod greeting;
mod http;
mod kernel;
mod maps;
mod moved;
mod search;
mod stand;
mod state;
mod trouble;
mod watch;

use aya_ebpf::EbpfContext as _;
use aya_ebpf::macros::btf_tracepoint;
use aya_ebpf::programs::BtfTracePointContext;
use roomtrace_common::{direction, program, trouble as which};

use crate::cost::Timer;
use crate::kernel::Sock;

/// `sock_send_length(struct sock *sk, int ret, int flags)`: after a send call has done its work.
#[inline(always)]
#[btf_tracepoint(function = "sock_send_length")]
pub fn rt_send(ctx: BtfTracePointContext) -> i32 {
    let timer = Timer::start(program::SEND);
    unsafe { moved::moved(Sock(ctx.arg(0)), ctx.arg(1), 0, direction::SENT) };
    timer.stop();
    0
}

/// `sock_recv_length(struct sock *sk, int ret, int flags)`: after a receive call has done its work.
#[inline(always)]
#[btf_tracepoint(function = "sock_recv_length")]
pub fn rt_receive(ctx: BtfTracePointContext) -> i32 {
    let timer = Timer::start(program::RECEIVE);
    unsafe { moved::moved(Sock(ctx.arg(0)), ctx.arg(1), ctx.arg(2), direction::RECEIVED) };
    timer.stop();
    0
}

/// `inet_sock_set_state(const struct sock *sk, const int oldstate, const int newstate)`.
#[inline(always)]
#[btf_tracepoint(function = "inet_sock_set_state")]
pub fn rt_state(ctx: BtfTracePointContext) -> i32 {
    let timer = Timer::start(program::STATE);
    unsafe { state::changed(Sock(ctx.arg(0)), ctx.arg(1), ctx.arg(2)) };
    timer.stop();
    0
}

/// `sched_process_exit(struct task_struct *p, bool group_dead)`: see [`exit::ended`].
#[btf_tracepoint(function = "sched_process_exit")]
pub fn rt_exit(ctx: BtfTracePointContext) -> i32 {
    let timer = Timer::start(program::EXIT);
    unsafe { exit::ended(&ctx) };
    timer.stop();
    0
}

/// `tcp_retransmit_skb(const struct sock *sk, const struct sk_buff *skb, …)`.
#[btf_tracepoint(function = "tcp_retransmit_skb")]
pub fn rt_retransmit(ctx: BtfTracePointContext) -> i32 {
    let timer = Timer::start(program::RETRANSMIT);
    unsafe { trouble::retransmitted(Sock(ctx.arg(0))) };
    timer.stop();
    0
}

/// `tcp_send_reset(const struct sock *sk, …)`: `sk` may be null, or no full socket.
#[btf_tracepoint(function = "tcp_send_reset")]
pub fn rt_reset_sent(ctx: BtfTracePointContext) -> i32 {
    let timer = Timer::start(program::RESET_SENT);
    unsafe {
        if !trouble::is_null(ctx.as_ptr().cast()) {
            let sk = Sock(ctx.arg(0));
            if !sk.0.is_null() {
                trouble::reset(sk, which::RESET_SENT);
            }
        }
    }
    timer.stop();
    0
}

/// `tcp_receive_reset(struct sock *sk)`.
#[btf_tracepoint(function = "tcp_receive_reset")]
pub fn rt_reset_received(ctx: BtfTracePointContext) -> i32 {
    let timer = Timer::start(program::RESET_RECEIVED);
    unsafe { trouble::reset(Sock(ctx.arg(0)), which::RESET_RECEIVED) };
    timer.stop();
    0
}

/// Does nothing: what `cargo xtask bench` measures the others against. The agent never loads it.
#[btf_tracepoint(function = "sock_send_length")]
pub fn rt_empty(_: BtfTracePointContext) -> i32 {
    0
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
