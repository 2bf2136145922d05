//! Control sends at a fixed rate and nothing else: one process of PUSH sockets, one of PULL sockets, a small STATUS a
//! send. libzmq puts what waits on one connection into one call, so the messages take turns over many connections:
//! then nearly every one is a system call of its own.

use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::driver::{Files, Output, Place};
use crate::net::{self, Outbox, Side};
use crate::rank::PROCESS_VARIABLE;
use crate::wire::{self, Engine};

/// How often messages are handed over.
const TICK: Duration = Duration::from_millis(1);
/// How long the last messages may take to arrive.
const ARRIVES: Duration = Duration::from_secs(30);
/// Value of the rank variable that makes a receiver: followed by address and number of sockets.
pub(crate) const RECEIVER: &str = "raw-receiver";

/// Sends `rate` messages a second for `duration` over `connections` connections; prints the counts.
///
/// # Errors
/// When the receiver does not come up, or has not got every message.
pub(crate) fn run(
    place: Place,
    rate: u32,
    duration: Duration,
    connections: u16,
    out: &Path,
    files: &Files,
) -> Result<()> {
    let mut output = Output::new(out)?;
    std::fs::write("/proc/self/comm", "sglang::scheduler").context("set the process name")?;
    let mut child = Command::new(std::env::current_exe()?)
        .arg0("sglang::scheduler")
        .env(PROCESS_VARIABLE, format!("{RECEIVER} {} {connections}", place.bind))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("start the receiver")?;
    let mut input = child.stdin.take().context("a receiver without input")?;
    let mut lines = BufReader::new(child.stdout.take().context("a receiver without output")?).lines();
    let first = lines.next().context("the receiver did not come up")??;
    let ports: Vec<u16> = serde_json::from_str(&first).context("the receiver's ports")?;
    let outbox = Outbox::new(Side::Prefill)?;
    let ip = place.advertise.to_string();
    let send = |n: u64| {
        let port = usize::try_from(n).ok().and_then(|n| ports.get(n % ports.len().max(1)));
        outbox.send(&ip, *port.context("no port")?, wire::status(Engine::Mooncake0523, n, 4, 0, ""))
    };
    // Opens the connections.
    for n in 0..u64::from(connections) {
        send(n)?;
    }
    std::thread::sleep(Duration::from_millis(300));
    output.put("raw", json!({"rank_ports": ports, "pid": std::process::id(), "receiver": child.id()}))?;
    output.ready(None, files)?;
    let total = u64::from(rate) * duration.as_secs();
    let begun = Instant::now();
    let mut sent = 0;
    while sent < total {
        std::thread::sleep(TICK);
        let due = begun.elapsed().as_nanos().saturating_mul(u128::from(rate)) / 1_000_000_000;
        let due = u64::try_from(due).unwrap_or(total).min(total);
        for n in sent..due {
            send(n + u64::from(connections))?;
        }
        sent = due;
    }
    let took = begun.elapsed();
    let sent = total + u64::from(connections);
    writeln!(input, "{sent}")?;
    let got: u64 = lines.next().context("the receiver is gone")??.parse().context("the receiver's count")?;
    // Not before they have arrived: what waits goes with it.
    drop(outbox);
    child.wait()?;
    output.put("raw_end", json!({"sent": sent, "received": got, "seconds": took.as_secs_f64()}))?;
    if got != sent {
        bail!("sent {sent}, received {got}");
    }
    // Whoever reads the line reads the file next.
    output.flush()?;
    let seconds = took.as_secs_f64();
    println!("sent {sent} messages in {seconds:.1} s, {rate}/s asked for, all received");
    Ok(())
}

/// The receiver's process.
///
/// # Errors
/// When a socket cannot be bound.
pub(crate) fn receive(arguments: &str) -> Result<()> {
    let mut words = arguments.split(' ').skip(1);
    let bind: IpAddr = words.next().context("address")?.parse()?;
    let connections: usize = words.next().context("number")?.parse()?;
    std::fs::write("/proc/self/comm", "sglang::scheduler").context("set the process name")?;
    let context = net::context()?;
    let mut ports = Vec::new();
    let mut counters = Vec::new();
    let (end, all) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    for _ in 0..connections {
        let (pull, port) = net::bind_pull(&context, bind)?;
        pull.set_rcvtimeo(100)?;
        ports.push(port);
        let (end, all) = (Arc::clone(&end), Arc::clone(&all));
        counters.push(std::thread::spawn(move || {
            loop {
                match pull.recv_multipart(0) {
                    Ok(_) => {
                        all.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(_) if end.load(Ordering::Relaxed) => return,
                    Err(_) => {}
                }
            }
        }));
    }
    println!("{}", serde_json::to_string(&ports)?);
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line)?;
    let sent: u64 = line.trim().parse().context("how many were sent")?;
    let begun = Instant::now();
    while all.load(Ordering::Relaxed) < sent && begun.elapsed() < ARRIVES {
        std::thread::sleep(Duration::from_millis(20));
    }
    end.store(true, Ordering::Relaxed);
    for counter in counters {
        // One that panicked has said so.
        drop(counter.join());
    }
    println!("{}", all.load(Ordering::Relaxed));
    Ok(())
}
