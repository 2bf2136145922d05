//! A request's bytes → a place in the queues, or why not.
//!
//! Bounded: the length of a message before and after it is decompressed, how many are read at a time, spans that wait for the
//! observing thread.

use std::io::Read as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::export::otlp::{ForwardHandle, Payload};
use crate::spans::{MAX_SPANS, SchedulerSpan, decode};

/// Longest message, bytes, as it comes and decompressed: what gRPC servers take by default. SGLang sends some 30 KiB.
pub const MAX_MESSAGE: usize = 4 << 20;

/// gRPC's head of a message.
pub(super) const FRAME: usize = 5;

/// Messages above [`SMALL`], or of unknown length, that are read at a time.
const LARGE: usize = 8;

/// Messages up to this are read without asking.
const SMALL: u64 = 64 << 10;

/// Spans that wait for the observing thread at most. It takes them twenty times a second.
const WAITING: usize = 65_536;

/// Time for a message to arrive.
const ARRIVES: Duration = Duration::from_secs(10);

/// Time that a message waits for others to be read.
const PATIENCE: Duration = Duration::from_secs(5);

/// When to come again, where there is no place now.
pub(super) const RETRY: Duration = Duration::from_secs(1);

/// How a request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// gRPC.
    Grpc,
    /// Protobuf over HTTP.
    Http,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refusal {
    #[error("{0}")]
    Malformed(String),
    #[error(
        "longer than {MAX_MESSAGE} bytes, which is the limit before and after decompression: send smaller batches"
    )]
    TooLarge,
    #[error("the compression is not known here: send gzip or none")]
    Encoding,
    #[error("this takes traces only, as protobuf: {0}")]
    NotServed(String),
    #[error("no place now: come again")]
    Busy,
    #[error("it did not arrive within {} s", ARRIVES.as_secs())]
    Slow,
}

impl Refusal {
    /// Label value of `roomtrace_spans_requests_total{result}`.
    const fn result(&self) -> Outcome {
        match self {
            Self::Malformed(_) => Outcome::Malformed,
            Self::TooLarge => Outcome::TooLarge,
            Self::Encoding | Self::NotServed(_) => Outcome::NotServed,
            Self::Busy => Outcome::Busy,
            Self::Slow => Outcome::Slow,
        }
    }
}

/// What became of a request, for the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Taken.
    Accepted,
    /// Not an OTLP request, or not what its compression says.
    Malformed,
    /// Above the limit.
    TooLarge,
    /// Another path, method, type or compression.
    NotServed,
    /// No place: the client was told to come again.
    Busy,
    /// It did not arrive in time, or its connection broke.
    Slow,
}

impl Outcome {
    /// Every outcome.
    pub const ALL: [Self; 6] =
        [Self::Accepted, Self::Malformed, Self::TooLarge, Self::NotServed, Self::Busy, Self::Slow];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Malformed => "malformed",
            Self::TooLarge => "too_large",
            Self::NotServed => "not_served",
            Self::Busy => "busy",
            Self::Slow => "slow",
        }
    }
}

/// Counts since start.
#[derive(Debug, Default)]
pub struct Counters {
    requests: [[AtomicU64; Outcome::ALL.len()]; 2],
    spans: [AtomicU64; 4],
}

impl Counters {
    pub(super) fn request(&self, protocol: Protocol, outcome: Outcome) {
        if let Some(n) = self.requests.get(protocol as usize).and_then(|r| r.get(outcome as usize)) {
            n.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Requests by transport and what became of them.
    pub fn requests(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> + '_ {
        ["grpc", "http"].into_iter().zip(&self.requests).flat_map(|(protocol, row)| {
            let of = move |(outcome, n): (Outcome, &AtomicU64)| {
                (protocol, outcome.label(), n.load(Ordering::Relaxed))
            };
            Outcome::ALL.into_iter().zip(row).map(of)
        })
    }

    /// Spans of accepted requests by what they are.
    pub fn spans(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        let kinds = ["scheduler", "foreign", "invalid", "left_out"];
        kinds.into_iter().zip(&self.spans).map(|(kind, n)| (kind, n.load(Ordering::Relaxed)))
    }
}

/// What was accepted, for the answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Accepted {
    /// Spans that nobody got.
    pub(super) rejected: i64,
    /// What is to be said of it; empty: nothing.
    pub(super) message: String,
}

/// Where requests go.
#[derive(Debug)]
pub(super) struct Intake {
    spans: SyncSender<Vec<SchedulerSpan>>,
    pub(super) waiting: AtomicUsize,
    forward: Option<ForwardHandle>,
    large: Arc<Semaphore>,
    pub(super) counters: Counters,
}

impl Intake {
    pub(super) fn new(spans: SyncSender<Vec<SchedulerSpan>>, forward: Option<ForwardHandle>) -> Self {
        let large = Arc::new(Semaphore::new(LARGE));
        Self { spans, waiting: AtomicUsize::new(0), forward, large, counters: Counters::default() }
    }

    /// Counts what became of a request.
    pub(super) fn count<T>(&self, protocol: Protocol, result: Result<T, Refusal>) -> Result<T, Refusal> {
        self.counters.request(protocol, result.as_ref().map_or_else(Refusal::result, |_| Outcome::Accepted));
        result
    }

    /// Reads a body of at most `limit` bytes, with the right to keep it.
    pub(super) async fn read(
        &self,
        body: &mut Incoming,
        limit: usize,
    ) -> Result<(Bytes, Option<OwnedSemaphorePermit>), Refusal> {
        let size = body.size_hint();
        if size.lower() > limit as u64 {
            return Err(Refusal::TooLarge);
        }
        let small = size.upper().is_some_and(|n| n <= SMALL);
        let permit = if small { None } else { Some(self.permit().await?) };
        let whole = tokio::time::timeout(ARRIVES, Limited::new(body, limit).collect());
        match whole.await {
            Ok(Ok(whole)) => Ok((whole.to_bytes(), permit)),
            Ok(Err(e)) if e.is::<LengthLimitError>() => Err(Refusal::TooLarge),
            Ok(Err(_)) | Err(_) => Err(Refusal::Slow),
        }
    }

    async fn permit(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        let permit = tokio::time::timeout(PATIENCE, Arc::clone(&self.large).acquire_owned());
        permit.await.ok().and_then(Result::ok).ok_or(Refusal::Busy)
    }

    /// Takes a message in: decoded for the rooms, as it is for whom it is handed on to. Both or neither.
    pub(super) async fn take(&self, wire: Bytes, gzip: bool) -> Result<Accepted, Refusal> {
        let decoded = if gzip {
            let wire = wire.clone();
            // Up to some milliseconds of computing.
            let inflated = tokio::task::spawn_blocking(move || decode_inflated(&wire)).await;
            inflated.map_err(|_| Refusal::Busy)??
        } else {
            decode(&wire).map_err(|e| Refusal::Malformed(e.to_string()))?
        };
        let (total, kept) = (decoded.total(), decoded.spans.len());
        self.hand_over(decoded.spans)?;
        for (n, counter) in [kept as u64, decoded.foreign, decoded.invalid, decoded.left_out]
            .into_iter()
            .zip(&self.counters.spans)
        {
            counter.fetch_add(n, Ordering::Relaxed);
        }
        if let Some(forward) = &self.forward {
            forward.push(Payload { bytes: wire, gzip, spans: total });
        }
        Ok(self.accepted(decoded.invalid, decoded.left_out))
    }

    fn hand_over(&self, spans: Vec<SchedulerSpan>) -> Result<(), Refusal> {
        let n = spans.len();
        if n == 0 {
            return Ok(());
        }
        let before = self.waiting.fetch_add(n, Ordering::Relaxed);
        let full = before > 0 && before.saturating_add(n) > WAITING;
        let sent = if full { Err(()) } else { self.spans.try_send(spans).map_err(drop::<TrySendError<_>>) };
        sent.map_err(|()| {
            self.waiting.fetch_sub(n, Ordering::Relaxed);
            Refusal::Busy
        })
    }

    /// Where the whole request is handed on nothing is rejected; the message is a warning then.
    fn accepted(&self, invalid: u64, left_out: u64) -> Accepted {
        let mut parts = Vec::new();
        if invalid > 0 {
            parts.push(format!("{invalid} spans without a trace id, span id or known name"));
        }
        if left_out > 0 {
            parts.push(format!("{left_out} spans beyond the first {MAX_SPANS} of a request"));
        }
        if parts.is_empty() {
            return Accepted::default();
        }
        let rejected = if self.forward.is_some() { 0 } else { invalid.saturating_add(left_out) };
        let message = format!("not used: {}", parts.join(", "));
        Accepted { rejected: i64::try_from(rejected).unwrap_or(i64::MAX), message }
    }
}

fn decode_inflated(wire: &[u8]) -> Result<crate::spans::Decoded, Refusal> {
    let plain = inflate(wire)?;
    decode(&plain).map_err(|e| Refusal::Malformed(e.to_string()))
}

/// Decompresses up to the limit: a bomb costs that much and no more.
fn inflate(wire: &[u8]) -> Result<Vec<u8>, Refusal> {
    let mut plain = Vec::new();
    let mut from = flate2::read::MultiGzDecoder::new(wire).take(MAX_MESSAGE as u64 + 1);
    from.read_to_end(&mut plain).map_err(|e| Refusal::Malformed(format!("not gzip: {e}")))?;
    if plain.len() > MAX_MESSAGE { Err(Refusal::TooLarge) } else { Ok(plain) }
}
