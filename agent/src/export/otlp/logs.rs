//! Pinned rooms and findings as log records: one at once when a room is pinned or a finding opens, one for whatever then
//! happens to it.
//!
//! Pure.

use opentelemetry::logs::{AnyValue, LogRecord as _, Logger as _, LoggerProvider as _, Severity};
use opentelemetry::{TraceFlags, Value};
use opentelemetry_sdk::logs::{SdkLogRecord, SdkLogger, SdkLoggerProvider};

use super::resource::ProcessKey;
use super::spans::{Tracer, party, process, summary, text};
use crate::export::{FindingNews, RoomEvent};
use crate::rooms::model::{Event, FindingEvent, Outcome, Role, RoomSnapshot};
use crate::verdict::model::{Confidence, Finding};

/// Lines of evidence and actions in a record.
const LINES: usize = 32;

/// Makes empty records; the SDK has no other way to get one.
#[derive(Debug)]
pub(super) struct Records {
    logger: SdkLogger,
}

impl Default for Records {
    fn default() -> Self {
        Self { logger: SdkLoggerProvider::builder().build().logger("roomtrace") }
    }
}

impl Records {
    /// The record of an event; `None` for a room that was never pinned.
    pub(super) fn record(
        &self,
        e: &RoomEvent,
        tracer: &Tracer<'_>,
    ) -> Option<(Option<ProcessKey>, SdkLogRecord)> {
        if !e.flagged() || matches!(e.event, Event::Scheduled(_)) {
            return None;
        }
        let view = tracer.concerned()?;
        let room = e.event.snapshot();
        let at = if let Event::Closed(r) = &e.event { r.closed_at.unwrap_or(r.at) } else { room.at };
        let mut record = self.logger.create_log_record();
        record.set_event_name(e.event.name());
        record.set_timestamp(e.clock.system_time(at));
        record.set_observed_timestamp(e.clock.system_time(room.at));
        let (severity, name) = severity(&e.event);
        record.set_severity_number(severity);
        record.set_severity_text(name);
        record.set_body(AnyValue::from(text(&body(&e.event))));
        for kv in tracer.attributes(view.role) {
            record.add_attribute(kv.key, any(kv.value));
        }
        if let Some(v) = &room.verdict {
            if room.pinned() {
                record.add_attribute("error.type", v.class.label());
            }
            record.add_attribute("sglang.pd.evidence", list(v.evidence.iter().map(String::as_str)));
            record.add_attribute("sglang.pd.actions", list(v.actions.iter().map(|a| a.command.as_str())));
            record.add_attribute("sglang.pd.candidates", list(v.candidates.iter().map(|c| c.class.label())));
        }
        record.set_trace_context(tracer.trace(), tracer.root_id(view.role), Some(TraceFlags::SAMPLED));
        Some((process(view), record))
    }

    /// The record of what happened to a finding, under the process that it is about.
    pub(super) fn finding(&self, news: &FindingNews) -> (Option<ProcessKey>, SdkLogRecord) {
        let f = news.event.finding();
        let mut record = self.logger.create_log_record();
        record.set_event_name(news.event.name());
        record.set_timestamp(news.clock.system_time(f.closed_at.unwrap_or(news.at)));
        record.set_observed_timestamp(news.clock.system_time(news.at));
        let (severity, name) = match (&news.event, f.confidence) {
            (FindingEvent::Closed(_), _) => (Severity::Info, "INFO"),
            // What silence alone suggests must not page.
            (FindingEvent::Opened(_), Confidence::Possible) => (Severity::Warn, "WARN"),
            (FindingEvent::Opened(_), _) => (Severity::Error, "ERROR"),
        };
        record.set_severity_number(severity);
        record.set_severity_text(name);
        record.set_body(AnyValue::from(text(&finding_body(&news.event))));
        record.add_attribute("sglang.pd.verdict", f.class.label());
        record.add_attribute("sglang.pd.confidence", f.confidence.label());
        if let Some(role) = f.engine.role {
            record.add_attribute("sglang.pd.role", Role::label(role));
        }
        record.add_attribute("sglang.pd.owed_by", party(&f.engine));
        if let Some(rank) = f.engine.rank {
            record.add_attribute("sglang.pd.rank", AnyValue::Int(rank.into()));
        }
        record.add_attribute("sglang.pd.group", format!("{:016x}", f.group));
        record.add_attribute("sglang.pd.group_size", AnyValue::Int(f.room_count.into()));
        let rooms: Vec<String> = f.rooms.iter().take(LINES).map(ToString::to_string).collect();
        record.add_attribute("sglang.pd.rooms", list(rooms.iter().map(String::as_str)));
        if f.closed_at.is_none() {
            record.add_attribute("error.type", f.class.label());
        }
        record.add_attribute("sglang.pd.evidence", list(f.evidence.iter().map(String::as_str)));
        record.add_attribute("sglang.pd.actions", list(f.actions.iter().map(|a| a.command.as_str())));
        (f.engine.task.map(ProcessKey::from), record)
    }
}

/// One line for a person: `transfer_worker_silent (likely): prefill rank 0 …, pins 12 rooms`.
fn finding_body(event: &FindingEvent) -> String {
    let of = |f: &Finding| format!("{} ({}): {}", f.class.label(), f.confidence.label(), party(&f.engine));
    match event {
        FindingEvent::Opened(f) if f.room_count > 0 => format!("{}, {} rooms", of(f), f.room_count),
        FindingEvent::Opened(f) => of(f),
        FindingEvent::Closed(f) => format!("{} is over", of(f)),
    }
}

/// A pin that silence alone suggests is a warning: it must not page.
fn severity(event: &Event) -> (Severity, &'static str) {
    let room = event.snapshot();
    match &room.verdict {
        Some(v) if room.pinned() && v.confidence == Confidence::Possible => (Severity::Warn, "WARN"),
        Some(_) if room.pinned() => (Severity::Error, "ERROR"),
        _ => (Severity::Info, "INFO"),
    }
}

fn body(event: &Event) -> String {
    match event {
        Event::VerdictChanged(r) if !r.pinned() => {
            format!("room {} is pinned no longer, and whether it still hangs is not known", r.room)
        }
        Event::Pinned(r) | Event::VerdictChanged(r) => summary(r),
        Event::Recovered(r) => match &r.verdict {
            Some(v) => format!("room {} is pinned no longer: {}", r.room, v.class.label()),
            None => format!("room {} is pinned no longer: nothing of it is overdue", r.room),
        },
        Event::Closed(r) | Event::Scheduled(r) => ended(r),
    }
}

fn ended(r: &RoomSnapshot) -> String {
    match r.outcome {
        Some(o) if o != Outcome::Unknown => {
            format!("room {} ended ({}) after it was pinned", r.room, o.label())
        }
        // A timer or a number used again says that it is over, not how.
        _ => format!("room {} was pinned and is followed no longer; how it ended was not seen", r.room),
    }
}

fn list<'a>(lines: impl Iterator<Item = &'a str>) -> AnyValue {
    AnyValue::ListAny(Box::new(lines.take(LINES).map(|l| AnyValue::from(text(l))).collect()))
}

fn any(value: Value) -> AnyValue {
    match value {
        Value::Bool(b) => AnyValue::Boolean(b),
        Value::I64(n) => AnyValue::Int(n),
        Value::F64(n) => AnyValue::Double(n),
        Value::String(s) => AnyValue::String(s),
        other => AnyValue::from(other.to_string()),
    }
}

/// Upper bound of a record's encoded size, bytes (a test holds it against the encoder).
pub(super) fn size(record: &SdkLogRecord) -> usize {
    let body = record.body().map_or(0, value_size);
    200 + body + record.attributes_iter().map(|(k, v)| 24 + k.as_str().len() + value_size(v)).sum::<usize>()
}

fn value_size(value: &AnyValue) -> usize {
    match value {
        AnyValue::String(s) => 16 + s.as_str().len(),
        AnyValue::ListAny(l) => 16 + l.iter().map(value_size).sum::<usize>(),
        _ => 16,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::event::{Mono, SECOND};
    use crate::export::clock::Clock;
    use crate::export::testing::{EPOCH, closed, finding, identity, life, pinned};
    use crate::export::trace_id::trace_id;
    use crate::verdict::model::Class;
    use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
    use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
    use opentelemetry_proto::transform::logs::tonic::group_logs_by_resource_and_scope;
    use opentelemetry_sdk::logs::LogBatch;

    fn record(event: Event) -> Option<SdkLogRecord> {
        let e = RoomEvent { event, clock: Clock::fixed(EPOCH) };
        let identity = identity();
        Records::default().record(&e, &Tracer::new(&identity, &e)).map(|r| r.1)
    }

    #[test]
    fn every_turn_of_a_pinned_room_is_a_record_in_its_trace_and_others_are_none() {
        let told: Vec<_> = life(7).into_iter().map(|e| record(e).unwrap()).collect();
        let names: Vec<_> = told.iter().map(|r| r.event_name().unwrap()).collect();
        assert_eq!(names, ["room_pinned", "verdict_changed", "room_closed"]);
        let severities: Vec<_> = told.iter().map(|r| r.severity_number().unwrap()).collect();
        assert_eq!(severities, [Severity::Error, Severity::Error, Severity::Info]);
        assert!(told.iter().all(|r| r.trace_context().unwrap().trace_id == trace_id(7, "")));
        assert_eq!(record(Event::Closed(closed(7).into())), None);
    }

    #[test]
    fn silence_alone_is_a_warning_and_not_an_error() {
        let mut r = pinned(7);
        r.verdict.as_mut().unwrap().confidence = Confidence::Possible;
        assert_eq!(record(Event::Pinned(r.into())).unwrap().severity_number(), Some(Severity::Warn));
    }

    #[test]
    fn a_pin_that_lost_its_certainty_is_told_as_that_and_not_as_recovered() {
        let said = |event| match record(event).unwrap().body().unwrap() {
            AnyValue::String(s) => s.as_str().to_owned(),
            other => format!("{other:?}"),
        };
        let mut r = pinned(7);
        r.was_pinned = true;
        r.verdict.as_mut().unwrap().class = Class::Unknown;
        assert!(said(Event::VerdictChanged(r.clone().into())).ends_with("is not known"));
        r.verdict.as_mut().unwrap().class = Class::Queued;
        assert!(said(Event::Recovered(r.clone().into())).ends_with("pinned no longer: queued"));
        r.verdict = None;
        assert!(said(Event::Recovered(r.into())).ends_with("nothing of it is overdue"));
        let mut end = closed(7);
        end.was_pinned = true;
        end.outcome = Some(Outcome::Unknown);
        assert!(said(Event::Closed(end.into())).ends_with("was not seen"));
    }

    fn finding_record(event: FindingEvent) -> (Option<ProcessKey>, SdkLogRecord) {
        let news = FindingNews { event, at: Mono(12 * SECOND), clock: Clock::fixed(EPOCH) };
        Records::default().finding(&news)
    }

    #[test]
    fn a_finding_is_a_record_under_its_engine() {
        let (process, record) = finding_record(FindingEvent::Opened(finding().into()));
        assert_eq!(process, finding().engine.task.map(ProcessKey::from));
        assert_eq!(record.event_name(), Some("finding_opened"));
        assert_eq!(record.severity_number(), Some(Severity::Error));
        let value = |key: &str| {
            let found = record.attributes_iter().find(|(k, _)| k.as_str() == key);
            found.map(|(_, v)| match v {
                AnyValue::String(s) => s.as_str().to_owned(),
                other => format!("{other:?}"),
            })
        };
        assert_eq!(value("error.type").as_deref(), Some("transfer_worker_silent"));
        assert_eq!(value("sglang.pd.group").as_deref(), Some("0000000000000abc"));
        assert!(value("sglang.pd.rooms").unwrap().contains("18446744073709551615"));
        let mut possible = finding();
        possible.confidence = Confidence::Possible;
        let (_, record) = finding_record(FindingEvent::Opened(possible.into()));
        assert_eq!(record.severity_number(), Some(Severity::Warn), "it must not page");
        let mut over = finding();
        over.closed_at = Some(Mono(20 * SECOND));
        let (_, record) = finding_record(FindingEvent::Closed(over.into()));
        assert_eq!(record.severity_number(), Some(Severity::Info));
        assert!(record.attributes_iter().all(|(k, _)| k.as_str() != "error.type"));
    }

    #[test]
    fn the_estimated_size_is_never_below_the_encoded_one() {
        let (_, finding) = finding_record(FindingEvent::Opened(finding().into()));
        never_below(&finding);
        never_below(&record(Event::Pinned(pinned(u64::MAX).into())).unwrap());
    }

    fn never_below(record: &SdkLogRecord) {
        let scope = super::super::spans::scope();
        let entry = [(record, &scope)];
        let batch = LogBatch::new(&entry);
        let resource_logs =
            group_logs_by_resource_and_scope(&batch, &ResourceAttributesWithSchema::default());
        let encoded = prost::Message::encoded_len(&ExportLogsServiceRequest { resource_logs });
        assert!(size(record) >= encoded, "{} < {encoded}", size(record));
    }
}
