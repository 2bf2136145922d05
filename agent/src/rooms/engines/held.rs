//! Requests that decode counts in its transfer queue although every STATUS of its rooms has come (M15, M19).
//!
//! Conservative, as `gauges`: every room of this host that is open at decode, and not known to be of another engine, explains
//! one, and a count that has fallen within its time says nothing. So a busy engine says nothing here.

use crate::event::{Mono, SECOND};
use crate::rooms::engines::gauges::{STEADY, look_again, url};
use crate::rooms::model::{EngineGauges, Role};
use crate::rooms::room::Room;
use crate::rooms::table::RoomTable;
use crate::verdict::model::{Action, Class, Confidence, Finding};

/// What a finding of this module is about; part of what names it.
pub(super) const ABOUT: &str = "held_at_decode";

impl RoomTable {
    /// Requests in decode's transfer queue that no room known here explains.
    pub(super) fn held_at_decode(&self, gauges: &EngineGauges) -> u64 {
        let Some(counted) = gauges.inflight.filter(|n| *n > 0 && !gauges.stale) else { return 0 };
        let other = |server: u32| server != gauges.server;
        let rank = |id| self.peers.get(id).and_then(|e| self.server_of(e.task?.tgid)).is_some_and(other);
        // A rank that nothing was sent to is not known by its process; the engine that got the request is.
        let asked =
            |r: &Room| r.leg(Role::Decode).and_then(|l| self.engines.get(l.engine)?.pid).is_some_and(other);
        let open = |r: &&Room| {
            let mut ranks = r.links.iter().map(|l| l.decode).chain([r.home.1]);
            let elsewhere = ranks.any(rank) || asked(r);
            r.has_decode && r.progress(Role::Decode).terminal.is_none() && !elsewhere
        };
        counted.saturating_sub(self.rooms.iter().filter(open).count() as u64)
    }

    /// Raises or lowers the finding about requests that wait for what has come.
    pub(super) fn judge_held(&mut self, at: Mono, server: u32) {
        let group = self.group_of(ABOUT, server);
        match self.held_finding(at, server, group) {
            Some(finding) => self.raise(finding),
            None => self.lower(group, at),
        }
    }

    fn held_finding(&self, at: Mono, server: u32, group: u64) -> Option<Finding> {
        let (gauges, since, least) = self.engines.server(server)?.counts.grown()?;
        // Of an engine whose messages are read, and whose rooms conclude.
        let own = |id| self.peers.get(id).and_then(|e| self.server_of(e.task?.tgid)) == Some(server);
        let read = self.peers.pairs().any(|p| p.concluded > 0 && own(p.decode));
        if at.since(since) < STEADY || !read {
            return None;
        }
        Some(Finding {
            group,
            class: Class::ConcludedButHeld,
            // Rooms of ranks whose messages cannot be read are counted as well.
            confidence: Confidence::Possible,
            engine: self.engine_party(server),
            rooms: Vec::new(),
            room_count: 0,
            since,
            closed_at: None,
            evidence: vec![
                format!(
                    "decode counts {} requests that wait for their KV (decode_transfer_queue_reqs), {least} of which no room \
                     known here explains; the count has not fallen for {} s",
                    gauges.inflight.unwrap_or(0),
                    at.since(since) / SECOND
                ),
                "every STATUS of the rooms known here has come: either the aux data of a room never came (M15), or its \
                 status thread takes nothing in (M19), or the room's messages were not seen"
                    .to_owned(),
            ],
            actions: vec![
                look_again(gauges),
                Action {
                    command: "grep -F 'Context corruption detected' DECODE_LOG".to_owned(),
                    effect: "shows rooms whose aux data was another's (from 0.5.9)".to_owned(),
                    blast_radius: "none".to_owned(),
                    clears: false,
                },
                Action {
                    command: format!(
                        "curl -sS -X POST {}/abort_request -H 'Content-Type: application/json' -d '{{\"abort_all\":true}}'",
                        url(gauges)
                    ),
                    effect: "ends every request of that engine, those in its transfer queue included".to_owned(),
                    blast_radius: "every running and queued request of that engine".to_owned(),
                    clears: true,
                },
            ],
        })
    }
}
