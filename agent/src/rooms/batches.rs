//! What the optional probes say of a room: what was submitted for it, by which process, and what of it is over.
//!
//! Pure. Who submits for which room is decided in `control/batches.rs`.

use hashbrown::HashMap;

use crate::event::Mono;
use crate::rooms::model::{BatchNews, RoomBatches};
use crate::rooms::room::Room;
use crate::rooms::table::RoomTable;

/// Processes of one room, and processes of which it is remembered that something was missed.
const MAX_OF_ROOM: usize = 16;
const MAX_PROCESSES: usize = 1024;

/// When something of a process was last missed.
#[derive(Debug, Default)]
pub(crate) struct Missed(HashMap<u32, Mono>);

impl RoomTable {
    pub(crate) fn batch(&mut self, at: Mono, pid: u32, room: Option<u64>, news: &BatchNews) {
        if *news == BatchNews::Unclear {
            let missed = &mut self.missed_batches.0;
            // Where there is no place for one, an old one makes it: its rooms have ended.
            if missed.len() >= MAX_PROCESSES && !missed.contains_key(&pid) {
                let oldest = missed.iter().min_by_key(|(_, at)| **at).map(|(pid, _)| *pid);
                missed.remove(&oldest.unwrap_or_default());
            }
            missed.insert(pid, at);
            return;
        }
        let slot = room.and_then(|room| self.numbers.open(room));
        let Some(room) = slot.and_then(|slot| self.rooms.get_mut(slot)) else { return };
        let all = room.batches.get_or_insert_default();
        let place = all.iter().position(|b| b.pid == pid);
        let entry = match (place, news) {
            (Some(i), _) => all.get_mut(i),
            // What was submitted before nobody has seen.
            (None, BatchNews::Asked { .. }) if all.len() < MAX_OF_ROOM => {
                all.push(RoomBatches { pid, since: at, whole: true, ..RoomBatches::default() });
                all.last_mut()
            }
            (None, _) => None,
        };
        let Some(entry) = entry else { return };
        match *news {
            BatchNews::Asked { pages, whole } => {
                entry.pages = entry.pages.saturating_add(pages);
                entry.whole &= whole;
            }
            BatchNews::Submitted { bytes, requests } => {
                entry.batches += 1;
                entry.bytes = entry.bytes.saturating_add(bytes);
                entry.requests = entry.requests.saturating_add(requests);
                entry.first.get_or_insert(at);
                entry.last = Some(at);
            }
            BatchNews::Over => {
                entry.over += 1;
                entry.last_over = Some(at);
            }
            BatchNews::Ambiguous => {
                entry.ambiguous += 1;
                entry.whole = false;
            }
            BatchNews::Unclear => {}
        }
    }

    /// As they are now, with what has been missed since.
    pub(crate) fn room_batches(&self, room: &Room) -> Vec<RoomBatches> {
        let missed = |b: &RoomBatches| self.missed_batches.0.get(&b.pid).is_some_and(|at| *at >= b.since);
        let all = room.batches.as_deref().map(Vec::as_slice).unwrap_or_default();
        all.iter().map(|b| RoomBatches { whole: b.whole && !missed(b), ..*b }).collect()
    }
}
