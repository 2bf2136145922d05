//! The bootstrap server in captures of the real engine, through the stages as they stand before this one.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod http_support;

use std::collections::BTreeMap;
use std::path::Path;

use http_support::brief;
use roomtrace::control::{Control, Limits};
use roomtrace::event::{Direction, Mono, SECOND, TcpState, What};
use roomtrace::http::event::{Answered, Event, Said};
use roomtrace::http::{Counters, Decoder, Ending, Stretch};
use roomtrace::replay::Replay;
use roomtrace::rooms::model::Input;
use roomtrace::stream::{Call, Held, Lane};

const CAPTURES: [&str; 11] = ["a", "b", "c", "f", "g", "h_closed", "l", "m", "nixl_abc", "s", "uv"];

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
    for capture in CAPTURES {
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

/// What the rooms are told of HTTP in a capture, by what is told, at the server's and at the client's end.
fn told(capture: &str) -> ([Vec<String>; 2], Control) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/captures").join(capture);
    let mut control = Control::new(Limits::default());
    let mut told = [Vec::new(), Vec::new()];
    let mut last = Mono(0);
    let mut sink = |input: Input<'_>| match input {
        Input::Request { server, n, step, .. } => told[usize::from(server)].push(format!("{n} {step:?}")),
        Input::Bootstrap { server, n, step, .. } => told[usize::from(server)].push(format!("{n} {step:?}")),
        Input::Unreadable { why, .. } => panic!("{why:?}"),
        _ => {}
    };
    Replay::open(path)
        .unwrap()
        .run(&mut |event| {
            last = event.at;
            control.handle(&event, &mut sink);
        })
        .unwrap();
    control.tick(last.plus(20 * SECOND), &mut sink);
    (told, control)
}

#[test]
fn the_rooms_hear_the_same_at_both_ends() {
    for capture in CAPTURES {
        let ([client, server], control) = told(&format!("{capture}.pcap"));
        let count = |what: &str| server.iter().filter(|t| t.contains(what)).count();
        assert!(
            count("Query(") > 0 && count("Query(") == count("Topology(") + count("RankIs("),
            "{server:?}"
        );
        assert_eq!(count("Query(") * 2, server.len(), "nothing else is told: {server:?}");
        let sorted = |mut list: Vec<String>| {
            list.sort();
            list
        };
        assert_eq!(sorted(client), sorted(server));
        let counters = control.counters();
        assert_eq!((counters.request_holes.count, control.unread().map(|(_, n)| n).sum::<u64>()), (0, 0));
        assert_eq!(counters.connections().map(|(_, n)| n).sum::<u64>(), 0, "{capture}: every one was closed");
    }
}
