//! What a receiver leaves out of a request that it takes (OTLP specification, "Partial Success"): that must not be sent again.
//!
//! The exporters of `opentelemetry-otlp` say it nowhere but in their log (feature `internal-logs`). [`Hearing`] listens to what is logged
//! while one of them sends, and passes on whatever else is.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message as _;
use tracing::field::{Field, Visit};
use tracing::instrument::WithSubscriber as _;
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Dispatch, Event, Metadata, Subscriber};

/// Characters of what a receiver says that are kept.
const WHY: usize = 256;

/// What an operator is told where a receiver takes requests and refuses some of what is in them.
pub(super) const PARTLY: &str = "the receiver takes requests but not all that is in them, or has something to say of it: what it rejects is \
                                 lost and counted (roomtrace_export_dropped_total, reason `rejected`); its own log, limits and quotas say why";

/// A request was taken, perhaps not all that is in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Taken {
    /// Spans, log records or data points that the receiver has refused.
    pub(super) rejected: u64,
    /// What it says to that, or to what it has taken; mostly nothing.
    pub(super) why: String,
}

impl Taken {
    /// What an answer to spans says. One that cannot be read says nothing.
    pub(super) fn read(answer: &[u8]) -> Self {
        let answer = ExportTraceServiceResponse::decode(answer).unwrap_or_default();
        let partial = answer.partial_success.unwrap_or_default();
        let mut taken = Self::default();
        taken.rejected(partial.rejected_spans);
        taken.says(&partial.error_message);
        taken
    }

    /// Whether there is something to tell the operator.
    pub(super) fn tells(&self) -> bool {
        self.rejected > 0 || !self.why.is_empty()
    }

    fn rejected(&mut self, n: i64) {
        self.rejected = u64::try_from(n).unwrap_or(0);
    }

    fn says(&mut self, why: &str) {
        self.why = why.chars().take(WHY).collect();
    }
}

/// The fields of the exporters' log line (`exporter/tonic/trace.rs`, `exporter/http/trace.rs` and those of the other signals, 0.33).
impl Visit for Taken {
    fn record_i64(&mut self, field: &Field, value: i64) {
        if field.name().starts_with("rejected_") {
            self.rejected(value);
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "error_message" {
            self.says(value);
        }
    }

    fn record_debug(&mut self, _field: &Field, _value: &dyn std::fmt::Debug) {}
}

/// Ears for one exporter at a time.
#[derive(Clone, Debug)]
pub(super) struct Hearing {
    dispatch: Dispatch,
    heard: Arc<Mutex<Taken>>,
}

impl Hearing {
    /// What is logged beside goes where it goes now.
    pub(super) fn new() -> Self {
        let heard = Arc::<Mutex<Taken>>::default();
        let others = tracing::dispatcher::get_default(Clone::clone);
        let level = LevelFilter::current().max(LevelFilter::WARN);
        let dispatch = Dispatch::new(Listener { heard: Arc::clone(&heard), others, level });
        Self { dispatch, heard }
    }

    /// Sends something, and hears what its exporter logs of the answer. One at a time.
    pub(super) async fn hear<T>(&self, sending: impl Future<Output = T>) -> (T, Taken) {
        drop(self.take());
        let sent = sending.with_subscriber(self.dispatch.clone()).await;
        (sent, self.take())
    }

    fn take(&self) -> Taken {
        std::mem::take(&mut *self.heard.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

struct Listener {
    heard: Arc<Mutex<Taken>>,
    others: Dispatch,
    level: LevelFilter,
}

fn ours(of: &Metadata<'_>) -> bool {
    of.target() == "opentelemetry-otlp" && of.name().ends_with(".PartialSuccess")
}

impl Subscriber for Listener {
    fn register_callsite(&self, _of: &'static Metadata<'static>) -> Interest {
        // What the others want may change.
        Interest::sometimes()
    }

    fn enabled(&self, of: &Metadata<'_>) -> bool {
        ours(of) || self.others.enabled(of)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn event(&self, event: &Event<'_>) {
        if ours(event.metadata()) {
            event.record(&mut *self.heard.lock().unwrap_or_else(PoisonError::into_inner));
        } else if self.others.enabled(event.metadata()) {
            self.others.event(event);
        }
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        self.others.new_span(span)
    }

    fn record(&self, span: &Id, values: &Record<'_>) {
        self.others.record(span, values);
    }

    fn record_follows_from(&self, span: &Id, follows: &Id) {
        self.others.record_follows_from(span, follows);
    }

    fn enter(&self, span: &Id) {
        self.others.enter(span);
    }

    fn exit(&self, span: &Id) {
        self.others.exit(span);
    }

    fn clone_span(&self, span: &Id) -> Id {
        self.others.clone_span(span)
    }

    fn try_close(&self, span: Id) -> bool {
        self.others.try_close(span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_are_an_answer() {
        assert_eq!(Taken::read(b""), Taken::default());
        assert_eq!(Taken::read(&[0xff; 40]), Taken::default());
        // partial_success { rejected_spans: -1, error_message: "x" }
        let minus = [10, 14, 8, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1, 18, 1, b'x'];
        assert_eq!(Taken::read(&minus), Taken { rejected: 0, why: "x".to_owned() });
    }
}
