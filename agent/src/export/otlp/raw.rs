//! One export request over the wire as the bytes it came in: no exporter, no decoding and encoding again, which would lose
//! fields that this agent does not know.
//!
//! gRPC framing and status: gRPC over HTTP/2 (`PROTOCOL-HTTP2.md`); which failures are worth another try: OTLP specification,
//! "OTLP/gRPC response" and "OTLP/HTTP response".

use std::future::poll_fn;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, Request, header};
use base64::Engine as _;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::{BufMut as _, Bytes, BytesMut};
use http_body_util::{BodyExt as _, Full, Limited};
use prost::Message as _;
use tonic::client::GrpcService as _;
use tonic::transport::Channel;

use super::forward::Payload;
use super::partial::Taken;
use super::settings::Target;
use super::transport::{CONNECT, Failure, Recorder, Wire, chain};
use crate::engine::otlp::status::{RetryInfo, Status};

/// Path of the gRPC method.
const METHOD: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// Longest answer that is read.
const ANSWER: usize = 64 << 10;

/// Bytes before a message of gRPC.
const FRAME: usize = 5;

/// gRPC writes binary metadata without padding and takes it with.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Sends it.
///
/// # Errors
/// What is to be done about it.
pub(super) async fn send(target: &Target, wire: &Wire, payload: &Payload) -> Result<Taken, Failure> {
    let limit = target.timeout + CONNECT;
    let sending = async {
        match wire {
            Wire::Grpc(channel) => grpc(target, channel.clone(), payload).await,
            Wire::Http(client) => http(target, client, payload).await,
        }
    };
    let late = || Failure::Later { why: format!("no answer within {} s", limit.as_secs()), after: None };
    tokio::time::timeout(limit, sending).await.unwrap_or_else(|_| Err(late()))
}

async fn http(target: &Target, client: &Recorder, payload: &Payload) -> Result<Taken, Failure> {
    let mut request = Request::post(&target.endpoint).header(header::CONTENT_TYPE, "application/x-protobuf");
    if payload.gzip {
        request = request.header(header::CONTENT_ENCODING, "gzip");
    }
    if payload.bytes.is_empty() {
        // The client leaves it out where there is no body, and some receivers wait for one then (RFC 9110, section 8.6: a POST says it).
        request = request.header(header::CONTENT_LENGTH, 0);
    }
    let never = |e: axum::http::Error| Failure::Never { why: e.to_string() };
    let request = request.body(payload.bytes.clone()).map_err(never)?;
    let answer = client.send_as_is(request).await?;
    Ok(if answer.len() > ANSWER { Taken::default() } else { Taken::read(&answer) })
}

async fn grpc(target: &Target, mut channel: Channel, payload: &Payload) -> Result<Taken, Failure> {
    let later = |e: tonic::transport::Error| Failure::Later { why: chain(&e), after: None };
    poll_fn(|cx| channel.poll_ready(cx)).await.map_err(later)?;
    let answer = channel.call(framed(target, payload)?).await.map_err(later)?;
    let (head, body) = answer.into_parts();
    if head.headers.contains_key("grpc-status") {
        return verdict(&head.headers).map(|()| Taken::default());
    }
    match head.status.as_u16() {
        200 => {}
        status @ (429 | 502..=504) => {
            return Err(Failure::Later { why: format!("answer {status}"), after: None });
        }
        status => return Err(Failure::Never { why: format!("answer {status}: not gRPC") }),
    }
    let whole = match Limited::new(body, ANSWER).collect().await {
        Ok(whole) => whole,
        Err(e) => return Err(Failure::Later { why: format!("its answer broke off: {e}"), after: None }),
    };
    verdict(whole.trailers().unwrap_or(&HeaderMap::new()))?;
    let message = whole.to_bytes();
    // A flag (0: not compressed, as nothing else was asked for) and the length stand before it.
    let plain = message.first() == Some(&0);
    Ok(message.get(FRAME..).filter(|_| plain).map(Taken::read).unwrap_or_default())
}

fn framed(target: &Target, payload: &Payload) -> Result<Request<tonic::body::Body>, Failure> {
    let mut frame = BytesMut::with_capacity(payload.bytes.len() + FRAME);
    frame.put_u8(u8::from(payload.gzip));
    frame.put_u32(u32::try_from(payload.bytes.len()).unwrap_or(u32::MAX));
    frame.put_slice(&payload.bytes);
    let mut request = Request::post(METHOD)
        .header(header::CONTENT_TYPE, "application/grpc")
        .header(header::TE, "trailers")
        .body(tonic::body::Body::new(Full::new(frame.freeze())))
        .map_err(|e| Failure::Never { why: e.to_string() })?;
    if payload.gzip {
        request.headers_mut().insert("grpc-encoding", HeaderValue::from_static("gzip"));
    }
    for (name, value) in &target.headers {
        request.headers_mut().insert(name.clone(), value.clone());
    }
    Ok(request)
}

/// What a gRPC status means.
fn verdict(trailers: &HeaderMap) -> Result<(), Failure> {
    let text = |name: &str| trailers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default();
    let code = text("grpc-status");
    let why = || format!("gRPC status {code} {}", text("grpc-message"));
    let after = retry_info(trailers);
    match code.parse::<u8>() {
        Ok(0) => Ok(()),
        // CANCELLED, DEADLINE_EXCEEDED, ABORTED, OUT_OF_RANGE, UNAVAILABLE, DATA_LOSS.
        Ok(1 | 4 | 10 | 11 | 14 | 15) => Err(Failure::Later { why: why(), after }),
        // RESOURCE_EXHAUSTED: only where it says when.
        Ok(8) if after.is_some() => Err(Failure::Later { why: why(), after }),
        Ok(8) => Err(Failure::TooLarge { why: why(), surely: false }),
        Ok(_) => Err(Failure::Never { why: why() }),
        Err(_) => Err(Failure::Later { why: "its answer has no gRPC status".to_owned(), after: None }),
    }
}

/// `google.rpc.RetryInfo` among the details.
fn retry_info(trailers: &HeaderMap) -> Option<Duration> {
    let details = BASE64.decode(trailers.get("grpc-status-details-bin")?.as_bytes()).ok()?;
    let status = Status::decode(Bytes::from(details)).ok()?;
    RetryInfo::among(&status.details)
}
