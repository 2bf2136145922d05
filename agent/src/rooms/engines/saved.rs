//! What is known of engines, as it goes into the state file and comes back.
//!
//! Pure. Facts about the past only: pauses, which requests were overtaken, how long the counters have stood still. That
//! every request to an engine was seen is none of them: an agent that was gone has missed some.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use super::engine::{Engine, MAX_FINISHED, MAX_PAUSES, Numbers, keep};
use super::{EngineId, Engines, MAX_PROCESSES};
use crate::event::{Mono, Task};
use crate::rooms::model::{Away, EngineProcess, Role};

/// Engines written down at most.
const MAX_SAVED: usize = 256;
/// Further addresses of one engine written down at most.
const MAX_ADDRESSES: usize = 8;

/// An engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedEngine {
    /// Where its HTTP server was reached.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    address: Option<SocketAddr>,
    #[serde(default)]
    netns: u32,
    /// And where else.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    others: Vec<(SocketAddr, u32)>,
    /// Its server process, if it is on this host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    task: Option<Task>,
    role: Option<Role>,
    /// What it stands still for, and since when.
    #[serde(default)]
    stops: u8,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    since: Option<Mono>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pauses: Vec<(Mono, Mono)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    finished: Vec<Mono>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    asked: Vec<Mono>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    clear: Vec<Mono>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    heard: Option<Mono>,
    /// When calls to it may last have passed unseen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unseen: Option<(Mono, Mono)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    numbers: Option<Numbers>,
}

impl SavedEngine {
    /// Its process.
    pub(crate) const fn pid(&self) -> Option<u32> {
        self.pid
    }
}

impl Engines {
    /// Engines to write down, those that stand still first. The agent looks since `started`.
    pub(crate) fn save(&self, started: Mono) -> Vec<SavedEngine> {
        let known = |e: &&Engine| e.moved.is_none() && (e.pid.is_some() || e.address.is_some());
        let (standing, others): (Vec<_>, Vec<_>) =
            self.iter().filter(|(_, e)| known(e)).partition(|(_, e)| e.stopped.is_some());
        standing.into_iter().chain(others).take(MAX_SAVED).map(|(id, e)| self.saved(id, e, started)).collect()
    }

    fn saved(&self, id: EngineId, e: &Engine, started: Mono) -> SavedEngine {
        let is_it = |to: EngineId| self.get(to).is_some_and(|e| e.id == id);
        let mut at =
            self.by_address.iter().filter(|(_, to)| is_it(**to)).map(|(at, _)| *at).collect::<Vec<_>>();
        at.sort_unstable();
        let first = at.iter().position(|(address, _)| Some(*address) == e.address).map(|i| at.remove(i));
        at.truncate(MAX_ADDRESSES);
        SavedEngine {
            address: first.map_or(e.address, |(address, _)| Some(address)),
            netns: first.map_or(0, |(_, netns)| netns),
            others: at,
            pid: e.pid,
            task: e.task,
            role: e.role,
            stops: e.stops,
            since: e.stopped,
            pauses: e.pauses.iter().copied().collect(),
            finished: e.finished.iter().copied().collect(),
            asked: e.asked.iter().copied().collect(),
            clear: e.clear.iter().copied().collect(),
            heard: e.heard,
            unseen: e.unseen.or(Some((Mono(0), started))),
            numbers: e.numbers,
        }
    }

    /// Living processes of engines, to write down.
    pub(crate) fn save_processes(&self) -> Vec<EngineProcess> {
        let mut all: Vec<_> =
            self.processes.values().filter(|k| k.gone.is_none()).map(|k| k.process.clone()).collect();
        all.sort_unstable_by_key(|p| p.pid);
        all
    }

    /// Takes back what [`Self::save`] and [`Self::save_processes`] gave, as far as the processes are still the same.
    pub(crate) fn restore(
        &mut self,
        engines: Vec<SavedEngine>,
        processes: &[EngineProcess],
        away: Away,
        alive: impl Fn(u32) -> bool,
    ) {
        let lives = |p: &EngineProcess| alive(p.pid) && alive(p.server);
        for process in processes.iter().filter(|p| lives(p)).take(MAX_PROCESSES) {
            self.know(process);
        }
        // What another process has at that address now is another engine.
        for saved in engines.into_iter().filter(|e| e.pid.is_none_or(&alive)).take(MAX_SAVED) {
            let id = match (saved.address, saved.pid) {
                (Some(address), pid) => self.at(address, saved.netns, pid),
                (None, Some(pid)) => self.of_server(pid),
                (None, None) => continue,
            };
            for (address, netns) in saved.others.into_iter().take(MAX_ADDRESSES) {
                self.by_address.entry(super::key(address, netns)).or_insert(id);
            }
            let Some(e) = self.get_mut(id) else { continue };
            e.role = e.role.or(saved.role);
            (e.task, e.stops, e.stopped, e.numbers) = (saved.task, saved.stops, saved.since, saved.numbers);
            (e.heard, e.unseen) = (saved.heard, saved.unseen);
            e.out_of_sight(away.from, away.to);
            e.pauses = saved.pauses.into_iter().take(MAX_PAUSES).collect();
            let rings =
                [(&mut e.finished, saved.finished), (&mut e.asked, saved.asked), (&mut e.clear, saved.clear)];
            for (ring, begun) in rings {
                begun.into_iter().take(MAX_FINISHED).for_each(|at| keep(ring, at, MAX_FINISHED));
            }
        }
    }
}
