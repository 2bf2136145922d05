//! What `top` shows and how keys change it.
//!
//! Pure: no terminal, no clock (time since the start is an argument), no network. What others must do for a key is its [`Act`].

use std::cmp::Ordering;
use std::time::Duration;

use super::picture::{Answers, Key, Picture, Row, Stand};

/// Longest text to search for.
const SEARCH_MAX: usize = 64;

/// A key, as far as it means something here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Press {
    Char(char),
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    Enter,
    Tab,
    BackTab,
    Escape,
    Backspace,
    /// Ctrl-C, Ctrl-D.
    Break,
    /// Ctrl-L.
    Redraw,
}

/// What a key asks of whoever owns terminal and network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Nothing,
    Quit,
    /// Draw everything again: something else wrote on the terminal.
    Redraw,
    /// Ask for this room; incarnation `None`: the newest.
    Explain(String, Option<u64>),
}

/// Which page is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Rooms,
    Findings,
    Peers,
    Agent,
}

impl View {
    pub(super) const ALL: [Self; 4] = [Self::Rooms, Self::Findings, Self::Peers, Self::Agent];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Rooms => "rooms",
            Self::Findings => "findings",
            Self::Peers => "peers",
            Self::Agent => "agent",
        }
    }

    fn next(self, step: usize) -> Self {
        let at = Self::ALL.iter().position(|v| *v == self).unwrap_or_default();
        Self::ALL.get((at + step) % Self::ALL.len()).copied().unwrap_or(self)
    }
}

/// Order of the rooms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    /// Pinned and surest first, then the oldest.
    Urgency,
    Age,
    Verdict,
    Owes,
    Room,
}

impl Sort {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Urgency => "urgency",
            Self::Age => "age",
            Self::Verdict => "verdict",
            Self::Owes => "who owes",
            Self::Room => "room",
        }
    }

    const fn next(self) -> Self {
        match self {
            Self::Urgency => Self::Age,
            Self::Age => Self::Verdict,
            Self::Verdict => Self::Owes,
            Self::Owes => Self::Room,
            Self::Room => Self::Urgency,
        }
    }

    fn compare(self, a: &Row, b: &Row) -> Ordering {
        let older = || b.age.unwrap_or(-1.0).total_cmp(&a.age.unwrap_or(-1.0));
        let urgency = || a.stand.cmp(&b.stand).then_with(older);
        match self {
            Self::Urgency => urgency(),
            Self::Age => older(),
            // Without a verdict comes last.
            Self::Verdict => {
                (a.class.is_empty(), &a.class).cmp(&(b.class.is_empty(), &b.class)).then_with(urgency)
            }
            Self::Owes => {
                let owes = |r: &Row| (r.owes.len() < 2, r.owes.first().cloned());
                owes(a).cmp(&owes(b)).then_with(urgency)
            }
            Self::Room => Ordering::Equal,
        }
        .then_with(|| number(&a.key).cmp(&number(&b.key)))
    }
}

/// Room numbers are text; as numbers they are in order once the longer is the larger.
const fn number(key: &Key) -> (usize, &String, u64) {
    (key.0.len(), &key.0, key.1)
}

/// Which rooms are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Only {
    All,
    Pinned,
    /// Pinned, and not merely possible: what pages.
    Sure,
    Overdue,
}

impl Only {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Pinned => "pinned",
            Self::Sure => "pinned likely or certain",
            Self::Overdue => "overdue, not pinned",
        }
    }

    const fn next(self) -> Self {
        match self {
            Self::All => Self::Pinned,
            Self::Pinned => Self::Sure,
            Self::Sure => Self::Overdue,
            Self::Overdue => Self::All,
        }
    }

    const fn takes(self, stand: Stand) -> bool {
        match self {
            Self::All => true,
            Self::Pinned => stand.pinned(),
            Self::Sure => matches!(stand, Stand::PinnedCertain | Stand::PinnedLikely),
            Self::Overdue => matches!(stand, Stand::Overdue),
        }
    }
}

/// A room's explanation, as it is on the screen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Page {
    pub(super) room: String,
    /// `None`: the newest use of the number.
    pub(super) incarnation: Option<u64>,
    /// Nothing before the first answer.
    pub(super) lines: Vec<String>,
    /// Why the last question had no answer; the lines are those of the one before.
    pub(super) trouble: Option<String>,
    /// First line shown, after wrapping.
    pub(super) top: usize,
}

/// Everything.
#[derive(Clone, Debug)]
pub(super) struct State {
    /// The agent's address, without a login.
    pub(super) api: String,
    pub(super) interval: Duration,
    /// What the last good look showed, and when that was.
    pub(super) picture: Option<Picture>,
    pub(super) answered: Option<Duration>,
    /// Why the last look failed.
    pub(super) trouble: Option<String>,
    pub(super) view: View,
    pub(super) sort: Sort,
    pub(super) reversed: bool,
    pub(super) only: Only,
    pub(super) search: String,
    /// Keys go into the search.
    pub(super) typing: bool,
    pub(super) help: bool,
    pub(super) page: Option<Page>,
    /// The room under the cursor: it stays with it when the order changes.
    selected: Option<Key>,
    /// Where it was, for when it is gone.
    place: usize,
    /// Cursor, or first line, of the other views.
    pub(super) cursor: usize,
    /// Lines that a page has, as drawn last.
    pub(super) height: usize,
}

impl State {
    pub(super) fn new(api: String, interval: Duration) -> Self {
        Self {
            api,
            interval,
            picture: None,
            answered: None,
            trouble: None,
            view: View::Rooms,
            sort: Sort::Urgency,
            reversed: false,
            only: Only::All,
            search: String::new(),
            typing: false,
            help: false,
            page: None,
            selected: None,
            place: 0,
            cursor: 0,
            height: 10,
        }
    }

    /// Takes an answer, or why there is none: then the picture stays as it was.
    pub(super) fn looked(&mut self, answer: Result<&Answers, String>, at: Duration) {
        match answer {
            Ok(answers) => {
                self.picture = Some(Picture::new(answers, at, self.picture.as_ref()));
                self.answered = Some(at);
                self.trouble = None;
            }
            Err(why) => self.trouble = Some(why),
        }
    }

    /// Takes the explanation of a room, if it is still the one that is open.
    pub(super) fn explained(&mut self, room: &str, answer: Result<String, String>) {
        let Some(page) = self.page.as_mut().filter(|p| p.room == room) else { return };
        match answer {
            Ok(text) => {
                page.lines = text.lines().map(str::to_owned).collect();
                page.trouble = None;
            }
            Err(why) => page.trouble = Some(why),
        }
    }

    /// How old the picture is; `None` before the first.
    pub(super) fn age(&self, now: Duration) -> Option<Duration> {
        self.answered.map(|at| now.saturating_sub(at))
    }

    /// Whether the picture is no longer what the agent says: the last look failed, or it hangs.
    pub(super) fn stale(&self, now: Duration) -> bool {
        self.trouble.is_some()
            || self.age(now).is_some_and(|age| age > self.interval * 2 + Duration::from_secs(3))
    }

    /// The rooms that are listed, in order.
    pub(super) fn rows(&self) -> Vec<&Row> {
        let Some(picture) = &self.picture else { return Vec::new() };
        let search = self.search.to_lowercase();
        let takes = |r: &&Row| self.only.takes(r.stand) && r.searched.contains(&search);
        let mut rows: Vec<&Row> = picture.rows.iter().filter(takes).collect();
        rows.sort_by(|a, b| {
            let order = self.sort.compare(a, b);
            if self.reversed { order.reverse() } else { order }
        });
        rows
    }

    /// Where the cursor is in `rows`: with its room, or where that was.
    pub(super) fn cursor_in(&self, rows: &[&Row]) -> usize {
        let of_room = self.selected.as_ref().and_then(|key| rows.iter().position(|r| r.key == *key));
        of_room.unwrap_or(self.place).min(rows.len().saturating_sub(1))
    }

    /// Takes a key.
    pub(super) fn press(&mut self, key: Press) -> Act {
        match key {
            Press::Break => return Act::Quit,
            Press::Redraw => return Act::Redraw,
            _ => {}
        }
        if self.typing {
            self.typed(key);
            return Act::Nothing;
        }
        if self.help {
            self.help = false;
            return Act::Nothing;
        }
        if self.page.is_some() {
            self.turn(key);
            return Act::Nothing;
        }
        match key {
            Press::Char('q') => return Act::Quit,
            Press::Char('?' | 'h') => self.help = true,
            Press::Tab => self.show(self.view.next(1)),
            Press::BackTab => self.show(self.view.next(View::ALL.len() - 1)),
            Press::Enter => return self.open(),
            _ if self.view == View::Rooms => self.press_in_rooms(key),
            _ => self.cursor = moved(self.cursor, key, self.height),
        }
        Act::Nothing
    }

    fn show(&mut self, view: View) {
        self.view = view;
        self.cursor = 0;
    }

    fn press_in_rooms(&mut self, key: Press) {
        match key {
            Press::Char('s') => self.sort = self.sort.next(),
            Press::Char('r') => self.reversed = !self.reversed,
            Press::Char('f') => self.only = self.only.next(),
            Press::Char('/') => self.typing = true,
            Press::Escape => {
                self.search.clear();
                self.only = Only::All;
            }
            _ => {
                let rows = self.rows();
                let last = rows.len().saturating_sub(1);
                let place = moved(self.cursor_in(&rows), key, self.height).min(last);
                let selected = rows.get(place).map(|r| r.key.clone());
                (self.place, self.selected) = (place, selected);
            }
        }
    }

    fn typed(&mut self, key: Press) {
        match key {
            Press::Char(c) if self.search.chars().count() < SEARCH_MAX => self.search.push(c),
            Press::Backspace => drop(self.search.pop()),
            Press::Enter => self.typing = false,
            Press::Escape => {
                self.search.clear();
                self.typing = false;
            }
            _ => {}
        }
    }

    /// A key while an explanation is open.
    fn turn(&mut self, key: Press) {
        match key {
            Press::Escape | Press::Backspace | Press::Char('q') => self.page = None,
            Press::Char('?' | 'h') => self.help = true,
            _ => {
                if let Some(page) = &mut self.page {
                    page.top = moved(page.top, key, self.height);
                }
            }
        }
    }

    /// The explanation of what is under the cursor: a room, or the first room of a finding.
    fn open(&mut self) -> Act {
        let (room, incarnation) = match self.view {
            View::Rooms => {
                let rows = self.rows();
                let Some(row) = rows.get(self.cursor_in(&rows)) else { return Act::Nothing };
                let key = row.key.clone();
                self.selected = Some(key.clone());
                (key.0, Some(key.1))
            }
            View::Findings => {
                let findings = self.picture.as_ref().map_or(&[][..], |p| &p.findings);
                let Some(room) = findings.get(self.cursor).and_then(|f| f.room.clone()) else {
                    return Act::Nothing;
                };
                (room, None)
            }
            View::Peers | View::Agent => return Act::Nothing,
        };
        let page = Page { room: room.clone(), incarnation, lines: Vec::new(), trouble: None, top: 0 };
        self.page = Some(page);
        Act::Explain(room, incarnation)
    }
}

/// Where a key takes a cursor or a first line; the far end is for whoever knows it.
fn moved(at: usize, key: Press, height: usize) -> usize {
    let page = height.saturating_sub(1).max(1);
    match key {
        Press::Up | Press::Char('k') => at.saturating_sub(1),
        Press::Down | Press::Char('j') => at.saturating_add(1),
        Press::PageUp | Press::Char('b') => at.saturating_sub(page),
        Press::PageDown | Press::Char(' ') => at.saturating_add(page),
        Press::Home | Press::Char('g') => 0,
        Press::End | Press::Char('G') => usize::MAX,
        _ => at,
    }
}
