//! The real engine: SGLang with Mooncake, and NIXL beside it, in virtual environments in the cache.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::install;

/// Releases that the results are for.
const SGLANG: &str = "0.5.23";
const MOONCAKE: &str = "0.3.13.post1";
const NIXL: &str = "1.5.2";
const NIXL_CU13: &str = "1.5.1";

const ROUTER: &str = "0.3.2";

/// What SGLang imports for its spans; the router's package depends on none of it.
const TRACING: [&str; 10] = [
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-semantic-conventions",
    "opentelemetry-proto",
    "opentelemetry-exporter-otlp-common",
    "opentelemetry-exporter-otlp-proto-common",
    "opentelemetry-exporter-otlp-proto-grpc",
    "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry-exporter-http-transport",
    "googleapis-common-protos",
];

/// What Mooncake's library links and its wheel does not bring.
const LIBRARIES: [&str; 3] = ["libibverbs1", "libnuma1", "libcurl4"];

/// An installed engine.
pub(super) struct Engine {
    /// The interpreter that has SGLang.
    pub(super) python: PathBuf,
    /// The directory that has NIXL.
    pub(super) nixl: PathBuf,
}

impl Engine {
    /// The releases, for people.
    pub(super) fn releases() -> String {
        format!("SGLang {SGLANG}, Mooncake {MOONCAKE}, NIXL {NIXL}")
    }
}

/// Finds the engine, or installs what is missing of it.
pub(super) fn engine() -> Result<Engine> {
    let dir = install::cache()?.join("engine");
    std::fs::create_dir_all(&dir).with_context(|| format!("create {}", dir.display()))?;
    install::debian(&LIBRARIES)?;
    let environment = dir.join("sgenv");
    let engine = Engine { python: environment.join("bin/python"), nixl: dir.join("nixl_site") };
    let mooncake = "mooncake-transfer-engine-non-cuda";
    if version(&engine, "sglang").as_deref() != Some(SGLANG)
        || version(&engine, mooncake).as_deref() != Some(MOONCAKE)
    {
        eprintln!(
            "installing SGLang {SGLANG} and Mooncake {MOONCAKE} in {} (10 GB) …",
            environment.display()
        );
        let uv = uv(&dir)?;
        install::run(
            Command::new(&uv).args(["venv", "--quiet", "--clear", "--python", "3.11"]).arg(&environment),
        )?;
        install::run(
            Command::new(&uv)
                .args(["pip", "install", "--quiet", "--python"])
                .arg(&engine.python)
                .args([format!("sglang=={SGLANG}"), format!("{mooncake}=={MOONCAKE}")]),
        )?;
    }
    if !engine.nixl.join(format!("nixl-{NIXL}.dist-info")).is_dir() {
        eprintln!("installing NIXL {NIXL} in {} …", engine.nixl.display());
        install::run(
            Command::new(uv(&dir)?)
                .args(["pip", "install", "--quiet", "--no-deps", "--python"])
                .arg(&engine.python)
                .arg("--target")
                .arg(&engine.nixl)
                .args([format!("nixl=={NIXL}"), format!("nixl-cu13=={NIXL_CU13}")]),
        )?;
    }
    Ok(engine)
}

/// Installs the router and what the servers' spans need beside the engine, and says where.
pub(super) fn router() -> Result<PathBuf> {
    let engine = engine()?;
    let dir = install::cache()?.join("engine");
    let site = dir.join("sgx");
    if !site.join(format!("sglang_router-{ROUTER}.dist-info")).is_dir() {
        eprintln!("installing SGLang's router {ROUTER} in {} …", site.display());
        install::run(
            Command::new(uv(&dir)?)
                .args(["pip", "install", "--quiet", "--no-deps", "--python"])
                .arg(&engine.python)
                .arg("--target")
                .arg(&site)
                .arg(format!("sglang-router=={ROUTER}"))
                .args(TRACING),
        )?;
    }
    Ok(site)
}

/// The installed version of a package, if any.
fn version(engine: &Engine, package: &str) -> Option<String> {
    let code = format!("import importlib.metadata as m; print(m.version({package:?}))");
    let out = Command::new(&engine.python).args(["-c", &code]).output().ok()?;
    out.status.success().then(|| String::from_utf8_lossy(&out.stdout).trim().to_owned())
}

/// The installer uv, which needs half a minute where pip needs ten: that of the path, or one of our own.
fn uv(dir: &std::path::Path) -> Result<PathBuf> {
    let usable =
        |program: &PathBuf| Command::new(program).arg("--version").output().is_ok_and(|o| o.status.success());
    let on_path = PathBuf::from("uv");
    if usable(&on_path) {
        return Ok(on_path);
    }
    let own = dir.join("uv/bin/uv");
    if !usable(&own) {
        install::debian(&["python3-venv"])?;
        install::run(Command::new("python3").args(["-m", "venv"]).arg(dir.join("uv")))?;
        install::run(Command::new(dir.join("uv/bin/pip")).args(["install", "--quiet", "uv"]))?;
    }
    Ok(own)
}
