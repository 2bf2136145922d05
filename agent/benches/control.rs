//! How many control messages a second one core takes from socket event to room input.
//!
//! `cargo bench -p roomtrace --bench control`. Elements are messages; the bar is 1 M a second.
#![allow(missing_docs, reason = "criterion's macros")]
#![allow(clippy::unwrap_used, reason = "a bench")]

#[path = "../tests/support/wire.rs"]
mod wire;

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use roomtrace::control::{Control, Limits};
use roomtrace::event::{Addresses, Body, Bytes, Direction, Mono, SocketEvent, SocketId, What};
use roomtrace::rooms::model::Input;

const ROOM: u64 = 5_123_456_789_012_345_678;

/// METADATA of SGLang 0.5.17 and later with 8 pages.
fn metadata(room: u64) -> Vec<u8> {
    wire::metadata_from("10.0.0.21", room, 8, 1)
}

/// Sends the calls in turn on 64 connections into a sink that only counts.
fn stream(criterion: &mut Criterion, name: &str, one: fn(u64) -> Vec<u8>) {
    let mut group = criterion.benchmark_group(name);
    for per_call in [1u64, 80] {
        let calls: Vec<Vec<u8>> =
            (0..64).map(|c| (0..per_call).flat_map(|i| one(ROOM + c * per_call + i)).collect()).collect();
        let addresses =
            Addresses { local: "10.0.0.1:40000".parse().unwrap(), peer: "10.0.0.2:50000".parse().unwrap() };
        let mut control = Control::new(Limits::default());
        let mut ends = [1_000u32; 64];
        let mut now = 0;
        group.throughput(Throughput::Elements(64 * per_call));
        group.bench_function(BenchmarkId::from_parameter(per_call), |bencher| {
            bencher.iter(|| {
                let mut messages = 0u64;
                for ((id, call), end) in (0u64..).zip(&calls).zip(&mut ends) {
                    now += 1_000;
                    let len = u32::try_from(call.len()).unwrap();
                    let una = *end;
                    *end = end.wrapping_add(len);
                    let bytes = Bytes {
                        direction: Direction::Sent,
                        end: *end,
                        len,
                        body: Body::Whole(call),
                        snd_una: una,
                        rcv_nxt: 0,
                    };
                    let event = SocketEvent {
                        at: Mono(now),
                        socket: SocketId(id),
                        netns: 0,
                        addresses,
                        task: None,
                        what: What::Bytes(bytes),
                    };
                    control.handle(&event, &mut |input| {
                        messages += u64::from(matches!(black_box(input), Input::Message { .. }));
                    });
                }
                assert_eq!(messages, 64 * per_call);
                messages
            });
        });
    }
    group.finish();
}

fn benches(criterion: &mut Criterion) {
    stream(criterion, "status", wire::status);
    stream(criterion, "metadata", metadata);
}

criterion_group!(control, benches);
criterion_main!(control);
