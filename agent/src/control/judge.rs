//! What a connection turns out to be: read as ZMTP, read as HTTP, or let go, and then why.
//!
//! Pure: no I/O, no clock.

use crate::control::flow::{Findings, Unread};
use crate::control::socket::Socket;
use crate::control::web::{self, Heard, Look, Web};
use crate::control::{ConnectionState, Judgement, Shared};
use crate::event::{Body, Bytes, Direction, Mono, NotCaptured, SocketId};
use crate::rooms::model::{Input, Unreadable};
use crate::stream::Piece;
use crate::zmtp::{Confidence, Decoder, SocketType, Unsupported};

/// A connection of whose first so many calls not one byte could be had is named as one that cannot be read.
const BLIND_CALLS: u32 = 8;
/// A connection joined in its middle that shows no known message is foreign after so many calls …
const DOUBT_CALLS: u32 = 256;
/// … or so many bytes. A rank's connection shows one at its first call that begins at a message.
const DOUBT_BYTES: u64 = 256 << 10;
/// A call counts no more of them than can be shipped of it.
const DOUBT_CALL: u64 = 8 << 10;

/// Judgements kept until they are fetched.
const JUDGEMENTS: usize = 65_536;

/// Why a connection in this dialect cannot be read.
const fn unreadable(dialect: Unsupported) -> Unreadable {
    match dialect {
        Unsupported::Zmtp1 | Unsupported::Zmtp2 => Unreadable::ZmtpVersion,
        Unsupported::Plain | Unsupported::Curve | Unsupported::OtherMechanism => Unreadable::ZmtpMechanism,
    }
}

/// Whether the way a call was made keeps its bytes from being seen.
const fn hides(body: Body<'_>) -> bool {
    use NotCaptured::{Budget, Fault, Flags, KernelThread, OtherDescriptor, Syscall, Vectors};
    matches!(body, Body::Absent(Budget | Fault | Flags | KernelThread | OtherDescriptor | Syscall | Vectors))
}

/// The HTTP half of a connection that begins, or goes on, like HTTP with this piece of one of its streams.
pub(super) fn begin_web(
    decoder: &mut Decoder,
    other: &mut Decoder,
    direction: Direction,
    piece: &Piece<'_>,
) -> Option<Web> {
    let (Piece::Bytes { bytes, .. } | Piece::Ends { head: bytes, .. }) = piece else { return None };
    let pending = |d: &Decoder| d.confidence() == Confidence::Pending && !d.is_dead();
    let greeting = |d: &Decoder| d.in_greeting() && !d.is_untouched();
    if !pending(decoder) || !pending(other) || greeting(decoder) || greeting(other) {
        return None;
    }
    let web = if decoder.is_untouched() && other.is_untouched() {
        Web::at_start(direction, Look::at_start(bytes)?)
    } else {
        Web::joined(direction, Look::in_middle(bytes)?)
    };
    decoder.kill();
    other.kill();
    Some(web)
}

impl Shared {
    /// Draws from a stretch what it says of the connection.
    pub(super) fn conclude(
        &mut self,
        at: Mono,
        id: SocketId,
        socket: &mut Socket,
        findings: &Findings,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        socket.beginning_gone |= findings.beginning_gone;
        socket.preexisting &= !findings.greeted;
        socket.preexisting |= socket.beginning_gone;
        if let Some(Unread::Unsupported(dialect)) = findings.unread {
            self.counters.count_unsupported(dialect);
            self.unreadable(at, id, socket, unreadable(dialect), sink);
            self.give_up(id, socket, ConnectionState::Unsupported);
        } else if let Some(Unread::NotZmtp) = findings.unread {
            self.counters.not_zmtp += 1;
            self.neither(at, id, socket, sink);
            self.give_up(id, socket, ConnectionState::Foreign);
        } else if findings.ready == Some(SocketType::Other) {
            self.counters.other_socket_types += 1;
            self.give_up(id, socket, ConnectionState::Foreign);
        } else if findings.ready.is_some() || findings.acquired {
            self.judge(id, socket, Judgement::Zmtp);
        }
        self.recount(socket);
    }

    /// The same for what was read as HTTP.
    pub(super) fn conclude_web(
        &mut self,
        at: Mono,
        id: SocketId,
        socket: &mut Socket,
        heard: Heard,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        if let Some(why) = heard.unread {
            match why {
                web::Unread::Tls => self.unreadable(at, id, socket, Unreadable::Tls, sink),
                web::Unread::Http2 => self.unreadable(at, id, socket, Unreadable::Http2, sink),
                web::Unread::NotHttp => self.neither(at, id, socket, sink),
                // That one peer speaks badly, or goes on with something else, hides no engine.
                _ => {}
            }
            let was_http = heard.judged || socket.judged == Some(Judgement::Http);
            let neither = why == web::Unread::NotHttp && !was_http;
            let judgement = if neither { Judgement::Neither } else { Judgement::Foreign };
            self.give_up_as(id, socket, ConnectionState::Foreign, judgement);
        } else if heard.judged {
            self.judge(id, socket, Judgement::Http);
        } else {
            return;
        }
        self.recount(socket);
    }

    /// Neither ZMTP nor HTTP. Where HTTP is not looked for, that is not known.
    pub(super) fn neither(
        &mut self,
        at: Mono,
        id: SocketId,
        socket: &mut Socket,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        if self.limits.requests {
            let unseen = socket.doubt_calls > 0 && !socket.heard;
            let why = if unseen { Unreadable::Calls } else { Unreadable::Other };
            self.unreadable(at, id, socket, why, sink);
        }
    }

    /// Tells the rooms once of each connection that it cannot be read.
    pub(super) fn unreadable(
        &mut self,
        at: Mono,
        id: SocketId,
        socket: &mut Socket,
        why: Unreadable,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        if !std::mem::replace(&mut socket.named, true) {
            self.counters.inputs += 1;
            self.counters.count_unreadable(why);
            sink(Input::Unreadable { at, connection: socket.connection(id), why });
        }
    }

    pub(super) fn give_up(&mut self, id: SocketId, socket: &mut Socket, as_what: ConnectionState) {
        self.give_up_as(id, socket, as_what, Judgement::Foreign);
    }

    fn give_up_as(
        &mut self,
        id: SocketId,
        socket: &mut Socket,
        as_what: ConnectionState,
        judgement: Judgement,
    ) {
        self.partial = self.partial.saturating_sub(socket.held());
        socket.given_up = Some(as_what);
        socket.web = None;
        for stream in [&mut socket.sent, &mut socket.received] {
            stream.decoder.kill();
            stream.lane.discard(&mut self.held);
        }
        self.judge(id, socket, judgement);
    }

    pub(super) fn judge(&mut self, id: SocketId, socket: &mut Socket, judgement: Judgement) {
        if socket.judged == Some(judgement) {
            return;
        }
        socket.judged = Some(judgement);
        if self.judgements.len() < JUDGEMENTS {
            self.judgements.push_back((id, judgement));
        } else {
            self.counters.judgements_dropped += 1;
        }
    }

    /// Gives up a connection joined in its middle that shows nothing known for long, or as long as its source ships
    /// bytes of what is not judged.
    pub(super) fn doubt(
        &mut self,
        at: Mono,
        id: SocketId,
        socket: &mut Socket,
        bytes: &Bytes<'_>,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        if socket.given_up.is_some() || socket.state() != Some(ConnectionState::Pending) {
            return;
        }
        socket.doubt_calls = socket.doubt_calls.saturating_add(1);
        socket.heard |= !hides(bytes.body);
        // A large body of what may be a message is no reason for doubt.
        let unfinished = socket.sent.decoder.is_unfinished() || socket.received.decoder.is_unfinished();
        if !unfinished {
            // Of a call that is too long to be shipped only its length is known: the body of a request may be under way.
            socket.doubt_bytes = socket.doubt_bytes.saturating_add(u64::from(bytes.len).min(DOUBT_CALL));
        }
        if socket.doubt_calls >= BLIND_CALLS && !socket.heard {
            self.neither(at, id, socket, sink);
        }
        let spent = matches!(bytes.body, Body::Absent(NotCaptured::Budget)) && !unfinished;
        if spent || socket.doubt_calls > DOUBT_CALLS || socket.doubt_bytes > DOUBT_BYTES {
            self.counters.unrecognised += 1;
            self.neither(at, id, socket, sink);
            self.give_up(id, socket, ConnectionState::Foreign);
            self.recount(socket);
        }
    }
}
