//! `cargo xtask bench`: what the agent costs, as figures that anyone can measure again. Never a test: machines differ.
//!
//! Kernel cost comes from the kernel's own program statistics, pipeline figures from criterion, replay as a ratio against
//! tshark on the same file in the same run, CPU and memory of a live agent from /proc.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::agent::{Agent, Start};
use crate::install;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only these: kernel, pipeline, replay, live.
    parts: Vec<String>,
}

/// A part and how it is run.
type Part = (&'static str, fn() -> Result<()>);

const PARTS: [Part; 4] = [("kernel", kernel), ("pipeline", pipeline), ("replay", replay), ("live", live)];

/// Rooms per second and seconds of the live part.
const LIVE: (u32, u64) = (2000, 30);

/// How often the replay and tshark are timed; the medians are compared.
const ROUNDS: usize = 5;

/// Copies of the largest bundled capture in the file that replay and tshark read.
const COPIES: usize = 200;

/// Runs it.
pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(unknown) = args.parts.iter().find(|p| !PARTS.iter().any(|(name, _)| name == p)) {
        bail!("unknown part `{unknown}`: known are kernel, pipeline, replay and live");
    }
    for (name, part) in PARTS {
        if args.parts.is_empty() || args.parts.iter().any(|p| p == name) {
            println!("\n== {name}");
            part().with_context(|| format!("bench {name}"))?;
        }
    }
    Ok(())
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("cargo");
    command.args(arguments).current_dir(install::root());
    command
}

/// Program run times of an unrelated send and of a captured one.
fn kernel() -> Result<()> {
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
        ("captured_send_ns", ""),
        ("captured_receive_ns", ""),
        ("captured_send_and_receive_ns", "bar: at most 1500"),
    ] {
        println!("{key:32} {:>10} {bar}", figures[key]);
    }
    Ok(())
}

/// Criterion's own report; elements per second are messages per second.
fn pipeline() -> Result<()> {
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

fn replay() -> Result<()> {
    install::debian(&["tshark"])?;
    install::run(&mut cargo(&["build", "--quiet", "--release", "--package", "roomtrace"]))?;
    let target = install::target();
    let file = target.join("bench.pcap");
    repeat(&install::root().join("agent/tests/fixtures/captures/uv.pcap"), &file)?;
    let agent = target.join("release/roomtrace");
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    // In turn, so that a drift of the machine's speed meets both.
    for _ in 0..ROUNDS {
        ours.push(timed(Command::new(&agent).arg("replay").arg(&file))?);
        theirs.push(timed(Command::new("tshark").args(["-n", "-r"]).arg(&file))?);
    }
    let (ours, theirs) = (median(ours), median(theirs));
    println!(
        "{} bytes: replay {ours:.3} s, tshark {theirs:.3} s, ratio {:.0} (bar: at least 20)",
        std::fs::metadata(&file)?.len(),
        theirs / ours
    );
    Ok(())
}

/// The capture's packets many times over, each copy an hour later and on other addresses of 127/8: new connections.
fn repeat(from: &Path, to: &Path) -> Result<()> {
    const HEADER: usize = 24;
    let bytes = std::fs::read(from).with_context(|| format!("read {}", from.display()))?;
    let (header, packets) = bytes.split_at_checked(HEADER).context("no pcap file")?;
    if header[..4] != 0xa1b2_c3d4_u32.to_le_bytes() || header[20..24] != 1_u32.to_le_bytes() {
        bail!("{} is not a little-endian pcap of Ethernet", from.display());
    }
    let mut out = header.to_vec();
    for copy in 0..COPIES {
        let mut rest = packets;
        while let Some((head, tail)) = rest.split_at_checked(16) {
            let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
            let length = word(8) as usize;
            let (packet, next) = tail.split_at_checked(length).context("the capture is cut short")?;
            let shift = u32::try_from(copy * 3600)?;
            out.extend((word(0) + shift).to_le_bytes());
            out.extend(&head[4..]);
            let start = out.len();
            out.extend(packet);
            // IPv4 addresses at 12 and 16 of the header behind 14 bytes of Ethernet; checksums are nobody's business here.
            for at in [start + 14 + 13, start + 14 + 17] {
                if let Some(byte) = out.get_mut(at) {
                    *byte = u8::try_from(copy % 250)?;
                }
            }
            rest = next;
        }
    }
    std::fs::write(to, out).with_context(|| format!("write {}", to.display()))
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

/// CPU and memory of an agent that watches a steady load.
fn live() -> Result<()> {
    install::debian(&["libzmq3-dev", "pkg-config"])?;
    install::run(&mut cargo(&["build", "--quiet", "--release", "--package", "roomtrace"]))?;
    install::run(&mut cargo(&["build", "--quiet", "--release", "--package", "pd-workload"]))?;
    let target = install::target();
    let dir = target.join("bench");
    std::fs::create_dir_all(&dir)?;
    let agent = match Agent::start(
        &target.join("release/roomtrace"),
        &[],
        &dir.join("events.jsonl"),
        &dir.join("agent.log"),
    )? {
        Start::Observing(agent) => agent,
        Start::NotPossible(why) => bail!("{why}"),
    };
    std::thread::sleep(Duration::from_secs(2));
    println!("resident memory idle             {:>10.1} MiB (bar: at most 64)", resident(agent.pid())?);
    let (rate, seconds) = LIVE;
    let before = (Instant::now(), cpu(agent.pid())?);
    install::run(
        Command::new(target.join("release/pd-workload"))
            .args(["load", "--no-kv", "--rate", &rate.to_string(), "--duration", &seconds.to_string()])
            .arg("--out")
            .arg(dir.join("workload"))
            .stdout(Stdio::null()),
    )?;
    let (took, used) = (before.0.elapsed().as_secs_f64(), cpu(agent.pid())? - before.1);
    let closed = agent.metric("roomtrace_rooms_closed_total", &["role=\"prefill\""])?.unwrap_or(0.0);
    println!("rooms followed                   {closed:>10} in {took:.1} s");
    println!("agent CPU                        {:>10.1} % of a core (bar: at most 10)", used / took * 100.0);
    println!("resident memory under load       {:>10.1} MiB", resident(agent.pid())?);
    println!(
        "losses counted                   {:>10}",
        agent.metric("roomtrace_capture_lost_total", &[])?.unwrap_or(0.0)
    );
    agent.stop()
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
