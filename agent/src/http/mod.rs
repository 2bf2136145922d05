//! Requests and answers at engine ports and at the bootstrap server, from what is captured of a connection.
//!
//! Pure: no I/O, no clock (whoever feeds it stamps what comes out), no unsafe code. One [`Decoder`] per connection
//! takes both of its streams as [`Stretch`]es, captured or missing, and says [`event::Event`]s. It never fails as a
//! whole, never guesses a length, and holds at most [`HEAD_MAX`] bytes of a head and [`WINDOW`] bytes of a body per
//! stream, beside the lists of rooms and ids that a body names ([`Decoder::held`] counts all of it).
//!
//! **Rooms of a body of which the middle is missing.** From its first byte up to the first hole a body is read
//! forward. Behind the last hole, its end is kept until the last byte has come (its place is known from
//! Content-Length or the last chunk), and then read from there backward: a JSON body ends outside every string, and
//! a quote is a delimiter exactly if an even number of backslashes stands before it. So far as that walk comes, it
//! is certain what is a key, what is text, and how deep it lies; text that quotes a key has its quotes escaped and
//! is passed over as a whole. Only members of the outermost object count. What lies between two holes is not read.
//!
//! What it cannot tell is [`event::Rooms::NotSeen`], never "no room": a key or its value in a hole or before the last
//! [`WINDOW`] bytes behind one; keys written with escapes; bodies that are compressed, or no JSON; heads that are cut.
//! A room seen at the head is taken although the same key could stand again in the missing bytes (no client and no
//! router writes a key twice). One number for a batch is counted up over its `rid` list; a batch without one is told
//! as its first room.
//!
//! **Which answer belongs to which request.** By order, while both positions are known. Behind a hole in the answers
//! nothing is told of those to the requests open then. A position is regained at the whole head of a message where a
//! call begins; that of the requests only when no answer is on its way. Text in JSON cannot pass for a head: it has no
//! raw line ends.
//!
//! **Nothing of a body but the fields named in [`event`] leaves this module**, or is held by it once the request or
//! answer is over. Paths that are not known are not kept, nor headers, nor ids that are not printable ASCII.

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
mod standing;

pub use counters::Counters;
pub use decoder::{Decoder, Ending, Stretch};
pub use standing::{Rest, Standing};

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
