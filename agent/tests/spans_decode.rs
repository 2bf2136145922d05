//! OTLP bytes → scheduler spans: every release's shape, and everything that is none.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod spans_support;

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use proptest::prelude::*;
use prost::Message as _;
use roomtrace::rooms::model::Role;
use roomtrace::spans::{MAX_SPANS, SpanId, TraceId, What, decode};
use spans_support::{Engine, Release, attribute, bytes_of, request_of};

const ROOM: u64 = 9_000_000_000_000_000_001;
const AT: u64 = 1_790_000_000_000_000_000;

#[test]
fn the_room_is_found_in_the_shape_of_every_release() {
    for (release, room, role) in [
        (Release::Early, Some(ROOM), None),
        (Release::RoomSpan, None, Some(Role::Prefill)),
        (Release::Hex, Some(ROOM), Some(Role::Prefill)),
    ] {
        let engine = Engine::prefill(release, ROOM, AT);
        let decoded = decode(&bytes_of(engine.sent(100, 150).request)).unwrap();
        let request = &decoded.spans[0];
        assert_eq!(request.what, What::Request { rid: engine.rid.into(), room, role }, "{release:?}");
        assert_eq!(
            (request.trace, request.id),
            (TraceId(engine.trace.to_be_bytes()), SpanId(engine.root().to_be_bytes()))
        );
        assert_eq!((request.begin, request.end, request.failed), (AT, AT + 150_000_000, false));
        if release == Release::RoomSpan {
            assert_eq!(
                (&decoded.spans[1].what, request.parent),
                (&What::Room { room: ROOM }, decoded.spans[1].id)
            );
        }
        assert_eq!((decoded.foreign, decoded.invalid, decoded.left_out), (0, 0, 0));
    }
}

#[test]
fn stages_and_threads_say_what_they_follow() {
    let engine = Engine::prefill(Release::Hex, ROOM, AT);
    let sent = engine.sent(100, 150);
    let front = decode(&bytes_of(sent.front)).unwrap().spans;
    assert_eq!(front[0].what, What::Stage("tokenize".into()));
    assert_eq!(front[2].what, What::Thread { tid: Some(101), tp_rank: Some(0) });
    assert_eq!((front[0].parent, front[2].parent), (front[2].id, SpanId(engine.root().to_be_bytes())));
    let computed = decode(&bytes_of(sent.computed)).unwrap().spans;
    assert_eq!((computed[0].after, computed[1].after), (front[1].id, computed[0].id));
    assert_eq!(computed[3].what, What::Stage("prefill_forward".into()));
    assert_eq!(computed[3].end, AT + 106_000_000);
}

#[test]
fn rooms_that_are_none_are_none() {
    let of = |room| {
        let attributes =
            vec![attribute("rid", Value::StringValue("r".to_owned())), attribute("bootstrap_room", room)];
        let span = Span {
            name: "Req r".to_owned(),
            trace_id: vec![1; 16],
            span_id: vec![1; 8],
            attributes,
            ..Span::default()
        };
        let What::Request { room, .. } = decode(&bytes_of(vec![span])).unwrap().spans[0].what.clone() else {
            panic!()
        };
        room
    };
    let text = |t: &str| Value::StringValue(t.to_owned());
    for none in [
        text("None"),
        text(""),
        text("0x"),
        text("0x0"),
        text("0x1ffffffffffffffff"),
        text("12"),
        text("0x-1"),
        Value::IntValue(0),
        Value::IntValue(-1),
        Value::BoolValue(true),
    ] {
        assert_eq!(of(none.clone()), None, "{none:?}");
    }
    assert_eq!(of(text("0xffffffffffffffff")), Some(u64::MAX));
    assert_eq!(of(Value::IntValue(i64::MAX)), Some(i64::MAX.unsigned_abs()));
}

#[test]
fn what_is_not_the_schedulers_is_only_counted() {
    let span = |name: &str| Span {
        name: name.to_owned(),
        trace_id: vec![1; 16],
        span_id: vec![1; 8],
        ..Span::default()
    };
    let foreign = decode(
        &request_of("opentelemetry.instrumentation.fastapi", vec![span("GET /health")]).encode_to_vec(),
    )
    .unwrap();
    assert_eq!((foreign.spans.len(), foreign.foreign), (0, 1));
    // Without ids, with ids of another length, with a name that no stage has.
    let bad = vec![
        Span { trace_id: Vec::new(), ..span("tokenize") },
        Span { trace_id: vec![0; 16], ..span("tokenize") },
        Span { trace_id: vec![1; 15], ..span("tokenize") },
        Span { span_id: vec![0; 8], ..span("tokenize") },
        Span { span_id: vec![1; 9], ..span("tokenize") },
        span(""),
        span("Ärger"),
        span("<script>"),
        span(&"x".repeat(49)),
    ];
    let n = bad.len() as u64;
    let decoded = decode(&bytes_of(bad)).unwrap();
    assert_eq!((decoded.spans.len(), decoded.invalid), (0, n));
}

#[test]
fn a_scope_that_stands_behind_its_spans_counts_and_ends_are_never_before_begins() {
    let span = Span {
        name: "tokenize".to_owned(),
        trace_id: vec![1; 16],
        span_id: vec![1; 8],
        start_time_unix_nano: 10,
        end_time_unix_nano: 5,
        status: Some(Status { code: 2, message: "aborted".to_owned() }),
        ..Span::default()
    };
    let request = request_of("sglang server", Vec::new());
    let mut scope_spans = span.encode_to_vec();
    let mut bytes = vec![0x12, u8::try_from(scope_spans.len()).unwrap()];
    bytes.append(&mut scope_spans);
    bytes.extend(request.resource_spans[0].scope_spans[0].encode_to_vec());
    let scope_spans = ScopeSpans::decode(bytes.as_slice()).unwrap();
    assert_eq!(scope_spans.spans.len(), 1, "the reference reads it so too");
    let mut outer = vec![0x12, u8::try_from(bytes.len()).unwrap()];
    outer.append(&mut bytes);
    let mut whole = vec![0x0a, u8::try_from(outer.len()).unwrap()];
    whole.append(&mut outer);
    let decoded = decode(&whole).unwrap();
    assert_eq!((decoded.spans[0].begin, decoded.spans[0].end, decoded.spans[0].failed), (10, 10, true));
}

#[test]
fn a_request_of_empty_spans_costs_what_it_is_long_and_no_more() {
    // A million spans of two bytes each: generated types would take 300 MB.
    let within = |tag: u8, inner: Vec<u8>| {
        let mut outer = vec![tag];
        prost::encode_length_delimiter(inner.len(), &mut outer).unwrap();
        outer.extend(inner);
        outer
    };
    let mut scope =
        request_of("sglang server", Vec::new()).resource_spans.remove(0).scope_spans[0].encode_to_vec();
    scope.extend([0x12, 0].repeat(1 << 20));
    let bytes = within(0x0a, within(0x12, scope));
    assert!(bytes.len() < 3 << 20);
    let decoded = decode(&bytes).unwrap();
    assert_eq!((decoded.invalid, decoded.spans.len()), (1 << 20, 0));
}

#[test]
fn spans_beyond_the_limit_are_counted() {
    let span =
        Span { name: "tokenize".to_owned(), trace_id: vec![1; 16], span_id: vec![1; 8], ..Span::default() };
    let decoded = decode(&bytes_of(vec![span; MAX_SPANS + 3])).unwrap();
    assert_eq!(
        (decoded.spans.len(), decoded.left_out, decoded.total()),
        (MAX_SPANS, 3, MAX_SPANS as u64 + 3)
    );
}

#[test]
fn what_is_cut_off_is_malformed_or_shorter_but_never_made_up() {
    let engine = Engine::prefill(Release::Hex, ROOM, AT);
    let whole = bytes_of(engine.sent(100, 150).computed);
    let all = decode(&whole).unwrap().spans;
    for n in 1..whole.len() {
        // Of one resource: every cut is within it.
        assert!(decode(&whole[..n]).is_err(), "{n}");
    }
    assert_eq!(all.len(), 4);
    assert_eq!(decode(&[]).unwrap().total(), 0);
}

proptest! {
    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        // Any result is fine, a panic is not.
        let _ = decode(&bytes);
    }

    #[test]
    fn a_changed_byte_is_read_or_refused(at in 0usize..2000, byte in any::<u8>()) {
        let engine = Engine::prefill(Release::RoomSpan, ROOM, AT);
        let mut bytes = bytes_of(engine.sent(100, 150).request);
        let at = at % bytes.len();
        bytes[at] = byte;
        let _ = decode(&bytes);
    }

    /// The reader agrees with the generated types on what it keeps.
    #[test]
    fn ids_times_and_names_are_those_of_the_reference(
        ids in proptest::collection::vec((any::<[u8; 16]>(), any::<[u8; 8]>(), any::<[u8; 8]>(), any::<u32>(), any::<u32>(), "[a-z_]{1,20}"), 0..20),
        resources in 1usize..3,
    ) {
        let spans: Vec<Span> = ids.iter().map(|(t, s, p, begin, more, name)| Span {
            trace_id: t.to_vec(), span_id: s.to_vec(), parent_span_id: p.to_vec(), name: name.clone(),
            start_time_unix_nano: u64::from(*begin), end_time_unix_nano: u64::from(*begin) + u64::from(*more),
            ..Span::default()
        }).collect();
        let one: Vec<ResourceSpans> = request_of("sglang server", spans).resource_spans;
        let request = ExportTraceServiceRequest { resource_spans: vec![one[0].clone(); resources] };
        let decoded = decode(&request.encode_to_vec()).unwrap();
        let wanted: Vec<_> = request.resource_spans.iter().flat_map(|r| &r.scope_spans).flat_map(|s| &s.spans)
            .filter(|s| s.trace_id != [0; 16] && s.span_id != [0; 8]).collect();
        prop_assert_eq!(decoded.spans.len(), wanted.len());
        for (got, want) in decoded.spans.iter().zip(wanted) {
            prop_assert_eq!(&got.trace.0[..], &want.trace_id[..]);
            prop_assert_eq!(&got.id.0[..], &want.span_id[..]);
            prop_assert_eq!(&got.parent.0[..], &want.parent_span_id[..]);
            prop_assert_eq!((got.begin, got.end), (want.start_time_unix_nano, want.end_time_unix_nano));
            prop_assert_eq!(&got.what, &What::Stage(want.name.as_str().into()));
        }
    }
}
