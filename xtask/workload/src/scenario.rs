//! The demo's script: requests, hang-ups and faults in time. What comes of them is the engines' business.
//!
//! Two prefill engines, mooncake 0.5.23 and NIXL 0.5.17, with six decode engines between them, one of them of two
//! ranks. Healthy requests run throughout.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::driver::{self, Files, Output, Place, Rank, Room};
use crate::rank::{Command, RankConfig, RoleConfig, Stream, now};
use crate::status::KvPoll;
use crate::wire::Engine;

/// KV pages of a decode rank, and of a prompt that never fits beside running requests.
const POOL_PAGES: u64 = 100_000;
const NO_ROOM_PAGES: u32 = 100_000;
/// KV pages of an ordinary and of the long prompt.
const PAGES: u32 = 8;
const LONG_PAGES: u32 = 6_000;
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

struct Script<'a> {
    ranks: &'a mut [Rank],
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
    let mut ranks = start(plan, &output)?;
    let mut script = Script {
        numbers: Stream { seed: plan.seed ^ 0x5eed, ..ordinary(plan, 0, 0) },
        ranks: &mut ranks,
        rooms: Vec::new(),
        next: 0,
    };
    script.warm_up(plan)?;
    output.ready(script.ranks, &plan.files)?;
    let begun = Instant::now();
    script.healthy(plan)?;
    script.request("slow", PREFILL, &[STEADY], LONG_PAGES, LONG_COMPUTE_MS)?;
    std::thread::sleep(FAULTS_AT.saturating_sub(begun.elapsed()));
    script.faults()?;
    std::thread::sleep(plan.hold);
    let rooms = std::mem::take(&mut script.rooms);
    output.finish(&mut ranks, &rooms, &plan.files)?;
    Ok(())
}

fn start(plan: &Plan, output: &Output) -> Result<Vec<Rank>> {
    let prefill = |name: &str, engine, optimistic| RankConfig {
        name: name.into(),
        engine,
        role: RoleConfig::Prefill { workers: WORKERS, optimistic },
        bind: plan.place.bind,
        advertise: plan.place.advertise,
        tp: (0, 1),
        timeout_s: 300,
        move_kv: true,
    };
    let decode = |name: &str, engine, shard, tp| RankConfig {
        role: RoleConfig::Decode { pool_pages: POOL_PAGES, shard: Some((shard, WORKERS)) },
        tp,
        ..prefill(name, engine, 0)
    };
    let mooncake = Engine::Mooncake0523;
    // Each decode engine of the mooncake prefill gets a transfer worker of its own.
    let configs = [
        prefill("prefill", mooncake, 0),
        decode("decode:steady", mooncake, 0, (0, 1)),
        decode("decode:unserved", mooncake, 1, (0, 1)),
        decode("decode:killed", mooncake, 2, (0, 1)),
        decode("decode:pair:0", mooncake, 2, (0, 2)),
        decode("decode:pair:1", mooncake, 0, (1, 2)),
        decode("decode:deaf", mooncake, 3, (0, 1)),
        // One optimistic attempt: a prompt is computed before its METADATA came and then waits in the inflight queue.
        prefill("nixl-prefill", Engine::Nixl0517, 1),
        decode("nixl-decode", Engine::Nixl0517, 0, (0, 1)),
    ];
    let mut ranks =
        configs.into_iter().map(|config| Rank::start(config, &output.log())).collect::<Result<Vec<_>>>()?;
    for (index, engine) in [(PREFILL, mooncake), (NIXL_PREFILL, Engine::Nixl0517)] {
        let peer = ranks.get(index).map(|rank| (rank.ip.clone(), rank.port)).context("no prefill rank")?;
        for rank in ranks.iter_mut().filter(|rank| rank.config.engine == engine) {
            rank.tell(&Command::Peers(vec![peer.clone()]))?;
        }
    }
    Ok(ranks)
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
        self.ranks.get_mut(index).context("no such rank")
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.numbers.room(self.next)
    }

    fn engines() -> [(usize, Vec<usize>); 5] {
        [
            (PREFILL, vec![STEADY]),
            (NIXL_PREFILL, vec![NIXL_DECODE]),
            (PREFILL, vec![UNSERVED]),
            (PREFILL, vec![KILLED]),
            (PREFILL, PAIR.to_vec()),
        ]
    }

    /// Opens the connections: two rooms for every pair that is to have some before the load.
    fn warm_up(&mut self, plan: &Plan) -> Result<()> {
        for (salt, (prefill, decodes)) in (100..).zip(Self::engines()) {
            let stream = Stream { count: 2, gap_ns: 5_000_000, ..ordinary(plan, salt, 1) };
            let scenario = if prefill == NIXL_PREFILL { "warmup_nixl" } else { "warmup" };
            self.rooms.extend(driver::stream(self.ranks, scenario, &[prefill], &[decodes], &stream)?);
        }
        std::thread::sleep(Duration::from_millis(500));
        Ok(())
    }

    /// Healthy requests: to the end on two pairs, until shortly before the faults on those that will have one.
    fn healthy(&mut self, plan: &Plan) -> Result<()> {
        let whole = FAULTS_AT.as_secs() + plan.hold.as_secs();
        let seconds = [whole, whole, 2, 2, 2];
        for (salt, ((prefill, decodes), seconds)) in (1..).zip(Self::engines().into_iter().zip(seconds)) {
            let stream = ordinary(plan, salt, seconds);
            let scenario = if prefill == NIXL_PREFILL { "healthy_nixl" } else { "healthy" };
            self.rooms.extend(driver::stream(self.ranks, scenario, &[prefill], &[decodes], &stream)?);
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
        let command = Command::Request { room, pages, compute_ms, prefill: 0 };
        for rank in std::iter::once(&prefill).chain(decodes) {
            self.rank(*rank)?.tell(&command)?;
        }
        Ok(room)
    }

    fn faults(&mut self) -> Result<()> {
        // A transfer worker dies with the first room it takes; the rooms behind it stay in its queue.
        self.rank(PREFILL)?.tell(&Command::BreakWorker { worker: 1 })?;
        for _ in 0..3 {
            self.request("dead_worker", PREFILL, &[UNSERVED], PAGES, COMPUTE_MS)?;
        }
        // One of two decode ranks has no memory for its part.
        self.rank(PAIR[1])?.tell(&Command::TakeMemory)?;
        self.request("one_rank_silent", PREFILL, &PAIR, PAGES, COMPUTE_MS)?;
        // A decode process is killed while prefill computes.
        let room = self.request("killed_peer", PREFILL, &[KILLED], PAGES, ENDLESS_COMPUTE_MS)?;
        ensure!(
            self.rank(PREFILL)?.comes_to(room, KvPoll::WaitingForInput),
            "METADATA of room {room} did not come"
        );
        self.rank(KILLED)?.kill()?;
        // The port to which the status goes refuses.
        self.rank(DEAF)?.tell(&Command::CloseStatusPort)?;
        std::thread::sleep(Duration::from_millis(300));
        self.request("refused_status", PREFILL, &[DEAF], PAGES, COMPUTE_MS)?;
        // The client hangs up while decode waits for memory; prefill gets the request afterwards.
        self.abort_first("abort_first", PREFILL, STEADY)?;
        self.abort_first("abort_first_nixl", NIXL_PREFILL, NIXL_DECODE)?;
        // The same, and the router tells prefill too: nothing stays.
        let room = self.abort_first("hangup", PREFILL, STEADY)?;
        std::thread::sleep(Duration::from_millis(100));
        self.rank(PREFILL)?.tell(&Command::Abort { room })?;
        // The client hangs up after METADATA, while prefill computes.
        let room = self.request("hangup_computing", PREFILL, &[STEADY], PAGES, 500)?;
        ensure!(
            self.rank(PREFILL)?.comes_to(room, KvPoll::WaitingForInput),
            "METADATA of room {room} did not come"
        );
        self.rank(STEADY)?.tell(&Command::Abort { room })
    }

    /// ABORT reaches prefill before the request does.
    fn abort_first(&mut self, scenario: &'static str, prefill: usize, decode: usize) -> Result<u64> {
        let room = self.begin(scenario, prefill, &[decode]);
        let rank = self.rank(decode)?;
        rank.tell(&Command::Request { room, pages: NO_ROOM_PAGES, compute_ms: 0, prefill: 0 })?;
        rank.tell(&Command::Abort { room })?;
        ensure!(rank.has_aborted(room), "ABORT of room {room} was not sent");
        std::thread::sleep(Duration::from_millis(150));
        self.rank(prefill)?.tell(&Command::Request {
            room,
            pages: PAGES,
            compute_ms: COMPUTE_MS,
            prefill: 0,
        })?;
        Ok(room)
    }
}
