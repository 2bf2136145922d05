//! The services between the agents and who looks at them: Collectors of both tiers from the files in `collector-config/`,
//! and Jaeger.

use std::fs::File;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::hosts::{Host, Network};
use crate::agent::{get, terminate};
use crate::{install, services};

/// How long a service may take to be ready.
const PATIENCE: Duration = Duration::from_mins(1);

/// Seconds from a room's first span to the decision on its trace: as in real fleets longer than a pin takes to be called one, which
/// here is a good 10 s.
pub(super) const DECISION_WAIT: u64 = 25;

/// Percent of the healthy rooms that are kept.
pub(super) const SHARE: u64 = 25;

/// The combinations of files that somebody would run.
const SETS: [&[&str]; 6] = [
    &["node.yaml"],
    &["node.yaml", "node-static.yaml"],
    &["node.yaml", "node-kubernetes.yaml"],
    &["node.yaml", "node-static.yaml", "node-kubernetes.yaml"],
    &["gateway.yaml"],
    &["gateway.yaml", "clickhouse.yaml"],
];

/// Programs and places.
pub(super) struct Tiers<'a> {
    otelcol: PathBuf,
    jaeger: PathBuf,
    dir: &'a Path,
    network: &'a Network,
}

/// A running service. Dropping it kills it.
pub(super) struct Running {
    child: Child,
    log: PathBuf,
}

fn config(name: &str) -> PathBuf {
    install::root().join("collector-config").join(name)
}

fn with_configs(command: &mut Command, names: &[&str]) {
    for name in names {
        command.arg("--config").arg(config(name));
    }
}

/// The Collector reads every shipped file as it would at a start. How many combinations there are.
pub(super) fn validate() -> Result<usize> {
    let otelcol = services::build(&services::OTELCOL)?;
    for names in SETS {
        let mut command = Command::new(&otelcol);
        command.arg("validate").env("NODE_NAME", "a-node");
        with_configs(&mut command, names);
        install::output(&mut command)?;
    }
    Ok(SETS.len())
}

impl<'a> Tiers<'a> {
    pub(super) fn build(network: &'a Network, dir: &'a Path) -> Result<Self> {
        let (otelcol, jaeger) = (services::build(&services::OTELCOL)?, services::build(&services::JAEGER)?);
        Ok(Self { otelcol, jaeger, dir, network })
    }

    /// Where this process's own services are.
    pub(super) fn here(&self, port: u16) -> SocketAddr {
        SocketAddr::new(self.network.here, port)
    }

    pub(super) fn jaeger(&self) -> Result<Running> {
        let mut command = Command::new(&self.jaeger);
        command.arg("--config").arg(install::root().join("xtask/fleet/jaeger.yaml"));
        command.env("HOST", self.network.here.to_string());
        self.start(&mut command, "jaeger", self.here(14133), "/status")
    }

    /// Where gateway `n`, counted from 1, takes spans.
    fn gateway_at(&self, n: u16) -> SocketAddr {
        self.here(4400 + n)
    }

    /// What Prometheus scrapes of the gateways: span metrics, and their own.
    pub(super) fn gateway_pages(&self) -> [[SocketAddr; 2]; 2] {
        [[self.here(9461), self.here(9462)], [self.here(8881), self.here(8882)]]
    }

    pub(super) fn gateway(&self, n: u16) -> Result<Running> {
        let mut command = Command::new(&self.otelcol);
        with_configs(&mut command, &["gateway.yaml"]);
        let here = self.network.here.to_string();
        command
            .env("ROOMTRACE_GATEWAY_GRPC", self.gateway_at(n).to_string())
            .env("ROOMTRACE_GATEWAY_HEALTH", self.here(13200 + n).to_string())
            .env("ROOMTRACE_GATEWAY_PROMETHEUS", self.here(9460 + n).to_string())
            .env("ROOMTRACE_GATEWAY_METRICS_HOST", here)
            .env("ROOMTRACE_GATEWAY_METRICS_PORT", (8880 + n).to_string())
            .env("ROOMTRACE_GATEWAY_QUEUE", self.dir.join(format!("gateway-{n}")))
            .env("ROOMTRACE_TRACES", self.here(4317).to_string())
            .env("ROOMTRACE_DECISION_WAIT", format!("{DECISION_WAIT}s"))
            .env("ROOMTRACE_SHARE_PERCENT", SHARE.to_string())
            .env("ROOMTRACE_SPAN_METRICS_INTERVAL", "2s");
        self.start(&mut command, &format!("gateway-{n}"), self.here(13200 + n), "/")
    }

    /// The Collector beside a host's agent, at its usual ports there.
    pub(super) fn node(&self, host: &Host) -> Result<Running> {
        let mut command = host.command(&self.otelcol);
        with_configs(&mut command, &["node.yaml", "node-static.yaml"]);
        command
            .env("ROOMTRACE_NODE_QUEUE", self.dir.join(format!("node-{}", host.name)))
            .env("ROOMTRACE_NODE_HEALTH", host.at(13133).to_string())
            .env("ROOMTRACE_NODE_METRICS_HOST", host.address.to_string())
            .env("ROOMTRACE_GATEWAY_1", self.gateway_at(1).to_string())
            .env("ROOMTRACE_GATEWAY_2", self.gateway_at(2).to_string());
        self.start(&mut command, &format!("node-{}", host.name), host.at(13133), "/")
    }

    fn start(&self, command: &mut Command, name: &str, health: SocketAddr, page: &str) -> Result<Running> {
        let log = self.dir.join(format!("{name}.log"));
        let file = File::options().create(true).append(true).open(&log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("start {name}"))?;
        let mut running = Running { child, log };
        let end = Instant::now() + PATIENCE;
        while get(health, page).is_err() {
            if let Some(status) = running.child.try_wait()? {
                bail!("{name} ended with {status}; see {}", running.log.display());
            }
            if Instant::now() > end {
                bail!("{name} is not ready; see {}", running.log.display());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(running)
    }
}

impl Running {
    /// SIGKILL: nothing is tidied up.
    pub(super) fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// SIGTERM, and its end.
    pub(super) fn stop(mut self) -> Result<()> {
        terminate(&mut self.child).map(drop)
    }

    /// It hangs: its connections stay, nothing answers.
    pub(super) fn freeze(&self) -> Result<()> {
        self.signal("-STOP")
    }

    /// It no longer hangs.
    pub(super) fn thaw(&self) -> Result<()> {
        self.signal("-CONT")
    }

    fn signal(&self, which: &str) -> Result<()> {
        install::run(Command::new("kill").args([which, &self.child.id().to_string()]))
    }

    /// Resident memory, bytes.
    pub(super) fn memory(&self) -> Result<u64> {
        let text = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let line = text.lines().find_map(|l| l.strip_prefix("VmRSS:")).context("no VmRSS")?;
        Ok(line.trim().trim_end_matches(" kB").trim().parse::<u64>()? * 1024)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
