//! Archives whose bytes depend on nothing but their contents: one time for all entries, root's, in the given order.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::install;

/// One entry of an archive.
pub(crate) struct Entry {
    /// Without a leading slash.
    pub(crate) path: String,
    pub(crate) mode: u32,
    pub(crate) content: Content,
}

/// What it is.
pub(crate) enum Content {
    Directory,
    /// Copied from this file.
    File(PathBuf),
    Bytes(Vec<u8>),
}

impl Entry {
    /// A directory that all may enter.
    pub(crate) fn directory(path: impl Into<String>) -> Self {
        Self { path: path.into(), mode: 0o755, content: Content::Directory }
    }

    /// A copy of a file that all may read.
    pub(crate) fn file(path: impl Into<String>, from: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), mode: 0o644, content: Content::File(from.into()) }
    }

    /// A copy of a file that all may run.
    pub(crate) fn program(path: impl Into<String>, from: impl Into<PathBuf>) -> Self {
        Self { mode: 0o755, ..Self::file(path, from) }
    }

    /// A file of this text.
    pub(crate) fn text(path: impl Into<String>, text: impl Into<Vec<u8>>) -> Self {
        Self { path: path.into(), mode: 0o644, content: Content::Bytes(text.into()) }
    }
}

/// Seconds since 1970 that everything made here says of itself: `SOURCE_DATE_EPOCH`, else the time of the commit.
pub(crate) fn time() -> u64 {
    let given = std::env::var("SOURCE_DATE_EPOCH").ok();
    let commit = || {
        let mut git = Command::new("git");
        install::output(git.args(["log", "-1", "--format=%ct"]).current_dir(install::root())).ok()
    };
    given.or_else(commit).and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// A tar archive.
pub(crate) fn tar(entries: &[Entry], time: u64) -> Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::new());
    for entry in entries {
        let bytes = match &entry.content {
            Content::Directory => Vec::new(),
            Content::Bytes(bytes) => bytes.clone(),
            Content::File(from) => std::fs::read(from).with_context(|| format!("read {}", from.display()))?,
        };
        let mut header = tar::Header::new_gnu();
        header.set_mode(entry.mode);
        header.set_mtime(time);
        header.set_size(bytes.len() as u64);
        let mut path = entry.path.clone();
        if matches!(entry.content, Content::Directory) {
            header.set_entry_type(tar::EntryType::Directory);
            path.push('/');
        }
        tar.append_data(&mut header, path, bytes.as_slice())
            .with_context(|| format!("put {} into an archive", entry.path))?;
    }
    tar.into_inner().context("end an archive")
}

/// Compressed, without a name or a time of its own.
pub(crate) fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    through(Command::new("gzip").args(["-9", "-n"]), bytes)
}

/// SHA-256, in hexadecimal digits.
pub(crate) fn sha256(bytes: &[u8]) -> Result<String> {
    let said = through(&mut Command::new("sha256sum"), bytes)?;
    let said = String::from_utf8(said).context("sha256sum says no text")?;
    said.split_whitespace().next().map(str::to_owned).context("sha256sum says nothing")
}

/// What a program makes of these bytes. The system's programs: this one is built without optimization, and would take minutes.
fn through(command: &mut Command, bytes: &[u8]) -> Result<Vec<u8>> {
    let name = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("start {name}"))?;
    let mut input = child.stdin.take().context("a program without input")?;
    let out = std::thread::scope(|scope| {
        // It may want to write before it has read all.
        let writer = scope.spawn(move || input.write_all(bytes));
        let out = child.wait_with_output();
        drop(writer.join());
        out
    })?;
    ensure!(out.status.success(), "{name} ended with {}", out.status);
    Ok(out.stdout)
}

/// Files below `dir`, each with its path from there, in order.
pub(crate) fn below(dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    let mut open = vec![dir.to_owned()];
    while let Some(at) = open.pop() {
        for entry in std::fs::read_dir(&at).with_context(|| format!("read {}", at.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else {
                let name = path.strip_prefix(dir).context("a path that is elsewhere")?;
                found.push((name.to_string_lossy().into_owned(), path));
            }
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn the_same_contents_are_the_same_bytes() {
        let entries = || [Entry::directory("a"), Entry::text("a/b", "text"), Entry::program("a/c", file!())];
        // Cargo runs tests in the package's directory, and names files from the workspace's.
        std::env::set_current_dir(install::root()).unwrap();
        let one = gzip(&tar(&entries(), 7).unwrap()).unwrap();
        let other = gzip(&tar(&entries(), 7).unwrap()).unwrap();
        assert_eq!(one, other);
        assert_ne!(one, gzip(&tar(&entries(), 8).unwrap()).unwrap());
        assert_eq!(
            sha256(b"abc").unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
