//! `cargo xtask fleet`: what Roomtrace is on a fleet, with every part of it real. Two hosts (network namespaces) with an agent and a node
//! Collector each, two gateways, Jaeger, Prometheus; the demo's workload with its prefill engines on one host and its decode
//! engines on the other. What arrived is asked of Jaeger's and Prometheus' own APIs.
//!
//! Twice: undisturbed, and with a gateway killed, a node Collector stopped and Jaeger hanging while rooms pin. Needs root. Leaves nothing
//! behind but `fleet` in cargo's target directory.

mod engine_spans;
mod hosts;
mod outage;
mod tiers;
mod traces;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::agent::{Agent, Start};
use crate::install;
use crate::own::lines;
use crate::prometheus::{self, Prometheus, escaped};
use crate::workload::{self, Workload};
use engine_spans::Made;
use hosts::{Host, Network};
use tiers::{DECISION_WAIT, SHARE, Tiers};
use traces::{COMPLETENESS, Traces};

/// How long what was sent may take to be seen where it belongs, decision included.
const PATIENCE: Duration = Duration::from_secs(DECISION_WAIT + 60);

/// Slower rooms may be kept for their slowness (`ROOMTRACE_SLOW_MS` is 5000).
const QUICK_S: f64 = 3.0;

/// Seconds that are slow.
const SLOW_S: u64 = 6;

/// Rooms whose end prefill's host cannot see, also where prefill's engine has ended: decode may still wait, until its timer.
const LASTING: &str = "status_lost";

/// Seconds that gateway, Collector and store are away where nothing else is said: long enough for retries to have come to their longest
/// waits and for queues to fill.
const OUTAGE: u64 = 120;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Use this agent instead of building one.
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
    /// How long gateway, Collector and store are away, seconds.
    #[arg(long, default_value_t = OUTAGE)]
    outage: u64,
}

/// Runs it as one of the tests. Returns why it could not run, if it could not.
pub(crate) fn as_test() -> Result<Vec<String>> {
    let why = fleet(&Args { agent: None, outage: OUTAGE })?;
    Ok(why.map(|why| format!("a fleet: {why}")).into_iter().collect())
}

/// Runs it.
pub(crate) fn run(args: &Args) -> Result<()> {
    match fleet(args)? {
        None => Ok(()),
        Some(why) => bail!("this host cannot be observed: {why}"),
    }
}

/// A host with its agent.
struct Site<'a> {
    host: &'a Host,
    agent: Agent,
    events: PathBuf,
}

/// The services that are there all the time, and where to ask.
struct Fleet<'a> {
    tiers: &'a Tiers<'a>,
    sites: [Site<'a>; 2],
    prometheus: &'a Prometheus,
    dir: &'a Path,
    begun: Instant,
}

fn fleet(args: &Args) -> Result<Option<String>> {
    let uid = install::output(Command::new("id").arg("-u"))?;
    if uid.trim() != "0" {
        return Ok(Some("network namespaces and BPF need root".to_owned()));
    }
    install::debian(&["iproute2", "util-linux"])?;
    let sets = tiers::validate()?;
    eprintln!("{sets} combinations of files in collector-config/ are valid");
    workload::build()?;
    if args.agent.is_none() {
        install::cargo(&["build", "--quiet", "--release", "--package", "roomtrace"])?;
    }
    let program = args.agent.clone().unwrap_or_else(|| install::target().join("release/roomtrace"));
    let dir = install::target().join("fleet");
    install::empty(&dir)?;
    let network = Network::new(&dir)?;
    let tiers = Tiers::build(&network, &dir)?;
    let begun = Instant::now();
    let jaeger = tiers.jaeger()?;
    let gateways = [tiers.gateway(1)?, tiers.gateway(2)?];
    let nodes = [tiers.node(&network.prefill)?, tiers.node(&network.decode)?];
    let gpu = prometheus::driver(&dir)?;
    let mut sites = Vec::new();
    for host in [&network.prefill, &network.decode] {
        match site(&program, host, &gpu, &dir)? {
            Ok(site) => sites.push(site),
            Err(why) => return Ok(Some(why)),
        }
    }
    let sites: [Site<'_>; 2] = sites.try_into().map_err(|_| anyhow::anyhow!("two hosts"))?;
    let prometheus = Prometheus::scraping(&jobs(&tiers, &sites), &dir)?;
    let fleet = Fleet { tiers: &tiers, sites, prometheus: &prometheus, dir: &dir, begun };
    fleet.say("two hosts, two node Collectors, two gateways, Jaeger and Prometheus run");
    fleet.undisturbed()?;
    for (n, gateway) in gateways.iter().enumerate() {
        fleet.say(&format!("gateway {} has {} MB of memory", n + 1, gateway.memory()? / 1_000_000));
    }
    fleet.disturbed(Duration::from_secs(args.outage), &jaeger, gateways, nodes)?;
    for site in fleet.sites {
        site.agent.stop()?;
    }
    Ok(None)
}

/// Starts a host's agent. The inner error: why it cannot observe.
fn site<'a>(program: &Path, host: &'a Host, gpu: &str, dir: &Path) -> Result<Result<Site<'a>, String>> {
    let config = dir.join(format!("{}.yaml", host.name));
    // The Collector has the usual ports of OTLP; engines that trace send to the agent, which hands on.
    let text = format!(
        "capture: {{own_network: true}}\n\
         spans: {{enabled: true, grpc: null, http: '{}', forward: {{endpoint: 'http://127.0.0.1:4317'}}}}\n{gpu}",
        host.at(4338)
    );
    std::fs::write(&config, text).with_context(|| format!("write {}", config.display()))?;
    let events = dir.join(format!("{}.events.jsonl", host.name));
    let mut command = host.command_as_machine(program);
    command.env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:4317");
    let arguments = ["--config".to_owned(), config.to_string_lossy().into_owned()];
    let log = dir.join(format!("{}.agent.log", host.name));
    Ok(match Agent::start_at(command, &arguments, host.at(9713), &events, &log)? {
        Start::Observing(agent) => Ok(Site { host, agent, events }),
        Start::NotPossible(why) => Err(why),
    })
}

fn jobs(tiers: &Tiers<'_>, sites: &[Site<'_>]) -> String {
    let job = |name: &str, targets: Vec<String>| {
        format!("{{job_name: {name}, static_configs: [{{targets: ['{}']}}]}}", targets.join("', '"))
    };
    let [spans, own] = tiers.gateway_pages().map(|pages| pages.map(|page| page.to_string()).to_vec());
    let agents = sites.iter().map(|site| site.host.at(9713).to_string()).collect();
    let nodes = sites.iter().map(|site| site.host.at(8888).to_string()).collect();
    [job("roomtrace", agents), job("spans", spans), job("gateways", own), job("nodes", nodes)].join(", ")
}

/// Asks again until `check` has nothing to complain of.
fn eventually(limit: Duration, mut check: impl FnMut() -> Result<Option<String>>) -> Result<()> {
    let end = Instant::now() + limit;
    while let Some(why) = check()? {
        ensure!(Instant::now() < end, "after {} s {why}", limit.as_secs());
        sleep(Duration::from_millis(500));
    }
    Ok(())
}

/// What one agent has told of one room, the last of it.
struct Told {
    trace: String,
    /// It was called pinned.
    pinned: bool,
    /// It is over here.
    closed: Option<Value>,
}

impl Told {
    /// Whether only the share decides on its trace, as far as this agent knows.
    fn ordinary(&self) -> bool {
        let quick = |event: &Value| {
            event["outcome"] == "success"
                && event["completeness"] == "full"
                && event["verdict"].is_null()
                && event["age_s"].as_f64().is_some_and(|age| age < QUICK_S)
        };
        !self.pinned && self.closed.as_ref().is_some_and(quick)
    }
}

/// Rooms by number.
type Rooms = BTreeMap<String, Told>;

impl Site<'_> {
    /// What its agent has told of rooms that are not in `before`.
    fn rooms(&self, before: &BTreeSet<String>) -> Result<Rooms> {
        let text = std::fs::read_to_string(&self.events).context("read an agent's events")?;
        // The last line may be half written.
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let mut rooms = Rooms::new();
        for event in lines(whole) {
            let event = event?;
            let (Some(room), Some(trace)) = (event["room"].as_str(), event["trace_id"].as_str()) else {
                continue;
            };
            if before.contains(room) {
                continue;
            }
            let told = Told { trace: trace.to_owned(), pinned: false, closed: None };
            let told = rooms.entry(room.to_owned()).or_insert(told);
            told.pinned |= event["event"] == "room_pinned";
            if event["event"] == "room_closed" {
                told.closed = Some(event);
            }
        }
        Ok(rooms)
    }
}

/// The workload's rooms that must be called pinned.
fn must(truth: &str) -> Result<BTreeSet<String>> {
    let all: Vec<Value> = lines(truth).collect::<Result<_>>()?;
    let must = all.iter().filter(|line| line["kind"] == "expected" && line["pin"] == "must");
    let must: BTreeSet<String> = must.map(|line| line["room"].to_string()).collect();
    ensure!(!must.is_empty(), "the workload has pinned no room");
    Ok(must)
}

impl Fleet<'_> {
    fn say(&self, what: &str) {
        eprintln!("{:>4} s  {what}", self.begun.elapsed().as_secs());
    }

    fn workload(&self, name: &str, seed: u32, further: &[&str]) -> Result<Workload> {
        let dir = self.dir.join(name);
        install::empty(&dir)?;
        let [prefill, decode] =
            self.sites.each_ref().map(|site| format!("{}={}", site.host.name, site.host.address));
        let seed = seed.to_string();
        let place = ["--prefill-host", &prefill, "--decode-host", &decode];
        let all = [&["demo", "--rate", "8", "--seed", &seed][..], &place, further].concat();
        Workload::open(&all, &dir)
    }

    fn rooms(&self, before: &BTreeSet<String>) -> Result<[Rooms; 2]> {
        let [prefill, decode] = &self.sites;
        Ok([prefill.rooms(before)?, decode.rooms(before)?])
    }

    fn traces(&self) -> Result<Traces> {
        traces::all(self.tiers.here(16686))
    }

    /// Waits until some agent has called each of these pinned.
    fn all_told(&self, must: &BTreeSet<String>, before: &BTreeSet<String>) -> Result<()> {
        eventually(PATIENCE, || {
            let rooms = self.rooms(before)?;
            let told = |room: &&String| rooms.iter().any(|of| of.get(*room).is_some_and(|told| told.pinned));
            let missing = must.iter().find(|room| !told(room));
            Ok(missing.map(|room| format!("no agent has called room {room} pinned")))
        })
    }

    /// What of pinned rooms Jaeger does not have: per agent the span that says so, and the room's own once it is over.
    fn pinned_missing(&self, rooms: &[Rooms; 2]) -> Result<Vec<String>> {
        let traces = self.traces()?;
        let mut missing = Vec::new();
        for (site, rooms) in self.sites.iter().zip(rooms) {
            for (room, told) in rooms.iter().filter(|(_, told)| told.pinned) {
                let spans = traces.get(&told.trace).map_or(&[][..], Vec::as_slice);
                let has =
                    |name: &str| spans.iter().any(|span| span.host == site.host.id && span.name == name);
                let error =
                    spans.iter().any(|span| span.error.as_ref().is_some_and(|class| !class.is_empty()));
                if !has("room_pinned") || !error {
                    missing.push(format!(
                        "room {room}: no error span room_pinned of {}; there are {spans:?}",
                        site.host.name
                    ));
                }
                if told.closed.is_some() && !has("kv_transfer") {
                    missing.push(format!(
                        "room {room}: no span kv_transfer of {}; there are {spans:?}",
                        site.host.name
                    ));
                }
            }
        }
        Ok(missing)
    }

    /// Views of ordinary rooms that are to be kept, by whether Jaeger has them, and those that it has but should not.
    fn share(&self, rooms: &[Rooms; 2]) -> Result<Share> {
        let traces = self.traces()?;
        let mut share = Share::default();
        for (site, own) in self.sites.iter().zip(rooms) {
            for (room, told) in own.iter().filter(|(_, told)| told.ordinary()) {
                if !rooms.iter().filter_map(|of| of.get(room)).all(Told::ordinary) {
                    continue;
                }
                let there = traces.get(&told.trace).is_some_and(|spans| {
                    spans.iter().any(|span| span.host == site.host.id && span.name == "kv_transfer")
                });
                share.all += 1;
                match (traces::shared(&told.trace, SHARE), there) {
                    (true, true) => share.kept += 1,
                    (true, false) => share.missing.extend(told.closed.clone()),
                    (false, true) => share.unasked.push(room.clone()),
                    (false, false) => {}
                }
            }
        }
        Ok(share)
    }

    fn undisturbed(&self) -> Result<()> {
        let nothing = BTreeSet::new();
        let mut workload = self.workload("undisturbed", std::process::id(), &[])?;
        self.say(&workload.results()?);
        let must = must(&workload.truth()?)?;
        self.all_told(&must, &nothing)?;
        let [prefill, decode] = &self.sites;
        let agents = [&prefill.agent, &decode.agent];
        let pages = self.prometheus.agree(&agents, |pages| pages.len() >= 2)?;
        self.say(&format!("{pages} alerts of pinned rooms fire"));
        self.queries()?;
        let (linked, engines_trace) = self.engine_ends_a_request()?;
        workload.end()?;
        let last =
            self.prometheus.agree(&agents, |pages| pages.iter().all(|(verdict, _)| verdict == LASTING))?;
        self.say(&format!(
            "they have ended with the rooms; {last} of {LASTING} last until the engines' timer"
        ));

        let mut rooms = self.rooms(&nothing)?;
        eventually(PATIENCE, || {
            rooms = self.rooms(&nothing)?;
            Ok(self.pinned_missing(&rooms)?.pop())
        })?;
        let mut both = 0;
        for room in &must {
            let known: BTreeSet<&str> = self
                .sites
                .iter()
                .zip(&rooms)
                .filter(|(_, of)| of.contains_key(room))
                .map(|(s, _)| s.host.id.as_str())
                .collect();
            let trace =
                rooms.iter().find_map(|of| of.get(room)).context("a room that nobody told of")?.trace.clone();
            both += usize::from(known.len() == 2);
            eventually(PATIENCE, || {
                let spans = traces::one(self.tiers.here(16686), &trace)?;
                let wrote = traces::hosts(&spans);
                let found = traces::of_room(self.tiers.here(16686), room)?;
                if found.len() != 1 || !found.contains_key(&trace) {
                    return Ok(Some(format!(
                        "the dashboard finds {:?} for room {room}, not its trace {trace}",
                        found.keys()
                    )));
                }
                Ok((wrote != known).then(|| {
                    format!("trace {trace} of room {room} has spans of {wrote:?}, not of {known:?}")
                }))
            })?;
        }
        ensure!(both > 0, "no pinned room was seen by both hosts");
        self.say(&format!(
            "{} pinned rooms are one trace each in Jaeger with their error span, {both} of them with spans of both hosts",
            must.len()
        ));
        eventually(PATIENCE, || {
            let spans = traces::one(self.tiers.here(16686), &linked)?;
            if !spans.iter().any(|span| span.links.contains(&engines_trace)) {
                return Ok(Some(format!("trace {linked} has no link to the engine's trace {engines_trace}")));
            }
            let engine = traces::one(self.tiers.here(16686), &engines_trace)?;
            Ok(engine.is_empty().then(|| format!("the engine's trace {engines_trace} is not there")))
        })?;
        self.say("one of them links to the engine's own trace, which is there too");
        self.sampled(&rooms)?;
        self.measured(&rooms)?;
        self.policies()
    }

    /// Each policy of the gateways alone keeps a trace that it is made for, and no policy one that is like all others. The rooms of the
    /// workload that fail or are slow are mostly pinned too, and none is lossy.
    fn policies(&self) -> Result<()> {
        // As the agents' own spans have it; else the policy would be tried with another key than theirs.
        let known = self.traces()?;
        let mut seen = known.values().flatten().filter_map(|span| span.completeness.as_deref());
        ensure!(
            seen.any(|seen| seen == "full"),
            "no room's span says by {COMPLETENESS} how much of it was seen"
        );
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        let now = u64::try_from(now)?;
        let cases = [
            ("failed", true, 1, "full"),
            ("slow", false, SLOW_S, "full"),
            ("lossy", false, 1, "lossy"),
            ("like all others", false, 1, "full"),
        ];
        let mut ids = (1_u128..).map(|n| 0x00ca_5e00_u128 << 96 | n << 64 | u128::from(now));
        let mut sent = Vec::new();
        for (case, error, seconds, completeness) in cases {
            let trace = ids
                .find(|id| !traces::shared(&format!("{id:032x}"), SHARE))
                .context("every trace is in the share")?;
            let made = Made {
                scope: "roomtrace",
                service: "sglang",
                name: "a_policys_own",
                trace,
                began: now - seconds * 1_000_000_000,
                ended: now,
                error,
                attributes: &[(COMPLETENESS, completeness)],
            };
            engine_spans::send_made(self.sites[0].host.at(4338), &made)?;
            sent.push((case, format!("{trace:032x}")));
        }
        let there =
            |trace: &str| Ok::<_, anyhow::Error>(!traces::one(self.tiers.here(16686), trace)?.is_empty());
        let (other, kept) = sent.split_last().context("no case")?;
        eventually(PATIENCE, || {
            for (case, trace) in kept {
                if !there(trace)? {
                    return Ok(Some(format!("trace {trace}, which is {case}, is not kept")));
                }
            }
            Ok(None)
        })?;
        // The other gateway may decide a second later.
        sleep(Duration::from_secs(3));
        ensure!(!there(&other.1)?, "trace {} is kept, which is {}", other.1, other.0);
        self.say("a trace that only failed, one that was only slow and one that was only lossy are kept, one that was none of it is not");
        Ok(())
    }

    /// Every query of dashboards and rules, and what it gives.
    fn queries(&self) -> Result<()> {
        let asked = self.prometheus.answers_everything(&self.sites[0].host.at(9713).to_string())?;
        println!("series  largest value  query");
        for query in &asked {
            println!("{query}");
        }
        self.say(&format!("{} queries of dashboards and rules have data", asked.len()));
        Ok(())
    }

    /// The engine of one pinned room ends its request, as one that traces would tell. That room's trace and the engine's.
    fn engine_ends_a_request(&self) -> Result<(String, String)> {
        let rooms = self.rooms(&BTreeSet::new())?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        let now = u64::try_from(now)?;
        for ((site, rooms), role) in self.sites.iter().zip(&rooms).zip(["prefill", "decode"]) {
            let open = rooms.iter().find(|(_, told)| told.pinned && told.closed.is_none());
            if let Some((number, told)) = open {
                let trace = 0x00c0_ffee_u128 << 64 | u128::from(now);
                let began = now - 5_000_000_000;
                engine_spans::send(site.host.at(4338), number.parse()?, role, trace, began, now)?;
                return Ok((told.trace.clone(), format!("{trace:032x}")));
            }
        }
        bail!("no room is pinned and open")
    }

    /// Of the healthy rooms exactly those whose hash says so are kept, by either gateway.
    fn sampled(&self, rooms: &[Rooms; 2]) -> Result<()> {
        let mut share = Share::default();
        eventually(PATIENCE, || {
            share = self.share(rooms)?;
            let missing = share.missing.len();
            Ok((missing > 0)
                .then(|| format!("{missing} of {} views to be kept are not there", share.kept + missing)))
        })?;
        ensure!(share.unasked.is_empty(), "kept for no reason: rooms {:?}", share.unasked);
        ensure!(share.kept > 0 && share.kept < share.all, "{} of {} views kept", share.kept, share.all);
        self.say(&format!(
            "of {} views of healthy rooms {} are kept, those of the share of {SHARE} %",
            share.all, share.kept
        ));
        Ok(())
    }

    /// Metrics count every room, kept or not, and lead to traces.
    fn measured(&self, rooms: &[Rooms; 2]) -> Result<()> {
        let closed = rooms.iter().flat_map(Rooms::values).filter(|told| told.closed.is_some()).count();
        let query = escaped("sum(roomtrace_spans_calls_total{span_name=\"kv_transfer\"})");
        eventually(PATIENCE, || {
            let data = self.prometheus.api(&format!("/api/v1/query?query={query}"))?;
            let count = data["result"][0]["value"][1].as_str().unwrap_or("0").to_owned();
            Ok((count != closed.to_string())
                .then(|| format!("span metrics have counted {count} of {closed} ended views")))
        })?;
        let known: BTreeSet<&str> =
            rooms.iter().flat_map(Rooms::values).map(|told| told.trace.as_str()).collect();
        for series in
            ["roomtrace_spans_duration_seconds_bucket", "roomtrace_room_phase_duration_seconds_bucket"]
        {
            let ids = self.prometheus.exemplars(series)?;
            ensure!(
                ids.iter().any(|id| known.contains(id.as_str())),
                "exemplars of {series} lead to no room: {ids:?}"
            );
        }
        self.say(&format!("span metrics have counted all {closed} ended views; exemplars of agents and gateways lead to rooms' traces"));
        Ok(())
    }

    fn one_value(&self, query: &str) -> Result<String> {
        let data = self.prometheus.api(&format!("/api/v1/query?query={}", escaped(query)))?;
        let value = data["result"][0]["value"][1].as_str();
        Ok(value.with_context(|| format!("Prometheus has nothing for {query}"))?.to_owned())
    }
}

/// What became of ordinary rooms, by view.
#[derive(Default)]
struct Share {
    all: usize,
    kept: usize,
    /// Events of those that were to be kept and are not in Jaeger.
    missing: Vec<Value>,
    unasked: Vec<String>,
}
