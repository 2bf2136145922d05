//! Questions from the HTTP side to the thread that owns the rooms, over a bounded channel.
//!
//! The asking side waits with a deadline; the answering side only polls. A full channel or a late answer is
//! an answer too: "busy".

use std::collections::BinaryHeap;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::clock::Clock;
use crate::event::Mono;
use crate::rooms::model::RoomSnapshot;
use crate::rooms::overview::Overview;
use crate::verdict::model::Finding;

/// Questions waiting at most.
const WAITING: usize = 32;

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// Rooms in one answer at most: a copy of each is made on the thread that follows the rooms.
pub const PAGE_MAX: usize = 500;

/// Place of a room in the order of pages: number, then incarnation.
pub type Key = (u64, u32);

/// Which rooms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomsFilter {
    /// Only pinned ones, only others, or both.
    pub pinned: Option<bool>,
    /// Rooms that have ended and are still kept, instead of open ones.
    pub closed: bool,
    /// Only open ones that are overdue and not pinned; `pinned` says nothing then.
    pub overdue: bool,
    /// Only rooms behind this one.
    pub after: Option<Key>,
    /// How many, 1 to [`PAGE_MAX`].
    pub limit: usize,
}

impl RoomsFilter {
    /// Picks the page out of the keys of all rooms (in any order) in one pass without sorting them: the
    /// `limit` smallest behind `after`, ascending, and whether there are more. The caller has applied
    /// `pinned` already.
    pub fn page(&self, keys: impl Iterator<Item = Key>) -> (Vec<Key>, bool) {
        let limit = self.limit.clamp(1, PAGE_MAX);
        let mut page = BinaryHeap::with_capacity(limit + 1);
        let mut more = false;
        for key in keys.filter(|k| self.after.is_none_or(|after| *k > after)) {
            page.push(key);
            if page.len() > limit {
                page.pop();
                more = true;
            }
        }
        (page.into_sorted_vec(), more)
    }
}

/// Rooms as an answer.
#[derive(Clone, Debug)]
pub struct Rooms {
    /// The page, in the order of [`Key`].
    pub rooms: Vec<RoomSnapshot>,
    /// Whether there are more behind it.
    pub more: bool,
    /// Clock to read their times with.
    pub clock: Clock,
}

/// Findings as an answer.
#[derive(Clone, Debug)]
pub struct Findings {
    /// The first open ones, oldest first.
    pub open: Vec<Finding>,
    /// How many are open.
    pub total: usize,
    /// The last that are over, in the order of their ends.
    pub closed: Vec<Finding>,
    /// When.
    pub at: Mono,
    /// Clock to read their times with.
    pub clock: Clock,
}

/// What a person looks at first, as an answer.
#[derive(Clone, Debug)]
pub struct First {
    /// Rooms, and how many there are.
    pub rooms: Overview,
    /// Clock to read their times with.
    pub clock: Clock,
}

/// A question. Whoever answers sends into `reply`; dropping it means "cannot say".
#[derive(Debug)]
pub enum Query {
    /// A page of rooms.
    Rooms {
        /// Which.
        filter: RoomsFilter,
        /// Where the answer goes.
        reply: oneshot::Sender<Rooms>,
    },
    /// Every incarnation of one room number that is still known, empty when none is.
    Room {
        /// Its number.
        room: u64,
        /// Where the answer goes.
        reply: oneshot::Sender<Rooms>,
    },
    /// The pinned rooms, surest first, and the oldest others.
    First {
        /// How many pinned ones, 1 to [`PAGE_MAX`].
        pinned: usize,
        /// How many others, 1 to [`PAGE_MAX`].
        oldest: usize,
        /// Where the answer goes.
        reply: oneshot::Sender<First>,
    },
    /// What is wrong with engines, and what pins rooms.
    Findings {
        /// How many open ones, 1 to [`PAGE_MAX`].
        limit: usize,
        /// Where the answer goes.
        reply: oneshot::Sender<Findings>,
    },
    /// How the agent itself is: hooks chosen and why, loss, sources. One JSON object.
    Status {
        /// Where the answer goes.
        reply: oneshot::Sender<serde_json::Value>,
    },
}

/// Why there is no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueryError {
    /// Too many questions wait already, or the answer took too long.
    #[error("the thread that follows the rooms is busy; ask again in a moment")]
    Busy,
    /// The pipeline has ended.
    #[error("the thread that follows the rooms has ended; the agent is stopping")]
    Ended,
}

/// Asking side.
#[derive(Clone, Debug)]
pub struct QueryHandle {
    to: mpsc::Sender<Query>,
}

/// Answering side, polled by the thread that owns the rooms.
#[derive(Debug)]
pub struct Queries {
    from: mpsc::Receiver<Query>,
}

/// Both sides of a new channel.
pub fn channel() -> (QueryHandle, Queries) {
    let (to, from) = mpsc::channel(WAITING);
    (QueryHandle { to }, Queries { from })
}

impl Queries {
    /// The next question, if one waits. Never blocks.
    pub fn try_recv(&mut self) -> Option<Query> {
        self.from.try_recv().ok()
    }
}

impl QueryHandle {
    /// Asks for a page of rooms.
    ///
    /// # Errors
    /// [`QueryError`].
    pub async fn rooms(&self, filter: RoomsFilter) -> Result<Rooms, QueryError> {
        self.ask(|reply| Query::Rooms { filter, reply }).await
    }

    /// Asks for one room.
    ///
    /// # Errors
    /// [`QueryError`].
    pub async fn room(&self, room: u64) -> Result<Rooms, QueryError> {
        self.ask(|reply| Query::Room { room, reply }).await
    }

    /// Asks for what a person looks at first.
    ///
    /// # Errors
    /// [`QueryError`].
    pub async fn first(&self, pinned: usize, oldest: usize) -> Result<First, QueryError> {
        self.ask(|reply| Query::First { pinned, oldest, reply }).await
    }

    /// Asks for findings.
    ///
    /// # Errors
    /// [`QueryError`].
    pub async fn findings(&self, limit: usize) -> Result<Findings, QueryError> {
        self.ask(|reply| Query::Findings { limit, reply }).await
    }

    /// Asks for the agent's status.
    ///
    /// # Errors
    /// [`QueryError`].
    pub async fn status(&self) -> Result<serde_json::Value, QueryError> {
        self.ask(|reply| Query::Status { reply }).await
    }

    async fn ask<T>(&self, question: impl FnOnce(oneshot::Sender<T>) -> Query) -> Result<T, QueryError> {
        let (reply, answer) = oneshot::channel();
        self.to.try_send(question(reply)).map_err(|e| match e {
            mpsc::error::TrySendError::Full(_) => QueryError::Busy,
            mpsc::error::TrySendError::Closed(_) => QueryError::Ended,
        })?;
        match tokio::time::timeout(PATIENCE, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(_)) => Err(QueryError::Ended),
            Err(_) => Err(QueryError::Busy),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_cover_every_room_once_and_in_order() {
        let keys: Vec<Key> = (0..1000_u64).map(|n| (n.wrapping_mul(7919) % 1000, 0)).collect();
        let mut filter = RoomsFilter { pinned: None, closed: false, overdue: false, after: None, limit: 300 };
        let mut seen = Vec::new();
        loop {
            let (page, more) = filter.page(keys.iter().copied());
            filter.after = page.last().copied();
            seen.extend(page);
            if !more {
                break;
            }
        }
        assert_eq!(seen, (0..1000).map(|n| (n, 0)).collect::<Vec<Key>>());
    }

    #[test]
    fn a_page_is_bounded_whatever_is_asked() {
        let filter =
            RoomsFilter { pinned: None, closed: false, overdue: false, after: None, limit: usize::MAX };
        assert_eq!(filter.page((0..10_000).map(|n| (n, 0))).0.len(), PAGE_MAX);
    }

    #[tokio::test]
    async fn a_pipeline_that_does_not_answer_is_busy_and_one_that_ended_is_ended() {
        let (handle, queries) = channel();
        let waiting: Vec<_> = (0..WAITING)
            .map(|_| {
                tokio::spawn({
                    let handle = handle.clone();
                    async move { handle.status().await }
                })
            })
            .collect();
        tokio::task::yield_now().await;
        assert_eq!(handle.status().await, Err(QueryError::Busy));
        drop(queries);
        for w in waiting {
            assert!(matches!(w.await, Ok(Err(QueryError::Ended))));
        }
        assert_eq!(handle.status().await, Err(QueryError::Ended));
    }
}
