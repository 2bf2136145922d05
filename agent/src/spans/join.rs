//! Spans of one trace, collected until the span that names the room has come: an engine sends that one last, when the request
//! has ended.
//!
//! Pure: time is an argument. Bounded: at most [`MAX_NODES`] spans wait, of one trace at most [`TRACE_NODES`]; stages of one
//! name in one thread are one, however many there are (`decode_loop` is one per token). The oldest trace makes way.

use std::collections::VecDeque;

use hashbrown::HashMap;
use smallvec::SmallVec;

use super::decode::{SchedulerSpan, SpanId, TraceId, What};
use serde::{Deserialize, Serialize};

use crate::event::{Mono, SECOND};
use crate::rooms::model::Role;

/// How far the times of a span may be from the agent's. Engines run on the agent's host, so their clock is the same; SGLang's way
/// from one clock to the other errs by milliseconds, and somebody may set the clock.
pub(crate) const CLOCKS: u64 = 2 * SECOND;

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

/// The process that sends for an engine (`SGLANG_TRACE_ASYNC`) ends threads of which it has heard nothing for 300 s
/// (`_CONTEXT_TTL` in `trace_async.py`), whether they hold the request still or not.
const FORGOTTEN: u64 = 240 * SECOND;

/// How often it is seen whether that time is over.
const LOOK: u64 = 60 * SECOND;

/// Traces looked at in one turn of the clock.
const TURN: usize = 4096;

/// What one engine's scheduler said of one request. Part of the state file's format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineRequest {
    /// The engine's role, where its spans tell.
    pub role: Option<Role>,
    /// Request id.
    pub rid: Box<str>,
    /// The engine's own trace.
    pub trace: TraceId,
    /// Span of the request in it.
    pub span: SpanId,
    /// Arrival. All times are the engine's, good to some milliseconds, but see `untimed`.
    pub begin: Mono,
    /// End.
    pub end: Mono,
    /// It ended with an error.
    pub failed: bool,
    /// Its stages, by their beginning: those whose times are believed.
    pub stages: Vec<Stage>,
    /// The times of its own span cannot be of its room: `begin` and `end` are when it was told.
    #[serde(default)]
    pub untimed: bool,
    /// Spans whose times cannot be of its room, by what they are: stages by their names, `request`, `thread`. A stage can be
    /// missing among the others for that, so nothing rests on such a request.
    #[serde(default)]
    pub doubted: Vec<Box<str>>,
}

/// A stage of a request: all spans of one name, of all ranks. Part of the state file's format.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Name (`prefill_forward`).
    pub name: Box<str>,
    /// Begin of the first.
    pub begin: Mono,
    /// End of the last.
    pub end: Mono,
    /// How many.
    pub spans: u32,
    /// A thread that it ran in has not let the request go, as far as its spans tell: SGLang ends a thread's span when the
    /// scheduler is done with the request, from 0.5.10 also where it fails or aborts it. `false` for earlier releases.
    pub held: bool,
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
    /// Spans that began before the machine did, or ended after they came.
    pub impossible: u64,
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
    /// When it came, where its own times cannot be.
    begin: Mono,
    end: Mono,
    untimed: bool,
    failed: bool,
    /// Its room is known, and was told.
    joined: bool,
}

/// A thread, or the stages of one name in it.
#[derive(Debug)]
struct Node {
    first: SpanId,
    last: SpanId,
    parent: SpanId,
    after: SpanId,
    /// When it ended, and whether with an error.
    ended: (Mono, bool),
    /// `None`: a thread.
    stage: Option<Stage>,
    /// A span of it has times that cannot be.
    doubted: bool,
}

/// When a span began and ended.
#[derive(Clone, Copy, Debug)]
struct Times {
    begin: Mono,
    end: Mono,
    /// It says another time, which cannot be: these are when it came.
    impossible: bool,
}

impl Times {
    /// A span is sent when it has ended, by an engine of the same machine: it cannot end after it came, nor begin before the machine.
    fn of(span: &SchedulerSpan, at: Mono, offset: i64) -> Self {
        let mono = |unix: u64| u64::try_from(i128::from(unix) - i128::from(offset)).ok().map(Mono);
        match mono(span.begin).zip(mono(span.end)) {
            Some((begin, end)) if end <= at.plus(CLOCKS) => Self { begin, end, impossible: false },
            _ => Self { begin: at, end: at, impossible: true },
        }
    }
}

impl Trace {
    /// Whether a request of it has come.
    fn told(&self) -> bool {
        !self.requests.is_empty()
    }

    fn size(&self) -> usize {
        1 + self.rooms.len() + self.requests.len() + self.nodes.len()
    }

    /// `false`: there is no place for it.
    fn add(&mut self, span: &SchedulerSpan, times: Times) -> bool {
        let Times { begin, end, impossible } = times;
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
                        untimed: impossible,
                        failed: span.failed,
                        joined: false,
                    });
                }
                fits
            }
            What::Thread { .. } => self.node(span, times, None),
            What::Stage(name) => {
                // A stage without spans is known by its name alone.
                let stage =
                    Stage { name: name.clone(), begin, end, spans: u32::from(!impossible), held: false };
                self.node(span, times, Some(stage))
            }
        }
    }

    fn node(&mut self, span: &SchedulerSpan, times: Times, stage: Option<Stage>) -> bool {
        let Times { end, impossible, .. } = times;
        if let Some(new) = &stage {
            let same = |n: &&mut Node| {
                n.parent == span.parent && n.stage.as_ref().is_some_and(|s| s.name == new.name)
            };
            if let Some(Node { last, stage: Some(known), doubted, .. }) = self.nodes.iter_mut().find(same) {
                *last = span.id;
                *doubted |= impossible;
                known.merge(new);
                return true;
            }
        }
        let fits = self.nodes.len() < TRACE_NODES;
        if fits {
            let (first, last) = (span.id, span.id);
            let (parent, after, ended) = (span.parent, span.after, (end, span.failed));
            self.nodes.push(Node { first, last, parent, after, ended, stage, doubted: impossible });
        }
        fits
    }

    fn room_of(&self, request: &Request) -> Option<u64> {
        let above = || self.rooms.iter().find(|(id, _)| *id == request.parent).map(|(_, room)| *room);
        request.room.or_else(above)
    }

    /// Which request each node is of. Surely: what is within it. The span of a thread that has not ended is missing, so
    /// else: what came after a stage of it. A trace that SGLang began itself is of one request alone.
    fn owners(&self, id: TraceId) -> Vec<Option<usize>> {
        // SGLang's ids have 64 bits; a client's have 128. Until 0.5.9 both engines of a room can be in one trace.
        let own = u128::from_be_bytes(id.0) <= u128::from(u64::MAX);
        match self.requests.as_slice() {
            [Request { room: Some(_), .. }] if own => vec![Some(0); self.nodes.len()],
            _ => self.followed(),
        }
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

    /// Whether the thread that a stage ran in is done with the request.
    fn let_go(&self, node: &Node, stage: &Stage) -> bool {
        let thread = self.nodes.iter().find(|n| n.stage.is_none() && n.first == node.parent);
        thread.is_some_and(|Node { ended: (at, failed), .. }| *failed || at.since(stage.end) < FORGOTTEN)
    }

    fn request(&self, trace: TraceId, at: usize, owners: &[Option<usize>]) -> Option<(u64, EngineRequest)> {
        let r = self.requests.get(at)?;
        let room = self.room_of(r)?;
        let mut stages: Vec<Stage> = Vec::new();
        for (node, _) in self.nodes.iter().zip(owners).filter(|(_, owner)| **owner == Some(at)) {
            let Some(stage) = node.stage.as_ref().filter(|s| s.spans > 0) else { continue };
            let held = r.room.is_some() && !self.let_go(node, stage);
            let stage = Stage { held, ..stage.clone() };
            match stages.iter_mut().find(|s| s.name == stage.name) {
                Some(known) => known.merge(&stage),
                None => stages.push(stage),
            }
        }
        stages.sort_by_key(|s| (s.begin, s.end));
        let (rid, span) = (r.rid.clone(), r.id);
        let role = r.role.or_else(|| role_of(&stages));
        let (begin, end, failed) = (r.begin, r.end, r.failed);
        let (untimed, doubted) = (r.untimed, self.doubted(r, at, owners));
        Some((room, EngineRequest { role, rid, trace, span, begin, end, failed, stages, untimed, doubted }))
    }

    /// What has times that cannot be, of a request or of nobody that is known.
    fn doubted(&self, r: &Request, at: usize, owners: &[Option<usize>]) -> Vec<Box<str>> {
        let own = self.nodes.iter().zip(owners).filter(|(_, owner)| owner.is_none_or(|o| o == at));
        let nodes = own.filter(|(node, _)| node.doubted).map(|(node, _)| node.stage.as_ref());
        let names = nodes.map(|stage| stage.map_or_else(|| "thread".into(), |s| s.name.clone()));
        let mut names: Vec<Box<str>> = r.untimed.then(|| "request".into()).into_iter().chain(names).collect();
        names.sort_unstable();
        names.dedup();
        names
    }
}

impl Stage {
    fn merge(&mut self, other: &Self) {
        if self.spans == 0 {
            (self.begin, self.end) = (other.begin, other.end);
        } else if other.spans > 0 {
            (self.begin, self.end) = (self.begin.min(other.begin), self.end.max(other.end));
        }
        self.spans = self.spans.saturating_add(other.spans);
        self.held |= other.held;
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

/// What is new of a request whose room is known.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) room: u64,
    pub(crate) request: EngineRequest,
    /// It was not told before.
    pub(crate) first: bool,
}

/// Traces that wait.
#[derive(Debug, Default)]
pub(crate) struct Joiner {
    traces: HashMap<TraceId, Trace>,
    /// Traces whose request has come, or that are new, by when they are looked at.
    soon: VecDeque<(Mono, TraceId)>,
    /// Traces whose request has not come, likewise.
    later: VecDeque<(Mono, TraceId)>,
    size: usize,
    pub(crate) counters: JoinCounters,
}

impl Joiner {
    /// Takes spans. `offset`: wall clock − monotonic clock, nanoseconds. What can be said of rooms now is appended.
    pub(crate) fn take(&mut self, at: Mono, offset: i64, spans: &[SchedulerSpan], joined: &mut Vec<Joined>) {
        let mut changed: SmallVec<[TraceId; 8]> = SmallVec::new();
        for span in spans {
            self.counters.spans += 1;
            let trace = self.traces.entry(span.trace).or_insert_with(|| {
                self.soon.push_back((at.plus(SETTLED), span.trace));
                self.size += 1;
                Trace::default()
            });
            trace.last = at;
            let before = (trace.size(), trace.told());
            let times = Times::of(span, at, offset);
            self.counters.impossible += u64::from(times.impossible);
            if !trace.add(span, times) {
                self.counters.left_out += 1;
            }
            self.size += trace.size() - before.0;
            if trace.told() && !before.1 {
                self.soon.push_back((at.plus(SETTLED), span.trace));
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

    fn tell(&mut self, id: TraceId, joined: &mut Vec<Joined>) {
        let Some(trace) = self.traces.get_mut(&id).filter(|t| t.told()) else { return };
        let owners = trace.owners(id);
        for at in 0..trace.requests.len() {
            let Some((room, request)) = trace.request(id, at, &owners) else { continue };
            let first = trace.requests.get_mut(at).is_some_and(|r| !std::mem::replace(&mut r.joined, true));
            joined.push(Joined { room, request, first });
        }
    }

    fn forget(&mut self, id: TraceId) -> bool {
        let Some(trace) = self.traces.remove(&id) else { return false };
        self.size -= trace.size();
        self.counters.without_room += trace.requests.iter().filter(|r| !r.joined).count() as u64;
        true
    }

    /// Gives a trace up, first one that has waited long; `false`: there is none.
    fn give_up(&mut self) -> bool {
        let Some((_, id)) = self.later.pop_front().or_else(|| self.soon.pop_front()) else { return false };
        let waits = self.traces.get(&id).is_some_and(|t| !t.told());
        if self.forget(id) {
            self.counters.evicted += u64::from(waits);
        }
        true
    }

    /// Lets time pass.
    pub(crate) fn tick(&mut self, now: Mono) {
        for _ in 0..TURN {
            let Some((_, id)) = self.soon.pop_front_if(|(due, _)| *due <= now) else { break };
            match self.traces.get(&id) {
                None => {}
                Some(trace) if !trace.told() => self.later.push_back((now.plus(LOOK), id)),
                Some(trace) if now.since(trace.last) < SETTLED => {
                    self.soon.push_back((now.plus(SETTLED), id));
                }
                Some(_) => drop(self.forget(id)),
            }
        }
        for _ in 0..TURN {
            let Some((_, id)) = self.later.pop_front_if(|(due, _)| *due <= now) else { break };
            match self.traces.get(&id) {
                Some(trace) if !trace.told() && now.since(trace.last) >= KEEP => {
                    self.counters.expired += 1;
                    self.forget(id);
                }
                Some(trace) if !trace.told() => self.later.push_back((now.plus(LOOK), id)),
                // Gone, or looked at with those whose request has come.
                _ => {}
            }
        }
        self.counters.waiting = self.traces.len() as u64;
    }
}
