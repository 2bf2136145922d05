//! One real Kubernetes node on this machine: etcd, API server, controllers, scheduler, Debian's containerd with runc and CNI
//! plug-ins, kubelet. Everything lives in one directory; nothing of another node or containerd is touched.
//!
//! A guard takes it down: a process that waits for this one to end, however it does (an error, Ctrl-C, a kill).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::net::TcpListener;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::dist::archive::Entry;
use crate::dist::image::{self, Image};
use crate::{install, services};

/// How long the node may take to be ready, and a pod to follow.
pub(crate) const PATIENCE: Duration = Duration::from_mins(3);

/// Its name.
pub(crate) const NAME: &str = "gpu-1";

/// The bridge of its pods, and their network: of nobody else, it is to be hoped.
const BRIDGE: &str = "rtk8s0";
const NETWORK: &str = "10.213.77.0/24";

/// Directories that the chart's pods, the kubelet and the CNI plug-ins use, each a file tree of its own in the node's directory: what an agent or a kubelet of
/// this machine keeps there is not seen and not touched.
const OF_THE_NODE: [&str; 4] =
    ["/var/lib/roomtrace", "/var/log/containers", "/var/lib/kubelet", "/var/lib/cni"];

/// What takes it down.
const DOWN: &str = include_str!("down.sh");

/// What it runs besides, with the Debian packages that bring it. Another containerd (Docker's) does as well and is not replaced; none
/// is started or used but the node's own.
const PACKAGES: [(&str, &str); 8] = [
    ("/usr/sbin/ip", "iproute2"),
    ("/usr/bin/nsenter", "util-linux"),
    ("/usr/bin/containerd", "containerd"),
    ("/usr/sbin/runc", "runc"),
    ("/usr/lib/cni/bridge", "containernetworking-plugins"),
    ("/usr/bin/gcc", "gcc"),
    ("/usr/lib/x86_64-linux-gnu/libc.a", "libc6-dev"),
    ("/usr/bin/openssl", "openssl"),
];

/// Installs what is missing of it.
pub(crate) fn install_packages() -> Result<()> {
    let there = |file: &str| Path::new(file).exists() || Path::new(&file.replace("/sbin/", "/bin/")).exists();
    let missing: Vec<&str> =
        PACKAGES.iter().filter(|(file, _)| !there(file)).map(|(_, name)| *name).collect();
    install::debian(&missing)
}

/// Chains of this machine's packet filters, each with its table. None where there is no iptables.
pub(crate) fn chains() -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for program in ["iptables-save", "ip6tables-save"] {
        let Ok(saved) = Command::new(program).output() else { continue };
        all.extend(named(&String::from_utf8_lossy(&saved.stdout)).map(|chain| format!("{program}: {chain}")));
    }
    all
}

/// Chains of what iptables-save prints: `*TABLE`, then `:CHAIN POLICY`. The built-in ones appear with the first look.
fn named(saved: &str) -> impl Iterator<Item = String> {
    let mut table = "";
    saved.lines().filter_map(move |line| {
        if let Some(name) = line.strip_prefix('*') {
            table = name;
        }
        let (chain, policy) = line.strip_prefix(':')?.split_once(' ')?;
        policy.starts_with('-').then(|| format!("{table} {chain}"))
    })
}

/// Programs that are built from source.
const PROGRAMS: [&str; 7] =
    ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl", "helm"];

/// A running node. Dropping it takes it down.
pub(crate) struct Node {
    dir: PathBuf,
    guard: Child,
    children: Vec<(&'static str, Child)>,
    /// What is built from source, by name.
    programs: BTreeMap<&'static str, PathBuf>,
}

/// A port that nobody listens on.
fn free() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).context("find a free port")?.port())
}

impl Node {
    /// Builds what it is made of, starts it and waits until it is ready.
    pub(crate) fn start() -> Result<Self> {
        let built = PROGRAMS.iter().map(|name| Ok((*name, services::program(name)?)));
        let programs = built.collect::<Result<_>>()?;
        // Short: paths of sockets may have 107 bytes.
        let dir = std::env::temp_dir().join(format!("roomtrace-k8s-{}", std::process::id()));
        install::empty(&dir)?;
        for sub in ["cni", "kubelet", "podlogs"] {
            std::fs::create_dir_all(dir.join(sub))?;
        }
        let guard = guard(&dir)?;
        let mut node = Self { dir, guard, children: Vec::new(), programs };
        node.up()
            .with_context(|| format!("start a Kubernetes node; its logs are in {}", node.dir.display()))?;
        Ok(node)
    }

    /// Where its files are.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn program(&self, name: &str) -> Result<PathBuf> {
        self.programs.get(name).cloned().with_context(|| format!("{name} was not built"))
    }

    fn write(&self, name: &str, text: &str) -> Result<()> {
        let file = self.file(name);
        std::fs::write(&file, text).with_context(|| format!("write {}", file.display()))
    }

    /// Starts one of its processes, out of reach of the terminal's signals: the guard ends them, in order.
    fn spawn(&mut self, name: &'static str, program: &Path, arguments: &[String]) -> Result<()> {
        let log = File::create(self.file(&format!("{name}.log")))?;
        let child = Command::new(program)
            .args(arguments)
            .current_dir(&self.dir)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        self.write(&format!("{name}.pid"), &child.id().to_string())?;
        self.children.push((name, child));
        Ok(())
    }

    /// Waits for something, as long as every process lives.
    pub(crate) fn wait<T>(
        &mut self,
        what: &str,
        mut of: impl FnMut(&Self) -> Result<Option<T>>,
    ) -> Result<T> {
        let end = Instant::now() + PATIENCE;
        loop {
            let last = of(self);
            if let Ok(Some(found)) = last {
                return Ok(found);
            }
            for (name, child) in &mut self.children {
                if let Some(status) = child.try_wait()? {
                    bail!(
                        "{name} ended with {status}; see {}",
                        self.dir.join(format!("{name}.log")).display()
                    );
                }
            }
            if Instant::now() > end {
                let why = last.err().map(|e| format!(": {e:#}")).unwrap_or_default();
                bail!("{what}: not within {} s{why}; see {}", PATIENCE.as_secs(), self.dir.display());
            }
            sleep(Duration::from_millis(200));
        }
    }

    fn up(&mut self) -> Result<()> {
        let [etcd, peer, api] = [free()?, free()?, free()?];
        self.write_files(api)?;
        let at = |name: &str| self.file(name).display().to_string();
        let (tokens, kubeconfig) = (at("tokens.csv"), at("kubeconfig"));
        let (private, public, certs) = (at("sa.key"), at("sa.pub"), at("certs"));
        install::output(Command::new("openssl").args(["genrsa", "-out", &private, "2048"]))?;
        install::output(Command::new("openssl").args(["rsa", "-in", &private, "-pubout", "-out", &public]))?;
        let owned = |arguments: &[&str]| arguments.iter().map(|a| (*a).to_owned()).collect::<Vec<_>>();
        let (store, between) = (format!("http://127.0.0.1:{etcd}"), format!("http://127.0.0.1:{peer}"));
        self.spawn(
            "etcd",
            &self.program("etcd")?,
            &owned(&[
                "--data-dir=etcd-data",
                &format!("--listen-client-urls={store}"),
                &format!("--advertise-client-urls={store}"),
                &format!("--listen-peer-urls={between}"),
                "--unsafe-no-fsync",
            ]),
        )?;
        self.containerd()?;
        self.spawn(
            "api",
            &self.program("kube-apiserver")?,
            &owned(&[
                &format!("--etcd-servers={store}"),
                &format!("--secure-port={api}"),
                "--bind-address=127.0.0.1",
                // It refuses to tell others an address of loopback.
                "--endpoint-reconciler-type=none",
                &format!("--cert-dir={certs}"),
                &format!("--service-account-key-file={public}"),
                &format!("--service-account-signing-key-file={private}"),
                "--service-account-issuer=https://kubernetes.default.svc",
                &format!("--token-auth-file={tokens}"),
                "--authorization-mode=Node,RBAC",
                "--service-cluster-ip-range=10.96.0.0/24",
            ]),
        )?;
        self.wait("the API server is ready", |node| {
            Ok(node.kubectl(&["get", "--raw", "/readyz"]).is_ok().then_some(()))
        })?;
        let config = format!("--kubeconfig={kubeconfig}");
        self.spawn(
            "controllers",
            &self.program("kube-controller-manager")?,
            &owned(&[
                &config,
                &format!("--service-account-private-key-file={private}"),
                "--use-service-account-credentials=false",
                "--leader-elect=false",
                "--secure-port=0",
            ]),
        )?;
        self.spawn(
            "scheduler",
            &self.program("kube-scheduler")?,
            &owned(&[&config, "--leader-elect=false", "--secure-port=0"]),
        )?;
        self.pause()?;
        // Where containerd sees the node's own directories, the kubelet has to see them too.
        let containerd = self.children.iter().find(|(name, _)| *name == "containerd");
        let its_mounts = containerd.map(|(_, child)| format!("--mount=/proc/{}/ns/mnt", child.id()));
        self.spawn(
            "kubelet",
            Path::new("nsenter"),
            &owned(&[
                &its_mounts.context("no containerd")?,
                "--",
                &self.program("kubelet")?.to_string_lossy(),
                &format!("--config={}", self.file("kubelet.yaml").display()),
                &config,
                &format!("--root-dir={}", self.file("kubelet").display()),
                &format!("--cert-dir={}", self.file("certs").display()),
                &format!("--hostname-override={NAME}"),
            ]),
        )?;
        self.wait("the node is ready", |node| {
            let of = node.json(&["get", "node", NAME])?;
            let ready = conditions(&of).any(|(kind, status)| kind == "Ready" && status == "True");
            Ok(ready.then_some(()))
        })
    }

    /// Starts containerd with mounts of its own: there [`OF_THE_NODE`] are directories of the node.
    fn containerd(&mut self) -> Result<()> {
        let mut made = String::new();
        let mut mounts = String::new();
        for there in OF_THE_NODE {
            let own = self.on_node(there);
            std::fs::create_dir_all(&own)?;
            if !Path::new(there).exists() {
                std::fs::create_dir(there).with_context(|| format!("create {there}, to mount over it"))?;
                let _ = writeln!(made, "{there}");
            }
            let _ = write!(mounts, "mount --bind '{}' {there} && ", own.display());
        }
        // The guard removes them.
        self.write("made", &made)?;
        self.spawn(
            "containerd",
            Path::new("unshare"),
            &[
                "--mount",
                "--propagation=slave",
                "sh",
                "-c",
                &format!("{mounts} exec containerd -c containerd.toml"),
            ]
            .map(str::to_owned),
        )
    }

    /// Where one of [`OF_THE_NODE`] really is.
    pub(crate) fn on_node(&self, path: &str) -> PathBuf {
        self.file("host").join(path.trim_start_matches('/'))
    }

    fn write_files(&self, api: u16) -> Result<()> {
        let token = install::output(Command::new("openssl").args(["rand", "-hex", "16"]))?;
        let (token, dir) = (token.trim(), self.dir.display());
        self.write("tokens.csv", &format!("{token},admin,admin,\"system:masters\"\n"))?;
        self.write(
            "kubeconfig",
            &format!(
                "apiVersion: v1\nkind: Config\n\
                 clusters: [{{name: c, cluster: {{server: \"https://127.0.0.1:{api}\", insecure-skip-tls-verify: true}}}}]\n\
                 users: [{{name: u, user: {{token: {token}}}}}]\n\
                 contexts: [{{name: x, context: {{cluster: c, user: u}}}}]\n\
                 current-context: x\n"
            ),
        )?;
        self.write(
            "cni/10-pods.conflist",
            &format!(
                r#"{{"cniVersion":"0.4.0","name":"pods","plugins":[{{"type":"bridge","bridge":"{BRIDGE}","isGateway":true,
                "ipam":{{"type":"host-local","subnet":"{NETWORK}","dataDir":"{dir}/cni-data"}}}}]}}"#
            ),
        )?;
        self.write(
            "containerd.toml",
            &format!(
                r#"version = 2
root = "{dir}/ctd"
state = "{dir}/ctd-run"
[grpc]
  address = "{dir}/ctd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  # Where root may not lower a process's OOM score runc fails without: "can't get final child's PID from pipe".
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{dir}/cni"
"#
            ),
        )?;
        self.write(
            "kubelet.yaml",
            &format!(
                "apiVersion: kubelet.config.k8s.io/v1beta1\n\
                 kind: KubeletConfiguration\n\
                 # Machines with cgroup v1 are still there.\n\
                 failCgroupV1: false\n\
                 cgroupDriver: cgroupfs\n\
                 containerRuntimeEndpoint: unix://{dir}/ctd.sock\n\
                 authentication: {{anonymous: {{enabled: false}}, webhook: {{enabled: true}}}}\n\
                 authorization: {{mode: Webhook}}\n\
                 address: 127.0.0.1\n\
                 port: {}\n\
                 healthzPort: 0\n\
                 failSwapOn: false\n\
                 evictionHard: {{}}\n\
                 enforceNodeAllocatable: []\n\
                 localStorageCapacityIsolation: false\n\
                 # Else it makes chains in this machine's iptables, one that drops, and leaves them.\n\
                 makeIPTablesUtilChains: false\n\
                 # What makes the test quick: how soon a change is seen.\n\
                 syncFrequency: 5s\n\
                 podLogsDir: {dir}/podlogs\n",
                free()?
            ),
        )
    }

    /// The container that holds a pod's namespaces: a process that waits.
    fn pause(&mut self) -> Result<()> {
        let (source, program) = (self.file("pause.c"), self.file("pause"));
        std::fs::write(
            &source,
            "#include <signal.h>\n#include <unistd.h>\nstatic void end(int s) { _exit(0); }\n\
             int main(void) { signal(SIGTERM, end); signal(SIGINT, end); for (;;) pause(); }\n",
        )?;
        install::run(Command::new("gcc").args(["-static", "-O2", "-o"]).arg(&program).arg(&source))?;
        let entries = vec![Entry::program("pause", &program)];
        self.wait("containerd answers", |node| Ok(node.ctr(&["version"]).is_ok().then_some(())))?;
        self.import(&Image { name: PAUSE, entries, entrypoint: vec!["/pause".to_owned()], time: 0 })
    }

    /// Runs containerd's own client.
    pub(crate) fn ctr(&self, arguments: &[&str]) -> Result<String> {
        let socket = self.file("ctd.sock");
        install::output(Command::new("ctr").arg("-a").arg(socket).args(["-n", "k8s.io"]).args(arguments))
    }

    /// Runs a program inside a container, as `kubectl exec` would. What it prints, however it ends.
    pub(crate) fn inside(&self, container: &str, command: &[&str]) -> Result<String> {
        let mut ctr = Command::new("ctr");
        ctr.arg("-a").arg(self.file("ctd.sock")).args(["-n", "k8s.io", "task", "exec", "--exec-id", "asked"]);
        let out = ctr.arg(container).args(command).output().context("start ctr")?;
        Ok([out.stdout, out.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat())
    }

    /// Gives it an image.
    pub(crate) fn import(&self, image: &Image<'_>) -> Result<()> {
        let file = self.file("image.tar");
        std::fs::write(&file, image::archive(image)?).context("write an image")?;
        self.import_file(&file)?;
        std::fs::remove_file(&file).context("remove an image")
    }

    /// The same from an archive.
    pub(crate) fn import_file(&self, archive: &Path) -> Result<()> {
        self.ctr(&["image", "import", &archive.to_string_lossy()]).map(drop)
    }

    /// A command that speaks to its API server.
    pub(crate) fn client(&self, program: &str) -> Result<Command> {
        let mut command = Command::new(self.program(program)?);
        command.env("KUBECONFIG", self.file("kubeconfig")).current_dir(&self.dir);
        // Helm keeps files of its own.
        command.env("HELM_CACHE_HOME", self.file("helm")).env("HELM_CONFIG_HOME", self.file("helm"));
        command.env("HELM_DATA_HOME", self.file("helm"));
        Ok(command)
    }

    /// Runs `kubectl` and returns what it says.
    pub(crate) fn kubectl(&self, arguments: &[&str]) -> Result<String> {
        install::output(self.client("kubectl")?.args(arguments))
    }

    /// The same, read as JSON.
    pub(crate) fn json(&self, arguments: &[&str]) -> Result<Value> {
        let said = self.kubectl(&[arguments, &["-o", "json"]].concat())?;
        serde_json::from_str(&said).context("read what kubectl says")
    }

    /// Has it take these objects.
    pub(crate) fn apply(&self, objects: &str) -> Result<()> {
        let file = self.file("objects.yaml");
        std::fs::write(&file, objects)?;
        self.kubectl(&["apply", "-f", &file.to_string_lossy()]).map(drop)
    }

    /// What the containers of a pod have said.
    pub(crate) fn log(&self, pod: &str) -> String {
        let logs = crate::dist::archive::below(&self.file("podlogs")).unwrap_or_default();
        let its = logs.into_iter().filter(|(name, _)| name.contains(&format!("_{pod}_")));
        its.filter_map(|(_, file)| std::fs::read_to_string(file).ok()).collect()
    }

    /// Takes it down and removes what it has left, its logs too.
    pub(crate) fn end(mut self) -> Result<()> {
        self.down();
        std::fs::remove_dir_all(&self.dir).with_context(|| format!("remove {}", self.dir.display()))
    }

    fn down(&mut self) {
        // The guard waits for this end of its input.
        drop(self.guard.stdin.take());
        // Reaped here, or the guard would wait for processes that are gone.
        let end = Instant::now() + Duration::from_mins(1);
        while matches!(self.guard.try_wait(), Ok(None)) && Instant::now() < end {
            for (_, child) in &mut self.children {
                let _ = child.try_wait();
            }
            sleep(Duration::from_millis(50));
        }
    }
}

/// Name of the image that holds pods' namespaces.
const PAUSE: &str = "localhost/pause:1";

/// Type and status of an object's conditions.
pub(crate) fn conditions(of: &Value) -> impl Iterator<Item = (&str, &str)> {
    let all = of["status"]["conditions"].as_array().into_iter().flatten();
    all.filter_map(|c| Some((c["type"].as_str()?, c["status"].as_str()?)))
}

/// Waits for the end of this process, or of the node, and takes the node down.
fn guard(dir: &Path) -> Result<Child> {
    Command::new("sh")
        .args(["-c", &format!("trap '' INT TERM HUP; cat >/dev/null\n{DOWN}"), "sh"])
        .arg(dir)
        .arg(BRIDGE)
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("start what takes the node down")
}

impl Drop for Node {
    fn drop(&mut self) {
        self.down();
    }
}

#[cfg(test)]
mod tests {
    use super::named;

    #[test]
    fn chains_that_somebody_made_are_told_from_built_in_ones() {
        let saved = "# by\n*filter\n:INPUT ACCEPT [0:0]\n:KUBE-FIREWALL - [0:0]\n-A INPUT -j KUBE-FIREWALL\nCOMMIT\n*nat\n:OUTPUT ACCEPT [0:0]\n:KUBE-KUBELET-CANARY - [0:0]\n";
        let chains: Vec<String> = named(saved).collect();
        assert_eq!(chains, ["filter KUBE-FIREWALL", "nat KUBE-KUBELET-CANARY"]);
    }
}
