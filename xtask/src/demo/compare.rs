//! What the engines were in against what the agent said of them. Pure: JSON lines in, a comparison out.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use anyhow::{Context, Result};
use serde_json::Value;

use crate::own::{Own, lines};

/// Confidences in their order.
const CONFIDENCES: [&str; 3] = ["possible", "likely", "certain"];

/// Everything, by scenario in the order of the truth.
#[derive(Debug, Default)]
pub(crate) struct Comparison {
    /// Scenario and its rooms.
    pub(crate) scenarios: Vec<(String, Vec<Room>)>,
    /// Rooms that the agent saw at the workload's endpoints and the workload did not make.
    pub(crate) invented: Vec<String>,
    /// Rooms of other engines on this host.
    pub(crate) foreign: usize,
}

/// One room.
#[derive(Debug)]
pub(crate) struct Room {
    pub(crate) number: String,
    /// How it ended in the engines.
    pub(crate) label: String,
    /// What must be said of it; `None`: it must not be called pinned.
    pub(crate) expected: Option<Expected>,
    /// Last verdict with which it was called pinned.
    pub(crate) found: Option<Found>,
    /// What the agent took it for where it could not tell: the candidates beside `unknown`.
    pub(crate) unsure: Option<Vec<String>>,
    /// The agent's outcome, when it closed the room.
    pub(crate) closed: Option<String>,
    /// What is wrong.
    pub(crate) wrong: Option<String>,
}

/// What the engines' state allows to say.
#[derive(Debug)]
pub(crate) struct Expected {
    pub(crate) must: bool,
    pub(crate) class: Vec<String>,
    pub(crate) owed: Vec<String>,
    pub(crate) min_confidence: String,
    pub(crate) max_confidence: String,
    pub(crate) why: String,
}

/// What the agent said.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) class: String,
    pub(crate) confidence: String,
    pub(crate) candidates: Vec<String>,
    pub(crate) owed: Option<String>,
    pub(crate) endpoint: Option<String>,
    pub(crate) evidence: Option<String>,
}

impl Comparison {
    /// How many rooms are wrong.
    pub(crate) fn wrong(&self) -> usize {
        let wrong = self.scenarios.iter().flat_map(|(_, rooms)| rooms).filter(|room| room.wrong.is_some());
        wrong.count() + self.invented.len()
    }

    /// A room worth explaining: one that must be pinned and was found, of the incident's kind if there is one.
    pub(crate) fn to_explain(&self) -> Option<&str> {
        let pinned = |room: &&Room| room.found.is_some() && room.expected.as_ref().is_some_and(|e| e.must);
        let of = |wanted: &str| {
            self.scenarios.iter().filter(|(name, _)| name == wanted).flat_map(|(_, rooms)| rooms).find(pinned)
        };
        of("abort_first_nixl")
            .or_else(|| self.scenarios.iter().flat_map(|(_, rooms)| rooms).find(pinned))
            .map(|room| room.number.as_str())
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn texts(value: &Value) -> Vec<String> {
    value.as_array().into_iter().flatten().map(text).collect()
}

/// The lines of a truth file that a comparison needs.
///
/// # Errors
/// When a line is not JSON.
pub(crate) fn rooms_only(truth: &str) -> Result<String> {
    let mut out = String::new();
    for line in lines(truth) {
        let line = line?;
        if matches!(line["kind"].as_str(), Some("room" | "expected")) {
            out.push_str(&line.to_string());
            out.push('\n');
        }
    }
    Ok(out)
}

/// Compares a truth file with the agent's events. `late`: the agent began after the rooms that warmed the
/// connections up, so these are left out.
///
/// # Errors
/// When a line of either is not JSON.
pub(crate) fn compare(truth: &str, events: &str, late: bool) -> Result<Comparison> {
    let mut expected = HashMap::new();
    let mut rooms = Vec::new();
    let mut requests = false;
    for line in lines(truth) {
        let line = line.context("truth")?;
        match line["kind"].as_str() {
            Some("request") => requests = true,
            Some("room") if late && line["scenario"].as_str().is_some_and(|s| s.starts_with("warmup")) => {}
            Some("room") => rooms.push(line),
            Some("expected") => {
                expected.insert(text(&line["room"]), line);
            }
            _ => {}
        }
    }
    let own = Own::of_truth(truth)?;
    let (mut found, mut closed) = (HashMap::new(), HashMap::new());
    let (mut invented, mut foreign) = (BTreeSet::new(), HashSet::new());
    let mut unsure = HashMap::new();
    for line in lines(events) {
        let line = line.context("events")?;
        let Some(room) = line["room"].as_str().map(str::to_owned) else { continue };
        if !own.has(&room) {
            if own.is(&line) {
                invented.insert(room)
            } else {
                foreign.insert(room)
            };
            continue;
        }
        match line["event"].as_str() {
            Some("room_pinned" | "verdict_changed") if line["pinned"] == true => {
                found.insert(room.clone(), read_found(&line["verdict"]));
            }
            // NIXL before 0.5.21 never acknowledges an ABORT. To an agent that came less than decode's waiting timeout
            // before it, an ABORT that prefill ignored and one that ended a room older than the agent are the same
            // bytes. An operator wants to be told of the room and of both readings, not to be sent after a room that
            // is over: `unknown` with the pin among its candidates is the right answer there, and there only.
            Some("verdict_changed")
                if late && line["backend"] == "nixl" && line["completeness"] == "preexisting" =>
            {
                unsure.insert(room.clone(), read_found(&line["verdict"]).candidates);
            }
            Some("room_closed") => {
                closed.insert(room.clone(), text(&line["outcome"]));
            }
            _ => {}
        }
    }
    let mut scenarios: BTreeMap<usize, (String, Vec<Room>)> = BTreeMap::new();
    for line in &rooms {
        let number = text(&line["room"]);
        let scenario = text(&line["scenario"]);
        let mut room = Room {
            label: text(&line["label"]),
            expected: expected.get(&number).map(read_expected),
            found: found.remove(&number),
            unsure: unsure.remove(&number),
            closed: closed.remove(&number),
            wrong: None,
            number,
        };
        room.wrong = judge(&room, requests);
        let place = scenarios.values().position(|(name, _)| *name == scenario).unwrap_or(scenarios.len());
        scenarios.entry(place).or_insert_with(|| (scenario, Vec::new())).1.push(room);
    }
    Ok(Comparison {
        scenarios: scenarios.into_values().collect(),
        invented: invented.into_iter().collect(),
        foreign: foreign.len(),
    })
}

fn read_expected(line: &Value) -> Expected {
    Expected {
        must: line["pin"] == "must",
        class: texts(&line["class"]),
        owed: texts(&line["owed"]),
        // A truth without it was recorded for an observer of frames alone.
        min_confidence: line["min_confidence"].as_str().unwrap_or("possible").to_owned(),
        max_confidence: text(&line["max_confidence"]),
        why: text(&line["why"]),
    }
}

fn read_found(verdict: &Value) -> Found {
    let owed_by = &verdict["owed_by"];
    Found {
        class: text(&verdict["class"]),
        confidence: text(&verdict["confidence"]),
        candidates: verdict["candidates"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|c| text(&c["class"]))
            .collect(),
        owed: owed_by["role"].as_str().map(str::to_owned),
        endpoint: owed_by["endpoint"].as_str().map(str::to_owned),
        evidence: telling(&texts(&verdict["evidence"])),
    }
}

/// The line of evidence that tells most: a fact if there is one, else the last that is not said of every room.
fn telling(evidence: &[String]) -> Option<String> {
    const FACTS: &[&str] = &["refused", "closed", "exited", "reset", "ABORT from", "has not sent"];
    const COMMON: &[&str] =
        &["overdue after", "METADATA (", "kernel acknowledged", "from frames alone", "looks the same"];
    let has = |words: &'static [&str]| move |line: &&String| words.iter().any(|word| line.contains(word));
    let fact = evidence.iter().find(has(FACTS));
    fact.or_else(|| evidence.iter().rfind(|line| !has(COMMON)(line))).or(evidence.first()).cloned()
}

fn rank(confidence: &str) -> usize {
    CONFIDENCES.iter().position(|c| *c == confidence).unwrap_or(CONFIDENCES.len())
}

/// `requests`: those behind the rooms could be seen.
fn judge(room: &Room, requests: bool) -> Option<String> {
    if room.label == "success" && room.closed.as_deref() != Some("success") {
        let said = room.closed.as_deref().unwrap_or("not closed");
        return Some(format!("both engines succeeded, the agent says: {said}"));
    }
    if room.label == "success_off_wire" && requests && matches!(room.closed.as_deref(), None | Some("failed"))
    {
        let said = room.closed.as_deref().unwrap_or("not closed");
        return Some(format!("both requests were answered, the agent says: {said}"));
    }
    match (&room.expected, &room.found) {
        (None, Some(found)) => Some(format!("called pinned ({}) though it is not", found.class)),
        (Some(expected), None) if expected.must => {
            let told = room.unsure.iter().flatten().any(|class| expected.class.contains(class));
            (!told).then(|| "not found".to_owned())
        }
        (Some(expected), Some(found)) => {
            let class =
                std::iter::once(&found.class).chain(&found.candidates).any(|c| expected.class.contains(c));
            let said = found.owed.as_deref().unwrap_or("nobody");
            let owed = expected.owed.iter().any(|owed| owed == said);
            if !class {
                Some(format!("class {}, right is {}", found.class, expected.class.join(" or ")))
            } else if !owed {
                Some(format!("owed by {said}, right is {}", expected.owed.join(" or ")))
            } else if rank(&found.confidence) > rank(&expected.max_confidence) {
                Some(format!(
                    "{}, what is seen carries no more than {}",
                    found.confidence, expected.max_confidence
                ))
            } else if rank(&found.confidence) < rank(&expected.min_confidence) {
                Some(format!("only {}, what is seen demands {}", found.confidence, expected.min_confidence))
            } else {
                None
            }
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
    use super::*;

    const TRUTH: &str = r#"{"kind":"room","room":11111111111111111111,"scenario":"healthy","label":"success"}
{"kind":"room","room":12,"scenario":"abort_first","label":"pinned"}
{"kind":"expected","room":12,"pin":"must","class":["abort_before_entry"],"owed":["prefill"],"max_confidence":"likely","why":"x"}
"#;
    const CLOSED: &str = r#"{"event":"room_closed","room":"11111111111111111111","outcome":"success"}"#;

    fn pinned(room: &str, class: &str, confidence: &str, owed: &str) -> String {
        format!(
            "{CLOSED}\n{{\"event\":\"room_pinned\",\"room\":\"{room}\",\"pinned\":true,\"verdict\":{{\"class\":\"{class}\",\
             \"confidence\":\"{confidence}\",\"owed_by\":{{\"role\":\"{owed}\"}},\"evidence\":[\"e\"]}}}}"
        )
    }

    fn wrong(events: &str) -> Vec<String> {
        let result = compare(TRUTH, events, false).unwrap();
        result.scenarios.iter().flat_map(|(_, rooms)| rooms).filter_map(|room| room.wrong.clone()).collect()
    }

    #[test]
    fn agreement_needs_class_debtor_and_measure() {
        assert_eq!(wrong(&pinned("12", "abort_before_entry", "possible", "prefill")), Vec::<String>::new());
        assert_eq!(wrong(&pinned("12", "peer_lost", "possible", "prefill")).len(), 1);
        assert_eq!(wrong(&pinned("12", "abort_before_entry", "possible", "decode")).len(), 1);
        assert_eq!(wrong(&pinned("12", "abort_before_entry", "certain", "prefill")).len(), 1);
    }

    #[test]
    fn a_success_off_the_wire_is_seen_by_its_requests() {
        let room =
            "{\"kind\":\"room\",\"room\":5,\"scenario\":\"healthy_nixl\",\"label\":\"success_off_wire\"}\n";
        let requests = format!("{room}{{\"kind\":\"request\",\"room\":5}}\n");
        let closed = "{\"event\":\"room_closed\",\"room\":\"5\",\"outcome\":null}";
        let wrong = |truth: &str, events| compare(truth, events, false).unwrap().wrong();
        assert_eq!((wrong(room, ""), wrong(&requests, ""), wrong(&requests, closed)), (0, 1, 0));
    }

    #[test]
    fn what_is_seen_demands_a_confidence() {
        let truth = TRUTH.replace("\"max_confidence\"", "\"min_confidence\":\"likely\",\"max_confidence\"");
        let wrong = |confidence| {
            let events = pinned("12", "abort_before_entry", confidence, "prefill");
            compare(&truth, &events, false).unwrap().wrong()
        };
        assert_eq!((wrong("possible"), wrong("likely"), wrong("certain")), (1, 0, 1));
    }

    #[test]
    fn nobody_may_owe() {
        let truth = TRUTH.replace("[\"prefill\"]", "[\"nobody\"]");
        let nobody = pinned("12", "abort_before_entry", "likely", "X").replace("{\"role\":\"X\"}", "null");
        assert_eq!(compare(&truth, &nobody, false).unwrap().wrong(), 0);
        let prefill = pinned("12", "abort_before_entry", "likely", "prefill");
        assert_eq!(compare(&truth, &prefill, false).unwrap().wrong(), 1);
    }

    #[test]
    fn silence_and_false_alarms_are_wrong() {
        assert_eq!(wrong(CLOSED), ["not found"]);
        let alarm = pinned("11111111111111111111", "peer_lost", "possible", "decode");
        assert_eq!(wrong(&alarm).len(), 2, "{:?}", wrong(&alarm));
        assert_eq!(
            wrong(&pinned("12", "abort_before_entry", "possible", "prefill").replace("success", "failed"))
                .len(),
            1
        );
    }

    #[test]
    fn a_late_agent_may_leave_open_what_nixl_does_not_say() {
        let event = format!(
            "{CLOSED}\n{{\"event\":\"verdict_changed\",\"room\":\"12\",\"pinned\":false,\"backend\":\"nixl\",\
             \"completeness\":\"preexisting\",\"verdict\":{{\"class\":\"unknown\",\
             \"candidates\":[{{\"class\":\"abort_before_entry\"}}]}}}}"
        );
        let wrong = |events: &str, late| compare(TRUTH, events, late).unwrap().wrong();
        assert_eq!(wrong(&event, true), 0);
        assert_eq!(wrong(&event, false), 1, "not late");
        assert_eq!(wrong(&event.replace("nixl", "mooncake"), true), 1, "mooncake says");
        assert_eq!(wrong(&event.replace("abort_before_entry", "queued"), true), 1, "another candidate");
    }

    #[test]
    fn rooms_of_other_engines_are_left_alone_and_invented_ones_are_wrong() {
        let truth = r#"{"kind":"ready","rank_ports":[4001]}"#.to_owned() + "\n" + TRUTH;
        let other = r#"{"event":"room_closed","room":"33","outcome":"success","views":{"decode":{"peer":"[::1]:PORT"}}}"#;
        let compared = |port: &str| {
            let events =
                pinned("12", "abort_before_entry", "likely", "prefill") + "\n" + &other.replace("PORT", port);
            compare(&truth, &events, false).unwrap()
        };
        let result = compared("5001");
        assert_eq!((result.wrong(), result.foreign), (0, 1));
        assert_eq!(result.to_explain(), Some("12"));
        let result = compared("4001");
        assert_eq!((result.wrong(), result.foreign), (1, 0));
        assert_eq!(result.invented, ["33"]);
    }
}
