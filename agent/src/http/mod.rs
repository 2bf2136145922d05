//! Requests and answers at engine ports and at the bootstrap server, from what is captured of a connection.
//!
//! Pure: no I/O, no clock (whoever feeds it stamps what comes out), no unsafe code.

mod answer;
mod answers;
mod asks;
mod body;
mod chunked;
mod counters;
mod decoder;
pub mod event;
mod framing;
mod head;
mod json;
mod members;
mod scan;

pub use counters::Counters;
pub use decoder::{Decoder, Ending, Stretch};

/// Longest head or trailer that is read, bytes. llhttp (under uvicorn) allows 80 KiB, aiohttp 8190 bytes per line;
/// real ones are below 2 KiB.
pub const HEAD_MAX: usize = 16 << 10;

/// Header fields of one head at most. Real ones have about ten.
pub const HEADERS_MAX: usize = 96;

/// Requests without an answer on one connection at most.
pub const PIPELINED_MAX: usize = 64;

/// Rooms of one batch at most; more are counted.
pub const ROOMS_MAX: usize = 4096;

/// Longest request id that is kept, bytes. The engine's own have 32.
pub const RID_MAX: usize = 128;

/// Bytes of a body's end kept behind a hole, until the body's last byte has come.
pub const WINDOW: usize = 4 << 10;
