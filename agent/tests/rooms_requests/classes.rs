//! Classes that only the request tells, and those that it raises.

use roomtrace::http::event::{Outcome as Answer, RankRegistration, Rooms, Side};
use roomtrace::rooms::model::{BootstrapStep, Outcome, Role};
use roomtrace::sglang::message::{Kind, KvPoll};
use roomtrace::verdict::model::{Class, Confidence};

use super::ROOM;
use super::rooms_support::*;
use super::web::*;

// peer_not_told

#[test]
fn decode_waits_for_a_prefill_that_has_given_up() {
    for how in ["error", "abort", "hang-up", "refused before metadata"] {
        let mut w = Web::new(Sees::Both);
        let p = w.request(Role::Prefill, ROOM);
        let d = w.request(Role::Decode, ROOM);
        if how != "refused before metadata" {
            w.metadata(ROOM, &decode(0), &prefill(0));
        }
        w.wait(500);
        match how {
            "error" => w.answered(p, 500, Answer::Error),
            "abort" => w.answered(p, 200, Answer::Aborted),
            "hang-up" => w.hung_up(p, Side::Client),
            _ => {
                w.answered(p, 400, Answer::Error);
                w.metadata(ROOM, &decode(0), &prefill(0));
            }
        }
        w.wait(9000);
        assert!(w.pin(ROOM).is_none(), "{how}: early");
        w.wait(2500);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::PeerNotTold, Confidence::Certain), "{how}");
        assert_eq!(v.owed_by, None, "{how}: nobody");
        assert_eq!(v.act_on.unwrap().role, Some(Role::Decode), "{how}");
        assert!(v.actions.iter().any(|a| a.command.contains("10.0.0.2:30000/abort_request")), "{how}");
        w.answered(d, 500, Answer::Error);
        w.wait(4000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Failed], "{how}");
    }
}

#[test]
fn prefill_that_said_how_it_ended_has_told() {
    let mut w = Web::new(Sees::Both);
    let p = w.request(Role::Prefill, ROOM);
    let d = w.request(Role::Decode, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Failed);
    w.answered(p, 500, Answer::Error);
    w.answered(d, 500, Answer::Error);
    w.wait(60_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
}

// the gauge of open rooms

#[test]
fn open_rooms_are_counted_by_the_views_that_are_not_over() {
    let open = |w: &Web| -> Vec<(Role, u64)> {
        let open = w.table.gauges().open.into_iter().filter(|g| g.rooms > 0);
        open.map(|g| (g.role, g.rooms)).collect()
    };
    let mut w = Web::new(Sees::Both);
    let p = w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    assert_eq!(open(&w), [(Role::Prefill, 1), (Role::Decode, 1)]);
    // Decode hears of it, and prefill's engine holds the request on.
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    assert_eq!(open(&w), [(Role::Prefill, 1)]);
    w.finished(p);
    w.wait(5000);
    assert_eq!((open(&w), w.outcomes(ROOM)), (vec![], vec![Outcome::Success]));
    // Decode does not hear of it.
    w.metadata(2, &decode(0), &prefill(0));
    w.tell(2, &prefill(0), &decode(0), KvPoll::Success, false);
    assert_eq!(open(&w), [(Role::Decode, 1)]);
}

// metadata_missing, queued

#[test]
fn without_metadata_decode_queues_or_has_lost_it() {
    for role in [Role::Prefill, Role::Decode] {
        let sees = if role == Role::Prefill { Sees::Prefill } else { Sees::Decode };
        let mut w = Web::new(sees);
        let key = w.request(role, ROOM);
        w.wait(15_000);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::Queued, Confidence::Possible), "{role:?}");
        assert_eq!(v.owed_by.unwrap().role, Some(Role::Decode));
        assert_eq!(v.expected, Some(Kind::Metadata));
        assert!(v.ends_by_itself.unwrap().timer.contains("BOOTSTRAP"));
        assert!(w.pin(ROOM).is_none());
        // Decode has pages for those that came later.
        for n in 1..5 {
            let later = w.request(role, n);
            w.healthy(n, &decode(0), &prefill(0), 20);
            w.finished(later);
        }
        w.wait(2000);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::MetadataMissing, Confidence::Possible), "{role:?}");
        assert_eq!(v.owed_by.unwrap().role, Some(Role::Decode));
        w.never_paged(ROOM);
        w.answered(key, 500, Answer::Error);
        w.wait(4000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
    }
}

#[test]
fn an_empty_prealloc_queue_says_that_decode_has_lost_it() {
    let mut w = Web::new(Sees::Both);
    w.request(Role::Prefill, ROOM);
    w.request(Role::Decode, ROOM);
    w.gauges(Role::Decode, 0, 3, 0);
    w.wait(12_000);
    assert_eq!(w.class(ROOM), Some(Class::Queued));
    w.gauges(Role::Decode, 0, 0, 0);
    w.wait(2000);
    let v = w.verdict(ROOM);
    assert_eq!(
        (v.class, v.confidence),
        (Class::MetadataMissing, Confidence::Possible),
        "its server may have it"
    );
    w.wait(33_000);
    w.gauges(Role::Decode, 0, 0, 0);
    w.wait(15_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::MetadataMissing, Confidence::Likely));
}

/// The answer of a streamed batch begins with its first room; the others wait for decode all the same.
#[test]
fn a_room_of_a_batch_that_is_answered_already_can_be_lost_by_decode() {
    let mut w = Web::new(Sees::Both);
    let key = w.ask_for(Role::Prefill, &[ROOM, ROOM + 1], "r");
    w.ask_for(Role::Decode, &[ROOM, ROOM + 1], "r");
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(100);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.first_byte(key);
    w.wait(13_000);
    assert_eq!(w.class(ROOM + 1), Some(Class::Queued));
    for _ in 0..35 {
        w.gauges(Role::Decode, 0, 0, 0);
        w.wait(2000);
    }
    let v = w.verdict(ROOM + 1);
    assert_eq!(
        (v.class, v.confidence),
        (Class::MetadataMissing, Confidence::Likely),
        "decode's own request is open"
    );
    assert_eq!(v.owed_by.unwrap().role, Some(Role::Decode));
}

#[test]
fn a_request_that_decode_never_got_is_the_routers() {
    let mut w = Web::new(Sees::Both);
    w.serve(1, 10);
    w.wait(60_000);
    w.request(Role::Prefill, ROOM);
    w.wait(12_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::MetadataMissing, Confidence::Possible));
    assert_eq!(v.owed_by.unwrap().role, None, "neither engine");
    assert!(
        v.evidence.iter().any(|e| e.contains("no request of this room came to decode")),
        "{:?}",
        v.evidence
    );
}

#[test]
fn metadata_for_a_request_that_never_came_is_told_to_decode() {
    let mut w = Web::new(Sees::Prefill);
    w.serve(1, 10);
    w.wait(60_000);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(12_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::PeerNotTold, Confidence::Possible));
}

// concluded_but_held, abort_ignored

#[test]
fn prefill_that_has_told_all_and_does_not_answer_holds_it() {
    let mut w = Web::new(Sees::Prefill);
    let key = w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(20);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    let end = w.sent_to(&prefill(0), &decode(0));
    w.acknowledge(&prefill(0), &decode(0), end);
    let v = w.pinned_in_time(ROOM, 0.02, 10.0);
    assert_eq!((v.class, v.confidence), (Class::ConcludedButHeld, Confidence::Possible));
    assert_eq!(v.owed_by.unwrap().role, Some(Role::Prefill));
    w.to(62_000);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Likely);
    w.finished(key);
    w.wait(3000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
}

/// The end of a long answer may pass unseen: once its body has begun nothing says that the room is held.
#[test]
fn prefill_that_answers_does_not_hold_it() {
    for (layout, told) in [(MOONCAKE, true), (NIXL_OLD, false)] {
        let mut w = Web::with(Sees::Both, layout);
        let key = w.request(Role::Prefill, ROOM);
        let decodes = w.request(Role::Decode, ROOM);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(20);
        if told {
            w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
        }
        w.first_byte(key);
        w.wait(400);
        w.finished(decodes);
        w.wait(120_000);
        assert!(w.pin(ROOM).is_none(), "{:?}", w.pin(ROOM));
        assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    }
    // An error that stands in the answer is one: head, body and end come within a moment.
    let mut w = Web::new(Sees::Prefill);
    let key = w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(20);
    w.first_byte(key);
    w.wait(5);
    w.answered(key, 200, Answer::Aborted);
    w.wait(3000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

/// A batch of which not every room was seen may wait for one of those.
#[test]
fn a_batch_that_was_not_seen_whole_holds_nothing() {
    for whole in [true, false] {
        let mut w = Web::new(Sees::Prefill);
        let mut asked = work(&[ROOM, ROOM + 1], "r");
        if let Rooms::Named { complete, .. } = &mut asked.rooms {
            *complete = whole;
        }
        let connection = w.connection(server(Role::Prefill), true, Some(task(pid(Role::Prefill))));
        w.ask_on(connection, true, &asked);
        for room in [ROOM, ROOM + 1] {
            w.metadata(room, &decode(0), &prefill(0));
            w.wait(20);
            w.status(room, &prefill(0), &decode(0), KvPoll::Success);
            let end = w.sent_to(&prefill(0), &decode(0));
            w.acknowledge(&prefill(0), &decode(0), end);
        }
        w.wait(90_000);
        assert_eq!(w.pin(ROOM).is_some(), whole, "{:?}", w.pin(ROOM));
    }
}

/// A request of which not all was seen may be for more rooms: of the numbers that follow, where the engine names them.
#[test]
fn a_request_that_may_have_more_rooms_is_held_only_by_an_engine_that_rests() {
    for (case, sibling, moves, confidence) in [
        ("another room of it computes", true, true, None),
        ("the engine computes", false, true, Some(Confidence::Possible)),
        ("the engine rests", false, false, Some(Confidence::Likely)),
    ] {
        let mut w = Web::new(Sees::Prefill);
        let mut asked = work(&[ROOM], "r");
        if let Rooms::Named { maybe_more, .. } = &mut asked.rooms {
            *maybe_more = true;
        }
        let connection = w.connection(server(Role::Prefill), true, Some(task(pid(Role::Prefill))));
        let key = w.ask_on(connection, true, &asked);
        w.metadata(ROOM, &decode(0), &prefill(0));
        if sibling {
            w.metadata(ROOM + 2, &decode(0), &prefill(0));
        }
        w.wait(20);
        w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
        let end = w.sent_to(&prefill(0), &decode(0));
        w.acknowledge(&prefill(0), &decode(0), end);
        for n in 0..45 {
            w.gauges(Role::Prefill, 1, 0, if moves { 1000 * n } else { 7 });
            w.wait(2000);
        }
        let seen = w.pin(ROOM).is_some().then(|| w.verdict(ROOM)).map(|v| (v.class, v.confidence));
        assert_eq!(seen, confidence.map(|c| (Class::ConcludedButHeld, c)), "{case}");
        if sibling {
            // It is no room that prefill never got.
            w.never_paged(ROOM + 2);
            assert_ne!(w.class(ROOM + 2), Some(Class::PeerNotTold), "{case}");
            w.status(ROOM + 2, &prefill(0), &decode(0), KvPoll::Success);
            w.wait(5000);
            assert!(w.pin(ROOM).is_none(), "the answer comes after the last of them");
            w.finished(key);
            w.wait(3000);
            assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
        }
    }
}

/// A rank of prefill's group of `tp` times `cp` registers at its bootstrap server on this host.
fn put_route(w: &mut Web, at: &str, (tp, tps): (u32, u32), (cp, cps): (u32, u32)) {
    let at: std::net::SocketAddr = at.parse().unwrap();
    let rank = RankRegistration {
        ip: Some(at.ip()),
        port: Some(at.port()),
        tp_rank: Some(tp),
        tp_size: Some(tps),
        cp_rank: Some(cp),
        cp_size: Some(cps),
        dp_size: Some(1),
        system_dp_size: Some(1),
        pp_size: Some(1),
        ..RankRegistration::default()
    };
    let c = w.connection("10.0.0.1:8998".parse().unwrap(), true, None);
    w.boot(c, true, 0, BootstrapStep::Rank(&rank));
}

/// The ranks of prefill here have said `status`, each to its decode rank, and the request stays open.
fn told_and_open(w: &mut Web, ranks: u8, status: KvPoll) {
    w.request(Role::Prefill, ROOM);
    for n in 0..ranks {
        w.ask(ROOM, &decode(n), &prefill(n), |m| m.required = Some(1));
        w.status(ROOM, &prefill(n), &decode(n), status);
        let end = w.sent_to(&prefill(n), &decode(n));
        w.acknowledge(&prefill(n), &decode(n), end);
    }
}

#[test]
fn a_rank_of_prefill_elsewhere_holds_up_those_that_have_told() {
    let mut w = Web::new(Sees::Prefill);
    put_route(&mut w, "10.0.0.1:41000", (0, 2), (0, 1));
    put_route(&mut w, "10.9.9.9:40001", (1, 2), (0, 1));
    told_and_open(&mut w, 1, KvPoll::Success);
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::RanksDisagree, Confidence::Possible));
    w.to(62_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::RanksDisagree, Confidence::Likely));
    for who in [v.owed_by, v.act_on] {
        let who = who.unwrap();
        assert_eq!(
            (who.role, who.rank, who.endpoint),
            (Some(Role::Prefill), Some(1), Some("10.9.9.9:40001".parse().unwrap()))
        );
    }
    assert_eq!(v.expected, Some(Kind::Status));
    assert!(v.ends_by_itself.unwrap().timer.contains("WAITING_TIMEOUT"));
    assert!(v.candidates.iter().any(|c| c.class == Class::ConcludedButHeld), "{:?}", v.candidates);
    assert!(v.evidence.iter().any(|e| e.contains("1 of them are of this host")), "{:?}", v.evidence);
    for a in &v.actions {
        let words = format!("{} {} {}", a.command, a.effect, a.blast_radius);
        assert!(!words.contains("41000") && !words.contains("kill -TERM 100"), "{words}");
    }
    assert!(v.actions.iter().any(|a| a.command.contains("10.0.0.1:30000/abort_request")), "{:?}", v.actions);
    assert!(v.actions.iter().any(|a| a.command.contains("# at 10.9.9.9")), "{:?}", v.actions);
}

#[test]
fn a_decode_that_generates_waits_for_no_rank_elsewhere() {
    for begins in [false, true] {
        let mut w = Web::new(Sees::Both);
        put_route(&mut w, "10.0.0.1:41000", (0, 2), (0, 1));
        put_route(&mut w, "10.9.9.9:40001", (1, 2), (0, 1));
        let d = w.request(Role::Decode, ROOM);
        told_and_open(&mut w, 1, KvPoll::Success);
        if begins {
            w.first_byte(d);
        }
        w.to(12_000);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::RanksDisagree, Confidence::Possible));
        assert_eq!(v.ends_by_itself.is_none(), begins, "decode's timer is over");
    }
}

#[test]
fn decode_that_expects_more_ranks_tells_of_one_elsewhere() {
    let mut w = Web::new(Sees::Prefill);
    let d = decode_of(0, 2);
    w.register(&d, &prefill(0));
    w.request(Role::Prefill, ROOM);
    // Each rank of prefill is asked by one of decode's two, so it has two as well.
    w.ask(ROOM, &d, &prefill(0), |m| m.required = Some(1));
    w.status(ROOM, &prefill(0), &d, KvPoll::Success);
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::RanksDisagree, Confidence::Possible));
    let who = v.owed_by.unwrap();
    assert_eq!((who.role, who.rank, who.endpoint, who.task), (Some(Role::Prefill), None, None, None));
    // Whom to restart only its own host tells.
    assert!(v.actions.iter().all(|a| !a.command.contains("kill")), "{:?}", v.actions);
    assert!(v.actions.iter().any(|a| a.command == format!("roomtrace explain {ROOM}")), "{:?}", v.actions);
}

#[test]
fn ranks_that_are_all_here_or_have_failed_wait_for_nobody_elsewhere() {
    for case in ["all told", "context-parallel", "failed", "decode has more"] {
        let mut w = Web::new(Sees::Prefill);
        let (tps, cps) = if case == "context-parallel" { (1, 2) } else { (2, 1) };
        if case != "decode has more" {
            put_route(&mut w, "10.0.0.1:41000", (0, tps), (0, cps));
        }
        match case {
            "all told" => put_route(&mut w, "10.0.0.1:41001", (1, 2), (0, 1)),
            // That one is asked for nothing.
            "context-parallel" => put_route(&mut w, "10.0.0.1:41001", (0, 1), (1, 2)),
            "failed" => put_route(&mut w, "10.9.9.9:40001", (1, 2), (0, 1)),
            _ => {}
        }
        match case {
            "all told" => told_and_open(&mut w, 2, KvPoll::Success),
            "failed" => told_and_open(&mut w, 1, KvPoll::Failed),
            "context-parallel" => told_and_open(&mut w, 1, KvPoll::Success),
            _ => {
                w.request(Role::Prefill, ROOM);
                for d in [decode_of(0, 2), decode_of(1, 2)] {
                    w.register(&d, &prefill(0));
                    w.metadata(ROOM, &d, &prefill(0));
                }
                for d in [decode_of(0, 2), decode_of(1, 2)] {
                    w.status(ROOM, &prefill(0), &d, KvPoll::Success);
                }
            }
        }
        w.to(12_000);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::ConcludedButHeld, Confidence::Possible), "{case}");
        assert_eq!(v.owed_by.unwrap().endpoint, Some(prefill(0).endpoint), "{case}");
    }
}

#[test]
fn a_prefill_that_has_registered_anew_is_another_group() {
    let mut w = Web::new(Sees::Prefill);
    put_route(&mut w, "10.0.0.1:40900", (0, 2), (0, 1));
    put_route(&mut w, "10.9.9.9:40001", (1, 2), (0, 1));
    put_route(&mut w, "10.0.0.1:41000", (0, 2), (0, 1));
    put_route(&mut w, "10.9.9.9:40002", (1, 2), (0, 1));
    told_and_open(&mut w, 1, KvPoll::Success);
    w.to(12_000);
    let who = w.verdict(ROOM).owed_by.unwrap();
    assert_eq!(who.endpoint, Some("10.9.9.9:40002".parse().unwrap()), "not the one that is gone");
}

#[test]
fn an_acknowledged_abort_that_prefill_does_not_end_after() {
    let mut w = Web::new(Sees::Prefill);
    let key = w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.abort(ROOM, &decode(0), &prefill(0), Some(1));
    w.ack(ROOM, &prefill(0), &decode(0));
    let v = w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::AbortBeforeEntry, Confidence::Possible), "M2");
    w.wait(50_000);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Likely, "nothing was before it");
    w.answered(key, 500, Answer::Aborted);
    w.wait(4000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

#[test]
fn mori_that_drops_an_abort_and_does_not_end() {
    for layout in [MORI_OLD, MORI_OPEN] {
        let mut w = Web::with(Sees::Prefill, layout);
        w.request(Role::Prefill, ROOM);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(100);
        w.abort(ROOM, &decode(0), &prefill(0), None);
        w.wait(12_000);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::AbortIgnored, Confidence::Possible));
        assert_eq!(v.owed_by.unwrap().role, Some(Role::Prefill));
    }
}

// what raises transfer_*

#[test]
fn overtaken_with_an_open_request_is_possible() {
    for requested in [true, false] {
        let mut w = Web::new(Sees::Prefill);
        if requested {
            w.request(Role::Prefill, ROOM);
        }
        w.metadata(ROOM, &decode(0), &prefill(0));
        for n in 1..4 {
            w.serve(n, 20);
        }
        w.wait(12_000);
        let v = w.verdict(ROOM);
        // A long prompt that computes is overtaken as well.
        assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Possible));
    }
}

#[test]
fn overtaken_where_the_usual_is_known_is_possible() {
    let mut w = Web::new(Sees::Prefill);
    for n in 0..110 {
        w.healthy(100 + n, &decode(0), &prefill(0), 20);
    }
    w.metadata(ROOM, &decode(0), &prefill(0));
    for n in 1..3 {
        w.healthy(n, &decode(0), &prefill(0), 20);
    }
    w.wait(12_000);
    w.healthy(3, &decode(0), &prefill(0), 20);
    w.wait(2000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Possible));
}

#[test]
fn requests_that_finish_stand_for_success_where_it_is_not_on_the_wire() {
    let mut w = Web::with(Sees::Prefill, NIXL_OLD);
    w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    for n in 1..5 {
        let key = w.request(Role::Prefill, n);
        w.metadata(n, &decode(0), &prefill(0));
        w.wait(20);
        w.finished(key);
    }
    w.to(12_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Possible));
}

#[test]
fn counters_part_computing_from_stuck() {
    let mut w = Web::new(Sees::Prefill);
    w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    for s in 0..13 {
        w.gauges(Role::Prefill, 1, 0, s);
        w.wait(1000);
    }
    assert_eq!(w.class(ROOM), Some(Class::Queued), "it computes");
    assert!(w.pin(ROOM).is_none());
    for _ in 0..13 {
        w.gauges(Role::Prefill, 1, 0, 12);
        w.wait(1000);
    }
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Likely), "it stands still");
    assert!(!readings(&v).contains(&Class::Queued) && !readings(&v).contains(&Class::PeerNotTold));
}

#[test]
fn an_open_request_alone_excludes_no_queue() {
    let mut w = Web::new(Sees::Prefill);
    w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.to(200_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Possible));
}
