//! What the capture needs from the machine, looked at one by one. Never fails itself.

use std::fs;
use std::io;

use caps::{CapSet, Capability};

use super::btf::Btf;
use super::error::KernelError;
use super::{extra, offsets, sys};

/// One thing that `doctor` looks at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Short name.
    pub name: &'static str,
    /// Whether capture can work as far as this goes.
    pub ok: bool,
    /// What was found.
    pub found: String,
    /// What it is needed for.
    pub why_needed: &'static str,
    /// What the operator can do, empty if nothing need be done.
    pub what_to_do: String,
}

const NEEDED: [Capability; 2] = [Capability::CAP_BPF, Capability::CAP_PERFMON];

/// Looks at everything that the capture needs.
pub fn preflight() -> Vec<Check> {
    let mut checks = vec![kernel(), capabilities(), bpf(), types()];
    let types = offsets::kernel_types();
    if let Ok(types) = &types {
        for (name, why_needed) in [
            ("sock_send_length", "shows bytes that TCP accepted (back end sock)"),
            ("sock_recv_length", "shows bytes that a reader got (back end sock)"),
            ("inet_sock_set_state", "shows connections that open, close, are refused or reset"),
        ] {
            checks.push(known_type(types, "tracepoint", &format!("btf_trace_{name}"), name, why_needed));
        }
        checks.push(known_type(
            types,
            "socket iterator",
            "bpf_iter_task_file",
            "iter/task_file",
            "finds connections that were open before the agent",
        ));
        checks.push(known_type(
            types,
            "socket storage",
            "bpf_sk_storage_get_tracing",
            "bpf_sk_storage_get",
            "remembers which sockets matter, so that all others cost next to nothing",
        ));
    }
    if let Ok(types) = &types {
        for (_, name, shows) in extra::TRACEPOINTS {
            checks.push(optional_type(types, &format!("btf_trace_{name}"), name, shows));
        }
    }
    // Without BTF that is said already.
    if let Ok(types) = &types {
        checks.push(members(types));
    }
    checks.push(lockdown());
    checks
}

fn kernel() -> Check {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    Check {
        name: "kernel",
        ok: true,
        found: if release.is_empty() { "release unknown".to_owned() } else { release.to_owned() },
        why_needed: "the back end sock needs 6.3 or newer; hooks are chosen by trying, not by this number",
        what_to_do: String::new(),
    }
}

fn capabilities() -> Check {
    let missing = missing();
    Check {
        name: "capabilities",
        ok: missing.is_empty(),
        found: if missing.is_empty() {
            "CAP_BPF and CAP_PERFMON".to_owned()
        } else {
            format!("lacks {missing}")
        },
        why_needed: "load the kernel programs and read kernel memory from them",
        what_to_do: if missing.is_empty() {
            String::new()
        } else {
            "run as root, or `setcap cap_bpf,cap_perfmon+ep roomtrace`, or add both to the container"
                .to_owned()
        },
    }
}

fn bpf() -> Check {
    let reachable = sys::bpf_reachable();
    Check {
        name: "bpf system call",
        ok: reachable.is_ok(),
        found: reachable.as_ref().map_or_else(ToString::to_string, |()| "there".to_owned()),
        why_needed: "everything",
        what_to_do: match reachable {
            Ok(()) => String::new(),
            Err(_) => {
                "use a kernel with CONFIG_BPF_SYSCALL, outside seccomp profiles that forbid bpf".to_owned()
            }
        },
    }
}

fn types() -> Check {
    let size = fs::metadata(offsets::VMLINUX).map(|m| m.len());
    Check {
        name: "BTF",
        ok: size.is_ok(),
        found: match &size {
            Ok(n) => format!("{} ({n} bytes)", offsets::VMLINUX),
            Err(e) => format!("{}: {e}", offsets::VMLINUX),
        },
        why_needed: "tells where this kernel's structures keep what the programs read",
        what_to_do: match size {
            Ok(_) => String::new(),
            Err(_) => "use a kernel built with CONFIG_DEBUG_INFO_BTF; in a container mount /sys".to_owned(),
        },
    }
}

fn members(types: &Btf) -> Check {
    let result = offsets::resolve(types).map_err(|e| e.to_string());
    Check {
        name: "structure members",
        ok: result.is_ok(),
        found: result.as_ref().map_or_else(ToString::to_string, |_| "all resolved".to_owned()),
        why_needed: "addresses, sequence numbers, the caller's registers and descriptors",
        what_to_do: match result {
            Ok(_) => String::new(),
            Err(_) => "report the kernel's version and the member".to_owned(),
        },
    }
}

fn known_type(
    types: &Btf,
    name: &'static str,
    type_name: &str,
    shown: &str,
    why_needed: &'static str,
) -> Check {
    let ok = types.has(type_name);
    Check {
        name,
        ok,
        found: format!("{shown} {}", if ok { "there" } else { "not in this kernel" }),
        why_needed,
        what_to_do: if ok { String::new() } else { "use Linux 6.3 or newer".to_owned() },
    }
}

/// Something that the capture does without where it is missing.
fn optional_type(types: &Btf, type_name: &str, shown: &str, why_needed: &'static str) -> Check {
    let there = types.has(type_name);
    Check {
        name: "optional hook",
        ok: true,
        found: format!("{shown} {}", if there { "there" } else { "not in this kernel: done without" }),
        why_needed,
        what_to_do: String::new(),
    }
}

fn lockdown() -> Check {
    let text = fs::read_to_string("/sys/kernel/security/lockdown");
    let mode = text
        .as_ref()
        .ok()
        .and_then(|t| t.split_whitespace().find(|w| w.starts_with('[')))
        .map(|w| w.trim_matches(['[', ']']).to_owned());
    let bad = mode.as_deref() == Some("confidentiality");
    Check {
        name: "lockdown",
        ok: !bad,
        found: match (mode, text) {
            (Some(mode), _) => mode,
            (None, Ok(_)) => "unknown".to_owned(),
            (None, Err(e)) if e.kind() == io::ErrorKind::NotFound => {
                "not known, securityfs is not mounted: loading the programs shows it".to_owned()
            }
            (None, Err(e)) => e.to_string(),
        },
        why_needed: "lockdown in confidentiality mode forbids programs to read kernel memory",
        what_to_do: if bad { "boot without lockdown=confidentiality".to_owned() } else { String::new() },
    }
}

/// The capabilities that are missing, in words; empty if none.
fn missing() -> String {
    let has = |c| caps::has_cap(None, CapSet::Effective, c).unwrap_or(false);
    // Before 5.8 there were no such capabilities, and CAP_SYS_ADMIN still stands for both.
    if has(Capability::CAP_SYS_ADMIN) {
        return String::new();
    }
    let names: Vec<String> = NEEDED.iter().filter(|c| !has(**c)).map(ToString::to_string).collect();
    names.join(" and ")
}

/// Whether this process may load the programs.
pub(super) fn may_use_bpf() -> Result<(), KernelError> {
    let missing = missing();
    if missing.is_empty() { Ok(()) } else { Err(KernelError::NotPrivileged { missing }) }
}

/// What the thread that attaches optional probes needs: those two, `CAP_SYS_ADMIN` to open a uprobe (`perf_event_open` of Linux 6.18
/// answers `EACCES` with `CAP_PERFMON` alone), to look into the memory map of another user's process (`ptrace(2)`,
/// `PTRACE_MODE_READ`), and to open a library in a directory that only that user may enter.
const FOR_PROBES: [Capability; 5] = [
    Capability::CAP_SYS_ADMIN,
    Capability::CAP_BPF,
    Capability::CAP_PERFMON,
    Capability::CAP_SYS_PTRACE,
    Capability::CAP_DAC_READ_SEARCH,
];

/// Gives up every other capability of this thread.
pub(super) fn keep_for_probes() -> Result<(), KernelError> {
    keep(&FOR_PROBES)
}

/// Gives up capabilities of this thread: all but those two, or all.
pub(super) fn keep_only(none: bool) -> Result<(), KernelError> {
    keep(if none { &[] } else { &NEEDED })
}

fn keep(wanted: &[Capability]) -> Result<(), KernelError> {
    let failed = |e: caps::errors::CapsError| KernelError::Privileges { why: e.to_string() };
    let had = caps::read(None, CapSet::Permitted).map_err(failed)?;
    let keep = wanted.iter().copied().filter(|c| had.contains(c)).collect();
    caps::clear(None, CapSet::Inheritable).map_err(failed)?;
    caps::set(None, CapSet::Effective, &keep).map_err(failed)?;
    caps::set(None, CapSet::Permitted, &keep).map_err(failed)
}
