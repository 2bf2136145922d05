//! From a driver's library to a verdict: readings that the real threads make of the stand-in go to rooms, and each thing that a GPU can
//! do changes record and verdict as it should.
//!
//! Rooms live on the readings' clock, which is the machine's: floor and ceiling are short, and every test goes on until it has seen what
//! it waits for.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, clippy::expect_used, reason = "tests")]

#[path = "support/nvml.rs"]
mod nvml;
mod rooms_support;

use std::time::{Duration, Instant};

use nvml::Driver;
use rooms_support::{MOONCAKE, Rank, START, Sees, World, decode, prefill};
use roomtrace::event::{Mono, SECOND};
use roomtrace::gpu::model::{Ailment, Reading, What};
use roomtrace::gpu::windows::{Source, Stretch};
use roomtrace::gpu::{Readers, Settings};
use roomtrace::kernel::monotonic;
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{EngineGauges, EngineProcess, GpuWindow, Input, Role};
use roomtrace::verdict::model::{Class, Confidence, Verdict};

const ROOM: u64 = 9_000_000_000_000_000_003;

/// A world whose prefill rank is this process, since the stand-in's processes must live, and who reads its GPUs.
struct Live {
    world: World,
    readers: Readers,
    /// Machine's clock at the start of the world.
    began: Mono,
    rank: Rank,
    asked: u64,
}

impl Live {
    fn new(settings: &Settings) -> Self {
        let config = Config { floor: SECOND, ceiling: 3 * SECOND, ..Config::default() };
        let rank = Rank { pid: std::process::id(), ..prefill(0) };
        let mut world = World::with(Sees::Prefill, MOONCAKE, config);
        // Readings go on by the machine's clock.
        world.outlives = false;
        let readers = Readers::start(settings).unwrap();
        readers.set_busy(u32::MAX);
        let process = EngineProcess {
            pid: rank.pid,
            server: rank.pid,
            role: Some(Role::Prefill),
            ..EngineProcess::default()
        };
        let at = world.mono();
        world.input(&Input::Process { at, process: &process });
        world.register(&decode(0), &rank);
        Self { world, readers, began: monotonic(), rank, asked: 0 }
    }

    fn of(driver: &Driver) -> Self {
        Self::new(&driver.settings())
    }

    /// A moment of the machine's clock in the world; nothing of before it.
    fn shifted(&self, at: Mono) -> Mono {
        Mono(START + at.since(self.began))
    }

    /// Takes what was read until `enough`, or fails after a time in which it must have come.
    fn until(&mut self, what: &str, mut enough: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + Duration::from_mins(1);
        while !enough(self) {
            assert!(
                Instant::now() < end,
                "{what}: {:#?} {:#?}",
                self.readers.standing(),
                self.world.table.gpus()
            );
            let readings: Vec<Reading> = self.readers.readings().collect();
            for reading in readings {
                let what = match reading.what {
                    What::Moved(s) => {
                        What::Moved(Stretch { from: self.shifted(s.from), to: self.shifted(s.to), ..s })
                    }
                    What::Computed(from, percent) => What::Computed(self.shifted(from), percent),
                    other => other,
                };
                let reading = Reading { at: self.shifted(reading.at), what, ..reading };
                self.world.input(&Input::Gpu(&reading));
            }
            let now = self.shifted(monotonic()).0 - START;
            self.world.to(now / 1_000_000);
            // Its engine says every second that nothing waits.
            if now / SECOND > self.asked {
                self.asked = now / SECOND;
                let gauges =
                    EngineGauges { server: self.rank.pid, waiting: Some(0), ..EngineGauges::default() };
                let at = self.world.mono();
                self.world.input(&Input::Gauges { at, gauges: &gauges });
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// A room begins once its rank is known to hold a GPU.
    fn begin(&mut self) {
        let pid = self.rank.pid;
        self.until("who holds it", |l| l.world.table.gpus().of(pid).count() == 1);
        let rank = self.rank.clone();
        self.world.metadata(ROOM, &decode(0), &rank);
    }

    /// Goes on until the room has been handed over for so long.
    fn lasts(&mut self, seconds: u64) {
        let end = self.world.mono().plus(seconds * SECOND);
        self.until("time", |l| l.world.mono() >= end);
    }

    fn window(&self) -> GpuWindow {
        let mut all = self.world.last(ROOM).gpus;
        assert_eq!(all.len(), 1, "{all:?}");
        all.remove(0)
    }

    fn verdict(&self) -> Verdict {
        self.world.verdict(ROOM)
    }

    fn confidence(&self) -> Option<Confidence> {
        let v = self.world.last(ROOM).verdict?;
        assert_eq!(v.class, Class::TransferNotConcluded, "{:?}", v.evidence);
        Some(v.confidence)
    }
}

fn script(rest: &str) -> String {
    format!("0.pids={}\n{rest}", std::process::id())
}

fn says(v: &Verdict, what: &str) -> bool {
    v.evidence.iter().any(|e| e.contains(what))
}

#[test]
fn a_stalled_transfer_is_zero_bytes_and_likely() {
    let driver = Driver::new(&script("0.gpm=1\n0.util=0\n"));
    let mut live = Live::of(&driver);
    live.begin();
    live.until("likely", |l| l.confidence() == Some(Confidence::Likely));
    let window = live.window();
    assert_eq!((window.links[0].out, window.links[0].into), (0, 0), "{window:?}");
    assert_eq!(
        (window.links[0].source, window.pid, window.overlapping),
        (Source::Gpm, live.rank.pid, Some(1))
    );
    assert!(says(&live.verdict(), "ran no kernel and moved nothing"), "{:?}", live.verdict());
}

#[test]
fn an_active_transfer_shows_its_bytes_and_is_no_more_than_possible() {
    let driver = Driver::new(&script("0.gpm=1\n0.util=60\n0.pcie_tx=4e9\n"));
    let mut live = Live::of(&driver);
    live.begin();
    live.lasts(6);
    assert_eq!(live.confidence(), Some(Confidence::Possible));
    let link = live.window().links[0];
    assert!(link.out > 4_000_000_000 && link.into < link.out / 1000, "{link:?}");
    assert!(!says(&live.verdict(), "ran no kernel"));
    // It stalls, and stays so.
    driver.script(&script("0.gpm=1\n0.util=0\n"));
    live.until("likely", |l| l.confidence() == Some(Confidence::Likely));
    // And moves again.
    driver.script(&script("0.gpm=1\n0.util=0\n0.pcie_tx=4e9\n"));
    live.until("possible", |l| l.confidence() == Some(Confidence::Possible));
}

#[test]
fn an_xid_in_the_window_is_in_record_and_evidence_by_its_gpu() {
    let driver = Driver::new(&script("0.gpm=1\n0.util=50\n"));
    let mut live = Live::of(&driver);
    live.begin();
    driver.script(&script("0.gpm=1\n0.util=50\nxids=0:79\n"));
    live.until("the error", |l| l.window().troubles.iter().any(|t| t.what == Ailment::Xid(79)));
    live.until("a pin", |l| l.confidence().is_some());
    let gpu = live.window().gpu;
    let line = format!("Xid 79 (GPU has fallen off the bus) on {gpu} of prefill process {}", live.rank.pid);
    assert!(says(&live.verdict(), &line), "{:?}", live.verdict().evidence);
    assert_eq!(live.confidence(), Some(Confidence::Possible));
}

#[test]
fn a_counter_that_goes_round_in_the_window_counts_on() {
    let counts = "0.generation=1\n0.bits=32\n0.start_tx=4227858432\n0.pcie_tx=2e8\n0.util=0\n";
    let driver = Driver::new(&script(counts));
    let mut live = Live::of(&driver);
    live.begin();
    live.lasts(4);
    let link = live.window().links[0];
    assert_eq!((link.source, link.into), (Source::Counters, 0));
    assert!(link.out > 1 << 27 && link.out < 1 << 31, "{link:?}");
    assert_eq!(live.confidence(), Some(Confidence::Possible));
}

#[test]
fn a_call_that_hangs_ends_what_is_measured_and_raises_nothing() {
    let driver = Driver::new(&script("0.gpm=1\n0.util=30\n"));
    let mut live = Live::of(&driver);
    live.begin();
    live.until("a second", |l| l.window().links.first().is_some_and(|w| w.to.since(w.from) > SECOND));
    driver.script(&script("0.gpm=1\n0.util=0\n0.delay.nvmlGpmSampleGet=3600000\n"));
    live.until("it hangs", |l| !l.readers.standing().hanging(monotonic(), SECOND).is_empty());
    live.lasts(5);
    assert_eq!(live.confidence(), Some(Confidence::Possible));
    let link = live.window().links[0];
    assert!(link.coverage < 950 && says(&live.verdict(), "% of it read"), "{link:?} {:?}", live.verdict());
    assert!(!says(&live.verdict(), "ran no kernel"));
}

#[test]
fn a_split_gpu_shows_bytes_and_raises_nothing() {
    let driver = Driver::new(&script("0.mig=1\n0.gpm=1\n"));
    let mut live = Live::of(&driver);
    live.begin();
    live.lasts(7);
    assert_eq!(live.confidence(), Some(Confidence::Possible));
    let window = live.window();
    assert_eq!((window.links[0].out, window.links[0].source), (0, Source::Counters), "{window:?}");
    assert_eq!(window.computing, None);
}

#[test]
fn a_link_that_nothing_tells_of_raises_nothing() {
    let driver = Driver::new(&script("0.gpm=1\n0.c2c=1\n"));
    let mut live = Live::of(&driver);
    live.begin();
    live.lasts(7);
    assert_eq!(live.confidence(), Some(Confidence::Possible));
    let standing = live.readers.standing();
    let not_read = &standing.gpus.values().next().unwrap().not_read;
    assert!(not_read.contains_key("c2c") && !not_read.contains_key("nvlink"), "{not_read:?}");
}

#[test]
fn no_driver_at_all_says_nothing() {
    let nowhere = Settings { lib_path: Some("/nowhere/libnvidia-ml.so.1".into()), ..Settings::default() };
    let mut live = Live::new(&nowhere);
    let rank = live.rank.clone();
    live.world.metadata(ROOM, &decode(0), &rank);
    live.lasts(5);
    assert_eq!(live.confidence(), Some(Confidence::Possible));
    assert!(live.world.last(ROOM).gpus.is_empty() && !says(&live.verdict(), "GPU"));
}
