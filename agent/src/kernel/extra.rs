//! Programs that the capture can do without: the ends of threads, and TCP's own trouble.
//!
//! Each is tried by loading and attaching it, never by kernel version. What does not work is told once, with the reason
//! and with what the agent cannot tell without it.

use std::fmt;

use aya::programs::{BtfTracePoint, ProgramError};
use aya::{Btf, Ebpf};
use roomtrace_common::program;

use super::object::chain;

/// A program that this kernel does not take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingProgram {
    /// Its name in the kernel.
    pub name: &'static str,
    /// What is not known without it.
    pub shows: &'static str,
    /// Why it is missing, for the operator.
    pub why: String,
}

impl fmt::Display for MissingProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "not known on this kernel: {} ({}: {})", self.shows, self.name, self.why)
    }
}

/// Slot of the program, its tracepoint, and what it shows.
pub(super) const TRACEPOINTS: [(usize, &str, &str); 4] = [
    (program::EXIT, "sched_process_exit", "which threads of engine processes end"),
    (program::RETRANSMIT, "tcp_retransmit_skb", "what TCP sends again"),
    (program::RESET_SENT, "tcp_send_reset", "resets that this host sends"),
    (
        program::RESET_RECEIVED,
        "tcp_receive_reset",
        "resets that this host receives, before the state changes",
    ),
];

/// Loads and attaches all that the kernel takes; those that it does not.
pub(super) fn attach(ebpf: &mut Ebpf, types: &Btf) -> Vec<MissingProgram> {
    let try_one = |(slot, on, shows): (usize, &str, &'static str)| {
        let name = program::NAMES.get(slot).copied()?;
        let why = tracepoint(ebpf, name, on, types).err()?;
        Some(MissingProgram { name, shows, why })
    };
    TRACEPOINTS.into_iter().filter_map(try_one).collect()
}

fn tracepoint(ebpf: &mut Ebpf, name: &str, on: &str, types: &Btf) -> Result<(), String> {
    let program = ebpf.program_mut(name).ok_or_else(|| format!("the object has no program `{name}`"))?;
    let program: &mut BtfTracePoint = program.try_into().map_err(|e: ProgramError| chain(&e))?;
    program.load(on, types).map_err(|e| refusal(&e))?;
    program.attach().map_err(|e| chain(&e))?;
    Ok(())
}

/// In one line: the verifier's last word is enough.
fn refusal(error: &ProgramError) -> String {
    match error {
        ProgramError::LoadError { io_error, verifier_log } => {
            let log = verifier_log.to_string();
            // Its last lines are figures of the run.
            let figures = ["verification time", "stack depth", "processed"];
            let says = |line: &&str| !line.is_empty() && !figures.iter().any(|f| line.starts_with(f));
            let told = log.lines().rev().find(says);
            told.map_or_else(|| io_error.to_string(), |line| format!("{io_error}: {line}"))
        }
        other => chain(other),
    }
}
