//! Gives the processes their requests, and writes down at the end what they say of their rooms.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::expect::{self, Expected, Pin, Sees, Side};
use crate::fleet::{HttpPlace, Rank, Router};
use crate::rank::{Command, Stream, now};
use crate::router::{self, End, LegReport};
use crate::status::KvPoll;

/// All processes of a run.
pub(crate) struct Fleet {
    /// Ranks of all engines.
    pub ranks: Vec<Rank>,
    /// Sends the requests over HTTP; `None`: the driver gives them to the ranks.
    pub router: Option<Router>,
    /// What an observer has to go by.
    pub sees: Sees,
}

impl Fleet {
    /// Starts the router where the engines speak HTTP, once they have "loaded their model": a real engine takes half a
    /// minute for it, in which an observer that reads the process table now and then finds it.
    ///
    /// # Errors
    /// When it does not come up.
    pub(crate) fn new(ranks: Vec<Rank>, loading: Duration, log: &Path) -> Result<Self> {
        let http = ranks.iter().any(|rank| rank.http.is_some());
        if http {
            std::thread::sleep(loading);
        }
        let router = if http { Some(Router::start(&ranks, log)?) } else { None };
        let sees = if http { Sees::Requests } else { Sees::Threads };
        Ok(Self { ranks, router, sees })
    }
}

impl Fleet {
    /// A rank by its index.
    ///
    /// # Errors
    /// When there is none.
    pub(crate) fn rank(&mut self, index: usize) -> Result<&mut Rank> {
        self.ranks.get_mut(index).context("no such rank")
    }

    /// The HTTP server of a rank's engine.
    ///
    /// # Errors
    /// When it has none.
    pub(crate) fn http(&self, index: usize) -> Result<HttpPlace> {
        self.ranks.get(index).and_then(|rank| rank.http).context("an engine without HTTP")
    }

    /// A prefill engine as the router knows it.
    ///
    /// # Errors
    /// When it is none, or speaks no HTTP.
    pub(crate) fn prefill(&self, index: usize) -> Result<router::Prefill> {
        let http = self.http(index)?;
        Ok((http.server, http.bootstrap.context("an engine without a bootstrap server")?))
    }
}

/// One life of a room as the driver began it.
pub(crate) struct Room {
    pub number: u64,
    pub scenario: &'static str,
    pub begun: u64,
    /// Index of the prefill rank.
    pub prefill: usize,
    /// Indexes of the decode ranks.
    pub decodes: Vec<usize>,
}

/// Files by which others and the workload wait for each other.
#[derive(Clone, Debug)]
pub(crate) struct Files {
    /// Written when the connections are open.
    pub ready: Option<PathBuf>,
    /// The load waits for it.
    pub go: Option<PathBuf>,
    /// The end of the processes waits for it.
    pub linger: Option<PathBuf>,
}

fn wait_for(file: Option<&Path>) {
    while file.is_some_and(|path| !path.exists()) {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Where results go.
pub(crate) struct Output {
    pub dir: PathBuf,
    truth: BufWriter<File>,
}

impl Output {
    /// Makes the directory and an empty truth file.
    ///
    /// # Errors
    /// When they cannot be written.
    pub(crate) fn new(dir: &Path) -> Result<Self> {
        std::fs::create_dir_all(dir).with_context(|| format!("create {}", dir.display()))?;
        let path = dir.join("truth.jsonl");
        let truth =
            BufWriter::new(File::create(&path).with_context(|| format!("create {}", path.display()))?);
        Ok(Self { dir: dir.to_owned(), truth })
    }

    /// Where a rank's own messages go.
    pub(crate) fn log(&self) -> PathBuf {
        self.dir.join("ranks.log")
    }

    /// Writes one line of the truth file.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn put(&mut self, kind: &str, mut value: Value) -> Result<()> {
        if let Some(object) = value.as_object_mut() {
            object.insert("kind".into(), kind.into());
            object.insert("rt".into(), now().into());
        }
        writeln!(self.truth, "{value}").context("write the truth file")
    }

    /// Writes out what is still in memory.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(crate) fn flush(&mut self) -> Result<()> {
        self.truth.flush().context("write the truth file")
    }

    /// Names the processes in the truth file and in `ready`, then waits for `go` to exist.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub(crate) fn ready(&mut self, fleet: Option<&Fleet>, files: &Files) -> Result<()> {
        let ranks = fleet.map_or(&[][..], |fleet| &fleet.ranks);
        let procs: Vec<Value> = ranks
            .iter()
            .map(|rank| {
                json!({"name": rank.config.name, "pid": rank.pid, "ip": rank.ip, "rank_port": rank.port,
                       "session": rank.session, "engine": rank.config.engine, "tp": rank.config.tp,
                       "server": rank.server, "http": rank.http.map(|http| http.server),
                       "bootstrap": rank.http.and_then(|http| http.bootstrap)})
            })
            .collect();
        let ports: Vec<u16> = ranks.iter().map(|rank| rank.port).collect();
        let mut http: Vec<u16> = ranks
            .iter()
            .filter_map(|rank| rank.http)
            .flat_map(|http| std::iter::once(http.server).chain(http.bootstrap))
            .map(|at| at.port())
            .collect();
        http.dedup();
        let router = fleet.and_then(|fleet| fleet.router.as_ref()).map(|router| router.pid);
        let value = json!({"driver": std::process::id(), "truth": self.dir.join("truth.jsonl"), "rank_ports": ports,
            "http_ports": http, "router": router, "procs": procs});
        self.put("ready", value.clone())?;
        self.truth.flush()?;
        if let Some(path) = &files.ready {
            // Written whole or not at all: others wait for it.
            let draft = path.with_extension("part");
            std::fs::write(&draft, value.to_string())
                .with_context(|| format!("write {}", draft.display()))?;
            std::fs::rename(&draft, path)?;
        }
        wait_for(files.go.as_deref());
        self.put("load_begin", json!({}))
    }

    /// Asks every rank, works out what is right to say of each room, writes it all down and prints the sums.
    ///
    /// # Errors
    /// When a rank does not answer or a file cannot be written.
    pub(crate) fn finish(mut self, fleet: &mut Fleet, rooms: &[Room], files: &Files) -> Result<Summary> {
        self.put("load_end", json!({}))?;
        for rank in fleet.ranks.iter_mut().filter(|rank| rank.alive) {
            rank.report()?;
            let state = json!({"role": rank.config.name, "pid": rank.pid, "dead_threads": rank.dead_threads});
            self.put("engine", state)?;
        }
        let legs = self.requests(fleet, rooms)?;
        let mut summary = Summary::default();
        let mut rules: BTreeMap<&str, Rule> = BTreeMap::new();
        for room in rooms {
            let Some(rank) = fleet.ranks.get(room.prefill) else { continue };
            let mut prefill = rank.side(room.number, room.begun);
            prefill.refused = rank
                .http
                .and_then(|http| legs.get(&(room.number, http.server)))
                .is_some_and(|leg| leg.end == End::Answered && leg.status != Some(200));
            let told_on_wire = rank.config.engine.tells_success();
            let decodes: Vec<Side> = room
                .decodes
                .iter()
                .filter_map(|i| fleet.ranks.get(*i))
                .map(|r| r.side(room.number, room.begun))
                .collect();
            let label = label(&prefill, &decodes, told_on_wire);
            let expected = expect::expected(&prefill, &decodes, fleet.sees);
            self.put("room", room_line(room, label, &prefill, &decodes))?;
            if expected.pin != Pin::Never {
                self.put_expected(room, &expected)?;
            }
            *summary.labels.entry(label).or_default() += 1;
            let rule = rules.entry(room.scenario).or_insert_with(Rule::new);
            rule.add(&expected, label == SUCCESS_OFF_WIRE);
        }
        self.put("run_end", json!({}))?;
        self.truth.flush().context("write the truth file")?;
        std::fs::write(self.dir.join("expect.json"), serde_json::to_string_pretty(&rules)?)?;
        println!("{}", summary.line());
        wait_for(files.linger.as_deref());
        Ok(summary)
    }

    /// A `request` line for each leg that the router has sent.
    fn requests(
        &mut self,
        fleet: &mut Fleet,
        rooms: &[Room],
    ) -> Result<HashMap<(u64, SocketAddr), LegReport>> {
        let Some(router) = &mut fleet.router else { return Ok(HashMap::new()) };
        let legs = router.report()?;
        let scenarios: HashMap<u64, &str> = rooms.iter().map(|room| (room.number, room.scenario)).collect();
        let name = |engine: SocketAddr| {
            let its = |rank: &&Rank| rank.http.is_some_and(|http| http.server == engine);
            fleet.ranks.iter().find(its).map(|rank| rank.config.name.as_str())
        };
        for leg in &legs {
            let line = json!({"room": leg.room, "scenario": scenarios.get(&leg.room), "rid": leg.rid,
                "side": name(leg.engine), "port": leg.engine.port(), "streamed": leg.streamed,
                "begin_rt": leg.begun, "first_byte_rt": leg.first_byte, "end_rt": leg.ended, "end": leg.end,
                "status": leg.status, "finish": leg.finish});
            self.put("request", line)?;
        }
        Ok(legs.into_iter().map(|leg| ((leg.room, leg.engine), leg)).collect())
    }

    fn put_expected(&mut self, room: &Room, expected: &Expected) -> Result<()> {
        writeln!(self.truth, "{}", expected.line(room.number, room.scenario)).context("write the truth file")
    }
}

/// Rooms by how they ended.
#[derive(Default)]
pub(crate) struct Summary {
    /// Label → rooms.
    pub labels: BTreeMap<&'static str, u64>,
}

impl Summary {
    /// One line.
    pub(crate) fn line(&self) -> String {
        let parts: Vec<_> = self.labels.iter().map(|(label, n)| format!("{label}={n}")).collect();
        parts.join(" ")
    }
}

/// Label of a room that succeeded on both sides with no TCP byte that says so (NIXL before 0.5.23).
const SUCCESS_OFF_WIRE: &str = "success_off_wire";

/// How a room's life is called in the truth file.
fn label(prefill: &Side, decodes: &[Side], told_on_wire: bool) -> &'static str {
    let sides = || std::iter::once(prefill).chain(decodes).filter(|side| side.report.is_some());
    let ended =
        |state| move |side: &Side| side.report.as_ref().is_some_and(|r| r.ended.is_some() && r.last == state);
    if sides().any(Side::open) {
        "pinned"
    } else if sides().all(ended(KvPoll::Success)) {
        if told_on_wire { "success" } else { SUCCESS_OFF_WIRE }
    } else if sides().any(ended(KvPoll::Success)) {
        "split"
    } else if sides().any(ended(KvPoll::Failed)) {
        "failed"
    } else {
        "dead"
    }
}

fn room_line(room: &Room, label: &str, prefill: &Side, decodes: &[Side]) -> Value {
    let mut sides = serde_json::Map::new();
    for side in std::iter::once(prefill).chain(decodes) {
        let report = side.report.as_ref();
        sides.insert(
            side.name.clone(),
            json!({
                "last": report.map(|r| format!("{:?}", r.last)),
                // A side that never got the request has nothing to end.
                "terminal": report.is_none_or(|r| r.ended.is_some()),
                "final_rt": report.and_then(|r| r.ended),
                "open_ms": if report.is_some() { side.open_ms } else { 0 },
                "reason": report.and_then(|r| r.reason.clone()),
                "queue": report.map(|r| r.queue),
                "got": report.map(|r| r.got),
                "alive": side.alive,
            }),
        );
    }
    let names = |of: fn(&Side) -> bool| -> Vec<&str> {
        std::iter::once(prefill)
            .chain(decodes)
            .filter(|side| of(side))
            .map(|side| side.name.as_str())
            .collect()
    };
    json!({"room": room.number, "scenario": room.scenario, "label": label, "begin_rt": room.begun,
           "pinned_sides": names(Side::open), "dead_sides": names(|side| !side.alive), "sides": sides})
}

/// What a scoring script is to hold the rooms of a scenario to: it allows what any of them allows.
#[derive(serde::Serialize)]
struct Rule {
    pin: Pin,
    class: Vec<&'static str>,
    /// `null` where nobody may owe.
    owed: Vec<Option<&'static str>>,
    /// A room need not be mentioned: its end is not on the wire.
    silent: bool,
}

impl Rule {
    fn new() -> Self {
        Self { pin: Pin::Never, class: Vec::new(), owed: Vec::new(), silent: false }
    }

    fn add(&mut self, room: &Expected, silent: bool) {
        self.pin = self.pin.max(room.pin);
        self.silent |= silent;
        let owed = room.owed.iter().map(|name| (*name != expect::NOBODY).then_some(*name));
        add(&mut self.class, room.class.iter().copied());
        add(&mut self.owed, owed);
    }
}

fn add<T: PartialEq>(to: &mut Vec<T>, from: impl IntoIterator<Item = T>) {
    for name in from {
        if !to.contains(&name) {
            to.push(name);
        }
    }
}

/// Whether a room of these is still open at a rank, or has not come there.
///
/// # Errors
/// When a rank does not answer.
pub(crate) fn open(fleet: &mut Fleet, rooms: &[Room]) -> Result<bool> {
    for rank in fleet.ranks.iter_mut().filter(|rank| rank.alive) {
        rank.report()?;
    }
    let open = |room: &Room, index: usize| {
        let rank = fleet.ranks.get(index);
        rank.is_some_and(|r| r.side(room.number, room.begun).report.is_none_or(|r| r.ended.is_none()))
    };
    Ok(rooms.iter().any(|room| open(room, room.prefill) || room.decodes.iter().any(|d| open(room, *d))))
}

/// Gives both sides a stream and returns the rooms that it makes.
///
/// # Errors
/// When a rank is gone.
pub(crate) fn stream(
    fleet: &mut Fleet,
    scenario: &'static str,
    prefills: &[usize],
    decodes: &[Vec<usize>],
    stream: &Stream,
) -> Result<Vec<Room>> {
    if fleet.router.is_some() {
        let servers = prefills.iter().map(|rank| fleet.prefill(*rank)).collect::<Result<_>>()?;
        let first = |engine: &Vec<usize>| Ok(fleet.http(*engine.first().context("no rank")?)?.server);
        let order = router::Order::Stream {
            stream: stream.clone(),
            prefills: servers,
            decodes: decodes.iter().map(first).collect::<Result<_>>()?,
        };
        fleet.router.as_mut().context("no router")?.tell(&order)?;
    } else {
        let of = |me: usize| Stream { me: me as u64, ..stream.clone() };
        for (me, rank) in prefills.iter().enumerate() {
            fleet.rank(*rank)?.tell(&Command::Stream(of(me)))?;
        }
        for (me, engine) in decodes.iter().enumerate() {
            for rank in engine {
                fleet.rank(*rank)?.tell(&Command::Stream(of(me)))?;
            }
        }
    }
    let index = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let room = |n| {
        let (prefill, decode) = stream.route(n);
        Room {
            number: stream.room(n),
            scenario,
            begun: stream.due(n),
            prefill: prefills.get(index(prefill)).copied().unwrap_or(usize::MAX),
            decodes: decodes.get(index(decode)).cloned().unwrap_or_default(),
        }
    };
    Ok((0..stream.count).map(room).collect())
}

/// Addresses by family: what a PULL socket binds and what its rank tells others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub bind: IpAddr,
    pub advertise: IpAddr,
}
