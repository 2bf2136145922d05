//! Where a Mooncake transfer goes: the buffers that a decode rank's REGISTER names, and the pages and the slot that a METADATA
//! names in them. Only for the optional probes; nobody else reads these fields.
//!
//! Pure. Sources: SGLang `disaggregation/mooncake/conn.py` 0.4.8.post1 to 0.5.23 (`send_kvcache`, `send_aux`): page `n` of a
//! buffer begins at its pointer plus `n` times its item length; slot `n` of an auxiliary buffer likewise.

use super::message::{Backend, Decoded, Metadata, Register};
use crate::zmtp::Multipart;

/// Frames of REGISTER and METADATA of mooncake, the same in all those releases.
const KV: usize = 4;
const AUX: usize = 5;
/// Frame of REGISTER with an item length for each buffer (≥ 0.5.21).
const ITEM_LENS: usize = 19;
/// Frame of METADATA with pages of a second kind (≥ 0.5.17, hierarchical sparse attention).
const DEVICE_PAGES: usize = 9;

/// Buffers of a decode rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Buffers {
    /// Address and bytes of a page of each KV buffer, by address.
    kv: Vec<(u64, u64)>,
    /// Addresses of the auxiliary buffers.
    aux: Vec<u64>,
}

impl Buffers {
    /// Those of a REGISTER; `None`: of another backend, or not all of it is here.
    pub(crate) fn of(decoded: &Decoded<'_>, register: &Register<'_>, parts: &Multipart<'_>) -> Option<Self> {
        if decoded.backend != Backend::Mooncake {
            return None;
        }
        let pointers = words(parts.entire(KV)?)?;
        let item = register.kv_item_len.filter(|len| *len > 0)?;
        let items = parts.entire(ITEM_LENS).and_then(words).filter(|all| all.len() == pointers.len());
        let items = items.unwrap_or_else(|| vec![item; pointers.len()]);
        let mut kv: Vec<_> = pointers.into_iter().zip(items).filter(|(_, item)| *item > 0).collect();
        kv.sort_unstable();
        Some(Self { kv, aux: words(parts.entire(AUX)?)? })
    }

    /// The first and the last page of the KV buffer in which `len` bytes at `address` would lie. Buffers have no known end:
    /// what lies behind all of them has page numbers that no room holds.
    fn pages(&self, address: u64, len: u64) -> Option<(u32, u32)> {
        let behind = self.kv.partition_point(|(base, _)| *base <= address);
        let (base, item) = *self.kv.get(behind.checked_sub(1)?)?;
        let page = |at: u64| u32::try_from(at.checked_sub(base)?.checked_div(item)?).ok();
        Some((page(address)?, page(address.checked_add(len)?.checked_sub(1)?)?))
    }

    fn is_slot(&self, slot: u32, address: u64, len: u64) -> bool {
        let from = |base: &u64| base.checked_add(u64::from(slot).checked_mul(len)?);
        self.aux.iter().any(|base| from(base) == Some(address))
    }
}

/// What one room may be written to at one decode rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Target {
    /// Pages, by number, as far as they were seen.
    pages: Vec<u32>,
    /// Pages that the METADATA names.
    pub(crate) named: u64,
    /// All of them were seen.
    pub(crate) whole: bool,
    slot: Option<u32>,
}

impl Target {
    /// That of a METADATA.
    pub(crate) fn of(metadata: &Metadata<'_>, parts: &Multipart<'_>) -> Self {
        let named = metadata.pages;
        let seen = parts.frame(KV).map(|f| parts.entire(KV).unwrap_or(f.bytes)).unwrap_or_default();
        let narrow = parts.frame(KV).is_some_and(|f| Some(f.len) == named.checked_mul(4));
        let mut pages: Vec<u32> = Vec::new();
        if narrow {
            let all = seen.chunks_exact(4).filter_map(|w| Some(u32::from_le_bytes(w.try_into().ok()?)));
            pages.extend(all);
        }
        let others = parts.frame(DEVICE_PAGES).is_some_and(|f| !f.is_empty());
        let whole = !others && u64::try_from(pages.len()) == Ok(named);
        pages.sort_unstable();
        Self { pages, named, whole, slot: metadata.aux_index }
    }

    /// How many of its pages were seen.
    pub(crate) const fn seen(&self) -> usize {
        self.pages.len()
    }

    /// Keeps no pages: all that is known is that there are some.
    pub(crate) fn forget_pages(&mut self) {
        self.pages = Vec::new();
        self.whole = self.named == 0;
    }

    /// Whether these writes are all to this room's pages or to its slot. One at least must certainly be; where not all pages
    /// were seen the others may be to any.
    pub(crate) fn takes(&self, buffers: &Buffers, writes: impl Iterator<Item = (u64, u64)>) -> bool {
        let mut certain = false;
        for (address, len) in writes {
            let holds = |page: u32| self.pages.binary_search(&page).is_ok();
            let paged = buffers.pages(address, len).is_some_and(|(first, last)| holds(first) && holds(last));
            if paged || self.slot.is_some_and(|slot| buffers.is_slot(slot, address, len)) {
                certain = true;
            } else if self.whole {
                return false;
            }
        }
        certain
    }
}

/// Packed 64-bit numbers.
fn words(bytes: &[u8]) -> Option<Vec<u64>> {
    let words = bytes.chunks(8).map(|w| Some(u64::from_le_bytes(w.try_into().ok()?)));
    words.collect()
}
