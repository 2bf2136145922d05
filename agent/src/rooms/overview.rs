//! The rooms that a person looks at first: the pinned ones, surest first, and the oldest of the others. Words are made of those alone.
//!
//! Pure. Costs a walk over the open rooms at most, however many are shown.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::event::Mono;
use crate::rooms::model::RoomSnapshot;
use crate::rooms::table::{RoomTable, does_not_age};
use crate::verdict::model::Confidence;

/// Some of the open rooms, and how many there are.
#[derive(Clone, Debug, Default)]
pub struct Overview {
    /// Pinned rooms: the surest first, of these the oldest.
    pub pinned: Vec<RoomSnapshot>,
    /// How many are pinned, by [`Confidence::ALL`].
    pub pinned_count: [usize; Confidence::ALL.len()],
    /// Open rooms that are not pinned, oldest first, without those whose end cannot be seen or that owe nothing here.
    pub oldest: Vec<RoomSnapshot>,
    /// How many rooms are open and not pinned, with those that are left out.
    pub others_count: usize,
    /// When.
    pub at: Mono,
}

impl RoomTable {
    /// At most `pinned` pinned rooms and `oldest` others.
    pub fn overview(&self, pinned: usize, oldest: usize) -> Overview {
        let mut out = Overview { at: self.now, ..Overview::default() };
        // The last of those kept is on top, and gives way to one that comes before it.
        let mut first = BinaryHeap::with_capacity(pinned.saturating_add(1).min(self.pinned.len()));
        for slot in &self.pinned {
            let Some(room) = self.rooms.get(*slot) else { continue };
            let Some(j) = room.judgement.as_deref() else { continue };
            if let Some(count) = out.pinned_count.get_mut(j.confidence as usize) {
                *count += 1;
            }
            first.push((Reverse(j.confidence), room.opened_at, room.room, *slot));
            if first.len() > pinned {
                first.pop();
            }
        }
        let slots = first.into_sorted_vec();
        let rooms = slots.iter().filter_map(|(.., slot)| self.rooms.get(*slot));
        out.pinned = rooms.map(|r| self.snapshot_of(r, self.now)).collect();
        out.others_count = self.rooms.len().saturating_sub(out.pinned_count.iter().sum());
        let ages = |class| !does_not_age(class);
        let waits = self
            .rooms
            .iter()
            .filter(|r| r.judgement.as_ref().is_none_or(|j| !j.class.pins() && ages(j.class)));
        out.oldest = waits.take(oldest).map(|r| self.snapshot_of(r, self.now)).collect();
        out
    }
}
