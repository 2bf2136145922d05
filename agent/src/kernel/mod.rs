//! Live capture: loads the kernel programs, finds the sockets that matter, turns the ring's records into
//! [`SocketEvent`]s.
//!
//! The only module with unsafe code (in `ring`, `sys` and `offsets`, each use with its reason). It changes
//! nothing in what it watches. What the programs may read is decided in `ebpf/programs`; see
//! `docs/architecture.md`.

mod ask;
mod btf;
mod capture;
mod clock;
mod error;
mod extra;
mod hook;
mod object;
mod offsets;
mod preflight;
mod probes;
mod record;
mod ring;
mod sys;

pub use capture::{Capture, CaptureConfig, Counters, Judgement, ProgramCost, SocketCounts};
pub use clock::monotonic;
pub use error::KernelError;
pub use extra::MissingProgram;
pub use hook::{Hook, RefusedHook};
pub use preflight::{Check, preflight};
pub use probes::{BatchRing, ProbeCounts, Probes};

#[cfg(doc)]
use crate::event::SocketEvent;
