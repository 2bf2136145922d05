//! Live checks besides the demo: the release agent on loads of the workload, scored against the ranks' and the router's
//! own record.
//! Part of `cargo xtask test`. Each check says what it proves; needs root and BPF, and says so where they lack.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::agent::{Agent, Start};
use crate::own::{Own, lines};
use crate::workload::{self, Workload};
use crate::{demo, install, prometheus, requests};

/// One load, and when the agent attaches.
struct Check {
    name: &'static str,
    late: bool,
    asks: Asks,
    arguments: &'static [&'static str],
}

/// What a check asks for besides the score.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asks {
    Nothing,
    /// Every room is closed, also those whose end is on no rank's port.
    Closed,
    /// No room is called pinned, however unsure.
    NoPin,
}

/// Loads whose every room must be followed to its end.
const CHECKS: &[Check] = &[
    Check {
        name: "500 rooms at 50 a second",
        late: false,
        asks: Asks::Nothing,
        arguments: &["load", "--rate", "50", "--rooms", "500", "--duration", "12"],
    },
    Check {
        name: "the agent starts when the connections are open",
        late: true,
        asks: Asks::Nothing,
        arguments: &["load", "--rate", "50", "--duration", "5"],
    },
    Check {
        name: "IPv6",
        late: false,
        asks: Asks::Nothing,
        arguments: &["load", "--rate", "50", "--duration", "3", "--family", "v6"],
    },
    Check {
        name: "IPv4 peers of IPv6 sockets",
        late: false,
        asks: Asks::Nothing,
        arguments: &["load", "--rate", "50", "--duration", "3", "--family", "mapped"],
    },
    Check {
        name: "METADATA of 200 000 pages",
        late: false,
        asks: Asks::Nothing,
        arguments: &["load", "--rate", "2", "--duration", "4", "--pages", "200000", "--no-kv"],
    },
    Check {
        name: "80 METADATA in one call",
        late: false,
        asks: Asks::Nothing,
        arguments: &["load", "--rate", "200", "--duration", "4", "--batch", "80", "--pages", "4", "--no-kv"],
    },
    Check {
        name: "no HTTP",
        late: false,
        asks: Asks::Nothing,
        arguments: &["load", "--rate", "50", "--duration", "3", "--http", "false"],
    },
    Check {
        name: "NIXL 0.5.17, whose rooms only their requests end",
        late: false,
        asks: Asks::Closed,
        arguments: &["load", "--rate", "50", "--duration", "4", "--engine", "nixl-0.5.17"],
    },
    Check {
        name: "50 clients hang up at moments of their own",
        late: false,
        asks: Asks::NoPin,
        arguments: &["burst", "--clients", "50"],
    },
    Check {
        name: "prefill is paused for 30 seconds under load",
        late: false,
        asks: Asks::NoPin,
        arguments: &["pause", "--seconds", "30"],
    },
];

/// What every prompt of the workload is made of (`pages.rs`).
const PROMPT: &str = "confidential-prompt-text";

/// How long an agent has to find what was there before it.
const FOUND_WITHIN: Duration = Duration::from_mins(1);

/// Seconds and messages per second of the loss check, and the connections that they go over.
const RAW: (u64, u64, u64) = (30, 22_000, 64);

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only checks with this in their name.
    name: Option<String>,
}

/// A check that is not scored by the ranks' own record: agent, directory → what it showed. The inner error: why this host
/// cannot be observed.
type Further = fn(&Path, &Path) -> Result<Result<String, String>>;

const FURTHER: &[(&str, Further)] = &[
    ("control sends at full rate", raw),
    ("a pin that was there before the agent", ghost),
    ("alerts and dashboards in Prometheus", prometheus::check),
];

/// Runs the checks without the other tests.
pub(crate) fn run(args: &Args) -> Result<()> {
    install::debian(&["python3"])?;
    workload::build()?;
    install::cargo(&["build", "--quiet", "--release", "--package", "roomtrace"])?;
    match checks(args.name.as_deref().unwrap_or_default())?.pop() {
        None => Ok(()),
        Some(why) => bail!("{why}"),
    }
}

/// Runs every check. Returns why they could not run, if they could not.
pub(crate) fn as_test() -> Result<Vec<String>> {
    checks("")
}

fn checks(name: &str) -> Result<Vec<String>> {
    let dir = install::target().join("live");
    let agent = install::target().join("release/roomtrace");
    for check in CHECKS.iter().filter(|c| c.name.contains(name)) {
        let dir = fresh(&dir, check.name)?;
        match scored(check, &agent, &dir).with_context(|| format!("live check: {}", check.name))? {
            None => eprintln!("ok: {}", check.name),
            Some(why) => return Ok(vec![format!("live checks: {why}")]),
        }
    }
    for (check, run) in FURTHER.iter().filter(|(check, _)| check.contains(name)) {
        let dir = fresh(&dir, check)?;
        match run(&agent, &dir).with_context(|| format!("live check: {check}"))? {
            Ok(said) => eprintln!("ok: {said}"),
            Err(why) => return Ok(vec![format!("live checks: {why}")]),
        }
    }
    let late = "the demo, and the agent comes when the connections are open";
    if !late.contains(name) {
        return Ok(Vec::new());
    }
    demo::late_as_test().with_context(|| format!("live check: {late}"))
}

fn fresh(dir: &Path, name: &str) -> Result<PathBuf> {
    let dir = dir.join(name.replace(' ', "-"));
    install::empty(&dir)?;
    Ok(dir)
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
    let (mut agent, mut workload) = match start(check.late, agent, check.arguments, dir)? {
        Ok(both) => both,
        Err(why) => return Ok(Some(why)),
    };
    workload.results()?;
    let workload_truth = workload.truth()?;
    let own = Own::of_truth(&workload_truth)?;
    workload.end()?;
    agent.check()?;
    let shown = ["/", "/metrics", "/api/v1/rooms", "/api/v1/findings", "/status"].map(|page| agent.get(page));
    agent.stop()?;
    for page in shown {
        no_prompt(&page?, "a page")?;
    }
    for file in ["events.jsonl", "agent.log"] {
        no_prompt(&std::fs::read_to_string(dir.join(file))?, file)?;
    }
    let events = own_events(&own, dir)?.0;
    let said = std::fs::read_to_string(&events)?;
    asked(check.asks, &said, &workload_truth)?;
    if !check.late {
        let wrong = requests::wrong(&workload_truth, &said)?;
        if let Some(first) = wrong.first() {
            bail!(
                "{} requests are not told as they were; {first}; everything is in {}",
                wrong.len(),
                dir.display()
            );
        }
    }
    if check.late {
        silence_warmup(dir)?;
    }
    let score = Command::new("python3")
        .arg(install::root().join("agent/tests/score.py"))
        .args([dir.join("truth.jsonl"), events])
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

fn no_prompt(text: &str, place: &str) -> Result<()> {
    if text.contains(PROMPT) {
        bail!("{place} of the agent has text of a prompt in it");
    }
    Ok(())
}

/// What a check asks for besides the score.
fn asked(asks: Asks, events: &str, truth: &str) -> Result<()> {
    let rooms = |event: &'static str| -> Result<Vec<String>> {
        let its = |line: &Value| line["event"] == event;
        let all: Vec<Value> = lines(events).collect::<Result<_>>()?;
        Ok(all.into_iter().filter(its).filter_map(|line| Some(line["room"].as_str()?.to_owned())).collect())
    };
    match asks {
        Asks::Nothing => Ok(()),
        Asks::NoPin => match rooms("room_pinned")?.as_slice() {
            [] => Ok(()),
            pins => bail!("{} rooms were called pinned, the first is {}", pins.len(), pins[0]),
        },
        Asks::Closed => {
            let closed = rooms("room_closed")?;
            let open: Vec<String> = lines(truth)
                .collect::<Result<Vec<_>>>()?
                .iter()
                .filter(|line| line["kind"] == "room")
                .map(|line| line["room"].to_string())
                .filter(|room| !closed.contains(room))
                .collect();
            match open.first() {
                None => Ok(()),
                Some(first) => bail!("{} rooms were not closed, the first is {first}", open.len()),
            }
        }
    }
}

/// An agent that comes when a room is pinned already and nothing more happens says that a gauge shows what no room
/// explains. The inner error: why this host cannot be observed.
fn ghost(agent: &Path, dir: &Path) -> Result<Result<String, String>> {
    let (mut agent, mut workload) = match start(true, agent, &["ghost", "--seconds", "1"], dir)? {
        Ok(both) => both,
        Err(why) => return Ok(Err(why)),
    };
    let servers = workload.servers()?;
    let begun = Instant::now();
    let is_it = |line: &&str| {
        // The last line may be half written.
        let event: Value = serde_json::from_str(line).unwrap_or_default();
        event["event"] == "finding_opened"
            && event["class"] == "gauge_unexplained"
            && event["engine"]["pid"].as_u64().is_some_and(|pid| servers.contains(&pid))
    };
    let said = loop {
        let events = std::fs::read_to_string(dir.join("events.jsonl")).context("read the agent's events")?;
        if let Some(line) = events.lines().find(is_it) {
            break line.to_owned();
        }
        if begun.elapsed() > FOUND_WITHIN {
            bail!(
                "no `gauge_unexplained` about the workload within {} s; see {}",
                FOUND_WITHIN.as_secs(),
                dir.display()
            );
        }
        agent.check()?;
        std::thread::sleep(Duration::from_millis(200));
    };
    no_prompt(&said, "a finding")?;
    let took = begun.elapsed().as_secs();
    workload.results()?;
    workload.end()?;
    agent.stop()?;
    Ok(Ok(format!("a pin that was there before the agent: found by its gauge after {took} s")))
}

/// A file with the events about the workload, and how many were about other engines on this host.
fn own_events(own: &Own, dir: &Path) -> Result<(PathBuf, usize)> {
    let events = std::fs::read_to_string(dir.join("events.jsonl")).context("read the agent's events")?;
    let (events, others) = own.events(&events)?;
    if others > 0 {
        eprintln!("{others} events are about other engines on this host and do not count");
    }
    let path = dir.join("events.own.jsonl");
    std::fs::write(&path, events).with_context(|| format!("write {}", path.display()))?;
    Ok((path, others))
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
    let (seconds, rate, connections) = RAW;
    let (seconds, rate, over) = (seconds.to_string(), rate.to_string(), connections.to_string());
    let arguments = ["raw", "--rate", &rate, "--duration", &seconds, "--connections", &over];
    let (agent, mut workload) = match start(false, agent, &arguments, dir)? {
        Ok(both) => both,
        Err(why) => return Ok(Err(why)),
    };
    let seen = || -> Result<[u64; 2]> {
        let count = |direction| -> Result<u64> {
            let labels = [direction, "kind=\"STATUS\""];
            let value = agent.metric("roomtrace_messages_total", &labels)?.unwrap_or(0.0);
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of messages")]
            let value = value as u64;
            Ok(value)
        };
        Ok([count("direction=\"sent\"")?, count("direction=\"received\"")?])
    };
    // The counts are the whole host's: where they are not those of the message that opened each connection, or move while
    // the workload waits, another engine is there and adds to them.
    let settle = || std::thread::sleep(Duration::from_secs(2));
    settle();
    let before = seen()?;
    settle();
    let alone = before == [connections; 2] && seen()? == before;
    workload.results()?;
    let truth = workload.truth()?;
    workload.end()?;
    let sent = truth
        .lines()
        .filter_map(|l| serde_json::from_str::<Value>(l).ok())
        .find_map(|l| l["sent"].as_u64())
        .context("the workload's record does not say how much it sent")?;
    let lost = || Ok::<_, anyhow::Error>(agent.metric("roomtrace_capture_lost_total", &[])?.unwrap_or(0.0));
    // On a busy machine the agent has some of them still before it.
    let begun = Instant::now();
    while seen()?.into_iter().any(|seen| seen < sent) && lost()? == 0.0 && begun.elapsed() < FOUND_WITHIN {
        std::thread::sleep(Duration::from_millis(200));
    }
    settle();
    let (seen, lost) = (seen()?, lost()?);
    agent.stop()?;
    for (end, seen) in ["sent", "received"].into_iter().zip(seen) {
        if (seen < sent || alone && seen != sent) && lost == 0.0 {
            bail!("{sent} messages were sent, {seen} were seen as {end}, and no loss was counted");
        }
    }
    Ok(Ok(format!(
        "{sent} control messages in {seconds} s: {seen:?} seen at the two ends, {lost} losses counted"
    )))
}
