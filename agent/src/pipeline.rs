//! One owner of everything between a source and the exports: socket events in, room events out.
//!
//! Pure like the stages it holds: no I/O, no clock (time is an argument), no unsafe code. Live capture, replay, tests
//! and benches all drive this.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::batch::{Batch, Layout};
use crate::control::{ConnectionState, Control, Judgement, Limits, SavedControl};
use crate::event::{Direction, Event as Happened, Mono, SocketEvent, SocketId};
use crate::replay::recorded::Recorder;
use crate::rooms::model::{Away, Connection, Event, FindingEvent, Input, Role};
use crate::rooms::{self, RoomTable, SavedRooms, Survivors};
use crate::sglang::message::{Flow, Message};

/// Endpoints waiting to be told to the source at most; more are counted and told when they are named again.
const WANTED: usize = 1024;

/// Engine processes remembered at most; a host runs one per GPU and role.
const PROCESSES: usize = 1024;

/// Open connections of one engine that its counts are compared with at most.
const CONNECTIONS: usize = 1024;

/// Everything that a pipeline must know to go on where another left off.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// When.
    pub at: Mono,
    /// Connections.
    pub control: SavedControl,
    /// Rooms.
    pub rooms: SavedRooms,
    /// Engine processes with their roles.
    pub processes: BTreeMap<u32, Role>,
}

impl Saved {
    /// Every process that it names, some more than once.
    pub fn processes(&self) -> impl Iterator<Item = u32> + '_ {
        let sockets = self.control.sockets.iter().filter_map(|s| s.connection.task).map(|t| t.tgid);
        self.processes.keys().copied().chain(sockets).chain(self.rooms.processes())
    }
}

/// What was taken over from another pipeline.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resumed {
    /// Connections that are still there.
    pub connections: u64,
    /// Connections that are not.
    pub connections_gone: u64,
    /// Rooms that go on.
    pub rooms: u64,
    /// Those of them that are pinned.
    pub pinned: u64,
    /// Rooms of the file that are over, because their process is, or that found no place.
    pub rooms_over: u64,
}

/// Stages from socket event to room event.
#[derive(Debug)]
pub struct Pipeline {
    control: Control,
    rooms: RoomTable,
    events: Vec<Event>,
    wanted: Vec<SocketAddr>,
    wanted_dropped: u64,
    processes: BTreeMap<u32, Role>,
    /// Room events so far.
    told: u64,
    /// Rooms taken over, until the source has found what is there.
    returning: Option<u64>,
    recorder: Option<Recorder>,
}

impl Pipeline {
    /// Nothing seen yet.
    pub fn new(limits: Limits, rooms: rooms::Config) -> Self {
        Self {
            control: Control::new(limits),
            rooms: RoomTable::new(rooms),
            events: Vec::new(),
            wanted: Vec::new(),
            wanted_dropped: 0,
            processes: BTreeMap::new(),
            told: 0,
            returning: None,
            recorder: None,
        }
    }

    /// What another pipeline must know to go on from here. Costs a walk over sockets and open rooms.
    pub fn save(&self, now: Mono) -> Saved {
        Saved {
            at: now,
            control: self.control.save(),
            rooms: self.rooms.save(),
            processes: self.processes.clone(),
        }
    }

    /// Grows whenever [`Self::save`] may give something else than before.
    pub const fn changes(&self) -> u64 {
        self.control.counters().events.saturating_add(self.told)
    }

    /// Goes on where another left off. Give it the events of the sockets that are there now, then call
    /// [`Self::returned`].
    pub fn restore(
        limits: Limits,
        config: rooms::Config,
        saved: Saved,
        survivors: &Survivors,
        now: Mono,
    ) -> Self {
        let away = Away { from: saved.at, to: now };
        let mut pipeline = Self::new(limits, config);
        pipeline.returning = Some(u64::try_from(saved.rooms.rooms()).unwrap_or(u64::MAX));
        pipeline.control = Control::restore(limits, saved.control, survivors, now);
        pipeline.rooms = RoomTable::restore(config, saved.rooms, away, survivors);
        pipeline.processes = saved.processes;
        pipeline.processes.retain(|pid, _| survivors.alive.contains(pid));
        // A source that has begun anew does not watch them any more.
        let decodes = pipeline.rooms.peers().into_iter().map(|p| p.decode);
        pipeline.wanted = decodes.take(WANTED).collect();
        pipeline.wanted.sort_unstable();
        pipeline.wanted.dedup();
        pipeline
    }

    /// The source has found what is there: what was taken over and is not among it is gone. Every room that was taken
    /// over is looked at then.
    pub fn returned(&mut self, now: Mono) -> Resumed {
        let Some(rooms_before) = self.returning.take() else { return Resumed::default() };
        let Self { control, rooms, events, .. } = self;
        let connections = control.returned(now, &mut |input| rooms.handle(&input, events));
        rooms.returned(|socket| control.follows(socket), &connections.met, now, events);
        let (open, pinned) = rooms.resumed();
        Resumed {
            connections: connections.found,
            connections_gone: connections.gone,
            rooms: open,
            pinned,
            rooms_over: rooms_before.saturating_sub(open),
        }
    }

    /// Takes one event of a source.
    pub fn take(&mut self, event: &Happened<'_>) {
        match event {
            Happened::Socket(event) => self.handle(event),
            Happened::Task(event) => self.tell(&Input::Task(*event)),
            // Added up by whoever drives the source: a reading of a process comes of many of them.
            Happened::Carried(_) => {}
        }
    }

    /// Takes what is known from elsewhere than sockets: processes, threads, gauges.
    pub fn tell(&mut self, input: &Input<'_>) {
        if let Some(recorder) = &mut self.recorder {
            recorder.record(input);
        }
        // Of a recording there are none to look at.
        if let Input::Gauges { gauges, .. } = input
            && self.control.sockets() > 0
        {
            self.show_connections(gauges.server);
        }
        meet(input, &mut self.processes);
        self.rooms.handle(input, &mut self.events);
    }

    /// From now on batches that the optional probes see can be joined to rooms.
    pub fn follow_batches(&mut self) {
        self.control.follow_batches();
    }

    /// The batches of this process are seen from now on.
    pub fn watch_batches(&mut self, pid: u32, layout: Layout) {
        self.control.watch_batches(pid, layout);
    }

    /// Takes what a probe saw, in the order of time among the other events. `None`: so much was lost.
    pub fn batch(&mut self, at: Mono, batch: Option<&Batch<'_>>) {
        let Self { control, rooms, events, recorder, .. } = self;
        let mut tell = |input: Input<'_>| {
            if let Some(recorder) = recorder {
                recorder.record(&input);
            }
            rooms.handle(&input, events);
        };
        match batch {
            Some(batch) => control.batch(batch, &mut tell),
            None => control.lost_batches(at, &mut tell),
        }
    }

    /// From now on what the rooms are told is taken down as well.
    pub fn record(&mut self, recorder: Recorder) {
        self.recorder = Some(recorder);
    }

    /// What was taken down.
    pub const fn recorder(&mut self) -> Option<&mut Recorder> {
        self.recorder.as_mut()
    }

    /// Tells the rooms which connections an engine has open: what its counts can be about.
    fn show_connections(&mut self, server: u32) {
        let rooms = &self.rooms;
        let of = |c: &Connection| c.task.is_some_and(|t| rooms.server_of(t.tgid) == Some(server));
        let readable = |state| {
            !matches!(state, ConnectionState::Foreign | ConnectionState::Unsupported | ConnectionState::Lost)
        };
        let open = self.control.connections().filter(|(c, _)| of(c));
        let open = open.map(|(c, state)| (c, readable(state))).take(CONNECTIONS).collect();
        self.rooms.open_connections(server, open);
    }

    /// How many MPTCP sockets the source has met: they carry what is not read.
    pub const fn mptcp_met(&mut self, sockets: u64) {
        self.rooms.mptcp_met(sockets);
    }

    /// What happened to findings since the last call, in order.
    pub fn finding_events(&mut self) -> std::vec::Drain<'_, FindingEvent> {
        self.rooms.finding_events()
    }

    /// Takes one event of a socket.
    pub fn handle(&mut self, event: &SocketEvent<'_>) {
        let Self { control, rooms, events, wanted, wanted_dropped, processes, recorder, .. } = self;
        control.handle(event, &mut |input| {
            if let Some(recorder) = recorder {
                recorder.record(&input);
            }
            want(&input, wanted, wanted_dropped);
            meet(&input, processes);
            rooms.handle(&input, events);
        });
    }

    /// Lets time pass. To be called about every 100 ms.
    pub fn tick(&mut self, now: Mono) {
        let Self { control, rooms, events, recorder, .. } = self;
        control.tick(now, &mut |input| {
            if let Some(recorder) = recorder {
                recorder.record(&input);
            }
            rooms.handle(&input, events);
        });
        rooms.tick(now, events);
    }

    /// What happened to rooms since the last call, in order.
    pub fn events(&mut self) -> std::vec::Drain<'_, Event> {
        self.told = self.told.saturating_add(self.events.len() as u64);
        self.events.drain(..)
    }

    /// Whether [`Self::events`] or [`Self::finding_events`] has any.
    pub const fn has_events(&self) -> bool {
        !self.events.is_empty() || self.rooms.has_finding_events()
    }

    /// Sockets judged since the last call, for a source that can stop shipping foreign ones.
    pub fn judgements(&mut self) -> impl Iterator<Item = (SocketId, Judgement)> + '_ {
        self.control.judgements()
    }

    /// Rank endpoints that messages named since the last call, for a source that can watch connection attempts
    /// to them: a refused connection carries no byte. May name one more than once.
    pub fn endpoints(&mut self) -> std::vec::Drain<'_, SocketAddr> {
        self.wanted.drain(..)
    }

    /// Processes of this host that sent or received a message, by process id, with the role that it tells. Those
    /// that have ended are still there: who can look at processes leaves them out.
    pub const fn processes(&self) -> &BTreeMap<u32, Role> {
        &self.processes
    }

    /// Engine processes known by their messages or from the host's process table, with the role that either tells.
    pub fn engine_processes(&self) -> BTreeMap<u32, Option<Role>> {
        let mut all: BTreeMap<u32, Option<Role>> =
            self.processes.iter().map(|(pid, role)| (*pid, Some(*role))).collect();
        for (process, role) in self.rooms.engine_processes() {
            let known = all.entry(process.pid).or_insert(role);
            *known = known.or(role);
        }
        all
    }

    /// Forgets a process that has ended.
    pub fn forget_process(&mut self, pid: u32) {
        self.rooms.forget_process(pid);
        self.control.forget_batches(pid);
        self.processes.remove(&pid);
    }

    /// Endpoints not passed on because too many waited.
    pub const fn endpoints_dropped(&self) -> u64 {
        self.wanted_dropped
    }

    /// The stages up to messages.
    pub const fn control(&self) -> &Control {
        &self.control
    }

    /// The rooms.
    pub const fn rooms(&self) -> &RoomTable {
        &self.rooms
    }
}

/// Remembers the process behind a message.
fn meet(input: &Input<'_>, processes: &mut BTreeMap<u32, Role>) {
    let Input::Message { connection, direction, decoded, .. } = input else { return };
    let Some(task) = connection.task else { return };
    if processes.contains_key(&task.tgid) || processes.len() >= PROCESSES {
        return;
    }
    let role = match (decoded.message.kind().flow(), direction) {
        (Flow::DecodeToPrefill, Direction::Sent) | (Flow::PrefillToDecode, Direction::Received) => {
            Role::Decode
        }
        (Flow::DecodeToPrefill, Direction::Received)
        | (Flow::PrefillToDecode, Direction::Sent)
        | (Flow::InsidePrefill, _) => Role::Prefill,
    };
    processes.insert(task.tgid, role);
}

/// Remembers the endpoint that a REGISTER or METADATA names: prefill will connect to it.
fn want(input: &Input<'_>, wanted: &mut Vec<SocketAddr>, dropped: &mut u64) {
    let Input::Message { decoded, .. } = input else { return };
    let endpoint = match &decoded.message {
        Message::Register(m) => Some(m.decode),
        Message::Metadata(m) => m.decode,
        _ => None,
    };
    let Some(endpoint) = endpoint else { return };
    let Some(ip) = endpoint.ip else { return };
    let address = SocketAddr::new(ip.to_canonical(), endpoint.port);
    if wanted.last() == Some(&address) || wanted.contains(&address) {
        return;
    }
    if wanted.len() >= WANTED {
        *dropped = dropped.saturating_add(1);
        return;
    }
    wanted.push(address);
}
