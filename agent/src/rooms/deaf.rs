//! Decode ranks that take no STATUS in any more: the thread that does it has ended (M19, M38), and their engine lives on.
//!
//! Pure: no I/O, no clock (time is an argument). libzmq goes on reading and acknowledging, so such a STATUS has come in every sense of
//! TCP's, and decode waits for it until its own timeout. Which thread it was follows from what was foreign just before its end; an
//! answer of decode for a room whose STATUS came since takes it back.

use smallvec::SmallVec;

use crate::event::Mono;
use crate::rooms::messages::Seen;
use crate::rooms::model::{Outcome, Role};
use crate::rooms::peers::{DeadReader, EndpointId};
use crate::rooms::requests::legs::Leg;
use crate::rooms::room::{Link, Room};
use crate::rooms::table::RoomTable;
use crate::sglang::message::Backend;
use crate::verdict::facts::{ForeignFact, ThreadFact, Was};

impl RoomTable {
    /// The dead status thread of a decode rank of this host.
    fn dead_status_reader(&self, decode: EndpointId) -> Option<DeadReader> {
        let reader = self.reader(decode).filter(|_| self.peers.prefill(decode).is_none());
        // What is not ZMTP never leaves libzmq.
        reader.filter(|r| r.foreign.frames > 0 && !r.chance)
    }

    /// Whether a STATUS of this room comes to a rank that does not take it in. Only mooncake's status thread dies of a message
    /// (`decode_thread`, `mooncake/conn.py` of 0.5.23).
    pub(crate) fn falls_on_deaf_ears(&self, slot: u32, seen: &Seen<'_>) -> bool {
        let mooncake = self.rooms.get(slot).is_some_and(|r| r.backend == Some(Backend::Mooncake));
        let dead = || self.dead_status_reader(seen.target).is_some_and(|r| seen.at > r.foreign.at);
        mooncake && seen.role == Role::Decode && dead()
    }

    /// The status thread of this rank may just have been found dead: what came since the message that killed it is not taken in.
    pub(crate) fn deafen(&mut self, decode: EndpointId) {
        let Some(dead) = self.dead_status_reader(decode) else { return };
        let lost = |l: &Link| l.decode == decode && l.heard.is_some_and(|h| h.at > dead.foreign.at);
        for slot in self.rooms_with(|r| r.backend == Some(Backend::Mooncake) && r.links.iter().any(lost)) {
            let Some(room) = self.rooms.get_mut(slot) else { continue };
            room.links.iter_mut().filter(|l| lost(l)).for_each(|l| l.deaf = true);
            self.wheel.set(slot, dead.death.at, dead.death.at);
        }
    }

    /// Whether decode has answered a room whose STATUS fell on deaf ears: its thread lives.
    pub(crate) fn note_taken_in(&mut self, slot: u32, at: Mono) {
        let Some(room) = self.rooms.get(slot).filter(|r| r.links.iter().any(|l| l.deaf)) else { return };
        // An engine whose timer ends the wait answers as well, with an error.
        let asked = room.links.iter().map(Link::asked_at).max().unwrap_or(at);
        let waited = room.abort.is_some() || at.since(asked) >= self.config.waiting_timeout;
        let fine = |l: &Leg| match l.over() {
            Some((_, outcome)) => outcome == Outcome::Success,
            None => l.seen.first_byte.is_some() && l.seen.status.is_none_or(|s| s < 400),
        };
        if !waited && room.leg(Role::Decode).is_some_and(|l| l.here && fine(l)) {
            self.take_in(slot, at);
        }
    }

    /// A room that fell on deaf ears has outlived decode's timer, and decode has not sent the ABORT that it would have sent.
    pub(crate) fn note_outlived(&mut self, slot: u32, tells: bool, at: Mono) {
        if tells && self.rooms.get(slot).is_some_and(|r| r.abort.is_none()) {
            self.take_in(slot, at);
        }
    }

    /// STATUS of this room was taken in, and so was that of all others that came to the same ranks.
    fn take_in(&mut self, slot: u32, at: Mono) {
        let Some(room) = self.rooms.get(slot) else { return };
        let heard = room.links.iter().filter(|l| l.deaf).filter_map(|l| Some((l.decode, l.heard?.at)));
        let heard: SmallVec<[(EndpointId, Mono); 4]> = heard.collect();
        for (decode, when) in heard {
            if let Some(e) = self.peers.get_mut(decode) {
                e.took = e.took.max(Some(when));
            }
            for slot in self.rooms_with(|r| r.links.iter().any(|l| l.deaf && l.decode == decode)) {
                let Some(room) = self.rooms.get_mut(slot) else { continue };
                room.links.iter_mut().filter(|l| l.decode == decode).for_each(|l| l.deaf = false);
                self.wheel.set(slot, at, at);
            }
        }
    }

    fn rooms_with(&self, fits: impl Fn(&Room) -> bool) -> Vec<u32> {
        self.rooms.iter().filter(|r| fits(r)).filter_map(|r| self.numbers.open(r.room)).collect()
    }

    /// The thread whose end is why a decode rank of this host takes no STATUS of a room in.
    pub(crate) fn status_thread(&self, room: &Room) -> Option<ThreadFact> {
        let decode = room.links.iter().find(|l| l.deaf)?.decode;
        let r = self.dead_status_reader(decode)?;
        Some(self.thread_fact(decode, r.tgid, r.death, Was::Status(ForeignFact::of(&r.foreign))))
    }

    /// Requests that wait in decode for their KV, as its engine has said since `from`.
    pub(crate) fn in_transfer(&self, decode: EndpointId, from: Mono, now: Mono) -> Option<u64> {
        let task = self.peers.get(decode)?.task?;
        self.engines.get(self.engines.of_process(task.tgid)?)?.in_transfer(now, from)
    }
}
