//! Decides what a room amounts to: still under way, ended, overdue, pinned.
//!
//! Pure. [`RoomTable::settle`] runs after every message and costs a walk over the room's links;
//! [`RoomTable::assess`] runs when something is due and may collect facts and judge.

use std::sync::Arc;

use crate::event::{Mono, SECOND};
use crate::rooms::gpus::turns;
use crate::rooms::messages::heard;
use crate::rooms::model::{Completeness, Event, Outcome, Phase, Role};
use crate::rooms::peers::Heard;
use crate::rooms::room::{Delivery, Link, Progress, Room};
use crate::rooms::table::{RoomTable, does_not_age};
use crate::sglang::message::{KvPoll, Release};
use crate::verdict::judge::{
    ABORT_RELEASE, AbortEffect, BOOTSTRAP_TIMER, HEARTBEAT, Judgement, abort_effect, bootstrap_applies, judge,
};
use crate::verdict::model::Class;

/// How often a queued room is looked at again: it is to be found within a second of leaving the queue.
const AGAIN_QUEUED: u64 = SECOND;
/// How often a pinned room is looked at again.
const AGAIN_PINNED: u64 = SECOND;
/// How long the other view may take to hear that this one has ended, before the room is judged anew.
const SOON: u64 = SECOND / 5;
/// How often a room is looked at again of which nothing can be said.
const AGAIN_UNKNOWN: u64 = 30 * SECOND;

/// What follows from the views.
enum End {
    /// Not over.
    Open,
    /// Over if nothing is heard against it until then.
    Hold(Mono),
    /// Over.
    Closed(Outcome),
}

impl RoomTable {
    /// After a message: counts phases, notices the end and progress, sets the next deadline.
    pub(crate) fn settle(&mut self, slot: u32, at: Mono, out: &mut Vec<Event>) {
        self.place_requests(slot, at);
        self.note_taken_in(slot, at);
        let Some(room) = self.rooms.get(slot) else { return };
        let views = room.views();
        let moved = self.note_phases(slot, views);
        let Some(room) = self.rooms.get(slot) else { return };
        match self.end_of(room, views, at) {
            End::Closed(outcome) => return self.close_with(slot, views, outcome, at, out),
            End::Hold(until) => return self.wheel.set(slot, until, at),
            End::Open => {}
        }
        let pinned = room.pinned();
        let over = |j: &Judgement| views.get(usize::from(j.role == Role::Decode)).copied().flatten();
        if room.judgement.as_deref().and_then(over).is_some_and(|v| v.terminal.is_some()) {
            // The view that was judged has ended; the other one mostly hears of it at once.
            return self.wheel.set(slot, at.plus(SOON), at);
        }
        if moved && pinned {
            self.apply(slot, None, at, out);
        }
        if moved || !pinned {
            let due = self.rooms.get(slot).map_or(at, |r| self.first_look(r, views));
            self.wheel.set(slot, due, at);
        }
    }

    /// Counts state and phase changes; returns whether a view moved on.
    pub(crate) fn note_phases(&mut self, slot: u32, views: [Option<Progress>; 2]) -> bool {
        let mut moved = false;
        for (i, role) in [Role::Prefill, Role::Decode].into_iter().enumerate() {
            let Some(view) = views.get(i).copied().flatten() else { continue };
            let Some(room) = self.rooms.get_mut(slot) else { continue };
            // What is over here is not open, whatever the other view waits for; one that its engine still holds is.
            let held = role == Role::Prefill && room.held_by_request(role);
            let state = (view.terminal.is_none() || held).then_some(view.state);
            let counted = room.counted.get_mut(i).and_then(|c| std::mem::replace(c, state));
            let turns = turns(room, role, &view);
            let new = (view.phase, view.since);
            let old = room.phases.get_mut(i).map_or(new, |p| std::mem::replace(p, new));
            let link = room.links.first();
            let (pair, pages) = link.map_or((u32::MAX, 0), |l| (l.pair, u64::from(l.pages)));
            if turns {
                self.note_move(slot, role, view);
            }
            if counted != state {
                for (state, more) in [(counted, false), (state, true)] {
                    if let Some(state) = state {
                        self.count_state(role, state, more);
                    }
                }
            }
            if old.0 == view.phase {
                continue;
            }
            let nanos = view.since.since(old.1);
            if counted.is_some() || old.0 == Phase::Done || view.phase == Phase::Done {
                // A phase that an ABORT or a failure cut short does not say how long it takes.
                let whole = view.phase != Phase::Abort && view.terminal != Some(Outcome::Failed);
                let ran = self.rooms.get(slot).is_some_and(|r| !self.ever_stopped(r));
                if ran
                    && (whole || old.0 == Phase::Abort)
                    && let Some(p) = self.peers.pair_mut(pair)
                {
                    p.durations.observe(old.0, pages, nanos);
                }
                moved |= !matches!(view.phase, Phase::Abort | Phase::Done);
            }
        }
        moved
    }

    fn end_of(&self, room: &Room, views: [Option<Progress>; 2], now: Mono) -> End {
        let mut outcome = Outcome::Success;
        for view in views.iter().flatten() {
            match view.terminal {
                None => return End::Open,
                Some(Outcome::Failed) => outcome = Outcome::Failed,
                Some(Outcome::Unknown) if outcome == Outcome::Success => outcome = Outcome::Unknown,
                Some(_) => {}
            }
        }
        if views.iter().all(Option::is_none) || room.held_by_request(Role::Prefill) {
            return End::Open;
        }
        if let Some(until) = self.may_go_on(room, now) {
            return End::Hold(until);
        }
        let [prefill, decode] = views;
        if prefill.is_none()
            && let Some(a) = room.abort
            && decode.is_some_and(|d| d.state == KvPoll::Failed)
            && !room.links.iter().any(|l| l.heard.is_some_and(|h| h.status == KvPoll::Failed))
            && (a.acknowledged.is_none() || a.before_metadata)
        {
            // Decode has given up and is done; whether prefill knows is not seen here.
            return End::Open;
        }
        if outcome == Outcome::Success && decode.is_none() {
            return self.delivery(room, now);
        }
        End::Closed(outcome)
    }

    /// A STATUS that nobody has seen arriving: over once it is acknowledged, or once a while has passed in
    /// which nothing spoke against it.
    fn delivery(&self, room: &Room, now: Mono) -> End {
        let mut hold = self.still_to_leave(room).filter(|until| now < *until);
        for l in &room.links {
            let Some(told) = l.told.filter(|_| l.status_delivery == Delivery::Unknown) else { continue };
            let on = l.status_on.and_then(|s| self.connections.get(self.connections.find(s)));
            if on.is_some_and(|k| k.again.is_some()) {
                return End::Open;
            }
            let una = on.and_then(|k| k.una);
            if una.is_some_and(|(_, read)| read.since(told.at) >= self.config.delivery_grace / 4) {
                return End::Open; // Looked at since, and still not acknowledged.
            }
            let until = told.at.plus(self.config.delivery_grace);
            if now < until {
                hold = Some(hold.map_or(until, |h: Mono| h.max(until)));
            }
        }
        match hold {
            Some(until) if self.rooms.len() < self.config.max_rooms / 2 => End::Hold(until),
            _ => End::Closed(Outcome::Success),
        }
    }

    /// Until when a STATUS may still leave of a room whose request prefill has answered: it may answer just before (see
    /// `note_unsent`).
    fn still_to_leave(&self, room: &Room) -> Option<Mono> {
        let (at, _) = room.prefill_answered()?;
        let untold = |l: &Link| {
            l.dummy == Some(false) && l.received.is_some() && l.told.is_none() && l.heard.is_none()
        };
        let waits = room.links.iter().any(untold) && room.abort.is_none() && self.says_success(room);
        waits.then(|| at.plus(self.config.delivery_grace))
    }

    /// When the room has to be looked at first.
    fn first_look(&self, room: &Room, views: [Option<Progress>; 2]) -> Mono {
        let floor = self.config.floor;
        let open = views.iter().flatten().filter(|v| v.terminal.is_none()).map(|v| v.since.plus(floor));
        let held = views.first().copied().flatten().filter(|_| room.held_by_request(Role::Prefill));
        let over = || held.map_or_else(|| room.abort.map_or(room.opened_at, |a| a.at), |v| v.since);
        open.min().unwrap_or_else(|| over().plus(floor))
    }

    /// Looks at a room because something is due.
    pub(crate) fn assess(&mut self, slot: u32, now: Mono, out: &mut Vec<Event>) {
        self.notice_gone(slot);
        self.forget_unsent(slot);
        let Some(room) = self.rooms.get(slot) else { return };
        let views = room.views();
        self.note_phases(slot, views);
        let Some(room) = self.rooms.get(slot) else { return };
        match self.end_of(room, views, now) {
            End::Closed(outcome) => return self.close_with(slot, views, outcome, now, out),
            End::Hold(until) => return self.wheel.set(slot, until, now),
            End::Open => {}
        }
        if self.close_unseen(slot, now, out) {
            return;
        }
        let Some(room) = self.rooms.get(slot) else { return };
        if let Some(until) = self.quiet_abort(room) {
            if now >= until {
                return self.close_room(slot, Outcome::Failed, now, out);
            }
            // What was pinned before must not outlive its process meanwhile.
            let soon = if room.pinned() { now.plus(AGAIN_PINNED) } else { until };
            return self.wheel.set(slot, until.min(soon), now);
        }
        let (judgement, due) = self.judge_views(room, views, now);
        let judgement = judgement.map(|new| keep_cause(room, new));
        let lossy = self.is_lossy(room);
        if let Some(room) = self.rooms.get_mut(slot)
            && lossy
        {
            room.completeness = Completeness::Lossy;
        }
        let class = judgement.as_ref().map(|j| j.class);
        self.apply(slot, judgement, now, out);
        self.tell_thread(slot, now);
        // What it is called now may have ended long since.
        if self.close_unseen(slot, now, out) {
            return;
        }
        let again = now.plus(class.map_or(AGAIN_UNKNOWN, |c| self.again(c)));
        let next = due.map_or(again, |d| d.min(again));
        self.wheel.set(slot, next, now);
        if class.is_some_and(does_not_age) {
            self.make_expendable(slot);
        }
    }

    /// Closes a room that has ended where nothing can be seen of it; whether it did.
    fn close_unseen(&mut self, slot: u32, now: Mono, out: &mut Vec<Event>) -> bool {
        let Some(room) = self.rooms.get(slot) else { return false };
        let Some(outcome) = self.over_unseen(room, now) else { return false };
        self.note_outlived(slot, tells_abort(room), now);
        self.close_room(slot, outcome, now, out);
        true
    }

    /// With very many rooms each is looked at more rarely, so that the work per second stays bounded.
    fn again(&self, class: Class) -> u64 {
        let base = match class {
            Class::Queued | Class::Paused => AGAIN_QUEUED,
            c if c.pins() => AGAIN_PINNED,
            _ => AGAIN_UNKNOWN,
        };
        base.saturating_mul(1 + self.rooms.len() as u64 / 16_384)
    }

    fn make_expendable(&mut self, slot: u32) {
        let Some(room) = self.rooms.get_mut(slot) else { return };
        if !std::mem::replace(&mut room.expendable, true) {
            let generation = room.generation;
            self.expendable.push_back((slot, generation));
        }
    }

    /// Judges the views that are not over; the strongest verdict counts, prefill's on a tie. Without one:
    /// when the next can be due.
    fn judge_views(
        &self,
        room: &Room,
        views: [Option<Progress>; 2],
        now: Mono,
    ) -> (Option<Judgement>, Option<Mono>) {
        let mut best: Option<Judgement> = None;
        let mut due: Option<Mono> = None;
        for (role, view) in [Role::Prefill, Role::Decode].into_iter().zip(views) {
            let Some(view) = view else { continue };
            let Some(facts) = self.facts(room, role, view, now) else { continue };
            if let Some(j) = judge(&facts) {
                let rank = |j: &Judgement| (j.class.pins(), j.confidence);
                // Prefill, seen here, queues or computes: that decode waits for it says nothing more.
                let told = |b: &Judgement| b.class == Class::Queued && j.class == Class::AwaitingPrefill;
                if best.as_ref().is_none_or(|b| rank(&j) > rank(b) && !told(b)) {
                    best = Some(j);
                }
            } else {
                let at = facts.since.plus(facts.threshold).plus(facts.request.stood);
                // What does not wait for time is looked at again.
                let at = if at > now { at } else { now.plus(AGAIN_QUEUED) };
                due = Some(due.map_or(at, |d| d.min(at)));
            }
        }
        (best, due)
    }

    /// Takes a verdict over, and tells it if others must hear of it.
    pub(crate) fn apply(&mut self, slot: u32, judgement: Option<Judgement>, now: Mono, out: &mut Vec<Event>) {
        let Some(room) = self.rooms.get_mut(slot) else { return };
        let old = room.judgement.take();
        let was = old.as_ref().is_some_and(|j| j.class.pins());
        let new = judgement.map(|mut j| {
            if let Some(o) = old.as_ref().filter(|o| o.class == j.class) {
                j.since = o.since;
            }
            j
        });
        let is = new.as_ref().is_some_and(|j| j.class.pins());
        let unknown = |j: Option<&Judgement>| j.is_some_and(|j| j.class == Class::Unknown);
        // Overdue, and nothing can be said: that is told once.
        let puzzling = unknown(new.as_ref()) && !unknown(old.as_deref());
        let changed = match (&new, &old) {
            (Some(n), Some(o)) => n.differs(o),
            _ => true,
        };
        let held = old.as_ref().and_then(|j| j.cause()).map(|(group, _, confidence)| (group, confidence));
        let holds = new.as_ref().and_then(Judgement::cause);
        let role = new.as_ref().map(|j| j.role);
        room.judgement = new.map(Box::new);
        room.was_pinned |= is;
        self.regroup(slot, held, holds, now);
        if let (false, Some((_, class, _)), Some(role)) = (was, holds, role) {
            self.tally.pin(role, class);
        }
        let Some(room) = self.rooms.get(slot) else { return };
        match (was, is) {
            (false, true) => out.push(Event::Pinned(Arc::new(self.snapshot_of(room, now)))),
            (true, true) if changed => out.push(Event::VerdictChanged(Arc::new(self.snapshot_of(room, now)))),
            // Only certainty was lost: the room may hang as before.
            (true, false) if unknown(room.judgement.as_deref()) => {
                out.push(Event::VerdictChanged(Arc::new(self.snapshot_of(room, now))));
            }
            (true, false) => out.push(Event::Recovered(Arc::new(self.snapshot_of(room, now)))),
            (false, false) if puzzling => {
                out.push(Event::VerdictChanged(Arc::new(self.snapshot_of(room, now))));
            }
            _ => {}
        }
    }

    pub(crate) fn is_lossy(&self, room: &Room) -> bool {
        // Judged with all seen: what comes after an ABORT without METADATA ends nothing, for nobody says more of such a room
        // (one without a generation is never acknowledged either).
        if room.links.is_empty()
            && room.abort.is_some_and(|a| !a.generation)
            && room.judgement.as_ref().is_some_and(|j| j.class == Class::AbortBeforeEntry)
        {
            return false;
        }
        let (prefill, decode) = room.home;
        let since = room.opened_at;
        // Decode opens a room; what opens one as prefill's leaves `prefill` unnamed.
        let said = room.computed_at.is_some()
            || room.abort.is_some_and(|a| a.acknowledged.is_some())
            || room.links.iter().any(|l| (l.prefill, l.decode) == room.home && heard(l).prefill);
        let home = Heard { prefill: said, decode: true };
        self.peers.lossy_since(prefill, decode, home, since)
            || room.links.iter().any(|l| self.peers.lossy_since(l.prefill, l.decode, heard(l), since))
            || self.awaited_is_lossy(room)
    }

    /// Whether METADATA that a prefill rank still waits for may have come in bytes that were missed.
    fn awaited_is_lossy(&self, room: &Room) -> bool {
        let asked = |prefill| room.links.iter().filter(move |l| l.prefill == prefill);
        room.links.iter().any(|l| {
            let missing = (l.required as usize).saturating_sub(asked(l.prefill).count());
            let loss = self.peers.get(l.prefill).and_then(|e| e.missed);
            if missing == 0 || loss.is_none_or(|at| at < room.opened_at) {
                return false;
            }
            let registered = self.peers.prefill(l.prefill).map_or(&[][..], |p| &p.registered);
            let Some(asker) = registered.iter().find(|r| r.session == l.session) else { return true };
            let absent: Vec<_> = registered
                .iter()
                .filter(|r| r.tp_size == asker.tp_size && asked(l.prefill).all(|l| l.session != r.session))
                .collect();
            // A rank that has not introduced itself can be at any address.
            absent.len() < missing
                || absent.iter().any(|r| self.peers.missed(l.prefill, r.decode, true, room.opened_at))
        })
    }

    /// An ABORT that found an entry, or a tombstone (`prefill_complete`), needs no answer: the room is over
    /// when decode's pages are free at the latest. Returns when.
    fn quiet_abort(&self, room: &Room) -> Option<Mono> {
        let a = room.abort?;
        if self.stuck(a.on) || lost_on_the_way(a.delivery) || room.held_by_request(Role::Prefill) {
            return None;
        }
        let prefill = room.links.first().map_or(room.home.0, |l| l.prefill);
        let tombstone =
            room.bootstrap_at.is_some() || self.peers.prefill(prefill).is_some_and(|p| p.prefill_complete);
        let dummies = !room.links.is_empty() && room.links.iter().all(|l| !l.owes());
        let effect = abort_effect(room.backend, room.releases);
        // Dropped: prefill goes on (its view stays open); decode alone is done.
        let entry = !a.before_metadata
            && match effect {
                AbortEffect::Fails => room.complete(),
                AbortEffect::Dropped | AbortEffect::MayBeDropped => !room.has_prefill,
                AbortEffect::MayVanish => false,
            };
        (tombstone || dummies || entry).then(|| a.at.plus(ABORT_RELEASE))
    }

    /// Rooms that end where nothing can be seen of it are not followed for ever.
    fn over_unseen(&self, room: &Room, now: Mono) -> Option<Outcome> {
        let c = &self.config;
        let last_asked = room.links.iter().map(Link::asked_at).max().unwrap_or(room.opened_at);
        if now.since(room.opened_at) >= c.forget_after {
            return Some(Outcome::Unknown);
        }
        // Its end will be seen.
        let waits = |role| room.held_by_request(role) && room.progress(role).terminal.is_none();
        if room.held_by_request(Role::Prefill) || waits(Role::Decode) {
            return None;
        }
        let class = room.judgement.as_ref()?.class;
        let after = |from: Mono, timeout: u64| now.since(from) >= timeout.saturating_add(c.margin);
        let timer = bootstrap_applies(room.backend, room.releases);
        let over = match class {
            Class::Unknown
            | Class::NotApplicable
            | Class::CompletionNotObservable
            | Class::StatusLost
            | Class::StaleEndpoint => after(last_asked, c.waiting_timeout.max(c.bootstrap_timeout)),
            Class::AbortBeforeEntry => {
                let from = room.abort.map_or(last_asked, |a| a.at);
                room.judgement.as_ref().is_some_and(|j| j.ends.is_some()) && after(from, c.bootstrap_timeout)
            }
            // Decode's scheduler lives and gives up.
            Class::ReceiverSilent if room.links.iter().any(|l| l.deaf) => {
                after(last_asked, c.waiting_timeout)
            }
            // Prefill's scheduler lives and fails what it has not heard of again.
            Class::ReceiverSilent => {
                let ends = room.judgement.as_ref().and_then(|j| j.ends.as_ref());
                ends.is_some_and(|e| e.timer == BOOTSTRAP_TIMER && after(e.at, 0))
            }
            Class::MetadataIncomplete => timer && after(last_asked, c.bootstrap_timeout),
            Class::MetadataMissing => {
                timer && after(room.computed_at.unwrap_or(last_asked), c.bootstrap_timeout)
            }
            Class::PeerLost if room.has_decode && !room.has_prefill => {
                room.judgement.as_ref().and_then(|j| j.ends.as_ref()).is_some_and(|e| after(e.at, HEARTBEAT))
            }
            // Decode gives up in silence where it cannot send ABORT (before 0.5.13).
            Class::AwaitingPrefill
            | Class::RanksDisagree
            | Class::PeerNotTold
            | Class::StagingReplyMissing
                if !room.has_prefill =>
            {
                !tells_abort(room) && after(last_asked, c.waiting_timeout)
            }
            _ => false,
        };
        over.then_some(Outcome::Unknown)
    }
}

/// A pin keeps its cause when prefill's process goes: what decode's view alone says then is less, not something else.
fn keep_cause(room: &Room, new: Judgement) -> Judgement {
    match room.judgement.as_deref() {
        Some(old) if room.prefill_gone && old.class.pins() && says_less(old, &new) => {
            Judgement { role: new.role, ends: new.ends, ..old.clone() }
        }
        _ => new,
    }
}

/// Whether what is said once prefill's process is gone is only that.
fn says_less(old: &Judgement, new: &Judgement) -> bool {
    let own = new.class == Class::PeerLost && new.role == Role::Prefill && old.since < new.since;
    new.class == Class::AwaitingPrefill || own
}

/// Whether a message was lost although its receiver may live: the network gave up on it, not the peer's kernel.
pub(crate) const fn lost_on_the_way(delivery: Delivery) -> bool {
    // ENETUNREACH, ETIMEDOUT, EHOSTUNREACH (Linux, `include/uapi/asm-generic/errno.h`).
    matches!(delivery, Delivery::Lost { error: 101 | 110 | 113, .. })
}

/// Whether decode sends ABORT when it gives up (from 0.5.13).
fn tells_abort(room: &Room) -> bool {
    room.releases.is_some_and(|r| r.min >= Release::new(0, 5, 13, 0))
}
