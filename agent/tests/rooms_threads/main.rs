//! What ended threads and processes, and TCP's own troubles, make of rooms: every rule, and what takes it back.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::many_single_char_names,
    reason = "tests; decode ranks, prefill ranks, worlds, as in the other tests"
)]

mod deaf;
mod findings;
mod processes;
mod properties;
mod receivers;
mod restart;
#[path = "../rooms_support/mod.rs"]
mod rooms_support;
mod stalled;
mod tcp;
mod workers;

use rooms_support::*;
use roomtrace::event::{Comm, Direction, Sequence, Stand, Task, TaskChange, TaskEvent, TcpState, Trouble};
use roomtrace::rooms::model::Input;
use roomtrace::verdict::model::Verdict;

pub(crate) const ROOM: u64 = 9_000_000_000_000_000_001;
/// `wait` status of a process killed by SIGKILL.
pub(crate) const KILLED: u32 = 9;

pub(crate) fn world(sees: Sees) -> World {
    let mut w = World::new(sees);
    w.register(&decode(0), &prefill(0));
    w
}

pub(crate) fn exits(w: &mut World, pid: u32, tid: u32, code: u32, process: bool) {
    let name = Comm::from("sglang::schedul".to_owned());
    let task = Task { tgid: pid, tid, comm: name, cgroup: 0 };
    let event = TaskEvent { at: w.mono(), task, name, what: TaskChange::Exited { code, process } };
    w.input(&Input::Task(event));
}

/// A thread of `rank` returns.
pub(crate) fn thread(w: &mut World, rank: &Rank, tid: u32) {
    exits(w, rank.pid, tid, 0, false);
}

pub(crate) fn process(w: &mut World, rank: &Rank, code: u32) {
    exits(w, rank.pid, rank.pid, code, true);
}

pub(crate) fn trouble(w: &mut World, from: &Rank, to: &Rank, trouble: Trouble) {
    let connection = w.end(from, to, Direction::Sent);
    let at = w.mono();
    w.input(&Input::Trouble { at, connection, trouble });
}

pub(crate) fn again(w: &mut World, from: &Rank, to: &Rank, una: u32) {
    let write = w.sent_to(from, to);
    trouble(w, from, to, Trouble::Retransmitted { una, write });
}

/// Where the end stands that `to` has of the connection from `from`: `unread` bytes before `rcv_nxt`.
pub(crate) fn stands(w: &mut World, from: &Rank, to: &Rank, copied: u32, unread: u32) {
    let socket = w.end(from, to, Direction::Received).socket;
    let sequence = Sequence { write: 1, una: 1, copied, rcv_nxt: copied.wrapping_add(unread) };
    let stand = Stand { state: TcpState::Established, sequence, sent: 1, retransmits: 0 };
    let at = w.mono();
    w.input(&Input::Stand { at, socket, stand });
}

pub(crate) fn says(v: &Verdict, what: &str) -> bool {
    v.evidence.iter().any(|e| e.contains(what))
}

/// Nothing certain or likely is said of a room for this long.
pub(crate) fn quiet(w: &mut World, room: u64, ms: u64) {
    w.wait(ms);
    w.never_paged(room);
}
