//! One side's lane: where it stands, its phases, messages, request, and whether it owes the next move. Pure.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]
#![allow(clippy::cast_precision_loss, reason = "a drawing")]

use maud::{Markup, html};
use serde_json::Value;

use super::{LETTER, Row, Scale, label, percent};
use crate::prose::{list, text};

/// Messages closer than this share of the width have one label.
const NEAR: f64 = 2.5;

/// Heights of the band, and of a line of labels.
const BAND: f64 = 22.0;
const LINE: f64 = 15.0;

/// Letters of a label at most.
const LETTERS: usize = 44;

pub(super) fn row(record: &Value, role: &str, scale: &Scale<'_>) -> Row {
    let view = &record["views"][role];
    let labels = labels(record, role, scale);
    let lines = labels.iter().map(|l| l.line + 1).max().unwrap_or(0);
    let band = 20.0 + lines as f64 * LINE;
    let body = html! {
        (title(record, role))
        @for l in &labels {
            @let y = 18.0 + (l.line + 1) as f64 * LINE - 4.0;
            line class="lead" x1=(percent(l.x)) x2=(percent(l.x)) y1=(y - 8.0) y2=(band) {}
            (label(l.text_x(), y, "mark", &l.text))
        }
        @if view.is_null() {
            (scale.bar((0.0, scale.length), (band, BAND), "unread"))
        } @else {
            (scale.bar((0.0, scale.length), (band, BAND), "lane"))
            @for (phase, from, to) in phases(record, role, scale) {
                g { title { (phase) } (scale.bar((from, to), (band, BAND), &format!("phase {phase}"))) }
            }
        }
        (owed(record, role, scale, band))
        @for m in list(&view["messages"]) { (dot(m, scale, band)) }
        (request(record, role, scale, band + BAND + 4.0))
    };
    Row { height: band + BAND + 20.0, body }
}

fn title(record: &Value, role: &str) -> Markup {
    let view = &record["views"][role];
    let says = if view.is_null() {
        "not seen from this host".to_owned()
    } else if let Some(ended) = view["ended"].as_str() {
        format!("ended: {ended}")
    } else {
        format!("{}, phase {}", text(&view["state"]), text(&view["phase"]))
    };
    html! {
        text x="1%" y="13" { tspan class="title" { (role) } tspan class="small" { " · " (says) } }
    }
}

/// `sure` or `silent`: the two must never look the same.
pub(super) fn weight(verdict: &Value) -> &'static str {
    match verdict["confidence"].as_str() {
        Some("likely" | "certain") => "sure",
        _ => "silent",
    }
}

/// Stripes over the side that owes, since the verdict holds.
fn owed(record: &Value, role: &str, scale: &Scale<'_>, band: f64) -> Markup {
    let verdict = &record["verdict"];
    let pinned = record["pinned"].as_bool() == Some(true);
    let Some(since) = scale.moment(&verdict["since"]).filter(|_| pinned) else { return html! {} };
    if verdict["owed_by"]["role"].as_str() != Some(role) {
        return html! {};
    }
    let weight = weight(verdict);
    let what = verdict["expected"].as_str().unwrap_or("the next move");
    let x = scale.place(since);
    let (x, anchor) = if x > 60.0 { (x - 1.0, "end") } else { (x + 1.0, "start") };
    html! {
        (scale.bar((since, scale.length), (band, BAND), &format!("owed {weight}")))
        text class={ "owes " (weight) } x=(percent(x)) y=(band + 15.5) text-anchor=(anchor) { "owes " (what) }
    }
}

fn dot(message: &Value, scale: &Scale<'_>, band: f64) -> Markup {
    let Some(at) = scale.moment(&message["time"]) else { return html! {} };
    let sent = message["direction"].as_str() == Some("sent");
    let class = if sent { "dot sent" } else { "dot received" };
    html! {
        circle class=(class) cx=(percent(scale.place(at))) cy=(band + BAND / 2.0) r="5" {
            title { (name(message)) " " (text(&message["direction"])) " at +" (format!("{at:.3}")) " s, peer " (text(&message["peer"])) }
        }
    }
}

fn name(message: &Value) -> String {
    let status = message["status"].as_str().map(|s| format!(" {s}")).unwrap_or_default();
    format!("{}{status}", text(&message["kind"]))
}

/// Its request at the HTTP port: to its end, or on and on; broken off where it was lost sight of.
fn request(record: &Value, role: &str, scale: &Scale<'_>, y: f64) -> Markup {
    let leg = &record["request"][role];
    let Some(begun) = scale.moment(&leg["begun"]) else { return html! {} };
    let lost = leg["out_of_sight"].as_bool() == Some(true);
    let ended = scale.moment(&leg["ended"]);
    let class = if lost && ended.is_none() { "request lost" } else { "request" };
    html! {
        (scale.bar((begun, ended.unwrap_or(scale.length)), (y, 4.0), class))
        @if let Some(first) = scale.moment(&leg["first_byte"]) { (scale.bar((first, first), (y - 2.0, 8.0), "request")) }
    }
}

/// Words for one or more messages that lie close together.
struct Label {
    x: f64,
    line: usize,
    text: String,
}

impl Label {
    /// Right or left of its place, as [`label`] puts it.
    fn text_x(&self) -> f64 {
        if self.x > 50.0 { self.x - 0.6 } else { self.x + 0.6 }
    }

    /// Where its letters are, at most.
    fn extent(&self) -> (f64, f64) {
        let wide = self.text.chars().count() as f64 * LETTER + 1.5;
        if self.x > 50.0 { (self.x - wide, self.x) } else { (self.x, self.x + wide) }
    }
}

/// Each on the first line on which it covers no other.
fn labels(record: &Value, role: &str, scale: &Scale<'_>) -> Vec<Label> {
    let messages = list(&record["views"][role]["messages"]).iter();
    let mut marks: Vec<(f64, String)> =
        messages.filter_map(|m| Some((scale.place(scale.moment(&m["time"])?), name(m)))).collect();
    marks.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut groups: Vec<(f64, Vec<(String, u32)>)> = Vec::new();
    for (x, what) in marks {
        match groups.last_mut().filter(|(first, _)| x - *first < NEAR) {
            None => groups.push((x, vec![(what, 1)])),
            Some((_, words)) => match words.iter_mut().find(|(w, _)| *w == what) {
                Some((_, times)) => *times += 1,
                None => words.push((what, 1)),
            },
        }
    }
    let mut placed: Vec<Label> = Vec::new();
    for (x, words) in groups {
        let word = |(w, n): &(String, u32)| if *n > 1 { format!("{w} ×{n}") } else { w.clone() };
        let mut text = words.iter().map(word).collect::<Vec<_>>().join(", ");
        if text.chars().count() > LETTERS {
            text = text.chars().take(LETTERS - 1).chain(['…']).collect();
        }
        let mut new = Label { x, line: 0, text };
        let (from, to) = new.extent();
        while placed.iter().any(|p| p.line == new.line && p.extent().0 < to && from < p.extent().1) {
            new.line += 1;
        }
        placed.push(new);
    }
    placed
}

/// Name, begin and end of the phases that the view's messages show, by the rules that spans go by (`export::phases`), and of the one it
/// is in. Where messages are missing, of that one alone.
fn phases(record: &Value, role: &str, scale: &Scale<'_>) -> Vec<(String, f64, f64)> {
    let view = &record["views"][role];
    let now = text(&view["phase"]);
    let since = scale.moment(&view["phase_since"]);
    let open = view["ended"].is_null() && record["closed_at"].is_null() && now != "done";
    let current = since.filter(|_| open).map(|since| (now.to_owned(), since, scale.length));
    let missing = record["messages_dropped"].as_u64().unwrap_or(1) > 0 || record["completeness"] == "lossy";
    if missing {
        return current.into_iter().collect();
    }
    let times = |wanted: &dyn Fn(&Value) -> bool| -> Vec<f64> {
        let its = list(&view["messages"]).iter().filter(|m| wanted(m));
        its.filter_map(|m| scale.moment(&m["time"])).collect()
    };
    let kind = |kind: &'static str| move |m: &Value| m["kind"] == kind;
    let status = |m: &Value, of: &[&str]| m["kind"] == "STATUS" && of.iter().any(|s| m["status"] == *s);
    let first = |all: Vec<f64>| all.first().copied();
    let computed = first(times(&|m| status(m, &["WaitingForInput"])));
    let opened = (record["completeness"] != "preexisting").then_some(0.0);
    let asked = times(&|m| m["kind"] == "METADATA" && m["dummy"] != true);
    let metadata = match now {
        "transfer" if open => since,
        "bootstrap" | "compute" if open => None,
        _ => asked.last().copied(),
    };
    let ends = times(&|m| status(m, &["Success", "Failed"]));
    let shown = [
        ("compute", first(times(&kind("BOOTSTRAP"))), computed),
        ("bootstrap", computed.or(opened), metadata),
        ("transfer", metadata, ends.first().copied()),
        ("conclude", ends.first().copied(), ends.last().copied()),
        ("abort", first(times(&kind("ABORT"))), first(times(&kind("ABORT_ACK")))),
    ];
    let whole = shown.into_iter().filter_map(|(name, from, to)| Some((name.to_owned(), from?, to?)));
    whole.filter(|(_, from, to)| from < to).chain(current).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn record(messages: &Value, phase: &str, since: &str) -> Value {
        json!({
            "opened_at": "2026-01-01T00:00:00Z", "closed_at": null, "time": "2026-01-01T00:01:00Z", "completeness": "full",
            "messages_dropped": 0,
            "views": {"prefill": {"phase": phase, "phase_since": since, "ended": null, "state": "Bootstrapping", "messages": messages}},
        })
    }

    #[test]
    fn a_side_that_waits_is_in_its_phase_until_now_and_was_in_bootstrap_before() {
        let metadata = json!([{"time": "2026-01-01T00:00:10Z", "kind": "METADATA", "dummy": false}]);
        let mut record = record(&metadata, "transfer", "2026-01-01T00:00:10Z");
        let shown = |r: &Value| phases(r, "prefill", &Scale::of(r));
        let transfer = ("transfer".to_owned(), 10.0, 60.0);
        assert_eq!(shown(&record), [("bootstrap".to_owned(), 0.0, 10.0), transfer.clone()]);
        for (key, value) in [
            ("messages_dropped", json!(1)),
            ("completeness", json!("lossy")),
            ("completeness", json!("preexisting")),
        ] {
            record[key] = value;
            assert_eq!(shown(&record), std::slice::from_ref(&transfer), "what was before is not known");
        }
    }

    #[test]
    fn close_messages_share_a_label_and_others_get_lines_of_their_own() {
        let m = |s: u32, kind: &str| json!({"time": format!("2026-01-01T00:00:{s:02}Z"), "kind": kind, "direction": "sent"});
        let messages =
            json!([m(0, "METADATA"), m(1, "METADATA"), m(1, "ABORT"), m(4, "STATUS"), m(50, "STATUS")]);
        let record = record(&messages, "transfer", "2026-01-01T00:00:10Z");
        let labels = labels(&record, "prefill", &Scale::of(&record));
        let told: Vec<_> = labels.iter().map(|l| (l.text.as_str(), l.line)).collect();
        assert_eq!(told, [("METADATA ×2, ABORT", 0), ("STATUS", 1), ("STATUS", 0)]);
    }
}
