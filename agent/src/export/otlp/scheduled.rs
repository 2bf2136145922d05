//! The engines' own traces in the room's: a link to each request, and a span that carries its id and stages.
//!
//! Pure. A room's spans go out when it closes, the engine's come later: its request is told then, as a span `engine_request`
//! of the same trace under the same root, which is known by its name alone.

use opentelemetry::trace::{
    Event as SpanEvent, Link, SpanContext, SpanId as OtelSpanId, Status, TraceFlags, TraceId as OtelTraceId,
    TraceState,
};
use opentelemetry::{Array, KeyValue, Value};
use opentelemetry_sdk::trace::{SpanData, SpanLinks};

use super::spans::{Group, Tracer, process, seconds, text};
use crate::event::Mono;
use crate::rooms::model::{Role, View};
use crate::spans::{EngineRequest, Stage};

/// Links to the requests of one role, or of an engine whose role is not known.
pub(super) fn links(requests: &[EngineRequest], role: Role) -> SpanLinks {
    let mut links = SpanLinks::default();
    links.links = requests.iter().filter(|r| r.role.is_none_or(|of| of == role)).map(link).collect();
    links
}

fn link(r: &EngineRequest) -> Link {
    let (trace, span) = (OtelTraceId::from_bytes(r.trace.0), OtelSpanId::from_bytes(r.span.0));
    let context = SpanContext::new(trace, span, TraceFlags::SAMPLED, true, TraceState::NONE);
    Link::new(context, vec![KeyValue::new("sglang.rid", text(&r.rid))], 0)
}

/// A span per request, under the root of its role's view. One whose times are not believed stands where it was told.
pub(super) fn groups(tracer: &Tracer<'_>, requests: &[EngineRequest], views: &[&View]) -> Vec<Group> {
    let group = |r: &EngineRequest| {
        let known = |v: &&&View| r.role.is_none_or(|role| v.role == role);
        // A room may be seen from one side only, and told of by the other's engine.
        let view = views.iter().find(known).or_else(|| views.first())?;
        Some((process(view), vec![span(tracer, view.role, r)]))
    };
    requests.iter().filter_map(group).collect()
}

fn span(tracer: &Tracer<'_>, root: Role, r: &EngineRequest) -> SpanData {
    let which = u64::from_be_bytes(r.span.0);
    let id = tracer.id(root, "engine_request", which);
    let mut span = tracer.span("engine_request", id, tracer.root_id(root), r.begin, r.end);
    span.attributes = tracer.number();
    span.attributes.push(KeyValue::new("sglang.rid", text(&r.rid)));
    span.attributes.extend(r.role.map(|role| KeyValue::new("sglang.pd.role", role.label())));
    if !r.doubted.is_empty() {
        let names = r.doubted.iter().map(|name| text(name).into()).collect();
        let key = "sglang.spans.times_not_believed";
        span.attributes.push(KeyValue::new(key, Value::Array(Array::String(names))));
    }
    span.links.links.push(link(r));
    if r.failed {
        span.status = Status::error("the engine says that the request failed");
    }
    span.events.events = r.stages.iter().map(|s| stage(s, |at| tracer.wall(at))).collect();
    span
}

/// A stage: when it began, and how long it took.
fn stage(s: &Stage, wall: impl Fn(Mono) -> std::time::SystemTime) -> SpanEvent {
    let seconds = seconds(s.begin, s.end);
    let attributes = vec![
        KeyValue::new("sglang.stage.duration_s", Value::F64(seconds)),
        KeyValue::new("sglang.stage.spans", Value::I64(s.spans.into())),
    ];
    SpanEvent::new(s.name.to_string(), wall(s.begin), attributes, 0)
}
