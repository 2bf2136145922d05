//! The Debian package for real: installed, its unit verified, its configuration read, removed, purged.

use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};

use crate::install;

/// What it brings, besides documents.
const FILES: [&str; 3] =
    ["/usr/bin/roomtrace", "/usr/lib/systemd/system/roomtrace.service", "/etc/roomtrace/roomtrace.yaml"];

/// Checks it.
pub(super) fn check(deb: &Path) -> Result<()> {
    let installed =
        install::output(Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Abbrev}", "roomtrace"]));
    ensure!(
        !installed.is_ok_and(|s| s.starts_with("ii")),
        "roomtrace is installed on this host: the test would remove it"
    );
    // Has systemd-analyze; nothing of it is started.
    install::debian(&["systemd"])?;
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
