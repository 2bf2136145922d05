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

/// Looks at the beginning of a head, the longer the surer.
type Check = fn(&[u8]) -> Result<(), Unread>;

/// A line feed without a carriage return before it: some parsers take it for a line's end, some do not. `last` is the
/// byte before.
fn check_lines(mut last: u8, bytes: &[u8]) -> Result<(), Unread> {
    for b in bytes {
        if *b == b'\n' && last != b'\r' {
            return Err(Unread::AmbiguousLength);
        }
        last = *b;
    }
    Ok(())
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

    /// Adds bytes up to the end of the head.
    pub(super) fn add<'a>(&mut self, bytes: &'a [u8], check: Check) -> Head<'a> {
        let before = self.0.len();
        let (near, far) = bytes.split_at_checked(HEAD_MAX.saturating_sub(before)).unwrap_or((bytes, &[]));
        if before == 0
            && let Some((head, rest)) = end_of_head(near).and_then(|end| bytes.split_at_checked(end))
        {
            return match check(head).and_then(|()| check_lines(0, head)) {
                Ok(()) => Head::Here(head, rest),
                Err(why) => Head::Refused(why),
            };
        }
        let last = self.0.last().copied().unwrap_or(0);
        self.0.extend_from_slice(near);
        let from = before.saturating_sub(3);
        let end = end_of_head(self.0.get(from..).unwrap_or_default()).map(|end| from + end);
        self.0.truncate(end.unwrap_or(self.0.len()));
        let added = self.0.get(before..).unwrap_or_default();
        if let Err(why) = check(&self.0).and_then(|()| check_lines(last, added)) {
            return Head::Refused(why);
        }
        if end.is_some() {
            let rest = bytes.get(added.len()..).unwrap_or_default();
            return Head::Collected(self.take(), rest);
        }
        if self.0.len() >= HEAD_MAX || !far.is_empty() {
            Head::Refused(Unread::EndlessHead)
        } else {
            Head::More
        }
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

/// Whether the first line of a request, as far as it is here, can end as one: with a version.
fn check_version(head: &[u8]) -> Result<(), Unread> {
    let Some(end) = head.windows(2).position(|w| w == b"\r\n") else { return Ok(()) };
    let version = head.get(..end).and_then(|line| line.rsplit(|b| *b == b' ').next());
    if version.is_some_and(|v| v.starts_with(b"HTTP/")) { Ok(()) } else { Err(Unread::NotHttp) }
}

/// Whether a request can begin like this: a method and a space, and a version behind its target.
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
        Some(b' ') if end != Some(0) => check_version(head),
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
