//! `roomtrace top` in a real terminal (tmux), against a scripted agent.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[path = "top_support/mod.rs"]
mod support;

/// How long something may take on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_mins(1);

const ROOM: &str = "5123456789012345678";

/// An agent that answers from a script.
struct Agent {
    at: SocketAddr,
    looks: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    /// Accepts and then says nothing.
    mute: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Agent {
    fn start(at: &str) -> Self {
        let listener = TcpListener::bind(at).unwrap();
        listener.set_nonblocking(true).unwrap();
        let at = listener.local_addr().unwrap();
        let (looks, stop, mute) =
            (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let (looked, stopped, muted) = (Arc::clone(&looks), Arc::clone(&stop), Arc::clone(&mute));
        let thread = std::thread::spawn(move || {
            let mut held = Vec::new();
            while !stopped.load(Ordering::Relaxed) {
                match listener.accept() {
                    Ok((stream, _)) if muted.load(Ordering::Relaxed) => held.push(stream),
                    Ok((stream, _)) => serve(&stream, &looked),
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
            }
        });
        Self { at, looks, stop, mute, thread: Some(thread) }
    }

    fn api(&self) -> String {
        format!("http://{}", self.at)
    }

    fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// One question, one answer. What cannot be written is the other side's affair.
fn serve(mut stream: &TcpStream, looks: &AtomicU64) {
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let first = lines.next().unwrap_or_default();
    lines.find(String::is_empty);
    let path = first.split(' ').nth(1).unwrap_or_default();
    let n = looks.load(Ordering::Relaxed);
    let [pinned, overdue, open] = support::lists();
    let (status, body) = match path {
        "/status" => (200, support::status(n).to_string()),
        "/metrics" => (200, support::metrics(n)),
        p if p.starts_with("/api/v1/rooms?") && p.contains("pinned=true") => (200, pinned.to_string()),
        p if p.starts_with("/api/v1/rooms?") && p.contains("overdue=true") => (200, overdue.to_string()),
        p if p.starts_with("/api/v1/rooms?") && p.contains("pinned=false") => (200, open.to_string()),
        p if p.starts_with("/api/v1/findings") => {
            if p.contains("limit=100") {
                looks.fetch_add(1, Ordering::Relaxed);
            }
            (200, support::findings().to_string())
        }
        p if p.starts_with("/api/v1/rooms/") => {
            let number = p.trim_start_matches("/api/v1/rooms/").split('?').next().unwrap();
            match support::ROOMS.iter().find(|r| r.number == number) {
                Some(room) => (200, support::record(room).to_string()),
                None => (404, "{\"error\": \"not known\"}".to_owned()),
            }
        }
        _ => (404, "{\"error\": \"no such page\"}".to_owned()),
    };
    let head = format!("HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    drop(stream.write_all(head.as_bytes()));
    drop(stream.write_all(body.as_bytes()));
}

fn roomtrace(args: &[&str], environment: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_roomtrace"));
    command.env_clear().envs(environment.iter().copied()).args(args).output().unwrap()
}

/// A shell in a terminal of its own.
struct Pane {
    server: String,
}

static PANES: AtomicU32 = AtomicU32::new(0);

impl Pane {
    fn open(width: u16, height: u16) -> Self {
        let server =
            format!("roomtrace-test-{}-{}", std::process::id(), PANES.fetch_add(1, Ordering::Relaxed));
        let pane = Self { server };
        let size = [width, height].map(|n| n.to_string());
        // Nothing of this machine's: neither settings nor prompt. `-u`: it is UTF-8 whatever the locale.
        let shell = "env -i TERM=tmux-256color LANG=C.UTF-8 PATH=/usr/bin:/bin PS1='$ ' sh";
        pane.tmux(&["-u", "-f", "/dev/null", "new-session", "-d", "-x", &size[0], "-y", &size[1], shell]);
        pane.wait("the prompt", |s| s.starts_with('$'));
        pane
    }

    fn tmux(&self, args: &[&str]) -> String {
        let out = Command::new("tmux").args(["-L", &self.server]).args(args).output();
        let out = out.unwrap_or_else(|e| {
            panic!("tmux cannot be started ({e}): this test needs it; `cargo xtask test` installs it, or `apt-get install tmux`")
        });
        assert!(out.status.success(), "tmux {args:?}: {}", String::from_utf8_lossy(&out.stderr));
        String::from_utf8_lossy(&out.stdout).into_owned()
    }

    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    /// Waits until the screen is so.
    fn wait(&self, what: &str, is_so: impl Fn(&str) -> bool) -> String {
        let begun = Instant::now();
        loop {
            let screen = self.screen();
            if is_so(&screen) {
                return screen;
            }
            assert!(begun.elapsed() < PATIENCE, "{what} does not come:\n{screen}");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn keys(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    /// Starts a command line.
    fn run(&self, line: &str) {
        self.tmux(&["send-keys", "-l", line]);
        self.keys(&["Enter"]);
    }

    fn top(&self, agent: &Agent, more: &str) {
        self.run(&format!(
            "{} top --api {} --interval 1s {more}",
            env!("CARGO_BIN_EXE_roomtrace"),
            agent.api()
        ));
        self.wait("the first picture", |s| s.contains("PINNED 5") && s.contains("q quit"));
    }

    fn resize(&self, width: u16, height: u16) {
        self.tmux(&["resize-window", "-x", &width.to_string(), "-y", &height.to_string()]);
    }

    /// What tmux knows of the terminal: on the other screen, cursor shown.
    fn modes(&self) -> String {
        self.tmux(&[
            "display-message",
            "-p",
            "#{alternate_on} #{cursor_flag} #{keypad_flag} #{mouse_any_flag}",
        ])
        .trim()
        .to_owned()
    }

    /// The settings of its line discipline.
    fn stty(&self) -> String {
        let tty = self.tmux(&["display-message", "-p", "#{pane_tty}"]);
        let out = Command::new("stty").args(["-a", "-F", tty.trim()]).output().unwrap();
        String::from_utf8(out.stdout).unwrap()
    }

    /// The process in it.
    fn pid(&self) -> String {
        let shell = self.tmux(&["display-message", "-p", "#{pane_pid}"]);
        let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", shell.trim())).unwrap();
        children.trim().to_owned()
    }
}

impl Drop for Pane {
    fn drop(&mut self) {
        drop(Command::new("tmux").args(["-L", &self.server, "kill-server"]).output());
    }
}

/// Numbers of the rooms on the screen, from top to bottom.
fn rooms(screen: &str) -> Vec<&str> {
    let lines = screen.lines().skip_while(|l| !l.contains("ROOM")).skip(1);
    let table = lines.take_while(|l| !l.contains('─'));
    let last = table.filter_map(|l| l.split_whitespace().next_back());
    last.filter(|w| w.chars().all(|c| c.is_ascii_digit())).collect()
}

#[test]
fn a_person_sorts_filters_explains_resizes_and_quits() {
    let agent = Agent::start("127.0.0.1:0");
    let pane = Pane::open(80, 24);
    let (modes, stty) = (pane.modes(), pane.stty());
    pane.top(&agent, "");
    let screen = pane.wait("rates", |s| !s.contains("prefill ends –"));
    assert!(
        screen.contains("PINNED 5: 2 certain, 1 likely, 2 possible? · overdue 2 · open 9 · findings 2"),
        "{screen}"
    );
    assert!(screen.contains("pinned? possible") && screen.contains("PINNED likely"), "{screen}");
    assert_eq!(rooms(&screen)[..2], [ROOM, "18446744073709551615"], "{screen}");
    assert_eq!(pane.modes().split(' ').next(), Some("1"), "drawn on the other screen");

    pane.keys(&["s", "s", "s", "s"]);
    let screen = pane.wait("the order by number", |s| s.contains("by room"));
    assert_eq!(rooms(&screen)[..3], ["7", "91", "812"], "{screen}");
    pane.keys(&["r"]);
    let screen = pane.wait("it reversed", |s| s.contains("by room reversed"));
    assert_eq!(rooms(&screen)[..1], ["18446744073709551615"], "{screen}");
    pane.keys(&["r", "s", "f", "f"]);
    let screen = pane.wait("the filter", |s| s.contains("rooms: pinned likely or certain by urgency (3)"));
    assert_eq!(rooms(&screen), [ROOM, "18446744073709551615", "7"], "{screen}");
    pane.keys(&["Escape"]);
    pane.wait("all again", |s| s.contains("rooms: all by urgency (9)"));
    pane.keys(&["/", "q", "u", "e", "u", "e", "d", "Enter"]);
    let screen = pane.wait("what was searched for", |s| s.contains("with “queued” (1)"));
    assert_eq!(rooms(&screen), ["4100000000000000001"], "{screen}");
    pane.keys(&["Escape"]);
    pane.wait("all again", |s| s.contains("rooms: all by urgency (9)"));

    // What `explain` prints.
    let explained = roomtrace(&["explain", ROOM, "--api", &agent.api()], &[]);
    let explained = String::from_utf8(explained.stdout).unwrap();
    pane.resize(230, 60);
    pane.keys(&["Enter"]);
    let screen =
        pane.wait("the explanation", |s| s.contains("why: receiver_silent") && s.contains("Esc back"));
    // Words, since the longest lines are longer than the screen is wide.
    let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words(&screen).contains(&words(&explained)), "{screen}\n{explained}");
    assert!(explained.lines().count() > 20, "{explained}");
    pane.resize(40, 10);
    pane.wait("it drawn at 40x10", |s| s.lines().any(|l| l.trim_end().ends_with("PINNED certain")));
    pane.keys(&["G"]);
    pane.wait("its end at 40x10", |s| s.lines().count() <= 10 && s.contains(": yes"));
    pane.keys(&["Escape"]);
    let screen =
        pane.wait("the rooms at 40x10", |s| s.contains("PINNED 5 (2 possible?)") && s.contains("LIKELY"));
    assert!(screen.lines().all(|l| l.chars().count() <= 40), "{screen}");
    assert_eq!(rooms(&screen)[..1], [ROOM], "{screen}");
    pane.resize(80, 24);
    pane.wait("the rooms at 80x24", |s| s.contains("under the cursor"));
    for page in ["findings: 2 of 2", "peers: 3 of 3", "the agent", "rooms: all"] {
        pane.keys(&["Tab"]);
        pane.wait(page, |s| s.contains(page));
    }
    pane.keys(&["?"]);
    pane.wait("help", |s| s.contains("any key: back"));
    pane.keys(&["x", "q"]);
    pane.wait("the prompt", |s| {
        // The line wraps somewhere, with the length of the program's path.
        let asked = s.split_whitespace().collect::<String>().contains("--interval1s");
        asked && !s.contains("PINNED") && s.trim_end().ends_with('$')
    });
    assert_eq!((pane.modes(), pane.stty()), (modes, stty), "the terminal is as it was");
}

#[test]
fn an_agent_that_dies_leaves_an_old_picture_and_one_that_comes_back_a_new_one() {
    let agent = Agent::start("127.0.0.1:0");
    let at = agent.at.to_string();
    let pane = Pane::open(80, 24);
    pane.top(&agent, "");
    drop(agent);
    let screen = pane.wait("the mark", |s| s.contains("STALE  last answer "));
    assert!(screen.contains("no agent answers at"), "{screen}");
    assert!(
        screen.contains("PINNED 5: 2 certain") && screen.contains(ROOM),
        "the old picture stays:\n{screen}"
    );
    assert!(!screen.contains("pinned 0"), "{screen}");
    pane.wait("its age", |s| {
        s.split("last answer ").nth(1).is_some_and(|a| !a.starts_with("0 s") && !a.starts_with("1 s"))
    });
    let agent = Agent::start(&at);
    pane.wait("the new picture", |s| s.contains("PINNED 5") && !s.contains("STALE"));
    // It hangs: nothing comes, no error either.
    agent.mute.store(true, Ordering::Relaxed);
    let screen = pane.wait("the mark", |s| s.contains("STALE  last answer "));
    assert!(screen.contains("PINNED 5") && screen.contains("has not answered the last question"), "{screen}");
    // A key is answered all the same.
    pane.keys(&["q"]);
    pane.wait("the prompt", |s| !s.contains("PINNED"));
}

#[test]
fn signals_give_the_terminal_back() {
    let agent = Agent::start("127.0.0.1:0");
    for signal in ["INT", "TERM", "HUP", "QUIT"] {
        let pane = Pane::open(80, 24);
        let (modes, stty) = (pane.modes(), pane.stty());
        pane.top(&agent, "");
        assert_ne!(pane.stty(), stty, "raw while it runs");
        let pid = pane.pid();
        assert!(Command::new("kill").args([&format!("-{signal}"), &pid]).status().unwrap().success());
        pane.wait("the prompt", |s| !s.contains("PINNED") && s.trim_end().ends_with('$'));
        assert_eq!((pane.modes(), pane.stty()), (modes, stty), "SIG{signal}");
    }
}

#[test]
fn an_agent_that_is_not_there_is_waited_for() {
    let pane = Pane::open(80, 24);
    pane.run(&format!("{} top --api http://127.0.0.1:9 --interval 1s", env!("CARGO_BIN_EXE_roomtrace")));
    let screen = pane.wait("the reason", |s| s.contains("NO ANSWER YET"));
    assert!(screen.contains("pinned –") && !screen.contains("pinned 0"), "{screen}");
    pane.keys(&["C-c"]);
    pane.wait("the prompt", |s| !s.contains("NO ANSWER") && s.trim_end().ends_with('$'));
}

/// A picture is sent once; then what differs.
#[test]
fn only_what_changes_is_sent() {
    let agent = Agent::start("127.0.0.1:0");
    let dir = tempfile::tempdir().unwrap();
    let sent = dir.path().join("sent");
    let pane = Pane::open(80, 24);
    pane.top(&agent, "");
    pane.wait("rates", |s| !s.contains("messages –/s"));
    pane.tmux(&["pipe-pane", &format!("cat > {}", sent.display())]);
    let from = agent.looks();
    let begun = Instant::now();
    while agent.looks() < from + 6 {
        assert!(begun.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(20));
    }
    let bytes = std::fs::metadata(&sent).map_or(0, |m| m.len());
    assert!(bytes < 6 * 600, "{bytes} bytes for 6 looks of a picture of 1920 cells");
    pane.keys(&["q"]);
    pane.wait("the prompt", |s| !s.contains("PINNED"));
}

#[test]
fn no_color_means_none() {
    let agent = Agent::start("127.0.0.1:0");
    let pane = Pane::open(80, 24);
    let coloured = |pane: &Pane| {
        let cells = pane.tmux(&["capture-pane", "-p", "-e"]);
        cells.contains("\u{1b}[31m")
            || cells.contains(";31m")
            || cells.contains("[33m")
            || cells.contains("38;5")
    };
    pane.top(&agent, "");
    assert!(coloured(&pane));
    pane.keys(&["q"]);
    pane.wait("the prompt", |s| !s.contains("PINNED"));
    pane.run("export NO_COLOR=1; clear");
    pane.top(&agent, "");
    assert!(!coloured(&pane), "{}", pane.tmux(&["capture-pane", "-p", "-e"]));
}

#[test]
fn without_a_terminal_it_is_said_so_and_once_prints_text() {
    let agent = Agent::start("127.0.0.1:0");
    let api = agent.api();
    let out = roomtrace(&["top", "--api", &api], &[("TERM", "xterm")]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{said}");
    assert!(said.contains("not a terminal") && said.contains("roomtrace top --once"), "{said}");
    let pane = Pane::open(100, 24);
    pane.run(&format!("TERM=dumb {} top --api {api}", env!("CARGO_BIN_EXE_roomtrace")));
    pane.wait("the way out", |s| s.contains("TERM=dumb") && s.contains("roomtrace top --once"));

    let out = roomtrace(&["top", "--once", "--interval", "1s", "--api", &api], &[]);
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(text.starts_with("PINNED 5: 2 certain, 1 likely, 2 possible? · overdue 2"), "{text}");
    assert!(text.contains(ROOM) && !text.contains('\u{1b}') && !text.contains("messages –/s"), "{text}");
    let out = roomtrace(&["top", "--once", "--api", "http://127.0.0.1:9"], &[]);
    assert_eq!(out.status.code(), Some(3));
    assert!(String::from_utf8_lossy(&out.stderr).contains("no agent answers at"));
    for wrong in [&["top", "--api", "nonsense"][..], &["top", "--interval", "1ms"], &["top", "--rooms", "0"]]
    {
        assert_eq!(roomtrace(wrong, &[("TERM", "xterm")]).status.code(), Some(2), "{wrong:?}");
    }
}
