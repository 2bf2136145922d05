//! Whose batch is it: joins what the optional probes see a prefill process submit to the rooms that decode ranks asked it for.
//!
//! Pure. The rule is the address: each write of a batch must go to a page, or to the auxiliary slot, that the room's METADATA
//! named in the buffers of that decode rank's REGISTER. Neither the thread nor the order decides, for one worker thread hands over
//! chunks of many rooms in turn. A batch that fits several rooms is of none of them and is told of all as ambiguous; one that fits
//! none is of a room that is not known, and makes what is known of all others of that process incomplete. Nothing is divided.
//! Pages and pointers stay in here; what goes on to the rooms are numbers of bytes. Bounded, and switched off unless the operator
//! asks for it.

use std::collections::VecDeque;

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::batch::{Batch, Layout, Request, Step};
use crate::event::{Direction, Mono};
use crate::rooms::model::{BatchNews, Connection, Input};
use crate::sglang::message::{Backend, Decoded, Message};
use crate::sglang::targets::{Buffers, Target};
use crate::zmtp::Multipart;

/// Decode ranks that have introduced themselves to processes of this host, remembered at most.
const MAX_SESSIONS: usize = 1024;

/// Rooms of one of them that are asked for and have not ended; the oldest make way.
const MAX_ROOMS: usize = 4096;

/// Pages remembered in all: 16 MiB.
const MAX_PAGES: usize = 4 << 20;

/// Batches that are not over, and vectors of which pieces are still to come.
const MAX_OPEN: usize = 8192;

/// Writes of one batch kept while its pieces come.
const MAX_WRITES: usize = 16_384;

/// What became of batches so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BatchCounts {
    /// Found to be one room's.
    pub joined: u64,
    /// Could be of several rooms.
    pub ambiguous: u64,
    /// Of no room that is known.
    pub unmatched: u64,
    /// Reads, which no hand-over of Mooncake makes.
    pub reads: u64,
    /// Requests that could not be read, or of which pieces are missing.
    pub incomplete: u64,
    /// Requests that do not look as the version of the library says.
    pub misfit: u64,
    /// Rooms, decode ranks, pages or open batches for which there was no place.
    pub turned_away: u64,
}

/// A room that a decode rank has asked for.
#[derive(Debug)]
struct Asked {
    room: u64,
    target: Target,
    /// Decode has given it up, and may have handed its pages to another room.
    given_up: bool,
}

/// A decode rank, as a process of this host knows it.
#[derive(Debug, Default)]
struct Session {
    /// `None`: its REGISTER was not seen whole.
    buffers: Option<Buffers>,
    rooms: VecDeque<Asked>,
}

/// A vector of which pieces are still to come.
#[derive(Debug)]
struct Partial {
    id: u64,
    at: Mono,
    next: u64,
    total: u64,
    writes: Vec<Request>,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Batches {
    /// By process and session.
    sessions: HashMap<(u32, Box<str>), Session>,
    /// Processes that are probed, with the layout of their library.
    watched: HashMap<u32, Layout>,
    /// Batches under way: of which room, by process and id.
    open: HashMap<(u32, u64), u64>,
    partial: HashMap<(u32, u32), Partial>,
    pages: usize,
    pub(super) counts: BatchCounts,
}

impl Batches {
    /// From now on the batches of this process are seen.
    pub(super) fn watch(&mut self, pid: u32, layout: Layout) {
        self.watched.insert(pid, layout);
    }

    /// It has ended.
    pub(super) fn forget(&mut self, pid: u32) {
        self.watched.remove(&pid);
        self.sessions.retain(|(of, _), _| *of != pid);
        self.open.retain(|(of, _), _| *of != pid);
        self.partial.retain(|(of, _), _| *of != pid);
        let rooms = self.sessions.values().flat_map(|s| &s.rooms);
        self.pages = rooms.map(|asked| asked.target.seen()).sum();
    }

    /// Takes a message of a process of this host, after the rooms have had it.
    pub(super) fn heard(
        &mut self,
        at: Mono,
        connection: &Connection,
        direction: Direction,
        decoded: &Decoded<'_>,
        parts: &Multipart<'_>,
    ) -> Option<Input<'static>> {
        let pid = connection.task?.tgid;
        match (&decoded.message, direction) {
            (Message::Register(register), Direction::Received) => {
                let buffers = Buffers::of(decoded, register, parts);
                self.session(pid, register.session)?.buffers = buffers;
                None
            }
            (Message::Metadata(metadata), Direction::Received)
                if decoded.backend == Backend::Mooncake && metadata.dummy != Some(true) =>
            {
                self.asked(at, pid, metadata.room, metadata.session, Target::of(metadata, parts))
            }
            (Message::Abort(abort), Direction::Received) => {
                for asked in self.of_room(pid, abort.room) {
                    asked.given_up = true;
                }
                None
            }
            (Message::Status(status), Direction::Sent) if status.status.is_terminal() => {
                self.ended(pid, status.room);
                None
            }
            _ => None,
        }
    }

    fn session(&mut self, pid: u32, name: &str) -> Option<&mut Session> {
        let key = (pid, Box::from(name));
        if self.sessions.len() >= MAX_SESSIONS && !self.sessions.contains_key(&key) {
            self.counts.turned_away += 1;
            return None;
        }
        Some(self.sessions.entry(key).or_default())
    }

    fn of_room(&mut self, pid: u32, room: u64) -> impl Iterator<Item = &mut Asked> {
        let sessions = self.sessions.iter_mut().filter(move |((of, _), _)| *of == pid);
        sessions.flat_map(|(_, s)| &mut s.rooms).filter(move |asked| asked.room == room)
    }

    fn asked(
        &mut self,
        at: Mono,
        pid: u32,
        room: u64,
        session: &str,
        mut target: Target,
    ) -> Option<Input<'static>> {
        if self.pages.saturating_add(target.seen()) > MAX_PAGES {
            self.counts.turned_away += 1;
            target.forget_pages();
        }
        let watched = self.watched.contains_key(&pid);
        let (seen, named, whole) = (target.seen(), target.named, target.whole);
        let session = self.session(pid, session)?;
        let known = session.buffers.is_some();
        let mut gone = 0;
        session.rooms.retain(|asked| {
            let stays = asked.room != room;
            gone += if stays { 0 } else { asked.target.seen() };
            stays
        });
        let full = session.rooms.len() >= MAX_ROOMS;
        if full && let Some(oldest) = session.rooms.pop_front() {
            gone += oldest.target.seen();
        }
        session.rooms.push_back(Asked { room, target, given_up: false });
        self.pages = self.pages.saturating_add(seen).saturating_sub(gone);
        self.counts.turned_away += u64::from(full);
        let news = BatchNews::Asked { pages: named, whole: whole && known };
        watched.then_some(Input::Batch { at, pid, room: Some(room), news })
    }

    /// The process has told how the room ended: it submits nothing more for it.
    fn ended(&mut self, pid: u32, room: u64) {
        let mut gone = 0;
        for ((of, _), session) in &mut self.sessions {
            if *of == pid {
                session.rooms.retain(|asked| {
                    let stays = asked.room != room;
                    gone += if stays { 0 } else { asked.target.seen() };
                    stays
                });
            }
        }
        self.pages = self.pages.saturating_sub(gone);
    }

    /// Takes what a probe saw.
    pub(super) fn take(&mut self, batch: &Batch<'_>, sink: &mut impl FnMut(Input<'_>)) {
        let Some(layout) = self.watched.get(&batch.pid).copied() else { return };
        match batch.step {
            Step::Free => self.over(batch.at, batch.pid, batch.id, sink),
            Step::Unreadable => self.incomplete(batch.at, batch.pid, sink),
            Step::Submit { total, offset, requests } => {
                // The name is used again: what it named before is over, though nobody said so.
                if offset == 0 {
                    self.over(batch.at, batch.pid, batch.id, sink);
                }
                let fits = total.is_multiple_of(layout.stride);
                let Some(read) = layout.read(requests).filter(|_| fits) else {
                    self.counts.misfit += 1;
                    return unclear(batch.at, batch.pid, sink);
                };
                self.piece(batch, total, offset, requests.len(), read, sink);
            }
        }
    }

    /// Records were lost before they could be read.
    pub(super) fn lost(&mut self, at: Mono, sink: &mut impl FnMut(Input<'_>)) {
        for pid in self.watched.keys() {
            unclear(at, *pid, sink);
        }
    }

    fn incomplete(&mut self, at: Mono, pid: u32, sink: &mut impl FnMut(Input<'_>)) {
        self.counts.incomplete += 1;
        unclear(at, pid, sink);
    }

    /// Puts the pieces of a vector together.
    fn piece(
        &mut self,
        batch: &Batch<'_>,
        total: u64,
        offset: u64,
        len: usize,
        requests: Vec<Request>,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        let next = offset.saturating_add(u64::try_from(len).unwrap_or(u64::MAX));
        let (thread, before) = ((batch.pid, batch.tid), self.partial.remove(&(batch.pid, batch.tid)));
        if offset == 0 {
            if before.is_some() {
                self.incomplete(batch.at, batch.pid, sink);
            }
            if next >= total {
                return self.submitted(batch.at, batch.pid, batch.id, &requests, sink);
            }
            if self.partial.len() >= MAX_OPEN {
                self.counts.turned_away += 1;
                return unclear(batch.at, batch.pid, sink);
            }
            let partial = Partial { id: batch.id, at: batch.at, next, total, writes: requests };
            self.partial.insert(thread, partial);
            return;
        }
        let follows = |p: &Partial| p.id == batch.id && p.next == offset && p.at == batch.at;
        let Some(mut partial) = before.filter(follows) else {
            return self.incomplete(batch.at, batch.pid, sink);
        };
        if partial.writes.len().saturating_add(requests.len()) > MAX_WRITES {
            return self.incomplete(batch.at, batch.pid, sink);
        }
        partial.writes.extend(requests);
        partial.next = next;
        if next >= partial.total {
            return self.submitted(partial.at, batch.pid, partial.id, &partial.writes, sink);
        }
        self.partial.insert(thread, partial);
    }

    fn submitted(
        &mut self,
        at: Mono,
        pid: u32,
        id: u64,
        requests: &[Request],
        sink: &mut impl FnMut(Input<'_>),
    ) {
        if requests.iter().any(|r| !r.write) {
            self.counts.reads += 1;
            return;
        }
        let bytes = requests.iter().fold(0u64, |sum, r| sum.saturating_add(r.len));
        let mut rooms = self.candidates(pid, requests);
        match rooms.as_slice() {
            [] => {
                self.counts.unmatched += 1;
                unclear(at, pid, sink);
            }
            [room] => {
                let requests = u64::try_from(requests.len()).unwrap_or(u64::MAX);
                self.counts.joined += 1;
                if self.open.len() < MAX_OPEN {
                    self.open.insert((pid, id), *room);
                } else {
                    self.counts.turned_away += 1;
                    unclear(at, pid, sink);
                }
                let news = BatchNews::Submitted { bytes, requests };
                sink(Input::Batch { at, pid, room: Some(*room), news });
            }
            _ => {
                self.counts.ambiguous += 1;
                for room in rooms.drain(..) {
                    sink(Input::Batch { at, pid, room: Some(room), news: BatchNews::Ambiguous });
                }
            }
        }
    }

    /// Rooms whose batch this can be.
    fn candidates(&self, pid: u32, requests: &[Request]) -> SmallVec<[u64; 2]> {
        let mut rooms = SmallVec::<[u64; 2]>::new();
        for (_, session) in self.sessions.iter().filter(|((of, _), _)| *of == pid) {
            let Some(buffers) = &session.buffers else { continue };
            let before = rooms.len();
            for asked in &session.rooms {
                let writes = requests.iter().map(|r| (r.address, r.len));
                if asked.target.takes(buffers, writes) && !rooms.contains(&asked.room) {
                    rooms.push(asked.room);
                }
            }
            // Pages of a room that decode has given up can be another's by now. Where they are not known it may be either.
            if rooms.len() > before {
                let hidden = session.rooms.iter().filter(|a| a.given_up && !a.target.whole);
                let hidden: SmallVec<[u64; 2]> =
                    hidden.map(|a| a.room).filter(|r| !rooms.contains(r)).collect();
                rooms.extend(hidden);
            }
        }
        rooms
    }

    fn over(&mut self, at: Mono, pid: u32, id: u64, sink: &mut impl FnMut(Input<'_>)) {
        if let Some(room) = self.open.remove(&(pid, id)) {
            sink(Input::Batch { at, pid, room: Some(room), news: BatchNews::Over });
        }
    }
}

/// From this moment back, what is known of the rooms of a process may not be all.
fn unclear(at: Mono, pid: u32, sink: &mut impl FnMut(Input<'_>)) {
    sink(Input::Batch { at, pid, room: None, news: BatchNews::Unclear });
}
