//! An engine: the parent process that serves HTTP, with its scheduler ranks as child processes.
//!
//! Source: `http_server.py`, `tokenizer_manager.py` and `v1_loads.py` 0.5.23; shape of processes, calls and messages as
//! seen on real servers: reads of 256000 bytes, head and body of an answer in one call, a streamed answer's head at
//! once. It passes the driver's commands on to its ranks and what they say back, and makes commands of requests. Knows
//! nothing of pins.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, Command as Process, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::http::{self, Inbound, Request};
use crate::net::lock;
use crate::rank::{self, Command, Event, Loads, PROCESS_VARIABLE, RankConfig, RoleConfig, Work};
use crate::status::KvPoll;
use crate::{bootstrap, pages};

/// Value of the process variable that makes an engine.
pub(crate) const ENGINE: &str = "engine";
/// Bytes that uvloop asks for with one read.
const READ: usize = 256_000;
/// How long the parent outlives a scheduler that is gone (seen with real servers).
const OUTLIVES: Duration = Duration::from_secs(5);
/// Tokens of decode's streamed answer, and the time between two; prefill makes one.
const TOKENS: usize = 3;
const TOKEN_GAP: Duration = Duration::from_millis(2);

/// What an engine is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct EngineConfig {
    /// Its scheduler ranks.
    pub ranks: Vec<RankConfig>,
    /// Its HTTP server; `None`: it has none, requests come from the driver.
    pub http: Option<HttpConfig>,
}

/// An engine's HTTP server.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HttpConfig {
    /// Address and port.
    pub at: SocketAddr,
    /// Prefill: port of its bootstrap server, on the same address.
    pub bootstrap_port: Option<u16>,
    /// A prompt of more KV pages is refused (`--context-length`).
    pub context_pages: u32,
    /// How long a client's hang-up may go unnoticed, milliseconds (the engine looks every 4 s); each request has its
    /// own share of it.
    pub hangup_ms: u64,
    /// It answers without asking its ranks.
    pub at_once: bool,
}

impl EngineConfig {
    /// Its arguments, as an operator would have given them.
    pub(crate) fn arguments(&self) -> Vec<String> {
        let prefill = self.prefill();
        let mode = if prefill { "prefill" } else { "decode" };
        let backend = self.ranks.first().map_or("mooncake", |rank| rank.engine.backend());
        let tp = self.ranks.len().to_string();
        let mut words: Vec<String> = ["-m", "sglang.launch_server", "--model-path", "tiny", "--tp-size", &tp]
            .map(str::to_owned)
            .to_vec();
        words.extend(
            ["--disaggregation-mode", mode, "--disaggregation-transfer-backend", backend].map(str::to_owned),
        );
        if let Some(http) = &self.http {
            words.extend([
                "--host".into(),
                http.at.ip().to_string(),
                "--port".into(),
                http.at.port().to_string(),
            ]);
            if let Some(port) = http.bootstrap_port {
                words.extend(["--disaggregation-bootstrap-port".into(), port.to_string()]);
            }
        }
        words
    }

    fn prefill(&self) -> bool {
        self.ranks.first().is_some_and(|rank| matches!(rank.role, RoleConfig::Prefill { .. }))
    }
}

/// From the driver.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// For a rank.
    Rank { rank: usize, command: Command },
    /// SIGKILL for a rank.
    Kill { rank: usize },
}

/// To the driver: what a rank says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Said {
    pub rank: usize,
    pub event: Event,
}

/// A scheduler process.
struct Scheduler {
    child: Mutex<Child>,
    input: Mutex<ChildStdin>,
    loads: Mutex<Loads>,
}

/// A request that has not been answered.
struct Pending {
    connection: Arc<File>,
    rid: String,
    streamed: bool,
    /// Ranks that are not done with it.
    left: usize,
}

struct Server {
    config: EngineConfig,
    ranks: Vec<Scheduler>,
    pending: Mutex<HashMap<u64, Pending>>,
}

/// The life of an engine's parent process.
///
/// # Errors
/// When it cannot have its ports or start its ranks.
pub(crate) fn run() -> Result<()> {
    let mut first = String::new();
    std::io::stdin().lock().read_line(&mut first).context("read the engine's configuration")?;
    let config: EngineConfig = serde_json::from_str(&first).context("the engine's configuration")?;
    std::fs::write("/proc/self/comm", "python3").context("set the process name")?;
    let listener = match &config.http {
        Some(http) => {
            if let Some(port) = http.bootstrap_port {
                bootstrap::serve(SocketAddr::new(http.at.ip(), port))?;
            }
            Some(TcpListener::bind(http.at).with_context(|| format!("bind {}", http.at))?)
        }
        None => None,
    };
    let mut ranks = Vec::new();
    let mut outputs = Vec::new();
    for rank in &config.ranks {
        let (scheduler, output) = start_rank(rank)?;
        ranks.push(scheduler);
        outputs.push(output);
    }
    let server = Arc::new(Server { config, ranks, pending: Mutex::default() });
    for (rank, output) in outputs.into_iter().enumerate() {
        let server = Arc::clone(&server);
        std::thread::spawn(move || server.hear(rank, output));
    }
    if let Some(listener) = listener {
        let server = Arc::clone(&server);
        std::thread::spawn(move || server.accept(&listener));
    }
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Order::Rank { rank, command }) => server.tell(rank, &command),
            Ok(Order::Kill { rank }) => {
                if let Some(scheduler) = server.ranks.get(rank) {
                    let mut child = lock(&scheduler.child);
                    let _ = child.kill();
                    let _ = child.wait();
                }
            }
            Err(error) => eprintln!("order not understood: {error}: {line}"),
        }
    }
    server.quit();
    Ok(())
}

fn start_rank(config: &RankConfig) -> Result<(Scheduler, std::process::ChildStdout)> {
    let mut child = Process::new(std::env::current_exe().context("find this program")?)
        .arg0(rank::title(config))
        .env(PROCESS_VARIABLE, rank::RANK)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("start a rank")?;
    let mut input = child.stdin.take().context("a rank without input")?;
    let output = child.stdout.take().context("a rank without output")?;
    writeln!(input, "{}", serde_json::to_string(config)?)?;
    let scheduler = Scheduler { child: Mutex::new(child), input: Mutex::new(input), loads: Mutex::default() };
    Ok((scheduler, output))
}

impl Server {
    fn tell(&self, rank: usize, command: &Command) {
        if let (Some(scheduler), Ok(line)) = (self.ranks.get(rank), serde_json::to_string(command))
            && let Err(error) = writeln!(lock(&scheduler.input), "{line}")
        {
            eprintln!("rank {rank} is gone: {error}");
        }
    }

    fn tell_all(&self, command: &Command) {
        (0..self.ranks.len()).for_each(|rank| self.tell(rank, command));
    }

    /// Ends the ranks.
    fn quit(&self) {
        self.tell_all(&Command::Quit);
        let end = Instant::now() + Duration::from_secs(1);
        for scheduler in &self.ranks {
            let mut child = lock(&scheduler.child);
            while matches!(child.try_wait(), Ok(None)) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// What a rank says, until it is gone.
    fn hear(&self, rank: usize, output: impl std::io::Read) {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            match serde_json::from_str(&line) {
                Ok(Event::Loads(loads)) => {
                    if let Some(scheduler) = self.ranks.get(rank) {
                        *lock(&scheduler.loads) = loads;
                    }
                }
                Ok(Event::Ended { room, state, reason }) => self.ended(room, state, reason.as_deref()),
                Ok(event) => {
                    if let Ok(line) = serde_json::to_string(&Said { rank, event }) {
                        // Without its driver the engine ends: see `run`.
                        let _ = writeln!(std::io::stdout().lock(), "{line}");
                    }
                }
                Err(error) => eprintln!("rank {rank} is not understood: {error}: {line}"),
            }
        }
        std::thread::sleep(OUTLIVES);
        // The driver may have asked for the end of all: then this process is gone by now.
        std::process::exit(1);
    }

    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        for stream in listener.incoming().flatten() {
            let server = Arc::clone(self);
            std::thread::spawn(move || server.serve(stream));
        }
    }

    /// One connection, until its client hangs up.
    fn serve(self: &Arc<Self>, stream: TcpStream) {
        let _ = stream.set_nodelay(true);
        // As a file: uvloop uses read and write, not the socket calls.
        let connection = Arc::new(File::from(OwnedFd::from(stream)));
        let mut inbound = Inbound::new(&*connection, READ);
        loop {
            match inbound.request() {
                Ok(Some(request)) => self.take(&request, &connection),
                Ok(None) => break,
                Err(error) => {
                    eprintln!("connection: {error}");
                    break;
                }
            }
        }
        self.hung_up(&connection);
    }

    fn take(self: &Arc<Self>, request: &Request, connection: &Arc<File>) {
        let path = request.target.split('?').next().unwrap_or_default();
        match (request.method.as_str(), path) {
            ("POST", "/generate") => {
                if let Err(refused) = self.generate(&request.body, connection) {
                    let error =
                        json!({"error": {"message": refused, "type": "BadRequestError", "code": 400}});
                    answer(connection, 400, "application/json", error.to_string().as_bytes());
                }
            }
            ("GET", "/health" | "/health_generate") => answer(connection, 200, "application/json", b""),
            ("GET", "/v1/loads") => {
                answer(connection, 200, "application/json", self.loads().to_string().as_bytes());
            }
            ("GET", "/metrics") => {
                let kind = "text/plain; version=0.0.4; charset=utf-8";
                answer(connection, 200, kind, self.metrics().as_bytes());
            }
            ("POST", "/pause_generation") => {
                self.tell_all(&Command::Pause);
                let said = json!({"message": "Generation paused successfully.", "status": "ok"});
                answer(connection, 200, "application/json", said.to_string().as_bytes());
            }
            ("POST", "/continue_generation") => {
                self.tell_all(&Command::Continue);
                let said = json!({"message": "Generation continued successfully.", "status": "ok"});
                answer(connection, 200, "application/json", said.to_string().as_bytes());
            }
            ("POST", "/abort_request") => {
                self.abort(&request.body);
                answer(connection, 200, "application/json", b"");
            }
            _ => answer(connection, 404, "application/json", br#"{"detail":"Not Found"}"#),
        }
    }

    /// A request for work; it is answered when its room has ended. The error: why it is refused.
    fn generate(&self, body: &[u8], connection: &Arc<File>) -> Result<(), String> {
        let body: Value = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        let Some(room) = body["bootstrap_room"].as_u64() else {
            return Err("Disaggregated request received without bootstrap room id".into());
        };
        let asked = &body["sampling_params"]["custom_params"];
        let number = |name: &str| asked[name].as_u64();
        let pages = number("pages").and_then(|n| u32::try_from(n).ok());
        let pages = pages.unwrap_or_else(|| pages::of_text(body["text"].as_str().unwrap_or_default()));
        let most = self.config.http.as_ref().map_or(u32::MAX, |http| http.context_pages);
        if pages > most {
            return Err(format!(
                "The input ({pages} tokens) is longer than the model's context length ({most} tokens)."
            ));
        }
        let server = body["bootstrap_host"].as_str().and_then(|host| host.parse::<IpAddr>().ok());
        let port = body["bootstrap_port"].as_u64().and_then(|port| u16::try_from(port).ok());
        let streamed = body["stream"] == true;
        let rid = body["rid"].as_str().map_or_else(|| format!("{room:032x}"), str::to_owned);
        if self.config.http.as_ref().is_some_and(|http| http.at_once) {
            let said = generation(&rid, 1, true).to_string();
            answer(connection, 200, "application/json", said.as_bytes());
            return Ok(());
        }
        let pending = Pending { connection: Arc::clone(connection), rid, streamed, left: self.ranks.len() };
        lock(&self.pending).insert(room, pending);
        if streamed {
            let head = http::answer_head(200, "text/event-stream; charset=utf-8", None);
            let _ = http::write(&mut &**connection, &head, b"");
        }
        self.tell_all(&Command::Request(Work {
            room,
            pages,
            compute_ms: number("compute_ms").unwrap_or(5),
            prefill: 0,
            bootstrap: server.zip(port).map(SocketAddr::from).filter(|_| !self.config.prefill()),
            scripted: asked["scripted"] == true,
            tell_end: true,
        }));
        Ok(())
    }

    /// A rank is done with a room: the first failure, or the last success, is answered.
    fn ended(&self, room: u64, state: KvPoll, reason: Option<&str>) {
        let mut table = lock(&self.pending);
        let Some(pending) = table.get_mut(&room) else { return };
        pending.left -= 1;
        let failed = state == KvPoll::Failed;
        if !failed && pending.left > 0 {
            return;
        }
        let Some(pending) = table.remove(&room) else { return };
        drop(table);
        let said = if failed { failure(reason) } else { generation(&pending.rid, 1, true) };
        if pending.streamed {
            // In a thread of its own: tokens take time, and the connection's thread waits for a hang-up.
            let tokens = if self.config.prefill() { 1 } else { TOKENS };
            std::thread::spawn(move || stream(&pending, tokens, failed.then_some(said)));
        } else {
            let status = if failed { 500 } else { 200 };
            answer(&pending.connection, status, "application/json", said.to_string().as_bytes());
        }
    }

    /// The client is gone: what it waited for is aborted, once the engine has noticed.
    fn hung_up(self: &Arc<Self>, connection: &Arc<File>) {
        let mut gone = Vec::new();
        lock(&self.pending).retain(|room, pending| {
            let its = Arc::ptr_eq(&pending.connection, connection);
            gone.extend(its.then_some(*room));
            !its
        });
        let most = self.config.http.as_ref().map_or(0, |http| http.hangup_ms);
        for room in gone {
            let server = Arc::clone(self);
            let abort = move || server.tell_all(&Command::Abort { room });
            // Its share of the interval, from the room's own digits, and another on the other side.
            let digits = if self.config.prefill() { room } else { room >> 16 };
            match digits.checked_rem(most) {
                None => abort(),
                Some(wait) => {
                    std::thread::spawn(move || {
                        std::thread::sleep(Duration::from_millis(wait));
                        abort();
                    });
                }
            }
        }
    }

    /// `/abort_request`: by id, or all.
    fn abort(&self, body: &[u8]) {
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        let (all, rid) = (body["abort_all"] == true, body["rid"].as_str().filter(|rid| !rid.is_empty()));
        let rooms: Vec<u64> = lock(&self.pending)
            .iter()
            .filter(|(_, pending)| all || rid.is_some_and(|rid| pending.rid.starts_with(rid)))
            .map(|(room, _)| *room)
            .collect();
        for room in rooms {
            self.tell_all(&Command::Abort { room });
        }
    }

    /// The numbers of the rank that speaks for the engine: all its ranks have the same requests.
    fn numbers(&self) -> Loads {
        self.ranks.first().map(|rank| *lock(&rank.loads)).unwrap_or_default()
    }

    fn version(&self) -> &'static str {
        self.config.ranks.first().map_or("0.5.23", |rank| rank.engine.version())
    }

    /// `/v1/loads`.
    fn loads(&self) -> Value {
        let of = self.numbers();
        let prefill = self.config.prefill();
        let (p, d) = if prefill { (of, Loads::default()) } else { (Loads::default(), of) };
        let waiting = p.first + d.first + d.second;
        // Of the moment: both times are the same, whatever they are.
        let mut load = json!({"timestamp": 1_796_007_600, "dp_rank": 0,
            "num_running_reqs": of.computing, "num_waiting_reqs": waiting, "num_waiting_uncached_tokens": 0,
            "num_used_tokens": 0, "num_total_tokens": 0, "max_total_num_tokens": 100_000,
            "max_running_requests": 2048, "token_usage": 0.0, "gen_throughput": 0.0, "cache_hit_rate": 0.0,
            "utilization": 0.0,
            "disaggregation": {"mode": if prefill { "prefill" } else { "decode" },
                "prefill_bootstrap_queue_reqs": p.first, "prefill_inflight_queue_reqs": p.second,
                "decode_prealloc_queue_reqs": d.first, "decode_transfer_queue_reqs": d.second,
                "decode_retracted_queue_reqs": 0, "kv_transfer_speed_gb_s": 0.0, "kv_transfer_latency_ms": 0.0},
            "queues": {"waiting": waiting, "grammar": 0, "paused": 0, "retracted": 0}});
        if self.config.ranks.first().is_some_and(|rank| rank.engine.counts_progress())
            && let Some(load) = load.as_object_mut()
        {
            load.insert("total_prefill_busy_us".into(), p.busy_us.into());
            load.insert("total_prefill_uncached_tokens".into(), (p.busy_us / 100).into());
        }
        json!({"timestamp": "2026-11-30T03:00:00+00:00", "version": self.version(), "accelerator": null,
            "num_accelerators": self.ranks.len(), "loads": [load]})
    }

    /// `/metrics`, as far as it has to do with the hand-over.
    fn metrics(&self) -> String {
        let of = self.numbers();
        let role = if self.config.prefill() { "prefill" } else { "decode" };
        let labels = format!(
            "{{engine_type=\"{role}\",model_name=\"tiny\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"0\"}}"
        );
        let gauges = if role == "prefill" {
            [
                ("num_running_reqs", of.computing),
                ("num_prefill_bootstrap_queue_reqs", of.first),
                ("num_prefill_inflight_queue_reqs", of.second),
            ]
        } else {
            [
                ("num_running_reqs", of.computing),
                ("num_decode_prealloc_queue_reqs", of.first),
                ("num_decode_transfer_queue_reqs", of.second),
            ]
        };
        let line = |(name, value): (&str, u64)| {
            format!(
                "# HELP sglang:{name} The number of requests.\n# TYPE sglang:{name} gauge\nsglang:{name}{labels} {value}.0\n"
            )
        };
        gauges.map(line).concat()
    }
}

fn failure(reason: Option<&str>) -> Value {
    json!({"error": {"message": reason.unwrap_or("KVTransferError"), "type": "InternalServerError", "code": 500}})
}

fn generation(rid: &str, tokens: usize, done: bool) -> Value {
    let finish = if done { json!({"type": "length", "length": tokens}) } else { Value::Null };
    json!({"text": " the".repeat(tokens), "output_ids": vec![278; tokens],
        "meta_info": {"id": rid, "finish_reason": finish, "prompt_tokens": 8, "completion_tokens": tokens,
            "cached_tokens": 0}})
}

fn answer(connection: &File, status: u16, kind: &str, body: &[u8]) {
    let mut out = connection;
    // A client that is gone is noticed by the reader.
    let _ = http::write(&mut out, &http::answer_head(status, kind, Some(body.len())), body);
}

/// The rest of a streamed answer: an error stands inside it.
fn stream(pending: &Pending, tokens: usize, failure: Option<Value>) {
    let mut out = &*pending.connection;
    let mut chunk = |text: &str| out.write_all(format!("{:x}\r\n{text}\r\n", text.len()).as_bytes());
    let said = (1..=tokens).map(|n| generation(&pending.rid, n, n == tokens));
    let said: Vec<Value> = failure.map_or_else(|| said.collect(), |failure| vec![failure]);
    for part in said {
        if chunk(&format!("data: {part}\n\n")).is_err() {
            return;
        }
        std::thread::sleep(TOKEN_GAP);
    }
    let _ = chunk("data: [DONE]\n\n");
    let _ = out.write_all(b"0\r\n\r\n");
}
