//! `google.rpc.Status` and `RetryInfo`: how OTLP tells failures over both transports (`google/rpc/status.proto`,
//! `error_details.proto`). Pure.

use std::time::Duration;

use prost::Message as _;

const RETRY_INFO: &str = "type.googleapis.com/google.rpc.RetryInfo";

/// What went wrong.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct Status {
    /// gRPC code.
    #[prost(int32, tag = "1")]
    pub(crate) code: i32,
    /// For the operator.
    #[prost(string, tag = "2")]
    pub(crate) message: String,
    /// More.
    #[prost(message, repeated, tag = "3")]
    pub(crate) details: Vec<Detail>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct Detail {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// When to come again.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    delay: Option<Delay>,
}

/// `google.protobuf.Duration`.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
struct Delay {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}

impl RetryInfo {
    /// As a detail.
    pub(super) fn detail(after: Duration) -> Detail {
        let seconds = i64::try_from(after.as_secs()).unwrap_or(i64::MAX);
        let nanos = i32::try_from(after.subsec_nanos()).unwrap_or_default();
        let info = Self { delay: Some(Delay { seconds, nanos }) };
        Detail { type_url: RETRY_INFO.to_owned(), value: info.encode_to_vec() }
    }

    /// The first among details. One without a delay, or with a negative one, says that another try is worth it.
    pub(crate) fn among(details: &[Detail]) -> Option<Duration> {
        let detail = details.iter().find(|d| d.type_url == RETRY_INFO)?;
        let delay = Self::decode(detail.value.as_slice()).ok()?.delay.unwrap_or_default();
        let (seconds, nanos) = (u64::try_from(delay.seconds), u32::try_from(delay.nanos));
        Some(Duration::from_secs(seconds.unwrap_or(0)) + Duration::from_nanos(nanos.unwrap_or(0).into()))
    }
}
