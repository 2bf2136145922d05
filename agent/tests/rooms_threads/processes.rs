//! Processes that ended: their views are over, their peers are lost, who comes after them is another.

use roomtrace::event::{Direction, TcpState};
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{Outcome, Role};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Action, Class, Confidence};

use super::receivers::foreign_then_death;
use super::rooms_support::*;
use super::{KILLED, ROOM, exits, process, says, thread, world};

#[test]
fn the_end_of_a_process_ends_its_views_at_once() {
    for (sees, rank) in [(Sees::Prefill, prefill(0)), (Sees::Decode, decode(0))] {
        let mut w = world(sees);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.to(20_000);
        assert!(w.last(ROOM).pinned());
        process(&mut w, &rank, KILLED);
        w.wait(100);
        assert_eq!(w.outcomes(ROOM), [Outcome::Unknown], "{sees:?}");
        assert!(w.table.pinned().next().is_none());
    }
}

#[test]
fn a_pin_ends_with_both_processes_although_decode_never_listened() {
    let mut w = world(Sees::Both);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(20_000);
    assert!(w.last(ROOM).pinned());
    process(&mut w, &prefill(0), KILLED);
    w.wait(200);
    assert!(w.last(ROOM).pinned(), "decode still waits");
    process(&mut w, &decode(0), KILLED);
    w.wait(200);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
}

#[test]
fn a_view_of_two_ranks_is_over_with_the_last_of_them() {
    let mut w = World::new(Sees::Prefill);
    for p in [prefill(0), prefill(1)] {
        w.metadata(ROOM, &decode(0), &p);
    }
    w.to(1000);
    process(&mut w, &prefill(0), KILLED);
    w.wait(200);
    assert_eq!(w.outcomes(ROOM), []);
    process(&mut w, &prefill(1), KILLED);
    w.wait(200);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
}

#[test]
fn a_survivor_that_has_a_heartbeat_ends_its_room_itself() {
    let mut w = world(Sees::Both);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(2000);
    process(&mut w, &prefill(0), 1 << 8);
    w.to(12_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Possible));
    assert!(v.ends_by_itself.as_ref().unwrap().timer.contains("heartbeat"));
    assert!(says(&v, "process 100 ended") && says(&v, "status 1"), "{:?}", v.evidence);
}

#[test]
fn a_survivor_without_any_timer_is_certainly_pinned_and_at_once() {
    // Neither heartbeat nor waiting timeout before 0.5.3.
    let layout =
        Layout { backend: NIXL_OLD.backend, register: (r(4, 7), r(5, 2)), metadata: (r(4, 7), r(5, 2)) };
    let mut w = World::with(Sees::Both, layout, Config::default());
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(2000);
    process(&mut w, &prefill(0), KILLED);
    w.wait(200);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Certain));
    assert_eq!((v.ends_by_itself, v.act_on.unwrap().role), (None, Some(Role::Decode)));
    w.wait(60_000);
    assert_eq!(w.names(ROOM), ["room_pinned"], "it stays what it is");
}

#[test]
fn a_queued_room_of_a_dead_decode_ends_by_itself() {
    let mut w = World::new(Sees::Both);
    w.ask(ROOM, &decode_of(0, 2), &prefill(0), |m| m.required = Some(2));
    w.to(1000);
    process(&mut w, &decode_of(0, 2), KILLED);
    w.to(12_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Possible));
    assert!(v.ends_by_itself.unwrap().timer.contains("BOOTSTRAP"));
}

#[test]
fn a_status_to_a_decode_that_has_ended_is_not_lost() {
    let mut w = world(Sees::Both);
    let (p, d) = (prefill(0), decode(0));
    w.healthy(1, &d, &p, 20);
    let una = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, una);
    w.metadata(ROOM, &d, &p);
    w.to(2000);
    process(&mut w, &d, KILLED);
    w.tell(ROOM, &p, &d, KvPoll::Success, false);
    w.wait(10);
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 104);
    w.wait(60_000);
    assert!(w.pin(ROOM).is_none(), "{:?}", w.names(ROOM));
    // Lost first: a pin until nobody waits for it any more.
    w.metadata(ROOM + 1, &d, &p);
    let una = w.sent_to(&p, &d);
    w.status(ROOM + 2, &p, &d, KvPoll::Success);
    w.acknowledge(&p, &d, una);
    w.tell(ROOM + 1, &p, &d, KvPoll::Success, false);
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 104);
    assert_eq!(w.class(ROOM + 1), Some(Class::StatusLost));
    process(&mut w, &d, KILLED);
    w.wait(200);
    assert_eq!(w.outcomes(ROOM + 1), [Outcome::Unknown]);
}

/// SGLang up to 0.5.13: libzmq connects anew, again and again, to a port that nobody listens at any more.
#[test]
fn connects_to_a_decode_that_has_ended_are_no_lost_status() {
    for sees in [Sees::Prefill, Sees::Both] {
        let mut w = world(sees);
        let (p, d) = (prefill(0), decode(0));
        w.healthy(1, &d, &p, 20);
        w.metadata(ROOM, &d, &p);
        w.to(2000);
        if sees == Sees::Both {
            process(&mut w, &d, KILLED);
        }
        w.state(&d, &p, Direction::Received, TcpState::Established, TcpState::CloseWait, 0);
        w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::CloseWait, 0);
        for _ in 0..100 {
            w.wait(100);
            w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Close, 111);
        }
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::PeerLost, Confidence::Possible), "{sees:?}");
        assert_eq!(v.owed_by.as_ref().unwrap().endpoint, Some(d.endpoint));
        assert!(readings(&v).contains(&Class::StatusLost));
        w.to(30_000);
        assert_eq!(w.class(ROOM), Some(Class::PeerLost));
    }
}

#[test]
fn a_refused_connect_to_a_decode_that_lives_and_was_reached_before_is_a_candidate_only() {
    let mut w = world(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.healthy(1, &d, &p, 20);
    w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Established, 0);
    w.metadata(ROOM, &d, &p);
    w.to(2000);
    w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Close, 111);
    w.to(12_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Possible));
    assert!(readings(&v).contains(&Class::StatusLost), "{:?}", readings(&v));
}

#[test]
fn a_status_lost_before_decode_ended_keeps_its_cause() {
    let mut w = world(Sees::Prefill);
    let (p, d) = (prefill(0), decode(0));
    w.metadata(ROOM, &d, &p);
    let refused = |w: &mut World| w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Close, 111);
    refused(&mut w);
    w.to(12_000);
    assert_eq!(w.class(ROOM), Some(Class::StatusLost));
    process(&mut w, &d, KILLED);
    refused(&mut w);
    w.to(20_000);
    assert_eq!(w.class(ROOM), Some(Class::StatusLost));
}

#[test]
fn a_restarted_rank_is_a_new_rank() {
    let mut w = world(Sees::Prefill);
    w.register(&decode(1), &prefill(0));
    foreign_then_death(&mut w, 21);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    w.to(14_000);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Certain);
    process(&mut w, &prefill(0), 15);
    w.wait(500);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
    let again = Rank { pid: 700, ..prefill(0) };
    w.register(&decode(1), &again);
    w.metadata(ROOM + 2, &decode(1), &again);
    w.wait(11_000);
    let v = w.verdict(ROOM + 2);
    assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Possible));
    assert!(!says(&v, "thread"), "{:?}", v.evidence);
}

#[test]
fn ends_that_nobody_knows_anything_of_change_nothing() {
    let mut w = world(Sees::Both);
    exits(&mut w, 9999, 9999, 0, true);
    exits(&mut w, 9999, 10_000, 0, false);
    w.metadata(ROOM, &decode(0), &prefill(0));
    thread(&mut w, &prefill(0), 24_000);
    thread(&mut w, &prefill(0), 24_000);
    process(&mut w, &prefill(5), KILLED);
    w.to(5000);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(2000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.table.counters().turned_away.threads, 0);
}

#[test]
fn more_ends_than_are_kept_are_counted() {
    let mut w = world(Sees::Prefill);
    for n in 0..100 {
        thread(&mut w, &prefill(0), 50_000 + n);
    }
    assert_eq!(w.table.counters().turned_away.threads, 36);
    for n in 0..300 {
        exits(&mut w, 100_000 + n, 200_000 + n, 0, false);
    }
    assert_eq!(w.table.counters().turned_away.threads, 36 + 45);
}

#[test]
fn nobody_is_told_to_kill_a_process_that_was_seen_to_end() {
    let mut w = super::workers::worker(Sees::Both, 2, 2);
    w.to(13_000);
    let kills = |actions: &[Action]| actions.iter().any(|a| a.command == "kill -TERM 100");
    let all = |actions: &[Action]| actions.iter().any(|a| a.command.contains("abort_all"));
    assert!(kills(&w.verdict(ROOM).actions) && all(&w.verdict(ROOM).actions));
    process(&mut w, &prefill(0), KILLED);
    w.wait(2000);
    let v = w.verdict(ROOM);
    assert_eq!(v.class, Class::TransferWorkerSilent, "decode waits on");
    assert!(!kills(&v.actions) && !all(&v.actions), "{:#?}", v.actions);
    assert!(v.actions.iter().any(|a| a.clears), "{:#?}", v.actions);
    for f in w.table.findings() {
        assert!(!kills(&f.actions) && !all(&f.actions) && !f.actions.is_empty(), "{f:#?}");
    }
    // Another in its place is acted on.
    let next = Rank { pid: 160, ..prefill(0) };
    w.adopt(&prefill(0), &next);
    for n in 20..23 {
        w.metadata(n, &decode(0), &next);
    }
    w.wait(12_000);
    assert!(
        w.verdict(20).actions.iter().any(|a| a.command == "kill -TERM 160"),
        "{:#?}",
        w.verdict(20).actions
    );
}
