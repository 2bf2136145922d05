//! What GPUs, RDMA ports and connections moved, a row for each direction of each, and what they suffered. Pure.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]

use maud::{Markup, html};
use serde_json::Value;

use super::{Row, Scale, label, percent};
use crate::prose::chart::{amount, name, rate};
use crate::prose::{list, text};

/// Height of the highest bar.
const HIGH: f64 = 30.0;

/// One reading: from, to, bytes a second.
type Reading = (f64, f64, f64);

pub(super) fn rows(record: &Value, scale: &Scale<'_>) -> Vec<Row> {
    let all = || list(&record["gpu"]).iter().chain(list(&record["network"]));
    // One height for all, so that rows can be compared.
    let most =
        all().flat_map(|of| [readings(of, 2), readings(of, 3)]).flatten().map(|r| r.2).fold(0.0, f64::max);
    let mut rows = Vec::new();
    let mut troubles: Vec<(f64, String)> = Vec::new();
    for of in all() {
        if list(&of["series"]).is_empty() {
            rows.push(whole(of, scale));
        } else {
            for (direction, place) in [("out", 2), ("in", 3)] {
                rows.push(series(of, direction, &readings(of, place), most, scale));
            }
        }
        for t in list(&of["troubles"]) {
            let number = t["value"].as_u64().map(|n| format!(" {n}")).unwrap_or_default();
            let trouble = scale.moment(&t["from"]).map(|at| (at, format!("{}{number}", text(&t["what"]))));
            // Every link of a GPU carries what it suffered.
            troubles.extend(trouble.filter(|t| !troubles.contains(t)));
        }
    }
    rows.extend(troubles.into_iter().map(|(at, what)| trouble(at, &what, scale)));
    rows
}

fn readings(of: &Value, place: usize) -> Vec<Reading> {
    let reading = |s: &Value| {
        let (from, to) = (s[0].as_f64()?, s[1].as_f64()?);
        #[allow(clippy::cast_precision_loss, reason = "a drawing")]
        let bytes = s[place].as_u64()? as f64;
        (to > from).then(|| (from, to, bytes / (to - from)))
    };
    list(&of["series"]).iter().filter_map(reading).collect()
}

fn role(of: &Value) -> &str {
    of["role"].as_str().unwrap_or("engine")
}

fn series(of: &Value, direction: &str, readings: &[Reading], most: f64, scale: &Scale<'_>) -> Row {
    let peak = readings.iter().map(|r| r.2).fold(0.0, f64::max);
    let title = format!("{} {direction} ({}), peak {}", name(of), role(of), rate(peak));
    let bar = |(from, to, rate): &Reading| -> Markup {
        // What was read as nothing is still seen to have been read.
        let high = if most > 0.0 { (rate / most * HIGH).max(1.0) } else { 1.0 };
        html! {
            (scale.bar((*from, *to), (18.0, HIGH), "read"))
            (scale.bar((*from, *to), (18.0 + HIGH - high, high), "bytes"))
        }
    };
    let body = html! {
        (label(1.0, 13.0, "small", &title))
        (scale.bar((0.0, scale.length), (18.0, HIGH), "unread"))
        @for reading in readings { (bar(reading)) }
    };
    Row { height: HIGH + 28.0, body }
}

/// Where single readings are not listed: the time that the bytes are of, and their sum, or that they were not measured.
fn whole(of: &Value, scale: &Scale<'_>) -> Row {
    let bytes = of["tx_bytes"].as_u64().zip(of["rx_bytes"].as_u64());
    let says = bytes.map_or_else(
        || "not measured".to_owned(),
        |(out, into)| format!("{} out, {} in", amount(out), amount(into)),
    );
    let title = format!("{} ({}): {says}", name(of), role(of));
    let span = if bytes.is_some() { &of["window"] } else { &of["transfer"] };
    let class = if bytes.is_some() { "window" } else { "unread" };
    let body = html! {
        (label(1.0, 13.0, "small", &title))
        @if let (Some(from), Some(to)) = (scale.moment(&span[0]), scale.moment(&span[1])) {
            (scale.bar((from, to), (18.0, 6.0), class))
        }
    };
    Row { height: 34.0, body }
}

fn trouble(at: f64, what: &str, scale: &Scale<'_>) -> Row {
    let x = scale.place(at);
    let beside = if x > 50.0 { x - 1.5 } else { x + 1.5 };
    let body = html! {
        circle class="trouble" cx=(percent(x)) cy="9" r="4" {}
        (label(beside, 13.0, "mark sure", what))
    };
    Row { height: 20.0, body }
}
