//! Collects the facts that a verdict rests on, for one room as one role's view has it.
//!
//! Pure; reads the table, changes nothing. Runs when a room is overdue or shown, never per message.

use crate::event::{Mono, SECOND};
use crate::rooms::engines::Known;
use crate::rooms::estimate::Threshold;
use crate::rooms::model::{Completeness, Outcome, Phase, Role};
use crate::rooms::peers::{EndpointId, NONE, SessionId};
use crate::rooms::room::{Abort, Delivery, Link, Progress, Room};
use crate::rooms::table::RoomTable;
use crate::sglang::message::{Backend, KvPoll};
use crate::verdict::facts::{
    AbortFact, AgainFact, Dummies, Facts, ForeignFact, GpuFacts, LostFact, Others, Sent,
};
use crate::verdict::judge::success_on_wire;
use crate::verdict::model::Party;

/// Missing decode ranks named at most.
const MAX_MISSING: usize = 8;

impl RoomTable {
    /// Facts of one view; `None` where the view is over and nothing is owed in it.
    pub(crate) fn facts(&self, room: &Room, role: Role, view: Progress, now: Mono) -> Option<Facts> {
        let (phase, since) = self.phase_here(room, role, view)?;
        // One request for several rooms is answered when the last of them is over.
        let waits = role == Role::Prefill && phase == Phase::Conclude;
        let since = if waits { self.siblings_over(room).map_or(since, |at| at.max(since)) } else { since };
        let subject = subject(room, role, phase);
        let (prefill, decode) = subject.map_or(room.home, |l| (l.prefill, l.decode));
        let session = subject.map_or(NONE, |l| l.session);
        let Threshold { nanos, samples } = self.threshold(subject, phase);
        let missing = self.missing(room, role, prefill, session);
        let (told, untold) = self.told(room, role);
        let request = self.request_facts(room, role, view, since, now);
        let [prefill_http, decode_http] = request.servers;
        let elsewhere = if request.held { self.elsewhere(room, prefill_http) } else { None };
        let (may_compute, [wrote, decode_wrote]) = self.engine_works(room, since, now);
        Some(Facts {
            room: room.room,
            now,
            opened_at: room.opened_at,
            role,
            has_prefill: room.has_prefill,
            has_decode: room.has_decode,
            limits: self.config.limits(),
            phase,
            since,
            threshold: nanos,
            samples,
            backend: room.backend,
            releases: room.releases,
            completeness: self.completeness(room, phase),
            restored: self.restored(room),
            dummies: dummies(room, role, subject),
            observable: self.says_success(room),
            // Each rank waits for its own.
            got: if role == Role::Prefill && subject.is_some() {
                room.sessions_at(prefill)
            } else {
                view.got
            },
            required: view.required,
            metadata_at: room.links.iter().map(Link::asked_at).filter(|at| *at != Mono(0)).max(),
            pages: subject.map_or(0, |l| u64::from(l.pages)),
            bootstrap_at: room.bootstrap_at,
            computed_at: room.computed_at,
            abort: room.abort.map(|a| AbortFact {
                at: a.at,
                generation: a.generation,
                before_metadata: a.before_metadata,
                acknowledged: a.acknowledged,
            }),
            duplicate: room.links.iter().find_map(|l| l.duplicate),
            failed_inside: room.failed_inside,
            staging_wait: room.staging_wait,
            prefill: Party { http: prefill_http, ..self.party(Role::Prefill, prefill, room.has_prefill) },
            decode: Party { http: decode_http, ..self.party(Role::Decode, decode, room.has_decode) },
            session: self.peers.session_name(session).map(ToString::to_string).unwrap_or_default(),
            missing,
            told,
            untold,
            elsewhere,
            ambiguous: self.ambiguous(room),
            others: Others { passed: self.passed(room, subject), ..self.others(subject, prefill) },
            foreign: self.peers.get(prefill).and_then(|e| e.foreign).as_ref().map(ForeignFact::of),
            metadata_sent: subject.map_or(Sent::Unknown, |l| self.metadata_sent(l)),
            status_sent: self.worst_status(room),
            abort_sent: room.abort.map_or(Sent::Unknown, |a| self.abort_sent(&a)),
            thread: match role {
                Role::Prefill => self.dead_thread(room, subject, prefill),
                Role::Decode => self.status_thread(room),
            },
            // Its scheduler takes in within milliseconds.
            in_transfer: if role == Role::Decode && subject.is_some_and(|l| l.deaf) {
                self.in_transfer(decode, since.plus(SECOND), now)
            } else {
                None
            },
            stall: if role == Role::Prefill { self.stall(prefill) } else { None },
            unread_prefill: self.unread_at(prefill, now),
            unread_decode: self.unread_at(decode, now),
            unsent: role == Role::Prefill && room.links.iter().any(Link::is_unsent),
            refused: self.peers.get(decode).and_then(|e| e.refused),
            connecting: self.peers.get(decode).and_then(|e| e.connecting),
            cut: self.peers.get(decode).and_then(|e| e.cut),
            decode_reached: self.peers.get(decode).is_some_and(|e| e.reached),
            prefill_lost: self.lost(prefill, room.opened_at),
            decode_lost: self.lost(decode, room.opened_at),
            request,
            engine_idle: self.engine_idle(room, since, now),
            may_compute,
            wrote,
            decode_wrote,
            decode_may_be_paused: self.decode_may_be_paused(room, decode_wrote),
            spans: crate::rooms::spans::facts(room),
            gpu: if role == Role::Prefill {
                self.gpu_facts(room, prefill, since)
            } else {
                GpuFacts::default()
            },
            moving: if role == Role::Prefill { self.moving(room, since, now) } else { None },
            network: Vec::new(),
            pinned_since: room.judgement.as_ref().filter(|j| j.class.pins()).map(|j| j.since),
        })
    }

    /// Whether this room's Success is on the wire.
    pub(crate) fn says_success(&self, room: &Room) -> bool {
        let says = |id| self.peers.prefill(id).is_some_and(|p| p.says_success);
        success_on_wire(room.backend, room.releases)
            || says(room.home.0)
            || room.links.iter().any(|l| says(l.prefill))
    }

    /// Phase of a view for judging. What decode, on this host, has sent is not missing where prefill, on this host as well,
    /// has not read it: prefill is to answer then. `None` too where that prefill is not known to be here: decode's view tells.
    fn phase_here(&self, room: &Room, role: Role, view: Progress) -> Option<(Phase, Mono)> {
        let (phase, since) = phase_of(room, role, view, self.says_success(room))?;
        if role == Role::Prefill
            && phase == Phase::Bootstrap
            && let Some(asked) = room.unread_metadata()
        {
            let here = room.links.iter().all(|l| l.received.is_some() || self.peers.is_owned(l.prefill));
            return here.then_some((Phase::Transfer, asked));
        }
        Some((phase, since))
    }

    fn threshold(&self, subject: Option<&Link>, phase: Phase) -> Threshold {
        let rule = self.config.rule();
        let pair = subject.and_then(|l| self.peers.pair_of(l.pair));
        let pages = subject.map_or(0, |l| u64::from(l.pages));
        match pair {
            Some(p) => p.durations.threshold(phase, pages, rule),
            None => Threshold { nanos: rule.floor, samples: 0 },
        }
    }

    fn completeness(&self, room: &Room, phase: Phase) -> Completeness {
        if room.completeness == Completeness::Full {
            if self.is_lossy(room) || self.may_have_missed_frames(room) {
                return Completeness::Lossy;
            }
            if room.maybe_older && phase == Phase::Bootstrap {
                return Completeness::Preexisting;
            }
        }
        room.completeness
    }

    pub(crate) fn party(&self, role: Role, id: EndpointId, here: bool) -> Party {
        let e = self.peers.get(id);
        let task = e.and_then(|e| e.task).filter(|_| here);
        let process = task.and_then(|t| self.engines.process(t.tgid));
        Party {
            role: Some(role),
            rank: e.and_then(|e| e.rank),
            endpoint: e.map(|e| e.address),
            task,
            local: e.map(|_| here),
            ended: task.is_some() && !self.peers.is_owned(id),
            http: None,
            place: process.map(Known::place),
            rank_names: process.and_then(Known::rank_names),
            ..Party::default()
        }
    }

    /// Decode ranks of the same engine that registered at this prefill rank and have not sent METADATA.
    fn missing(&self, room: &Room, role: Role, prefill: EndpointId, session: SessionId) -> Vec<Party> {
        let sent: Vec<SessionId> =
            room.links.iter().filter(|l| l.prefill == prefill).map(|l| l.session).collect();
        let required = room.required_at(prefill);
        let Some(rank) = self.peers.prefill(prefill) else { return Vec::new() };
        if sent.is_empty() || u32::try_from(sent.len()).is_ok_and(|n| n >= required) {
            return Vec::new();
        }
        let of = |s: SessionId| rank.registered.iter().find(|r| r.session == s);
        let Some(asker) = of(session) else { return Vec::new() };
        let ip = |id: EndpointId| self.peers.address(id).map(|a| a.ip());
        let ranks: Vec<_> = sent.iter().filter_map(|s| of(*s)).map(|r| r.tp_rank).collect();
        let candidates = rank
            .registered
            .iter()
            .filter(|r| !sent.contains(&r.session) && r.tp_size == asker.tp_size)
            .filter(|r| r.tp_rank.is_none() || !ranks.contains(&r.tp_rank));
        let same_host: Vec<_> = candidates.clone().filter(|r| ip(r.decode) == ip(asker.decode)).collect();
        let chosen: Vec<_> = if same_host.is_empty() { candidates.collect() } else { same_host };
        // Newest first: an engine that restarted has registered again.
        let here = role == Role::Decode || room.has_decode;
        chosen
            .into_iter()
            .rev()
            .take(MAX_MISSING)
            .map(|r| Party { rank: r.tp_rank, ..self.party(Role::Decode, r.decode, here) })
            .collect()
    }

    /// Ranks that have said how it ended, and those that have not.
    fn told(&self, room: &Room, role: Role) -> (Vec<(Party, KvPoll)>, Vec<Party>) {
        let (mut told, mut untold) = (Vec::new(), Vec::new());
        let ambiguous = room.links.iter().any(|l| l.guessed);
        for l in &room.links {
            // On one host what prefill sent counts; decode may just not have read it.
            let said = if role == Role::Decode { l.heard.or(l.told) } else { l.told };
            if said.is_none() && !l.owes() {
                continue;
            }
            let mut party = self.party(Role::Prefill, l.prefill, room.has_prefill);
            party.rank = l.rank.or(party.rank);
            if ambiguous {
                (party.endpoint, party.task, party.rank) = (None, None, l.rank);
            }
            match said {
                Some(t) => told.push((party, t.status)),
                None => untold.push(party),
            }
        }
        (told, untold)
    }

    /// Prefill ranks of which it cannot be told which one said what.
    fn ambiguous(&self, room: &Room) -> Vec<std::net::SocketAddr> {
        if !room.links.iter().any(|l| l.guessed) {
            return Vec::new();
        }
        let speaks = |l: &&Link| l.owes() || room.backend == Some(Backend::Mori);
        room.links.iter().filter(speaks).filter_map(|l| self.peers.address(l.prefill)).collect()
    }

    fn others(&self, subject: Option<&Link>, prefill: EndpointId) -> Others {
        let mut o = Others::default();
        let rank = self.peers.prefill(prefill);
        if let Some(p) = rank {
            o.last_answer = p.answers.last;
            o.silent_at_rank = p.answers.silent();
        }
        let Some(l) = subject else { return o };
        let asked = l.asked_at();
        if let Some(p) = self.peers.pair_of(l.pair) {
            o.overtaken = p.answers.recent.overtook(asked, l.pages);
            o.drained = p.answers.recent.drained(asked);
            o.session_answers = p.answers.answered > l.numbers.1;
            o.silent_in_session = p.answers.silent();
        }
        if let Some(p) = rank {
            o.overtaken_at_rank = p.answers.recent.overtook(asked, 0);
            o.as_long_at_rank = p.answers.recent.overtook(asked, l.pages);
            o.drained_at_rank = p.answers.recent.drained(asked);
            o.rank_answers =
                p.answers.answered > l.numbers.0 || p.acknowledged_abort.is_some_and(|at| at >= asked);
        }
        o
    }

    /// How many rooms of the session, with at least as many pages, were asked for and concluded since the engine said that
    /// nothing waits in it, this room's request and METADATA being there long before.
    fn passed(&self, room: &Room, subject: Option<&Link>) -> u32 {
        let Some(l) = subject else { return 0 };
        let there = room.leg(Role::Prefill).map_or(l.asked_at(), |leg| l.asked_at().max(leg.seen.begun));
        // By then what its server had to do before its scheduler got it is done.
        let clear = self.nothing_waited(room, there.plus(self.config.floor));
        let (Some(clear), Some(p)) = (clear, self.peers.pair_of(l.pair)) else { return 0 };
        p.answers.recent.overtook(clear, l.pages)
    }

    fn metadata_sent(&self, l: &Link) -> Sent {
        let Some(sent) = l.sent else { return Sent::Unknown };
        match self.sent(l.metadata_delivery, sent, l.metadata_on) {
            // Its reader is here and has it, whatever its sender's kernel knows.
            Sent::Waiting { .. } | Sent::Lost { .. } if l.received.is_some() => Sent::Unknown,
            sent => sent,
        }
    }

    /// What became of the STATUS of this room that fared worst.
    fn worst_status(&self, room: &Room) -> Sent {
        room.links.iter().map(|l| self.status_sent(l)).max_by_key(gravity).unwrap_or_default()
    }

    fn status_sent(&self, l: &Link) -> Sent {
        match l.told {
            Some(t) if l.heard.is_none() => self.sent(l.status_delivery, t.at, l.status_on),
            _ => Sent::Unknown,
        }
    }

    fn sent(&self, delivery: Delivery, sent: Mono, on: Option<crate::event::SocketId>) -> Sent {
        match delivery {
            Delivery::Acknowledged => Sent::Acknowledged(sent),
            Delivery::Lost { at, error } => Sent::Lost { sent, at, error },
            Delivery::Unknown => {
                let k = on.and_then(|s| self.connections.get(self.connections.find(s)));
                let again = k.and_then(|k| k.again);
                let again = again.map(|a| AgainFact { since: a.since.max(sent), ..a.fact() });
                match k.and_then(|k| k.una) {
                    Some((_, read)) if read > sent => Sent::Waiting { sent, read, again },
                    _ => Sent::Unknown,
                }
            }
        }
    }

    fn abort_sent(&self, a: &Abort) -> Sent {
        if a.on.is_none() || a.acknowledged.is_some() {
            return Sent::Unknown;
        }
        self.sent(a.delivery, a.at, a.on)
    }

    pub(crate) fn lost(&self, id: EndpointId, opened_at: Mono) -> Option<LostFact> {
        let e = self.peers.get(id)?;
        // Of the process that this room began with: where it was, another may listen now.
        if let Some(x) = e.exited.filter(|x| x.at >= opened_at) {
            return Some(LostFact { at: x.at, listener: true, exit: Some(x) });
        }
        let gone = e.lost.map(|at| LostFact { at, listener: false, exit: None });
        e.listener_closed.map(|at| LostFact { at, listener: true, exit: None }).or(gone)
    }
}

/// The link that a view hangs on: the first that is not concluded, else the first.
fn subject(room: &Room, role: Role, phase: Phase) -> Option<&Link> {
    let open = |l: &&Link| match role {
        Role::Prefill => l.received.is_some() && l.told.is_none(),
        Role::Decode => l.sent.is_some() && (l.heard.is_none() || l.deaf),
    };
    let incomplete = |l: &&Link| phase == Phase::Bootstrap && l.received.is_some() && !room.enough(l.prefill);
    room.links
        .iter()
        .find(incomplete)
        .or_else(|| room.links.iter().find(|l| open(l) && l.owes()))
        .or_else(|| room.links.iter().find(open))
        .or_else(|| room.links.first())
}

fn dummies(room: &Room, role: Role, subject: Option<&Link>) -> Dummies {
    let mut here = room.links.iter().filter(|l| match role {
        Role::Prefill => l.received.is_some(),
        Role::Decode => l.sent.is_some(),
    });
    if here.clone().next().is_some() && here.all(|l| !l.owes()) {
        return Dummies::All;
    }
    if subject.is_some_and(|l| l.dummy.is_none()) { Dummies::Unknown } else { Dummies::Some }
}

/// The worst that became of a message.
const fn gravity(sent: &Sent) -> u8 {
    match sent {
        Sent::Unknown => 0,
        Sent::Acknowledged(_) => 1,
        Sent::Waiting { again: None, .. } => 2,
        Sent::Waiting { .. } => 3,
        Sent::Lost { .. } => 4,
    }
}

/// Phase of a view for judging. A view that is over can still owe its peer a message.
fn phase_of(room: &Room, role: Role, view: Progress, says_success: bool) -> Option<(Phase, Mono)> {
    if view.terminal.is_none() {
        // Decode waits although prefill, on this host too, has told all: nothing queues any more. Where Success is not on the
        // wire prefill has told nothing: its request was answered, and decode generates.
        if role == Role::Decode && view.phase == Phase::Transfer && room.has_prefill && says_success {
            let prefill = room.progress(Role::Prefill);
            if prefill.terminal == Some(Outcome::Success) {
                return Some((Phase::Conclude, prefill.since));
            }
        }
        return Some((view.phase, view.since));
    }
    // Over, as the frames have it, and its request is still open: prefill answers when its side has ended.
    if role == Role::Prefill && room.held_by_request(role) {
        let by_abort = room.abort.filter(|_| !room.links.iter().any(|l| l.told.is_some()));
        return Some(by_abort.map_or((Phase::Conclude, view.since), |a| (Phase::Abort, a.at)));
    }
    match role {
        // All told, not yet acknowledged.
        Role::Prefill if view.terminal == Some(Outcome::Success) && !room.has_decode => {
            Some((Phase::Conclude, view.since))
        }
        Role::Prefill => None,
        // Where prefill is here too its view says the rest, but not that an ABORT does not come to it.
        Role::Decode => room.abort.filter(|a| !room.has_prefill || !a.received).map(|a| (Phase::Abort, a.at)),
    }
}
