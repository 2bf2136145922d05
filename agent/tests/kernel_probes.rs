//! The optional probes on the running kernel: on a library that exports the functions of Mooncake's transfer engine under the
//! same names with the same arguments (`mooncake-stand-in`), and on the real one where it is installed.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "tests"
)]

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use roomtrace::batch::{Batch, Layout, Request, Step};
use roomtrace::engine::mooncake::{Library, library};
use roomtrace::kernel::{BatchRing, KernelError, Probes};

/// One at a time: each counts what the others would add.
static ALONE: Mutex<()> = Mutex::new(());

/// What a probe saw, with its own bytes.
#[derive(Clone, Debug, PartialEq)]
enum Seen {
    Submit { id: u64, total: u64, offset: u64, requests: Vec<u8> },
    Free(u64),
    Unreadable(u64),
}

/// Probes, or `None` after saying that this machine cannot (which fails in CI).
fn probes() -> Option<(Probes, BatchRing)> {
    match Probes::load() {
        Ok(both) => Some(both),
        Err(KernelError::Object { why } | KernelError::Refused { why, .. }) if !is_root() => {
            println!("SKIPPED: {why}");
            assert!(std::env::var("CI").as_deref() != Ok("true"), "in CI every test must run: {why}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A program with this library mapped, below a directory as packages are installed.
struct Engine {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    _dir: tempfile::TempDir,
}

impl Engine {
    fn start(package: &str, stride: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let packages = dir.path().join("site-packages");
        std::fs::create_dir_all(packages.join(package)).unwrap();
        std::fs::create_dir_all(packages.join("mooncake")).unwrap();
        let (so, program) = (packages.join("mooncake/engine.so"), dir.path().join("engine"));
        let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/mooncake-stand-in");
        compile(&["-shared", "-fPIC"], &sources.join("engine.c"), &so);
        compile(&[], &sources.join("main.c"), &program);
        let mut child = Command::new(program)
            .arg(so)
            .arg(stride.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut engine = Self { child, input, output, _dir: dir };
        engine.answer();
        engine
    }

    /// What it says before "ok".
    fn answer(&mut self) -> String {
        let mut said = String::new();
        loop {
            let mut line = String::new();
            assert!(self.output.read_line(&mut line).unwrap() > 0, "it ended");
            if line == "ok\n" {
                return said;
            }
            said += &line;
        }
    }

    fn tell(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").unwrap();
        self.answer()
    }

    fn mapped(&self) -> Library {
        library("/proc", self.child.id()).unwrap().unwrap()
    }

    fn seen(&self, ring: &mut BatchRing) -> Vec<Seen> {
        seen(ring, self.child.id())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn compile(arguments: &[&str], source: &Path, to: &Path) {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let run =
        Command::new(compiler).arg("-O1").args(arguments).arg("-o").arg(to).arg(source).arg("-ldl").status();
    assert!(run.unwrap().success());
}

fn seen(ring: &mut BatchRing, pid: u32) -> Vec<Seen> {
    let mut all = Vec::new();
    let mut keep = |b: Batch<'_>| {
        if b.pid == pid {
            all.push(match b.step {
                Step::Submit { total, offset, requests } => {
                    Seen::Submit { id: b.id, total, offset, requests: requests.to_vec() }
                }
                Step::Free => Seen::Free(b.id),
                Step::Unreadable => Seen::Unreadable(b.id),
            });
        }
    };
    while ring.drain(1000, &mut keep) > 0 {}
    all
}

/// Every request of the submitted batches, in order.
fn read(all: &[Seen], layout: Layout) -> Vec<Request> {
    let submits =
        all.iter().filter_map(|s| if let Seen::Submit { requests, .. } = s { Some(requests) } else { None });
    submits.flat_map(|bytes| layout.read(bytes).unwrap()).collect()
}

#[test]
#[cfg(target_arch = "x86_64")]
fn batches_are_seen_as_they_are_submitted_and_freed() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((mut probes, mut ring)) = probes() else { return };
    for (package, stride) in [
        ("mooncake_transfer_engine-0.3.12.post1.dist-info", 48),
        ("mooncake_transfer_engine_non_cuda-0.3.13.post1.dist-info", 56),
    ] {
        let mut engine = Engine::start(package, stride);
        let found = engine.mapped();
        let layout = found.layout.clone().unwrap();
        assert_eq!(layout, Layout { stride });
        engine.tell("s 1 1 4096 64 0");
        assert_eq!(engine.seen(&mut ring), [], "nothing is probed yet");
        probes.attach(&found.reachable).unwrap();
        engine.tell("s 7 3 1000000 4096 8192");
        engine.tell("f 7");
        let all = engine.seen(&mut ring);
        let write = |n: u64| Request { write: true, address: 1_000_000 + n * 8192, len: 4096 };
        assert_eq!(read(&all, layout), [write(0), write(1), write(2)]);
        assert!(matches!(all[..], [Seen::Submit { id: 7, offset: 0, .. }, Seen::Free(7)]), "{all:?}");
        // More than one record holds, and more than all of them hold.
        engine.tell("s 8 1000 5000000 64 64");
        let all = engine.seen(&mut ring);
        assert_eq!(read(&all, layout).len(), 1000);
        assert_eq!(read(&all, layout)[999].address, 5_000_000 + 999 * 64);
        engine.tell("s 9 20000 5000000 64 64");
        let all = engine.seen(&mut ring);
        let whole = |s: &Seen| matches!(s, Seen::Submit { total, .. } if *total == 20_000 * stride);
        assert!(all.len() == 128 && all.iter().all(whole));
        engine.tell("s 10 0 0 0 0");
        let empty = Seen::Submit { id: 10, total: 0, offset: 0, requests: Vec::new() };
        assert_eq!(engine.seen(&mut ring), [empty]);
        engine.tell("x 11");
        assert_eq!(engine.seen(&mut ring), [Seen::Unreadable(11)]);
        assert_eq!(ring.counts().unwrap().ring_full, 0);
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_library_without_the_functions_is_not_attached_and_says_why() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((mut probes, _)) = probes() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (source, so) = (dir.path().join("other.c"), dir.path().join("engine.so"));
    // One of the two, as no version has it.
    std::fs::write(
        &source,
        "void f(void) __asm__(\"_ZN8mooncake14TransferEngine11freeBatchIDEm\"); void f(void) {}",
    )
    .unwrap();
    compile(&["-shared", "-fPIC"], &source, &so);
    let why = probes.attach(&so).unwrap_err();
    assert!(why.contains("submitTransfer"), "{why}");
    let why = probes.attach(&dir.path().join("none.so")).unwrap_err();
    assert!(why.contains("No such file"), "{why}");
}

/// Batches of a measurement.
#[cfg(target_arch = "x86_64")]
const CALLS: u64 = 20_000;

/// Nanoseconds that submitting and freeing a batch takes.
#[cfg(target_arch = "x86_64")]
fn batch_nanos(engine: &mut Engine, ring: &mut BatchRing) -> f64 {
    let mut nanos = 0;
    // Less at a time than the ring holds.
    for _ in 0..CALLS / 400 {
        nanos += engine.tell("t 400").trim().parse::<u64>().unwrap();
        while ring.drain(10_000, &mut |_| {}) > 0 {}
    }
    nanos as f64 / CALLS as f64
}

/// What a call costs with the probes, as `docs/overhead.md` has it. Prints, and asserts only that it was measured.
#[test]
#[cfg(target_arch = "x86_64")]
fn the_cost_is_counted() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let Some((mut probes, mut ring)) = probes() else { return };
    let mut engine = Engine::start("mooncake_transfer_engine-0.3.13.post1.dist-info", 56);
    let without = batch_nanos(&mut engine, &mut ring);
    let found = library("/proc", engine.child.id()).unwrap().unwrap();
    probes.attach(&found.reachable).unwrap();
    let with = batch_nanos(&mut engine, &mut ring);
    let counts = ring.counts().unwrap();
    println!(
        "a batch of 44 requests submitted and freed: {without:.0} ns without probes, {with:.0} ns with them; in the programs: \
         submit {} ns, free {} ns",
        counts.submits.1 / counts.submits.0,
        counts.frees.1 / counts.frees.0
    );
    assert_eq!((counts.submits.0, counts.frees.0, counts.ring_full), (CALLS, CALLS, 0));
    assert!(counts.submits.1 > 0 && counts.frees.1 > 0);
}

/// Two real transfer engines in one process, over TCP; prints its pid, then moves three blocks, as SGLang does.
const REAL: &str = r#"
import ctypes, sys
from mooncake.engine import TransferEngine
a, b = TransferEngine(), TransferEngine()
for e in (a, b):
    assert e.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
source, target = ctypes.create_string_buffer(b"x" * 65536), ctypes.create_string_buffer(65536)
s, t = ctypes.addressof(source), ctypes.addressof(target)
assert a.register_memory(s, 65536) == 0 and b.register_memory(t, 65536) == 0
print("target", t, flush=True)
sys.stdin.readline()
r = a.batch_transfer_sync_write("127.0.0.1:%d" % b.get_rpc_port(), [s, s + 8192, s], [t, t + 8192, t + 20000], [4096, 1000, 7])
print("moved", r, bytes(target[20000:20007]) == b"xxxxxxx", flush=True)
sys.stdin.readline()
"#;

/// Outside the test command, as all that needs the real engine: `cargo test --test kernel_probes -- --ignored`.
#[test]
#[ignore = "needs the real engine (`cargo xtask engine --setup-only`)"]
#[cfg(target_arch = "x86_64")]
fn the_real_library_is_seen_where_it_is_installed() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let home = PathBuf::from(std::env::var_os("HOME").unwrap_or_default());
    let python = home.join(".cache/roomtrace/engine/sgenv/bin/python");
    assert!(
        python.is_file(),
        "no Mooncake at {} (`cargo xtask engine --setup-only` installs it)",
        python.display()
    );
    let Some((mut probes, mut ring)) = probes() else { return };
    let mut child =
        Command::new(python).args(["-c", REAL]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    // The library writes to standard output as well.
    let mut until = |word: &str| loop {
        let mut line = String::new();
        assert!(output.read_line(&mut line).unwrap() > 0, "it ended before it said `{word}`");
        if let Some(rest) = line.strip_prefix(word) {
            return rest.trim().to_owned();
        }
    };
    let target: u64 = until("target").parse().unwrap();
    let found = library("/proc", child.id()).unwrap().unwrap();
    println!("{} of version {:?}", found.path, found.version);
    let layout = found.layout.unwrap();
    probes.attach(&found.reachable).unwrap();
    writeln!(input, "go").unwrap();
    assert_eq!(until("moved"), "0 True");
    let until = Instant::now() + Duration::from_secs(10);
    let mut all = Vec::new();
    while !all.iter().any(|s| matches!(s, Seen::Free(_))) && Instant::now() < until {
        all.extend(seen(&mut ring, child.id()));
    }
    let write = |at: u64, len| Request { write: true, address: target + at, len };
    assert_eq!(read(&all, layout), [write(0, 4096), write(8192, 1000), write(20_000, 7)]);
    let ids: Vec<u64> = all
        .iter()
        .map(|s| match s {
            Seen::Submit { id, .. } | Seen::Free(id) | Seen::Unreadable(id) => *id,
        })
        .collect();
    assert!(matches!(all[..], [Seen::Submit { .. }, Seen::Free(_)]) && ids[0] == ids[1], "{all:?}");
    writeln!(input, "end").unwrap();
    child.wait().unwrap();
}
