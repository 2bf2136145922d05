//! The agent as the demo, the live checks, the engine runs and the benchmarks start it.

use std::fs::File;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::install;

/// How long the agent may take to be ready, and to end. On an idle machine it needs well under a second for either.
const PATIENCE: Duration = Duration::from_mins(1);

/// How a start went.
pub(crate) enum Start {
    /// It observes.
    Observing(Agent),
    /// This host cannot be observed; what the agent said of it.
    NotPossible(String),
}

/// A running agent. Dropping it kills it.
pub(crate) struct Agent {
    child: Child,
    listen: SocketAddr,
    log: PathBuf,
}

impl Agent {
    /// Starts it where `command` (the agent, or what comes to run it with these arguments) leads, with its HTTP server at
    /// `listen`, which is free.
    pub(crate) fn start_at(
        command: Command,
        arguments: &[String],
        listen: SocketAddr,
        events: &Path,
        log: &Path,
    ) -> Result<Start> {
        let start = Self::attempt(command, arguments, listen, events, log)?;
        start.with_context(|| format!("{listen} is taken; see {}", log.display()))
    }

    /// Starts `program run` with its events going to a file and waits until it says that it is ready.
    pub(crate) fn start(program: &Path, arguments: &[String], events: &Path, log: &Path) -> Result<Start> {
        for _ in 0..5 {
            let listen =
                TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).context("find a free port")?;
            if let Some(start) = Self::attempt(Command::new(program), arguments, listen, events, log)? {
                return Ok(start);
            }
        }
        bail!("every port that was free was taken before the agent could listen there; see {}", log.display())
    }

    /// `None`: another process took the port first.
    fn attempt(
        mut command: Command,
        arguments: &[String],
        listen: SocketAddr,
        events: &Path,
        log: &Path,
    ) -> Result<Option<Start>> {
        let file = File::create(log).with_context(|| format!("create {}", log.display()))?;
        let child = command
            // What one run knows is none of the next one's.
            .args(["run", "--no-state", "--listen", &listen.to_string(), "--events"])
            .arg(events)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("start {}", command.get_program().display()))?;
        let mut agent = Self { child, listen, log: log.to_owned() };
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = agent.child.try_wait().context("wait for the agent")? {
                let said = std::fs::read_to_string(log).unwrap_or_default();
                // 3: cannot observe. Anything else is the agent's own fault.
                if status.code() == Some(3) {
                    return Ok(Some(Start::NotPossible(said.trim().to_owned())));
                }
                if said.contains("cannot listen on") {
                    return Ok(None);
                }
                bail!("the agent ended with {status}: {}", said.trim());
            }
            if agent.get("/readyz").is_ok() {
                return Ok(Some(Start::Observing(agent)));
            }
            if Instant::now() >= end {
                bail!("the agent is not ready after {} s; see {}", PATIENCE.as_secs(), log.display());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Its address.
    pub(crate) fn api(&self) -> String {
        format!("http://{}", self.listen)
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Body of a page, where the answer is 200. A busy agent is asked again.
    pub(crate) fn get(&self, path: &str) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let (head, body) = ask(self.listen, path)?;
            match head.split_whitespace().nth(1) {
                Some("200") => return Ok(body),
                Some("503") if path != "/readyz" && Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                _ => bail!("{path}: {}", head.lines().next().unwrap_or_default()),
            }
        }
    }

    /// Sum of a metric's values whose labels contain each of `labels` (`kind="STATUS"`); `None` where there is none.
    pub(crate) fn metric(&self, name: &str, labels: &[&str]) -> Result<Option<f64>> {
        let text = self.get("/metrics")?;
        let values: Vec<f64> = text
            .lines()
            .filter(|l| l.starts_with(name) && l[name.len()..].starts_with(['{', ' ']))
            .filter(|l| labels.iter().all(|label| l.contains(label)))
            .filter_map(|l| l.rsplit(' ').next()?.parse().ok())
            .collect();
        Ok((!values.is_empty()).then(|| values.iter().sum()))
    }

    /// Fails if it has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            Some(status) => bail!("the agent ended with {status}; see {}", self.log.display()),
            None => Ok(()),
        }
    }

    /// Ends it as an operator would.
    pub(crate) fn stop(mut self) -> Result<()> {
        let status = terminate(&mut self.child)?;
        if !status.success() {
            bail!("at SIGTERM the agent ended with {status}; see {}", self.log.display());
        }
        Ok(())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Head and body of an answer.
fn ask(at: SocketAddr, path: &str) -> Result<(String, String)> {
    let mut stream = TcpStream::connect_timeout(&at, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    write!(stream, "GET {path} HTTP/1.0\r\nHost: {at}\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
    Ok((head.to_owned(), body.to_owned()))
}

/// Body of a page of any server, where the answer is 200.
pub(crate) fn get(at: SocketAddr, path: &str) -> Result<String> {
    let (head, body) = ask(at, path)?;
    if head.split_whitespace().nth(1) != Some("200") {
        bail!("{path}: {}", head.lines().next().unwrap_or_default());
    }
    Ok(body)
}

/// SIGTERM, and the end within [`PATIENCE`].
pub(crate) fn terminate(child: &mut Child) -> Result<ExitStatus> {
    install::run(Command::new("kill").arg(child.id().to_string()))?;
    let end = Instant::now() + PATIENCE;
    while Instant::now() < end {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    bail!("process {} does not end at SIGTERM", child.id())
}
