//! A request's bytes → a place in the queues, or why not.
//!
//! Bounded: the length of a message before and after it is decompressed, how many are read at a time, spans that wait for the
//! observing thread.

use std::io::Read as _;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use hyper::body::{Body as _, Incoming};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::refused::Refused;
use crate::export::otlp::{ForwardHandle, NoPlace, Payload};
use crate::spans::{Decoded, MAX_SPANS, SchedulerSpan, decode};

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
    #[error("{}: come again", NoPlace::Now)]
    ForwardFull,
    #[error("it did not arrive within {} s", ARRIVES.as_secs())]
    Slow,
}

impl Refusal {
    /// Whether the client is to come again.
    pub(super) const fn passes(&self) -> bool {
        matches!(self, Self::Busy | Self::ForwardFull)
    }

    /// Label value of `roomtrace_spans_requests_total{result}`.
    const fn result(&self) -> Outcome {
        match self {
            Self::Malformed(_) => Outcome::Malformed,
            Self::TooLarge => Outcome::TooLarge,
            Self::Encoding | Self::NotServed(_) => Outcome::NotServed,
            Self::Busy => Outcome::Busy,
            Self::ForwardFull => Outcome::ForwardFull,
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
    /// The observing thread is behind: the client was told to come again.
    Busy,
    /// Too much waits for whom spans are handed on to: the client was told to come again. The rooms have its spans.
    ForwardFull,
    /// It did not arrive in time, or its connection broke.
    Slow,
    /// None came: a connection was closed on which the client had said nothing.
    Silent,
}

impl Outcome {
    /// Every outcome.
    pub const ALL: [Self; 8] = [
        Self::Accepted,
        Self::Malformed,
        Self::TooLarge,
        Self::NotServed,
        Self::Busy,
        Self::ForwardFull,
        Self::Slow,
        Self::Silent,
    ];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Malformed => "malformed",
            Self::TooLarge => "too_large",
            Self::NotServed => "not_served",
            Self::Busy => "busy",
            Self::ForwardFull => "forward_full",
            Self::Slow => "slow",
            Self::Silent => "silent",
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

    /// Spans that the rooms got, each once, and what came with them, by what they are.
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
    refused: Mutex<Refused>,
    large: Arc<Semaphore>,
    pub(super) counters: Counters,
}

impl Intake {
    pub(super) fn new(spans: SyncSender<Vec<SchedulerSpan>>, forward: Option<ForwardHandle>) -> Self {
        let large = Arc::new(Semaphore::new(LARGE));
        let (waiting, refused, counters) = (AtomicUsize::new(0), Mutex::default(), Counters::default());
        Self { spans, waiting, forward, refused, large, counters }
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

    /// Takes a message in: decoded for the rooms, as it is for whom it is handed on to. The rooms get it once, however often it must come
    /// again until it finds a place there.
    pub(super) async fn take(&self, wire: Bytes, gzip: bool) -> Result<Accepted, Refusal> {
        let (plain, decoded) = if gzip {
            let wire = wire.clone();
            // Up to some milliseconds of computing.
            let inflated = tokio::task::spawn_blocking(move || decode_inflated(&wire)).await;
            inflated.map_err(|_| Refusal::Busy)??
        } else {
            let decoded = decode(&wire).map_err(|e| Refusal::Malformed(e.to_string()))?;
            (wire.clone(), decoded)
        };
        let (invalid, left_out, total) = (decoded.invalid, decoded.left_out, decoded.total());
        let Some(forward) = &self.forward else {
            self.for_rooms(decoded)?;
            return Ok(accepted(invalid, left_out, false));
        };
        let payload = Payload { bytes: wire, gzip, spans: total };
        match self.for_both(&plain, decoded, forward, payload) {
            Ok(()) => Ok(accepted(invalid, left_out, true)),
            Err(Declined::Here(refusal)) => Err(refusal),
            Err(Declined::There(NoPlace::Now)) => Err(Refusal::ForwardFull),
            Err(Declined::There(ever @ NoPlace::Ever)) => {
                let rejected = i64::try_from(total).unwrap_or(i64::MAX);
                Ok(Accepted { rejected, message: ever.to_string() })
            }
        }
    }

    fn for_both(
        &self,
        plain: &[u8],
        decoded: Decoded,
        forward: &ForwardHandle,
        payload: Payload,
    ) -> Result<(), Declined> {
        let now = Instant::now();
        // Nothing panics while it is held; were it so, it is still consistent.
        let mut refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner);
        let again = refused.find(now, plain);
        if again.is_none() {
            self.for_rooms(decoded).map_err(Declined::Here)?;
        }
        let taken = forward.push(payload);
        match (again, taken) {
            (None, Err(NoPlace::Now)) => refused.remember(now, plain),
            (Some(id), Ok(())) => refused.forget(id),
            _ => {}
        }
        taken.map_err(Declined::There)
    }

    fn for_rooms(&self, decoded: Decoded) -> Result<(), Refusal> {
        let kinds = [decoded.spans.len() as u64, decoded.foreign, decoded.invalid, decoded.left_out];
        self.hand_over(decoded.spans)?;
        for (n, counter) in kinds.into_iter().zip(&self.counters.spans) {
            counter.fetch_add(n, Ordering::Relaxed);
        }
        Ok(())
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
}

/// Who did not take a message.
enum Declined {
    Here(Refusal),
    There(NoPlace),
}

/// Where the whole request is handed on nothing is rejected; the message is a warning then.
fn accepted(invalid: u64, left_out: u64, handed_on: bool) -> Accepted {
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
    let rejected = if handed_on { 0 } else { invalid.saturating_add(left_out) };
    let message = format!("not used: {}", parts.join(", "));
    Accepted { rejected: i64::try_from(rejected).unwrap_or(i64::MAX), message }
}

fn decode_inflated(wire: &[u8]) -> Result<(Bytes, Decoded), Refusal> {
    let plain = inflate(wire)?;
    let decoded = decode(&plain).map_err(|e| Refusal::Malformed(e.to_string()))?;
    Ok((plain.into(), decoded))
}

/// Decompresses up to the limit: a bomb costs that much and no more.
fn inflate(wire: &[u8]) -> Result<Vec<u8>, Refusal> {
    let mut plain = Vec::new();
    let mut from = flate2::read::MultiGzDecoder::new(wire).take(MAX_MESSAGE as u64 + 1);
    from.read_to_end(&mut plain).map_err(|e| Refusal::Malformed(format!("not gzip: {e}")))?;
    if plain.len() > MAX_MESSAGE { Err(Refusal::TooLarge) } else { Ok(plain) }
}
