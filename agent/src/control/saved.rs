//! What is known of connections, as it goes into a state file and comes back: where their streams stand.
//!
//! Pure. The kernel's sequence numbers decide: a stream that stands where it stood goes on in step; bytes that passed
//! meanwhile are a hole like any other. A socket cookie names one socket for as long as the machine runs.
//!
//! Of an HTTP connection the numbers of its open requests are written down, and where its streams and its answer stand,
//! nothing of what they say. Where the kernel says that nothing has passed since, by the same process, a request that waits
//! for its answer goes on waiting. Otherwise that it is out of sight is the first thing the rooms hear of it, and the
//! connection is joined anew at its next request.

use std::collections::BTreeSet;

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::control::flow::History;
use crate::control::web::Waiting;
use crate::control::{
    ConnectionState, Control, Dropped, Judgement, Limits, Shared, Socket, Stream, Unacknowledged, Web, behind,
};
use crate::event::{Direction, Found, Mono, Sequence, SocketEvent, SocketId, StateChange, Task, TcpState};
use crate::rooms::Survivors;
use crate::rooms::model::{Connection, Input};
use crate::stream::Lane;
use crate::zmtp::{Confidence, Decoder};

/// Sockets written down at most.
const MAX_SOCKETS: usize = 8192;
/// Connections met while what was left is taken over, remembered at most: as many as engines can have.
const MAX_MET: usize = 65_536;

/// Connections with control traffic, and silent ones that may yet carry some.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SavedControl {
    /// They.
    pub sockets: Vec<SavedSocket>,
    /// Connections that did not fit.
    #[serde(default)]
    pub left_out: u64,
}

impl SavedControl {
    /// Processes whose connections have an open request.
    pub fn servers(&self) -> BTreeSet<u32> {
        let asked = self.sockets.iter().filter(|s| s.requests.is_some());
        asked.filter_map(|s| s.connection.task).map(|t| t.tgid).collect()
    }
}

/// One end of one connection.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedSocket {
    /// Which.
    pub connection: Connection,
    /// It carries control traffic; otherwise nothing was seen of it but where it stands.
    zmtp: bool,
    sent: SavedStream,
    received: SavedStream,
    /// Ends of the first and the last message sent that the peer's kernel had not acknowledged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    unacknowledged: Option<(u32, u32)>,
    /// It carries requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    requests: Option<SavedRequests>,
}

/// Requests of an HTTP connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct SavedRequests {
    /// This end serves them.
    server: bool,
    /// Number of the next one.
    next: u64,
    /// Numbers of those that are open, and whether a bootstrap server was asked.
    open: Vec<(u64, bool)>,
    /// The only one of them, if nothing else is under way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    waits: Option<Waiting>,
}

impl SavedRequests {
    /// Of a connection with a request under way: any other is joined anew as well as one that was never seen.
    fn of(socket: &Socket) -> Option<Self> {
        let web = socket.web.as_ref()?;
        let (next, open) = web.open();
        let open: Vec<_> = open.collect();
        let server = web.requests() == Direction::Received;
        (!open.is_empty()).then(|| Self { server, next, open, waits: web.waits() })
    }

    /// The HTTP half to go on with, and whether its request goes on waiting as long as nothing passes.
    fn web(&self) -> (Web, bool) {
        let direction = self.direction();
        match (&self.waits, self.open.as_slice()) {
            (Some(waiting), [(n, false)]) => (Web::waiting(direction, *n, waiting), true),
            (_, open) => (Web::resumed(direction, self.next, open), false),
        }
    }

    const fn direction(&self) -> Direction {
        if self.server { Direction::Received } else { Direction::Sent }
    }

    /// Whether a socket that was found shows that nothing has passed on it: not one byte was written or read, nothing waits
    /// to be read, neither side has said its last, and the process that has it is the one that had it.
    fn still_wait(&self, socket: &Socket, event: &SocketEvent<'_>, found: &Found) -> bool {
        let Sequence { write, copied, rcv_nxt, .. } = found.sequence;
        let stands = |stream: &Stream, at| stream.lane.next() == Some(at) && !stream.lane.is_waiting();
        let same = |a: Task, b: Task| a.tgid == b.tgid;
        self.waits.is_some()
            && found.state == TcpState::Established
            && rcv_nxt == copied
            && stands(&socket.sent, write)
            && stands(&socket.received, copied)
            && socket.task.zip(event.task).is_some_and(|(was, is)| same(was, is))
    }
}

/// One direction of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools, reason = "independent of each other")]
struct SavedStream {
    /// Sequence number of the next byte.
    next: Option<u32>,
    /// Bytes before it have been read.
    read: bool,
    /// The next byte begins a message, or the stream.
    in_step: bool,
    /// No byte has come since the stream began.
    untouched: bool,
    /// Followed from its greeting.
    known: bool,
    history: History,
    fin: bool,
}

impl SavedStream {
    fn of(stream: &Stream) -> Self {
        Self {
            next: stream.lane.next().or(stream.stood),
            read: stream.lane.next().is_some(),
            in_step: stream.decoder.is_between_messages() || stream.decoder.is_untouched(),
            untouched: stream.decoder.is_untouched(),
            known: stream.decoder.confidence() == Confidence::Known,
            history: stream.history,
            fin: stream.fin,
        }
    }

    fn stream(self) -> Stream {
        let Some(next) = self.next.filter(|_| self.read) else {
            return Stream { stood: self.next, ..Stream::joined() };
        };
        let confidence = if self.known { Confidence::Known } else { Confidence::Acquired };
        Stream {
            lane: Lane::resumed(next),
            decoder: match (self.in_step, self.untouched) {
                (true, true) => Decoder::at_start(),
                (true, false) => Decoder::resumed(confidence),
                (false, _) => Decoder::resumed_lost(),
            },
            history: if self.in_step { self.history } else { self.history.interrupted() },
            fin: self.fin,
            idle: None,
            stood: None,
        }
    }
}

/// What was written down of one socket.
#[derive(Debug)]
struct Left {
    zmtp: bool,
    sent: SavedStream,
    received: SavedStream,
    requests: Option<SavedRequests>,
}

/// What another agent left and what was met meanwhile, until all that is there has been found.
#[derive(Debug)]
pub(super) struct Returning {
    /// Sockets not found yet, with where their streams stood.
    missing: HashMap<SocketId, Left>,
    /// Those that were.
    found: u64,
    /// When this agent began.
    at: Mono,
    /// Connections found that were not written down and of which the beginning was not seen.
    met: Vec<Connection>,
}

impl Returning {
    pub(super) fn meet(&mut self, connection: Connection) {
        if connection.preexisting && self.met.len() < MAX_MET {
            self.met.push(connection);
        }
    }
}

/// What became of the connections that were written down.
#[derive(Debug, Default)]
pub struct Returned {
    /// They are there.
    pub found: u64,
    /// They are gone.
    pub gone: u64,
    /// Connections that are there and were not written down: what they carried is not known.
    pub met: Vec<Connection>,
}

impl Control {
    /// What would have to be known to go on later.
    pub fn save(&self) -> SavedControl {
        let mut saved = SavedControl::default();
        let followed = |s: &Socket| s.given_up.is_none() && s.closed.is_none();
        let zmtp = |s: &Socket| s.judged == Some(Judgement::Zmtp);
        let silent = |s: &Stream| s.lane.next().is_none() && s.stood.is_some();
        let speak = self.sockets.iter().filter(|(_, s)| followed(s) && zmtp(s));
        let ask = self.sockets.iter().filter(|(_, s)| followed(s) && SavedRequests::of(s).is_some());
        let are_silent =
            |s: &Socket| followed(s) && !zmtp(s) && s.web.is_none() && silent(&s.sent) && silent(&s.received);
        let are_silent = self.sockets.iter().filter(|(_, s)| are_silent(s));
        for (id, socket) in speak.chain(ask).chain(are_silent) {
            if saved.sockets.len() >= MAX_SOCKETS {
                saved.left_out += 1;
                continue;
            }
            saved.sockets.push(SavedSocket {
                connection: socket.connection(id),
                zmtp: zmtp(socket),
                sent: SavedStream::of(&socket.sent),
                received: SavedStream::of(&socket.received),
                unacknowledged: socket.unacknowledged.next.map(|next| (next, socket.unacknowledged.last)),
                requests: SavedRequests::of(socket),
            });
        }
        saved
    }

    /// Goes on where another left off. What of it is still there shows in the events of sockets found
    /// ([`What::Found`](crate::event::What::Found)); [`Self::returned`] ends the wait for them.
    pub fn restore(limits: Limits, saved: SavedControl, survivors: &Survivors, now: Mono) -> Self {
        let mut control = Self::new(limits);
        let mut missing = HashMap::new();
        for SavedSocket { mut connection, zmtp, sent, received, unacknowledged, requests } in saved.sockets {
            let id = connection.socket;
            // Numbers of rooms that have closed are not written down: what begins now may be older.
            (connection.preexisting, connection.since) = (true, now);
            connection.task = survivors.keep(connection.task);
            let socket = Socket {
                unacknowledged: unacknowledged.map_or_else(Unacknowledged::default, |(next, last)| {
                    Unacknowledged { next: Some(next), last }
                }),
                ..Socket::resumed(&connection, sent.stream(), received.stream(), requests.as_ref())
            };
            if control.sockets.insert(id, now, socket, &mut |_, _| {}).is_ok() {
                missing.insert(id, Left { zmtp, sent, received, requests });
            }
        }
        control.returning = Some(Box::new(Returning { missing, found: 0, at: now, met: Vec::new() }));
        control
    }

    /// Whether a socket is followed.
    pub fn follows(&self, socket: SocketId) -> bool {
        self.sockets.heard(socket).is_some()
    }

    /// A socket was found: whether it is one that was written down; its streams are brought up to date then.
    pub(super) fn returns(
        &mut self,
        event: &SocketEvent<'_>,
        found: &Found,
        sink: &mut impl FnMut(Input<'_>),
    ) -> bool {
        let Some(returning) = self.returning.as_mut() else { return false };
        let Some(left) = returning.missing.remove(&event.socket) else { return false };
        let Left { zmtp, sent, received, requests } = left;
        returning.found += 1;
        let Some(socket) = self.sockets.get_mut(event.socket, event.at) else { return false };
        let waits = requests.as_ref().is_some_and(|r| r.still_wait(socket, event, found));
        socket.task = event.task.or(socket.task);
        let sequence = found.sequence;
        let ends = [
            (Direction::Sent, sent, sequence.write, sequence.write == sequence.una),
            (Direction::Received, received, sequence.copied, sequence.copied == sequence.rcv_nxt),
        ];
        let moved = sent.next != Some(sequence.write) || received.next != Some(sequence.copied);
        if !zmtp && requests.is_none() && moved {
            returning.meet(socket.connection(event.socket));
        }
        for (direction, stood, end, idle) in ends {
            if zmtp {
                self.shared.catch_up(event, socket, direction, stood, end, sink);
            }
            let stream = socket.stream(direction);
            stream.stood = Some(end);
            stream.idle = idle.then_some((end, event.at));
        }
        self.shared.acknowledge(event, socket, sequence.una, sink);
        if requests.is_some() {
            self.shared.resume_requests(event.at, event.socket, socket, waits, sink);
        }
        if zmtp {
            // The source does not know it any more.
            self.shared.judge(event.socket, socket, Judgement::Zmtp);
        }
        self.shared.recount(socket);
        if found.state != TcpState::Established {
            let change = StateChange { old: TcpState::Established, new: found.state, error: 0, sequence };
            self.shared.pass_on(event, socket, change, sink);
        }
        true
    }

    /// All sockets that are there have been found: what of those written down is not among them is gone.
    pub fn returned(&mut self, now: Mono, sink: &mut impl FnMut(Input<'_>)) -> Returned {
        let Some(returning) = self.returning.take() else { return Returned::default() };
        let Returning { missing, found, at, met } = *returning;
        let mut out = Returned { found, gone: 0, met };
        for (id, Left { zmtp, requests, .. }) in missing {
            if let (Some(_), Some(socket)) = (&requests, self.sockets.get_mut(id, at)) {
                self.shared.resume_requests(now, id, socket, false, sink);
                if self.sockets.heard(id).is_some_and(|heard| heard > at) {
                    out.found += 1;
                    continue;
                }
            }
            if self.sockets.heard(id).is_some_and(|heard| heard > at) {
                // It speaks, so it is there; what passed before it was heard is not known.
                if let Some(socket) = self.sockets.get_mut(id, now) {
                    let connection = socket.connection(id);
                    if zmtp {
                        self.shared.judge(id, socket, Judgement::Zmtp);
                    }
                    for direction in [Direction::Sent, Direction::Received] {
                        self.shared.lost_sight(now, connection, direction, sink);
                    }
                }
                out.found += 1;
                continue;
            }
            if let Some(mut socket) = self.sockets.remove(id) {
                self.shared.counters.move_connection(socket.counted.take(), None);
                out.gone += 1;
            }
        }
        out
    }
}

impl Socket {
    fn resumed(
        connection: &Connection,
        sent: Stream,
        received: Stream,
        requests: Option<&SavedRequests>,
    ) -> Self {
        let (web, waits) = requests.map(SavedRequests::web).unzip();
        let [sent, received] =
            [sent, received].map(|stream| match (waits, stream.lane.next().or(stream.stood)) {
                (Some(true), Some(next)) => Stream { lane: Lane::resumed(next), ..Stream::web() },
                (Some(_), _) => Stream { stood: stream.stood, ..Stream::web() },
                (None, _) => stream,
            });
        let web = web.map(Box::new);
        Self {
            addresses: connection.addresses,
            netns: connection.netns,
            task: connection.task,
            preexisting: connection.preexisting,
            beginning_gone: true,
            since: connection.since,
            given_up: None,
            judged: None,
            counted: None,
            sent,
            received,
            web,
            unacknowledged: Unacknowledged::default(),
            doubt_calls: 0,
            doubt_bytes: 0,
            heard: false,
            named: false,
            waiting: false,
            closed: None,
        }
    }
}

impl Shared {
    /// Brings a stream that `stood` to where its socket says that it is.
    fn catch_up(
        &mut self,
        event: &SocketEvent<'_>,
        socket: &mut Socket,
        direction: Direction,
        stood: SavedStream,
        end: u32,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        let Some(was) = stood.next else { return };
        if !stood.read && was == end {
            return;
        }
        let untouched = socket.stream(direction).lane.next() == Some(was);
        if !stood.read || !stood.in_step || (untouched && behind(was, end)) {
            // Half a message was read, or more has passed than 32 bits can tell.
            let connection = socket.connection(event.socket);
            self.lost_sight(event.at, connection, direction, sink);
            if untouched {
                let stream = socket.stream(direction);
                stream.lane.discard(&mut self.held);
                (stream.lane, stream.decoder) = (Lane::resumed(end), Decoder::resumed_lost());
            }
            return;
        }
        self.run(event.socket, socket, direction, event.at, sink, |lane, held, take| {
            lane.finish(Some(end), held, take);
        });
    }

    /// Goes on with requests that still wait. Otherwise says that nothing is known of what became of them; the next one is
    /// read again, if any is.
    fn resume_requests(
        &mut self,
        at: Mono,
        id: SocketId,
        socket: &mut Socket,
        wait: bool,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        if !wait || !self.limits.requests {
            self.with_web(id, socket, sink, |web, out| web.lose_sight(at, out));
            for stream in [&mut socket.sent, &mut socket.received] {
                stream.lane.discard(&mut self.held);
                stream.lane = Lane::new();
            }
        }
        if self.limits.requests {
            self.judge(id, socket, Judgement::Http);
        } else {
            self.give_up(id, socket, ConnectionState::Foreign);
        }
        self.recount(socket);
    }

    /// Says that something passed of which nothing is known.
    fn lost_sight(
        &mut self,
        at: Mono,
        connection: Connection,
        direction: Direction,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        self.counters.drop_bytes(Dropped::Hole, 0);
        self.counters.inputs += 1;
        sink(Input::Lossy { at, connection, direction, bytes: 0 });
    }
}
