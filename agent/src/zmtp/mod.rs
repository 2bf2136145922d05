//! Incremental ZMTP 3.0/3.1 decoder for one direction of one connection (NULL mechanism).

mod multipart;

pub use multipart::{BYTES_KEPT, FRAMES_KEPT, Frame, FrameMeta, Multipart};
