//! What reading GPUs costs: 8 of the stand-in driver, 10 times a second, and what the rooms do with the readings.
//!
//! `cargo bench -p roomtrace --bench gpus`. Measures for ten seconds a way and prints the share of a core that the reading threads used
//! (the bar is 1 %; what the stand-in itself needs is in it), then the time in which a room table takes a reading.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    clippy::float_arithmetic,
    clippy::format_collect,
    reason = "a bench"
)]

use std::time::{Duration, Instant};

use roomtrace::event::{Mono, SECOND};
use roomtrace::gpu::model::{Reading, What};
use roomtrace::gpu::windows::{Link, Source, Stretch};
use roomtrace::gpu::{Readers, Settings};
use roomtrace::rooms::model::Input;
use roomtrace::rooms::{Config, RoomTable};

#[path = "../tests/support/nvml.rs"]
mod nvml;
use nvml::Driver;

const GPUS: u32 = 8;

/// How long each way is measured.
const LASTS: Duration = Duration::from_secs(10);

/// Readings in the second part.
const READINGS: u64 = 1_000_000;

fn main() {
    // As a test it has nothing to say.
    if !std::env::args().any(|a| a == "--bench") {
        return;
    }
    for (name, kind, busy) in [("gpm", "gpm=1", 110), ("counters", "bits=64", 100)] {
        reading(name, kind, Duration::from_millis(busy));
    }
    taking();
}

/// Nanoseconds on the processor of the threads that read.
fn used() -> u64 {
    let threads = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
    let reads = |t: &std::fs::DirEntry| {
        std::fs::read_to_string(t.path().join("comm")).is_ok_and(|c| c.starts_with("roomtrace-gpu"))
    };
    // The first of its numbers (kernel: Documentation/scheduler/sched-stats.rst).
    let nanos = |t: std::fs::DirEntry| {
        std::fs::read_to_string(t.path().join("schedstat")).ok()?.split(' ').next()?.parse::<u64>().ok()
    };
    threads.filter(reads).filter_map(nanos).sum()
}

fn reading(name: &str, kind: &str, busy: Duration) {
    let rules: String =
        (0..GPUS).map(|g| format!("{g}.{kind}\n{g}.pcie_tx=1e9\n{g}.nvlink_tx=1e9\n")).collect();
    let driver = Driver::new(&format!("gpus={GPUS}\n{rules}"));
    let readers = Readers::start(&Settings { busy, ..driver.settings() }).unwrap();
    readers.set_busy(u32::MAX);
    let calls = || readers.standing().gpus.values().map(|g| g.calls).sum::<u64>();
    // Until it is known what each of them has.
    std::thread::sleep(Duration::from_secs(2));
    let (used_before, calls_before, began) = (used(), calls(), Instant::now());
    let mut taken = 0;
    while began.elapsed() < LASTS {
        taken += readers.readings().count();
        std::thread::sleep(Duration::from_millis(50));
    }
    let (used, asked, took) = (used() - used_before, calls() - calls_before, began.elapsed().as_secs_f64());
    println!(
        "reading {GPUS} GPUs by {name:8} {:.2} % of a core (bar: at most 1), {:.0} calls/s of {:.1} µs, {:.0} readings/s",
        used as f64 / 1e7 / took,
        asked as f64 / took,
        used as f64 / 1e3 / asked as f64,
        taken as f64 / took
    );
}

/// What a table does with them.
fn taking() {
    let mut table = RoomTable::new(Config::default());
    let mut out = Vec::new();
    let began = Instant::now();
    for n in 0..READINGS {
        let (index, round) = (u32::try_from(n).unwrap() % GPUS, n / u64::from(GPUS));
        let (from, to) = (Mono(round * SECOND / 10), Mono((round + 1) * SECOND / 10));
        let s = Stretch { link: Link::Pcie, source: Source::Gpm, from, to, out: n, into: 0 };
        table.handle(&Input::Gpu(&Reading { at: to, index, what: What::Moved(s) }), &mut out);
    }
    println!("a reading taken by the rooms: {:.0} ns", began.elapsed().as_nanos() as f64 / READINGS as f64);
}
