//! One socket as the control stage knows it: its two streams, and what it turned out to be.

use crate::control::counters::ConnectionState;
use crate::control::flow::History;
use crate::control::web::Web;
use crate::control::{Judgement, behind};
use crate::event::{Addresses, Direction, Mono, SECOND, Sequence, SocketEvent, SocketId, Task};
use crate::rooms::model::Connection;
use crate::stream::Lane;
use crate::zmtp::{Confidence, Decoder};

/// A stream found with nothing under way that stands still for so long has no message begun: the pieces of one
/// follow each other within microseconds.
const IDLE: u64 = SECOND / 20;

/// Messages sent and not yet acknowledged by the peer's kernel.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unacknowledged {
    /// Nothing to tell before `una` reaches this; `None`: nothing outstanding.
    pub(super) next: Option<u32>,
    /// End of the last message sent.
    pub(super) last: u32,
}

impl Unacknowledged {
    pub(super) fn sent(&mut self, first: u32, last: u32) {
        self.next.get_or_insert(first);
        self.last = last;
    }

    /// Whether `una` is past a message, given that nothing behind `written` was ever sent.
    pub(super) fn passes(&mut self, una: u32, written: u32) -> bool {
        let Some(next) = self.next else { return false };
        // A FIN may count one. What lies further ahead is no acknowledgement but an unset field.
        if behind(una, written.wrapping_add(1)) || behind(next, una) {
            return false;
        }
        self.next = if behind(self.last, una) { Some(una.wrapping_add(1)) } else { None };
        true
    }
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) lane: Lane,
    pub(super) decoder: Decoder,
    pub(super) history: History,
    /// The side that sends here has said its last, so a FIN may count one.
    pub(super) fin: bool,
    /// Where it stood and when, if it was found with nothing under way.
    pub(super) idle: Option<(u32, Mono)>,
    /// Where it stood when it was found.
    pub(super) stood: Option<u32>,
}

impl Stream {
    pub(super) const fn joined() -> Self {
        Self {
            lane: Lane::new(),
            decoder: Decoder::joined(),
            history: History::at_start(false),
            fin: false,
            idle: None,
            stood: None,
        }
    }

    /// Of a connection that is known to be HTTP.
    pub(super) fn web() -> Self {
        let mut stream = Self::joined();
        stream.decoder.kill();
        stream
    }

    /// Before its first call: libzmq sends whole messages, and a rest of one would not have waited.
    pub(super) fn meet(&mut self, at: Mono, start: u32) {
        let idle = self.idle.take();
        if self.lane.next().is_none_or(|next| next == start)
            && idle.is_some_and(|(stood, found)| stood == start && at.since(found) >= IDLE)
        {
            self.decoder.expect_message();
        }
    }

    pub(super) fn begin(&mut self, base: Option<u32>) {
        if self.lane.next().is_none() {
            self.decoder = Decoder::at_start();
            self.history = History::at_start(base.is_some());
            if let Some(base) = base {
                self.lane.begin(base);
            }
        }
    }
}

/// One socket.
#[derive(Debug)]
#[allow(clippy::struct_excessive_bools, reason = "independent of each other")]
pub(super) struct Socket {
    pub(super) addresses: Addresses,
    pub(super) netns: u32,
    pub(super) task: Option<Task>,
    pub(super) preexisting: bool,
    /// First bytes of one of its streams are missing.
    pub(super) beginning_gone: bool,
    /// Since when it is watched.
    pub(super) since: Mono,
    /// Not read any more, as this.
    pub(super) given_up: Option<ConnectionState>,
    pub(super) judged: Option<Judgement>,
    /// As which the gauge counts it.
    pub(super) counted: Option<ConnectionState>,
    pub(super) sent: Stream,
    pub(super) received: Stream,
    /// What carries requests, once it looks like HTTP; its ZMTP decoders are dead then.
    pub(super) web: Option<Box<Web>>,
    pub(super) unacknowledged: Unacknowledged,
    pub(super) doubt_calls: u32,
    pub(super) doubt_bytes: u64,
    /// Bytes of a call were seen.
    pub(super) heard: bool,
    /// The rooms were told that it cannot be read.
    pub(super) named: bool,
    /// In the list of sockets with calls held back.
    pub(super) waiting: bool,
    /// Closed, with these last sequence numbers.
    pub(super) closed: Option<Sequence>,
}

impl Socket {
    pub(super) fn joined(event: &SocketEvent<'_>) -> Self {
        Self {
            addresses: event.addresses,
            netns: event.netns,
            task: None,
            preexisting: true,
            beginning_gone: false,
            since: event.at,
            given_up: None,
            judged: None,
            counted: None,
            sent: Stream::joined(),
            received: Stream::joined(),
            web: None,
            unacknowledged: Unacknowledged::default(),
            doubt_calls: 0,
            doubt_bytes: 0,
            heard: false,
            named: false,
            waiting: false,
            closed: None,
        }
    }

    pub(super) const fn connection(&self, socket: SocketId) -> Connection {
        Connection {
            socket,
            addresses: self.addresses,
            netns: self.netns,
            task: self.task,
            preexisting: self.preexisting,
            since: self.since,
        }
    }

    pub(super) const fn stream(&mut self, direction: Direction) -> &mut Stream {
        match direction {
            Direction::Sent => &mut self.sent,
            Direction::Received => &mut self.received,
        }
    }

    /// Which stream carries requests, where the connection is HTTP.
    pub(super) fn requests(&self) -> Option<Direction> {
        self.web.as_ref().map(|web| web.requests())
    }

    pub(super) fn held(&self) -> usize {
        let web = self.web.as_ref().map_or(0, |web| web.held());
        self.sent.decoder.held() + self.received.decoder.held() + web
    }

    /// Open, and not one call on it was reported: it says nothing, or its source does not ship what it says, as it
    /// is no greeting. Should something come after all, it is joined there.
    pub(super) fn is_speechless(&self) -> bool {
        self.doubt_calls == 0 && self.state() == Some(ConnectionState::Pending)
    }

    pub(super) fn state(&self) -> Option<ConnectionState> {
        if self.closed.is_some() {
            return None;
        }
        if self.given_up.is_some() {
            return self.given_up;
        }
        if let Some(web) = &self.web {
            return Some(web.state());
        }
        let is = |c| self.sent.decoder.confidence() == c || self.received.decoder.confidence() == c;
        Some(if is(Confidence::Lost) {
            ConnectionState::Lost
        } else if is(Confidence::Acquired) {
            ConnectionState::Acquired
        } else if is(Confidence::Known) {
            ConnectionState::Known
        } else {
            ConnectionState::Pending
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_small_and_an_idle_http_connection_little_more() {
        // 65 536 of them at most.
        assert!(size_of::<Socket>() <= 640, "{}", size_of::<Socket>());
        assert!(size_of::<Web>() <= 512, "{}", size_of::<Web>());
    }
}
