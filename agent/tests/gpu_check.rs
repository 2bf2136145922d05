//! `cargo xtask gpu-check` from end to end, with a library that stands in for NVML and CUDA: what its copies move is what its counters
//! show, so measured must be copied; where it hides a part, that must be found.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    clippy::float_arithmetic,
    reason = "tests"
)]

#[path = "../examples/gpu_check/check.rs"]
mod check;
#[path = "../examples/gpu_check/cuda.rs"]
mod cuda;
#[path = "support/nvml.rs"]
mod nvml;

use std::time::Duration;

use check::{Compared, End, Options, run};
use cuda::Way;
use nvml::Driver;
use roomtrace::gpu::windows::{Link, Source};

fn options(driver: &Driver) -> Options {
    Options {
        nvml: Some(driver.lib()),
        cuda: Some(driver.lib()),
        rounds: 5,
        lasts: Duration::from_secs(3),
        copy: 4 << 20,
    }
}

/// How a check ends, what it compared and what it printed.
fn checked(options: &Options) -> (End, Vec<Compared>, String) {
    let mut said = String::new();
    let (end, all) = run(options, &mut |line| {
        println!("{line}");
        said.push_str(&line);
        said.push('\n');
    });
    (end, all, said)
}

fn of(all: &[Compared], index: u32, source: Source, way: Way) -> &Compared {
    all.iter().find(|c| c.index == index && c.source == source && c.way == Some(way)).unwrap()
}

#[test]
fn what_was_copied_is_what_was_measured() {
    let driver = Driver::new("gpus=2\n0.gpm=1\n0.pids=1\n1.bits=64\ncopy_rate=4e9\n");
    let (end, all, said) = checked(&options(&driver));
    // Whatever its instants saw, where something counts it decides.
    let by_rate = matches!(&end, End::Differs(what) if what.iter().any(|w| w.contains("throughput")));
    assert!(!by_rate, "{end}");
    for index in [0, 1] {
        for way in [Way::ToGpu, Way::FromGpu] {
            // The same bytes, however long it took; GPM's rates and instants depend on when they are taken.
            let counters = of(&all, index, Source::Counters, way);
            assert!(counters.counted > 0, "{counters:?}");
            assert!(
                counters.measured[&Link::Pcie] == counters.counted || counters.unusable > 0,
                "{counters:?}"
            );
            let gpm = of(&all, index, Source::Gpm, way);
            assert_eq!(gpm.measured.is_empty(), index == 1, "only the first has it: {gpm:?}");
            assert!(index == 1 || gpm.measured[&Link::Pcie] > 0, "{gpm:?}");
        }
        let quiet = all.iter().filter(|c| c.index == index && c.way.is_none());
        assert!(
            quiet.clone().count() == 3 && quiet.flat_map(|c| c.measured.values()).all(|n| *n == 0),
            "{all:?}"
        );
    }
    // Every reading of the agent is there, with what it costs.
    for reading in [
        "gpm",
        "pcie_counters",
        "pcie_throughput",
        "utilization",
        "recovery_action",
        "clock_reasons",
        "processes",
        "events",
    ] {
        let told = |line: &&str| line.split_whitespace().next() == Some(reading) && line.contains(" µs ");
        assert_eq!(said.lines().filter(told).count(), 2, "{reading}: {said}");
    }
    assert!(said.contains("[1]") && said.contains("driver 580.95.05"), "{said}");
}

#[test]
fn what_a_counter_does_not_show_is_found() {
    let driver = Driver::new("0.gpm=1\n0.seen=0.25\ncopy_rate=4e9\n");
    let (end, all, said) = checked(&options(&driver));
    let counters = of(&all, 0, Source::Counters, Way::ToGpu);
    assert!(counters.measured[&Link::Pcie] * 4 == counters.counted || counters.unusable > 0, "{counters:?}");
    let End::Differs(what) = &end else { panic!("{end}") };
    assert!(what.iter().any(|w| w == "GPU 0 by counters to the GPU"), "{what:?}");
    assert!(end.code() == 1 && said.contains("DIFFERS"), "{said}");
}

#[test]
fn what_is_missing_is_said_each_with_its_own_words() {
    let nowhere = Options {
        nvml: Some("/nowhere/libnvidia-ml.so.1".into()),
        cuda: Some("/nowhere/libcuda.so.1".into()),
        rounds: 2,
        ..Options::default()
    };
    let said = |options: &Options| {
        let (end, all, said) = checked(options);
        assert_eq!((end.code(), all.len()), (3, 0), "{end}");
        (end.to_string(), said)
    };
    assert!(said(&nowhere).0.starts_with("no GPU driver here, nothing was checked: /nowhere/"));
    assert!(said(&options(&Driver::new("gpus=0\n"))).0.contains("has no GPU"));
    // The readings are made all the same.
    let driver = Driver::new("0.gpm=1\n");
    let (why, text) = said(&Options { nvml: Some(driver.lib()), ..nowhere });
    assert!(why.contains("nothing was copied") && why.contains("/nowhere/libcuda.so.1"), "{why}");
    assert!(text.contains("utilization"), "{text}");
    let refused = Driver::new("fail.cuInit=100\n");
    assert!(said(&options(&refused)).0.contains("cuInit answered CUDA_ERROR_NO_DEVICE"));
    let foreign = Driver::without(&["cuMemAlloc_v2"], "");
    assert!(said(&options(&foreign)).0.contains("the library has no cuMemAlloc_v2"));
}
