//! Which rooms a person sees first, and how many there are.

use roomtrace::rooms::Config;
use roomtrace::verdict::model::Confidence;

use super::rooms_support::*;
use super::{ROOM, world};

#[test]
fn pinned_rooms_come_surest_first_and_then_by_age_and_others_by_age() {
    let mut w = world(Sees::Both);
    w.register(&decode(1), &prefill(1));
    // Only silence says so of these two.
    for n in [2, 1] {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
        w.wait(100);
    }
    // Of this one a second METADATA does.
    w.ask(ROOM + 9, &decode(1), &prefill(1), |m| m.aux_index = Some(1));
    w.wait(100);
    w.ask(ROOM + 9, &decode(1), &prefill(1), |m| m.aux_index = Some(2));
    w.to(30_000);
    for n in [7, 6, 5] {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
        w.wait(100);
    }
    let first = w.table.overview(10, 10);
    let rooms =
        |all: &[roomtrace::rooms::model::RoomSnapshot]| all.iter().map(|r| r.room - ROOM).collect::<Vec<_>>();
    let sure = |r: &roomtrace::rooms::model::RoomSnapshot| r.verdict.as_ref().unwrap().confidence;
    assert_eq!(
        first.pinned.iter().map(sure).collect::<Vec<_>>(),
        [Confidence::Likely, Confidence::Possible, Confidence::Possible]
    );
    assert_eq!((rooms(&first.pinned), rooms(&first.oldest)), (vec![9, 2, 1], vec![7, 6, 5]));
    assert_eq!((first.pinned_count, first.others_count), ([2, 1, 0], 3));
    let fewer = w.table.overview(2, 1);
    assert_eq!((rooms(&fewer.pinned), rooms(&fewer.oldest)), (vec![9, 2], vec![7]));
    assert_eq!((fewer.pinned_count, fewer.others_count), ([2, 1, 0], 3), "counts are of all");
}

#[test]
fn a_table_at_its_bound_is_shown_like_any_other() {
    let config = Config { max_rooms: 300, ..Config::default() };
    let mut w = World::with(Sees::Both, MOONCAKE, config);
    w.outlives = false;
    w.register(&decode(0), &prefill(0));
    for n in 0..400 {
        w.metadata(ROOM + n, &decode(0), &prefill(0));
    }
    assert!(w.table.counters().turned_away.rooms >= 100);
    assert_eq!(w.table.overview(100, 15).others_count, 300);
    w.to(20_000);
    let first = w.table.overview(100, 15);
    assert_eq!((first.pinned.len(), first.pinned_count.iter().sum::<usize>()), (100, 300));
}
