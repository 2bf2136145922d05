//! The JSON record of a finding: the same object on `--events` lines and in the API.
//!
//! Pure. Keys and their order are a contract with scripts, as for rooms ([`super::record`]).

use serde::Serialize;

use super::record::{ActionJson, KnownIssueJson, Maker, PartyJson, action, known_issue};
use crate::event::Mono;
use crate::rooms::model::FindingEvent;
use crate::verdict::known::known_issues;
use crate::verdict::model::Finding;

/// One finding at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct FindingRecord {
    event: &'static str,
    time: String,
    host: String,
    class: &'static str,
    confidence: &'static str,
    engine: PartyJson,
    rank: Option<u32>,
    /// Text, as everywhere: room numbers above 2^53 do not survive a JSON number.
    rooms: Vec<String>,
    room_count: u32,
    group: String,
    since: String,
    closed_at: Option<String>,
    evidence: Vec<String>,
    actions: Vec<ActionJson>,
    known_issues: Vec<KnownIssueJson>,
}

impl Maker<'_> {
    /// The record of what happened to a finding, told at `at`.
    pub fn finding_event(&self, event: &FindingEvent, at: Mono) -> FindingRecord {
        self.finding_record(event.name(), event.finding(), at)
    }

    /// The record of a finding as it stands at `at`.
    pub fn finding(&self, f: &Finding, at: Mono) -> FindingRecord {
        let event = if f.closed_at.is_some() { "finding_closed" } else { "finding_opened" };
        self.finding_record(event, f, at)
    }

    fn finding_record(&self, event: &'static str, f: &Finding, at: Mono) -> FindingRecord {
        FindingRecord {
            event,
            time: self.clock.rfc3339(f.closed_at.unwrap_or(at)),
            host: self.identity.host_name.clone(),
            class: f.class.label(),
            confidence: f.confidence.label(),
            engine: self.party(&f.engine),
            rank: f.engine.rank,
            rooms: f.rooms.iter().map(ToString::to_string).collect(),
            room_count: f.room_count,
            group: format!("{:016x}", f.group),
            since: self.clock.rfc3339(f.since),
            closed_at: f.closed_at.map(|at| self.clock.rfc3339(at)),
            evidence: f.evidence.clone(),
            actions: f.actions.iter().map(action).collect(),
            known_issues: known_issues(f.class, f.engine.backend, f.engine.releases)
                .into_iter()
                .map(known_issue)
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
    use super::super::clock::Clock;
    use super::super::testing::{EPOCH, finding, identity};
    use super::*;
    use crate::event::SECOND;
    use std::sync::Arc;

    /// The whole record, letter by letter.
    #[test]
    fn a_finding_is_exactly_this() {
        let (identity, clock) = (identity(), Clock::fixed(EPOCH));
        let maker = Maker { identity: &identity, clock: &clock };
        let opened = FindingEvent::Opened(Arc::new(finding()));
        let got =
            serde_json::to_string_pretty(&maker.finding_event(&opened, Mono(12 * SECOND))).unwrap() + "\n";
        assert_eq!(got, include_str!("../../tests/fixtures/export/finding_opened.json"), "{got}");
    }

    #[test]
    fn one_that_is_over_has_the_time_of_its_end() {
        let (identity, clock) = (identity(), Clock::fixed(EPOCH));
        let maker = Maker { identity: &identity, clock: &clock };
        let over = Finding { closed_at: Some(Mono(20 * SECOND)), ..finding() };
        let value = serde_json::to_value(maker.finding(&over, Mono(90 * SECOND))).unwrap();
        assert_eq!(value["event"], "finding_closed");
        assert_eq!(value["time"], "2023-11-14T22:13:40.000000000Z");
        assert_eq!(value["time"], value["closed_at"]);
        let open = serde_json::to_value(maker.finding(&finding(), Mono(90 * SECOND))).unwrap();
        assert_eq!(
            (&open["event"], &open["closed_at"]),
            (&"finding_opened".into(), &serde_json::Value::Null)
        );
    }
}
