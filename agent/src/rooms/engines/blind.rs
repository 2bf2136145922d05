//! Engines of which nothing can be read: they run, and the agent is blind to them. Said, so that silence is not taken for
//! health.

use crate::event::{Mono, SECOND};
use crate::rooms::connections::Carried;
use crate::rooms::model::{Connection, Event, Unreadable};
use crate::rooms::table::RoomTable;
use crate::verdict::model::{Action, Class, Confidence, Finding};

/// What a finding of this module is about; part of what names it.
pub(super) const ABOUT: &str = "nothing_readable";

/// An engine is given so long to be heard.
const PATIENCE: u64 = 60 * SECOND;

/// What could be read of an engine.
#[derive(Debug, Default)]
pub(crate) struct Sight {
    /// Something was read.
    pub(super) heard: bool,
    /// Connections that could not be, by cause.
    unreadable: [u64; Unreadable::ALL.len()],
}

impl RoomTable {
    /// A connection that cannot be read.
    pub(crate) fn unreadable(
        &mut self,
        _at: Mono,
        connection: &Connection,
        why: Unreadable,
        _out: &mut Vec<Event>,
    ) {
        self.requests_unreadable(connection);
        let place = Unreadable::ALL.iter().position(|u| *u == why).unwrap_or_default();
        if let Some(last) = self.engines.unreadable.get_mut(place) {
            *last = Some(*connection);
        }
        let Some(engine) = connection.task.and_then(|t| self.engines.engine_of(t.tgid)) else { return };
        if let Some(n) = engine.sight.unreadable.get_mut(place) {
            *n = n.saturating_add(1);
        }
    }

    /// Raises and lowers findings about engines of which nothing can be read.
    pub(super) fn look_for_blindness(&mut self, now: Mono) {
        let doubtful: Vec<u32> = self
            .engines
            .servers()
            .filter(|(_, e)| !e.sight.heard && e.since.is_some_and(|since| now.since(since) >= PATIENCE))
            .map(|(server, _)| server)
            .collect();
        for server in doubtful {
            if self.messages_of(server) {
                self.seen(server);
            } else if let Some(finding) = self.blindness(server) {
                self.raise(finding);
            }
        }
        // Those that have been heard meanwhile.
        let heard: Vec<u32> = self.engines.servers().filter(|(_, e)| e.sight.heard).map(|(s, _)| s).collect();
        for server in heard {
            let group = self.group_of(ABOUT, server);
            self.lower(group, now);
        }
    }

    fn seen(&mut self, server: u32) {
        if let Some(engine) = self.engines.server_mut(server) {
            engine.sight.heard = true;
        }
    }

    /// Whether a message of this engine was ever read, on a connection that is still known.
    fn messages_of(&self, server: u32) -> bool {
        let of = |c: &Connection| c.task.is_some_and(|t| self.server_of(t.tgid) == Some(server));
        self.connections.iter().any(|k| k.carried != Carried::Nothing && of(&k.connection))
    }

    fn blindness(&self, server: u32) -> Option<Finding> {
        let engine = self.engines.server(server)?;
        // One that may turn out to be readable excludes nothing.
        if engine.counts.open.iter().any(|(_, readable)| *readable) {
            return None;
        }
        let causes: Vec<(Unreadable, u64)> =
            Unreadable::ALL.into_iter().zip(engine.sight.unreadable).collect();
        let of =
            |is: fn(Unreadable) -> bool| causes.iter().filter(|(u, _)| is(*u)).map(|(_, n)| *n).sum::<u64>();
        let named = of(|u| u != Unreadable::Other);
        let ranks = of(|u| matches!(u, Unreadable::ZmtpMechanism | Unreadable::ZmtpVersion));
        let works = engine.counts.works();
        // An engine without a role hands nothing over, so that there is nothing to read.
        if self.role_of_process(server).is_none() && ranks == 0 {
            return None;
        }
        if named == 0 && !(works && engine.counts.open_known) {
            return None;
        }
        let mut evidence = vec![cause_line(&causes, self.engines.mptcp)];
        if works {
            evidence
                .push("by its own count it has requests, and not one message of them was seen".to_owned());
        }
        evidence.push(
            "rooms of this engine are not seen from this host: that none is pinned here says nothing"
                .to_owned(),
        );
        Some(Finding {
            group: self.group_of(ABOUT, server),
            class: Class::NothingReadable,
            confidence: if works { Confidence::Likely } else { Confidence::Possible },
            engine: self.engine_party(server),
            rooms: Vec::new(),
            room_count: 0,
            since: engine.since?,
            closed_at: None,
            evidence,
            actions: vec![Action {
                command: format!("ss -tnp | grep -F 'pid={server},'"),
                effect: "lists the connections of the engine's HTTP server; docs/limits.md says what each cause means and \
                         what helps"
                    .to_owned(),
                blast_radius: "none".to_owned(),
                clears: false,
            }],
        })
    }
}

fn cause_line(causes: &[(Unreadable, u64)], mptcp: u64) -> String {
    let seen: u64 = causes.iter().map(|(_, n)| *n).sum();
    let mut named: Vec<String> =
        causes.iter().filter(|(_, n)| *n > 0).map(|(u, n)| format!("{n} {}", u.label())).collect();
    if mptcp > 0 {
        named.push(format!("{mptcp} mptcp on this host"));
    }
    if seen == 0 && mptcp == 0 {
        return "no open connection of this engine is known that could be read".to_owned();
    }
    format!("{seen} connections of this engine were seen and none could be read: {}", named.join(", "))
}
