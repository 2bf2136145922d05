//! Engines as their host has them: which processes belong together, where they run, what they say of themselves, and
//! the findings that follow from it.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: `MAX_PROCESSES` processes; more are counted.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::event::{Comm, Mono, Task};
use crate::rooms::model::{Connection, EngineGauges, EngineProcess, Event, Place, Role, Unreadable};
use crate::rooms::table::RoomTable;
use crate::verdict::model::Party;

/// Engine processes remembered, those that have ended included; a host runs a few per GPU.
const MAX_PROCESSES: usize = 1024;

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

/// All engines of this host.
#[derive(Debug, Default)]
pub(crate) struct Engines {
    processes: HashMap<u32, Known>,
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
}

impl RoomTable {
    /// A process of an engine.
    pub(crate) fn process(&mut self, _at: Mono, process: &EngineProcess, _out: &mut Vec<Event>) {
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
    }

    /// A process of an engine has ended. What is known of it stays for the rooms that it leaves.
    pub fn forget_process(&mut self, pid: u32) {
        let now = self.now;
        if let Some(known) = self.engines.processes.get_mut(&pid) {
            known.gone.get_or_insert(now);
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
        known.process.role.or_else(|| self.engines.get(known.process.server)?.process.role)
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

    /// An engine as a whole, as someone who owes or on whom to act: by the process that serves its HTTP port.
    pub(crate) fn engine_party(&self, server: u32) -> Party {
        let known = self.engines.get(server);
        let comm = known.map(|k| Comm::from(k.process.comm.clone())).unwrap_or_default();
        Party {
            role: self.role_of_process(server),
            task: Some(Task { tgid: server, tid: server, comm, cgroup: 0 }),
            local: Some(true),
            place: known.map(Known::place),
            rank_names: known.and_then(Known::rank_names),
            ..Party::default()
        }
    }

    /// What an engine says of itself.
    pub(crate) fn gauged(&mut self, at: Mono, gauges: &EngineGauges, out: &mut Vec<Event>) {
        let _ = (at, gauges, out, &self.now);
    }

    /// A connection that cannot be read.
    pub(crate) fn unreadable(
        &mut self,
        at: Mono,
        connection: &Connection,
        why: Unreadable,
        out: &mut Vec<Event>,
    ) {
        let _ = (at, connection, why, out, &self.now);
    }
}
