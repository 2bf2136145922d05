//! Reads STATUS: which room, and which of its links, it is about.
//!
//! Pure. METADATA names no prefill rank and STATUS no endpoint: the process, the connection, a rank number seen
//! before or the host tell the links of a room apart, or nothing does, and then the link is a guess and so marked.

use crate::event::Direction;
use crate::rooms::messages::{Seen, maybe_older};
use crate::rooms::model::{Completeness, Event, Role};
use crate::rooms::peers::{Concluded, EndpointId, NONE};
use crate::rooms::room::{Link, MAX_LINKS, Told};
use crate::rooms::table::{RoomTable, next_life};
use crate::sglang::message::{Backend, KvPoll, Status};

impl RoomTable {
    pub(crate) fn status(&mut self, seen: Seen<'_>, m: &Status<'_>, out: &mut Vec<Event>) {
        let Some(slot) = self.room_for_status(&seen, m, out) else { return };
        let origin = self.connections.get(seen.known).map_or(NONE, |k| k.origin);
        if !m.status.is_terminal() {
            if let Some(room) = self.rooms.get_mut(slot) {
                room.computed_at.get_or_insert(seen.at);
            }
            let link = self.link_of(slot, origin, seen.target);
            self.mark(slot, &seen, origin, link, Some(m.status), m.prefill_rank, None);
            self.settle(slot, seen.at, out);
            return;
        }
        let Some(link) = self.match_status(slot, &seen, m, origin) else {
            self.tally.turned_away.late += 1;
            return;
        };
        let deaf = self.falls_on_deaf_ears(slot, &seen);
        let Some(room) = self.rooms.get_mut(slot) else { return };
        let Some(l) = room.links.get_mut(link) else { return };
        let first = l.told.is_none() && l.heard.is_none();
        let sure = !l.guessed;
        let told = Told { at: seen.at, status: m.status };
        match seen.role {
            Role::Prefill => {
                l.told = Some(told);
                l.status_on = Some(seen.connection.socket);
            }
            Role::Decode => (l.heard, l.deaf) = (Some(told), deaf),
        }
        l.rank = l.rank.or(m.prefill_rank);
        let (prefill, pair, numbers) = (l.prefill, l.pair, l.numbers);
        let concluded = Concluded { metadata_at: l.asked_at(), pages: l.pages, at: seen.at };
        if first {
            self.peers.answered(prefill, pair, numbers, concluded);
            self.note_conclusion(slot, link, m.status, seen.at);
            self.learn_rank(&seen, prefill, m, sure);
        }
        if sure && origin != prefill {
            let (session, pair) = (NONE, NONE);
            self.set_origin(&seen, prefill, session, pair);
        }
        self.mark(slot, &seen, prefill, link, Some(m.status), m.prefill_rank, None);
        self.settle(slot, seen.at, out);
    }

    fn learn_rank(&mut self, seen: &Seen<'_>, prefill: EndpointId, m: &Status<'_>, sure: bool) {
        let Some(e) = self.peers.get_mut(prefill) else { return };
        if sure {
            e.rank = m.prefill_rank.or(e.rank);
        }
        if m.status == KvPoll::Success
            && seen.backend == Backend::Nixl
            && let Some(p) = e.prefill.as_deref_mut()
        {
            p.says_success = true;
        }
    }

    /// The open room that a STATUS belongs to. One of a room that began before the agent looked opens (and
    /// mostly closes) it; any other of an unknown room is none of ours.
    fn room_for_status(&mut self, seen: &Seen<'_>, m: &Status<'_>, out: &mut Vec<Event>) -> Option<u32> {
        if let Some(slot) = self.numbers.open(m.room) {
            return Some(slot);
        }
        if self.is_late_for(m.room, seen.at) {
            self.tally.turned_away.late += 1;
            return None;
        }
        // The connection for STATUS is opened with the first one, so its age says nothing.
        let young = self.started.is_none_or(|s| seen.at.since(s) < self.config.reach());
        if !young && !maybe_older(seen, self.config.reach()) {
            self.tally.turned_away.orphans += 1;
            return None;
        }
        let life = next_life(self.numbers.tomb(m.room));
        let slot = self.open_room(m.room, life, seen.at, (NONE, seen.target), out)?;
        let (backend, releases) = self.learn_backend(seen, NONE);
        let room = self.rooms.get_mut(slot)?;
        room.completeness = Completeness::Preexisting;
        (room.backend, room.releases) = (backend, releases);
        Some(slot)
    }

    /// The link that a terminal STATUS is about; made if METADATA of a preexisting room was not seen.
    fn match_status(
        &mut self,
        slot: u32,
        seen: &Seen<'_>,
        m: &Status<'_>,
        origin: EndpointId,
    ) -> Option<usize> {
        let tgid = seen.connection.task.filter(|_| seen.direction == Direction::Sent).map(|t| t.tgid);
        let from = match seen.direction {
            Direction::Sent => seen.connection.addresses.local.ip(),
            Direction::Received => seen.connection.addresses.peer.ip(),
        };
        let peers = &self.peers;
        let room = self.rooms.get_mut(slot)?;
        let unsaid = |l: &Link| match seen.role {
            Role::Prefill => l.told.is_none(),
            Role::Decode => l.heard.is_none(),
        };
        // Mori up to 0.5.19 tells every endpoint whose METADATA it has, and so do its dummies
        // (`notify_decode_status`, `mori/conn.py`): such a STATUS must not be put down to the rank that owes one.
        let dummies = seen.backend == Backend::Mori;
        let here = |l: &Link| l.decode == seen.target && unsaid(l) && (dummies || l.owes());
        let fits = |l: &Link| here(l) && (l.rank.is_none() || l.rank == m.prefill_rank);
        let of = |l: &Link| peers.get(l.prefill);
        let by_rank = |l: &Link| here(l) && l.rank.is_some() && l.rank == m.prefill_rank;
        let by_origin = |l: &Link| here(l) && l.prefill == origin && origin != NONE;
        let by_process =
            |l: &Link| here(l) && tgid.is_some() && of(l).and_then(|e| e.task).map(|t| t.tgid) == tgid;
        let by_number =
            |l: &Link| fits(l) && m.prefill_rank.is_some() && of(l).and_then(|e| e.rank) == m.prefill_rank;
        let by_host = |l: &Link| fits(l) && of(l).is_some_and(|e| e.address.ip() == from);
        let links = &mut room.links;
        let sure = links.iter().position(by_process).or_else(|| links.iter().position(by_origin));
        let named = links.iter().position(by_rank);
        if let (Some(s), Some(n)) = (sure, named)
            && s != n
            && links.get(n).is_some_and(|l| l.guessed)
        {
            unguess(links, s, n);
            return Some(s);
        }
        if let Some(i) = named.or(sure).or_else(|| links.iter().position(by_number)) {
            return Some(i);
        }
        let find = |fit: &dyn Fn(&Link) -> bool| {
            let owing = links.iter().position(|l| l.owes() && fit(l));
            owing.or_else(|| links.iter().position(fit))
        };
        let found = find(&by_host).or_else(|| find(&fits));
        if let Some(i) = found {
            let several = links.iter().filter(|l| fits(l)).count() > 1;
            let one_host = links.iter().filter(|l| by_host(l)).count() != 1;
            if let Some(l) = links.get_mut(i) {
                l.guessed |= several && one_host;
            }
            return Some(i);
        }
        if room.links.iter().any(|l| l.decode == seen.target && l.owes()) {
            return None;
        }
        // Decode named another address than the one it is reached at (address translation).
        if let Some(i) = room.links.iter().position(|l| unsaid(l) && l.owes()) {
            return Some(i);
        }
        let unknown = room.completeness != Completeness::Full && room.links.len() < MAX_LINKS;
        unknown.then(|| {
            room.links.push(Link {
                decode: seen.target,
                prefill: origin,
                rank: m.prefill_rank,
                ..Link::unasked()
            });
            room.links.len() - 1
        })
    }
}

/// What was heard was put down to link `wrong`, and turns out to be link `right`'s.
fn unguess(links: &mut [Link], right: usize, wrong: usize) {
    let Some(w) = links.get_mut(wrong) else { return };
    let (heard, rank) = (w.heard, w.rank);
    let Some(r) = links.get_mut(right) else { return };
    let (old_heard, old_rank) =
        (std::mem::replace(&mut r.heard, heard), std::mem::replace(&mut r.rank, rank));
    r.guessed = false;
    if let Some(w) = links.get_mut(wrong) {
        (w.heard, w.rank) = (old_heard, old_rank);
        w.guessed = old_heard.is_some();
    }
}
