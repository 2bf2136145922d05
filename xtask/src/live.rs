//! Live checks besides the demo: the release agent on loads of the workload, scored against the ranks' own record.
//! Part of `cargo xtask test`. Each check says what it proves; needs root and BPF, and says so where they lack.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::agent::{Agent, Start};
use crate::install;

/// How long the workload may take to open its connections.
const OPEN: Duration = Duration::from_mins(1);

/// One load, and when the agent attaches.
struct Check {
    name: &'static str,
    late: bool,
    arguments: &'static [&'static str],
}

/// Loads whose every room must be followed to its end.
const CHECKS: &[Check] = &[
    Check {
        name: "500 rooms at 50 a second",
        late: false,
        arguments: &["load", "--rate", "50", "--rooms", "500", "--duration", "12"],
    },
    Check {
        name: "the agent starts when the connections are open",
        late: true,
        arguments: &["load", "--rate", "50", "--duration", "5"],
    },
    Check {
        name: "IPv6",
        late: false,
        arguments: &["load", "--rate", "50", "--duration", "3", "--family", "v6"],
    },
    Check {
        name: "IPv4 peers of IPv6 sockets",
        late: false,
        arguments: &["load", "--rate", "50", "--duration", "3", "--family", "mapped"],
    },
    Check {
        name: "METADATA of 200 000 pages",
        late: false,
        arguments: &["load", "--rate", "2", "--duration", "4", "--pages", "200000", "--no-kv"],
    },
    Check {
        name: "80 METADATA in one call",
        late: false,
        arguments: &["load", "--rate", "200", "--duration", "4", "--batch", "80", "--pages", "4", "--no-kv"],
    },
];

/// Seconds and messages per second of the loss check.
const RAW: (u64, u64) = (30, 22_000);

/// Runs every check. Returns why they could not run, if they could not.
pub(crate) fn as_test() -> Result<Vec<String>> {
    let root = install::root();
    let dir = root.join("target/live");
    let agent = root.join("target/release/roomtrace");
    for check in CHECKS {
        let dir = fresh(&dir, check.name)?;
        match scored(check, &agent, &dir).with_context(|| format!("live check: {}", check.name))? {
            None => eprintln!("ok: {}", check.name),
            Some(why) => return Ok(vec![format!("live checks: {why}")]),
        }
    }
    let dir = fresh(&dir, "raw")?;
    match raw(&agent, &dir).context("live check: control sends at full rate")? {
        Ok(said) => eprintln!("ok: {said}"),
        Err(why) => return Ok(vec![format!("live checks: {why}")]),
    }
    Ok(Vec::new())
}

fn fresh(dir: &Path, name: &str) -> Result<PathBuf> {
    let dir = dir.join(name.replace(' ', "-"));
    if dir.exists() {
        std::fs::remove_dir_all(&dir).with_context(|| format!("empty {}", dir.display()))?;
    }
    std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    Ok(dir)
}

/// A running workload. Dropping it kills it; its ranks end with it.
struct Workload {
    child: Child,
    dir: PathBuf,
}

impl Workload {
    /// Starts it and waits until its connections are open.
    fn open(arguments: &[&str], dir: &Path) -> Result<Self> {
        let child = Command::new(install::root().join("target/debug/pd-workload"))
            .args(arguments)
            .arg("--out")
            .arg(dir)
            .arg("--ready-file")
            .arg(dir.join("ready"))
            .arg("--wait-file")
            .arg(dir.join("go"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .context("start the workload")?;
        let mut workload = Self { child, dir: dir.to_owned() };
        let end = Instant::now() + OPEN;
        while !dir.join("ready").exists() {
            if let Some(status) = workload.child.try_wait()? {
                bail!("the workload ended with {status} before its connections were open");
            }
            if Instant::now() > end {
                bail!("the workload's connections are not open after {} s", OPEN.as_secs());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(workload)
    }

    /// Lets the load begin and waits for its end.
    fn run(mut self) -> Result<()> {
        std::fs::write(self.dir.join("go"), "").context("tell the workload to begin")?;
        let status = self.child.wait().context("wait for the workload")?;
        if !status.success() {
            bail!("the workload ended with {status}");
        }
        Ok(())
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts agent and workload in the order asked for. The inner error: why this host cannot be observed.
fn start(
    late: bool,
    agent: &Path,
    arguments: &[&str],
    dir: &Path,
) -> Result<Result<(Agent, Workload), String>> {
    let attach = || Agent::start(agent, &[], &dir.join("events.jsonl"), &dir.join("agent.log"));
    let (workload, started) = if late {
        let workload = Workload::open(arguments, dir)?;
        (workload, attach()?)
    } else {
        let started = attach()?;
        (Workload::open(arguments, dir)?, started)
    };
    Ok(match started {
        Start::Observing(agent) => Ok((agent, workload)),
        Start::NotPossible(why) => Err(why),
    })
}

fn scored(check: &Check, agent: &Path, dir: &Path) -> Result<Option<String>> {
    let (mut agent, workload) = match start(check.late, agent, check.arguments, dir)? {
        Ok(both) => both,
        Err(why) => return Ok(Some(why)),
    };
    workload.run()?;
    agent.check()?;
    agent.stop()?;
    if check.late {
        silence_warmup(dir)?;
    }
    let root = install::root();
    let score = Command::new("python3")
        .arg(root.join("agent/tests/score.py"))
        .args([dir.join("truth.jsonl"), dir.join("events.jsonl")])
        .arg("--expect")
        .arg(dir.join("expect.json"))
        .output()
        .context("start python3")?;
    if !score.status.success() {
        let said = String::from_utf8_lossy(&score.stdout);
        let lines: Vec<&str> = said.lines().collect();
        let shown = lines.iter().take(3).chain(lines.last()).copied().collect::<Vec<_>>().join("\n");
        bail!("the agent was wrong; everything is in {}:\n{shown}", dir.display());
    }
    Ok(None)
}

/// Rooms that opened the connections were over before the agent came.
fn silence_warmup(dir: &Path) -> Result<()> {
    let path = dir.join("expect.json");
    let mut expect: Value = serde_json::from_slice(&std::fs::read(&path)?).context("read expect.json")?;
    expect["warmup"]["silent"] = true.into();
    let rows = std::fs::read_to_string(dir.join("truth.jsonl"))?;
    // A success that was not seen cannot be asked for: those rooms are left out.
    let kept: Vec<&str> =
        rows.lines().filter(|l| !l.contains("\"kind\":\"room\"") || !l.contains("\"warmup\"")).collect();
    std::fs::write(dir.join("truth.jsonl"), kept.join("\n"))?;
    std::fs::write(&path, expect.to_string()).context("write expect.json")
}

/// Control sends at full rate: each is seen at both ends, or its loss is counted.
fn raw(agent: &Path, dir: &Path) -> Result<Result<String, String>> {
    let (seconds, rate) = RAW;
    let (seconds, rate) = (seconds.to_string(), rate.to_string());
    let arguments = ["raw", "--rate", &rate, "--duration", &seconds, "--connections", "64"];
    let (agent, workload) = match start(false, agent, &arguments, dir)? {
        Ok(both) => both,
        Err(why) => return Ok(Err(why)),
    };
    workload.run()?;
    std::thread::sleep(Duration::from_secs(2));
    let truth = std::fs::read_to_string(dir.join("truth.jsonl"))?;
    let sent = truth
        .lines()
        .filter_map(|l| serde_json::from_str::<Value>(l).ok())
        .find_map(|l| l["sent"].as_u64())
        .context("the workload's record does not say how much it sent")?;
    let count = |labels: &[&str]| -> Result<u64> {
        let value = agent.metric("roomtrace_messages_total", labels)?.unwrap_or(0.0);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of messages")]
        let value = value as u64;
        Ok(value)
    };
    let seen = [
        count(&["direction=\"sent\"", "kind=\"STATUS\""])?,
        count(&["direction=\"received\"", "kind=\"STATUS\""])?,
    ];
    let lost = agent.metric("roomtrace_capture_lost_total", &[])?.unwrap_or(0.0);
    agent.stop()?;
    for (end, seen) in ["sent", "received"].into_iter().zip(seen) {
        if seen != sent && lost == 0.0 {
            bail!("{sent} messages were sent, {seen} were seen as {end}, and no loss was counted");
        }
    }
    Ok(Ok(format!(
        "{sent} control messages in {seconds} s: {seen:?} seen at the two ends, {lost} losses counted"
    )))
}
