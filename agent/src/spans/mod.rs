//! The engines' own spans: OTLP bytes → what a scheduler says of one request, and whose room it is.
//!
//! Pure: no I/O, no clock, no unsafe code. `decode` reads one `ExportTraceServiceRequest` in place, keeps what SGLang's
//! scheduler spans say and counts the rest; `join` collects the spans of a trace until the one that names the room has come,
//! which an engine sends last. Both are bounded.

mod decode;
mod join;
mod wire;

pub use decode::{Decoded, MAX_SPANS, SchedulerSpan, SpanId, TraceId, What, decode};
pub(crate) use join::{CLOCKS, Joined, Joiner, SETTLED};
pub use join::{EngineRequest, JoinCounters, MAX_NODES, Stage};
pub use wire::Malformed;
