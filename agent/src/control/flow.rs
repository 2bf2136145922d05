//! One direction of one connection at work: pieces of the stream in, inputs for the rooms out.

use serde::{Deserialize, Serialize};

use crate::event::{Direction, Mono, NotCaptured};
use crate::rooms::model::{Connection, Input};
use crate::sglang::{self, GRAMMAR};
use crate::stream::Piece;
use crate::zmtp::{Confidence, Decoder, Event, Multipart, SocketType, Unsupported};

use super::batches::Batches;
use super::counters::{Counters, Dropped, Shapes};

/// What a stretch of the stream said of its connection as a whole.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Findings {
    /// Socket type that the sender named.
    pub(super) ready: Option<SocketType>,
    /// Why the stream is not read any more.
    pub(super) unread: Option<Unread>,
    /// A known message stands behind the position.
    pub(super) acquired: bool,
    /// The stream was seen from its greeting.
    pub(super) greeted: bool,
    /// The first bytes of the stream are missing.
    pub(super) beginning_gone: bool,
    /// Ends of the first and of the last message.
    pub(super) ends: Option<(u32, u32)>,
}

/// Why a stream is not read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unread {
    /// Not ZMTP.
    NotZmtp,
    /// A dialect that is not read.
    Unsupported(Unsupported),
}

/// What has been seen of one stream so far, as far as it decides what a gap or nonsense in it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[allow(clippy::struct_excessive_bools, reason = "independent of each other")]
pub(super) struct History {
    /// Where its first byte lies was known before any came.
    pub(super) begun: bool,
    /// A known message stood in it.
    spoke: bool,
    /// From its greeting on, not one byte is missing.
    whole: bool,
    /// It has been told that bytes in it make no sense.
    odd: bool,
    /// Packets of it were cut short by a capture's snap length.
    #[serde(default)]
    cut: bool,
}

impl History {
    /// Once a part of the stream has been missed.
    pub(super) const fn interrupted(self) -> Self {
        Self { whole: false, ..self }
    }

    /// At the beginning of a stream.
    pub(super) const fn at_start(begun: bool) -> Self {
        Self { begun, spoke: false, whole: false, odd: false, cut: false }
    }
}

/// Everything but the decoder, so that the decoder can be fed while this listens.
pub(super) struct Out<'c, F> {
    pub(super) connection: Connection,
    pub(super) direction: Direction,
    pub(super) history: &'c mut History,
    pub(super) counters: &'c mut Counters,
    pub(super) shapes: &'c mut Shapes,
    pub(super) batches: Option<&'c mut Batches>,
    pub(super) sink: &'c mut F,
    pub(super) findings: Findings,
}

impl<F: FnMut(Input<'_>)> Out<'_, F> {
    fn give(&mut self, input: Input<'_>) {
        self.counters.inputs += 1;
        (self.sink)(input);
    }

    pub(super) fn lossy(&mut self, at: Mono, why: Dropped, bytes: u64) {
        self.counters.drop_bytes(why, bytes);
        let (connection, direction) = (self.connection, self.direction);
        self.give(Input::Lossy { at, connection, direction, bytes });
    }

    /// Bytes that are missing or not understood. Whoever can connect can send what nobody understands or keeps:
    /// only a stream that has carried a known message can have lost one by it.
    pub(super) fn not_understood(&mut self, at: Mono, why: Dropped, bytes: u64) {
        if self.history.spoke && !self.history.whole {
            self.lossy(at, why, bytes);
        } else {
            self.counters.drop_bytes(why, bytes);
        }
    }

    /// From here on bytes are missing.
    pub(super) const fn broken(&mut self) {
        self.history.whole = false;
        if !self.history.spoke {
            // The missing ones may have been its first message.
            self.findings.beginning_gone = true;
            self.connection.preexisting = true;
        }
    }

    /// The connection is not ZMTP, as this piece of it shows.
    pub(super) fn not_zmtp(&mut self, now: Mono, piece: &Piece<'_>) {
        match piece {
            Piece::Bytes { at, bytes, .. } => {
                self.foreign(*at, 0, u64::try_from(bytes.len()).unwrap_or(u64::MAX));
            }
            Piece::Ends { at, len, .. } | Piece::Skip { at, len, .. } => {
                self.foreign(*at, 0, u64::from(*len));
            }
            Piece::Hole { len, .. } => self.foreign(now, 0, *len),
            Piece::Overlap { len } => self.foreign(now, 0, u64::from(*len)),
        }
    }

    fn foreign(&mut self, at: Mono, frames: u32, first_len: u64) {
        let (connection, direction) = (self.connection, self.direction);
        let frames = u16::try_from(frames).unwrap_or(u16::MAX);
        let first_len = u32::try_from(first_len).unwrap_or(u32::MAX);
        self.give(Input::Foreign { at, connection, direction, frames, first_len });
    }

    fn message(&mut self, at: Mono, end: u32, parts: &Multipart<'_>) {
        self.findings.ends = Some((self.findings.ends.map_or(end, |(first, _)| first), end));
        let decoded = sglang::decode(parts);
        match &decoded {
            Ok(decoded) => {
                self.history.spoke = true;
                let (connection, direction) = (self.connection, self.direction);
                self.counters.count_message(direction, decoded.backend, decoded.message.kind());
                self.counters.extra_frames += u64::from(decoded.extra_frames);
                self.give(Input::Message { at, connection, direction, end, decoded });
                if let Some(batches) = &mut self.batches
                    && let Some(input) = batches.heard(at, &connection, direction, decoded, parts)
                {
                    self.give(input);
                }
            }
            // What is missing of it is no nonsense: it may have been any message.
            Err(_) if self.history.cut && parts.frames().any(|f| f.is_cut()) => {
                self.lossy(at, Dropped::NotCaptured, 0);
            }
            Err(reason) => {
                self.counters.count_unknown(*reason);
                self.shapes.count(parts);
                // What mori's guard names is the engine's own, and mori survives what it cannot read.
                if *reason != sglang::Unknown::Mori {
                    self.foreign(at, parts.count(), parts.frame(0).map_or(0, |f| f.len));
                }
            }
        }
    }

    fn hear(&mut self, at: Mono, start: u32, len: usize, event: Event<'_>) -> bool {
        let len = u64::try_from(len).unwrap_or(u64::MAX);
        match event {
            Event::Message { parts, behind } => self.message(at, start.wrapping_add(behind), &parts),
            Event::Ready(socket_type) => self.findings.ready = Some(socket_type),
            Event::Greeting => {
                self.findings.greeted = true;
                self.history.whole = true;
                // Bytes that are gone may be those of the other direction.
                self.connection.preexisting &= self.findings.beginning_gone;
            }
            Event::Acquired => {
                self.findings.acquired = true;
                // The message that proves the position is not always handed on.
                self.history.spoke = true;
            }
            Event::Command => {}
            Event::Unsupported(dialect) => {
                self.findings.unread = Some(Unread::Unsupported(dialect));
                self.foreign(at, 0, len);
            }
            Event::NotZmtp => {
                self.findings.unread = Some(Unread::NotZmtp);
                self.foreign(at, 0, len);
            }
            Event::Malformed => return true,
        }
        false
    }
}

/// Takes one piece of the stream. `now` is when it was noticed.
pub(super) fn take<F: FnMut(Input<'_>)>(
    decoder: &mut Decoder,
    out: &mut Out<'_, F>,
    now: Mono,
    piece: Piece<'_>,
) {
    match piece {
        Piece::Bytes { at, start, bytes } => take_bytes(decoder, out, at, start, bytes),
        // Only HTTP comes so; a message in it is not whole.
        Piece::Ends { at, start, len, .. } => {
            take(decoder, out, now, Piece::Skip { at, start, len, reason: NotCaptured::Middle });
        }
        Piece::Skip { at, start, len, reason } => {
            out.counters.count_not_captured(reason);
            // A ZMTP stream begins with 64 bytes of greeting and the peer waits for its answer.
            if decoder.is_untouched() && reason == NotCaptured::TooLong {
                decoder.kill();
                out.findings.unread = Some(Unread::NotZmtp);
                out.foreign(at, 0, u64::from(len));
                return;
            }
            let was = decoder.confidence();
            let cut = reason == NotCaptured::Snaplen && !decoder.is_dead();
            out.history.cut |= cut;
            if pass_over(decoder, out, at, start, u64::from(len)) {
                return;
            }
            if cut {
                // Nobody sends a snap length: whatever was cut may have been the first message of its stream.
                out.broken();
                out.lossy(at, Dropped::NotCaptured, u64::from(len));
            } else if was != Confidence::Pending {
                out.broken();
                out.not_understood(at, Dropped::NotCaptured, u64::from(len));
            }
        }
        Piece::Hole { start, len } => {
            let was = decoder.confidence();
            // Inside one frame the position survives; the message may not.
            if !pass_over(decoder, out, now, start, len) {
                out.broken();
            }
            // Where the beginning is known, what is missing there may have been control traffic.
            if was == Confidence::Pending && !out.history.begun {
                out.counters.drop_bytes(Dropped::Hole, len);
            } else {
                out.lossy(now, Dropped::Hole, len);
            }
        }
        Piece::Overlap { len } => {
            let was = decoder.confidence();
            decoder.lose();
            decoder.take_unsynced();
            out.broken();
            if was == Confidence::Pending {
                out.counters.drop_bytes(Dropped::Overlap, u64::from(len));
            } else {
                out.lossy(now, Dropped::Overlap, u64::from(len));
            }
        }
    }
}

fn take_bytes<F: FnMut(Input<'_>)>(
    decoder: &mut Decoder,
    out: &mut Out<'_, F>,
    at: Mono,
    start: u32,
    bytes: &[u8],
) {
    let was = decoder.confidence();
    let mut malformed = false;
    decoder.feed(bytes, &GRAMMAR, &mut |event| malformed |= out.hear(at, start, bytes.len(), event));
    let unsynced = decoder.take_unsynced();
    if malformed {
        out.not_understood(at, Dropped::Malformed, unsynced);
        if !std::mem::replace(&mut out.history.odd, true) {
            out.foreign(at, 0, u64::try_from(bytes.len()).unwrap_or(u64::MAX));
        }
    } else if unsynced > 0 && was == Confidence::Pending {
        out.counters.drop_bytes(Dropped::Unjudged, unsynced);
    } else if unsynced > 0 {
        out.not_understood(at, Dropped::OutOfStep, unsynced);
    }
}

/// Whether the decoder stays in step.
fn pass_over<F: FnMut(Input<'_>)>(
    decoder: &mut Decoder,
    out: &mut Out<'_, F>,
    at: Mono,
    start: u32,
    len: u64,
) -> bool {
    let beginning = decoder.in_greeting();
    let passed = decoder.skip(len, &GRAMMAR, &mut |event| {
        out.hear(at, start, 0, event);
    });
    decoder.take_unsynced();
    if beginning && passed.is_err() {
        out.findings.beginning_gone = true;
        // What waited behind the gap is told in the same stretch.
        out.connection.preexisting = true;
    }
    passed.is_ok()
}
