//! A small world of ranks that talk: what the room table of one host gets to see of it.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "shared by several test programs"
)]

mod outlive;

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;

use roomtrace::event::{
    Addresses, Comm, Direction, Mono, SECOND, Sequence, SocketId, StateChange, Task, TaskChange, TaskEvent,
    TcpState,
};
use roomtrace::rooms::model::{Connection, Event, Input, Outcome, Role, RoomSnapshot};
use roomtrace::rooms::{Config, RoomTable};
use roomtrace::sglang::message::{
    AbortAck, Backend, Decoded, Endpoint, KvPoll, Message, Metadata, Register, Release, Releases, RoomFrom,
    Status,
};
use roomtrace::verdict::model::{Class, Confidence, Verdict};

/// Start of the world: far from zero, as clocks are.
pub const START: u64 = 1_000_000 * SECOND;

/// Which roles' hosts the agent is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sees {
    Prefill,
    Decode,
    Both,
}

/// One rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    pub role: Role,
    pub endpoint: SocketAddr,
    pub session: String,
    pub number: u32,
    pub size: u32,
    pub pid: u32,
}

pub fn prefill(n: u8) -> Rank {
    Rank {
        role: Role::Prefill,
        endpoint: format!("10.0.0.1:{}", 41_000 + u16::from(n)).parse().unwrap(),
        session: String::new(),
        number: u32::from(n),
        size: 1,
        pid: 100 + u32::from(n),
    }
}

pub fn decode(n: u8) -> Rank {
    decode_of(n, 1)
}

pub fn decode_of(n: u8, size: u32) -> Rank {
    Rank {
        role: Role::Decode,
        endpoint: format!("10.0.0.2:{}", 42_000 + u16::from(n)).parse().unwrap(),
        session: format!("10.0.0.2:{}", 16_000 + u16::from(n)),
        number: u32::from(n),
        size,
        pid: 200 + u32::from(n),
    }
}

/// A backend and the releases that its messages fit.
#[derive(Clone, Copy)]
pub struct Layout {
    pub backend: Backend,
    pub register: (Release, Release),
    pub metadata: (Release, Release),
}

pub const fn r(minor: u16, patch: u16) -> Release {
    Release::new(0, minor, patch, 0)
}

pub const MOONCAKE: Layout =
    Layout { backend: Backend::Mooncake, register: (r(5, 21), r(5, 23)), metadata: (r(5, 17), r(5, 23)) };

pub const NIXL_NEW: Layout =
    Layout { backend: Backend::Nixl, register: (r(5, 23), r(5, 23)), metadata: (r(5, 17), r(5, 23)) };

pub const NIXL_OLD: Layout =
    Layout { backend: Backend::Nixl, register: (r(5, 17), r(5, 21)), metadata: (r(5, 17), r(5, 21)) };

pub const MORI_OLD: Layout =
    Layout { backend: Backend::Mori, register: (r(5, 13), r(5, 18)), metadata: (r(5, 14), r(5, 18)) };

/// Of these nothing tells whether an ABORT is dropped.
pub const MORI_OPEN: Layout =
    Layout { backend: Backend::Mori, register: (r(5, 13), r(5, 21)), metadata: (r(5, 14), r(5, 23)) };

pub struct World {
    pub table: RoomTable,
    pub out: Vec<Event>,
    pub sees: Sees,
    pub layout: Layout,
    pub preexisting: bool,
    now: u64,
    sockets: HashMap<(Rank, Rank), (u64, u32)>,
    config: Config,
    /// Processes that have ended.
    ended: BTreeSet<u32>,
    /// What is pinned at the end must outlive the agent. Not where chance decides what is known.
    pub outlives: bool,
}

impl Drop for World {
    fn drop(&mut self) {
        if self.outlives && !std::thread::panicking() {
            outlive::check(self);
        }
    }
}

impl World {
    pub fn new(sees: Sees) -> Self {
        Self::with(sees, MOONCAKE, Config::default())
    }

    pub fn with(sees: Sees, layout: Layout, config: Config) -> Self {
        Self {
            table: RoomTable::new(config),
            out: Vec::new(),
            sees,
            layout,
            preexisting: false,
            now: START,
            sockets: HashMap::new(),
            config,
            ended: BTreeSet::new(),
            outlives: true,
        }
    }

    /// Seconds since the start of the world.
    pub fn now_s(&self) -> f64 {
        (self.now - START) as f64 / 1e9
    }

    pub fn mono(&self) -> Mono {
        Mono(self.now)
    }

    /// Lets time pass to `ms` after the start, with a tick every 100 ms.
    pub fn to(&mut self, ms: u64) -> &mut Self {
        let end = START + ms * 1_000_000;
        while self.now < end {
            self.now = (self.now + 100_000_000).min(end);
            self.table.tick(Mono(self.now), &mut self.out);
        }
        self
    }

    pub fn wait(&mut self, ms: u64) -> &mut Self {
        let now = (self.now - START) / 1_000_000;
        self.to(now + ms)
    }

    fn visible(&self, role: Role) -> bool {
        match self.sees {
            Sees::Both => true,
            Sees::Prefill => role == Role::Prefill,
            Sees::Decode => role == Role::Decode,
        }
    }

    fn task(rank: &Rank) -> Task {
        let mut comm = Comm::default();
        comm.0[..7].copy_from_slice(b"ZMQbg/I");
        Task { tgid: rank.pid, tid: rank.pid + 1000, comm, cgroup: 0 }
    }

    /// One end of the connection that `from` opened to `to`.
    pub fn end(&mut self, from: &Rank, to: &Rank, direction: Direction) -> Connection {
        let next = self.sockets.len() as u64;
        let (id, _) = *self.sockets.entry((from.clone(), to.clone())).or_insert((1000 + 2 * next, 7));
        let near = SocketAddr::new(from.endpoint.ip(), 50_000 + u16::try_from((id - 1000) / 2).unwrap());
        let (socket, local, peer, rank) = match direction {
            Direction::Sent => (id, near, to.endpoint, from),
            Direction::Received => (id + 1, to.endpoint, near, to),
        };
        Connection {
            socket: SocketId(socket),
            addresses: Addresses { local, peer },
            netns: 1,
            task: Some(Self::task(rank)),
            preexisting: self.preexisting,
            since: Mono(START),
        }
    }

    /// `heir` goes on with the sockets of `rank`.
    pub fn adopt(&mut self, rank: &Rank, heir: &Rank) {
        let swap = |r: &Rank| if r == rank { heir.clone() } else { r.clone() };
        let sockets = self.sockets.drain().map(|((from, to), v)| ((swap(&from), swap(&to)), v)).collect();
        self.sockets = sockets;
    }

    /// Sequence number behind the last byte that `from` sent to `to`.
    pub fn sent_to(&self, from: &Rank, to: &Rank) -> u32 {
        self.sockets.get(&(from.clone(), to.clone())).map_or(7, |(_, end)| *end)
    }

    pub fn input(&mut self, input: &Input<'_>) {
        if let Input::Task(TaskEvent { task, what: TaskChange::Exited { process: true, .. }, .. }) = input {
            self.ended.insert(task.tgid);
        }
        self.table.handle(input, &mut self.out);
    }

    /// `from` sends, `to` receives 0.1 ms later.
    pub fn send(
        &mut self,
        from: &Rank,
        to: &Rank,
        backend: Backend,
        releases: (Release, Release),
        m: Message<'_>,
    ) {
        self.leave(from, to, backend, releases, m, true);
    }

    pub fn leave(
        &mut self,
        from: &Rank,
        to: &Rank,
        backend: Backend,
        releases: (Release, Release),
        message: Message<'_>,
        arrives: bool,
    ) {
        let decoded = Decoded {
            backend,
            releases: Releases { min: releases.0, max: releases.1 },
            extra_frames: 0,
            message,
        };
        self.deliver(from, to, &decoded, arrives);
    }

    /// A message as the decoder hands it on.
    pub fn deliver(&mut self, from: &Rank, to: &Rank, decoded: &Decoded<'_>, arrives: bool) {
        let sent = self.end(from, to, Direction::Sent);
        let end = {
            let place = self.sockets.get_mut(&(from.clone(), to.clone())).unwrap();
            place.1 = place.1.wrapping_add(100);
            place.1
        };
        if self.visible(from.role) {
            let at = Mono(self.now);
            self.input(&Input::Message { at, connection: sent, direction: Direction::Sent, end, decoded });
        }
        self.now += 100_000;
        if arrives && self.visible(to.role) {
            let connection = self.end(from, to, Direction::Received);
            let at = Mono(self.now);
            let direction = Direction::Received;
            self.input(&Input::Message { at, connection, direction, end, decoded });
        }
    }

    pub fn register(&mut self, d: &Rank, p: &Rank) {
        let host = d.endpoint.ip().to_string();
        let message = Message::Register(Register {
            decode: endpoint(d, &host),
            session: &d.session,
            tp_rank: Some(d.number),
            tp_size: Some(d.size),
            kv_buffers: None,
            aux_buffers: None,
            kv_item_len: None,
            agent_metadata_len: None,
            staging: None,
        });
        self.send(d, p, self.layout.backend, self.layout.register, message);
    }

    pub fn metadata(&mut self, room: u64, d: &Rank, p: &Rank) {
        self.ask(room, d, p, |_| {});
    }

    /// METADATA with changes.
    pub fn ask(&mut self, room: u64, d: &Rank, p: &Rank, change: impl Fn(&mut Metadata<'_>)) {
        let host = d.endpoint.ip().to_string();
        let mut m = Metadata {
            room,
            decode: Some(endpoint(d, &host)),
            session: &d.session,
            pages: 8,
            aux_index: Some(u32::try_from(room % 1000).unwrap()),
            dummy: Some(false),
            required: Some(d.size),
            decode_prefix_len: Some(0),
        };
        change(&mut m);
        self.send(d, p, self.layout.backend, self.layout.metadata, Message::Metadata(m));
    }

    pub fn status(&mut self, room: u64, p: &Rank, d: &Rank, status: KvPoll) {
        self.tell(room, p, d, status, true);
    }

    /// STATUS that may never arrive.
    pub fn tell(&mut self, room: u64, p: &Rank, d: &Rank, status: KvPoll, arrives: bool) {
        let m = Status { room, status, prefill_rank: Some(p.number), reason: "" };
        self.leave(p, d, self.layout.backend, (r(4, 9), r(5, 23)), Message::Status(m), arrives);
    }

    pub fn abort(&mut self, room: u64, d: &Rank, p: &Rank, generation: Option<u64>) {
        self.give_up(room, d, p, generation, true);
    }

    pub fn give_up(&mut self, room: u64, d: &Rank, p: &Rank, generation: Option<u64>, arrives: bool) {
        let m = RoomFrom { room, ip: Some(d.endpoint.ip()), port: d.endpoint.port(), generation };
        self.leave(d, p, Backend::Shared, (r(5, 13), r(5, 23)), Message::Abort(m), arrives);
    }

    pub fn bootstrap(&mut self, room: u64, d: &Rank, p: &Rank) {
        let m = RoomFrom { room, ip: Some(d.endpoint.ip()), port: d.endpoint.port(), generation: None };
        self.send(d, p, Backend::Shared, (r(5, 22), r(5, 23)), Message::Bootstrap(m));
    }

    pub fn ack(&mut self, room: u64, p: &Rank, d: &Rank) {
        let m = AbortAck { room, prefill_rank: Some(p.number), generation: Some(1) };
        self.send(p, d, Backend::Shared, (r(5, 22), r(5, 23)), Message::AbortAck(m));
    }

    /// A change of state of the end that `whose` has of the connection from `from` to `to`.
    pub fn state(
        &mut self,
        from: &Rank,
        to: &Rank,
        whose: Direction,
        old: TcpState,
        new: TcpState,
        error: u32,
    ) {
        let connection = self.end(from, to, whose);
        let change = StateChange { old, new, error, sequence: Sequence::default() };
        let at = Mono(self.now);
        self.input(&Input::State { at, connection, change });
    }

    pub fn listener(&mut self, rank: &Rank) {
        let mut connection = self.end(rank, rank, Direction::Received);
        connection.addresses.peer = "0.0.0.0:0".parse().unwrap();
        let (old, new) = (TcpState::Listen, TcpState::Close);
        let change = StateChange { old, new, error: 0, sequence: Sequence::default() };
        let at = Mono(self.now);
        self.input(&Input::State { at, connection, change });
    }

    /// The peer's kernel has everything up to `una`.
    pub fn acknowledge(&mut self, from: &Rank, to: &Rank, una: u32) {
        let socket = self.end(from, to, Direction::Sent).socket;
        let at = Mono(self.now);
        self.input(&Input::Acknowledged { at, socket, una });
    }

    pub fn foreign(&mut self, p: &Rank) {
        self.foreign_from("10.9.9.9:5555", p);
    }

    pub fn foreign_from(&mut self, peer: &str, p: &Rank) {
        let mut connection = self.end(&decode(99), p, Direction::Received);
        connection.addresses.peer = peer.parse().unwrap();
        let at = Mono(self.now);
        let direction = Direction::Received;
        self.input(&Input::Foreign { at, connection, direction, frames: 2, first_len: 4 });
    }

    pub fn lossy(&mut self, from: &Rank, to: &Rank, direction: Direction) {
        let connection = self.end(from, to, direction);
        let at = Mono(self.now);
        self.input(&Input::Lossy { at, connection, direction, bytes: 100 });
    }

    /// Bytes missing on a connection from `host` to `to` that nobody has said anything on.
    pub fn lossy_stranger(&mut self, host: &str, port: u16, to: &Rank) {
        let connection = Connection {
            socket: SocketId(1_000_000 + u64::from(port)),
            addresses: Addresses { local: to.endpoint, peer: SocketAddr::new(host.parse().unwrap(), port) },
            netns: 1,
            task: Some(Self::task(to)),
            preexisting: false,
            since: Mono(self.now),
        };
        let (at, direction) = (Mono(self.now), Direction::Received);
        self.input(&Input::Lossy { at, connection, direction, bytes: 100 });
    }

    /// A healthy room from METADATA to Success in `ms`.
    pub fn healthy(&mut self, room: u64, d: &Rank, p: &Rank, ms: u64) {
        self.metadata(room, d, p);
        self.wait(ms);
        self.status(room, p, d, KvPoll::Success);
    }

    pub fn events(&self, room: u64) -> Vec<&Event> {
        self.out.iter().filter(|e| e.snapshot().room == room).collect()
    }

    pub fn names(&self, room: u64) -> Vec<&'static str> {
        self.events(room).iter().map(|e| e.name()).collect()
    }

    /// The first pin of a room: seconds since the start, verdict.
    pub fn pin(&self, room: u64) -> Option<(f64, &Verdict)> {
        self.events(room).iter().find_map(|e| match e {
            Event::Pinned(s) => Some(((s.at.0 - START) as f64 / 1e9, s.verdict.as_deref().unwrap())),
            _ => None,
        })
    }

    pub fn outcomes(&self, room: u64) -> Vec<Outcome> {
        self.events(room)
            .iter()
            .filter_map(|e| if let Event::Closed(s) = e { s.outcome } else { None })
            .collect()
    }

    pub fn last(&self, room: u64) -> RoomSnapshot {
        self.table.snapshot(room).pop().unwrap_or_else(|| panic!("room {room} is not kept"))
    }

    pub fn verdict(&self, room: u64) -> Verdict {
        *self.last(room).verdict.unwrap_or_else(|| panic!("room {room} has no verdict"))
    }

    pub fn class(&self, room: u64) -> Option<Class> {
        self.last(room).verdict.map(|v| v.class)
    }

    /// That `room` is not pinned just before its floor, and pinned within a second after it; `since` is when
    /// its phase began (seconds since the start).
    pub fn pinned_in_time(&mut self, room: u64, since: f64, floor: f64) -> Verdict {
        let before = ((since + floor) * 1000.0) as u64 - 100;
        self.to(before);
        assert!(self.pin(room).is_none(), "pinned early: {:?}", self.pin(room));
        self.to(before + 1100);
        let (at, verdict) = self.pin(room).unwrap_or_else(|| panic!("room {room} not pinned in time"));
        assert!(at >= since + floor && at <= since + floor + 1.0, "pinned at {at}");
        verdict.clone()
    }

    /// That nothing of `room` would page.
    pub fn never_paged(&self, room: u64) {
        for e in self.events(room) {
            if let Some(v) = &e.snapshot().verdict {
                assert!(
                    v.confidence == Confidence::Possible || !v.class.pins(),
                    "{} paged {:?}",
                    e.name(),
                    v.class
                );
            }
        }
    }
}

fn endpoint<'a>(rank: &Rank, host: &'a str) -> Endpoint<'a> {
    Endpoint { ip: Some(rank.endpoint.ip()), host, port: rank.endpoint.port() }
}

/// Classes that a verdict leaves open, its own first.
pub fn readings(v: &Verdict) -> Vec<Class> {
    std::iter::once(v.class).chain(v.candidates.iter().map(|c| c.class)).collect()
}
