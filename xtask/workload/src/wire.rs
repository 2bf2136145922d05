//! The messages of the control channel, frame by frame, as the named releases of SGLang build them. Pure.
//!
//! Source: `mooncake/conn.py`, `nixl/conn.py`, `mori/conn.py`, `common/conn.py` of each release; the tests compare with messages
//! made by SGLang's own encoders.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// One multipart message.
pub(crate) type Frames = Vec<Vec<u8>>;

/// First frame of every NIXL message to a prefill rank.
pub(crate) const NIXL_GUARD: &[u8] = b"NixlMsgGuard";

/// First frame of mori's REGISTER, METADATA and STATUS.
pub(crate) const MORI_GUARD: &[u8] = b"MoriMsgGuard";

/// Which engine a rank behaves as: its messages and what it does with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub(crate) enum Engine {
    /// SGLang 0.5.23 with Mooncake.
    #[value(name = "mooncake-0.5.23")]
    Mooncake0523,
    /// SGLang 0.5.17 with NIXL: no status of its own on the wire, no bootstrap time-out.
    #[value(name = "nixl-0.5.17")]
    Nixl0517,
    /// SGLang 0.5.20 with NIXL: only failures are on the wire.
    #[value(name = "nixl-0.5.20")]
    Nixl0520,
    /// SGLang 0.5.23 with mori.
    #[value(name = "mori-0.5.23")]
    Mori0523,
}

impl Engine {
    /// Whether it is one of the NIXL engines.
    pub(crate) fn nixl(self) -> bool {
        matches!(self, Self::Nixl0517 | Self::Nixl0520)
    }

    /// Whether it is the mori engine.
    pub(crate) fn mori(self) -> bool {
        self == Self::Mori0523
    }

    /// Whether a receive thread ends with the first message that it cannot read. Mori's logs it and goes on.
    pub(crate) fn dies_of_nonsense(self) -> bool {
        !self.mori()
    }

    /// Whether Success travels as a message.
    pub(crate) fn tells_success(self) -> bool {
        !self.nixl()
    }

    /// Whether Failed travels as a message.
    pub(crate) fn tells_failure(self) -> bool {
        self != Self::Nixl0517
    }

    /// Whether ABORT carries a generation and is answered (deferred release of KV, on by default).
    pub(crate) fn answers_abort(self) -> bool {
        !self.nixl()
    }

    /// Release, as the engine says it.
    pub(crate) fn version(self) -> &'static str {
        match self {
            Self::Nixl0517 => "0.5.17",
            Self::Nixl0520 => "0.5.20",
            Self::Mooncake0523 | Self::Mori0523 => "0.5.23",
        }
    }

    /// `--disaggregation-transfer-backend`.
    pub(crate) fn backend(self) -> &'static str {
        match self {
            Self::Nixl0517 | Self::Nixl0520 => "nixl",
            Self::Mooncake0523 => "mooncake",
            Self::Mori0523 => "mori",
        }
    }

    /// Whether it counts the time that it computes (from 0.5.18).
    pub(crate) fn counts_progress(self) -> bool {
        self != Self::Nixl0517
    }

    /// Whether a sender in Bootstrapping is ever given up (`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`).
    pub(crate) fn has_bootstrap_timeout(self) -> bool {
        self != Self::Nixl0517
    }
}

/// How a decode rank names itself in its messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DecodeName {
    /// Address of its PULL socket, without brackets.
    pub ip: String,
    /// Port of its PULL socket.
    pub port: u16,
    /// Mooncake session (`host:port`), NIXL agent name or mori engine key.
    pub session: String,
    /// Where it takes KV bytes (part of NIXL's agent metadata and of mori's engine descriptor).
    pub kv_endpoint: String,
    /// Its tensor-parallel rank and size.
    pub tp: (u32, u32),
}

/// What METADATA says of one room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Metadata {
    /// The room.
    pub room: u64,
    /// KV pages at decode; empty for a dummy rank.
    pub pages: Vec<i32>,
    /// Slot of the first token's data; `None` for a dummy rank.
    pub aux_index: Option<u32>,
    /// How many decode ranks prefill must hear from.
    pub required: u32,
}

#[allow(clippy::needless_pass_by_value, reason = "numbers, mostly")]
fn text(value: impl ToString) -> Vec<u8> {
    value.to_string().into_bytes()
}

fn words(values: impl IntoIterator<Item = u64>) -> Vec<u8> {
    values.into_iter().flat_map(u64::to_le_bytes).collect()
}

/// REGISTER: 20 frames for mooncake 0.5.21–0.5.23, 24 frames for NIXL 0.5.17–0.5.22, 18 for mori 0.5.22–0.5.23. A dense model with two
/// layers, so everything about state and staging is empty.
pub(crate) fn register(engine: Engine, who: &DecodeName) -> Frames {
    if engine.mori() {
        return mori_register(who);
    }
    let kv_pointers = words([0x7f00_0000_0000, 0x7f00_0020_0000, 0x7f00_0040_0000, 0x7f00_0060_0000]);
    let aux_pointers = words([0x55d0_0000_1000, 0x55d0_0000_2000]);
    let item_lengths = words([131_072; 4]);
    let (rank, size) = who.tp;
    let none = Vec::new;
    if engine.nixl() {
        vec![
            NIXL_GUARD.to_vec(),
            text("None"),
            text(&who.ip),
            text(who.port),
            text(&who.session),
            text(format!("nixlSerDes|Agent|{}|UCX|{}", who.session, who.kv_endpoint)),
            kv_pointers,
            aux_pointers,
            none(),
            text("0"),
            text(size),
            text(rank),
            text("131072"),
            none(),
            none(),
            none(),
            none(),
            text("1024"),
            text("VRAM,VRAM,VRAM,VRAM"),
            item_lengths,
            none(),
            none(),
            text("1"),
            text("0"),
        ]
    } else {
        vec![
            text("None"),
            text(&who.ip),
            text(who.port),
            text(&who.session),
            kv_pointers,
            aux_pointers,
            none(),
            text(rank),
            text(size),
            text("131072"),
            none(),
            none(),
            none(),
            none(),
            none(),
            none(),
            text("1"),
            text("0"),
            none(),
            item_lengths,
        ]
    }
}

fn mori_register(who: &DecodeName) -> Frames {
    let (rank, size) = who.tp;
    let none = Vec::new;
    vec![
        MORI_GUARD.to_vec(),
        text("None"),
        text(&who.ip),
        text(who.port),
        mori_descriptor(who),
        mori_memory(4),
        mori_memory(2),
        none(),
        text("0"),
        text(size),
        text(rank),
        text("131072"),
        none(),
        none(),
        text("1"),
        text("0"),
        none(),
        none(),
    ]
}

/// msgpack: a text of up to 255 bytes.
fn packed_text(value: &str) -> Vec<u8> {
    let len = u8::try_from(value.len()).unwrap_or(u8::MAX);
    [0xd9, len].into_iter().chain(value.bytes().take(usize::from(len))).collect()
}

/// `EngineDesc` (mori `include/mori/io/common.hpp`): an array of key, node, host name, host, port, pid.
fn mori_descriptor(who: &DecodeName) -> Vec<u8> {
    let (host, port) = who.kv_endpoint.rsplit_once(':').unwrap_or((&who.ip, "0"));
    let mut out = vec![0x96];
    for value in [&who.session, "node", "host", host] {
        out.extend(packed_text(value));
    }
    out.push(0xcd);
    out.extend(port.parse::<u16>().unwrap_or(0).to_be_bytes());
    out.push(0x01);
    out
}

/// Key and `host:port` of an `EngineDesc`.
fn read_mori_descriptor(mut bytes: &[u8]) -> Option<(String, String)> {
    let mut texts = Vec::new();
    bytes = bytes.strip_prefix(&[0x96])?;
    for _ in 0..4 {
        let [0xd9, len, rest @ ..] = bytes else { return None };
        let (value, rest) = rest.split_at_checked(usize::from(*len))?;
        texts.push(std::str::from_utf8(value).ok()?.to_owned());
        bytes = rest;
    }
    let [0xcd, high, low, ..] = bytes else { return None };
    let [key, _, _, host] = <[String; 4]>::try_from(texts).ok()?;
    Some((key, format!("{host}:{}", u16::from_be_bytes([*high, *low]))))
}

/// Memory descriptors: an array of as many binaries of the length that a `MemoryDesc` has.
fn mori_memory(count: u8) -> Vec<u8> {
    let one = [0xc4, 180].into_iter().chain([0x55; 180]);
    [0x90 | count].into_iter().chain(one.cycle().take(182 * usize::from(count))).collect()
}

/// METADATA: 10 frames for mooncake 0.5.17–0.5.23 and mori 0.5.14–0.5.23, 11 frames for NIXL 0.5.17–0.5.23.
pub(crate) fn metadata(engine: Engine, who: &DecodeName, of: &Metadata) -> Frames {
    let pages: Vec<u8> = of.pages.iter().flat_map(|page| page.to_le_bytes()).collect();
    if engine.mori() {
        vec![
            MORI_GUARD.to_vec(),
            text(of.room),
            text(&who.ip),
            text(who.port),
            text(&who.session),
            pages,
            of.aux_index.map(text).unwrap_or_default(),
            Vec::new(),
            text(of.required),
            // Without a prefix this frame is empty.
            Vec::new(),
        ]
    } else if engine.nixl() {
        vec![
            NIXL_GUARD.to_vec(),
            text(of.room),
            text(&who.ip),
            text(who.port),
            text(&who.session),
            pages,
            // A NIXL dummy keeps its aux index and is named in the last frame.
            text(of.aux_index.unwrap_or(0)),
            text(of.required),
            Vec::new(),
            text("0"),
            text(u8::from(of.aux_index.is_none())),
        ]
    } else {
        vec![
            text(of.room),
            text(&who.ip),
            text(who.port),
            text(&who.session),
            pages,
            of.aux_index.map(text).unwrap_or_default(),
            Vec::new(),
            text(of.required),
            text("0"),
            Vec::new(),
        ]
    }
}

/// ABORT: 4 frames, 5 when the decode rank waits for an answer.
pub(crate) fn abort(who: &DecodeName, room: u64, generation: Option<u64>) -> Frames {
    let mut frames = vec![text("ABORT"), text(room), text(&who.ip), text(who.port)];
    frames.extend(generation.map(text));
    frames
}

/// `ABORT_ACK` with deferred release on, 0.5.22 and later.
pub(crate) fn abort_ack(room: u64, rank: u32, generation: u64) -> Frames {
    vec![text("ABORT_ACK"), text(room), text(rank), text(generation)]
}

/// AUX_DATA: how mori sends the first token's data by default, one message for each buffer, before STATUS.
pub(crate) fn aux_data(room: u64, buffer: u32, slot: u32) -> Frames {
    let data = vec![0xa5; 64];
    vec![text("AUX_DATA"), text(room), text(buffer), text(slot), vec![0, 0, 0, 64], data]
}

/// STATUS: 3 frames for mooncake, 5 with a tag and a reason for NIXL and mori.
pub(crate) fn status(engine: Engine, room: u64, code: u8, rank: u32, reason: &str) -> Frames {
    let mut frames = vec![text(room), text(code), text(rank)];
    if engine.nixl() || engine.mori() {
        frames.insert(0, if engine.mori() { MORI_GUARD.to_vec() } else { text("KV_STATUS") });
        frames.push(text(reason));
    }
    frames
}

/// What a prefill rank can be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToPrefill {
    /// A decode rank names itself; `kv_endpoint` is where KV bytes go.
    Register { session: String, kv_endpoint: String },
    /// A decode rank is ready for a room.
    Metadata { room: u64, session: String, ip: String, port: u16, required: u32, dummy: bool },
    /// A decode rank gives a room up.
    Abort { room: u64, ip: String, port: u16, generation: Option<u64> },
}

/// Reads a message at a prefill rank. `None`: not a message of this engine, on which the real receive thread
/// raises and dies.
pub(crate) fn to_prefill(engine: Engine, frames: &Frames) -> Option<ToPrefill> {
    let text = |index: usize| frames.get(index).and_then(|frame| std::str::from_utf8(frame).ok());
    if text(0) == Some("ABORT") {
        let generation = match text(4) {
            Some(number) => Some(number.parse().ok()?),
            None => None,
        };
        return Some(ToPrefill::Abort {
            room: text(1)?.parse().ok()?,
            ip: text(2)?.to_owned(),
            port: text(3)?.parse().ok()?,
            generation,
        });
    }
    let guard = if engine.mori() { MORI_GUARD } else { NIXL_GUARD };
    let first = usize::from(engine.nixl() || engine.mori());
    if first == 1 && frames.first()?.as_slice() != guard {
        return None;
    }
    if engine.mori() && text(1) == Some("None") {
        let (session, kv_endpoint) = read_mori_descriptor(frames.get(4)?)?;
        return Some(ToPrefill::Register { session, kv_endpoint });
    }
    let session = text(first + 3)?.to_owned();
    if text(first) == Some("None") {
        let kv_endpoint =
            if engine.nixl() { text(5)?.rsplit('|').next()?.to_owned() } else { session.clone() };
        return Some(ToPrefill::Register { session, kv_endpoint });
    }
    let (required, dummy) = if engine.nixl() {
        (text(7)?, text(10)? == "1")
    } else if engine.mori() {
        (text(8)?, frames.get(5)?.is_empty() && frames.get(6)?.is_empty())
    } else {
        (text(7)?, frames.get(4)?.is_empty() && frames.get(5)?.is_empty())
    };
    Some(ToPrefill::Metadata {
        room: text(first)?.parse().ok()?,
        session,
        ip: text(first + 1)?.to_owned(),
        port: text(first + 2)?.parse().ok()?,
        required: required.parse().ok()?,
        dummy,
    })
}

/// What a decode rank can be told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ToDecode {
    /// Outcome of a transfer, from one prefill rank.
    Status { room: u64, code: u8, rank: u32 },
    /// The pages of an aborted room are free.
    AbortAck { room: u64 },
    /// The first token's data of a room.
    AuxData,
}

/// Reads a message at a decode rank.
pub(crate) fn to_decode(engine: Engine, frames: &Frames) -> Option<ToDecode> {
    let text = |index: usize| frames.get(index).and_then(|frame| std::str::from_utf8(frame).ok());
    if text(0) == Some("ABORT_ACK") {
        return Some(ToDecode::AbortAck { room: text(1)?.parse().ok()? });
    }
    if engine.mori() && text(0) == Some("AUX_DATA") {
        return Some(ToDecode::AuxData);
    }
    let tag = if engine.mori() { "MoriMsgGuard" } else { "KV_STATUS" };
    let first = usize::from(engine.nixl() || engine.mori());
    if first == 1 && text(0) != Some(tag) {
        return None;
    }
    Some(ToDecode::Status {
        room: text(first)?.parse().ok()?,
        code: text(first + 1)?.parse().ok()?,
        rank: text(first + 2)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn who() -> DecodeName {
        DecodeName {
            ip: "10.0.0.21".into(),
            port: 41207,
            session: "10.0.0.21:15847".into(),
            kv_endpoint: "10.0.0.21:15847".into(),
            tp: (1, 2),
        }
    }

    fn lengths(frames: &Frames) -> Vec<usize> {
        frames.iter().map(Vec::len).collect()
    }

    /// Frames that SGLang's own encoders made (releases in the name), state and prefix taken out where the
    /// workload has none.
    #[test]
    fn messages_are_those_of_sglang() {
        let of = Metadata {
            room: 5_123_456_789_012_345_678,
            pages: vec![64, 65, 66, 67, 129],
            aux_index: Some(3),
            required: 2,
        };
        let metadata_0523 = metadata(Engine::Mooncake0523, &who(), &of);
        let expected: [&[u8]; 10] = [
            b"5123456789012345678",
            b"10.0.0.21",
            b"41207",
            b"10.0.0.21:15847",
            b"@\0\0\0A\0\0\0B\0\0\0C\0\0\0\x81\0\0\0",
            b"3",
            b"",
            b"2",
            b"0",
            b"",
        ];
        assert_eq!(metadata_0523, expected.map(<[u8]>::to_vec));

        let nixl = metadata(Engine::Nixl0517, &who(), &of);
        assert_eq!(lengths(&nixl), [12, 19, 9, 5, 15, 20, 1, 1, 0, 1, 1]);
        let registered = register(Engine::Mooncake0523, &who());
        assert_eq!(lengths(&registered), [4, 9, 5, 15, 32, 16, 0, 1, 1, 6, 0, 0, 0, 0, 0, 0, 1, 1, 0, 32]);
        assert_eq!(register(Engine::Nixl0517, &who()).len(), 24);
        let mori = metadata(Engine::Mori0523, &who(), &of);
        assert_eq!(lengths(&mori), [12, 19, 9, 5, 15, 20, 1, 0, 1, 0]);
        let registered = register(Engine::Mori0523, &who());
        assert_eq!(lengths(&registered)[7..], [0, 1, 1, 1, 6, 0, 0, 1, 1, 0, 0]);
        assert_eq!(
            status(Engine::Mori0523, 77, 0, 1, "why"),
            [&b"MoriMsgGuard"[..], b"77", b"0", b"1", b"why"]
        );

        assert_eq!(abort(&who(), 7, Some(6)), [&b"ABORT"[..], b"7", b"10.0.0.21", b"41207", b"6"]);
        assert_eq!(abort_ack(7, 1, 6), [&b"ABORT_ACK"[..], b"7", b"1", b"6"]);
        assert_eq!(status(Engine::Mooncake0523, 77, 0, 1, "why"), [&b"77"[..], b"0", b"1"]);
        assert_eq!(status(Engine::Nixl0520, 77, 0, 1, "why"), [&b"KV_STATUS"[..], b"77", b"0", b"1", b"why"]);
    }

    #[test]
    fn dummies_are_marked_as_each_backend_does() {
        let of = Metadata { room: 1, pages: vec![], aux_index: None, required: 1 };
        for engine in [Engine::Mooncake0523, Engine::Nixl0517, Engine::Mori0523] {
            let read = to_prefill(engine, &metadata(engine, &who(), &of));
            assert!(matches!(read, Some(ToPrefill::Metadata { dummy: true, .. })), "{engine:?}: {read:?}");
        }
        // A prompt that decode has cached whole is no dummy: no page, but an aux slot.
        let cached = Metadata { aux_index: Some(0), ..of };
        let read = to_prefill(Engine::Mooncake0523, &metadata(Engine::Mooncake0523, &who(), &cached));
        assert!(matches!(read, Some(ToPrefill::Metadata { dummy: false, .. })), "{read:?}");
    }

    #[test]
    fn what_is_written_is_read_back() {
        for engine in [Engine::Mooncake0523, Engine::Nixl0517, Engine::Nixl0520, Engine::Mori0523] {
            let read = to_prefill(engine, &register(engine, &who())).unwrap();
            let ToPrefill::Register { kv_endpoint, .. } = read else { unreachable!("{read:?}") };
            assert_eq!(kv_endpoint, "10.0.0.21:15847");
            assert_eq!(
                to_decode(engine, &status(engine, 9, 4, 2, "")),
                Some(ToDecode::Status { room: 9, code: 4, rank: 2 })
            );
        }
        assert_eq!(to_prefill(Engine::Mooncake0523, &vec![b"hello".to_vec()]), None);
    }
}
