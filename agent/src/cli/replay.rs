//! `roomtrace replay`: a packet capture or a recording through the same stages as live capture. Time is the file's own.

use std::fmt::Write as _;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use serde_json::Value;

use super::{End, Failure, Outcome, ReplayArgs, explain, print, recording, room_config};
use crate::event::{Mono, SECOND};
use crate::export::clock::Clock;
use crate::export::query::PAGE_MAX;
use crate::export::record::Maker;
use crate::export::{Exports, Identity, Options};
use crate::pipeline::Pipeline;
use crate::prose::counted;
use crate::replay::recorded::{Read, Reader, RecordingError};
use crate::replay::{Progress, Replay, ReplayError, SUPPORTED, Summary};
use crate::rooms::model::RoomSnapshot;
use crate::verdict::model::Finding;

/// How often the rooms hear of time, as in live capture.
const TICK: u64 = SECOND / 10;

/// Ticks at most for one stretch without packets: a capture with a gap of weeks must not take hours.
const TICKS: u64 = 100_000;

/// How long outputs may take at the end.
const GRACE: Duration = Duration::from_secs(10);

/// The pipeline with the capture's clock and its outputs.
struct Player {
    pipeline: Pipeline,
    exports: Exports,
    clock: Clock,
    now: Option<Mono>,
}

impl Player {
    /// Moves the clock to `to`, ticking on the way.
    fn advance(&mut self, to: Mono) {
        let Some(mut now) = self.now else {
            self.now = Some(to);
            return;
        };
        let step = TICK.max(to.since(now) / TICKS);
        while to.since(now) >= step {
            now = now.plus(step);
            self.pipeline.tick(now);
            self.flush();
        }
        self.now = Some(now);
    }

    fn flush(&mut self) {
        if !self.pipeline.has_events() {
            return;
        }
        for event in self.pipeline.events() {
            self.exports.room_event_wait(&event, &self.clock);
        }
        let at = self.pipeline.rooms().now();
        for event in self.pipeline.finding_events() {
            self.exports.finding_event_wait(&event, at, &self.clock);
        }
    }
}

/// What is replayed.
enum Source {
    Packets(Box<Replay>),
    Recording { reader: Option<Box<Reader<BufReader<File>>>>, offset: i64, read: Read },
}

/// Why it could not be replayed to its end.
#[derive(Debug, thiserror::Error)]
enum PlayError {
    #[error(transparent)]
    Capture(#[from] ReplayError),
    #[error(transparent)]
    Recording(#[from] RecordingError),
}

impl Source {
    fn open(file: &Path) -> Result<Self, Failure> {
        if !recording::is_one(file) {
            let capture = Replay::open(file).map_err(|e| unusable(file, e.into()))?;
            return Ok(Self::Packets(Box::new(capture)));
        }
        let reader = recording::open(file).map_err(|e| unusable(file, e.into()))?;
        let offset = reader.head().offset;
        Ok(Self::Recording { reader: Some(Box::new(reader)), offset, read: Read::default() })
    }

    fn clock(&self) -> Clock {
        match self {
            Self::Packets(_) => Clock::of_replay(),
            Self::Recording { offset, .. } => Clock::fixed(*offset),
        }
    }

    fn play(&mut self, player: &mut Player, extend: Duration) -> Result<(), PlayError> {
        let last = match self {
            Self::Packets(capture) => {
                play(capture, player)?;
                capture.summary().last
            }
            Self::Recording { reader, read, .. } => {
                let Some(reader) = reader.take() else { return Ok(()) };
                *read = reader.run(&mut |at, input| {
                    player.advance(at);
                    player.pipeline.tell(input);
                    player.flush();
                })?;
                read.last
            }
        };
        if let Some(last) = last {
            let extend = u64::try_from(extend.as_nanos()).unwrap_or(u64::MAX);
            let end = last.plus(extend);
            player.advance(end);
            player.pipeline.tick(end);
            player.flush();
        }
        Ok(())
    }

    /// What was read, for people.
    fn told(&self) -> String {
        match self {
            Self::Packets(capture) => {
                let s = capture.summary();
                [
                    counted(s.packets, "packet", "packets"),
                    counted(s.segments, "TCP segment", "TCP segments"),
                    counted(s.connections, "connection", "connections"),
                ]
                .join(", ")
            }
            Self::Recording { read, .. } => counted(read.lines, "recorded event", "recorded events"),
        }
    }

    /// Names what could not be read, for people.
    fn unread(&self) -> Option<String> {
        match self {
            Self::Packets(capture) => {
                let skipped = capture.summary().skipped;
                let other = skipped.fragments + skipped.cut_headers + skipped.malformed + skipped.link_type;
                let what = "packets could not be read (fragments, cut or malformed headers, link type)";
                (other > 0).then(|| format!("{other} {what}"))
            }
            Self::Recording { read, .. } => (read.unknown + read.dropped > 0).then(|| {
                format!(
                    "{} lines are none that this version knows, {} had found no place in the recording",
                    read.unknown, read.dropped
                )
            }),
        }
    }

    fn warn(&self) {
        if let Self::Packets(capture) = self {
            warn_of_cut_packets(&capture.summary());
            warn_of_link_types(&capture.summary());
        }
    }

    fn damage(&self) -> Option<String> {
        match self {
            Self::Packets(capture) => capture.summary().damage.map(|d| d.to_string()),
            // An agent that was killed leaves the last line so.
            Self::Recording { .. } => None,
        }
    }
}

/// `roomtrace replay FILE`.
pub(super) fn replay(args: &ReplayArgs) -> Outcome {
    super::logging();
    let config = args.overrides.resolve()?;
    let mut source = Source::open(&args.file)?;
    let identity = Identity {
        host_name: args.file.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned()),
        host_id: "replay".to_owned(),
        trace_salt: config.export.trace_salt.0.clone(),
        live: false,
        known_issues: super::known_issues,
    };
    if let Some(path) = config.export.events.as_deref().filter(|p| *p != Path::new("-")) {
        // The writer appends, for agents that are restarted; a replay is a run of its own.
        File::create(path)
            .with_context(|| format!("cannot write events to {}", path.display()))
            .map_err(Failure::usage)?;
    }
    let options = Options {
        events: config.export.events.clone(),
        otlp: config.export.otlp.clone(),
        listen: None,
        first: None,
    };
    let runtime = super::runtime()?;
    let exports = runtime.block_on(Exports::start(options, identity.clone())).map_err(Failure::usage)?;
    let mut player = Player {
        pipeline: Pipeline::new(super::limits(&config), room_config(&config)),
        exports,
        clock: source.clock(),
        now: None,
    };
    let read = source.play(&mut player, args.extend);
    let text = report(&player, &identity, args, &source);
    let pinned = player.pipeline.rooms().pinned().next().is_some();
    let counters = player.exports.counters();
    runtime.block_on(player.exports.shutdown(GRACE));
    let to_stdout = config.export.events.as_deref() == Some(Path::new("-"));
    // Of a file that could not be read at all there is nothing to report.
    if !to_stdout && !matches!(read, Err(PlayError::Capture(ReplayError::LinkType(_)))) {
        print(&text)?;
    }
    read.map_err(|e| unusable(&args.file, e))?;
    source.warn();
    let failed = if args.fail_on_pinned && pinned { End::Findings } else { End::Usage };
    let fail = |error| Err(Failure { end: failed, error });
    if let Some(dropped) = super::dropped(&counters) {
        return fail(anyhow!("not everything was delivered: {dropped}"));
    }
    if let Some(damage) = source.damage() {
        // What came before the damage is told above; the file is still not what it should be.
        return fail(anyhow!("{}: {damage}; what came before it was replayed", args.file.display()));
    }
    if args.explain.is_some_and(|room| player.pipeline.rooms().snapshot(room).is_empty()) {
        return Ok(End::Usage);
    }
    Ok(if args.fail_on_pinned && pinned { End::Findings } else { End::Fine })
}

/// A part of the file that could not be read is not in what was found.
fn warn_of_cut_packets(summary: &Summary) {
    let cut = summary.repairs.snaplen + summary.skipped.cut_headers;
    if cut > 0 {
        tracing::warn!(
            "{cut} of {} packets hold only a part of their bytes (snap length): messages in them were not read, rooms may be \
             missing here and verdicts rest on less than the wire carried; capture whole packets (tcpdump -s 0)",
            summary.packets
        );
    }
}

/// See [`warn_of_cut_packets`].
fn warn_of_link_types(summary: &Summary) {
    if summary.skipped.link_type == 0 {
        return;
    }
    let each: Vec<String> =
        summary.link_types.iter().map(|(link, n)| format!("{n} of link type {link}")).collect();
    let each = if each.is_empty() {
        "of interfaces that the file does not describe".to_owned()
    } else {
        each.join(", ")
    };
    tracing::warn!(
        "{} of {} packets were left out: {each} (supported are {SUPPORTED}); what they carried is not in the result",
        summary.skipped.link_type,
        summary.packets
    );
}

fn unusable(file: &Path, error: PlayError) -> Failure {
    Failure::usage(anyhow::Error::new(error).context(file.display().to_string()))
}

fn play(capture: &mut Replay, player: &mut Player) -> Result<(), ReplayError> {
    loop {
        let progress = capture.step(&mut |event| {
            player.advance(event.at);
            player.pipeline.handle(&event);
            player.flush();
        })?;
        match progress {
            Progress::Packet(at) => player.advance(at),
            Progress::End => return Ok(()),
        }
    }
}

fn report(player: &Player, identity: &Identity, args: &ReplayArgs, source: &Source) -> String {
    let maker = Maker { identity, clock: &player.clock };
    let value = |room: &RoomSnapshot| {
        serde_json::to_value(maker.room(room))
            .with_context(|| format!("cannot write room {} as JSON", room.room))
            .unwrap_or_default()
    };
    let mut out = String::new();
    let table = player.pipeline.rooms();
    let at = table.now();
    let finding = |f: &Finding| {
        serde_json::to_value(maker.finding(f, at))
            .with_context(|| format!("cannot write finding {:016x} as JSON", f.group))
            .unwrap_or_default()
    };
    let findings: Vec<Value> = table.first_findings(PAGE_MAX).iter().map(finding).collect();
    if let Some(room) = args.explain {
        let lives = table.details(room);
        if lives.is_empty() {
            let _ = writeln!(out, "room {room} is not in this capture");
        }
        for life in &lives {
            out.push_str(&explain::page(&value(life), &findings));
        }
        return out;
    }
    let open = player.pipeline.rooms().gauges().rooms;
    let pinned: Vec<RoomSnapshot> = player.pipeline.rooms().pinned().collect();
    let raised: u64 = player.pipeline.rooms().counters().pins.iter().map(|(_, _, n)| n).sum();
    let _ = writeln!(
        out,
        "{}; {} of rooms open at the end, {} pinned at the end, {} raised on the way",
        source.told(),
        counted(open, "view", "views"),
        counted(pinned.len() as u64, "room", "rooms"),
        counted(raised, "pin", "pins"),
    );
    if let Some(unread) = source.unread() {
        let _ = writeln!(out, "{unread}");
    }
    out.push_str(&explain::finding_lines(&findings, table.finding_count()));
    for room in &pinned {
        let _ = writeln!(out, "{}", explain::summary(&value(room), &findings));
    }
    out
}
