//! The Mooncake transfer engine that a process has mapped: which file, of which version, and whether a probe may sit on it.
//!
//! Reads `/proc/PID/maps` and the names beside the library, nothing of the process's memory. What is not known exactly is refused
//! with its reason. Bounded: 4 MiB of a memory map, 4096 names.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::batch::Layout;

/// Longest memory map that is read: an engine's has some 10 000 lines of 100 bytes.
const LONGEST_MAP: u64 = 4 << 20;

/// Names looked at beside the library.
const MOST_NAMES: usize = 4096;

/// Versions whose arguments and request layout are known from their sources (tags of github.com/kvcache-ai/Mooncake; for
/// 0.3.13 and 0.3.13.post1, and for 0.3.10.post1 and 0.3.12.post1, also from the symbols and instructions of the wheels). Both
/// functions return `Status` since 0.3.0; up to 0.3.8 they are inline and not in the library.
const KNOWN: [(&str, Layout); 11] = [
    ("0.3.8.post1", FEW),
    ("0.3.9", FEW),
    ("0.3.10", FEW),
    ("0.3.10.post1", FEW),
    ("0.3.10.post2", FEW),
    ("0.3.11", FEW),
    ("0.3.11.post1", FEW),
    ("0.3.12", FEW),
    ("0.3.12.post1", FEW),
    ("0.3.13", GROUPED),
    ("0.3.13.post1", GROUPED),
];

/// A request up to `transport_hint`.
const FEW: Layout = Layout { stride: 48 };
/// With `task_group_id` behind it.
const GROUPED: Layout = Layout { stride: 56 };

/// A library that a process has mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// Its path as the process has it.
    pub path: String,
    /// The same from here.
    pub reachable: PathBuf,
    /// Device and inode, as in the memory map.
    pub file: (String, u64),
    /// Its version, as the name of the installed package says.
    pub version: Option<String>,
    /// How it lays out requests, or why no probe may sit on it.
    pub layout: Result<Layout, String>,
}

/// The library of a process; `None`: it has mapped none (yet).
///
/// # Errors
///
/// Its memory map cannot be read: why, for the operator.
pub fn library(proc: &str, pid: u32) -> Result<Option<Library>, String> {
    let path = format!("{proc}/{pid}/maps");
    let mut map = Vec::new();
    File::open(&path).and_then(|file| file.take(LONGEST_MAP).read_to_end(&mut map)).map_err(|e| {
        format!("cannot read {path}: {e} (it needs CAP_SYS_PTRACE, or the agent as the engine's own user)")
    })?;
    let Some((file, path)) = String::from_utf8_lossy(&map).lines().find_map(mapped) else { return Ok(None) };
    let reachable = PathBuf::from(format!("{proc}/{pid}/root{path}"));
    let version = version(&reachable);
    let layout = version.clone().and_then(|version| judge(&version));
    Ok(Some(Library { path, reachable, file, version: version.ok(), layout }))
}

/// The file of a line of the map, where it is the library.
fn mapped(line: &str) -> Option<((String, u64), String)> {
    // Addresses, permissions, offset, device, inode, path.
    let mut fields = line.split_ascii_whitespace();
    let (device, inode) = (fields.nth(3)?, fields.next()?.parse().ok()?);
    let path = line.get(line.find('/')?..)?;
    let (directory, name) = path.rsplit_once('/')?;
    let is =
        name.strip_suffix(".so").is_some_and(|stem| stem == "engine" || stem.starts_with("engine.cpython-"));
    (is && directory.ends_with("/mooncake")).then(|| ((device.to_owned(), inode), path.to_owned()))
}

/// What the installed package beside the library's directory calls its version.
fn version(library: &Path) -> Result<String, String> {
    let packages = library.parent().and_then(Path::parent).ok_or("its directory is not known")?;
    let names = std::fs::read_dir(packages)
        .map_err(|e| format!("its version is not known: cannot list {}: {e}", packages.display()))?;
    let names = names.take(MOST_NAMES).flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut versions: Vec<String> = names.filter_map(|name| of_package(&name)).collect();
    versions.dedup();
    match versions.pop() {
        Some(version) if versions.is_empty() => Ok(version),
        Some(_) => Err("its version is not known: more than one package of Mooncake is installed beside it".to_owned()),
        None => Err("its version is not known: no mooncake_transfer_engine…dist-info is beside it (built from source?)".to_owned()),
    }
}

/// `mooncake_transfer_engine_non_cuda-0.3.13.post1.dist-info` → `0.3.13.post1`.
fn of_package(name: &str) -> Option<String> {
    let (package, version) = name.strip_suffix(".dist-info")?.rsplit_once('-')?;
    package.starts_with("mooncake_transfer_engine").then(|| version.to_owned())
}

fn judge(version: &str) -> Result<Layout, String> {
    if cfg!(not(target_arch = "x86_64")) {
        return Err("how its functions take their arguments is known on x86-64 only".to_owned());
    }
    let known = KNOWN.iter().find(|(known, _)| *known == version).map(|(_, layout)| *layout);
    known.ok_or_else(|| {
        let [(oldest, _), .., (newest, _)] = KNOWN;
        format!("version {version} of Mooncake is not known to this agent, which knows {oldest} to {newest}")
    })
}
