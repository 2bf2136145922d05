//! The page at `/` and one page per room, for a person who has a browser and nothing else at hand.
//!
//! Made of the records that the API gives, so that both say the same. Plain HTML: no script, nothing from outside, one style sheet of
//! which the policy has the hash. Every string goes through the template's escaping, and through [`plain`] before it, because names of
//! processes and requests are whatever somebody chose.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]

mod overview;
mod room;

use std::sync::{Arc, LazyLock};

use axum::Router;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::http::Answers;
use crate::prose::{clock, picture, plain};

/// The pages.
pub(super) fn routes() -> Router<Arc<Answers>> {
    Router::new().route("/", get(overview::answer)).route("/rooms/{room}", get(room::answer))
}

/// Looks of the pages and of the picture in them.
static SHEET: LazyLock<String> = LazyLock::new(|| format!("{}{}", include_str!("page.css"), picture::STYLE));

/// Nothing may be loaded, run, framed or sent; the one style sheet is named by its hash (CSP level 3, section 2.3.1).
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let hash = STANDARD.encode(Sha256::digest(SHEET.as_bytes()));
    let policy = format!(
        "default-src 'none'; style-src 'sha256-{hash}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    HeaderValue::from_str(&policy).unwrap_or(HeaderValue::from_static("default-src 'none'"))
});

/// What every page has around it.
struct Frame<'a> {
    title: &'a str,
    host: &'a str,
    /// When it was made, where that is known.
    at: Option<&'a str>,
    /// Seconds after which the browser asks again.
    again: Option<u32>,
}

impl Frame<'_> {
    fn answer(&self, status: StatusCode, body: &Markup) -> Response {
        let page = html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    meta name="color-scheme" content="light dark";
                    @if let Some(again) = self.again { meta http-equiv="refresh" content=(again); }
                    title { (self.title) " · " (self.host) " · Roomtrace" }
                    style { (PreEscaped(SHEET.as_str())) }
                }
                body {
                    header {
                        a class="home" href="/" { "Roomtrace" }
                        span class="host" { (self.host) }
                        @if let Some(at) = self.at { span class="at" { "as of " (at) " UTC" } }
                    }
                    main { (body) }
                }
            }
        };
        let headers = [
            (header::CONTENT_TYPE, HeaderValue::from_static("text/html; charset=utf-8")),
            (header::CONTENT_SECURITY_POLICY, POLICY.clone()),
            (header::CACHE_CONTROL, HeaderValue::from_static("no-store")),
            (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
            (HeaderName::from_static("x-content-type-options"), HeaderValue::from_static("nosniff")),
        ];
        (status, headers, page.into_string()).into_response()
    }
}

/// A page that says what is wrong.
fn wrong(status: StatusCode, host: &str, heading: &str, what: &str, again: Option<u32>) -> Response {
    let body = html! {
        section class="banner unknown" {
            h1 { (heading) }
            p { (what) }
        }
        p { a href="/" { "All rooms of this host" } }
    };
    Frame { title: heading, host, at: None, again }.answer(status, &body)
}

/// A record as the API gives it, fit to be shown. Records are plain structs: they do not fail to be values.
fn shown(record: &impl Serialize) -> Value {
    let mut value = serde_json::to_value(record).unwrap_or_default();
    plain::make(&mut value);
    value
}

/// How sure, by colour, border and word.
fn badge(confidence: &str) -> Markup {
    html! { span class={ "badge " (weight(confidence)) } { (confidence) } }
}

/// `sure` or `silent`: what is only possible must never look like the others.
fn weight(confidence: &str) -> &'static str {
    if matches!(confidence, "likely" | "certain") { "sure" } else { "silent" }
}

/// What to do first: the command, what it does, and what it costs others.
fn first_act(act: &Value) -> Markup {
    let said = |key: &str| act.get(key).and_then(Value::as_str).unwrap_or("?").to_owned();
    html! {
        code { (said("command")) }
        p class="dim" { (said("effect")) "; costs others: " (said("blast_radius")) }
    }
}

/// What would tell whether a room that is only silent is pinned: first make sure, then act.
fn settle(record: &Value) -> Vec<&str> {
    let candidates = record["verdict"]["candidates"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut ways: Vec<&str> = candidates.iter().filter_map(|c| c["would_settle"].as_str()).collect();
    ways.dedup();
    ways
}

/// `02:41:07`: microseconds are of no use here.
fn seconds_only(rfc3339: &str) -> &str {
    let time = clock(rfc3339);
    time.get(..8).unwrap_or(time)
}

/// Seconds as people say them.
fn age(seconds: f64) -> String {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "clamped; a negative age is none"
    )]
    let s = seconds.clamp(0.0, 1e12) as u64;
    match s {
        0..120 => format!("{s} s"),
        120..7200 => format!("{} min {} s", s / 60, s % 60),
        _ => format!("{} h {} min", s / 3600, s % 3600 / 60),
    }
}

/// `1 room`, `2 rooms`.
fn many(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}
