//! Which engine a request came to, and which part that engine plays.
//!
//! Pure: no I/O, no clock (time is an argument).

use std::net::SocketAddr;

use smallvec::SmallVec;

use crate::event::Mono;
use crate::rooms::engines::{EngineId, LOOK_AGAIN};
use crate::rooms::model::{Connection, Role};
use crate::rooms::requests::Asked;
use crate::rooms::requests::legs::{Leg, RoomRequest};
use crate::rooms::table::RoomTable;

impl RoomTable {
    /// The engine at the server's end of a connection.
    pub(super) fn engine_of(&mut self, c: &Connection, server: bool) -> EngineId {
        let (address, task) = if server { (c.addresses.local, c.task) } else { (c.addresses.peer, None) };
        let id = self.engines.at(address, c.netns, task.map(|t| t.tgid));
        if let Some(e) = self.engines.get_mut(id)
            && task.is_some()
        {
            e.task = task;
        }
        id
    }

    /// Whether a decode rank sent it, to have a room again that it retracted.
    pub(super) fn sent_by_decode(&self, a: &Asked<'_>, slot: u32) -> bool {
        let own = if a.here { None } else { a.connection.task };
        if own.and_then(|t| self.engines.role_of_process(t.tgid)) == Some(Role::Decode) {
            return true;
        }
        let Some(room) = self.rooms.get(slot) else { return false };
        let decodes = room.links.iter().map(|l| l.decode).chain([room.home.1]);
        decodes.filter_map(|d| self.peers.address(d)).any(|d| d.ip() == a.client.ip())
    }

    /// Role of the engine that got a request, as far as something tells it.
    pub(super) fn role_at(
        &mut self,
        engine: EngineId,
        server: SocketAddr,
        slot: u32,
        at: Mono,
    ) -> Option<Role> {
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
        let e = self.engines.get_mut(engine)?;
        if e.role.is_some() || e.looked.is_some_and(|l| at.since(l) < LOOK_AGAIN) {
            return e.role;
        }
        e.looked = Some(at);
        let engines = &self.engines;
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
        if let Some(e) = self.engines.get_mut(engine) {
            e.role = role;
        }
        role
    }

    /// Something new is known of the room or its engines: requests at engines of unknown role may have found their places.
    pub(crate) fn place_requests(&mut self, slot: u32, at: Mono) {
        // Most rooms come here without any, with every message.
        if self.rooms.get(slot).is_none_or(|r| r.request.is_none()) {
            return;
        }
        // The place of one can tell the other's.
        for _ in 0..2 {
            let request = self.rooms.get(slot).and_then(|r| r.request.as_deref());
            let unplaced: SmallVec<[Leg; 2]> =
                request.into_iter().flat_map(RoomRequest::unplaced).copied().collect();
            let mut placed = false;
            for leg in unplaced {
                placed |= self.place_request(slot, &leg, at);
            }
            if !placed {
                return;
            }
        }
    }

    /// Whether the leg has found its place.
    fn place_request(&mut self, slot: u32, leg: &Leg, at: Mono) -> bool {
        let Some(role) = self.role_at(leg.engine, leg.server, slot, at) else { return false };
        let Some(room) = self.rooms.get_mut(slot) else { return false };
        let Some(r) = room.request.as_deref_mut().filter(|r| r.leg(role).is_none()) else { return false };
        let taken = r.take_leg(|l| l == leg);
        *r.place(role) = taken;
        match role {
            Role::Prefill => room.has_prefill |= leg.here,
            Role::Decode => room.has_decode |= leg.here,
        }
        true
    }
}
