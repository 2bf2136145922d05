//! `cargo xtask …`: every command a developer or CI runs, each in its own module.
//!
//! Nothing here is part of the agent. Commands install what they need and say what they installed.

mod agent;
mod bench;
mod chart;
mod dashboards;
mod demo;
mod dist;
mod ebpf;
mod engine;
mod fleet;
mod gpu_check;
mod install;
mod k8s;
mod lint;
mod live;
mod own;
mod page;
mod prometheus;
mod requests;
mod services;
mod test;
mod workload;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Build, demo, test and bench commands of the project")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Rebuild the kernel programs' object (installs the toolchain it needs).
    BuildEbpf(ebpf::Args),
    /// Live capture of a real `ZeroMQ` workload with pinned rooms, found and explained.
    Demo(demo::Args),
    /// Every test, installing what is missing.
    Test(test::Args),
    /// Two hosts, Collectors, Jaeger and Prometheus: what arrives there, also when parts of it fail.
    Fleet(fleet::Args),
    /// Only the live checks of the test command.
    Live(live::Args),
    /// The agent's pages in a real browser (Chromium); part of the test command.
    Page(page::Args),
    /// Run the real SGLang control plane and score the agent against its truth (10 GB to install).
    Engine(engine::Args),
    /// rustfmt, clippy, rustdoc and cargo-deny, warnings as errors.
    Lint,
    /// Write the Grafana dashboards from their tables.
    Dashboards,
    /// Build the real services that tests run against (Collector, Jaeger), from their Go modules.
    Services(services::Args),
    /// Write what the Helm chart has from elsewhere, and the plain manifests.
    Chart,
    /// Make what is handed out: archives, Debian package, image, SBOM, checksums.
    Dist(dist::Args),
    /// Only the Kubernetes step of the test command: chart, image and package on a real node.
    K8s(k8s::Args),
    /// Print what the agent costs.
    Bench(bench::Args),
    /// On a machine with GPUs: hold what the agent reads of them against copies of known size.
    GpuCheck(gpu_check::Args),
}

fn main() -> ExitCode {
    match run(Args::parse().command) {
        Ok(code) => code,
        Err(error) => {
            // One message, whatever RUST_BACKTRACE says.
            eprintln!("Error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        // It has more ends than two.
        Command::GpuCheck(args) => return gpu_check::run(&args),
        Command::BuildEbpf(args) => ebpf::run(&args),
        Command::Demo(args) => demo::run(&args),
        Command::Test(args) => test::run(&args),
        Command::Engine(args) => engine::run(&args),
        Command::Dashboards => dashboards::run(),
        Command::Chart => chart::run(),
        Command::Dist(args) => dist::run(&args),
        Command::K8s(args) => k8s::run(&args),
        Command::Lint => lint::run(),
        Command::Page(args) => page::run(&args),
        Command::Fleet(args) => fleet::run(&args),
        Command::Services(args) => services::run(&args),
        Command::Live(args) => live::run(&args),
        Command::Bench(args) => bench::run(&args),
    }?;
    Ok(ExitCode::SUCCESS)
}
