//! `cargo xtask page`: the agent's pages in a real browser, as an on-call person sees them. A real agent on the demo's workload, whose
//! rooms pin; Chromium opens the first page and a pinned room's, says nothing on its console, and draws both. Their own
//! policy forbids scripts (`agent/tests/export_page.rs`), and that the browser keeps to a policy is tried first: what it shows needs none.
//! (Chromium's own switch against scripts is of no use here: with it, it neither dumps nor draws.)
//! Part of `cargo xtask test`; needs root and BPF, and says so where they lack.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::agent::{Agent, Start};
use crate::install;
use crate::own::Own;
use crate::workload::{self, Workload};

/// The browser, and letters for it to draw with.
const PACKAGES: &[&str] = &["chromium", "fonts-dejavu-core"];

/// How long rooms go on after the last fault, seconds: a pin is overdue after 10.
const HOLD: &str = "12";

/// How long the pages may take to show pins once the workload has had its time.
const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes that an image in the docs may have, and that a picture of an empty page has at most.
const IMAGE: u64 = 200_000;
const BLANK: u64 = 10_000;

/// What the browser writes on its standard error for each line on a page's console.
const CONSOLE: &str = ":CONSOLE";

/// Arguments.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Keep the pictures there (`docs/images`).
    #[arg(long, value_name = "DIR")]
    screenshots: Option<PathBuf>,
    /// Use this agent instead of building one.
    #[arg(long, value_name = "FILE")]
    agent: Option<PathBuf>,
}

/// Runs it.
pub(crate) fn run(args: &Args) -> Result<()> {
    match check(args)? {
        None => Ok(()),
        Some(why) => bail!("{why}"),
    }
}

/// Runs it as one of the tests. Returns why it could not run, if it could not.
pub(crate) fn as_test() -> Result<Vec<String>> {
    let why = check(&Args { screenshots: None, agent: None })?;
    Ok(why.map(|why| format!("pages in a browser: {why}")).into_iter().collect())
}

fn check(args: &Args) -> Result<Option<String>> {
    install::debian(PACKAGES)?;
    workload::build()?;
    let built = install::target().join("release/roomtrace");
    if args.agent.is_none() {
        install::cargo(&["build", "--quiet", "--release", "--package", "roomtrace"])?;
    }
    let agent = args.agent.as_ref().unwrap_or(&built);
    let dir = install::target().join("page");
    install::empty(&dir)?;
    let agent = match Agent::start(agent, &[], &dir.join("events.jsonl"), &dir.join("agent.log"))? {
        Start::Observing(agent) => agent,
        Start::NotPossible(why) => return Ok(Some(why)),
    };
    let mut workload = Workload::open(&["demo", "--hold", HOLD], &dir)?;
    workload.results()?;
    let own = Own::of_truth(&workload.truth()?)?;
    let looked = look(&agent, &own, &dir, args.screenshots.as_deref());
    agent.stop()?;
    workload.end()?;
    looked.map(|said| {
        eprintln!("ok: {said}");
        None
    })
}

/// Opens the pages.
fn look(agent: &Agent, own: &Own, dir: &Path, keep: Option<&Path>) -> Result<String> {
    let browser = Browser { dir };
    browser.would_tell()?;
    let pinned = pinned(agent, own)?;
    let number = pinned["room"].as_str().context("a room without a number")?;
    let (first, room) = (format!("{}/", agent.api()), format!("{}/rooms/{number}", agent.api()));
    let link = format!("href=\"/rooms/{number}\"");
    has(&browser.open(&first)?, "the first page", &[&link, "class=\"banner sure\""])?;
    has(&browser.open(&room)?, "the room's page", &["<svg", "what to do", "owes"])?;
    let wrong = browser.open(&format!("{}/rooms/none", agent.api()))?;
    has(&wrong, "the page of a wrong number", &["This is no room"])?;
    for (name, url, size, dark) in [
        ("page-overview.png", &first, "1000,760", false),
        ("page-room.png", &room, "1200,760", false),
        ("page-room-dark.png", &room, "520,760", true),
    ] {
        let file = dir.join(name);
        browser.photograph(url, &file, size, dark)?;
        let bytes = std::fs::metadata(&file).with_context(|| format!("no {}", file.display()))?.len();
        if bytes < BLANK {
            bail!("{} has {bytes} bytes: nothing is on it", file.display());
        }
        let Some(keep) = keep else { continue };
        if bytes >= IMAGE {
            bail!("{} has {bytes} bytes, too many for the docs", file.display());
        }
        std::fs::create_dir_all(keep)?;
        std::fs::copy(&file, keep.join(name)).with_context(|| format!("write to {}", keep.display()))?;
    }
    Ok(format!(
        "the pages in Chromium: room {number} is on the first page and on its own, nothing on the console"
    ))
}

/// A room of ours that is surely pinned: of those the one of whose time most is known.
fn pinned(agent: &Agent, own: &Own) -> Result<Value> {
    let end = Instant::now() + PATIENCE;
    loop {
        let all: Value = serde_json::from_str(&agent.get("/api/v1/rooms?pinned=true&limit=500")?)?;
        let rooms = all["rooms"].as_array().map(Vec::as_slice).unwrap_or_default();
        let sure = |r: &&Value| {
            r["verdict"]["confidence"] != "possible" && own.has(r["room"].as_str().unwrap_or_default())
        };
        let known = |r: &&Value| {
            let sides = ["prefill", "decode"].iter().filter(|role| !r["views"][**role].is_null()).count();
            (
                sides,
                r["verdict"]["confidence"] == "certain",
                !r["network"].is_null(),
                r["verdict"]["group_size"].as_u64(),
            )
        };
        if let Some(room) = rooms.iter().filter(sure).max_by_key(known) {
            return Ok(room.clone());
        }
        if Instant::now() >= end {
            bail!("no room of the workload is pinned `likely` or `certain` after {} s", PATIENCE.as_secs());
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

fn has(page: &str, what: &str, wanted: &[&str]) -> Result<()> {
    match wanted.iter().find(|w| !page.contains(**w)) {
        Some(missing) => bail!("{what} has no {missing:?} as the browser shows it"),
        None => Ok(()),
    }
}

struct Browser<'a> {
    dir: &'a Path,
}

impl Browser<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new("timeout");
        // Root has no sandbox of its own; nothing but the agent's pages is opened.
        command
            .args([
                "60",
                "chromium",
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
            ])
            .args(["--enable-logging=stderr", "--hide-scrollbars", "--disable-lcd-text"])
            .arg(format!("--user-data-dir={}", self.dir.join("profile").display()));
        command
    }

    /// The page as the browser has it once it is loaded; a busy agent is asked again. Fails when anything is said on its console.
    fn open(&self, url: &str) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let (page, console) = self.visit(url)?;
            if page.contains("No answer yet") && Instant::now() < end {
                continue;
            }
            if let Some(line) = console {
                bail!("{url} is not clean in Chromium: {line}");
            }
            return Ok(page);
        }
    }

    fn visit(&self, url: &str) -> Result<(String, Option<String>)> {
        let mut command = self.command();
        let out = command.arg("--dump-dom").arg(url).output().context("start chromium")?;
        let said = String::from_utf8_lossy(&out.stderr);
        if !out.status.success() {
            bail!("chromium ended with {} at {url}: {said}", out.status);
        }
        // It ends well even where there was no page.
        if let Some(line) = said.lines().find(|l| l.contains("Page load failed")) {
            bail!("chromium has no page of {url}: {line}");
        }
        let console = said.lines().find(|l| l.contains(CONSOLE)).map(str::to_owned);
        Ok((String::from_utf8_lossy(&out.stdout).into_owned(), console))
    }

    /// That a page's policy is kept, scripts forbidden by it do not run, and a breach is told.
    fn would_tell(&self) -> Result<()> {
        let file = self.dir.join("breach.html");
        let policy = "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'\">";
        let script = "<script>document.title='ran'</script>";
        std::fs::write(&file, format!("{policy}<p style=\"color:red\">x</p>{script}"))?;
        let (page, console) = self.visit(&format!("file://{}", file.display()))?;
        if page.contains("<title>ran")
            || !console.is_some_and(|line| line.contains("Content Security Policy"))
        {
            bail!(
                "this Chromium does not keep to a page's policy, or does not tell, so the check of the pages proves nothing"
            );
        }
        Ok(())
    }

    fn photograph(&self, url: &str, file: &Path, size: &str, dark: bool) -> Result<()> {
        let mut command = self.command();
        command.arg(format!("--screenshot={}", file.display())).arg(format!("--window-size={size}"));
        if dark {
            command.arg("--blink-settings=preferredColorScheme=0");
        }
        let out = command.arg(url).output().context("start chromium")?;
        if !out.status.success() {
            bail!("chromium ended with {} at {url}: {}", out.status, String::from_utf8_lossy(&out.stderr));
        }
        Ok(())
    }
}
