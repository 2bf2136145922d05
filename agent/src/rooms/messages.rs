//! Reads messages into rooms.
//!
//! Pure. Whoever sends, connects (PUSH → PULL): so the address that a message went to is the endpoint of the
//! rank that it is for, and direction and kind give the role of this host's end.

use std::net::SocketAddr;

use crate::event::{Direction, Mono};
use crate::rooms::connections::{Awaited, ConnectionId};
use crate::rooms::model::{Completeness, Connection, Event, Outcome, Role};
use crate::rooms::peers::{EndpointId, Heard, NONE, PairId, SessionId};
use crate::rooms::room::{Abort, Delivery, Link, MAX_LINKS, Mark, Room};
use crate::rooms::table::{RoomTable, next_life};
use crate::sglang::message::{
    AbortAck, Backend, Decoded, Endpoint, Flow, Kind, KvPoll, Message, Metadata, PpState, Register, Releases,
    RoomFrom,
};
use crate::verdict::judge::{AbortEffect, abort_effect, success_on_wire};

/// METADATA this soon after an ABORT is of the same life: the threads of one decode rank raced. The ranks of one
/// decode engine, too, ask in one turn of their schedulers (`poll_and_all_reduce`, `disaggregation/decode.py`).
const RACE: u64 = crate::event::SECOND;

/// One message with where it was seen.
#[derive(Clone, Copy)]
pub(crate) struct Seen<'a> {
    pub(crate) at: Mono,
    pub(crate) connection: &'a Connection,
    pub(crate) direction: Direction,
    pub(crate) end: u32,
    /// The connection as it is followed.
    pub(crate) known: ConnectionId,
    /// Endpoint that it is for.
    pub(crate) target: EndpointId,
    /// Role of this host's end.
    pub(crate) role: Role,
    pub(crate) kind: Kind,
    pub(crate) backend: Backend,
    pub(crate) releases: Releases,
}

/// Role of the end that a message was seen at.
const fn role_of(flow: Flow, direction: Direction) -> Role {
    match (flow, direction) {
        (Flow::DecodeToPrefill, Direction::Sent) | (Flow::PrefillToDecode, Direction::Received) => {
            Role::Decode
        }
        _ => Role::Prefill,
    }
}

/// Releases that fit both; the newer word where none does (ranks of different releases).
fn both(old: Option<Releases>, new: Releases) -> Releases {
    let Some(old) = old.filter(|old| *old != new) else { return new };
    let fit = Releases { min: old.min.max(new.min), max: old.max.min(new.max) };
    if fit.min <= fit.max { fit } else { new }
}

/// Whether a room met on this connection may have begun before the agent looked, `reach` ago at most.
pub(crate) const fn maybe_older(seen: &Seen<'_>, reach: u64) -> bool {
    seen.connection.preexisting && seen.at.since(seen.connection.since) < reach
}

impl RoomTable {
    pub(crate) fn message(
        &mut self,
        at: Mono,
        connection: &Connection,
        direction: Direction,
        end: u32,
        decoded: &Decoded<'_>,
        out: &mut Vec<Event>,
    ) {
        let kind = decoded.message.kind();
        let role = role_of(kind.flow(), direction);
        let (known, target) = self.target(connection, direction);
        let (backend, releases) = (decoded.backend, decoded.releases);
        let seen = Seen { at, connection, direction, end, known, target, role, kind, backend, releases };
        if backend != Backend::Shared
            && let Some(k) = self.connections.get_mut(known)
        {
            k.backend = Some(backend);
            k.releases = Some(both(k.releases, releases));
        }
        match &decoded.message {
            Message::Register(m) => self.register(seen, m),
            Message::Metadata(m) => self.metadata(seen, m, out),
            Message::Abort(m) => self.abort(seen, *m, out),
            Message::Bootstrap(m) => self.bootstrap(seen, *m, out),
            Message::Status(m) => self.status(seen, m, out),
            Message::AbortAck(m) => self.abort_ack(seen, *m, out),
            Message::PpState(m) => self.pp_state(seen, *m, out),
            Message::StagingReq(m) => self.staging(seen, m.room, true, out),
            Message::StagingRsp(m) => self.staging(seen, m.room, false, out),
            Message::AuxData(m) => self.passing(seen, m.room, out),
            Message::ChunkReady(m) => self.passing(seen, m.room, out),
            Message::Watermark(_) => {}
        }
        if let Some(k) = self.connections.get_mut(known) {
            // What the message did not name, none has.
            k.carries(NONE);
            let origin = k.origin;
            if let Some(e) = self.peers.get_mut(origin) {
                e.spoke = Some(at);
            }
        }
        let other = match direction {
            Direction::Sent => connection.addresses.local.ip(),
            Direction::Received => connection.addresses.peer.ip(),
        };
        self.own_up(known, other);
    }

    /// The endpoint that a message went to; the connection is followed from now on.
    fn target(&mut self, c: &Connection, direction: Direction) -> (ConnectionId, EndpointId) {
        let known = self.connections.find(c.socket);
        if let Some(k) = self.connections.get_mut(known) {
            // Sockets outlive the process that made them where it has handed them on.
            if c.task.is_some_and(|t| k.connection.task.is_none_or(|old| old.tgid != t.tgid)) {
                k.connection.task = c.task;
                let owner = if direction == Direction::Sent { k.origin } else { k.target };
                self.peers.owned(owner, c.task);
            }
            return (known, k.target);
        }
        let address = match direction {
            Direction::Sent => c.addresses.peer,
            Direction::Received => c.addresses.local,
        };
        let target = self.peers.endpoint(address, c.netns, &mut self.tally.turned_away);
        let known = self.follow(c, target);
        if let Some(e) = self.peers.get_mut(target) {
            e.reached = true;
            (e.refused, e.connecting, e.cut) = (None, None, None);
        }
        if direction == Direction::Received {
            self.peers.owned(target, c.task);
        }
        (known, target)
    }

    /// Follows a connection from now on.
    pub(crate) fn follow(&mut self, c: &Connection, target: EndpointId) -> ConnectionId {
        let known = self.connections.insert(c, target);
        if known == NONE {
            self.tally.turned_away.connections += 1;
        } else {
            self.peers.opened(target);
        }
        known
    }

    /// Names the rank at the connecting side of a connection.
    pub(crate) fn set_origin(
        &mut self,
        seen: &Seen<'_>,
        origin: EndpointId,
        session: SessionId,
        pair: PairId,
    ) {
        let Some(k) = self.connections.get_mut(seen.known) else { return };
        k.carries(origin);
        k.session = session;
        k.pair = pair;
        if k.origin == origin || origin == NONE {
            return;
        }
        let (old, live) = (std::mem::replace(&mut k.origin, origin), k.live);
        if live {
            self.peers.opened(origin);
            if old != NONE {
                self.peers.went(old, seen.at);
            }
        }
        // Which rank a STATUS is from is mostly deduced: who reads at its port is known better.
        let named = session != NONE || !self.peers.is_owned(origin);
        if seen.direction == Direction::Sent && named {
            self.peers.owned(origin, seen.connection.task);
        }
    }

    /// The decode rank that a message names.
    fn decode_endpoint(&mut self, seen: &Seen<'_>, ip: Option<std::net::IpAddr>, port: u16) -> EndpointId {
        // A host name instead of an address: the connection knows it.
        let ip = ip.unwrap_or_else(|| match seen.direction {
            Direction::Sent => seen.connection.addresses.local.ip(),
            Direction::Received => seen.connection.addresses.peer.ip(),
        });
        let address = SocketAddr::new(ip.to_canonical(), port);
        if let Some(k) = self.connections.get(seen.known)
            && self.peers.address(k.origin) == Some(address)
        {
            return k.origin;
        }
        self.peers.endpoint(address, seen.connection.netns, &mut self.tally.turned_away)
    }

    fn session_id(&mut self, seen: &Seen<'_>, name: &str, decode: EndpointId) -> SessionId {
        if let Some(k) = self.connections.get(seen.known)
            && self.peers.session_name(k.session).is_some_and(|n| &**n == name)
        {
            return k.session;
        }
        if name.is_empty() {
            // NIXL up to 0.4.6.post5 has no session in METADATA: the endpoint stands for it.
            let name = self.peers.address(decode).map(|a| a.to_string()).unwrap_or_default();
            return self.peers.session(&name, &mut self.tally.turned_away);
        }
        self.peers.session(name, &mut self.tally.turned_away)
    }

    fn register(&mut self, seen: Seen<'_>, m: &Register<'_>) {
        let decode = self.decode_endpoint(&seen, m.decode.ip, m.decode.port);
        let session = self.session_id(&seen, m.session, decode);
        let pair = self.peers.pair(seen.target, decode, session, &mut self.tally.turned_away);
        self.peers.register(seen.target, decode, session, m, &mut self.tally.turned_away);
        self.set_origin(&seen, decode, session, pair);
        self.end_streak(pair);
    }

    fn metadata(&mut self, seen: Seen<'_>, m: &Metadata<'_>, out: &mut Vec<Event>) {
        let decode = match m.decode {
            Some(Endpoint { ip, port, .. }) => self.decode_endpoint(&seen, ip, port),
            None => self.connections.get(seen.known).map_or(NONE, |k| k.origin),
        };
        let session = self.session_id(&seen, m.session, decode);
        let pair = match self.connections.get(seen.known) {
            Some(k) if k.session == session && k.pair != NONE => k.pair,
            _ => self.peers.pair(seen.target, decode, session, &mut self.tally.turned_away),
        };
        self.set_origin(&seen, decode, session, pair);
        let Some(slot) = self.room_for_metadata(&seen, m, decode, session, out) else { return };
        let numbers = self.numbers_for(slot, &seen, m, decode, session, pair);
        let older = maybe_older(&seen, RACE);
        let backend = self.learn_backend(&seen, pair);
        let Some(room) = self.rooms.get_mut(slot) else { return };
        (room.backend, room.releases) = backend;
        room.maybe_older |= older && m.required.is_some_and(|r| r > 1);
        let link = match room.links.iter().position(|l| same(l, seen.target, decode, session)) {
            Some(i) => i,
            None if room.links.len() >= MAX_LINKS => {
                self.tally.turned_away.links += 1;
                room.completeness = Completeness::Partial;
                return;
            }
            None => {
                // Most rooms have one link: room for it alone.
                if room.links.is_empty() {
                    room.links.reserve_exact(1);
                }
                room.links.push(new_link(&seen, m, decode, session, pair, numbers));
                room.links.len() - 1
            }
        };
        if let Some(l) = room.links.get_mut(link) {
            let place = if seen.role == Role::Decode { &mut l.sent } else { &mut l.received };
            if place.is_some() && l.aux != m.aux_index {
                l.duplicate.get_or_insert(seen.at);
            }
            place.get_or_insert(seen.at);
            l.dummy = l.dummy.or(m.dummy);
            if seen.direction == Direction::Sent {
                l.metadata_on = Some(seen.connection.socket);
            }
        }
        self.metadata_of_request(slot, seen.role);
        self.mark(slot, &seen, decode, link, None, None, Some((m.pages, m.dummy)));
        self.settle(slot, seen.at, out);
    }

    /// Numbers of the question, if it is a new one (not the other end of one already seen, and no dummy).
    fn numbers_for(
        &mut self,
        slot: u32,
        seen: &Seen<'_>,
        m: &Metadata<'_>,
        decode: EndpointId,
        session: SessionId,
        pair: PairId,
    ) -> (u32, u32) {
        let known = |r: &Room| r.links.iter().any(|l| same(l, seen.target, decode, session));
        if m.dummy == Some(true) || self.rooms.get(slot).is_some_and(known) {
            return (0, 0);
        }
        // Several sessions of one room are one room to the rank.
        let before = self.rooms.get(slot).map_or(&[][..], |r| &r.links);
        let at_rank = before.iter().find(|l| l.prefill == seen.target && l.numbers.0 != 0);
        let at_rank = at_rank.map(|l| l.numbers.0);
        self.peers.asked(seen.target, pair, at_rank)
    }

    /// Backend and releases of a room, from the connection and the message.
    pub(crate) fn learn_backend(
        &mut self,
        seen: &Seen<'_>,
        pair: PairId,
    ) -> (Option<Backend>, Option<Releases>) {
        let k = self.connections.get(seen.known);
        let mut known = (k.and_then(|k| k.backend), k.and_then(|k| k.releases));
        if seen.backend != Backend::Shared {
            known = (Some(seen.backend), Some(both(known.1, seen.releases)));
        }
        if let Some(p) = self.peers.pair_mut(pair) {
            (p.backend, p.releases) = known;
        }
        known
    }

    /// The open room that a METADATA belongs to, a new one, or `None` when it is late or finds no space.
    fn room_for_metadata(
        &mut self,
        seen: &Seen<'_>,
        m: &Metadata<'_>,
        decode: EndpointId,
        session: SessionId,
        out: &mut Vec<Event>,
    ) -> Option<u32> {
        let home = (seen.target, decode);
        if let Some(slot) = self.numbers.open(m.room) {
            let room = self.rooms.get(slot)?;
            if !self.begins_another_life(room, seen, m, decode, session) {
                return Some(slot);
            }
            let outcome = ended(room);
            self.close_room(slot, outcome, seen.at, out);
            return self.open_room(m.room, next_life(self.numbers.tomb(m.room)), seen.at, home, out);
        }
        let last = self.numbers.tomb(m.room);
        if last.is_some() && self.is_late(seen, m, decode, session) {
            self.tally.turned_away.late += 1;
            return None;
        }
        let failed = last.and_then(|_| self.failed_request(m.room));
        let slot = self.open_room(m.room, next_life(last), seen.at, home, out)?;
        if let Some(room) = self.rooms.get_mut(slot) {
            room.request = failed;
        }
        Some(slot)
    }

    /// A room that its request opened meets its first message, an ABORT: METADATA before the agent looked is possible
    /// only if the request, too, began before it.
    fn abort_of_request(
        &mut self,
        seen: &Seen<'_>,
        m: &RoomFrom,
        decode: EndpointId,
        generations: bool,
        slot: u32,
    ) {
        let Some(room) = self.rooms.get(slot) else { return };
        let began_before = room.opened_at < seen.connection.since.plus(RACE);
        if !room.marks.is_empty() || room.request.is_none() || !began_before {
            return;
        }
        let known = self.abort_without_room(seen, m, decode, generations);
        if let (Some(known), Some(room)) = (known, self.rooms.get_mut(slot)) {
            room.completeness = room.completeness.max(known);
        }
    }

    /// Whether a METADATA for an open room means that the room ended unseen and its number is used again.
    fn begins_another_life(
        &self,
        room: &Room,
        seen: &Seen<'_>,
        m: &Metadata<'_>,
        decode: EndpointId,
        session: SessionId,
    ) -> bool {
        if let Some(a) = room.abort
            && seen.at.since(a.at) > RACE
        {
            return true;
        }
        let Some(link) = room.links.iter().find(|l| same(l, seen.target, decode, session)) else {
            return false;
        };
        let again = match seen.role {
            Role::Decode => link.sent,
            Role::Prefill => link.received,
        };
        let Some(before) = again else { return false };
        let unseen = !success_on_wire(room.backend, room.releases)
            || self.peers.lossy_since(seen.target, decode, heard(link), room.opened_at);
        unseen && (link.aux != m.aux_index || seen.at.since(before) > RACE)
    }

    /// Whether a METADATA for a number whose room has closed belongs to that room: the other end of one
    /// already seen, or of another rank of a room that failed meanwhile.
    fn is_late(&self, seen: &Seen<'_>, m: &Metadata<'_>, decode: EndpointId, session: SessionId) -> bool {
        let Some(room) = self.last_closed(m.room) else { return false };
        let Some((closed_at, outcome)) = room.closed else { return false };
        match room.links.iter().find(|l| same(l, seen.target, decode, session)) {
            Some(l) => {
                let seen_here = if seen.role == Role::Decode { l.sent } else { l.received };
                seen_here.is_none() && l.aux == m.aux_index && seen.at.since(closed_at) < RACE
            }
            None => outcome == Outcome::Failed && seen.at.since(closed_at) < self.config.floor,
        }
    }

    fn abort(&mut self, seen: Seen<'_>, m: RoomFrom, out: &mut Vec<Event>) {
        self.abort_read(&seen);
        let decode = self.decode_endpoint(&seen, m.ip, m.port);
        let known = self.connections.get_mut(seen.known);
        let generations = known.is_some_and(|k| {
            k.carries(decode);
            k.generations |= m.generation.is_some();
            k.generations
        });
        let slot = if let Some(slot) = self.numbers.open(m.room) {
            self.abort_of_request(&seen, &m, decode, generations, slot);
            slot
        } else if let Some(slot) = self.abort_of_hung_up(&seen, m.room, decode, out) {
            slot
        } else if self.is_late_for(m.room, seen.at) {
            self.tally.turned_away.late += 1;
            self.abort_of_concluded(&seen, m.room, decode);
            return;
        } else {
            let Some(completeness) = self.abort_without_room(&seen, &m, decode, generations) else {
                self.tally.turned_away.orphans += 1;
                return;
            };
            let life = next_life(self.numbers.tomb(m.room));
            let Some(slot) = self.open_room(m.room, life, seen.at, (seen.target, decode), out) else {
                return;
            };
            if let Some(room) = self.rooms.get_mut(slot) {
                room.completeness = completeness;
            }
            slot
        };
        let (backend, releases) = self.learn_backend(&seen, NONE);
        let Some(room) = self.rooms.get_mut(slot) else { return };
        if room.backend.is_none() {
            (room.backend, room.releases) = (backend, releases);
        }
        let dropped = abort_effect(room.backend, room.releases) == AbortEffect::Dropped;
        let before_metadata = room.links.is_empty();
        let abort = room.abort.get_or_insert(Abort {
            at: seen.at,
            generation: false,
            before_metadata,
            acknowledged: None,
            sent: false,
            received: false,
            on: None,
            delivery: Delivery::Unknown,
        });
        abort.generation |= m.generation.is_some();
        match seen.role {
            Role::Decode => {
                abort.sent = true;
                abort.on = Some(seen.connection.socket);
            }
            // Mori 0.5.13–0.5.18 drops it as malformed: nothing changes at prefill.
            Role::Prefill => abort.received |= !dropped,
        }
        let asked = abort.at;
        if m.generation.is_some() {
            self.await_acknowledgement(&seen, m.room, decode);
            if let Some(p) = self.peers.prefill_mut(seen.target) {
                p.asked_abort = p.asked_abort.max(Some(asked));
            }
        }
        let link = self.link_of(slot, seen.target, decode);
        self.mark(slot, &seen, decode, link, None, None, None);
        self.settle(slot, seen.at, out);
    }

    /// How much is known of a room whose first sight is an ABORT; `None` if it is none of ours.
    fn abort_without_room(
        &self,
        seen: &Seen<'_>,
        m: &RoomFrom,
        decode: EndpointId,
        generations: bool,
    ) -> Option<Completeness> {
        let reach = self.config.reach();
        let recent = |at: Option<Mono>| at.is_some_and(|at| seen.at.since(at) < reach);
        let older = maybe_older(seen, reach);
        let nothing = Heard { prefill: false, decode: false };
        if self.peers.lossy_since(seen.target, decode, nothing, Mono(seen.at.0.saturating_sub(reach))) {
            return Some(Completeness::Lossy);
        }
        if m.generation.is_some() {
            // METADATA went before it: either before the agent looked, or the room is forgotten.
            return if older { Some(Completeness::Preexisting) } else { None };
        }
        // A decode that sends generations sends ABORT without one where METADATA had not been sent.
        if older && !generations {
            return Some(Completeness::Preexisting);
        }
        if recent(self.turned_away_at) { Some(Completeness::Partial) } else { Some(Completeness::Full) }
    }

    fn bootstrap(&mut self, seen: Seen<'_>, m: RoomFrom, out: &mut Vec<Event>) {
        let decode = self.decode_endpoint(&seen, m.ip, m.port);
        if let Some(k) = self.connections.get_mut(seen.known) {
            k.carries(decode);
        }
        if let Some(p) = self.peers.prefill_mut(seen.target) {
            p.prefill_complete = true;
        }
        let home = (seen.target, decode);
        let slot = match (self.numbers.open(m.room), self.numbers.tomb(m.room)) {
            (Some(slot), _) => Some(slot),
            (None, Some(tomb)) if seen.at.since(tomb.closed_at) < RACE => {
                self.tally.turned_away.late += 1;
                None
            }
            (None, tomb) => self.open_room(m.room, next_life(tomb), seen.at, home, out),
        };
        let Some(slot) = slot else { return };
        let (backend, releases) = self.learn_backend(&seen, NONE);
        if let Some(room) = self.rooms.get_mut(slot) {
            room.bootstrap_at.get_or_insert(seen.at);
            // Only mooncake has this policy (SGLang 0.5.22, `mooncake/conn.py`).
            room.backend = room.backend.or(backend).or(Some(Backend::Mooncake));
            room.releases = room.releases.or(releases).or(Some(seen.releases));
        }
        let link = self.link_of(slot, seen.target, decode);
        self.mark(slot, &seen, decode, link, None, None, None);
        self.settle(slot, seen.at, out);
    }

    fn abort_ack(&mut self, seen: Seen<'_>, m: AbortAck, out: &mut Vec<Event>) {
        self.note_acknowledgement(&seen, m);
        let Some(slot) = self.numbers.open(m.room) else {
            self.count_stray(m.room, seen.at);
            return;
        };
        let Some(room) = self.rooms.get_mut(slot) else { return };
        let prefill = room.links.first().map_or(room.home.0, |l| l.prefill);
        if let Some(a) = &mut room.abort {
            a.acknowledged.get_or_insert(seen.at);
            let asked = a.at;
            if let Some(p) = self.peers.prefill_mut(prefill) {
                p.acknowledged_abort = p.acknowledged_abort.max(Some(asked));
            }
        }
        let link = self.link_of(slot, prefill, seen.target);
        self.mark(slot, &seen, prefill, link, None, m.prefill_rank, None);
        self.settle(slot, seen.at, out);
    }

    fn pp_state(&mut self, seen: Seen<'_>, m: PpState, out: &mut Vec<Event>) {
        // Opens nothing: it comes before any hand-over has begun.
        let Some(slot) = self.numbers.open(m.room) else { return };
        let Some(room) = self.rooms.get_mut(slot) else { return };
        if m.status == Some(KvPoll::Failed) && room.has_prefill {
            room.failed_inside.get_or_insert(seen.at);
        }
        self.settle(slot, seen.at, out);
    }

    fn staging(&mut self, seen: Seen<'_>, room: u64, request: bool, out: &mut Vec<Event>) {
        if let Some(room) = self.numbers.open(room).and_then(|s| self.rooms.get_mut(s)) {
            room.staging_wait = request.then_some(seen.at);
        }
        self.passing(seen, room, out);
    }

    /// A message that only shows that the room moves.
    fn passing(&mut self, seen: Seen<'_>, room: u64, out: &mut Vec<Event>) {
        let Some(slot) = self.numbers.open(room) else {
            self.count_stray(room, seen.at);
            return;
        };
        let origin = self.connections.get(seen.known).map_or(NONE, |k| k.origin);
        let link = self.link_of(slot, seen.target, seen.target);
        self.mark(slot, &seen, origin, link, None, None, None);
        self.settle(slot, seen.at, out);
    }

    fn count_stray(&mut self, room: u64, at: Mono) {
        if self.is_late_for(room, at) {
            self.tally.turned_away.late += 1;
        } else {
            self.tally.turned_away.orphans += 1;
        }
    }

    pub(crate) fn link_of(&self, slot: u32, prefill: EndpointId, decode: EndpointId) -> usize {
        let links = self.rooms.get(slot).map_or(&[][..], |r| &r.links);
        let both = links.iter().position(|l| l.prefill == prefill && l.decode == decode);
        both.or_else(|| links.iter().position(|l| l.decode == decode)).unwrap_or(usize::MAX)
    }

    /// Puts a message on the time line and, if it was sent, waits for its acknowledgement.
    #[allow(clippy::too_many_arguments, reason = "the columns of one mark")]
    pub(crate) fn mark(
        &mut self,
        slot: u32,
        seen: &Seen<'_>,
        other: EndpointId,
        link: usize,
        status: Option<KvPoll>,
        rank: Option<u32>,
        pages: Option<(u64, Option<bool>)>,
    ) {
        let Some(room) = self.rooms.get_mut(slot) else { return };
        match seen.role {
            Role::Prefill => room.has_prefill = true,
            Role::Decode => room.has_decode = true,
        }
        if room.home.0 == NONE || room.home.1 == NONE {
            // Opened by its request: now a rank is named.
            let (prefill, decode) = match seen.kind.flow() {
                Flow::DecodeToPrefill => (seen.target, other),
                Flow::PrefillToDecode => (other, seen.target),
                Flow::InsidePrefill => (NONE, NONE),
            };
            let known = |old, new| if old == NONE { new } else { old };
            room.home = (known(room.home.0, prefill), known(room.home.1, decode));
        }
        let generation = room.generation;
        let link = u16::try_from(link).unwrap_or(u16::MAX);
        let mut end = 0;
        if seen.direction == Direction::Sent
            && let Some(k) = self.connections.get_mut(seen.known)
        {
            end = k.unwrap(seen.end);
            let awaited = Awaited { end, at: seen.at, slot, generation, kind: seen.kind, link };
            if k.await_ack(awaited) {
                self.tally.turned_away.acknowledgements += 1;
            }
        }
        let peer = if seen.direction == Direction::Sent { seen.target } else { other };
        let dropped = room.mark(Mark {
            at: seen.at,
            end,
            peer,
            rank,
            pages: pages.map_or(0, |(p, _)| u32::try_from(p).unwrap_or(u32::MAX)),
            kind: seen.kind,
            role: seen.role,
            direction: seen.direction,
            status,
            dummy: pages.and_then(|(_, d)| d),
            acknowledged: None,
        });
        if dropped {
            self.tally.turned_away.marks += 1;
        }
    }
}

/// Which sides of a link have been heard of.
pub(crate) fn heard(l: &Link) -> Heard {
    Heard { prefill: l.told.is_some() || l.heard.is_some(), decode: l.sent.is_some() || l.received.is_some() }
}

fn same(l: &Link, prefill: EndpointId, decode: EndpointId, session: SessionId) -> bool {
    l.prefill == prefill && l.session == session && l.decode == decode
}

fn new_link(
    seen: &Seen<'_>,
    m: &Metadata<'_>,
    decode: EndpointId,
    session: SessionId,
    pair: PairId,
    numbers: (u32, u32),
) -> Link {
    Link {
        prefill: seen.target,
        decode,
        session,
        pair,
        aux: m.aux_index,
        pages: u32::try_from(m.pages).unwrap_or(u32::MAX),
        required: m.required.unwrap_or(1),
        dummy: m.dummy,
        numbers,
        ..Link::unasked()
    }
}

/// How a room ended whose number is used again before its end was seen.
fn ended(room: &Room) -> Outcome {
    if room.abort.is_some() { Outcome::Failed } else { Outcome::Unknown }
}

impl Link {
    /// A link of which nothing was asked yet.
    pub(crate) const fn unasked() -> Self {
        Self {
            prefill: NONE,
            decode: NONE,
            session: NONE,
            pair: NONE,
            aux: None,
            pages: 0,
            required: 1,
            dummy: Some(false),
            rank: None,
            guessed: false,
            sent: None,
            received: None,
            told: None,
            heard: None,
            deaf: false,
            unsent: false,
            metadata_delivery: Delivery::Unknown,
            status_delivery: Delivery::Unknown,
            metadata_on: None,
            status_on: None,
            duplicate: None,
            numbers: (0, 0),
        }
    }
}
