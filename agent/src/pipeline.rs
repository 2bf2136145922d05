//! One owner of everything between a source and the exports: socket events in, room events out.
//!
//! Pure like the stages it holds: no I/O, no clock (time is an argument), no unsafe code. Live capture, replay, tests
//! and benches all drive this.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::control::{Control, Judgement, Limits};
use crate::event::{Direction, Mono, SocketEvent, SocketId};
use crate::rooms::model::{Event, Input, Role};
use crate::rooms::{self, RoomTable};
use crate::sglang::message::{Flow, Message};

/// Endpoints waiting to be told to the source at most; more are counted and told when they are named again.
const WANTED: usize = 1024;

/// Engine processes remembered at most; a host runs one per GPU and role.
const PROCESSES: usize = 1024;

/// Stages from socket event to room event.
#[derive(Debug)]
pub struct Pipeline {
    control: Control,
    rooms: RoomTable,
    events: Vec<Event>,
    wanted: Vec<SocketAddr>,
    wanted_dropped: u64,
    processes: BTreeMap<u32, Role>,
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
        }
    }

    /// Takes one event of a source.
    pub fn handle(&mut self, event: &SocketEvent<'_>) {
        let Self { control, rooms, events, wanted, wanted_dropped, processes } = self;
        control.handle(event, &mut |input| {
            want(&input, wanted, wanted_dropped);
            meet(&input, processes);
            rooms.handle(&input, events);
        });
    }

    /// Lets time pass. To be called about every 100 ms.
    pub fn tick(&mut self, now: Mono) {
        let Self { control, rooms, events, .. } = self;
        control.tick(now, &mut |input| rooms.handle(&input, events));
        rooms.tick(now, events);
    }

    /// What happened to rooms since the last call, in order.
    pub fn events(&mut self) -> std::vec::Drain<'_, Event> {
        self.events.drain(..)
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

    /// Forgets a process that has ended.
    pub fn forget_process(&mut self, pid: u32) {
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
