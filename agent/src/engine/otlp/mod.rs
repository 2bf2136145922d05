//! Receives the engines' own spans (OTLP over gRPC and HTTP): a decoded copy for the rooms, the bytes as they came for
//! whoever got them before.
//!
//! Off unless configured, on loopback by default, without authentication. Runs on the asynchronous runtime; the observing
//! thread takes what has come and is never waited for: where it or whoever gets the bytes is behind, clients are told to come again. That
//! cannot slow an engine: SGLang's exporter is a thread of its own with a bounded queue.

mod first;
mod intake;
mod refused;
mod serve;
pub(crate) mod status;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Receiver};

use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::export::otlp::ForwardHandle;
use crate::spans::SchedulerSpan;

use intake::Intake;
pub use intake::{Counters, MAX_MESSAGE, Outcome, Protocol};

/// Requests that wait for the observing thread at most.
const BATCHES: usize = 4096;

/// Where to listen; `None`: not over that transport.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Listen {
    /// gRPC.
    pub grpc: Option<SocketAddr>,
    /// HTTP.
    pub http: Option<SocketAddr>,
}

/// An address that cannot be had.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot receive the engines' spans on {address}: {source} (a collector may hold it; set spans.grpc or spans.http to another and \
     the engines' --otlp-traces-endpoint to that, or spans.enabled to false)"
)]
pub struct ListenError {
    address: SocketAddr,
    source: std::io::Error,
}

/// The servers, and what came.
#[derive(Debug)]
pub struct SpanReceiver {
    spans: Receiver<Vec<SchedulerSpan>>,
    intake: Arc<Intake>,
    listening: Listen,
    stop: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl SpanReceiver {
    /// Listens. Needs a runtime around it.
    ///
    /// # Errors
    /// [`ListenError`].
    pub async fn start(listen: Listen, forward: Option<ForwardHandle>) -> Result<Self, ListenError> {
        let (send, spans) = mpsc::sync_channel(BATCHES);
        let intake = Arc::new(Intake::new(send, forward));
        let (stop, stopped) = watch::channel(false);
        let (mut listening, mut tasks) = (Listen::default(), Vec::new());
        for (protocol, address) in [(Protocol::Grpc, listen.grpc), (Protocol::Http, listen.http)] {
            let Some(address) = address else { continue };
            let failed = |source| ListenError { address, source };
            let listener = TcpListener::bind(address).await.map_err(failed)?;
            let at = listener.local_addr().map_err(failed)?;
            match protocol {
                Protocol::Grpc => listening.grpc = Some(at),
                Protocol::Http => listening.http = Some(at),
            }
            tasks.push(tokio::spawn(serve::serve(listener, protocol, Arc::clone(&intake), stopped.clone())));
        }
        Ok(Self { spans, intake, listening, stop, tasks })
    }

    /// What came since the last call, a request at a time.
    pub fn take(&self) -> Option<Vec<SchedulerSpan>> {
        let spans = self.spans.try_recv().ok()?;
        self.intake.waiting.fetch_sub(spans.len(), Ordering::Relaxed);
        Some(spans)
    }

    /// Counts since start.
    pub fn counters(&self) -> &Counters {
        &self.intake.counters
    }

    /// Spans that wait for [`Self::take`].
    pub fn waiting(&self) -> usize {
        self.intake.waiting.load(Ordering::Relaxed)
    }

    /// Where it listens, with the ports that the system chose where it was told 0.
    pub const fn listening(&self) -> Listen {
        self.listening
    }

    /// Ends the servers; requests under way get a second.
    pub async fn stop(self) {
        self.stop.send_replace(true);
        for task in self.tasks {
            // It ends at once; what it serves ends by itself.
            let _ = task.await;
        }
    }
}
