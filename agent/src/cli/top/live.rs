//! The terminal of `roomtrace top`: puts it into a state to be drawn on, reads keys, draws, and gives it back as it was, however it
//! ends.

use std::io::{self, BufWriter, Stdout, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::{cursor, execute, terminal};

use super::TopArgs;
use super::ask::{self, News, Questions};
use super::draw::{Paint, draw};
use super::state::{Act, Press, State};
use crate::cli::remote::Asker;
use crate::cli::{End, Failure, Outcome};
use crate::export::otlp::without_login;

/// How long a key is waited for before anything else is looked at.
const WAIT: Duration = Duration::from_millis(100);

/// Answers that wait to be shown.
const NEWS: usize = 4;

/// How long the screen has to end by itself after a signal.
const GRACE: Duration = Duration::from_secs(2);

/// Watches until it is told to stop.
pub(super) fn live(args: &TopArgs) -> Outcome {
    let state = State::new(without_login(&args.api.api).into_owned(), args.interval);
    let (to, news) = mpsc::sync_channel(NEWS);
    let threads =
        |e: io::Error| Failure::cannot_observe(anyhow::Error::new(e).context("cannot start a thread"));
    let asker = || Asker::new(&args.api.api);
    ask::keep_looking(asker()?, args.rooms, args.interval, to.clone()).map_err(threads)?;
    let questions = ask::keep_explaining(asker()?, args.interval, to).map_err(threads)?;
    let stop = Arc::new(AtomicBool::new(false));
    watch_signals(Arc::clone(&stop))?;
    let colours = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let screen = Screen::open()
        .context("cannot draw on this terminal (`roomtrace top --once` prints the same as text)");
    let mut screen = screen.map_err(Failure::usage)?;
    let ended = watch(&mut screen, state, Paint { colours }, &news, &questions, &stop);
    drop(screen);
    ended.map(|()| End::Fine).context("the terminal is gone").map_err(Failure::usage)
}

fn watch(
    screen: &mut Screen,
    mut state: State,
    paint: Paint,
    news: &Receiver<News>,
    questions: &Questions,
    stop: &AtomicBool,
) -> io::Result<()> {
    let start = Instant::now();
    let mut drawn = None;
    let mut changed = true;
    while !stop.load(Ordering::Relaxed) {
        let second = start.elapsed().as_secs();
        // What changes by itself are ages, in seconds. Only cells that differ are sent.
        if changed || drawn != Some(second) {
            screen.terminal.draw(|frame| {
                let area = frame.area();
                draw(&mut state, start.elapsed(), paint, area, frame.buffer_mut());
            })?;
            (drawn, changed) = (Some(second), false);
        }
        let mut wait = WAIT;
        while event::poll(wait)? {
            wait = Duration::ZERO;
            changed = true;
            let Event::Key(key) = event::read()? else { continue };
            let Some(press) = press(key) else { continue };
            let had_page = state.page.is_some();
            match state.press(press) {
                Act::Nothing => {}
                Act::Quit => return Ok(()),
                Act::Redraw => screen.terminal.clear()?,
                // A thread that is gone shows as a page without an answer.
                Act::Explain(room, incarnation) => drop(questions.send(Some((room, incarnation)))),
            }
            if had_page && state.page.is_none() {
                drop(questions.send(None));
            }
            if stop.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
        while let Ok(news) = news.try_recv() {
            changed = true;
            match news {
                News::Looked(Ok(answers)) => state.looked(Ok(&answers), start.elapsed()),
                News::Looked(Err(why)) => state.looked(Err(why), start.elapsed()),
                News::Explained(room, text) => state.explained(&room, text),
            }
        }
    }
    Ok(())
}

/// A key as far as it means something.
fn press(key: KeyEvent) -> Option<Press> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    Some(match key.code {
        KeyCode::Char('c' | 'd') if control => Press::Break,
        KeyCode::Char('l') if control => Press::Redraw,
        KeyCode::Char('h') if control => Press::Backspace,
        KeyCode::Char(c) if !control => Press::Char(c),
        KeyCode::Up => Press::Up,
        KeyCode::Down => Press::Down,
        KeyCode::PageUp => Press::PageUp,
        KeyCode::PageDown => Press::PageDown,
        KeyCode::Home => Press::Home,
        KeyCode::End => Press::End,
        KeyCode::Enter => Press::Enter,
        KeyCode::Tab => Press::Tab,
        KeyCode::BackTab => Press::BackTab,
        KeyCode::Esc => Press::Escape,
        KeyCode::Backspace => Press::Backspace,
        _ => return None,
    })
}

/// The terminal while it is drawn on.
struct Screen {
    terminal: Terminal<CrosstermBackend<BufWriter<Stdout>>>,
}

impl Screen {
    fn open() -> io::Result<Self> {
        let before = std::panic::take_hook();
        // The message must not be drawn over and lost.
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            before(panic);
            // Else the screen would be drawn again over it. The main thread ends by itself.
            if std::thread::current().name() != Some("main") {
                #[allow(clippy::exit, reason = "a thread that others wait for is gone")]
                std::process::exit(101);
            }
        }));
        terminal::enable_raw_mode()?;
        let opened = Self::take_over();
        if opened.is_err() {
            restore();
        }
        opened
    }

    fn take_over() -> io::Result<Self> {
        execute!(io::stdout(), terminal::EnterAlternateScreen, cursor::Hide)?;
        // One write for one picture: over a slow link it arrives whole.
        let out = BufWriter::with_capacity(1 << 16, io::stdout());
        Ok(Self { terminal: Terminal::new(CrosstermBackend::new(out))? })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal back. May be called again, and from anywhere.
fn restore() {
    let mut out = io::stdout();
    drop(execute!(out, terminal::LeaveAlternateScreen, cursor::Show));
    drop(out.flush());
    drop(terminal::disable_raw_mode());
}

/// SIGINT, SIGTERM, SIGHUP and SIGQUIT end it. Where the screen does not hear of it (it waits for a terminal that is gone), the
/// terminal is given back from here.
fn watch_signals(stop: Arc<AtomicBool>) -> Result<(), Failure> {
    use tokio::signal::unix::{SignalKind, signal};
    let failed =
        |e: io::Error| Failure::cannot_observe(anyhow::Error::new(e).context("cannot listen for signals"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup(), SignalKind::quit()];
    let [mut int, mut term, mut hup, mut quit] = {
        let _entered = runtime.enter();
        let [a, b, c, d] = kinds.map(signal);
        [a.map_err(failed)?, b.map_err(failed)?, c.map_err(failed)?, d.map_err(failed)?]
    };
    let run = move || {
        runtime.block_on(async {
            tokio::select! { _ = int.recv() => {}, _ = term.recv() => {}, _ = hup.recv() => {}, _ = quit.recv() => {} }
        });
        stop.store(true, Ordering::Relaxed);
        std::thread::sleep(GRACE);
        restore();
        #[allow(clippy::exit, reason = "the main thread hangs in the terminal, and nothing is left to lose")]
        std::process::exit(End::Fine as i32);
    };
    std::thread::Builder::new().name("roomtrace-signal".to_owned()).spawn(run).map(drop).map_err(failed)
}
