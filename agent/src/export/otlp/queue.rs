//! What waits for delivery: bounded in number and bytes, flagged first, grouped by the process it is about.
//!
//! No I/O. What is taken out stays counted until it is delivered or given back, so a receiver that is down
//! cannot make the agent hold more than the bound.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio::sync::Notify;

use super::resource::ProcessKey;
use crate::export::otlp::QueueConfig;

/// Items in a request at most.
pub(super) const REQUEST_ITEMS: usize = 512;

/// Bytes in a request at most: gRPC servers accept 4 MiB unless told otherwise, and estimates are upper bounds.
pub(super) const REQUEST_BYTES: usize = 3 << 20;

/// What one event gives for one process.
#[derive(Debug)]
pub(super) struct Item<T> {
    /// Speaks of a room that is or was pinned.
    pub(super) flagged: bool,
    /// Whose resource it is exported under.
    pub(super) process: Option<ProcessKey>,
    /// An upper bound of its encoded size.
    pub(super) bytes: usize,
    /// When it came.
    pub(super) born: Instant,
    /// Spans or records, kept together.
    pub(super) payload: Vec<T>,
}

/// Items of one process, in the order they came.
pub(super) type Batch<T> = Vec<Item<T>>;

#[derive(Debug)]
pub(super) struct Queue<T> {
    limits: QueueConfig,
    state: Mutex<State<T>>,
    /// Something came.
    arrived: Notify,
    /// Something came that should not wait for company: flagged, or enough for a whole request, or the end.
    urgent: Notify,
    /// Something went.
    left: Notify,
    /// It was closed.
    ended: Notify,
}

#[derive(Debug)]
struct State<T> {
    flagged: Lane<T>,
    rest: Lane<T>,
    /// Of all items here or taken out; `units` are their spans or records.
    items: usize,
    units: u64,
    bytes: usize,
    closed: bool,
}

/// Items by process; processes take turns.
#[derive(Debug)]
struct Lane<T> {
    turns: VecDeque<Option<ProcessKey>>,
    waiting: HashMap<Option<ProcessKey>, VecDeque<Item<T>>>,
}

impl<T> Default for Lane<T> {
    fn default() -> Self {
        Self { turns: VecDeque::new(), waiting: HashMap::new() }
    }
}

impl<T> Lane<T> {
    fn push(&mut self, item: Item<T>, front: bool) {
        let key = item.process;
        let of_process = self.waiting.entry(key).or_default();
        if of_process.is_empty() {
            if front {
                self.turns.push_front(key);
            } else {
                self.turns.push_back(key);
            }
        }
        if front {
            of_process.push_front(item);
        } else {
            of_process.push_back(item);
        }
    }

    /// The oldest of the process whose turn it is.
    fn pop(&mut self) -> Option<Item<T>> {
        self.take(1, usize::MAX).pop()
    }

    /// Of the process whose turn it is: at least one item, no more than the limits allow.
    fn take(&mut self, items: usize, bytes: usize) -> Batch<T> {
        let mut batch = Vec::new();
        let Some(key) = self.turns.pop_front() else { return batch };
        let Some(mut of_process) = self.waiting.remove(&key) else { return batch };
        let mut size = 0;
        while let Some(next) = of_process.front() {
            if !batch.is_empty() && (batch.len() >= items || size + next.bytes > bytes) {
                break;
            }
            size += next.bytes;
            batch.extend(of_process.pop_front());
        }
        if !of_process.is_empty() {
            self.turns.push_back(key);
            self.waiting.insert(key, of_process);
        }
        batch
    }
}

impl<T> Queue<T> {
    pub(super) fn new(limits: QueueConfig) -> Self {
        let state = State {
            flagged: Lane::default(),
            rest: Lane::default(),
            items: 0,
            units: 0,
            bytes: 0,
            closed: false,
        };
        Self {
            limits,
            state: Mutex::new(state),
            arrived: Notify::new(),
            urgent: Notify::new(),
            left: Notify::new(),
            ended: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State<T>> {
        // Nothing panics while it is held; were it so, the counts are still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an item in. Returns what had to go for it, or itself: unflagged ones go before flagged ones.
    pub(super) fn push(&self, item: Item<T>) -> Vec<Item<T>> {
        let mut state = self.state();
        let mut gone = Vec::new();
        let fits = |s: &State<T>| {
            s.items < self.limits.items && s.bytes.saturating_add(item.bytes) <= self.limits.bytes
        };
        while item.flagged && !fits(&state) {
            let Some(old) = state.rest.pop() else { break };
            state.release(&old);
            gone.push(old);
        }
        if state.closed || !fits(&state) {
            gone.push(item);
            return gone;
        }
        state.items += 1;
        state.units += item.payload.len() as u64;
        state.bytes += item.bytes;
        let urgent = item.flagged || self.fills_a_request(&state);
        let lane = if item.flagged { &mut state.flagged } else { &mut state.rest };
        lane.push(item, false);
        drop(state);
        self.arrived.notify_one();
        if urgent {
            self.urgent.notify_one();
        }
        gone
    }

    /// Waits until `bytes` more would fit (or nothing is left that could go).
    pub(super) async fn place(&self, bytes: usize) {
        loop {
            let left = self.left.notified();
            {
                let s = self.state();
                let fits = s.items < self.limits.items && s.bytes.saturating_add(bytes) <= self.limits.bytes;
                if fits || s.items == 0 || s.closed {
                    return;
                }
            }
            left.await;
        }
    }

    /// Something to deliver, flagged first; empty when there is nothing.
    pub(super) fn take(&self, items: usize, bytes: usize) -> Batch<T> {
        let mut state = self.state();
        let batch = state.flagged.take(items, bytes);
        if batch.is_empty() { state.rest.take(items, bytes) } else { batch }
    }

    /// A batch that could not be delivered yet comes back, in front.
    pub(super) fn give_back(&self, batch: Batch<T>) {
        let mut state = self.state();
        for item in batch.into_iter().rev() {
            let lane = if item.flagged { &mut state.flagged } else { &mut state.rest };
            lane.push(item, true);
        }
    }

    /// Items that were taken out are delivered or lost for good.
    pub(super) fn done(&self, batch: &[Item<T>]) {
        let mut state = self.state();
        for item in batch {
            state.release(item);
        }
        drop(state);
        self.left.notify_waiters();
    }

    /// Nothing comes in any more.
    pub(super) fn close(&self) {
        self.state().closed = true;
        self.arrived.notify_one();
        self.urgent.notify_one();
        self.left.notify_waiters();
        self.ended.notify_waiters();
    }

    /// Whether it is closed.
    pub(super) fn closed(&self) -> bool {
        self.state().closed
    }

    /// Waits for something to deliver. `false`: closed, and all is delivered.
    pub(super) async fn ready(&self) -> bool {
        loop {
            {
                let state = self.state();
                if !state.flagged.turns.is_empty() || !state.rest.turns.is_empty() {
                    return true;
                }
                if state.closed {
                    return false;
                }
            }
            self.arrived.notified().await;
        }
    }

    /// Waits until something must not wait for company any longer.
    pub(super) async fn urgent(&self) {
        let now = {
            let s = self.state();
            s.closed || !s.flagged.turns.is_empty() || self.fills_a_request(&s)
        };
        if !now {
            self.urgent.notified().await;
        }
    }

    /// Whether waiting longer makes requests no larger, or fills half of what may wait.
    fn fills_a_request(&self, state: &State<T>) -> bool {
        state.items >= REQUEST_ITEMS.min(self.limits.items / 2)
            || state.bytes >= REQUEST_BYTES.min(self.limits.bytes / 2)
    }

    /// Waits for the end.
    pub(super) async fn closing(&self) {
        let ended = self.ended.notified();
        if !self.closed() {
            ended.await;
        }
    }

    /// Spans or records that are neither delivered nor lost.
    pub(super) fn remaining(&self) -> u64 {
        self.state().units
    }
}

impl<T> State<T> {
    fn release(&mut self, item: &Item<T>) {
        self.items = self.items.saturating_sub(1);
        self.units = self.units.saturating_sub(item.payload.len() as u64);
        self.bytes = self.bytes.saturating_sub(item.bytes);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
    use super::*;
    use std::time::Duration;

    fn queue(items: usize, bytes: usize) -> Queue<u32> {
        Queue::new(QueueConfig { items, bytes, keep: Duration::from_secs(1) })
    }

    fn item(n: u32, flagged: bool, pid: Option<u32>) -> Item<u32> {
        let process = pid.map(|p| ProcessKey::from(crate::export::testing::task(p)));
        Item { flagged, process, bytes: 10, born: Instant::now(), payload: vec![n] }
    }

    fn numbers(batch: &[Item<u32>]) -> Vec<u32> {
        batch.iter().flat_map(|i| i.payload.clone()).collect()
    }

    #[test]
    fn flagged_ones_are_taken_first_and_displace_others_but_never_each_other() {
        let q = queue(3, 1000);
        for n in 0..3 {
            assert!(q.push(item(n, false, None)).is_empty());
        }
        assert_eq!(numbers(&q.push(item(9, false, None))), [9]);
        assert_eq!(numbers(&q.push(item(10, true, None))), [0]);
        assert_eq!(numbers(&q.push(item(11, true, None))), [1]);
        assert_eq!(numbers(&q.push(item(12, true, None))), [2]);
        assert_eq!(numbers(&q.push(item(13, true, None))), [13]);
        assert_eq!(numbers(&q.take(10, 1000)), [10, 11, 12]);
    }

    #[test]
    fn bytes_are_bounded_too_and_what_is_taken_out_still_counts() {
        let q = queue(100, 25);
        assert!(q.push(item(0, false, None)).is_empty());
        assert!(q.push(item(1, false, None)).is_empty());
        assert_eq!(q.push(item(2, false, None)).len(), 1);
        let batch = q.take(10, 1000);
        assert_eq!(q.push(item(3, false, None)).len(), 1);
        q.done(&batch);
        assert!(q.push(item(4, false, None)).is_empty());
    }

    #[test]
    fn processes_take_turns_and_a_batch_has_one_process() {
        let q = queue(100, 1000);
        for n in 0..4 {
            q.push(item(n, false, Some(n % 2)));
        }
        assert_eq!(numbers(&q.take(1, 1000)), [0]);
        assert_eq!(numbers(&q.take(10, 1000)), [1, 3]);
        assert_eq!(numbers(&q.take(10, 1000)), [2]);
        assert!(q.take(10, 1000).is_empty());
    }

    #[test]
    fn a_batch_given_back_comes_first_again_in_its_order() {
        let q = queue(100, 1000);
        for n in 0..4 {
            q.push(item(n, false, None));
        }
        let batch = q.take(2, 1000);
        q.give_back(batch);
        assert_eq!(numbers(&q.take(10, 1000)), [0, 1, 2, 3]);
    }

    #[test]
    fn a_batch_keeps_to_the_bytes_but_an_item_too_large_for_any_goes_alone() {
        let q = queue(100, 1000);
        for n in 0..3 {
            q.push(item(n, false, None));
        }
        assert_eq!(numbers(&q.take(10, 20)), [0, 1]);
        assert_eq!(numbers(&q.take(10, 5)), [2]);
    }

    #[tokio::test]
    async fn closing_ends_the_wait_when_all_is_delivered() {
        let q = queue(100, 1000);
        q.push(item(0, false, None));
        q.close();
        assert!(q.ready().await);
        assert_eq!(q.push(item(1, true, None)).len(), 1);
        q.take(1, 1000);
        assert!(!q.ready().await);
    }
}
