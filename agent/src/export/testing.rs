//! Rooms and snapshots for tests, of this module and of `tests/export_*.rs`.
#![allow(dead_code, clippy::unwrap_used, reason = "tests; each test file uses its part")]

use smallvec::{SmallVec, smallvec};

use crate::event::{Comm, Direction, Mono, NotCaptured, SECOND, Task};
use crate::export::metrics::{GpuMetrics, MetricsSnapshot, NetworkMetrics, PinnedRooms};
use crate::rooms::model::{
    Completeness, Event, MessageMark, Outcome, Phase, Place, PodName, RankView, Role, RoomSnapshot, View,
};
use crate::sglang::message::{Backend, Kind, KvPoll, Release, Releases};
use crate::verdict::model::{Action, Candidate, Class, Confidence, EndsByItself, Finding, Party, Verdict};

/// Wall clock time of the tests' monotonic zero: 2023-11-14T22:13:20Z.
pub(crate) const EPOCH: i64 = 1_700_000_000_000_000_000;

pub(crate) fn task(pid: u32) -> Task {
    let mut comm = [0; 16];
    comm.iter_mut().zip(b"sglang::schedul").for_each(|(to, from)| *to = *from);
    Task { tgid: pid, tid: pid, comm: Comm(comm), cgroup: 7 }
}

pub(crate) fn endpoint(port: u16) -> std::net::SocketAddr {
    (std::net::Ipv4Addr::new(10, 0, 0, 2), port).into()
}

pub(crate) fn mark(at: Mono, role: Role, kind: Kind) -> MessageMark {
    MessageMark {
        at,
        role,
        direction: Direction::Received,
        kind,
        status: None,
        rank: None,
        peer: endpoint(4242),
        pages: None,
        dummy: None,
        acknowledged: None,
    }
}

pub(crate) fn view(role: Role) -> View {
    View {
        role,
        state: KvPoll::WaitingForInput,
        ranks: smallvec![RankView {
            rank: Some(0),
            endpoint: Some(endpoint(4000)),
            session: None,
            dummy: Some(false),
            state: KvPoll::WaitingForInput,
            task: Some(task(4711)),
        }],
        sessions: smallvec!["10.0.0.2:9999".into()],
        required: Some(1),
        got: 1,
        phase_since: Mono(SECOND),
        phase: Phase::Transfer,
        terminal: None,
    }
}

/// An open room without views.
pub(crate) fn room(number: u64) -> RoomSnapshot {
    RoomSnapshot {
        room: number,
        incarnation: 0,
        backend: Some(Backend::Nixl),
        releases: Some(Releases { min: Release::new(0, 4, 8, 1), max: Release::new(0, 5, 21, 0) }),
        opened_at: Mono(0),
        at: Mono(12 * SECOND),
        closed_at: None,
        outcome: None,
        completeness: Completeness::Full,
        restored: None,
        prefill: None,
        decode: None,
        request: None,
        scheduled: Vec::new(),
        gpus: Vec::new(),
        network: Vec::new(),
        batches: Vec::new(),
        numbers: Vec::new(),
        messages: SmallVec::new(),
        messages_dropped: 0,
        verdict: None,
        recovered: false,
        was_pinned: false,
        group_size: 1,
    }
}

pub(crate) fn verdict() -> Verdict {
    let party = |local, pid: Option<u32>| Party {
        role: Some(Role::Prefill),
        rank: Some(0),
        endpoint: Some(endpoint(4000)),
        task: pid.map(task),
        local: Some(local),
        http: None,
        place: Some(std::sync::Arc::new(Place {
            container: Some("c0ffee".repeat(11).get(..64).unwrap().to_owned()),
            pod_uid: Some("3ca9f1e6-2b1d-4b7e-9a55-0f6f5e2d9c11".to_owned()),
            name: Some(PodName {
                pod: "prefill-0".to_owned(),
                namespace: "llm".to_owned(),
                container: Some("sglang".to_owned()),
            }),
        })),
        rank_names: Some("DP1 TP0".into()),
        ..Party::default()
    };
    Verdict {
        class: Class::AbortBeforeEntry,
        confidence: Confidence::Likely,
        owed_by: Some(party(true, Some(4711))),
        act_on: Some(party(true, Some(4711))),
        expected: Some(Kind::Status),
        candidates: vec![Candidate {
            class: Class::TransferWorkerSilent,
            modes: &["M20", "M21"],
            owed_by: Some(Role::Prefill),
            would_settle: "whether the worker thread lives",
        }],
        ends_by_itself: Some(EndsByItself { timer: "bootstrap timeout", at: Mono(300 * SECOND) }),
        evidence: vec!["ABORT came before METADATA".to_owned()],
        actions: vec![Action {
            command: "restart the engine".to_owned(),
            effect: "ends it".to_owned(),
            blast_radius: "every room of it".to_owned(),
            clears: true,
        }],
        group: 0xabc,
        since: Mono(11 * SECOND),
    }
}

/// A dead worker that pins two rooms since second 11.
pub(crate) fn finding() -> Finding {
    let Verdict { confidence, act_on, evidence, actions, since, .. } = verdict();
    Finding {
        group: 0xabc,
        class: Class::TransferWorkerSilent,
        confidence,
        engine: act_on.unwrap(),
        rooms: vec![7, u64::MAX],
        room_count: 2,
        since,
        closed_at: None,
        evidence,
        actions,
    }
}

/// A room that prefill pins since second 11, seen at second 12.
pub(crate) fn pinned(number: u64) -> RoomSnapshot {
    let mut r = room(number);
    r.prefill = Some(view(Role::Prefill));
    r.messages = smallvec![
        mark(Mono(SECOND / 2), Role::Prefill, Kind::Abort),
        MessageMark {
            pages: Some(17),
            dummy: Some(false),
            ..mark(Mono(SECOND), Role::Prefill, Kind::Metadata)
        },
    ];
    r.verdict = Some(Box::new(verdict()));
    r
}

/// A room that ended well after 2 seconds.
pub(crate) fn closed(number: u64) -> RoomSnapshot {
    let mut r = room(number);
    let mut v = view(Role::Prefill);
    v.state = KvPoll::Success;
    v.phase = Phase::Done;
    v.terminal = Some(Outcome::Success);
    r.prefill = Some(v);
    r.messages = smallvec![
        MessageMark {
            pages: Some(3),
            dummy: Some(false),
            ..mark(Mono(SECOND), Role::Prefill, Kind::Metadata)
        },
        MessageMark {
            direction: Direction::Sent,
            status: Some(KvPoll::Success),
            rank: Some(0),
            acknowledged: Some(true),
            ..mark(Mono(2 * SECOND), Role::Prefill, Kind::Status)
        },
    ];
    r.at = Mono(2 * SECOND);
    r.closed_at = Some(Mono(2 * SECOND));
    r.outcome = Some(Outcome::Success);
    r
}

/// A pinned room's life: pinned, verdict changed, closed after all.
pub(crate) fn life(number: u64) -> [Event; 3] {
    let mut changed = pinned(number);
    changed.at = Mono(13 * SECOND);
    changed.verdict = Some(Box::new(Verdict { confidence: Confidence::Certain, ..verdict() }));
    let mut end = closed(number);
    end.at = Mono(20 * SECOND);
    end.closed_at = Some(Mono(20 * SECOND));
    end.recovered = true;
    end.was_pinned = true;
    [Event::Pinned(pinned(number).into()), Event::VerdictChanged(changed.into()), Event::Closed(end.into())]
}

/// At least one entry of every metric.
pub(crate) fn full_snapshot() -> MetricsSnapshot {
    MetricsSnapshot {
        at: Mono(5 * SECOND),
        rooms_open: vec![(Role::Prefill, KvPoll::WaitingForInput, 3)],
        rooms_pinned: vec![PinnedRooms {
            role: Role::Prefill,
            verdict: Class::AbortBeforeEntry,
            confidence: Confidence::Likely,
            owed_instance: "node-a".to_owned(),
            rooms: 2,
        }],
        oldest_open: vec![(Role::Prefill, KvPoll::WaitingForInput, 47 * SECOND)],
        rooms_closed: vec![(Role::Decode, Outcome::Success, 11)],
        pins: vec![(Role::Prefill, Class::AbortBeforeEntry, 4)],
        messages: vec![(Direction::Received, Backend::Nixl, Kind::Metadata, 12)],
        unknown_messages: vec![(None, 1)],
        capture_lost: vec![("ring", "full", 7)],
        not_captured: vec![(NotCaptured::TooLong, 5)],
        engine_processes: vec![(Some(Role::Decode), 8), (None, 1)],
        requests: vec![("generate", 21), ("health", 4)],
        span_requests: vec![("grpc", "accepted", 4), ("http", "malformed", 0)],
        spans_received: vec![("scheduler", 64)],
        span_joins: vec![("joined", 9)],
        spans_waiting: Some(0),
        request_room_not_seen: vec![("hole", 2)],
        request_room_ignored: vec![("fake_host", 1)],
        connections_unread: vec![("tls", 3)],
        connections: vec![("zmtp", 6)],
        bpf_run_nanos: vec![("sock_send".to_owned(), 1_500_000_000)],
        bpf_runs: vec![("sock_send".to_owned(), 9000)],
        findings_open: vec![(Class::ThreadDied, Confidence::Certain, Some(Role::Prefill), 1)],
        findings_turned_away: Some(6),
        state_dropped: vec![("boot", 1)],
        state_restored: vec![("rooms", 2)],
        state_writes: vec![("written", 3)],
        batches: vec![("joined", 5)],
        probed_processes: vec![("probed", 1), ("refused", 1)],
        state_bytes: Some(4096),
        gpu: GpuMetrics {
            copy_bytes: vec![("GPU-a".into(), "pcie", "tx", 1 << 30)],
            xids: vec![("GPU-a".into(), 79, 1)],
            calls: vec![("GPU-a".into(), "answered", 40)],
            call_nanos: vec![("GPU-a".into(), 8_000_000)],
            unusable: vec![("GPU-a".into(), "ambiguous", 2)],
            unreadable: vec![("GPU-a".into(), "lost", 1)],
        },
        network: NetworkMetrics {
            port_bytes: vec![("mlx5_0/1".to_owned(), "tx", 1 << 30)],
            port_readings: vec![("mlx5_0/1".to_owned(), "read", 40)],
            port_nanos: vec![("mlx5_0/1".to_owned(), 8_000_000)],
            connection_bytes: vec![("rx", 5)],
        },
    }
}

pub(crate) fn identity() -> crate::export::Identity {
    crate::export::Identity {
        host_name: "node-a".to_owned(),
        host_id: "id-a".to_owned(),
        trace_salt: String::new(),
        live: false,
        known_issues: |_| Vec::new(),
    }
}

/// One `GET` over a connection of its own: status, head, body.
pub(crate) async fn get(at: std::net::SocketAddr, path: &str, headers: &str) -> (u16, String, String) {
    ask(at, &format!("GET {path} HTTP/1.1\r\nHost: agent\r\nConnection: close\r\n{headers}\r\n")).await
}

/// Sends text, reads to the end.
pub(crate) async fn ask(at: std::net::SocketAddr, request: &str) -> (u16, String, String) {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    let mut stream = tokio::net::TcpStream::connect(at).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).unwrap_or(0);
    (status, head.to_owned(), body.to_owned())
}
