//! Just enough of HTTP/1.1 for the engines' servers, the bootstrap server and their clients: whole messages in and
//! out, over whatever reads and writes bytes. Heads are parsed by httparse. Knows nothing of rooms.

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Header fields that are looked at.
const FIELDS: usize = 32;

/// A request.
#[derive(Debug)]
pub(crate) struct Request {
    pub method: String,
    /// With its query.
    pub target: String,
    pub body: Vec<u8>,
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

/// How long a body is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Length {
    Bytes(usize),
    Chunked,
}

/// One direction of a connection, read message by message.
pub(crate) struct Inbound<R> {
    from: R,
    buffer: Vec<u8>,
    space: Vec<u8>,
}

impl<R: Read> Inbound<R> {
    /// `space`: bytes asked for with one read.
    pub(crate) fn new(from: R, space: usize) -> Self {
        Self { from, buffer: Vec::new(), space: vec![0; space] }
    }

    /// The next request; `None`: the connection ended.
    ///
    /// # Errors
    /// When reading fails or what comes is not HTTP.
    pub(crate) fn request(&mut self) -> io::Result<Option<Request>> {
        let Some(((method, target), length, head)) = self.head(|bytes| {
            let mut fields = [httparse::EMPTY_HEADER; FIELDS];
            let mut request = httparse::Request::new(&mut fields);
            let done = request.parse(bytes).map_err(invalid)?;
            let start =
                (request.method.unwrap_or_default().to_owned(), request.path.unwrap_or_default().to_owned());
            Ok((start, length(request.headers)?, done))
        })?
        else {
            return Ok(None);
        };
        let body = self.body(head, length)?;
        Ok(Some(Request { method, target, body }))
    }

    /// The next answer, read to its end; `None`: the connection ended. `first` is called when the first byte of its
    /// body is there.
    ///
    /// # Errors
    /// When reading fails or what comes is not HTTP.
    pub(crate) fn answer(&mut self, first: impl FnOnce(u16)) -> io::Result<Option<Answer>> {
        let Some((status, length, head)) = self.head(|bytes| {
            let mut fields = [httparse::EMPTY_HEADER; FIELDS];
            let mut answer = httparse::Response::new(&mut fields);
            let done = answer.parse(bytes).map_err(invalid)?;
            Ok((answer.code.unwrap_or(0), length(answer.headers)?, done))
        })?
        else {
            return Ok(None);
        };
        if length != Length::Bytes(0) {
            self.need(head + 1)?;
            first(status);
        }
        let body = self.body(head, length)?;
        Ok(Some(Answer { status, body }))
    }

    /// Reads until a head is whole: what it says, how long its body is, and its own length.
    fn head<T>(&mut self, parse: Parse<T>) -> io::Result<Option<(T, Length, usize)>> {
        loop {
            if let (start, length, httparse::Status::Complete(head)) = parse(&self.buffer)? {
                return Ok(Some((start, length, head)));
            }
            if !self.more()? {
                return if self.buffer.is_empty() { Ok(None) } else { Err(ErrorKind::UnexpectedEof.into()) };
            }
        }
    }

    /// Takes head and body out of the buffer.
    fn body(&mut self, head: usize, length: Length) -> io::Result<Vec<u8>> {
        match length {
            Length::Bytes(n) => {
                self.need(head + n)?;
                let body = self.buffer.get(head..head + n).unwrap_or_default().to_vec();
                self.buffer.drain(..head + n);
                Ok(body)
            }
            Length::Chunked => {
                self.buffer.drain(..head);
                let mut body = Vec::new();
                while self.chunk(&mut body)? {}
                Ok(body)
            }
        }
    }

    /// One chunk. `false`: it was the last.
    fn chunk(&mut self, body: &mut Vec<u8>) -> io::Result<bool> {
        loop {
            match httparse::parse_chunk_size(&self.buffer) {
                Ok(httparse::Status::Complete((begins, size))) => {
                    let size = usize::try_from(size).map_err(invalid)?;
                    self.need(begins + size + 2)?;
                    body.extend_from_slice(self.buffer.get(begins..begins + size).unwrap_or_default());
                    self.buffer.drain(..begins + size + 2);
                    return Ok(size > 0);
                }
                Ok(httparse::Status::Partial) => self.need(self.buffer.len() + 1)?,
                Err(_) => return Err(ErrorKind::InvalidData.into()),
            }
        }
    }

    fn need(&mut self, bytes: usize) -> io::Result<()> {
        while self.buffer.len() < bytes {
            if !self.more()? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    fn more(&mut self) -> io::Result<bool> {
        let n = loop {
            match self.from.read(&mut self.space) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => break other?,
            }
        };
        self.buffer.extend_from_slice(self.space.get(..n).unwrap_or_default());
        Ok(n > 0)
    }
}

type Parse<T> = fn(&[u8]) -> io::Result<(T, Length, httparse::Status<usize>)>;

fn invalid<E>(_: E) -> io::Error {
    ErrorKind::InvalidData.into()
}

fn length(fields: &[httparse::Header<'_>]) -> io::Result<Length> {
    let value = |name: &str| fields.iter().find(|f| f.name.eq_ignore_ascii_case(name)).map(|f| f.value);
    if value("transfer-encoding").is_some_and(|coding| coding.eq_ignore_ascii_case(b"chunked")) {
        return Ok(Length::Chunked);
    }
    let Some(value) = value("content-length") else { return Ok(Length::Bytes(0)) };
    let number = std::str::from_utf8(value).map_err(invalid)?.trim().parse().map_err(invalid)?;
    Ok(Length::Bytes(number))
}

/// Writes head and body with one call (`writev`), more only where the kernel takes less.
///
/// # Errors
/// When writing fails.
pub(crate) fn write(to: &mut impl Write, head: &str, body: &[u8]) -> io::Result<()> {
    let parts = [IoSlice::new(head.as_bytes()), IoSlice::new(body)];
    let taken = to.write_vectored(&parts)?;
    if let Some(rest) = head.as_bytes().get(taken..) {
        to.write_all(rest)?;
        return to.write_all(body);
    }
    to.write_all(body.get(taken - head.len()..).unwrap_or_default())
}

/// Head of a uvicorn answer.
pub(crate) fn answer_head(status: u16, kind: &str, length: Option<usize>) -> String {
    let reason = match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        503 => "Service Unavailable",
        _ => "Internal Server Error",
    };
    let length =
        length.map_or_else(|| "transfer-encoding: chunked".to_owned(), |n| format!("content-length: {n}"));
    format!(
        "HTTP/1.1 {status} {reason}\r\ndate: Mon, 30 Nov 2026 03:00:00 GMT\r\nserver: uvicorn\r\n{length}\r\n\
         content-type: {kind}\r\n\r\n"
    )
}

/// Head of a request with a body of `length` bytes.
pub(crate) fn request_head(method: &str, target: &str, host: SocketAddr, length: usize) -> String {
    let body = if length > 0 {
        format!("content-type: application/json\r\ncontent-length: {length}\r\n")
    } else {
        String::new()
    };
    format!("{method} {target} HTTP/1.1\r\nhost: {host}\r\naccept: */*\r\n{body}\r\n")
}

/// A kept connection to a server, as Python's `requests` uses one: head and body go out in two calls.
pub(crate) struct Session {
    host: SocketAddr,
    stream: TcpStream,
    inbound: Inbound<TcpStream>,
}

impl Session {
    /// Connects; each read waits 5 seconds at most.
    ///
    /// # Errors
    /// When nobody listens there.
    pub(crate) fn open(host: SocketAddr) -> Result<Self> {
        let wait = Duration::from_secs(5);
        let stream = TcpStream::connect_timeout(&host, wait).with_context(|| format!("connect to {host}"))?;
        stream.set_read_timeout(Some(wait))?;
        stream.set_nodelay(true)?;
        let inbound = Inbound::new(stream.try_clone()?, 8192);
        Ok(Self { host, stream, inbound })
    }

    /// Asks and reads the answer.
    ///
    /// # Errors
    /// When the connection fails or ends.
    pub(crate) fn ask(&mut self, method: &str, target: &str, body: &[u8]) -> Result<Answer> {
        let head = request_head(method, target, self.host, body.len());
        self.stream.write_all(head.as_bytes())?;
        if !body.is_empty() {
            self.stream.write_all(body)?;
        }
        match self.inbound.answer(|_| {})? {
            Some(answer) => Ok(answer),
            None => bail!("{} closed the connection", self.host),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    /// Gives one byte at a time.
    struct Drip<'a>(&'a [u8]);

    impl Read for Drip<'_> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            let Some((first, rest)) = self.0.split_first() else { return Ok(0) };
            self.0 = rest;
            *buf.first_mut().unwrap() = *first;
            Ok(1)
        }
    }

    #[test]
    fn requests_follow_each_other_on_one_connection() {
        let bytes = b"POST /generate HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}GET /health HTTP/1.1\r\n\r\n";
        let mut inbound = Inbound::new(Drip(bytes), 7);
        let first = inbound.request().unwrap().unwrap();
        assert_eq!((first.method.as_str(), first.body.as_slice()), ("POST", b"{}".as_slice()));
        assert_eq!(inbound.request().unwrap().unwrap().target, "/health");
        assert!(inbound.request().unwrap().is_none());
    }

    #[test]
    fn answers_are_read_to_their_last_chunk() {
        let bytes = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n\
            HTTP/1.1 500 Internal Server Error\r\ncontent-length: 1\r\n\r\nx";
        let mut inbound = Inbound::new(Drip(bytes), 64);
        let mut first = 0;
        let answer = inbound.answer(|status| first = status).unwrap().unwrap();
        assert_eq!((answer.status, answer.body.as_slice(), first), (200, b"abcde".as_slice(), 200));
        assert_eq!(inbound.answer(|_| {}).unwrap().unwrap().status, 500);
    }

    #[test]
    fn head_and_body_are_one_call() {
        struct Counts(Vec<u8>, usize);
        impl Write for Counts {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                unreachable!("only writev")
            }
            fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
                self.1 += 1;
                for part in parts {
                    self.0.extend_from_slice(part);
                }
                Ok(self.0.len())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut to = Counts(Vec::new(), 0);
        write(&mut to, "head", b"body").unwrap();
        assert_eq!((to.0.as_slice(), to.1), (b"headbody".as_slice(), 1));
    }
}
