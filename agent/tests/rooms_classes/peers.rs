//! Of the peers: lost, restarted, not reached, not told.

use roomtrace::event::{Direction, TcpState};
use roomtrace::rooms::model::{Outcome, Role};
use roomtrace::sglang::message::{Backend, KvPoll, Message, PpState};
use roomtrace::verdict::model::{Class, Confidence};

use super::rooms_support::*;
use super::{ROOM, world};

// status_lost, stale_endpoint, peer_lost

#[test]
fn status_lost_is_certain_when_the_connection_was_reset_before_it_arrived() {
    for sees in [Sees::Prefill, Sees::Both] {
        let mut w = world(sees);
        let (p, d) = (prefill(0), decode(0));
        w.metadata(1, &d, &p);
        w.status(1, &p, &d, KvPoll::Success);
        let una = w.sent_to(&p, &d);
        w.acknowledge(&p, &d, una);
        w.metadata(ROOM, &d, &p);
        w.tell(ROOM, &p, &d, KvPoll::Success, false);
        w.wait(300);
        let at = w.now_s();
        w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 104);
        let (found, v) = w.pin(ROOM).unwrap();
        assert_eq!(found, at, "no timer is needed");
        assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Certain));
        assert_eq!(v.candidates, []);
        assert!(v.evidence.iter().any(|e| e.contains("reset by peer")));
        assert_eq!(w.outcomes(1), [Outcome::Success]);
    }
}

#[test]
fn a_status_that_was_acknowledged_is_not_lost() {
    let mut w = world(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.metadata(ROOM, &d, &p);
    w.status(ROOM, &p, &d, KvPoll::Success);
    assert_eq!(w.outcomes(ROOM), [], "not known yet whether it arrived");
    let una = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, una);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success], "at once");
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 104);
    w.to(60_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.last(ROOM).messages.last().unwrap().acknowledged, Some(true));
}

#[test]
fn a_status_whose_delivery_nobody_can_tell_closes_after_a_second() {
    let mut w = world(Sees::Prefill);
    w.healthy(ROOM, &decode(0), &prefill(0), 10);
    w.wait(1300);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

#[test]
fn a_status_that_stays_unacknowledged_is_lost_likely_after_a_minute() {
    let mut w = world(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.metadata(ROOM, &d, &p);
    w.status(ROOM, &p, &d, KvPoll::Success);
    let una = w.sent_to(&p, &d) - 50;
    for _ in 0..4 {
        w.wait(500);
        w.acknowledge(&p, &d, una);
    }
    assert_eq!(w.outcomes(ROOM), []);
    w.to(11_200);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Possible), "TCP may yet deliver it");
    w.to(61_000);
    w.acknowledge(&p, &d, una);
    w.wait(1100);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Likely);
    let una = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, una);
    assert_eq!(w.names(ROOM), ["room_pinned", "verdict_changed", "room_closed"]);
}

#[test]
fn a_connect_that_succeeds_later_takes_the_refusal_back() {
    let mut w = world(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.metadata(ROOM, &d, &p);
    w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Close, 111);
    w.wait(100);
    w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Established, 0);
    w.to(11_200);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
}

#[test]
fn a_connect_that_nobody_answers_is_why_decode_hears_nothing() {
    for sees in [Sees::Prefill, Sees::Both] {
        let mut w = world(sees);
        let (p, d) = (prefill(0), decode(0));
        w.metadata(ROOM, &d, &p);
        w.to(2000);
        // A firewall drops the SYN of the connect that is to bring the STATUS.
        w.state(&p, &d, Direction::Sent, TcpState::Close, TcpState::SynSent, 0);
        w.to(11_000);
        assert_eq!(w.verdict(ROOM).confidence, Confidence::Possible, "{sees:?}");
        w.to(13_200);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Likely), "{sees:?}");
        assert!(v.evidence.iter().any(|e| e.contains("nobody answers it")), "{:?}", v.evidence);
        assert_eq!(v.act_on.as_ref().unwrap().role, Some(Role::Decode));
        // It gets through after all.
        w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Established, 0);
        w.wait(1100);
        assert_ne!(w.class(ROOM), Some(Class::StatusLost), "{sees:?}");
    }
}

#[test]
fn stale_endpoint_when_metadata_was_never_acknowledged() {
    let mut w = world(Sees::Decode);
    let (p, d) = (prefill(0), decode(0));
    let una = w.sent_to(&d, &p);
    w.acknowledge(&d, &p, una);
    w.metadata(ROOM, &d, &p);
    w.wait(200);
    w.state(&d, &p, Direction::Sent, TcpState::Established, TcpState::Close, 110);
    let (_, v) = w.pin(ROOM).unwrap();
    assert_eq!((v.class, v.confidence), (Class::StaleEndpoint, Confidence::Certain));
    assert_eq!(v.owed_by.as_ref().unwrap().role, Some(Role::Decode));
}

#[test]
fn peer_lost_at_prefill_when_every_connection_of_decode_is_gone() {
    let mut w = world(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.healthy(1, &d, &p, 5);
    w.metadata(ROOM, &d, &p);
    w.to(2000);
    w.state(&d, &p, Direction::Received, TcpState::Established, TcpState::CloseWait, 0);
    w.to(3000);
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::CloseWait, 0);
    w.to(11_200);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Possible));
    assert_eq!(v.expected, None, "its METADATA came");
    assert_eq!(v.owed_by.unwrap().endpoint, Some(d.endpoint));
    assert_eq!(v.act_on.unwrap().role, Some(Role::Prefill));
    assert!(v.candidates.iter().any(|c| c.class == Class::TransferNotConcluded));
}

#[test]
fn one_closed_connection_of_a_live_peer_is_no_loss() {
    // Decode drops its connection to a live prefill after missed heartbeats.
    let mut w = world(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.healthy(1, &d, &p, 5);
    w.metadata(ROOM, &d, &p);
    w.state(&d, &p, Direction::Received, TcpState::Established, TcpState::CloseWait, 0);
    w.to(12_000);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
}

#[test]
fn peer_lost_at_decode_ends_by_its_heartbeat() {
    let mut w = world(Sees::Decode);
    let (p, d) = (prefill(0), decode(0));
    w.metadata(ROOM, &d, &p);
    w.to(1000);
    w.state(&d, &p, Direction::Sent, TcpState::Established, TcpState::CloseWait, 0);
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Possible));
    assert!(v.ends_by_itself.unwrap().timer.contains("heartbeat"));
    w.to(200_000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
}

#[test]
fn a_restarted_prefill_takes_its_pins_with_it() {
    let mut w = world(Sees::Prefill);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(20_000);
    assert!(w.last(ROOM).pinned());
    w.listener(&prefill(0));
    w.to(22_000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
    assert!(w.table.pinned().next().is_none());
}

#[test]
fn a_pin_keeps_its_cause_when_prefill_goes_and_decode_lives() {
    let mut w = world(Sees::Both);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(20_000);
    let before = w.verdict(ROOM);
    w.state(&decode(0), &prefill(0), Direction::Received, TcpState::Established, TcpState::Close, 0);
    w.state(&decode(0), &prefill(0), Direction::Sent, TcpState::Established, TcpState::Close, 0);
    w.listener(&prefill(0));
    w.to(40_000);
    let after = w.verdict(ROOM);
    assert_eq!((after.class, after.confidence), (before.class, before.confidence));
    assert_eq!(after.owed_by.unwrap().endpoint, before.owed_by.unwrap().endpoint);
    assert!(after.ends_by_itself.unwrap().timer.contains("WAITING"));
    assert_eq!(w.names(ROOM), ["room_pinned"]);
}

// peer_not_told

#[test]
fn peer_not_told_when_a_pipeline_rank_of_the_same_host_failed_in_silence() {
    let mut w = world(Sees::Both);
    w.metadata(ROOM, &decode(0), &prefill(0));
    let m = PpState { room: ROOM, pp_rank: 1, status: Some(KvPoll::Failed) };
    w.send(&prefill(1), &prefill(0), Backend::Mooncake, (r(5, 22), r(5, 23)), Message::PpState(m));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.owed_by), (Class::PeerNotTold, None));
    assert_eq!(v.act_on.unwrap().role, Some(Role::Decode));
}
