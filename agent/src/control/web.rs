//! The HTTP half of one connection: pieces of its streams in, steps of requests for the rooms out.
//!
//! Pure: no I/O, no clock. It keeps of a request what the rooms need to hear together (when it began, its status, a
//! registration until it is answered), never more than [`Decoder`] lets out.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::control::counters::{ConnectionState, Counters};
use crate::event::{Direction, Mono, NotCaptured};
pub(super) use crate::http::event::Unread;
use crate::http::event::{AnswerEnd, Answered, Control, Event, Outcome, RankRegistration, Route, Said, Side};
use crate::http::{Decoder, Ending, PIPELINED_MAX, Standing, Stretch};
use crate::rooms::model::{BootstrapStep, Connection, Input, RequestStep};
use crate::stream::Piece;

/// A connection without a head, a body or a batch under way holds no more than this, bytes: its list of open requests.
const IDLE_HELD: usize = 512;

/// What the first bytes of a stream, or those of a call in its middle, look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Requests, or TLS: the decoder tells them apart.
    Asks,
    /// Answers.
    Answers,
}

impl Look {
    /// Of the first bytes of a stream: a method, `HTTP/`, or a TLS record, none of which begins ZMTP.
    pub(super) fn at_start(bytes: &[u8]) -> Option<Self> {
        const TLS: u8 = 0x16;
        match bytes.first()? {
            // A method that begins with H is HEAD; of one byte the decoder decides.
            b'H' if bytes.get(1).is_none_or(|b| *b == b'T') => Some(Self::Answers),
            b'A'..=b'Z' | &TLS => Some(Self::Asks),
            _ => None,
        }
    }

    /// Of a call in the middle of a stream of which nothing is known.
    pub(super) fn in_middle(bytes: &[u8]) -> Option<Self> {
        const ASKS: [&[u8]; 5] = [b"GET /", b"POST /", b"PUT /", b"HEAD /", b"DELETE /"];
        if ASKS.iter().any(|b| bytes.starts_with(b)) {
            Some(Self::Asks)
        } else if bytes.starts_with(b"HTTP/1.") || is_event_chunk(bytes) {
            Some(Self::Answers)
        } else {
            None
        }
    }
}

/// Whether this is a chunk of server-sent events, as uvicorn sends each in a call of its own.
fn is_event_chunk(bytes: &[u8]) -> bool {
    let digits = bytes.iter().take_while(|b| b.is_ascii_hexdigit()).count();
    (1..=6).contains(&digits) && bytes.get(digits..).is_some_and(|rest| rest.starts_with(b"\r\ndata: "))
}

/// A request of which the rooms are told.
#[derive(Clone, Debug)]
struct Ask {
    n: u64,
    what: What,
    status: Option<u16>,
    /// Its last byte has passed, so what it is has been told.
    whole: bool,
    first_byte: bool,
    /// Its answer was over before it was.
    over: Option<(AnswerEnd, Outcome)>,
    /// Told as ended, or as out of sight: it is not told so again.
    closed: bool,
}

impl Ask {
    /// One that was followed by another agent.
    const fn whole(n: u64, what: What) -> Self {
        let (status, over) = (None, None);
        Self { n, what, status, whole: true, first_byte: false, over, closed: false }
    }
}

/// What it is.
#[derive(Clone, Debug)]
enum What {
    Work,
    Control(Option<Box<Control>>),
    /// PUT `/route`.
    Rank(Option<Box<RankRegistration>>),
    /// GET `/route`, or `/query_dp_ranks`.
    Query,
    DpRank(Option<(u64, u32)>),
}

impl What {
    const fn of(route: Route) -> Option<Self> {
        match route {
            Route::Generate | Route::Completions | Route::ChatCompletions | Route::OtherWork => {
                Some(Self::Work)
            }
            Route::Control(_) => Some(Self::Control(None)),
            // Until its method is known.
            Route::Route | Route::QueryDpRanks => Some(Self::Query),
            Route::RegisterDpRank => Some(Self::DpRank(None)),
            Route::Health | Route::Status | Route::Other => None,
        }
    }

    const fn is_bootstrap(&self) -> bool {
        matches!(self, Self::Rank(_) | Self::Query | Self::DpRank(_))
    }
}

/// What a stretch said of the connection as a whole.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heard {
    /// A request was seen.
    pub(super) judged: bool,
    /// It is not followed any more.
    pub(super) unread: Option<Unread>,
}

impl Heard {
    /// What a later stretch says goes with it.
    pub(super) fn add(&mut self, later: Self) {
        self.judged |= later.judged;
        self.unread = self.unread.or(later.unread);
    }
}

/// The HTTP half of a connection.
#[derive(Debug)]
pub(super) struct Web {
    decoder: Decoder,
    /// The stream that seems to carry the requests, until the decoder knows.
    seems: Direction,
    asks: SmallVec<[Ask; 1]>,
    /// Requests counted before the decoder at hand: numbers are never used twice on a connection.
    before: u64,
    /// Number of the next request.
    next: u64,
    /// The peer has said its last, and this is where; not everything before it has been read.
    pub(super) fin: Option<u32>,
    /// One of its sides has said its last.
    ended: bool,
}

/// A request that waits for its answer, as it is written down: nothing of what it says. Part of the state file's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Waiting {
    /// Status of its answer, if that has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    status: Option<u16>,
    standing: Standing,
}

/// Who is told, and as what.
pub(super) struct Out<'c, F> {
    pub(super) connection: Connection,
    pub(super) counters: &'c mut Counters,
    pub(super) http: &'c mut crate::http::Counters,
    pub(super) sink: &'c mut F,
}

impl Web {
    /// Of a connection whose first bytes are here, on `direction`.
    pub(super) fn at_start(direction: Direction, look: Look) -> Self {
        Self::new(Decoder::at_start(), direction, look)
    }

    /// Of a connection joined in its middle.
    pub(super) fn joined(direction: Direction, look: Look) -> Self {
        Self::new(Decoder::joined(), direction, look)
    }

    fn new(decoder: Decoder, direction: Direction, look: Look) -> Self {
        let seems = match look {
            Look::Asks => direction,
            Look::Answers => other(direction),
        };
        Self { decoder, seems, asks: SmallVec::new(), before: 0, next: 0, fin: None, ended: false }
    }

    /// Of a connection that another agent followed up to request `next`: of those that were `open` (and whether a bootstrap
    /// server was asked) nothing more can be heard.
    pub(super) fn resumed(requests: Direction, next: u64, open: &[(u64, bool)]) -> Self {
        let what = |bootstrap| if bootstrap { What::Query } else { What::Work };
        let open = open.iter().take(PIPELINED_MAX);
        let asks = open.map(|(n, bootstrap)| Ask::whole(*n, what(*bootstrap))).collect();
        Self { before: next, next, asks, ..Self::joined(requests, Look::Asks) }
    }

    /// Of a connection whose request `n` waits for its answer, or for the rest of it.
    pub(super) fn waiting(requests: Direction, n: u64, waiting: &Waiting) -> Self {
        let decoder = Decoder::resumed(requests, waiting.standing);
        let ask = Ask { status: waiting.status, ..Ask::whole(n, What::Work) };
        let (before, next) = (n, n.saturating_add(1));
        Self { before, next, asks: SmallVec::from_buf([ask]), ..Self::new(decoder, requests, Look::Asks) }
    }

    /// The only open request, if it asks for work and nothing else is under way or in doubt.
    pub(super) fn waits(&self) -> Option<Waiting> {
        let standing = self.decoder.standing().filter(|_| !self.ended && self.fin.is_none())?;
        let [ask] = self.asks.as_slice() else { return None };
        let is_it = ask.whole && !ask.closed && !ask.first_byte && ask.over.is_none();
        let last = self.next == ask.n.saturating_add(1);
        let waiting = Waiting { status: ask.status, standing };
        (is_it && last && matches!(ask.what, What::Work)).then_some(waiting)
    }

    /// Number of the next request, and of those that the rooms take for open.
    pub(super) fn open(&self) -> (u64, impl Iterator<Item = (u64, bool)> + '_) {
        let open = self.asks.iter().filter(|ask| ask.whole && !ask.closed);
        (self.next, open.map(|ask| (ask.n, ask.what.is_bootstrap())))
    }

    /// The stream that carries the requests.
    pub(super) fn requests(&self) -> Direction {
        self.decoder.requests().unwrap_or(self.seems)
    }

    /// Whether no request has been seen, and the connection not from its beginning.
    pub(super) const fn is_joined(&self) -> bool {
        self.decoder.requests().is_none() && self.decoder.is_lost()
    }

    /// Whether the next byte of that stream begins a request, and an answer may have passed unseen before it.
    pub(super) fn may_have_missed(&self) -> bool {
        self.decoder.awaits_request() && !self.decoder.is_settled()
    }

    pub(super) const fn state(&self) -> ConnectionState {
        if self.decoder.requests().is_none() {
            ConnectionState::HttpPending
        } else if self.decoder.is_lost() && !self.ended {
            ConnectionState::HttpLost
        } else {
            ConnectionState::Http
        }
    }

    /// Memory held for what is under way, bytes.
    pub(super) fn held(&self) -> usize {
        let asks = if self.asks.spilled() { self.asks.capacity() * size_of::<Ask>() } else { 0 };
        self.decoder.held() + asks
    }

    /// Whether more is held than an idle connection needs.
    pub(super) fn is_unfinished(&self) -> bool {
        self.held() > IDLE_HELD
    }

    /// Takes one piece of a stream. `now` is when it was noticed.
    pub(super) fn take<F: FnMut(Input<'_>)>(
        &mut self,
        direction: Direction,
        now: Mono,
        piece: Piece<'_>,
        out: &mut Out<'_, F>,
    ) -> Heard {
        let at = match piece {
            Piece::Bytes { at, .. } => at,
            Piece::Ends { at, .. } => {
                out.counters.count_not_captured(NotCaptured::Middle);
                at
            }
            Piece::Skip { at, reason, .. } => {
                out.counters.count_not_captured(reason);
                at
            }
            Piece::Hole { len, .. } => {
                if direction == self.requests() {
                    out.counters.count_request_hole(len);
                }
                now
            }
            Piece::Overlap { .. } => now,
        };
        let mut heard = Heard::default();
        for stretch in Stretch::of(piece) {
            self.run(at, out, &mut heard, |decoder, counters, sink| {
                decoder.feed(direction, stretch, counters, &mut |event| sink(event));
            });
        }
        heard
    }

    /// The connection, or one of its streams, has ended.
    pub(super) fn end<F: FnMut(Input<'_>)>(&mut self, at: Mono, ending: Ending, out: &mut Out<'_, F>) {
        self.ended = true;
        self.run(at, out, &mut Heard::default(), |decoder, counters, sink| {
            decoder.end(ending, counters, &mut |event| sink(event));
        });
    }

    /// Nothing is known from here on; a head of a request is looked for again.
    pub(super) fn lose_sight<F: FnMut(Input<'_>)>(&mut self, at: Mono, out: &mut Out<'_, F>) {
        let server = self.requests() == Direction::Received;
        let mut tell =
            Tell { at, server, connection: out.connection, counters: out.counters, sink: out.sink };
        for ask in &mut self.asks {
            tell.out_of_sight(ask);
        }
        self.asks = SmallVec::new();
        self.before = self.next;
        self.decoder = Decoder::joined();
    }

    fn run<F: FnMut(Input<'_>)>(
        &mut self,
        at: Mono,
        out: &mut Out<'_, F>,
        heard: &mut Heard,
        act: impl FnOnce(&mut Decoder, &mut crate::http::Counters, &mut dyn FnMut(Event)),
    ) {
        let Out { connection, counters, http, sink } = out;
        let server = self.requests() == Direction::Received;
        let tell = Tell { at, server, connection: *connection, counters, sink: *sink };
        let Self { decoder, asks, before, next, .. } = self;
        let mut listener = Listener { tell, asks, before: *before, next, heard };
        act(decoder, http, &mut |event| listener.hear(event));
    }
}

const fn other(direction: Direction) -> Direction {
    match direction {
        Direction::Sent => Direction::Received,
        Direction::Received => Direction::Sent,
    }
}

/// Tells the rooms.
struct Tell<'c, F> {
    at: Mono,
    server: bool,
    connection: Connection,
    counters: &'c mut Counters,
    sink: &'c mut F,
}

impl<F: FnMut(Input<'_>)> Tell<'_, F> {
    fn request(&mut self, n: u64, step: RequestStep<'_>) {
        let Self { at, server, connection, .. } = *self;
        self.counters.inputs += 1;
        (self.sink)(Input::Request { at, connection, server, n, step });
    }

    fn bootstrap(&mut self, n: u64, step: BootstrapStep<'_>) {
        let Self { at, server, connection, .. } = *self;
        self.counters.inputs += 1;
        (self.sink)(Input::Bootstrap { at, connection, server, n, step });
    }

    fn out_of_sight(&mut self, ask: &mut Ask) {
        if !ask.whole || std::mem::replace(&mut ask.closed, true) {
            return;
        }
        match &ask.what {
            What::Work | What::Control(_) => self.request(ask.n, RequestStep::OutOfSight),
            What::Rank(_) | What::Query | What::DpRank(_) => {
                self.bootstrap(ask.n, BootstrapStep::OutOfSight);
            }
        }
    }

    fn hung_up(&mut self, ask: &mut Ask, by: Side, answer_begun: bool) {
        if std::mem::replace(&mut ask.closed, true) {
            return;
        }
        match &ask.what {
            What::Work | What::Control(_) => {
                self.request(ask.n, RequestStep::HungUp { by, answer_begun });
            }
            What::Rank(_) | What::Query | What::DpRank(_) => self.bootstrap(ask.n, BootstrapStep::HungUp(by)),
        }
    }

    /// What a whole request says.
    fn asked(&mut self, ask: &mut Ask, said: Said) {
        ask.whole = true;
        match said {
            Said::Work(work) => {
                self.request(ask.n, RequestStep::Asked { work: &work });
            }
            Said::Control(control) => {
                self.request(ask.n, RequestStep::Control { call: &control, status: None });
                ask.what = What::Control(Some(Box::new(control)));
            }
            Said::RegisterRank(rank) => ask.what = What::Rank(rank),
            Said::Query(query) => self.bootstrap(ask.n, BootstrapStep::Query(&query)),
            Said::RegisterDpRank(rank) => ask.what = What::DpRank(rank),
            Said::QueryDpRanks(_) => self.bootstrap(ask.n, BootstrapStep::DpQuery),
            Said::Nothing => {}
        }
    }

    /// The status of the answer to a whole request is known.
    fn status(&mut self, ask: &Ask, status: u16) {
        match &ask.what {
            // Weights change until the answer is over.
            What::Control(Some(call)) if **call != Control::UpdateWeights => {
                self.request(ask.n, RequestStep::Control { call, status: Some(status) });
            }
            What::Work | What::Control(_) => {}
            _ if status != 200 => self.bootstrap(ask.n, BootstrapStep::Refused(status)),
            What::Rank(Some(rank)) => self.bootstrap(ask.n, BootstrapStep::Rank(rank)),
            What::DpRank(Some((room, rank))) => {
                self.bootstrap(ask.n, BootstrapStep::DpRank { room: *room, rank: *rank });
            }
            What::Rank(None) | What::DpRank(None) | What::Query => {}
        }
    }

    /// The answer to a whole request is over.
    fn answered(&mut self, ask: &mut Ask, how: AnswerEnd, said: &Answered) {
        let (n, status) = (ask.n, ask.status);
        let outcome = match said {
            Answered::Outcome(outcome) => *outcome,
            _ => Outcome::Unknown,
        };
        match (&ask.what, status) {
            (What::Work, _) => self.request(n, RequestStep::Answered { status, how, outcome }),
            (What::Control(Some(call)), Some(_)) if **call == Control::UpdateWeights => {
                self.request(n, RequestStep::Control { call, status });
            }
            (What::Query, Some(200)) => match said {
                Answered::Rank(ip, port) => {
                    self.bootstrap(n, BootstrapStep::RankIs(SocketAddr::new(*ip, *port)));
                }
                Answered::Topology(topology) => self.bootstrap(n, BootstrapStep::Topology(topology)),
                Answered::DpRanks(Some(ranks)) => self.bootstrap(n, BootstrapStep::DpRanks(ranks)),
                _ => return self.out_of_sight(ask),
            },
            (_, Some(_)) => {}
            // What became of it is not known.
            (_, None) => return self.out_of_sight(ask),
        }
        ask.closed = true;
    }
}

/// Takes what the decoder says.
struct Listener<'c, F> {
    tell: Tell<'c, F>,
    asks: &'c mut SmallVec<[Ask; 1]>,
    before: u64,
    next: &'c mut u64,
    heard: &'c mut Heard,
}

impl<F: FnMut(Input<'_>)> Listener<'_, F> {
    fn place(&self, n: u64) -> Option<usize> {
        let n = self.before.saturating_add(n);
        self.asks.iter().position(|ask| ask.n == n)
    }

    fn hear(&mut self, event: Event) {
        match event {
            Event::Judged { requests, .. } => {
                self.tell.server = requests == Direction::Received;
                self.heard.judged = true;
            }
            Event::Unread(why) => {
                self.lose_all();
                self.heard.unread = Some(why);
            }
            Event::RequestBegun { n, route, .. } => self.begin(n, route),
            Event::RequestWhole { n, said, .. } => self.whole(n, said),
            Event::AnswerHead { n, status, .. } => self.head(n, status),
            Event::AnswerFirstBodyByte { n } => self.first_byte(n),
            Event::AnswerEnd { n, how, said } => self.over(n, how, &said),
            Event::HangUp { n, by, answer_begun, .. } => {
                let Some(i) = self.place(n) else { return };
                match self.asks.get_mut(i) {
                    Some(ask) if ask.whole => self.tell.hung_up(ask, by, answer_begun),
                    // It never reached the engine whole: nothing was told of it.
                    _ => drop(self.asks.remove(i)),
                }
            }
            Event::Lost { direction, .. } => {
                let answers = (direction == Direction::Sent) == self.tell.server;
                if answers {
                    self.lose_all();
                }
            }
            Event::Interim { .. } | Event::Regained { .. } => {}
        }
    }

    fn lose_all(&mut self) {
        for ask in self.asks.iter_mut() {
            self.tell.out_of_sight(ask);
        }
    }

    fn begin(&mut self, n: u64, route: Route) {
        let n = self.before.saturating_add(n);
        *self.next = n.saturating_add(1);
        self.tell.counters.count_request(route);
        // What was answered before it was whole, and never was.
        self.asks.retain(|ask| ask.over.is_none());
        let Some(what) = What::of(route).filter(|_| self.asks.len() <= PIPELINED_MAX) else { return };
        let (whole, first_byte, closed) = (false, false, false);
        self.asks.push(Ask { n, what, status: None, whole, first_byte, over: None, closed });
    }

    fn whole(&mut self, n: u64, said: Said) {
        let Some(i) = self.place(n) else { return };
        let Some(ask) = self.asks.get_mut(i) else { return };
        if said == Said::Nothing {
            self.asks.remove(i);
            return;
        }
        self.tell.asked(ask, said);
        if let Some(status) = ask.status {
            self.tell.status(ask, status);
        }
        if ask.first_byte && matches!(ask.what, What::Work) {
            self.tell.request(ask.n, RequestStep::FirstBodyByte);
        }
        if let Some((how, outcome)) = ask.over {
            self.tell.answered(ask, how, &Answered::Outcome(outcome));
            self.asks.remove(i);
        }
    }

    fn head(&mut self, n: u64, status: u16) {
        let Some(ask) = self.place(n).and_then(|i| self.asks.get_mut(i)) else { return };
        ask.status = Some(status);
        if ask.whole {
            self.tell.status(ask, status);
        }
    }

    fn first_byte(&mut self, n: u64) {
        let Some(ask) = self.place(n).and_then(|i| self.asks.get_mut(i)) else { return };
        ask.first_byte = true;
        if ask.whole && matches!(ask.what, What::Work) {
            self.tell.request(ask.n, RequestStep::FirstBodyByte);
        }
    }

    fn over(&mut self, n: u64, how: AnswerEnd, said: &Answered) {
        let Some(i) = self.place(n) else { return };
        let Some(ask) = self.asks.get_mut(i) else { return };
        if ask.whole {
            self.tell.answered(ask, how, said);
            self.asks.remove(i);
        } else {
            let outcome = match said {
                Answered::Outcome(outcome) => *outcome,
                _ => Outcome::Unknown,
            };
            ask.over = Some((how, outcome));
        }
    }
}
