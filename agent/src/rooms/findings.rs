//! Findings: what is wrong with an engine as a whole, and the rooms that one cause pins, as one thing.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: at most [`MAX_FINDINGS`] are open, those without pinned rooms
//! (`RoomTable::raise`) in a quarter of the places, so that they never crowd a cause of pins out; more are counted. A
//! pin costs a few look-ups here, however many rooms share its cause; words are made only when a finding is told or read.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use hashbrown::HashMap;

use crate::event::Mono;
use crate::rooms::model::{FindingEvent, Role};
use crate::rooms::peers::EndpointId;
use crate::rooms::room::Room;
use crate::rooms::table::RoomTable;
use crate::sglang::message::{Backend, Releases};
use crate::verdict::actions;
use crate::verdict::model::{Class, Confidence, Finding, Party, Verdict};

/// Findings open at a time.
pub const MAX_FINDINGS: usize = 1024;
/// Of these, findings that were raised without a pinned room.
pub const MAX_RAISED: usize = MAX_FINDINGS / 4;
/// Findings that are over and still kept.
pub const MAX_CLOSED: usize = 64;
/// Rooms that a finding lists.
pub const MAX_ROOMS: usize = 100;
/// Sentences of evidence that a finding keeps.
const MAX_EVIDENCE: usize = 32;
/// Actions that a finding keeps.
const MAX_ACTIONS: usize = 16;
/// Events that wait to be fetched; whoever drives the table fetches them after every turn.
const MAX_EVENTS: usize = 4096;

/// Names a cause by what it consists of: the same on every run and after a restart.
pub(crate) fn cause(parts: &[&str]) -> u64 {
    // FNV-1a, 64 bits, as for the causes of pinned rooms.
    let byte = |hash: u64, b: &u8| (hash ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3);
    parts
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, part| byte(part.as_bytes().iter().fold(hash, byte), &b'|'))
}

/// Open findings with the same labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FindingGauge {
    /// Class.
    pub class: Class,
    /// How sure.
    pub confidence: Confidence,
    /// Role of the engine that it is about; `None`: not known, or neither engine.
    pub role: Option<Role>,
    /// How many.
    pub findings: u64,
}

/// The rooms that one cause pins.
#[derive(Debug)]
struct Cause {
    class: Class,
    /// When each was first seen, and where it lives: oldest first.
    rooms: BTreeSet<(Mono, u32)>,
    /// How many of them are how sure.
    sure: [u32; 3],
    /// Rooms that it pins or has pinned: the first of them, and how many.
    seen: Vec<u64>,
    total: u32,
    /// There is no place for its finding.
    turned_away: bool,
}

impl Cause {
    const fn new(class: Class) -> Self {
        Self { class, rooms: BTreeSet::new(), sure: [0; 3], seen: Vec::new(), total: 0, turned_away: false }
    }

    fn count(&mut self, confidence: Confidence, more: bool) {
        if let Some(n) = self.sure.get_mut(confidence as usize) {
            *n = if more { n.saturating_add(1) } else { n.saturating_sub(1) };
        }
    }

    fn join(&mut self, number: u64, key: (Mono, u32), confidence: Confidence) {
        if self.rooms.insert(key) && !self.seen.contains(&number) {
            self.total = self.total.saturating_add(1);
            if self.seen.len() < MAX_ROOMS {
                self.seen.push(number);
            }
        }
        self.count(confidence, true);
    }

    fn leave(&mut self, key: (Mono, u32), confidence: Confidence) {
        self.rooms.remove(&key);
        self.count(confidence, false);
    }

    /// That of its surest room.
    fn confidence(&self) -> Option<Confidence> {
        [Confidence::Certain, Confidence::Likely, Confidence::Possible]
            .into_iter()
            .find(|c| self.sure.get(*c as usize).is_some_and(|n| *n > 0))
    }
}

/// All findings of a table.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    /// What pins rooms, by group.
    causes: HashMap<u64, Cause>,
    /// What was raised apart from rooms, by group.
    raised: HashMap<u64, Finding>,
    /// What others were told is open, as they were told it.
    told: HashMap<u64, Arc<Finding>>,
    closed: VecDeque<Arc<Finding>>,
    /// Not fetched yet.
    events: Vec<FindingEvent>,
    /// Causes for which there is no place.
    waiting: usize,
    /// Findings that found no place, and events that nobody fetched.
    turned_away: u64,
}

impl Findings {
    /// Rooms that this cause pins.
    pub(crate) fn group_size(&self, group: u64) -> Option<u32> {
        self.causes.get(&group).map(|c| u32::try_from(c.rooms.len()).unwrap_or(u32::MAX))
    }

    /// Whether this cause pins rooms, and none of them more surely than by silence.
    pub(crate) fn is_only_possible(&self, group: u64) -> bool {
        self.causes.get(&group).and_then(Cause::confidence) == Some(Confidence::Possible)
    }

    /// What is to be told of a group.
    fn state(&self, group: u64) -> Option<(Class, Confidence)> {
        let cause = self.causes.get(&group).and_then(|c| Some((c.class, c.confidence()?)));
        match (self.raised.get(&group), cause) {
            (Some(r), Some((_, confidence))) => Some((r.class, r.confidence.max(confidence))),
            (Some(r), None) => Some((r.class, r.confidence)),
            (None, cause) => cause,
        }
    }

    fn event(&mut self, event: FindingEvent) {
        if self.events.len() < MAX_EVENTS {
            self.events.push(event);
        } else {
            self.turned_away = self.turned_away.saturating_add(1);
        }
    }

    /// Whether there is a place; one that is not found is counted, once for each cause of pins.
    fn place(&mut self, group: u64) -> bool {
        if self.told.contains_key(&group) {
            return true;
        }
        let free = self.told.len() < MAX_FINDINGS;
        let counted = match self.causes.get_mut(&group) {
            Some(cause) => {
                let counted = std::mem::replace(&mut cause.turned_away, !free);
                match (counted, free) {
                    (false, false) => self.waiting += 1,
                    (true, true) => self.waiting = self.waiting.saturating_sub(1),
                    _ => {}
                }
                counted
            }
            None => false,
        };
        if !free && !counted {
            self.turned_away = self.turned_away.saturating_add(1);
        }
        free
    }

    /// Ends what was told of a group. Its rooms are then those that it has had.
    fn close(&mut self, group: u64, ended: Option<Cause>, at: Mono) {
        let Some(mut told) = self.told.remove(&group) else { return };
        let finding = Arc::make_mut(&mut told);
        if let Some(cause) = ended {
            (finding.rooms, finding.room_count) = (cause.seen, cause.total);
        }
        finding.closed_at = Some(at);
        if self.closed.len() >= MAX_CLOSED {
            self.closed.pop_front();
        }
        self.closed.push_back(Arc::clone(&told));
        self.event(FindingEvent::Closed(told));
    }
}

impl RoomTable {
    /// Opens a finding about an engine, or brings an open one of the same group up to date. Told to others when it opens, or
    /// when its class or confidence changes; it keeps the moment since when it holds. One of the same group as pinned
    /// rooms takes the place of theirs and lists them. Without actions it gets those of its class.
    pub(crate) fn raise(&mut self, mut finding: Finding) {
        let group = finding.group;
        finding.closed_at = None;
        finding.rooms.truncate(MAX_ROOMS);
        finding.evidence.truncate(MAX_EVIDENCE);
        if finding.actions.is_empty() {
            finding.actions = actions::of_finding(finding.class, &finding.engine);
        }
        finding.actions.truncate(MAX_ACTIONS);
        let raised = &mut self.findings.raised;
        if let Some(old) = raised.get(&group) {
            finding.since = finding.since.min(old.since);
        } else if raised.len() >= MAX_RAISED {
            self.findings.turned_away = self.findings.turned_away.saturating_add(1);
            return;
        }
        raised.insert(group, finding);
        self.tell_of(group, self.now);
        match self.finding(group) {
            Some(now) if self.findings.told.contains_key(&group) => {
                // Not told again, but what is over is to be told as it last was.
                self.findings.told.insert(group, Arc::new(now));
            }
            _ => {
                self.findings.raised.remove(&group);
            }
        }
    }

    /// Ends the finding of this group, if it is open.
    pub(crate) fn lower(&mut self, group: u64, at: Mono) {
        if self.findings.raised.remove(&group).is_some() {
            self.tell_of(group, at);
        }
    }

    /// Moves a room from one cause to another: `None`, it is not pinned. Its verdict is to be the new one already.
    pub(crate) fn regroup(
        &mut self,
        slot: u32,
        from: Option<(u64, Confidence)>,
        to: Option<(u64, Class, Confidence)>,
        at: Mono,
    ) {
        let Some(room) = self.rooms.get(slot) else { return };
        let (number, key) = (room.room, (room.opened_at, slot));
        if to.is_some() {
            self.pinned.insert(slot);
        } else {
            self.pinned.remove(&slot);
        }
        let target = to.map(|(group, _, confidence)| (group, confidence));
        if from == target {
            if self.findings.waiting > 0
                && let Some((group, _)) = target
            {
                self.tell_of(group, at);
            }
            return;
        }
        if let Some((group, class, confidence)) = to {
            let cause = self.findings.causes.entry(group).or_insert_with(|| Cause::new(class));
            cause.join(number, key, confidence);
        }
        if let Some((group, confidence)) = from
            && let Some(cause) = self.findings.causes.get_mut(&group)
        {
            if target.is_some_and(|(to, _)| to == group) {
                cause.count(confidence, false);
            } else {
                cause.leave(key, confidence);
                self.tell_of(group, at);
            }
        }
        if let Some((group, _)) = target {
            self.tell_of(group, at);
        }
    }

    /// Takes the causes of rooms that were taken over as told: a restart is no news.
    pub(crate) fn regroup_restored(&mut self) {
        let pinned: Vec<u32> =
            self.rooms.iter().filter(|r| r.pinned()).filter_map(|r| self.numbers.open(r.room)).collect();
        for slot in pinned {
            let Some(j) = self.rooms.get(slot).and_then(|r| r.judgement.as_deref()) else { continue };
            let to = (j.group, j.class, j.confidence);
            self.regroup(slot, None, Some(to), self.now);
        }
        self.forget_finding_events();
    }

    /// What has happened to findings is known to others already.
    pub(crate) fn forget_finding_events(&mut self) {
        self.findings.events.clear();
    }

    /// Tells what has become of a group since others last heard of it.
    fn tell_of(&mut self, group: u64, at: Mono) {
        let told = self.findings.told.get(&group).map(|f| (f.class, f.confidence));
        let state = self.findings.state(group);
        let ended = match self.findings.causes.get(&group) {
            Some(cause) if cause.rooms.is_empty() => self.findings.causes.remove(&group),
            _ => None,
        };
        if ended.as_ref().is_some_and(|c| c.turned_away) {
            self.findings.waiting = self.findings.waiting.saturating_sub(1);
        }
        if state.is_none() {
            return self.findings.close(group, ended, at);
        }
        if told == state || !self.findings.place(group) {
            return;
        }
        let Some(finding) = self.finding(group) else { return };
        let finding = Arc::new(finding);
        self.findings.told.insert(group, Arc::clone(&finding));
        self.findings.event(FindingEvent::Opened(finding));
    }

    /// A finding as it is now.
    fn finding(&self, group: u64) -> Option<Finding> {
        let (class, confidence) = self.findings.state(group)?;
        let cause = self.findings.causes.get(&group);
        let rooms = cause.into_iter().flat_map(|c| &c.rooms).take(MAX_ROOMS);
        let rooms: Vec<&Room> = rooms.filter_map(|(_, slot)| self.rooms.get(*slot)).collect();
        let mut finding = match self.findings.raised.get(&group) {
            Some(raised) => raised.clone(),
            None => self.finding_of_rooms(group, &rooms)?,
        };
        if let Some(cause) = cause {
            finding.rooms = rooms.iter().map(|r| r.room).collect();
            finding.room_count = u32::try_from(cause.rooms.len()).unwrap_or(u32::MAX);
        }
        (finding.class, finding.confidence) = (class, confidence);
        (finding.engine.backend, finding.engine.releases) = self.software_of(&finding.engine, &rooms);
        // Other rooms come and go: it keeps the moment that it was told with.
        finding.since = self.findings.told.get(&group).map_or(finding.since, |t| t.since);
        Some(finding)
    }

    /// Back end and release of the engine that a finding is about: of its rooms, else of the rooms that its ranks have had;
    /// what it says of its release itself counts for more.
    fn software_of(&self, engine: &Party, rooms: &[&Room]) -> (Option<Backend>, Option<Releases>) {
        let tgid = engine.task.filter(|_| engine.local == Some(true)).map(|t| t.tgid);
        let server = tgid.and_then(|t| self.server_of(t));
        let said = server.and_then(|s| self.release_of(s)).map(|r| Releases { min: r, max: r });
        let own = |id: EndpointId| {
            let Some(e) = self.peers.get(id) else { return false };
            let same = e.task.and_then(|t| self.server_of(t.tgid)).is_some_and(|s| Some(s) == server);
            Some(e.address) == engine.endpoint || same
        };
        let shown = if let Some(room) = rooms.first() {
            (room.backend, room.releases)
        } else {
            let pair = self.peers.pairs().find(|p| p.backend.is_some() && (own(p.prefill) || own(p.decode)));
            pair.map_or((None, None), |p| (p.backend, p.releases))
        };
        (shown.0, said.or(shown.1))
    }

    /// What the surest of the rooms, the oldest of several, says of what pins them all.
    fn finding_of_rooms(&self, group: u64, rooms: &[&Room]) -> Option<Finding> {
        let surest =
            rooms.iter().rev().max_by_key(|r| r.judgement.as_ref().map(|j| j.confidence)).copied()?;
        let Verdict { class, confidence, owed_by, act_on, evidence, actions, .. } =
            self.verdict_of(surest, &[], &[], self.now)?;
        let since = rooms.iter().filter_map(|r| r.judgement.as_ref()).map(|j| j.since).min()?;
        let engine = owed_by.or(act_on.clone());
        let rooms_now = self.findings.group_size(group).unwrap_or(1);
        let actions = match (&engine, &act_on) {
            (Some(owes), act) if rooms_now > 1 => {
                actions::of_cause(class, confidence, owes, act.as_ref().unwrap_or(owes), rooms_now)
            }
            _ => {
                let mut of_room = actions;
                let rid = surest.request.as_deref().and_then(|r| r.rid.as_deref());
                actions::name(&mut of_room, rid);
                of_room
            }
        };
        let nobody = Party::default();
        let evidence = evidence.into_iter().take(MAX_EVIDENCE);
        Some(Finding {
            group,
            class,
            confidence,
            engine: engine.unwrap_or(nobody),
            rooms: Vec::new(),
            room_count: 0,
            since,
            closed_at: None,
            // Moments in it are those of that room.
            evidence: evidence.map(|line| format!("room {}: {line}", surest.room)).collect(),
            actions,
        })
    }

    /// What happened to findings since the last call, in order. An open one is told again, with the same group and
    /// `since`, when its class or confidence changes.
    pub fn finding_events(&mut self) -> std::vec::Drain<'_, FindingEvent> {
        self.findings.events.drain(..)
    }

    /// Whether anything has happened to findings since they were last taken.
    pub(crate) const fn has_finding_events(&self) -> bool {
        !self.findings.events.is_empty()
    }

    /// Open findings, oldest first, as they are now.
    pub fn findings(&self) -> Vec<Finding> {
        self.first_findings(usize::MAX)
    }

    /// The first `limit` of them. Words are made of those alone.
    pub fn first_findings(&self, limit: usize) -> Vec<Finding> {
        let mut open: Vec<(Mono, u64)> =
            self.findings.told.iter().map(|(group, f)| (f.since, *group)).collect();
        open.sort_unstable();
        open.iter().take(limit).filter_map(|(_, group)| self.finding(*group)).collect()
    }

    /// How many are open.
    pub fn finding_count(&self) -> usize {
        self.findings.told.len()
    }

    /// The open finding of this group.
    pub fn finding_of(&self, group: u64) -> Option<Finding> {
        self.findings.told.contains_key(&group).then(|| self.finding(group)).flatten()
    }

    /// The last findings that are over, in the order of their ends.
    pub fn closed_findings(&self) -> impl Iterator<Item = &Finding> {
        self.findings.closed.iter().map(|f| &**f)
    }

    /// How many findings are open, by labels. Costs a walk over the open ones and makes no words.
    pub fn finding_gauges(&self) -> Vec<FindingGauge> {
        let mut gauges: Vec<FindingGauge> = Vec::new();
        for f in self.findings.told.values() {
            let key = (f.class, f.confidence, f.engine.role);
            match gauges.iter_mut().find(|g| (g.class, g.confidence, g.role) == key) {
                Some(g) => g.findings += 1,
                None => gauges.push(FindingGauge {
                    class: f.class,
                    confidence: f.confidence,
                    role: f.engine.role,
                    findings: 1,
                }),
            }
        }
        gauges.sort_by_key(|g| (g.class, g.confidence, g.role.map(|r| r == Role::Decode)));
        gauges
    }

    /// Findings that found no place, events that nobody fetched, and what was not measured for one
    /// because a table was full.
    pub const fn findings_turned_away(&self) -> u64 {
        self.findings.turned_away.saturating_add(self.rates.turned_away)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
    use super::*;
    use crate::event::SECOND;
    use crate::rooms::Config;

    fn table() -> RoomTable {
        let mut table = RoomTable::new(Config::default());
        table.tick(Mono(100 * SECOND), &mut Vec::new());
        table
    }

    fn finding(group: u64, class: Class) -> Finding {
        Finding {
            group,
            class,
            confidence: Confidence::Possible,
            engine: Party { role: Some(Role::Prefill), ..Party::default() },
            rooms: Vec::new(),
            room_count: 0,
            since: Mono(90 * SECOND),
            closed_at: None,
            evidence: vec!["a fact".to_owned()],
            actions: Vec::new(),
        }
    }

    fn told(table: &mut RoomTable) -> Vec<(&'static str, u64, Class, Confidence)> {
        let told = |e: FindingEvent| (e.name(), e.finding().group, e.finding().class, e.finding().confidence);
        table.finding_events().map(told).collect()
    }

    #[test]
    fn one_raised_again_is_told_again_only_when_class_or_confidence_changes() {
        let mut t = table();
        t.raise(finding(1, Class::ThreadDied));
        let mut again = finding(1, Class::ThreadDied);
        (again.since, again.evidence) = (Mono(99 * SECOND), vec!["another fact".to_owned()]);
        t.raise(again.clone());
        let open = t.findings();
        assert_eq!((open.len(), open[0].since), (1, Mono(90 * SECOND)), "it keeps its moment");
        assert_eq!(open[0].evidence, ["another fact"], "and has what is known now");
        assert!(!open[0].actions.is_empty(), "those of its class");
        again.confidence = Confidence::Certain;
        t.raise(again);
        t.lower(1, Mono(101 * SECOND));
        t.lower(1, Mono(102 * SECOND));
        assert_eq!(
            told(&mut t),
            [
                ("finding_opened", 1, Class::ThreadDied, Confidence::Possible),
                ("finding_opened", 1, Class::ThreadDied, Confidence::Certain),
                ("finding_closed", 1, Class::ThreadDied, Confidence::Certain),
            ]
        );
        assert_eq!(t.findings(), []);
        let closed: Vec<_> = t.closed_findings().collect();
        assert_eq!((closed.len(), closed[0].closed_at), (1, Some(Mono(101 * SECOND))));
        assert_eq!(closed[0].evidence, ["another fact"], "as it was last known");
    }

    #[test]
    fn those_without_rooms_have_a_quarter_of_the_places() {
        let mut t = table();
        for n in 0..MAX_FINDINGS as u64 {
            t.raise(finding(n, Class::EnginePaused));
        }
        assert_eq!(t.finding_count(), MAX_RAISED);
        assert_eq!(t.findings_turned_away(), (MAX_FINDINGS - MAX_RAISED) as u64);
        // One that is open is brought up to date all the same, and a free place is taken.
        t.raise(Finding { confidence: Confidence::Likely, ..finding(0, Class::EnginePaused) });
        assert_eq!(t.finding_of(0).unwrap().confidence, Confidence::Likely);
        t.lower(5, Mono(101 * SECOND));
        t.raise(finding(MAX_FINDINGS as u64, Class::EnginePaused));
        assert_eq!(t.finding_count(), MAX_RAISED);
        assert!(t.finding_of(MAX_FINDINGS as u64).is_some());
    }

    #[test]
    fn nothing_grows_where_nobody_listens() {
        let mut t = table();
        for n in 0..10_000 {
            t.raise(finding(n, Class::EnginePaused));
            t.lower(n, Mono(101 * SECOND));
        }
        assert_eq!(t.finding_events().count(), MAX_EVENTS);
        assert_eq!(t.closed_findings().count(), MAX_CLOSED);
        assert_eq!(t.findings_turned_away(), 20_000 - MAX_EVENTS as u64);
    }

    #[test]
    fn lists_are_bounded_whoever_raises_it() {
        let mut t = table();
        let mut long = finding(1, Class::LocalGhost);
        long.rooms = (0..1000).collect();
        long.room_count = 1000;
        long.evidence = vec!["fact".to_owned(); 1000];
        t.raise(long);
        let f = &t.findings()[0];
        assert_eq!((f.rooms.len(), f.room_count, f.evidence.len()), (MAX_ROOMS, 1000, MAX_EVIDENCE));
    }

    #[test]
    fn causes_of_other_parts_are_others() {
        assert_eq!(cause(&["a", "b"]), cause(&["a", "b"]));
        assert_ne!(cause(&["a", "b"]), cause(&["ab"]));
        assert_ne!(cause(&["a", "b"]), cause(&["b", "a"]));
    }
}
