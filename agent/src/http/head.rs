//! Heads of requests and answers: what they ask for and how their bodies end. Nothing else of them is kept.

use std::mem::MaybeUninit;

use httparse::{Header, Status};

use super::HEADERS_MAX;
use super::event::{ControlCall, Method, NotSeen, Route, RouteQuery, Unread};

/// How a body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Framing {
    Empty,
    Length(u64),
    Chunked,
    /// With the connection (answers only).
    ToEnd,
}

/// A request's head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) method: Method,
    pub(super) route: Route,
    pub(super) query: RouteQuery,
    pub(super) framing: Framing,
    pub(super) expects_continue: bool,
    /// Why its body will not be read, where bodies of its route are.
    pub(super) unreadable: Option<NotSeen>,
    /// It names the host it is for, as HTTP/1.1 demands.
    pub(super) names_host: bool,
}

/// An answer's head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    /// As its own fields say; the request may forbid a body.
    pub(super) framing: Framing,
    pub(super) streamed: bool,
    pub(super) encoded: bool,
}

/// Fields that decide how a message is read.
#[derive(Debug, Default)]
#[allow(clippy::struct_excessive_bools, reason = "fields of a head are independent of each other")]
struct Fields {
    length: Option<u64>,
    chunked: bool,
    ambiguous: bool,
    expects_continue: bool,
    encoded: bool,
    not_json: bool,
    streamed: bool,
    room_override: bool,
    host: bool,
}

fn is_token(value: &[u8], token: &str) -> bool {
    value.trim_ascii().eq_ignore_ascii_case(token.as_bytes())
}

/// The media type without its parameters.
fn media_type(value: &[u8]) -> &[u8] {
    value.split(|b| *b == b';').next().unwrap_or_default().trim_ascii()
}

/// Whether a JSON body can come under this type: with curl's and other clients' defaults it does.
fn may_be_json(value: &[u8]) -> bool {
    let media = media_type(value);
    let json =
        media.get(media.len().saturating_sub(4)..).is_some_and(|end| end.eq_ignore_ascii_case(b"json"));
    json || is_token(media, "application/x-www-form-urlencoded") || is_token(media, "text/plain")
}

impl Fields {
    fn of(headers: &[Header<'_>]) -> Self {
        let mut fields = Self::default();
        for header in headers {
            fields.add(header.name, header.value);
        }
        fields
    }

    fn add(&mut self, name: &str, value: &[u8]) {
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        // By length first: most fields are none of these.
        match name.len() {
            4 if is("host") => self.host = true,
            6 if is("expect") => self.expects_continue |= is_token(value, "100-continue"),
            12 if is("content-type") => {
                self.streamed = is_token(media_type(value), "text/event-stream");
                self.not_json |= !may_be_json(value);
            }
            14 if is("content-length") => {
                let length = length(value);
                self.ambiguous |= length.is_none() || self.length.is_some();
                self.length = length;
            }
            16 if is("content-encoding") => self.encoded |= !is_token(value, "identity"),
            // `entrypoints/http_request_decompression.py`.
            17 if is("x-body-compressed") => self.encoded = true,
            17 if is("transfer-encoding") => {
                self.ambiguous |= self.chunked || !is_token(value, "chunked");
                self.chunked = true;
            }
            // `entrypoints/request_headers.py`.
            25 if is("x-override-bootstrap-room") => self.room_override = true,
            _ => {}
        }
    }

    /// How the body ends; `None`: no field says.
    fn framing(&self, version: Option<u8>) -> Result<Option<Framing>, Unread> {
        match (self.length, self.chunked) {
            _ if self.ambiguous => Err(Unread::AmbiguousLength),
            (Some(_), true) => Err(Unread::AmbiguousLength),
            // HTTP/1.0 has no transfer codings.
            (None, true) if version == Some(0) => Err(Unread::AmbiguousLength),
            (None, true) => Ok(Some(Framing::Chunked)),
            (Some(0), false) => Ok(Some(Framing::Empty)),
            (Some(length), false) => Ok(Some(Framing::Length(length))),
            (None, false) => Ok(None),
        }
    }
}

/// Digits only: no sign, no list, below 2^63.
fn length(value: &[u8]) -> Option<u64> {
    let digits = value.trim_ascii();
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    str::from_utf8(digits).ok()?.parse().ok().filter(|n: &u64| *n <= i64::MAX.unsigned_abs())
}

const fn refuse(error: httparse::Error) -> Unread {
    match error {
        httparse::Error::TooManyHeaders => Unread::EndlessHead,
        _ => Unread::Malformed,
    }
}

/// Reads a whole head (up to and with its empty line).
pub(super) fn request(head: &[u8]) -> Result<Request, Unread> {
    let mut headers = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut parsed = httparse::Request::new(&mut []);
    let status = parsed.parse_with_uninit_headers(head, &mut headers).map_err(refuse)?;
    if status != Status::Complete(head.len()) {
        return Err(Unread::Malformed);
    }
    let fields = Fields::of(parsed.headers);
    let framing = fields.framing(parsed.version)?;
    let (method, target) = (parsed.method.unwrap_or_default(), parsed.path.unwrap_or_default());
    let (path, query) = split(target);
    let unreadable = if fields.encoded {
        Some(NotSeen::Encoded)
    } else if fields.room_override {
        Some(NotSeen::HeaderOverride)
    } else {
        fields.not_json.then_some(NotSeen::NotJson)
    };
    Ok(Request {
        method: method_of(method),
        route: route_of(path),
        query: query_of(query),
        framing: framing.unwrap_or(Framing::Empty),
        expects_continue: fields.expects_continue,
        unreadable,
        names_host: fields.host || parsed.version == Some(0),
    })
}

/// What the first line says of a request whose head is cut behind it.
pub(super) fn request_line(head: &[u8]) -> Option<(Method, Route)> {
    let line = head.get(..head.iter().position(|b| *b == b'\r')?)?;
    let mut words = line.split(|b| *b == b' ');
    let (method, target, version) = (words.next()?, words.next()?, words.next()?);
    if words.next().is_some() || !version.starts_with(b"HTTP/1.") {
        return None;
    }
    let (path, _) = split(str::from_utf8(target).ok()?);
    Some((method_of(str::from_utf8(method).ok()?), route_of(path)))
}

/// Reads a whole head (up to and with its empty line).
pub(super) fn answer(head: &[u8]) -> Result<Answer, Unread> {
    let mut headers = [const { MaybeUninit::uninit() }; HEADERS_MAX];
    let mut parsed = httparse::Response::new(&mut []);
    let status = httparse::ParserConfig::default()
        .parse_response_with_uninit_headers(&mut parsed, head, &mut headers)
        .map_err(refuse)?;
    if status != Status::Complete(head.len()) {
        return Err(Unread::Malformed);
    }
    let fields = Fields::of(parsed.headers);
    let framing = fields.framing(parsed.version)?;
    let status = parsed.code.unwrap_or_default();
    if status < 100 {
        return Err(Unread::Malformed);
    }
    Ok(Answer {
        status,
        framing: framing.unwrap_or(Framing::ToEnd),
        streamed: fields.streamed,
        encoded: fields.encoded,
    })
}

/// Path and query of a target; of an absolute one (through a proxy) what stands behind the authority.
fn split(target: &str) -> (&str, &str) {
    let target = match target.split_once("://") {
        Some((scheme, rest)) if !scheme.contains(['/', '?']) => {
            rest.find(['/', '?']).and_then(|i| rest.get(i..)).unwrap_or("/")
        }
        _ => target,
    };
    target.split_once('?').unwrap_or((target, ""))
}

fn method_of(method: &str) -> Method {
    match method {
        "GET" => Method::Get,
        "HEAD" => Method::Head,
        "POST" => Method::Post,
        "PUT" => Method::Put,
        "DELETE" => Method::Delete,
        "CONNECT" => Method::Connect,
        _ => Method::Other,
    }
}

/// Routes of SGLang's `entrypoints/http_server.py` and `disaggregation/common/conn.py`, 0.5.23 and before.
fn route_of(path: &str) -> Route {
    match path {
        "/generate" => Route::Generate,
        "/v1/completions" => Route::Completions,
        "/v1/chat/completions" => Route::ChatCompletions,
        "/v1/responses" | "/v1/messages" | "/v1/embeddings" | "/v1/score" | "/v1/rerank" | "/v1/classify"
        | "/v1/decisions" | "/v1/systemone" | "/classify" | "/encode" | "/invocations"
        | "/vertex_generate" | "/api/chat" | "/api/generate" => Route::OtherWork,
        "/health" | "/health_generate" | "/ready" | "/ping" => Route::Health,
        "/pause_generation" => Route::Control(ControlCall::Pause),
        "/continue_generation" => Route::Control(ControlCall::Resume),
        "/update_weights_from_disk"
        | "/update_weights_from_tensor"
        | "/update_weights_from_distributed"
        | "/update_weights_from_ipc" => Route::Control(ControlCall::UpdateWeights),
        "/begin_weight_update" => Route::Control(ControlCall::WeightsBegin),
        "/end_weight_update" => Route::Control(ControlCall::WeightsEnd),
        "/release_memory_occupation" => Route::Control(ControlCall::MemoryRelease),
        "/resume_memory_occupation" => Route::Control(ControlCall::MemoryResume),
        "/pd_role_switch" => Route::Control(ControlCall::RoleSwitch),
        "/abort_request" => Route::Control(ControlCall::Abort),
        "/v1/loads" | "/get_load" | "/metrics" | "/server_info" | "/get_server_info" | "/model_info"
        | "/get_model_info" | "/v1/models" => Route::Status,
        "/route" => Route::Route,
        "/register_dp_rank" => Route::RegisterDpRank,
        "/query_dp_ranks" => Route::QueryDpRanks,
        _ => Route::Other,
    }
}

fn query_of(query: &str) -> RouteQuery {
    let mut found = RouteQuery::default();
    for pair in query.split('&').take(16) {
        let Some((key, value)) = pair.split_once('=') else { continue };
        let place = match key {
            "prefill_dp_rank" | "target_dp_group" => &mut found.dp_rank,
            "prefill_cp_rank" => &mut found.cp_rank,
            "target_tp_rank" | "engine_rank" => &mut found.tp_rank,
            "target_pp_rank" => &mut found.pp_rank,
            _ => continue,
        };
        *place = value.parse().ok();
    }
    found
}
