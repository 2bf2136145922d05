//! `/metrics`: names, forms, exemplars, and the reference in `docs/metrics.md`.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::collections::BTreeSet;
use std::time::Duration;

use roomtrace::export::clock::Clock;
use roomtrace::export::{Exports, Options};
use roomtrace::{event, export, rooms, sglang, verdict};

#[path = "../src/export/testing.rs"]
mod testing;

use testing::{EPOCH, closed, full_snapshot, get, identity};

const OPENMETRICS: &str = "Accept: application/openmetrics-text;version=1.0.0\r\n";

async fn started() -> (Exports, std::net::SocketAddr) {
    let options = Options { listen: Some("127.0.0.1:0".parse().unwrap()), ..Options::default() };
    let exports = Exports::start(options, identity()).await.unwrap();
    let at = exports.listening().unwrap();
    (exports, at)
}

/// Names of families, as `# TYPE` lines tell them.
fn families(text: &str) -> BTreeSet<String> {
    let kinds = text.lines().filter_map(|l| l.strip_prefix("# TYPE "));
    kinds.filter_map(|l| l.split(' ').next()).map(str::to_owned).collect()
}

#[test]
fn the_reference_is_fresh() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
    let now = export::metrics::reference();
    if std::env::var_os("ROOMTRACE_BLESS").is_some() {
        std::fs::write(path, &now).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap_or_default();
    assert!(written == now, "docs/metrics.md is stale; set ROOMTRACE_BLESS=1 and run this test again");
}

#[tokio::test]
async fn the_reference_lists_exactly_what_is_emitted() {
    let (mut exports, at) = started().await;
    exports.publish(full_snapshot());
    exports.room_event(&rooms::model::Event::Closed(closed(7).into()), &Clock::fixed(EPOCH));
    let (status, head, text) = get(at, "/metrics", "").await;
    assert_eq!(status, 200);
    assert!(head.contains("text/plain; version=0.0.4"), "{head}");
    let reference = export::metrics::reference();
    let listed = reference.lines().filter_map(|l| l.strip_prefix("| `")).filter_map(|l| l.split('`').next());
    assert_eq!(families(&text), listed.map(str::to_owned).collect::<BTreeSet<_>>());
}

#[tokio::test]
async fn values_and_labels_are_those_of_the_snapshot() {
    let (mut exports, at) = started().await;
    exports.publish(full_snapshot());
    let (_, _, text) = get(at, "/metrics", "").await;
    for line in [
        r#"roomtrace_rooms_open{role="prefill",state="WaitingForInput"} 3.0"#,
        r#"roomtrace_rooms_pinned{role="prefill",verdict="abort_before_entry",confidence="likely",owed_instance="node-a"} 2.0"#,
        r#"roomtrace_oldest_open_room_age_seconds{role="prefill",state="WaitingForInput"} 47.0"#,
        r#"roomtrace_rooms_closed_total{role="decode",outcome="success"} 11.0"#,
        r#"roomtrace_pins_total{role="prefill",verdict="abort_before_entry"} 4.0"#,
        r#"roomtrace_messages_total{direction="received",backend="nixl",kind="METADATA"} 12.0"#,
        r#"roomtrace_unknown_messages_total{backend="unknown"} 1.0"#,
        r#"roomtrace_capture_lost_total{stage="ring",reason="full"} 7.0"#,
        r#"roomtrace_not_captured_total{reason="too_long"} 5.0"#,
        r#"roomtrace_engine_processes{role="unknown"} 1.0"#,
        r#"roomtrace_connections{state="zmtp"} 6.0"#,
        r#"roomtrace_connections_unread_total{reason="tls"} 3.0"#,
        r#"roomtrace_requests_total{route="generate"} 21.0"#,
        r#"roomtrace_request_room_not_seen_total{reason="hole"} 2.0"#,
        r#"roomtrace_request_room_ignored_total{reason="fake_host"} 1.0"#,
        r#"roomtrace_spans_requests_total{protocol="grpc",result="accepted"} 4.0"#,
        r#"roomtrace_spans_received_total{kind="scheduler"} 64.0"#,
        r#"roomtrace_spans_engine_requests_total{result="joined"} 9.0"#,
        "roomtrace_spans_waiting 0.0",
        r#"roomtrace_bpf_run_seconds_total{program="sock_send"} 1.5"#,
        r#"roomtrace_bpf_runs_total{program="sock_send"} 9000.0"#,
        r#"roomtrace_findings_open{class="thread_died",confidence="certain",role="prefill"} 1.0"#,
        "roomtrace_findings_turned_away_total 6.0",
        r#"roomtrace_state_dropped_total{reason="boot"} 1.0"#,
        r#"roomtrace_state_restored{what="rooms"} 2.0"#,
        r#"roomtrace_state_writes_total{result="written"} 3.0"#,
        "roomtrace_state_bytes 4096.0",
        r#"roomtrace_export_dropped_total{signal="traces",reason="expired"} 0.0"#,
    ] {
        assert!(text.lines().any(|l| l == line), "{line}\nis not in\n{text}");
    }
}

#[tokio::test]
async fn what_was_not_measured_is_absent() {
    let (_exports, at) = started().await;
    let (_, _, text) = get(at, "/metrics", "").await;
    assert!(!text.contains("roomtrace_rooms_open"), "{text}");
    assert!(text.contains("roomtrace_build_info"), "{text}");
    assert!(text.contains("process_resident_memory_bytes"), "{text}");
}

#[tokio::test]
async fn what_was_known_before_is_there_at_the_first_look() {
    let listen = Some("127.0.0.1:0".parse().unwrap());
    let options = Options { listen, first: Some(full_snapshot()), ..Options::default() };
    let exports = Exports::start(options, identity()).await.unwrap();
    let (_, _, text) = get(exports.listening().unwrap(), "/metrics", "").await;
    assert!(text.contains("roomtrace_rooms_pinned{"), "{text}");
}

#[tokio::test]
async fn openmetrics_has_exemplars_and_an_end() {
    let (mut exports, at) = started().await;
    exports.publish(full_snapshot());
    exports.room_event(&rooms::model::Event::Closed(closed(7).into()), &Clock::fixed(EPOCH));
    let (status, head, text) = get(at, "/metrics", OPENMETRICS).await;
    assert_eq!(status, 200);
    assert!(head.contains("application/openmetrics-text"), "{head}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    let trace = export::trace_id::trace_id(7, "");
    let bucket = text.lines().find(|l| {
        l.starts_with("roomtrace_room_phase_duration_seconds_bucket")
            && l.contains("transfer")
            && l.contains('#')
    });
    let bucket = bucket.unwrap_or_else(|| panic!("no exemplar in\n{text}"));
    assert!(bucket.contains(&format!("trace_id=\"{trace}\"")), "{bucket}");
    assert!(bucket.contains("} 1.0 1700000002"), "{bucket}");
    exports.shutdown(Duration::from_mins(1)).await;
}

/// Labels that a scrape adds.
const SCRAPED: [&str; 4] = ["cluster", "namespace", "instance", "job"];

/// Words of an expression that could be names.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|w| !w.is_empty())
}

/// What promtool does not know: whether a series and its labels exist, and whether the runbook has the chapter.
#[test]
fn alert_rules_ask_for_series_that_exist() {
    let read =
        |file: &str| std::fs::read_to_string(format!("{}/../{file}", env!("CARGO_MANIFEST_DIR"))).unwrap();
    let (reference, runbook) = (export::metrics::reference(), read("docs/runbook.md"));
    let rules = read("dashboards/alerts/roomtrace.rules.yaml");
    let rules: serde_json::Value = serde_saphyr::from_str(&rules).unwrap();
    let rules = rules["groups"][0]["rules"].as_array().unwrap();
    assert!(rules.len() > 5);
    for rule in rules {
        let (alert, expression) = (rule["alert"].as_str().unwrap(), rule["expr"].as_str().unwrap());
        let series = words(expression).find(|w| w.starts_with("roomtrace_"));
        let mut labels: BTreeSet<&str> = SCRAPED.into();
        if let Some(series) = series {
            let row = reference.lines().find(|l| l.starts_with(&format!("| `{series}` |")));
            let row = row.unwrap_or_else(|| panic!("{alert} asks for {series}, which is not served"));
            labels.extend(row.split('|').nth(4).unwrap().split([',', ' ']));
        }
        let by = expression.split_once("by (").map_or("", |(_, rest)| rest.split(')').next().unwrap());
        let matched = expression.split('{').nth(1).map_or("", |rest| rest.split('}').next().unwrap());
        let matched = matched.split(',').filter_map(|m| words(m).next());
        let told = rule["annotations"].as_object().unwrap().values().filter_map(|v| v.as_str());
        let told = told.flat_map(|t| t.split("$labels.").skip(1)).filter_map(|t| words(t).next());
        for label in words(by).chain(matched).chain(told) {
            assert!(labels.contains(label), "{alert}: {series:?} has no label {label}");
        }
        let chapter = rule["annotations"]["runbook_url"].as_str().unwrap().split_once('#').unwrap().1;
        assert_eq!(chapter, alert.to_lowercase());
        assert!(runbook.contains(&format!("## {alert}\n")), "docs/runbook.md has no chapter {alert}");
    }
}
