//! Counts of the HTTP stage, one set for all connections.

use super::event::{Ignored, Lost, NotSeen, Unread};

/// Counts since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests begun.
    pub requests: u64,
    /// Of these, health checks.
    pub health_checks: u64,
    /// Final answers that ended.
    pub answers: u64,
    /// Final answers that came while no request was open.
    pub answers_unasked: u64,
    /// Rooms named.
    pub rooms: u64,
    /// Rooms of batches beyond [`super::ROOMS_MAX`].
    pub rooms_over_limit: u64,
    /// Request ids that are too long or not printable ASCII.
    pub rids_dropped: u64,
    /// Answers whose end was concluded from the next request.
    pub ends_concluded: u64,
    /// Bytes that passed while the position was lost.
    pub lost_bytes: u64,
    not_seen: [u64; NotSeen::ALL.len()],
    ignored: [u64; Ignored::ALL.len()],
    unread: [u64; Unread::ALL.len()],
    lost: [u64; Lost::ALL.len()],
}

macro_rules! by_reason {
    ($field:ident, $type:ty, $count:ident, $doc:literal) => {
        #[doc = $doc]
        pub fn $field(&self) -> impl Iterator<Item = ($type, u64)> + '_ {
            <$type>::ALL.into_iter().zip(self.$field)
        }

        pub(super) fn $count(&mut self, why: $type) {
            let place = <$type>::ALL.iter().position(|w| *w == why);
            if let Some(count) = place.and_then(|i| self.$field.get_mut(i)) {
                *count += 1;
            }
        }
    };
}

impl Counters {
    pub(super) fn count_lost_bytes(&mut self, bytes: &[u8]) {
        self.lost_bytes = self.lost_bytes.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
    }

    by_reason!(
        not_seen,
        NotSeen,
        count_not_seen,
        "Requests whose room was not seen (`request_room_not_seen`), by reason."
    );
    by_reason!(ignored, Ignored, count_ignored, "Requests whose room is none, by reason.");
    by_reason!(unread, Unread, count_unread, "Connections given up, by reason.");
    by_reason!(lost, Lost, count_lost, "How often a position was lost, by reason.");
}
