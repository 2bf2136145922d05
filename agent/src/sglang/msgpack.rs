//! The few bytes of msgpack that control messages have.
//!
//! Pure. Reads heads and short values and nothing behind them; `None` always means "this is something else".

/// An unsigned integer in any of msgpack's widths, and what follows it.
pub(super) fn uint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (tag, rest) = bytes.split_first()?;
    let width = match tag {
        0..=0x7f => return Some((u64::from(*tag), rest)),
        0xcc => 1,
        0xcd => 2,
        0xce => 4,
        0xcf => 8,
        _ => return None,
    };
    big_endian(rest, width)
}

/// The number of items of an array, and what follows its head.
pub(super) fn array(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (tag, rest) = bytes.split_first()?;
    match tag {
        0x90..=0x9f => Some((u64::from(tag & 0x0f), rest)),
        0xdc => big_endian(rest, 2),
        0xdd => big_endian(rest, 4),
        _ => None,
    }
}

/// The bytes of a text.
pub(super) fn text(bytes: &[u8]) -> Option<&[u8]> {
    let (tag, rest) = bytes.split_first()?;
    let (len, rest) = match tag {
        0xa0..=0xbf => (u64::from(tag & 0x1f), rest),
        0xd9 => big_endian(rest, 1)?,
        0xda => big_endian(rest, 2)?,
        _ => return None,
    };
    rest.get(..usize::try_from(len).ok()?)
}

fn big_endian(bytes: &[u8], width: usize) -> Option<(u64, &[u8])> {
    let (digits, rest) = bytes.split_at_checked(width)?;
    Some((digits.iter().fold(0, |n, b| n << 8 | u64::from(*b)), rest))
}
