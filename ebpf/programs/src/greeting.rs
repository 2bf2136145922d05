//! Does a direction begin as ZMTP does? (RFC 23, "ZMTP 3.0", greeting: signature `ff`, eight bytes of padding,
//! `7f`; RFC 15 has the same first ten bytes.) libzmq sends it in pieces of 10 or 11 bytes and the rest.

/// Position of the signature's last byte.
pub const LAST: u32 = 9;

/// What the bytes at the begin of a direction say.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Greeting {
    /// It is one.
    Yes,
    /// It is none, though it began like one.
    No,
    /// It begins with another byte.
    Other,
    /// Like one so far.
    More,
}

/// Looks at the first `n` bytes of a call that begins at `offset` (at most [`LAST`]) in its direction.
#[inline(always)]
pub fn look(offset: u32, head: &[u8; 16], n: u64) -> Greeting {
    if offset == 0 && n > 0 && head[0] != 0xff {
        return Greeting::Other;
    }
    let last = LAST.wrapping_sub(offset) & 15;
    if u64::from(last) >= n {
        return Greeting::More;
    }
    if head[last as usize] == 0x7f { Greeting::Yes } else { Greeting::No }
}
