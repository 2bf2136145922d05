//! How requests go on and end, and what that means for their rooms.
//!
//! Pure: no I/O, no clock (time is an argument).

use smallvec::SmallVec;

use crate::event::Mono;
use crate::rooms::model::{Event, LegEnd, Outcome};
use crate::rooms::peers::{Concluded, Endpoint, EndpointId};
use crate::rooms::requests::Open;
use crate::rooms::requests::legs::{Leg, RequestKey, RoomRequest};
use crate::rooms::room::Link;
use crate::rooms::table::RoomTable;

impl RoomTable {
    pub(super) fn first_body_byte(&mut self, at: Mono, key: RequestKey, out: &mut Vec<Event>) {
        let Some(open) = self.http.open.get(&key) else { return };
        for number in open.closed.clone() {
            let closed = self.closed.get_mut(number).and_then(|r| r.request.as_deref_mut());
            if let Some(leg) = closed.and_then(|r| r.of_key(key)) {
                leg.seen.first_byte.get_or_insert(at);
            }
        }
        let Some(open) = self.http.open.get(&key) else { return };
        for (slot, generation) in open.rooms.clone() {
            let Some(room) = self.rooms.current(slot, generation) else { continue };
            let Some(r) = room.request.as_deref_mut() else { continue };
            if let Some(leg) = r.of_key(key) {
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
    pub(super) fn forget_request(&mut self, key: RequestKey) -> Option<Open> {
        let open = self.http.open.remove(&key)?;
        self.http.places = self.http.places.saturating_sub(open.rooms.len());
        if let Some(e) = self.engines.get_mut(open.engine) {
            e.open.remove(&(open.begun, key));
        }
        Some(open)
    }

    pub(super) fn leg_over(
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
        if answered && let Some(e) = self.engines.get_mut(open.engine) {
            e.finished(open.begun, at, grace);
        }
        for number in open.closed {
            if let Some(r) = self.closed.get_mut(number).and_then(|r| r.request.as_deref_mut()) {
                r.end(key, at, how, status);
            }
        }
        for (slot, generation) in open.rooms {
            if self.rooms.current(slot, generation).is_none() {
                continue;
            }
            self.place_requests(slot, at);
            let request = self.rooms.get_mut(slot).and_then(|room| room.request.as_deref_mut());
            let Some(r) = request else { continue };
            r.end(key, at, how, status);
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

    pub(super) fn out_of_sight(&mut self, at: Mono, key: RequestKey, out: &mut Vec<Event>) {
        let Some(open) = self.forget_request(key) else { return };
        let lost = |r: &mut RoomRequest| {
            if let Some(leg) = r.of_key(key).filter(|l| l.is_open()) {
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

    /// Prefill has answered, so its STATUS is in its socket, or about to be (`update_status` comes before `send_kv_status_message`,
    /// `disaggregation/common/conn.py` of 0.5.23). One to a decode rank that refuses the connection, or lets it go without an answer,
    /// or to which the connection has ended, is nowhere (M22, M23).
    fn note_unsent(&mut self, slot: u32) {
        let Some(room) = self.rooms.get(slot) else { return };
        let done = room.has_prefill && room.prefill_answered().is_some_and(|(_, o)| o == Outcome::Success);
        if !done || room.abort.is_some() || !self.says_success(room) || self.is_lossy(room) {
            return;
        }
        let cannot_leave = |l: &Link| {
            let untold = l.dummy == Some(false) && l.told.is_none() && l.heard.is_none();
            let shut = |e: &Endpoint| e.refused.is_some() || e.connecting.is_some() || e.cut.is_some();
            untold && l.received.is_some() && self.peers.get(l.decode).is_some_and(shut)
        };
        let unsent: SmallVec<[bool; 4]> =
            room.links.iter().map(|l| cannot_leave(l) && !self.left(l.decode, room.opened_at)).collect();
        if let Some(room) = self.rooms.get_mut(slot) {
            room.links.iter_mut().zip(unsent).for_each(|(l, unsent)| l.unsent |= unsent);
        }
    }

    /// Whoever was to get it is gone, and waits for nothing.
    pub(crate) fn forget_unsent(&mut self, slot: u32) {
        let Some(room) = self.rooms.get(slot).filter(|r| r.links.iter().any(|l| l.unsent)) else { return };
        let left: SmallVec<[bool; 4]> =
            room.links.iter().map(|l| self.left(l.decode, room.opened_at)).collect();
        if let Some(room) = self.rooms.get_mut(slot) {
            room.links.iter_mut().zip(left).for_each(|(l, left)| l.unsent &= !left);
        }
    }

    /// Whether a peer's process is gone, as far as is known; that its port alone is closed says nothing of that.
    fn left(&self, id: EndpointId, since: Mono) -> bool {
        self.lost(id, since).is_some_and(|l| l.exit.is_some() || !l.listener)
    }

    /// After a leg has moved on.
    pub(crate) fn request_moved(&mut self, slot: u32, at: Mono, out: &mut Vec<Event>) {
        self.note_unsent(slot);
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
}
