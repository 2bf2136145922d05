//! One dead thread is one finding with the rooms that it pins.

use roomtrace::verdict::model::{Class, Confidence};

use super::receivers::foreign_then_death;
use super::rooms_support::*;
use super::workers::worker;
use super::{ROOM, process, thread, world};

#[test]
fn a_dead_thread_is_one_finding_with_the_rooms_that_it_pins() {
    let mut w = world(Sees::Prefill);
    foreign_then_death(&mut w, 21);
    assert_eq!(w.table.findings(), [], "nothing is missed yet");
    for n in 0..3 {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    w.wait(12_000);
    let open = w.table.findings();
    assert_eq!(open.len(), 1, "{open:#?}");
    let f = &open[0];
    assert_eq!((f.class, f.confidence, f.room_count), (Class::ThreadDied, Confidence::Certain, 3));
    assert_eq!((f.rooms.clone(), f.group), (vec![ROOM, ROOM + 1, ROOM + 2], w.verdict(ROOM).group));
    assert_eq!(f.engine.endpoint, Some(prefill(0).endpoint));
    for part in ["thread 23357", "10.9.9.9:5555", "ms before"] {
        assert!(f.evidence.iter().any(|e| e.contains(part)), "{part}: {:?}", f.evidence);
    }
    let names: Vec<_> = w.table.finding_events().map(|e| (e.name(), e.finding().class)).collect();
    assert_eq!(names.last(), Some(&("finding_opened", Class::ThreadDied)), "{names:?}");
    // The rank answers: it lives.
    w.healthy(2, &decode(0), &prefill(0), 20);
    w.wait(2500);
    assert!(w.table.findings().iter().all(|f| f.class != Class::ThreadDied), "{:#?}", w.table.findings());
}

#[test]
fn the_finding_of_a_dead_thread_ends_with_its_process() {
    let mut w = worker(Sees::Prefill, 2, 2);
    w.to(13_000);
    assert_eq!(w.table.findings()[0].class, Class::ThreadDied);
    process(&mut w, &prefill(0), 15);
    w.wait(2500);
    assert_eq!(w.table.findings(), []);
    let closed: Vec<_> = w.table.closed_findings().map(|f| (f.class, f.room_count)).collect();
    assert_eq!(closed, [(Class::ThreadDied, 2)]);
}

#[test]
fn threads_that_nobody_misses_are_no_finding() {
    let mut w = world(Sees::Prefill);
    for n in 0..30 {
        w.healthy(n, &decode(0), &prefill(0), 20);
        thread(&mut w, &prefill(0), 25_000 + u32::try_from(n).unwrap());
        w.wait(500);
    }
    assert_eq!(w.table.findings(), []);
}
