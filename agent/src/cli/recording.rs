//! Recordings at the edges: `run --record` writes one, `replay` reads it.

use std::fs::File;
use std::io::{BufReader, Read as _};
use std::path::Path;

use super::config::Config;
use super::{Failure, config};
use crate::event::Mono;
use crate::export::recording::{self, CHUNK, Recording, before, head};
use crate::pipeline::Pipeline;
use crate::replay::recorded::{Reader, Recorder, RecordingError, WORD};

/// Begins the recording that the configuration asks for. `offset`: wall clock − monotonic clock, nanoseconds.
pub(super) fn start(
    config: &Config,
    pipeline: &mut Pipeline,
    host: &str,
    now: Mono,
    offset: i64,
) -> Result<Option<Recording>, Failure> {
    let config::Record { file: Some(path), bytes } = &config.record else { return Ok(None) };
    // The time of this boot names the run; a host starts no two agents in one nanosecond.
    let recording: Result<_, recording::RecordingError> =
        Recording::start(path, *bytes, head(host, offset, now.0));
    let recording = recording.map_err(Failure::usage)?;
    pipeline.record(Recorder::new(CHUNK));
    Ok(Some(recording))
}

/// Whether the file is a recording, by its first bytes.
pub(super) fn is_one(path: &Path) -> bool {
    let mut begin = Vec::new();
    let word = format!("{{\"{WORD}\"");
    File::open(path).is_ok_and(|f| f.take(word.len() as u64).read_to_end(&mut begin).is_ok())
        && begin == word.as_bytes()
}

/// Opens a recording with the part before it, where that is there.
pub(super) fn open(path: &Path) -> Result<Reader<BufReader<File>>, RecordingError> {
    let part = |path: &Path| File::open(path).map(BufReader::new);
    Reader::new(part(path)?, part(&before(path)).ok())
}
