//! Where OTLP goes: the YAML keys, and how the standard environment variables fill what YAML leaves out.
//!
//! Pure but for reading the certificate files that it is told of.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize, Serializer};

use super::endpoint::Endpoint;

/// OTLP part of the configuration. Empty means: nothing is sent unless `OTEL_EXPORTER_OTLP_ENDPOINT` (or one of
/// its per-signal forms) is set.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OtlpConfig {
    /// Receiver of traces, logs and metrics, `http://host:4317`. Over HTTP `/v1/traces`, `/v1/logs` and
    /// `/v1/metrics` are appended. A login in it is sent as basic authorization.
    pub endpoint: Option<Endpoint>,
    /// How to talk to it; default: `OTEL_EXPORTER_OTLP_PROTOCOL`, then gRPC.
    pub protocol: Option<Protocol>,
    /// Headers (gRPC: metadata) of every request; they win over `OTEL_EXPORTER_OTLP_HEADERS`.
    pub headers: BTreeMap<String, Secret>,
    /// How long one request may take; default: `OTEL_EXPORTER_OTLP_TIMEOUT`, then 10 s.
    #[serde(with = "crate::duration_text::optional")]
    pub timeout: Option<Duration>,
    /// Default: `OTEL_EXPORTER_OTLP_COMPRESSION`, then none.
    pub compression: Option<Compression>,
    /// Certificates.
    pub tls: TlsConfig,
    /// Limits of what waits for delivery, for traces and for logs each.
    pub queue: QueueConfig,
    /// Also write traces and logs as OTLP JSON lines to this file.
    pub file: Option<PathBuf>,
}

/// Transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Protocol {
    /// gRPC, usually port 4317.
    #[default]
    #[serde(rename = "grpc")]
    Grpc,
    /// Protobuf over HTTP, usually port 4318.
    #[serde(rename = "http/protobuf")]
    HttpProtobuf,
}

/// Compression of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Compression {
    /// None, whatever the environment says.
    None,
    /// gzip.
    Gzip,
}

/// Certificates, PEM files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// Certificate authority of the receiver; default: `OTEL_EXPORTER_OTLP_CERTIFICATE`, then the public ones.
    pub ca: Option<PathBuf>,
    /// Own certificate; default: `OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE`.
    pub cert: Option<PathBuf>,
    /// Its key; default: `OTEL_EXPORTER_OTLP_CLIENT_KEY`.
    pub key: Option<PathBuf>,
}

/// Limits of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QueueConfig {
    /// Rooms and records waiting at most.
    pub items: usize,
    /// Bytes they take at most.
    pub bytes: usize,
    /// How long one is kept when the receiver cannot be reached.
    #[serde(with = "crate::duration_text")]
    pub keep: Duration,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self { items: 8192, bytes: 8 << 20, keep: Duration::from_mins(5) }
    }
}

/// Stands where a value is not shown. A configuration that holds it is refused, as the value is lost.
pub(crate) const HIDDEN: &str = "<hidden>";

/// A value that is never shown; an empty one hides nothing.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub String);

impl Secret {
    const fn shown(&self) -> &'static str {
        if self.0.is_empty() { "" } else { HIDDEN }
    }

    /// Whether the value was lost when it was shown.
    pub(crate) fn is_hidden(&self) -> bool {
        self.0 == HIDDEN
    }

    /// Whether it can be sent as the header `name`.
    pub(crate) fn is_header(&self, name: &str) -> bool {
        super::settings::header(name, &self.0).is_some()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.shown())
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.shown())
    }
}
