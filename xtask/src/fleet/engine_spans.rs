//! Spans that the test sends itself, over OTLP/HTTP: that of one request as an engine that traces sends it (SGLang 0.5.23,
//! `srt/observability/trace.py`), and such as only one policy of the gateways keeps.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// A span.
pub(super) struct Made<'a> {
    pub(super) scope: &'a str,
    pub(super) service: &'a str,
    pub(super) name: &'a str,
    pub(super) trace: u128,
    /// Nanoseconds since 1970.
    pub(super) began: u64,
    pub(super) ended: u64,
    /// Whether its status is an error.
    pub(super) error: bool,
    pub(super) attributes: &'a [(&'a str, &'a str)],
}

/// Tells the agent's receiver of a request that has ended. `trace`: the engine's own.
pub(super) fn send(to: SocketAddr, room: u64, role: &str, trace: u128, began: u64, ended: u64) -> Result<()> {
    let name = format!("{role} Req 4f1d7a0c");
    let room = format!("{room:#x}");
    let attributes =
        [("rid", "4f1d7a0c9b3e4d55"), ("module", "sglang::request"), ("bootstrap_room", room.as_str())];
    let (scope, service) = ("sglang server", "sglang");
    send_made(
        to,
        &Made { scope, service, name: &name, trace, began, ended, error: false, attributes: &attributes },
    )
}

/// Sends a span to the agent's receiver, which hands it on.
pub(super) fn send_made(to: SocketAddr, made: &Made<'_>) -> Result<()> {
    let mut span = bytes(1, &made.trace.to_be_bytes());
    span.extend(bytes(2, &made.began.to_be_bytes()));
    span.extend(bytes(5, made.name.as_bytes()));
    span.extend([6 << 3, 1]);
    span.extend(fixed(7, made.began));
    span.extend(fixed(8, made.ended));
    for (key, value) in made.attributes {
        span.extend(bytes(9, &attribute(key, value)));
    }
    if made.error {
        // STATUS_CODE_ERROR.
        span.extend(bytes(15, &[3 << 3, 2]));
    }
    let scope = bytes(1, &bytes(1, made.scope.as_bytes()));
    let spans = bytes(2, &[scope, bytes(2, &span)].concat());
    let resource = bytes(1, &bytes(1, &attribute("service.name", made.service)));
    post(to, &bytes(1, &[resource, spans].concat()))
}

/// A length-delimited field of a message (Protocol Buffers, "Encoding").
fn bytes(number: u8, content: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    let mut length = content.len();
    while length >= 0x80 {
        field.extend(u8::try_from(length & 0x7f | 0x80));
        length >>= 7;
    }
    field.extend(u8::try_from(length));
    field.extend(content);
    field
}

fn fixed(number: u8, value: u64) -> Vec<u8> {
    let mut field = vec![number << 3 | 1];
    field.extend(value.to_le_bytes());
    field
}

fn attribute(key: &str, value: &str) -> Vec<u8> {
    [bytes(1, key.as_bytes()), bytes(2, &bytes(1, value.as_bytes()))].concat()
}

fn post(to: SocketAddr, body: &[u8]) -> Result<()> {
    let mut stream = TcpStream::connect(to).with_context(|| format!("reach the agent's receiver at {to}"))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let head = format!(
        "POST /v1/traces HTTP/1.1\r\nHost: {to}\r\nContent-Type: application/x-protobuf\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes())?;
    stream.write_all(body)?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let answer = String::from_utf8_lossy(&answer);
    if answer.split_whitespace().nth(1) != Some("200") {
        bail!("the agent's receiver of spans answers {}", answer.lines().next().unwrap_or_default());
    }
    Ok(())
}
