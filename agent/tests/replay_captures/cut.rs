//! Captures cut at a snap length: what is missing may cost a room its verdict, never give it one that the whole has not.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Cursor;

use roomtrace::control::Limits;
use roomtrace::event::{Mono, SECOND};
use roomtrace::pipeline::Pipeline;
use roomtrace::replay::Replay;
use roomtrace::rooms;

use super::fixtures::{NAMES, capture};

const TICK: u64 = SECOND / 10;

/// Bytes of a packet that are kept: less than its headers (66 with TCP's time stamps) to more than most messages.
const SNAP: [usize; 12] = [66, 68, 80, 96, 112, 128, 160, 200, 256, 320, 400, 600];

/// The same capture as `tcpdump -s snap` had written it.
fn cut(file: &[u8], snap: usize) -> Vec<u8> {
    let mut out = file[..24].to_vec();
    let mut at = 24;
    while at < file.len() {
        let len = u32::from_le_bytes(file[at + 8..at + 12].try_into().unwrap()) as usize;
        let kept = len.min(snap);
        out.extend_from_slice(&file[at..at + 8]);
        out.extend(u32::try_from(kept).unwrap().to_le_bytes());
        out.extend_from_slice(&file[at + 12..at + 16 + kept]);
        at += 16 + len;
    }
    out
}

/// The classes that each room was ever given, but for `unknown`.
fn classes(file: Vec<u8>) -> BTreeMap<u64, BTreeSet<&'static str>> {
    let mut pipeline = Pipeline::new(Limits::default(), rooms::Config::default());
    let mut found: BTreeMap<u64, BTreeSet<&'static str>> = BTreeMap::new();
    let mut now: Option<Mono> = None;
    let mut on = |pipeline: &mut Pipeline, now: &mut Option<Mono>, to: Mono| {
        let mut at = now.unwrap_or(to);
        while to.since(at) >= TICK {
            at = at.plus(TICK);
            pipeline.tick(at);
            for event in pipeline.events() {
                let s = event.snapshot();
                if let Some(v) = s.verdict.as_ref().filter(|v| v.class.label() != "unknown") {
                    found.entry(s.room).or_default().insert(v.class.label());
                }
            }
        }
        *now = Some(at);
    };
    Replay::from_reader(Cursor::new(file))
        .unwrap()
        .run(&mut |event| {
            on(&mut pipeline, &mut now, event.at);
            pipeline.handle(&event);
        })
        .unwrap();
    let end = now.unwrap().plus(30 * SECOND);
    on(&mut pipeline, &mut now, end);
    found
}

#[test]
fn a_cut_capture_gives_no_room_a_class_that_the_whole_does_not() {
    let mut wrong = Vec::new();
    for name in NAMES {
        let file = capture(name);
        let whole = classes(file.clone());
        for snap in SNAP {
            for (room, found) in classes(cut(&file, snap)) {
                let allowed = whole.get(&room).cloned().unwrap_or_default();
                let other: Vec<_> = found.difference(&allowed).collect();
                if !other.is_empty() {
                    wrong.push(format!("{name} at {snap}: room {room} {other:?}, whole {allowed:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
