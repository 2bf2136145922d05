//! Commands: what a person or an init system starts. The edges meet here; no logic of the stages.

mod bundle;
mod clean;
pub mod config;
mod doctor;
mod engines;
mod gpus;
mod measure;
mod network;
mod peers;
mod probes;
mod recording;
mod remote;
mod replay;
mod run;
mod spans;
mod top;
mod unread;

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use config::{Config, DEFAULT_LISTEN, Hook};

use crate::export::counters::{Counters, Reason, Signal};
use crate::prose::{explain, picture};

/// How a command ended; its number is the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Nothing to report.
    Fine = 0,
    /// Pinned rooms (`rooms --pinned`, `replay --fail-on-pinned`).
    Findings = 1,
    /// The command line, the configuration or the input is wrong.
    Usage = 2,
    /// This host cannot be observed.
    CannotObserve = 3,
}

impl From<End> for ExitCode {
    fn from(end: End) -> Self {
        Self::from(end as u8)
    }
}

/// An error with the exit code it leads to.
#[derive(Debug)]
struct Failure {
    end: End,
    error: anyhow::Error,
}

impl Failure {
    fn usage(error: impl Into<anyhow::Error>) -> Self {
        Self { end: End::Usage, error: error.into() }
    }

    fn cannot_observe(error: impl Into<anyhow::Error>) -> Self {
        Self { end: End::CannotObserve, error: error.into() }
    }
}

type Outcome = Result<End, Failure>;

/// Finds rooms that prefill/decode serving has pinned: which, who owes the next move, and why.
#[derive(Parser)]
#[command(
    name = "roomtrace",
    version,
    about,
    after_help = "Exit codes: 0 fine, 1 findings, 2 usage or configuration, 3 cannot observe."
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Observe this host until SIGTERM.
    Run(RunArgs),
    /// Put a packet capture (pcap, pcapng) or a recording (`run --record`) through the same code.
    Replay(ReplayArgs),
    /// List rooms of a running agent.
    Rooms(RoomsArgs),
    /// Tell everything known of one room.
    Explain(ExplainArgs),
    /// Watch a running agent in the terminal: rooms, findings, peers, loss, cost.
    Top(top::TopArgs),
    /// Put what a running agent knows into one archive, for a report to others.
    Bundle(BundleArgs),
    /// Check what this host allows and say what to do about the rest.
    Doctor(DoctorArgs),
    /// Check or show the configuration.
    #[command(subcommand)]
    Config(ConfigCommand),
}

/// Flags that override the configuration file.
#[derive(Args, Debug, Default)]
struct Overrides {
    /// Configuration file (YAML).
    #[arg(long, env = "ROOMTRACE_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Write JSON lines to a file, or to standard output with `-`.
    #[arg(long, env = "ROOMTRACE_EVENTS", value_name = "FILE")]
    events: Option<PathBuf>,
    /// Write OTLP JSON lines (traces and logs) to a file.
    #[arg(long, env = "ROOMTRACE_OTLP_FILE", value_name = "FILE")]
    otlp_file: Option<PathBuf>,
    /// Send traces, logs and metrics to this OTLP endpoint (`OTEL_EXPORTER_OTLP_…` variables work too).
    #[arg(long, env = "ROOMTRACE_OTLP_ENDPOINT", hide_env_values = true, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// No room is overdue before this (for example `10s`).
    #[arg(long, env = "ROOMTRACE_FLOOR", value_name = "DURATION", value_parser = crate::duration_text::parse)]
    floor: Option<Duration>,
    /// Do not read requests at HTTP ports: HTTP is foreign then, and rooms are known by control messages alone.
    #[arg(long, env = "ROOMTRACE_NO_REQUESTS", value_parser = clap::builder::FalseyValueParser::new())]
    no_requests: bool,
}

#[derive(Args)]
struct RunArgs {
    #[command(flatten)]
    overrides: Overrides,
    /// Kernel hooks to use.
    #[arg(long, env = "ROOMTRACE_HOOK", value_enum)]
    hook: Option<Hook>,
    /// Watch this port besides what is learned (may be given several times).
    #[arg(long = "port", value_name = "PORT")]
    ports: Vec<u16>,
    /// Prefix of process names that are engines (may be given several times; replaces the configured ones).
    #[arg(long = "engine-comm", value_name = "PREFIX")]
    engine_comms: Vec<String>,
    /// Where the HTTP server listens.
    #[arg(long, env = "ROOMTRACE_LISTEN", value_name = "ADDR:PORT")]
    listen: Option<SocketAddr>,
    /// No HTTP server.
    #[arg(long, conflicts_with = "listen")]
    no_http: bool,
    /// Where a restarted agent finds what it knew (default: /var/lib/roomtrace/state).
    #[arg(long, env = "ROOMTRACE_STATE", value_name = "FILE")]
    state: Option<PathBuf>,
    /// Keep what the rooms were told in this file, for `roomtrace replay` (256 MiB at most, the oldest go first).
    #[arg(long, env = "ROOMTRACE_RECORD", value_name = "FILE")]
    record: Option<PathBuf>,
    /// Do not read the GPUs.
    #[arg(long, env = "ROOMTRACE_NO_GPU", value_parser = clap::builder::FalseyValueParser::new())]
    no_gpu: bool,
    /// No state file: a restarted agent knows nothing of what was pinned before.
    #[arg(long, conflicts_with = "state")]
    no_state: bool,
}

#[derive(Args)]
struct ReplayArgs {
    /// Packet capture or recording.
    file: PathBuf,
    #[command(flatten)]
    overrides: Overrides,
    /// Let time run on after the last packet.
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = crate::duration_text::parse)]
    extend: Duration,
    /// Tell everything known of one room at the end.
    #[arg(long, value_name = "ROOM")]
    explain: Option<u64>,
    /// End with 1 when a room is pinned at the end.
    #[arg(long)]
    fail_on_pinned: bool,
}

/// Where a running agent answers.
#[derive(Args)]
struct Api {
    /// The agent's HTTP address.
    #[arg(long, env = "ROOMTRACE_API", hide_env_values = true, value_name = "URL", default_value_t = format!("http://{DEFAULT_LISTEN}"))]
    api: String,
}

#[derive(Args)]
struct RoomsArgs {
    #[command(flatten)]
    api: Api,
    /// Only pinned rooms; end with 1 when there is one.
    #[arg(long)]
    pinned: bool,
    /// The API's JSON instead of a line for each room.
    #[arg(long)]
    json: bool,
}

#[derive(Args)]
struct ExplainArgs {
    /// Room number.
    room: u64,
    /// Which use of the number (0 is the first that the agent saw); without it the newest.
    #[arg(long, value_name = "N")]
    incarnation: Option<u32>,
    #[command(flatten)]
    api: Api,
    /// The API's JSON instead of text.
    #[arg(long)]
    json: bool,
    /// Also draw its time line into an SVG file: both sides, their messages and phases, what GPUs and network moved.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

#[derive(Args)]
struct BundleArgs {
    #[command(flatten)]
    api: Api,
    /// Where the archive goes (default: roomtrace-bundle-TIME.tar.gz here).
    #[arg(long, short, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Configuration file of the agent, to go with it, without secrets.
    #[arg(long, env = "ROOMTRACE_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// A recording of the agent (`run --record`) to go with it.
    #[arg(long, env = "ROOMTRACE_RECORD", value_name = "FILE")]
    record: Option<PathBuf>,
    /// Replace addresses, names of hosts, containers, pods and GPUs, and request ids.
    #[arg(long)]
    anonymous: bool,
}

#[derive(Args)]
struct DoctorArgs {
    /// Configuration file of the agent: names of engine processes, the GPU driver's library.
    #[arg(long, env = "ROOMTRACE_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// JSON instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Subcommand)]
enum ConfigCommand {
    /// Check a configuration file; end with 2 when it is wrong.
    Check {
        /// Which file.
        #[arg(env = "ROOMTRACE_CONFIG")]
        file: PathBuf,
    },
    /// Print the configuration that results from file, environment and flags.
    Show(Box<RunArgs>),
}

impl Overrides {
    fn apply(&self, config: &mut Config) {
        if let Some(events) = &self.events {
            config.export.events = Some(events.clone());
        }
        if let Some(file) = &self.otlp_file {
            config.export.otlp.file = Some(file.clone());
        }
        if let Some(endpoint) = &self.otlp_endpoint {
            config.export.otlp.endpoint = Some(endpoint.clone().into());
        }
        if let Some(floor) = self.floor {
            config.rooms.floor = floor;
            config.rooms.ceiling = config.rooms.ceiling.max(floor);
        }
        config.capture.requests &= !self.no_requests;
    }

    fn resolve(&self) -> Result<Config, Failure> {
        let mut config = self
            .config
            .as_deref()
            .map_or_else(|| Ok(Config::default()), Config::read)
            .map_err(Failure::usage)?;
        self.apply(&mut config);
        config.check().map_err(Failure::usage)?;
        Ok(config)
    }
}

impl DoctorArgs {
    fn resolve(&self) -> Result<Config, Failure> {
        self.config.as_deref().map_or_else(|| Ok(Config::default()), Config::read).map_err(Failure::usage)
    }
}

impl RunArgs {
    fn resolve(&self) -> Result<Config, Failure> {
        let mut config = self.overrides.resolve()?;
        if let Some(hook) = self.hook {
            config.capture.hook = hook;
        }
        config.capture.ports.extend_from_slice(&self.ports);
        if !self.engine_comms.is_empty() {
            config.capture.engine_comms.clone_from(&self.engine_comms);
        }
        if let Some(listen) = self.listen {
            config.http.listen = listen;
        }
        config.http.enabled &= !self.no_http;
        if let Some(file) = &self.state {
            config.state.file = Some(file.clone());
        }
        if let Some(file) = &self.record {
            config.record.file = Some(file.clone());
        }
        config.gpu.enabled &= !self.no_gpu;
        if self.no_state {
            config.state.file = None;
        }
        config.check().map_err(Failure::usage)?;
        Ok(config)
    }
}

/// Parses the command line, runs the command and reports its error, if any, in one message on standard error.
pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are no errors and go to standard output; clap knows.
            let end = if error.use_stderr() { End::Usage } else { End::Fine };
            drop(error.print());
            return end.into();
        }
    };
    let outcome = match cli.command {
        Command::Run(args) => args.resolve().and_then(|config| run::run(&config)),
        Command::Replay(args) => replay::replay(&args),
        Command::Rooms(args) => remote::rooms(&args),
        Command::Explain(args) => remote::explain(&args),
        Command::Top(args) => top::top(&args),
        Command::Bundle(args) => bundle::bundle(&args),
        Command::Doctor(args) => args.resolve().and_then(|config| doctor::doctor(&config, args.json)),
        Command::Config(ConfigCommand::Check { file }) => check(&file),
        Command::Config(ConfigCommand::Show(args)) => args.resolve().and_then(|config| show(&config)),
    };
    match outcome {
        Ok(end) => end.into(),
        Err(Failure { end, error }) => {
            let mut line = String::from("roomtrace: ");
            for (n, cause) in error.chain().enumerate() {
                let text = cause.to_string();
                // thiserror messages often contain their source already.
                if n == 0 {
                    line.push_str(&text);
                } else if !line.contains(&text) {
                    line.push_str(": ");
                    line.push_str(&text);
                }
            }
            drop(writeln!(std::io::stderr(), "{line}"));
            end.into()
        }
    }
}

/// What outputs could not deliver, as a sentence; `None` when all arrived.
fn dropped(counters: &Counters) -> Option<String> {
    let parts: Vec<String> = Signal::ALL
        .into_iter()
        .flat_map(|signal| Reason::ALL.into_iter().map(move |reason| (signal, reason)))
        .map(|(signal, reason)| (signal, reason, counters.dropped(signal, reason)))
        .filter(|(_, _, n)| *n > 0)
        .map(|(signal, reason, n)| format!("{n} of {} ({})", signal.label(), reason.label()))
        .collect();
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// Log lines go to standard error; `ROOMTRACE_LOG` filters them.
fn logging() {
    // What the exporters' own log has to say is told in words of this program (`export/otlp`).
    const QUIET: [&str; 3] = ["opentelemetry=off", "opentelemetry_sdk=off", "opentelemetry-otlp=off"];
    let filter = EnvFilter::try_from_env("ROOMTRACE_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let filter = QUIET.iter().filter_map(|d| d.parse().ok()).fold(filter, EnvFilter::add_directive);
    // A second initialisation (tests that run the command in one process) keeps the first.
    drop(tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).try_init());
}

/// Where asynchronous work (exports, HTTP) runs. Two threads: none of it is urgent.
fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .thread_name("roomtrace-io")
        .enable_all()
        .build()
        .map_err(|e| Failure::cannot_observe(anyhow::Error::new(e).context("cannot start the I/O threads")))
}

/// What of the traffic is read, and bounds.
fn limits(config: &Config) -> crate::control::Limits {
    crate::control::Limits { requests: config.capture.requests, ..crate::control::Limits::default() }
}

/// The room table's settings.
fn room_config(config: &Config) -> crate::rooms::Config {
    let nanos = |d: Duration| u64::try_from(d.as_nanos()).unwrap_or(u64::MAX);
    crate::rooms::Config {
        floor: nanos(config.rooms.floor),
        ceiling: nanos(config.rooms.ceiling),
        factor: u64::from(config.rooms.factor),
        max_rooms: usize::try_from(config.rooms.max).unwrap_or(usize::MAX),
        ..crate::rooms::Config::default()
    }
}

/// Upstream reports that a room's verdict may be an instance of.
fn known_issues(room: &crate::rooms::model::RoomSnapshot) -> Vec<crate::verdict::model::KnownIssue> {
    room.verdict
        .as_ref()
        .map_or_else(Vec::new, |v| crate::verdict::known::known_issues(v.class, room.backend, room.releases))
}

/// Writes to standard output; a closed pipe (`| head`) ends the command quietly.
fn print(text: &str) -> Outcome {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Ok(()) => Ok(End::Fine),
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(End::Fine),
        Err(e) => Err(Failure::usage(anyhow::Error::new(e).context("cannot write to standard output"))),
    }
}

fn check(file: &std::path::Path) -> Outcome {
    Config::read(file).map_err(Failure::usage)?;
    print(&format!("{}: fine\n", file.display()))
}

fn show(config: &Config) -> Outcome {
    let text = serde_saphyr::to_string(config)
        .map_err(|e| Failure::usage(anyhow::anyhow!("cannot print the configuration: {e}")))?;
    print(&format!("{}\n", text.trim_end()))
}
