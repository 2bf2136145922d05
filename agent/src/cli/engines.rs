//! The engines' side of `run`: hands what the engine threads find to pipeline and kernel.
//!
//! Runs on the observing thread: takes a bounded number of reports per turn and never waits.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::{Value, json};

use super::config::Config;
use crate::engine::{self, Report, Settings};
use crate::event::Mono;
use crate::kernel::{Capture, KernelError};
use crate::pipeline::Pipeline;
use crate::rooms::model::{EngineGauges, EngineProcess, Input};

/// Reports taken in one turn.
const BUDGET: usize = 256;

/// Connections asked about at a time, as [`Capture::ask`] takes them.
const ASKS: usize = 64;

/// Engine processes of this host.
pub(super) struct Engines {
    threads: Option<engine::Engines>,
    /// What the names begin with by which the kernel side knows engine processes.
    prefixes: Vec<String>,
    /// Why not all of them can be seen.
    obstacle: Option<String>,
    /// Those that were reported and live.
    known: BTreeSet<u32>,
    /// Those that showed themselves by their messages and were looked for.
    looked_for: BTreeSet<u32>,
    /// Pins that had been raised by the last turn.
    pins: u64,
}

impl Engines {
    /// Starts looking. Where that cannot be, it is said once and the agent does without.
    pub(super) fn start(config: &Config) -> Self {
        let settings = Settings {
            prefixes: config.capture.engine_comms.clone(),
            ask_every: config.engine.scrape.then_some(config.engine.interval),
            proc: "/proc".into(),
            pod_names: config.engine.pod_names.clone(),
        };
        let obstacle = engine::obstacle(Path::new("/proc"));
        if let Some(why) = &obstacle {
            tracing::warn!("roles, containers and ranks of engines may stay unknown: {why}");
        }
        let threads = engine::Engines::start(&settings)
            .inspect_err(|error| tracing::warn!(%error, "engine processes are not looked for"))
            .ok();
        let prefixes = settings.prefixes;
        Self { threads, prefixes, obstacle, known: BTreeSet::new(), looked_for: BTreeSet::new(), pins: 0 }
    }

    /// Hands on what was found since the last turn.
    pub(super) fn turn(&mut self, at: Mono, pipeline: &mut Pipeline, capture: &mut Capture) {
        let Some(threads) = &self.threads else { return };
        let mut grew = false;
        for report in threads.reports().take(BUDGET) {
            match report {
                Report::Process(process) => {
                    pipeline.tell(&Input::Process { at, process: &process });
                    let server = process.pid == process.server;
                    // Ranks are known to the kernel by their names; the server above them and its workers are not.
                    let named = self.prefixes.iter().any(|prefix| process.comm.starts_with(prefix));
                    if self.known.insert(process.pid) && (server || !named) {
                        grew |= told(capture.watch_process(process.pid)) == Some(true);
                        if server && process.ranks.is_some() {
                            warn_without_server(&process);
                        }
                    }
                }
                Report::Gone(pid) => {
                    self.known.remove(&pid);
                    pipeline.forget_process(pid);
                    capture.forget_process(pid);
                }
                Report::Gauges(gauges) => pipeline.tell(&Input::Gauges { at, gauges: &gauges }),
            }
        }
        // What engines said before a room was overdue may be what keeps its verdict `possible`.
        let pins = pipeline.rooms().pins_raised();
        if std::mem::replace(&mut self.pins, pins) < pins {
            threads.ask_soon();
        }
        if grew {
            // What the new ones have open already.
            told(capture.search());
        }
    }

    /// What is due once a second.
    pub(super) fn second(&mut self, pipeline: &mut Pipeline, capture: &mut Capture) {
        let mut asks = pipeline.rooms().asks();
        asks.truncate(ASKS);
        if !asks.is_empty() {
            told(capture.ask(&asks));
        }
        if let Ok(counters) = capture.counters() {
            pipeline.mptcp_met(counters.mptcp);
        }
        let Some(threads) = &self.threads else { return };
        self.looked_for.retain(|pid| pipeline.processes().contains_key(pid));
        let strangers = pipeline.processes().keys().filter(|pid| !self.known.contains(*pid));
        let before = self.looked_for.len();
        self.looked_for.extend(strangers);
        if self.looked_for.len() > before {
            threads.look_soon();
        }
    }

    /// Their part of `/status`.
    pub(super) fn status(&self, pipeline: &Pipeline) -> Value {
        let Some(threads) = &self.threads else { return Value::Null };
        let standing = threads.standing();
        let processes = pipeline.rooms().engine_processes().map(|(p, role)| {
            json!({
                "pid": p.pid, "server": p.server, "comm": p.comm, "ranks": p.ranks,
                "role": role.map(crate::rooms::model::Role::label), "http_port": p.http_port,
                "bootstrap_port": p.bootstrap_port, "container": p.place.container, "pod_uid": p.place.pod_uid,
                "pod": p.place.name.as_ref().map(|name| &name.pod),
                "namespace": p.place.name.as_ref().map(|name| &name.namespace),
                "container_name": p.place.name.as_ref().map(|name| &name.container),
            })
        });
        let asked: Vec<Value> = standing.asked.values().map(gauges).collect();
        json!({
            "processes": processes.collect::<Vec<_>>(), "asked": asked, "obstacle": self.obstacle,
            "looks": standing.looks, "last_look_ms": millis(standing.look_took),
            "looks_ms": millis(standing.looks_took), "looked_at": standing.looked_at,
            "look_error": standing.look_error, "left_out": standing.left_out, "reports_held": standing.reports_held,
        })
    }
}

/// A rank that is at the top of its own engine has no HTTP server that could be found.
fn warn_without_server(rank: &EngineProcess) {
    tracing::warn!(
        pid = rank.pid,
        comm = rank.comm,
        ranks = rank.ranks.as_deref(),
        "the HTTP server of this engine rank is not recognised, so its requests are not read and its counts not asked for (its \
         messages are read): its parent process is no Python in the same container, or has ended; look at `ps -o ppid= -p PID`, \
         and start the engine as `python -m sglang.launch_server` or from a Python script"
    );
}

/// What one engine said last.
fn gauges(g: &EngineGauges) -> Value {
    json!({
        "server": g.server, "address": g.address.map(|a| a.to_string()), "error": g.error, "version": g.version,
        "role": g.role.map(crate::rooms::model::Role::label), "inflight": g.inflight, "bootstrap": g.bootstrap,
        "waiting": g.waiting, "running": g.running, "paused": g.paused, "progress": g.progress, "stale": g.stale,
    })
}

fn millis(duration: std::time::Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// A refused request to the kernel side costs one answer, not the agent.
pub(super) fn told<T>(result: Result<T, KernelError>) -> Option<T> {
    result.inspect_err(|error| tracing::warn!(%error, "could not tell the kernel programs")).ok()
}
