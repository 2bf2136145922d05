//! The bytes of a state file, and where it lies: written beside it and put in its place in one step, read only where
//! nobody else can have written it.
//!
//! A line `roomtrace-state VERSION LENGTH SHA256`, then LENGTH bytes of JSON. Nothing is synced to the disk: what a crash
//! of the whole machine loses would not hold after the boot that follows.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use sha2::{Digest as _, Sha256};

use super::{Dropped, State, process};

/// Version of the format. A new one only where an older agent would misread the file: fields that are new have a default.
pub const VERSION: u32 = 1;

/// Longest state file written or read.
pub const MAX_BYTES: usize = 16 << 20;

/// How long another agent may take to let go of the file.
const PATIENCE: Duration = Duration::from_secs(2);

/// First word of the file.
const WORD: &str = "roomtrace-state";

/// Longest first line: word, two numbers, 64 digits.
const LINE: usize = 128;

/// Why a state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// This boot has no name.
    #[error("cannot read /proc/sys/kernel/random/boot_id: {source} (is /proc mounted?)")]
    Boot {
        /// Why.
        source: io::Error,
    },
    /// Its directory cannot be used.
    #[error(
        "cannot use the directory {dir}: {source} (make it writable for the agent: StateDirectory= of systemd, a hostPath \
         volume in Kubernetes; or name another with --state, or --no-state)"
    )]
    Directory {
        /// Which.
        dir: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Others may replace files in its directory.
    #[error(
        "others may write to the directory {dir} (mode {mode:o}): chmod go-w it, or name another with --state"
    )]
    Open {
        /// Which.
        dir: PathBuf,
        /// Its permissions.
        mode: u32,
    },
    /// Another agent writes it.
    #[error("another agent has {path} (name another file with --state, or --no-state)")]
    Taken {
        /// Which file.
        path: PathBuf,
    },
    /// It cannot be written.
    #[error(
        "cannot write {path}: {source} (check space and permissions there, or name another with --state)"
    )]
    Write {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The system refuses a thread.
    #[error("cannot start a thread: {0} (raise the limit on tasks of this service)")]
    Thread(io::Error),
    /// It cannot be read.
    #[error("it cannot be read: {0}")]
    Unreadable(io::Error),
    /// It is a directory, a link, a pipe, …
    #[error("it is no regular file")]
    NoFile,
    /// Somebody else can have written it.
    #[error(
        "user {user} with mode {mode:o} is not how the agent leaves it: somebody else can have written it"
    )]
    Owner {
        /// Its owner.
        user: u32,
        /// Its permissions.
        mode: u32,
    },
    /// It is too large.
    #[error("it is larger than {MAX_BYTES} bytes")]
    Size,
    /// It does not begin as one.
    #[error("it does not begin as a state file does")]
    Garbage,
    /// Another version.
    #[error("its format is version {0}, this agent reads {VERSION}")]
    Version(u32),
    /// Cut short.
    #[error("it has {is} of {should} bytes")]
    CutShort {
        /// Bytes there.
        is: usize,
        /// Bytes that should be.
        should: usize,
    },
    /// Changed.
    #[error("its checksum does not fit its contents")]
    Checksum,
    /// Written by an agent that says other things under this version.
    #[error("its contents do not read: {0}")]
    Contents(serde_json::Error),
}

impl StateError {
    /// How it is counted.
    pub const fn reason(&self) -> Dropped {
        match self {
            Self::Owner { .. } => Dropped::Owner,
            Self::Size => Dropped::Size,
            Self::Garbage | Self::Contents(_) => Dropped::Garbage,
            Self::Version(_) => Dropped::Version,
            Self::CutShort { .. } => Dropped::CutShort,
            Self::Checksum => Dropped::Checksum,
            _ => Dropped::Unreadable,
        }
    }
}

/// The bytes of a state file.
///
/// # Errors
/// [`StateError::Contents`], which does not happen with plain data.
pub fn encode(state: &State) -> Result<Vec<u8>, StateError> {
    let body = serde_json::to_vec(state).map_err(StateError::Contents)?;
    let mut out = format!("{WORD} {VERSION} {} {}\n", body.len(), sum(&body)).into_bytes();
    out.extend(body);
    Ok(out)
}

/// What the bytes of a state file say. Any bytes give a state or an error.
///
/// # Errors
/// [`StateError`]: what is wrong with them.
pub fn decode(bytes: &[u8]) -> Result<State, StateError> {
    let head = bytes.get(..LINE).unwrap_or(bytes);
    let end = head.iter().position(|b| *b == b'\n').ok_or(StateError::Garbage)?;
    let (line, body) = (bytes.get(..end).unwrap_or_default(), bytes.get(end + 1..).unwrap_or_default());
    let line = std::str::from_utf8(line).map_err(|_| StateError::Garbage)?;
    let mut words = line.split(' ');
    if words.next() != Some(WORD) {
        return Err(StateError::Garbage);
    }
    let version = words.next().and_then(|w| w.parse().ok()).ok_or(StateError::Garbage)?;
    if version != VERSION {
        return Err(StateError::Version(version));
    }
    let should: usize = words.next().and_then(|w| w.parse().ok()).ok_or(StateError::Garbage)?;
    if body.len() < should {
        return Err(StateError::CutShort { is: body.len(), should });
    }
    if body.len() > should || words.next() != Some(&sum(body)) || words.next().is_some() {
        return Err(StateError::Checksum);
    }
    serde_json::from_slice(body).map_err(StateError::Contents)
}

fn sum(body: &[u8]) -> String {
    use std::fmt::Write as _;
    Sha256::digest(body).iter().fold(String::with_capacity(64), |mut out, byte| {
        // Writing into a string does not fail.
        let _ = write!(out, "{byte:02x}");
        out
    })
}

/// Where the file lies, held by this agent alone.
#[derive(Debug)]
pub(super) struct Place {
    path: PathBuf,
    /// What the next one is written to.
    beside: PathBuf,
    /// Locked as long as the agent lives.
    _lock: File,
}

impl Place {
    pub(super) fn take(path: &Path) -> Result<Self, StateError> {
        let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let dir = |source| StateError::Directory { dir: parent.to_owned(), source };
        match fs::DirBuilder::new().mode(0o700).create(parent) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists && !parent.is_dir() => return Err(dir(e)),
            _ => {}
        }
        let mode = fs::metadata(parent).map_err(dir)?.mode() & 0o7777;
        // In a sticky directory (/tmp) nobody can replace what is another's.
        if mode & 0o022 != 0 && mode & 0o1000 == 0 {
            return Err(StateError::Open { dir: parent.to_owned(), mode });
        }
        let lock = with(path, ".lock");
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
        let lock = options.open(&lock).map_err(dir)?;
        let until = Instant::now() + PATIENCE;
        loop {
            match lock.try_lock() {
                Ok(()) => break,
                // The agent before may be about to end.
                Err(fs::TryLockError::WouldBlock) if Instant::now() < until => thread::sleep(PATIENCE / 20),
                Err(fs::TryLockError::WouldBlock) => return Err(StateError::Taken { path: path.to_owned() }),
                Err(fs::TryLockError::Error(source)) => return Err(dir(source)),
            }
        }
        let place = Self { path: path.to_owned(), beside: with(path, ".new"), _lock: lock };
        // Whether it can be written is better known now than at the end.
        place.create().map_err(dir)?;
        Ok(place)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The bytes of the file; `None` where there is none.
    pub(super) fn read(&self) -> Result<Option<Vec<u8>>, StateError> {
        let mut options = OpenOptions::new();
        options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
        let file = match options.open(&self.path) {
            Ok(file) => file,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) if e.raw_os_error() == Some(libc::ELOOP) => return Err(StateError::NoFile),
            Err(e) => return Err(StateError::Unreadable(e)),
        };
        let about = file.metadata().map_err(StateError::Unreadable)?;
        if !about.is_file() {
            return Err(StateError::NoFile);
        }
        let (user, mode) = (about.uid(), about.mode() & 0o7777);
        if (user != 0 && Some(user) != process::user()) || mode & 0o022 != 0 {
            return Err(StateError::Owner { user, mode });
        }
        let mut bytes = Vec::new();
        let most = MAX_BYTES as u64 + 1;
        file.take(most).read_to_end(&mut bytes).map_err(StateError::Unreadable)?;
        if bytes.len() > MAX_BYTES {
            return Err(StateError::Size);
        }
        Ok(Some(bytes))
    }

    /// Puts a new file in the place of the old one.
    pub(super) fn write(&self, bytes: &[u8]) -> Result<(), StateError> {
        let write = || {
            self.create()?.write_all(bytes)?;
            fs::rename(&self.beside, &self.path)
        };
        write().map_err(|source| StateError::Write { path: self.path.clone(), source })
    }

    fn create(&self) -> io::Result<File> {
        match fs::remove_file(&self.beside) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.beside)
    }
}

fn with(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}
