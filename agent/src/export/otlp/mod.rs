//! OpenTelemetry out: traces, logs, metrics, over the network and into a file.
//!
//! ```text
//! Otlp::event ─▶ thread: spans, records ─┬▶ queue ─▶ sender (task) ─▶ exporter per process ─▶ one connection
//!  (no wait)     of rooms                └▶ file
//! ```
//! Traces and logs have a queue and a sender each: they may go to different places, and one that is down does
//! not hold up the other. Metrics have the SDK's periodic reader.

mod config;
mod endpoint;
mod file;
mod forward;
mod gpus;
mod logs;
mod metrics;
mod network;
mod numbers;
mod partial;
mod queue;
mod raw;
mod resource;
mod scheduled;
mod sender;
mod settings;
mod spans;
mod tls;
mod transport;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::thread;
use std::time::{Duration, Instant};

use opentelemetry_sdk::logs::SdkLogRecord;
use opentelemetry_sdk::trace::SpanData;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::counters::{Counters, Reason, Signal};
use super::events::Lines;
use super::http::Published;
use super::{ExportError, FindingNews, Identity, News, RoomEvent};
use crate::rooms::model::{Phase, Role};

use file::Entry;
use metrics::Metrics;
use queue::{Item, Queue};
use resource::{ProcessKey, Resources};
use sender::Sender;
use settings::{Env, Target};
use spans::Tracer;
use transport::{Export, Exporters, Wire};

pub use config::{Compression, OtlpConfig, Protocol, QueueConfig, Secret, TlsConfig};
pub use endpoint::Endpoint;
pub(crate) use endpoint::without_login;
pub use forward::{ForwardConfig, ForwardHandle, Forwarder, NoPlace, Payload, Waiting};
pub use settings::OtlpError;

/// Events waiting to become spans.
const WAITING: usize = 2048;

/// Of these, places that only flagged ones may take.
const RESERVED: usize = WAITING / 4;

/// Time beyond the grace period for counting what is abandoned.
const LAST: Duration = Duration::from_secs(1);

/// Traces, logs, metrics, file: whatever is configured.
#[derive(Debug)]
pub(super) struct Otlp {
    to: Option<SyncSender<Work>>,
    waiting: Arc<AtomicUsize>,
    /// Time is up: what still waits is counted, not made into spans.
    abandoned: Arc<AtomicBool>,
    maker: thread::JoinHandle<Option<Lines<Entry>>>,
    /// Ends when the maker has ended.
    made: Receiver<()>,
    traces: Option<Running<SpanData>>,
    logs: Option<Running<SdkLogRecord>>,
    metrics: Option<Metrics>,
    counters: Arc<Counters>,
}

struct Work {
    event: News,
    /// Wait for places rather than drop.
    patient: bool,
}

/// A signal's queue and the task that empties it.
#[derive(Debug)]
struct Running<T> {
    queue: Arc<Queue<T>>,
    task: JoinHandle<()>,
}

impl Otlp {
    /// Sets up what `config` and the environment ask for; `None`: nothing. Needs a runtime around it.
    ///
    /// # Errors
    /// [`ExportError`].
    pub(super) fn start(
        config: &OtlpConfig,
        identity: &Arc<Identity>,
        published: &watch::Receiver<Published>,
        counters: &Arc<Counters>,
        env: Env<'_>,
    ) -> Result<Option<Self>, ExportError> {
        let resources = Resources::new(identity, env);
        let mut wires = Wires::default();
        let mut open = |signal| -> Result<Option<(Target, Wire)>, OtlpError> {
            let Some(target) = settings::resolve(config, signal, env)? else { return Ok(None) };
            let wire = wires.open(&target)?;
            tracing::info!(signal = signal.label(), endpoint = target.endpoint, "sending OTLP");
            Ok(Some((target, wire)))
        };
        let (traces, logs, metrics) = (open(Signal::Traces)?, open(Signal::Logs)?, open(Signal::Metrics)?);
        let file = config.file.as_deref().map(|path| file::open(path, Arc::clone(counters))).transpose()?;
        if traces.is_none() && logs.is_none() && metrics.is_none() && file.is_none() {
            return Ok(None);
        }
        let metrics = metrics
            .map(|(target, wire)| {
                let resource = resources.agent().clone();
                Metrics::start(&target, &wire, resource, published.clone(), Arc::clone(counters), env)
            })
            .transpose()?;
        let run = Runner { config, resources: &resources, counters };
        let traces = traces.map(|(target, wire)| run.start(target, wire));
        let logs = logs.map(|(target, wire)| run.start(target, wire));
        let waiting = Arc::new(AtomicUsize::new(0));
        let abandoned = Arc::new(AtomicBool::new(false));
        let (to, from) = mpsc::sync_channel(WAITING);
        let (ending, made) = mpsc::channel();
        let maker = Maker {
            from,
            waiting: Arc::clone(&waiting),
            abandoned: Arc::clone(&abandoned),
            identity: Arc::clone(identity),
            resources,
            records: logs::Records::default(),
            traces: queue_of(traces.as_ref()),
            logs: queue_of(logs.as_ref()),
            file,
            counters: Arc::clone(counters),
            runtime: Handle::current(),
            _ending: ending,
        };
        let maker = thread::Builder::new()
            .name("otlp".to_owned())
            .spawn(move || maker.run())
            .map_err(ExportError::Thread)?;
        let counters = Arc::clone(counters);
        Ok(Some(Self { to: Some(to), waiting, abandoned, maker, made, traces, logs, metrics, counters }))
    }

    /// Hands an event in; never waits.
    pub(super) fn event(&self, event: News) {
        let Some(to) = &self.to else { return };
        let (flagged, signals) = (event.flagged(), self.signals(&event));
        let taken = self.waiting.fetch_add(1, Ordering::Relaxed);
        let room = flagged || taken < WAITING - RESERVED;
        if room && to.try_send(Work { event, patient: false }).is_ok() {
            return;
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        lose(&self.counters, signals, flagged, Reason::QueueFull);
    }

    fn signals(&self, event: &News) -> (bool, bool) {
        signals(event, self.traces.is_some(), self.logs.is_some())
    }

    /// Hands an event in and waits for its place, and for that of its spans.
    pub(super) fn event_wait(&self, event: News) {
        let Some(to) = &self.to else { return };
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if let Err(TrySendError::Full(work)) = to.try_send(Work { event, patient: true }) {
            // The other end only goes away with this one.
            let _ = to.send(work);
        }
    }

    /// Records one phase.
    pub(super) fn observe(&self, role: Role, phase: Phase, seconds: f64) {
        if let Some(metrics) = &self.metrics {
            metrics.observe(role, phase, seconds);
        }
    }

    /// Delivers what waits until `until`; counts the rest.
    pub(super) async fn shutdown(mut self, until: tokio::time::Instant) {
        drop(self.to.take());
        let grace = until.saturating_duration_since(tokio::time::Instant::now());
        let (made, maker) = (self.made, self.maker);
        let abandon = {
            let (abandoned, traces, logs) =
                (self.abandoned, queue_of(self.traces.as_ref()), queue_of(self.logs.as_ref()));
            move || {
                abandoned.store(true, Ordering::Relaxed);
                // It may wait for a place in them.
                traces.inspect(|q| q.close());
                logs.inspect(|q| q.close());
            }
        };
        let file = tokio::task::spawn_blocking(move || {
            let ended = |result| !matches!(result, Err(RecvTimeoutError::Timeout));
            let mut over = ended(made.recv_timeout(grace));
            if !over {
                abandon();
                over = ended(made.recv_timeout(LAST));
            }
            // The maker is at its very end; joining it does not wait.
            if over { maker.join().ok().flatten() } else { None }
        });
        let file = file.await.ok().flatten();
        let metrics = self.metrics.map(|m| tokio::task::spawn_blocking(move || m.shutdown(grace)));
        let file = file.map(|f| tokio::task::spawn_blocking(move || f.close(grace)));
        let ends = (finish(self.traces, until, &self.counters), finish(self.logs, until, &self.counters));
        tokio::join!(ends.0, ends.1);
        for blocking in [metrics, file].into_iter().flatten() {
            let _ = tokio::time::timeout_at(until, blocking).await;
        }
    }
}

fn queue_of<T>(running: Option<&Running<T>>) -> Option<Arc<Queue<T>>> {
    running.map(|r| Arc::clone(&r.queue))
}

/// What an event gives: a room spans and maybe a record, a finding a record.
fn signals(event: &News, traces: bool, logs: bool) -> (bool, bool) {
    (traces && matches!(event, News::Room(_)), logs && !event.only_traces())
}

/// An event lost before it became spans counts once for every signal it would have given.
fn lose(counters: &Counters, (traces, logs): (bool, bool), flagged: bool, reason: Reason) {
    if traces {
        counters.drop_items(Signal::Traces, reason, 1);
    }
    if logs && flagged {
        counters.drop_items(Signal::Logs, reason, 1);
    }
}

async fn finish<T: Export>(running: Option<Running<T>>, until: tokio::time::Instant, counters: &Counters) {
    let Some(Running { queue, mut task }) = running else { return };
    queue.close();
    if tokio::time::timeout_at(until, &mut task).await.is_err() {
        task.abort();
        // It says that it was aborted.
        let _ = task.await;
    }
    counters.drop_items(T::SIGNAL, Reason::Shutdown, queue.remaining());
}

/// Connections, shared by signals that go to the same place the same way.
#[derive(Default)]
struct Wires {
    open: Vec<(Target, Wire)>,
}

impl Wires {
    fn open(&mut self, target: &Target) -> Result<Wire, OtlpError> {
        let same = |t: &Target| {
            t.protocol == Protocol::Grpc
                && (t.protocol, &t.endpoint, &t.tls, t.timeout)
                    == (target.protocol, &target.endpoint, &target.tls, target.timeout)
        };
        if let Some((_, wire)) = self.open.iter().find(|(t, _)| same(t)) {
            return Ok(wire.clone());
        }
        let wire = Wire::open(target)?;
        self.open.push((target.clone(), wire.clone()));
        Ok(wire)
    }
}

struct Runner<'a> {
    config: &'a OtlpConfig,
    resources: &'a Resources,
    counters: &'a Arc<Counters>,
}

impl Runner<'_> {
    fn start<T: Export>(&self, target: Target, wire: Wire) -> Running<T>
    where
        Sender<T>: Send,
    {
        let queue = Arc::new(Queue::new(self.config.queue));
        let exporters = Exporters::new(target, wire, self.resources.clone());
        let sender =
            Sender::new(Arc::clone(&queue), exporters, Arc::clone(self.counters), self.config.queue.keep);
        Running { queue, task: tokio::spawn(sender.run()) }
    }
}

/// Thread that makes spans and records of events.
struct Maker {
    from: Receiver<Work>,
    waiting: Arc<AtomicUsize>,
    abandoned: Arc<AtomicBool>,
    identity: Arc<Identity>,
    resources: Resources,
    records: logs::Records,
    traces: Option<Arc<Queue<SpanData>>>,
    logs: Option<Arc<Queue<SdkLogRecord>>>,
    file: Option<Lines<Entry>>,
    counters: Arc<Counters>,
    runtime: Handle,
    /// Dropped at the end.
    _ending: mpsc::Sender<()>,
}

impl Maker {
    /// Until nothing can come any more. Hands the file back to be closed.
    fn run(mut self) -> Option<Lines<Entry>> {
        while let Ok(work) = self.from.recv() {
            if self.abandoned.load(Ordering::Relaxed) {
                let signals = signals(&work.event, self.traces.is_some(), self.logs.is_some());
                lose(&self.counters, signals, work.event.flagged(), Reason::Shutdown);
            } else {
                self.make(&work);
            }
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        self.file.take()
    }

    fn make(&self, work: &Work) {
        match &work.event {
            News::Room(event) => self.make_room(event, work.patient),
            News::Finding(finding) => self.make_finding(finding, work.patient),
        }
    }

    fn make_room(&self, event: &RoomEvent, patient: bool) {
        let tracer = Tracer::new(&self.identity, event);
        let flagged = event.flagged();
        for (process, spans) in tracer.groups() {
            if self.file.is_some() {
                self.write(Entry::Spans(self.resources.of(process), spans.clone()), flagged, patient);
            }
            if let Some(queue) = &self.traces {
                self.push(queue, process, spans, flagged, patient);
            }
        }
        if let Some((process, record)) = self.records.record(event, &tracer) {
            self.log(process, record, flagged, patient);
        }
    }

    fn make_finding(&self, finding: &FindingNews, patient: bool) {
        let (process, record) = self.records.finding(finding);
        self.log(process, record, true, patient);
    }

    fn log(&self, process: Option<ProcessKey>, record: SdkLogRecord, flagged: bool, patient: bool) {
        if self.file.is_some() {
            let entry = Entry::Record(self.resources.of(process), Box::new(record.clone()));
            self.write(entry, flagged, patient);
        }
        if let Some(queue) = &self.logs {
            self.push(queue, process, vec![record], flagged, patient);
        }
    }

    fn write(&self, entry: Entry, flagged: bool, patient: bool) {
        match &self.file {
            Some(file) if patient => file.write(entry),
            Some(file) => file.try_write(entry, flagged),
            None => {}
        }
    }

    fn push<T: Export>(
        &self,
        queue: &Queue<T>,
        process: Option<ProcessKey>,
        payload: Vec<T>,
        flagged: bool,
        patient: bool,
    ) {
        let bytes = payload.iter().map(Export::size).sum();
        if patient {
            self.runtime.block_on(queue.place(bytes));
        }
        let item = Item { flagged, process, bytes, born: Instant::now(), payload };
        let gone = queue.push(item);
        self.counters.drop_items(T::SIGNAL, Reason::QueueFull, sender::count(&gone));
    }
}
