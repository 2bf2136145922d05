//! How many of the engines' spans a second one core reads and joins to rooms.
//!
//! `cargo bench -p roomtrace --bench spans`. Elements are spans: requests of prefill in the shape of SGLang 0.5.23, nine spans
//! each, in four OTLP requests. The bar is 20 000 a second.
#![allow(missing_docs, clippy::unwrap_used, reason = "a bench")]

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use roomtrace::event::{Mono, SECOND};
use roomtrace::rooms::model::Input;
use roomtrace::rooms::{Config, RoomTable};
use roomtrace::spans::decode;

#[path = "../tests/spans_support/mod.rs"]
mod spans_support;
use spans_support::{Engine, Release, bytes_of};

/// Requests in a round.
const REQUESTS: u64 = 256;

/// What the processes of an engine send of a round.
fn round(first: u64) -> Vec<Vec<u8>> {
    let mut batches = Vec::new();
    for room in first..first + REQUESTS {
        let sent = Engine::prefill(Release::Hex, room, 1_790_000_000 * SECOND).sent(50, 100);
        batches.extend([sent.front, sent.computed, sent.rest, sent.request].map(bytes_of));
    }
    batches
}

fn spans(criterion: &mut Criterion) {
    let spans: u64 = round(1).iter().map(|b| decode(b).unwrap().total()).sum();
    let mut group = criterion.benchmark_group("spans");
    group.throughput(Throughput::Elements(spans));
    let batches = round(1);
    group.bench_function("decode", |b| {
        b.iter(|| batches.iter().map(|batch| decode(black_box(batch)).unwrap().spans.len()).sum::<usize>());
    });
    let mut table = RoomTable::new(Config::default());
    let (mut next, mut at, mut out) = (1, Mono(SECOND), Vec::new());
    group.bench_function("decode_and_join", |b| {
        b.iter_batched(
            || {
                next += REQUESTS;
                round(next)
            },
            |batches| {
                for batch in &batches {
                    let decoded = decode(black_box(batch)).unwrap();
                    table.handle(&Input::Spans { at, offset: 0, spans: &decoded.spans }, &mut out);
                }
                at = at.plus(SECOND / 10);
                table.tick(at, &mut out);
                out.clear();
            },
            BatchSize::SmallInput,
        );
    });
    group.finish();
}

criterion_group!(benches, spans);
criterion_main!(benches);
