//! Joining a stream in its middle: where a known message begins in the bytes of one call.
//!
//! Pure functions over one call's bytes. What a message is known by comes from outside ([`Grammar`]), so
//! that ZMTP knows nothing of SGLang.

use super::multipart::{BYTES_KEPT, FrameMeta, Frames, Multipart};

/// How sure a message makes us that the bytes before it were a message's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Recognition {
    /// Not a known message.
    No,
    /// Fits, but so would the tail of a longer message, or a few bytes of something else.
    Weak,
    /// Known, but the tail of some longer message could look like it.
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

/// Flag bits of a frame (RFC 23, "flags").
pub(super) const MORE: u8 = 1;
/// The length has eight bytes.
pub(super) const LONG: u8 = 2;
/// The frame is a command.
pub(super) const COMMAND: u8 = 4;

/// No frame is longer: 64 GiB. A length above it is a stream out of step, not a message.
const FRAME_MAX: u64 = 1 << 36;

/// The header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) flags: u8,
    pub(super) len: u64,
}

impl Header {
    /// Reads a header; what stands behind it comes with it. `Ok(None)`: more bytes are needed; `Err`: no frame begins
    /// like this.
    pub(super) fn read(bytes: &[u8]) -> Result<Option<(Self, &[u8])>, Malformed> {
        match bytes {
            [] => Ok(None),
            // Reserved bits are zero, and a command is one frame (RFC 23).
            [flags, ..] if *flags > (COMMAND | LONG) || *flags == (COMMAND | MORE) => Err(Malformed),
            [flags, rest @ ..] if flags & LONG == 0 => {
                Ok(rest.split_first().map(|(len, rest)| (Self { flags: *flags, len: u64::from(*len) }, rest)))
            }
            [flags, rest @ ..] => {
                let Some((len, rest)) = rest.split_first_chunk::<8>() else { return Ok(None) };
                let len = u64::from_be_bytes(*len);
                if len > FRAME_MAX { Err(Malformed) } else { Ok(Some((Self { flags: *flags, len }, rest))) }
            }
        }
    }
}

/// No frame begins like this.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// What stands at one place of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parsed {
    /// A whole message that ends before `behind`.
    Message { behind: usize, total: u32 },
    /// A whole command.
    Command { body: usize, behind: usize },
    /// The beginning of one of these.
    Partial,
}

/// Parses what begins at `at` and lies whole in `bytes`; the frames of a message go to `frames`.
pub(super) fn parse(bytes: &[u8], at: usize, frames: &mut Frames) -> Result<Parsed, Malformed> {
    frames.clear();
    let mut rest = bytes.get(at..).unwrap_or_default();
    let mut total = 0u32;
    loop {
        let Some((header, body)) = Header::read(rest)? else { return Ok(Parsed::Partial) };
        let Some(next) = usize::try_from(header.len).ok().and_then(|len| body.get(len..)) else {
            return Ok(Parsed::Partial);
        };
        let (body, behind) = (bytes.len() - body.len(), bytes.len() - next.len());
        if header.flags & COMMAND != 0 {
            // A command between the frames of a message is left to the incremental decoder.
            return Ok(if total == 0 { Parsed::Command { body, behind } } else { Parsed::Partial });
        }
        // A full store is no fault: frames behind it are followed and not kept.
        let _ = frames.try_push(FrameMeta {
            at: u32::try_from(body).unwrap_or(u32::MAX),
            kept: kept(header.len),
            len: header.len,
        });
        total = total.saturating_add(1);
        rest = next;
        if header.flags & MORE == 0 {
            return Ok(Parsed::Message { behind, total });
        }
    }
}

/// How many bytes of a frame of `len` bytes are kept.
fn kept(len: u64) -> u16 {
    u16::try_from(len.min(BYTES_KEPT as u64)).unwrap_or(u16::MAX)
}

/// Where to go on in a call of a stream that is out of step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// A message boundary, beyond doubt.
    Sure(usize),
    /// The call may begin with a message that does not end in it.
    Maybe,
    /// Nothing known in this call.
    Nowhere,
}

/// Looks for a message boundary. libzmq's calls begin at one unless the call before was a full buffer, so
/// the call's first byte is tried first, and one whole known message there is enough. `expected`: a message
/// begins there as far as the kernel can tell, so it need not prove that.
pub(super) fn find(bytes: &[u8], from: usize, expected: bool, grammar: &Grammar) -> Start {
    if from == 0 {
        match find_at_start(bytes, expected, grammar) {
            Start::Nowhere => {}
            found => return found,
        }
    }
    scan(bytes, from.max(1), grammar)
}

/// The same for the call's first byte alone.
pub(super) fn find_at_start(bytes: &[u8], expected: bool, grammar: &Grammar) -> Start {
    let mut frames = Frames::new();
    match parse(bytes, 0, &mut frames) {
        Ok(Parsed::Message { behind, total }) => {
            match (grammar.recognise)(&Multipart::new(bytes, &frames, total)) {
                Recognition::Tagged | Recognition::Plain => Start::Sure(0),
                Recognition::Weak if expected => Start::Sure(0),
                // It may be a tail, but a message begins behind it.
                Recognition::Weak if known_at(bytes, behind, grammar) => Start::Sure(behind),
                Recognition::Weak | Recognition::No => Start::Nowhere,
            }
        }
        Ok(Parsed::Partial) if may_begin(bytes, grammar) => Start::Maybe,
        Ok(Parsed::Partial | Parsed::Command { .. }) | Err(Malformed) => Start::Nowhere,
    }
}

fn known_at(bytes: &[u8], at: usize, grammar: &Grammar) -> bool {
    let mut frames = Frames::new();
    let Ok(Parsed::Message { total, .. }) = parse(bytes, at, &mut frames) else { return false };
    let found = (grammar.recognise)(&Multipart::new(bytes, &frames, total));
    found > Recognition::Weak
}

/// Whether an unfinished message at the call's first byte is worth following. Its first frame is short in
/// every layout; where it is not all there, its header has to do.
fn may_begin(bytes: &[u8], grammar: &Grammar) -> bool {
    match Header::read(bytes) {
        Ok(Some((header, body))) => {
            let len = usize::try_from(header.len).unwrap_or(usize::MAX);
            header.flags & COMMAND == 0
                && len <= FIRST_FRAME_MAX
                && body.get(..len).is_none_or(|first| (grammar.may_begin)(first))
        }
        Ok(None) => bytes.first().is_some_and(|flags| *flags <= MORE),
        Err(Malformed) => false,
    }
}

/// Longest first frame of any known message: a room of 20 digits.
const FIRST_FRAME_MAX: usize = 20;

/// Candidates tried in one call, so that no bytes cost more than a bounded time.
const TRIES: usize = 64;

/// Looks for the first known message that lies whole behind `from`. One that is known by its tag begins
/// there; of any other the beginning may be the tail of a longer message, but its end is a boundary.
fn scan(bytes: &[u8], from: usize, grammar: &Grammar) -> Start {
    let mut tries = 0;
    let mut frames = Frames::new();
    for at in from..bytes.len() {
        let Some(head) = bytes.get(at..) else { break };
        // All known messages but one (PP_STATE) have more than one frame, and the first one is short.
        let [MORE, len, body @ ..] = head else { continue };
        let len = usize::from(*len);
        if len == 0 || len > FIRST_FRAME_MAX || !body.get(..len).is_some_and(grammar.may_begin) {
            continue;
        }
        if tries == TRIES {
            break;
        }
        tries += 1;
        if let Ok(Parsed::Message { behind, total }) = parse(bytes, at, &mut frames) {
            match (grammar.recognise)(&Multipart::new(bytes, &frames, total)) {
                Recognition::Tagged => return Start::Sure(at),
                Recognition::Plain => return Start::Sure(behind),
                Recognition::Weak | Recognition::No => {}
            }
        }
    }
    Start::Nowhere
}

/// Whether the call begins like HTTP, which is no ZMTP even where the stream was joined in its middle.
pub(super) fn is_http(bytes: &[u8]) -> bool {
    const BEGINNINGS: [&[u8]; 7] =
        [b"GET /", b"POST /", b"PUT /", b"HEAD /", b"DELETE /", b"HTTP/1.", b"PRI * HTTP/2"];
    BEGINNINGS.iter().any(|b| bytes.starts_with(b))
}
