//! A STATUS message costs no heap allocation between the socket event and the rooms.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]
#![allow(missing_docs, reason = "tests")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use roomtrace::control::{Control, Limits};
use roomtrace::event::{Addresses, Body, Bytes, Direction, Mono, SocketEvent, SocketId, What};
use roomtrace::rooms::model::Input;

/// Counts, for each thread, what it passes on to the system's allocator (growing a block counts too: the
/// default `realloc` allocates).
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to `System` unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller's promise is the one `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn status(room: u64) -> Vec<u8> {
    let room = room.to_string();
    let mut out = vec![1, u8::try_from(room.len()).unwrap()];
    out.extend_from_slice(room.as_bytes());
    out.extend_from_slice(b"\x01\x014\x00\x010");
    out
}

/// A STATUS of mori.
fn mori(room: u64) -> Vec<u8> {
    let room = room.to_string();
    let mut out = b"\x01\x0cMoriMsgGuard\x01".to_vec();
    out.push(u8::try_from(room.len()).unwrap());
    out.extend_from_slice(room.as_bytes());
    out.extend_from_slice(b"\x01\x014\x01\x010\x00\x00");
    out
}

#[test]
fn no_allocation_per_status_message() {
    for status in [status, mori] {
        costs_nothing(status);
    }
}

fn costs_nothing(status: fn(u64) -> Vec<u8>) {
    const ROOM: u64 = 5_123_456_789_012_345_678;
    let mut control = Control::new(Limits::default());
    let one: Vec<u8> = status(ROOM);
    let many: Vec<u8> = (0..300).flat_map(|i| status(ROOM + i)).take(8192).collect();
    // What the full buffers leave of their last message.
    let rest = one[many.len() % one.len()..].to_vec();
    let mut messages = 0u64;
    let mut end = 1_000u32;
    let mut send = |call: &[u8], control: &mut Control| {
        let len = u32::try_from(call.len()).unwrap();
        end = end.wrapping_add(len);
        let bytes = Bytes {
            direction: Direction::Sent,
            end,
            len,
            body: Body::Whole(call),
            snd_una: end.wrapping_sub(len),
            rcv_nxt: 0,
        };
        let event = SocketEvent {
            at: Mono(u64::from(end)),
            socket: SocketId(1),
            netns: 0,
            addresses: Addresses {
                local: "127.0.0.1:1".parse().unwrap(),
                peer: "127.0.0.1:2".parse().unwrap(),
            },
            task: None,
            what: What::Bytes(bytes),
        };
        control.handle(&event, &mut |input| messages += u64::from(matches!(input, Input::Message { .. })));
    };
    // The first call makes the socket's entry; a call that ends inside a message makes its store.
    send(&one, &mut control);
    for piece in one.chunks(5) {
        send(piece, &mut control);
    }
    let before = ALLOCATIONS.with(Cell::get);
    for _ in 0..1_000 {
        send(&one, &mut control);
        for piece in one.chunks(5) {
            send(piece, &mut control);
        }
        // Full buffers, the last message of which is cut; the rest of it comes in the next call.
        for piece in many.chunks(1_000) {
            send(piece, &mut control);
        }
        send(&rest, &mut control);
    }
    let after = ALLOCATIONS.with(Cell::get);
    assert!(messages > 150_000, "{messages}");
    assert_eq!(after - before, 0);
}
