//! ABORT with the request in sight: a pin, or a client that hung up.

use roomtrace::http::event::{Outcome as Answer, Side};
use roomtrace::rooms::model::{Away, Outcome, Role};
use roomtrace::rooms::{Config, RoomTable, SavedRooms, Survivors};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::ROOM;
use super::rooms_support::*;
use super::web::*;

#[test]
fn an_open_request_makes_an_abort_without_metadata_likely() {
    for layout in [MOONCAKE, NIXL_OLD, NIXL_NEW] {
        let mut w = Web::with(Sees::Prefill, layout);
        w.request(Role::Prefill, ROOM);
        w.abort(ROOM, &decode(0), &prefill(0), None);
        let v = w.pinned_in_time(ROOM, 0.0, 10.0);
        assert_eq!((v.class, v.confidence), (Class::AbortBeforeEntry, Confidence::Likely));
        assert!(!readings(&v).contains(&Class::NotApplicable), "nobody has hung up");
        assert!(v.evidence.iter().any(|e| e.contains("is open for")), "{:?}", v.evidence);
        // The request id is known, and the port.
        assert!(v.actions[0].command.contains("10.0.0.1:30000/abort_request"), "{:?}", v.actions[0]);
        assert!(v.actions[0].command.contains(r#"{"rid":"r-1"}"#), "{:?}", v.actions[0]);
        // The finding of this one room says the same.
        let findings = w.table.findings();
        let of_room = findings.iter().find(|f| f.group == v.group).unwrap();
        assert_eq!(of_room.actions, v.actions);
    }
}

#[test]
fn a_request_that_comes_after_the_abort_is_the_pin() {
    let mut w = Web::new(Sees::Prefill);
    w.serve(1, 10);
    w.wait(60_000);
    let now = w.now_s();
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.wait(3000);
    w.request(Role::Prefill, ROOM);
    let v = w.pinned_in_time(ROOM, now, 10.0);
    assert_eq!((v.class, v.confidence), (Class::AbortBeforeEntry, Confidence::Likely));
}

#[test]
fn a_client_that_hung_up_leaves_no_pin() {
    let mut w = Web::new(Sees::Both);
    let (p, d) = (w.request(Role::Prefill, ROOM), w.request(Role::Decode, ROOM));
    w.wait(300);
    w.hung_up(d, Side::Client);
    w.hung_up(p, Side::Client);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.to(60_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

/// An engine notices a hang-up up to 4 s late, and serves the request on until then.
#[test]
fn a_room_that_succeeds_before_the_engines_notice_the_hang_up_has_succeeded() {
    for metadata_first in [true, false] {
        let mut w = Web::new(Sees::Both);
        let (p, d) = (w.request(Role::Prefill, ROOM), w.request(Role::Decode, ROOM));
        w.wait(10);
        if metadata_first {
            w.metadata(ROOM, &decode(0), &prefill(0));
        }
        w.hung_up(p, Side::Client);
        w.hung_up(d, Side::Client);
        w.wait(3_900);
        if !metadata_first {
            w.metadata(ROOM, &decode(0), &prefill(0));
        }
        w.wait(20);
        w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
        w.to(60_000);
        assert_eq!(w.names(ROOM), ["room_closed"]);
        assert_eq!(w.outcomes(ROOM), [Outcome::Success]);
    }
}

#[test]
fn a_room_of_which_nothing_is_heard_after_its_hang_up_has_failed() {
    let mut w = Web::new(Sees::Both);
    let (p, d) = (w.request(Role::Prefill, ROOM), w.request(Role::Decode, ROOM));
    w.hung_up(p, Side::Client);
    w.hung_up(d, Side::Client);
    w.to(60_000);
    assert_eq!(w.names(ROOM), ["room_closed"]);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

#[test]
fn a_request_known_never_to_have_come_is_no_pin() {
    let mut w = Web::new(Sees::Prefill);
    w.serve(1, 10);
    w.wait(60_000);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.wait(15_000);
    assert_eq!(w.class(ROOM), Some(Class::NotApplicable));
    assert!(w.pin(ROOM).is_none());
}

#[test]
fn never_come_is_not_said_where_requests_can_have_passed_unseen() {
    type Blind = fn(&mut Web);
    let cases: [Blind; 3] = [
        |w| {
            w.not_seen(Role::Prefill);
        },
        |w| {
            let key = w.request(Role::Prefill, 77);
            w.out_of_sight(key);
        },
        |w| {
            let connection = w.connection(server(Role::Prefill), true, None);
            let at = w.at();
            let why = roomtrace::rooms::model::Unreadable::Tls;
            w.input(&roomtrace::rooms::model::Input::Unreadable { at, connection, why });
        },
    ];
    for blind in cases {
        let mut w = Web::new(Sees::Prefill);
        w.serve(1, 10);
        w.wait(60_000);
        w.abort(ROOM, &decode(0), &prefill(0), None);
        w.wait(1000);
        blind(&mut w);
        w.wait(15_000);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::AbortBeforeEntry, Confidence::Possible));
    }
    // Nothing at all is known of prefill's HTTP port.
    let mut w = Web::new(Sees::Prefill);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    assert_eq!(w.pinned_in_time(ROOM, 0.0, 10.0).confidence, Confidence::Possible);
}

#[test]
fn lost_sight_of_the_pin_is_only_possible() {
    let mut w = Web::new(Sees::Prefill);
    let key = w.request(Role::Prefill, ROOM);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.pinned_in_time(ROOM, 0.0, 10.0);
    w.out_of_sight(key);
    w.wait(2000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::AbortBeforeEntry, Confidence::Possible));
}

#[test]
fn a_pin_ends_when_prefill_answers() {
    let mut w = Web::new(Sees::Prefill);
    let key = w.request(Role::Prefill, ROOM);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.pinned_in_time(ROOM, 0.0, 10.0);
    // Prefill's bootstrap timeout: a 500.
    w.to(300_000);
    assert!(w.last(ROOM).pinned());
    w.answered(key, 500, Answer::Error);
    w.wait(4000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
    assert!(w.last(ROOM).recovered);
}

/// M44, from the prefill host alone.
#[test]
fn the_incident_is_likely_within_a_minute() {
    for metadata in ["before", "none"] {
        let mut w = Web::with(Sees::Prefill, NIXL_OLD);
        w.serve(1, 10);
        w.wait(60_000);
        let begun = w.now_s();
        w.request(Role::Prefill, ROOM);
        if metadata == "before" {
            w.metadata(ROOM, &decode(0), &prefill(0));
        }
        w.abort(ROOM, &decode(0), &prefill(0), None);
        w.wait(59_000);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::AbortBeforeEntry, Confidence::Likely), "{metadata}");
        assert_eq!(v.ends_by_itself, None, "{metadata}");
        assert!(v.candidates.iter().any(|c| c.modes.contains(&"M17")), "{metadata}: M17 is named");
        assert!(w.pin(ROOM).unwrap().0 - begun < 12.0);
        w.to(3_600_000);
        assert!(w.last(ROOM).pinned(), "nothing empties that queue");
    }
}

#[test]
fn what_waits_behind_others_after_an_abort_stays_possible() {
    let mut w = Web::with(Sees::Prefill, NIXL_OLD);
    // An earlier request is still computed.
    let first = w.request(Role::Prefill, 1);
    w.metadata(1, &decode(0), &prefill(0));
    w.wait(1000);
    let key = w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.wait(60_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::AbortBeforeEntry, Confidence::Possible));
    w.finished(first);
    w.wait(200);
    w.answered(key, 200, Answer::Aborted);
    w.wait(3000);
    assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
}

#[test]
fn two_hundred_clients_that_hang_up_page_nobody() {
    for (sees, layout) in [
        (Sees::Prefill, MOONCAKE),
        (Sees::Both, MOONCAKE),
        (Sees::Decode, MOONCAKE),
        (Sees::Prefill, NIXL_OLD),
        (Sees::Both, NIXL_OLD),
        (Sees::Prefill, NIXL_NEW),
    ] {
        let mut w = Web::with(sees, layout);
        let mut keys = Vec::new();
        let mut random = 12345u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            random >> 33
        };
        for n in 0..200 {
            let room = ROOM + n;
            // How far it gets before its client hangs up.
            let stage = next() % 4;
            let keys_of = (w.request(Role::Prefill, room), w.request(Role::Decode, room));
            if stage >= 1 {
                w.metadata(room, &decode(0), &prefill(0));
            }
            if stage == 3 {
                w.status(room, &prefill(0), &decode(0), KvPoll::Success);
            }
            keys.push((room, stage, keys_of));
            w.wait(next() % 40);
        }
        for (room, stage, (p, d)) in keys {
            let order = next() % 3;
            let generation = (stage >= 1).then_some(1);
            if order == 0 {
                w.hung_up(p, Side::Client);
            }
            if order == 1 {
                w.abort(room, &decode(0), &prefill(0), generation);
            }
            w.hung_up(d, Side::Client);
            w.wait(next() % 30);
            if order != 1 {
                w.abort(room, &decode(0), &prefill(0), generation);
            }
            if order != 0 {
                w.hung_up(p, Side::Client);
            }
            if layout.backend == MOONCAKE.backend && stage >= 1 {
                w.ack(room, &prefill(0), &decode(0));
            }
        }
        w.wait(400_000);
        for n in 0..200 {
            w.never_paged(ROOM + n);
            if sees != Sees::Decode {
                assert!(w.pin(ROOM + n).is_none(), "{sees:?} {:?}", w.pin(ROOM + n));
            }
        }
    }
}

#[test]
fn a_restart_keeps_the_pin_as_sure_as_its_connection_is_still_there() {
    for (there, confidence) in [(true, Confidence::Likely), (false, Confidence::Possible)] {
        let mut w = Web::new(Sees::Prefill);
        let key = w.request(Role::Prefill, ROOM);
        w.abort(ROOM, &decode(0), &prefill(0), None);
        w.pinned_in_time(ROOM, 0.0, 10.0);
        let before = w.verdict(ROOM);
        let saved: SavedRooms =
            serde_json::from_str(&serde_json::to_string(&w.table.save()).unwrap()).unwrap();
        let alive = saved.processes().collect();
        let survivors = Survivors { alive, ..Survivors::default() };
        let away = Away { from: w.at(), to: w.at() };
        w.table = RoomTable::restore(Config::default(), saved, away, &survivors);
        let now = w.at();
        let told = w.out.len();
        let World { table, out, .. } = &mut w.world;
        table.returned(|s| there || s.0 < 5_000_000, &[], now, out);
        let after = w.verdict(ROOM);
        assert_eq!((after.class, after.confidence, after.since), (before.class, confidence, before.since));
        assert_eq!(w.last(ROOM).request.unwrap().rid.as_deref(), Some("r-1"));
        assert_eq!(w.out.len() == told, there, "no news where nothing is new");
        if there {
            // Its end is still noticed.
            w.know();
            w.answered(key, 500, Answer::Error);
            w.wait(4000);
            assert_eq!(w.outcomes(ROOM), [Outcome::Failed]);
        }
    }
}
