//! Where a stream stands among heads and bodies, and the collecting of heads that come in pieces.

use super::HEAD_MAX;
use super::chunked::Chunked;
use super::event::Unread;

/// Where one stream stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// At a head, or inside one that is collected.
    Head,
    /// So many bytes of a body are to come.
    Fixed(u64),
    /// In a chunked body.
    Chunks(Chunked),
    /// In an answer that ends with the connection.
    ToEnd,
    /// In the body of an answer, its end not known.
    Adrift {
        /// It ends with a last chunk.
        chunked: bool,
    },
    /// Position not known.
    Lost,
    /// Position not known, and collecting what may be a head.
    Trial,
}

impl Stage {
    pub(super) const fn is_lost(self) -> bool {
        matches!(self, Self::Lost | Self::Trial)
    }

    /// Whether the end of a message may have passed unnoticed.
    pub(super) const fn is_unknown(self) -> bool {
        matches!(self, Self::Lost | Self::Trial | Self::Adrift { .. })
    }
}

/// A head that is collected.
#[derive(Clone, Debug, Default)]
pub(super) struct Collected(Vec<u8>);

/// What came of collecting.
pub(super) enum Head<'a> {
    /// Whole, in the bytes at hand; what lies behind it.
    Here(&'a [u8], &'a [u8]),
    /// Whole, collected; what lies behind it.
    Collected(Vec<u8>, &'a [u8]),
    /// More bytes are needed.
    More,
    Refused(Unread),
}

fn end_of_head(bytes: &[u8]) -> Option<usize> {
    bytes.windows(4).position(|w| w == b"\r\n\r\n").map(|i| i + 4)
}

impl Collected {
    pub(super) const fn new() -> Self {
        Self(Vec::new())
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) const fn held(&self) -> usize {
        self.0.capacity()
    }

    /// What has come.
    pub(super) fn peek(&self) -> &[u8] {
        &self.0
    }

    /// Adds bytes without a look at them.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    pub(super) fn take(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.0)
    }

    /// Adds bytes up to the end of the head. `check` looks at its beginning, the longer the surer.
    pub(super) fn add<'a>(&mut self, bytes: &'a [u8], check: fn(&[u8]) -> Result<(), Unread>) -> Head<'a> {
        if self.0.is_empty() {
            if let Err(why) = check(bytes) {
                return Head::Refused(why);
            }
            if let Some((head, rest)) = end_of_head(bytes).and_then(|end| bytes.split_at_checked(end)) {
                let fits = head.len() <= HEAD_MAX;
                return if fits { Head::Here(head, rest) } else { Head::Refused(Unread::EndlessHead) };
            }
        }
        let before = self.0.len();
        let room = HEAD_MAX.saturating_sub(before);
        let (taken, rest) = bytes.split_at_checked(room).unwrap_or((bytes, &[]));
        self.0.extend_from_slice(taken);
        if let Err(why) = check(&self.0) {
            return Head::Refused(why);
        }
        let from = before.saturating_sub(3);
        if let Some(end) = end_of_head(self.0.get(from..).unwrap_or_default()).map(|end| from + end) {
            self.0.truncate(end);
            let rest = bytes.get(end.saturating_sub(before)..).unwrap_or_default();
            return Head::Collected(self.take(), rest);
        }
        if self.0.len() >= HEAD_MAX || !rest.is_empty() {
            return Head::Refused(Unread::EndlessHead);
        }
        Head::More
    }
}

/// Bytes of a method (RFC 9110, section 5.6.2).
const fn is_token(b: u8) -> bool {
    b.is_ascii_alphanumeric()
        || matches!(
            b,
            b'!' | b'#'
                | b'$'
                | b'%'
                | b'&'
                | b'\''
                | b'*'
                | b'+'
                | b'-'
                | b'.'
                | b'^'
                | b'_'
                | b'`'
                | b'|'
                | b'~'
        )
}

/// Longest method that is taken for one; the longest registered one (IANA) has 17 bytes.
const METHOD_MAX: usize = 24;

/// Whether a request can begin like this: a method and a space.
pub(super) fn check_request(head: &[u8]) -> Result<(), Unread> {
    match head {
        // Handshake record, version 3.x (RFC 8446, section 5.1).
        [0x16, 0x03, ..] => return Err(Unread::Tls),
        [0x16] => return Ok(()),
        _ => {}
    }
    let method = head.get(..METHOD_MAX).unwrap_or(head);
    let end = method.iter().position(|b| !is_token(*b));
    match end.and_then(|i| method.get(i)) {
        Some(b' ') if end != Some(0) => Ok(()),
        None if method.len() < METHOD_MAX => Ok(()),
        _ => Err(Unread::NotHttp),
    }
}

/// Whether an answer can begin like this.
pub(super) fn check_answer(head: &[u8]) -> Result<(), Unread> {
    const VERSION: &[u8] = b"HTTP/1.";
    let len = head.len().min(VERSION.len());
    if head.get(..len) == VERSION.get(..len) { Ok(()) } else { Err(Unread::Malformed) }
}

/// Whether these bytes begin with a method in common use and a space: what a head is looked for behind.
pub(super) fn may_be_request(bytes: &[u8]) -> bool {
    const METHODS: [&[u8]; 7] = [b"GET ", b"POST ", b"PUT ", b"HEAD ", b"DELETE ", b"OPTIONS ", b"PATCH "];
    METHODS.iter().any(|m| bytes.starts_with(m))
}
