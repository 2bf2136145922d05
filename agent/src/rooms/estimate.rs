//! How long a phase usually takes: bounded histograms per phase and page-count bucket.
//!
//! Pure. Buckets grow by half octaves from a millisecond, so a quantile is at most 50 % too high, never too
//! low; counts are halved when full, so old behaviour fades.

use crate::rooms::model::Phase;

/// Half octaves from 1.05 ms (2^20 ns) on: the last holds all above 2^39 ns (9 min).
const BUCKETS: usize = 40;

/// Counts are halved at this many observations.
const FULL: u32 = 8192;

/// Fewer observations than this say nothing about a p99 (verdicts: "cold start").
pub(crate) const WARM: u32 = 100;

/// A page bucket with fewer observations borrows its neighbour's quantile.
const ENOUGH: u32 = 20;

#[derive(Clone, Debug)]
struct Histogram {
    counts: [u16; BUCKETS],
    total: u32,
}

impl Histogram {
    fn observe(&mut self, nanos: u64) {
        if self.total >= FULL {
            self.total = 0;
            for c in &mut self.counts {
                *c /= 2;
                self.total += u32::from(*c);
            }
        }
        if let Some(c) = self.counts.get_mut(bucket_of(nanos)) {
            *c = c.saturating_add(1);
            self.total += 1;
        }
    }

    /// Upper edge of the bucket that holds the p99.
    fn p99(&self) -> u64 {
        let above = self.total / 100;
        let mut seen = 0;
        for (i, c) in self.counts.iter().enumerate().rev() {
            seen += u32::from(*c);
            if seen > above {
                return upper_edge(i);
            }
        }
        0
    }
}

fn bucket_of(nanos: u64) -> usize {
    let units = nanos >> 20;
    if units == 0 {
        return 0;
    }
    let octave = units.ilog2();
    // The bit below the leading one, which for the first octave lies below the unit.
    let half = (nanos >> (19 + octave)) & 1;
    let index = 1 + 2 * octave as usize + usize::from(half == 1);
    index.min(BUCKETS - 1)
}

fn upper_edge(index: usize) -> u64 {
    if index == 0 {
        return 1 << 20;
    }
    let octave = (index - 1) / 2;
    let base = 1u64 << (20 + octave);
    if (index - 1).is_multiple_of(2) { base + base / 2 } else { base * 2 }
}

/// Page-count buckets, by factors of four.
const PAGE_BUCKETS: u8 = 10;

fn page_bucket(pages: u64) -> u8 {
    let bucket = pages.saturating_add(1).ilog2() / 2;
    u8::try_from(bucket).unwrap_or(PAGE_BUCKETS).min(PAGE_BUCKETS - 1)
}

/// Whether how long a phase takes depends on the prompt.
const fn by_pages(phase: Phase) -> bool {
    matches!(phase, Phase::Transfer | Phase::Compute)
}

/// Whether no queueing and no computing is in a phase, so that the ceiling holds.
pub(crate) const fn is_prompt(phase: Phase) -> bool {
    matches!(phase, Phase::Conclude | Phase::Abort)
}

/// Durations of the phases of one pair of peers. At most one histogram per phase and page bucket.
#[derive(Clone, Debug, Default)]
pub(crate) struct Durations {
    histograms: Vec<(Phase, u8, Histogram)>,
}

/// One histogram as it is written down: its phase, its bucket of pages, and the counts that are not zero with their
/// places.
pub(crate) type SavedHistogram = (Phase, u8, Vec<(u8, u16)>);

impl Durations {
    pub(crate) fn save(&self) -> Vec<SavedHistogram> {
        let counts = |h: &Histogram| {
            let places = (0u8..).zip(h.counts).filter(|(_, n)| *n > 0);
            places.collect()
        };
        self.histograms.iter().map(|(phase, bucket, h)| (*phase, *bucket, counts(h))).collect()
    }

    /// Takes back what [`Self::save`] gave; more than that is left out.
    pub(crate) fn restore(saved: Vec<SavedHistogram>) -> Self {
        let mut histograms: Vec<(Phase, u8, Histogram)> = Vec::new();
        for (phase, bucket, counts) in saved {
            let known = histograms.iter().any(|(p, b, _)| *p == phase && *b == bucket);
            if known || bucket >= PAGE_BUCKETS {
                continue;
            }
            let mut h = Histogram { counts: [0; BUCKETS], total: 0 };
            for (place, n) in counts {
                if let Some(c) = h.counts.get_mut(usize::from(place)) {
                    *c = n;
                }
            }
            h.total = h.counts.iter().map(|c| u32::from(*c)).sum();
            histograms.push((phase, bucket, h));
        }
        Self { histograms }
    }
}

/// When a phase counts as overdue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Threshold {
    /// Nanoseconds.
    pub(crate) nanos: u64,
    /// Observations it rests on.
    pub(crate) samples: u32,
}

/// The three numbers of the overdue rule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    pub(crate) factor: u64,
    pub(crate) floor: u64,
    pub(crate) ceiling: u64,
}

impl Durations {
    pub(crate) fn observe(&mut self, phase: Phase, pages: u64, nanos: u64) {
        let bucket = if by_pages(phase) { page_bucket(pages) } else { 0 };
        if let Some((_, _, h)) = self.histograms.iter_mut().find(|(p, b, _)| *p == phase && *b == bucket) {
            h.observe(nanos);
            return;
        }
        let mut h = Histogram { counts: [0; BUCKETS], total: 0 };
        h.observe(nanos);
        self.histograms.push((phase, bucket, h));
    }

    pub(crate) fn threshold(&self, phase: Phase, pages: u64, rule: Rule) -> Threshold {
        let wanted = if by_pages(phase) { page_bucket(pages) } else { 0 };
        let samples = self.histograms.iter().filter(|(p, _, _)| *p == phase).map(|(_, _, h)| h.total).sum();
        if samples < WARM {
            return Threshold { nanos: rule.floor, samples };
        }
        // The bucket itself, else the nearest above it, else the nearest below.
        let p99 = self
            .histograms
            .iter()
            .filter(|(p, _, h)| *p == phase && h.total >= ENOUGH)
            .min_by_key(|(_, b, _)| (*b < wanted, b.abs_diff(wanted)))
            .map_or(0, |(_, _, h)| h.p99());
        let mut nanos = p99.saturating_mul(rule.factor);
        if is_prompt(phase) {
            nanos = nanos.min(rule.ceiling);
        }
        Threshold { nanos: nanos.max(rule.floor), samples }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]
mod tests {
    use super::*;
    use crate::event::SECOND;

    const RULE: Rule = Rule { factor: 8, floor: 10 * SECOND, ceiling: 60 * SECOND };

    #[test]
    fn edges_enclose_every_duration() {
        for shift in 0..39 {
            for odd in [0, 1, 7] {
                let nanos = (1u64 << shift) + odd * (1 << shift) / 8;
                assert!(upper_edge(bucket_of(nanos)) >= nanos, "{nanos}");
                assert!(upper_edge(bucket_of(nanos)) <= (nanos * 2).max(1 << 20), "{nanos}");
            }
        }
    }

    #[test]
    fn cold_means_floor() {
        let mut d = Durations::default();
        for _ in 0..WARM - 1 {
            d.observe(Phase::Transfer, 8, 20 * SECOND);
        }
        assert_eq!(d.threshold(Phase::Transfer, 8, RULE), Threshold { nanos: RULE.floor, samples: WARM - 1 });
    }

    #[test]
    fn warm_means_factor_times_p99_and_only_prompt_phases_have_a_ceiling() {
        let mut d = Durations::default();
        for _ in 0..WARM {
            d.observe(Phase::Transfer, 8, 20 * SECOND);
            d.observe(Phase::Conclude, 8, 20 * SECOND);
        }
        assert!(d.threshold(Phase::Transfer, 8, RULE).nanos >= 160 * SECOND);
        assert_eq!(d.threshold(Phase::Conclude, 8, RULE).nanos, 60 * SECOND);
    }

    #[test]
    fn long_prompts_are_measured_with_long_prompts() {
        let mut d = Durations::default();
        for _ in 0..WARM {
            d.observe(Phase::Transfer, 8, SECOND / 100);
            d.observe(Phase::Transfer, 100_000, 30 * SECOND);
        }
        assert_eq!(d.threshold(Phase::Transfer, 8, RULE).nanos, RULE.floor);
        assert!(d.threshold(Phase::Transfer, 90_000, RULE).nanos > 200 * SECOND);
    }

    #[test]
    fn old_behaviour_fades() {
        let mut d = Durations::default();
        for _ in 0..FULL {
            d.observe(Phase::Transfer, 8, 20 * SECOND);
        }
        for _ in 0..20 * FULL {
            d.observe(Phase::Transfer, 8, SECOND / 100);
        }
        assert_eq!(d.threshold(Phase::Transfer, 8, RULE).nanos, RULE.floor);
    }
}
