//! Frames → values. Text is decimal ASCII as Python's `str(int)` writes it; whatever else stands there is
//! refused, since a frame of nonsense means that the layout is another one.
//!
//! Pure functions; `None` always means "this frame does not hold such a value".

use std::net::IpAddr;

use super::message::Endpoint;
use super::msgpack;
use crate::zmtp::{Frame, Multipart};

/// Frame `index` when all of it was kept.
pub(super) fn whole<'a>(parts: &Multipart<'a>, index: usize) -> Option<&'a [u8]> {
    parts.frame(index)?.whole()
}

/// A decimal number without sign, blanks or leading zeros.
pub(super) fn decimal(bytes: &[u8]) -> Option<u64> {
    let digit = |b: &u8| Some(u64::from(b.wrapping_sub(b'0'))).filter(|digit| *digit <= 9);
    match bytes {
        [] | [b'0', _, ..] => None,
        // 19 digits always fit; a 20th may not.
        [first @ .., last] if first.len() <= 19 => {
            let n = first.iter().try_fold(0u64, |n, b| Some(n * 10 + digit(b)?))?;
            n.checked_mul(10)?.checked_add(digit(last)?)
        }
        _ => None,
    }
}

/// [`decimal`] of a whole frame.
pub(super) fn number(parts: &Multipart<'_>, index: usize) -> Option<u64> {
    decimal(whole(parts, index)?)
}

/// [`number`] in 32 bits.
pub(super) fn number32(parts: &Multipart<'_>, index: usize) -> Option<u32> {
    u32::try_from(number(parts, index)?).ok()
}

/// A decimal number that may be negative.
pub(super) fn signed(parts: &Multipart<'_>, index: usize) -> Option<i64> {
    match whole(parts, index)? {
        [b'-', digits @ ..] => i64::try_from(decimal(digits)?).ok()?.checked_neg(),
        digits => i64::try_from(decimal(digits)?).ok(),
    }
}

/// A name: printable ASCII without blanks, not empty.
pub(super) fn name<'a>(parts: &Multipart<'a>, index: usize) -> Option<&'a str> {
    as_name(whole(parts, index)?)
}

fn as_name(bytes: &[u8]) -> Option<&str> {
    let fits = !bytes.is_empty() && bytes.iter().all(u8::is_ascii_graphic);
    if fits { std::str::from_utf8(bytes).ok() } else { None }
}

/// The engine key in a mori engine descriptor: the first item of its array (`EngineDesc`, mori
/// `include/mori/io/common.hpp`), empty where the descriptor is of another shape. `None` for an empty frame.
pub(super) fn engine_key<'a>(parts: &Multipart<'a>, index: usize) -> Option<&'a str> {
    let frame = parts.frame(index).filter(|f| !f.is_empty())?;
    let key = msgpack::array(frame.bytes).and_then(|(_, items)| msgpack::text(items));
    Some(key.and_then(as_name).unwrap_or_default())
}

/// How many memory descriptors a frame lists (`_pack_mem_desc_list`, SGLang `disaggregation/mori/conn.py`: an array of
/// binaries, or an empty frame).
pub(super) fn descriptors(parts: &Multipart<'_>, index: usize) -> Option<u32> {
    let frame = parts.frame(index)?;
    if frame.is_empty() {
        return Some(0);
    }
    u32::try_from(msgpack::array(frame.bytes)?.0).ok()
}

/// Free text as far as it was kept and is UTF-8.
pub(super) fn prose<'a>(parts: &Multipart<'a>, index: usize) -> &'a str {
    let bytes = parts.frame(index).map_or(&[][..], |f| f.bytes);
    match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(e) => bytes.get(..e.valid_up_to()).and_then(|b| std::str::from_utf8(b).ok()).unwrap_or_default(),
    }
}

/// A TCP port.
pub(super) fn port(parts: &Multipart<'_>, index: usize) -> Option<u16> {
    u16::try_from(number(parts, index)?).ok().filter(|port| *port != 0)
}

/// Host and port in two frames.
pub(super) fn endpoint<'a>(parts: &Multipart<'a>, host: usize, port_at: usize) -> Option<Endpoint<'a>> {
    let port = port(parts, port_at)?;
    let host = name(parts, host)?;
    // A host of digits alone is a count that stands where the host should.
    if host.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some(Endpoint { ip: ip(host), host, port })
}

/// The address a host text names, with or without brackets; an IPv4-mapped one as IPv4.
fn ip(host: &str) -> Option<IpAddr> {
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    bare.parse::<IpAddr>().ok().map(|ip| ip.to_canonical())
}

/// Number of items of `width` bytes in a frame of packed numbers.
pub(super) fn items(frame: Frame<'_>, width: u64) -> Option<u64> {
    (frame.len.checked_rem(width) == Some(0)).then(|| frame.len.checked_div(width)).flatten()
}

/// [`items`] of eight bytes (pointers), in 32 bits.
pub(super) fn pointers(parts: &Multipart<'_>, index: usize) -> Option<u32> {
    u32::try_from(items(parts.frame(index)?, 8)?).ok()
}

/// Whether the frame is a packed list (`pack_int_lists`, SGLang `disaggregation/common/utils.py` ≥ 0.5.12):
/// `u32 n`, n times a `u32` length, then that many bytes. `None` where both readings are open: an empty
/// frame, or one of which too little was kept.
pub(super) fn is_packed_list(frame: Frame<'_>) -> Option<bool> {
    if frame.is_empty() {
        return None;
    }
    let words = frame.bytes.chunks_exact(4);
    let mut words = words.filter_map(|w| Some(u32::from_le_bytes(w.try_into().ok()?)));
    let Some(count) = words.next() else {
        return if frame.whole().is_some() { Some(false) } else { None };
    };
    let head = 4u64.saturating_add(u64::from(count).saturating_mul(4));
    if head > frame.len {
        return Some(false);
    }
    let mut total = head;
    for _ in 0..count {
        match words.next() {
            Some(len) => total = total.saturating_add(u64::from(len)),
            None => return None,
        }
    }
    Some(total == frame.len)
}

/// Whether the frame holds 64-bit page indices rather than 32-bit ones: then every second word is zero,
/// which cannot be with 32-bit indices, since page 0 is never handed out (SGLang's allocators begin at 1).
/// `None` where both readings are open.
pub(super) fn is_wide(frame: Frame<'_>) -> Option<bool> {
    if frame.is_empty() {
        return None;
    }
    if items(frame, 8).is_none() {
        return Some(false);
    }
    let mut high = frame.bytes.chunks_exact(8).filter_map(|w| w.last_chunk::<4>()).peekable();
    high.peek()?;
    Some(high.all(|w| *w == [0; 4]))
}
