//! Engines in pods: two pairs, each of the four in a pod of its own, all at the same ports. The workload's driver on this host is their
//! router.

use std::path::PathBuf;

use anyhow::{Context, Result};

use super::node::{Node, conditions};
use crate::dist::image::{self, Image};
use crate::install;
use crate::workload::Workload;

/// Where the engines run.
pub(super) const NAMESPACE: &str = "llm";

/// The engines' container.
pub(super) const CONTAINER: &str = "sglang";

const IMAGE: &str = "localhost/pd-workload:1";

/// In the order that the driver takes them.
const ENGINES: [&str; 4] = ["prefill-0", "decode-0", "prefill-1", "decode-1"];

/// The one that owes the pinned room's next move.
const DEBTOR: &str = "prefill-1";

/// As Kubernetes knows it.
pub(super) struct Debtor {
    pub(super) name: String,
    pub(super) uid: String,
    /// Container id.
    pub(super) container: String,
    /// The pod's.
    pub(super) address: String,
}

/// The engines and their driver.
pub(super) struct Pods {
    pub(super) debtor: Debtor,
    workload: Option<Workload>,
}

impl Pods {
    /// Starts them, and the load once a room is pinned.
    pub(super) fn start(node: &mut Node) -> Result<Self> {
        let program = install::target().join("debug/pd-workload");
        let image = Image {
            name: IMAGE,
            entries: image::root(&[("usr/bin/pd-workload", &program)])?,
            entrypoint: vec!["/usr/bin/pd-workload".to_owned()],
            time: 0,
        };
        node.import(&image)?;
        node.kubectl(&["create", "namespace", NAMESPACE])?;
        // Pods are refused until the namespace has it.
        node.wait("the namespace has its service account", |node| {
            Ok(node.kubectl(&["-n", NAMESPACE, "get", "serviceaccount", "default"]).is_ok().then_some(()))
        })?;
        let objects: Vec<String> = ENGINES.iter().enumerate().map(|(n, name)| pod(n, name)).collect();
        node.apply(&objects.join("---\n"))?;
        let mut engines = Vec::new();
        let mut debtor = None;
        for name in ENGINES {
            let pod = node.wait("the engines' pods are ready", |node| {
                let pod = node.json(&["-n", NAMESPACE, "get", "pod", name])?;
                let ready = conditions(&pod).any(|(kind, status)| kind == "Ready" && status == "True");
                Ok(ready.then_some(pod))
            })?;
            let text = |at: &str| pod.pointer(at).and_then(|v| v.as_str()).unwrap_or_default().to_owned();
            engines.push(format!("{}:7000", text("/status/podIP")));
            if name == DEBTOR {
                let container = text("/status/containerStatuses/0/containerID");
                let container = container.trim_start_matches("containerd://").to_owned();
                let (uid, address) = (text("/metadata/uid"), text("/status/podIP"));
                debtor = Some(Debtor { name: name.to_owned(), uid, container, address });
            }
        }
        let dir: PathBuf = node.dir().join("workload");
        install::empty(&dir)?;
        let arguments = [vec!["pods".to_owned(), "--engine".to_owned()], engines].concat();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let mut workload = Workload::open(&arguments, &dir)?;
        // Healthy rooms on the other pair meanwhile.
        workload.begin()?;
        Ok(Self { debtor: debtor.context("no debtor")?, workload: Some(workload) })
    }

    /// Ends driver and pods.
    pub(super) fn end(&mut self, node: &Node) -> Result<()> {
        if let Some(mut workload) = self.workload.take() {
            workload.results()?;
            workload.end()?;
        }
        node.kubectl(&["delete", "namespace", NAMESPACE, "--wait=false"]).map(drop)
    }
}

/// Every other one runs as another user than the agent.
fn pod(n: usize, name: &str) -> String {
    let user = if n.is_multiple_of(2) { 0 } else { 1000 };
    format!(
        "apiVersion: v1\n\
         kind: Pod\n\
         metadata: {{name: {name}, namespace: {NAMESPACE}}}\n\
         spec:\n  \
         terminationGracePeriodSeconds: 1\n  \
         automountServiceAccountToken: false\n  \
         securityContext: {{runAsUser: {user}}}\n  \
         containers:\n    \
         - name: {CONTAINER}\n      \
         image: {IMAGE}\n      \
         imagePullPolicy: Never\n      \
         args: [serve]\n"
    )
}
