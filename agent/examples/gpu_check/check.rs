//! Holds the agent's readings of GPUs against copies of known size: each source of bytes by itself, through the agent's own threads.
//!
//! First every call that the agent makes, with its answer and its cost; then, for each GPU, nothing for a while, copies to it, copies
//! from it. What a source measured meanwhile is put beside what was copied.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::{self, Write as _};
use std::path::PathBuf;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use roomtrace::event::Mono;
use roomtrace::gpu::model::What;
use roomtrace::gpu::windows::{Link, Source};
use roomtrace::gpu::{Called, GpuStanding, Readers, Settings, each_call};
use roomtrace::kernel::monotonic;

use crate::cuda::{Cuda, Room, Way};

/// A driver that does not answer for so long hangs.
const HANGS: Duration = Duration::from_secs(30);

/// Time in which a source that a GPU has must have told something.
const FIRST: Duration = Duration::from_secs(20);

/// A source that counts must say so much of what was copied. More: PCI Express headers and requests may be in it, and whatever else
/// the GPU moves.
const COUNTS: [f64; 2] = [0.9, 1.3];

/// The same of one that sees 20 ms of every second.
const SEES: [f64; 2] = [0.5, 2.0];

/// Sources of bytes, as the agent prefers them.
const SOURCES: [&[Source]; 3] = [&[Source::Gpm], &[Source::Counters], &[Source::Throughput]];

/// What to check.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    /// The driver's library; `None`: where the loader finds it.
    pub(crate) nvml: Option<PathBuf>,
    /// The CUDA driver's library.
    pub(crate) cuda: Option<PathBuf>,
    /// How often each call is made.
    pub(crate) rounds: u32,
    /// How long is copied each way.
    pub(crate) lasts: Duration,
    /// Bytes of one copy.
    pub(crate) copy: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { nvml: None, cuda: None, rounds: 100, lasts: Duration::from_secs(4), copy: 64 << 20 }
    }
}

/// How it went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Every source that a GPU has measured what was copied.
    Agrees,
    /// These did not.
    Differs(Vec<String>),
    /// There is no driver.
    NoDriver(String),
    /// There is a driver and no GPU.
    NoGpu,
    /// GPUs were read; there is nothing to copy with.
    NoCopies(String),
    /// The driver does not come back.
    Hangs(String),
}

impl End {
    /// Exit status: 0, 1 where something is wrong, 3 where something is missing (as the agent's own).
    pub(crate) const fn code(&self) -> u8 {
        match self {
            Self::Agrees => 0,
            Self::Differs(_) | Self::Hangs(_) => 1,
            Self::NoDriver(_) | Self::NoGpu | Self::NoCopies(_) => 3,
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agrees => f.write_str("every source that these GPUs have measured what was copied"),
            Self::Differs(what) => write!(f, "measured is not copied: {}", what.join("; ")),
            Self::NoDriver(why) => write!(
                f,
                "no GPU driver here, nothing was checked: {why} (it comes with NVIDIA's driver; --nvml names another file)"
            ),
            Self::NoGpu => f.write_str("the driver is here and has no GPU, nothing was checked"),
            Self::NoCopies(why) => write!(
                f,
                "the readings were made, but nothing was copied to hold them against: {why} (it comes with NVIDIA's driver; --cuda names \
                 another file)"
            ),
            Self::Hangs(what) => {
                write!(f, "the driver has not come back for {} s from {what}", HANGS.as_secs())
            }
        }
    }
}

/// What one source said of one stretch of copying.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Compared {
    /// The driver's number for the GPU.
    pub(crate) index: u32,
    /// Says who.
    pub(crate) source: Source,
    /// Which way; `None`: nothing was copied meanwhile.
    pub(crate) way: Option<Way>,
    /// What was copied.
    pub(crate) counted: u64,
    /// What was measured that way (both ways together where nothing was copied), by link; empty: nothing.
    pub(crate) measured: BTreeMap<Link, u64>,
    /// Readings that could not be used, so that something may be missing.
    pub(crate) unusable: u64,
}

impl Compared {
    /// Measured against copied, on the ways to the host.
    #[allow(clippy::cast_precision_loss, reason = "a share")]
    pub(crate) fn share(&self) -> Option<f64> {
        let to_host =
            [Link::Pcie, Link::C2c].into_iter().filter_map(|link| self.measured.get(&link).copied());
        let measured = to_host.reduce(u64::saturating_add)?;
        (self.counted > 0).then(|| measured as f64 / self.counted as f64)
    }

    fn agrees(&self) -> bool {
        let [least, most] = if self.source == Source::Throughput { SEES } else { COUNTS };
        self.share().is_none_or(|share| (least..=most).contains(&share))
    }
}

/// Checks everything; lines go to `say` as they come.
pub(crate) fn run(options: &Options, say: &mut dyn FnMut(String)) -> (End, Vec<Compared>) {
    let mut all = Vec::new();
    let end = check(options, say, &mut all);
    (end, all)
}

fn check(options: &Options, say: &mut dyn FnMut(String), all: &mut Vec<Compared>) -> End {
    let gpus = match calls(options, say) {
        Ok(gpus) if gpus.is_empty() => return End::NoGpu,
        Ok(gpus) => gpus,
        Err(end) => return end,
    };
    say(String::new());
    let cuda = match Cuda::load(options.cuda.as_deref().map(OsStr::new)) {
        Ok(cuda) => cuda,
        Err(why) => return End::NoCopies(why),
    };
    let devices = match cuda.devices() {
        Ok(devices) if devices.is_empty() => return End::NoCopies("CUDA has no GPU".to_owned()),
        Ok(devices) => devices,
        Err(why) => return End::NoCopies(why),
    };
    say(format!(
        "copies through CUDA {}",
        cuda.version().map_or("of unknown version".to_owned(), |v| v.to_string())
    ));
    for (device, name) in devices {
        let Some((index, _)) = gpus.iter().find(|(_, gpu)| **gpu == name) else {
            return End::NoCopies(format!("NVML does not name the GPU that CUDA calls {name}"));
        };
        match of_gpu(options, cuda, device, *index, say) {
            Ok(compared) => all.extend(compared),
            Err(why) => return End::NoCopies(why),
        }
    }
    // Some instants of 20 ms cannot be held against seconds where something counts.
    let counted = |c: &Compared| {
        let same = |o: &&Compared| o.index == c.index && o.way == c.way && o.source != Source::Throughput;
        c.source == Source::Throughput && all.iter().filter(same).any(|o| o.share().is_some())
    };
    let wrong = all.iter().filter(|c| !c.agrees() && !counted(c));
    let named = |c: &Compared| format!("GPU {} by {} {}", c.index, c.source.label(), way(c.way));
    let wrong: Vec<String> = wrong.map(named).collect();
    if wrong.is_empty() { End::Agrees } else { End::Differs(wrong) }
}

/// Every call, on a thread that may hang. The GPUs by their names.
fn calls(options: &Options, say: &mut dyn FnMut(String)) -> Result<BTreeMap<u32, String>, End> {
    let (send, calls) = mpsc::channel();
    let (settings, rounds) = (settings(options, &[]), options.rounds);
    let asking = thread::spawn(move || each_call(&settings, rounds, &mut |called| drop(send.send(called))));
    let (mut gpus, mut last) = (BTreeMap::new(), "loading its library".to_owned());
    loop {
        match calls.recv_timeout(HANGS) {
            Ok(called) => {
                if gpus.insert(called.index, called.gpu.clone()).is_none() {
                    say(format!("GPU {} {}", called.index, called.gpu));
                    say(format!(
                        "  {:16} {:>6} {:>11} {:>11}  last answer",
                        "reading", "calls", "median", "worst"
                    ));
                }
                last = format!("what follows {} of GPU {}", called.reading, called.index);
                say(line(&called));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => return Err(End::Hangs(last)),
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
    }
    match asking.join() {
        Ok(Ok((version, _))) => {
            say(format!("driver {}", version.unwrap_or_else(|| "of unknown version".to_owned())));
        }
        Ok(Err(why)) => return Err(End::NoDriver(why)),
        Err(_) => return Err(End::Hangs(last)),
    }
    Ok(gpus)
}

fn line(called: &Called) -> String {
    let answer = match &called.answer {
        Ok(answer) => answer.clone(),
        Err(why) => format!("not measured: {why}"),
    };
    let micros = |d: Duration| format!("{:.1} µs", d.as_secs_f64() * 1e6);
    let (median, worst) = (micros(called.median()), micros(called.worst()));
    format!("  {:16} {:>6} {median:>11} {worst:>11}  {answer}", called.reading, called.took.len())
}

/// As the agent reads while rooms are in transfer.
fn settings(options: &Options, sources: &'static [Source]) -> Settings {
    Settings { lib_path: options.nvml.clone(), sources, ..Settings::default() }
}

fn way(way: Option<Way>) -> &'static str {
    match way {
        None => "while nothing is copied",
        Some(Way::ToGpu) => "to the GPU",
        Some(Way::FromGpu) => "from the GPU",
    }
}

fn of_gpu(
    options: &Options,
    cuda: Cuda,
    device: i32,
    index: u32,
    say: &mut dyn FnMut(String),
) -> Result<Vec<Compared>, String> {
    let mut room = cuda.room(device, options.copy)?;
    if !room.copies()? {
        return Err(format!("what was copied to GPU {index} and back is not what it was"));
    }
    let mut watches: Vec<Watch> = Vec::new();
    for sources in SOURCES {
        let readers =
            Readers::start(&settings(options, sources)).map_err(|e| format!("start a thread: {e}"))?;
        readers.set_busy(u32::MAX);
        watches.push(Watch {
            readers,
            index,
            source: sources[0],
            moved: BTreeMap::new(),
            instants: Vec::new(),
            read: None,
        });
    }
    let mut all = Vec::new();
    for turn in [None, Some(Way::ToGpu), Some(Way::FromGpu)] {
        all.extend(stretch(options, &room, turn, &mut watches, say)?);
    }
    Ok(all)
}

/// Copies one way for a while, or does nothing, and asks all sources what moved.
fn stretch(
    options: &Options,
    room: &Room,
    turn: Option<Way>,
    watches: &mut [Watch],
    say: &mut dyn FnMut(String),
) -> Result<Vec<Compared>, String> {
    let begun = monotonic();
    let before: Vec<Before> = watches.iter_mut().map(|w| w.before(begun)).collect();
    let (from, began) = (monotonic(), Instant::now());
    let mut counted = 0;
    while began.elapsed() < options.lasts {
        match turn {
            None => thread::sleep(Duration::from_millis(50)),
            Some(way) => {
                room.copy(way)?;
                counted += room.bytes() as u64;
            }
        }
        // Readings wait in a bounded queue.
        watches.iter_mut().for_each(Watch::take);
    }
    let (to, took) = (monotonic(), began.elapsed());
    let index = watches.first().map_or(0, |w| w.index);
    say(format!("GPU {index} {}: {} in {:.1} s", way(turn), bytes(counted), took.as_secs_f64()));
    let mut all = Vec::new();
    for (watch, before) in watches.iter_mut().zip(before) {
        let compared = watch.compare(&before, (from, to), turn, counted);
        say(compared_line(&compared, watch));
        all.push(compared);
    }
    Ok(all)
}

fn compared_line(c: &Compared, watch: &Watch) -> String {
    let mut line = format!("  {:11}", c.source.label());
    if c.measured.is_empty() {
        let why = watch.why_not().unwrap_or_else(|| "nothing came".to_owned());
        let _ = write!(line, "not measured: {why}");
        return line;
    }
    for (link, n) in &c.measured {
        let _ = write!(line, "{} {:>12}  ", link.label(), bytes(*n));
    }
    if let Some(share) = c.share() {
        let _ = write!(line, "{:.2} % of what was copied", share * 100.0);
        line.push_str(if c.agrees() { "" } else { ": DIFFERS" });
    }
    if c.source == Source::Throughput {
        line.push_str(" (from instants of 20 ms)");
    }
    if c.unusable > 0 {
        let _ = write!(line, " ({} readings could not be used)", c.unusable);
    }
    line
}

#[allow(clippy::cast_precision_loss, reason = "for people")]
fn bytes(n: u64) -> String {
    format!("{:.6} GB", n as f64 / 1e9)
}

/// Readers of one source, and what they told of one GPU.
struct Watch {
    readers: Readers,
    index: u32,
    source: Source,
    /// Since they began, by link: out and in.
    moved: BTreeMap<Link, [u64; 2]>,
    /// What instants told, with their time.
    instants: Vec<(Mono, Mono, [u64; 2])>,
    /// Where the last reading begins.
    read: Option<Mono>,
}

/// How a watch stood when a stretch began.
struct Before {
    moved: BTreeMap<Link, [u64; 2]>,
    unusable: u64,
}

impl Watch {
    /// Takes what was read by now.
    fn take(&mut self) {
        for reading in self.readers.readings().filter(|r| r.index == self.index) {
            let What::Moved(s) = reading.what else { continue };
            self.read = self.read.max(Some(s.from));
            if s.source == Source::Throughput {
                self.instants.push((s.from, s.to, [s.out, s.into]));
            }
            let [out, into] = self.moved.entry(s.link).or_default();
            *out = out.saturating_add(s.out);
            *into = into.saturating_add(s.into);
        }
    }

    /// Reads until a reading begins after `at`: whatever was before is in what was told by then. `false`: this GPU has no such source.
    fn until(&mut self, at: Mono) -> bool {
        let end = Instant::now() + FIRST;
        loop {
            self.take();
            if self.read.is_some_and(|read| read >= at) {
                return true;
            }
            if self.has_none() || Instant::now() >= end {
                return false;
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn standing(&self) -> Option<GpuStanding> {
        self.readers.standing().gpus.remove(&self.index)
    }

    /// Whether it is known by now that this GPU has no such source.
    fn has_none(&self) -> bool {
        let Some(gpu) = self.standing() else { return false };
        // Some answers need two readings.
        let asked = gpu.calls > 20 || self.why_not().is_some();
        asked && gpu.sources.values().all(Option::is_none)
    }

    /// Why this source says nothing.
    fn why_not(&self) -> Option<String> {
        let names = match self.source {
            Source::Gpm => ["gpm"].as_slice(),
            Source::Counters => &["pcie_counters"],
            Source::Throughput => &["pcie_throughput"],
        };
        let not_read = self.standing()?.not_read;
        names.iter().find_map(|name| not_read.get(name).cloned())
    }

    fn unusable(&self) -> u64 {
        self.standing().map_or(0, |g| g.ambiguous + g.nonsense + g.late + g.refused)
    }

    fn before(&mut self, at: Mono) -> Before {
        self.until(at);
        self.instants.clear();
        Before { moved: self.moved.clone(), unusable: self.unusable() }
    }

    fn compare(
        &mut self,
        before: &Before,
        (from, to): (Mono, Mono),
        turn: Option<Way>,
        counted: u64,
    ) -> Compared {
        let measured = if self.source == Source::Throughput {
            self.take();
            self.seen(from, to, turn)
        } else if self.until(to) {
            let before = |link: &Link| before.moved.get(link).copied().unwrap_or_default();
            let since = self.moved.iter().map(|(link, now)| {
                let was = before(link);
                (*link, of(turn, [now[0].saturating_sub(was[0]), now[1].saturating_sub(was[1])]))
            });
            since.collect()
        } else {
            BTreeMap::new()
        };
        let unusable = self.unusable().saturating_sub(before.unusable);
        Compared { index: self.index, source: self.source, way: turn, counted, measured, unusable }
    }

    /// What instants within a stretch make of all of it.
    fn seen(&self, from: Mono, to: Mono, turn: Option<Way>) -> BTreeMap<Link, u64> {
        let within = self.instants.iter().filter(|(a, b, _)| *a >= from && *b <= to);
        let told: Vec<u64> = within.map(|(_, _, moved)| of(turn, *moved)).collect();
        // Each is of 20 ms.
        let Some(mean) = told.iter().sum::<u64>().checked_div(told.len() as u64) else {
            return BTreeMap::new();
        };
        BTreeMap::from([(
            Link::Pcie,
            u64::try_from(u128::from(mean) * u128::from(to.since(from)) / 20_000_000).unwrap_or(u64::MAX),
        )])
    }
}

/// The bytes that went that way.
fn of(way: Option<Way>, [out, into]: [u64; 2]) -> u64 {
    match way {
        None => out.saturating_add(into),
        Some(Way::ToGpu) => into,
        Some(Way::FromGpu) => out,
    }
}
