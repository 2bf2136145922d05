//! `roomtrace top`: what a running agent sees, in the terminal, for as long as one looks.
//!
//! [`picture`], [`state`], [`draw`], [`text`] and [`exposition`] are pure: answers, keys and times go in, cells come out. The edges
//! are [`ask`] (HTTP, on threads of its own) and [`live`] (terminal, signals, clock). It changes nothing at the agent.

mod ask;
mod draw;
mod exposition;
mod live;
mod once;
mod picture;
mod state;
#[cfg(test)]
mod tests;
mod text;

use std::io::IsTerminal as _;
use std::time::Duration;

use anyhow::anyhow;
use clap::Args;

use super::{Api, Failure, Outcome};

/// Shortest interval: more often the agent's counters do not change.
const INTERVAL_MIN: Duration = Duration::from_secs(1);
/// Longest: beyond it nobody watches.
const INTERVAL_MAX: Duration = Duration::from_hours(1);

#[derive(Args)]
pub(super) struct TopArgs {
    #[command(flatten)]
    api: Api,
    /// How often the agent is asked (1s to 1h).
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = interval)]
    interval: Duration,
    /// How many rooms are fetched at most of each kind: pinned, overdue, others (1 to 500). Counts are of all.
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u16).range(1..=500))]
    rooms: u16,
    /// Look twice, an interval apart (rates need two looks), print that as plain text and end.
    #[arg(long)]
    once: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = crate::duration_text::parse(text)?;
    if (INTERVAL_MIN..=INTERVAL_MAX).contains(&interval) {
        return Ok(interval);
    }
    Err("must be from 1s to 1h".to_owned())
}

/// `roomtrace top`.
pub(super) fn top(args: &TopArgs) -> Outcome {
    if args.once {
        return once::once(args);
    }
    if let Some(why) = no_terminal(std::io::stdout().is_terminal(), std::env::var("TERM").ok().as_deref()) {
        return Err(Failure::usage(anyhow!("{why}: `roomtrace top --once` prints the same as plain text")));
    }
    live::live(args)
}

/// Why nothing can be drawn here.
fn no_terminal(terminal: bool, term: Option<&str>) -> Option<&'static str> {
    match term {
        _ if !terminal => Some("standard output is not a terminal"),
        None | Some("") => Some("TERM is not set, so this terminal can do nothing"),
        Some("dumb") => Some("this terminal can only print lines (TERM=dumb)"),
        Some(_) => None,
    }
}
