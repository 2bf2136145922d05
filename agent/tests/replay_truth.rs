//! Every bundled capture of a real engine, replayed by the binary, against what the engine itself recorded.
//!
//! `score.py` is the judge: pinned rooms found with the right class and debtor, nothing paged that was healthy, every
//! room mentioned, successes closed as such.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::path::{Path, PathBuf};
use std::process::Command;

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Replays one capture; what is wrong with the result, if anything.
fn wrong(capture: &Path, events: &Path) -> Option<String> {
    let replay = Command::new(env!("CARGO_BIN_EXE_roomtrace"))
        .arg("replay")
        .arg(capture)
        .arg("--events")
        .arg(events)
        .args(["--extend", "30s"])
        .output()
        .unwrap();
    if !replay.status.success() {
        return Some(format!("replay ended with {}: {}", replay.status, text(&replay.stderr)));
    }
    let score = Command::new("python3")
        .arg(tests().join("score.py"))
        .arg(capture.with_extension("truth.jsonl"))
        .arg(events)
        .output()
        .unwrap_or_else(|e| panic!("python3 is needed for this test: {e}"));
    (!score.status.success()).then(|| text(&score.stdout) + &text(&score.stderr))
}

#[test]
fn every_capture_replays_to_its_truth() {
    let dir = tempfile::tempdir().unwrap();
    let mut captures: Vec<PathBuf> = std::fs::read_dir(tests().join("fixtures/captures"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "pcap"))
        .collect();
    captures.sort();
    assert_eq!(captures.len(), 11);
    let faults: Vec<String> = captures
        .iter()
        .filter_map(|capture| {
            let name = capture.file_stem().unwrap().to_string_lossy();
            let fault = wrong(capture, &dir.path().join(format!("{name}.jsonl")))?;
            Some(format!("{name}: {fault}"))
        })
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
