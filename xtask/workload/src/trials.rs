//! Loads for the live checks: what looks like a pin and is none, and a pin that was there first. Over HTTP only.
//!
//! Two pairs of engines, mooncake 0.5.23 and NIXL 0.5.17, under a steady load of healthy requests.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::driver::{self, Files, Fleet, Output, Place, Room};
use crate::fleet::{self, Ports, Serve};
use crate::rank::{RankConfig, RoleConfig, Stream, now};
use crate::router::{Leg, Order, Send};
use crate::status::KvPoll;
use crate::wire::Engine;

/// KV pages of a decode rank, and of a prompt that never fits beside running requests.
const POOL_PAGES: u64 = 100_000;
const NO_ROOM_PAGES: u32 = 100_000;
/// KV pages of an ordinary prompt.
const PAGES: u32 = 8;
/// The engine's `_REQUEST_STATE_WAIT_TIMEOUT`: how late it notices a hang-up.
const HANGUP_MS: u64 = 4_000;
/// Clients of a burst hang up between these two moments of their requests, milliseconds.
const PATIENCE_MS: (u64, u64) = (20, 3_000);
/// What prefill computes for them at most, milliseconds.
const BURST_COMPUTE_MS: u64 = 3_000;
/// When the load has run for a while.
const SETTLED: Duration = Duration::from_secs(3);
/// How long rooms have to end, and an observer to tell of a pin, after the last fault.
const AFTER: Duration = Duration::from_secs(15);

/// Index of each pair's ranks.
const PAIRS: [(usize, usize); 2] = [(0, 1), (2, 3)];

/// What to run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub out: PathBuf,
    pub place: Place,
    pub seed: u64,
    pub files: Files,
    pub loading: Duration,
    pub trial: Trial,
    /// Healthy requests per second on each pair.
    pub rate: u32,
    /// Where each engine's `pd-workload serve` is, in the order of [`PAIRS`]; none: the engines run on this host.
    pub engines: Vec<SocketAddr>,
}

/// Which.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Trial {
    /// So many clients hang up at moments of their own.
    Burst { clients: u64 },
    /// The prefill engines are paused for so long.
    Pause { time: Duration },
    /// A pin of the incident's kind is there before the load is said to be ready; nothing comes after it for so long.
    Ghost { time: Duration },
    /// The same pin on the second pair, and healthy requests on the first for so long.
    Pods { time: Duration },
}

struct Run<'a> {
    plan: &'a Plan,
    fleet: Fleet,
    rooms: Vec<Room>,
    numbers: Stream,
    next: u64,
}

/// Runs it and prints how the rooms ended, in one line.
///
/// # Errors
/// When a process does not come up, dies unasked or does not answer.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    let mut output = Output::new(&plan.out)?;
    let fleet = start(plan, &output)?;
    let numbers = Stream { seed: plan.seed ^ 0x7415, ..load(plan, 0, 0) };
    let mut run = Run { plan, fleet, rooms: Vec::new(), numbers, next: 0 };
    run.stream("warmup", 2)?;
    std::thread::sleep(Duration::from_millis(700));
    if let Trial::Ghost { .. } | Trial::Pods { .. } = plan.trial {
        run.ghost()?;
    }
    output.ready(Some(&run.fleet), &plan.files)?;
    match plan.trial {
        Trial::Burst { clients } => run.burst(clients)?,
        Trial::Pause { time } => run.pause(time)?,
        Trial::Ghost { time } => std::thread::sleep(time),
        Trial::Pods { time } => run.first_pair(time)?,
    }
    let Run { mut fleet, rooms, .. } = run;
    output.finish(&mut fleet, &rooms, &plan.files)?;
    Ok(())
}

fn start(plan: &Plan, output: &Output) -> Result<Fleet> {
    let rank = |name: &str, engine, role| RankConfig {
        name: name.into(),
        engine,
        role,
        bind: plan.place.bind,
        advertise: plan.place.advertise,
        tp: (0, 1),
        timeout_s: 300,
        move_kv: true,
        bootstrap: None,
    };
    let prefill = |optimistic| RoleConfig::Prefill { workers: 4, optimistic };
    let decode = || RoleConfig::Decode { pool_pages: POOL_PAGES, shard: None };
    let engines = [
        rank("prefill", Engine::Mooncake0523, prefill(0)),
        rank("decode", Engine::Mooncake0523, decode()),
        rank("nixl-prefill", Engine::Nixl0517, prefill(1)),
        rank("nixl-decode", Engine::Nixl0517, decode()),
    ];
    let hangup_ms = if matches!(plan.trial, Trial::Burst { .. }) { HANGUP_MS } else { 0 };
    let serve = Serve { hangup_ms, ..Serve::default() };
    let mut ports = Ports::new(plan.place.bind);
    let log = output.log();
    let mut ranks = Vec::new();
    ensure!(
        plan.engines.is_empty() || plan.engines.len() == engines.len(),
        "there are {} engines",
        engines.len()
    );
    for (n, mut engine) in engines.into_iter().enumerate() {
        let mut elsewhere = plan.engines.get(n).map(|at| Ports::elsewhere(*at));
        if let Some(at) = plan.engines.get(n) {
            (engine.bind, engine.advertise) = (IpAddr::V4(Ipv4Addr::UNSPECIFIED), at.ip());
        }
        let ports = elsewhere.as_mut().unwrap_or(&mut ports);
        ranks.extend(fleet::start(vec![engine], serve, Some(ports), &log)?);
    }
    Fleet::new(ranks, plan.loading, &log)
}

fn load(plan: &Plan, salt: u64, count: u64) -> Stream {
    Stream {
        seed: plan.seed.wrapping_add(salt.wrapping_mul(0x0100_0000_01b3)),
        count,
        gap_ns: 1_000_000_000 / u64::from(plan.rate.max(1)),
        start: now() + 50_000_000,
        pages: PAGES,
        compute_ms: 5,
        batch: 1,
        engines: (1, 1),
        me: 0,
    }
}

impl Run<'_> {
    /// Healthy requests on both pairs.
    fn stream(&mut self, scenario: &'static str, count: u64) -> Result<()> {
        for (prefill, decode) in PAIRS {
            self.next += 1;
            let stream = load(self.plan, self.next + 1000, count);
            let rooms = driver::stream(&mut self.fleet, scenario, &[prefill], &[vec![decode]], &stream)?;
            self.rooms.extend(rooms);
        }
        Ok(())
    }

    /// As many healthy requests as come in this time.
    fn stream_for(&mut self, scenario: &'static str, time: Duration) -> Result<()> {
        self.stream(scenario, u64::from(self.plan.rate) * time.as_secs())
    }

    /// Healthy requests on the first pair alone.
    fn first_pair(&mut self, time: Duration) -> Result<()> {
        let (prefill, decode) = PAIRS[0];
        self.next += 1;
        let count = u64::from(self.plan.rate) * time.as_secs();
        let stream = load(self.plan, self.next + 1000, count);
        let rooms = driver::stream(&mut self.fleet, "healthy", &[prefill], &[vec![decode]], &stream)?;
        self.rooms.extend(rooms);
        std::thread::sleep(time + SETTLED);
        Ok(())
    }

    fn tell(&mut self, order: &Order) -> Result<()> {
        self.fleet.router.as_mut().context("no router")?.tell(order)
    }

    fn begin(&mut self, scenario: &'static str, (prefill, decode): (usize, usize)) -> u64 {
        self.next += 1;
        let number = self.numbers.room(self.next);
        self.rooms.push(Room { number, scenario, begun: now(), prefill, decodes: vec![decode] });
        number
    }

    fn send(&mut self, room: u64, prefill: usize, legs: &[(usize, u32)], compute_ms: u64) -> Result<()> {
        let legs = legs
            .iter()
            .map(|(rank, pages)| {
                let engine = self.fleet.http(*rank)?.server;
                Ok(Leg { engine, pages: *pages, compute_ms, streamed: false })
            })
            .collect::<Result<_>>()?;
        let bootstrap = self.fleet.prefill(prefill)?.1;
        self.tell(&Order::Send(Send { room, bootstrap, legs, scripted: true }))
    }

    fn hang_up(&mut self, room: u64, rank: usize) -> Result<()> {
        let engine = self.fleet.http(rank)?.server;
        self.tell(&Order::HangUp { room, engine })
    }

    /// Clients that hang up at moments of their own; the router closes both connections at once, and each engine
    /// notices in its own time.
    fn burst(&mut self, clients: u64) -> Result<()> {
        self.stream_for("healthy", SETTLED + AFTER)?;
        std::thread::sleep(SETTLED);
        let mut hang_ups = Vec::new();
        let (least, most) = PATIENCE_MS;
        for n in 0..clients {
            let pair = PAIRS[usize::from(n % 2 == 1)];
            let room = self.begin("burst", pair);
            // Every few find no memory at decode.
            let pages = if n % 5 == 4 { NO_ROOM_PAGES } else { PAGES };
            self.send(room, pair.0, &[(pair.0, PAGES), (pair.1, pages)], room % BURST_COMPUTE_MS)?;
            let after = Duration::from_millis(least + (room >> 20) % (most - least));
            hang_ups.push((Instant::now() + after, room, pair));
        }
        hang_ups.sort_by_key(|(at, ..)| *at);
        for (at, room, pair) in hang_ups {
            std::thread::sleep(at.saturating_duration_since(Instant::now()));
            self.hang_up(room, pair.0)?;
            self.hang_up(room, pair.1)?;
        }
        std::thread::sleep(AFTER);
        Ok(())
    }

    /// Both prefill engines pause under load and go on afterwards.
    fn pause(&mut self, time: Duration) -> Result<()> {
        self.stream_for("paused", SETTLED + time + SETTLED)?;
        std::thread::sleep(SETTLED);
        self.call("/pause_generation", r#"{"mode":"in_place"}"#)?;
        std::thread::sleep(time);
        self.call("/continue_generation", "{}")?;
        std::thread::sleep(AFTER);
        Ok(())
    }

    fn call(&mut self, path: &str, body: &str) -> Result<()> {
        for (prefill, _) in PAIRS {
            let engine = self.fleet.http(prefill)?.server;
            self.fleet.router.as_mut().context("no router")?.call(engine, path, body)?;
        }
        Ok(())
    }

    /// The incident: ABORT reaches the NIXL prefill before the request does.
    fn ghost(&mut self) -> Result<()> {
        // On a busy machine ABORT may come behind the request: then the room fails, and another is tried.
        for _ in 0..5 {
            let room = self.abort_first(PAIRS[1])?;
            let rank = self.fleet.rank(PAIRS[1].0)?;
            rank.report()?;
            if rank.side(room, now()).open() {
                return Ok(());
            }
        }
        bail!("ABORT came to prefill before none of the requests");
    }

    fn abort_first(&mut self, (prefill, decode): (usize, usize)) -> Result<u64> {
        let room = self.begin("ghost", (prefill, decode));
        self.send(room, prefill, &[(decode, NO_ROOM_PAGES)], 0)?;
        ensure!(
            self.fleet.rank(decode)?.comes_to(room, KvPoll::WaitingForInput),
            "room {room} did not come to decode"
        );
        self.hang_up(room, decode)?;
        ensure!(self.fleet.rank(decode)?.has_aborted(room), "ABORT of room {room} was not sent");
        std::thread::sleep(Duration::from_millis(150));
        self.send(room, prefill, &[(prefill, PAGES)], 5)?;
        std::thread::sleep(Duration::from_millis(500));
        Ok(room)
    }
}
