//! What a GPU moved and computed over a stretch of time, from readings; what a port of a network card or the connections of a process
//! moved, the same way ([`Track`]). Pure.
//!
//! All of it is of the whole device: there is no reading of one process or one room, and nothing here is ever divided among them.
//! What was not read is not measured, which is never zero: every answer says how much of the time it covers.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::event::{Mono, SECOND};

/// Readings kept one by one, for each link of a GPU: two minutes at eight a second.
const FINE: usize = 1024;

/// Older ones, put together to stretches of [`TOGETHER`]: more than an hour.
const COARSE: usize = 512;

/// Length to which older stretches grow, nanoseconds.
const TOGETHER: u64 = 10 * SECOND;

/// Way that bytes take. Part of the format of recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Link {
    /// To the host, and to network cards that read or write GPU memory.
    Pcie,
    /// To other GPUs, all links together.
    NvLink,
    /// To the processor of a superchip.
    C2c,
    /// Through a port of an RDMA card (none of a GPU's).
    Rdma,
    /// Over TCP connections (none of a GPU's).
    Tcp,
}

impl Link {
    /// Every one of a GPU's, in the order of its history.
    pub const ALL: [Self; 3] = [Self::Pcie, Self::NvLink, Self::C2c];

    /// The label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Pcie => "pcie",
            Self::NvLink => "nvlink",
            Self::C2c => "c2c",
            Self::Rdma => "rdma",
            Self::Tcp => "tcp",
        }
    }

    /// Place in [`Self::ALL`], beyond it for what no GPU has.
    const fn index(self) -> usize {
        self as usize
    }
}

/// Where a number of bytes is from, the surest first. Part of the format of recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    /// Two readings of a byte counter.
    Counters,
    /// A pair of GPM samples: the mean rate between them.
    Gpm,
    /// The driver's rate over 20 ms, once a second: what it was at that instant.
    Throughput,
}

impl Source {
    /// The label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Gpm => "gpm",
            Self::Counters => "counters",
            Self::Throughput => "throughput",
        }
    }
}

/// What moved between two moments. Out is what left the GPU. Part of the format of recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stretch {
    /// Which way.
    pub link: Link,
    /// Says who.
    pub source: Source,
    /// Not before this.
    pub from: Mono,
    /// Not after this.
    pub to: Mono,
    /// Bytes that left the GPU.
    pub out: u64,
    /// Bytes that arrived.
    pub into: u64,
}

/// What a GPU moved over a window, as far as it was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Which way.
    pub link: Link,
    /// Says who; the least sure of them where there are several.
    pub source: Source,
    /// Bounds of the readings it is made of: wider than the time that was asked for by up to one reading at each end.
    pub from: Mono,
    /// See [`Self::from`].
    pub to: Mono,
    /// Bytes that left the GPU within these bounds, in the time that was read.
    pub out: u64,
    /// Bytes that arrived.
    pub into: u64,
    /// How much of the time that was asked for was read, thousandths.
    pub coverage: u16,
}

/// How busy the GPU was over a window: the share of time in which any kernel ran, percent. Copies do not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Computing {
    /// The least of the readings.
    pub least: u8,
    /// The most of them.
    pub most: u8,
    /// How much of the time that was asked for was read, thousandths.
    pub coverage: u16,
}

/// Readings of one GPU.
#[derive(Clone, Debug, Default)]
pub struct History {
    tracks: [Track; Link::ALL.len()],
    /// Time and percent; at most [`FINE`].
    busy: VecDeque<(Mono, Mono, u8)>,
    /// Readings that were not in order of time.
    disorder: u64,
}

/// What moved one way, the latest readings one by one, older ones put together. Bounded.
#[derive(Clone, Debug, Default)]
pub struct Track {
    fine: VecDeque<Stretch>,
    coarse: VecDeque<Stretch>,
}

impl History {
    /// Takes what moved; whether it is a reading. A stretch that begins or ends before the last one did is counted and left out.
    pub fn moved(&mut self, stretch: Stretch) -> bool {
        let Some(track) = self.tracks.get_mut(stretch.link.index()) else { return false };
        let takes = track.moved(stretch);
        self.disorder += u64::from(!takes);
        takes
    }

    /// Takes the share of time, percent, in which a kernel ran from `from` to `to`; whether it is a reading, and in order.
    pub fn computed(&mut self, from: Mono, to: Mono, percent: u8) -> bool {
        let early = |last: &(Mono, Mono, u8)| from < last.0 || to < last.1;
        if to < from || percent > 100 || self.busy.back().is_some_and(early) {
            self.disorder += 1;
            return false;
        }
        if self.busy.len() >= FINE {
            self.busy.pop_front();
        }
        self.busy.push_back((from, to, percent));
        true
    }

    /// Readings left out because they were not in order of time, or no readings.
    pub const fn disorder(&self) -> u64 {
        self.disorder
    }

    /// What moved on `link` from `from` to `to`; `None`: nothing of that time was read.
    pub fn window(&self, link: Link, from: Mono, to: Mono) -> Option<Window> {
        self.tracks.get(link.index())?.window(from, to)
    }

    /// Readings of `link` that touch the time from `from` to `to`, in order.
    pub fn stretches(&self, link: Link, from: Mono, to: Mono) -> impl Iterator<Item = &Stretch> + Clone {
        self.tracks.get(link.index()).into_iter().flat_map(move |track| track.stretches(from, to))
    }

    /// How busy it was; `None`: nothing of that time was read.
    pub fn computing(&self, from: Mono, to: Mono) -> Option<Computing> {
        let mut covered = Covered::new(from, to);
        let mut found: Option<(u8, u8)> = None;
        let first = self.busy.partition_point(|(_, t, _)| *t < from);
        let touching = self.busy.range(first..).take_while(|(f, ..)| *f <= to);
        for (_, _, percent) in touching.filter(|(f, t, _)| covered.add(*f, *t)) {
            let (least, most) = found.get_or_insert((*percent, *percent));
            *least = (*least).min(*percent);
            *most = (*most).max(*percent);
        }
        found.map(|(least, most)| Computing { least, most, coverage: covered.thousandths() })
    }
}

impl Track {
    /// Takes what moved; whether it is a reading. A stretch that begins or ends before the last one did is left out.
    pub fn moved(&mut self, stretch: Stretch) -> bool {
        let early = |l: &Stretch| stretch.from < l.from || stretch.to < l.to;
        let in_order = stretch.to >= stretch.from && !self.last().is_some_and(early);
        if in_order {
            self.push(stretch);
        }
        in_order
    }

    /// The latest reading.
    pub fn last(&self) -> Option<&Stretch> {
        self.fine.back().or(self.coarse.back())
    }

    /// What moved from `from` to `to`; `None`: nothing of that time was read.
    pub fn window(&self, from: Mono, to: Mono) -> Option<Window> {
        let mut covered = Covered::new(from, to);
        let mut window: Option<Window> = None;
        for s in self.stretches(from, to).filter(|s| covered.add(s.from, s.to)) {
            let w = window.get_or_insert(Window {
                link: s.link,
                source: s.source,
                from: s.from,
                to: s.to,
                out: 0,
                into: 0,
                coverage: 0,
            });
            w.source = w.source.max(s.source);
            w.to = w.to.max(s.to);
            w.out = w.out.saturating_add(s.out);
            w.into = w.into.saturating_add(s.into);
        }
        window.map(|w| Window { coverage: covered.thousandths(), ..w })
    }

    /// Readings that touch the time from `from` to `to`, in order.
    pub fn stretches(&self, from: Mono, to: Mono) -> impl Iterator<Item = &Stretch> + Clone {
        [&self.coarse, &self.fine].into_iter().flat_map(move |part| {
            // Both ends are in order, so that nothing before the first of them is looked at.
            let first = part.partition_point(|s| s.to < from);
            part.range(first..).take_while(move |s| s.from <= to)
        })
    }

    fn push(&mut self, stretch: Stretch) {
        if self.fine.len() >= FINE
            && let Some(oldest) = self.fine.pop_front()
        {
            self.keep(oldest);
        }
        self.fine.push_back(stretch);
    }

    /// Puts an old stretch to the one before it, where no time lies between them.
    fn keep(&mut self, old: Stretch) {
        if let Some(last) = self.coarse.back_mut()
            && old.from <= last.to
            && old.to.since(last.from) <= TOGETHER
        {
            last.source = last.source.max(old.source);
            last.to = last.to.max(old.to);
            last.out = last.out.saturating_add(old.out);
            last.into = last.into.saturating_add(old.into);
            return;
        }
        if self.coarse.len() >= COARSE {
            self.coarse.pop_front();
        }
        self.coarse.push_back(old);
    }
}

/// How much of a window stretches cover, that come in order of their beginnings.
struct Covered {
    from: Mono,
    to: Mono,
    /// Covered up to here.
    until: Mono,
    nanos: u64,
    any: bool,
}

impl Covered {
    fn new(from: Mono, to: Mono) -> Self {
        Self { from, to: to.max(from), until: from, nanos: 0, any: false }
    }

    /// Whether the stretch has a share in the window.
    fn add(&mut self, from: Mono, to: Mono) -> bool {
        // A window without length is covered by what contains it.
        let inside = if self.from == self.to {
            from <= self.from && to >= self.to
        } else {
            from < self.to && to > self.from
        };
        if inside {
            self.any = true;
            let (from, to) = (from.max(self.until), to.min(self.to));
            self.nanos += to.since(from);
            self.until = self.until.max(to);
        }
        inside
    }

    fn thousandths(&self) -> u16 {
        let asked = self.to.since(self.from);
        if asked == 0 {
            return if self.any { 1000 } else { 0 };
        }
        u16::try_from(u128::from(self.nanos) * 1000 / u128::from(asked)).unwrap_or(1000)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn at(tenths: u64) -> Mono {
        Mono(tenths * SECOND / 10)
    }

    fn stretch(from: u64, to: u64, out: u64) -> Stretch {
        Stretch { link: Link::Pcie, source: Source::Gpm, from: at(from), to: at(to), out, into: 2 * out }
    }

    #[test]
    fn a_window_sums_whole_readings_and_tells_their_bounds() {
        let mut history = History::default();
        for n in 0..10 {
            history.moved(stretch(n * 10, n * 10 + 10, 100));
        }
        let w = history.window(Link::Pcie, at(25), at(42)).unwrap();
        assert_eq!((w.from, w.to, w.out, w.into, w.coverage), (at(20), at(50), 300, 600, 1000));
        assert_eq!(w.source, Source::Gpm);
        assert_eq!(history.window(Link::NvLink, at(25), at(42)), None);
    }

    #[test]
    fn zero_is_measured_and_nothing_is_not() {
        let mut history = History::default();
        assert_eq!(history.window(Link::Pcie, at(0), at(10)), None);
        history.moved(stretch(0, 5, 0));
        let w = history.window(Link::Pcie, at(0), at(10)).unwrap();
        assert_eq!((w.out, w.coverage), (0, 500));
        assert_eq!(history.window(Link::Pcie, at(5), at(10)), None);
    }

    #[test]
    fn a_gap_is_not_covered_and_an_overlap_not_twice() {
        let mut history = History::default();
        history.moved(stretch(0, 10, 1));
        history.moved(stretch(9, 20, 1));
        history.moved(stretch(60, 100, 1));
        assert_eq!(history.window(Link::Pcie, at(0), at(20)).unwrap().coverage, 1000);
        assert_eq!(history.window(Link::Pcie, at(0), at(100)).unwrap().coverage, 600);
        assert_eq!(history.window(Link::Pcie, at(70), at(70)).unwrap().coverage, 1000);
        assert_eq!(history.window(Link::Pcie, at(30), at(30)), None);
    }

    #[test]
    fn the_least_sure_source_names_the_window() {
        let mut history = History::default();
        history.moved(Stretch { source: Source::Counters, ..stretch(0, 10, 1) });
        history.moved(Stretch { source: Source::Throughput, ..stretch(10, 20, 1) });
        history.moved(Stretch { source: Source::Gpm, ..stretch(20, 30, 1) });
        assert_eq!(history.window(Link::Pcie, at(0), at(30)).unwrap().source, Source::Throughput);
        assert_eq!(history.window(Link::Pcie, at(0), at(10)).unwrap().source, Source::Counters);
    }

    #[test]
    fn hours_of_readings_stay_bounded_and_lose_no_byte_of_the_last_one() {
        let mut history = History::default();
        let n = 8 * 3600 * 3;
        for i in 0..n {
            let (from, to) = (Mono(i * SECOND / 8), Mono((i + 1) * SECOND / 8));
            history.moved(Stretch { from, to, ..stretch(0, 0, 7) });
            history.computed(from, to, 1);
        }
        let track = history.tracks.first().unwrap();
        assert!(track.fine.len() == FINE && track.coarse.len() == COARSE && history.busy.len() == FINE);
        let end = Mono(n * SECOND / 8);
        let w = history.window(Link::Pcie, Mono(end.0 - 3600 * SECOND), end).unwrap();
        let eighths = w.to.since(w.from) / (SECOND / 8);
        assert_eq!((w.coverage, w.out), (1000, 7 * eighths));
        assert!(eighths - 8 * 3600 <= 80, "{eighths}");
    }

    #[test]
    fn what_is_out_of_order_is_counted_and_left_out() {
        let mut history = History::default();
        history.moved(stretch(10, 20, 1));
        history.moved(stretch(5, 30, 1));
        history.moved(Stretch { from: at(40), to: at(30), ..stretch(0, 0, 1) });
        history.computed(at(1), at(2), 101);
        assert_eq!(history.disorder(), 3);
        assert_eq!(history.window(Link::Pcie, at(0), at(100)).unwrap().out, 1);
        assert_eq!(history.computing(at(0), at(100)), None);
    }

    #[test]
    fn how_busy_it_was_is_told_by_its_ends() {
        let mut history = History::default();
        for (n, percent) in [(0, 3), (10, 99), (20, 40)] {
            history.computed(at(n), at(n + 10), percent);
        }
        let c = history.computing(at(0), at(30)).unwrap();
        assert_eq!((c.least, c.most, c.coverage), (3, 99, 1000));
        assert_eq!(history.computing(at(21), at(22)).unwrap().most, 40);
    }
}
