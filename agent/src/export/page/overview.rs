//! The first page: what is pinned and why, the oldest rooms, what the agent missed and what it costs.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]

mod agent;

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use maud::{Markup, html};
use serde_json::Value;

use super::{Frame, age, badge, first_act, many, seconds_only, settle, shown, weight};
use crate::export::http::Answers;
use crate::export::query::{Findings, First, QueryError};
use crate::export::record::Maker;
use crate::prose::explain::{Head, first_act as act_of, party};
use crate::prose::{list, plain, text};
use crate::rooms::overview::Overview;
use agent::Agent;

/// Pinned rooms listed, others listed, causes asked for and listed, rooms listed under one cause, facts under one.
const PINNED: usize = 100;
const OLDEST: usize = 15;
const FINDINGS: usize = 200;
const CAUSES: usize = 40;
const ROOMS: usize = 8;
const FACTS: usize = 3;

/// Seconds between two looks.
const AGAIN: u32 = 10;

pub(super) async fn answer(State(a): State<Arc<Answers>>) -> Response {
    let host = plain::plain(&a.identity.host_name);
    let (first, findings) = tokio::join!(a.queries.first(PINNED, OLDEST), a.queries.findings(FINDINGS));
    let agent = Agent::of(&a);
    let (status, title, at, rooms) = match (first, findings) {
        (Ok(first), Ok(findings)) => {
            let seen = Seen::of(&a, &first, &findings);
            let (title, body) = (seen.title(&agent), seen.body(&agent));
            (StatusCode::OK, title, Some(first.clock.rfc3339(first.rooms.at)), body)
        }
        (Err(e), _) | (_, Err(e)) => {
            (StatusCode::SERVICE_UNAVAILABLE, "no answer".to_owned(), None, busy(e, &agent))
        }
    };
    let body = html! { (rooms) (agent.missed()) (agent.costs()) (links()) };
    let at = at.as_deref().map(seconds_only);
    Frame { title: &title, host: &host, at, again: Some(AGAIN) }.answer(status, &body)
}

/// What the agent published last still stands where it does not answer.
fn busy(e: QueryError, agent: &Agent) -> Markup {
    html! {
        section class="banner unknown" {
            h1 { "No answer yet" }
            p { (e.to_string()) }
            @if let Some((sure, possible)) = agent.pinned() {
                p { "When it last reported: " (many(sure, "room")) " pinned, " (possible) " more possible." }
            }
        }
    }
}

/// Records of this moment.
struct Seen {
    pinned: Vec<Value>,
    oldest: Vec<Value>,
    /// Surest first, of these those with rooms, of these the oldest.
    findings: Vec<Value>,
    findings_total: usize,
    /// Pinned: likely or certain, and possible.
    sure: usize,
    possible: usize,
    others: usize,
}

impl Seen {
    fn of(a: &Answers, first: &First, findings: &Findings) -> Self {
        let maker = Maker { identity: &a.identity, clock: &first.clock };
        let records = |rooms: &[_]| rooms.iter().map(|r| shown(&maker.room(r))).collect();
        let finder = Maker { identity: &a.identity, clock: &findings.clock };
        let mut open: Vec<_> = findings.open.iter().collect();
        open.sort_by_key(|f| (std::cmp::Reverse(f.confidence), f.room_count == 0, f.since, f.group));
        let Overview { pinned, pinned_count: [possible, likely, certain], oldest, others_count, .. } =
            &first.rooms;
        Self {
            pinned: records(pinned),
            oldest: records(oldest),
            findings: open.into_iter().map(|f| shown(&finder.finding(f, findings.at))).collect(),
            findings_total: findings.total,
            sure: likely + certain,
            possible: *possible,
            others: *others_count,
        }
    }

    /// What a tab shows.
    fn title(&self, agent: &Agent) -> String {
        match (self.sure, agent.blind()) {
            (1.., _) => format!("PINNED {}", self.sure),
            (0, Some(_)) => "not observing".to_owned(),
            (0, None) => "no pin".to_owned(),
        }
    }

    fn body(&self, agent: &Agent) -> Markup {
        let sure = |f: &&Value| weight(text(&f["confidence"])) == "sure";
        let (certain, possible): (Vec<_>, Vec<_>) = self.findings.iter().take(CAUSES).partition(sure);
        let more = self.findings_total.saturating_sub(CAUSES.min(self.findings.len()));
        html! {
            (self.banner(agent))
            @if !certain.is_empty() {
                section { h2 { "What is wrong, and what to do" } @for f in certain { (self.cause(f)) } }
            }
            (self.unlisted("sure"))
            @if !possible.is_empty() || self.unlisted_rooms("silent").next().is_some() {
                section class="possible" {
                    h2 { "Possible: only silence says so" }
                    p class="note" { "A prefill that computes for long looks the same. Never page on these." }
                    @for f in possible { (self.cause(f)) }
                    (self.unlisted("silent"))
                }
            }
            @if more > 0 { p class="more" { (many(more as u64, "more finding")) " not shown: " a href="/api/v1/findings" { "/api/v1/findings" } } }
            @let hidden = (self.sure + self.possible).saturating_sub(self.pinned.len());
            @if hidden > 0 {
                p class="more" { (many(hidden as u64, "more pinned room")) " not shown: " a href="/api/v1/rooms?pinned=true" { "/api/v1/rooms?pinned=true" } }
            }
            (self.others())
        }
    }

    fn banner(&self, agent: &Agent) -> Markup {
        let possible = (self.possible > 0).then(|| {
            format!("{} silent for long (possible): watch, do not page.", many(self.possible as u64, "room"))
        });
        let blind = agent.blind();
        let (look, heading) = match (self.sure, &blind) {
            (1, _) => ("sure", "1 room is pinned".to_owned()),
            (n @ 2.., _) => ("sure", format!("{n} rooms are pinned")),
            (0, Some(_)) => ("unknown", "This agent cannot tell".to_owned()),
            (0, None) if self.possible > 0 => ("silent", "No room is known to be pinned".to_owned()),
            (0, None) => ("fine", "No room is pinned".to_owned()),
        };
        html! {
            section class={ "banner " (look) } {
                h1 { (heading) }
                @if let Some(why) = blind { p { (why) } }
                @if let Some(possible) = possible { p { (possible) } }
                p class="dim" { (many(self.others as u64, "other open room")) ". " (agent.watches()) }
            }
        }
    }

    /// Pinned rooms of a finding.
    fn rooms_of<'a>(&'a self, finding: &'a Value) -> impl Iterator<Item = &'a Value> {
        self.pinned.iter().filter(|r| r["verdict"]["group"] == finding["group"])
    }

    /// One finding: what is wrong with whom, since when, on what evidence, what to do, and the rooms that hang on it.
    fn cause(&self, f: &Value) -> Markup {
        let confidence = text(&f["confidence"]);
        let listed: Vec<&Value> = self.rooms_of(f).take(ROOMS).collect();
        let count = f["room_count"].as_u64().unwrap_or_default();
        let numbers =
            list(&f["rooms"]).iter().map(text).filter(|n| !listed.iter().any(|r| text(&r["room"]) == *n));
        let numbers: Vec<&str> = numbers.take(ROOMS.saturating_sub(listed.len())).collect();
        let more = count.saturating_sub((listed.len() + numbers.len()) as u64);
        html! {
            article class={ "card " (weight(confidence)) } {
                h3 { (badge(confidence)) " " span class="class" { (text(&f["class"])) } }
                p class="who" { (party(&f["engine"])) span class="dim" { " since " (f["since"].as_str().map_or("?", seconds_only)) } }
                (advice(confidence, act_of(f), listed.first().copied()))
                @if count > 0 {
                    p class="count" { (many(count, "room")) @if weight(confidence) == "sure" { " pinned by it" } @else { " may hang on it" } }
                    ul class="rooms" {
                        @for r in &listed { (line(r)) }
                        @for n in numbers { li { a class="number" href={ "/rooms/" (n) } { (n) } } }
                        @if more > 0 { li class="dim" { "and " (more) " more" } }
                    }
                }
                ul class="facts" { @for fact in list(&f["evidence"]).iter().take(FACTS) { li { (text(fact)) } } }
            }
        }
    }

    /// Pinned rooms that no finding above has: none, unless there are more findings than are shown.
    fn unlisted_rooms<'a>(&'a self, look: &'a str) -> impl Iterator<Item = &'a Value> {
        let shown = || self.findings.iter().take(CAUSES);
        let alone = move |r: &&Value| !shown().any(|f| f["group"] == r["verdict"]["group"]);
        self.pinned.iter().filter(alone).filter(move |r| weight(text(&r["verdict"]["confidence"])) == look)
    }

    fn unlisted(&self, look: &str) -> Markup {
        html! {
            @for r in self.unlisted_rooms(look) {
                @let verdict = &r["verdict"];
                article class={ "card " (look) } {
                    h3 { (badge(text(&verdict["confidence"]))) " " span class="class" { (text(&verdict["class"])) } }
                    (advice(text(&verdict["confidence"]), act_of(verdict), Some(r)))
                    ul class="rooms" { (line(r)) }
                }
            }
        }
    }

    fn others(&self) -> Markup {
        let more = self.others.saturating_sub(self.oldest.len());
        html! {
            section {
                h2 { "Oldest rooms that are not pinned" }
                @if self.oldest.is_empty() { p class="dim" { "none" } }
                ul class="rooms" {
                    @for r in &self.oldest {
                        li {
                            (link(r))
                            span class="age" { (age(r["age_s"].as_f64().unwrap_or_default())) }
                            span class="says" {
                                @if let Some(class) = r["verdict"]["class"].as_str() { span class="class" { (class) } " · " }
                                (stands(r))
                            }
                        }
                    }
                }
                @if more > 0 {
                    p class="more" {
                        (many(more as u64, "more open room")) " not shown (newer, or their end cannot be seen from here): "
                        a href="/api/v1/rooms?pinned=false" { "/api/v1/rooms?pinned=false" }
                    }
                }
            }
        }
    }
}

/// What to do; where only silence says that something is wrong, how to make sure: nobody is to end an engine for that.
fn advice(confidence: &str, act: Option<&Value>, room: Option<&Value>) -> Markup {
    if weight(confidence) == "sure" {
        return html! { @if let Some(act) = act { div class="do" { (first_act(act)) } } };
    }
    let ways = room.map(settle).unwrap_or_default();
    html! { @for way in ways { p class="settle" { "Make sure first: " (way) } } }
}

fn link(room: &Value) -> Markup {
    let number = text(&room["room"]);
    html! { a class="number" href={ "/rooms/" (number) } { (number) } }
}

/// A pinned room in one line.
fn line(room: &Value) -> Markup {
    let head = Head::of(room, &[]);
    html! {
        li {
            (link(room))
            span class="age" { (age(room["age_s"].as_f64().unwrap_or_default())) }
            span class="says" {
                @if let Some(owes) = &head.owes { (owes) }
                @if let Some(ends) = &head.ends { span class="dim" { " · " (ends) } }
                @if let Some(holds) = &head.holds { span class="dim" { " · " (holds) } }
            }
        }
    }
}

/// Where each side of an open room stands.
fn stands(room: &Value) -> String {
    let side = |role: &str| {
        let view = &room["views"][role];
        match (view["ended"].as_str(), view["state"].as_str()) {
            (Some(ended), _) => format!("{role} {ended}"),
            (None, Some(state)) => format!("{role} {state}"),
            (None, None) => format!("{role} not seen from here"),
        }
    };
    format!("{}, {}", side("prefill"), side("decode"))
}

fn links() -> Markup {
    html! {
        footer {
            p {
                "For programs: " a href="/api/v1/rooms" { "rooms" } " · " a href="/api/v1/findings" { "findings" } " · "
                a href="/metrics" { "metrics" } " · " a href="/status" { "status" }
            }
        }
    }
}
