//! What an observer of the wire must say of a room, worked out from the state that the engines report at the end.
//!
//! Nothing here knows the script: the input is each rank's own account of the room.

use serde::Serialize;
use serde_json::{Value, json};

use crate::rank::{Queue, RoomReport};
use crate::status::KvPoll;

/// A room open for longer than this is overdue (the agent's floor), milliseconds.
pub(crate) const FLOOR_MS: u64 = 10_000;
/// A pin younger than this may not have been told yet, milliseconds.
const TELL_MS: u64 = 12_000;

/// One rank's side of a room.
#[derive(Clone, Debug)]
pub(crate) struct Side {
    /// `prefill`, `decode:0`, …
    pub name: String,
    /// Whether its process runs.
    pub alive: bool,
    /// Its account; `None`: it never got the request.
    pub report: Option<RoomReport>,
    /// From the room's beginning to its end here, or to now.
    pub open_ms: u64,
}

impl Side {
    /// It has the room and is not done with it.
    pub(crate) fn open(&self) -> bool {
        self.alive && self.report.as_ref().is_some_and(|report| report.ended.is_none())
    }

    fn ended_with(&self, state: KvPoll) -> bool {
        self.report.as_ref().is_some_and(|report| report.ended.is_some() && report.last == state)
    }
}

/// Whether the room is to be called pinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Pin {
    /// It must not.
    Never,
    /// The wire cannot tell, or it is too young.
    May,
    /// It must.
    Must,
}

/// What is right to say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Expected {
    /// Pinned or not.
    pub pin: Pin,
    /// Classes that are right; one of them must be the verdict's or among its candidates.
    pub class: Vec<&'static str>,
    /// Roles of which one owes the next move.
    pub owed: Vec<&'static str>,
    /// Highest confidence that the evidence on the wire carries.
    pub max_confidence: &'static str,
    /// The engines' state that says so.
    pub why: String,
}

impl Expected {
    fn new(
        pin: Pin,
        class: &[&'static str],
        owed: &[&'static str],
        max: &'static str,
        why: impl Into<String>,
    ) -> Self {
        Self { pin, class: class.to_vec(), owed: owed.to_vec(), max_confidence: max, why: why.into() }
    }

    /// As a line of the truth file.
    pub(crate) fn line(&self, room: u64, scenario: &str) -> Value {
        json!({"kind": "expected", "room": room, "scenario": scenario, "pin": self.pin, "class": self.class,
               "owed": self.owed, "max_confidence": self.max_confidence, "why": self.why})
    }
}

/// Classes that a transfer which does not end can have where only frames are seen.
const SILENT: &[&str] = &["transfer_not_concluded", "transfer_worker_silent", "awaiting_prefill"];

/// What must be said of a room.
pub(crate) fn expected(prefill: &Side, decodes: &[Side]) -> Expected {
    let expected = if prefill.open() {
        at_prefill(prefill, decodes)
    } else if decodes.iter().any(Side::open) {
        at_decode(prefill, decodes)
    } else {
        return ended(prefill, decodes);
    };
    let age =
        std::iter::once(prefill).chain(decodes).filter(|side| side.open()).map(|side| side.open_ms).max();
    match expected.pin {
        Pin::Must if age.unwrap_or(0) < TELL_MS => Expected { pin: Pin::May, ..expected },
        _ => expected,
    }
}

fn at_prefill(prefill: &Side, decodes: &[Side]) -> Expected {
    let Some(report) = &prefill.report else { return ended(prefill, decodes) };
    let (got, required) = report.got;
    let place = match report.queue {
        Queue::Bootstrap => "bootstrap queue",
        Queue::Waiting => "waiting queue",
        _ => "inflight queue",
    };
    let state = format!("prefill {:?} in its {place}", report.last);
    if report.abort_ignored && got == 0 {
        let why = format!("{state}, an ABORT had found no entry");
        return Expected::new(Pin::Must, &["abort_before_entry"], &["prefill"], "likely", why);
    }
    if got < required {
        let why = format!("{state}, METADATA of {got} of {required} decode ranks");
        return Expected::new(Pin::Must, &["metadata_incomplete"], &["decode"], "likely", why);
    }
    if got == 0 {
        let why = format!("{state}, no METADATA");
        return Expected::new(Pin::May, &["metadata_missing", "unknown"], &["decode"], "possible", why);
    }
    if !decodes.is_empty() && decodes.iter().all(|side| !side.alive) {
        let why = format!("{state}, every decode rank of it is dead");
        return Expected::new(Pin::Must, &["peer_lost"], &["decode"], "certain", why);
    }
    if let Some(worker) = report.dead_worker {
        return Expected::new(
            Pin::Must,
            SILENT,
            &["prefill"],
            "likely",
            format!("{state}, transfer worker {worker} is dead"),
        );
    }
    if report.queue == Queue::Waiting {
        return Expected::new(Pin::May, SILENT, &["prefill"], "possible", format!("{state}, computing"));
    }
    Expected::new(Pin::Must, SILENT, &["prefill"], "likely", format!("{state}, nothing concludes it"))
}

fn at_decode(prefill: &Side, decodes: &[Side]) -> Expected {
    let missing = decodes.iter().filter(|side| side.open()).filter_map(|side| side.report.as_ref());
    let asked = missing.clone().any(|report| report.asked);
    let (got, required) = missing.map(|report| report.got).next().unwrap_or((0, 0));
    if prefill.ended_with(KvPoll::Success) {
        let why = "prefill Success, decode has not been told";
        return Expected::new(
            Pin::Must,
            &["status_lost", "awaiting_prefill"],
            &["prefill", "decode"],
            "certain",
            why,
        );
    }
    if prefill.ended_with(KvPoll::Failed) {
        let classes = &["peer_not_told", "awaiting_prefill"];
        return Expected::new(
            Pin::Must,
            classes,
            &["prefill", "decode"],
            "likely",
            "prefill Failed, decode waits",
        );
    }
    if got > 0 && got < required {
        let why = format!("decode has {got} of {required} statuses");
        return Expected::new(Pin::Must, &["ranks_disagree"], &["prefill"], "likely", why);
    }
    let why = if asked { "decode waits, prefill never had the request" } else { "decode waits for memory" };
    Expected::new(Pin::May, &["awaiting_prefill", "unknown"], &["prefill", "decode"], "possible", why)
}

fn ended(prefill: &Side, decodes: &[Side]) -> Expected {
    let hung_up = |side: &Side| {
        side.report
            .as_ref()
            .is_some_and(|report| report.ended.is_some() && report.last == KvPoll::Failed && !report.asked)
    };
    if decodes.iter().any(hung_up) {
        let why = "both sides have ended; ABORT without METADATA looks like the pin until the request is seen to end";
        return Expected::new(Pin::May, &["abort_before_entry"], &["prefill"], "possible", why);
    }
    let slowest = std::iter::once(prefill).chain(decodes).map(|side| side.open_ms).max().unwrap_or(0);
    if slowest > FLOOR_MS {
        let why = format!("ended after {}.{} s", slowest / 1000, slowest % 1000 / 100);
        return Expected::new(Pin::May, SILENT, &["prefill"], "possible", why);
    }
    Expected::new(Pin::Never, &[], &[], "possible", "ended in time")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(last: KvPoll, ended: bool, queue: Queue) -> RoomReport {
        RoomReport {
            room: 7,
            last,
            begun: 0,
            ended: ended.then_some(1),
            queue,
            reason: None,
            got: (1, 1),
            abort_ignored: false,
            dead_worker: None,
            asked: true,
        }
    }

    fn side(name: &str, report: Option<RoomReport>) -> Side {
        Side { name: name.into(), alive: true, report, open_ms: 15_000 }
    }

    #[test]
    fn each_state_has_its_reading() {
        use KvPoll::{Bootstrapping, Failed, Success, WaitingForInput};
        let inflight = report(WaitingForInput, false, Queue::Inflight);
        let waiting = |report| side("decode:0", Some(report));
        let dead = RoomReport { dead_worker: Some(1), ..inflight.clone() };
        let cases = [
            (
                RoomReport {
                    abort_ignored: true,
                    got: (0, 0),
                    ..report(Bootstrapping, false, Queue::Bootstrap)
                },
                "abort_before_entry",
            ),
            (
                RoomReport { got: (1, 2), ..report(Bootstrapping, false, Queue::Bootstrap) },
                "metadata_incomplete",
            ),
            (dead, "transfer_not_concluded"),
            (report(Success, true, Queue::Gone), "status_lost"),
            (report(Failed, true, Queue::Gone), "peer_not_told"),
        ];
        for (at_prefill, class) in cases {
            let told = expected(
                &side("prefill", Some(at_prefill)),
                &[waiting(report(WaitingForInput, false, Queue::Transfer))],
            );
            assert_eq!((told.pin, told.class.first()), (Pin::Must, Some(&class)), "{told:?}");
        }
        let mut killed = waiting(report(WaitingForInput, false, Queue::Transfer));
        killed.alive = false;
        let told = expected(&side("prefill", Some(inflight.clone())), &[killed]);
        assert_eq!(told.class, ["peer_lost"]);
    }

    #[test]
    fn a_young_pin_need_not_be_told_yet() {
        let mut young = side("prefill", Some(report(KvPoll::WaitingForInput, false, Queue::Inflight)));
        young.open_ms = 5_000;
        assert_eq!(expected(&young, &[]).pin, Pin::May);
    }

    #[test]
    fn what_has_ended_is_never_more_than_possible() {
        let done = side("prefill", Some(report(KvPoll::Success, true, Queue::Gone)));
        let mut quick = done.clone();
        quick.open_ms = 20;
        assert_eq!(expected(&quick, &[]).pin, Pin::Never);
        let slow = expected(&done, &[]);
        assert_eq!((slow.pin, slow.max_confidence), (Pin::May, "possible"));
    }
}
