//! Rooms as spans: `kv_transfer` with its phases when a view has ended, `room_pinned` while it has not.
//!
//! Pure. All times of one trace are converted with the clock offset that was valid when the room opened, so a
//! step of the wall clock in between bends no span. Counts and texts are bounded here, since spans made this
//! way pass by the SDK's own limits.

use std::borrow::Cow;
use std::time::{Duration, SystemTime};

use opentelemetry::trace::{Event as SpanEvent, SpanContext, SpanKind, Status, TraceFlags, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue, SpanId, TraceId, Value};
use opentelemetry_sdk::trace::{SpanData, SpanEvents, SpanLinks};

use super::resource::ProcessKey;
use super::{gpus, network, numbers, scheduled};
use crate::event::{Direction, Mono};
use crate::export::phases::{PhaseSpan, phases};
use crate::export::trace_id::{SpanName, trace_id};
use crate::export::{Identity, RoomEvent};
use crate::rooms::model::{Event, MessageMark, Outcome, Role, RoomSnapshot, View};
use crate::verdict::model::{Party, Verdict};

/// Messages shown as events of a span.
const EVENTS: usize = 128;

/// Characters of a text attribute.
const TEXT: usize = 1024;

/// Longest that a request can lie before its room's first message.
const DAY: Duration = Duration::from_hours(24);

/// Spans of one process.
pub(super) type Group = (Option<ProcessKey>, Vec<SpanData>);

/// One event's spans are made from this.
pub(super) struct Tracer<'a> {
    identity: &'a Identity,
    event: &'a Event,
    room: &'a RoomSnapshot,
    trace: TraceId,
    /// Wall clock at the room's opening.
    opened: SystemTime,
}

impl<'a> Tracer<'a> {
    pub(super) fn new(identity: &'a Identity, e: &'a RoomEvent) -> Self {
        let room = e.event.snapshot();
        Self {
            identity,
            event: &e.event,
            room,
            trace: trace_id(room.room, &identity.trace_salt),
            opened: e.clock.system_time(room.opened_at),
        }
    }

    /// Spans to send for the event, by process.
    pub(super) fn groups(&self) -> Vec<Group> {
        match self.event {
            Event::Closed(_) => self.views().flat_map(|v| self.ended(v)).collect(),
            Event::Scheduled(_) => {
                scheduled::groups(self, &self.room.scheduled, &self.views().collect::<Vec<_>>())
            }
            Event::Pinned(_) | Event::VerdictChanged(_) | Event::Recovered(_) => {
                self.concerned().map(|v| (process(v), vec![self.told(v)])).into_iter().collect()
            }
        }
    }

    /// The view an event is about: the one that has not ended, prefill before decode.
    pub(super) fn concerned(&self) -> Option<&'a View> {
        self.views().find(|v| v.terminal.is_none()).or_else(|| self.views().next())
    }

    pub(super) fn trace(&self) -> TraceId {
        self.trace
    }

    /// Id of the view's root span, on the wire or still to come.
    pub(super) fn root_id(&self, role: Role) -> SpanId {
        self.id(role, "root", 0)
    }

    fn views(&self) -> impl Iterator<Item = &'a View> + use<'a> {
        [self.room.prefill.as_ref(), self.room.decode.as_ref()].into_iter().flatten()
    }

    pub(super) fn id(&self, role: Role, what: &str, which: u64) -> SpanId {
        let host_id = &self.identity.host_id;
        SpanName { trace: self.trace, host_id, role, incarnation: self.room.incarnation, what, which }.id()
    }

    pub(super) fn wall(&self, at: Mono) -> SystemTime {
        if at < self.room.opened_at {
            // An engine has a request before the room's first message.
            return self.opened - Duration::from_nanos(self.room.opened_at.since(at)).min(DAY);
        }
        self.opened + Duration::from_nanos(at.since(self.room.opened_at))
    }

    /// Root and phases of a view that ended.
    fn ended(&self, view: &View) -> Vec<Group> {
        let end = self.room.closed_at.unwrap_or(self.room.at);
        let root = self.root_id(view.role);
        let mut attributes = self.attributes(view.role);
        let mut status = Status::Unset;
        if view.terminal.or(self.room.outcome) == Some(Outcome::Failed) {
            let class = self.room.verdict.as_ref().map_or("failed", |v| v.class.label());
            attributes.push(KeyValue::new("error.type", class));
            status = Status::error("the transfer failed");
        }
        attributes.extend(self.peer(view.role));
        attributes.extend(gpus::hardware(self.room, view.role));
        let mut span = self.span("kv_transfer", root, SpanId::INVALID, self.room.opened_at, end);
        span.attributes = attributes;
        span.status = status;
        span.events = self.messages(view.role);
        span.links = scheduled::links(&self.room.scheduled, view.role);
        let mut groups = vec![(process(view), vec![span])];
        let mut seen = Vec::new();
        for phase in phases(self.room, view.role) {
            // One prefill rank concludes once for every session that it serves.
            let same = (phase.phase, phase.rank);
            let nth = seen.iter().filter(|s| **s == same).count();
            seen.push(same);
            let owner = phase.rank.and_then(|_| rank_process(view, &phase)).or_else(|| process(view));
            let span = self.phase(view.role, &phase, nth as u64, root);
            match groups.iter_mut().find(|g| g.0 == owner) {
                Some(group) => group.1.push(span),
                None => groups.push((owner, vec![span])),
            }
        }
        groups
    }

    fn phase(&self, role: Role, phase: &PhaseSpan, nth: u64, root: SpanId) -> SpanData {
        let name = phase.phase.label();
        let id = self.id(role, name, phase.rank.map_or(u64::MAX, |rank| nth << 32 | u64::from(rank)));
        let mut span = self.span(name, id, root, phase.began, phase.ended);
        span.attributes = vec![
            KeyValue::new("sglang.pd.room", self.room.room.to_string()),
            KeyValue::new("sglang.pd.role", role.label()),
            KeyValue::new("sglang.pd.phase", name),
        ];
        span.attributes.extend(phase.rank.map(|r| KeyValue::new("sglang.pd.rank", Value::I64(r.into()))));
        span
    }

    /// Pinned, changed or recovered: a span that has ended, of a room that has not.
    fn told(&self, view: &View) -> SpanData {
        let name = self.event.name();
        let id = self.id(view.role, name, self.room.at.0);
        let pinned = self.room.pinned();
        // A changed verdict that still pins is told under the same name as the first.
        let name = if pinned { "room_pinned" } else { name };
        let mut span = self.span(name, id, self.root_id(view.role), self.room.opened_at, self.room.at);
        span.attributes = self.attributes(view.role);
        span.attributes.extend(self.peer(view.role));
        span.attributes.extend(gpus::hardware(self.room, view.role));
        if let (true, Some(verdict)) = (pinned, &self.room.verdict) {
            span.attributes.push(KeyValue::new("error.type", verdict.class.label()));
            span.status = Status::error(text(&summary(self.room)));
        }
        span.events = self.messages(view.role);
        span.links = scheduled::links(&self.room.scheduled, view.role);
        span
    }

    pub(super) fn span(
        &self,
        name: &'static str,
        id: SpanId,
        parent: SpanId,
        began: Mono,
        ended: Mono,
    ) -> SpanData {
        SpanData {
            span_context: SpanContext::new(self.trace, id, TraceFlags::SAMPLED, false, TraceState::NONE),
            parent_span_id: parent,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: Cow::Borrowed(name),
            start_time: self.wall(began),
            end_time: self.wall(ended),
            attributes: Vec::new(),
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: scope(),
        }
    }

    /// The room and its life.
    pub(super) fn number(&self) -> Vec<KeyValue> {
        vec![
            KeyValue::new("sglang.pd.room", self.room.room.to_string()),
            KeyValue::new("sglang.pd.incarnation", Value::I64(self.room.incarnation.into())),
        ]
    }

    /// What every span and record of the room says.
    pub(super) fn attributes(&self, role: Role) -> Vec<KeyValue> {
        let r = self.room;
        let mut all = self.number();
        all.extend([
            KeyValue::new("sglang.pd.role", role.label()),
            KeyValue::new("sglang.pd.pinned", r.pinned() || r.recovered),
            KeyValue::new("sglang.pd.recovered", r.recovered),
            KeyValue::new("sglang.pd.completeness", r.completeness.label()),
            KeyValue::new("network.transport", "tcp"),
            KeyValue::new("network.protocol.name", "zmtp"),
        ]);
        all.extend(r.backend.map(|b| KeyValue::new("sglang.pd.backend", b.label())));
        all.extend(r.outcome.map(|o| KeyValue::new("sglang.pd.outcome", o.label())));
        all.extend(r.verdict.iter().flat_map(|v| verdict_attributes(v, r.group_size)));
        all
    }

    /// The other end of the view's last message.
    fn peer(&self, role: Role) -> Vec<KeyValue> {
        let last = self.room.messages.iter().rev().find(|m| m.role == role);
        last.map(|m| address(m).to_vec()).unwrap_or_default()
    }

    fn messages(&self, role: Role) -> SpanEvents {
        let mine = self.room.messages.iter().filter(|m| m.role == role);
        let total = mine.clone().count();
        let mut events = SpanEvents::default();
        events.events = mine.take(EVENTS).map(|m| self.message(m)).collect();
        events.events.extend(gpus::events(self.room, role, |at| self.wall(at)));
        events.events.extend(network::events(self.room, role, |at| self.wall(at)));
        events.events.extend(numbers::events(self.room, role, |at| self.wall(at)));
        let beyond = u32::try_from(total.saturating_sub(EVENTS)).unwrap_or(u32::MAX);
        events.dropped_count = beyond.saturating_add(self.room.messages_dropped);
        events
    }

    fn message(&self, m: &MessageMark) -> SpanEvent {
        let direction = match m.direction {
            Direction::Sent => "transmit",
            Direction::Received => "receive",
        };
        let mut attributes = vec![KeyValue::new("network.io.direction", direction)];
        attributes.extend(address(m));
        attributes.extend(m.status.map(|s| KeyValue::new("sglang.pd.status", s.name())));
        attributes.extend(m.rank.map(|r| KeyValue::new("sglang.pd.rank", Value::I64(r.into()))));
        let pages = m.pages.and_then(|p| i64::try_from(p).ok());
        attributes.extend(pages.map(|p| KeyValue::new("sglang.pd.pages", p)));
        attributes.extend(m.dummy.map(|d| KeyValue::new("sglang.pd.dummy", d)));
        attributes.extend(m.acknowledged.map(|a| KeyValue::new("sglang.pd.acknowledged", a)));
        SpanEvent::new(m.kind.name(), self.wall(m.at), attributes, 0)
    }
}

/// A count as an attribute.
pub(super) fn number(n: u64) -> Value {
    Value::I64(i64::try_from(n).unwrap_or(i64::MAX))
}

/// A time as an attribute.
#[allow(clippy::cast_precision_loss, reason = "a duration for a graph")]
pub(super) fn seconds(from: Mono, to: Mono) -> f64 {
    to.since(from) as f64 / 1e9
}

fn address(m: &MessageMark) -> [KeyValue; 2] {
    [
        KeyValue::new("network.peer.address", m.peer.ip().to_string()),
        KeyValue::new("network.peer.port", Value::I64(m.peer.port().into())),
    ]
}

fn verdict_attributes(v: &Verdict, group_size: u32) -> Vec<KeyValue> {
    let mut all = vec![
        KeyValue::new("sglang.pd.verdict", v.class.label()),
        KeyValue::new("sglang.pd.confidence", v.confidence.label()),
        KeyValue::new("sglang.pd.owed_by", v.owed_by.as_ref().map_or_else(|| "nobody".to_owned(), party)),
        KeyValue::new("sglang.pd.group", format!("{:016x}", v.group)),
        KeyValue::new("sglang.pd.group_size", Value::I64(group_size.into())),
    ];
    all.extend(v.act_on.as_ref().map(|p| KeyValue::new("sglang.pd.act_on", party(p))));
    all.extend(v.expected.map(|k| KeyValue::new("sglang.pd.expected", k.name())));
    all
}

/// `prefill rank 0 at 10.0.0.2:4000 pid 4711`, as far as known.
pub(super) fn party(p: &Party) -> String {
    let mut out = p.role.map_or_else(|| "neither engine".to_owned(), |r| r.label().to_owned());
    for part in [
        p.rank.map(|r| format!(" rank {r}")),
        p.endpoint.map(|e| format!(" at {e}")),
        p.task.map(|t| format!(" pid {}", t.tgid)),
    ] {
        out.push_str(&part.unwrap_or_default());
    }
    out
}

/// One line for a person: `room 7 is pinned (likely, abort_before_entry): prefill rank 0 … owes STATUS`.
pub(super) fn summary(r: &RoomSnapshot) -> String {
    let Some(v) = &r.verdict else { return format!("room {} has no verdict any more", r.room) };
    let what = format!("({}, {})", v.confidence.label(), v.class.label());
    let state = if r.pinned() { "is pinned" } else { "is not pinned" };
    let owes = v.owed_by.as_ref().map_or_else(
        || "nobody owes a move".to_owned(),
        |p| format!("{} owes {}", party(p), v.expected.map_or("the next move", |k| k.name())),
    );
    let ends = v.ends_by_itself.as_ref().map_or("never ends by itself", |e| e.timer);
    format!("room {} {state} {what}: {owes}; {ends}", r.room)
}

/// Cut to the limit, at a character's boundary.
pub(super) fn text(s: &str) -> String {
    s.chars().take(TEXT).collect()
}

/// Who makes these spans and records.
pub(super) fn scope() -> InstrumentationScope {
    InstrumentationScope::builder("roomtrace").with_version(env!("CARGO_PKG_VERSION")).build()
}

/// The process of a view: that of its first rank whose process is known.
pub(super) fn process(view: &View) -> Option<ProcessKey> {
    view.ranks.iter().find_map(|r| r.task).map(ProcessKey::from)
}

fn rank_process(view: &View, phase: &PhaseSpan) -> Option<ProcessKey> {
    // A phase's rank is a prefill rank; only prefill's own view has its process.
    if view.role != Role::Prefill {
        return None;
    }
    view.ranks.iter().find(|r| r.rank == phase.rank).and_then(|r| r.task).map(ProcessKey::from)
}

/// Upper bound of a span's encoded size, bytes (a test holds it against the encoder).
pub(super) fn size(span: &SpanData) -> usize {
    let event = |e: &SpanEvent| 40 + e.name.len() + attributes_size(&e.attributes);
    let status = if let Status::Error { description } = &span.status { description.len() } else { 0 };
    200 + span.name.len()
        + status
        + attributes_size(&span.attributes)
        + span.links.iter().map(|l| 64 + attributes_size(&l.attributes)).sum::<usize>()
        + span.events.iter().map(event).sum::<usize>()
}

fn attributes_size(attributes: &[KeyValue]) -> usize {
    attributes.iter().map(|kv| 24 + kv.key.as_str().len() + kv.value.as_str().len()).sum()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
    use super::*;
    use crate::event::SECOND;
    use crate::export::clock::Clock;
    use crate::export::testing::{EPOCH, closed, identity, life, mark, pinned, task, view};
    use crate::sglang::message::Kind;
    use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
    use opentelemetry_proto::transform::common::tonic::ResourceAttributesWithSchema;
    use opentelemetry_proto::transform::trace::tonic::group_spans_by_resource_and_scope;

    fn groups(event: Event) -> Vec<Group> {
        let e = RoomEvent { event, clock: Clock::fixed(EPOCH) };
        Tracer::new(&identity(), &e).groups()
    }

    fn attribute(span: &SpanData, key: &str) -> Option<String> {
        span.attributes.iter().find(|kv| kv.key.as_str() == key).map(|kv| kv.value.to_string())
    }

    fn at(seconds: u64) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(EPOCH.unsigned_abs() / SECOND + seconds)
    }

    #[test]
    fn an_ended_room_is_a_root_with_its_phases() {
        let groups = groups(Event::Closed(closed(7).into()));
        assert_eq!(groups.len(), 1);
        let (process, spans) = &groups[0];
        assert_eq!(*process, Some(task(4711).into()));
        let names: Vec<_> = spans.iter().map(|s| s.name.as_ref()).collect();
        assert_eq!(names, ["kv_transfer", "bootstrap", "transfer", "transfer"]);
        let root = &spans[0];
        assert_eq!((root.start_time, root.end_time), (at(0), at(2)));
        assert_eq!(root.parent_span_id, SpanId::INVALID);
        assert_eq!(root.span_context.trace_id(), trace_id(7, ""));
        assert_eq!(root.status, Status::Unset);
        assert_eq!(attribute(root, "sglang.pd.room").unwrap(), "7");
        assert_eq!(attribute(root, "error.type"), None);
        assert_eq!(root.events.iter().map(|e| e.name.as_ref()).collect::<Vec<_>>(), ["METADATA", "STATUS"]);
        assert!(spans[1..].iter().all(|s| s.parent_span_id == root.span_context.span_id()));
        assert_eq!((spans[3].start_time, spans[3].end_time), (at(1), at(2)));
        assert_eq!(attribute(&spans[3], "sglang.pd.rank").unwrap(), "0");
    }

    #[test]
    fn a_pinned_room_is_told_while_it_is_open_and_again() {
        let [first, changed, closed] = life(7);
        let (first, changed) = (groups(first).remove(0).1, groups(changed).remove(0).1);
        assert_eq!(
            (first.len(), first[0].name.as_ref(), changed[0].name.as_ref()),
            (1, "room_pinned", "room_pinned")
        );
        assert!(
            matches!(&first[0].status, Status::Error { description } if description.contains("owes STATUS"))
        );
        assert_eq!(attribute(&first[0], "error.type").unwrap(), "abort_before_entry");
        assert_eq!(attribute(&first[0], "sglang.pd.pinned").unwrap(), "true");
        assert_eq!(attribute(&changed[0], "sglang.pd.confidence").unwrap(), "certain");
        assert_ne!(first[0].span_context.span_id(), changed[0].span_context.span_id());
        let root = &groups(closed).remove(0).1[0];
        assert_eq!(first[0].parent_span_id, root.span_context.span_id());
        assert_eq!(attribute(root, "sglang.pd.pinned").unwrap(), "true");
    }

    #[test]
    fn a_prefill_rank_that_serves_two_sessions_has_a_span_for_each() {
        let mut r = closed(7);
        let status = *r.messages.last().unwrap();
        r.messages.push(status);
        let ids: Vec<_> = groups(Event::Closed(r.into()))
            .into_iter()
            .flat_map(|g| g.1)
            .map(|s| s.span_context.span_id())
            .collect();
        let different: std::collections::HashSet<_> = ids.iter().collect();
        assert_eq!((ids.len(), different.len()), (5, 5));
    }

    #[test]
    fn the_two_views_of_one_host_have_roots_and_processes_of_their_own() {
        let mut r = closed(7);
        let mut decode = view(Role::Decode);
        decode.ranks[0].task = Some(task(815));
        r.decode = Some(decode);
        let groups = groups(Event::Closed(r.into()));
        assert_eq!(groups.len(), 2);
        assert_ne!(groups[0].0, groups[1].0);
        assert_ne!(groups[0].1[0].span_context.span_id(), groups[1].1[0].span_context.span_id());
        assert_eq!(groups[0].1[0].span_context.trace_id(), groups[1].1[0].span_context.trace_id());
    }

    #[test]
    fn messages_are_capped_and_the_rest_is_counted() {
        let mut r = pinned(7);
        r.messages = (0..1000).map(|n| mark(Mono(n), Role::Prefill, Kind::Status)).collect();
        r.messages_dropped = 5;
        let span = &groups(Event::Pinned(r.into())).remove(0).1[0];
        assert_eq!((span.events.len(), span.events.dropped_count), (EVENTS, 1000 - 128 + 5));
    }

    #[test]
    fn the_estimated_size_is_never_below_the_encoded_one() {
        for event in life(u64::MAX) {
            for (_, spans) in groups(event) {
                let estimate: usize = spans.iter().map(size).sum();
                let resource_spans =
                    group_spans_by_resource_and_scope(spans, &ResourceAttributesWithSchema::default());
                let encoded = prost::Message::encoded_len(&ExportTraceServiceRequest { resource_spans });
                assert!(estimate >= encoded, "{estimate} < {encoded}");
                assert!(estimate < encoded * 3, "{estimate} is far above {encoded}");
            }
        }
    }
}
