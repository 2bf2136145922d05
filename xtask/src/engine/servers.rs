//! Two complete real servers with their router: every request is followed from begin to end at both, hang-ups and a pause
//! page nobody, the one pin is told from the hang-ups beside it, and an agent that comes when it is there already says so.
//!
//! `xtask/engine/pd_servers.py` runs the servers and their clients, with the same files to go on by as the other harness.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::case::{ATTACHED, Attach, Case, END, Harness, LOAD, STARTUP, own_events, score};
use super::setup::{self, Engine};
use super::spans::Spans;
use crate::agent::{Agent, Start};
use crate::own::lines;
use crate::requests;

/// How long the pause and the load may take, on a machine that does nothing else: they take 5 minutes.
const SERVED: Duration = Duration::from_mins(20);
/// How long an agent has to find what was there before it (design, promise of the late start).
const FOUND_WITHIN: Duration = Duration::from_mins(1);

/// Runs the case and returns the judge's counts, with what else was wrong among them.
pub(super) fn run(
    case: &Case,
    attach: Attach,
    engine: &Engine,
    agent: &Path,
    agent_args: &[String],
    dir: &Path,
) -> Result<Value> {
    let sites = setup::router()?;
    let start = |name: &str, arguments: &[String]| match Agent::start(
        agent,
        arguments,
        &dir.join(name).with_extension("jsonl"),
        &dir.join(name).with_extension("log"),
    )? {
        Start::Observing(agent) => Ok(agent),
        Start::NotPossible(why) => bail!("this host cannot be observed: {why}"),
    };
    let spans = Spans::prepare(engine, &sites, dir)?;
    let first = || {
        let arguments = [agent_args, &spans.agent_arguments()].concat();
        start("events", &arguments)
    };
    let early = if attach == Attach::Before { Some(first()?) } else { None };
    let mut arguments = case.arguments();
    arguments.extend(["--otlp".to_owned(), spans.tap.to_string()]);
    arguments.extend(["--extra-site".to_owned(), sites.to_string_lossy().into_owned()]);
    let mut harness = Harness::start("pd_servers.py", &arguments, engine, dir)?;
    harness.reach("ready", STARTUP)?;
    harness.release("go")?;
    harness.reach("warm", LOAD)?;
    let mut agent = match early {
        Some(agent) => agent,
        None => first()?,
    };
    sleep(ATTACHED);
    agent.check()?;
    harness.release("load")?;
    harness.reach("held", SERVED)?;
    agent.check()?;
    agent.stop()?;
    let found = ghost(start("ghost", agent_args)?, dir);
    harness.release("end")?;
    harness.finish(END)?;
    let own = own_events(&dir.join("events.jsonl"), dir)?;
    let events = std::fs::read_to_string(&own).context("read the agent's events")?;
    let truth = numbered(&harness.truth(), &events)?;
    let mut counts = score(attach, &harness.truth(), &own, dir)?;
    // Those that opened the connections are older than an agent that comes after them.
    let asked = truth.lines().filter(|row| attach == Attach::Before || !row.contains("\"rid\":\"warmup-"));
    let told = requests::wrong(&asked.collect::<Vec<_>>().join("\n"), &events)?;
    let mut more: Vec<Value> = told.into_iter().map(|why| json!({"what": "request", "why": why})).collect();
    more.extend(spans.wrong(&truth)?.into_iter().map(|why| json!({"what": "spans", "why": why})));
    if let Err(why) = found {
        more.push(json!({"what": "an agent that came later", "why": why.to_string()}));
    }
    let wrong = counts.get_mut("wrong").and_then(Value::as_array_mut).context("score.py gave no faults")?;
    wrong.append(&mut more);
    Ok(counts)
}

/// Rooms that the router drew have no number in the truth: they get the one that the agent gave their request's id, so that
/// one that it missed stays unknown to the judge and counts as wrong. Returns the new truth.
fn numbered(truth: &Path, events: &str) -> Result<String> {
    let mut rooms: HashMap<String, Value> = HashMap::new();
    for event in lines(events) {
        let event = event.context("the agent's events")?;
        if let (Some(rid), Some(room)) = (event["request"]["rid"].as_str(), event["room"].as_str()) {
            rooms.insert(rid.to_owned(), room.parse::<u64>().context("a room number")?.into());
        }
    }
    let mut text = String::new();
    for row in lines(&std::fs::read_to_string(truth).context("read the clients' record")?) {
        let mut row = row.context("the clients' record")?;
        if row["side"] == "router" {
            // One request of a client is two of the router's: one at each server.
            for side in ["prefill", "decode"] {
                let mut leg = row.clone();
                leg["room"] = row["rid"].as_str().and_then(|rid| rooms.get(rid)).cloned().unwrap_or_default();
                leg["side"] = side.into();
                writeln!(text, "{leg}")?;
            }
            continue;
        }
        if row["kind"] == "room" && row["room"].is_null() {
            row["room"] = row["rid"].as_str().and_then(|rid| rooms.get(rid)).cloned().unwrap_or_default();
        }
        writeln!(text, "{row}")?;
    }
    std::fs::write(truth, &text).context("write the clients' record")?;
    Ok(text)
}

/// An agent that comes when the pin is there already and nothing else runs finds that prefill counts a request that no room
/// explains.
fn ghost(mut agent: Agent, dir: &Path) -> Result<()> {
    let ready: Value = serde_json::from_slice(&std::fs::read(dir.join("ready"))?).context("ready")?;
    let prefill = &ready["procs"]["prefill"]["pid"];
    let begun = Instant::now();
    while begun.elapsed() < FOUND_WITHIN {
        agent.check()?;
        let said =
            std::fs::read_to_string(dir.join("ghost.jsonl")).context("read the second agent's events")?;
        // The last line may be half written.
        let is_it = |event: &Value| {
            event["event"] == "finding_opened"
                && event["class"] == "gauge_unexplained"
                && event["engine"]["pid"] == *prefill
        };
        if said.lines().filter_map(|line| serde_json::from_str(line).ok()).any(|event: Value| is_it(&event)) {
            eprintln!(
                "   the pin that was there before the agent: found after {} s",
                begun.elapsed().as_secs()
            );
            return agent.stop();
        }
        sleep(Duration::from_millis(200));
    }
    bail!("no `gauge_unexplained` about prefill within {} s", FOUND_WITHIN.as_secs())
}
