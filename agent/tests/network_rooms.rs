//! Readings of RDMA ports and of ranks' connections, and rooms: which windows a room has, of how many rooms they are, that bytes alone
//! raise nothing, and that those which no other room explains hold `likely` back.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod rooms_support;

use rooms_support::{Sees, World, decode, prefill};
use roomtrace::event::{Mono, SECOND};
use roomtrace::gpu::windows::{Link, Source, Stretch};
use roomtrace::network::model::{Fault, Of, Reading, What};
use roomtrace::rooms::model::{EngineGauges, EngineProcess, Input, NetworkWindow, Role};
use roomtrace::verdict::model::Confidence;

const ROOM: u64 = 9_000_000_000_000_000_005;

fn port(name: &str) -> Of {
    Of::Port(name.into())
}

/// A reading of the last second.
fn read(w: &mut World, of: Of, out: u64) {
    let (at, link) = (w.mono(), if matches!(of, Of::Port(_)) { Link::Rdma } else { Link::Tcp });
    let from = Mono(at.0 - SECOND);
    let what = What::Moved(Stretch { link, source: Source::Counters, from, to: at, out, into: 0 });
    w.input(&Input::Network(&Reading { at, of, what }));
}

/// Prefill's host with two ports, read for the first time, and a rank whose arguments name `cards`.
fn world(cards: &[&str]) -> World {
    let mut w = World::new(Sees::Prefill);
    w.outlives = false;
    w.register(&decode(0), &prefill(0));
    let ib_devices = cards.iter().map(|card| (*card).to_owned()).collect();
    let pid = prefill(0).pid;
    let process =
        EngineProcess { pid, server: pid, role: Some(Role::Prefill), ib_devices, ..EngineProcess::default() };
    let at = w.mono();
    w.input(&Input::Process { at, process: &process });
    w.wait(1000);
    for name in ["mlx5_0/1", "mlx5_1/1"] {
        read(&mut w, port(name), 1);
    }
    w
}

fn windows(w: &World, room: u64) -> Vec<NetworkWindow> {
    w.table.details(room).pop().unwrap().network
}

fn named<'a>(windows: &'a [NetworkWindow], name: &str) -> &'a NetworkWindow {
    windows.iter().find(|w| &*w.name == name).unwrap()
}

#[test]
fn a_port_is_whole_for_every_room_that_was_handed_over_then() {
    let mut w = world(&[]);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.metadata(ROOM + 1, &decode(0), &prefill(0));
    for _ in 0..3 {
        w.wait(1000);
        read(&mut w, port("mlx5_0/1"), 1000);
        read(&mut w, Of::Process(prefill(0).pid), 10);
        read(&mut w, Of::Process(999), 1 << 40);
    }
    for room in [ROOM, ROOM + 1] {
        let all = windows(&w, room);
        let names: Vec<&str> = all.iter().map(|w| &*w.name).collect();
        assert_eq!(names, ["mlx5_0/1", "mlx5_1/1", "connections"], "all ports where none is named");
        let one = named(&all, "mlx5_0/1");
        assert_eq!((one.moved.unwrap().out, one.overlapping, one.pid), (3000, Some(2), None));
        assert_eq!((one.series.len(), one.moved.unwrap().coverage), (3, 1000), "{one:?}");
        let tcp = named(&all, "connections");
        assert_eq!((tcp.link, tcp.moved.unwrap().out, tcp.pid), (Link::Tcp, 30, Some(prefill(0).pid)));
    }
}

#[test]
fn time_that_was_not_read_is_not_measured() {
    let mut w = world(&[]);
    w.wait(500);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(1500);
    assert_eq!(named(&windows(&w, ROOM), "mlx5_0/1").moved, None, "never zero");
    read(&mut w, port("mlx5_0/1"), 0);
    w.wait(2500);
    let moved = named(&windows(&w, ROOM), "mlx5_0/1").moved.unwrap();
    assert_eq!((moved.out, moved.coverage), (0, 250), "one second of four");
}

#[test]
fn the_cards_that_the_engine_names_are_its_own() {
    let mut w = world(&["mlx5_1", "mlx5_9"]);
    w.metadata(ROOM, &decode(0), &prefill(0));
    w.wait(1000);
    let names: Vec<String> = windows(&w, ROOM).iter().map(|w| w.name.to_string()).collect();
    assert_eq!(names, ["mlx5_1/1"]);
}

#[test]
fn bytes_and_errors_are_evidence_and_decide_nothing() {
    let after = |readings: &dyn Fn(&mut World)| {
        let mut w = world(&[]);
        w.metadata(ROOM, &decode(0), &prefill(0));
        for _ in 0..90 {
            w.wait(1000);
            readings(&mut w);
        }
        let v = w.verdict(ROOM);
        (v.class, v.confidence, v.evidence.join("\n"))
    };
    let (class, confidence, without) = after(&|_| ());
    assert_eq!(confidence, Confidence::Possible);
    for out in [0, 1 << 40] {
        let (c, how, evidence) = after(&|w| {
            read(w, port("mlx5_0/1"), out);
            read(w, Of::Process(prefill(0).pid), out);
            let (at, from) = (w.mono(), Mono(w.mono().0 - SECOND));
            let what = What::Faults(from, Fault::AckTimeout, 1);
            w.input(&Input::Network(&Reading { at, of: port("mlx5_0/1"), what }));
        });
        assert_eq!((c, how), (class, confidence), "{evidence}");
        for line in [
            "RDMA port mlx5_0/1 (prefill): rdma: ",
            "TCP connections of prefill process 100",
            "local_ack_timeout_err",
        ] {
            assert!(evidence.contains(line) && !without.contains("rdma: 1"), "{line}: {evidence}");
        }
    }
    assert!(without.contains("what moved is not measured"), "{without}");
}

/// So many seconds in which `readings` come and the engine says that it neither computes nor queues.
fn stands_still(w: &mut World, seconds: u64, readings: impl Fn(&mut World)) {
    for _ in 0..seconds {
        w.wait(1000);
        readings(w);
        let gauges = EngineGauges {
            server: prefill(0).pid,
            role: Some(Role::Prefill),
            inflight: Some(1),
            waiting: Some(0),
            running: Some(0),
            progress: Some(7),
            ..EngineGauges::default()
        };
        let at = w.mono();
        w.input(&Input::Gauges { at, gauges: &gauges });
    }
}

#[test]
fn a_slow_transfer_over_tcp_or_rdma_is_not_likely_before_it_stops() {
    for of in [Of::Process(prefill(0).pid), port("mlx5_0/1")] {
        let mut w = world(&[]);
        w.metadata(ROOM, &decode(0), &prefill(0));
        stands_still(&mut w, 40, |w| read(w, of.clone(), 20_000_000));
        let v = w.verdict(ROOM);
        assert_eq!(v.confidence, Confidence::Possible, "{:?}", v.evidence);
        assert!(v.evidence.iter().any(|e| e.contains("MiB a second left")), "{:?}", v.evidence);
        stands_still(&mut w, 5, |w| read(w, of.clone(), 0));
        assert_eq!(w.verdict(ROOM).confidence, Confidence::Possible);
        stands_still(&mut w, 8, |w| read(w, of.clone(), 0));
        assert_eq!(w.verdict(ROOM).confidence, Confidence::Likely);
    }
}

/// Ranks that agree on every turn of their loops send as much as they get; another process's bytes are none of this one's.
#[test]
fn what_goes_both_ways_or_is_anothers_withholds_nothing() {
    let both = |w: &mut World| {
        let (at, from) = (w.mono(), Mono(w.mono().0 - SECOND));
        let (link, source, out, into) = (Link::Tcp, Source::Counters, 20_000_000, 19_000_000);
        let what = What::Moved(Stretch { link, source, from, to: at, out, into });
        w.input(&Input::Network(&Reading { at, of: Of::Process(prefill(0).pid), what }));
    };
    let other = |w: &mut World| read(w, Of::Process(4242), 20_000_000);
    let readings: [&dyn Fn(&mut World); 2] = [&both, &other];
    for readings in readings {
        let mut w = world(&[]);
        w.metadata(ROOM, &decode(0), &prefill(0));
        stands_still(&mut w, 20, readings);
        let v = w.verdict(ROOM);
        assert_eq!(v.confidence, Confidence::Likely, "{:?}", v.evidence);
    }
}

#[test]
fn a_reading_is_the_same_after_a_recording() {
    let stretch =
        Stretch { link: Link::Tcp, source: Source::Counters, from: Mono(1), to: Mono(2), out: 3, into: 4 };
    for (of, what) in
        [(Of::Process(7), What::Moved(stretch)), (port("a/1"), What::Faults(Mono(1), Fault::LinkDowned, 2))]
    {
        let reading = Reading { at: Mono(9), of, what };
        let text = serde_json::to_string(&reading).unwrap();
        assert_eq!(serde_json::from_str::<Reading>(&text).unwrap(), reading, "{text}");
    }
}
