//! RDMA ports and connections of a room's engines as JSON: `network` of the record, an entry for each port and for each rank's connections.
//!
//! Pure. Readings are of whole ports and processes and of every room that was handed over then; what was not measured is `null`, never
//! zero.

use serde::Serialize;

use super::clock::Clock;
use super::gpu::series;
use crate::network::model::Faults;
use crate::rooms::model::{NetworkWindow, Role, RoomSnapshot};

#[derive(Clone, Debug, Serialize)]
pub(super) struct NetworkJson {
    /// `rdma`: a port. `tcp`: what a rank's process has open that carries neither ZMTP nor HTTP.
    link: &'static str,
    /// The port (`mlx5_0/1`), or `connections`.
    name: String,
    role: &'static str,
    /// The process whose connections they are; `null`: a port.
    pid: Option<u32>,
    /// When the room's KV cache can have moved.
    transfer: [String; 2],
    /// What the bytes are of: bounds of the readings.
    window: [String; 2],
    /// Out; `null`: not measured.
    tx_bytes: Option<u64>,
    rx_bytes: Option<u64>,
    source: Option<&'static str>,
    /// How much of `transfer` was read, 0 to 1.
    coverage: Option<f64>,
    /// Rooms handed over by the same engine at any time of `transfer`, this one among them.
    overlapping_rooms: Option<u32>,
    /// Errors that the port counted.
    troubles: Vec<FaultJson>,
    /// Readings over the life of the room: from, to (seconds since it opened), bytes out, bytes in.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    series: Vec<(f64, f64, u64, u64)>,
}

#[derive(Clone, Debug, Serialize)]
struct FaultJson {
    what: &'static str,
    /// How many.
    value: u64,
    meaning: &'static str,
    from: String,
    to: String,
}

/// `None`: nothing of the room's network is known.
pub(super) fn network(room: &RoomSnapshot, clock: &Clock) -> Option<Vec<NetworkJson>> {
    let all = || room.network.iter().map(|w| entry(room, clock, w)).collect();
    (!room.network.is_empty()).then(all)
}

fn entry(room: &RoomSnapshot, clock: &Clock, w: &NetworkWindow) -> NetworkJson {
    let time = |at| clock.rfc3339(at);
    let moved = w.moved.as_ref();
    let (from, to) = moved.map_or((w.from, w.to), |l| (l.from, l.to));
    NetworkJson {
        link: w.link.label(),
        name: w.name.to_string(),
        role: Role::label(w.role),
        pid: w.pid,
        transfer: [time(w.from), time(w.to)],
        window: [time(from), time(to)],
        tx_bytes: moved.map(|l| l.out),
        rx_bytes: moved.map(|l| l.into),
        source: moved.map(|l| l.source.label()),
        coverage: moved.map(|l| f64::from(l.coverage) / 1000.0),
        overlapping_rooms: w.overlapping,
        troubles: w.faults.iter().map(|f| fault(f, clock)).collect(),
        series: series(room.opened_at, &w.series, w.link),
    }
}

fn fault(f: &Faults, clock: &Clock) -> FaultJson {
    FaultJson {
        what: f.what.label(),
        value: f.count,
        meaning: f.what.meaning(),
        from: clock.rfc3339(f.from),
        to: clock.rfc3339(f.to),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::super::testing::{EPOCH, room};
    use super::*;
    use crate::event::{Mono, SECOND};
    use crate::gpu::windows::{Link, Source, Stretch, Window};
    use crate::network::model::Fault;

    #[test]
    fn the_entry_is_exactly_this_and_what_is_not_measured_is_null() {
        let at = |s: u64| Mono(s * SECOND);
        let (link, source) = (Link::Rdma, Source::Counters);
        let port = NetworkWindow {
            name: "mlx5_0/1".into(),
            link,
            role: Role::Prefill,
            pid: None,
            from: at(2),
            to: at(8),
            moved: Some(Window { link, source, from: at(1), to: at(9), out: 0, into: 7, coverage: 950 }),
            overlapping: Some(3),
            faults: vec![Faults { from: at(4), to: at(5), what: Fault::AckTimeout, count: 2 }],
            series: vec![Stretch { link, source, from: at(1), to: at(9), out: 0, into: 7 }],
        };
        let connections = NetworkWindow {
            name: "connections".into(),
            link: Link::Tcp,
            pid: Some(4711),
            moved: None,
            overlapping: None,
            faults: Vec::new(),
            series: Vec::new(),
            ..port.clone()
        };
        let mut r = room(7);
        assert!(network(&r, &Clock::fixed(EPOCH)).is_none());
        (r.opened_at, r.network) = (at(1), vec![port, connections]);
        let got = serde_json::to_string_pretty(&network(&r, &Clock::fixed(EPOCH)).unwrap()).unwrap() + "\n";
        assert_eq!(got, include_str!("../../tests/fixtures/export/room_network.json"), "{got}");
    }
}
