//! Requests and answers in every shape that a port must bear, and what is missing of them.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod http_support;

use http_support::*;
use roomtrace::event::Direction::{Received, Sent};
use roomtrace::http::event::{Event, NotSeen, Rooms, Said, Unread, WhereSeen};
use roomtrace::http::{Decoder, Ending, HEAD_MAX, PIPELINED_MAX, ROOMS_MAX, WINDOW};

/// What one whole request with this body says of its rooms.
fn rooms_of(body: &str) -> Rooms {
    let (events, _) = run(&[ask(post("/generate", body))]);
    works(&events).remove(0).rooms
}

fn with_room(value: &str) -> Rooms {
    rooms_of(&format!(r#"{{"rid":"r","bootstrap_room":{value},"text":"t"}}"#))
}

fn one(room: u64) -> Rooms {
    named(&[room], WhereSeen::Whole)
}

#[test]
fn a_room_is_a_number_in_any_of_its_spellings() {
    assert_eq!(with_room("5123456789012345678"), one(ROOM));
    assert_eq!(with_room("\"5123456789012345678\""), one(ROOM));
    assert_eq!(with_room("18446744073709551615"), one(u64::MAX));
    assert_eq!(with_room("42.0"), one(42));
    assert_eq!(with_room("4.2e1"), one(42));
    assert_eq!(with_room("9007199254740991.0"), one((1 << 53) - 1));
    assert_eq!(with_room("[7]"), one(7));
    assert_eq!(
        with_room(" [ 7 , null , \"8\", 0 ] "),
        Rooms::Named {
            rooms: vec![Some(7), None, Some(8), None],
            complete: true,
            maybe_more: false,
            seen: WhereSeen::Whole
        }
    );
    for none in ["null", "[]", "[null,null]"] {
        assert_eq!(with_room(none), Rooms::None, "{none}");
    }
    for wrong in [
        "-1",
        "1.5",
        "9007199254740993.0",
        "1e30",
        "18446744073709551616",
        "true",
        "{\"a\":7}",
        "\"\"",
        "\"a\"",
        "\"-7\"",
        "\"\\u0037\"",
        "NaN",
        "[[7]]",
        "[{\"bootstrap_room\":7}]",
        "1111111111111111111111111111111111111111111111111",
    ] {
        assert_eq!(with_room(wrong), Rooms::NotSeen(NotSeen::NotANumber), "{wrong}");
    }
    assert_eq!(rooms_of(r#"{"rid":"r"}"#), Rooms::None);
    assert_eq!(rooms_of(""), Rooms::None);
}

#[test]
fn only_the_outermost_key_names_a_room() {
    for body in [
        r#"{"text":"a \"bootstrap_room\": 7, b"}"#,
        r#"{"text":"\\\",\"bootstrap_room\":7,\"x\":\""}"#,
        r#"{"custom_params":{"bootstrap_room":7}}"#,
        r#"{"a":[{"bootstrap_room":7}],"b":["bootstrap_room",7]}"#,
        r#"{"bootstrap_rooms":7,"bootstrap_roo":7,"Bootstrap_room":7}"#,
    ] {
        assert_eq!(rooms_of(body), Rooms::None, "{body}");
    }
    assert_eq!(rooms_of(r#"{"bootstrap_room":7,"text":"","bootstrap_room":8}"#), one(8));
    assert_eq!(rooms_of(r#"{"bootstrap\u005froom":7}"#), Rooms::NotSeen(NotSeen::OddKey));
    assert_eq!(rooms_of(r#"{"bootstrap_room":7"#), Rooms::NotSeen(NotSeen::NotJson));
    assert_eq!(rooms_of(r#"{"bootstrap_room":7}}"#), Rooms::NotSeen(NotSeen::NotJson));
    assert_eq!(rooms_of("bootstrap_room=7"), Rooms::NotSeen(NotSeen::NotJson));
}

#[test]
fn what_is_no_room_is_ignored_and_counted() {
    let bodies = [
        r#"{"bootstrap_room":0}"#,
        r#"{"bootstrap_room":[0,0]}"#,
        r#"{"bootstrap_host":"2.2.2.2","bootstrap_room":5}"#,
        r#"{"bootstrap_room":[5,6],"bootstrap_host":["2.2.2.2","2.2.2.2"]}"#,
        r#"{"rid":"HEALTH_CHECK_0a1b","bootstrap_room":5}"#,
    ];
    let mut steps = Vec::new();
    for body in bodies {
        steps.extend([ask(post("/generate", body)), answer(OK)]);
    }
    let (events, counters) = run(&steps);
    assert!(works(&events).iter().all(|w| matches!(w.rooms, Rooms::Ignored(_))), "{events:?}");
    let counts: Vec<_> = counters.ignored().map(|(why, n)| (why.label(), n)).collect();
    assert_eq!(counts, [("fake_host", 2), ("health_check", 1), ("zero", 2)]);
    assert_eq!(counters.rooms, 0);
}

#[test]
fn a_batch_keeps_rooms_and_ids_together() {
    let (events, _) = run(&[ask(post("/generate", r#"{"rid":["a","b","c"],"bootstrap_room":[7,null,9]}"#))]);
    let work = works(&events).remove(0);
    assert_eq!(work.pairs().collect::<Vec<_>>(), [(7, Some("a")), (9, Some("c"))]);
    // One number for a batch counts up.
    let (events, _) = run(&[ask(post("/generate", r#"{"bootstrap_room":7,"rid":["a","b"]}"#))]);
    let work = works(&events).remove(0);
    assert_eq!(work.pairs().collect::<Vec<_>>(), [(7, Some("a")), (8, Some("b"))]);
    // So it does for prompts that come without ids (`io_struct.py`, `_normalize_bootstrap_params`); tokens are one prompt.
    for (body, count, all) in [
        (r#"{"text":["a","b\"]","c"],"bootstrap_room":7}"#, 3, true),
        (r#"{"bootstrap_room":7,"input_ids":[[1,2],[3]]}"#, 2, true),
        (r#"{"bootstrap_room":7,"prompt":["a",[1],"c","d"]}"#, 4, true),
        (r#"{"bootstrap_room":7,"prompt":[1,2,3]}"#, 1, true),
        (r#"{"bootstrap_room":7,"input_ids":[1,2,3],"text":null}"#, 1, true),
        (r#"{"bootstrap_room":7,"input_ids":[[1],[2]],"text":null}"#, 2, true),
        (r#"{"bootstrap_room":7,"text":"[1,2]"}"#, 1, true),
        (r#"{"bootstrap_room":7,"input_embeds":[[[0.5],[1]],[[2]]]}"#, 2, true),
        (r#"{"bootstrap_room":7,"text":["a","b"],"rid":["r","s"]}"#, 2, true),
        // Each prompt several times.
        (r#"{"bootstrap_room":7,"text":"a","sampling_params":{"n":4}}"#, 1, false),
        (r#"{"bootstrap_room":7,"prompt":"a","n":2}"#, 1, false),
        (r#"{"bootstrap_room":7,"text":"a","sampling_params":{"n":1}}"#, 1, true),
        // Not the engine's `n`, nor a room of its own.
        (r#"{"bootstrap_room":7,"text":"a","custom":{"bootstrap_room":9,"rid":"x"}}"#, 1, true),
    ] {
        let (events, _) = run(&[ask(post("/generate", body))]);
        let Rooms::Named { rooms, complete, .. } = &works(&events)[0].rooms else {
            panic!("{body}: {events:?}")
        };
        let counted: Vec<_> = (0..count).map(|i| Some(7 + i)).collect();
        assert_eq!((&rooms[..], *complete), (&counted[..], all), "{body}");
    }
    // A list of prompts that is cut has more of them than can be said; a long text, or tokens, are one all the same.
    let long = "x".repeat(9000);
    let tokens = vec!["77"; 4000].join(",");
    for (body, all) in [
        (format!(r#"{{"text":["a","{long}","b"],"bootstrap_room":7}}"#), false),
        (format!(r#"{{"text":["{long}"],"bootstrap_room":7}}"#), false),
        (format!(r#"{{"text":"{long}","bootstrap_room":7}}"#), true),
        (format!(r#"{{"input_ids":[{tokens}],"bootstrap_room":7}}"#), true),
        (format!(r#"{{"input_ids":[[{tokens}],[1]],"bootstrap_room":7}}"#), false),
    ] {
        let (events, _) = run(&long_request(&body));
        let Rooms::Named { rooms, complete, .. } = &works(&events)[0].rooms else { panic!("{events:?}") };
        assert_eq!((&rooms[..], *complete), (&[Some(7)][..], all), "{}", &body[..40]);
    }
    // Of a list cut by a hole, what stands before it.
    let text = "x".repeat(9000);
    for body in [
        format!(r#"{{"bootstrap_room":[7,8,{:>2000}9],"text":"{text}"}}"#, ""),
        format!(r#"{{"bootstrap_room":7,"rid":["a","b","{text}"]}}"#),
    ] {
        let (events, _) = run(&long_request(&body));
        let Rooms::Named { rooms, complete: false, seen: WhereSeen::Head, .. } = &works(&events)[0].rooms
        else {
            panic!("{events:?}")
        };
        assert_eq!(rooms[..], [Some(7), Some(8)]);
    }
    // One of them goes to a fake host.
    let body = r#"{"bootstrap_host":["2.2.2.2","10.0.0.1"],"bootstrap_room":[7,8]}"#;
    assert_eq!(works(&run(&[ask(post("/generate", body))]).0)[0].pairs().collect::<Vec<_>>(), [(8, None)]);
}

/// What makes several rooms of one number can stand in the missing middle.
#[test]
fn a_number_is_one_room_only_where_all_that_makes_more_was_seen() {
    let x = "x".repeat(6000);
    let chat = "/v1/chat/completions";
    let tail = r#""bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":7}"#;
    let few = r#""sampling_params":{"temperature":0,"max_new_tokens":8}"#;
    for (path, head, maybe_more) in [
        // As clients, the router and `mini_lb` write it: the prompt first, or tokens; nothing is left open.
        ("/generate", format!(r#""text":"{x}",{few},"stream":true,"#), false),
        ("/generate", format!(r#""sampling_params":null,"text":"{x}","#), false),
        ("/generate", format!(r#"{few},"input_ids":[{}],"#, vec!["77"; 3000].join(",")), false),
        ("/generate", format!(r#"{few},"text":"a","image_data":"{x}","#), false),
        ("/v1/completions", format!(r#""model":"m","prompt":"{x}","n":1,"stream":true,"#), false),
        (chat, format!(r#""messages":[{{"role":"user","content":"{x}"}}],"n":1,"#), false),
        (chat, format!(r#""n":null,"messages":[{{"role":"user","content":"{x}"}}],"#), false),
        // `n` or what it stands in, or the list of prompts, is not in sight.
        (chat, format!(r#""model":"m","messages":[{{"content":"{x}"}}],"#), true),
        (
            chat,
            format!(r#""messages":[{{"content":"{x}"}}],"n":3,"response_format":{{"json_schema":"{x}"}},"#),
            true,
        ),
        (chat, format!(r#""messages":[{{"content":"{x}"}}],"metadata":{{"n":1}},"#), true),
        ("/v1/completions", format!(r#""prompt":"{x}","stream":true,"#), true),
        ("/generate", format!(r#"{few},"image_data":"{x}","text":["a","b"],"lora_path":"{x}","#), true),
        ("/generate", format!(r#""text":"{x}","sampling_params":{{"n":3,"json_schema":"{x}"}},"#), true),
        ("/generate", format!(r#""text":"a","sampling_params":{{"json_schema":"{x}","n":1}},"#), true),
        ("/generate", format!(r#""text":"a","sampling_params":[{{"n":1}}],"image_data":"{x}","#), true),
        ("/v1/messages", format!(r#""messages":[{{"content":"{x}"}}],"n":1,"#), true),
    ] {
        let body = format!("{{{head}{tail}");
        let (events, _) = run(&capped(&[ask(post(path, &body))], 1024));
        let expected =
            Rooms::Named { rooms: vec![Some(7)], complete: true, maybe_more, seen: WhereSeen::Tail };
        assert_eq!(works(&events)[0].rooms, expected, "{path} {}", &body[..60]);
    }
    // A list of prompts of which the head has not even the bracket.
    for cut in 0..4 {
        let before = r#"{"sampling_params":{},"text":"#;
        let pad = " ".repeat(600 + cut - before.len());
        let body = format!(r#"{{{pad}{}["a","{x}"],{tail}"#, &before[1..]);
        let head = post("/generate", &body).len() - body.len();
        let (events, _) = run(&capped(&[ask(post("/generate", &body))], head + 602));
        let Rooms::Named { complete, maybe_more, .. } = works(&events)[0].rooms else { panic!("{events:?}") };
        assert!(!complete || maybe_more, "{cut}");
    }
    // Seen whole: its own parameters for each prompt of a list are not read.
    for (body, maybe_more) in [
        (r#"{"text":"a","sampling_params":[{"n":3}],"bootstrap_room":7}"#, true),
        (r#"{"text":"a","sampling_params":{"n":1},"bootstrap_room":7}"#, false),
        (r#"{"text":"a","bootstrap_room":7}"#, false),
    ] {
        let (events, _) = run(&[ask(post("/generate", body))]);
        let expected =
            Rooms::Named { rooms: vec![Some(7)], complete: true, maybe_more, seen: WhereSeen::Whole };
        assert_eq!(works(&events)[0].rooms, expected, "{body}");
    }
    // The router lists as many rooms as there are answers; the engine repeats a shorter list.
    for (body, all) in [
        (r#"{"messages":[],"n":2,"bootstrap_room":[7,8]}"#, true),
        (r#"{"messages":[],"n":3,"bootstrap_room":[7,8]}"#, false),
    ] {
        let (events, _) = run(&[ask(post(chat, body))]);
        let Rooms::Named { complete, maybe_more: false, .. } = works(&events)[0].rooms else {
            panic!("{body}")
        };
        assert_eq!(complete, all, "{body}");
    }
}

#[test]
fn a_batch_is_bounded_and_counts_the_rest() {
    let list: Vec<String> = (1..=ROOMS_MAX + 5).map(|n| n.to_string()).collect();
    let body = format!(r#"{{"bootstrap_room":[{}]}}"#, list.join(","));
    let (events, counters) = run(&[ask(post("/generate", &body))]);
    let Rooms::Named { rooms, complete: false, .. } = &works(&events)[0].rooms else { panic!("{events:?}") };
    assert_eq!(rooms.len(), ROOMS_MAX);
    assert_eq!(counters.rooms_over_limit, 5);
}

#[test]
fn an_id_that_is_no_id_is_not_kept() {
    let long = "x".repeat(200);
    for rid in ["with space", "\u{fc}ml\u{e4}ut", "a\\u0062", &long] {
        let (events, counters) =
            run(&[ask(post("/generate", &format!(r#"{{"rid":"{rid}","bootstrap_room":7}}"#)))]);
        let work = works(&events).remove(0);
        assert_eq!((work.rids, work.rooms), (vec![None], one(7)), "{rid}");
        assert_eq!(counters.rids_dropped, 1);
    }
}

/// A request of which the kernel ships head and tail of each receive.
fn long_request(body: &str) -> Vec<Step> {
    capped(&[ask(post("/generate", body))], 1024)
}

#[test]
fn the_router_appends_the_room_to_megabytes() {
    let text = "say \\\"bootstrap_room\\\": 7 ".repeat(100_000);
    let body = format!(
        r#"{{"text":"{text}","sampling_params":{{}},"rid":"r","bootstrap_host":"10.0.0.1","bootstrap_port":8998,"bootstrap_room":{ROOM}}}"#
    );
    let (events, _) = run(&long_request(&body));
    assert_eq!(works(&events)[0].rooms, named(&[ROOM], WhereSeen::Tail));
    assert_eq!(works(&events)[0].rids, [Some("r".into())]);
    // In several receives, the last one a few bytes that end inside the number.
    let bytes = post("/generate", &body);
    let (first, last) = bytes.split_at(bytes.len() - 7);
    let calls: Vec<Step> = first.chunks(256_000).chain([last]).map(ask).collect();
    let (events, _) = run(&capped(&calls, 1024));
    assert_eq!(works(&events)[0].rooms, named(&[ROOM], WhereSeen::Tail));
}

#[test]
fn the_room_can_stand_at_the_head() {
    let body = format!(
        r#"{{"bootstrap_room":{ROOM},"rid":"r","sampling_params":{{}},"text":"{}"}}"#,
        "x".repeat(100_000)
    );
    let (events, _) = run(&long_request(&body));
    assert_eq!(works(&events)[0].rooms, named(&[ROOM], WhereSeen::Head));
}

#[test]
fn a_room_in_the_middle_is_not_seen() {
    let x = "x".repeat(100_000);
    let body = format!(r#"{{"a":"{x}","bootstrap_room":{ROOM},"b":"{x}"}}"#);
    let (events, counters) = run(&long_request(&body));
    assert_eq!(works(&events)[0].rooms, Rooms::NotSeen(NotSeen::Hole));
    assert_eq!(counters.not_seen().map(|(_, n)| n).collect::<Vec<_>>(), [1, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn text_cut_by_a_hole_never_names_a_room() {
    // Whatever byte of this text the hole ends at, quotes and backslashes come in every phase.
    let text = r#"{\"bootstrap_room\": 7}\\\", \\\\\"bootstrap_room\\\": 7, \"a\": \"\\"#;
    let body = format!(r#"{{"x":"","text":"{text}","n":{{"bootstrap_room":7}},"list":["{text}",7]}}"#);
    let bytes = post("/generate", &body);
    let head = bytes.len() - body.len();
    for from in head..bytes.len() {
        for to in from + 1..=bytes.len() {
            let steps = [ask(&bytes[..from]), ask_missing(to - from), ask_tail(&bytes[to..])];
            let (events, _) = run(&steps);
            let rooms = works(&events).remove(0).rooms;
            assert!(matches!(rooms, Rooms::NotSeen(_)), "{from}..{to}: {rooms:?}");
        }
    }
}

#[test]
fn bytes_on_both_sides_of_a_hole_are_never_joined() {
    // Joined over the second hole, this ends in `"bootstrap_room":5}`.
    let body = r#"{"a":"xx","n":{"y":1,"bootstrap_room":1},"z":5}"#;
    let bytes = post("/generate", body);
    let head = bytes.len() - body.len();
    for a in head + 7..bytes.len() {
        for b in a + 1..bytes.len() {
            for c in b + 1..bytes.len() {
                let first = head + 6;
                let steps = [
                    ask(&bytes[..first]),
                    ask_missing(a - first),
                    ask_tail(&bytes[a..b]),
                    ask_missing(c - b),
                    ask_tail(&bytes[c..]),
                ];
                let rooms = works(&run(&steps).0).remove(0).rooms;
                assert_eq!(rooms, Rooms::NotSeen(NotSeen::Hole), "{a} {b} {c}");
            }
        }
    }
}

#[test]
fn chunked_requests_are_followed_over_holes_inside_a_chunk() {
    let body = format!(r#"{{"sampling_params":{{}},"text":"{}","bootstrap_room":{ROOM}}}"#, "x".repeat(9000));
    let head = "POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    let (a, b) = body.split_at(9033);
    let bytes =
        format!("{head}{:x};ext=1\r\n{a}\r\n{:X}\r\n{b}\r\n0\r\nX-Trailer: 1\r\n\r\n", a.len(), b.len());
    let steps = [ask(&bytes), answer(OK), ask(post("/generate", r#"{"bootstrap_room":9}"#))];
    let (events, _) = run(&steps);
    assert_eq!(works(&events)[0].rooms, one(ROOM));
    assert_eq!(works(&events)[1].rooms, one(9));
    let (events, _) = run(&capped(&steps, 512));
    assert_eq!(works(&events)[0].rooms, named(&[ROOM], WhereSeen::Tail));
    assert_eq!(works(&events)[1].rooms, one(9));
}

#[test]
fn a_hole_over_the_border_of_a_chunk_loses_the_place_until_the_next_request() {
    let head = "POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
    let steps = [
        ask(format!("{head}c\r\n{{\"rid\":\"r\", ")),
        ask_missing(100),
        ask_tail(r#""bootstrap_room":7}"#),
        // Inside the body, by all one can know: the request before is not answered.
        ask(post("/generate", r#"{"bootstrap_room":8}"#)),
        answer(OK),
        ask(post("/generate", r#"{"bootstrap_room":9}"#)),
        answer(OK),
    ];
    let (events, counters) = run(&steps);
    assert_eq!(
        brief(&events),
        [
            "requests Received from_start true",
            "0 begun Post Generate",
            "0 whole cut NotSeen(Hole) rid r",
            "lost Received hole_in_chunks",
            "0 answer 200",
            "0 first byte",
            "0 end ContentLength Outcome(Unknown)",
            "regained Received",
            "1 begun Post Generate",
            "1 whole Whole 9 rid ",
            "1 answer 200",
            "1 first byte",
            "1 end ContentLength Outcome(Unknown)",
        ]
    );
    assert_eq!(counters.lost().map(|(_, n)| n).collect::<Vec<_>>(), [0, 1, 0, 0]);
    assert!(counters.lost_bytes > 0);
}

#[test]
fn a_head_longer_than_what_is_captured_is_a_request_all_the_same() {
    let bytes = format!("POST /generate HTTP/1.1\r\nHost: a\r\nAuthorization: {}\r\n", "x".repeat(3000));
    let steps =
        [ask(&bytes[..1024]), ask_missing(9000), ask_tail("}"), answer(OK), ask(post("/generate", "{}"))];
    let (events, _) = run(&steps);
    assert_eq!(
        &brief(&events)[1..4],
        ["0 begun Post Generate", "0 whole cut NotSeen(HeadCut) rid ", "lost Received hole_at_head"]
    );
    assert!(brief(&events).contains(&"1 whole None rid ".to_owned()));
}

#[test]
fn requests_can_be_pipelined() {
    let both =
        [post("/generate", r#"{"bootstrap_room":7}"#), post("/generate", r#"{"bootstrap_room":8}"#)].concat();
    let (events, _) = run(&[ask(both), answer([OK, OK].concat())]);
    let ends = brief(&events).into_iter().filter(|l| l.contains("end")).collect::<Vec<_>>();
    assert_eq!(ends, ["0 end ContentLength Outcome(Unknown)", "1 end ContentLength Outcome(Unknown)"]);
    assert_eq!(works(&events).len(), 2);
    let many = post("/generate", "{}").repeat(PIPELINED_MAX + 1);
    let (events, _) = run(&[ask(many)]);
    assert_eq!(events.last(), Some(&Event::Unread(Unread::TooManyPipelined)));
}

#[test]
fn lengths_that_can_be_read_in_two_ways_are_never_read() {
    for fields in [
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        "Content-Length: 5\r\nContent-Length: 6\r\n",
        "Content-Length: 5\r\nContent-Length: 5\r\n",
        "Content-Length: 5, 5\r\n",
        "Content-Length: +5\r\n",
        "Content-Length: -5\r\n",
        "Content-Length: 0x5\r\n",
        "Content-Length: \r\n",
        "Content-Length: 9223372036854775808\r\n",
        "Content-Length: 99999999999999999999\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: xchunked\r\n",
        "Content-Length: 5\n",
    ] {
        let bytes = format!("POST /generate HTTP/1.1\r\nHost: a\r\n{fields}\r\n{{\"bootstrap_room\":7}}");
        let (events, counters) = run(&[ask(&bytes), ask(post("/generate", r#"{"bootstrap_room":8}"#))]);
        assert_eq!(events, [Event::Unread(Unread::AmbiguousLength)], "{fields:?}");
        assert_eq!(counters.unread().map(|(_, n)| n).sum::<u64>(), 1);
        let bytes = format!("HTTP/1.1 200 OK\r\n{fields}\r\n{{}}");
        let (events, _) = run(&[ask(post("/generate", "{}")), answer(bytes)]);
        assert_eq!(events.last(), Some(&Event::Unread(Unread::AmbiguousLength)), "{fields:?}");
    }
    let bytes = "POST /generate HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n";
    assert_eq!(run(&[ask(bytes)]).0, [Event::Unread(Unread::AmbiguousLength)]);
    for chunk in
        ["5\nabcde\r\n", "5\r\nabcdeXX", "5\r\nabcde\n", "x\r\n", "-1\r\n", "\r\n", "1000000000000000\r\n"]
    {
        let bytes =
            format!("POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n{chunk}");
        let (events, _) = run(&[ask(bytes)]);
        assert!(matches!(events.last(), Some(Event::Unread(_))), "{chunk:?}");
    }
}

#[test]
fn endless_heads_are_given_up() {
    let mut session = Session::new(Decoder::at_start());
    session.step(&ask("GET / HTTP/1.1\r\nX: "));
    for _ in 0..10_000 {
        session.step(&ask("yyyyyyyyyy"));
        assert!(session.decoder.held() <= 2 * HEAD_MAX);
    }
    assert_eq!(session.events, [Event::Unread(Unread::EndlessHead)]);
    assert!(session.decoder.is_dead());
    let fields = "X: 1\r\n".repeat(200);
    let (events, _) = run(&[ask(format!("GET / HTTP/1.1\r\n{fields}\r\n"))]);
    assert_eq!(events, [Event::Unread(Unread::EndlessHead)]);
    for endless in ["0\r\nX: ", "1;"] {
        let head = "POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n";
        let (events, _) = run(&[ask(format!("{head}{endless}{}", "z".repeat(20_000)))]);
        assert_eq!(events.last(), Some(&Event::Unread(Unread::EndlessHead)));
    }
}

#[test]
fn what_is_not_http_is_named() {
    for (bytes, why) in [
        (&b"\xff\0\0\0\0\0\0\0\x01\x7f"[..], Unread::NotHttp),
        (b"\x16\x03\x01\x02\0\x01", Unread::Tls),
        (b"SSH-2.0-OpenSSH_9.2\r\n", Unread::NotHttp),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", Unread::Http2),
        (b"\0\0\0\0", Unread::NotHttp),
        (b"GET / HTTP/3.0\r\n\r\n", Unread::Malformed),
        (b"GET /\r\n\r\n", Unread::NotHttp),
        (b"a very long method that is none at all", Unread::NotHttp),
    ] {
        let (events, _) = run(&[ask(bytes), ask("\r\n\r\n")]);
        assert_eq!(events, [Event::Unread(why)], "{bytes:?}");
    }
}

#[test]
fn answers_without_a_body() {
    let get = "GET /health HTTP/1.1\r\nHost: a\r\n\r\n";
    let steps = [
        ask(get.replace("GET", "HEAD")),
        answer("HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n"),
        ask(get),
        answer("HTTP/1.1 204 No Content\r\n\r\n"),
        ask(get),
        answer("HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n"),
        ask(get),
        answer("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"),
        ask(get),
        answer("HTTP/1.1 103 Early Hints\r\n\r\n"),
        answer(OK),
    ];
    let (events, _) = run(&steps);
    let ends: Vec<_> = brief(&events).into_iter().filter(|l| l.contains(" end ")).collect();
    assert_eq!(
        ends,
        [
            "0 end NoBody Nothing",
            "1 end NoBody Nothing",
            "2 end NoBody Nothing",
            "3 end ContentLength Nothing",
            "4 end ContentLength Nothing"
        ]
    );
}

#[test]
fn an_answer_can_end_with_its_connection() {
    let steps = [
        ask(post("/generate", "{}")),
        answer("HTTP/1.0 200 OK\r\n\r\n{\"meta_info\":{\"finish_reason\":{\"type\":\"length\"}}}"),
        server_fin(),
    ];
    let (events, _) = run(&steps);
    assert_eq!(brief(&events).last().unwrap(), "0 end Close Outcome(Finished)");
    // A reset, or the client's end, does not complete it.
    for ending in [Ending::Reset(Some(Sent)), Ending::Fin(Received)] {
        let (events, _) = run(&[steps[0].clone(), steps[1].clone(), Step::End(ending)]);
        assert!(brief(&events).last().unwrap().contains("0 hang-up"));
    }
}

#[test]
fn a_hang_up_says_how_far_it_had_come() {
    let whole = post("/generate", r#"{"bootstrap_room":7}"#);
    let part = &whole[..whole.len() - 3];
    let begun = "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{";
    for (steps, last) in [
        (vec![ask(part), client_fin()], "0 hang-up Client reset false whole false answered false"),
        (vec![ask(&whole), client_fin()], "0 hang-up Client reset false whole true answered false"),
        (
            vec![ask(&whole), answer(begun), client_fin()],
            "0 hang-up Client reset false whole true answered true",
        ),
        (vec![ask(&whole), server_fin()], "0 hang-up Server reset false whole true answered false"),
        (
            vec![ask(&whole), Step::End(Ending::Reset(None))],
            "0 hang-up Unknown reset true whole true answered false",
        ),
        (
            vec![ask(&whole), client_fin(), server_fin()],
            "0 hang-up Client reset false whole true answered false",
        ),
    ] {
        let (events, _) = run(&steps);
        assert_eq!(brief(&events).last().unwrap(), last);
    }
    // Between requests it is none.
    let (events, _) = run(&[ask(&whole), answer(OK), client_fin(), server_fin()]);
    assert!(!brief(&events).iter().any(|l| l.contains("hang-up")));
    // A half-closed connection can still be answered.
    let (events, _) = run(&[ask(&whole), client_fin(), answer(OK)]);
    assert_eq!(brief(&events).last().unwrap(), "0 end ContentLength Outcome(Unknown)");
}

const STREAM: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
                      transfer-encoding: chunked\r\n\r\n";

#[test]
fn a_muted_answer_ends_with_its_last_chunk_or_with_the_next_request() {
    let request = post("/generate", r#"{"bootstrap_room":7,"stream":true}"#);
    let begun = [
        "requests Received from_start true",
        "0 begun Post Generate",
        "0 whole Whole 7 rid ",
        "0 answer 200 streamed",
        "0 first byte",
    ];
    let muted = [ask(&request), answer(STREAM), answer_missing(5000)];
    let told = |more: &[Step]| {
        let (events, _) = run(&[&muted[..], more].concat());
        assert_eq!(&brief(&events)[..5], begun);
        brief(&events)[5..].to_vec()
    };
    assert_eq!(told(&[answer("0\r\n\r\n")]), ["0 end LastChunk Outcome(Unknown)"]);
    let last = "2f\r\ndata: {\"meta_info\":{\"finish_reason\":\"abort\"}}\n\n\r\n0\r\n\r\n";
    assert_eq!(told(&[answer(last)]), ["0 end LastChunk Outcome(Aborted)"]);
    // What follows is in step again.
    let next = [answer("0\r\n\r\n"), ask(&request), answer(OK)];
    assert_eq!(told(&next).last().unwrap(), "1 end ContentLength Outcome(Unknown)");
    // Nothing at all until the next request.
    let next = [ask(&request), answer(OK)];
    assert_eq!(
        told(&next),
        [
            "0 end Next Outcome(Unknown)",
            "1 begun Post Generate",
            "1 whole Whole 7 rid ",
            "regained Sent",
            "1 answer 200",
            "1 first byte",
            "1 end ContentLength Outcome(Unknown)"
        ]
    );
    // Whether it was complete when the connection ended is not known.
    assert_eq!(told(&[client_fin()]), ["0 end Unseen Outcome(Unknown)"]);
    // Generated text that looks like an end is none.
    assert_eq!(told(&[answer("20\r\ndata: {\"text\":\"\\r\\n0\\r\\n\\r\\n"), answer_missing(3)]).len(), 0);
}

#[test]
fn a_muted_answer_of_known_length_ends_where_it_must() {
    let steps = [
        ask(post("/generate", "{}")),
        answer("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"),
        answer_missing(900),
        answer(format!("{:>100}", r#","meta_info":{"id":"r","finish_reason":{"type":"stop","matched":2}}}"#)),
        ask(post("/generate", "{}")),
        answer("HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"),
        answer_missing(1000),
    ];
    let (events, _) = run(&steps);
    let ends: Vec<_> = brief(&events).into_iter().filter(|l| l.contains(" end ")).collect();
    assert_eq!(ends, ["0 end ContentLength Outcome(Finished)", "1 end ContentLength Outcome(Unknown)"]);
}

#[test]
fn a_final_answer_before_the_body_leaves_its_coming_open() {
    let head = "POST /generate HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\nContent-Length: 20\r\n\r\n";
    let body = r#"{"bootstrap_room":7}"#;
    let refused = "HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n";
    let next = ask(post("/generate", r#"{"bootstrap_room":9}"#));
    for body in [None, Some(ask(body))] {
        let steps: Vec<_> = [Some(ask(head)), Some(answer(refused)), body, Some(next.clone())]
            .into_iter()
            .flatten()
            .collect();
        let (events, _) = run(&steps);
        assert!(brief(&events).contains(&"lost Received not_continued".to_owned()), "{events:?}");
        assert_eq!(brief(&events).last().unwrap(), "1 whole Whole 9 rid ");
    }
}

#[test]
fn an_answer_that_is_delivered_before_its_request_is_its_own() {
    let (events, counters) =
        run(&[answer(OK), ask(post("/generate", r#"{"bootstrap_room":7}"#)), answer(OK)]);
    assert_eq!(
        &brief(&events)[1..6],
        [
            "0 begun Post Generate",
            "0 whole Whole 7 rid ",
            "0 answer 200",
            "0 first byte",
            "0 end ContentLength Outcome(Unknown)"
        ]
    );
    assert_eq!(counters.answers_unasked, 2);
    // Not so if the request before may be among missing bytes.
    let steps = [
        ask(post("/generate", "{}")),
        answer(OK),
        answer(OK),
        ask_missing(50),
        ask(post("/generate", r#"{"bootstrap_room":7}"#)),
        client_fin(),
    ];
    let (events, _) = run(&steps);
    let told = brief(&events);
    assert!(!told.iter().any(|l| l == "1 answer 200"), "{told:?}");
}

#[test]
fn a_connection_joined_in_its_middle_is_read_from_its_next_request() {
    let mut session = Session::new(Decoder::joined());
    for step in [
        ask(r#"rest of a body "bootstrap_room":7}"#),
        answer(r#"{"text":"POST /generate HTTP/1.1\r\n"}"#),
        ask("POST /generate HTTP/1.1\\r\\n"),
        ask_missing(500),
        ask_tail(post("/generate", r#"{"bootstrap_room":8}"#)),
    ] {
        session.step(&step);
    }
    assert_eq!(session.events, []);
    assert!(session.counters.lost_bytes > 0);
    // In two calls.
    let bytes = post("/generate", r#"{"bootstrap_room":9}"#);
    session.step(&ask(&bytes[..30]));
    session.step(&ask(&bytes[30..]));
    session.step(&answer(&OK[..20]));
    session.step(&answer(&OK[20..]));
    assert_eq!(
        brief(&session.events),
        [
            "requests Received from_start false",
            "0 begun Post Generate",
            "0 whole Whole 9 rid ",
            "regained Sent",
            "0 answer 200",
            "0 first byte",
            "0 end ContentLength Outcome(Unknown)"
        ]
    );
    // A client that gives up while it waits has hung up.
    session.step(&ask(&bytes));
    session.step(&client_fin());
    assert_eq!(
        brief(&session.events).last().unwrap(),
        "1 hang-up Client reset false whole true answered false"
    );
}

#[test]
fn disorder_is_never_read_over() {
    let bytes = post("/generate", &format!(r#"{{"text":"{}","bootstrap_room":7}}"#, "x".repeat(100)));
    let (a, b) = bytes.split_at(150);
    let (events, _) = run(&[ask(a), Step::Disorder(Received), ask(b), answer(OK), ask(&bytes)]);
    assert_eq!(works(&events)[0].rooms, Rooms::NotSeen(NotSeen::Hole));
    assert_eq!(works(&events)[1].rooms, one(7));
}

#[test]
fn encoded_and_overridden_bodies_are_not_read() {
    for (field, why) in [
        ("Content-Encoding: gzip", NotSeen::Encoded),
        ("x-body-compressed: zstd", NotSeen::Encoded),
        ("X-Override-Bootstrap-Room: 9", NotSeen::HeaderOverride),
        ("Content-Type: multipart/form-data; boundary=x", NotSeen::NotJson),
    ] {
        let bytes = format!(
            "POST /generate HTTP/1.1\r\nHost: a\r\n{field}\r\nContent-Length: 20\r\n\r\n{{\"bootstrap_room\":7}}"
        );
        let (events, counters) = run(&[ask(bytes)]);
        assert_eq!(works(&events)[0].rooms, Rooms::NotSeen(why));
        assert_eq!(counters.not_seen().find(|(w, _)| *w == why).unwrap().1, 1);
    }
}

#[test]
fn an_upgraded_connection_is_left_alone() {
    let ask_for = "GET /ws HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
    let (events, _) =
        run(&[ask(ask_for), answer("HTTP/1.1 101 Switching Protocols\r\n\r\n"), ask("\x01\x02")]);
    assert_eq!(events.last(), Some(&Event::Unread(Unread::Upgraded)));
    let (events, _) =
        run(&[ask("CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n"), answer("HTTP/1.1 200 OK\r\n\r\n")]);
    assert_eq!(events.last(), Some(&Event::Unread(Unread::Upgraded)));
}

#[test]
fn control_calls_are_told_with_their_answer() {
    for (path, body, said) in [
        ("/pause_generation", "", "Pause(None)"),
        ("/pause_generation", r#"{"mode":"in_place"}"#, "Pause(Some(InPlace))"),
        ("/continue_generation", "{}", "Resume"),
        ("/update_weights_from_disk", r#"{"model_path":"/m"}"#, "UpdateWeights"),
        ("/begin_weight_update", "{}", "WeightsBegin"),
        ("/end_weight_update", "{}", "WeightsEnd"),
        ("/release_memory_occupation", "{}", "MemoryRelease"),
        ("/resume_memory_occupation", "{}", "MemoryResume"),
        ("/pd_role_switch", r#"{"new_role":"decode"}"#, "RoleSwitch(Some(Decode))"),
        ("/abort_request", r#"{"rid":"r","abort_all":true}"#, "Abort { rid: Some(\"r\"), all: Some(true) }"),
        ("http://engine:30000/abort_request?x=1", r#"{"rid":""}"#, "Abort { rid: Some(\"\"), all: None }"),
    ] {
        let (events, _) = run(&[ask(post(path, body)), answer(OK)]);
        assert_eq!(brief(&events)[2], format!("0 whole Control({said})"));
        assert_eq!(brief(&events)[3], "0 answer 200");
    }
}

#[test]
fn older_releases_register_with_other_fields() {
    let body = r#"{"role":"Prefill","tp_size":8,"dp_size":1,"rank_ip":"fd00::1","rank_port":"41207","engine_rank":3}"#;
    let put = String::from_utf8(post("/route", body)).unwrap().replace("POST", "PUT");
    let (events, _) = run(&[
        ask(put),
        answer(OK),
        ask("GET /route?engine_rank=3&target_dp_group=0 HTTP/1.1\r\nHost: a\r\n\r\n"),
    ]);
    let Event::RequestWhole { said: Said::RegisterRank(Some(rank)), .. } = &events[2] else {
        panic!("{events:?}")
    };
    assert_eq!((rank.tp_rank, rank.tp_size, rank.port), (Some(3), Some(8), Some(41207)));
    assert_eq!(rank.ip, Some("fd00::1".parse().unwrap()));
    let Event::RequestWhole { said: Said::Query(query), .. } = events.last().unwrap() else {
        panic!("{events:?}")
    };
    assert_eq!((query.tp_rank, query.dp_rank, query.cp_rank), (Some(3), Some(0), None));
    assert!(!query.asks_topology());
}

#[test]
fn no_byte_of_a_prompt_is_told_or_outlives_its_request() {
    const SECRET: &str = "XYZZY-SECRET";
    let text = format!("{SECRET} ").repeat(2000);
    let body = format!(r#"{{"{SECRET}":1,"text":"{text}","x":{{"{SECRET}":"{text}"}},"bootstrap_room":7}}"#);
    let reply =
        format!(r#"{{"text":"{text}","meta_info":{{"finish_reason":{{"type":"stop","t":"{SECRET}"}}}}}}"#);
    let reply = format!("HTTP/1.1 200 OK\r\nX-Y: {SECRET}\r\nContent-Length: {}\r\n\r\n{reply}", reply.len());
    for keep in [1 << 20, 1024] {
        let mut session = Session::new(Decoder::at_start());
        let bytes = post(&format!("/{SECRET}"), "{}");
        let mut steps = vec![ask(bytes), answer(OK), ask(post("/generate", &body)), answer(&reply)];
        steps = capped(&steps, keep);
        // Byte by byte, so that every state in between is looked at.
        for step in steps {
            match step {
                Step::Bytes(d, bytes) | Step::Tail(d, bytes) => {
                    for b in bytes.chunks(97) {
                        session.step(&Step::Bytes(d, b.to_vec()));
                        assert!(session.decoder.held() < 2 * WINDOW + 2048, "{}", session.decoder.held());
                    }
                }
                step => session.step(&step),
            }
        }
        assert_eq!(session.decoder.open(), 0);
        let (told, state) = (format!("{:?}", session.events), format!("{:?}", session.decoder));
        let as_bytes: Vec<String> = SECRET.bytes().map(|b| b.to_string()).collect();
        for place in [told, state, format!("{:?}", session.counters)] {
            assert!(!place.contains(SECRET) && !place.contains(&as_bytes.join(", ")), "{place}");
        }
        assert!(brief(&session.events).iter().any(|l| l.starts_with("1 whole ") && l.contains(" 7 ")));
    }
}

#[test]
fn a_thousand_idle_connections_hold_next_to_nothing() {
    let mut held = 0;
    for _ in 0..1000 {
        let mut session = Session::new(Decoder::at_start());
        for _ in 0..3 {
            session.step(&ask(post("/generate", r#"{"rid":"r","bootstrap_room":7}"#)));
            session.step(&answer(OK));
        }
        held += session.decoder.held();
    }
    assert!(held < 1000 * 512, "{held}");
}
