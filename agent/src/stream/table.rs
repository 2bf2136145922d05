//! The sockets followed: a bounded map that forgets closed and idle ones.

use std::collections::VecDeque;

use hashbrown::HashMap;

use crate::event::{Mono, SECOND, SocketId};

/// A closed socket is kept this long, for calls that are reported behind its end.
const LINGER: u64 = SECOND;
/// A muted socket is kept until nothing was heard of it for this long: its source may fall silent without telling
/// of its close, and what is still on its way must not make it a new one.
const QUIET: u64 = 10 * SECOND;
/// libzmq closes a connection whose handshake is not done after this long, and sends its greeting with the first
/// bytes (`ZMQ_HANDSHAKE_IVL`, 30 s unless set: `handshake_ivl` in libzmq 4.3 `src/options.cpp`).
const HANDSHAKE: u64 = 30 * SECOND;
/// In a full table, a socket is given up when nothing was heard of it for this long.
const IDLE: u64 = 600 * SECOND;
/// A full table is searched for idle sockets this often at most.
const SWEEP: u64 = SECOND;

#[derive(Debug)]
struct Slot<T> {
    heard: Mono,
    value: T,
}

/// Bounded map from sockets to what is known of them.
#[derive(Debug)]
pub struct Table<T> {
    slots: HashMap<SocketId, Slot<T>>,
    closed: VecDeque<(Mono, SocketId)>,
    /// Muted sockets, each with when to look at it again at the earliest, less [`QUIET`].
    muted: VecDeque<(Mono, SocketId)>,
    /// Sockets that were opened, by when.
    opened: VecDeque<(Mono, SocketId)>,
    limit: usize,
    swept: Option<Mono>,
}

impl<T> Table<T> {
    /// At most `limit` sockets.
    pub fn new(limit: usize) -> Self {
        Self {
            slots: HashMap::new(),
            closed: VecDeque::new(),
            muted: VecDeque::new(),
            opened: VecDeque::new(),
            limit,
            swept: None,
        }
    }

    /// Sockets in it.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// What is known of `socket`.
    pub fn get_mut(&mut self, socket: SocketId, now: Mono) -> Option<&mut T> {
        let slot = self.slots.get_mut(&socket)?;
        slot.heard = slot.heard.max(now);
        Some(&mut slot.value)
    }

    /// When `socket` was last heard of.
    pub fn heard(&self, socket: SocketId) -> Option<Mono> {
        self.slots.get(&socket).map(|slot| slot.heard)
    }

    /// All sockets, in no order.
    pub fn iter(&self) -> impl Iterator<Item = (SocketId, &T)> {
        self.slots.iter().map(|(socket, slot)| (*socket, &slot.value))
    }

    /// Puts a socket in. Closed and idle sockets that had to make room go to `out`.
    ///
    /// # Errors
    /// Gives `value` back when the table is full.
    pub fn insert(
        &mut self,
        socket: SocketId,
        now: Mono,
        value: T,
        out: &mut impl FnMut(SocketId, T),
    ) -> Result<(), T> {
        if self.slots.len() >= self.limit {
            self.make_room(now, out);
        }
        if self.slots.len() >= self.limit {
            return Err(value);
        }
        self.slots.insert(socket, Slot { heard: now, value });
        Ok(())
    }

    /// Marks a socket closed (once per socket): it is forgotten a moment later.
    pub fn close(&mut self, socket: SocketId, now: Mono) {
        self.closed.push_back((now, socket));
    }

    /// The next socket whose time after its close is over, taken out.
    pub fn take_closed(&mut self, now: Mono) -> Option<(SocketId, T)> {
        while let Some((at, socket)) = self.closed.front().copied() {
            if now.since(at) < LINGER {
                return None;
            }
            self.closed.pop_front();
            if let Some(slot) = self.slots.remove(&socket) {
                return Some((socket, slot.value));
            }
        }
        None
    }

    /// Marks a socket as one of which nothing more is wanted (once per socket): it is forgotten when it is quiet.
    pub fn mute(&mut self, socket: SocketId, now: Mono) {
        self.muted.push_back((now, socket));
        // Those closed since are still listed.
        if self.muted.len() > self.limit.saturating_mul(2) {
            let Self { muted, slots, .. } = self;
            muted.retain(|(_, socket)| slots.contains_key(socket));
        }
    }

    /// The next muted socket of which nothing was heard for a while, taken out.
    pub fn take_muted(&mut self, now: Mono) -> Option<(SocketId, T)> {
        while let Some((at, socket)) = self.muted.front().copied() {
            if now.since(at) < QUIET {
                return None;
            }
            self.muted.pop_front();
            let Some(heard) = self.slots.get(&socket).map(|slot| slot.heard) else { continue };
            if now.since(heard) < QUIET {
                self.muted.push_back((heard, socket));
            } else if let Some(slot) = self.slots.remove(&socket) {
                return Some((socket, slot.value));
            }
        }
        None
    }

    /// Marks a socket as just opened: [`Table::next_opened`] names it when a handshake would long be over.
    pub fn opened(&mut self, socket: SocketId, now: Mono) {
        self.opened.push_back((now, socket));
        if self.opened.len() > self.limit.saturating_mul(2) {
            let Self { opened, slots, .. } = self;
            opened.retain(|(_, socket)| slots.contains_key(socket));
        }
    }

    /// The next socket, still there, that was opened longer ago than a handshake may take. Each is named once.
    pub fn next_opened(&mut self, now: Mono) -> Option<SocketId> {
        while let Some((_, socket)) = self.opened.pop_front_if(|(at, _)| now.since(*at) >= HANDSHAKE) {
            if self.slots.contains_key(&socket) {
                return Some(socket);
            }
        }
        None
    }

    /// Takes a socket out.
    pub fn remove(&mut self, socket: SocketId) -> Option<T> {
        self.slots.remove(&socket).map(|slot| slot.value)
    }

    fn make_room(&mut self, now: Mono, out: &mut impl FnMut(SocketId, T)) {
        while let Some((_, socket)) = self.closed.pop_front() {
            if let Some(slot) = self.slots.remove(&socket) {
                out(socket, slot.value);
                return;
            }
        }
        while let Some((_, socket)) = self.muted.pop_front() {
            if let Some(slot) = self.slots.remove(&socket) {
                out(socket, slot.value);
                return;
            }
        }
        if self.swept.is_some_and(|at| now.since(at) < SWEEP) {
            return;
        }
        self.swept = Some(now);
        for (socket, slot) in self.slots.extract_if(|_, slot| now.since(slot.heard) >= IDLE) {
            out(socket, slot.value);
        }
    }
}
