//! Stub, replaced by its owner.

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {}

/// Runs it.
pub(crate) fn run(_: &Args) -> anyhow::Result<()> {
    anyhow::bail!("not written yet")
}
