//! Answers compressed (gzip) for clients that ask for it: over a slow link most of an answer's time is its bytes.

use std::io::Write as _;

use axum::body::{Body, to_bytes};
use axum::extract::Request;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use flate2::Compression;
use flate2::write::GzEncoder;

/// Smaller answers fit in one packet as they are.
const WORTHWHILE: usize = 1 << 10;

/// Answers the same, smaller. The work is the exporters' threads', on which nothing is urgent: a hundredth of a second for an answer of
/// a megabyte.
pub(super) async fn compressed(request: Request, next: Next) -> Response {
    let wanted = request.method() == axum::http::Method::GET && accepted(request.headers());
    let mut answer = next.run(request).await;
    answer.headers_mut().append(header::VARY, HeaderValue::from_static("accept-encoding"));
    if !wanted || answer.headers().contains_key(header::CONTENT_ENCODING) {
        return answer;
    }
    let (mut head, body) = answer.into_parts();
    // All answers of this server are made whole before they are sent, so there is a limit already.
    let Ok(body) = to_bytes(body, usize::MAX).await else {
        return axum::http::StatusCode::INTERNAL_SERVER_ERROR.into_response();
    };
    let small = (body.len() >= WORTHWHILE).then(|| gzip(&body)).flatten();
    let Some(small) = small else { return Response::from_parts(head, Body::from(body)) };
    head.headers.remove(header::CONTENT_LENGTH);
    head.headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    Response::from_parts(head, Body::from(small))
}

fn gzip(body: &[u8]) -> Option<Vec<u8>> {
    let mut to = GzEncoder::new(Vec::with_capacity(body.len() / 4), Compression::fast());
    to.write_all(body).ok()?;
    to.finish().ok()
}

/// Whether the client takes gzip (RFC 9110, section 12.5.3: a coding without a weight of 0).
fn accepted(headers: &HeaderMap) -> bool {
    let all = headers.get_all(header::ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let mut codings = all.flat_map(|value| value.split(','));
    codings.any(|coding| {
        let mut parts = coding.split(';').map(str::trim);
        let gzip = parts.next().is_some_and(|name| name.eq_ignore_ascii_case("gzip"));
        let refused = |weight: &str| {
            let weight = weight.strip_prefix("q=").or_else(|| weight.strip_prefix("Q="));
            weight.is_some_and(|weight| weight.parse::<f32>().is_ok_and(|weight| weight <= 0.0))
        };
        gzip && !parts.any(refused)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn gzip_is_sent_to_whom_takes_it() {
        let takes = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT_ENCODING, value.parse().unwrap());
            accepted(&headers)
        };
        for value in ["gzip", "deflate, gzip", "GZIP;q=0.5", "br;q=1.0, gzip;q=0.8, *;q=0.1"] {
            assert!(takes(value), "{value}");
        }
        for value in ["", "identity", "deflate", "gzip;q=0", "gzip; q=0.000", "gzipped"] {
            assert!(!takes(value), "{value}");
        }
        assert!(!accepted(&HeaderMap::new()));
    }
}
