//! Engines that stand still on purpose: their clocks do too.

use roomtrace::http::event::{Control, PauseMode};
use roomtrace::rooms::model::{Away, Outcome, Role};
use roomtrace::rooms::{Config, RoomTable, SavedRooms, Survivors};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence};

use super::ROOM;
use super::rooms_support::*;
use super::web::*;

fn nothing_pinned(w: &Web) {
    assert!(
        w.out.iter().all(|e| e.name() != "room_pinned"),
        "{:?}",
        w.out.iter().find(|e| e.name() == "room_pinned")
    );
}

#[test]
fn two_minutes_of_pause_under_load_pin_nothing() {
    for (paused, sees) in
        [(Role::Prefill, Sees::Prefill), (Role::Decode, Sees::Both), (Role::Prefill, Sees::Both)]
    {
        let mut w = Web::new(sees);
        let mut open = Vec::new();
        for n in 0..10 {
            w.serve(1000 + n, 20);
        }
        let hand_over = |w: &mut Web, room: u64| {
            w.status(room, &prefill(0), &decode(0), KvPoll::Success);
        };
        for s in 0..125u64 {
            if s == 3 {
                w.call(paused, &Control::Pause(Some(PauseMode::InPlace)), Some(200));
            }
            for k in 0..4 {
                let room = 2000 + 10 * s + k;
                let keys = (w.request(Role::Prefill, room), w.request(Role::Decode, room));
                w.metadata(room, &decode(0), &prefill(0));
                open.push((room, keys));
                if s < 3 {
                    let (room, (p, d)) = open.remove(0);
                    hand_over(&mut w, room);
                    w.finished(p);
                    w.finished(d);
                }
            }
            w.wait(1000);
        }
        nothing_pinned(&w);
        let stuck = open[0].0;
        assert_eq!(w.class(stuck), Some(Class::Paused), "{paused:?}");
        w.call(paused, &Control::Resume, Some(200));
        // What piled up is worked off in order.
        for (room, (p, d)) in open {
            w.wait(25);
            hand_over(&mut w, room);
            w.finished(p);
            w.finished(d);
        }
        w.wait(5000);
        nothing_pinned(&w);
        assert_eq!(w.table.open().count(), 0);
        assert_eq!(w.outcomes(stuck), [Outcome::Success]);
    }
}

#[test]
fn a_pause_only_stops_the_clock() {
    let mut w = Web::new(Sees::Prefill);
    w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(5000);
    w.call(Role::Prefill, &Control::Pause(None), Some(200));
    w.wait(100_000);
    assert_eq!(w.class(ROOM), Some(Class::Paused));
    w.call(Role::Prefill, &Control::Resume, Some(200));
    // Ten seconds to work off what piled up, and the five that are left of the threshold.
    w.wait(14_000);
    assert!(w.pin(ROOM).is_none());
    w.wait(2500);
    assert!(w.pin(ROOM).is_some());
}

#[test]
fn what_was_pinned_before_stays_pinned() {
    let mut w = Web::new(Sees::Prefill);
    w.request(Role::Prefill, ROOM);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.to(12_000);
    assert!(w.last(ROOM).pinned());
    w.call(Role::Prefill, &Control::Pause(None), Some(200));
    w.wait(60_000);
    assert!(w.last(ROOM).pinned());
    assert_eq!(w.names(ROOM).len(), 1, "{:?}", w.names(ROOM));
}

#[test]
fn every_call_that_stops_an_engine_stops_its_clocks() {
    let calls: [(Control, Option<u16>, Control, Option<u16>); 5] = [
        (Control::Pause(None), Some(200), Control::Resume, Some(200)),
        (Control::WeightsBegin, Some(200), Control::WeightsEnd, Some(200)),
        (Control::MemoryRelease, Some(200), Control::MemoryResume, Some(200)),
        (Control::UpdateWeights, None, Control::UpdateWeights, Some(400)),
        (Control::RoleSwitch(None), None, Control::RoleSwitch(None), Some(500)),
    ];
    for (stop, status, start, end) in calls {
        let mut w = Web::new(Sees::Prefill);
        w.request(Role::Prefill, ROOM);
        w.call(Role::Prefill, &stop, status);
        w.abort(ROOM, &decode(0), &prefill(0), None);
        w.wait(60_000);
        assert_eq!(w.class(ROOM), Some(Class::Paused), "{stop:?}");
        w.call(Role::Prefill, &start, end);
        w.wait(25_000);
        assert!(w.pin(ROOM).is_some(), "{start:?}");
    }
}

#[test]
fn a_call_that_was_refused_or_only_asked_for_stops_nothing() {
    for status in [None, Some(400)] {
        let mut w = Web::new(Sees::Prefill);
        w.request(Role::Prefill, ROOM);
        w.call(Role::Prefill, &Control::Pause(None), status);
        w.abort(ROOM, &decode(0), &prefill(0), None);
        w.pinned_in_time(ROOM, 0.0, 10.0);
    }
}

#[test]
fn an_answer_to_a_later_request_proves_that_the_pause_is_over() {
    let mut w = Web::new(Sees::Prefill);
    w.call(Role::Prefill, &Control::Pause(None), Some(200));
    w.wait(30_000);
    // Its end was not seen.
    w.serve(1, 20);
    w.wait(12_000);
    let now = w.now_s();
    w.request(Role::Prefill, ROOM);
    w.abort(ROOM, &decode(0), &prefill(0), None);
    w.pinned_in_time(ROOM, now, 10.0);
}

#[test]
fn a_pause_of_ten_minutes_is_a_finding_and_ends_with_it() {
    let mut w = Web::new(Sees::Prefill);
    w.call(Role::Prefill, &Control::Pause(None), Some(200));
    w.to(599_000);
    assert_eq!(w.table.findings(), []);
    w.to(602_000);
    let found = w.table.findings();
    assert_eq!(found.len(), 1);
    assert_eq!((found[0].class, found[0].confidence), (Class::EnginePaused, Confidence::Certain));
    assert_eq!(found[0].engine.endpoint, Some(server(Role::Prefill)));
    assert_eq!(found[0].engine.role, Some(Role::Prefill));
    assert!(found[0].actions[0].command.contains("10.0.0.1:30000/continue_generation"));
    w.call(Role::Prefill, &Control::Resume, Some(200));
    assert_eq!(w.table.findings(), []);
    let names: Vec<_> = w.table.finding_events().map(|e| e.name()).collect();
    assert_eq!(names, ["finding_opened", "finding_closed"]);
}

#[test]
fn a_restart_in_a_pause_starts_no_clock() {
    let mut w = Web::new(Sees::Prefill);
    w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(2000);
    w.call(Role::Prefill, &Control::Pause(None), Some(200));
    let saved: SavedRooms = serde_json::from_str(&serde_json::to_string(&w.table.save()).unwrap()).unwrap();
    let survivors = Survivors { alive: saved.processes().collect(), ..Survivors::default() };
    let away = Away { from: w.at(), to: w.at() };
    w.table = RoomTable::restore(Config::default(), saved, away, &survivors);
    let now = w.at();
    let World { table, out, .. } = &mut w.world;
    table.returned(|_| true, &[], now, out);
    w.know();
    w.wait(60_000);
    assert_eq!(w.class(ROOM), Some(Class::Paused));
    w.call(Role::Prefill, &Control::Resume, Some(200));
    w.wait(25_000);
    assert!(w.pin(ROOM).is_some());
}
