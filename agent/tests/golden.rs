//! Every golden message and byte stream of SGLang 0.4.5.post3 to 0.5.23, decoded and compared with what its
//! encoder was given.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]
#![allow(missing_docs, reason = "tests")]

use std::net::IpAddr;

use roomtrace::sglang::message::{Backend, Decoded, Endpoint, Message, Release};
use roomtrace::sglang::{self, GRAMMAR};
use roomtrace::zmtp::{
    BYTES_KEPT, Confidence, Decoder, Event, FrameMeta, Multipart, Recognition, SocketType,
};
use serde_json::Value;

fn fixture(name: &str) -> Value {
    let path = format!("{}/tests/fixtures/frames/{name}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

fn hexes(list: &Value) -> Vec<Vec<u8>> {
    list.as_array().unwrap().iter().map(|h| hex(h.as_str().unwrap())).collect()
}

/// `0.4.8.post1` → a release.
fn release(text: &str) -> Release {
    let mut parts = [0; 4];
    for (slot, part) in parts.iter_mut().zip(text.split('.')) {
        *slot = part.trim_start_matches("post").parse().unwrap();
    }
    Release { parts }
}

/// Frames as a decoder keeps them.
fn with_parts<T>(frames: &[Vec<u8>], ask: impl FnOnce(&Multipart<'_>) -> T) -> T {
    let mut store = Vec::new();
    let mut metas = Vec::new();
    for frame in frames {
        let kept = frame.len().min(BYTES_KEPT);
        let at = u32::try_from(store.len()).unwrap();
        metas.push(FrameMeta {
            at,
            kept: u16::try_from(kept).unwrap(),
            len: u64::try_from(frame.len()).unwrap(),
        });
        store.extend_from_slice(&frame[..kept]);
    }
    ask(&Multipart::new(&store, &metas, u32::try_from(frames.len()).unwrap()))
}

/// Compares one expected field with the message; an unknown field fails.
struct Expect<'a>(&'a str, &'a Value);

impl Expect<'_> {
    fn number(&self, key: &str, value: impl Into<Option<u64>>) -> bool {
        self.0 == key && {
            assert_eq!(self.1.as_u64(), value.into(), "{key}");
            true
        }
    }

    fn signed(&self, key: &str, value: i64) -> bool {
        self.0 == key && {
            assert_eq!(self.1.as_i64(), Some(value), "{key}");
            true
        }
    }

    fn text(&self, key: &str, value: &str) -> bool {
        self.0 == key && {
            assert_eq!(self.1.as_str(), Some(value), "{key}");
            true
        }
    }

    fn endpoint(&self, endpoint: Option<Endpoint<'_>>) -> bool {
        let Some(e) = endpoint else { return false };
        self.text("decode_ip", e.host) && e.ip == Some(self.1.as_str().unwrap().parse().unwrap())
            || self.number("decode_port", u64::from(e.port))
    }

    fn address(&self, ip: Option<IpAddr>, port: u16) -> bool {
        self.text("decode_ip", &ip.unwrap().to_string()) || self.number("decode_port", u64::from(port))
    }
}

fn check_field(e: &Expect<'_>, message: &Message<'_>) -> bool {
    match message {
        Message::Register(m) => {
            e.endpoint(Some(m.decode))
                || e.text("session_id", m.session)
                || e.text("agent_name", m.session)
                || e.text("engine_key", m.session)
                || e.number("kv_ptr_count", m.kv_buffers.map(u64::from))
                || e.number("aux_ptr_count", m.aux_buffers.map(u64::from))
                || e.number("dst_tp_rank", m.tp_rank.map(u64::from))
                || e.number("dst_tp_size", m.tp_size.map(u64::from))
                || e.number("dst_kv_item_len", m.kv_item_len)
                || e.number("agent_metadata_len", m.agent_metadata_len)
                || e.number("staging_base_ptr", m.staging.map(|s| s.base))
                || e.number("staging_total_size", m.staging.map(|s| s.size))
        }
        Message::Metadata(m) => {
            let pages = e.0 == "kv_page_indices" && {
                assert_eq!(m.pages, u64::try_from(e.1.as_array().unwrap().len()).unwrap());
                true
            };
            let dummy = e.0 == "is_dummy" && {
                // Where the layout leaves it open, `None` is the right answer for a dummy.
                assert!(m.dummy == e.1.as_bool() || (m.dummy.is_none() && e.1 == &Value::Bool(true)));
                true
            };
            pages
                || dummy
                || e.number("room", m.room)
                || e.endpoint(m.decode)
                || e.text("session_id", m.session)
                || e.text("agent_name", m.session)
                || e.text("engine_key", m.session)
                || e.number("aux_index", m.aux_index.map(u64::from))
                || e.number("required_dst_info_num", m.required.map(u64::from))
                || e.number("decode_prefix_len", m.decode_prefix_len)
                // Shows in the number of pages; state indices never leave the decoder.
                || e.0 == "kv_index_bytes_each"
                || e.0 == "state_indices"
        }
        Message::Abort(m) | Message::Bootstrap(m) => {
            e.number("room", m.room) || e.address(m.ip, m.port) || e.number("generation", m.generation)
        }
        Message::Watermark(m) => {
            e.number("round", m.round) || e.number("tail", m.tail) || e.text("session_id", m.session)
        }
        Message::StagingRsp(m) => {
            e.number("room", m.room)
                || e.number("chunk_idx", u64::from(m.chunk))
                || e.signed("offset", m.offset)
                || e.number("round", m.round)
                || e.signed("end", m.end)
                || e.text("session_id", m.session)
                || (e.0 == "oversized" && m.offset == -2)
        }
        Message::Status(m) => {
            e.number("room", m.room)
                || e.number("status", m.status as u64)
                || e.number("prefill_rank", m.prefill_rank.map(u64::from))
                || e.text("reason", m.reason)
        }
        Message::AuxData(m) => {
            e.number("room", m.room)
                || e.number("buffer_index", u64::from(m.buffer_index))
                || e.number("aux_index", u64::from(m.aux_index))
                || e.number("data_len", m.len)
        }
        Message::ChunkReady(m) => {
            e.number("room", m.room)
                || e.number("chunk_idx", u64::from(m.chunk))
                || e.number("page_start", m.page_start)
                || e.number("num_pages", m.pages)
                || e.text("writer_id", m.writer)
                || e.number("prefill_rank", u64::from(m.prefill_rank))
        }
        Message::StagingReq(m) => {
            e.number("room", m.room)
                || e.number("chunk_idx", u64::from(m.chunk))
                || e.number("chunk_pages", m.pages)
                || e.text("session_id", m.session)
                || e.number("pp_rank", m.pp_rank.map(u64::from))
        }
        Message::AbortAck(m) => {
            e.number("room", m.room)
                || e.number("prefill_rank", m.prefill_rank.map(u64::from))
                || e.number("generation", m.generation)
        }
        Message::PpState(m) => {
            e.number("room", m.room)
                || e.number("pp_rank", u64::from(m.pp_rank))
                || e.number("status", m.status.map(|s| s as u64))
                || (e.0 == "op" && (e.1 == "PUT") == m.status.is_some())
        }
    }
}

fn check(entry: &Value, decoded: &Decoded<'_>) {
    let id = entry["id"].as_str().unwrap();
    assert_eq!(decoded.message.kind().name(), entry["kind"].as_str().unwrap(), "{id}");
    for (key, value) in entry["expected"].as_object().unwrap() {
        assert!(
            check_field(&Expect(key, value), &decoded.message),
            "{id}: {key} is not {value}: {decoded:?}"
        );
    }
    let (min, max) =
        (release(entry["min_version"].as_str().unwrap()), release(entry["max_version"].as_str().unwrap()));
    let releases = decoded.releases;
    assert!(releases.min <= min && max <= releases.max, "{id}: {releases:?} is not {min:?} to {max:?}");
    let backends: Vec<_> =
        entry["backends"].as_array().unwrap().iter().map(|b| b.as_str().unwrap()).collect();
    assert!(
        decoded.backend == Backend::Shared || backends.contains(&decoded.backend.label()),
        "{id}: {:?}",
        decoded.backend
    );
    assert_eq!(decoded.extra_frames, 0, "{id}");
}

fn messages() -> Vec<Value> {
    ["decode_to_prefill.json", "prefill_to_decode.json"]
        .iter()
        .flat_map(|name| fixture(name)["messages"].as_array().unwrap().clone())
        .collect()
}

#[test]
fn every_golden_message_decodes_to_what_was_encoded() {
    let messages = messages();
    for entry in &messages {
        with_parts(&hexes(&entry["frames_hex"]), |parts| {
            let id = &entry["id"];
            let decoded = sglang::decode(parts).unwrap_or_else(|e| panic!("{id}: {e:?}"));
            check(entry, &decoded);
        });
    }
    assert_eq!(messages.len(), 121);
}

#[test]
fn layouts_with_the_same_number_of_frames_are_told_apart() {
    // Whose golden messages differ in content only must not share a range of releases.
    let releases = |id: &str| {
        let entry = messages().into_iter().find(|e| e["id"] == id).unwrap();
        with_parts(&hexes(&entry["frames_hex"]), |parts| sglang::decode(parts).unwrap().releases)
    };
    for (old, new) in [
        ("mooncake-metadata-0.4.7", "mooncake-metadata-0.4.9"),
        ("mooncake-metadata-0.4.5.post3", "mooncake-metadata-0.5.4"),
        ("nixl-metadata-0.4.5.post3", "mooncake-metadata-0.5.12"),
        ("nixl-metadata-0.4.6.post5", "nixl-metadata-0.5.11"),
        ("nixl-metadata-0.5.11", "nixl-metadata-0.5.12"),
        ("nixl-metadata-0.4.7", "nixl-metadata-0.4.8"),
        ("mooncake-register-0.5.10", "mooncake-register-0.5.12"),
        ("mori-metadata-0.5.12", "mori-metadata-0.5.13"),
        ("mori-register-0.5.12", "mori-register-0.5.13"),
    ] {
        assert!(releases(old).max < releases(new).min, "{old} and {new}");
    }
}

#[test]
fn indices_of_32_and_64_bits_are_told_apart_for_any_number_of_pages() {
    for pages in 1..200u32 {
        let narrow: Vec<u8> = (1..=pages).flat_map(u32::to_le_bytes).collect();
        let wide: Vec<u8> = (1..=pages).map(u64::from).flat_map(u64::to_le_bytes).collect();
        for (index, newer) in [(narrow, true), (wide, false)] {
            let frames = [b"77".to_vec(), b"h".to_vec(), b"1".to_vec(), b"s:1".to_vec(), index];
            let frames = [&frames[..], &[b"3".to_vec(), b"1".to_vec()]].concat();
            with_parts(&frames, |parts| {
                let decoded = sglang::decode(parts).unwrap();
                let Message::Metadata(m) = decoded.message else { panic!("{decoded:?}") };
                assert_eq!(m.pages, u64::from(pages));
                assert_eq!(decoded.releases.min >= release("0.4.8"), newer, "{pages}");
                assert_eq!(decoded.releases.max <= release("0.4.7"), !newer, "{pages}");
            });
        }
    }
}

#[test]
fn no_damage_to_a_frame_stops_the_decoder() {
    type Damage = fn(&[u8]) -> Vec<u8>;
    let damages: [Damage; 7] = [
        |_| Vec::new(),
        |f| f[..f.len() / 2].to_vec(),
        |f| [f, &[0]].concat(),
        |f| f.iter().map(|b| !b).collect(),
        |_| vec![0xdd; 4],
        |_| vec![0xff; 300],
        |_| b"18446744073709551615".to_vec(),
    ];
    // An answer of some kind, and no panic.
    for entry in messages() {
        let frames = hexes(&entry["frames_hex"]);
        for at in 0..frames.len() {
            for damage in damages {
                let mut frames = frames.clone();
                frames[at] = damage(&frames[at]);
                with_parts(&frames, |parts| {
                    let _ = sglang::decode(parts);
                    let _ = (GRAMMAR.recognise)(parts);
                });
                frames.remove(at);
                with_parts(&frames, |parts| sglang::decode(parts).is_ok());
            }
        }
    }
}

#[test]
fn the_tail_of_a_message_proves_no_position() {
    // A call can begin behind any frame of a message.
    let mut messages: Vec<_> = messages().iter().map(|e| hexes(&e["frames_hex"])).collect();
    // A mori engine key that ends in an IPv6 address reads like a session of mooncake, but for its brackets.
    for (key, host) in
        [("io-decode-dp0-tp1-pid42-fd00::1", "fd00::1"), ("io-decode-dp0-tp1-pid42-::1-a1b2", "::1")]
    {
        let index = 7u32.to_le_bytes();
        let frames: [&[u8]; 9] =
            [b"MoriMsgGuard", b"77", host.as_bytes(), b"41207", key.as_bytes(), &index, b"3", b"", b"1"];
        messages.push(frames.map(<[u8]>::to_vec).to_vec());
    }
    for frames in messages {
        for first in 1..frames.len() {
            let found = with_parts(&frames[first..], |parts| (GRAMMAR.recognise)(parts));
            // Without their first frame these are whole messages of older releases.
            let older = first == 1
                && (frames[0] == b"ABORT_ACK" || (frames[0] == b"NixlMsgGuard" && frames.len() == 10));
            assert!(found <= Recognition::Weak || older, "{found:?}: {:?}", &frames[first..]);
        }
        assert!(with_parts(&frames, |parts| (GRAMMAR.recognise)(parts)) > Recognition::No, "{frames:?}");
    }
}

#[test]
fn frames_behind_the_newest_layout_are_tolerated_and_counted() {
    for entry in messages() {
        let mut frames = hexes(&entry["frames_hex"]);
        let id = entry["id"].as_str().unwrap();
        if entry["max_version"] != "0.5.23" || entry["kind"] == "PP_STATE" {
            continue;
        }
        let count = frames.len();
        frames.push(b"new".to_vec());
        frames.push(b"newer".to_vec());
        with_parts(&frames, |parts| {
            match sglang::decode(parts) {
                Ok(decoded) => {
                    assert_eq!(decoded.message.kind().name(), entry["kind"], "{id}");
                    assert_eq!(decoded.extra_frames, 2, "{id}");
                    assert_eq!(decoded.releases.min, release("0.5.23"), "{id}");
                }
                // A shorter form of a kind that has a longer one: the new frames stand in its fields.
                Err(e) => assert!(
                    matches!(
                        (entry["kind"].as_str().unwrap(), count),
                        ("ABORT", 4) | ("ABORT_ACK", 2) | ("STAGING_REQ", 5)
                    ),
                    "{id}: {e:?}"
                ),
            }
        });
    }
}

#[test]
fn nonsense_in_a_field_is_no_message() {
    let cases: &[&[&[u8]]] = &[
        &[b"99999999999999999999", b"4", b"0"],
        &[b"18446744073709551616", b"4", b"0"],
        &[b"-5", b"4", b"0"],
        &[b"007", b"4", b"0"],
        &[b"12a", b"4", b"0"],
        &[b"", b"4", b"0"],
        &[b"77", b"5", b"0"],
        &[b"77", b"44", b"0"],
        &[b"77", b"4", b"-1"],
        &[b"77"],
        &[b"ABORT", b"x", b"10.0.0.21", b"41207"],
        &[b"ABORT", b"77", b"10.0.0.21", b"70000"],
        &[b"ABORT", b"77", b"10.0.0.21"],
        &[b"None", b"10.0.0.21", b"0", b"s:1", b"", b""],
        &[b"77", b"10.0.0.21", b"41207", b"s:1", b"abc", b"3", b"", b"1", b"0", b""],
        &[b"NixlMsgGuard"],
        &[b"NixlMsgGuard", b"None"],
        &[b"MoriMsgGuard"],
        &[b"MoriMsgGuard", b"None"],
        &[b"MoriMsgGuard", b"77", b"4", b"1"],
        &[b"MoriMsgGuard", b"77", b"5", b"1", b""],
        &[b"MoriMsgGuard", b"77", b"4", b"", b""],
        &[b"MoriMsgGuard", b"77", b"10.0.0.21", b"41207", b"io", b"abc", b"3", b"", b"1"],
        &[b"MoriMsgGuard", b"77", b"10.0.0.21", b"41207", b"io", b"", b"", b"", b"", b""],
        &[b"Accept: */*\r"],
        &[b"onnection", b"close"],
        &[b"\x94\x01\x01\x05\x09"],
        &[b"\x94\x01\x01\x05\x02\x00"],
    ];
    for frames in cases {
        let frames: Vec<Vec<u8>> = frames.iter().map(|f| f.to_vec()).collect();
        with_parts(&frames, |parts| assert!(sglang::decode(parts).is_err(), "{frames:?}"));
    }
    let max = [b"18446744073709551615".to_vec(), b"4".to_vec(), b"0".to_vec()];
    with_parts(&max, |parts| assert_eq!(sglang::decode(parts).unwrap().message.room(), Some(u64::MAX)));
}

#[derive(Debug, Default, PartialEq)]
struct Heard {
    messages: Vec<Vec<(Vec<u8>, u64)>>,
    ready: Option<SocketType>,
    not_zmtp: bool,
    malformed: usize,
}

fn feed<'a>(decoder: &mut Decoder, calls: impl IntoIterator<Item = &'a [u8]>) -> Heard {
    let mut heard = Heard::default();
    for call in calls {
        decoder.feed(call, &GRAMMAR, &mut |event| match event {
            Event::Message { parts, .. } => {
                heard.messages.push(parts.frames().map(|f| (f.bytes.to_vec(), f.len)).collect());
            }
            Event::Ready(t) => heard.ready = Some(t),
            Event::NotZmtp => heard.not_zmtp = true,
            Event::Malformed => heard.malformed += 1,
            Event::Greeting | Event::Command | Event::Acquired | Event::Unsupported(_) => {}
        });
    }
    heard
}

/// The messages of a stream as a decoder keeps them.
fn kept(stream: &Value) -> Vec<Vec<(Vec<u8>, u64)>> {
    let messages = stream["messages_hex"].as_array().unwrap();
    messages
        .iter()
        .map(|m| {
            hexes(m)
                .into_iter()
                .map(|f| {
                    let len = u64::try_from(f.len()).unwrap();
                    (f[..f.len().min(BYTES_KEPT)].to_vec(), len)
                })
                .collect()
        })
        .collect()
}

fn streams() -> Vec<Value> {
    fixture("zmtp_streams.json")["streams"].as_array().unwrap().clone()
}

fn is_foreign(stream: &Value) -> bool {
    stream["id"].as_str().unwrap().starts_with("zmtp-foreign")
}

fn decoder_for(stream: &Value) -> Decoder {
    if stream["id"] == "zmtp-midstream" { Decoder::joined() } else { Decoder::at_start() }
}

#[test]
fn every_golden_stream_decodes_in_its_own_calls_and_in_any_others() {
    for stream in streams().iter().filter(|s| !is_foreign(s)) {
        let id = stream["id"].as_str().unwrap();
        let calls = hexes(&stream["client_to_server_writes_hex"]);
        let whole = calls.concat();
        // In its own calls, in one, and in pieces of every size.
        let own: Vec<&[u8]> = calls.iter().map(Vec::as_slice).collect();
        let sizes = (1..200).chain([whole.len()]);
        for split in sizes.map(|size| whole.chunks(size).collect()).chain([own]) {
            let mut decoder = decoder_for(stream);
            let heard = feed(&mut decoder, split);
            assert_eq!(heard.messages, kept(stream), "{id}");
            assert_eq!(heard.malformed, 0, "{id}");
            if id == "zmtp-midstream" {
                assert_eq!(decoder.confidence(), Confidence::Acquired);
            } else {
                assert_eq!(decoder.confidence(), Confidence::Known);
                assert_eq!(heard.ready, Some(SocketType::Push));
            }
        }
        if let Some(answer) = stream["server_to_client_hex"].as_str() {
            let answer = hex(answer);
            let heard = feed(&mut Decoder::at_start(), answer.chunks(7));
            assert_eq!(heard.ready, Some(SocketType::Pull), "{id}");
        }
    }
}

#[test]
fn a_lost_call_costs_the_messages_in_it_only() {
    for stream in streams().iter().filter(|s| !is_foreign(s)) {
        let id = stream["id"].as_str().unwrap();
        let calls = hexes(&stream["client_to_server_writes_hex"]);
        let all = kept(stream);
        let first = if id == "zmtp-midstream" { 0 } else { 3 };
        for lost in first..calls.len() {
            let mut decoder = decoder_for(stream);
            let mut messages = feed(&mut decoder, calls[..lost].iter().map(Vec::as_slice)).messages;
            let len = u64::try_from(calls[lost].len()).unwrap();
            decoder
                .skip(len, &GRAMMAR, &mut |event| {
                    if let Event::Message { parts, .. } = event {
                        messages.push(parts.frames().map(|f| (f.bytes.to_vec(), f.len)).collect());
                    }
                })
                .ok();
            messages.extend(feed(&mut decoder, calls[lost + 1..].iter().map(Vec::as_slice)).messages);
            let gone = if id == "zmtp-burst" { all.len() } else { 1 };
            assert_eq!(messages.len(), all.len() - gone, "{id} without call {lost}");
            assert!(messages.iter().all(|m| all.contains(m)), "{id} without call {lost}");
        }
    }
}

#[test]
fn http_is_not_zmtp_at_the_beginning_and_in_the_middle() {
    for stream in streams().iter().filter(|s| is_foreign(s)) {
        let calls = hexes(&stream["client_to_server_writes_hex"]);
        for mut decoder in [Decoder::at_start(), Decoder::joined()] {
            let heard = feed(&mut decoder, calls.iter().map(Vec::as_slice));
            assert!(heard.not_zmtp && decoder.is_dead());
            assert!(heard.messages.is_empty());
        }
    }
}

#[test]
fn a_stream_is_joined_at_the_first_call_that_begins_at_a_message() {
    for stream in streams().iter().filter(|s| !is_foreign(s)) {
        let calls = hexes(&stream["client_to_server_writes_hex"]);
        let all = kept(stream);
        // Behind the handshake every call of these streams begins at a message, but for the pieces of the
        // large one.
        let first = if stream["id"] == "zmtp-midstream" { 0 } else { 3 };
        for join in first..calls.len() {
            if stream["id"] == "zmtp-meta" && join == 5 {
                continue;
            }
            let mut decoder = Decoder::joined();
            let heard = feed(&mut decoder, calls[join..].iter().map(Vec::as_slice));
            let id = &stream["id"];
            assert!(all.ends_with(&heard.messages) && !heard.messages.is_empty(), "{id} from call {join}");
            let expected = match id.as_str().unwrap() {
                "zmtp-burst" => all.len(),
                "zmtp-meta" if join == 6 => 1,
                _ => all.len() - (join - first),
            };
            assert_eq!(heard.messages.len(), expected, "{id} from call {join}");
        }
    }
}
