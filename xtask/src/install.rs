//! Runs commands and installs Debian packages, saying what it does. Installs only what is missing.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// Root of the checkout.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

/// Where cargo builds: `$CARGO_TARGET_DIR`, else `target` in the checkout.
pub(crate) fn target() -> PathBuf {
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()))
}

/// Cargo in the checkout, without what `cargo run` told xtask of its own package: build scripts that watch those variables
/// (ring's does) would run again, and all above them be built anew, at each change between `cargo xtask` and plain `cargo`.
pub(crate) fn cargo_command() -> Command {
    let mut command = Command::new("cargo");
    command.current_dir(root());
    for (name, _) in std::env::vars_os() {
        let package = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        if name.to_str().is_some_and(package) {
            command.env_remove(name);
        }
    }
    command
}

/// Runs cargo in the checkout.
pub(crate) fn cargo(arguments: &[&str]) -> Result<()> {
    run(cargo_command().args(arguments))
}

/// Makes a directory anew, empty. Asks first whether this user may build beside it: what another user left there is the
/// usual reason why not.
pub(crate) fn empty(dir: &Path) -> Result<()> {
    let target = target();
    let own = [&target, &target.join("debug"), &target.join("release"), &dir.to_owned()];
    for place in own.into_iter().filter(|place| place.exists()) {
        let probe = place.join(".may-write");
        let may = std::fs::write(&probe, "").and_then(|()| std::fs::remove_file(&probe));
        may.map_err(|error| not_ours(place, &target, &error))?;
    }
    let made = if dir.exists() { std::fs::remove_dir_all(dir) } else { Ok(()) };
    made.and_then(|()| std::fs::create_dir_all(dir)).map_err(|error| not_ours(dir, &target, &error))
}

fn not_ours(place: &Path, target: &Path, error: &std::io::Error) -> anyhow::Error {
    anyhow::anyhow!(
        "cannot write to {}: {error}. If another user, such as root, built here before: give it back with \
         `sudo chown -R \"$(id -u)\" {}`, or build elsewhere with `CARGO_TARGET_DIR=\"$HOME/roomtrace-target\" cargo xtask …`",
        place.display(),
        target.display()
    )
}

/// Where tools and services that take long to build are kept between runs (`$XDG_CACHE_HOME/roomtrace` or
/// `~/.cache/roomtrace`).
pub(crate) fn cache() -> Result<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|h| Path::new(&h).join(".cache")))
        .context("neither XDG_CACHE_HOME nor HOME is set: nowhere to keep built tools")?;
    let dir = base.join("roomtrace");
    std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    Ok(dir)
}

/// Runs a command and fails with its line when it fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = line(command);
    let status = command.status().with_context(|| format!("start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` ended with {status}");
    }
    Ok(())
}

/// Runs a command and returns its standard output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = line(command);
    let out = command.output().with_context(|| format!("start `{line}`"))?;
    if !out.status.success() {
        bail!("`{line}` ended with {}: {}", out.status, String::from_utf8_lossy(&out.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&out.stdout).into_owned())
}

/// Installs those Debian packages of `packages` that are not installed yet.
pub(crate) fn debian(packages: &[&str]) -> Result<()> {
    let missing: Vec<&str> = packages
        .iter()
        .copied()
        .filter(|p| {
            let status = output(Command::new("dpkg-query").args(["-W", "-f", "${db:Status-Abbrev}", p]));
            !status.is_ok_and(|s| s.starts_with("ii"))
        })
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    eprintln!("installing Debian packages: {}", missing.join(" "));
    run(Command::new("apt-get").args(["-q", "update"]))?;
    run(Command::new("apt-get")
        .args(["-q", "-y", "--no-install-recommends", "install"])
        .args(&missing)
        .env("DEBIAN_FRONTEND", "noninteractive"))
    .with_context(|| {
        format!("these packages are needed and could not be installed (are you root?): {}", missing.join(" "))
    })
}

/// A file of a Debian package that is not to be installed, because it would start a service. Kept in the cache.
pub(crate) fn from_debian(package: &str, file: &str) -> Result<PathBuf> {
    let dir = cache()?.join("tools").join(package);
    let program = dir.join(file);
    if !program.exists() {
        eprintln!("fetching {file} of the Debian package {package} (once)");
        std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
        let fetch = || run(Command::new("apt-get").args(["-q", "download", package]).current_dir(&dir));
        // The lists of packages may be missing, or older than what is served.
        if fetch().is_err() {
            run(Command::new("apt-get").args(["-q", "update"]))?;
            fetch()?;
        }
        for entry in std::fs::read_dir(&dir)? {
            let archive = entry?.path();
            if archive.extension().is_some_and(|e| e == "deb") {
                run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&dir))?;
                std::fs::remove_file(&archive)?;
            }
        }
    }
    if !program.exists() {
        bail!("the Debian package {package} has no {file}");
    }
    Ok(program)
}

/// A program from crates.io, built once into the cache and kept; rebuilt when `version` changes.
pub(crate) fn cargo_tool(name: &str, version: &str, extra: &[&str]) -> Result<PathBuf> {
    let tools = cache()?.join("tools");
    let program = tools.join("bin").join(name);
    let current = output(Command::new(&program).arg("--version")).unwrap_or_default();
    if !current.split_whitespace().any(|word| word == version) {
        eprintln!("building {name} {version} (once)");
        run(Command::new("cargo")
            .args(["install", "--locked", "--quiet", "--force", "--version", version, "--root"])
            .arg(&tools)
            .args(extra)
            .arg(name))?;
    }
    Ok(program)
}

fn line(command: &Command) -> String {
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(OsStr::to_string_lossy)
        .collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn a_directory_that_is_not_ours_is_said_so_with_the_way_out() {
        // Not even root can make files here.
        let error = empty(Path::new("/proc/self")).unwrap_err();
        let said = format!("{error:#}");
        assert!(said.starts_with("cannot write to /proc/self: "), "{said}");
        assert!(said.contains("chown -R") && said.contains("CARGO_TARGET_DIR="), "{said}");
    }
}
