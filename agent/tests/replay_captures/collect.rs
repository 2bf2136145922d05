//! What a replay said, kept, and the streams it amounts to.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::net::SocketAddr;

use roomtrace::event::{
    Body, Bytes, Direction, Found, Mono, NotCaptured, Sequence, SocketEvent, SocketId, StateChange, TcpState,
    What,
};
use roomtrace::replay::{Replay, ReplayError, Summary};

/// An event that owns its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    Bytes { direction: Direction, end: u32, len: u32, body: Result<Vec<u8>, NotCaptured>, una: u32, nxt: u32 },
    State { old: TcpState, new: TcpState, error: u32, sequence: Sequence },
    Found(Found),
}

#[derive(Clone, Debug)]
pub(crate) struct Event {
    pub(crate) at: Mono,
    pub(crate) socket: SocketId,
    pub(crate) local: SocketAddr,
    pub(crate) peer: SocketAddr,
    pub(crate) said: Said,
}

impl From<SocketEvent<'_>> for Event {
    fn from(e: SocketEvent<'_>) -> Self {
        assert_eq!((e.task, e.netns), (None, 0));
        let said = match e.what {
            What::Bytes(Bytes { direction, end, len, body, snd_una, rcv_nxt }) => {
                let body = match body {
                    Body::Whole(b) => Ok(b.to_vec()),
                    Body::Absent(why) => Err(why),
                    Body::Ends { .. } => unreachable!("a packet has all its bytes or none"),
                };
                assert!(len > 0);
                assert!(body.as_ref().map_or(true, |b| b.len() == len as usize), "a whole body is whole");
                Said::Bytes { direction, end, len, body, una: snd_una, nxt: rcv_nxt }
            }
            What::State(StateChange { old, new, error, sequence }) => {
                Said::State { old, new, error, sequence }
            }
            What::Found(found) => Said::Found(found),
            What::Trouble(_) | What::Stand(_) => unreachable!("a capture tells of neither"),
        };
        Self { at: e.at, socket: e.socket, local: e.addresses.local, peer: e.addresses.peer, said }
    }
}

/// Replays a file from memory and checks what holds for every replay.
pub(crate) fn replay(file: &[u8]) -> Result<(Vec<Event>, Summary), ReplayError> {
    let mut events: Vec<Event> = Vec::new();
    let summary = Replay::from_reader(Cursor::new(file))?.run(&mut |e| events.push(e.into()))?;
    assert!(events.is_sorted_by_key(|e| e.at), "time never goes back");
    assert!(events.iter().all(|e| Some(e.at) <= summary.last.or(Some(Mono(0)))));
    Ok((events, summary))
}

/// The streams of a replay: per local and peer address and direction, its whole bytes by sequence number, in the order
/// they came. Fails where bytes overlap or come out of order.
pub(crate) fn streams(events: &[Event]) -> BTreeMap<(SocketAddr, SocketAddr, bool), Vec<(u32, Vec<u8>)>> {
    let mut all: BTreeMap<_, Vec<(u32, Vec<u8>)>> = BTreeMap::new();
    for e in events {
        if let Said::Bytes { direction, end, body: Ok(body), .. } = &e.said {
            let start = end.wrapping_sub(u32::try_from(body.len()).unwrap());
            let runs = all.entry((e.local, e.peer, *direction == Direction::Sent)).or_default();
            match runs.last_mut() {
                Some((from, bytes)) => {
                    let next = from.wrapping_add(u32::try_from(bytes.len()).unwrap());
                    let gap = start.wrapping_sub(next).cast_signed();
                    assert!(gap >= 0, "bytes come twice or out of order");
                    if gap == 0 { bytes.extend(body) } else { runs.push((start, body.clone())) }
                }
                None => runs.push((start, body.clone())),
            }
        }
    }
    all
}

/// The changes of state of the socket at `local`, as (old, new, error).
pub(crate) fn states(events: &[Event], local: SocketAddr) -> Vec<(TcpState, TcpState, u32)> {
    let of = |e: &Event| match e.said {
        Said::State { old, new, error, .. } if e.local == local => Some((old, new, error)),
        _ => None,
    };
    events.iter().filter_map(of).collect()
}
