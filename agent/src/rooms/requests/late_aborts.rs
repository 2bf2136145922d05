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

/// Of one decode rank.
#[derive(Debug)]
struct Held {
    rooms: Vec<u64>,
    count: u32,
    since: Mono,
    last: Mono,
}

/// Of all decode ranks of this host.
#[derive(Debug, Default)]
pub(super) struct LateAborts(HashMap<EndpointId, Held>);

impl RoomTable {
    /// An ABORT of a room that has closed. A receiver that has taken Success in sends none, so one that comes long after it
    /// (not at once, when a client's hang-up and Success cross) proves that it never did.
    pub(crate) fn abort_of_concluded(&mut self, seen: &Seen<'_>, room: u64, decode: EndpointId) {
        let tomb = self.numbers.tomb(room);
        let late = tomb.is_some_and(|t| t.heard && seen.at.since(t.closed_at) >= self.config.floor);
        let list = &mut self.http.late_aborts.0;
        if seen.role != Role::Decode || !late || (list.len() >= MAX_RANKS && !list.contains_key(&decode)) {
            return;
        }
        let held =
            list.entry(decode).or_insert(Held { rooms: Vec::new(), count: 0, since: seen.at, last: seen.at });
        held.last = seen.at;
        // An ABORT goes to every prefill rank of the room.
        if held.rooms.contains(&room) {
            return;
        }
        held.count = held.count.saturating_add(1);
        if held.rooms.len() < MAX_ROOMS {
            held.rooms.push(room);
        }
        let (rooms, room_count, since) = (held.rooms.clone(), held.count, held.since);
        let Some(at) = self.peers.address(decode) else { return };
        let engine = self.party(Role::Decode, decode, true);
        let pid = engine.task.map_or_else(|| "PID_OF_RANK".to_owned(), |t| t.tgid.to_string());
        self.raise(Finding {
            group: group(at),
            class: Class::ConcludedButHeld,
            confidence: Confidence::Certain,
            engine,
            rooms,
            room_count,
            since,
            closed_at: None,
            evidence: vec![format!(
                "decode at {at} sent ABORT for {room_count} rooms long after every STATUS that they need had come to it: \
                 its status thread takes nothing in"
            )],
            actions: vec![Action {
                command: format!("kill -TERM {pid}"),
                effect: "ends the decode rank; its supervisor starts the engine again".to_owned(),
                blast_radius: "every request of that engine".to_owned(),
                clears: true,
            }],
        });
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
