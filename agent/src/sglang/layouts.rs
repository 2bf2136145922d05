//! The layouts: for each backend and kind of message, how many frames it has in which releases, and where
//! its fields stand.
//!
//! Data only, newest first. Sources: SGLang `disaggregation/{mooncake,nixl,mori,common}/conn.py` of
//! releases 0.4.5.post3 to 0.5.23 (every minor, some posts; mori from 0.5.9). A new backend or release is new rows.

use super::message::{Backend, Release, Releases};

/// Newest release examined.
const NEWEST: Release = r5(23);

const fn r4(patch: u16, post: u16) -> Release {
    Release::new(0, 4, patch, post)
}

const fn r5(patch: u16) -> Release {
    Release::new(0, 5, patch, 0)
}

const fn between(min: Release, max: Release) -> Releases {
    Releases { min, max }
}

const fn since(min: Release) -> Releases {
    Releases { min, max: NEWEST }
}

/// A number of frames and the releases that send it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Count {
    pub(super) frames: u32,
    pub(super) backend: Backend,
    pub(super) releases: Releases,
}

const fn count(frames: u32, backend: Backend, releases: Releases) -> Count {
    Count { frames, backend, releases }
}

// Kinds that any backend can send are `Shared` unless the shape itself names one.
pub(super) static ABORT: [Count; 2] =
    [count(5, Backend::Shared, since(r5(22))), count(4, Backend::Shared, since(r5(13)))];
pub(super) static BOOTSTRAP: [Count; 1] = [count(4, Backend::Shared, since(r5(22)))];
pub(super) static WATERMARK: [Count; 1] = [count(4, Backend::Shared, since(r5(10)))];
pub(super) static STAGING_RSP: [Count; 1] = [count(7, Backend::Shared, since(r5(10)))];
pub(super) static AUX_DATA: [Count; 1] = [count(6, Backend::Shared, since(r5(1)))];
pub(super) static CHUNK_READY: [Count; 1] = [count(7, Backend::Shared, since(r5(10)))];
pub(super) static STAGING_REQ: [Count; 2] =
    [count(6, Backend::Mooncake, since(r5(18))), count(5, Backend::Shared, since(r5(10)))];
pub(super) static ABORT_ACK: [Count; 3] = [
    count(4, Backend::Shared, since(r5(22))),
    count(3, Backend::Shared, between(r5(19), r5(21))),
    count(2, Backend::Shared, since(r5(13))),
];
pub(super) static KV_STATUS: [Count; 1] = [count(5, Backend::Nixl, since(r5(20)))];
pub(super) static MORI_STATUS: [Count; 1] = [count(5, Backend::Mori, since(r5(9)))];
pub(super) static STATUS: [Count; 2] =
    [count(3, Backend::Mooncake, since(r4(8, 1))), count(2, Backend::Mooncake, between(r4(5, 3), r4(8, 0)))];
pub(super) static PP_STATE: [Count; 1] = [count(1, Backend::Shared, since(r5(22)))];

/// Releases in which status 2 is sent as "prefill done, allocate now" (policy `prefill_complete`).
pub(super) const STATUS_READY: Releases = since(r5(22));
/// Releases in which NIXL sends a status other than Failed.
pub(super) const KV_STATUS_SUCCESS: Releases = since(r5(23));

/// What tells two layouts with the same number of frames apart.
#[derive(Clone, Copy, Debug)]
pub(super) enum Test {
    /// Nothing but the fields themselves.
    Fields,
    /// This frame is empty.
    Empty(usize),
    /// This frame is a packed list (or empty).
    Packed(usize),
    /// This frame is a plain array (or empty).
    Plain(usize),
    /// This frame holds 32-bit indices (or is empty).
    Narrow(usize),
    /// This frame holds 64-bit indices (or is empty).
    Wide(usize),
    /// This frame holds 64-bit indices and is not empty.
    WideNotEmpty(usize),
}

/// How a METADATA says that the prefill rank it goes to is only told (owes nothing).
#[derive(Clone, Copy, Debug)]
pub(super) enum DummyRule {
    /// These releases send no dummies in this layout.
    Never,
    /// Index frame and auxiliary index both empty.
    BothEmpty,
    /// Index frame empty.
    IndexEmpty,
    /// An empty index frame leaves it open: a full cache hit looks the same.
    IndexEmptyOpen,
    /// This frame is `1`.
    Flag(usize),
}

/// Where the fields of a METADATA stand.
#[derive(Clone, Copy, Debug)]
pub(super) struct MetadataLayout {
    pub(super) frames: u32,
    pub(super) releases: Releases,
    /// Room; decode's address and port follow it.
    pub(super) room: usize,
    pub(super) session: Option<usize>,
    pub(super) index: usize,
    /// Bytes of one index.
    pub(super) width: u64,
    pub(super) aux: usize,
    pub(super) required: Option<usize>,
    /// Tokens that decode already has. Mori leaves the frame empty where there are none.
    pub(super) prefix: Option<usize>,
    pub(super) dummy: DummyRule,
    pub(super) test: Test,
    pub(super) backend: Backend,
}

/// Mooncake and ascend from 0.4.6 on.
const MOONCAKE: MetadataLayout = MetadataLayout {
    frames: 10,
    releases: since(r5(17)),
    room: 0,
    session: Some(3),
    index: 4,
    width: 4,
    aux: 5,
    required: Some(7),
    prefix: Some(8),
    dummy: DummyRule::BothEmpty,
    test: Test::Fields,
    backend: Backend::Mooncake,
};

/// METADATA without a guard frame.
pub(super) static METADATA_BARE: [MetadataLayout; 8] = [
    MOONCAKE,
    MetadataLayout { frames: 9, releases: between(r5(12), r5(16)), ..MOONCAKE },
    MetadataLayout {
        frames: 8,
        releases: between(Release::new(0, 5, 3, 3), r5(11)),
        prefix: None,
        ..MOONCAKE
    },
    MetadataLayout {
        frames: 7,
        releases: between(r4(8, 0), r5(3)),
        required: Some(6),
        prefix: None,
        test: Test::Narrow(4),
        ..MOONCAKE
    },
    MetadataLayout {
        frames: 7,
        releases: between(r4(6, 5), r4(7, 0)),
        width: 8,
        required: Some(6),
        prefix: None,
        test: Test::Wide(4),
        ..MOONCAKE
    },
    MetadataLayout {
        frames: 6,
        releases: between(r4(6, 0), r4(6, 0)),
        width: 8,
        required: None,
        prefix: None,
        dummy: DummyRule::Never,
        ..MOONCAKE
    },
    MetadataLayout {
        frames: 8,
        releases: between(r4(5, 3), r4(5, 3)),
        index: 5,
        width: 8,
        aux: 7,
        required: None,
        prefix: None,
        dummy: DummyRule::Never,
        test: Test::WideNotEmpty(5),
        ..MOONCAKE
    },
    MetadataLayout {
        frames: 9,
        releases: between(r4(5, 3), r4(6, 0)),
        session: None,
        index: 5,
        width: 8,
        aux: 7,
        required: None,
        prefix: None,
        dummy: DummyRule::Never,
        test: Test::WideNotEmpty(5),
        backend: Backend::Nixl,
        ..MOONCAKE
    },
];

/// NIXL from 0.4.8.post1 on.
const NIXL: MetadataLayout = MetadataLayout {
    frames: 11,
    releases: since(r5(17)),
    room: 1,
    session: Some(4),
    index: 5,
    width: 4,
    aux: 6,
    required: Some(7),
    prefix: Some(9),
    dummy: DummyRule::Flag(10),
    test: Test::Fields,
    backend: Backend::Nixl,
};

/// METADATA behind `NixlMsgGuard`. Not in here: the two-frame dummy of 0.4.6.post5 ([`NIXL_SHORT_DUMMY`]).
pub(super) static METADATA_NIXL: [MetadataLayout; 8] = [
    NIXL,
    MetadataLayout {
        frames: 10,
        releases: between(r5(12), r5(16)),
        dummy: DummyRule::IndexEmptyOpen,
        test: Test::Packed(8),
        ..NIXL
    },
    MetadataLayout {
        frames: 10,
        releases: between(r5(11), r5(11)),
        dummy: DummyRule::IndexEmptyOpen,
        test: Test::Plain(8),
        ..NIXL
    },
    MetadataLayout {
        frames: 9,
        releases: between(r5(9), r5(10)),
        prefix: None,
        dummy: DummyRule::IndexEmptyOpen,
        ..NIXL
    },
    MetadataLayout {
        frames: 8,
        releases: between(r4(8, 1), r5(8)),
        prefix: None,
        dummy: DummyRule::IndexEmptyOpen,
        ..NIXL
    },
    MetadataLayout {
        frames: 12,
        releases: between(r4(8, 0), r4(8, 0)),
        session: Some(5),
        index: 7,
        aux: 9,
        required: Some(11),
        prefix: None,
        dummy: DummyRule::IndexEmpty,
        test: Test::Narrow(7),
        ..NIXL
    },
    MetadataLayout {
        frames: 12,
        releases: between(r4(7, 0), r4(7, 0)),
        session: Some(5),
        index: 7,
        width: 8,
        aux: 9,
        required: Some(11),
        prefix: None,
        dummy: DummyRule::IndexEmpty,
        test: Test::Wide(7),
        ..NIXL
    },
    MetadataLayout {
        frames: 10,
        releases: between(r4(6, 5), r4(6, 5)),
        session: None,
        index: 6,
        width: 8,
        aux: 8,
        required: None,
        prefix: None,
        dummy: DummyRule::Never,
        test: Test::WideNotEmpty(6),
        ..NIXL
    },
];

/// Mori.
const MORI: MetadataLayout = MetadataLayout {
    frames: 10,
    releases: since(r5(14)),
    room: 1,
    session: Some(4),
    index: 5,
    width: 4,
    aux: 6,
    required: Some(8),
    prefix: Some(9),
    dummy: DummyRule::BothEmpty,
    test: Test::Fields,
    backend: Backend::Mori,
};

/// METADATA behind `MoriMsgGuard`. Those with nine frames differ in the state indices (frame 7).
pub(super) static METADATA_MORI: [MetadataLayout; 4] = [
    MORI,
    MetadataLayout {
        frames: 9,
        releases: between(r5(13), r5(13)),
        prefix: None,
        test: Test::Packed(7),
        ..MORI
    },
    MetadataLayout {
        frames: 9,
        releases: between(r5(12), r5(12)),
        prefix: None,
        test: Test::Plain(7),
        ..MORI
    },
    MetadataLayout {
        frames: 9,
        releases: between(r5(9), r5(11)),
        prefix: None,
        test: Test::Empty(7),
        ..MORI
    },
];

/// Guard and room, nothing else: the dummy of NIXL 0.4.6.post5.
pub(super) const NIXL_SHORT_DUMMY: Count = count(2, Backend::Nixl, between(r4(6, 5), r4(6, 5)));

/// Where the fields of a REGISTER stand. Decode's address and port follow the `None` frame.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegisterLayout {
    pub(super) frames: u32,
    pub(super) releases: Releases,
    /// Decode's address; its port follows.
    pub(super) host: usize,
    /// Mori: the engine descriptor, which begins with the engine key.
    pub(super) session: usize,
    pub(super) agent_metadata: Option<usize>,
    pub(super) kv: usize,
    pub(super) aux: usize,
    pub(super) tp_rank: Option<usize>,
    pub(super) tp_size: Option<usize>,
    pub(super) item_len: Option<usize>,
    /// Base; the size follows it.
    pub(super) staging: Option<usize>,
    pub(super) test: Test,
    pub(super) backend: Backend,
}

const MOONCAKE_REGISTER: RegisterLayout = RegisterLayout {
    frames: 20,
    releases: since(r5(21)),
    host: 1,
    session: 3,
    agent_metadata: None,
    kv: 4,
    aux: 5,
    tp_rank: Some(7),
    tp_size: Some(8),
    item_len: Some(9),
    staging: Some(14),
    test: Test::Fields,
    backend: Backend::Mooncake,
};

/// REGISTER without a guard frame: mooncake and ascend.
pub(super) static REGISTER_BARE: [RegisterLayout; 10] = [
    MOONCAKE_REGISTER,
    RegisterLayout { frames: 19, releases: between(r5(19), r5(20)), ..MOONCAKE_REGISTER },
    RegisterLayout { frames: 18, releases: between(r5(17), r5(18)), ..MOONCAKE_REGISTER },
    RegisterLayout { frames: 14, releases: between(r5(13), r5(16)), staging: Some(12), ..MOONCAKE_REGISTER },
    RegisterLayout {
        frames: 15,
        releases: between(r5(12), r5(12)),
        staging: Some(13),
        test: Test::Packed(10),
        ..MOONCAKE_REGISTER
    },
    RegisterLayout {
        frames: 15,
        releases: between(r5(10), r5(11)),
        staging: Some(13),
        test: Test::Plain(10),
        ..MOONCAKE_REGISTER
    },
    RegisterLayout { frames: 12, releases: between(r5(9), r5(9)), staging: None, ..MOONCAKE_REGISTER },
    RegisterLayout {
        frames: 10,
        releases: between(Release::new(0, 5, 3, 3), r5(8)),
        staging: None,
        ..MOONCAKE_REGISTER
    },
    RegisterLayout {
        frames: 9,
        releases: between(r4(8, 1), r5(3)),
        tp_rank: Some(6),
        tp_size: Some(7),
        item_len: Some(8),
        staging: None,
        ..MOONCAKE_REGISTER
    },
    RegisterLayout {
        frames: 6,
        releases: between(r4(6, 0), r4(8, 0)),
        tp_rank: None,
        tp_size: None,
        item_len: None,
        staging: None,
        ..MOONCAKE_REGISTER
    },
];

const NIXL_REGISTER: RegisterLayout = RegisterLayout {
    frames: 25,
    releases: since(r5(23)),
    host: 2,
    session: 4,
    agent_metadata: Some(5),
    kv: 6,
    aux: 7,
    tp_rank: Some(11),
    tp_size: Some(10),
    item_len: Some(12),
    staging: Some(15),
    test: Test::Fields,
    backend: Backend::Nixl,
};

/// REGISTER behind `NixlMsgGuard`.
pub(super) static REGISTER_NIXL: [RegisterLayout; 9] = [
    NIXL_REGISTER,
    RegisterLayout { frames: 24, releases: between(r5(17), r5(22)), ..NIXL_REGISTER },
    RegisterLayout { frames: 20, releases: between(r5(15), r5(16)), ..NIXL_REGISTER },
    RegisterLayout { frames: 18, releases: between(r5(13), r5(14)), ..NIXL_REGISTER },
    RegisterLayout { frames: 17, releases: between(r5(12), r5(12)), ..NIXL_REGISTER },
    RegisterLayout { frames: 15, releases: between(r5(11), r5(11)), staging: None, ..NIXL_REGISTER },
    RegisterLayout { frames: 13, releases: between(r5(9), r5(10)), staging: None, ..NIXL_REGISTER },
    RegisterLayout {
        frames: 12,
        releases: between(r5(2), r5(8)),
        tp_rank: Some(10),
        tp_size: Some(9),
        item_len: Some(11),
        staging: None,
        ..NIXL_REGISTER
    },
    RegisterLayout {
        frames: 9,
        releases: between(r4(8, 1), r5(1)),
        tp_rank: None,
        tp_size: None,
        item_len: None,
        staging: None,
        ..NIXL_REGISTER
    },
];

const MORI_REGISTER: RegisterLayout = RegisterLayout {
    frames: 18,
    releases: since(r5(22)),
    host: 2,
    session: 4,
    agent_metadata: None,
    kv: 5,
    aux: 6,
    tp_rank: Some(10),
    tp_size: Some(9),
    item_len: Some(11),
    staging: None,
    test: Test::Fields,
    backend: Backend::Mori,
};

/// REGISTER behind `MoriMsgGuard`.
pub(super) static REGISTER_MORI: [RegisterLayout; 4] = [
    MORI_REGISTER,
    RegisterLayout { frames: 14, releases: between(r5(13), r5(21)), test: Test::Packed(12), ..MORI_REGISTER },
    RegisterLayout { frames: 14, releases: between(r5(12), r5(12)), test: Test::Plain(12), ..MORI_REGISTER },
    RegisterLayout { frames: 12, releases: between(r5(9), r5(11)), ..MORI_REGISTER },
];
