//! A multipart message as it is kept: the first bytes of its first frames, and all lengths of those.
//!
//! Pure data. A message borrows either the bytes of the call it came in whole, or the decoder's own store.

use arrayvec::ArrayVec;

/// Frames kept of one message. The longest layout known has 25 (SGLang 0.5.23, NIXL REGISTER).
pub const FRAMES_KEPT: usize = 32;

/// Bytes kept of one frame. The longest field that is read is a session id (`host:port`, at most 261 for
/// the longest host name; in practice an address) or an agent name of 36 bytes.
pub const BYTES_KEPT: usize = 256;

/// Where a frame's kept bytes lie, and how long the frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameMeta {
    /// Offset of its first kept byte.
    pub at: u32,
    /// Bytes kept of it, at most [`BYTES_KEPT`].
    pub kept: u16,
    /// Its length on the wire.
    pub len: u64,
}

/// The first frames of a message, on the stack.
pub(super) type Frames = ArrayVec<FrameMeta, FRAMES_KEPT>;

/// One frame of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Its first bytes, at most [`BYTES_KEPT`]; fewer when a stretch of it was not captured.
    pub bytes: &'a [u8],
    /// Its length on the wire.
    pub len: u64,
}

impl<'a> Frame<'a> {
    /// The whole frame, `None` when only a part of it was kept.
    pub fn whole(&self) -> Option<&'a [u8]> {
        (u64::try_from(self.bytes.len()) == Ok(self.len)).then_some(self.bytes)
    }

    /// Whether bytes are missing that would have been kept.
    pub fn is_cut(&self) -> bool {
        self.bytes.len() < BYTES_KEPT && self.whole().is_none()
    }

    /// Whether the frame has no bytes.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// A message: its first frames and how many it has in all.
#[derive(Clone, Copy, Debug)]
pub struct Multipart<'a> {
    store: &'a [u8],
    frames: &'a [FrameMeta],
    total: u32,
    /// The store is the call that the message came in whole.
    in_call: bool,
}

impl<'a> Multipart<'a> {
    /// A view of `frames` in `store`; `total` counts frames that were not kept too.
    pub const fn new(store: &'a [u8], frames: &'a [FrameMeta], total: u32) -> Self {
        Self { store, frames, total, in_call: false }
    }

    /// The same of a message that `call` holds whole.
    pub(super) const fn in_call(call: &'a [u8], frames: &'a [FrameMeta], total: u32) -> Self {
        Self { store: call, frames, total, in_call: true }
    }

    /// All of frame `index`, also what is behind the bytes that are kept, as long as the call that it came in is at hand.
    pub(crate) fn entire(&self, index: usize) -> Option<&'a [u8]> {
        if !self.in_call {
            return self.frame(index)?.whole();
        }
        let meta = self.frames.get(index)?;
        let at = usize::try_from(meta.at).ok()?;
        self.store.get(at..at.checked_add(usize::try_from(meta.len).ok()?)?)
    }

    /// Number of frames on the wire.
    pub const fn count(&self) -> u32 {
        self.total
    }

    /// Frame `index` (from 0), `None` when there is none or it was not kept.
    pub fn frame(&self, index: usize) -> Option<Frame<'a>> {
        let meta = self.frames.get(index)?;
        let at = usize::try_from(meta.at).ok()?;
        let bytes = self.store.get(at..at.checked_add(usize::from(meta.kept))?)?;
        Some(Frame { bytes, len: meta.len })
    }

    /// The kept frames in order.
    pub fn frames(&self) -> impl Iterator<Item = Frame<'a>> + '_ {
        (0..self.frames.len()).filter_map(|i| self.frame(i))
    }
}
