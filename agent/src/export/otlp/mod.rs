//! OpenTelemetry out: traces, logs, metrics, over the network and into a file.

mod config;

pub use config::{Compression, OtlpConfig, Protocol, QueueConfig, Secret, TlsConfig};
