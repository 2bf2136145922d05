//! Requests of engines as their exporters send them, in the shape of each release (read in SGLang's `srt/tracing/trace.py`,
//! 0.5.3, 0.5.5 and 0.5.9, and in `srt/observability/trace.py`, 0.5.23).
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared by several test programs")]

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value::Value};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::Link;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span};
use prost::Message as _;

/// Nanoseconds in a millisecond.
const MS: u64 = 1_000_000;

/// How an engine tells the room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// 0.5.3–0.5.4: a number on the request.
    Early,
    /// 0.5.5–0.5.9: a span of the room above the request.
    RoomSpan,
    /// 0.5.10 and later: hexadecimal text on the request.
    Hex,
}

pub const RELEASES: [Release; 3] = [Release::Early, Release::RoomSpan, Release::Hex];

/// One engine's part of a request.
#[derive(Clone, Copy, Debug)]
pub struct Engine {
    pub release: Release,
    /// `prefill` or `decode`.
    pub role: &'static str,
    pub room: u64,
    pub rid: &'static str,
    pub trace: u128,
    /// Above the request, where a client began the trace.
    pub parent: u64,
    /// Arrival, nanoseconds since the epoch.
    pub at: u64,
    /// First of its span ids.
    pub ids: u64,
}

/// What its processes send, in the order in which the spans end.
#[derive(Clone, Debug, Default)]
pub struct Sent {
    /// HTTP process: its thread and its stages.
    pub front: Vec<Span>,
    /// Scheduler: what is over when the prompt is computed.
    pub computed: Vec<Span>,
    /// Scheduler: the rest.
    pub rest: Vec<Span>,
    /// HTTP process: the request itself, and its room.
    pub request: Vec<Span>,
}

impl Engine {
    pub fn prefill(release: Release, room: u64, at: u64) -> Self {
        let trace = u128::from(room) << 1 | 1;
        Self {
            release,
            role: "prefill",
            room,
            rid: "4f1d7a0c9b3e4d55",
            trace: trace & 0xffff_ffff_ffff_ffff,
            parent: 0,
            at,
            ids: room << 8 | 1,
        }
    }

    pub fn decode(release: Release, room: u64, at: u64) -> Self {
        let prefill = Self::prefill(release, room, at);
        Self { role: "decode", trace: prefill.trace ^ 0xabcd_0000, ids: prefill.ids | 0x80, ..prefill }
    }

    fn id(&self, n: u64) -> u64 {
        self.ids + n
    }

    pub fn root(&self) -> u64 {
        self.id(0)
    }

    fn span(&self, n: u64, parent: u64, name: &str, begin: u64, end: u64) -> Span {
        Span {
            trace_id: self.trace.to_be_bytes().to_vec(),
            span_id: self.id(n).to_be_bytes().to_vec(),
            parent_span_id: if parent == 0 { Vec::new() } else { parent.to_be_bytes().to_vec() },
            name: name.to_owned(),
            kind: 1,
            flags: 0x101,
            start_time_unix_nano: self.at + begin * MS,
            end_time_unix_nano: self.at + end * MS,
            ..Span::default()
        }
    }

    fn stage(&self, n: u64, parent: u64, after: u64, name: &str, begin: u64, end: u64) -> Span {
        let link = Link {
            trace_id: self.trace.to_be_bytes().to_vec(),
            span_id: self.id(after).to_be_bytes().to_vec(),
            ..Link::default()
        };
        let links = if after == 0 { Vec::new() } else { vec![link] };
        Span { links, ..self.span(n, self.id(parent), name, begin, end) }
    }

    fn thread(&self, n: u64, label: &str, tid: i64, end: u64) -> Span {
        let name = format!("{label} [TP 0] (host:1f2e3d4c | pid:{tid})");
        let attributes = vec![
            attribute("tp_rank", Value::IntValue(0)),
            attribute("host_id", Value::StringValue("1f2e3d4c5b6a79880123456789abcdef".to_owned())),
            attribute("pid", Value::IntValue(tid)),
            attribute("thread_label", Value::StringValue(label.to_owned())),
        ];
        Span { attributes, ..self.span(n, self.root(), &name, 0, end) }
    }

    /// Spans of the whole request, `forward` milliseconds of computing, done after `end`.
    pub fn sent(&self, forward: u64, end: u64) -> Sent {
        let mut sent = Sent {
            front: vec![
                self.stage(2, 1, 0, "tokenize", 0, 1),
                self.stage(
                    3,
                    1,
                    2,
                    if self.release == Release::Early { "dispatch" } else { "api_server_dispatch" },
                    1,
                    2,
                ),
                self.thread(1, "Tokenizer", 101, 2),
            ],
            ..Sent::default()
        };
        let thread = self.thread(4, "Scheduler", 202, end);
        let mut after = 3;
        let mut stages = Vec::new();
        let mut add = |n, name: &str, begin, end| {
            stages.push(self.stage(n, 4, after, name, begin, end));
            after = n;
        };
        match (self.release, self.role) {
            (Release::Early, _) => {
                add(5, "process req", 2, 3);
                add(6, "prefill", 3, 3 + forward);
            }
            (_, "prefill") => {
                add(5, "prefill_prepare", 2, 3);
                add(6, "prefill_bootstrap", 3, 5);
                add(7, "prefill_waiting", 5, 6);
                add(8, "prefill_forward", 6, 6 + forward);
                add(9, "prefill_transfer_kv_cache", 6 + forward, end);
            }
            _ => {
                add(5, "decode_prepare", 2, 3);
                add(6, "decode_bootstrap", 3, 5);
                add(7, "decode_transferred", 5, 6 + forward);
                add(8, "decode_waiting", 6 + forward, 7 + forward);
                add(9, "decode_forward", 7 + forward, end);
            }
        }
        let rest = if self.release == Release::Early { 2 } else { 4 };
        sent.rest = stages.split_off(rest);
        sent.computed = stages;
        sent.rest.push(thread);
        sent.request = self.request(end);
        sent
    }

    fn request(&self, end: u64) -> Vec<Span> {
        let mut attributes = vec![attribute("rid", Value::StringValue(self.rid.to_owned()))];
        let hex = || attribute("bootstrap_room", Value::StringValue(format!("{:#x}", self.room)));
        let short = &self.rid[..8];
        let (name, parent) = match self.release {
            Release::Early => {
                let room = i64::try_from(self.room).unwrap();
                attributes.push(attribute("bootstrap_room", Value::IntValue(room)));
                (format!("Req {short}"), self.parent)
            }
            Release::RoomSpan => (format!("{} Req {short}", self.role), self.id(10)),
            Release::Hex => {
                attributes.push(attribute("module", Value::StringValue("sglang::request".to_owned())));
                attributes.push(hex());
                (format!("{} Req {short}", self.role), self.parent)
            }
        };
        let mut spans = vec![Span { attributes, ..self.span(0, parent, &name, 0, end) }];
        if self.release == Release::RoomSpan {
            let name = format!("Bootstrap Room {:#x}", self.room);
            spans.push(Span { attributes: vec![hex()], ..self.span(10, self.parent, &name, 0, end) });
        }
        spans
    }
}

pub fn attribute(key: &str, value: Value) -> KeyValue {
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

/// As an SDK sends spans of a tracer.
pub fn request_of(scope: &str, spans: Vec<Span>) -> ExportTraceServiceRequest {
    let scope = InstrumentationScope { name: scope.to_owned(), ..InstrumentationScope::default() };
    let resource = Resource {
        attributes: vec![attribute("service.name", Value::StringValue("sglang".to_owned()))],
        ..Resource::default()
    };
    let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, ..ScopeSpans::default() }];
    ExportTraceServiceRequest {
        resource_spans: vec![ResourceSpans {
            resource: Some(resource),
            scope_spans,
            ..ResourceSpans::default()
        }],
    }
}

/// Bytes of a request of SGLang's.
pub fn bytes_of(spans: Vec<Span>) -> Vec<u8> {
    request_of("sglang server", spans).encode_to_vec()
}
