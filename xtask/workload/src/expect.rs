//! What an observer must say of a room, worked out from the state that the engines report at the end. Where the engines
//! speak HTTP it sees their requests too and must be surer; the ends of their threads it sees in any case.
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
    /// Its HTTP server has answered the request with an error.
    pub refused: bool,
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

/// What the observer sees besides frames: each has all before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Sees {
    /// Nothing: it reads a packet capture of the ranks' ports.
    Frames,
    /// How threads and processes end, and TCP's own troubles.
    Threads,
    /// Requests at the engines' HTTP ports.
    Requests,
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

/// Who owes where the one who could has ended.
pub(crate) const NOBODY: &str = "nobody";

/// What is right to say.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Expected {
    /// Pinned or not.
    pub pin: Pin,
    /// Classes that are right; one of them must be the verdict's or among its candidates.
    pub class: Vec<&'static str>,
    /// Roles of which one owes the next move.
    pub owed: Vec<&'static str>,
    /// Lowest confidence that the evidence demands.
    pub min_confidence: &'static str,
    /// Highest confidence that it carries.
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
        Self {
            pin,
            class: class.to_vec(),
            owed: owed.to_vec(),
            min_confidence: "possible",
            max_confidence: max,
            why: why.into(),
        }
    }

    /// The same, with a lowest confidence.
    fn at_least(self, min: &'static str) -> Self {
        Self { min_confidence: min, ..self }
    }

    /// As a line of the truth file.
    pub(crate) fn line(&self, room: u64, scenario: &str) -> Value {
        json!({"kind": "expected", "room": room, "scenario": scenario, "pin": self.pin, "class": self.class,
               "owed": self.owed, "min_confidence": self.min_confidence, "max_confidence": self.max_confidence,
               "why": self.why})
    }
}

/// Classes that a transfer which does not end can have where only frames are seen.
const SILENT: &[&str] = &["transfer_not_concluded", "transfer_worker_silent", "awaiting_prefill"];

/// What must be said of a room. `sees`: what else than frames.
pub(crate) fn expected(prefill: &Side, decodes: &[Side], sees: Sees) -> Expected {
    let expected = if prefill.open() {
        at_prefill(prefill, decodes, sees)
    } else if decodes.iter().any(Side::open) {
        at_decode(prefill, decodes, sees)
    } else {
        return ended(prefill, decodes, sees);
    };
    // A pause that has not ended is none of the room's doing.
    let paused = std::iter::once(prefill).chain(decodes).map(paused_ms).max().unwrap_or(0);
    if expected.pin == Pin::Must && paused >= FLOOR_MS {
        return Expected { pin: Pin::Never, why: "the engine is paused".into(), ..expected };
    }
    let age =
        std::iter::once(prefill).chain(decodes).filter(|side| side.open()).map(|side| side.open_ms).max();
    match expected.pin {
        Pin::Must if age.unwrap_or(0) < TELL_MS => Expected { pin: Pin::May, ..expected },
        _ => expected,
    }
}

fn paused_ms(side: &Side) -> u64 {
    side.report.as_ref().map_or(0, |report| report.paused_ms)
}

fn at_prefill(prefill: &Side, decodes: &[Side], sees: Sees) -> Expected {
    let Some(report) = &prefill.report else { return ended(prefill, decodes, sees) };
    let (got, required) = report.got;
    let place = match report.queue {
        Queue::Bootstrap => "bootstrap queue",
        Queue::Waiting => "waiting queue",
        _ => "inflight queue",
    };
    let state = format!("prefill {:?} in its {place}", report.last);
    if report.receiver_dead && (got == 0 || got < required) {
        let why = format!("{state}, the thread that takes METADATA is dead");
        if sees == Sees::Frames {
            let classes = [SILENT, &["receiver_silent"]].concat();
            return Expected::new(Pin::Must, &classes, &["prefill"], "likely", why);
        }
        return Expected::new(Pin::Must, &["receiver_silent"], &["prefill"], "certain", why)
            .at_least("certain");
    }
    if report.abort_ignored && got == 0 {
        let why = format!("{state}, an ABORT had found no entry");
        // With the request seen to be open there, a hang-up on both sides is excluded.
        let (min, max) = if sees == Sees::Requests { ("likely", "certain") } else { ("possible", "likely") };
        return Expected::new(Pin::Must, &["abort_before_entry"], &["prefill"], max, why).at_least(min);
    }
    if got < required {
        let why = format!("{state}, METADATA of {got} of {required} decode ranks");
        return Expected::new(Pin::Must, &["metadata_incomplete"], &["decode"], "likely", why);
    }
    if got == 0 && sees == Sees::Requests && decodes.iter().all(|side| side.report.is_none()) {
        let why = format!("{state}, decode never got the request");
        return Expected::new(Pin::Must, &["metadata_missing"], &["decode", NOBODY], "likely", why);
    }
    if got == 0 {
        let why = format!("{state}, no METADATA");
        return Expected::new(Pin::May, &["metadata_missing", "unknown"], &["decode"], "possible", why);
    }
    if !decodes.is_empty() && decodes.iter().all(|side| !side.alive) {
        let why = format!("{state}, every decode rank of it is dead");
        return Expected::new(Pin::Must, &["peer_lost"], &["decode"], "certain", why);
    }
    if let Some(worker) = report.dead_worker.filter(|_| sees > Sees::Frames) {
        return Expected::new(
            Pin::Must,
            &["transfer_worker_silent"],
            &["prefill"],
            "certain",
            format!("{state}, transfer worker {worker} is dead"),
        )
        .at_least("certain");
    }
    if report.queue == Queue::Waiting {
        return Expected::new(Pin::May, SILENT, &["prefill"], "possible", format!("{state}, computing"));
    }
    Expected::new(Pin::Must, SILENT, &["prefill"], "likely", format!("{state}, nothing concludes it"))
}

fn at_decode(prefill: &Side, decodes: &[Side], sees: Sees) -> Expected {
    let min = if sees == Sees::Requests { "likely" } else { "possible" };
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
        )
        // A refused connect, or bytes that the peer's kernel does not acknowledge.
        .at_least(if sees > Sees::Frames { "likely" } else { "possible" });
    }
    if prefill.refused && prefill.report.is_none() {
        let why = "prefill has refused the request, decode waits";
        return Expected::new(Pin::Must, &["peer_not_told"], &[NOBODY, "prefill", "decode"], "certain", why)
            .at_least("likely");
    }
    if prefill.ended_with(KvPoll::Failed) {
        let classes: &[_] =
            if sees == Sees::Requests { &["peer_not_told"] } else { &["peer_not_told", "awaiting_prefill"] };
        let max = if sees == Sees::Requests { "certain" } else { "likely" };
        let why = "prefill Failed, decode waits";
        return Expected::new(Pin::Must, classes, &[NOBODY, "prefill", "decode"], max, why).at_least(min);
    }
    if got > 0 && got < required {
        let why = format!("decode has {got} of {required} statuses");
        return Expected::new(Pin::Must, &["ranks_disagree"], &["prefill"], "likely", why);
    }
    let why = if asked { "decode waits, prefill never had the request" } else { "decode waits for memory" };
    Expected::new(Pin::May, &["awaiting_prefill", "unknown"], &["prefill", "decode"], "possible", why)
}

fn ended(prefill: &Side, decodes: &[Side], sees: Sees) -> Expected {
    let hung_up = |side: &Side| {
        side.report
            .as_ref()
            .is_some_and(|report| report.ended.is_some() && report.last == KvPoll::Failed && !report.asked)
    };
    if sees != Sees::Requests && decodes.iter().any(hung_up) {
        let why = "both sides have ended; ABORT without METADATA looks like the pin until the request is seen to end";
        return Expected::new(Pin::May, &["abort_before_entry"], &["prefill"], "possible", why);
    }
    let sides = || std::iter::once(prefill).chain(decodes);
    let paused = sides().map(paused_ms).max().unwrap_or(0);
    let slowest = sides().map(|side| side.open_ms).max().unwrap_or(0).saturating_sub(paused);
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
            receiver_dead: false,
            paused_ms: 0,
        }
    }

    fn side(name: &str, report: Option<RoomReport>) -> Side {
        Side { name: name.into(), alive: true, report, open_ms: 15_000, refused: false }
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
            (dead, "transfer_worker_silent"),
            (
                RoomReport {
                    receiver_dead: true,
                    got: (0, 0),
                    ..report(Bootstrapping, false, Queue::Bootstrap)
                },
                "receiver_silent",
            ),
            (report(Success, true, Queue::Gone), "status_lost"),
            (report(Failed, true, Queue::Gone), "peer_not_told"),
        ];
        for (at_prefill, class) in cases {
            let told = expected(
                &side("prefill", Some(at_prefill)),
                &[waiting(report(WaitingForInput, false, Queue::Transfer))],
                Sees::Requests,
            );
            assert_eq!((told.pin, told.class.first()), (Pin::Must, Some(&class)), "{told:?}");
        }
        let mut killed = waiting(report(WaitingForInput, false, Queue::Transfer));
        killed.alive = false;
        let told = expected(&side("prefill", Some(inflight.clone())), &[killed], Sees::Requests);
        assert_eq!(told.class, ["peer_lost"]);
    }

    #[test]
    fn what_only_requests_show_is_asked_for_only_with_them() {
        let decode = || side("decode:0", Some(report(KvPoll::WaitingForInput, false, Queue::Transfer)));
        let refused = Side { refused: true, ..side("prefill", None) };
        assert_eq!(expected(&refused, &[decode()], Sees::Requests).class, ["peer_not_told"]);
        let first = RoomReport { got: (0, 0), ..report(KvPoll::Bootstrapping, false, Queue::Bootstrap) };
        let alone = side("prefill", Some(first));
        let never = side("decode:0", None);
        assert_eq!(expected(&alone, std::slice::from_ref(&never), Sees::Requests).pin, Pin::Must);
        assert_eq!(expected(&alone, &[never], Sees::Threads).pin, Pin::May);
        let mut hung_up = report(KvPoll::Failed, true, Queue::Gone);
        hung_up.asked = false;
        let ended = [side("decode:0", Some(hung_up))];
        let mut prefill = side("prefill", Some(report(KvPoll::Failed, true, Queue::Gone)));
        prefill.open_ms = 100;
        let ended = ended.map(|side| Side { open_ms: 100, ..side });
        assert_eq!(expected(&prefill, &ended, Sees::Requests).pin, Pin::Never);
        assert_eq!(expected(&prefill, &ended, Sees::Threads).pin, Pin::May);
    }

    #[test]
    fn a_pause_is_no_pin() {
        let paused = |ended| RoomReport {
            paused_ms: 14_000,
            ..report(KvPoll::WaitingForInput, ended, if ended { Queue::Gone } else { Queue::Inflight })
        };
        assert_eq!(expected(&side("prefill", Some(paused(true))), &[], Sees::Requests).pin, Pin::Never);
        assert_eq!(expected(&side("prefill", Some(paused(false))), &[], Sees::Requests).pin, Pin::Never);
    }

    #[test]
    fn a_young_pin_need_not_be_told_yet() {
        let mut young = side("prefill", Some(report(KvPoll::WaitingForInput, false, Queue::Inflight)));
        young.open_ms = 5_000;
        assert_eq!(expected(&young, &[], Sees::Requests).pin, Pin::May);
    }

    #[test]
    fn what_has_ended_is_never_more_than_possible() {
        let done = side("prefill", Some(report(KvPoll::Success, true, Queue::Gone)));
        let mut quick = done.clone();
        quick.open_ms = 20;
        assert_eq!(expected(&quick, &[], Sees::Requests).pin, Pin::Never);
        let slow = expected(&done, &[], Sees::Requests);
        assert_eq!((slow.pin, slow.max_confidence), (Pin::May, "possible"));
    }
}
