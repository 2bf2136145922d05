//! What a fleet loses while parts of it are away: a gateway killed, a host's Collector stopped, the store hanging.

use std::collections::BTreeSet;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::tiers::{DECISION_WAIT, Running};
use super::{Fleet, PATIENCE, Rooms, Share, Told, eventually, must};
use crate::install;

/// Rooms that are pinned before anything but the store is taken away: some of them at either gateway.
const PINS: usize = 6;

/// From the workload's last fault until its rooms have pinned, about; its traffic goes on until [`QUIET`] before all is back.
const PINNING: Duration = Duration::from_secs(13);
const QUIET: Duration = Duration::from_secs(10);

/// Seconds from a view's end to its trace in the gateway's memory, as Prometheus sees it: the agent's batch, the Collectors' calls, the
/// gateway's look at what is due (each second), the scrape.
const SLACK: u64 = 5;

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
        let kill = Kill {
            at: timestamp(0)?,
            undecided_since: timestamp(DECISION_WAIT + SLACK)?,
            seen_until: timestamp(SLACK)?,
            in_memory: in_memory.parse().context("read the number of traces in memory")?,
        };
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
            self.waiting(&before, &kill.at)?
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
        self.lost(&share, &kill)
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

    /// What is lost of the healthy rooms, and that it is accounted for.
    fn lost(&self, share: &Share, kill: &Kill) -> Result<()> {
        let mut hosts = Vec::new();
        for site in &self.sites {
            let agent = site.agent.metric("roomtrace_export_dropped_total", &[])?.unwrap_or(0.0);
            let instance = site.host.at(8888).to_string();
            let node = self.dropped("otelcol_exporter_send_failed_spans", "load_balancing", &instance)?;
            hosts.push(Counted { host: site.host.name.clone(), spans: agent + node });
        }
        let mut gateways = 0.0;
        for instance in self.tiers.gateway_pages()[1] {
            let instance = instance.to_string();
            for counter in ["otelcol_exporter_send_failed_spans", "otelcol_exporter_enqueue_failed_spans"] {
                gateways += self.dropped(counter, "otlp_grpc/traces", &instance)?;
            }
            let early = format!(
                "max_over_time(otelcol_processor_tail_sampling_sampling_trace_dropped_too_early{{instance=\"{instance}\"}}[1h])"
            );
            gateways += self.sum(&early)?;
        }
        let lost = accounted(&share.missing, kill, &hosts, gateways)?;
        ensure!(share.unasked.is_empty(), "kept for no reason: rooms {:?}", share.unasked);
        let counted: f64 = hosts.iter().map(|of| of.spans).sum();
        self.say(&format!(
            "lost: {} of {} views of healthy rooms that were to be kept: {} views of {} rooms from the killed gateway's memory (it had {} traces \
             there, otelcol_processor_tail_sampling_sampling_traces_on_memory; all ended within the {DECISION_WAIT} + {SLACK} s before), \
             {} later ones (agents and node Collectors count {counted} dropped spans, gateways {gateways})",
            share.missing.len(),
            share.kept + share.missing.len(),
            lost.from_memory,
            lost.traces,
            kill.in_memory,
            lost.later,
        ));
        Ok(())
    }

    /// What one Collector says it has dropped. Of a counter that began anew with a restart the larger part: too little at worst.
    fn dropped(&self, counter: &str, exporter: &str, instance: &str) -> Result<f64> {
        self.sum(&format!("max_over_time({counter}{{exporter=\"{exporter}\", instance=\"{instance}\"}}[1h])"))
    }

    /// A counter appears with its first count.
    fn sum(&self, query: &str) -> Result<f64> {
        let value = self.one_value(&format!("sum({query}) or vector(0)"))?;
        value.parse().with_context(|| format!("read {value} as a number"))
    }
}

/// The gateway's end.
#[derive(Debug)]
struct Kill {
    at: String,
    /// What ended before this was decided on, and so on its disk or delivered.
    undecided_since: String,
    /// What ended before this was in its memory when Prometheus last looked.
    seen_until: String,
    /// Undecided traces that Prometheus saw last in its memory.
    in_memory: usize,
}

/// Spans that a host's agent and its Collector say they dropped.
#[derive(Debug)]
struct Counted {
    host: String,
    spans: f64,
}

/// Where what is lost was.
#[derive(Debug, PartialEq, Eq)]
struct Accounted {
    /// Views in the killed gateway's memory, and the rooms that they are of.
    from_memory: usize,
    traces: usize,
    /// Views that ended after the kill.
    later: usize,
}

/// Nothing may be lost but what the killed gateway had in memory, which is what it had not decided on, and what somebody counts as
/// dropped (every view that is lost has lost a span of its own at least). `missing`: the last events of views that are lost.
fn accounted(missing: &[Value], kill: &Kill, hosts: &[Counted], gateways: f64) -> Result<Accounted> {
    let closed = |event: &Value| event["closed_at"].as_str().unwrap_or_default().to_owned();
    let (later, from_memory): (Vec<&Value>, Vec<&Value>) =
        missing.iter().partition(|event| closed(event) > kill.at);
    if let Some(event) = from_memory.iter().find(|event| closed(event) < kill.undecided_since) {
        bail!(
            "the trace of room {} was decided on before the gateway was killed at {} and is lost: it ended at {}",
            event["room"],
            kill.at,
            closed(event)
        );
    }
    let traces = |events: &mut dyn Iterator<Item = &&Value>| -> usize {
        events.map(|event| event["trace_id"].to_string()).collect::<BTreeSet<_>>().len()
    };
    let seen = traces(&mut from_memory.iter().filter(|event| closed(event) <= kill.seen_until));
    ensure!(
        seen <= kill.in_memory,
        "{seen} traces from before the kill are lost, but the killed gateway had {} in its memory",
        kill.in_memory
    );
    let mut uncounted = 0.0;
    for of in hosts {
        let lost = later.iter().filter(|event| event["host"] == of.host.as_str()).count();
        uncounted += (f64::from(u32::try_from(lost)?) - of.spans).max(0.0);
    }
    ensure!(
        uncounted <= gateways,
        "{} views ended after the gateway was killed and are lost; dropped spans are {hosts:?}, and {gateways} at the gateways",
        later.len()
    );
    Ok(Accounted {
        from_memory: from_memory.len(),
        traces: traces(&mut from_memory.iter()),
        later: later.len(),
    })
}

impl Told {
    /// Whether the view ended after then.
    fn ended_after(&self, then: &str) -> bool {
        self.closed.as_ref().and_then(|event| event["closed_at"].as_str()).is_some_and(|at| at > then)
    }
}

/// Now, or `ago` before, as the agents write it.
fn timestamp(ago: u64) -> Result<String> {
    let when = format!("{ago} seconds ago");
    let mut date = Command::new("date");
    date.args(["-u", "--date", &when, "+%Y-%m-%dT%H:%M:%S.%NZ"]);
    Ok(install::output(&mut date)?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn view(host: &str, trace: &str, second: u32) -> Value {
        json!({"host": host, "room": "7", "trace_id": trace, "closed_at": format!("2026-01-01T00:00:{second:02}.5Z")})
    }

    fn kill(in_memory: usize) -> Kill {
        let at = |second| format!("2026-01-01T00:00:{second:02}.000000000Z");
        Kill { at: at(40), undecided_since: at(10), seen_until: at(37), in_memory }
    }

    fn hosts(prefill: f64, decode: f64) -> [Counted; 2] {
        [("p", prefill), ("d", decode)].map(|(host, spans)| Counted { host: host.to_owned(), spans })
    }

    #[test]
    fn what_the_killed_gateway_had_not_decided_on_may_be_lost() {
        let missing = [view("p", "a", 12), view("d", "a", 12), view("p", "b", 39)];
        let lost = accounted(&missing, &kill(1), &hosts(0.0, 0.0), 0.0).expect("accounted for");
        assert_eq!(lost, Accounted { from_memory: 3, traces: 2, later: 0 });
    }

    #[test]
    fn what_it_had_decided_on_may_not() {
        let why = accounted(&[view("p", "a", 9)], &kill(9), &hosts(9.0, 9.0), 9.0).expect_err("decided on");
        assert!(why.to_string().contains("was decided on"), "{why}");
    }

    #[test]
    fn nor_more_than_it_had() {
        let missing = [view("p", "a", 12), view("p", "b", 13)];
        let why = accounted(&missing, &kill(1), &hosts(9.0, 9.0), 9.0).expect_err("more than it had");
        assert!(why.to_string().contains("2 traces"), "{why}");
    }

    #[test]
    fn later_losses_are_counted_where_they_happen() {
        let missing = [view("p", "a", 41), view("p", "b", 42), view("d", "b", 42)];
        let lost = |hosts: [Counted; 2], gateways| accounted(&missing, &kill(0), &hosts, gateways);
        assert_eq!(lost(hosts(2.0, 1.0), 0.0).expect("counted").later, 3);
        assert!(lost(hosts(1.0, 1.0), 0.0).is_err(), "one dropped span is no excuse for two views");
        assert!(lost(hosts(0.0, 9.0), 0.0).is_err(), "the other host's count is no excuse");
        assert!(lost(hosts(1.0, 1.0), 1.0).is_ok(), "the gateways dropped one");
    }
}
