//! GPUs read through the real loader from a library that stands in for the driver's and answers as a script says: each test has a copy
//! of its own, loaded under a path of its own, so that they share no state.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::format_collect,
    clippy::panic,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::float_arithmetic,
    clippy::needless_pass_by_value,
    reason = "tests"
)]

#[path = "support/nvml.rs"]
mod nvml;

use std::path::Path;
use std::time::{Duration, Instant};

use nvml::Driver;
use roomtrace::event::{Mono, SECOND};
use roomtrace::gpu::model::{Gpu, Gpus, MAX_GPUS};
use roomtrace::gpu::windows::{Link, Source, Window};
use roomtrace::gpu::{Library, Readers, Settings, Standing, look_once};
use roomtrace::kernel::monotonic;

/// Begins to read.
fn start(driver: &Driver) -> Watch {
    Watch { readers: Readers::start(&driver.settings()).unwrap(), gpus: Gpus::default() }
}

/// What was read so far.
struct Watch {
    readers: Readers,
    gpus: Gpus,
}

impl Watch {
    /// Reads on until `enough`, or fails after a time in which it must have come.
    fn until(&mut self, what: &str, enough: impl Fn(&Gpus, &Standing) -> bool) {
        let end = Instant::now() + Duration::from_mins(1);
        loop {
            for reading in self.readers.readings() {
                self.gpus.take(&reading);
            }
            let standing = self.readers.standing();
            if enough(&self.gpus, &standing) {
                return;
            }
            assert!(Instant::now() < end, "{what}: {standing:#?} {:#?}", self.gpus);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A second and a half of a GPU's `PCIe` that were read without a gap. A call that a busy machine holds up tells nothing:
    /// then it is tried again.
    fn whole(&mut self, index: u32) -> Window {
        let end = Instant::now() + Duration::from_mins(1);
        loop {
            let begun = monotonic();
            self.until("two seconds", |gpus, _| read(gpus, index, begun, 2));
            let (from, to) = (begun.plus(SECOND / 2), begun.plus(2 * SECOND));
            match self.gpu(index).history.window(Link::Pcie, from, to) {
                Some(window) if window.coverage == 1000 => return window,
                window => assert!(Instant::now() < end, "not read without a gap: {window:?}"),
            }
        }
    }

    fn gpu(&self, index: u32) -> &Gpu {
        self.gpus.iter().find(|(i, _)| *i == index).unwrap().1
    }
}

fn gpu(gpus: &Gpus, index: u32) -> Option<&Gpu> {
    gpus.iter().find(|(i, _)| *i == index).map(|(_, gpu)| gpu)
}

/// Whether at least `seconds` were read of a GPU's `PCIe` since `from`.
fn read(gpus: &Gpus, index: u32, from: Mono, seconds: u64) -> bool {
    let window = gpu(gpus, index).and_then(|g| g.history.window(Link::Pcie, from, Mono(u64::MAX)));
    window.is_some_and(|w| w.to.since(from) >= seconds * SECOND)
}

#[test]
fn a_transfer_shows_and_a_stalled_one_is_zero_not_absent() {
    let driver = Driver::new("gpus=2\n0.gpm=1\n0.pcie_tx=4e9\n0.pcie_rx=1e6\n1.gpm=1\n");
    let mut watch = start(&driver);
    let active = watch.whole(0);
    assert_eq!((active.source, active.coverage), (Source::Gpm, 1000));
    // The bounds are those of the readings, and so is the number.
    let seconds = active.to.since(active.from) as f64 / 1e9;
    let rate = active.out as f64 / seconds;
    assert!((3e9..5e9).contains(&rate) && active.into < active.out / 1000, "{active:?}");
    let stalled = watch.whole(1);
    assert_eq!((stalled.out, stalled.into, stalled.coverage), (0, 0, 1000));
    // It stalls while it is looked at.
    driver.script("gpus=2\n0.gpm=1\n1.gpm=1\n");
    // The reading under way may have begun before.
    let changed = monotonic();
    watch.until("read since", |gpus, _| read(gpus, 0, changed, 1));
    let stopped = monotonic();
    watch.until("it stalls", |gpus, _| read(gpus, 0, stopped, 1));
    let after = watch.gpu(0).history.window(Link::Pcie, stopped, stopped.plus(SECOND)).unwrap();
    assert_eq!((after.out, after.into), (0, 0));
}

#[test]
fn a_gpu_without_gpm_is_read_by_its_counters_also_around_their_end() {
    // 32 bits, 64 MiB before their end, on a link that needs most of a second to go round.
    let driver = Driver::new(
        "0.generation=1\n0.bits=32\n0.start_tx=4227858432\n0.pcie_tx=2e8\n0.pcie_rx=0\n0.nvlink_tx=1e9\n",
    );
    let mut watch = start(&driver);
    watch.readers.set_busy(u32::MAX);
    let begun = monotonic();
    let window = watch.whole(0);
    let rate = window.out as f64 / (window.to.since(window.from) as f64 / 1e9);
    assert_eq!((window.source, window.into), (Source::Counters, 0));
    assert!((1e8..3e8).contains(&rate), "{window:?}");
    let nvlink = watch.gpu(0).history.window(Link::NvLink, window.from, window.to).unwrap();
    assert!(nvlink.source == Source::Counters && nvlink.out > 0 && nvlink.into == 0, "{nvlink:?}");
    assert_eq!(watch.gpu(0).history.window(Link::C2c, begun, monotonic()), None);
    let total = watch.gpu(0).moved[&Link::Pcie].0;
    assert!(total > 1 << 27, "beyond the counter's end: {total}");
}

#[test]
fn a_narrow_counter_that_is_read_too_seldom_is_not_measured() {
    let driver = Driver::new("0.bits=32\n0.pcie_tx=1e9\n");
    // So rare that no two readings come too close when one of them is held up.
    let settings = Settings { idle: Duration::from_millis(500), ..driver.settings() };
    let mut watch = Watch { readers: Readers::start(&settings).unwrap(), gpus: Gpus::default() };
    watch.until("ambiguous", |_, s| s.gpus.values().any(|g| g.ambiguous >= 3));
    assert_eq!(watch.gpu(0).windows(Mono(0), Mono(u64::MAX)).count(), 0);
}

#[test]
fn what_the_driver_serves_twice_is_not_zero() {
    let driver = Driver::new("0.frozen=1\n0.pcie_tx=1e9\n");
    let mut watch = start(&driver);
    watch.until("many calls", |_, s| s.gpus.values().any(|g| g.calls > 20));
    assert_eq!(watch.gpu(0).windows(Mono(0), Mono(u64::MAX)).count(), 0);
}

#[test]
fn the_last_resort_is_an_instant_and_says_so() {
    let driver = Driver::new("0.fields=0\n0.pcie_tx=1e9\n");
    let mut watch = start(&driver);
    let begun = monotonic();
    watch.until("three instants", |gpus, _| read(gpus, 0, begun, 2));
    let window = watch.gpu(0).history.window(Link::Pcie, begun, begun.plus(2 * SECOND)).unwrap();
    assert!(window.source == Source::Throughput && window.coverage < 200 && window.out > 0, "{window:?}");
    assert!(watch.gpu(0).moved.is_empty(), "an instant adds nothing to the total");
}

#[test]
fn errors_and_health_are_told_with_their_gpu() {
    let driver = Driver::new("gpus=2\nxids=1:79 1:31\n1.recovery=1\n1.clocks=72\n");
    let mut watch = start(&driver);
    watch.until("errors", |gpus, _| gpu(gpus, 1).is_some_and(|g| g.xids.len() == 2));
    watch.until("health", |gpus, _| gpu(gpus, 1).is_some_and(|g| g.recovery.is_some() && g.clocks.is_some()));
    let hit = watch.gpu(1);
    assert_eq!(hit.xids.iter().map(|(_, n)| *n).collect::<Vec<_>>(), [79, 31]);
    assert_eq!((hit.recovery.unwrap().1, hit.clocks.unwrap().1), (1, 72));
    assert!(watch.gpu(0).xids.is_empty());
}

#[test]
fn a_lost_gpu_is_told_and_the_other_goes_on() {
    let driver = Driver::new("gpus=2\n0.gpm=1\n1.gpm=1\n0.util=3\n");
    let mut watch = start(&driver);
    watch.until("both", |gpus, _| gpus.iter().count() == 2);
    let lost = ["nvmlGpmSampleGet", "nvmlDeviceGetFieldValues", "nvmlDeviceGetUtilizationRates"];
    let rules: String = lost.iter().map(|f| format!("0.fail.{f}=15\n")).collect();
    driver.script(&format!(
        "gpus=2\n0.gpm=1\n1.gpm=1\n{rules}0.fail.nvmlDeviceGetCurrentClocksEventReasons=15\n\
                            0.fail.nvmlDeviceGetComputeRunningProcesses_v3=15\n"
    ));
    watch.until("lost", |gpus, s| {
        gpu(gpus, 0).is_some_and(|g| g.lost.is_some()) && s.gpus.values().any(|g| g.lost)
    });
    let then = monotonic();
    watch.until("the other", |gpus, _| read(gpus, 1, then, 1));
    assert_eq!(watch.gpu(0).history.window(Link::Pcie, then.plus(SECOND / 2), monotonic()), None);
}

#[test]
fn a_call_that_hangs_is_not_measured_and_holds_up_nobody() {
    let driver = Driver::new("gpus=2\n0.gpm=1\n1.gpm=1\n");
    let mut watch = start(&driver);
    watch.until("both", |gpus, _| [0, 1].iter().all(|g| gpu(gpus, *g).is_some_and(|g| !g.moved.is_empty())));
    driver.script("gpus=2\n0.gpm=1\n1.gpm=1\n0.delay.nvmlGpmSampleGet=3600000\n");
    watch.until("it hangs", |_, s| {
        s.hanging(monotonic(), SECOND)
            .iter()
            .any(|(gpu, call, _)| *gpu == Some(0) && *call == "nvmlGpmSampleGet")
    });
    let then = monotonic();
    watch.until("the other", |gpus, _| read(gpus, 1, then, 1));
    assert_eq!(watch.gpu(0).history.window(Link::Pcie, then, monotonic()), None);
    // Nobody waits for it, also at the end.
    let began = Instant::now();
    drop(watch);
    assert!(began.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_wait_for_errors_that_does_not_come_back_is_told_and_one_that_does_is_not() {
    let driver = Driver::new("0.gpm=1\n");
    let mut watch = start(&driver);
    let begun = monotonic();
    watch.until("three waits", |_, s| {
        assert_eq!(s.hanging(monotonic(), SECOND), []);
        monotonic().since(begun) > 4 * SECOND
    });
    driver.script("0.gpm=1\ndelay.nvmlEventSetWait_v2=3600000\n");
    watch.until("it hangs", |_, s| {
        matches!(s.hanging(monotonic(), SECOND)[..], [(None, "nvmlEventSetWait", _)])
    });
    let then = monotonic();
    watch.until("readings", |gpus, _| read(gpus, 0, then, 1));
}

#[test]
fn a_gpu_that_the_driver_does_not_come_back_with_leaves_the_others_read() {
    let hangs = "gpus=3\n0.gpm=1\n2.gpm=1\n1.delay.nvmlDeviceGetHandleByIndex_v2=3600000\n";
    let driver = Driver::new(hangs);
    let mut watch = start(&driver);
    let is = |s: &Standing| {
        let hanging = s.hanging(monotonic(), SECOND);
        matches!(s.nvml, Library::Loaded(_))
            && matches!(hanging[..], [(Some(1), "nvmlDeviceGetHandleByIndex", _)])
    };
    watch.until("the others", |gpus, s| is(s) && read(gpus, 0, Mono(0), 1) && read(gpus, 2, Mono(0), 1));
    assert!(gpu(&watch.gpus, 1).is_none());
    // Their errors are told too, and doctor sees them.
    driver.script(&format!("{hangs}xids=2:79\n"));
    watch.until("the error", |gpus, _| gpu(gpus, 2).is_some_and(|g| g.xid_counts.contains_key(&79)));
    let standing = look_once(&Driver::new(hangs).settings(), Duration::from_secs(5));
    let read: Vec<u32> = standing.gpus.values().filter(|g| g.calls > 0).map(|g| g.index).collect();
    assert_eq!((read, standing.in_call, standing.gpus.len()), (vec![0, 2], None, 3));
}

#[test]
fn a_call_that_comes_back_late_has_told_nothing() {
    let driver = Driver::new("0.gpm=1\n0.pcie_tx=1e9\n0.delay.nvmlGpmSampleGet=700\n");
    let mut watch = start(&driver);
    watch.until("late", |_, s| s.gpus.values().any(|g| g.late >= 3));
    assert_eq!(watch.gpu(0).windows(Mono(0), Mono(u64::MAX)).count(), 0);
    let why = |s: &Standing| s.gpus[&0].not_read.get("gpm").cloned().unwrap_or_default();
    assert!(why(&watch.readers.standing()).contains("too late to be used"));
    // Its counters answer at once.
    watch.until("counters", |gpus, s| {
        s.gpus[&0].sources.get(&Link::Pcie) == Some(&Some(Source::Counters)) && read(gpus, 0, Mono(0), 1)
    });
    let window = watch.whole(0);
    assert_eq!((window.source, window.out > 1_000_000_000), (Source::Counters, true), "{window:?}");
    assert!(why(&watch.readers.standing()).contains("5 times in a row"));
    let standing = look_once(&driver.settings(), Duration::from_mins(1));
    assert!(why(&standing).contains("2 times in a row"), "{standing:?}");
}

#[test]
fn a_split_gpu_is_read_as_a_whole_and_says_so() {
    let driver = Driver::new("0.mig=1\n0.gpm=1\n0.pcie_tx=1e8\n");
    let mut watch = start(&driver);
    let begun = monotonic();
    watch.until("a second", |gpus, _| read(gpus, 0, begun, 1));
    let window = watch.gpu(0).history.window(Link::Pcie, begun, monotonic()).unwrap();
    // Its instances have no PCIe rate of their own.
    assert!(window.source == Source::Counters && window.out > 0, "{window:?}");
    assert_eq!(watch.gpu(0).computing(begun, monotonic()), None);
    let standing = watch.readers.standing();
    let of = standing.gpus.values().next().unwrap();
    assert_eq!((of.mig, of.sources.get(&Link::Pcie)), (Some(true), Some(&Some(Source::Counters))));
    assert!(of.not_read.get("utilization").is_some_and(|why| why.contains("not supported")), "{of:?}");
}

#[test]
fn a_guest_that_is_told_nothing_says_why() {
    let driver = Driver::new("0.virtualization=2\n0.fail.nvmlGpmQueryDeviceSupport=3\n0.pcie_tx=1e9\n");
    let standing = look_once(&driver.settings(), Duration::from_mins(1));
    let of = standing.gpus.values().next().unwrap();
    assert_eq!(of.virtualization, Some("vGPU guest"));
    assert_eq!(of.sources.get(&Link::Pcie), Some(&None), "{of:#?}");
    for reading in ["gpm", "pcie_counters", "pcie_throughput"] {
        assert!(of.not_read.contains_key(reading), "{reading}: {of:?}");
    }
}

#[test]
fn processes_are_found_also_where_the_driver_gets_their_layout_wrong() {
    let own = std::process::id();
    for stride in [24, 32] {
        let driver = Driver::new(&format!("0.stride={stride}\n0.pids={own},1\n"));
        let mut watch = start(&driver);
        watch.until("processes", |gpus, _| gpus.of(own).count() == 1 && gpus.of(1).count() == 1);
    }
    let driver = Driver::new(&format!("0.pids={own},4194305,0\n"));
    let mut watch = start(&driver);
    watch.until("those that live", |gpus, _| gpus.of(own).count() == 1);
    assert_eq!(watch.gpu(0).processes.len(), 1);
}

#[test]
fn no_driver_is_said_and_no_error() {
    let nowhere = Settings { lib_path: Some("/nowhere/libnvidia-ml.so.1".into()), ..Settings::default() };
    let standing = look_once(&nowhere, Duration::from_mins(1));
    assert!(matches!(&standing.nvml, Library::Absent(why) if why.contains("/nowhere/")), "{standing:?}");
    let readers = Readers::start(&nowhere).unwrap();
    let end = Instant::now() + Duration::from_mins(1);
    while readers.standing().nvml == Library::Looking && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(readers.standing().nvml, standing.nvml);
    assert_eq!(readers.readings().count(), 0);
    // Something that is a library and not the driver's, and something that is none.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("x.so");
    std::fs::write(&file, "no library").unwrap();
    let loaded = |library: &Path| {
        look_once(&Settings { lib_path: Some(library.into()), ..Settings::default() }, Duration::from_mins(1))
            .nvml
    };
    assert!(matches!(loaded(&file), Library::Absent(_)));
    let foreign = Driver::without(&["nvmlInit_v2", "nvmlInitWithFlags"], "");
    assert!(matches!(loaded(&foreign.lib()), Library::Absent(why) if why.contains("not the driver's")));
    // One that will not start.
    assert!(
        matches!(loaded(&Driver::new("fail.nvmlInit_v2=9").lib()), Library::Absent(why) if why.contains("not loaded"))
    );
}

#[test]
fn an_old_driver_without_half_of_it_is_read_as_far_as_it_goes() {
    let driver = Driver::without(
        &[
            "nvmlGpmQueryDeviceSupport",
            "nvmlGpmSampleAlloc",
            "nvmlGpmSampleGet",
            "nvmlGpmMetricsGet",
            "nvmlGpmSampleFree",
            "nvmlShutdown",
            "nvmlEventSetCreate",
            "nvmlEventSetFree",
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetMigMode",
            "nvmlDeviceGetName",
            "nvmlSystemGetDriverVersion",
        ],
        "0.pcie_tx=1e8\n",
    );
    let mut watch = start(&driver);
    let begun = monotonic();
    watch.until("a second", |gpus, _| read(gpus, 0, begun, 1));
    watch.until("no events", |_, s| s.events_error.is_some());
    let standing = watch.readers.standing();
    assert_eq!(standing.nvml, Library::Loaded(None));
    let of = standing.gpus.values().next().unwrap();
    assert_eq!(of.not_read.get("gpm").map(String::as_str), Some("not in this driver's library"));
    assert_eq!((of.mig, of.sources.get(&Link::Pcie)), (None, Some(&Some(Source::Counters))));
}

#[test]
fn nonsense_is_counted_and_never_measured() {
    let driver = Driver::new("gpus=2\n0.nonsense=1\n0.gpm=1\n1.nonsense=1\nxids=7:1\n");
    let mut watch = start(&driver);
    watch.until("nonsense", |_, s| s.gpus.len() == 2 && s.gpus.values().all(|g| g.nonsense + g.refused > 10));
    for index in [0, 1] {
        let gpu = watch.gpu(index);
        assert_eq!(&*gpu.name, format!("index-{index}").as_str());
        assert_eq!(gpu.windows(Mono(0), Mono(u64::MAX)).count(), 0);
        assert!(gpu.computing(Mono(0), Mono(u64::MAX)).is_none() && gpu.processes.is_empty());
    }
    watch.until("an event of no GPU", |_, s| s.events_unknown == 1);
    // Far more GPUs than there are.
    let standing = look_once(&Driver::new("gpus=100\n").settings(), Duration::from_mins(1));
    assert_eq!((standing.gpus.len(), standing.left_out), (MAX_GPUS, 68));
}

#[test]
fn doctor_comes_back_though_the_driver_does_not() {
    let driver = Driver::new("delay.nvmlInit_v2=3600000\n");
    let standing = look_once(&driver.settings(), Duration::from_secs(3));
    assert_eq!(
        (standing.nvml, standing.in_call.map(|c| c.0)),
        (Library::Looking, Some("dlopen and nvmlInit"))
    );
}
