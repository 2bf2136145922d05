//! Where open rooms live: slots with generations, linked in the order of opening; and what stands
//! behind each number.
//!
//! Pure and bounded: the caller limits the slots, [`Numbers`] limits the closed ones itself.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::event::Mono;
use crate::rooms::peers::NONE;
use crate::rooms::room::Room;

/// Open rooms.
#[derive(Debug)]
pub(crate) struct Slab {
    slots: Vec<Option<Box<Room>>>,
    free: Vec<u32>,
    generation: u32,
    first: u32,
    last: u32,
    len: usize,
}

impl Slab {
    pub(crate) const fn new() -> Self {
        Self { slots: Vec::new(), free: Vec::new(), generation: 0, first: NONE, last: NONE, len: 0 }
    }

    pub(crate) const fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn get(&self, slot: u32) -> Option<&Room> {
        self.slots.get(slot as usize).and_then(Option::as_deref)
    }

    pub(crate) fn get_mut(&mut self, slot: u32) -> Option<&mut Room> {
        self.slots.get_mut(slot as usize).and_then(Option::as_deref_mut)
    }

    /// The room of a slot, if it is still the one that `generation` means.
    pub(crate) fn current(&mut self, slot: u32, generation: u32) -> Option<&mut Room> {
        self.get_mut(slot).filter(|r| r.generation == generation)
    }

    pub(crate) fn insert(&mut self, mut room: Room) -> u32 {
        self.generation = self.generation.wrapping_add(1);
        room.generation = self.generation;
        room.previous = self.last;
        room.next = NONE;
        let slot = self.free.pop().unwrap_or_else(|| u32::try_from(self.slots.len()).unwrap_or(NONE));
        if self.slots.len() <= slot as usize {
            self.slots.push(None);
        }
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = Some(Box::new(room));
        }
        match self.last {
            NONE => self.first = slot,
            last => {
                if let Some(r) = self.get_mut(last) {
                    r.next = slot;
                }
            }
        }
        self.last = slot;
        self.len += 1;
        slot
    }

    pub(crate) fn remove(&mut self, slot: u32) -> Option<Box<Room>> {
        let room = self.slots.get_mut(slot as usize)?.take()?;
        self.free.push(slot);
        self.len -= 1;
        match room.previous {
            NONE => self.first = room.next,
            p => {
                if let Some(r) = self.get_mut(p) {
                    r.next = room.next;
                }
            }
        }
        match room.next {
            NONE => self.last = room.previous,
            n => {
                if let Some(r) = self.get_mut(n) {
                    r.previous = room.previous;
                }
            }
        }
        Some(room)
    }

    /// Oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Room> {
        let mut slot = self.first;
        std::iter::from_fn(move || {
            let room = self.get(slot)?;
            slot = room.next;
            Some(room)
        })
    }
}

/// A number whose room has closed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tomb {
    pub(crate) incarnation: u32,
    pub(crate) closed_at: Mono,
}

/// What stands behind a room number.
#[derive(Clone, Copy, Debug)]
struct Place {
    /// Slot of its open room, [`NONE`] when it has closed.
    slot: u32,
    last: Tomb,
}

/// Room numbers: those of open rooms, and those of closed ones, so that late messages open nothing and lives
/// are counted. Of the closed ones the oldest make way.
#[derive(Debug)]
pub(crate) struct Numbers {
    places: HashMap<u64, Place>,
    closed: VecDeque<(u64, u32)>,
    max_closed: usize,
}

impl Numbers {
    pub(crate) fn new(max_closed: usize) -> Self {
        Self { places: HashMap::new(), closed: VecDeque::new(), max_closed }
    }

    /// Slot of the open room.
    pub(crate) fn open(&self, room: u64) -> Option<u32> {
        self.places.get(&room).map(|p| p.slot).filter(|s| *s != NONE)
    }

    /// The last room of this number, if it has closed.
    pub(crate) fn tomb(&self, room: u64) -> Option<Tomb> {
        self.places.get(&room).filter(|p| p.slot == NONE).map(|p| p.last)
    }

    pub(crate) fn begin(&mut self, room: u64, slot: u32, incarnation: u32) {
        self.places.insert(room, Place { slot, last: Tomb { incarnation, closed_at: Mono(0) } });
    }

    pub(crate) fn end(&mut self, room: u64, last: Tomb) {
        self.places.insert(room, Place { slot: NONE, last });
        self.closed.push_back((room, last.incarnation));
        if self.closed.len() > self.max_closed
            && let Some((old, incarnation)) = self.closed.pop_front()
            // A number used again has a later entry: only the last one takes it away.
            && self.places.get(&old).is_some_and(|p| p.slot == NONE && p.last.incarnation == incarnation)
        {
            self.places.remove(&old);
        }
    }
}
