//! What answers the HTTP side in tests: rooms that somebody made up, or a room table.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, reason = "shared by several test programs")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use roomtrace::event::Mono;
use roomtrace::export::clock::Clock;
use roomtrace::export::query::{Findings, First, Query, Rooms};
use roomtrace::export::{Exports, Identity, Options};
use roomtrace::rooms::RoomTable;
use roomtrace::rooms::model::RoomSnapshot;
use roomtrace::rooms::overview::Overview;
use roomtrace::verdict::model::Finding;

use crate::testing::EPOCH;

/// What there is to tell.
#[derive(Default)]
pub struct Known {
    pub rooms: Vec<RoomSnapshot>,
    pub findings: Vec<Finding>,
    pub closed: Vec<Finding>,
}

/// The thread that owns the rooms, answering until told to stop.
pub struct Pipeline {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Exports>,
}

impl Pipeline {
    pub fn start(exports: Exports, known: Known) -> Self {
        Self::answering(exports, move |query| known.answer(query))
    }

    /// The same with a table as the agent has it.
    pub fn of_table(exports: Exports, table: RoomTable) -> Self {
        Self::answering(exports, move |query| {
            let clock = Clock::fixed(EPOCH);
            match query {
                Query::First { pinned, oldest, reply } => {
                    drop(reply.send(First { rooms: table.overview(pinned, oldest), clock }));
                }
                Query::Room { room, reply } => {
                    drop(reply.send(Rooms { rooms: table.details(room), more: false, clock }));
                }
                Query::Findings { limit, reply } => {
                    let (open, total) = (table.first_findings(limit), table.finding_count());
                    drop(reply.send(Findings { open, total, closed: Vec::new(), at: table.now(), clock }));
                }
                Query::Rooms { .. } | Query::Status { .. } => {}
            }
        })
    }

    fn answering(mut exports: Exports, answer: impl Fn(Query) + Send + 'static) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                while let Some(query) = exports.queries().try_recv() {
                    answer(query);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            exports
        });
        Self { stop, thread }
    }

    pub fn stop(self) -> Exports {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

impl Known {
    fn answer(&self, query: Query) {
        let clock = Clock::fixed(EPOCH);
        let at = Mono(30_000_000_000);
        match query {
            Query::Rooms { filter, reply } => {
                let overdue = |r: &RoomSnapshot| r.verdict.is_some() && !r.pinned();
                let wanted = self.rooms.iter().filter(|r| filter.pinned.is_none_or(|p| r.pinned() == p));
                let wanted = wanted.filter(|r| !filter.overdue || overdue(r));
                let (keys, more) = filter.page(wanted.map(|r| (r.room, r.incarnation)));
                let of = |k: &(u64, u32)| {
                    self.rooms.iter().find(|r| (r.room, r.incarnation) == *k).unwrap().clone()
                };
                let _ = reply.send(Rooms { rooms: keys.iter().map(of).collect(), more, clock });
            }
            Query::Room { room, reply } => {
                let rooms = self.rooms.iter().filter(|r| r.room == room).cloned().collect();
                let _ = reply.send(Rooms { rooms, more: false, clock });
            }
            Query::First { pinned, oldest, reply } => {
                let rooms = self.first(pinned, oldest, at);
                drop(reply.send(First { rooms, clock }));
            }
            Query::Findings { limit, reply } => {
                let open = self.findings.iter().take(limit).cloned().collect();
                let (total, closed) = (self.findings.len(), self.closed.clone());
                let _ = reply.send(Findings { open, total, closed, at, clock });
            }
            Query::Status { reply } => {
                let _ = reply.send(serde_json::json!({ "hook": "sock" }));
            }
        }
    }

    fn first(&self, pinned: usize, oldest: usize, at: Mono) -> Overview {
        let mut out = Overview { at, ..Overview::default() };
        for room in self.rooms.iter().filter(|r| r.closed_at.is_none()) {
            if !room.pinned() {
                out.others_count += 1;
                out.oldest.push(room.clone());
                continue;
            }
            out.pinned_count[room.verdict.as_ref().unwrap().confidence as usize] += 1;
            out.pinned.push(room.clone());
        }
        out.pinned.sort_by_key(|r| std::cmp::Reverse(r.verdict.as_ref().unwrap().confidence));
        out.pinned.truncate(pinned);
        out.oldest.truncate(oldest);
        out
    }
}

pub async fn started(identity: Identity) -> (Exports, SocketAddr) {
    let options = Options { listen: Some("127.0.0.1:0".parse().unwrap()), ..Options::default() };
    let exports = Exports::start(options, identity).await.unwrap();
    let at = exports.listening().unwrap();
    (exports, at)
}
