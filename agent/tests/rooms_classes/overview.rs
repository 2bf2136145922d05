//! Which rooms a person sees first, and how many there are.

use roomtrace::event::{Direction, TcpState};
use roomtrace::rooms::Config;
use roomtrace::sglang::message::KvPoll;
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
    // The status of this one was lost with its connection.
    let (p, d) = (prefill(1), decode(1));
    w.metadata(ROOM + 8, &d, &p);
    w.status(ROOM + 8, &p, &d, KvPoll::Success);
    let una = w.sent_to(&p, &d);
    w.acknowledge(&p, &d, una);
    w.metadata(ROOM + 9, &d, &p);
    w.tell(ROOM + 9, &p, &d, KvPoll::Success, false);
    w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 104);
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
        [Confidence::Certain, Confidence::Possible, Confidence::Possible]
    );
    assert_eq!((rooms(&first.pinned), rooms(&first.oldest)), (vec![9, 2, 1], vec![7, 6, 5]));
    assert_eq!((first.pinned_count, first.others_count), ([2, 0, 1], 3));
    let fewer = w.table.overview(2, 1);
    assert_eq!((rooms(&fewer.pinned), rooms(&fewer.oldest)), (vec![9, 2], vec![7]));
    assert_eq!((fewer.pinned_count, fewer.others_count), ([2, 0, 1], 3), "counts are of all");
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
