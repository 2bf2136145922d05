//! Requests at a prefill engine's HTTP server at a fixed rate and nothing else, for measuring what watching them costs:
//! a client with kept-alive connections, and a server that answers at once without asking its ranks.

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::driver::{Files, Fleet, Output, Place};
use crate::fleet::{self, Ports, Serve};
use crate::http::{self, Inbound};
use crate::pages;
use crate::rank::{RankConfig, RoleConfig, Stream, now};
use crate::router::{self, Leg, Send};
use crate::wire::Engine;

/// Connections that the requests go over in turn.
const CONNECTIONS: u32 = 16;

/// What to run.
#[derive(Debug)]
pub(crate) struct Plan {
    pub place: Place,
    pub seed: u64,
    pub loading: Duration,
    /// Requests per second.
    pub rate: u32,
    /// Bytes of a body, about.
    pub size: u32,
    pub duration: Duration,
}

/// Runs it and prints the counts.
///
/// # Errors
/// When the engine does not come up or a request is not answered with 200.
pub(crate) fn run(plan: &Plan, out: &Path, files: &Files) -> Result<()> {
    let mut output = Output::new(out)?;
    let rank = RankConfig {
        name: "prefill".into(),
        engine: Engine::Mooncake0523,
        role: RoleConfig::Prefill { workers: 1, optimistic: 0 },
        bind: plan.place.bind,
        advertise: plan.place.advertise,
        tp: (0, 1),
        timeout_s: 300,
        move_kv: false,
        bootstrap: None,
    };
    let serve = Serve { at_once: true, ..Serve::default() };
    let mut ports = Ports::new(plan.place.bind);
    let ranks = fleet::start(vec![rank], serve, Some(&mut ports), &output.log())?;
    // The client is this process.
    std::fs::write("/proc/self/comm", router::ROUTER).context("set the process name")?;
    let fleet = Fleet::new(ranks, plan.loading, &output.log())?;
    let (server, bootstrap) = fleet.prefill(0)?;
    output.ready(Some(&fleet), files)?;
    let begun = Instant::now();
    let clients: Vec<_> = (0..CONNECTIONS)
        .map(|client| {
            let stream = Stream {
                seed: plan.seed.wrapping_add(u64::from(client) << 32),
                count: u64::from(plan.rate / CONNECTIONS) * plan.duration.as_secs(),
                gap_ns: u64::from(CONNECTIONS) * 1_000_000_000 / u64::from(plan.rate.max(1)),
                start: now() + u64::from(client) * 1_000_000_000 / u64::from(plan.rate.max(1)),
                pages: plan.size / 4,
                compute_ms: 0,
                batch: 1,
                engines: (1, 1),
                me: 0,
            };
            std::thread::spawn(move || client_of(&stream, server, bootstrap))
        })
        .collect();
    let mut answered = 0;
    for client in clients {
        answered += client.join().map_err(|_| anyhow::anyhow!("a client has panicked"))??;
    }
    let seconds = begun.elapsed().as_secs_f64();
    output.put("web_end", json!({"answered": answered, "seconds": seconds}))?;
    // Whoever reads the line reads the file next.
    output.flush()?;
    println!("{answered} requests answered in {seconds:.1} s, {}/s asked for", plan.rate);
    Ok(())
}

/// One connection: request after request, each in its time. Returns how many were answered.
fn client_of(stream: &Stream, server: SocketAddr, bootstrap: SocketAddr) -> Result<u64> {
    let connection = TcpStream::connect(server).with_context(|| format!("connect to {server}"))?;
    connection.set_nodelay(true)?;
    let mut inbound = Inbound::new(&connection, 8192);
    let prompt = pages::text(stream.pages);
    for n in 0..stream.count {
        std::thread::sleep(Duration::from_nanos(stream.due(n).saturating_sub(now())));
        let leg = Leg { engine: server, pages: stream.pages, compute_ms: 0, streamed: false };
        let send = Send { room: stream.room(n), bootstrap, legs: Vec::new(), scripted: false };
        let body = router::body(&send, &leg, &prompt, &router::rid(send.room));
        let head = http::request_head("POST", "/generate", server, body.len());
        http::write(&mut &connection, &head, &body)?;
        let answer = inbound.answer(|_| {})?.context("the server closed the connection")?;
        ensure!(answer.status == 200, "a request was answered with {}", answer.status);
    }
    Ok(stream.count)
}
