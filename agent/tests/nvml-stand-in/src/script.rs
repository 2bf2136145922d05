//! The script: `key = value` lines beside the library (`LIBRARY.script`), or where `ROOMTRACE_NVML_SCRIPT` says. It is read again
//! whenever it has changed, so that a test turns a running driver into another.
//!
//! | Key | Meaning (default) |
//! |---|---|
//! | `gpus` | how many (1) |
//! | `driver` | its version (`580.95.05`) |
//! | `fail.FUNCTION`, `N.fail.FUNCTION` | it answers with this code, for all GPUs or for the N-th |
//! | `delay.FUNCTION`, `N.delay.FUNCTION` | it takes so many milliseconds |
//! | `N.uuid`, `N.name` | names |
//! | `N.pcie_tx`, `N.pcie_rx`, `N.nvlink_tx`, `N.nvlink_rx` | bytes per second (0); no nvlink key: the GPU has none |
//! | `N.nvlinks` | NVLinks it has, whose last is up (18 where it has an nvlink key, else 0) |
//! | `N.c2c` | 1: joined to a processor by C2C, which no source tells of (0) |
//! | `N.start_tx`, `N.start_rx` | the PCIe counters begin here (0) |
//! | `N.bits` | 32 or 64: width of the PCIe counters (64) |
//! | `N.generation` | of its PCIe link, which has 16 lanes (5) |
//! | `N.frozen` | 1: the driver serves the same counters with the same time stamp |
//! | `N.gpm` | 1: has GPM (0) |
//! | `N.fields` | 0: has no byte counters (1) |
//! | `N.throughput` | 0: has no throughput reading (1) |
//! | `N.util` | share of time that a kernel ran, percent (0) |
//! | `N.mig` | 1: split into instances (0) |
//! | `N.virtualization` | as `nvmlGpuVirtualizationMode_t` (0) |
//! | `N.recovery` | recovery action (0) |
//! | `N.clocks` | clock event reasons, a number (0) |
//! | `N.pids` | processes, by comma |
//! | `N.stride` | bytes per process: 24, or 32 as early R535 drivers had it (24) |
//! | `N.nonsense` | 1: succeeds with values that cannot be |
//! | `copy_rate` | bytes per second of a copy through CUDA (2.5e10) |
//! | `N.seen` | share of such a copy that the counters show (1) |
//! | `xids` | events `N:XID`, by space; each is told once, in order |

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Counts of one GPU.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Moved {
    pub(crate) pcie: [f64; 2],
    pub(crate) nvlink: [f64; 2],
    /// When they were read, and that in microseconds since the epoch.
    pub(crate) at: Option<Instant>,
    pub(crate) wall: i64,
}

pub(crate) struct Script {
    path: PathBuf,
    stamp: Option<(SystemTime, u64)>,
    /// When the file was last looked at.
    looked: Option<Instant>,
    keys: BTreeMap<String, String>,
    moved: BTreeMap<usize, Moved>,
    /// Events told so far.
    pub(crate) told: usize,
    /// GPUs whose events are asked for.
    pub(crate) registered: BTreeSet<usize>,
    /// The GPU that is copied to and from.
    pub(crate) current: usize,
}

impl Script {
    pub(crate) fn new(path: PathBuf) -> Self {
        let (keys, moved) = (BTreeMap::new(), BTreeMap::new());
        Self {
            path,
            stamp: None,
            looked: None,
            keys,
            moved,
            told: 0,
            registered: BTreeSet::new(),
            current: 0,
        }
    }

    /// Reads the file again where it has changed. What moved until now moved at the old rates.
    pub(crate) fn refresh(&mut self) {
        // What it costs is the agent's to show, not the script's.
        if self.looked.is_some_and(|at| at.elapsed() < Duration::from_millis(10)) {
            return;
        }
        self.looked = Some(Instant::now());
        let stamp = std::fs::metadata(&self.path).and_then(|m| Ok((m.modified()?, m.len()))).ok();
        if stamp == self.stamp && stamp.is_some() {
            return;
        }
        for gpu in 0..self.gpus() {
            self.moved(gpu);
        }
        self.stamp = stamp;
        let text = std::fs::read_to_string(&self.path).unwrap_or_default();
        let lines = text.lines().filter_map(|line| line.split('#').next()?.split_once('='));
        self.keys = lines.map(|(k, v)| (k.trim().to_owned(), v.trim().to_owned())).collect();
    }

    pub(crate) fn gpus(&self) -> usize {
        self.number("gpus").unwrap_or(1)
    }

    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.keys.get(key).map(String::as_str)
    }

    pub(crate) fn number<T: std::str::FromStr>(&self, key: &str) -> Option<T> {
        self.text(key)?.parse().ok()
    }

    /// `key` of one GPU.
    pub(crate) fn of<T: std::str::FromStr>(&self, gpu: usize, key: &str) -> Option<T> {
        self.number(&format!("{gpu}.{key}"))
    }

    pub(crate) fn is(&self, gpu: usize, key: &str) -> bool {
        self.of::<u32>(gpu, key) == Some(1)
    }

    pub(crate) fn has_nvlink(&self, gpu: usize) -> bool {
        ["nvlink_tx", "nvlink_rx"].iter().any(|k| self.of::<f64>(gpu, k).is_some())
    }

    pub(crate) fn uuid(&self, gpu: usize) -> String {
        let own = self.text(&format!("{gpu}.uuid")).map(str::to_owned);
        own.unwrap_or_else(|| format!("GPU-{gpu:08}-0000-0000-0000-000000000000"))
    }

    /// What `function` is to answer and how long it takes, for one GPU or in general.
    pub(crate) fn rule<T: std::str::FromStr>(
        &self,
        kind: &str,
        gpu: Option<usize>,
        function: &str,
    ) -> Option<T> {
        let own = gpu.and_then(|g| self.of(g, &format!("{kind}.{function}")));
        own.or_else(|| self.number(&format!("{kind}.{function}")))
    }

    /// Bytes that have moved until now, out and in.
    pub(crate) fn moved(&mut self, gpu: usize) -> Moved {
        let rate = |key| self.of::<f64>(gpu, key).unwrap_or(0.0);
        let pcie = [rate("pcie_tx"), rate("pcie_rx")];
        let nvlink = [rate("nvlink_tx"), rate("nvlink_rx")];
        let start = [rate("start_tx"), rate("start_rx")];
        let frozen = self.is(gpu, "frozen");
        let now = Instant::now();
        let moved = self.moved.entry(gpu).or_insert(Moved { pcie: start, ..Moved::default() });
        let Some(before) = moved.at.filter(|_| !frozen) else {
            if moved.at.is_none() {
                (moved.at, moved.wall) = (Some(now), wall());
            }
            return *moved;
        };
        let seconds = now.duration_since(before).as_secs_f64();
        for way in 0..2 {
            moved.pcie[way] += pcie[way] * seconds;
            moved.nvlink[way] += nvlink[way] * seconds;
        }
        (moved.at, moved.wall) = (Some(now), wall());
        *moved
    }

    /// Bytes were copied, out (0) or in (1).
    pub(crate) fn copied(&mut self, gpu: usize, way: usize, bytes: usize) {
        let seen = self.of::<f64>(gpu, "seen").unwrap_or(1.0);
        self.moved(gpu);
        if let Some(moved) = self.moved.get_mut(&gpu) {
            moved.pcie[way] += bytes as f64 * seen;
        }
    }

    /// The next event that was not told: GPU and Xid. One of a GPU that nobody asked for waits.
    pub(crate) fn next_xid(&mut self) -> Option<(usize, u64)> {
        let all = self.text("xids")?;
        let (gpu, xid) = all.split_whitespace().nth(self.told)?.split_once(':')?;
        let event: (usize, u64) = (gpu.parse().ok()?, xid.parse().ok()?);
        if event.0 < self.gpus() && !self.registered.contains(&event.0) {
            return None;
        }
        self.told += 1;
        Some(event)
    }
}

fn wall() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as i64
}
