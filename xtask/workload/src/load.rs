//! Steady load: many healthy rooms at a given rate over any number of ranks.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::driver::{self, Files, Fleet, Output, Place};
use crate::fleet::{self, Ports, Serve};
use crate::rank::{Command, RankConfig, RoleConfig, Stream, now};
use crate::wire::Engine;

/// How much longer they may take on a busy machine.
const BUSY: Duration = Duration::from_secs(30);

/// What to run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub out: PathBuf,
    pub place: Place,
    pub seed: u64,
    pub http: bool,
    pub loading: Duration,
    pub engine: Engine,
    pub prefills: usize,
    pub decodes: usize,
    /// Rooms per second, all together.
    pub rate: u32,
    pub rooms: u64,
    pub pages: u32,
    pub compute_ms: u64,
    pub batch: u32,
    pub move_kv: bool,
    /// How long rooms may take to end after the last has begun.
    pub patience: Duration,
    pub files: Files,
}

/// Runs it and prints how the rooms ended, in one line.
///
/// # Errors
/// When a rank does not come up or answer, or when not every room succeeded: the machine could not keep up.
pub(crate) fn run(plan: &Plan) -> Result<()> {
    let mut output = Output::new(&plan.out)?;
    let mut fleet = start(plan, &output)?;
    let prefills: Vec<usize> = (0..plan.prefills).collect();
    let decodes: Vec<Vec<usize>> = (0..plan.decodes).map(|d| vec![plan.prefills + d]).collect();
    let gap_ns = 1_000_000_000 / u64::from(plan.rate.max(1));
    let stream = |seed, count, gap_ns| Stream {
        seed,
        count,
        gap_ns,
        start: now() + 100_000_000,
        pages: plan.pages,
        compute_ms: plan.compute_ms,
        batch: plan.batch,
        engines: (plan.prefills as u64, plan.decodes as u64),
        me: 0,
    };
    // One room for every pair of ranks, so that all connections are open when the load begins. With a batch the
    // first one is to find its connection closed: then all of it goes out in one piece.
    let mut rooms = Vec::new();
    if plan.batch <= 1 {
        let count = (plan.prefills * plan.decodes) as u64;
        let warm = Stream { pages: 8, ..stream(!plan.seed, count, 1_000_000) };
        rooms.extend(driver::stream(&mut fleet, "warmup", &prefills, &decodes, &warm)?);
        std::thread::sleep(Duration::from_millis(300 + count));
    }
    output.ready(Some(&fleet), &plan.files)?;
    rooms.extend(driver::stream(
        &mut fleet,
        "healthy",
        &prefills,
        &decodes,
        &stream(plan.seed, plan.rooms, gap_ns),
    )?);
    std::thread::sleep(Duration::from_nanos(gap_ns.saturating_mul(plan.rooms)) + plan.patience);
    let end = Instant::now() + BUSY;
    while driver::open(&mut fleet, &rooms)? && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(500));
    }
    let summary = output.finish(&mut fleet, &rooms, &plan.files)?;
    let well = if plan.engine.tells_success() { "success" } else { "success_off_wire" };
    if summary.labels.keys().any(|label| *label != well) {
        bail!("not every room succeeded, the machine may be too slow for this rate: {}", summary.line());
    }
    Ok(())
}

fn start(plan: &Plan, output: &Output) -> Result<Fleet> {
    let config = |name: String, role| RankConfig {
        name,
        engine: plan.engine,
        role,
        bind: plan.place.bind,
        advertise: plan.place.advertise,
        tp: (0, 1),
        timeout_s: 300,
        move_kv: plan.move_kv || plan.engine.nixl(),
        bootstrap: None,
    };
    let log = output.log();
    let mut ports = plan.http.then(|| Ports::new(plan.place.bind));
    let mut start = |config| fleet::start(vec![config], Serve::default(), ports.as_mut(), &log);
    let mut ranks = Vec::new();
    for index in 0..plan.prefills {
        let name = if plan.prefills == 1 { "prefill".to_owned() } else { format!("prefill:{index}") };
        ranks.extend(start(config(name, RoleConfig::Prefill { workers: 4, optimistic: 0 }))?);
    }
    let peers: Vec<(String, u16)> = ranks.iter().map(|rank| (rank.ip.clone(), rank.port)).collect();
    for index in 0..plan.decodes {
        let role = RoleConfig::Decode { pool_pages: 10_000_000, shard: None };
        for mut rank in start(config(format!("decode:{index}"), role))? {
            if !plan.http {
                rank.tell(&Command::Peers(peers.clone()))?;
            }
            ranks.push(rank);
        }
    }
    Fleet::new(ranks, plan.loading, &log)
}
