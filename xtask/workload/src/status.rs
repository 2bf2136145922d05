//! `KVPoll` states and the table of them, with the rules of each engine release. Pure.
//!
//! Source: `base/conn.py` (values) and `update_status` / `check_status` of `common/conn.py` and `nixl/conn.py`.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::wire::Engine;

/// State of one room at one rank. The order is the engine's own: `max` of two states is the later one, except
/// that Failed sorts lowest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum KvPoll {
    Failed = 0,
    Bootstrapping = 1,
    WaitingForInput = 2,
    Transferring = 3,
    Success = 4,
}

impl KvPoll {
    /// Value on the wire.
    pub(crate) fn code(self) -> u8 {
        self as u8
    }

    /// From the wire.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        [Self::Failed, Self::Bootstrapping, Self::WaitingForInput, Self::Transferring, Self::Success]
            .into_iter()
            .find(|state| state.code() == code)
    }

    /// Whether nothing comes after it.
    pub(crate) fn terminal(self) -> bool {
        matches!(self, Self::Failed | Self::Success)
    }
}

/// `request_status` of a KV manager.
#[derive(Debug)]
pub(crate) struct StatusTable {
    engine: Engine,
    rooms: HashMap<u64, KvPoll>,
}

impl StatusTable {
    pub(crate) fn new(engine: Engine) -> Self {
        Self { engine, rooms: HashMap::new() }
    }

    /// The entry itself.
    pub(crate) fn entry(&self, room: u64) -> Option<KvPoll> {
        self.rooms.get(&room).copied()
    }

    /// What a sender's `poll` reads. An absent room reads `WaitingForInput` with NIXL before 0.5.22, so that a room
    /// already cleared looks alive, and Failed from 0.5.22 on.
    pub(crate) fn check(&self, room: u64) -> KvPoll {
        self.entry(room).unwrap_or(if self.engine.nixl() { KvPoll::WaitingForInput } else { KvPoll::Failed })
    }

    /// `update_status`.
    pub(crate) fn update(&mut self, room: u64, to: KvPoll) {
        let Some(current) = self.entry(room) else {
            let creates = match self.engine {
                // Until 0.5.19 anything but Failed makes an entry.
                Engine::Nixl0517 => to != KvPoll::Failed,
                _ => matches!(to, KvPoll::Bootstrapping | KvPoll::WaitingForInput),
            };
            if creates {
                self.rooms.insert(room, to);
            }
            return;
        };
        // Failed overrides and stays, in all three releases.
        let next = match (current, to) {
            (_, KvPoll::Failed) | (KvPoll::Failed, _) => KvPoll::Failed,
            _ => current.max(to),
        };
        self.rooms.insert(room, next);
    }

    /// `clear()` of a sender or receiver.
    pub(crate) fn clear(&mut self, room: u64) {
        self.rooms.remove(&room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_abort_of_an_unknown_room_leaves_nothing_behind() {
        for engine in [Engine::Mooncake0523, Engine::Nixl0517, Engine::Nixl0520] {
            let mut table = StatusTable::new(engine);
            table.update(7, KvPoll::Failed);
            assert_eq!(table.entry(7), None, "{engine:?}");
            // The sender made afterwards begins as if nothing had happened: this is the pin.
            table.update(7, KvPoll::Bootstrapping);
            assert_eq!(table.check(7), KvPoll::Bootstrapping);
        }
    }

    #[test]
    fn metadata_may_come_before_the_sender() {
        let mut table = StatusTable::new(Engine::Mooncake0523);
        table.update(7, KvPoll::WaitingForInput);
        table.update(7, KvPoll::Bootstrapping);
        assert_eq!(table.check(7), KvPoll::WaitingForInput);
    }

    #[test]
    fn failed_stays() {
        let mut table = StatusTable::new(Engine::Nixl0517);
        table.update(7, KvPoll::WaitingForInput);
        table.update(7, KvPoll::Failed);
        table.update(7, KvPoll::Success);
        assert_eq!(table.check(7), KvPoll::Failed);
    }

    #[test]
    fn absent_rooms_read_as_the_release_has_it() {
        assert_eq!(StatusTable::new(Engine::Nixl0517).check(7), KvPoll::WaitingForInput);
        assert_eq!(StatusTable::new(Engine::Mooncake0523).check(7), KvPoll::Failed);
        let mut table = StatusTable::new(Engine::Mooncake0523);
        table.update(7, KvPoll::Success);
        assert_eq!(table.entry(7), None, "a late result must not make an entry");
    }
}
