//! Requests at an engine's port and at a bootstrap server: what the rooms are told of calls that carry them.

use roomtrace::control::{ConnectionState, Judgement, Limits};
use roomtrace::event::{Direction, NotCaptured, SocketId, TcpState};
use roomtrace::http::event::Rooms;
use roomtrace::rooms::model::{BootstrapStep, RequestStep, Unreadable};

use super::rig::{Rig, Told};
use super::wire::{greeting, status};

pub(crate) fn request(server: bool, n: u64, step: &RequestStep<'_>) -> String {
    let step = match step {
        RequestStep::Asked { work, .. } => {
            let rooms = match &work.rooms {
                Rooms::Named { rooms, complete, seen, .. } => {
                    let rooms: Vec<_> =
                        rooms.iter().map(|r| r.map_or("-".to_owned(), |r| r.to_string())).collect();
                    let cut = if *complete { "" } else { " cut" };
                    format!("{} {seen:?}{cut}", rooms.join(","))
                }
                other => format!("{other:?}"),
            };
            let rids: Vec<_> = work.rids.iter().map(|r| r.as_deref().unwrap_or("-")).collect();
            format!("asked {rooms} [{}]", rids.join(","))
        }
        RequestStep::FirstBodyByte => "first byte".to_owned(),
        RequestStep::Answered { status, how, outcome } => {
            format!("answered {} {how:?} {outcome:?}", status.map_or("-".to_owned(), |s| s.to_string()))
        }
        RequestStep::HungUp { by, answer_begun } => {
            format!("hung up {by:?}{}", if *answer_begun { " in answer" } else { "" })
        }
        RequestStep::OutOfSight => "out of sight".to_owned(),
        RequestStep::Control { call, status } => format!("{call:?} {status:?}"),
    };
    format!("{}{n} {step}", if server { "s" } else { "c" })
}

pub(crate) fn bootstrap(server: bool, n: u64, step: &BootstrapStep<'_>) -> String {
    let step = match step {
        BootstrapStep::Rank(r) => format!("rank {:?}:{:?} tp {:?}", r.ip, r.port, r.tp_rank),
        BootstrapStep::Query(q) if q.asks_topology() => "query topology".to_owned(),
        BootstrapStep::Query(q) => format!("query tp {:?}", q.tp_rank),
        BootstrapStep::DpQuery => "query dp ranks".to_owned(),
        BootstrapStep::RankIs(at) => format!("rank is {at}"),
        BootstrapStep::Topology(t) => format!("topology dp {:?}", t.dp_size),
        BootstrapStep::DpRank { room, rank } => format!("dp rank {room}={rank}"),
        BootstrapStep::DpRanks(ranks) => format!("dp ranks {ranks:?}"),
        BootstrapStep::Refused(status) => format!("refused {status}"),
        BootstrapStep::HungUp(by) => format!("hung up {by:?}"),
        BootstrapStep::OutOfSight => "out of sight".to_owned(),
    };
    format!("{}{n} bootstrap {step}", if server { "s" } else { "c" })
}

pub(crate) fn with_head(line: &str, fields: &str, body: &str) -> Vec<u8> {
    format!("{line} HTTP/1.1\r\nHost: h\r\n{fields}Content-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

pub(crate) fn post(path: &str, body: &str) -> Vec<u8> {
    with_head(&format!("POST {path}"), "", body)
}

pub(crate) fn generate(room: u64) -> Vec<u8> {
    post("/generate", &format!(r#"{{"text":"why","rid":"r{room}","bootstrap_room":{room}}}"#))
}

pub(crate) fn answer(status: u16, body: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

pub(crate) fn finished() -> Vec<u8> {
    answer(200, r#"{"text":"so","meta_info":{"finish_reason":{"type":"stop"}}}"#)
}

pub(crate) const STREAM_HEAD: &[u8] =
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

pub(crate) fn chunk(text: &str) -> Vec<u8> {
    format!("{:x}\r\n{text}\r\n", text.len()).into_bytes()
}

pub(crate) const LAST: &[u8] = b"0\r\n\r\n";

/// A server's socket whose establishment is seen.
pub(crate) fn server() -> Rig {
    let mut rig = Rig::new();
    rig.state(TcpState::SynRecv, TcpState::Established);
    rig.told.clear();
    rig
}

/// A client's socket whose establishment is seen.
pub(crate) fn client() -> Rig {
    let mut rig = Rig::open();
    rig.unread = 0;
    rig
}

impl Rig {
    /// A request comes: whoever sends it has acknowledged all that was sent.
    pub(crate) fn ask(&mut self, bytes: &[u8]) {
        self.una = self.sent;
        self.receive(bytes);
    }

    /// Bytes that are sent, and of which the source says nothing.
    pub(crate) fn send_muted(&mut self, len: u32) {
        self.sent = self.sent.wrapping_add(len);
    }

    /// What was told of requests.
    pub(crate) fn web(&mut self) -> Vec<String> {
        self.told()
            .into_iter()
            .filter_map(|told| match told {
                Told::Web(text) => Some(text),
                _ => None,
            })
            .collect()
    }

    pub(crate) fn requests(&self, route: &str) -> u64 {
        self.control.counters().requests().find(|(r, _)| *r == route).unwrap().1
    }

    fn unreadable(&self) -> Vec<(Unreadable, u64)> {
        self.control.counters().unreadable().filter(|(_, n)| *n > 0).collect()
    }
}

#[test]
fn a_request_is_followed_from_its_head_to_the_last_byte_of_its_answer() {
    let mut rig = server();
    rig.ask(&generate(7));
    assert_eq!(rig.web(), ["s0 asked 7 Whole [r7]"]);
    assert_eq!(rig.judged(), [Judgement::Http]);
    let all = finished();
    rig.send(&all[..30]);
    assert_eq!(rig.web(), [""; 0]);
    rig.send(&all[30..60]);
    assert_eq!(rig.web(), ["s0 first byte"]);
    rig.send(&all[60..]);
    assert_eq!(rig.web(), ["s0 answered 200 ContentLength Finished"]);
    // The connection is kept.
    rig.ask(&generate(8));
    rig.send(&answer(500, r#"{"error":{"message":"no"}}"#));
    assert_eq!(rig.web(), ["s1 asked 8 Whole [r8]", "s1 first byte", "s1 answered 500 ContentLength Error"]);
    assert_eq!((rig.requests("generate"), rig.connections(ConnectionState::Http)), (2, 1));
    rig.close(TcpState::LastAck, 0);
    assert_eq!((rig.web(), rig.connections(ConnectionState::Http)), (vec![], 0));
}

#[test]
fn a_client_of_an_engine_is_told_apart_from_its_server() {
    let mut rig = client();
    rig.send(&generate(7));
    rig.receive(&finished());
    let told = ["c0 asked 7 Whole [r7]", "c0 first byte", "c0 answered 200 ContentLength Finished"];
    assert_eq!(rig.web(), told);
}

#[test]
fn requests_in_one_call_and_in_many() {
    let mut rig = server();
    rig.ask(&[generate(7), generate(8)].concat());
    rig.send(&[finished(), answer(200, "{}")].concat());
    assert_eq!(
        rig.web(),
        [
            "s0 asked 7 Whole [r7]",
            "s1 asked 8 Whole [r8]",
            "s0 first byte",
            "s0 answered 200 ContentLength Finished",
            "s1 first byte",
            "s1 answered 200 ContentLength Unknown"
        ]
    );
    for byte in generate(5_123_456_789_012_345_678) {
        rig.ask(&[byte]);
    }
    assert_eq!(rig.web(), ["s2 asked 5123456789012345678 Whole [r5123456789012345678]"]);
}

#[test]
fn a_chunked_request_whose_room_straddles_reads_and_chunks() {
    let mut rig = server();
    rig.ask(b"POST /generate HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n");
    rig.ask(&[chunk(r#"{"bootstrap_room":512"#), b"2\r\n34".to_vec()].concat());
    assert_eq!(rig.web(), [""; 0]);
    rig.ask(&[b"\r\n".to_vec(), chunk("5}"), LAST.to_vec()].concat());
    assert_eq!(rig.web(), ["s0 asked 512345 Whole []"]);
}

#[test]
fn a_muted_stream_ends_at_its_last_chunk_and_the_next_request_is_read() {
    let mut rig = server();
    for room in [7, 8] {
        rig.ask(&generate(room));
        rig.send(STREAM_HEAD);
        rig.send(&chunk("data: {\"text\":\"a\"}\n\n"));
        rig.web();
        rig.send_absent(200, NotCaptured::Middle);
        rig.send_muted(100_000);
        assert_eq!(rig.web(), [""; 0]);
        rig.send(LAST);
        let n = room - 7;
        assert_eq!(rig.web(), [format!("s{n} answered 200 LastChunk Unknown")]);
    }
    // Its last chunk is not seen: the next request tells that it is over.
    rig.ask(&generate(9));
    rig.send(STREAM_HEAD);
    rig.send_muted(100_000);
    rig.web();
    rig.ask(&generate(10));
    assert_eq!(rig.web(), ["s2 first byte", "s2 answered 200 Next Unknown", "s3 asked 10 Whole [r10]"]);
    assert_eq!(rig.control.counters().request_holes.count, 0);
}

#[test]
fn a_muted_answer_of_known_length_is_over_at_the_next_request() {
    let mut rig = server();
    rig.ask(&generate(7));
    rig.send(b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n");
    rig.send_muted(50_000);
    rig.web();
    rig.ask(&generate(8));
    assert_eq!(
        rig.web(),
        ["s0 first byte", "s0 answered 200 ContentLength Unknown", "s1 asked 8 Whole [r8]"]
    );
    rig.send(&finished());
    assert_eq!(rig.web().len(), 2);
}

#[test]
fn a_muted_answer_is_caught_up_at_a_client_too() {
    let mut rig = client();
    for n in 0..3 {
        rig.send(&generate(7 + n));
        rig.receive(STREAM_HEAD);
        rig.web();
        // Reads that are not reported, last chunk included.
        rig.received = rig.received.wrapping_add(70_000);
    }
    rig.send(&generate(10));
    assert_eq!(rig.web(), ["c2 first byte", "c2 answered 200 Next Unknown", "c3 asked 10 Whole [r10]"]);
}

#[test]
fn sequence_numbers_wrap() {
    let mut rig = Rig::new();
    (rig.sent, rig.una, rig.received) = (u32::MAX - 200, u32::MAX - 200, u32::MAX - 50);
    rig.state(TcpState::SynRecv, TcpState::Established);
    rig.told.clear();
    for room in 7..10 {
        rig.ask(&generate(room));
        rig.send(STREAM_HEAD);
        rig.send_muted(1_000);
        rig.send(LAST);
        let n = room - 7;
        assert_eq!(
            rig.web(),
            [
                format!("s{n} asked {room} Whole [r{room}]"),
                format!("s{n} first byte"),
                format!("s{n} answered 200 LastChunk Unknown")
            ]
        );
    }
}

#[test]
fn expect_100_continue() {
    let mut rig = server();
    let whole = with_head("POST /generate", "Expect: 100-continue\r\n", r#"{"bootstrap_room":7}"#);
    let at = whole.len() - 20;
    rig.ask(&whole[..at]);
    rig.send(b"HTTP/1.1 100 Continue\r\n\r\n");
    rig.ask(&whole[at..]);
    rig.send(&finished());
    assert_eq!(rig.web(), ["s0 asked 7 Whole []", "s0 first byte", "s0 answered 200 ContentLength Finished"]);
}

#[test]
fn a_megabyte_of_prompt_passes_in_calls_of_which_the_ends_are_here() {
    let text = "x y".repeat(400_000);
    let body = format!(r#"{{"text":"{text}","rid":"abc","bootstrap_room":7}}"#);
    let whole = post("/generate", &body);
    let mut rig = server();
    for call in whole.chunks(256_000) {
        rig.move_ends(Direction::Received, call, 1024, 1024);
    }
    assert_eq!(rig.web(), ["s0 asked 7 Tail [abc]"]);
    // One call, with the room at its very end and at its beginning.
    rig.send(&finished());
    rig.web();
    rig.una = rig.sent;
    rig.move_ends(Direction::Received, &whole, 1024, 1024);
    assert_eq!(rig.web(), ["s1 asked 7 Tail [abc]"]);
    rig.send(&finished());
    rig.web();
    let body = format!(r#"{{"rid":"abc","bootstrap_room":7,"text":"{text}"}}"#);
    rig.una = rig.sent;
    rig.move_ends(Direction::Received, &post("/generate", &body), 1024, 1024);
    assert_eq!(rig.web(), ["s2 asked 7 Head [abc]"]);
    rig.send(&finished());
    rig.web();
    // In the middle it is not seen, which is no absence.
    let body = format!(r#"{{"text":"{text}","bootstrap_room":7,"more":"{text}"}}"#);
    rig.una = rig.sent;
    rig.move_ends(Direction::Received, &post("/generate", &body), 1024, 1024);
    assert_eq!(rig.web(), ["s3 asked NotSeen(Hole) []"]);
    let not_seen: u64 = rig.control.http_counters().not_seen().map(|(_, n)| n).sum();
    assert_eq!(not_seen, 1);
    assert!(rig.control.held_bytes() < 10_000);
}

#[test]
fn a_batch_names_all_its_rooms() {
    let mut rig = server();
    rig.ask(&post("/generate", r#"{"text":["a","b"],"rid":["x","y"],"bootstrap_room":[7,8]}"#));
    assert_eq!(rig.web(), ["s0 asked 7,8 Whole [x,y]"]);
}

#[test]
fn work_without_a_room_is_asked_too_and_health_is_only_counted() {
    let mut rig = server();
    rig.ask(&post("/v1/chat/completions", r#"{"messages":[]}"#));
    rig.send(&finished());
    assert_eq!(rig.web(), ["s0 asked None []", "s0 first byte", "s0 answered 200 ContentLength Finished"]);
    for path in ["/health", "/health_generate", "/metrics", "/v1/loads"] {
        rig.ask(&with_head(&format!("GET {path}"), "", ""));
        rig.send(&answer(200, "ok"));
    }
    assert_eq!(rig.web(), [""; 0]);
    assert_eq!((rig.requests("health"), rig.requests("status"), rig.requests("other")), (2, 2, 0));
    rig.ask(&post("/generate", r#"{"rid":"HEALTH_CHECK_1","bootstrap_room":0,"bootstrap_host":"2.2.2.2"}"#));
    assert_eq!(rig.web(), ["s5 asked Ignored(FakeHost) [HEALTH_CHECK_1]"]);
}

#[test]
fn control_calls_are_told_when_asked_and_when_answered() {
    let mut rig = server();
    rig.ask(&post("/pause_generation", r#"{"mode":"retract"}"#));
    assert_eq!(rig.web(), ["s0 Pause(Some(Retract)) None"]);
    rig.send(&answer(200, "{}"));
    assert_eq!(rig.web(), ["s0 Pause(Some(Retract)) Some(200)"]);
    rig.ask(&post("/continue_generation", "{}"));
    rig.send(&answer(500, "{}"));
    assert_eq!(rig.web(), ["s1 Resume None", "s1 Resume Some(500)"]);
    // Weights change until the answer is over.
    rig.ask(&post("/update_weights_from_disk", "{}"));
    rig.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n");
    assert_eq!(rig.web(), ["s2 UpdateWeights None"]);
    rig.send(b"{}");
    assert_eq!(rig.web(), ["s2 UpdateWeights Some(200)"]);
    // An answer that is not seen leaves it in the dark.
    rig.ask(&post("/pause_generation", "{}"));
    rig.send_muted(100);
    rig.web();
    rig.ask(&generate(7));
    assert_eq!(rig.web(), ["s3 out of sight", "s4 asked 7 Whole [r7]"]);
    assert_eq!(rig.requests("control"), 4);
}

#[test]
fn an_answer_before_the_request_is_whole_is_told_behind_it() {
    let mut rig = server();
    let whole = generate(7);
    rig.ask(&whole[..whole.len() - 5]);
    rig.send(&answer(413, "{}"));
    assert_eq!(rig.web(), [""; 0]);
    rig.ask(&whole[whole.len() - 5..]);
    assert_eq!(
        rig.web(),
        ["s0 asked 7 Whole [r7]", "s0 first byte", "s0 answered 413 ContentLength Unknown"]
    );
}

#[test]
fn a_rank_registers_and_is_asked_for() {
    let mut rig = server();
    let rank = r#"{"rank_ip":"10.0.0.1","rank_port":4000,"attn_tp_rank":1}"#;
    rig.ask(&with_head("PUT /route", "", rank));
    assert_eq!(rig.web(), [""; 0]);
    rig.send(&answer(200, "OK"));
    assert_eq!(rig.web(), ["s0 bootstrap rank Some(10.0.0.1):Some(4000) tp Some(1)"]);
    rig.ask(&with_head("PUT /route", "", rank));
    rig.send(&answer(500, "no"));
    assert_eq!(rig.web(), ["s1 bootstrap refused 500"]);
    let query = "GET /route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=1&target_pp_rank=0";
    rig.ask(&with_head(query, "", ""));
    assert_eq!(rig.web(), ["s2 bootstrap query tp Some(1)"]);
    rig.send(&answer(200, r#"{"rank_ip":"10.0.0.1","rank_port":4000}"#));
    assert_eq!(rig.web(), ["s2 bootstrap rank is 10.0.0.1:4000"]);
    let query = "GET /route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";
    rig.ask(&with_head(query, "", ""));
    rig.send(&answer(200, r#"{"dp_size":2,"attn_tp_size":4}"#));
    assert_eq!(rig.web(), ["s3 bootstrap query topology", "s3 bootstrap topology dp Some(2)"]);
    rig.ask(&with_head(query, "", ""));
    rig.send(&answer(404, "not found"));
    assert_eq!(rig.web(), ["s4 bootstrap query topology", "s4 bootstrap refused 404"]);
    rig.ask(&post("/register_dp_rank", r#"{"bootstrap_room":7,"dp_rank":1}"#));
    rig.send(&answer(200, "OK"));
    assert_eq!(rig.web(), ["s5 bootstrap dp rank 7=1"]);
    rig.ask(&post("/query_dp_ranks", r#"{"bootstrap_rooms":[7]}"#));
    rig.send(&answer(200, r#"{"7":1}"#));
    assert_eq!(rig.web(), ["s6 bootstrap query dp ranks", "s6 bootstrap dp ranks [(7, 1)]"]);
    rig.ask(&with_head(query, "", ""));
    rig.web();
    rig.close(TcpState::Established, 104);
    assert_eq!(rig.web(), ["s7 bootstrap hung up Client"]);
}

#[test]
fn a_query_for_dp_ranks_is_told_at_both_ends_and_so_is_a_hang_up_instead_of_its_answer() {
    let query = post("/query_dp_ranks", r#"{"bootstrap_rooms":[7]}"#);
    let mut rig = server();
    rig.ask(&query);
    assert_eq!(rig.web(), ["s0 bootstrap query dp ranks"]);
    rig.close(TcpState::Established, 104);
    assert_eq!(rig.web(), ["s0 bootstrap hung up Client"]);
    let mut rig = client();
    rig.send(&query);
    assert_eq!(rig.web(), ["c0 bootstrap query dp ranks"]);
    rig.receive(&answer(200, "{}"));
    assert_eq!(rig.web(), ["c0 bootstrap dp ranks []"]);
}

#[test]
fn tls_and_http2_are_named_once_and_let_go() {
    for (bytes, why, judged) in [
        (&b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03"[..], Unreadable::Tls, Judgement::Foreign),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x12\x04\0\0\0\0\0", Unreadable::Http2, Judgement::Foreign),
        (b"HELO example.org and so on for a while\r\n", Unreadable::Other, Judgement::Neither),
        // The header of a transfer's piece: its size, an address.
        (b"\x4e\x61\xbc\0\0\0\0\0\0\0\0\0\0\x7f\0\0", Unreadable::Other, Judgement::Neither),
        (b"\0\0\0\x17store", Unreadable::Other, Judgement::Foreign),
    ] {
        for split in [1, bytes.len() / 2, bytes.len()] {
            let mut rig = server();
            rig.ask(&bytes[..split]);
            rig.ask(&bytes[split..]);
            rig.ask(bytes);
            let told = rig.told();
            let named: Vec<_> = told.iter().filter(|t| matches!(t, Told::Other(_))).collect();
            assert_eq!(named, [&Told::Other(why.label())], "{told:?}");
            assert_eq!(rig.unreadable(), [(why, 1)]);
            assert_eq!(rig.judged(), [judged]);
            assert_eq!(rig.connections(ConnectionState::Foreign), 1);
        }
    }
}

#[test]
fn what_a_connection_of_requests_goes_on_with_does_not_make_it_another() {
    for first in [&generate(7)[..], b""] {
        let mut rig = server();
        rig.ask(first);
        if !first.is_empty() {
            rig.send(&finished());
        }
        rig.ask(b"\x4e\x61\xbc\0\0\0\0\0\0\0\0\0\0\x7f\0\0");
        let last = if first.is_empty() { Judgement::Neither } else { Judgement::Foreign };
        assert_eq!(rig.judged().last(), Some(&last));
    }
}

#[test]
fn dialects_of_zmtp_and_hidden_calls_are_named_for_the_rooms() {
    for (bytes, why) in
        [(greeting(b"CURVE"), Unreadable::ZmtpMechanism), (vec![1, 0], Unreadable::ZmtpVersion)]
    {
        let mut rig = Rig::open();
        rig.receive(&bytes);
        rig.receive(&bytes);
        assert_eq!(rig.unreadable(), [(why, 1)]);
    }
    let mut rig = Rig::open();
    for _ in 0..300 {
        rig.send_absent(100, NotCaptured::KernelThread);
    }
    assert_eq!(rig.unreadable(), [(Unreadable::Calls, 1)]);
    assert_eq!(rig.judged(), [Judgement::Foreign]);
}

#[test]
fn tls_and_http2_joined_in_their_middle_are_never_read() {
    for record in [&b"\x17\x03\x03\x40\x00"[..], b"\0\x10\0\0\x01\0\0\0\x01"] {
        let mut rig = Rig::new();
        for i in 0..300u32 {
            let noise: Vec<u8> = (0..1_000u32).flat_map(|j| (i * 77 + j * 13).to_le_bytes()).collect();
            rig.receive(&[record, &noise].concat());
        }
        assert_eq!((rig.web(), rig.judged()), (vec![], vec![Judgement::Foreign]));
        assert_eq!(rig.unreadable(), [(Unreadable::Other, 1)]);
        assert_eq!(rig.control.counters().unrecognised, 1);
    }
}

#[test]
fn a_connection_joined_between_requests() {
    let mut rig = Rig::new();
    rig.found(None);
    rig.ask(&generate(7));
    rig.send(&finished());
    assert_eq!(
        rig.web(),
        ["s0 asked 7 Whole [r7]", "s0 first byte", "s0 answered 200 ContentLength Finished"]
    );
    assert_eq!(rig.judged(), [Judgement::Http]);
}

#[test]
fn a_connection_joined_in_the_middle_of_an_answer() {
    let mut rig = Rig::new();
    rig.found(None);
    rig.send(&chunk("data: {\"text\":\"the answer to a request that was not seen\"}\n\n"));
    assert_eq!((rig.web(), rig.judged()), (vec![], vec![Judgement::Http]));
    assert_eq!(rig.connections(ConnectionState::HttpPending), 1);
    // From now on it is muted.
    rig.send_muted(1_000_000);
    rig.send(LAST);
    rig.ask(&generate(7));
    assert_eq!(rig.web(), ["s0 asked 7 Whole [r7]"]);
    rig.send(&finished());
    assert_eq!(rig.web(), ["s0 first byte", "s0 answered 200 ContentLength Finished"]);
    assert_eq!(rig.connections(ConnectionState::Http), 1);
}

#[test]
fn zmtp_is_not_taken_for_http() {
    let mut rig = Rig::new();
    // A message whose frame holds a request, and its tail in a call of its own.
    let text = b"POST /generate HTTP/1.1\r\nHost: h\r\n\r\n";
    rig.send(&status(7));
    rig.send(&[&[0, u8::try_from(text.len()).unwrap()][..], &text[..]].concat());
    rig.send(&[0, u8::try_from(text.len()).unwrap()]);
    rig.send(text);
    rig.send(&status(8));
    assert_eq!((rig.web(), rig.judged()), (vec![], vec![Judgement::Zmtp]));
    assert_eq!(rig.connections(ConnectionState::Acquired), 1);
}

#[test]
fn a_hole_in_a_request_is_waited_for_and_one_in_an_answer_is_not() {
    let mut rig = server();
    let whole = generate(7);
    let (first, second) = whole.split_at(40);
    // Two threads that report out of order.
    let end = rig.received + u32::try_from(whole.len()).unwrap();
    rig.report(Direction::Received, end, second.len(), roomtrace::event::Body::Whole(second));
    assert_eq!(rig.web(), [""; 0]);
    rig.receive(first);
    rig.received = end;
    assert_eq!(rig.web(), ["s0 asked 7 Whole [r7]"]);
    rig.send(STREAM_HEAD);
    rig.web();
    rig.send_muted(10);
    rig.send(LAST);
    assert_eq!(rig.web(), ["s0 first byte", "s0 answered 200 LastChunk Unknown"]);
    // A call of a request that never comes: its position is lost, and found again when the next one begins.
    rig.received += 10;
    rig.ask(&generate(8));
    assert_eq!(rig.web(), [""; 0]);
    rig.tick(60 * super::rig::MS);
    assert_eq!(rig.web(), ["s1 asked 8 Whole [r8]"]);
    assert_eq!(rig.control.counters().request_holes.bytes, 10);
}

#[test]
fn what_is_held_is_bounded_over_all_connections_and_idle_ones_cost_little() {
    let limits = Limits { partial_bytes: 200_000, ..Limits::default() };
    let mut rig = Rig::with(limits);
    let text = "x".repeat(100_000);
    let body = format!(r#"{{"text":"{text}","bootstrap_room":7}}"#);
    let whole = post("/generate", &body);
    for id in 0..500 {
        rig.id = SocketId(id);
        rig.state(TcpState::SynRecv, TcpState::Established);
        rig.una = rig.sent;
        // A body whose end has not come yet.
        rig.move_ends(Direction::Received, &whole[..90_000], 1024, 4096);
        // A head that does not end.
        rig.id = SocketId(1_000 + id);
        rig.state(TcpState::SynRecv, TcpState::Established);
        rig.ask(format!("GET /health HTTP/1.1\r\nX: {}", &text[..4_000]).as_bytes());
    }
    assert!(rig.control.held_bytes() <= 210_000, "{}", rig.control.held_bytes());
    assert!(rig.control.counters().http_memory > 0);
    // One that was given up is joined again, and no number of a request is used twice.
    let mut rig = Rig::with(Limits { partial_bytes: 3_000, ..Limits::default() });
    rig.state(TcpState::SynRecv, TcpState::Established);
    rig.ask(&generate(7));
    rig.move_ends(Direction::Received, &whole[..90_000], 1024, 4096);
    assert_eq!(rig.control.counters().http_memory, 1);
    rig.ask(&generate(8));
    assert_eq!(rig.web(), ["s0 asked 7 Whole [r7]", "s0 out of sight", "s2 asked 8 Whole [r8]"]);
    let mut rig = Rig::new();
    for id in 0..1_000 {
        rig.id = SocketId(id);
        rig.state(TcpState::SynRecv, TcpState::Established);
        rig.ask(&generate(id));
        rig.send(&finished());
    }
    assert_eq!(rig.web().len(), 3_000);
    assert!(rig.control.held_bytes() < 300 * 1_000, "{}", rig.control.held_bytes());
}

#[test]
fn where_requests_are_not_read_nothing_of_them_is() {
    let mut rig = Rig::with(Limits { requests: false, ..Limits::default() });
    rig.state(TcpState::SynRecv, TcpState::Established);
    rig.ask(&generate(7));
    assert_eq!((rig.web(), rig.judged()), (vec![], vec![Judgement::Foreign]));
    assert_eq!((rig.unreadable(), rig.control.counters().not_zmtp), (vec![], 1));
}
