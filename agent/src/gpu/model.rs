//! What is known of the GPUs of this host: readings as they come, and what they add up to. Pure.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::quiet::{Quiet, Span};
use super::windows::{Computing, History, Link, Stretch, Window};
use crate::event::{Mono, SECOND};

/// GPUs at most; a host has 16 at most today.
pub const MAX_GPUS: usize = 32;

/// Processes kept per GPU.
pub const MAX_PROCESSES: usize = 256;

/// Other troubles kept per GPU, the newest.
const MAX_TROUBLES: usize = 32;

/// Holders are told every 5 s: one that was seen held the GPU this long before and after, nanoseconds.
const HOLDS: u64 = 6 * SECOND;

/// A GPU this busy computes, percent.
const WORKS: u8 = 50;

/// Errors kept per GPU, the newest; and different numbers of them that are counted by name.
const MAX_XIDS: usize = 64;

/// The number under which Xids beyond `MAX_XIDS` different ones are counted. The driver's own for "unknown" (`nvml.h`, `nvmlEventData_t`).
pub const OTHER_XID: u64 = 999;

/// Something that was read of one GPU. Part of the format of recordings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// When.
    pub at: Mono,
    /// Which GPU, by the driver's numbering.
    pub index: u32,
    /// What.
    pub what: What,
}

/// What was read. Part of the format of recordings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// The GPU is there, under this name.
    Named(Box<str>),
    /// It has this link beside `PCIe`, or nobody can tell whether it does.
    Has(Link),
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

/// A trouble of a GPU, with the time in which it was so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// Since when.
    pub from: Mono,
    /// Until when; `None`: it is still so.
    pub to: Option<Mono>,
    /// What.
    pub what: Ailment,
}

/// What a GPU suffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ailment {
    /// An error of the device.
    Xid(u64),
    /// An event that is no Xid, by the driver's bits.
    Event(u64),
    /// It does not answer.
    Lost,
    /// The driver wants something done with it.
    Recovery(u64),
    /// Its clocks are lowered by force, for these reasons of the driver's.
    Slowed(u64),
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
    /// Processes that hold it or held it, first and last seen doing so; at most [`MAX_PROCESSES`].
    holders: BTreeMap<u32, Span>,
    /// Troubles but Xids, oldest first.
    troubles: VecDeque<Trouble>,
    quiet: Quiet,
    /// Quiet as the agent before had read it, until something else is read.
    before: Option<Span>,
    /// When it was last seen computing.
    works: Option<Mono>,
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
            holders: BTreeMap::new(),
            troubles: VecDeque::new(),
            quiet: Quiet::default(),
            before: None,
            works: None,
        }
    }

    /// Whether a process held it at any time from `from` to `to`, as far as was seen.
    pub fn held_by(&self, pid: u32, from: Mono, to: Mono) -> bool {
        let Some(seen) = self.holders.get(&pid) else { return false };
        // Until the next list says otherwise, also where none comes any more.
        let still = self.processes.contains(&pid) || seen.to.plus(HOLDS) >= from;
        still && seen.from.0.saturating_sub(HOLDS) <= to.0
    }

    /// Processes that hold it, as last told.
    pub fn holders(&self) -> impl Iterator<Item = u32> + '_ {
        self.processes.iter().copied()
    }

    /// Times without any activity, the last at the end: that which the agent before had read, and that which this one has.
    /// Nothing where activity, or a gap, is what was read last.
    pub fn quiet(&self) -> [Option<Span>; 2] {
        [self.before.filter(|_| !self.quiet.was_active()), self.quiet.span()]
    }

    /// When it was last seen computing.
    pub const fn works(&self) -> Option<Mono> {
        self.works
    }

    /// What it suffered from `from` to `to`, in order.
    pub fn troubles(&self, from: Mono, to: Mono) -> Vec<Trouble> {
        let xids =
            self.xids(from, to).map(|(at, n)| Trouble { from: at, to: Some(at), what: Ailment::Xid(n) });
        let within = |t: &&Trouble| t.from <= to && t.to.is_none_or(|end| end >= from);
        let mut all: Vec<Trouble> = xids.chain(self.troubles.iter().filter(within).copied()).collect();
        all.sort_by_key(|t| t.from);
        all
    }

    /// A state of trouble begins, goes on, or is over.
    fn ail(&mut self, at: Mono, is: Option<Ailment>, same: fn(Ailment) -> bool) {
        let open = self.troubles.iter_mut().rev().find(|t| t.to.is_none() && same(t.what));
        if let Some(open) = open {
            if Some(open.what) == is {
                return;
            }
            open.to = Some(at);
        }
        if let Some(what) = is {
            self.suffer(Trouble { from: at, to: None, what });
        }
    }

    fn suffer(&mut self, trouble: Trouble) {
        if self.troubles.len() >= MAX_TROUBLES {
            self.troubles.pop_front();
        }
        self.troubles.push_back(trouble);
    }

    /// These processes hold it now, and no others.
    fn hold(&mut self, at: Mono, pids: &[u32]) {
        self.processes = pids.iter().copied().take(MAX_PROCESSES).collect();
        for pid in &self.processes {
            if self.holders.len() >= MAX_PROCESSES && !self.holders.contains_key(pid) {
                let left = self.holders.iter().filter(|(pid, _)| !self.processes.contains(pid));
                let Some(oldest) = left.min_by_key(|(_, seen)| seen.to).map(|(pid, _)| *pid) else {
                    continue;
                };
                self.holders.remove(&oldest);
            }
            self.holders.entry(*pid).or_insert(Span { from: at, to: at }).to = at;
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
            What::Named(name) => {
                if *self.name != **name {
                    // Another GPU has the number now.
                    self.before = None;
                }
                self.name = Arc::from(&**name);
            }
            What::Has(link) => self.quiet.has(*link),
            What::Moved(stretch) => self.moved(*stretch),
            What::Computed(from, percent) => {
                if self.history.computed(*from, at, *percent) {
                    self.quiet.computed(*from, at, *percent);
                    if *percent >= WORKS {
                        self.works = Some(at);
                    }
                }
            }
            What::Processes(pids) => self.hold(at, pids),
            What::Xid(xid) => self.xid(at, *xid),
            What::Trouble(bits) => {
                self.trouble = Some((at, *bits));
                self.suffer(Trouble { from: at, to: Some(at), what: Ailment::Event(*bits) });
            }
            What::Lost => {
                self.lost.get_or_insert(at);
                // Whom it belonged to is still who is hit.
                self.ail(at, Some(Ailment::Lost), |a| a == Ailment::Lost);
            }
            What::Back => {
                self.lost = None;
                self.ail(at, None, |a| a == Ailment::Lost);
            }
            What::Recovery(action) => {
                self.recovery = changed(self.recovery, at, *action);
                let is = (*action != 0).then_some(Ailment::Recovery(*action));
                self.ail(at, is, |a| matches!(a, Ailment::Recovery(_)));
            }
            What::Clocks(reasons) => {
                self.clocks = changed(self.clocks, at, *reasons);
                let forced = reasons & FORCED;
                let is = (forced != 0).then_some(Ailment::Slowed(forced));
                self.ail(at, is, |a| matches!(a, Ailment::Slowed(_)));
            }
        }
    }

    fn moved(&mut self, stretch: Stretch) {
        // A rate of 20 ms once a second adds up to nothing.
        if stretch.source != super::windows::Source::Throughput {
            let (out, into) = self.moved.entry(stretch.link).or_default();
            *out = out.saturating_add(stretch.out);
            *into = into.saturating_add(stretch.into);
        }
        if self.history.moved(stretch) {
            self.quiet.moved(&stretch);
        }
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

/// What of a GPU outlives the agent. Part of the state file's format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedGpu {
    index: u32,
    name: String,
    processes: Vec<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    quiet: Option<Span>,
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

    /// Whether none was ever read of.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// What must be known to go on later.
    pub(crate) fn save(&self) -> Vec<SavedGpu> {
        let saved = |(index, gpu): (&u32, &Gpu)| SavedGpu {
            index: *index,
            name: gpu.name.to_string(),
            processes: gpu.processes.iter().copied().collect(),
            // The longer of the two.
            quiet: gpu.quiet().into_iter().flatten().max_by_key(|span| span.after(Mono(0))),
        };
        self.all.iter().map(saved).collect()
    }

    /// Goes on where another left off at `from`, with those processes that are `alive`.
    pub(crate) fn restore(saved: Vec<SavedGpu>, from: Mono, alive: impl Fn(u32) -> bool) -> Self {
        let gpu = |saved: SavedGpu| {
            let mut gpu = Gpu::new(saved.index);
            gpu.name = Arc::from(saved.name);
            let living: Vec<u32> = saved.processes.into_iter().filter(|pid| alive(*pid)).collect();
            gpu.hold(from, &living);
            gpu.before = saved.quiet.filter(|span| span.to <= from);
            (saved.index, gpu)
        };
        Self { all: saved.into_iter().take(MAX_GPUS).map(gpu).collect(), turned_away: 0 }
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

/// All of them.
const FORCED: u64 = 0x8 | 0x20 | 0x40 | 0x80 | 0x400;

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
