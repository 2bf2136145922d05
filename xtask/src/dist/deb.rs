//! The Debian package: binary, unit, configuration file, documents, scripts that do without systemd.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::archive::{Content, Entry, gzip};
use super::documents;
use crate::install;

/// What it installs.
pub(crate) fn files(agent: &Path) -> Result<Vec<Entry>> {
    let root = install::root();
    let docs = "usr/share/doc/roomtrace";
    let read = |path: &str| {
        let path = install::root().join(path);
        std::fs::read(&path).with_context(|| format!("read {}", path.display()))
    };
    let mut files = vec![
        Entry::program("usr/bin/roomtrace", agent),
        Entry::file(
            "usr/lib/systemd/system/roomtrace.service",
            root.join("deploy/systemd/roomtrace.service"),
        ),
        Entry::file("etc/roomtrace/roomtrace.yaml", root.join("agent/roomtrace.yaml")),
        Entry::text(format!("{docs}/changelog.gz"), gzip(&read("CHANGELOG.md")?)?),
        Entry::text(format!("{docs}/copyright"), copyright(&read("LICENSE")?)),
    ];
    files.extend(documents::entries(docs)?);
    Ok(files)
}

/// Packs `agent` into `out`/`roomtrace_VERSION_ARCH.deb`.
pub(crate) fn pack(agent: &Path, out: &Path, time: u64) -> Result<PathBuf> {
    let root = out.join("deb-root");
    install::empty(&root)?;
    let put = |entry: &Entry| -> Result<()> {
        let to = root.join(&entry.path);
        let bytes = match &entry.content {
            Content::Directory => {
                return std::fs::create_dir_all(&to).with_context(|| format!("make {}", to.display()));
            }
            Content::File(from) => std::fs::read(from).with_context(|| format!("read {}", from.display()))?,
            Content::Bytes(bytes) => bytes.clone(),
        };
        if let Some(parent) = to.parent() {
            std::fs::create_dir_all(parent)?;
        }
        std::fs::write(&to, bytes).with_context(|| format!("write {}", to.display()))?;
        install::run(Command::new("chmod").arg(format!("{:o}", entry.mode)).arg(&to))
    };
    for entry in files(agent)? {
        put(&entry)?;
    }
    for script in ["postinst", "prerm", "postrm"] {
        let from = install::root().join("deploy/deb").join(script);
        put(&Entry::program(format!("DEBIAN/{script}"), from))?;
    }
    put(&Entry::text("DEBIAN/conffiles", "/etc/roomtrace/roomtrace.yaml\n"))?;
    let architecture = install::output(Command::new("dpkg").arg("--print-architecture"))?;
    let architecture = architecture.trim();
    let control = control(architecture, &glibc(agent)?, installed_kib(&root)?);
    put(&Entry::text("DEBIAN/control", control))?;
    // Whoever packs may have a umask that shuts others out.
    install::run(Command::new("find").arg(&root).args(["-type", "d", "-exec", "chmod", "755", "{}", "+"]))?;
    let file = out.join(format!("roomtrace_{}_{architecture}.deb", env!("CARGO_PKG_VERSION")));
    install::run(
        Command::new("dpkg-deb")
            .args(["--root-owner-group", "-Zxz", "--build"])
            .arg(&root)
            .arg(&file)
            .env("SOURCE_DATE_EPOCH", time.to_string())
            .stdout(std::process::Stdio::null()),
    )?;
    std::fs::remove_dir_all(&root)?;
    Ok(file)
}

fn control(architecture: &str, glibc: &str, kib: u64) -> String {
    format!(
        "Package: roomtrace\n\
         Version: {}\n\
         Architecture: {architecture}\n\
         Maintainer: The Roomtrace authors <roomtrace@users.noreply.github.com>\n\
         Installed-Size: {kib}\n\
         Depends: libc6 (>= {glibc}), libgcc-s1\n\
         Section: admin\n\
         Priority: optional\n\
         Homepage: https://github.com/roomtrace/roomtrace\n\
         Description: finds pinned rooms in disaggregated LLM serving\n \
         Reads the control traffic between prefill and decode engines (SGLang) from the\n \
         kernel with eBPF, and says which request will never finish, who owes the next\n \
         move, and on what evidence. Changes nothing in the engines. Needs Linux 6.3.\n",
        env!("CARGO_PKG_VERSION")
    )
}

/// The newest version of glibc whose symbols a program names (`GLIBC_2.34` in its dynamic symbols).
fn glibc(agent: &Path) -> Result<String> {
    let symbols = install::output(Command::new("objdump").arg("-T").arg(agent))?;
    let minor = newest_glibc(&symbols).context("a program that names no version of glibc")?;
    Ok(format!("2.{minor}"))
}

fn newest_glibc(symbols: &str) -> Option<u32> {
    let named = symbols.split("GLIBC_2.").skip(1);
    let minor = |rest: &str| {
        let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        rest[..end].parse().ok()
    };
    named.filter_map(minor).max()
}

fn installed_kib(root: &Path) -> Result<u64> {
    let said = install::output(Command::new("du").args(["-sk", "--apparent-size"]).arg(root))?;
    said.split_whitespace().next().and_then(|n| n.parse().ok()).context("du says no number")
}

fn copyright(license: &[u8]) -> Vec<u8> {
    let head = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\
                Source: https://github.com/roomtrace/roomtrace\n\n\
                Files: *\nCopyright: The Roomtrace authors\nLicense: Apache-2.0\n \
                On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.\n\
                Comment: the kernel programs that it loads are under \"Dual MIT/GPL\".\n\n";
    // The license itself for other systems: it asks to be handed on.
    [head.as_bytes(), license].concat()
}

#[cfg(test)]
mod tests {
    use super::newest_glibc;

    #[test]
    fn the_newest_glibc_that_is_named_is_needed() {
        let symbols = "(GLIBC_2.2.5) malloc\n(GLIBC_2.34) x\n(GLIBC_2.9) y\n(GLIBC_PRIVATE) z";
        assert_eq!(newest_glibc(symbols), Some(34));
        assert_eq!(newest_glibc("none"), None);
    }
}
