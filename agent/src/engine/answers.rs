//! What engines answer when asked about their load: `/v1/loads` and `/metrics`.
//!
//! Pure: bytes in, numbers out. Any bytes give numbers or a sentence, never a panic. What an answer does not tell stays
//! `None`, never zero.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use crate::rooms::model::{EngineGauges, FRESH, Role};
use crate::sglang::message::Release;
use crate::verdict::known::parse;

/// Data-parallel ranks of one engine at most.
const MAX_RANKS: usize = 1024;

/// Longest release that is kept, bytes.
const MAX_VERSION: usize = 64;

/// First release whose `/v1/loads` tells the state of the moment also while the engine stands still (facts of SGLang 0.5.23:
/// `managers/load_snapshot.py`; before, the counts can be those of the last batch).
const LIVE_FROM: Release = Release::new(0, 5, 19, 0);

/// Reads the answer of `/v1/loads` (SGLang 0.5.8 to 0.5.23, `entrypoints/v1_loads.py`): one entry per data-parallel rank,
/// tensor-parallel ranks are not told apart.
///
/// # Errors
///
/// A sentence for the operator.
pub(super) fn loads(body: &[u8]) -> Result<EngineGauges, String> {
    let answer: Value =
        serde_json::from_slice(body).map_err(|_| "its answer to /v1/loads is no JSON".to_owned())?;
    let loads =
        answer.get("loads").and_then(Value::as_array).ok_or("its answer to /v1/loads has no `loads`")?;
    let version = answer.get("version").and_then(Value::as_str).filter(|v| v.len() <= MAX_VERSION);
    let mut gauges = EngineGauges {
        version: version.map(str::to_owned),
        stale: version.and_then(parse).is_none_or(|r| r < LIVE_FROM),
        ..EngineGauges::default()
    };
    let answered =
        answer.get("timestamp").and_then(Value::as_str).and_then(|t| t.parse::<jiff::Timestamp>().ok());
    let answered = answered.map(|t| t.as_duration().as_secs_f64());
    // One that no scheduler has filled yet has no time: it says nothing, also not zero.
    let filled = |load: &&Value| load.get("timestamp").is_none_or(|t| t.as_f64() != Some(0.0));
    for load in loads.iter().filter(filled).take(MAX_RANKS) {
        add_load(&mut gauges, load);
        let written = load.get("timestamp").and_then(Value::as_f64);
        let age = answered.zip(written).map(|(answered, written)| answered - written);
        let fresh = Duration::from_nanos(FRESH).as_secs_f64();
        gauges.stale |= !age.is_some_and(|age| age.abs() < fresh);
    }
    gauges.inflight_by_dp.sort_unstable();
    Ok(gauges)
}

fn add_load(gauges: &mut EngineGauges, load: &Value) {
    let disaggregation = load.get("disaggregation");
    let of = |name: &str| disaggregation.and_then(|d| d.get(name)).and_then(number);
    let role = match disaggregation.and_then(|d| d.get("mode")).and_then(Value::as_str) {
        Some("prefill") => Some(Role::Prefill),
        Some("decode") => Some(Role::Decode),
        _ => None,
    };
    gauges.role = role.or(gauges.role);
    let (inflight, before) = match role {
        Some(Role::Prefill) => (
            of("prefill_inflight_queue_reqs"),
            of("prefill_bootstrap_queue_reqs").or_else(|| of("prefill_prealloc_queue_reqs")),
        ),
        Some(Role::Decode) => (of("decode_transfer_queue_reqs"), of("decode_prealloc_queue_reqs")),
        None => (None, None),
    };
    if let Some(n) = inflight
        && let Some(rank) = load.get("dp_rank").and_then(number).and_then(|r| u32::try_from(r).ok())
    {
        gauges.inflight_by_dp.push((rank, n));
    }
    add(&mut gauges.inflight, inflight);
    add(&mut gauges.bootstrap, before);
    let grammar = load.get("queues").and_then(|q| q.get("grammar")).and_then(number).unwrap_or(0);
    let waiting = load.get("num_waiting_reqs").and_then(number);
    // What waits for its grammar is not in the scheduler's queue yet.
    add(&mut gauges.waiting, waiting.map(|n| n.saturating_add(grammar)));
    add(&mut gauges.running, load.get("num_running_reqs").and_then(number));
    add(&mut gauges.paused, load.get("queues").and_then(|q| q.get("paused")).and_then(number));
    for name in ["total_prefill_busy_us", "total_prefill_uncached_tokens"] {
        add(&mut gauges.progress, load.get(name).and_then(number));
    }
}

fn add(sum: &mut Option<u64>, value: Option<u64>) {
    if let Some(value) = value {
        *sum = Some(sum.unwrap_or(0).saturating_add(value));
    }
}

/// A count, also where Python wrote it as a float.
fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| whole(value.as_f64()?))
}

fn whole(value: f64) -> Option<u64> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "the range is checked")]
    (0.0..=9_007_199_254_740_992.0).contains(&value).then_some(value as u64)
}

/// Gauges of `/metrics` (SGLang, `metrics/collector.py` to 0.5.9, `observability/metrics_collector.py` since) in both of
/// their spellings.
const INFLIGHT: [&str; 2] = ["num_prefill_inflight_queue_reqs", "num_prefill_infight_queue_reqs"];
const BOOTSTRAP: [&str; 2] = ["num_prefill_bootstrap_queue_reqs", "num_prefill_prealloc_queue_reqs"];
const TRANSFER: [&str; 1] = ["num_decode_transfer_queue_reqs"];
const PREALLOC: [&str; 1] = ["num_decode_prealloc_queue_reqs"];
const WAITING: [&str; 1] = ["num_queue_reqs"];
const RUNNING: [&str; 1] = ["num_running_reqs"];

/// Reads the answer of `/metrics`: the sum over data-parallel ranks of the largest value over the other ranks, since tensor
/// and pipeline ranks count the same requests. Up to 30 s old, and frozen while a pinned request is the only work.
///
/// # Errors
///
/// A sentence for the operator.
pub(super) fn metrics(body: &[u8]) -> Result<EngineGauges, String> {
    let text = String::from_utf8_lossy(body);
    let mut by_name: BTreeMap<&'static str, BTreeMap<u32, u64>> = BTreeMap::new();
    let mut role = None;
    let mut any = false;
    for line in text.lines() {
        let Some((name, labels, value)) = sample(line) else { continue };
        any = true;
        let known = [&INFLIGHT[..], &BOOTSTRAP, &TRANSFER, &PREALLOC, &WAITING, &RUNNING].concat();
        let Some(name) = known.into_iter().find(|k| *k == name) else { continue };
        role = role.or(match label(labels, "engine_type") {
            Some("prefill") => Some(Role::Prefill),
            Some("decode") => Some(Role::Decode),
            _ => None,
        });
        let rank = label(labels, "dp_rank").and_then(|r| r.parse().ok()).unwrap_or(0);
        let ranks = by_name.entry(name).or_default();
        if ranks.len() < MAX_RANKS || ranks.contains_key(&rank) {
            let largest = ranks.entry(rank).or_insert(0);
            *largest = value.max(*largest);
        }
    }
    if !any {
        return Err("its answer to /metrics has no metrics of SGLang".to_owned());
    }
    let ranks = |names: &[&'static str]| -> Option<&BTreeMap<u32, u64>> {
        names.iter().find_map(|n| by_name.get(*n))
    };
    let sum =
        |names: &[&'static str]| ranks(names).map(|r| r.values().fold(0, |a: u64, b| a.saturating_add(*b)));
    let (inflight, before): (&[&'static str], &[&'static str]) = match role {
        Some(Role::Decode) => (&TRANSFER, &PREALLOC),
        _ => (&INFLIGHT, &BOOTSTRAP),
    };
    Ok(EngineGauges {
        role,
        inflight: sum(inflight),
        inflight_by_dp: ranks(inflight).into_iter().flatten().map(|(rank, n)| (*rank, *n)).collect(),
        bootstrap: sum(before),
        waiting: sum(&WAITING),
        running: sum(&RUNNING),
        stale: true,
        ..EngineGauges::default()
    })
}

/// Name without its prefix, labels and value of one line of Prometheus text.
fn sample(line: &str) -> Option<(&str, &str, u64)> {
    let line = line.strip_prefix("sglang:").or_else(|| line.strip_prefix("sglang_"))?;
    let (name, labels, rest) = match line.split_once('{') {
        Some((name, rest)) => {
            let (labels, rest) = rest.rsplit_once('}')?;
            (name, labels, rest)
        }
        None => line.split_once(' ').map(|(name, rest)| (name, "", rest))?,
    };
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some((name, labels, whole(value)?))
}

/// Value of a label. Values that hold quotes are not looked for here.
fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    labels.split(',').find_map(|pair| {
        let (key, value) = pair.split_once('=')?;
        (key.trim() == name).then(|| value.trim().trim_matches('"'))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn loads_of_data_parallel_ranks_are_summed() {
        let body = br#"{"timestamp":"1970-01-01T00:00:13.500000+00:00","version":"0.5.23","loads":[
            {"dp_rank":1,"timestamp":12.5,"num_running_reqs":0,"num_waiting_reqs":2,
             "total_prefill_uncached_tokens":100,"total_prefill_busy_us":5000,
             "disaggregation":{"mode":"prefill","prefill_bootstrap_queue_reqs":3,"prefill_inflight_queue_reqs":1},
             "queues":{"waiting":2,"grammar":0,"paused":0,"retracted":0}},
            {"dp_rank":0,"timestamp":12.5,"num_running_reqs":1,"num_waiting_reqs":0,
             "total_prefill_uncached_tokens":1,"total_prefill_busy_us":1,
             "disaggregation":{"mode":"prefill","prefill_bootstrap_queue_reqs":0,"prefill_inflight_queue_reqs":2}}]}"#;
        let g = loads(body).unwrap();
        assert_eq!((g.role, g.version.as_deref()), (Some(Role::Prefill), Some("0.5.23")));
        assert_eq!((g.inflight, g.bootstrap, g.waiting, g.running), (Some(3), Some(3), Some(2), Some(1)));
        assert_eq!((g.progress, g.paused, g.stale), (Some(5102), Some(0), false));
        assert_eq!(g.inflight_by_dp, [(0, 2), (1, 1)]);
        // A scheduler that computes for long, or is paused, has not written since.
        let text = String::from_utf8_lossy(body);
        for frozen in [
            text.replacen("12.5", "8.4", 1),
            text.replace("13.5", "18.5"),
            text.replacen("\"timestamp\":\"", "\"t\":\"", 1),
        ] {
            let g = loads(frozen.as_bytes()).unwrap();
            assert_eq!((g.inflight, g.stale), (Some(3), true), "{frozen}");
        }
    }

    #[test]
    fn what_is_not_told_is_not_zero() {
        let old = br#"{"version":"0.5.12","loads":[{"dp_rank":0,"timestamp":1.0,
            "disaggregation":{"mode":"prefill","prefill_prealloc_queue_reqs":4,"prefill_inflight_queue_reqs":0}}]}"#;
        let g = loads(old).unwrap();
        assert_eq!((g.inflight, g.bootstrap, g.progress, g.waiting), (Some(0), Some(4), None, None));
        assert!(g.stale, "before 0.5.19 the snapshot can stand still");
        let fresh = br#"{"version":"0.5.23","loads":[{"dp_rank":0,"timestamp":0.0,"num_running_reqs":0}]}"#;
        let g = loads(fresh).unwrap();
        assert_eq!((g.inflight, g.running), (None, None), "not filled yet");
        let not_apart =
            br#"{"version":"0.5.23","loads":[{"dp_rank":0,"timestamp":1.0,"num_running_reqs":0}]}"#;
        assert_eq!(loads(not_apart).unwrap().role, None);
        assert_eq!(loads(br#"{"loads":[]}"#).unwrap().inflight, None);
        for wrong in [&b"[]"[..], b"", b"{}", b"null", b"{\"loads\":3}", b"<html>"] {
            assert!(loads(wrong).is_err());
        }
        let odd =
            br#"{"version":3,"loads":[null,7,{"disaggregation":[],"queues":"x","num_running_reqs":-1}]}"#;
        assert_eq!(loads(odd).unwrap().running, None);
    }

    #[test]
    fn both_spellings_are_read_and_tensor_ranks_are_not_summed() {
        let new = b"# HELP sglang:num_prefill_inflight_queue_reqs x\n\
            sglang:num_prefill_inflight_queue_reqs{engine_type=\"prefill\",model_name=\"a,b\",tp_rank=\"0\",dp_rank=\"0\"} 2.0\n\
            sglang:num_prefill_inflight_queue_reqs{engine_type=\"prefill\",model_name=\"m\",tp_rank=\"1\",dp_rank=\"0\"} 2.0\n\
            sglang:num_prefill_inflight_queue_reqs{engine_type=\"prefill\",model_name=\"m\",tp_rank=\"0\",dp_rank=\"1\"} 1.0\n\
            sglang:num_prefill_bootstrap_queue_reqs{engine_type=\"prefill\",tp_rank=\"0\"} 4.0\n\
            sglang:num_running_reqs{engine_type=\"prefill\"} 0.0\nsglang:num_queue_reqs{engine_type=\"prefill\"} NaN\n";
        let g = metrics(new).unwrap();
        assert_eq!((g.role, g.inflight, g.bootstrap), (Some(Role::Prefill), Some(3), Some(4)));
        assert_eq!((g.running, g.waiting, g.progress, g.stale), (Some(0), None, None, true));
        assert_eq!(g.inflight_by_dp, [(0, 2), (1, 1)]);
        let old = b"sglang:num_prefill_infight_queue_reqs{tp_rank=\"0\"} 1.0\nsglang:num_prefill_prealloc_queue_reqs 5\n";
        let g = metrics(old).unwrap();
        assert_eq!((g.inflight, g.bootstrap), (Some(1), Some(5)));
        let decode = b"sglang:num_decode_transfer_queue_reqs{engine_type=\"decode\"} 6.0\n\
            sglang:num_prefill_inflight_queue_reqs{engine_type=\"decode\"} 0.0\n";
        let g = metrics(decode).unwrap();
        assert_eq!((g.role, g.inflight), (Some(Role::Decode), Some(6)));
        assert!(metrics(b"python_info 1\n").is_err());
    }

    /// What a pair of real servers answered (SGLang 0.5.23), at rest.
    #[test]
    fn real_answers() {
        let prefill = include_bytes!("../../tests/fixtures/servers/prefill.loads.json");
        let decode = include_bytes!("../../tests/fixtures/servers/decode.loads.json");
        let told = [(Role::Prefill, &prefill[..], 16_124 + 1_999_122), (Role::Decode, &decode[..], 0)];
        for (role, body, progress) in told {
            let g = loads(body).unwrap();
            assert_eq!((g.role, g.version.as_deref(), g.stale), (Some(role), Some("0.5.23"), false));
            assert_eq!((g.inflight, g.bootstrap, g.waiting, g.running), (Some(0), Some(0), Some(0), Some(0)));
            assert_eq!((g.paused, g.progress), (Some(0), Some(progress)));
            assert_eq!(g.inflight_by_dp, [(0, 0)]);
        }
        let prefill = include_bytes!("../../tests/fixtures/servers/prefill.metrics.txt");
        let decode = include_bytes!("../../tests/fixtures/servers/decode.metrics.txt");
        for (role, body) in [(Role::Prefill, &prefill[..]), (Role::Decode, &decode[..])] {
            let g = metrics(body).unwrap();
            assert_eq!((g.role, g.stale, g.version), (Some(role), true, None));
            assert_eq!((g.inflight, g.bootstrap, g.waiting, g.running), (Some(0), Some(0), Some(0), Some(0)));
            assert_eq!(g.inflight_by_dp, [(0, 0)]);
        }
    }

    proptest::proptest! {
        #[test]
        fn any_bytes_are_read(bytes: Vec<u8>, text in "(sglang[:_][a-z_]{0,20}[{=\"} ,0-9a-z]{0,60}\n){0,5}") {
            drop(loads(&bytes));
            drop(metrics(&bytes));
            drop(metrics(text.as_bytes()));
        }
    }
}
