//! Container images without a container engine: a program, the shared libraries that it loads, nothing else; as the archive that
//! `docker load`, `podman load`, `ctr image import` and `skopeo copy docker-archive:` take.
//!
//! The agent cannot be one static binary: the driver's library (NVML) is loaded at run time, and a static glibc crashes as soon as a
//! library so loaded starts a thread. So the dynamic loader and glibc's own libraries are in the image, those that
//! the driver's library names among them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::archive::{Entry, sha256, tar};
use crate::install;

/// Parts of glibc that NVIDIA's library names besides those of the agent; empty since 2.34, but looked for.
const OF_THE_DRIVER: [&str; 5] = ["libdl.so.2", "libpthread.so.0", "librt.so.1", "libm.so.6", "libc.so.6"];

/// What is in an image.
pub(crate) struct Image<'a> {
    /// Name and tag under which it is known after loading.
    pub(crate) name: &'a str,
    pub(crate) entries: Vec<Entry>,
    /// Program and arguments that always are its.
    pub(crate) entrypoint: Vec<String>,
    /// Seconds since 1970.
    pub(crate) time: u64,
}

/// Where a program and the libraries that it loads lie, the loader among them, and glibc's further parts.
pub(crate) fn libraries(program: &Path) -> Result<Vec<PathBuf>> {
    let said = install::output(Command::new("ldd").arg(program))?;
    let mut found: BTreeSet<PathBuf> = BTreeSet::new();
    for line in said.lines() {
        if line.contains("not found") {
            bail!("{}: {}", program.display(), line.trim());
        }
        // `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)`, `/lib64/ld-linux-x86-64.so.2 (0x…)`; the kernel's has no path.
        let path = line.split_whitespace().find(|word| word.starts_with('/'));
        found.extend(path.map(PathBuf::from));
    }
    let libc = found.iter().find(|path| path.ends_with("libc.so.6"));
    let Some(dir) = libc.and_then(|path| path.parent()).map(Path::to_owned) else {
        bail!("{} does not load glibc: {said}", program.display());
    };
    let further = OF_THE_DRIVER.iter().map(|name| dir.join(name)).filter(|path| path.exists());
    found.extend(further);
    Ok(found.into_iter().collect())
}

/// The entries of a root directory with these programs (path in the image, file) and what they load.
pub(crate) fn root(programs: &[(&str, &Path)]) -> Result<Vec<Entry>> {
    let mut files: BTreeSet<PathBuf> = BTreeSet::new();
    for (_, program) in programs {
        files.extend(libraries(program)?);
    }
    let mut directories: BTreeSet<String> = BTreeSet::new();
    // NVIDIA's container runtime puts its library where Debian has them, and writes the loader's cache.
    for needed in ["etc", "proc", "sys", "dev", "run", "tmp", "usr/lib/x86_64-linux-gnu"] {
        add_with_parents(&mut directories, needed);
    }
    let inside = |path: &Path| path.to_string_lossy().trim_start_matches('/').to_owned();
    let paths = programs.iter().map(|(path, _)| (*path).to_owned()).chain(files.iter().map(|f| inside(f)));
    for path in paths {
        if let Some((parent, _)) = path.rsplit_once('/') {
            add_with_parents(&mut directories, parent);
        }
    }
    let mut entries: Vec<Entry> = directories.into_iter().map(Entry::directory).collect();
    entries.push(Entry::text("etc/passwd", "root:x:0:0:root:/:/sbin/nologin\n"));
    entries.push(Entry::text("etc/group", "root:x:0:\n"));
    // Names are looked up by glibc itself, without further libraries.
    entries.push(Entry::text("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"));
    // The library itself, not the link to it.
    entries.extend(files.iter().map(|file| Entry::program(inside(file), file)));
    entries.extend(programs.iter().map(|(path, file)| Entry::program(*path, *file)));
    Ok(entries)
}

fn add_with_parents(directories: &mut BTreeSet<String>, path: &str) {
    let mut end = Some(path.len());
    while let Some(at) = end {
        directories.insert(path[..at].to_owned());
        end = path[..at].rfind('/');
    }
}

/// The archive: one layer, its configuration, and the manifest that names both (Docker image specification 1.2).
pub(crate) fn archive(image: &Image<'_>) -> Result<Vec<u8>> {
    let layer = tar(&image.entries, image.time)?;
    let digest = sha256(&layer)?;
    let config = json!({
        "architecture": match std::env::consts::ARCH { "x86_64" => "amd64", "aarch64" => "arm64", other => other },
        "os": "linux",
        "created": time_text(image.time)?,
        "config": {
            "Entrypoint": image.entrypoint,
            "Env": ["PATH=/usr/bin:/bin"],
            "Labels": {
                "org.opencontainers.image.source": "https://github.com/roomtrace/roomtrace",
                "org.opencontainers.image.version": env!("CARGO_PKG_VERSION"),
                "org.opencontainers.image.licenses": "Apache-2.0",
            },
        },
        "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
        "history": [{"created": time_text(image.time)?, "created_by": "cargo xtask dist"}],
    })
    .to_string();
    let config_name = format!("{}.json", sha256(config.as_bytes())?);
    let layer_name = format!("{digest}/layer.tar");
    let manifest =
        json!([{"Config": config_name, "RepoTags": [image.name], "Layers": [layer_name]}]).to_string();
    let entries = [
        Entry::text(config_name, config),
        Entry::directory(digest),
        Entry::text(layer_name, layer),
        Entry::text("manifest.json", manifest),
    ];
    tar(&entries, image.time)
}

/// RFC 3339.
pub(crate) fn time_text(seconds: u64) -> Result<String> {
    let mut date = Command::new("date");
    let said = install::output(date.args(["-u", "-d", &format!("@{seconds}"), "+%Y-%m-%dT%H:%M:%SZ"]));
    Ok(said.context("write a time")?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use std::io::Read as _;

    #[test]
    fn an_image_runs_without_anything_of_the_host() {
        let this = std::env::current_exe().unwrap();
        let entries = root(&[("usr/bin/program", &this)]).unwrap();
        let paths: Vec<&str> = entries.iter().map(|e| e.path.as_str()).collect();
        for ends in ["libc.so.6", "libdl.so.2", "usr/bin/program"] {
            assert!(paths.iter().any(|path| path.ends_with(ends)), "{ends}: {paths:?}");
        }
        assert!(paths.iter().any(|path| path.contains("ld-linux")), "{paths:?}");
        // Every directory comes before what is in it.
        for (n, path) in paths.iter().enumerate() {
            if let Some((parent, _)) = path.rsplit_once('/') {
                assert!(paths[..n].contains(&parent), "{parent} of {path}");
            }
        }
    }

    #[test]
    fn the_archive_names_its_layer_by_its_digest() {
        let image = Image {
            name: "example.invalid/x:1",
            entries: vec![Entry::text("a", "b")],
            entrypoint: vec!["/a".to_owned()],
            time: 0,
        };
        let bytes = archive(&image).unwrap();
        let mut files = std::collections::BTreeMap::new();
        for entry in tar::Archive::new(bytes.as_slice()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            files.insert(entry.path().unwrap().to_string_lossy().into_owned(), content);
        }
        let manifest: serde_json::Value = serde_json::from_slice(&files["manifest.json"]).unwrap();
        let layer = manifest[0]["Layers"][0].as_str().unwrap();
        let config: serde_json::Value =
            serde_json::from_slice(&files[manifest[0]["Config"].as_str().unwrap()]).unwrap();
        let digest = format!("sha256:{}", sha256(&files[layer]).unwrap());
        assert_eq!(config["rootfs"]["diff_ids"][0], digest.as_str());
        assert_eq!(config["created"], "1970-01-01T00:00:00Z");
    }
}
