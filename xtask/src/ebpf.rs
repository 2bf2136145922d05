//! `cargo xtask build-ebpf`: the kernel programs' objects, rebuilt from source, byte for byte the same in every
//! checkout.
//!
//! Needs a Rust compiler with its library's source and the LLVM it was built with: on Debian the packages below,
//! elsewhere set `ROOMTRACE_BPF_RUSTC`, `ROOMTRACE_BPF_CARGO` and `ROOMTRACE_BPF_LLVM`. An object that another
//! compiler built works, but is not byte for byte the checked-in one, so `--check` needs these very packages.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::install;

/// A Rust 1.96 with sources, and LLVM 22, which it was built with.
const PACKAGES: [&str; 4] = ["rustc-web", "cargo-web", "rust-web-src", "llvm-22-dev"];
const LINKER: &str = "0.13.0";
/// Programs and where their objects are checked in.
const OBJECTS: [(&str, &str); 2] = [("roomtrace", "ebpf/roomtrace.bpf.o"), ("probes", "ebpf/probes.bpf.o")];

/// A function that the kernel calls back: the loader needs its symbol, though no relocation names it.
const CALLBACK: &str = "batch_piece";

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Change nothing; fail if a checked-in object is not what the sources give.
    #[arg(long)]
    pub(crate) check: bool,
}

/// Runs it.
pub(crate) fn run(args: &Args) -> Result<()> {
    let tools = toolchain()?;
    compile(&tools)?;
    for (program, object) in OBJECTS {
        compare(&strip(&tools, program)?, object, args.check)?;
    }
    Ok(())
}

/// Puts a new object in the place of the old one.
fn compare(built: &[u8], object: &str, check: bool) -> Result<()> {
    let target = install::root().join(object);
    let old = std::fs::read(&target).unwrap_or_default();
    if old == built {
        println!("{object} is what the sources give ({} bytes)", built.len());
        return Ok(());
    }
    if check {
        bail!(
            "{object} is stale: the sources in ebpf/ give another object ({} bytes, checked in: {} bytes). Run \
             `cargo xtask build-ebpf` and commit the result",
            built.len(),
            old.len()
        );
    }
    std::fs::write(&target, built).with_context(|| format!("write {}", target.display()))?;
    println!("{object} written ({} bytes)", built.len());
    Ok(())
}

struct Toolchain {
    rustc: PathBuf,
    cargo: PathBuf,
    llvm: PathBuf,
    linker: PathBuf,
}

/// Installs what is missing.
fn toolchain() -> Result<Toolchain> {
    let given = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let own = (given("ROOMTRACE_BPF_RUSTC"), given("ROOMTRACE_BPF_CARGO"), given("ROOMTRACE_BPF_LLVM"));
    let (rustc, cargo, llvm) = match own {
        (Some(rustc), Some(cargo), Some(llvm)) => (rustc, cargo, llvm),
        (None, None, None) => {
            install::debian(&PACKAGES)?;
            ("/usr/bin/rustc".into(), "/usr/bin/cargo".into(), "/usr/lib/llvm-22".into())
        }
        _ => bail!("set all of ROOMTRACE_BPF_RUSTC, ROOMTRACE_BPF_CARGO and ROOMTRACE_BPF_LLVM, or none"),
    };
    let root = install::cache()?.join(format!("bpf-linker-{LINKER}"));
    let linker = root.join("bin/bpf-linker");
    if !linker.is_file() {
        eprintln!("building bpf-linker {LINKER} (about a minute)");
        install::run(
            plain(&cargo, &rustc)
                .args(["install", "bpf-linker", "--locked", "--version", LINKER])
                .args(["--no-default-features", "--features", "llvm-22", "--root"])
                .arg(&root)
                .env("LLVM_PREFIX", &llvm)
                .current_dir(root_of(&root)?),
        )
        .context(
            "bpf-linker links the kernel programs; it needs the LLVM that the compiler was built with",
        )?;
    }
    Ok(Toolchain { rustc, cargo, llvm, linker })
}

fn target_directory() -> PathBuf {
    install::root().join("ebpf/programs/target")
}

fn compile(tools: &Toolchain) -> Result<()> {
    install::run(
        plain(&tools.cargo, &tools.rustc)
            .args(["build", "--locked", "--release", "--quiet", "-Z", "build-std=core"])
            .args(["--target", "bpfel-unknown-none", "--target-dir"])
            .arg(target_directory())
            .env("RUSTC_BOOTSTRAP", "1") // `-Z` and the target want an unstable compiler; any will do
            .env("CARGO_ENCODED_RUSTFLAGS", flags(tools)?.join("\x1f"))
            .current_dir(install::root().join("ebpf/programs")),
    )
    .context("compile the kernel programs")
}

/// Leaves only what the kernel and the loader read.
fn strip(tools: &Toolchain, program: &str) -> Result<Vec<u8>> {
    let linked = target_directory().join("bpfel-unknown-none/release").join(program);
    let stripped = target_directory().join(format!("{program}.bpf.o"));
    let symbols =
        install::output(Command::new(tools.llvm.join("bin/llvm-nm")).arg("--just-symbol-name").arg(&linked))?;
    let mut objcopy = Command::new(tools.llvm.join("bin/llvm-objcopy"));
    // The compiler's own name for it differs from checkout to checkout.
    if let Some(mangled) = symbols.lines().find(|name| name.ends_with(CALLBACK)) {
        objcopy.args(["--keep-symbol", CALLBACK, "--redefine-sym"]).arg(format!("{mangled}={CALLBACK}"));
    }
    install::run(objcopy.args(["--strip-debug", "--strip-unneeded"]).args([&linked, &stripped]))
        .context("strip the object (BTF stays, DWARF goes)")?;
    std::fs::read(&stripped).with_context(|| format!("read {}", stripped.display()))
}

fn flags(tools: &Toolchain) -> Result<Vec<String>> {
    let mut flags = vec![
        "-C".to_owned(),
        format!("linker={}", tools.linker.display()),
        // Atomics and 32-bit jumps: kernels from 5.12, older than any that has these hooks.
        "-Ctarget-cpu=v3".to_owned(),
        // DWARF is what the linker makes BTF from.
        "-Cdebuginfo=2".to_owned(),
        "-Clink-arg=--btf".to_owned(),
    ];
    // No path of this machine in the object.
    flags.push(format!("--remap-path-prefix={}=/roomtrace", install::root().display()));
    flags.push(format!("--remap-path-prefix={}=/rust", sysroot(tools)?.display()));
    if let Some(home) = cargo_home() {
        let registries = std::fs::read_dir(home.join("registry/src")).into_iter().flatten().flatten();
        flags.extend(registries.map(|dir| format!("--remap-path-prefix={}=/registry", dir.path().display())));
    }
    Ok(flags)
}

fn sysroot(tools: &Toolchain) -> Result<PathBuf> {
    Ok(install::output(Command::new(&tools.rustc).args(["--print", "sysroot"]))?.trim().into())
}

fn cargo_home() -> Option<PathBuf> {
    std::env::var_os("CARGO_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cargo")))
}

fn root_of(path: &Path) -> Result<PathBuf> {
    path.parent().map(Path::to_path_buf).context("the cache directory has no parent")
}

/// A cargo that knows nothing of the one that runs this.
fn plain(cargo: &Path, rustc: &Path) -> Command {
    let mut command = Command::new(cargo);
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if (text.starts_with("CARGO_") && text != "CARGO_HOME" && !text.starts_with("CARGO_HTTP"))
            || text.starts_with("RUST")
        {
            command.env_remove(&name);
        }
    }
    command.env("RUSTC", rustc);
    command
}
