//! Asks an engine's HTTP server about its load. One connection per question, with a deadline and a bound on the answer; runs
//! on a thread of its own and may take as long as the deadline.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::answers;
use crate::rooms::model::EngineGauges;

/// How long one question may take.
pub(super) const DEADLINE: Duration = Duration::from_secs(1);

/// Longest answer that is read, bytes, head included.
const LONGEST: usize = 256 << 10;

/// Header lines of an answer at most.
const MAX_HEADERS: usize = 64;

/// Asks `/v1/loads`; where that tells no inflight count, `/metrics`.
///
/// # Errors
///
/// A sentence for the operator: why neither could be had.
pub(super) fn gauges(server: SocketAddr) -> Result<EngineGauges, String> {
    let loads = get(server, "/v1/loads?include=core,disagg,queues").and_then(|body| answers::loads(&body));
    let first = match loads {
        Ok(gauges) if gauges.inflight.is_some() => return Ok(gauges),
        other => other,
    };
    // One that cannot be reached at all is not asked twice.
    if let Err(why) = &first
        && why.starts_with(UNREACHABLE)
    {
        return first;
    }
    let second = get(server, "/metrics").and_then(|body| answers::metrics(&body));
    match (first, second) {
        (Ok(loads), Ok(metrics)) => Ok(EngineGauges {
            version: loads.version,
            progress: loads.progress,
            paused: loads.paused,
            waiting: loads.waiting.or(metrics.waiting),
            running: loads.running.or(metrics.running),
            ..metrics
        }),
        (Err(_), Ok(metrics)) => Ok(metrics),
        (Ok(loads), Err(_)) => Ok(loads),
        (Err(loads), Err(metrics)) => Err(format!("{loads}; {metrics}")),
    }
}

/// Begins every sentence about a server that does not answer at all.
const UNREACHABLE: &str = "no answer";

/// The body of the answer to `GET path`, which must be 200.
fn get(server: SocketAddr, path: &str) -> Result<Vec<u8>, String> {
    let until = Instant::now() + DEADLINE;
    let name = path.split('?').next().unwrap_or(path);
    let answer = exchange(server, path, until).map_err(|e| {
        let why = match e.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => "it took longer than 1 s".to_owned(),
            _ => e.to_string(),
        };
        format!("{UNREACHABLE} to {name} from {server}: {why}")
    })?;
    let (status, body) = read(&answer).ok_or_else(|| {
        let how = if answer.len() >= LONGEST {
            "is longer than 256 KiB"
        } else {
            "is no HTTP (TLS?) or was cut short"
        };
        format!("the answer to {name} from {server} {how}")
    })?;
    match status {
        200 => Ok(body),
        401 | 403 => Err(format!("{name} answers {status}: it wants a key, which the agent does not have")),
        404 => Err(format!("{name} is not there (404)")),
        other => Err(format!("{name} answers {other}")),
    }
}

/// Sends the request and reads until the answer is whole, ends or grows too long.
fn exchange(server: SocketAddr, path: &str, until: Instant) -> std::io::Result<Vec<u8>> {
    let left =
        || until.checked_duration_since(Instant::now()).filter(|d| !d.is_zero()).ok_or(ErrorKind::TimedOut);
    let mut stream = TcpStream::connect_timeout(&server, left()?)?;
    stream.set_write_timeout(Some(left()?))?;
    let version = env!("CARGO_PKG_VERSION");
    // In one piece: what answers before it has read all of it may hang up on the rest.
    let question = format!(
        "GET {path} HTTP/1.1\r\nHost: {server}\r\nUser-Agent: roomtrace/{version}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    stream.write_all(question.as_bytes())?;
    let mut answer = Vec::new();
    let mut part = [0; 8192];
    while answer.len() < LONGEST {
        stream.set_read_timeout(Some(left()?))?;
        let n = match stream.read(&mut part) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if e.kind() == ErrorKind::Interrupted => continue,
            // What does not understand the question says so and hangs up on the rest of it.
            Err(e) if e.kind() == ErrorKind::ConnectionReset && !answer.is_empty() => break,
            Err(e) => return Err(e),
        };
        answer.extend_from_slice(part.get(..n).unwrap_or_default());
        if is_whole(&answer) {
            break;
        }
    }
    Ok(answer)
}

/// Whether nothing more is to come, as far as the answer tells before its connection ends.
fn is_whole(answer: &[u8]) -> bool {
    let Some((_, length, body)) = head(answer) else { return false };
    match length {
        Length::Bytes(n) => body.len() >= n,
        Length::Chunked => unchunk(body).is_some(),
        Length::UntilEnd => false,
    }
}

/// How long a body is.
enum Length {
    Bytes(usize),
    Chunked,
    UntilEnd,
}

/// Status, length and what is there of the body. `None`: the head is not whole, or none.
fn head(answer: &[u8]) -> Option<(u16, Length, &[u8])> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut response = httparse::Response::new(&mut headers);
    let httparse::Status::Complete(end) = response.parse(answer).ok()? else { return None };
    let value = |name: &str| {
        let header = response.headers.iter().find(|h| h.name.eq_ignore_ascii_case(name))?;
        std::str::from_utf8(header.value).ok().map(str::trim)
    };
    let length = match (value("transfer-encoding"), value("content-length")) {
        (Some(coding), _) if coding.eq_ignore_ascii_case("chunked") => Length::Chunked,
        (_, Some(n)) => Length::Bytes(n.parse().ok()?),
        _ => Length::UntilEnd,
    };
    Some((response.code?, length, answer.get(end..)?))
}

/// Status and body of a whole answer.
fn read(answer: &[u8]) -> Option<(u16, Vec<u8>)> {
    let (status, length, body) = head(answer)?;
    let body = match length {
        Length::Bytes(n) => body.get(..n)?.to_vec(),
        Length::Chunked => unchunk(body)?,
        Length::UntilEnd => (answer.len() < LONGEST).then(|| body.to_vec())?,
    };
    Some((status, body))
}

/// The body in its chunks (RFC 9112, 7.1); `None`: the last is not there.
fn unchunk(mut rest: &[u8]) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let httparse::Status::Complete((at, size)) = httparse::parse_chunk_size(rest).ok()? else {
            return None;
        };
        if size == 0 {
            return Some(body);
        }
        let end = at.checked_add(usize::try_from(size).ok()?)?;
        body.extend_from_slice(rest.get(at..end)?);
        rest = rest.get(end..)?.strip_prefix(b"\r\n")?;
    }
}

#[cfg(test)]
#[allow(clippy::indexing_slicing, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn every_framing_of_an_answer_is_read() {
        let whole = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
        assert_eq!(read(whole), Some((200, b"{}".to_vec())));
        assert!(is_whole(whole) && !is_whole(&whole[..whole.len() - 1]));
        let chunked =
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n";
        assert_eq!(read(chunked), Some((200, b"abc".to_vec())));
        assert_eq!(read(&chunked[..chunked.len() - 6]), None);
        assert_eq!(read(b"HTTP/1.0 404 X\r\n\r\nno"), Some((404, b"no".to_vec())));
        for none in [
            &b""[..],
            b"\x15\x03\x01\0\x02\x02F",
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
            b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        ] {
            assert_eq!(read(none), None);
        }
    }

    /// Asks a server that takes every connection and answers so.
    fn ask_one_that_says(answer: &'static [u8]) -> Result<EngineGauges, String> {
        let server = std::net::TcpListener::bind("127.0.0.1:0").map_err(|e| e.to_string())?;
        let address = server.local_addr().map_err(|e| e.to_string())?;
        let thread = std::thread::spawn(move || {
            for connection in server.incoming().take(2) {
                let Ok(mut connection) = connection else { return };
                let mut asked = [0; 1024];
                drop(connection.read(&mut asked));
                drop(connection.write_all(answer));
            }
        });
        let result = gauges(address);
        // It may still wait for a second question.
        drop(TcpStream::connect(address));
        drop(thread.join());
        result
    }

    #[test]
    fn what_cannot_be_used_is_said_in_words() {
        // On a busy machine an answer may come too late.
        let why = |answer| {
            let mut told = (0..30).map(|_| ask_one_that_says(answer).err().unwrap_or_default());
            told.find(|why| !why.contains("longer than 1 s")).unwrap_or_default()
        };
        for (answer, says) in [
            (&b"\x15\x03\x03\0\x02\x02\x46"[..], "no HTTP (TLS?)"),
            (b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n", "wants a key"),
            (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "has no `loads`"),
        ] {
            let why = why(answer);
            assert!(why.contains(says), "{why}");
        }
    }

    #[test]
    fn one_that_hangs_is_left_alone_after_a_second() {
        let Ok(server) = std::net::TcpListener::bind("127.0.0.1:0") else { return };
        let Ok(address) = server.local_addr() else { return };
        // The kernel takes the connection, nobody else does.
        let why = gauges(address).err().unwrap_or_default();
        assert!(why.contains("/v1/loads") && why.contains("longer than 1 s"), "{why}");
        drop(server);
        let why = gauges(address).err().unwrap_or_default();
        assert!(why.contains("refused"), "{why}");
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes: Vec<u8>) {
            let _ = read(&bytes);
            let mut chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
            chunked.extend_from_slice(&bytes);
            let _ = (read(&chunked), is_whole(&chunked));
        }
    }
}
