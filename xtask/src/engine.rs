//! `cargo xtask engine`: the agent against the control plane of real SGLang, judged by what the engine itself recorded.
//!
//! Sets the engine up once (10 GB, kept in the cache), then runs each case twice, with the agent attached before the
//! engine's connections exist and after they are open, and scores the agent's events against the engine's own record.

mod case;
mod report;
mod servers;
mod setup;
mod spans;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use self::case::{Attach, Backend, CASES, Case, SERVERS};
use self::report::Row;
use crate::install;

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Scenarios to run, by letter (a b c f g h k l m s u v), nixl, servers; all of them by default
    scenarios: Vec<String>,
    /// Attach the agent only before, or only after, the engine's connections are open
    #[arg(long, value_enum)]
    attach: Option<Attach>,
    /// This binary of the agent instead of a fresh release build
    #[arg(long)]
    agent: Option<PathBuf>,
    /// A further argument for `roomtrace run` (repeatable)
    #[arg(long = "agent-arg", allow_hyphen_values = true)]
    agent_flags: Vec<String>,
    /// Keep logs, truth and events here (a directory under target/ by default)
    #[arg(long)]
    out: Option<PathBuf>,
    /// Write the results into docs/compatibility.md
    #[arg(long)]
    write_docs: bool,
    /// Only set the engine up
    #[arg(long)]
    setup_only: bool,
    /// Print what would be run
    #[arg(long)]
    list: bool,
}

/// Runs it.
pub(crate) fn run(args: &Args) -> Result<()> {
    let cases = chosen(&args.scenarios)?;
    let attaches = args.attach.map_or_else(|| vec![Attach::Before, Attach::After], |a| vec![a]);
    if args.list {
        for case in &cases {
            println!("{:<10} {}", case.name, case.arguments().join(" "));
        }
        return Ok(());
    }
    let engine = setup::engine()?;
    if args.setup_only {
        return Ok(());
    }
    let agent = match &args.agent {
        Some(path) => path.canonicalize().with_context(|| format!("the agent {}", path.display()))?,
        None => build()?,
    };
    let out = args.out.clone().unwrap_or_else(|| install::target().join("engine"));
    let mut rows = Vec::new();
    for attach in attaches {
        for case in &cases {
            eprintln!("== {} (agent attached {attach} the connections) …", case.name);
            let dir = out.join(format!("{}-{attach}", case.name));
            let outcome = case::run(case, attach, &engine, &agent, &args.agent_flags, &dir);
            let row = Row::new(case, attach, outcome, &dir);
            eprintln!("{row}");
            rows.push(row);
        }
    }
    println!("{}", report::table(&rows));
    if args.write_docs {
        report::write_docs(&rows)?;
    }
    let wrong: Vec<String> = rows.iter().filter(|r| !r.is_right()).map(Row::name).collect();
    if !wrong.is_empty() {
        bail!("not right: {}; their logs are under {}", wrong.join(", "), out.display());
    }
    Ok(())
}

/// The cases that hold the scenarios asked for, cut down to these.
fn chosen(scenarios: &[String]) -> Result<Vec<Case>> {
    let wanted = |s: &str| scenarios.iter().any(|w| w == s);
    if let Some(unknown) = scenarios
        .iter()
        .find(|s| *s != "nixl" && *s != SERVERS && !CASES.iter().any(|c| c.scenarios.contains(&s.as_str())))
    {
        bail!(
            "unknown scenario `{unknown}`: known are a b c f g h k l m s u v, nixl for its own backend, and servers for two complete servers"
        );
    }
    let pick = |case: &Case| {
        let whole = if case.name == SERVERS {
            Some(SERVERS)
        } else {
            (case.backend == Backend::Nixl).then_some("nixl")
        };
        if scenarios.is_empty() || whole.is_some_and(wanted) {
            return Some(case.clone());
        }
        let parted = whole.is_none();
        let kept: Vec<&'static str> =
            case.scenarios.iter().copied().filter(|s| parted && wanted(s)).collect();
        (!kept.is_empty()).then(|| Case { scenarios: kept.into(), ..case.clone() })
    };
    Ok(CASES.iter().filter_map(pick).collect())
}

/// Builds the agent and says where it is.
fn build() -> Result<PathBuf> {
    install::cargo(&["build", "--release", "--package", "roomtrace"])?;
    Ok(install::target().join("release/roomtrace"))
}

/// A file of the project that the runs use.
fn script(path: &str) -> PathBuf {
    install::root().join(path)
}

/// Reads a JSON lines file.
fn json_lines(path: &Path) -> Result<Vec<serde_json::Value>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    text.lines()
        .filter(|line| !line.trim().is_empty())
        .map(|line| {
            serde_json::from_str(line).with_context(|| format!("{}: not JSON: {line}", path.display()))
        })
        .collect()
}
