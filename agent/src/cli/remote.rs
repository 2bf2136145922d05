//! What commands ask a running agent over its HTTP API.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]

use std::time::Duration;

use anyhow::{Context as _, anyhow};
use serde_json::{Value, json};

use crate::export::otlp::without_login;
use crate::export::query::PAGE_MAX;

use super::{End, ExplainArgs, Failure, Outcome, RoomsArgs, explain, picture, print};

/// How long an answer may take. The agent answers from memory; longer means that it does not.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Pages fetched at most: 20 × 500 rooms are more than a person reads.
const PAGES: usize = 20;

/// `roomtrace rooms`.
pub(super) fn rooms(args: &RoomsArgs) -> Outcome {
    let pinned = if args.pinned { "&pinned=true" } else { "" };
    let (rooms, next) = pages(&args.api.api, pinned)?;
    let (findings, total) = findings(&args.api.api)?;
    let end = if args.pinned && !rooms.is_empty() { End::Findings } else { End::Fine };
    let mut text = String::new();
    if args.json {
        text = format!("{}\n", json!({ "findings": findings, "rooms": rooms, "next": next }));
    } else {
        text.push_str(&explain::finding_lines(&findings, total));
        for room in &rooms {
            text.push_str(&explain::summary(room, &findings));
            text.push('\n');
        }
        if rooms.is_empty() {
            text.push_str(if args.pinned { "no pinned rooms\n" } else { "no open rooms\n" });
        }
        if next.is_some() {
            text.push_str("(there are more)\n");
        }
    }
    print(&text)?;
    Ok(end)
}

/// Rooms of all pages, and where those begin that are left out.
pub(super) fn pages(api: &str, which: &str) -> Result<(Vec<Value>, Option<String>), Failure> {
    let mut rooms = Vec::new();
    let mut next = None;
    for _ in 0..PAGES {
        let after = next.map_or_else(String::new, |n: String| format!("&after={n}"));
        let (_, mut body) = get(api, &format!("/api/v1/rooms?limit=500{which}{after}"))?;
        if let Some(Value::Array(page)) = body.get_mut("rooms").map(Value::take) {
            rooms.extend(page);
        }
        next = body["next"].as_str().map(str::to_owned);
        if next.is_none() {
            break;
        }
    }
    Ok((rooms, next))
}

/// Open findings, oldest first, and how many there are. None from an agent that does not know of them yet.
fn findings(api: &str) -> Result<(Vec<Value>, usize), Failure> {
    let (_, mut body) = get(api, &format!("/api/v1/findings?limit={PAGE_MAX}"))?;
    let total = body["total"].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or_default();
    Ok(match body.get_mut("findings").map(Value::take) {
        Some(Value::Array(list)) => (list, total),
        _ => (Vec::new(), 0),
    })
}

/// `roomtrace explain ROOM`.
pub(super) fn explain(args: &ExplainArgs) -> Outcome {
    let life = args.incarnation.map_or_else(String::new, |n| format!("?incarnation={n}"));
    let (status, body) = get(&args.api.api, &format!("/api/v1/rooms/{}{life}", args.room))?;
    if status == 404 {
        return Err(Failure::usage(anyhow!(
            "the agent at {} does not know room {}: it may have ended long ago, have no control traffic on that host, or belong to another host",
            without_login(&args.api.api),
            args.room
        )));
    }
    if let Some(file) = &args.svg {
        std::fs::write(file, picture::standalone(&body))
            .with_context(|| format!("cannot write {}", file.display()))
            .map_err(Failure::usage)?;
    }
    if args.json {
        return print(&format!("{body}\n"));
    }
    print(&explain::page(&body, &findings(&args.api.api)?.0))
}

/// Asks for JSON.
pub(super) fn get(api: &str, path: &str) -> Result<(u16, Value), Failure> {
    let (status, text) = fetch(api, path)?;
    let url = format!("{}{path}", api.trim_end_matches('/'));
    let shown = without_login(&url);
    let body: Value = serde_json::from_str(&text).map_err(|e| {
        Failure::cannot_observe(anyhow!(
            "{shown} answered {status} with no JSON: {e} (is that a Roomtrace agent?)"
        ))
    })?;
    if (200..300).contains(&status) || status == 404 {
        return Ok((status, body));
    }
    let why = body["error"].as_str().unwrap_or("no reason given");
    Err(Failure::cannot_observe(anyhow!("{shown} answered {status}: {why}")))
}

/// Asks for whatever comes.
pub(super) fn fetch(api: &str, path: &str) -> Result<(u16, String), Failure> {
    let url = format!("{}{path}", api.trim_end_matches('/'));
    let api = without_login(api);
    if let Err(e) = reqwest::Url::parse(&url) {
        return Err(Failure::usage(anyhow!(
            "`{api}` is not the address of an agent: {e} (http://127.0.0.1:9713 is one)"
        )));
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the I/O runtime")
        .map_err(Failure::cannot_observe)?;
    // The HTTP client wants to know its cryptography even where it speaks plain HTTP; a second call changes nothing.
    drop(rustls::crypto::ring::default_provider().install_default());
    runtime.block_on(async {
        let client = reqwest::Client::builder()
            .timeout(TIMEOUT)
            .no_proxy()
            .build()
            .map_err(Failure::cannot_observe)?;
        let gone = |e: &reqwest::Error| {
            Failure::cannot_observe(anyhow!(
                "no agent answers at {api}: {} (is `roomtrace run` up there? another address goes in --api or ROOMTRACE_API)",
                root_cause(e)
            ))
        };
        let answer = client.get(&url).send().await.map_err(|e| gone(&e))?;
        let status = answer.status().as_u16();
        Ok((status, answer.text().await.map_err(|e| gone(&e))?))
    })
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}
