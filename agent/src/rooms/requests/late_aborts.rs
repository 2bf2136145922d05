//! ABORT of a room whose every STATUS decode had: it never took them in, and its waiting timeout says so (M19).
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: [`MAX_RANKS`] decode ranks, [`MAX_ROOMS`] rooms each.

use hashbrown::HashMap;

use crate::event::{Mono, SECOND};
use crate::rooms::findings::cause;
use crate::rooms::messages::Seen;
use crate::rooms::model::Role;
use crate::rooms::peers::EndpointId;
use crate::rooms::table::RoomTable;
use crate::verdict::model::{Action, Class, Confidence, Finding};

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
    /// Nothing else than a dead status thread is left for one of them.
    sure: bool,
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
    pub(crate) fn abort_of_concluded(&mut self, seen: &Seen<'_>, room: u64, decode: EndpointId) {
        let tomb = self.numbers.tomb(room);
        let late = tomb.is_some_and(|t| t.heard && seen.at.since(t.closed_at) >= self.config.floor);
        let sure = self.waited_for(room);
        let list = &mut self.http.late_aborts.0;
        if seen.role != Role::Decode || !late || (list.len() >= MAX_RANKS && !list.contains_key(&decode)) {
            return;
        }
        let new = Held { rooms: Vec::new(), count: 0, sure: false, since: seen.at, last: seen.at };
        let held = list.entry(decode).or_insert(new);
        held.last = seen.at;
        held.sure |= sure;
        // An ABORT goes to every prefill rank of the room.
        if held.rooms.contains(&room) {
            return;
        }
        held.count = held.count.saturating_add(1);
        if held.rooms.len() < MAX_ROOMS {
            held.rooms.push(room);
        }
        let (rooms, room_count, since, sure) = (held.rooms.clone(), held.count, held.since, held.sure);
        let Some(at) = self.peers.address(decode) else { return };
        let engine = self.party(Role::Decode, decode, true);
        let pid = engine.task.map_or_else(|| "PID_OF_RANK".to_owned(), |t| t.tgid.to_string());
        self.raise(Finding {
            group: group(at),
            class: Class::ConcludedButHeld,
            confidence: if sure { Confidence::Certain } else { Confidence::Likely },
            engine,
            rooms,
            room_count,
            since,
            closed_at: None,
            evidence: vec![
                format!(
                    "decode at {at} sent ABORT for {room_count} rooms long after every STATUS that they need had come to it"
                ),
                if sure { STATUS_THREAD } else { OR_ELSE }.to_owned(),
            ],
            actions: vec![Action {
                command: format!("kill -TERM {pid}"),
                effect: "ends the decode rank; its supervisor starts the engine again".to_owned(),
                blast_radius: "every request of that engine".to_owned(),
                clears: true,
            }],
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

fn group(at: std::net::SocketAddr) -> u64 {
    cause(&[Class::ConcludedButHeld.label(), &at.to_string()])
}
