//! RDMA ports and connections of a room's engines in its spans: an event for each that was read, at the end of its window.
//!
//! Pure.

use std::time::SystemTime;

use opentelemetry::KeyValue;
use opentelemetry::trace::Event as SpanEvent;

use super::spans::{number, seconds};
use crate::event::Mono;
use crate::gpu::windows::Window;
use crate::rooms::model::{NetworkWindow, Role, RoomSnapshot};

/// Events for the span of this side; a room has few windows.
pub(super) fn events(
    room: &RoomSnapshot,
    role: Role,
    wall: impl Fn(Mono) -> SystemTime + Copy,
) -> impl Iterator<Item = SpanEvent> {
    let of = room.network.iter().filter(move |w| w.role == role);
    of.filter_map(move |w| Some(moved(w, w.moved.as_ref()?, wall)))
}

fn moved(w: &NetworkWindow, l: &Window, wall: impl Fn(Mono) -> SystemTime) -> SpanEvent {
    let mut attributes = vec![
        KeyValue::new("sglang.pd.network.name", w.name.to_string()),
        KeyValue::new("sglang.pd.network.link", w.link.label()),
        KeyValue::new("sglang.pd.network.source", l.source.label()),
        KeyValue::new("sglang.pd.network.tx_bytes", number(l.out)),
        KeyValue::new("sglang.pd.network.rx_bytes", number(l.into)),
        KeyValue::new("sglang.pd.network.window_s", seconds(l.from, l.to)),
        KeyValue::new("sglang.pd.network.coverage", f64::from(l.coverage) / 1000.0),
    ];
    attributes.extend(w.pid.map(|pid| KeyValue::new("process.pid", i64::from(pid))));
    let overlapping = w.overlapping.map(u64::from);
    attributes.extend(overlapping.map(|n| KeyValue::new("sglang.pd.network.overlapping_rooms", number(n))));
    for fault in &w.faults {
        attributes.push(KeyValue::new(
            format!("sglang.pd.network.{}", fault.what.label()),
            number(w.faults.iter().filter(|f| f.what == fault.what).map(|f| f.count).sum()),
        ));
    }
    attributes.sort_by(|a, b| a.key.cmp(&b.key));
    attributes.dedup_by(|a, b| a.key == b.key);
    SpanEvent::new("network_activity", wall(w.to), attributes, 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::event::SECOND;
    use crate::export::testing::room;
    use crate::gpu::windows::{Link, Source};
    use crate::network::model::{Fault, Faults};

    #[test]
    fn what_was_read_is_an_event_of_its_side_and_what_was_not_is_none() {
        let (link, at) = (Link::Rdma, Mono(2 * SECOND));
        let fault = |count| Faults { from: Mono(0), to: at, what: Fault::AckTimeout, count };
        let read = NetworkWindow {
            name: "mlx5_0/1".into(),
            link,
            role: Role::Prefill,
            pid: None,
            from: Mono(0),
            to: at,
            moved: Some(Window {
                link,
                source: Source::Counters,
                from: Mono(0),
                to: at,
                out: 5,
                into: 6,
                coverage: 500,
            }),
            overlapping: None,
            faults: vec![fault(2), fault(3)],
            series: Vec::new(),
        };
        let unread = NetworkWindow { moved: None, ..read.clone() };
        let other = NetworkWindow { role: Role::Decode, ..read.clone() };
        let mut r = room(7);
        r.network = vec![read, unread, other];
        let epoch = |at: Mono| SystemTime::UNIX_EPOCH + std::time::Duration::from_nanos(at.0);
        let all: Vec<SpanEvent> = events(&r, Role::Prefill, epoch).collect();
        assert_eq!(all.len(), 1);
        let value = |key: &str| {
            all.first()
                .unwrap()
                .attributes
                .iter()
                .find(|kv| kv.key.as_str() == key)
                .map(|kv| kv.value.to_string())
        };
        for (key, wanted) in [("name", "mlx5_0/1"), ("tx_bytes", "5"), ("local_ack_timeout_err", "5")] {
            assert_eq!(value(&format!("sglang.pd.network.{key}")).as_deref(), Some(wanted));
        }
        assert_eq!(value("sglang.pd.network.overlapping_rooms"), None, "not known is absent");
    }
}
