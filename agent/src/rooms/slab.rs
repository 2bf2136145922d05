//! Where rooms live: open ones in slots with generations, linked in the order of opening; the last closed ones
//! in a ring; and what stands behind each number.
//!
//! Pure and bounded: the caller limits the slots, [`Closed`] and [`Numbers`] limit themselves. Memory of closed
//! rooms is used again, because at full rate rooms come and go faster than an allocator likes.

use hashbrown::HashMap;

use crate::event::Mono;
use crate::rooms::peers::{EndpointId, NONE};
use crate::rooms::room::Room;

/// Rooms whose memory is kept for the next ones: few, so that it is still in the cache.
const MAX_SPARE: usize = 64;

/// Open rooms.
#[derive(Debug)]
pub(crate) struct Slab {
    slots: Vec<Option<Box<Room>>>,
    free: Vec<u32>,
    /// Memory of rooms that have closed, for the next ones.
    #[allow(clippy::vec_box, reason = "the boxes go back into the slots as they are")]
    spare: Vec<Box<Room>>,
    generation: u32,
    first: u32,
    last: u32,
    len: usize,
}

impl Slab {
    pub(crate) const fn new() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            spare: Vec::new(),
            generation: 0,
            first: NONE,
            last: NONE,
            len: 0,
        }
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

    /// Opens a room in a free slot.
    pub(crate) fn open(
        &mut self,
        number: u64,
        incarnation: u32,
        at: Mono,
        home: (EndpointId, EndpointId),
    ) -> u32 {
        self.generation = self.generation.wrapping_add(1);
        let mut room = match self.spare.pop() {
            Some(mut room) => {
                room.begin(number, incarnation, at, home);
                room
            }
            None => Box::new(Room::new(number, incarnation, at, home)),
        };
        room.generation = self.generation;
        room.previous = self.last;
        room.next = NONE;
        let slot = self.free.pop().unwrap_or_else(|| u32::try_from(self.slots.len()).unwrap_or(NONE));
        if self.slots.len() <= slot as usize {
            self.slots.push(None);
        }
        if let Some(place) = self.slots.get_mut(slot as usize) {
            *place = Some(room);
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

    /// Takes the memory of a removed room back.
    pub(crate) fn reuse(&mut self, room: Box<Room>) {
        if self.spare.len() < MAX_SPARE {
            self.spare.push(room);
        }
    }

    /// Oldest first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Room> + Clone {
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
    /// Decode ranks of this host that had heard Success of every rank that owed it; 0 unless all of them had.
    pub(crate) heard: u16,
    /// Its number among the closed rooms that are kept ([`Closed::get`]), or [`NOT_KEPT`].
    pub(crate) kept: u64,
}

/// Nothing more is known of a closed room.
pub(crate) const NOT_KEPT: u64 = u64::MAX;

/// The last closed rooms with all that is known of them.
#[derive(Debug)]
pub(crate) struct Closed {
    #[allow(clippy::vec_box, reason = "the boxes come from the slots and go back into them as they are")]
    ring: Vec<Box<Room>>,
    /// Where the next one goes, once the ring is full: where the oldest is.
    next: usize,
    max: usize,
    /// How many were ever kept.
    kept: u64,
}

impl Closed {
    pub(crate) const fn new(max: usize) -> Self {
        Self { ring: Vec::new(), next: 0, max, kept: 0 }
    }

    pub(crate) const fn len(&self) -> usize {
        self.ring.len()
    }

    /// Keeps a room in place of the oldest. Returns its number, for [`Self::get_mut`], and the oldest, the memory of which
    /// is free now.
    pub(crate) fn keep(&mut self, room: Box<Room>) -> (u64, Option<Box<Room>>) {
        let number = self.kept;
        self.kept += 1;
        if self.ring.len() < self.max {
            self.ring.push(room);
            return (number, None);
        }
        let Some(oldest) = self.ring.get_mut(self.next) else { return (number, Some(room)) };
        self.next = (self.next + 1) % self.max;
        (number, Some(std::mem::replace(oldest, room)))
    }

    /// What [`Self::keep`] will give the next one as its number.
    pub(crate) const fn next_number(&self) -> u64 {
        self.kept
    }

    /// The room that was the `number`th to be kept, if it still is.
    pub(crate) fn get(&self, number: u64) -> Option<&Room> {
        self.ring.get(self.place(number)?).map(|room| &**room)
    }

    /// The same, to be changed.
    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut Room> {
        let place = self.place(number)?;
        self.ring.get_mut(place).map(|room| &mut **room)
    }

    fn place(&self, number: u64) -> Option<usize> {
        let back = self.kept.checked_sub(number)?;
        if number >= self.kept || back > self.ring.len() as u64 {
            return None;
        }
        usize::try_from(number.checked_rem(self.max as u64)?).ok()
    }

    /// Oldest first.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = &Room> {
        let (newer, older) = self.ring.split_at_checked(self.next).unwrap_or_default();
        older.iter().chain(newer).map(|room| &**room)
    }
}

/// Room numbers: those of open rooms, and those of closed ones, so that late messages open nothing and lives
/// are counted. Of the closed ones the older half makes way when the newer one is full: that costs nothing per
/// room, where forgetting one at a time means reading one from memory that has long left the cache.
#[derive(Debug)]
pub(crate) struct Numbers {
    open: HashMap<u64, Slot>,
    newer: HashMap<u64, Tomb>,
    older: HashMap<u64, Tomb>,
    max_half: usize,
}

/// Where an open room is, and which life of its number it is.
#[derive(Clone, Copy, Debug)]
struct Slot {
    slot: u32,
    incarnation: u32,
}

impl Numbers {
    /// Remembers between `max_half` and twice as many closed ones.
    pub(crate) fn new(max_half: usize) -> Self {
        Self { open: HashMap::new(), newer: HashMap::new(), older: HashMap::new(), max_half }
    }

    /// Slot of the open room.
    pub(crate) fn open(&self, room: u64) -> Option<u32> {
        self.open.get(&room).map(|p| p.slot)
    }

    /// The last room of this number, if it has closed.
    pub(crate) fn tomb(&self, room: u64) -> Option<Tomb> {
        if self.open.contains_key(&room) {
            return None;
        }
        self.newer.get(&room).or_else(|| self.older.get(&room)).copied()
    }

    /// The last `n` that closed, in no order.
    pub(crate) fn newest(&self, n: usize) -> Vec<(u64, Tomb)> {
        let older = if self.newer.len() < n { Some(&self.older) } else { None };
        let tombs = self.newer.iter().chain(older.into_iter().flatten());
        let mut tombs: Vec<_> = tombs.map(|(r, t)| (*r, *t)).collect();
        if tombs.len() > n {
            tombs.select_nth_unstable_by_key(n, |(_, t)| std::cmp::Reverse(t.closed_at));
            tombs.truncate(n);
        }
        tombs
    }

    /// Remembers a number whose room has closed elsewhere.
    pub(crate) fn bury(&mut self, room: u64, tomb: Tomb) {
        if self.newer.len() < self.max_half {
            self.newer.insert(room, tomb);
        }
    }

    pub(crate) fn begin(&mut self, room: u64, slot: u32, incarnation: u32) {
        self.open.insert(room, Slot { slot, incarnation });
    }

    pub(crate) fn end(&mut self, room: u64, closed_at: Mono, heard: u16, kept: u64) {
        let Some(Slot { incarnation, .. }) = self.open.remove(&room) else { return };
        if self.newer.len() >= self.max_half {
            std::mem::swap(&mut self.newer, &mut self.older);
            self.newer.clear();
        }
        self.newer.insert(room, Tomb { incarnation, closed_at, heard, kept });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_closed_rooms_are_remembered_up_to_the_bound_and_lives_counted() {
        let mut numbers = Numbers::new(10);
        for room in 0..100 {
            numbers.begin(room, 7, 3);
            assert_eq!((numbers.open(room), numbers.tomb(room).is_none()), (Some(7), true));
            numbers.end(room, Mono(room), 0, room);
            assert_eq!((numbers.open(room), numbers.tomb(room).unwrap().incarnation), (None, 3));
            let kept = (0..=room).filter(|r| numbers.tomb(*r).is_some()).count();
            assert!(kept <= 20 && kept >= 10.min(usize::try_from(room).unwrap()), "{kept} after {room}");
            assert!(
                (room.saturating_sub(9)..=room).all(|r| numbers.tomb(r).is_some()),
                "the newest are kept"
            );
        }
        // A life more, while the last one is still remembered.
        numbers.begin(99, 1, 4);
        assert!(numbers.tomb(99).is_none());
        numbers.end(99, Mono(1000), 0, NOT_KEPT);
        assert_eq!(numbers.tomb(99).unwrap().incarnation, 4);
    }

    #[test]
    fn the_last_closed_rooms_are_kept_oldest_first() {
        let mut closed = Closed::new(3);
        for number in 0..8 {
            closed.keep(Box::new(Room::new(number, 0, Mono(number), (NONE, NONE))));
            let kept: Vec<u64> = closed.iter().map(|r| r.room).collect();
            assert_eq!(kept, (number.saturating_sub(2)..=number).collect::<Vec<_>>());
            let found: Vec<u64> = (0..10).filter_map(|n| Some(closed.get(n)?.room)).collect();
            assert_eq!(found, kept, "by their numbers");
        }
        assert_eq!(closed.len(), 3);
        let mut none = Closed::new(0);
        none.keep(Box::new(Room::new(1, 0, Mono(1), (NONE, NONE))));
        assert_eq!((none.len(), none.get(0).is_none(), closed.get(NOT_KEPT).is_none()), (0, true, true));
    }
}
