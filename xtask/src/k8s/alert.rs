//! A real Prometheus that finds the agents' pods by the cluster's own API, as one in the cluster would, and judges the alert rules as
//! they are handed out.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use serde_json::Value;

use super::node::{NAME, Node};
use crate::install;
use crate::prometheus::{self, Prometheus, escaped};

/// The page for rooms that one party owes.
pub(super) struct Alert {
    prometheus: Prometheus,
    /// Label of the series: who owes.
    owed_instance: String,
}

impl Alert {
    /// Starts a Prometheus and waits until it pages. Its configuration is that of docs/install.md for clusters without ServiceMonitor.
    pub(super) fn fires(node: &mut Node, namespace: &str, owed_instance: &str) -> Result<Self> {
        let dir = node.dir().join("alerts");
        install::empty(&dir)?;
        let job = format!(
            "{{job_name: roomtrace, \
             kubernetes_sd_configs: [{{role: pod, kubeconfig_file: '{}', namespaces: {{names: [{namespace}]}}}}], \
             relabel_configs: [\
             {{source_labels: [__meta_kubernetes_pod_container_port_name], regex: metrics, action: keep}}, \
             {{source_labels: [__meta_kubernetes_pod_node_name], target_label: instance}}]}}",
            node.dir().join("kubeconfig").display()
        );
        let prometheus = Prometheus::judging(&prometheus::rules()?, &job, &dir)?;
        let alert = Self { prometheus, owed_instance: owed_instance.to_owned() };
        node.wait("Prometheus pages for the pinned room", |_| Ok((!alert.now()?.is_empty()).then_some(())))?;
        Ok(alert)
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

    /// Waits until Prometheus has the series itself again, not only the page that outlives it.
    pub(super) fn has_series_again(&self, node: &mut Node) -> Result<()> {
        let series = format!("roomtrace_rooms_pinned{{owed_instance=\"{}\"}}", self.owed_instance);
        let query = format!("/api/v1/query?query={}", escaped(&series));
        node.wait("Prometheus has the series of the pinned room again", |_| {
            let data = self.prometheus.api(&query)?;
            Ok(data["result"].as_array().is_some_and(|all| !all.is_empty()).then_some(()))
        })
    }
}
