//! `roomtrace doctor`: what this host allows, and what to do about the rest.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]

use std::fmt::Write as _;
use std::net::{SocketAddr, TcpListener};

use serde_json::{Value, json};

use super::config::{Config, Spans};
use super::{End, Failure, Outcome, gpus, network, print, remote};
use crate::engine::{self, Found};
use crate::kernel;
use crate::rooms::model::{EngineProcess, Role};

/// Prints every check; ends with 3 when one fails (this host cannot be observed), with 2 where `run` would not start with this
/// configuration.
pub(super) fn doctor(config: &Config, as_json: bool) -> Outcome {
    let checks = kernel::preflight();
    let failed = checks.iter().filter(|c| !c.ok).count();
    let prefixes = &config.capture.engine_comms;
    let found = engine::look_once(prefixes, config.engine.pod_names.clone());
    let (standing, ports) = (gpus::look_once(config), network::look_once(config));
    let obstacle = engine::obstacle(std::path::Path::new("/proc"));
    let places = places(config);
    let starts = places.iter().all(|p| !p.stops());
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
            "ok": failed == 0 && starts, "starts": starts, "checks": list, "engines": engines_json(&found, obstacle.as_deref()),
            "http": places.iter().find(|p| p.what == HTTP).map(Place::json),
            "spans": spans_json(&places),
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
        places_text(&mut out, &places, &config.spans);
        gpus::doctor_text(&mut out, standing.as_ref());
        network::doctor_text(&mut out, ports.as_ref());
        let _ = writeln!(
            out,
            "{}",
            match (failed, starts) {
                (0, true) => "this host can be observed".to_owned(),
                (0, false) =>
                    "this host can be observed, but `run` would not start with this configuration".to_owned(),
                _ => format!("{failed} of {} checks failed", checks.len()),
            }
        );
    }
    print(&out)?;
    Ok(match (failed, starts) {
        (0, true) => End::Fine,
        // As `run` ends.
        (0, false) => End::Usage,
        _ => End::CannotObserve,
    })
}

/// Engine processes as they are now; that there is none is no fault of the host.
fn engines_json(found: &std::io::Result<Found>, obstacle: Option<&str>) -> Value {
    let error = found.as_ref().err().map(ToString::to_string);
    let processes: Vec<_> = found.iter().flat_map(|f| f.processes.values()).map(process_json).collect();
    json!({"processes": processes, "error": error, "obstacle": obstacle})
}

fn process_json(p: &EngineProcess) -> Value {
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

/// What the agent's own HTTP server is called in [`Place::what`].
const HTTP: &str = "own HTTP server";

/// An address that the agent listens on.
struct Place {
    what: &'static str,
    at: SocketAddr,
    /// `run` wants it, as it is configured.
    wanted: bool,
    /// Why it cannot be had.
    taken: Option<String>,
    /// An agent that runs already has it.
    by_agent: bool,
}

impl Place {
    /// Whether `run` would not start for it. That an agent runs already is no fault of the configuration.
    const fn stops(&self) -> bool {
        self.wanted && self.taken.is_some() && !self.by_agent
    }

    fn json(&self) -> Value {
        json!({"address": self.at.to_string(), "taken": self.taken, "by_agent": self.by_agent})
    }
}

/// All of them, each tried.
fn places(config: &Config) -> Vec<Place> {
    let Spans { grpc, http, enabled, .. } = config.spans;
    let own = config.http.enabled.then_some(config.http.listen);
    let mut all: Vec<Place> = [(HTTP, own, true), ("grpc", grpc, enabled), ("http", http, enabled)]
        .into_iter()
        .filter_map(|(what, at, wanted)| {
            let at = at?;
            let taken = TcpListener::bind(at).err().map(|e| e.to_string());
            Some(Place { what, at, wanted, taken, by_agent: false })
        })
        .collect();
    if let Some(at) = own.filter(|_| all.iter().any(Place::stops)) {
        let status = remote::get(&format!("http://{at}"), "/status").map(|(_, status)| status);
        of_agent(&mut all, &status.unwrap_or_default());
    }
    all
}

/// Marks what an agent has that runs already and says `status` of itself at the address of its HTTP server.
fn of_agent(all: &mut [Place], status: &Value) {
    if !status["capture"].is_object() {
        return;
    }
    for place in all {
        let has = status["spans"][place.what].as_str();
        place.by_agent = place.taken.is_some() && (place.what == HTTP || has == Some(&place.at.to_string()));
    }
}

fn spans_json(places: &[Place]) -> Value {
    let of = places.iter().filter(|p| p.what != HTTP);
    of.map(|p| (p.what.to_owned(), p.json())).collect::<serde_json::Map<_, _>>().into()
}

fn places_text(out: &mut String, places: &[Place], spans: &Spans) {
    let when = if spans.enabled { "spans.enabled is set" } else { "spans.enabled is not set" };
    for Place { what, at, taken, by_agent, .. } in places.iter().filter(|p| p.what == HTTP) {
        let _ = match taken {
            None => writeln!(out, "ok   {what}: {at} can be had"),
            Some(_) if *by_agent => writeln!(out, "ok   {what}: {at} is that of an agent that runs already"),
            Some(why) => writeln!(
                out,
                "FAIL {what}: {at} cannot be had: {why}\n       what to do: set http.listen (--listen) to another address, or --no-http"
            ),
        };
    }
    for place in places.iter().filter(|p| p.what != HTTP) {
        let Place { what, at, taken, by_agent, .. } = place;
        let _ = match taken {
            None => writeln!(out, "ok   engines' spans: {at} ({what}) can be had ({when})"),
            Some(_) if *by_agent => {
                writeln!(out, "ok   engines' spans: {at} ({what}) is that of an agent that runs already")
            }
            // Mostly a collector listens there.
            Some(why) => writeln!(
                out,
                "{} engines' spans: {at} ({what}) cannot be had: {why} ({when}). Unless it is an agent that runs already: with \
                 spans.enabled set spans.{what} to another address, the engines' --otlp-traces-endpoint to that, and \
                 spans.forward.endpoint to whoever listens there",
                if place.stops() { "FAIL" } else { "--  " }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn place(what: &'static str, wanted: bool, taken: bool) -> Place {
        let at = SocketAddr::from(([127, 0, 0, 1], 4317));
        Place { what, at, wanted, taken: taken.then(|| "in use".to_owned()), by_agent: false }
    }

    #[test]
    fn a_place_that_is_taken_stops_run_unless_an_agent_has_it() {
        let stops = |status: &Value| {
            let mut all = [place(HTTP, true, true), place("grpc", true, true), place("http", false, true)];
            of_agent(&mut all, status);
            all.map(|p| p.stops())
        };
        assert_eq!(stops(&Value::Null), [true, true, false], "what is not wanted stops nobody");
        assert_eq!(stops(&json!({"some": "server"})), [true, true, false]);
        let agent = |grpc: &str| json!({"capture": {}, "spans": {"grpc": grpc}});
        assert_eq!(stops(&agent("127.0.0.1:4317")), [false; 3]);
        assert_eq!(stops(&agent("127.0.0.1:9999")), [false, true, false], "it has another");
        assert!(!place(HTTP, true, false).stops());
    }
}
