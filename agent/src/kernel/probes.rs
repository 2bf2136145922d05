//! The optional probes: an object of its own, attached to functions of a library that a process has mapped.
//!
//! No unsafe code but the reading of a record's head (`ring`). [`Probes`] attaches and may live on a thread that keeps the
//! privileges for it; [`BatchRing`] is read by whoever observes and needs none. Dropping `Probes` detaches everything.

use std::path::Path;

use aya::maps::{MapError, PerCpuArray, RingBuf};
use aya::programs::uprobe::UProbeScope;
use aya::programs::{ProgramError, UProbe};
use aya::{Ebpf, EbpfLoader, include_bytes_aligned};
use roomtrace_common::batch::{HEAD, counter, kind};

use super::error::KernelError;
use super::object::chain;
use super::ring;
use crate::batch::{Batch, Step};
use crate::event::Mono;

static OBJECT: &[u8] = include_bytes_aligned!("../../../ebpf/probes.bpf.o");

const RING: &str = "BATCHES";
const COUNTERS: &str = "PROBE_COUNTERS";

/// Size of their ring: some hundred batches, which is more than an engine submits between two turns.
const RING_BYTES: u32 = 4 << 20;

/// Program and the function that it sits on. The names are those of the C++ compiler (Itanium ABI), as the dynamic symbol
/// table of `mooncake/engine.so` has them from 0.3.8.post1 on.
const PLACES: [(&str, &str); 2] = [
    (
        "rt_submit",
        "_ZN8mooncake14TransferEngine14submitTransferEmRKSt6vectorINS_9Transport15TransferRequestESaIS3_EE",
    ),
    ("rt_free", "_ZN8mooncake14TransferEngine11freeBatchIDEm"),
];

/// The loaded programs.
pub struct Probes {
    ebpf: Ebpf,
}

impl std::fmt::Debug for Probes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Probes").finish_non_exhaustive()
    }
}

impl Probes {
    /// Loads the programs; nothing is probed yet.
    ///
    /// # Errors
    ///
    /// [`KernelError::Object`], [`KernelError::Refused`].
    pub fn load() -> Result<(Self, BatchRing), KernelError> {
        let mut ebpf = EbpfLoader::new()
            .map_max_entries(RING, RING_BYTES)
            .load(OBJECT)
            .map_err(|e| KernelError::Object { why: chain(&e) })?;
        for (name, _) in PLACES {
            let failed =
                |e: &ProgramError| KernelError::Refused { program: name, why: chain(e), log: String::new() };
            program(&mut ebpf, name).and_then(UProbe::load).map_err(|e| failed(&e))?;
        }
        let failed =
            |map: &str, e: &MapError| KernelError::Object { why: format!("map `{map}`: {}", chain(e)) };
        let mut map = |name: &'static str| {
            ebpf.take_map(name).ok_or(KernelError::Object { why: format!("the object has no map `{name}`") })
        };
        let (events, counters) = (map(RING)?, map(COUNTERS)?);
        let ring = BatchRing {
            ring: RingBuf::try_from(events).map_err(|e| failed(RING, &e))?,
            counters: PerCpuArray::try_from(counters).map_err(|e| failed(COUNTERS, &e))?,
        };
        Ok((Self { ebpf }, ring))
    }

    /// Probes the library at `path` in every process that maps this file, also in those that come later. All or nothing.
    ///
    /// # Errors
    ///
    /// Why not, for the operator.
    pub fn attach(&mut self, path: &Path) -> Result<(), String> {
        let mut first = None;
        for (name, symbol) in PLACES {
            let attached = program(&mut self.ebpf, name)
                .and_then(|program| program.attach(symbol, path, UProbeScope::AllProcesses));
            match attached {
                Ok(link) => first = first.or(Some((name, link))),
                Err(e) => {
                    if let Some((name, link)) = first
                        && let Ok(program) = program(&mut self.ebpf, name)
                    {
                        // It goes with the program at the latest.
                        let _ = program.detach(link);
                    }
                    return Err(chain(&e));
                }
            }
        }
        Ok(())
    }

    /// Gives up, for the calling thread and those that it starts, every privilege that attaching does not need.
    ///
    /// # Errors
    ///
    /// [`KernelError::Privileges`].
    pub fn drop_privileges() -> Result<(), KernelError> {
        super::preflight::keep_for_probes()
    }
}

fn program<'e>(ebpf: &'e mut Ebpf, name: &str) -> Result<&'e mut UProbe, ProgramError> {
    ebpf.program_mut(name).ok_or(ProgramError::NotLoaded)?.try_into()
}

/// What the probes see.
pub struct BatchRing {
    ring: RingBuf<aya::maps::MapData>,
    counters: PerCpuArray<aya::maps::MapData, u64>,
}

impl std::fmt::Debug for BatchRing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BatchRing").finish_non_exhaustive()
    }
}

/// What the probes have cost and lost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProbeCounts {
    /// Runs at `submitTransfer`, and their time in nanoseconds (all are timed).
    pub submits: (u64, u64),
    /// The same at `freeBatchID`.
    pub frees: (u64, u64),
    /// Records that the full ring refused.
    pub ring_full: u64,
}

impl BatchRing {
    /// Hands on what was recorded until now, at most `budget` records; how many.
    pub fn drain(&mut self, budget: usize, sink: &mut impl FnMut(Batch<'_>)) -> usize {
        let mut taken = 0;
        while taken < budget {
            let Some(item) = self.ring.next() else { break };
            if let Some(batch) = decode(&item) {
                sink(batch);
            }
            taken += 1;
        }
        taken
    }

    /// Counts so far.
    ///
    /// # Errors
    ///
    /// [`KernelError::Map`].
    pub fn counts(&self) -> Result<ProbeCounts, KernelError> {
        let of = |index: u32| {
            let values = self.counters.get(&index, 0).map_err(|e| KernelError::Map {
                map: COUNTERS,
                action: "read",
                why: chain(&e),
            })?;
            Ok(values.iter().sum::<u64>())
        };
        Ok(ProbeCounts {
            submits: (of(counter::SUBMITS)?, of(counter::SUBMIT_NANOS)?),
            frees: (of(counter::FREES)?, of(counter::FREE_NANOS)?),
            ring_full: of(counter::RING_FULL)?,
        })
    }
}

fn decode(item: &[u8]) -> Option<Batch<'_>> {
    let (head, rest) = item.split_at_checked(HEAD)?;
    let head = ring::batch(head)?;
    let step = match head.kind {
        kind::SUBMIT => Step::Submit {
            total: head.total,
            offset: head.offset,
            requests: rest.get(..usize::try_from(head.len).ok()?)?,
        },
        kind::FREE => Step::Free,
        kind::UNREADABLE => Step::Unreadable,
        _ => return None,
    };
    Some(Batch { at: Mono(head.at), pid: head.tgid, tid: head.tid, id: head.batch, step })
}
