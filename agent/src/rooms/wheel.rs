//! A timer wheel over room slots: one deadline per slot, moved and removed in constant time, memory bound
//! to the number of slots.
//!
//! Pure: time is an argument. A deadline fires at the end of its grain, so at most one grain late.

use crate::event::Mono;

/// Nanoseconds of one bucket as a power of two: 2^27 ns = 134 ms, well below the second that a finding may
/// take.
const GRAIN_SHIFT: u32 = 27;

/// Buckets: 4096 × 134 ms ≈ 550 s. Later deadlines go round once more.
const BUCKETS: u64 = 4096;

/// No slot.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    next: u32,
    prev: u32,
    /// Bucket number (not modulo) at which it is due; `u64::MAX` when not in the wheel.
    due: u64,
    /// Bucket number at which it is stored.
    stored: u64,
}

const IDLE: Node = Node { next: NONE, prev: NONE, due: u64::MAX, stored: 0 };

/// Deadlines of slots.
#[derive(Debug)]
pub(crate) struct Wheel {
    heads: Box<[u32]>,
    nodes: Vec<Node>,
    /// First bucket number not drained.
    cursor: u64,
    count: usize,
}

impl Wheel {
    pub(crate) fn new() -> Self {
        let buckets = usize::try_from(BUCKETS).unwrap_or_default();
        Self { heads: vec![NONE; buckets].into_boxed_slice(), nodes: Vec::new(), cursor: 0, count: 0 }
    }

    /// Sets the deadline of `slot`, replacing the one it had.
    pub(crate) fn set(&mut self, slot: u32, deadline: Mono, now: Mono) {
        self.remove(slot);
        if self.count == 0 {
            self.cursor = self.cursor.max(now.0 >> GRAIN_SHIFT);
        }
        let index = slot as usize;
        if self.nodes.len() <= index {
            self.nodes.resize(index + 1, IDLE);
        }
        let due = (deadline.0 >> GRAIN_SHIFT).max(self.cursor);
        self.insert(slot, due);
        self.count += 1;
    }

    /// Takes `slot` out.
    pub(crate) fn remove(&mut self, slot: u32) {
        if self.unlink(slot) {
            self.count -= 1;
        }
    }

    /// The next slot whose deadline lies before `now`, with the moment it is due.
    pub(crate) fn pop(&mut self, now: Mono) -> Option<(u32, Mono)> {
        let end = now.0 >> GRAIN_SHIFT;
        while self.cursor < end {
            if self.count == 0 {
                self.cursor = end;
                return None;
            }
            let Some(slot) = self.head(self.cursor) else {
                self.cursor += 1;
                continue;
            };
            let due = self.nodes.get(slot as usize).map_or(0, |n| n.due);
            self.unlink(slot);
            if due > self.cursor {
                // Beyond the wheel's span: once more round (stored behind the cursor, so this ends).
                self.insert(slot, due);
                continue;
            }
            self.count -= 1;
            return Some((slot, Mono((self.cursor + 1) << GRAIN_SHIFT)));
        }
        None
    }

    fn head(&self, bucket: u64) -> Option<u32> {
        self.heads.get(bucket_index(bucket)).copied().filter(|slot| *slot != NONE)
    }

    fn insert(&mut self, slot: u32, due: u64) {
        let stored = due.min(self.cursor + BUCKETS - 1);
        let index = bucket_index(stored);
        let old = self.heads.get(index).copied().unwrap_or(NONE);
        if let Some(node) = self.nodes.get_mut(slot as usize) {
            *node = Node { next: old, prev: NONE, due, stored };
        }
        if let Some(next) = self.nodes.get_mut(old as usize) {
            next.prev = slot;
        }
        if let Some(head) = self.heads.get_mut(index) {
            *head = slot;
        }
    }

    fn unlink(&mut self, slot: u32) -> bool {
        let Some(node) = self.nodes.get_mut(slot as usize) else { return false };
        if node.due == u64::MAX {
            return false;
        }
        let Node { next, prev, stored, .. } = std::mem::replace(node, IDLE);
        if let Some(n) = self.nodes.get_mut(next as usize) {
            n.prev = prev;
        }
        match self.nodes.get_mut(prev as usize) {
            Some(p) => p.next = next,
            None => {
                if let Some(head) = self.heads.get_mut(bucket_index(stored)) {
                    *head = next;
                }
            }
        }
        true
    }
}

#[allow(clippy::cast_possible_truncation, reason = "below BUCKETS")]
const fn bucket_index(bucket: u64) -> usize {
    (bucket % BUCKETS) as usize
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]
mod tests {
    use super::*;
    use crate::event::SECOND;

    const GRAIN: u64 = 1 << GRAIN_SHIFT;

    fn drain(wheel: &mut Wheel, now: u64) -> Vec<u32> {
        std::iter::from_fn(|| wheel.pop(Mono(now)).map(|(slot, _)| slot)).collect()
    }

    #[test]
    fn fires_once_never_early_and_at_most_a_grain_late() {
        let start = 1_700_000_000 * SECOND;
        let mut wheel = Wheel::new();
        wheel.set(7, Mono(start + 10 * SECOND), Mono(start));
        assert!(drain(&mut wheel, start + 10 * SECOND - 1).is_empty());
        assert_eq!(drain(&mut wheel, start + 10 * SECOND + GRAIN), [7]);
        assert!(drain(&mut wheel, start + 100 * SECOND).is_empty());
    }

    #[test]
    fn moved_and_removed_deadlines_do_not_fire() {
        let mut wheel = Wheel::new();
        for slot in 0..5 {
            wheel.set(slot, Mono(SECOND), Mono(0));
        }
        wheel.remove(0);
        wheel.remove(4);
        wheel.set(2, Mono(20 * SECOND), Mono(0));
        let mut due = drain(&mut wheel, 2 * SECOND);
        due.sort_unstable();
        assert_eq!(due, [1, 3]);
        assert_eq!(drain(&mut wheel, 21 * SECOND), [2]);
    }

    #[test]
    fn deadlines_beyond_the_span_go_round() {
        let mut wheel = Wheel::new();
        wheel.set(1, Mono(5000 * SECOND), Mono(0));
        for s in 0..5000 {
            assert!(drain(&mut wheel, s * SECOND).is_empty(), "at {s}");
        }
        assert_eq!(drain(&mut wheel, 5001 * SECOND), [1]);
    }
}
