//! `cargo xtask test`: every test of the project, installing what is missing.
//!
//! Steps run in order and stop at the first failure, except that skipped tests are collected and told at the
//! end: with `CI` set a skipped test is a failure.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::{dashboards, demo, ebpf, fleet, install, k8s, live, page, prometheus, services};

/// Debian packages that tests need: libzmq for the workload, tcpdump and tshark as independent witnesses, tmux as a
/// terminal for `roomtrace top`.
const PACKAGES: &[&str] =
    &["libzmq3-dev", "pkg-config", "tcpdump", "tshark", "tmux", "python3", "iproute2", "ca-certificates"];

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leave out the kernel object's rebuild, the demo and the live checks (CI leaves out none).
    #[arg(long)]
    quick: bool,
}

/// Runs every test.
pub(crate) fn run(args: &Args) -> Result<()> {
    let ci = std::env::var_os("CI").is_some_and(|v| !v.is_empty());
    if args.quick && ci {
        bail!("--quick leaves tests out, which CI must not do");
    }
    install::debian(PACKAGES)?;
    if !args.quick {
        step("kernel object: rebuild and compare with the checked-in one");
        ebpf::run(&ebpf::Args { check: true })?;
    }
    step("alert rules and dashboards");
    alert_rules()?;
    strict_dashboards()?;
    step("tests");
    let mut skipped = cargo_test(&["test", "--workspace", "--no-fail-fast"])?;
    if !args.quick {
        step("demo");
        skipped.extend(demo::as_test()?);
        step("live checks");
        skipped.extend(live::as_test()?);
        step("pages in a browser");
        skipped.extend(page::as_test()?);
        step("a fleet: Collectors, Jaeger, Prometheus");
        skipped.extend(fleet::as_test()?);
        step("Kubernetes");
        skipped.extend(k8s::as_test()?);
    }
    if !skipped.is_empty() {
        eprintln!("\n{} TESTS COULD NOT RUN HERE:", skipped.len());
        for line in &skipped {
            eprintln!("  {line}");
        }
        if ci {
            bail!("{} tests were skipped; in CI none may be", skipped.len());
        }
    }
    eprintln!("\nall tests passed{}", if skipped.is_empty() { "" } else { ", except those named above" });
    Ok(())
}

/// Prometheus' own tool reads the alert rules and runs their unit tests.
fn alert_rules() -> Result<()> {
    let promtool = prometheus::program("promtool")?;
    let dir = install::root().join("dashboards/alerts");
    for arguments in
        [["check", "rules", "roomtrace.rules.yaml"], ["test", "rules", "roomtrace.rules.test.yaml"]]
    {
        install::run(Command::new(&promtool).args(arguments).current_dir(&dir))?;
    }
    Ok(())
}

/// Grafana's own types read the dashboards.
fn strict_dashboards() -> Result<()> {
    let mut check = Command::new(services::build(&services::DASHBOARD_CHECK)?);
    for dashboard in dashboards::ALL {
        check.arg(dashboards::file(dashboard));
    }
    install::run(&mut check)
}

fn step(name: &str) {
    eprintln!("\n=== {name}");
}

/// Runs cargo, passes its output on, and returns the lines that begin with `SKIPPED:`.
fn cargo_test(args: &[&str]) -> Result<Vec<String>> {
    let mut child = install::cargo_command()
        .args(args)
        .args(["--", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .context("start cargo test")?;
    let stdout = child.stdout.take().context("cargo test has no output")?;
    let mut skipped = Vec::new();
    for line in BufReader::new(stdout).lines() {
        let line = line.context("read the output of cargo test")?;
        if let Some((_, why)) = line.split_once("SKIPPED:") {
            skipped.push(why.trim().to_owned());
        }
        println!("{line}");
    }
    let status = child.wait().context("wait for cargo test")?;
    if !status.success() {
        bail!("tests failed ({status})");
    }
    Ok(skipped)
}
