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
    let is = name == "engine.so" || (name.starts_with("engine.cpython-") && name.ends_with(".so"));
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    const PACKAGES: &str = "usr/lib/python3/site-packages";

    /// A process that has mapped the library, with these names beside it.
    fn process(names: &[&str]) -> (tempfile::TempDir, String) {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("7/root").join(PACKAGES);
        for name in names {
            std::fs::create_dir_all(root.join(name)).unwrap();
        }
        std::fs::create_dir_all(root.join("mooncake")).unwrap();
        let map = format!(
            "55d0-55d1 r--p 00000000 08:01 12 /usr/bin/python3.11\n7f00-7f01 rw-p 00000000 00:00 0 \n\
             7f10-7f20 r-xp 000cb000 08:01 4711                       /{PACKAGES}/mooncake/engine.so\n"
        );
        std::fs::write(dir.path().join("7/maps"), map).unwrap();
        let proc = dir.path().to_str().unwrap().to_owned();
        (dir, proc)
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn a_known_version_has_its_layout() {
        for (version, stride) in [("0.3.9", 48), ("0.3.12.post1", 48), ("0.3.13", 56), ("0.3.13.post1", 56)] {
            for package in ["mooncake_transfer_engine", "mooncake_transfer_engine_non_cuda"] {
                let (_dir, proc) =
                    process(&["torch-2.14.1.dist-info", &format!("{package}-{version}.dist-info")]);
                let found = library(&proc, 7).unwrap().unwrap();
                assert_eq!(found.layout, Ok(Layout { stride }), "{version}");
                assert_eq!(
                    (found.file, found.version.as_deref()),
                    (("08:01".to_owned(), 4711), Some(version))
                );
                assert!(found.reachable.ends_with(format!("7/root/{PACKAGES}/mooncake/engine.so")));
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn what_is_not_known_exactly_is_refused_with_its_reason() {
        let refused = |names: &[&str]| {
            let (_dir, proc) = process(names);
            library(&proc, 7).unwrap().unwrap().layout.unwrap_err()
        };
        let why = refused(&["mooncake_transfer_engine-0.4.0.dist-info"]);
        assert_eq!(
            why,
            "version 0.4.0 of Mooncake is not known to this agent, which knows 0.3.8.post1 to 0.3.13.post1"
        );
        // Its functions are inline there, so the library has no such symbols.
        assert!(refused(&["mooncake_transfer_engine-0.3.7.post2.dist-info"]).contains("0.3.7.post2"));
        assert!(refused(&[]).contains("built from source?"));
        let two = [
            "mooncake_transfer_engine-0.3.9.dist-info",
            "mooncake_transfer_engine_non_cuda-0.3.12.dist-info",
        ];
        assert!(refused(&two).contains("more than one"));
    }

    #[test]
    fn a_process_without_it_has_none_and_one_that_is_gone_says_so() {
        let (dir, proc) = process(&[]);
        std::fs::write(
            dir.path().join("7/maps"),
            "7f10-7f20 r-xp 0 08:01 4 /x/engine.so\n7f r x 0 y /mooncake/engine.so",
        )
        .unwrap();
        assert_eq!(library(&proc, 7), Ok(None));
        assert!(library(&proc, 8).unwrap_err().contains("cannot read"));
    }
}
