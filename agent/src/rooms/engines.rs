//! Engines as their host has them: which processes belong together, where they run, what they say of themselves, and
//! the findings that follow from it.
//!
//! Pure: no I/O, no clock (time is an argument).

use crate::event::Mono;
use crate::rooms::model::{Connection, EngineGauges, EngineProcess, Event, Unreadable};
use crate::rooms::table::RoomTable;

impl RoomTable {
    /// A process of an engine.
    pub(crate) fn process(&mut self, at: Mono, process: &EngineProcess, out: &mut Vec<Event>) {
        self.http.engines.meet(process);
        let _ = (at, out, &self.now);
    }

    /// What an engine says of itself.
    pub(crate) fn gauged(&mut self, at: Mono, gauges: &EngineGauges, out: &mut Vec<Event>) {
        self.requests_gauged(at, gauges);
        let _ = (out, &self.now);
    }

    /// A connection that cannot be read.
    pub(crate) fn unreadable(
        &mut self,
        at: Mono,
        connection: &Connection,
        why: Unreadable,
        out: &mut Vec<Event>,
    ) {
        self.requests_unreadable(connection);
        let _ = (at, why, out, &self.now);
    }
}
