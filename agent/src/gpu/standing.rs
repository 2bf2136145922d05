//! How the reading itself stands: what each GPU has, what was refused, which call has not come back. For `/status`, `doctor` and
//! metrics. Shared by the threads that read and whoever looks; nobody waits for the driver here.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::windows::{Link, Source};
use crate::event::Mono;
use crate::kernel::monotonic;

/// The driver's library.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Library {
    /// It is being looked for.
    #[default]
    Looking,
    /// Why there is none.
    Absent(String),
    /// It is there, in this version where that is told.
    Loaded(Option<String>),
}

/// How one GPU's readings stand.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GpuStanding {
    /// The driver's number for it.
    pub index: u32,
    /// Its name for good, or its number where the driver gives none.
    pub name: String,
    /// What it is.
    pub model: Option<String>,
    /// Split into instances: all that is read is of all of them together.
    pub mig: Option<bool>,
    /// What virtual machine it belongs to.
    pub virtualization: Option<&'static str>,
    /// Where bytes on each link are read from; `None`: they are not measured.
    pub sources: BTreeMap<Link, Option<Source>>,
    /// Why other readings are not made.
    pub not_read: BTreeMap<&'static str, String>,
    /// Processes that hold it; `None`: not known.
    pub processes: Option<usize>,
    /// It does not answer.
    pub lost: bool,
    /// Calls that asked for a reading.
    pub calls: u64,
    /// Those that took longer than they may: what they told is not used.
    pub late: u64,
    /// Those that were refused, whole or for one reading.
    pub refused: u64,
    /// Values that cannot be.
    pub nonsense: u64,
    /// Readings of counters that may have gone round more than once.
    pub ambiguous: u64,
    /// Time in calls.
    pub spent: Duration,
    /// The call under way, and since when.
    pub in_call: Option<(&'static str, Mono)>,
}

/// How everything stands.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Standing {
    /// The library.
    pub nvml: Library,
    /// GPUs by the driver's number.
    pub gpus: BTreeMap<u32, GpuStanding>,
    /// GPUs beyond the bound.
    pub left_out: u32,
    /// Why a GPU's errors (Xid) are not told, by the GPU's number.
    pub events_refused: BTreeMap<u32, String>,
    /// Why none are.
    pub events_error: Option<String>,
    /// Events that no GPU explains.
    pub events_unknown: u64,
    /// Readings that found no place on their way.
    pub held: u64,
    /// The call under way that is of no GPU, and since when; one that waits: from when it should have come back.
    pub in_call: Option<(&'static str, Mono)>,
}

impl Standing {
    /// Calls that have been under way for longer than `limit` nanoseconds: which GPU, which call, since when.
    pub fn hanging(&self, now: Mono, limit: u64) -> Vec<(Option<u32>, &'static str, Mono)> {
        let own = self.in_call.map(|(call, since)| (None, call, since));
        let gpus = self.gpus.values().filter_map(|g| g.in_call.map(|(call, at)| (Some(g.index), call, at)));
        own.into_iter().chain(gpus).filter(|(_, _, since)| now.since(*since) > limit).collect()
    }
}

/// A thread's own part of what is shared.
#[derive(Clone, Debug)]
pub(super) struct Watched {
    shared: Arc<Mutex<Standing>>,
    gpu: Option<u32>,
}

impl Watched {
    pub(super) fn new(shared: &Arc<Mutex<Standing>>, gpu: Option<u32>) -> Self {
        Self { shared: Arc::clone(shared), gpu }
    }

    /// Makes a call to the driver that may never come back: until it does, it can be seen.
    pub(super) fn call<T>(&self, function: &'static str, call: impl FnOnce() -> T) -> T {
        let before = monotonic();
        self.under_way(Some((function, before)), Duration::ZERO);
        let answer = call();
        self.under_way(None, Duration::from_nanos(monotonic().since(before)));
        answer
    }

    /// The same for one that was asked to wait so long: it is under way from when it should have come back.
    pub(super) fn wait<T>(&self, function: &'static str, asked: Duration, call: impl FnOnce() -> T) -> T {
        let asked = u64::try_from(asked.as_nanos()).unwrap_or(u64::MAX);
        self.under_way(Some((function, monotonic().plus(asked))), Duration::ZERO);
        let answer = call();
        // Waiting costs nothing.
        self.under_way(None, Duration::ZERO);
        answer
    }

    fn under_way(&self, call: Option<(&'static str, Mono)>, spent: Duration) {
        self.all(|s| match self.gpu {
            None => s.in_call = call,
            Some(index) => {
                let gpu = s.gpus.entry(index).or_insert_with(|| GpuStanding {
                    index,
                    name: format!("index-{index}"),
                    ..GpuStanding::default()
                });
                gpu.in_call = call;
                gpu.spent += spent;
            }
        });
    }

    /// Sets what never changes of the GPU. A name that another has already is none.
    pub(super) fn describe(&self, of: GpuStanding) {
        let GpuStanding { name, model, mig, virtualization, .. } = of;
        self.all(|s| {
            let taken = s.gpus.values().any(|g| Some(g.index) != self.gpu && g.name == name);
            let Some(gpu) = self.gpu.and_then(|index| s.gpus.get_mut(&index)) else { return };
            let name = if taken { gpu.name.clone() } else { name };
            *gpu = GpuStanding { name, model, mig, virtualization, ..std::mem::take(gpu) };
        });
    }

    /// The GPU is there and cannot be had.
    pub(super) fn missing(&self, why: &str) {
        self.under_way(None, Duration::ZERO);
        self.count(|s| {
            s.not_read.insert("everything", why.to_owned());
        });
    }

    /// The GPU's name.
    pub(super) fn name(&self) -> String {
        let name = |s: &mut Standing| self.gpu.and_then(|index| Some(s.gpus.get(&index)?.name.clone()));
        self.all(name).unwrap_or_default()
    }

    /// Changes the GPU's own part.
    pub(super) fn count(&self, change: impl FnOnce(&mut GpuStanding)) {
        self.all(|s| {
            if let Some(gpu) = self.gpu.and_then(|index| s.gpus.get_mut(&index)) {
                change(gpu);
            }
        });
    }

    /// Changes what is of no GPU.
    pub(super) fn all<T>(&self, change: impl FnOnce(&mut Standing) -> T) -> T {
        change(&mut self.shared.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
