//! What bootstrap servers tell.

use roomtrace::event::{Sequence, StateChange, TcpState};
use roomtrace::http::event::{RankRegistration, RouteQuery, Side, Topology};
use roomtrace::rooms::model::{Away, BootstrapStep, Input, Outcome};
use roomtrace::rooms::{Config, RoomTable, SavedRooms, Survivors};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::ROOM;
use super::rooms_support::*;
use super::web::*;

#[test]
fn the_policy_that_a_rank_registers_makes_an_early_abort_harmless() {
    for by_topology in [false, true] {
        let mut w = Web::new(Sees::Prefill);
        let c = w.connection("10.0.0.1:8998".parse().unwrap(), true, None);
        if by_topology {
            let t = Topology { prefill_complete: Some(true), ..Topology::default() };
            w.boot(c, true, 0, BootstrapStep::Topology(&t));
        } else {
            let rank = RankRegistration {
                ip: Some(prefill(0).endpoint.ip()),
                port: Some(prefill(0).endpoint.port()),
                prefill_complete: Some(true),
                ..RankRegistration::default()
            };
            w.boot(c, true, 0, BootstrapStep::Rank(&rank));
        }
        w.abort(ROOM, &decode(0), &prefill(0), None);
        w.to(60_000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Failed], "a tombstone fails the sender");
        assert!(w.pin(ROOM).is_none());
    }
}

fn register(w: &mut Web, tp: u32, size: u32) {
    let rank = RankRegistration {
        ip: Some(prefill(0).endpoint.ip()),
        port: Some(43_000 + u16::try_from(tp).unwrap()),
        tp_rank: Some(tp),
        tp_size: Some(size),
        ..RankRegistration::default()
    };
    let c = w.connection("10.0.0.1:8998".parse().unwrap(), true, None);
    w.boot(c, true, 0, BootstrapStep::Rank(&rank));
}

/// The bootstrap server begins to listen, or ends.
fn listens(w: &mut Web, begins: bool) {
    let mut connection = w.connection("0.0.0.0:8998".parse().unwrap(), true, None);
    connection.addresses.peer = "0.0.0.0:0".parse().unwrap();
    let (closed, open) = (TcpState::Close, TcpState::Listen);
    let (old, new) = if begins { (closed, open) } else { (open, closed) };
    let change = StateChange { old, new, error: 0, sequence: Sequence::default() };
    let at = w.at();
    w.input(&Input::State { at, connection, change });
}

#[test]
fn a_rank_that_never_registers_is_named() {
    let mut w = Web::new(Sees::Prefill);
    listens(&mut w, true);
    w.to(30_000);
    for tp in [0, 1, 3] {
        register(&mut w, tp, 4);
    }
    w.to(39_000);
    assert_eq!(w.table.findings(), []);
    w.to(42_000);
    let found = w.table.findings();
    assert_eq!((found.len(), found[0].class), (1, Class::RankNotRegistered));
    assert!(found[0].evidence[0].contains("3 of 4 ranks"), "{:?}", found[0].evidence);
    assert!(found[0].evidence[0].contains("missing: DP0 CP0 TP2 PP0"), "{:?}", found[0].evidence);
    assert_eq!(found[0].confidence, Confidence::Possible);
    w.to(92_000);
    let found = w.table.findings();
    assert_eq!(
        found[0].confidence,
        Confidence::Likely,
        "weights are not loaded for so long after the others"
    );
    assert!(found[0].evidence[0].contains("the last 6"), "{:?}", found[0].evidence);
    register(&mut w, 2, 4);
    assert_eq!(w.table.findings(), []);
}

/// Another agent goes on after two seconds in which none looked.
fn restart(w: &mut Web) {
    let (from, saved) = (w.at(), serde_json::to_string(&w.table.save()).unwrap());
    let saved: SavedRooms = serde_json::from_str(&saved).unwrap();
    w.wait(2000);
    let (to, survivors) = (w.at(), Survivors::default());
    w.table = RoomTable::restore(Config::default(), saved, Away { from, to }, &survivors);
    let World { table, out, .. } = &mut w.world;
    table.returned(|_| true, &[], to, out);
}

/// One that came in its stead goes on saying so, with the reserve that the rank may have registered meanwhile.
#[test]
fn a_missing_rank_is_still_named_after_a_restart() {
    for ends_by_topology in [false, true] {
        let mut w = Web::new(Sees::Prefill);
        listens(&mut w, true);
        w.to(30_000);
        register(&mut w, 0, 2);
        w.to(100_000);
        let group = w.table.findings()[0].group;
        restart(&mut w);
        w.wait(2000);
        let found = w.table.findings();
        assert_eq!((found.len(), found[0].class, found[0].group), (1, Class::RankNotRegistered, group));
        assert_eq!(found[0].confidence, Confidence::Possible);
        assert!(found[0].evidence.iter().any(|e| e.contains("no agent looked for 2")), "{found:?}");
        if ends_by_topology {
            let c = w.connection("10.0.0.1:8998".parse().unwrap(), true, None);
            let t = Topology { follows_room: Some(true), ..Topology::default() };
            w.boot(c, true, 0, BootstrapStep::Topology(&t));
        } else {
            register(&mut w, 1, 2);
        }
        w.wait(60_000);
        assert_eq!(w.table.findings(), []);
    }
}

#[test]
fn an_agent_that_came_in_the_middle_of_it_accuses_no_rank() {
    let mut w = Web::new(Sees::Prefill);
    w.to(1000);
    register(&mut w, 3, 4);
    w.to(100_000);
    assert_eq!(w.table.findings(), []);
}

/// The agent started between two registrations, however long after the first and before the second.
#[test]
fn ranks_that_may_have_registered_unseen_are_not_named() {
    // Its server is older than the agent.
    let mut w = Web::new(Sees::Prefill);
    w.to(60_000);
    register(&mut w, 3, 4);
    w.to(200_000);
    assert_eq!(w.table.findings(), []);
    // So is one that began before the last registration that is known.
    let mut w = Web::new(Sees::Prefill);
    listens(&mut w, true);
    for tp in 0..4 {
        register(&mut w, tp, 4);
    }
    w.to(200_000);
    register(&mut w, 3, 4);
    w.to(300_000);
    assert_eq!(w.table.findings(), []);
    // A registration was lost sight of.
    let mut w = Web::new(Sees::Prefill);
    listens(&mut w, true);
    register(&mut w, 0, 2);
    let c = w.connection("10.0.0.1:8998".parse().unwrap(), true, None);
    w.boot(c, true, 0, BootstrapStep::OutOfSight);
    w.to(60_000);
    assert_eq!(w.table.findings(), []);
    // Started anew, it is seen from its beginning.
    listens(&mut w, false);
    listens(&mut w, true);
    w.to(130_000);
    register(&mut w, 0, 2);
    w.to(200_000);
    assert_eq!(w.table.findings().len(), 1);
}

#[test]
fn a_query_without_an_answer_is_a_finding_until_one_is_answered() {
    for ends in [false, true] {
        let mut w = Web::new(Sees::Decode);
        let c = w.connection("10.0.0.1:8998".parse().unwrap(), false, None);
        let query = RouteQuery::default();
        w.boot(c, false, 0, BootstrapStep::Query(&query));
        if ends {
            w.wait(5000);
            w.boot(c, false, 0, BootstrapStep::HungUp(Side::Client));
        }
        w.wait(12_000);
        let found = w.table.findings();
        assert_eq!((found.len(), found[0].class), (1, Class::QueryUnanswered));
        let c = if ends { w.connection("10.0.0.1:8998".parse().unwrap(), false, None) } else { c };
        if ends {
            w.boot(c, false, 0, BootstrapStep::Query(&query));
        }
        w.boot(c, false, 0, BootstrapStep::RankIs(prefill(0).endpoint));
        w.wait(2000);
        assert_eq!(w.table.findings(), []);
    }
}

/// M26: POST `/query_dp_ranks`, seen at decode's end, at the server's, and at both on one host.
#[test]
fn a_query_for_dp_ranks_without_an_answer_is_a_finding_too() {
    let at = "10.0.0.1:8998".parse().unwrap();
    for (ends, hangs_up) in [(1, false), (2, false), (2, true)] {
        let mut w = Web::new(Sees::Both);
        let client = w.connection(at, false, None);
        let mut server = w.connection(at, true, None);
        (server.addresses.local, server.addresses.peer) = (client.addresses.peer, client.addresses.local);
        let both = [(client, false), (server, true)];
        for (c, here) in both.into_iter().rev().take(ends) {
            w.boot(c, here, 0, BootstrapStep::DpQuery);
        }
        w.wait(5000);
        assert_eq!(w.table.findings(), [], "it may still be answered");
        if hangs_up {
            for (c, here) in both {
                w.boot(c, here, 0, BootstrapStep::HungUp(Side::Client));
            }
        }
        w.wait(7000);
        let found = w.table.findings();
        assert_eq!((found.len(), found[0].class), (1, Class::QueryUnanswered));
        assert!(found[0].evidence[0].starts_with("1 queries"), "counted once: {:?}", found[0].evidence);
        let n = u64::from(hangs_up);
        if hangs_up {
            w.boot(server, true, n, BootstrapStep::DpQuery);
        }
        w.boot(server, true, n, BootstrapStep::DpRanks(&[(ROOM, 1)]));
        w.wait(2000);
        assert_eq!(w.table.findings(), [], "one was answered");
    }
}

/// M19: every status came, none was taken in, and decode's waiting timeout says so.
#[test]
fn an_abort_long_after_every_status_tells_of_a_dead_status_thread() {
    let mut w = Web::new(Sees::Decode);
    for room in [ROOM, ROOM + 1] {
        w.metadata(room, &decode(0), &prefill(0));
        w.status(room, &prefill(0), &decode(0), KvPoll::Success);
    }
    // A hang-up that crosses with Success.
    w.abort(ROOM + 1, &decode(0), &prefill(0), Some(1));
    w.to(60_000);
    assert_eq!(w.table.findings(), []);
    w.to(300_000);
    w.abort(ROOM, &decode(0), &prefill(0), Some(1));
    let found = w.table.findings();
    // Its request was not seen: somebody may have hung up while decode stood still.
    assert_eq!(
        (found.len(), found[0].class, found[0].confidence),
        (1, Class::ConcludedButHeld, Confidence::Likely)
    );
    assert_eq!(
        (found[0].engine.endpoint, found[0].rooms.as_slice()),
        (Some(decode(0).endpoint), &[ROOM][..])
    );
    w.to(1_000_000);
    assert_eq!(w.table.findings(), []);
}
