//! One export request over the wire, as the bytes it is given in (those of others are not decoded and encoded again, which would lose
//! fields that this agent does not know), and what the answer says.
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
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceResponse;
use prost::Message as _;
use tonic::client::GrpcService as _;
use tonic::transport::Channel;

use super::forward::Payload;
use super::settings::Target;
use super::transport::{CONNECT, Failure, Wire, chain};
use crate::engine::otlp::status::{RetryInfo, Status};
use crate::export::counters::Signal;

/// Longest answer that is read.
const ANSWER: usize = 64 << 10;

/// Characters of what a receiver says that are kept.
const WHY: usize = 256;

/// Bytes before a message of gRPC.
const FRAME: usize = 5;

/// gRPC writes binary metadata without padding and takes it with.
const BASE64: GeneralPurpose = GeneralPurpose::new(
    &base64::alphabet::STANDARD,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// What an operator is told where a receiver takes requests and refuses some of what is in them.
pub(super) const PARTLY: &str = "the receiver takes requests but not all that is in them, or has something to say of it: what it rejects is \
                                 lost and counted (roomtrace_export_dropped_total, reason `rejected`); its own log, limits and quotas say why";

/// A request was taken, perhaps not all that is in it: that must not be sent again (OTLP specification, "Partial Success").
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Taken {
    /// Spans, log records or data points that the receiver has refused.
    pub(super) rejected: u64,
    /// What it says to that, or to what it has taken; mostly nothing.
    pub(super) why: String,
}

impl Taken {
    /// What an answer of any signal says: all three are alike (`ExportTracePartialSuccess`, `ExportLogsPartialSuccess`,
    /// `ExportMetricsPartialSuccess`). One that cannot be read says nothing.
    fn read(answer: &[u8]) -> Self {
        let answer = ExportTraceServiceResponse::decode(answer).unwrap_or_default();
        let partial = answer.partial_success.unwrap_or_default();
        let why = partial.error_message.chars().take(WHY).collect();
        Self { rejected: u64::try_from(partial.rejected_spans).unwrap_or(0), why }
    }

    /// Whether there is something to tell the operator.
    pub(super) fn tells(&self) -> bool {
        self.rejected > 0 || !self.why.is_empty()
    }
}

/// Path of the gRPC method.
const fn method(signal: Signal) -> &'static str {
    match signal {
        Signal::Logs => "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
        Signal::Metrics => "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
        _ => "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    }
}

/// Sends it. Needs a runtime around it.
///
/// # Errors
/// What is to be done about it.
pub(super) async fn send(
    target: &Target,
    wire: &Wire,
    payload: &Payload,
    signal: Signal,
) -> Result<Taken, Failure> {
    let limit = target.timeout + CONNECT;
    let sending = async {
        match wire {
            Wire::Grpc(channel) => grpc(target, channel.clone(), payload, signal).await,
            Wire::Http(client) => http(target, client, payload).await,
        }
    };
    let late = || Failure::Later { why: format!("no answer within {} s", limit.as_secs()), after: None };
    tokio::time::timeout(limit, sending).await.unwrap_or_else(|_| Err(late()))
}

async fn http(target: &Target, client: &reqwest::Client, payload: &Payload) -> Result<Taken, Failure> {
    let later = |e: reqwest::Error| Failure::Later { why: chain(&e), after: None };
    let mut request = client
        .post(&target.endpoint)
        .header(header::CONTENT_TYPE, "application/x-protobuf")
        .body(payload.bytes.clone());
    if payload.gzip {
        request = request.header(header::CONTENT_ENCODING, "gzip");
    }
    // Configured ones win.
    let own: HeaderMap = target.headers.iter().cloned().collect();
    let mut answer = request.headers(own).send().await.map_err(later)?;
    let status = answer.status();
    if !status.is_success() {
        return Err(status_failure(
            status.as_u16(),
            retry_after(answer.headers()),
            format!("answer {status}"),
        ));
    }
    let mut body = Vec::new();
    // It has taken the request, whatever becomes of the rest of its answer.
    while let Ok(Some(part)) = answer.chunk().await {
        if body.len() + part.len() > ANSWER {
            return Ok(Taken::default());
        }
        body.extend_from_slice(&part);
    }
    Ok(Taken::read(&body))
}

/// OTLP specification, "OTLP/HTTP response".
const fn status_failure(status: u16, after: Option<Duration>, why: String) -> Failure {
    match status {
        413 => Failure::TooLarge { why, surely: true },
        429 | 502..=504 => Failure::Later { why, after },
        _ => Failure::Never { why },
    }
}

/// `Retry-After` in seconds. (The form with a date is left to the ordinary back-off.)
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get("retry-after")?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

async fn grpc(
    target: &Target,
    mut channel: Channel,
    payload: &Payload,
    signal: Signal,
) -> Result<Taken, Failure> {
    let later = |e: tonic::transport::Error| Failure::Later { why: chain(&e), after: None };
    poll_fn(|cx| channel.poll_ready(cx)).await.map_err(later)?;
    let answer = channel.call(framed(target, payload, method(signal))?).await.map_err(later)?;
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

fn framed(target: &Target, payload: &Payload, method: &str) -> Result<Request<tonic::body::Body>, Failure> {
    let mut frame = BytesMut::with_capacity(payload.bytes.len() + FRAME);
    frame.put_u8(u8::from(payload.gzip));
    frame.put_u32(u32::try_from(payload.bytes.len()).unwrap_or(u32::MAX));
    frame.put_slice(&payload.bytes);
    let mut request = Request::post(method)
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
        // CANCELLED, DEADLINE_EXCEEDED, ABORTED, UNAVAILABLE, DATA_LOSS.
        Ok(1 | 4 | 10 | 14 | 15) => Err(Failure::Later { why: why(), after }),
        // OUT_OF_RANGE: so tonic's servers refuse a message above their limit (Go's: RESOURCE_EXHAUSTED).
        Ok(11) => Err(Failure::TooLarge { why: why(), surely: true }),
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn grpc(code: u16) -> Result<(), Failure> {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", HeaderValue::from(code));
        verdict(&trailers)
    }

    #[test]
    fn codes_are_told_apart_as_the_specification_says() {
        assert_eq!(grpc(0), Ok(()));
        for code in [1, 4, 10, 14, 15] {
            assert!(matches!(grpc(code), Err(Failure::Later { .. })), "{code}");
        }
        for code in [2, 3, 5, 6, 7, 9, 12, 13, 16, 99] {
            assert!(matches!(grpc(code), Err(Failure::Never { .. })), "{code}");
        }
        for code in [8, 11] {
            assert!(matches!(grpc(code), Err(Failure::TooLarge { .. })), "{code}");
        }
        assert!(matches!(verdict(&HeaderMap::new()), Err(Failure::Later { .. })));
    }

    #[test]
    fn any_bytes_are_an_answer() {
        assert_eq!(Taken::read(b""), Taken::default());
        assert_eq!(Taken::read(&[0xff; 40]), Taken::default());
        // partial_success { rejected_spans: -1, error_message: "x" }
        let minus = [10, 14, 8, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1, 18, 1, b'x'];
        assert_eq!(Taken::read(&minus), Taken { rejected: 0, why: "x".to_owned() });
    }
}
