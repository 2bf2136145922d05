//! What the agent said of requests at engines' HTTP ports against the router's own record of them. Pure: JSON lines in,
//! sentences out.
//!
//! A room may be closed before its requests are answered; what the agent had not seen of them by then is not asked for.

use std::collections::HashMap;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::own::lines;

/// A client that hangs up so soon may be gone before its server's process looks at the connection, nanoseconds: what was not read of
/// a connection that is reset is thrown away.
const AT_ONCE: u64 = 2_000_000;

/// What is wrong with the last that was said of each room; empty: nothing.
///
/// # Errors
/// When a line of either is not JSON.
pub(crate) fn wrong(truth: &str, events: &str) -> Result<Vec<String>> {
    let mut last: HashMap<String, Value> = HashMap::new();
    for event in lines(events) {
        let event = event.context("the agent's events")?;
        if let Some(room) = event["room"].as_str() {
            last.insert(room.to_owned(), event);
        }
    }
    let mut wrong = Vec::new();
    for line in lines(truth) {
        let line = line.context("the truth file")?;
        if line["kind"] == "request" {
            let room = line["room"].to_string();
            let said = last.get(&room).map_or(&Value::Null, |event| &event["request"]);
            let side = line["side"].as_str().unwrap_or_default();
            wrong
                .extend(judge(&line, side, said).map(|why| format!("room {room}, request at {side}: {why}")));
        }
    }
    Ok(wrong)
}

fn judge(truth: &Value, side: &str, said: &Value) -> Option<String> {
    let role = if side.contains("decode") { "decode" } else { "prefill" };
    let leg = &said[role];
    if leg.is_null() {
        // Its connection ended under its client before any of an answer, or its client was gone at once: the server need not have read it.
        let lasted = truth["end_rt"]
            .as_u64()
            .zip(truth["begin_rt"].as_u64())
            .map(|(end, begin)| end.saturating_sub(begin));
        let gone = truth["end"] == "hung_up" && lasted.is_some_and(|nanos| nanos < AT_ONCE);
        return (truth["end"] != "broken" && !gone).then(|| "not seen".to_owned());
    }
    if said["rid"] != truth["rid"] {
        return Some(format!("its id is {}, the agent says {}", truth["rid"], said["rid"]));
    }
    if leg["ended"].is_null() {
        return None;
    }
    let right: &[&str] = match (truth["end"].as_str(), truth["status"].as_u64()) {
        (Some("answered"), Some(200)) => &["finished", "answered"],
        (Some("answered"), _) => &["error", "aborted"],
        (Some("hung_up"), _) => &["client_hung_up", "hung_up"],
        (Some("broken"), _) => &["engine_hung_up", "hung_up"],
        _ => &[],
    };
    let how = leg["how"].as_str().unwrap_or_default();
    if !right.contains(&how) {
        let right = if right.is_empty() { "open".to_owned() } else { right.join(" or ") };
        return Some(format!("it is {right}, the agent says {how}"));
    }
    let status = &leg["status"];
    (truth["end"] == "answered" && !status.is_null() && *status != truth["status"])
        .then(|| format!("its status is {}, the agent says {status}", truth["status"]))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    const TRUTH: &str =
        r#"{"kind":"request","room":5,"rid":"a","side":"nixl-prefill","end":"END","status":STATUS}"#;

    fn wrong_of(end: &str, status: &str, leg: &str) -> usize {
        let truth = TRUTH.replace("END", end).replace("STATUS", status);
        let event = format!(r#"{{"room":"5","request":{{"rid":"a","prefill":{leg}}}}}"#);
        wrong(&truth, &event).unwrap().len()
    }

    #[test]
    fn each_end_has_its_word() {
        let leg = |how: &str| format!(r#"{{"ended":"t","how":"{how}","status":200}}"#);
        assert_eq!(wrong_of("answered", "200", &leg("finished")), 0);
        assert_eq!(wrong_of("answered", "200", &leg("client_hung_up")), 1);
        assert_eq!(wrong_of("answered", "500", &leg("error")), 1, "another status");
        assert_eq!(wrong_of("hung_up", "null", &leg("client_hung_up")), 0);
        assert_eq!(wrong_of("open", "null", &leg("finished")), 1);
    }

    #[test]
    fn what_was_not_seen_yet_is_not_asked_for_but_its_begin_is() {
        assert_eq!(wrong_of("answered", "200", r#"{"ended":null}"#), 0);
        assert_eq!(wrong_of("answered", "200", "null"), 1);
        assert_eq!(wrong_of("broken", "null", "null"), 0, "it may never have arrived");
        let gone_after = |nanos: u64| {
            let times = format!(r#""begin_rt":1000,"end_rt":{},"kind""#, 1000 + nanos);
            let truth =
                TRUTH.replace("END", "hung_up").replace("STATUS", "null").replace(r#""kind""#, &times);
            wrong(&truth, "").unwrap().len()
        };
        assert_eq!((gone_after(AT_ONCE - 1), gone_after(AT_ONCE)), (0, 1));
        assert_eq!(
            wrong(TRUTH.replace("END", "open").replace("STATUS", "null").as_str(), "").unwrap().len(),
            1
        );
    }
}
