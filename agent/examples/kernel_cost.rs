//! What the kernel programs cost, from the kernel's own statistics (`BPF_ENABLE_STATS`): a send on a connection
//! that is not watched and one of a streamed HTTP answer against an empty program on the same hook, and a captured send
//! and receive of 100 bytes.
//!
//! Needs root. Prints one JSON object; `cargo xtask bench` reads it.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::cast_precision_loss,
    reason = "a measuring tool"
)]

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use aya::programs::{BtfTracePoint, loaded_programs};
use aya::sys::{Stats, enable_stats};
use aya::{Btf, EbpfLoader, include_bytes_aligned};
use roomtrace::kernel::{Capture, CaptureConfig};

static OBJECT: &[u8] = include_bytes_aligned!("../../ebpf/roomtrace.bpf.o");
/// Short rounds: one in which something else took the CPU inside a program is an outlier, and the median ignores it.
const CALLS: u32 = 2_000;
const ROUNDS: usize = 200;

fn main() -> anyhow::Result<()> {
    let _statistics = enable_stats(Stats::RunTime)?;
    // One after the other, so that neither warms the caches for the other.
    let empty = median(&empty()?);
    let mut capture = Capture::start(&CaptureConfig::default())?;
    let mut foreign = pair(b"GET / HTTP/1.1\r\n")?;
    let mut zmtp = pair(b"\xff\0\0\0\0\0\0\0\0\x7f\x03")?;
    // The other two are judged already: this process may count among the engines from here on.
    anyhow::ensure!(capture.watch_process(std::process::id())?, "no place in the table of processes");
    let mut streamed = streamed()?;
    anyhow::ensure!(
        capture.sockets()?.http == 2,
        "the streamed answer is not followed: {:?}",
        capture.sockets()
    );
    let mut unrelated = Vec::new();
    let mut muted = Vec::new();
    let mut captured = Vec::new();
    for _ in 0..ROUNDS {
        let [_, send, _] = per_run(|| run(&mut foreign, &mut || ()));
        unrelated.push(send);
        let [_, send, _] = per_run(|| run(&mut streamed, &mut || ()));
        muted.push(send);
        let [_, send, receive] = per_run(|| {
            run(&mut zmtp, &mut || {
                capture.drain(usize::MAX, &mut |_| ());
            });
        });
        captured.push((send, receive));
    }
    let sends: Vec<f64> = captured.iter().map(|c| c.0).collect();
    let receives: Vec<f64> = captured.iter().map(|c| c.1).collect();
    let both: Vec<f64> = captured.iter().map(|c| c.0 + c.1).collect();
    let counters = capture.counters()?;
    println!(
        "{{\"calls_per_round\":{CALLS},\"rounds\":{ROUNDS},\"empty_ns\":{:.1},\"unrelated_send_above_empty_ns\":{:.1},\
         \"muted_send_above_empty_ns\":{:.1},\
         \"captured_send_ns\":{:.1},\"captured_receive_ns\":{:.1},\"captured_send_and_receive_ns\":{:.1},\
         \"records\":{},\"ring_full\":{}}}",
        empty,
        median(&unrelated) - empty,
        median(&muted) - empty,
        median(&sends),
        median(&receives),
        median(&both),
        counters.records,
        counters.ring_full,
    );
    Ok(())
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Nanoseconds per run of a program that does nothing.
fn empty() -> anyhow::Result<Vec<f64>> {
    let mut ebpf = EbpfLoader::new().load(OBJECT)?;
    let program: &mut BtfTracePoint = ebpf.program_mut("rt_empty").unwrap().try_into()?;
    program.load("sock_send_length", &Btf::from_sys_fs()?)?;
    program.attach()?;
    let mut connection = pair(b"GET / HTTP/1.1\r\n")?;
    Ok((0..ROUNDS).map(|_| per_run(|| run(&mut connection, &mut || ()))[0]).collect())
}

/// Nanoseconds per run of this process's `rt_empty`, `rt_send`, `rt_receive` during `work`.
fn per_run(work: impl FnOnce()) -> [f64; 3] {
    let own = own();
    let before = totals(&own);
    work();
    let after = totals(&own);
    std::array::from_fn(|n| {
        let (time, runs) = (after[n].0.saturating_sub(before[n].0), after[n].1 - before[n].1);
        time.as_nanos() as f64 / runs as f64
    })
}

/// Ids of the programs that this process holds: others may run the agent on this machine meanwhile.
fn own() -> BTreeSet<u32> {
    let texts = std::fs::read_dir("/proc/self/fdinfo").unwrap().flatten();
    texts
        .filter_map(|file| std::fs::read_to_string(file.path()).ok())
        .filter_map(|text| text.lines().find_map(|l| l.strip_prefix("prog_id:")?.trim().parse().ok()))
        .collect()
}

fn totals(own: &BTreeSet<u32>) -> [(Duration, u64); 3] {
    let all: Vec<_> = loaded_programs().filter_map(Result::ok).filter(|p| own.contains(&p.id())).collect();
    ["rt_empty", "rt_send", "rt_receive"].map(|name| {
        all.iter()
            .filter(|p| p.name_as_str() == Some(name))
            .fold((Duration::ZERO, 0), |sum, p| (sum.0 + p.run_time(), sum.1 + p.run_count()))
    })
}

fn run((a, b): &mut (TcpStream, TcpStream), between: &mut dyn FnMut()) {
    let out = [7u8; 100];
    let mut into = [0u8; 100];
    for n in 0..CALLS {
        a.write_all(&out).unwrap();
        b.read_exact(&mut into).unwrap();
        if n % 256 == 0 {
            between();
        }
    }
}

/// A connection on which the first end answers, and has sent as much of that as is shipped.
fn streamed() -> anyhow::Result<(TcpStream, TcpStream)> {
    let (mut client, mut server) = pair(b"GET / HTTP/1.1\r\n\r\n")?;
    server.set_nodelay(true)?;
    for _ in 0..8 {
        server.write_all(&[7; 100])?;
        client.read_exact(&mut [0; 100])?;
    }
    Ok((server, client))
}

fn pair(first: &[u8]) -> anyhow::Result<(TcpStream, TcpStream)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut a = TcpStream::connect(listener.local_addr()?)?;
    let (mut b, _) = listener.accept()?;
    a.set_nodelay(true)?;
    a.write_all(first)?;
    b.read_exact(&mut vec![0; first.len()])?;
    Ok((a, b))
}
