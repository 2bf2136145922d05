//! The router: a process that sends requests to both engines of a pair over kept-alive connections, one request at a
//! time on each, and hangs up where its client does.
//!
//! Source: what `sglang-router` 0.3.2 was seen to send: the bootstrap fields at the very end of the body, behind `rid`.
//! It keeps its own record of every leg. Knows nothing of rooms' states.

use std::collections::HashMap;
use std::io::BufRead;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::http::{self, Inbound};
use crate::net::lock;
use crate::pages;
use crate::rank::{Stream, now};

/// Value of the process variable that makes a router.
pub(crate) const ROUTER: &str = "router";
/// How often it asks the engines for their health.
const HEALTH_EVERY: Duration = Duration::from_secs(5);
/// Every so many clients of a stream of requests want a streamed answer, from both engines.
const STREAMED: u64 = 4;

/// Where one part of a request goes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Leg {
    /// The engine's HTTP server.
    pub engine: SocketAddr,
    /// KV pages of the prompt that it is told.
    pub pages: u32,
    /// Milliseconds that prefill computes.
    pub compute_ms: u64,
    /// Whether it is to stream its answer.
    pub streamed: bool,
}

/// A request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Send {
    /// Room.
    pub room: u64,
    /// Bootstrap server of the prefill engine.
    pub bootstrap: SocketAddr,
    /// Where it goes.
    pub legs: Vec<Leg>,
    /// The driver waits for its changes of state.
    pub scripted: bool,
}

/// A prefill engine as the router knows it: its HTTP server and its bootstrap server.
pub(crate) type Prefill = (SocketAddr, SocketAddr);

/// From the driver.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Order {
    /// Sends a request.
    Send(Send),
    /// Many, each to both sides.
    Stream { stream: Stream, prefills: Vec<Prefill>, decodes: Vec<SocketAddr> },
    /// The client has hung up: the connection of this leg is closed.
    HangUp { room: u64, engine: SocketAddr },
    /// A control call to an engine, told when it is answered.
    Call { engine: SocketAddr, path: String, body: String },
    /// Asks these engines for their health from now on.
    Watch(Vec<SocketAddr>),
    /// Tell every leg.
    Report,
}

/// To the driver.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Told {
    /// It can be used.
    Ready { pid: u32 },
    /// A control call was answered.
    Called { status: Option<u16> },
    /// A leg, answering Report.
    Leg(LegReport),
    /// All were told.
    Reported,
}

/// How a leg ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum End {
    /// It has not.
    Open,
    /// Answered to the last byte.
    Answered,
    /// The client has hung up.
    HungUp,
    /// The connection ended, or never came to be.
    Broken,
}

/// One leg as the router saw it. Times: nanoseconds since 1970.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct LegReport {
    pub room: u64,
    pub rid: String,
    pub engine: SocketAddr,
    pub streamed: bool,
    pub begun: u64,
    pub first_byte: Option<u64>,
    pub ended: Option<u64>,
    pub end: End,
    pub status: Option<u16>,
    /// `finish_reason` of the answer, or `error`.
    pub finish: Option<String>,
}

/// What a connection's thread is to do next.
struct Job {
    head: String,
    body: Vec<u8>,
    report: Arc<Mutex<LegReport>>,
}

type Legs = Vec<Arc<Mutex<LegReport>>>;

#[derive(Default)]
struct Router {
    /// Connections without a request, by engine: the most recently used is taken first.
    idle: Mutex<HashMap<SocketAddr, Vec<mpsc::Sender<Job>>>>,
    /// Connections with a request.
    busy: Mutex<HashMap<(u64, SocketAddr), Arc<TcpStream>>>,
    legs: Mutex<Legs>,
}

/// The life of a router process.
///
/// # Errors
/// When it cannot take its name.
pub(crate) fn run() -> Result<()> {
    std::fs::write("/proc/self/comm", ROUTER).context("set the process name")?;
    let router = Arc::new(Router::default());
    say(&Told::Ready { pid: std::process::id() });
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match serde_json::from_str(&line) {
            Ok(Order::Send(send)) => router.send(&send),
            Ok(Order::Stream { stream, prefills, decodes }) => {
                let router = Arc::clone(&router);
                std::thread::spawn(move || router.stream(&stream, &prefills, &decodes));
            }
            Ok(Order::HangUp { room, engine }) => router.hang_up(room, engine),
            Ok(Order::Call { engine, path, body }) => {
                let status = http::Session::open(engine)
                    .and_then(|mut session| session.ask("POST", &path, body.as_bytes()));
                say(&Told::Called { status: status.ok().map(|answer| answer.status) });
            }
            Ok(Order::Watch(engines)) => {
                std::thread::spawn(move || watch(&engines));
            }
            Ok(Order::Report) => router.report(),
            Err(error) => eprintln!("order not understood: {error}: {line}"),
        }
    }
    Ok(())
}

fn say(told: &Told) {
    use std::io::Write as _;
    if let Ok(line) = serde_json::to_string(told) {
        let _ = writeln!(std::io::stdout().lock(), "{line}");
    }
}

/// Asks each engine for its health, over a connection of its own.
fn watch(engines: &[SocketAddr]) {
    let mut sessions: HashMap<SocketAddr, http::Session> = HashMap::new();
    loop {
        for engine in engines {
            let session = sessions.remove(engine).map_or_else(|| http::Session::open(*engine), Ok);
            if let Ok(mut session) = session
                && session.ask("GET", "/health", &[]).is_ok()
            {
                sessions.insert(*engine, session);
            }
        }
        std::thread::sleep(HEALTH_EVERY);
    }
}

/// The body as the router writes it: what the client sent, then the bootstrap fields.
pub(crate) fn body(send: &Send, leg: &Leg, prompt: &str, rid: &str) -> Vec<u8> {
    let host = send.bootstrap.ip();
    let port = send.bootstrap.port();
    let asked = format!(
        "{{\"pages\":{},\"compute_ms\":{},\"scripted\":{}}}",
        leg.pages, leg.compute_ms, send.scripted
    );
    format!(
        "{{\"text\":\"{prompt}\",\"sampling_params\":{{\"max_new_tokens\":8,\"temperature\":0,\"custom_params\":{asked}}},\
         \"stream\":{},\"rid\":\"{rid}\",\"bootstrap_host\":\"{host}\",\"bootstrap_port\":{port},\
         \"bootstrap_room\":{}}}",
        leg.streamed,
        send.room
    )
    .into_bytes()
}

/// Request id of a room: 32 hex digits, as a uuid has.
pub(crate) fn rid(room: u64) -> String {
    format!("{:016x}{room:016x}", room.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

impl Router {
    fn stream(self: &Arc<Self>, stream: &Stream, prefills: &[Prefill], decodes: &[SocketAddr]) {
        for n in 0..stream.count {
            let wait = stream.due(n).saturating_sub(now());
            std::thread::sleep(Duration::from_nanos(wait));
            let (prefill, decode) = stream.route(n);
            let at = |index: u64| usize::try_from(index).unwrap_or(usize::MAX);
            let (Some(prefill), Some(decode)) = (prefills.get(at(prefill)), decodes.get(at(decode))) else {
                continue;
            };
            let streamed = n % STREAMED == STREAMED - 1;
            let leg = |engine| Leg { engine, pages: stream.pages, compute_ms: stream.compute_ms, streamed };
            self.send(&Send {
                room: stream.room(n),
                bootstrap: prefill.1,
                legs: vec![leg(prefill.0), leg(*decode)],
                scripted: false,
            });
        }
    }

    fn send(self: &Arc<Self>, send: &Send) {
        for leg in &send.legs {
            let rid = rid(send.room);
            let body = body(send, leg, &pages::text(leg.pages), &rid);
            let head = http::request_head("POST", "/generate", leg.engine, body.len());
            let report = Arc::new(Mutex::new(LegReport {
                room: send.room,
                rid,
                engine: leg.engine,
                streamed: leg.streamed,
                begun: now(),
                first_byte: None,
                ended: None,
                end: End::Open,
                status: None,
                finish: None,
            }));
            lock(&self.legs).push(Arc::clone(&report));
            let job = Job { head, body, report };
            let idle = lock(&self.idle).get_mut(&leg.engine).and_then(Vec::pop);
            let left = match idle {
                // The error gives the job back: that connection has ended.
                Some(connection) => connection.send(job).err().map(|error| error.0),
                None => Some(job),
            };
            if let Some(job) = left {
                self.open(leg.engine, job);
            }
        }
    }

    /// A new connection with a first request.
    fn open(self: &Arc<Self>, engine: SocketAddr, job: Job) {
        let (sender, jobs) = mpsc::channel();
        let _ = sender.send(job);
        let router = Arc::clone(self);
        std::thread::spawn(move || {
            let stream = TcpStream::connect_timeout(&engine, Duration::from_secs(5));
            match stream.and_then(|stream| stream.set_nodelay(true).map(|()| stream)) {
                Ok(stream) => router.work(engine, &Arc::new(stream), &sender, &jobs),
                Err(error) => {
                    eprintln!("router: {engine}: {error}");
                    for job in jobs.try_iter() {
                        finish(&job.report, End::Broken, None);
                    }
                }
            }
        });
    }

    /// A connection's thread: request after request, until the connection ends.
    fn work(
        &self,
        engine: SocketAddr,
        stream: &Arc<TcpStream>,
        own: &mpsc::Sender<Job>,
        jobs: &mpsc::Receiver<Job>,
    ) {
        let mut inbound = Inbound::new(&**stream, 8192);
        for job in jobs {
            let room = lock(&job.report).room;
            let asked = http::write(&mut &**stream, &job.head, &job.body);
            // Not before it has been asked: whoever hangs up has asked.
            lock(&self.busy).insert((room, engine), Arc::clone(stream));
            let answer = asked.and_then(|()| inbound.answer(|_| lock(&job.report).first_byte = Some(now())));
            lock(&self.busy).remove(&(room, engine));
            let Ok(Some(answer)) = answer else {
                finish(&job.report, End::Broken, None);
                return;
            };
            // The client hung up while the answer came: nothing more can be asked over this connection.
            if lock(&job.report).end == End::HungUp {
                return;
            }
            lock(&job.report).finish = reason(&answer.body);
            finish(&job.report, End::Answered, Some(answer.status));
            lock(&self.idle).entry(engine).or_default().push(own.clone());
        }
    }

    fn hang_up(&self, room: u64, engine: SocketAddr) {
        let open = || {
            lock(&self.legs).iter().any(|leg| {
                let leg = lock(leg);
                leg.room == room && leg.engine == engine && leg.end == End::Open
            })
        };
        // Its connection may still be opened.
        let end = Instant::now() + Duration::from_secs(10);
        while open() && !lock(&self.busy).contains_key(&(room, engine)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Some(stream) = lock(&self.busy).get(&(room, engine)) {
            for leg in &*lock(&self.legs) {
                let its = {
                    let leg = lock(leg);
                    leg.room == room && leg.engine == engine
                };
                if its {
                    finish(leg, End::HungUp, None);
                }
            }
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn report(&self) {
        for leg in &*lock(&self.legs) {
            say(&Told::Leg(lock(leg).clone()));
        }
        say(&Told::Reported);
    }
}

/// Why an answer, or the last part of a streamed one, says that it ended.
fn reason(body: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(body).ok()?;
    let parts = text.split("data: ").map(str::trim).filter(|part| part.starts_with('{'));
    let last: serde_json::Value = serde_json::from_str(parts.last()?).ok()?;
    if last.get("error").is_some() {
        return Some("error".to_owned());
    }
    Some(last["meta_info"]["finish_reason"]["type"].as_str()?.to_owned())
}

/// The first end counts.
fn finish(report: &Mutex<LegReport>, end: End, status: Option<u16>) {
    let mut report = lock(report);
    if report.end == End::Open {
        report.end = end;
        report.ended = Some(now());
        report.status = status;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_part_of_an_answer_says_why_it_ended() {
        let part = |why: &str| format!("{{\"meta_info\":{{\"finish_reason\":{why}}}}}");
        let done = part("{\"type\":\"length\"}");
        let streamed = format!("data: {}\n\ndata: {done}\n\ndata: [DONE]\n\n", part("null"));
        assert_eq!(reason(streamed.as_bytes()).as_deref(), Some("length"));
        assert_eq!(reason(done.as_bytes()).as_deref(), Some("length"));
        assert_eq!(reason(b"{\"error\":{}}").as_deref(), Some("error"));
    }

    #[test]
    fn the_room_is_the_last_thing_in_a_body() {
        let engine = SocketAddr::from(([127, 0, 0, 1], 30_000));
        let leg = Leg { engine, pages: 8, compute_ms: 5, streamed: false };
        let send = Send { room: 77, bootstrap: engine, legs: vec![leg.clone()], scripted: true };
        let body = String::from_utf8(body(&send, &leg, &pages::text(8), "abc")).unwrap_or_default();
        assert!(body.ends_with(
            "\"rid\":\"abc\",\"bootstrap_host\":\"127.0.0.1\",\"bootstrap_port\":30000,\"bootstrap_room\":77}"
        ));
        let value: serde_json::Value = serde_json::from_str(&body).unwrap_or_default();
        assert_eq!(value["sampling_params"]["custom_params"]["pages"], 8);
        assert_eq!(pages::of_text(value["text"].as_str().unwrap_or_default()), 8);
    }
}
