//! Starts rank processes, speaks with them, and writes down at the end what they say of their rooms.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command as Process, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::expect::{self, Expected, Pin, Side};
use crate::rank::{self, Command, Event, RANK_VARIABLE, RankConfig, RoomReport, Stream, now};
use crate::status::KvPoll;

/// How long a rank may take to start, and to tell all its rooms.
const PATIENCE: Duration = Duration::from_mins(1);

/// A rank process.
pub(crate) struct Rank {
    pub config: RankConfig,
    pub port: u16,
    pub ip: String,
    pub pid: u32,
    pub session: String,
    pub alive: bool,
    child: Child,
    input: ChildStdin,
    events: mpsc::Receiver<Event>,
    statuses: HashMap<u64, KvPoll>,
    aborts: Vec<u64>,
    reports: HashMap<u64, RoomReport>,
    dead_threads: Vec<String>,
}

impl Rank {
    /// Starts a rank and waits until it is ready.
    ///
    /// # Errors
    /// When it does not come up; its own message is on standard error or in `log`.
    pub(crate) fn start(config: RankConfig, log: &Path) -> Result<Self> {
        let file = File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("open {}", log.display()))?;
        let mut child = Process::new(std::env::current_exe().context("find this program")?)
            .arg0(rank::title(&config))
            .env(RANK_VARIABLE, "1")
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .context("start a rank")?;
        let mut input = child.stdin.take().context("a rank without input")?;
        let output = child.stdout.take().context("a rank without output")?;
        writeln!(input, "{}", serde_json::to_string(&config)?)?;
        let (sender, events) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Ok(event) = serde_json::from_str(&line)
                    && sender.send(event).is_err()
                {
                    break;
                }
            }
        });
        let Ok(Event::Ready { ip, port, session, pid }) = events.recv_timeout(PATIENCE) else {
            bail!("rank {} did not come up; see {}", config.name, log.display());
        };
        Ok(Self {
            config,
            port,
            ip,
            pid,
            session,
            alive: true,
            child,
            input,
            events,
            statuses: HashMap::new(),
            aborts: Vec::new(),
            reports: HashMap::new(),
            dead_threads: Vec::new(),
        })
    }

    /// Sends a command.
    ///
    /// # Errors
    /// When the rank is gone.
    pub(crate) fn tell(&mut self, command: &Command) -> Result<()> {
        writeln!(self.input, "{}", serde_json::to_string(command)?)
            .with_context(|| format!("{} is gone", self.config.name))
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
            Event::Ready { .. } => {}
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
        self.wait(Duration::from_secs(10), |rank| rank.statuses.get(&room) == Some(&state))
    }

    /// Waits until ABORT for a room has been sent.
    pub(crate) fn has_aborted(&mut self, room: u64) -> bool {
        self.wait(Duration::from_secs(10), |rank| rank.aborts.contains(&room))
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
                Ok(event @ Event::Reported { .. }) => {
                    self.take(event);
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
    /// When it cannot be killed.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.report()?;
        self.child.kill().with_context(|| format!("kill {}", self.config.name))?;
        self.child.wait()?;
        self.alive = false;
        Ok(())
    }

    fn side(&self, room: u64, begun: u64) -> Side {
        let report = self.reports.get(&room).cloned();
        let end = report.as_ref().and_then(|report| report.ended).unwrap_or_else(now);
        Side {
            name: self.config.name.clone(),
            alive: self.alive,
            report,
            open_ms: end.saturating_sub(begun) / 1_000_000,
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.tell(&Command::Quit);
        let end = Instant::now() + Duration::from_secs(2);
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
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

    /// Names the ranks in the truth file and in `ready`, then waits for `go` to exist.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub(crate) fn ready(&mut self, ranks: &[Rank], files: &Files) -> Result<()> {
        let procs: Vec<Value> = ranks
            .iter()
            .map(|rank| {
                json!({"name": rank.config.name, "pid": rank.pid, "ip": rank.ip, "rank_port": rank.port,
                       "session": rank.session, "engine": rank.config.engine, "tp": rank.config.tp})
            })
            .collect();
        let ports: Vec<u16> = ranks.iter().map(|rank| rank.port).collect();
        let value = json!({"driver": std::process::id(), "truth": self.dir.join("truth.jsonl"), "rank_ports": ports, "procs": procs});
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
    pub(crate) fn finish(mut self, ranks: &mut [Rank], rooms: &[Room], files: &Files) -> Result<Summary> {
        self.put("load_end", json!({}))?;
        for rank in ranks.iter_mut().filter(|rank| rank.alive) {
            rank.report()?;
            let state = json!({"role": rank.config.name, "pid": rank.pid, "dead_threads": rank.dead_threads});
            self.put("engine", state)?;
        }
        let mut summary = Summary::default();
        let mut rules: BTreeMap<&str, Rule> = BTreeMap::new();
        for room in rooms {
            let Some(rank) = ranks.get(room.prefill) else { continue };
            let prefill = rank.side(room.number, room.begun);
            let told_on_wire = rank.config.engine.tells_success();
            let decodes: Vec<Side> = room
                .decodes
                .iter()
                .filter_map(|i| ranks.get(*i))
                .map(|r| r.side(room.number, room.begun))
                .collect();
            let label = label(&prefill, &decodes, told_on_wire);
            let expected = expect::expected(&prefill, &decodes);
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
    owed: Vec<&'static str>,
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
        for (to, from) in [(&mut self.class, &room.class), (&mut self.owed, &room.owed)] {
            to.extend(from.iter().filter(|name| !to.contains(name)).copied().collect::<Vec<_>>());
        }
    }
}

/// Gives both sides a stream and returns the rooms that it makes.
///
/// # Errors
/// When a rank is gone.
pub(crate) fn stream(
    ranks: &mut [Rank],
    scenario: &'static str,
    prefills: &[usize],
    decodes: &[Vec<usize>],
    stream: &Stream,
) -> Result<Vec<Room>> {
    let of = |me: usize| Stream { me: me as u64, ..stream.clone() };
    for (me, rank) in prefills.iter().enumerate() {
        ranks.get_mut(*rank).context("no such rank")?.tell(&Command::Stream(of(me)))?;
    }
    for (me, engine) in decodes.iter().enumerate() {
        for rank in engine {
            ranks.get_mut(*rank).context("no such rank")?.tell(&Command::Stream(of(me)))?;
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
