//! Bytes between two readings of a GPU. Pure.
//!
//! A difference that more than one history explains is none: a counter of 32 bits that may have gone round twice, one that went
//! back, one faster than the link.

use super::windows::{Link, Source, Stretch};
use crate::event::{Mono, SECOND};

/// PCI Express lanes' bytes per second and direction by generation, generously (encoding left out): `PCIe` 6.0, table 1-1.
const LANE: [u64; 7] =
    [0, 250_000_000, 500_000_000, 1_000_000_000, 2_000_000_000, 4_000_000_000, 8_000_000_000];

/// A link that is not known is taken for the fastest there is: 16 lanes of generation 6.
pub(super) const FASTEST_PCIE: u64 = 128_000_000_000;

/// Above any `NVLink` or C2C of today, all links of one GPU together (fifth generation: 0.9 TB/s a direction).
pub(super) const FASTEST_NVLINK: u64 = 4_000_000_000_000;

/// What a link of `generation` with `width` lanes can move in one direction, bytes per second.
pub fn fastest_pcie(generation: Option<u32>, width: Option<u32>) -> u64 {
    let lane = generation.and_then(|g| LANE.get(usize::try_from(g).ok()?)).filter(|l| **l > 0);
    match (lane, width) {
        (Some(lane), Some(width @ 1..=32)) => lane * u64::from(width),
        _ => FASTEST_PCIE,
    }
}

/// How wide a counter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// Goes round after 4 GiB.
    Bits32,
    /// Does not go round.
    Bits64,
}

/// Why two readings give no number of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unusable {
    /// It may have gone round more than once.
    Ambiguous,
    /// It went back, or further than the link can move, or is no number.
    Nonsense,
}

/// One reading of a byte counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    /// Its value, in `unit` bytes.
    pub value: u64,
    /// Its width.
    pub width: Width,
}

/// A counter as the driver told it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Told {
    /// The reading.
    pub count: Count,
    /// When the driver took it, microseconds of its own clock; 0: not told.
    pub taken: i64,
}

/// The counters of one link, bytes out and in, read over and over.
#[derive(Clone, Debug)]
pub struct Counters {
    link: Link,
    unit: u64,
    fastest: u64,
    last: Option<(Mono, [Told; 2])>,
}

impl Counters {
    /// Counters in units of `unit` bytes of a link that moves at most `fastest` bytes per second in one direction.
    pub const fn new(link: Link, unit: u64, fastest: u64) -> Self {
        Self { link, unit, fastest, last: None }
    }

    /// The next reading counts from itself.
    pub const fn forget(&mut self) {
        self.last = None;
    }

    /// Takes what a call told that began at `before` and had its answer at `after`: what moved since the last reading. `None`: there
    /// was none, or the driver handed out again what it had read then.
    ///
    /// # Errors
    ///
    /// Why it cannot be told what moved.
    pub fn next(&mut self, before: Mono, after: Mono, told: [Told; 2]) -> Option<Result<Stretch, Unusable>> {
        let Some((from, last)) = self.last else {
            self.last = Some((before, told));
            return None;
        };
        let ([out_then, into_then], [out_now, into_now]) = (last, told);
        if out_now.taken == out_then.taken && out_now.taken != 0 {
            return None;
        }
        self.last = Some((before, told));
        let moved = |then: Told, now: Told| {
            bytes_between(then.count, now.count, self.unit, after.since(from), self.fastest)
        };
        let stretch =
            |out, into| Stretch { link: self.link, source: Source::Counters, from, to: after, out, into };
        Some(moved(out_then, out_now).and_then(|out| Ok(stretch(out, moved(into_then, into_now)?))))
    }
}

/// Bytes from `before` to `after`, counted in units of `unit` bytes, `nanos` apart at most, on a link of at most `fastest` bytes per second.
///
/// # Errors
///
/// Why it cannot be told.
pub fn bytes_between(
    before: Count,
    after: Count,
    unit: u64,
    nanos: u64,
    fastest: u64,
) -> Result<u64, Unusable> {
    let most = at_most(nanos, fastest);
    let moved = match (before.width, after.width) {
        (Width::Bits64, Width::Bits64) => after.value.checked_sub(before.value).ok_or(Unusable::Nonsense)?,
        (Width::Bits32, Width::Bits32) => {
            if most / u128::from(unit.max(1)) >= 1 << 32 {
                return Err(Unusable::Ambiguous);
            }
            after.value.wrapping_sub(before.value) & 0xffff_ffff
        }
        _ => return Err(Unusable::Nonsense),
    };
    let bytes = moved.checked_mul(unit).ok_or(Unusable::Nonsense)?;
    if u128::from(bytes) > most { Err(Unusable::Nonsense) } else { Ok(bytes) }
}

/// Bytes moved in `nanos` at `mib_per_second`, as GPM tells a rate.
///
/// # Errors
///
/// [`Unusable::Nonsense`] for what is no rate of this link.
#[allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a rate is an estimate; checked to be finite, positive and within the link's"
)]
pub fn bytes_at(mib_per_second: f64, nanos: u64, fastest: u64) -> Result<u64, Unusable> {
    let bytes = mib_per_second * 1_048_576.0 * (nanos as f64 / 1e9);
    let fits = bytes.is_finite() && bytes >= 0.0 && bytes <= at_most(nanos, fastest) as f64;
    if fits { Ok(bytes as u64) } else { Err(Unusable::Nonsense) }
}

/// What a link can move, with a quarter and 16 MiB on top: clocks differ, counters are refreshed in steps.
fn at_most(nanos: u64, fastest: u64) -> u128 {
    u128::from(nanos) * u128::from(fastest) / u128::from(SECOND) * 5 / 4 + (16 << 20)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    const MS: u64 = 1_000_000;

    fn narrow(value: u64) -> Count {
        Count { value, width: Width::Bits32 }
    }

    fn wide(value: u64) -> Count {
        Count { value, width: Width::Bits64 }
    }

    #[test]
    fn a_narrow_counter_that_went_round_once_is_read() {
        let fastest = fastest_pcie(Some(4), Some(16));
        assert_eq!(bytes_between(narrow(0xffff_ff00), narrow(0x100), 1, 50 * MS, fastest), Ok(0x200));
        assert_eq!(bytes_between(narrow(5), narrow(5), 1, 50 * MS, fastest), Ok(0));
    }

    #[test]
    fn one_that_may_have_gone_round_twice_is_not() {
        let fastest = fastest_pcie(Some(4), Some(16));
        assert_eq!(bytes_between(narrow(5), narrow(5), 1, 1000 * MS, fastest), Err(Unusable::Ambiguous));
        // A slow link cannot have gone round in that time.
        let slow = fastest_pcie(Some(1), Some(4));
        assert_eq!(bytes_between(narrow(5), narrow(9), 1, 1000 * MS, slow), Ok(4));
    }

    #[test]
    fn a_counter_that_goes_back_or_beyond_the_link_says_nothing() {
        assert_eq!(bytes_between(wide(7), wide(6), 1, MS, FASTEST_PCIE), Err(Unusable::Nonsense));
        assert_eq!(bytes_between(wide(0), wide(u64::MAX), 1, MS, FASTEST_PCIE), Err(Unusable::Nonsense));
        assert_eq!(bytes_between(wide(0), wide(u64::MAX), 1024, MS, FASTEST_PCIE), Err(Unusable::Nonsense));
        assert_eq!(bytes_between(wide(0), narrow(1), 1, MS, FASTEST_PCIE), Err(Unusable::Nonsense));
        assert_eq!(
            bytes_between(narrow(9), narrow(5), 1, MS, fastest_pcie(Some(5), Some(16))),
            Err(Unusable::Nonsense)
        );
        assert_eq!(bytes_between(wide(0), wide(3), 1024, MS, FASTEST_NVLINK), Ok(3072));
    }

    #[test]
    fn what_the_driver_hands_out_again_is_no_reading() {
        let mut counters = Counters::new(Link::Pcie, 1, FASTEST_PCIE);
        let told = |value, taken| [Told { count: wide(value), taken }; 2];
        let ms = |n| Mono(n * MS);
        assert_eq!(counters.next(ms(0), ms(1), told(100, 7)), None);
        assert_eq!(counters.next(ms(100), ms(101), told(100, 7)), None);
        let stretch = counters.next(ms(200), ms(201), told(150, 9)).unwrap().unwrap();
        assert_eq!((stretch.from, stretch.to, stretch.out, stretch.into), (ms(0), ms(201), 50, 50));
        // Without a time the reading is taken for new.
        assert_eq!(counters.next(ms(300), ms(301), told(150, 0)).unwrap().unwrap().out, 0);
        counters.forget();
        assert_eq!(counters.next(ms(400), ms(401), told(900, 11)), None);
    }

    #[test]
    fn a_rate_that_is_none_says_nothing() {
        assert_eq!(bytes_at(100.0, 500 * MS, FASTEST_PCIE), Ok(50 << 20));
        assert_eq!(bytes_at(0.0, 500 * MS, FASTEST_PCIE), Ok(0));
        for rate in [f64::NAN, f64::INFINITY, -1.0, 1e12] {
            assert_eq!(bytes_at(rate, 500 * MS, FASTEST_PCIE), Err(Unusable::Nonsense), "{rate}");
        }
    }

    #[test]
    fn an_unknown_link_is_the_fastest() {
        assert_eq!(fastest_pcie(Some(5), Some(16)), 64_000_000_000);
        for (generation, width) in
            [(None, Some(16)), (Some(5), None), (Some(0), Some(16)), (Some(99), Some(16)), (Some(5), Some(0))]
        {
            assert_eq!(fastest_pcie(generation, width), FASTEST_PCIE);
        }
    }
}
