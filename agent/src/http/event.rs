//! What the HTTP stage says: closed enums of owned data, nothing of a body but the fields named here.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::event::Direction;

/// One thing that a connection's bytes say. `n` numbers the requests of one connection from 0; whoever feeds the
/// decoder knows the time and the connection.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// HTTP/1: which of the two streams carries the requests.
    Judged {
        /// The stream with the requests: `Received` at a server's socket, `Sent` at a client's.
        requests: Direction,
        /// Followed from the connection's first byte.
        from_start: bool,
    },
    /// Not followed any more, neither way.
    Unread(Unread),
    /// The head of a request is whole.
    RequestBegun {
        /// Which request.
        n: u64,
        /// Its method.
        method: Method,
        /// What it asks for.
        route: Route,
    },
    /// The last byte of a request's body (of its head, where there is no body) has passed.
    RequestWhole {
        /// Which request.
        n: u64,
        /// False: where it ends is not known, what it says is what was read until its position was lost.
        end_seen: bool,
        /// What it says.
        said: Said,
    },
    /// A 1xx answer (100 Continue, 103 Early Hints): the final one is still to come.
    Interim {
        /// To which request.
        n: u64,
        /// 100 to 199.
        status: u16,
    },
    /// The head of the final answer is whole.
    AnswerHead {
        /// To which request.
        n: u64,
        /// 200 to 999.
        status: u16,
        /// `text/event-stream`: the head says nothing of when or how it ends.
        streamed: bool,
    },
    /// The first byte of the answer's body.
    AnswerFirstBodyByte {
        /// To which request.
        n: u64,
    },
    /// The answer is over.
    AnswerEnd {
        /// To which request.
        n: u64,
        /// How that is known.
        how: AnswerEnd,
        /// What it says.
        said: Answered,
    },
    /// The connection ended before the answer did.
    HangUp {
        /// Which request was still open.
        n: u64,
        /// Who ended it.
        by: Side,
        /// By a reset, not by a FIN.
        reset: bool,
        /// The request had been sent to its end.
        request_whole: bool,
        /// The head of its answer had been seen.
        answer_begun: bool,
    },
    /// The position in one stream is lost: nothing is said of it until [`Event::Regained`]. If it is that of the answers,
    /// those to the open requests may be among the missing bytes: silence means nothing for them.
    Lost {
        /// Which stream.
        direction: Direction,
        /// Why.
        why: Lost,
    },
    /// In step again, or for the first time where a connection was joined in its middle, at a head. Of a stream of answers
    /// that was muted, or joined, no [`Event::Lost`] goes before it: nothing is wrong with it.
    Regained {
        /// Which stream.
        direction: Direction,
    },
}

/// Who ended a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Side {
    /// The side that asks: a hang-up.
    Client,
    /// The side that answers.
    Server,
    /// Not told by the source.
    Unknown,
}

/// Why a connection is not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unread {
    /// It begins with a TLS record.
    Tls,
    /// HTTP/2 without an upgrade (gRPC fronts): its preface (RFC 9113, section 3.4).
    Http2,
    /// Neither.
    NotHttp,
    /// It became something else: 101 Switching Protocols, or CONNECT.
    Upgraded,
    /// The length of a message can be read in two ways (RFC 9112, section 6.3): both length headers, several of one,
    /// a transfer coding other than `chunked`, a length that is no number, lines that end without CR.
    AmbiguousLength,
    /// A head or trailer longer than [`super::HEAD_MAX`], or with more than [`super::HEADERS_MAX`] fields.
    EndlessHead,
    /// Bytes where a head or a chunk must be that are none.
    Malformed,
    /// More than [`super::PIPELINED_MAX`] requests without an answer.
    TooManyPipelined,
}

impl Unread {
    /// Every reason, in label order.
    pub const ALL: [Self; 8] = [
        Self::Tls,
        Self::Http2,
        Self::NotHttp,
        Self::Upgraded,
        Self::AmbiguousLength,
        Self::EndlessHead,
        Self::Malformed,
        Self::TooManyPipelined,
    ];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Tls => "tls",
            Self::Http2 => "http2",
            Self::NotHttp => "not_http",
            Self::Upgraded => "upgraded",
            Self::AmbiguousLength => "ambiguous_length",
            Self::EndlessHead => "endless_head",
            Self::Malformed => "malformed",
            Self::TooManyPipelined => "too_many_pipelined",
        }
    }
}

/// Why a position was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Lost {
    /// Bytes are missing in a head, or where one must be.
    HoleAtHead,
    /// Bytes are missing across the border of a chunk: where the next one begins is not known.
    HoleInChunks,
    /// Bytes without a known place or number are missing.
    Disorder,
    /// A final answer came to a request that announced a body with `Expect: 100-continue` and had not begun to send
    /// it: whether it still comes is the client's choice (RFC 9110, section 10.1.1).
    NotContinued,
}

impl Lost {
    /// Every reason, in label order.
    pub const ALL: [Self; 4] = [Self::HoleAtHead, Self::HoleInChunks, Self::Disorder, Self::NotContinued];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::HoleAtHead => "hole_at_head",
            Self::HoleInChunks => "hole_in_chunks",
            Self::Disorder => "disorder",
            Self::NotContinued => "not_continued",
        }
    }
}

/// Request methods as far as they matter here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the names are the protocol's own")]
pub enum Method {
    Get,
    Head,
    Post,
    Put,
    Delete,
    Connect,
    /// Any other.
    Other,
}

/// What a request asks for, by its path without query. Paths are those of SGLang's `entrypoints/http_server.py` and
/// `disaggregation/common/conn.py` (0.5.23 and before); the text of any other path is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Route {
    /// `/generate`.
    Generate,
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    ChatCompletions,
    /// Another path whose body may name a room: responses, messages, embeddings, scores, vertex, ollama, ….
    OtherWork,
    /// `/health`, `/health_generate`, `/ready`, `/ping`, of the engine or of the bootstrap server.
    Health,
    /// A call that stops, starts or changes the engine.
    Control(ControlCall),
    /// `/v1/loads`, `/get_load`, `/metrics`, server and model information.
    Status,
    /// `/route` of the bootstrap server: PUT registers a rank, GET asks for one.
    Route,
    /// `/register_dp_rank` of the bootstrap server.
    RegisterDpRank,
    /// `/query_dp_ranks` of the bootstrap server.
    QueryDpRanks,
    /// None of these.
    Other,
}

impl Route {
    /// Label value of every route, in the order of [`Self::index`]; all control calls have one.
    pub const LABELS: [&'static str; 11] = [
        "generate",
        "completions",
        "chat_completions",
        "other_work",
        "health",
        "control",
        "status",
        "bootstrap_route",
        "register_dp_rank",
        "query_dp_ranks",
        "other",
    ];

    /// Its place among [`Self::LABELS`].
    pub const fn index(self) -> usize {
        match self {
            Self::Generate => 0,
            Self::Completions => 1,
            Self::ChatCompletions => 2,
            Self::OtherWork => 3,
            Self::Health => 4,
            Self::Control(_) => 5,
            Self::Status => 6,
            Self::Route => 7,
            Self::RegisterDpRank => 8,
            Self::QueryDpRanks => 9,
            Self::Other => 10,
        }
    }

    /// Whether its body may name rooms of a generation.
    pub const fn is_work(self) -> bool {
        matches!(self, Self::Generate | Self::Completions | Self::ChatCompletions | Self::OtherWork)
    }

    /// Whether it is one of the bootstrap server's own.
    pub const fn is_bootstrap(self) -> bool {
        matches!(self, Self::Route | Self::RegisterDpRank | Self::QueryDpRanks)
    }
}

/// Calls that stop, start or change an engine. They take effect when they are answered with 200.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ControlCall {
    /// `/pause_generation`.
    Pause,
    /// `/continue_generation`.
    Resume,
    /// `/update_weights_from_disk`, `…_from_tensor`, `…_from_distributed`, `…_from_ipc`: lasts until its answer.
    UpdateWeights,
    /// `/begin_weight_update`.
    WeightsBegin,
    /// `/end_weight_update`.
    WeightsEnd,
    /// `/release_memory_occupation`.
    MemoryRelease,
    /// `/resume_memory_occupation`.
    MemoryResume,
    /// `/pd_role_switch`.
    RoleSwitch,
    /// `/abort_request`.
    Abort,
}

/// What a whole request says.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    /// Nothing that is read: no body, or one of another route.
    Nothing,
    /// A generation.
    Work(Work),
    /// A control call.
    Control(Control),
    /// PUT `/route`: a prefill rank registers.
    RegisterRank(Option<Box<RankRegistration>>),
    /// GET `/route`: decode asks where a rank is, or for the topology.
    Query(RouteQuery),
    /// POST `/register_dp_rank`: which DP rank has the room. `None`: not seen or not numbers.
    RegisterDpRank(Option<(u64, u32)>),
    /// POST `/query_dp_ranks`: for which rooms. `None`: not seen.
    QueryDpRanks(Option<Vec<u64>>),
}

/// Rooms and ids of one generation request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// Its rooms.
    pub rooms: Rooms,
    /// Its request ids by the same index, where it names any: `None` for one that is too long ([`super::RID_MAX`]) or
    /// not printable ASCII. Empty: none seen.
    pub rids: Vec<Option<Box<str>>>,
}

impl Work {
    /// Each room with its request id.
    pub fn pairs(&self) -> impl Iterator<Item = (u64, Option<&str>)> {
        let rooms = match &self.rooms {
            Rooms::Named { rooms, .. } => rooms.as_slice(),
            _ => &[],
        };
        rooms
            .iter()
            .enumerate()
            .filter_map(|(i, room)| Some(((*room)?, self.rids.get(i).and_then(Option::as_deref))))
    }
}

/// Rooms of one request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rooms {
    /// The body names none: the key is absent from a body read from end to end, or it is null or an empty list.
    None,
    /// It names rooms.
    Named {
        /// One, or those of a batch in order; `None` where a batch has null, 0, what is no room number, or a fake host.
        #[serde(with = "crate::room_text::list")]
        rooms: Vec<Option<u64>>,
        /// False: the batch has more that were not seen, or more than [`super::ROOMS_MAX`].
        complete: bool,
        /// What would make more of them (`n`, `sampling_params`, a list of prompts) may stand in bytes that were not captured.
        #[serde(default)]
        maybe_more: bool,
        /// Where.
        seen: WhereSeen,
    },
    /// It names a room that is none.
    Ignored(Ignored),
    /// Whether and which is not known (`request_room_not_seen`).
    NotSeen(NotSeen),
}

/// Where in the body the room stood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum WhereSeen {
    /// The body was read from end to end.
    Whole,
    /// Before the first missing byte. Should the same key stand again in the missing bytes, the engine takes that one.
    Head,
    /// Behind the last missing byte.
    Tail,
}

/// Why a request's room is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Ignored {
    /// Its host is `2.2.2.2`, the engine's own for warm-up and tests (`disaggregation/utils.py`, `FAKE_BOOTSTRAP_HOST`).
    FakeHost,
    /// Its rid begins with `HEALTH_CHECK` (`constants.py`, `HEALTH_CHECK_RID_PREFIX`).
    HealthCheck,
    /// Room 0: what the engine gives its own health checks.
    Zero,
}

impl Ignored {
    /// Every reason, in label order.
    pub const ALL: [Self; 3] = [Self::FakeHost, Self::HealthCheck, Self::Zero];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::FakeHost => "fake_host",
            Self::HealthCheck => "health_check",
            Self::Zero => "zero",
        }
    }
}

/// Why a request's room was not seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum NotSeen {
    /// It may lie in bytes that were not captured, or before the tail that is kept.
    Hole,
    /// The request's head is cut: where its body begins and ends is not known.
    HeadCut,
    /// The body is compressed.
    Encoded,
    /// The body is no JSON object.
    NotJson,
    /// The value is no room number: negative, above 64 bits, a fraction, a float from 2^53 on (which no longer
    /// tells neighbours apart), text that is no number, an object.
    NotANumber,
    /// A key is written with escapes, or is too long to be read.
    OddKey,
    /// The header `x-override-bootstrap-room` is there: whether it counts is a setting of the engine.
    HeaderOverride,
}

impl NotSeen {
    /// Every reason, in label order.
    pub const ALL: [Self; 7] = [
        Self::Hole,
        Self::HeadCut,
        Self::Encoded,
        Self::NotJson,
        Self::NotANumber,
        Self::OddKey,
        Self::HeaderOverride,
    ];

    /// Label value.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Hole => "hole",
            Self::HeadCut => "head_cut",
            Self::Encoded => "encoded",
            Self::NotJson => "not_json",
            Self::NotANumber => "not_a_number",
            Self::OddKey => "odd_key",
            Self::HeaderOverride => "header_override",
        }
    }
}

/// A control call with what its body adds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Control {
    /// Generation stops; rooms stand still until [`Control::Resume`].
    Pause(Option<PauseMode>),
    /// Generation goes on.
    Resume,
    /// Weights change until the answer.
    UpdateWeights,
    /// Weights begin to change.
    WeightsBegin,
    /// Weights have changed.
    WeightsEnd,
    /// Memory is given up: the engine stands still.
    MemoryRelease,
    /// Memory is back.
    MemoryResume,
    /// The engine changes its role.
    RoleSwitch(Option<NewRole>),
    /// Requests are aborted.
    Abort {
        /// Ids that begin with this text (the engine matches by prefix), where seen.
        rid: Option<Box<str>>,
        /// All of them; `None`: not seen.
        all: Option<bool>,
    },
}

/// How an engine pauses (`managers/io_struct.py`, `PauseGenerationReqInput`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum PauseMode {
    /// Everything under way is aborted.
    Abort,
    /// Everything stays where it is.
    InPlace,
    /// What runs goes back to the waiting queue.
    Retract,
}

/// The role that an engine changes to (`managers/io_struct.py`, `PdRoleSwitchReqInput`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum NewRole {
    /// Prefill.
    Prefill,
    /// Decode.
    Decode,
}

/// Body of PUT `/route`: a prefill rank and the topology it belongs to. Every field is `None` where that release does
/// not send it or it was not seen (facts by release: `disaggregation/common/conn.py`, `register_to_bootstrap`).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankRegistration {
    /// Address of the rank's ZMQ socket.
    pub ip: Option<IpAddr>,
    /// Its port.
    pub port: Option<u16>,
    /// Tensor parallel (attention) rank; `engine_rank` up to 0.4.10.
    pub tp_rank: Option<u32>,
    /// Tensor parallel (attention) size; `tp_size` up to 0.4.10.
    pub tp_size: Option<u32>,
    /// Context parallel rank (from 0.5.10).
    pub cp_rank: Option<u32>,
    /// Context parallel size.
    pub cp_size: Option<u32>,
    /// Data parallel attention rank.
    pub dp_rank: Option<u32>,
    /// Data parallel attention size; `dp_size` up to 0.4.10.
    pub dp_size: Option<u32>,
    /// Data parallel rank over the whole system.
    pub system_dp_rank: Option<u32>,
    /// Data parallel size of the whole system.
    pub system_dp_size: Option<u32>,
    /// Pipeline rank.
    pub pp_rank: Option<u32>,
    /// Pipeline size.
    pub pp_size: Option<u32>,
    /// Tokens per KV page (from 0.5.8).
    pub page_size: Option<u32>,
    /// Port of the engine's HTTP server (from 0.5.16).
    pub http_port: Option<u16>,
    /// Whether the prefill DP rank follows from the room number (`load_balance_method` = `follow_bootstrap_room`).
    pub follows_room: Option<bool>,
    /// Policy `prefill_complete` (`decode_allocation_policy`, from 0.5.22).
    pub prefill_complete: Option<bool>,
}

/// Query of GET `/route`. −1 in all asks for the topology.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RouteQuery {
    /// `prefill_dp_rank`; `target_dp_group` up to 0.5.9.
    pub dp_rank: Option<i32>,
    /// `prefill_cp_rank` (from 0.5.10).
    pub cp_rank: Option<i32>,
    /// `target_tp_rank`; `engine_rank` up to 0.5.9.
    pub tp_rank: Option<i32>,
    /// `target_pp_rank`.
    pub pp_rank: Option<i32>,
}

impl RouteQuery {
    /// Whether it asks for the topology, not for one rank.
    pub fn asks_topology(&self) -> bool {
        let all = [self.dp_rank, self.cp_rank, self.tp_rank, self.pp_rank];
        all.iter().any(Option::is_some) && all.iter().flatten().all(|rank| *rank == -1)
    }
}

/// How the end of an answer is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum AnswerEnd {
    /// It has no body (HEAD, 204, 304).
    NoBody,
    /// Its Content-Length has passed.
    ContentLength,
    /// Its last chunk has passed.
    LastChunk,
    /// The server closed the connection, which is how such an answer ends.
    Close,
    /// It was not seen, but the next request was, and a client never sends one before it has the answer to the one
    /// before. (One that has been seen to do so is not judged by this.)
    Next,
    /// It was not seen: the connection ended first, and what is missing may have been the answer's end.
    Unseen,
}

/// What an answer says.
#[derive(Clone, Debug, PartialEq)]
pub enum Answered {
    /// Nothing that is read.
    Nothing,
    /// Outcome of a generation.
    Outcome(Outcome),
    /// GET `/route`: address of a rank.
    Rank(IpAddr, u16),
    /// GET `/route`: the topology.
    Topology(Topology),
    /// `/query_dp_ranks`: DP ranks by room; a room that is missing is not known to the server. `None`: not seen whole.
    DpRanks(Option<Vec<(u64, u32)>>),
}

/// Outcome of a generation, from what is visible of its answer's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Outcome {
    /// Nothing visible says.
    Unknown,
    /// A `finish_reason` other than `abort`.
    Finished,
    /// `finish_reason` is `abort`.
    Aborted,
    /// The body is, or ends in, an error.
    Error,
}

/// Answer to GET `/route` with −1 (`PrefillServerInfo`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Tensor parallel (attention) size.
    pub tp_size: Option<u32>,
    /// Context parallel size.
    pub cp_size: Option<u32>,
    /// Data parallel size.
    pub dp_size: Option<u32>,
    /// Pipeline size.
    pub pp_size: Option<u32>,
    /// Tokens per KV page.
    pub page_size: Option<u32>,
    /// Port of the engine's HTTP server.
    pub http_port: Option<u16>,
    /// Whether the prefill DP rank follows from the room number.
    pub follows_room: Option<bool>,
    /// Policy `prefill_complete`.
    pub prefill_complete: Option<bool>,
}
