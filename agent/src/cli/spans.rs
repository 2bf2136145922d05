//! The engines' spans in `run`: receiver, whom they are handed on to, and the way to the rooms.

use serde_json::{Value, json};

use super::Failure;
use super::config::{Config, Spans as Settings};
use crate::engine::otlp::{Listen, SpanReceiver};
use crate::event::Mono;
use crate::export::Exports;
use crate::export::clock::Clock;
use crate::export::metrics::MetricsSnapshot;
use crate::export::otlp::{ForwardHandle, Forwarder};
use crate::pipeline::Pipeline;
use crate::rooms::model::Input;

/// Requests taken in one turn of the observing thread.
const BUDGET: usize = 512;

/// Receiver and forwarder, where configured.
pub(super) struct Spans {
    receiver: Option<SpanReceiver>,
    forwarder: Option<Forwarder>,
    forward: Option<ForwardHandle>,
}

impl Spans {
    /// Starts both. Needs a runtime around it.
    pub(super) async fn start(config: &Config, exports: &Exports) -> Result<Self, Failure> {
        let Settings { enabled, grpc, http, forward } = &config.spans;
        if !enabled {
            return Ok(Self { receiver: None, forwarder: None, forward: None });
        }
        let wrong = |e| Failure::usage(anyhow::Error::new(e).context("spans.forward"));
        let forwarder = Forwarder::start(forward, exports.counters()).map_err(wrong)?;
        let handle = forwarder.as_ref().map(Forwarder::handle);
        let listen = Listen { grpc: *grpc, http: *http };
        let receiver = SpanReceiver::start(listen, handle.clone()).await.map_err(Failure::usage)?;
        tracing::info!(?grpc, ?http, "receiving the engines' spans");
        Ok(Self { receiver: Some(receiver), forwarder, forward: handle })
    }

    /// Hands what came since the last turn to the rooms.
    pub(super) fn turn(&self, at: Mono, clock: &Clock, pipeline: &mut Pipeline) {
        let Some(receiver) = &self.receiver else { return };
        let offset = i128::from(clock.unix_nanos(at)) - i128::from(at.0);
        let offset = i64::try_from(offset).unwrap_or_default();
        for _ in 0..BUDGET {
            let Some(spans) = receiver.take() else { return };
            pipeline.tell(&Input::Spans { at, offset, spans: &spans });
        }
    }

    /// For `/metrics`: nothing where there is no receiver.
    pub(super) fn measure(&self, out: &mut MetricsSnapshot, pipeline: &Pipeline) {
        let Some(receiver) = &self.receiver else { return };
        let counters = receiver.counters();
        out.span_requests = counters.requests().collect();
        out.spans_received = counters.spans().collect();
        let table = pipeline.rooms();
        let joined = table.span_counters();
        out.span_joins = vec![
            ("joined", joined.joined),
            ("room_unknown", joined.unmatched),
            ("without_room", joined.without_room),
        ];
        out.spans_waiting = Some(u64::try_from(receiver.waiting()).unwrap_or(u64::MAX));
        out.capture_lost.extend([
            ("spans", "times_not_believed", joined.impossible),
            ("spans", "left_out", joined.left_out),
            ("spans", "evicted", joined.evicted),
            ("spans", "expired", joined.expired),
            ("spans", "not_told", table.spans_not_told()),
        ]);
    }

    /// For `/status`.
    pub(super) fn status(&self, pipeline: &Pipeline) -> Value {
        let Some(receiver) = &self.receiver else { return Value::Null };
        let listening = receiver.listening();
        let mut requests = serde_json::Map::new();
        for (protocol, result, n) in receiver.counters().requests() {
            let row = requests.entry(protocol).or_insert_with(|| json!({}));
            if let Some(row) = row.as_object_mut() {
                row.insert(result.to_owned(), json!(n));
            }
        }
        let spans: serde_json::Map<String, Value> =
            receiver.counters().spans().map(|(kind, n)| (kind.to_owned(), json!(n))).collect();
        let joined = pipeline.rooms().span_counters();
        let forward = self.forward.as_ref().map(|f| {
            let waiting = f.waiting();
            json!({"endpoint": f.endpoint(), "requests_waiting": waiting.requests, "bytes_waiting": waiting.bytes})
        });
        json!({
            "grpc": listening.grpc.map(|a| a.to_string()), "http": listening.http.map(|a| a.to_string()),
            "requests": requests, "spans": spans, "waiting": receiver.waiting(),
            "engine_requests": {
                "joined": joined.joined, "room_unknown": joined.unmatched, "without_room": joined.without_room,
            },
            "traces_waiting": joined.waiting, "traces_evicted": joined.evicted, "traces_expired": joined.expired,
            "times_not_believed": joined.impossible,
            "forward": forward,
        })
    }

    /// Whether it runs.
    pub(super) const fn runs(&self) -> bool {
        self.receiver.is_some()
    }

    /// Takes nothing more, and delivers what waits until `until`.
    pub(super) async fn shutdown(self, until: tokio::time::Instant) {
        if let Some(receiver) = self.receiver {
            receiver.stop().await;
        }
        if let Some(forwarder) = self.forwarder {
            forwarder.shutdown(until).await;
        }
    }
}
