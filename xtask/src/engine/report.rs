//! The results, for the terminal and for `docs/compatibility.md`.

use std::fmt;
use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::case::{self, Attach, Backend, Case};
use super::setup::Engine;
use crate::install;

/// Between these lines of the page the results stand.
const BEGIN: &str = "<!-- engine results: written by `cargo xtask engine --write-docs` -->";
const END: &str = "<!-- end of engine results -->";

/// Most faults of a case that are printed.
const SHOWN: usize = 20;

/// One case with one way of attaching.
pub(super) struct Row {
    case: &'static str,
    backend: Backend,
    attach: Attach,
    /// Rooms per scenario.
    rooms: String,
    outcome: Result<Value>,
}

impl Row {
    pub(super) fn new(case: &Case, attach: Attach, outcome: Result<Value>, dir: &Path) -> Self {
        let counts = case::rooms(dir).unwrap_or_default();
        let rooms: Vec<String> = counts.iter().map(|(scenario, n)| format!("{scenario} {n}")).collect();
        Self { case: case.name, backend: case.backend, attach, rooms: rooms.join(", "), outcome }
    }

    /// Whether the judge found nothing wrong.
    pub(super) fn is_right(&self) -> bool {
        self.wrong().is_some_and(<[Value]>::is_empty)
    }

    pub(super) fn name(&self) -> String {
        format!("{} ({} the connections)", self.case, self.attach)
    }

    fn wrong(&self) -> Option<&[Value]> {
        self.outcome.as_ref().ok()?.get("wrong")?.as_array().map(Vec::as_slice)
    }

    fn count(&self, key: &str) -> String {
        let value = self.outcome.as_ref().ok().and_then(|v| v.get(key)).and_then(Value::as_u64);
        value.map_or_else(|| "–".to_owned(), |n| n.to_string())
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.outcome, self.wrong()) {
            (Err(error), _) => write!(f, "   not run to its end: {error:#}"),
            (Ok(_), Some([])) => {
                write!(f, "   right: {} of {} pins found", self.count("found"), self.count("must"))
            }
            (Ok(counts), None) => write!(f, "   the judge's answer is not understood: {counts}"),
            (Ok(_), Some(wrong)) => {
                let mut lines: Vec<String> =
                    wrong.iter().take(SHOWN).map(|w| format!("   WRONG {w}")).collect();
                if wrong.len() > SHOWN {
                    lines.push(format!("   and {} more", wrong.len() - SHOWN));
                }
                f.write_str(&lines.join("\n"))
            }
        }
    }
}

/// The results as a Markdown table.
pub(super) fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "| case | backend | agent attached | rooms by scenario | pins | found | missed | false pages | noise | wrong class | wrong debtor | result |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let backend = if row.backend == Backend::Nixl { "NIXL" } else { "Mooncake" };
        let keys = ["must", "found", "missed", "false", "noise", "class_wrong", "debtor_wrong"];
        let counts: Vec<String> = keys.iter().map(|key| row.count(key)).collect();
        let result = match &row.outcome {
            Ok(_) if row.is_right() => "right",
            Ok(_) => "wrong",
            Err(_) => "not run to its end",
        };
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {} | {backend} | {} the connections | {} | {} | {result} |",
            row.case,
            row.attach,
            row.rooms,
            counts.join(" | "),
        );
    }
    text
}

/// Puts the table where the page has its place for it.
pub(super) fn write_docs(rows: &[Row]) -> Result<()> {
    let path = install::root().join("docs/compatibility.md");
    let page = match std::fs::read_to_string(&path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => format!("# Compatibility\n\n{BEGIN}\n{END}\n"),
        page => page.with_context(|| format!("read {}", path.display()))?,
    };
    let Some((before, rest)) = page.split_once(BEGIN) else {
        bail!("{} has no line `{BEGIN}` to put the results behind", path.display());
    };
    let Some((_, after)) = rest.split_once(END) else {
        bail!("{} has no line `{END}` to put the results before", path.display());
    };
    let kernel = install::output(std::process::Command::new("uname").arg("-r"))?;
    let date = install::output(std::process::Command::new("date").args(["-u", "+%Y-%m-%d"]))?;
    let text = format!(
        "{before}{BEGIN}\n\n{} on Linux {}, {}.\n\n{}\n{END}{after}",
        Engine::releases(),
        kernel.trim(),
        date.trim(),
        table(rows),
    );
    std::fs::write(&path, text).with_context(|| format!("write {}", path.display()))
}
