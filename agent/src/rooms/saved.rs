//! What is known of rooms, as it goes into a state file and comes back.
//!
//! Pure. Names are numbered anew, so that only those in use are written; whatever the numbers in a file say, they are
//! looked up and never trusted. What is derived here and in [`crate::rooms::room`] is the file's format: a new field is
//! an `Option` or has a default, a changed one needs a new version of the format.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::event::{Mono, SocketId, Task};
use crate::gpu::model::{Gpus, SavedGpu};
use crate::rooms::connections::{Again, Awaited, Carried};
use crate::rooms::engines::SavedEngine;
use crate::rooms::estimate::{Durations, SavedHistogram};
use crate::rooms::groups::Group;
use crate::rooms::model::{Away, Completeness, Connection, EngineProcess, Event, Phase, Role};
use crate::rooms::peers::{
    Answers, Concluded, DeadReader, Exit, ForeignMark, MAX_KINDS, NONE, Recent, Registered, Source,
};
use crate::rooms::requests::bootstrap::SavedBootstrap;
use crate::rooms::requests::legs::RoomRequest;
use crate::rooms::room::{Abort, Link, MAX_LINKS, MAX_MARKS, Mark, Room};
use crate::rooms::slab::{NOT_KEPT, Tomb};
use crate::rooms::spans::Scheduled;
use crate::rooms::table::{Config, RoomTable};
use crate::rooms::tcp::Pile;
use crate::rooms::threads::SavedThreads;
use crate::sglang::message::{Backend, Kind, Releases};
use crate::verdict::judge::Judgement;

/// Rooms written down at most, pinned ones first.
pub(crate) const MAX_ROOMS: usize = 16_384;
/// Connections written down at most.
const MAX_CONNECTIONS: usize = 8192;
/// Numbers of closed rooms written down at most: late messages mostly come within seconds.
const MAX_TOMBS: usize = 8192;
/// Sent messages of one connection whose acknowledgement is awaited, written down at most.
const MAX_AWAITED: usize = 64;
/// Concluded rooms of one rank or pair, written down at most.
const MAX_RECENT: usize = 8;
/// Decode ranks registered at one prefill rank, written down at most.
const MAX_REGISTERED: usize = 256;

/// Processes of the state that still run, and those that do not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Survivors {
    /// The same process as before.
    pub alive: BTreeSet<u32>,
    /// Ended; its number may be another's now. One in neither set could not be told.
    pub gone: BTreeSet<u32>,
}

impl Survivors {
    pub(crate) fn keep(&self, task: Option<Task>) -> Option<Task> {
        task.filter(|t| self.alive.contains(&t.tgid))
    }
}

/// Open rooms and what is known of those who talk about them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedRooms {
    endpoints: Vec<SavedEndpoint>,
    sessions: Vec<String>,
    pairs: Vec<SavedPair>,
    connections: Vec<SavedConnection>,
    /// Pinned ones first.
    rooms: Vec<SavedRoom>,
    /// Numbers of rooms that have closed: room, incarnation, when.
    #[serde(default)]
    closed: Vec<(u64, u32, Mono)>,
    /// Threads of the engines' processes that have ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    threads: Vec<SavedThreads>,
    /// Whether any end of a thread was ever told.
    #[serde(default)]
    threads_watched: bool,
    /// What is known of engines, those that stand still first.
    #[serde(default, alias = "standing")]
    engines: Vec<SavedEngine>,
    /// Their processes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    engine_processes: Vec<EngineProcess>,
    /// Bootstrap servers with missing ranks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    bootstraps: Vec<SavedBootstrap>,
    /// What GPUs did.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    gpus: Vec<SavedGpu>,
    /// Rooms and connections that did not fit.
    #[serde(default)]
    left_out: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SavedEndpoint {
    address: SocketAddr,
    #[serde(default)]
    netns: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lost: Option<Mono>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    listener_closed: Option<Mono>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    refused: Option<(Mono, u32)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cut: Option<Mono>,
    reached: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    task: Option<Task>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rank: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    foreign: Option<ForeignMark>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    kinds: Vec<ForeignMark>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    dead_reader: Option<DeadReader>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    took: Option<Mono>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    exited: Option<Exit>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    spoke: Option<Mono>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    prefill: Option<SavedPrefill>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SavedPrefill {
    answers: SavedAnswers,
    acknowledged_abort: Option<Mono>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    asked_abort: Option<Mono>,
    #[serde(default)]
    last_session: Option<u32>,
    #[serde(default)]
    mixed: u32,
    says_success: bool,
    prefill_complete: bool,
    registered: Vec<Registered>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group: Option<Group>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SavedAnswers {
    asked: u32,
    answered: u32,
    last: Option<Mono>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    first: Option<Mono>,
    #[serde(default)]
    void: u32,
    recent: Vec<Concluded>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SavedPair {
    prefill: u32,
    decode: u32,
    session: u32,
    backend: Option<Backend>,
    releases: Option<Releases>,
    answers: SavedAnswers,
    concluded: u64,
    durations: Vec<SavedHistogram>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct SavedConnection {
    connection: Connection,
    target: u32,
    origin: u32,
    session: u32,
    pair: u32,
    backend: Option<Backend>,
    releases: Option<Releases>,
    carried: Carried,
    generations: bool,
    una: Option<(u64, Mono)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    again: Option<Again>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unread: Option<Pile>,
    reference: Option<u64>,
    awaited: Vec<SavedAwaited>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedAwaited {
    end: u64,
    at: Mono,
    /// Place of the room in the list of rooms.
    room: u32,
    kind: Kind,
    link: u16,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
struct SavedRoom {
    room: u64,
    incarnation: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    backend: Option<Backend>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    releases: Option<Releases>,
    completeness: Completeness,
    opened_at: Mono,
    home: (u32, u32),
    has_prefill: bool,
    has_decode: bool,
    maybe_older: bool,
    links: Vec<Link>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bootstrap_at: Option<Mono>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    computed_at: Option<Mono>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    abort: Option<Abort>,
    prefill_gone: bool,
    decode_gone: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    failed_inside: Option<Mono>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    staging_wait: Option<Mono>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    request: Option<Box<RoomRequest>>,
    /// What a transfer that passed meanwhile would have said is said by the rank's connection, which has moved then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    scheduled: Option<Box<Scheduled>>,
    marks: Vec<Mark>,
    marks_dropped: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    judgement: Option<Judgement>,
    was_pinned: bool,
    phases: [(Phase, Mono); 2],
}

impl SavedRooms {
    /// Open rooms in it.
    pub fn rooms(&self) -> usize {
        self.rooms.len()
    }

    /// Rooms and connections that did not fit.
    pub const fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Leaves the last rooms out, so that at most `n` remain; pinned ones come first.
    pub fn truncate(&mut self, n: usize) {
        let before = self.rooms.len();
        self.rooms.truncate(n);
        self.left_out = self.left_out.saturating_add((before - self.rooms.len()) as u64);
    }

    /// Processes that it names.
    pub fn processes(&self) -> impl Iterator<Item = u32> + '_ {
        let endpoints = self.endpoints.iter().filter_map(|e| e.task);
        let named = endpoints.chain(self.connections.iter().filter_map(|c| c.connection.task));
        let engines = self.engines.iter().filter_map(SavedEngine::pid);
        let engines = engines.chain(self.engine_processes.iter().map(|p| p.pid));
        named.map(|t| t.tgid).chain(self.threads.iter().map(|t| t.tgid)).chain(engines)
    }
}

/// Numbers names anew in the order in which they are asked for.
#[derive(Debug, Default)]
struct Chosen {
    new: HashMap<u32, u32>,
    order: Vec<u32>,
}

impl Chosen {
    fn take(&mut self, id: u32) -> u32 {
        if id == NONE {
            return NONE;
        }
        *self.new.entry(id).or_insert_with(|| {
            self.order.push(id);
            u32::try_from(self.order.len() - 1).unwrap_or(NONE)
        })
    }
}

/// Collects what is written down.
struct Saver<'a> {
    table: &'a RoomTable,
    endpoints: Chosen,
    sessions: Chosen,
    pairs: Chosen,
    /// Prefill's groups whose ranks are all among the endpoints.
    groups: Vec<Group>,
    /// Where each open room stands in the list.
    places: HashMap<(u32, u32), u32>,
    saved: SavedRooms,
}

impl RoomTable {
    /// What would have to be known to go on later. Costs a walk over the open rooms.
    pub fn save(&self) -> SavedRooms {
        let mut saver = Saver {
            table: self,
            endpoints: Chosen::default(),
            sessions: Chosen::default(),
            pairs: Chosen::default(),
            groups: Vec::new(),
            places: HashMap::new(),
            saved: SavedRooms::default(),
        };
        let pinned = self.pinned.iter().filter_map(|slot| self.rooms.get(*slot));
        let others = self.rooms.iter().filter(|r| !r.pinned());
        for room in pinned.chain(others).take(MAX_ROOMS) {
            saver.room(room);
        }
        saver.saved.left_out = self.rooms.len().saturating_sub(saver.saved.rooms.len()) as u64;
        let tombs = self.numbers.newest(MAX_TOMBS).into_iter();
        saver.saved.closed = tombs.map(|(room, t)| (room, t.incarnation, t.closed_at)).collect();
        saver.saved.engines = self.engines.save(self.started.unwrap_or(self.now));
        saver.saved.engine_processes = self.engines.save_processes();
        saver.saved.bootstraps = self.http.bootstraps.save();
        saver.saved.gpus = self.gpus.known.save();
        saver.connections();
        saver.names();
        (saver.saved.threads, saver.saved.threads_watched) = self.threads.save();
        saver.saved
    }

    /// When nobody looked at this room, if it was taken over from another table.
    pub(crate) fn restored(&self, room: &Room) -> Option<Away> {
        self.away.filter(|away| room.opened_at <= away.from)
    }
}

impl Saver<'_> {
    fn room(&mut self, r: &Room) {
        let place = u32::try_from(self.saved.rooms.len()).unwrap_or(NONE);
        if let Some(slot) = self.table.numbers.open(r.room) {
            self.places.insert((slot, r.generation), place);
        }
        let links = r.links.iter().map(|l| Link {
            prefill: self.endpoints.take(l.prefill),
            decode: self.endpoints.take(l.decode),
            session: self.sessions.take(l.session),
            pair: self.pairs.take(l.pair),
            ..*l
        });
        let links = links.collect();
        let marks = r.marks.iter().map(|m| Mark { peer: self.endpoints.take(m.peer), ..*m }).collect();
        let missed = self.table.is_lossy(r) || self.table.may_have_missed_frames(r);
        let lossy = r.completeness == Completeness::Full && missed;
        self.saved.rooms.push(SavedRoom {
            room: r.room,
            incarnation: r.incarnation,
            backend: r.backend,
            releases: r.releases,
            // Where bytes were missed before is not written down.
            completeness: if lossy { Completeness::Lossy } else { r.completeness },
            opened_at: r.opened_at,
            home: (self.endpoints.take(r.home.0), self.endpoints.take(r.home.1)),
            has_prefill: r.has_prefill,
            has_decode: r.has_decode,
            maybe_older: r.maybe_older,
            links,
            bootstrap_at: r.bootstrap_at,
            computed_at: r.computed_at,
            abort: r.abort,
            prefill_gone: r.prefill_gone,
            decode_gone: r.decode_gone,
            failed_inside: r.failed_inside,
            staging_wait: r.staging_wait,
            request: r.request.clone(),
            scheduled: r.scheduled.clone(),
            marks,
            marks_dropped: r.marks_dropped,
            judgement: r.judgement.as_deref().cloned(),
            was_pinned: r.was_pinned,
            phases: r.phases,
        });
    }

    fn connections(&mut self) {
        for k in self.table.connections.iter().filter(|k| k.live) {
            if self.saved.connections.len() >= MAX_CONNECTIONS {
                self.saved.left_out += 1;
                continue;
            }
            let place = |a: &Awaited| {
                let room = *self.places.get(&(a.slot, a.generation))?;
                Some(SavedAwaited { end: a.end, at: a.at, room, kind: a.kind, link: a.link })
            };
            let mut awaited: Vec<_> = k.awaited().rev().filter_map(place).take(MAX_AWAITED).collect();
            awaited.reverse();
            let carried = match k.carried {
                Carried::Rank(rank) => Carried::Rank(self.endpoints.take(rank)),
                other => other,
            };
            self.saved.connections.push(SavedConnection {
                connection: k.connection,
                target: self.endpoints.take(k.target),
                origin: self.endpoints.take(k.origin),
                session: self.sessions.take(k.session),
                pair: self.pairs.take(k.pair),
                backend: k.backend,
                releases: k.releases,
                carried,
                generations: k.generations,
                una: k.una,
                again: k.again,
                unread: self.table.unread.at(k.target, k.connection.socket),
                reference: k.reference(),
                awaited,
            });
        }
    }

    /// Everybody that rooms and connections have named; registered ranks and pairs name more.
    fn names(&mut self) {
        let peers = &self.table.peers;
        for pair in self.pairs.order.iter().filter_map(|id| peers.pair_of(*id)) {
            self.saved.pairs.push(SavedPair {
                prefill: self.endpoints.take(pair.prefill),
                decode: self.endpoints.take(pair.decode),
                session: self.sessions.take(pair.session),
                backend: pair.backend,
                releases: pair.releases,
                answers: answers(&pair.answers),
                concluded: pair.concluded,
                durations: pair.durations.save(),
            });
        }
        let namespaces = peers.namespaces();
        let mut next = 0;
        while let Some(id) = self.endpoints.order.get(next).copied() {
            next += 1;
            let Some(e) = peers.get(id) else { continue };
            let prefill = e.prefill.as_deref().map(|p| {
                self.group(p.group);
                let old = p.registered.len().saturating_sub(MAX_REGISTERED);
                let registered = p.registered.iter().skip(old).map(|r| Registered {
                    decode: self.endpoints.take(r.decode),
                    session: self.sessions.take(r.session),
                    ..*r
                });
                SavedPrefill {
                    registered: registered.collect(),
                    answers: answers(&p.answers),
                    acknowledged_abort: p.acknowledged_abort,
                    asked_abort: p.asked_abort,
                    last_session: (p.answers.asked > 0).then(|| self.sessions.take(p.last_session)),
                    mixed: p.mixed,
                    says_success: p.says_success,
                    prefill_complete: p.prefill_complete,
                    group: p.group,
                }
            });
            self.saved.endpoints.push(SavedEndpoint {
                address: e.address,
                netns: namespaces.get(&id).copied().unwrap_or(0),
                lost: e.lost,
                listener_closed: e.listener_closed,
                refused: e.refused,
                cut: e.cut,
                reached: e.reached,
                task: e.task,
                rank: e.rank,
                foreign: e.foreign,
                kinds: e.kinds.clone(),
                dead_reader: self.table.reader_to_save(id),
                took: e.took,
                exited: e.exited,
                spoke: e.spoke,
                prefill,
            });
        }
        let name = |id: &u32| peers.session_name(*id).map_or_else(String::new, |n: &Arc<str>| n.to_string());
        self.saved.sessions = self.sessions.order.iter().map(name).collect();
    }

    /// The other ranks that one agrees with, each group once.
    fn group(&mut self, group: Option<Group>) {
        let Some(group) = group.filter(|g| !self.groups.iter().any(|known| known.is_with(g))) else { return };
        self.groups.push(group);
        for (id, e) in self.table.peers.endpoints() {
            if e.prefill.as_deref().and_then(|p| p.group).is_some_and(|g| g.is_with(&group)) {
                self.endpoints.take(id);
            }
        }
    }
}

fn answers(a: &Answers) -> SavedAnswers {
    SavedAnswers {
        asked: a.asked,
        answered: a.answered,
        last: a.last,
        first: a.first,
        void: a.void,
        recent: a.recent.newest(MAX_RECENT),
    }
}

fn answers_back(a: SavedAnswers) -> Answers {
    let SavedAnswers { asked, answered, last, first, void, recent } = a;
    Answers { asked, answered, void, first, last, recent: Recent::resumed(recent) }
}

/// Numbers of the file → numbers of the table.
#[derive(Debug, Default)]
struct Ids(Vec<u32>);

impl Ids {
    fn get(&self, saved: u32) -> u32 {
        self.0.get(saved as usize).copied().unwrap_or(NONE)
    }
}

/// The numbers of everybody.
#[derive(Debug, Default)]
struct Names {
    endpoints: Ids,
    sessions: Ids,
    pairs: Ids,
}

impl RoomTable {
    /// Goes on where another table left off at `from`. [`Self::returned`] says which connections are still there;
    /// until then nothing is judged.
    pub fn restore(config: Config, saved: SavedRooms, away: Away, survivors: &Survivors) -> Self {
        let mut table = Self::new(config);
        table.now = away.to;
        table.away = Some(away);
        table.returning = true;
        let SavedRooms { endpoints, sessions, pairs, connections, rooms, closed, .. } = saved;
        let alive = |pid: u32| survivors.alive.contains(&pid);
        table.engines.restore(saved.engines, &saved.engine_processes, away, alive);
        table.http.bootstraps.restore(saved.bootstraps, away);
        table.gpus.known = Gpus::restore(saved.gpus, away.from, alive);
        for (room, incarnation, closed_at) in closed.into_iter().take(MAX_TOMBS) {
            table.numbers.bury(room, Tomb { incarnation, closed_at, heard: 0, kept: NOT_KEPT });
        }
        table.threads.restore(saved.threads, saved.threads_watched, alive);
        let names = table.restore_names(endpoints, &sessions, pairs, survivors);
        // The table has its rooms in the order of opening; other lists name them by their place in the file.
        let mut order: Vec<(usize, SavedRoom)> = rooms.into_iter().enumerate().collect();
        order.sort_by_key(|(_, r)| r.opened_at);
        let mut slots = vec![NONE; order.len()];
        for (place, room) in order {
            if let (Some(slot), Some(to)) = (table.restore_room(room, &names), slots.get_mut(place)) {
                *to = slot;
            }
        }
        for connection in connections {
            table.restore_connection(connection, &names, &slots, survivors);
        }
        table.regroup_restored();
        for slot in slots {
            table.resume_requests(slot);
        }
        table.threads_restored();
        table
    }

    fn restore_names(
        &mut self,
        endpoints: Vec<SavedEndpoint>,
        sessions: &[String],
        pairs: Vec<SavedPair>,
        survivors: &Survivors,
    ) -> Names {
        let (now, turned) = (self.now, &mut self.tally.turned_away);
        let mut names = Names::default();
        names.sessions.0 = sessions.iter().map(|name| self.peers.session(name, turned)).collect();
        let mut ranks = Vec::new();
        for saved in endpoints {
            let id = self.peers.endpoint(saved.address, saved.netns, turned);
            names.endpoints.0.push(id);
            let Some(e) = self.peers.get_mut(id) else { continue };
            (e.lost, e.listener_closed, e.refused) = (saved.lost, saved.listener_closed, saved.refused);
            e.cut = saved.cut;
            (e.reached, e.rank, e.foreign) = (saved.reached, saved.rank, saved.foreign);
            (e.dead_reader, e.last_foreign) = (saved.dead_reader, saved.foreign);
            e.kinds = saved.kinds.into_iter().take(MAX_KINDS).collect();
            (e.exited, e.spoke, e.took) = (saved.exited, saved.spoke, saved.took);
            self.peers.owned(id, survivors.keep(saved.task));
            let Some(e) = self.peers.get_mut(id) else { continue };
            if saved.task.is_some_and(|t| survivors.gone.contains(&t.tgid)) {
                e.listener_closed.get_or_insert(now);
            }
            ranks.extend(saved.prefill.map(|p| (id, p)));
        }
        for (id, saved) in ranks {
            let Some(p) = self.peers.prefill_mut(id) else { continue };
            p.answers = answers_back(saved.answers);
            (p.acknowledged_abort, p.asked_abort) = (saved.acknowledged_abort, saved.asked_abort);
            p.mixed = saved.mixed;
            p.last_session = saved.last_session.map_or(p.last_session, |s| names.sessions.get(s));
            (p.says_success, p.prefill_complete, p.group) =
                (saved.says_success, saved.prefill_complete, saved.group);
            let registered = saved.registered.into_iter().take(MAX_REGISTERED).map(|r| Registered {
                decode: names.endpoints.get(r.decode),
                session: names.sessions.get(r.session),
                ..r
            });
            p.registered = registered.collect();
        }
        for saved in pairs {
            let (prefill, decode) = (names.endpoints.get(saved.prefill), names.endpoints.get(saved.decode));
            let id = self.peers.pair(prefill, decode, names.sessions.get(saved.session), turned);
            names.pairs.0.push(id);
            let Some(pair) = self.peers.pair_mut(id) else { continue };
            (pair.backend, pair.releases, pair.concluded) = (saved.backend, saved.releases, saved.concluded);
            pair.answers = answers_back(saved.answers);
            pair.durations = Durations::restore(saved.durations);
        }
        names
    }

    fn restore_room(&mut self, r: SavedRoom, names: &Names) -> Option<u32> {
        if self.numbers.open(r.room).is_some() || self.rooms.len() >= self.config.max_rooms {
            self.tally.turned_away.rooms += 1;
            return None;
        }
        let home = (names.endpoints.get(r.home.0), names.endpoints.get(r.home.1));
        let slot = self.rooms.open(r.room, r.incarnation, r.opened_at, home);
        self.numbers.begin(r.room, slot, r.incarnation);
        let room = self.rooms.get_mut(slot)?;
        (room.backend, room.releases, room.completeness) = (r.backend, r.releases, r.completeness);
        (room.has_prefill, room.has_decode) = (r.has_prefill, r.has_decode);
        (room.prefill_gone, room.decode_gone) = (r.prefill_gone, r.decode_gone);
        (room.maybe_older, room.was_pinned) = (r.maybe_older, r.was_pinned);
        (room.bootstrap_at, room.computed_at, room.abort) = (r.bootstrap_at, r.computed_at, r.abort);
        (room.failed_inside, room.staging_wait) = (r.failed_inside, r.staging_wait);
        room.request = r.request;
        room.scheduled = r.scheduled;
        room.links.extend(r.links.into_iter().take(MAX_LINKS).map(|l| Link {
            prefill: names.endpoints.get(l.prefill),
            decode: names.endpoints.get(l.decode),
            session: names.sessions.get(l.session),
            pair: names.pairs.get(l.pair),
            ..l
        }));
        room.marks.extend(
            r.marks.into_iter().take(MAX_MARKS).map(|m| Mark { peer: names.endpoints.get(m.peer), ..m }),
        );
        (room.marks_dropped, room.phases) = (r.marks_dropped, r.phases);
        room.judgement = r.judgement.map(Box::new);
        let views = [Role::Prefill, Role::Decode].map(|role| room.has(role).then(|| room.progress(role)));
        self.note_phases(slot, views);
        Some(slot)
    }

    fn restore_connection(
        &mut self,
        saved: SavedConnection,
        names: &Names,
        slots: &[u32],
        survivors: &Survivors,
    ) {
        let mut connection = saved.connection;
        connection.task = survivors.keep(connection.task);
        let (target, origin) = (names.endpoints.get(saved.target), names.endpoints.get(saved.origin));
        if target == NONE || self.connections.find(connection.socket) != NONE {
            return;
        }
        let id = self.follow(&connection, target);
        let mut awaited = VecDeque::new();
        for a in saved.awaited.into_iter().take(MAX_AWAITED) {
            let slot = slots.get(a.room as usize).copied().unwrap_or(NONE);
            let Some(room) = self.rooms.get(slot) else { continue };
            let (generation, kind, link) = (room.generation, a.kind, a.link);
            awaited.push_back(Awaited { end: a.end, at: a.at, slot, generation, kind, link });
        }
        let Some(k) = self.connections.get_mut(id) else { return };
        (k.origin, k.session) = (origin, names.sessions.get(saved.session));
        k.pair = names.pairs.get(saved.pair);
        (k.backend, k.releases, k.generations) = (saved.backend, saved.releases, saved.generations);
        k.carried = match saved.carried {
            Carried::Rank(rank) => Carried::Rank(names.endpoints.get(rank)),
            other => other,
        };
        (k.una, k.again) = (saved.una, saved.again);
        k.resume(saved.reference, awaited);
        if let Some(pile) = saved.unread {
            // Should its reader have read on meanwhile, the next answer shows it.
            self.unread.resume((target, connection.socket), pile);
        }
        if origin != NONE {
            self.peers.opened(origin);
        }
    }

    /// Ends the taking over of rooms: `follows` says which connections are still there, `met` are those that are there
    /// and were not known. Looks at every room then; what has changed is appended to `out`.
    pub fn returned(
        &mut self,
        follows: impl Fn(SocketId) -> bool,
        met: &[Connection],
        now: Mono,
        out: &mut Vec<Event>,
    ) {
        let gone: Vec<Connection> =
            self.connections.iter().map(|k| k.connection).filter(|c| !follows(c.socket)).collect();
        for connection in gone {
            self.gone_unseen(&connection, now);
        }
        for c in met {
            let ends = [(c.addresses.local, c.addresses.peer), (c.addresses.peer, c.addresses.local)];
            for (rank, other) in ends {
                if let Some(target) = self.peers.find(rank, c.netns) {
                    self.peers.lose(target, Source::Stranger(other.ip()), now);
                }
            }
        }
        self.returning = false;
        self.requests_returned(&follows, now, out);
        let open: Vec<u32> = self.rooms.iter().filter_map(|r| self.numbers.open(r.room)).collect();
        for slot in open {
            let was = self.rooms.get(slot).is_some_and(Room::pinned);
            let told = out.len();
            self.assess(slot, now, out);
            // A restart is no news of every open room: that nothing is known any more of one that was not pinned stands
            // in its record.
            if !was && matches!(out.get(told), Some(Event::VerdictChanged(_))) {
                out.truncate(told);
            }
        }
    }

    /// How many of the rooms taken over are open, and how many of those pinned.
    pub(crate) fn resumed(&self) -> (u64, u64) {
        let open = self.rooms.iter().filter(|r| self.restored(r).is_some());
        let pinned = open.clone().filter(|r| r.pinned()).count();
        (open.count() as u64, pinned as u64)
    }

    /// A connection ended while nobody looked: what it carried before is not known, nor whether it arrived.
    fn gone_unseen(&mut self, c: &Connection, now: Mono) {
        self.lossy(now, c, crate::event::Direction::Received);
        let Some(k) = self.stop_following(c.socket) else { return };
        for end in [k.target, k.origin] {
            if end != NONE && k.live {
                self.peers.went(end, now);
            }
        }
    }
}
