//! Findings that no single room shows: ABORTs that a prefill rank leaves unanswered, and a session that it fails out of hand.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: what is awaited, the ranks measured and the failing sessions each
//! have a limit; beyond it nothing is measured, and that is counted.

use std::collections::VecDeque;

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::event::{Direction, Mono, SECOND};
use crate::rooms::estimate::Rule;
use crate::rooms::findings::{MAX_ROOMS, cause};
use crate::rooms::messages::Seen;
use crate::rooms::model::{Phase, Role};
use crate::rooms::peers::{EndpointId, Heard, NONE, PairId, SessionId};
use crate::rooms::table::RoomTable;
use crate::sglang::message::{AbortAck, Backend, KvPoll};
use crate::verdict::actions;
use crate::verdict::explain::{named, seconds};
use crate::verdict::judge::ABORT_RELEASE;
use crate::verdict::model::{Class, Confidence, Finding};

/// ABORTs awaited at a time: half a minute at more than 500/s.
const MAX_AWAITED: usize = 16_384;
/// Ranks whose answers are measured.
const MAX_RANKS: usize = 1024;
/// Outcomes kept of one rank.
const MAX_OUTCOMES: usize = 64;
/// How far back they count.
const WINDOW: u64 = 600 * SECOND;
/// As many must be unanswered, and more than were answered.
const UNANSWERED: usize = 5;

/// Sessions that fail at a time.
const MAX_STREAKS: usize = 4096;
/// As many rooms of a session must have failed in a row.
const FAILED: u32 = 3;
/// A room that fails within this of its METADATA, or within what the rooms of its pair and size mostly take, was failed
/// without any transfer: a transfer that fails takes its own timeouts.
const AT_ONCE: u64 = SECOND;

/// An ABORT whose acknowledgement is awaited, at one prefill rank.
#[derive(Clone, Copy, Debug)]
struct Pending {
    at: Mono,
    prefill: EndpointId,
    decode: EndpointId,
    here: bool,
}

/// What became of the last ABORTs sent to one prefill rank.
#[derive(Clone, Debug, Default)]
struct Outcomes {
    /// When each was sent, and whether it was answered.
    ring: VecDeque<(Mono, bool)>,
    last_room: u64,
    here: bool,
    raised: bool,
}

impl Outcomes {
    /// How many were answered and how many not, within the window.
    fn counts(&mut self, now: Mono) -> (usize, usize) {
        while self.ring.front().is_some_and(|(at, _)| now.since(*at) > WINDOW) {
            self.ring.pop_front();
        }
        let answered = self.ring.iter().filter(|(_, answered)| *answered).count();
        (answered, self.ring.len() - answered)
    }
}

/// Rooms of one session that one prefill rank has failed in a row.
#[derive(Clone, Debug)]
struct Streak {
    failed: u32,
    since: Mono,
    last: Mono,
    rooms: Vec<u64>,
    slowest: u64,
}

/// All that is measured here.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    pending: HashMap<u64, SmallVec<[Pending; 1]>>,
    order: VecDeque<(Mono, u64)>,
    ranks: HashMap<EndpointId, Outcomes>,
    streaks: HashMap<PairId, Streak>,
    /// When to look again at what time alone changes.
    due: Mono,
    /// What was not measured because a table was full.
    pub(crate) turned_away: u64,
}

/// Prefill rank's ABORTs.
fn abort_group(endpoint: &str) -> u64 {
    cause(&[Class::AbortUnanswered.label(), endpoint])
}

/// Prefill rank and session.
fn session_group(endpoint: &str, session: &str) -> u64 {
    cause(&[Class::SessionBlacklisted.label(), endpoint, session])
}

impl RoomTable {
    /// Awaits the acknowledgement of an ABORT. Only one with a generation asks for it (`common/conn.py`, 0.5.22): one without
    /// gets none where pages are released late, and its silence says nothing.
    pub(crate) fn await_acknowledgement(&mut self, seen: &Seen<'_>, room: u64, decode: EndpointId) {
        let rates = &mut self.rates;
        let (prefill, here) = (seen.target, seen.role == Role::Prefill);
        let known = rates.pending.get_mut(&room).and_then(|k| k.iter_mut().find(|p| p.prefill == prefill));
        if let Some(p) = known {
            // The other end of one that is awaited.
            p.here |= here;
            return;
        }
        if rates.order.len() >= MAX_AWAITED || prefill == NONE {
            rates.turned_away = rates.turned_away.saturating_add(1);
            return;
        }
        rates.pending.entry(room).or_default().push(Pending { at: seen.at, prefill, decode, here });
        rates.order.push_back((seen.at, room));
    }

    /// An acknowledgement came.
    pub(crate) fn note_acknowledgement(&mut self, seen: &Seen<'_>, m: AbortAck) {
        let Some(awaited) = self.rates.pending.get(&m.room) else { return };
        let origin = self.connections.get(seen.known).map_or(NONE, |k| k.origin);
        let of = |p: &Pending| self.peers.get(p.prefill);
        let sends = |p: &Pending| {
            let task = seen.connection.task.filter(|_| seen.direction == Direction::Sent);
            task.is_some() && of(p).and_then(|e| e.task).map(|t| t.tgid) == task.map(|t| t.tgid)
        };
        let numbered = |p: &Pending| m.prefill_rank.is_some() && of(p).and_then(|e| e.rank) == m.prefill_rank;
        let from = awaited
            .iter()
            .position(|p| p.prefill == origin && origin != NONE)
            .or_else(|| awaited.iter().position(sends))
            .or_else(|| awaited.iter().position(numbered))
            .or_else(|| (awaited.len() == 1).then_some(0));
        let Some(from) = from else {
            // Nothing tells which of the ranks this is: then nothing is measured of any.
            self.rates.pending.remove(&m.room);
            return;
        };
        let Some(awaited) = self.rates.pending.get_mut(&m.room) else { return };
        let answered = awaited.remove(from);
        if awaited.is_empty() {
            self.rates.pending.remove(&m.room);
        }
        self.outcome(m.room, answered, true);
    }

    /// Looks at what time alone decides: about once a second.
    pub(crate) fn rate(&mut self, now: Mono) {
        if now < self.rates.due {
            return;
        }
        self.rates.due = now.plus(SECOND);
        while let Some((at, room)) = self.rates.order.front().copied() {
            if now.since(at) < ABORT_RELEASE {
                break;
            }
            self.rates.order.pop_front();
            // An ABORT of a later life of the number has its own turn.
            let (due, later) =
                self.rates.pending.remove(&room).unwrap_or_default().into_iter().partition(|p| p.at <= at);
            if !SmallVec::is_empty(&later) {
                self.rates.pending.insert(room, later);
            }
            let due: SmallVec<[Pending; 1]> = due;
            for p in due {
                if !self.may_have_answered(&p) {
                    self.outcome(room, p, false);
                }
            }
        }
        let ranks: Vec<EndpointId> =
            self.rates.ranks.iter().filter(|(_, o)| o.raised).map(|(id, _)| *id).collect();
        for rank in ranks {
            self.weigh_aborts(rank);
        }
        let over = |s: &Streak| s.failed >= FAILED && now.since(s.last) > WINDOW;
        let over: Vec<PairId> =
            self.rates.streaks.iter().filter(|(_, s)| over(s)).map(|(id, _)| *id).collect();
        for pair in over {
            self.end_streak(pair);
        }
        self.rates.streaks.retain(|_, s| now.since(s.last) <= WINDOW);
    }

    /// Whether silence says nothing: bytes were missed, or the rank is not there any more.
    fn may_have_answered(&self, p: &Pending) -> bool {
        let gone = self.peers.get(p.prefill).is_some_and(|e| e.lost.max(e.listener_closed) >= Some(p.at));
        // Its answer can have been on a connection that nothing was read of yet.
        let heard = Heard { prefill: false, decode: true };
        gone || self.peers.lossy_since(p.prefill, p.decode, heard, p.at)
    }

    fn outcome(&mut self, room: u64, p: Pending, answered: bool) {
        if self.rates.ranks.len() >= MAX_RANKS && !self.rates.ranks.contains_key(&p.prefill) {
            self.rates.turned_away = self.rates.turned_away.saturating_add(1);
            return;
        }
        let o = self.rates.ranks.entry(p.prefill).or_default();
        o.here |= p.here;
        if !answered {
            o.last_room = room;
        }
        if o.ring.len() >= MAX_OUTCOMES {
            o.ring.pop_front();
        }
        o.ring.push_back((p.at, answered));
        self.weigh_aborts(p.prefill);
    }

    /// Raises or lowers `abort_unanswered` of a rank.
    fn weigh_aborts(&mut self, prefill: EndpointId) {
        let now = self.now;
        let Some(address) = self.peers.address(prefill) else { return };
        let Some(o) = self.rates.ranks.get_mut(&prefill) else { return };
        let (answered, unanswered) = o.counts(now);
        let group = abort_group(&address.to_string());
        if unanswered < UNANSWERED || unanswered <= answered {
            if std::mem::replace(&mut o.raised, false) {
                self.lower(group, now);
            }
            return;
        }
        o.raised = true;
        let (here, room) = (o.here, o.last_room);
        let since =
            o.ring.iter().find(|(_, answered)| !answered).map_or(now, |(at, _)| at.plus(ABORT_RELEASE));
        let engine = self.party(Role::Prefill, prefill, here);
        let heard = answered > 0
            || self
                .peers
                .prefill(prefill)
                .is_some_and(|p| p.answers.last.max(p.acknowledged_abort).is_some());
        let mut evidence = vec![
            format!(
                "{} left {unanswered} of the last {} ABORTs that ask for an answer (with a generation) without ABORT_ACK for {} s each",
                named(&engine),
                answered + unanswered,
                ABORT_RELEASE / SECOND
            ),
            format!("the last of them was for room {room}"),
            "decode holds the KV pages of each such room for those 30 s".to_owned(),
            "prefill withholds the answer on purpose where a write to decode has failed: then the writes are what is wrong"
                .to_owned(),
        ];
        evidence.push(if heard {
            "the rank has been heard to answer, so its answers can be seen".to_owned()
        } else {
            "no answer of this rank was ever seen: whether its answers can be seen is not known".to_owned()
        });
        let actions = actions::of_finding(Class::AbortUnanswered, &engine);
        self.raise(Finding {
            group,
            class: Class::AbortUnanswered,
            confidence: if heard { Confidence::Likely } else { Confidence::Possible },
            engine,
            rooms: Vec::new(),
            room_count: 0,
            since,
            closed_at: None,
            evidence,
            actions,
        });
    }

    /// A prefill rank has said how a room of a session ended: `slot`'s link number `link`.
    pub(crate) fn note_conclusion(&mut self, slot: u32, link: usize, status: KvPoll, at: Mono) {
        let Some(room) = self.rooms.get(slot) else { return };
        let Some(l) = room.links.get(link) else { return };
        let (pair, number) = (l.pair, room.room);
        if status == KvPoll::Success {
            if !self.rates.streaks.is_empty() {
                self.end_streak(pair);
            }
            return;
        }
        // Of an aborted room a failure is what was asked for; only mooncake has the list (0.4.7 and later).
        let asked = l.asked_at();
        if room.abort.is_some() || l.guessed || asked == Mono(0) || room.backend != Some(Backend::Mooncake) {
            return;
        }
        let usual = Rule { factor: 1, floor: AT_ONCE, ceiling: u64::MAX };
        let durations = self.peers.pair_of(pair).map(|p| &p.durations);
        let bound = durations.map_or(AT_ONCE, |d| d.threshold(Phase::Transfer, l.pages.into(), usual).nanos);
        let took = at.since(asked);
        if took > bound {
            // That took long enough to be a failure of its own.
            return self.end_streak(pair);
        }
        self.lengthen_streak(pair, number, took, at, room.has_prefill);
    }

    fn lengthen_streak(&mut self, pair: PairId, room: u64, took: u64, at: Mono, here: bool) {
        let streaks = &mut self.rates.streaks;
        if streaks.len() >= MAX_STREAKS && !streaks.contains_key(&pair) {
            self.rates.turned_away = self.rates.turned_away.saturating_add(1);
            return;
        }
        let s = streaks.entry(pair).or_insert_with(|| Streak {
            failed: 0,
            since: at,
            last: at,
            rooms: Vec::new(),
            slowest: 0,
        });
        s.failed = s.failed.saturating_add(1);
        s.last = at;
        s.slowest = s.slowest.max(took);
        if s.rooms.len() < MAX_ROOMS {
            s.rooms.push(room);
        }
        if s.failed < FAILED {
            return;
        }
        let s = s.clone();
        self.raise_blacklisted(pair, &s, here);
    }

    fn raise_blacklisted(&mut self, pair: PairId, s: &Streak, here: bool) {
        let Some((prefill, session)) = self.names_of(pair) else { return };
        let engine = self.party(Role::Prefill, prefill, here);
        let (Some(address), Some(name)) = (self.peers.address(prefill), self.peers.session_name(session))
        else {
            return;
        };
        let evidence = vec![
            format!(
                "{} failed {} rooms of session {name} in a row, each within {} s of its METADATA, and none of its rooms succeeded \
                 in between",
                named(&engine),
                s.failed,
                seconds(s.slowest)
            ),
            "none of them was aborted by decode".to_owned(),
            "mooncake fails every later room of a session once one write to it has failed (or, from 0.5.17, once its layout of \
             buffers did not fit), until that session registers anew"
                .to_owned(),
        ];
        let group = session_group(&address.to_string(), name);
        let actions = actions::of_finding(Class::SessionBlacklisted, &engine);
        self.raise(Finding {
            group,
            class: Class::SessionBlacklisted,
            confidence: Confidence::Likely,
            engine,
            rooms: s.rooms.clone(),
            room_count: s.failed,
            since: s.since,
            closed_at: None,
            evidence,
            actions,
        });
    }

    fn names_of(&self, pair: PairId) -> Option<(EndpointId, SessionId)> {
        self.peers.pair_of(pair).map(|p| (p.prefill, p.session))
    }

    /// A session succeeds again, or has registered anew.
    pub(crate) fn end_streak(&mut self, pair: PairId) {
        let Some(streak) = self.rates.streaks.remove(&pair) else { return };
        if streak.failed < FAILED {
            return;
        }
        let Some((prefill, session)) = self.names_of(pair) else { return };
        if let (Some(address), Some(name)) = (self.peers.address(prefill), self.peers.session_name(session)) {
            let group = session_group(&address.to_string(), name);
            self.lower(group, self.now);
        }
    }
}
