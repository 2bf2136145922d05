//! GPUs and rooms: which GPUs the processes of a room hold, what these did while its KV cache could move, and how many rooms were
//! handed over by the same engine then.
//!
//! Pure: no I/O, no clock (time is an argument). Every reading is of a whole GPU and stays so: nothing is divided among rooms. Bounded:
//! [`MAX_ENGINES`] engines with [`MAX_MOVES`] beginnings and ends each; where that is not enough to tell how many rooms there were, it is
//! not told.

use std::collections::VecDeque;
use std::sync::Arc;

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::event::{Mono, SECOND};
use crate::gpu::model::{Gpu, Gpus, Reading};
use crate::gpu::quiet::{FRESH, Span};
use crate::gpu::windows::{Link as Wire, Stretch};
use crate::rooms::model::{GpuWindow, MAX_SERIES, Phase, Role, RoomSnapshot};
use crate::rooms::peers::EndpointId;
use crate::rooms::room::{MAX_LINKS, Progress, Room};
use crate::rooms::table::RoomTable;
use crate::verdict::facts::{GpuFacts, SilentFact};

/// Engines of this host whose hand-overs are counted. One that finds no place has none that are known.
const MAX_ENGINES: usize = 64;

/// Beginnings, and ends, remembered of one engine.
const MAX_MOVES: usize = 8192;

/// For so long what the agent before had read is believed while this one has read nothing (as an engine's numbers are).
const RESTORED: u64 = 30 * SECOND;

/// When the KV cache of a room can have moved at one of its sides.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Move {
    /// The process at the top of the side's engine, 0: none is known, or it has not begun.
    pub(super) engine: u32,
    from: Mono,
    /// `None`: it has not ended.
    pub(super) to: Option<Mono>,
}

/// What GPUs do, and what engines hand over.
#[derive(Debug, Default)]
pub(crate) struct RoomGpus {
    pub(crate) known: Gpus,
    /// When the first reading came, of a GPU or of the network: what was handed over before is not counted.
    since: Option<Mono>,
    /// By the process at the top of the engine, and by the side: in one that is both, each counts for itself.
    pub(super) engines: HashMap<(u32, Role), Moves>,
}

impl RoomGpus {
    pub(crate) fn take(&mut self, reading: &Reading) {
        self.begin(reading.at);
        self.known.take(reading);
    }

    /// Something is read from now on, of a GPU or otherwise: hand-overs are counted.
    pub(crate) fn begin(&mut self, at: Mono) {
        self.since.get_or_insert(at);
    }

    /// From when until when (or until `at`) a side handed over, and how many rooms of its engine did so then, if that is known.
    pub(crate) fn time(&self, role: Role, m: Move, at: Mono) -> Option<(Mono, Mono, Option<u32>)> {
        let (from, to) = (m.from, m.to.unwrap_or(at).max(m.from));
        (m.engine != 0).then(|| (from, to, self.overlapping((m.engine, role), from, to)))
    }

    /// Hand-overs of an engine; `None`: there is no place for them.
    fn moves(&mut self, engine: (u32, Role)) -> Option<&mut Moves> {
        let all = &mut self.engines;
        if all.len() >= MAX_ENGINES && !all.contains_key(&engine) {
            let over = all.iter().filter(|(_, m)| m.begun.count() == m.ended.count());
            let oldest = over.min_by_key(|(_, m)| m.ended.list.back().copied()).map(|(engine, _)| *engine)?;
            all.remove(&oldest);
        }
        Some(all.entry(engine).or_default())
    }

    /// How many hand-overs of an engine have a share in a time; `None`: not known.
    pub(super) fn overlapping(&self, engine: (u32, Role), from: Mono, to: Mono) -> Option<u32> {
        self.since.filter(|since| *since <= from)?;
        self.engines.get(&engine)?.overlapping(from, to)
    }
}

/// Hand-overs of one engine.
#[derive(Debug, Default)]
pub(super) struct Moves {
    begun: Moments,
    ended: Moments,
}

/// Moments in order; the oldest are only counted.
#[derive(Debug, Default)]
struct Moments {
    list: VecDeque<Mono>,
    older: u64,
    /// Up to when they are only counted.
    until: Mono,
}

impl Moments {
    fn add(&mut self, at: Mono) {
        if self.list.len() >= MAX_MOVES
            && let Some(oldest) = self.list.pop_front()
        {
            (self.older, self.until) = (self.older + 1, oldest);
        }
        // Mostly the newest.
        let place = self.list.partition_point(|m| *m <= at);
        self.list.insert(place, at);
    }

    fn count(&self) -> u64 {
        self.older + self.list.len() as u64
    }

    /// How many there were before `at`; `None`: that is too long ago.
    fn before(&self, at: Mono) -> Option<u64> {
        let known = self.older == 0 || at > self.until;
        known.then(|| self.older + self.list.partition_point(|m| *m < at) as u64)
    }
}

impl Moves {
    /// How many hand-overs have a share in the time from `from` to `to`.
    fn overlapping(&self, from: Mono, to: Mono) -> Option<u32> {
        let begun = self.begun.before(Mono(to.0.saturating_add(1)))?;
        u32::try_from(begun.saturating_sub(self.ended.before(from)?)).ok()
    }
}

/// Whether a hand-over begins or ends with what a view amounts to now.
pub(crate) fn turns(room: &Room, role: Role, view: &Progress) -> bool {
    let known = room.moves.get(usize::from(role == Role::Decode)).copied().unwrap_or_default();
    moving(view) != (known.engine != 0 && known.to.is_none())
}

const fn moving(view: &Progress) -> bool {
    matches!(view.phase, Phase::Transfer | Phase::Conclude) && view.terminal.is_none()
}

impl RoomTable {
    /// What GPUs of this host move and suffer.
    pub const fn gpus(&self) -> &Gpus {
        &self.gpus.known
    }

    /// GPUs of the engines that hand over now, by the driver's numbers, with those of which it is not known whose they are; `None`: it is
    /// known of no engine, or not of all, that it does.
    pub fn gpus_in_transfer(&self) -> Option<impl Iterator<Item = u32> + '_> {
        let engines = &self.gpus.engines;
        let open = |m: &Moves| m.begun.count() > m.ended.count();
        let servers: SmallVec<[u32; 8]> =
            engines.iter().filter(|(_, m)| open(m)).map(|((server, _), _)| *server).collect();
        if servers.is_empty() || engines.len() >= MAX_ENGINES {
            return None;
        }
        let theirs = move |gpu: &Gpu| {
            let held = |pid: u32| servers.iter().any(|server| self.same_engine(pid, *server));
            gpu.holders().next().is_none() || gpu.holders().any(held)
        };
        Some(self.gpus.known.iter().filter(move |(_, gpu)| theirs(gpu)).map(|(index, _)| index))
    }

    /// Begins or ends the time in which a side hands over.
    pub(crate) fn note_move(&mut self, slot: u32, role: Role, view: Progress) {
        if self.gpus.known.is_empty() && self.network.is_empty() {
            return;
        }
        if !moving(&view) {
            return self.end_move(slot, role, view.since);
        }
        let Some(engine) = self.rooms.get(slot).and_then(|room| self.engine_of_move(room, role)) else {
            return;
        };
        if let Some(room) = self.rooms.get_mut(slot)
            && let Some(m) = room.moves.get_mut(usize::from(role == Role::Decode))
        {
            *m = Move { engine, from: view.since, to: None };
        }
        if let Some(moves) = self.gpus.moves((engine, role)) {
            moves.begun.add(view.since);
        }
    }

    /// The engine of this host that hands over, or takes, by its server's process, else by that of its first rank.
    pub(crate) fn engine_of_move(&self, room: &Room, role: Role) -> Option<u32> {
        let rank = self.ranks(room, role).into_iter().next()?;
        Some(self.server_of(rank).unwrap_or(rank))
    }

    /// The room is over.
    pub(crate) fn end_moves(&mut self, slot: u32, at: Mono) {
        for role in [Role::Prefill, Role::Decode] {
            self.end_move(slot, role, at);
        }
    }

    fn end_move(&mut self, slot: u32, role: Role, at: Mono) {
        let i = usize::from(role == Role::Decode);
        let Some(m) = self.rooms.get_mut(slot).and_then(|r| r.moves.get_mut(i)) else { return };
        if m.engine == 0 || m.to.is_some() {
            return;
        }
        m.to = Some(at.max(m.from));
        let engine = m.engine;
        if let Some(moves) = self.gpus.engines.get_mut(&(engine, role)) {
            moves.ended.add(at);
        }
    }

    /// Processes of the room's ranks of one side on this host.
    pub(crate) fn ranks(&self, room: &Room, role: Role) -> SmallVec<[u32; 2]> {
        let mut pids = SmallVec::new();
        if !room.has(role) {
            return pids;
        }
        let mut add = |id: EndpointId| {
            let pid = self.peers.get(id).and_then(|e| e.task).map(|t| t.tgid);
            if let Some(pid) = pid.filter(|pid| !pids.contains(pid) && pids.len() < MAX_LINKS) {
                pids.push(pid);
            }
        };
        for l in &room.links {
            match role {
                Role::Prefill if l.received.is_some() || l.told.is_some() => add(l.prefill),
                Role::Decode if l.sent.is_some() || l.heard.is_some() => add(l.decode),
                _ => {}
            }
        }
        if pids.is_empty() {
            let (prefill, decode) = room.home;
            let id = if role == Role::Prefill { prefill } else { decode };
            pids.extend(self.peers.get(id).and_then(|e| e.task).map(|t| t.tgid));
        }
        pids
    }

    /// GPUs that a process held; where it held none, those of its engine, with the process that did.
    pub(super) fn gpus_of(&self, pid: u32, from: Mono, to: Mono) -> SmallVec<[(u32, &Gpu); 1]> {
        let all = || self.gpus.known.iter().map(|(_, gpu)| gpu);
        let own: SmallVec<_> = all().filter(|g| g.held_by(pid, from, to)).map(|g| (pid, g)).collect();
        if !own.is_empty() {
            return own;
        }
        all().filter_map(|g| Some((g.holders().find(|p| self.same_engine(*p, pid))?, g))).collect()
    }

    pub(super) fn same_engine(&self, a: u32, b: u32) -> bool {
        a == b || self.server_of(a).is_some_and(|server| self.server_of(b) == Some(server))
    }

    /// What the GPUs of the room's ranks did while its KV cache could move.
    pub(crate) fn gpu_windows(&self, room: &Room, at: Mono) -> Vec<GpuWindow> {
        let mut all = Vec::new();
        if self.gpus.known.is_empty() {
            return all;
        }
        for (role, m) in [Role::Prefill, Role::Decode].into_iter().zip(room.moves) {
            let Some((from, to, overlapping)) = self.gpus.time(role, m, at) else { continue };
            for pid in self.ranks(room, role) {
                for (pid, gpu) in self.gpus_of(pid, from, to) {
                    let known = |w: &GpuWindow| w.role == role && w.gpu == gpu.name;
                    if all.iter().any(known) {
                        continue;
                    }
                    all.push(GpuWindow {
                        gpu: Arc::clone(&gpu.name),
                        role,
                        pid,
                        from,
                        to,
                        links: gpu.windows(from, to).collect(),
                        computing: gpu.computing(from, to),
                        overlapping,
                        troubles: gpu.troubles(from, to),
                        series: Vec::new(),
                    });
                }
            }
        }
        all
    }

    /// Adds the single readings to what was collected of a room.
    pub(crate) fn add_series(&self, snapshot: &mut RoomSnapshot) {
        let (from, to) = (snapshot.opened_at, snapshot.at);
        for window in &mut snapshot.gpus {
            let gpu = self.gpus.known.iter().find(|(_, gpu)| gpu.name == window.gpu);
            let Some((_, gpu)) = gpu else { continue };
            for link in Wire::ALL {
                together(gpu.history.stretches(link, from, to), &mut window.series);
            }
        }
    }

    /// What all GPUs of prefill say of a room of its rank: those of the rank and those of its whole engine, for what the rank does not
    /// compute another rank of it may.
    pub(crate) fn gpu_facts(&self, room: &Room, prefill: EndpointId, since: Mono) -> GpuFacts {
        let mut facts = GpuFacts::default();
        let mut pids = self.ranks(room, Role::Prefill);
        if self.gpus.known.is_empty() || pids.is_empty() {
            return facts;
        }
        let subject = self.peers.get(prefill).and_then(|e| e.task).map(|t| t.tgid);
        pids.extend(subject.filter(|pid| !pids.contains(pid)));
        let of = |gpu: &Gpu| gpu.holders().any(|h| pids.iter().any(|pid| self.same_engine(h, *pid)));
        let gpus: SmallVec<[&Gpu; 8]> =
            self.gpus.known.iter().map(|(_, gpu)| gpu).filter(|gpu| of(gpu)).collect();
        facts.clear = self.nothing_waited(room, since.plus(self.config.floor)).is_some();
        facts.works = gpus.iter().filter_map(|gpu| gpu.works()).max();
        // A rank of which no GPU is known may compute where nobody looks.
        let seen = |pid: &u32| gpus.iter().any(|gpu| gpu.holders().any(|h| self.same_engine(h, *pid)));
        if !gpus.is_empty() && pids.iter().all(seen) {
            facts.silent = silent(&gpus, since, self.now);
        }
        facts
    }
}

/// The time in which none of these did anything, since `since` and until now.
fn silent(gpus: &[&Gpu], since: Mono, now: Mono) -> Option<SilentFact> {
    let mut all: Option<[Option<Span>; 2]> = None;
    for gpu in gpus {
        let quiet = gpu.quiet();
        all = Some(match all {
            None => quiet,
            Some([before, own]) => {
                let [b, o] = quiet;
                let both = |a: Option<Span>, b: Option<Span>| a.zip(b).and_then(|(a, b)| a.both(b));
                // One that was not read yet since the agent began says as little as all of them.
                [both(before, b), both(own, o)]
            }
        });
    }
    let [before, own] = all?;
    // A GPU of which nothing is read any more (its call hangs, it is lost) says nothing of now.
    let limit = if own.is_some() { FRESH } else { RESTORED };
    let spans = [before, own].into_iter().flatten().filter(|span| span.after(since) > 0);
    let (mut from, mut to, mut read) = (None, None, 0_u64);
    for span in spans {
        from = from.or(Some(span.from.max(since)));
        to = Some(span.to);
        read = read.saturating_add(span.after(since));
    }
    let (from, to) = from.zip(to)?;
    let gpus = u32::try_from(gpus.len()).unwrap_or(u32::MAX);
    (now.since(to) <= limit).then_some(SilentFact { from, to, read, gpus })
}

/// Puts neighbours together so that at most [`MAX_SERIES`] are left; where no neighbours are, some are left out.
pub(crate) fn together<'a>(readings: impl Iterator<Item = &'a Stretch> + Clone, to: &mut Vec<Stretch>) {
    let n = readings.clone().count();
    let each = n.div_ceil(MAX_SERIES).max(1);
    let (mut last, mut taken, mut out) = (None::<Stretch>, 0, Vec::new());
    for s in readings {
        match &mut last {
            // Time between them that was not read stays so.
            Some(l) if taken < each && s.from <= l.to => {
                l.source = l.source.max(s.source);
                l.to = l.to.max(s.to);
                l.out = l.out.saturating_add(s.out);
                l.into = l.into.saturating_add(s.into);
                taken += 1;
            }
            _ => {
                out.extend(last.replace(*s));
                taken = 1;
            }
        }
    }
    out.extend(last);
    let each = out.len().div_ceil(MAX_SERIES).max(1);
    to.extend(out.into_iter().step_by(each));
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;
    use crate::gpu::model::What;
    use crate::gpu::windows::Source;

    /// A GPU that was read as quiet from second to second, eight times each.
    fn quiet(seconds: std::ops::Range<u64>) -> Gpus {
        let mut gpus = Gpus::default();
        for n in seconds.start * 8..seconds.end * 8 {
            let (from, at) = (Mono(n * SECOND / 8), Mono((n + 1) * SECOND / 8));
            let (link, source) = (Wire::Pcie, Source::Gpm);
            let moved = Stretch { link, source, from, to: at, out: 0, into: 0 };
            for what in [What::Moved(moved), What::Computed(from, 0)] {
                gpus.take(&Reading { at, index: 0, what });
            }
        }
        gpus
    }

    #[test]
    fn a_gpu_that_is_read_no_more_says_nothing_of_now() {
        let says = |gpus: &Gpus, tenths: u64| {
            let all: Vec<&Gpu> = gpus.iter().map(|(_, gpu)| gpu).collect();
            silent(&all, Mono(20 * SECOND), Mono(tenths * SECOND / 10))
        };
        let mut gpus = quiet(10..80);
        let read = says(&gpus, 805).unwrap();
        assert_eq!((read.from, read.to, read.read), (Mono(20 * SECOND), Mono(80 * SECOND), 60 * SECOND));
        // A turn that takes long.
        assert!(says(&gpus, 820).is_some());
        assert!(says(&gpus, 821).is_none(), "nobody reads any more");
        // What the agent before had read holds for half a minute, until this one reads; then that is what counts.
        gpus = Gpus::restore(gpus.save(), Mono(80 * SECOND), |_| true);
        assert!(says(&gpus, 1100).is_some() && says(&gpus, 1101).is_none());
        for (reading, at) in [(What::Named("index-0".into()), 805), (What::Has(Wire::Pcie), 806)] {
            gpus.take(&Reading { at: Mono(at * SECOND / 10), index: 0, what: reading });
        }
        let (link, source, from, to) = (Wire::Pcie, Source::Gpm, Mono(81 * SECOND), Mono(82 * SECOND));
        let moved = Stretch { link, source, from, to, out: 0, into: 0 };
        gpus.take(&Reading { at: to, index: 0, what: What::Moved(moved) });
        assert!(says(&gpus, 900).is_some(), "how busy it is has not been read yet");
        gpus.take(&Reading { at: to, index: 0, what: What::Computed(from, 0) });
        assert!(says(&gpus, 830).is_some() && says(&gpus, 841).is_none(), "and then its call hung");
    }

    #[test]
    fn hand_overs_are_counted_as_long_as_they_are_remembered_and_not_known_after_that() {
        let mut moves = Moves::default();
        for n in 0..20_000 {
            moves.begun.add(Mono(n * 10));
            moves.ended.add(Mono(n * 10 + 25));
        }
        assert_eq!(moves.overlapping(Mono(150_000), Mono(150_000)), Some(3));
        assert_eq!(moves.overlapping(Mono(150_000), Mono(150_099)), Some(12));
        assert_eq!(moves.overlapping(Mono(1000), Mono(1000)), None, "that is too long ago");
        assert_eq!((moves.begun.list.len(), moves.ended.count()), (MAX_MOVES, 20_000));
    }

    #[test]
    fn engines_that_are_over_make_room_and_those_under_way_keep_it() {
        let mut gpus = RoomGpus::default();
        gpus.take(&Reading { at: Mono(5), index: 0, what: What::Lost });
        for pid in 0..200 {
            let moves = gpus.moves((pid, Role::Prefill)).unwrap();
            moves.begun.add(Mono(10));
            if pid > 0 {
                moves.ended.add(Mono(u64::from(pid) + 20));
            }
        }
        assert_eq!(gpus.engines.len(), MAX_ENGINES);
        assert_eq!(gpus.overlapping((0, Role::Prefill), Mono(10), Mono(90)), Some(1));
        assert_eq!(gpus.overlapping((1, Role::Prefill), Mono(10), Mono(90)), None);
        assert_eq!(gpus.overlapping((0, Role::Prefill), Mono(4), Mono(90)), None, "before anything was read");
    }
}
