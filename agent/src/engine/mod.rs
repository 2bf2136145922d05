//! What engines say of themselves: their processes in the host's process table, and their load at their own HTTP port.
//!
//! Two threads do it, apart from the one that observes: one looks through `/proc`, one asks. What they find goes over one
//! bounded channel; neither ever waits for the other side. Asking only ever connects to addresses of this machine.

mod answers;
mod ask;
mod listeners;
pub mod mooncake;
pub mod otlp;
mod pods;
mod process;
mod scan;

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

pub use process::Server;
pub use scan::{Found, MAX_FOUND, Scanner, Target};

use crate::rooms::model::{EngineGauges, EngineProcess};

/// How often `/proc` is looked through.
const LOOK: Duration = Duration::from_secs(5);

/// The same when somebody asks for it, at the shortest.
const LOOK_SOON: Duration = Duration::from_millis(500);

/// How often it is seen whether an engine is to be asked.
const TURN: Duration = Duration::from_millis(250);

/// How long an engine is asked every [`EVERY_FRESH`]: a request that was there before the agent is to be found within a minute,
/// and its count must have been looked at for 45 s of that.
const FRESH: Duration = Duration::from_mins(1);
/// See [`FRESH`].
const EVERY_FRESH: Duration = Duration::from_secs(5);

/// The same when somebody wants to know, at the shortest.
const EVERY_SOON: Duration = Duration::from_secs(1);

/// Reports that wait at most.
const REPORTS: usize = 4 * MAX_FOUND;

/// What to look for and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Prefixes of process names that are engines.
    pub prefixes: Vec<String>,
    /// How often each engine is asked; `None`: never.
    pub ask_every: Option<Duration>,
    /// `/proc`, or what stands for it.
    pub proc: String,
    /// Where the kubelet names the containers' logs; `None`: pods are known by their uid alone.
    pub pod_names: Option<PathBuf>,
}

/// What was found.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// An engine process is there that was not, or is not as it was.
    Process(EngineProcess),
    /// It is gone.
    Gone(u32),
    /// What an engine says of itself, or why it could not be asked.
    Gauges(EngineGauges),
}

/// What is known of the work itself, for `/status`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Standing {
    /// Looks through `/proc`.
    pub looks: u64,
    /// How long the last one took, and all of them.
    pub look_took: Duration,
    /// See [`Self::look_took`].
    pub looks_took: Duration,
    /// Processes on the host at the last look.
    pub looked_at: u64,
    /// Why the last look failed.
    pub look_error: Option<String>,
    /// Engine processes left out because there were too many.
    pub left_out: u64,
    /// Reports that found no place; they come again with the next look or question.
    pub reports_held: u64,
    /// What each engine said last, by the process that serves its HTTP port.
    pub asked: BTreeMap<u32, EngineGauges>,
}

/// The threads, and what they find. Dropping it ends them, at the latest when the question under way is answered.
#[derive(Debug)]
pub struct Engines {
    reports: Receiver<Report>,
    look: SyncSender<()>,
    asking: Option<SyncSender<()>>,
    shared: Arc<Mutex<Shared>>,
}

#[derive(Debug, Default)]
struct Shared {
    standing: Standing,
    targets: Vec<Target>,
}

fn with<T>(shared: &Mutex<Shared>, of: impl FnOnce(&mut Shared) -> T) -> T {
    of(&mut shared.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Engines {
    /// Starts looking. Threads inherit the privileges of the caller: none is needed.
    ///
    /// # Errors
    ///
    /// That of starting a thread.
    pub fn start(settings: &Settings) -> std::io::Result<Self> {
        let (send, reports) = mpsc::sync_channel(REPORTS);
        let (look, looks) = mpsc::sync_channel(1);
        let shared = Arc::new(Mutex::new(Shared::default()));
        let thread = |name: &str| std::thread::Builder::new().name(name.to_owned());
        let asking = match settings.ask_every {
            Some(every) => {
                let (alive, ended) = mpsc::sync_channel(1);
                let asker = Asker {
                    proc: settings.proc.clone(),
                    every,
                    shared: Arc::clone(&shared),
                    reports: send.clone(),
                };
                thread("roomtrace-ask").spawn(move || asker.run(&ended))?;
                Some(alive)
            }
            None => None,
        };
        let scanner =
            Scanner::new(&settings.proc, &settings.prefixes).with_pod_names(settings.pod_names.clone());
        let looker = Looker { scanner, told: BTreeMap::new(), shared: Arc::clone(&shared), reports: send };
        thread("roomtrace-look").spawn(move || looker.run(&looks))?;
        Ok(Self { reports, look, asking, shared })
    }

    /// What was found since the last call, in order.
    pub fn reports(&self) -> impl Iterator<Item = Report> + '_ {
        self.reports.try_iter()
    }

    /// Looks again soon: a process has shown itself that is not known.
    pub fn look_soon(&self) {
        // One that waits already is enough.
        let _ = self.look.try_send(());
    }

    /// Asks every engine soon, whatever its turn: a verdict waits for what it says of this moment.
    pub fn ask_soon(&self) {
        if let Some(asking) = &self.asking {
            let _ = asking.try_send(());
        }
    }

    /// How the work stands.
    pub fn standing(&self) -> Standing {
        with(&self.shared, |s| s.standing.clone())
    }
}

struct Looker {
    scanner: Scanner,
    /// What was reported.
    told: BTreeMap<u32, EngineProcess>,
    shared: Arc<Mutex<Shared>>,
    reports: SyncSender<Report>,
}

impl Looker {
    fn run(mut self, asked: &Receiver<()>) {
        loop {
            let began = Instant::now();
            if !self.look() {
                return;
            }
            match asked.recv_timeout(LOOK) {
                Ok(()) => std::thread::sleep(LOOK_SOON.saturating_sub(began.elapsed())),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Looks once and reports what is new; `false`: nobody listens any more.
    fn look(&mut self) -> bool {
        let began = Instant::now();
        let result = self.scanner.look();
        let took = began.elapsed();
        let mut held = 0;
        let mut listens = true;
        let found = result.as_ref().ok();
        if let Some(found) = found {
            let gone = self
                .told
                .iter()
                .filter(|(pid, was)| found.processes.get(*pid).is_none_or(|is| is.started != was.started));
            let gone: Vec<u32> = gone.map(|(pid, _)| *pid).collect();
            for pid in gone {
                if report(&self.reports, Report::Gone(pid), &mut held, &mut listens) {
                    self.told.remove(&pid);
                }
            }
            for (pid, process) in &found.processes {
                if self.told.get(pid) != Some(process)
                    && report(&self.reports, Report::Process(process.clone()), &mut held, &mut listens)
                {
                    self.told.insert(*pid, process.clone());
                }
            }
        }
        with(&self.shared, |shared| {
            let standing = &mut shared.standing;
            standing.looks += 1;
            standing.look_took = took;
            standing.looks_took += took;
            standing.reports_held += held;
            standing.look_error = result.as_ref().err().map(ToString::to_string);
            if let Some(found) = found {
                standing.looked_at = found.looked_at;
                standing.left_out = found.left_out;
                standing.asked.retain(|pid, _| found.processes.contains_key(pid));
                shared.targets.clone_from(&found.targets);
            }
        });
        listens
    }
}

/// Hands a report on; `false`: it found no place.
fn report(to: &SyncSender<Report>, report: Report, held: &mut u64, listens: &mut bool) -> bool {
    match to.try_send(report) {
        Ok(()) => return true,
        Err(TrySendError::Full(_)) => *held += 1,
        Err(TrySendError::Disconnected(_)) => *listens = false,
    }
    false
}

/// When an engine was last asked, and how often in a row it has left that without an answer.
#[derive(Clone, Copy)]
struct Asked {
    at: Instant,
    silent: u32,
    /// When it was asked first.
    first: Instant,
}

impl Asked {
    /// Until the next question. One that hangs does not even take up the connections that wait for it, and the place for
    /// those is bounded: it is asked ever more rarely, up to every 16 times as long, whoever wants to know `soon`.
    fn pause(self, every: Duration, soon: bool) -> Duration {
        let answers = self.silent == 0;
        let every = match self.at.duration_since(self.first) < FRESH {
            _ if answers && soon => every.min(EVERY_SOON),
            true if answers => every.min(EVERY_FRESH),
            _ => every,
        };
        every.saturating_mul(1 << self.silent.saturating_sub(1).min(4))
    }
}

struct Asker {
    proc: String,
    every: Duration,
    shared: Arc<Mutex<Shared>>,
    reports: SyncSender<Report>,
}

impl Asker {
    /// Until nobody holds the other end of `wanted`, on which comes that an answer is wanted soon.
    fn run(self, wanted: &Receiver<()>) {
        let mut asked: HashMap<u32, Asked> = HashMap::new();
        let mut soon = None;
        loop {
            match wanted.recv_timeout(TURN) {
                Ok(()) => soon = Some(Instant::now()),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let targets = with(&self.shared, |s| s.targets.clone());
            asked.retain(|pid, _| targets.iter().any(|t| t.pid == *pid));
            for target in targets {
                let before = asked.get(&target.pid).copied();
                let soon = soon.is_some_and(|since| before.is_none_or(|a| a.at < since));
                if before.is_some_and(|a| a.at.elapsed() < a.pause(self.every, soon)) {
                    continue;
                }
                let at = Instant::now();
                let Some(answered) = self.ask(&target) else { return };
                let hangs = !answered && at.elapsed() >= ask::DEADLINE;
                let silent = if hangs { before.map_or(1, |a| a.silent.saturating_add(1)) } else { 0 };
                let first = before.map_or(at, |a| a.first);
                asked.insert(target.pid, Asked { at, silent, first });
            }
        }
    }

    /// Asks one engine: whether it answered. `None`: nobody listens any more.
    fn ask(&self, target: &Target) -> Option<bool> {
        let address = address(Path::new(&self.proc), target);
        let answer = address.clone().and_then(ask::gauges);
        let gauges = match answer {
            Ok(gauges) => EngineGauges { server: target.pid, address: address.clone().ok(), ..gauges },
            Err(why) => EngineGauges {
                server: target.pid,
                error: Some(why),
                address: address.ok(),
                ..EngineGauges::default()
            },
        };
        let answered = gauges.error.is_none();
        let (mut held, mut listens) = (0, true);
        report(&self.reports, Report::Gauges(gauges.clone()), &mut held, &mut listens);
        with(&self.shared, |shared| {
            let standing = &mut shared.standing;
            standing.reports_held += held;
            standing.asked.insert(target.pid, gauges);
        });
        listens.then_some(answered)
    }
}

fn address(proc: &Path, target: &Target) -> Result<SocketAddr, String> {
    match &target.server {
        Some(Server { port: Some(port), host, .. }) => {
            listeners::address(proc, target.pid, host.as_deref(), *port)
        }
        Some(_) => Err("its HTTP port is not known: it was started by a script of its own, whose arguments name no --port. \
                        Name it there to have the engine's counts asked for; its requests are read all the same"
            .to_owned()),
        None => Err("its HTTP server is not known: the process at its top is no Python that could have started it"
            .to_owned()),
    }
}

/// Engine processes of this host now, for `doctor`.
///
/// # Errors
///
/// That of reading `/proc`.
pub fn look_once(prefixes: &[String], pod_names: Option<PathBuf>) -> std::io::Result<Found> {
    Scanner::new("/proc", prefixes).with_pod_names(pod_names).look()
}

/// Why processes of this host may not be seen in `/proc`, as a sentence for the operator; `None`: nothing stands in the way.
pub fn obstacle(proc: &Path) -> Option<String> {
    let namespace = std::fs::read_link(proc.join("self/ns/pid")).ok();
    // The first of all namespaces has this number (kernel: `PROC_PID_INIT_INO`, include/linux/proc_ns.h).
    if namespace.is_some_and(|n| n != Path::new("pid:[4026531836]")) {
        return Some(
            "the agent runs in a process namespace of its own (in Kubernetes: set hostPID)".to_owned(),
        );
    }
    let mounts = std::fs::read_to_string(proc.join("self/mounts")).ok()?;
    hides(&mounts).then(|| "/proc is mounted with hidepid: give the agent one without".to_owned())
}

/// Whether `/proc` hides processes of others (`proc(5)`), in the form of `/proc/self/mounts`.
fn hides(mounts: &str) -> bool {
    let mut last = false;
    for line in mounts.lines() {
        let fields: Vec<&str> = line.split(' ').take(4).collect();
        if let [_, "/proc", "proc", options] = fields.as_slice() {
            last = options
                .split(',')
                .filter_map(|o| o.strip_prefix("hidepid="))
                .any(|v| !matches!(v, "0" | "off"));
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_does_not_answer_is_asked_ever_more_rarely() {
        let first = Instant::now();
        let pause = |silent, s, soon| {
            Asked { at: first + Duration::from_secs(s), silent, first }
                .pause(Duration::from_secs(15), soon)
                .as_secs()
        };
        assert_eq!([0, 1, 2, 3, 5, 99].map(|silent| pause(silent, 60, false)), [15, 15, 30, 60, 240, 240]);
        assert_eq!(
            [(0, 0), (0, 59), (1, 0)].map(|(silent, s)| pause(silent, s, false)),
            [5, 5, 15],
            "a new one"
        );
        assert_eq!([0, 1, 2, 99].map(|silent| pause(silent, 60, true)), [1, 15, 30, 240], "wanted soon");
        assert_eq!(pause(0, 0, true), 1);
    }

    #[test]
    fn a_proc_that_hides_is_known() {
        assert!(hides("proc /proc proc rw,nosuid,hidepid=2 0 0\n"));
        assert!(hides("x / ext4 rw 0 0\nproc /proc proc rw,hidepid=invisible,gid=7 0 0\n"));
        assert!(!hides("proc /proc proc rw,hidepid=off 0 0\n"));
        assert!(!hides("proc /proc proc rw 0 0\nproc /chroot/proc proc rw,hidepid=2 0 0\n"));
        assert!(!hides("") && !hides("/proc"));
    }
}
