//! Joining a stream in its middle: where a known message begins in the bytes of one call.
//!
//! Pure functions over one call's bytes. What a message is known by comes from outside ([`Grammar`]), so
//! that ZMTP knows nothing of SGLang.

use super::multipart::{BYTES_KEPT, FrameMeta, Frames, Multipart};

/// How sure a message makes us that the bytes before it were a message's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recognition {
    /// Not a known message.
    No,
    /// Fits, but a few bytes of something else would fit as well.
    Weak,
    /// Known, but the tail of a longer message could look like it.
    Plain,
    /// Known by a tag in its first frame: it can only begin here.
    Tagged,
}

/// What the messages of a stream look like.
#[derive(Clone, Copy, Debug)]
pub struct Grammar {
    /// Judges a whole message.
    pub recognise: fn(&Multipart<'_>) -> Recognition,
    /// Whether a first frame with these bytes can begin a known message.
    pub may_begin: fn(&[u8]) -> bool,
}
