//! Turns a room into what is shown and exported of it. Runs only when someone asks or must hear of it.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::event::Mono;
use crate::rooms::model::{
    GpuWindow, MessageMark, NetworkWindow, Outcome, RankView, Role, RoomSnapshot, View,
};
use crate::rooms::peers::EndpointId;
use crate::rooms::requests::legs::RoomRequest;
use crate::rooms::room::{Link, Mark, Progress, Room};
use crate::rooms::table::RoomTable;
use crate::sglang::message::KvPoll;
use crate::verdict::actions::name_request;
use crate::verdict::explain::explain;
use crate::verdict::model::{Class, Verdict};

const NOWHERE: std::net::SocketAddr =
    std::net::SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0);

impl RoomTable {
    /// Everything known of a room at `at`.
    pub(crate) fn snapshot_of(&self, room: &Room, at: Mono) -> RoomSnapshot {
        self.snapshot_with(room, room.views(), at)
    }

    /// The same where it is known what the room's views amount to.
    pub(crate) fn snapshot_with(
        &self,
        room: &Room,
        [prefill, decode]: [Option<Progress>; 2],
        at: Mono,
    ) -> RoomSnapshot {
        let (gpus, network) = (self.gpu_windows(room, at), self.network_windows(room, at));
        let verdict = self.verdict_of(room, &gpus, &network, at);
        let group_size = verdict.as_ref().map_or(1, |v| self.findings.group_size(v.group).unwrap_or(1));
        let mut snapshot = RoomSnapshot {
            room: room.room,
            incarnation: room.incarnation,
            backend: room.backend,
            releases: room.releases,
            opened_at: room.opened_at,
            at,
            closed_at: room.closed.map(|(at, _)| at),
            outcome: room.closed.map(|(_, outcome)| outcome),
            completeness: room.completeness,
            restored: self.restored(room),
            prefill: None,
            decode: None,
            request: None,
            scheduled: room.scheduled.as_deref().map(|s| s.requests.clone()).unwrap_or_default(),
            gpus,
            network,
            batches: self.room_batches(room),
            numbers: self.numbers_of(room, room.opened_at, at),
            messages: SmallVec::new(),
            messages_dropped: room.marks_dropped,
            verdict: verdict.map(Box::new),
            recovered: recovered(room),
            was_pinned: room.was_pinned,
            group_size,
        };
        // These are large: put where they belong at once.
        snapshot.prefill = prefill.map(|p| self.view(room, Role::Prefill, p));
        snapshot.decode = decode.map(|p| self.view(room, Role::Decode, p));
        snapshot.request = room.request.as_deref().map(RoomRequest::view);
        snapshot.messages.extend(room.marks.iter().map(|m| self.message_mark(m)));
        name_request(&mut snapshot);
        snapshot
    }

    pub(crate) fn verdict_of(
        &self,
        room: &Room,
        gpus: &[GpuWindow],
        network: &[NetworkWindow],
        at: Mono,
    ) -> Option<Verdict> {
        let j = room.judgement.as_deref()?;
        let view = room.progress(j.role);
        let last = room.phases.get(usize::from(j.role == Role::Decode)).copied();
        // A view that has just ended is explained as it was before.
        let mut facts = self.facts(room, j.role, view, at).or_else(|| {
            let (phase, since) = last?;
            self.facts(room, j.role, Progress { phase, since, terminal: None, ..view }, at)
        })?;
        facts.gpu.windows = gpus.to_vec();
        facts.network = network.to_vec();
        Some(explain(&facts, j))
    }

    fn message_mark(&self, m: &Mark) -> MessageMark {
        let metadata = m.kind == crate::sglang::message::Kind::Metadata;
        MessageMark {
            at: m.at,
            role: m.role,
            direction: m.direction,
            kind: m.kind,
            status: m.status,
            rank: m.rank,
            peer: self.peers.address(m.peer).unwrap_or(NOWHERE),
            pages: metadata.then_some(u64::from(m.pages)),
            dummy: m.dummy,
            acknowledged: m.acknowledged,
        }
    }

    fn view(&self, room: &Room, role: Role, p: Progress) -> View {
        let mut view = View {
            role,
            state: p.state,
            ranks: SmallVec::new(),
            sessions: SmallVec::new(),
            required: p.required,
            got: p.got,
            phase_since: p.since,
            phase: p.phase,
            terminal: p.terminal,
        };
        let View { ranks, sessions, .. } = &mut view;
        let mut seen: arrayvec::ArrayVec<EndpointId, { crate::rooms::room::MAX_LINKS }> =
            arrayvec::ArrayVec::new();
        for l in room.links.iter().filter(|l| here(l, role)) {
            let id = if role == Role::Prefill { l.prefill } else { l.decode };
            let session = self.peers.session_name(l.session);
            if let Some(s) = session
                && !sessions.contains(s)
            {
                sessions.push(Arc::clone(s));
            }
            let state = link_state(l, role, &p);
            match seen.iter().position(|x| *x == id).and_then(|i| ranks.get_mut(i)) {
                Some(r) => {
                    r.state = r.state.min(state);
                    if l.owes() {
                        r.dummy = l.dummy;
                    }
                }
                None if !seen.is_full() => {
                    seen.push(id);
                    let e = self.peers.get(id);
                    ranks.push(RankView {
                        rank: if role == Role::Prefill {
                            l.rank.or(e.and_then(|e| e.rank))
                        } else {
                            e.and_then(|e| e.rank)
                        },
                        endpoint: e.map(|e| e.address),
                        session: session.filter(|_| role == Role::Decode).cloned(),
                        dummy: l.dummy,
                        state,
                        task: e.and_then(|e| e.task),
                    });
                }
                None => {}
            }
        }
        if ranks.is_empty() {
            let id = if role == Role::Prefill { room.home.0 } else { room.home.1 };
            if let Some(e) = self.peers.get(id) {
                ranks.push(RankView {
                    rank: e.rank,
                    endpoint: Some(e.address),
                    session: None,
                    dummy: None,
                    state: p.state,
                    task: e.task,
                });
            }
        }
        view
    }
}

const fn here(l: &Link, role: Role) -> bool {
    match role {
        Role::Prefill => l.received.is_some() || l.told.is_some(),
        Role::Decode => l.sent.is_some() || l.heard.is_some(),
    }
}

fn link_state(l: &Link, role: Role, p: &Progress) -> KvPoll {
    let said = if role == Role::Prefill { l.told } else { l.heard };
    match said {
        Some(t) => t.status,
        // A rank that has not concluded is as far as the view is, but not further.
        None if p.state == KvPoll::Success => KvPoll::WaitingForInput,
        None => p.state,
    }
}

fn recovered(room: &Room) -> bool {
    let ended = match room.closed {
        Some((_, outcome)) => outcome != Outcome::Unknown,
        // Without bytes to tell by, it may hang as before.
        None => room.judgement.as_ref().is_none_or(|j| !j.class.pins() && j.class != Class::Unknown),
    };
    room.was_pinned && ended
}
