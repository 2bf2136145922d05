//! What hyper says, which is under SGLang's router: a client and a server of it, live, with a tap between them.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod http_support;

use std::sync::{Arc, Mutex};

use axum::routing::post;
use axum::{Json, Router};
use http_support::{ROOM, Step, brief, capped, run};
use roomtrace::event::Direction::{self, Received, Sent};
use roomtrace::http::Ending;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

type Tape = Arc<Mutex<Vec<Step>>>;

async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, direction: Direction, tape: Tape) {
    let mut buffer = vec![0; 256_000];
    loop {
        let len = from.read(&mut buffer).await.unwrap();
        let bytes = buffer[..len].to_vec();
        tape.lock().unwrap().push(match len {
            0 => Step::End(Ending::Fin(direction)),
            _ => Step::Bytes(direction, bytes.clone()),
        });
        if len == 0 {
            let _ = to.shutdown().await;
            return;
        }
        if to.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

#[tokio::test]
async fn hyper_keeps_its_connection() {
    let engine = Router::new().route(
        "/generate",
        post(async |Json(body): Json<Value>| {
            Json(json!({"text": "", "meta_info": {"id": body["rid"], "finish_reason": {"type": "stop"}}}))
        }),
    );
    let server = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = server.local_addr().unwrap();
    tokio::spawn(async { axum::serve(server, engine).await });

    let tap = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/generate", tap.local_addr().unwrap());
    let tape = Tape::default();
    let recorder = {
        let tape = tape.clone();
        tokio::spawn(async move {
            let (client, _) = tap.accept().await.unwrap();
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = TcpStream::connect(address).await.unwrap().into_split();
            tokio::join!(
                pump(from_client, to_server, Received, tape.clone()),
                pump(from_server, to_client, Sent, tape)
            );
        })
    };
    // The client asks for it even where there is no TLS.
    drop(rustls::crypto::ring::default_provider().install_default());
    let client = reqwest::Client::new();
    for rid in ["first", "second"] {
        // Keys in alphabetical order: the room is in front of the text.
        let body = json!({"rid": rid, "text": "x".repeat(20_000), "bootstrap_room": ROOM});
        let answer = client.post(&url).json(&body).send().await.unwrap();
        assert_eq!(answer.json::<Value>().await.unwrap()["meta_info"]["id"], rid);
    }
    drop(client);
    recorder.await.unwrap();

    let tape = tape.lock().unwrap().clone();
    // What was not read may say `sampling_params` with an `n`.
    for (keep, seen, more) in [(1 << 20, "Whole", ""), (1024, "Head", " and maybe more")] {
        let (events, _) = run(&capped(&tape, keep));
        let mut expected = vec!["requests Received from_start true".to_owned()];
        for (n, rid) in ["first", "second"].iter().enumerate() {
            expected.extend([
                format!("{n} begun Post Generate"),
                format!("{n} whole {seen} {ROOM}{more} rid {rid}"),
                format!("{n} answer 200"),
                format!("{n} first byte"),
                format!("{n} end ContentLength Outcome(Finished)"),
            ]);
        }
        assert_eq!(brief(&events), expected);
    }
}
