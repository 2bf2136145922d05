//! `pd-workload`: prefill and decode ranks as separate processes that speak SGLang's control protocol to each other
//! over the system's libzmq, with the engine's process and thread names, sockets, messages and room states.
//!
//! It stands in for real engines in the demo and in live tests, where 10 GB of Python are too much. Pins come about
//! by themselves, from the order of messages and from faults (a worker thread that raises, a killed process, a port
//! that refuses); at the end every rank tells the state of its rooms, and from that alone `truth.jsonl` and what an
//! observer must say of each room are written. Linux only.

mod bootstrap;
mod decode;
mod driver;
mod engine;
mod expect;
mod fleet;
mod hosts;
mod http;
mod kv;
mod load;
mod net;
mod pages;
mod prefill;
mod rank;
mod raw;
mod router;
mod scenario;
mod serve;
mod status;
mod trials;
mod web;
mod wire;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::{Args, Parser, Subcommand, ValueEnum};

use driver::{Files, Place};
use wire::Engine;

/// Prefill and decode ranks of SGLang, as separate processes over the real libzmq.
///
/// Writes to --out: truth.jsonl (one object a line; kinds: ready, load_begin, load_end, engine, request, room, expected,
/// run_end), expect.json (the rules per scenario for a scoring script) and ranks.log (what the ranks complain of).
/// A `room` line has room, scenario, label (success, success_off_wire, failed, split, pinned, dead), pinned_sides
/// and per side last, terminal, open_ms, reason, queue, alive. An `expected` line stands for every room that may or
/// must be called pinned: pin, class, owed, min_confidence, max_confidence, why; all others must not. A `request` line
/// stands for every request at an engine's HTTP port: room, rid, side, begin_rt, first_byte_rt, end_rt, status and end
/// (open, answered, hung_up, broken).
#[allow(clippy::doc_markdown, reason = "shown by --help as it stands")]
#[derive(Parser)]
#[command(name = "pd-workload", verbatim_doc_comment)]
struct Arguments {
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Subcommand)]
enum Mode {
    /// Healthy rooms, a slow one and hang-ups beside ten kinds of pins (about half a minute).
    Demo {
        #[command(flatten)]
        common: Common,
        /// Healthy rooms per second on each engine pair.
        #[arg(long, default_value_t = 12)]
        rate: u32,
        /// Seconds to go on after the last fault: a pin is overdue after 10.
        #[arg(long, default_value_t = 15)]
        hold: u64,
        /// What is expected is that of a packet capture of the ranks' ports: no requests (--http false), no threads.
        #[arg(long)]
        wire: bool,
    },
    /// Healthy rooms at a steady rate. A room is two control sends (METADATA, STATUS).
    Load {
        #[command(flatten)]
        common: Common,
        /// Engine whose messages and rules are used.
        #[arg(long, value_enum, default_value = "mooncake-0.5.23")]
        engine: Engine,
        /// Prefill ranks.
        #[arg(long, default_value_t = 1)]
        prefills: usize,
        /// Decode ranks; room n goes to prefill n mod P and decode n div P mod D.
        #[arg(long, default_value_t = 2)]
        decodes: usize,
        /// Rooms per second, all ranks together.
        #[arg(long, default_value_t = 100)]
        rate: u32,
        /// How many rooms; without it as many as --duration has time for.
        #[arg(long)]
        rooms: Option<u64>,
        /// Seconds.
        #[arg(long, default_value_t = 10)]
        duration: u64,
        /// KV pages of a room: 4 bytes each in METADATA (200000 make a message of 800 kB).
        #[arg(long, default_value_t = 8)]
        pages: u32,
        /// Milliseconds that prefill computes.
        #[arg(long, default_value_t = 5)]
        compute_ms: u64,
        /// Hold back this many METADATA and send them in one go. The first batch finds its connection closed, so
        /// that libzmq puts as much of it as fits 8192 bytes into one call (80 with --pages 4). Implies --http false.
        #[arg(long, default_value_t = 1)]
        batch: u32,
        /// Do not move KV bytes (a mooncake engine's go over another TCP connection).
        #[arg(long)]
        no_kv: bool,
        /// Seconds that rooms have to end after the last has begun.
        #[arg(long, default_value_t = 3)]
        patience: u64,
    },
    /// Clients that hang up at moments of their own, among healthy requests: nothing pins.
    Burst {
        #[command(flatten)]
        common: Common,
        /// How many.
        #[arg(long, default_value_t = 50)]
        clients: u64,
        /// Healthy requests per second on each of two pairs.
        #[arg(long, default_value_t = 10)]
        rate: u32,
    },
    /// Prefill engines that are paused under load and go on afterwards: nothing pins.
    Pause {
        #[command(flatten)]
        common: Common,
        /// How long, seconds.
        #[arg(long, default_value_t = 30)]
        seconds: u64,
        /// Requests per second on each of two pairs.
        #[arg(long, default_value_t = 10)]
        rate: u32,
    },
    /// A NIXL room that pins before the load is ready, and nothing after it: only a gauge and an open request show it.
    Ghost {
        #[command(flatten)]
        common: Common,
        /// How long nothing comes, seconds.
        #[arg(long, default_value_t = 75)]
        seconds: u64,
    },
    /// Starts an engine for a driver elsewhere (`pods`), in a network of its own.
    Serve {
        /// Where the driver connects. Whoever does starts processes: for a test's own network only.
        #[arg(long, default_value = "0.0.0.0:7000")]
        listen: SocketAddr,
    },
    /// Two pairs of engines behind `serve`, at the same ports each: a NIXL room that pins before the load is ready, healthy requests on
    /// the other pair.
    Pods {
        #[command(flatten)]
        common: Common,
        /// Mooncake prefill, mooncake decode, NIXL prefill, NIXL decode.
        #[arg(long = "engine", value_name = "ADDR:PORT", num_args = 4)]
        engines: Vec<SocketAddr>,
        /// Seconds of healthy requests.
        #[arg(long, default_value_t = 20)]
        seconds: u64,
        /// Healthy requests per second.
        #[arg(long, default_value_t = 10)]
        rate: u32,
    },
    /// Requests at a prefill engine's HTTP server at a fixed rate, answered at once, for measuring what watching costs.
    Http {
        #[command(flatten)]
        common: Common,
        /// Requests per second.
        #[arg(long, default_value_t = 2000)]
        rate: u32,
        /// Bytes of a request's body, about.
        #[arg(long, default_value_t = 8192)]
        size: u32,
        /// Seconds.
        #[arg(long, default_value_t = 30)]
        duration: u64,
    },
    /// STATUS messages at a fixed rate, nearly each a send of its own, for counting what a capture loses.
    Raw {
        #[command(flatten)]
        common: Common,
        /// Messages per second.
        #[arg(long, default_value_t = 20_000)]
        rate: u32,
        /// Seconds.
        #[arg(long, default_value_t = 30)]
        duration: u64,
        /// Connections that they go over in turn.
        #[arg(long, default_value_t = 64)]
        connections: u16,
    },
}

#[derive(Args)]
struct Common {
    /// Directory for truth.jsonl, expect.json and ranks.log.
    #[arg(long, default_value = "pd-workload-out")]
    out: PathBuf,
    /// Written when every process runs and its connections are open: pids and rank ports as JSON.
    #[arg(long)]
    ready_file: Option<PathBuf>,
    /// The load begins only when this file exists: attach in between.
    #[arg(long)]
    wait_file: Option<PathBuf>,
    /// When all results are written, keep the processes until this file exists: their end is an event too.
    #[arg(long)]
    linger_file: Option<PathBuf>,
    /// Loopback over IPv4, over IPv6, or IPv6 sockets that peers reach over IPv4 (v4-mapped at one end).
    #[arg(long, value_enum, default_value = "v4")]
    family: Family,
    /// The same as --family v6.
    #[arg(long)]
    ipv6: bool,
    /// Another address of this machine to bind and to tell the peers.
    #[arg(long)]
    address: Option<IpAddr>,
    /// Network namespace (`ip netns`) for the prefill engines, and their address there.
    #[arg(long, value_name = "NAMESPACE=ADDRESS")]
    prefill_host: Option<hosts::Host>,
    /// The same for the decode engines.
    #[arg(long, value_name = "NAMESPACE=ADDRESS")]
    decode_host: Option<hosts::Host>,
    /// Room numbers are made from it.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Whether a router sends the requests to the engines' HTTP servers and decode asks a bootstrap server, as in
    /// reality; without, the driver gives them to the ranks.
    #[arg(long, default_value_t = true, action = clap::ArgAction::Set, value_name = "BOOL")]
    http: bool,
    /// Seconds between the start of engines that speak HTTP and their first request: real ones load a model meanwhile.
    #[arg(long, default_value_t = 7)]
    loading: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Family {
    V4,
    V6,
    Mapped,
}

impl Common {
    fn loading(&self) -> Duration {
        Duration::from_secs(self.loading)
    }

    fn files(&self) -> Files {
        Files { ready: self.ready_file.clone(), go: self.wait_file.clone(), linger: self.linger_file.clone() }
    }

    fn place(&self) -> Place {
        hosts::set(self.prefill_host.clone(), self.decode_host.clone());
        let (v4, v6) = (IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST));
        match (self.address, self.family) {
            (Some(address), _) => Place { bind: address, advertise: address },
            (None, Family::Mapped) => Place { bind: IpAddr::V6(Ipv6Addr::UNSPECIFIED), advertise: v4 },
            (None, Family::V4) if !self.ipv6 => Place { bind: v4, advertise: v4 },
            (None, _) => Place { bind: v6, advertise: v6 },
        }
    }
}

fn main() -> Result<()> {
    match std::env::var(rank::PROCESS_VARIABLE).as_deref() {
        Ok(engine::ENGINE) => return engine::run(),
        Ok(router::ROUTER) => return router::run(),
        Ok(rank::RANK) => return rank::run(),
        Ok(receiver) => return raw::receive(receiver),
        Err(_) => {}
    }
    match Arguments::parse().mode {
        Mode::Demo { common, rate, hold, wire } => scenario::run(&scenario::Plan {
            place: common.place(),
            loading: common.loading(),
            files: common.files(),
            out: common.out,
            seed: common.seed,
            http: common.http && !wire,
            wire,
            rate,
            hold: Duration::from_secs(hold),
        }),
        Mode::Load {
            common,
            engine,
            prefills,
            decodes,
            rate,
            rooms,
            duration,
            pages,
            compute_ms,
            batch,
            no_kv,
            patience,
        } => {
            ensure!(
                prefills > 0 && decodes > 0 && rate > 0,
                "--prefills, --decodes and --rate must be above 0"
            );
            load::run(&load::Plan {
                place: common.place(),
                loading: common.loading(),
                files: common.files(),
                out: common.out,
                seed: common.seed,
                // A batch needs them at decode at once.
                http: common.http && batch <= 1,
                engine,
                prefills,
                decodes,
                rate,
                rooms: rooms.unwrap_or(u64::from(rate) * duration),
                pages,
                compute_ms,
                batch,
                move_kv: !no_kv,
                patience: Duration::from_secs(patience),
            })
        }
        Mode::Burst { common, clients, rate } => {
            trial(common, trials::Trial::Burst { clients }, rate, Vec::new())
        }
        Mode::Pause { common, seconds, rate } => {
            trial(common, trials::Trial::Pause { time: Duration::from_secs(seconds) }, rate, Vec::new())
        }
        Mode::Ghost { common, seconds } => {
            trial(common, trials::Trial::Ghost { time: Duration::from_secs(seconds) }, 10, Vec::new())
        }
        Mode::Serve { listen } => serve::run(listen),
        Mode::Pods { common, engines, seconds, rate } => {
            trial(common, trials::Trial::Pods { time: Duration::from_secs(seconds) }, rate, engines)
        }
        Mode::Http { common, rate, size, duration } => web::run(
            &web::Plan {
                place: common.place(),
                loading: common.loading(),
                seed: common.seed,
                rate,
                size,
                duration: Duration::from_secs(duration),
            },
            &common.out,
            &common.files(),
        ),
        Mode::Raw { common, rate, duration, connections } => {
            ensure!(connections > 0 && rate > 0, "--connections and --rate must be above 0");
            raw::run(
                common.place(),
                rate,
                Duration::from_secs(duration),
                connections,
                &common.out,
                &common.files(),
            )
        }
    }
}

fn trial(common: Common, trial: trials::Trial, rate: u32, engines: Vec<SocketAddr>) -> Result<()> {
    ensure!(common.http, "this load speaks HTTP: there is no --http false");
    trials::run(&trials::Plan {
        place: common.place(),
        loading: common.loading(),
        files: common.files(),
        out: common.out,
        seed: common.seed,
        trial,
        rate,
        engines,
    })
}
