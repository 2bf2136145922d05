//! What the driver and its rank processes say to each other (one JSON object a line on standard input and output),
//! and how a rank process begins: under the engine's names, and ending with its driver.
//!
//! Between the two stands the engine's parent process (`engine.rs`), which passes the lines on and, where the workload
//! speaks HTTP, makes commands of requests. It knows nothing of pins: commands are requests, hang-ups and faults.

use std::io::{BufRead, Write};
use std::net::{IpAddr, SocketAddr};
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::status::KvPoll;
use crate::wire::Engine;
use crate::{decode, prefill};

/// Set in the environment of the workload's own processes: says which it is. Their configuration comes on standard
/// input.
pub(crate) const PROCESS_VARIABLE: &str = "PD_WORKLOAD_PROCESS";
/// Its value for a rank.
pub(crate) const RANK: &str = "rank";

/// Nanoseconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| u64::try_from(d.as_nanos()).unwrap_or(0))
}

/// What a rank is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RankConfig {
    /// Name in the truth file: `prefill`, `decode:0`, …
    pub name: String,
    /// Engine it behaves as.
    pub engine: Engine,
    /// Prefill or decode.
    pub role: RoleConfig,
    /// Address that its PULL socket binds.
    pub bind: IpAddr,
    /// Address that it tells its peers.
    pub advertise: IpAddr,
    /// Tensor-parallel rank and size.
    pub tp: (u32, u32),
    /// Seconds: `SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT` or `…_WAITING_TIMEOUT`.
    pub timeout_s: u64,
    /// Whether KV bytes are really sent (over TCP, to another port).
    pub move_kv: bool,
    /// Prefill: its engine's bootstrap server, with which it registers, and HTTP port. `None`: the driver tells decode
    /// where the ranks are.
    pub bootstrap: Option<(SocketAddr, u16)>,
}

/// What is particular to a role.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum RoleConfig {
    /// Computes and sends.
    Prefill {
        /// `SGLANG_DISAGGREGATION_QUEUE_SIZE`: transfer worker threads.
        workers: u16,
        /// `--optimistic-prefill-attempts`: compute before bootstrap is done.
        optimistic: u32,
    },
    /// Receives.
    Decode {
        /// KV pages it has for requests.
        pool_pages: u64,
        /// Residue of its session's port among the prefill's workers, so that a known worker serves it (a real
        /// port is random).
        shard: Option<(u16, u16)>,
    },
}

/// A steady stream of requests, numbered from 0; each rank works out its own share.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Stream {
    /// Rooms are made from it.
    pub seed: u64,
    /// How many requests.
    pub count: u64,
    /// Nanoseconds between two.
    pub gap_ns: u64,
    /// When the first is due (nanoseconds since 1970).
    pub start: u64,
    /// KV pages of each.
    pub pages: u32,
    /// Milliseconds prefill computes for each.
    pub compute_ms: u64,
    /// Decode holds back this many METADATA and sends them in one go.
    pub batch: u32,
    /// How many prefill engines there are, and how many decode engines.
    pub engines: (u64, u64),
    /// Which of its role this rank's engine is.
    pub me: u64,
}

impl Stream {
    /// Room of the `n`th request: 63 bits at random, as routers draw them.
    pub(crate) fn room(&self, n: u64) -> u64 {
        let mut x = self.seed.wrapping_add(n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) >> 1
    }

    /// Prefill and decode engine of the `n`th request.
    pub(crate) fn route(&self, n: u64) -> (u64, u64) {
        let (prefills, decodes) = self.engines;
        (n % prefills.max(1), n / prefills.max(1) % decodes.max(1))
    }

    /// The `n`th request as a rank gets it.
    pub(crate) fn work(&self, n: u64) -> Work {
        Work {
            room: self.room(n),
            pages: self.pages,
            compute_ms: self.compute_ms,
            prefill: usize::try_from(self.route(n).0).unwrap_or(0),
            bootstrap: None,
            scripted: false,
            tell_end: false,
        }
    }

    /// When the `n`th request is due.
    pub(crate) fn due(&self, n: u64) -> u64 {
        self.start.saturating_add(n.saturating_mul(self.gap_ns))
    }
}

/// From the driver to a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Command {
    /// Decode: ip and port of the prefill engines' ranks (the bootstrap server's answer).
    Peers(Vec<(String, u16)>),
    /// Both sides of many requests.
    Stream(Stream),
    /// One request.
    Request(Work),
    /// The client has hung up.
    Abort { room: u64 },
    /// Fault, prefill: the next transfer of this worker raises.
    BreakWorker { worker: u16 },
    /// Decode: a running request takes all KV pages and does not end.
    TakeMemory,
    /// Fault, decode: the PULL socket is closed, its port refuses.
    CloseStatusPort,
    /// Fault, decode: the kernel drops all that comes in over the connections open to the PULL socket.
    DropStatuses,
    /// The engine is paused: the loop goes on, but polls nothing.
    Pause,
    /// It is no longer.
    Continue,
    /// Tell every room.
    Report,
    /// End.
    Quit,
}

/// A request as a scheduler gets it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Work {
    /// Room.
    pub room: u64,
    /// KV pages.
    pub pages: u32,
    /// Milliseconds that prefill computes.
    pub compute_ms: u64,
    /// Decode: index of the prefill engine among the peers that the driver named.
    pub prefill: usize,
    /// Decode: the prefill engine's bootstrap server, which is asked instead.
    pub bootstrap: Option<SocketAddr>,
    /// The driver waits for its changes of state.
    pub scripted: bool,
    /// The engine's HTTP server waits for its end.
    pub tell_end: bool,
}

/// From a rank to the driver.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Event {
    /// It can be used.
    Ready { ip: String, port: u16, session: String, pid: u32 },
    /// A room that came over HTTP has ended here.
    Ended { room: u64, state: KvPoll, reason: Option<String> },
    /// What `/v1/loads` shows, told when it changes, at most every 50 ms.
    Loads(Loads),
    /// A scripted room changed state here.
    Status { room: u64, to: KvPoll, at: u64 },
    /// ABORT for this room has been handed to libzmq.
    AbortSent { room: u64 },
    /// A room, answering Report.
    Room(Box<RoomReport>),
    /// All rooms were told; threads that are no longer running.
    Reported { dead_threads: Vec<String> },
}

/// Requests by where they stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Loads {
    /// Prefill: no METADATA yet. Decode: no memory yet.
    pub first: u64,
    /// Prefill: being computed.
    pub computing: u64,
    /// Prefill: KV being handed over. Decode: METADATA sent.
    pub second: u64,
    /// Microseconds in which prefill has computed (`total_prefill_busy_us`).
    pub busy_us: u64,
}

/// How often loads may be told.
pub(crate) const LOADS_EVERY: Duration = Duration::from_millis(50);

/// Where a request stands in its engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Queue {
    /// Prefill: no METADATA yet.
    Bootstrap,
    /// Prefill: computing or waiting for it.
    Waiting,
    /// Prefill: handed over to a transfer worker, or computed ahead of its METADATA.
    Inflight,
    /// Decode: no memory yet.
    Prealloc,
    /// Decode: METADATA sent.
    Transfer,
    /// Over.
    Gone,
}

/// All that a rank knows of a room: the engine's state, not the script's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RoomReport {
    /// Room number.
    pub room: u64,
    /// Last state that `poll` gave.
    pub last: KvPoll,
    /// When the request came (nanoseconds since 1970).
    pub begun: u64,
    /// When its state became terminal.
    pub ended: Option<u64>,
    /// Where it stands.
    pub queue: Queue,
    /// Why it failed.
    pub reason: Option<String>,
    /// Prefill: sessions whose METADATA came, and how many are required; decode: answers got and required.
    pub got: (u32, u32),
    /// Prefill: an ABORT for this room found no entry and did nothing.
    pub abort_ignored: bool,
    /// Prefill: the transfer worker that has it, when that thread is dead.
    pub dead_worker: Option<u16>,
    /// Decode: METADATA was sent.
    pub asked: bool,
    /// Prefill: the thread that takes METADATA is dead.
    pub receiver_dead: bool,
    /// For how long this engine was paused while it had the room, milliseconds.
    pub paused_ms: u64,
}

impl RoomReport {
    /// Of a room that has just come.
    pub(crate) fn new(room: u64, last: KvPoll, queue: Queue, required: u32) -> Self {
        Self {
            room,
            last,
            begun: now(),
            ended: None,
            queue,
            reason: None,
            got: (0, required),
            abort_ignored: false,
            dead_worker: None,
            asked: false,
            receiver_dead: false,
            paused_ms: 0,
        }
    }
}

/// How long an engine has been paused so far.
#[derive(Debug, Default)]
pub(crate) struct Pauses {
    over: Duration,
    since: Option<Instant>,
}

impl Pauses {
    /// It is paused now.
    pub(crate) fn now(&self) -> bool {
        self.since.is_some()
    }

    /// Begins or ends a pause.
    pub(crate) fn set(&mut self, paused: bool) {
        if paused {
            self.since.get_or_insert_with(Instant::now);
        } else if let Some(since) = self.since.take() {
            self.over += since.elapsed();
        }
    }

    /// All pauses together, milliseconds.
    pub(crate) fn total_ms(&self) -> u64 {
        let now = self.since.map_or(Duration::ZERO, |since| since.elapsed());
        u64::try_from((self.over + now).as_millis()).unwrap_or(u64::MAX)
    }
}

/// Says something to the driver.
pub(crate) fn say(event: &Event) {
    if let Ok(mut line) = serde_json::to_vec(event) {
        line.push(b'\n');
        // Without its driver a rank ends: see the reader below.
        let _ = std::io::stdout().lock().write_all(&line);
    }
}

/// The life of a rank process.
///
/// # Errors
/// When its configuration cannot be read or its socket not be bound.
pub(crate) fn run() -> Result<()> {
    let mut first = String::new();
    std::io::stdin().lock().read_line(&mut first).context("read the rank's configuration")?;
    let config: RankConfig = serde_json::from_str(&first).context("the rank's configuration")?;
    // The kernel cuts it at 15 bytes, as it does for SGLang; threads started from here on inherit it.
    std::fs::write("/proc/self/comm", title(&config)).context("set the process name")?;
    let (sender, commands) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            match serde_json::from_str(&line) {
                Ok(command) => {
                    if sender.send(command).is_err() {
                        break;
                    }
                }
                Err(error) => eprintln!("command not understood: {error}: {line}"),
            }
        }
        // The driver is gone.
        std::process::exit(0);
    });
    match config.role {
        RoleConfig::Prefill { workers, optimistic } => prefill::run(&config, workers, optimistic, &commands),
        RoleConfig::Decode { pool_pages, shard } => decode::run(&config, pool_pages, shard, &commands),
    }
}

/// Process title as SGLang sets it.
pub(crate) fn title(config: &RankConfig) -> String {
    let (rank, size) = config.tp;
    if size > 1 { format!("sglang::scheduler_TP{rank}") } else { "sglang::scheduler".to_owned() }
}

/// How long the scheduler loop sleeps between two turns.
pub(crate) const TURN: Duration = Duration::from_micros(500);
