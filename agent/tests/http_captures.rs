//! The bootstrap server in captures of the real engine, through the stages as they stand before this one.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod http_support;

use std::collections::BTreeMap;
use std::path::Path;

use http_support::brief;
use roomtrace::event::{Direction, TcpState, What};
use roomtrace::http::event::{Answered, Event, Said};
use roomtrace::http::{Counters, Decoder, Ending, Stretch};
use roomtrace::replay::Replay;
use roomtrace::stream::{Call, Held, Lane};

struct Socket {
    lanes: [Lane; 2],
    decoder: Decoder,
    events: Vec<Event>,
}

/// Events of every connection in which HTTP was found.
fn connections(capture: &str) -> Vec<Vec<Event>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/captures").join(capture);
    let mut sockets: BTreeMap<u64, Socket> = BTreeMap::new();
    let (mut held, mut counters) = (Held::new(1 << 20), Counters::default());
    Replay::open(path)
        .unwrap()
        .run(&mut |event| {
            let socket = sockets.entry(event.socket.0).or_insert_with(|| Socket {
                lanes: [Lane::new(), Lane::new()],
                decoder: Decoder::joined(),
                events: Vec::new(),
            });
            let Socket { lanes, decoder, events } = socket;
            let mut sink = |event| events.push(event);
            match event.what {
                What::State(change) if change.new == TcpState::Established => {
                    *decoder = Decoder::at_start();
                    lanes[0].begin(change.sequence.write);
                    lanes[1].begin(change.sequence.copied);
                }
                What::State(change) if change.new == TcpState::CloseWait => {
                    decoder.end(Ending::Fin(Direction::Received), &mut counters, &mut sink);
                }
                What::State(change) if change.new == TcpState::FinWait1 => {
                    decoder.end(Ending::Fin(Direction::Sent), &mut counters, &mut sink);
                }
                What::Bytes(bytes) => {
                    let call =
                        Call { at: event.at, end: bytes.end, len: bytes.len, body: bytes.body, fin: false };
                    let lane = usize::from(bytes.direction == Direction::Received);
                    lanes[lane].push(&call, &mut held, &mut |piece| {
                        for stretch in Stretch::of(piece) {
                            decoder.feed(bytes.direction, stretch, &mut counters, &mut sink);
                        }
                    });
                }
                _ => {}
            }
        })
        .unwrap();
    sockets
        .into_values()
        .map(|s| s.events)
        .filter(|e| e.iter().any(|e| matches!(e, Event::RequestBegun { .. })))
        .collect()
}

#[test]
fn decode_asks_for_topology_and_rank_and_for_health() {
    for capture in ["a", "b", "c", "f", "g", "h_closed", "l", "m", "nixl_abc", "s", "uv"] {
        let connections = connections(&format!("{capture}.pcap"));
        assert!(!connections.is_empty(), "{capture}");
        let (mut asked, mut answered, mut topologies, mut ranks) = (0, 0, 0, 0);
        for event in connections.iter().flatten() {
            match event {
                Event::RequestWhole { said: Said::Query(query), .. } => {
                    topologies += i32::from(query.asks_topology());
                    asked += 1;
                }
                Event::RequestWhole { said: Said::Nothing, .. } => asked += 1,
                Event::AnswerEnd { said, .. } => {
                    answered += 1;
                    match said {
                        Answered::Topology(t) => {
                            assert_eq!((t.dp_size, t.pp_size), (Some(1), Some(1)));
                            topologies -= 1;
                        }
                        Answered::Rank(ip, port) => {
                            assert!(ip.is_loopback() || !ip.is_unspecified());
                            assert!(*port > 0);
                            ranks += 1;
                        }
                        _ => {}
                    }
                }
                Event::Unread(why) => panic!("{capture}: {why:?}"),
                Event::Lost { .. } => panic!("{capture}: {:?}", brief(&connections.concat())),
                _ => {}
            }
        }
        assert!(asked > 0 && topologies == 0, "{capture}: {asked} {answered} {topologies} {ranks}");
        assert!(answered == asked, "{capture}: {:?}", brief(&connections.concat()));
    }
}
