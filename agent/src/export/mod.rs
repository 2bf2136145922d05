//! Everything that leaves the agent: JSON lines, OpenTelemetry, Prometheus text, the HTTP API.
//!
//! Fed by the thread that follows the rooms through [`Exports`], whose calls on that thread never block and
//! never fail: what cannot be taken is dropped and counted. All I/O happens on other threads. No room logic
//! lives here.

pub mod clock;
pub mod counters;
pub mod events;
pub mod http;
pub mod metrics;
pub mod otlp;
mod process;
pub mod query;
pub mod record;
pub mod trace_id;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clock::Clock;
use counters::Counters;
use metrics::MetricsSnapshot;
use otlp::OtlpConfig;
use query::Queries;

use crate::rooms::model::{Event, RoomSnapshot};
use crate::verdict::model::{KnownIssue, Verdict};

/// Who reports: put into every record, span and resource.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Name of this host (in Kubernetes the node's).
    pub host_name: String,
    /// Stable id of this host (`/etc/machine-id` of the host), the host name where there is none.
    pub host_id: String,
    /// Mixed into trace ids; the same on every host of a fleet.
    pub trace_salt: String,
    /// Whether processes named in snapshots run on this host now (false in replay): only then is `/proc` asked
    /// for their container.
    pub live: bool,
    /// Upstream reports that fit a room's verdict.
    pub known_issues: fn(&RoomSnapshot) -> Vec<KnownIssue>,
}

/// What is switched on.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// JSON lines: a file, or `-` for standard output.
    pub events: Option<PathBuf>,
    /// OpenTelemetry.
    pub otlp: OtlpConfig,
    /// Where the HTTP server listens; `None`: no server.
    pub listen: Option<SocketAddr>,
}

/// Why the export cannot start. Nothing that happens later stops the agent.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {}

/// The front of the export, owned by the thread that follows the rooms.
#[derive(Debug)]
pub struct Exports {
    queries: Queries,
    counters: Arc<Counters>,
}

impl Exports {
    /// Opens files and the listening socket, builds exporters, starts threads and tasks (on `runtime`). Does
    /// not wait for any receiver.
    ///
    /// # Errors
    /// [`ExportError`]: a file, certificate, address or endpoint that cannot be used.
    pub async fn start(_options: Options, _identity: Identity) -> Result<Self, ExportError> {
        let (_handle, queries) = query::channel();
        Ok(Self { queries, counters: Arc::default() })
    }

    /// Hands an event to every output. Never blocks.
    pub fn room_event(&mut self, _event: &Event, _clock: &Clock) {}

    /// As [`Self::room_event`], but waits for place in the queues: for replay, where nothing is lost by
    /// waiting. Not to be called from asynchronous code.
    pub fn room_event_wait(&mut self, _event: &Event, _clock: &Clock) {}

    /// Replaces what `/metrics` and OTLP metrics show. Never blocks.
    pub fn publish(&mut self, _snapshot: MetricsSnapshot) {}

    /// Whether `/readyz` says ready; the reason is shown while it does not. Not ready at start.
    pub fn set_ready(&mut self, _ready: Result<(), String>) {}

    /// Questions of the HTTP side, to be polled often (at least every 100 ms).
    pub fn queries(&mut self) -> &mut Queries {
        &mut self.queries
    }

    /// What left and what did not.
    pub fn counters(&self) -> Arc<Counters> {
        Arc::clone(&self.counters)
    }

    /// Delivers what waits, for at most `grace`; counts the rest as dropped.
    pub async fn shutdown(self, _grace: Duration) {}
}

/// Value of the label `owed_instance` for a verdict seen on the host `host_name`.
pub fn owed_instance(verdict: &Verdict, host_name: &str) -> String {
    let Some(party) = &verdict.owed_by else { return "nobody".to_owned() };
    match (party.local, party.endpoint) {
        (Some(true), _) => host_name.to_owned(),
        (_, Some(endpoint)) => endpoint.ip().to_string(),
        (_, None) => "unknown".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Direction, Mono, NotCaptured, SECOND};
    use crate::rooms::model::{Outcome, Role};
    use crate::sglang::message::{Backend, Kind, KvPoll};
    use crate::verdict::model::{Class, Confidence};

    /// A snapshot with at least one entry of everything.
    pub(super) fn full_snapshot() -> MetricsSnapshot {
        MetricsSnapshot {
            at: Mono(5 * SECOND),
            rooms_open: vec![(Role::Prefill, KvPoll::WaitingForInput, 3)],
            rooms_pinned: vec![metrics::PinnedRooms {
                role: Role::Prefill,
                verdict: Class::AbortBeforeEntry,
                confidence: Confidence::Likely,
                owed_instance: "node-a".to_owned(),
                rooms: 2,
            }],
            oldest_open: vec![(Role::Prefill, KvPoll::WaitingForInput, 47 * SECOND)],
            rooms_closed: vec![(Role::Decode, Outcome::Success, 11)],
            pins: vec![(Role::Prefill, Class::AbortBeforeEntry, 4)],
            messages: vec![(Direction::Received, Backend::Nixl, Kind::Metadata, 12)],
            unknown_messages: vec![(None, 1)],
            capture_lost: vec![("ring", "full", 7)],
            not_captured: vec![(NotCaptured::TooLong, 5)],
            engine_processes: vec![(Some(Role::Decode), 8), (None, 1)],
            connections: vec![("zmtp", 6)],
            bpf_run_nanos: vec![("sock_send".to_owned(), 1_500_000_000)],
            bpf_runs: vec![("sock_send".to_owned(), 9000)],
        }
    }
}
