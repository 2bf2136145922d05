//! Which processes are an engine's, and which of them serves its HTTP port: from a `/proc` written for the test.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use std::path::Path;

use roomtrace::engine::{Found, Scanner};
use roomtrace::rooms::model::Role;

struct Proc(tempfile::TempDir);

impl Proc {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// A process with its parent; its name is what its title or program begins with.
    fn add(&self, pid: u32, parent: u32, line: &[&str]) -> &Self {
        self.add_in(pid, parent, line, "0::/\n")
    }

    fn add_in(&self, pid: u32, parent: u32, line: &[&str], cgroup: &str) -> &Self {
        let dir = self.path().join(pid.to_string());
        std::fs::create_dir_all(dir.join("net")).unwrap();
        std::fs::create_dir_all(dir.join("fd")).unwrap();
        std::fs::create_dir_all(dir.join(format!("task/{pid}"))).unwrap();
        self.fork(parent, pid);
        let name = line[0].rsplit('/').next().unwrap();
        let comm = &name[..name.len().min(15)];
        let stat = format!("{pid} ({comm}) S {parent} 1 1 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 {} 1 1", pid * 100);
        std::fs::write(dir.join("comm"), format!("{comm}\n")).unwrap();
        std::fs::write(dir.join("stat"), stat).unwrap();
        std::fs::write(dir.join("cmdline"), line.join("\0") + "\0").unwrap();
        std::fs::write(dir.join("cgroup"), cgroup).unwrap();
        self
    }

    /// The kernel's list of the parent's children, of its first thread.
    fn fork(&self, parent: u32, child: u32) {
        let file = self.path().join(format!("{parent}/task/{parent}/children"));
        let before = std::fs::read_to_string(&file).unwrap_or_default();
        // The parent may be no process of the test.
        drop(std::fs::write(file, format!("{before}{child} ")));
    }

    fn look(&self) -> Found {
        Scanner::new(self.path().to_str().unwrap(), &["sglang::".to_owned()]).look().unwrap()
    }
}

const SCHEDULER: &[&str] = &["sglang::scheduler_DP0_TP0"];

/// Server process of each process, by process id.
fn servers(found: &Found) -> Vec<(u32, u32)> {
    found.processes.values().map(|p| (p.pid, p.server)).collect()
}

#[test]
fn the_python_above_a_scheduler_is_its_server_however_it_was_started() {
    let spawned = "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)";
    for line in [
        &["python3", "my_launch.py", "--disaggregation-mode", "prefill", "--port", "31000"][..],
        &["/usr/bin/python3.12", "-c", "import x; x.run()", "--port=31000", "--disaggregation-mode=prefill"],
        &["python", "-c", spawned, "--port=31000", "--disaggregation-mode=prefill"],
        &["ray::SGLangHttpServer.run", "--port=31000", "--disaggregation-mode=prefill"],
    ] {
        let proc = Proc::new();
        proc.add(1, 0, &["/sbin/init"])
            .add(2, 1, &["python3", "fleet.py"])
            .add(10, 2, line)
            .add(11, 10, SCHEDULER)
            .add(12, 10, SCHEDULER);
        // Those that tell nothing themselves are of the engine that the others show.
        proc.add(9, 10, &["sglang::detokenizer"]).add(13, 10, &["sglang::async_exporter"]);
        let found = proc.look();
        assert_eq!(servers(&found), [(9, 10), (10, 10), (11, 10), (12, 10), (13, 10)], "{line:?}");
        let server = &found.processes[&10];
        assert_eq!((server.role, server.http_port), (Some(Role::Prefill), Some(31000)), "{line:?}");
        assert_eq!(found.targets.len(), 1, "{:?}", found.targets);
    }
}

#[test]
fn the_controller_of_data_parallel_ranks_stands_between_them() {
    let proc = Proc::new();
    proc.add(10, 1, &["python3", "my_launch.py"]);
    proc.add(11, 10, &["sglang::data_parallel_controller"]).add(12, 11, SCHEDULER).add(13, 11, SCHEDULER);
    let found = proc.look();
    assert_eq!(servers(&found), [(10, 10), (11, 10), (12, 10), (13, 10)]);
    // Its arguments name no port.
    assert_eq!((found.processes[&10].http_port, found.processes[&10].role), (None, None));
}

#[test]
fn what_only_started_an_engine_is_not_its_server() {
    let launch = &["python3", "-m", "sglang.launch_server", "--port", "31000"][..];
    // A script that starts SGLang's own server as a process, which may spawn what starts its schedulers.
    let proc = Proc::new();
    let spawned =
        &["python3", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)"][..];
    proc.add(10, 1, &["python3", "fleet.py"]).add(11, 10, launch).add(12, 11, SCHEDULER);
    proc.add(13, 11, spawned).add(14, 13, SCHEDULER);
    assert_eq!(servers(&proc.look()), [(11, 11), (12, 11), (13, 11), (14, 11)]);
    // What takes in a scheduler whose server has ended.
    for init in
        [&["/usr/bin/tini", "--", "python3", "my_launch.py"][..], &["bash", "-c", "python3 my_launch.py"]]
    {
        let proc = Proc::new();
        proc.add(10, 1, init).add(12, 10, SCHEDULER);
        let found = proc.look();
        assert_eq!(servers(&found), [(12, 12)], "{init:?}");
        assert_eq!(found.targets[0].server, None);
    }
    // Another container's.
    let proc = Proc::new();
    let pod = format!("0::/docker/{}\n", "a1".repeat(32));
    proc.add(10, 1, &["python3", "supervisor.py"]).add_in(12, 10, SCHEDULER, &pod);
    assert_eq!(servers(&proc.look()), [(12, 12)]);
}

const SPAWNED: &[&str] =
    &["python3", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)"];

#[test]
fn what_serves_http_below_a_server_is_of_its_engine_and_what_helps_it_is_not() {
    let launch =
        &["python3", "-m", "sglang.launch_server", "--port", "31000", "--disaggregation-mode=prefill"][..];
    for server in [launch, &["python3", "my_launch.py", "--port", "31000", "--disaggregation-mode=prefill"]] {
        let proc = Proc::new();
        proc.add(10, 1, server).add(11, 10, SCHEDULER);
        // Spawned, forked, forked by a fork server; the last one's thread is another than the first.
        let helper = &["python3", "-c", "from multiprocessing.forkserver import main; main(3)"][..];
        proc.add(20, 10, SPAWNED).add(21, 10, server).add(22, 10, helper).add(23, 22, helper);
        std::fs::create_dir_all(proc.path().join("10/task/19")).unwrap();
        proc.add(24, 0, SPAWNED);
        std::fs::write(proc.path().join("10/task/19/children"), "24 ").unwrap();
        let stat = std::fs::read_to_string(proc.path().join("24/stat")).unwrap();
        std::fs::write(proc.path().join("24/stat"), stat.replace("S 0", "S 10")).unwrap();
        // Helpers, and what is another's: a container's, a router, an engine below.
        let tracker = &["python3", "-c", "from multiprocessing.resource_tracker import main;main(5)"][..];
        proc.add(30, 10, tracker).add(31, 10, &["ncat", "-l", "1"]).add(32, 10, &["/usr/bin/cc1plus"]);
        proc.add(33, 10, &["python3", "-m", "http.server"]).add(34, 33, &["python3", "-m", "http.server"]);
        proc.add(35, 10, &["sglang::router"]).add(36, 35, SPAWNED).add(37, 11, SPAWNED);
        proc.add_in(38, 10, SPAWNED, &format!("0::/docker/{}\n", "a1".repeat(32)));
        let found = proc.look();
        let all = [10, 11, 20, 21, 23, 24].map(|pid| (pid, 10));
        assert_eq!(servers(&found), all, "{server:?}");
        assert_eq!(found.targets.len(), 1, "{:?}", found.targets);
        for worker in [20, 21, 23, 24].map(|pid| &found.processes[&pid]) {
            assert_eq!((worker.role, worker.http_port), (Some(Role::Prefill), Some(31000)), "{worker:?}");
            assert_eq!(worker.ranks, None, "{worker:?}");
        }
    }
}

#[test]
fn a_worker_stays_one_while_it_is_there_and_most_are_left_out_where_there_are_too_many() {
    let proc = Proc::new();
    proc.add(10, 1, &["python3", "-m", "sglang.launch_server"]).add(11, 10, SCHEDULER).add(20, 10, SPAWNED);
    let mut scanner = Scanner::new(proc.path().to_str().unwrap(), &["sglang::".to_owned()]);
    assert_eq!(servers(&scanner.look().unwrap()), [(10, 10), (11, 10), (20, 10)]);
    // The kernel's list may leave one out; whoever has ended, or become another's child, is told by itself.
    std::fs::write(proc.path().join("10/task/10/children"), "11 ").unwrap();
    assert_eq!(servers(&scanner.look().unwrap()), [(10, 10), (11, 10), (20, 10)]);
    std::fs::remove_dir_all(proc.path().join("20")).unwrap();
    assert_eq!(servers(&scanner.look().unwrap()), [(10, 10), (11, 10)]);
    for pid in 1000..1200 {
        proc.add(pid, 10, SPAWNED);
    }
    let found = scanner.look().unwrap();
    assert_eq!((found.processes.len(), found.left_out), (2 + 128, 1));
}

#[test]
fn a_router_is_no_engine_nor_above_one_and_helpers_alone_make_no_script_one() {
    let proc = Proc::new();
    proc.add(10, 1, &["python3", "my_router.py"]).add(11, 10, &["sglang::router"]);
    assert!(proc.look().processes.is_empty());
    // The router's process has started the engine.
    proc.add(12, 11, &["python3", "-m", "sglang.launch_server"]).add(13, 12, SCHEDULER);
    assert_eq!(servers(&proc.look()), [(12, 12), (13, 12)]);
    // What exports something for engines is no scheduler: whatever has started it serves no rooms.
    let proc = Proc::new();
    proc.add(10, 1, &["python3", "exporter.py"]).add(11, 10, &["sglang::async_exporter"]);
    assert_eq!(servers(&proc.look()), [(11, 11)]);
}

#[test]
fn pods_have_the_names_that_the_kubelet_gives_their_logs() {
    let (id, uid) = ("a".repeat(64), "3ca9f1e6-2b1d-4b7e-9a55-0f6f5e2d9c11");
    let in_pod = format!("0::/kubepods/burstable/pod{uid}/{id}\n");
    let server = ["python3", "-m", "sglang.launch_server", "--disaggregation-mode", "prefill"];
    let proc = Proc::new();
    proc.add_in(10, 1, &server, &in_pod).add_in(11, 10, SCHEDULER, &in_pod);
    let names = tempfile::tempdir().unwrap();
    let mut scanner = Scanner::new(proc.path().to_str().unwrap(), &["sglang::".to_owned()])
        .with_pod_names(Some(names.path().to_owned()));
    let found = scanner.look().unwrap();
    assert!(found.processes.values().all(|p| p.place.name.is_none() && p.place.pod_uid.is_some()));
    // The kubelet links the log when the container runs already.
    std::fs::write(names.path().join(format!("prefill-0_llm_sglang-{id}.log")), "").unwrap();
    let found = scanner.look().unwrap();
    assert_eq!(servers(&found), [(10, 10), (11, 10)]);
    for process in found.processes.values() {
        let name = process.place.name.as_ref().unwrap();
        assert_eq!((name.pod.as_str(), name.namespace.as_str()), ("prefill-0", "llm"));
        assert_eq!(name.container.as_deref(), Some("sglang"));
    }
}
