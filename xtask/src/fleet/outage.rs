//! What a fleet loses while parts of it are away: a gateway killed, a host's Collector stopped, the store hanging.

use std::collections::BTreeSet;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde_json::Value;

use super::tiers::{DECISION_WAIT, Running};
use super::{Fleet, PATIENCE, Rooms, Share, Told, eventually, must};
use crate::install;

/// Rooms that are pinned before anything but the store is taken away: some of them at either gateway.
const PINS: usize = 6;

/// From the workload's last fault until its rooms have pinned, about; its traffic goes on until [`QUIET`] before all is back.
const PINNING: Duration = Duration::from_secs(13);
const QUIET: Duration = Duration::from_secs(10);

impl Fleet<'_> {
    /// The store hangs, rooms pin, a gateway is killed and a Collector stopped; more rooms pin, pinned rooms end; all is back.
    pub(super) fn disturbed(
        &self,
        outage: Duration,
        jaeger: &Running,
        [first, _second]: [Running; 2],
        [_prefill_node, decode_node]: [Running; 2],
    ) -> Result<()> {
        let before: BTreeSet<String> =
            self.rooms(&BTreeSet::new())?.iter().flat_map(|of| of.keys().cloned()).collect();
        let hold = (PINNING + outage.saturating_sub(QUIET)).as_secs().to_string();
        let seed = std::process::id().wrapping_add(1 << 20);
        let mut workload = self.workload("disturbed", seed, &["--hold", &hold])?;
        workload.begin()?;
        self.pins(&before, 1)?;
        jaeger.freeze()?;
        let early = self.pins(&before, PINS)?;
        let gateway = self.tiers.gateway_pages()[1][0];
        let in_memory = self.one_value(&format!(
            "otelcol_processor_tail_sampling_sampling_traces_on_memory{{instance=\"{gateway}\"}}"
        ))?;
        let on_disk = self.one_value(&format!(
            "otelcol_exporter_queue_size{{exporter=\"otlp_grpc/traces\", instance=\"{gateway}\"}}"
        ))?;
        let killed_at = timestamp()?;
        let away = Instant::now();
        first.kill()?;
        decode_node.stop()?;
        self.say(&format!(
            "Jaeger hangs, a gateway is killed (it has {on_disk} bytes on disk), the decode host's Collector is stopped"
        ));
        self.say(&workload.results()?);
        let must = must(&workload.truth()?)?;
        self.all_told(&must, &before)?;
        let told = self.pins(&before, early)?;
        workload.end()?;
        sleep(outage.saturating_sub(away.elapsed()));
        self.say(&format!(
            "{} s later: {} more pins were told meanwhile, the engines have ended; {}",
            away.elapsed().as_secs(),
            told - early,
            self.waiting(&before, &killed_at)?
        ));
        let _gateway = self.tiers.gateway(1)?;
        let _node = self.tiers.node(self.sites[1].host)?;
        jaeger.thaw()?;
        let back = Instant::now();
        let mut rooms = self.rooms(&before)?;
        // The longer the outage, the more is in front of what was told last.
        eventually(PATIENCE + outage, || {
            rooms = self.rooms(&before)?;
            Ok(self.pinned_missing(&rooms)?.pop())
        })?;
        self.say(&format!(
            "all is back for {} s: of {told} pins in {} rooms nothing is lost",
            back.elapsed().as_secs(),
            rooms
                .iter()
                .flatten()
                .filter(|(_, told)| told.pinned)
                .map(|(room, _)| room)
                .collect::<BTreeSet<_>>()
                .len()
        ));
        let mut share = self.share(&rooms)?;
        while !share.missing.is_empty() && back.elapsed() < Duration::from_secs(DECISION_WAIT + 15) {
            sleep(Duration::from_secs(1));
            share = self.share(&rooms)?;
        }
        self.lost(&share, &killed_at, &in_memory)
    }

    /// Waits until so many views were called pinned. How many there are.
    fn pins(&self, before: &BTreeSet<String>, at_least: usize) -> Result<usize> {
        let mut pins = 0;
        eventually(PATIENCE, || {
            let rooms = self.rooms(before)?;
            pins = rooms.iter().flat_map(Rooms::values).filter(|told| told.pinned).count();
            Ok((pins < at_least).then(|| format!("{pins} rooms are pinned, not {at_least}")))
        })?;
        Ok(pins)
    }

    /// What the hosts hold back for those who are away.
    fn waiting(&self, before: &BTreeSet<String>, killed_at: &str) -> Result<String> {
        let bytes = self.one_value(&format!(
            "otelcol_exporter_queue_size{{exporter=\"load_balancing\", instance=\"{}\"}}",
            self.sites[0].host.at(8888)
        ))?;
        let rooms = self.rooms(before)?;
        let ended = rooms.each_ref().map(|of| of.values().filter(|told| told.ended_after(killed_at)).count());
        Ok(format!(
            "{bytes} bytes wait on the prefill host's disk, where {} views ended meanwhile, {} views at the decode host's agent",
            ended[0], ended[1]
        ))
    }

    /// Only what the killed gateway had in memory may be lost without a count of the agent's: views that ended before it was
    /// killed and less than the wait for a decision ago.
    fn lost(&self, share: &Share, killed_at: &str, in_memory: &str) -> Result<()> {
        let late = |event: &&Value| event["closed_at"].as_str().is_some_and(|at| at > killed_at);
        let late: Vec<&Value> = share.missing.iter().filter(late).collect();
        let mut counted = 0.0;
        for site in &self.sites {
            let dropped = site.agent.metric("roomtrace_export_dropped_total", &[])?.unwrap_or(0.0);
            let lost = late.iter().filter(|event| event["host"] == site.host.name.as_str()).count();
            if lost > 0 && dropped == 0.0 {
                bail!(
                    "{lost} views ended at {} after the gateway was killed and are lost uncounted",
                    site.host.name
                );
            }
            counted += dropped;
        }
        ensure!(share.unasked.is_empty(), "kept for no reason: rooms {:?}", share.unasked);
        self.say(&format!(
            "lost: {} of {} views of healthy rooms that were to be kept: {} from the killed gateway's memory (it had {in_memory} traces there, \
             otelcol_processor_tail_sampling_sampling_traces_on_memory), {} dropped by agents (they count {counted} spans, \
             roomtrace_export_dropped_total)",
            share.missing.len(),
            share.kept + share.missing.len(),
            share.missing.len() - late.len(),
            late.len()
        ));
        Ok(())
    }
}

impl Told {
    /// Whether the view ended after then.
    fn ended_after(&self, then: &str) -> bool {
        self.closed.as_ref().and_then(|event| event["closed_at"].as_str()).is_some_and(|at| at > then)
    }
}

/// Now, as the agents write it.
fn timestamp() -> Result<String> {
    Ok(install::output(Command::new("date").args(["-u", "+%Y-%m-%dT%H:%M:%S.%NZ"]))?.trim().to_owned())
}
