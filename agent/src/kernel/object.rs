//! The compiled kernel programs: loaded with this kernel's offsets, attached to the hooks of one back end.
//!
//! The object is built by `cargo xtask build-ebpf` and checked in. Its licence is "Dual MIT/GPL", because the
//! kernel gives the helpers it needs to GPL-compatible programs only; the agent itself is Apache-2.0.

use std::io::Read as _;

use aya::programs::{BtfTracePoint, Iter, ProgramError};
use aya::{Btf, Ebpf, EbpfLoader, include_bytes_aligned};
use roomtrace_common::{Settings, program};

use super::error::KernelError;
use super::hook::Hook;
use super::offsets::VMLINUX;
use super::ring::Plain;

static OBJECT: &[u8] = include_bytes_aligned!("../../../ebpf/roomtrace.bpf.o");

/// Names of the maps in the object.
pub(super) mod map {
    pub(in crate::kernel) const EVENTS: &str = "EVENTS";
    pub(in crate::kernel) const COUNTERS: &str = "COUNTERS";
    pub(in crate::kernel) const COSTS: &str = ".bss"; // its only variable
    pub(in crate::kernel) const JUDGEMENTS: &str = "JUDGEMENTS";
    pub(in crate::kernel) const ASKED: &str = "ASKED";
    pub(in crate::kernel) const ENDPOINTS: &str = "ENDPOINTS";
    pub(in crate::kernel) const PORTS: &str = "PORTS";
    pub(in crate::kernel) const PROCESSES: &str = "PROCESSES";
}

/// Creates the maps; loads no program yet.
pub(super) fn open(settings: &Settings, ring_bytes: u32) -> Result<Ebpf, KernelError> {
    let settings = Plain(*settings);
    EbpfLoader::new()
        .override_global("SETTINGS", &settings, true)
        .map_max_entries(map::EVENTS, ring_bytes)
        .load(OBJECT)
        .map_err(|e| KernelError::Object { why: chain(&e) })
}

/// Loads and attaches the programs of one back end.
pub(super) fn attach(ebpf: &mut Ebpf, hook: Hook, btf: &Btf) -> Result<(), KernelError> {
    match hook {
        Hook::Sock => {
            let hooks = [
                (program::NAMES[program::RECEIVE], "sock_recv_length"),
                (program::NAMES[program::SEND], "sock_send_length"),
                (program::NAMES[program::STATE], "inet_sock_set_state"),
            ];
            // Loading takes long: it all comes before the first attachment.
            for (name, on) in hooks {
                let program = tracepoint(ebpf, name, on)?;
                program.load(on, btf).map_err(|e| match e {
                    ProgramError::Btf(e) => missing(on, e.to_string()),
                    e => refused(name, e),
                })?;
            }
            // States last: what they announce as established is then seen from its first byte on, and the
            // search finds all that was established before.
            for (name, on) in hooks {
                let program = tracepoint(ebpf, name, on)?;
                program.attach().map_err(|e| KernelError::Attach { program: name, why: chain(&e) })?;
            }
            Ok(())
        }
        Hook::Fentry | Hook::Kprobe => {
            Err(KernelError::ForcedHook { refused: super::error::not_built(hook) })
        }
    }
}

/// Name of the program that lists sockets.
pub(super) const SEARCH: &str = program::NAMES[program::FOUND];
/// Name of the program that says where those stand that are asked for.
pub(super) const ASK: &str = program::NAMES[program::STAND];

/// Name of the program that says what connections have carried that are no control connections.
pub(super) const CARRIED: &str = program::NAMES[program::CARRIED];

/// Loads the programs that go over the open files of all processes; [`walk`] runs them.
pub(super) fn load_walks(ebpf: &mut Ebpf, btf: &Btf) -> Result<(), KernelError> {
    for name in [SEARCH, ASK, CARRIED] {
        iterator(ebpf, name)?.load("task_file", btf).map_err(|e| refused(name, e))?;
    }
    Ok(())
}

/// Runs one of them once, over all processes: it writes what it finds into the ring.
pub(super) fn walk(ebpf: &mut Ebpf, name: &str) -> Result<(), KernelError> {
    let failed = |why: String| KernelError::Search { why };
    let iter = iterator(ebpf, name)?;
    let link = iter.attach().and_then(|id| iter.take_link(id)).map_err(|e| failed(chain(&e)))?;
    let mut file = link.into_file().map_err(|e| failed(chain(&e)))?;
    // The program writes nothing into the file itself; reading it to its end makes it run.
    file.read_to_end(&mut Vec::new()).map_err(|e| failed(e.to_string()))?;
    Ok(())
}

/// A program that walks.
pub(super) fn iterator<'e>(ebpf: &'e mut Ebpf, name: &str) -> Result<&'e mut Iter, KernelError> {
    ebpf.program_mut(name)
        .ok_or_else(|| KernelError::Search { why: format!("the object has no program `{name}`") })?
        .try_into()
        .map_err(|e: ProgramError| KernelError::Search { why: e.to_string() })
}

/// The kernel's types in the form that aya wants.
pub(super) fn aya_types() -> Result<Btf, KernelError> {
    Btf::from_sys_fs().map_err(|e| KernelError::NoBtf { path: VMLINUX, why: e.to_string() })
}

fn tracepoint<'e>(
    ebpf: &'e mut Ebpf,
    name: &str,
    on: &'static str,
) -> Result<&'e mut BtfTracePoint, KernelError> {
    ebpf.program_mut(name)
        .ok_or_else(|| missing(on, format!("the object has no program `{name}`")))?
        .try_into()
        .map_err(|e: ProgramError| missing(on, e.to_string()))
}

const fn missing(tracepoint: &'static str, why: String) -> KernelError {
    KernelError::MissingTracepoint { tracepoint, why }
}

fn refused(program: &'static str, error: ProgramError) -> KernelError {
    match error {
        ProgramError::LoadError { io_error, verifier_log } => {
            KernelError::Refused { program, why: io_error.to_string(), log: tail(&verifier_log.to_string()) }
        }
        other => KernelError::Refused { program, why: chain(&other), log: String::new() },
    }
}

/// The end of a verifier log, where the refusal stands.
fn tail(log: &str) -> String {
    const LINES: usize = 40;
    let lines: Vec<&str> = log.lines().collect();
    lines.get(lines.len().saturating_sub(LINES)..).unwrap_or_default().join("\n")
}

/// An error with what caused it, in one line.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(e) = cause {
        let e_text = e.to_string();
        if !text.contains(&e_text) {
            text.push_str(": ");
            text.push_str(&e_text);
        }
        cause = e.source();
    }
    text
}
