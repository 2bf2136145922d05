//! Traces as Jaeger's own API shows them, and which of them the gateways were to keep.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::agent::get;
use crate::dashboards::SERVICES;
use crate::prometheus::escaped;

/// Where the agents' spans say how much of a room was seen.
pub(super) const COMPLETENESS: &str = "sglang.pd.completeness";

/// A span in Jaeger.
#[derive(Debug)]
pub(super) struct Span {
    pub(super) name: String,
    /// `host.id` of who made it.
    pub(super) host: String,
    pub(super) error: Option<String>,
    /// How much of the room the agent saw ([`COMPLETENESS`]).
    pub(super) completeness: Option<String>,
    /// Traces that it has links to, its own left out.
    pub(super) links: Vec<String>,
}

/// All traces by id.
pub(super) type Traces = BTreeMap<String, Vec<Span>>;

/// Everything that Jaeger has of rooms.
pub(super) fn all(jaeger: SocketAddr) -> Result<Traces> {
    let mut all = Traces::new();
    for service in SERVICES {
        // A trace comes whole, whoever is asked for.
        all.extend(search(jaeger, &format!("service={service}&limit=100000"))?);
    }
    Ok(all)
}

/// Traces of a room as the dashboard looks for them, by its number.
pub(super) fn of_room(jaeger: SocketAddr, room: &str) -> Result<Traces> {
    let tags = escaped(&format!("{{\"sglang.pd.room\":\"{room}\"}}"));
    let mut all = Traces::new();
    for service in SERVICES {
        all.extend(search(jaeger, &format!("service={service}&tags={tags}&limit=20"))?);
    }
    Ok(all)
}

fn search(jaeger: SocketAddr, query: &str) -> Result<Traces> {
    // Times are microseconds.
    let path = format!("/api/traces?{query}&start=0&end=99999999999999999");
    let answer: Value = serde_json::from_str(&get(jaeger, &path).context("ask Jaeger for traces")?)?;
    let data = answer["data"].as_array().context("Jaeger's answer has no data")?;
    Ok(data.iter().map(|trace| (text(&trace["traceID"]), spans(trace))).collect())
}

/// One trace; empty where Jaeger has none of that id.
pub(super) fn one(jaeger: SocketAddr, id: &str) -> Result<Vec<Span>> {
    let Ok(body) = get(jaeger, &format!("/api/traces/{id}")) else { return Ok(Vec::new()) };
    let answer: Value = serde_json::from_str(&body)?;
    Ok(answer["data"].as_array().into_iter().flatten().flat_map(spans).collect())
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn tag(tags: &Value, key: &str) -> Option<String> {
    let found = tags.as_array()?.iter().find(|tag| tag["key"] == key)?;
    Some(found["value"].as_str().map_or_else(|| found["value"].to_string(), str::to_owned))
}

fn spans(trace: &Value) -> Vec<Span> {
    let span = |span: &Value| {
        let process = &trace["processes"][span["processID"].as_str().unwrap_or_default()];
        let others = |reference: &Value| {
            let to = text(&reference["traceID"]);
            (to != text(&trace["traceID"])).then_some(to)
        };
        Span {
            name: text(&span["operationName"]),
            host: tag(&process["tags"], "host.id").unwrap_or_default(),
            error: (tag(&span["tags"], "error").as_deref() == Some("true"))
                .then(|| tag(&span["tags"], "error.type").unwrap_or_default()),
            completeness: tag(&span["tags"], COMPLETENESS),
            links: span["references"].as_array().into_iter().flatten().filter_map(others).collect(),
        }
    };
    trace["spans"].as_array().into_iter().flatten().map(span).collect()
}

/// Hosts that wrote to a trace.
pub(super) fn hosts(spans: &[Span]) -> BTreeSet<&str> {
    spans.iter().map(|span| span.host.as_str()).filter(|host| !host.is_empty()).collect()
}

/// Whether the policy `share` of `collector-config/gateway.yaml` keeps a trace: FNV-1a of its salt and the id's bytes against
/// the percentage (contrib v0.161.0, `tailsamplingprocessor/internal/sampling/probabilistic.go`).
pub(super) fn shared(trace: &str, percent: u64) -> bool {
    let id = (0..trace.len() / 2).filter_map(|n| u8::from_str_radix(trace.get(2 * n..2 * n + 2)?, 16).ok());
    let bytes = b"roomtrace".iter().copied().chain(id);
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    u128::from(hash) * 100 <= u128::from(u64::MAX) * u128::from(percent)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_a_share() {
        let kept =
            (0..4000_u128).filter(|n| shared(&format!("{:032x}", n * 0x9e37_79b9_7f4a_7c15), 25)).count();
        assert!((850..1150).contains(&kept), "{kept}");
    }
}
