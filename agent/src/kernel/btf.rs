//! The running kernel's type information, as far as member offsets and enumerators need it.
//!
//! Pure: reads bytes it is given (format: kernel `Documentation/bpf/btf.rst`). aya keeps its own reader of this
//! format private, and the other crate for it is under the LGPL, which a static binary under the Apache licence
//! should not carry; hence this small one.

use std::ops::Range;

/// Kinds that matter here, by their number in `include/uapi/linux/btf.h`.
mod kind {
    pub(super) const INT: u32 = 1;
    pub(super) const PTR: u32 = 2;
    pub(super) const ARRAY: u32 = 3;
    pub(super) const STRUCT: u32 = 4;
    pub(super) const UNION: u32 = 5;
    pub(super) const ENUM: u32 = 6;
    pub(super) const TYPEDEF: u32 = 8;
    pub(super) const VOLATILE: u32 = 9;
    pub(super) const CONST: u32 = 10;
    pub(super) const FUNC_PROTO: u32 = 13;
    pub(super) const VAR: u32 = 14;
    pub(super) const DATASEC: u32 = 15;
    pub(super) const DECL_TAG: u32 = 17;
    pub(super) const TYPE_TAG: u32 = 18;
    pub(super) const ENUM64: u32 = 19;
    pub(super) const LAST: u32 = 19;
}

/// First two bytes of the data (`BTF_MAGIC`).
const MAGIC: u16 = 0xeb9f;

/// How deep anonymous members and qualifiers may nest: far beyond any kernel, and no loop in hostile data.
const DEPTH: u32 = 32;

/// Why the data cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum BtfError {
    #[error("not BTF of this machine's byte order (first bytes {0:#06x})")]
    Magic(u16),
    #[error("cut short at byte {0}")]
    Short(usize),
    #[error("type {id} has kind {kind}, which this release does not know")]
    Kind { id: usize, kind: u32 },
}

/// The types, by id. Look-ups by name go through all of them: there are a few dozen, once at start.
pub(super) struct Btf {
    bytes: Vec<u8>,
    data: Range<usize>,
    strings: Range<usize>,
    /// Byte offset of each type in `data`, by id; id 0 is `void`.
    types: Vec<usize>,
}

#[derive(Clone, Copy)]
struct Head {
    name: u32,
    kind: u32,
    vlen: u32,
    /// Bit fields carry their size in the upper byte of the offset.
    kind_flag: bool,
    type_id: u32,
    body: usize,
}

impl Btf {
    /// Finds where each type begins.
    pub(super) fn parse(bytes: Vec<u8>) -> Result<Self, BtfError> {
        let magic = u16::from_ne_bytes(array(&bytes, 0)?);
        if magic != MAGIC {
            return Err(BtfError::Magic(magic));
        }
        let header = size(word(&bytes, 4)?);
        let section = |offset, length| -> Result<Range<usize>, BtfError> {
            let start = header.saturating_add(size(word(&bytes, offset)?));
            let end = start.saturating_add(size(word(&bytes, length)?));
            bytes.get(start..end).ok_or(BtfError::Short(bytes.len()))?;
            Ok(start..end)
        };
        let (data, strings) = (section(8, 12)?, section(16, 20)?);
        let mut btf = Self { bytes, data, strings, types: vec![0] };
        btf.types = btf.index()?;
        Ok(btf)
    }

    fn index(&self) -> Result<Vec<usize>, BtfError> {
        let mut types = vec![0];
        let mut at = 0;
        while at < self.data.len() {
            let head = self.head_at(at)?;
            let body = match head.kind {
                kind::INT | kind::VAR | kind::DECL_TAG => 4,
                kind::ARRAY => 12,
                kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => 12 * size(head.vlen),
                kind::ENUM | kind::FUNC_PROTO => 8 * size(head.vlen),
                1..=kind::LAST => 0,
                kind => return Err(BtfError::Kind { id: types.len(), kind }),
            };
            types.push(at);
            at = head.body.saturating_add(body);
        }
        Ok(types)
    }

    /// Whether there is a type of this name, of whatever kind.
    pub(super) fn has(&self, name: &str) -> bool {
        self.named(name).next().is_some()
    }

    /// Whether there is a structure of this name.
    pub(super) fn has_structure(&self, name: &str) -> bool {
        self.named(name).any(|(_, head)| head.kind == kind::STRUCT)
    }

    fn named(&self, name: &str) -> impl Iterator<Item = (u32, Head)> {
        (1_u32..)
            .map_while(|id| Some((id, self.head(id)?)))
            .filter(move |(_, head)| head.name != 0 && self.string(head.name) == Some(name.as_bytes()))
    }

    /// Byte offset of the member at `path` (dots between names) of a structure; looks through anonymous
    /// structures and unions, typedefs and qualifiers. `None`: not there, or a bit field.
    pub(super) fn offset(&self, structure: &str, path: &str) -> Option<u32> {
        self.named(structure).filter(|(_, head)| head.kind == kind::STRUCT).find_map(|(mut id, _)| {
            let mut bits = 0_u32;
            for name in path.split('.') {
                let (offset, inner) = self.member(id, name, 0)?;
                bits = bits.checked_add(offset)?;
                id = inner;
            }
            bits.is_multiple_of(8).then_some(bits / 8)
        })
    }

    /// Value of an enumerator of a named enumeration.
    pub(super) fn enumerator(&self, enumeration: &str, name: &str) -> Option<u32> {
        self.named(enumeration).filter(|(_, head)| head.kind == kind::ENUM).find_map(|(_, head)| {
            (0..size(head.vlen)).find_map(|n| {
                let at = head.body.saturating_add(8 * n);
                let found = self.string(self.word(at).ok()?)? == name.as_bytes();
                found.then(|| self.word(at + 4).ok())?
            })
        })
    }

    /// How many arguments a tracepoint hands to its programs, and whether the last is a truth value. `None`: there is no
    /// such tracepoint.
    pub(super) fn tracepoint(&self, name: &str) -> Option<(u32, bool)> {
        // typedef void (*btf_trace_NAME)(void *, arguments)
        let (_, typedef) = self.named(&format!("btf_trace_{name}")).find(|(_, h)| h.kind == kind::TYPEDEF)?;
        let pointer = self.head(typedef.type_id).filter(|head| head.kind == kind::PTR)?;
        let function = self.head(pointer.type_id).filter(|head| head.kind == kind::FUNC_PROTO)?;
        let last = function.vlen.checked_sub(1)?;
        let id = self.word(function.body.saturating_add(8 * size(last) + 4)).ok()?;
        let truth = self.resolved(id).is_some_and(|head| head.kind == kind::INT && self.is_bool(&head));
        Some((last, truth))
    }

    /// `BTF_INT_BOOL` in the encoding of an integer type.
    fn is_bool(&self, head: &Head) -> bool {
        self.word(head.body).is_ok_and(|encoding| (encoding >> 24) & 0x4 != 0)
    }

    /// Bit offset of a member and the type behind it.
    fn member(&self, id: u32, name: &str, depth: u32) -> Option<(u32, u32)> {
        let head = self.resolved(id)?;
        if depth > DEPTH || !matches!(head.kind, kind::STRUCT | kind::UNION) {
            return None;
        }
        (0..size(head.vlen)).find_map(|n| {
            let at = head.body.saturating_add(12 * n);
            let own = self.string(self.word(at).ok()?).unwrap_or_default();
            let inner = self.word(at + 4).ok()?;
            let offset = self.word(at + 8).ok()?;
            let offset = if head.kind_flag { offset & 0x00ff_ffff } else { offset };
            if own == name.as_bytes() {
                Some((offset, inner))
            } else if own.is_empty() {
                let (more, found) = self.member(inner, name, depth + 1)?;
                Some((offset.checked_add(more)?, found))
            } else {
                None
            }
        })
    }

    /// The type behind typedefs and qualifiers.
    fn resolved(&self, mut id: u32) -> Option<Head> {
        for _ in 0..DEPTH {
            let head = self.head(id)?;
            match head.kind {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::TYPE_TAG => id = head.type_id,
                _ => return Some(head),
            }
        }
        None
    }

    fn head(&self, id: u32) -> Option<Head> {
        if id == 0 {
            return None;
        }
        self.head_at(*self.types.get(size(id))?).ok()
    }

    fn head_at(&self, at: usize) -> Result<Head, BtfError> {
        let info = self.word(at + 4)?;
        Ok(Head {
            name: self.word(at)?,
            kind: (info >> 24) & 0x1f,
            vlen: info & 0xffff,
            kind_flag: info >> 31 == 1,
            type_id: self.word(at + 8)?,
            body: at + 12,
        })
    }

    fn word(&self, at: usize) -> Result<u32, BtfError> {
        word(self.bytes.get(self.data.clone()).unwrap_or_default(), at)
    }

    fn string(&self, offset: u32) -> Option<&[u8]> {
        let rest = self.bytes.get(self.strings.clone())?.get(size(offset)..)?;
        rest.get(..rest.iter().position(|b| *b == 0)?)
    }
}

fn array<const N: usize>(data: &[u8], at: usize) -> Result<[u8; N], BtfError> {
    data.get(at..).and_then(|rest| rest.get(..N)).and_then(|b| b.try_into().ok()).ok_or(BtfError::Short(at))
}

fn word(data: &[u8], at: usize) -> Result<u32, BtfError> {
    Ok(u32::from_ne_bytes(array(data, at)?))
}

fn size(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_read(mut data in proptest::collection::vec(any::<u8>(), 0..400)) {
            if data.len() > 24 {
                data.splice(..2, MAGIC.to_ne_bytes());
                data.splice(4..8, 24_u32.to_ne_bytes());
                data.splice(8..24, [0; 16]);
                let half = u32::try_from((data.len() - 24) / 2).unwrap();
                data.splice(12..16, half.to_ne_bytes());
                data.splice(16..20, half.to_ne_bytes());
                data.splice(20..24, half.to_ne_bytes());
            }
            if let Ok(btf) = Btf::parse(data) {
                btf.offset("sock", "a.b");
                btf.enumerator("e", "f");
            }
        }
    }

    #[test]
    fn a_cut_or_foreign_file_is_named() {
        assert_eq!(Btf::parse(Vec::new()).err(), Some(BtfError::Short(0)));
        assert_eq!(
            Btf::parse(b"\x7fELF....".to_vec()).err(),
            Some(BtfError::Magic(u16::from_ne_bytes(*b"\x7fE")))
        );
        let mut cut = MAGIC.to_ne_bytes().to_vec();
        cut.extend([1, 0, 24, 0, 0, 0, 0, 0, 0, 0, 255, 0, 0, 0]);
        assert!(matches!(Btf::parse(cut).err(), Some(BtfError::Short(_))));
    }
}
