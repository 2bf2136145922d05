//! Finds the processes of engines in `/proc`. Reads nothing that needs a privilege: `comm`, `stat`, `cmdline`, `cgroup`
//! and `children` are open to all, also of other users' processes, unless `/proc` is mounted with `hidepid`.
//!
//! Bounded: [`MAX_FOUND`] processes, 64 KiB of a command line, [`MAX_WORKERS`] workers of a server.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read as _;
use std::path::PathBuf;

use super::pods::Pods;
use super::process::{self, Program, Server, Stat};
use crate::rooms::model::EngineProcess;

/// Engine processes of one host at most.
pub const MAX_FOUND: usize = 1024;

/// Longest command line that is read, bytes.
const LONGEST_CMDLINE: u64 = 64 << 10;

/// Longest of the other files that is read, bytes.
const LONGEST: u64 = 16 << 10;

/// Processes between a rank and its HTTP server at most (scheduler, data-parallel controller, fork server, server).
const MAX_DEPTH: usize = 8;

/// Processes below one HTTP server that are looked at beside its ranks, at most; `--tokenizer-worker-num` names a handful.
const MAX_WORKERS: usize = 128;

/// Threads of one process at most whose children are looked for.
const MAX_THREADS: usize = 1024;

/// So often are arguments and cgroup of a process read that stays the same: it takes its title and can be moved shortly
/// after its start. Reading them takes a lock in the process read, so not more often.
const READ_TIMES: u8 = 3;

/// The name that SGLang's router gives itself (sglang-router 0.3.2). It begins as an engine's does, but no rooms are its.
const ROUTER: &[u8] = b"sglang::router";

/// An engine's HTTP server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// Its process.
    pub pid: u32,
    /// What its arguments say; `None`: it is neither SGLang's own server nor a Python that has started one, so that it may
    /// serve no HTTP at all.
    pub server: Option<Server>,
}

/// What one look found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Engine processes by process id.
    pub processes: BTreeMap<u32, EngineProcess>,
    /// HTTP servers of engines, by process id.
    pub targets: Vec<Target>,
    /// Processes looked at.
    pub looked_at: u64,
    /// Engine processes beyond [`MAX_FOUND`], and servers with more than 128 workers.
    pub left_out: u64,
}

/// What is remembered of a process from one look to the next.
#[derive(Clone, Debug)]
struct Seen {
    stat: Stat,
    args: Vec<String>,
    place: crate::rooms::model::Place,
    read: u8,
    /// The look in which it was last read.
    look: u64,
}

/// The process at the top of an engine.
#[derive(Clone, Copy)]
struct Top {
    pid: u32,
    /// It is an engine's only because one of the engine's processes is its child.
    script: bool,
}

/// What a process below a server is to it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kin {
    /// It may serve the server's HTTP port.
    Worker,
    /// It serves nothing; what it starts may.
    Helper,
}

/// Looks through `/proc`.
#[derive(Debug)]
pub struct Scanner {
    /// Of `path`, how much is the directory.
    root: usize,
    prefixes: Vec<String>,
    seen: BTreeMap<u32, Seen>,
    looks: u64,
    path: String,
    text: Vec<u8>,
    pods: Pods,
}

impl Scanner {
    /// `root` is `/proc`; engines are processes whose name begins with one of `prefixes`.
    pub fn new(root: &str, prefixes: &[String]) -> Self {
        Self {
            root: root.len(),
            prefixes: prefixes.to_vec(),
            seen: BTreeMap::new(),
            looks: 0,
            path: root.to_owned(),
            text: Vec::new(),
            pods: Pods::default(),
        }
    }

    /// Also tells what pods are called, from this directory of the kubelet's.
    #[must_use]
    pub fn with_pod_names(mut self, directory: Option<PathBuf>) -> Self {
        self.pods = Pods::in_directory(directory);
        self
    }

    /// Looks once.
    ///
    /// # Errors
    ///
    /// That of reading the directory; a process that cannot be read, because it has just ended, is left out.
    pub fn look(&mut self) -> std::io::Result<Found> {
        self.looks = self.looks.wrapping_add(1);
        self.pods.begin();
        let mut found = Found::default();
        let mut ranks = Vec::new();
        for entry in std::fs::read_dir(self.path.get(..self.root).unwrap_or_default())? {
            let Some(pid) = entry.ok().and_then(|e| e.file_name().to_str()?.parse::<u32>().ok()) else {
                continue;
            };
            found.looked_at += 1;
            if self.is_engine(pid) {
                ranks.push(pid);
            }
        }
        ranks.sort_unstable();
        let mut needed = BTreeSet::new();
        // Those that tell which process is a server come first.
        let (below, others): (Vec<u32>, Vec<u32>) =
            ranks.into_iter().partition(|pid| self.is_below_server(*pid));
        for pid in below {
            self.find(pid, true, &mut found, &mut needed);
        }
        for pid in others {
            self.find(pid, false, &mut found, &mut needed);
        }
        for target in found.targets.clone() {
            self.find_workers(&target, &mut found, &mut needed);
        }
        self.seen.retain(|pid, _| needed.contains(pid));
        Ok(found)
    }

    /// Adds a process and its server. `below`: it cannot be without one.
    fn find(&mut self, pid: u32, below: bool, found: &mut Found, needed: &mut BTreeSet<u32>) {
        let known = |server: u32| below || found.targets.iter().any(|t| t.pid == server);
        let Some(Top { pid: top, script }) = self.top(pid, known, needed) else { return };
        let args = self.seen.get(&top).map(|s| s.args.as_slice()).unwrap_or_default();
        let server = match process::program(args) {
            Program::Sglang => Some(process::server(args)),
            _ if script => Some(self.script(top)),
            _ => None,
        };
        for pid in [top, pid] {
            let Some(process) = self.describe(pid, top, server.as_ref()) else { continue };
            if found.processes.len() >= MAX_FOUND && !found.processes.contains_key(&pid) {
                found.left_out += 1;
                return;
            }
            found.processes.insert(pid, process);
        }
        if !found.targets.iter().any(|t| t.pid == top) {
            found.targets.push(Target { pid: top, server });
        }
    }

    /// Adds the processes below a server that may serve its HTTP port in its stead (`--tokenizer-worker-num`): without them
    /// each would be taken for an engine of its own. Those with an engine's name are found by it already.
    fn find_workers(&mut self, target: &Target, found: &mut Found, needed: &mut BTreeSet<u32>) {
        // What is no Python has only taken a rank in, or is one: nothing below it serves HTTP.
        let Some(server) = &target.server else { return };
        let mut parents = vec![target.pid];
        let mut next = 0;
        while let Some(parent) = parents.get(next).copied() {
            next += 1;
            for child in self.children(parent) {
                if found.processes.contains_key(&child) || parents.contains(&child) {
                    continue;
                }
                let Some(kin) = self.kin(child, parent) else { continue };
                if parents.len() > MAX_WORKERS {
                    found.left_out += 1;
                    return;
                }
                if kin == Kin::Worker {
                    let Some(process) = self.describe(child, target.pid, Some(server)) else { continue };
                    if found.processes.len() >= MAX_FOUND {
                        found.left_out += 1;
                        return;
                    }
                    // Whatever its name looks like, a rank would have been found by it.
                    found.processes.insert(child, EngineProcess { ranks: None, ..process });
                }
                needed.insert(child);
                parents.push(child);
            }
        }
    }

    /// What a child of a server, or of a process below it, is to it: what was forked runs on with its parent's arguments, what
    /// `multiprocessing` has spawned names it. `None`: whatever it has started besides (compilers, shells).
    fn kin(&mut self, child: u32, parent: u32) -> Option<Kin> {
        self.know(child)?;
        let (seen, above) = (self.seen.get(&child)?, self.seen.get(&parent)?);
        let named = seen.stat.comm.as_bytes() == ROUTER || self.is_named(seen.stat.comm.as_bytes());
        if seen.stat.parent != parent || seen.place != above.place || named {
            return None;
        }
        match process::program(&seen.args) {
            Program::Spawned => Some(Kin::Worker),
            _ if !seen.args.is_empty() && seen.args == above.args => Some(Kin::Worker),
            Program::Helper => Some(Kin::Helper),
            Program::Sglang | Program::Python | Program::Other => None,
        }
    }

    /// Children of a process, as each of its threads has them, and those that it had: the kernel's list leaves one out now and
    /// then while others end (`proc_pid_children(5)`). There is none where the kernel was built without it.
    fn children(&mut self, pid: u32) -> BTreeSet<u32> {
        use std::fmt::Write as _;
        let known = self.seen.iter().filter(|(_, s)| s.stat.parent == pid).map(|(child, _)| *child);
        let mut all: BTreeSet<u32> = known.collect();
        self.path.truncate(self.root);
        if write!(self.path, "/{pid}/task").is_err() {
            return all;
        }
        let Ok(threads) = std::fs::read_dir(&self.path) else { return all };
        for thread in threads.take(MAX_THREADS).flatten() {
            let Some(tid) = thread.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
                continue;
            };
            if self.read(pid, &format!("task/{tid}/children"), LONGEST).is_none() {
                continue;
            }
            let text = String::from_utf8_lossy(&self.text);
            all.extend(text.split_ascii_whitespace().filter_map(|child| child.parse::<u32>().ok()));
        }
        all
    }

    fn describe(&mut self, pid: u32, top: u32, server: Option<&Server>) -> Option<EngineProcess> {
        let seen = self.seen.get(&pid)?;
        let mut place = seen.place.clone();
        if let (Some(container), Some(_)) = (&place.container, &place.pod_uid) {
            place.name = self.pods.name(container);
        }
        Some(EngineProcess {
            pid,
            server: top,
            started: seen.stat.started,
            comm: seen.stat.comm.clone(),
            role: server.and_then(|s| s.role),
            ranks: seen.args.first().and_then(|title| process::ranks(title)),
            http_port: server.and_then(|s| s.port),
            bootstrap_port: server.and_then(|s| s.bootstrap_port),
            place,
            ib_devices: server.map(|s| s.ib_devices.clone()).unwrap_or_default(),
        })
    }

    /// What a script says that has started an engine within itself.
    fn script(&self, pid: u32) -> Server {
        self.seen.get(&pid).map(|s| process::script(&s.args)).unwrap_or_default()
    }

    /// Whether this process starts only below an engine's server.
    fn is_below_server(&mut self, pid: u32) -> bool {
        if self.know(pid).is_none() {
            return false;
        }
        let Some(seen) = self.seen.get(&pid) else { return false };
        process::is_below_server(seen.args.first().map_or(seen.stat.comm.as_str(), String::as_str))
    }

    /// The process at the top of this one's engine: the last ancestor that is of the engine by its name, or runs SGLang, in
    /// the same container; where none runs SGLang, the Python above them, if it `is_server`. `None`: the process is gone.
    fn top(&mut self, pid: u32, is_server: impl Fn(u32) -> bool, needed: &mut BTreeSet<u32>) -> Option<Top> {
        self.know(pid)?;
        needed.insert(pid);
        let (mut top, mut at) = (pid, pid);
        // Whether SGLang's own server was met, and else the Python next above what is of the engine.
        let (mut sglang, mut python) = (false, None);
        for _ in 0..MAX_DEPTH {
            let Some(parent) = self.seen.get(&at).map(|s| s.stat.parent).filter(|p| *p > 0) else { break };
            if self.know(parent).is_none() {
                break;
            }
            let (Some(child), Some(seen)) = (self.seen.get(&pid), self.seen.get(&parent)) else { break };
            match process::program(&seen.args) {
                _ if seen.place != child.place => break,
                Program::Sglang => (top, sglang) = (parent, true),
                _ if self.is_named(seen.stat.comm.as_bytes()) => (top, python) = (parent, None),
                Program::Helper => {}
                Program::Spawned => _ = python.get_or_insert(parent),
                Program::Python => {
                    needed.insert(parent);
                    python.get_or_insert(parent);
                    break;
                }
                Program::Other => break,
            }
            needed.insert(parent);
            at = parent;
        }
        let script = python.filter(|pid| !sglang && is_server(*pid));
        Some(Top { pid: script.unwrap_or(top), script: script.is_some() })
    }

    /// Whether a process's name is an engine's.
    fn is_named(&self, comm: &[u8]) -> bool {
        comm != ROUTER && self.prefixes.iter().any(|prefix| comm.starts_with(prefix.as_bytes()))
    }

    /// Reads a process, or what has changed of it since the last look. `None`: there is none.
    fn know(&mut self, pid: u32) -> Option<()> {
        if self.seen.get(&pid).is_some_and(|s| s.look == self.looks) {
            return Some(());
        }
        self.read(pid, "stat", LONGEST)?;
        let stat = process::stat(&self.text)?;
        let mut read = 0;
        if let Some(before) = self.seen.get_mut(&pid).filter(|s| s.stat == stat) {
            before.look = self.looks;
            read = before.read;
        }
        if read >= READ_TIMES {
            return Some(());
        }
        let args = self.read(pid, "cmdline", LONGEST_CMDLINE).map(|()| process::arguments(&self.text));
        let cgroup = self.read(pid, "cgroup", LONGEST);
        let place = cgroup.map(|()| process::place(&String::from_utf8_lossy(&self.text))).unwrap_or_default();
        let args = args.unwrap_or_default();
        self.seen.insert(pid, Seen { stat, args, place, read: read.saturating_add(1), look: self.looks });
        Some(())
    }

    /// Runs for every process of the host: one short read.
    fn is_engine(&mut self, pid: u32) -> bool {
        let Some(mut file) = self.open(pid, "comm") else { return false };
        let mut name = [0; 32];
        let Ok(read) = file.read(&mut name) else { return false };
        self.is_named(name.get(..read).unwrap_or_default().trim_ascii_end())
    }

    /// Reads one file of a process into `text`.
    fn read(&mut self, pid: u32, file: &str, longest: u64) -> Option<()> {
        let file = self.open(pid, file)?;
        self.text.clear();
        file.take(longest).read_to_end(&mut self.text).ok()?;
        Some(())
    }

    fn open(&mut self, pid: u32, file: &str) -> Option<File> {
        use std::fmt::Write as _;
        self.path.truncate(self.root);
        write!(self.path, "/{pid}/{file}").ok()?;
        File::open(&self.path).ok()
    }
}
