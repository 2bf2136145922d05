//! One OTLP request → the scheduler spans in it.
//!
//! Pure. Field numbers are those of `opentelemetry/proto/{collector/trace,trace,common}/v1` (1.10.0); names and attributes
//! those of SGLang's `srt/tracing/trace.py` (0.5.3–0.5.9) and `srt/observability/{trace,req_time_stats,mooncake_trace}.py`
//! (0.5.10–0.5.23).

use serde::{Deserialize, Serialize};

use super::wire::{Fields, Malformed};
use crate::rooms::model::Role;

/// Scheduler spans taken from one request; SGLang sends 64 at a time, the OpenTelemetry SDKs 512.
pub const MAX_SPANS: usize = 4096;

/// Name of the tracer of SGLang's spans, all releases. `FastAPI`'s own spans have another.
const SCOPE: &str = "sglang server";

/// Characters kept of a stage's name.
const NAME: usize = 48;

/// Characters kept of a request id, as at the HTTP port.
const RID: usize = 128;

/// Trace id, big-endian.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TraceId(pub [u8; 16]);

/// Span id, big-endian; all zero: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SpanId(pub [u8; 8]);

impl SpanId {
    /// Whether it names no span.
    pub fn is_none(self) -> bool {
        self == Self::default()
    }
}

impl std::fmt::Display for TraceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl std::fmt::Display for SpanId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", u64::from_be_bytes(self.0))
    }
}

/// A span of an engine's scheduler. An engine sends a span when it has ended, never before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SchedulerSpan {
    /// Its trace. Where the client or router began one, several requests can be in it.
    pub trace: TraceId,
    /// It.
    pub id: SpanId,
    /// What it is within.
    pub parent: SpanId,
    /// The span that it says came before it.
    pub after: SpanId,
    /// Begin, nanoseconds since the epoch, by the engine's clock.
    pub begin: u64,
    /// End, likewise; never before `begin`.
    pub end: u64,
    /// It ended with an error.
    pub failed: bool,
    /// What it is of.
    pub what: What,
}

/// What a span is of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// A room, both engines' requests within it (0.5.5–0.5.9).
    Room {
        /// Its number.
        #[serde(with = "crate::room_text")]
        room: u64,
    },
    /// One engine's request, from its arrival to its end.
    Request {
        /// Request id, at most 128 characters.
        rid: Box<str>,
        /// Its room (0.5.3–0.5.4 as a number, 0.5.10 and later in hexadecimal; between these its parent has it).
        #[serde(default, with = "optional_room", skip_serializing_if = "Option::is_none")]
        room: Option<u64>,
        /// The engine's role (0.5.5 and later).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        role: Option<Role>,
    },
    /// The part of one thread of the engine in a request.
    Thread {
        /// Its thread id, as its own PID namespace has it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tid: Option<u32>,
        /// Tensor-parallel rank.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        tp_rank: Option<u32>,
    },
    /// A stage of a request (`prefill_forward`): small letters, digits, `_` and blanks, at most 48.
    Stage(Box<str>),
}

mod optional_room {
    use serde::{Deserialize, Deserializer, Serializer};

    #[allow(clippy::ref_option, reason = "serde's signature")]
    pub(super) fn serialize<S: Serializer>(room: &Option<u64>, to: S) -> Result<S::Ok, S::Error> {
        match room {
            Some(room) => to.collect_str(room),
            None => to.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|t| t.parse().map_err(serde::de::Error::custom)).transpose()
    }
}

/// What one request held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decoded {
    /// Scheduler spans, in their order.
    pub spans: Vec<SchedulerSpan>,
    /// Spans that are not SGLang's.
    pub foreign: u64,
    /// Spans of SGLang's without a trace id or a span id, or that say nothing that is known.
    pub invalid: u64,
    /// Spans beyond [`MAX_SPANS`].
    pub left_out: u64,
}

impl Decoded {
    /// All spans of the request.
    pub const fn total(&self) -> u64 {
        self.spans.len() as u64 + self.foreign + self.invalid + self.left_out
    }
}

/// Reads an `ExportTraceServiceRequest`.
///
/// # Errors
/// [`Malformed`]: it is none. Of what is not SGLang's only the frame is looked at.
pub fn decode(request: &[u8]) -> Result<Decoded, Malformed> {
    let mut out = Decoded::default();
    for field in Fields::of(request) {
        if let (1, resource_spans) = field? {
            for field in Fields::of(resource_spans.bytes()?) {
                if let (2, scope_spans) = field? {
                    scope(scope_spans.bytes()?, &mut out)?;
                }
            }
        }
    }
    Ok(out)
}

fn scope(scope_spans: &[u8], out: &mut Decoded) -> Result<(), Malformed> {
    let mut ours = false;
    for field in Fields::of(scope_spans) {
        if let (1, scope) = field? {
            for field in Fields::of(scope.bytes()?) {
                if let (1, name) = field? {
                    ours = name.bytes()? == SCOPE.as_bytes();
                }
            }
        }
    }
    for field in Fields::of(scope_spans) {
        let (2, bytes) = field? else { continue };
        let bytes = bytes.bytes()?;
        if !ours {
            out.foreign += 1;
        } else if out.spans.len() >= MAX_SPANS {
            out.left_out += 1;
        } else if let Some(span) = span(bytes)? {
            out.spans.push(span);
        } else {
            out.invalid += 1;
        }
    }
    Ok(())
}

/// `None`: nothing can be made of it.
fn span(bytes: &[u8]) -> Result<Option<SchedulerSpan>, Malformed> {
    let (mut trace, mut id, mut parent, mut after) = (None, None, SpanId::default(), SpanId::default());
    let (mut begin, mut end, mut failed) = (0, 0, false);
    let (mut name, mut said) = (&b""[..], Attributes::default());
    for field in Fields::of(bytes) {
        match field? {
            (1, v) => trace = v.bytes()?.try_into().ok().filter(|id| *id != [0; 16]).map(TraceId),
            (2, v) => id = v.bytes()?.try_into().ok().map(SpanId),
            (4, v) => parent = v.bytes()?.try_into().map(SpanId).unwrap_or_default(),
            (5, v) => name = v.bytes()?,
            (7, v) => begin = v.fixed()?,
            (8, v) => end = v.fixed()?,
            (9, v) => said.take(v.bytes()?)?,
            (13, v) => after = link(v.bytes()?)?.unwrap_or(after),
            (15, v) => failed = is_error(v.bytes()?)?,
            _ => {}
        }
    }
    let Some((trace, id)) = trace.zip(id.filter(|id| !id.is_none())) else { return Ok(None) };
    let what = said.what(name);
    Ok(what.map(|what| SchedulerSpan { trace, id, parent, after, begin, end: end.max(begin), failed, what }))
}

fn link(bytes: &[u8]) -> Result<Option<SpanId>, Malformed> {
    for field in Fields::of(bytes) {
        if let (2, v) = field? {
            return Ok(v.bytes()?.try_into().ok().map(SpanId));
        }
    }
    Ok(None)
}

/// `Status.code` 2.
fn is_error(bytes: &[u8]) -> Result<bool, Malformed> {
    let mut error = false;
    for field in Fields::of(bytes) {
        if let (3, v) = field? {
            error = v == super::wire::Value::Number(2);
        }
    }
    Ok(error)
}

/// The attributes that matter.
#[derive(Default)]
struct Attributes<'a> {
    rid: Option<&'a str>,
    room: Option<u64>,
    /// It is a thread's.
    thread: bool,
    tid: Option<u32>,
    tp_rank: Option<u32>,
}

impl<'a> Attributes<'a> {
    fn take(&mut self, attribute: &'a [u8]) -> Result<(), Malformed> {
        let (mut key, mut value) = (&b""[..], &b""[..]);
        for field in Fields::of(attribute) {
            match field? {
                (1, v) => key = v.bytes()?,
                (2, v) => value = v.bytes()?,
                _ => {}
            }
        }
        match key {
            b"rid" => self.rid = text(value)?,
            b"bootstrap_room" => self.room = room(value)?,
            b"thread_label" => self.thread = true,
            b"pid" => self.tid = number(value)?.and_then(|n| u32::try_from(n).ok()),
            b"tp_rank" => self.tp_rank = number(value)?.and_then(|n| u32::try_from(n).ok()),
            _ => {}
        }
        Ok(())
    }

    fn what(&self, name: &[u8]) -> Option<What> {
        if let Some(rid) = self.rid {
            // `prefill Req 1a2b3c4d`, ` Req …` of an engine of both roles, `Req …` before 0.5.5.
            let role = match name.split(|b| *b == b' ').next() {
                Some(b"prefill") => Some(Role::Prefill),
                Some(b"decode") => Some(Role::Decode),
                _ => None,
            };
            let rid = rid.chars().take(RID).collect();
            return Some(What::Request { rid, room: self.room, role });
        }
        if self.thread {
            return Some(What::Thread { tid: self.tid, tp_rank: self.tp_rank });
        }
        if name.starts_with(b"Bootstrap Room ") {
            // Without a room (0x0) the request has none either.
            return self.room.map(|room| What::Room { room });
        }
        let known = |b: &u8| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'_' | b' ');
        let plain = !name.is_empty() && name.len() <= NAME && name.iter().all(known);
        let name = std::str::from_utf8(name).ok().filter(|_| plain)?;
        Some(What::Stage(name.into()))
    }
}

/// `AnyValue.string_value`.
fn text(value: &[u8]) -> Result<Option<&str>, Malformed> {
    for field in Fields::of(value) {
        if let (1, v) = field? {
            return Ok(std::str::from_utf8(v.bytes()?).ok());
        }
    }
    Ok(None)
}

/// `AnyValue.int_value`, not negative.
fn number(value: &[u8]) -> Result<Option<u64>, Malformed> {
    for field in Fields::of(value) {
        if let (3, super::wire::Value::Number(n)) = field? {
            return Ok(Some(n).filter(|n| *n <= i64::MAX.unsigned_abs()));
        }
    }
    Ok(None)
}

/// `0x1f` (0.5.5 and later), a number (0.5.3–0.5.4) or `None`. Room 0 is that of a request without one.
fn room(value: &[u8]) -> Result<Option<u64>, Malformed> {
    let written = text(value)?.and_then(|t| u64::from_str_radix(t.strip_prefix("0x")?, 16).ok());
    Ok(written.or(number(value)?).filter(|room| *room != 0))
}
