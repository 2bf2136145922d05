//! The workload (`xtask/workload`) as the demo and the live checks run it: processes that speak over the real libzmq.

use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::install;

/// How long it may take to open its connections.
const OPEN: Duration = Duration::from_mins(1);

/// Installs what it links and its build needs, and builds it.
pub(crate) fn build() -> Result<()> {
    build_as(&["--quiet"])
}

/// The same, with cargo's own word on how far it is.
pub(crate) fn build_telling() -> Result<()> {
    build_as(&[])
}

fn build_as(how: &[&str]) -> Result<()> {
    install::debian(&["libzmq3-dev", "pkg-config"])?;
    install::cargo(&[&["build", "--package", "pd-workload"], how].concat())
}

/// A running workload. Dropping it kills it; its ranks end with it.
pub(crate) struct Workload {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    dir: PathBuf,
}

impl Workload {
    /// Starts it with results going to `dir`, and waits until its connections are open. Its room numbers are made from
    /// this process's id unless the arguments say otherwise: another workload on this host has others.
    pub(crate) fn open(arguments: &[&str], dir: &Path) -> Result<Self> {
        Self::open_as(&install::target().join("debug/pd-workload"), arguments, dir)
    }

    /// The same with another build of it.
    pub(crate) fn open_as(program: &Path, arguments: &[&str], dir: &Path) -> Result<Self> {
        let own = ["--seed".to_owned(), std::process::id().to_string()];
        let seed = if arguments.contains(&"--seed") { &[][..] } else { &own };
        let mut child = Command::new(program)
            .args(arguments)
            .args(seed)
            .arg("--out")
            .arg(dir)
            .arg("--ready-file")
            .arg(dir.join("ready.json"))
            .arg("--wait-file")
            .arg(dir.join("go"))
            .arg("--linger-file")
            .arg(dir.join("end"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the workload")?;
        let lines = BufReader::new(child.stdout.take().context("the workload has no output")?).lines();
        let mut workload = Self { child, lines, dir: dir.to_owned() };
        let end = Instant::now() + OPEN;
        while !dir.join("ready.json").exists() {
            if let Some(status) = workload.child.try_wait()? {
                bail!("the workload ended with {status} before its connections were open");
            }
            if Instant::now() > end {
                bail!("the workload's connections are not open after {} s", OPEN.as_secs());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(workload)
    }

    /// Ports that its ranks listen on.
    pub(crate) fn ports(&self) -> Result<Vec<u64>> {
        let ready = self.ready()?;
        Ok(ready["rank_ports"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect())
    }

    /// Process ids of its engines' HTTP servers.
    pub(crate) fn servers(&self) -> Result<Vec<u64>> {
        let ready = self.ready()?;
        Ok(ready["procs"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|rank| rank["server"].as_u64())
            .collect())
    }

    fn ready(&self) -> Result<Value> {
        serde_json::from_slice(&std::fs::read(self.dir.join("ready.json"))?).context("ready.json")
    }

    /// Lets the load begin.
    pub(crate) fn begin(&mut self) -> Result<()> {
        std::fs::write(self.dir.join("go"), "").context("tell the workload to begin")
    }

    /// Lets the load begin if it has not and waits for its results, one line of sums. Its processes stay.
    pub(crate) fn results(&mut self) -> Result<String> {
        self.begin()?;
        match self.lines.next() {
            Some(line) => line.context("read the workload's results"),
            None => bail!("the workload ended with {} and no results", self.child.wait()?),
        }
    }

    /// What it wrote of its rooms.
    pub(crate) fn truth(&self) -> Result<String> {
        std::fs::read_to_string(self.dir.join("truth.jsonl")).context("read the workload's truth")
    }

    /// Ends its processes.
    pub(crate) fn end(mut self) -> Result<()> {
        std::fs::write(self.dir.join("end"), "").context("tell the workload to end")?;
        let status: ExitStatus = self.child.wait().context("wait for the workload")?;
        if !status.success() {
            bail!("the workload ended with {status}");
        }
        Ok(())
    }
}

impl Drop for Workload {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
