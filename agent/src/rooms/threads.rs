//! Threads and processes of engines that ended: facts that need no timer.
//!
//! Pure: no I/O, no clock (time is an argument). Threads end all the time for good reasons, and those of a Python program
//! all have their process's name: that one ended says something only together with what its rank has said since. So ends
//! are remembered here ([`Threads`]), and what they mean is found out when a room is overdue ([`RoomTable::dead_thread`]).

use std::collections::VecDeque;

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::event::{Mono, SECOND, TaskChange, TaskEvent};
use crate::rooms::findings::cause;
use crate::rooms::messages::Seen;
use crate::rooms::model::{Event, Role};
use crate::rooms::peers::{DeadReader, Death, EndpointId, Exit, ForeignMark, NONE, PairId};
use crate::rooms::room::{Link, Room};
use crate::rooms::table::RoomTable;
use crate::sglang::message::{Backend, Release, Releases};
use crate::verdict::actions::of_finding;
use crate::verdict::explain_threads::{foreign_words, named_thread, reading};
use crate::verdict::facts::{ForeignFact, StallFact, ThreadFact, Was};
use crate::verdict::model::{Class, Confidence, Finding};

/// Processes whose ended threads are remembered.
const MAX_PROCESSES: usize = 256;
/// Ended threads remembered of each, the newest.
const MAX_DEATHS: usize = 64;
/// Dead threads of which a finding is open.
const MAX_RAISED: usize = 64;
/// Ended threads written down of each process, the newest.
const MAX_SAVED: usize = 16;

/// A thread that cannot bear what it has read ends this soon after it (seen: 21 ms, a Python traceback).
const READER_DIES_WITHIN: u64 = SECOND;
/// It takes about as long to end; an end that comes sooner is no less likely another's.
const TRACEBACK: u64 = SECOND / 50;
/// As long as this before and after it, other ends are counted: one among many says little.
const AROUND: u64 = 60 * SECOND;
/// A chance of one in this many that a thread ended just then for another reason is no proof any more.
const LONG_ODDS: u64 = 100;
/// More ends than these within [`READER_DIES_WITHIN`] are a pool, or an engine, that is being taken down.
const BURST: usize = 8;
/// More ends than these since a session's last answer: which of them silenced it cannot be told.
const MAX_SINCE: usize = 3;
/// As many ends may have gone by without harm before one is held against a rank that goes on with other sessions. One that
/// says nothing at all may only be busy: there a process that has lost any thread unharmed proves nothing.
const MAX_HARMLESS: usize = 2;

/// Ended threads of the engines' processes.
#[derive(Debug, Default)]
pub(crate) struct Threads {
    processes: HashMap<u32, VecDeque<Death>>,
    /// Whether any end was ever told: without one nobody may be looking.
    watched: bool,
    /// The same of the agent before.
    watched_before: bool,
    /// Findings that are open, by group.
    raised: HashMap<u64, Raised>,
    /// When those were last looked at.
    looked: Mono,
}

/// What an open finding is about.
#[derive(Clone, Copy, Debug)]
struct Raised {
    rank: EndpointId,
    /// Where a session is silent.
    pair: PairId,
    thread: ThreadFact,
}

/// Ended threads of one process, as they are written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedThreads {
    pub(crate) tgid: u32,
    deaths: Vec<Death>,
}

impl Threads {
    /// Remembers an end. Returns whether an older one had to be forgotten.
    fn note(&mut self, tgid: u32, death: Death) -> bool {
        self.watched = true;
        let mut full = false;
        if !self.processes.contains_key(&tgid) && self.processes.len() >= MAX_PROCESSES {
            full = true;
            let oldest = self.processes.iter().min_by_key(|(_, d)| d.back().map(|d| d.at)).map(|(t, _)| *t);
            if let Some(oldest) = oldest {
                self.processes.remove(&oldest);
            }
        }
        let deaths = self.processes.entry(tgid).or_default();
        // The same end, told twice.
        if deaths.iter().any(|d| d.tid == death.tid && death.at.since(d.at) < SECOND) {
            return full;
        }
        if deaths.len() >= MAX_DEATHS {
            full = true;
            deaths.pop_front();
        }
        deaths.push_back(death);
        full
    }

    fn of(&self, tgid: u32) -> impl Iterator<Item = &Death> + Clone {
        self.processes.get(&tgid).into_iter().flatten()
    }

    /// Whether a thread ended by itself, and not with its process: that ends with a signal, or with its first thread, or
    /// with many threads at once.
    fn alone(&self, tgid: u32, death: &Death) -> bool {
        let near = |d: &Death, within: u64| d.at.since(death.at).max(death.at.since(d.at)) <= within;
        let whole = |d: &Death| d.tid == tgid || d.code & 0x7f != 0;
        !whole(death)
            && !self.of(tgid).any(|d| whole(d) && near(d, AROUND))
            && self.of(tgid).filter(|d| near(d, READER_DIES_WITHIN)).count() <= BURST
    }

    /// What is written down: of processes that run, the newest ends; and whether any was ever told.
    pub(crate) fn save(&self) -> (Vec<SavedThreads>, bool) {
        let newest =
            |d: &VecDeque<Death>| d.iter().skip(d.len().saturating_sub(MAX_SAVED)).copied().collect();
        let saved = self.processes.iter().map(|(tgid, d)| SavedThreads { tgid: *tgid, deaths: newest(d) });
        (saved.collect(), self.watched)
    }

    /// Takes back what [`Self::save`] gave, of processes that still run.
    pub(crate) fn restore(&mut self, saved: Vec<SavedThreads>, watched: bool, alive: impl Fn(u32) -> bool) {
        self.watched_before = watched;
        for s in saved.into_iter().filter(|s| alive(s.tgid)).take(MAX_PROCESSES) {
            self.processes.insert(s.tgid, s.deaths.into_iter().take(MAX_SAVED).collect());
        }
    }
}

/// Whether the receive loop of NIXL dies of an ABORT in these releases, 0.5.13–0.5.15 (sglang#30352); `None`: in some of them.
fn dies_of_abort(r: Releases) -> Option<bool> {
    let (first, last) = (Release::new(0, 5, 13, 0), Release::new(0, 5, 15, u16::MAX));
    match (r.min >= first && r.max <= last, r.max < first || r.min > last) {
        (true, _) => Some(true),
        (_, true) => Some(false),
        _ => None,
    }
}

impl RoomTable {
    /// A thread has ended.
    pub(crate) fn task(&mut self, task: &TaskEvent, _out: &mut Vec<Event>) {
        let TaskChange::Exited { code, process } = task.what;
        let (tgid, at) = (task.task.tgid, task.at);
        if process {
            self.forget_process(tgid);
            return self.process_ended(Exit { tgid, at, code });
        }
        let death = Death { tid: task.task.tid, name: task.name, at, code };
        if self.threads.note(tgid, death) {
            self.tally.turned_away.threads += 1;
        }
        let ids: SmallVec<[EndpointId; 2]> = self.peers.of_process(tgid).into();
        for id in ids {
            self.suspect_reader(id, death);
        }
    }

    /// Something foreign came to a rank: the end of its reader may have been told before it.
    pub(crate) fn foreign_read(&mut self, id: EndpointId) {
        let Some(tgid) = self.peers.get(id).and_then(|e| e.task).map(|t| t.tgid) else { return };
        let deaths: SmallVec<[Death; 4]> = self.threads.of(tgid).copied().collect();
        for death in deaths {
            self.suspect_reader(id, death);
        }
    }

    /// An ABORT came to a prefill rank: NIXL 0.5.13–0.5.15 takes it for a message without its guard, and the assertion ends
    /// its receive loop (M4, `nixl/conn.py`, sglang#30352).
    pub(crate) fn abort_read(&mut self, seen: &Seen<'_>) {
        let (backend, releases) = self.learn_backend(seen, NONE);
        let said = self.release_said(seen.target).map(|r| Releases { min: r, max: r });
        let Some(releases) = said.or(releases).filter(|r| dies_of_abort(*r) != Some(false)) else { return };
        if seen.role != Role::Prefill || backend != Some(Backend::Nixl) {
            return;
        }
        let unsure = dies_of_abort(releases).is_none();
        let peer = seen.connection.addresses.peer;
        let Some(e) = self.peers.get_mut(seen.target) else { return };
        let first_len = 5; // "ABORT"
        let asked = e.prefill.as_deref().map_or(0, |p| p.answers.asked);
        let mark = ForeignMark { at: seen.at, peer, frames: 4, first_len, abort: true, unsure, asked };
        if e.bears(&mark) {
            return;
        }
        e.meet(mark);
        e.last_foreign = Some(mark);
        self.foreign_read(seen.target);
    }

    /// Release of the engine of a rank of this host, as it says itself.
    fn release_said(&self, rank: EndpointId) -> Option<Release> {
        let task = self.peers.get(rank)?.task?;
        self.release_of(self.server_of(task.tgid)?)
    }

    /// What came before the end of a rank's reader; `None`: an ABORT that its release, as it says itself by now, bears.
    fn killed_by(&self, rank: EndpointId, mark: &ForeignMark) -> Option<ForeignFact> {
        let fact = ForeignFact::of(mark);
        let said = self.release_said(rank).filter(|_| mark.abort);
        let Some(said) = said else { return Some(fact) };
        let dies = dies_of_abort(Releases { min: said, max: said }) == Some(true);
        dies.then_some(ForeignFact { unsure: false, ..fact })
    }

    /// The dead reader of a rank as it is written down: with what the engine has said of its release since.
    pub(crate) fn reader_to_save(&self, rank: EndpointId) -> Option<DeadReader> {
        let r = self.peers.get(rank)?.dead_reader?;
        let unsure = self.killed_by(rank, &r.foreign)?.unsure;
        Some(DeadReader { foreign: ForeignMark { unsure, ..r.foreign }, ..r })
    }

    /// Ties an end to what was foreign just before it at a rank of the same process.
    fn suspect_reader(&mut self, id: EndpointId, death: Death) {
        let Some(e) = self.peers.get(id) else { return };
        let (Some(task), Some(foreign)) = (e.task, e.last_foreign) else { return };
        let gap = death.at.since(foreign.at);
        if death.at <= foreign.at || gap > READER_DIES_WITHIN || self.reader(id).is_some() {
            return;
        }
        let before =
            self.threads.of(task.tgid).filter(|d| d.at < foreign.at && foreign.at.since(d.at) < AROUND);
        let chance = (before.count() as u64).saturating_mul(gap.max(TRACEBACK)) > AROUND / LONG_ODDS;
        let asked = e.prefill.as_deref().map_or(0, |p| p.answers.asked);
        let reader = DeadReader { tgid: task.tgid, death, foreign, asked, chance };
        if let Some(e) = self.peers.get_mut(id) {
            e.dead_reader = Some(reader);
        }
        self.deafen(id);
    }

    /// The dead reader of a rank, as long as the rank has not shown that it lives.
    pub(crate) fn reader(&self, id: EndpointId) -> Option<DeadReader> {
        let e = self.peers.get(id)?;
        let reader = e.dead_reader.filter(|r| e.task.is_some_and(|t| t.tgid == r.tgid))?;
        let lives = e.prefill.as_deref().is_some_and(|p| {
            p.answers.answered > reader.asked || p.acknowledged_abort.is_some_and(|at| at >= reader.death.at)
        });
        // Rooms that were read after such a message show that it kills nobody, also when they are answered later.
        let lives = lives || e.bears(&reader.foreign);
        (!lives && self.threads.alone(reader.tgid, &reader.death)).then_some(reader)
    }

    /// The thread whose end is why a prefill rank of this host says nothing of a room, as far as can be told.
    pub(crate) fn dead_thread(
        &self,
        room: &Room,
        subject: Option<&Link>,
        prefill: EndpointId,
    ) -> Option<ThreadFact> {
        self.dead_reader_of(room, prefill).or_else(|| self.dead_worker_of(subject?, prefill))
    }

    fn dead_reader_of(&self, room: &Room, prefill: EndpointId) -> Option<ThreadFact> {
        let r = self.reader(prefill).filter(|r| !r.chance)?;
        // Its loop logs what it cannot read and goes on (`_start_bootstrap_thread`, `mori/conn.py`).
        if room.backend == Some(Backend::Mori) {
            return None;
        }
        // What had been read before goes on without the reader.
        let metadata = room.links.iter().filter(|l| l.prefill == prefill).map(Link::asked_at).max();
        let asked = metadata.or(room.bootstrap_at).or_else(|| room.abort.map(|a| a.at))?;
        let foreign = self.killed_by(prefill, &r.foreign)?;
        (asked >= r.foreign.at).then(|| self.thread_fact(prefill, r.tgid, r.death, Was::Reader(foreign)))
    }

    fn dead_worker_of(&self, link: &Link, prefill: EndpointId) -> Option<ThreadFact> {
        let (rank, pair) = (self.peers.prefill(prefill)?, self.peers.pair_of(link.pair)?);
        let tgid = self.peers.get(prefill)?.task?.tgid;
        // Others of the session, asked later, were answered: it is not the session that is silent.
        if pair.answers.answered >= link.numbers.1 {
            return None;
        }
        let first = rank.answers.first?;
        let rank_silent = rank.answers.answered < link.numbers.0;
        let since = if rank_silent { rank.answers.last? } else { pair.answers.last? };
        let (worked, mut after) = (
            if rank_silent { Some(first) } else { pair.answers.first },
            self.threads.of(tgid).filter(|d| d.at > since),
        );
        let all = after.clone().count();
        let death = *after.next()?;
        let harmless = self.threads.of(tgid).filter(|d| d.at > first && d.at < death.at).count();
        let answered = rank.answers.last.is_some_and(|at| at > death.at);
        let read = rank.acknowledged_abort.is_some_and(|at| at >= death.at);
        let was = if answered || read {
            Was::Worker { answered }
        } else {
            Was::Unknown { asked_before: link.asked_at() <= death.at }
        };
        let allowed = if matches!(was, Was::Worker { .. }) { MAX_HARMLESS } else { 0 };
        let fits = worked.is_some_and(|at| at < death.at)
            && all <= MAX_SINCE
            && harmless <= allowed
            && self.threads.alone(tgid, &death);
        fits.then(|| self.thread_fact(prefill, tgid, death, was))
    }

    pub(crate) fn thread_fact(&self, rank: EndpointId, tgid: u32, death: Death, was: Was) -> ThreadFact {
        let at = self.peers.address(rank).map(|a| a.to_string()).unwrap_or_default();
        let group = cause(&[Class::ThreadDied.label(), &at, &death.tid.to_string()]);
        ThreadFact { tgid, tid: death.tid, name: death.name, at: death.at, code: death.code, was, group }
    }

    /// Whether everything that a prefill rank of this host owes is late while none of its threads has ended.
    pub(crate) fn stall(&self, prefill: EndpointId) -> Option<StallFact> {
        let e = self.peers.get(prefill)?;
        let (p, tgid) = (e.prefill.as_deref()?, e.task?.tgid);
        let spoke = self.peers.of_process(tgid).iter().filter_map(|id| self.peers.get(*id)?.spoke).max()?;
        let sessions = p.mixed > p.answers.answered.max(p.answers.void).saturating_add(1);
        let aborts =
            p.asked_abort.is_some_and(|at| at > spoke && p.acknowledged_abort.is_none_or(|a| a < at));
        let ended = self.threads.of(tgid).any(|d| d.at >= spoke);
        let watched = match self.away {
            // A thread may have ended while nobody looked: it is not why the engine had been silent for long before.
            Some(a) if spoke <= a.to => {
                self.threads.watched_before && a.from.since(spoke) >= self.config.ceiling
            }
            _ => self.threads.watched,
        };
        (watched && !ended).then_some(StallFact {
            spoke,
            rooms: p.answers.silent(),
            several: sessions || aborts,
            aborts,
        })
    }

    /// Opens the finding of the thread that a room's verdict rests on.
    pub(crate) fn tell_thread(&mut self, slot: u32, now: Mono) {
        let Some(room) = self.rooms.get(slot) else { return };
        let Some(j) = room.judgement.as_deref() else { return };
        if j.confidence < Confidence::Likely
            || !matches!(j.class, Class::ReceiverSilent | Class::TransferWorkerSilent)
        {
            return;
        }
        let (group, confidence, role) = (j.group, j.confidence, j.role);
        if self.threads.raised.contains_key(&group) {
            return;
        }
        let Some(facts) = self.facts(room, role, room.progress(role), now) else { return };
        let Some(thread) = facts.thread.filter(|t| t.group == group) else { return };
        if self.threads.raised.len() >= MAX_RAISED {
            self.tally.turned_away.threads += 1;
            return;
        }
        let owes = |l: &&Link| l.told.is_none() && self.peers.address(l.prefill) == facts.prefill.endpoint;
        let deaf = room.links.iter().find(|l| l.deaf && role == Role::Decode).map(|l| (l.decode, NONE));
        let silent = || room.links.iter().find(owes).map_or((room.home.0, NONE), |l| (l.prefill, l.pair));
        let (rank, pair) = deaf.unwrap_or_else(silent);
        let engine = if role == Role::Decode { facts.decode } else { facts.prefill };
        self.threads.raised.insert(group, Raised { rank, pair, thread });
        let mut evidence = vec![named_thread(&thread)];
        if let Was::Reader(x) | Was::Status(x) = &thread.was {
            let gap = thread.at.since(x.at) / 1_000_000;
            evidence.push(format!("{} had come from {} {gap} ms before", foreign_words(x), x.peer));
        }
        evidence.push(reading(&thread.was).to_owned());
        self.raise(Finding {
            group,
            class: Class::ThreadDied,
            confidence,
            actions: of_finding(Class::ThreadDied, &engine),
            engine,
            rooms: vec![facts.room],
            room_count: 1,
            since: thread.at,
            closed_at: None,
            evidence,
        });
    }

    /// Takes the findings of threads that rooms of the agent before rest on as told: a restart is no news.
    pub(crate) fn threads_restored(&mut self) {
        let pinned: Vec<u32> = self.pinned.iter().copied().collect();
        for slot in pinned {
            self.tell_thread(slot, self.now);
        }
        self.forget_finding_events();
    }

    /// Ends findings of threads whose ranks have shown that they live, or have ended, or whose rooms may only queue after all.
    /// Looks once a second.
    pub(crate) fn review_threads(&mut self, now: Mono) {
        if self.threads.raised.is_empty() || now.since(self.threads.looked) < SECOND {
            return;
        }
        self.threads.looked = now;
        let over = |group: u64, r: &Raised| self.lives(r) || self.findings.is_only_possible(group);
        let over = self.threads.raised.iter().filter(|(g, r)| over(**g, r)).map(|(group, _)| *group);
        let over: SmallVec<[u64; 4]> = over.collect();
        for group in over {
            self.threads.raised.remove(&group);
            self.lower(group, now);
        }
        // What is over is told as it last was: with its rooms of now.
        let open: SmallVec<[u64; 4]> = self.threads.raised.keys().copied().collect();
        for finding in open.into_iter().filter_map(|group| self.finding_of(group)).collect::<Vec<_>>() {
            self.raise(finding);
        }
    }

    /// Whether a rank has shown that it can do without this thread, or has ended.
    fn lives(&self, raised: &Raised) -> bool {
        let Raised { rank, pair, thread } = raised;
        if !self.peers.of_process(thread.tgid).contains(rank) {
            return true;
        }
        let answered = match thread.was {
            Was::Reader(_) | Was::Status(_) => {
                return self.reader(*rank).is_none_or(|r| r.death.tid != thread.tid);
            }
            Was::Worker { .. } => self.peers.pair_of(*pair).and_then(|p| p.answers.last),
            Was::Unknown { .. } => self.peers.prefill(*rank).and_then(|p| p.answers.last),
        };
        answered.is_some_and(|at| at > thread.at)
    }

    /// A process is gone: its views of rooms are over, and whoever it owed something knows now.
    fn process_ended(&mut self, exit: Exit) {
        self.threads.processes.remove(&exit.tgid);
        let ids = self.peers.process_ended(exit);
        if ids.is_empty() {
            return;
        }
        // Whoever uses these from now on is another, whatever its number.
        self.connections.disown(exit.tgid);
        let touches = |r: &Room| {
            let home = ids.contains(&r.home.0) || ids.contains(&r.home.1);
            home || r.links.iter().any(|l| ids.contains(&l.prefill) || ids.contains(&l.decode))
        };
        let touched: Vec<u32> =
            self.rooms.iter().filter(|r| touches(r)).filter_map(|r| self.numbers.open(r.room)).collect();
        for slot in touched {
            self.notice_gone(slot);
            self.wheel.set(slot, exit.at, exit.at);
        }
    }

    /// A process of this host that is gone has taken its view with it.
    pub(crate) fn notice_gone(&mut self, slot: u32) {
        let Some(room) = self.rooms.get(slot) else { return };
        let prefill = room.links.iter().filter(|l| l.received.is_some()).map(|l| l.prefill);
        let prefill = room.has_prefill && self.all_gone(prefill, room.home.0, room.opened_at);
        let decode = room.links.iter().filter(|l| l.sent.is_some()).map(|l| l.decode);
        let decode = room.has_decode && self.all_gone(decode, room.home.1, room.opened_at);
        if let Some(room) = self.rooms.get_mut(slot) {
            room.prefill_gone |= prefill;
            room.decode_gone |= decode;
        }
    }

    /// Whether all ranks of a view (`home` where none is known) are gone: it is over with the last of them.
    fn all_gone(&self, mut ranks: impl Iterator<Item = EndpointId>, home: EndpointId, since: Mono) -> bool {
        let gone = |id: EndpointId| {
            let late = |at: Mono| at >= since;
            self.peers
                .get(id)
                .is_some_and(|e| e.listener_closed.is_some_and(late) || e.exited.is_some_and(|x| late(x.at)))
        };
        match ranks.next() {
            Some(first) => gone(first) && ranks.all(gone),
            None => gone(home),
        }
    }
}
