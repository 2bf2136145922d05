//! The JSON record of a room: the same object on `--events` lines, in the API and in `explain --json`.
//!
//! Pure. Keys and their order are a contract with scripts; what this release does not measure is `null`,
//! never zero, and a key is never left out.

use serde::Serialize;

use super::Identity;
use super::batches::{BatchesJson, batches};
use super::clock::Clock;
use super::engine_numbers::{EngineNumbersJson, numbers};
use super::gpu::{GpuJson, gpus};
use super::network::{NetworkJson, network};
use super::scheduled::{SchedulerJson, scheduler};
use super::trace_id::trace_id;
use crate::event::{Direction, SECOND, Task};
use crate::rooms::model::{
    Event, LegView, MessageMark, Outcome, RankView, RequestView, Role, RoomSnapshot, View,
};
use crate::sglang::message::{Backend, Kind, KvPoll, Release, Releases};
use crate::verdict::model::{Action, Candidate, EndsByItself, KnownIssue, Party, Verdict};

/// One room at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    event: &'static str,
    time: String,
    host: String,
    /// Text, because room numbers above 2^53 do not survive a JSON number.
    room: String,
    incarnation: u32,
    trace_id: String,
    pinned: bool,
    completeness: &'static str,
    /// When the agent did not run, for a room that it took over from its state file.
    restored: Option<RestoredJson>,
    outcome: Option<&'static str>,
    backend: Option<&'static str>,
    releases: Option<ReleasesJson>,
    opened_at: String,
    closed_at: Option<String>,
    age_s: f64,
    recovered: bool,
    verdict: Option<VerdictJson>,
    views: Views,
    /// Messages of the room that are not listed because the list is bounded.
    messages_dropped: u32,
    /// What the GPUs of its ranks moved while its KV cache could; `null`: none is known.
    gpu: Option<Vec<GpuJson>>,
    /// The same of RDMA ports and of its ranks' connections; left out where none is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    network: Option<Vec<NetworkJson>>,
    /// What its prefill processes asked Mooncake to move for it; `null`: not probed.
    transfer_engine: Option<Vec<BatchesJson>>,
    /// What its engines said in numbers while it was open; left out where they said nothing.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    engine_numbers: Vec<EngineNumbersJson>,
    /// The request behind it, where one was seen at an HTTP port of this host.
    request: Option<RequestJson>,
    /// What the engines' schedulers said of it by their spans.
    scheduler: Option<SchedulerJson>,
}

#[derive(Clone, Debug, Serialize)]
struct RestoredJson {
    from: String,
    to: String,
}

#[derive(Clone, Debug, Serialize)]
struct ReleasesJson {
    min: String,
    max: String,
}

#[derive(Clone, Debug, Serialize)]
struct VerdictJson {
    class: &'static str,
    owed_by: Option<PartyJson>,
    act_on: Option<PartyJson>,
    expected: Option<&'static str>,
    confidence: &'static str,
    since: String,
    candidates: Vec<CandidateJson>,
    ends_by_itself: Option<EndsByItselfJson>,
    evidence: Vec<String>,
    actions: Vec<ActionJson>,
    known_issues: Vec<KnownIssueJson>,
    group: String,
    group_size: u32,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct PartyJson {
    role: Option<&'static str>,
    rank: Option<u32>,
    /// Ranks as its process names them ("DP1 TP3").
    rank_names: Option<String>,
    host: Option<String>,
    /// Names of pod, namespace and container, where the kubelet's files tell them.
    pod: Option<String>,
    /// The pod as the kubelet names it in the cgroup.
    pod_uid: Option<String>,
    namespace: Option<String>,
    /// Container id.
    container: Option<String>,
    container_name: Option<String>,
    pid: Option<u32>,
    comm: Option<String>,
    endpoint: Option<String>,
    local: Option<bool>,
}

#[derive(Clone, Debug, Serialize)]
struct CandidateJson {
    class: &'static str,
    modes: &'static [&'static str],
    owed_by: Option<&'static str>,
    would_settle: &'static str,
}

#[derive(Clone, Debug, Serialize)]
struct EndsByItselfJson {
    timer: &'static str,
    at: String,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct ActionJson {
    command: String,
    effect: String,
    blast_radius: String,
    clears: bool,
}

#[derive(Clone, Debug, Serialize)]
pub(super) struct KnownIssueJson {
    url: String,
    fixed_in: Option<String>,
    applies: &'static str,
}

#[derive(Clone, Debug, Serialize)]
struct Views {
    prefill: Option<ViewJson>,
    decode: Option<ViewJson>,
}

#[derive(Clone, Debug, Serialize)]
struct ViewJson {
    state: &'static str,
    phase: &'static str,
    phase_since: String,
    ended: Option<&'static str>,
    ranks: Vec<RankJson>,
    sessions: Vec<String>,
    required: Option<u32>,
    got: u32,
    messages: Vec<MessageJson>,
}

#[derive(Clone, Debug, Serialize)]
struct RequestJson {
    rid: Option<String>,
    prefill: Option<LegJson>,
    decode: Option<LegJson>,
    /// At an engine whose role is not known.
    #[serde(skip_serializing_if = "Option::is_none")]
    unplaced: Option<LegJson>,
    /// At another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    unplaced_too: Option<LegJson>,
}

#[derive(Clone, Debug, Serialize)]
struct LegJson {
    begun: String,
    first_byte: Option<String>,
    /// `null` while it is open: decode still writes its answer when the room has long closed. The record of a closed room
    /// has it once it came.
    ended: Option<String>,
    /// `open` where it is, `null` where that is not known.
    how: Option<&'static str>,
    status: Option<u16>,
    /// Lost sight of: no end does not mean that it is open.
    out_of_sight: bool,
}

#[derive(Clone, Debug, Serialize)]
struct RankJson {
    rank: Option<u32>,
    endpoint: Option<String>,
    session: Option<String>,
    dummy: Option<bool>,
    state: &'static str,
    pid: Option<u32>,
    comm: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
struct MessageJson {
    time: String,
    direction: &'static str,
    kind: &'static str,
    peer: String,
    // Only on the kinds that have them.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rank: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pages: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dummy: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    acknowledged: Option<bool>,
}

/// What a record needs beside the room itself.
#[derive(Clone, Copy, Debug)]
pub struct Maker<'a> {
    /// This host and the salt of its traces.
    pub identity: &'a Identity,
    /// Clock of the source the room was seen by.
    pub clock: &'a Clock,
}

impl Maker<'_> {
    /// The record of an event.
    pub fn event(&self, event: &Event) -> Record {
        self.record(event.name(), event.snapshot())
    }

    /// The record of a room as it stands: `event` is `room_pinned`, `room_closed`, or `room_open` for a room
    /// of which nothing had to be told.
    pub fn room(&self, room: &RoomSnapshot) -> Record {
        let event = match room {
            r if r.closed_at.is_some() => "room_closed",
            r if r.pinned() => "room_pinned",
            _ => "room_open",
        };
        self.record(event, room)
    }

    fn record(&self, event: &'static str, s: &RoomSnapshot) -> Record {
        let time = if event == "room_closed" { s.closed_at.unwrap_or(s.at) } else { s.at };
        Record {
            event,
            time: self.clock.rfc3339(time),
            host: self.identity.host_name.clone(),
            room: s.room.to_string(),
            incarnation: s.incarnation,
            trace_id: trace_id(s.room, &self.identity.trace_salt).to_string(),
            pinned: s.pinned(),
            completeness: s.completeness.label(),
            restored: s.restored.map(|away| RestoredJson {
                from: self.clock.rfc3339(away.from),
                to: self.clock.rfc3339(away.to),
            }),
            outcome: s.outcome.and_then(outcome),
            backend: s.backend.map(Backend::label),
            releases: s.releases.map(releases),
            opened_at: self.clock.rfc3339(s.opened_at),
            closed_at: s.closed_at.map(|at| self.clock.rfc3339(at)),
            age_s: seconds(s.closed_at.unwrap_or(s.at).since(s.opened_at)),
            recovered: s.recovered,
            verdict: s.verdict.as_ref().map(|v| self.verdict(v, s)),
            views: Views {
                prefill: s.prefill.as_ref().map(|v| self.view(v, s)),
                decode: s.decode.as_ref().map(|v| self.view(v, s)),
            },
            messages_dropped: s.messages_dropped,
            gpu: gpus(s, self.clock),
            network: network(s, self.clock),
            transfer_engine: batches(s, self.clock),
            engine_numbers: numbers(s, self.clock),
            request: s.request.as_ref().map(|r| self.request(r)),
            scheduler: scheduler(&s.scheduled, self.clock),
        }
    }

    fn verdict(&self, v: &Verdict, s: &RoomSnapshot) -> VerdictJson {
        VerdictJson {
            class: v.class.label(),
            owed_by: v.owed_by.as_ref().map(|p| self.party(p)),
            act_on: v.act_on.as_ref().map(|p| self.party(p)),
            expected: v.expected.map(Kind::name),
            confidence: v.confidence.label(),
            since: self.clock.rfc3339(v.since),
            candidates: v.candidates.iter().map(candidate).collect(),
            ends_by_itself: v.ends_by_itself.as_ref().map(|e| self.ends_by_itself(e)),
            evidence: v.evidence.clone(),
            actions: v.actions.iter().map(action).collect(),
            known_issues: (self.identity.known_issues)(s).into_iter().map(known_issue).collect(),
            group: format!("{:016x}", v.group),
            group_size: s.group_size,
        }
    }

    fn ends_by_itself(&self, e: &EndsByItself) -> EndsByItselfJson {
        EndsByItselfJson { timer: e.timer, at: self.clock.rfc3339(e.at) }
    }

    pub(super) fn party(&self, p: &Party) -> PartyJson {
        let name = p.place.as_ref().and_then(|place| place.name.as_ref());
        PartyJson {
            role: p.role.map(Role::label),
            rank: p.rank,
            rank_names: p.rank_names.as_deref().map(str::to_owned),
            host: (p.local == Some(true)).then(|| self.identity.host_name.clone()),
            pod: name.map(|name| name.pod.clone()),
            pod_uid: p.place.as_ref().and_then(|place| place.pod_uid.clone()),
            namespace: name.map(|name| name.namespace.clone()),
            container: p.place.as_ref().and_then(|place| place.container.clone()),
            container_name: name.and_then(|name| name.container.clone()),
            pid: p.task.map(|t| t.tgid),
            comm: p.task.map(comm),
            endpoint: p.endpoint.map(|e| e.to_string()),
            local: p.local,
        }
    }

    fn view(&self, v: &View, s: &RoomSnapshot) -> ViewJson {
        ViewJson {
            state: v.state.name(),
            phase: v.phase.label(),
            phase_since: self.clock.rfc3339(v.phase_since),
            ended: v.terminal.map(Outcome::label),
            ranks: v.ranks.iter().map(rank).collect(),
            sessions: v.sessions.iter().map(ToString::to_string).collect(),
            required: v.required,
            got: v.got,
            messages: s.messages.iter().filter(|m| m.role == v.role).map(|m| self.message(m)).collect(),
        }
    }

    fn request(&self, r: &RequestView) -> RequestJson {
        RequestJson {
            rid: r.rid.as_deref().map(str::to_owned),
            prefill: r.prefill.as_ref().map(|l| self.leg(l)),
            decode: r.decode.as_ref().map(|l| self.leg(l)),
            unplaced: r.unplaced.as_ref().map(|l| self.leg(l)),
            unplaced_too: r.unplaced_too.as_ref().map(|l| self.leg(l)),
        }
    }

    fn leg(&self, l: &LegView) -> LegJson {
        LegJson {
            begun: self.clock.rfc3339(l.begun),
            first_byte: l.first_byte.map(|at| self.clock.rfc3339(at)),
            ended: l.ended.map(|(at, _)| self.clock.rfc3339(at)),
            how: match l.ended {
                Some((_, how)) => Some(how.label()),
                None => (!l.out_of_sight).then_some("open"),
            },
            status: l.status,
            out_of_sight: l.out_of_sight,
        }
    }

    fn message(&self, m: &MessageMark) -> MessageJson {
        MessageJson {
            time: self.clock.rfc3339(m.at),
            direction: direction(m.direction),
            kind: m.kind.name(),
            peer: m.peer.to_string(),
            status: m.status.map(KvPoll::name),
            rank: m.rank,
            pages: m.pages,
            dummy: m.dummy,
            acknowledged: m.acknowledged,
        }
    }
}

/// JSON and attribute value of a direction.
pub(super) const fn direction(d: Direction) -> &'static str {
    match d {
        Direction::Sent => "sent",
        Direction::Received => "received",
    }
}

/// Nanoseconds as seconds with three decimals: enough to read, the exact times stand beside it.
fn seconds(nanos: u64) -> f64 {
    #[allow(clippy::cast_precision_loss, reason = "milliseconds of a room's age stay far below 2^53")]
    let millis = (nanos / (SECOND / 1000)) as f64;
    millis / 1000.0
}

/// JSON of an outcome: unknown is `null`.
const fn outcome(o: Outcome) -> Option<&'static str> {
    match o {
        Outcome::Unknown => None,
        Outcome::Success | Outcome::Failed => Some(o.label()),
    }
}

fn comm(task: Task) -> String {
    task.comm.to_text()
}

fn releases(r: Releases) -> ReleasesJson {
    ReleasesJson { min: release(r.min), max: release(r.max) }
}

fn release(r: Release) -> String {
    let [major, minor, patch, post] = r.parts;
    if post == 0 { format!("{major}.{minor}.{patch}") } else { format!("{major}.{minor}.{patch}.post{post}") }
}

fn candidate(c: &Candidate) -> CandidateJson {
    CandidateJson {
        class: c.class.label(),
        modes: c.modes,
        owed_by: c.owed_by.map(Role::label),
        would_settle: c.would_settle,
    }
}

pub(super) fn action(a: &Action) -> ActionJson {
    ActionJson {
        command: a.command.clone(),
        effect: a.effect.clone(),
        blast_radius: a.blast_radius.clone(),
        clears: a.clears,
    }
}

pub(super) fn known_issue(k: KnownIssue) -> KnownIssueJson {
    KnownIssueJson { url: k.url, fixed_in: k.fixed_in, applies: k.applies }
}

fn rank(r: &RankView) -> RankJson {
    RankJson {
        rank: r.rank,
        endpoint: r.endpoint.map(|e| e.to_string()),
        session: r.session.as_deref().map(str::to_owned),
        dummy: r.dummy,
        state: r.state.name(),
        pid: r.task.map(|t| t.tgid),
        comm: r.task.map(comm),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
    use super::super::testing::{EPOCH, closed, pinned, room};
    use super::*;

    fn identity() -> Identity {
        Identity {
            host_name: "node-a".to_owned(),
            host_id: "id-a".to_owned(),
            trace_salt: String::new(),
            live: false,
            known_issues: |_| {
                let url = "https://github.com/sgl-project/sglang/issues/28652".to_owned();
                vec![KnownIssue { url, fixed_in: Some("0.5.21".to_owned()), applies: "yes" }]
            },
        }
    }

    /// The whole record, letter by letter: keys and their order are a contract with scripts.
    #[test]
    fn a_pinned_room_is_exactly_this() {
        let identity = identity();
        let clock = Clock::fixed(EPOCH);
        let record =
            Maker { identity: &identity, clock: &clock }.event(&Event::Pinned(pinned(u64::MAX).into()));
        let got = serde_json::to_string_pretty(&record).unwrap() + "\n";
        assert_eq!(got, include_str!("../../tests/fixtures/export/room_pinned.json"), "{got}");
    }

    #[test]
    fn unknown_outcomes_are_null_and_a_closed_room_is_not_pinned() {
        let identity = identity();
        let clock = Clock::fixed(EPOCH);
        let maker = Maker { identity: &identity, clock: &clock };
        let mut r = closed(1);
        let value = serde_json::to_value(maker.room(&r)).unwrap();
        assert_eq!((&value["event"], &value["outcome"]), (&"room_closed".into(), &"success".into()));
        assert_eq!(value["time"], "2023-11-14T22:13:22.000000000Z");
        r.outcome = Some(Outcome::Unknown);
        r.verdict = pinned(1).verdict;
        let value = serde_json::to_value(maker.room(&r)).unwrap();
        assert_eq!((&value["outcome"], &value["pinned"]), (&serde_json::Value::Null, &false.into()));
        assert_eq!(serde_json::to_value(maker.room(&room(1))).unwrap()["event"], "room_open");
    }
}
