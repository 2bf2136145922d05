//! The optional probes' side of `run`: a thread finds the transfer engines that processes have mapped and attaches, the observing
//! thread takes what they see. Off unless `probes.mooncake` is set.
//!
//! The thread keeps the privileges that this takes (`CAP_SYS_ADMIN`, `CAP_SYS_PTRACE`, `CAP_DAC_READ_SEARCH`), so it starts before the others are
//! given up.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::config::Config;
use crate::batch::{Batch, Layout, Step};
use crate::engine::mooncake::{self, Library};
use crate::event::{Event, Mono};
use crate::export::metrics::MetricsSnapshot;
use crate::kernel::{BatchRing, Probes};
use crate::pipeline::Pipeline;
use crate::rooms::model::Role;

/// Records taken in one turn.
const BUDGET: usize = 4096;

/// How long until a process that has mapped no transfer engine is looked at again.
const AGAIN: Duration = Duration::from_secs(5);

/// Engine processes looked at.
const MAX_PROCESSES: usize = 1024;

/// What the thread found of a process.
#[derive(Clone, Debug)]
struct Found {
    pid: u32,
    mapped: Option<Library>,
    /// Why it is not probed.
    why: Option<String>,
}

/// A record that waits for its turn.
#[derive(Debug)]
struct Owned {
    batch: (Mono, u32, u32, u64),
    step: OwnedStep,
}

#[derive(Debug)]
enum OwnedStep {
    Submit { total: u64, offset: u64, requests: Vec<u8> },
    Unreadable,
    Free,
}

impl Owned {
    fn of(b: &Batch<'_>) -> Self {
        let step = match b.step {
            Step::Submit { total, offset, requests } => {
                OwnedStep::Submit { total, offset, requests: requests.to_vec() }
            }
            Step::Unreadable => OwnedStep::Unreadable,
            Step::Free => OwnedStep::Free,
        };
        Self { batch: (b.at, b.pid, b.tid, b.id), step }
    }

    fn batch(&self) -> Batch<'_> {
        let (at, pid, tid, id) = self.batch;
        let step = match &self.step {
            OwnedStep::Submit { total, offset, requests } => {
                Step::Submit { total: *total, offset: *offset, requests }
            }
            OwnedStep::Unreadable => Step::Unreadable,
            OwnedStep::Free => Step::Free,
        };
        Batch { at, pid, tid, id, step }
    }
}

/// The probes of a running agent; all of it is `None` where they are off.
pub(super) struct Prober {
    on: bool,
    /// Why there are none although they are asked for.
    refused: Option<String>,
    running: Option<Running>,
}

struct Running {
    ring: BatchRing,
    /// To the thread: the processes to look at.
    wanted: SyncSender<BTreeSet<u32>>,
    found: Receiver<Found>,
    known: BTreeMap<u32, Found>,
    pending: VecDeque<Owned>,
    lost: u64,
}

impl Prober {
    /// Loads the programs and starts the thread. To be called before privileges are given up.
    pub(super) fn start(config: &Config) -> Self {
        let on = config.probes.mooncake;
        let mut prober = Self { on, refused: None, running: None };
        if on {
            match Running::start() {
                Ok(running) => prober.running = Some(running),
                Err(why) => {
                    tracing::warn!(
                        why,
                        "what Mooncake is asked to move is not seen: its probes cannot be loaded"
                    );
                    prober.refused = Some(why);
                }
            }
        }
        prober
    }

    /// Whether there is anything to do.
    pub(super) const fn runs(&self) -> bool {
        self.running.is_some()
    }

    /// Takes what the probes saw until now; it waits for [`Self::before`] and [`Self::rest`].
    pub(super) fn collect(&mut self) {
        let Some(running) = &mut self.running else { return };
        let Running { ring, pending, .. } = running;
        // What does not fit stays in the ring, which counts what it loses.
        let room = BUDGET.saturating_sub(pending.len());
        ring.drain(room, &mut |batch| pending.push_back(Owned::of(&batch)));
    }

    /// Hands on what the probes saw before this event: a room is asked for before it is submitted for, and ends after that.
    pub(super) fn before(&mut self, event: &Event<'_>, pipeline: &mut Pipeline) {
        let Event::Socket(event) = event else { return };
        self.until(event.at, pipeline);
    }

    /// Hands on the rest, once all events are taken that were recorded before it.
    pub(super) fn rest(&mut self, pipeline: &mut Pipeline) {
        self.until(Mono(u64::MAX), pipeline);
    }

    fn until(&mut self, at: Mono, pipeline: &mut Pipeline) {
        let Some(running) = &mut self.running else { return };
        while let Some(owned) = running.pending.pop_front_if(|owned| owned.batch.0 <= at) {
            let batch = owned.batch();
            pipeline.batch(batch.at, Some(&batch));
        }
    }

    /// What is due once a second.
    pub(super) fn second(&mut self, at: Mono, pipeline: &mut Pipeline, snapshot: &mut MetricsSnapshot) {
        let Some(running) = &mut self.running else { return };
        running.look(pipeline);
        running.measure(at, pipeline, snapshot);
    }

    /// Their part of `/status`.
    pub(super) fn status(&self, pipeline: &Pipeline) -> Value {
        let Some(running) = &self.running else { return json!({"mooncake": self.on, "why": self.refused}) };
        let processes = running.known.values().map(|f| {
            let library = f.mapped.as_ref();
            json!({
                "pid": f.pid, "library": library.map(|l| &l.path), "version": library.and_then(|l| l.version.as_ref()),
                "probed": f.why.is_none(), "why": f.why,
            })
        });
        let counts = pipeline.control().batch_counts().unwrap_or_default();
        json!({
            "mooncake": true, "why": null, "processes": processes.collect::<Vec<_>>(),
            "batches": {
                "joined": counts.joined, "ambiguous": counts.ambiguous, "unmatched": counts.unmatched,
                "reads": counts.reads, "incomplete": counts.incomplete, "misfit": counts.misfit,
                "turned_away": counts.turned_away, "ring_full": running.lost,
            },
        })
    }
}

impl Running {
    fn start() -> Result<Self, String> {
        let (probes, ring) = Probes::load().map_err(|e| e.to_string())?;
        let (wanted, wishes) = mpsc::sync_channel(1);
        let (send, found) = mpsc::sync_channel(MAX_PROCESSES);
        let looker = Looker { probes, send, attached: BTreeMap::new(), told: BTreeMap::new() };
        std::thread::Builder::new()
            .name("roomtrace-probe".to_owned())
            .spawn(move || looker.run(&wishes))
            .map_err(|e| format!("cannot start a thread: {e}"))?;
        Ok(Self { ring, wanted, found, known: BTreeMap::new(), pending: VecDeque::new(), lost: 0 })
    }

    /// Tells the thread whom to look at, and the pipeline whom it found.
    fn look(&mut self, pipeline: &mut Pipeline) {
        let processes = pipeline.engine_processes();
        let wanted: BTreeSet<u32> = processes
            .iter()
            .filter(|(_, role)| **role != Some(Role::Decode))
            .map(|(pid, _)| *pid)
            .take(MAX_PROCESSES)
            .collect();
        self.known.retain(|pid, _| processes.contains_key(pid));
        // The thread is still at the last ones: they come again.
        let _ = self.wanted.try_send(wanted);
        for found in self.found.try_iter() {
            let layout = found.mapped.as_ref().and_then(|l| l.layout.as_ref().ok());
            match (&found.why, layout) {
                (None, Some(layout)) => {
                    tracing::info!(
                        pid = found.pid,
                        library = found.mapped.as_ref().map(|l| &l.path),
                        version = found.mapped.as_ref().and_then(|l| l.version.as_ref()),
                        "what this process asks Mooncake to move is seen from now on"
                    );
                    pipeline.watch_batches(found.pid, *layout);
                }
                (Some(why), _) if found.mapped.is_some() => tracing::warn!(
                    pid = found.pid,
                    library = found.mapped.as_ref().map(|l| &l.path),
                    why,
                    "what this process asks Mooncake to move is not seen"
                ),
                _ => {}
            }
            self.known.insert(found.pid, found);
        }
    }

    fn measure(&mut self, at: Mono, pipeline: &mut Pipeline, snapshot: &mut MetricsSnapshot) {
        if let Ok(counts) = self.ring.counts() {
            if counts.ring_full > self.lost {
                self.lost = counts.ring_full;
                pipeline.batch(at, None);
            }
            for (name, (runs, nanos)) in [("rt_submit", counts.submits), ("rt_free", counts.frees)] {
                snapshot.bpf_runs.push((name.to_owned(), runs));
                snapshot.bpf_run_nanos.push((name.to_owned(), nanos));
            }
        }
        let counts = pipeline.control().batch_counts().unwrap_or_default();
        let results =
            [("joined", counts.joined), ("ambiguous", counts.ambiguous), ("unmatched", counts.unmatched)];
        snapshot.batches.extend(results);
        snapshot.capture_lost.extend([
            ("probes", "ring_full", self.lost),
            ("probes", "incomplete", counts.incomplete),
            ("probes", "misfit", counts.misfit),
            ("probes", "turned_away", counts.turned_away),
        ]);
        let probed = self.known.values().filter(|f| f.why.is_none()).count();
        for (state, n) in [("probed", probed), ("refused", self.known.len() - probed)] {
            snapshot.probed_processes.push((state, u64::try_from(n).unwrap_or(u64::MAX)));
        }
    }
}

/// Runs on its own thread.
struct Looker {
    probes: Probes,
    send: SyncSender<Found>,
    /// Files that were tried, once each, with why they are not probed.
    attached: BTreeMap<(String, u64), Option<String>>,
    /// Processes that were told of, with when those without a library are looked at again.
    told: BTreeMap<u32, Option<Instant>>,
}

impl Looker {
    fn run(mut self, wishes: &Receiver<BTreeSet<u32>>) {
        if let Err(error) = Probes::drop_privileges() {
            tracing::warn!(%error, "the thread that attaches probes keeps privileges that it does not need");
        }
        loop {
            match wishes.recv_timeout(Duration::from_mins(1)) {
                Ok(wanted) => self.look(&wanted),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn look(&mut self, wanted: &BTreeSet<u32>) {
        self.told.retain(|pid, _| wanted.contains(pid));
        let now = Instant::now();
        for pid in wanted {
            if self.told.get(pid).is_some_and(|again| again.is_none_or(|again| again > now)) {
                continue;
            }
            let first = !self.told.contains_key(pid);
            let found = self.process(*pid);
            self.told.insert(*pid, found.mapped.is_none().then(|| now + AGAIN));
            // That there is none yet is said once.
            if (first || found.mapped.is_some()) && self.send.try_send(found).is_err() {
                self.told.remove(pid);
            }
        }
    }

    fn process(&mut self, pid: u32) -> Found {
        let none = "it has not loaded Mooncake's transfer engine (mooncake/engine.so)";
        let (mapped, why) = match mooncake::library("/proc", pid) {
            Err(why) => (None, Some(why)),
            Ok(None) => (None, Some(none.to_owned())),
            Ok(Some(library)) => {
                let why = match &library.layout {
                    Err(why) => Some(why.clone()),
                    Ok(Layout { .. }) => self.attach(&library),
                };
                (Some(library), why)
            }
        };
        Found { pid, mapped, why }
    }

    /// Once per file; why not.
    fn attach(&mut self, library: &Library) -> Option<String> {
        let Self { probes, attached, .. } = self;
        let try_it =
            || probes.attach(&library.reachable).err().map(|e| format!("the probes cannot be attached: {e}"));
        attached.entry(library.file.clone()).or_insert_with(try_it).clone()
    }
}
