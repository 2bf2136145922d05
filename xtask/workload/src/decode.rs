//! A decode rank: receivers, KV memory, status thread and scheduler queues of SGLang, without the GPU.
//!
//! Source: `common/conn.py`, `mooncake/conn.py` and `mori/conn.py` 0.5.23, `nixl/conn.py` 0.5.17 and 0.5.20, `decode.py`.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::net::{Outbox, Side, lock};
use crate::rank::{
    Command, Event, LOADS_EVERY, Loads, Pauses, Queue, RankConfig, RoomReport, Stream, TURN, Work, now, say,
};
use crate::status::{KvPoll, StatusTable};
use crate::wire::{self, DecodeName, Engine, Metadata, ToDecode};
use crate::{bootstrap, kv, net};

/// KV pages that running requests always hold.
const RESIDENT_PAGES: u64 = 64;
/// First of the ports that Mooncake draws its own from.
const MOONCAKE_PORTS: u16 = 15_000;
/// `SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT`.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long METADATA is held back at most for others to go with it.
const HOLD: Duration = Duration::from_millis(500);
/// How long the status thread waits before it looks whether it shall end.
const RECEIVE_TIMEOUT_MS: i32 = 100;

/// Shared by the rank's threads.
struct Tables {
    status: StatusTable,
    /// Prefill ranks that have said Success, by room.
    answered: HashMap<u64, BTreeSet<u32>>,
    acked: HashSet<u64>,
}

struct Receiver {
    report: RoomReport,
    pages: u32,
    prefill: usize,
    aux_index: u32,
    /// When METADATA was sent.
    asked_at: Option<Instant>,
    abort_sent: bool,
    scripted: bool,
    tell_end: bool,
    batch: u32,
    /// How long the engine had been paused when it came.
    paused_before: u64,
}

struct Scheduler<'a> {
    config: &'a RankConfig,
    name: DecodeName,
    tables: &'a Mutex<Tables>,
    outbox: Outbox,
    peers: Vec<(String, u16)>,
    registered: HashSet<usize>,
    free_pages: u64,
    /// A running request takes every page that comes free.
    memory_taken: bool,
    prealloc: VecDeque<Receiver>,
    transfer: Vec<Receiver>,
    /// METADATA held back to be sent in one go, with the prefill engine they go to.
    held: Vec<(usize, wire::Frames)>,
    held_since: Option<Instant>,
    /// Pages of aborted rooms whose answer is awaited: room → (pages, since).
    releasing: HashMap<u64, (u32, Instant)>,
    done: Vec<RoomReport>,
    streams: Vec<(Stream, u64)>,
    generation: u64,
    requests: u32,
    close_status: &'a AtomicBool,
    /// Bootstrap servers that were asked, with the index of their prefill rank among the peers.
    servers: HashMap<SocketAddr, usize>,
    heartbeats: Arc<Mutex<Vec<SocketAddr>>>,
    pauses: Pauses,
    told: Option<(Loads, Instant)>,
}

/// Runs a decode rank until its driver ends it.
///
/// # Errors
/// When its sockets cannot be bound.
pub(crate) fn run(
    config: &RankConfig,
    pool_pages: u64,
    shard: Option<(u16, u16)>,
    commands: &mpsc::Receiver<Command>,
) -> Result<()> {
    let context = net::context()?;
    let (pull, port) = net::bind_pull(&context, config.bind)?;
    pull.set_rcvtimeo(RECEIVE_TIMEOUT_MS)?;
    let kv = bind_kv(config, shard)?;
    let kv_port = kv.local_addr()?.port();
    let ip = config.advertise.to_string();
    let kv_endpoint = SocketAddr::new(config.advertise, kv_port).to_string();
    let session = match config.engine {
        Engine::Mooncake0523 => kv_endpoint.clone(),
        Engine::Nixl0517 | Engine::Nixl0520 => agent_name(kv_port),
        Engine::Mori0523 => engine_key(config, kv_port),
    };
    let name = DecodeName { ip: ip.clone(), port, session: session.clone(), kv_endpoint, tp: config.tp };
    let tables = Arc::new(Mutex::new(Tables {
        status: StatusTable::new(config.engine),
        answered: HashMap::new(),
        acked: HashSet::new(),
    }));
    let close_status = Arc::new(AtomicBool::new(false));
    let (engine, shared, closing) = (config.engine, Arc::clone(&tables), Arc::clone(&close_status));
    let receiving = std::thread::spawn(move || {
        while !closing.load(Ordering::Relaxed) {
            match pull.recv_multipart(0) {
                Ok(frames) => {
                    if !hear(engine, &shared, &frames) && engine.dies_of_nonsense() {
                        eprintln!("decode thread died: not a message of {engine:?}: {} frames", frames.len());
                        break;
                    }
                }
                Err(zmq::Error::EAGAIN) => {}
                Err(error) => {
                    eprintln!("decode thread died: {error}");
                    break;
                }
            }
        }
        drop(pull);
    });
    let notified = config.engine.nixl().then(|| Arc::clone(&tables));
    std::thread::spawn(move || take_kv(&kv, notified.as_ref()));
    say(&Event::Ready { ip, port, session, pid: std::process::id() });
    let mut scheduler = Scheduler {
        config,
        name,
        tables: &tables,
        outbox: Outbox::new(Side::Decode)?,
        peers: Vec::new(),
        registered: HashSet::new(),
        free_pages: pool_pages.saturating_sub(RESIDENT_PAGES),
        memory_taken: false,
        prealloc: VecDeque::new(),
        transfer: Vec::new(),
        held: Vec::new(),
        held_since: None,
        releasing: HashMap::new(),
        done: Vec::new(),
        streams: Vec::new(),
        generation: 0,
        requests: 0,
        close_status: &close_status,
        servers: HashMap::new(),
        heartbeats: Arc::default(),
        pauses: Pauses::default(),
        told: None,
    };
    loop {
        let mut next = commands.recv_timeout(TURN).ok();
        while let Some(command) = next {
            if matches!(command, Command::Quit) {
                return Ok(());
            }
            if matches!(command, Command::Report) {
                scheduler.report(receiving.is_finished());
            }
            scheduler.command(&command);
            next = commands.try_recv().ok();
        }
        scheduler.turn();
    }
}

/// The port of the transfer engine, in the range where Mooncake's lie: its number picks the prefill's worker.
fn bind_kv(config: &RankConfig, shard: Option<(u16, u16)>) -> Result<TcpListener> {
    let (residue, of) = shard.unwrap_or((0, 1));
    let first = u16::try_from(std::process::id() % 1000).unwrap_or(0);
    (MOONCAKE_PORTS + first..MOONCAKE_PORTS + 2000)
        .filter(|port| port % of == residue)
        .find_map(|port| TcpListener::bind(SocketAddr::new(config.bind, port)).ok())
        .with_context(|| format!("no free port on {} from {MOONCAKE_PORTS} on", config.bind))
}

/// A uuid4's shape; the agent's name is new for each process.
fn agent_name(salt: u16) -> String {
    let x = now() ^ (u64::from(salt) << 48) ^ u64::from(std::process::id());
    let y = x.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    format!(
        "{:08x}-{:04x}-4{:03x}-a{:03x}-{:012x}",
        y >> 32,
        y & 0xffff,
        x & 0xfff,
        (y >> 16) & 0xfff,
        x & 0xffff_ffff_ffff
    )
}

/// `_init_engine` of `mori/conn.py`.
fn engine_key(config: &RankConfig, salt: u16) -> String {
    let (rank, pid, name) = (config.tp.0, std::process::id(), agent_name(salt));
    let suffix = name.get(..8).unwrap_or_default();
    format!("io-decode-dp0-tp{rank}-pid{pid}-{}-{suffix}", config.advertise)
}

/// The status thread's message handler.
fn hear(engine: Engine, tables: &Mutex<Tables>, frames: &wire::Frames) -> bool {
    let Some(message) = wire::to_decode(engine, frames) else { return false };
    let mut tables = lock(tables);
    match message {
        ToDecode::AuxData => {}
        ToDecode::AbortAck { room } => {
            tables.acked.insert(room);
        }
        ToDecode::Status { room, code, rank } => {
            // A late status of a cleared room is dropped.
            if tables.status.entry(room).is_some()
                && let Some(state) = KvPoll::from_code(code)
            {
                match state {
                    KvPoll::Success => {
                        tables.answered.entry(room).or_default().insert(rank);
                    }
                    other => tables.status.update(room, other),
                }
            }
        }
    }
    true
}

/// Takes KV blocks; with NIXL they carry the notification that a room's KV is complete.
fn take_kv(listener: &TcpListener, notified: Option<&Arc<Mutex<Tables>>>) {
    for stream in listener.incoming().flatten() {
        let notified = notified.cloned();
        std::thread::spawn(move || read_blocks(stream, notified.as_deref()));
    }
}

fn read_blocks(mut stream: TcpStream, notified: Option<&Mutex<Tables>>) {
    let mut block = [0; kv::SIZE];
    while stream.read_exact(&mut block).is_ok() {
        if let (Some(tables), Some((room, rank))) = (notified, kv::read(&block)) {
            let mut tables = lock(tables);
            if tables.status.entry(room).is_some() {
                tables.answered.entry(room).or_default().insert(rank);
            }
        }
    }
}

impl Scheduler<'_> {
    fn command(&mut self, command: &Command) {
        match command {
            Command::Peers(peers) => self.peers.clone_from(peers),
            Command::Stream(stream) => self.streams.push((stream.clone(), 0)),
            Command::Request(work) => self.request(work, 0),
            Command::Abort { room } => self.hang_up(*room),
            Command::Pause => self.pauses.set(true),
            Command::Continue => self.pauses.set(false),
            Command::DropStatuses => {
                if let Err(error) = net::drop_all(self.name.port) {
                    eprintln!("cannot drop what comes in: {error:#}");
                }
            }
            Command::TakeMemory => {
                self.memory_taken = true;
                self.free_pages = 0;
            }
            Command::CloseStatusPort => self.close_status.store(true, Ordering::Relaxed),
            Command::BreakWorker { .. } | Command::Report | Command::Quit => {}
        }
    }

    /// A request comes: its receiver is made and its prefill rank known.
    fn request(&mut self, work: &Work, batch: u32) {
        lock(self.tables).status.update(work.room, KvPoll::Bootstrapping);
        self.requests = self.requests.wrapping_add(1);
        let aux_index = self.requests % 1024;
        let mut receiver = Receiver {
            report: RoomReport::new(work.room, KvPoll::Bootstrapping, Queue::Prealloc, 1),
            pages: work.pages,
            prefill: work.prefill,
            aux_index,
            asked_at: None,
            abort_sent: false,
            scripted: work.scripted,
            tell_end: work.tell_end,
            batch,
            paused_before: self.pauses.total_ms(),
        };
        if let Some(server) = work.bootstrap {
            match self.find(server) {
                Ok(prefill) => receiver.prefill = prefill,
                Err(error) => {
                    receiver.report.reason =
                        Some(format!("Could not fetch prefill parallel info: {error:#}"));
                    self.end(&mut receiver, KvPoll::Failed);
                    return;
                }
            }
        }
        self.register(receiver.prefill, batch > 1);
        lock(self.tables).status.update(work.room, KvPoll::WaitingForInput);
        self.saw(&mut receiver, KvPoll::WaitingForInput);
        self.prealloc.push_back(receiver);
    }

    /// Index of the prefill rank behind a bootstrap server, which is asked once and watched from then on.
    fn find(&mut self, server: SocketAddr) -> Result<usize> {
        if let Some(index) = self.servers.get(&server) {
            return Ok(*index);
        }
        let rank = bootstrap::find(server)?;
        let index = self.peers.len();
        self.peers.push(rank);
        if self.servers.is_empty() {
            let servers = Arc::clone(&self.heartbeats);
            std::thread::spawn(move || bootstrap::heartbeat(&servers));
        }
        self.servers.insert(server, index);
        lock(&self.heartbeats).push(server);
        Ok(index)
    }

    /// REGISTER, once per prefill engine; with a batch it goes out with the first one.
    fn register(&mut self, prefill: usize, with_batch: bool) {
        if !self.registered.insert(prefill) {
            return;
        }
        let frames = wire::register(self.config.engine, &self.name);
        if with_batch {
            self.held.push((prefill, frames));
        } else {
            self.send(prefill, frames);
        }
    }

    fn send(&self, prefill: usize, frames: wire::Frames) {
        let Some((ip, port)) = self.peers.get(prefill) else {
            eprintln!("no prefill engine {prefill}");
            return;
        };
        if let Err(error) = self.outbox.send(ip, *port, frames) {
            eprintln!("{error:#}");
        }
    }

    #[allow(clippy::unused_self, reason = "reads as one of the scheduler's steps")]
    fn saw(&self, receiver: &mut Receiver, state: KvPoll) {
        if receiver.report.last != state {
            receiver.report.last = state;
            if receiver.scripted {
                say(&Event::Status { room: receiver.report.room, to: state, at: now() });
            }
        }
    }

    fn turn(&mut self) {
        let time = now();
        let mut fresh = Vec::new();
        for (stream, next) in &mut self.streams {
            while *next < stream.count && stream.due(*next) <= time {
                if stream.route(*next).1 == stream.me {
                    fresh.push((stream.work(*next), stream.batch));
                }
                *next += 1;
            }
        }
        for (work, batch) in fresh {
            self.request(&work, batch);
        }
        self.tell_loads();
        if self.pauses.now() {
            return;
        }
        self.allocate();
        let mut transfer = std::mem::take(&mut self.transfer);
        transfer.retain_mut(|receiver| self.advance(receiver));
        self.transfer.append(&mut transfer);
        self.release();
    }

    /// What `/v1/loads` shows.
    fn tell_loads(&mut self) {
        let loads = Loads {
            first: self.prealloc.len() as u64,
            second: self.transfer.len() as u64,
            ..Loads::default()
        };
        let due = self.told.is_none_or(|(told, at)| told != loads && at.elapsed() >= LOADS_EVERY);
        if due {
            self.told = Some((loads, Instant::now()));
            say(&Event::Loads(loads));
        }
    }

    /// Gives pages to waiting rooms in their order; the first that does not fit holds up those behind it.
    fn allocate(&mut self) {
        while let Some(next) = self.prealloc.front() {
            if lock(self.tables).status.check(next.report.room) != KvPoll::Failed
                && u64::from(next.pages) > self.free_pages
            {
                break;
            }
            let Some(mut receiver) = self.prealloc.pop_front() else { break };
            if lock(self.tables).status.check(receiver.report.room) == KvPoll::Failed {
                self.end(&mut receiver, KvPoll::Failed);
                continue;
            }
            self.free_pages -= u64::from(receiver.pages);
            self.ask(receiver);
        }
        // The first batch has REGISTER with it.
        let wanted = self.transfer.last().map_or(0, |receiver| receiver.batch);
        let late = self.held_since.is_some_and(|since| since.elapsed() >= HOLD);
        if late || self.held.len() > wanted as usize {
            self.send_held();
        }
    }

    /// METADATA.
    fn ask(&mut self, mut receiver: Receiver) {
        let room = receiver.report.room;
        let first = receiver.aux_index.wrapping_mul(8) % 1_000_000;
        let pages = (first..).take(receiver.pages as usize).map(|page| i32::try_from(page).unwrap_or(0));
        let of = Metadata {
            room,
            pages: pages.collect(),
            aux_index: Some(receiver.aux_index),
            required: self.config.tp.1,
        };
        self.held.push((receiver.prefill, wire::metadata(self.config.engine, &self.name, &of)));
        self.held_since.get_or_insert_with(Instant::now);
        receiver.report.asked = true;
        receiver.report.queue = Queue::Transfer;
        receiver.asked_at = Some(Instant::now());
        let at_once = receiver.batch <= 1;
        self.transfer.push(receiver);
        if at_once {
            self.send_held();
        }
    }

    fn send_held(&mut self) {
        let mut by_peer: HashMap<usize, Vec<wire::Frames>> = HashMap::new();
        self.held_since = None;
        for (prefill, frames) in self.held.drain(..) {
            by_peer.entry(prefill).or_default().push(frames);
        }
        for (prefill, messages) in by_peer {
            if let Some((ip, port)) = self.peers.get(prefill)
                && let Err(error) = self.outbox.send_all(ip, *port, messages)
            {
                eprintln!("{error:#}");
            }
        }
    }

    /// Polls a room in the transfer queue. `false`: it has ended.
    fn advance(&mut self, receiver: &mut Receiver) -> bool {
        let room = receiver.report.room;
        let state = {
            let mut tables = lock(self.tables);
            let got = tables.answered.get(&room).map_or(0, BTreeSet::len);
            receiver.report.got.0 = u32::try_from(got).unwrap_or(u32::MAX);
            if got >= receiver.report.got.1 as usize {
                tables.status.update(room, KvPoll::Success);
            }
            tables.status.check(room)
        };
        self.saw(receiver, state);
        let late =
            receiver.asked_at.is_some_and(|at| at.elapsed() >= Duration::from_secs(self.config.timeout_s));
        if state.terminal() {
            self.end(receiver, state);
            return false;
        }
        if late {
            lock(self.tables).status.update(room, KvPoll::Failed);
            receiver.report.reason = Some("timed out in KVPoll.WaitingForInput".to_owned());
        }
        true
    }

    /// The client has hung up: the receiver fails and prefill is told, once.
    fn hang_up(&mut self, room: u64) {
        lock(self.tables).status.update(room, KvPoll::Failed);
        let mut waiting = std::mem::take(&mut self.prealloc);
        for receiver in waiting.iter_mut().filter(|receiver| receiver.report.room == room) {
            self.abort(receiver);
        }
        self.prealloc.append(&mut waiting);
        let mut asked = std::mem::take(&mut self.transfer);
        for receiver in asked.iter_mut().filter(|receiver| receiver.report.room == room) {
            self.abort(receiver);
        }
        self.transfer.append(&mut asked);
    }

    fn abort(&mut self, receiver: &mut Receiver) {
        if std::mem::replace(&mut receiver.abort_sent, true) {
            return;
        }
        receiver.report.reason.get_or_insert_with(|| "Aborted by AbortReq.".to_owned());
        let room = receiver.report.room;
        let generation = (receiver.report.asked && self.config.engine.answers_abort()).then(|| {
            self.generation += 1;
            self.releasing.insert(room, (receiver.pages, Instant::now()));
            self.generation
        });
        self.send(receiver.prefill, wire::abort(&self.name, room, generation));
        say(&Event::AbortSent { room });
    }

    fn end(&mut self, receiver: &mut Receiver, state: KvPoll) {
        let room = receiver.report.room;
        self.saw(receiver, state);
        if state == KvPoll::Failed && receiver.report.asked && self.config.engine.answers_abort() {
            // From 0.5.21 also a room that prefill reports as failed: prefill may still write to its pages.
            receiver.report.reason.get_or_insert_with(|| "KV transfer failed".to_owned());
            self.abort(receiver);
        }
        if receiver.report.asked && !self.releasing.contains_key(&room) {
            self.free(u64::from(receiver.pages));
        }
        let mut tables = lock(self.tables);
        tables.status.clear(room);
        tables.answered.remove(&room);
        drop(tables);
        receiver.report.ended = Some(now());
        receiver.report.queue = Queue::Gone;
        receiver.report.paused_ms = self.pauses.total_ms() - receiver.paused_before;
        if receiver.tell_end {
            say(&Event::Ended { room, state, reason: receiver.report.reason.clone() });
        }
        self.done.push(receiver.report.clone());
    }

    /// Frees pages of aborted rooms once prefill has answered, or has not for too long.
    fn release(&mut self) {
        if self.releasing.is_empty() {
            return;
        }
        let mut tables = lock(self.tables);
        let mut freed = 0;
        self.releasing.retain(|room, (pages, since)| {
            let over = tables.acked.remove(room) || since.elapsed() >= RELEASE_TIMEOUT;
            freed += if over { u64::from(*pages) } else { 0 };
            !over
        });
        drop(tables);
        self.free(freed);
    }

    fn free(&mut self, pages: u64) {
        if !self.memory_taken {
            self.free_pages += pages;
        }
    }

    fn report(&self, status_thread_gone: bool) {
        for report in &self.done {
            say(&Event::Room(Box::new(report.clone())));
        }
        for receiver in self.prealloc.iter().chain(&self.transfer) {
            let paused_ms = self.pauses.total_ms() - receiver.paused_before;
            say(&Event::Room(Box::new(RoomReport { paused_ms, ..receiver.report.clone() })));
        }
        let dead_threads = if status_thread_gone { vec!["status thread".to_owned()] } else { Vec::new() };
        say(&Event::Reported { dead_threads });
    }
}
