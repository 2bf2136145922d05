//! The agent's own part of the first page: whether it can tell anything, what it missed, what it costs. What was not measured is said
//! to be so.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use maud::{Markup, html};

use super::super::{age, many};
use crate::export::counters::{Reason, Signal};
use crate::export::http::{Answers, STALLED};
use crate::export::metrics::MetricsSnapshot;
use crate::export::process::Process;
use crate::prose::chart::amount;
use crate::rooms::model::Role;
use crate::verdict::model::Confidence;

pub(super) struct Agent {
    snapshot: Option<Arc<MetricsSnapshot>>,
    /// How long ago that was published.
    silent: Duration,
    ready: Result<(), String>,
    /// What did not leave the agent: signal, reason, how much.
    dropped: Vec<(&'static str, &'static str, u64)>,
    process: Process,
}

impl Agent {
    pub(super) fn of(a: &Answers) -> Self {
        let published = a.published.borrow();
        let all = Signal::ALL.into_iter().flat_map(|s| Reason::ALL.map(|r| (s, r)));
        let dropped = all.map(|(s, r)| (s.label(), r.label(), a.counters.dropped(s, r)));
        Self {
            snapshot: published.snapshot.clone(),
            silent: published.at.elapsed(),
            ready: a.ready.borrow().clone(),
            dropped: dropped.filter(|d| d.2 > 0).collect(),
            process: Process::read(),
        }
    }

    /// Why nothing it says of the rooms means anything, if so.
    pub(super) fn blind(&self) -> Option<String> {
        if let Err(why) = &self.ready {
            return Some(format!("It is not ready: {why}"));
        }
        if self.silent >= STALLED {
            return Some(format!(
                "The thread that follows the rooms has not reported for {} s.",
                self.silent.as_secs()
            ));
        }
        match self.engines() {
            None => Some("It has measured nothing yet.".to_owned()),
            Some(0) => Some(
                "No engine process was seen on this host. If there is one, `roomtrace doctor` says what is in the way."
                    .to_owned(),
            ),
            Some(_) => None,
        }
    }

    fn engines(&self) -> Option<u64> {
        Some(self.snapshot.as_ref()?.engine_processes.iter().map(|(_, n)| n).sum())
    }

    /// Pinned rooms when it last reported: likely or certain, and possible.
    pub(super) fn pinned(&self) -> Option<(u64, u64)> {
        let of = |wanted: fn(Confidence) -> bool| {
            let rooms = &self.snapshot.as_ref()?.rooms_pinned;
            Some(rooms.iter().filter(|p| wanted(p.confidence)).map(|p| p.rooms).sum::<u64>())
        };
        of(|c| c != Confidence::Possible).zip(of(|c| c == Confidence::Possible))
    }

    /// What it watches, in words.
    pub(super) fn watches(&self) -> String {
        let Some(m) = &self.snapshot else { return "What is watched is not measured yet.".to_owned() };
        let of = |role| m.engine_processes.iter().filter(|(r, _)| *r == role).map(|(_, n)| n).sum::<u64>();
        let mut parts = vec![
            format!("{} prefill", of(Some(Role::Prefill))),
            format!("{} decode", of(Some(Role::Decode))),
        ];
        if let n @ 1.. = of(None) {
            parts.push(format!("{n} of unknown role"));
        }
        format!("Engine processes seen: {}.", parts.join(", "))
    }

    /// What was lost since the agent started.
    pub(super) fn missed(&self) -> Markup {
        let Some(m) = &self.snapshot else {
            return html! { section { h2 { "What this agent missed" } p class="dim" { "not measured yet" } } };
        };
        let lost: Vec<_> = m.capture_lost.iter().filter(|l| l.2 > 0).collect();
        let kernel = m.capture_lost.iter().any(|l| l.0 == "kernel");
        let nothing =
            lost.is_empty() && self.dropped.is_empty() && m.connections_unread.iter().all(|c| c.1 == 0);
        html! {
            section {
                h2 { "What this agent missed" }
                @if nothing { p { "Nothing that it knows of, since it started." } }
                dl class="numbers" {
                    @for (stage, reason, n) in lost { dt { "lost at " (stage) ": " (reason) } dd { (n) } }
                    @for (signal, reason, n) in &self.dropped { dt { "not exported: " (signal) ", " (reason) } dd { (n) } }
                    @for (reason, n) in m.connections_unread.iter().filter(|c| c.1 > 0) { dt { "connections not read: " (reason) } dd { (n) } }
                    @if let Some(n @ 1..) = m.findings_turned_away { dt { "findings not opened: table full" } dd { (n) } }
                    @if !kernel { dt { "lost in the kernel" } dd { "not measured" } }
                }
                @if !nothing { p class="dim" { "Rooms that it touches are unknown, never pinned and never called healthy." } }
            }
        }
    }

    pub(super) fn costs(&self) -> Markup {
        let p = &self.process;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map(|d| d.as_secs_f64()).ok();
        let up = now.zip(p.start_seconds).map(|(now, start)| (now - start).max(0.01));
        let share = |seconds: f64| {
            up.map(|up| format!(" ({:.2} % of a core)", 100.0 * seconds / up)).unwrap_or_default()
        };
        let timed = self.snapshot.as_ref().map(|m| &m.bpf_run_nanos).filter(|all| !all.is_empty());
        #[allow(clippy::cast_precision_loss, reason = "shown with two decimals")]
        let kernel = timed.map(|all| all.iter().map(|(_, n)| *n).sum::<u64>() as f64 / 1e9);
        let not = || "not measured".to_owned();
        let rows = [
            ("running for", up.map_or_else(not, age)),
            ("CPU time", p.cpu_seconds.map_or_else(not, |s| format!("{s:.1} s{}", share(s)))),
            ("in its kernel programs", kernel.map_or_else(not, |s| format!("{s:.2} s{}", share(s)))),
            ("memory", p.resident_bytes.map_or_else(not, amount)),
        ];
        let connections = self.snapshot.as_ref().map(|m| m.connections.iter().map(|c| c.1).sum::<u64>());
        html! {
            section {
                h2 { "What it costs, since it started" }
                dl class="numbers" {
                    @for (name, value) in rows { dt { (name) } dd { (value) } }
                    dt { "follows" } dd { (connections.map_or_else(not, |n| many(n, "connection"))) }
                }
            }
        }
    }
}
