//! The real services that tests run against (OpenTelemetry Collector, Jaeger, …), built from their Go modules.
//!
//! What is built lies in `xtask/services/<module>`: a `go.mod` that pins every version and the `go.sum` that pins what they hold, so that only
//! `go build` runs. Programs are kept in the cache between runs and built anew when their module's files, the flags or Go change.
//! Go is the one on PATH if it is new enough, else the toolchain that the Go project publishes as a module, checked by its sum.

use std::hash::{DefaultHasher, Hasher};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::install;

/// Oldest Go that builds every module in `xtask/services`: the highest `go` line in their `go.mod`s.
const GO_AT_LEAST: [u32; 3] = [1, 26, 0];

/// The Go that is fetched where there is none: `golang.org/toolchain`, and the SHA-256 of its zip.
const TOOLCHAIN: &str = "v0.0.1-go1.26.8.linux-amd64";
const TOOLCHAIN_SUM: &str = "30c2b1bf7dcc88d3eb0a1364e47ddd9128edb3110a30e8a0ef61cd5856b31de7";

/// Where Go's modules come from unless GOPROXY says otherwise (Go's own default).
const PROXY: &str = "https://proxy.golang.org";

/// Of the service discoveries that the Collector and Prometheus carry, only Kubernetes': halves what is built.
const FEW_DISCOVERIES: &str = "remove_all_sd,enable_kubernetes_sd";

/// One program of one Go module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Service {
    /// Name of the program.
    pub(crate) name: &'static str,
    /// Its module: a directory in `xtask/services`. Several programs may come from one.
    pub(crate) module: &'static str,
    /// Package to build, as `go build` takes it.
    pub(crate) package: &'static str,
    /// Build tags, comma-separated.
    pub(crate) tags: &'static str,
    /// For the linker, besides `-s -w`.
    pub(crate) ldflags: &'static str,
}

/// The Collector with the components that `collector-config/` uses, and no others.
pub(crate) const OTELCOL: Service =
    Service { name: "otelcol", module: "otelcol", package: ".", tags: FEW_DISCOVERIES, ldflags: "" };

/// Jaeger, its query API and its store in memory.
pub(crate) const JAEGER: Service = Service {
    name: "jaeger",
    module: "jaeger",
    package: "github.com/jaegertracing/jaeger/cmd/jaeger",
    tags: FEW_DISCOVERIES,
    ldflags: "",
};

/// Reads dashboards strictly, by Grafana's own types.
pub(crate) const DASHBOARD_CHECK: Service =
    Service { name: "dashboard-check", module: "dashboard-check", package: ".", tags: "", ldflags: "" };

/// A program of Kubernetes. Without its version charts take it for older than any.
const fn kubernetes(name: &'static str, package: &'static str) -> Service {
    let ldflags = "-X k8s.io/component-base/version.gitVersion=v1.37.0 \
                   -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37";
    Service { name, module: "kubernetes", package, tags: "", ldflags }
}

/// All of them.
const ALL: &[Service] = &[
    OTELCOL,
    JAEGER,
    Service { name: "etcd", module: "etcd", package: "go.etcd.io/etcd/server/v3", tags: "", ldflags: "" },
    kubernetes("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver"),
    kubernetes("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager"),
    kubernetes("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
    kubernetes("kubelet", "k8s.io/kubernetes/cmd/kubelet"),
    kubernetes("kubectl", "k8s.io/kubernetes/cmd/kubectl"),
    Service { name: "helm", module: "helm", package: "helm.sh/helm/v3/cmd/helm", tags: "", ldflags: "" },
    Service {
        name: "kubeconform",
        module: "kubeconform",
        package: "github.com/yannh/kubeconform/cmd/kubeconform",
        tags: "",
        ldflags: "",
    },
    DASHBOARD_CHECK,
];

/// Builds one by its name.
pub(crate) fn program(name: &str) -> Result<PathBuf> {
    let service = ALL.iter().find(|s| s.name == name);
    build(service.with_context(|| format!("no service is called {name}"))?)
}

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Which ones; all of them if none is named.
    names: Vec<String>,
}

/// Builds them and prints where they are.
pub(crate) fn run(args: &Args) -> Result<()> {
    for name in &args.names {
        if !ALL.iter().any(|s| s.name == name) {
            let known: Vec<_> = ALL.iter().map(|s| s.name).collect();
            bail!("no service is called {name:?}; there are {}", known.join(", "));
        }
    }
    for service in ALL.iter().filter(|s| args.names.is_empty() || args.names.iter().any(|n| n == s.name)) {
        println!("{}", build(service)?.display());
    }
    Ok(())
}

/// Builds it unless that was done before. Returns the program's path.
pub(crate) fn build(service: &Service) -> Result<PathBuf> {
    let module = install::root().join("xtask/services").join(service.module);
    let dir = install::cache()?.join("services").join(service.name);
    std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    let (program, stamp) = (dir.join(service.name), dir.join("made-of"));
    let go = Go::find()?;
    let made_of = format!("{} {:?} {:016x}\n", go.version, service, sum_of(&module)?);
    if program.exists() && std::fs::read_to_string(&stamp).is_ok_and(|s| s == made_of) {
        return Ok(program);
    }
    eprintln!("building {} with {} (once; minutes where Go's caches are empty)", service.name, go.version);
    let begun = Instant::now();
    // Under another name until it is whole: another checkout may build it too, or run the old one.
    let part = dir.join(format!("{}.{}", service.name, std::process::id()));
    let made = install::run(
        go.command()
            .current_dir(&module)
            .args(["build", "-trimpath", "-buildvcs=false", "-tags", service.tags])
            .arg(format!("-ldflags=-s -w {}", service.ldflags))
            .arg("-o")
            .arg(&part)
            .arg(service.package),
    );
    made.and_then(|()| Ok(std::fs::rename(&part, &program)?))
        .inspect_err(|_| drop(std::fs::remove_file(&part)))?;
    std::fs::write(&stamp, made_of).with_context(|| format!("write {}", stamp.display()))?;
    let megabytes = std::fs::metadata(&program)?.len() / 1_000_000;
    eprintln!("built {} in {} s ({megabytes} MB)", service.name, begun.elapsed().as_secs());
    Ok(program)
}

/// Of all files of a module. Not stable between releases of Rust: then it is built once more.
fn sum_of(module: &Path) -> Result<u64> {
    let mut files = Vec::new();
    let mut dirs = vec![module.to_owned()];
    while let Some(dir) = dirs.pop() {
        let entries = std::fs::read_dir(&dir).with_context(|| format!("list {}", dir.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() { dirs.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    let mut sum = DefaultHasher::new();
    for file in files {
        let content = std::fs::read(&file).with_context(|| format!("read {}", file.display()))?;
        sum.write(file.strip_prefix(module)?.as_os_str().as_encoded_bytes());
        sum.write_usize(content.len());
        sum.write(&content);
    }
    Ok(sum.finish())
}

/// A Go that is new enough.
struct Go {
    program: PathBuf,
    /// As it names itself: `go1.26.8`.
    version: String,
}

impl Go {
    fn find() -> Result<Self> {
        match Self::at(Path::new("go")) {
            Some(go) => Ok(go),
            None => fetched(),
        }
    }

    /// The Go that is this program, if it is new enough.
    fn at(program: &Path) -> Option<Self> {
        let mut ask = Command::new(program);
        // Not the one that a go.mod in some directory above would have it fetch.
        let version = install::output(ask.args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local")).ok()?;
        let version = version.trim().to_owned();
        (number(&version)? >= GO_AT_LEAST).then(|| Self { program: program.to_owned(), version })
    }

    /// It with the settings that a build must not take from this user's: flags, workspace, another toolchain, a C compiler.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            // Go takes an empty one for none, and then reads its file of settings.
            .env("GOFLAGS", "-mod=readonly")
            .env("GOWORK", "off")
            .env("GOTOOLCHAIN", "local")
            .env("CGO_ENABLED", "0");
        command
    }
}

/// `go1.26.8` or `go1.27rc1`.
fn number(version: &str) -> Option<[u32; 3]> {
    let plain = version.strip_prefix("go")?;
    let end = plain.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(plain.len());
    let mut parts = plain.get(..end)?.split('.').map(str::parse);
    Some([parts.next()?.ok()?, parts.next()?.ok()?, parts.next().unwrap_or(Ok(0)).ok()?])
}

/// Go from the cache, brought there first if it is missing.
fn fetched() -> Result<Go> {
    let tools = install::cache()?.join("tools");
    let root = tools.join("golang.org").join(format!("toolchain@{TOOLCHAIN}"));
    let program = root.join("bin/go");
    if !program.exists() {
        if std::env::consts::ARCH != "x86_64" {
            bail!(
                "no Go {GO_AT_LEAST:?} or newer on PATH, and the one to fetch is for x86-64: install Go from https://go.dev/dl"
            );
        }
        fetch(&tools).context("no new enough Go is on PATH, and fetching one failed")?;
        // A module's zip says nothing of modes.
        executable(&root.join("bin"))?;
        executable(&root.join("pkg/tool/linux_amd64"))?;
    }
    Go::at(&program).with_context(|| format!("{} does not run, or is too old", program.display()))
}

/// Puts the toolchain under `tools`.
fn fetch(tools: &Path) -> Result<()> {
    install::debian(&["curl", "unzip", "ca-certificates"])?;
    let proxies = std::env::var("GOPROXY").unwrap_or_default();
    let proxy = proxies.split([',', '|']).find(|p| p.contains("://")).unwrap_or(PROXY).trim_end_matches('/');
    std::fs::create_dir_all(tools).with_context(|| format!("create {}", tools.display()))?;
    let zip = tools.join(format!("go.{}.zip", std::process::id()));
    eprintln!("fetching Go {TOOLCHAIN} from {proxy} (once)");
    let url = format!("{proxy}/golang.org/toolchain/@v/{TOOLCHAIN}.zip");
    let unpacked =
        install::run(Command::new("curl").args(["-fsSL", "--retry", "3", "-o"]).arg(&zip).arg(url))
            .and_then(|()| checked(&zip))
            .and_then(|()| {
                install::run(Command::new("unzip").args(["-q", "-o"]).arg(&zip).arg("-d").arg(tools))
            });
    let _ = std::fs::remove_file(&zip);
    unpacked
}

/// Only what its sum names is run.
fn checked(zip: &Path) -> Result<()> {
    let mut sum = Command::new("sha256sum")
        .args(["--check", "--status"])
        .stdin(std::process::Stdio::piped())
        .spawn()
        .context("start sha256sum")?;
    let mut lines = sum.stdin.take().context("sha256sum has no input")?;
    writeln!(lines, "{TOOLCHAIN_SUM}  {}", zip.display()).context("tell sha256sum")?;
    drop(lines);
    if !sum.wait()?.success() {
        bail!("what came as Go's toolchain {TOOLCHAIN} is not what its SHA-256 {TOOLCHAIN_SUM} names");
    }
    Ok(())
}

fn executable(dir: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    for entry in std::fs::read_dir(dir).with_context(|| format!("list {}", dir.display()))? {
        let path = entry?.path();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))
            .with_context(|| format!("make {} executable", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn versions_of_go_are_compared_by_number() {
        assert_eq!(number("go1.26.8"), Some([1, 26, 8]));
        assert_eq!(number("go1.27rc1"), Some([1, 27, 0]));
        assert_eq!(number("go1.26.8-X:nodwarf5"), Some([1, 26, 8]));
        assert!(number("go1.9.7").unwrap() < GO_AT_LEAST);
        assert_eq!(number("devel"), None);
    }

    #[test]
    fn no_module_wants_a_newer_go_than_is_asked_for() {
        for service in ALL {
            let file = install::root().join("xtask/services").join(service.module).join("go.mod");
            let text = std::fs::read_to_string(file).unwrap();
            let wanted = text.lines().find_map(|line| line.strip_prefix("go ")).unwrap();
            assert!(
                number(&format!("go{wanted}")).unwrap() <= GO_AT_LEAST,
                "{}: go {wanted}",
                service.module
            );
        }
    }
}
