//! Delivers one signal's queue: in batches, flagged first, with back-off for minutes, counting what is lost.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::partial::{PARTLY, Taken};
use super::queue::{Batch, Item, Queue, REQUEST_BYTES, REQUEST_ITEMS};
use super::transport::{Export, Exporters, Failure};
use crate::export::complaint::Complaint;
use crate::export::counters::{Counters, Reason};

/// How long an item waits for others to share its request; pinned rooms do not wait.
const COMPANY: Duration = Duration::from_secs(1);

/// First and longest pause after a failure.
const PAUSE: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(30));

/// Longest pause that a receiver can ask for.
const ASKED: Duration = Duration::from_mins(1);

/// Pause while stopping: the grace period is short.
const LAST_PAUSE: Duration = Duration::from_millis(200);

/// Delivers until the queue is closed and empty.
pub(super) struct Sender<T: Export> {
    pub(super) queue: Arc<Queue<T>>,
    pub(super) exporters: Exporters<T>,
    pub(super) counters: Arc<Counters>,
    /// How long an item is kept.
    pub(super) keep: Duration,
    state: State,
}

struct State {
    complaint: Complaint,
    /// Of requests that were taken in part.
    partly: Complaint,
    pause: Duration,
    /// Bytes of the next request; halved when one was too large, doubled when one went through.
    bytes: usize,
    jitter: RandomState,
}

impl<T: Export> Sender<T> {
    pub(super) fn new(
        queue: Arc<Queue<T>>,
        exporters: Exporters<T>,
        counters: Arc<Counters>,
        keep: Duration,
    ) -> Self {
        let state = State {
            complaint: Complaint::default(),
            partly: Complaint::default(),
            pause: PAUSE.0,
            bytes: REQUEST_BYTES,
            jitter: RandomState::new(),
        };
        Self { queue, exporters, counters, keep, state }
    }

    /// Runs.
    pub(super) async fn run(mut self) {
        while self.queue.ready().await {
            // Whichever comes first; both are fine.
            let _ = tokio::time::timeout(COMPANY, self.queue.urgent()).await;
            let batch = self.fresh(self.queue.take(REQUEST_ITEMS, self.state.bytes));
            if batch.is_empty() {
                continue;
            }
            if let Some(pause) = self.deliver(batch).await {
                self.pause(pause).await;
            }
        }
    }

    /// Drops what is too old to be sent.
    fn fresh(&self, batch: Batch<T>) -> Batch<T> {
        let now = Instant::now();
        let (fresh, old): (Vec<_>, Vec<_>) =
            batch.into_iter().partition(|i| now.saturating_duration_since(i.born) < self.keep);
        self.lose(&old, Reason::Expired);
        fresh
    }

    /// One attempt; how long to pause after it.
    async fn deliver(&mut self, batch: Batch<T>) -> Option<Duration> {
        let process = batch.first().and_then(|i| i.process);
        let payload: Vec<T> = batch.iter().flat_map(|i| i.payload.iter().cloned()).collect();
        let count = payload.len() as u64;
        match self.exporters.send(process, payload).await {
            Ok(taken) => {
                self.queue.done(&batch);
                self.counters.taken(T::SIGNAL, count, taken.rejected);
                self.works();
                self.partly(&taken);
                None
            }
            Err(Failure::Later { why, after }) => {
                self.complain(&why, "kept and tried again");
                self.queue.give_back(batch);
                Some(self.backed_off(after))
            }
            Err(Failure::TooLarge { why, .. }) if batch.len() > 1 => {
                self.complain(&why, "tried again in smaller requests");
                let sent: usize = batch.iter().map(|i| i.bytes).sum();
                self.state.bytes = (sent / 2).max(1);
                self.queue.give_back(batch);
                Some(PAUSE.0)
            }
            Err(Failure::TooLarge { why, surely: true }) => {
                self.complain(&why, "too large for a request and dropped");
                self.lose(&batch, Reason::TooLarge);
                None
            }
            Err(Failure::TooLarge { why, surely: false }) => {
                self.complain(&why, "kept and tried again");
                self.queue.give_back(batch);
                Some(self.backed_off(None))
            }
            Err(Failure::Never { why }) => {
                self.complain(&why, "refused for good and dropped");
                self.lose(&batch, Reason::Rejected);
                None
            }
        }
    }

    fn works(&mut self) {
        self.state.pause = PAUSE.0;
        self.state.bytes = (self.state.bytes * 2).min(REQUEST_BYTES);
        if let Some(after) = self.state.complaint.works(Instant::now()) {
            let signal = T::SIGNAL.label();
            let endpoint = self.exporters.endpoint();
            tracing::info!(signal, endpoint, "OTLP is delivered again after {} s", after.as_secs());
        }
    }

    /// Says what a receiver that takes requests has against them.
    fn partly(&mut self, taken: &Taken) {
        if !taken.tells() {
            return;
        }
        if let Some(untold) = self.state.partly.failed(Instant::now()) {
            let (signal, endpoint) = (T::SIGNAL.label(), self.exporters.endpoint());
            let (rejected, why) = (taken.rejected, taken.why.as_str());
            tracing::warn!(signal, endpoint, rejected, why, untold, "{PARTLY}");
        }
    }

    fn complain(&mut self, why: &str, what: &str) {
        if let Some(untold) = self.state.complaint.failed(Instant::now()) {
            let signal = T::SIGNAL.label();
            let endpoint = self.exporters.endpoint();
            tracing::warn!(
                signal,
                endpoint,
                why,
                untold,
                "OTLP is not delivered; {what} (the agent goes on)"
            );
        }
    }

    fn lose(&self, items: &[Item<T>], reason: Reason) {
        self.queue.done(items);
        self.counters.drop_items(T::SIGNAL, reason, count(items));
    }

    /// The next pause, spread by a quarter so that a fleet does not come back all at once.
    fn backed_off(&mut self, asked: Option<Duration>) -> Duration {
        let pause = self.state.pause;
        self.state.pause = (pause * 2).min(PAUSE.1);
        let spread = self.state.jitter.hash_one(Instant::now()) % 256;
        let spread = pause / 1024 * u32::try_from(spread).unwrap_or(0);
        (pause + spread).max(asked.unwrap_or_default().min(ASKED))
    }

    async fn pause(&self, pause: Duration) {
        // Whichever comes first.
        let _ = tokio::time::timeout(pause, self.queue.closing()).await;
        if self.queue.closed() {
            tokio::time::sleep(LAST_PAUSE).await;
        }
    }
}

/// Spans or records in items.
pub(super) fn count<T>(items: &[Item<T>]) -> u64 {
    items.iter().map(|i| i.payload.len() as u64).sum()
}
