//! GPUs of a room's ranks in its spans: an event for each link of each GPU that was read, at the end of its window, and one for each
//! error. `hw.id` is the GPU's name.
//!
//! Pure.

use std::time::SystemTime;

use opentelemetry::KeyValue;
use opentelemetry::trace::Event as SpanEvent;

use super::spans::{number, seconds};
use crate::event::Mono;
use crate::export::gpu::named;
use crate::gpu::model::Trouble;
use crate::gpu::windows::Window;
use crate::rooms::model::{GpuWindow, Role, RoomSnapshot};

/// Events about GPUs in one span at most.
const EVENTS: usize = 64;

/// The GPU of this side, where it is one.
pub(super) fn hardware(room: &RoomSnapshot, role: Role) -> Option<KeyValue> {
    let mut all = of(room, role);
    let only = all.next().filter(|_| all.next().is_none())?;
    Some(KeyValue::new("hw.id", only.gpu.to_string()))
}

/// Events for the span of this side.
pub(super) fn events(
    room: &RoomSnapshot,
    role: Role,
    wall: impl Fn(Mono) -> SystemTime + Copy,
) -> impl Iterator<Item = SpanEvent> {
    let events = of(room, role).flat_map(move |w| {
        let moved = w.links.iter().map(move |l| moved(w, l, wall));
        moved.chain(w.troubles.iter().map(move |t| trouble(w, t, wall)))
    });
    events.take(EVENTS)
}

fn of(room: &RoomSnapshot, role: Role) -> impl Iterator<Item = &GpuWindow> {
    room.gpus.iter().filter(move |w| w.role == role)
}

fn moved(w: &GpuWindow, l: &Window, wall: impl Fn(Mono) -> SystemTime) -> SpanEvent {
    let mut attributes = vec![
        KeyValue::new("hw.id", w.gpu.to_string()),
        KeyValue::new("sglang.pd.gpu.link", l.link.label()),
        KeyValue::new("sglang.pd.gpu.source", l.source.label()),
        KeyValue::new("sglang.pd.gpu.tx_bytes", number(l.out)),
        KeyValue::new("sglang.pd.gpu.rx_bytes", number(l.into)),
        KeyValue::new("sglang.pd.gpu.window_s", seconds(l.from, l.to)),
        KeyValue::new("sglang.pd.gpu.coverage", f64::from(l.coverage) / 1000.0),
    ];
    let overlapping = w.overlapping.map(u64::from);
    attributes.extend(overlapping.map(|n| KeyValue::new("sglang.pd.gpu.overlapping_rooms", number(n))));
    SpanEvent::new("gpu_copy_activity", wall(w.to), attributes, 0)
}

fn trouble(w: &GpuWindow, t: &Trouble, wall: impl Fn(Mono) -> SystemTime) -> SpanEvent {
    let (what, value, meaning) = named(t.what);
    let mut attributes =
        vec![KeyValue::new("hw.id", w.gpu.to_string()), KeyValue::new("sglang.pd.gpu.trouble", what)];
    let value = value.and_then(|n| i64::try_from(n).ok());
    attributes.extend(value.map(|n| KeyValue::new("sglang.pd.gpu.trouble_code", n)));
    attributes.extend(meaning.map(|m| KeyValue::new("sglang.pd.gpu.trouble_meaning", m)));
    SpanEvent::new("gpu_trouble", wall(t.from), attributes, 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use smallvec::smallvec;

    use super::*;
    use crate::event::SECOND;
    use crate::export::testing::room;
    use crate::gpu::model::Ailment;
    use crate::gpu::windows::{Link, Source};

    #[test]
    fn each_link_and_each_trouble_of_the_side_is_an_event_with_the_gpus_name() {
        let mut r = room(7);
        let link = Window {
            link: Link::Pcie,
            source: Source::Gpm,
            from: Mono(0),
            to: Mono(2 * SECOND),
            out: 5,
            into: 6,
            coverage: 500,
        };
        let of = |role, gpu: &str| GpuWindow {
            gpu: gpu.into(),
            role,
            pid: 1,
            from: Mono(0),
            to: Mono(2 * SECOND),
            links: smallvec![link],
            computing: None,
            overlapping: None,
            troubles: vec![Trouble { from: Mono(SECOND), to: None, what: Ailment::Lost }],
            series: Vec::new(),
        };
        r.gpus = vec![of(Role::Prefill, "GPU-a"), of(Role::Decode, "GPU-b")];
        let epoch = |at: Mono| SystemTime::UNIX_EPOCH + std::time::Duration::from_nanos(at.0);
        let all: Vec<SpanEvent> = events(&r, Role::Prefill, epoch).collect();
        let names: Vec<&str> = all.iter().map(|e| e.name.as_ref()).collect();
        assert_eq!(names, ["gpu_copy_activity", "gpu_trouble"]);
        let value = |e: &SpanEvent, key: &str| {
            e.attributes.iter().find(|kv| kv.key.as_str() == key).map(|kv| kv.value.to_string())
        };
        let first = all.first().unwrap();
        for (key, wanted) in
            [("hw.id", "GPU-a"), ("sglang.pd.gpu.tx_bytes", "5"), ("sglang.pd.gpu.coverage", "0.5")]
        {
            assert_eq!(value(first, key).as_deref(), Some(wanted));
        }
        assert_eq!(value(first, "sglang.pd.gpu.overlapping_rooms"), None, "not known is absent");
        assert_eq!(hardware(&r, Role::Decode).unwrap().value.to_string(), "GPU-b");
        r.gpus.push(of(Role::Decode, "GPU-c"));
        assert!(hardware(&r, Role::Decode).is_none(), "which of them is not one answer");
    }
}
