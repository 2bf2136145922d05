//! Framing of a chunked body (RFC 9112, section 7.1), strict: hexadecimal size, extensions ignored, CRLF.

use super::HEAD_MAX;
use super::event::Unread;

/// Longest size line with its extensions, bytes.
const SIZE_LINE_MAX: u32 = 1 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Size {
        value: u64,
        digits: u8,
    },
    Extension {
        value: u64,
    },
    SizeLf {
        value: u64,
    },
    Data {
        left: u64,
    },
    DataCr,
    DataLf,
    /// Trailer fields: bytes of the line so far.
    Trailer {
        line: u32,
    },
    TrailerLf {
        line: u32,
    },
}

/// A position in a chunked body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunked {
    at: At,
    /// Bytes of the size line or of the trailer so far.
    len: u32,
}

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step<'a> {
    /// Bytes of the body; then the rest.
    Data(&'a [u8], &'a [u8]),
    /// The body ended; what lies behind it.
    End(&'a [u8]),
    /// More bytes are needed.
    More,
    Refused(Unread),
}

impl Chunked {
    pub(super) const fn new() -> Self {
        Self { at: At::Size { value: 0, digits: 0 }, len: 0 }
    }

    /// Takes bytes up to the end of a stretch of data.
    pub(super) fn step<'a>(&mut self, mut bytes: &'a [u8]) -> Step<'a> {
        loop {
            if let At::Data { left } = self.at {
                let take = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                let Some((data, rest)) = bytes.split_at_checked(take).filter(|_| take > 0) else {
                    return Step::More;
                };
                self.pass(left, u64::try_from(take).unwrap_or(left));
                return Step::Data(data, rest);
            }
            let Some((&b, rest)) = bytes.split_first() else { return Step::More };
            bytes = rest;
            self.len += 1;
            match self.turn(b) {
                Ok(true) => return Step::End(bytes),
                Ok(false) => {}
                Err(why) => return Step::Refused(why),
            }
        }
    }

    /// Lets bytes pass unseen: whether they all lie inside one chunk's data.
    pub(super) fn skip(&mut self, len: u64) -> bool {
        match self.at {
            At::Data { left } if left >= len => {
                self.pass(left, len);
                true
            }
            _ => false,
        }
    }

    const fn pass(&mut self, left: u64, len: u64) {
        self.at = if left > len { At::Data { left: left - len } } else { At::DataCr };
    }

    /// One byte outside the data; whether it ends the body.
    fn turn(&mut self, b: u8) -> Result<bool, Unread> {
        let max = match self.at {
            At::Trailer { .. } | At::TrailerLf { .. } => u32::try_from(HEAD_MAX).unwrap_or(u32::MAX),
            _ => SIZE_LINE_MAX,
        };
        if self.len > max {
            return Err(Unread::EndlessHead);
        }
        self.at = match (self.at, b) {
            (At::Size { value, digits }, b) if b.is_ascii_hexdigit() && digits < 15 => {
                let digit = char::from(b).to_digit(16).unwrap_or(0);
                At::Size { value: value << 4 | u64::from(digit), digits: digits + 1 }
            }
            (At::Size { value, digits: 1.. } | At::Extension { value }, b'\r') => At::SizeLf { value },
            (At::Size { value, digits: 1.. }, b';' | b' ' | b'\t') => At::Extension { value },
            (At::Extension { value }, b) if b != b'\n' => At::Extension { value },
            (At::SizeLf { value: 0 }, b'\n') => {
                self.len = 0;
                At::Trailer { line: 0 }
            }
            (At::SizeLf { value }, b'\n') => At::Data { left: value },
            (At::DataCr, b'\r') => At::DataLf,
            (At::DataLf, b'\n') => {
                self.len = 0;
                At::Size { value: 0, digits: 0 }
            }
            (At::Trailer { line }, b'\r') => At::TrailerLf { line },
            (At::Trailer { line }, b) if b != b'\n' => At::Trailer { line: line + 1 },
            (At::TrailerLf { line: 0 }, b'\n') => return Ok(true),
            (At::TrailerLf { .. }, b'\n') => At::Trailer { line: 0 },
            (At::Size { .. }, _) => return Err(Unread::Malformed),
            _ => return Err(Unread::AmbiguousLength),
        };
        Ok(false)
    }
}
