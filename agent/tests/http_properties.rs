//! Any split of the bytes gives the same events, any bytes are borne, no hole ever gives a wrong room.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod http_support;

use http_support::{ROOM, Session, Step, answer, ask, client_fin, recorded, run, works};
use proptest::prelude::*;
use roomtrace::event::Direction::{Received, Sent};
use roomtrace::http::event::{Event, Rooms, Said, WhereSeen};
use roomtrace::http::{Decoder, Ending, HEAD_MAX, WINDOW};

/// Text as it stands in JSON, with everything that could be taken for structure.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        Just("\"bootstrap_room\": 7".to_owned()),
        Just("\", \"bootstrap_room\": 7, \"".to_owned()),
        Just("\\\", \\\"bootstrap_room\\\": 7}".to_owned()),
        Just("\\".to_owned()),
        Just("}{][,:".to_owned()),
        Just("POST /generate HTTP/1.1\r\nHost: a\r\n\r\n".to_owned()),
        Just("\u{e9}\u{1f600}\u{7}".to_owned()),
        "[ -~]{0,40}",
    ];
    proptest::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

fn quoted(text: &str) -> String {
    serde_json::to_string(text).unwrap()
}

/// A value that names no room, with decoys.
fn value() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        text().prop_map(|t| quoted(&t)),
        Just("7".to_owned()),
        Just("null".to_owned()),
        Just("[7, 8]".to_owned()),
        Just("-1.5e3".to_owned()),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(|items| format!("[{}]", items.join(","))),
            proptest::collection::vec(inner, 1..4).prop_map(|items| {
                let members: Vec<_> = items.iter().map(|i| format!("\"bootstrap_room\" : {i}")).collect();
                format!("{{{}}}", members.join(" ,\n"))
            }),
        ]
    })
}

/// The body of a request: members in any order; the room if `Some`.
fn body() -> impl Strategy<Value = (String, Vec<u64>)> {
    let room = prop_oneof![
        Just((String::new(), vec![])),
        Just((format!("\"bootstrap_room\":{ROOM}"), vec![ROOM])),
        Just((format!("\"bootstrap_room\" : \"{ROOM}\""), vec![ROOM])),
        Just((format!("\"bootstrap_room\":[{ROOM},\n123456]"), vec![ROOM, 123_456])),
    ];
    let others = proptest::collection::vec(value(), 0..5);
    (room, others, any::<prop::sample::Index>(), prop_oneof![Just(0usize), Just(30), Just(9000)]).prop_map(
        |((room, rooms), others, place, padding)| {
            let mut members: Vec<String> =
                others.iter().enumerate().map(|(i, v)| format!("\"k{i}\":{v}")).collect();
            members.push(format!("\"text\":\"{}\"", "p".repeat(padding)));
            if !room.is_empty() {
                members.insert(place.index(members.len() + 1), room);
            }
            (format!(" {{{}}}\n", members.join(", ")), rooms)
        },
    )
}

fn request(body: &str, chunk: Option<usize>) -> Vec<u8> {
    let head = "POST /generate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n";
    match chunk {
        None => format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes(),
        Some(size) => {
            let mut out = format!("{head}Transfer-Encoding: chunked\r\n\r\n").into_bytes();
            for part in body.as_bytes().chunks(size) {
                out.extend(format!("{:x}\r\n", part.len()).bytes());
                out.extend(part);
                out.extend(b"\r\n");
            }
            out.extend(b"0\r\n\r\n");
            out
        }
    }
}

/// Splits every piece of bytes at these places.
fn split(steps: &[Step], cuts: &[prop::sample::Index]) -> Vec<Step> {
    let mut out = Vec::new();
    for step in steps {
        let (d, bytes, opens) = match step {
            Step::Bytes(d, bytes) => (*d, bytes, true),
            Step::Tail(d, bytes) => (*d, bytes, false),
            step => {
                out.push(step.clone());
                continue;
            }
        };
        let mut places: Vec<_> = cuts.iter().map(|c| c.index(bytes.len() + 1)).collect();
        places.extend([0, bytes.len()]);
        places.sort_unstable();
        for pair in places.windows(2) {
            let part = bytes[pair[0]..pair[1]].to_vec();
            out.push(if opens && pair[0] == 0 { Step::Bytes(d, part) } else { Step::Tail(d, part) });
        }
    }
    out
}

fn bytewise(steps: &[Step]) -> Vec<Step> {
    let one = |step: &Step| match step {
        Step::Bytes(d, bytes) => bytes.iter().map(|b| Step::Bytes(*d, vec![*b])).collect(),
        step => vec![step.clone()],
    };
    steps.iter().flat_map(one).collect()
}

const RECORDED: [&str; 10] = [
    "aiohttp_streamed_h11",
    "curl_expect_continue_httptools",
    "curl_hangs_up_httptools",
    "curl_http10_httptools",
    "curl_http2_prior_knowledge",
    "curl_tls",
    "http_client_kept_alive_h11",
    "httpx_streamed_httptools",
    "requests_bootstrap_aiohttp",
    "requests_httptools",
];

#[test]
fn recorded_conversations_byte_by_byte_say_the_same() {
    for name in RECORDED {
        let steps = recorded(name);
        assert_eq!(run(&steps), run(&bytewise(&steps)), "{name}");
    }
}

fn rooms_named(rooms: &Rooms) -> Vec<u64> {
    match rooms {
        Rooms::Named { rooms, .. } => rooms.iter().flatten().copied().collect(),
        _ => vec![],
    }
}

/// Steps of any kind over bytes that look like HTTP.
fn noise() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..200),
        body().prop_map(|(b, _)| request(&b, None)),
        body().prop_map(|(b, _)| request(&b, Some(100))),
        Just(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n{}".to_vec()),
        Just(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcde\r\n".to_vec()),
        Just(b"0\r\n\r\n".to_vec()),
        Just(b"HTTP/1.1 100 Continue\r\n\r\n".to_vec()),
        Just(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n".to_vec()),
        Just(
            b"POST /generate HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n"
                .to_vec()
        ),
        Just(b"\r\n".to_vec()),
    ];
    let d = prop_oneof![Just(Sent), Just(Received)];
    prop_oneof![
        8 => (d.clone(), bytes.clone(), any::<u8>()).prop_map(|(d, mut b, cut)| {
            b.truncate(b.len().saturating_sub(usize::from(cut % 8)));
            Step::Bytes(d, b)
        }),
        2 => (d.clone(), bytes).prop_map(|(d, b)| Step::Tail(d, b)),
        2 => (d.clone(), 0u64..400).prop_map(|(d, len)| Step::Missing(d, len)),
        1 => d.clone().prop_map(|d| Step::Missing(d, u64::MAX)),
        1 => d.clone().prop_map(Step::Disorder),
        1 => d.prop_map(|d| Step::End(Ending::Fin(d))),
        1 => Just(Step::End(Ending::Reset(None))),
    ]
}

/// One exchange that nothing goes wrong in: its request names room 1000 + k, its answer has status 200 + k.
fn exchange(k: usize, ask_kind: u8, answer_kind: u8, padding: usize) -> Vec<Step> {
    let text = "p".repeat(padding);
    let body = match ask_kind % 2 {
        0 => format!("{{\"text\":\"{text}\",\"bootstrap_room\":{}}}", 1000 + k),
        _ => format!("{{\"bootstrap_room\":{},\"text\":\"{text}\"}}", 1000 + k),
    };
    let asked = request(&body, ask_kind.is_multiple_of(3).then_some(700));
    let status = 220 + k;
    let data = format!("data: {{\"text\":\"{text}\"}}\n\n");
    let chunk = format!("{:x}\r\n{data}\r\n", data.len());
    let answers = match answer_kind % 4 {
        0 => vec![format!("HTTP/1.1 {status} A\r\nContent-Length: {}\r\n\r\n{text}", text.len())],
        1 => vec![
            format!(
                "HTTP/1.1 {status} A\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            ),
            chunk.clone(),
            chunk,
            "0\r\n\r\n".to_owned(),
        ],
        2 => vec![format!("HTTP/1.1 {status} A\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}0\r\n\r\n")],
        _ => vec![
            "HTTP/1.1 100 Continue\r\n\r\n".to_owned(),
            format!("HTTP/1.1 {status} A\r\nContent-Length: {}\r\n\r\n", text.len()),
            text,
        ],
    };
    let mut steps: Vec<Step> = asked.chunks(9_000).map(ask).collect();
    steps.extend(answers.into_iter().filter(|a| !a.is_empty()).map(answer));
    steps
}

/// Steps to be read by people.
fn show(steps: &[Step]) -> String {
    let one = |step: &Step| match step {
        Step::Bytes(d, b) => format!("{d:?} {:?}", String::from_utf8_lossy(b)),
        Step::Tail(d, b) => format!("{d:?} … {:?}", String::from_utf8_lossy(b)),
        Step::Missing(_, 0) => String::new(),
        step => format!("{step:?}"),
    };
    steps.iter().map(one).filter(|l| !l.is_empty()).collect::<Vec<_>>().join("\n")
}

/// What becomes of a call on its way.
#[derive(Clone, Copy, Debug)]
enum Fate {
    Whole,
    Ends(usize),
    LengthOnly,
    /// Not told at all: its length shows when the next call of its stream is told, or at the end; that of an answer also
    /// when the next request comes.
    Silent,
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![
        6 => Just(Fate::Whole),
        2 => (1usize..200).prop_map(Fate::Ends),
        1 => Just(Fate::LengthOnly),
        1 => Just(Fate::Silent),
    ]
}

fn suffer(steps: &[Step], fates: &[Fate]) -> Vec<Step> {
    let mut out = Vec::new();
    let mut silent = [0u64; 2];
    let side = |d| usize::from(d == Received);
    for (step, fate) in steps.iter().zip(fates.iter().cycle()) {
        let Step::Bytes(d, bytes) = step else { panic!("{step:?}") };
        let len = bytes.len() as u64;
        if matches!(fate, Fate::Silent) {
            silent[side(*d)] += len;
            continue;
        }
        out.push(Step::Missing(Sent, std::mem::take(&mut silent[0])));
        out.push(Step::Missing(*d, std::mem::take(&mut silent[side(*d)])));
        match fate {
            Fate::Ends(keep) => out.extend(http_support::capped(std::slice::from_ref(step), *keep)),
            Fate::LengthOnly => out.push(Step::Missing(*d, len)),
            _ => out.push(step.clone()),
        }
    }
    out.push(Step::Missing(Received, silent[1]));
    out.push(Step::Missing(Sent, silent[0]));
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn any_split_says_the_same(
        (body, rooms) in body(),
        chunk in proptest::option::of(1usize..300),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
        junk in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let stream = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n\
            29\r\ndata: {\"meta_info\":{\"finish_reason\":\"stop\"}}\n\n\r\n0\r\n\r\n";
        let steps = [
            ask([request(&body, chunk), request("{}", None)].concat()),
            answer(stream),
            answer("HTTP/1.1 500 No\r\nContent-Length: 11\r\n\r\n{\"error\":{}}"),
            ask(request(&body, None)),
            answer("HTTP/1.0 200 OK\r\n\r\n"),
            answer(&junk),
            ask(&junk),
            client_fin(),
        ];
        let whole = run(&steps);
        prop_assert_eq!(&whole, &run(&split(&steps, &cuts)));
        prop_assert_eq!(rooms_named(&works(&whole.0)[0].rooms), rooms);
    }

    #[test]
    fn no_hole_ever_gives_a_wrong_room(
        (body, rooms) in body(),
        chunk in proptest::option::of(20usize..9000),
        holes in proptest::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..4),
        tail in proptest::option::of(1usize..300),
    ) {
        let bytes = request(&body, chunk);
        // What is missing, as a mask; often all but head and tail.
        let mut missing = vec![false; bytes.len()];
        for (a, b) in &holes {
            let (a, b) = (a.index(bytes.len()), b.index(bytes.len()));
            missing[a.min(b)..a.max(b)].fill(true);
        }
        if let Some(tail) = tail.filter(|t| *t < bytes.len()) {
            let at = bytes.len() - tail;
            missing[at - at.min(tail * 20)..at].fill(true);
            missing[at..].fill(false);
        }
        let mut steps = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let len = missing[at..].iter().take_while(|m| **m == missing[at]).count();
            steps.push(match (missing[at], at) {
                (true, _) => Step::Missing(Received, len as u64),
                (false, 0) => ask(&bytes[..len]),
                (false, _) => Step::Tail(Received, bytes[at..at + len].to_vec()),
            });
            at += len;
        }
        steps.push(answer("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"));
        steps.push(ask(request("{\"bootstrap_room\":99}", None)));
        let (events, _) = run(&steps);
        for work in works(&events) {
            let named = rooms_named(&work.rooms);
            let right = named == [99] || rooms.starts_with(&named);
            prop_assert!(right, "{:?} of {:?} in {:?}", named, rooms, steps);
            if let Rooms::Named { complete: true, seen, .. } = work.rooms
                && named != [99]
            {
                prop_assert_eq!(&named, &rooms);
                prop_assert!(seen != WhereSeen::Whole || !missing.contains(&true));
            }
            if work.rooms == Rooms::None {
                prop_assert!(rooms.is_empty());
            }
        }
    }

    #[test]
    fn whatever_is_missing_no_answer_is_told_to_another_request(
        kinds in proptest::collection::vec((any::<u8>(), any::<u8>(), prop_oneof![Just(0usize), 1usize..3000]), 1..7),
        fates in proptest::collection::vec(fate(), 1..40),
        joined in any::<bool>(),
    ) {
        let steps: Vec<Step> =
            kinds.iter().enumerate().flat_map(|(k, (a, b, padding))| exchange(k, *a, *b, *padding)).collect();
        let steps = suffer(&steps, &fates);
        let mut session = Session::new(if joined { Decoder::joined() } else { Decoder::at_start() });
        for step in &steps {
            session.step(step);
        }
        session.step(&client_fin());
        let (mut rooms, mut ended) = (std::collections::BTreeMap::new(), std::collections::BTreeSet::new());
        for event in &session.events {
            match event {
                Event::RequestWhole { n, said: Said::Work(work), .. } => {
                    if let [room] = rooms_named(&work.rooms)[..] {
                        rooms.insert(*n, room);
                    }
                }
                Event::AnswerHead { n, status, .. } => {
                    if let Some(room) = rooms.get(n) {
                        prop_assert_eq!(*room, u64::from(*status) + 780, "{}", show(&steps));
                    }
                }
                Event::AnswerEnd { n, .. } => {
                    prop_assert!(ended.insert(*n));
                }
                // Every answer was complete: whoever says otherwise took a hole for a hang-up.
                Event::HangUp { .. } | Event::Unread(_) => {
                    prop_assert!(false, "{:?} in {}", event, show(&steps));
                }
                _ => {}
            }
        }
        let begun = session.events.iter().filter(|e| matches!(e, Event::RequestBegun { .. })).count();
        prop_assert_eq!(begun, ended.len(), "{}", show(&steps));
    }

    #[test]
    fn anything_is_borne(steps in proptest::collection::vec(noise(), 0..40), joined in any::<bool>()) {
        let mut session = Session::new(if joined { Decoder::joined() } else { Decoder::at_start() });
        let mut begun = 0;
        for step in &steps {
            session.step(step);
            prop_assert!(session.decoder.held() <= 4 * HEAD_MAX + 4 * WINDOW);
        }
        // Every request is told in order, begun before anything else, and ended once at most.
        let mut ended = std::collections::BTreeSet::new();
        for event in &session.events {
            match event {
                Event::RequestBegun { n, .. } => {
                    prop_assert_eq!(*n, begun);
                    begun += 1;
                }
                Event::RequestWhole { n, .. }
                | Event::Interim { n, .. }
                | Event::AnswerHead { n, .. }
                | Event::AnswerFirstBodyByte { n }
                | Event::HangUp { n, .. } => prop_assert!(*n < begun && !(ended.contains(n))
                    || matches!(event, Event::RequestWhole { .. }), "{:?}", event),
                Event::AnswerEnd { n, .. } => prop_assert!(*n < begun && ended.insert(*n), "{:?}", event),
                Event::Judged { .. } | Event::Unread(_) | Event::Lost { .. } | Event::Regained { .. } => {}
            }
        }
    }

    #[test]
    fn any_bytes_are_borne(
        calls in proptest::collection::vec((any::<bool>(), proptest::collection::vec(any::<u8>(), 0..60)), 0..20),
        joined in any::<bool>(),
    ) {
        let mut session = Session::new(if joined { Decoder::joined() } else { Decoder::at_start() });
        for (sent, bytes) in calls {
            session.step(&Step::Bytes(if sent { Sent } else { Received }, bytes));
        }
        let begun = session.events.iter().any(|e| matches!(e, Event::RequestBegun { .. }));
        prop_assert!(!begun);
    }
}
