//! `roomtrace run`: one thread drains the kernel's ring and owns the pipeline; everything else (exports, HTTP,
//! signals, the state file) runs on threads of its own and is reached through bounded channels.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde_json::{Value, json};

use super::config::Config;
use super::engines::{Engines, told};
use super::gpus::GpuReaders;
use super::network::NetworkReaders;
use super::probes::Prober;
use super::spans::Spans;
use super::{End, Failure, Outcome, measure, peers, recording, room_config, unread};
use crate::control::Judgement;
use crate::event::{Mono, SECOND};
use crate::export::clock::{Bracket, Clock};
use crate::export::metrics::MetricsSnapshot;
use crate::export::query::{Findings, First, Query, Rooms, RoomsFilter};
use crate::export::recording::Recording;
use crate::export::{Exports, Identity, Options};
use crate::kernel::{self, Capture, CaptureConfig};
use crate::pipeline::Pipeline;
use crate::sglang::message::KvPoll;
use crate::state::{self, Store};

/// How long the thread sleeps at most: verdicts need seconds, and the ring wakes it above a quarter full.
const WAIT: Duration = Duration::from_millis(50);

/// Records taken in one turn: a busy ring must starve neither the clock nor the API.
const BUDGET: usize = 8192;

/// Records taken at the end at most: more than the ring holds.
const LAST: usize = 262_144;

/// How often time passes for the rooms.
const TICK: u64 = SECOND / 10;

/// How often metrics are published, clocks compared, counters of the kernel side read.
const MEASURE: u64 = SECOND;

/// How long outputs may take at SIGTERM, so that all is over within 10 s, what writers add to count what they abandon included;
/// systemd and Kubernetes wait longer by default (90 s, 30 s).
const GRACE: Duration = Duration::from_secs(8);

/// `roomtrace run`.
pub(super) fn run(config: &Config) -> Outcome {
    super::logging();
    keep_private(config);
    let mut capture = Capture::start(&capture_config(config)).map_err(Failure::cannot_observe)?;
    let prober = Prober::start(config);
    // Before any other thread starts: threads inherit what is left.
    capture.drop_privileges(false).map_err(Failure::cannot_observe)?;
    let keeper = Keeper::new(config.state.file.as_deref());
    let mut pipeline = take_up(config, &mut capture, keeper.as_ref());
    if prober.runs() {
        pipeline.follow_batches();
    }
    let keeper = keeper.and_then(Keeper::writes);
    let clock = Clock::sampled(&brackets());
    let identity = identity(config);
    let at = now();
    let offset = i128::from(clock.unix_nanos(at)) - i128::from(at.0);
    let offset = i64::try_from(offset).unwrap_or_default();
    let recording = recording::start(config, &mut pipeline, &identity.host_name, at, offset)?;
    let options = Options {
        events: config.export.events.clone(),
        otlp: config.export.otlp.clone(),
        listen: config.http.enabled.then_some(config.http.listen),
        first: Some(measurements(now(), &pipeline, &capture, &identity, keeper.as_ref())),
    };
    let runtime = super::runtime()?;
    let exports = runtime.block_on(Exports::start(options, identity.clone())).map_err(Failure::usage)?;
    let spans = runtime.block_on(Spans::start(config, &exports))?;
    let stop = Arc::new(AtomicBool::new(false));
    {
        // Signals belong to the runtime that is entered.
        let _entered = runtime.enter();
        watch_signals(Arc::clone(&stop))?;
    }
    let mut agent = Agent {
        capture,
        pipeline,
        engines: Engines::start(config),
        gpus: GpuReaders::start(config),
        network: NetworkReaders::start(config),
        prober,
        keeper,
        recording,
        exports,
        spans,
        clock,
        identity,
        started: now(),
        requests: config.capture.requests,
        unreadable: Vec::new(),
    };
    tracing::info!(
        hook = agent.capture.hook().name(),
        version = env!("CARGO_PKG_VERSION"),
        listen = config.http.enabled.then(|| config.http.listen.to_string()),
        "observing"
    );
    agent.tell_exports();
    agent.exports.set_ready(Ok(()));
    let result = agent.observe(&stop);
    tracing::info!("stopping: hooks detached, outputs get {} s", GRACE.as_secs());
    let Agent { capture, pipeline, exports, spans, keeper, recording, .. } = agent;
    drop(capture);
    drop(recording);
    if let Some(Keeper { writer: Some(writer), .. }) = keeper {
        writer.finish(pipeline.save(now()), GRACE);
    }
    drop(pipeline);
    let counters = exports.counters();
    // Of the same time: what the engines sent goes out beside what the agent says.
    runtime.block_on(async {
        let until = tokio::time::Instant::now() + GRACE;
        tokio::join!(spans.shutdown(until), exports.shutdown(GRACE));
    });
    if let Some(dropped) = super::dropped(&counters) {
        tracing::warn!("not everything was delivered: {dropped}");
    }
    result
}

/// What the observing thread owns.
struct Agent {
    capture: Capture,
    pipeline: Pipeline,
    engines: Engines,
    gpus: GpuReaders,
    network: NetworkReaders,
    prober: Prober,
    keeper: Option<Keeper>,
    recording: Option<Recording>,
    exports: Exports,
    spans: Spans,
    clock: Clock,
    identity: Identity,
    started: Mono,
    /// Requests at HTTP ports are read.
    requests: bool,
    /// Connections on which nothing could be read, by what they speak, when it was last looked at.
    unreadable: Vec<(&'static str, u64)>,
}

impl Agent {
    fn observe(&mut self, stop: &AtomicBool) -> Outcome {
        let mut ticked = now();
        self.warn_of_unreadable();
        let mut measured = Mono(0);
        let mut more = false;
        while !stop.load(Ordering::Relaxed) {
            if !more {
                self.capture.wait(WAIT).map_err(Failure::cannot_observe)?;
            }
            more = self.drain() == BUDGET;
            let at = now();
            let Self { capture, pipeline, engines, .. } = self;
            engines.turn(at, pipeline, capture);
            self.spans.turn(at, &self.clock, &mut self.pipeline);
            self.gpus.turn(&mut self.pipeline);
            self.network.turn(!more, &mut self.pipeline, &mut self.capture);
            if at.since(ticked) >= TICK {
                ticked = at;
                self.pipeline.tick(at);
            }
            self.tell_kernel();
            self.tell_exports();
            if at.since(measured) >= MEASURE {
                measured = at;
                self.clock.resample(&brackets());
                self.forget_processes();
                let Self { capture, pipeline, engines, .. } = self;
                engines.second(pipeline, capture);
                self.warn_of_unreadable();
                let keeper = self.keeper.as_ref();
                let mut snapshot = measurements(at, &self.pipeline, &self.capture, &self.identity, keeper);
                self.spans.measure(&mut snapshot, &self.pipeline);
                let busy = in_transfer(&snapshot);
                self.gpus.second(at, busy, self.pipeline.rooms(), &mut snapshot);
                self.network.second(busy, self.pipeline.rooms().network(), &mut snapshot);
                self.prober.second(at, &mut self.pipeline, &mut snapshot);
                self.exports.publish(snapshot);
            }
            self.write_down(at);
            self.record();
            self.answer();
        }
        // What the ring still holds belongs to the last picture. Bounded: the hooks still fill it.
        let Self { capture, pipeline, .. } = self;
        capture.drain(LAST, &mut |event| pipeline.take(&event));
        self.pipeline.tick(now());
        self.record();
        self.tell_exports();
        Ok(End::Fine)
    }

    /// Takes what the kernel recorded; how much.
    fn drain(&mut self) -> usize {
        let Self { capture, pipeline, network, prober, .. } = self;
        if !prober.runs() {
            return capture.drain(BUDGET, &mut |event| {
                network.see(&event);
                pipeline.take(&event);
            });
        }
        prober.collect();
        let taken = capture.drain(BUDGET, &mut |event| {
            network.see(&event);
            prober.before(&event, pipeline);
            pipeline.take(&event);
        });
        // Else what was recorded before it is still in the ring.
        if taken < BUDGET {
            prober.rest(pipeline);
        }
        taken
    }

    /// Hands what was taken down to the thread that records it.
    fn record(&mut self) {
        if let (Some(recording), Some(recorder)) = (&mut self.recording, self.pipeline.recorder()) {
            recording.pass_on(recorder);
        }
    }

    /// Hands what must survive a restart to the thread that writes it, where that is due.
    fn write_down(&mut self, at: Mono) {
        let Some(writer) = self.keeper.as_mut().and_then(|k| k.writer.as_mut()) else { return };
        let (changes, time) = (self.pipeline.changes(), Instant::now());
        if writer.wants(changes, time) {
            writer.hand_over(self.pipeline.save(at), changes, time);
        }
    }

    /// A process that has ended is no engine any more.
    fn forget_processes(&mut self) {
        let ended: Vec<u32> = self
            .pipeline
            .processes()
            .keys()
            .copied()
            .filter(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists())
            .collect();
        for pid in ended {
            self.pipeline.forget_process(pid);
        }
    }

    /// Says it once a second at most when connections appear on which nothing can be read.
    fn warn_of_unreadable(&mut self) {
        let unread = self.pipeline.control().unread();
        let now: Vec<(&str, u64)> = unread.filter(|(why, _)| unread::meaning(why).is_some()).collect();
        for ((carries, n), (_, before)) in now.iter().zip(&self.unreadable).filter(|((_, n), (_, b))| n > b) {
            let Some(meaning) = unread::meaning(carries) else { continue };
            let last = self.pipeline.rooms().last_unreadable(meaning.cause).map(unread::named);
            tracing::warn!(carries, new = n - before, total = n, last, "{}", meaning.sentence);
        }
        self.unreadable = now;
    }

    fn tell_kernel(&mut self) {
        let Self { capture, pipeline, .. } = self;
        for (socket, judgement) in pipeline.judgements() {
            let answer = match judgement {
                Judgement::Zmtp => kernel::Judgement::Follow,
                Judgement::Http => kernel::Judgement::Http,
                Judgement::Foreign => kernel::Judgement::Foreign,
                Judgement::Neither => kernel::Judgement::Neither,
            };
            told(capture.judge(socket, answer));
        }
        for endpoint in pipeline.endpoints() {
            told(capture.watch_endpoint(endpoint));
        }
    }

    fn tell_exports(&mut self) {
        for event in self.pipeline.events() {
            self.exports.room_event(&event, &self.clock);
        }
        let at = self.pipeline.rooms().now();
        for event in self.pipeline.finding_events() {
            self.exports.finding_event(&event, at, &self.clock);
        }
    }

    /// Answers what the HTTP side asks; a sender that is gone has given up waiting.
    fn answer(&mut self) {
        while let Some(query) = self.exports.queries().try_recv() {
            match query {
                Query::Rooms { filter, reply } => drop(reply.send(self.page(&filter))),
                Query::Room { room, reply } => {
                    let rooms = self.pipeline.rooms().details(room);
                    drop(reply.send(Rooms { rooms, more: false, clock: self.clock.clone() }));
                }
                Query::First { pinned, oldest, reply } => {
                    let rooms = self.pipeline.rooms().overview(pinned, oldest);
                    drop(reply.send(First { rooms, clock: self.clock.clone() }));
                }
                Query::Findings { limit, reply } => drop(reply.send(self.findings(limit))),
                Query::Status { reply } => drop(reply.send(self.status())),
            }
        }
    }

    fn findings(&self, limit: usize) -> Findings {
        let table = self.pipeline.rooms();
        Findings {
            open: table.first_findings(limit),
            total: table.finding_count(),
            closed: table.closed_findings().cloned().collect(),
            at: now(),
            clock: self.clock.clone(),
        }
    }

    fn page(&self, filter: &RoomsFilter) -> Rooms {
        let table = self.pipeline.rooms();
        let (keys, more) = if filter.closed {
            filter.page(table.closed_keys())
        } else if filter.overdue {
            filter.page(table.overdue_keys())
        } else {
            filter.page(table.keys(filter.pinned))
        };
        let rooms = keys
            .into_iter()
            .filter_map(|(room, life)| table.snapshot(room).into_iter().find(|r| r.incarnation == life))
            .collect();
        Rooms { rooms, more, clock: self.clock.clone() }
    }

    fn status(&self) -> Value {
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "host": self.identity.host_name,
            "uptime_s": now().since(self.started) / SECOND,
            "capture": measure::status(&self.capture),
            "control": measure::control_status(&self.pipeline),
            "requests": measure::request_status(&self.pipeline),
            "rooms": measure::room_status(&self.pipeline),
            "peers": peers::status(self.pipeline.rooms()),
            "engines": self.engines.status(&self.pipeline),
            "spans": self.spans.status(&self.pipeline),
            "gpus": self.gpus.status(now(), self.pipeline.rooms().gpus()),
            "network": self.network.status(now(), self.pipeline.rooms().network()),
            "probes": self.prober.status(&self.pipeline),
            "state": self.keeper.as_ref().map(|k| measure::state_status(&k.path, &k.counters)),
            "sources": {
                "frames": "kernel hooks on socket calls",
                "requests": self.requests.then_some("kernel hooks on socket calls"), "scheduler_spans": self.spans.runs().then_some("OTLP from the engines"), "gpu": self.gpus.source(),
                "network": NetworkReaders::source(self.pipeline.rooms().network()),
            },
        })
    }
}

/// Whether any room is where its KV cache can move.
fn in_transfer(snapshot: &MetricsSnapshot) -> bool {
    let transfers = [KvPoll::WaitingForInput, KvPoll::Transferring];
    snapshot.rooms_open.iter().any(|(_, state, n)| *n > 0 && transfers.contains(state))
}

/// Everything for `/metrics`.
fn measurements(
    at: Mono,
    pipeline: &Pipeline,
    capture: &Capture,
    identity: &Identity,
    keeper: Option<&Keeper>,
) -> MetricsSnapshot {
    let mut snapshot = measure::snapshot(at, pipeline, capture, &identity.host_name);
    if let Some(keeper) = keeper {
        measure::state(&mut snapshot, &keeper.counters);
    }
    snapshot
}

/// The state file, as far as there is one.
struct Keeper {
    path: std::path::PathBuf,
    counters: Arc<state::Counters>,
    store: Option<Store>,
    writer: Option<state::Writer>,
}

impl Keeper {
    /// Takes the file; where that cannot be, it is said once and the agent does without.
    fn new(path: Option<&std::path::Path>) -> Option<Self> {
        let path = path?;
        let counters = Arc::new(state::Counters::default());
        match Store::open(path, Arc::clone(&counters)) {
            Ok(store) => Some(Self { path: path.to_owned(), counters, store: Some(store), writer: None }),
            Err(error) => {
                tracing::warn!("no state file, a restart of the agent forgets what is pinned: {error}");
                None
            }
        }
    }

    /// From now on it is written.
    fn writes(mut self) -> Option<Self> {
        match self.store.take()?.writer() {
            Ok(writer) => Some(Self { writer: Some(writer), ..self }),
            Err(error) => {
                tracing::warn!("no state file, a restart of the agent forgets what is pinned: {error}");
                None
            }
        }
    }
}

/// The pipeline: where the agent before left one, it goes on from there, and what became of its connections meanwhile
/// is known when this returns.
fn take_up(config: &Config, capture: &mut Capture, keeper: Option<&Keeper>) -> Pipeline {
    let limits = super::limits(config);
    let rooms = room_config(config);
    let left = keeper.and_then(|k| Some((k, k.store.as_ref()?.load(now())?)));
    let Some((keeper, (saved, survivors))) = left else { return Pipeline::new(limits, rooms) };
    let from = saved.at;
    // Their sockets are not found by the engines' names: the server above the ranks is called `python`.
    let mut servers = saved.control.servers();
    servers.retain(|pid| survivors.alive.contains(pid));
    let watched = servers.into_iter().filter(|pid| told(capture.watch_process(*pid)) == Some(true)).count();
    if watched > 0 {
        told(capture.search());
    }
    let mut pipeline = Pipeline::restore(limits, rooms, saved, &survivors, now());
    // The sockets that are there wait in the ring, with what has moved since.
    if told(capture.drain_recorded(&mut |event| pipeline.take(&event))) != Some(true) {
        tracing::warn!("not every open socket was found in time: rooms on those that were not are `unknown`");
    }
    let at = now();
    let resumed = pipeline.returned(at);
    pipeline.tick(at);
    keeper.counters.restore(&resumed);
    tracing::info!(
        away_s = at.since(from) / SECOND,
        rooms = resumed.rooms,
        pinned = resumed.pinned,
        over = resumed.rooms_over,
        connections = resumed.connections,
        gone = resumed.connections_gone,
        "going on from the state file"
    );
    pipeline
}

/// Ends of requests' bodies stand in the agent's memory for a while: no core dump of it is made, and no process of its
/// user may look into it. What the agent reads of itself in `/proc` is open to every process, or always to itself.
fn keep_private(config: &Config) {
    use rustix::process::{DumpableBehavior, set_dumpable_behavior};
    if config.capture.requests
        && let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable)
    {
        tracing::warn!(
            "text of prompts could stand in a core dump of the agent, this kernel refuses to prevent it: {error}"
        );
    }
}

fn capture_config(config: &Config) -> CaptureConfig {
    CaptureConfig {
        hook: match config.capture.hook {
            super::Hook::Auto => None,
            super::Hook::Sock => Some(kernel::Hook::Sock),
            super::Hook::Fentry => Some(kernel::Hook::Fentry),
            super::Hook::Kprobe => Some(kernel::Hook::Kprobe),
        },
        engine_comms: config.capture.engine_comms.clone(),
        ports: config.capture.ports.clone(),
        requests: config.capture.requests,
        carriers: config.network.tcp,
        namespace: config.capture.own_network.then(own_network),
        ..CaptureConfig::default()
    }
}

/// The agent's own network namespace, by the number that the kernel shows of it (`ns.inum`). Where it shows none, one that no
/// socket has: seeing nothing is noticed, seeing other hosts' engines is not.
fn own_network() -> u32 {
    use std::os::unix::fs::MetadataExt as _;
    let number = std::fs::metadata("/proc/self/ns/net").map(|of| of.ino());
    number.ok().and_then(|n| n.try_into().ok()).unwrap_or(0)
}

fn identity(config: &Config) -> Identity {
    let read = |path: &str| {
        std::fs::read_to_string(path).ok().map(|s| s.trim().to_owned()).filter(|s| !s.is_empty())
    };
    // In Kubernetes the node's name, by the downward API.
    let host_name = std::env::var("NODE_NAME")
        .ok()
        .filter(|s| !s.is_empty())
        .or_else(|| read("/proc/sys/kernel/hostname"))
        .unwrap_or_else(|| "unknown".to_owned());
    Identity {
        host_id: read("/etc/machine-id").unwrap_or_else(|| host_name.clone()),
        host_name,
        trace_salt: config.export.trace_salt.0.clone(),
        live: true,
        known_issues: super::known_issues,
    }
}

/// SIGTERM and SIGINT end the loop; it looks at least every [`WAIT`].
fn watch_signals(stop: Arc<AtomicBool>) -> Result<(), Failure> {
    use tokio::signal::unix::{SignalKind, signal};
    let listen = |kind| signal(kind).context("cannot listen for signals").map_err(Failure::cannot_observe);
    let (mut term, mut int) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    tokio::spawn(async move {
        tokio::select! { _ = term.recv() => {}, _ = int.recv() => {} }
        stop.store(true, Ordering::Relaxed);
    });
    Ok(())
}

/// `CLOCK_MONOTONIC`, the clock of the kernel's records.
fn now() -> Mono {
    kernel::monotonic()
}

fn brackets() -> [Bracket; 5] {
    std::array::from_fn(|_| {
        let before = now();
        let wall = std::time::SystemTime::now()
            .duration_since(std::time::UNIX_EPOCH)
            .map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX));
        Bracket { before, wall, after: now() }
    })
}
