//! `cargo xtask chart`: what the Helm chart has from elsewhere in the project, and the plain manifests that are rendered from it. Nothing
//! here is written by hand twice; tests compare what is checked in.
//!
//! values.schema.json follows from values.yaml (keys, defaults, comments) and, below `config`, from agent/roomtrace.yaml: an unknown
//! key is refused by helm and named. The alert rules and dashboards are copies, because a chart cannot reach outside itself.

mod schema;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::dist::archive::below;
use crate::{install, services};

/// Version of Kubernetes that it is rendered for: that of the test's node.
const KUBERNETES: &str = "1.37.0";

/// Namespace of the plain manifests.
const NAMESPACE: &str = "roomtrace";

/// The chart.
pub(crate) fn dir() -> PathBuf {
    install::root().join("deploy/helm/roomtrace")
}

/// Where the rendered manifests are.
pub(crate) fn manifests() -> PathBuf {
    install::root().join("deploy/manifests/roomtrace.yaml")
}

/// Writes them.
pub(crate) fn run() -> Result<()> {
    for (file, text) in generated()? {
        write(&file, &text)?;
    }
    let rendered = render(&services::program("helm")?)?;
    write(&manifests(), &rendered)
}

fn write(file: &Path, text: &str) -> Result<()> {
    if let Some(parent) = file.parent() {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(file, text).with_context(|| format!("write {}", file.display()))?;
    eprintln!("wrote {}", file.display());
    Ok(())
}

/// Files of the chart that follow from others, with their contents.
fn generated() -> Result<Vec<(PathBuf, String)>> {
    let root = install::root();
    let read = |path: &str| std::fs::read_to_string(root.join(path)).with_context(|| format!("read {path}"));
    let schema = schema::schema(&read("deploy/helm/roomtrace/values.yaml")?, &read("agent/roomtrace.yaml")?)?;
    let mut files = vec![
        (dir().join("values.schema.json"), schema),
        (dir().join("files/roomtrace.rules.yaml"), read("dashboards/alerts/roomtrace.rules.yaml")?),
    ];
    for name in ["node.yaml", "node-kubernetes.yaml"] {
        files.push((dir().join("files/collector").join(name), read(&format!("collector-config/{name}"))?));
    }
    for (name, file) in below(&root.join("dashboards"))? {
        if !name.contains('/') && file.extension().is_some_and(|e| e == "json") {
            files.push((dir().join("files/dashboards").join(&name), std::fs::read_to_string(&file)?));
        }
    }
    Ok(files)
}

/// The chart with its default values, for `kubectl apply`: without what only helm reads, with a namespace that allows it.
pub(crate) fn render(helm: &Path) -> Result<String> {
    let mut template = Command::new(helm);
    template.args(["template", "roomtrace"]).arg(dir()).args([
        "--namespace",
        NAMESPACE,
        "--kube-version",
        KUBERNETES,
    ]);
    let text = install::output(&mut template)?;
    let ours = |line: &&str| {
        !line.contains("app.kubernetes.io/managed-by: Helm") && !line.contains("helm.sh/chart: ")
    };
    let body: Vec<&str> = text.lines().filter(ours).collect();
    Ok(format!(
        "# Roomtrace with the default values of the Helm chart. Written by `cargo xtask chart`; a test compares.\n\
         #   kubectl apply -f roomtrace.yaml\n\
         ---\n\
         apiVersion: v1\n\
         kind: Namespace\n\
         metadata:\n  \
         name: {NAMESPACE}\n  \
         labels:\n    \
         # hostPID and hostPath are what the agent is about.\n    \
         pod-security.kubernetes.io/enforce: privileged\n{}\n",
        body.join("\n")
    ))
}

/// Fails where the checked-in manifests are not those of the chart.
pub(crate) fn check_manifests(helm: &Path) -> Result<()> {
    let file = manifests();
    let written = std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))?;
    if written != render(helm)? {
        bail!("{} is stale: run `cargo xtask chart`", file.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn what_the_chart_has_from_elsewhere_is_fresh() {
        for (file, text) in generated().unwrap() {
            let written = std::fs::read_to_string(&file).unwrap_or_default();
            assert!(written == text, "{} is stale: run `cargo xtask chart`", file.display());
        }
    }

    #[test]
    fn the_chart_has_the_projects_version() {
        let text = std::fs::read_to_string(dir().join("Chart.yaml")).unwrap();
        for key in ["version", "appVersion"] {
            let line = format!("\n{key}: {}\n", env!("CARGO_PKG_VERSION"));
            assert!(text.contains(&line), "{key} in Chart.yaml is not that of Cargo.toml");
        }
        let values = std::fs::read_to_string(dir().join("values.yaml")).unwrap();
        let image = crate::dist::image_name();
        let (repository, _) = image.rsplit_once(':').unwrap();
        assert!(values.contains(&format!("repository: {repository}\n")), "dist makes {image}");
    }
}
