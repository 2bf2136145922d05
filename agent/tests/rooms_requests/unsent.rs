//! A STATUS that cannot leave: prefill answers its request as if decode had it (M22, M23).

use roomtrace::event::{Direction, TcpState};
use roomtrace::rooms::model::{Outcome, Role};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::ROOM;
use super::rooms_support::*;
use super::web::*;

/// What becomes of prefill's connect to decode.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Connect {
    Refused,
    Unanswered,
}

/// Prefill has METADATA, its connect to decode fails, and it answers the request, as the engine does.
fn unsent(how: Connect) -> Web {
    let mut w = Web::new(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    let key = w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &d, &p);
    w.wait(300);
    connect(&mut w, how);
    w.wait(10);
    w.finished(key);
    w
}

fn connect(w: &mut Web, how: Connect) {
    let (p, d) = (prefill(0), decode(0));
    w.state(&p, &d, Direction::Sent, TcpState::Close, TcpState::SynSent, 0);
    if how == Connect::Refused {
        w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Close, 111);
    }
}

#[test]
fn a_status_that_cannot_leave_is_lost_although_prefill_has_answered() {
    for how in [Connect::Refused, Connect::Unanswered] {
        let mut w = unsent(how);
        w.to(9000);
        assert_eq!(w.names(ROOM), [] as [&str; 0], "{how:?}");
        w.to(12_000);
        let v = w.verdict(ROOM);
        assert_eq!(
            (v.class, v.confidence),
            (Class::StatusLost, Confidence::Likely),
            "{how:?} {:?}",
            v.evidence
        );
        assert_eq!(
            readings(&v),
            [Class::StatusLost, Class::PeerLost],
            "prefill has answered: it neither queues nor computes"
        );
        assert_eq!(v.act_on.as_ref().unwrap().endpoint, Some(decode(0).endpoint));
        assert!(v.evidence.iter().any(|e| e.contains("no STATUS seen to leave")), "{:?}", v.evidence);
        // Decode gives up.
        w.to(300_000);
        w.abort(ROOM, &decode(0), &prefill(0), Some(1));
        w.wait(2000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Failed], "{how:?}");
    }
}

/// The socket that was refused does not connect anew, so that of later rooms not even a connect is seen.
#[test]
fn nothing_leaves_for_later_rooms_of_that_endpoint_either() {
    let mut w = unsent(Connect::Refused);
    w.to(12_000);
    let first = w.verdict(ROOM).group;
    let key = w.request(Role::Prefill, ROOM + 1);
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    w.wait(300);
    w.finished(key);
    w.wait(11_000);
    let v = w.verdict(ROOM + 1);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Likely));
    assert_eq!(v.group, first, "one cause");

    // Where no request is seen, prefill may compute.
    let mut w = World::new(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Close, 111);
    w.metadata(ROOM, &d, &p);
    w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Close, 111);
    w.wait(1000);
    w.metadata(ROOM + 1, &d, &p);
    w.wait(11_500);
    let v = w.verdict(ROOM + 1);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Possible));
    assert_eq!(v.group, w.verdict(ROOM).group);
}

#[test]
fn a_connect_that_was_only_slow_brings_it() {
    let mut w = unsent(Connect::Unanswered);
    w.wait(1000);
    let (p, d) = (prefill(0), decode(0));
    w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Established, 0);
    w.status(ROOM, &p, &d, KvPoll::Success);
    w.wait(1500);
    assert_eq!((w.names(ROOM), w.outcomes(ROOM)), (vec!["room_closed"], vec![Outcome::Success]));
}

#[test]
fn a_decode_that_went_waits_for_nothing() {
    let mut w = unsent(Connect::Refused);
    let (p, d) = (prefill(0), decode(0));
    w.state(&d, &p, Direction::Received, TcpState::Established, TcpState::Close, 0);
    w.wait(12_000);
    assert_eq!((w.names(ROOM), w.outcomes(ROOM)), (vec!["room_closed"], vec![Outcome::Success]));
}

/// Prefill answers some milliseconds before its STATUS leaves, into a network that is away.
#[test]
fn a_status_that_leaves_after_the_answer_can_be_lost_as_well() {
    for late in [30, 300] {
        let mut w = Web::new(Sees::Prefill);
        let (p, d) = (prefill(0), decode(0));
        w.serve(1, 20);
        let una = w.sent_to(&p, &d);
        w.acknowledge(&p, &d, una);
        let key = w.request(Role::Prefill, ROOM);
        w.metadata(ROOM, &d, &p);
        w.wait(300);
        w.finished(key);
        w.wait(late);
        w.tell(ROOM, &p, &d, KvPoll::Success, false);
        for _ in 0..65 {
            w.wait(1000);
            w.acknowledge(&p, &d, una);
        }
        let v = w.verdict(ROOM);
        assert_eq!(
            (v.class, v.confidence),
            (Class::StatusLost, Confidence::Likely),
            "{late} {:?}",
            v.evidence
        );
        let end = w.sent_to(&p, &d);
        w.acknowledge(&p, &d, end);
        assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    }
}

/// The connection to decode ended in the middle of the room: a send on it waits for half a minute and is given up.
#[test]
fn a_status_whose_connection_has_ended_cannot_leave() {
    let mut w = Web::new(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.serve(1, 20);
    let key = w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &d, &p);
    w.wait(100);
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::CloseWait, 0);
    w.wait(200);
    w.finished(key);
    w.wait(11_500);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Likely), "{:?}", v.evidence);
    assert!(v.evidence.iter().any(|e| e.contains("none was made since")), "{:?}", v.evidence);

    // A healthy one is over a second after its answer, although its STATUS was not seen.
    let mut w = Web::new(Sees::Prefill);
    w.serve(1, 20);
    let key = w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &d, &p);
    w.wait(300);
    w.finished(key);
    w.wait(1300);
    assert_eq!((w.names(ROOM), w.outcomes(ROOM)), (vec!["room_closed"], vec![Outcome::Success]));
}

/// NIXL before 0.5.23 does not say Success on the wire: there is nothing that could not leave.
#[test]
fn where_success_is_not_on_the_wire_nothing_is_missed() {
    let mut w = Web::with(Sees::Prefill, NIXL_OLD);
    let key = w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(300);
    connect(&mut w, Connect::Refused);
    w.finished(key);
    w.wait(20_000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}
