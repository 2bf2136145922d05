//! Bytes of one direction that were sent and not yet acknowledged, and the memory they may take in all.

use std::collections::VecDeque;

use super::Repairs;
use super::direction::diff;
use crate::event::{Body, NotCaptured};

/// Most bytes kept per direction until they are acknowledged: above the largest default receive buffer of Linux
/// (`tcp_rmem`, 6 MiB), which bounds what can be unacknowledged. Of more, only the length is kept.
const MAX_UNACKED: usize = 8 << 20;
/// The same where no acknowledgement has been captured yet: perhaps none ever will.
const MAX_BLIND: usize = 64 << 10;
/// Most spans per direction; a span is a run of bytes of one kind.
const MAX_SPANS: usize = 4096;
/// Most bytes kept by all connections together, unacknowledged or out of order.
const MAX_TOTAL: usize = 64 << 20;
/// Empty buffers kept for the next connection that needs one, and how large they may be.
const MAX_SPARE: usize = 16;
const MAX_SPARE_BYTES: usize = 256 << 10;
/// Consumed bytes at the front of a buffer before the rest is moved down.
const COMPACT: usize = 64 << 10;

/// What a capture's connections keep, counted, and their buffers.
#[derive(Debug, Default)]
pub(super) struct Store {
    used: usize,
    spare: Vec<Vec<u8>>,
}

impl Store {
    pub(super) const fn take(&mut self, n: usize) {
        self.used = self.used.saturating_add(n);
    }

    pub(super) const fn give_back(&mut self, n: usize) {
        self.used = self.used.saturating_sub(n);
    }

    pub(super) const fn full(&self) -> bool {
        self.used > MAX_TOTAL
    }

    fn recycle(&mut self, mut buffer: Vec<u8>) {
        if buffer.capacity() > 0 && buffer.capacity() <= MAX_SPARE_BYTES && self.spare.len() < MAX_SPARE {
            buffer.clear();
            self.spare.push(buffer);
        }
    }
}

/// What is known of a run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The bytes.
    Whole,
    /// Their number.
    Absent(NotCaptured),
    /// The capture lacks them.
    Hole,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    len: u32,
    kind: Kind,
}

/// Contiguous runs of bytes from `start` on.
#[derive(Debug, Default)]
pub(super) struct Unacked {
    start: u32,
    spans: VecDeque<Span>,
    /// The bytes of the `Whole` spans, from `head` on.
    buffer: Vec<u8>,
    head: usize,
}

impl Unacked {
    /// Keeps bytes, or their number if there is no room. `blind`: no acknowledgement was captured so far.
    pub(super) fn push_whole(
        &mut self,
        seq: u32,
        bytes: &[u8],
        blind: bool,
        store: &mut Store,
        repairs: &mut Repairs,
    ) {
        let Ok(len) = u32::try_from(bytes.len()) else { return };
        let kept = self.buffer.len() - self.head;
        let limit = if blind { MAX_BLIND } else { MAX_UNACKED };
        if kept + bytes.len() > limit || store.full() || self.spans.len() >= MAX_SPANS {
            repairs.unacked_overflow += u64::from(len);
            return self.push(seq, len, Kind::Absent(NotCaptured::Budget));
        }
        if self.buffer.capacity() == 0 {
            self.buffer = store.spare.pop().unwrap_or_default();
        } else if self.head > COMPACT && self.head > self.buffer.len() / 2 {
            self.buffer.drain(..self.head);
            self.head = 0;
        }
        store.take(bytes.len());
        self.buffer.extend_from_slice(bytes);
        self.push(seq, len, Kind::Whole);
    }

    /// Appends a run that begins at `seq`, which is where the last one ended.
    pub(super) fn push(&mut self, seq: u32, len: u32, kind: Kind) {
        if self.spans.is_empty() {
            self.start = seq;
        }
        let crowded = self.spans.len() >= MAX_SPANS;
        match self.spans.back_mut() {
            Some(last) if last.kind == kind && last.len < 1 << 30 => last.len = last.len.saturating_add(len),
            // Too many kinds in turn: from here on a length is all that is kept.
            Some(last) if crowded && last.kind != Kind::Whole => {
                last.len = last.len.saturating_add(len);
            }
            _ => self.spans.push_back(Span { len, kind }),
        }
    }

    /// Takes out everything before `acked` and gives each run to `out` as (end, length, body).
    pub(super) fn release(
        &mut self,
        acked: u32,
        store: &mut Store,
        out: &mut impl FnMut(u32, u32, Body<'_>),
    ) {
        while let Some(span) = self.spans.front_mut() {
            let covered = diff(acked, self.start).max(0).cast_unsigned().min(span.len);
            if covered == 0 {
                break;
            }
            let end = self.start.wrapping_add(covered);
            match span.kind {
                Kind::Whole => {
                    let to = self.head + covered as usize;
                    out(end, covered, Body::Whole(self.buffer.get(self.head..to).unwrap_or_default()));
                    self.head = to;
                    store.give_back(covered as usize);
                }
                Kind::Absent(why) => out(end, covered, Body::Absent(why)),
                Kind::Hole => {}
            }
            self.start = end;
            span.len -= covered;
            if span.len == 0 {
                self.spans.pop_front();
            }
        }
        if self.spans.is_empty() {
            self.clear(store);
        }
    }

    /// Lets go of everything.
    pub(super) fn clear(&mut self, store: &mut Store) {
        store.give_back(self.buffer.len().saturating_sub(self.head));
        store.recycle(std::mem::take(&mut self.buffer));
        self.head = 0;
        self.spans.clear();
    }
}
