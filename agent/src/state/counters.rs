//! What became of the state file. Atomic counters, nothing else.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why something in a state file was not taken over, or something was not put into it. Label values of
/// `roomtrace_state_dropped_total{reason}`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dropped {
    /// The file cannot be read, or is no file.
    Unreadable,
    /// It belongs to another user, or others may write it.
    Owner,
    /// It is larger than any that an agent writes.
    Size,
    /// It is no state file.
    Garbage,
    /// Another version of the format.
    Version,
    /// Its end is missing.
    CutShort,
    /// Its bytes are not those that were written.
    Checksum,
    /// It is from before the last boot.
    Boot,
    /// A process in it has ended; its number may be another's.
    Process,
    /// A connection in it is gone.
    Connection,
    /// A room in it is over, because its process is, or found no place.
    Room,
}

impl Dropped {
    /// Every reason.
    pub const ALL: [Self; 11] = [
        Self::Unreadable,
        Self::Owner,
        Self::Size,
        Self::Garbage,
        Self::Version,
        Self::CutShort,
        Self::Checksum,
        Self::Boot,
        Self::Process,
        Self::Connection,
        Self::Room,
    ];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Unreadable => "unreadable",
            Self::Owner => "owner",
            Self::Size => "size",
            Self::Garbage => "garbage",
            Self::Version => "version",
            Self::CutShort => "cut_short",
            Self::Checksum => "checksum",
            Self::Boot => "boot",
            Self::Process => "process",
            Self::Connection => "connection",
            Self::Room => "room",
        }
    }
}

/// Counts since the agent started; shared with the thread that writes.
#[derive(Debug, Default)]
pub struct Counters {
    dropped: [AtomicU64; Dropped::ALL.len()],
    restored: [AtomicU64; 3],
    written: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    left_out: AtomicU64,
}

impl Counters {
    /// Counts `n` things dropped.
    pub fn drop_items(&self, why: Dropped, n: u64) {
        if let Some(counter) = self.dropped.get(why as usize) {
            counter.fetch_add(n, Ordering::Relaxed);
        }
    }

    /// Notes what was taken over.
    pub fn restore(&self, resumed: &crate::pipeline::Resumed) {
        let values = [resumed.connections, resumed.rooms, resumed.pinned];
        for (counter, value) in self.restored.iter().zip(values) {
            counter.store(value, Ordering::Relaxed);
        }
        self.drop_items(Dropped::Connection, resumed.connections_gone);
        self.drop_items(Dropped::Room, resumed.rooms_over);
    }

    /// What was dropped, by reason, zero included.
    pub fn dropped(&self) -> impl Iterator<Item = (Dropped, u64)> + '_ {
        Dropped::ALL.into_iter().zip(&self.dropped).map(|(why, n)| (why, n.load(Ordering::Relaxed)))
    }

    /// What was taken over at the start, by kind.
    pub fn restored(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        ["connections", "rooms", "pinned_rooms"]
            .into_iter()
            .zip(&self.restored)
            .map(|(what, n)| (what, n.load(Ordering::Relaxed)))
    }

    /// How often the file was written, and how often that failed.
    pub fn writes(&self) -> (u64, u64) {
        (self.written.load(Ordering::Relaxed), self.failed.load(Ordering::Relaxed))
    }

    /// Length of the file as last written, bytes; 0 before the first time.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Rooms and connections that the file last written has no place for.
    pub fn not_written(&self) -> u64 {
        self.left_out.load(Ordering::Relaxed)
    }

    pub(super) fn left_out(&self, n: u64) {
        self.left_out.store(n, Ordering::Relaxed);
    }

    pub(super) fn wrote(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::Relaxed);
        self.written.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }
}
