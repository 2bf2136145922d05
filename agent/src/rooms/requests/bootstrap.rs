//! What passes at bootstrap servers: the ranks that registered, and the queries that got no answer.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: [`MAX_SERVERS`] servers, [`MAX_RANKS`] ranks each,
//! [`MAX_QUERIES`] open queries, [`MAX_LISTENERS`] listeners.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::event::{Mono, SECOND};
use crate::http::event::{RankRegistration, Side, Topology};
use crate::rooms::findings::cause;
use crate::rooms::groups::Group;
use crate::rooms::model::{Away, BootstrapStep, Connection, Event, Role};
use crate::rooms::table::RoomTable;
use crate::verdict::explain::seconds;
use crate::verdict::model::{Action, Class, Confidence, Finding, Party};

const MAX_SERVERS: usize = 256;
const MAX_RANKS: usize = 4096;
const MAX_QUERIES: usize = 4096;
/// Listeners of engines remembered: those that were seen to begin.
const MAX_LISTENERS: usize = 4096;
/// Servers with missing ranks written down at most.
const MAX_SAVED: usize = 16;
/// Missing ranks named.
const MAX_NAMED: usize = 8;
/// Ranks of one engine register within this of each other: each does when its weights are loaded.
const SETTLED: u64 = 60 * SECOND;

/// Places of a rank: DP, CP, TP, PP.
type Place = (u32, u32, u32, u32);

/// A query: its client, the server, and its number on their connection, so one that is seen at both its ends is one.
type QueryKey = (SocketAddr, SocketAddr, u64);

/// A bootstrap server.
#[derive(Debug, Default)]
struct Bootstrap {
    registered: BTreeSet<Place>,
    /// Sizes: DP, CP, TP, PP.
    sizes: Option<Place>,
    /// When the last rank registered.
    last: Mono,
    /// The server was seen to begin, after all that had registered before, so nobody registered there unseen.
    whole: bool,
    /// When a registration last may have gone unseen.
    blind: Option<Mono>,
    /// Since the finding was first told, no agent looked for this long.
    away: Option<Away>,
    /// A rank, or the topology, was asked for and refused since.
    refused: Option<(Mono, u16)>,
    told_missing: bool,
    /// Queries without an answer since the last that got one.
    unanswered: u32,
    since: Option<Mono>,
    hung_up: Option<Side>,
    told_unanswered: bool,
}

impl Bootstrap {
    fn expected(&self) -> u64 {
        let Some((dp, cp, tp, pp)) = self.sizes else { return 0 };
        [dp, cp, tp, pp].into_iter().map(u64::from).product()
    }

    fn missing(&self) -> u64 {
        self.expected().saturating_sub(self.registered.len() as u64)
    }

    /// The first places that nobody has registered.
    fn absent(&self) -> Vec<String> {
        let Some((dps, cps, tps, pps)) = self.sizes else { return Vec::new() };
        let all = (0..dps).flat_map(|dp| {
            (0..cps).flat_map(move |cp| (0..tps).flat_map(move |tp| (0..pps).map(move |pp| (dp, cp, tp, pp))))
        });
        let absent = all.take(MAX_RANKS * 2).filter(|place| !self.registered.contains(place));
        absent.take(MAX_NAMED).map(|(dp, cp, tp, pp)| format!("DP{dp} CP{cp} TP{tp} PP{pp}")).collect()
    }
}

/// A bootstrap server of which it was told that ranks are missing, as it goes into the state file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedBootstrap {
    server: SocketAddr,
    registered: Vec<Place>,
    sizes: Place,
    last: Mono,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    refused: Option<(Mono, u16)>,
}

/// All bootstrap servers.
#[derive(Debug, Default)]
pub(crate) struct Bootstraps {
    servers: HashMap<SocketAddr, Bootstrap>,
    /// When listeners began, by network namespace and address. Those older than the agent are not among them.
    listeners: HashMap<(u32, SocketAddr), Mono>,
    /// Queries that wait for their answer, since when.
    queries: HashMap<QueryKey, Mono>,
}

impl Bootstraps {
    fn server(&mut self, at: SocketAddr) -> Option<&mut Bootstrap> {
        if self.servers.len() >= MAX_SERVERS && !self.servers.contains_key(&at) {
            return None;
        }
        Some(self.servers.entry(at).or_default())
    }

    /// Since when the server at this address listens, if it was seen to begin.
    fn listens(&self, netns: u32, at: SocketAddr) -> Option<Mono> {
        let any = [Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
        let addresses = any.map(|ip: IpAddr| SocketAddr::new(ip, at.port())).into_iter().chain([at]);
        addresses.filter_map(|a| self.listeners.get(&(netns, a)).copied()).max()
    }

    /// Servers to write down.
    pub(crate) fn save(&self) -> Vec<SavedBootstrap> {
        let missing = |(server, b): (&SocketAddr, &Bootstrap)| {
            Some(SavedBootstrap {
                server: *server,
                registered: b.registered.iter().copied().collect(),
                sizes: b.sizes.filter(|_| b.told_missing)?,
                last: b.last,
                refused: b.refused,
            })
        };
        let mut all: Vec<_> = self.servers.iter().filter_map(missing).collect();
        all.sort_unstable_by_key(|saved| (saved.last, saved.server));
        all.truncate(MAX_SAVED);
        all
    }

    /// Takes back what [`Self::save`] gave. A rank may have registered while no agent looked, which is said.
    pub(crate) fn restore(&mut self, saved: Vec<SavedBootstrap>, away: Away) {
        for s in saved.into_iter().take(MAX_SAVED) {
            let b = Bootstrap {
                registered: s.registered.into_iter().take(MAX_RANKS).collect(),
                sizes: Some(s.sizes),
                last: s.last,
                refused: s.refused,
                whole: true,
                away: Some(away),
                ..Bootstrap::default()
            };
            self.servers.insert(s.server, b);
        }
    }

    /// A query got an answer.
    fn answered(&mut self, key: QueryKey) {
        if self.queries.remove(&key).is_none() {
            return;
        }
        if let Some(b) = self.servers.get_mut(&key.1) {
            (b.unanswered, b.since, b.hung_up) = (0, None, None);
        }
    }
}

impl RoomTable {
    /// A step at a bootstrap server.
    pub(crate) fn bootstrap_step(
        &mut self,
        at: Mono,
        connection: &Connection,
        server: bool,
        n: u64,
        step: &BootstrapStep<'_>,
        out: &mut Vec<Event>,
    ) {
        let a = &connection.addresses;
        let (client, address) = if server { (a.peer, a.local) } else { (a.local, a.peer) };
        let key = (client, address, n);
        match step {
            BootstrapStep::Rank(r) => self.rank_registered(at, connection, address, server, r),
            BootstrapStep::Query(_) | BootstrapStep::DpQuery => {
                let b = &mut self.http.bootstraps;
                if b.queries.len() < MAX_QUERIES || b.queries.contains_key(&key) {
                    b.queries.entry(key).or_insert(at);
                } else {
                    self.tally.turned_away.requests += 1;
                }
            }
            BootstrapStep::RankIs(_) => {
                self.http.bootstraps.answered(key);
            }
            BootstrapStep::Topology(t) => {
                self.http.bootstraps.answered(key);
                self.topology(at, connection, address, t);
            }
            BootstrapStep::Refused(status) => {
                self.http.bootstraps.answered(key);
                if let Some(b) = self.http.bootstraps.servers.get_mut(&address) {
                    b.refused = Some((at, *status));
                }
            }
            BootstrapStep::HungUp(by) => {
                let b = &mut self.http.bootstraps;
                if let Some(since) = b.queries.remove(&key)
                    && let Some(s) = b.server(address)
                {
                    s.unanswered = s.unanswered.saturating_add(1);
                    s.since.get_or_insert(since);
                    s.hung_up = Some(*by);
                }
            }
            BootstrapStep::OutOfSight => {
                let b = &mut self.http.bootstraps;
                if b.queries.remove(&key).is_none()
                    && server
                    && let Some(b) = b.server(address)
                {
                    (b.blind, b.whole) = (Some(at), false);
                }
            }
            BootstrapStep::DpRank { room, rank } => {
                self.dp_rank(*room, *rank);
            }
            BootstrapStep::DpRanks(list) => {
                self.http.bootstraps.answered(key);
                for (room, rank) in *list {
                    self.dp_rank(*room, *rank);
                }
            }
        }
        let _ = out;
    }

    /// An engine listens from now on, or does so no longer.
    pub(crate) fn listens(&mut self, at: Mono, c: &Connection, begins: bool) {
        let (listeners, key) = (&mut self.http.bootstraps.listeners, (c.netns, c.addresses.local));
        if !begins {
            listeners.remove(&key);
        } else if listeners.len() < MAX_LISTENERS || listeners.contains_key(&key) {
            listeners.insert(key, at);
        }
    }

    /// The DP rank of prefill that has a room.
    fn dp_rank(&mut self, room: u64, rank: u32) {
        if let Some(room) = self.numbers.open(room).and_then(|slot| self.rooms.get_mut(slot)) {
            room.request.get_or_insert_default().dp_rank = Some(rank);
        }
    }

    fn rank_registered(
        &mut self,
        at: Mono,
        connection: &Connection,
        address: SocketAddr,
        server: bool,
        r: &RankRegistration,
    ) {
        let netns = connection.netns;
        if let (Some(ip), Some(port)) = (r.ip, r.port) {
            let id = self.peers.endpoint(SocketAddr::new(ip, port), netns, &mut self.tally.turned_away);
            if let Some(p) = self.peers.prefill_mut(id) {
                p.prefill_complete = r.prefill_complete.unwrap_or(p.prefill_complete);
            }
            if let Some(group) = Group::of(address, r) {
                self.peers.joins(id, group);
            }
        }
        if let (Some(ip), Some(port)) = (r.ip, r.http_port) {
            self.prefill_serves(SocketAddr::new(ip, port), netns);
        }
        // Only the server's own end sees the ranks of every host register.
        if !server {
            return;
        }
        let listens = self.http.bootstraps.listens(netns, address);
        let Some(b) = self.http.bootstraps.server(address) else { return };
        let one = |n: Option<u32>| n.unwrap_or(1).max(1);
        let whole = r.system_dp_size.is_some_and(|n| n > 1);
        let (dp, dps) = if whole { (r.system_dp_rank, r.system_dp_size) } else { (r.dp_rank, r.dp_size) };
        let place = |n: Option<u32>| n.unwrap_or(0);
        let sizes = (one(dps), one(r.cp_size), one(r.tp_size), one(r.pp_size));
        let here = (place(dp), place(r.cp_rank), place(r.tp_rank), place(r.pp_rank));
        // A rank that registers again has been started again, and so have the others; another size is another engine.
        if b.sizes != Some(sizes) || (b.registered.contains(&here) && at.since(b.last) >= SETTLED) {
            let nobody_before = |l: Mono| l > b.last && b.blind.is_none_or(|blind| l > blind);
            *b = Bootstrap {
                whole: listens.is_some_and(nobody_before),
                blind: b.blind,
                sizes: Some(sizes),
                told_missing: b.told_missing,
                told_unanswered: b.told_unanswered,
                ..Bootstrap::default()
            };
        }
        b.last = at;
        if b.registered.len() < MAX_RANKS {
            b.registered.insert(here);
        }
        let missing = b.missing();
        if missing == 0 {
            self.all_registered(address, at);
        }
    }

    /// No rank is missing at this bootstrap server.
    fn all_registered(&mut self, address: SocketAddr, at: Mono) {
        if let Some(b) = self.http.bootstraps.servers.get_mut(&address) {
            (b.whole, b.away) = (b.whole && b.missing() == 0, None);
            if std::mem::take(&mut b.told_missing) {
                self.lower(group(Class::RankNotRegistered, address), at);
            }
        }
    }

    fn topology(&mut self, at: Mono, connection: &Connection, address: SocketAddr, t: &Topology) {
        // Releases that tell this give no topology before every rank has registered.
        if t.follows_room.is_some() {
            self.all_registered(address, at);
        }
        if let Some(port) = t.http_port {
            self.prefill_serves(SocketAddr::new(address.ip(), port), connection.netns);
        }
        if t.prefill_complete == Some(true) {
            let here = self.peers.endpoints().filter(|(_, e)| e.address.ip() == address.ip());
            let here: Vec<_> = here.filter(|(_, e)| e.prefill.is_some()).map(|(id, _)| id).collect();
            for id in here {
                if let Some(p) = self.peers.prefill_mut(id) {
                    p.prefill_complete = true;
                }
            }
        }
    }

    /// The HTTP server there is a prefill engine's.
    fn prefill_serves(&mut self, address: SocketAddr, netns: u32) {
        let id = self.engines.at(address, netns, None);
        if let Some(e) = self.engines.get_mut(id) {
            e.role.get_or_insert(Role::Prefill);
        }
    }

    pub(super) fn look_at_bootstraps(&mut self, now: Mono) {
        let floor = self.config.floor;
        let open = std::mem::take(&mut self.http.bootstraps.queries);
        let mut waits: HashMap<SocketAddr, (u32, Mono)> = HashMap::new();
        for ((_, server, _), since) in open.iter().filter(|(_, since)| now.since(**since) >= floor) {
            let w = waits.entry(*server).or_insert((0, *since));
            *w = (w.0 + 1, w.1.min(*since));
        }
        self.http.bootstraps.queries = open;
        for server in waits.keys() {
            self.http.bootstraps.server(*server);
        }
        let (mut raised, mut lowered) = (Vec::new(), Vec::new());
        for (address, b) in &mut self.http.bootstraps.servers {
            // An agent that came in the middle of it has missed those before.
            if b.whole && b.missing() > 0 && now.since(b.last) >= floor {
                // Again with each look: it is told again where it has become surer.
                b.told_missing = true;
                raised.push(not_registered(*address, b, now));
            }
            let waiting = waits.get(address).copied();
            let none = waiting.is_none() && b.unanswered == 0;
            if none && std::mem::replace(&mut b.told_unanswered, !none) {
                lowered.push(group(Class::QueryUnanswered, *address));
            } else if !none {
                b.told_unanswered = true;
                raised.push(unanswered(*address, b, waiting, now));
            }
        }
        for finding in raised {
            self.raise(finding);
        }
        for group in lowered {
            self.lower(group, now);
        }
    }
}

fn group(class: Class, server: SocketAddr) -> u64 {
    cause(&[class.label(), &server.to_string()])
}

fn party(server: SocketAddr) -> Party {
    Party { role: Some(Role::Prefill), endpoint: Some(server), ..Party::default() }
}

fn finding(
    class: Class,
    server: SocketAddr,
    since: Mono,
    confidence: Confidence,
    evidence: Vec<String>,
) -> Finding {
    let look = Action {
        command: format!(
            "curl -sS 'http://{server}/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1'"
        ),
        effect: "asks the bootstrap server for its topology: 503 while ranks are missing".to_owned(),
        blast_radius: "none".to_owned(),
        clears: false,
    };
    Finding {
        group: group(class, server),
        class,
        confidence,
        engine: party(server),
        rooms: Vec::new(),
        room_count: 0,
        since,
        closed_at: None,
        evidence,
        actions: vec![look],
    }
}

fn not_registered(server: SocketAddr, b: &Bootstrap, now: Mono) -> Finding {
    let mut evidence = vec![format!(
        "{} of {} ranks registered at the bootstrap server {server}, the last {} s ago; missing: {}",
        b.registered.len(),
        b.expected(),
        seconds(now.since(b.last)),
        b.absent().join(", ")
    )];
    if let Some((_, status)) = b.refused {
        evidence.push(format!("a decode rank asked for a rank and was answered with {status}"));
    }
    // Loading weights can take one rank longer than another.
    let mut sure = b.refused.is_some() || now.since(b.last) >= SETTLED;
    if let Some(away) = b.away {
        sure = false;
        evidence.push(format!(
            "no agent looked for {} s since: a rank that registered then was not seen",
            seconds(away.to.since(away.from))
        ));
    }
    let confidence = if sure { Confidence::Likely } else { Confidence::Possible };
    finding(Class::RankNotRegistered, server, b.last, confidence, evidence)
}

fn unanswered(server: SocketAddr, b: &Bootstrap, waiting: Option<(u32, Mono)>, now: Mono) -> Finding {
    let mut evidence = Vec::new();
    if let Some((n, since)) = waiting {
        evidence.push(format!(
            "{n} queries to the bootstrap server {server} wait for an answer, the oldest for {} s",
            seconds(now.since(since))
        ));
    }
    if b.unanswered > 0 {
        let who = match b.hung_up {
            Some(Side::Client) => "decode hung up",
            Some(Side::Server) => "the server hung up",
            _ => "the connection ended",
        };
        evidence.push(format!("{} queries ended without an answer ({who})", b.unanswered));
    }
    let since = waiting.map(|(_, since)| since).into_iter().chain(b.since).min().unwrap_or(now);
    finding(Class::QueryUnanswered, server, since, Confidence::Possible, evidence)
}
