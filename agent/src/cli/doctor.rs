//! `roomtrace doctor`: what this host allows, and what to do about the rest.

use std::fmt::Write as _;

use serde_json::json;

use super::{End, Failure, Outcome, print};
use crate::kernel;

/// Prints every check; ends with 3 when one fails: this host cannot be observed.
pub(super) fn doctor(as_json: bool) -> Outcome {
    let checks = kernel::preflight();
    let failed = checks.iter().filter(|c| !c.ok).count();
    let mut out = String::new();
    if as_json {
        let list: Vec<_> = checks
            .iter()
            .map(|c| {
                json!({"name": c.name, "ok": c.ok, "found": c.found, "why_needed": c.why_needed,
                       "what_to_do": (!c.ok).then_some(&c.what_to_do)})
            })
            .collect();
        let text = serde_json::to_string_pretty(&json!({"ok": failed == 0, "checks": list}))
            .map_err(|e| Failure::usage(anyhow::Error::new(e)))?;
        out = text + "\n";
    } else {
        for c in &checks {
            let _ = writeln!(out, "{} {}: {}", if c.ok { "ok  " } else { "FAIL" }, c.name, c.found);
            if !c.ok {
                let _ = writeln!(out, "       needed for: {}", c.why_needed);
                let _ = writeln!(out, "       what to do: {}", c.what_to_do);
            }
        }
        let _ = writeln!(
            out,
            "{}",
            if failed == 0 {
                "this host can be observed".to_owned()
            } else {
                format!("{failed} of {} checks failed", checks.len())
            }
        );
    }
    print(&out)?;
    Ok(if failed == 0 { End::Fine } else { End::CannotObserve })
}
