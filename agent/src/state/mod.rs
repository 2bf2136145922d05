//! The state file: what an agent that is started again must know to keep its pins.
//!
//! An edge: reads and writes one file and reads `/proc`. The agent works without it; whatever is wrong with it costs what
//! it holds, one line in the log and a count, and never more. Writing happens on a thread of its own.

mod counters;
mod file;
mod process;
mod writer;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::event::Mono;
use crate::pipeline::Saved;
use crate::rooms::Survivors;

pub use counters::{Counters, Dropped};
pub use file::{MAX_BYTES, StateError, VERSION, decode, encode};
pub use writer::Writer;

use file::Place;

/// What is in the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Boot that its clock, socket cookies and process ids belong to (`/proc/sys/kernel/random/boot_id`).
    pub boot: String,
    /// Start of every process that it names, in clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub processes: BTreeMap<u32, u64>,
    /// The rest.
    pub pipeline: Saved,
}

/// A state file that this agent alone writes.
#[derive(Debug)]
pub struct Store {
    place: Place,
    boot: String,
    counters: Arc<Counters>,
}

impl Store {
    /// Takes the file at `path` for this agent. Makes the last directory of the path where it is missing.
    ///
    /// # Errors
    /// [`StateError`]: another agent has it, or it could not be written or trusted there.
    pub fn open(path: &Path, counters: Arc<Counters>) -> Result<Self, StateError> {
        let boot = process::boot().map_err(|source| StateError::Boot { source })?;
        Ok(Self { place: Place::take(path)?, boot, counters })
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.place.path().to_owned()
    }

    /// What the agent before left here, with which of its processes still run. `None`: nothing, or nothing that holds
    /// now; what is wrong with it is said once and counted.
    pub fn load(&self, now: Mono) -> Option<(Saved, Survivors)> {
        let state = match self.place.read() {
            Ok(bytes) => decode(&bytes?),
            Err(error) => Err(error),
        };
        let path = self.place.path().display();
        let state = match state {
            Ok(state) => state,
            Err(error) => {
                self.counters.drop_items(error.reason(), 1);
                tracing::warn!(%path, "the state file is of no use: {error}; rooms that were pinned before are not known");
                return None;
            }
        };
        if state.boot != self.boot || state.pipeline.at > now {
            self.counters.drop_items(Dropped::Boot, 1);
            tracing::info!(%path, "the state file is from before the last boot: nothing in it holds any more");
            return None;
        }
        let mut survivors = Survivors::default();
        for (pid, start) in &state.processes {
            let same = process::start(*pid) == Some(*start);
            if same { &mut survivors.alive } else { &mut survivors.gone }.insert(*pid);
        }
        self.counters.drop_items(Dropped::Process, survivors.gone.len() as u64);
        Some((state.pipeline, survivors))
    }

    /// Starts the thread that writes.
    ///
    /// # Errors
    /// [`StateError::Thread`].
    pub fn writer(self) -> Result<Writer, StateError> {
        Writer::start(self)
    }

    /// Writes it down. Returns its length.
    fn write(&self, mut saved: Saved) -> Result<u64, StateError> {
        let mut processes = BTreeMap::new();
        for pid in saved.processes() {
            if let (false, Some(start)) = (processes.contains_key(&pid), process::start(pid)) {
                processes.insert(pid, start);
            }
        }
        loop {
            let state = State { boot: self.boot.clone(), processes, pipeline: saved };
            let bytes = encode(&state)?;
            State { processes, pipeline: saved, .. } = state;
            let rooms = saved.rooms.rooms();
            if bytes.len() <= MAX_BYTES || rooms == 0 {
                self.place.write(&bytes)?;
                self.counters.left_out(saved.control.left_out.saturating_add(saved.rooms.left_out()));
                return Ok(bytes.len() as u64);
            }
            // Pinned rooms come first in it.
            saved.rooms.truncate(rooms / 2);
        }
    }
}
