//! Everything that leaves the agent: JSON lines, OpenTelemetry, Prometheus text, the HTTP API, pages.
//!
//! Fed by the thread that follows the rooms through [`Exports`], whose calls on that thread never block and
//! never fail: what cannot be taken is dropped and counted. All I/O happens on other threads. No room logic
//! lives here.

mod batches;
pub mod clock;
pub(crate) mod complaint;
pub mod counters;
mod engine_numbers;
mod events;
pub mod finding;
mod gpu;
mod http;
pub mod metrics;
mod metrics_gpu;
mod metrics_network;
mod network;
pub mod otlp;
mod page;
mod phases;
mod process;
mod prometheus;
pub mod query;
pub mod record;
pub mod recording;
mod scheduled;
#[cfg(test)]
pub(crate) mod testing;
pub mod trace_id;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;

use clock::Clock;
use counters::{Counters, Signal};
use events::Lines;
use http::{Answers, Published};
use metrics::{Instances, MetricsSnapshot};
use otlp::{Otlp, OtlpConfig};
use prometheus::PhaseDurations;
use query::Queries;
use record::Maker;

use crate::event::Mono;
use crate::rooms::model::{Event, FindingEvent, Role, RoomSnapshot};
use crate::verdict::model::KnownIssue;

pub use events::OpenError;

/// Who reports: put into every record, span and resource.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Name of this host (in Kubernetes the node's).
    pub host_name: String,
    /// Stable id of this host (`/etc/machine-id` of the host), the host name where there is none.
    pub host_id: String,
    /// Mixed into trace ids; the same on every host of a fleet.
    pub trace_salt: String,
    /// Whether processes named in snapshots run on this host now (false in replay): only then is `/proc` asked
    /// for their container.
    pub live: bool,
    /// Upstream reports that fit a room's verdict.
    pub known_issues: fn(&RoomSnapshot) -> Vec<KnownIssue>,
}

/// What is switched on.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// JSON lines: a file (appended to), or `-` for standard output.
    pub events: Option<PathBuf>,
    /// OpenTelemetry.
    pub otlp: OtlpConfig,
    /// Where the HTTP server listens; `None`: no server.
    pub listen: Option<SocketAddr>,
    /// What metrics show until something is published: no scrape then misses a pin that outlived the agent before.
    pub first: Option<MetricsSnapshot>,
}

/// Why the export cannot start. Nothing that happens later stops the agent.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// A file cannot be written.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// OTLP cannot be set up.
    #[error(transparent)]
    Otlp(#[from] otlp::OtlpError),
    /// The system refuses a thread.
    #[error("cannot start a thread: {0} (raise the limit on tasks of this service)")]
    Thread(std::io::Error),
    /// The address cannot be listened on.
    #[error(
        "cannot listen on {listen}: {source} (another agent may hold it; set http.listen or --listen to another, or --no-http)"
    )]
    Listen {
        /// Which address.
        listen: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
}

/// An event with the clock to read its times by, shared by the outputs.
#[derive(Debug)]
struct RoomEvent {
    event: Event,
    clock: Clock,
}

impl RoomEvent {
    /// Whether it speaks of a room that is or was pinned: delivered first, dropped last.
    fn flagged(&self) -> bool {
        let s = self.event.snapshot();
        s.was_pinned || s.verdict.as_ref().is_some_and(|v| v.class.pins())
    }
}

/// What happened to a finding, when it was told, with the clock to read its times by.
#[derive(Debug)]
struct FindingNews {
    event: FindingEvent,
    at: Mono,
    clock: Clock,
}

/// What the outputs hear of, shared by them.
#[derive(Clone, Debug)]
enum News {
    Room(Arc<RoomEvent>),
    Finding(Arc<FindingNews>),
}

impl News {
    /// Whether only traces have something to say of it: the record of the room is told without it.
    fn only_traces(&self) -> bool {
        matches!(self, Self::Room(e) if matches!(e.event, Event::Scheduled(_)))
    }

    /// Whether it is delivered first and dropped last: whatever speaks of a pin or of a finding.
    fn flagged(&self) -> bool {
        match self {
            Self::Room(e) => e.flagged(),
            Self::Finding(_) => true,
        }
    }
}

/// The front of the export, owned by the thread that follows the rooms.
#[derive(Debug)]
pub struct Exports {
    identity: Arc<Identity>,
    events: Option<Lines<News>>,
    otlp: Option<Otlp>,
    durations: PhaseDurations,
    instances: Instances,
    published: watch::Sender<Published>,
    ready: watch::Sender<Result<(), String>>,
    queries: Queries,
    counters: Arc<Counters>,
    stop: watch::Sender<bool>,
    server: Option<JoinHandle<()>>,
    listening: Option<SocketAddr>,
}

impl Exports {
    /// Opens files and the listening socket, builds exporters, starts threads and tasks on the current runtime.
    /// Does not wait for any receiver.
    ///
    /// # Errors
    /// [`ExportError`]: a file, certificate, address or endpoint that cannot be used.
    pub async fn start(options: Options, identity: Identity) -> Result<Self, ExportError> {
        let identity = Arc::new(identity);
        let counters = Arc::new(Counters::default());
        let durations = PhaseDurations::default();
        let (handle, queries) = query::channel();
        let (stop, stopped) = watch::channel(false);
        let mut instances = Instances::default();
        let snapshot = options.first.map(|mut first| {
            instances.bound(&mut first.rooms_pinned);
            Arc::new(first)
        });
        let (published, publications) = watch::channel(Published { at: Instant::now(), snapshot });
        let (ready, readiness) = watch::channel(Err("starting".to_owned()));
        let events = match &options.events {
            Some(path) => {
                let render = render_record(Arc::clone(&identity));
                Some(Lines::open(path, Signal::Events, Arc::clone(&counters), render)?)
            }
            None => None,
        };
        let env = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let otlp = Otlp::start(&options.otlp, &identity, &publications, &counters, &env)?;
        let mut server = None;
        let mut listening = None;
        if let Some(listen) = options.listen {
            let listener = http::bind(listen).await?;
            listening = listener.local_addr().ok();
            let answers = Arc::new(Answers {
                identity: Arc::clone(&identity),
                queries: handle,
                published: publications,
                ready: readiness,
                durations: durations.clone(),
                counters: Arc::clone(&counters),
            });
            server = Some(tokio::spawn(http::serve(listener, answers, stopped)));
        }
        Ok(Self {
            identity,
            events,
            otlp,
            durations,
            instances,
            published,
            ready,
            queries,
            counters,
            stop,
            server,
            listening,
        })
    }

    /// Hands an event to every output. Never blocks.
    pub fn room_event(&mut self, event: &Event, clock: &Clock) {
        self.measure(event, clock);
        if self.has_output() {
            self.tell(News::Room(Arc::new(RoomEvent { event: event.clone(), clock: clock.clone() })));
        }
    }

    /// As [`Self::room_event`], but waits for places in the queues: for replay, where nothing is lost by
    /// waiting. Not to be called from asynchronous code.
    pub fn room_event_wait(&mut self, event: &Event, clock: &Clock) {
        self.measure(event, clock);
        if self.has_output() {
            self.tell_wait(News::Room(Arc::new(RoomEvent { event: event.clone(), clock: clock.clone() })));
        }
    }

    /// Hands what happened to a finding to every output, told at `at`. Never blocks.
    pub fn finding_event(&mut self, event: &FindingEvent, at: Mono, clock: &Clock) {
        if self.has_output() {
            let (event, clock) = (event.clone(), clock.clone());
            self.tell(News::Finding(Arc::new(FindingNews { event, at, clock })));
        }
    }

    /// As [`Self::finding_event`], but waits as [`Self::room_event_wait`] does.
    pub fn finding_event_wait(&mut self, event: &FindingEvent, at: Mono, clock: &Clock) {
        if self.has_output() {
            let (event, clock) = (event.clone(), clock.clone());
            self.tell_wait(News::Finding(Arc::new(FindingNews { event, at, clock })));
        }
    }

    fn has_output(&self) -> bool {
        self.events.is_some() || self.otlp.is_some()
    }

    fn tell(&self, news: News) {
        if let Some(events) = self.events.as_ref().filter(|_| !news.only_traces()) {
            events.try_write(news.clone(), news.flagged());
        }
        if let Some(otlp) = &self.otlp {
            otlp.event(news);
        }
    }

    fn tell_wait(&self, news: News) {
        if let Some(events) = self.events.as_ref().filter(|_| !news.only_traces()) {
            events.write(news.clone());
        }
        if let Some(otlp) = &self.otlp {
            otlp.event_wait(news);
        }
    }

    /// Replaces what `/metrics` and OTLP metrics show. Never blocks.
    pub fn publish(&mut self, mut snapshot: MetricsSnapshot) {
        self.instances.bound(&mut snapshot.rooms_pinned);
        self.published.send_replace(Published { at: Instant::now(), snapshot: Some(Arc::new(snapshot)) });
    }

    /// Whether `/readyz` says ready; the reason is shown while it does not. Not ready at start.
    pub fn set_ready(&self, ready: Result<(), String>) {
        // What it replaces is of no interest.
        drop(self.ready.send_replace(ready));
    }

    /// Questions of the HTTP side, to be polled often (at least every 100 ms).
    pub fn queries(&mut self) -> &mut Queries {
        &mut self.queries
    }

    /// What left and what did not.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Where the HTTP server listens, with the port that the system chose if it was told 0.
    pub fn listening(&self) -> Option<SocketAddr> {
        self.listening
    }

    /// Delivers what waits, for at most `grace`; counts the rest as dropped.
    pub async fn shutdown(self, grace: Duration) {
        let until = tokio::time::Instant::now() + grace;
        self.stop.send_replace(true);
        // Blocks, but not the runtime, and no longer than the grace period.
        let events = self.events.map(|events| tokio::task::spawn_blocking(move || events.close(grace)));
        if let Some(otlp) = self.otlp {
            otlp.shutdown(until).await;
        }
        for task in [events, self.server].into_iter().flatten() {
            // Late or failed: either way it is over.
            let _ = tokio::time::timeout_at(until, task).await;
        }
    }

    /// Records the phases of a room that ended.
    fn measure(&self, event: &Event, clock: &Clock) {
        let Event::Closed(room) = event else { return };
        if self.server.is_none() && self.otlp.is_none() {
            return; // Nobody can ask for it.
        }
        let trace = trace_id::trace_id(room.room, &self.identity.trace_salt).to_string();
        for role in [Role::Prefill, Role::Decode] {
            for span in phases::phases(room, role).into_iter().filter(|p| p.rank.is_none()) {
                let seconds = metrics::seconds(span.ended.since(span.began));
                let at = clock.system_time(span.ended);
                self.durations.observe(role, span.phase, seconds, trace.clone(), at);
                if let Some(otlp) = &self.otlp {
                    otlp.observe(role, span.phase, seconds);
                }
            }
        }
    }
}

fn render_record(identity: Arc<Identity>) -> impl FnMut(News, &mut Vec<u8>) + Send + 'static {
    move |news, to| {
        let identity = &identity;
        // Writing plain structs into memory does not fail.
        let written = match &news {
            News::Room(e) => {
                serde_json::to_writer(&mut *to, &Maker { identity, clock: &e.clock }.event(&e.event))
            }
            News::Finding(f) => {
                let maker = Maker { identity, clock: &f.clock };
                serde_json::to_writer(&mut *to, &maker.finding_event(&f.event, f.at))
            }
        };
        if written.is_ok() {
            to.push(b'\n');
        }
    }
}

/// Value of the label `owed_instance` for the endpoint of a debtor, seen on the host `host_name`: the host's
/// name for an address that means this host everywhere, else the address without its port.
pub fn owed_instance(endpoint: &str, host_name: &str) -> String {
    match endpoint.parse::<SocketAddr>() {
        Ok(at) if at.ip().is_loopback() => host_name.to_owned(),
        Ok(at) => at.ip().to_string(),
        Err(_) if endpoint.is_empty() => "unknown".to_owned(),
        Err(_) => endpoint.to_owned(),
    }
}
