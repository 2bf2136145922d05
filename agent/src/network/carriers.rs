//! What the engines' connections carry that are no control connections, added up per process. Pure.
//!
//! The kernel programs tell of each such connection what TCP has counted since it was opened: in a walk that is asked for, and at its
//! end. A round is a walk with all that was told since the walk before. What a connection had carried before it was first told of is
//! nobody's, unless it was opened while the programs ran; a process of which anything is missing in a round has no reading of it.

use std::collections::{BTreeMap, HashMap};

use super::model::{MAX_PROCESSES, Of, Reading, What};
use crate::event::{Carried, Mono, SECOND, SocketId};
use crate::gpu::windows::{Link, Source, Stretch};

/// Connections followed at most. Mooncake opens one for each piece that it moves, or keeps a pool of them.
const MAX_CONNECTIONS: usize = 16_384;

/// One that was not told of for so long has ended unseen.
const FORGET: u64 = 60 * SECOND;

/// A connection as it was last told of.
#[derive(Clone, Copy, Debug)]
struct Known {
    process: u32,
    acked: u64,
    received: u64,
    at: Mono,
}

/// What a process's connections carried in the round under way.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    out: u64,
    into: u64,
    /// Something of it is missing.
    incomplete: bool,
}

/// All of them.
#[derive(Debug, Default)]
pub struct Carriers {
    connections: HashMap<SocketId, Known>,
    processes: BTreeMap<u32, Sum>,
    /// When the walk of the round before began.
    before: Option<Mono>,
    turned_away: u64,
}

impl Carriers {
    /// Takes what was told of one connection.
    pub fn take(&mut self, told: &Carried) {
        let full = self.processes.len() >= MAX_PROCESSES && !self.processes.contains_key(&told.process);
        if full || told.process == 0 {
            self.turned_away += 1;
            return;
        }
        let known = self.connections.get(&told.socket).copied();
        let sum = self.processes.entry(told.process).or_default();
        let since = match known {
            Some(known) => Some((known.acked, known.received)),
            None if told.opened => Some((0, 0)),
            None => None,
        };
        match since {
            Some((acked, received)) if told.acked >= acked && told.received >= received => {
                sum.out = sum.out.saturating_add(told.acked - acked);
                sum.into = sum.into.saturating_add(told.received - received);
            }
            _ => sum.incomplete = true,
        }
        if told.closed {
            self.connections.remove(&told.socket);
            return;
        }
        if known.is_none() && self.connections.len() >= MAX_CONNECTIONS {
            self.connections.retain(|_, c| told.at.since(c.at) < FORGET);
        }
        if known.is_none() && self.connections.len() >= MAX_CONNECTIONS {
            // Nobody knows next time how much of it was counted already.
            sum.incomplete = true;
            self.turned_away += 1;
            return;
        }
        let Carried { process, acked, received, at, .. } = *told;
        self.connections.insert(told.socket, Known { process, acked, received, at });
    }

    /// Ends a round: the walk began at `walked`, and everything told until `now` has been taken. `lost`: not everything was told.
    /// Processes that do not live any more are left out of the next.
    pub fn round(
        &mut self,
        walked: Mono,
        now: Mono,
        lost: bool,
        alive: impl Fn(u32) -> bool,
        out: &mut impl FnMut(Reading),
    ) {
        if let Some(from) = self.before.replace(walked) {
            for (process, sum) in self.processes.iter().filter(|(_, sum)| !sum.incomplete && !lost) {
                let Sum { out: left, into, .. } = *sum;
                let stretch =
                    Stretch { link: Link::Tcp, source: Source::Counters, from, to: now, out: left, into };
                out(Reading { at: now, of: Of::Process(*process), what: What::Moved(stretch) });
            }
        }
        self.processes.retain(|process, _| alive(*process));
        self.processes.values_mut().for_each(|sum| *sum = Sum::default());
        self.connections.retain(|_, c| self.processes.contains_key(&c.process));
    }

    /// There is no such connection at `now`, so no walk is needed, and no process has one.
    pub fn none(&mut self, now: Mono) {
        self.before = Some(now);
    }

    /// Whether no process has, or lately had, such a connection.
    pub fn is_empty(&self) -> bool {
        self.processes.is_empty()
    }

    /// Connections that are followed now.
    pub fn open(&self) -> usize {
        self.connections.len()
    }

    /// Processes that are followed now.
    pub fn processes(&self) -> usize {
        self.processes.len()
    }

    /// What was told and found no place.
    pub const fn turned_away(&self) -> u64 {
        self.turned_away
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
    use super::*;

    fn told(socket: u64, process: u32, acked: u64, received: u64) -> Carried {
        let (opened, closed) = (true, false);
        Carried { at: Mono(1), socket: SocketId(socket), process, acked, received, opened, closed }
    }

    /// Bytes by process of the round that ends at `s`.
    fn round(carriers: &mut Carriers, s: u64, lost: bool) -> Vec<(u32, u64, u64)> {
        let mut all = Vec::new();
        let walked = Mono(s * SECOND);
        carriers.round(walked, Mono(walked.0 + 5), lost, |pid| pid < 100, &mut |reading| {
            let (Of::Process(pid), What::Moved(moved)) = (reading.of, reading.what) else { panic!() };
            assert_eq!((moved.link, moved.from, moved.to), (Link::Tcp, Mono((s - 1) * SECOND), reading.at));
            all.push((pid, moved.out, moved.into));
        });
        all
    }

    #[test]
    fn what_passed_between_two_walks_is_summed_with_what_was_opened_and_closed_between_them() {
        let mut carriers = Carriers::default();
        carriers.none(Mono(0));
        carriers.take(&told(1, 7, 100, 10));
        assert_eq!(round(&mut carriers, 1, false), [(7, 100, 10)]);
        carriers.take(&told(1, 7, 150, 10));
        carriers.take(&Carried { closed: true, ..told(2, 7, 1000, 1) });
        carriers.take(&told(3, 8, 5, 0));
        assert_eq!(round(&mut carriers, 2, false), [(7, 1050, 1), (8, 5, 0)]);
        // Nothing passed, which was read; told twice is counted once.
        carriers.take(&told(1, 7, 150, 10));
        carriers.take(&told(1, 7, 150, 10));
        assert_eq!(round(&mut carriers, 3, false), [(7, 0, 0), (8, 0, 0)]);
        carriers.take(&Carried { closed: true, ..told(1, 7, 151, 11) });
        assert_eq!(round(&mut carriers, 4, false), [(7, 1, 1), (8, 0, 0)]);
        assert_eq!(carriers.open(), 1);
    }

    #[test]
    fn what_one_had_carried_before_it_was_seen_is_not_of_the_round() {
        let mut carriers = Carriers::default();
        let older = |acked| Carried { opened: false, ..told(1, 7, acked, 0) };
        carriers.take(&older(1 << 40));
        assert_eq!(round(&mut carriers, 1, false), [], "there was no walk before");
        carriers.take(&older((1 << 40) + 5));
        assert_eq!(round(&mut carriers, 2, false), [(7, 5, 0)]);
        carriers.take(&Carried { opened: false, ..told(2, 7, 9, 9) });
        carriers.take(&told(3, 8, 1, 1));
        assert_eq!(round(&mut carriers, 3, false), [(8, 1, 1)], "how much of the new one is of this round?");
        assert_eq!(round(&mut carriers, 4, false), [(7, 0, 0), (8, 0, 0)]);
    }

    #[test]
    fn a_round_of_which_something_is_missing_is_no_reading() {
        let mut carriers = Carriers::default();
        carriers.none(Mono(0));
        carriers.take(&told(1, 7, 100, 10));
        assert_eq!(round(&mut carriers, 1, true), []);
        carriers.take(&told(1, 7, 90, 10));
        assert_eq!(round(&mut carriers, 2, false), [], "it went back");
        carriers.take(&told(1, 7, 95, 10));
        assert_eq!(round(&mut carriers, 3, false), [(7, 5, 0)]);
    }

    #[test]
    fn the_ended_are_forgotten_and_the_rest_is_bounded() {
        let mut carriers = Carriers::default();
        carriers.none(Mono(0));
        carriers.take(&told(1, 1000, 5, 5));
        assert_eq!(round(&mut carriers, 1, false), [(1000, 5, 5)], "the last of it is told");
        assert!(carriers.is_empty() && carriers.open() == 0);
        for n in 0..20_000 {
            carriers.take(&told(n, 7, 1, 1));
        }
        assert_eq!((carriers.open(), carriers.turned_away()), (MAX_CONNECTIONS, 20_000 - 16_384));
        assert_eq!(round(&mut carriers, 2, false), []);
        for n in 0..200 {
            carriers.take(&Carried { closed: true, ..told(50_000, n, 1, 1) });
        }
        assert_eq!(carriers.processes(), MAX_PROCESSES);
    }
}
