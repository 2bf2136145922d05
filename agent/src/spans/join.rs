//! Spans of one trace, collected until the span that names the room has come: an engine sends that one last, when the request
//! has ended.
//!
//! Pure: time is an argument. Bounded: at most [`MAX_NODES`] spans wait, of one trace at most [`TRACE_NODES`]; stages of one
//! name in one thread are one, however many there are (`decode_loop` is one per token). The oldest trace makes way.

use std::collections::VecDeque;

use hashbrown::HashMap;
use smallvec::SmallVec;

use super::decode::{SchedulerSpan, SpanId, TraceId, What};
use crate::event::{Mono, SECOND};
use crate::rooms::model::Role;

/// Spans that wait for the span of their request, or for more of it, at most; about 10 MiB.
pub const MAX_NODES: usize = 131_072;

/// Threads and stages of one trace kept at most.
const TRACE_NODES: usize = 96;

/// Requests of one trace kept at most; only where a client began the trace are there more than two.
const TRACE_REQUESTS: usize = 16;

/// The processes of an engine send apart, each every 0.5 s (0.5.5 and later) or every 5 s (before): so long after the request
/// its last stages can come.
pub(crate) const SETTLED: u64 = 6 * SECOND;

/// A trace without a request is kept this long after its last span. What is pinned for longer has told what it has to tell.
const KEEP: u64 = 3600 * SECOND;

/// Traces looked at in one turn of the clock.
const TURN: usize = 4096;

/// What one engine's scheduler said of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineRequest {
    /// The engine's role, where its spans tell.
    pub role: Option<Role>,
    /// Request id.
    pub rid: Box<str>,
    /// The engine's own trace.
    pub trace: TraceId,
    /// Span of the request in it.
    pub span: SpanId,
    /// Arrival. All times are the engine's, good to some milliseconds.
    pub begin: Mono,
    /// End.
    pub end: Mono,
    /// It ended with an error.
    pub failed: bool,
    /// Its stages, by their beginning.
    pub stages: Vec<Stage>,
}

/// A stage of a request: all spans of one name, of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Name (`prefill_forward`).
    pub name: Box<str>,
    /// Begin of the first.
    pub begin: Mono,
    /// End of the last.
    pub end: Mono,
    /// How many.
    pub spans: u32,
}

/// Counts since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JoinCounters {
    /// Spans taken.
    pub spans: u64,
    /// Requests that named a room of this host and were joined to it.
    pub joined: u64,
    /// Requests that named a room which is not known here, or no more.
    pub unmatched: u64,
    /// Requests without a room: not disaggregated, or its number went elsewhere (0.5.5–0.5.9 behind a router that traces).
    pub without_room: u64,
    /// Spans left out of a trace that had too many.
    pub left_out: u64,
    /// Traces given up before their request came: too many waited.
    pub evicted: u64,
    /// Traces whose request never came.
    pub expired: u64,
    /// Traces that wait now.
    pub waiting: u64,
}

#[derive(Debug, Default)]
struct Trace {
    last: Mono,
    rooms: SmallVec<[(SpanId, u64); 1]>,
    requests: SmallVec<[Request; 1]>,
    nodes: Vec<Node>,
}

#[derive(Debug)]
struct Request {
    id: SpanId,
    parent: SpanId,
    rid: Box<str>,
    room: Option<u64>,
    role: Option<Role>,
    begin: Mono,
    end: Mono,
    failed: bool,
}

/// A thread, or the stages of one name in it.
#[derive(Debug)]
struct Node {
    first: SpanId,
    last: SpanId,
    parent: SpanId,
    after: SpanId,
    /// `None`: a thread.
    stage: Option<Stage>,
}

impl Trace {
    fn size(&self) -> usize {
        1 + self.rooms.len() + self.requests.len() + self.nodes.len()
    }

    /// `false`: there is no place for it.
    fn add(&mut self, span: &SchedulerSpan, mono: impl Fn(u64) -> Mono) -> bool {
        let (begin, end) = (mono(span.begin), mono(span.end));
        match &span.what {
            What::Room { room } => {
                let fits = self.rooms.len() < TRACE_REQUESTS;
                if fits {
                    self.rooms.push((span.id, *room));
                }
                fits
            }
            What::Request { rid, room, role } => {
                let fits = self.requests.len() < TRACE_REQUESTS;
                if fits {
                    self.requests.push(Request {
                        id: span.id,
                        parent: span.parent,
                        rid: rid.clone(),
                        room: *room,
                        role: *role,
                        begin,
                        end,
                        failed: span.failed,
                    });
                }
                fits
            }
            What::Thread { .. } => self.node(span, None),
            What::Stage(name) => self.node(span, Some(Stage { name: name.clone(), begin, end, spans: 1 })),
        }
    }

    fn node(&mut self, span: &SchedulerSpan, stage: Option<Stage>) -> bool {
        if let Some(new) = &stage {
            let same = |n: &&mut Node| {
                n.parent == span.parent && n.stage.as_ref().is_some_and(|s| s.name == new.name)
            };
            if let Some(Node { last, stage: Some(known), .. }) = self.nodes.iter_mut().find(same) {
                *last = span.id;
                known.merge(new);
                return true;
            }
        }
        let fits = self.nodes.len() < TRACE_NODES;
        if fits {
            let (first, last) = (span.id, span.id);
            self.nodes.push(Node { first, last, parent: span.parent, after: span.after, stage });
        }
        fits
    }

    fn room_of(&self, request: &Request) -> Option<u64> {
        let above = || self.rooms.iter().find(|(id, _)| *id == request.parent).map(|(_, room)| *room);
        request.room.or_else(above)
    }

    /// Which request each node is of. Surely: what is within it. The span of a thread that has not ended is missing, so
    /// else: what came after a stage of it. A trace that SGLang began itself is of one request alone (one room until 0.5.9).
    fn owners(&self, id: TraceId) -> Vec<Option<usize>> {
        // SGLang's ids have 64 bits; a client's have 128.
        let own = u128::from_be_bytes(id.0) <= u128::from(u64::MAX);
        if own && self.requests.len() == 1 { vec![Some(0); self.nodes.len()] } else { self.followed() }
    }

    fn followed(&self) -> Vec<Option<usize>> {
        let mut owners = vec![None; self.nodes.len()];
        let mut known: HashMap<SpanId, usize> =
            self.requests.iter().enumerate().map(|(i, request)| (request.id, i)).collect();
        loop {
            let within = |n: &Node| known.get(&n.parent).copied();
            let after = |n: &Node| known.get(&n.after).copied();
            let mut found = self.newly(&owners, within);
            if found.is_empty() {
                // One at a time: what is within comes first.
                found = self.newly(&owners, after);
                found.truncate(1);
            }
            if found.is_empty() {
                return owners;
            }
            for (at, owner) in found {
                if let (Some(place), Some(node)) = (owners.get_mut(at), self.nodes.get(at)) {
                    *place = Some(owner);
                    for id in [node.first, node.last, node.parent] {
                        known.entry(id).or_insert(owner);
                    }
                }
            }
        }
    }

    fn newly(
        &self,
        owners: &[Option<usize>],
        owner: impl Fn(&Node) -> Option<usize>,
    ) -> SmallVec<[(usize, usize); 8]> {
        let open = self.nodes.iter().zip(owners).enumerate().filter(|(_, (_, o))| o.is_none());
        open.filter_map(|(at, (node, _))| Some((at, owner(node)?))).collect()
    }

    fn request(&self, trace: TraceId, at: usize, owners: &[Option<usize>]) -> Option<EngineRequest> {
        let r = self.requests.get(at)?;
        let mut stages: Vec<Stage> = Vec::new();
        for (node, _) in self.nodes.iter().zip(owners).filter(|(_, owner)| **owner == Some(at)) {
            let Some(stage) = &node.stage else { continue };
            match stages.iter_mut().find(|s| s.name == stage.name) {
                Some(known) => known.merge(stage),
                None => stages.push(stage.clone()),
            }
        }
        stages.sort_by_key(|s| (s.begin, s.end));
        let (rid, span) = (r.rid.clone(), r.id);
        let role = r.role.or_else(|| role_of(&stages));
        Some(EngineRequest { role, rid, trace, span, begin: r.begin, end: r.end, failed: r.failed, stages })
    }
}

impl Stage {
    fn merge(&mut self, other: &Self) {
        self.begin = self.begin.min(other.begin);
        self.end = self.end.max(other.end);
        self.spans = self.spans.saturating_add(other.spans);
    }
}

/// By stages that only one role has.
fn role_of(stages: &[Stage]) -> Option<Role> {
    stages.iter().find_map(|s| match &*s.name {
        "prefill_bootstrap" | "prefill_transfer_kv_cache" => Some(Role::Prefill),
        "decode_bootstrap" | "decode_transferred" => Some(Role::Decode),
        _ => None,
    })
}

/// Traces that wait.
#[derive(Debug, Default)]
pub(crate) struct Joiner {
    traces: HashMap<TraceId, Trace>,
    /// Traces by when they are looked at next; of each that is known there is one.
    order: VecDeque<(Mono, TraceId)>,
    size: usize,
    pub(crate) counters: JoinCounters,
}

impl Joiner {
    /// Takes spans. `offset`: wall clock − monotonic clock, nanoseconds. What can be said of rooms now is appended.
    pub(crate) fn take(
        &mut self,
        at: Mono,
        offset: i64,
        spans: &[SchedulerSpan],
        joined: &mut Vec<(u64, EngineRequest)>,
    ) {
        let mono = |unix: u64| Mono(u64::try_from(i128::from(unix) - i128::from(offset)).unwrap_or(0));
        let mut changed: SmallVec<[TraceId; 8]> = SmallVec::new();
        for span in spans {
            self.counters.spans += 1;
            let trace = self.traces.entry(span.trace).or_insert_with(|| {
                self.order.push_back((at.plus(SETTLED), span.trace));
                self.size += 1;
                Trace::default()
            });
            trace.last = at;
            let before = trace.size();
            if !trace.add(span, mono) {
                self.counters.left_out += 1;
            }
            self.size += trace.size() - before;
            if let (What::Request { .. }, None) =
                (&span.what, trace.requests.last().and_then(|r| trace.room_of(r)))
            {
                self.counters.without_room += 1;
            }
            if changed.last() != Some(&span.trace) {
                changed.push(span.trace);
            }
        }
        changed.sort_unstable();
        changed.dedup();
        for id in changed {
            self.tell(id, joined);
        }
        while self.size > MAX_NODES && self.give_up() {}
    }

    fn tell(&self, id: TraceId, joined: &mut Vec<(u64, EngineRequest)>) {
        let Some(trace) = self.traces.get(&id).filter(|t| !t.requests.is_empty()) else { return };
        let owners = trace.owners(id);
        for (at, request) in trace.requests.iter().enumerate() {
            if let Some(room) = trace.room_of(request) {
                joined.extend(trace.request(id, at, &owners).map(|r| (room, r)));
            }
        }
    }

    /// Gives the trace up that has waited longest; `false`: there is none.
    fn give_up(&mut self) -> bool {
        let Some((_, id)) = self.order.pop_front() else { return false };
        if let Some(trace) = self.traces.remove(&id) {
            self.size -= trace.size();
            self.counters.evicted += u64::from(trace.requests.is_empty());
        }
        true
    }

    /// Lets time pass.
    pub(crate) fn tick(&mut self, now: Mono) {
        for _ in 0..TURN {
            let Some((_, id)) = self.order.front().copied().filter(|(due, _)| *due <= now) else { break };
            self.order.pop_front();
            let Some(trace) = self.traces.get(&id) else { continue };
            let told = !trace.requests.is_empty();
            let idle = now.since(trace.last);
            if idle >= if told { SETTLED } else { KEEP } {
                self.size -= trace.size();
                self.counters.expired += u64::from(!told);
                self.traces.remove(&id);
            } else {
                // In order of time, as everything waits equally long.
                self.order.push_back((now.plus(SETTLED), id));
            }
        }
        self.counters.waiting = self.traces.len() as u64;
    }
}
