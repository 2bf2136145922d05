//! `roomtrace doctor`: what this host allows, and what to do about the rest.

use std::fmt::Write as _;
use std::net::SocketAddr;

use serde_json::json;

use super::config::{Config, Spans};
use super::{End, Failure, Outcome, gpus, network, print};
use crate::engine::{self, Found};
use crate::kernel;
use crate::rooms::model::{EngineProcess, Role};

/// Prints every check; ends with 3 when one fails: this host cannot be observed.
pub(super) fn doctor(config: &Config, as_json: bool) -> Outcome {
    let checks = kernel::preflight();
    let failed = checks.iter().filter(|c| !c.ok).count();
    let prefixes = &config.capture.engine_comms;
    let found = engine::look_once(prefixes, config.engine.pod_names.clone());
    let (standing, ports) = (gpus::look_once(config), network::look_once(config));
    let obstacle = engine::obstacle(std::path::Path::new("/proc"));
    let mut out = String::new();
    if as_json {
        let list: Vec<_> = checks
            .iter()
            .map(|c| {
                json!({"name": c.name, "ok": c.ok, "found": c.found, "why_needed": c.why_needed,
                       "what_to_do": (!c.ok).then_some(&c.what_to_do)})
            })
            .collect();
        let text = serde_json::to_string_pretty(&json!({
            "ok": failed == 0, "checks": list, "engines": engines_json(&found, obstacle.as_deref()),
            "spans": spans_json(&config.spans),
            "gpus": gpus::doctor_json(standing.as_ref()),
            "rdma": network::doctor_json(ports.as_ref()),
        }))
        .map_err(|e| Failure::usage(anyhow::Error::new(e)))?;
        out = text + "\n";
    } else {
        for c in &checks {
            let _ = writeln!(out, "{} {}: {}", if c.ok { "ok  " } else { "FAIL" }, c.name, c.found);
            if !c.ok {
                let _ = writeln!(out, "       needed for: {}", c.why_needed);
                let _ = writeln!(out, "       what to do: {}", c.what_to_do);
            }
        }
        engines_text(&mut out, &found, prefixes, obstacle.as_deref());
        spans_text(&mut out, &config.spans);
        gpus::doctor_text(&mut out, standing.as_ref());
        network::doctor_text(&mut out, ports.as_ref());
        let _ = writeln!(
            out,
            "{}",
            if failed == 0 {
                "this host can be observed".to_owned()
            } else {
                format!("{failed} of {} checks failed", checks.len())
            }
        );
    }
    print(&out)?;
    Ok(if failed == 0 { End::Fine } else { End::CannotObserve })
}

/// Engine processes as they are now; that there is none is no fault of the host.
fn engines_json(found: &std::io::Result<Found>, obstacle: Option<&str>) -> serde_json::Value {
    let error = found.as_ref().err().map(ToString::to_string);
    let processes: Vec<_> = found.iter().flat_map(|f| f.processes.values()).map(process_json).collect();
    json!({"processes": processes, "error": error, "obstacle": obstacle})
}

fn process_json(p: &EngineProcess) -> serde_json::Value {
    json!({
        "pid": p.pid, "server": p.server, "comm": p.comm, "ranks": p.ranks, "role": p.role.map(Role::label),
        "http_port": p.http_port, "bootstrap_port": p.bootstrap_port, "container": p.place.container,
        "pod_uid": p.place.pod_uid, "pod": p.place.name.as_ref().map(|name| &name.pod),
        "namespace": p.place.name.as_ref().map(|name| &name.namespace),
        "container_name": p.place.name.as_ref().map(|name| &name.container),
    })
}

fn engines_text(
    out: &mut String,
    found: &std::io::Result<Found>,
    prefixes: &[String],
    obstacle: Option<&str>,
) {
    match found {
        Err(error) => {
            let _ = writeln!(out, "??   engines: /proc cannot be read: {error}");
        }
        Ok(found) if found.processes.is_empty() => {
            let names = prefixes.join(", ");
            let _ =
                writeln!(out, "--   engines: none runs here now (no process whose name begins with {names})");
        }
        Ok(found) => {
            let _ = writeln!(out, "ok   engines: {} processes", found.processes.len());
            let mut all: Vec<&EngineProcess> = found.processes.values().collect();
            // Each server, then its ranks.
            all.sort_unstable_by_key(|p| (p.server, p.pid != p.server, p.pid));
            for p in all {
                let _ = writeln!(out, "       {}", process_text(p));
            }
        }
    }
    if let Some(why) = obstacle {
        let _ = writeln!(out, "       there may be more: {why}");
    }
}

/// Addresses that the receiver of engines' spans is to have, and why one cannot be had.
fn span_addresses(spans: &Spans) -> impl Iterator<Item = (&'static str, SocketAddr, Option<String>)> {
    let Spans { grpc, http, .. } = *spans;
    let tried = |at: SocketAddr| std::net::TcpListener::bind(at).err().map(|e| e.to_string());
    [("grpc", grpc), ("http", http)].into_iter().filter_map(move |(name, at)| Some((name, at?, tried(at?))))
}

fn spans_json(spans: &Spans) -> serde_json::Value {
    span_addresses(spans)
        .map(|(name, at, error)| (name.to_owned(), json!({"address": at.to_string(), "taken": error})))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

/// That one is taken is no fault of the host: a collector mostly listens there, or an agent that runs already.
fn spans_text(out: &mut String, spans: &Spans) {
    let when = if spans.enabled { "spans.enabled is set" } else { "spans.enabled is not set" };
    for (name, at, error) in span_addresses(spans) {
        let _ = match error {
            None => writeln!(out, "ok   engines' spans: {at} ({name}) can be had ({when})"),
            Some(why) => writeln!(
                out,
                "--   engines' spans: {at} ({name}) cannot be had: {why} ({when}). Unless it is an agent that runs already: with \
                 spans.enabled set spans.{name} to another address, the engines' --otlp-traces-endpoint to that, and \
                 spans.forward.endpoint to whoever listens there"
            ),
        };
    }
}

fn process_text(p: &EngineProcess) -> String {
    let mut line = format!("pid {} {}", p.pid, p.comm);
    if let Some(ranks) = &p.ranks {
        let _ = write!(line, " {ranks}");
    }
    if p.pid == p.server {
        let _ = write!(line, ", {} engine", p.role.map_or("role unknown,", Role::label));
        if let Some(port) = p.http_port {
            let _ = write!(line, ", HTTP port {port}");
        }
    } else {
        let _ = write!(line, ", of {}", p.server);
    }
    if let Some(container) = &p.place.container {
        let _ = write!(line, ", container {}", container.get(..12).unwrap_or(container));
    }
    if let Some(name) = &p.place.name {
        let _ = write!(line, ", pod {}/{}", name.namespace, name.pod);
    } else if let Some(pod) = &p.place.pod_uid {
        let _ = write!(line, ", pod {pod}");
    }
    line
}
