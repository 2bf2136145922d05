//! A pipeline that ends and another that goes on from what it wrote down: what it still knows, and what it must not
//! claim any more. And the file between them, whatever is in it.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]
#![allow(missing_docs, reason = "tests")]

#[path = "support/wire.rs"]
mod wire;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use roomtrace::control::{Judgement, Limits};
use roomtrace::event::{
    Addresses, Body, Bytes, Comm, Direction, Found, Mono, SECOND, Sequence, SocketEvent, SocketId,
    StateChange, Task, TcpState, What,
};
use roomtrace::pipeline::{Pipeline, Resumed};
use roomtrace::rooms::model::{Event, Outcome, RoomSnapshot};
use roomtrace::rooms::{Config, Survivors};
use roomtrace::state::{Counters, Dropped, State, StateError, Store, decode, encode};
use roomtrace::verdict::model::Class;
use wire::{handshake, message, metadata_from, status};

const ROOM: u64 = 5_123_456_789_012_345_678;
const ENGINE: u32 = 4711;
const START: u64 = 1000 * SECOND;

fn metadata(room: u64) -> Vec<u8> {
    metadata_from("10.0.0.2", room, 8, 1)
}

/// One end of a connection of the prefill engine.
#[derive(Clone)]
struct Wire {
    id: u64,
    addresses: Addresses,
    direction: Direction,
    /// Behind its last byte.
    end: u32,
}

impl Wire {
    fn sequence(&self) -> Sequence {
        match self.direction {
            Direction::Sent => Sequence { write: self.end, una: self.end, copied: 1000, rcv_nxt: 1000 },
            Direction::Received => Sequence { write: 1000, una: 1000, copied: self.end, rcv_nxt: self.end },
        }
    }
}

/// A prefill host: METADATA comes in on one connection, STATUS goes out on the other.
struct Host {
    pipeline: Pipeline,
    events: Vec<Event>,
    now: u64,
    from_decode: Wire,
    to_decode: Wire,
}

impl Host {
    fn new() -> Self {
        let wire = |id, local: &str, peer: &str, direction| Wire {
            id,
            addresses: Addresses { local: local.parse().unwrap(), peer: peer.parse().unwrap() },
            direction,
            end: 1000,
        };
        let mut host = Self {
            pipeline: Pipeline::new(Limits::default(), Config::default()),
            events: Vec::new(),
            now: START,
            from_decode: wire(1, "10.0.0.1:5000", "10.0.0.2:40000", Direction::Received),
            to_decode: wire(2, "10.0.0.1:41000", "10.0.0.2:41207", Direction::Sent),
        };
        for wire in [host.from_decode.clone(), host.to_decode.clone()] {
            let old = if wire.direction == Direction::Sent { TcpState::SynSent } else { TcpState::SynRecv };
            let sequence = wire.sequence();
            let change = StateChange { old, new: TcpState::Established, error: 0, sequence };
            host.event(&wire, What::State(change));
        }
        host.receive(&handshake());
        host.send(&handshake());
        host
    }

    /// With a room that is pinned.
    fn pinned() -> Self {
        let mut host = Self::new();
        host.receive(&metadata(1));
        host.send(&status(1));
        host.receive(&metadata(ROOM));
        host.pass(15);
        assert_eq!(host.names(), ["room_closed", "room_pinned"]);
        assert!(host.room().pinned());
        host.events.clear();
        host
    }

    fn event(&mut self, wire: &Wire, what: What<'_>) {
        self.now += 1000;
        let comm = Comm::from("sglang::schedul".to_owned());
        let task = Some(Task { tgid: ENGINE, tid: ENGINE + 1, comm, cgroup: 7 });
        let (socket, addresses) = (SocketId(wire.id), wire.addresses);
        self.pipeline.handle(&SocketEvent { at: Mono(self.now), socket, netns: 1, addresses, task, what });
        self.events.extend(self.pipeline.events());
    }

    fn call(&mut self, wire: &Wire, bytes: &[u8]) {
        let Sequence { una, rcv_nxt, .. } = wire.sequence();
        let len = u32::try_from(bytes.len()).unwrap();
        let (direction, body) = (wire.direction, Body::Whole(bytes));
        self.event(wire, What::Bytes(Bytes { direction, end: wire.end, len, body, snd_una: una, rcv_nxt }));
    }

    fn receive(&mut self, bytes: &[u8]) {
        self.from_decode.end += u32::try_from(bytes.len()).unwrap();
        self.call(&self.from_decode.clone(), bytes);
    }

    fn send(&mut self, bytes: &[u8]) {
        self.to_decode.end += u32::try_from(bytes.len()).unwrap();
        self.call(&self.to_decode.clone(), bytes);
    }

    fn pass(&mut self, seconds: u64) {
        for _ in 0..10 * seconds {
            self.now += SECOND / 10;
            self.pipeline.tick(Mono(self.now));
            self.events.extend(self.pipeline.events());
        }
    }

    /// Ends the agent and starts another, five seconds later, that finds these connections.
    fn restart(&mut self, survivors: &Survivors, found: &[Wire]) -> Resumed {
        let state = State {
            boot: "boot".to_owned(),
            processes: [(ENGINE, 1)].into(),
            pipeline: self.pipeline.save(Mono(self.now)),
        };
        let state = decode(&encode(&state).unwrap()).unwrap();
        self.now += 5 * SECOND;
        let (limits, config) = (Limits::default(), Config::default());
        self.pipeline = Pipeline::restore(limits, config, state.pipeline, survivors, Mono(self.now));
        for wire in found {
            let (state, sequence) = (TcpState::Established, wire.sequence());
            self.event(wire, What::Found(Found { state, sequence, base: None }));
        }
        let resumed = self.pipeline.returned(Mono(self.now));
        self.pipeline.tick(Mono(self.now));
        self.events.extend(self.pipeline.events());
        resumed
    }

    fn wires(&self) -> [Wire; 2] {
        [self.from_decode.clone(), self.to_decode.clone()]
    }

    fn room(&self) -> RoomSnapshot {
        self.pipeline.rooms().snapshot(ROOM).pop().unwrap()
    }

    fn names(&self) -> Vec<&'static str> {
        self.events.iter().map(Event::name).collect()
    }
}

fn all_alive() -> Survivors {
    Survivors { alive: [ENGINE].into(), ..Survivors::default() }
}

#[test]
fn a_pin_outlives_the_agent_and_its_room_goes_on() {
    let mut host = Host::pinned();
    let (before, labels) = (host.room(), host.pipeline.rooms().gauges().pinned);
    assert_eq!((labels.len(), before.restored), (1, None));
    let resumed = host.restart(&all_alive(), &host.wires());
    let expected = Resumed { connections: 2, rooms: 1, pinned: 1, ..Resumed::default() };
    assert_eq!(resumed, expected);
    // At once, with the same labels and the same life, and nobody is told it as news.
    assert_eq!(host.pipeline.rooms().gauges().pinned, labels);
    assert_eq!(host.names(), [""; 0]);
    let after = host.room();
    assert_eq!((after.room, after.incarnation), (before.room, before.incarnation));
    assert_eq!((after.opened_at, &after.messages), (before.opened_at, &before.messages));
    let (was, is) = (before.verdict.unwrap(), after.verdict.unwrap());
    assert_eq!((is.class, is.confidence, is.since), (was.class, was.confidence, was.since));
    assert_eq!((is.group, &is.owed_by, &is.ends_by_itself), (was.group, &was.owed_by, &was.ends_by_itself));
    let away = after.restored.unwrap();
    assert_eq!(away.to.since(away.from) / SECOND, 5);
    assert!(is.evidence.iter().any(|e| e.contains("started again") && e.contains("nothing that ends it")));
    // The kernel is told again what it has forgotten: both connections carry what matters.
    let judged: Vec<_> = host.pipeline.judgements().collect();
    assert_eq!(judged.len(), 2);
    assert!(judged.iter().all(|(_, j)| *j == Judgement::Zmtp));

    host.pass(30);
    assert!(host.room().pinned() && host.events.is_empty());
    assert_eq!(host.pipeline.rooms().counters().pins.iter().map(|(.., n)| n).sum::<u64>(), 0, "no new pin");
    host.receive(&metadata(2));
    host.send(&[status(2), status(ROOM)].concat());
    host.pass(1);
    assert_eq!(host.names(), ["room_closed", "room_closed"]);
    let end = host.room();
    assert_eq!((end.outcome, end.recovered, end.was_pinned), (Some(Outcome::Success), true, true));
}

#[test]
fn a_room_that_is_not_overdue_yet_is_pinned_by_the_next_agent_in_time() {
    let mut host = Host::new();
    host.receive(&metadata(ROOM));
    let begun = host.now;
    host.pass(3);
    host.restart(&all_alive(), &host.wires());
    assert!(!host.room().pinned());
    host.pass(6);
    assert_eq!(host.names(), ["room_pinned"]);
    let at = host.events[0].snapshot().at.0 - begun;
    assert!((10 * SECOND..11 * SECOND).contains(&at), "pinned after {at} ns");
}

#[test]
fn bytes_that_passed_meanwhile_make_a_pin_unknown_and_end_it() {
    let ways: [fn(&mut Host); 2] = [
        // The STATUS itself.
        |host| host.to_decode.end += u32::try_from(status(ROOM).len()).unwrap(),
        // So much that its number has gone round.
        |host| host.to_decode.end = host.to_decode.end.wrapping_sub(1000),
    ];
    for moved in ways {
        let mut host = Host::pinned();
        let before = host.to_decode.end;
        moved(&mut host);
        let wires = host.wires();
        let resumed = host.restart(&all_alive(), &wires);
        assert_eq!((resumed.connections, resumed.rooms, resumed.pinned), (2, 1, 0));
        assert_eq!(host.names(), ["verdict_changed"]);
        let room = host.room();
        let verdict = room.verdict.as_ref().unwrap();
        assert_eq!((verdict.class, room.pinned()), (Class::Unknown, false));
        assert_eq!(room.completeness.label(), "lossy");
        assert!(host.pipeline.rooms().gauges().pinned.is_empty());
        // What comes on that connection from now on is read.
        assert_ne!(host.to_decode.end, before);
        host.pass(1);
        host.receive(&metadata(ROOM + 2));
        host.send(&status(ROOM + 2));
        assert!(host.names().ends_with(&["room_closed"]), "{:?}", host.names());
        host.pass(400);
        assert_eq!((host.room().outcome, host.room().recovered), (Some(Outcome::Unknown), false));
    }
}

#[test]
fn the_end_of_a_process_ends_its_rooms() {
    let mut host = Host::pinned();
    let gone = Survivors { gone: [ENGINE].into(), ..Survivors::default() };
    let resumed = host.restart(&gone, &[]);
    assert_eq!((resumed.connections_gone, resumed.rooms_over, resumed.rooms), (2, 1, 0));
    assert_eq!(host.names(), ["room_closed"]);
    assert_eq!(host.room().outcome, Some(Outcome::Unknown));
    assert!(host.pipeline.processes().is_empty());
    assert_eq!(host.pipeline.control().sockets(), 0);
}

#[test]
fn a_connection_that_is_gone_leaves_what_hangs_on_it_unknown() {
    let mut host = Host::pinned();
    let still = [host.from_decode.clone()];
    let resumed = host.restart(&all_alive(), &still);
    assert_eq!((resumed.connections, resumed.connections_gone, resumed.pinned), (1, 1, 0));
    assert_eq!(host.names(), ["verdict_changed"]);
    assert_eq!(host.room().verdict.unwrap().class, Class::Unknown);
}

/// Nobody says anything more of a room whose ABORT found none: what passes of others does not matter.
#[test]
fn an_abort_without_metadata_stays_pinned_beside_other_rooms() {
    let mut host = Host::new();
    host.receive(&metadata(1));
    host.send(&status(1));
    let room = ROOM.to_string();
    host.receive(&message(&[b"ABORT", room.as_bytes(), b"10.0.0.2", b"41207"]));
    host.pass(15);
    assert_eq!(host.names(), ["room_closed", "room_pinned"]);
    host.receive(&metadata(2));
    host.events.clear();
    host.from_decode.end += 300;
    host.to_decode.end += 300;
    host.restart(&all_alive(), &host.wires());
    let room = host.room();
    assert!(room.pinned(), "{room:?}");
    assert_eq!((room.verdict.unwrap().class, host.names()), (Class::AbortBeforeEntry, vec![]));
    // That of the other one nothing is known is no news either.
    let other = host.pipeline.rooms().snapshot(2).pop().unwrap();
    assert_eq!(other.verdict.map(|v| v.class), None);
    host.pass(15);
    let other = host.pipeline.rooms().snapshot(2).pop().unwrap();
    assert_eq!((other.pinned(), other.verdict.unwrap().class), (false, Class::Unknown));
}

/// The first STATUS to a decode rank opens its connection: if that happened meanwhile, the room may be over.
#[test]
fn a_connection_that_was_opened_meanwhile_may_have_carried_the_end() {
    let mut host = Host::new();
    let mut other = host.to_decode.clone();
    host.to_decode.addresses.peer = "10.0.0.3:4".parse().unwrap();
    host.event(
        &host.to_decode.clone(),
        What::State(StateChange {
            old: TcpState::Established,
            new: TcpState::Close,
            error: 0,
            sequence: host.to_decode.sequence(),
        }),
    );
    host.receive(&metadata(ROOM));
    host.pass(15);
    assert_eq!(host.names(), ["room_pinned"]);
    let same = [host.from_decode.clone()];
    host.restart(&all_alive(), &same);
    assert!(host.room().pinned(), "nothing has happened");
    (other.id, other.end) = (3, 1100);
    let more = [host.from_decode.clone(), other];
    host.restart(&all_alive(), &more);
    assert_eq!(host.room().verdict.unwrap().class, Class::Unknown);
}

#[test]
fn a_late_message_of_a_closed_room_is_late_for_the_next_agent_too() {
    let mut host = Host::new();
    host.receive(&metadata(ROOM));
    host.send(&status(ROOM));
    host.pass(1);
    assert_eq!(host.names(), ["room_closed"]);
    host.restart(&all_alive(), &host.wires());
    let room = ROOM.to_string();
    host.receive(&message(&[b"ABORT", room.as_bytes(), b"10.0.0.2", b"41207"]));
    host.pass(15);
    assert_eq!(host.names(), ["room_closed"], "no room, no pin");
    // The same number once more is another life.
    host.receive(&metadata(ROOM));
    assert_eq!(host.room().incarnation, 1);
}

/// A restart in the middle of a message: what it says is lost, and so is what rests on it.
#[test]
fn half_a_message_is_not_guessed() {
    let mut host = Host::pinned();
    let whole = metadata(2);
    host.receive(&whole[..40]);
    host.restart(&all_alive(), &host.wires());
    assert!(!host.room().pinned());
    host.receive(&whole[40..]);
    assert!(host.pipeline.rooms().snapshot(2).is_empty());
    host.receive(&metadata(3));
    assert_eq!(host.pipeline.rooms().snapshot(3).len(), 1, "in step again");
}

fn state() -> State {
    let pipeline = Host::pinned().pipeline.save(Mono(START));
    State { boot: boot(), processes: [(std::process::id(), start(std::process::id()))].into(), pipeline }
}

fn boot() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned()
}

fn start(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit_once(')').unwrap().1.split_ascii_whitespace().nth(19).unwrap().parse().unwrap()
}

fn dropped(counters: &Counters) -> Vec<(Dropped, u64)> {
    counters.dropped().filter(|(_, n)| *n > 0).collect()
}

/// Loads what `make` left at a path.
fn load(make: impl FnOnce(&Path)) -> (Option<Survivors>, Vec<(Dropped, u64)>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    make(&path);
    let counters = Arc::new(Counters::default());
    let store = Store::open(&path, Arc::clone(&counters)).unwrap();
    let loaded = store.load(Mono(START + SECOND));
    (loaded.map(|(_, survivors)| survivors), dropped(&counters))
}

fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
}

#[test]
fn a_file_that_does_not_hold_is_dropped_and_counted() {
    let good = encode(&state()).unwrap();
    let me = std::process::id();
    let (loaded, lost) = load(|path| write(path, &good));
    assert_eq!((loaded.unwrap().alive.contains(&me), lost), (true, vec![]));
    assert_eq!(load(|_| ()), (None, vec![]), "no file is no loss");

    let text = |from: &str, to: &str| String::from_utf8(good.clone()).unwrap().replacen(from, to, 1);
    let bad = |bytes: &[u8]| load(|path| write(path, bytes)).1;
    let once = |why| vec![(why, 1)];
    assert_eq!(bad(b""), once(Dropped::Garbage));
    assert_eq!(bad(b"\n"), once(Dropped::Garbage));
    assert_eq!(bad(&[0xff; 5000]), once(Dropped::Garbage));
    assert_eq!(bad(text("state 1 ", "state 2 ").as_bytes()), once(Dropped::Version));
    assert_eq!(bad(text("state 1 ", "state x ").as_bytes()), once(Dropped::Garbage));
    assert_eq!(bad(&good[..good.len() - 1]), once(Dropped::CutShort));
    assert_eq!(bad(text("\"incarnation\":0", "\"incarnation\":7").as_bytes()), once(Dropped::Checksum));
    assert_eq!(bad(&[good.clone(), b" ".to_vec()].concat()), once(Dropped::Checksum));
    assert_eq!(bad(&vec![b' '; (16 << 20) + 1]), once(Dropped::Size));

    let rebooted = State { boot: "another".to_owned(), ..state() };
    assert_eq!(bad(&encode(&rebooted).unwrap()), once(Dropped::Boot));
    let mut future = state();
    future.pipeline.at = Mono(u64::MAX);
    assert_eq!(bad(&encode(&future).unwrap()), once(Dropped::Boot));
    // Another process has the number now, and one that has ended.
    let other = State { processes: [(me, start(me) + 1), (u32::MAX, 1)].into(), ..state() };
    let (loaded, lost) = load(|path| write(path, &encode(&other).unwrap()));
    let expected = Survivors { gone: [me, u32::MAX].into(), ..Survivors::default() };
    assert_eq!((loaded, lost), (Some(expected), vec![(Dropped::Process, 2)]));
}

#[test]
fn a_file_that_somebody_else_can_have_written_is_not_read() {
    let good = encode(&state()).unwrap();
    let lost = |make: &dyn Fn(&Path)| load(|path| make(path)).1;
    let mode = |mode: u32| {
        lost(&|path| {
            write(path, &good);
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        })
    };
    assert_eq!(mode(0o660), [(Dropped::Owner, 1)]);
    assert_eq!(mode(0o602), [(Dropped::Owner, 1)]);
    assert_eq!(mode(0o644), []);
    let link = |path: &Path| {
        let target = path.with_file_name("elsewhere");
        write(&target, &good);
        std::os::unix::fs::symlink(target, path).unwrap();
    };
    assert_eq!(lost(&link), [(Dropped::Unreadable, 1)]);
    assert_eq!(lost(&|path| std::fs::create_dir(path).unwrap()), [(Dropped::Unreadable, 1)]);
    let pipe = |path: &Path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    assert_eq!(lost(&pipe), [(Dropped::Unreadable, 1)]);
    let owned = |path: &Path| {
        write(path, &good);
        std::os::unix::fs::chown(path, Some(65534), None).unwrap();
    };
    if std::fs::read_to_string("/proc/self/status").unwrap().contains("\nUid:\t0\t") {
        assert_eq!(lost(&owned), [(Dropped::Owner, 1)]);
    }
}

#[test]
fn a_place_that_cannot_be_used_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let open = |path: &Path| Store::open(path, Arc::default());
    let path = dir.path().join("made/state");
    let first = open(&path).unwrap();
    assert_eq!(std::fs::metadata(dir.path().join("made")).unwrap().permissions().mode() & 0o777, 0o700);
    let error = open(&path).unwrap_err();
    assert!(matches!(error, StateError::Taken { .. }), "{error}");
    drop(first);
    drop(open(&path).unwrap());
    let error = open(&dir.path().join("not/made/state")).unwrap_err();
    assert!(error.to_string().contains("not/made") && error.to_string().contains("--no-state"), "{error}");
    std::fs::set_permissions(dir.path().join("made"), PermissionsExt::from_mode(0o777)).unwrap();
    let error = open(&path).unwrap_err();
    assert!(matches!(error, StateError::Open { mode: 0o777, .. }), "{error}");
}

#[test]
fn the_latest_state_is_what_the_next_agent_finds() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("state");
    let counters = Arc::new(Counters::default());
    let mut writer = Store::open(&path, Arc::clone(&counters)).unwrap().writer().unwrap();
    let mut host = Host::pinned();
    let now = std::time::Instant::now();
    assert!(writer.wants(host.pipeline.changes(), now));
    for _ in 0..100 {
        writer.hand_over(host.pipeline.save(Mono(host.now)), host.pipeline.changes(), now);
    }
    assert!(!writer.wants(host.pipeline.changes(), now), "nothing has changed");
    host.receive(&metadata(7));
    assert!(!writer.wants(host.pipeline.changes(), now), "not within a second");
    writer.finish(host.pipeline.save(Mono(host.now)), std::time::Duration::from_mins(1));
    let (written, failed) = counters.writes();
    assert!(written >= 1 && failed == 0);
    let state = decode(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!((state.pipeline.at, state.pipeline.rooms.rooms()), (Mono(host.now), 2));
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(counters.bytes(), std::fs::metadata(&path).unwrap().len());
    // Nothing is left beside it that the next one would stumble over.
    drop(Store::open(&path, Arc::default()).unwrap());
}

#[test]
fn the_pinned_rooms_are_the_last_to_be_left_out() {
    let mut host = Host::pinned();
    for room in 10..100 {
        host.receive(&metadata(room));
    }
    let mut saved = host.pipeline.save(Mono(host.now));
    saved.rooms.truncate(1);
    assert_eq!((saved.rooms.rooms(), saved.rooms.left_out()), (1, 90));
    let config = Config::default();
    let mut other = Pipeline::restore(Limits::default(), config, saved, &all_alive(), Mono(host.now));
    other.returned(Mono(host.now));
    assert_eq!(other.rooms().open().map(|r| r.room).collect::<Vec<_>>(), [ROOM]);
}

/// A file as the first release with this version writes it: releases to come must read it.
#[test]
fn the_first_file_of_this_version_still_reads() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/state/version-1");
    if std::env::var_os("ROOMTRACE_BLESS").is_some() && !path.exists() {
        let mut host = Host::pinned();
        host.receive(&metadata(ROOM + 1));
        let room = (ROOM + 1).to_string();
        host.receive(&message(&[b"ABORT", room.as_bytes(), b"10.0.0.2", b"41207", b"3"]));
        let pipeline = host.pipeline.save(Mono(host.now));
        let state = State { boot: "a boot".to_owned(), processes: [(ENGINE, 98765)].into(), pipeline };
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, encode(&state).unwrap()).unwrap();
    }
    let state = decode(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(state.processes.get(&ENGINE), Some(&98765));
    let (now, config) = (state.pipeline.at.plus(SECOND), Config::default());
    let mut pipeline = Pipeline::restore(Limits::default(), config, state.pipeline, &all_alive(), now);
    assert_eq!(pipeline.control().sockets(), 2);
    assert!(pipeline.rooms().snapshot(ROOM).pop().unwrap().pinned());
    pipeline.returned(now);
    assert_eq!(pipeline.rooms().open().count(), 2);
}

/// Numbers in a file are looked up, never trusted.
#[test]
fn a_file_with_a_good_checksum_and_wrong_numbers_does_no_harm() {
    let text = serde_json::to_string(&state()).unwrap();
    for (from, to) in [
        ("\"prefill\":0", "\"prefill\":4000000000"),
        ("\"target\":0", "\"target\":77"),
        ("\"session\":0", "\"session\":9"),
        ("\"home\":[0,1]", "\"home\":[5,4294967295]"),
        ("\"answered\":1", "\"answered\":4294967295"),
        ("\"required\":1", "\"required\":4294967295"),
        ("\"opened_at\":1000", "\"opened_at\":99991000"),
    ] {
        assert!(text.contains(from), "{from} in {text}");
        let state: State = serde_json::from_str(&text.replace(from, to)).unwrap();
        let now = Mono(START + 60 * SECOND);
        let mut p =
            Pipeline::restore(Limits::default(), Config::default(), state.pipeline, &all_alive(), now);
        p.returned(now);
        p.tick(now.plus(500 * SECOND));
        drop(p.save(now.plus(500 * SECOND)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_give_nothing(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(decode(&bytes).is_err());
        let line = [b"roomtrace-state 1 ".as_slice(), &bytes].concat();
        prop_assert!(decode(&line).is_err());
    }

    #[test]
    fn a_changed_file_gives_nothing_and_a_whole_one_the_same(at in any::<prop::sample::Index>(), bit in 0u8..8, cut in any::<prop::sample::Index>()) {
        static GOOD: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
        let good = GOOD.get_or_init(|| encode(&state()).unwrap());
        prop_assert_eq!(&encode(&decode(good).unwrap()).unwrap(), good);
        let mut bad = good.clone();
        bad[at.index(good.len())] ^= 1 << bit;
        prop_assert!(decode(&bad).is_err());
        prop_assert!(decode(&good[..cut.index(good.len())]).is_err());
    }
}
