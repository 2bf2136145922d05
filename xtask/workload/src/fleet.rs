//! The processes as their driver holds them: engines with their ranks, and the router.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command as Process, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::engine::{ENGINE, EngineConfig, HttpConfig, Order, Said};
use crate::expect::Side;
use crate::hosts;
use crate::net::lock;
use crate::rank::{Command, Event, PROCESS_VARIABLE, RankConfig, RoleConfig, RoomReport, now};
use crate::router::{self, LegReport, Told};
use crate::serve;
use crate::status::KvPoll;

/// How long a process may take to start, and a rank to tell all its rooms.
const PATIENCE: Duration = Duration::from_mins(1);
/// First of the engines' HTTP ports: below those that the kernel gives to clients.
const PORTS: u16 = 18_000;

/// A process that takes and says one JSON object a line, and ends with its input.
struct Line {
    peer: Peer,
    input: Option<Box<dyn Write + Send>>,
}

/// Where the process of a line is.
enum Peer {
    Here(Child),
    /// Behind a connection (`serve.rs`).
    Elsewhere(TcpStream),
}

/// Hands each line of `from` to `hear`, on a thread of its own.
fn listen<T: DeserializeOwned>(
    from: impl Read + Send + 'static,
    mut hear: impl FnMut(T) -> bool + Send + 'static,
) {
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if let Ok(said) = serde_json::from_str(&line)
                && !hear(said)
            {
                break;
            }
        }
    });
}

impl Line {
    /// Starts this program as `what` and hands each line that it says to `hear`.
    fn start<T: DeserializeOwned>(
        what: &str,
        title: &str,
        arguments: &[String],
        log: &Path,
        hear: impl FnMut(T) -> bool + Send + 'static,
    ) -> Result<Self> {
        let file = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("open {}", log.display()))?;
        let mut child = Process::new(std::env::current_exe().context("find this program")?)
            .arg0(title)
            .args(arguments)
            .env(PROCESS_VARIABLE, what)
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .with_context(|| format!("start {what}"))?;
        let input = child.stdin.take().context("a process without input")?;
        listen(child.stdout.take().context("a process without output")?, hear);
        Ok(Self { peer: Peer::Here(child), input: Some(Box::new(input)) })
    }

    /// The same where `pd-workload serve` runs.
    fn start_at<T: DeserializeOwned>(
        at: SocketAddr,
        what: &str,
        title: &str,
        arguments: &[String],
        hear: impl FnMut(T) -> bool + Send + 'static,
    ) -> Result<Self> {
        let connect = TcpStream::connect_timeout(&at, PATIENCE);
        let connection = connect.with_context(|| format!("connect to `pd-workload serve` at {at}"))?;
        connection.set_nodelay(true)?;
        let start = serve::Start { what: what.into(), title: title.into(), arguments: arguments.to_vec() };
        listen(connection.try_clone()?, hear);
        let input = Some(Box::new(connection.try_clone()?) as Box<dyn Write + Send>);
        let mut line = Self { peer: Peer::Elsewhere(connection), input };
        line.tell(&start)?;
        Ok(line)
    }

    /// Process id, where it is a process of this host.
    fn pid(&self) -> u32 {
        match &self.peer {
            Peer::Here(child) => child.id(),
            Peer::Elsewhere(_) => 0,
        }
    }

    fn tell(&mut self, what: &impl Serialize) -> Result<()> {
        let input = self.input.as_mut().context("a process without input")?;
        writeln!(input, "{}", serde_json::to_string(what)?).context("the process is gone")
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.input = None;
        let child = match &mut self.peer {
            Peer::Here(child) => child,
            Peer::Elsewhere(connection) => {
                let _ = connection.shutdown(Shutdown::Both);
                return;
            }
        };
        let end = Instant::now() + Duration::from_secs(2);
        while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// HTTP ports that nobody listens on, one after the other.
#[derive(Debug)]
pub(crate) struct Ports {
    bind: IpAddr,
    next: u16,
    /// They are of another network namespace: that of `pd-workload serve` at this address.
    elsewhere: Option<SocketAddr>,
}

/// First of the HTTP ports in a pod: SGLang's own.
const PORTS_OF_A_POD: u16 = 30_000;

impl Ports {
    /// From a number that other workloads on this host hardly begin with too.
    pub(crate) fn new(bind: IpAddr) -> Self {
        let salt = u16::try_from(std::process::id() % 500).unwrap_or(0);
        Self { bind, next: PORTS + salt * 20, elsewhere: None }
    }

    /// Of the engine behind this `pd-workload serve`, which has a network to itself: the same numbers each time.
    pub(crate) fn elsewhere(at: SocketAddr) -> Self {
        Self { bind: at.ip(), next: PORTS_OF_A_POD, elsewhere: Some(at) }
    }

    /// The next one that is free.
    ///
    /// # Errors
    /// When none is.
    pub(crate) fn next(&mut self) -> Result<u16> {
        while let Some(next) = self.next.checked_add(1).filter(|next| *next < 32_000) {
            let port = std::mem::replace(&mut self.next, next);
            if self.elsewhere.is_some() || TcpListener::bind(SocketAddr::new(self.bind, port)).is_ok() {
                return Ok(port);
            }
        }
        bail!("no free port on {} from {PORTS} on", self.bind)
    }
}

/// An engine's HTTP server as its peers reach it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HttpPlace {
    /// HTTP server.
    pub server: SocketAddr,
    /// Bootstrap server; prefill only.
    pub bootstrap: Option<SocketAddr>,
}

/// A rank process, behind its engine's.
pub(crate) struct Rank {
    pub config: RankConfig,
    pub port: u16,
    pub ip: String,
    pub pid: u32,
    pub session: String,
    pub alive: bool,
    /// Process id of its engine's parent process.
    pub server: u32,
    pub http: Option<HttpPlace>,
    engine: Arc<Mutex<Line>>,
    index: usize,
    events: mpsc::Receiver<Event>,
    statuses: HashMap<u64, KvPoll>,
    aborts: Vec<u64>,
    reports: HashMap<u64, RoomReport>,
    pub dead_threads: Vec<String>,
}

/// How an engine serves HTTP.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Serve {
    /// [`HttpConfig::context_pages`].
    pub context_pages: u32,
    /// [`HttpConfig::hangup_ms`].
    pub hangup_ms: u64,
    /// [`HttpConfig::at_once`].
    pub at_once: bool,
}

impl Default for Serve {
    fn default() -> Self {
        Self { context_pages: u32::MAX, hangup_ms: 0, at_once: false }
    }
}

/// Starts an engine of these ranks and waits until they are ready. `ports`: it serves HTTP, at two of these.
///
/// # Errors
/// When one does not come up; its own message is in `log`.
pub(crate) fn start(
    mut ranks: Vec<RankConfig>,
    serve: Serve,
    ports: Option<&mut Ports>,
    log: &Path,
) -> Result<Vec<Rank>> {
    let prefill = ranks.first().is_some_and(|rank| matches!(rank.role, RoleConfig::Prefill { .. }));
    let host = hosts::of(prefill);
    let _inside = host.map(hosts::Host::enter).transpose()?;
    if let Some(host) = host {
        for rank in &mut ranks {
            (rank.bind, rank.advertise) = (host.address, host.address);
        }
    }
    let mut place = None;
    let mut http = None;
    let elsewhere = ports.as_ref().and_then(|ports| ports.elsewhere);
    if let (Some(ports), Some(first)) = (ports, ranks.first()) {
        let server = SocketAddr::new(first.bind, ports.next()?);
        let bootstrap_port = if prefill { Some(ports.next()?) } else { None };
        let at = |port| SocketAddr::new(first.advertise, port);
        let reached = HttpPlace { server: at(server.port()), bootstrap: bootstrap_port.map(at) };
        http = Some(HttpConfig {
            at: server,
            bootstrap_port,
            context_pages: serve.context_pages,
            hangup_ms: serve.hangup_ms,
            at_once: serve.at_once,
        });
        place = Some(reached);
        for rank in &mut ranks {
            rank.bootstrap = reached.bootstrap.map(|at| (at, server.port()));
        }
    }
    let (senders, receivers): (Vec<_>, Vec<_>) = ranks.iter().map(|_| mpsc::channel()).unzip();
    let config = EngineConfig { ranks, http };
    let hear = move |said: Said| {
        senders.get(said.rank).is_some_and(|rank: &mpsc::Sender<Event>| rank.send(said.event).is_ok())
    };
    let arguments = config.arguments();
    let mut line = match elsewhere {
        None => Line::start(ENGINE, "python3", &arguments, log, hear)?,
        Some(at) => Line::start_at(at, ENGINE, "python3", &arguments, hear)?,
    };
    line.tell(&config)?;
    let server = line.pid();
    let engine = Arc::new(Mutex::new(line));
    let ready = |(index, (config, events)): (usize, (RankConfig, mpsc::Receiver<Event>))| {
        let Ok(Event::Ready { ip, port, session, pid }) = events.recv_timeout(PATIENCE) else {
            bail!("rank {} did not come up; see {}", config.name, log.display());
        };
        Ok(Rank {
            config,
            port,
            ip,
            pid,
            session,
            alive: true,
            server,
            http: place,
            engine: Arc::clone(&engine),
            index,
            events,
            statuses: HashMap::new(),
            aborts: Vec::new(),
            reports: HashMap::new(),
            dead_threads: Vec::new(),
        })
    };
    config.ranks.into_iter().zip(receivers).enumerate().map(ready).collect()
}

impl Rank {
    /// Sends a command.
    ///
    /// # Errors
    /// When its engine is gone.
    pub(crate) fn tell(&mut self, command: &Command) -> Result<()> {
        lock(&self.engine)
            .tell(&Order::Rank { rank: self.index, command: command.clone() })
            .with_context(|| format!("the engine of {} is gone", self.config.name))
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Status { room, to, .. } => {
                self.statuses.insert(room, to);
            }
            Event::AbortSent { room } => self.aborts.push(room),
            Event::Room(report) => {
                self.reports.insert(report.room, *report);
            }
            Event::Reported { dead_threads } => self.dead_threads = dead_threads,
            // The engine keeps the others for itself.
            Event::Ready { .. } | Event::Ended { .. } | Event::Loads(_) => {}
        }
    }

    /// Waits until something holds of what the rank has said. `false`: not within `limit`.
    fn wait(&mut self, limit: Duration, holds: impl Fn(&Self) -> bool) -> bool {
        let end = Instant::now() + limit;
        while !holds(self) {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(event) => self.take(event),
                Err(_) => return false,
            }
        }
        true
    }

    /// Waits until a scripted room has come to a state here.
    pub(crate) fn comes_to(&mut self, room: u64, state: KvPoll) -> bool {
        self.wait(Duration::from_mins(1), |rank| rank.statuses.get(&room) == Some(&state))
    }

    /// Waits until ABORT for a room has been sent.
    pub(crate) fn has_aborted(&mut self, room: u64) -> bool {
        self.wait(Duration::from_mins(1), |rank| rank.aborts.contains(&room))
    }

    /// Has the rank tell all its rooms.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn report(&mut self) -> Result<()> {
        self.tell(&Command::Report)?;
        let end = Instant::now() + PATIENCE;
        loop {
            match self.events.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(Event::Reported { dead_threads }) => {
                    self.dead_threads = dead_threads;
                    return Ok(());
                }
                Ok(event) => self.take(event),
                Err(_) => bail!("{} does not answer", self.config.name),
            }
        }
    }

    /// SIGKILL, with its last account taken before.
    ///
    /// # Errors
    /// When its engine is gone.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.report()?;
        lock(&self.engine).tell(&Order::Kill { rank: self.index })?;
        self.alive = false;
        Ok(())
    }

    /// Its side of a room that began at `begun`.
    pub(crate) fn side(&self, room: u64, begun: u64) -> Side {
        let report = self.reports.get(&room).cloned();
        let end = report.as_ref().and_then(|report| report.ended).unwrap_or_else(now);
        Side {
            name: self.config.name.clone(),
            alive: self.alive,
            report,
            open_ms: end.saturating_sub(begun) / 1_000_000,
            refused: false,
        }
    }
}

/// The router's process.
pub(crate) struct Router {
    line: Line,
    told: mpsc::Receiver<Told>,
    pub pid: u32,
}

impl Router {
    /// Starts it and has it watch these engines.
    ///
    /// # Errors
    /// When it does not come up.
    pub(crate) fn start(ranks: &[Rank], log: &Path) -> Result<Self> {
        let (sender, told) = mpsc::channel();
        let mut line =
            Line::start(router::ROUTER, "sglang-router", &[], log, move |said| sender.send(said).is_ok())?;
        let Ok(Told::Ready { pid }) = told.recv_timeout(PATIENCE) else {
            bail!("the router did not come up; see {}", log.display());
        };
        let mut engines: Vec<SocketAddr> =
            ranks.iter().filter_map(|rank| rank.http).map(|http| http.server).collect();
        engines.dedup();
        line.tell(&router::Order::Watch(engines))?;
        Ok(Self { line, told, pid })
    }

    /// Sends an order.
    ///
    /// # Errors
    /// When it is gone.
    pub(crate) fn tell(&mut self, order: &router::Order) -> Result<()> {
        self.line.tell(order).context("router")
    }

    /// A control call to an engine.
    ///
    /// # Errors
    /// When it is not answered with 200.
    pub(crate) fn call(&mut self, engine: SocketAddr, path: &str, body: &str) -> Result<()> {
        self.tell(&router::Order::Call { engine, path: path.into(), body: body.into() })?;
        match self.told.recv_timeout(PATIENCE) {
            Ok(Told::Called { status: Some(200) }) => Ok(()),
            other => bail!("{path} was not answered with 200: {other:?}"),
        }
    }

    /// Every leg that it has sent.
    ///
    /// # Errors
    /// When it does not answer.
    pub(crate) fn report(&mut self) -> Result<Vec<LegReport>> {
        self.tell(&router::Order::Report)?;
        let mut legs = Vec::new();
        loop {
            match self.told.recv_timeout(PATIENCE) {
                Ok(Told::Leg(leg)) => legs.push(leg),
                Ok(Told::Reported) => return Ok(legs),
                Ok(_) => {}
                Err(_) => bail!("the router does not answer"),
            }
        }
    }
}
