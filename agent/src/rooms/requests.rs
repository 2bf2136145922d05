//! Requests at the engines' HTTP ports: which rooms they are for, and what their end says of them.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: at most [`MAX_OPEN`] rooms of open requests are followed; what
//! does not fit is counted, and of its engine nothing is claimed that rests on having seen every request.

pub(crate) mod bootstrap;
mod clocks;
mod ends;
mod evidence;
mod late_aborts;
pub(crate) mod legs;
mod roles;

use std::net::SocketAddr;

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::event::{Mono, SECOND};
use crate::http::event as web;
use crate::rooms::engines::EngineId;
use crate::rooms::messages::Seen;
use crate::rooms::model::{Connection, Event, LegEnd, LegView, Outcome, RequestStep, Role};
use crate::rooms::peers::{EndpointId, NONE};
use crate::rooms::requests::bootstrap::Bootstraps;
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
    open: HashMap<RequestKey, Open>,
    /// Rooms in `open`.
    places: usize,
    pub(crate) bootstraps: Bootstraps,
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
    connection: &'a Connection,
    key: RequestKey,
    client: SocketAddr,
    server: SocketAddr,
    here: bool,
    engine: EngineId,
    /// It names this many rooms, and whether these are all.
    rooms: (usize, bool),
    /// It may stand for more.
    maybe_more: bool,
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
            RequestStep::Asked { work } => self.asked(at, connection, server, key, work, out),
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
                if let Some(e) = self.engines.get_mut(engine) {
                    e.out_of_sight(at, at);
                }
                self.out_of_sight(at, key, out);
            }
            RequestStep::Control { call, status } => self.control_call(at, connection, server, call, status),
        }
    }

    /// A request to this engine may have passed without being seen, or without its room.
    fn blind(&mut self, engine: EngineId, at: Mono) {
        if let Some(e) = self.engines.get_mut(engine) {
            e.blind = e.blind.max(Some(at));
        }
    }

    fn asked(
        &mut self,
        at: Mono,
        connection: &Connection,
        here: bool,
        key: RequestKey,
        work: &web::Work,
        out: &mut Vec<Event>,
    ) {
        let engine = self.engine_of(connection, here);
        let (complete, maybe_more) = match &work.rooms {
            web::Rooms::Named { complete, maybe_more, .. } => (*complete, *maybe_more),
            web::Rooms::NotSeen(_) => (false, true),
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
        if here && let Some(e) = self.engines.get_mut(engine) {
            e.followed.get_or_insert(at);
            e.heard.get_or_insert(at);
        }
        let a = &connection.addresses;
        let (client, server) = if here { (a.peer, a.local) } else { (a.local, a.peer) };
        let rooms = (wanted, complete);
        let asked = Asked { at, connection, key, client, server, here, engine, rooms, maybe_more };
        let mut rooms: SmallVec<[(u32, u32); 1]> = SmallVec::new();
        for (room, rid) in work.pairs() {
            rooms.extend(self.join(&asked, room, rid, out));
        }
        let Some((first, _)) = rooms.first().copied() else { return };
        if let Some(e) = self.engines.get_mut(engine) {
            e.open.insert((at, key), first);
        }
        self.http.places += rooms.len();
        let slots: SmallVec<[u32; 1]> = rooms.iter().map(|(slot, _)| *slot).collect();
        self.http.open.insert(key, Open { begun: at, engine, rooms, closed: SmallVec::new() });
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
        if r.every().any(|l| same_request(l, a) && l.here) {
            return None;
        }
        // One that decode sends for a room it retracted has the id of the first.
        let again = !by_decode || matches!((r.rid.as_deref(), rid), (Some(old), Some(new)) if old != new);
        if r.rid.is_none() {
            r.rid = rid.map(Into::into);
        }
        let seen = LegView { begun: a.at, first_byte: None, ended: None, status: None, out_of_sight: false };
        let leg = Leg {
            seen,
            key: a.key,
            client: a.client,
            server: a.server,
            here: a.here,
            by_decode,
            netns: a.connection.netns,
            alone: a.rooms == (1, true) && !a.maybe_more,
            all: a.rooms.1,
            maybe_more: a.maybe_more,
            engine: a.engine,
        };
        // The server's end tells what the client's has told: it is followed from there.
        let told_twice = r.take_leg(|l| same_request(l, a)).or_else(|| r.take_other(|l| same_request(l, a)));
        let told_twice = told_twice.map(|l| l.key);
        let place = match role {
            Some(role) => Some(r.place(role)),
            None => r.place_of_unknown(a.engine, a.server),
        };
        let placed = match place {
            Some(place) if place.is_none_or(|old| !old.is_open()) => {
                *place = Some(leg);
                true
            }
            Some(_) => {
                if again {
                    r.duplicate.get_or_insert(a.at);
                }
                r.keep_beside(role, leg)
            }
            None => false,
        };
        if !placed {
            self.tally.turned_away.requests += 1;
            self.blind(a.engine, a.at);
            return None;
        }
        match role {
            Some(Role::Prefill) => room.has_prefill |= a.here,
            Some(Role::Decode) => room.has_decode |= a.here,
            None => {}
        }
        if let Some(key) = told_twice {
            self.forget_request(key);
        }
        if asked_before && let Some(e) = self.engines.get_mut(a.engine) {
            e.asked(a.at);
        }
        Some((slot, generation))
    }

    fn open_for_request(&mut self, a: &Asked<'_>, number: u64, out: &mut Vec<Event>) -> Option<u32> {
        let tomb = self.numbers.tomb(number);
        if let Some(t) = tomb {
            // Of the life that has closed: it began before, or the other end of its connection has told of it.
            let last = || self.last_closed(number).and_then(|r| r.request.as_ref());
            if t.closed_at > a.at || last().is_some_and(|r| r.legs().any(|l| same_request(l, a))) {
                self.tally.turned_away.late += 1;
                return None;
            }
        }
        // Of an engine elsewhere only what it means for a room of this host counts. An address that talks to itself is here.
        if !a.here && a.client.ip() != a.server.ip() {
            return None;
        }
        let aborted = self.hung_up_at_decode(number, a.at).filter(|r| r.abort.is_some()).map(|r| {
            let marks = r.marks.clone();
            (r.abort, marks, r.home, r.has_prefill, r.request.clone(), (r.backend, r.releases))
        });
        let home = aborted.as_ref().map_or((NONE, NONE), |a| a.2);
        let slot = self.open_room(number, next_life(tomb), a.at, home, out)?;
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
        let last = self.last_closed(number)?;
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

    /// The request of the last life of this number, if prefill ended it without KV having been handed over: METADATA that
    /// comes now was sent to a room that is over (M10, M40).
    pub(crate) fn failed_request(&self, number: u64) -> Option<Box<RoomRequest>> {
        let last = self.last_closed(number)?;
        let r = last.request.as_ref()?;
        let (_, outcome) = r.prefill.filter(|l| l.here)?.over()?;
        (outcome == Outcome::Failed && r.decode.is_none_or(|l| !l.is_open())).then(|| r.clone())
    }

    /// METADATA of a room with a request came.
    pub(crate) fn metadata_of_request(&mut self, slot: u32, role: Role) {
        let leg = self.rooms.get(slot).and_then(|r| r.request.as_ref()).and_then(|r| r.leg(role).copied());
        if let Some(leg) = leg.filter(|l| l.seen.ended.is_none())
            && let Some(e) = self.engines.get_mut(leg.engine)
        {
            e.role.get_or_insert(role);
            e.asked(leg.seen.begun);
        }
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
        let engine = self.engines.at(leg.server, leg.netns, None);
        if let Some(e) = self.engines.get_mut(engine) {
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
    let apart = l.seen.begun.since(a.at).max(a.at.since(l.seen.begun));
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
