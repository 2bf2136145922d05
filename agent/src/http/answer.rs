//! Bodies of answers: the outcome of a generation, and what the bootstrap server tells.

use super::body::address;
use super::event::{Answered, Outcome, Route, Topology};
use super::json::{Item, Lexer, Reader};
use super::members::{Members, Value, Wanted};
use super::scan::{Read, Scan};

const ROUTE: &[&str] = &[
    "rank_ip",
    "rank_port",
    "attn_tp_size",
    "attn_cp_size",
    "dp_size",
    "pp_size",
    "page_size",
    "prefill_http_port",
    "follow_bootstrap_room",
    "decode_allocation_policy",
];

/// The body of one answer under way.
#[derive(Clone, Debug)]
pub(super) enum AnswerBody {
    Unread,
    /// A generation in one JSON value.
    Json(Scan, OutcomeReader),
    /// A generation as server-sent events.
    Events(EventStream, OutcomeReader),
    Route(Scan, Members),
    DpRanks(Scan, Members),
}

impl AnswerBody {
    pub(super) fn new(route: Route, status: u16, streamed: bool, encoded: bool) -> Self {
        match route {
            _ if encoded => Self::Unread,
            _ if route.is_work() && streamed => Self::Events(EventStream::new(), OutcomeReader::default()),
            _ if route.is_work() => Self::Json(Scan::new(), OutcomeReader::default()),
            Route::Route if status == 200 => Self::Route(Scan::new(), Members::new(Wanted::Keys(ROUTE))),
            Route::QueryDpRanks if status == 200 => Self::DpRanks(Scan::new(), Members::new(Wanted::Numbers)),
            _ => Self::Unread,
        }
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        match self {
            Self::Unread => {}
            Self::Json(scan, reader) => scan.bytes(bytes, reader),
            Self::Events(events, reader) => events.bytes(bytes, reader),
            Self::Route(scan, members) | Self::DpRanks(scan, members) => scan.bytes(bytes, members),
        }
    }

    pub(super) fn hole(&mut self) {
        match self {
            Self::Unread => {}
            Self::Json(scan, reader) => scan.hole(reader),
            Self::Events(events, _) => events.hole(),
            Self::Route(scan, members) | Self::DpRanks(scan, members) => scan.hole(members),
        }
    }

    /// Bytes of memory held.
    pub(super) fn held(&self) -> usize {
        match self {
            Self::Unread | Self::Events(..) => 0,
            Self::Json(scan, _) => scan.held(),
            Self::Route(scan, members) | Self::DpRanks(scan, members) => scan.held() + members.held(),
        }
    }

    /// The answer is over. Its last byte is the body's last byte only if `end_seen`.
    pub(super) fn finish(self, end_seen: bool) -> Answered {
        match self {
            Self::Unread => Answered::Nothing,
            Self::Json(mut scan, mut reader) => {
                if !end_seen {
                    scan.hole(&mut reader);
                }
                // What an error page of a proxy holds is no outcome; what was read before it broke off is one.
                scan.finish(&mut reader);
                Answered::Outcome(reader.outcome)
            }
            Self::Events(_, reader) => Answered::Outcome(reader.outcome),
            Self::Route(scan, mut members) => {
                if end_seen && scan.finish(&mut members) != Read::NotJson {
                    route(&members)
                } else {
                    Answered::Nothing
                }
            }
            Self::DpRanks(scan, mut members) => {
                let whole = end_seen && scan.finish(&mut members) == Read::Whole;
                let rank = |(room, value): (u64, &Value)| Some((room, value.number()?));
                Answered::DpRanks(whole.then(|| members.numbered().filter_map(rank).collect()))
            }
        }
    }
}

fn route(members: &Members) -> Answered {
    fn number<T: TryFrom<u64>>(members: &Members, key: &str) -> Option<T> {
        members.get(key).and_then(Value::number)
    }
    let ip = members.get("rank_ip").and_then(Value::text).and_then(address);
    if let Some((ip, port)) = ip.zip(number(members, "rank_port")) {
        return Answered::Rank(ip, port);
    }
    let topology = Topology {
        tp_size: number(members, "attn_tp_size"),
        cp_size: number(members, "attn_cp_size"),
        dp_size: number(members, "dp_size"),
        pp_size: number(members, "pp_size"),
        page_size: number(members, "page_size"),
        http_port: number(members, "prefill_http_port"),
        follows_room: match members.get("follow_bootstrap_room") {
            Some(Value::Bool(follows)) => Some(*follows),
            _ => None,
        },
        prefill_complete: members
            .get("decode_allocation_policy")
            .and_then(Value::text)
            .map(|policy| policy == "prefill_complete"),
    };
    if topology == Topology::default() { Answered::Nothing } else { Answered::Topology(topology) }
}

/// Finds `finish_reason` (at any depth: text that was generated stands in strings) and `error`.
#[derive(Clone, Debug)]
pub(super) struct OutcomeReader {
    outcome: Outcome,
    /// What the value under way is.
    wanted: Asked,
    /// Depth of the last `finish_reason`.
    reason: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Nothing,
    Reason,
    Error,
    Object,
}

impl Default for OutcomeReader {
    fn default() -> Self {
        Self { outcome: Outcome::Unknown, wanted: Asked::Nothing, reason: 0 }
    }
}

impl OutcomeReader {
    /// The worst of a batch counts.
    fn found(&mut self, outcome: Outcome) {
        self.outcome = self.outcome.max(outcome);
    }
}

impl Reader for OutcomeReader {
    /// `choices[i].finish_reason.type` is at 4, in a batch at 5.
    const KEYS_TO: u32 = 5;

    fn key(&mut self, depth: u32, name: Option<&[u8]>) -> bool {
        let inside = self.reason > 0 && depth == self.reason + 1;
        if depth <= self.reason {
            self.reason = 0;
        }
        self.wanted = match name {
            Some(b"finish_reason") => {
                self.reason = depth;
                Asked::Reason
            }
            Some(b"type") if inside => Asked::Reason,
            Some(b"error") if depth == 1 => Asked::Error,
            Some(b"object") if depth == 1 => Asked::Object,
            _ => Asked::Nothing,
        };
        self.wanted != Asked::Nothing
    }

    fn value(&mut self, item: Item<'_>) {
        match (std::mem::replace(&mut self.wanted, Asked::Nothing), item) {
            (Asked::Reason, Item::Text(b"abort")) => self.found(Outcome::Aborted),
            (Asked::Reason, Item::Text(_)) => self.found(Outcome::Finished),
            (Asked::Error, Item::Text(_) | Item::Unread | Item::Nested | Item::Open)
            | (Asked::Object, Item::Text(b"error")) => self.found(Outcome::Error),
            _ => {}
        }
    }

    fn pass_hole(&mut self) {
        self.wanted = Asked::Nothing;
        self.reason = 0;
    }
}

/// Server-sent events: a line feed never stands inside JSON text, so every line begins in step, also behind a hole.
#[derive(Clone, Debug)]
pub(super) struct EventStream {
    line: Line,
}

#[derive(Clone, Debug)]
enum Line {
    /// So many bytes of [`DATA`] have come.
    Begin(usize),
    Data(Lexer),
    Other,
}

const DATA: &[u8] = b"data:";

impl EventStream {
    const fn new() -> Self {
        Self { line: Line::Begin(0) }
    }

    fn hole(&mut self) {
        self.line = Line::Other;
    }

    fn bytes(&mut self, mut bytes: &[u8], reader: &mut OutcomeReader) {
        while !bytes.is_empty() {
            let end = bytes.iter().position(|b| *b == b'\n');
            let (line, rest) = bytes.split_at_checked(end.unwrap_or(bytes.len())).unwrap_or((bytes, &[]));
            self.part(line, reader);
            bytes = rest.get(1..).unwrap_or_default();
            if end.is_some() {
                self.line = Line::Begin(0);
                reader.pass_hole();
            }
        }
    }

    fn part(&mut self, mut part: &[u8], reader: &mut OutcomeReader) {
        while let Line::Begin(done) = self.line {
            let Some((first, rest)) = part.split_first() else { return };
            self.line = match DATA.get(done) {
                Some(expected) if expected == first && done + 1 == DATA.len() => Line::Data(Lexer::new()),
                Some(expected) if expected == first => Line::Begin(done + 1),
                _ => Line::Other,
            };
            part = rest;
        }
        if let Line::Data(lexer) = &mut self.line
            && lexer.feed(part, reader).is_err()
        {
            self.line = Line::Other;
        }
    }
}
