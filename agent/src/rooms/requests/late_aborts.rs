//! ABORT of a room whose every STATUS decode had: it never took them in, and its waiting timeout says so (M19). Only where all
//! ranks of decode had theirs: one that failed, or a hang-up, makes those send ABORT that are well.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: [`MAX_RANKS`] decode ranks, [`MAX_ROOMS`] rooms each.

use hashbrown::HashMap;

use crate::event::{Mono, SECOND};
use crate::rooms::findings::cause;
use crate::rooms::messages::Seen;
use crate::rooms::model::Role;
use crate::rooms::peers::EndpointId;
use crate::rooms::table::RoomTable;
use crate::verdict::model::{Action, Class, Confidence, Finding, Party};

const MAX_RANKS: usize = 1024;
/// Rooms named in a finding.
const MAX_ROOMS: usize = 100;
/// Without another one for so long, decode takes them in again, or is not asked any more.
const OVER: u64 = 600 * SECOND;

const STATUS_THREAD: &str = "the request waits there all the time, so it is decode's waiting timeout that sends it: its status thread takes nothing in";
const OR_ELSE: &str = "its status thread takes nothing in (M19), or the room's aux data never came (M15), or it stood still unseen; of \
                       the latter two a hang-up of the client makes it send ABORT";

/// Of one decode rank.
#[derive(Debug)]
struct Held {
    rooms: Vec<u64>,
    count: u32,
    /// That of its surest room: certain where nothing else than a dead status thread is left.
    confidence: Confidence,
    since: Mono,
    last: Mono,
}

/// Of all decode ranks of this host.
#[derive(Debug, Default)]
pub(super) struct LateAborts(HashMap<EndpointId, Held>);

impl RoomTable {
    /// An ABORT of a room that has closed. A receiver that has taken Success in sends none, so one that comes long after it
    /// (not at once, when a client's hang-up and Success cross) proves that it never did. Why: its status thread is dead
    /// (M19), the room's aux data never came (M15), or the engine stood still; of the latter two only a hang-up makes it
    /// send ABORT, for a receiver looks at its status before its timer (`CommonKVReceiver._poll`, `common/conn.py`, 0.5.23).
    /// But what the ranks of decode have is reduced to the least, and a rank that has all sends ABORT when another fails
    /// (`ensure_abort_notified(force_arm=True)`, `decode.py`): of ranks elsewhere it cannot be told.
    pub(crate) fn abort_of_concluded(&mut self, seen: &Seen<'_>, room: u64, decode: EndpointId) {
        let tomb = self.numbers.tomb(room);
        let late = tomb.is_some_and(|t| t.heard > 0 && seen.at.since(t.closed_at) >= self.config.floor);
        if seen.role != Role::Decode || !late {
            return;
        }
        let (heard, ranks) = (tomb.map_or(0, |t| u32::from(t.heard)), self.decode_ranks(decode));
        let confidence = match ranks {
            Some(n) if n <= heard && self.waited_for(room) => Confidence::Certain,
            Some(n) if n <= heard => Confidence::Likely,
            _ => Confidence::Possible,
        };
        let list = &mut self.http.late_aborts.0;
        if list.len() >= MAX_RANKS && !list.contains_key(&decode) {
            return;
        }
        let new = Held { rooms: Vec::new(), count: 0, confidence, since: seen.at, last: seen.at };
        let held = list.entry(decode).or_insert(new);
        held.last = seen.at;
        held.confidence = held.confidence.max(confidence);
        // An ABORT goes to every prefill rank of the room.
        if held.rooms.contains(&room) {
            return;
        }
        held.count = held.count.saturating_add(1);
        if held.rooms.len() < MAX_ROOMS {
            held.rooms.push(room);
        }
        let (rooms, room_count, since) = (held.rooms.clone(), held.count, held.since);
        let confidence = held.confidence;
        let Some(at) = self.peers.address(decode) else { return };
        let engine = self.party(Role::Decode, decode, true);
        let actions =
            if confidence == Confidence::Possible { vec![look_elsewhere()] } else { vec![restart(&engine)] };
        self.raise(Finding {
            group: group(at),
            class: Class::ConcludedButHeld,
            confidence,
            engine,
            rooms,
            room_count,
            since,
            closed_at: None,
            evidence: vec![
                format!(
                    "decode at {at} sent ABORT for {room_count} rooms long after every STATUS that they need had come to it"
                ),
                match confidence {
                    Confidence::Certain => STATUS_THREAD.to_owned(),
                    Confidence::Likely => OR_ELSE.to_owned(),
                    Confidence::Possible => ranks_elsewhere(ranks, heard),
                },
            ],
            actions,
        });
    }

    /// Whether decode's own request of a closed room still waits for its answer, at an engine that never stood still: then
    /// nobody has hung up, and an ABORT is that of decode's waiting timeout.
    fn waited_for(&self, number: u64) -> bool {
        self.last_closed(number).is_some_and(|r| {
            let waits = r.leg(Role::Decode).is_some_and(|l| l.here && l.is_open());
            waits && !self.ever_stopped(r)
        })
    }

    pub(super) fn look_at_late_aborts(&mut self, now: Mono) {
        let list = &mut self.http.late_aborts.0;
        let over: Vec<_> =
            list.iter().filter(|(_, h)| now.since(h.last) >= OVER).map(|(id, _)| *id).collect();
        for id in over {
            self.http.late_aborts.0.remove(&id);
            if let Some(at) = self.peers.address(id) {
                self.lower(group(at), now);
            }
        }
    }
}

fn ranks_elsewhere(ranks: Option<u32>, heard: u32) -> String {
    let of =
        ranks.map_or_else(|| "no REGISTER of it was seen".to_owned(), |n| format!("its REGISTER says {n}"));
    format!(
        "{heard} ranks of decode were seen here to have them; how many it has: {of}. One elsewhere that has not its own makes all \
         send ABORT, and so does a hang-up meanwhile: a rank that is well does the same"
    )
}

fn look_elsewhere() -> Action {
    Action {
        command: "roomtrace rooms".to_owned(),
        effect: "to be run at the hosts of decode's other ranks, and at prefill: shows which rank has not told or heard how \
                 these rooms ended"
            .to_owned(),
        blast_radius: "none".to_owned(),
        clears: false,
    }
}

fn restart(engine: &Party) -> Action {
    let pid = engine.task.map_or_else(|| "PID_OF_RANK".to_owned(), |t| t.tgid.to_string());
    Action {
        command: format!("kill -TERM {pid}"),
        effect: "ends the decode rank; its supervisor starts the engine again".to_owned(),
        blast_radius: "every request of that engine".to_owned(),
        clears: true,
    }
}

fn group(at: std::net::SocketAddr) -> u64 {
    cause(&[Class::ConcludedButHeld.label(), &at.to_string()])
}
