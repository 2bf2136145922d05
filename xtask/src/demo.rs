//! `cargo xtask demo`: a real agent on a workload over the real libzmq, with pinned rooms; what was expected against what was
//! found. Ends with 0 only if they agree.
//!
//! Without root or BPF the same workload is shown from a packet capture that lies beside this file. Opens nothing
//! but loopback ports; writes to `demo` in cargo's target directory only (and Debian packages, where the live demo misses them).

mod compare;
mod show;

use std::fs::File;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::agent::{Agent, Start, terminate};
use crate::install;
use crate::workload::{self, Workload};

/// How long a replayed capture runs on after its last packet.
const EXTEND: &str = "30s";

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Show the bundled capture instead of a live run.
    #[arg(long)]
    replay: bool,
    /// Record the bundled capture anew (needs root and tcpdump), then end.
    #[arg(long, conflicts_with = "replay")]
    record: bool,
    /// Start the agent only when the engines' connections are open already.
    #[arg(long, conflicts_with_all = ["replay", "record"])]
    late: bool,
    /// Use this agent instead of building one.
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
}

/// Where things are.
struct Places {
    /// Results of this run.
    dir: PathBuf,
    /// The checked-in capture and its truth.
    bundle: PathBuf,
    /// The agent, when it need not be built.
    given: Option<PathBuf>,
}

impl Places {
    fn new(given: Option<PathBuf>, name: &str) -> Result<Self> {
        let dir = install::target().join(name);
        install::empty(&dir)?;
        Ok(Self { bundle: install::root().join("xtask/demo"), dir, given })
    }

    fn agent(&self) -> PathBuf {
        self.given.clone().unwrap_or_else(|| install::target().join("release/roomtrace"))
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

/// Runs it.
pub(crate) fn run(args: &Args) -> Result<()> {
    let places = Places::new(args.agent.clone(), "demo")?;
    if args.record {
        return record(&places);
    }
    demo(&places, args).map(drop)
}

/// Runs it as one of the tests. Returns what could not be shown live, with the reason.
pub(crate) fn as_test() -> Result<Vec<String>> {
    test(false, "demo")
}

/// The same, with an agent that comes when the connections are open.
pub(crate) fn late_as_test() -> Result<Vec<String>> {
    test(true, "demo-late")
}

fn test(late: bool, name: &str) -> Result<Vec<String>> {
    let args = Args { replay: false, record: false, late, agent: None };
    let not_live = demo(&Places::new(None, name)?, &args)?;
    Ok(not_live.map(|why| format!("{name}, live part: {why}")).into_iter().collect())
}

/// Returns why it was not live.
fn demo(places: &Places, args: &Args) -> Result<Option<String>> {
    let not_live =
        if args.replay { Some("asked for the bundled capture".to_owned()) } else { cannot_be_live() };
    build(places, not_live.is_none())?;
    let why = match not_live {
        Some(why) => why,
        None => match live(places, args.late)? {
            Live::Shown => return Ok(None),
            Live::NotPossible(why) => why,
        },
    };
    eprintln!("not live: {why}\nshowing a capture of the same workload instead");
    replay(places)?;
    Ok(Some(why))
}

/// What is plain before anything is built.
fn cannot_be_live() -> Option<String> {
    let uid = install::output(Command::new("id").arg("-u")).unwrap_or_default();
    (uid.trim() != "0").then(|| "loading BPF programs needs root".to_owned())
}

fn build(places: &Places, with_workload: bool) -> Result<()> {
    // The first time that takes minutes, so cargo tells how far it is.
    if with_workload {
        eprintln!("building the engines");
        workload::build_telling()?;
    }
    if places.given.is_some() {
        return Ok(());
    }
    eprintln!("building the agent");
    install::cargo(&["build", "--release", "--package", "roomtrace"])
}

enum Live {
    Shown,
    NotPossible(String),
}

fn start(places: &Places) -> Result<Start> {
    Agent::start(&places.agent(), &[], &places.file("events.jsonl"), &places.file("agent.log"))
}

fn live(places: &Places, late: bool) -> Result<Live> {
    let mut agent = None;
    if !late {
        match start(places)? {
            Start::Observing(started) => agent = Some(started),
            Start::NotPossible(why) => return Ok(Live::NotPossible(why)),
        }
    }
    eprintln!("running 11 engines and a router over HTTP and libzmq, for about half a minute");
    let mut workload = Workload::open(&["demo"], &places.dir)?;
    let agent = match agent {
        Some(agent) => agent,
        None => match start(places)? {
            Start::Observing(started) => started,
            Start::NotPossible(why) => return Ok(Live::NotPossible(why)),
        },
    };
    let sums = workload.results()?;
    let truth = workload.truth()?;
    // Asked before anything ends: the end of a process is an event too.
    let events = || std::fs::read_to_string(places.file("events.jsonl")).context("read the agent's events");
    let so_far = events()?;
    // The last line may be half written.
    let whole = so_far.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let first = compare::compare(&truth, whole, late)?;
    let page = first.to_explain().map(|room| (room.to_owned(), explain(&agent, places, room)));
    agent.stop()?;
    let result = compare::compare(&truth, &events()?, late)?;
    workload.end()?;
    let shown = page.as_ref().and_then(|(room, page)| Some((room.as_str(), page.as_ref().ok()?.as_str())));
    show::result(&result, &format!("live, {sums}"), shown);
    conclude(&result, places)?;
    page.map(|(_, page)| page).transpose()?;
    Ok(Live::Shown)
}

fn replay(places: &Places) -> Result<()> {
    let capture = places.bundle.join("capture.pcap");
    let truth = places.bundle.join("truth.jsonl");
    let truth = std::fs::read_to_string(&truth).with_context(|| format!("read {}", truth.display()))?;
    let (events, log) = (places.file("events.jsonl"), places.file("agent.log"));
    let command = |explain: Option<&str>| {
        let mut command = Command::new(places.agent());
        command.arg("replay").arg(&capture).arg("--events").arg(&events).args(["--extend", EXTEND]);
        command.args(explain.map(|room| ["--explain", room]).into_iter().flatten());
        command
    };
    let done = command(None)
        .stderr(File::create(&log)?)
        .stdout(Stdio::null())
        .status()
        .context("start the agent")?;
    if !done.success() {
        bail!("the agent's replay ended with {done}; see {}", log.display());
    }
    let result = compare::compare(
        &truth,
        &std::fs::read_to_string(&events).context("read the agent's events")?,
        false,
    )?;
    let page = match result.to_explain() {
        Some(room) => Some((room.to_owned(), install::output(&mut command(Some(room)))?)),
        None => None,
    };
    show::result(
        &result,
        "from the bundled capture",
        page.as_ref().map(|(room, text)| (room.as_str(), text.as_str())),
    );
    conclude(&result, places)
}

fn conclude(result: &compare::Comparison, places: &Places) -> Result<()> {
    match result.wrong() {
        0 => Ok(()),
        n => bail!(
            "the agent and the engines disagree on {n} rooms; everything is in {}",
            places.dir.display()
        ),
    }
}

/// Records `xtask/demo/capture.pcap` and its truth.
fn record(places: &Places) -> Result<()> {
    install::debian(&["tcpdump"])?;
    build(places, true)?;
    let (all, log) = (places.file("all.pcap"), File::create(places.file("tcpdump.log"))?);
    let mut tcpdump = Command::new("tcpdump")
        .args(["-i", "lo", "-U", "-Z", "root", "-w"])
        .arg(&all)
        .arg("tcp")
        .stderr(log)
        .spawn()
        .context("start tcpdump")?;
    std::thread::sleep(Duration::from_secs(1));
    // A capture of the ranks' ports: no threads and no requests.
    let mut workload = Workload::open(&["demo", "--wire", "--rate", "5"], &places.dir)?;
    eprintln!("recorded: {}", workload.results()?);
    std::thread::sleep(Duration::from_millis(500));
    terminate(&mut tcpdump)?;
    let ports: Vec<String> = workload.ports()?.iter().map(|port| format!("port {port}")).collect();
    let truth = workload.truth()?;
    workload.end()?;
    std::fs::create_dir_all(&places.bundle)?;
    // The control ports only: KV bytes go elsewhere.
    install::run(
        Command::new("tcpdump")
            .args(["-Z", "root", "-r"])
            .arg(&all)
            .arg("-w")
            .arg(places.bundle.join("capture.pcap"))
            .arg(ports.join(" or ")),
    )?;
    std::fs::write(places.bundle.join("truth.jsonl"), compare::rooms_only(&truth)?)?;
    std::fs::copy(places.file("expect.json"), places.bundle.join("expect.json"))?;
    Ok(())
}

/// The page of one room, as a person would ask for it.
fn explain(agent: &Agent, places: &Places, room: &str) -> Result<String> {
    let page = install::output(Command::new(places.agent()).args(["explain", room, "--api", &agent.api()]))?;
    if !page.contains(room) {
        bail!("`roomtrace explain {room}` says nothing of a room that is pinned: {page:?}");
    }
    Ok(page)
}
