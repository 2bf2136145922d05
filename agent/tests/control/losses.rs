//! Missing bytes are told, and only where control traffic may have been lost.

use roomtrace::control::{ConnectionState, Dropped};
use roomtrace::event::{Body, Direction, NotCaptured, SECOND, TcpState};

use super::rig::{MS, ROOM, Rig, Told, any_lossy, metadata, shaken};
use super::wire::{greeting, handshake, ready, status};

#[test]
fn a_hole_is_told_and_the_stream_is_found_again() {
    let mut rig = shaken();
    rig.send(&status(ROOM));
    rig.told();
    rig.sent = rig.sent.wrapping_add(100);
    rig.send(&status(ROOM + 1));
    assert_eq!(rig.told(), [], "an earlier call may still come");
    rig.tick(60 * MS);
    let told = rig.told();
    assert_eq!(told[0], Told::Lossy { direction: Direction::Sent, bytes: 100 });
    assert!(matches!(told[1], Told::Status { room, .. } if room == ROOM + 1), "{told:?}");
    assert_eq!(rig.connections(ConnectionState::Acquired), 1);
    assert_eq!(rig.dropped(Dropped::Hole), 1);
}

#[test]
fn a_hole_inside_one_frame_is_told_and_the_stream_goes_on() {
    let mut rig = shaken();
    let whole = metadata(ROOM, 5_000);
    rig.send(&whole[..8192]);
    rig.sent = rig.sent.wrapping_add(5_000);
    rig.send(&whole[8192 + 5_000..]);
    rig.tick(60 * MS);
    let told = rig.told();
    assert_eq!(told[0], Told::Lossy { direction: Direction::Sent, bytes: 5_000 });
    assert!(matches!(told[1], Told::Metadata { pages: 5_000, required: Some(2), .. }), "{told:?}");
    assert_eq!(rig.connections(ConnectionState::Known), 1);
}

#[test]
fn an_uncaptured_call_across_frames_is_lossy() {
    let mut rig = shaken();
    rig.send(&status(1));
    rig.told();
    let whole = metadata(ROOM, 3_000);
    rig.send(&whole[..8192]);
    rig.send_absent(whole.len() - 8192, NotCaptured::TooLong);
    assert!(matches!(rig.told()[..], [Told::Lossy { .. }]));
    assert_eq!(rig.connections(ConnectionState::Lost), 1);
    rig.send(&status(ROOM));
    assert_eq!(rig.rooms(), [ROOM]);
}

#[test]
fn a_repeated_end_is_lossy() {
    let mut rig = shaken();
    rig.send(&status(ROOM));
    let (end, again) = (rig.sent, status(ROOM + 1));
    rig.told();
    rig.report(Direction::Sent, end, again.len(), Body::Whole(&again));
    assert!(matches!(rig.told()[..], [Told::Lossy { .. }]));
    assert_eq!(rig.dropped(Dropped::Overlap), 1);
    rig.send(&status(ROOM + 2));
    assert_eq!(rig.rooms(), [ROOM + 2]);
}

#[test]
fn bytes_that_nobody_reported_before_the_close_are_told() {
    let mut rig = shaken();
    rig.send(&status(ROOM));
    rig.sent = rig.sent.wrapping_add(27);
    rig.state(TcpState::Established, TcpState::Close);
    rig.told();
    rig.tick(2 * SECOND);
    assert_eq!(rig.told(), [Told::Lossy { direction: Direction::Sent, bytes: 27 }]);
    assert_eq!(rig.control.sockets(), 0);
    assert_eq!(rig.connections(ConnectionState::Known), 0);
}

#[test]
fn what_a_hostile_peer_sends_is_no_capture_loss() {
    let oversized = [&[2][..], &(1u64 << 40).to_be_bytes(), &[0x40; 1000]].concat();
    let garbage = [0x40; 1000];
    for call in [&oversized[..], &garbage[..]] {
        let mut rig = Rig::open();
        rig.receive(&handshake());
        rig.receive(call);
        for _ in 0..50 {
            rig.receive(&garbage);
            rig.received = rig.received.wrapping_add(1 << 20);
            rig.report(Direction::Received, rig.received, 1 << 20, Body::Absent(NotCaptured::TooLong));
        }
        rig.state(TcpState::Established, TcpState::Close);
        rig.tick(2 * SECOND);
        let told = rig.told();
        assert!(!any_lossy(&told), "{told:?}");
        assert!(told.iter().filter(|t| matches!(t, Told::Foreign { .. })).count() <= 1, "{told:?}");
    }
    // A call that is too long to be captured, of many frames.
    let mut rig = Rig::open();
    rig.send(&handshake());
    rig.send_absent(1 << 20, NotCaptured::TooLong);
    rig.send(&garbage);
    assert_eq!(rig.told(), []);
    assert_eq!(rig.dropped(Dropped::NotCaptured), 1);
    // What it sends later is no more than what is known of a connection joined in its middle.
    rig.send(&status(ROOM));
    assert!(matches!(rig.told()[..], [Told::Status { preexisting: true, .. }]));
}

#[test]
fn nonsense_among_known_messages_is_no_capture_loss_but_a_hole_is() {
    let mut rig = shaken();
    for _ in 0..3 {
        rig.send(&status(ROOM));
        rig.send(&[0x40; 50]);
    }
    let told = rig.told();
    assert!(!any_lossy(&told), "{told:?}");
    assert_eq!(told.iter().filter(|t| matches!(t, Told::Foreign { .. })).count(), 1);
    assert_eq!(rig.dropped(Dropped::Malformed), 3);
    rig.send(&status(ROOM));
    rig.sent = rig.sent.wrapping_add(100);
    rig.send(&status(ROOM));
    rig.tick(60 * MS);
    assert!(any_lossy(&rig.told()));
}

#[test]
fn a_hole_at_the_beginning_of_a_connection_is_told() {
    for found in [false, true] {
        let mut rig = if found { Rig::new() } else { Rig::open() };
        if found {
            rig.found(Some((rig.sent, rig.received)));
        }
        let missing = handshake().len() + status(ROOM).len();
        rig.sent = rig.sent.wrapping_add(u32::try_from(missing).unwrap());
        rig.send(&status(ROOM + 1));
        rig.tick(60 * MS);
        let told = rig.told();
        let bytes = u64::try_from(missing).unwrap();
        assert_eq!(told[0], Told::Lossy { direction: Direction::Sent, bytes });
        assert!(matches!(told[1], Told::Status { preexisting: true, .. }), "{told:?}");
        // The greeting of the other side brings nothing of it back.
        rig.receive(&[greeting(b"NULL"), ready(b"PULL")].concat());
        rig.send(&status(ROOM + 2));
        assert!(matches!(rig.told()[..], [Told::Status { preexisting: true, .. }]));
    }
    // Where nothing is known of the beginning, a hole before anything known is told to nobody.
    let mut rig = Rig::new();
    rig.send(b"none of ours");
    rig.sent = rig.sent.wrapping_add(100);
    rig.send(&status(ROOM));
    rig.tick(60 * MS);
    assert!(!any_lossy(&rig.told()));
}
