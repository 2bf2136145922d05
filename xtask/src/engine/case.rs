//! One run of the engine with the agent attached.
//!
//! The harness says by files where it stands: `ready` when its processes are up, `warm` when a few healthy rooms have
//! opened the connections, `held` when the load is over; it waits for `go`, `load` and `end` before it goes on. The agent
//! runs from before the harness, or from `warm`, to `held`.

use std::borrow::Cow;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::setup::Engine;
use super::{json_lines, script};
use crate::agent::{Agent, Start};
use crate::own::Own;

/// How long the engine's processes may take to come up: as long as the harness itself waits. They need 30 to 45 s on an idle
/// machine.
pub(super) const STARTUP: Duration = Duration::from_mins(10);
/// How long the engine may take to end.
pub(super) const END: Duration = Duration::from_mins(1);
/// How long any load may take beyond what its flags say.
pub(super) const LOAD: Duration = Duration::from_mins(3);
/// Between attaching and the load.
pub(super) const ATTACHED: Duration = Duration::from_secs(2);
/// Rooms that open the connections.
const WARMUP: &str = "2";

/// The case of two complete servers (see `servers.rs`).
pub(super) const SERVERS: &str = "servers";

/// When the agent starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Attach {
    /// Before any process of the engine.
    Before,
    /// When the engine's connections are open.
    After,
}

impl fmt::Display for Attach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Before { "before" } else { "after" })
    }
}

/// The engine's transfer backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Backend {
    Mooncake,
    Nixl,
}

/// A set of scenarios that run together.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) name: &'static str,
    pub(super) backend: Backend,
    pub(super) scenarios: Cow<'static, [&'static str]>,
    pub(super) flags: &'static [&'static str],
}

/// Every case. Engine time-outs are off, so that a pin stays a pin; each stays for at least 22 s, longer than the agent's
/// floor of 10 s. `g` and `h` break processes and run alone, `k` is a load of its own.
pub(super) static CASES: [Case; 8] = [
    Case {
        name: "mixed",
        backend: Backend::Mooncake,
        scenarios: Cow::Borrowed(&["a", "b", "c", "f", "m", "u", "v"]),
        flags: &["--rooms", "3", "--hold", "10"],
    },
    Case {
        name: "slow",
        backend: Backend::Mooncake,
        scenarios: Cow::Borrowed(&["s"]),
        flags: &["--rooms", "3", "--slow-ms", "30000", "--mix-normal", "12", "--hold", "5"],
    },
    Case {
        name: "large",
        backend: Backend::Mooncake,
        scenarios: Cow::Borrowed(&["l"]),
        flags: &["--rooms", "3", "--hold", "5"],
    },
    Case {
        name: "rank",
        backend: Backend::Mooncake,
        scenarios: Cow::Borrowed(&["g"]),
        flags: &["--rooms", "3", "--hold", "10"],
    },
    Case {
        name: "endpoint",
        backend: Backend::Mooncake,
        scenarios: Cow::Borrowed(&["h"]),
        flags: &["--rooms", "3", "--hold", "10"],
    },
    Case {
        name: "load",
        backend: Backend::Mooncake,
        scenarios: Cow::Borrowed(&["k"]),
        flags: &["--rooms", "500", "--rate", "50", "--hold", "20"],
    },
    Case {
        name: "nixl",
        backend: Backend::Nixl,
        scenarios: Cow::Borrowed(&["a", "b", "c", "f", "m"]),
        flags: &["--rooms", "3", "--hold", "10"],
    },
    Case {
        name: SERVERS,
        backend: Backend::Mooncake,
        scenarios: Cow::Borrowed(&["a", "c", "r", "v", "w", "x", "y"]),
        flags: &["--hold", "10", "--pause", "120", "--hang-ups", "24"],
    },
];

impl Case {
    /// What the harness is told.
    pub(super) fn arguments(&self) -> Vec<String> {
        if self.name == SERVERS {
            return self.flags.iter().map(|f| (*f).to_owned()).collect();
        }
        let mut arguments = vec!["--scenario".to_owned(), self.scenarios.join(",")];
        if self.backend == Backend::Nixl {
            arguments.extend(["--backend".to_owned(), "nixl".to_owned()]);
        }
        arguments.extend(["--pin", "--patience", "12", "--warmup", WARMUP].map(str::to_owned));
        arguments.extend(self.flags.iter().map(|f| (*f).to_owned()));
        arguments
    }
}

/// Runs a case and returns the judge's counts.
pub(super) fn run(
    case: &Case,
    attach: Attach,
    engine: &Engine,
    agent: &Path,
    agent_args: &[String],
    dir: &Path,
) -> Result<Value> {
    if dir.exists() {
        std::fs::remove_dir_all(dir).with_context(|| format!("clear {}", dir.display()))?;
    }
    std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
    if case.name == SERVERS {
        return super::servers::run(case, attach, engine, agent, agent_args, dir);
    }
    let events = dir.join("events.jsonl");
    let start_agent = || match Agent::start(agent, agent_args, &events, &dir.join("agent.log"))? {
        Start::Observing(agent) => Ok(agent),
        Start::NotPossible(why) => bail!("this host cannot be observed: {why}"),
    };
    let early = if attach == Attach::Before { Some(start_agent()?) } else { None };
    let mut harness = Harness::start("pd_harness.py", &case.arguments(), engine, dir)?;
    harness.reach("ready", STARTUP)?;
    harness.release("go")?;
    harness.reach("warm", LOAD)?;
    let mut agent = match early {
        Some(agent) => agent,
        None => start_agent()?,
    };
    // Of rooms that begin in the very moment of attaching the agent cannot know whether other ranks asked just before.
    sleep(ATTACHED);
    agent.check()?;
    harness.release("load")?;
    harness.reach("held", LOAD)?;
    agent.check()?;
    // The engine still runs: its end would make every room that is open a room with a lost peer.
    agent.stop()?;
    harness.release("end")?;
    harness.finish(END)?;
    let own = own_events(&events, dir)?;
    score(attach, &harness.truth(), &own, dir)
}

/// Copies the events of this engine.
pub(super) fn own_events(events: &Path, dir: &Path) -> Result<PathBuf> {
    let ready: Value =
        serde_json::from_slice(&std::fs::read(dir.join("ready"))?).context("the harness's ready file")?;
    let listeners =
        |process: &Value| process.get("listeners").and_then(Value::as_array).cloned().unwrap_or_default();
    let ports = ready
        .get("procs")
        .and_then(Value::as_object)
        .context("the harness's ready file names no processes")?
        .values()
        .flat_map(listeners)
        .filter_map(|port| port.as_u64());
    let text = std::fs::read_to_string(events).with_context(|| format!("read {}", events.display()))?;
    let (text, others) = Own::at(ports).events(&text)?;
    if others > 0 {
        eprintln!("   {others} events are about other engines on this host and do not count");
    }
    let own = dir.join("events.own.jsonl");
    std::fs::write(&own, text).with_context(|| format!("write {}", own.display()))?;
    Ok(own)
}

/// Compares what the agent said with what the engine did.
pub(super) fn score(attach: Attach, truth: &Path, events: &Path, dir: &Path) -> Result<Value> {
    let expect = script("agent/tests/expect.json");
    let mut rules: Value =
        serde_json::from_slice(&std::fs::read(&expect)?).context("agent/tests/expect.json")?;
    if attach == Attach::After
        && let Some(warmup) = rules.get_mut("warmup").and_then(Value::as_object_mut)
    {
        // Rooms that ended before the agent began leave it nothing to see.
        warmup.insert("silent".to_owned(), json!(true));
    }
    let expect = dir.join("expect.json");
    std::fs::write(&expect, rules.to_string()).with_context(|| format!("write {}", expect.display()))?;
    let out = Command::new("python3")
        .arg(script("agent/tests/score.py"))
        .args([truth, events])
        .args(["--json", "--expect"])
        .arg(&expect)
        .output()
        .context("start python3 to score the run")?;
    serde_json::from_slice(&out.stdout)
        .with_context(|| format!("score.py gave no result: {}", String::from_utf8_lossy(&out.stderr).trim()))
}

/// The engine under its harness.
pub(super) struct Harness {
    child: Child,
    dir: PathBuf,
}

impl Harness {
    /// Starts a harness of `xtask/engine` by its name.
    pub(super) fn start(harness: &str, arguments: &[String], engine: &Engine, dir: &Path) -> Result<Self> {
        let log = log(dir, "harness.log")?;
        let child = Command::new(&engine.python)
            .arg(script("xtask/engine").join(harness))
            .args(arguments)
            .arg("--out")
            .arg(dir.join("engine"))
            .args(["--ready-file", &path(dir, "ready"), "--wait-file", &path(dir, "go")])
            .args(["--warm-file", &path(dir, "warm"), "--load-file", &path(dir, "load")])
            .args(["--held-file", &path(dir, "held"), "--end-file", &path(dir, "end")])
            .env("NIXL_SITE", &engine.nixl)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("start the engine with {}", engine.python.display()))?;
        Ok(Self { child, dir: dir.to_path_buf() })
    }

    /// Waits until the harness has written a file.
    pub(super) fn reach(&mut self, file: &str, limit: Duration) -> Result<()> {
        let path = self.dir.join(file);
        let begun = Instant::now();
        while !path.exists() {
            if let Some(status) = self.child.try_wait()? {
                bail!(
                    "the engine ended with {status} before it was {file}; see {}/harness.log",
                    self.dir.display()
                );
            }
            if begun.elapsed() > limit {
                bail!(
                    "the engine was not {file} after {} s; see {}/harness.log",
                    limit.as_secs(),
                    self.dir.display()
                );
            }
            sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Writes a file that the harness waits for.
    pub(super) fn release(&self, file: &str) -> Result<()> {
        File::create(self.dir.join(file)).map(drop).with_context(|| format!("write {file}"))
    }

    pub(super) fn finish(&mut self, limit: Duration) -> Result<()> {
        let Some(status) = wait(&mut self.child, limit)? else {
            bail!(
                "the engine did not end within {} s; see {}/harness.log",
                limit.as_secs(),
                self.dir.display()
            );
        };
        if !status.success() {
            bail!("the engine ended with {status}; see {}/harness.log", self.dir.display());
        }
        Ok(())
    }

    pub(super) fn truth(&self) -> PathBuf {
        self.dir.join("engine/truth.jsonl")
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        // Its roles die with it (PR_SET_PDEATHSIG).
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How many rooms of a truth file belong to each scenario.
pub(super) fn rooms(dir: &Path) -> Result<Vec<(String, usize)>> {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for line in json_lines(&dir.join("engine/truth.jsonl"))? {
        if line.get("kind").and_then(Value::as_str) != Some("room") {
            continue;
        }
        let scenario = line.get("scenario").and_then(Value::as_str).unwrap_or("?");
        match counts.iter_mut().find(|(s, _)| s == scenario) {
            Some((_, n)) => *n += 1,
            None => counts.push((scenario.to_owned(), 1)),
        }
    }
    counts.sort();
    Ok(counts)
}

fn wait(child: &mut Child, limit: Duration) -> Result<Option<ExitStatus>> {
    let begun = Instant::now();
    while begun.elapsed() < limit {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        sleep(Duration::from_millis(50));
    }
    Ok(None)
}

fn log(dir: &Path, name: &str) -> Result<File> {
    let path = dir.join(name);
    File::create(&path).with_context(|| format!("create {}", path.display()))
}

fn path(dir: &Path, name: &str) -> String {
    dir.join(name).to_string_lossy().into_owned()
}
