//! `cargo xtask lint`: formatting, clippy, documentation, dependency rules. Warnings are errors.

use std::process::Command;

use anyhow::Result;

use crate::install;

/// cargo-deny release that the rules in `deny.toml` were written for.
const CARGO_DENY: &str = "0.20.2";

/// Runs every lint.
pub(crate) fn run() -> Result<()> {
    install::debian(&["libzmq3-dev", "pkg-config"])?;
    install::cargo(&["fmt", "--all", "--check"])?;
    install::cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])?;
    install::run(
        install::cargo_command()
            .args(["doc", "--workspace", "--no-deps", "--document-private-items"])
            .env("RUSTDOCFLAGS", "-D warnings"),
    )?;
    let deny = install::cargo_tool("cargo-deny", CARGO_DENY, &[])?;
    install::run(
        Command::new(deny)
            .args(["--workspace", "check", "--hide-inclusion-graph", "bans", "licenses", "sources"])
            .current_dir(install::root()),
    )
}
