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

/// Names one request: the end of its connection that reports, and its number there.
pub(crate) type RequestKey = (SocketId, u64);

/// A request at one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub(crate) struct Leg {
    pub(crate) seen: LegView,
    /// Who reports it. Several requests with one room at one engine share a leg: then the newest.
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
    /// Requests that are open.
    pub(crate) open: u16,
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

    /// Whether a request is this leg's, or shares it.
    pub(crate) fn is_of(&self, key: RequestKey, engine: EngineId) -> bool {
        self.key == key || (self.engine == engine && engine != nobody())
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

    /// The requests that are not over.
    pub(crate) fn open_keys(&self) -> SmallVec<[RequestKey; 4]> {
        self.legs().filter(|l| l.is_open()).map(|l| l.key).collect()
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
