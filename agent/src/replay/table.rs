//! The connections of a capture, by their two addresses. Bounded: the longest idle ones make room for new ones.

use std::net::SocketAddr;

use hashbrown::HashMap;

use super::connection::{Connection, Out, Side};
use super::direction::Name;
use super::packet::Segment;
use super::unacked::Store;
use super::{MAX_CONNECTIONS, Summary};
use crate::event::{Addresses, Mono, SECOND, SocketEvent, SocketId};

/// How often connections with gaps are looked at, in capture time.
const GAP_CHECK: u64 = SECOND / 100;

/// The lower address first.
type Key = (SocketAddr, SocketAddr);

/// Every connection followed.
#[derive(Debug, Default)]
pub(super) struct Table {
    index: HashMap<Key, usize>,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Slot of the last segment: the next one is mostly its answer.
    last: usize,
    /// Slots of connections with gaps.
    gaps: Vec<usize>,
    next_check: Mono,
    store: Store,
    made: u64,
}

#[derive(Debug)]
struct Slot {
    /// The address of the connection's side A, which tells whose segment one is.
    a: SocketAddr,
    key: Key,
    connection: Option<Connection>,
}

impl Table {
    /// A segment of any connection.
    pub(super) fn segment<S: FnMut(SocketEvent<'_>)>(
        &mut self,
        at: Mono,
        s: &Segment<'_>,
        summary: &mut Summary,
        sink: &mut S,
    ) {
        let key = if s.from <= s.to { (s.from, s.to) } else { (s.to, s.from) };
        let mut found = self.find(&key);
        if let Some(slot) = found.and_then(|i| self.slots.get_mut(i))
            && let Some(old) = &mut slot.connection
            && old.is_replaced_by(side(slot.a, s), s)
        {
            let mut out = Out { at, store: &mut self.store, repairs: &mut summary.repairs, sink: &mut *sink };
            old.replaced(&mut out);
            self.remove(key);
            found = None;
        }
        let Some(i) = found.or_else(|| self.insert(key, at, s, summary, sink)) else { return };
        self.last = i;
        let Some(slot) = self.slots.get_mut(i) else { return };
        let Some(connection) = &mut slot.connection else { return };
        let mut out = Out { at, store: &mut self.store, repairs: &mut summary.repairs, sink };
        connection.segment(side(slot.a, s), s, &mut out);
        if connection.waits() && !connection.listed {
            connection.listed = true;
            self.gaps.push(i);
        }
    }

    fn find(&self, key: &Key) -> Option<usize> {
        let is_last = |slot: &Slot| slot.connection.is_some() && slot.key == *key;
        if self.slots.get(self.last).is_some_and(is_last) {
            return Some(self.last);
        }
        self.index.get(key).copied()
    }

    /// Goes on with the connections whose gaps have lasted long enough.
    pub(super) fn give_up_old_gaps<S: FnMut(SocketEvent<'_>)>(
        &mut self,
        at: Mono,
        summary: &mut Summary,
        sink: &mut S,
    ) {
        if !self.gaps.is_empty() && at >= self.next_check {
            self.next_check = at.plus(GAP_CHECK);
            self.give_up(false, at, summary, sink);
        }
    }

    /// Delivers whatever is held behind gaps: the capture has ended.
    pub(super) fn give_up_all_gaps<S: FnMut(SocketEvent<'_>)>(
        &mut self,
        at: Mono,
        summary: &mut Summary,
        sink: &mut S,
    ) {
        self.give_up(true, at, summary, sink);
    }

    fn give_up<S: FnMut(SocketEvent<'_>)>(
        &mut self,
        now: bool,
        at: Mono,
        summary: &mut Summary,
        sink: &mut S,
    ) {
        let (slots, store, repairs) = (&mut self.slots, &mut self.store, &mut summary.repairs);
        self.gaps.retain(|&i| {
            let Some(connection) = slots.get_mut(i).and_then(|s| s.connection.as_mut()) else { return false };
            connection
                .give_up(now, &mut Out { at, store: &mut *store, repairs: &mut *repairs, sink: &mut *sink });
            connection.listed = connection.waits();
            connection.listed
        });
    }

    fn insert<S: FnMut(SocketEvent<'_>)>(
        &mut self,
        key: Key,
        at: Mono,
        s: &Segment<'_>,
        summary: &mut Summary,
        sink: &mut S,
    ) -> Option<usize> {
        let name = |n, local, peer| Name { socket: SocketId(n), addresses: Addresses { local, peer } };
        let (a, b) = (name(2 * self.made + 1, s.from, s.to), name(2 * self.made + 2, s.to, s.from));
        let mut out = Out { at, store: &mut self.store, repairs: &mut summary.repairs, sink };
        let connection = Connection::first_seen(a, b, s, &mut out)?;
        self.made += 1;
        summary.connections += 1;
        summary.found += u64::from(connection.was_found());
        if self.index.len() >= MAX_CONNECTIONS {
            summary.evicted += self.evict();
        }
        let slot = Slot { a: s.from, key, connection: Some(connection) };
        let i = self.free.pop().unwrap_or(self.slots.len());
        match self.slots.get_mut(i) {
            Some(place) => *place = slot,
            None => self.slots.push(slot),
        }
        self.index.insert(key, i);
        Some(i)
    }

    fn remove(&mut self, key: Key) {
        let Some(i) = self.index.remove(&key) else { return };
        if let Some(slot) = self.slots.get_mut(i)
            && let Some(mut connection) = slot.connection.take()
        {
            connection.forget(&mut self.store);
        }
        self.gaps.retain(|&g| g != i);
        self.free.push(i);
    }

    /// Makes room: forgets an eighth of the connections, closed ones first, then the longest idle. How many of them
    /// were not closed.
    fn evict(&mut self) -> u64 {
        let mut order: Vec<(bool, Mono, Key)> = self
            .slots
            .iter()
            .filter_map(|s| s.connection.as_ref().map(|c| (!c.is_closed(), c.last, s.key)))
            .collect();
        let count = (order.len() / 8).max(1).min(order.len());
        if let Some(last) = count.checked_sub(1) {
            order.select_nth_unstable(last);
        }
        let mut open = 0;
        for (is_open, _, key) in order.into_iter().take(count) {
            open += u64::from(is_open);
            self.remove(key);
        }
        open
    }
}

fn side(a: SocketAddr, s: &Segment<'_>) -> Side {
    if s.from == a { Side::A } else { Side::B }
}
