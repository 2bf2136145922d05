//! What the room table counts: gauges of this moment and counters since start.
//!
//! Plain data: no I/O, no clock. Rooms, pids and addresses are never label values; the one instance label
//! (`owed_instance`) is bounded to [`MAX_INSTANCES`].

use crate::rooms::model::{Outcome, Role};
use crate::sglang::message::KvPoll;
use crate::verdict::model::{Class, Confidence};

/// Instances named in [`PinnedGauge::owed_instance`]; the rest is summed under `other`.
pub const MAX_INSTANCES: usize = 100;

/// Open rooms of one role in one state.
#[derive(Clone, Debug, PartialEq)]
pub struct OpenGauge {
    /// Role of the view.
    pub role: Role,
    /// State of that view.
    pub state: KvPoll,
    /// How many rooms.
    pub rooms: u64,
    /// Seconds since the oldest of them was first seen; `None` when there is none that counts (rooms whose
    /// completion cannot be observed or that owe nothing here do not age).
    pub oldest_age_s: Option<f64>,
}

/// Pinned rooms with the same labels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedGauge {
    /// Role of the view that the verdict was judged from.
    pub role: Role,
    /// Class.
    pub class: Class,
    /// Confidence.
    pub confidence: Confidence,
    /// Endpoint of the debtor (`ip:port`), `other` beyond [`MAX_INSTANCES`], empty when nobody is known.
    pub owed_instance: String,
    /// How many rooms.
    pub rooms: u64,
}

/// Gauges of this moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gauges {
    /// Rooms open.
    pub rooms: u64,
    /// By role and state; every combination is there, also at zero. A room counts once for each of its views that is not
    /// over; one whose request prefill still holds is not.
    pub open: Vec<OpenGauge>,
    /// By role, verdict, confidence and debtor.
    pub pinned: Vec<PinnedGauge>,
    /// Closed rooms whose details are still kept.
    pub closed_kept: u64,
    /// Connections known.
    pub connections: u64,
}

/// What was turned away or dropped because a table was full, or was no business of an open room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TurnedAway {
    /// Rooms not opened: table full.
    pub rooms: u64,
    /// Connections not followed: table full.
    pub connections: u64,
    /// Endpoints or sessions not named: table full.
    pub names: u64,
    /// METADATA not kept: more peers in one room than it holds.
    pub links: u64,
    /// Peer pairs without their own statistics: table full.
    pub pairs: u64,
    /// REGISTERs not kept: more decode ranks at one prefill rank than it holds.
    pub registers: u64,
    /// Marks dropped from the middle of time lines.
    pub marks: u64,
    /// Sent messages whose acknowledgement is not followed: too many on one connection.
    pub acknowledgements: u64,
    /// Requests and bootstrap queries not followed: table full, or a third engine of unknown role for one room.
    pub requests: u64,
    /// Messages for a room that had ended.
    pub late: u64,
    /// Messages for a room that is not known and that cannot begin one.
    pub orphans: u64,
    /// Rooms given up early to make space (completion not observable, or nothing owed here).
    pub expired_early: u64,
    /// Ended threads forgotten, or findings of them not opened: too many.
    pub threads: u64,
    /// Sockets with unread bytes not remembered: too many.
    pub unread: u64,
}

/// Counters since start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counters {
    /// Views of rooms that ended, by role and outcome.
    pub closed: Vec<(Role, Outcome, u64)>,
    /// Pins raised, by role and class.
    pub pins: Vec<(Role, Class, u64)>,
    /// Turned away.
    pub turned_away: TurnedAway,
}

/// The counters as they are kept: arrays, so that counting costs nothing.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    closed: [[u64; 3]; 2],
    pins: [[u64; Class::ALL.len()]; 2],
    pub(crate) turned_away: TurnedAway,
}

const ROLES: [Role; 2] = [Role::Prefill, Role::Decode];
const OUTCOMES: [Outcome; 3] = [Outcome::Success, Outcome::Failed, Outcome::Unknown];

const fn role_index(role: Role) -> usize {
    match role {
        Role::Prefill => 0,
        Role::Decode => 1,
    }
}

impl Tally {
    pub(crate) fn close(&mut self, role: Role, outcome: Outcome) {
        let o = OUTCOMES.iter().position(|x| *x == outcome).unwrap_or_default();
        if let Some(n) = self.closed.get_mut(role_index(role)).and_then(|r| r.get_mut(o)) {
            *n += 1;
        }
    }

    pub(crate) fn pin(&mut self, role: Role, class: Class) {
        let c = Class::ALL.iter().position(|x| *x == class).unwrap_or_default();
        if let Some(n) = self.pins.get_mut(role_index(role)).and_then(|r| r.get_mut(c)) {
            *n += 1;
        }
    }

    pub(crate) fn pins_raised(&self) -> u64 {
        self.pins.iter().flatten().sum()
    }

    pub(crate) fn counters(&self) -> Counters {
        let mut c = Counters { turned_away: self.turned_away, ..Counters::default() };
        for (r, role) in ROLES.iter().enumerate() {
            for (outcome, n) in OUTCOMES.iter().zip(self.closed.get(r).into_iter().flatten()) {
                c.closed.push((*role, *outcome, *n));
            }
            for (class, n) in Class::ALL.iter().zip(self.pins.get(r).into_iter().flatten()) {
                if class.pins() {
                    c.pins.push((*role, *class, *n));
                }
            }
        }
        c
    }
}
