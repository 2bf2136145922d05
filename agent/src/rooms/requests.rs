//! Requests at the engines' HTTP ports: which rooms they are for, and what their end says of them.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: at most [`MAX_OPEN`] rooms of open requests are followed; what
//! does not fit is counted, and of its engine nothing is claimed that rests on having seen every request.

mod bootstrap;
mod clocks;
pub(crate) mod engines;
mod evidence;
mod late_aborts;
pub(crate) mod legs;

use std::net::SocketAddr;

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::event::{Mono, SECOND};
use crate::http::event as web;
use crate::rooms::messages::Seen;
use crate::rooms::model::{Connection, Event, LegEnd, LegView, Outcome, RequestStep, Role};
use crate::rooms::peers::{Concluded, EndpointId, NONE};
use crate::rooms::requests::bootstrap::Bootstraps;
use crate::rooms::requests::engines::{EngineId, Engines, LOOK_AGAIN};
use crate::rooms::requests::late_aborts::LateAborts;
use crate::rooms::requests::legs::{Leg, RequestKey, RoomRequest, answered};
use crate::rooms::room::Room;
use crate::rooms::table::{RoomTable, next_life};

/// Rooms of open requests followed at a time; a request with one room takes one place.
pub(crate) const MAX_OPEN: usize = 65_536;

/// Two reports of one request from both ends of its connection lie this close together.
const BOTH_ENDS: u64 = SECOND;

/// Engines and bootstrap servers are looked through this often.
const LOOK_EVERY: u64 = SECOND;

/// What is known from HTTP.
#[derive(Debug, Default)]
pub(crate) struct Http {
    pub(crate) engines: Engines,
    open: HashMap<RequestKey, Open>,
    /// Rooms in `open`.
    places: usize,
    bootstraps: Bootstraps,
    late_aborts: LateAborts,
    next_look: Mono,
}

/// An open request.
#[derive(Debug)]
struct Open {
    begun: Mono,
    engine: EngineId,
    /// Slots and generations.
    rooms: SmallVec<[(u32, u32); 1]>,
    /// Those of its rooms that have closed, as they are kept: decode still writes when the KV cache has long been handed over.
    closed: SmallVec<[u64; 1]>,
}

/// A request that has been asked for, before its rooms are looked at.
#[derive(Clone, Copy)]
struct Asked<'a> {
    at: Mono,
    begun: Mono,
    connection: &'a Connection,
    key: RequestKey,
    client: SocketAddr,
    server: SocketAddr,
    here: bool,
    engine: EngineId,
}

impl RoomTable {
    /// A step of a request.
    pub(crate) fn request(
        &mut self,
        at: Mono,
        connection: &Connection,
        server: bool,
        n: u64,
        step: &RequestStep<'_>,
        out: &mut Vec<Event>,
    ) {
        let key = (connection.socket, n);
        match *step {
            RequestStep::Asked { begun, work } => {
                self.asked(at, connection, server, key, begun.min(at), work, out);
            }
            RequestStep::FirstBodyByte => self.first_body_byte(at, key, out),
            RequestStep::Answered { status, how, outcome } => {
                self.leg_over(at, key, answered(status, how, outcome), status, out);
            }
            RequestStep::HungUp { by, .. } => {
                let end = match by {
                    web::Side::Client => LegEnd::ClientHungUp,
                    web::Side::Server => LegEnd::EngineHungUp,
                    web::Side::Unknown => LegEnd::HungUp,
                };
                self.leg_over(at, key, end, None, out);
            }
            RequestStep::OutOfSight => {
                let engine = self.engine_of(connection, server);
                self.blind(engine, at);
                self.out_of_sight(at, key, out);
            }
            RequestStep::Control { call, status } => self.control_call(at, connection, server, call, status),
        }
    }

    /// The engine at the server's end of a connection.
    fn engine_of(&mut self, c: &Connection, server: bool) -> EngineId {
        let (address, task) = if server { (c.addresses.local, c.task) } else { (c.addresses.peer, None) };
        let id = self.http.engines.at(address, c.netns, task.map(|t| t.tgid));
        if let Some(e) = self.http.engines.get_mut(id)
            && task.is_some()
        {
            e.task = task;
        }
        id
    }

    /// A request to this engine may have passed without being seen, or without its room.
    fn blind(&mut self, engine: EngineId, at: Mono) {
        if let Some(e) = self.http.engines.get_mut(engine) {
            e.blind = e.blind.max(Some(at));
        }
    }

    #[allow(clippy::too_many_arguments, reason = "the parts of one step")]
    fn asked(
        &mut self,
        at: Mono,
        connection: &Connection,
        here: bool,
        key: RequestKey,
        begun: Mono,
        work: &web::Work,
        out: &mut Vec<Event>,
    ) {
        let engine = self.engine_of(connection, here);
        let complete = match &work.rooms {
            web::Rooms::Named { complete, .. } => *complete,
            web::Rooms::NotSeen(_) => false,
            // A request without a room, or one of the engine's own checks.
            web::Rooms::None | web::Rooms::Ignored(_) => return,
        };
        if !complete {
            self.blind(engine, at);
        }
        let wanted = work.pairs().count();
        if wanted == 0 {
            return;
        }
        if self.http.places.saturating_add(wanted) > MAX_OPEN || self.http.open.contains_key(&key) {
            self.tally.turned_away.requests += 1;
            self.blind(engine, at);
            return;
        }
        if here && let Some(e) = self.http.engines.get_mut(engine) {
            e.followed.get_or_insert(begun);
        }
        let a = &connection.addresses;
        let (client, server) = if here { (a.peer, a.local) } else { (a.local, a.peer) };
        let asked = Asked { at, begun, connection, key, client, server, here, engine };
        let mut rooms: SmallVec<[(u32, u32); 1]> = SmallVec::new();
        for (room, rid) in work.pairs() {
            rooms.extend(self.join(&asked, room, rid, out));
        }
        let Some((first, _)) = rooms.first().copied() else { return };
        if let Some(e) = self.http.engines.get_mut(engine) {
            e.open.insert((begun, key), first);
        }
        self.http.places += rooms.len();
        let slots: SmallVec<[u32; 1]> = rooms.iter().map(|(slot, _)| *slot).collect();
        self.http.open.insert(key, Open { begun, engine, rooms, closed: SmallVec::new() });
        for slot in slots {
            self.place_requests(slot, at);
            self.settle(slot, at, out);
        }
    }

    /// Joins a request to its room, which it opens if need be. `None`: it is followed elsewhere already, or late, or
    /// there is no space.
    fn join(
        &mut self,
        a: &Asked<'_>,
        number: u64,
        rid: Option<&str>,
        out: &mut Vec<Event>,
    ) -> Option<(u32, u32)> {
        let slot = match self.numbers.open(number) {
            Some(slot) => slot,
            None => self.open_for_request(a, number, out)?,
        };
        let role = self.role_at(a.engine, a.server, slot, a.at);
        let by_decode = self.sent_by_decode(a, slot);
        let room = self.rooms.get_mut(slot)?;
        let generation = room.generation;
        let asked_before = room.links.iter().any(|l| l.sent.is_some() || l.received.is_some());
        let r = room.request.get_or_insert_default();
        if r.legs().any(|l| same_request(l, a) && l.here) {
            return None;
        }
        if r.rid.is_none() {
            r.rid = rid.map(Into::into);
        }
        let seen =
            LegView { begun: a.begun, first_byte: None, ended: None, status: None, out_of_sight: false };
        let mut leg = Leg {
            seen,
            key: a.key,
            client: a.client,
            server: a.server,
            here: a.here,
            by_decode,
            netns: a.connection.netns,
            open: 1,
            engine: a.engine,
        };
        // The server's end tells what the client's has told: it is followed from there.
        let told_twice = r.take_leg(|l| same_request(l, a)).map(|l| l.key);
        let place = r.place(role);
        if let Some(old) = place.filter(Leg::is_open) {
            leg.open = old.open.saturating_add(1);
            leg.seen.begun = old.seen.begun;
        }
        let again = leg.open > 1 && !by_decode;
        *place = Some(leg);
        if again {
            r.duplicate.get_or_insert(a.at);
        }
        match role {
            Some(Role::Prefill) => room.has_prefill |= a.here,
            Some(Role::Decode) => room.has_decode |= a.here,
            None => {}
        }
        if let Some(key) = told_twice {
            self.forget_request(key);
        }
        if asked_before && let Some(e) = self.http.engines.get_mut(a.engine) {
            e.asked(a.begun);
        }
        Some((slot, generation))
    }

    fn open_for_request(&mut self, a: &Asked<'_>, number: u64, out: &mut Vec<Event>) -> Option<u32> {
        let tomb = self.numbers.tomb(number);
        if let Some(t) = tomb {
            // Of the life that has closed: it began before, or the other end of its connection has told of it.
            let last =
                || self.closed.iter().rev().find(|r| r.room == number).and_then(|r| r.request.as_ref());
            if t.closed_at > a.begun || last().is_some_and(|r| r.legs().any(|l| same_request(l, a))) {
                self.tally.turned_away.late += 1;
                return None;
            }
        }
        // Of an engine elsewhere only what it means for a room of this host counts. An address that talks to itself is here.
        if !a.here && a.client.ip() != a.server.ip() {
            return None;
        }
        let aborted = self.hung_up_at_decode(number, a.begun).filter(|r| r.abort.is_some()).map(|r| {
            let marks = r.marks.clone();
            (r.abort, marks, r.home, r.has_prefill, r.request.clone(), (r.backend, r.releases))
        });
        let home = aborted.as_ref().map_or((NONE, NONE), |a| a.2);
        let slot = self.open_room(number, next_life(tomb), a.begun, home, out)?;
        if let (Some(room), Some((abort, marks, _, has_prefill, request, engine))) =
            (self.rooms.get_mut(slot), aborted)
        {
            (room.abort, room.has_prefill, room.has_decode, room.request) =
                (abort, has_prefill, true, request);
            (room.backend, room.releases) = engine;
            for mark in marks {
                room.mark(mark);
            }
        }
        Some(slot)
    }

    /// The last life of this number, if its client hung up at decode before prefill had its request: what comes for the
    /// number now belongs to it (decode sends its ABORT, and a router the other request, when it comes to it).
    fn hung_up_at_decode(&self, number: u64, at: Mono) -> Option<&Room> {
        if !self.is_late_for(number, at) {
            return None;
        }
        let last = self.closed.iter().rev().find(|r| r.room == number)?;
        let r = last.request.as_deref()?;
        let hung_up = r.decode?.seen.ended.is_some_and(|(_, how)| how == LegEnd::ClientHungUp);
        (hung_up && r.prefill.is_none() && last.links.is_empty()).then_some(last)
    }

    /// An ABORT whose room was over when its client had hung up: a busy decode rank sends it seconds later, and prefill may
    /// get its request after that. Opens the room again.
    pub(crate) fn abort_of_hung_up(
        &mut self,
        seen: &Seen<'_>,
        number: u64,
        decode: EndpointId,
        out: &mut Vec<Event>,
    ) -> Option<u32> {
        let last = self.hung_up_at_decode(number, seen.at).filter(|r| r.abort.is_none())?;
        let request = last.request.clone();
        let life = next_life(self.numbers.tomb(number));
        let slot = self.open_room(number, life, seen.at, (seen.target, decode), out)?;
        if let Some(room) = self.rooms.get_mut(slot) {
            room.request = request;
        }
        Some(slot)
    }

    /// Whether a decode rank sent it, to have a room again that it retracted.
    fn sent_by_decode(&self, a: &Asked<'_>, slot: u32) -> bool {
        let own = if a.here { None } else { a.connection.task };
        if own.and_then(|t| self.http.engines.role_of_process(t.tgid)) == Some(Role::Decode) {
            return true;
        }
        let Some(room) = self.rooms.get(slot) else { return false };
        let decodes = room.links.iter().map(|l| l.decode).chain([room.home.1]);
        decodes.filter_map(|d| self.peers.address(d)).any(|d| d.ip() == a.client.ip())
    }

    /// Role of the engine that got a request, as far as something tells it.
    fn role_at(&mut self, engine: EngineId, server: SocketAddr, slot: u32, at: Mono) -> Option<Role> {
        self.role_of_engine(engine, at).or_else(|| {
            let room = self.rooms.get(slot)?;
            let ip = |id: u32| self.peers.address(id).map(|a| a.ip());
            let here = Some(server.ip());
            let links = &room.links;
            let prefill = ip(room.home.0) == here || links.iter().any(|l| ip(l.prefill) == here);
            let decode = ip(room.home.1) == here || links.iter().any(|l| ip(l.decode) == here);
            match (prefill, decode) {
                (true, false) => Some(Role::Prefill),
                (false, true) => Some(Role::Decode),
                // Both, or neither: if one engine is known, the other one that has the room plays the other part.
                _ => self.role_beside(engine, slot),
            }
        })
    }

    /// Role of an engine that has a room beside one whose part is known.
    fn role_beside(&self, engine: EngineId, slot: u32) -> Option<Role> {
        self.rooms.get(slot)?.request.as_deref()?.beside(engine)
    }

    /// Role of an engine: as its process table or its numbers have it, or as its ranks have shown.
    fn role_of_engine(&mut self, engine: EngineId, at: Mono) -> Option<Role> {
        let e = self.http.engines.get_mut(engine)?;
        if e.role.is_some() || e.looked.is_some_and(|l| at.since(l) < LOOK_AGAIN) {
            return e.role;
        }
        e.looked = Some(at);
        let engines = &self.http.engines;
        let own = |id: u32| {
            let task = self.peers.get(id).and_then(|e| e.task);
            task.is_some_and(|t| engines.of_process(t.tgid) == Some(engine))
        };
        let prefill = self.peers.endpoints().any(|(id, e)| e.prefill.is_some() && own(id));
        let decode = self.peers.pairs().any(|p| own(p.decode));
        let role = match (prefill, decode) {
            (true, false) => Some(Role::Prefill),
            (false, true) => Some(Role::Decode),
            // Both: one process plays both parts, as test programs do.
            _ => None,
        };
        if let Some(e) = self.http.engines.get_mut(engine) {
            e.role = role;
        }
        role
    }

    /// Frames have named a rank of the room: a request at an engine of unknown role may have found its place.
    pub(crate) fn place_requests(&mut self, slot: u32, at: Mono) {
        let unplaced = |r: &Room| r.request.as_ref().and_then(|r| r.unplaced);
        let Some(leg) = self.rooms.get(slot).and_then(unplaced) else { return };
        let Some(role) = self.role_at(leg.engine, leg.server, slot, at) else { return };
        let Some(room) = self.rooms.get_mut(slot) else { return };
        let Some(r) = room.request.as_deref_mut() else { return };
        if r.leg(role).is_none() {
            r.unplaced = None;
            *r.place(Some(role)) = Some(leg);
            match role {
                Role::Prefill => room.has_prefill |= leg.here,
                Role::Decode => room.has_decode |= leg.here,
            }
        }
    }

    /// The request of the last life of this number, if prefill ended it without KV having been handed over: METADATA that
    /// comes now was sent to a room that is over (M10, M40).
    pub(crate) fn failed_request(&self, number: u64) -> Option<Box<RoomRequest>> {
        let last = self.closed.iter().rev().find(|r| r.room == number)?;
        let r = last.request.as_ref()?;
        let (_, outcome) = r.prefill.filter(|l| l.here)?.over()?;
        (outcome == Outcome::Failed && r.decode.is_none_or(|l| !l.is_open())).then(|| r.clone())
    }

    /// METADATA of a room with a request came.
    pub(crate) fn metadata_of_request(&mut self, slot: u32, role: Role) {
        let leg = self.rooms.get(slot).and_then(|r| r.request.as_ref()).and_then(|r| r.leg(role).copied());
        if let Some(leg) = leg.filter(|l| l.seen.ended.is_none())
            && let Some(e) = self.http.engines.get_mut(leg.engine)
        {
            e.role.get_or_insert(role);
            e.asked(leg.seen.begun);
        }
    }

    fn first_body_byte(&mut self, at: Mono, key: RequestKey, out: &mut Vec<Event>) {
        let Some(open) = self.http.open.get(&key) else { return };
        for number in open.closed.clone() {
            let closed = self.closed.get_mut(number).and_then(|r| r.request.as_deref_mut());
            for leg in closed.into_iter().flat_map(RoomRequest::legs_mut).filter(|l| l.key == key) {
                leg.seen.first_byte.get_or_insert(at);
            }
        }
        let Some(open) = self.http.open.get(&key) else { return };
        for (slot, generation) in open.rooms.clone() {
            let Some(room) = self.rooms.current(slot, generation) else { continue };
            let Some(r) = room.request.as_deref_mut() else { continue };
            for leg in r.legs_mut().filter(|l| l.key == key) {
                leg.seen.first_byte.get_or_insert(at);
            }
            self.request_moved(slot, at, out);
        }
    }

    /// A room has closed before these requests of it were over: they are followed on, for its record.
    pub(crate) fn follow_closed(&mut self, requests: &[RequestKey], number: u64) {
        for key in requests {
            if let Some(open) = self.http.open.get_mut(key) {
                open.closed.push(number);
            }
        }
    }

    /// Takes a request off the list of open ones.
    fn forget_request(&mut self, key: RequestKey) -> Option<Open> {
        let open = self.http.open.remove(&key)?;
        self.http.places = self.http.places.saturating_sub(open.rooms.len());
        if let Some(e) = self.http.engines.get_mut(open.engine) {
            e.open.remove(&(open.begun, key));
        }
        Some(open)
    }

    fn leg_over(
        &mut self,
        at: Mono,
        key: RequestKey,
        how: LegEnd,
        status: Option<u16>,
        out: &mut Vec<Event>,
    ) {
        let Some(open) = self.forget_request(key) else { return };
        let answered = matches!(how, LegEnd::Finished | LegEnd::Answered);
        let grace = self.config.floor;
        if answered && let Some(e) = self.http.engines.get_mut(open.engine) {
            e.finished(open.begun, at, grace);
        }
        let over = |r: &mut RoomRequest| {
            // Several requests at one engine share a leg: it is over when the last of them is.
            if let Some(leg) = r.legs_mut().find(|l| l.is_open() && l.is_of(key, open.engine)) {
                leg.open = leg.open.saturating_sub(1);
                if leg.open == 0 {
                    leg.seen.ended = Some((at, how));
                    leg.seen.status = status;
                }
            }
        };
        for number in open.closed {
            if let Some(r) = self.closed.get_mut(number).and_then(|r| r.request.as_deref_mut()) {
                over(r);
            }
        }
        for (slot, generation) in open.rooms {
            let Some(room) = self.rooms.current(slot, generation) else { continue };
            let Some(r) = room.request.as_deref_mut() else { continue };
            over(r);
            if answered {
                self.answered_by_request(slot, at);
            }
            self.request_moved(slot, at, out);
        }
    }

    /// Where Success is not on the wire, prefill's answer stands for it.
    fn answered_by_request(&mut self, slot: u32, at: Mono) {
        let Some(room) = self.rooms.get(slot) else { return };
        let over = room.request.as_ref().and_then(|r| r.prefill).and_then(|l| l.over());
        if over.is_none_or(|(_, outcome)| outcome != Outcome::Success) {
            return;
        }
        let silent = room.links.iter().filter(|l| l.owes() && l.told.is_none() && l.heard.is_none());
        let silent: SmallVec<[_; 2]> = silent
            .map(|l| {
                let concluded = Concluded { metadata_at: l.asked_at(), pages: l.pages, at };
                (l.prefill, l.pair, l.numbers, concluded)
            })
            .collect();
        for (prefill, pair, numbers, concluded) in silent {
            self.peers.answered(prefill, pair, numbers, concluded);
        }
    }

    fn out_of_sight(&mut self, at: Mono, key: RequestKey, out: &mut Vec<Event>) {
        let Some(open) = self.forget_request(key) else { return };
        let lost = |r: &mut RoomRequest| {
            for leg in r.legs_mut().filter(|l| l.is_open() && l.is_of(key, open.engine)) {
                leg.seen.out_of_sight = true;
            }
        };
        for number in open.closed {
            if let Some(r) = self.closed.get_mut(number).and_then(|r| r.request.as_deref_mut()) {
                lost(r);
            }
        }
        for (slot, generation) in open.rooms {
            let Some(room) = self.rooms.current(slot, generation) else { continue };
            let Some(r) = room.request.as_deref_mut() else { continue };
            lost(r);
            self.request_moved(slot, at, out);
        }
    }

    /// After a leg has moved on.
    pub(crate) fn request_moved(&mut self, slot: u32, at: Mono, out: &mut Vec<Event>) {
        let Some(room) = self.rooms.get(slot) else { return };
        let Some(r) = room.request.as_deref() else { return };
        let nothing_else = room.marks.is_empty() && !r.legs().any(Leg::is_open);
        if nothing_else && r.legs().any(|l| l.seen.out_of_sight) {
            // Nothing will tell of its end.
            return self.close_room(slot, Outcome::Unknown, at, out);
        }
        if nothing_else && !room.has_prefill && !room.has_decode {
            let outcome = r.legs().find_map(Leg::over).map_or(Outcome::Unknown, |(_, o)| o);
            return self.close_room(slot, outcome, at, out);
        }
        self.settle(slot, at, out);
    }

    /// A room was taken over: its open requests are followed on, until it turns out that something passed on their
    /// connections, or that these are gone.
    pub(crate) fn resume_requests(&mut self, slot: u32) {
        let Some(room) = self.rooms.get(slot) else { return };
        let generation = room.generation;
        let Some(r) = room.request.as_deref() else { return };
        let open: SmallVec<[Leg; 3]> = r.legs().filter(|l| l.is_open()).copied().collect();
        for leg in open {
            self.resume_leg(slot, generation, leg);
        }
    }

    /// After a restart: requests whose connections are gone have been lost sight of.
    pub(crate) fn requests_returned(
        &mut self,
        follows: &impl Fn(crate::event::SocketId) -> bool,
        now: Mono,
        out: &mut Vec<Event>,
    ) {
        let mut gone: Vec<RequestKey> = self.http.open.keys().filter(|k| !follows(k.0)).copied().collect();
        gone.sort_unstable();
        for key in gone {
            self.out_of_sight(now, key, out);
        }
    }

    fn resume_leg(&mut self, slot: u32, generation: u32, leg: Leg) {
        let now = self.now;
        if self.http.places >= MAX_OPEN {
            self.tally.turned_away.requests += 1;
            let r = self.rooms.get_mut(slot).and_then(|r| r.request.as_deref_mut());
            for l in r.into_iter().flat_map(RoomRequest::legs_mut).filter(|l| l.key == leg.key) {
                l.seen.out_of_sight = true;
            }
            return;
        }
        let engine = self.http.engines.at(leg.server, leg.netns, None);
        if let Some(e) = self.http.engines.get_mut(engine) {
            e.blind = e.blind.max(Some(now));
            e.open.insert((leg.seen.begun, leg.key), slot);
        }
        let open = self.http.open.entry(leg.key);
        let open = open.or_insert_with(|| Open {
            begun: leg.seen.begun,
            engine,
            rooms: SmallVec::new(),
            closed: SmallVec::new(),
        });
        open.rooms.push((slot, generation));
        self.http.places += 1;
        if let Some(r) = self.rooms.get_mut(slot).and_then(|r| r.request.as_deref_mut()) {
            for l in r.legs_mut().filter(|l| l.key == leg.key) {
                l.engine = engine;
            }
        }
    }
}

/// Whether a leg is the same request, reported from the other end of its connection.
fn same_request(l: &Leg, a: &Asked<'_>) -> bool {
    let apart = l.seen.begun.since(a.begun).max(a.begun.since(l.seen.begun));
    l.client == a.client && l.server == a.server && l.key.0 != a.key.0 && apart < BOTH_ENDS
}

impl Room {
    /// The request's leg at `role`.
    pub(crate) fn leg(&self, role: Role) -> Option<&Leg> {
        self.request.as_deref().and_then(|r| r.leg(role))
    }

    /// Whether an engine of this host has a request of it that is not over.
    pub(crate) fn held_by_request(&self, role: Role) -> bool {
        self.request.as_deref().is_some_and(|r: &RoomRequest| r.holds(role))
    }
}
