//! What the GPUs of a room's engines do to its record and its verdict.

use roomtrace::event::{Mono, SECOND};
use roomtrace::gpu::model::{Ailment, Reading, What};
use roomtrace::gpu::windows::{Link, Source, Stretch};
use roomtrace::http::event::Control;
use roomtrace::rooms::model::{GpuWindow, Input, Role};
use roomtrace::rooms::{RoomTable, SavedRooms, Survivors};
use roomtrace::sglang::message::KvPoll;
use roomtrace::verdict::model::{Class, Confidence, Verdict};

use super::ROOM;
use super::rooms_support::{START, Sees, decode, prefill};
use super::web::{Web, pid};

const GPU: &str = "GPU-0a";

/// What GPUs show in a stretch of time.
#[derive(Clone, Copy, Default)]
struct Shows {
    /// Bytes a second that leave it.
    out: u64,
    /// `None`: not told, as of one that is split.
    busy: Option<u8>,
}

const QUIET: Shows = Shows { out: 1000, busy: Some(0) };

fn tell(w: &mut Web, index: u32, what: What) {
    let at = w.mono();
    w.input(&Input::Gpu(&Reading { at, index, what }));
}

/// Prefill's GPU, held by rank 100.
fn gpu(w: &mut Web, index: u32, name: &str, pids: &[u32]) {
    tell(w, index, What::Named(name.into()));
    tell(w, index, What::Processes(pids.to_vec()));
}

fn moved(from: Mono, to: Mono, out: u64) -> What {
    What::Moved(Stretch { link: Link::Pcie, source: Source::Gpm, from, to, out, into: 0 })
}

/// Time passes and is read, to `ms` after the start.
fn read_all(w: &mut Web, gpus: &[(u32, Shows)], ms: u64) {
    let mut second = 0;
    while w.mono().0 < START + ms * 1_000_000 {
        let from = w.mono();
        w.wait(100);
        let to = w.mono();
        for (index, shows) in gpus {
            tell(w, *index, moved(from, to, shows.out * to.since(from) / SECOND));
            if let Some(percent) = shows.busy {
                tell(w, *index, What::Computed(from, percent));
            }
        }
        second += 1;
        if second % 50 == 0 {
            // Holders are told again.
            for (index, _) in gpus {
                let held: Vec<u32> =
                    w.table.gpus().iter().find(|(i, _)| i == index).unwrap().1.holders().collect();
                tell(w, *index, What::Processes(held));
            }
        }
    }
}

fn read(w: &mut Web, shows: Shows, ms: u64) {
    read_all(w, &[(0, shows)], ms);
}

fn world() -> Web {
    let mut w = Web::new(Sees::Prefill);
    gpu(&mut w, 0, GPU, &[prefill(0).pid]);
    w
}

/// A room that waits for prefill, its request open.
fn waits(w: &mut Web) {
    w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
}

fn stands(w: &Web) -> (Class, Confidence) {
    let v = w.verdict(ROOM);
    (v.class, v.confidence)
}

fn says(v: &Verdict, what: &str) -> bool {
    v.evidence.iter().any(|e| e.contains(what))
}

fn only(w: &Web) -> GpuWindow {
    let mut all = w.last(ROOM).gpus;
    assert_eq!(all.len(), 1, "{all:?}");
    all.remove(0)
}

const POSSIBLE: (Class, Confidence) = (Class::TransferNotConcluded, Confidence::Possible);
const LIKELY: (Class, Confidence) = (Class::TransferNotConcluded, Confidence::Likely);

#[test]
fn a_transfer_that_stalls_beside_a_gpu_that_does_nothing_is_likely_after_the_ceiling() {
    let mut w = world();
    waits(&mut w);
    read(&mut w, QUIET, 59_000);
    assert_eq!(stands(&w), POSSIBLE, "a grammar or pages from storage may take as long");
    read(&mut w, QUIET, 63_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), LIKELY, "{:?}", v.evidence);
    assert!(says(&v, "the GPU of prefill's engine ran no kernel and moved nothing but idle noise"), "{v:?}");
    assert!(says(&v, GPU) && says(&v, "no other room was handed over by that engine then"), "{v:?}");
    let window = only(&w);
    assert_eq!((&*window.gpu, window.pid, window.role), (GPU, prefill(0).pid, Role::Prefill));
    assert_eq!((window.from, window.to), (Mono(START + 200_000), w.mono()));
    let link = window.links[0];
    assert_eq!((link.coverage, link.into, link.source), (1000, 0, Source::Gpm), "{link:?}");
    assert!(link.out < 64_000 && window.overlapping == Some(1), "{window:?}");
    // It begins to compute: what it did before says nothing of now.
    read(&mut w, Shows { busy: Some(3), ..QUIET }, 66_000);
    assert_eq!(stands(&w), POSSIBLE);
}

#[test]
fn gpus_are_read_often_where_rooms_are_in_transfer_and_not_beside_them() {
    let mut w = world();
    // Another engine's, and one of which it is not known whose it is.
    gpu(&mut w, 1, "GPU-0b", &[999_999]);
    gpu(&mut w, 2, "GPU-0c", &[]);
    let raised = |w: &Web| w.table.gpus_in_transfer().map(Iterator::collect::<Vec<u32>>);
    assert_eq!(raised(&w), None, "no engine is known to hand over");
    waits(&mut w);
    w.wait(100);
    assert_eq!(raised(&w), Some(vec![0, 2]));
    w.status(ROOM, &prefill(0), &decode(0), KvPoll::Success);
    w.wait(100);
    assert_eq!(raised(&w), None);
}

#[test]
fn where_the_engine_says_that_nothing_waits_the_floor_is_enough() {
    let mut w = world();
    w.metadata(ROOM, &decode(0), &prefill(0));
    let gauges = |w: &mut Web, waiting| {
        let g = roomtrace::rooms::model::EngineGauges {
            server: pid(Role::Prefill),
            waiting: Some(waiting),
            ..Default::default()
        };
        let at = w.mono();
        w.input(&Input::Gauges { at, gauges: &g });
    };
    read(&mut w, QUIET, 9000);
    gauges(&mut w, 0);
    read(&mut w, QUIET, 14_000);
    assert_eq!(stands(&w), POSSIBLE, "its server may not have handed it on by then");
    gauges(&mut w, 0);
    read(&mut w, QUIET, 16_000);
    assert_eq!(stands(&w), LIKELY);
    gauges(&mut w, 2);
    read(&mut w, QUIET, 18_000);
    assert_eq!(stands(&w), POSSIBLE, "two wait, whatever for");
    gauges(&mut w, 0);
    read(&mut w, QUIET, 20_000);
    assert_eq!(stands(&w), LIKELY);
}

/// Before 0.5.19 a count can be old: too old to clear a room, and enough to hold a page back.
#[test]
fn a_queue_that_can_be_old_withholds_what_a_silent_gpu_would_raise() {
    let run = |waiting: &dyn Fn(u64) -> u64| {
        let mut w = world();
        waits(&mut w);
        for n in 0..20 {
            old_gauges(&mut w, waiting(n));
            read(&mut w, QUIET, 4000 * (n + 1));
        }
        w
    };
    let w = run(&|_| 3);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), POSSIBLE, "{:?}", v.evidence);
    assert!(says(&v, "prefill says that 3 requests wait in it"), "{:?}", v.evidence);
    // A zero can be older than what was said shortly before.
    assert_eq!(stands(&run(&|n| (n + 1) % 2)), POSSIBLE);
    assert_eq!(stands(&run(&|n| u64::from(n < 12))), LIKELY, "it has not said so for long");
    assert_eq!(stands(&run(&|_| 0)), LIKELY);
}

/// What an engine of before 0.5.19 answers while it hands over one request.
fn old_gauges(w: &mut Web, waiting: u64) {
    let g = roomtrace::rooms::model::EngineGauges {
        server: pid(Role::Prefill),
        inflight: Some(1),
        waiting: Some(waiting),
        running: Some(0),
        stale: true,
        ..Default::default()
    };
    let at = w.mono();
    w.input(&Input::Gauges { at, gauges: &g });
}

// What moves, and whose it can be.

/// 20 MB/s: a few thousand tokens of a large model over a link of 1 Gbit/s take a minute.
const SLOW: Shows = Shows { out: 20_000_000, busy: Some(0) };

/// So many seconds, each with the same answer of the engine: something in flight, nothing waits, the counters stand still.
fn stands_still(w: &mut Web, shows: Shows, seconds: u64, inflight: u64) {
    for _ in 0..seconds {
        w.gauges(Role::Prefill, inflight, 0, 7);
        let now = (w.mono().0 - START) / 1_000_000;
        read(w, shows, now + 1000);
    }
}

#[test]
fn a_slow_transfer_is_not_likely_before_it_stops() {
    let mut w = world();
    waits(&mut w);
    for _ in 0..50 {
        stands_still(&mut w, SLOW, 1, 1);
        assert!(w.pin(ROOM).is_none_or(|(_, v)| v.confidence == Confidence::Possible));
    }
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), POSSIBLE);
    assert!(says(&v, "MiB a second left GPU-0a") && says(&v, "no other room of its engine"), "{v:?}");
    // It stops.
    stands_still(&mut w, QUIET, 5, 1);
    assert_eq!(stands(&w), POSSIBLE, "the usual time");
    stands_still(&mut w, QUIET, 8, 1);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), LIKELY, "{:?}", v.evidence);
    assert!(!says(&v, "a second left"), "{v:?}");
}

/// The agent, or its reading of GPUs, began after the room: how many rooms its engine handed over before is not known.
#[test]
fn a_slow_transfer_from_before_the_first_reading_is_not_likely_either() {
    let mut w = Web::new(Sees::Prefill);
    waits(&mut w);
    w.wait(500);
    gpu(&mut w, 0, GPU, &[prefill(0).pid]);
    for _ in 0..50 {
        stands_still(&mut w, SLOW, 1, 1);
        assert!(w.pin(ROOM).is_none_or(|(_, v)| v.confidence == Confidence::Possible), "{:?}", w.pin(ROOM));
    }
    stands_still(&mut w, QUIET, 13, 1);
    assert_eq!(stands(&w), LIKELY);
}

#[test]
fn what_another_room_may_move_proves_nothing() {
    let mut w = world();
    let other = decode(1);
    w.register(&other, &prefill(0));
    waits(&mut w);
    for n in 1..8 {
        // Shorter ones, so that nothing is proven by their passing.
        w.ask(ROOM + n, &other, &prefill(0), |m| m.pages = 1);
        stands_still(&mut w, SLOW, 2, 2);
        w.status(ROOM + n, &prefill(0), &other, KvPoll::Success);
        stands_still(&mut w, SLOW, 1, 1);
    }
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), LIKELY, "{:?}", v.evidence);
    assert!(!says(&v, "a second left"), "{v:?}");
}

#[test]
fn two_overdue_rooms_do_not_explain_each_other() {
    let mut w = world();
    waits(&mut w);
    w.request(Role::Prefill, ROOM + 1);
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    stands_still(&mut w, SLOW, 40, 2);
    for room in [ROOM, ROOM + 1] {
        let v = w.verdict(room);
        assert_eq!(v.confidence, Confidence::Possible, "{:?}", v.evidence);
        assert!(says(&v, "(1) is overdue as well"), "{:?}", v.evidence);
    }
    // One of them was it.
    w.status(ROOM + 1, &prefill(0), &decode(0), KvPoll::Success);
    stands_still(&mut w, QUIET, 12, 1);
    assert_eq!(w.verdict(ROOM).confidence, Confidence::Likely);
}

#[test]
fn a_gpu_that_another_engine_holds_as_well_or_that_moves_both_ways_withholds_nothing() {
    let mut w = Web::new(Sees::Prefill);
    gpu(&mut w, 0, GPU, &[prefill(0).pid, 4242]);
    waits(&mut w);
    stands_still(&mut w, SLOW, 15, 1);
    assert_eq!(stands(&w), LIKELY);
    // Slower than anything that is handed over.
    let mut w = world();
    waits(&mut w);
    stands_still(&mut w, Shows { out: 3_000_000, busy: Some(0) }, 15, 1);
    assert_eq!(stands(&w), LIKELY);
}

#[test]
fn without_any_word_on_queue_and_pauses_a_silent_gpu_raises_nothing() {
    let mut w = world();
    w.metadata(ROOM, &decode(0), &prefill(0));
    read(&mut w, QUIET, 200_000);
    assert_eq!(stands(&w), POSSIBLE);
    assert!(says(&w.verdict(ROOM), "ran no kernel"), "it is told all the same");
}

#[test]
fn a_pause_is_no_silence() {
    let mut w = world();
    w.request(Role::Prefill, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    read(&mut w, QUIET, 11_000);
    assert_eq!(stands(&w), POSSIBLE);
    w.call(Role::Prefill, &Control::Pause(None), Some(200));
    read(&mut w, QUIET, 100_000);
    assert_eq!(stands(&w), POSSIBLE);
    w.call(Role::Prefill, &Control::Resume, Some(200));
    read(&mut w, QUIET, 130_000);
    assert_eq!(stands(&w), POSSIBLE, "half a minute of it ran");
    read(&mut w, QUIET, 175_000);
    assert_eq!(stands(&w), LIKELY);
}

#[test]
fn bytes_alone_neither_raise_nor_queue() {
    for shows in [
        Shows { out: 4_000_000_000, busy: Some(0) },
        // A collective that hangs looks like this.
        Shows { out: 0, busy: Some(100) },
        Shows { out: 4_000_000_000, busy: Some(100) },
    ] {
        let mut w = world();
        waits(&mut w);
        read(&mut w, shows, 100_000);
        let v = w.verdict(ROOM);
        assert_eq!((v.class, v.confidence), POSSIBLE, "{:?}", v.evidence);
        assert!(!says(&v, "ran no kernel") && says(&v, "the whole GPU"));
        assert!(only(&w).links[0].out / 99 >= shows.out - shows.out / 100, "{:?}", only(&w));
    }
}

#[test]
fn a_gpu_that_computes_while_requests_wait_and_rooms_are_answered_works_off_a_queue() {
    let busy = Shows { out: 1_000_000, busy: Some(98) };
    // Of a release that tells no progress, so its counts can be old.
    let gauges = |w: &mut Web| old_gauges(w, 5);
    // Computing, a queue, answers: all three, or any one of them less.
    for (computes, queue, answers) in
        [(true, true, true), (false, true, true), (true, false, true), (true, true, false)]
    {
        let mut w = world();
        let other = decode(1);
        w.register(&other, &prefill(0));
        waits(&mut w);
        for n in 1..=6 {
            if queue {
                gauges(&mut w);
            }
            if answers {
                // Of another session, so that the room is not overtaken.
                w.metadata(ROOM + n, &other, &prefill(0));
                w.status(ROOM + n, &prefill(0), &other, KvPoll::Success);
            }
            read(&mut w, if computes { busy } else { QUIET }, n * 3000);
        }
        let class = w.class(ROOM).unwrap();
        let wanted = computes && queue && answers;
        assert_eq!(
            class == Class::Queued,
            wanted,
            "{computes} {queue} {answers}: {:?}",
            w.verdict(ROOM).evidence
        );
        assert_eq!(w.pin(ROOM).is_none(), wanted);
    }
}

#[test]
fn an_xid_in_the_window_names_its_gpu_and_one_before_it_does_not() {
    let mut w = world();
    gpu(&mut w, 1, "GPU-1b", &[4242]);
    tell(&mut w, 0, What::Xid(31));
    w.wait(1000);
    waits(&mut w);
    read(&mut w, QUIET, 5000);
    tell(&mut w, 0, What::Xid(79));
    tell(&mut w, 1, What::Xid(48));
    tell(&mut w, 0, What::Recovery(1));
    tell(&mut w, 0, What::Clocks(0x48));
    read(&mut w, QUIET, 15_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), POSSIBLE, "an error is no proof that this room is hit");
    assert!(says(&v, "Xid 79 (GPU has fallen off the bus) on GPU-0a of prefill process 100 at +4"), "{v:?}");
    assert!(says(&v, "reset the GPU") && says(&v, "hardware slow-down"), "{v:?}");
    assert!(!says(&v, "Xid 31") && !says(&v, "GPU-1b"), "{v:?}");
    let whats: Vec<Ailment> = only(&w).troubles.iter().map(|t| t.what).collect();
    assert_eq!(whats, [Ailment::Xid(79), Ailment::Recovery(1), Ailment::Slowed(0x48)]);
}

#[test]
fn a_gpu_that_is_lost_is_told_and_its_silence_is_none() {
    let mut w = world();
    waits(&mut w);
    read(&mut w, QUIET, 5000);
    tell(&mut w, 0, What::Lost);
    w.to(100_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), POSSIBLE);
    assert!(says(&v, "GPU-0a of prefill process 100 does not answer the driver: lost at +4"), "{v:?}");
    assert!(!says(&v, "ran no kernel"), "{v:?}");
    assert!(only(&w).links[0].coverage < 60);
}

#[test]
fn a_call_that_hangs_leaves_what_was_read_and_no_more() {
    let mut w = world();
    waits(&mut w);
    read(&mut w, QUIET, 70_000);
    assert_eq!(stands(&w), LIKELY);
    w.to(71_800);
    assert_eq!(stands(&w), LIKELY);
    w.to(73_200);
    assert_eq!(stands(&w), POSSIBLE, "two seconds without a reading");
    w.to(102_000);
    let v = w.verdict(ROOM);
    assert!(says(&v, "% of it read"), "{v:?}");
    // Readings a second apart are of a tenth of the time.
    let mut w = world();
    waits(&mut w);
    for n in 1..=100 {
        w.to(n * 1000 - 100);
        let now = w.mono().0;
        read(&mut w, QUIET, (now - START) / 1_000_000 + 100);
    }
    assert_eq!(stands(&w), POSSIBLE);
    assert!(only(&w).links[0].coverage < 200);
}

#[test]
fn a_split_gpu_tells_bytes_and_not_that_nothing_runs() {
    let mut w = world();
    waits(&mut w);
    read(&mut w, Shows { out: 0, busy: None }, 100_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), POSSIBLE);
    assert!(says(&v, "0 B out, 0 B in") && !says(&v, "ran no kernel"), "{v:?}");
    let window = only(&w);
    assert_eq!((window.links[0].out, window.computing), (0, None));
}

#[test]
fn without_a_driver_nothing_is_said_and_nothing_is_zero() {
    let mut w = Web::new(Sees::Prefill);
    waits(&mut w);
    w.to(100_000);
    assert_eq!(stands(&w), POSSIBLE);
    assert!(w.last(ROOM).gpus.is_empty());
    assert!(!says(&w.verdict(ROOM), "GPU"));
    // One that is there, and whose holders are not known.
    gpu(&mut w, 0, GPU, &[]);
    assert!(w.last(ROOM).gpus.is_empty());
    // One that is known to be the rank's, and of which nothing is read: no bytes, not none.
    let mut w = world();
    waits(&mut w);
    w.to(20_000);
    let window = only(&w);
    assert!(window.links.is_empty() && window.computing.is_none());
    assert!(says(&w.verdict(ROOM), "what it moved is not measured"));
}

#[test]
fn another_gpu_of_the_engine_that_computes_or_is_not_known_to_stand_still_counts() {
    for other in [Some(Shows { out: 0, busy: Some(7) }), Some(Shows { out: 0, busy: None }), None] {
        let mut w = world();
        w.process(101, pid(Role::Prefill), None);
        gpu(&mut w, 1, "GPU-1b", &[101]);
        waits(&mut w);
        let both: Vec<_> = [(0, QUIET)].into_iter().chain(other.map(|o| (1, o))).collect();
        read_all(&mut w, &both, 100_000);
        assert_eq!(stands(&w), POSSIBLE);
        assert_eq!(only(&w).gpu.to_string(), GPU, "the room is the first rank's");
    }
    // Of another engine: that is none of this room's.
    let mut w = world();
    gpu(&mut w, 1, "GPU-1b", &[4242]);
    waits(&mut w);
    read_all(&mut w, &[(0, QUIET), (1, Shows { out: 1 << 30, busy: Some(99) })], 100_000);
    assert_eq!(stands(&w), LIKELY);
}

#[test]
fn the_gpu_of_another_process_of_the_engine_is_the_rooms_where_its_rank_holds_none() {
    let mut w = Web::new(Sees::Prefill);
    w.process(101, pid(Role::Prefill), None);
    gpu(&mut w, 0, GPU, &[101]);
    waits(&mut w);
    read(&mut w, QUIET, 15_000);
    assert_eq!(only(&w).pid, 101);
}

#[test]
fn rooms_that_overlap_are_counted_and_share_one_number_of_bytes() {
    let mut w = world();
    // Over before: it has no share.
    w.healthy(ROOM + 9, &decode(0), &prefill(0), 500);
    read(&mut w, QUIET, 1000);
    waits(&mut w);
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    read(&mut w, Shows { out: 1 << 30, busy: Some(50) }, 3000);
    w.status(ROOM + 1, &prefill(0), &decode(0), KvPoll::Success);
    read(&mut w, QUIET, 4000);
    w.metadata(ROOM + 2, &decode(0), &prefill(0));
    read(&mut w, QUIET, 5000);
    let of = |w: &Web, room| w.last(room).gpus[0].clone();
    let [first, second, third] = [ROOM, ROOM + 1, ROOM + 2].map(|room| of(&w, room));
    assert_eq!([&first, &second, &third].map(|g| g.overlapping), [Some(3), Some(2), Some(2)]);
    assert!(first.links[0].out >= 15 << 27 && second.links[0].out >= 15 << 27, "all of it is of both");
    assert!(third.links[0].out < 2000, "{third:?}");
    // A room that has ended keeps its window.
    assert!(second.to < Mono(START + 3_100_000_000), "{second:?}");
    read(&mut w, Shows { out: 1 << 30, busy: Some(50) }, 6000);
    assert_eq!(of(&w, ROOM + 1).links[0].out, second.links[0].out);
}

#[test]
fn decodes_gpu_is_in_the_record_and_decides_nothing() {
    let mut w = Web::new(Sees::Decode);
    gpu(&mut w, 0, GPU, &[decode(0).pid]);
    w.request(Role::Decode, ROOM);
    w.metadata(ROOM, &decode(0), &prefill(0));
    read(&mut w, QUIET, 100_000);
    let v = w.verdict(ROOM);
    assert_eq!((v.class, v.confidence), (Class::AwaitingPrefill, Confidence::Possible));
    assert_eq!((only(&w).role, only(&w).pid), (Role::Decode, decode(0).pid));
    assert!(says(&v, "GPU-0a of decode process 200"), "{v:?}");
}

#[test]
fn readings_of_a_room_are_listed_where_it_is_asked_for_and_bounded() {
    let mut w = world();
    waits(&mut w);
    read(&mut w, Shows { out: 1 << 20, busy: Some(50) }, 300_000);
    assert!(only(&w).series.is_empty());
    let window = w.table.details(ROOM).pop().unwrap().gpus.remove(0);
    assert!(window.series.len() > 64 && window.series.len() <= 128, "{}", window.series.len());
    let sum: u64 = window.series.iter().map(|s| s.out).sum();
    assert!(sum.abs_diff(300 << 20) < 3 << 20, "{sum}");
    let told = w.events(ROOM);
    assert!(told.iter().all(|e| e.snapshot().gpus.iter().all(|g| g.series.is_empty())));
}

/// The one that is started again says no more than was read, and what is read then counts.
#[test]
fn a_pin_that_rests_on_a_silent_gpu_outlives_the_agent_and_falls_when_the_gpu_moves() {
    let mut w = world();
    waits(&mut w);
    read(&mut w, QUIET, 70_000);
    assert_eq!(stands(&w), LIKELY);
    let text = serde_json::to_string(&w.table.save()).unwrap();
    let restore = |to: u64| {
        let saved: SavedRooms = serde_json::from_str(&text).unwrap();
        let away = roomtrace::rooms::model::Away { from: w.mono(), to: Mono(START + to * SECOND) };
        let survivors = Survivors { alive: saved.processes().collect(), ..Survivors::default() };
        let mut table = RoomTable::restore(roomtrace::rooms::Config::default(), saved, away, &survivors);
        table.returned(|_| true, &[], away.to, &mut Vec::new());
        table
    };
    let verdict = |t: &RoomTable| *t.snapshot(ROOM).pop().unwrap().verdict.unwrap();
    let silent = |v: &Verdict| v.evidence.iter().find(|e| e.contains("ran no kernel")).cloned();
    let mut table = restore(75);
    let v = verdict(&table);
    assert_eq!((v.class, v.confidence), LIKELY);
    assert!(silent(&v).unwrap().contains("to +69.999 s (69.9"), "{v:?}");
    // It goes on, and the gap is not claimed.
    let say = |table: &mut RoomTable, tenth: u64, percent| {
        let [from, to] = [tenth, tenth + 1].map(|t| Mono(START + t * SECOND / 10));
        for what in [moved(from, to, 0), What::Computed(from, percent)] {
            table.handle(&Input::Gpu(&Reading { at: to, index: 0, what }), &mut Vec::new());
        }
        table.tick(to, &mut Vec::new());
    };
    for tenth in 760..900 {
        say(&mut table, tenth, 0);
    }
    let v = verdict(&table);
    assert_eq!((v.class, v.confidence), LIKELY);
    assert!(silent(&v).unwrap().contains("to +89.999 s (83.9"), "70 and 14 of 90: {v:?}");
    for tenth in 900..930 {
        say(&mut table, tenth, 1);
    }
    assert_eq!(verdict(&table).confidence, Confidence::Possible);
    for tenth in 930..1200 {
        say(&mut table, tenth, 0);
    }
    assert_eq!(verdict(&table).confidence, Confidence::Possible, "what was before it does not count");
    // Away for long: then it is too long ago.
    assert_eq!(verdict(&restore(110)).confidence, Confidence::Possible);
}
