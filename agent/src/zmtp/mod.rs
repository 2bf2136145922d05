//! Incremental ZMTP 3.0/3.1 decoder for one direction of one connection (NULL mechanism).
//!
//! Pure: no I/O, no clock, no unsafe code. It keeps at most [`FRAMES_KEPT`] frames of a message and
//! [`BYTES_KEPT`] bytes of each frame; everything else is followed by length only. Bytes go in with
//! [`Decoder::feed`], stretches of known length without bytes with [`Decoder::skip`].

mod acquire;
mod decoder;
mod greeting;
mod multipart;

pub use acquire::{Grammar, Recognition};
pub use decoder::{Confidence, Decoder, Event, Lost};
pub use greeting::{SocketType, Unsupported};
pub use multipart::{BYTES_KEPT, FRAMES_KEPT, Frame, FrameMeta, Multipart};
