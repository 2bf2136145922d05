//! One connection: both streams in, events out.

use super::counters::Counters;
use super::event::Event;
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

impl<'a> From<Piece<'a>> for Stretch<'a> {
    /// A call whose head and tail are captured is three: bytes that open it, what is missing, bytes that do not.
    fn from(piece: Piece<'a>) -> Self {
        match piece {
            Piece::Bytes { bytes, .. } => Self::Bytes { bytes, opens: true },
            Piece::Skip { len, .. } => Self::Missing(len.into()),
            Piece::Hole { len, .. } => Self::Missing(len),
            Piece::Overlap { .. } => Self::Disorder,
        }
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

/// Decoder of one connection.
#[derive(Clone, Debug)]
pub struct Decoder {}

impl Decoder {
    /// Of a connection whose first byte is still to come.
    pub const fn at_start() -> Self {
        Self {}
    }

    /// Of a connection joined in its middle.
    pub const fn joined() -> Self {
        Self {}
    }

    /// Takes the next stretch of one stream.
    pub fn feed(
        &mut self,
        direction: Direction,
        stretch: Stretch<'_>,
        counters: &mut Counters,
        sink: &mut impl FnMut(Event),
    ) {
        let _ = (direction, stretch, counters, sink);
    }

    /// Takes the end of the connection or of one of its streams.
    pub fn end(&mut self, ending: Ending, counters: &mut Counters, sink: &mut impl FnMut(Event)) {
        let _ = (ending, counters, sink);
    }

    /// Bytes held now: an unfinished head, the tail of a body.
    pub const fn held(&self) -> usize {
        0
    }

    /// Whether it is not followed any more.
    pub const fn is_dead(&self) -> bool {
        false
    }
}
