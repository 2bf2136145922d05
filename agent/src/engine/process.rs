//! What a process's files in `/proc` say: name, parent, start, arguments, ranks, container.
//!
//! Pure functions over what was read. Any bytes give an answer or `None`, never a panic.

use crate::rooms::model::{Place, Role};

/// Arguments kept of a process at most; an engine has some dozens.
const MAX_ARGS: usize = 1024;

/// Longest name, title or option value that is kept, bytes.
const MAX_TEXT: usize = 256;

/// Cards of one engine that are remembered at most.
const MAX_IB_DEVICES: usize = 64;

/// Port of an engine's HTTP server unless `--port` names another (SGLang 0.5.23, `server_args.py`).
const DEFAULT_PORT: u16 = 30000;

/// Port of a bootstrap server unless `--disaggregation-bootstrap-port` names another (the same file).
const DEFAULT_BOOTSTRAP_PORT: u16 = 8998;

/// What `/proc/PID/stat` says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stat {
    /// `comm`.
    pub comm: String,
    /// Process id of its parent.
    pub parent: u32,
    /// Start time, clock ticks since boot.
    pub started: u64,
}

/// Reads `/proc/PID/stat` (`proc_pid_stat(5)`). The name in parentheses may itself hold spaces and parentheses. `None`: it
/// cannot be read, or the process has ended and only waits for its parent.
pub(super) fn stat(text: &[u8]) -> Option<Stat> {
    let open = text.iter().position(|b| *b == b'(')?;
    let close = text.iter().rposition(|b| *b == b')')?;
    let comm = text.get(open.checked_add(1)?..close)?;
    let rest = std::str::from_utf8(text.get(close.checked_add(1)?..)?).ok()?;
    // Field 3 is the first behind the name.
    let mut fields = rest.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X" | "x") {
        return None;
    }
    let parent = fields.next()?.parse().ok()?;
    let started = fields.nth(22 - 4 - 1)?.parse().ok()?;
    Some(Stat { comm: text_of(comm), parent, started })
}

/// The arguments in `/proc/PID/cmdline`.
pub(super) fn arguments(cmdline: &[u8]) -> Vec<String> {
    // A process that has set its title leaves zeros behind it.
    let end = cmdline.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
    let used = cmdline.get(..end).unwrap_or_default();
    if used.is_empty() {
        return Vec::new();
    }
    used.split(|b| *b == 0).take(MAX_ARGS).map(text_of).collect()
}

/// Text of at most [`MAX_TEXT`] bytes without control characters: it ends up in logs.
fn text_of(bytes: &[u8]) -> String {
    let bytes = bytes.get(..bytes.len().min(MAX_TEXT)).unwrap_or_default();
    String::from_utf8_lossy(bytes).chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// What a Python interpreter runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Program {
    /// SGLang: a module or a script of that name.
    Sglang,
    /// A helper of Python's `multiprocessing` (fork server), which can stand between an engine's processes.
    Helper,
    /// A Python that `multiprocessing` has spawned to run one function, which can be SGLang's server.
    Spawned,
    /// Any other Python: it can be a script that starts SGLang's server within itself.
    Python,
    /// Anything else.
    Other,
}

/// What the process with these arguments runs. A shell that is told to start SGLang runs a shell.
pub(super) fn program(args: &[String]) -> Program {
    let Some((first, rest)) = args.split_first() else { return Program::Other };
    let name = first.rsplit('/').next().unwrap_or_default();
    if name == "sglang" {
        return Program::Sglang;
    }
    // Ray names its workers so; they are Pythons.
    if first.starts_with("ray::") {
        return Program::Python;
    }
    if !name.starts_with("python") {
        return Program::Other;
    }
    let mut rest = rest.iter().map(String::as_str);
    while let Some(arg) = rest.next() {
        match arg {
            "-m" => return rest.next().map_or(Program::Python, named),
            "-c" => {
                return match rest.next().and_then(|code| code.strip_prefix("from multiprocessing.")) {
                    Some(module) if module.starts_with("spawn ") => Program::Spawned,
                    Some(_) => Program::Helper,
                    None => Program::Python,
                };
            }
            // These take a value.
            "-X" | "-W" | "--check-hash-based-pycs" => drop(rest.next()),
            _ if arg.starts_with('-') => {}
            script => return named(script),
        }
    }
    Program::Python
}

/// Whether a process with this title or name starts only below an engine's HTTP server: a scheduler, or the controller between
/// server and schedulers (SGLang 0.5.23, `managers/scheduler.py`, `managers/data_parallel_controller.py`; `comm` is cut off at
/// 15 bytes).
pub(super) fn is_below_server(title: &str) -> bool {
    let kind = title.split_once("::").map_or("", |(_, kind)| kind);
    kind.starts_with("schedul") || kind.starts_with("data_pa")
}

/// `sglang.launch_server`, `dynamo.sglang`, `/usr/bin/sglang`, `…/sglang/launch_server.py`.
fn named(program: &str) -> Program {
    let is = program.split(['.', '/']).any(|part| part == "sglang");
    if is { Program::Sglang } else { Program::Python }
}

/// What the arguments of an engine's HTTP server say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Server {
    /// `--disaggregation-mode`.
    pub role: Option<Role>,
    /// `--host`.
    pub host: Option<String>,
    /// `--port`, or its default, which a script of its own does not have. `None`: not known.
    pub port: Option<u16>,
    /// `--disaggregation-bootstrap-port`, or its default. Decode has none of its own.
    pub bootstrap_port: Option<u16>,
    /// `--disaggregation-ib-device`: names of RDMA cards; none: not given, or the name of a file.
    pub ib_devices: Vec<String>,
}

/// Reads the arguments of an engine's HTTP server.
pub(super) fn server(args: &[String]) -> Server {
    let role = match option(args, "--disaggregation-mode") {
        Some("prefill") => Some(Role::Prefill),
        Some("decode") => Some(Role::Decode),
        _ => None,
    };
    let port = |name, default| port(args, name).or_else(|| option(args, name).is_none().then_some(default));
    let bootstrap = port("--disaggregation-bootstrap-port", DEFAULT_BOOTSTRAP_PORT);
    Server {
        role,
        host: option(args, "--host").map(str::to_owned),
        port: port("--port", DEFAULT_PORT).or(Some(DEFAULT_PORT)),
        bootstrap_port: bootstrap.filter(|_| role == Some(Role::Prefill)),
        ib_devices: option(args, "--disaggregation-ib-device").map(ib_devices).unwrap_or_default(),
    }
}

/// Cards of all ranks, `mlx5_0,mlx5_1`. The name of a JSON file with a list for each GPU, the other form (SGLang 0.5.23,
/// `get_ib_devices_for_gpu`), is no name of a card and says nothing here.
fn ib_devices(text: &str) -> Vec<String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let names = text.split(',').map(str::trim);
    let names = names.filter(|name| (1..=64).contains(&name.len()) && name.chars().all(plain));
    names.take(MAX_IB_DEVICES).map(str::to_owned).collect()
}

/// The same of a script that starts SGLang's server within itself. It may hand its arguments on; what they do not say can be
/// anything.
pub(super) fn script(args: &[String]) -> Server {
    Server {
        port: port(args, "--port"),
        bootstrap_port: port(args, "--disaggregation-bootstrap-port"),
        ..server(args)
    }
}

fn port(args: &[String], name: &str) -> Option<u16> {
    option(args, name)?.parse().ok()
}

/// Value of an option, `--a b` or `--a=b`; the last one counts, as for Python's `argparse`.
fn option<'a>(args: &'a [String], name: &str) -> Option<&'a str> {
    let mut found = None;
    for (n, arg) in args.iter().enumerate() {
        let Some(rest) = arg.strip_prefix(name) else { continue };
        if rest.is_empty() {
            found = args.get(n + 1).map(String::as_str).filter(|v| !v.starts_with("--")).or(found);
        } else if let Some(value) = rest.strip_prefix('=') {
            found = Some(value);
        }
    }
    found
}

/// Ranks that a process's title names: `sglang::scheduler_DP1_PP0_ATTN_CP0_TP3` → `DP1 PP0 ATTN_CP0 TP3` (SGLang 0.5.23,
/// `configure_scheduler_process` in `managers/scheduler.py`: a part of each kind of parallelism that is in use).
pub(super) fn ranks(title: &str) -> Option<String> {
    let mut ranks: Vec<String> = Vec::new();
    let mut kind = String::new();
    for part in title.rsplit("::").next()?.split('_').skip(1).take(32) {
        let letters = part.trim_end_matches(|c: char| c.is_ascii_digit());
        let digits = part.len() - letters.len();
        let upper = !letters.is_empty() && letters.bytes().all(|b| b.is_ascii_uppercase());
        if !upper || digits > 5 {
            kind.clear();
        } else if digits == 0 {
            kind = format!("{letters}_");
        } else {
            ranks.push(format!("{kind}{part}"));
            kind.clear();
        }
    }
    (!ranks.is_empty()).then(|| ranks.join(" "))
}

/// Where a process runs, from `/proc/PID/cgroup` (version 1: one line per hierarchy, version 2: one line). Knows the paths of
/// docker, containerd, CRI-O and podman, with the systemd driver and with the cgroupfs driver.
pub(super) fn place(cgroup: &str) -> Place {
    let mut place = Place::default();
    for line in cgroup.lines().take(64) {
        let Some(path) = line.splitn(3, ':').nth(2) else { continue };
        // The innermost container counts: a pod in docker (kind) has one around it.
        for part in path.split('/').take(64) {
            if let Some(uid) = pod(part) {
                place.pod_uid = Some(uid);
            }
            if let Some(id) = container(part) {
                place.container = Some(id);
            }
        }
        if place != Place::default() {
            break;
        }
    }
    place
}

/// `<id>`, `docker-<id>.scope`, `cri-containerd-<id>.scope`, `crio-<id>.scope`, `libpod-<id>.scope`; not
/// `crio-conmon-<id>.scope` and `libpod-conmon-<id>.scope`, which hold the container's monitor. Containerd without the
/// systemd driver writes `kubepods-…-pod<uid>.slice:cri-containerd:<id>`.
fn container(part: &str) -> Option<String> {
    let scope = part.strip_suffix(".scope").unwrap_or(part);
    let (before, id) = scope.rsplit_once([':', '-']).unwrap_or(("", scope));
    let hex = id.len() == 64 && id.bytes().all(|b| b.is_ascii_digit() || matches!(b, b'a'..=b'f'));
    (hex && !before.contains("conmon")).then(|| id.to_owned())
}

/// `pod<uid>`, `kubepods-burstable-pod<uid with _ for ->.slice`.
fn pod(part: &str) -> Option<String> {
    // The rest of a containerd path without the systemd driver is the container.
    let part = part.split(':').next().unwrap_or_default();
    let name = part.strip_suffix(".slice").unwrap_or(part);
    let at = name.rfind("pod")?;
    let known = at == 0 || name.starts_with("kubepods");
    let uid = name.get(at + 3..)?.replace('_', "-");
    // A static pod's uid is a hash without hyphens (the kubelet's `applyDefaults`).
    let is = matches!(uid.len(), 36 | 32) && uid.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
    (known && is).then_some(uid)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    const ID: &str = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    const UID: &str = "3ca9f1e6-2b1d-4b7e-9a55-0f6f5e2d9c11";

    fn args(line: &str) -> Vec<String> {
        line.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn a_name_with_parentheses_is_a_name() {
        let rest = "S 77 4 4 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 98765 1000 7";
        let s = stat(format!("4711 (a) S 9) {rest}").as_bytes()).unwrap();
        assert_eq!(s, Stat { comm: "a) S 9".to_owned(), parent: 77, started: 98765 });
        assert_eq!(stat(format!("4711 (a) {}", rest.replacen('S', "Z", 1)).as_bytes()), None);
        assert_eq!(stat(b"4711 (a) S 77"), None);
        assert_eq!(stat(b")("), None);
        assert_eq!(stat(b""), None);
    }

    #[test]
    fn a_title_is_read_without_the_zeros_behind_it() {
        assert_eq!(arguments(b"sglang::scheduler_TP0\0\0\0\0"), ["sglang::scheduler_TP0"]);
        assert_eq!(arguments(b"python\0-m\0\0x\0"), ["python", "-m", "", "x"]);
        assert!(arguments(b"").is_empty() && arguments(b"\0\0").is_empty());
        assert_eq!(arguments(b"a\nb\x1b[31m\xff"), ["a?b?[31m\u{fffd}"]);
        assert_eq!(arguments(&vec![b'a'; 70_000]).first().unwrap().len(), MAX_TEXT);
        assert_eq!(arguments(&b"a\0".repeat(5000)).len(), MAX_ARGS);
    }

    #[test]
    fn only_a_python_that_runs_sglang_is_a_server() {
        for yes in [
            "python -m sglang.launch_server --port 1",
            "/usr/bin/python3.12 -u -X dev -m sglang.launch_server",
            "python3 /sgl-workspace/sglang/python/sglang/launch_server.py --tp 8",
            "/usr/bin/python3 /usr/local/bin/sglang serve --model x",
            "python -m dynamo.sglang --model x",
            "sglang serve",
        ] {
            assert_eq!(program(&args(yes)), Program::Sglang, "{yes}");
        }
        for no in
            ["bash -c python -m sglang.launch_server", "/sbin/init", "/usr/bin/tini -- python my_launch.py"]
        {
            assert_eq!(program(&args(no)), Program::Other, "{no}");
        }
        for script in [
            "python harness.py --model-path /models/sglang/x",
            "python -m sglang_router.launch_router",
            "python",
            "python -m",
            "python -c import sglang",
            "ray::SGLangHttpServer.launch_server",
        ] {
            assert_eq!(program(&args(script)), Program::Python, "{script}");
        }
        let spawned = ["python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(3)"];
        assert_eq!(program(&spawned.map(str::to_owned)), Program::Spawned);
        let fork = ["python", "-c", "from multiprocessing.forkserver import main; main(3)"];
        assert_eq!(program(&fork.map(str::to_owned)), Program::Helper);
        assert_eq!(program(&[]), Program::Other);
    }

    #[test]
    fn both_spellings_of_an_option_are_read_and_the_last_counts() {
        let line = "python -m sglang.launch_server --disaggregation-mode=prefill --port 31000 --host 0.0.0.0 \
                    --disaggregation-bootstrap-port 9000 --port=31001";
        let s = server(&args(line));
        assert_eq!((s.role, s.port, s.bootstrap_port), (Some(Role::Prefill), Some(31001), Some(9000)));
        assert_eq!(s.host.as_deref(), Some("0.0.0.0"));
        let devices = |value| server(&args(&format!("x --disaggregation-ib-device {value}"))).ib_devices;
        assert_eq!(devices("mlx5_0,mlx5_1"), ["mlx5_0", "mlx5_1"]);
        assert!(devices("/etc/devices.json").is_empty() && devices("devices.json").is_empty());
        let s = server(&args("python -m sglang.launch_server --disaggregation-mode decode"));
        assert_eq!((s.role, s.port, s.bootstrap_port, s.host), (Some(Role::Decode), Some(30000), None, None));
        // `--portal` is no `--port`; a value that is missing or no number is none.
        let s = server(&args("x --portal 1 --port --host --disaggregation-mode null"));
        assert_eq!((s.role, s.port, s.host), (None, Some(30000), None));
        assert_eq!(server(&args("x --port 99999")).port, Some(30000));
    }

    #[test]
    fn a_script_has_no_port_but_the_one_it_says() {
        let s = script(&args("python my_launch.py --disaggregation-mode=prefill --port 31000"));
        assert_eq!((s.role, s.port, s.bootstrap_port), (Some(Role::Prefill), Some(31000), None));
        assert_eq!(script(&args("python my_launch.py")), Server::default());
    }

    #[test]
    fn schedulers_and_their_controller_start_below_a_server_and_others_need_not() {
        for yes in [
            "sglang::scheduler_DP1_TP0",
            "sglang::schedul",
            "sglang::data_parallel_controller",
            "sglang::data_pa",
        ] {
            assert!(is_below_server(yes), "{yes}");
        }
        for no in [
            "sglang::router",
            "sglang::detokenizer",
            "sglang::detokenizer_router",
            "sglang::async_exporter",
            "sglang::tokenizer_worker:4711",
            "sgl_diffusion",
            "scheduler",
            "",
        ] {
            assert!(!is_below_server(no), "{no}");
        }
    }

    #[test]
    fn ranks_are_named_as_the_engine_writes_them() {
        let named = |title| ranks(title);
        assert_eq!(named("sglang::scheduler_TP0").as_deref(), Some("TP0"));
        assert_eq!(named("sglang::scheduler_DP1_TP3_EP3").as_deref(), Some("DP1 TP3 EP3"));
        let all = "sglang::scheduler_DP1_PP0_ATTN_CP2_MOE_DP0_TP3";
        assert_eq!(named(all).as_deref(), Some("DP1 PP0 ATTN_CP2 MOE_DP0 TP3"));
        for none in
            ["sglang::scheduler", "sglang::detokenizer", "sglang::tokenizer_worker:4711", "", "::_", "TP0"]
        {
            assert_eq!(named(none), None, "{none}");
        }
        assert_eq!(named("sglang::x_tp0_T\u{e9}0_TP123456"), None);
    }

    #[test]
    fn containers_and_pods_are_known_by_their_paths() {
        let esc = UID.replace('-', "_");
        let in_pod = [
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{esc}.slice/cri-containerd-{ID}.scope"
            ),
            format!("0::/kubepods.slice/kubepods-pod{esc}.slice/crio-{ID}.scope/container"),
            format!("0::/kubepods/besteffort/pod{UID}/{ID}"),
            format!("11:memory:/kubepods/burstable/pod{UID}/{ID}\n1:name=systemd:/x"),
            format!(
                "12:cpu:/\n11:memory:/system.slice/containerd.service/kubepods-burstable-pod{esc}.slice:cri-containerd:{ID}"
            ),
            format!("0::/../../docker/{}/kubelet/kubepods/pod{UID}/{ID}", ID.replace('0', "f")),
        ];
        for path in in_pod {
            let place = place(&path);
            assert_eq!(place.container.as_deref(), Some(ID), "{path}");
            assert_eq!(place.pod_uid.as_deref(), Some(UID), "{path}");
        }
        for path in [
            format!("0::/system.slice/docker-{ID}.scope"),
            format!("4:cpu,cpuacct:/docker/{ID}"),
            format!("0::/machine.slice/libpod-{ID}.scope/container"),
            format!("0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope"),
        ] {
            let place = place(&path);
            assert_eq!((place.container.as_deref(), place.pod_uid), (Some(ID), None), "{path}");
        }
        for none in [
            "0::/user.slice/user-0.slice/session-1.scope".to_owned(),
            format!("0::/system.slice/crio-conmon-{ID}.scope"),
            format!("0::/tripod{UID}/x"),
            format!("0::/docker/{}", ID.to_uppercase()),
            String::new(),
            ":::::".to_owned(),
            "0:".to_owned(),
        ] {
            assert_eq!(place(&none), Place::default(), "{none}");
        }
        let hashed = "0::/kubepods/podd41d8cd98f00b204e9800998ecf8427e/x";
        assert_eq!(place(hashed).pod_uid.as_deref(), Some("d41d8cd98f00b204e9800998ecf8427e"));
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes: Vec<u8>) {
            drop(stat(&bytes));
            let args = arguments(&bytes);
            let _ = program(&args);
            drop(server(&args));
            drop(script(&args));
            let text = String::from_utf8_lossy(&bytes);
            drop(ranks(&text));
            drop(place(&text));
        }

        #[test]
        fn any_text_around_the_marks_is_read(a in ".{0,20}", b in "[0-9a-f_:-]{30,70}", c in "[A-Z_0-9:]{0,40}") {
            drop(place(&format!("0::/{a}pod{b}.slice/{a}-{b}.scope")));
            drop(ranks(&format!("sglang::scheduler{c}{a}")));
            drop(stat(format!("1 ({a}) {b} {c} 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20").as_bytes()));
        }
    }
}
