//! The spans of the two real servers: sent to the agent through a tap, handed on by it to a sink, and joined to the rooms.
//!
//! `xtask/engine/otlp_tap.py` is tap and sink. What the agent took must come out of it unchanged, and every room that both
//! servers finished must carry their spans.

use std::collections::{BTreeMap, HashMap};
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
    pub(super) fn wrong(&self, truth: &str) -> Result<Vec<String>> {
        let taken = std::fs::read_to_string(&self.taken).context("read what the tap took down")?;
        let traces = std::fs::read_to_string(&self.traces).context("read the agent's traces")?;
        let mut wrong = unlike(&taken);
        wrong.extend(unjoined(truth, &told(&traces)?)?);
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
    if (lost, new) == (0, 0) {
        eprintln!("   {went_in} requests with spans were handed on byte for byte");
        return Vec::new();
    }
    vec![format!(
        "of {went_in} requests with spans {came_out} were handed on: {lost} not or not as they came, {} of another content",
        -new
    )]
}

/// What the agent's traces say of the servers' requests of one room, by their role.
type Told = HashMap<String, Request>;

/// One request of a server as the agent tells it (its span `engine_request`).
struct Request {
    rid: String,
    stages: Vec<String>,
    /// The server's own trace.
    linked: bool,
}

/// What the agent's traces say of each room.
fn told(traces: &str) -> Result<HashMap<String, Told>> {
    let mut rooms: HashMap<String, Told> = HashMap::new();
    let many = |v: &Value, key: &str| v[key].as_array().cloned().unwrap_or_default();
    for line in lines(traces) {
        let line = line.context("the agent's traces")?;
        let resources = many(&line, "resourceSpans").into_iter();
        let spans = resources.flat_map(|r| many(&r, "scopeSpans")).flat_map(|s| many(&s, "spans"));
        for span in spans.filter(|s| s["name"] == "engine_request") {
            let attribute = |key: &str| {
                let found = many(&span, "attributes").into_iter().find(|a| a["key"] == key)?;
                Some(found["value"]["stringValue"].as_str()?.to_owned())
            };
            let (Some(room), Some(role)) = (attribute("sglang.pd.room"), attribute("sglang.pd.role")) else {
                continue;
            };
            let name = |event: Value| Some(event["name"].as_str()?.to_owned());
            let request = Request {
                rid: attribute("sglang.rid").unwrap_or_default(),
                stages: many(&span, "events").into_iter().filter_map(name).collect(),
                linked: !many(&span, "links").is_empty(),
            };
            rooms.entry(room).or_default().insert(role, request);
        }
    }
    Ok(rooms)
}

/// Rooms that both servers finished, of which the agent does not say what their spans say.
fn unjoined(truth: &str, told: &HashMap<String, Told>) -> Result<Vec<String>> {
    let (mut wrong, mut rooms) = (Vec::new(), 0_u32);
    for row in lines(truth) {
        let row = row.context("the truth file")?;
        // Those that opened the connections may be older than the agent.
        if row["kind"] != "room" || row["label"] != "success" || row["scenario"] == "warmup" {
            continue;
        }
        rooms += 1;
        let room = row["room"].to_string();
        let why = told.get(&room).map_or_else(|| Some("no spans".to_owned()), |told| missing(&row, told));
        wrong.extend(why.map(|why| format!("room {room} ({}): {why}", row["rid"])));
    }
    if wrong.is_empty() {
        eprintln!(
            "   {rooms} of {rooms} finished rooms carry the spans of both servers and link to their traces"
        );
    }
    Ok(wrong)
}

fn missing(row: &Value, told: &Told) -> Option<String> {
    for (role, stages) in STAGES {
        let Some(request) = told.get(role) else {
            return Some(format!("no spans of {role}"));
        };
        if row["rid"] != request.rid.as_str() {
            return Some(format!("{role}'s spans are of request {}", request.rid));
        }
        if !request.linked {
            return Some(format!("its trace does not link to {role}'s"));
        }
        if let Some(stage) = stages.iter().find(|s| !request.stages.iter().any(|has| has == *s)) {
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
        let attribute =
            |key: &str, value: &str| format!(r#"{{"key":"{key}","value":{{"stringValue":"{value}"}}}}"#);
        let span = |role: &str, rid: &str, stages: &[&str], links: &str| {
            let attributes = [
                attribute("sglang.pd.room", "5"),
                attribute("sglang.pd.role", role),
                attribute("sglang.rid", rid),
            ];
            let events: Vec<String> = stages.iter().map(|s| format!(r#"{{"name":"{s}"}}"#)).collect();
            let (attributes, events) = (attributes.join(","), events.join(","));
            format!(
                r#"{{"name":"engine_request","attributes":[{attributes}],"events":[{events}],"links":[{links}]}}"#
            )
        };
        let n = |spans: &[String]| {
            let spans = spans.join(",");
            let line = format!(r#"{{"resourceSpans":[{{"scopeSpans":[{{"spans":[{spans}]}}]}}]}}"#);
            unjoined(truth, &told(&line).unwrap()).unwrap().len()
        };
        let [(p, prefill), (d, decode)] = STAGES;
        let of_prefill = span(p, "a", &prefill, "{}");
        assert_eq!(n(&[of_prefill.clone(), span(d, "a", &decode, "{}")]), 0);
        assert_eq!(n(&[of_prefill.clone(), span(d, "a", &decode, "")]), 1, "no link");
        assert_eq!(n(&[of_prefill.clone(), span(d, "a", &decode[..1], "{}")]), 1, "a stage is missing");
        assert_eq!(n(&[of_prefill.clone(), span(d, "b", &decode, "{}")]), 1, "another request");
        assert_eq!(n(&[of_prefill]), 1, "one server's");
        assert_eq!(n(&[]), 1);
    }
}
