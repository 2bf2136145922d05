//! The scenarios of the real workload as message sequences (taken from captures of `SGLang` 0.5.23), for an
//! agent that sees both sides.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, clippy::float_cmp, reason = "tests")]

mod rooms_support;
use rooms_support::*;
use roomtrace::event::{Direction, TcpState};
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{Outcome, Role};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

const ROOM: u64 = 5_123_456_789_012_345_678;

fn world() -> World {
    let mut w = World::new(Sees::Both);
    w.register(&decode(0), &prefill(0));
    w
}

#[test]
fn a_normal_room_closes_success_once() {
    let mut w = world();
    w.healthy(ROOM, &decode(0), &prefill(0), 120);
    w.to(400_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    let s = w.last(ROOM);
    assert_eq!(s.messages.len(), 4);
    let (p, d) = (s.prefill.unwrap(), s.decode.unwrap());
    assert_eq!((p.state, d.state), (KvPoll::Success, KvPoll::Success));
    assert_eq!((p.got, p.required, d.got, d.required), (1, Some(1), 1, Some(1)));
}

#[test]
fn b_abort_after_metadata_fails_on_both_at_once() {
    let mut w = world();
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(3);
    w.abort(ROOM, &decode(0), &prefill(0), Some(1));
    w.ack(ROOM, &prefill(0), &decode(0));
    w.to(400_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

#[test]
fn c_abort_before_the_sender_is_pinned_at_prefill() {
    let mut w = world();
    w.to(1000);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    let v = w.pinned_in_time(ROOM, 1.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::AbortBeforeEntry, Confidence::Possible));
    assert_eq!(v.owed_by.as_ref().unwrap().role, Some(Role::Prefill));
    assert_eq!(v.owed_by.unwrap().endpoint, Some(prefill(0).endpoint));
    for class in [Class::ConcludedButHeld, Class::TransferWorkerSilent] {
        assert!(v.candidates.iter().any(|c| c.class == class), "{class:?} is a candidate");
    }
    assert!(v.ends_by_itself.unwrap().timer.contains("BOOTSTRAP"));
    // Prefill's bootstrap timeout ends it unseen: it does not age for ever.
    w.to(420_000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
    assert!(w.table.open().next().is_none());
}

#[test]
fn f_prefill_never_concludes() {
    let mut w = world();
    for n in 0..3 {
        w.healthy(n, &decode(0), &prefill(0), 10);
    }
    w.to(1000);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(1100);
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    let v = w.pinned_in_time(ROOM, 1.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Possible));
    assert_eq!(v.owed_by.as_ref().unwrap().role, Some(Role::Prefill));
    w.to(12_200);
    assert!(w.pin(ROOM + 1).is_some());
    assert_eq!(w.last(ROOM).group_size, 2, "one cause");
    let names = readings(&w.verdict(ROOM));
    for class in [Class::TransferWorkerSilent, Class::PeerNotTold, Class::Queued, Class::ConcludedButHeld] {
        assert!(names.contains(&class), "{class:?}");
    }
}

#[test]
fn f_stays_what_it_is_when_the_engines_are_stopped() {
    let mut w = world();
    w.healthy(1, &decode(0), &prefill(0), 10);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(12_000);
    let before = w.verdict(ROOM);
    let (d, p) = (decode(0), prefill(0));
    for (from, to) in [(&d, &p), (&p, &d)] {
        w.state(from, to, Direction::Sent, TcpState::Established, TcpState::CloseWait, 0);
        w.state(from, to, Direction::Received, TcpState::Established, TcpState::CloseWait, 0);
    }
    w.to(20_000);
    let after = w.verdict(ROOM);
    assert_eq!((before.class, before.owed_by), (after.class, after.owed_by));
    // Once both processes are gone there is no room left.
    w.listener(&d);
    w.listener(&p);
    w.to(23_000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Unknown]);
}

#[test]
fn g_one_of_two_decode_ranks_asks() {
    let mut w = World::new(Sees::Both);
    let (d0, d1) = (decode_of(0, 2), decode_of(1, 2));
    w.register(&d1, &prefill(0));
    w.register(&d0, &prefill(0));
    w.metadata(ROOM, &d0, &prefill(0));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!(v.class, Class::MetadataIncomplete);
    let owed = v.owed_by.unwrap();
    assert_eq!((owed.role, owed.rank, owed.endpoint), (Some(Role::Decode), Some(1), Some(d1.endpoint)));
    w.to(12_028);
    w.abort(ROOM, &d0, &prefill(0), Some(1));
    w.ack(ROOM, &prefill(0), &d0);
    w.to(20_000);
    assert_eq!(w.names(ROOM), ["room_pinned", "room_closed"]);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
    assert!(w.last(ROOM).recovered);
}

#[test]
fn h_decode_cannot_be_reached() {
    // The capture shows no connect: only METADATA and, at decode's timeout, an ABORT without answer.
    let mut w = world();
    w.metadata(ROOM, &decode(0), &prefill(0));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!(v.owed_by.as_ref().unwrap().role, Some(Role::Prefill));
    assert!(readings(&v).contains(&Class::StatusLost));
    w.to(12_000);
    w.abort(ROOM, &decode(0), &prefill(0), Some(1));
    w.to(60_000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

#[test]
fn h_live_the_connect_is_refused() {
    let mut w = world();
    w.metadata(ROOM, &decode(0), &prefill(0));
    let (p, d) = (prefill(0), decode(0));
    w.state(&p, &d, Direction::Sent, TcpState::SynSent, TcpState::Close, 111);
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Likely));
    assert_eq!(v.owed_by.as_ref().unwrap().role, Some(Role::Prefill));
    assert_eq!(v.act_on.unwrap().endpoint, Some(d.endpoint));
}

#[test]
fn i_abort_after_success_changes_nothing() {
    let mut w = world();
    w.healthy(ROOM, &decode(0), &prefill(0), 5);
    w.wait(150);
    w.abort(ROOM, &decode(0), &prefill(0), Some(2));
    w.ack(ROOM, &prefill(0), &decode(0));
    w.to(400_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    assert_eq!(w.table.counters().turned_away.late, 4);
}

#[test]
fn l_two_hundred_thousand_pages() {
    let mut w = world();
    w.ask(ROOM, &decode(0), &prefill(0), |m| m.pages = 200_000);
    w.wait(600);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.to(30_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.last(ROOM).messages[0].pages, Some(200_000));
}

#[test]
fn m_prefill_gives_up_and_does_not_say_so() {
    let mut w = world();
    w.metadata(ROOM, &decode(0), &prefill(0));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert!(readings(&v).contains(&Class::PeerNotTold));
    w.to(12_007);
    w.abort(ROOM, &decode(0), &prefill(0), Some(1));
    w.ack(ROOM, &prefill(0), &decode(0));
    w.to(400_000);
    assert_eq!(w.names(ROOM), ["room_pinned", "room_closed"]);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

#[test]
fn s_slow_but_healthy_is_possible_at_most_and_recovers() {
    let mut w = world();
    for n in 0..300 {
        w.healthy(n, &decode(0), &prefill(0), 6);
    }
    w.metadata(ROOM, &decode(0), &prefill(0));
    // Healthy rooms overtake it all the time.
    for n in 300..500 {
        w.healthy(n, &decode(0), &prefill(0), 100);
    }
    w.wait(10_000);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(10_000);
    assert_eq!(w.names(ROOM), ["room_pinned", "room_closed"]);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    w.never_paged(ROOM);
    let evidence = w.pin(ROOM).unwrap().1.evidence.join("\n");
    assert!(evidence.contains("overtaken"), "{evidence}");
    assert!(w.last(ROOM).recovered);
}

#[test]
fn u_and_v_a_client_hangs_up_is_never_paged() {
    let mut w = world();
    w.abort(ROOM, &decode(0), &prefill(0), None);
    for n in 0..50 {
        w.healthy(n, &decode(0), &prefill(0), 100);
    }
    w.to(500_000);
    w.never_paged(ROOM);
    assert!(w.table.pinned().next().is_none());
}

#[test]
fn k_many_healthy_rooms_and_a_few_pinned() {
    let mut w = world();
    let stuck = [17, 130, 391];
    for n in 0..500 {
        w.metadata(n, &decode(0), &prefill(0));
        w.wait(10);
        if !stuck.contains(&n) {
            w.status(n, &prefill(0), &decode(0), KvPoll::Success);
        }
        w.wait(10);
    }
    w.wait(12_000);
    for n in 0..500 {
        assert_eq!(w.pin(n).is_some(), stuck.contains(&n), "room {n}");
        assert_eq!(w.outcomes(n).len(), usize::from(!stuck.contains(&n)), "room {n}");
    }
    for n in stuck {
        assert_eq!(w.class(n), Some(Class::TransferNotConcluded), "room {n}");
    }
}

#[test]
fn nixl_of_0_5_23_says_success() {
    let mut w = World::with(Sees::Both, NIXL_NEW, Config::default());
    w.register(&decode(0), &prefill(0));
    w.healthy(1, &decode(0), &prefill(0), 40);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(11_500);
    assert_eq!(w.outcomes(1), [Outcome::Success]);
    assert_eq!(w.class(ROOM), Some(Class::TransferNotConcluded));
}
