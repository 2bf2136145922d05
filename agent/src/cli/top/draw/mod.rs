//! Draws what [`State`] holds into a buffer of cells. Pure; any size of it, down to nothing.
//!
//! What must be seen first is highest: how old the picture is, how much is pinned and how surely, then rooms. Where there is less
//! space the rest goes first.

mod pages;
mod pen;
mod rooms;

use std::time::Duration;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

pub(super) use pages::about;
pub(super) use pen::Paint;
use pen::{Ink, Part, Pen};

use super::picture::Picture;
use super::state::{State, View};
use super::text::{self, NONE};

/// Draws the screen as it is at `now` (since the start).
pub(super) fn draw(state: &mut State, now: Duration, paint: Paint, area: Rect, buffer: &mut Buffer) {
    let area = area.intersection(buffer.area);
    if area.is_empty() {
        return;
    }
    let mut pen = Pen { buffer, area, paint };
    if state.help {
        return pages::help(&mut pen);
    }
    if state.page.is_some() {
        return pages::explanation(&mut pen, state, now);
    }
    let top = header(&mut pen, state, now);
    let bottom = pen.height() - usize::from(pen.height() >= 6);
    match (state.view, state.picture.is_some()) {
        (_, false) => waiting(&mut pen, state, top, bottom),
        (View::Rooms, true) => rooms::rooms(&mut pen, state, top, bottom),
        (View::Findings, true) => pages::findings(&mut pen, state, top, bottom),
        (View::Peers, true) => pages::peers(&mut pen, state, top, bottom),
        (View::Agent, true) => pages::agent(&mut pen, state, top, bottom),
    }
    if state.stale(now) {
        pen.fade(1);
    }
    if bottom < pen.height() {
        footer(&mut pen, state, bottom);
    }
}

/// Whether there is space for more than counts and rooms.
fn roomy(pen: &Pen<'_>) -> bool {
    pen.width() >= 60 && pen.height() >= 14
}

/// What is above the pages; returns the line below it.
fn header(pen: &mut Pen<'_>, state: &State, now: Duration) -> usize {
    let mut y = 0;
    if roomy(pen) {
        title(pen, state, now);
        y += 1;
    }
    if let Some(old) = old(state, now) {
        // Where there is but one line it is the count that counts.
        let most = if roomy(pen) { 2 } else { usize::from(pen.height() > 1) };
        let lines = if most == 1 { vec![old] } else { text::wrap(&old, pen.width()) };
        for line in lines.iter().take(most) {
            pen.line(y, &format!("{line:width$}", width = pen.width()), Ink::Notice);
            y += 1;
        }
    }
    let none = Picture::default();
    let picture = state.picture.as_ref().unwrap_or(&none);
    pen.parts(y, &counts(picture, pen.width() < 60), " · ");
    y += 1;
    if roomy(pen) {
        pen.parts(y, &flow(picture), " · ");
        pen.parts(y + 1, &cost(picture), " · ");
        y += 2;
    }
    y
}

fn title(pen: &mut Pen<'_>, state: &State, now: Duration) {
    let p = state.picture.as_ref();
    let mut parts = vec![("roomtrace top".to_owned(), Ink::Strong)];
    match p {
        Some(p) => {
            parts.push((p.host.clone(), Ink::Strong));
            parts.push((format!("agent {} up {}", p.version, text::age(p.uptime)), Ink::Plain));
        }
        None => parts.push((state.api.clone(), Ink::Plain)),
    }
    pen.parts(0, &parts, " · ");
    if !state.stale(now) && p.is_some() {
        pen.right(0, &format!("every {}", text::age(Some(state.interval.as_secs_f64()))), Ink::Faint);
    }
}

/// That the picture is old, how old, and why.
fn old(state: &State, now: Duration) -> Option<String> {
    if !state.stale(now) {
        return None;
    }
    let why = state.trouble.as_deref().unwrap_or("the agent has not answered the last question yet");
    Some(match state.age(now) {
        Some(age) => format!(" STALE  last answer {} s ago: {why}", age.as_secs()),
        None => format!(" NO ANSWER YET: {why}"),
    })
}

/// How many are pinned, how surely, overdue, open; `short`: without how many are certain.
pub(super) fn counts(p: &Picture, short: bool) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    match (p.pinned.total, p.sure) {
        (Some(0), _) => parts.push(("pinned 0".to_owned(), Ink::Strong)),
        (Some(n), Some([0, 0, _])) => parts.push((format!("pinned? {n} possible"), Ink::Doubt)),
        (Some(n), Some([_, _, 0])) if short => parts.push((format!("PINNED {n}"), Ink::Alarm)),
        (Some(n), Some([_, _, possible])) if short => {
            parts.push((format!("PINNED {n} ({possible} possible?)"), Ink::Alarm));
        }
        (Some(n), Some([certain, likely, possible])) => {
            let each = [(certain, "certain"), (likely, "likely"), (possible, "possible?")];
            let each: Vec<String> =
                each.iter().filter(|(n, _)| *n > 0).map(|(n, w)| format!("{n} {w}")).collect();
            parts.push((format!("PINNED {n}: {}", each.join(", ")), Ink::Alarm));
        }
        (n, _) => parts.push((format!("pinned {}", text::count(n)), Ink::Strong)),
    }
    let ink = if p.overdue.total.is_some_and(|n| n > 0) { Ink::Doubt } else { Ink::Plain };
    parts.push((format!("overdue {}", text::count(p.overdue.total)), ink));
    parts.push((format!("open {}", text::count(p.open)), Ink::Plain));
    let ink = if p.findings.iter().any(|f| f.certainly) { Ink::Alarm } else { Ink::Plain };
    parts.push((format!("findings {}", text::count(p.findings_total)), ink));
    if p.open != Some(0) {
        parts.push((format!("oldest {}", text::age(p.oldest)), Ink::Plain));
    }
    parts
}

/// What passes.
pub(super) fn flow(p: &Picture) -> Vec<Part> {
    let mut parts = Vec::new();
    for (role, [all, failed]) in ["prefill", "decode"].into_iter().zip(p.ended) {
        parts.push((
            format!("{role} ends {}/s, failed {}/s", text::rate(all), text::rate(failed)),
            Ink::Plain,
        ));
    }
    parts.push((format!("messages {}/s", text::rate(p.messages)), Ink::Plain));
    parts
}

/// What was lost, and what the agent costs.
pub(super) fn cost(p: &Picture) -> Vec<Part> {
    let total = |n: Option<f64>| n.map_or_else(|| NONE.to_owned(), |n| format!("{n:.0}"));
    let ink = match (p.lost_total, p.lost_rate) {
        (_, Some(rate)) if rate > 0.0 => Ink::Alarm,
        (Some(n), _) if n > 0.0 => Ink::Doubt,
        _ => Ink::Plain,
    };
    let dropped = if p.dropped_total.is_some_and(|n| n > 0.0) { Ink::Doubt } else { Ink::Plain };
    vec![
        (format!("lost {} ({}/s)", total(p.lost_total), text::rate(p.lost_rate)), ink),
        (format!("not exported {}", total(p.dropped_total)), dropped),
        (format!("agent {} CPU, {}", text::percent(p.cpu), text::mebibytes(p.memory)), Ink::Plain),
        (format!("in the kernel {}", text::percent(p.kernel)), Ink::Plain),
    ]
}

fn waiting(pen: &mut Pen<'_>, state: &State, top: usize, bottom: usize) {
    let what = match &state.trouble {
        None => format!("asking {} …", state.api),
        Some(why) => format!(
            "nothing is known yet: {why}. Asked again every {}.",
            text::age(Some(state.interval.as_secs_f64()))
        ),
    };
    for (n, line) in text::wrap(&what, pen.width()).iter().enumerate().take(bottom.saturating_sub(top + 1)) {
        pen.line(top + 1 + n, line, Ink::Plain);
    }
}

/// The keys, or what is being typed.
fn footer(pen: &mut Pen<'_>, state: &State, y: usize) {
    if state.typing {
        pen.line(y, &format!("search: {}_   (Enter: keep, Esc: all)", state.search), Ink::Strong);
        return;
    }
    let next = View::ALL
        .iter()
        .position(|v| *v == state.view)
        .and_then(|at| View::ALL.get((at + 1) % View::ALL.len()));
    let next = format!("Tab {}", next.map_or("", |v| v.name()));
    let keys: &[&str] = match state.view {
        View::Rooms => &["q quit", "? help", "Enter explain", "s sort", "f filter", "/ search", "r reverse"],
        View::Findings => &["q quit", "? help", "Enter explain"],
        View::Peers | View::Agent => &["q quit", "? help"],
    };
    let mut parts: Vec<Part> = keys.iter().map(|k| ((*k).to_owned(), Ink::Plain)).collect();
    parts.insert(2, (next, Ink::Plain));
    pen.parts(y, &parts, "  ");
}
