//! JSON schema of the chart's values, from the files that hold their defaults. Pure.
//!
//! Of a key the schema says its comment and the type of its default, and that no other keys are beside it. What Kubernetes takes as it is
//! has the keys that Kubernetes knows there; volumes alone, of which there are dozens of kinds, are left to the cluster.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde_json::{Map, Value, json};

/// Maps whose keys are anybody's.
const FREE: [&str; 1] = ["dashboards.labels"];

/// Keys of short maps, which have no comment of their own, by the end of their path.
const SHORT: [(&str, &str); 8] = [
    ("tls.ca", "PEM file: authority of the receiver."),
    ("tls.cert", "PEM file: own certificate."),
    ("tls.key", "PEM file: its key."),
    ("queue.items", "What waits at most, in spans or records."),
    ("queue.bytes", "What waits at most, in bytes."),
    ("queue.keep", "How long it waits at most."),
    ("forward.tls", "PEM files: authority of the receiver, own certificate and its key."),
    (
        "forward.queue",
        "What waits for a receiver that cannot be reached; the rest is refused, and the engines try again.",
    ),
];

/// Keys of `spans.forward` mean what those of `export.otlp` do.
const FORWARD: (&str, &str) = ("spans.forward.", "export.otlp.");

/// Durations as the agent takes them: numbers with units, or ISO 8601.
const DURATION: &str = "^(P.*|( *[0-9]+([.,][0-9]+)? *(h|hrs?|hours?|m|mins?|minutes?|s|secs?|seconds?|ms|msecs?|millis?|milliseconds?),?)+ *)$";

/// An address with a port.
const ADDRESS: &str = "^([0-9.]+|\\[[0-9a-fA-F:.]+\\]):[0-9]{1,5}$";

/// What Kubernetes takes as it is: the keys that it knows there (API 1.37).
fn kubernetes(path: &str) -> Option<Value> {
    let keys = |names: &[&str]| -> Value {
        let properties: Map<String, Value> =
            names.iter().map(|name| ((*name).to_owned(), json!({}))).collect();
        json!({"type": "object", "additionalProperties": false, "properties": properties})
    };
    let list = |of: Value| json!({"type": "array", "items": of});
    let required = |mut of: Value, names: &[&str]| {
        of["required"] = json!(names);
        of
    };
    Some(match path {
        "resources" | "collector.resources" => keys(&["requests", "limits", "claims"]),
        "seccompProfile" => {
            let mut of = keys(&["type", "localhostProfile"]);
            of["properties"]["type"] = json!({"enum": ["RuntimeDefault", "Localhost", "Unconfined"]});
            of
        }
        "updateStrategy" => {
            let mut of = keys(&["type", "rollingUpdate"]);
            of["properties"]["type"] = json!({"enum": ["RollingUpdate", "OnDelete"]});
            of["properties"]["rollingUpdate"] = keys(&["maxUnavailable", "maxSurge"]);
            of
        }
        "imagePullSecrets" => list(required(keys(&["name"]), &["name"])),
        "tolerations" => list(keys(&["key", "operator", "value", "effect", "tolerationSeconds"])),
        "extraEnv" | "collector.extraEnv" => list(required(keys(&["name", "value", "valueFrom"]), &["name"])),
        "networkPolicy.from" => list(keys(&["podSelector", "namespaceSelector", "ipBlock"])),
        _ => return None,
    })
}

/// The values' schema: of the chart, and below `config` of the agent.
pub(super) fn schema(values: &str, agent: &str) -> Result<String> {
    let defaults = parse(values).context("values.yaml")?;
    let mut schema = Of { comments: &comments(values), may_be_null: false }.object("", &defaults);
    let agent_defaults = parse(agent).context("agent/roomtrace.yaml")?;
    let mut config = Of { comments: &comments(agent), may_be_null: true }.object("", &agent_defaults);
    let properties = &mut schema["properties"];
    config["description"] = properties["config"]["description"].take();
    config["properties"]["http"]["properties"]["listen"]["type"] = "string".into();
    properties["config"] = config;
    // Of a chart that has this one as a part.
    properties["global"] = json!({"type": "object", "description": "Helm's own; not used."});
    properties["image"]["properties"]["pullPolicy"]["enum"] = json!(["Always", "IfNotPresent", "Never"]);
    properties["gpuNodes"]["properties"]["labels"]["items"] = json!({
        "type": "object", "additionalProperties": false, "required": ["key", "operator"],
        "properties": {
            "key": {"type": "string", "description": "Name of the label."},
            "operator": {
                "enum": ["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"],
                "description": "How its value is compared."
            },
            "values": {"type": "array", "items": {"type": "string"}, "description": "With what; none for Exists and DoesNotExist."},
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
            if let Some(comment) = self.comment(&path) {
                of["description"] = comment.into();
            }
            properties.insert(key.clone(), of);
        }
        json!({"type": "object", "additionalProperties": false, "properties": properties})
    }

    fn comment(&self, path: &str) -> Option<&str> {
        let own = |path: &str| self.comments.get(path).map(String::as_str);
        let short = || {
            let dotted = format!(".{path}");
            SHORT.iter().find(|(end, _)| dotted.ends_with(&format!(".{end}"))).map(|(_, comment)| *comment)
        };
        let meant = || own(&path.replacen(FORWARD.0, FORWARD.1, 1)).filter(|_| path.starts_with(FORWARD.0));
        own(path).or_else(short).or_else(meant)
    }

    fn value(&self, path: &str, default: &Value) -> Value {
        if let Some(of) = kubernetes(path).filter(|_| !self.may_be_null) {
            return of;
        }
        let text = if self.may_be_null { json!(["string", "null"]) } else { json!("string") };
        match default {
            Value::Object(map) if map.is_empty() || FREE.contains(&path) => json!({"type": "object"}),
            Value::Object(_) => self.object(path, default),
            Value::Array(_) => json!({"type": "array"}),
            Value::Bool(b) => json!({"type": "boolean", "default": b}),
            Value::Number(n) => json!({"type": "integer", "default": n}),
            Value::String(s) if is_duration(s) => json!({"type": text, "default": s, "pattern": DURATION}),
            Value::String(s) if path == "http.listen" => {
                json!({"type": text, "default": s, "pattern": ADDRESS})
            }
            Value::String(s) => json!({"type": text, "default": s}),
            // What may be left out is a text in both files.
            Value::Null => json!({"type": ["string", "null"], "default": null}),
        }
    }
}

/// Whether a default is one, and so whatever stands in its place: `10s`.
fn is_duration(text: &str) -> bool {
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
    unit.len() < text.len() && ["ms", "s", "m", "h"].contains(&unit)
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
        assert!(bare.is_empty(), "no comment above {bare:?}");
        let of = &schema["properties"]["config"]["properties"]["spans"]["properties"]["forward"];
        let same = &schema["properties"]["config"]["properties"]["export"]["properties"]["otlp"];
        let description = |of: &Value| of["properties"]["timeout"]["description"].clone();
        assert_eq!(description(of), description(same));
    }

    fn undescribed(path: &str, schema: &Value, bare: &mut Vec<String>) {
        // Inside of Kubernetes' own objects the description is Kubernetes'.
        if kubernetes(path).is_some() {
            return;
        }
        let items = schema["items"]["properties"].as_object();
        for (key, of) in schema["properties"].as_object().or(items).into_iter().flatten() {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            if !of["description"].is_string() {
                bare.push(path.clone());
            }
            undescribed(&path, of, bare);
        }
    }

    #[test]
    fn durations_are_told_from_other_texts() {
        for text in ["10s", "250ms", "5m"] {
            assert!(is_duration(text), "{text}");
        }
        for text in ["", "s", "5", "5x", "auto", "0.0.0.0:9713"] {
            assert!(!is_duration(text), "{text}");
        }
    }
}
