//! What real HTTP clients and servers say (`fixtures/http/record.py`), whole and as the kernel ships it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod http_support;

use http_support::{ROOM, brief, capped, recorded, run};
use roomtrace::http::event::{Event, RankRegistration, Said};

/// One exchange of a generation as it should be told.
fn exchange(n: u32, seen: &str, rid: &str, answer: &str, end: &str) -> Vec<String> {
    let mut lines = vec![
        format!("{n} begun Post Generate"),
        format!("{n} whole {seen} {ROOM} rid {rid}"),
        format!("{n} answer {answer}"),
        format!("{n} first byte"),
        format!("{n} end {end}"),
    ];
    if n == 0 {
        lines.insert(0, "requests Received from_start true".into());
    }
    lines
}

fn lines(text: &[&str]) -> Vec<String> {
    text.iter().map(|l| (*l).to_owned()).collect()
}

const JSON: &str = "ContentLength Outcome(Finished)";

#[test]
fn python_http_client_keeps_its_connection_to_uvicorn_with_h11() {
    let (events, counters) = run(&recorded("http_client_kept_alive_h11"));
    let mut expected: Vec<_> =
        (0..3).flat_map(|n| exchange(n, "Whole", &format!("keep-{n}"), "200", JSON)).collect();
    expected.extend(lines(&[
        "3 begun Head Health",
        "3 whole Nothing",
        "3 answer 200",
        "3 end NoBody Nothing",
    ]));
    assert_eq!(brief(&events), expected);
    assert_eq!((counters.requests, counters.health_checks, counters.rooms), (4, 1, 3));
}

#[test]
fn requests_sends_everything_an_engine_takes() {
    for (keep, long) in [(1 << 20, "Whole"), (1024, "Tail")] {
        let (events, counters) = run(&capped(&recorded("requests_httptools"), keep));
        let mut expected = exchange(0, long, "long", "200", JSON);
        expected.extend(exchange(1, "Whole", "chunked", "200", "ContentLength Outcome(Aborted)"));
        expected.extend(exchange(2, "Whole", "0a1b2c", "500", "ContentLength Outcome(Error)"));
        let batch = format!("3 whole Whole {ROOM},{} rid b-0,b-1", ROOM + 1);
        expected.extend(lines(&["3 begun Post Generate", &batch, "3 answer 200", "3 first byte"]));
        expected.push(format!("3 end {JSON}"));
        let control = [
            ("Pause", "Pause(Some(Retract))"),
            ("Resume", "Resume"),
            ("Abort", "Abort { rid: Some(\"long\"), all: Some(false) }"),
        ];
        for (n, (call, said)) in (4..).zip(control) {
            expected.extend([
                format!("{n} begun Post Control({call})"),
                format!("{n} whole Control({said})"),
                format!("{n} answer 200"),
                format!("{n} first byte"),
                format!("{n} end ContentLength Nothing"),
            ]);
        }
        assert_eq!(brief(&events), expected);
        assert_eq!(counters.rooms, 5);
    }
}

#[test]
fn streamed_answers_end_with_their_last_chunk() {
    let end = "LastChunk Outcome(Finished)";
    let (events, _) = run(&recorded("aiohttp_streamed_h11"));
    assert_eq!(brief(&events), exchange(0, "Whole", "0a1b2c", "200 streamed", end));
    let (events, _) = run(&recorded("httpx_streamed_httptools"));
    let mut expected = exchange(0, "Whole", "0a1b2c", "200 streamed", end);
    expected.extend(lines(&[
        "1 begun Get Health",
        "1 whole Nothing",
        "1 answer 200",
        "1 end ContentLength Nothing",
    ]));
    assert_eq!(brief(&events), expected);
}

#[test]
fn curl_waits_for_100_continue() {
    let (events, _) = run(&recorded("curl_expect_continue_httptools"));
    let mut expected = exchange(0, "Whole", "0a1b2c", "200", JSON);
    expected.insert(2, "0 interim 100".into());
    assert_eq!(brief(&events), expected);
}

#[test]
fn curl_speaks_http_1_0() {
    let (events, _) = run(&recorded("curl_http10_httptools"));
    assert_eq!(brief(&events), exchange(0, "Whole", "0a1b2c", "200", JSON));
}

#[test]
fn curl_hangs_up() {
    let (events, _) = run(&recorded("curl_hangs_up_httptools"));
    let mut expected = exchange(0, "Whole", "0a1b2c", "", "");
    expected.truncate(3);
    expected.push("0 hang-up Client reset false whole true answered false".into());
    assert_eq!(brief(&events), expected);
}

#[test]
fn what_cannot_be_read_is_named() {
    for (name, why) in [("curl_http2_prior_knowledge", "unread http2"), ("curl_tls", "unread tls")] {
        let (events, counters) = run(&recorded(name));
        assert_eq!(brief(&events), [why]);
        assert_eq!(counters.unread().map(|(_, n)| n).sum::<u64>(), 1);
    }
}

#[test]
fn the_bootstrap_server_is_told_and_asked() {
    let (events, _) = run(&recorded("requests_bootstrap_aiohttp"));
    let rank = RankRegistration {
        ip: Some("10.0.0.1".parse().unwrap()),
        port: Some(41207),
        tp_rank: Some(1),
        tp_size: Some(2),
        cp_rank: Some(0),
        cp_size: Some(1),
        dp_rank: Some(0),
        dp_size: Some(1),
        system_dp_rank: Some(0),
        system_dp_size: Some(1),
        pp_rank: Some(0),
        pp_size: Some(1),
        page_size: Some(64),
        http_port: Some(30000),
        follows_room: Some(true),
        prefill_complete: Some(false),
    };
    let registered = events.iter().find_map(|event| match event {
        Event::RequestWhole { said: Said::RegisterRank(rank), .. } => rank.as_deref(),
        _ => None,
    });
    assert_eq!(registered, Some(&rank));
    let told: Vec<_> = brief(&events)
        .into_iter()
        .filter(|l| l.contains(" end ") || (l.contains(" whole ") && !l.contains("RegisterRank")))
        .collect();
    let rooms = [ROOM, ROOM + 1, ROOM + 2];
    let query = |dp: i32, cp: i32, tp: i32, pp: i32| {
        format!(
            "Query(RouteQuery {{ dp_rank: Some({dp}), cp_rank: Some({cp}), tp_rank: Some({tp}), pp_rank: Some({pp}) }})"
        )
    };
    let expected = [
        "0 end ContentLength Nothing".to_owned(),
        format!("1 whole {}", query(-1, -1, -1, -1)),
        "1 end ContentLength Topology(Topology { tp_size: Some(2), cp_size: Some(1), dp_size: Some(1), \
         pp_size: Some(1), page_size: Some(64), http_port: Some(30000), follows_room: Some(true), \
         prefill_complete: Some(false) })"
            .to_owned(),
        format!("2 whole {}", query(0, 0, 1, 0)),
        "2 end ContentLength Rank(10.0.0.1, 41207)".to_owned(),
        format!("3 whole {}", query(0, 0, 9, 0)),
        "3 end ContentLength Nothing".to_owned(),
        format!("4 whole RegisterDpRank(Some(({ROOM}, 3)))"),
        "4 end ContentLength Nothing".to_owned(),
        format!("5 whole QueryDpRanks(Some({rooms:?}))"),
        format!("5 end ContentLength DpRanks(Some([({ROOM}, 0), ({}, 1)]))", ROOM + 1),
        "6 whole Nothing".to_owned(),
        "6 end ContentLength Nothing".to_owned(),
    ];
    assert_eq!(told, expected);
}
