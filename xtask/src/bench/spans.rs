//! The receiver of the engines' spans under load: spans of rooms that a load of the workload makes, sent over gRPC and HTTP, joined
//! and handed on. The agent's example `span_load` sends them and takes them at the other end.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{Build, agent, cpu, open, resident};
use crate::agent::Agent;
use crate::install;

/// Rooms per second, each with nine spans of either engine, and seconds.
const LOAD: (u32, u64) = (1200, 30);

/// Spans a second that must be joined and handed on by one core.
const BAR: f64 = 20_000.0;

/// How the load and the agent meet.
struct Load {
    child: Child,
    said: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Load {
    /// Starts it; also where it takes what the agent hands on.
    fn start(build: Build, [grpc, http]: [SocketAddr; 2]) -> Result<(Self, String)> {
        build.build(&["roomtrace", "--example", "span_load"])?;
        let (rate, seconds) = LOAD;
        let mut child = Command::new(build.program("examples/span_load"))
            .args(["--grpc", &grpc.to_string(), "--http", &http.to_string()])
            // That of the workload: its room numbers are made from it.
            .args(["--seed", &std::process::id().to_string()])
            .args(["--rate", &rate.to_string(), "--seconds", &seconds.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start span_load")?;
        let said = BufReader::new(child.stdout.take().context("span_load has no output")?).lines();
        let mut load = Self { child, said };
        let sink = load.line()?;
        Ok((load, sink))
    }

    fn line(&mut self) -> Result<String> {
        self.said.next().context("span_load ended")?.context("read what span_load says")
    }

    fn go(&mut self) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("span_load takes nothing")?;
        writeln!(stdin, "go").context("tell span_load to begin")
    }

    /// What it counted, once it is done.
    fn counts(mut self) -> Result<Value> {
        serde_json::from_str(&self.line()?).context("the figures of span_load")
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Measures it.
pub(super) fn spans(build: Build) -> Result<()> {
    let held = [TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?];
    let [grpc, http] = [held[0].local_addr()?, held[1].local_addr()?];
    let (mut load, sink) = Load::start(build, [grpc, http])?;
    let dir = install::target().join("bench");
    std::fs::create_dir_all(&dir)?;
    let config = dir.join("spans.yaml");
    let text = format!(
        "spans:\n  enabled: true\n  grpc: {grpc}\n  http: {http}\n  forward:\n    endpoint: http://{sink}\n    protocol: grpc\n"
    );
    std::fs::write(&config, text).with_context(|| format!("write {}", config.display()))?;
    drop(held);
    let agent = agent(build, &["--config".to_owned(), config.to_string_lossy().into_owned()])?;
    let (rate, seconds) = (LOAD.0.to_string(), LOAD.1.to_string());
    let rooms = ["load", "--http", "false", "--no-kv", "--rate", &rate, "--duration", &seconds];
    let mut workload = open(build, &rooms)?;
    let before = (Instant::now(), cpu(agent.pid())?);
    load.go()?;
    let results = workload.results();
    let memory = resident(agent.pid())?;
    let counts = load.counts()?;
    let (took, used) = (before.0.elapsed(), cpu(agent.pid())? - before.1);
    results?;
    workload.end()?;
    // Metrics are of the last second.
    std::thread::sleep(Duration::from_secs(2));
    print(&agent, &counts, took, used, memory)?;
    agent.stop()
}

fn print(agent: &Agent, counts: &Value, took: Duration, used: f64, memory: f64) -> Result<()> {
    let figure = |key: &str| counts[key].as_f64().unwrap_or(0.0);
    let metric =
        |name: &str, labels: &[&str]| Ok::<_, anyhow::Error>(agent.metric(name, labels)?.unwrap_or(0.0));
    let seconds = figure("seconds");
    let per_second = figure("spans") / seconds;
    let (share, told) = (used / took.as_secs_f64() * 100.0, "bar: at least 20 000, by one core");
    println!("spans taken                      {per_second:>10.0} /s for {seconds:.1} s ({told})");
    println!(
        "of requests                      {:>10.0} /s, {:.1} MB/s",
        figure("requests") / seconds,
        figure("bytes") / seconds / 1e6
    );
    println!("agent CPU, following rooms too   {share:>10.1} % of a core over {:.1} s", took.as_secs_f64());
    println!(
        "spans for one core               {:>10.0} /s (all of that CPU taken for spans)",
        figure("spans") / used.max(0.01)
    );
    println!("resident memory under load       {memory:>10.1} MiB");
    for result in ["joined", "room_unknown", "without_room"] {
        // Two engines' requests for each room.
        let n = metric("roomtrace_spans_engine_requests_total", &[&format!("result=\"{result}\"")])?;
        println!("engine requests, {result:15} {n:>10.0}");
    }
    println!("requests turned away             {:>10.0}", figure("turned_away"));
    println!("requests that the load held back {:>10.0} (it could not keep up)", figure("late"));
    println!(
        "spans dropped on their way       {:>10.0}",
        metric("roomtrace_export_dropped_total", &["signal=\"spans\""])?
    );
    println!("losses counted                   {:>10.0}", metric("roomtrace_capture_lost_total", &[])?);
    println!(
        "bytes handed on                  {:>10.0} of {:.0}",
        figure("handed_on_bytes"),
        figure("bytes")
    );
    if counts["handed_on_bytes"] != counts["bytes"] {
        bail!("what was handed on is not what was taken");
    }
    if per_second < BAR {
        println!("fewer spans than the bar were sent: the load could not keep up");
    }
    Ok(())
}
