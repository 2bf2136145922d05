//! Commands that ask a running agent over its HTTP API: `rooms` and `explain`.

use std::time::Duration;

use anyhow::{Context as _, anyhow};
use serde_json::Value;

use super::{End, ExplainArgs, Failure, Outcome, RoomsArgs, explain, print};

/// How long an answer may take. The agent answers from memory; longer means that it does not.
const TIMEOUT: Duration = Duration::from_secs(10);

/// `roomtrace rooms`.
pub(super) fn rooms(args: &RoomsArgs) -> Outcome {
    let path = if args.pinned { "/api/v1/rooms?pinned=true" } else { "/api/v1/rooms" };
    let (_, body) = get(&args.api.api, path)?;
    let rooms = body["rooms"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut text = String::new();
    if args.json {
        text = format!("{body}\n");
    } else if rooms.is_empty() {
        text.push_str(if args.pinned { "no pinned rooms\n" } else { "no rooms\n" });
    }
    if !args.json {
        for room in rooms {
            text.push_str(&explain::summary(room));
            text.push('\n');
        }
        if body["truncated"].as_bool() == Some(true) {
            text.push_str("(more rooms than one answer carries; filter with --pinned)\n");
        }
    }
    print(&text)?;
    Ok(if args.pinned && !rooms.is_empty() { End::Findings } else { End::Fine })
}

/// `roomtrace explain ROOM`.
pub(super) fn explain(args: &ExplainArgs) -> Outcome {
    let (status, body) = get(&args.api.api, &format!("/api/v1/rooms/{}", args.room))?;
    if status == 404 {
        return Err(Failure::usage(anyhow!(
            "the agent at {} has not seen room {}: it may have ended long ago, have no control traffic on that host, or belong to another host",
            args.api.api,
            args.room
        )));
    }
    if args.json {
        return print(&format!("{body}\n"));
    }
    let lives = body["incarnations"].as_array().map(Vec::as_slice).unwrap_or_default();
    let pages: Vec<String> = lives.iter().map(explain::page).collect();
    print(&pages.join("\n\n"))
}

fn get(api: &str, path: &str) -> Result<(u16, Value), Failure> {
    let url = format!("{}{path}", api.trim_end_matches('/'));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("cannot start the I/O runtime")
        .map_err(Failure::cannot_observe)?;
    runtime.block_on(async {
        let client = reqwest::Client::builder()
            .timeout(TIMEOUT)
            .no_proxy()
            .build()
            .map_err(Failure::cannot_observe)?;
        let answer = client.get(&url).send().await.map_err(|e| {
            Failure::cannot_observe(anyhow!(
                "no agent answers at {api}: {} (is `roomtrace run` up there? another address goes in --api or ROOMTRACE_API)",
                root_cause(&e)
            ))
        })?;
        let status = answer.status();
        let body: Value = answer.json().await.map_err(|e| {
            Failure::cannot_observe(anyhow!("{url} answered {status} with no JSON: {e} (is that a Roomtrace agent?)"))
        })?;
        if status.is_success() || status.as_u16() == 404 {
            return Ok((status.as_u16(), body));
        }
        let why = body["error"].as_str().unwrap_or("no reason given");
        Err(Failure::cannot_observe(anyhow!("{url} answered {status}: {why}")))
    })
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}
