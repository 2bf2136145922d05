//! The typed messages. Only ids, counts, addresses and states are kept; page indices, pointers and
//! auxiliary data never leave the decoder.

use std::cmp::Ordering;
use std::net::IpAddr;

use serde::{Deserialize, Serialize, Serializer};

/// Transfer backend whose layout the message has. Ascend uses mooncake's messages unchanged
/// (SGLang `disaggregation/ascend/conn.py`), so the two cannot be told apart on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Backend {
    /// Mooncake or ascend.
    Mooncake,
    /// NIXL.
    Nixl,
    /// Mori.
    Mori,
    /// A message that all backends share (ABORT, BOOTSTRAP, …).
    Shared,
}

impl Backend {
    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Mooncake => "mooncake",
            Self::Nixl => "nixl",
            Self::Mori => "mori",
            Self::Shared => "shared",
        }
    }
}

/// An SGLang release as a sortable number, for example 0.4.8.post1 → `Release::new(0, 4, 8, 1)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Release {
    /// major, minor, patch, post
    pub parts: [u16; 4],
}

impl Release {
    /// `major.minor.patch[.postN]`, `post` 0 for none.
    pub const fn new(major: u16, minor: u16, patch: u16, post: u16) -> Self {
        Self { parts: [major, minor, patch, post] }
    }
}

impl Ord for Release {
    /// As one number: compared for every message.
    fn cmp(&self, other: &Self) -> Ordering {
        let number = |Self { parts }: &Self| parts.iter().fold(0u64, |n, part| n << 16 | u64::from(*part));
        number(self).cmp(&number(other))
    }
}

impl PartialOrd for Release {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// Releases whose encoder can have produced what was seen, both ends inclusive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Releases {
    /// Oldest.
    pub min: Release,
    /// Newest examined.
    pub max: Release,
}

/// KV poll states, mirrored from SGLang `disaggregation/base/conn.py` (all releases).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[repr(u8)]
#[allow(missing_docs, reason = "the names are the engine's own")]
pub enum KvPoll {
    Failed = 0,
    Bootstrapping = 1,
    WaitingForInput = 2,
    Transferring = 3,
    Success = 4,
}

impl KvPoll {
    /// From the digit on the wire.
    pub const fn from_wire(n: u64) -> Option<Self> {
        match n {
            0 => Some(Self::Failed),
            1 => Some(Self::Bootstrapping),
            2 => Some(Self::WaitingForInput),
            3 => Some(Self::Transferring),
            4 => Some(Self::Success),
            _ => None,
        }
    }

    /// The engine's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Failed => "Failed",
            Self::Bootstrapping => "Bootstrapping",
            Self::WaitingForInput => "WaitingForInput",
            Self::Transferring => "Transferring",
            Self::Success => "Success",
        }
    }

    /// Failed or Success.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Failed | Self::Success)
    }
}

/// Which way a message goes by its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Flow {
    /// Decode rank → prefill rank.
    DecodeToPrefill,
    /// Prefill rank → decode rank.
    PrefillToDecode,
    /// Between ranks of one prefill instance (PP consensus).
    InsidePrefill,
}

/// A decoded message with what its shape says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decoded<'a> {
    /// Whose layout.
    pub backend: Backend,
    /// Releases with this layout.
    pub releases: Releases,
    /// Frames behind the last one the layout knows (newer release): tolerated and counted.
    pub extra_frames: u16,
    /// The message.
    #[serde(borrow)]
    pub message: Message<'a>,
}

/// The closed set of messages.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Message<'a> {
    /// A decode rank introduces itself, once per connection pool key.
    #[serde(borrow)]
    Register(Register<'a>),
    /// A decode rank asks for one room's KV, one per prefill rank (dummies included).
    #[serde(borrow)]
    Metadata(Metadata<'a>),
    /// Decode gives a room up.
    Abort(RoomFrom),
    /// Policy `prefill_complete`: decode names itself before prefill computes.
    Bootstrap(RoomFrom),
    /// Staging: ring position of a decode rank (no room).
    #[serde(borrow)]
    Watermark(Watermark<'a>),
    /// Staging: room for a chunk, or never (oversized).
    #[serde(borrow)]
    StagingRsp(StagingRsp<'a>),
    /// Result of a room, or with 2 "prefill done, allocate now".
    #[serde(borrow)]
    Status(Status<'a>),
    /// Auxiliary data over TCP; only its length is kept.
    AuxData(AuxData),
    /// Staging: a chunk lies in the staging buffer.
    #[serde(borrow)]
    ChunkReady(ChunkReady<'a>),
    /// Staging: a chunk needs room.
    #[serde(borrow)]
    StagingReq(StagingReq<'a>),
    /// Prefill has seen an ABORT.
    AbortAck(AbortAck),
    /// PP consensus inside the prefill instance: a status of one PP rank (`None`: deleted).
    PpState(PpState),
}

/// REGISTER.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Register<'a> {
    /// Decode rank's endpoint (its PULL socket).
    #[serde(borrow)]
    pub decode: Endpoint<'a>,
    /// Session: mooncake `host:port` of the transfer engine, NIXL agent name, mori engine key (empty where its
    /// descriptor is of another shape).
    #[serde(serialize_with = "plain")]
    pub session: &'a str,
    /// Decode's tensor-parallel rank, where the layout has it.
    pub tp_rank: Option<u32>,
    /// Decode's (attention) tensor-parallel size, where the layout has it.
    pub tp_size: Option<u32>,
    /// Number of KV buffers.
    pub kv_buffers: Option<u32>,
    /// Number of auxiliary buffers.
    pub aux_buffers: Option<u32>,
    /// Bytes of one KV item, where the layout has it.
    pub kv_item_len: Option<u64>,
    /// NIXL: bytes of the agent metadata.
    pub agent_metadata_len: Option<u64>,
    /// Staging buffer: base pointer present, and its size in bytes.
    pub staging: Option<Staging>,
}

/// Staging buffer of a decode rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Staging {
    /// Base address.
    pub base: u64,
    /// Bytes.
    pub size: u64,
}

/// An endpoint as text on the wire: address and port of a rank's PULL socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Endpoint<'a> {
    /// Parsed address, `None` when the text is a host name.
    pub ip: Option<IpAddr>,
    /// The text.
    #[serde(serialize_with = "plain")]
    pub host: &'a str,
    /// Port.
    pub port: u16,
}

/// METADATA.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Metadata<'a> {
    /// Room.
    #[serde(with = "crate::room_text")]
    pub room: u64,
    /// Decode rank's endpoint; `None` only for the two-frame dummy of NIXL 0.4.6.post5.
    #[serde(borrow)]
    pub decode: Option<Endpoint<'a>>,
    /// Session, empty where the layout has none (NIXL ≤ 0.4.6.post5).
    #[serde(serialize_with = "plain")]
    pub session: &'a str,
    /// Number of KV pages (index frame length ÷ width of an index).
    pub pages: u64,
    /// Slot of the auxiliary buffer; `None` in a dummy.
    pub aux_index: Option<u32>,
    /// Whether this prefill rank is only told and owes nothing; `None` where the layout cannot say (NIXL
    /// 0.4.8.post1–0.5.16 with an empty index frame: a full cache hit looks the same).
    pub dummy: Option<bool>,
    /// How many distinct sessions prefill waits for; `None` where the layout has no such field (then 1).
    pub required: Option<u32>,
    /// Tokens decode already has.
    pub decode_prefix_len: Option<u64>,
}

/// A message that carries a room and where it came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RoomFrom {
    /// Room.
    #[serde(with = "crate::room_text")]
    pub room: u64,
    /// Decode rank's address, `None` when the text is a host name.
    pub ip: Option<IpAddr>,
    /// Decode rank's port.
    pub port: u16,
    /// ABORT ≥ 0.5.22: set when decode holds pages until the acknowledgement.
    pub generation: Option<u64>,
}

/// WATERMARK.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watermark<'a> {
    /// Round of the ring.
    pub round: u64,
    /// Tail of the ring.
    pub tail: u64,
    /// Session.
    #[serde(serialize_with = "plain")]
    pub session: &'a str,
}

/// STAGING_RSP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagingRsp<'a> {
    /// Room.
    #[serde(with = "crate::room_text")]
    pub room: u64,
    /// Chunk.
    pub chunk: u32,
    /// Offset in the staging buffer; −2: can never fit.
    pub offset: i64,
    /// Round of the ring.
    pub round: u64,
    /// End offset; −1 when oversized.
    pub end: i64,
    /// Session.
    #[serde(serialize_with = "plain")]
    pub session: &'a str,
}

/// STATUS.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status<'a> {
    /// Room.
    #[serde(with = "crate::room_text")]
    pub room: u64,
    /// The state it carries: 0, 4, or 2 under `prefill_complete`.
    pub status: KvPoll,
    /// Which prefill rank says so (≥ 0.4.8.post1).
    pub prefill_rank: Option<u32>,
    /// NIXL and mori: reason of a failure.
    #[serde(serialize_with = "plain")]
    pub reason: &'a str,
}

/// AUX_DATA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AuxData {
    /// Room.
    #[serde(with = "crate::room_text")]
    pub room: u64,
    /// Which auxiliary buffer.
    pub buffer_index: u32,
    /// Slot.
    pub aux_index: u32,
    /// Bytes.
    pub len: u64,
}

/// CHUNK_READY.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkReady<'a> {
    /// Room.
    #[serde(with = "crate::room_text")]
    pub room: u64,
    /// Chunk.
    pub chunk: u32,
    /// First page.
    pub page_start: u64,
    /// Pages.
    pub pages: u64,
    /// Session or agent name of the writer.
    #[serde(serialize_with = "plain")]
    pub writer: &'a str,
    /// Prefill rank.
    pub prefill_rank: u32,
}

/// STAGING_REQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagingReq<'a> {
    /// Room.
    #[serde(with = "crate::room_text")]
    pub room: u64,
    /// Chunk.
    pub chunk: u32,
    /// Pages of the chunk.
    pub pages: u64,
    /// Session.
    #[serde(serialize_with = "plain")]
    pub session: &'a str,
    /// Mooncake ≥ 0.5.18.
    pub pp_rank: Option<u32>,
}

/// ABORT_ACK.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AbortAck {
    /// Room.
    #[serde(with = "crate::room_text")]
    pub room: u64,
    /// Deferred release on (≥ 0.5.19): prefill rank. Absent: sent for every ABORT, also for unknown rooms.
    pub prefill_rank: Option<u32>,
    /// ≥ 0.5.22.
    pub generation: Option<u64>,
}

/// One entry of the PP consensus store (≥ 0.5.22, prefill pp_size > 1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PpState {
    /// Room.
    #[serde(with = "crate::room_text")]
    pub room: u64,
    /// PP rank that reports.
    pub pp_rank: u32,
    /// Its status; `None` when the entry was deleted.
    pub status: Option<KvPoll>,
}

/// Text that JSON can hold without escapes, so that it can be read back in place: what cannot be is U+FFFD.
fn plain<S: Serializer>(text: &str, to: S) -> Result<S::Ok, S::Error> {
    let odd = |c: char| c == '"' || c == '\\' || c.is_control();
    if text.contains(odd) {
        return to.serialize_str(&text.replace(odd, "\u{fffd}"));
    }
    to.serialize_str(text)
}

impl Message<'_> {
    /// The kind's name, as in the facts and in `roomtrace_messages_total{kind}`.
    pub const fn kind(&self) -> Kind {
        match self {
            Self::Register(_) => Kind::Register,
            Self::Metadata(_) => Kind::Metadata,
            Self::Abort(_) => Kind::Abort,
            Self::Bootstrap(_) => Kind::Bootstrap,
            Self::Watermark(_) => Kind::Watermark,
            Self::StagingRsp(_) => Kind::StagingRsp,
            Self::Status(_) => Kind::Status,
            Self::AuxData(_) => Kind::AuxData,
            Self::ChunkReady(_) => Kind::ChunkReady,
            Self::StagingReq(_) => Kind::StagingReq,
            Self::AbortAck(_) => Kind::AbortAck,
            Self::PpState(_) => Kind::PpState,
        }
    }

    /// The room it speaks of, where it has one.
    pub const fn room(&self) -> Option<u64> {
        match self {
            Self::Register(_) | Self::Watermark(_) => None,
            Self::Metadata(m) => Some(m.room),
            Self::Abort(m) | Self::Bootstrap(m) => Some(m.room),
            Self::StagingRsp(m) => Some(m.room),
            Self::Status(m) => Some(m.room),
            Self::AuxData(m) => Some(m.room),
            Self::ChunkReady(m) => Some(m.room),
            Self::StagingReq(m) => Some(m.room),
            Self::AbortAck(m) => Some(m.room),
            Self::PpState(m) => Some(m.room),
        }
    }
}

/// Message kinds without their contents.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[allow(missing_docs, reason = "one per variant of Message")]
pub enum Kind {
    Register,
    Metadata,
    Abort,
    Bootstrap,
    Watermark,
    StagingRsp,
    Status,
    AuxData,
    ChunkReady,
    StagingReq,
    AbortAck,
    PpState,
}

impl Kind {
    /// Every kind.
    pub const ALL: [Self; 12] = [
        Self::Register,
        Self::Metadata,
        Self::Abort,
        Self::Bootstrap,
        Self::Watermark,
        Self::StagingRsp,
        Self::Status,
        Self::AuxData,
        Self::ChunkReady,
        Self::StagingReq,
        Self::AbortAck,
        Self::PpState,
    ];

    /// The engine's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Register => "REGISTER",
            Self::Metadata => "METADATA",
            Self::Abort => "ABORT",
            Self::Bootstrap => "BOOTSTRAP",
            Self::Watermark => "WATERMARK",
            Self::StagingRsp => "STAGING_RSP",
            Self::Status => "STATUS",
            Self::AuxData => "AUX_DATA",
            Self::ChunkReady => "CHUNK_READY",
            Self::StagingReq => "STAGING_REQ",
            Self::AbortAck => "ABORT_ACK",
            Self::PpState => "PP_STATE",
        }
    }

    /// Which way it goes.
    pub const fn flow(self) -> Flow {
        match self {
            Self::Register
            | Self::Metadata
            | Self::Abort
            | Self::Bootstrap
            | Self::Watermark
            | Self::StagingRsp => Flow::DecodeToPrefill,
            Self::Status | Self::AuxData | Self::ChunkReady | Self::StagingReq | Self::AbortAck => {
                Flow::PrefillToDecode
            }
            Self::PpState => Flow::InsidePrefill,
        }
    }
}
