//! JSON schema of the chart's values, from the files that hold their defaults. Pure.
//!
//! Of a key the schema says its comment and the type of its default, and that no other keys are beside it.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

/// Objects of the chart's values whose keys are Kubernetes' or the operator's.
const FREE: [&str; 5] =
    ["resources", "seccompProfile", "updateStrategy", "dashboards.labels", "collector.resources"];

/// The values' schema: of the chart, and below `config` of the agent.
pub(super) fn schema(values: &str, agent: &str) -> Result<String> {
    let defaults = parse(values).context("values.yaml")?;
    let mut schema = Of { comments: &comments(values), may_be_null: false }.object("", &defaults);
    let agent_defaults = parse(agent).context("agent/roomtrace.yaml")?;
    let mut config = Of { comments: &comments(agent), may_be_null: true }.object("", &agent_defaults);
    let properties = &mut schema["properties"];
    config["description"] = properties["config"]["description"].take();
    properties["config"] = config;
    // Of a chart that has this one as a part.
    properties["global"] = json!({"type": "object", "description": "Helm's own; not used."});
    properties["image"]["properties"]["pullPolicy"]["enum"] = json!(["Always", "IfNotPresent", "Never"]);
    properties["gpuNodes"]["properties"]["labels"]["items"] = json!({
        "type": "object", "additionalProperties": false, "required": ["key", "operator"],
        "properties": {
            "key": {"type": "string", "description": "Name of the label."},
            "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]},
            "values": {"type": "array", "items": {"type": "string"}},
        }
    });
    schema["$schema"] = "http://json-schema.org/draft-07/schema#".into();
    schema["title"] = "Values of the Roomtrace chart".into();
    Ok(format!("{schema:#}\n"))
}

fn parse(text: &str) -> Result<Value> {
    Ok(serde_saphyr::from_str(text)?)
}

struct Of<'a> {
    comments: &'a BTreeMap<String, String>,
    /// Whether a text may also be null.
    may_be_null: bool,
}

impl Of<'_> {
    fn object(&self, path: &str, defaults: &Value) -> Value {
        let mut properties = Map::new();
        for (key, default) in defaults.as_object().into_iter().flatten() {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            let mut of = self.value(&path, default);
            if let Some(comment) = self.comments.get(&path) {
                of["description"] = comment.as_str().into();
            }
            properties.insert(key.clone(), of);
        }
        json!({"type": "object", "additionalProperties": false, "properties": properties})
    }

    fn value(&self, path: &str, default: &Value) -> Value {
        let text = if self.may_be_null { json!(["string", "null"]) } else { json!("string") };
        match default {
            Value::Object(map) if map.is_empty() || FREE.contains(&path) => json!({"type": "object"}),
            Value::Object(_) => self.object(path, default),
            Value::Array(_) => json!({"type": "array"}),
            Value::Bool(b) => json!({"type": "boolean", "default": b}),
            Value::Number(n) => json!({"type": "integer", "default": n}),
            Value::String(s) => json!({"type": text, "default": s}),
            // What may be left out is a text in both files.
            Value::Null => json!({"type": ["string", "null"], "default": null}),
        }
    }
}

/// The comment above each key, by the key's path. Both files are in block style, lists and short maps in flow style.
fn comments(text: &str) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut above: Vec<&str> = Vec::new();
    let mut path: Vec<(usize, &str)> = Vec::new();
    for line in text.lines() {
        let content = line.trim_start();
        let indent = line.len() - content.len();
        if let Some(comment) = content.strip_prefix('#') {
            above.push(comment.trim());
            continue;
        }
        let key = content.split_once(':').map(|(key, _)| key);
        if let Some(key) = key.filter(|key| key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')) {
            path.retain(|(at, _)| *at < indent);
            path.push((indent, key));
            if !above.is_empty() {
                let names: Vec<&str> = path.iter().map(|(_, key)| *key).collect();
                found.insert(names.join("."), above.join(" "));
            }
        }
        above.clear();
    }
    found
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn keys_have_the_comment_above_them_and_the_type_of_their_default() {
        let values = "# of the file\n\n# What\n# it is.\na:\n  # Inner.\n  b: 1\n  c: {}\nconfig: {}\nimage: {pullPolicy: x}\ngpuNodes: {labels: []}\n";
        let text = schema(values, "x:\n  # Of x.\n  y: 10s\n").unwrap();
        let schema: Value = serde_json::from_str(&text).unwrap();
        let a = &schema["properties"]["a"];
        assert_eq!(a["description"], "What it is.");
        assert_eq!(
            (&a["additionalProperties"], &a["properties"]["b"]["type"]),
            (&json!(false), &json!("integer"))
        );
        assert_eq!(a["properties"]["b"]["description"], "Inner.");
        assert_eq!(a["properties"]["c"], json!({"type": "object"}));
        let y = &schema["properties"]["config"]["properties"]["x"]["properties"]["y"];
        assert_eq!((&y["type"], &y["description"]), (&json!(["string", "null"]), &json!("Of x.")));
    }

    #[test]
    fn every_value_of_the_chart_is_described() {
        let text = std::fs::read_to_string(super::super::dir().join("values.schema.json")).unwrap();
        let schema: Value = serde_json::from_str(&text).unwrap();
        let mut bare = Vec::new();
        undescribed("", &schema, &mut bare);
        // Groups whose keys say it all.
        let groups = [
            "collector",
            "dashboards",
            "gpu",
            "gpuNodes",
            "image",
            "networkPolicy",
            "prometheusRule",
            "serviceAccount",
            "serviceMonitor",
        ];
        bare.retain(|path| !groups.contains(&path.as_str()));
        assert!(bare.is_empty(), "no comment above {bare:?}");
    }

    fn undescribed(path: &str, schema: &Value, bare: &mut Vec<String>) {
        for (key, of) in schema["properties"].as_object().into_iter().flatten() {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            if path == "config" {
                continue;
            }
            if !of["description"].is_string() {
                bare.push(path.clone());
            }
            undescribed(&path, of, bare);
        }
    }
}
