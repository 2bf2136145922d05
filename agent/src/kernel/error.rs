//! What can go wrong between the agent and the kernel, told to the operator: what happened, to what, why, and
//! what to do.

use std::io;

use super::hook::{Hook, RefusedHook};

/// Why live capture cannot start or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The process may not use BPF.
    #[error(
        "cannot load kernel programs: this process lacks {missing}. Run the agent as root, or give it CAP_BPF and \
         CAP_PERFMON (`setcap cap_bpf,cap_perfmon+ep`, or `capabilities.add` of its container)"
    )]
    NotPrivileged {
        /// The capabilities that are missing.
        missing: String,
    },
    /// The kernel has no `bpf` system call or refuses it altogether.
    #[error(
        "this kernel refuses the bpf system call ({source}): it is built without CONFIG_BPF_SYSCALL, or a seccomp \
         profile or security module forbids it. Run outside that profile, or use `roomtrace replay` on a capture"
    )]
    NoBpf {
        /// What the kernel answered.
        source: io::Error,
    },
    /// The kernel does not publish its type information.
    #[error(
        "cannot read the kernel's type information at {path}: {why}. The agent needs a kernel built with \
         CONFIG_DEBUG_INFO_BTF (in a container also /sys mounted); use `roomtrace replay` on a capture instead"
    )]
    NoBtf {
        /// Where it was looked for.
        path: &'static str,
        /// What failed.
        why: String,
    },
    /// A kernel structure has no such member.
    #[error(
        "this kernel's `struct {structure}` has no member `{member}` ({why}), so the programs cannot read it. This \
         kernel is not supported yet: please report its version and this line"
    )]
    MissingMember {
        /// The structure.
        structure: &'static str,
        /// Path of the member inside it.
        member: &'static str,
        /// What the look-up said.
        why: String,
    },
    /// The object could not be loaded: maps refused, or the object is broken.
    #[error(
        "cannot create the kernel maps of the capture: {why}. If it says EPERM, memory or a security module is the \
         limit: look at RLIMIT_MEMLOCK (kernels before 5.11) and the memory limit of the agent's cgroup"
    )]
    Object {
        /// What the loader said.
        why: String,
    },
    /// A tracepoint that the back end needs is not in this kernel.
    #[error(
        "this kernel has no tracepoint `{tracepoint}` ({why}). `sock_send_length` and `sock_recv_length` exist from \
         Linux 6.3 on"
    )]
    MissingTracepoint {
        /// Its name.
        tracepoint: &'static str,
        /// What the look-up said.
        why: String,
    },
    /// The kernel's verifier refused a program.
    #[error(
        "the kernel refused to load program `{program}`: {why}. If the verifier log is empty, a security module or \
         kernel lockdown refuses this kind of program; otherwise please report the log:\n{log}"
    )]
    Refused {
        /// Its name.
        program: &'static str,
        /// The errno.
        why: String,
        /// The last lines of the verifier's log.
        log: String,
    },
    /// A loaded program could not be attached.
    #[error(
        "the kernel loaded program `{program}` but refused to attach it: {why}. A security module or lockdown is \
         the usual cause; `roomtrace doctor` names it"
    )]
    Attach {
        /// Its name.
        program: &'static str,
        /// What the kernel said.
        why: String,
    },
    /// No back end can be used.
    #[error("no way to see socket calls on this kernel:{}\nUse `roomtrace replay` on a capture, or another kernel", list(.refused))]
    NoHook {
        /// Each with its reason.
        refused: Vec<RefusedHook>,
    },
    /// The forced back end cannot be used.
    #[error(
        "the hook that was asked for cannot be used: {refused}. Leave out `--hook` to let the agent choose"
    )]
    ForcedHook {
        /// It and the reason.
        refused: RefusedHook,
    },
    /// The search for sockets that are already open failed.
    #[error(
        "cannot list the sockets that are already open ({why}). Connections opened from now on would be followed, \
         older ones not, so the agent does not start; `roomtrace doctor` says what is missing"
    )]
    Search {
        /// What failed.
        why: String,
    },
    /// A setting makes no sense.
    #[error("capture setting `{setting}`: {why}")]
    Setting {
        /// Its name.
        setting: &'static str,
        /// What is wrong with it, and what would be right.
        why: String,
    },
    /// Reading or changing a kernel map failed.
    #[error(
        "cannot {action} the kernel map `{map}`: {why}. On kernels before 5.19 this needs CAP_BPF for as long as the \
         agent runs"
    )]
    Map {
        /// Its name.
        map: &'static str,
        /// What was tried.
        action: &'static str,
        /// What the kernel said.
        why: String,
    },
    /// Waiting for the ring failed.
    #[error("cannot wait for the kernel's ring buffer: {source}. The agent cannot go on; restart it")]
    Wait {
        /// What the kernel said.
        source: io::Error,
    },
    /// Dropping capabilities failed.
    #[error(
        "cannot give up capabilities that are no longer needed: {why}. A security module forbids \
         capset: allow it to this program, or start it with CAP_BPF and CAP_PERFMON alone"
    )]
    Privileges {
        /// What failed.
        why: String,
    },
}

impl KernelError {
    /// Whether it concerns only one back end, so that the next may be tried.
    pub(super) const fn is_about_hook(&self) -> bool {
        matches!(
            self,
            Self::MissingTracepoint { .. }
                | Self::Refused { .. }
                | Self::Attach { .. }
                | Self::MissingMember { .. }
        )
    }
}

fn list(refused: &[RefusedHook]) -> String {
    refused.iter().fold(String::new(), |text, hook| text + "\n  " + &hook.to_string())
}

/// A back end that is part of the design and not of this version.
pub(super) fn not_built(hook: Hook) -> RefusedHook {
    RefusedHook { hook, why: "this version of the agent has no such back end".to_owned() }
}
