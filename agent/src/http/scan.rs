//! Reads a JSON body of which stretches may be missing: from its first byte up to the first missing one, and, once its
//! last byte has come, what lies behind the last missing one.

use super::WINDOW;
use super::json::{Lexer, Reader, Stopped};

/// What became of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Read {
    /// Read from end to end.
    Whole,
    /// Head and tail, as far as they are here.
    Parts,
    /// Not JSON.
    NotJson,
}

#[derive(Clone, Debug)]
enum Phase {
    /// In step from the body's first byte.
    Forward(Lexer),
    /// Behind a hole: the last bytes, until the body ends. Cleared as soon as they are read, and by the next hole.
    Tail(Vec<u8>),
    NotJson,
}

/// A body under way.
#[derive(Clone, Debug)]
pub(super) struct Scan {
    phase: Phase,
}

impl Scan {
    pub(super) const fn new() -> Self {
        Self { phase: Phase::Forward(Lexer::new()) }
    }

    /// Takes the next bytes.
    pub(super) fn bytes(&mut self, bytes: &[u8], reader: &mut impl Reader) {
        match &mut self.phase {
            Phase::Forward(lexer) => match lexer.feed(bytes, reader) {
                Ok(()) => {}
                Err(Stopped::NotJson) => self.phase = Phase::NotJson,
                // From here on it is as if the bytes were missing.
                Err(Stopped::TooDeep) => {
                    self.phase = Phase::Tail(Vec::new());
                    reader.pass_hole();
                    self.bytes(bytes, reader);
                }
            },
            Phase::Tail(tail) => {
                let bytes = bytes.get(bytes.len().saturating_sub(WINDOW)..).unwrap_or_default();
                let surplus = (tail.len() + bytes.len()).saturating_sub(WINDOW);
                tail.drain(..surplus.min(tail.len()));
                tail.extend_from_slice(bytes);
            }
            Phase::NotJson => {}
        }
    }

    /// Bytes are missing here.
    pub(super) fn hole(&mut self, reader: &mut impl Reader) {
        match &mut self.phase {
            Phase::Forward(_) => {
                self.phase = Phase::Tail(Vec::new());
                reader.pass_hole();
            }
            Phase::Tail(tail) => *tail = Vec::new(),
            Phase::NotJson => {}
        }
    }

    /// The body has ended.
    pub(super) fn finish(self, reader: &mut impl Reader) -> Read {
        match self.phase {
            Phase::Forward(lexer) if lexer.is_done() => Read::Whole,
            Phase::Forward(_) | Phase::NotJson => Read::NotJson,
            Phase::Tail(tail) if tail.is_empty() => Read::Parts,
            Phase::Tail(tail) => {
                let Some((mut lexer, from)) = Lexer::behind_hole(&tail) else { return Read::NotJson };
                match lexer.feed(tail.get(from..).unwrap_or_default(), reader) {
                    Ok(()) if lexer.is_done() || from == tail.len() => Read::Parts,
                    _ => Read::NotJson,
                }
            }
        }
    }

    /// Bytes of the body held now.
    pub(super) const fn held(&self) -> usize {
        match &self.phase {
            Phase::Tail(tail) => tail.capacity(),
            _ => 0,
        }
    }
}
