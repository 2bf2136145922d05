//! One engine: role, pauses, what it finished, what it says in numbers, what could be read of it.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: [`MAX_PAUSES`], [`MAX_FINISHED`]; its open requests are bounded by
//! [`crate::rooms::requests::MAX_OPEN`].

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::event::{Mono, SECOND, Task};
use crate::rooms::engines::answers::Answers;
use crate::rooms::engines::blind::Sight;
use crate::rooms::engines::gauges::Counts;
use crate::rooms::model::{EngineGauges, EngineNumbers, FRESH, Role};
use crate::rooms::requests::legs::RequestKey;

/// Names an engine: its place among them, and above it how often that place was given to another.
pub(crate) type EngineId = u32;

/// Pauses of one engine remembered: those that a room under way can have lived through.
pub(super) const MAX_PAUSES: usize = 16;
/// Finished requests of one engine remembered, to compare with those that do not finish.
pub(super) const MAX_FINISHED: usize = 64;
/// How long an engine's counters must stand still before they say that it does not compute
/// ([`EngineGauges::progress`] moves with every forward pass, and a chunk of prefill takes a second at most).
const STILL: u64 = 10 * SECOND;
/// A request may be with the engine's HTTP server so long before its scheduler gets it: it fetches images and videos, loads
/// adapters, cuts long prompts into tokens (`managers/tokenizer_manager.py`). Nothing that the scheduler counts shows it.
pub(super) const SERVED: u64 = 60 * SECOND;
/// Answers remembered in which nothing waited: more than a room that is overdue can have lived through unnoticed.
const MAX_CLEAR: usize = 64;
/// Numbers of an engine older than this say nothing.
const STALE: u64 = 30 * SECOND;
/// What waited so shortly ago may wait still, where a count that can be old says otherwise: engines are asked this often (the
/// default of `engine.interval`).
const LATELY: u64 = 15 * SECOND;
/// No forward pass takes as long.
const LONG_PASS: u64 = 60 * SECOND;
/// How often it is looked up again which role an engine's processes have.
pub(crate) const LOOK_AGAIN: u64 = SECOND;

/// What stands an engine still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Stop {
    /// `/pause_generation`, in any mode: aborted or not, what comes next waits.
    Pause = 1,
    /// `/begin_weight_update` … `/end_weight_update`.
    Weights = 2,
    /// `/update_weights_from_…`, until it is answered.
    Update = 4,
    /// `/release_memory_occupation`.
    Memory = 8,
    /// `/pd_role_switch`, until it is answered.
    RoleSwitch = 16,
}

impl Stop {
    const ALL: [Self; 5] = [Self::Pause, Self::Weights, Self::Update, Self::Memory, Self::RoleSwitch];

    /// In words.
    pub(crate) const fn words(self) -> &'static str {
        match self {
            Self::Pause => "paused (/pause_generation)",
            Self::Weights => "changing weights (/begin_weight_update)",
            Self::Update => "changing weights (/update_weights_from_…)",
            Self::Memory => "without memory (/release_memory_occupation)",
            Self::RoleSwitch => "changing its role (/pd_role_switch)",
        }
    }
}

/// The engine's own numbers over time. Part of the state file's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Numbers {
    at: Mono,
    progress: Option<u64>,
    /// Since when progress stands still with something in flight and nothing waiting.
    idle_since: Option<Mono>,
    /// When, since then, it last counted at least what was open at its server: all that had come had reached its scheduler.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    whole: Option<Mono>,
    /// When progress last moved.
    moved: Option<Mono>,
    waiting: Option<u64>,
    /// In its hand-over queue (decode: waiting for KV), of the moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    inflight: Option<u64>,
    /// When it last said that requests wait in it, and how many, however old that count was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    said_to_wait: Option<(Mono, u64)>,
    /// When its scheduler last told the state of the moment.
    #[serde(default)]
    fresh: Option<Mono>,
    /// They are the sums of several DP ranks: that they move does not say which of these works.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    summed: bool,
}

impl Numbers {
    /// Whether progress moves: it did when it was last asked for, however long ago that is, or just before.
    fn moves(&self, now: Mono) -> bool {
        self.moved.is_some_and(|at| at == self.at || now.since(at) < STILL)
    }
}

/// When numbers were written at the earliest that an answer of `at` gave as those of the moment.
fn wrote_from(at: Mono) -> Mono {
    Mono(at.0.saturating_sub(FRESH))
}

/// One engine.
#[derive(Debug, Default)]
pub(crate) struct Engine {
    pub(super) id: EngineId,
    /// Where its HTTP server was reached.
    pub(crate) address: Option<SocketAddr>,
    /// Its server process.
    pub(crate) pid: Option<u32>,
    pub(crate) task: Option<Task>,
    pub(crate) role: Option<Role>,
    /// When its processes were last looked through for a role.
    pub(crate) looked: Option<Mono>,
    /// Since when requests to it are seen at its own end, room and all.
    pub(crate) followed: Option<Mono>,
    /// Since when some are, an agent before this one included.
    pub(crate) heard: Option<Mono>,
    /// When a request to it last may have passed unseen, or without its room.
    pub(crate) blind: Option<Mono>,
    /// The last time in which a call to it may have passed unseen; `None`: none since the agent began to look.
    pub(super) unseen: Option<(Mono, Mono)>,
    /// Open requests with a room in order of their beginning, with the slot of their first room.
    pub(crate) open: BTreeMap<(Mono, RequestKey), u32>,
    /// Beginnings of requests that finished, newest at the back.
    pub(super) finished: VecDeque<Mono>,
    /// Beginnings of requests whose METADATA came, newest at the back.
    pub(super) asked: VecDeque<Mono>,
    pub(super) stops: u8,
    pub(crate) stopped: Option<Mono>,
    pub(super) pauses: VecDeque<(Mono, Mono)>,
    pub(crate) told_paused: bool,
    pub(super) numbers: Option<Numbers>,
    answers: Answers,
    /// Since when its host has its server process; `None`: it has none, or none any more.
    pub(super) since: Option<Mono>,
    pub(super) counts: Counts,
    pub(super) sight: Sight,
    /// When nothing waited in it, nor in its server before it, newest at the back.
    pub(super) clear: VecDeque<Mono>,
    /// When nothing waited in it, and its server had more requests than it counted.
    clear_inside: VecDeque<Mono>,
    /// It is this one, as has turned out.
    pub(super) moved: Option<EngineId>,
}

impl Engine {
    /// One of which nothing is known but its server process, if that.
    pub(super) fn of(pid: Option<u32>) -> Self {
        Self { pid, ..Self::default() }
    }

    /// It stands still from now on.
    pub(crate) fn stop(&mut self, why: Stop, at: Mono) {
        self.stops |= why as u8;
        self.stopped.get_or_insert(at);
    }

    /// This does not hold it up any more.
    pub(crate) fn start(&mut self, why: Stop, at: Mono, grace: u64) {
        self.stops &= !(why as u8);
        if self.stops == 0 {
            self.started(at, grace);
        }
    }

    /// It runs. What piled up meanwhile is worked off for as long as it stood, at most `grace`.
    fn started(&mut self, at: Mono, grace: u64) {
        self.stops = 0;
        let Some(from) = self.stopped.take() else { return };
        if self.pauses.len() >= MAX_PAUSES {
            self.pauses.pop_front();
        }
        self.pauses.push_back((from, at.plus(grace.min(at.since(from)))));
    }

    /// Its server process is gone, and with it what it stood for and what it said.
    pub(super) fn end(&mut self, now: Mono) {
        self.started(now, 0);
        (self.since, self.numbers) = (None, None);
        (self.counts, self.sight) = Default::default();
    }

    /// What was known of it by its address alone, or by one of its processes.
    pub(super) fn absorb(&mut self, old: Self) {
        self.task = self.task.or(old.task);
        self.role = self.role.or(old.role);
        self.address = self.address.or(old.address);
        self.stops |= old.stops;
        self.stopped = [self.stopped, old.stopped].into_iter().flatten().min();
        self.told_paused |= old.told_paused;
        self.pauses.extend(old.pauses);
        self.open.extend(old.open);
        for (ring, more) in [(&mut self.finished, old.finished), (&mut self.asked, old.asked)] {
            ring.extend(more);
            ring.make_contiguous().sort_unstable();
            ring.drain(..ring.len().saturating_sub(MAX_FINISHED));
        }
        self.followed = [self.followed, old.followed].into_iter().flatten().min();
        self.heard = [self.heard, old.heard].into_iter().flatten().min();
        self.blind = self.blind.max(old.blind);
        if let Some((from, to)) = old.unseen {
            self.out_of_sight(from, to);
        }
    }

    /// Calls to it may have passed unseen from then to then. Only the last such time is kept, and with it what lies before as long
    /// as its scheduler has not surely written its numbers in sight since.
    pub(crate) fn out_of_sight(&mut self, from: Mono, to: Mono) {
        let before = self
            .unseen
            .filter(|(_, to)| self.numbers.and_then(|n| n.fresh).is_none_or(|at| *to >= wrote_from(at)));
        let (from, to) = before.map_or((from, to), |b| (from.min(b.0), to.max(b.1)));
        self.unseen = Some((from, to));
        self.blind = self.blind.max(Some(to));
    }

    /// Whether its scheduler may have been stood still, by a call that passed unseen, since it last wrote its numbers at `wrote`. One
    /// that had written nothing for `long` before that call did not stand because of it. The agent looks since `started`.
    pub(crate) fn may_be_paused(&self, wrote: Mono, long: u64, started: Mono) -> bool {
        let (from, to) = self.unseen.unwrap_or((Mono(0), started));
        to >= wrote_from(wrote) && from < wrote.plus(long)
    }

    /// Why it stands.
    pub(crate) fn why(&self) -> Option<Stop> {
        Stop::ALL.into_iter().find(|s| self.stops & (*s as u8) != 0)
    }

    /// Whether it ever stood still as far as is remembered.
    pub(crate) fn ever_stopped(&self) -> bool {
        self.stopped.is_some() || !self.pauses.is_empty()
    }

    /// When it stood still, between `since` and `now`.
    fn stretches(&self, since: Mono, now: Mono) -> impl Iterator<Item = (Mono, Mono)> + '_ {
        let open = self.stopped.map(|from| (from, now));
        self.pauses.iter().copied().chain(open).filter_map(move |(from, to)| {
            let (from, to) = (from.max(since), to.min(now));
            (from < to).then_some((from, to))
        })
    }

    /// A request was answered with what it asked for. One that began after a pause did proves that the pause is over,
    /// though its end was not seen.
    pub(crate) fn finished(&mut self, begun: Mono, at: Mono, grace: u64) {
        keep(&mut self.finished, begun, MAX_FINISHED);
        if self.stopped.is_some_and(|from| begun > from) {
            self.started(at, grace);
        }
    }

    /// METADATA of a room came whose request began then.
    pub(crate) fn asked(&mut self, begun: Mono) {
        keep(&mut self.asked, begun, MAX_FINISHED);
    }

    /// How many requests that began later have finished.
    pub(crate) fn later_finished(&self, begun: Mono) -> u32 {
        later(&self.finished, begun)
    }

    /// How many rooms whose request began later were asked for by METADATA.
    pub(crate) fn later_asked(&self, begun: Mono) -> u32 {
        later(&self.asked, begun)
    }

    /// Takes its numbers.
    pub(crate) fn gauged(&mut self, at: Mono, g: &EngineGauges) {
        if g.role.is_some() {
            self.role = g.role;
        }
        if g.error.is_some() {
            self.numbers = None;
            return;
        }
        let old = self.numbers.filter(|n| at.since(n.at) <= STALE);
        let same = old.is_some_and(|n| n.progress.is_some() && n.progress == g.progress);
        let counted = g.inflight.unwrap_or(0).saturating_add(g.running.unwrap_or(0));
        let whole = u64::try_from(self.open.len()).unwrap_or(u64::MAX) <= counted;
        let quiet = !g.stale
            && same
            && g.inflight.is_some_and(|n| n >= 1)
            && g.waiting == Some(0)
            && g.running.unwrap_or(0) == 0;
        let before = old.and_then(|n| n.progress).zip(g.progress);
        self.answers.take(at, g, before.map(|(before, now)| before != now));
        let moved = match old {
            Some(n) if !same && n.progress.is_some() && g.progress.is_some() => Some(at),
            _ => old.and_then(|n| n.moved),
        };
        let idle_since = quiet.then(|| old.and_then(|n| n.idle_since).unwrap_or(old.map_or(at, |n| n.at)));
        self.numbers = Some(Numbers {
            at,
            progress: g.progress,
            idle_since,
            whole: idle_since.and(if whole { Some(at) } else { old.and_then(|n| n.whole) }),
            moved,
            waiting: g.waiting.filter(|_| !g.stale),
            inflight: g.inflight.filter(|_| !g.stale),
            said_to_wait: match g.waiting {
                Some(n @ 1..) => Some((at, n)),
                // Zero of this moment ends it, an old one or none does not yet.
                Some(_) if !g.stale => None,
                _ => old.and_then(|n| n.said_to_wait),
            },
            fresh: if g.stale { old.and_then(|n| n.fresh) } else { Some(at) },
            summed: g.inflight_by_dp.len() > 1,
        });
        // What is 30 s old tells nothing of a moment.
        if g.waiting == Some(0) && g.bootstrap.unwrap_or(0) == 0 && !g.stale {
            keep(if whole { &mut self.clear } else { &mut self.clear_inside }, at, MAX_CLEAR);
        }
    }

    /// What it said from `from` to `to`, being this to a room.
    pub(crate) fn said(&self, role: Role, from: Mono, to: Mono) -> impl Iterator<Item = EngineNumbers> + '_ {
        self.answers.between(role, from, to)
    }

    /// Whether it has not computed for long since `from` although something is in flight; `Some(false)`: it computes; `None`: not
    /// known, as of one of several DP ranks while any of them computes.
    pub(crate) fn idle(&self, now: Mono, from: Mono) -> Option<bool> {
        let n = self.numbers.filter(|n| now.since(n.at) <= STALE)?;
        let still = |since: Mono| {
            let since = since.max(from);
            n.whole.is_some_and(|at| at.since(since) >= STILL) || n.at.since(since) >= SERVED
        };
        if n.idle_since.is_some_and(still) {
            return Some(true);
        }
        (n.moves(now) && !n.summed).then_some(false)
    }

    /// Whether it may be computing, as its numbers are: they move, or they have moved since `from`, not long ago, and are not of
    /// this moment, as in the middle of a forward pass.
    pub(crate) fn may_compute(&self, now: Mono, from: Mono) -> bool {
        // What would show that it does not must be of now; that it may, need not.
        let Some(n) = self.numbers.filter(|n| now.since(n.at) <= LONG_PASS + STALE) else { return false };
        let midst = n.fresh != Some(n.at) && n.moved.is_some_and(|at| at >= from);
        n.moves(now) || (midst && n.moved.is_some_and(|at| now.since(at) < LONG_PASS))
    }

    /// When its scheduler last wrote its numbers, where its server still answers with those.
    pub(crate) fn wrote(&self, now: Mono) -> Option<Mono> {
        let n = self.numbers.filter(|n| now.since(n.at) <= STALE)?;
        n.fresh.filter(|at| *at < n.at)
    }

    /// The first moment from `from` on at which nothing waited in it, as it says, and its server had passed on what had come
    /// by `from`.
    pub(crate) fn nothing_waited(&self, from: Mono) -> Option<Mono> {
        let first = |of: &VecDeque<Mono>, from| of.iter().copied().find(|at| *at >= from);
        first(&self.clear, from).into_iter().chain(first(&self.clear_inside, from.plus(SERVED))).min()
    }

    /// Requests that wait in it, as it has said at `from` or later.
    pub(crate) fn waiting(&self, now: Mono, from: Mono) -> Option<u64> {
        self.numbers.filter(|n| n.at >= from && now.since(n.at) <= STALE).and_then(|n| n.waiting)
    }
}

impl Engine {
    /// Requests whose KV is on its way, as it has said at `from` or later.
    pub(crate) fn in_transfer(&self, now: Mono, from: Mono) -> Option<u64> {
        self.numbers.filter(|n| n.at >= from && now.since(n.at) <= STALE).and_then(|n| n.inflight)
    }

    /// Requests that wait in it, at least one, as it said in its last answer or not long before, whether or not that count can be old.
    pub(crate) fn said_to_wait(&self, now: Mono) -> Option<u64> {
        let n = self.numbers.filter(|n| now.since(n.at) <= STALE)?;
        n.said_to_wait.filter(|(at, _)| *at == n.at || now.since(*at) < LATELY).map(|(_, waiting)| waiting)
    }
}

pub(super) fn keep(ring: &mut VecDeque<Mono>, moment: Mono, most: usize) {
    if ring.len() >= most {
        ring.pop_front();
    }
    ring.push_back(moment);
}

fn later(ring: &VecDeque<Mono>, begun: Mono) -> u32 {
    u32::try_from(ring.iter().filter(|b| **b > begun).count()).unwrap_or(u32::MAX)
}

/// How long these engines stood still between `since` and `now`, together: what stood at one of two waits.
pub(crate) fn stood(engines: [Option<&Engine>; 2], since: Mono, now: Mono) -> u64 {
    let mut all: Vec<_> = engines.into_iter().flatten().flat_map(|e| e.stretches(since, now)).collect();
    all.sort_unstable();
    let (mut total, mut reached) = (0u64, since);
    for (from, to) in all {
        total = total.saturating_add(to.since(from.max(reached)));
        reached = reached.max(to);
    }
    total
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn time_that_stood_at_either_engine_counts_once() {
        let (mut a, mut b) = (Engine::default(), Engine::default());
        a.stop(Stop::Pause, Mono(10));
        a.start(Stop::Pause, Mono(20), 5);
        b.stop(Stop::Memory, Mono(22));
        let of = |since, now| stood([Some(&a), Some(&b)], Mono(since), Mono(now));
        // 10 to 25 (with the grace), 22 to now.
        assert_eq!(of(0, 100), 90);
        assert_eq!(of(15, 18), 3);
        assert_eq!(of(0, 10), 0);
        assert_eq!(stood([None, Some(&a)], Mono(0), Mono(100)), 15);
    }

    #[test]
    fn two_stops_end_when_both_do_and_a_later_request_that_finished_ends_all() {
        let mut e = Engine::default();
        e.stop(Stop::Pause, Mono(1));
        e.stop(Stop::Weights, Mono(2));
        e.start(Stop::Weights, Mono(3), 0);
        assert_eq!((e.stopped, e.why()), (Some(Mono(1)), Some(Stop::Pause)));
        e.finished(Mono(0), Mono(4), 0);
        assert!(e.stopped.is_some(), "it had begun before");
        e.finished(Mono(2), Mono(5), 0);
        assert_eq!((e.stopped, e.why()), (None, None));
    }

    #[test]
    fn counters_that_stand_still_with_something_in_flight_mean_idle() {
        let mut e = Engine::default();
        let mut say = |s: u64, inflight, waiting, progress| {
            let g = EngineGauges {
                inflight: Some(inflight),
                waiting: Some(waiting),
                progress: Some(progress),
                ..EngineGauges::default()
            };
            e.gauged(Mono(s * SECOND), &g);
            e.idle(Mono(s * SECOND), Mono(0))
        };
        assert_eq!(say(0, 1, 0, 7), None);
        assert_eq!(say(5, 1, 0, 7), None);
        assert_eq!(say(11, 1, 0, 7), Some(true));
        assert_eq!(say(12, 1, 3, 7), None, "something waits");
        assert_eq!(say(13, 1, 0, 8), Some(false), "it moves");
        assert_eq!(say(22, 1, 0, 8), Some(false));
        assert_eq!(say(25, 1, 0, 8), Some(true));
        assert_eq!(e.idle(Mono(100 * SECOND), Mono(0)), None, "too old");
    }
}
