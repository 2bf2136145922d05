//! What left the agent and what did not, by signal and reason. Atomic counters, nothing else.

use std::sync::atomic::{AtomicU64, Ordering};

/// A stream of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// JSON lines.
    Events,
    /// OTLP spans.
    Traces,
    /// OTLP log records.
    Logs,
    /// OTLP metrics.
    Metrics,
    /// OTLP JSON lines in a file.
    OtlpFile,
    /// Engines' own spans that are handed on.
    Spans,
}

impl Signal {
    /// Every signal.
    pub const ALL: [Self; 6] =
        [Self::Events, Self::Traces, Self::Logs, Self::Metrics, Self::OtlpFile, Self::Spans];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Events => "events",
            Self::Traces => "traces",
            Self::Logs => "logs",
            Self::Metrics => "metrics",
            Self::OtlpFile => "otlp_file",
            Self::Spans => "spans",
        }
    }
}

/// Why something was dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Its queue was full.
    QueueFull,
    /// The receiver refused it for good, or took the request and not it (OTLP's partial success).
    Rejected,
    /// One item alone is larger than a request may be.
    TooLarge,
    /// The receiver was short of something and does not say when to come again: a quota, or a request that was too large for it
    /// (`RESOURCE_EXHAUSTED` says either). Where waiting is of use it is tried again first.
    Exhausted,
    /// The receiver could not be reached for longer than an item is kept.
    Expired,
    /// The agent stopped before it could be delivered.
    Shutdown,
    /// Writing the file or standard output failed.
    Write,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Self; 7] = [
        Self::QueueFull,
        Self::Rejected,
        Self::TooLarge,
        Self::Exhausted,
        Self::Expired,
        Self::Shutdown,
        Self::Write,
    ];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::Rejected => "rejected",
            Self::TooLarge => "too_large",
            Self::Exhausted => "exhausted",
            Self::Expired => "expired",
            Self::Shutdown => "shutdown",
            Self::Write => "write",
        }
    }
}

/// Counts since the agent started. Shared between the threads of the export.
#[derive(Debug, Default)]
pub struct Counters {
    dropped: [[AtomicU64; Reason::ALL.len()]; Signal::ALL.len()],
    sent: [AtomicU64; Signal::ALL.len()],
}

impl Counters {
    /// Counts `n` items (spans, records, lines) lost.
    pub(super) fn drop_items(&self, signal: Signal, reason: Reason, n: u64) {
        if let Some(counter) = self.dropped.get(signal as usize).and_then(|d| d.get(reason as usize)) {
            counter.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// Counts `n` items delivered.
    pub(super) fn sent_items(&self, signal: Signal, n: u64) {
        if let Some(counter) = self.sent.get(signal as usize) {
            counter.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// Counts a request with `n` items that was taken but for `rejected` of them.
    pub(super) fn taken(&self, signal: Signal, n: u64, rejected: u64) {
        let rejected = rejected.min(n);
        self.sent_items(signal, n - rejected);
        self.drop_items(signal, Reason::Rejected, rejected);
    }

    /// Items lost.
    pub fn dropped(&self, signal: Signal, reason: Reason) -> u64 {
        let counter = self.dropped.get(signal as usize).and_then(|d| d.get(reason as usize));
        counter.map_or(0, |c| c.load(Ordering::Relaxed))
    }

    /// Items delivered: written to the file, or accepted by the receiver.
    pub fn sent(&self, signal: Signal) -> u64 {
        self.sent.get(signal as usize).map_or(0, |c| c.load(Ordering::Relaxed))
    }
}
