//! Engines as their host has them: which processes belong together, where they run, what they say of themselves, and
//! the findings that follow from it.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: `MAX_PROCESSES` processes and as many engines; more are counted.
//! Queue counts against rooms: `gauges`; engines of which nothing can be read: `blind`.

mod blind;
mod gauges;
mod held;

use std::net::SocketAddr;
use std::sync::Arc;

use hashbrown::HashMap;

use crate::event::{Comm, Mono, SECOND, Task};
use crate::rooms::findings::cause;
use crate::rooms::model::{Connection, EngineProcess, Event, Place, Role};
use crate::rooms::table::RoomTable;
use crate::sglang::message::Release;
use crate::verdict::model::Party;

/// Engine processes remembered, those that have ended included; a host runs a few per GPU.
const MAX_PROCESSES: usize = 1024;

/// How often it is seen whether an engine is one of which nothing can be read.
const CHECK: u64 = 5 * SECOND;

/// A process of an engine.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) process: EngineProcess,
    place: Arc<Place>,
    ranks: Option<Arc<str>>,
    /// When it was noticed that it had ended.
    pub(crate) gone: Option<Mono>,
}

impl Known {
    /// Where it runs, or ran.
    pub(crate) fn place(&self) -> Arc<Place> {
        Arc::clone(&self.place)
    }

    /// Ranks that its title names.
    pub(crate) fn rank_names(&self) -> Option<Arc<str>> {
        self.ranks.clone()
    }
}

/// One engine, by the process that serves its HTTP port.
#[derive(Debug)]
struct Engine {
    /// Since when it is known.
    since: Mono,
    counts: gauges::Counts,
    sight: blind::Sight,
}

/// All engines of this host.
#[derive(Debug, Default)]
pub(crate) struct Engines {
    processes: HashMap<u32, Known>,
    /// By the process that serves HTTP; each of them is among `processes`, or was.
    servers: HashMap<u32, Engine>,
    /// When it was last seen whether something can be read of each.
    checked: Mono,
    /// MPTCP sockets that the kernel side has met.
    mptcp: u64,
    /// Processes that found no place.
    turned_away: u64,
}

impl Engines {
    pub(crate) fn get(&self, pid: u32) -> Option<&Known> {
        self.processes.get(&pid)
    }

    /// Makes room for one more; `false`: all of them live.
    fn make_room(&mut self) -> bool {
        if self.processes.len() < MAX_PROCESSES {
            return true;
        }
        let oldest = self.processes.iter().filter_map(|(pid, k)| Some((k.gone?, *pid))).min();
        oldest.is_some_and(|(_, pid)| self.processes.remove(&pid).is_some())
    }

    /// The engine of a process.
    fn engine_of(&mut self, pid: u32) -> Option<&mut Engine> {
        let server = self.processes.get(&pid)?.process.server;
        self.servers.get_mut(&server)
    }
}

impl RoomTable {
    /// A process of an engine.
    pub(crate) fn process(&mut self, at: Mono, process: &EngineProcess, _out: &mut Vec<Event>) {
        self.http.engines.meet(process);
        let replaced = self.engines.get(process.pid).is_some_and(|k| k.process.started != process.started);
        if replaced {
            // Another process under the same number.
            self.forget_process(process.pid);
        }
        let engines = &mut self.engines;
        if !engines.processes.contains_key(&process.pid) && !engines.make_room() {
            engines.turned_away = engines.turned_away.saturating_add(1);
            return;
        }
        let known = Known {
            place: Arc::new(process.place.clone()),
            ranks: process.ranks.as_deref().map(Arc::from),
            process: process.clone(),
            gone: None,
        };
        engines.processes.insert(process.pid, known);
        if process.pid == process.server {
            engines.servers.entry(process.pid).or_insert_with(|| Engine {
                since: at,
                counts: gauges::Counts::default(),
                sight: blind::Sight::default(),
            });
        }
    }

    /// A process of an engine has ended. What is known of it stays for the rooms that it leaves.
    pub fn forget_process(&mut self, pid: u32) {
        let now = self.now;
        let Some(known) = self.engines.processes.get_mut(&pid).filter(|k| k.gone.is_none()) else { return };
        known.gone = Some(now);
        let started = known.process.started;
        if self.engines.servers.remove(&pid).is_some() {
            // What was wrong with it went with it.
            for about in [gauges::ABOUT_COUNT, gauges::ABOUT_ROOMS, held::ABOUT, blind::ABOUT] {
                self.lower(group(about, pid, started), now);
            }
        }
    }

    /// Lets time pass for engines.
    pub(crate) fn tick_engines(&mut self, now: Mono) {
        if now.since(self.engines.checked) >= CHECK {
            self.engines.checked = now;
            self.look_for_blindness(now);
        }
    }

    /// The process at the top of the engine that this process belongs to, which serves its HTTP port; `None`: this is
    /// no process of a known engine.
    pub fn server_of(&self, pid: u32) -> Option<u32> {
        self.engines.get(pid).map(|k| k.process.server)
    }

    /// Role of the engine that this process belongs to, as its arguments tell or as it says itself; `None`: not known.
    pub fn role_of_process(&self, pid: u32) -> Option<Role> {
        let known = self.engines.get(pid)?;
        let server = known.process.server;
        known
            .process
            .role
            .or_else(|| self.engines.get(server)?.process.role)
            .or_else(|| self.engines.servers.get(&server)?.counts.role())
    }

    /// Processes of engines that live, with the role of their engine, in no order.
    pub fn engine_processes(&self) -> impl Iterator<Item = (&EngineProcess, Option<Role>)> + '_ {
        let live = self.engines.processes.values().filter(|k| k.gone.is_none());
        live.map(|k| (&k.process, self.role_of_process(k.process.pid)))
    }

    /// Processes not remembered because the table was full.
    pub const fn engine_processes_turned_away(&self) -> u64 {
        self.engines.turned_away
    }

    /// Release of the engine whose HTTP is served by this process, as it says itself.
    pub(crate) fn release_of(&self, server: u32) -> Option<Release> {
        self.engines.servers.get(&server)?.counts.release()
    }

    /// An engine as a whole, as someone who owes or on whom to act: by the process that serves its HTTP port.
    pub(crate) fn engine_party(&self, server: u32) -> Party {
        let known = self.engines.get(server);
        let comm = known.map(|k| Comm::from(k.process.comm.clone())).unwrap_or_default();
        Party {
            role: self.role_of_process(server),
            task: Some(Task { tgid: server, tid: server, comm, cgroup: 0 }),
            local: Some(true),
            http: known
                .and_then(|k| k.process.http_port)
                .map(|port| SocketAddr::new(std::net::Ipv4Addr::LOCALHOST.into(), port)),
            place: known.map(Known::place),
            rank_names: known.and_then(Known::rank_names),
            ..Party::default()
        }
    }

    /// Names what is wrong with an engine.
    fn group_of(&self, about: &str, server: u32) -> u64 {
        group(about, server, self.engines.get(server).map_or(0, |k| k.process.started))
    }

    /// Something of an engine's HTTP was read.
    pub(crate) fn http_heard(&mut self, connection: &Connection) {
        if let Some(engine) = connection.task.and_then(|t| self.engines.engine_of(t.tgid)) {
            engine.sight.heard = true;
        }
    }

    /// How many MPTCP sockets the kernel side has met: they carry what is not read.
    pub const fn mptcp_met(&mut self, sockets: u64) {
        self.engines.mptcp = sockets;
    }
}

/// Names what is wrong with one life of an engine.
fn group(about: &str, server: u32, started: u64) -> u64 {
    cause(&[about, &server.to_string(), &started.to_string()])
}
