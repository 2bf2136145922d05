//! What peers say of themselves before messages flow: greeting and READY (RFC 23 and 37).
//!
//! Pure functions over the bytes seen so far.

/// Length of a ZMTP 3.x greeting (RFC 23, "greeting").
pub(super) const GREETING_LEN: usize = 64;
/// Length of the signature that every ZMTP from 2.0 on begins with.
const SIGNATURE_LEN: usize = 10;
/// Where the version's major number stands.
const VERSION_AT: usize = 10;
/// Where the mechanism's name stands, padded with NUL to 20 bytes.
const MECHANISM: std::ops::Range<usize> = 12..32;

/// A dialect that is named and not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unsupported {
    /// ZMTP 1.0 (libzmq 2.x): no greeting.
    Zmtp1,
    /// ZMTP 2.0 (libzmq 3.x): revision 1.
    Zmtp2,
    /// ZMTP 3.x with the PLAIN mechanism.
    Plain,
    /// ZMTP 3.x with the CURVE mechanism: encrypted.
    Curve,
    /// ZMTP 3.x with another mechanism (GSSAPI, …).
    OtherMechanism,
}

impl Unsupported {
    /// Every dialect.
    pub const ALL: [Self; 5] = [Self::Zmtp1, Self::Zmtp2, Self::Plain, Self::Curve, Self::OtherMechanism];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Zmtp1 => "zmtp1",
            Self::Zmtp2 => "zmtp2",
            Self::Plain => "plain",
            Self::Curve => "curve",
            Self::OtherMechanism => "other_mechanism",
        }
    }
}

/// `Socket-Type` of READY.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SocketType {
    /// PUSH: sends control messages.
    Push,
    /// PULL: receives them.
    Pull,
    /// Any other: not the traffic between prefill and decode ranks.
    Other,
}

/// What a beginning of a stream is so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// Fits, more bytes needed.
    More,
    /// A whole greeting of ZMTP 3.x with the NULL mechanism.
    Null,
    /// A dialect that is not read.
    Unsupported(Unsupported),
    /// Not ZMTP.
    NotZmtp,
}

/// Whether these first bytes are what libzmq signs with: where a stream is joined in its middle, 0xff alone
/// is no sign of a greeting. (libzmq 4.3.5 sends seven zeros and a 0 or 1 between 0xff and 0x7f.)
pub(super) fn has_libzmq_signature(seen: &[u8]) -> bool {
    seen.iter().take(SIGNATURE_LEN).enumerate().all(|(i, b)| match i {
        0 => *b == 0xff,
        8 => *b <= 1,
        9 => *b == 0x7f,
        _ => *b == 0,
    })
}

/// Judges the first bytes of a stream (at most [`GREETING_LEN`] of them).
pub(super) fn judge(seen: &[u8]) -> Greeting {
    match seen.first() {
        None => return Greeting::More,
        Some(0xff) => {}
        // An anonymous ZMTP 1.0 peer begins with its empty identity frame: length 1, flags 0.
        Some(1) => {
            return match seen.get(1) {
                None => Greeting::More,
                Some(0) => Greeting::Unsupported(Unsupported::Zmtp1),
                Some(_) => Greeting::NotZmtp,
            };
        }
        Some(_) => return Greeting::NotZmtp,
    }
    // The tenth byte has its lowest bit set from ZMTP 2.0 on; in 1.0 it is the flags of a long identity.
    if seen.get(SIGNATURE_LEN - 1).is_some_and(|b| b & 1 == 0) {
        return Greeting::Unsupported(Unsupported::Zmtp1);
    }
    match seen.get(VERSION_AT) {
        None => return Greeting::More,
        Some(0) => return Greeting::Unsupported(Unsupported::Zmtp1),
        Some(1 | 2) => return Greeting::Unsupported(Unsupported::Zmtp2),
        Some(_) => {}
    }
    if seen.len() < GREETING_LEN {
        return Greeting::More;
    }
    let name = seen.get(MECHANISM).unwrap_or_default();
    let name = name.split(|b| *b == 0).next().unwrap_or_default();
    match name {
        b"NULL" => Greeting::Null,
        b"PLAIN" => Greeting::Unsupported(Unsupported::Plain),
        b"CURVE" => Greeting::Unsupported(Unsupported::Curve),
        _ => Greeting::Unsupported(Unsupported::OtherMechanism),
    }
}

/// The socket type in the body of a READY command; `None` when `body` is another command.
pub(super) fn ready(body: &[u8]) -> Option<SocketType> {
    let (name, mut rest) = short_text(body)?;
    if name != b"READY" {
        return None;
    }
    while let Some((key, after)) = short_text(rest) {
        let (len, after) = after.split_first_chunk::<4>()?;
        let len = usize::try_from(u32::from_be_bytes(*len)).ok()?;
        let value = after.get(..len)?;
        if key.eq_ignore_ascii_case(b"Socket-Type") {
            return Some(match value {
                b"PUSH" => SocketType::Push,
                b"PULL" => SocketType::Pull,
                _ => SocketType::Other,
            });
        }
        rest = after.get(len..)?;
    }
    Some(SocketType::Other)
}

/// A length byte and that many bytes, and what follows.
fn short_text(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first()?;
    rest.split_at_checked(usize::from(*len))
}
