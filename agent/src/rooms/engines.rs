//! Engines as their host has them: which processes belong together, where they run, what they say of themselves, and
//! the findings that follow from it.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: `MAX_PROCESSES` processes and `MAX_ENGINES` engines; more are
//! counted. One engine: `engine`; queue counts against rooms: `gauges`; engines of which nothing can be read: `blind`.

mod answers;
mod blind;
mod engine;
mod gauges;
mod held;
mod saved;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use hashbrown::HashMap;

use crate::event::{Comm, Mono, SECOND, Task};
use crate::rooms::findings::cause;
use crate::rooms::model::{Connection, EngineProcess, Event, Place, Role, Unreadable};
use crate::rooms::peers::NONE;
use crate::rooms::table::RoomTable;
use crate::sglang::message::Release;
use crate::verdict::model::Party;

pub(crate) use engine::{Engine, EngineId, LOOK_AGAIN, Stop, stood};
pub(crate) use saved::SavedEngine;

/// Engine processes remembered, those that have ended included; a host runs a few per GPU.
const MAX_PROCESSES: usize = 1024;

/// Engines remembered, those elsewhere included.
const MAX_ENGINES: usize = PLACES as usize;
const PLACES: u32 = 1024;

/// Addresses remembered at which engines are reached: one listens at several, with as many addresses as its host has.
const MAX_ADDRESSES: usize = 4 * MAX_ENGINES;

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

/// All engines: those of this host, by their processes, and those elsewhere, by the addresses at which they are reached.
#[derive(Debug, Default)]
pub(crate) struct Engines {
    processes: HashMap<u32, Known>,
    list: Vec<Engine>,
    by_address: HashMap<(SocketAddr, u32), EngineId>,
    /// By the living process that serves HTTP.
    by_pid: HashMap<u32, EngineId>,
    /// When it was last seen whether something can be read of each.
    checked: Mono,
    /// The last connection that could not be read, by cause.
    unreadable: [Option<Connection>; Unreadable::ALL.len()],
    /// MPTCP sockets that the kernel side has met.
    mptcp: u64,
    /// Processes that found no place.
    turned_away: u64,
    /// Engines that found no place.
    unplaced: u64,
}

const fn place(id: EngineId) -> usize {
    (id % PLACES) as usize
}

/// Loopback addresses of different network namespaces are different ones.
const fn key(address: SocketAddr, netns: u32) -> (SocketAddr, u32) {
    (address, if address.ip().is_loopback() { netns } else { 0 })
}

impl Engines {
    pub(crate) fn process(&self, pid: u32) -> Option<&Known> {
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

    /// RDMA cards that the arguments of this process's engine name.
    pub(crate) fn ib_devices(&self, pid: u32) -> impl Iterator<Item = &str> {
        let own = self.processes.get(&pid);
        own.into_iter().flat_map(|k| k.process.ib_devices.iter().map(String::as_str))
    }

    /// The engine whose server process this is, as long as its host has it.
    fn server(&self, pid: u32) -> Option<&Engine> {
        self.by_pid.get(&pid).and_then(|id| self.get(*id)).filter(|e| e.since.is_some())
    }

    fn server_mut(&mut self, pid: u32) -> Option<&mut Engine> {
        let id = self.by_pid.get(&pid).copied()?;
        self.get_mut(id).filter(|e| e.since.is_some())
    }

    /// The same of all of them, by their processes.
    fn servers(&self) -> impl Iterator<Item = (u32, &Engine)> {
        self.by_pid.iter().filter_map(|(pid, id)| Some((*pid, self.get(*id).filter(|e| e.since.is_some())?)))
    }

    /// The engine of a process.
    fn engine_of(&mut self, pid: u32) -> Option<&mut Engine> {
        let server = self.processes.get(&pid)?.process.server;
        self.server_mut(server)
    }

    /// A process of an engine is there.
    fn meet(&mut self, at: Mono, process: &EngineProcess) {
        if !self.processes.contains_key(&process.pid) && !self.make_room() {
            self.turned_away = self.turned_away.saturating_add(1);
            return;
        }
        self.know(process);
        let id = self.of_server(process.server);
        if process.pid != process.server
            && id != NONE
            && let Some(own) = self.by_pid.remove(&process.pid)
        {
            // It got requests before it was known whose worker it is.
            self.absorb(id, own);
        }
        if let Some(e) = self.get_mut(id) {
            e.role = process.role.or(e.role);
            if process.pid == process.server {
                e.since.get_or_insert(at);
            }
        }
    }

    fn know(&mut self, process: &EngineProcess) {
        let known = Known {
            place: Arc::new(process.place.clone()),
            ranks: process.ranks.as_deref().map(Arc::from),
            process: process.clone(),
            gone: None,
        };
        self.processes.insert(process.pid, known);
    }

    /// A process is gone, and its number may be another's next. The start of the server process that it was, if it was one
    /// that its host had.
    fn part(&mut self, pid: u32, now: Mono) -> Option<u64> {
        let started = self.processes.get_mut(&pid).map(|k| {
            k.gone.get_or_insert(now);
            k.process.started
        });
        let id = self.by_pid.remove(&pid)?;
        let e = self.get_mut(id)?;
        let had = e.since.is_some();
        e.end(now);
        started.filter(|_| had)
    }

    pub(crate) fn get(&self, id: EngineId) -> Option<&Engine> {
        let e = self.list.get(place(id)).filter(|e| e.id == id)?;
        let Some(to) = e.moved else { return Some(e) };
        self.list.get(place(to)).filter(|e| e.id == to)
    }

    /// The name that this engine goes by now.
    pub(crate) fn resolve(&self, id: EngineId) -> EngineId {
        self.get(id).map_or(id, |e| e.id)
    }

    pub(crate) fn get_mut(&mut self, id: EngineId) -> Option<&mut Engine> {
        let id = self.get(id)?.id;
        self.list.get_mut(place(id))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (EngineId, &Engine)> {
        self.list.iter().map(|e| (e.id, e))
    }

    fn add(&mut self, pid: Option<u32>) -> EngineId {
        let mut engine = Engine::of(pid);
        if self.list.len() < MAX_ENGINES {
            engine.id = u32::try_from(self.list.len()).unwrap_or(NONE);
            let id = engine.id;
            self.list.push(engine);
            return id;
        }
        let Some(old) = self.over() else {
            self.unplaced = self.unplaced.saturating_add(1);
            return NONE;
        };
        engine.id = old.wrapping_add(PLACES);
        let id = engine.id;
        self.by_address.retain(|_, of| *of != old);
        if let Some(e) = self.list.get_mut(place(old)) {
            *e = engine;
        }
        id
    }

    /// One whose place can be another's: its process is gone, or it is elsewhere, and nothing of it is open. Those of which
    /// least is lost come first.
    fn over(&self) -> Option<EngineId> {
        let lives = |e: &Engine| e.pid.is_some_and(|pid| self.by_pid.get(&pid) == Some(&e.id));
        let over = self.list.iter().filter(|e| e.open.is_empty() && e.stopped.is_none() && !lives(e));
        over.min_by_key(|e| (e.moved.is_none(), e.pid.is_none(), e.id)).map(|e| e.id)
    }

    /// Process at the top of the engine that this living process is of; itself, where none is known.
    fn top_of(&self, pid: u32) -> u32 {
        self.processes.get(&pid).filter(|k| k.gone.is_none()).map_or(pid, |k| k.process.server)
    }

    /// The engine whose HTTP server is reached at `address`; `task`: its process, where its own end is seen.
    pub(crate) fn at(&mut self, address: SocketAddr, netns: u32, task: Option<u32>) -> EngineId {
        let pid = task.map(|t| self.top_of(t));
        let at = key(address, netns);
        if let Some(id) = self.by_address.get(&at).copied() {
            let Some(known) = self.get(id).map(|e| e.pid) else { return id };
            if pid.is_none() || known == pid {
                return id;
            }
            if known.is_none()
                && let Some(p) = pid
                && !self.by_pid.contains_key(&p)
            {
                if let Some(e) = self.get_mut(id) {
                    e.pid = pid;
                }
                self.by_pid.insert(p, id);
                return id;
            }
            if known.is_none()
                && let Some(own) = pid.and_then(|p| self.by_pid.get(&p).copied())
            {
                // Known by its address and by its process, and now both are one.
                self.absorb(own, id);
                self.by_address.insert(at, own);
                return own;
            }
            // Another process has taken the port: another life of the engine.
        }
        let id = match pid.and_then(|p| self.by_pid.get(&p).copied()) {
            Some(id) => id,
            None => self.add(pid),
        };
        if id != NONE {
            if self.by_address.len() < MAX_ADDRESSES || self.by_address.contains_key(&at) {
                self.by_address.insert(at, id);
            }
            if let Some(p) = pid {
                self.by_pid.insert(p, id);
            }
            if let Some(e) = self.get_mut(id) {
                e.address.get_or_insert(address);
            }
        }
        id
    }

    /// What was known of `other`, by its address alone or by one of its processes, is `own`'s.
    fn absorb(&mut self, own: EngineId, other: EngineId) {
        let own = self.resolve(own);
        let Some(e) = self.get_mut(other).filter(|e| e.id != own) else { return };
        let (mut left, id) = (Engine::of(None), e.id);
        (left.id, left.moved) = (id, Some(own));
        let old = std::mem::replace(e, left);
        // One step leads to it, from whatever was this one's before.
        for e in self.list.iter_mut().filter(|e| e.moved == Some(id)) {
            e.moved = Some(own);
        }
        for to in self.by_address.values_mut().filter(|to| **to == id) {
            *to = own;
        }
        if let Some(e) = self.get_mut(own) {
            e.absorb(old);
        }
    }

    /// The engine whose HTTP server is reached at `address`, if it is known.
    pub(crate) fn known(&self, address: SocketAddr, netns: u32) -> Option<EngineId> {
        self.by_address.get(&key(address, netns)).copied()
    }

    /// The engine of this process, if it is known.
    pub(crate) fn of_process(&self, pid: u32) -> Option<EngineId> {
        self.by_pid.get(&self.top_of(pid)).copied()
    }

    /// The only engine with this role at this address.
    pub(crate) fn alone_at(&self, ip: IpAddr, role: Role) -> Option<EngineId> {
        let mut fit = self
            .iter()
            .filter(|(_, e)| e.role == Some(role) && e.address.is_some_and(|a| a.ip() == ip))
            .map(|(id, _)| id);
        fit.next().filter(|_| fit.next().is_none())
    }

    /// The engine of this server process.
    pub(crate) fn of_server(&mut self, server: u32) -> EngineId {
        if let Some(id) = self.by_pid.get(&server) {
            return *id;
        }
        let id = self.add(Some(server));
        if id != NONE {
            self.by_pid.insert(server, id);
        }
        id
    }

    /// Role that the process table gives this process or its engine, or that the engine has shown.
    pub(crate) fn role_of_process(&self, pid: u32) -> Option<Role> {
        let own = self.processes.get(&pid).map(|k| &k.process);
        let server = own.and_then(|p| self.processes.get(&p.server)).map(|k| &k.process);
        let told = own.and_then(|p| p.role).or_else(|| server?.role);
        told.or_else(|| {
            self.of_process(pid).and_then(|id| self.get(id)).and_then(|e| e.role.or_else(|| e.counts.role()))
        })
    }
}

impl RoomTable {
    /// A process of an engine.
    pub(crate) fn process(&mut self, at: Mono, process: &EngineProcess, _out: &mut Vec<Event>) {
        let (pid, started) = (process.pid, process.started);
        let known = self.engines.process(pid);
        if known.is_some_and(|k| k.process.started != started) {
            // Another process under the same number.
            self.forget_process(pid);
        } else if process.server != pid && known.is_some_and(|k| k.process.server == pid) {
            // It is of another engine, and was none itself.
            self.lower_of(pid, started, at);
        }
        self.engines.meet(at, process);
    }

    /// A process has ended. What is known of it stays for the rooms that it leaves.
    pub fn forget_process(&mut self, pid: u32) {
        let now = self.now;
        let Some(started) = self.engines.part(pid, now) else { return };
        // What was wrong with the engine went with it.
        self.lower_of(pid, started, now);
    }

    /// Nothing is wrong any more with the engine of this server process, as there is none.
    fn lower_of(&mut self, pid: u32, started: u64, now: Mono) {
        for about in
            [gauges::ABOUT_COUNT, gauges::ABOUT_BOOTSTRAP, gauges::ABOUT_ROOMS, held::ABOUT, blind::ABOUT]
        {
            self.lower(group(about, pid, started), now);
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
        self.engines.process(pid).map(|k| k.process.server)
    }

    /// Role of the engine that this process belongs to, as its arguments tell, as it says itself, or as it has shown;
    /// `None`: not known.
    pub fn role_of_process(&self, pid: u32) -> Option<Role> {
        self.engines.role_of_process(pid)
    }

    /// Processes of engines that live, with the role of their engine, in no order.
    pub fn engine_processes(&self) -> impl Iterator<Item = (&EngineProcess, Option<Role>)> + '_ {
        let live = self.engines.processes.values().filter(|k| k.gone.is_none());
        live.map(|k| (&k.process, self.role_of_process(k.process.pid)))
    }

    /// The last connection that could not be read for this reason.
    pub fn last_unreadable(&self, why: Unreadable) -> Option<&Connection> {
        let place = Unreadable::ALL.iter().position(|u| *u == why)?;
        self.engines.unreadable.get(place)?.as_ref()
    }

    /// Engines not remembered because the table was full.
    pub const fn engines_turned_away(&self) -> u64 {
        self.engines.unplaced
    }

    /// Processes not remembered because the table was full.
    pub const fn engine_processes_turned_away(&self) -> u64 {
        self.engines.turned_away
    }

    /// Release of the engine whose HTTP is served by this process, as it says itself.
    pub(crate) fn release_of(&self, server: u32) -> Option<Release> {
        self.engines.server(server)?.counts.release()
    }

    /// An engine as a whole, as someone who owes or on whom to act: by the process that serves its HTTP port.
    pub(crate) fn engine_party(&self, server: u32) -> Party {
        let known = self.engines.process(server);
        let comm = known.map(|k| Comm::from(k.process.comm.clone())).unwrap_or_default();
        Party {
            role: self.role_of_process(server),
            task: Some(Task { tgid: server, tid: server, comm, cgroup: 0 }),
            local: Some(true),
            ended: known.is_some_and(|k| k.gone.is_some()),
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
        group(about, server, self.engines.process(server).map_or(0, |k| k.process.started))
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::event::SocketId;

    fn process(pid: u32) -> EngineProcess {
        EngineProcess { pid, server: pid, started: 1, role: Some(Role::Prefill), ..EngineProcess::default() }
    }

    fn at(engines: &mut Engines, pid: u32) -> EngineId {
        engines.at("10.0.0.1:30000".parse().unwrap(), 1, Some(pid))
    }

    #[test]
    fn what_the_workers_of_a_server_got_before_they_were_known_is_the_servers() {
        let mut engines = Engines::default();
        // By its address alone, by one worker, by another: each takes the port from the one before.
        let elsewhere = engines.at("10.0.0.1:30000".parse().unwrap(), 1, None);
        let first = at(&mut engines, 11);
        let second = at(&mut engines, 12);
        assert_eq!((elsewhere, engines.get(first).unwrap().pid), (first, Some(11)));
        assert_ne!(engines.resolve(first), engines.resolve(second));
        let key = (SocketId(7), 1);
        engines.get_mut(first).unwrap().open.insert((Mono(1), key), 0);
        engines.get_mut(second).unwrap().stop(Stop::Pause, Mono(2));
        engines.get_mut(second).unwrap().finished(Mono(1), Mono(2), 0);
        // One that was thought to be an engine of its own moves on with what had become its.
        for (pid, server) in [(11, 11), (12, 11), (10, 10), (11, 10), (12, 10)] {
            engines.meet(Mono(3), &EngineProcess { server, ..process(pid) });
        }
        let own = engines.of_process(10).unwrap();
        assert_eq!([first, second].map(|id| engines.resolve(id)), [own; 2]);
        for pid in [11, 12] {
            assert_eq!((at(&mut engines, pid), engines.of_process(pid)), (own, Some(own)));
        }
        let e = engines.get(own).unwrap();
        assert_eq!(
            (e.pid, e.stopped, e.open.len(), e.later_finished(Mono(0))),
            (Some(10), Some(Mono(2)), 1, 1)
        );
        // A worker that ends is not the engine's end, nor is another in its place another engine.
        assert_eq!(engines.part(11, Mono(4)), None);
        engines.meet(Mono(5), &EngineProcess { server: 10, ..process(13) });
        assert_eq!(at(&mut engines, 13), own);
        assert!(engines.get(own).unwrap().since.is_some());
        assert_eq!(engines.part(10, Mono(6)), Some(1));
    }

    #[test]
    fn the_place_of_an_engine_that_has_ended_is_anothers_and_its_name_nobodys() {
        let mut engines = Engines::default();
        let last = PLACES + 1;
        for pid in 1..last {
            engines.meet(Mono(1), &process(pid));
        }
        let (first, second) = (engines.of_process(1).unwrap(), engines.of_process(2).unwrap());
        // All of them live.
        assert_eq!((engines.add(None), engines.unplaced), (NONE, 1));
        engines.get_mut(first).unwrap().stopped = Some(Mono(1));
        for pid in [1, 2] {
            assert_eq!(engines.part(pid, Mono(2)), Some(1));
        }
        assert_eq!(engines.get(first).unwrap().stopped, None, "one that has ended does not stand still");
        let key = (SocketId(7), 1);
        engines.get_mut(first).unwrap().open.insert((Mono(1), key), 0);
        engines.meet(Mono(3), &process(last));
        let new = engines.of_process(last).unwrap();
        assert_eq!(place(new), place(second), "the first has an open request yet");
        assert!(engines.get(second).is_none() && engines.get(first).is_some());
        assert_eq!(engines.get(new).unwrap().pid, Some(last));
        assert_eq!(engines.unplaced, 1);
    }
}
