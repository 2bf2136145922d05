//! Requests at the engines' HTTP ports: which rooms they are for, and what their end says of them.
//!
//! Pure: no I/O, no clock (time is an argument).

use crate::event::Mono;
use crate::rooms::model::{BootstrapStep, Connection, Event, RequestStep};
use crate::rooms::table::RoomTable;

impl RoomTable {
    /// A step of a request.
    pub(crate) fn request(
        &mut self,
        at: Mono,
        connection: &Connection,
        server: bool,
        n: u64,
        step: &RequestStep<'_>,
        out: &mut Vec<Event>,
    ) {
        let _ = (at, connection, server, n, step, out, &self.now);
    }

    /// A step at a bootstrap server.
    pub(crate) fn bootstrap_step(
        &mut self,
        at: Mono,
        connection: &Connection,
        server: bool,
        n: u64,
        step: &BootstrapStep<'_>,
        out: &mut Vec<Event>,
    ) {
        let _ = (at, connection, server, n, step, out, &self.now);
    }
}
