//! What the agent is made of, as `CycloneDX` 1.6 JSON: every crate that is compiled into it, from cargo's own account, with version,
//! license and the checksum of Cargo.lock; and the Debian packages whose libraries are in the image.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::install;

/// Platform whose dependencies count.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The document. `libraries`: files of Debian packages in the image.
pub(crate) fn document(libraries: &[PathBuf], time: &str) -> Result<String> {
    let compiled = compiled()?;
    let metadata = cargo(&["metadata", "--format-version", "1", "--locked", "--filter-platform", TARGET])?;
    let metadata: Value = serde_json::from_str(&metadata).context("read cargo metadata")?;
    let checksums = checksums()?;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut ids: BTreeMap<String, (String, String)> = BTreeMap::new();
    let (mut components, mut dependencies) = (Vec::new(), Vec::new());
    let mut root = Value::Null;
    for package in list(&metadata["packages"]) {
        let text = |key: &str| package[key].as_str().unwrap_or_default().to_owned();
        let name = (text("name"), text("version"));
        if !compiled.contains(&name) {
            continue;
        }
        ids.insert(text("id"), name.clone());
        let mut component = json!({
            "type": "library", "bom-ref": purl(&name), "name": name.0, "version": name.1, "purl": purl(&name),
        });
        if let Some(license) = package["license"].as_str() {
            // Before SPDX a slash meant a choice.
            let expression = license.replace('/', " OR ");
            let words: Vec<&str> = expression.split_whitespace().collect();
            component["licenses"] = json!([{"expression": words.join(" ")}]);
        }
        if let Some(checksum) = checksums.get(&name) {
            component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
        }
        if let Some(repository) = package["repository"].as_str() {
            component["externalReferences"] = json!([{"type": "vcs", "url": repository}]);
        }
        if name.0 == "roomtrace" {
            component["type"] = "application".into();
            root = component;
        } else {
            components.push(component);
        }
    }
    for node in list(&metadata["resolve"]["nodes"]) {
        let Some(name) = node["id"].as_str().and_then(|id| ids.get(id)) else { continue };
        let its = list(&node["dependencies"]);
        let its: BTreeSet<String> = its.iter().filter_map(|id| ids.get(id.as_str()?)).map(purl).collect();
        dependencies.push(json!({"ref": purl(name), "dependsOn": its}));
    }
    components.extend(debian(libraries)?);
    components.sort_by_key(|c| c["bom-ref"].to_string());
    dependencies.sort_by_key(|d| d["ref"].to_string());
    let document = json!({
        "bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1,
        "metadata": {"timestamp": time, "component": root},
        "components": components, "dependencies": dependencies,
    });
    Ok(format!("{document:#}\n"))
}

fn cargo(arguments: &[&str]) -> Result<String> {
    install::output(install::cargo_command().args(arguments))
}

fn purl((name, version): &(String, String)) -> String {
    format!("pkg:cargo/{name}@{version}")
}

/// Name and version of every crate that is compiled into the agent (not those of tests and build scripts).
fn compiled() -> Result<BTreeSet<(String, String)>> {
    let tree = ["tree", "--locked", "-p", "roomtrace", "-e", "normal", "--target", TARGET];
    let said = cargo(&[&tree[..], &["--prefix", "none", "--no-dedupe", "-f", "{p}"]].concat())?;
    let named = |line: &str| {
        let mut words = line.split_whitespace();
        Some((words.next()?.to_owned(), words.next()?.trim_start_matches('v').to_owned()))
    };
    Ok(said.lines().filter_map(named).collect())
}

/// Checksums of crates as they were fetched, from Cargo.lock.
fn checksums() -> Result<BTreeMap<(String, String), String>> {
    let lock = std::fs::read_to_string(install::root().join("Cargo.lock")).context("read Cargo.lock")?;
    let of = |package: &str, key: &str| {
        let rest = package.lines().find_map(|l| l.strip_prefix(key)?.strip_prefix(" = \""))?;
        Some(rest.trim_end_matches('"').to_owned())
    };
    let packages = lock.split("[[package]]");
    Ok(packages.filter_map(|p| Some(((of(p, "name")?, of(p, "version")?), of(p, "checksum")?))).collect())
}

/// The Debian packages that these files are of.
fn debian(files: &[PathBuf]) -> Result<Vec<Value>> {
    let mut packages = BTreeSet::new();
    for file in files {
        // The loader's own path, /lib/x86_64-linux-gnu/…, is recorded for usr/lib or for lib, by release.
        let real = file.canonicalize().with_context(|| format!("find {}", file.display()))?;
        let shorter = real.strip_prefix("/usr").map(|rest| PathBuf::from("/").join(rest)).ok();
        let owner = [Some(real.clone()), shorter].into_iter().flatten().find_map(|path| {
            let said = install::output(Command::new("dpkg-query").arg("-S").arg(path)).ok()?;
            Some(said.split(": ").next()?.to_owned())
        });
        packages.extend(owner);
    }
    let mut all = Vec::new();
    for package in packages {
        let form = "${Package} ${Version} ${Architecture}";
        let said = install::output(Command::new("dpkg-query").args(["-W", "-f", form, &package]))?;
        if let [name, version, architecture] = said.split(' ').collect::<Vec<_>>()[..] {
            let purl = format!("pkg:deb/debian/{name}@{version}?arch={architecture}");
            all.push(json!({
                "type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl,
                "description": "in the container image only"
            }));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn every_crate_of_the_agent_is_named_once_with_its_checksum() {
        let text = document(&[], "1970-01-01T00:00:00Z").unwrap();
        let document: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(document["metadata"]["component"]["name"], "roomtrace");
        let components = document["components"].as_array().unwrap();
        let refs: BTreeSet<&str> = components.iter().map(|c| c["bom-ref"].as_str().unwrap()).collect();
        assert_eq!(refs.len(), components.len());
        let named = |name: &str| components.iter().find(|c| c["name"] == name);
        assert_eq!(named("aya").unwrap()["hashes"][0]["content"].as_str().unwrap().len(), 64);
        assert!(named("proptest").is_none(), "what only tests need is not in the agent");
        for component in components {
            let ours = component["name"].as_str().unwrap().starts_with("roomtrace");
            assert!(ours || component["hashes"].is_array(), "{component}");
            assert!(component["licenses"].is_array(), "{component}");
        }
        for dependency in document["dependencies"].as_array().unwrap() {
            for on in dependency["dependsOn"].as_array().unwrap() {
                assert!(refs.contains(on.as_str().unwrap()), "{on} is not in the list");
            }
        }
    }
}
