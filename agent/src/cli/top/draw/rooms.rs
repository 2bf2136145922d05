//! The page of rooms: findings above, the room under the cursor below, peers where there is space.

use std::fmt::Write as _;

use super::pages::peer_table;
use super::pen::{Ink, Pen};
use super::roomy;
use crate::cli::top::picture::{Counted, Picture, Row, Stand};
use crate::cli::top::state::{Only, Sort, State};
use crate::cli::top::text;

/// Longest room number.
const NUMBER: usize = 20;

/// Draws from line `top` up to `bottom`.
pub(super) fn rooms(pen: &mut Pen<'_>, state: &mut State, top: usize, bottom: usize) {
    let Some(picture) = &state.picture else { return };
    let rows = state.rows();
    let cursor = state.cursor_in(&rows);
    let space = bottom.saturating_sub(top);
    let mut y = top + findings(pen, picture, top, space);
    let detail = rows.get(cursor).map_or("", |r| r.summary.as_str());
    let detail = if detail.is_empty() { Vec::new() } else { text::wrap(detail, pen.width()) };
    let detail_lines = match space {
        0..6 => 0,
        6..12 => detail.len().min(3),
        _ => detail.len().min(5),
    };
    let rule = usize::from(detail_lines > 0 && roomy(pen));
    let peers = if space >= 30 && pen.width() >= 100 { (picture.peers.len() + 1).min(9) } else { 0 };
    let peers = if peers > 1 { peers } else { 0 };
    let end = bottom.saturating_sub(detail_lines + rule + peers);
    let narrowed =
        !state.search.is_empty() || state.only != Only::All || state.sort != Sort::Urgency || state.reversed;
    if end > y + 2 && (roomy(pen) || narrowed) {
        heading(pen, state, picture, rows.len(), y);
        y += 1;
    }
    let columns = Columns::of(pen.width());
    if end > y + 1 {
        columns.head(pen, y);
        y += 1;
    }
    let lines = end.saturating_sub(y);
    if rows.is_empty() && lines > 0 {
        pen.line(y, &nothing(state, picture), Ink::Plain);
    }
    let first = first_line(cursor, rows.len(), lines);
    for (n, row) in rows.iter().enumerate().skip(first).take(lines) {
        let at = y + n - first;
        columns.row(pen, at, row, n == cursor);
    }
    y = end;
    if rule > 0 {
        pen.rule(y, "under the cursor");
        y += 1;
    }
    for line in detail.iter().take(detail_lines) {
        pen.line(y, line, Ink::Plain);
        y += 1;
    }
    if peers > 0 {
        peer_table(pen, picture, y, bottom, 0);
    }
    state.height = lines;
}

/// The first line shown, so that the cursor is in sight: it is kept in the middle, and the ends are reached.
fn first_line(cursor: usize, rows: usize, lines: usize) -> usize {
    cursor.saturating_sub(lines / 2).min(rows.saturating_sub(lines))
}

/// A line for each of the first findings; how many lines that took.
fn findings(pen: &mut Pen<'_>, picture: &Picture, top: usize, space: usize) -> usize {
    let most = match space {
        0..12 => 0,
        12..24 => 3,
        _ => 6,
    };
    let all = picture.findings.len();
    let total = picture.findings_total.map_or(all, |n| usize::try_from(n).unwrap_or(usize::MAX));
    let shown = if all <= most { all } else { most - usize::from(most > 0) };
    if most == 0 || all == 0 {
        return 0;
    }
    for (n, f) in picture.findings.iter().take(shown).enumerate() {
        let (sign, ink) = if f.certainly { ("!", Ink::Alarm) } else { ("?", Ink::Doubt) };
        pen.line(top + n, &format!("{sign} {}", f.line), ink);
    }
    if shown < total {
        pen.line(top + shown, &format!("  and {} more findings (Tab)", total - shown), Ink::Plain);
        return shown + 1;
    }
    shown
}

/// What is listed, in what order, and what is not.
fn heading(pen: &mut Pen<'_>, state: &State, picture: &Picture, shown: usize, y: usize) {
    let mut title = format!("rooms: {} by {}", state.only.name(), state.sort.name());
    if state.reversed {
        title.push_str(" reversed");
    }
    if !state.search.is_empty() {
        let _ = write!(title, " with “{}”", state.search);
    }
    let _ = write!(title, " ({shown})");
    let left_out: Vec<String> = [("pinned", picture.pinned), ("overdue", picture.overdue)]
        .into_iter()
        .filter_map(|(w, c)| partly(w, c))
        .collect();
    if !left_out.is_empty() {
        let _ = write!(title, " · listed only {}", left_out.join(", "));
    }
    pen.rule(y, &title);
}

/// How many of how many are listed, where it is not all of them.
fn partly(what: &str, c: Counted) -> Option<String> {
    c.more().then(|| format!("{} of {} {what}", c.listed, text::count(c.total)))
}

/// Why the list is empty.
fn nothing(state: &State, picture: &Picture) -> String {
    let narrowed = !state.search.is_empty() || state.only != Only::All;
    match (picture.rows.is_empty(), picture.open) {
        (false, _) | (true, Some(1..)) if narrowed => {
            "no listed room is like that (Esc: show all)".to_owned()
        }
        (true, Some(0)) => "no open rooms".to_owned(),
        _ => "no rooms listed".to_owned(),
    }
}

/// Where the columns are: first cell and cells.
struct Columns {
    age: (usize, usize),
    stand: (usize, usize),
    class: (usize, usize),
    owes: (usize, usize),
    room: (usize, usize),
    narrow: bool,
}

impl Columns {
    fn of(width: usize) -> Self {
        let narrow = width < 76;
        let stand = if narrow { 9 } else { 16 };
        let class_from = 8 + stand + 1;
        let room_from = width.saturating_sub(NUMBER).max(class_from);
        let between = room_from.saturating_sub(class_from + 1);
        let class = if narrow {
            if between < 8 { 0 } else { between }
        } else {
            between.min(if width < 100 { 22 } else { 25 })
        };
        let owes_from = class_from + class + 1;
        Self {
            age: (1, 6),
            stand: (8, stand),
            class: (class_from, class),
            owes: (owes_from, room_from.saturating_sub(owes_from + 1)),
            room: (room_from, NUMBER),
            narrow,
        }
    }

    fn head(&self, pen: &mut Pen<'_>, y: usize) {
        let titles = [
            (self.age, "   AGE"),
            (self.stand, "STATE"),
            (self.class, "VERDICT"),
            (self.owes, "OWED BY"),
            (self.room, "ROOM"),
        ];
        for ((x, room), title) in titles {
            pen.put(x, y, room, title, Ink::Strong);
        }
    }

    fn row(&self, pen: &mut Pen<'_>, y: usize, row: &Row, under_cursor: bool) {
        let ink = match row.stand {
            Stand::PinnedCertain | Stand::PinnedLikely => Ink::Alarm,
            Stand::PinnedPossible | Stand::Overdue => Ink::Doubt,
            Stand::Open => Ink::Plain,
        };
        if under_cursor {
            pen.put(0, y, 1, ">", Ink::Strong);
        }
        pen.put(self.age.0, y, self.age.1, &format!("{:>6}", text::age(row.age)), Ink::Plain);
        let stand = if self.narrow { row.stand.word() } else { row.stand.words() };
        pen.put(self.stand.0, y, self.stand.1, stand, ink);
        pen.put(self.class.0, y, self.class.1, &row.class, Ink::Plain);
        let owes = text::fitting(row.owes.iter().map(String::as_str), self.owes.1);
        pen.put(self.owes.0, y, self.owes.1, &owes, Ink::Plain);
        pen.put(self.room.0, y, self.room.1, &row.key.0, Ink::Plain);
        if under_cursor {
            pen.mark(y);
        }
    }
}
