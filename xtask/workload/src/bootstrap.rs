//! The bootstrap server of a prefill engine, and what ranks ask of it.
//!
//! Source: `CommonKVBootstrapServer` and `CommonKVManager` of `common/conn.py` 0.5.17–0.5.23. The server runs in the
//! engine's parent process; prefill ranks register, decode ranks ask and then look every two seconds whether it lives.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::http::{self, Inbound, Request, Session};
use crate::net::lock;

/// `SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL`, at its least.
const HEARTBEAT: Duration = Duration::from_secs(2);
/// What asks for the topology instead of a rank.
const TOPOLOGY: &str = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1";

/// Ranks that have registered: attention TP rank → (registration).
type Table = Mutex<BTreeMap<u64, Value>>;

/// Serves until the process ends.
///
/// # Errors
/// When the port cannot be had.
pub(crate) fn serve(at: SocketAddr) -> Result<()> {
    let listener = TcpListener::bind(at).with_context(|| format!("bind the bootstrap port {at}"))?;
    let table: Arc<Table> = Arc::default();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let table = Arc::clone(&table);
            std::thread::spawn(move || connection(stream, &table));
        }
    });
    Ok(())
}

fn connection(stream: TcpStream, table: &Table) {
    let Ok(mut out) = stream.try_clone() else { return };
    let mut inbound = Inbound::new(stream, 65_536);
    while let Ok(Some(request)) = inbound.request() {
        let (status, kind, body) = answer(&request, table);
        let head = http::answer_head(status, kind, Some(body.len()));
        let head = head.replace("uvicorn", "Python/3.11 aiohttp/3.12");
        if http::write(&mut out, &head, body.as_bytes()).is_err() {
            break;
        }
    }
}

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json; charset=utf-8";

fn answer(request: &Request, table: &Table) -> (u16, &'static str, String) {
    let (path, query) = request.target.split_once('?').unwrap_or((&request.target, ""));
    match (request.method.as_str(), path) {
        ("GET", "/health") => (200, TEXT, "OK".into()),
        ("PUT", "/route") => match serde_json::from_slice::<Value>(&request.body) {
            Ok(rank) => {
                lock(table).insert(rank["attn_tp_rank"].as_u64().unwrap_or(0), rank);
                (200, TEXT, "OK".into())
            }
            Err(error) => (500, TEXT, error.to_string()),
        },
        ("GET", "/route") => route(query, &lock(table)),
        _ => (404, TEXT, "404: Not Found".into()),
    }
}

fn route(query: &str, table: &BTreeMap<u64, Value>) -> (u16, &'static str, String) {
    let asked: HashMap<&str, &str> = query.split('&').filter_map(|pair| pair.split_once('=')).collect();
    let Some(rank) = asked.get("target_tp_rank") else {
        return (400, TEXT, "Missing inputs for bootstrap server.".into());
    };
    if *rank == "-1" {
        let size = table.values().next().and_then(|rank| rank["attn_tp_size"].as_u64());
        return match size {
            Some(size) if table.len() as u64 >= size => {
                let of = json!({"attn_tp_size": size, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1,
                    "page_size": 1, "kv_cache_dtype": "auto", "follow_bootstrap_room": true,
                    "enable_dsa_cache_layer_split": false});
                (200, JSON, of.to_string())
            }
            _ => {
                let why =
                    format!("Prefill server not fully registered yet ({} workers registered).", table.len());
                (503, TEXT, why)
            }
        };
    }
    match rank.parse().ok().and_then(|rank| table.get(&rank)) {
        Some(rank) => {
            (200, JSON, json!({"rank_ip": rank["rank_ip"], "rank_port": rank["rank_port"]}).to_string())
        }
        None => (404, TEXT, "Bootstrap info not Found".into()),
    }
}

/// `register_to_bootstrap`: a prefill rank tells where it listens.
///
/// # Errors
/// When the server does not take it.
pub(crate) fn register(
    server: SocketAddr,
    ip: IpAddr,
    port: u16,
    tp: (u32, u32),
    http_port: u16,
) -> Result<()> {
    let body = json!({"attn_tp_size": tp.1, "attn_tp_rank": tp.0, "attn_cp_size": 1, "attn_cp_rank": 0,
        "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 1, "pp_rank": 0, "system_dp_size": 1,
        "system_dp_rank": 0, "rank_ip": ip.to_string(), "rank_port": port, "page_size": 1,
        "kv_cache_dtype": "auto", "load_balance_method": "follow_bootstrap_room",
        "enable_dsa_cache_layer_split": false, "prefill_http_port": http_port});
    let answer = Session::open(server)?.ask("PUT", "/route", body.to_string().as_bytes())?;
    if answer.status != 200 {
        bail!("the bootstrap server {server} answered {}", answer.status);
    }
    Ok(())
}

/// Where the prefill rank is that a decode rank has to ask: first the topology, then the rank.
///
/// # Errors
/// When the server does not answer or does not know.
pub(crate) fn find(server: SocketAddr) -> Result<(String, u16)> {
    let ask = |target: &str| -> Result<Value> {
        // `requests.get` without a session: a connection of its own.
        let answer = Session::open(server)?.ask("GET", target, &[])?;
        if answer.status != 200 {
            bail!("Failed to get prefill server info: {}", answer.status);
        }
        Ok(serde_json::from_slice(&answer.body)?)
    };
    ask(TOPOLOGY)?;
    let rank = ask("/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0")?;
    let port = rank["rank_port"].as_u64().and_then(|port| u16::try_from(port).ok());
    let ip = rank["rank_ip"].as_str().context("no rank_ip")?;
    Ok((ip.to_owned(), port.context("no rank_port")?))
}

/// `heartbeat_checker`: asks each known server for its health for as long as the process lives.
pub(crate) fn heartbeat(servers: &Mutex<Vec<SocketAddr>>) {
    let mut sessions: HashMap<SocketAddr, Session> = HashMap::new();
    loop {
        std::thread::sleep(HEARTBEAT);
        for server in lock(servers).clone() {
            let mut session = match sessions.remove(&server) {
                Some(session) => session,
                None => match Session::open(server) {
                    Ok(session) => session,
                    Err(error) => {
                        eprintln!("Attempting to reconnect to {server}...: {error:#}");
                        continue;
                    }
                },
            };
            match session.ask("GET", "/health", &[]) {
                Ok(_) => {
                    sessions.insert(server, session);
                }
                Err(error) => eprintln!("Attempting to reconnect to {server}...: {error:#}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn a_rank_that_has_registered_is_found() {
        // Held until the server has it: bound for reuse and not listening.
        let held = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        held.set_reuse_address(true).unwrap();
        held.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let port = held.local_addr().unwrap().as_socket().unwrap();
        serve(port).unwrap();
        assert!(find(port).is_err(), "nobody has registered");
        register(port, port.ip(), 4711, (0, 1), 30_000).unwrap();
        assert_eq!(find(port).unwrap(), ("127.0.0.1".to_owned(), 4711));
    }
}
