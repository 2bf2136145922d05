//! A real Prometheus that scrapes an agent each second, judges the project's alert rules by what it got, and is asked every
//! query of its dashboards.

mod queries;

use std::collections::BTreeSet;
use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::agent::{Agent, Start, get};
use crate::install;
use crate::workload::Workload;

/// How long it may take to start, and an alert to follow what it is about.
const PATIENCE: Duration = Duration::from_mins(1);

/// The alert that pages.
const PAGE: &str = "RoomtraceRoomPinned";

/// Verdict and confidence of pages.
pub(crate) type Pages = BTreeSet<(String, String)>;

/// A running Prometheus. Dropping it kills it.
pub(crate) struct Prometheus {
    child: Child,
    listen: SocketAddr,
    log: PathBuf,
}

/// The alert rules as they are handed out.
pub(crate) fn rules() -> Result<String> {
    let file = install::root().join("dashboards/alerts/roomtrace.rules.yaml");
    std::fs::read_to_string(&file).with_context(|| format!("read {}", file.display()))
}

/// A program of Debian's package, which is not installed: that would start a server.
pub(crate) fn program(name: &str) -> Result<PathBuf> {
    install::from_debian("prometheus", &format!("usr/bin/{name}"))
}

impl Prometheus {
    /// Starts it on the pages of `agent`, its files in `dir`, and waits until it is ready.
    pub(crate) fn start(agent: &Agent, dir: &Path) -> Result<Self> {
        let target = agent.api();
        let target = target.trim_start_matches("http://");
        Self::scraping(&format!("{{job_name: roomtrace, static_configs: [{{targets: ['{target}']}}]}}"), dir)
    }

    /// The same with these jobs (`scrape_configs`, in YAML's flow style).
    pub(crate) fn scraping(jobs: &str, dir: &Path) -> Result<Self> {
        // An alert stays for two minutes; a test of its end need not wait for that.
        Self::judging(&rules()?.replace("keep_firing_for: 2m", "keep_firing_for: 3s"), jobs, dir)
    }

    /// The same with these rules.
    pub(crate) fn judging(rules: &str, jobs: &str, dir: &Path) -> Result<Self> {
        std::fs::write(dir.join("rules.yaml"), rules)?;
        let config = format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}\n\
             rule_files: [rules.yaml]\n\
             scrape_configs: [{jobs}]\n"
        );
        std::fs::write(dir.join("prometheus.yaml"), config)?;
        let listen =
            TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).context("find a free port")?;
        let log = dir.join("prometheus.log");
        let child = Command::new(program("prometheus")?)
            .arg(format!("--config.file={}", dir.join("prometheus.yaml").display()))
            .arg(format!("--storage.tsdb.path={}", dir.join("prometheus").display()))
            .arg(format!("--web.listen-address={listen}"))
            .arg("--enable-feature=exemplar-storage")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log)?)
            .spawn()
            .context("start Prometheus")?;
        let mut prometheus = Self { child, listen, log };
        let end = Instant::now() + PATIENCE;
        while get(listen, "/-/ready").is_err() {
            if let Some(status) = prometheus.child.try_wait()? {
                bail!("Prometheus ended with {status}; see {}", prometheus.log.display());
            }
            if Instant::now() > end {
                bail!("Prometheus is not ready; see {}", prometheus.log.display());
            }
            sleep(Duration::from_millis(50));
        }
        Ok(prometheus)
    }

    /// What a page of its API says.
    pub(crate) fn api(&self, path: &str) -> Result<Value> {
        let body = get(self.listen, path).with_context(|| format!("ask Prometheus for {path}"))?;
        let mut answer: Value = serde_json::from_str(&body).context("read Prometheus' answer")?;
        if answer["status"] != "success" {
            bail!("Prometheus answers {path} with {body}");
        }
        Ok(answer["data"].take())
    }

    /// The pages that fire.
    pub(crate) fn firing(&self) -> Result<Vec<Value>> {
        let mut data = self.api("/api/v1/alerts")?;
        let Value::Array(mut alerts) = data["alerts"].take() else { bail!("no alerts: {data}") };
        alerts.retain(|a| a["state"] == "firing" && a["labels"]["alertname"] == PAGE);
        Ok(alerts)
    }

    /// Verdict and confidence of each.
    fn pages(&self) -> Result<Pages> {
        let label = |alert: &Value, name: &str| alert["labels"][name].as_str().unwrap_or("?").to_owned();
        Ok(self.firing()?.iter().map(|a| (label(a, "verdict"), label(a, "confidence"))).collect())
    }

    /// Waits until pages fire for exactly what the agents have pinned now, and these are such as `wanted`. How many there are.
    pub(crate) fn agree(&self, agents: &[&Agent], wanted: impl Fn(&Pages) -> bool) -> Result<usize> {
        let end = Instant::now() + PATIENCE;
        loop {
            let mut pinned = Pages::new();
            for agent in agents {
                pinned.extend(pinned_at(agent)?);
            }
            let pages = self.pages()?;
            if pinned == pages && wanted(&pages) {
                return Ok(pages.len());
            }
            if Instant::now() > end {
                bail!("the agents have pinned {pinned:?}, firing are {pages:?}; see {}", self.log.display());
            }
            sleep(Duration::from_millis(200));
        }
    }

    /// Phases lead to the traces of rooms.
    fn has_exemplars(&self) -> Result<()> {
        self.exemplars("roomtrace_room_phase_duration_seconds_bucket").map(drop)
    }

    /// Trace ids of a histogram's exemplars; at least one.
    pub(crate) fn exemplars(&self, series: &str) -> Result<BTreeSet<String>> {
        let query = escaped(series);
        let data = self.api(&format!("/api/v1/query_exemplars?query={query}&start=0&end=99999999999"))?;
        let all = data.as_array().context("no exemplars")?.iter();
        let all = all.flat_map(|series| series["exemplars"].as_array().into_iter().flatten());
        let ids = all.filter_map(|exemplar| exemplar["labels"]["trace_id"].as_str());
        let ids: BTreeSet<String> = ids.filter(|id| id.len() == 32).map(str::to_owned).collect();
        if ids.is_empty() {
            bail!("no exemplar of {series} has a trace id: {data}");
        }
        Ok(ids)
    }
}

/// For a query string (RFC 3986, section 2.3: the unreserved characters stay).
pub(crate) fn escaped(text: &str) -> String {
    let byte = |b: u8| {
        if b.is_ascii_alphanumeric() || b"-._~".contains(&b) {
            char::from(b).to_string()
        } else {
            format!("%{b:02X}")
        }
    };
    text.bytes().map(byte).collect()
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Verdict and confidence of pinned rooms that are to be paged for, as `/metrics` has them.
fn pinned_at(agent: &Agent) -> Result<Pages> {
    let text = agent.get("/metrics")?;
    let series = text.lines().filter(|l| l.starts_with("roomtrace_rooms_pinned{") && !l.ends_with(" 0.0"));
    let label = |line: &str, name: &str| -> String {
        let rest = line.split_once(&format!("{name}=\"")).map_or("?", |(_, rest)| rest);
        rest.split('"').next().unwrap_or("?").to_owned()
    };
    let all = series.map(|l| (label(l, "verdict"), label(l, "confidence")));
    Ok(all.filter(|(_, confidence)| confidence != "possible").collect())
}

/// A driver that stands in for NVIDIA's: one GPU that moves something. What a configuration says to have it used.
pub(crate) fn driver(dir: &Path) -> Result<String> {
    install::cargo(&["build", "--quiet", "--package", "nvml-stand-in"])?;
    let lib = dir.join("libnvidia-ml.so.1");
    std::fs::copy(install::target().join("debug/libnvml_stand_in.so"), &lib).context("copy the driver")?;
    let script = dir.join("libnvidia-ml.so.1.script");
    std::fs::write(script, "0.pcie_tx = 1000000000\n0.pcie_rx = 1000000\n0.util = 50\n")?;
    Ok(format!("gpu: {{lib_path: {}}}\n", lib.display()))
}

/// Live check: pins of the demo's workload page, each under its verdict, and no longer once the rooms are over; every panel
/// of the dashboards has data meanwhile. The inner error: why this host cannot be observed.
pub(crate) fn check(agent: &Path, dir: &Path) -> Result<Result<String, String>> {
    let config = dir.join("roomtrace.yaml");
    std::fs::write(&config, driver(dir)?)?;
    let config = ["--config".to_owned(), config.to_string_lossy().into_owned()];
    let started = Agent::start(agent, &config, &dir.join("events.jsonl"), &dir.join("agent.log"))?;
    let agent = match started {
        Start::Observing(agent) => agent,
        Start::NotPossible(why) => return Ok(Err(why)),
    };
    let prometheus = Prometheus::start(&agent, dir)?;
    let mut workload = Workload::open(&["demo"], dir)?;
    workload.results()?;
    // The demo has more; some of its verdicts are never more than possible.
    let pages = prometheus.agree(&[&agent], |pages| pages.len() >= 3)?;
    let queries = prometheus.answers_everything(agent.api().trim_start_matches("http://"))?.len();
    prometheus.has_exemplars()?;
    workload.end()?;
    prometheus.agree(&[&agent], Pages::is_empty)?;
    drop(prometheus);
    agent.stop()?;
    Ok(Ok(format!(
        "{pages} alerts of pinned rooms fire in Prometheus and end with them; {queries} queries of dashboards and rules have data"
    )))
}
