//! What TCP cannot deliver, and what nobody reads.

use roomtrace::event::{Direction, Mono, SECOND, Sequence, Stand, TcpState, Trouble};
use roomtrace::rooms::model::{Input, Outcome, Role};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::rooms_support::*;
use super::{ROOM, again, quiet, says, stands, trouble, world};

/// A rank that has an acknowledged connection to decode and then says STATUS into a black hole.
pub(crate) fn black_hole(sees: Sees) -> (World, u32) {
    let mut w = world(sees);
    let (p, d) = (prefill(0), decode(0));
    w.healthy(1, &d, &p, 20);
    let una = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, una);
    w.metadata(ROOM, &d, &p);
    w.to(2000);
    w.tell(ROOM, &p, &d, KvPoll::Success, false);
    (w, una)
}

/// Asks once a second, as the agent does, and finds nothing acknowledged beyond `una`.
fn ask_until(w: &mut World, from: &Rank, to: &Rank, una: u32, ms: u64) {
    let socket = w.end(from, to, Direction::Sent).socket;
    let write = w.sent_to(from, to);
    while w.mono().plus(SECOND) <= Mono(START + ms * 1_000_000) {
        w.wait(1000);
        let sequence = Sequence { write, una, copied: 1, rcv_nxt: 1 };
        let stand = Stand { state: TcpState::Established, sequence, sent: write, retransmits: 0 };
        let at = w.mono();
        w.input(&Input::Stand { at, socket, stand });
    }
    w.to(ms);
}

#[test]
fn a_status_into_a_black_hole_is_likely_lost_once_sent_again_after_the_floor() {
    let (mut w, una) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    // As the kernel does it: 0.2 s, 0.6 s, 1.4 s, 3 s after the message.
    for ms in [2200, 2600, 3400, 5000, 8200] {
        w.to(ms);
        again(&mut w, &p, &d, una);
    }
    ask_until(&mut w, &p, &d, una, 11_900);
    assert!(
        w.pin(ROOM).is_none(),
        "a network that is away for a while delivers it by itself: {:?}",
        w.pin(ROOM)
    );
    assert_eq!(w.outcomes(ROOM), [], "nor over");
    // It is overdue; that it was not acknowledged is from before, and the network may be back.
    ask_until(&mut w, &p, &d, una, 14_600);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Possible));
    again(&mut w, &p, &d, una);
    ask_until(&mut w, &p, &d, una, 15_500);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Possible, "its acknowledgement may be on its way");
    ask_until(&mut w, &p, &d, una, 17_700);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Likely));
    assert!(says(&v, "has not acknowledged the STATUS") && says(&v, "6 retransmissions"), "{:?}", v.evidence);
    assert!(says(&v, "the last at +14.579 s"), "{:?}", v.evidence);
    assert_eq!(v.act_on.as_ref().unwrap().role, Some(Role::Decode));
    // The next one takes nothing back.
    w.to(27_400);
    again(&mut w, &p, &d, una);
    w.wait(500);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Likely);
    // The kernel gives up.
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 110);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Certain));
    assert!(says(&v, "timed out"));
}

/// The network is back after 9 s; TCP, which waits ever longer, sends again 12.6 s after the message.
#[test]
fn a_network_that_is_back_before_tcp_tries_again_pages_nobody() {
    let (mut w, una) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    for ms in [2200, 2600, 3400, 5000, 8200] {
        w.to(ms);
        again(&mut w, &p, &d, una);
    }
    ask_until(&mut w, &p, &d, una, 14_600);
    again(&mut w, &p, &d, una);
    w.wait(150);
    let end = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, end);
    w.never_paged(ROOM);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

/// A second outage with nothing acknowledged in between: the kernel begins with the long wait it ended with.
#[test]
fn one_retransmission_after_the_floor_is_enough_and_none_for_a_minute_is_too() {
    for again_at in [Some(26_000), None] {
        let mut w = world(Sees::Decode);
        let (p, d) = (prefill(0), decode(0));
        let una = w.sent_to(&d, &p);
        w.acknowledge(&d, &p, una);
        w.metadata(ROOM, &d, &p);
        ask_until(&mut w, &d, &p, una, 26_000);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::AwaitingPrefill, Confidence::Possible));
        if again_at.is_some() {
            again(&mut w, &d, &p, una);
        }
        ask_until(&mut w, &d, &p, una, 29_000);
        let class = if again_at.is_some() { Class::StaleEndpoint } else { Class::AwaitingPrefill };
        assert_eq!(w.class(ROOM), Some(class));
        ask_until(&mut w, &d, &p, una, 62_000);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::StaleEndpoint, Confidence::Likely), "{again_at:?}");
    }
}

#[test]
fn a_reset_is_only_told_by_the_end_of_the_connection_what_it_cost() {
    let (mut w, una) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.to(2200);
    again(&mut w, &p, &d, una);
    w.wait(50);
    trouble(&mut w, &p, &d, Trouble::ResetReceived);
    assert!(w.pin(ROOM).is_none(), "it may have been acknowledged since");
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 104);
    let (_, v) = w.pin(ROOM).unwrap();
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Certain));
    assert!(says(v, "reset by peer"));
}

#[test]
fn a_network_that_is_away_for_seconds_pages_nobody() {
    let (mut w, una) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    let socket = w.end(&p, &d, Direction::Sent).socket;
    for ms in [2200, 2600, 3400, 5000] {
        w.to(ms);
        again(&mut w, &p, &d, una);
        // That it arrives shows in no call: it is asked for.
        assert_eq!(w.table.asks(), [socket]);
    }
    w.to(6000);
    let end = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, end);
    w.to(60_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.table.asks(), []);

    // METADATA, read by a prefill on this host while its sender's kernel is not known to know.
    let mut w = world(Sees::Both);
    let una = w.sent_to(&d, &p);
    w.acknowledge(&d, &p, una);
    w.metadata(ROOM, &d, &p);
    w.wait(200);
    again(&mut w, &d, &p, una);
    w.to(13_000);
    let v = w.verdict(ROOM);
    assert_eq!(v.confidence, Confidence::Possible, "{:?} {:?}", v.class, v.evidence);
    assert_ne!(v.class, Class::StaleEndpoint);
}

#[test]
fn a_retransmission_that_arrives_is_nothing() {
    let (mut w, una) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.to(2200);
    again(&mut w, &p, &d, una);
    w.to(2600);
    let end = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, end);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    w.to(60_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.last(ROOM).messages.last().unwrap().acknowledged, Some(true));
}

#[test]
fn a_retransmission_of_what_lies_behind_the_status_is_nothing() {
    let (mut w, _) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    let end = w.sent_to(&p, &d);
    for ms in [2200, 2600, 3400, 5000] {
        w.to(ms);
        again(&mut w, &p, &d, end);
    }
    assert_eq!(w.names(ROOM), ["room_closed"]);
}

#[test]
fn progress_starts_the_clock_of_retransmissions_anew() {
    let (mut w, una) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.to(2200);
    again(&mut w, &p, &d, una);
    w.to(12_500);
    again(&mut w, &p, &d, una);
    // The first byte went through.
    ask_until(&mut w, &p, &d, una + 50, 15_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Possible));
    assert!(!says(&v, "retransmission"), "{:?}", v.evidence);
    again(&mut w, &p, &d, una + 50);
    ask_until(&mut w, &p, &d, una + 50, 17_500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Likely));
}

#[test]
fn metadata_into_a_half_open_connection_is_a_stale_endpoint() {
    let mut w = world(Sees::Decode);
    let (p, d) = (prefill(0), decode(0));
    let una = w.sent_to(&d, &p);
    w.acknowledge(&d, &p, una);
    w.metadata(ROOM, &d, &p);
    for ms in [200, 600, 1400] {
        w.to(ms);
        again(&mut w, &d, &p, una);
    }
    ask_until(&mut w, &d, &p, una, 9900);
    assert!(w.pin(ROOM).is_none(), "{:?}", w.pin(ROOM));
    w.to(12_800);
    again(&mut w, &d, &p, una);
    ask_until(&mut w, &d, &p, una, 15_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StaleEndpoint, Confidence::Likely));
    assert!(says(&v, "has not acknowledged the METADATA"), "{:?}", v.evidence);
    let end = w.sent_to(&d, &p);
    w.acknowledge(&d, &p, end);
    w.wait(1500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::AwaitingPrefill, Confidence::Possible));
}

#[test]
fn an_abort_into_a_half_open_connection_leaves_prefill_waiting() {
    an_abort_into_a_half_open_connection(Sees::Decode);
    an_abort_into_a_half_open_connection(Sees::Both);
}

fn an_abort_into_a_half_open_connection(sees: Sees) {
    let mut w = world(sees);
    let (p, d) = (prefill(0), decode(0));
    w.metadata(ROOM, &d, &p);
    let una = w.sent_to(&d, &p);
    w.acknowledge(&d, &p, una);
    w.to(1000);
    w.give_up(ROOM, &d, &p, Some(1), false);
    for ms in [1200, 1600, 2400, 13_800] {
        w.to(ms);
        again(&mut w, &d, &p, una);
    }
    ask_until(&mut w, &d, &p, una, 16_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StaleEndpoint, Confidence::Likely));
    assert!(says(&v, "has not acknowledged the ABORT"), "{:?}", v.evidence);
    w.to(40_000);
    assert!(w.last(ROOM).pinned(), "nothing has told prefill");
    if sees == Sees::Both {
        return;
    }
    let end = w.sent_to(&d, &p);
    w.acknowledge(&d, &p, end);
    w.wait(2000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

#[test]
fn a_stand_says_what_a_retransmission_says() {
    let (mut w, una) = black_hole(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    let socket = w.end(&p, &d, Direction::Sent).socket;
    let write = w.sent_to(&p, &d);
    let stands = |w: &mut World, ms, una, retransmits| {
        w.to(ms);
        let sequence = Sequence { write, una, copied: 1, rcv_nxt: 1 };
        let stand = Stand { state: TcpState::Established, sequence, sent: write, retransmits };
        let at = w.mono();
        w.input(&Input::Stand { at, socket, stand });
    };
    for (ms, retransmits) in [(2500, 1), (3600, 2), (11_800, 3), (12_800, 4), (13_800, 4)] {
        stands(&mut w, ms, una, retransmits);
    }
    w.wait(1100);
    // The fourth may have been sent before 10 s were over.
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Possible);
    for (ms, retransmits) in [(15_000, 5), (16_000, 5)] {
        stands(&mut w, ms, una, retransmits);
    }
    w.wait(1100);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Likely));
    assert!(says(&v, "5 retransmissions"));
    stands(&mut w, 17_500, write, 0);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

#[test]
fn unread_bytes_show_that_a_rank_does_not_read() {
    let mut w = world(Sees::Prefill);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.metadata(ROOM, &decode(0), &prefill(0));
    for ms in [11_500, 12_500, 13_500, 14_600] {
        w.to(ms);
        stands(&mut w, &decode(0), &prefill(0), 1000, 300);
        if ms == 12_500 {
            assert_eq!(w.verdict(ROOM).confidence, Confidence::Possible, "a second is nothing");
        }
    }
    w.wait(1500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Likely));
    assert!(says(&v, "does not read: 300 bytes"), "{:?}", v.evidence);
    // It reads on, if slowly.
    stands(&mut w, &decode(0), &prefill(0), 1100, 200);
    w.wait(1500);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Possible);
}

#[test]
fn a_fin_is_no_unread_byte() {
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    let socket = w.end(&decode(0), &prefill(0), Direction::Received).socket;
    for ms in [11_500, 12_500, 15_600] {
        w.to(ms);
        let sequence = Sequence { write: 1, una: 1, copied: 1000, rcv_nxt: 1001 };
        let stand = Stand { state: TcpState::CloseWait, sequence, sent: 1, retransmits: 0 };
        let at = w.mono();
        w.input(&Input::Stand { at, socket, stand });
    }
    quiet(&mut w, ROOM, 2000);
}

#[test]
fn several_unread_sockets_of_a_process_are_a_stalled_engine() {
    let mut w = world(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    w.metadata(ROOM, &decode(0), &prefill(0));
    for ms in [11_500, 15_000] {
        w.to(ms);
        stands(&mut w, &decode(0), &prefill(0), 1000, 300);
        stands(&mut w, &decode(1), &prefill(0), 2000, 100);
    }
    w.wait(1500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::EngineStalled, Confidence::Likely));
    assert!(says(&v, "2 sockets"));
}

#[test]
fn a_status_that_decode_does_not_read_is_decodes() {
    let mut w = world(Sees::Both);
    let (p, d) = (prefill(0), decode(0));
    w.healthy(1, &d, &p, 20);
    w.metadata(ROOM, &d, &p);
    w.wait(100);
    w.tell(ROOM, &p, &d, KvPoll::Success, false);
    for ms in [5000, 9000, 13_000] {
        w.to(ms);
        stands(&mut w, &p, &d, 500, 100);
    }
    w.wait(1500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::ReceiverSilent, Confidence::Likely));
    assert_eq!(v.owed_by.unwrap().role, Some(Role::Decode));
}

#[test]
fn only_connections_that_overdue_rooms_wait_on_are_asked_about() {
    let mut w = world(Sees::Both);
    w.healthy(1, &decode(0), &prefill(0), 20);
    w.metadata(ROOM, &decode(0), &prefill(0));
    assert_eq!(w.table.asks(), []);
    w.to(11_500);
    assert!(w.last(ROOM).pinned());
    let mut expected = vec![
        w.end(&decode(0), &prefill(0), Direction::Sent).socket,
        w.end(&decode(0), &prefill(0), Direction::Received).socket,
        w.end(&prefill(0), &decode(0), Direction::Received).socket,
    ];
    expected.sort_unstable();
    assert_eq!(w.table.asks(), expected);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(1500);
    assert_eq!(w.table.asks(), []);
}

#[test]
fn not_more_than_64_are_asked_about_at_a_time_and_all_in_turn() {
    let mut w = World::new(Sees::Prefill);
    for n in 0..100 {
        w.metadata(u64::from(n) + 1, &decode(n), &prefill(0));
    }
    w.to(12_000);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..5 {
        let asked = w.table.asks();
        assert_eq!(asked.len(), 64);
        seen.extend(asked);
        w.wait(1000);
    }
    assert_eq!(seen.len(), 100);
}
