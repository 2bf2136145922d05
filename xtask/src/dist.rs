//! `cargo xtask dist`: what is handed out, in `dist` of cargo's target directory: an archive and a Debian package for hosts, an image
//! archive and a chart for clusters, what the agent is made of (SBOM), checksums.
//!
//! The same commit and toolchain make the same bytes. The agent is the release build that the demo and the live checks
//! run, stripped, so that what was tested is what is handed out, and nothing is compiled twice.

pub(crate) mod archive;
mod deb;
mod documents;
pub(crate) mod image;
mod sbom;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::install;
use archive::{Entry, below, gzip, sha256, tar};

/// Version of everything here.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Authorities that the system trusts, as Debian's package ca-certificates writes them.
const CERTIFICATES: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Arguments.
#[derive(clap::Args, Default)]
pub(crate) struct Args {
    /// Pack this agent instead of building one.
    #[arg(long, value_name = "FILE")]
    pub(crate) agent: Option<PathBuf>,
}

/// What was made.
pub(crate) struct Made {
    /// The agent that it was made of.
    pub(crate) agent: PathBuf,
    pub(crate) deb: PathBuf,
    pub(crate) image: PathBuf,
}

/// Name and tag of the image: what the chart has for a default.
pub(crate) fn image_name() -> String {
    format!("ghcr.io/roomtrace/roomtrace:{VERSION}")
}

/// Runs it.
pub(crate) fn run(args: &Args) -> Result<()> {
    make(args).map(drop)
}

/// Makes everything anew.
pub(crate) fn make(args: &Args) -> Result<Made> {
    let out = install::target().join("dist");
    install::empty(&out)?;
    install::debian(&["binutils", "xz-utils", "ca-certificates"])?;
    let built = built(args)?;
    let agent = stripped(&built, &out)?;
    let time = archive::time();
    let deb = deb::pack(&agent, &out, time)?;
    let image = out.join(format!("roomtrace-{VERSION}-image.tar"));
    write(&image, &pack_image(&agent, time)?)?;
    let name = format!("roomtrace-{VERSION}-{}-linux", std::env::consts::ARCH);
    write(&out.join(format!("{name}.tar.gz")), &gzip(&tar(&for_hosts(&name, &agent)?, time)?)?)?;
    // As `helm package` names and packs it.
    write(&out.join(format!("roomtrace-{VERSION}.tgz")), &gzip(&tar(&chart()?, time)?)?)?;
    let mut of_debian = image::libraries(&agent)?;
    // Of the package that wrote the certificates.
    of_debian.push("/usr/sbin/update-ca-certificates".into());
    let bom = sbom::document(&of_debian, &image::time_text(time)?)?;
    write(&out.join(format!("roomtrace-{VERSION}.cdx.json")), bom.as_bytes())?;
    std::fs::remove_file(&agent)?;
    let sums = checksums(&out)?;
    write(&out.join("SHA256SUMS"), sums.as_bytes())?;
    eprint!("{}:\n{sums}", out.display());
    Ok(Made { agent: built, deb, image })
}

/// The agent that was given, else one that is built.
fn built(args: &Args) -> Result<PathBuf> {
    if let Some(given) = &args.agent {
        return Ok(given.clone());
    }
    install::cargo(&["build", "--quiet", "--release", "--package", "roomtrace"])?;
    Ok(install::target().join("release/roomtrace"))
}

/// The agent without what only debuggers read.
fn stripped(agent: &Path, out: &Path) -> Result<PathBuf> {
    let stripped = out.join("roomtrace");
    install::run(Command::new("strip").arg("-o").arg(&stripped).arg(agent))?;
    Ok(stripped)
}

fn pack_image(agent: &Path, time: u64) -> Result<Vec<u8>> {
    let license = Entry::file("usr/share/doc/roomtrace/LICENSE", install::root().join("LICENSE"));
    let mut entries = image::root(&[("usr/bin/roomtrace", agent)])?;
    entries.extend(["usr/share", "usr/share/doc", "usr/share/doc/roomtrace"].map(Entry::directory));
    entries.push(license);
    // `roomtrace rooms` and its like build an HTTPS client, which refuses to be without.
    entries.extend(["etc/ssl", "etc/ssl/certs"].map(Entry::directory));
    entries.push(Entry::file(&CERTIFICATES[1..], CERTIFICATES));
    image::archive(&image::Image {
        name: &image_name(),
        entries,
        entrypoint: vec!["/usr/bin/roomtrace".to_owned()],
        time,
    })
}

/// What a host without packages gets, in one directory.
fn for_hosts(name: &str, agent: &Path) -> Result<Vec<Entry>> {
    let root = install::root();
    let at = |path: &str| format!("{name}/{path}");
    let mut entries = vec![
        Entry::directory(name),
        Entry::program(at("roomtrace"), agent),
        Entry::file(at("roomtrace.service"), root.join("deploy/systemd/roomtrace.service")),
        Entry::file(at("roomtrace.yaml"), root.join("agent/roomtrace.yaml")),
    ];
    entries.push(Entry::file(at("LICENSE"), root.join("LICENSE")));
    entries.extend(documents::entries(name)?);
    Ok(entries)
}

fn chart() -> Result<Vec<Entry>> {
    let files = below(&install::root().join("deploy/helm/roomtrace"))?;
    Ok(files.into_iter().map(|(path, file)| Entry::file(format!("roomtrace/{path}"), file)).collect())
}

/// As `sha256sum --check` takes them.
fn checksums(out: &Path) -> Result<String> {
    let mut sums = String::new();
    for (name, file) in below(out)? {
        let bytes = std::fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        let _ = writeln!(sums, "{}  {name}", sha256(&bytes)?);
    }
    Ok(sums)
}

fn write(file: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(file, bytes).with_context(|| format!("write {}", file.display()))
}
