//! What the engines' schedulers say of a room, by their own spans.
//!
//! Pure: no I/O, no clock (time is an argument). A request whose spans name a room is joined to that life of the number in
//! which the request was under way; of a closed room as long as its details are kept. Bounded as [`Joiner`] is, and at most
//! [`MAX_REQUESTS`] requests a room.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::event::{Mono, SECOND};
use crate::rooms::model::{Completeness, Event, Role};
use crate::rooms::room::Room;
use crate::rooms::table::RoomTable;
use crate::spans::{CLOCKS, EngineRequest, JoinCounters, Joined, Joiner, SchedulerSpan};
use crate::verdict::facts::SpanFacts;

/// Requests kept of one room: two roles, once more after a retraction.
const MAX_REQUESTS: usize = 4;

/// Rooms whose spans wait to be told to the outputs at most.
const MAX_UNTOLD: usize = 16_384;

/// A request that the agent has not seen begins at most this long before the first sign of its room. SGLang gives up one whose
/// other side does not come for 300 s (`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`); nobody waits for an hour.
const EARLY: u64 = 3600 * SECOND;

/// See [`Scheduled::told`].
const SETTLED: u64 = crate::spans::SETTLED;

/// What schedulers said of one room. Part of the state file's format.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Scheduled {
    pub(crate) requests: Vec<EngineRequest>,
    /// The outputs have it, or will: of a room that has closed it is told apart, once the last spans must have come.
    told: bool,
}

/// Traces that wait for their room, and rooms that wait to be told.
#[derive(Debug, Default)]
pub(crate) struct Spans {
    joiner: Joiner,
    joined: Vec<Joined>,
    /// By the number under which the closed room is kept.
    untold: VecDeque<(Mono, u64)>,
    not_told: u64,
}

impl RoomTable {
    /// Spans have come.
    pub(crate) fn spans_came(&mut self, at: Mono, offset: i64, spans: &[SchedulerSpan]) {
        let mut joined = std::mem::take(&mut self.spans.joined);
        self.spans.joiner.take(at, offset, spans, &mut joined);
        for Joined { room, request, first } in joined.drain(..) {
            let known = self.join_spans(at, room, request);
            let c = &mut self.spans.joiner.counters;
            match known {
                Some(true) => c.joined += 1,
                Some(false) => {}
                None => c.unmatched += u64::from(first),
            }
        }
        self.spans.joined = joined;
    }

    /// Whether it is new of a room that is known.
    fn join_spans(&mut self, at: Mono, number: u64, request: EngineRequest) -> Option<bool> {
        if let Some(room) = self.numbers.open(number).and_then(|slot| self.rooms.get_mut(slot)) {
            return lived_with(room, &request).then(|| note(at, room, request).0);
        }
        let kept = self.numbers.tomb(number)?.kept;
        let room = self.closed.get_mut(kept).filter(|r| r.room == number && lived_with(r, &request))?;
        let (new, tell) = note(at, room, request);
        if tell {
            if self.spans.untold.len() < MAX_UNTOLD {
                self.spans.untold.push_back((at.plus(SETTLED), kept));
            } else {
                self.spans.not_told += 1;
            }
        }
        Some(new)
    }

    /// A room has closed: what schedulers said while it was open is told once more of it may come.
    pub(crate) fn spans_of_closed(&mut self, at: Mono, kept: u64) {
        let scheduled = self.closed.get_mut(kept).and_then(|r| r.scheduled.as_mut());
        if scheduled.is_some_and(|s| !std::mem::replace(&mut s.told, true))
            && self.spans.untold.len() < MAX_UNTOLD
        {
            self.spans.untold.push_back((at.plus(SETTLED), kept));
        }
    }

    /// Tells what has settled.
    pub(crate) fn tick_spans(&mut self, now: Mono, out: &mut Vec<Event>) {
        self.spans.joiner.tick(now);
        while let Some((_, kept)) = self.spans.untold.front().copied().filter(|(due, _)| *due <= now) {
            self.spans.untold.pop_front();
            let Some(room) = self.closed.get_mut(kept) else { continue };
            if let Some(scheduled) = &mut room.scheduled {
                // What comes later is told again.
                scheduled.told = false;
            }
            if let Some(room) = self.closed.get(kept) {
                let closed_at = room.closed.map_or(now, |(at, _)| at);
                out.push(Event::Scheduled(Arc::new(self.snapshot_of(room, closed_at))));
            }
        }
    }

    /// Counts of spans.
    pub fn span_counters(&self) -> JoinCounters {
        self.spans.joiner.counters
    }

    /// Closed rooms whose spans were not handed to the outputs: too many waited.
    pub const fn spans_not_told(&self) -> u64 {
        self.spans.not_told
    }
}

/// Whether the request was under way in this life of the number. One that does not tell when it was is taken for the last life's.
fn lived_with(room: &Room, request: &EngineRequest) -> bool {
    let ended = room.closed.map_or(Mono(u64::MAX), |(at, _)| at);
    request.untimed || request.end.plus(CLOCKS) >= room.opened_at && request.begin <= ended.plus(CLOCKS)
}

/// Before this nothing of the room's request can have begun.
fn earliest(room: &Room, role: Option<Role>) -> Mono {
    let sure = room.request.as_deref().filter(|r| r.duplicate.is_none());
    let leg = sure.zip(role).and_then(|(r, role)| r.leg(role)).filter(|leg| !leg.by_decode);
    match leg {
        Some(leg) => Mono(leg.seen.begun.0.saturating_sub(CLOCKS)),
        None if room.completeness == Completeness::Preexisting => Mono(0),
        None => Mono(room.opened_at.0.saturating_sub(EARLY)),
    }
}

/// Takes out what says that it began before the room's request can have.
fn doubt_early(at: Mono, room: &Room, request: &mut EngineRequest) {
    let floor = earliest(room, request.role);
    let early: Vec<_> = request.stages.extract_if(.., |s| s.begin < floor).map(|s| s.name).collect();
    request.doubted.extend(early);
    if !request.untimed && request.begin < floor {
        (request.untimed, request.begin, request.end) = (true, at, at);
        request.doubted.push("request".into());
    }
    request.doubted.sort_unstable();
    request.doubted.dedup();
}

/// Whether the request is new to the room, and whether a closed room is to be told for it.
fn note(at: Mono, room: &mut Room, mut request: EngineRequest) -> (bool, bool) {
    doubt_early(at, room, &mut request);
    let closed = room.closed.is_some();
    let scheduled = room.scheduled.get_or_insert_default();
    let same = |r: &EngineRequest| (r.trace, r.span) == (request.trace, request.span);
    let known = scheduled.requests.iter().position(same);
    if known.is_none() && scheduled.requests.len() >= MAX_REQUESTS {
        return (false, false);
    }
    match known.and_then(|at| scheduled.requests.get_mut(at)) {
        Some(known) => *known = request,
        None => scheduled.requests.push(request),
    }
    let new = known.is_none();
    (new, closed && !std::mem::replace(&mut scheduled.told, closed))
}

/// What the verdict rests on: the last request of prefill, if all its times are believed.
pub(crate) fn facts(room: &Room) -> SpanFacts {
    let of_prefill = |r: &&EngineRequest| r.role == Some(Role::Prefill);
    let requests = room.scheduled.as_deref().map(|s| s.requests.as_slice()).unwrap_or_default();
    let last = requests.iter().filter(of_prefill).max_by_key(|r| r.begin);
    let Some(request) = last.filter(|r| r.doubted.is_empty()) else { return SpanFacts::default() };
    let stage = |name: &str| request.stages.iter().find(|s| &*s.name == name);
    SpanFacts {
        computed: stage("prefill_forward").filter(|s| s.held).map(|s| s.end),
        transferred: stage("prefill_transfer_kv_cache").map(|s| s.end),
    }
}
