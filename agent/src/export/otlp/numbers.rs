//! What a room's engines said in numbers, in its spans: an event for each content of their answers, at the last of them.
//!
//! Pure. What an engine does not tell is absent.

use std::time::SystemTime;

use opentelemetry::KeyValue;
use opentelemetry::trace::Event as SpanEvent;

use super::spans::{number, seconds};
use crate::event::Mono;
use crate::rooms::model::{EngineNumbers, Role, RoomSnapshot};

/// Events for the span of this side; a room has few.
pub(super) fn events(
    room: &RoomSnapshot,
    role: Role,
    wall: impl Fn(Mono) -> SystemTime + Copy,
) -> impl Iterator<Item = SpanEvent> {
    room.numbers.iter().filter(move |n| n.role == role).map(move |n| said(n, wall))
}

fn said(n: &EngineNumbers, wall: impl Fn(Mono) -> SystemTime) -> SpanEvent {
    let mut attributes = vec![
        KeyValue::new("sglang.pd.engine.answers", i64::from(n.answers)),
        KeyValue::new("sglang.pd.engine.window_s", seconds(n.from, n.to)),
        KeyValue::new("sglang.pd.engine.stale", n.stale),
    ];
    let counts = ["inflight", "bootstrap", "waiting", "running", "paused"].into_iter().zip(n.counts());
    attributes.extend(
        counts.filter_map(|(name, n)| Some(KeyValue::new(format!("sglang.pd.engine.{name}"), number(n?)))),
    );
    attributes.extend(n.moves.map(|moves| KeyValue::new("sglang.pd.engine.progress_moves", moves)));
    SpanEvent::new("engine_numbers", wall(n.to), attributes, 0)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::export::testing::room;

    #[test]
    fn what_an_engine_tells_is_an_event_of_its_side_and_what_it_does_not_is_absent() {
        let mut r = room(7);
        let said = EngineNumbers {
            role: Role::Prefill,
            from: Mono(0),
            to: Mono(1),
            answers: 2,
            inflight: Some(1),
            bootstrap: None,
            waiting: Some(0),
            running: None,
            paused: None,
            moves: None,
            stale: false,
        };
        r.numbers = vec![said, EngineNumbers { role: Role::Decode, ..said }];
        let epoch = |at: Mono| SystemTime::UNIX_EPOCH + std::time::Duration::from_nanos(at.0);
        let all: Vec<SpanEvent> = events(&r, Role::Prefill, epoch).collect();
        assert_eq!(all.len(), 1);
        let value = |key: &str| {
            let of = &all.first().unwrap().attributes;
            of.iter()
                .find(|kv| kv.key.as_str() == format!("sglang.pd.engine.{key}"))
                .map(|kv| kv.value.to_string())
        };
        assert_eq!([value("inflight"), value("waiting")].map(Option::unwrap), ["1", "0"]);
        assert_eq!([value("running"), value("progress_moves")], [None, None]);
    }
}
