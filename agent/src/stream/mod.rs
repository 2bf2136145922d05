//! Per connection and direction: where in the stream the bytes of a call lie.
//!
//! Pure: no I/O, no clock, no unsafe code. Offsets come from TCP's own sequence numbers, so every byte that
//! was not seen shows as a hole. Calls out of order are held back for a moment, within bounds.

mod lane;
mod table;

pub use lane::{Call, Held, Lane, Piece, WINDOW};
pub use table::Table;
