//! `docs/configuration.md`, written from what there is: keys and defaults from [`Config`], what a key may hold from
//! [`allowed`], its reason from the comments of the shipped file, flags and variables from the command line itself.
//! Only the test at the end, which also rewrites the page, uses it.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::CommandFactory as _;
use serde_json::Value;

use super::{Config, allowed};
use crate::cli::Cli;

const SHIPPED: &str = include_str!("../../../roomtrace.yaml");

/// The comment in front of each key of the shipped file, by full name.
fn comments() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let mut path: Vec<(usize, &str)> = Vec::new();
    let mut comment = String::new();
    for line in SHIPPED.lines() {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        if let Some(said) = text.strip_prefix('#') {
            if !comment.is_empty() {
                comment.push(' ');
            }
            comment.push_str(said.trim());
        } else if let Some((key, _)) = text.split_once(':') {
            path.retain(|(outer, _)| *outer < indent);
            path.push((indent, key));
            let name = path.iter().map(|(_, key)| *key).collect::<Vec<_>>().join(".");
            found.insert(name, std::mem::take(&mut comment));
        } else {
            // What stands above an empty line is about the file.
            comment.clear();
        }
    }
    found
}

/// Rows of the keys in `value`, in the order of the sections.
fn keys(value: &Value, at: &str, comments: &BTreeMap<String, String>, out: &mut String) {
    if let Some(fields) = value.as_object().filter(|fields| !fields.is_empty()) {
        for (name, field) in fields {
            let at = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
            keys(field, &at, comments, out);
        }
        return;
    }
    let allowed = allowed::at(at).unwrap_or_default();
    // Some stand on their section's line.
    let section = || at.rsplit_once('.').filter(|_| at.matches('.').count() > 1);
    let own = comments.get(at).or_else(|| comments.get(section()?.0));
    let reason = own.map_or("", String::as_str);
    let _ = writeln!(out, "| `{at}` | `{value}` | {} | {} |", cell(&allowed), cell(reason));
}

/// A text that cannot end a cell of a table.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn page() -> String {
    let comments = comments();
    let mut out = String::from(
        "# Configuration\n\n\
         <!-- Written from the code and agent/roomtrace.yaml by a test of the agent: \
         `ROOMTRACE_BLESS=1 cargo test -p roomtrace --lib reference` rewrites it. -->\n\n\
         One YAML file (`--config FILE` or `ROOMTRACE_CONFIG`); none is needed. A flag counts before its variable, that before the file. \
         An unknown key or value is refused with its place, and what was probably meant. `roomtrace config check FILE` checks a file, \
         `roomtrace config show` prints what results. [agent/roomtrace.yaml](../agent/roomtrace.yaml) is the same as a file to begin from.\n",
    );
    let config = serde_json::to_value(Config::default()).unwrap_or_default();
    for (section, value) in config.as_object().into_iter().flatten() {
        let _ = write!(out, "\n## {section}\n\n");
        if let Some(about) = comments.get(section).filter(|about| !about.is_empty()) {
            let _ = write!(out, "{about}\n\n");
        }
        out.push_str("| Key | Default | May be | About |\n|---|---|---|---|\n");
        keys(value, section, &comments, &mut out);
    }
    let root = Cli::command();
    for command in ["run", "replay", "rooms"] {
        let Some(command) = root.find_subcommand(command) else { continue };
        let _ = write!(out, "\n## Flags of `roomtrace {}`\n\n", command.get_name());
        out.push_str("| Flag | Variable | About |\n|---|---|---|\n");
        for flag in command.get_arguments().filter(|a| a.get_long().is_some_and(|l| l != "help")) {
            let value = flag.get_value_names().filter(|_| flag.get_action().takes_values());
            let value = value.and_then(<[_]>::first).map_or(String::new(), |v| format!(" {v}"));
            let variable = flag.get_env().map_or(String::new(), |v| format!("`{}`", v.to_string_lossy()));
            let about = flag.get_help().map_or(String::new(), ToString::to_string);
            let _ = writeln!(
                out,
                "| `--{}{value}` | {variable} | {} |",
                flag.get_long().unwrap_or_default(),
                cell(&about)
            );
        }
    }
    out.push_str(
        "\n`ROOMTRACE_LOG` (`error`, `warn`, `info`, `debug`, or by module as `roomtrace::kernel=debug`) filters the agent's own log, which goes to standard error.\n",
    );
    out
}

mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn missing(value: &Value, at: &str, comments: &BTreeMap<String, String>, found: &mut Vec<String>) {
        if comments.contains_key(at) && !value.is_object() {
            return;
        }
        match value.as_object().filter(|fields| !fields.is_empty()) {
            Some(fields) => {
                for (name, field) in fields {
                    // Some sections stand on one line.
                    let whole = SHIPPED.contains(&format!("{}: {{", at.rsplit('.').next().unwrap()));
                    if !whole {
                        let at = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
                        missing(field, &at, comments, found);
                    }
                }
            }
            None if !comments.contains_key(at) => found.push(at.to_owned()),
            None => {}
        }
    }

    #[test]
    fn the_shipped_file_has_every_key() {
        let mut found = Vec::new();
        missing(&serde_json::to_value(Config::default()).unwrap(), "", &comments(), &mut found);
        assert!(found.is_empty(), "not in agent/roomtrace.yaml: {found:?}");
    }

    #[test]
    fn the_reference_is_what_the_code_says() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");
        let now = page();
        if std::env::var_os("ROOMTRACE_BLESS").is_some() {
            std::fs::write(path, &now).unwrap();
        }
        let written = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            written == now,
            "docs/configuration.md is stale: set ROOMTRACE_BLESS=1 and run this test again"
        );
    }
}
