//! JSON lines to a file or to standard output, by a thread of their own.
//!
//! Whoever hands lines in never waits (unless it asks to). A full disk or a closed pipe costs the lines it
//! hits, one message a minute, and nothing else.

use std::fs::OpenOptions;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::thread;
use std::time::{Duration, Instant};

use super::complaint::Complaint;
use super::counters::{Counters, Reason, Signal};

/// Items waiting at most.
const WAITING: usize = 4096;

/// Of these, places that only flagged items may take: an ordinary burst leaves room for a pin.
const RESERVED: usize = WAITING / 4;

/// Bytes gathered before a write.
const BATCH: usize = 64 << 10;

/// Time beyond the grace period for counting what is abandoned.
const LAST: Duration = Duration::from_secs(1);

/// A file or standard output that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to {path}: {source} (check that the directory exists and may be written to)")]
pub struct OpenError {
    path: PathBuf,
    source: io::Error,
}

/// Turns an item into lines (each with its `\n`).
type Render<T> = Box<dyn FnMut(T, &mut Vec<u8>) + Send>;

/// Front of a writer thread; `T` is what it renders.
#[derive(Debug)]
pub(super) struct Lines<T> {
    to: SyncSender<T>,
    waiting: Arc<AtomicUsize>,
    /// Time is up: what still waits is counted, not written.
    abandoned: Arc<AtomicBool>,
    done: Receiver<()>,
    signal: Signal,
    counters: Arc<Counters>,
}

impl<T: Send + 'static> Lines<T> {
    /// Opens `path` for appending (`-`: standard output) and starts the thread.
    ///
    /// # Errors
    /// [`OpenError`].
    pub(super) fn open(
        path: &Path,
        signal: Signal,
        counters: Arc<Counters>,
        render: impl FnMut(T, &mut Vec<u8>) + Send + 'static,
    ) -> Result<Self, OpenError> {
        let failed = |source| OpenError { path: path.to_owned(), source };
        let (sink, torn): (Box<dyn Write + Send>, bool) = if path.as_os_str() == "-" {
            (Box::new(io::stdout()), false)
        } else {
            let file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
            (Box::new(file), is_torn(path))
        };
        Self::start(sink, torn, path, signal, counters, Box::new(render)).map_err(failed)
    }

    fn start(
        sink: Box<dyn Write + Send>,
        torn: bool,
        path: &Path,
        signal: Signal,
        counters: Arc<Counters>,
        render: Render<T>,
    ) -> io::Result<Self> {
        let (to, from) = mpsc::sync_channel(WAITING);
        let (finished, done) = mpsc::channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let abandoned = Arc::new(AtomicBool::new(false));
        let mut writer = Writer {
            from,
            waiting: Arc::clone(&waiting),
            abandoned: Arc::clone(&abandoned),
            render,
            sink,
            path: path.to_owned(),
            signal,
            counters: Arc::clone(&counters),
            complaint: Complaint::default(),
            torn,
            closed: false,
        };
        thread::Builder::new().name(format!("write-{}", signal.label())).spawn(move || {
            writer.run();
            // Nobody may be waiting any more.
            let _ = finished.send(());
        })?;
        Ok(Self { to, waiting, abandoned, done, signal, counters })
    }

    /// Hands an item in; never waits. Drops and counts it when there is no place.
    pub(super) fn try_write(&self, item: T, flagged: bool) {
        let taken = self.waiting.fetch_add(1, Ordering::Relaxed);
        if (flagged || taken < WAITING - RESERVED) && self.to.try_send(item).is_ok() {
            return;
        }
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        self.counters.drop_items(self.signal, Reason::QueueFull, 1);
    }

    /// Hands an item in and waits for its place.
    pub(super) fn write(&self, item: T) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if let Err(TrySendError::Full(item)) = self.to.try_send(item) {
            // The other end only goes away with this one.
            let _ = self.to.send(item);
        }
    }

    /// Writes what waits, for at most `grace`; counts the rest as dropped. Blocks.
    pub(super) fn close(self, grace: Duration) {
        let Self { to, waiting, abandoned, done, signal, counters } = self;
        drop(to);
        let ended = |within| !matches!(done.recv_timeout(within), Err(RecvTimeoutError::Timeout));
        if ended(grace) {
            return;
        }
        abandoned.store(true, Ordering::Relaxed);
        if !ended(LAST) {
            // It is held inside a write and counts nothing any more.
            let left = waiting.load(Ordering::Relaxed) as u64;
            counters.drop_items(signal, Reason::Shutdown, left);
        }
    }
}

struct Writer<T> {
    from: Receiver<T>,
    waiting: Arc<AtomicUsize>,
    abandoned: Arc<AtomicBool>,
    render: Render<T>,
    sink: Box<dyn Write + Send>,
    path: PathBuf,
    signal: Signal,
    counters: Arc<Counters>,
    complaint: Complaint,
    /// The last write stopped inside a line.
    torn: bool,
    /// The reader has gone: nothing will ever be read again.
    closed: bool,
}

/// Whether a file ends inside a line: an agent before was killed while it wrote. What cannot be read again is taken as whole.
fn is_torn(path: &Path) -> bool {
    let last = || -> io::Result<u8> {
        let mut byte = [0];
        // Of a pipe there is no end to read.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let mut file = std::fs::File::open(path)?;
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut byte)?;
        Ok(byte[0])
    };
    last().is_ok_and(|byte| byte != b'\n')
}

impl<T> Writer<T> {
    fn run(&mut self) {
        let mut bytes = Vec::with_capacity(BATCH);
        while let Ok(first) = self.from.recv() {
            if self.abandoned.load(Ordering::Relaxed) {
                self.counters.drop_items(self.signal, Reason::Shutdown, 1);
                continue;
            }
            bytes.clear();
            (self.render)(first, &mut bytes);
            let mut items = 1;
            while bytes.len() < BATCH {
                let Ok(next) = self.from.try_recv() else { break };
                (self.render)(next, &mut bytes);
                items += 1;
            }
            self.write(&bytes);
            self.waiting.fetch_sub(items, Ordering::Relaxed);
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        let lines = count_lines(bytes);
        if self.closed {
            self.counters.drop_items(self.signal, Reason::Write, lines);
            return;
        }
        let written = self.put(bytes);
        match written {
            Ok(()) => {
                self.counters.sent_items(self.signal, lines);
                if let Some(after) = self.complaint.works(Instant::now()) {
                    tracing::info!(path = %self.path.display(), "written again after {} s", after.as_secs());
                }
            }
            Err((error, at)) => {
                let whole = count_lines(bytes.get(..at).unwrap_or(bytes));
                self.torn |= at > 0 && bytes.get(at - 1) != Some(&b'\n');
                self.counters.sent_items(self.signal, whole);
                self.counters.drop_items(self.signal, Reason::Write, lines - whole);
                self.complain(&error);
            }
        }
    }

    /// Writes all of it, or says how much was written before the error.
    fn put(&mut self, bytes: &[u8]) -> Result<(), (io::Error, usize)> {
        if self.torn {
            // What was cut off becomes a line of its own that no reader takes for a whole one.
            self.sink.write_all(b"\n").map_err(|e| (e, 0))?;
            self.torn = false;
        }
        let mut at = 0;
        while let Some(rest) = bytes.get(at..).filter(|r| !r.is_empty()) {
            match self.sink.write(rest) {
                Ok(0) => return Err((io::ErrorKind::WriteZero.into(), at)),
                Ok(n) => at += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err((e, at)),
            }
        }
        self.sink.flush().map_err(|e| (e, at))
    }

    fn complain(&mut self, error: &io::Error) {
        self.closed = error.kind() == io::ErrorKind::BrokenPipe;
        let path = self.path.display();
        if self.closed {
            tracing::warn!(%path, "whoever read these lines has gone; no more are written, the agent goes on");
        } else if let Some(untold) = self.complaint.failed(Instant::now()) {
            tracing::warn!(%path, %error, untold, "cannot write; lines are lost and counted until it works again");
        }
    }
}

fn count_lines(bytes: &[u8]) -> u64 {
    bytes.split(|b| *b == b'\n').count().saturating_sub(1) as u64
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
    use super::*;
    use std::sync::Mutex;

    type Script = Arc<Mutex<(Vec<u8>, Vec<io::Result<usize>>)>>;

    /// A sink that follows a script of results, then takes everything.
    struct Scripted(Script);

    impl Write for Scripted {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut s = self.0.lock().unwrap();
            let n = if s.1.is_empty() { bytes.len() } else { s.1.remove(0)?.min(bytes.len()) };
            s.0.extend_from_slice(&bytes[..n]);
            Ok(n)
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_that_an_agent_before_could_not_end_stays_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("events");
        for (before, then) in [("{\"cut", "{\"cut\na\n"), ("whole\n", "whole\na\n"), ("", "a\n")] {
            std::fs::write(&path, before).unwrap();
            let render = |s: &str, to: &mut Vec<u8>| to.extend_from_slice(s.as_bytes());
            let lines = Lines::open(&path, Signal::Events, Arc::default(), render).unwrap();
            lines.try_write("a\n", true);
            lines.close(Duration::from_mins(1));
            assert_eq!(std::fs::read_to_string(&path).unwrap(), then);
        }
    }

    fn lines(script: &Script) -> (Lines<&'static str>, Arc<Counters>) {
        let counters = Arc::new(Counters::default());
        let render: Render<&'static str> = Box::new(|s, to| to.extend_from_slice(s.as_bytes()));
        let sink = Box::new(Scripted(Arc::clone(script)));
        let lines =
            Lines::start(sink, false, Path::new("x"), Signal::Events, Arc::clone(&counters), render).unwrap();
        (lines, counters)
    }

    #[test]
    fn a_full_disk_costs_the_lines_it_hits_and_leaves_no_joined_line() {
        let script: Script =
            Arc::new(Mutex::new((vec![], vec![Ok(4), Err(io::ErrorKind::StorageFull.into())])));
        let (lines, counters) = lines(&script);
        lines.write("{1}\n{2}\n");
        while counters.dropped(Signal::Events, Reason::Write) == 0 && counters.sent(Signal::Events) < 2 {
            thread::yield_now();
        }
        lines.write("{3}\n");
        lines.close(Duration::from_mins(1));
        // The first write ended exactly at a line's end, so nothing had to be cut off.
        assert_eq!(script.lock().unwrap().0, b"{1}\n{3}\n");
        assert_eq!(counters.dropped(Signal::Events, Reason::Write), 1);
        assert_eq!(counters.sent(Signal::Events), 2);
    }

    #[test]
    fn a_line_cut_in_its_middle_is_ended_before_the_next() {
        let script: Script =
            Arc::new(Mutex::new((vec![], vec![Ok(2), Err(io::ErrorKind::StorageFull.into())])));
        let (lines, counters) = lines(&script);
        lines.write("{1}\n");
        while counters.dropped(Signal::Events, Reason::Write) == 0 {
            thread::yield_now();
        }
        lines.write("{2}\n");
        lines.close(Duration::from_mins(1));
        assert_eq!(script.lock().unwrap().0, b"{1\n{2}\n");
    }

    #[test]
    fn a_closed_pipe_stops_the_writing_and_nothing_else() {
        let script: Script = Arc::new(Mutex::new((vec![], vec![Err(io::ErrorKind::BrokenPipe.into())])));
        let (lines, counters) = lines(&script);
        lines.write("{1}\n");
        lines.write("{2}\n");
        lines.close(Duration::from_mins(1));
        assert!(script.lock().unwrap().0.is_empty());
        assert_eq!(counters.dropped(Signal::Events, Reason::Write), 2);
    }

    /// A sink that waits for ever.
    struct Stuck(Receiver<()>);

    impl Write for Stuck {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_stuck_sink_never_holds_the_caller_and_keeps_places_for_pins() {
        let (release, stuck) = mpsc::channel();
        let counters = Arc::new(Counters::default());
        let render: Render<u8> = Box::new(|_, to| to.extend_from_slice(b"x\n"));
        let sink = Box::new(Stuck(stuck));
        let lines =
            Lines::start(sink, false, Path::new("x"), Signal::Events, Arc::clone(&counters), render).unwrap();
        for _ in 0..WAITING * 2 {
            lines.try_write(0, false);
        }
        let dropped = counters.dropped(Signal::Events, Reason::QueueFull);
        assert!(dropped >= (WAITING + RESERVED) as u64);
        for _ in 0..RESERVED - 1 {
            lines.try_write(0, true);
        }
        assert_eq!(counters.dropped(Signal::Events, Reason::QueueFull), dropped);
        drop(release);
        lines.close(Duration::from_mins(1));
    }
}
