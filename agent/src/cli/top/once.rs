//! `roomtrace top --once`: what the screen shows, as plain text, whole.

use std::fmt::Write as _;
use std::time::Instant;

use super::TopArgs;
use super::ask::look;
use super::draw::{about, cost, counts, flow};
use super::picture::{Picture, Row};
use super::state::State;
use super::text;
use crate::cli::remote::Asker;
use crate::cli::{Failure, Outcome, print};
use crate::export::otlp::without_login;

/// Looks twice and prints.
pub(super) fn once(args: &TopArgs) -> Outcome {
    let asker = Asker::new(&args.api.api)?;
    let mut state = State::new(without_login(&args.api.api).into_owned(), args.interval);
    let start = Instant::now();
    let look = |state: &mut State| -> Result<(), Failure> {
        let answers = look(&asker, args.rooms)?;
        state.looked(Ok(&answers), start.elapsed());
        Ok(())
    };
    look(&mut state)?;
    std::thread::sleep(args.interval);
    look(&mut state)?;
    print(&page(&state))
}

/// The text.
pub(super) fn page(state: &State) -> String {
    let mut out = String::new();
    let Some(p) = &state.picture else { return out };
    for parts in [counts(p, false), flow(p), cost(p)] {
        let parts: Vec<String> = parts.into_iter().map(|(s, _)| s).collect();
        out.push_str(&text::joined(&parts));
        out.push('\n');
    }
    for f in &p.findings {
        let _ = writeln!(out, "finding {}", f.line);
    }
    for row in state.rows() {
        let _ = writeln!(out, "{}", line(row));
    }
    for (what, c) in [("pinned", p.pinned), ("overdue", p.overdue)] {
        if c.more() {
            let _ = writeln!(out, "(listed are {} of {} {what} rooms)", c.listed, text::count(c.total));
        }
    }
    peers(&mut out, p);
    for line in about(&state.api, p) {
        let _ = writeln!(out, "{line}");
    }
    out
}

/// A room: how it stands, and what `roomtrace rooms` says of it beyond that.
fn line(row: &Row) -> String {
    let (age, stand, class) = (text::age(row.age), row.stand.words(), &row.class);
    format!("{age:>6} {stand:16} {class:22} {} · {}", row.key.0, row.summary)
}

fn peers(out: &mut String, p: &Picture) {
    for peer in &p.peers {
        let last =
            peer.last.map_or_else(|| text::NONE.to_owned(), |last| format!("{} ago", text::age(Some(last))));
        let _ = writeln!(
            out,
            "peers {} > {}: {} rooms/s, last {last}, {} pinned, {} overdue",
            peer.prefill,
            peer.decode,
            text::rate(peer.rate),
            Picture::of_listed(p.pinned, peer.pinned),
            Picture::of_listed(p.overdue, peer.overdue)
        );
    }
}
