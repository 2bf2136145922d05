//! The page of one room: what to know at once, its time line as a picture, and beside it what `roomtrace explain` says.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]

use std::sync::Arc;

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use super::{Frame, badge, first_act, seconds_only, settle, shown, weight, wrong};
use crate::export::http::{Answers, RoomParameters, asked, chosen, not_known};
use crate::export::record::Maker;
use crate::prose::explain::{About, Head, Part, parts};
use crate::prose::{picture, plain, text};

/// Findings that a room's cause is looked for in.
const FINDINGS: usize = 100;

pub(super) async fn answer(
    State(a): State<Arc<Answers>>,
    number: Result<Path<String>, PathRejection>,
    parameters: Result<Query<RoomParameters>, QueryRejection>,
) -> Response {
    let host = plain::plain(&a.identity.host_name);
    let said = number.as_ref().map_or_else(|_| String::new(), |Path(n)| plain::plain(n));
    let (number, incarnation) = match asked(number, parameters) {
        Ok(asked) => asked,
        Err(what) => {
            let what = if said.is_empty() { what } else { format!("“{said}”: {what}") };
            return wrong(StatusCode::BAD_REQUEST, &host, "This is no room", &plain::plain(&what), None);
        }
    };
    let (found, findings) = tokio::join!(a.queries.room(number), a.queries.findings(FINDINGS));
    let (found, findings) = match (found, findings) {
        (Ok(found), Ok(findings)) => (found, findings),
        (Err(e), _) | (_, Err(e)) => {
            return wrong(StatusCode::SERVICE_UNAVAILABLE, &host, "No answer yet", &e.to_string(), Some(2));
        }
    };
    let Some(room) = chosen(&found.rooms, incarnation) else {
        return wrong(StatusCode::NOT_FOUND, &host, "This room is not known here", &not_known(number), None);
    };
    let maker = Maker { identity: &a.identity, clock: &found.clock };
    let record = shown(&maker.room(room));
    let finder = Maker { identity: &a.identity, clock: &findings.clock };
    let findings: Vec<Value> = findings.open.iter().map(|f| shown(&finder.finding(f, findings.at))).collect();
    let mut lives: Vec<u32> = found.rooms.iter().map(|r| r.incarnation).collect();
    lives.sort_unstable();
    let head = Head::of(&record, &findings);
    let body = html! {
        (card(&record, &head))
        div class="beside" {
            section {
                h2 { "Time line" }
                div class="drawing" { (picture::inline(&record)) }
                details class="key" { summary { "How to read it" } @for line in picture::KEY { p { (line) } } }
                (told(&record, &[About::Time]))
            }
            section { (told(&record, &EXPLAINED)) }
        }
        (footer(&record, &lives))
    };
    let title = format!("{} {}", text(&record["room"]), head.state);
    let at = record["time"].as_str().map(seconds_only);
    Frame { title: &title, host: &host, at, again: None }.answer(StatusCode::OK, &body)
}

/// Parts of the explanation beside the picture, what helps first on top.
const EXPLAINED: [About; 7] = [
    About::Why,
    About::Actions,
    About::Candidates,
    About::Standing,
    About::Known,
    About::Log,
    About::Upstream,
];

/// What to know at once.
fn card(record: &Value, head: &Head<'_>) -> Markup {
    let verdict = &record["verdict"];
    let pinned = record["pinned"].as_bool() == Some(true);
    let confidence = text(&verdict["confidence"]);
    let look = match (pinned, record["closed_at"].is_null()) {
        (true, _) => weight(confidence),
        (false, true) => "open",
        (false, false) => "over",
    };
    html! {
        section class={ "card room " (look) } {
            h1 {
                @if pinned { (badge(confidence)) " " }
                "room " span class="number" { (text(&record["room"])) }
            }
            p class="state" { (head.state) }
            @if pinned && look == "silent" {
                p class="note" { "Only silence says so. A prefill that computes for long looks the same: do not page on it." }
            }
            dl {
                @for (name, value) in [("Who", &head.owes), ("End", &head.ends), ("Cause", &head.shared), ("Cost", &head.holds)] {
                    @if let Some(value) = value { dt { (name) } dd { (value) } }
                }
                @if let Some(rid) = record["request"]["rid"].as_str() { dt { "Request" } dd class="code" { (rid) } }
                @if look == "silent" { @for way in settle(record) { dt { "Make sure" } dd { (way) } } }
                @if let Some(act) = head.act {
                    dt { @if look == "silent" { "If it is so" } @else { "Do" } }
                    dd { (first_act(act)) }
                }
            }
        }
    }
}

/// Parts of the explanation, in the order asked for.
fn told(record: &Value, wanted: &[About]) -> Markup {
    let parts = parts(record);
    let chosen = wanted.iter().filter_map(|about| parts.iter().find(|p| p.about == *about));
    html! { @for part in chosen { (one(part)) } }
}

fn one(part: &Part) -> Markup {
    let class = if part.about == About::Time { "lines times" } else { "lines" };
    html! {
        @if part.about == About::Time { h3 { (part.title()) } } @else { h2 { (part.title()) } }
        ul class=(class) {
            @for line in part.lines() {
                @let command = part.about == About::Actions && line.starts_with(|c: char| c.is_ascii_digit());
                @match line.strip_prefix("- ") {
                    Some(point) => { li class="point" { (point) } }
                    None if command => { li class="code" { (line) } }
                    None => { li { (line) } }
                }
            }
        }
    }
}

fn footer(record: &Value, lives: &[u32]) -> Markup {
    let (room, life) = (text(&record["room"]), &record["incarnation"]);
    let others = || lives.iter().filter(|l| Some(u64::from(**l)) != life.as_u64());
    html! {
        footer {
            @if others().next().is_some() {
                p {
                    "This number was used more than once:"
                    @for other in others() {
                        " " a href={ "/rooms/" (room) "?incarnation=" (other) } { "life " (other.saturating_add(1)) }
                    }
                }
            }
            p {
                "The same in a terminal: " code { "roomtrace explain " (room) }
                ", as JSON: " a href={ "/api/v1/rooms/" (room) "?incarnation=" (life.as_u64().unwrap_or_default()) } { "record" }
            }
        }
    }
}
