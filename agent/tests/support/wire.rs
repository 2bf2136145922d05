//! SGLang messages and ZMTP handshakes as bytes, for tests and benches.
#![allow(
    dead_code,
    unreachable_pub,
    missing_docs,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    reason = "shared by several test and bench programs"
)]

pub fn frame(body: &[u8], more: bool) -> Vec<u8> {
    let mut out = vec![u8::from(more)];
    if let Ok(len) = u8::try_from(body.len()) {
        out.push(len);
    } else {
        out[0] |= 2;
        out.extend_from_slice(&u64::try_from(body.len()).unwrap().to_be_bytes());
    }
    out.extend_from_slice(body);
    out
}

pub fn message(frames: &[&[u8]]) -> Vec<u8> {
    frames.iter().enumerate().flat_map(|(i, f)| frame(f, i + 1 < frames.len())).collect()
}

/// STATUS Success of SGLang 0.4.5 and later.
pub fn status(room: u64) -> Vec<u8> {
    message(&[room.to_string().as_bytes(), b"4", b"0"])
}

/// METADATA of SGLang 0.5.17 and later, of a decode rank at `host`, port 41207.
pub fn metadata_from(host: &str, room: u64, pages: usize, required: u32) -> Vec<u8> {
    let index: Vec<u8> = (1..=u32::try_from(pages).unwrap()).flat_map(u32::to_le_bytes).collect();
    let (room, session, required) = (room.to_string(), format!("{host}:15847"), required.to_string());
    message(&[
        room.as_bytes(),
        host.as_bytes(),
        b"41207",
        session.as_bytes(),
        &index,
        b"3",
        b"",
        required.as_bytes(),
        b"0",
        b"",
    ])
}

pub fn greeting(mechanism: &[u8]) -> Vec<u8> {
    let mut out = vec![0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 1];
    out.extend_from_slice(mechanism);
    out.resize(64, 0);
    out
}

pub fn ready(socket_type: &[u8]) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type\0\0\0".to_vec();
    body.push(u8::try_from(socket_type.len()).unwrap());
    body.extend_from_slice(socket_type);
    let mut out = vec![4, u8::try_from(body.len()).unwrap()];
    out.extend_from_slice(&body);
    out
}

/// Greeting and READY of a PUSH socket.
pub fn handshake() -> Vec<u8> {
    [greeting(b"NULL"), ready(b"PUSH")].concat()
}
