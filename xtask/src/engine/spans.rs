//! The spans of the two real servers: sent to the agent through a tap, handed on by it to a sink, and joined to the rooms.
//!
//! `xtask/engine/otlp_tap.py` is tap and sink. What the agent took must come out of it unchanged, and every room that both
//! servers finished must carry their spans.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use serde_json::Value;

use super::script;
use super::setup::Engine;
use crate::own::lines;

/// Stages that a request of each role has gone through when it is over (SGLang 0.5.23,
/// `srt/observability/req_time_stats.py`).
const STAGES: [(&str, [&str; 2]); 2] = [
    ("prefill", ["prefill_forward", "prefill_transfer_kv_cache"]),
    ("decode", ["decode_transferred", "decode_forward"]),
];

/// Tap and sink, running, and where the agent says what it made of the spans.
pub(super) struct Spans {
    /// Where the servers send.
    pub(super) tap: SocketAddr,
    config: PathBuf,
    traces: PathBuf,
    taken: PathBuf,
    child: Child,
}

impl Spans {
    /// Starts tap and sink, and writes what the agent is to be told.
    pub(super) fn prepare(engine: &Engine, sites: &Path, dir: &Path) -> Result<Self> {
        let mut held = Vec::new();
        for _ in 0..3 {
            held.push(TcpListener::bind("127.0.0.1:0").context("find a free port")?);
        }
        let ports = held.iter().map(TcpListener::local_addr).collect::<std::io::Result<Vec<_>>>()?;
        drop(held);
        let [tap, sink, agent] = ports[..] else { unreachable!("three were asked for") };
        let [config, taken, traces] = ["agent.yaml", "spans.taken", "traces.json"].map(|name| dir.join(name));
        let text = format!(
            "spans:\n  enabled: true\n  grpc: {agent}\n  http: null\n  forward:\n    endpoint: http://{sink}\n"
        );
        std::fs::write(&config, text).with_context(|| format!("write {}", config.display()))?;
        let child = Command::new(&engine.python)
            .arg(script("xtask/engine/otlp_tap.py"))
            .args(["--tap", &tap.to_string(), "--sink", &sink.to_string(), "--agent", &agent.to_string()])
            .arg("--out")
            .arg(&taken)
            .env("PYTHONPATH", sites)
            .stdin(Stdio::null())
            .spawn()
            .context("start the tap for spans")?;
        Ok(Self { tap, config, traces, taken, child })
    }

    /// What turns the agent's receiver on.
    pub(super) fn agent_arguments(&self) -> Vec<String> {
        let path = |p: &Path| p.to_string_lossy().into_owned();
        vec!["--config".to_owned(), path(&self.config), "--otlp-file".to_owned(), path(&self.traces)]
    }

    /// What is wrong with the spans, once the agent has ended; empty: nothing.
    pub(super) fn wrong(&self, truth: &str, events: &str) -> Result<Vec<String>> {
        let taken = std::fs::read_to_string(&self.taken).context("read what the tap took down")?;
        let traces = std::fs::read_to_string(&self.traces).context("read the agent's traces")?;
        let mut wrong = unlike(&taken);
        wrong.extend(unjoined(truth, events, &links(&traces)?)?);
        Ok(wrong)
    }
}

impl Drop for Spans {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Requests that went in and did not come out the same, or the other way round.
fn unlike(taken: &str) -> Vec<String> {
    let mut balance: BTreeMap<&str, i64> = BTreeMap::new();
    let (mut went_in, mut came_out) = (0_u64, 0_u64);
    for line in taken.lines() {
        let Some((at, what)) = line.split_once(' ') else { continue };
        let step = if at == "tap" { 1 } else { -1 };
        *balance.entry(what).or_default() += step;
        if step > 0 { went_in += 1 } else { came_out += 1 }
    }
    if went_in == 0 {
        return vec!["the servers sent no spans".to_owned()];
    }
    let lost: i64 = balance.values().filter(|n| **n > 0).sum();
    let new: i64 = balance.values().filter(|n| **n < 0).sum();
    let mut wrong = Vec::new();
    if (lost, new) != (0, 0) {
        wrong.push(format!(
            "of {went_in} requests with spans {came_out} were handed on: {lost} not or not as they came, {} of another content",
            -new
        ));
    } else {
        eprintln!("   {went_in} requests with spans were handed on byte for byte");
    }
    wrong
}

/// Traces that each trace of the agent links to.
fn links(traces: &str) -> Result<HashMap<String, BTreeSet<String>>> {
    let mut links: HashMap<String, BTreeSet<String>> = HashMap::new();
    for line in lines(traces) {
        let line = line.context("the agent's traces")?;
        let many = |v: &Value, key: &str| v[key].as_array().cloned().unwrap_or_default();
        for resource in many(&line, "resourceSpans") {
            for scope in many(&resource, "scopeSpans") {
                for span in many(&scope, "spans") {
                    let trace = span["traceId"].as_str().unwrap_or_default().to_owned();
                    let to = many(&span, "links")
                        .into_iter()
                        .filter_map(|l| Some(l["traceId"].as_str()?.to_owned()));
                    links.entry(trace).or_default().extend(to);
                }
            }
        }
    }
    Ok(links)
}

/// Rooms that both servers finished, of which the agent does not say what their spans say.
fn unjoined(truth: &str, events: &str, links: &HashMap<String, BTreeSet<String>>) -> Result<Vec<String>> {
    let mut said: HashMap<String, Value> = HashMap::new();
    for event in lines(events) {
        let event = event.context("the agent's events")?;
        if let Some(room) = event["room"].as_str() {
            said.insert(room.to_owned(), event);
        }
    }
    let (mut wrong, mut rooms) = (Vec::new(), 0_u32);
    for row in lines(truth) {
        let row = row.context("the truth file")?;
        // Those that opened the connections may be older than the agent.
        if row["kind"] != "room" || row["label"] != "success" || row["scenario"] == "warmup" {
            continue;
        }
        rooms += 1;
        let room = row["room"].to_string();
        let Some(event) = said.get(&room) else {
            wrong.push(format!("room {room} ({}) was not seen", row["rid"]));
            continue;
        };
        wrong.extend(missing(&row, event, links).map(|why| format!("room {room} ({}): {why}", row["rid"])));
    }
    if wrong.is_empty() {
        eprintln!(
            "   {rooms} of {rooms} finished rooms carry the spans of both servers and link to their traces"
        );
    }
    Ok(wrong)
}

fn missing(row: &Value, event: &Value, links: &HashMap<String, BTreeSet<String>>) -> Option<String> {
    let scheduler = &event["scheduler"];
    if scheduler.is_null() {
        return Some("no spans".to_owned());
    }
    let linked = event["trace_id"].as_str().and_then(|t| links.get(t));
    for (role, stages) in STAGES {
        let requests = scheduler["requests"].as_array().map(Vec::as_slice).unwrap_or_default();
        let Some(request) = requests.iter().find(|r| r["role"] == role) else {
            return Some(format!("no spans of {role}"));
        };
        if request["rid"] != row["rid"] {
            return Some(format!("{role}'s spans are of request {}", request["rid"]));
        }
        if !linked.is_some_and(|to| request["trace_id"].as_str().is_some_and(|t| to.contains(t))) {
            return Some(format!("its trace does not link to {role}'s"));
        }
        let has = |stage: &str| {
            let all = scheduler["stages"].as_array().map(Vec::as_slice).unwrap_or_default();
            all.iter().any(|s| s["role"] == role && s["stage"] == stage)
        };
        if let Some(stage) = stages.iter().find(|s| !has(s)) {
            return Some(format!("{role} tells no stage {stage}"));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn what_goes_in_must_come_out() {
        assert!(unlike("tap 3 aa\nsink 3 aa\ntap 3 aa\nsink 3 aa\n").is_empty());
        assert_eq!(unlike("").len(), 1, "nothing was sent");
        assert_eq!(unlike("tap 3 aa\ntap 3 aa\nsink 3 aa\n").len(), 1, "one was lost");
        assert_eq!(unlike("tap 3 aa\nsink 3 ab\n").len(), 1, "one was changed");
        assert_eq!(unlike("tap 3 aa\nsink 3 aa\nsink 3 aa\n").len(), 1, "one was sent twice");
    }

    #[test]
    fn a_finished_room_has_spans_and_links() {
        let truth = r#"{"kind":"room","room":5,"rid":"a","label":"success","scenario":"a"}"#;
        let stages = |role: &str, names: [&str; 2]| {
            names.map(|n| format!(r#"{{"stage":"{n}","role":"{role}"}}"#)).join(",")
        };
        let stages = STAGES.map(|(role, names)| stages(role, names)).join(",");
        let of =
            |role: &str, rid: &str| format!(r#"{{"role":"{role}","rid":"{rid}","trace_id":"t-{role}"}}"#);
        let event = |requests: &str, stages: &str| {
            format!(
                r#"{{"room":"5","trace_id":"ours","scheduler":{{"requests":[{requests}],"stages":[{stages}]}}}}"#
            )
        };
        let both = [of("prefill", "a"), of("decode", "a")].join(",");
        let to: BTreeSet<String> = ["t-prefill", "t-decode"].map(str::to_owned).into();
        let all = HashMap::from([("ours".to_owned(), to)]);
        let n = |event: &str, links: &_| unjoined(truth, event, links).unwrap().len();
        assert_eq!(n(&event(&both, &stages), &all), 0);
        assert_eq!(n(&event(&both, &stages), &HashMap::new()), 1, "no links");
        assert_eq!(n(&event(&both, ""), &all), 1, "no stages");
        assert_eq!(n(&event(&of("prefill", "a"), &stages), &all), 1, "one server's");
        assert_eq!(
            n(&event(&[of("prefill", "a"), of("decode", "b")].join(","), &stages), &all),
            1,
            "another request"
        );
        assert_eq!(n(r#"{"room":"5","scheduler":null}"#, &all), 1);
        assert_eq!(n("", &all), 1, "not seen");
    }
}
