//! Drives the HTTP stage from the tests.
#![allow(dead_code, reason = "each test uses its part")]

use std::path::Path;

use roomtrace::event::Direction::{self, Received, Sent};
use roomtrace::http::event::{Event, Rooms, Said, WhereSeen, Work};
use roomtrace::http::{Counters, Decoder, Ending, Stretch};

pub(crate) const ROOM: u64 = 5_123_456_789_012_345_678;

/// One step of a conversation; the client's stream is what the server's socket received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Bytes of one call.
    Bytes(Direction, Vec<u8>),
    /// Bytes behind missing ones of the same call.
    Tail(Direction, Vec<u8>),
    Missing(Direction, u64),
    Disorder(Direction),
    End(Ending),
}

pub(crate) fn ask(bytes: impl AsRef<[u8]>) -> Step {
    Step::Bytes(Received, bytes.as_ref().to_vec())
}

pub(crate) fn ask_tail(bytes: impl AsRef<[u8]>) -> Step {
    Step::Tail(Received, bytes.as_ref().to_vec())
}

pub(crate) fn ask_missing(len: usize) -> Step {
    Step::Missing(Received, len.try_into().unwrap())
}

pub(crate) fn answer(bytes: impl AsRef<[u8]>) -> Step {
    Step::Bytes(Sent, bytes.as_ref().to_vec())
}

pub(crate) fn answer_missing(len: usize) -> Step {
    Step::Missing(Sent, len.try_into().unwrap())
}

pub(crate) fn client_fin() -> Step {
    Step::End(Ending::Fin(Received))
}

pub(crate) fn server_fin() -> Step {
    Step::End(Ending::Fin(Sent))
}

/// A server's connection at work.
pub(crate) struct Session {
    pub(crate) decoder: Decoder,
    pub(crate) counters: Counters,
    pub(crate) events: Vec<Event>,
}

impl Session {
    pub(crate) fn new(decoder: Decoder) -> Self {
        Self { decoder, counters: Counters::default(), events: Vec::new() }
    }

    pub(crate) fn step(&mut self, step: &Step) {
        let Self { decoder, counters, events } = self;
        let mut sink = |event| events.push(event);
        match step {
            Step::Bytes(d, bytes) => {
                decoder.feed(*d, Stretch::Bytes { bytes, opens: true }, counters, &mut sink);
            }
            Step::Tail(d, bytes) => {
                decoder.feed(*d, Stretch::Bytes { bytes, opens: false }, counters, &mut sink);
            }
            Step::Missing(d, len) => decoder.feed(*d, Stretch::Missing(*len), counters, &mut sink),
            Step::Disorder(d) => decoder.feed(*d, Stretch::Disorder, counters, &mut sink),
            Step::End(ending) => decoder.end(*ending, counters, &mut sink),
        }
    }
}

/// What a connection followed from its start says.
pub(crate) fn run(steps: &[Step]) -> (Vec<Event>, Counters) {
    let mut session = Session::new(Decoder::at_start());
    for step in steps {
        session.step(step);
    }
    (session.events, session.counters)
}

/// What each request says of its rooms.
pub(crate) fn works(events: &[Event]) -> Vec<Work> {
    let work = |event: &Event| match event {
        Event::RequestWhole { said: Said::Work(work), .. } => Some(work.clone()),
        _ => None,
    };
    events.iter().filter_map(work).collect()
}

pub(crate) fn named(rooms: &[u64], seen: WhereSeen) -> Rooms {
    Rooms::Named { rooms: rooms.iter().map(|r| Some(*r)).collect(), complete: true, maybe_more: false, seen }
}

/// A request with this body.
pub(crate) fn post(path: &str, body: &str) -> Vec<u8> {
    let len = body.len();
    format!("POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len}\r\n\r\n{body}")
        .into_bytes()
}

pub(crate) const OK: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";

/// A conversation recorded by `fixtures/http/record.py`.
pub(crate) fn recorded(name: &str) -> Vec<Step> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/http").join(format!("{name}.txt"));
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(line).collect()
}

fn line(line: &str) -> Step {
    let direction = if line.starts_with('>') { Received } else { Sent };
    match line.get(1..).unwrap() {
        "." => Step::End(Ending::Fin(direction)),
        hex => Step::Bytes(direction, unhex(hex.trim())),
    }
}

fn unhex(hex: &str) -> Vec<u8> {
    hex.as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

/// The same conversation as the kernel ships it: of each call its first and last `keep` bytes.
pub(crate) fn capped(steps: &[Step], keep: usize) -> Vec<Step> {
    let mut out = Vec::new();
    for step in steps {
        match step {
            Step::Bytes(d, bytes) if bytes.len() > 2 * keep => {
                out.push(Step::Bytes(*d, bytes[..keep].to_vec()));
                out.push(Step::Missing(*d, (bytes.len() - 2 * keep) as u64));
                out.push(Step::Tail(*d, bytes[bytes.len() - keep..].to_vec()));
            }
            step => out.push(step.clone()),
        }
    }
    out
}

/// One line per event.
pub(crate) fn brief(events: &[Event]) -> Vec<String> {
    events.iter().map(one).collect()
}

fn one(event: &Event) -> String {
    match event {
        Event::Judged { requests, from_start } => format!("requests {requests:?} from_start {from_start}"),
        Event::Unread(why) => format!("unread {}", why.label()),
        Event::RequestBegun { n, method, route } => format!("{n} begun {method:?} {route:?}"),
        Event::RequestWhole { n, end_seen, said } => {
            let cut = if *end_seen { "" } else { " cut" };
            format!("{n} whole{cut} {}", say(said))
        }
        Event::Interim { n, status } => format!("{n} interim {status}"),
        Event::AnswerHead { n, status, streamed } => {
            format!("{n} answer {status}{}", if *streamed { " streamed" } else { "" })
        }
        Event::AnswerFirstBodyByte { n } => format!("{n} first byte"),
        Event::AnswerEnd { n, how, said } => format!("{n} end {how:?} {said:?}"),
        Event::HangUp { n, by, reset, request_whole, answer_begun } => {
            format!("{n} hang-up {by:?} reset {reset} whole {request_whole} answered {answer_begun}")
        }
        Event::Lost { direction, why } => format!("lost {direction:?} {}", why.label()),
        Event::Regained { direction } => format!("regained {direction:?}"),
    }
}

fn say(said: &Said) -> String {
    match said {
        Said::Work(work) => {
            let rids: Vec<_> = work.rids.iter().map(|r| r.as_deref().unwrap_or("?")).collect();
            match &work.rooms {
                Rooms::Named { rooms, complete, maybe_more, seen } => {
                    let rooms: Vec<_> =
                        rooms.iter().map(|r| r.map_or("-".into(), |r| r.to_string())).collect();
                    let more = match (complete, maybe_more) {
                        (false, _) => " and more",
                        (true, true) => " and maybe more",
                        (true, false) => "",
                    };
                    format!("{seen:?} {}{more} rid {}", rooms.join(","), rids.join(","))
                }
                other => format!("{other:?} rid {}", rids.join(",")),
            }
        }
        said => format!("{said:?}"),
    }
}
