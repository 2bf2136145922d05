//! Messages that the rooms have and nobody else had a place for: their clients were told to come again, and when they do the rooms
//! must not get them twice.
//!
//! No I/O. Known by a hash with a key of this process, so that nobody can make two messages alike. Bounded in number and time:
//! what falls out is taken for new when it comes again.

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher as _, RandomState};
use std::time::{Duration, Instant};

/// Messages remembered at most, 24 bytes each: forty engine processes, each with two a second, for more than three minutes.
const MOST: usize = 16_384;

/// SGLang's exporter gives up after a minute, a collector after five.
const KEEP: Duration = Duration::from_mins(6);

#[derive(Debug, Default)]
pub(super) struct Refused {
    key: RandomState,
    known: HashSet<u64>,
    /// Oldest first; those that have come again since are not `known` any more.
    order: VecDeque<(Instant, u64)>,
}

impl Refused {
    /// What a message, decompressed, is known by if any is known.
    pub(super) fn find(&mut self, now: Instant, message: &[u8]) -> Option<u64> {
        while self.order.front().is_some_and(|(at, _)| now.saturating_duration_since(*at) >= KEEP) {
            self.drop_oldest();
        }
        if self.known.is_empty() {
            return None;
        }
        let id = self.key.hash_one(message);
        self.known.contains(&id).then_some(id)
    }

    pub(super) fn remember(&mut self, now: Instant, message: &[u8]) {
        while self.order.len() >= MOST {
            self.drop_oldest();
        }
        let id = self.key.hash_one(message);
        if self.known.insert(id) {
            self.order.push_back((now, id));
        }
    }

    /// It has found a place. Were the same to come once more, it would be new.
    pub(super) fn forget(&mut self, id: u64) {
        self.known.remove(&id);
    }

    fn drop_oldest(&mut self) {
        if let Some((_, id)) = self.order.pop_front() {
            self.known.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_until_it_is_taken_or_old_and_no_more_than_so_many() {
        let (mut refused, start) = (Refused::default(), Instant::now());
        assert_eq!(refused.find(start, b"a"), None);
        refused.remember(start, b"a");
        let id = refused.find(start, b"a");
        assert!(id.is_some() && refused.find(start, b"b").is_none());
        assert_eq!(refused.find(start, b"a"), id, "asking changes nothing");
        refused.forget(id.unwrap_or_default());
        assert_eq!(refused.find(start, b"a"), None);
        refused.remember(start, b"old");
        assert_eq!(refused.find(start + KEEP, b"old"), None);
        assert!(refused.order.is_empty());
        for n in 0..=MOST {
            refused.remember(start, &n.to_le_bytes());
        }
        assert_eq!((refused.known.len(), refused.order.len()), (MOST, MOST));
        assert_eq!(refused.find(start, &0usize.to_le_bytes()), None, "the oldest made way");
        assert!(refused.find(start, &MOST.to_le_bytes()).is_some());
    }
}
