//! HTTP servers of the engines in the world of ranks, and requests to them.
#![allow(dead_code, unreachable_pub, reason = "shared by the parts of this test program")]

use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};

use roomtrace::event::{Addresses, Comm, Mono, SocketId, Task};
use roomtrace::http::event::{AnswerEnd, Control, Ignored, NotSeen, Outcome, Rooms, Side, WhereSeen, Work};
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{
    BootstrapStep, Connection, EngineGauges, EngineProcess, Input, LegView, Place, RequestStep, Role,
};

use super::rooms_support::{Layout, MOONCAKE, Sees, World, decode, prefill};

/// A request: the socket that reports it and its number there.
pub type Key = (u64, u64);

/// The world with HTTP servers at 10.0.0.1:30000 (prefill) and 10.0.0.2:30000 (decode).
pub struct Web {
    pub world: World,
    open: HashMap<Key, (Connection, bool)>,
    next: u64,
}

impl Deref for Web {
    type Target = World;
    fn deref(&self) -> &World {
        &self.world
    }
}

impl DerefMut for Web {
    fn deref_mut(&mut self) -> &mut World {
        &mut self.world
    }
}

pub fn server(role: Role) -> SocketAddr {
    match role {
        Role::Prefill => "10.0.0.1:30000".parse().unwrap(),
        Role::Decode => "10.0.0.2:30000".parse().unwrap(),
    }
}

/// The HTTP process of an engine, the parent of its ranks.
pub const fn pid(role: Role) -> u32 {
    match role {
        Role::Prefill => 90,
        Role::Decode => 91,
    }
}

pub fn task(pid: u32) -> Task {
    Task { tgid: pid, tid: pid, comm: Comm(*b"python\0\0\0\0\0\0\0\0\0\0"), cgroup: 0 }
}

pub fn work(rooms: &[u64], rid: &str) -> Work {
    let rids = rooms.iter().map(|_| (!rid.is_empty()).then(|| rid.into())).collect();
    let rooms = Rooms::Named {
        rooms: rooms.iter().map(|r| Some(*r)).collect(),
        complete: true,
        maybe_more: false,
        seen: WhereSeen::Whole,
    };
    Work { rooms, rids }
}

impl Web {
    pub fn new(sees: Sees) -> Self {
        Self::with(sees, MOONCAKE)
    }

    pub fn with(sees: Sees, layout: Layout) -> Self {
        let mut web = Self::bare(sees, layout, Config::default());
        web.know();
        web.register(&decode(0), &prefill(0));
        web
    }

    /// Nothing is known of the processes yet.
    pub fn bare(sees: Sees, layout: Layout, config: Config) -> Self {
        Self { world: World::with(sees, layout, config), open: HashMap::new(), next: 0 }
    }

    pub fn sees(&self, role: Role) -> bool {
        match self.world.sees {
            Sees::Both => true,
            Sees::Prefill => role == Role::Prefill,
            Sees::Decode => role == Role::Decode,
        }
    }

    /// The process tables of the hosts.
    pub fn know(&mut self) {
        for (role, rank) in [(Role::Prefill, prefill(0).pid), (Role::Decode, decode(0).pid)] {
            if !self.sees(role) {
                continue;
            }
            for (pid, told) in [(pid(role), Some(role)), (rank, None)] {
                self.process(pid, self::pid(role), told);
            }
        }
    }

    pub fn process(&mut self, pid: u32, server: u32, role: Option<Role>) {
        let (comm, place) = ("python".to_owned(), Place::default());
        let process =
            EngineProcess { pid, server, started: 1, comm, role, place, ..EngineProcess::default() };
        let at = self.mono();
        self.input(&Input::Process { at, process: &process });
    }

    pub fn gauges(&mut self, role: Role, inflight: u64, waiting: u64, progress: u64) {
        let gauges = EngineGauges {
            server: pid(role),
            role: Some(role),
            inflight: Some(inflight),
            waiting: Some(waiting),
            progress: Some(progress),
            ..EngineGauges::default()
        };
        let at = self.mono();
        self.input(&Input::Gauges { at, gauges: &gauges });
    }

    /// A new connection to `address`, as one of its ends sees it.
    pub fn connection(&mut self, address: SocketAddr, here: bool, task: Option<Task>) -> Connection {
        self.next += 1;
        let client = format!("10.0.0.9:{}", 1024 + self.next % 60_000).parse().unwrap();
        let (local, peer) = if here { (address, client) } else { (client, address) };
        Connection {
            socket: SocketId(5_000_000 + self.next),
            addresses: Addresses { local, peer },
            netns: 1,
            task,
            preexisting: false,
            since: self.mono(),
        }
    }

    pub fn step(&mut self, connection: Connection, here: bool, n: u64, step: RequestStep<'_>) {
        let at = self.mono();
        self.input(&Input::Request { at, connection, server: here, n, step });
    }

    pub fn ask_on(&mut self, connection: Connection, here: bool, work: &Work) -> Key {
        self.step(connection, here, 0, RequestStep::Asked { work });
        self.open.insert((connection.socket.0, 0), (connection, here));
        (connection.socket.0, 0)
    }

    /// A request with a room to an engine, if its host is seen.
    pub fn ask_for(&mut self, role: Role, rooms: &[u64], rid: &str) -> Key {
        let connection = self.connection(server(role), true, Some(task(pid(role))));
        if !self.sees(role) {
            return (0, 0);
        }
        self.ask_on(connection, true, &work(rooms, rid))
    }

    pub fn request(&mut self, role: Role, room: u64) -> Key {
        self.ask_for(role, &[room], "r-1")
    }

    /// One whose body names something else than a room.
    pub fn odd(&mut self, role: Role, rooms: Rooms) -> Key {
        let connection = self.connection(server(role), true, Some(task(pid(role))));
        self.ask_on(connection, true, &Work { rooms, rids: Vec::new() })
    }

    pub fn ignored(&mut self, role: Role) -> Key {
        self.odd(role, Rooms::Ignored(Ignored::HealthCheck))
    }

    pub fn not_seen(&mut self, role: Role) -> Key {
        self.odd(role, Rooms::NotSeen(NotSeen::Hole))
    }

    fn of(&mut self, key: Key, step: RequestStep<'_>) {
        if let Some((connection, here)) = self.open.get(&key).copied() {
            self.step(connection, here, key.1, step);
        }
    }

    pub fn first_byte(&mut self, key: Key) {
        self.of(key, RequestStep::FirstBodyByte);
    }

    pub fn answered(&mut self, key: Key, status: u16, outcome: Outcome) {
        let how = AnswerEnd::ContentLength;
        self.of(key, RequestStep::Answered { status: Some(status), how, outcome });
    }

    pub fn finished(&mut self, key: Key) {
        self.answered(key, 200, Outcome::Finished);
    }

    pub fn hung_up(&mut self, key: Key, by: Side) {
        self.of(key, RequestStep::HungUp { by, answer_begun: false });
    }

    pub fn out_of_sight(&mut self, key: Key) {
        self.of(key, RequestStep::OutOfSight);
    }

    pub fn call(&mut self, role: Role, call: &Control, status: Option<u16>) {
        let connection = self.connection(server(role), true, Some(task(pid(role))));
        self.call_on(connection, call, status);
    }

    pub fn call_on(&mut self, connection: Connection, call: &Control, status: Option<u16>) {
        self.step(connection, true, 0, RequestStep::Control { call, status });
    }

    pub fn boot(&mut self, connection: Connection, here: bool, n: u64, step: BootstrapStep<'_>) {
        let at = self.mono();
        self.input(&Input::Bootstrap { at, connection, server: here, n, step });
    }

    pub fn leg(&self, room: u64, role: Role) -> Option<LegView> {
        let r = self.last(room).request?;
        match role {
            Role::Prefill => r.prefill,
            Role::Decode => r.decode,
        }
    }

    /// A room through both engines: requests, hand-over, answers.
    pub fn serve(&mut self, room: u64, ms: u64) {
        let p = self.request(Role::Prefill, room);
        let d = self.request(Role::Decode, room);
        self.healthy(room, &decode(0), &prefill(0), ms);
        self.finished(p);
        self.first_byte(d);
        self.finished(d);
    }

    pub fn at(&self) -> Mono {
        self.mono()
    }
}
