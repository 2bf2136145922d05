//! What commands ask a running agent over its HTTP API.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]

use std::time::Duration;

use anyhow::{Context as _, anyhow};
use serde_json::{Value, json};

use crate::export::otlp::without_login;
use crate::export::query::PAGE_MAX;

use super::{End, ExplainArgs, Failure, Outcome, RoomsArgs, clean, explain, picture, print};

/// How long nothing may come. The agent answers from memory; longer means that it does not. An answer as a whole takes what the link takes.
const SILENCE: Duration = Duration::from_secs(10);

/// How long an answer may take in whole: who sends a byte now and then is no agent.
const WHOLE: Duration = Duration::from_mins(5);

/// How long a connection that nothing is asked on is kept. The agent closes it after ten seconds, which over a slow link may cross with a
/// question.
const IDLE: Duration = Duration::from_secs(4);

/// Longest answer, bytes, once unpacked. A page of rooms with all their messages is a few megabytes.
const ANSWER_MAX: usize = 64 << 20;

/// Pages fetched at most: 20 × 500 rooms are more than a person reads.
const PAGES: usize = 20;

/// `roomtrace rooms`.
pub(super) fn rooms(args: &RoomsArgs) -> Outcome {
    let pinned = if args.pinned { "&pinned=true" } else { "" };
    let (mut rooms, next) = pages(&args.api.api, pinned)?;
    let (mut findings, total) = findings(&args.api.api)?;
    if !args.json {
        rooms.iter_mut().chain(&mut findings).for_each(clean::json);
    }
    let end = if args.pinned && !rooms.is_empty() { End::Findings } else { End::Fine };
    let mut text = String::new();
    if args.json {
        text = format!("{}\n", json!({ "findings": findings, "rooms": rooms, "next": next }));
    } else {
        text.push_str(&explain::finding_lines(&findings, total));
        for room in &rooms {
            text.push_str(&explain::summary(room, &findings));
            text.push('\n');
        }
        if rooms.is_empty() {
            text.push_str(if args.pinned { "no pinned rooms\n" } else { "no open rooms\n" });
        }
        if next.is_some() {
            text.push_str("(there are more)\n");
        }
    }
    print(&text)?;
    Ok(end)
}

/// Rooms of all pages, and where those begin that are left out.
pub(super) fn pages(api: &str, which: &str) -> Result<(Vec<Value>, Option<String>), Failure> {
    let mut rooms = Vec::new();
    let mut next = None;
    for _ in 0..PAGES {
        let after = next.map_or_else(String::new, |n: String| format!("&after={n}"));
        let (_, mut body) = get(api, &format!("/api/v1/rooms?limit=500{which}{after}"))?;
        if let Some(Value::Array(page)) = body.get_mut("rooms").map(Value::take) {
            rooms.extend(page);
        }
        next = body["next"].as_str().map(str::to_owned);
        if next.is_none() {
            break;
        }
    }
    Ok((rooms, next))
}

/// Open findings, oldest first, and how many there are. None from an agent that does not know of them yet.
fn findings(api: &str) -> Result<(Vec<Value>, usize), Failure> {
    let (_, mut body) = get(api, &format!("/api/v1/findings?limit={PAGE_MAX}"))?;
    let total = body["total"].as_u64().and_then(|n| usize::try_from(n).ok()).unwrap_or_default();
    Ok(match body.get_mut("findings").map(Value::take) {
        Some(Value::Array(list)) => (list, total),
        _ => (Vec::new(), 0),
    })
}

/// `roomtrace explain ROOM`.
pub(super) fn explain(args: &ExplainArgs) -> Outcome {
    let life = args.incarnation.map_or_else(String::new, |n| format!("?incarnation={n}"));
    let (status, mut body) = get(&args.api.api, &format!("/api/v1/rooms/{}{life}", args.room))?;
    if status == 404 {
        return Err(Failure::usage(anyhow!(
            "the agent at {} does not know room {}: it may have ended long ago, have no control traffic on that host, or belong to another host",
            without_login(&args.api.api),
            args.room
        )));
    }
    if let Some(file) = &args.svg {
        std::fs::write(file, picture::standalone(&body))
            .with_context(|| format!("cannot write {}", file.display()))
            .map_err(Failure::usage)?;
    }
    if args.json {
        return print(&format!("{body}\n"));
    }
    let (mut findings, _) = findings(&args.api.api)?;
    // Onto a terminal, mostly.
    findings.iter_mut().chain([&mut body]).for_each(clean::json);
    print(&explain::page(&body, &findings))
}

/// Asks for JSON.
pub(super) fn get(api: &str, path: &str) -> Result<(u16, Value), Failure> {
    Asker::new(api)?.get(path)
}

/// Asks for whatever comes.
pub(super) fn fetch(api: &str, path: &str) -> Result<(u16, String), Failure> {
    Asker::new(api)?.fetch(path)
}

/// Asks one agent, over a connection that it keeps.
pub(super) struct Asker {
    api: String,
    runtime: tokio::runtime::Runtime,
    client: reqwest::Client,
}

impl Asker {
    /// For the agent at `api`; asks nothing yet.
    pub(super) fn new(api: &str) -> Result<Self, Failure> {
        Self::patient(api, SILENCE)
    }

    fn patient(api: &str, silence: Duration) -> Result<Self, Failure> {
        if let Err(e) = reqwest::Url::parse(api) {
            let shown = without_login(api);
            return Err(Failure::usage(anyhow!(
                "`{shown}` is not the address of an agent: {e} (http://127.0.0.1:9713 is one)"
            )));
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start the I/O runtime")
            .map_err(Failure::cannot_observe)?;
        // The HTTP client wants to know its cryptography even where it speaks plain HTTP; a second call changes nothing.
        drop(rustls::crypto::ring::default_provider().install_default());
        let client = reqwest::Client::builder()
            .connect_timeout(silence)
            .read_timeout(silence)
            .timeout(WHOLE)
            .pool_idle_timeout(IDLE)
            .no_proxy()
            .build();
        let client = client.map_err(Failure::cannot_observe)?;
        Ok(Self { api: api.trim_end_matches('/').to_owned(), runtime, client })
    }

    /// Asks for JSON.
    pub(super) fn get(&self, path: &str) -> Result<(u16, Value), Failure> {
        let (status, text) = self.fetch(path)?;
        let shown = without_login(&format!("{}{path}", self.api)).into_owned();
        let body: Value = serde_json::from_str(&text).map_err(|e| {
            Failure::cannot_observe(anyhow!(
                "{shown} answered {status} with no JSON: {e} (is that a Roomtrace agent?)"
            ))
        })?;
        if (200..300).contains(&status) || status == 404 {
            return Ok((status, body));
        }
        let why = body["error"].as_str().unwrap_or("no reason given");
        Err(Failure::cannot_observe(anyhow!("{shown} answered {status}: {}", clean::text(why))))
    }

    /// Asks for whatever comes.
    pub(super) fn fetch(&self, path: &str) -> Result<(u16, String), Failure> {
        let api = without_login(&self.api);
        let url = format!("{}{path}", self.api);
        let gone = |e: &reqwest::Error| {
            Failure::cannot_observe(anyhow!(
                "no agent answers at {api}: {} (is `roomtrace run` up there? another address goes in --api or ROOMTRACE_API)",
                root_cause(e)
            ))
        };
        let cut = |e: &reqwest::Error, after: usize| {
            Failure::cannot_observe(anyhow!(
                "the answer of {} stopped after {after} bytes: {} (fewer rooms make it shorter: --rooms of `roomtrace top`)",
                without_login(&url),
                root_cause(e)
            ))
        };
        self.runtime.block_on(async {
            let mut answer = self.client.get(&url).send().await.map_err(|e| gone(&e))?;
            let status = answer.status().as_u16();
            let mut body = Vec::new();
            while let Some(part) = answer.chunk().await.map_err(|e| cut(&e, body.len()))? {
                if body.len() + part.len() > ANSWER_MAX {
                    return Err(Failure::cannot_observe(anyhow!(
                        "{} answers with more than {} MiB (is that a Roomtrace agent?)",
                        without_login(&url),
                        ANSWER_MAX >> 20
                    )));
                }
                body.extend_from_slice(&part);
            }
            Ok((status, String::from_utf8_lossy(&body).into_owned()))
        })
    }
}

fn root_cause(error: &dyn std::error::Error) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::io::{Read as _, Write as _};
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    const SILENCE: Duration = Duration::from_secs(2);

    /// Answers one question with these parts, a pause before each. Returns the question.
    fn answering(parts: Vec<Vec<u8>>, pause: Duration) -> (String, thread::JoinHandle<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let api = format!("http://{}", listener.local_addr().unwrap());
        let run = move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut question = vec![0; 4096];
            let n = stream.read(&mut question).unwrap();
            for part in parts {
                thread::sleep(pause);
                // Who asks may have left.
                let _ = stream.write_all(&part);
            }
            // Until who asks has left.
            let _ = stream.read(&mut [0]);
            String::from_utf8_lossy(question.get(..n).unwrap_or_default()).into_owned()
        };
        (api, thread::spawn(run))
    }

    fn head(fields: &str, length: usize) -> Vec<u8> {
        format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n{fields}\r\n").into_bytes()
    }

    #[test]
    fn an_answer_may_take_longer_than_silence_may() {
        let pause = SILENCE / 6;
        let mut parts = vec![head("", 8)];
        parts.extend(b"{\"a\": 1}".iter().map(|byte| vec![*byte]));
        let (api, server) = answering(parts, pause);
        let asker = Asker::patient(&api, SILENCE).unwrap();
        assert_eq!(asker.get("/status").unwrap(), (200, json!({"a": 1})));
        drop(asker);
        server.join().unwrap();
    }

    #[test]
    fn an_answer_that_stops_is_told_from_no_answer() {
        let (api, server) = answering(vec![[head("", 8), b"{\"a".to_vec()].concat()], Duration::ZERO);
        let asker = Asker::patient(&api, SILENCE / 4).unwrap();
        let why = asker.get("/status").unwrap_err().error.to_string();
        assert!(why.contains("stopped after 3 bytes") && why.contains("--rooms"), "{why}");
        drop(asker);
        server.join().unwrap();
    }

    #[test]
    fn answers_are_asked_for_compressed_and_unpacked_within_a_limit() {
        let packed = |text: &[u8]| {
            let mut to = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            to.write_all(text).unwrap();
            to.finish().unwrap()
        };
        let ask = |body: Vec<u8>| {
            let answer = [head("content-encoding: gzip\r\n", body.len()), body].concat();
            let (api, server) = answering(vec![answer], Duration::ZERO);
            let asker = Asker::patient(&api, SILENCE).unwrap();
            let got = asker.get("/status").map_err(|f| f.error.to_string());
            drop(asker);
            assert!(server.join().unwrap().to_lowercase().contains("accept-encoding: gzip"));
            got
        };
        assert_eq!(ask(packed(b"{\"a\": 1}")), Ok((200, json!({"a": 1}))));
        let why = ask(packed(&vec![b' '; ANSWER_MAX + 1])).unwrap_err();
        assert!(why.contains("more than 64 MiB"), "{why}");
        let why = ask(b"no gzip".to_vec()).unwrap_err();
        assert!(why.contains("stopped after 0 bytes"), "{why}");
    }
}
