//! The chart and the plain manifests without a cluster: fresh, and right by Kubernetes' own schemas; values with unknown keys are refused
//! and named.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::node::Node;
use crate::dist::archive::below;
use crate::{chart, install, services};

/// Of the Python package that has the schemas, and of Kubernetes.
const SCHEMAS: &str = "1.37.0";

/// Values that turn everything on, besides the defaults.
const EVERYTHING: &str = "gpu: {runtimeClassName: nvidia, driverPath: /usr/lib64}\n\
hostNetwork: true\n\
priorityClassName: system-node-critical\n\
imagePullSecrets: [{name: pull}]\n\
image: {digest: \"sha256:0000000000000000000000000000000000000000000000000000000000000000\"}\n\
config: {probes: {mooncake: true}, export: {otlp: {endpoint: \"http://collector:4317\"}}}\n\
serviceMonitor: {enabled: true, labels: {release: prometheus}}\n\
prometheusRule: {enabled: true}\n\
dashboards: {enabled: true}\n\
extraEnv: [{name: ROOMTRACE_LOG, value: debug}]\n\
extraVolumes: [{name: tls, secret: {secretName: tls}}]\n\
extraVolumeMounts: [{name: tls, mountPath: /tls, readOnly: true}]\n\
podAnnotations: {a: b}\n\
podLabels: {c: d}\n";

/// The same with the Collector, which has no place in the node's network.
const COLLECTOR: &str = "collector: {enabled: true, gateways: gateway.observability}\n";

/// What must be refused, and what must be named.
const WRONG: [(&str, &str); 17] = [
    ("tolerationz: []\n", "tolerationz"),
    ("config: {rooms: {flor: 5s}}\n", "flor"),
    ("config: {rooms: {floor: 5x}}\n", "/config/rooms/floor"),
    ("config: {engine: {scrape: maybe}}\n", "scrape"),
    ("config: null\n", "config has nothing in it"),
    ("config: {http: {listen: \"127.0.0.1:9713\"}}\n", "config.http.listen is"),
    ("config: {http: {listen: everywhere}}\n", "/config/http/listen"),
    ("image: {pullPolicy: Sometimes}\n", "pullPolicy"),
    ("gpuNodes: {labels: [{key: gpu, operater: Exists}]}\n", "operater"),
    ("resources: {limit: {cpu: 1}}\n", "limit"),
    ("collector: {resources: {limit: {cpu: 1}}}\n", "limit"),
    ("tolerations: [{oprator: Exists}]\n", "oprator"),
    ("extraEnv: [{nme: x}]\n", "nme"),
    ("seccompProfile: {typ: RuntimeDefault}\n", "typ"),
    ("updateStrategy: {rollingUpdate: {maxUnavail: 3}}\n", "maxUnavail"),
    ("networkPolicy: {from: [{podSelecter: {}}]}\n", "podSelecter"),
    ("imagePullSecrets: [{nam: x}]\n", "nam"),
];

/// Of the Prometheus operator: there is no schema of them in Kubernetes, and the node does not know them.
const OPERATOR: [&str; 2] = ["ServiceMonitor", "PrometheusRule"];

/// Checks them. Where they were rendered to.
pub(super) fn check(helm: &Path) -> Result<Vec<PathBuf>> {
    chart::check_manifests(helm)?;
    let dir = install::target().join("manifests");
    install::empty(&dir)?;
    let mut lint = Command::new(helm);
    install::output(lint.args(["lint", "--strict", "--kube-version", SCHEMAS]).arg(chart::dir()))?;
    let with = |name: &str, values: &str| -> Result<std::process::Output> {
        let file = dir.join(format!("{name}.values.yaml"));
        std::fs::write(&file, values)?;
        let mut template = Command::new(helm);
        template.args(["template", "r", "--kube-version", SCHEMAS, "--values"]).arg(&file).arg(chart::dir());
        template.output().context("start helm")
    };
    for (values, key) in WRONG {
        let out = with("wrong", values)?;
        let said = String::from_utf8_lossy(&out.stderr);
        ensure!(!out.status.success() && said.contains(key), "{values:?} is not refused by name: {said}");
    }
    let mut rendered = vec![chart::manifests()];
    for (name, values) in [("everything", EVERYTHING), ("collector", COLLECTOR)] {
        let out = with(name, values)?;
        ensure!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let file = dir.join(format!("{name}.yaml"));
        std::fs::write(&file, out.stdout)?;
        rendered.push(file);
    }
    let schemas = schemas()?;
    let location = format!("{}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json", schemas.display());
    install::run(
        Command::new(services::program("kubeconform")?)
            .args(["-strict", "-summary", "-skip", &OPERATOR.join(","), "-schema-location", &location])
            .args(&rendered),
    )?;
    eprintln!("ok: manifests are fresh and valid, {} wrong values files are refused by the key", WRONG.len());
    Ok(rendered)
}

/// The API server's own strict decoder and its validation take them, and would name a field that they do not know.
pub(super) fn taken(node: &Node, rendered: &[PathBuf]) -> Result<()> {
    let apply = |text: &str| -> Result<String> {
        let file = node.dir().join("taken.yaml");
        std::fs::write(&file, text)?;
        node.kubectl(&["apply", "--dry-run=server", "--validate=strict", "-f", &file.to_string_lossy()])
    };
    let mut taken = 0;
    for file in rendered {
        let text = std::fs::read_to_string(file)?;
        let known =
            |object: &&str| !OPERATOR.iter().any(|kind| object.contains(&format!("\nkind: {kind}\n")));
        let objects: Vec<&str> = text.split("\n---\n").filter(known).collect();
        taken += apply(&objects.join("\n---\n"))?.lines().count();
    }
    let text = std::fs::read_to_string(chart::manifests())?;
    let said = apply(&text.replace("hostPID:", "hostPid:")).err().map(|e| format!("{e:#}"));
    ensure!(said.as_ref().is_some_and(|said| said.contains("spec.template.spec.hostPid")), "{said:?}");
    eprintln!(
        "ok: the API server takes {taken} objects, strictly decoded; an unknown field is refused by name"
    );
    Ok(())
}

/// Kubernetes' JSON schemas, unknown fields forbidden, in the cache; their references made such as to lead to files.
fn schemas() -> Result<PathBuf> {
    let dir = install::cache()?.join("tools").join(format!("kubernetes-schemas-{SCHEMAS}"));
    let done = dir.join("done");
    if done.exists() {
        return Ok(dir);
    }
    install::debian(&["python3-pip"])?;
    eprintln!("fetching Kubernetes' schemas {SCHEMAS} (once)");
    install::empty(&dir)?;
    let wheel = dir.join("wheel");
    let package = format!("kubernetes-validate=={SCHEMAS}");
    install::run(
        Command::new("python3")
            .args([
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--no-compile",
                "--disable-pip-version-check",
                "--target",
            ])
            .arg(&wheel)
            .arg(&package),
    )?;
    let from = wheel.join(format!("kubernetes_validate/kubernetes-json-schema/v{SCHEMAS}-local-strict"));
    for (name, file) in below(&from)? {
        let text = std::fs::read_to_string(&file)?;
        let text = text.replace("\"/api/_definitions.json", "\"_definitions.json");
        let mut schema: serde_json::Value = serde_json::from_str(&text)?;
        if let Some(schema) = schema.as_object_mut() {
            schema.remove("$id");
        }
        std::fs::write(dir.join(name), schema.to_string())?;
    }
    std::fs::remove_dir_all(&wheel)?;
    std::fs::write(&done, "").context("finish the schemas")?;
    Ok(dir)
}
