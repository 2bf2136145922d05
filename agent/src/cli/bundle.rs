//! `roomtrace bundle`: what a running agent knows, as one archive for a report to others.
//!
//! Asks the agent over its HTTP API and reads the files it is told to; changes nothing. What goes in is text: JSON, metrics
//! and pages, nothing of any payload. With `--anonymous` each passes through [`Pseudonyms`] first.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]

mod pseudonyms;

use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};

use pseudonyms::Pseudonyms;

use super::config::Config;
use super::{BundleArgs, Failure, Outcome, explain, print, remote};
use crate::export::recording::before;

/// Longest line of a recording that is passed on, bytes.
const LINE_MAX: u64 = 1 << 20;

/// Rooms that get a page of their own; the others are in the lists.
const PAGES: usize = 100;

/// `roomtrace bundle`.
pub(super) fn bundle(args: &BundleArgs) -> Outcome {
    // Asked first: without an agent there is no archive.
    let (_, status) = remote::get(&args.api.api, "/status")?;
    let config = args.config.as_deref().map_or_else(|| Ok(Config::default()), Config::read);
    let config = config.map_err(Failure::usage)?;
    let cannot = |path: &Path, e: io::Error| {
        Failure::usage(
            anyhow::Error::new(e).context(format!("cannot write {} (another file: --out)", path.display())),
        )
    };
    let opened = match &args.out {
        Some(path) => new_file(path).map(|file| (file, path.clone())).map_err(|e| (path.clone(), e)),
        None => new_of_these(own_names(stamp())),
    };
    let (file, path) = opened.map_err(|(path, e)| cannot(&path, e))?;
    let failed = |e: io::Error| cannot(&path, e);
    let mut archive = Archive {
        tar: tar::Builder::new(GzEncoder::new(file, Compression::default())),
        pseudonyms: args.anonymous.then(Pseudonyms::default),
        files: Vec::new(),
        failed: Vec::new(),
    };
    if let Some(names) = &mut archive.pseudonyms {
        names.name(status["host"].as_str().unwrap_or_default(), "host");
    }
    let written = archive.fill(args, status, &config).and_then(|()| archive.finish());
    let (files, left) = written.map_err(|e| {
        // Half an archive is none.
        drop(std::fs::remove_file(&path));
        failed(e)
    })?;
    let mut text = format!("{}: {} files", path.display(), files.len());
    if !args.anonymous {
        text.push_str(" (with addresses, host names and request ids as they are; --anonymous replaces them)");
    }
    text.push('\n');
    for what in left {
        let _ = writeln!(text, "left out: {what}");
    }
    print(&text)
}

/// Names where none was given: of the second, and where one was taken in the same second already, with a number.
fn own_names(second: u64) -> impl Iterator<Item = PathBuf> {
    let name = move |n: u32| {
        let number = if n == 1 { String::new() } else { format!("-{n}") };
        PathBuf::from(format!("roomtrace-bundle-{second}{number}.tar.gz"))
    };
    (1..=OF_A_SECOND).map(name)
}

/// Archives of one second that get names.
const OF_A_SECOND: u32 = 100;

/// The first of these files that is not there.
fn new_of_these(paths: impl Iterator<Item = PathBuf>) -> Result<(File, PathBuf), (PathBuf, io::Error)> {
    let mut last = (PathBuf::new(), io::ErrorKind::AlreadyExists.into());
    for path in paths {
        match new_file(&path) {
            Ok(file) => return Ok((file, path)),
            Err(e) => {
                let taken = e.kind() == io::ErrorKind::AlreadyExists;
                last = (path, e);
                if !taken {
                    break;
                }
            }
        }
    }
    Err(last)
}

/// It may name hosts and requests.
fn new_file(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

fn stamp() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

struct Archive {
    tar: tar::Builder<GzEncoder<File>>,
    pseudonyms: Option<Pseudonyms>,
    files: Vec<String>,
    /// What could not be had, with the reason.
    failed: Vec<String>,
}

impl Archive {
    fn fill(&mut self, args: &BundleArgs, status: Value, config: &Config) -> io::Result<()> {
        let api = &args.api.api;
        let versions = json!({
            "roomtrace": env!("CARGO_PKG_VERSION"),
            "agent": status["version"],
            "kernel": std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim(),
            "architecture": std::env::consts::ARCH,
            "taken_at": stamp(),
        });
        self.json("versions.json", versions)?;
        // Rooms first: they hold the names that sentences elsewhere are made of.
        self.rooms("pinned", api, "&pinned=true", PAGES)?;
        self.rooms("open", api, "&pinned=false", 0)?;
        self.rooms("closed", api, "&closed=true", 0)?;
        if let Some(path) = &args.record {
            for (part, name) in [(before(path), "recording.jsonl.1"), (path.clone(), "recording.jsonl")] {
                if part.exists() || part == *path {
                    self.recording(&part, name)?;
                }
            }
        }
        self.json("status.json", status)?;
        match serde_saphyr::to_string(config) {
            Ok(text) => self.text("config.yaml", &text)?,
            Err(e) => self.failed.push(format!("config.yaml: {e}")),
        }
        match remote::get(api, "/api/v1/findings") {
            Ok((200, findings)) => self.json("findings.json", findings)?,
            Ok(_) => self.failed.push("findings.json: this agent does not tell findings".to_owned()),
            Err(e) => self.failed.push(format!("findings.json: {}", e.error)),
        }
        match remote::fetch(api, "/metrics") {
            Ok((_, text)) => self.text("metrics.txt", &text)?,
            Err(e) => self.failed.push(format!("metrics.txt: {}", e.error)),
        }
        Ok(())
    }

    /// A list of rooms, and a page for each of the first `pages`.
    fn rooms(&mut self, name: &str, api: &str, which: &str, pages: usize) -> io::Result<()> {
        let (rooms, more) = match remote::pages(api, which) {
            Ok(all) => all,
            Err(e) => {
                self.failed.push(format!("rooms-{name}.json: {}", e.error));
                return Ok(());
            }
        };
        if more.is_some() {
            self.failed.push(format!("rooms-{name}.json: all but the first {}", rooms.len()));
        }
        for room in rooms.iter().take(pages) {
            let number = room["room"].as_str().unwrap_or_default();
            let file = format!("explain-{number}-{}.txt", room["incarnation"]);
            let mut room = room.clone();
            if let Some(names) = &mut self.pseudonyms {
                names.value(&mut room);
            }
            self.put(&file, explain::page(&room, &[]).as_bytes())?;
        }
        self.json(&format!("rooms-{name}.json"), Value::Array(rooms))
    }

    fn json(&mut self, name: &str, mut value: Value) -> io::Result<()> {
        if let Some(names) = &mut self.pseudonyms {
            names.value(&mut value);
        }
        self.put(name, format!("{value:#}\n").as_bytes())
    }

    fn text(&mut self, name: &str, text: &str) -> io::Result<()> {
        let text = match &mut self.pseudonyms {
            Some(names) => names.text(text),
            None => text.to_owned(),
        };
        self.put(name, text.as_bytes())
    }

    /// Whole lines only; the agent may be writing.
    fn recording(&mut self, path: &Path, name: &str) -> io::Result<()> {
        let mut from = match File::open(path) {
            Ok(file) => BufReader::new(file),
            Err(e) => {
                self.failed.push(format!("{name}: {}: {e}", path.display()));
                return Ok(());
            }
        };
        let (mut out, mut line) = (Vec::new(), Vec::new());
        loop {
            line.clear();
            if io::Read::take(from.by_ref(), LINE_MAX).read_until(b'\n', &mut line)? == 0 {
                break;
            }
            if line.last() != Some(&b'\n') {
                continue;
            }
            let Some(names) = &mut self.pseudonyms else {
                out.extend_from_slice(&line);
                continue;
            };
            if let Ok(mut value) = serde_json::from_slice::<Value>(&line) {
                names.value(&mut value);
                out.extend_from_slice(value.to_string().as_bytes());
                out.push(b'\n');
            }
        }
        self.put(name, &out)
    }

    fn put(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(stamp());
        header.set_cksum();
        self.tar.append_data(&mut header, format!("roomtrace-bundle/{name}"), bytes)?;
        self.files.push(name.to_owned());
        Ok(())
    }

    fn finish(self) -> io::Result<(Vec<String>, Vec<String>)> {
        let mut file = self.tar.into_inner()?.finish()?;
        file.flush()?;
        Ok((self.files, self.failed))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn archives_of_one_second_have_names_of_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let names = || own_names(1_700_000_000).map(|name| dir.path().join(name));
        let taken: Vec<PathBuf> = (0..3).map(|_| new_of_these(names()).unwrap().1).collect();
        let expected =
            ["", "-2", "-3"].map(|n| dir.path().join(format!("roomtrace-bundle-1700000000{n}.tar.gz")));
        assert_eq!(taken, expected);
        let (path, e) = new_of_these(names().take(3)).unwrap_err();
        assert_eq!((path, e.kind()), (expected[2].clone(), io::ErrorKind::AlreadyExists));
        let nowhere = dir.path().join("none");
        let (path, e) = new_of_these(own_names(7).map(|name| nowhere.join(name))).unwrap_err();
        assert_eq!((path.ends_with("roomtrace-bundle-7.tar.gz"), e.kind()), (true, io::ErrorKind::NotFound));
    }
}
