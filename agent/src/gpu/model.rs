//! What is known of the GPUs of this host: readings as they come, and what they add up to. Pure.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::windows::{Computing, History, Link, Stretch, Window};
use crate::event::Mono;

/// GPUs at most; a host has 16 at most today.
pub const MAX_GPUS: usize = 32;

/// Processes kept per GPU.
pub const MAX_PROCESSES: usize = 256;

/// Errors kept per GPU, the newest; and different numbers of them that are counted by name.
const MAX_XIDS: usize = 64;

/// The number under which Xids beyond `MAX_XIDS` different ones are counted. The driver's own for "unknown" (`nvml.h`, `nvmlEventData_t`).
pub const OTHER_XID: u64 = 999;

/// Something that was read of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// When.
    pub at: Mono,
    /// Which GPU, by the driver's numbering.
    pub index: u32,
    /// What.
    pub what: What,
}

/// What was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum What {
    /// The GPU is there, under this name.
    Named(Arc<str>),
    /// Bytes moved.
    Moved(Stretch),
    /// Share of time in which any kernel ran, percent, from this moment to [`Reading::at`].
    Computed(Mono, u8),
    /// Processes that hold it (host numbering), sorted: all of them.
    Processes(Vec<u32>),
    /// An error of the device.
    Xid(u64),
    /// An event that tells of a device in trouble, by the driver's bits (`nvml.h`, `nvmlEventType…`).
    Trouble(u64),
    /// It answers no more: it has fallen off the bus, or is to be reset.
    Lost,
    /// It answers again.
    Back,
    /// What the driver wants done with it (`nvmlDeviceGpuRecoveryAction_t`), 0 for nothing.
    Recovery(u64),
    /// Why its clocks are not what they could be (`nvmlClocksEventReasons`).
    Clocks(u64),
}

/// One GPU.
#[derive(Clone, Debug)]
pub struct Gpu {
    /// The driver's name for it (`GPU-…`), or its number where that gives none.
    pub name: Arc<str>,
    /// What it moved and how busy it was.
    pub history: History,
    /// Processes that hold it.
    pub processes: BTreeSet<u32>,
    /// Errors, oldest first.
    pub xids: VecDeque<(Mono, u64)>,
    /// Errors since the agent started, by number.
    pub xid_counts: BTreeMap<u64, u64>,
    /// When the driver last told of trouble that is no Xid, and its bits.
    pub trouble: Option<(Mono, u64)>,
    /// It has not answered since.
    pub lost: Option<Mono>,
    /// What the driver wants done with it, and since when.
    pub recovery: Option<(Mono, u64)>,
    /// Why its clocks are lowered, and since when.
    pub clocks: Option<(Mono, u64)>,
    /// Bytes since the agent started, out and in, of links that were read.
    pub moved: BTreeMap<Link, (u64, u64)>,
}

impl Gpu {
    fn new(index: u32) -> Self {
        Self {
            name: Arc::from(format!("index-{index}")),
            history: History::default(),
            processes: BTreeSet::new(),
            xids: VecDeque::new(),
            xid_counts: BTreeMap::new(),
            trouble: None,
            lost: None,
            recovery: None,
            clocks: None,
            moved: BTreeMap::new(),
        }
    }

    /// What it moved over a window, on each link of which anything was read then.
    pub fn windows(&self, from: Mono, to: Mono) -> impl Iterator<Item = Window> + '_ {
        Link::ALL.into_iter().filter_map(move |link| self.history.window(link, from, to))
    }

    /// How busy it was.
    pub fn computing(&self, from: Mono, to: Mono) -> Option<Computing> {
        self.history.computing(from, to)
    }

    /// Errors from `from` to `to`.
    pub fn xids(&self, from: Mono, to: Mono) -> impl Iterator<Item = (Mono, u64)> + '_ {
        self.xids.iter().copied().filter(move |(at, _)| *at >= from && *at <= to)
    }

    fn take(&mut self, at: Mono, what: &What) {
        match what {
            What::Named(name) => self.name = Arc::clone(name),
            What::Moved(stretch) => self.moved(*stretch),
            What::Computed(from, percent) => self.history.computed(*from, at, *percent),
            What::Processes(pids) => self.processes = pids.iter().copied().take(MAX_PROCESSES).collect(),
            What::Xid(xid) => self.xid(at, *xid),
            What::Trouble(bits) => self.trouble = Some((at, *bits)),
            What::Lost => {
                self.lost.get_or_insert(at);
                // Whom it belonged to is still who is hit.
            }
            What::Back => self.lost = None,
            What::Recovery(action) => self.recovery = changed(self.recovery, at, *action),
            What::Clocks(reasons) => self.clocks = changed(self.clocks, at, *reasons),
        }
    }

    fn moved(&mut self, stretch: Stretch) {
        // A rate of 20 ms once a second adds up to nothing.
        if stretch.source != super::windows::Source::Throughput {
            let (out, into) = self.moved.entry(stretch.link).or_default();
            *out = out.saturating_add(stretch.out);
            *into = into.saturating_add(stretch.into);
        }
        self.history.moved(stretch);
    }

    fn xid(&mut self, at: Mono, xid: u64) {
        if self.xids.len() >= MAX_XIDS {
            self.xids.pop_front();
        }
        self.xids.push_back((at, xid));
        let known = self.xid_counts.contains_key(&xid) || self.xid_counts.len() < MAX_XIDS;
        *self.xid_counts.entry(if known { xid } else { OTHER_XID }).or_default() += 1;
    }
}

/// A value with the moment since which it is so.
fn changed(before: Option<(Mono, u64)>, at: Mono, now: u64) -> Option<(Mono, u64)> {
    before.filter(|(_, value)| *value == now).or(Some((at, now)))
}

/// All GPUs.
#[derive(Clone, Debug, Default)]
pub struct Gpus {
    all: BTreeMap<u32, Gpu>,
    turned_away: u64,
}

impl Gpus {
    /// Takes a reading.
    pub fn take(&mut self, reading: &Reading) {
        if self.all.len() >= MAX_GPUS && !self.all.contains_key(&reading.index) {
            self.turned_away += 1;
            return;
        }
        let gpu = self.all.entry(reading.index).or_insert_with(|| Gpu::new(reading.index));
        gpu.take(reading.at, &reading.what);
    }

    /// Every GPU, by the driver's number.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Gpu)> {
        self.all.iter().map(|(index, gpu)| (*index, gpu))
    }

    /// Those that a process holds.
    pub fn of(&self, pid: u32) -> impl Iterator<Item = &Gpu> {
        self.all.values().filter(move |gpu| gpu.processes.contains(&pid))
    }

    /// Readings of GPUs beyond [`MAX_GPUS`].
    pub const fn turned_away(&self) -> u64 {
        self.turned_away
    }
}

/// What is known of an Xid, in words (NVIDIA's catalogue of Xid errors); `None`: see there.
pub const fn xid_meaning(xid: u64) -> Option<&'static str> {
    Some(match xid {
        31 => "memory page fault",
        39..=41 => "copy engine exception",
        43 | 46 => "GPU stopped processing",
        48 => "double bit memory error",
        63 => "memory row remapped",
        64 => "memory row could not be remapped",
        74 => "NVLink error",
        79 => "GPU has fallen off the bus",
        94 => "contained memory error",
        95 => "uncontained memory error",
        119 => "GPU system processor did not answer",
        120 => "GPU system processor error",
        154 => "recovery action changed",
        _ => return None,
    })
}

/// A recovery action in words (`nvml.h`, `nvmlDeviceGpuRecoveryAction_t`).
pub const fn recovery_meaning(action: u64) -> &'static str {
    match action {
        0 => "none",
        1 => "reset the GPU",
        2 => "reboot the node",
        3 => "drain peer-to-peer",
        4 => "drain and reset",
        5 => "recover IMEX",
        6 => "reset the bus",
        7 => "reboot the system",
        _ => "unknown",
    }
}

/// Reasons that lower clocks by force (`nvml.h`, `nvmlClocksEventReason…`): hardware slow-down, heat, power brake, reliability. Idle,
/// application clocks and the ordinary power cap are none.
const SLOWED: [(u64, &str); 5] = [
    (0x8, "hardware slow-down"),
    (0x20, "software thermal slow-down"),
    (0x40, "hardware thermal slow-down"),
    (0x80, "power brake"),
    (0x400, "reliability"),
];

/// Why its clocks are lowered by force, of the driver's reasons.
pub fn slowed(reasons: u64) -> impl Iterator<Item = &'static str> {
    SLOWED.into_iter().filter(move |(bit, _)| reasons & bit != 0).map(|(_, name)| name)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::event::SECOND;
    use crate::gpu::windows::Source;

    fn tell(gpus: &mut Gpus, at: u64, index: u32, what: What) {
        gpus.take(&Reading { at: Mono(at * SECOND), index, what });
    }

    #[test]
    fn a_gpu_is_found_by_a_process_that_holds_it() {
        let mut gpus = Gpus::default();
        tell(&mut gpus, 1, 0, What::Named("GPU-a".into()));
        tell(&mut gpus, 1, 0, What::Processes(vec![10, 11]));
        tell(&mut gpus, 1, 1, What::Processes(vec![11]));
        let names = |gpus: &Gpus, pid| gpus.of(pid).map(|g| g.name.to_string()).collect::<Vec<_>>();
        assert_eq!(names(&gpus, 11), ["GPU-a", "index-1"]);
        tell(&mut gpus, 2, 0, What::Processes(vec![12]));
        assert_eq!(names(&gpus, 10), Vec::<String>::new());
    }

    #[test]
    fn everything_is_bounded() {
        let mut gpus = Gpus::default();
        for index in 0..100 {
            tell(&mut gpus, 1, index, What::Lost);
        }
        assert_eq!((gpus.iter().count(), gpus.turned_away()), (MAX_GPUS, 100 - 32));
        for n in 0..1000 {
            tell(&mut gpus, n, 0, What::Xid(n));
        }
        tell(&mut gpus, 1000, 0, What::Processes((0..10_000).collect()));
        let gpu = gpus.iter().next().unwrap().1;
        assert_eq!(
            (gpu.xids.len(), gpu.xid_counts.len(), gpu.processes.len()),
            (64, MAX_XIDS + 1, MAX_PROCESSES)
        );
        assert_eq!(gpu.xid_counts.values().sum::<u64>(), 1000);
    }

    #[test]
    fn states_are_kept_with_the_moment_since_which_they_are_so() {
        let mut gpus = Gpus::default();
        for (at, action) in [(1, 0), (5, 1), (9, 1)] {
            tell(&mut gpus, at, 0, What::Recovery(action));
        }
        tell(&mut gpus, 3, 0, What::Lost);
        tell(&mut gpus, 4, 0, What::Lost);
        let gpu = gpus.iter().next().unwrap().1;
        assert_eq!((gpu.recovery, gpu.lost), (Some((Mono(5 * SECOND), 1)), Some(Mono(3 * SECOND))));
        tell(&mut gpus, 10, 0, What::Back);
        assert_eq!(gpus.iter().next().unwrap().1.lost, None);
    }

    #[test]
    fn an_instant_adds_nothing_to_the_total() {
        let mut gpus = Gpus::default();
        let stretch =
            |source| Stretch { link: Link::Pcie, source, from: Mono(0), to: Mono(9), out: 5, into: 6 };
        tell(&mut gpus, 1, 0, What::Moved(stretch(Source::Throughput)));
        assert!(gpus.iter().next().unwrap().1.moved.is_empty());
        tell(&mut gpus, 1, 0, What::Moved(stretch(Source::Gpm)));
        assert_eq!(gpus.iter().next().unwrap().1.moved.get(&Link::Pcie), Some(&(5, 6)));
    }

    #[test]
    fn only_what_lowers_clocks_by_force_is_a_slow_down() {
        assert_eq!(slowed(0x1 | 0x2 | 0x4 | 0x10 | 0x100 | 0x200).count(), 0);
        assert_eq!(slowed(0x48).collect::<Vec<_>>(), ["hardware slow-down", "hardware thermal slow-down"]);
    }
}
