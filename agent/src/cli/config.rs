//! Configuration: one YAML file, overridden by environment and flags; sane with no file at all.
//!
//! Reads the file it is told to read, nothing else. `agent/roomtrace.yaml` shows every key with its reason.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::duration_text;
use crate::export::otlp::{Endpoint, ForwardConfig, OtlpConfig, QueueConfig, Secret};

mod allowed;
mod place;
#[cfg(test)]
mod reference;

/// Why a configuration cannot be used. Each names the file, the place and a way out.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error(
        "cannot read configuration {path}: {source} (name another with --config, or leave it out: every key has a default)"
    )]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no YAML, or has a key that does not exist.
    #[error("configuration {path}{place}: {what}{hint}")]
    Parse {
        /// Which file.
        path: PathBuf,
        /// `:line:column` where known.
        place: String,
        /// What is wrong.
        what: String,
        /// What was probably meant.
        hint: String,
    },
    /// A value that cannot be.
    #[error("configuration {place}: {problem}")]
    Value {
        /// `file:line:column`, or that it came from elsewhere.
        place: String,
        /// What is wrong.
        problem: Problem,
    },
}

/// A value that cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key}: {what}")]
pub struct Problem {
    /// Full name of its key.
    key: String,
    /// The value and what is allowed instead.
    what: String,
}

impl Problem {
    /// `value` is shown unless the key's values are not to be seen.
    fn new(key: impl Into<String>, value: &str) -> Self {
        let key = key.into();
        let value = if allowed::is_secret(&key) {
            "this value (not shown)".to_owned()
        } else {
            // One line, whatever was written.
            format!("`{}`", value.lines().next().unwrap_or_default().chars().take(60).collect::<String>())
        };
        let allowed = allowed::at(&key).unwrap_or_else(|| "something else".to_owned());
        Self { key, what: format!("{value} cannot be used here; allowed is {allowed}") }
    }

    fn hidden(key: impl Into<String>) -> Self {
        let what = "the value is hidden, as `roomtrace config show` prints it: put the value itself back";
        Self { key: key.into(), what: what.to_owned() }
    }
}

/// Longest configuration file, bytes.
const LONGEST: u64 = 1 << 20;

/// Everything that can be set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// What to watch.
    pub capture: Capture,
    /// What engines are asked about themselves.
    pub engine: Engine,
    /// Receiver of the engines' own spans.
    pub spans: Spans,
    /// When a room is overdue.
    pub rooms: Rooms,
    /// Where results go.
    pub export: Export,
    /// HTTP server of the agent.
    pub http: Http,
    /// What is read of the GPUs.
    pub gpu: Gpu,
    /// What is read of the network.
    pub network: Network,
    /// What is probed inside engines.
    pub probes: ProbesConfig,
    /// What a restarted agent goes on from.
    pub state: State,
    /// What is kept to be replayed later.
    pub record: Record,
}

/// What to watch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Capture {
    /// Back end; `auto` probes them in order.
    pub hook: Hook,
    /// Prefixes of process names (`comm`, at most 15 bytes) that are engines.
    pub engine_comms: Vec<String>,
    /// Ports to watch besides what is learned, local or remote.
    pub ports: Vec<u16>,
    /// Whether requests at HTTP ports of engines and bootstrap servers are read.
    pub requests: bool,
    /// Whether only connections of the agent's own network namespace are watched.
    pub own_network: bool,
}

impl Default for Capture {
    fn default() -> Self {
        Self {
            hook: Hook::Auto,
            engine_comms: vec!["sglang::".to_owned()],
            ports: Vec::new(),
            requests: true,
            own_network: false,
        }
    }
}

/// What engines are asked about themselves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Engine {
    /// Whether each engine of this host is asked for its queue counts, at its own HTTP port.
    pub scrape: bool,
    /// How often.
    #[serde(with = "crate::duration_text")]
    pub interval: Duration,
    /// Where the kubelet names the containers' logs, whose names tell pods; `None`: pods are known by their uid alone.
    pub pod_names: Option<PathBuf>,
}

impl Default for Engine {
    fn default() -> Self {
        let pod_names = Some("/var/log/containers".into());
        Self { scrape: true, interval: Duration::from_secs(15), pod_names }
    }
}

/// Receiver of the engines' own spans (OTLP).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Spans {
    /// Whether it runs.
    pub enabled: bool,
    /// Where it takes gRPC; `None`: it does not. It has no authentication.
    pub grpc: Option<SocketAddr>,
    /// Where it takes protobuf over HTTP; `None`: it does not.
    pub http: Option<SocketAddr>,
    /// Who gets them as they came.
    pub forward: ForwardConfig,
}

impl Default for Spans {
    fn default() -> Self {
        let loopback = std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
        let at = |port| Some(SocketAddr::new(loopback, port));
        Self { enabled: false, grpc: at(4317), http: at(4318), forward: ForwardConfig::default() }
    }
}

/// What is read of the GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Gpu {
    /// Whether they are read.
    pub enabled: bool,
    /// The driver's library (NVML); `None`: `libnvidia-ml.so.1`, where the loader finds it.
    pub lib_path: Option<PathBuf>,
}

impl Default for Gpu {
    fn default() -> Self {
        Self { enabled: true, lib_path: None }
    }
}

/// What is read of the network.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Network {
    /// Whether the counters of RDMA ports are read.
    pub rdma: bool,
    /// Where the kernel lists RDMA cards; `None`: `/sys/class/infiniband`.
    pub rdma_path: Option<PathBuf>,
    /// Whether it is counted what engines' TCP connections carry that are no control connections.
    pub tcp: bool,
}

impl Default for Network {
    fn default() -> Self {
        Self { rdma: true, rdma_path: None, tcp: true }
    }
}

/// What is probed inside engines. Nothing unless it is switched on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ProbesConfig {
    /// What Mooncake's transfer engine is asked to move, by uprobes on its library.
    pub mooncake: bool,
}

/// Which kernel hooks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Hook {
    /// The first that works.
    #[default]
    Auto,
    /// `tp_btf` on `sock_send_length` and `sock_recv_length` (kernels from 6.3).
    Sock,
    /// fentry and fexit on `tcp_sendmsg` and `tcp_recvmsg`.
    Fentry,
    /// kprobe and kretprobe on the same.
    Kprobe,
}

/// When a room is overdue.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rooms {
    /// No room is overdue before this.
    #[serde(with = "crate::duration_text")]
    pub floor: Duration,
    /// Every room is overdue after this, in phases that contain neither queueing nor computing.
    #[serde(with = "crate::duration_text")]
    pub ceiling: Duration,
    /// Threshold = factor × 99th percentile of the phase.
    pub factor: u32,
    /// Rooms kept at most, open and closed together.
    pub max: u32,
}

impl Default for Rooms {
    fn default() -> Self {
        Self { floor: Duration::from_secs(10), ceiling: Duration::from_mins(1), factor: 8, max: 131_072 }
    }
}

/// Where results go.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Export {
    /// JSON lines: a file, or `-` for standard output.
    pub events: Option<PathBuf>,
    /// Secret mixed into trace ids, the same on every host of a fleet (empty: ids follow from room numbers alone).
    pub trace_salt: Secret,
    /// OpenTelemetry.
    pub otlp: OtlpConfig,
}

/// What a restarted agent goes on from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct State {
    /// The file; `None`: pins are forgotten when the agent ends.
    pub file: Option<PathBuf>,
}

impl Default for State {
    fn default() -> Self {
        Self { file: Some(PathBuf::from("/var/lib/roomtrace/state")) }
    }
}

/// What is kept to be replayed later.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Record {
    /// The file; `None`: nothing is kept.
    pub file: Option<PathBuf>,
    /// Bytes at most; older ones go first.
    pub bytes: u64,
}

impl Default for Record {
    fn default() -> Self {
        Self { file: None, bytes: 256 << 20 }
    }
}

/// HTTP server of the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Http {
    /// Whether it runs.
    pub enabled: bool,
    /// Where it listens. It has no authentication: keep it on loopback or behind a network policy.
    pub listen: SocketAddr,
}

/// Default of `http.listen`.
pub const DEFAULT_LISTEN: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9713);

impl Default for Http {
    fn default() -> Self {
        Self { enabled: true, listen: DEFAULT_LISTEN }
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// [`ConfigError`] when it cannot be read, is not YAML, has an unknown key or a value out of range.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let failed = |source| ConfigError::Read { path: path.to_owned(), source };
        let mut text = String::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(LONGEST + 1).read_to_string(&mut text))
            .map_err(failed)?;
        if u64::try_from(text.len()).unwrap_or(u64::MAX) > LONGEST {
            return Err(failed(std::io::Error::other("longer than 1 MiB: not a configuration")));
        }
        Self::parse(path, &text)
    }

    /// Parses and checks a text; `path` is only named in errors.
    ///
    /// # Errors
    /// [`ConfigError::Parse`], [`ConfigError::Value`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        if text.lines().all(|l| l.trim_start().is_empty() || l.trim_start().starts_with('#')) {
            return Ok(Self::default());
        }
        let mut key = String::new();
        let config: Self = serde_saphyr::with_deserializer_from_str(text, |from| {
            serde_path_to_error::deserialize(from).map_err(|error| {
                // A `?` or `.` stands where the path is not known.
                error.path().to_string().trim_end_matches(['.', '?']).clone_into(&mut key);
                error.into_inner()
            })
        })
        .map_err(|error| refused(path, text, key, &error))?;
        config.problem().map_or(Ok(()), |problem| {
            let place = format!("{}{}", path.display(), place::of(text, &problem.key));
            Err(ConfigError::Value { place, problem })
        })?;
        Ok(config)
    }

    /// Checks what types cannot say.
    ///
    /// # Errors
    /// [`ConfigError::Value`].
    pub fn check(&self) -> Result<(), ConfigError> {
        self.problem().map_or(Ok(()), |problem| {
            Err(ConfigError::Value { place: "from the command line or the environment".to_owned(), problem })
        })
    }

    /// The first value that cannot be used though it is of the right type.
    fn problem(&self) -> Option<Problem> {
        let few = self.record.bytes < 1 << 20;
        self.capture
            .problem()
            .or_else(|| self.engine.problem())
            .or_else(|| self.rooms.problem())
            .or_else(|| self.export.problem())
            .or_else(|| self.spans.problem())
            .or_else(|| few.then(|| Problem::new("record.bytes", &self.record.bytes.to_string())))
    }
}

impl Capture {
    fn problem(&self) -> Option<Problem> {
        let comms = &self.engine_comms;
        if let Some(comm) = comms.iter().find(|comm| !(1..=15).contains(&comm.len())) {
            return Some(Problem::new("capture.engine_comms", comm));
        }
        if comms.len() > 8 {
            return Some(Problem::new("capture.engine_comms", &format!("{} names", comms.len())));
        }
        if self.ports.contains(&0) {
            return Some(Problem::new("capture.ports", "0"));
        }
        (self.ports.len() > 64).then(|| Problem::new("capture.ports", &format!("{} ports", self.ports.len())))
    }
}

impl Engine {
    fn problem(&self) -> Option<Problem> {
        let right = (Duration::from_secs(5)..=Duration::from_mins(1)).contains(&self.interval);
        (!right).then(|| Problem::new("engine.interval", &duration_text::show(self.interval)))
    }
}

impl Rooms {
    fn problem(&self) -> Option<Problem> {
        let wrong = |right: bool, key, value: String| (!right).then(|| Problem::new(key, &value));
        wrong(self.floor >= Duration::from_secs(1), "rooms.floor", duration_text::show(self.floor))
            .or_else(|| {
                // The one that is not the default is the one that was written.
                let raised = self.ceiling == Self::default().ceiling;
                let (key, value) =
                    if raised { ("rooms.floor", self.floor) } else { ("rooms.ceiling", self.ceiling) };
                wrong(self.ceiling >= self.floor, key, duration_text::show(value))
            })
            .or_else(|| wrong((1..=1000).contains(&self.factor), "rooms.factor", self.factor.to_string()))
            .or_else(|| wrong((1024..=4_194_304).contains(&self.max), "rooms.max", self.max.to_string()))
    }
}

impl Export {
    fn problem(&self) -> Option<Problem> {
        let OtlpConfig { endpoint, headers, queue, .. } = &self.otlp;
        if self.trace_salt.is_hidden() {
            return Some(Problem::hidden("export.trace_salt"));
        }
        receiver_problem("export.otlp", endpoint.as_ref(), headers, *queue)
    }
}

impl Spans {
    fn problem(&self) -> Option<Problem> {
        let ForwardConfig { endpoint, headers, queue, .. } = &self.forward;
        receiver_problem("spans.forward", endpoint.as_ref(), headers, *queue).or_else(|| {
            // To itself: every request would come back for ever.
            let own = [self.grpc, self.http].into_iter().flatten();
            let same = endpoint.as_ref().filter(|e| own.clone().any(|at| e.is_at(at)))?;
            Some(Problem::new("spans.forward.endpoint", &same.to_string()))
        })
    }
}

/// What is wrong with the settings of a receiver at `key`.
fn receiver_problem(
    key: &str,
    endpoint: Option<&Endpoint>,
    headers: &BTreeMap<String, Secret>,
    queue: QueueConfig,
) -> Option<Problem> {
    if endpoint.is_some_and(Endpoint::is_hidden) {
        return Some(Problem::hidden(format!("{key}.endpoint")));
    }
    if endpoint.and_then(Endpoint::problem).is_some() {
        return Some(Problem::new(format!("{key}.endpoint"), ""));
    }
    for (name, value) in headers {
        let key = format!("{key}.headers.{name}");
        if value.is_hidden() {
            return Some(Problem::hidden(key));
        }
        if !value.is_header(name) {
            return Some(Problem::new(key, ""));
        }
    }
    let none = |n: usize, what| (n == 0).then(|| Problem::new(format!("{key}.queue.{what}"), "0"));
    none(queue.items, "items").or_else(|| none(queue.bytes, "bytes"))
}

/// What the parser refused, for the operator.
fn refused(path: &Path, text: &str, key: String, error: &serde_saphyr::Error) -> ConfigError {
    let location = error.location();
    let mut what = error.without_snippet().to_string();
    // The place stands in front already, and the options are the parser's.
    for end in [" at line ", ", set DuplicateKeyPolicy"] {
        what.truncate(what.find(end).unwrap_or(what.len()));
    }
    let place = place::shown(location);
    let of_type = ["invalid ", "expected ", "unknown variant ", "`"].iter().any(|s| what.starts_with(s));
    if of_type && allowed::at(&key).is_some() {
        let value = location.map(|l| l.span()).and_then(|span| {
            let start = usize::try_from(span.byte_offset()?).ok()?;
            text.get(start..start + usize::try_from(span.byte_len()?).ok()?)
        });
        let value = match value {
            Some("[") => "a list",
            Some("{") => "a section",
            other => other.unwrap_or_default(),
        };
        let place = format!("{}{place}", path.display());
        return ConfigError::Value { place, problem: Problem::new(key, value) };
    }
    let hint = hint(&what);
    let within = key.rsplit_once('.').map_or("", |(section, _)| section);
    if !within.is_empty() {
        what = format!("{within}: {what}");
    }
    ConfigError::Parse { path: path.to_owned(), place, hint, what }
}

/// "did you mean" for "unknown field `x`, expected one of a, b".
fn hint(what: &str) -> String {
    let Some((unknown, known)) = what.split_once(", expected ") else { return String::new() };
    let Some(unknown) = unknown.split('`').nth(1) else { return String::new() };
    known
        .trim_start_matches("one of ")
        .split(", ")
        .map(|name| name.trim_matches('`'))
        .map(|name| (strsim::damerau_levenshtein(unknown, name), name))
        .filter(|(distance, name)| *distance <= 2.max(name.len() / 3))
        .min()
        .map_or_else(String::new, |(_, name)| format!(" (did you mean `{name}`?)"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn error(text: &str) -> String {
        Config::parse(Path::new("r.yaml"), text).unwrap_err().to_string()
    }

    #[test]
    fn the_shipped_file_is_the_default() {
        let shipped = include_str!("../../roomtrace.yaml");
        assert_eq!(Config::parse(Path::new("roomtrace.yaml"), shipped).unwrap(), Config::default());
    }

    #[test]
    fn nothing_is_the_default() {
        assert_eq!(Config::parse(Path::new("r.yaml"), "# only a comment\n\n").unwrap(), Config::default());
    }

    #[test]
    fn what_is_shown_reads_back() {
        let shown = serde_saphyr::to_string(&Config::default()).unwrap();
        assert_eq!(Config::parse(Path::new("shown"), &shown).unwrap(), Config::default(), "{shown}");
    }

    #[test]
    fn an_unknown_key_is_named_with_line_and_suggestion() {
        let e = error("rooms:\n  flor: 10s\n");
        assert!(e.contains("r.yaml:2:"), "{e}");
        assert!(e.contains("did you mean `floor`?"), "{e}");
    }

    #[test]
    fn a_wrong_value_is_named_with_place_key_and_what_is_allowed() {
        let cases = [
            ("rooms: {factor: -1}", "r.yaml:1:17: rooms.factor: `-1`", "from 1 to 1000"),
            ("rooms:\n  factor: 1001", "r.yaml:2:11: rooms.factor: `1001`", "from 1 to 1000"),
            ("rooms:\n  factor: 1.5", "r.yaml:2:11: rooms.factor: `1.5`", "from 1 to 1000"),
            ("rooms: {factor: 99999999999}", "r.yaml:1:17: rooms.factor: `99999999999`", "from 1 to 1000"),
            ("rooms: {max: 7}", "r.yaml:1:14: rooms.max: `7`", "from 1024"),
            ("rooms: {floor: soon}", "r.yaml:1:16: rooms.floor: `soon`", "at least 1s"),
            ("rooms: {floor: 0s}", "r.yaml:1:16: rooms.floor: `0s`", "at least 1s"),
            ("rooms: {floor: 90s}", "r.yaml:1:16: rooms.floor: `1m 30s`", "not above rooms.ceiling"),
            ("capture: {ports: [80, 70000]}", "r.yaml:1:23: capture.ports[1]: `70000`", "1 to 65535"),
            ("capture: {ports: [0]}", "r.yaml:1:18: capture.ports: `0`", "1 to 65535"),
            ("capture: {ports: 80}", "r.yaml:1:18: capture.ports: `80`", "a list"),
            ("capture: {hook: socks}", "r.yaml:1:17: capture.hook: `socks`", "sock, fentry"),
            ("capture: {engine_comms: [\"\"]}", "r.yaml:1:25: capture.engine_comms: ``", "15 bytes"),
            ("http: {listen: here}", "r.yaml:1:16: http.listen: `here`", "127.0.0.1:9713"),
            ("http: {enabled: [1]}", "r.yaml:1:17: http.enabled: `a list`", "true or false"),
            ("http: {listen: \"a\\nb\"}", "r.yaml:1:16: http.listen: ", "127.0.0.1:9713"),
            ("http:\n  listen: |\n    a\n    b\n", "r.yaml:3:5: http.listen: `a`", "127.0.0.1:9713"),
            ("http: on", "r.yaml:1:7: http: `on`", "enabled, listen"),
            (
                "export: {otlp: {queue: {items: 0}}}",
                "r.yaml:1:32: export.otlp.queue.items: `0`",
                "at least 1",
            ),
            (
                "export: {otlp: {protocol: http}}",
                "r.yaml:1:27: export.otlp.protocol: `http`",
                "http/protobuf",
            ),
            ("export: {otlp: {timeout: 10}}", "r.yaml:1:26: export.otlp.timeout: `10`", "a duration"),
        ];
        for (text, named, allowed) in cases {
            let e = error(text);
            assert!(e.contains(named) && e.contains(allowed) && e.lines().count() == 1, "{text}: {e}");
        }
    }

    #[test]
    fn what_is_no_yaml_is_named_with_its_place() {
        for (text, place) in [
            ("rooms: [1, 2\n", "r.yaml:1:8: "),
            ("rooms:\n  floor: \"10s\n", "r.yaml:"),
            ("rooms:\n  floor: 1s\n  floor: 2s\n", "r.yaml:3:3: "),
            ("rooms: *x\n", "r.yaml:1:8: "),
        ] {
            let e = error(text);
            assert!(e.contains(place) && e.lines().count() == 1, "{text}: {e}");
            assert!(!e.contains("DuplicateKeyPolicy"), "{e}");
        }
    }

    #[test]
    fn errors_do_not_show_secrets() {
        for text in [
            "export: {otlp: {endpoint: \"ftp://user:secret@host\"}}",
            "export: {otlp: {endpoint: [\"http://user:secret@host\"]}}",
            "export: {otlp: {headers: \"authorization=secret\"}}",
            "export: {otlp: {headers: {authorization: [secret]}}}",
            "export: {otlp: {headers: {a b: secret}}}",
            "export: {otlp: {headers: {a: \"secret\\n\"}}}",
            "export: {otlp: secret}",
            "export: {trace_salt: {secret: secret}}",
        ] {
            let e = error(text);
            assert!(e.contains("r.yaml:1:") && e.contains("allowed is"), "{e}");
            assert!(!e.contains("secret"), "{text}: {e}");
        }
    }

    #[test]
    fn hidden_values_are_not_shown_and_refused_when_read_back() {
        let text = "export:\n  trace_salt: secret1\n  otlp:\n    endpoint: https://me:secret2@host:4317\n    \
                    headers: {authorization: secret3, x-tenant: secret4}\n";
        let mut config = Config::parse(Path::new("r.yaml"), text).unwrap();
        for key in ["trace_salt", "otlp.endpoint", "otlp.headers.authorization", "otlp.headers.x-tenant"] {
            let shown = serde_saphyr::to_string(&config).unwrap();
            assert!(!format!("{shown} {config:?}").contains("secret"), "{shown} {config:?}");
            let e = error(&shown);
            assert!(e.contains(&format!(": export.{key}: the value is hidden")), "{shown}: {e}");
            assert!(e.starts_with("configuration r.yaml:"), "{e}");
            // One by one, they are put back.
            let otlp = &mut config.export.otlp;
            match key {
                "trace_salt" => config.export.trace_salt = Secret::default(),
                "otlp.endpoint" => otlp.endpoint = Some("https://host:4317".to_owned().into()),
                _ => drop(otlp.headers.pop_first()),
            }
        }
        let shown = serde_saphyr::to_string(&config).unwrap();
        assert_eq!(Config::parse(Path::new("shown"), &shown).unwrap(), config, "{shown}");
    }
}
