//! Holds what the agent reads of real GPUs against copies of known size, and prints what each call costs.
//!
//! Needs NVIDIA's driver (NVML and CUDA, both of which it brings) and no toolkit. `cargo xtask gpu-check` builds and runs it; the built
//! program can be copied to a machine that has GPUs and no Rust.
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::indexing_slicing,
    clippy::float_arithmetic,
    reason = "a measuring tool"
)]

mod check;
mod cuda;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use check::{End, Options, run};

#[derive(Parser)]
#[command(name = "gpu_check", about = "Hold what the agent reads of real GPUs against copies of known size")]
struct Args {
    /// NVML (default: libnvidia-ml.so.1, where the loader finds it).
    #[arg(long, value_name = "FILE")]
    nvml: Option<PathBuf>,
    /// The CUDA driver's library (default: libcuda.so.1).
    #[arg(long, value_name = "FILE")]
    cuda: Option<PathBuf>,
    /// Seconds of copies each way.
    #[arg(long, default_value_t = 4)]
    seconds: u64,
}

fn main() -> ExitCode {
    let Args { nvml, cuda, seconds } = Args::parse();
    let options = Options { nvml, cuda, lasts: Duration::from_secs(seconds.max(1)), ..Options::default() };
    let (end, _) = run(&options, &mut |line| println!("{line}"));
    if end == End::Agrees {
        println!("gpu-check: {end}");
    } else {
        eprintln!("gpu-check: {end}");
    }
    ExitCode::from(end.code())
}
