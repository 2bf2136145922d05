//! Recordings: what is written while a capture is played says, when it is played itself, the same of every room; a ring that
//! has lost its beginning, lines that are missing and any bytes give nothing wrong.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::naive_bytecount,
    reason = "tests"
)]

use std::io::{BufReader, Cursor};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use proptest::prelude::*;
use roomtrace::control::Limits;
use roomtrace::event::{Mono, SECOND};
use roomtrace::export::recording::{Recording, before, head};
use roomtrace::gpu::model::{Reading, What};
use roomtrace::gpu::windows::{Link as GpuLink, Source, Stretch};
use roomtrace::pipeline::Pipeline;
use roomtrace::replay::Replay;
use roomtrace::replay::recorded::{Read, Reader, Recorder, RecordingError};
use roomtrace::rooms;
use roomtrace::rooms::model::{BatchNews, Event, Input};

const TICK: u64 = SECOND / 10;

fn captures() -> Vec<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/captures");
    let mut all: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "pcap"))
        .collect();
    all.sort();
    all
}

/// A pipeline whose time is moved on as the commands do.
struct Player {
    pipeline: Pipeline,
    now: Option<Mono>,
    told: Vec<String>,
}

impl Player {
    fn new() -> Self {
        let pipeline = Pipeline::new(Limits::default(), rooms::Config::default());
        Self { pipeline, now: None, told: Vec::new() }
    }

    fn advance(&mut self, to: Mono) {
        let mut now = self.now.unwrap_or(to);
        while to.since(now) >= TICK {
            now = now.plus(TICK);
            self.pipeline.tick(now);
            self.listen();
        }
        self.now = Some(now);
    }

    fn listen(&mut self) {
        self.told.extend(self.pipeline.events().map(|event| short(&event)));
    }

    fn end(mut self) -> Vec<String> {
        let end = self.now.unwrap().plus(30 * SECOND);
        self.advance(end);
        self.told
    }
}

/// What an event says, but for the moment of the tick that noticed it.
fn short(event: &Event) -> String {
    let s = event.snapshot();
    let verdict = s.verdict.as_ref().map(|v| {
        let owed = v.owed_by.as_ref().map(|p| (p.role, p.rank, p.endpoint));
        (v.class.label(), v.confidence.label(), owed, v.group, v.evidence.len(), v.actions.len())
    });
    let place = (s.room, s.incarnation, s.completeness.label(), s.outcome, s.messages.len());
    format!("{} {place:?} {verdict:?}", event.name())
}

/// Plays a capture; what was told, and the lines that were taken down.
fn play(capture: &Path) -> (Vec<String>, Vec<u8>) {
    let mut player = Player::new();
    player.pipeline.record(Recorder::new(64 << 20));
    let mut replay = Replay::open(capture).unwrap();
    replay
        .run(&mut |event| {
            player.advance(event.at);
            player.pipeline.handle(&event);
            player.listen();
        })
        .unwrap();
    let recorder = player.pipeline.recorder().unwrap();
    assert_eq!(recorder.dropped(), 0);
    let lines = recorder.fetch(Vec::new());
    (player.end(), lines)
}

fn part(run: u64, part: u64, lines: &[u8]) -> Vec<u8> {
    let mut head = head("host", 0, run);
    head.part = part;
    let mut file = serde_json::to_vec(&head).unwrap();
    file.push(b'\n');
    file.extend_from_slice(lines);
    file
}

fn read(current: Vec<u8>, before: Option<Vec<u8>>) -> Result<(Vec<String>, Read), RecordingError> {
    let mut player = Player::new();
    let mut last = Mono(0);
    let reader = Reader::new(Cursor::new(current), before.map(Cursor::new))?;
    let read = reader.run(&mut |at, input| {
        last = last.max(at);
        player.advance(at);
        player.pipeline.tell(input);
        player.listen();
    })?;
    player.now = player.now.or(Some(Mono(0)));
    Ok((player.end(), read))
}

#[test]
fn a_recording_says_the_same_as_what_it_was_made_of() {
    for capture in captures() {
        let (told, lines) = play(&capture);
        let (again, read) = read(part(1, 0, &lines), None).unwrap();
        assert_eq!((read.unknown, read.dropped, read.cut), (0, 0, false), "{}", capture.display());
        assert!(read.lines > 0 && !told.is_empty());
        assert_eq!(again, told, "{}", capture.display());
    }
}

#[test]
fn room_numbers_are_texts_and_nothing_of_a_payload_is_kept() {
    let (_, lines) = play(&captures()[0]);
    let text = String::from_utf8(lines).unwrap();
    assert!(text.contains("\"room\":\""));
    for line in text.lines() {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(line.len() < 1200, "{line}");
        assert!(value.is_object());
    }
}

#[test]
fn two_parts_are_one_recording_and_parts_of_two_runs_are_not() {
    let capture = &captures()[0];
    let (told, lines) = play(capture);
    let middle = lines.iter().enumerate().filter(|(_, b)| **b == b'\n').nth(20).unwrap().0 + 1;
    let (first, second) = lines.split_at(middle);
    let (again, _) = read(part(1, 4, second), Some(part(1, 3, first))).unwrap();
    // Something had come before part 3: its connections are older than what is known of them.
    assert!(!again.is_empty());
    let (again, _) = read(part(1, 1, second), Some(part(1, 0, first))).unwrap();
    assert_eq!(again, told);
    let (_, read) = read(part(2, 1, second), Some(part(1, 0, first))).unwrap();
    assert_eq!(read.lines, second.iter().filter(|b| **b == b'\n').count() as u64);
}

#[test]
fn a_ring_that_has_lost_its_beginning_pins_nothing_that_the_whole_does_not() {
    for capture in captures() {
        let (told, lines) = play(&capture);
        let pinned = |told: &[String]| -> Vec<String> {
            let numbers = told.iter().filter(|t| t.starts_with("room_pinned"));
            numbers.map(|t| t.split(['(', ',']).nth(1).unwrap().to_owned()).collect()
        };
        let whole = pinned(&told);
        let ends: Vec<usize> =
            lines.iter().enumerate().filter(|(_, b)| **b == b'\n').map(|(i, _)| i + 1).collect();
        for cut in ends.iter().step_by(1 + ends.len() / 12) {
            let (again, _) = read(part(1, 1, &lines[*cut..]), None).unwrap();
            for room in pinned(&again) {
                assert!(whole.contains(&room), "{}: room {room} behind byte {cut}", capture.display());
            }
            // As if they had found no place while it was written.
            let missing = cut + (lines.len() - cut) / 3;
            let behind = ends.iter().copied().find(|e| *e >= missing).unwrap();
            let mut gap = lines[..*cut].to_vec();
            gap.extend_from_slice(b"{\"dropped\":{\"lines\":3}}\n");
            gap.extend_from_slice(&lines[behind..]);
            let (again, read) = read(part(1, 0, &gap), None).unwrap();
            assert_eq!(read.dropped, 3);
            for room in pinned(&again) {
                assert!(whole.contains(&room), "{}: room {room} behind a gap at {cut}", capture.display());
            }
        }
    }
}

#[test]
fn the_files_are_a_ring() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("record");
    let (told, lines) = play(&captures()[0]);
    let mut recorder = Recorder::new(1 << 20);
    let mut recording = Recording::start(&path, 1 << 20, head("host", 0, 7)).unwrap();
    let counters = std::sync::Arc::clone(recording.counters());
    let count = |of: &AtomicU64| of.load(Ordering::Relaxed);
    let reader = Reader::new(Cursor::new(part(1, 0, &lines)), None).unwrap();
    reader
        .run(&mut |_, input| {
            recorder.record(input);
            let (new, before) = (!recorder.is_empty(), count(&counters.bytes));
            recording.pass_on(&mut recorder);
            // Not faster than the disk takes them: what finds no place is dropped.
            while new && count(&counters.bytes) == before && count(&counters.dropped) == 0 {
                std::thread::sleep(Duration::from_micros(200));
            }
        })
        .unwrap();
    drop(recording);
    assert_eq!(count(&counters.dropped), 0);
    let (again, _) = read(std::fs::read(&path).unwrap(), None).unwrap();
    assert_eq!(again, told);
    assert!(!before(&path).exists());
    // A second run leaves the first as the part before, and the two are not taken for one.
    drop(Recording::start(&path, 1 << 20, head("host", 0, 8)).unwrap());
    assert!(before(&path).exists());
    let open = |p: &Path| BufReader::new(std::fs::File::open(p).unwrap());
    let read = Reader::new(open(&path), Some(open(&before(&path)))).unwrap().run(&mut |_, _| ()).unwrap();
    assert_eq!(read.lines, 0);
}

#[test]
fn the_ring_stays_within_its_bounds() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("record");
    let (_, lines) = play(&captures()[0]);
    let mut recording = Recording::start(&path, 100_000, head("host", 0, 7)).unwrap();
    let mut recorder = Recorder::new(1 << 20);
    for _ in 0..40 {
        let reader = Reader::new(Cursor::new(part(1, 0, &lines)), None).unwrap();
        reader.run(&mut |_, input| recorder.record(input)).unwrap();
        recording.pass_on(&mut recorder);
        std::thread::sleep(Duration::from_millis(2));
    }
    drop(recording);
    let size = |p: &Path| std::fs::metadata(p).unwrap().len();
    let chunk = lines.len() as u64 + 1000;
    assert!(size(&path) <= 50_000 + chunk, "{}", size(&path));
    assert!(size(&before(&path)) <= 50_000 + chunk);
}

#[test]
fn what_gpus_show_is_in_it() {
    let stretch = Stretch {
        link: GpuLink::Pcie,
        source: Source::Counters,
        from: Mono(1),
        to: Mono(2),
        out: u64::MAX,
        into: 0,
    };
    let all = [
        What::Named("GPU-a".into()),
        What::Moved(stretch),
        What::Computed(Mono(1), 100),
        What::Processes(vec![1, 2]),
        What::Xid(79),
        What::Trouble(0x4000),
        What::Lost,
        What::Back,
        What::Recovery(1),
        What::Clocks(72),
    ];
    let all = all.map(|what| Reading { at: Mono(3), index: 7, what });
    let mut recorder = Recorder::new(1 << 20);
    for reading in &all {
        recorder.record(&Input::Gpu(reading));
    }
    let file = part(1, 0, &recorder.fetch(Vec::new()));
    let mut got = Vec::new();
    let read = Reader::new(Cursor::new(file), None).unwrap().run(&mut |at, input| {
        let Input::Gpu(reading) = input else { panic!("{input:?}") };
        assert_eq!(at, reading.at);
        got.push((*reading).clone());
    });
    assert_eq!((read.unwrap().lines, got.as_slice()), (10, all.as_slice()));
}

#[test]
fn batches_are_played_as_they_were() {
    let all = [
        (Some(u64::MAX), BatchNews::Asked { pages: 8, whole: true }),
        (Some(u64::MAX), BatchNews::Submitted { bytes: 1 << 40, requests: 3 }),
        (Some(1), BatchNews::Over),
        (Some(1), BatchNews::Ambiguous),
        (None, BatchNews::Unclear),
    ];
    let mut recorder = Recorder::new(1 << 20);
    for (room, news) in all {
        recorder.record(&Input::Batch { at: Mono(3), pid: 4711, room, news });
    }
    let file = part(1, 0, &recorder.fetch(Vec::new()));
    let mut got = Vec::new();
    let read = Reader::new(Cursor::new(file), None).unwrap().run(&mut |_, input| {
        let Input::Batch { at: Mono(3), pid: 4711, room, news } = *input else { panic!("{input:?}") };
        got.push((room, news));
    });
    assert_eq!((read.unwrap().lines, got.as_slice()), (5, all.as_slice()));
}

#[test]
fn what_cannot_be_taken_down_is_counted() {
    let (_, lines) = play(&captures()[0]);
    let mut recorder = Recorder::new(2000);
    let reader = Reader::new(Cursor::new(part(1, 0, &lines)), None).unwrap();
    let read = reader.run(&mut |_, input| recorder.record(input)).unwrap();
    let kept = recorder.fetch(Vec::new());
    assert!(kept.len() < 4000);
    let kept = kept.iter().filter(|b| **b == b'\n').count() as u64;
    assert_eq!(kept + recorder.dropped(), read.lines);
}

#[test]
fn what_is_no_recording_is_refused_and_what_is_newer_named() {
    assert!(matches!(read(b"{}\n".to_vec(), None), Err(RecordingError::Head(_))));
    let newer = String::from_utf8(part(1, 0, b"")).unwrap().replace("recording\":1", "recording\":2");
    assert!(matches!(read(newer.into_bytes(), None), Err(RecordingError::Version(2))));
    let (_, lines) = play(&captures()[0]);
    let cut = part(1, 0, &lines[..lines.len() - 5]);
    let (_, read_of_cut) = read(cut, None).unwrap();
    assert!(read_of_cut.cut);
    let (_, strange) = read(part(1, 0, b"{\"from_the_future\":{}}\nnothing\n"), None).unwrap();
    assert_eq!((strange.lines, strange.unknown), (0, 2));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_bytes_in_it_do_no_harm(at in any::<prop::sample::Index>(), with in proptest::collection::vec(any::<u8>(), 1..40)) {
        let (_, mut lines) = play(&captures()[1]);
        let at = at.index(lines.len());
        let end = (at + with.len()).min(lines.len());
        lines.splice(at..end, with);
        read(part(1, 0, &lines), None).unwrap();
    }
}
