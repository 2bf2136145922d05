//! Asks the agent for `top`, on threads of its own: the screen waits for no answer.
//!
//! Every answer is bounded in size and time ([`Asker`]), and cleaned before anything else sees it.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, SyncSender};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::picture::Answers;
use crate::cli::remote::Asker;
use crate::cli::{Failure, clean, explain};

/// Findings fetched at most, where as many rooms are.
const FINDINGS: u16 = 100;

/// What a thread tells.
pub(super) enum News {
    /// A look, or why there was none.
    Looked(Result<Box<Answers>, String>),
    /// The explanation of a room.
    Explained(String, Result<String, String>),
}

/// One look: every question once. One without an answer makes it none.
pub(super) fn look(asker: &Asker, rooms: u16) -> Result<Answers, Failure> {
    let json = |path: &str| {
        let (status, mut value) = asker.get(path)?;
        if status == 404 {
            let why = anyhow::anyhow!("{path} is not known to this agent: it is older than this `roomtrace`");
            return Err(Failure::cannot_observe(why));
        }
        clean::json(&mut value);
        Ok(value)
    };
    let list = |which: &str| json(&format!("/api/v1/rooms?limit={rooms}&{which}"));
    let status = json("/status")?;
    let (_, metrics) = asker.fetch("/metrics")?;
    Ok(Answers {
        // Rooms become overdue and then pinned: asked in this order none slips through.
        open: list("pinned=false")?,
        overdue: list("overdue=true")?,
        pinned: list("pinned=true")?,
        findings: json(&format!("/api/v1/findings?limit={}", rooms.min(FINDINGS)))?,
        status,
        metrics: clean_lines(&metrics),
    })
}

/// Label values come from the agent, but what answers may be none.
fn clean_lines(text: &str) -> String {
    text.lines().flat_map(|line| [clean::text(line), "\n".to_owned()]).collect()
}

/// Looks at once and then every `interval`, until nobody listens.
pub(super) fn keep_looking(
    asker: Asker,
    rooms: u16,
    interval: Duration,
    to: SyncSender<News>,
) -> std::io::Result<()> {
    let run = move || {
        loop {
            let begun = Instant::now();
            let looked = look(&asker, rooms).map(Box::new).map_err(|f| in_words(&f));
            if to.send(News::Looked(looked)).is_err() {
                return;
            }
            std::thread::sleep(interval.saturating_sub(begun.elapsed()));
        }
    };
    std::thread::Builder::new().name("roomtrace-look".to_owned()).spawn(run).map(drop)
}

/// Whom to ask for explanations: a room and its incarnation (`None`: the newest); `None`: no room any more.
pub(super) type Questions = Sender<Option<(String, Option<u64>)>>;

/// Explains the room that was asked for last, and again every `interval`.
pub(super) fn keep_explaining(
    asker: Asker,
    interval: Duration,
    to: SyncSender<News>,
) -> std::io::Result<Questions> {
    let (questions, asked) = mpsc::channel();
    let run = move || explain_all(&asker, interval, &asked, &to);
    std::thread::Builder::new().name("roomtrace-explain".to_owned()).spawn(run)?;
    Ok(questions)
}

fn explain_all(
    asker: &Asker,
    interval: Duration,
    asked: &Receiver<Option<(String, Option<u64>)>>,
    to: &SyncSender<News>,
) {
    let mut room = None;
    loop {
        let next = if room.is_some() {
            asked.recv_timeout(interval)
        } else {
            asked.recv().map_err(|_| RecvTimeoutError::Disconnected)
        };
        match next {
            Ok(other) => room = other,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        // Only the last that was asked for.
        while let Ok(other) = asked.try_recv() {
            room = other;
        }
        if let Some((number, incarnation)) = &room {
            let text = explanation(asker, number, *incarnation);
            if to.send(News::Explained(number.clone(), text)).is_err() {
                return;
            }
        }
    }
}

/// The text of `roomtrace explain`.
fn explanation(asker: &Asker, room: &str, incarnation: Option<u64>) -> Result<String, String> {
    let life = incarnation.map_or_else(String::new, |n| format!("?incarnation={n}"));
    let ask = || -> Result<Option<String>, Failure> {
        let (status, mut record) = asker.get(&format!("/api/v1/rooms/{room}{life}"))?;
        if status == 404 {
            return Ok(None);
        }
        let (_, mut findings) =
            asker.get(&format!("/api/v1/findings?limit={}", crate::export::query::PAGE_MAX))?;
        clean::json(&mut record);
        clean::json(&mut findings);
        let findings = findings.get("findings").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        Ok(Some(explain::page(&record, findings)))
    };
    match ask() {
        Ok(Some(text)) => Ok(text),
        Ok(None) => Err(
            "the agent does not know this room any more: it has ended, and what is below was known before"
                .to_owned(),
        ),
        Err(f) => Err(in_words(&f)),
    }
}

/// A failure as one clean line.
pub(super) fn in_words(f: &Failure) -> String {
    clean::text(&f.error.to_string())
}
