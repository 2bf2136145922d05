//! The room table: takes [`Input`]s, keeps rooms, says [`Event`]s.
//!
//! Pure: no I/O, no clock, no unsafe code. Every table in it is bounded and counts what it turns away.
//! Messages are read in `messages`, connections in `transport`; what a room amounts to is decided in
//! `assess`, from the facts collected in `facts`.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;

use hashbrown::HashMap;

use crate::event::{Mono, SECOND};
use crate::network::model::Network;
use crate::rooms::batches::Missed;
use crate::rooms::connections::{Awaited, Connections};
use crate::rooms::counts::{Counters, Gauges, MAX_INSTANCES, OpenGauge, PinnedGauge, Tally};
use crate::rooms::engines::Engines;
use crate::rooms::estimate::Rule;
use crate::rooms::findings::Findings;
use crate::rooms::gpus::RoomGpus;
use crate::rooms::model::{Away, Event, Input, Outcome, Role, RoomSnapshot};
use crate::rooms::peers::{EndpointId, Peers};
use crate::rooms::rates::Rates;
use crate::rooms::requests::Http;
use crate::rooms::room::{Progress, Room};
use crate::rooms::slab::{Closed, Numbers, Slab, Tomb};
use crate::rooms::spans::Spans;
use crate::rooms::tcp::Unread;
use crate::rooms::threads::Threads;
use crate::rooms::wheel::Wheel;
use crate::sglang::message::{Backend, KvPoll, Releases};
use crate::verdict::facts::Limits;
use crate::verdict::model::Class;

/// Numbers of closed rooms remembered at least, so that late messages open nothing: half a minute at 2000
/// rooms/s. Twice as many at most.
const MAX_TOMBS: usize = 65_536;

/// How long after its end a message can still be of the closed room: an ABORT comes at most a waiting timeout
/// after METADATA.
const LATE_FOR: u64 = 600 * SECOND;

/// Rooms judged in one call of `tick` or `handle`; the rest is due in the next.
const MAX_DUE: usize = 2048;

/// Limits and times of the room table. Times are nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Nothing is overdue before this, whatever the statistics say.
    pub floor: u64,
    /// Phases without queueing or computing are overdue after this at the latest.
    pub ceiling: u64,
    /// Overdue after this many times the p99 of the phase.
    pub factor: u64,
    /// Open rooms.
    pub max_rooms: usize,
    /// Closed rooms whose details are kept.
    pub max_closed: usize,
    /// Connections.
    pub max_connections: usize,
    /// `SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT` of the engines.
    pub bootstrap_timeout: u64,
    /// `SGLANG_DISAGGREGATION_WAITING_TIMEOUT` of the engines.
    pub waiting_timeout: u64,
    /// How long after an engine timer a room that ends unseen is still followed.
    pub margin: u64,
    /// How long the last STATUS of a room may wait for its acknowledgement, where decode is elsewhere and
    /// nothing is known of the delivery, before the room counts as closed.
    pub delivery_grace: u64,
    /// A room is forgotten after this, even if it never ended.
    pub forget_after: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            floor: 10 * SECOND,
            ceiling: 60 * SECOND,
            factor: 8,
            max_rooms: 131_072,
            max_closed: 4096,
            max_connections: 65_536,
            bootstrap_timeout: 300 * SECOND,
            waiting_timeout: 300 * SECOND,
            margin: 60 * SECOND,
            delivery_grace: SECOND,
            forget_after: 86_400 * SECOND,
        }
    }
}

impl Config {
    pub(crate) const fn rule(&self) -> Rule {
        Rule { factor: self.factor, floor: self.floor, ceiling: self.ceiling }
    }

    pub(crate) const fn limits(&self) -> Limits {
        Limits {
            floor: self.floor,
            ceiling: self.ceiling,
            bootstrap_timeout: self.bootstrap_timeout,
            waiting_timeout: self.waiting_timeout,
        }
    }

    /// How far back a room can reach that the agent meets in the middle of its life.
    pub(crate) const fn reach(&self) -> u64 {
        self.waiting_timeout.saturating_add(self.margin)
    }
}

/// A prefill rank and a decode rank that hand rooms over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Prefill rank's endpoint.
    pub prefill: SocketAddr,
    /// Decode rank's endpoint.
    pub decode: SocketAddr,
    /// Decode rank's session.
    pub session: String,
    /// Decode's tensor-parallel rank and size, where a REGISTER named them.
    pub decode_rank: Option<(u32, u32)>,
    /// Whose messages.
    pub backend: Option<Backend>,
    /// Engine releases they fit.
    pub releases: Option<Releases>,
    /// Rooms that concluded between them.
    pub concluded: u64,
    /// When the last of them concluded.
    pub last_concluded: Option<Mono>,
}

/// All rooms of this host.
#[derive(Debug)]
pub struct RoomTable {
    pub(crate) config: Config,
    pub(crate) now: Mono,
    pub(crate) started: Option<Mono>,
    pub(crate) peers: Peers,
    pub(crate) connections: Connections,
    pub(crate) rooms: Slab,
    pub(crate) closed: Closed,
    pub(crate) numbers: Numbers,
    pub(crate) wheel: Wheel,
    /// Rooms that may be given up when space runs out: nothing is owed, or their end cannot be seen.
    pub(crate) expendable: VecDeque<(u32, u32)>,
    /// Why rooms are pinned, and what is wrong with engines.
    pub(crate) findings: Findings,
    pub(crate) rates: Rates,
    pub(crate) pinned: BTreeSet<u32>,
    /// Open views by role and state.
    pub(crate) states: [[u64; 5]; 2],
    pub(crate) tally: Tally,
    /// When a room was last turned away for lack of space.
    pub(crate) turned_away_at: Option<Mono>,
    pub(crate) scratch: Vec<Awaited>,
    /// Engines of this host, as its process table has them and as they say.
    pub(crate) engines: Engines,
    /// Ended threads of the engines' processes.
    pub(crate) threads: Threads,
    /// Sockets whose bytes nobody reads.
    pub(crate) unread: Unread,
    /// What is known from HTTP.
    pub(crate) http: Http,
    /// What schedulers say by their spans.
    pub(crate) spans: Spans,
    /// What GPUs move and suffer.
    pub(crate) gpus: RoomGpus,
    /// What RDMA ports and the engines' own connections move.
    pub(crate) network: Network,
    /// Processes of which the optional probes have missed something.
    pub(crate) missed_batches: Missed,
    /// When nobody looked, where this table goes on where another left off.
    pub(crate) away: Option<Away>,
    /// What was taken over is not confirmed yet: nothing is judged.
    pub(crate) returning: bool,
}

impl RoomTable {
    /// An empty table.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            now: Mono(0),
            started: None,
            peers: Peers::default(),
            connections: Connections::new(config.max_connections),
            rooms: Slab::new(),
            closed: Closed::new(config.max_closed),
            numbers: Numbers::new(MAX_TOMBS),
            wheel: Wheel::new(),
            expendable: VecDeque::new(),
            findings: Findings::default(),
            rates: Rates::default(),
            pinned: BTreeSet::new(),
            states: [[0; 5]; 2],
            tally: Tally::default(),
            turned_away_at: None,
            scratch: Vec::new(),
            engines: Engines::default(),
            threads: Threads::default(),
            unread: Unread::default(),
            http: Http::default(),
            spans: Spans::default(),
            gpus: RoomGpus::default(),
            network: Network::default(),
            missed_batches: Missed::default(),
            away: None,
            returning: false,
        }
    }

    /// Takes one input; what others must hear of is appended to `out`. What became due before the input's
    /// moment is judged first.
    pub fn handle(&mut self, input: &Input<'_>, out: &mut Vec<Event>) {
        match input {
            Input::Message { at, connection, direction, end, decoded } => {
                self.advance(*at, out);
                self.message(*at, connection, *direction, *end, decoded, out);
            }
            Input::Foreign { at, connection, direction, frames, first_len } => {
                self.advance(*at, out);
                self.foreign(*at, connection, *direction, (*frames, *first_len));
            }
            Input::Lossy { at, connection, direction, .. } => {
                self.advance(*at, out);
                self.lossy(*at, connection, *direction);
            }
            Input::State { at, connection, change } => {
                self.advance(*at, out);
                self.state(*at, connection, change, out);
            }
            Input::Acknowledged { at, socket, una } => {
                self.advance(*at, out);
                self.acknowledged(*at, *socket, *una, out);
            }
            Input::Request { at, connection, server, n, step } => {
                self.advance(*at, out);
                self.http_heard(connection);
                self.request(*at, connection, *server, *n, step, out);
            }
            Input::Bootstrap { at, connection, server, n, step } => {
                self.advance(*at, out);
                self.http_heard(connection);
                self.bootstrap_step(*at, connection, *server, *n, step, out);
            }
            Input::Unreadable { at, connection, why } => {
                self.advance(*at, out);
                self.unreadable(*at, connection, *why, out);
            }
            Input::Task(task) => {
                self.advance(task.at, out);
                self.task(task, out);
            }
            Input::Trouble { at, connection, trouble } => {
                self.advance(*at, out);
                self.trouble(*at, connection, *trouble, out);
            }
            Input::Stand { at, socket, stand } => {
                self.advance(*at, out);
                self.stand(*at, *socket, stand, out);
            }
            Input::Process { at, process } => {
                self.advance(*at, out);
                self.process(*at, process, out);
            }
            Input::Gauges { at, gauges } => {
                self.advance(*at, out);
                self.gauged(*at, gauges, out);
            }
            Input::Spans { at, offset, spans } => {
                self.advance(*at, out);
                self.spans_came(*at, *offset, spans);
            }
            Input::Gpu(reading) => {
                self.advance(reading.at, out);
                self.gpus.take(reading);
            }
            Input::Network(reading) => {
                self.advance(reading.at, out);
                self.network_read(reading);
            }
            Input::Batch { at, pid, room, news } => {
                self.advance(*at, out);
                self.batch(*at, *pid, *room, news);
            }
        }
    }

    /// Lets time pass: what is overdue at `now` is judged. To be called about every 100 ms; its cost is
    /// bounded by what is due, never by the number of open rooms.
    pub fn tick(&mut self, now: Mono, out: &mut Vec<Event>) {
        self.advance(now, out);
        self.tick_engines(now);
        self.tick_spans(now, out);
    }

    fn advance(&mut self, now: Mono, out: &mut Vec<Event>) {
        self.started.get_or_insert(now);
        if now <= self.now {
            return;
        }
        if self.returning {
            self.now = now;
            return;
        }
        for _ in 0..MAX_DUE {
            let Some((slot, due)) = self.wheel.pop(now) else { break };
            self.now = self.now.max(due.min(now));
            self.assess(slot, self.now, out);
        }
        self.now = now;
        self.rate(now);
        self.review_threads(now);
        self.look_at_http(now);
    }

    /// The moment up to which inputs and ticks have brought it.
    pub const fn now(&self) -> Mono {
        self.now
    }

    /// Every incarnation of a room number that is still kept, oldest first.
    pub fn snapshot(&self, room: u64) -> Vec<RoomSnapshot> {
        let mut all: Vec<_> = self
            .closed
            .iter()
            .filter(|r| r.room == room)
            .map(|r| self.snapshot_of(r, r.closed.map_or(self.now, |(at, _)| at)))
            .collect();
        if let Some(open) = self.numbers.open(room).and_then(|slot| self.rooms.get(slot)) {
            all.push(self.snapshot_of(open, self.now));
        }
        all
    }

    /// The same with the single readings of its GPUs, ports and connections: for someone who asks for this room, not for lists.
    pub fn details(&self, room: u64) -> Vec<RoomSnapshot> {
        let mut all = self.snapshot(room);
        for snapshot in &mut all {
            self.add_series(snapshot);
            self.add_network_series(snapshot);
        }
        all
    }

    /// Number and incarnation of the open rooms, or of those of them that are pinned or not. Builds no snapshots.
    pub fn keys(&self, pinned: Option<bool>) -> impl Iterator<Item = (u64, u32)> + '_ {
        let is_pinned = |r: &Room| r.judgement.as_ref().is_some_and(|j| j.class.pins());
        self.rooms
            .iter()
            .filter(move |r| pinned.is_none_or(|wanted| is_pinned(r) == wanted))
            .map(|r| (r.room, r.incarnation))
    }

    /// Number and incarnation of the open rooms that are overdue and not pinned. One whose end is never seen, or that owes
    /// nothing, is neither.
    pub fn overdue_keys(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        let overdue =
            |r: &&Room| r.judgement.as_ref().is_some_and(|j| !j.class.pins() && !does_not_age(j.class));
        self.rooms.iter().filter(overdue).map(|r| (r.room, r.incarnation))
    }

    /// Number and incarnation of rooms that have ended and are still kept.
    pub fn closed_keys(&self) -> impl Iterator<Item = (u64, u32)> + '_ {
        self.closed.iter().map(|r| (r.room, r.incarnation))
    }

    /// Open rooms, oldest first.
    pub fn open(&self) -> impl Iterator<Item = RoomSnapshot> + '_ {
        self.rooms.iter().map(|r| self.snapshot_of(r, self.now))
    }

    /// Pinned rooms.
    pub fn pinned(&self) -> impl Iterator<Item = RoomSnapshot> + '_ {
        self.pinned.iter().filter_map(|slot| self.rooms.get(*slot)).map(|r| self.snapshot_of(r, self.now))
    }

    /// Gauges of this moment. Costs a walk over the pinned rooms, and over the open ones until the oldest of
    /// every state is found.
    pub fn gauges(&self) -> Gauges {
        Gauges {
            rooms: self.rooms.len() as u64,
            open: self.open_gauges(),
            pinned: self.pinned_gauges(),
            closed_kept: self.closed.len() as u64,
            connections: self.connections.len() as u64,
        }
    }

    fn open_gauges(&self) -> Vec<OpenGauge> {
        let mut gauges = Vec::new();
        for (role, states) in [Role::Prefill, Role::Decode].into_iter().zip(&self.states) {
            for (state, rooms) in STATES.into_iter().zip(states) {
                gauges.push(OpenGauge { role, state, rooms: *rooms, oldest_age_s: None });
            }
        }
        let mut missing = gauges.iter().filter(|g| g.rooms > 0).count();
        for room in self.rooms.iter() {
            if missing == 0 {
                break;
            }
            let ages = !room.judgement.as_ref().is_some_and(|j| does_not_age(j.class));
            for (role, state) in [Role::Prefill, Role::Decode].into_iter().zip(room.counted) {
                let gauge = gauges.iter_mut().find(|g| g.role == role && Some(g.state) == state);
                if let Some(g) = gauge.filter(|g| ages && g.oldest_age_s.is_none()) {
                    #[allow(clippy::cast_precision_loss, reason = "an age for a graph")]
                    let age = self.now.since(room.opened_at) as f64 / 1e9;
                    g.oldest_age_s = Some(age);
                    missing -= 1;
                }
            }
        }
        gauges
    }

    fn pinned_gauges(&self) -> Vec<PinnedGauge> {
        let mut gauges: Vec<PinnedGauge> = Vec::new();
        let mut index = HashMap::new();
        let mut instances = HashMap::new();
        for j in self.pinned.iter().filter_map(|s| self.rooms.get(*s)).filter_map(|r| r.judgement.as_ref()) {
            let known = instances.len();
            let owed = *instances.entry(j.owes_at).or_insert(known);
            let named = owed < MAX_INSTANCES;
            let key = (j.role, j.class, j.confidence, if named { j.owes_at } else { None }, named);
            let place = *index.entry(key).or_insert_with(|| {
                gauges.push(PinnedGauge {
                    role: j.role,
                    class: j.class,
                    confidence: j.confidence,
                    owed_instance: match j.owes_at {
                        Some(at) if named => at.to_string(),
                        _ if !named => "other".to_owned(),
                        _ => String::new(),
                    },
                    rooms: 0,
                });
                gauges.len() - 1
            });
            if let Some(g) = gauges.get_mut(place) {
                g.rooms += 1;
            }
        }
        gauges
    }

    /// Pins raised since start.
    pub fn pins_raised(&self) -> u64 {
        self.tally.pins_raised()
    }

    /// Counters since start.
    pub fn counters(&self) -> Counters {
        self.tally.counters()
    }

    /// Pairs of ranks that have handed rooms over.
    pub fn peers(&self) -> Vec<Peer> {
        self.peers.pairs().filter_map(|p| self.peer(p)).collect()
    }

    /// The `limit` of them that did so last, the latest first, and how many pairs there are.
    pub fn latest_peers(&self, limit: usize) -> (Vec<Peer>, usize) {
        let mut pairs: Vec<_> = self.peers.pairs().collect();
        let total = pairs.len();
        pairs.sort_unstable_by_key(|p| std::cmp::Reverse(p.answers.last));
        (pairs.into_iter().take(limit).filter_map(|p| self.peer(p)).collect(), total)
    }

    fn peer(&self, p: &crate::rooms::peers::Pair) -> Option<Peer> {
        let registered = |prefill: EndpointId, session| {
            let list = &self.peers.prefill(prefill)?.registered;
            let r = list.iter().find(|r| r.session == session)?;
            Some((r.tp_rank?, r.tp_size?))
        };
        Some(Peer {
            prefill: self.peers.address(p.prefill)?,
            decode: self.peers.address(p.decode)?,
            session: self.peers.session_name(p.session)?.to_string(),
            decode_rank: registered(p.prefill, p.session),
            backend: p.backend,
            releases: p.releases,
            concluded: p.concluded,
            last_concluded: p.answers.last,
        })
    }

    /// Opens a room; `None` when there is no space.
    pub(crate) fn open_room(
        &mut self,
        room: u64,
        incarnation: u32,
        at: Mono,
        home: (EndpointId, EndpointId),
        out: &mut Vec<Event>,
    ) -> Option<u32> {
        if self.rooms.len() >= self.config.max_rooms / 2 {
            self.give_up_one(at, out);
        }
        if self.rooms.len() >= self.config.max_rooms {
            self.tally.turned_away.rooms += 1;
            self.turned_away_at = Some(at);
            return None;
        }
        let slot = self.rooms.open(room, incarnation, at, home);
        self.numbers.begin(room, slot, incarnation);
        Some(slot)
    }

    /// Gives the oldest room up of those whose end cannot be seen or that owe nothing here.
    fn give_up_one(&mut self, at: Mono, out: &mut Vec<Event>) {
        while let Some((slot, generation)) = self.expendable.pop_front() {
            if self.rooms.current(slot, generation).is_some_and(|r| r.expendable) {
                self.tally.turned_away.expired_early += 1;
                self.close_room(slot, Outcome::Unknown, at, out);
                return;
            }
        }
    }

    /// Ends a room: counts it, tells it, keeps its details for a while and its number for longer.
    pub(crate) fn close_room(&mut self, slot: u32, outcome: Outcome, at: Mono, out: &mut Vec<Event>) {
        let views = self.rooms.get(slot).map(Room::views).unwrap_or_default();
        self.close_with(slot, views, outcome, at, out);
    }

    /// The same where it is known what the room's views amount to.
    pub(crate) fn close_with(
        &mut self,
        slot: u32,
        views: [Option<Progress>; 2],
        outcome: Outcome,
        at: Mono,
        out: &mut Vec<Event>,
    ) {
        let held = self.rooms.get(slot).and_then(Room::cause);
        self.regroup(slot, held.map(|(group, _, confidence)| (group, confidence)), None, at);
        self.wheel.remove(slot);
        self.end_moves(slot, at);
        let Some(mut room) = self.rooms.remove(slot) else { return };
        room.closed = Some((at, outcome));
        for ((role, view), counted) in
            [Role::Prefill, Role::Decode].into_iter().zip(views).zip(&mut room.counted)
        {
            if let Some(state) = counted.take() {
                self.count_state(role, state, false);
            }
            if let Some(view) = view {
                self.tally.close(role, view.terminal.unwrap_or(outcome));
            }
        }
        self.numbers.end(room.room, at, room.heard_by(), self.closed.next_number());
        out.push(Event::Closed(Arc::new(self.snapshot_with(&room, views, at))));
        let requests =
            room.request.as_deref().map(super::requests::legs::RoomRequest::open_keys).unwrap_or_default();
        let (number, memory) = self.closed.keep(room);
        self.follow_closed(&requests, number);
        self.spans_of_closed(at, number);
        if let Some(memory) = memory {
            self.rooms.reuse(memory);
        }
    }

    /// The last room of this number, if it has closed and is still kept.
    pub(crate) fn last_closed(&self, number: u64) -> Option<&Room> {
        self.closed.get(self.numbers.tomb(number)?.kept).filter(|r| r.room == number)
    }

    /// Whether a message for this number, which no open room has, is one of its last room.
    pub(crate) fn is_late_for(&self, room: u64, at: Mono) -> bool {
        self.numbers.tomb(room).is_some_and(|t| at.since(t.closed_at) < LATE_FOR)
    }

    pub(crate) fn count_state(&mut self, role: Role, state: KvPoll, more: bool) {
        let row = self.states.get_mut(usize::from(role == Role::Decode));
        if let Some(n) = row.and_then(|r| r.get_mut(state as usize)) {
            *n = if more { *n + 1 } else { n.saturating_sub(1) };
        }
    }
}

/// Which life of a number begins, after its last room.
pub(crate) fn next_life(last: Option<Tomb>) -> u32 {
    last.map_or(0, |t| t.incarnation.saturating_add(1))
}

const STATES: [KvPoll; 5] =
    [KvPoll::Failed, KvPoll::Bootstrapping, KvPoll::WaitingForInput, KvPoll::Transferring, KvPoll::Success];

/// Verdicts of rooms that do not age: nothing is owed, or their end cannot be seen.
pub(crate) const fn does_not_age(class: Class) -> bool {
    matches!(class, Class::CompletionNotObservable | Class::NotApplicable)
}
