//! The Debian package for real: installed, its unit verified, its configuration read, removed, purged.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::install;

/// What it brings, besides documents.
const FILES: [&str; 3] =
    ["/usr/bin/roomtrace", "/usr/lib/systemd/system/roomtrace.service", "/etc/roomtrace/roomtrace.yaml"];

/// Where an agent keeps what outlives it.
const STATE: &str = "/var/lib/roomtrace";

/// Whether the package can be installed and removed here without taking anything from anybody.
pub(super) fn possible() -> Result<()> {
    let installed =
        install::output(Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Abbrev}", "roomtrace"]));
    ensure!(
        !installed.is_ok_and(|s| s.starts_with("ii")),
        "roomtrace is installed on this host: the test would remove it"
    );
    unused(Path::new(STATE))
}

/// No agent runs that keeps its state there.
fn unused(dir: &Path) -> Result<()> {
    let lock = dir.join("state.lock");
    let free = !lock.exists() || Command::new("flock").arg("-n").arg(&lock).arg("true").status()?.success();
    ensure!(free, "an agent of this host uses {}: end it first", dir.display());
    Ok(())
}

/// Checks it.
pub(super) fn check(deb: &Path) -> Result<()> {
    possible()?;
    // Has systemd-analyze; nothing of it is started.
    install::debian(&["systemd"])?;
    let _aside = Aside::put(Path::new(STATE))?;
    install::output(Command::new("dpkg").arg("-i").arg(deb))?;
    let checked = inside();
    install::output(Command::new("dpkg").args(["-r", "roomtrace"]))?;
    let configuration_stays = Path::new(FILES[2]).exists();
    install::output(Command::new("dpkg").args(["-P", "roomtrace"]))?;
    let score = checked?;
    ensure!(configuration_stays, "removing it took its configuration, which only purging may");
    for file in FILES.iter().chain(&["/usr/share/doc/roomtrace", "/etc/roomtrace"]) {
        ensure!(!Path::new(file).exists(), "{file} is left after purging");
    }
    eprintln!("ok: the package installs, its unit is right (exposure {score}), nothing is left of it");
    Ok(())
}

/// The state of an agent that was run by hand, which purging would take. Dropping it brings it back.
struct Aside {
    dir: PathBuf,
    kept: Option<PathBuf>,
}

impl Aside {
    fn put(dir: &Path) -> Result<Self> {
        let mut kept = None;
        if dir.exists() {
            unused(dir)?;
            let to = dir.with_extension(format!("test-{}", std::process::id()));
            std::fs::rename(dir, &to).with_context(|| format!("put {} aside", dir.display()))?;
            kept = Some(to);
        }
        Ok(Self { dir: dir.to_owned(), kept })
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        if let Some(kept) = &self.kept
            && let Err(error) = std::fs::rename(kept, &self.dir)
        {
            eprintln!("{} stays in {}: {error}", self.dir.display(), kept.display());
        }
    }
}

/// While it is installed. The unit's exposure as systemd reckons it.
fn inside() -> Result<String> {
    for file in FILES {
        ensure!(Path::new(file).exists(), "the package brings no {file}");
    }
    install::output(Command::new(FILES[0]).args(["config", "check", FILES[2]]))?;
    let verified = Command::new("systemd-analyze").args(["verify", FILES[1]]).output()?;
    let said = String::from_utf8_lossy(&verified.stderr);
    ensure!(verified.status.success() && !said.contains("roomtrace"), "systemd-analyze verify: {said}");
    let security = ["security", "--offline=true", "--no-pager", FILES[1]];
    let said = install::output(Command::new("systemd-analyze").args(security))?;
    let last = said.lines().rev().find(|l| l.contains("exposure level")).unwrap_or_default();
    Ok(last.rsplit_once(": ").map_or(last, |(_, score)| score).trim().to_owned())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn an_agent_that_runs_is_seen_by_its_lock() {
        let dir = std::env::temp_dir().join(format!("roomtrace-package-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        unused(&dir).unwrap();
        let lock = std::fs::File::create(dir.join("state.lock")).unwrap();
        unused(&dir).unwrap();
        lock.lock().unwrap();
        let why = unused(&dir).unwrap_err().to_string();
        assert!(why.contains("end it first"), "{why}");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
