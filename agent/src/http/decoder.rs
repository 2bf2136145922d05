//! One connection: both streams in, events out.

use std::collections::VecDeque;

use super::answers::Answers;
use super::asks::Asks;
use super::counters::Counters;
use super::event::{AnswerEnd, Answered, Event, Lost, Method, Outcome, Route, Side, Unread};
use super::framing::{Collected, Head, Stage, check_request, may_be_request};
use super::head::{self, Request};
use crate::event::Direction;
use crate::stream::Piece;

/// A stretch of one stream, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stretch<'a> {
    /// Captured bytes.
    Bytes {
        /// They.
        bytes: &'a [u8],
        /// The first of them is the first of a send or receive call. Only where that is so a lost position is regained.
        opens: bool,
    },
    /// This many bytes passed and are not here (the middle of a call, a call of which only the length is known, bytes that
    /// no call brought).
    Missing(u64),
    /// Bytes came twice or in an order that is not known.
    Disorder,
}

impl<'a> Stretch<'a> {
    /// What a piece of a stream is, in order. A call of which the two ends are captured is three: bytes that open it, what
    /// is missing, bytes that do not; else two of them are nothing.
    pub fn of(piece: Piece<'a>) -> [Self; 3] {
        const NOTHING: Stretch<'static> = Stretch::Missing(0);
        let one = match piece {
            Piece::Bytes { bytes, .. } => Self::Bytes { bytes, opens: true },
            Piece::Ends { len, head, tail, .. } => {
                let here = u64::try_from(head.len().saturating_add(tail.len())).unwrap_or(u64::MAX);
                let missing = u64::from(len).saturating_sub(here);
                let tail = Self::Bytes { bytes: tail, opens: false };
                return [Self::Bytes { bytes: head, opens: true }, Self::Missing(missing), tail];
            }
            Piece::Skip { len, .. } => Self::Missing(len.into()),
            Piece::Hole { len, .. } => Self::Missing(len),
            Piece::Overlap { .. } => Self::Disorder,
        };
        [one, NOTHING, NOTHING]
    }
}

/// How a connection, or one of its streams, ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The side that sends on this stream has said its last: FIN.
    Fin(Direction),
    /// Reset, by whoever sends on this stream where that is known.
    Reset(Option<Direction>),
}

/// Everything but the decoder.
pub(super) struct Out<'c, F> {
    pub(super) counters: &'c mut Counters,
    sink: &'c mut F,
    /// The stream with the requests, where known.
    requests: Option<Direction>,
    from_start: bool,
    judged: bool,
}

impl<F: FnMut(Event)> Out<'_, F> {
    pub(super) fn give(&mut self, event: Event) {
        if let (Event::RequestBegun { .. }, false, Some(requests)) = (&event, self.judged, self.requests) {
            self.judged = true;
            (self.sink)(Event::Judged { requests, from_start: self.from_start });
        }
        (self.sink)(event);
    }

    pub(super) fn lost(&mut self, asks: bool, why: Lost) {
        let Some(requests) = self.requests else { return };
        self.counters.count_lost(why);
        self.give(Event::Lost { direction: if asks { requests } else { other(requests) }, why });
    }

    pub(super) fn regained(&mut self, asks: bool) {
        let Some(requests) = self.requests else { return };
        self.give(Event::Regained { direction: if asks { requests } else { other(requests) } });
    }
}

/// A request without its answer's end.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "independent of each other")]
pub(super) struct Open {
    pub(super) n: u64,
    pub(super) method: Method,
    pub(super) route: Route,
    pub(super) whole: bool,
    pub(super) answer_begun: bool,
    /// It waits for leave to send its body.
    pub(super) waits: bool,
    pub(super) hung_up: bool,
}

impl Open {
    pub(super) const fn new(n: u64, method: Method, route: Route, waits: bool) -> Self {
        Self { n, method, route, whole: false, answer_begun: false, waits, hung_up: false }
    }
}

/// Who is who.
#[derive(Clone, Debug)]
pub(super) enum Roles {
    /// Not known: first bytes of the two streams (sent, received), or what may be a head in them.
    Unknown([Collected; 2]),
    /// This stream carries the requests.
    Known(Direction),
}

/// Decoder of one connection.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "independent of each other")]
pub struct Decoder {
    pub(super) roles: Roles,
    pub(super) from_start: bool,
    /// Has said so.
    pub(super) judged: bool,
    pub(super) asks: Asks,
    pub(super) answers: Answers,
    pub(super) open: VecDeque<Open>,
    /// A request has been seen to begin before the one before it was answered.
    pipelined: bool,
    pub(super) dead: bool,
}

const fn index(direction: Direction) -> usize {
    match direction {
        Direction::Sent => 0,
        Direction::Received => 1,
    }
}

const fn other(direction: Direction) -> Direction {
    match direction {
        Direction::Sent => Direction::Received,
        Direction::Received => Direction::Sent,
    }
}

impl Decoder {
    const fn new(from_start: bool, stage: Stage) -> Self {
        Self {
            roles: Roles::Unknown([Collected::new(), Collected::new()]),
            from_start,
            judged: false,
            asks: Asks::new(stage),
            answers: Answers::new(stage),
            open: VecDeque::new(),
            pipelined: false,
            dead: false,
        }
    }

    /// Of a connection whose first byte is still to come.
    pub const fn at_start() -> Self {
        Self::new(true, Stage::Head)
    }

    /// Of a connection joined in its middle: nothing is said of it before the head of a request is proven.
    pub const fn joined() -> Self {
        Self::new(false, Stage::Lost)
    }

    /// Which stream carries the requests, once that is known.
    pub const fn requests(&self) -> Option<Direction> {
        match self.roles {
            Roles::Known(direction) => Some(direction),
            Roles::Unknown(_) => None,
        }
    }

    /// Requests whose answer's end is still to come.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Whether the next byte of the requests begins a request, as far as is known.
    pub const fn awaits_request(&self) -> bool {
        self.asks.is_between() || self.asks.stage().is_lost()
    }

    /// Whether every request has been answered, and nothing of an answer can have passed unseen since.
    pub fn is_settled(&self) -> bool {
        self.open.is_empty() && self.answers.is_between()
    }

    /// Whether the position in the stream of the requests is lost, or not yet known.
    pub const fn is_lost(&self) -> bool {
        self.asks.stage().is_lost()
    }

    /// Bytes held now: unfinished heads, the tail of a body, lists of rooms.
    pub fn held(&self) -> usize {
        let first = match &self.roles {
            Roles::Unknown(first) => first.iter().map(Collected::held).sum(),
            Roles::Known(_) => 0,
        };
        first + self.asks.held() + self.answers.held() + self.open.capacity() * size_of::<Open>()
    }

    /// Whether it is not followed any more.
    pub const fn is_dead(&self) -> bool {
        self.dead
    }

    /// Takes the next stretch of one stream. An answer may be muted at the source; what was sent meanwhile must be fed as
    /// missing before the next request and before an end ([`crate::event::Bytes::snd_una`] of the call that brings the
    /// request, [`crate::event::Sequence::write`] of the change of state): a client has read all of it by then, and an
    /// answer under way would look like a hang-up or like pipelining.
    pub fn feed(
        &mut self,
        direction: Direction,
        stretch: Stretch<'_>,
        counters: &mut Counters,
        sink: &mut impl FnMut(Event),
    ) {
        if self.dead || matches!(stretch, Stretch::Missing(0) | Stretch::Bytes { bytes: [], .. }) {
            return;
        }
        let mut out = self.out(counters, sink);
        match self.roles {
            Roles::Unknown(_) if self.from_start => self.judge_start(direction, stretch, &mut out),
            Roles::Unknown(_) => self.judge_joined(direction, stretch, &mut out),
            Roles::Known(requests) if requests == direction => self.ask(stretch, &mut out),
            Roles::Known(_) => self.answer(stretch, &mut out),
        }
        self.judged = out.judged;
    }

    const fn out<'c, F: FnMut(Event)>(&self, counters: &'c mut Counters, sink: &'c mut F) -> Out<'c, F> {
        let (from_start, judged) = (self.from_start, self.judged);
        Out { counters, sink, requests: self.requests(), from_start, judged }
    }

    /// Takes the end of the connection or of one of its streams, after every stretch before it.
    pub fn end(&mut self, ending: Ending, counters: &mut Counters, sink: &mut impl FnMut(Event)) {
        let Roles::Known(requests) = self.roles else { return };
        let mut out = self.out(counters, sink);
        if self.dead {
            return;
        }
        let (by, reset) = match ending {
            Ending::Fin(d) => (Some(d), false),
            Ending::Reset(d) => (d, true),
        };
        let by = by.map_or(Side::Unknown, |d| if d == requests { Side::Client } else { Side::Server });
        if by == Side::Server && !reset {
            self.answers.end_with_connection(&mut self.open, &mut out);
        }
        self.hang_up(by, reset, &mut out);
        if by != Side::Server || reset {
            self.asks.drop_body();
        }
    }

    fn hang_up<F: FnMut(Event)>(&mut self, by: Side, reset: bool, out: &mut Out<'_, F>) {
        if self.answers.may_have_missed() {
            // The answer's end may be among what is missing.
            self.answers.conclude(&mut self.open, AnswerEnd::Unseen, out);
        }
        for open in self.open.iter_mut().filter(|open| !open.hung_up) {
            open.hung_up = true;
            out.give(Event::HangUp {
                n: open.n,
                by,
                reset,
                request_whole: open.whole,
                answer_begun: open.answer_begun,
            });
        }
    }

    /// The first bytes of a connection.
    fn judge_start<F: FnMut(Event)>(
        &mut self,
        direction: Direction,
        stretch: Stretch<'_>,
        out: &mut Out<'_, F>,
    ) {
        const ANSWER: &[u8] = b"HTTP/";
        let Stretch::Bytes { bytes, opens } = stretch else {
            // Its beginning is gone: from here on it is one that was joined.
            self.from_start = false;
            out.from_start = false;
            self.roles = Roles::Unknown([Collected::new(), Collected::new()]);
            self.asks = Asks::new(Stage::Lost);
            self.answers = Answers::new(Stage::Lost);
            self.judge_joined(direction, stretch, out);
            return;
        };
        let Roles::Unknown(first) = &mut self.roles else { return };
        let Some(first) = first.get_mut(index(direction)) else { return };
        let begun = first.peek();
        let prefix: Vec<u8> = begun.iter().chain(bytes).copied().take(ANSWER.len()).collect();
        let requests = if prefix == ANSWER {
            other(direction)
        } else if ANSWER.starts_with(&prefix) {
            first.push(bytes);
            return;
        } else {
            direction
        };
        let begun = first.take();
        // What the other side has said so far fits into the first bytes of an answer.
        let Roles::Unknown(mut both) = std::mem::replace(&mut self.roles, Roles::Known(requests)) else {
            return;
        };
        let others = both.get_mut(index(other(direction))).map(Collected::take).unwrap_or_default();
        let begun = Stretch::Bytes { bytes: &begun, opens };
        let others = Stretch::Bytes { bytes: &others, opens };
        let rest = Stretch::Bytes { bytes, opens };
        out.requests = Some(requests);
        for (direction, stretch) in [(other(direction), others), (direction, begun), (direction, rest)] {
            if direction == requests {
                self.ask(stretch, out);
            } else {
                self.answer(stretch, out);
            }
        }
    }

    /// Bytes of a connection of which the beginning was not seen: waits for the whole head of a request where a call
    /// begins. No JSON text can hold one: it has no raw line ends inside its strings.
    fn judge_joined<F: FnMut(Event)>(
        &mut self,
        direction: Direction,
        stretch: Stretch<'_>,
        out: &mut Out<'_, F>,
    ) {
        let Roles::Unknown(first) = &mut self.roles else { return };
        let Some(trial) = first.get_mut(index(direction)) else { return };
        let Stretch::Bytes { bytes, opens } = stretch else {
            trial.take();
            return;
        };
        out.counters.count_lost_bytes(bytes);
        let Some((request, rest)) = try_head(trial, bytes, opens) else { return };
        self.roles = Roles::Known(direction);
        out.requests = Some(direction);
        self.asks.regain();
        self.begin(&request, out);
        self.ask(Stretch::Bytes { bytes: rest, opens: false }, out);
    }

    /// Takes a stretch of the requests.
    fn ask<F: FnMut(Event)>(&mut self, stretch: Stretch<'_>, out: &mut Out<'_, F>) {
        match stretch {
            Stretch::Bytes { bytes, opens } => self.ask_bytes(bytes, opens, out),
            Stretch::Missing(len) => {
                if let Some(request) = self.asks.cut() {
                    self.begin(&request, out);
                    return self.lose_asks(Lost::HoleAtHead, out);
                }
                let Some(why) = self.asks.skip(len, &mut self.open, &mut self.answers, out) else { return };
                self.lose_asks(why, out);
            }
            Stretch::Disorder => self.lose_asks(Lost::Disorder, out),
        }
    }

    fn ask_bytes<F: FnMut(Event)>(&mut self, mut bytes: &[u8], opens: bool, out: &mut Out<'_, F>) {
        let mut opens = opens;
        while !bytes.is_empty() && !self.dead {
            bytes = match self.asks.stage() {
                Stage::Head => self.ask_head(bytes, out),
                Stage::Fixed(_) | Stage::Chunks(_) => {
                    match self.asks.body(bytes, &mut self.open, &mut self.answers, out) {
                        Ok(rest) => rest,
                        Err(why) => return self.give_up(why, out),
                    }
                }
                _ => self.ask_search(bytes, opens, out),
            };
            opens = false;
        }
    }

    fn ask_head<'b, F: FnMut(Event)>(&mut self, bytes: &'b [u8], out: &mut Out<'_, F>) -> &'b [u8] {
        let (parsed, rest) = match self.asks.head(bytes) {
            Head::More => return &[],
            Head::Refused(why) => (Err(why), bytes),
            Head::Here(head, rest) => (request_of(head), rest),
            Head::Collected(head, rest) => (request_of(&head), rest),
        };
        match parsed {
            Ok(request) => self.begin(&request, out),
            Err(why) => self.give_up(why, out),
        }
        rest
    }

    fn ask_search<'b, F: FnMut(Event)>(
        &mut self,
        bytes: &'b [u8],
        opens: bool,
        out: &mut Out<'_, F>,
    ) -> &'b [u8] {
        out.counters.count_lost_bytes(bytes);
        let Some((request, rest)) = self.asks.try_head(bytes, opens) else { return &[] };
        // A client that has its answers complete begins with a head. While one is on its way, this is part of a body.
        let quiet = if self.open.is_empty() {
            self.answers.stage().is_unknown() || self.answers.is_between()
        } else {
            self.answers.may_have_missed() && !self.pipelined
        };
        if !quiet {
            return &[];
        }
        self.asks.regain();
        self.answers.conclude(&mut self.open, AnswerEnd::Next, out);
        out.regained(true);
        self.begin(&request, out);
        rest
    }

    fn begin<F: FnMut(Event)>(&mut self, request: &Request, out: &mut Out<'_, F>) {
        if self.answers.may_have_missed() && !self.pipelined {
            self.answers.conclude(&mut self.open, AnswerEnd::Next, out);
        }
        if self.open.is_empty() {
            self.answers.expect();
        } else {
            self.pipelined = true;
        }
        if self.open.len() >= super::PIPELINED_MAX {
            return self.give_up(Unread::TooManyPipelined, out);
        }
        let n = self.asks.number();
        self.open.push_back(Open::new(n, request.method, request.route, request.expects_continue));
        out.counters.requests += 1;
        out.counters.health_checks += u64::from(request.route == Route::Health);
        out.give(Event::RequestBegun { n, method: request.method, route: request.route });
        if request.method == Method::Head {
            // An answer that came early was read as one with a body.
            self.answers.drop_early();
        }
        self.asks.begin(n, request, &mut self.open, &mut self.answers, out);
    }

    fn lose_asks<F: FnMut(Event)>(&mut self, why: Lost, out: &mut Out<'_, F>) {
        self.answers.drop_early();
        if self.asks.lose(&mut self.open, out) {
            out.lost(true, why);
        }
    }

    /// Takes a stretch of the answers.
    fn answer<F: FnMut(Event)>(&mut self, stretch: Stretch<'_>, out: &mut Out<'_, F>) {
        let known = !self.asks.stage().is_lost();
        match stretch {
            Stretch::Bytes { bytes, opens } => {
                let waited = self.open.front().is_some_and(|open| open.waits && !open.whole);
                match self.answers.bytes(bytes, opens, known, &mut self.open, out) {
                    Ok(()) => {}
                    Err(why) => return self.give_up(why, out),
                }
                if waited && self.asks.is_refused(&self.open) {
                    self.lose_asks(Lost::NotContinued, out);
                }
            }
            Stretch::Missing(len) => {
                if let Some(why) = self.answers.skip(len, &mut self.open, out) {
                    out.lost(false, why);
                }
            }
            Stretch::Disorder => {
                if self.answers.disorder() {
                    out.lost(false, Lost::Disorder);
                }
            }
        }
    }

    fn give_up<F: FnMut(Event)>(&mut self, why: Unread, out: &mut Out<'_, F>) {
        if self.dead {
            return;
        }
        let requests = self.requests();
        *self = Self::new(false, Stage::Lost);
        if let Some(requests) = requests {
            self.roles = Roles::Known(requests);
        }
        self.dead = true;
        out.counters.count_unread(why);
        out.give(Event::Unread(why));
    }
}

fn request_of(head: &[u8]) -> Result<Request, Unread> {
    if head.starts_with(b"PRI * HTTP/2.0\r\n") { Err(Unread::Http2) } else { head::request(head) }
}

/// Collects what may be the head of a request where a call begins; once it is whole, whether it is one.
pub(super) fn try_head<'b>(
    trial: &mut Collected,
    bytes: &'b [u8],
    opens: bool,
) -> Option<(Request, &'b [u8])> {
    if opens && may_be_request(bytes) {
        trial.take();
    } else if trial.is_empty() {
        return None;
    }
    let (parsed, rest) = match trial.add(bytes, check_request) {
        Head::More => return None,
        Head::Refused(_) => {
            trial.take();
            return None;
        }
        Head::Here(head, rest) => (head::request(head), rest),
        Head::Collected(head, rest) => (head::request(&head), rest),
    };
    parsed.ok().filter(|request| request.names_host).map(|request| (request, rest))
}

/// What is said of an answer that was not read.
pub(super) const fn nothing_read(route: Route) -> Answered {
    if route.is_work() { Answered::Outcome(Outcome::Unknown) } else { Answered::Nothing }
}
