//! The other pages: an explanation, findings, peers, the agent itself, help.

use std::time::Duration;

use super::old;
use super::pen::{Ink, Pen};
use crate::cli::top::picture::{Loss, Picture};
use crate::cli::top::state::State;
use crate::cli::top::text;

const HELP: &[&str] = &[
    "q, Ctrl-C   quit",
    "Enter       everything known of the room under the cursor (as `roomtrace explain`); Esc or q: back",
    "arrows      move, also j k PgUp PgDn Home End",
    "Tab         rooms, findings, peers, agent",
    "s  r        order of the rooms; reversed",
    "f           all rooms, pinned, pinned likely or certain, overdue",
    "/           search: room, verdict, address, process, rid, container; Esc: all again",
    "Ctrl-L      draw again",
    "",
    "PINNED certain    no other reading is left",
    "PINNED likely     owed, and a second source excludes queueing, computing, pausing",
    "pinned? possible  silence alone: a long computation looks the same",
    "overdue           waits longer than others did, and nothing says that it will not end",
    "–                 not measured, which is not 0",
    "STALE             the agent does not answer: the picture is that of its last answer",
    "ends              views of rooms that ended; lost: what the agent missed, since it started",
    "",
    "any key: back",
];

/// What the keys do and the words mean.
pub(super) fn help(pen: &mut Pen<'_>) {
    let mut y = 0;
    for line in HELP {
        for part in text::wrap(line, pen.width()) {
            pen.line(y, &part, Ink::Plain);
            y += 1;
        }
    }
}

/// The explanation of a room.
pub(super) fn explanation(pen: &mut Pen<'_>, state: &mut State, now: Duration) {
    let old = old(state, now);
    let height = pen.height();
    let Some(page) = &mut state.page else { return };
    let (top, bottom) = if height >= 4 { (1, height - 1) } else { (0, height) };
    let mut notice = page.trouble.clone().map(|why| format!(" NOT REFRESHED: {why}")).or(old);
    let lines: Vec<String> = page.lines.iter().flat_map(|l| text::wrap(l, pen.width())).collect();
    if lines.is_empty() && notice.is_none() {
        notice = Some(format!(" asking for room {} …", page.room));
    }
    if top > 0 {
        pen.parts(
            0,
            &[(format!("room {}", page.room), Ink::Strong), ("explanation".to_owned(), Ink::Plain)],
            " · ",
        );
    }
    let from = top + usize::from(notice.is_some());
    if let Some(notice) = notice {
        pen.line(top, &format!("{notice:width$}", width = pen.width()), Ink::Notice);
    }
    let space = bottom.saturating_sub(from);
    page.top = page.top.min(lines.len().saturating_sub(space));
    for (n, line) in lines.iter().skip(page.top).take(space).enumerate() {
        pen.line(from + n, line, if page.top + n == 0 { Ink::Strong } else { Ink::Plain });
    }
    if bottom < height {
        let last = (page.top + space).min(lines.len());
        let place = format!("lines {}-{last} of {}", (page.top + 1).min(last), lines.len());
        let keys = ["Esc back", "arrows PgUp PgDn"].map(|k| (k.to_owned(), Ink::Plain));
        pen.parts(bottom, &[&keys[..], &[(place, Ink::Faint)]].concat(), "  ");
    }
    state.height = space;
}

/// Every finding; the one under the cursor whole.
pub(super) fn findings(pen: &mut Pen<'_>, state: &mut State, top: usize, bottom: usize) {
    let Some(picture) = &state.picture else { return };
    let all = &picture.findings;
    state.cursor = state.cursor.min(all.len().saturating_sub(1));
    let total = text::count(picture.findings_total);
    pen.rule(top, &format!("findings: {} of {total}, oldest first", all.len()));
    let space = bottom.saturating_sub(top + 1);
    if all.is_empty() {
        let what = if picture.findings_total == Some(0) { "no findings" } else { "findings are not known" };
        if space > 0 {
            pen.line(top + 1, what, Ink::Plain);
        }
    }
    let whole =
        all.get(state.cursor).map_or_else(Vec::new, |f| text::wrap(&format!("> {}", f.line), pen.width()));
    // Lines above the cursor's as long as it is seen as a whole.
    let first = state.cursor.saturating_sub(space.saturating_sub(whole.len()));
    let mut y = top + 1;
    for (n, f) in all.iter().enumerate().skip(first) {
        let ink = if f.certainly { Ink::Alarm } else { Ink::Doubt };
        if n == state.cursor {
            for line in &whole {
                if y < bottom {
                    pen.line(y, line, ink);
                    pen.mark(y);
                    y += 1;
                }
            }
        } else if y < bottom {
            pen.line(y, &format!("  {}", f.line), ink);
            y += 1;
        }
    }
    state.height = space;
}

/// Every pair of ranks.
pub(super) fn peers(pen: &mut Pen<'_>, state: &mut State, top: usize, bottom: usize) {
    let Some(picture) = &state.picture else { return };
    let all = &picture.peers;
    let space = bottom.saturating_sub(top + 2);
    state.cursor = state.cursor.min(all.len().saturating_sub(space.max(1)));
    pen.rule(
        top,
        &format!("peers: {} of {} pairs that handed rooms over", all.len(), text::count(picture.peers_total)),
    );
    peer_table(pen, picture, top + 1, bottom, state.cursor);
    if all.is_empty() && space > 0 {
        let what = if picture.peers_total == Some(0) {
            "no pair has handed a room over yet"
        } else {
            "not told by this agent"
        };
        pen.line(top + 2, what, Ink::Plain);
    }
    state.height = space;
}

/// A line for each pair from `first` on, under titles, on the lines from `top` up to `bottom`.
pub(super) fn peer_table(pen: &mut Pen<'_>, picture: &Picture, top: usize, bottom: usize, first: usize) {
    // Two addresses; IPv6 ones are cut where there is no space.
    let fixed = 8 + 1 + 6 + 1 + 6 + 1 + 7;
    let address = (pen.width().saturating_sub(fixed + 4) / 2).min(47);
    let backend = pen.width() > fixed + 2 * address + 3 + 10;
    let line = |p: [&str; 7]| {
        let [rate, last, pinned, overdue, prefill, decode, name] = p;
        let cells = |s: &str| {
            let s = text::cut(s, address);
            format!("{s}{}", " ".repeat(address.saturating_sub(text::width(&s))))
        };
        let name = if backend { format!(" {name}") } else { String::new() };
        format!("{rate:>8} {last:>6} {pinned:>6} {overdue:>7} {} > {}{name}", cells(prefill), cells(decode))
    };
    if top < bottom {
        pen.line(
            top,
            &line(["ROOMS/S", "LAST", "PINNED", "OVERDUE", "PREFILL", "DECODE", "BACKEND"]),
            Ink::Strong,
        );
    }
    for (n, p) in picture.peers.iter().skip(first).take(bottom.saturating_sub(top + 1)).enumerate() {
        let (rate, last) = (text::rate(p.rate), text::age(p.last));
        let pinned = Picture::of_listed(picture.pinned, p.pinned);
        let overdue = Picture::of_listed(picture.overdue, p.overdue);
        let ink = if p.pinned > 0 { Ink::Alarm } else { Ink::Plain };
        pen.line(
            top + 1 + n,
            &line([&rate, &last, &pinned, &overdue, &p.prefill, &p.decode, &p.backend]),
            ink,
        );
    }
}

/// What the agent loses and costs, one by one.
pub(super) fn agent(pen: &mut Pen<'_>, state: &mut State, top: usize, bottom: usize) {
    let Some(picture) = &state.picture else { return };
    let lines: Vec<String> =
        about(&state.api, picture).iter().flat_map(|l| text::wrap(l, pen.width())).collect();
    pen.rule(top, "the agent");
    let space = bottom.saturating_sub(top + 1);
    state.cursor = state.cursor.min(lines.len().saturating_sub(space));
    for (n, line) in lines.iter().skip(state.cursor).take(space).enumerate() {
        pen.line(top + 1 + n, line, Ink::Plain);
    }
    state.height = space;
}

/// The same as text.
pub(in crate::cli::top) fn about(api: &str, p: &Picture) -> Vec<String> {
    let or_none = |s: &str| if s.is_empty() { text::NONE.to_owned() } else { s.to_owned() };
    let mut out = vec![
        format!(
            "{api}: host {}, version {}, up {}, hooks {}",
            or_none(&p.host),
            or_none(&p.version),
            text::age(p.uptime),
            or_none(&p.hook)
        ),
        format!("cost: {} of a CPU, {}", text::percent(p.cpu), text::mebibytes(p.memory)),
        format!("cost in the kernel: {} of a CPU", text::percent(p.kernel)),
    ];
    out.extend(p.programs.iter().map(|(name, share)| format!("  {:>6} {name}", text::percent(*share))));
    let losses = |out: &mut Vec<String>, title: &str, total: Option<f64>, list: &[Loss]| {
        let total = total.map_or_else(|| text::NONE.to_owned(), |n| format!("{n:.0}"));
        out.push(format!("{title} since it started: {total}"));
        out.extend(list.iter().map(|l| format!("  {:>8.0} {} ({}/s)", l.total, l.what, text::rate(l.rate))));
    };
    losses(&mut out, "lost", p.lost_total, &p.lost);
    losses(&mut out, "not exported", p.dropped_total, &p.dropped);
    if !p.missing.is_empty() {
        out.push("not attached".to_owned());
        out.extend(p.missing.iter().map(|m| format!("  {m}")));
    }
    out
}
