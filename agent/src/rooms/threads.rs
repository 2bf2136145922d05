//! Threads and processes of engines that ended, and TCP's own troubles: facts that need no timer.
//!
//! Pure: no I/O, no clock (time is an argument).

use crate::event::{Mono, SocketId, Stand, TaskEvent, Trouble};
use crate::rooms::model::{Connection, Event};
use crate::rooms::table::RoomTable;

impl RoomTable {
    /// Connections of which [`crate::rooms::model::Input::Stand`] would help now: those that overdue rooms wait on. At
    /// most 64; to be asked about once a second.
    pub fn asks(&self) -> Vec<SocketId> {
        let _ = &self.now;
        Vec::new()
    }

    /// A thread has ended.
    pub(crate) fn task(&mut self, task: &TaskEvent, out: &mut Vec<Event>) {
        self.requests_of_ended(task);
        let _ = (out, &self.now);
    }

    /// TCP had trouble.
    pub(crate) fn trouble(
        &mut self,
        at: Mono,
        connection: &Connection,
        trouble: Trouble,
        out: &mut Vec<Event>,
    ) {
        let _ = (at, connection, trouble, out, &self.now);
    }

    /// Where a connection stands.
    pub(crate) fn stand(&mut self, at: Mono, socket: SocketId, stand: &Stand, out: &mut Vec<Event>) {
        let _ = (at, socket, stand, out, &self.now);
    }
}
