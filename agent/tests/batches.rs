//! Whose batch is it: what the optional probes see of Mooncake's transfer engine, joined to rooms by the pages that decode named,
//! from the bytes of the control connection to the room's record.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

#[path = "support/wire.rs"]
mod wire;

use roomtrace::batch::{Batch, Layout, Step};
use roomtrace::control::Limits;
use roomtrace::event::{
    Addresses, Body, Bytes, Comm, Direction, Mono, SECOND, Sequence, SocketEvent, SocketId, StateChange,
    Task, TcpState, What,
};
use roomtrace::pipeline::Pipeline;
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{RoomBatches, RoomSnapshot};
use wire::{handshake, message, status};

const PID: u32 = 4711;
const ROOM: u64 = 5_123_456_789_012_345_678;
/// Bytes of a page of each KV buffer.
const ITEM: u64 = 4096;
/// Where the KV buffers and the auxiliary buffers of a decode rank begin.
const KV: [u64; 2] = [0x7f00_0000_0000, 0x7f00_4000_0000];
const AUX: [u64; 2] = [0x5500_0000_1000, 0x5500_0000_9000];

fn words(all: &[u64]) -> Vec<u8> {
    all.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// REGISTER of SGLang 0.5.23.
fn register(session: &str) -> Vec<u8> {
    let (kv, aux, lens) = (words(&KV), words(&AUX), words(&[ITEM, ITEM]));
    message(&[
        b"None",
        b"10.0.0.21",
        b"41207",
        session.as_bytes(),
        &kv,
        &aux,
        b"",
        b"0",
        b"1",
        b"4096",
        b"",
        b"",
        b"",
        b"",
        b"",
        b"0",
        b"1",
        b"0",
        b"",
        &lens,
    ])
}

/// METADATA of SGLang 0.5.23.
fn metadata(session: &str, room: u64, pages: &[u32], slot: u32) -> Vec<u8> {
    let index: Vec<u8> = pages.iter().flat_map(|p| p.to_le_bytes()).collect();
    let (room, slot) = (room.to_string(), slot.to_string());
    message(&[
        room.as_bytes(),
        b"10.0.0.21",
        b"41207",
        session.as_bytes(),
        &index,
        slot.as_bytes(),
        b"",
        b"1",
        b"0",
        b"",
    ])
}

fn abort(room: u64) -> Vec<u8> {
    message(&[b"ABORT", room.to_string().as_bytes(), b"10.0.0.21", b"41207", b"3"])
}

/// A prefill process with its two connections to a decode rank, and the probes on it.
struct Rig {
    pipeline: Pipeline,
    now: Mono,
    /// Behind the last byte that each connection carried.
    carried: [u32; 2],
    last: Option<RoomSnapshot>,
}

const ASKS: usize = 0;
const TELLS: usize = 1;

impl Rig {
    fn new() -> Self {
        let mut pipeline = Pipeline::new(Limits::default(), Config::default());
        pipeline.follow_batches();
        let mut rig = Self { pipeline, now: Mono(SECOND), carried: [1000, 2000], last: None };
        for (which, from) in [(ASKS, TcpState::SynRecv), (TELLS, TcpState::SynSent)] {
            let at = rig.carried[which];
            let sequence = Sequence { write: at, una: at, copied: at, rcv_nxt: at };
            let change = StateChange { old: from, new: TcpState::Established, error: 0, sequence };
            rig.event(which, What::State(change));
            rig.carry(which, &handshake());
        }
        rig.pipeline.watch_batches(PID, Layout { stride: 56 });
        rig
    }

    fn event(&mut self, which: usize, what: What<'_>) {
        self.now = self.now.plus(1000);
        let (local, peer) =
            [("10.0.0.11:35001", "10.0.0.21:50000"), ("10.0.0.11:50001", "10.0.0.21:41207")][which];
        let mut comm = [0; 16];
        comm[..15].copy_from_slice(b"sglang::schedul");
        self.pipeline.handle(&SocketEvent {
            at: self.now,
            socket: SocketId(7 + which as u64),
            netns: 0,
            addresses: Addresses { local: local.parse().unwrap(), peer: peer.parse().unwrap() },
            task: Some(Task { tgid: PID, tid: PID + 9, comm: Comm(comm), cgroup: 0 }),
            what,
        });
        self.keep();
    }

    /// What decode says, or what prefill says to it, in one call.
    fn carry(&mut self, which: usize, bytes: &[u8]) {
        let len = u32::try_from(bytes.len()).unwrap();
        self.carried[which] += len;
        let end = self.carried[which];
        let direction = if which == ASKS { Direction::Received } else { Direction::Sent };
        let (snd_una, rcv_nxt) = (end, end);
        self.event(
            which,
            What::Bytes(Bytes { direction, end, len, body: Body::Whole(bytes), snd_una, rcv_nxt }),
        );
    }

    fn keep(&mut self) {
        let closed = self.pipeline.events().map(|e| e.snapshot().clone()).next_back();
        self.last = closed.or(self.last.take());
    }

    fn step(&mut self, id: u64, step: Step<'_>) {
        self.now = self.now.plus(1000);
        let batch = Batch { at: self.now, pid: PID, tid: PID + 5, id, step };
        self.pipeline.batch(self.now, Some(&batch));
    }

    /// Submits writes of (address, bytes) as one batch.
    fn submit(&mut self, id: u64, writes: &[(u64, u64)]) {
        let requests = requests(1, writes);
        self.step(id, Step::Submit { total: requests.len() as u64, offset: 0, requests: &requests });
    }

    fn room(&self, room: u64) -> RoomBatches {
        let all = self.pipeline.rooms().snapshot(room).pop().unwrap().batches;
        assert_eq!(all.len(), 1, "{all:?}");
        all[0]
    }
}

fn requests(code: u32, writes: &[(u64, u64)]) -> Vec<u8> {
    let one = |(address, len): &(u64, u64)| {
        let mut one = vec![0x5a; 56];
        one[..4].copy_from_slice(&code.to_ne_bytes());
        one[24..32].copy_from_slice(&address.to_ne_bytes());
        one[32..40].copy_from_slice(&len.to_ne_bytes());
        one
    };
    writes.iter().flat_map(one).collect()
}

/// Writes of `n` pages from `first` on, in every layer.
fn pages(first: u64, n: u64) -> Vec<(u64, u64)> {
    KV.iter().map(|base| (base + first * ITEM, n * ITEM)).collect()
}

/// Writes of a slot of the auxiliary buffers, of 64 bytes each.
fn slot(n: u64) -> Vec<(u64, u64)> {
    AUX.iter().map(|base| (base + n * 64, 64)).collect()
}

const A: &str = "10.0.0.21:15847";

#[test]
fn what_goes_to_a_rooms_pages_and_slot_is_its_own() {
    let mut rig = Rig::new();
    rig.carry(ASKS, &[register(A), metadata(A, ROOM, &[11, 12, 13, 40], 3)].concat());
    rig.carry(ASKS, &metadata(A, 2, &[14, 15], 4));
    assert_eq!((rig.room(ROOM).whole, rig.room(ROOM).bytes), (true, 0), "nothing was submitted: measured");
    // Two chunks of one, between them one of the other: by one thread, as one worker hands over many rooms in turn.
    rig.submit(70, &pages(11, 3));
    rig.step(70, Step::Free);
    rig.submit(70, &pages(14, 2));
    rig.submit(71, &pages(40, 1));
    rig.submit(72, &slot(3));
    let (one, other) = (rig.room(ROOM), rig.room(2));
    assert_eq!((one.batches, one.requests, one.bytes), (3, 6, 2 * 4 * ITEM + 128));
    assert_eq!((one.over, one.whole, one.ambiguous), (1, true, 0));
    assert_eq!((other.batches, other.bytes, other.over), (1, 2 * 2 * ITEM, 0));
    rig.step(71, Step::Free);
    rig.step(72, Step::Free);
    rig.carry(TELLS, &status(ROOM));
    let closed = rig.room(ROOM);
    assert_eq!((closed.bytes, closed.batches - closed.over, closed.pages), (one.bytes, 0, 4));
    assert!(closed.last_over > closed.last && closed.first < closed.last);
    assert_eq!(rig.pipeline.control().batch_counts().unwrap().joined, 4);
}

#[test]
fn what_fits_several_rooms_is_of_none_of_them() {
    let mut rig = Rig::new();
    let other = "10.0.0.22:15847";
    // Two decode ranks whose memory lies at the same addresses, each with a room of the same pages.
    rig.carry(ASKS, &[register(A), register(other)].concat());
    rig.carry(ASKS, &[metadata(A, ROOM, &[11, 12], 3), metadata(other, 2, &[12, 11, 19], 3)].concat());
    rig.submit(70, &pages(11, 2));
    for room in [ROOM, 2] {
        let seen = rig.room(room);
        assert_eq!((seen.batches, seen.bytes, seen.ambiguous, seen.whole), (0, 0, 1, false));
    }
    // One write more tells them apart.
    rig.submit(71, &[pages(11, 2), pages(19, 1)].concat());
    assert_eq!((rig.room(2).bytes, rig.room(ROOM).bytes), (2 * 3 * ITEM, 0));
}

#[test]
fn pages_of_a_room_that_decode_gave_up_may_be_another_rooms() {
    let mut rig = Rig::new();
    rig.carry(ASKS, &[register(A), metadata(A, ROOM, &[11, 12], 3), abort(ROOM)].concat());
    rig.carry(ASKS, &metadata(A, 2, &[12, 13], 4));
    rig.submit(70, &pages(12, 1));
    assert_eq!((rig.room(ROOM).ambiguous, rig.room(2).ambiguous), (1, 1));
    // Once prefill has told its end nothing is submitted for it any more.
    rig.carry(TELLS, &status(ROOM));
    rig.submit(71, &pages(12, 1));
    assert_eq!((rig.room(2).ambiguous, rig.room(2).bytes), (1, 2 * ITEM));
}

#[test]
fn what_cannot_be_told_is_no_number() {
    let mut rig = Rig::new();
    rig.carry(ASKS, &[register(A), metadata(A, ROOM, &[11, 12], 3)].concat());
    // Pages of nobody: of a room that is not known.
    rig.submit(70, &pages(500, 2));
    assert_eq!(
        (rig.room(ROOM).bytes, rig.room(ROOM).whole),
        (0, false),
        "it may have been part of this room's"
    );
    rig.carry(ASKS, &metadata(A, 2, &[21], 4));
    assert!(rig.room(2).whole, "that was before it");
    // One page of it and one of nobody.
    rig.submit(71, &[pages(21, 1), pages(500, 1)].concat());
    assert_eq!((rig.room(2).batches, rig.room(2).whole), (0, false));
    let counts = rig.pipeline.control().batch_counts().unwrap();
    assert_eq!((counts.joined, counts.unmatched), (0, 2));
}

#[test]
fn requests_of_another_layout_are_refused_not_guessed_at() {
    let mut rig = Rig::new();
    rig.carry(ASKS, &[register(A), metadata(A, ROOM, &[11, 12], 3)].concat());
    let good = requests(1, &pages(11, 2));
    let odd = good[..good.len() - 8].to_vec();
    let nonsense = requests(7, &pages(11, 2));
    for bad in [odd, nonsense, vec![0; 56]] {
        rig.step(70, Step::Submit { total: bad.len() as u64, offset: 0, requests: &bad });
    }
    rig.step(71, Step::Unreadable);
    let read = requests(0, &pages(11, 2));
    rig.step(72, Step::Submit { total: read.len() as u64, offset: 0, requests: &read });
    assert_eq!((rig.room(ROOM).batches, rig.room(ROOM).whole), (0, false));
    let counts = rig.pipeline.control().batch_counts().unwrap();
    assert_eq!((counts.misfit, counts.incomplete, counts.reads, counts.joined), (3, 1, 1, 0));
}

#[test]
fn a_long_vector_comes_in_pieces_and_counts_once_all_are_there() {
    let mut rig = Rig::new();
    let all: Vec<u32> = (0..400).map(|n| 11 + 2 * n).collect();
    rig.carry(ASKS, &[register(A), metadata(A, ROOM, &all, 3)].concat());
    let writes: Vec<_> = all.iter().flat_map(|p| pages(u64::from(*p), 1)).collect();
    let bytes = requests(1, &writes);
    let piece = |rig: &mut Rig, from: usize| {
        let to = bytes.len().min(from + 4032);
        let step =
            Step::Submit { total: bytes.len() as u64, offset: from as u64, requests: &bytes[from..to] };
        let batch = Batch { at: Mono(9 * SECOND), pid: PID, tid: PID + 5, id: 70, step };
        rig.pipeline.batch(batch.at, Some(&batch));
    };
    for from in (0..bytes.len()).step_by(4032) {
        assert_eq!(rig.room(ROOM).batches, 0);
        piece(&mut rig, from);
    }
    assert_eq!((rig.room(ROOM).batches, rig.room(ROOM).bytes, rig.room(ROOM).whole), (1, 800 * ITEM, true));
    // A piece is lost on the way.
    piece(&mut rig, 0);
    piece(&mut rig, 2 * 4032);
    assert_eq!((rig.room(ROOM).batches, rig.room(ROOM).whole), (1, false));
}

#[test]
fn a_room_whose_pages_were_not_all_seen_has_at_least_what_was() {
    let mut rig = Rig::new();
    rig.carry(ASKS, &register(A));
    // In two calls, of which the decoder keeps the beginning alone.
    let all: Vec<u32> = (100..1100).collect();
    let bytes = metadata(A, ROOM, &all, 3);
    rig.carry(ASKS, &bytes[..900]);
    rig.carry(ASKS, &bytes[900..]);
    rig.submit(70, &pages(100, 900));
    rig.submit(71, &pages(130, 20));
    rig.submit(72, &pages(1000, 100));
    let seen = rig.room(ROOM);
    assert!(!seen.whole);
    assert_eq!(
        (seen.batches, seen.bytes),
        (1, 2 * 20 * ITEM),
        "one write reaches beyond the pages that are known: {seen:?}"
    );
    // Together with a page that is known, the others are its own as well.
    rig.submit(73, &[pages(131, 1), pages(900, 1)].concat());
    assert_eq!(rig.room(ROOM).batches, 2);
}

#[test]
fn nothing_is_said_of_processes_that_are_not_probed() {
    let mut rig = Rig::new();
    rig.pipeline.forget_process(PID);
    rig.carry(ASKS, &[register(A), metadata(A, ROOM, &[11, 12], 3)].concat());
    rig.submit(70, &pages(11, 2));
    assert_eq!(rig.pipeline.rooms().snapshot(ROOM).pop().unwrap().batches, []);
}
