//! Reads one GPU, over and over, on a thread of its own: which readings it has is found by asking, the surest source first.
//!
//! May block for as long as the driver does; a call that took too long counts as none, since what it read may be of any moment in between.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::Settings;
use super::counter::{Counters, FASTEST_NVLINK, Told, Unusable, Width, bytes_at, fastest_pcie};
use super::driver::{Gpm, Gpu, Refused};
use super::model::What;
use super::standing::{GpuStanding, Watched};
use super::windows::{Link, Source, Stretch};
use crate::event::{Mono, SECOND};
use crate::kernel::monotonic;

/// A call that takes longer has told nothing.
pub(super) const DEADLINE: Duration = Duration::from_millis(500);

/// Between two samples of GPM at least (`nvml.h`: more than 100 ms), nanoseconds.
const GPM_APART: u64 = 105_000_000;

/// Between two readings of a counter of 32 bits while rooms are in transfer, milliseconds: at least and at most. In between it is half the
/// time in which 4 GiB can pass, 27 ms on 16 lanes of generation 5.
const NARROW: (u64, u64) = (20, 50);

/// How often the driver's own rate is asked for, that takes 20 ms a direction.
const THROUGHPUT: u64 = SECOND;

/// How often health is asked for.
const HEALTH: u64 = SECOND;

/// How often processes are.
const PROCESSES: u64 = 5 * SECOND;

/// A reading that fails so often in a row is left alone for [`AGAIN`].
const FAILURES: u32 = 5;

/// See [`FAILURES`]; also how often a lost GPU is looked at again.
const AGAIN: u64 = 60 * SECOND;

/// GPM that is late as often in a row is left alone as long, and each time that it is late again twice as long, so often: its call holds up
/// all others of the GPU, and counters may answer in time.
const LONGER: u32 = 4;

/// A utilisation is of the last sixth of a second to second (`nvml.h`): taken for the former, so that it never claims time it is not of.
const UTILIZATION: u64 = SECOND / 6;

/// It is asked no closer than this. Readings are closer where a narrow counter is read; those of a utilisation overlap then all the same.
const UTILIZATION_APART: u64 = UTILIZATION / 2;

/// GPM's numbers (`nvml.h`, `nvmlGpmMetricId_t`): `PCIe`, `NVLink`, C2C, each out and in, MiB/s.
pub(super) const METRICS: [u32; 6] = [20, 21, 61, 60, 100, 101];

/// Field ids (`nvml.h`): `PCIe` bytes out and in; `NVLink` payload out and in, KiB, with the scope of all links; recovery action.
pub(super) const FIELDS: [(u32, u32); 4] = [(197, 0), (198, 0), (138, u32::MAX), (139, u32::MAX)];
pub(super) const RECOVERY: (u32, u32) = (230, 0);

/// What can be asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Ask {
    Gpm,
    Counters,
    NvLinkCounters,
    Throughput,
    Utilization,
    Recovery,
    Clocks,
    Processes,
}

impl Ask {
    /// Its name in `/status`.
    pub(super) const fn label(self) -> &'static str {
        match self {
            Self::Gpm => "gpm",
            Self::Counters => "pcie_counters",
            Self::NvLinkCounters => "nvlink_counters",
            Self::Throughput => "pcie_throughput",
            Self::Utilization => "utilization",
            Self::Recovery => "recovery_action",
            Self::Clocks => "clock_reasons",
            Self::Processes => "processes",
        }
    }
}

/// How a kind of reading stands.
#[derive(Clone, Debug, Default)]
struct Ability {
    failures: u32,
    refused: Option<String>,
    /// Not before this; `None` with a refusal: never.
    again: Option<Mono>,
    /// Calls in a row that came back late.
    late: u32,
    /// How often it was left alone for that.
    rests: u32,
}

impl Ability {
    /// Why nothing is read of it.
    fn why(&self) -> Option<String> {
        let slow = || format!("too late to be used, {} times in a row (more than {DEADLINE:?})", self.late);
        self.refused.clone().or_else(|| (self.late > 0).then(slow))
    }

    /// A call came back late.
    fn slow(&mut self, ask: Ask, at: Mono) {
        self.late = self.late.saturating_add(1);
        if ask == Ask::Gpm && self.late >= FAILURES {
            self.refused = None;
            self.refused = self.why();
            self.again = Some(at.plus(AGAIN << self.rests.min(LONGER)));
            self.rests = self.rests.saturating_add(1);
        }
    }
}

/// What is never asked, so that only `sources` tell of bytes.
fn left_out(sources: &[Source]) -> BTreeMap<Ask, Ability> {
    let of = [
        (Ask::Gpm, Source::Gpm),
        (Ask::Counters, Source::Counters),
        (Ask::NvLinkCounters, Source::Counters),
        (Ask::Throughput, Source::Throughput),
    ];
    let out = || Ability { refused: Some("left out".to_owned()), ..Ability::default() };
    of.into_iter().filter(|(_, source)| !sources.contains(source)).map(|(ask, _)| (ask, out())).collect()
}

/// One GPU and how its readings stand.
pub(super) struct Sampler {
    gpu: Gpu,
    fastest: u64,
    proc: String,
    abilities: BTreeMap<Ask, Ability>,
    gpm: Option<Gpm>,
    /// When GPM was sampled last, and which of its rates it has (`PCIe`, `NVLink`, C2C); `None`: not known yet.
    sampled: Option<Mono>,
    gpm_has: Option<[bool; 3]>,
    pcie: Counters,
    nvlink: Counters,
    throughput_at: Mono,
    utilization_at: Mono,
    health_at: Mono,
    processes_at: Mono,
    processes: Option<Vec<u32>>,
    health: [Option<u64>; 2],
    lost: bool,
    narrow: bool,
    /// Links that are there beside `PCIe`, or may be.
    links: Vec<Link>,
    /// How the readings stand is another than was told last.
    changed: bool,
    watched: Watched,
}

impl Sampler {
    /// Asks what never changes. Takes a few calls to the driver.
    pub(super) fn new(gpu: Gpu, index: u32, settings: &Settings, watched: Watched) -> Self {
        let (generation, width) = watched.call("nvmlDeviceGetMaxPcieLinkGeneration", || gpu.pcie_link());
        let uuid = watched.call("nvmlDeviceGetUUID", || gpu.uuid());
        let standing = GpuStanding {
            index,
            name: uuid.unwrap_or_else(|_| format!("index-{index}")),
            model: watched.call("nvmlDeviceGetName", || gpu.model()).ok(),
            mig: watched.call("nvmlDeviceGetMigMode", || gpu.mig()).ok(),
            virtualization: watched.call("nvmlDeviceGetVirtualizationMode", || gpu.virtualization()).ok(),
            ..GpuStanding::default()
        };
        watched.describe(standing);
        let fastest = fastest_pcie(generation, width);
        Self {
            gpu,
            fastest,
            proc: settings.proc.clone(),
            abilities: left_out(settings.sources),
            gpm: None,
            sampled: None,
            gpm_has: None,
            pcie: Counters::new(Link::Pcie, 1, fastest),
            nvlink: Counters::new(Link::NvLink, 1024, FASTEST_NVLINK),
            throughput_at: Mono(0),
            utilization_at: Mono(0),
            health_at: Mono(0),
            processes_at: Mono(0),
            processes: None,
            health: [None; 2],
            lost: false,
            narrow: false,
            links: Vec::new(),
            changed: true,
            watched,
        }
    }

    /// Tells which links it has beside `PCIe`: one that is there and cannot be read is not quiet. What the driver does not tell may be there.
    pub(super) fn links(&mut self, out: &mut dyn FnMut(Mono, What)) {
        let asked = [
            (Link::NvLink, self.watched.call("nvmlDeviceGetNvLinkState", || self.gpu.nvlink())),
            (Link::C2c, self.watched.call("nvmlDeviceGetC2cModeInfoV", || self.gpu.c2c())),
        ];
        self.links = asked.into_iter().filter(|(_, has)| *has != Ok(false)).map(|(link, _)| link).collect();
        for link in &self.links {
            out(monotonic(), What::Has(*link));
        }
    }

    /// How long until the next turn.
    pub(super) fn pause(&self, settings: &Settings, busy: bool) -> Duration {
        match (self.lost, busy) {
            (true, _) => Duration::from_nanos(AGAIN),
            (false, false) => settings.idle,
            (false, true) if self.narrow && self.counts_pcie() => settings.busy.min(self.narrow_pause()),
            (false, true) => settings.busy,
        }
    }

    fn narrow_pause(&self) -> Duration {
        let round = (1_u64 << 32) * 1000 / (self.fastest * 5 / 4).max(1);
        Duration::from_millis((round / 2).clamp(NARROW.0, NARROW.1))
    }

    /// Reads what is due. What it finds goes to `out` with the moment.
    pub(super) fn turn(&mut self, out: &mut dyn FnMut(Mono, What)) {
        self.utilization(out);
        self.gpm(out);
        self.counters(out);
        self.throughput(out);
        let now = monotonic();
        if now.since(self.health_at) >= HEALTH {
            self.health_at = now;
            self.health(out);
        }
        if now.since(self.processes_at) >= PROCESSES {
            self.processes_at = now;
            self.processes(out);
        }
        if std::mem::take(&mut self.changed) {
            self.tell();
        }
    }

    /// Asks for one kind of reading, unless it is known that there is none.
    fn ask<T>(
        &mut self,
        ask: Ask,
        function: &'static str,
        out: &mut dyn FnMut(Mono, What),
        read: impl FnOnce(&mut Self) -> Result<T, Refused>,
    ) -> Option<(T, Mono, Mono)> {
        let ability = self.abilities.entry(ask).or_default();
        let before = monotonic();
        if ability.refused.is_some() && ability.again.is_none_or(|again| before < again) {
            return None;
        }
        let watched = self.watched.clone();
        let answer = watched.call(function, || read(self));
        let after = monotonic();
        let late = after.since(before) > nanos(DEADLINE);
        self.note(ask, after, answer.as_ref().err(), late, out);
        answer.ok().filter(|_| !late).map(|answer| (answer, before, after))
    }

    /// Keeps how a kind of reading went.
    fn note(
        &mut self,
        ask: Ask,
        at: Mono,
        refused: Option<&Refused>,
        late: bool,
        out: &mut dyn FnMut(Mono, What),
    ) {
        self.watched.count(|s| {
            s.calls += 1;
            s.late += u64::from(late);
            s.refused += u64::from(refused.is_some());
        });
        let lost = refused == Some(&Refused::Lost);
        if lost != self.lost && (lost || refused.is_none()) {
            self.lost = lost;
            self.watched.count(|s| s.lost = lost);
            out(at, if lost { What::Lost } else { What::Back });
        }
        let ability = self.abilities.entry(ask).or_default();
        self.changed |= late || refused.is_some() || ability.refused.is_some() || ability.late > 0;
        match refused {
            None if late => ability.slow(ask, at),
            // One answer holds several counters, each of which may be refused for itself.
            None if matches!(ask, Ask::Counters | Ask::NvLinkCounters) => {}
            None => *ability = Ability::default(),
            Some(Refused::Lost) => {}
            Some(why) if why.is_final() => {
                ability.refused = Some(why.to_string());
                ability.again = None;
            }
            Some(why) => {
                ability.failures += 1;
                if ability.failures >= FAILURES {
                    ability.failures = FAILURES - 1;
                    ability.refused = Some(why.to_string());
                    ability.again = Some(at.plus(AGAIN));
                }
            }
        }
    }

    fn refused(&self, ask: Ask) -> bool {
        self.abilities.get(&ask).is_some_and(|a| a.refused.is_some())
    }

    fn gpm_tells(&self, link: Link) -> bool {
        let has = self.gpm_has.and_then(|has| {
            // In the order of `Link::ALL`.
            has.get(link as usize).copied()
        });
        // Until it is known, no second source is asked.
        !self.refused(Ask::Gpm) && has.unwrap_or(true)
    }

    fn counts_pcie(&self) -> bool {
        !self.gpm_tells(Link::Pcie) && !self.refused(Ask::Counters)
    }

    fn gpm(&mut self, out: &mut dyn FnMut(Mono, What)) {
        let now = monotonic();
        if self.gpm_has == Some([false; 3]) || self.sampled.is_some_and(|at| now.since(at) < GPM_APART) {
            return;
        }
        if self.gpm.is_none() {
            let made = self.ask(Ask::Gpm, "nvmlGpmQueryDeviceSupport", out, |s| {
                if s.gpu.has_gpm()? { s.gpu.gpm() } else { Err(Refused::NotSupported) }
            });
            let Some((gpm, ..)) = made else { return };
            self.gpm = Some(gpm);
        }
        let asked = self.ask(Ask::Gpm, "nvmlGpmSampleGet", out, |s| match &mut s.gpm {
            Some(gpm) => gpm.rates(METRICS),
            None => Err(Refused::NotSupported),
        });
        let Some((rates, before, after)) = asked else {
            self.sampled = None;
            self.gpm.iter_mut().for_each(Gpm::forget);
            return;
        };
        let from = self.sampled.replace(before);
        let (Some(from), Some(rates)) = (from, rates) else { return };
        self.rates(from, before, after, rates, out);
    }

    /// What the rates between two samples say; the first ones say also which there are.
    fn rates(
        &mut self,
        from: Mono,
        before: Mono,
        after: Mono,
        rates: [Result<f64, Refused>; 6],
        out: &mut dyn FnMut(Mono, What),
    ) {
        // Between the beginnings of the two calls, as nearly as can be told.
        let nanos = before.since(from);
        let [pcie_out, pcie_in, nvlink_out, nvlink_in, c2c_out, c2c_in] = rates;
        let pairs = [
            (Link::Pcie, self.fastest, pcie_out, pcie_in),
            (Link::NvLink, FASTEST_NVLINK, nvlink_out, nvlink_in),
            (Link::C2c, FASTEST_NVLINK, c2c_out, c2c_in),
        ];
        let mut has = [false; 3];
        for ((link, fastest, leaving, arriving), has) in pairs.into_iter().zip(&mut has) {
            let final_no = |r: &Result<f64, Refused>| r.as_ref().err().is_some_and(Refused::is_final);
            *has = !(final_no(&leaving) || final_no(&arriving));
            let (Ok(leaving), Ok(arriving)) = (leaving, arriving) else { continue };
            match (bytes_at(leaving, nanos, fastest), bytes_at(arriving, nanos, fastest)) {
                (Ok(leaving), Ok(arriving)) => {
                    let stretch =
                        Stretch { link, source: Source::Gpm, from, to: after, out: leaving, into: arriving };
                    out(after, What::Moved(stretch));
                }
                _ => self.watched.count(|s| s.nonsense += 1),
            }
        }
        self.changed |= self.gpm_has.replace(has) != Some(has);
    }

    fn counters(&mut self, out: &mut dyn FnMut(Mono, What)) {
        let pcie = self.counts_pcie();
        let nvlink = !self.gpm_tells(Link::NvLink) && !self.refused(Ask::NvLinkCounters);
        if !pcie && !nvlink {
            return;
        }
        let ask = if pcie { Ask::Counters } else { Ask::NvLinkCounters };
        let asked = self.ask(ask, "nvmlDeviceGetFieldValues", out, |s| s.gpu.fields(FIELDS));
        let Some((values, before, after)) = asked else {
            self.pcie.forget();
            self.nvlink.forget();
            return;
        };
        let [a, b, c, d] = values;
        if pcie {
            self.narrow = a.as_ref().is_ok_and(|t| t.count.width == Width::Bits32);
            self.counted(Ask::Counters, before, after, a.and_then(|a| Ok([a, b?])), out);
        }
        if nvlink {
            self.counted(Ask::NvLinkCounters, before, after, c.and_then(|c| Ok([c, d?])), out);
        }
    }

    /// One link's counters out of an answer.
    fn counted(
        &mut self,
        ask: Ask,
        before: Mono,
        after: Mono,
        told: Result<[Told; 2], Refused>,
        out: &mut dyn FnMut(Mono, What),
    ) {
        let counters = if ask == Ask::Counters { &mut self.pcie } else { &mut self.nvlink };
        let told = match told {
            Ok(told) => {
                let before = self.abilities.insert(ask, Ability::default());
                self.changed |= before.is_some_and(|ability| ability.why().is_some());
                told
            }
            Err(refused) => {
                counters.forget();
                self.note(ask, after, Some(&refused), false, out);
                return;
            }
        };
        match counters.next(before, after, told) {
            None => {}
            Some(Ok(stretch)) => out(after, What::Moved(stretch)),
            Some(Err(Unusable::Ambiguous)) => self.watched.count(|s| s.ambiguous += 1),
            Some(Err(Unusable::Nonsense)) => self.watched.count(|s| s.nonsense += 1),
        }
    }

    fn throughput(&mut self, out: &mut dyn FnMut(Mono, What)) {
        let now = monotonic();
        if self.gpm_tells(Link::Pcie)
            || !self.refused(Ask::Counters)
            || now.since(self.throughput_at) < THROUGHPUT
        {
            return;
        }
        self.throughput_at = now;
        let asked = self.ask(Ask::Throughput, "nvmlDeviceGetPcieThroughput", out, |s| {
            Ok((s.gpu.throughput(true)?, s.gpu.throughput(false)?))
        });
        let Some(((leaving, arriving), from, to)) = asked else { return };
        // Each is of 20 ms, told in KB/s.
        let bytes = |rate: u32| u64::from(rate) * 20;
        let most = self.fastest / 50 * 5 / 4;
        let (leaving, arriving) = (bytes(leaving), bytes(arriving));
        if leaving > most || arriving > most {
            self.watched.count(|s| s.nonsense += 1);
            return;
        }
        let stretch =
            Stretch { link: Link::Pcie, source: Source::Throughput, from, to, out: leaving, into: arriving };
        out(to, What::Moved(stretch));
    }

    fn utilization(&mut self, out: &mut dyn FnMut(Mono, What)) {
        let now = monotonic();
        if now.since(self.utilization_at) < UTILIZATION_APART {
            return;
        }
        self.utilization_at = now;
        let asked = self.ask(Ask::Utilization, "nvmlDeviceGetUtilizationRates", out, |s| s.gpu.utilization());
        if let Some((percent, before, after)) = asked {
            out(after, What::Computed(Mono(before.0.saturating_sub(UTILIZATION)), percent));
        }
    }

    fn health(&mut self, out: &mut dyn FnMut(Mono, What)) {
        let asked = self.ask(Ask::Recovery, "nvmlDeviceGetFieldValues", out, |s| {
            let [value] = s.gpu.fields([RECOVERY])?;
            // More than there are actions is none.
            value.and_then(|told| match told.count.value {
                action @ ..256 => Ok(action),
                _ => Err(Refused::Nonsense("an unknown action")),
            })
        });
        let recovery = asked.map(|(action, _, at)| (at, action));
        let asked = self.ask(Ask::Clocks, "nvmlDeviceGetCurrentClocksEventReasons", out, |s| s.gpu.clocks());
        let clocks = asked.map(|(reasons, _, at)| (at, reasons));
        let [was_recovery, was_clocks] = &mut self.health;
        for (now, was, what) in [
            (recovery, was_recovery, What::Recovery as fn(u64) -> What),
            (clocks, was_clocks, What::Clocks as fn(u64) -> What),
        ] {
            if let Some((at, value)) = now
                && was.replace(value) != Some(value)
            {
                out(at, what(value));
            }
        }
    }

    fn processes(&mut self, out: &mut dyn FnMut(Mono, What)) {
        let proc = self.proc.clone();
        let lives = move |pid: u32| pid != 0 && Path::new(&format!("{proc}/{pid}")).exists();
        let asked =
            self.ask(Ask::Processes, "nvmlDeviceGetComputeRunningProcesses", out, |s| s.gpu.processes(lives));
        // Also where nothing changed: a reading may find no place on its way.
        if let Some((pids, _, at)) = asked {
            self.processes = Some(pids.clone());
            self.changed = true;
            out(at, What::Processes(pids));
        }
    }

    /// Writes down how the readings stand.
    fn tell(&self) {
        let mut refused: BTreeMap<&str, String> =
            self.abilities.iter().filter_map(|(ask, a)| Some((ask.label(), a.why()?))).collect();
        let source = |link: Link, counts: bool| {
            if self.gpm_tells(link) && self.gpm_has.is_some() {
                Some(Source::Gpm)
            } else if counts {
                Some(Source::Counters)
            } else {
                None
            }
        };
        let rate = !self.gpm_tells(Link::Pcie) && !self.refused(Ask::Throughput);
        let nvlink = !self.gpm_tells(Link::NvLink) && !self.refused(Ask::NvLinkCounters);
        let sources = [
            (Link::Pcie, source(Link::Pcie, self.counts_pcie()).or(rate.then_some(Source::Throughput))),
            (Link::NvLink, source(Link::NvLink, nvlink)),
            (Link::C2c, source(Link::C2c, false)),
        ];
        for (link, _) in sources.iter().filter(|(link, source)| source.is_none() && self.links.contains(link))
        {
            refused.insert(
                link.label(),
                "it is there, or may be, and nothing tells what moves on it".to_owned(),
            );
        }
        self.watched.count(|s| {
            s.sources = sources.into();
            s.not_read = refused;
            s.processes = self.processes.as_ref().map(Vec::len);
        });
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
