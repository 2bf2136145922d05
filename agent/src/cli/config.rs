//! Configuration: one YAML file, overridden by environment and flags; sane with no file at all.
//!
//! Reads the file it is told to read, nothing else. `agent/roomtrace.yaml` shows every key with its reason.

use std::io::Read as _;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

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
    /// The file is not what it must be.
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
    /// A value is outside its range.
    #[error("configuration key {key}: {what}")]
    Range {
        /// Which key.
        key: &'static str,
        /// What is wrong and what is allowed.
        what: String,
    },
}

/// Longest configuration file, bytes.
const LONGEST: u64 = 1 << 20;

/// Everything that can be set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// What to watch.
    pub capture: Capture,
    /// When a room is overdue.
    pub rooms: Rooms,
    /// Where results go.
    pub export: Export,
    /// HTTP server of the agent.
    pub http: Http,
    /// What a restarted agent goes on from.
    pub state: State,
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
}

impl Default for Capture {
    fn default() -> Self {
        Self { hook: Hook::Auto, engine_comms: vec!["sglang::".to_owned()], ports: Vec::new() }
    }
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
    #[serde(with = "duration")]
    pub floor: Duration,
    /// Every room is overdue after this, in phases that contain neither queueing nor computing.
    #[serde(with = "duration")]
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
    pub trace_salt: String,
    /// OpenTelemetry.
    pub otlp: crate::export::otlp::OtlpConfig,
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
        let config = Self::parse(path, &text)?;
        config.check()?;
        Ok(config)
    }

    /// Parses a text; `path` is only named in errors.
    ///
    /// # Errors
    /// [`ConfigError::Parse`].
    pub fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        if text.lines().all(|l| l.trim_start().is_empty() || l.trim_start().starts_with('#')) {
            return Ok(Self::default());
        }
        serde_saphyr::from_str(text).map_err(|error| {
            let plain = error.without_snippet();
            let mut what = plain.to_string();
            // The place stands in front already.
            if let Some(end) = what.rfind(" at line ") {
                what.truncate(end);
            }
            ConfigError::Parse {
                path: path.to_owned(),
                place: error.location().map_or_else(String::new, |l| format!(":{}:{}", l.line(), l.column())),
                hint: hint(&what),
                what,
            }
        })
    }

    /// Checks what types cannot say.
    ///
    /// # Errors
    /// [`ConfigError::Range`].
    pub fn check(&self) -> Result<(), ConfigError> {
        let range = |ok: bool, key, what: &str| {
            if ok { Ok(()) } else { Err(ConfigError::Range { key, what: what.to_owned() }) }
        };
        let second = Duration::from_secs(1);
        range(self.rooms.floor >= second, "rooms.floor", "must be at least 1s")?;
        range(self.rooms.ceiling >= self.rooms.floor, "rooms.ceiling", "must not be below rooms.floor")?;
        range((1..=1000).contains(&self.rooms.factor), "rooms.factor", "must be from 1 to 1000")?;
        range(
            (1024..=4_194_304).contains(&self.rooms.max),
            "rooms.max",
            "must be from 1024 to 4194304 (each open room takes about 1 KiB)",
        )?;
        range(self.capture.engine_comms.len() <= 8, "capture.engine_comms", "must have at most 8 entries")?;
        for comm in &self.capture.engine_comms {
            range(
                (1..=15).contains(&comm.len()),
                "capture.engine_comms",
                "each entry must have 1 to 15 bytes, as the kernel keeps no more of a process name",
            )?;
        }
        range(self.capture.ports.len() <= 64, "capture.ports", "must have at most 64 entries")
    }
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

/// Durations as people write them: `10s`, `1m 30s`, `250ms`.
pub mod duration {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

    /// Parses one.
    ///
    /// # Errors
    /// Text that says what is wrong.
    pub fn parse(text: &str) -> Result<Duration, String> {
        let signed: jiff::SignedDuration =
            text.parse().map_err(|e| format!("`{text}` is not a duration such as `10s` or `1m 30s`: {e}"))?;
        Duration::try_from(signed).map_err(|_| format!("`{text}` is negative"))
    }

    /// Writes one as `parse` reads it.
    pub fn show(duration: Duration) -> String {
        jiff::SignedDuration::try_from(duration)
            .map_or_else(|_| format!("{}s", duration.as_secs()), |d| format!("{d:#}"))
    }

    pub(super) fn serialize<S: Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&show(*duration))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
        parse(&String::deserialize(from)?).map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn error(text: &str) -> String {
        Config::parse(Path::new("r.yaml"), text).and_then(|c| c.check()).unwrap_err().to_string()
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
    fn a_wrong_value_is_named() {
        assert!(error("rooms: {floor: soon}\n").contains("is not a duration"));
        assert!(error("rooms: {floor: 0s}\n").contains("rooms.floor"));
        assert!(error("http: {listen: here}\n").contains("r.yaml:1:"));
        assert!(error("rooms: [1, 2\n").contains("r.yaml:"));
    }
}
