//! Who talks to whom: endpoints, sessions, pairs of ranks, and what each has shown of itself.
//!
//! Pure. Names are interned, so that a room holds numbers; every table is bounded, and what does not fit is
//! called [`NONE`] and counted.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use hashbrown::HashMap;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::event::{Comm, Mono, Task};
use crate::rooms::counts::TurnedAway;
use crate::rooms::estimate::Durations;
use crate::rooms::groups::Group;
use crate::sglang::message::{Backend, Register, Releases};

/// An interned name that is not known, or did not fit.
pub(crate) const NONE: u32 = u32::MAX;

/// Index of an endpoint.
pub(crate) type EndpointId = u32;
/// Index of a session.
pub(crate) type SessionId = u32;
/// Index of a pair.
pub(crate) type PairId = u32;

const MAX_ENDPOINTS: usize = 65_536;
const MAX_SESSIONS: usize = 65_536;
const MAX_PAIRS: usize = 8192;
/// Decode ranks registered at one prefill rank.
const MAX_REGISTERS: usize = 1024;
/// Stretches with missing bytes remembered.
const MAX_LOSSY: usize = 4096;
/// Longest session name kept, in bytes (longest seen: a mori engine key of about 80).
const MAX_SESSION_LEN: usize = 256;
/// Kinds of foreign bytes remembered of one rank, the newest.
pub(crate) const MAX_KINDS: usize = 16;

/// Whose bytes are missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// This rank's.
    Rank(EndpointId),
    /// Those of some rank at this address.
    Host(IpAddr),
    /// Those of someone at this address, on a connection that has carried no message.
    Stranger(IpAddr),
}

/// Which of two ranks the other's messages of a room have come from. A connection without any message is none
/// of a rank that has been heard on another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Heard {
    pub(crate) prefill: bool,
    pub(crate) decode: bool,
}

/// A message or bytes that no rank sends, on a rank's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ForeignMark {
    pub(crate) at: Mono,
    pub(crate) peer: SocketAddr,
    pub(crate) frames: u16,
    /// Bytes of its first frame.
    #[serde(default)]
    pub(crate) first_len: u32,
    /// It is an ABORT, which the rank's release does not bear (M4).
    #[serde(default)]
    pub(crate) abort: bool,
    /// Of an ABORT: the rank may be of a release that bears it, as far as its messages tell.
    #[serde(default)]
    pub(crate) unsure: bool,
    /// Number of the last question that the rank had been asked by then.
    #[serde(default)]
    pub(crate) asked: u32,
}

impl ForeignMark {
    /// Whether what reads one of them reads the other: bytes that are not ZMTP, or messages of one shape.
    fn is_like(&self, other: &Self) -> bool {
        let length = |m: &Self| if m.frames == 0 { 0 } else { m.first_len };
        (self.frames, length(self), self.abort) == (other.frames, length(other), other.abort)
    }
}

/// A thread that ended right after something foreign had come to a rank of its process: who read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DeadReader {
    pub(crate) tgid: u32,
    pub(crate) death: Death,
    pub(crate) foreign: ForeignMark,
    /// Number of the last question that the rank had been asked by then.
    pub(crate) asked: u32,
    /// So many threads of this process end that one of them may have done so just then by chance.
    pub(crate) chance: bool,
}

/// A thread that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Death {
    pub(crate) tid: u32,
    /// Its own name. The threads of a Python program have that of their process.
    pub(crate) name: Comm,
    pub(crate) at: Mono,
    /// As `wait` would have it.
    pub(crate) code: u32,
}

/// The end of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Exit {
    pub(crate) tgid: u32,
    pub(crate) at: Mono,
    /// As `wait` would have it.
    pub(crate) code: u32,
}

/// A decode rank that introduced itself to a prefill rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Registered {
    pub(crate) decode: EndpointId,
    pub(crate) session: SessionId,
    pub(crate) tp_rank: Option<u32>,
    pub(crate) tp_size: Option<u32>,
}

/// A room that concluded, for comparison with those that do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Concluded {
    pub(crate) metadata_at: Mono,
    pub(crate) pages: u32,
    pub(crate) at: Mono,
}

/// The last conclusions, newest at the back.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recent {
    ring: VecDeque<Concluded>,
}

impl Recent {
    fn push(&mut self, c: Concluded, keep: usize) {
        if self.ring.len() >= keep {
            self.ring.pop_front();
        }
        self.ring.push_back(c);
    }

    /// The last `n`.
    pub(crate) fn newest(&self, n: usize) -> Vec<Concluded> {
        self.ring.iter().skip(self.ring.len().saturating_sub(n)).copied().collect()
    }

    pub(crate) fn resumed(newest: Vec<Concluded>) -> Self {
        Self { ring: newest.into() }
    }

    /// How many concluded although their METADATA came later and they have at least as many pages.
    pub(crate) fn overtook(&self, metadata_at: Mono, pages: u32) -> u32 {
        let n = self.ring.iter().filter(|c| c.metadata_at > metadata_at && c.pages >= pages).count();
        u32::try_from(n).unwrap_or(u32::MAX)
    }

    /// When the last of those whose METADATA came earlier concluded.
    pub(crate) fn drained(&self, metadata_at: Mono) -> Option<Mono> {
        self.ring.iter().rev().find(|c| c.metadata_at < metadata_at).map(|c| c.at)
    }
}

/// What a rank, or a rank towards one session, has been asked and has answered. Questions are numbered, so
/// that "everything since this one is unanswered" is a comparison.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answers {
    /// Number of the last METADATA.
    pub(crate) asked: u32,
    /// Highest number that was answered.
    pub(crate) answered: u32,
    /// Of those up to this one the process that was asked is gone: nobody owes an answer to them.
    pub(crate) void: u32,
    /// When the first answer came.
    pub(crate) first: Option<Mono>,
    /// When the last answer came.
    pub(crate) last: Option<Mono>,
    pub(crate) recent: Recent,
}

impl Answers {
    fn answer(&mut self, number: u32, c: Concluded, keep: usize) {
        self.answered = self.answered.max(number);
        self.first.get_or_insert(c.at);
        self.last = Some(c.at);
        self.recent.push(c, keep);
    }

    /// Questions after the last that was answered.
    pub(crate) fn silent(&self) -> u32 {
        self.asked.saturating_sub(self.answered.max(self.void))
    }

    /// Whoever was asked is gone.
    pub(crate) fn forgive(&mut self) {
        self.void = self.asked;
    }
}

/// What is known of an endpoint as a prefill rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefillRank {
    pub(crate) answers: Answers,
    /// Arrival of the latest ABORT that it acknowledged: its receive loop lived then.
    pub(crate) acknowledged_abort: Option<Mono>,
    /// The latest ABORT that asks for an acknowledgement.
    pub(crate) asked_abort: Option<Mono>,
    /// Session of the last question.
    pub(crate) last_session: SessionId,
    /// Number of the last question that came from another session than the one before it.
    pub(crate) mixed: u32,
    /// It has said Success on the wire (NIXL: so it is 0.5.23 or newer).
    pub(crate) says_success: bool,
    /// Policy `prefill_complete`: it was sent a BOOTSTRAP.
    pub(crate) prefill_complete: bool,
    pub(crate) registered: Vec<Registered>,
    /// The ranks that it agrees with, where it was seen to register.
    pub(crate) group: Option<Group>,
}

/// One PULL socket of one rank.
#[derive(Clone, Debug)]
pub(crate) struct Endpoint {
    pub(crate) address: SocketAddr,
    /// Connections that belong to it and are open.
    pub(crate) live: u32,
    /// When the last of them went; `None` while one is open or none ever was.
    pub(crate) lost: Option<Mono>,
    /// When its listener closed on this host.
    pub(crate) listener_closed: Option<Mono>,
    /// When a connect to it last failed, with the errno, and none has succeeded since.
    pub(crate) refused: Option<(Mono, u32)>,
    /// Since when a connect to it is under way that nobody answers.
    pub(crate) connecting: Option<Mono>,
    /// When the last connection to it ended, and none was open or tried since.
    pub(crate) cut: Option<Mono>,
    /// Connections to it that were ever open.
    pub(crate) reached: bool,
    /// Its process on this host.
    pub(crate) task: Option<Task>,
    /// When its process on this host last ended.
    pub(crate) exited: Option<Exit>,
    /// When it last sent anything.
    pub(crate) spoke: Option<Mono>,
    /// Its number, where a message named it (decode: tensor-parallel rank; prefill: rank of STATUS).
    pub(crate) rank: Option<u32>,
    pub(crate) foreign: Option<ForeignMark>,
    /// The last foreign bytes, whether or not they are suspect.
    pub(crate) last_foreign: Option<ForeignMark>,
    /// The first foreign bytes of each kind, at most [`MAX_KINDS`].
    pub(crate) kinds: Vec<ForeignMark>,
    pub(crate) dead_reader: Option<DeadReader>,
    /// Decode: when the last STATUS came that it took in although its reader was thought dead.
    pub(crate) took: Option<Mono>,
    /// When bytes to it were last missed, on any connection.
    pub(crate) missed: Option<Mono>,
    /// The same where it could not be remembered whose they were.
    pub(crate) missed_of_any: Option<Mono>,
    /// The same on connections without any message.
    pub(crate) missed_of_strangers: Option<Mono>,
    /// Once a room was asked of it.
    pub(crate) prefill: Option<Box<PrefillRank>>,
}

impl Endpoint {
    /// Whether the foreign bytes noted may be why rooms go unanswered: then later ones are not the cause.
    pub(crate) fn suspects_foreign(&self) -> bool {
        let (Some(mark), Some(p)) = (self.foreign, self.prefill.as_deref()) else { return false };
        let alive = p.answers.last.max(p.acknowledged_abort);
        p.answers.silent() > 0 && alive.is_none_or(|at| mark.at >= at)
    }

    /// Remembers foreign bytes, as the first of their kind if they are.
    pub(crate) fn meet(&mut self, mark: ForeignMark) {
        if self.kinds.iter().any(|k| k.is_like(&mark)) {
            return;
        }
        if self.kinds.len() >= MAX_KINDS {
            self.kinds.remove(0);
        }
        self.kinds.push(mark);
    }

    /// Whether the rank has read on after foreign bytes of this kind: it has answered a room that was asked for after them,
    /// or acknowledged an ABORT that came after them, or, being decode's, taken a STATUS in.
    pub(crate) fn bears(&self, mark: &ForeignMark) -> bool {
        let p = self.prefill.as_deref();
        let read_on = |first: &ForeignMark| {
            p.is_some_and(|p| p.answers.answered > first.asked)
                || p.and_then(|p| p.acknowledged_abort).max(self.took).is_some_and(|at| at > first.at)
        };
        self.kinds.iter().any(|k| k.is_like(mark) && read_on(k))
    }
}

/// A prefill rank and a session.
#[derive(Clone, Debug)]
pub(crate) struct Pair {
    pub(crate) prefill: EndpointId,
    pub(crate) decode: EndpointId,
    pub(crate) session: SessionId,
    pub(crate) backend: Option<Backend>,
    pub(crate) releases: Option<Releases>,
    pub(crate) durations: Durations,
    pub(crate) answers: Answers,
    pub(crate) concluded: u64,
}

/// All names and what is known of them.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    by_address: HashMap<(SocketAddr, u32), EndpointId>,
    endpoints: Vec<Endpoint>,
    by_name: HashMap<Arc<str>, SessionId>,
    names: Vec<Arc<str>>,
    by_pair: HashMap<(EndpointId, SessionId), PairId>,
    pairs: Vec<Pair>,
    /// Endpoints of each process of this host.
    by_process: HashMap<u32, SmallVec<[EndpointId; 2]>>,
    /// (listening endpoint, whose bytes) → when they were last found missing.
    lossy: HashMap<(EndpointId, Source), Mono>,
    /// The same of connections without any message, apart so that they never crowd the others out.
    strange: HashMap<(EndpointId, Source), Mono>,
    /// When bytes were missed that fit nowhere else.
    lossy_elsewhere: Option<Mono>,
}

impl Peers {
    /// The number of an endpoint. Loopback addresses of different network namespaces are different ones.
    pub(crate) fn endpoint(
        &mut self,
        address: SocketAddr,
        netns: u32,
        turned: &mut TurnedAway,
    ) -> EndpointId {
        let key = (address, if address.ip().is_loopback() { netns } else { 0 });
        if let Some(id) = self.by_address.get(&key) {
            return *id;
        }
        if self.endpoints.len() >= MAX_ENDPOINTS {
            turned.names += 1;
            return NONE;
        }
        let id = to_id(self.endpoints.len());
        self.endpoints.push(Endpoint {
            address,
            live: 0,
            lost: None,
            listener_closed: None,
            refused: None,
            connecting: None,
            cut: None,
            reached: false,
            task: None,
            exited: None,
            spoke: None,
            rank: None,
            foreign: None,
            last_foreign: None,
            kinds: Vec::new(),
            dead_reader: None,
            took: None,
            missed: None,
            missed_of_any: None,
            missed_of_strangers: None,
            prefill: None,
        });
        self.by_address.insert(key, id);
        id
    }

    pub(crate) fn find(&self, address: SocketAddr, netns: u32) -> Option<EndpointId> {
        let key = (address, if address.ip().is_loopback() { netns } else { 0 });
        self.by_address.get(&key).copied()
    }

    /// Endpoints whose address alone does not name them, with their network namespaces.
    pub(crate) fn namespaces(&self) -> HashMap<EndpointId, u32> {
        self.by_address.iter().filter(|((_, netns), _)| *netns != 0).map(|((_, n), id)| (*id, *n)).collect()
    }

    /// Every endpoint.
    pub(crate) fn endpoints(&self) -> impl Iterator<Item = (EndpointId, &Endpoint)> {
        (0..).zip(&self.endpoints)
    }

    pub(crate) fn get(&self, id: EndpointId) -> Option<&Endpoint> {
        self.endpoints.get(id as usize)
    }

    pub(crate) fn get_mut(&mut self, id: EndpointId) -> Option<&mut Endpoint> {
        self.endpoints.get_mut(id as usize)
    }

    /// Notes whose endpoint it is.
    pub(crate) fn owned(&mut self, id: EndpointId, task: Option<Task>) {
        let (Some(task), Some(e)) = (task, self.get_mut(id)) else { return };
        let old = e.task.replace(task).map(|t| t.tgid);
        if old == Some(task.tgid) && self.of_process(task.tgid).contains(&id) {
            return;
        }
        if let Some(list) = old.and_then(|old| self.by_process.get_mut(&old)) {
            list.retain(|other| *other != id);
        }
        self.by_process.entry(task.tgid).or_default().push(id);
        if let Some(gone) = old.filter(|old| *old != task.tgid)
            && self.of_process(gone).is_empty()
        {
            self.by_process.remove(&gone);
        }
    }

    /// Whether the process of an endpoint is known, and lives as far as is known.
    pub(crate) fn is_owned(&self, id: EndpointId) -> bool {
        let task = self.get(id).and_then(|e| e.task);
        task.is_some_and(|t| self.of_process(t.tgid).contains(&id))
    }

    /// Endpoints of a process.
    pub(crate) fn of_process(&self, tgid: u32) -> &[EndpointId] {
        self.by_process.get(&tgid).map_or(&[], |list| list)
    }

    /// A process has ended: whoever listens there next is another. Returns its endpoints.
    pub(crate) fn process_ended(&mut self, exit: Exit) -> SmallVec<[EndpointId; 2]> {
        let ids = self.by_process.remove(&exit.tgid).unwrap_or_default();
        for id in &ids {
            let Some(e) = self.get_mut(*id) else { continue };
            e.exited = Some(exit);
            (e.foreign, e.last_foreign, e.dead_reader, e.spoke) = (None, None, None, None);
            e.took = None;
            e.kinds.clear();
            if let Some(p) = e.prefill.as_deref_mut() {
                p.answers.forgive();
                (p.answers.first, p.asked_abort, p.acknowledged_abort) = (None, None, None);
            }
        }
        for pair in self.pairs.iter_mut().filter(|p| ids.contains(&p.prefill)) {
            pair.answers.forgive();
            pair.answers.first = None;
        }
        ids
    }

    pub(crate) fn address(&self, id: EndpointId) -> Option<SocketAddr> {
        self.get(id).map(|e| e.address)
    }

    pub(crate) fn prefill(&self, id: EndpointId) -> Option<&PrefillRank> {
        self.get(id).and_then(|e| e.prefill.as_deref())
    }

    pub(crate) fn prefill_mut(&mut self, id: EndpointId) -> Option<&mut PrefillRank> {
        self.get_mut(id).map(|e| &mut **e.prefill.get_or_insert_default())
    }

    pub(crate) fn session(&mut self, name: &str, turned: &mut TurnedAway) -> SessionId {
        if let Some(id) = self.by_name.get(name) {
            return *id;
        }
        if self.names.len() >= MAX_SESSIONS || name.len() > MAX_SESSION_LEN {
            turned.names += 1;
            return NONE;
        }
        let id = to_id(self.names.len());
        let name: Arc<str> = name.into();
        self.names.push(Arc::clone(&name));
        self.by_name.insert(name, id);
        id
    }

    pub(crate) fn session_name(&self, id: SessionId) -> Option<&Arc<str>> {
        self.names.get(id as usize)
    }

    pub(crate) fn pair(
        &mut self,
        prefill: EndpointId,
        decode: EndpointId,
        session: SessionId,
        turned: &mut TurnedAway,
    ) -> PairId {
        if let Some(id) = self.by_pair.get(&(prefill, session)) {
            return *id;
        }
        if self.pairs.len() >= MAX_PAIRS || prefill == NONE || session == NONE {
            turned.pairs += 1;
            return NONE;
        }
        let id = to_id(self.pairs.len());
        self.pairs.push(Pair {
            prefill,
            decode,
            session,
            backend: None,
            releases: None,
            durations: Durations::default(),
            answers: Answers::default(),
            concluded: 0,
        });
        self.by_pair.insert((prefill, session), id);
        id
    }

    pub(crate) fn pair_of(&self, id: PairId) -> Option<&Pair> {
        self.pairs.get(id as usize)
    }

    pub(crate) fn pair_mut(&mut self, id: PairId) -> Option<&mut Pair> {
        self.pairs.get_mut(id as usize)
    }

    pub(crate) fn pairs(&self) -> impl Iterator<Item = &Pair> {
        self.pairs.iter()
    }

    /// Numbers a question to a prefill rank: its number there (`at_rank` if it has one already) and for the
    /// pair.
    pub(crate) fn asked(&mut self, prefill: EndpointId, pair: PairId, at_rank: Option<u32>) -> (u32, u32) {
        let next = |a: &mut Answers| {
            a.asked = a.asked.saturating_add(1);
            a.asked
        };
        let session_of = self.pair_of(pair).map_or(NONE, |p| p.session);
        let rank = at_rank.or_else(|| {
            self.prefill_mut(prefill).map(|p| {
                let number = next(&mut p.answers);
                if std::mem::replace(&mut p.last_session, session_of) != session_of {
                    p.mixed = number;
                }
                number
            })
        });
        let session = self.pair_mut(pair).map(|p| next(&mut p.answers));
        (rank.unwrap_or(0), session.unwrap_or(0))
    }

    /// Notes that a question was answered with a STATUS.
    pub(crate) fn answered(&mut self, prefill: EndpointId, pair: PairId, numbers: (u32, u32), c: Concluded) {
        if let Some(p) = self.prefill_mut(prefill) {
            p.answers.answer(numbers.0, c, 64);
        }
        if let Some(p) = self.pair_mut(pair) {
            p.answers.answer(numbers.1, c, 16);
            p.concluded += 1;
        }
    }

    pub(crate) fn register(
        &mut self,
        prefill: EndpointId,
        decode: EndpointId,
        session: SessionId,
        r: &Register<'_>,
        turned: &mut TurnedAway,
    ) {
        if let Some(e) = self.get_mut(decode) {
            e.rank = r.tp_rank.or(e.rank);
        }
        let Some(rank) = self.prefill_mut(prefill) else { return };
        let entry = Registered { decode, session, tp_rank: r.tp_rank, tp_size: r.tp_size };
        if let Some(old) = rank.registered.iter_mut().find(|x| x.session == session) {
            *old = entry;
        } else if rank.registered.len() < MAX_REGISTERS {
            rank.registered.push(entry);
        } else {
            turned.registers += 1;
        }
    }

    /// A prefill rank has registered. Whoever had its place is gone.
    pub(crate) fn joins(&mut self, id: EndpointId, group: Group) {
        let ranks = (0..).zip(&mut self.endpoints).filter(|(other, _)| *other != id);
        for p in ranks.filter_map(|(_, e)| e.prefill.as_deref_mut()) {
            let same = |g: &Group| (g.server, g.dp, g.rank) == (group.server, group.dp, group.rank);
            p.group = p.group.filter(|g| !same(g));
        }
        if let Some(p) = self.prefill_mut(id) {
            p.group = Some(group);
        }
    }

    /// Notes missing bytes on a connection to `target`.
    pub(crate) fn lose(&mut self, target: EndpointId, source: Source, at: Mono) {
        if let Some(e) = self.get_mut(target) {
            e.missed = Some(at);
        }
        let stranger = matches!(source, Source::Stranger(_));
        let map = if stranger { &mut self.strange } else { &mut self.lossy };
        if map.len() < MAX_LOSSY || map.contains_key(&(target, source)) {
            map.insert((target, source), at);
        } else if let Some(e) = self.get_mut(target) {
            *(if stranger { &mut e.missed_of_strangers } else { &mut e.missed_of_any }) = Some(at);
        } else if !stranger {
            self.lossy_elsewhere = Some(at);
        }
    }

    /// Whether bytes from `other` to `target` were found missing at or after `since`. `heard`: messages from
    /// `other` have come, so that connections without any are not its.
    pub(crate) fn missed(&self, target: EndpointId, other: EndpointId, heard: bool, since: Mono) -> bool {
        let late = |at: Option<Mono>| at.is_some_and(|at| at >= since);
        let at = |map: &HashMap<_, Mono>, source| map.get(&(target, source)).copied();
        let ip = self.address(other).map(|a| a.ip());
        let e = self.get(target);
        late(e.and_then(|e| e.missed_of_any))
            || late(at(&self.lossy, Source::Rank(other)))
            || late(ip.and_then(|ip| at(&self.lossy, Source::Host(ip))))
            || (!heard
                && (late(e.and_then(|e| e.missed_of_strangers))
                    || late(ip.and_then(|ip| at(&self.strange, Source::Stranger(ip))))))
    }

    /// Whether bytes between these two ranks, in either direction, were found missing at or after `since`.
    pub(crate) fn lossy_since(
        &self,
        prefill: EndpointId,
        decode: EndpointId,
        heard: Heard,
        since: Mono,
    ) -> bool {
        if self.lossy_elsewhere.is_some_and(|at| at >= since) {
            return true;
        }
        if self.lossy.is_empty() && self.strange.is_empty() {
            return false;
        }
        self.missed(prefill, decode, heard.decode, since)
            || self.missed(decode, prefill, heard.prefill, since)
    }

    /// A connection that belongs to an endpoint opened.
    pub(crate) fn opened(&mut self, id: EndpointId) {
        if let Some(e) = self.get_mut(id) {
            e.live = e.live.saturating_add(1);
            e.lost = None;
        }
    }

    /// A connection that belongs to an endpoint went.
    pub(crate) fn went(&mut self, id: EndpointId, at: Mono) {
        if let Some(e) = self.get_mut(id) {
            e.live = e.live.saturating_sub(1);
            if e.live == 0 {
                e.lost = Some(at);
            }
        }
    }
}

fn to_id(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(NONE)
}
