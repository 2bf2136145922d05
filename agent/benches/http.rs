//! How many exchanges a second one core reads: a request of 8 KB with its answer.
//!
//! `cargo bench -p roomtrace --bench http`. Elements are exchanges. The bar is 2 000 a second on 5 % of a core, kernel
//! side included: 25 µs each.
#![allow(missing_docs, reason = "criterion's macros")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use roomtrace::event::Direction::{Received, Sent};
use roomtrace::http::{Counters, Decoder, Stretch};

/// What is shipped of each end of a call, bytes.
const KEEP: usize = 1024;

fn request() -> Vec<u8> {
    let text = "Tell me a \\\"story\\\" of four engines and the sea. ".repeat(165);
    let body = format!(
        "{{\"text\":\"{text}\",\"sampling_params\":{{\"max_new_tokens\":64}},\"rid\":\"9f1c2a7be1d24a6d8d4f1c0b2a3e4f50\",\
         \"bootstrap_host\":\"10.0.0.1\",\"bootstrap_port\":8998,\"bootstrap_room\":5123456789012345678}}"
    );
    let len = body.len();
    format!(
        "POST /generate HTTP/1.1\r\ncontent-type: application/json\r\naccept: */*\r\nhost: 10.0.0.1:30000\r\n\
         x-request-id: 9f1c2a7b\r\ncontent-length: {len}\r\n\r\n{body}"
    )
    .into_bytes()
}

fn answer() -> Vec<u8> {
    let body = "{\"text\":\"\",\"output_ids\":[7],\"meta_info\":{\"id\":\"9f1c2a7be1d24a6d8d4f1c0b2a3e4f50\",\
                \"finish_reason\":{\"type\":\"length\",\"length\":1},\"prompt_tokens\":1700,\"e2e_latency\":0.25}}";
    let len = body.len();
    format!(
        "HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 00:00:00 GMT\r\nserver: uvicorn\r\ncontent-length: {len}\r\n\
         content-type: application/json\r\n\r\n{body}"
    )
    .into_bytes()
}

fn exchanges(criterion: &mut Criterion) {
    let (request, answer) = (request(), answer());
    assert!((8_000..9_000).contains(&request.len()));
    let (head, rest) = request.split_at(KEEP);
    let (_, tail) = rest.split_at(rest.len() - KEEP);
    let whole = [(Received, Stretch::Bytes { bytes: &request, opens: true })];
    let ends = [
        (Received, Stretch::Bytes { bytes: head, opens: true }),
        (Received, Stretch::Missing((request.len() - 2 * KEEP) as u64)),
        (Received, Stretch::Bytes { bytes: tail, opens: false }),
    ];
    let mut group = criterion.benchmark_group("http");
    group.throughput(Throughput::Elements(1));
    for (name, stretches) in [("whole", &whole[..]), ("head_and_tail", &ends[..])] {
        let (mut decoder, mut counters, mut events) = (Decoder::at_start(), Counters::default(), 0u64);
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                for (direction, stretch) in stretches {
                    decoder.feed(*direction, black_box(*stretch), &mut counters, &mut |event| {
                        black_box(event);
                        events += 1;
                    });
                }
                let answer = Stretch::Bytes { bytes: black_box(&answer), opens: true };
                decoder.feed(Sent, answer, &mut counters, &mut |event| {
                    black_box(event);
                    events += 1;
                });
            });
        });
        assert_eq!(counters.rooms, counters.requests);
        assert_eq!(counters.answers, counters.requests);
    }
    group.finish();
}

criterion_group!(benches, exchanges);
criterion_main!(benches);
