//! Where open rooms live: slots with generations, linked in the order of opening; and the memory of those
//! that have closed.
//!
//! Pure and bounded: the caller limits the slots, [`Tombs`] limits itself.

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

/// Numbers of closed rooms, so that late messages open nothing and lives are counted. The oldest make way.
#[derive(Debug)]
pub(crate) struct Tombs {
    by_room: HashMap<u64, Tomb>,
    order: VecDeque<(u64, u32)>,
    max: usize,
}

impl Tombs {
    pub(crate) fn new(max: usize) -> Self {
        Self { by_room: HashMap::new(), order: VecDeque::new(), max }
    }

    pub(crate) fn get(&self, room: u64) -> Option<Tomb> {
        self.by_room.get(&room).copied()
    }

    pub(crate) fn insert(&mut self, room: u64, tomb: Tomb) {
        if self.order.len() >= self.max
            && let Some((old, incarnation)) = self.order.pop_front()
            // A number used again has a later entry: only the last one takes it away.
            && self.by_room.get(&old).is_some_and(|t| t.incarnation == incarnation)
        {
            self.by_room.remove(&old);
        }
        self.by_room.insert(room, tomb);
        self.order.push_back((room, tomb.incarnation));
    }
}
