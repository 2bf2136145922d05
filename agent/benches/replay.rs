//! How fast a capture is replayed: packets of control traffic per second, from a file's bytes to socket events.
//!
//! To compare with tshark on the same file, let the bench write it:
//! `ROOMTRACE_BENCH_CAPTURE=/tmp/bench.pcap cargo bench --bench replay`, then
//! `time tshark -r /tmp/bench.pcap -T fields -e tcp.len > /dev/null`.
#![allow(missing_docs, clippy::unwrap_used, clippy::indexing_slicing, reason = "a bench")]

use std::hint::black_box;
use std::io::Cursor;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use roomtrace::replay::Replay;

/// Packets in the generated capture.
const PACKETS: u32 = 1_000_000;
/// Connections they belong to.
const CONNECTIONS: u32 = 64;

/// Connections in the manner of rank sockets: messages of 27 to 1000 bytes, every second packet an acknowledgement, one
/// segment in a hundred before its turn, one in a hundred sent twice.
fn capture() -> Vec<u8> {
    let mut file = Vec::with_capacity(PACKETS as usize * 400);
    for n in [0xa1b2_3c4d_u32, 0x0004_0002, 0, 0, 262_144, 1] {
        file.extend(n.to_le_bytes());
    }
    let mut seq = vec![1_u32; CONNECTIONS as usize];
    let body: Vec<u8> = (0..2000_u32).map(|n| n.to_le_bytes()[0]).collect();
    let mut time = 0_u32;
    for n in 0..PACKETS / 2 {
        let c = n % CONNECTIONS;
        let len = 27 + (n * 7919) % 974;
        let at = seq[c as usize];
        let end = at + len;
        let payload = &body[..len as usize];
        let half = len / 2;
        match n % 100 {
            // The second half before the first, which is then sent whole.
            7 => packet(&mut file, &mut time, c, true, at + half, 1, &payload[half as usize..]),
            8 => packet(&mut file, &mut time, c, true, at, 1, payload),
            _ => {}
        }
        packet(&mut file, &mut time, c, true, at, 1, payload);
        packet(&mut file, &mut time, c, false, 1, end, &[]);
        seq[c as usize] = end;
    }
    file
}

fn packet(file: &mut Vec<u8>, time: &mut u32, c: u32, up: bool, seq: u32, ack: u32, payload: &[u8]) {
    *time += 10_000;
    let len = u32::try_from(14 + 20 + 32 + payload.len()).unwrap();
    for n in [1_700_000_000 + *time / 1_000_000_000, *time % 1_000_000_000, len, len] {
        file.extend(n.to_le_bytes());
    }
    file.extend([2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0]);
    file.extend(u16::try_from(len - 14).unwrap().to_be_bytes());
    file.extend([0, 1, 0x40, 0, 64, 6, 0, 0]);
    let (client, server) = ([10, 0, 0, 1], [10, 0, 0, 2]);
    let ports = [40_000 + u16::try_from(c).unwrap(), 5000];
    let (hosts, ports) =
        if up { ([client, server], ports) } else { ([server, client], [ports[1], ports[0]]) };
    file.extend(hosts.concat());
    file.extend(ports.map(u16::to_be_bytes).concat());
    file.extend(seq.to_be_bytes());
    file.extend(ack.to_be_bytes());
    file.extend([0x80, 16, 0x10, 0, 0, 0, 0, 0, 1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
    file.extend(payload);
}

fn bench(c: &mut Criterion) {
    let file = capture();
    if let Some(path) = std::env::var_os("ROOMTRACE_BENCH_CAPTURE") {
        std::fs::write(path, &file).unwrap();
    }
    let packets = Replay::from_reader(Cursor::new(&file)).unwrap().run(&mut |_| ()).unwrap().packets;
    let mut group = c.benchmark_group("replay");
    group.sample_size(10).throughput(Throughput::Elements(packets));
    group.bench_function("packets", |b| {
        b.iter(|| {
            let mut bytes = 0_u64;
            let mut replay = Replay::from_reader(Cursor::new(&file)).unwrap();
            replay
                .run(&mut |event| {
                    if let roomtrace::event::What::Bytes(b) = black_box(event).what {
                        bytes += u64::from(b.len);
                    }
                })
                .unwrap();
            bytes
        });
    });
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
