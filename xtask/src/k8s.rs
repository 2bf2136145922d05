//! `cargo xtask k8s`: the chart, the image and the Debian package for real. Starts a Kubernetes node on this machine, imports the image
//! that `dist` made, installs the chart with its default values, starts prefill and decode engines in pods, and asserts
//! what an operator is promised. Part of the tests; needs root and BPF.

mod alert;
mod manifests;
mod node;
mod package;
mod pods;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::agent::get;
use crate::dist::{self, archive::below};
use crate::{chart, install, services, workload};
use alert::Alert;
use node::{NAME, Node, conditions};
use pods::Pods;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Use this agent instead of building one.
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
}

/// Namespace and release of the agent.
const NAMESPACE: &str = "roomtrace";

/// One of the labels by which the chart's default values know a node with GPUs.
const GPU_LABEL: &str = "nvidia.com/gpu.present";

/// Class of the pinned room.
const VERDICT: &str = "abort_before_entry";

/// Port of the chart's default values.
const PORT: u16 = 9713;

/// `CAP_PERFMON` and `CAP_BPF` (38 and 39 in `include/uapi/linux/capability.h`): all that the chart grants.
const CAPABILITIES: &str = "000000c000000000";

/// How long a page of alerts is kept while an agent is away (`keep_firing_for` of the rule).
const KEPT: Duration = Duration::from_mins(2);

/// Runs it.
pub(crate) fn run(args: &Args) -> Result<()> {
    match check(&dist::Args { agent: args.agent.clone() })? {
        None => Ok(()),
        Some(why) => bail!("this host cannot be a node: {why}"),
    }
}

/// Runs it as one of the tests. A line for what could not run here.
pub(crate) fn as_test() -> Result<Vec<String>> {
    let why = check(&dist::Args::default())?;
    Ok(why.map(|why| format!("Kubernetes: {why}")).into_iter().collect())
}

/// Why this host cannot be a node, if it cannot.
fn check(args: &dist::Args) -> Result<Option<String>> {
    let uid = install::output(Command::new("id").arg("-u"))?;
    if uid.trim() != "0" {
        return Ok(Some("containers and BPF need root".to_owned()));
    }
    // Before minutes of building.
    package::possible()?;
    node::install_packages()?;
    let made = dist::make(args)?;
    let doctor = Command::new(&made.agent).arg("doctor").output().context("start the agent")?;
    // 3: cannot observe.
    if doctor.status.code() == Some(3) {
        return Ok(Some(String::from_utf8_lossy(&doctor.stdout).trim().to_owned()));
    }
    let rendered = manifests::check(&services::program("helm")?)?;
    package::check(&made.deb)?;
    workload::build()?;
    let begun = Instant::now();
    let chains = node::chains();
    let mut node = Node::start()?;
    told(&format!("a Kubernetes node runs after {} s", begun.elapsed().as_secs()));
    let done = cluster(&mut node, &made.image, &rendered);
    match done {
        Ok(()) => node.end()?,
        Err(error) => {
            let dir = node.dir().to_owned();
            drop(node);
            return Err(error.context(format!("the node's logs stay in {}", dir.display())));
        }
    }
    let left: Vec<_> = node::chains().difference(&chains).cloned().collect();
    ensure!(left.is_empty(), "the node has left chains of iptables: {left:?}");
    told("the node is gone");
    Ok(None)
}

fn told(what: &str) {
    eprintln!("ok: {what}");
}

fn cluster(node: &mut Node, image: &Path, rendered: &[PathBuf]) -> Result<()> {
    node.import_file(image)?;
    let gpu = format!("{GPU_LABEL}=true");
    node.kubectl(&["label", "node", NAME, &gpu])?;
    for level in ["baseline", "restricted"] {
        refused(node, level)?;
    }
    node.kubectl(&["create", "namespace", NAMESPACE])?;
    node.kubectl(&["label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=privileged"])?;
    manifests::taken(node, rendered)?;
    blind(node)?;
    node.kubectl(&["label", "node", NAME, &format!("{GPU_LABEL}-")])?;
    let notes = helm(node, &["install", "roomtrace", &chart_dir(), "--namespace", NAMESPACE])?;
    ensure!(
        notes.contains("NONE OF THE 1 NODES"),
        "the notes say nothing of a cluster without GPU nodes: {notes}"
    );
    node.kubectl(&["label", "node", NAME, &gpu])?;
    told("without a labelled node the notes say so and what to do");
    let agent = Deployed::ready(node, None)?;
    agent.is_confined(node)?;
    let mut pods = Pods::start(node)?;
    let before = agent.finds(node, &pods)?;
    let alert = Alert::fires(node, agent.address, &before.owed_instance)?;
    told("Prometheus pages for it");
    let agent = agent.updated(node, &before, &alert)?;
    agent.finds_again(&before)?;
    pods.end(node)?;
    uninstalled(node, &agent)
}

fn chart_dir() -> String {
    chart::dir().to_string_lossy().into_owned()
}

fn helm(node: &Node, arguments: &[&str]) -> Result<String> {
    install::output(node.client("helm")?.args(arguments))
}

/// What a cluster that forbids hostPID says of it, at install and after one that does not ask first.
fn refused(node: &mut Node, level: &str) -> Result<()> {
    node.kubectl(&["create", "namespace", level])?;
    let label = format!("pod-security.kubernetes.io/enforce={level}");
    node.kubectl(&["label", "namespace", level, &label])?;
    let chart = chart_dir();
    let install = ["install", "roomtrace", &chart, "--namespace", level];
    let said = helm(node, &install).err().map(|e| format!("{e:#}")).unwrap_or_default();
    ensure!(
        said.contains("forbids hostPID") && said.contains("kubectl label namespace"),
        "helm says: {said}"
    );
    helm(node, &[&install[..], &["--set", "preflight=false"]].concat())?;
    let event = node.wait("an event tells that pods are forbidden", |node| {
        let events = node.json(&["-n", level, "get", "events"])?;
        let mut all = events["items"].as_array().into_iter().flatten();
        let message = all.find(|e| e["reason"] == "FailedCreate").and_then(|e| e["message"].as_str());
        Ok(message.map(str::to_owned))
    })?;
    ensure!(event.contains("PodSecurity") && event.contains("host namespaces"), "the event says: {event}");
    helm(node, &["uninstall", "roomtrace", "--namespace", level])?;
    node.kubectl(&["delete", "namespace", level, "--wait=false"])?;
    told(&format!(
        "a namespace of level {level} is refused: by helm with what to do, by the cluster in an event: {event}"
    ));
    Ok(())
}

/// What a pod says of a node without BTF: one where the file is hidden from it, by a directory mounted over it.
fn blind(node: &mut Node) -> Result<()> {
    let chart = chart_dir();
    let hidden = [
        "--set-json",
        r#"extraVolumes=[{"name":"hidden","emptyDir":{}}]"#,
        "--set-json",
        r#"extraVolumeMounts=[{"name":"hidden","mountPath":"/sys/kernel/btf"}]"#,
    ];
    helm(node, &[&["install", "blind", &chart, "--namespace", NAMESPACE][..], &hidden].concat())?;
    let ended = node.wait("a pod that sees no BTF ends", |node| {
        let pods = node.json(&["-n", NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/instance=blind"])?;
        let status = &pods["items"][0]["status"]["containerStatuses"][0];
        let ended = ["state", "lastState"].map(|of| status[of]["terminated"].clone());
        Ok(ended.into_iter().find(|ended| !ended.is_null()))
    })?;
    let said = ended["message"].as_str().unwrap_or_default();
    ensure!(
        ended["exitCode"] == 3
            && said.contains("/sys/kernel/btf/vmlinux")
            && said.contains("CONFIG_DEBUG_INFO_BTF"),
        "without BTF the pod ends with {ended}"
    );
    helm(node, &["uninstall", "blind", "--namespace", NAMESPACE, "--wait"])?;
    told(&format!("without BTF the pod ends with 3 and its last words are in its status: {}", said.trim()));
    Ok(())
}

/// An agent's pod that is ready.
struct Deployed {
    pod: String,
    uid: String,
    address: std::net::SocketAddr,
    pid: u32,
    /// Container id.
    container: String,
}

/// What a pinned room says of itself that must outlive an update.
#[derive(Debug)]
struct Pinned {
    room: String,
    /// The debtor in labels of series.
    owed_instance: String,
    series: BTreeSet<String>,
    record: Value,
}

impl Deployed {
    /// Waits for the agent's pod, another than this one.
    fn ready(node: &mut Node, not: Option<&str>) -> Result<Self> {
        let found = node.wait("the agent's pod is ready", |node| {
            let pods =
                node.json(&["-n", NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=roomtrace"])?;
            let ready = pods["items"].as_array().into_iter().flatten().find(|pod| {
                let is = conditions(pod).any(|(kind, status)| kind == "Ready" && status == "True");
                is && pod["metadata"]["deletionTimestamp"].is_null() && pod["metadata"]["uid"].as_str() != not
            });
            Ok(ready.cloned())
        });
        let found = found.map_err(|error| {
            let said = node.kubectl(&["-n", NAMESPACE, "describe", "pods"]).unwrap_or_default();
            error.context(format!("{said}\n{}", node.log("roomtrace")))
        })?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let container = text(&found["status"]["containerStatuses"][0]["containerID"]);
        let container = container.trim_start_matches("containerd://");
        let tasks = node.ctr(&["task", "ls"])?;
        let row = tasks.lines().find(|line| line.starts_with(container)).context("no task of the agent's")?;
        let pid = row.split_whitespace().nth(1).and_then(|n| n.parse().ok()).context("no process id")?;
        Ok(Self {
            pod: text(&found["metadata"]["name"]),
            uid: text(&found["metadata"]["uid"]),
            address: std::net::SocketAddr::new(text(&found["status"]["podIP"]).parse()?, PORT),
            pid,
            container: container.to_owned(),
        })
    }

    /// Its process may do what the chart says and nothing else.
    fn is_confined(&self, node: &Node) -> Result<()> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid))?;
        let of = |key: &str| {
            let line = status.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(':'));
            line.unwrap_or_default().trim().to_owned()
        };
        // The agent gives up what it does not need; the bounding set is what the container was given.
        for (key, value) in [
            ("CapEff", CAPABILITIES),
            ("CapPrm", CAPABILITIES),
            ("CapBnd", CAPABILITIES),
            ("CapInh", "0000000000000000"),
            ("CapAmb", "0000000000000000"),
            ("NoNewPrivs", "1"),
        ] {
            ensure!(of(key) == value, "{key} of the agent is {}, not {value}", of(key));
        }
        // A kernel without seccomp has no such line.
        ensure!(["2", ""].contains(&of("Seccomp").as_str()), "no seccomp filter: {}", of("Seccomp"));
        let mounts = std::fs::read_to_string(format!("/proc/{}/mounts", self.pid))?;
        let mut writable = BTreeSet::new();
        for line in mounts.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            if let [_, at, kind, options, ..] = fields[..]
                && options.split(',').all(|o| o != "ro")
                && !["proc", "devpts", "mqueue"].contains(&kind)
                // With cgroup v1 runc mounts the hierarchies, which are read-only, into an empty file system of the container's own.
                && (at, kind) != ("/sys/fs/cgroup", "tmpfs")
            {
                writable.insert(at);
            }
        }
        let expected =
            ["/dev", "/dev/shm", "/dev/termination-log", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf"];
        let more: Vec<_> =
            writable.iter().filter(|at| !expected.contains(at) && **at != "/var/lib/roomtrace").collect();
        // Masked files and kernel files are mounted over with nothing.
        let more: Vec<_> = more.into_iter().filter(|at| !at.starts_with("/proc/")).collect();
        ensure!(more.is_empty(), "the agent can write to {more:?}");
        ensure!(writable.contains("/var/lib/roomtrace"), "it has no place for its state: {mounts}");
        let spec = node.json(&["-n", NAMESPACE, "get", "pod", &self.pod])?;
        ensure!(spec["spec"]["automountServiceAccountToken"] == false, "a token is mounted");
        told("its process has CAP_BPF and CAP_PERFMON alone, no new privileges, a read-only root");
        Ok(())
    }

    fn json(&self, page: &str) -> Result<Value> {
        serde_json::from_str(&get(self.address, page)?).with_context(|| format!("read {page}"))
    }

    /// Series of pinned rooms that page and are this party's; other engines of this machine may pin as they like.
    fn series(&self, owed_instance: &str) -> Result<BTreeSet<String>> {
        let text = get(self.address, "/metrics")?;
        let owed = format!("owed_instance=\"{owed_instance}\"");
        let pinned = text.lines().filter(|l| l.starts_with("roomtrace_rooms_pinned{") && l.contains(&owed));
        let series =
            pinned.filter(|l| !l.ends_with(" 0.0")).filter_map(|l| Some(l.rsplit_once(' ')?.0.to_owned()));
        Ok(series.filter(|s| !s.contains("\"possible\"")).collect())
    }

    /// The pinned room, and that the debtor is named as `kubectl` knows it.
    fn finds(&self, node: &mut Node, pods: &Pods) -> Result<Pinned> {
        let begun = Instant::now();
        let found = node.wait("the pinned room is found", |_| {
            let rooms = self.json("/api/v1/rooms?pinned=true")?;
            let mut all = rooms["rooms"].as_array().into_iter().flatten();
            let is = |room: &&Value| {
                room["verdict"]["class"] == VERDICT
                    && room["verdict"]["confidence"] != "possible"
                    && room["verdict"]["owed_by"]["pod"].is_string()
            };
            Ok(all.find(is).cloned())
        });
        let record = found.map_err(|error| {
            let said = get(self.address, "/api/v1/rooms").unwrap_or_default();
            let status = get(self.address, "/status").unwrap_or_default();
            error.context(format!("rooms: {said}\nstatus: {status}\n{}", node.log(&self.pod)))
        })?;
        let owed = &record["verdict"]["owed_by"];
        let debtor = &pods.debtor;
        for (key, value) in [
            ("pod", debtor.name.as_str()),
            ("namespace", pods::NAMESPACE),
            ("container_name", pods::CONTAINER),
            ("pod_uid", &debtor.uid),
            ("container", &debtor.container),
            ("host", NAME),
            ("role", "prefill"),
        ] {
            ensure!(owed[key] == value, "owed_by.{key} is {}, not {value}: {owed}", owed[key]);
        }
        // Metrics follow a moment later.
        let series = node.wait("the pinned room is in a series that pages", |_| {
            let series = self.series(&debtor.address)?;
            Ok((!series.is_empty()).then_some(series))
        })?;
        ensure!(series.len() == 1 && series.iter().all(|s| s.contains(VERDICT)), "the series are {series:?}");
        told(&format!(
            "the pinned room is found after {} s and names pod {}/{}, container {}, node {}",
            begun.elapsed().as_secs(),
            pods::NAMESPACE,
            debtor.name,
            pods::CONTAINER,
            NAME
        ));
        let room = record["room"].as_str().context("a room without a number")?.to_owned();
        let said = node.inside(&self.container, &["roomtrace", "explain", &room])?;
        let whose = format!("{}/{}", pods::NAMESPACE, debtor.name);
        ensure!(said.contains(&whose), "roomtrace explain in the pod does not name {whose}: {said}");
        Ok(Pinned { room, owed_instance: debtor.address.clone(), series, record })
    }

    /// Updates the release and follows the series meanwhile: they never change but for the seconds in which no agent runs.
    fn updated(&self, node: &mut Node, before: &Pinned, alert: &Alert) -> Result<Self> {
        let pages = alert.now()?;
        let programs = self.programs()?;
        helm(
            node,
            &[
                "upgrade",
                "roomtrace",
                &chart_dir(),
                "--namespace",
                NAMESPACE,
                "--reuse-values",
                "--set",
                "podAnnotations.update=again",
            ],
        )?;
        let mut seen = Instant::now();
        let end = Instant::now() + node::PATIENCE;
        while let Ok(series) = self.series(&before.owed_instance) {
            ensure!(series == before.series, "before it ended the agent changed its series: {series:?}");
            seen = Instant::now();
            ensure!(seen < end, "the update ends no agent");
            std::thread::sleep(Duration::from_millis(50));
        }
        let agent = Self::ready(node, Some(&self.uid))?;
        let first = agent.series(&before.owed_instance)?;
        let gap = seen.elapsed();
        ensure!(
            first == before.series,
            "after the update the series are {first:?}, before {:?}",
            before.series
        );
        ensure!(gap < KEPT, "no agent had the room for {} s: alerts ended meanwhile", gap.as_secs());
        ensure!(!Path::new(&format!("/proc/{}", self.pid)).exists(), "the agent before still runs");
        unloaded(&programs)?;
        alert.goes_on_at(node, agent.address)?;
        let after = alert.now()?;
        ensure!(after == pages, "the pages were {pages:?}, after the update they are {after:?}");
        told(&format!(
            "an update of the release keeps series and labels of the pinned room, and one page goes on; {:.1} s without an agent",
            gap.as_secs_f64()
        ));
        Ok(agent)
    }

    /// It is the same pin, not a new one.
    fn finds_again(&self, before: &Pinned) -> Result<()> {
        let now = self.json(&format!("/api/v1/rooms/{}", before.room))?;
        for key in ["room", "incarnation", "trace_id", "pinned"] {
            ensure!(now[key] == before.record[key], "{key} was {}, is {}", before.record[key], now[key]);
        }
        for key in ["class", "confidence"] {
            let (was, is) = (&before.record["verdict"][key], &now["verdict"][key]);
            ensure!(was == is, "{key} was {was}, is {is}");
        }
        ensure!(now["restored"].is_object(), "it does not say that it was restored: {now}");
        told("after the update it is the same pin: incarnation, trace, class, confidence");
        Ok(())
    }

    /// Numbers of the kernel programs that it holds.
    fn programs(&self) -> Result<BTreeSet<u32>> {
        let mut ids = BTreeSet::new();
        for entry in std::fs::read_dir(format!("/proc/{}/fdinfo", self.pid))? {
            let Ok(text) = std::fs::read_to_string(entry?.path()) else { continue };
            let id = text.lines().find_map(|l| l.strip_prefix("prog_id:"));
            ids.extend(id.and_then(|id| id.trim().parse::<u32>().ok()));
        }
        Ok(ids)
    }
}

/// After `helm uninstall` nothing is there: no object, no process, no kernel program; on the node only the state directory.
fn uninstalled(node: &mut Node, agent: &Deployed) -> Result<()> {
    let programs = agent.programs()?;
    helm(node, &["uninstall", "roomtrace", "--namespace", NAMESPACE])?;
    node.wait("the agent's pod is gone", |node| {
        let kinds = "pods,daemonsets,services,configmaps,networkpolicies,serviceaccounts,controllerrevisions";
        let left = node.kubectl(&["-n", NAMESPACE, "get", kinds, "-o", "name"])?;
        // Of the namespace itself.
        let own = |line: &&str| !line.ends_with("/default") && !line.ends_with("/kube-root-ca.crt");
        Ok(left.lines().filter(own).count().eq(&0).then_some(()))
    })?;
    ensure!(!Path::new(&format!("/proc/{}", agent.pid)).exists(), "the agent still runs");
    unloaded(&programs)?;
    let state = below(&node.on_node("/var/lib/roomtrace"))?;
    let state: Vec<&str> = state.iter().map(|(name, _)| name.as_str()).collect();
    ensure!(state == ["state", "state.lock"], "in /var/lib/roomtrace of the node is left {state:?}");
    told(&format!("uninstalling leaves no object and none of {} kernel programs", programs.len()));
    Ok(())
}

/// Fails where one of these kernel programs is still loaded.
fn unloaded(programs: &BTreeSet<u32>) -> Result<()> {
    ensure!(!programs.is_empty(), "the agent held no kernel programs?");
    let loaded = bpf_programs()?;
    let left: Vec<_> = programs.intersection(&loaded).collect();
    ensure!(left.is_empty(), "kernel programs {left:?} are still loaded");
    Ok(())
}

/// Numbers of all kernel programs that are loaded.
fn bpf_programs() -> Result<BTreeSet<u32>> {
    install::debian(&["bpftool"])?;
    let said = install::output(Command::new("bpftool").args(["-j", "prog", "list"]))?;
    let list: Value = serde_json::from_str(&said).context("read what bpftool says")?;
    let all = list.as_array().into_iter().flatten();
    Ok(all.filter_map(|p| u32::try_from(p["id"].as_u64()?).ok()).collect())
}
