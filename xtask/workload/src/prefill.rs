//! A prefill rank: bootstrap thread, transfer workers and scheduler queues of SGLang, without the GPU.
//!
//! Source: `mooncake/conn.py` and `mori/conn.py` 0.5.23, `nixl/conn.py` 0.5.17 and 0.5.20, `common/conn.py`, `prefill.py`. What a room
//! comes to follows from the order of messages and from faults alone; nothing here is told which room shall pin.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::net::{self, Outbox, Side, lock};
use crate::rank::{
    Command, Event, LOADS_EVERY, Loads, Pauses, Queue, RankConfig, RoomReport, Stream, TURN, Work, now, say,
};
use crate::status::{KvPoll, StatusTable};
use crate::wire::{self, Engine, ToPrefill};
use crate::{bootstrap, kv};

/// `TransferInfo`: where one decode rank wants a room.
#[derive(Clone, Debug)]
struct Target {
    ip: String,
    port: u16,
    dummy: bool,
    required: u32,
}

/// The tables of a KV manager, shared by its threads.
struct Tables {
    status: StatusTable,
    /// `transfer_infos`: room → session → target.
    infos: HashMap<u64, BTreeMap<String, Target>>,
    /// `req_to_decode_prefix_len`.
    prefix: HashMap<u64, u32>,
    /// `decode_kv_args_table`: session → where its KV goes.
    sessions: HashMap<String, String>,
    failed_sessions: HashSet<String>,
    reasons: HashMap<u64, String>,
    /// Chunks that a worker has in hand, by room (`_staging_outstanding`).
    outstanding: HashMap<u64, u32>,
    /// Who waits for an `ABORT_ACK`: room → (ip, port) → generation.
    acks: HashMap<u64, BTreeMap<(String, u16), u64>>,
    /// Rooms for which an ABORT did nothing. SGLang logs this and keeps no record; the workload's truth needs it.
    ignored_aborts: HashSet<u64>,
}

struct Manager {
    engine: Engine,
    tp_rank: u32,
    move_kv: bool,
    tables: Mutex<Tables>,
    outbox: Outbox,
    workers: Vec<Worker>,
}

struct Worker {
    queue: Mutex<mpsc::Sender<u64>>,
    broken: AtomicBool,
    dead: AtomicBool,
}

impl Manager {
    /// The bootstrap thread's message handler. `false`: not a message of this engine.
    fn handle(&self, frames: &wire::Frames) -> bool {
        match wire::to_prefill(self.engine, frames) {
            None => return false,
            Some(ToPrefill::Register { session, kv_endpoint }) => {
                let mut tables = lock(&self.tables);
                tables.failed_sessions.remove(&session);
                tables.sessions.insert(session, kv_endpoint);
            }
            Some(ToPrefill::Metadata { room, session, ip, port, required, dummy }) => {
                let mut tables = lock(&self.tables);
                let infos = tables.infos.entry(room).or_default();
                infos.insert(session, Target { ip, port, dummy, required });
                // Equal, not at least: a session too many never fires either. But mori tests for at least.
                let (got, required) = (infos.len(), required as usize);
                if got == required || (got > required && self.engine.mori()) {
                    tables.prefix.insert(room, 0);
                    tables.status.update(room, KvPoll::WaitingForInput);
                }
            }
            Some(ToPrefill::Abort { room, ip, port, generation }) => self.abort(room, ip, port, generation),
        }
        true
    }

    /// ABORT from decode. A room without an entry stays without one: the sender made later begins at Bootstrapping.
    fn abort(&self, room: u64, ip: String, port: u16, generation: Option<u64>) {
        let mut tables = lock(&self.tables);
        let active = tables.status.entry(room).is_some_and(|state| state != KvPoll::Success);
        if active {
            tables
                .reasons
                .entry(room)
                .or_insert_with(|| "Aborted by decode-side abort notification.".to_owned());
            tables.status.update(room, KvPoll::Failed);
        } else if tables.status.entry(room).is_none() {
            tables.ignored_aborts.insert(room);
        }
        if self.engine.nixl() {
            // The engine of the incident: what decode sent for the room is forgotten, entry or not.
            tables.infos.remove(&room);
            tables.prefix.remove(&room);
        } else if let Some(generation) = generation.filter(|_| self.engine.answers_abort()) {
            tables.acks.entry(room).or_default().insert((ip, port), generation);
            self.acknowledge_drained(&mut tables, room);
        }
    }

    /// Answers the ABORTs of a room once no worker has a chunk of it.
    fn acknowledge_drained(&self, tables: &mut Tables, room: u64) {
        if tables.outstanding.get(&room).is_some_and(|n| *n > 0) {
            return;
        }
        for ((ip, port), generation) in tables.acks.remove(&room).unwrap_or_default() {
            self.tell(&ip, port, wire::abort_ack(room, self.tp_rank, generation));
        }
    }

    fn tell(&self, ip: &str, port: u16, frames: wire::Frames) {
        if let Err(error) = self.outbox.send(ip, port, frames) {
            eprintln!("failed to sync with {ip}:{port}: {error:#}");
        }
    }

    /// `add_transfer_request`: hands a computed room to the worker of its session set.
    fn hand_over(&self, room: u64) {
        let tables = lock(&self.tables);
        if !self.engine.nixl() && tables.status.check(room) == KvPoll::Failed {
            return;
        }
        // Without transfer info nothing is queued, and nobody is told.
        let Some(worker) = self.worker_of(&tables, room) else { return };
        if let Some(worker) = self.workers.get(worker) {
            // SGLang's queue of a dead worker takes it all the same: no error here either.
            let _ = lock(&worker.queue).send(room);
        }
    }

    /// Index of the worker of a room's session set; `None` without transfer info.
    fn worker_of(&self, tables: &Tables, room: u64) -> Option<usize> {
        let infos = tables.infos.get(&room)?;
        if self.engine.mori() {
            return usize::try_from(room.checked_rem(self.workers.len() as u64)?).ok();
        }
        let port = |session: &str, target: &Target| -> u64 {
            if self.engine.nixl() {
                u64::from(target.port)
            } else {
                session.rsplit(':').next().and_then(|p| p.parse().ok()).unwrap_or(0)
            }
        };
        let sum: u64 = infos.iter().map(|(session, target)| port(session, target)).sum();
        usize::try_from(sum.checked_rem(self.workers.len() as u64)?).ok()
    }

    /// `transfer_worker`: ends only by an exception.
    fn transfer_worker(&self, index: usize, queue: &mpsc::Receiver<u64>) -> Result<()> {
        let mut streams = HashMap::new();
        for room in queue {
            let mut tables = lock(&self.tables);
            *tables.outstanding.entry(room).or_default() += 1;
            let skip = match tables.status.entry(room) {
                None => !self.engine.nixl(),
                Some(state) => state == KvPoll::Failed,
            };
            if skip {
                tables.outstanding.remove(&room);
                self.acknowledge_drained(&mut tables, room);
                continue;
            }
            let targets = tables.infos.get(&room).cloned().unwrap_or_default();
            if self.engine.nixl() {
                tables.status.update(room, KvPoll::Transferring);
            }
            drop(tables);
            if self.workers.get(index).is_some_and(|worker| worker.broken.load(Ordering::Relaxed)) {
                bail!("the transfer engine raised an exception in room {room}");
            }
            self.transfer(room, &targets, &mut streams);
            let mut tables = lock(&self.tables);
            if let Some(n) = tables.outstanding.get_mut(&room) {
                *n = n.saturating_sub(1);
            }
            self.acknowledge_drained(&mut tables, room);
            tables.infos.remove(&room);
            tables.prefix.remove(&room);
            tables.outstanding.remove(&room);
        }
        Ok(())
    }

    fn transfer(
        &self,
        room: u64,
        targets: &BTreeMap<String, Target>,
        streams: &mut HashMap<String, TcpStream>,
    ) {
        let mut written = 0;
        for (session, target) in targets {
            if target.dummy {
                lock(&self.tables).status.update(room, KvPoll::Success);
                continue;
            }
            let (blocked, kv_endpoint) = {
                let tables = lock(&self.tables);
                (tables.failed_sessions.contains(session), tables.sessions.get(session).cloned())
            };
            let sent = kv_endpoint
                .filter(|_| !blocked)
                .context("the session is unknown or has failed before")
                .and_then(|kv| if self.move_kv { self.write_kv(room, &kv, streams) } else { Ok(()) });
            if let Err(error) = sent {
                eprintln!("failed to send kv chunk of {room} to {}:{}: {error:#}", target.ip, target.port);
                if self.engine == Engine::Mooncake0523 {
                    lock(&self.tables).failed_sessions.insert(session.clone());
                }
                self.conclude(room, KvPoll::Failed, targets, "Failed to send kv chunk");
                return;
            }
            written += 1;
            if self.engine.mori() {
                for buffer in 0..2 {
                    self.tell(&target.ip, target.port, wire::aux_data(room, buffer, 0));
                }
            }
            if written == target.required {
                self.conclude(room, KvPoll::Success, targets, "");
            }
        }
    }

    /// KV bytes over TCP: a header of 24 bytes as Mooncake's, then the notification that NIXL would carry.
    fn write_kv(&self, room: u64, endpoint: &str, streams: &mut HashMap<String, TcpStream>) -> Result<()> {
        let address: SocketAddr = endpoint.parse().with_context(|| format!("session {endpoint}"))?;
        let mut block = [0_u8; kv::SIZE];
        kv::write(&mut block, room, self.tp_rank);
        if !streams.contains_key(endpoint) {
            let stream = TcpStream::connect_timeout(&address, Duration::from_secs(3))?;
            stream.set_nodelay(true)?;
            streams.insert(endpoint.to_owned(), stream);
        }
        let stream = streams.get_mut(endpoint).context("just opened")?;
        let written = stream.write_all(&block);
        if written.is_err() {
            streams.remove(endpoint);
        }
        written.context("write KV")
    }

    /// `conclude_transfer`: the state first, then what decode is told of it.
    fn conclude(&self, room: u64, to: KvPoll, targets: &BTreeMap<String, Target>, reason: &str) {
        let to = {
            let mut tables = lock(&self.tables);
            let to = if tables.status.entry(room) == Some(KvPoll::Failed) { KvPoll::Failed } else { to };
            if to == KvPoll::Failed {
                tables.reasons.entry(room).or_insert_with(|| reason.to_owned());
            }
            tables.status.update(room, to);
            to
        };
        let told =
            if to == KvPoll::Success { self.engine.tells_success() } else { self.engine.tells_failure() };
        if told {
            for target in targets.values().filter(|target| !target.dummy) {
                self.tell(
                    &target.ip,
                    target.port,
                    wire::status(self.engine, room, to.code(), self.tp_rank, reason),
                );
            }
        }
    }
}

/// A request as the scheduler holds it.
struct Request {
    report: RoomReport,
    compute: Duration,
    ready_at: Option<Instant>,
    /// Computed before its METADATA came (`pending_bootstrap`).
    pending: bool,
    attempts: u32,
    begun: Instant,
    scripted: bool,
    tell_end: bool,
    /// How long the engine had been paused when it came.
    paused_before: u64,
}

struct Scheduler<'a> {
    config: &'a RankConfig,
    manager: &'a Manager,
    optimistic: u32,
    open: Vec<Request>,
    done: Vec<RoomReport>,
    streams: Vec<(Stream, u64)>,
    receiving: &'a std::thread::JoinHandle<()>,
    pauses: Pauses,
    loads: Loads,
    told: Option<(Loads, Instant)>,
    turned: Instant,
}

/// Runs a prefill rank until its driver ends it.
///
/// # Errors
/// When its socket cannot be bound.
pub(crate) fn run(
    config: &RankConfig,
    workers: u16,
    optimistic: u32,
    commands: &mpsc::Receiver<Command>,
) -> Result<()> {
    let context = net::context()?;
    let (pull, port) = net::bind_pull(&context, config.bind)?;
    let (queues, receivers): (Vec<_>, Vec<_>) = (0..workers.max(1)).map(|_| mpsc::channel()).unzip();
    let manager = Arc::new(Manager {
        engine: config.engine,
        tp_rank: config.tp.0,
        move_kv: config.move_kv,
        tables: Mutex::new(Tables {
            status: StatusTable::new(config.engine),
            infos: HashMap::new(),
            prefix: HashMap::new(),
            sessions: HashMap::new(),
            failed_sessions: HashSet::new(),
            reasons: HashMap::new(),
            outstanding: HashMap::new(),
            acks: HashMap::new(),
            ignored_aborts: HashSet::new(),
        }),
        outbox: Outbox::new(Side::Prefill)?,
        workers: queues
            .into_iter()
            .map(|queue| Worker {
                queue: Mutex::new(queue),
                broken: AtomicBool::new(false),
                dead: AtomicBool::new(false),
            })
            .collect(),
    });
    for (index, queue) in receivers.into_iter().enumerate() {
        let manager = Arc::clone(&manager);
        std::thread::spawn(move || {
            if let Err(error) = manager.transfer_worker(index, &queue) {
                eprintln!("Transfer thread failed because of {error:#}.");
                if let Some(worker) = manager.workers.get(index) {
                    worker.dead.store(true, Ordering::Relaxed);
                }
            }
        });
    }
    let hearing = Arc::clone(&manager);
    // Shared, so that the socket stays open when the thread ends: libzmq goes on reading for a thread that is gone.
    let pull = Arc::new(Mutex::new(pull));
    let receiver = Arc::clone(&pull);
    let receiving = std::thread::spawn(move || {
        let pull = lock(&receiver);
        while let Ok(frames) = pull.recv_multipart(0) {
            if !hearing.handle(&frames) && hearing.engine.dies_of_nonsense() {
                eprintln!(
                    "bootstrap thread died: not a message of {:?}: {} frames",
                    hearing.engine,
                    frames.len()
                );
                break;
            }
        }
    });
    if let Some((server, http_port)) = config.bootstrap {
        bootstrap::register(server, config.advertise, port, config.tp, http_port)?;
    }
    say(&Event::Ready {
        ip: config.advertise.to_string(),
        port,
        session: String::new(),
        pid: std::process::id(),
    });
    let mut scheduler = Scheduler {
        config,
        manager: &manager,
        optimistic,
        open: Vec::new(),
        done: Vec::new(),
        streams: Vec::new(),
        receiving: &receiving,
        pauses: Pauses::default(),
        loads: Loads::default(),
        told: None,
        turned: Instant::now(),
    };
    loop {
        let mut next = commands.recv_timeout(TURN).ok();
        while let Some(command) = next {
            if matches!(command, Command::Quit) {
                return Ok(());
            }
            scheduler.command(command);
            next = commands.try_recv().ok();
        }
        scheduler.turn();
    }
}

impl Scheduler<'_> {
    fn command(&mut self, command: Command) {
        match command {
            Command::Stream(stream) => self.streams.push((stream, 0)),
            Command::Request(work) => self.request(&work),
            Command::Abort { room } => {
                // Decode is not told of it.
                if self.open.iter().any(|request| request.report.room == room) {
                    let mut tables = lock(&self.manager.tables);
                    tables.reasons.insert(room, "Aborted by AbortReq.".to_owned());
                    tables.status.update(room, KvPoll::Failed);
                }
            }
            Command::Pause => self.pauses.set(true),
            Command::Continue => self.pauses.set(false),
            Command::BreakWorker { worker } => {
                if let Some(worker) = self.manager.workers.get(usize::from(worker)) {
                    worker.broken.store(true, Ordering::Relaxed);
                }
            }
            Command::Report => self.report(),
            Command::Peers(_)
            | Command::TakeMemory
            | Command::CloseStatusPort
            | Command::DropStatuses
            | Command::Quit => {}
        }
    }

    /// A request comes: its sender is made.
    fn request(&mut self, work: &Work) {
        lock(&self.manager.tables).status.update(work.room, KvPoll::Bootstrapping);
        self.open.push(Request {
            report: RoomReport::new(work.room, KvPoll::Bootstrapping, Queue::Bootstrap, 0),
            compute: Duration::from_millis(work.compute_ms),
            ready_at: None,
            pending: false,
            attempts: 0,
            begun: Instant::now(),
            scripted: work.scripted,
            tell_end: work.tell_end,
            paused_before: self.pauses.total_ms(),
        });
    }

    /// One turn of the event loop: new requests, then every queue.
    fn turn(&mut self) {
        let time = now();
        let mut fresh = Vec::new();
        for (stream, next) in &mut self.streams {
            while *next < stream.count && stream.due(*next) <= time {
                if stream.route(*next).0 == stream.me {
                    fresh.push(stream.work(*next));
                }
                *next += 1;
            }
        }
        for work in fresh {
            self.request(&work);
        }
        if !self.pauses.now() {
            let mut open = std::mem::take(&mut self.open);
            open.retain_mut(|request| self.advance(request));
            self.open = open;
        }
        self.tell_loads();
    }

    /// What `/v1/loads` shows; renewed also while the engine is paused.
    fn tell_loads(&mut self) {
        let count = |of: &dyn Fn(&Request) -> bool| self.open.iter().filter(|r| of(r)).count() as u64;
        let now = Instant::now();
        let computing =
            |r: &Request| r.report.queue == Queue::Waiting && r.ready_at.is_some_and(|at| now < at);
        let loads = Loads {
            first: count(&|r| r.report.queue == Queue::Bootstrap),
            computing: count(&|r| r.report.queue == Queue::Waiting),
            second: count(&|r| r.report.queue == Queue::Inflight),
            busy_us: self.loads.busy_us,
        };
        let busy = !self.pauses.now() && self.open.iter().any(computing);
        let turn = u64::try_from(self.turned.elapsed().as_micros()).unwrap_or(0);
        self.turned = now;
        self.loads = Loads { busy_us: loads.busy_us + if busy { turn } else { 0 }, ..loads };
        let due = self.told.is_none_or(|(told, at)| told != self.loads && at.elapsed() >= LOADS_EVERY);
        if due && self.config.bootstrap.is_some() {
            self.told = Some((self.loads, now));
            say(&Event::Loads(self.loads));
        }
    }

    /// Polls one request and moves it on. `false`: it has ended.
    fn advance(&mut self, request: &mut Request) -> bool {
        let room = request.report.room;
        let polled = self.poll(request);
        if polled != request.report.last {
            request.report.last = polled;
            if request.scripted {
                say(&Event::Status { room, to: polled, at: now() });
            }
        }
        match request.report.queue {
            Queue::Bootstrap => match polled {
                KvPoll::Failed => return self.end(request),
                KvPoll::Bootstrapping if request.attempts < self.optimistic => {
                    request.attempts += 1;
                    request.pending = true;
                    self.compute(request);
                }
                KvPoll::Bootstrapping => {}
                _ => self.compute(request),
            },
            Queue::Waiting if request.ready_at.is_none_or(|at| Instant::now() < at) => {}
            Queue::Waiting => {
                request.report.queue = Queue::Inflight;
                if !request.pending {
                    self.manager.hand_over(room);
                }
            }
            _ if request.pending => match polled {
                KvPoll::Failed => return self.end(request),
                KvPoll::Bootstrapping => {}
                _ => {
                    request.pending = false;
                    self.manager.hand_over(room);
                }
            },
            // No time-out here, in any release.
            _ if polled.terminal() => return self.end(request),
            _ => {}
        }
        true
    }

    fn poll(&self, request: &Request) -> KvPoll {
        let mut tables = lock(&self.manager.tables);
        let room = request.report.room;
        let state = tables.status.check(room);
        let late = request.begun.elapsed() >= Duration::from_secs(self.config.timeout_s);
        if state == KvPoll::Bootstrapping && late && self.config.engine.has_bootstrap_timeout() {
            tables.reasons.insert(room, "timed out in KVPoll.Bootstrapping".to_owned());
            tables.status.update(room, KvPoll::Failed);
            return KvPoll::Failed;
        }
        state
    }

    fn compute(&self, request: &mut Request) {
        lock(&self.manager.tables).prefix.remove(&request.report.room);
        request.report.queue = Queue::Waiting;
        request.ready_at = Some(Instant::now() + request.compute);
    }

    /// `clear()` of the sender; the client is answered.
    fn end(&mut self, request: &mut Request) -> bool {
        let room = request.report.room;
        let mut tables = lock(&self.manager.tables);
        Self::describe(self.manager, &tables, &mut request.report);
        request.report.paused_ms = self.pauses.total_ms() - request.paused_before;
        tables.status.clear(room);
        tables.infos.remove(&room);
        tables.prefix.remove(&room);
        request.report.reason = tables.reasons.remove(&room);
        drop(tables);
        request.report.ended = Some(now());
        request.report.queue = Queue::Gone;
        if request.tell_end {
            say(&Event::Ended { room, state: request.report.last, reason: request.report.reason.clone() });
        }
        self.done.push(request.report.clone());
        false
    }

    fn describe(manager: &Manager, tables: &Tables, report: &mut RoomReport) {
        let infos = tables.infos.get(&report.room);
        let required = infos.and_then(|infos| infos.values().next()).map_or(0, |target| target.required);
        report.got = (infos.map_or(0, |infos| u32::try_from(infos.len()).unwrap_or(u32::MAX)), required);
        report.abort_ignored = tables.ignored_aborts.contains(&report.room);
        report.dead_worker = manager
            .worker_of(tables, report.room)
            .filter(|index| manager.workers.get(*index).is_some_and(|w| w.dead.load(Ordering::Relaxed)))
            .and_then(|index| u16::try_from(index).ok());
    }

    fn report(&mut self) {
        let tables = lock(&self.manager.tables);
        for request in &mut self.open {
            Self::describe(self.manager, &tables, &mut request.report);
            request.report.receiver_dead = self.receiving.is_finished();
            request.report.paused_ms = self.pauses.total_ms() - request.paused_before;
        }
        for report in self.done.iter().chain(self.open.iter().map(|request| &request.report)) {
            say(&Event::Room(Box::new(report.clone())));
        }
        let dead = self.manager.workers.iter().enumerate().filter(|(_, w)| w.dead.load(Ordering::Relaxed));
        let mut dead_threads: Vec<_> = dead.map(|(i, _)| format!("transfer worker {i}")).collect();
        if self.receiving.is_finished() {
            dead_threads.push("bootstrap thread".to_owned());
        }
        say(&Event::Reported { dead_threads });
    }
}
