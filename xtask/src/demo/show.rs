//! The demo's result for a person at a terminal, in fewer than 70 lines. Colours only on a terminal, and lines are cut only there:
//! whoever reads a pipe or a file wants them whole.

use std::io::IsTerminal;

use super::compare::{Comparison, Room};

/// Lines of the `explain` page that are shown.
const PAGE_LINES: usize = 14;
/// Columns of a terminal.
const WIDTH: usize = 118;

/// What happened in each scenario, in the order shown.
const TITLES: &[(&str, &str)] = &[
    ("slow", "long prompt, computed for 12 s"),
    ("hangup", "client hangs up while decode waits for memory; both sides end"),
    ("hangup_computing", "client hangs up while prefill computes"),
    ("abort_first", "ABORT reaches prefill before the request (mooncake)"),
    ("abort_first_nixl", "ABORT reaches prefill before the request (NIXL: stays in the inflight queue)"),
    ("dead_worker", "a transfer worker thread dies"),
    ("receiver_killed", "another program's message kills prefill's receive thread"),
    ("one_rank_silent", "one of two decode ranks never sends METADATA"),
    ("killed_peer", "the decode process is killed while prefill computes"),
    ("refused_status", "prefill's STATUS goes to a port that refuses"),
    ("black_hole", "decode's kernel drops the STATUS"),
    ("refused_prompt", "prefill answers 400, decode is not told"),
    ("prefill_only", "decode never gets the request"),
];

/// Prints it.
pub(crate) fn result(result: &Comparison, source: &str, page: Option<(&str, &str)>) {
    let terminal = std::io::stdout().is_terminal();
    let paint = Paint {
        on: terminal && std::env::var_os("NO_COLOR").is_none(),
        width: if terminal { WIDTH } else { usize::MAX },
    };
    println!(
        "\n{}",
        paint.bold(&paint.cut(&format!("Expected (from the engines' own state) against found ({source})")))
    );
    healthy(result, &paint);
    for (name, title) in TITLES {
        let rooms =
            result.scenarios.iter().filter(|(scenario, _)| scenario == name).flat_map(|(_, rooms)| rooms);
        scenario(title, &rooms.collect::<Vec<_>>(), &paint);
    }
    for room in &result.invented {
        println!(
            "{} room {room}: {}",
            paint.mark(false),
            paint.red("reported at the engines' own ports, made by none")
        );
    }
    if result.foreign > 0 {
        println!("  {} other rooms were seen on this host and left out", result.foreign);
    }
    if let Some((room, text)) = page {
        println!("\n{}", paint.bold(&format!("$ roomtrace explain {room}")));
        let lines: Vec<_> = text.lines().collect();
        for line in lines.iter().take(PAGE_LINES) {
            println!("{}", paint.cut(line));
        }
        if lines.len() > PAGE_LINES {
            println!("… {} more lines", lines.len() - PAGE_LINES);
        }
    }
    match result.wrong() {
        0 => println!("\n{}", paint.green("The agent and the engines agree on every room.")),
        n => println!("\n{}", paint.red(&format!("The agent and the engines disagree on {n} rooms."))),
    }
}

fn healthy(result: &Comparison, paint: &Paint) {
    let rooms: Vec<&Room> = result
        .scenarios
        .iter()
        .filter(|(name, _)| TITLES.iter().all(|(known, _)| known != name))
        .flat_map(|(_, rooms)| rooms)
        .collect();
    let wrong = rooms.iter().find_map(|room| room.wrong.as_ref().map(|wrong| (room, wrong)));
    let closed = rooms.iter().filter(|room| room.closed.as_deref() == Some("success")).count();
    let silent = rooms.iter().filter(|room| room.label == "success_off_wire").count();
    println!("{} {} ordinary requests", paint.mark(wrong.is_none()), rooms.len());
    println!(
        "    expected  never pinned; success seen, except of {silent} NIXL rooms: only their requests tell"
    );
    let pinned = rooms.iter().filter(|room| room.found.is_some()).count();
    println!("    found     {pinned} pinned; {closed} seen to succeed");
    if let Some((room, wrong)) = wrong {
        println!("    {}", paint.red(&format!("room {}: {wrong}", room.number)));
    }
}

fn scenario(title: &str, rooms: &[&Room], paint: &Paint) {
    let wrong = rooms.iter().find(|room| room.wrong.is_some());
    // Shown for all: the first that is wrong, or the first.
    let Some(room) = wrong.or(rooms.first()) else { return };
    let more = if rooms.len() > 1 { format!(" and {} more", rooms.len() - 1) } else { String::new() };
    println!("{} {title}: room {}{more}", paint.mark(wrong.is_none()), room.number);
    println!("    expected  {}", paint.cut(&expected(room)));
    println!("    found     {}", paint.cut(&found(room)));
    if let Some(evidence) = room.found.as_ref().and_then(|found| found.evidence.as_deref()) {
        println!("              {}", paint.cut(evidence));
    }
    if let Some(wrong) = &room.wrong {
        println!("    {}", paint.red(wrong));
    }
}

fn expected(room: &Room) -> String {
    match &room.expected {
        None => format!("not pinned ({})", room.label),
        Some(e) if e.must => {
            let sure = if e.min_confidence == e.max_confidence {
                e.max_confidence.clone()
            } else {
                format!("{} to {}", e.min_confidence, e.max_confidence)
            };
            format!("PINNED {}, {} owes · {sure} · {}", e.class.join(" or "), e.owed.join(" or "), e.why)
        }
        Some(e) => format!("at most `{}`: {}", e.max_confidence, e.why),
    }
}

fn found(room: &Room) -> String {
    let end = match room.closed.as_deref() {
        Some("null") => " · closed, how is not on the wire".to_owned(),
        Some(outcome) => format!(" · closed: {outcome}"),
        None => String::new(),
    };
    match &room.found {
        None => match &room.unsure {
            Some(candidates) => {
                format!("not pinned: unknown, may be {} (the agent came late){end}", candidates.join(" or "))
            }
            None => format!("not pinned{end}"),
        },
        Some(f) => {
            let owes = f.owed.as_deref().unwrap_or("nobody");
            let at = f.endpoint.as_deref().map(|at| format!(" at {at}")).unwrap_or_default();
            format!("PINNED {}, {owes} owes{at} · {}{end}", f.class, f.confidence)
        }
    }
}

struct Paint {
    on: bool,
    width: usize,
}

impl Paint {
    fn cut(&self, line: &str) -> String {
        if line.chars().count() <= self.width {
            return line.to_owned();
        }
        line.chars().take(self.width - 1).chain(['…']).collect()
    }

    fn code(&self, code: &str, text: &str) -> String {
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    fn bold(&self, text: &str) -> String {
        self.code("1", text)
    }

    fn green(&self, text: &str) -> String {
        self.code("32", text)
    }

    fn red(&self, text: &str) -> String {
        self.code("31", text)
    }

    fn mark(&self, well: bool) -> String {
        if well { self.green("✔") } else { self.red("✘") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_for_terminals_alone() {
        let long = "é".repeat(WIDTH + 1);
        let cut = Paint { on: false, width: WIDTH }.cut(&long);
        assert_eq!((cut.chars().count(), cut.ends_with('…')), (WIDTH, true));
        assert_eq!(Paint { on: false, width: usize::MAX }.cut(&long), long);
    }
}
