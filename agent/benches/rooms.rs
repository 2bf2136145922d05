//! Cost of one message in the room table, and of a tick over many open rooms.
//!
//! `room_life/*` counts messages: METADATA and STATUS of rooms that conclude, their `Closed` events included.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "a bench"
)]

use std::hint::black_box;
use std::net::SocketAddr;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use roomtrace::event::{Addresses, Direction, Mono, SECOND, SocketId};
use roomtrace::rooms::model::{Away, Connection, Event, Input};
use roomtrace::rooms::{Config, RoomTable, SavedRooms, Survivors};
use roomtrace::sglang::message::{
    Backend, Decoded, Endpoint, KvPoll, Message, Metadata, Release, Releases, Status,
};

const RELEASES: Releases = Releases { min: Release::new(0, 5, 17, 0), max: Release::new(0, 5, 23, 0) };

/// The sending and the receiving end of a connection.
const ENDS: [Direction; 2] = [Direction::Sent, Direction::Received];

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn connection(socket: u64, local: &str, peer: &str) -> Connection {
    let addresses = Addresses { local: address(local), peer: address(peer) };
    Connection {
        socket: SocketId(socket),
        addresses,
        netns: 1,
        task: None,
        preexisting: false,
        since: Mono(0),
    }
}

struct Feed {
    table: RoomTable,
    out: Vec<Event>,
    now: u64,
    asks: [Connection; 2],
    tells: [Connection; 2],
}

impl Feed {
    fn new() -> Self {
        let (p, d) = ("10.0.0.1:41000", "10.0.0.2:42000");
        Self {
            table: RoomTable::new(Config::default()),
            out: Vec::new(),
            now: 1_000 * SECOND,
            asks: [connection(1, "10.0.0.2:50000", p), connection(2, p, "10.0.0.2:50000")],
            tells: [connection(3, "10.0.0.1:50001", d), connection(4, d, "10.0.0.1:50001")],
        }
    }

    fn put(&mut self, connection: Connection, direction: Direction, message: Message<'_>) {
        self.now += 1000;
        let decoded = Decoded { backend: Backend::Mooncake, releases: RELEASES, extra_frames: 0, message };
        let input = Input::Message { at: Mono(self.now), connection, direction, end: 1, decoded: &decoded };
        self.table.handle(black_box(&input), &mut self.out);
    }

    fn metadata(&mut self, room: u64, end: usize) {
        let message = Message::Metadata(Metadata {
            room,
            decode: Some(Endpoint {
                ip: Some(std::net::Ipv4Addr::new(10, 0, 0, 2).into()),
                host: "10.0.0.2",
                port: 42000,
            }),
            session: "10.0.0.2:16000",
            pages: 8,
            aux_index: Some(1),
            dummy: Some(false),
            required: Some(1),
            decode_prefix_len: Some(0),
        });
        self.put(self.asks[end], ENDS[end], message);
    }

    fn status(&mut self, room: u64, end: usize, status: KvPoll) {
        let status = Status { room, status, prefill_rank: Some(0), reason: "" };
        self.put(self.tells[end], ENDS[end], Message::Status(status));
    }
}

fn room_life(c: &mut Criterion) {
    let mut group = c.benchmark_group("room_life");
    // Decode sends METADATA and receives STATUS; both roles on one host see four messages.
    let views: [(&str, &[usize], &[usize]); 2] = [("decode", &[0], &[1]), ("both", &[0, 1], &[0, 1])];
    for (name, asks, tells) in views {
        group.throughput(Throughput::Elements((asks.len() + tells.len()) as u64));
        let mut feed = Feed::new();
        let mut number = 1u64;
        group.bench_function(name, |b| {
            b.iter(|| {
                number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let room = number >> 1;
                for e in asks {
                    feed.metadata(room, *e);
                }
                for e in tells {
                    feed.status(room, *e, KvPoll::Success);
                }
                feed.out.clear();
            });
        });
    }
    group.throughput(Throughput::Elements(1));
    group.bench_function("status_that_ends_nothing", |b| {
        let mut feed = Feed::new();
        feed.metadata(1, 0);
        b.iter(|| feed.status(1, 1, KvPoll::WaitingForInput));
    });
    group.finish();
}

fn many_open(c: &mut Criterion) {
    let mut group = c.benchmark_group("tick");
    group.sample_size(20);
    group.bench_function("100k_open_not_due", |b| {
        let mut feed = Feed::new();
        (0..100_000).for_each(|n| feed.metadata(n, 1));
        b.iter(|| {
            feed.now += 1000;
            feed.table.tick(black_box(Mono(feed.now)), &mut feed.out);
        });
    });
    group.bench_function("2k_pinned_at_once", |b| {
        b.iter_batched(
            || {
                let mut feed = Feed::new();
                (0..2000).for_each(|n| feed.metadata(n, 1));
                feed
            },
            |mut feed| {
                feed.table.tick(Mono(feed.now + 11 * SECOND), &mut feed.out);
                feed
            },
            BatchSize::LargeInput,
        );
    });
    group.finish();
}

/// What the thread that observes does for a state file, and what another thread does with it: 10 000 open rooms, half of
/// them pinned.
fn state(c: &mut Criterion) {
    let mut feed = Feed::new();
    for n in 0..10_000 {
        if n == 5000 {
            feed.now += 11 * SECOND;
            feed.table.tick(Mono(feed.now), &mut feed.out);
        }
        feed.metadata(n, 1);
    }
    let saved = feed.table.save();
    let text = serde_json::to_vec(&saved).unwrap();
    println!("state of 10 000 rooms: {} bytes", text.len());
    let mut group = c.benchmark_group("state");
    group.sample_size(20);
    group.bench_function("save_10k_rooms", |b| b.iter(|| feed.table.save()));
    group.bench_function("write_10k_rooms", |b| b.iter(|| serde_json::to_vec(&saved).unwrap()));
    group.bench_function("restore_10k_rooms", |b| {
        b.iter(|| {
            let saved: SavedRooms = serde_json::from_slice(&text).unwrap();
            let now = Mono(feed.now);
            let away = Away { from: now, to: now };
            let mut table = RoomTable::restore(Config::default(), saved, away, &Survivors::default());
            table.returned(|_| true, &[], now, &mut Vec::new());
            table
        });
    });
    group.finish();
}

criterion_group!(benches, room_life, many_open, state);
criterion_main!(benches);
