//! A real Prometheus on the agents' pods, which judges the alert rules as they are handed out.
//!
//! Debian's does not discover by the cluster's API. What that would give, the address of each pod of the agent and its node's name for
//! `instance` as docs/install.md says, is told it by a file.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::node::{NAME, Node};
use crate::install;
use crate::prometheus::{self, Prometheus, escaped};

/// The page for rooms that one party owes.
pub(super) struct Alert {
    prometheus: Prometheus,
    owed_instance: String,
    targets: PathBuf,
}

impl Alert {
    /// Starts a Prometheus on this agent and waits until it pages.
    pub(super) fn fires(node: &mut Node, agent: SocketAddr, owed_instance: &str) -> Result<Self> {
        let dir = node.dir().join("alerts");
        install::empty(&dir)?;
        let targets = dir.join("pods.json");
        let job = format!(
            "{{job_name: roomtrace, file_sd_configs: [{{files: ['{}'], refresh_interval: 1s}}]}}",
            targets.display()
        );
        let prometheus = Prometheus::judging(&prometheus::rules()?, &job, &dir)?;
        let alert = Self { prometheus, owed_instance: owed_instance.to_owned(), targets };
        alert.is_at(agent)?;
        node.wait("Prometheus pages for the pinned room", |_| Ok((!alert.now()?.is_empty()).then_some(())))?;
        Ok(alert)
    }

    /// The agent's pod has this address now.
    fn is_at(&self, agent: SocketAddr) -> Result<()> {
        let pods = json!([{"targets": [agent], "labels": {"instance": NAME}}]);
        // Never half written where Prometheus looks.
        let part = self.targets.with_extension("part");
        std::fs::write(&part, pods.to_string()).context("tell Prometheus of a pod")?;
        std::fs::rename(&part, &self.targets).context("tell Prometheus of a pod")
    }

    /// The pages that fire now: labels and since when. Another start is another page to whoever is on duty.
    pub(super) fn now(&self) -> Result<BTreeSet<String>> {
        let own = |alert: &Value| alert["labels"]["owed_instance"] == *self.owed_instance;
        let mut pages = BTreeSet::new();
        for alert in self.prometheus.firing()?.iter().filter(|a| own(a)) {
            ensure!(alert["labels"]["instance"] == NAME, "the page is not the node's: {alert}");
            pages.insert(format!("{} since {}", alert["labels"], alert["activeAt"]));
        }
        Ok(pages)
    }

    /// Another pod is the agent's: waits until Prometheus has the series from it, not only the page that outlives it.
    pub(super) fn goes_on_at(&self, node: &mut Node, agent: SocketAddr) -> Result<()> {
        let series = format!("roomtrace_rooms_pinned{{owed_instance=\"{}\"}}", self.owed_instance);
        let query = format!("/api/v1/query?query={}", escaped(&series));
        let has = || -> Result<bool> {
            let data = self.prometheus.api(&query)?;
            Ok(data["result"].as_array().is_some_and(|all| !all.is_empty()))
        };
        node.wait("Prometheus misses the series", |_| Ok((!has()?).then_some(())))?;
        self.is_at(agent)?;
        node.wait("Prometheus has the series again", |_| Ok(has()?.then_some(())))
    }
}
