//! Facts about the request behind a room, for its verdict.
//!
//! Pure; reads the table, changes nothing. Runs when a room is overdue or shown, never per message.

use smallvec::SmallVec;

use crate::event::{Mono, SECOND};
use crate::rooms::engines::{Engine, EngineId, stood};
use crate::rooms::model::{Connection, EngineGauges, EngineNumbers, LegEnd, Outcome, Role};
use crate::rooms::peers::{EndpointId, NONE};
use crate::rooms::requests::legs::{Leg, RoomRequest};
use crate::rooms::room::{Progress, Room};
use crate::rooms::table::RoomTable;
use crate::verdict::facts::{RequestFacts, Stopped};
use crate::verdict::judge::Judgement;
use crate::verdict::model::{Class, Confidence};

/// An answer whose head and first bytes have come is an error if its end is there so soon.
const HEAD_ONLY: u64 = SECOND / 5;
/// Whatever else belongs to a room whose request failed comes within this.
const REJOIN: u64 = 2 * SECOND;
/// How late an engine may notice a hang-up; until then it serves the request on and the room may succeed
/// (`_REQUEST_STATE_WAIT_TIMEOUT`, `managers/tokenizer_manager.py` of SGLang 0.5.23).
const NOTICE: u64 = 4 * SECOND;

/// As many numbers behind a room's own are looked at for rooms of the same request (`n` of chats ends at 128).
const MAX_HIDDEN: u64 = 128;

/// Pinned rooms looked at anew because of one answer of an engine; the others have their turn within a second.
const MAX_LOOKS: usize = 64;

/// Open requests looked at that began before a room's own.
const MAX_AHEAD: usize = 64;

impl RoomTable {
    /// What is known of a room's request, and of the engines that have it.
    pub(crate) fn request_facts(
        &self,
        room: &Room,
        role: Role,
        view: Progress,
        since: Mono,
        now: Mono,
    ) -> RequestFacts {
        let engines = self.engines_of(room);
        let [prefill, decode] = engines.map(|e| e.and_then(|id| self.engines.get(id)));
        let own = if role == Role::Prefill { prefill } else { decode };
        let begun = room.leg(role).map(|l| l.seen.begun);
        let stopped = [(Role::Prefill, prefill), (Role::Decode, decode)].into_iter().find_map(|(role, e)| {
            let e = e?;
            Some(Stopped { role, since: e.stopped?, why: e.why()?.words() })
        });
        let request = room.request.as_deref();
        let waiting = |e: Option<&Engine>, from| e.and_then(|e| e.waiting(now, from));
        // What it says of a request that has only just come is of before.
        let none = |role: Role, e| {
            let begun = room.leg(role).map_or(since, |l| l.seen.begun);
            waiting(e, begun.plus(self.config.floor)) == Some(0)
        };
        let held = role == Role::Prefill && view.terminal.is_some() && room.held_by_request(Role::Prefill);
        RequestFacts {
            rid: request.and_then(|r| r.rid.as_deref()).map(str::to_owned),
            prefill: room.leg(Role::Prefill).map(|l| l.seen),
            decode: room.leg(Role::Decode).map(|l| l.seen),
            servers: [prefill, decode].map(|e| e.and_then(|e| e.address)),
            open: [Role::Prefill, Role::Decode].map(|r| room.held_by_request(r)),
            never_begun: [Role::Prefill, Role::Decode].map(|r| self.never_begun(room, r)),
            not_come: prefill.and_then(|e| e.heard).is_some_and(|since| since <= room.opened_at)
                && request.is_none_or(|r| r.leg(Role::Prefill).is_none() && r.unplaced().next().is_none()),
            duplicate: request.and_then(RoomRequest::duplicate),
            refused: request.and_then(|r| r.duplicate.zip(r.refused)),
            dp_rank: request.and_then(|r| r.dp_rank),
            held,
            later_finished: begun.and_then(|b| own.map(|e| e.later_finished(b))).unwrap_or(0),
            later_asked: begun.and_then(|b| own.map(|e| e.later_asked(b))).unwrap_or(0),
            ahead: room.leg(Role::Prefill).zip(prefill).is_some_and(|(l, e)| self.ahead(e, l.seen.begun)),
            stopped,
            stood: stood([prefill, decode], since, now),
            waiting: [prefill, decode].map(|e| waiting(e, Mono(0))),
            said_to_wait: prefill.and_then(|e| e.said_to_wait(now)),
            none_waits: [none(Role::Prefill, prefill), none(Role::Decode, decode)],
            // Only of a room that is held is it asked.
            siblings: held && self.siblings_open(room),
            maybe_more: room.leg(Role::Prefill).is_some_and(|l| l.maybe_more),
        }
    }

    /// Whether the prefill engine of this room computes, its phase having begun at `since`: see [`Engine::idle`].
    pub(crate) fn engine_idle(&self, room: &Room, since: Mono, now: Mono) -> Option<bool> {
        let [prefill, _] = self.engines_of(room);
        let from = room.leg(Role::Prefill).map_or(since, |l| l.seen.begun.max(since));
        self.engines.get(prefill?)?.idle(now, from)
    }

    /// Whether the prefill engine of this room may be computing, and when the schedulers of both engines last wrote their numbers if
    /// their servers answer without newer ones: see [`Engine::may_compute`], [`Engine::wrote`].
    pub(crate) fn engine_works(&self, room: &Room, since: Mono, now: Mono) -> (bool, [Option<Mono>; 2]) {
        let engines = self.engines_of(room).map(|id| id.and_then(|id| self.engines.get(id)));
        let [prefill, _] = engines;
        let may_compute = prefill.is_some_and(|e| e.may_compute(now, since));
        (may_compute, engines.map(|e| e.and_then(|e| e.wrote(now))))
    }

    /// Whether decode's scheduler may have been stood still unseen since it last wrote its numbers at `wrote`: see
    /// [`Engine::may_be_paused`].
    pub(crate) fn decode_may_be_paused(&self, room: &Room, wrote: Option<Mono>) -> bool {
        let [_, decode] = self.engines_of(room).map(|id| id.and_then(|id| self.engines.get(id)));
        let started = self.started.unwrap_or(self.now);
        decode.zip(wrote).is_some_and(|(e, wrote)| e.may_be_paused(wrote, self.config.ceiling, started))
    }

    /// What the engines of this room said in numbers, from `from` to `to`.
    pub(crate) fn numbers_of(&self, room: &Room, from: Mono, to: Mono) -> Vec<EngineNumbers> {
        let engines = [Role::Prefill, Role::Decode].into_iter().zip(self.engines_of(room));
        let known = engines.filter_map(|(role, id)| Some((role, self.engines.get(id?)?)));
        known.flat_map(|(role, e)| e.said(role, from, to)).collect()
    }

    /// The other rooms of this room's request at prefill: it is answered when all of them are over.
    fn siblings<'a>(&'a self, room: &'a Room) -> impl Iterator<Item = &'a Room> {
        let key = room.leg(Role::Prefill).map(|l| l.key);
        let all = key.and_then(|key| self.http.open.get(&key)).map_or(&[][..], |open| &open.rooms);
        let living = all
            .iter()
            .filter_map(|(slot, generation)| self.rooms.get(*slot).filter(|r| r.generation == *generation));
        living.filter(|r| r.room != room.room)
    }

    /// Whether one of them is not over at prefill, or may not be because not all were seen.
    fn siblings_open(&self, room: &Room) -> bool {
        room.leg(Role::Prefill).is_some_and(|l| !l.all || (l.maybe_more && self.hidden_sibling_open(room)))
            || self.siblings(room).any(|r| r.progress(Role::Prefill).terminal.is_none())
    }

    /// Whether a room that is not over at prefill, and that no request of its own asks for there, has one of the numbers that the
    /// engine gives to what else this room's request may ask for (`io_struct.py`, `_normalize_bootstrap_params`).
    fn hidden_sibling_open(&self, room: &Room) -> bool {
        let numbers = (1..=MAX_HIDDEN).filter_map(|n| room.room.checked_add(n));
        let rooms = numbers.filter_map(|n| self.rooms.get(self.numbers.open(n)?));
        rooms
            .filter(|r| r.has_prefill && r.leg(Role::Prefill).is_none())
            .any(|r| r.progress(Role::Prefill).terminal.is_none())
    }

    /// Whether this room may have been asked for by an open request of which not all was seen.
    fn may_be_hidden(&self, room: &Room, role: Role) -> bool {
        let numbers = (1..=MAX_HIDDEN).filter_map(|n| room.room.checked_sub(n));
        let mut legs = numbers.filter_map(|n| self.rooms.get(self.numbers.open(n)?)?.leg(role));
        legs.any(|l| l.maybe_more && l.seen.begun <= room.opened_at.plus(self.config.floor))
    }

    /// When the last of them was.
    pub(crate) fn siblings_over(&self, room: &Room) -> Option<Mono> {
        let seen = self.siblings(room).map(|r| r.progress(Role::Prefill));
        let seen = seen.filter(|p| p.terminal.is_some()).map(|p| p.since).max();
        let more = room.leg(Role::Prefill).is_some_and(|l| l.maybe_more);
        seen.max(if more { self.hidden_sibling_over(room) } else { None })
    }

    /// When the last room was over that may have been one of them: see [`Self::hidden_sibling_open`].
    fn hidden_sibling_over(&self, room: &Room) -> Option<Mono> {
        let unasked = |r: &&Room| r.has_prefill && r.leg(Role::Prefill).is_none();
        let over = |number| match self.numbers.open(number) {
            Some(slot) => self.rooms.get(slot).filter(unasked).map(|r| r.progress(Role::Prefill).since),
            None => self
                .last_closed(number)
                .filter(unasked)
                .and_then(|_| self.numbers.tomb(number))
                .map(|t| t.closed_at),
        };
        let numbers = (1..=MAX_HIDDEN).filter_map(|n| room.room.checked_add(n));
        numbers.filter_map(over).filter(|at| *at >= room.opened_at).max()
    }

    /// The first moment from `from` on at which nothing waited in the prefill engine of this room: see
    /// [`Engine::nothing_waited`].
    pub(crate) fn nothing_waited(&self, room: &Room, from: Mono) -> Option<Mono> {
        let [prefill, _] = self.engines_of(room);
        self.engines.get(prefill?)?.nothing_waited(from)
    }

    /// The prefill engine and the decode engine of a room, where they are known.
    fn engines_of(&self, room: &Room) -> [Option<EngineId>; 2] {
        if self.engines.iter().next().is_none() {
            return [None; 2];
        }
        let linked = room.links.first().map_or(room.home, |l| (l.prefill, l.decode));
        [(Role::Prefill, linked.0), (Role::Decode, linked.1)].map(|(role, rank)| {
            let by_leg = room.leg(role).map(|l| l.engine).filter(|e| *e != NONE);
            by_leg.map(|id| self.engines.resolve(id)).or_else(|| self.engine_of_rank(rank, role))
        })
    }

    /// The decode engine that must have a room which no frame has named a rank of: where every decode rank that has talked
    /// to this prefill engine is of one engine of this host.
    fn only_decode_of(&self, prefill: EngineId) -> Option<EngineId> {
        let mut only = None;
        for pair in self.peers.pairs() {
            if self.engine_of_rank(pair.prefill, Role::Prefill) != Some(prefill) {
                continue;
            }
            let engine = self.engine_of_rank(pair.decode, Role::Decode)?;
            if only.is_some_and(|known| known != engine) {
                return None;
            }
            only = Some(engine);
        }
        only
    }

    fn engine_of_rank(&self, rank: EndpointId, role: Role) -> Option<EngineId> {
        let e = self.peers.get(rank)?;
        let by_process = e.task.and_then(|t| self.engines.of_process(t.tgid));
        by_process.or_else(|| self.engines.alone_at(e.address.ip(), role))
    }

    /// Whether an engine of this room has ever stood still.
    pub(crate) fn ever_stopped(&self, room: &Room) -> bool {
        let engines = self.engines_of(room).into_iter().flatten();
        engines.filter_map(|id| self.engines.get(id)).any(Engine::ever_stopped)
    }

    /// Whether it is known that this engine of this host was never asked for the room: every request to it has been seen
    /// since before the room began.
    fn never_begun(&self, room: &Room, role: Role) -> bool {
        let none =
            room.request.as_deref().is_none_or(|r| r.leg(role).is_none() && r.unplaced().next().is_none());
        none && self.all_seen(room, role) && !self.may_be_hidden(room, role)
    }

    fn all_seen(&self, room: &Room, role: Role) -> bool {
        let [prefill, decode] = self.engines_of(room);
        let id = match role {
            Role::Prefill => prefill,
            Role::Decode => decode.or_else(|| self.only_decode_of(prefill?)),
        };
        let Some(e) = id.and_then(|id| self.engines.get(id)) else { return false };
        let before = Mono(room.opened_at.0.saturating_sub(self.config.floor));
        e.role == Some(role)
            && e.followed.is_some_and(|since| since < before)
            && e.blind.is_none_or(|at| at < before)
    }

    /// Whether a request that began before this one is still open at its engine, other than of rooms that are surely
    /// pinned: one that only silence pins may be computed for a long time.
    fn ahead(&self, e: &Engine, begun: Mono) -> bool {
        let mut before = e.open.iter().take_while(|((b, _), _)| *b < begun);
        let stuck = |j: &Judgement| {
            j.class.pins() && (j.confidence > Confidence::Possible || j.class == Class::AbortBeforeEntry)
        };
        let waits =
            |slot: u32| self.rooms.get(slot).is_some_and(|r| !r.judgement.as_deref().is_some_and(stuck));
        before.by_ref().take(MAX_AHEAD).any(|(_, slot)| waits(*slot)) || before.next().is_some()
    }

    /// Whether METADATA of a room of which only the request was seen may have passed in bytes that were missed.
    pub(crate) fn may_have_missed_frames(&self, room: &Room) -> bool {
        room.request.is_some()
            && room.home == (NONE, NONE)
            && self.peers.endpoints().any(|(_, e)| e.missed.is_some_and(|at| at >= room.opened_at))
    }

    /// Until when a room whose views are over by their requests alone may still go on: an answer of which only the head
    /// is there may turn out an error, the other engine's request or an ABORT may be on its way, an engine may not have
    /// noticed yet that its client hung up, and a decode rank that retracted a room asks for it anew with METADATA first.
    pub(crate) fn may_go_on(&self, room: &Room, now: Mono) -> Option<Mono> {
        let r = room.request.as_deref()?;
        if room.links.iter().any(|l| l.told.is_some() || l.heard.is_some()) {
            return None;
        }
        let begun = |leg: Option<Leg>| leg.filter(Leg::is_open).and_then(|l| l.seen.first_byte);
        let begun = begun(r.decode).max(begun(r.prefill)).map(|at| at.plus(HEAD_ONLY));
        let failed = || {
            let legs = r.legs().filter(|l| l.here).filter_map(|l| Some((l.over()?, l.seen.ended?.1)));
            legs.filter(|((_, outcome), _)| *outcome != Outcome::Success).map(|((at, _), how)| (at, how))
        };
        let last = failed().map(|(at, _)| at).max();
        let again =
            room.links.iter().filter_map(|l| l.received).max().filter(|at| last.is_some_and(|f| *at > f));
        // One that has sent ABORT has noticed.
        let unnoticed = failed().filter(|(_, how)| room.abort.is_none() && *how == LegEnd::ClientHungUp);
        let unnoticed = unnoticed.map(|(at, _)| at.plus(NOTICE)).max();
        let rejoined = last.max(again).max(unnoticed).map(|at| at.plus(REJOIN));
        let until = [begun, rejoined].into_iter().flatten().max()?;
        (now < until && self.rooms.len() < self.config.max_rooms / 2).then_some(until)
    }

    /// Takes an engine's own numbers.
    pub(crate) fn requests_gauged(&mut self, at: Mono, gauges: &EngineGauges) {
        let engine = self.engines.of_server(gauges.server);
        if let Some(e) = self.engines.get_mut(engine) {
            e.gauged(at, gauges);
        }
        // What it says may be what their verdicts waited for.
        let unsure = |slot: &u32| {
            let room = self.rooms.get(*slot)?;
            let possible = room.judgement.as_deref()?.confidence == Confidence::Possible;
            (possible && self.engines_of(room).contains(&Some(engine))).then_some(*slot)
        };
        let unsure: SmallVec<[u32; 8]> = self.pinned.iter().take(MAX_LOOKS).filter_map(unsure).collect();
        for slot in unsure {
            self.wheel.set(slot, at, at);
        }
    }

    /// Requests on a connection that cannot be read pass unseen.
    pub(crate) fn requests_unreadable(&mut self, c: &Connection) {
        let engines = &mut self.engines;
        let own = match engines.known(c.addresses.local, c.netns) {
            Some(id) => id,
            None => match c.task.and_then(|t| engines.of_process(t.tgid)) {
                Some(id) => id,
                None => return,
            },
        };
        if let Some(e) = self.engines.get_mut(own) {
            // For as long as the connection lives, and others like it will come.
            e.out_of_sight(Mono(0), Mono(u64::MAX));
        }
    }
}
