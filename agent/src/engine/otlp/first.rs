//! Connections on which the client has said nothing yet: they get a short time, and make way for new ones.
//!
//! Bounded by how many connections are served. hyper asks a gRPC peer whether it lives only once it has greeted.

use std::collections::VecDeque;
use std::io::{self, Cursor};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Length of what a client sends first (RFC 9113, 3.4). Its SETTINGS follow at once, and nothing waits for them.
const PREFACE: usize = 24;

/// Time for it to arrive. Clients send it as they connect.
const GREETS: Duration = Duration::from_secs(5);

/// Those of one transport, oldest first.
#[derive(Debug, Default)]
pub(super) struct Silent(Mutex<VecDeque<Arc<Notify>>>);

impl Silent {
    /// A client's HTTP/2 connection, once it has greeted. `None`: it is to be closed, for it has not, or somebody else needs its place.
    ///
    /// # Errors
    /// The client's end of it.
    pub(super) async fn greeted(
        &self,
        mut stream: TcpStream,
    ) -> io::Result<Option<impl AsyncRead + AsyncWrite + Send + Unpin + 'static>> {
        let mut preface = [0; PREFACE];
        let read = stream.read_exact(&mut preface);
        if self.said(GREETS, read).await.transpose()?.is_none() {
            return Ok(None);
        }
        let (read, write) = stream.into_split();
        // hyper reads it again.
        Ok(Some(tokio::io::join(Cursor::new(preface).chain(read), write)))
    }

    /// Waits for the first byte of a request for `limit`. As [`Self::greeted`].
    pub(super) async fn begun(&self, stream: &TcpStream, limit: Duration) -> io::Result<Option<()>> {
        let any = self.said(limit, stream.peek(&mut [0])).await.transpose()?;
        Ok(any.map(drop))
    }

    async fn said<T>(
        &self,
        limit: Duration,
        what: impl Future<Output = io::Result<T>>,
    ) -> Option<io::Result<T>> {
        let needed = Arc::new(Notify::new());
        self.all().push_back(Arc::clone(&needed));
        let said = tokio::select! {
            said = what => Some(said),
            () = needed.notified() => None,
            () = tokio::time::sleep(limit) => None,
        };
        self.all().retain(|other| !Arc::ptr_eq(other, &needed));
        said
    }

    /// Closes the oldest, if there is any: its place is needed.
    pub(super) fn make_way(&self) {
        if let Some(oldest) = self.all().pop_front() {
            oldest.notify_one();
        }
    }

    /// Closes them all.
    pub(super) fn end(&self) {
        self.all().drain(..).for_each(|needed| needed.notify_one());
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<Arc<Notify>>> {
        // Nothing panics while it is held; were it so, it is still consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
