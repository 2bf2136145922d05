//! Bodies of requests: what they say, as far as they were seen.

use std::net::IpAddr;

use super::counters::Counters;
use super::event::{
    Control, ControlCall, Ignored, Method, NewRole, NotSeen, PauseMode, RankRegistration, Rooms, Route,
    RouteQuery, Said, WhereSeen, Work,
};
use super::head::Request;
use super::members::{List, Members, PARAMS, Value, Wanted};
use super::scan::{Read, Scan};
use super::{RID_MAX, ROOMS_MAX};

/// `disaggregation/utils.py`: `FAKE_BOOTSTRAP_HOST`.
const FAKE_HOST: &str = "2.2.2.2";

/// `constants.py`: `HEALTH_CHECK_RID_PREFIX`.
const HEALTH_CHECK: &str = "HEALTH_CHECK";

const WORK: &[&str] = &["bootstrap_room", "rid", "bootstrap_host", "n", PARAMS];
/// Prompts, first the ones that count before the others (`io_struct.py`, `_determine_batch_size`; `prompt`: `/v1/completions`).
const PROMPTS: &[&str] = &["text", "input_ids", "input_embeds", "prompt"];
const CONTROL: &[&str] = &["rid", "abort_all", "mode", "new_role"];
const DP_RANK: &[&str] = &["bootstrap_room", "dp_rank"];
const DP_RANKS: &[&str] = &["bootstrap_rooms"];
const RANK: &[&str] = &[
    "rank_ip",
    "rank_port",
    "attn_tp_rank",
    "engine_rank",
    "attn_tp_size",
    "tp_size",
    "attn_cp_rank",
    "attn_cp_size",
    "attn_dp_rank",
    "attn_dp_size",
    "dp_size",
    "system_dp_rank",
    "system_dp_size",
    "pp_rank",
    "pp_size",
    "page_size",
    "prefill_http_port",
    "load_balance_method",
    "decode_allocation_policy",
];

/// The body of one request under way.
#[derive(Clone, Debug)]
pub(super) struct Body {
    method: Method,
    route: Route,
    query: RouteQuery,
    /// Why it is not read, where it would be.
    unreadable: Option<NotSeen>,
    reading: Option<(Scan, Members)>,
    empty: bool,
}

impl Body {
    pub(super) fn new(request: &Request) -> Self {
        let wanted = match (request.route, request.method) {
            (route, Method::Post | Method::Put) if route.is_work() => {
                Some(Wanted::KeysAndShapes(WORK, PROMPTS))
            }
            (Route::Control(_), _) => Some(Wanted::Keys(CONTROL)),
            (Route::Route, Method::Put) => Some(Wanted::Keys(RANK)),
            (Route::RegisterDpRank, Method::Post) => Some(Wanted::Keys(DP_RANK)),
            (Route::QueryDpRanks, Method::Post) => Some(Wanted::Keys(DP_RANKS)),
            _ => None,
        };
        let readable = wanted.filter(|_| request.unreadable.is_none());
        Self {
            method: request.method,
            route: request.route,
            query: request.query,
            unreadable: request.unreadable,
            reading: readable.map(|keys| (Scan::new(), Members::new(keys))),
            empty: true,
        }
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.empty &= bytes.is_empty();
        if let Some((scan, members)) = &mut self.reading {
            scan.bytes(bytes, members);
        }
    }

    pub(super) fn hole(&mut self) {
        self.empty = false;
        if let Some((scan, members)) = &mut self.reading {
            scan.hole(members);
        }
    }

    /// Bytes of memory held.
    pub(super) fn held(&self) -> usize {
        self.reading.as_ref().map_or(0, |(scan, members)| scan.held() + members.held())
    }

    /// The body has ended (`end_seen`), or its position is lost: then nothing behind the last hole counts.
    pub(super) fn finish(mut self, end_seen: bool, counters: &mut Counters) -> Said {
        let mut members = Members::new(Wanted::Keys(&[]));
        let mut read = Err(self.unreadable.unwrap_or(NotSeen::NotJson));
        if let Some((mut scan, found)) = self.reading.take() {
            members = found;
            if !end_seen {
                scan.hole(&mut members);
            }
            read = match scan.finish(&mut members) {
                Read::NotJson => Err(NotSeen::NotJson),
                Read::Whole => Ok(true),
                Read::Parts => Ok(false),
            };
        }
        if self.empty && end_seen && self.unreadable.is_none() {
            read = Ok(true);
        }
        let readable = read.is_ok();
        match (self.route, self.method) {
            (route, Method::Post | Method::Put) if route.is_work() => {
                Said::Work(work(route, &members, read, counters))
            }
            (Route::Control(call), _) => Said::Control(control(call, &members)),
            (Route::Route, Method::Put) => {
                Said::RegisterRank(readable.then(|| Box::new(registration(&members))))
            }
            (Route::Route, Method::Get) => Said::Query(self.query),
            (Route::RegisterDpRank, Method::Post) => {
                let room = members.get("bootstrap_room").and_then(Value::room);
                let rank = members.get("dp_rank").and_then(Value::number);
                Said::RegisterDpRank(room.zip(rank).filter(|_| readable))
            }
            (Route::QueryDpRanks, Method::Post) => {
                Said::QueryDpRanks(members.get("bootstrap_rooms").filter(|_| readable).and_then(rooms_asked))
            }
            _ => Said::Nothing,
        }
    }
}

/// Rooms of a query, if every one was seen.
fn rooms_asked(value: &Value) -> Option<Vec<u64>> {
    match value {
        Value::List(List { items, over: 0, closed: true }) => items.iter().map(Value::room).collect(),
        _ => None,
    }
}

/// `read`: whether the body was read from end to end, or why it could not be read.
fn work(route: Route, members: &Members, read: Result<bool, NotSeen>, counters: &mut Counters) -> Work {
    if read.is_err() {
        let why = read.err().unwrap_or(NotSeen::NotJson);
        counters.count_not_seen(why);
        return Work { rooms: Rooms::NotSeen(why), rids: Vec::new() };
    }
    let whole = read == Ok(true);
    let rids = rids(members.get("rid"), counters);
    let rooms = rooms(route, members, whole, &rids, counters);
    match &rooms {
        Rooms::None => {}
        Rooms::Named { rooms, .. } => {
            counters.rooms += u64::try_from(rooms.iter().flatten().count()).unwrap_or(0);
        }
        Rooms::Ignored(why) => counters.count_ignored(*why),
        Rooms::NotSeen(why) => counters.count_not_seen(*why),
    }
    Work { rooms, rids }
}

fn rids(value: Option<&Value>, counters: &mut Counters) -> Vec<Option<Box<str>>> {
    let one = |value: &Value| value.text().map(Box::from);
    let rids: Vec<Option<Box<str>>> = match value {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::List(list)) => list.items.iter().map(one).collect(),
        Some(value) => vec![one(value)],
    };
    counters.rids_dropped += u64::try_from(rids.iter().filter(|r| r.is_none()).count()).unwrap_or(0);
    rids
}

/// How many times each prompt is worked on, which makes as many rooms of it; `None`: that may stand in missing bytes, or is not read.
/// `/generate` takes it from `sampling_params` (`io_struct.py`, `_handle_parallel_sampling`), the `/v1` routes from `n`.
fn times(route: Route, members: &Members, whole: bool) -> Option<u64> {
    let n = match members.get("n") {
        None | Some(Value::Null) => None,
        Some(value) => Some(value.room()?),
    };
    let params = members.get(PARAMS);
    // Each of a list has its own, which are not read.
    let once = (whole && !matches!(params, Some(Value::List(_))))
        || match route {
            Route::Generate => params.is_some_and(|p| !matches!(p, Value::List(_))),
            Route::Completions | Route::ChatCompletions => members.get("n").is_some() && !members.inner_n,
            _ => false,
        };
    n.filter(|n| *n > 1).or(once.then_some(1))
}

fn rooms(
    route: Route,
    members: &Members,
    whole: bool,
    rids: &[Option<Box<str>>],
    counters: &mut Counters,
) -> Rooms {
    if members.odd_key {
        return Rooms::NotSeen(NotSeen::OddKey);
    }
    let is_fake = |host: &Value| host.text() == Some(FAKE_HOST);
    let hosts: &[Value] = match members.get("bootstrap_host") {
        Some(Value::List(list)) => &list.items,
        Some(host) => std::slice::from_ref(host),
        None => &[],
    };
    if !hosts.is_empty() && hosts.iter().all(is_fake) {
        return Rooms::Ignored(Ignored::FakeHost);
    }
    if !rids.is_empty() && rids.iter().all(|r| r.as_deref().is_some_and(|r| r.starts_with(HEALTH_CHECK))) {
        return Rooms::Ignored(Ignored::HealthCheck);
    }
    let Some((value, behind_hole)) = members.get_placed("bootstrap_room") else {
        return if whole { Rooms::None } else { Rooms::NotSeen(NotSeen::Hole) };
    };
    let seen = match (whole, behind_hole) {
        (true, _) => WhereSeen::Whole,
        (false, false) => WhereSeen::Head,
        (false, true) => WhereSeen::Tail,
    };
    let times = times(route, members, whole);
    let mut rooms = match value {
        Value::Null => Rooms::None,
        Value::List(list) => batch(list, times, seen, counters),
        value => match value.room() {
            None => Rooms::NotSeen(NotSeen::NotANumber),
            Some(0) => Rooms::Ignored(Ignored::Zero),
            // One number for a batch counts up (`io_struct.py`, `_normalize_bootstrap_params`).
            Some(first) => {
                let (count, complete, prompts) = batch_of_one_number(members, rids.len());
                let rooms = (0..count).map(|i| first.checked_add(i)).collect();
                // What is made of each prompt several times is not followed.
                let complete = complete && times.is_none_or(|n| n <= 1);
                let prompts = whole || prompts || route == Route::ChatCompletions;
                let maybe_more = times.is_none() || !prompts;
                Rooms::Named { rooms, complete, maybe_more, seen }
            }
        },
    };
    if let Rooms::Named { rooms, .. } = &mut rooms {
        for (room, _) in rooms.iter_mut().zip(hosts).filter(|(_, host)| is_fake(host)) {
            *room = None;
        }
    }
    rooms
}

/// How many rooms one number stands for, as far as was seen, whether these are all, and whether its prompts were seen at all.
fn batch_of_one_number(members: &Members, rids: usize) -> (u64, bool, bool) {
    let limit = u64::try_from(ROOMS_MAX).unwrap_or(u64::MAX);
    let by_rids = u64::try_from(rids).unwrap_or(limit);
    let prompts = PROMPTS.iter().find_map(|key| match members.get(key) {
        Some(Value::Shape(shape)) if shape.is_there() => Some(shape.prompts()),
        _ => None,
    });
    let (count, known) = match (members.get("rid"), prompts) {
        (Some(Value::List(list)), _) if list.closed && list.over == 0 => (by_rids, true),
        (_, Some(prompts)) => prompts.map_or((by_rids, false), |n| (n.max(by_rids), n >= by_rids)),
        (Some(Value::List(_)), None) => (by_rids, false),
        (_, None) => return (1, true, false),
    };
    (count.clamp(1, limit), known && count <= limit, true)
}

fn batch(list: &List, times: Option<u64>, seen: WhereSeen, counters: &mut Counters) -> Rooms {
    counters.rooms_over_limit += list.over;
    // A router that knows of `n` lists as many rooms; the engine repeats a shorter list.
    let enough = times.is_none_or(|n| u64::try_from(list.items.len()).is_ok_and(|len| len >= n));
    let whole = list.closed && list.over == 0;
    let complete = whole && enough;
    let rooms: Vec<Option<u64>> = list.items.iter().map(|v| v.room().filter(|room| *room != 0)).collect();
    if rooms.iter().any(Option::is_some) {
        return Rooms::Named { rooms, complete, maybe_more: times.is_none(), seen };
    }
    if !whole {
        Rooms::NotSeen(NotSeen::Hole)
    } else if list.items.iter().all(|v| *v == Value::Null) {
        Rooms::None
    } else if list.items.iter().any(|v| v.room().is_none() && *v != Value::Null) {
        Rooms::NotSeen(NotSeen::NotANumber)
    } else {
        Rooms::Ignored(Ignored::Zero)
    }
}

fn control(call: ControlCall, members: &Members) -> Control {
    let text = |key| members.get(key).and_then(Value::text);
    match call {
        ControlCall::Pause => Control::Pause(match text("mode") {
            Some("abort") => Some(PauseMode::Abort),
            Some("in_place") => Some(PauseMode::InPlace),
            Some("retract") => Some(PauseMode::Retract),
            _ => None,
        }),
        ControlCall::Resume => Control::Resume,
        ControlCall::UpdateWeights => Control::UpdateWeights,
        ControlCall::WeightsBegin => Control::WeightsBegin,
        ControlCall::WeightsEnd => Control::WeightsEnd,
        ControlCall::MemoryRelease => Control::MemoryRelease,
        ControlCall::MemoryResume => Control::MemoryResume,
        ControlCall::RoleSwitch => Control::RoleSwitch(match text("new_role") {
            Some("prefill") => Some(NewRole::Prefill),
            Some("decode") => Some(NewRole::Decode),
            _ => None,
        }),
        ControlCall::Abort => Control::Abort {
            rid: text("rid").filter(|rid| rid.len() <= RID_MAX).map(Box::from),
            all: match members.get("abort_all") {
                Some(Value::Bool(all)) => Some(*all),
                _ => None,
            },
        },
    }
}

fn registration(members: &Members) -> RankRegistration {
    fn number<T: TryFrom<u64>>(members: &Members, keys: &[&str]) -> Option<T> {
        keys.iter().find_map(|key| members.get(key).and_then(Value::number))
    }
    let is = |key, text: &str| members.get(key).and_then(Value::text).map(|t| t == text);
    RankRegistration {
        ip: members.get("rank_ip").and_then(Value::text).and_then(address),
        port: number(members, &["rank_port"]),
        tp_rank: number(members, &["attn_tp_rank", "engine_rank"]),
        tp_size: number(members, &["attn_tp_size", "tp_size"]),
        cp_rank: number(members, &["attn_cp_rank"]),
        cp_size: number(members, &["attn_cp_size"]),
        dp_rank: number(members, &["attn_dp_rank"]),
        dp_size: number(members, &["attn_dp_size", "dp_size"]),
        system_dp_rank: number(members, &["system_dp_rank"]),
        system_dp_size: number(members, &["system_dp_size"]),
        pp_rank: number(members, &["pp_rank"]),
        pp_size: number(members, &["pp_size"]),
        page_size: number(members, &["page_size"]),
        http_port: number(members, &["prefill_http_port"]),
        follows_room: is("load_balance_method", "follow_bootstrap_room"),
        prefill_complete: is("decode_allocation_policy", "prefill_complete"),
    }
}

/// An address, IPv6 with or without brackets; IPv4-mapped ones become IPv4.
pub(super) fn address(text: &str) -> Option<IpAddr> {
    let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
    bare.parse::<IpAddr>().ok().map(|ip| ip.to_canonical())
}
