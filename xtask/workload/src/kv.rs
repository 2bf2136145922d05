//! The block that stands for a room's KV bytes. Pure.

/// Bytes of it.
pub(crate) const SIZE: usize = 64;

/// Room and prefill rank behind a header of 24 bytes.
pub(crate) fn write(block: &mut [u8; SIZE], room: u64, rank: u32) {
    let fields = (SIZE as u64 - 24).to_le_bytes().into_iter().chain([0; 16]);
    let body = room.to_le_bytes().into_iter().chain(rank.to_le_bytes());
    for (to, from) in block.iter_mut().zip(fields.chain(body)) {
        *to = from;
    }
}

/// Reads them back.
pub(crate) fn read(block: &[u8; SIZE]) -> Option<(u64, u32)> {
    let room = block.get(24..32)?.try_into().ok()?;
    let rank = block.get(32..36)?.try_into().ok()?;
    Some((u64::from_le_bytes(room), u32::from_le_bytes(rank)))
}
