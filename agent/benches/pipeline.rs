//! How many control messages a second one core takes from socket event to closed room and its record: each room is one
//! METADATA received and one STATUS sent by each prefill rank of the host (`rooms/4`: tensor parallelism 4).
//!
//! `cargo bench -p roomtrace --bench pipeline`. Elements are messages; the bar is 1 M a second.
#![allow(missing_docs, reason = "criterion's macros")]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a bench")]

#[path = "../tests/support/wire.rs"]
mod wire;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use roomtrace::control::Limits;
use roomtrace::event::{
    Addresses, Body, Bytes, Direction, Mono, Sequence, SocketEvent, SocketId, StateChange, TcpState, What,
};
use roomtrace::pipeline::Pipeline;
use roomtrace::rooms::Config;

/// 19 digits, so that every room number has the same length and is written in place.
const FIRST: u64 = 1_000_000_000_000_000_000;
const ROOMS: u64 = 1000;

/// One end of a connection that only sends or only receives.
struct Wire {
    socket: SocketId,
    addresses: Addresses,
    direction: Direction,
    end: u32,
}

impl Wire {
    fn open(n: u64, local: &str, peer: &str, direction: Direction, pipeline: &mut Pipeline) -> Self {
        let addresses = Addresses { local: local.parse().unwrap(), peer: peer.parse().unwrap() };
        let wire = Self { socket: SocketId(n), addresses, direction, end: 1000 };
        let old = if direction == Direction::Sent { TcpState::SynSent } else { TcpState::SynRecv };
        let sequence = Sequence { write: 1000, una: 1000, copied: 1000, rcv_nxt: 1000 };
        let change = StateChange { old, new: TcpState::Established, error: 0, sequence };
        pipeline.handle(&wire.event(0, What::State(change)));
        wire
    }

    fn event<'a>(&self, at: u64, what: What<'a>) -> SocketEvent<'a> {
        SocketEvent {
            at: Mono(at),
            socket: self.socket,
            netns: 1,
            addresses: self.addresses,
            task: None,
            what,
        }
    }

    fn call(&mut self, at: u64, bytes: &[u8], pipeline: &mut Pipeline) {
        let len = u32::try_from(bytes.len()).unwrap();
        self.end = self.end.wrapping_add(len);
        let (una, next) = if self.direction == Direction::Sent { (self.end, 1000) } else { (1000, self.end) };
        let moved = Bytes {
            direction: self.direction,
            end: self.end,
            len,
            body: Body::Whole(bytes),
            snd_una: una,
            rcv_nxt: next,
        };
        pipeline.handle(&self.event(at, What::Bytes(moved)));
    }
}

/// A prefill rank of this host and the decode rank that it serves: the messages between them.
struct Pair {
    from_decode: Wire,
    to_decode: Wire,
    metadata: Vec<u8>,
    status: Vec<u8>,
}

impl Pair {
    fn open(rank: u64, pipeline: &mut Pipeline) -> Self {
        let decode = format!("10.0.0.{}", 2 + rank);
        let (local, peer) = (format!("10.0.0.1:{}", 5000 + rank), format!("{decode}:40000"));
        let mut from_decode = Wire::open(2 * rank, &local, &peer, Direction::Received, pipeline);
        let (local, peer) = (format!("10.0.0.1:{}", 41000 + rank), format!("{decode}:41207"));
        let mut to_decode = Wire::open(2 * rank + 1, &local, &peer, Direction::Sent, pipeline);
        from_decode.call(1, &wire::handshake(), pipeline);
        to_decode.call(1, &wire::handshake(), pipeline);
        let metadata = wire::metadata_from(&decode, FIRST, 8, 1);
        let status = wire::message(&[FIRST.to_string().as_bytes(), b"4", rank.to_string().as_bytes()]);
        Self { from_decode, to_decode, metadata, status }
    }
}

fn rooms(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("pipeline");
    for ranks in [1, 4, 8] {
        let mut pipeline = Pipeline::new(Limits::default(), Config::default());
        let mut pairs: Vec<_> = (0..ranks).map(|rank| Pair::open(rank, &mut pipeline)).collect();
        let (mut room, mut now) = (FIRST, 1_000_000);
        group.throughput(Throughput::Elements(2 * ranks * ROOMS));
        group.bench_function(format!("rooms/{ranks}"), |bencher| {
            bencher.iter(|| {
                for _ in 0..ROOMS {
                    room += 1;
                    now += 2000;
                    let digits = room.to_string();
                    for pair in &mut pairs {
                        pair.metadata[2..21].copy_from_slice(digits.as_bytes());
                        pair.from_decode.call(now, &pair.metadata, &mut pipeline);
                    }
                    for pair in &mut pairs {
                        pair.status[2..21].copy_from_slice(digits.as_bytes());
                        pair.to_decode.call(now + 1000, &pair.status, &mut pipeline);
                    }
                }
                pipeline.tick(Mono(now));
                let closed = pipeline.events().count();
                assert_eq!(closed, usize::try_from(ROOMS).unwrap());
            });
        });
    }
    group.finish();
}

criterion_group!(benches, rooms);
criterion_main!(benches);
