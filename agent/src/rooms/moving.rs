//! Whether bytes leave prefill's side that can be a room's own: readings of whole GPUs, ports and processes, and no other room of the
//! engine that they can be of.
//!
//! Pure: no I/O, no clock (time is an argument). Nothing is divided among rooms: where another room of the engine that is not overdue
//! was handed over in the same time, what moves may be that one's, and says nothing of this. Rooms that are overdue themselves explain
//! nothing: one of them moves, and which is not known.

use crate::event::{Mono, SECOND};
use crate::gpu::windows::Window;
use crate::rooms::model::Role;
use crate::rooms::room::Room;
use crate::rooms::table::RoomTable;
use crate::verdict::facts::{Mover, MovingFact};

/// Bytes a second, more out than in, below which nothing is handed over. An engine whose ranks agree on every turn of their loops
/// (Gloo over TCP) sends some hundred bytes in each, as many as it gets, of which its first rank sends a little more.
const SLOWEST: u64 = 4 << 20;

/// Less of the time than this, in thousandths, is no reading: an instant of 20 ms a second is two hundredths.
const READ: u16 = 15;

/// Pinned rooms looked at, at most; beyond them others are taken for rooms that explain what moves.
const MAX_PINNED: usize = 256;

impl RoomTable {
    /// What leaves prefill in the last floor, the room's phase having begun at `since`, if no other room explains it.
    pub(crate) fn moving(&self, room: &Room, since: Mono, now: Mono) -> Option<MovingFact> {
        let [m, _] = room.moves;
        if m.to.is_some() {
            return None;
        }
        // One that was handed over before anything was read is not among those that are counted.
        let counted = m.engine != 0;
        let engine = if counted { m.engine } else { self.engine_of_move(room, Role::Prefill)? };
        let from = since.max(Mono(now.0.saturating_sub(self.config.floor)));
        let (by, Moved { rate, from }) = self.moves_most(room, engine, from, now)?;
        let all = self.gpus.overlapping((engine, Role::Prefill), from, now);
        let others = all.map(|n| n.saturating_sub(u32::from(counted)));
        // Not known how many: then it may be this one's.
        let explained = others.is_some_and(|n| n > self.overdue_beside(room, engine));
        (!explained).then_some(MovingFact { by, rate, from, to: now, others })
    }

    /// What moves fastest of all that can be the room's, above [`SLOWEST`].
    fn moves_most(&self, room: &Room, engine: u32, from: Mono, now: Mono) -> Option<(Mover, Moved)> {
        let ranks = self.ranks(room, Role::Prefill);
        let mut all: Vec<(Mover, Moved)> = Vec::new();
        let mut quiet = false;
        for gpu in ranks.iter().flat_map(|pid| self.gpus_of(*pid, from, now)).map(|(_, gpu)| gpu) {
            quiet |= gpu.quiet().into_iter().flatten().any(|span| span.to >= from && span.after(from) > 0);
            // What others hold they may move.
            if gpu.holders().all(|h| ranks.iter().any(|pid| self.same_engine(h, *pid))) {
                let fastest =
                    gpu.windows(from, now).filter_map(|w| moved(&w, from, now)).max_by_key(|m| m.rate);
                all.extend(fastest.map(|m| (Mover::Gpu(gpu.name.clone()), m)));
            }
        }
        for pid in &ranks {
            let window = self.network.of(*pid).and_then(|track| track.window(from, now));
            all.extend(window.and_then(|w| moved(&w, from, now)).map(|m| (Mover::Process(*pid), m)));
        }
        // A port is every engine's, and takes what it sends from the GPUs.
        if !quiet && self.alone_on_ports(engine, from, now) {
            for (name, port) in self.ports_of(&ranks) {
                let window = port.track.window(from, now);
                all.extend(window.and_then(|w| moved(&w, from, now)).map(|m| (Mover::Port(name.clone()), m)));
            }
        }
        all.into_iter().filter(|(_, m)| m.rate >= SLOWEST).max_by_key(|(_, m)| m.rate)
    }

    /// Whether no other engine of this host hands over.
    fn alone_on_ports(&self, engine: u32, from: Mono, now: Mono) -> bool {
        let mut others =
            self.gpus.engines.keys().filter(|(id, role)| *role == Role::Prefill && *id != engine);
        others.all(|key| self.gpus.overlapping(*key, from, now) == Some(0))
    }

    /// Other rooms that the engine hands over and that are pinned.
    fn overdue_beside(&self, room: &Room, engine: u32) -> u32 {
        let pinned = self.pinned.iter().take(MAX_PINNED).filter_map(|slot| self.rooms.get(*slot));
        let beside = pinned.filter(|r| {
            let [m, _] = r.moves;
            m.engine == engine && m.to.is_none() && (r.room, r.incarnation) != (room.room, room.incarnation)
        });
        u32::try_from(beside.count()).unwrap_or(u32::MAX)
    }
}

/// What moved.
#[derive(Clone, Copy)]
struct Moved {
    /// Bytes a second, more out than in.
    rate: u64,
    /// Where the first reading of it begins: a room that was over by then has no share in it.
    from: Mono,
}

/// Over the time that was read; `None`: too little was.
fn moved(w: &Window, from: Mono, to: Mono) -> Option<Moved> {
    let nanos = u128::from(to.since(from)) * u128::from(w.coverage) / 1000;
    (w.coverage >= READ && nanos > 0).then_some(())?;
    let bytes = u128::from(w.out.saturating_sub(w.into)) * u128::from(SECOND) / nanos;
    Some(Moved { rate: u64::try_from(bytes).unwrap_or(u64::MAX), from: w.from })
}
