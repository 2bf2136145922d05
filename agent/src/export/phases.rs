//! When each phase of an ended view began and ended, read off the room's time line.
//!
//! Pure. A phase whose beginning or end was not seen is left out: not measured, never zero.

use crate::event::Mono;
use crate::rooms::model::{Completeness, MessageMark, Phase, Role, RoomSnapshot};
use crate::sglang::message::{Kind, KvPoll};

/// One phase of a view, or of one prefill rank in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PhaseSpan {
    pub(super) phase: Phase,
    /// Prefill rank that the phase is about; `None`: the whole view.
    pub(super) rank: Option<u32>,
    pub(super) began: Mono,
    pub(super) ended: Mono,
}

/// Phases of the view of `role`, the view's own before those of its ranks. Empty when messages of the room
/// were missed or not kept: the times would be guesses.
pub(super) fn phases(room: &RoomSnapshot, role: Role) -> Vec<PhaseSpan> {
    let view = match role {
        Role::Prefill => room.prefill.as_ref(),
        Role::Decode => room.decode.as_ref(),
    };
    let Some(view) = view else { return Vec::new() };
    if room.messages_dropped > 0 || room.completeness == Completeness::Lossy {
        return Vec::new();
    }
    let line = TimeLine { marks: &room.messages, role };
    let mut out = Vec::new();
    let mut add = |phase, rank, began: Option<Mono>, ended: Option<Mono>| {
        if let (Some(began), Some(ended)) = (began, ended)
            && began <= ended
        {
            out.push(PhaseSpan { phase, rank, began, ended });
        }
    };
    let computed = line.status(|s| s == KvPoll::WaitingForInput).next().map(|m| m.at);
    let complete = view.required.is_none_or(|required| view.got >= required);
    let metadata = line.of(Kind::Metadata).filter(|m| m.dummy != Some(true)).last();
    let metadata = metadata.filter(|_| complete).map(|m| m.at);
    let opened = (room.completeness != Completeness::Preexisting).then_some(room.opened_at);
    let first = line.status(KvPoll::is_terminal).next().map(|m| m.at);
    let last = line.status(KvPoll::is_terminal).last().map(|m| m.at);

    add(Phase::Compute, None, line.of(Kind::Bootstrap).next().map(|m| m.at), computed);
    add(Phase::Bootstrap, None, computed.or(opened), metadata);
    add(Phase::Transfer, None, metadata, first);
    if first != last {
        add(Phase::Conclude, None, first, last);
    }
    add(Phase::Abort, None, line.first(Kind::Abort), line.first(Kind::AbortAck));
    for status in line.status(KvPoll::is_terminal).filter(|m| m.rank.is_some()) {
        add(Phase::Transfer, status.rank, metadata, Some(status.at));
    }
    out
}

struct TimeLine<'a> {
    marks: &'a [MessageMark],
    role: Role,
}

impl<'a> TimeLine<'a> {
    fn of(&self, kind: Kind) -> impl Iterator<Item = &'a MessageMark> + use<'a> {
        let role = self.role;
        self.marks.iter().filter(move |m| m.role == role && m.kind == kind)
    }

    fn first(&self, kind: Kind) -> Option<Mono> {
        self.of(kind).next().map(|m| m.at)
    }

    fn status(&self, wanted: fn(KvPoll) -> bool) -> impl Iterator<Item = &'a MessageMark> + use<'a> {
        self.of(Kind::Status).filter(move |m| m.status.is_some_and(wanted))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use smallvec::smallvec;

    use super::super::testing::{mark, room, view};
    use super::*;
    use crate::event::SECOND;

    fn at(seconds: u64) -> Mono {
        Mono(seconds * SECOND)
    }

    fn phase(phase: Phase, rank: Option<u32>, began: u64, ended: u64) -> PhaseSpan {
        PhaseSpan { phase, rank, began: at(began), ended: at(ended) }
    }

    #[test]
    fn bootstrap_transfer_and_conclude_with_their_ranks() {
        let mut r = room(7);
        r.opened_at = at(1);
        r.prefill = Some(view(Role::Prefill));
        r.messages = smallvec![
            mark(at(1), Role::Prefill, Kind::Metadata),
            MessageMark { dummy: Some(true), ..mark(at(2), Role::Prefill, Kind::Metadata) },
            MessageMark {
                status: Some(KvPoll::Success),
                rank: Some(0),
                ..mark(at(5), Role::Prefill, Kind::Status)
            },
            MessageMark {
                status: Some(KvPoll::Success),
                rank: Some(1),
                ..mark(at(6), Role::Prefill, Kind::Status)
            },
        ];
        assert_eq!(
            phases(&r, Role::Prefill),
            [
                phase(Phase::Bootstrap, None, 1, 1),
                phase(Phase::Transfer, None, 1, 5),
                phase(Phase::Conclude, None, 5, 6),
                phase(Phase::Transfer, Some(0), 1, 5),
                phase(Phase::Transfer, Some(1), 1, 6),
            ]
        );
        assert!(phases(&r, Role::Decode).is_empty());
    }

    #[test]
    fn the_other_policy_computes_first_and_an_abort_has_its_own_phase() {
        let mut r = room(7);
        r.opened_at = at(1);
        r.prefill = Some(view(Role::Prefill));
        r.messages = smallvec![
            mark(at(1), Role::Prefill, Kind::Bootstrap),
            MessageMark { status: Some(KvPoll::WaitingForInput), ..mark(at(4), Role::Prefill, Kind::Status) },
            mark(at(5), Role::Prefill, Kind::Metadata),
            mark(at(6), Role::Prefill, Kind::Abort),
            mark(at(7), Role::Prefill, Kind::AbortAck),
        ];
        assert_eq!(
            phases(&r, Role::Prefill),
            [
                phase(Phase::Compute, None, 1, 4),
                phase(Phase::Bootstrap, None, 4, 5),
                phase(Phase::Abort, None, 6, 7)
            ]
        );
    }

    #[test]
    fn what_was_not_seen_is_not_measured() {
        let mut r = room(7);
        r.prefill = Some(view(Role::Prefill));
        r.messages = smallvec![mark(at(3), Role::Prefill, Kind::Metadata)];
        r.completeness = Completeness::Preexisting;
        assert!(phases(&r, Role::Prefill).is_empty());
        r.completeness = Completeness::Full;
        assert_eq!(phases(&r, Role::Prefill).len(), 1);
        r.messages_dropped = 1;
        assert!(phases(&r, Role::Prefill).is_empty());
        r.messages_dropped = 0;
        r.completeness = Completeness::Lossy;
        assert!(phases(&r, Role::Prefill).is_empty());
        r.completeness = Completeness::Full;
        r.prefill.as_mut().unwrap().required = Some(2);
        assert!(phases(&r, Role::Prefill).is_empty());
    }
}
