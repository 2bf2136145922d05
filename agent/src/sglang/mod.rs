//! Multipart ZMTP messages → typed SGLang messages, by backend and release.
//!
//! Pure: no I/O, no clock, no unsafe code, no allocation. What a message is stands in `layouts`, how a
//! field is read in `fields`; this file picks the layout. Frames behind the newest layout's last one are
//! tolerated (a newer release adds at the end); anything else that does not fit is [`Unknown`].

mod fields;
mod layouts;
pub mod message;
mod msgpack;
mod pp;
pub(crate) mod targets;

use self::fields::{
    descriptors, endpoint, engine_key, name, number, number32, pointers, prose, signed, whole,
};
use self::layouts::{Count, DummyRule, MetadataLayout, RegisterLayout, Test};
use self::message::{
    AbortAck, AuxData, Backend, ChunkReady, Decoded, Endpoint, KvPoll, Message, Metadata, Register, Releases,
    RoomFrom, Staging, StagingReq, StagingRsp, Status, Watermark,
};
use crate::zmtp::{Grammar, Multipart, Recognition};

/// Guard frame of NIXL messages (SGLang `disaggregation/nixl/conn.py` ≥ 0.4.6.post5).
const NIXL_GUARD: &[u8] = b"NixlMsgGuard";
/// Guard frame of mori messages (SGLang `disaggregation/mori/conn.py` ≥ 0.5.9).
const MORI_GUARD: &[u8] = b"MoriMsgGuard";
/// Where a REGISTER has `None`, a METADATA has its room.
const NO_ROOM: &[u8] = b"None";

/// Why a message was not decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unknown {
    /// `MoriMsgGuard`, but no layout of mori.
    Mori,
    /// `NixlMsgGuard`, but no layout of NIXL.
    Nixl,
    /// A tag, number or `None` that mooncake or all backends send, but no layout of theirs.
    Layout,
    /// A first frame that SGLang's transfer control never sends.
    FirstFrame,
}

impl Unknown {
    /// Every reason.
    pub const ALL: [Self; 4] = [Self::Mori, Self::Nixl, Self::Layout, Self::FirstFrame];

    /// Label value of `roomtrace_unknown_messages_total{backend}`.
    pub const fn backend(self) -> &'static str {
        match self {
            Self::Mori => "mori",
            Self::Nixl => "nixl",
            Self::Layout => "mooncake",
            Self::FirstFrame => "none",
        }
    }
}

/// Decodes one message.
///
/// # Errors
/// [`Unknown`] when no layout fits it.
pub fn decode<'a>(parts: &Multipart<'a>) -> Result<Decoded<'a>, Unknown> {
    let first = whole(parts, 0).ok_or(Unknown::FirstFrame)?;
    match first {
        [b'0'..=b'9', ..] => status(parts).or_else(|| metadata(parts, &layouts::METADATA_BARE)),
        NIXL_GUARD => return nixl(parts).ok_or(Unknown::Nixl),
        MORI_GUARD => return mori(parts).ok_or(Unknown::Mori),
        NO_ROOM => register(parts, &layouts::REGISTER_BARE),
        b"ABORT" => abort(parts),
        b"BOOTSTRAP" => bootstrap(parts),
        b"WATERMARK" => watermark(parts),
        b"STAGING_RSP" => staging_rsp(parts),
        b"KV_STATUS" => kv_status(parts),
        b"AUX_DATA" => aux_data(parts),
        b"CHUNK_READY" => chunk_ready(parts),
        b"STAGING_REQ" => staging_req(parts),
        b"ABORT_ACK" => abort_ack(parts),
        body if parts.count() == 1 => {
            let state = pp::read(body).ok_or(Unknown::FirstFrame)?;
            counted(parts, &layouts::PP_STATE, |_| Some(Message::PpState(state)))
        }
        _ => return Err(Unknown::FirstFrame),
    }
    .ok_or(Unknown::Layout)
}

/// What the ZMTP decoder needs to know of SGLang to join a stream in its middle.
pub const GRAMMAR: Grammar = Grammar { recognise, may_begin };

/// A room of a two-frame STATUS must be at least this large to prove a position: rooms are random in 63
/// bits, while the last two frames of several messages are small numbers.
const ROOM_PROVES: u64 = 1_000_000_000;
/// The last frame of a three-frame STATUS is a rank, not a length in bytes.
const RANK_MAX: u32 = 4095;

/// What a message proves. One without a tag must not be the tail of another: KV_STATUS behind its tag is a
/// STATUS with a frame too many (mori's behind its guard as well), METADATA of NIXL and mori behind their guards is
/// mooncake's with another kind of session, the last two frames of a STATUS are one whose room is a state. What is left is the tail of an ABORT_ACK,
/// `room, rank, generation`, where a call begins just behind its tag.
fn recognise(parts: &Multipart<'_>) -> Recognition {
    let Ok(decoded) = decode(parts) else { return Recognition::No };
    let guarded = matches!(whole(parts, 0), Some(NIXL_GUARD | MORI_GUARD));
    let proves = match decoded.message {
        Message::Metadata(_) | Message::Register(_) if guarded => return Recognition::Tagged,
        Message::Status(s) if decoded.backend == Backend::Mooncake => {
            if KvPoll::from_wire(s.room).is_some() {
                return Recognition::No;
            }
            matches!(s.status, KvPoll::Failed | KvPoll::WaitingForInput | KvPoll::Success)
                && s.prefill_rank.map_or(s.room >= ROOM_PROVES, |rank| rank <= RANK_MAX)
        }
        Message::Metadata(Metadata { session, .. }) => {
            is_host_and_port(session) || decoded.backend == Backend::Nixl
        }
        Message::Register(Register { session, .. }) => is_host_and_port(session),
        Message::PpState(_) => true,
        _ => return Recognition::Tagged,
    };
    if proves && decoded.extra_frames == 0 { Recognition::Plain } else { Recognition::Weak }
}

/// Whether a session is of mooncake's kind, `host:port` or `[v6]:port`. A mori engine key ends in an address, which
/// with IPv6 has colons, too.
fn is_host_and_port(session: &str) -> bool {
    session.rsplit_once(':').is_some_and(|(host, port)| {
        let bracketed = host.starts_with('[') && host.ends_with(']');
        (bracketed || !host.contains(':')) && port.bytes().all(|b| b.is_ascii_digit())
    })
}

/// First frames that are fixed text.
const FIRST_FRAMES: [&[u8]; 12] = [
    NIXL_GUARD,
    MORI_GUARD,
    NO_ROOM,
    b"ABORT",
    b"BOOTSTRAP",
    b"WATERMARK",
    b"STAGING_RSP",
    b"KV_STATUS",
    b"AUX_DATA",
    b"CHUNK_READY",
    b"STAGING_REQ",
    b"ABORT_ACK",
];

fn may_begin(first: &[u8]) -> bool {
    match first {
        [b'0'..=b'9', rest @ ..] => rest.iter().all(u8::is_ascii_digit),
        [pp::ARRAY_OF_FOUR, ..] => true,
        _ => FIRST_FRAMES.contains(&first),
    }
}

/// A message whose layouts differ in their number of frames only: `table` is newest first, which is most
/// frames first.
fn counted<'a>(
    parts: &Multipart<'a>,
    table: &[Count],
    read: impl FnOnce(u32) -> Option<Message<'a>>,
) -> Option<Decoded<'a>> {
    let row = table.iter().find(|row| row.frames <= parts.count())?;
    let extra = parts.count().saturating_sub(row.frames);
    // Only a newer release can have more frames than the newest layout; it has at least that one's.
    if extra > 0 && table.first().is_some_and(|newest| newest.frames != row.frames) {
        return None;
    }
    let releases = if extra > 0 { newest(row.releases) } else { row.releases };
    Some(Decoded {
        backend: row.backend,
        releases,
        extra_frames: saturate(extra),
        message: read(row.frames)?,
    })
}

/// Of a release newer than all that were examined, only that is known.
const fn newest(releases: Releases) -> Releases {
    Releases { min: releases.max, max: releases.max }
}

fn saturate(extra: u32) -> u16 {
    u16::try_from(extra).unwrap_or(u16::MAX)
}

fn status<'a>(parts: &Multipart<'a>) -> Option<Decoded<'a>> {
    let status = match whole(parts, 1)? {
        [digit @ b'0'..=b'4'] => KvPoll::from_wire(u64::from(digit.wrapping_sub(b'0')))?,
        _ => return None,
    };
    let mut decoded = counted(parts, &layouts::STATUS, |frames| {
        let prefill_rank = if frames >= 3 { Some(number32(parts, 2)?) } else { None };
        Some(Message::Status(Status { room: number(parts, 0)?, status, prefill_rank, reason: "" }))
    })?;
    if status == KvPoll::WaitingForInput && parts.count() >= 3 {
        decoded.releases = narrowed(decoded.releases, layouts::STATUS_READY);
    }
    Some(decoded)
}

fn kv_status<'a>(parts: &Multipart<'a>) -> Option<Decoded<'a>> {
    let status = KvPoll::from_wire(number(parts, 2)?)?;
    let mut decoded = counted(parts, &layouts::KV_STATUS, |_| reasoned_status(parts, status))?;
    if status != KvPoll::Failed {
        decoded.releases = narrowed(decoded.releases, layouts::KV_STATUS_SUCCESS);
    }
    Some(decoded)
}

/// A STATUS behind a tag, with the reason of a failure: NIXL's and mori's.
fn reasoned_status<'a>(parts: &Multipart<'a>, status: KvPoll) -> Option<Message<'a>> {
    let prefill_rank = Some(number32(parts, 3)?);
    Some(Message::Status(Status { room: number(parts, 1)?, status, prefill_rank, reason: prose(parts, 4) }))
}

fn narrowed(a: Releases, b: Releases) -> Releases {
    Releases { min: a.min.max(b.min), max: a.max.min(b.max) }
}

fn room_from(parts: &Multipart<'_>, generation: Option<u64>) -> Option<RoomFrom> {
    let Endpoint { ip, port, .. } = endpoint(parts, 2, 3)?;
    Some(RoomFrom { room: number(parts, 1)?, ip, port, generation })
}

fn abort<'a>(parts: &Multipart<'a>) -> Option<Decoded<'a>> {
    counted(parts, &layouts::ABORT, |frames| {
        let generation = if frames >= 5 { Some(number(parts, 4)?) } else { None };
        Some(Message::Abort(room_from(parts, generation)?))
    })
}

fn bootstrap<'a>(parts: &Multipart<'a>) -> Option<Decoded<'a>> {
    counted(parts, &layouts::BOOTSTRAP, |_| Some(Message::Bootstrap(room_from(parts, None)?)))
}

fn watermark<'a>(parts: &Multipart<'a>) -> Option<Decoded<'a>> {
    counted(parts, &layouts::WATERMARK, |_| {
        let (round, tail) = (number(parts, 1)?, number(parts, 2)?);
        Some(Message::Watermark(Watermark { round, tail, session: name(parts, 3)? }))
    })
}

fn staging_rsp<'a>(parts: &Multipart<'a>) -> Option<Decoded<'a>> {
    counted(parts, &layouts::STAGING_RSP, |_| {
        Some(Message::StagingRsp(StagingRsp {
            room: number(parts, 1)?,
            chunk: number32(parts, 2)?,
            offset: signed(parts, 3)?,
            round: number(parts, 4)?,
            end: signed(parts, 5)?,
            session: name(parts, 6)?,
        }))
    })
}

fn aux_data<'a>(parts: &Multipart<'a>) -> Option<Decoded<'a>> {
    counted(parts, &layouts::AUX_DATA, |_| {
        // The length goes ahead of the data, big-endian (the only such number on this wire).
        let len = u64::from(u32::from_be_bytes(whole(parts, 4)?.try_into().ok()?));
        (parts.frame(5)?.len == len).then_some(())?;
        let (buffer_index, aux_index) = (number32(parts, 2)?, number32(parts, 3)?);
        Some(Message::AuxData(AuxData { room: number(parts, 1)?, buffer_index, aux_index, len }))
    })
}

fn chunk_ready<'a>(parts: &Multipart<'a>) -> Option<Decoded<'a>> {
    counted(parts, &layouts::CHUNK_READY, |_| {
        Some(Message::ChunkReady(ChunkReady {
            room: number(parts, 1)?,
            chunk: number32(parts, 2)?,
            page_start: number(parts, 3)?,
            pages: number(parts, 4)?,
            writer: name(parts, 5)?,
            prefill_rank: number32(parts, 6)?,
        }))
    })
}

fn staging_req<'a>(parts: &Multipart<'a>) -> Option<Decoded<'a>> {
    counted(parts, &layouts::STAGING_REQ, |frames| {
        let pp_rank = if frames >= 6 { Some(number32(parts, 5)?) } else { None };
        Some(Message::StagingReq(StagingReq {
            room: number(parts, 1)?,
            chunk: number32(parts, 2)?,
            pages: number(parts, 3)?,
            session: name(parts, 4)?,
            pp_rank,
        }))
    })
}

fn abort_ack<'a>(parts: &Multipart<'a>) -> Option<Decoded<'a>> {
    counted(parts, &layouts::ABORT_ACK, |frames| {
        let prefill_rank = if frames >= 3 { Some(number32(parts, 2)?) } else { None };
        let generation = if frames >= 4 { Some(number(parts, 3)?) } else { None };
        Some(Message::AbortAck(AbortAck { room: number(parts, 1)?, prefill_rank, generation }))
    })
}

fn nixl<'a>(parts: &Multipart<'a>) -> Option<Decoded<'a>> {
    if whole(parts, 1) == Some(NO_ROOM) {
        return register(parts, &layouts::REGISTER_NIXL);
    }
    if parts.count() == layouts::NIXL_SHORT_DUMMY.frames {
        return Some(Decoded {
            backend: Backend::Nixl,
            releases: layouts::NIXL_SHORT_DUMMY.releases,
            extra_frames: 0,
            message: Message::Metadata(Metadata {
                room: number(parts, 1)?,
                decode: None,
                session: "",
                pages: 0,
                aux_index: None,
                dummy: Some(true),
                required: None,
                decode_prefix_len: None,
            }),
        });
    }
    metadata(parts, &layouts::METADATA_NIXL)
}

fn mori<'a>(parts: &Multipart<'a>) -> Option<Decoded<'a>> {
    if whole(parts, 1) == Some(NO_ROOM) {
        return register(parts, &layouts::REGISTER_MORI);
    }
    // METADATA has an address where STATUS has its digit.
    match whole(parts, 2)? {
        [digit @ b'0'..=b'4'] => {
            let status = KvPoll::from_wire(u64::from(digit.wrapping_sub(b'0')))?;
            counted(parts, &layouts::MORI_STATUS, |_| reasoned_status(parts, status))
        }
        _ => metadata(parts, &layouts::METADATA_MORI),
    }
}

/// What `metadata` and `register` need of a row of their tables.
trait Layout: Copy {
    fn frames(&self) -> u32;
    fn releases(&self) -> Releases;
    fn test(&self) -> Test;
    fn backend(&self) -> Backend;
    fn read<'a>(&self, parts: &Multipart<'a>) -> Option<Message<'a>>;
}

/// Decodes by the first row that fits. Rows that fit as well widen the range of releases: the message does
/// not tell them apart.
fn by_layout<'a>(parts: &Multipart<'a>, table: &[impl Layout]) -> Option<Decoded<'a>> {
    let mut rows = table.iter().filter(|row| row.frames() == parts.count() && passes(row.test(), parts));
    while let Some(row) = rows.next() {
        let Some(message) = row.read(parts) else { continue };
        let backend = row.backend();
        let also = rows.filter(|row| row.backend() == backend && row.read(parts).is_some());
        let releases = also
            .map(Layout::releases)
            .fold(row.releases(), |a, b| Releases { min: a.min.min(b.min), max: a.max.max(b.max) });
        return Some(Decoded { backend, releases, extra_frames: 0, message });
    }
    let newest_row = table.first()?;
    let extra = parts.count().checked_sub(newest_row.frames()).filter(|extra| *extra > 0)?;
    Some(Decoded {
        backend: newest_row.backend(),
        releases: newest(newest_row.releases()),
        extra_frames: saturate(extra),
        message: newest_row.read(parts)?,
    })
}

fn passes(test: Test, parts: &Multipart<'_>) -> bool {
    let check = |index, ask: fn(_) -> Option<bool>, wanted: bool| {
        parts.frame(index).is_some_and(|f| ask(f).is_none_or(|is| is == wanted))
    };
    match test {
        Test::Fields => true,
        Test::Empty(i) => parts.frame(i).is_some_and(|f| f.is_empty()),
        Test::Packed(i) => check(i, fields::is_packed_list, true),
        Test::Plain(i) => check(i, fields::is_packed_list, false),
        Test::Wide(i) => check(i, fields::is_wide, true),
        Test::Narrow(i) => check(i, fields::is_wide, false),
        Test::WideNotEmpty(i) => {
            parts.frame(i).is_some_and(|f| !f.is_empty()) && check(i, fields::is_wide, true)
        }
    }
}

fn metadata<'a>(parts: &Multipart<'a>, table: &[MetadataLayout]) -> Option<Decoded<'a>> {
    by_layout(parts, table)
}

fn register<'a>(parts: &Multipart<'a>, table: &[RegisterLayout]) -> Option<Decoded<'a>> {
    by_layout(parts, table)
}

/// A field that the layout has and the message has not.
struct Unfit;

/// Reads the field at `at` where the layout has one.
fn field<T>(at: Option<usize>, read: impl FnOnce(usize) -> Option<T>) -> Result<Option<T>, Unfit> {
    at.map(|at| read(at).ok_or(Unfit)).transpose()
}

impl Layout for MetadataLayout {
    fn frames(&self) -> u32 {
        self.frames
    }

    fn releases(&self) -> Releases {
        self.releases
    }

    fn test(&self) -> Test {
        self.test
    }

    fn backend(&self) -> Backend {
        self.backend
    }

    fn read<'a>(&self, parts: &Multipart<'a>) -> Option<Message<'a>> {
        let room = number(parts, self.room)?;
        let decode = endpoint(parts, self.room.checked_add(1)?, self.room.checked_add(2)?)?;
        let index = parts.frame(self.index)?;
        let aux = parts.frame(self.aux)?;
        let dummy = match self.dummy {
            DummyRule::BothEmpty => Some(index.is_empty() && aux.is_empty()),
            DummyRule::IndexEmpty => Some(index.is_empty()),
            DummyRule::IndexEmptyOpen if index.is_empty() => None,
            DummyRule::Never | DummyRule::IndexEmptyOpen => Some(false),
            DummyRule::Flag(at) => Some(number(parts, at).filter(|flag| *flag <= 1)? == 1),
        };
        let aux_index = if dummy == Some(true) { None } else { Some(number32(parts, self.aux)?) };
        Some(Message::Metadata(Metadata {
            room,
            decode: Some(decode),
            session: field(self.session, |at| name(parts, at)).ok()?.unwrap_or_default(),
            pages: fields::items(index, self.width)?,
            aux_index,
            dummy,
            required: field(self.required, |at| number32(parts, at)).ok()?,
            decode_prefix_len: field(self.prefix, |at| match parts.frame(at)? {
                none if none.is_empty() && self.backend == Backend::Mori => Some(0),
                _ => number(parts, at),
            })
            .ok()?,
        }))
    }
}

impl Layout for RegisterLayout {
    fn frames(&self) -> u32 {
        self.frames
    }

    fn releases(&self) -> Releases {
        self.releases
    }

    fn test(&self) -> Test {
        self.test
    }

    fn backend(&self) -> Backend {
        self.backend
    }

    fn read<'a>(&self, parts: &Multipart<'a>) -> Option<Message<'a>> {
        let decode = endpoint(parts, self.host, self.host.checked_add(1)?)?;
        let (session, buffers): (_, fn(&Multipart<'_>, usize) -> Option<u32>) = match self.backend {
            Backend::Mori => (engine_key(parts, self.session)?, descriptors),
            _ => (name(parts, self.session)?, pointers),
        };
        Some(Message::Register(Register {
            decode,
            session,
            tp_rank: field(self.tp_rank, |at| number32(parts, at)).ok()?,
            tp_size: field(self.tp_size, |at| number32(parts, at)).ok()?,
            kv_buffers: Some(buffers(parts, self.kv)?),
            aux_buffers: Some(buffers(parts, self.aux)?),
            kv_item_len: field(self.item_len, |at| number(parts, at)).ok()?,
            agent_metadata_len: field(self.agent_metadata, |at| Some(parts.frame(at)?.len)).ok()?,
            staging: self.staging.and_then(|at| staging(parts, at)),
        }))
    }
}

/// The staging buffer: eight bytes of base and its size as text, both empty when the feature is off.
fn staging(parts: &Multipart<'_>, base: usize) -> Option<Staging> {
    let size = number(parts, base.checked_add(1)?)?;
    let base = u64::from_le_bytes(whole(parts, base)?.try_into().ok()?);
    Some(Staging { base, size })
}
