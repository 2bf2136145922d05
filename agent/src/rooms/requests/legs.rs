//! The request behind a room: one leg per engine that got it.
//!
//! Pure data and arithmetic on it; part of the state file's format ([`crate::rooms::saved`]).

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::event::{Mono, SocketId};
use crate::http::event as web;
use crate::rooms::engines::EngineId;
use crate::rooms::model::{LegEnd, LegView, Outcome, RequestView, Role};

/// Requests with one room beside the first at most.
const MAX_OTHERS: usize = 8;

/// Names one request: the end of its connection that reports, and its number there.
pub(crate) type RequestKey = (SocketId, u64);

/// A request at one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub(crate) struct Leg {
    pub(crate) seen: LegView,
    /// Who reports it.
    pub(crate) key: RequestKey,
    pub(crate) client: SocketAddr,
    pub(crate) server: SocketAddr,
    /// The engine is on this host.
    pub(crate) here: bool,
    /// A decode rank sent it: the room goes on after a retraction.
    pub(crate) by_decode: bool,
    /// Network namespace of the end that reports.
    #[serde(default)]
    pub(crate) netns: u32,
    /// The request is for this room alone.
    #[serde(default)]
    pub(crate) alone: bool,
    /// Every room of the request was named.
    #[serde(default = "yes")]
    pub(crate) all: bool,
    /// It may have more than those that it was seen to name, of the numbers that follow.
    #[serde(default)]
    pub(crate) maybe_more: bool,
    #[serde(skip, default = "nobody")]
    pub(crate) engine: EngineId,
}

const fn yes() -> bool {
    true
}

const fn nobody() -> EngineId {
    crate::rooms::peers::NONE
}

impl Leg {
    /// Begun, in sight, and not over.
    pub(crate) const fn is_open(&self) -> bool {
        self.seen.ended.is_none() && !self.seen.out_of_sight
    }

    /// Begun, and neither refused nor given up: it may have had the room's KV cache handed over.
    fn counts(&self) -> bool {
        self.over().is_none_or(|(_, outcome)| outcome == Outcome::Success)
    }

    /// When it was over, and what that says of the room.
    pub(crate) fn over(&self) -> Option<(Mono, Outcome)> {
        let (at, how) = self.seen.ended?;
        let refused = self.seen.status.is_some_and(|s| s >= 400);
        let outcome = match how {
            LegEnd::Finished | LegEnd::Answered if !refused => Outcome::Success,
            LegEnd::HungUp => Outcome::Unknown,
            _ => Outcome::Failed,
        };
        Some((at, outcome))
    }
}

/// What an answer means for its leg.
pub(crate) fn answered(status: Option<u16>, how: web::AnswerEnd, outcome: web::Outcome) -> LegEnd {
    match outcome {
        _ if status.is_some_and(|s| s >= 400) => LegEnd::Error,
        web::Outcome::Finished => LegEnd::Finished,
        web::Outcome::Aborted => LegEnd::Aborted,
        web::Outcome::Error => LegEnd::Error,
        // The connection ended: so did the request, but not visibly by an answer.
        web::Outcome::Unknown if how == web::AnswerEnd::Unseen => LegEnd::HungUp,
        web::Outcome::Unknown => LegEnd::Answered,
    }
}

/// The request behind a room, as far as it was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RoomRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) rid: Option<Box<str>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) prefill: Option<Leg>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) decode: Option<Leg>,
    /// At an engine whose role is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unplaced: Option<Leg>,
    /// At another engine whose role is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) unplaced_too: Option<Leg>,
    /// A second request with this room came to the same engine while the first was open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) duplicate: Option<Mono>,
    /// Such a second one was refused or given up, with its status.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) refused: Option<(Mono, Option<u16>)>,
    /// Requests beside the one that has the place of their part, as far as they count. A leg is of one request: what becomes of
    /// another says nothing of it. Those of before a restart are not known.
    #[serde(skip)]
    pub(crate) others: SmallVec<[(Option<Role>, Leg); 1]>,
    /// DP rank of prefill that registered for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) dp_rank: Option<u32>,
}

impl RoomRequest {
    pub(crate) const fn leg(&self, role: Role) -> Option<&Leg> {
        match role {
            Role::Prefill => self.prefill.as_ref(),
            Role::Decode => self.decode.as_ref(),
        }
    }

    /// The part that `engine` plays in the room, if another engine is known to play one.
    pub(crate) fn beside(&self, engine: EngineId) -> Option<Role> {
        let other = |leg: &Option<Leg>| leg.is_some_and(|l| l.engine != engine && l.engine != nobody());
        match (other(&self.prefill), other(&self.decode)) {
            (true, false) => Some(Role::Decode),
            (false, true) => Some(Role::Prefill),
            _ => None,
        }
    }

    /// Where a leg at an engine with this role is kept.
    pub(crate) const fn place(&mut self, role: Role) -> &mut Option<Leg> {
        match role {
            Role::Prefill => &mut self.prefill,
            Role::Decode => &mut self.decode,
        }
    }

    /// Where a leg at an engine of unknown role is kept. `None`: two other engines of unknown role have the room already,
    /// and a room has no more than two.
    pub(crate) fn place_of_unknown(
        &mut self,
        engine: EngineId,
        server: SocketAddr,
    ) -> Option<&mut Option<Leg>> {
        let same = |l: &Leg| l.server == server || (l.engine == engine && engine != nobody());
        match (&self.unplaced, &self.unplaced_too) {
            (Some(l), _) if same(l) => Some(&mut self.unplaced),
            (_, Some(l)) if same(l) => Some(&mut self.unplaced_too),
            (None, _) => Some(&mut self.unplaced),
            (_, None) => Some(&mut self.unplaced_too),
            _ => None,
        }
    }

    /// Those at engines of unknown role.
    pub(crate) fn unplaced(&self) -> impl Iterator<Item = &Leg> {
        [&self.unplaced, &self.unplaced_too].into_iter().flatten()
    }

    pub(crate) fn legs(&self) -> impl Iterator<Item = &Leg> {
        [&self.prefill, &self.decode, &self.unplaced, &self.unplaced_too].into_iter().flatten()
    }

    fn places_mut(&mut self) -> [&mut Option<Leg>; 4] {
        [&mut self.prefill, &mut self.decode, &mut self.unplaced, &mut self.unplaced_too]
    }

    pub(crate) fn legs_mut(&mut self) -> impl Iterator<Item = &mut Leg> {
        self.places_mut().into_iter().flatten()
    }

    /// Takes out the leg that `is_it`.
    pub(crate) fn take_leg(&mut self, is_it: impl Fn(&Leg) -> bool) -> Option<Leg> {
        self.places_mut().into_iter().find(|l| l.as_ref().is_some_and(&is_it)).and_then(Option::take)
    }

    /// Those that have a place, and those beside them.
    pub(crate) fn every(&self) -> impl Iterator<Item = &Leg> {
        self.legs().chain(self.others.iter().map(|(_, leg)| leg))
    }

    /// The leg of a request.
    pub(crate) fn of_key(&mut self, key: RequestKey) -> Option<&mut Leg> {
        let Self { prefill, decode, unplaced, unplaced_too, others, .. } = self;
        let placed = [prefill, decode, unplaced, unplaced_too].into_iter().flatten();
        placed.chain(others.iter_mut().map(|(_, leg)| leg)).find(|l| l.key == key)
    }

    /// Keeps a request beside the one that has its place; whether there was space.
    pub(crate) fn keep_beside(&mut self, role: Option<Role>, leg: Leg) -> bool {
        let space = self.others.len() < MAX_OTHERS;
        if space {
            self.others.push((role, leg));
        }
        space
    }

    /// Takes out the other that `is_it`.
    pub(crate) fn take_other(&mut self, is_it: impl Fn(&Leg) -> bool) -> Option<Leg> {
        let i = self.others.iter().position(|(_, l)| is_it(l))?;
        Some(self.others.remove(i).1)
    }

    /// Since when there is a duplicate that counts.
    pub(crate) fn duplicate(&self) -> Option<Mono> {
        self.duplicate.filter(|_| !self.others.is_empty())
    }

    /// Ends a request. Where others ask for the same, one that is open goes on in its place, else one that was served.
    pub(crate) fn end(&mut self, key: RequestKey, at: Mono, how: LegEnd, status: Option<u16>) {
        let Some(leg) = self.of_key(key).filter(|l| l.is_open()) else { return };
        leg.seen.ended = Some((at, how));
        leg.seen.status = status;
        if !leg.counts() && !self.others.is_empty() {
            self.refused = Some((at, status));
        }
        let Self { prefill, decode, unplaced, unplaced_too, others, .. } = self;
        let parts = [Some(Role::Prefill), Some(Role::Decode), None, None];
        for (part, place) in parts.into_iter().zip([prefill, decode, unplaced, unplaced_too]) {
            let Some(leg) = place.as_mut().filter(|l| l.key == key) else { continue };
            let beside =
                |o: &(Option<Role>, Leg)| (part.is_some() && o.0 == part) || o.1.server == leg.server;
            let open = others.iter().position(|o| beside(o) && o.1.is_open());
            let served = || others.iter().position(|o| beside(o) && o.1.counts());
            let next = open.or_else(|| if leg.counts() { None } else { served() });
            if let Some((_, other)) = next.and_then(|i| others.get_mut(i)) {
                std::mem::swap(leg, other);
            }
        }
        others.retain(|(_, l)| l.counts());
    }

    /// The requests that are not over.
    pub(crate) fn open_keys(&self) -> SmallVec<[RequestKey; 4]> {
        self.every().filter(|l| l.is_open()).map(|l| l.key).collect()
    }

    /// Whether the leg at `role` is open, at an engine of this host. Prefill says nothing before it has done with a room (SGLang's
    /// `disaggregation/prefill.py`, `process_disagg_prefill_inflight_queue`), and the end of a long answer may pass unseen: once
    /// its body has begun nothing shows that it holds the room still.
    pub(crate) fn holds(&self, role: Role) -> bool {
        let answers = |l: &Leg| role == Role::Prefill && l.seen.first_byte.is_some();
        self.leg(role).is_some_and(|l| l.here && l.is_open() && !answers(l))
    }

    /// As it is shown.
    pub(crate) fn view(&self) -> RequestView {
        RequestView {
            rid: self.rid.clone(),
            prefill: self.prefill.map(|l| l.seen),
            decode: self.decode.map(|l| l.seen),
            unplaced: self.unplaced.map(|l| l.seen),
            unplaced_too: self.unplaced_too.map(|l| l.seen),
        }
    }
}
