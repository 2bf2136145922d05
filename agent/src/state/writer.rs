//! The thread that writes the state file. Who hands a state over never waits for it: there is one place for a state,
//! and the latest has it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::{Counters, StateError, Store};
use crate::export::complaint::Complaint;
use crate::pipeline::Saved;

/// Time between two files at least.
const EVERY: Duration = Duration::from_secs(1);

/// Bytes a second at most, over time.
const RATE: u64 = 1 << 20;

/// Front of the thread, owned by the one that observes.
#[derive(Debug)]
pub struct Writer {
    shared: Arc<Shared>,
    done: Receiver<()>,
    counters: Arc<Counters>,
    path: PathBuf,
    /// What [`crate::pipeline::Pipeline::changes`] said when a state was last handed over.
    changes: Option<u64>,
    handed: Option<Instant>,
}

#[derive(Debug, Default)]
struct Shared {
    place: Mutex<Slot>,
    filled: Condvar,
    /// A state waits or is being written.
    busy: AtomicBool,
}

#[derive(Debug, Default)]
struct Slot {
    saved: Option<Box<Saved>>,
    end: bool,
}

impl Shared {
    /// Held for a moment only, by either side.
    fn place(&self) -> MutexGuard<'_, Slot> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, saved: Saved, end: bool) {
        let old = {
            let mut place = self.place();
            self.busy.store(true, Ordering::Release);
            place.end |= end;
            place.saved.replace(Box::new(saved))
        };
        drop(old);
        self.filled.notify_one();
    }

    fn take(&self) -> (Option<Box<Saved>>, bool) {
        let mut place = self.place();
        loop {
            if place.saved.is_some() || place.end {
                return (place.saved.take(), place.end);
            }
            self.busy.store(false, Ordering::Release);
            place = self.filled.wait(place).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Writer {
    pub(super) fn start(store: Store) -> Result<Self, StateError> {
        let shared = Arc::new(Shared::default());
        let (finished, done) = mpsc::channel();
        let (counters, path) = (Arc::clone(&store.counters), store.path());
        let theirs = Arc::clone(&shared);
        let run = move || {
            write_all(&store, &theirs);
            // Nobody may be waiting any more.
            let _ = finished.send(());
        };
        thread::Builder::new().name("write-state".to_owned()).spawn(run).map_err(StateError::Thread)?;
        Ok(Self { shared, done, counters, path, changes: None, handed: None })
    }

    /// Whether a new state is worth making: something has changed, the one before is written, and it is time.
    pub fn wants(&self, changes: u64, now: Instant) -> bool {
        let pause = EVERY.max(Duration::from_millis(self.counters.bytes().saturating_mul(1000) / RATE));
        self.changes != Some(changes)
            && !self.shared.busy.load(Ordering::Acquire)
            && self.handed.is_none_or(|at| now.duration_since(at) >= pause)
    }

    /// Hands a state over. Never waits for the disk.
    pub fn hand_over(&mut self, saved: Saved, changes: u64, now: Instant) {
        (self.changes, self.handed) = (Some(changes), Some(now));
        self.shared.put(saved, false);
    }

    /// Writes the last one, for at most `grace`.
    pub fn finish(self, saved: Saved, grace: Duration) {
        self.shared.put(saved, true);
        if self.done.recv_timeout(grace).is_err() {
            let path = self.path.display();
            tracing::warn!(%path, "the state file could not be written in time: it is older than the end of this agent");
        }
    }
}

fn write_all(store: &Store, shared: &Shared) {
    let mut complaint = Complaint::default();
    loop {
        let (saved, end) = shared.take();
        if let Some(saved) = saved {
            match store.write(*saved) {
                Ok(bytes) => {
                    store.counters.wrote(bytes);
                    if let Some(since) = complaint.works(Instant::now()) {
                        tracing::info!("the state file can be written again, after {} s", since.as_secs());
                    }
                }
                Err(error) => {
                    store.counters.failed();
                    if let Some(untold) = complaint.failed(Instant::now()) {
                        tracing::warn!(untold, "{error}");
                    }
                }
            }
        }
        if end {
            return;
        }
    }
}
