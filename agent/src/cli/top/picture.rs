//! One look at an agent: what its answers say, ready to be shown, and what has become of its counters since the look before.
//!
//! Pure: answers go in, times are arguments. Every string is clean ([`super::super::clean`]) before it gets here. What no answer
//! says is `None`, never 0.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::Value;

use super::exposition::{self, Sample};
use crate::cli::explain;
use crate::verdict::model::Class;

/// Metrics that are shown.
const WANTED: &[&str] = &[
    "roomtrace_rooms_open",
    "roomtrace_rooms_pinned",
    "roomtrace_oldest_open_room_age_seconds",
    "roomtrace_rooms_closed_total",
    "roomtrace_messages_total",
    "roomtrace_capture_lost_total",
    "roomtrace_export_dropped_total",
    "roomtrace_bpf_run_seconds_total",
    "process_cpu_seconds_total",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
];

/// Shortest time between two looks of which rates are made: metrics are a second old at most, so over less they say nothing.
const LEAST: Duration = Duration::from_millis(500);

/// What the agent answered in one look.
#[derive(Clone, Debug, Default)]
pub(super) struct Answers {
    pub(super) pinned: Value,
    pub(super) overdue: Value,
    pub(super) open: Value,
    pub(super) findings: Value,
    pub(super) status: Value,
    pub(super) metrics: String,
}

/// How a room stands, worst first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stand {
    PinnedCertain,
    PinnedLikely,
    PinnedPossible,
    Overdue,
    Open,
}

impl Stand {
    pub(super) const fn pinned(self) -> bool {
        matches!(self, Self::PinnedCertain | Self::PinnedLikely | Self::PinnedPossible)
    }

    /// In words; what is only possible is told apart without colours.
    pub(super) const fn words(self) -> &'static str {
        match self {
            Self::PinnedCertain => "PINNED certain",
            Self::PinnedLikely => "PINNED likely",
            Self::PinnedPossible => "pinned? possible",
            Self::Overdue => "overdue",
            Self::Open => "open",
        }
    }

    /// The same where there is little space.
    pub(super) const fn word(self) -> &'static str {
        match self {
            Self::PinnedCertain => "CERTAIN",
            Self::PinnedLikely => "LIKELY",
            Self::PinnedPossible => "possible?",
            Self::Overdue => "overdue",
            Self::Open => "open",
        }
    }
}

/// Names a room: number, as text, and incarnation.
pub(super) type Key = (String, u64);

/// One room.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) key: Key,
    pub(super) stand: Stand,
    /// Class of its verdict; empty without one.
    pub(super) class: String,
    pub(super) age: Option<f64>,
    /// Who owes what, the longest text first.
    pub(super) owes: Vec<String>,
    /// The first line of its explanation, but for what the row says itself; what to do stands before what only explains.
    pub(super) summary: String,
    /// What a search looks at.
    pub(super) searched: String,
}

/// One finding.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct FindingRow {
    /// As `roomtrace rooms` writes it.
    pub(super) line: String,
    pub(super) certainly: bool,
    /// The first of its rooms.
    pub(super) room: Option<String>,
}

/// One pair of ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PeerRow {
    pub(super) prefill: String,
    pub(super) decode: String,
    pub(super) backend: String,
    /// Rooms handed over per second.
    pub(super) rate: Option<f64>,
    /// Seconds since the last was.
    pub(super) last: Option<f64>,
    /// Of the rooms that are listed.
    pub(super) pinned: u64,
    pub(super) overdue: u64,
}

/// How many of one kind there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counted {
    /// In all, where it is known.
    pub(super) total: Option<u64>,
    /// Of those as many are listed.
    pub(super) listed: u64,
}

impl Counted {
    /// Whether some are not listed, or it is not known whether.
    pub(super) fn more(self) -> bool {
        self.total.is_none_or(|n| n > self.listed)
    }
}

/// Something lost: where, why, how many since the agent started and per second now.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Loss {
    pub(super) what: String,
    pub(super) total: f64,
    pub(super) rate: Option<f64>,
}

/// The whole of it.
#[derive(Clone, Debug, Default)]
pub(super) struct Picture {
    pub(super) host: String,
    pub(super) version: String,
    pub(super) hook: String,
    /// Seconds that the agent has run.
    pub(super) uptime: Option<f64>,
    pub(super) rows: Vec<Row>,
    pub(super) pinned: Counted,
    /// Pinned rooms by confidence: certain, likely, possible.
    pub(super) sure: Option<[u64; 3]>,
    pub(super) overdue: Counted,
    /// Rooms that are open, the pinned and overdue ones too.
    pub(super) open: Option<u64>,
    /// Open rooms that are neither, as many as are listed.
    pub(super) others_listed: u64,
    pub(super) oldest: Option<f64>,
    pub(super) findings: Vec<FindingRow>,
    pub(super) findings_total: Option<u64>,
    /// Open findings as the agent tells them, for explanations.
    pub(super) finding_records: Vec<Value>,
    pub(super) peers: Vec<PeerRow>,
    pub(super) peers_total: Option<u64>,
    /// Views ended per second: of prefill and decode; all, and failed.
    pub(super) ended: [[Option<f64>; 2]; 2],
    pub(super) messages: Option<f64>,
    pub(super) lost: Vec<Loss>,
    pub(super) lost_total: Option<f64>,
    pub(super) lost_rate: Option<f64>,
    pub(super) dropped: Vec<Loss>,
    pub(super) dropped_total: Option<f64>,
    /// Share of one CPU: of the agent, and of its kernel programs.
    pub(super) cpu: Option<f64>,
    pub(super) kernel: Option<f64>,
    /// Kernel programs by what they cost now.
    pub(super) programs: Vec<(String, Option<f64>)>,
    pub(super) memory: Option<f64>,
    /// What the agent could not attach, and what is not known for it.
    pub(super) missing: Vec<String>,
    counters: Counters,
}

/// Counters at one moment.
#[derive(Clone, Debug, Default)]
struct Counters {
    at: Duration,
    /// When the agent started: after a restart they begin anew.
    start: Option<f64>,
    values: BTreeMap<String, f64>,
}

impl Counters {
    fn add(&mut self, name: impl Into<String>, value: f64) {
        *self.values.entry(name.into()).or_default() += value;
    }

    fn get(&self, name: &str) -> Option<f64> {
        self.values.get(name).copied()
    }

    /// Growth per second since `before`; `None` where one of the two does not have it, or it began anew between them.
    fn rate(&self, name: &str, before: Option<&Self>) -> Option<f64> {
        let before = before.filter(|b| b.start == self.start)?;
        let time = self.at.checked_sub(before.at).filter(|t| *t >= LEAST)?;
        let grown = self.get(name)? - before.get(name)?;
        (grown >= 0.0).then(|| grown / time.as_secs_f64())
    }
}

impl Picture {
    /// What `answers` say, that came at `at`; `before` is the look before, for rates.
    pub(super) fn new(answers: &Answers, at: Duration, before: Option<&Self>) -> Self {
        let status = &answers.status;
        let finding_records = list(&answers.findings["findings"]).to_vec();
        let mut p = Self {
            host: text(&status["host"]),
            version: text(&status["version"]),
            hook: text(&status["capture"]["hook"]),
            uptime: status["uptime_s"].as_f64(),
            open: status["rooms"]["views_open"].as_u64(),
            findings_total: answers.findings["total"].as_u64(),
            findings: finding_records.iter().map(finding).collect(),
            missing: list(&status["capture"]["missing"]).iter().map(missing).collect(),
            ..Self::default()
        };
        let samples = exposition::read(&answers.metrics, WANTED);
        p.counters.at = at;
        p.counters.start = value(&samples, "process_start_time_seconds");
        p.rooms(answers, &samples, &finding_records);
        p.finding_records = finding_records;
        p.count(&samples, before.map(|b| &b.counters));
        p.pairs(status, answers, before.map(|b| &b.counters));
        p
    }

    /// A number of rooms that was counted in a list, which may not have all.
    pub(super) fn of_listed(counted: Counted, n: u64) -> String {
        if counted.more() { format!("{n}+") } else { n.to_string() }
    }

    fn rooms(&mut self, answers: &Answers, samples: &[Sample], findings: &[Value]) {
        let rows = |answer: &Value| -> Vec<Row> {
            list(&answer["rooms"]).iter().map(|r| row(r, findings)).collect()
        };
        let (pinned, overdue, open) = (rows(&answers.pinned), rows(&answers.overdue), rows(&answers.open));
        let whole = |answer: &Value| answer["rooms"].is_array() && answer["next"].is_null();
        let listed = |rows: &[Row]| u64::try_from(rows.len()).unwrap_or(u64::MAX);
        // The list and the counts are not of the same moment: where the list has all, it is what counts.
        let by = |confidence: &str| {
            let of = |s: &&Sample| s.name == "roomtrace_rooms_pinned" && s.label("confidence") == confidence;
            whole_number(samples.iter().filter(of).map(|s| s.value).sum())
        };
        let counted = [by("certain"), by("likely"), by("possible")];
        let in_list = [Stand::PinnedCertain, Stand::PinnedLikely, Stand::PinnedPossible]
            .map(|stand| pinned.iter().filter(|r| r.stand == stand).count() as u64);
        // No series of it is there while nothing is pinned; that the others are shows that it was measured.
        let measured = samples.iter().any(|s| s.name == "roomtrace_rooms_open");
        self.sure = if whole(&answers.pinned) { Some(in_list) } else { measured.then_some(counted) };
        let n = listed(&pinned);
        self.pinned = Counted { total: self.sure.map(|s| s.iter().sum::<u64>().max(n)), listed: n };
        let n = listed(&overdue);
        let told = answers.status["rooms"]["overdue"].as_u64().map(|told| told.max(n));
        self.overdue = Counted { total: if whole(&answers.overdue) { Some(n) } else { told }, listed: n };
        // Counted a moment earlier or later than they were listed.
        self.open = self.open.map(|open| open.max(self.pinned.listed + self.overdue.listed));
        let ages = samples.iter().filter(|s| s.name == "roomtrace_oldest_open_room_age_seconds");
        self.oldest = ages.map(|s| s.value).reduce(f64::max);
        let mut known = BTreeSet::new();
        // Between two answers a room can become overdue or pinned: it is shown once.
        self.rows =
            pinned.into_iter().chain(overdue).chain(open).filter(|r| known.insert(r.key.clone())).collect();
        self.others_listed = self.rows.iter().filter(|r| r.stand == Stand::Open).count() as u64;
    }

    fn count(&mut self, samples: &[Sample], before: Option<&Counters>) {
        let (mut lost, mut dropped, mut programs) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
        for s in samples {
            let two = |a: &str, b: &str| format!("{} {}", s.label(a), s.label(b));
            let c = &mut self.counters;
            match s.name.as_str() {
                "roomtrace_rooms_closed_total" => {
                    c.add(format!("ended {}", s.label("role")), s.value);
                    if s.label("outcome") == "failed" {
                        c.add(format!("failed {}", s.label("role")), s.value);
                    }
                }
                "roomtrace_messages_total" => c.add("messages", s.value),
                "roomtrace_capture_lost_total" => {
                    c.add("lost", s.value);
                    c.add(format!("lost {}", two("stage", "reason")), s.value);
                    lost.insert(two("stage", "reason"), s.value);
                }
                "roomtrace_export_dropped_total" => {
                    c.add("dropped", s.value);
                    c.add(format!("dropped {}", two("signal", "reason")), s.value);
                    dropped.insert(two("signal", "reason"), s.value);
                }
                "roomtrace_bpf_run_seconds_total" => {
                    c.add("kernel", s.value);
                    c.add(format!("program {}", s.label("program")), s.value);
                    programs.push(s.label("program").to_owned());
                }
                "process_cpu_seconds_total" => c.add("cpu", s.value),
                "process_resident_memory_bytes" => self.memory = Some(s.value),
                _ => {}
            }
        }
        let c = &self.counters;
        let rate = |name: &str| c.rate(name, before);
        self.ended = ["prefill", "decode"]
            .map(|role| [rate(&format!("ended {role}")), rate(&format!("failed {role}"))]);
        self.messages = rate("messages");
        (self.lost_total, self.lost_rate) = (c.get("lost"), rate("lost"));
        self.dropped_total = c.get("dropped");
        (self.cpu, self.kernel) = (rate("cpu"), rate("kernel"));
        let losses = |of: &str, list: BTreeMap<String, f64>| -> Vec<Loss> {
            let there = list.into_iter().filter(|(_, n)| *n > 0.0);
            there.map(|(what, total)| Loss { rate: rate(&format!("{of} {what}")), what, total }).collect()
        };
        self.lost = losses("lost", lost);
        self.dropped = losses("dropped", dropped);
        self.programs = programs.into_iter().map(|p| (p.clone(), rate(&format!("program {p}")))).collect();
        self.programs.sort_by(|a, b| b.1.unwrap_or(-1.0).total_cmp(&a.1.unwrap_or(-1.0)));
    }

    fn pairs(&mut self, status: &Value, answers: &Answers, before: Option<&Counters>) {
        let pinned = ends(&answers.pinned);
        let overdue = ends(&answers.overdue);
        self.peers_total = status["peers"]["total"].as_u64();
        for p in list(&status["peers"]["listed"]) {
            let (prefill, decode) = (text(&p["prefill"]), text(&p["decode"]));
            let name = format!("pair {prefill} {decode} {}", text(&p["session"]));
            if let Some(n) = p["concluded"].as_f64() {
                self.counters.add(name.clone(), n);
            }
            let between = |rooms: &[[Vec<String>; 2]]| {
                rooms.iter().filter(|[p, d]| p.contains(&prefill) && d.contains(&decode)).count() as u64
            };
            self.peers.push(PeerRow {
                backend: text(&p["backend"]),
                rate: self.counters.rate(&name, before),
                last: p["last_concluded_s"].as_f64(),
                pinned: between(&pinned),
                overdue: between(&overdue),
                prefill,
                decode,
            });
        }
        self.peers.sort_by(|a, b| {
            let key =
                |p: &PeerRow| (std::cmp::Reverse((p.pinned, p.overdue)), p.prefill.clone(), p.decode.clone());
            key(a).cmp(&key(b))
        });
    }
}

/// Ranks of prefill and of decode that each room is between, as its views or the other side's messages name them.
fn ends(answer: &Value) -> Vec<[Vec<String>; 2]> {
    let of = |room: &Value| {
        [("prefill", "decode"), ("decode", "prefill")].map(|(own, other)| {
            let ranks = list(&room["views"][own]["ranks"]).iter().map(|r| &r["endpoint"]);
            let peers = list(&room["views"][other]["messages"]).iter().map(|m| &m["peer"]);
            let mut all: Vec<String> =
                ranks.chain(peers).filter_map(Value::as_str).map(str::to_owned).collect();
            all.sort();
            all.dedup();
            all
        })
    };
    list(&answer["rooms"]).iter().map(of).collect()
}

fn row(record: &Value, findings: &[Value]) -> Row {
    let verdict = &record["verdict"];
    let class = text(&verdict["class"]);
    let stand = match (record["pinned"].as_bool() == Some(true), verdict["confidence"].as_str()) {
        (true, Some("certain")) => Stand::PinnedCertain,
        (true, Some("likely")) => Stand::PinnedLikely,
        (true, _) => Stand::PinnedPossible,
        (false, _) if overdue(&class) => Stand::Overdue,
        (false, _) => Stand::Open,
    };
    let summary = explain::summary(record, findings);
    let place = &verdict["owed_by"];
    let more = [
        &record["request"]["rid"],
        &place["container"],
        &place["pod_uid"],
        &place["comm"],
        &record["backend"],
    ];
    let mut searched = summary.to_lowercase();
    for s in more.into_iter().filter_map(Value::as_str) {
        searched.push('\n');
        searched.push_str(&s.to_lowercase());
    }
    Row {
        key: (text(&record["room"]), record["incarnation"].as_u64().unwrap_or_default()),
        stand,
        owes: owes(record),
        age: record["age_s"].as_f64(),
        class,
        summary: shortened(&summary),
        searched,
    }
}

/// Whether a room with this class, which is no pin, has waited too long: not so where nothing is owed, or its end is never seen.
fn overdue(class: &str) -> bool {
    let never = [Class::CompletionNotObservable.label(), Class::NotApplicable.label()];
    !class.is_empty() && !never.contains(&class)
}

/// The first line of an explanation without its first part, which number, age and class make up.
fn shortened(summary: &str) -> String {
    let mut parts: Vec<&str> = summary.split(" · ").collect();
    if parts.len() > 1 {
        parts.remove(0);
    }
    if let Some(at) = parts.iter().position(|p| p.starts_with("do: ")).filter(|at| *at > 1) {
        let what_to_do = parts.remove(at);
        parts.insert(1, what_to_do);
    }
    parts.join(" · ")
}

/// Who owes what, from the whole sentence to who alone.
fn owes(record: &Value) -> Vec<String> {
    let verdict = &record["verdict"];
    let owed_by = &verdict["owed_by"];
    let whole = explain::owes(record);
    if owed_by.is_null() {
        let short = if whole.is_some() { "nobody" } else { super::text::NONE };
        return whole.into_iter().chain([short.to_owned()]).collect();
    }
    let mut who = owed_by["role"].as_str().unwrap_or("outside").to_owned();
    if let Some(rank) = owed_by["rank"].as_u64() {
        let _ = write!(who, " r{rank}");
    }
    let what = verdict["expected"].as_str().map_or_else(String::new, |what| format!(" owes {what}"));
    let at = owed_by["endpoint"].as_str().map_or_else(String::new, |at| format!(" {at}"));
    let process = match (owed_by["pid"].as_u64(), owed_by["comm"].as_str()) {
        (Some(pid), Some(comm)) => format!(" (pid {pid} {comm})"),
        _ => String::new(),
    };
    let shorter =
        [format!("{who}{at}{process}{what}"), format!("{who}{at}{what}"), format!("{who}{what}"), who];
    whole.into_iter().chain(shorter).collect()
}

fn finding(f: &Value) -> FindingRow {
    let line = explain::finding_line(f);
    FindingRow {
        line: line.strip_prefix("finding ").map_or(line.clone(), str::to_owned),
        certainly: f["confidence"].as_str().is_some_and(|c| c != "possible"),
        room: list(&f["rooms"]).first().and_then(Value::as_str).map(str::to_owned),
    }
}

fn missing(m: &Value) -> String {
    format!("{}: not known is {} ({})", text(&m["program"]), text(&m["not_known"]), text(&m["why"]))
}

fn value(samples: &[Sample], name: &str) -> Option<f64> {
    samples.iter().find(|s| s.name == name).map(|s| s.value)
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a count of rooms, bounded")]
fn whole_number(n: f64) -> u64 {
    n.clamp(0.0, 1e15) as u64
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}
