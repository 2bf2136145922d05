//! The thread that writes a recording ([`crate::replay::recorded`]): a ring of two files, the current one under the name
//! given and the one before it with `.1` behind it. Who hands lines over never waits for the disk.

use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use super::complaint::Complaint;
use crate::replay::recorded::{Head, Line, Recorder, VERSION};

/// Chunks that wait for the disk at most.
const CHUNKS: usize = 8;

/// Bytes that one chunk holds at most; the observing thread hands one over every 10 ms or so.
pub const CHUNK: usize = 4 << 20;

/// Why a recording cannot be begun.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// The file cannot be made.
    #[error("cannot write the recording {path}: {source} (name another file with --record)")]
    Create {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The system refuses a thread.
    #[error("cannot start a thread: {0} (raise the limit on tasks of this service)")]
    Thread(io::Error),
}

/// What became of what was to be recorded.
#[derive(Debug, Default)]
pub struct Counters {
    /// Bytes written.
    pub bytes: AtomicU64,
    /// Lines that found no place: the disk was too slow, or full.
    pub dropped: AtomicU64,
}

/// Front of the thread.
#[derive(Debug)]
pub struct Recording {
    chunks: Option<SyncSender<(Vec<u8>, u64)>>,
    spare: Receiver<Vec<u8>>,
    counters: Arc<Counters>,
    /// Lines lost since the last chunk that went.
    lost: u64,
    /// Of the recorder's own, how many are in `lost` already.
    seen: u64,
    thread: Option<JoinHandle<()>>,
}

impl Recording {
    /// Begins a recording at `path` of at most `max` bytes; what is there already becomes the part before. `head` is what
    /// its first line says.
    ///
    /// # Errors
    ///
    /// [`RecordingError`].
    pub fn start(path: &Path, max: u64, head: Head) -> Result<Self, RecordingError> {
        let failed = |source| RecordingError::Create { path: path.to_owned(), source };
        let mut ring =
            Ring { path: path.to_owned(), half: (max / 2).max(1), head, file: None, used: 0, lost: 0 };
        ring.turn().map_err(failed)?;
        let counters = Arc::new(Counters::default());
        let (chunks, to_write) = mpsc::sync_channel::<(Vec<u8>, u64)>(CHUNKS);
        let (written, spare) = mpsc::sync_channel(CHUNKS);
        let theirs = Arc::clone(&counters);
        let run = move || {
            let mut complaint = Complaint::default();
            while let Ok((chunk, lost)) = to_write.recv() {
                ring.take(&chunk, lost, &theirs, &mut complaint);
                // Nobody may want it back.
                let _ = written.try_send(chunk);
            }
        };
        let thread = thread::Builder::new().name("record".to_owned()).spawn(run);
        let thread = Some(thread.map_err(RecordingError::Thread)?);
        Ok(Self { chunks: Some(chunks), spare, counters, lost: 0, seen: 0, thread })
    }

    /// What became of it so far.
    pub fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// Hands over what has been taken down since the last call.
    pub fn pass_on(&mut self, recorder: &mut Recorder) {
        let dropped = recorder.dropped();
        self.lose(dropped - self.seen);
        self.seen = dropped;
        if recorder.is_empty() {
            return;
        }
        let chunk = recorder.fetch(self.spare.try_recv().unwrap_or_default());
        let Some(chunks) = &self.chunks else { return };
        match chunks.try_send((chunk, self.lost)) {
            Ok(()) => self.lost = 0,
            Err(refused) => {
                let (mpsc::TrySendError::Full((chunk, _)) | mpsc::TrySendError::Disconnected((chunk, _))) =
                    refused;
                self.lose(lines_in(&chunk));
            }
        }
    }

    fn lose(&mut self, lines: u64) {
        self.lost = self.lost.saturating_add(lines);
        self.counters.dropped.fetch_add(lines, Ordering::Relaxed);
    }
}

impl Drop for Recording {
    /// Waits until what was handed over is written.
    fn drop(&mut self) {
        self.chunks = None;
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so.
            let _ = thread.join();
        }
    }
}

/// The two files.
#[derive(Debug)]
struct Ring {
    path: PathBuf,
    half: u64,
    head: Head,
    file: Option<File>,
    used: u64,
    /// Lines lost that no line tells of yet.
    lost: u64,
}

impl Ring {
    /// Makes the current file the one before, and begins a new one.
    fn turn(&mut self) -> io::Result<()> {
        self.file = None;
        match std::fs::rename(&self.path, before(&self.path)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Whoever may read it learns addresses and room numbers.
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.path)?;
        let mut line = serde_json::to_vec(&self.head).map_err(io::Error::other)?;
        line.push(b'\n');
        file.write_all(&line)?;
        self.head.part += 1;
        self.used = line.len() as u64;
        self.file = Some(file);
        Ok(())
    }

    fn take(&mut self, chunk: &[u8], lost: u64, counters: &Counters, complaint: &mut Complaint) {
        self.lost += lost;
        match self.write(chunk) {
            Ok(()) => {
                counters.bytes.fetch_add(chunk.len() as u64, Ordering::Relaxed);
                if complaint.works(Instant::now()).is_some() {
                    tracing::info!(path = %self.path.display(), "the recording goes on");
                }
            }
            Err(error) => {
                let lines = lines_in(chunk);
                self.lost += lines;
                counters.dropped.fetch_add(lines, Ordering::Relaxed);
                // A line may be half written: what follows begins a new part.
                self.file = None;
                if complaint.failed(Instant::now()).is_some() {
                    let path = self.path.display();
                    tracing::warn!(%path, "cannot write the recording: {error} (check space and permissions there)");
                }
            }
        }
    }

    fn write(&mut self, chunk: &[u8]) -> io::Result<()> {
        if self.file.is_none() || self.used + chunk.len() as u64 > self.half {
            self.turn()?;
        }
        let Some(file) = self.file.as_mut() else { return Ok(()) };
        if self.lost > 0 {
            let mut line =
                serde_json::to_vec(&Line::Dropped { lines: self.lost }).map_err(io::Error::other)?;
            line.push(b'\n');
            file.write_all(&line)?;
            self.lost = 0;
        }
        file.write_all(chunk)?;
        self.used += chunk.len() as u64;
        Ok(())
    }
}

/// How many lines end in it.
fn lines_in(chunk: &[u8]) -> u64 {
    let mut lines = 0;
    for byte in chunk {
        lines += u64::from(*byte == b'\n');
    }
    lines
}

/// Name of the file before.
pub fn before(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".1");
    PathBuf::from(name)
}

/// First line of a recording of this agent.
pub fn head(host: &str, offset: i64, run: u64) -> Head {
    Head {
        version: VERSION,
        agent: env!("CARGO_PKG_VERSION").to_owned(),
        host: host.to_owned(),
        offset,
        run,
        part: 0,
    }
}
