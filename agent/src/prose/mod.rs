//! What a person reads of a room: its explanation, whole and in parts, and its picture. Shared by the commands and the page.
//!
//! Pure: made from the JSON records that scripts get, so that all of them say the same. No I/O, no clock.

pub(crate) mod chart;
pub(crate) mod explain;
pub(crate) mod picture;
pub(crate) mod plain;
mod time_line;

use serde_json::Value;

/// An array's members; none of anything else.
pub(crate) fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// A string; `?` where it is not known.
pub(crate) fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}

/// So many of something.
pub(crate) fn counted(n: u64, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

/// `2026-11-29T02:41:07.123456789Z` → `02:41:07.123456`.
pub(crate) fn clock(rfc3339: &str) -> &str {
    let time = rfc3339.split_once('T').map_or(rfc3339, |(_, time)| time);
    let time = time.strip_suffix('Z').unwrap_or(time);
    time.get(..15).unwrap_or(time)
}

/// From one moment to another, both as records have them.
pub(crate) fn seconds(from: &str, to: &str) -> Option<f64> {
    let parse = |s: &str| s.parse::<jiff::Timestamp>().ok();
    Some(parse(to)?.duration_since(parse(from)?).as_secs_f64())
}
