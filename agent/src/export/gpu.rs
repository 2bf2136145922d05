//! GPUs of a room's ranks as JSON: `gpu` of the record, an entry for each link of each GPU that was read.
//!
//! Pure. Readings are of whole GPUs and of every room that was handed over then; what was not measured is `null`, never zero.

use serde::Serialize;

use super::clock::Clock;
use crate::event::Mono;
use crate::gpu::model::{Ailment, Trouble, recovery_meaning, slowed, xid_meaning};
use crate::gpu::windows::{Link, Stretch, Window};
use crate::rooms::model::{GpuWindow, Role, RoomSnapshot};

#[derive(Clone, Debug, Serialize)]
pub(super) struct GpuJson {
    uuid: String,
    role: &'static str,
    pid: u32,
    /// `null`: nothing that it moved was read, and the bytes are `null` as well.
    link: Option<&'static str>,
    /// When the room's KV cache can have moved.
    transfer: [String; 2],
    /// What the bytes are of: bounds of the readings.
    window: [String; 2],
    tx_bytes: Option<u64>,
    rx_bytes: Option<u64>,
    source: Option<&'static str>,
    /// How much of `transfer` was read, 0 to 1.
    coverage: Option<f64>,
    /// Rooms handed over by the same engine at any time of `transfer`, this one among them.
    overlapping_rooms: Option<u32>,
    /// Least and most of the shares of time in which a kernel ran.
    busy_percent: Option<[u8; 2]>,
    troubles: Vec<TroubleJson>,
    /// Readings over the life of the room: from, to (seconds since it opened), bytes out, bytes in.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    series: Vec<(f64, f64, u64, u64)>,
}

#[derive(Clone, Debug, Serialize)]
struct TroubleJson {
    what: &'static str,
    /// Number of the Xid, of the event, of the recovery action, or bits of the reasons; none of a GPU that is lost.
    value: Option<u64>,
    meaning: Option<String>,
    from: String,
    /// `null`: it is still so.
    to: Option<String>,
}

/// `None`: no GPU of the room is known.
pub(super) fn gpus(room: &RoomSnapshot, clock: &Clock) -> Option<Vec<GpuJson>> {
    let entries = room.gpus.iter().flat_map(|w| {
        let links = w.links.iter().map(move |l| entry(room, clock, w, Some(l)));
        let none = w.links.is_empty().then(|| entry(room, clock, w, None));
        links.chain(none)
    });
    Some(entries.collect::<Vec<_>>()).filter(|all| !all.is_empty())
}

fn entry(room: &RoomSnapshot, clock: &Clock, w: &GpuWindow, l: Option<&Window>) -> GpuJson {
    let time = |at| clock.rfc3339(at);
    let (from, to) = l.map_or((w.from, w.to), |l| (l.from, l.to));
    GpuJson {
        uuid: w.gpu.to_string(),
        role: Role::label(w.role),
        pid: w.pid,
        link: l.map(|l| l.link.label()),
        transfer: [time(w.from), time(w.to)],
        window: [time(from), time(to)],
        tx_bytes: l.map(|l| l.out),
        rx_bytes: l.map(|l| l.into),
        source: l.map(|l| l.source.label()),
        coverage: l.map(|l| f64::from(l.coverage) / 1000.0),
        overlapping_rooms: w.overlapping,
        busy_percent: w.computing.map(|c| [c.least, c.most]),
        troubles: w.troubles.iter().map(|t| trouble(t, clock)).collect(),
        series: l.map_or_else(Vec::new, |l| series(room.opened_at, &w.series, l.link)),
    }
}

pub(super) fn series(opened: Mono, readings: &[Stretch], link: Link) -> Vec<(f64, f64, u64, u64)> {
    // Readings may begin before the room.
    #[allow(clippy::cast_precision_loss, reason = "times for a graph")]
    let seconds = |at: Mono| {
        let nanos = if at >= opened { at.since(opened) as f64 } else { -(opened.since(at) as f64) };
        (nanos / 1e6).round() / 1e3
    };
    let of = readings.iter().filter(|s| s.link == link);
    of.map(|s| (seconds(s.from), seconds(s.to), s.out, s.into)).collect()
}

/// Its name, number and meaning.
pub(super) fn named(what: Ailment) -> (&'static str, Option<u64>, Option<String>) {
    match what {
        Ailment::Xid(n) => ("xid", Some(n), xid_meaning(n).map(str::to_owned)),
        Ailment::Event(bits) => ("event", Some(bits), None),
        Ailment::Lost => ("lost", None, Some("it does not answer the driver".to_owned())),
        Ailment::Recovery(action) => {
            ("recovery_action", Some(action), Some(recovery_meaning(action).to_owned()))
        }
        Ailment::Slowed(reasons) => {
            ("slowed", Some(reasons), Some(slowed(reasons).collect::<Vec<_>>().join(", ")))
        }
    }
}

fn trouble(t: &Trouble, clock: &Clock) -> TroubleJson {
    let (what, value, meaning) = named(t.what);
    TroubleJson { what, value, meaning, from: clock.rfc3339(t.from), to: t.to.map(|at| clock.rfc3339(at)) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use smallvec::smallvec;

    use super::super::testing::{EPOCH, room};
    use super::*;
    use crate::event::SECOND;
    use crate::gpu::windows::{Computing, Source};

    fn at(s: u64) -> Mono {
        Mono(s * SECOND)
    }

    #[test]
    fn the_entry_is_exactly_this_and_what_is_not_measured_is_null() {
        let mut r = room(7);
        r.opened_at = at(1);
        let read = Window {
            link: Link::Pcie,
            source: Source::Gpm,
            from: at(1),
            to: at(9),
            out: 0,
            into: 7,
            coverage: 950,
        };
        let stretch =
            Stretch { link: Link::Pcie, source: Source::Gpm, from: at(0), to: at(9), out: 0, into: 7 };
        let window = GpuWindow {
            gpu: "GPU-a".into(),
            role: Role::Prefill,
            pid: 4711,
            from: at(2),
            to: at(8),
            links: smallvec![read],
            computing: Some(Computing { least: 0, most: 4, coverage: 1000 }),
            overlapping: Some(3),
            troubles: vec![Trouble { from: at(5), to: Some(at(5)), what: Ailment::Xid(79) }],
            series: vec![stretch],
        };
        let unread = GpuWindow {
            links: smallvec![],
            computing: None,
            overlapping: None,
            troubles: Vec::new(),
            series: Vec::new(),
            ..window.clone()
        };
        assert!(gpus(&r, &Clock::fixed(EPOCH)).is_none());
        r.gpus = vec![window, unread];
        let got = serde_json::to_string_pretty(&gpus(&r, &Clock::fixed(EPOCH)).unwrap()).unwrap() + "\n";
        assert_eq!(got, include_str!("../../tests/fixtures/export/room_gpu.json"), "{got}");
    }
}
