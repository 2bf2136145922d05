//! A pair of real SGLang 0.5.23 servers with its router, captured on loopback, against what its clients know.
//!
//! The capture (`fixtures/servers`) has requests through the router and straight to both servers: streamed, hung up at random
//! moments, refused as too long, with a megabyte of prompt, with decode's KV memory full, and to one server alone.
//! A capture knows no processes: roles come from what passes at the bootstrap server.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Cursor, Read as _};
use std::path::Path;

use roomtrace::control::Limits;
use roomtrace::event::{Mono, SECOND};
use roomtrace::pipeline::Pipeline;
use roomtrace::replay::Replay;
use roomtrace::rooms;
use roomtrace::rooms::model::{LegEnd, LegView, Outcome, RoomSnapshot};
use roomtrace::verdict::model::Confidence;
use serde_json::Value;

fn fixture(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/servers").join(name);
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(std::fs::File::open(path).unwrap()).read_to_end(&mut bytes).unwrap();
    bytes
}

/// What the clients know of one room.
#[derive(Debug, Default)]
struct Known {
    scenario: String,
    rid: String,
    /// How the request at prefill and the one at decode ended for their client: a status, or that it hung up (0).
    ends: BTreeMap<String, u16>,
    asked: BTreeSet<String>,
}

/// By room; and the rids of requests through the router, which draws the room.
fn truth() -> (BTreeMap<u64, Known>, BTreeSet<String>) {
    let text = String::from_utf8(fixture("servers.truth.jsonl.gz")).unwrap();
    let (mut rooms, mut routed): (BTreeMap<u64, Known>, _) = (BTreeMap::new(), BTreeSet::new());
    for line in text.lines() {
        let t: Value = serde_json::from_str(line).unwrap();
        let side = t["side"].as_str().unwrap_or_default().to_owned();
        if side == "router" {
            routed.insert(t["rid"].as_str().unwrap().to_owned());
            continue;
        }
        let number = t["room"].as_u64().or_else(|| t["room"].as_str().map(|r| r.parse().unwrap()));
        let Some(number) = number.filter(|_| t["scenario"] != "router") else { continue };
        let room = rooms.entry(number).or_default();
        match t["kind"].as_str().unwrap() {
            "request" => {
                t["rid"].as_str().unwrap().clone_into(&mut room.rid);
                room.asked.insert(side);
            }
            "response" => {
                room.ends.insert(side, t["status"].as_u64().map_or(0, |s| u16::try_from(s).unwrap()));
            }
            _ => t["scenario"].as_str().unwrap().clone_into(&mut room.scenario),
        }
    }
    (rooms, routed)
}

/// What was said on the way, and every life of every room as it stands 30 s after the end.
struct Seen {
    lives: BTreeMap<u64, Vec<RoomSnapshot>>,
    /// The highest confidence that a pin of a room ever had.
    pins: BTreeMap<u64, Confidence>,
    /// Findings above `possible`.
    findings: usize,
}

fn replay() -> Seen {
    let mut pipeline = Pipeline::new(Limits::default(), rooms::Config::default());
    let mut seen = Seen { lives: BTreeMap::new(), pins: BTreeMap::new(), findings: 0 };
    let mut told: BTreeSet<u64> = BTreeSet::new();
    let mut now: Option<Mono> = None;
    let mut hear = |pipeline: &mut Pipeline, seen: &mut Seen| {
        for event in pipeline.events() {
            let room = event.snapshot();
            told.insert(room.room);
            if let Some(v) = room.verdict.as_ref().filter(|v| v.class.pins()) {
                let highest = seen.pins.entry(room.room).or_insert(v.confidence);
                *highest = v.confidence.max(*highest);
            }
        }
        seen.findings +=
            pipeline.finding_events().filter(|e| e.finding().confidence > Confidence::Possible).count();
    };
    let mut step = |pipeline: &mut Pipeline, seen: &mut Seen, to: Mono| {
        let mut at = now.unwrap_or(to);
        while to.since(at) >= SECOND / 10 {
            at = at.plus(SECOND / 10);
            pipeline.tick(at);
            hear(pipeline, seen);
        }
        now = Some(at);
    };
    let mut capture = Replay::from_reader(Cursor::new(fixture("servers.pcap.gz"))).unwrap();
    let summary = capture
        .run(&mut |event| {
            step(&mut pipeline, &mut seen, event.at);
            pipeline.handle(&event);
        })
        .unwrap();
    step(&mut pipeline, &mut seen, summary.last.unwrap().plus(30 * SECOND));
    // Of a room that is open and not overdue nothing has been said yet.
    told.extend(truth().0.into_keys());
    for room in told {
        seen.lives.insert(room, pipeline.rooms().snapshot(room));
    }
    seen
}

/// How a request ended, as its client would say it.
fn end(leg: &LegView) -> Option<u16> {
    match leg.ended?.1 {
        LegEnd::ClientHungUp => Some(0),
        _ => leg.status,
    }
}

#[test]
fn every_request_is_followed_from_begin_to_end_at_both_servers() {
    let (rooms, routed) = truth();
    let seen = replay();
    assert_eq!((rooms.len(), routed.len()), (52, 12));
    for (number, known) in &rooms {
        let lives = &seen.lives[number];
        // A busy decode rank sends its ABORT seconds after the hang-up, when the room is over: that opens it again.
        let again = ["c", "u"].contains(&known.scenario.as_str());
        assert!(lives.len() == 1 || again, "{number}: {known:?}: {} lives", lives.len());
        let life = lives.last().unwrap();
        let request = life.request.as_ref().unwrap_or_else(|| panic!("{number}: {known:?}"));
        assert_eq!(request.rid.as_deref(), Some(known.rid.as_str()), "{known:?}");
        for (side, leg) in [("prefill", &request.prefill), ("decode", &request.decode)] {
            let what = format!("{number} at {side}: {known:?}, {leg:?}");
            assert_eq!(leg.is_some(), known.asked.contains(side), "{what}");
            let Some(leg) = leg else { continue };
            // Of requests that were called off at the very end the clients kept no record.
            let told = known.ends.get(side).copied().unwrap_or(0);
            // A client that gives up in the moment of the answer has seen none.
            assert!(end(leg) == Some(told) || (told == 0 && end(leg) == Some(200)), "{what}");
            assert!(!leg.out_of_sight, "{what}");
        }
        assert!(request.unplaced.is_none() && request.unplaced_too.is_none(), "{number}");
        // Of `u` prefill may get its request yet, as far as anyone can see: open, never above `possible`.
        assert!(life.closed_at.is_some() || known.scenario == "u", "{number}: {known:?} is open");
    }
    let through_router: BTreeSet<_> = seen
        .lives
        .iter()
        .filter(|(number, _)| !rooms.contains_key(number))
        .map(|(number, lives)| {
            let [life] = &lives[..] else { panic!("{number}: more than one life") };
            let request = life.request.as_ref().unwrap();
            let legs: Vec<_> =
                [request.prefill, request.decode].into_iter().flatten().map(|l| end(&l)).collect();
            assert_eq!(legs, [Some(200), Some(200)], "{number}");
            // Also of the first, which began before anything told which engine is which.
            assert!(request.unplaced.is_none() && request.unplaced_too.is_none(), "{number}");
            assert_eq!(life.outcome, Some(Outcome::Success));
            request.rid.as_deref().unwrap().to_owned()
        })
        .collect();
    assert_eq!(through_router, routed);
}

#[test]
fn nothing_of_it_is_a_page() {
    let (rooms, _) = truth();
    let seen = replay();
    let paged: Vec<_> = seen.pins.iter().filter(|(_, c)| **c > Confidence::Possible).collect();
    assert!(paged.is_empty(), "{paged:?}");
    for number in seen.pins.keys() {
        let scenario = rooms[number].scenario.as_str();
        assert!(!["hangup", "normal", "stream", "toolong", "megabyte"].contains(&scenario), "{scenario}");
    }
    assert_eq!(seen.findings, 0);
}
