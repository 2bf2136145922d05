//! One direction of one connection: calls in, pieces of the stream in order out.

use crate::event::{Body, Mono, NotCaptured, SECOND};

/// How long a call waits for an earlier one. Two threads that use one socket report out of order by
/// microseconds (8 µs measured between two processors); what comes later than this never comes.
pub const WINDOW: u64 = SECOND / 20;

/// Calls held back per direction.
const HELD_CALLS: usize = 16;

/// One call's bytes as the source reports them.
#[derive(Clone, Copy, Debug)]
pub struct Call<'a> {
    /// When.
    pub at: Mono,
    /// Sequence number just behind its last byte.
    pub end: u32,
    /// Its length.
    pub len: u32,
    /// Its bytes.
    pub body: Body<'a>,
    /// The stream may have ended: a FIN then counts one in `end`.
    pub fin: bool,
}

/// A stretch of the stream, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece<'a> {
    /// Bytes of one call.
    Bytes {
        /// When the call was made.
        at: Mono,
        /// Sequence number of the first.
        start: u32,
        /// They.
        bytes: &'a [u8],
    },
    /// A call of which the two ends are here; what lies between them is not.
    Ends {
        /// When the call was made.
        at: Mono,
        /// Sequence number of its first byte.
        start: u32,
        /// How many bytes it moved.
        len: u32,
        /// Its first bytes.
        head: &'a [u8],
        /// Its last bytes.
        tail: &'a [u8],
    },
    /// A call whose bytes are not here.
    Skip {
        /// When the call was made.
        at: Mono,
        /// Sequence number of its first byte.
        start: u32,
        /// How many.
        len: u32,
        /// Why.
        reason: NotCaptured,
    },
    /// Bytes that no call brought.
    Hole {
        /// Sequence number of the first.
        start: u32,
        /// How many.
        len: u64,
    },
    /// A call that reports bytes reported before: which bytes are whose is not known.
    Overlap {
        /// How many bytes it reports.
        len: u32,
    },
}

/// Bytes held back in all directions of all connections together.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    used: usize,
    max: usize,
}

impl Held {
    /// Nothing held; at most `max` bytes.
    pub const fn new(max: usize) -> Self {
        Self { used: 0, max }
    }

    /// Bytes held now.
    pub const fn used(&self) -> usize {
        self.used
    }
}

#[derive(Clone, Debug)]
struct Waiting {
    at: Mono,
    start: u64,
    len: u32,
    body: Kept,
}

/// Bytes of a call that is held back.
#[derive(Clone, Debug)]
enum Kept {
    Whole(Box<[u8]>),
    /// Head and tail, and where the tail begins.
    Ends(Box<[u8]>, usize),
    Absent(NotCaptured),
}

impl Kept {
    fn of(body: Body<'_>) -> Self {
        match body {
            Body::Whole(bytes) => Self::Whole(bytes.into()),
            Body::Ends { head, tail } => Self::Ends([head, tail].concat().into(), head.len()),
            Body::Absent(reason) => Self::Absent(reason),
        }
    }

    fn body(&self) -> Body<'_> {
        match self {
            Self::Whole(bytes) => Body::Whole(bytes),
            Self::Ends(bytes, at) => {
                let (head, tail) = bytes.split_at_checked(*at).unwrap_or((bytes, &[]));
                Body::Ends { head, tail }
            }
            Self::Absent(reason) => Body::Absent(*reason),
        }
    }
}

impl Waiting {
    /// What it costs of the common budget.
    fn cost(&self) -> usize {
        let bytes = match &self.body {
            Kept::Whole(bytes) | Kept::Ends(bytes, _) => bytes.len(),
            Kept::Absent(_) => 0,
        };
        size_of::<Self>() + bytes
    }
}

/// A stream is not muted for longer: a quarter of what sequence numbers can tell apart.
const FARTHEST: u64 = 1 << 30;

/// One direction of one connection. Positions are sequence numbers unwrapped to 64 bits.
#[derive(Clone, Debug, Default)]
pub struct Lane {
    /// Position of the stream's first byte, where known.
    base: Option<u64>,
    /// Position of the next byte expected; `None` before the first call.
    next: Option<u64>,
    /// Calls that wait for an earlier one, by position.
    waiting: Vec<Waiting>,
}

/// First unwrapped position: one turn up, so that positions before it exist.
const TURN: u64 = 1 << 32;

impl Lane {
    /// A lane of which nothing is known.
    pub const fn new() -> Self {
        Self { base: None, next: None, waiting: Vec::new() }
    }

    /// A lane whose next byte has this sequence number; where its stream began is not known any more.
    pub fn resumed(next: u32) -> Self {
        Self { base: None, next: Some(TURN + u64::from(next)), waiting: Vec::new() }
    }

    /// Says where the stream began and that nothing of it has passed yet. Without effect once it has.
    pub fn begin(&mut self, base: u32) {
        if self.next.is_none() {
            self.base = Some(TURN + u64::from(base));
            self.next = self.base;
        }
    }

    /// Offset in the stream of the next byte expected, where its beginning is known.
    pub fn offset(&self) -> Option<u64> {
        self.next?.checked_sub(self.base?)
    }

    /// Sequence number of the next byte expected.
    pub fn next(&self) -> Option<u32> {
        self.next.map(low)
    }

    /// Whether calls are held back.
    pub fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Takes one call and gives `out` what is in order now.
    pub fn push(&mut self, call: &Call<'_>, held: &mut Held, out: &mut dyn FnMut(Piece<'_>)) {
        let Some(next) = self.next else {
            let start = (TURN + u64::from(call.end)).saturating_sub(u64::from(call.len));
            self.deliver(start, call, out);
            return;
        };
        let start = nearest(next, call.end).saturating_sub(u64::from(call.len));
        if start == next {
            self.deliver(start, call, out);
            self.drain(held, out);
        } else if start == next.saturating_add(1) && call.fin && self.waiting.is_empty() {
            // The FIN was counted by the call that drained the stream.
            self.deliver(next, call, out);
        } else if start < next {
            self.next = Some(next.max(start.saturating_add(u64::from(call.len))));
            out(Piece::Overlap { len: call.len });
            self.drain(held, out);
        } else {
            self.hold(start, call, held, out);
        }
    }

    /// Takes one call of a stream that its source mutes from time to time: what lies before it is missing at once, not
    /// waited for. `fin` says here that `end` does count a FIN, unless the call begins where the stream stands.
    pub fn push_on(&mut self, call: &Call<'_>, held: &mut Held, out: &mut dyn FnMut(Piece<'_>)) {
        let start = call.end.wrapping_sub(call.len);
        // The FIN was counted by the call that drained the stream.
        let early = u32::from(call.fin && self.next() != Some(start));
        self.pass_to(start.wrapping_sub(early), held, out);
        self.push(&Call { end: call.end.wrapping_sub(early), fin: false, ..*call }, held, out);
        while self.is_waiting() {
            self.jump(held, out);
        }
    }

    /// Everything up to sequence number `end` has passed; what of it no call brought is missing. Without effect where the
    /// stream is further already, or farther away than anything that can have passed unseen.
    pub fn pass_to(&mut self, end: u32, held: &mut Held, out: &mut dyn FnMut(Piece<'_>)) {
        let Some(next) = self.next else { return };
        let end = nearest(next, end);
        if end <= next || end - next > FARTHEST {
            return;
        }
        while self.waiting.first().is_some_and(|first| first.start <= end) {
            self.jump(held, out);
        }
        let Some(next) = self.next else { return };
        if end > next {
            out(Piece::Hole { start: low(next), len: end - next });
            self.next = Some(end);
        }
    }

    /// Gives up waiting for calls that are overdue at `now`.
    pub fn expire(&mut self, now: Mono, held: &mut Held, out: &mut dyn FnMut(Piece<'_>)) {
        while self.waiting.iter().any(|w| now.since(w.at) >= WINDOW) {
            self.jump(held, out);
        }
    }

    /// Gives up waiting altogether; `end` is where the socket itself says that the stream stands (a FIN may
    /// count one).
    pub fn finish(&mut self, end: Option<u32>, held: &mut Held, out: &mut dyn FnMut(Piece<'_>)) {
        while !self.waiting.is_empty() {
            self.jump(held, out);
        }
        if let (Some(next), Some(end)) = (self.next, end) {
            let missing = nearest(next, end).saturating_sub(next);
            if missing > 1 {
                out(Piece::Hole { start: low(next), len: missing });
                self.next = Some(next.saturating_add(missing));
            }
        }
    }

    /// Forgets everything, what is held back included.
    pub fn discard(&mut self, held: &mut Held) {
        held.used = self.waiting.iter().fold(held.used, |used, w| used.saturating_sub(w.cost()));
        *self = Self::new();
    }

    fn deliver(&mut self, start: u64, call: &Call<'_>, out: &mut dyn FnMut(Piece<'_>)) {
        self.next = Some(start.saturating_add(u64::from(call.len)));
        if call.len > 0 {
            out(piece(call.at, start, call.len, call.body));
        }
    }

    fn hold(&mut self, start: u64, call: &Call<'_>, held: &mut Held, out: &mut dyn FnMut(Piece<'_>)) {
        let waiting = Waiting { at: call.at, start, len: call.len, body: Kept::of(call.body) };
        held.used = held.used.saturating_add(waiting.cost());
        let place = self.waiting.partition_point(|w| w.start <= start);
        self.waiting.insert(place, waiting);
        if self.waiting.len() > HELD_CALLS || held.used > held.max {
            self.jump(held, out);
        }
        while held.used > held.max && self.is_waiting() {
            self.jump(held, out);
        }
    }

    /// Declares what lies before the first waiting call a hole, and goes on behind it.
    fn jump(&mut self, held: &mut Held, out: &mut dyn FnMut(Piece<'_>)) {
        let (Some(next), Some(first)) = (self.next, self.waiting.first()) else { return };
        if first.start > next {
            out(Piece::Hole { start: low(next), len: first.start - next });
            self.next = Some(first.start);
        }
        self.drain(held, out);
    }

    /// Delivers waiting calls that are in order now.
    fn drain(&mut self, held: &mut Held, out: &mut dyn FnMut(Piece<'_>)) {
        while let (Some(next), Some(first)) = (self.next, self.waiting.first()) {
            if first.start > next {
                return;
            }
            let first = self.waiting.remove(0);
            held.used = held.used.saturating_sub(first.cost());
            let end = first.start.saturating_add(u64::from(first.len));
            if first.start == next {
                out(piece(first.at, first.start, first.len, first.body.body()));
            } else {
                out(Piece::Overlap { len: first.len });
            }
            self.next = Some(next.max(end));
        }
        if self.waiting.is_empty() {
            self.waiting = Vec::new();
        }
    }
}

fn piece(at: Mono, start: u64, len: u32, body: Body<'_>) -> Piece<'_> {
    match body {
        Body::Whole(bytes) => Piece::Bytes { at, start: low(start), bytes },
        Body::Ends { head, tail } => Piece::Ends { at, start: low(start), len, head, tail },
        Body::Absent(reason) => Piece::Skip { at, start: low(start), len, reason },
    }
}

/// The lower 32 bits: the sequence number of a position.
const fn low(position: u64) -> u32 {
    let [a, b, c, d, ..] = position.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

/// The position nearest to `position` that has this sequence number.
fn nearest(position: u64, sequence: u32) -> u64 {
    let distance = sequence.wrapping_sub(low(position)).cast_signed();
    position.saturating_add_signed(i64::from(distance))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;

    fn absent(end: u32, len: u32) -> Call<'static> {
        Call { at: Mono(0), end, len, body: Body::Absent(NotCaptured::TooLong), fin: false }
    }

    fn pieces(lane: &mut Lane, held: &mut Held, calls: &[Call<'_>]) -> Vec<(char, u64)> {
        let mut out = Vec::new();
        for call in calls {
            lane.push(call, held, &mut |piece| {
                out.push(match piece {
                    Piece::Bytes { bytes, .. } => ('b', u64::try_from(bytes.len()).unwrap()),
                    Piece::Ends { len, .. } => ('e', len.into()),
                    Piece::Skip { len, .. } => ('s', len.into()),
                    Piece::Hole { len, .. } => ('h', len),
                    Piece::Overlap { len } => ('o', len.into()),
                });
            });
        }
        out
    }

    #[test]
    fn offsets_go_beyond_32_bits() {
        let (mut lane, mut held) = (Lane::new(), Held::new(1000));
        lane.begin(u32::MAX - 5);
        let step = 1_500_000_000u32;
        let mut end = u32::MAX - 5;
        for _ in 0..10 {
            end = end.wrapping_add(step);
            assert_eq!(pieces(&mut lane, &mut held, &[absent(end, step)]), [('s', u64::from(step))]);
        }
        assert_eq!(lane.offset(), Some(15_000_000_000));
    }

    #[test]
    fn a_call_that_never_comes_holds_back_a_bounded_number_of_others() {
        let (mut lane, mut held) = (Lane::new(), Held::new(100_000));
        lane.begin(0);
        let calls: Vec<_> = (0..20).map(|i| absent(110 + 10 * i, 10)).collect();
        let out = pieces(&mut lane, &mut held, &calls);
        assert_eq!(out.first(), Some(&('h', 100)));
        assert_eq!(out.len(), 21);
        assert!(!lane.is_waiting());
        assert_eq!(held.used(), 0);
    }

    #[test]
    fn a_muted_stream_goes_on_at_once() {
        let (mut lane, mut held) = (Lane::new(), Held::new(1000));
        lane.begin(u32::MAX - 9);
        let out = std::cell::RefCell::new(Vec::new());
        let mut take = |piece: Piece<'_>| {
            out.borrow_mut().push(match piece {
                Piece::Hole { len, .. } => ('h', len),
                Piece::Skip { len, .. } => ('s', u64::from(len)),
                _ => ('?', 0),
            });
        };
        lane.push_on(&absent(10, 10), &mut held, &mut take);
        lane.pass_to(30, &mut held, &mut take);
        lane.pass_to(20, &mut held, &mut take);
        lane.pass_to(30 + (1 << 30) + 1, &mut held, &mut take);
        lane.push_on(&absent(50, 20), &mut held, &mut take);
        assert_eq!(out.take(), [('h', 10), ('s', 10), ('h', 20), ('s', 20)]);
        // With a call that waits.
        lane.push(&absent(80, 10), &mut held, &mut take);
        lane.pass_to(90, &mut held, &mut take);
        assert_eq!(out.take(), [('h', 20), ('s', 10), ('h', 10)]);
        assert_eq!((lane.next(), held.used()), (Some(90), 0));
    }

    #[test]
    fn the_ends_of_a_call_that_waits_are_kept() {
        let (mut lane, mut held) = (Lane::new(), Held::new(1000));
        lane.begin(0);
        let body = Body::Ends { head: b"head", tail: b"tail" };
        lane.push(&Call { body, ..absent(110, 100) }, &mut held, &mut |_| panic!("waits"));
        let mut came = 0;
        lane.push(&absent(10, 10), &mut held, &mut |piece| {
            if let Piece::Ends { start, len, head, tail, .. } = piece {
                assert_eq!((start, len, head, tail), (10, 100, &b"head"[..], &b"tail"[..]));
                came += 1;
            }
        });
        assert_eq!((came, held.used()), (1, 0));
    }

    #[test]
    fn what_is_held_back_in_all_lanes_is_bounded() {
        let mut held = Held::new(10_000);
        let mut lanes: Vec<Lane> = (0..100).map(|_| Lane::new()).collect();
        for lane in &mut lanes {
            lane.begin(0);
            let body = Body::Whole(&[0; 1000]);
            let out = pieces(lane, &mut held, &[Call { body, ..absent(2000, 1000) }]);
            assert!(held.used() <= 10_000);
            assert_eq!(out.is_empty(), lane.is_waiting());
        }
        for lane in &mut lanes {
            lane.discard(&mut held);
        }
        assert_eq!(held.used(), 0);
    }

    #[test]
    fn calls_that_overlap_are_told() {
        let (mut lane, mut held) = (Lane::new(), Held::new(1000));
        lane.begin(0);
        let calls = [absent(100, 100), absent(100, 100), absent(150, 100), absent(250, 100)];
        assert_eq!(pieces(&mut lane, &mut held, &calls), [('s', 100), ('o', 100), ('o', 100), ('s', 100)]);
        // Two that wait and overlap each other.
        let calls = [absent(320, 20), absent(310, 20), absent(290, 40)];
        assert_eq!(pieces(&mut lane, &mut held, &calls), [('s', 40), ('s', 20), ('o', 20)]);
    }
}
