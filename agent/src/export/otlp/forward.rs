//! Hands requests of others on as they came: the same bytes, compressed as they were, to one receiver.
//!
//! Bounded in number and bytes; what does not fit now is not taken, and whoever brought it is told to come again. A receiver that is
//! down for minutes gets what has not grown too old since.

use std::collections::{BTreeMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::Endpoint;
use super::config::{OtlpConfig, Protocol, QueueConfig, Secret, TlsConfig};
use super::partial::PARTLY;
use super::raw;
use super::settings::{self, OtlpError, Target};
use super::transport::{Failure, Wire};
use crate::export::complaint::Complaint;
use crate::export::counters::{Counters, Reason, Signal};

/// Requests under way at a time: a receiver far away answers in some 50 ms, an engine sends a request each 500 ms and process.
const UNDER_WAY: usize = 8;

/// First and longest pause after a failure.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// Longest pause that a receiver can ask for.
const ASKED: Duration = Duration::from_mins(1);

/// Where engines' spans are handed on to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ForwardConfig {
    /// Receiver, `http://host:4317`; over HTTP `/v1/traces` is appended. `None`: nowhere. No variable of the environment
    /// stands in for it, as those may name this very agent.
    pub endpoint: Option<Endpoint>,
    /// How to talk to it; default gRPC.
    pub protocol: Option<Protocol>,
    /// Headers (gRPC: metadata) of every request. Those of the engines are not handed on.
    pub headers: BTreeMap<String, Secret>,
    /// How long one request may take; default 10 s.
    #[serde(with = "crate::duration_text::optional")]
    pub timeout: Option<Duration>,
    /// Certificates.
    pub tls: TlsConfig,
    /// Limits of what waits.
    pub queue: QueueConfig,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Payload {
    /// `ExportTraceServiceRequest`, compressed if `gzip`.
    pub bytes: Bytes,
    /// See [`Self::bytes`].
    pub gzip: bool,
    /// Spans in it, for the counters.
    pub spans: u64,
}

/// A request that was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoPlace {
    /// There is none now: it is worth another try. Also while the agent ends.
    #[error("no place now for whom the spans are handed on to")]
    Now,
    /// It is larger than everything that may wait. Counted as dropped: it will not come again.
    #[error("larger than spans.forward.queue.bytes, so not handed on")]
    Ever,
}

#[derive(Debug)]
struct Item {
    payload: Payload,
    born: Instant,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Item>,
    /// Those under way count too.
    items: usize,
    bytes: usize,
    spans: u64,
    closed: bool,
    complaint: Complaint,
    /// Of requests that were taken in part.
    partly: Complaint,
}

#[derive(Debug)]
struct Shared {
    target: Target,
    wire: Wire,
    limits: QueueConfig,
    counters: Arc<Counters>,
    state: Mutex<State>,
    arrived: Notify,
    closing: Notify,
    jitter: RandomState,
}

/// The queue and the tasks that empty it.
#[derive(Debug)]
pub struct Forwarder {
    shared: Arc<Shared>,
    tasks: Vec<JoinHandle<()>>,
}

/// What waits now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waiting {
    /// Requests.
    pub requests: usize,
    /// Their bytes.
    pub bytes: usize,
}

impl Forwarder {
    /// Sets it up; `None`: there is nowhere to hand on to. Needs a runtime around it. Connects when there is something to send.
    ///
    /// # Errors
    /// [`OtlpError`].
    pub fn start(config: &ForwardConfig, counters: Arc<Counters>) -> Result<Option<Self>, OtlpError> {
        let otlp = OtlpConfig {
            endpoint: config.endpoint.clone(),
            protocol: config.protocol,
            headers: config.headers.clone(),
            timeout: config.timeout,
            tls: config.tls.clone(),
            ..OtlpConfig::default()
        };
        let Some(target) = settings::resolve(&otlp, Signal::Traces, &|_| None)? else { return Ok(None) };
        let wire = Wire::open(&target)?;
        tracing::info!(endpoint = target.endpoint, "handing the engines' spans on");
        let shared = Arc::new(Shared {
            target,
            wire,
            limits: config.queue,
            counters,
            state: Mutex::default(),
            arrived: Notify::new(),
            closing: Notify::new(),
            jitter: RandomState::new(),
        });
        let tasks = (0..UNDER_WAY).map(|_| tokio::spawn(Arc::clone(&shared).run())).collect();
        Ok(Some(Self { shared, tasks }))
    }

    /// For whoever takes requests in.
    pub fn handle(&self) -> ForwardHandle {
        ForwardHandle { shared: Arc::clone(&self.shared) }
    }

    /// Delivers what waits until `until`; counts the rest.
    pub async fn shutdown(self, until: tokio::time::Instant) {
        self.shared.state().closed = true;
        self.shared.closing.notify_waiters();
        self.shared.arrived.notify_waiters();
        for mut task in self.tasks {
            // Workers that have not seen the end yet see it at their next look.
            if tokio::time::timeout_at(until, &mut task).await.is_err() {
                task.abort();
                // It says that it was aborted.
                let _ = task.await;
            }
        }
        let left = std::mem::take(&mut self.shared.state().spans);
        self.shared.counters.drop_items(Signal::Spans, Reason::Shutdown, left);
    }
}

/// Puts requests into the queue.
#[derive(Clone, Debug)]
pub struct ForwardHandle {
    shared: Arc<Shared>,
}

impl ForwardHandle {
    /// Takes a request in. Never waits.
    ///
    /// # Errors
    /// [`NoPlace`].
    pub fn push(&self, payload: Payload) -> Result<(), NoPlace> {
        let s = &self.shared;
        if payload.bytes.len() > s.limits.bytes {
            s.counters.drop_items(Signal::Spans, Reason::QueueFull, payload.spans);
            return Err(NoPlace::Ever);
        }
        let mut state = s.state();
        let bytes = state.bytes.saturating_add(payload.bytes.len());
        if state.closed || state.items >= s.limits.items || bytes > s.limits.bytes {
            return Err(NoPlace::Now);
        }
        state.items += 1;
        state.bytes = bytes;
        state.spans += payload.spans;
        state.waiting.push_back(Item { payload, born: Instant::now() });
        drop(state);
        s.arrived.notify_one();
        Ok(())
    }

    /// What waits or is under way.
    pub fn waiting(&self) -> Waiting {
        let state = self.shared.state();
        Waiting { requests: state.items, bytes: state.bytes }
    }

    /// Where it goes, without its login.
    pub fn endpoint(&self) -> &str {
        &self.shared.target.endpoint
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held; were it so, the counts are still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One of the tasks: until the queue is closed and empty.
    async fn run(self: Arc<Self>) {
        loop {
            let arrived = self.arrived.notified();
            let next = {
                let mut state = self.state();
                (state.waiting.pop_front(), state.closed)
            };
            match next {
                (Some(item), _) => {
                    let spans = item.payload.spans;
                    let delivered = self.deliver(&item).await;
                    self.done(&item);
                    match delivered {
                        Ok(rejected) => self.counters.taken(Signal::Spans, spans, rejected),
                        Err(reason) => self.counters.drop_items(Signal::Spans, reason, spans),
                    }
                }
                (None, true) => return,
                (None, false) => arrived.await,
            }
        }
    }

    fn done(&self, item: &Item) {
        let mut state = self.state();
        state.items = state.items.saturating_sub(1);
        state.bytes = state.bytes.saturating_sub(item.payload.bytes.len());
        state.spans = state.spans.saturating_sub(item.payload.spans);
    }

    /// Tries until it is delivered, refused, or too old. How many of its spans the receiver has not taken.
    async fn deliver(&self, item: &Item) -> Result<u64, Reason> {
        let mut pause = PAUSE.0;
        loop {
            if item.born.elapsed() >= self.limits.keep {
                return Err(Reason::Expired);
            }
            match raw::send(&self.target, &self.wire, &item.payload).await {
                Ok(taken) => {
                    self.works();
                    let told = taken.tells().then(|| self.state().partly.failed(Instant::now())).flatten();
                    if told.is_some() {
                        let (endpoint, rejected, why) = (&self.target.endpoint, taken.rejected, taken.why);
                        tracing::warn!(endpoint, rejected, why, "{}", PARTLY);
                    }
                    return Ok(taken.rejected);
                }
                Err(Failure::Later { why, after }) => {
                    self.complain(&why, "kept and tried again");
                    let asked = after.unwrap_or_default().min(ASKED);
                    self.pause(self.spread(pause).max(asked)).await;
                    pause = (pause * 2).min(PAUSE.1);
                }
                Err(Failure::TooLarge { why, surely: true }) => {
                    self.complain(&why, "too large for the receiver and dropped");
                    return Err(Reason::TooLarge);
                }
                Err(Failure::TooLarge { why, surely: false }) => {
                    self.complain(&why, "a quota or too large, and dropped");
                    return Err(Reason::Exhausted);
                }
                Err(Failure::Never { why }) => {
                    self.complain(&why, "refused for good and dropped");
                    return Err(Reason::Rejected);
                }
            }
        }
    }

    /// Spread by a quarter so that not all come back at once.
    fn spread(&self, pause: Duration) -> Duration {
        let spread = self.jitter.hash_one(Instant::now()) % 256;
        pause + pause / 1024 * u32::try_from(spread).unwrap_or(0)
    }

    async fn pause(&self, pause: Duration) {
        let closing = self.closing.notified();
        let pause = if self.state().closed { PAUSE.0 / 2 } else { pause };
        // Whichever comes first.
        let _ = tokio::time::timeout(pause, closing).await;
    }

    fn works(&self) {
        let again = self.state().complaint.works(Instant::now());
        if let Some(after) = again {
            let endpoint = &self.target.endpoint;
            tracing::info!(endpoint, "the engines' spans are handed on again after {} s", after.as_secs());
        }
    }

    fn complain(&self, why: &str, what: &str) {
        let told = self.state().complaint.failed(Instant::now());
        if let Some(untold) = told {
            let endpoint = &self.target.endpoint;
            tracing::warn!(
                endpoint,
                why,
                untold,
                "the engines' spans are not handed on; {what} (the agent goes on)"
            );
        }
    }
}
