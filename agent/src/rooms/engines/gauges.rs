//! Queue counts of an engine against the rooms known here: what it counts and no room explains, and rooms that it does not
//! count.
//!
//! Conservative throughout: a room of which nothing tells whose it is explains a request of every engine, a room that is
//! parked before its hand-over explains one too, so does one that has just closed, and a count that has fallen within [`STEADY`]
//! by more than rooms have closed says nothing.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::event::{Mono, SECOND};
use crate::rooms::engines::engine::SERVED;
use crate::rooms::model::{Connection, EngineGauges, Event, Role};
use crate::rooms::room::Room;
use crate::rooms::table::RoomTable;
use crate::sglang::message::Release;
use crate::verdict::judge::BOOTSTRAP_TIMER;
use crate::verdict::known::parse;
use crate::verdict::model::{Action, Class, Confidence, Finding};

/// What a finding of this module is about; part of what names it.
pub(super) const ABOUT_COUNT: &str = "inflight_count";
/// See [`ABOUT_COUNT`].
pub(super) const ABOUT_BOOTSTRAP: &str = "bootstrap_count";
/// See [`ABOUT_COUNT`].
pub(super) const ABOUT_ROOMS: &str = "rooms_not_counted";

/// An inflight count must not have fallen for so long: `/metrics` can be 30 s old.
pub(super) const STEADY: u64 = 45 * SECOND;

/// Progress counters must have stood still for so long at least, between two answers.
const STILL: u64 = 10 * SECOND;

/// How long an engine may count a request whose room has closed: its scheduler notices between two forward passes.
const LEAVES: u64 = 10 * SECOND;
/// The same where its count can be 30 s old.
const LEAVES_STALE: u64 = 40 * SECOND;

/// Last release in which a request without a hand-over can stay in the inflight queue for ever (sglang#28652, M39).
const GHOSTS_UNTIL: Release = Release::new(0, 5, 20, u16::MAX);

/// Peers and rooms named in a finding at most.
const MAX_NAMED: usize = 8;

/// Requests in one queue that no room known here explains, over time.
#[derive(Debug, Default)]
struct Unexplained {
    /// In the queue at the last answer, as the engine says.
    counted: u64,
    /// Of those, in no room known here.
    now: u64,
    /// Since when some were in no room.
    since: Option<Mono>,
    /// So many at least, since then.
    least: u64,
    /// Whether some were from the first answer on.
    from_start: Option<bool>,
}

impl Unexplained {
    /// Takes an answer in: `counted` requests, `now` of them in no room; `ended` rooms can have left since the last one.
    fn take(&mut self, at: Mono, counted: u64, now: u64, ended: u64) {
        // More left than rooms ended: one that no room explains can be among them.
        let fell = counted.saturating_add(ended) < self.counted;
        if fell || counted == 0 {
            (self.since, self.from_start) = (None, Some(false));
        }
        if now > 0 && self.since.is_none() {
            (self.since, self.least) = (Some(at), now);
            self.from_start.get_or_insert(true);
        }
        if now > 0 {
            self.least = self.least.min(now);
        }
        self.least = self.least.min(counted);
        self.from_start.get_or_insert(false);
        (self.counted, self.now) = (counted, now);
    }

    /// Since when, where it is long and still so.
    fn long(&self, at: Mono) -> Option<Mono> {
        self.since.filter(|since| self.now > 0 && at.since(*since) >= STEADY)
    }
}

/// What of an engine's queues is in no room known here.
#[derive(Clone, Copy, Debug, Default)]
struct Compared {
    inflight: u64,
    bootstrap: u64,
    /// Rooms that can have left its queues since the last answer.
    ended: u64,
    /// Whether none has so lately that it may be counted still.
    settled: bool,
}

/// What an engine counted, over time.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// The last answer.
    last: Option<(Mono, EngineGauges)>,
    /// In its inflight queue (prefill) or transfer queue (decode).
    inflight: Unexplained,
    /// In its bootstrap queue (prefill).
    bootstrap: Unexplained,
    /// Whether no room has left its queues so lately that it may be counted still.
    settled: bool,
    /// When a room was last seen to leave them.
    left: Option<Mono>,
    /// Progress, and since when it stands there.
    progress: Option<(u64, Mono)>,
    /// Since when every queue has been empty.
    empty: Option<Mono>,
    /// The same by counts of the moment alone.
    empty_now: Option<Mono>,
    /// Open connections of the engine as of the last answer.
    pub(super) open: Vec<(Connection, bool)>,
    /// Whether the connections were ever told.
    pub(super) open_known: bool,
}

impl Counts {
    /// Role as the engine says it.
    pub(super) fn role(&self) -> Option<Role> {
        self.last.as_ref().and_then(|(_, g)| g.role)
    }

    /// Release as the engine says it.
    pub(super) fn release(&self) -> Option<Release> {
        self.last.as_ref().and_then(|(_, g)| parse(g.version.as_deref()?))
    }

    /// The last answer, and since when at least so many of its transfers are unexplained that were not from the first answer on.
    pub(super) fn grown(&self) -> Option<(&EngineGauges, Mono, u64)> {
        let (_, gauges) = self.last.as_ref()?;
        let held = Some(&self.inflight).filter(|u| u.from_start == Some(false))?;
        Some((gauges, held.since?, held.least))
    }

    /// Whether it had work when it was last asked.
    pub(super) fn works(&self) -> bool {
        self.last
            .as_ref()
            .is_some_and(|(_, g)| [g.inflight, g.running, g.waiting].into_iter().flatten().any(|n| n > 0))
    }

    /// Takes an answer in.
    fn take(&mut self, at: Mono, gauges: &EngineGauges, counted: Option<u64>, compared: Compared) {
        let Compared { inflight, bootstrap, ended, settled } = compared;
        self.inflight.take(at, counted.unwrap_or(0), inflight, ended);
        self.bootstrap.take(
            at,
            gauges.bootstrap.filter(|_| counted.is_some()).unwrap_or(0),
            bootstrap,
            ended,
        );
        self.settled = settled;
        if ended > 0 {
            self.left = Some(at);
        }
        self.progress = match (gauges.progress, self.progress) {
            (Some(now), Some((was, since))) if now == was => Some((now, since)),
            (Some(now), _) => Some((now, at)),
            (None, _) => None,
        };
        let queues = [gauges.inflight, gauges.bootstrap, gauges.waiting, gauges.running];
        if queues.iter().all(|n| *n == Some(0)) {
            self.empty.get_or_insert(at);
            if !gauges.stale {
                self.empty_now.get_or_insert(at);
            }
        } else {
            (self.empty, self.empty_now) = (None, None);
        }
        self.last = Some((at, gauges.clone()));
    }

    /// Since when nothing is computed: the counters stand still and nothing waits or runs. `None`: something is, or the
    /// engine does not tell.
    fn still(&self) -> Option<Mono> {
        let (at, gauges) = self.last.as_ref()?;
        let (_, since) = self.progress?;
        let idle = gauges.waiting == Some(0) && gauges.running == Some(0) && !gauges.stale;
        (idle && at.since(since) >= STILL).then_some(since)
    }
}

impl RoomTable {
    /// What an engine says of itself.
    pub(crate) fn gauged(&mut self, at: Mono, gauges: &EngineGauges, _out: &mut Vec<Event>) {
        self.requests_gauged(at, gauges);
        // That it could not be asked says nothing of its requests: what was found stands.
        if gauges.error.is_some() || self.engines.server(gauges.server).is_none() {
            return;
        }
        let role = gauges.role.or_else(|| self.role_of_process(gauges.server));
        let paused = gauges.paused.is_some_and(|n| n > 0);
        let watched = role == Some(Role::Prefill) && gauges.inflight.is_some() && !paused;
        let (counted, compared) = match role {
            Some(Role::Prefill) if watched => (gauges.inflight, self.compared(at, gauges)),
            Some(Role::Decode) if !paused => {
                let inflight = self.held_at_decode(gauges);
                // One of any engine's rooms explains one, so that a busy engine begins anew again and again.
                (gauges.inflight.filter(|_| inflight > 0), Compared { inflight, ..Compared::default() })
            }
            _ => (None, Compared::default()),
        };
        if let Some(engine) = self.engines.server_mut(gauges.server) {
            engine.counts.take(at, gauges, counted, compared);
        }
        if role == Some(Role::Decode) {
            return self.judge_held(at, gauges.server);
        }
        for about in [ABOUT_COUNT, ABOUT_BOOTSTRAP] {
            self.judge_count(at, gauges.server, about);
        }
        self.judge_rooms(at, gauges.server, watched);
    }

    /// Open connections of an engine, each with whether it can be rank traffic, to be told just before its gauges.
    pub fn open_connections(&mut self, server: u32, open: Vec<(Connection, bool)>) {
        if let Some(engine) = self.engines.server_mut(server) {
            engine.counts.open = open;
            engine.counts.open_known = true;
        }
    }

    /// Requests of a prefill engine's queues that no room known here explains, by DP rank where the engine tells them apart.
    fn compared(&self, at: Mono, gauges: &EngineGauges) -> Compared {
        let (inflight, bootstrap) = (gauges.inflight.unwrap_or(0), gauges.bootstrap.unwrap_or(0));
        if inflight == 0 && bootstrap == 0 {
            // Nothing is to be explained, and what was is over: the rooms need not be walked.
            return Compared::default();
        }
        let leaves = if gauges.stale { LEAVES_STALE } else { LEAVES };
        let asked =
            self.engines.server(gauges.server).and_then(|e| e.counts.last.as_ref()).map_or(at, |(at, _)| *at);
        let from = Mono(asked.0.min(at.0).saturating_sub(leaves));
        let (mut by_rank, mut anywhere): (BTreeMap<u32, u64>, u64) = (BTreeMap::new(), 0);
        // Ended at prefill, if they have; those of which only the delivery is not known yet are open.
        let closed = self.closed.iter().rev().map(|r| (r, r.closed.map(|(at, _)| at)));
        let closed = closed.take_while(|(_, over)| over.is_some_and(|over| over >= from));
        let open = self.rooms.iter().map(|r| {
            let view = r.progress(Role::Prefill);
            // What its server still holds its scheduler may count as well.
            (r, view.terminal.filter(|_| !r.held_by_request(Role::Prefill)).map(|_| view.since))
        });
        let (mut ended, mut settled) = (0, true);
        for (room, over) in closed.chain(open).filter(|(r, _)| r.has_prefill) {
            let home = self.home_of(room);
            if home.is_some_and(|(server, _)| server != gauges.server) {
                continue;
            }
            let lately = over.is_some_and(|over| at.since(over) < leaves);
            ended += u64::from(over.is_some_and(|over| over >= from));
            settled &= !lately;
            match home {
                _ if over.is_some() && !lately => {}
                Some((_, Some(rank))) => *by_rank.entry(rank).or_insert(0) += 1,
                Some((_, None)) | None => anywhere += 1,
            }
        }
        let known = by_rank.values().sum::<u64>().saturating_add(anywhere);
        let apart = gauges.inflight_by_dp.len() > 1;
        let over = if apart {
            let of = |rank: &u32| by_rank.get(rank).copied().unwrap_or(0);
            let by_dp = gauges.inflight_by_dp.iter();
            by_dp
                .fold(0, |sum: u64, (rank, n)| sum.saturating_add(n.saturating_sub(of(rank))))
                .saturating_sub(anywhere)
        } else {
            inflight.saturating_sub(known)
        };
        let bootstrap = bootstrap.min(inflight.saturating_add(bootstrap).saturating_sub(known));
        Compared { inflight: over, bootstrap, ended, settled }
    }

    /// The engine and the DP rank that a room waits at, on prefill's side. `None`: not known.
    fn home_of(&self, room: &Room) -> Option<(u32, Option<u32>)> {
        self.home_by_rank(room).or_else(|| {
            // A request that no frame has followed yet waits where it came to.
            let engine = self.engines.get(room.leg(Role::Prefill)?.engine)?;
            Some((engine.pid?, None))
        })
    }

    fn home_by_rank(&self, room: &Room) -> Option<(u32, Option<u32>)> {
        let here = room.links.iter().find(|l| l.received.is_some()).map_or(room.home.0, |l| l.prefill);
        let pid = self.peers.get(here)?.task?.tgid;
        let known = self.engines.process(pid)?;
        Some((known.process.server, known.process.ranks.as_deref().and_then(dp_rank)))
    }

    /// Raises or lowers the finding about a count that no room explains.
    fn judge_count(&mut self, at: Mono, server: u32, about: &str) {
        let group = self.group_of(about, server);
        let queue = |c: &Counts| if about == ABOUT_COUNT { c.inflight.since } else { c.bootstrap.since };
        if self.engines.server(server).is_none_or(|e| queue(&e.counts).is_none()) {
            self.lower(group, at);
            return;
        }
        let finding = if about == ABOUT_COUNT {
            self.count_finding(at, server, group)
        } else {
            self.bootstrap_finding(at, server, group)
        };
        if let Some(finding) = finding {
            self.raise(finding);
        }
    }

    /// Whether an engine's counts can be compared with its rooms: it computes nothing, or what it computes is seen and none
    /// of it may be counted still.
    fn comparable(&self, at: Mono, server: u32, counts: &Counts, since: Mono) -> bool {
        if counts.progress.is_none_or(|(_, still)| at.since(still) >= STILL) {
            return true;
        }
        let seen = counts.left.is_some_and(|left| left >= since);
        counts.settled
            && seen
            && self.peers.pairs().any(|p| p.concluded > 0 && self.server_at(p.prefill) == Some(server))
    }

    fn count_finding(&self, at: Mono, server: u32, group: u64) -> Option<Finding> {
        let counts = &self.engines.server(server)?.counts;
        let since = counts.inflight.long(at).filter(|since| self.comparable(at, server, counts, *since))?;
        let (_, gauges) = counts.last.as_ref()?;
        let ranks: Vec<SocketAddr> = self.rank_peers(server);
        let known = self.peers.pairs().any(|p| self.server_at(p.prefill) == Some(server));
        let old = gauges.version.as_deref().and_then(parse).is_some_and(|r| r <= GHOSTS_UNTIL);
        let ghost = old && counts.inflight.least == 1 && ranks.is_empty() && !known;
        let still = counts.still();
        let sure = !ghost && still.is_some_and(|s| at.since(s) >= STEADY);
        let mut evidence = vec![count_line(at, since, gauges, counts)];
        evidence.push(progress_line(at, gauges, counts));
        evidence.extend(older_line(&counts.inflight));
        evidence.extend(peers_line(&ranks));
        evidence.extend(self.idle_line(server, gauges));
        if old {
            evidence.push(
                "up to release 0.5.20 a request without any hand-over (warm-up, health check) can hold 1 for ever \
                 (sglang#28652)"
                    .to_owned(),
            );
        }
        Some(Finding {
            group,
            class: if ghost { Class::LocalGhost } else { Class::GaugeUnexplained },
            confidence: if sure { Confidence::Likely } else { Confidence::Possible },
            engine: self.engine_party(server),
            rooms: Vec::new(),
            room_count: 0,
            since,
            closed_at: None,
            evidence,
            actions: actions(server, gauges, &ranks, ghost),
        })
    }

    /// Requests that wait for decode's side, and no room tells of them. Decode may be short of memory, so it is `possible` only.
    fn bootstrap_finding(&self, at: Mono, server: u32, group: u64) -> Option<Finding> {
        let counts = &self.engines.server(server)?.counts;
        let since = counts.bootstrap.long(at).filter(|since| self.comparable(at, server, counts, *since))?;
        let (_, gauges) = counts.last.as_ref()?;
        let ranks = self.rank_peers(server);
        let mut evidence = vec![format!(
            "{} in its bootstrap queue (num_prefill_bootstrap_queue_reqs), at least {} of which no room known here explains for {} s: \
             they wait for METADATA of their decode engine",
            gauges.bootstrap.unwrap_or(0),
            counts.bootstrap.least.max(1),
            at.since(since) / SECOND
        )];
        evidence.push(progress_line(at, gauges, counts));
        evidence.extend(older_line(&counts.bootstrap));
        evidence.extend(peers_line(&ranks));
        evidence.extend(self.idle_line(server, gauges));
        evidence.push(format!(
            "a decode engine without free KV memory looks the same; what ends them is {BOOTSTRAP_TIMER} (not in NIXL before 0.5.18)"
        ));
        Some(Finding {
            group,
            class: Class::GaugeUnexplained,
            confidence: Confidence::Possible,
            engine: self.engine_party(server),
            rooms: Vec::new(),
            room_count: 0,
            since,
            closed_at: None,
            evidence,
            actions: actions(server, gauges, &ranks, false),
        })
    }

    /// Raises or lowers the finding about pinned rooms that their engine does not count.
    fn judge_rooms(&mut self, at: Mono, server: u32, watched: bool) {
        let group = self.group_of(ABOUT_ROOMS, server);
        let finding = if watched { self.rooms_finding(at, server, group) } else { None };
        match finding {
            Some(finding) => self.raise(finding),
            None => self.lower(group, at),
        }
    }

    fn rooms_finding(&self, at: Mono, server: u32, group: u64) -> Option<Finding> {
        let counts = &self.engines.server(server)?.counts;
        let long = |since: Option<Mono>| since.filter(|since| at.since(*since) >= STEADY);
        let empty = long(counts.empty)?;
        // Counts that can be old stand at nothing while a pinned room is all there is: they must have moved since it was pinned.
        let now = long(counts.empty_now);
        let mut rooms: Vec<(Mono, u64)> = Vec::new();
        for room in self.pinned.iter().filter_map(|slot| self.rooms.get(*slot)) {
            let judged = room.judgement.as_deref().filter(|j| j.role == Role::Prefill);
            let uncounted = |since: Mono| since <= empty || (now.is_some() && at.since(since) >= STEADY);
            let judged = judged.filter(|j| uncounted(j.since) && at.since(reached(room)) >= SERVED);
            if judged.is_some() && self.home_of(room).is_some_and(|(home, _)| home == server) {
                rooms.push((room.opened_at, room.room));
            }
        }
        if rooms.is_empty() {
            return None;
        }
        rooms.sort_unstable();
        let (_, gauges) = counts.last.as_ref()?;
        Some(Finding {
            group,
            class: Class::GaugeUnexplained,
            confidence: Confidence::Possible,
            engine: self.engine_party(server),
            room_count: u32::try_from(rooms.len()).unwrap_or(u32::MAX),
            rooms: rooms.into_iter().map(|(_, room)| room).take(100).collect(),
            since: empty,
            closed_at: None,
            evidence: vec![
                format!(
                    "the engine has had no request in any queue for {} s, and these rooms wait for it",
                    at.since(empty) / SECOND
                ),
                "either it never got their requests (look at the router), or they ended where nothing shows it".to_owned(),
            ],
            actions: vec![look_again(gauges)],
        })
    }

    fn server_at(&self, endpoint: crate::rooms::peers::EndpointId) -> Option<u32> {
        self.server_of(self.peers.get(endpoint)?.task?.tgid)
    }

    /// Decode ranks that this engine's ranks are or were in touch with: who the request can be for.
    fn rank_peers(&self, server: u32) -> Vec<SocketAddr> {
        let pairs = self.peers.pairs().filter(|p| self.server_at(p.prefill) == Some(server));
        let mut peers: Vec<SocketAddr> = pairs.filter_map(|p| self.peers.address(p.decode)).collect();
        let open = self.engines.server(server).map_or(&[][..], |e| &e.counts.open);
        // Those of the server's own process are HTTP.
        let ranks = open.iter().filter(|(c, rank)| *rank && c.task.is_some_and(|t| t.tgid != server));
        peers.extend(ranks.map(|(c, _)| c.addresses.peer));
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// Connections to the engine's HTTP port that are older than the agent: one of them can wait for the answer.
    fn idle_line(&self, server: u32, gauges: &EngineGauges) -> Option<String> {
        let port = self.engines.process(server)?.process.http_port?;
        let open = &self.engines.server(server)?.counts.open;
        let here = |c: &Connection| c.addresses.local.port() == port && c.preexisting;
        let mut from: Vec<String> = open
            .iter()
            .filter(|(c, _)| here(c) && gauges.address.is_none_or(|a| a != c.addresses.peer))
            .map(|(c, _)| c.addresses.peer.to_string())
            .collect();
        from.sort_unstable();
        from.dedup();
        (!from.is_empty()).then(|| {
            format!(
                "connections to its HTTP port that were open before the agent, one of which may wait for the answer: {}",
                list(&from)
            )
        })
    }
}

/// When all of a room that its engine can have had come: its request, where it is seen, and METADATA.
fn reached(room: &Room) -> Mono {
    let begun = room.leg(Role::Prefill).map_or(room.opened_at, |leg| leg.seen.begun);
    room.links.iter().filter_map(|l| l.received).max().map_or(begun, |at| at.max(begun))
}

/// `DP1 TP3` → 1.
fn dp_rank(ranks: &str) -> Option<u32> {
    ranks.split(' ').find_map(|r| r.strip_prefix("DP")).and_then(|n| n.parse().ok())
}

fn count_line(at: Mono, since: Mono, gauges: &EngineGauges, counts: &Counts) -> String {
    let inflight = gauges.inflight.unwrap_or(0);
    let from = if gauges.stale { ", a count that can be 30 s old" } else { "" };
    format!(
        "{inflight} in its inflight queue (num_prefill_inflight_queue_reqs{from}), at least {} of which no room known here \
         explains for {} s",
        counts.inflight.least.max(1),
        at.since(since) / SECOND
    )
}

fn progress_line(at: Mono, gauges: &EngineGauges, counts: &Counts) -> String {
    let n = |n: Option<u64>| n.map_or("not told".to_owned(), |n| n.to_string());
    let queues = format!("waiting {}, running {}", n(gauges.waiting), n(gauges.running));
    match counts.progress {
        Some((_, since)) => {
            format!("its prefill counters have stood still for {} s; {queues}", at.since(since) / SECOND)
        }
        None => format!("it tells no progress counters (before 0.5.18, or only /metrics); {queues}"),
    }
}

fn older_line(held: &Unexplained) -> Option<String> {
    (held.from_start == Some(true))
        .then(|| "it was there when the agent first asked: the request is older than the agent".to_owned())
}

fn peers_line(ranks: &[SocketAddr]) -> Option<String> {
    let names: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    (!names.is_empty())
        .then(|| format!("in touch with, so that the request can be for one of them: {}", list(&names)))
}

/// The first of them, and how many more.
fn list(names: &[String]) -> String {
    let more = names.len().saturating_sub(MAX_NAMED);
    let named: Vec<&str> = names.iter().take(MAX_NAMED).map(String::as_str).collect();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    format!("{}{more}", named.join(", "))
}

pub(super) fn url(gauges: &EngineGauges) -> String {
    gauges.address.map_or_else(|| "http://HOST:HTTP_PORT".to_owned(), |a| format!("http://{a}"))
}

pub(super) fn look_again(gauges: &EngineGauges) -> Action {
    Action {
        command: format!("curl -sS '{}/v1/loads?include=core,disagg'", url(gauges)),
        effect: "shows the engine's queues as they are now".to_owned(),
        blast_radius: "none".to_owned(),
        clears: false,
    }
}

fn actions(server: u32, gauges: &EngineGauges, ranks: &[SocketAddr], ghost: bool) -> Vec<Action> {
    let mut actions = vec![look_again(gauges)];
    if !ranks.is_empty() {
        let mut hosts: Vec<String> = ranks.iter().map(|a| a.ip().to_string()).collect();
        hosts.dedup();
        actions.push(Action {
            command: format!("roomtrace rooms --pinned   # on {}", list(&hosts)),
            effect: "shows whether a decode engine there waits for a room of this engine".to_owned(),
            blast_radius: "none".to_owned(),
            clears: false,
        });
    }
    if !ghost {
        actions.push(Action {
            command: format!(
                "curl -sS -X POST {}/abort_request -H 'Content-Type: application/json' -d '{{\"abort_all\":true}}'",
                url(gauges)
            ),
            effect: "ends every request of that engine, also one whose request id nobody knows any more".to_owned(),
            blast_radius: format!(
                "every running and queued request of that engine ({} in hand-over, {} waiting, {} running)",
                gauges.inflight.unwrap_or(0),
                gauges.waiting.unwrap_or(0),
                gauges.running.unwrap_or(0)
            ),
            clears: true,
        });
    }
    actions.push(Action {
        // What its server's SIGTERM does: `verdict::actions`.
        command: format!("kill -QUIT {server}"),
        effect: "ends the engine at once (SIGTERM would wait for the request, for ever); its supervisor starts it again with \
                 empty queues"
            .to_owned(),
        blast_radius: "every request of that engine; its peers notice by heartbeat".to_owned(),
        clears: true,
    });
    actions
}
