//! Scheduler spans and rooms: which request is which room's, and what that says.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod rooms_support;
mod spans_support;
#[path = "rooms_requests/web.rs"]
mod web;

use opentelemetry_proto::tonic::trace::v1::Span;
use rooms_support::{START, Sees, World, decode, prefill};
use roomtrace::event::SECOND;
use roomtrace::rooms::model::{Event, Input, Role};
use roomtrace::sglang::message::KvPoll;
use roomtrace::spans::{MAX_NODES, decode as read};
use roomtrace::verdict::model::{Class, Confidence};
use spans_support::{Engine, RELEASES, Release, Sent, bytes_of};

const ROOM: u64 = 9_000_000_000_000_000_001;

/// Wall clock − monotonic clock of these hosts.
const OFFSET: u64 = 1_700_000_000 * SECOND;

/// Seconds of the world → the engine's clock.
fn wall(ms: u64) -> u64 {
    START + OFFSET + ms * 1_000_000
}

fn world() -> World {
    let mut w = World::new(Sees::Prefill);
    w.register(&decode(0), &prefill(0));
    w
}

fn tell(w: &mut World, spans: Vec<Span>) {
    let spans = read(&bytes_of(spans)).unwrap().spans;
    let at = w.mono();
    w.input(&Input::Spans { at, offset: i64::try_from(OFFSET).unwrap(), spans: &spans });
}

fn tell_all(w: &mut World, sent: Sent) {
    for spans in [sent.front, sent.computed, sent.rest, sent.request] {
        tell(w, spans);
    }
}

fn stages(w: &World, room: u64) -> Vec<String> {
    w.last(room).scheduled[0].stages.iter().map(|s| s.name.to_string()).collect()
}

#[test]
fn a_request_joins_its_room_in_every_release_and_is_told_after_the_room_has_closed() {
    for release in RELEASES {
        let mut w = world();
        w.to(10);
        w.healthy(ROOM, &decode(0), &prefill(0), 90);
        w.acknowledge(&prefill(0), &decode(0), w.sent_to(&prefill(0), &decode(0)));
        w.wait(2000);
        assert_eq!(w.names(ROOM), ["room_closed"]);
        let engine = Engine::prefill(release, ROOM, wall(5));
        tell_all(&mut w, engine.sent(50, 100));
        let request = w.last(ROOM).scheduled.pop().unwrap_or_else(|| panic!("{release:?}"));
        assert_eq!(&*request.rid, engine.rid);
        assert_eq!(request.trace.0, engine.trace.to_be_bytes());
        assert_eq!(request.span.0, engine.root().to_be_bytes());
        assert_eq!(request.begin.0, START + 5_000_000, "on the agent's clock");
        let names = stages(&w, ROOM);
        if release == Release::Early {
            assert_eq!(names, ["tokenize", "dispatch", "process req", "prefill"]);
            assert_eq!(request.role, None);
        } else {
            assert_eq!(names.len(), 7, "{names:?}");
            assert_eq!((names[0].as_str(), names[6].as_str()), ("tokenize", "prefill_transfer_kv_cache"));
            assert_eq!(request.role, Some(Role::Prefill));
        }
        // Told once, when the last span must have come.
        w.wait(5500);
        assert_eq!(w.names(ROOM), ["room_closed"]);
        w.wait(1000);
        assert_eq!(w.names(ROOM), ["room_closed", "room_scheduled"]);
        let Some(Event::Scheduled(told)) = w.out.last() else { panic!() };
        assert_eq!(told.scheduled.len(), 1);
        w.wait(60_000);
        assert_eq!(w.names(ROOM).len(), 2);
        let c = w.table.span_counters();
        assert_eq!((c.joined, c.unmatched, c.without_room, c.waiting), (1, 0, 0, 0));
    }
}

#[test]
fn both_engines_of_a_room_join_it() {
    let mut w = World::new(Sees::Both);
    w.register(&decode(0), &prefill(0));
    w.healthy(ROOM, &decode(0), &prefill(0), 90);
    w.wait(100);
    tell_all(&mut w, Engine::prefill(Release::Hex, ROOM, wall(1)).sent(50, 100));
    tell_all(&mut w, Engine::decode(Release::Hex, ROOM, wall(1)).sent(50, 800));
    let scheduled = w.last(ROOM).scheduled;
    assert_eq!(
        scheduled.iter().map(|r| r.role).collect::<Vec<_>>(),
        [Some(Role::Prefill), Some(Role::Decode)]
    );
    assert!(scheduled[1].stages.iter().any(|s| &*s.name == "decode_transferred"));
    assert!(!scheduled[0].stages.iter().any(|s| s.name.starts_with("decode")));
}

#[test]
fn the_exporter_process_may_send_after_the_request() {
    // SGLANG_TRACE_ASYNC: threads and stages come from a process of their own.
    let mut w = world();
    w.metadata(ROOM, &decode(0), &prefill(0));
    let sent = Engine::prefill(Release::Hex, ROOM, wall(0)).sent(50, 100);
    w.wait(100);
    tell(&mut w, sent.request);
    assert_eq!(w.last(ROOM).scheduled[0].stages.len(), 0);
    w.wait(1000);
    tell(&mut w, sent.front);
    tell(&mut w, sent.rest);
    tell(&mut w, sent.computed);
    assert_eq!(stages(&w, ROOM).len(), 7);
    assert_eq!(w.table.span_counters().joined, 1);
}

#[test]
fn requests_in_one_trace_of_a_client_are_told_apart_by_their_spans() {
    let mut w = world();
    let (a, b) = (ROOM, ROOM + 1);
    w.metadata(a, &decode(0), &prefill(0));
    w.metadata(b, &decode(0), &prefill(0));
    let client = 0x1234_5678_9abc_def0_1122_3344_5566_7788;
    let engine =
        |room, ids| Engine { trace: client, parent: 77, ids, ..Engine::prefill(Release::Hex, room, wall(0)) };
    let (first, second) = (engine(a, 0x1000).sent(50, 100), engine(b, 0x2000).sent(70, 100));
    // The scheduler's thread of the second has not ended: only links lead to its stages.
    for spans in [
        first.front,
        second.front,
        first.computed,
        second.computed,
        first.rest,
        first.request,
        second.request,
    ] {
        tell(&mut w, spans);
    }
    let forward = |w: &World, room| {
        let of = w.last(room).scheduled.remove(0);
        of.stages.iter().find(|s| &*s.name == "prefill_forward").map(|s| s.end.0 - START)
    };
    assert_eq!(forward(&w, a), Some(56_000_000));
    assert_eq!(forward(&w, b), Some(76_000_000));
}

#[test]
fn steps_of_one_name_are_one_stage_however_many() {
    let mut w = world();
    w.metadata(ROOM, &decode(0), &prefill(0));
    let engine = Engine::prefill(Release::Hex, ROOM, wall(0));
    let sent = engine.sent(50, 100);
    let step = sent.computed[3].clone();
    let steps: Vec<Span> = (0..5000u64)
        .map(|n| Span {
            name: "decode_loop".to_owned(),
            span_id: (n + 1_000_000).to_be_bytes().to_vec(),
            ..step.clone()
        })
        .collect();
    for part in steps.chunks(512) {
        tell(&mut w, part.to_vec());
    }
    tell_all(&mut w, sent);
    let snapshot = w.last(ROOM);
    let steps = snapshot.scheduled[0].stages.iter().find(|s| &*s.name == "decode_loop").unwrap();
    assert_eq!(steps.spans, 5000);
    assert_eq!(w.table.span_counters().left_out, 0);
}

#[test]
fn a_number_used_again_gets_the_request_of_its_own_time() {
    let mut w = world();
    w.healthy(ROOM, &decode(0), &prefill(0), 90);
    w.acknowledge(&prefill(0), &decode(0), w.sent_to(&prefill(0), &decode(0)));
    w.wait(2000);
    let earlier = Engine::prefill(Release::Hex, ROOM, wall(0)).sent(50, 100);
    w.to(900_000);
    w.metadata(ROOM, &decode(0), &prefill(0));
    tell_all(&mut w, earlier);
    assert!(w.last(ROOM).scheduled.is_empty(), "that was another life");
    assert_eq!(w.table.span_counters().unmatched, 1);
}

#[test]
fn rooms_that_are_not_here_are_counted() {
    let mut w = world();
    tell_all(&mut w, Engine::prefill(Release::Hex, ROOM, wall(0)).sent(50, 100));
    let alone = Engine { room: 0, ..Engine::prefill(Release::Hex, 7, wall(0)) };
    tell_all(&mut w, alone.sent(50, 100));
    w.wait(20_000);
    let c = w.table.span_counters();
    assert_eq!((c.joined, c.unmatched, c.without_room, c.waiting), (0, 1, 1, 0));
}

/// The case that started it: the client is gone, so the request's span came; prefill has computed, and nothing more.
#[test]
fn computed_and_never_handed_over_is_likely() {
    for (told, confidence) in [(true, Confidence::Likely), (false, Confidence::Possible)] {
        let mut w = world();
        w.metadata(ROOM, &decode(0), &prefill(0));
        let sent = Engine::prefill(Release::Hex, ROOM, wall(0)).sent(2000, 2900);
        w.wait(3000);
        tell(&mut w, sent.front);
        if told {
            tell(&mut w, sent.computed);
        }
        tell(&mut w, sent.request);
        w.to(20_000);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, confidence), "{:?}", v.evidence);
        let said = v.evidence.iter().any(|e| e.contains("span prefill_forward"));
        assert_eq!(said, told, "{:?}", v.evidence);
    }
}

#[test]
fn what_was_handed_over_or_computed_only_now_is_not_raised() {
    // The transfer's span came: then it is not the transfer that hangs.
    let mut w = world();
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(3000);
    tell_all(&mut w, Engine::prefill(Release::Hex, ROOM, wall(0)).sent(2000, 2500));
    w.to(14_000);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Possible);
    // It has computed until just now: the time to hand over begins there.
    let mut w = world();
    w.metadata(ROOM, &decode(0), &prefill(0));
    let sent = Engine::prefill(Release::Hex, ROOM, wall(0)).sent(12_000, 12_900);
    w.wait(13_000);
    tell(&mut w, sent.computed);
    tell(&mut w, sent.request);
    w.to(18_000);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Possible);
    w.to(40_000);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Likely);
}

#[test]
fn a_request_that_prefill_has_failed_or_whose_release_does_not_tell_is_not_raised() {
    use opentelemetry_proto::tonic::trace::v1::Status;
    for (release, fails) in [(Release::Hex, true), (Release::RoomSpan, false)] {
        let mut w = world();
        w.metadata(ROOM, &decode(0), &prefill(0));
        let mut sent = Engine::prefill(release, ROOM, wall(0)).sent(2000, 2500);
        w.wait(3000);
        tell(&mut w, sent.computed);
        if fails {
            // The transfer failed: no span of it, and the thread is done with the request.
            let mut thread = sent.rest.pop().unwrap();
            thread.status = Some(Status { code: 2, message: String::new() });
            tell(&mut w, vec![thread]);
        }
        tell(&mut w, sent.request);
        w.to(14_000);
        let v = w.verdict(ROOM);
        assert_eq!(v.confidence, Confidence::Possible, "{release:?} {:?}", v.evidence);
        assert!(!v.evidence.iter().any(|e| e.contains("prefill_forward")));
    }
}

#[test]
fn traces_that_never_end_are_bounded_and_counted() {
    let mut w = world();
    let traces = MAX_NODES as u64 / 2;
    for n in 1..=traces {
        let engine =
            Engine { trace: u128::from(n), ids: n << 8, ..Engine::prefill(Release::Hex, ROOM, wall(0)) };
        let mut spans = engine.sent(50, 100).computed;
        spans.truncate(2);
        let spans: Vec<_> = read(&bytes_of(spans)).unwrap().spans;
        let at = w.mono();
        w.input(&Input::Spans { at, offset: 0, spans: &spans });
    }
    w.wait(1000);
    let c = w.table.span_counters();
    // Three places each: the trace and its two stages.
    assert_eq!((c.waiting, c.evicted), (MAX_NODES as u64 / 3, traces - MAX_NODES as u64 / 3));
    w.wait(3_800_000);
    assert_eq!(w.table.span_counters().waiting, 0);
    assert_eq!(w.table.span_counters().expired, MAX_NODES as u64 / 3);
}

#[test]
fn a_room_that_ends_well_after_its_spans_is_told_too() {
    let mut w = world();
    w.metadata(ROOM, &decode(0), &prefill(0));
    tell_all(&mut w, Engine::prefill(Release::Hex, ROOM, wall(0)).sent(50, 100));
    w.wait(100);
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.acknowledge(&prefill(0), &decode(0), w.sent_to(&prefill(0), &decode(0)));
    w.wait(10_000);
    assert_eq!(w.names(ROOM), ["room_closed", "room_scheduled"]);
}

/// Engines run on the agent's host: a span cannot end after it came, nor begin before the machine.
#[test]
fn spans_of_another_time_are_joined_and_prove_nothing() {
    let year = 365 * 86_400 * SECOND;
    for at in [wall(0) + 100 * year, wall(5_000), 7 * SECOND] {
        let mut w = world();
        w.metadata(ROOM, &decode(0), &prefill(0));
        let sent = Engine::prefill(Release::Hex, ROOM, at).sent(2000, 2900);
        w.wait(3000);
        tell(&mut w, sent.front);
        tell(&mut w, sent.computed);
        tell(&mut w, sent.request);
        let request = w.last(ROOM).scheduled.pop().unwrap();
        assert_eq!((&*request.rid, request.untimed), ("4f1d7a0c9b3e4d55", true));
        assert!(request.stages.is_empty(), "{:?}", request.stages);
        assert_eq!((request.begin, request.end), (w.mono(), w.mono()), "when they came");
        for name in ["prefill_forward", "request", "thread", "tokenize"] {
            assert!(request.doubted.iter().any(|d| &**d == name), "{name} {:?}", request.doubted);
        }
        assert_eq!(w.table.span_counters().impossible, 8);
        w.to(20_000);
        let v = w.verdict(ROOM);
        assert_eq!(v.confidence, Confidence::Possible, "{:?}", v.evidence);
        assert!(!v.evidence.iter().any(|e| e.contains("(span ")), "{:?}", v.evidence);
    }
}

/// A transfer span of an impossible time is a transfer span all the same: that there is none must not be said.
#[test]
fn one_impossible_span_makes_the_others_of_its_request_no_evidence() {
    let mut w = world();
    w.metadata(ROOM, &decode(0), &prefill(0));
    let mut sent = Engine::prefill(Release::Hex, ROOM, wall(0)).sent(2000, 2900);
    w.wait(3000);
    for span in &mut sent.rest {
        if span.name == "prefill_transfer_kv_cache" {
            span.end_time_unix_nano += 3_600 * SECOND;
        }
    }
    // Its thread has not let it go.
    sent.rest.retain(|s| s.name == "prefill_transfer_kv_cache");
    for spans in [sent.front, sent.computed, sent.rest, sent.request] {
        tell(&mut w, spans);
    }
    let request = w.last(ROOM).scheduled.pop().unwrap();
    assert_eq!(request.doubted, vec![Box::<str>::from("prefill_transfer_kv_cache")]);
    assert!(!request.untimed);
    assert_eq!(stages(&w, ROOM).last().unwrap(), "prefill_forward");
    w.to(20_000);
    let v = w.verdict(ROOM);
    assert_eq!(v.confidence, Confidence::Possible, "{:?}", v.evidence);
    assert!(!v.evidence.iter().any(|e| e.contains("(span ")), "{:?}", v.evidence);
}

#[test]
fn nothing_of_a_request_begins_long_before_it() {
    // Seen at the HTTP port.
    let mut w = web::Web::new(Sees::Both);
    w.to(60_000);
    w.request(Role::Prefill, ROOM);
    w.wait(10);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(3000);
    let mut sent = Engine::prefill(Release::Hex, ROOM, wall(60_000)).sent(2000, 2900);
    for span in &mut sent.computed {
        if span.name == "prefill_forward" {
            span.start_time_unix_nano -= 30 * SECOND;
        }
    }
    tell(&mut w, sent.computed);
    tell(&mut w, sent.request);
    let request = w.last(ROOM).scheduled.pop().unwrap();
    assert_eq!((request.doubted, request.untimed), (vec!["prefill_forward".into()], false));
    // Not seen there: decode may have let it wait, but not for hours.
    for (waited, believed) in [(3000, true), (3700, false)] {
        let mut w = world();
        w.to(5_000_000);
        w.metadata(ROOM, &decode(0), &prefill(0));
        w.wait(3000);
        let begun = wall(5_000_000) - waited * SECOND;
        tell_all(&mut w, Engine::prefill(Release::Hex, ROOM, begun).sent(2000, waited * 1000 + 2000));
        let request = w.last(ROOM).scheduled.pop().unwrap();
        assert_eq!(request.untimed, !believed);
        assert_eq!(request.doubted.is_empty(), believed, "{:?}", request.doubted);
    }
}
