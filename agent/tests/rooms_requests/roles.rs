//! Which engine a request came to: prefill's or decode's.

use roomtrace::http::event::RankRegistration;
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{BootstrapStep, Role};

use super::ROOM;
use super::rooms_support::*;
use super::web::*;

fn leg_of(w: &Web) -> Option<Role> {
    let r = w.last(ROOM).request.unwrap();
    match (r.prefill, r.decode, r.unplaced) {
        (Some(_), None, None) => Some(Role::Prefill),
        (None, Some(_), None) => Some(Role::Decode),
        (None, None, Some(_)) => None,
        other => panic!("{other:?}"),
    }
}

fn bare() -> Web {
    Web::bare(Sees::Both, MOONCAKE, Config::default())
}

#[test]
fn by_the_process_table() {
    for role in [Role::Prefill, Role::Decode] {
        let mut w = bare();
        w.know();
        w.request(role, ROOM);
        assert_eq!(leg_of(&w), Some(role));
    }
}

#[test]
fn by_what_the_ranks_of_the_engine_have_said() {
    for role in [Role::Prefill, Role::Decode] {
        let mut w = bare();
        // The server is the ranks' parent, and nobody named its role.
        w.process(prefill(0).pid, pid(Role::Prefill), None);
        w.process(decode(0).pid, pid(Role::Decode), None);
        w.healthy(1, &decode(0), &prefill(0), 20);
        w.request(role, ROOM);
        assert_eq!(leg_of(&w), Some(role));
    }
}

#[test]
fn by_the_port_that_a_rank_registered() {
    let mut w = bare();
    let c = w.connection("10.0.0.1:8998".parse().unwrap(), true, None);
    let http = server(Role::Prefill);
    let rank = RankRegistration {
        ip: Some(http.ip()),
        port: Some(41_000),
        http_port: Some(http.port()),
        ..Default::default()
    };
    w.boot(c, true, 0, BootstrapStep::Rank(&rank));
    let c = w.connection(http, true, None);
    w.ask_on(c, true, &work(&[ROOM], ""));
    assert_eq!(leg_of(&w), Some(Role::Prefill));
}

#[test]
fn by_the_address_of_the_rooms_ranks_and_never_guessed() {
    let mut w = bare();
    let c = w.connection(server(Role::Decode), true, None);
    w.ask_on(c, true, &work(&[ROOM], "r"));
    let s = w.last(ROOM);
    assert_eq!((leg_of(&w), s.prefill.is_some(), s.decode.is_some()), (None, false, false));
    w.metadata(ROOM, &decode(0), &prefill(0));
    assert_eq!(leg_of(&w), Some(Role::Decode), "placed when the ranks are named");
    // A server at an address of neither.
    let mut w = bare();
    let c = w.connection("10.0.0.7:30000".parse().unwrap(), true, None);
    let key = w.ask_on(c, true, &work(&[ROOM], "r"));
    w.metadata(ROOM, &decode(0), &prefill(0));
    assert_eq!(leg_of(&w), None);
    w.finished(key);
    w.wait(100);
    assert!(w.last(ROOM).closed_at.is_none(), "an engine of unknown role says nothing of a view");
}

#[test]
fn a_room_known_only_from_an_engine_of_unknown_role_ends_with_the_request() {
    let mut w = bare();
    let c = w.connection("10.0.0.7:30000".parse().unwrap(), true, None);
    let key = w.ask_on(c, true, &work(&[ROOM], "r"));
    assert_eq!(w.table.open().count(), 1);
    w.finished(key);
    assert_eq!(w.table.open().count(), 0);
}

#[test]
fn two_at_engines_of_unknown_role_both_find_their_places_when_one_is_known() {
    let mut w = bare();
    let ask = |w: &mut Web, port: u16| {
        let c = w.connection(format!("10.0.0.7:{port}").parse().unwrap(), true, None);
        w.ask_on(c, true, &work(&[ROOM], "r"))
    };
    let (_open, answered) = (ask(&mut w, 30_000), ask(&mut w, 30_001));
    let r = w.last(ROOM).request.unwrap();
    assert!(r.unplaced.is_some() && r.unplaced_too.is_some(), "{r:?}");
    // A room has two engines.
    ask(&mut w, 30_002);
    assert_eq!(w.table.counters().turned_away.requests, 1);
    let rank = RankRegistration {
        ip: Some("10.0.0.7".parse().unwrap()),
        port: Some(41_000),
        http_port: Some(30_000),
        ..Default::default()
    };
    let c = w.connection("10.0.0.7:8998".parse().unwrap(), true, None);
    w.boot(c, true, 0, BootstrapStep::Rank(&rank));
    w.finished(answered);
    let r = w.last(ROOM).request.unwrap();
    assert!(r.unplaced.is_none() && r.unplaced_too.is_none(), "{r:?}");
    assert!(r.prefill.unwrap().ended.is_none() && r.decode.unwrap().ended.is_some(), "{r:?}");
}
