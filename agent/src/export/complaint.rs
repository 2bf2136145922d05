//! One clear message instead of a thousand: says when a failure that repeats is worth a line in the log.

use std::time::{Duration, Instant};

/// At most one line per this while something keeps failing.
const EVERY: Duration = Duration::from_mins(1);

/// State of one thing that can fail over and over.
#[derive(Debug, Default)]
pub(crate) struct Complaint {
    since: Option<Instant>,
    told: Option<Instant>,
    untold: u64,
}

impl Complaint {
    /// It failed. `Some(n)`: say so now; `n` failures were not told since the last line.
    pub(crate) fn failed(&mut self, now: Instant) -> Option<u64> {
        self.since.get_or_insert(now);
        if self.told.is_some_and(|told| now.duration_since(told) < EVERY) {
            self.untold += 1;
            return None;
        }
        self.told = Some(now);
        Some(std::mem::take(&mut self.untold))
    }

    /// It works. `Some(d)`: it had failed for `d`, say that it works again.
    pub(crate) fn works(&mut self, now: Instant) -> Option<Duration> {
        let since = self.since.take()?;
        self.untold = 0;
        Some(now.duration_since(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_told_once_a_minute_with_the_number_not_told() {
        let mut c = Complaint::default();
        let start = Instant::now();
        assert_eq!(c.failed(start), Some(0));
        for s in 1..60 {
            assert_eq!(c.failed(start + Duration::from_secs(s)), None);
        }
        assert_eq!(c.failed(start + Duration::from_mins(1)), Some(59));
        assert_eq!(c.works(start + Duration::from_secs(61)), Some(Duration::from_secs(61)));
        assert_eq!(c.works(start + Duration::from_secs(62)), None);
    }

    #[test]
    fn flapping_does_not_get_around_the_limit() {
        let mut c = Complaint::default();
        let start = Instant::now();
        assert_eq!(c.failed(start), Some(0));
        c.works(start + Duration::from_secs(1));
        assert_eq!(c.failed(start + Duration::from_secs(2)), None);
    }
}
