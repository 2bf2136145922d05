//! What each key may hold, in words: said wherever a value is refused. Pure.

/// Every key with what it may hold.
const ALLOWED: &[(&str, &str)] = &[
    ("capture.hook", "auto, sock, fentry or kprobe"),
    (
        "capture.engine_comms",
        "a list of at most 8 names of 1 to 15 bytes (the kernel keeps no more of a process name)",
    ),
    ("capture.ports", "a list of at most 64 port numbers from 1 to 65535"),
    ("capture.requests", "true or false"),
    ("capture.own_network", "true or false"),
    ("engine.scrape", "true or false"),
    ("engine.interval", "a duration from 5s to 1m, such as 15s"),
    ("engine.pod_names", "the path of a directory, such as /var/log/containers, or null"),
    ("spans.enabled", "true or false"),
    ("spans.grpc", "an IP address with a port, such as 127.0.0.1:4317, or null"),
    ("spans.http", "an IP address with a port, such as 127.0.0.1:4318, or null"),
    (
        "spans.forward.endpoint",
        "a URL such as http://host:4317 or https://host:4317 that is not this receiver itself, or null",
    ),
    ("spans.forward.protocol", "grpc, http/protobuf or null"),
    (
        "spans.forward.headers",
        "names (letters, digits and -), each with a text of visible ASCII, such as {x-tenant: \"blue\"}",
    ),
    ("spans.forward.timeout", "a duration such as 10s, or null"),
    ("spans.forward.tls.ca", "the path of a PEM file, or null"),
    ("spans.forward.tls.cert", "the path of a PEM file, or null"),
    ("spans.forward.tls.key", "the path of a PEM file, or null"),
    ("spans.forward.queue.items", "a whole number of at least 1"),
    ("spans.forward.queue.bytes", "a whole number of at least 1, in bytes"),
    ("spans.forward.queue.keep", "a duration such as 5m"),
    ("rooms.floor", "a duration of at least 1s and not above rooms.ceiling (1m unless set), such as 10s"),
    ("rooms.ceiling", "a duration that is not below rooms.floor, such as 1m"),
    ("rooms.factor", "a whole number from 1 to 1000"),
    ("rooms.max", "a whole number from 1024 to 4194304 (each open room takes about 1 KiB)"),
    ("export.events", "the path of a file, - for standard output, or null"),
    ("export.trace_salt", "a text"),
    ("export.otlp.endpoint", "a URL such as http://host:4317 or https://host:4317, or null"),
    ("export.otlp.protocol", "grpc, http/protobuf or null"),
    (
        "export.otlp.headers",
        "names (letters, digits and -), each with a text of visible ASCII, such as {x-tenant: \"blue\"}",
    ),
    ("export.otlp.timeout", "a duration such as 10s, or null"),
    ("export.otlp.compression", "none, gzip or null"),
    ("export.otlp.tls.ca", "the path of a PEM file, or null"),
    ("export.otlp.tls.cert", "the path of a PEM file, or null"),
    ("export.otlp.tls.key", "the path of a PEM file, or null"),
    ("export.otlp.queue.items", "a whole number of at least 1"),
    ("export.otlp.queue.bytes", "a whole number of at least 1, in bytes"),
    ("export.otlp.queue.keep", "a duration such as 5m"),
    ("export.otlp.file", "the path of a file, or null"),
    ("gpu.enabled", "true or false"),
    (
        "gpu.lib_path",
        "the path of the driver's library, such as /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1, or null",
    ),
    ("network.rdma", "true or false"),
    (
        "network.rdma_path",
        "the directory in which the kernel lists RDMA cards, such as /sys/class/infiniband, or null",
    ),
    ("network.tcp", "true or false"),
    ("probes.mooncake", "true or false"),
    ("http.enabled", "true or false"),
    ("http.listen", "an IP address with a port, such as 127.0.0.1:9713 or \"[::1]:9713\""),
    ("record.file", "the path of a file, or null"),
    ("record.bytes", "a whole number of at least 1048576 (1 MiB)"),
    ("state.file", "the path of a file in a directory that only the agent may write, or null"),
];

/// Keys whose values are not shown.
const SECRET: &[&str] = &[
    "export.trace_salt",
    "export.otlp.endpoint",
    "export.otlp.headers",
    "spans.forward.endpoint",
    "spans.forward.headers",
];

/// What `key` (`capture.ports[0]`, `export.otlp.headers.x-tenant`) may hold, `None` for what is no key.
pub(super) fn at(key: &str) -> Option<String> {
    let known = ALLOWED.iter().find(|(name, _)| is_in(key, name)).map(|(_, allowed)| (*allowed).to_owned());
    known.or_else(|| {
        let mut inside: Vec<&str> = ALLOWED
            .iter()
            .filter(|(name, _)| is_in(name, key))
            .filter_map(|(name, _)| name.get(key.len() + 1..)?.split('.').next())
            .collect();
        inside.dedup();
        (!inside.is_empty()).then(|| format!("a section with any of the keys {}", inside.join(", ")))
    })
}

/// Whether the value of `key` may not be shown.
pub(super) fn is_secret(key: &str) -> bool {
    SECRET.iter().any(|secret| is_in(key, secret) || is_in(secret, key))
}

/// Whether `key` is `outer` or stands within it.
fn is_in(key: &str, outer: &str) -> bool {
    key.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::cli::config::Config;

    fn leaves(value: &serde_json::Value, at: &str, found: &mut Vec<String>) {
        match value.as_object().filter(|fields| !fields.is_empty()) {
            Some(fields) => {
                for (name, field) in fields {
                    let at = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
                    leaves(field, &at, found);
                }
            }
            None => found.push(at.to_owned()),
        }
    }

    #[test]
    fn every_key_says_what_it_may_hold_and_nothing_else_does() {
        let mut keys = Vec::new();
        leaves(&serde_json::to_value(Config::default()).unwrap(), "", &mut keys);
        let mut listed: Vec<&str> = ALLOWED.iter().map(|(key, _)| *key).collect();
        listed.sort_unstable();
        keys.sort_unstable();
        assert_eq!(keys, listed);
    }

    #[test]
    fn sections_and_entries_say_so_too() {
        assert_eq!(at("http").unwrap(), "a section with any of the keys enabled, listen");
        assert!(at("export").unwrap().ends_with("keys events, trace_salt, otlp"));
        assert_eq!(at("capture.ports[3]"), at("capture.ports"));
        assert_eq!(at("http.lsiten"), None);
        assert!(
            is_secret("export.otlp.headers.x") && is_secret("export.otlp") && !is_secret("export.otlp.file")
        );
    }
}
