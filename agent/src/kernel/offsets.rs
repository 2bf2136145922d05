//! Where the running kernel's structures keep the members that the programs read, from its BTF.
//!
//! Reads one file; knows nothing of versions. Rust has no CO-RE: the offsets go to the programs as constants.

use roomtrace_common::{Calls, Offsets};

use super::btf::Btf;
use super::error::KernelError;

/// Where the kernel publishes its type information.
pub(super) const VMLINUX: &str = "/sys/kernel/btf/vmlinux";

/// The kernel's types.
pub(super) fn kernel_types() -> Result<Btf, KernelError> {
    let failed = |why: String| KernelError::NoBtf { path: VMLINUX, why };
    let bytes = std::fs::read(VMLINUX).map_err(|e| failed(e.to_string()))?;
    Btf::parse(bytes).map_err(|e| failed(e.to_string()))
}

/// All offsets, or the first member that is missing.
pub(super) fn resolve(btf: &Btf) -> Result<Offsets, KernelError> {
    let sock = Structure::named(btf, "sock")?;
    let tcp = Structure::named(btf, "tcp_sock")?;
    let task = Structure::named(btf, "task_struct")?;
    let socket = Structure::named(btf, "socket")?;
    let fdtable = Structure::named(btf, "fdtable")?;
    let regs = Structure::named(btf, "pt_regs")?;
    let [regs_nr, regs_arg0, regs_arg1, regs_arg2, regs_arg3] = registers(&regs)?;
    Ok(Offsets {
        sk_family: sock.at("__sk_common.skc_family")?,
        sk_state: sock.at("__sk_common.skc_state")?,
        sk_num: sock.at("__sk_common.skc_num")?,
        sk_dport: sock.at("__sk_common.skc_dport")?,
        sk_daddr: sock.at("__sk_common.skc_daddr")?,
        sk_rcv_saddr: sock.at("__sk_common.skc_rcv_saddr")?,
        sk_v6_daddr: sock.at("__sk_common.skc_v6_daddr")?,
        sk_v6_rcv_saddr: sock.at("__sk_common.skc_v6_rcv_saddr")?,
        sk_net: sock.at("__sk_common.skc_net.net")?,
        sk_protocol: sock.at("sk_protocol")?,
        sk_err: sock.at("sk_err")?,
        sk_flags: sock.at("__sk_common.skc_flags")?,
        sk_socket: sock.at("sk_socket")?,
        sk_bpf_storage: sock.at("sk_bpf_storage")?,
        sk_cookie: sock.at("__sk_common.skc_cookie")?,
        net_inum: Structure::named(btf, "net")?.at("ns.inum")?,
        socket_sk: socket.at("sk")?,
        socket_file: socket.at("file")?,
        tcp_sport: tcp.at("inet_conn.icsk_inet.inet_sport")?,
        tcp_write_seq: tcp.at("write_seq")?,
        tcp_snd_una: tcp.at("snd_una")?,
        tcp_copied_seq: tcp.at("copied_seq")?,
        tcp_rcv_nxt: tcp.at("rcv_nxt")?,
        tcp_bytes_acked: tcp.at("bytes_acked")?,
        tcp_bytes_received: tcp.at("bytes_received")?,
        tcp_snd_nxt: tcp.at("snd_nxt")?,
        tcp_retransmits: tcp.at("inet_conn.icsk_retransmits")?,
        task_exit_code: task.at("exit_code")?,
        task_signal: task.at("signal")?,
        signal_live: if group_dead(btf) { 0 } else { Structure::named(btf, "signal_struct")?.at("live")? },
        task_flags: task.at("flags")?,
        task_files: task.at("files")?,
        task_tgid: task.at("tgid")?,
        task_pid: task.at("pid")?,
        task_comm: task.at("comm")?,
        task_group_leader: task.at("group_leader")?,
        task_cgroups: task.at("cgroups")?,
        css_set_dfl_cgrp: Structure::named(btf, "css_set")?.at("dfl_cgrp")?,
        cgroup_kn: Structure::named(btf, "cgroup")?.at("kn")?,
        kernfs_node_id: Structure::named(btf, "kernfs_node")?.at("id")?,
        files_fdt: Structure::named(btf, "files_struct")?.at("fdt")?,
        fdtable_max_fds: fdtable.at("max_fds")?,
        fdtable_fd: fdtable.at("fd")?,
        regs_nr,
        regs_arg0,
        regs_arg1,
        regs_arg2,
        regs_arg3,
        sock_done_bit: enumerator(btf, "sock_flags", "SOCK_DONE")?,
    })
}

/// Whether `sched_process_exit` says that the process is gone (its second argument, a truth value).
pub(super) fn group_dead(btf: &Btf) -> bool {
    btf.tracepoint("sched_process_exit").is_some_and(|(arguments, truth)| arguments >= 2 && truth)
}

/// Numbers of the system calls that name a buffer, on the machine this is built for.
pub(super) fn calls() -> Calls {
    let number = |n: libc::c_long| u32::try_from(n).unwrap_or(u32::MAX);
    Calls {
        read: number(libc::SYS_read),
        write: number(libc::SYS_write),
        readv: number(libc::SYS_readv),
        writev: number(libc::SYS_writev),
        sendto: number(libc::SYS_sendto),
        recvfrom: number(libc::SYS_recvfrom),
        sendmsg: number(libc::SYS_sendmsg),
        recvmsg: number(libc::SYS_recvmsg),
    }
}

/// System call number and first four arguments in the saved registers (`arch/x86/include/asm/syscall.h`).
#[cfg(target_arch = "x86_64")]
fn registers(regs: &Structure<'_>) -> Result<[u32; 5], KernelError> {
    Ok([regs.at("orig_ax")?, regs.at("di")?, regs.at("si")?, regs.at("dx")?, regs.at("r10")?])
}

/// As above (`arch/arm64/include/asm/syscall.h`); the first argument survives in `orig_x0`.
#[cfg(target_arch = "aarch64")]
fn registers(regs: &Structure<'_>) -> Result<[u32; 5], KernelError> {
    let x = regs.at("regs")?;
    Ok([regs.at("syscallno")?, regs.at("orig_x0")?, x + 8, x + 16, x + 24])
}

struct Structure<'a> {
    btf: &'a Btf,
    name: &'static str,
}

impl<'a> Structure<'a> {
    fn named(btf: &'a Btf, name: &'static str) -> Result<Self, KernelError> {
        if btf.has_structure(name) {
            Ok(Self { btf, name })
        } else {
            Err(missing(name, "", "no such structure"))
        }
    }

    /// Byte offset of the member at `path` (dots between the names).
    fn at(&self, path: &'static str) -> Result<u32, KernelError> {
        self.btf
            .offset(self.name, path)
            .ok_or_else(|| missing(self.name, path, "not in the kernel's BTF, or a bit field"))
    }
}

fn enumerator(btf: &Btf, name: &'static str, wanted: &'static str) -> Result<u32, KernelError> {
    btf.enumerator(name, wanted).ok_or_else(|| missing(name, wanted, "no such enumerator"))
}

fn missing(structure: &'static str, member: &'static str, why: &str) -> KernelError {
    KernelError::MissingMember { structure, member, why: why.to_owned() }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

    use super::*;

    #[test]
    fn this_kernels_offsets_resolve_and_an_unknown_member_is_named() {
        let Ok(btf) = kernel_types() else {
            println!("SKIPPED: this machine's kernel has no BTF");
            return;
        };
        let offsets = resolve(&btf).unwrap();
        // The layout of `struct sock_common`'s first members is kernel ABI in all but name (include/net/sock.h).
        assert_eq!((offsets.sk_daddr, offsets.sk_rcv_saddr), (0, 4));
        assert_eq!((offsets.sk_dport, offsets.sk_num, offsets.sk_family), (12, 14, 16));
        assert_eq!(offsets.sock_done_bit, 1);
        assert_eq!(btf.tracepoint("inet_sock_set_state"), Some((3, false)));
        assert_eq!(btf.tracepoint("no_such_tracepoint"), None);
        let (arguments, _) = btf.tracepoint("sched_process_exit").unwrap();
        assert_eq!(group_dead(&btf), arguments == 2, "one argument (Linux 6.12), or two (6.18)");
        let error = Structure::named(&btf, "sock").unwrap().at("__sk_common.no_such").unwrap_err();
        assert!(error.to_string().contains("`struct sock` has no member `__sk_common.no_such`"), "{error}");
    }
}
