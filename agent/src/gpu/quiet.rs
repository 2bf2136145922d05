//! Since when a GPU does nothing, as far as it was read without a gap. Pure.
//!
//! That is kept as readings come, so that asking costs nothing however long it lasts: no kernel ran, and on no link did more move
//! than an idle GPU moves. A reading of an instant a second is none of the time between, so a GPU that has no better is never quiet.

use serde::{Deserialize, Serialize};

use super::windows::{Link, Source, Stretch};
use crate::event::{Mono, SECOND};

/// What moves on a link of a GPU that does nothing, bytes a second and direction, at most: the driver's own traffic. A KV cache moves at
/// a thousand times that.
pub const IDLE_NOISE: u64 = 1 << 20;

/// Readings this far apart are of one time. Closer than readings are while no room is in transfer: then nobody knows.
const GAP: u64 = SECOND / 2;

/// What was quiet until longer ago is not known to be quiet now: nobody reads any more. A reading that goes on with it begins at most half
/// a second after its end (longer is a gap) and is told when its call comes back, half a second later at most (later it tells nothing);
/// a second more is for the other calls of the same turn and the way to the rooms. Nanoseconds; sixteen times the interval of readings
/// while a room is in transfer.
pub const FRESH: u64 = GAP + SECOND / 2 + SECOND;

/// The noise of a short reading is that of this time.
const SHORT: u64 = SECOND / 4;

/// A time that was read from end to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Its beginning.
    pub from: Mono,
    /// Its end.
    pub to: Mono,
}

impl Span {
    /// How much of it is after `since`, nanoseconds.
    pub fn after(self, since: Mono) -> u64 {
        self.to.since(self.from.max(since))
    }

    /// The time in both.
    pub fn both(self, other: Self) -> Option<Self> {
        let (from, to) = (self.from.max(other.from), self.to.min(other.to));
        (from < to).then_some(Self { from, to })
    }
}

/// How the quiet of a GPU stands.
#[derive(Clone, Debug, Default)]
pub struct Quiet {
    links: [Option<Span>; Link::ALL.len()],
    /// Links that it is known to have.
    has: [bool; Link::ALL.len()],
    computing: Option<Span>,
    /// Since the agent began, or since it took over from another: nothing but quiet was read.
    active: bool,
}

impl Quiet {
    /// It has this link: as long as nobody reads it, nobody knows.
    pub fn has(&mut self, link: Link) {
        if let Some(has) = self.has.get_mut(link as usize) {
            *has = true;
        }
    }

    /// Takes what moved.
    pub fn moved(&mut self, s: &Stretch) {
        if s.source == Source::Throughput {
            // What was between two instants is not known, but what was seen was.
            self.active |= s.out.max(s.into) > noise(s.to.since(s.from));
            return;
        }
        let idle = s.out.max(s.into) <= noise(s.to.since(s.from));
        self.active |= !idle;
        if let Some(link) = self.links.get_mut(s.link as usize) {
            *link = Some(grown(*link, s.from, s.to, idle));
        }
    }

    /// Takes how busy it was.
    pub fn computed(&mut self, from: Mono, to: Mono, percent: u8) {
        self.active |= percent > 0;
        self.computing = Some(grown(self.computing, from, to, percent == 0));
    }

    /// The last time in which it did nothing, as far as all that it has was read; `None`: it did something, or something of it is
    /// not measured.
    pub fn span(&self) -> Option<Span> {
        let [pcie, others @ ..] = self.links;
        let [_, has @ ..] = self.has;
        let first = self.computing?.both(pcie?)?;
        others
            .into_iter()
            .zip(has)
            .filter(|(read, has)| *has || read.is_some())
            .try_fold(first, |quiet, (read, _)| quiet.both(read?))
    }

    /// Whether anything else than quiet was ever read.
    pub const fn was_active(&self) -> bool {
        self.active
    }
}

fn noise(nanos: u64) -> u64 {
    let bytes = u128::from(IDLE_NOISE) * u128::from(nanos.max(SHORT)) / u128::from(SECOND);
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// The time with a reading more; what is not idle ends it, so that the next begins there.
fn grown(before: Option<Span>, from: Mono, to: Mono, idle: bool) -> Span {
    match before {
        _ if !idle => Span { from: to, to },
        Some(span) if from <= span.to.plus(GAP) => Span { from: span.from, to },
        _ => Span { from, to },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(tenths: u64) -> Mono {
        Mono(tenths * SECOND / 10)
    }

    fn moved(quiet: &mut Quiet, link: Link, from: u64, to: u64, out: u64) {
        quiet.moved(&Stretch { link, source: Source::Gpm, from: at(from), to: at(to), out, into: 0 });
    }

    fn quiet_until(tenths: u64) -> Quiet {
        let mut quiet = Quiet::default();
        for t in 0..tenths {
            moved(&mut quiet, Link::Pcie, t, t + 1, 1000);
            quiet.computed(at(t), at(t + 1), 0);
        }
        quiet
    }

    fn span(from: u64, to: u64) -> Span {
        Span { from: at(from), to: at(to) }
    }

    #[test]
    fn quiet_is_what_was_read_as_quiet_from_end_to_end() {
        let mut quiet = quiet_until(100);
        assert_eq!((quiet.span(), quiet.was_active()), (Some(span(0, 100)), false));
        // A kernel ends it at once, a copy too.
        quiet.computed(at(100), at(101), 1);
        assert_eq!((quiet.span(), quiet.was_active()), (None, true));
        quiet.computed(at(101), at(110), 0);
        moved(&mut quiet, Link::Pcie, 100, 110, 1000);
        assert_eq!(quiet.span(), Some(span(101, 110)));
        moved(&mut quiet, Link::Pcie, 110, 111, 1 << 20);
        assert_eq!(quiet.span(), None);
    }

    #[test]
    fn a_link_that_moves_or_is_not_read_any_more_is_not_quiet() {
        let mut quiet = quiet_until(100);
        moved(&mut quiet, Link::NvLink, 0, 100, 0);
        assert_eq!(quiet.span(), Some(span(0, 100)));
        for t in 100..200 {
            moved(&mut quiet, Link::Pcie, t, t + 1, 0);
            quiet.computed(at(t), at(t + 1), 0);
        }
        assert_eq!(quiet.span(), Some(span(0, 100)), "NVLink was read no longer");
        moved(&mut quiet, Link::NvLink, 100, 200, 1 << 40);
        assert_eq!(quiet.span(), None);
    }

    #[test]
    fn a_link_that_is_there_and_was_never_read_is_not_quiet() {
        let mut quiet = quiet_until(100);
        quiet.has(Link::C2c);
        assert_eq!(quiet.span(), None);
        moved(&mut quiet, Link::C2c, 50, 100, 0);
        assert_eq!(quiet.span(), Some(span(50, 100)));
    }

    #[test]
    fn time_that_was_not_read_is_not_quiet() {
        let mut quiet = quiet_until(100);
        for t in [110, 120, 130] {
            moved(&mut quiet, Link::Pcie, t, t + 1, 0);
            quiet.computed(at(t), at(t + 1), 0);
        }
        assert_eq!(quiet.span(), Some(span(130, 131)), "a reading a second is one of a tenth of it");
        let mut split = Quiet::default();
        moved(&mut split, Link::Pcie, 0, 100, 0);
        assert_eq!(split.span(), None, "what runs on it is not told");
        let mut instants = Quiet::default();
        instants.computed(at(0), at(100), 0);
        let instant = Stretch {
            link: Link::Pcie,
            source: Source::Throughput,
            from: at(0),
            to: at(100),
            out: 0,
            into: 0,
        };
        instants.moved(&instant);
        assert_eq!(instants.span(), None, "20 ms of a second");
    }
}
