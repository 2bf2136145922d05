//! The demo's script: requests, hang-ups and faults in time. What comes of them is the engines' business.
//!
//! Three prefill engines, two of mooncake 0.5.23 and one of NIXL 0.5.17, with eight decode engines between them, one of
//! them of two ranks. Healthy requests run throughout.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::driver::{self, Files, Fleet, Output, Place, Room};
use crate::expect::Sees;
use crate::fleet::{self, Ports, Rank, Serve};
use crate::net::{Outbox, Side};
use crate::rank::{Command, RankConfig, RoleConfig, Stream, Work, now};
use crate::router::{Leg, Order, Send};
use crate::status::KvPoll;
use crate::wire::Engine;

/// KV pages of a decode rank, and of a prompt that never fits beside running requests.
const POOL_PAGES: u64 = 100_000;
const NO_ROOM_PAGES: u32 = 100_000;
/// KV pages of an ordinary and of the long prompt.
const PAGES: u32 = 8;
const LONG_PAGES: u32 = 6_000;
/// What prefill takes (`--context-length`), and more than that.
const CONTEXT_PAGES: u32 = 16_000;
const TOO_MANY_PAGES: u32 = 20_000;
/// What prefill computes for an ordinary and for the long prompt, milliseconds.
const COMPUTE_MS: u64 = 5;
const LONG_COMPUTE_MS: u64 = 12_500;
/// Longer than any run: the prompt that is still computed when its decode engine dies.
const ENDLESS_COMPUTE_MS: u64 = 600_000;
/// When the faults begin.
const FAULTS_AT: Duration = Duration::from_secs(3);
/// `SGLANG_DISAGGREGATION_QUEUE_SIZE`.
const WORKERS: u16 = 4;

/// What to run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub out: PathBuf,
    pub place: Place,
    pub seed: u64,
    /// Whether requests go over HTTP.
    pub http: bool,
    pub loading: Duration,
    /// The observer has a packet capture of the ranks' ports only.
    pub wire: bool,
    /// Healthy rooms per second on each engine pair.
    pub rate: u32,
    /// How long the run goes on after the last fault.
    pub hold: Duration,
    pub files: Files,
}

/// Indexes of the ranks.
const PREFILL: usize = 0;
const STEADY: usize = 1;
const UNSERVED: usize = 2;
const KILLED: usize = 3;
const PAIR: [usize; 2] = [4, 5];
const DEAF: usize = 6;
const NIXL_PREFILL: usize = 7;
const NIXL_DECODE: usize = 8;
const HOLE: usize = 9;
const MUTE_PREFILL: usize = 10;
const UNHEARD: usize = 11;
/// Each decode rank's prefill rank.
const PEERS: [(usize, usize); 9] = [
    (STEADY, PREFILL),
    (UNSERVED, PREFILL),
    (KILLED, PREFILL),
    (PAIR[0], PREFILL),
    (PAIR[1], PREFILL),
    (DEAF, PREFILL),
    (NIXL_DECODE, NIXL_PREFILL),
    (HOLE, PREFILL),
    (UNHEARD, MUTE_PREFILL),
];

struct Script<'a> {
    fleet: &'a mut Fleet,
    rooms: Vec<Room>,
    numbers: Stream,
    next: u64,
}

/// Runs it and prints how the rooms ended, in one line.
///
/// # Errors
/// When a rank does not come up, dies unasked or does not answer.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    let mut output = Output::new(&plan.out)?;
    let mut fleet = start(plan, &output)?;
    let mut script = Script {
        numbers: Stream { seed: plan.seed ^ 0x5eed, ..ordinary(plan, 0, 0) },
        fleet: &mut fleet,
        rooms: Vec::new(),
        next: 0,
    };
    script.warm_up(plan)?;
    output.ready(Some(script.fleet), &plan.files)?;
    let begun = Instant::now();
    script.healthy(plan)?;
    script.request("slow", PREFILL, &[STEADY], LONG_PAGES, LONG_COMPUTE_MS)?;
    std::thread::sleep(FAULTS_AT.saturating_sub(begun.elapsed()));
    script.faults()?;
    std::thread::sleep(plan.hold);
    let rooms = std::mem::take(&mut script.rooms);
    output.finish(&mut fleet, &rooms, &plan.files)?;
    Ok(())
}

fn start(plan: &Plan, output: &Output) -> Result<Fleet> {
    let prefill = |name: &str, engine, optimistic| RankConfig {
        name: name.into(),
        engine,
        role: RoleConfig::Prefill { workers: WORKERS, optimistic },
        bind: plan.place.bind,
        advertise: plan.place.advertise,
        tp: (0, 1),
        timeout_s: 300,
        move_kv: true,
        bootstrap: None,
    };
    let decode = |name: &str, engine, shard, tp| RankConfig {
        role: RoleConfig::Decode { pool_pages: POOL_PAGES, shard: Some((shard, WORKERS)) },
        tp,
        ..prefill(name, engine, 0)
    };
    let mooncake = Engine::Mooncake0523;
    let nixl = Engine::Nixl0517;
    // Each decode engine with a fault gets a transfer worker of the mooncake prefill of its own; the black hole's only
    // shares that of the deaf one.
    let engines = [
        vec![prefill("prefill", mooncake, 0)],
        vec![decode("decode:steady", mooncake, 0, (0, 1))],
        vec![decode("decode:unserved", mooncake, 1, (0, 1))],
        vec![decode("decode:killed", mooncake, 2, (0, 1))],
        vec![decode("decode:pair:0", mooncake, 2, (0, 2)), decode("decode:pair:1", mooncake, 0, (1, 2))],
        vec![decode("decode:deaf", mooncake, 3, (0, 1))],
        // One optimistic attempt: a prompt is computed before its METADATA came and then waits in the inflight queue.
        vec![prefill("nixl-prefill", nixl, 1)],
        vec![decode("nixl-decode", nixl, 0, (0, 1))],
        vec![decode("decode:hole", mooncake, 3, (0, 1))],
        vec![prefill("prefill:mute", mooncake, 0)],
        vec![decode("decode:unheard", mooncake, 0, (0, 1))],
    ];
    let log = output.log();
    let serve = Serve { context_pages: CONTEXT_PAGES, ..Serve::default() };
    let mut ports = plan.http.then(|| Ports::new(plan.place.bind));
    let mut ranks = Vec::new();
    for engine in engines {
        let prefill = engine.iter().any(|rank| matches!(rank.role, RoleConfig::Prefill { .. }));
        let serve = if prefill { serve } else { Serve::default() };
        ranks.extend(fleet::start(engine, serve, ports.as_mut(), &log)?);
    }
    if plan.http {
        return Fleet::new(ranks, plan.loading, &log);
    }
    let address = |rank: &Rank| (rank.ip.clone(), rank.port);
    for (decode, prefill) in PEERS {
        let peer = ranks.get(prefill).map(address).context("no prefill rank")?;
        ranks.get_mut(decode).context("no decode rank")?.tell(&Command::Peers(vec![peer]))?;
    }
    let mut fleet = Fleet::new(ranks, plan.loading, &log)?;
    if plan.wire {
        fleet.sees = Sees::Frames;
    }
    Ok(fleet)
}

fn ordinary(plan: &Plan, salt: u64, seconds: u64) -> Stream {
    Stream {
        seed: plan.seed.wrapping_add(salt.wrapping_mul(0x0100_0000_01b3)),
        count: u64::from(plan.rate) * seconds,
        gap_ns: 1_000_000_000 / u64::from(plan.rate.max(1)),
        start: now() + 50_000_000,
        pages: PAGES,
        compute_ms: COMPUTE_MS,
        batch: 1,
        engines: (1, 1),
        me: 0,
    }
}

impl Script<'_> {
    fn rank(&mut self, index: usize) -> Result<&mut Rank> {
        self.fleet.rank(index)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.numbers.room(self.next)
    }

    fn engines() -> [(usize, Vec<usize>); 7] {
        [
            (PREFILL, vec![STEADY]),
            (NIXL_PREFILL, vec![NIXL_DECODE]),
            (PREFILL, vec![UNSERVED]),
            (PREFILL, vec![KILLED]),
            (PREFILL, PAIR.to_vec()),
            (PREFILL, vec![HOLE]),
            (MUTE_PREFILL, vec![UNHEARD]),
        ]
    }

    /// Opens the connections: two rooms for every pair that is to have some before the load.
    fn warm_up(&mut self, plan: &Plan) -> Result<()> {
        for (salt, (prefill, decodes)) in (100..).zip(Self::engines()) {
            let stream = Stream { count: 2, gap_ns: 5_000_000, ..ordinary(plan, salt, 1) };
            let scenario = if prefill == NIXL_PREFILL { "warmup_nixl" } else { "warmup" };
            self.rooms.extend(driver::stream(self.fleet, scenario, &[prefill], &[decodes], &stream)?);
        }
        std::thread::sleep(Duration::from_millis(500));
        Ok(())
    }

    /// Healthy requests: to the end on two pairs, until shortly before the faults on those that will have one.
    fn healthy(&mut self, plan: &Plan) -> Result<()> {
        let whole = FAULTS_AT.as_secs() + plan.hold.as_secs();
        let seconds = [whole, whole, 2, 2, 2, 2, 2];
        for (salt, ((prefill, decodes), seconds)) in (1..).zip(Self::engines().into_iter().zip(seconds)) {
            let stream = ordinary(plan, salt, seconds);
            let scenario = if prefill == NIXL_PREFILL { "healthy_nixl" } else { "healthy" };
            self.rooms.extend(driver::stream(self.fleet, scenario, &[prefill], &[decodes], &stream)?);
        }
        Ok(())
    }

    fn begin(&mut self, scenario: &'static str, prefill: usize, decodes: &[usize]) -> u64 {
        let room = self.number();
        self.rooms.push(Room { number: room, scenario, begun: now(), prefill, decodes: decodes.to_vec() });
        room
    }

    /// One request for both sides, as a router gives it to them.
    fn request(
        &mut self,
        scenario: &'static str,
        prefill: usize,
        decodes: &[usize],
        pages: u32,
        compute_ms: u64,
    ) -> Result<u64> {
        let room = self.begin(scenario, prefill, decodes);
        let mut sides = vec![prefill];
        sides.extend(decodes);
        self.give(room, prefill, &sides, pages, compute_ms)?;
        Ok(room)
    }

    /// Gives these ranks' engines a request.
    fn give(
        &mut self,
        room: u64,
        prefill: usize,
        ranks: &[usize],
        pages: u32,
        compute_ms: u64,
    ) -> Result<()> {
        if self.fleet.router.is_none() {
            let work = Work {
                room,
                pages,
                compute_ms,
                prefill: 0,
                bootstrap: None,
                scripted: true,
                tell_end: false,
            };
            return ranks.iter().try_for_each(|rank| self.rank(*rank)?.tell(&Command::Request(work.clone())));
        }
        let mut legs: Vec<Leg> = Vec::new();
        for rank in ranks {
            let engine = self.fleet.http(*rank)?.server;
            // Two ranks of one engine have one HTTP server.
            if legs.iter().all(|leg| leg.engine != engine) {
                legs.push(Leg { engine, pages, compute_ms, streamed: false });
            }
        }
        let bootstrap = self.fleet.prefill(prefill)?.1;
        self.router(&Order::Send(Send { room, bootstrap, legs, scripted: true }))
    }

    fn router(&mut self, order: &Order) -> Result<()> {
        self.fleet.router.as_mut().context("no router")?.tell(order)
    }

    /// The client hangs up at one engine.
    fn hang_up(&mut self, room: u64, rank: usize) -> Result<()> {
        if self.fleet.router.is_none() {
            return self.rank(rank)?.tell(&Command::Abort { room });
        }
        let engine = self.fleet.http(rank)?.server;
        self.router(&Order::HangUp { room, engine })
    }

    fn faults(&mut self) -> Result<()> {
        // A transfer worker dies with the first room it takes; the rooms behind it stay in its queue.
        self.fault(PREFILL, &Command::BreakWorker { worker: 1 })?;
        for _ in 0..3 {
            self.request("dead_worker", PREFILL, &[UNSERVED], PAGES, COMPUTE_MS)?;
        }
        // One of two decode ranks has no memory for its part.
        self.fault(PAIR[1], &Command::TakeMemory)?;
        self.request("one_rank_silent", PREFILL, &PAIR, PAGES, COMPUTE_MS)?;
        // A decode process is killed while prefill computes.
        let room = self.request("killed_peer", PREFILL, &[KILLED], PAGES, ENDLESS_COMPUTE_MS)?;
        ensure!(
            self.rank(PREFILL)?.comes_to(room, KvPoll::WaitingForInput),
            "METADATA of room {room} did not come"
        );
        self.rank(KILLED)?.kill()?;
        // The port to which the status goes refuses.
        self.fault(DEAF, &Command::CloseStatusPort)?;
        std::thread::sleep(Duration::from_millis(300));
        self.request("refused_status", PREFILL, &[DEAF], PAGES, COMPUTE_MS)?;
        // What comes in over the connection on which the status comes is dropped by the kernel.
        self.fault(HOLE, &Command::DropStatuses)?;
        self.request("black_hole", PREFILL, &[HOLE], PAGES, COMPUTE_MS)?;
        // Another program sends two frames to a rank's port: its receive thread raises. Requests come as before.
        self.foreign_message(MUTE_PREFILL)?;
        std::thread::sleep(Duration::from_millis(300));
        for _ in 0..2 {
            self.request("receiver_killed", MUTE_PREFILL, &[UNHEARD], PAGES, COMPUTE_MS)?;
        }
        if self.fleet.router.is_some() {
            // A prompt too long for prefill, not for decode.
            self.request("refused_prompt", PREFILL, &[STEADY], TOO_MANY_PAGES, COMPUTE_MS)?;
            // Decode never gets the request.
            let room = self.begin("prefill_only", PREFILL, &[STEADY]);
            self.give(room, PREFILL, &[PREFILL], PAGES, COMPUTE_MS)?;
        }
        // The client hangs up while decode waits for memory; prefill gets the request afterwards.
        self.abort_first("abort_first", PREFILL, STEADY)?;
        self.abort_first("abort_first_nixl", NIXL_PREFILL, NIXL_DECODE)?;
        // The same, and the router tells prefill too: nothing stays.
        let room = self.abort_first("hangup", PREFILL, STEADY)?;
        std::thread::sleep(Duration::from_millis(100));
        self.hang_up(room, PREFILL)?;
        // The client hangs up after METADATA, while prefill computes.
        let room = self.request("hangup_computing", PREFILL, &[STEADY], PAGES, 500)?;
        ensure!(
            self.rank(PREFILL)?.comes_to(room, KvPoll::WaitingForInput),
            "METADATA of room {room} did not come"
        );
        self.hang_up(room, STEADY)
    }

    /// A fault that is there before the next request: that comes another way, and could overtake it.
    fn fault(&mut self, rank: usize, fault: &Command) -> Result<()> {
        let rank = self.rank(rank)?;
        rank.tell(fault)?;
        rank.report()
    }

    /// Two frames that are no message of the engine, from a socket of the driver's own.
    fn foreign_message(&mut self, rank: usize) -> Result<()> {
        let rank = self.rank(rank)?;
        let outbox = Outbox::new(Side::Decode)?;
        outbox.send(&rank.ip, rank.port, vec![b"hello".to_vec(), b"world".to_vec()])?;
        // The socket does not linger: give libzmq the time to connect.
        std::thread::sleep(Duration::from_millis(300));
        Ok(())
    }

    /// ABORT reaches prefill before the request does.
    fn abort_first(&mut self, scenario: &'static str, prefill: usize, decode: usize) -> Result<u64> {
        let room = self.begin(scenario, prefill, &[decode]);
        self.give(room, prefill, &[decode], NO_ROOM_PAGES, 0)?;
        ensure!(
            self.rank(decode)?.comes_to(room, KvPoll::WaitingForInput),
            "room {room} did not come to decode"
        );
        self.hang_up(room, decode)?;
        ensure!(self.rank(decode)?.has_aborted(room), "ABORT of room {room} was not sent");
        std::thread::sleep(Duration::from_millis(150));
        self.give(room, prefill, &[prefill], PAGES, COMPUTE_MS)?;
        Ok(room)
    }
}
