//! `cargo xtask bench`: what the agent costs, as figures that anyone can measure again. Never a test: machines differ.
//!
//! Kernel cost comes from the kernel's own program statistics, pipeline figures from criterion, replay as a ratio against
//! tshark on the same file in the same run, CPU and memory of a live agent from /proc.

mod spans;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::agent::{Agent, Start, terminate};
use crate::install;
use crate::workload::{self, Workload};

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only these: kernel, pipeline, replay, live, http, spans, gpu.
    parts: Vec<String>,
    /// Run live, http and spans without optimization, to see that they work: their figures say nothing then.
    #[arg(long)]
    debug: bool,
}

/// A part and how it is run.
type Part = (&'static str, fn(Build) -> Result<()>);

/// How the programs under test are built.
#[derive(Clone, Copy)]
struct Build {
    debug: bool,
}

impl Build {
    /// Builds a package, or one of its examples, with these arguments.
    fn build(self, what: &[&str]) -> Result<()> {
        let profile: &[&str] = if self.debug { &[] } else { &["--release"] };
        install::cargo(&[&["build", "--quiet"], profile, &["--package"], what].concat())
    }

    fn program(self, name: &str) -> PathBuf {
        install::target().join(if self.debug { "debug" } else { "release" }).join(name)
    }
}

const PARTS: [Part; 7] = [
    ("kernel", kernel),
    ("pipeline", pipeline),
    ("replay", replay),
    ("live", live),
    ("http", http),
    ("spans", spans::spans),
    ("gpu", gpu),
];

/// Rooms per second and seconds of the live part.
const LIVE: (u32, u64) = (2000, 30);

/// Requests per second, bytes of each and seconds of the HTTP part.
const HTTP: (u32, u32, u64) = (2000, 8192, 30);

/// How often the replay and tshark are timed; the medians are compared.
const ROUNDS: usize = 5;

/// Rooms per second and seconds of the capture that replay and tshark read.
const RECORDED: (u32, u64) = (500, 20);

/// Runs it.
pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(unknown) = args.parts.iter().find(|p| !PARTS.iter().any(|(name, _)| name == p)) {
        bail!("unknown part `{unknown}`: known are kernel, pipeline, replay, live, http, spans and gpu");
    }
    for (name, part) in PARTS {
        if args.parts.is_empty() || args.parts.iter().any(|p| p == name) {
            println!("\n== {name}");
            part(Build { debug: args.debug }).with_context(|| format!("bench {name}"))?;
        }
    }
    Ok(())
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = install::cargo_command();
    command.args(arguments);
    command
}

/// Program run times of an unrelated send and of a captured one.
fn kernel(_: Build) -> Result<()> {
    let out = install::output(&mut cargo(&[
        "run",
        "--quiet",
        "--release",
        "--package",
        "roomtrace",
        "--example",
        "kernel_cost",
    ]))?;
    let figures: Value = serde_json::from_str(out.trim()).context("the figures of kernel_cost")?;
    for (key, bar) in [
        ("empty_ns", ""),
        ("unrelated_send_above_empty_ns", "bar: at most 15"),
        ("muted_send_above_empty_ns", "bar: at most 15"),
        ("captured_send_ns", ""),
        ("captured_receive_ns", ""),
        ("captured_send_and_receive_ns", "bar: at most 1500"),
    ] {
        println!("{key:32} {:>10} {bar}", figures[key]);
    }
    Ok(())
}

/// Criterion's own report; elements per second are messages per second.
fn pipeline(_: Build) -> Result<()> {
    install::run(&mut cargo(&[
        "bench",
        "--quiet",
        "--package",
        "roomtrace",
        "--bench",
        "control",
        "--bench",
        "pipeline",
    ]))
}

/// What reading GPUs costs, of the driver that stands in for the real one.
fn gpu(_: Build) -> Result<()> {
    install::run(&mut cargo(&["bench", "--quiet", "--package", "roomtrace", "--bench", "gpus"]))
}

fn replay(_: Build) -> Result<()> {
    install::debian(&["tshark", "tcpdump"])?;
    install::run(&mut cargo(&["build", "--quiet", "--release", "--package", "roomtrace"]))?;
    let target = install::target();
    let file = record(&target.join("bench"))?;
    let agent = target.join("release/roomtrace");
    let (mut ours, mut lines, mut trees) = (Vec::new(), Vec::new(), Vec::new());
    // In turn, so that a drift of the machine's speed meets all.
    for _ in 0..ROUNDS {
        ours.push(timed(Command::new(&agent).arg("replay").arg(&file))?);
        lines.push(timed(Command::new("tshark").args(["-n", "-r"]).arg(&file))?);
        trees.push(timed(Command::new("tshark").args(["-n", "-V", "-r"]).arg(&file))?);
    }
    let ours = median(ours);
    println!(
        "{} bytes: replay {ours:.3} s (bar: tshark takes at least 20 times as long)",
        std::fs::metadata(&file)?.len()
    );
    for (what, theirs) in [("a line per packet", median(lines)), ("every field (-V)", median(trees))] {
        println!("tshark, {what:20} {theirs:>8.3} s, ratio {:.0}", theirs / ours);
    }
    Ok(())
}

/// A packet capture of [`RECORDED`] of the workload's load: what the control ports of a busy host look like.
fn record(dir: &Path) -> Result<PathBuf> {
    let (rate, seconds) = RECORDED;
    if dir.exists() {
        std::fs::remove_dir_all(dir).with_context(|| format!("empty {}", dir.display()))?;
    }
    std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    let file = dir.join("load.pcap");
    workload::build()?;
    let mut tcpdump = Command::new("tcpdump")
        .args(["-i", "lo", "-B", "65536", "-Z", "root", "-w"])
        .arg(&file)
        .arg("tcp")
        .stderr(File::create(dir.join("tcpdump.log"))?)
        .spawn()
        .context("start tcpdump")?;
    std::thread::sleep(Duration::from_secs(1));
    let (rate, seconds) = (rate.to_string(), seconds.to_string());
    let mut workload = Workload::open(
        &["load", "--http", "false", "--no-kv", "--rate", &rate, "--duration", &seconds],
        dir,
    )?;
    println!("recorded: {}", workload.results()?);
    workload.end()?;
    std::thread::sleep(Duration::from_secs(1));
    terminate(&mut tcpdump)?;
    Ok(file)
}

fn timed(command: &mut Command) -> Result<f64> {
    let begun = Instant::now();
    install::run(command.stdout(Stdio::null()).stderr(Stdio::null()))?;
    Ok(begun.elapsed().as_secs_f64())
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// CPU and memory of an agent that watches a steady load of rooms, by frames alone.
fn live(build: Build) -> Result<()> {
    let (rate, seconds) = (LIVE.0.to_string(), LIVE.1.to_string());
    let load = ["load", "--http", "false", "--no-kv", "--rate", &rate, "--duration", &seconds];
    let watched = watched(build, &load)?;
    let closed = watched.agent.metric("roomtrace_rooms_closed_total", &["role=\"prefill\""])?.unwrap_or(0.0);
    println!("rooms followed                   {closed:>10} in {:.1} s", watched.seconds);
    watched.print("at most 10")
}

/// The same with requests at a prefill engine's HTTP server and no control traffic.
fn http(build: Build) -> Result<()> {
    let (rate, size, seconds) = (HTTP.0.to_string(), HTTP.1.to_string(), HTTP.2.to_string());
    let watched = watched(build, &["http", "--rate", &rate, "--size", &size, "--duration", &seconds])?;
    let (rate, size, _) = HTTP;
    println!("requests                         {rate:>10} /s of {size} bytes for {:.1} s", watched.seconds);
    watched.print("at most 5")
}

/// An agent that has watched a load.
struct Watched {
    agent: Agent,
    seconds: f64,
    /// CPU time that the agent used meanwhile, seconds.
    used: f64,
}

impl Watched {
    fn print(self, bar: &str) -> Result<()> {
        let Self { agent, seconds, used } = self;
        println!(
            "agent CPU                        {:>10.1} % of a core (bar: {bar})",
            used / seconds * 100.0
        );
        println!("resident memory under load       {:>10.1} MiB", resident(agent.pid())?);
        println!(
            "losses counted                   {:>10}",
            agent.metric("roomtrace_capture_lost_total", &[])?.unwrap_or(0.0)
        );
        agent.stop()
    }
}

/// Runs a load of the workload under a fresh agent.
fn watched(build: Build, load: &[&str]) -> Result<Watched> {
    let agent = agent(build, &[])?;
    let mut workload = open(build, load)?;
    let before = (Instant::now(), cpu(agent.pid())?);
    workload.results()?;
    let (seconds, used) = (before.0.elapsed().as_secs_f64(), cpu(agent.pid())? - before.1);
    workload.end()?;
    Ok(Watched { agent, seconds, used })
}

/// A fresh agent that has been idle for a moment.
fn agent(build: Build, arguments: &[String]) -> Result<Agent> {
    build.build(&["roomtrace"])?;
    let dir = install::target().join("bench");
    std::fs::create_dir_all(&dir)?;
    let (events, log) = (dir.join("events.jsonl"), dir.join("agent.log"));
    let agent = match Agent::start(&build.program("roomtrace"), arguments, &events, &log)? {
        Start::Observing(agent) => agent,
        Start::NotPossible(why) => bail!("{why}"),
    };
    std::thread::sleep(Duration::from_secs(2));
    println!("resident memory idle             {:>10.1} MiB (bar: at most 64)", resident(agent.pid())?);
    Ok(agent)
}

/// A load of the workload that is ready to begin.
fn open(build: Build, load: &[&str]) -> Result<Workload> {
    install::debian(&["libzmq3-dev", "pkg-config"])?;
    build.build(&["pd-workload"])?;
    let results = install::target().join("bench/workload");
    install::empty(&results)?;
    Workload::open_as(&build.program("pd-workload"), load, &results)
}

/// User and system time of a process, seconds (`/proc/PID/stat`, fields 14 and 15; 100 ticks a second on Linux).
fn cpu(pid: u32) -> Result<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(") ").context("/proc/PID/stat")?;
    let ticks: u32 = fields.split(' ').skip(11).take(2).map(|t| t.parse::<u32>().unwrap_or(0)).sum();
    Ok(f64::from(ticks) / 100.0)
}

/// Resident memory in MiB.
fn resident(pid: u32) -> Result<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib: u32 = status
        .lines()
        .find_map(|l| l.strip_prefix("VmRSS:"))
        .and_then(|v| v.split_whitespace().next()?.parse().ok())
        .context("no VmRSS")?;
    Ok(f64::from(kib) / 1024.0)
}
