//! Monotonic → wall clock, by offsets that the caller samples.
//!
//! Pure: reads no clock itself. Durations and order never come from here: they are monotonic.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use crate::event::Mono;

/// Offsets kept. Only steps of the wall clock make a new one (slewing moves both clocks alike), so 64 last
/// for years on a host whose clock is not broken.
const HISTORY: usize = 64;

/// A smaller difference than this is taken for noise of the two readings, nanoseconds.
const NOISE: u64 = 1_000_000;

/// One reading of both clocks: monotonic, wall, monotonic again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bracket {
    /// `CLOCK_MONOTONIC` before.
    pub before: Mono,
    /// `CLOCK_REALTIME`, nanoseconds since the epoch.
    pub wall: u64,
    /// `CLOCK_MONOTONIC` after.
    pub after: Mono,
}

impl Bracket {
    /// How long the reading took: twice the error of its offset.
    const fn width(&self) -> u64 {
        self.after.since(self.before)
    }

    /// Wall − monotonic.
    fn offset(&self) -> i128 {
        i128::from(self.wall) - i128::from(self.before.0) - i128::from(self.width() / 2)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Offset {
    from: Mono,
    nanos: i128,
}

/// Converts [`Mono`] to wall clock time. Cheap to clone; a clone keeps converting as it did when it was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clock {
    /// Oldest first, never empty, at most [`HISTORY`].
    #[allow(clippy::rc_buffer, reason = "shared by clones, and grown in place by the one that resamples")]
    offsets: Arc<Vec<Offset>>,
}

impl Clock {
    /// For sources whose `Mono` is the wall clock already (packet captures): offset 0.
    pub fn of_replay() -> Self {
        Self::fixed(0)
    }

    /// One offset for all times, wall − monotonic in nanoseconds.
    pub fn fixed(nanos: i64) -> Self {
        Self { offsets: Arc::new(vec![Offset { from: Mono(0), nanos: i128::from(nanos) }]) }
    }

    /// From a first sample: several brackets (five are enough), of which the tightest counts. Without any,
    /// offset 0.
    pub fn sampled(brackets: &[Bracket]) -> Self {
        let nanos = tightest(brackets).map_or(0, Bracket::offset);
        Self { offsets: Arc::new(vec![Offset { from: Mono(0), nanos }]) }
    }

    /// A later sample (every 1 to 10 s). A step of the wall clock shifts only times from here on.
    pub fn resample(&mut self, brackets: &[Bracket]) {
        let Some(best) = tightest(brackets) else { return };
        let known = self.offsets.last().map_or(0, |o| o.nanos);
        if (best.offset() - known).unsigned_abs() <= u128::from(NOISE.max(best.width())) {
            return;
        }
        let offsets = Arc::make_mut(&mut self.offsets);
        if offsets.len() >= HISTORY {
            offsets.remove(0);
        }
        offsets.push(Offset { from: best.after, nanos: best.offset() });
    }

    /// Nanoseconds since the epoch, with the offset that was valid at `at`; saturating.
    pub fn unix_nanos(&self, at: Mono) -> u64 {
        let valid = self.offsets.iter().rev().find(|o| o.from <= at).or_else(|| self.offsets.first());
        let nanos = i128::from(at.0) + valid.map_or(0, |o| o.nanos);
        u64::try_from(nanos.max(0)).unwrap_or(u64::MAX)
    }

    /// As [`Self::unix_nanos`], for OpenTelemetry.
    pub fn system_time(&self, at: Mono) -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_nanos(self.unix_nanos(at))
    }

    /// RFC 3339 in UTC with nanoseconds.
    pub fn rfc3339(&self, at: Mono) -> String {
        jiff::Timestamp::from_nanosecond(i128::from(self.unix_nanos(at)))
            .map_or_else(|_| String::new(), |t| format!("{t:.9}"))
    }
}

fn tightest(brackets: &[Bracket]) -> Option<&Bracket> {
    brackets.iter().min_by_key(|b| b.width())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    const T: u64 = 1_700_000_000_000_000_000;

    fn bracket(before: u64, wall: u64, width: u64) -> Bracket {
        Bracket { before: Mono(before), wall, after: Mono(before + width) }
    }

    #[test]
    fn the_tightest_bracket_counts_and_its_middle_is_the_moment() {
        let clock = Clock::sampled(&[bracket(1000, T + 9_000, 10_000), bracket(20_000, T + 20_050, 100)]);
        assert_eq!(clock.unix_nanos(Mono(20_050)), T + 20_050);
    }

    #[test]
    fn a_step_shifts_only_later_times_and_clones_keep_theirs() {
        let mut clock = Clock::sampled(&[bracket(1000, T + 1050, 100)]);
        let before = clock.clone();
        clock.resample(&[bracket(10_000_000_000, T + 70_000_000_050, 100)]);
        assert_eq!(clock.unix_nanos(Mono(5_000_000_000)), T + 5_000_000_000);
        assert_eq!(clock.unix_nanos(Mono(11_000_000_000)), T + 71_000_000_000);
        assert_eq!(before.unix_nanos(Mono(11_000_000_000)), T + 11_000_000_000);
    }

    #[test]
    fn noise_makes_no_history_and_history_is_bounded() {
        let mut clock = Clock::sampled(&[bracket(0, T, 0)]);
        clock.resample(&[bracket(1000, T + 2000, 500)]);
        assert_eq!(clock.offsets.len(), 1);
        for step in 1..200 {
            clock.resample(&[bracket(step * 10, T + step * 1_000_000_000, 0)]);
        }
        assert_eq!(clock.offsets.len(), HISTORY);
        assert_eq!(clock.unix_nanos(Mono(1990)), T + 199_000_000_000);
    }

    #[test]
    fn times_are_rfc3339_with_nanoseconds_in_utc() {
        assert_eq!(Clock::of_replay().rfc3339(Mono(T + 7)), "2023-11-14T22:13:20.000000007Z");
        assert_eq!(Clock::fixed(-5).rfc3339(Mono(3)), "1970-01-01T00:00:00.000000000Z");
        assert!(!Clock::of_replay().rfc3339(Mono(u64::MAX)).is_empty());
    }
}
