//! `cargo xtask gpu-check`: on a machine with real GPUs, holds what the agent reads of them against copies of known size, and prints
//! what each call costs.
//!
//! The work is done by the agent's example `gpu_check`, which is built here and whose end is the command's own: 0 every source agrees,
//! 1 one does not, 3 there is no driver, no GPU or nothing to copy with.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::install;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Without optimization: quicker to build, and calls cost a little more.
    #[arg(long)]
    debug: bool,
    /// What the example takes (after `--`): --nvml FILE, --cuda FILE, --seconds N.
    #[arg(last = true)]
    arguments: Vec<String>,
}

/// Builds and runs it.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let mut build = vec!["build", "--quiet", "--package", "roomtrace", "--example", "gpu_check"];
    let profile = if args.debug { "debug" } else { "release" };
    if !args.debug {
        build.push("--release");
    }
    install::cargo(&build)?;
    let program = install::target().join(profile).join("examples/gpu_check");
    let status = Command::new(&program)
        .args(&args.arguments)
        .status()
        .with_context(|| format!("start {}", program.display()))?;
    // A signal has no code.
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
