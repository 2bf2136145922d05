//! Where the streams of an HTTP connection stand when something else tells it: a request that begins, a FIN, a reset.
//!
//! Pure: no I/O, no clock. Answers are muted at the source most of the time, so what passed of them shows in TCP's own
//! numbers: before a request is read and before a connection ends, the answers are brought to where these say they are.

use crate::control::web::{self, Web};
use crate::control::{Shared, Socket, behind};
use crate::event::{Bytes, Direction, Mono, Sequence, SocketEvent, SocketId, StateChange, TcpState};
use crate::http::Ending;
use crate::rooms::model::Input;

/// Kernel: `include/uapi/asm-generic/errno-base.h`, `errno.h`. What `tcp_reset` sets: EPIPE behind the peer's FIN,
/// ECONNRESET else.
const EPIPE: u32 = 32;
/// See [`EPIPE`].
const ECONNRESET: u32 = 104;

/// How a change of state ends a connection, or one of its streams.
const fn ending(change: StateChange) -> Option<Ending> {
    use TcpState::{Close, CloseWait, Closing, Established, FinWait1, LastAck, TimeWait};
    Some(match (change.new, change.error) {
        (FinWait1 | LastAck, _) => Ending::Fin(Direction::Sent),
        (Close, ECONNRESET | EPIPE) => Ending::Reset(Some(Direction::Received)),
        // A close with bytes unread, or without lingering, sends a reset (`tcp_close`, `tcp_disconnect`).
        (Close, 0) if matches!(change.old, Established | CloseWait) => Ending::Reset(Some(Direction::Sent)),
        (CloseWait | Closing | TimeWait, _) | (Close, 0) => Ending::Fin(Direction::Received),
        // A time-out, or a route that went away: nobody has ended it.
        (Close, _) => Ending::Reset(None),
        _ => return None,
    })
}

impl Shared {
    /// A call may bring a request: whoever asks again has the answer before, so what passed of it unseen has passed.
    pub(super) fn before_request(
        &mut self,
        event: &SocketEvent<'_>,
        socket: &mut Socket,
        bytes: &Bytes<'_>,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        let asks = |web: &Web| web.requests() == bytes.direction && web.may_have_missed();
        if !socket.web.as_deref().is_some_and(asks) {
            return;
        }
        let (direction, end) = match bytes.direction {
            // What the client's kernel has acknowledged; with its request it acknowledges all that it has.
            Direction::Received => (Direction::Sent, bytes.snd_una),
            // What has come from the server.
            Direction::Sent => (Direction::Received, bytes.rcv_nxt),
        };
        let fin = u32::from(socket.stream(direction).fin);
        self.run(event.socket, socket, direction, event.at, sink, |lane, held, take| {
            lane.pass_to(end.wrapping_sub(fin), held, take);
        });
    }

    /// The peer's last byte before its FIN may have been read now.
    pub(super) fn after_fin(
        &mut self,
        event: &SocketEvent<'_>,
        socket: &mut Socket,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        let Some(fin) = socket.web.as_ref().and_then(|web| web.fin) else { return };
        if socket.received.lane.next().is_some_and(|next| !behind(fin, next)) {
            self.end(event.at, event.socket, socket, Ending::Fin(Direction::Received), sink);
        }
    }

    /// A change of state may end requests.
    pub(super) fn end_requests(
        &mut self,
        event: &SocketEvent<'_>,
        socket: &mut Socket,
        change: StateChange,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        let Some(ending) = ending(change).filter(|_| socket.web.is_some()) else { return };
        let (id, at) = (event.socket, event.at);
        let stand = Some(change.sequence).filter(|s| *s != Sequence::default());
        for (direction, end) in
            [(Direction::Sent, stand.map(|s| s.write)), (Direction::Received, stand.map(|s| s.copied))]
        {
            self.run(id, socket, direction, at, sink, |lane, held, take| lane.finish(end, held, take));
        }
        let Some(web) = &mut socket.web else { return };
        // The FIN counts one.
        let unread = stand.map_or(0, |s| s.rcv_nxt.wrapping_sub(s.copied).cast_signed());
        if ending == Ending::Fin(Direction::Received) && change.new != TcpState::Close && unread > 1 {
            // A request may lie before it.
            web.fin = Some(change.sequence.rcv_nxt.wrapping_sub(1));
            return;
        }
        // Behind the peer's FIN, which may have come before anything told what the connection carries.
        if web.fin.is_some() || change.old == TcpState::CloseWait {
            self.end(at, id, socket, Ending::Fin(Direction::Received), sink);
        }
        self.end(at, id, socket, ending, sink);
    }

    fn end(
        &mut self,
        at: Mono,
        id: SocketId,
        socket: &mut Socket,
        ending: Ending,
        sink: &mut impl FnMut(Input<'_>),
    ) {
        self.with_web(id, socket, sink, |web, out| {
            if ending == Ending::Fin(Direction::Received) {
                web.fin = None;
            }
            web.end(at, ending, out);
        });
    }

    /// Lets the HTTP half of a connection do something, if there is one.
    pub(super) fn with_web<F: FnMut(Input<'_>)>(
        &mut self,
        id: SocketId,
        socket: &mut Socket,
        sink: &mut F,
        act: impl FnOnce(&mut Web, &mut web::Out<'_, F>),
    ) {
        let connection = socket.connection(id);
        let Some(web) = &mut socket.web else { return };
        let before = web.held();
        let Self { counters, http, .. } = self;
        act(web, &mut web::Out { connection, counters, http, sink });
        self.partial = self.partial.saturating_sub(before).saturating_add(web.held());
    }
}
