//! `cargo xtask dashboards`: the Grafana dashboards, written from the tables of this module, so that a change of one is a
//! change of a line. A test compares them with the checked-in files; the live checks run every query.

mod panels;

use std::path::PathBuf;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::install;
pub(crate) use panels::ALL;

/// How a panel shows what it asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Show {
    /// One number, red from this value on.
    Number(u32),
    Lines,
    /// Lines on top of each other.
    Stack,
    /// Rows of labels with the last value.
    Table,
    /// Buckets of a histogram over time, with exemplars.
    Heat,
}

/// A panel: what it asks, and how long its row is.
pub(crate) struct Panel {
    pub(crate) title: &'static str,
    pub(crate) about: &'static str,
    pub(crate) show: Show,
    /// Unit as Grafana names it.
    pub(crate) unit: &'static str,
    /// Width of 24 and height.
    pub(crate) size: (u32, u32),
    /// Expression and legend.
    pub(crate) queries: &'static [(&'static str, &'static str)],
}

/// A dashboard.
pub(crate) struct Dashboard {
    pub(crate) uid: &'static str,
    pub(crate) title: &'static str,
    pub(crate) about: &'static str,
    /// Whether one host is chosen, or any number of them.
    pub(crate) one_host: bool,
    /// Whether it is about one room, in the store of traces.
    pub(crate) room: bool,
    pub(crate) panels: &'static [Panel],
}

/// Where Grafana gets series and traces from: chosen on the dashboard.
const SERIES: &str = "${prometheus}";
const TRACES: &str = "${traces}";

/// What every dashboard marks on its time axis.
pub(crate) const ANNOTATION: &str =
    "ALERTS{alertname=~\"Roomtrace.*\", alertstate=\"firing\", instance=~\"$instance\"}";

/// Writes them.
pub(crate) fn run() -> Result<()> {
    for dashboard in ALL {
        let file = file(dashboard);
        std::fs::write(&file, text(dashboard)).with_context(|| format!("write {}", file.display()))?;
        eprintln!("wrote {}", file.display());
    }
    Ok(())
}

pub(crate) fn file(dashboard: &Dashboard) -> PathBuf {
    install::root().join("dashboards").join(format!("{}.json", dashboard.uid))
}

fn text(dashboard: &Dashboard) -> String {
    format!("{:#}\n", whole(dashboard))
}

fn whole(of: &Dashboard) -> Value {
    let (mut x, mut y, mut row) = (0, 0, 0);
    let mut panels = Vec::new();
    for panel in of.panels {
        let (width, height) = panel.size;
        if x + width > 24 {
            (x, y, row) = (0, y + row, 0);
        }
        panels.push(self::panel(panel, panels.len() + 1, (x, y)));
        (x, row) = (x + width, row.max(height));
    }
    if of.room {
        panels.push(found(panels.len() + 1, y + row));
        panels.push(path(panels.len() + 1, y + row + FOUND));
    }
    json!({
        "uid": of.uid,
        "title": of.title,
        "description": of.about,
        "tags": ["roomtrace"],
        "editable": true,
        "graphTooltip": 1,
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": variables(of)},
        "links": [{
            "title": "Roomtrace", "type": "dashboards", "tags": ["roomtrace"], "asDropdown": true,
            "icon": "external link", "includeVars": true, "keepTime": true, "targetBlank": false,
            "tooltip": "", "url": ""
        }],
        "annotations": {"list": [{
            "name": "Alerts", "datasource": {"type": "prometheus", "uid": SERIES}, "enable": true, "iconColor": "red",
            "expr": ANNOTATION,
            "titleFormat": "{{alertname}}", "textFormat": "{{instance}} {{verdict}}{{class}}"
        }]},
        "panels": panels
    })
}

fn variables(d: &Dashboard) -> Vec<Value> {
    let source = |name: &str, label: &str, kind: &str| json!({"name": name, "label": label, "type": "datasource", "query": kind, "hide": 0, "refresh": 1});
    let mut all = vec![source("prometheus", "Series", "prometheus")];
    let mut host = json!({
        "name": "instance", "label": "Host", "type": "query", "hide": 0, "refresh": 2, "sort": 1,
        "datasource": {"type": "prometheus", "uid": SERIES},
        "definition": "label_values(roomtrace_build_info, instance)",
        "query": {"query": "label_values(roomtrace_build_info, instance)", "refId": "hosts"},
        "multi": !d.one_host, "includeAll": !d.one_host
    });
    if !d.one_host {
        host["allValue"] = ".+".into();
        host["current"] = json!({"text": "All", "value": "$__all"});
    }
    all.push(host);
    if d.room {
        all.push(source("traces", "Traces", "jaeger"));
        for (name, label) in [("room", "Room"), ("trace", "Trace")] {
            all.push(json!({"name": name, "label": label, "type": "textbox", "query": "", "hide": 0}));
        }
    }
    all
}

fn panel(of: &Panel, id: usize, at: (u32, u32)) -> Value {
    let instant = matches!(of.show, Show::Number(_) | Show::Table);
    let target = |(n, (expression, legend)): (usize, &(&str, &str))| {
        json!({
            "refId": char::from(b'A' + u8::try_from(n).unwrap_or(25)).to_string(),
            "datasource": {"type": "prometheus", "uid": SERIES},
            "expr": expression, "legendFormat": legend,
            "instant": instant, "range": !instant, "exemplar": of.show == Show::Heat,
            "format": match of.show { Show::Table => "table", Show::Heat => "heatmap", _ => "time_series" }
        })
    };
    let targets: Vec<Value> = of.queries.iter().enumerate().map(target).collect();
    let mut defaults = json!({"unit": of.unit, "color": {"mode": "palette-classic"}});
    let (kind, options) = match of.show {
        Show::Number(red) => {
            defaults["color"] = json!({"mode": "thresholds"});
            defaults["thresholds"] = json!({"mode": "absolute", "steps": [
                {"color": "green", "value": null}, {"color": "red", "value": red}
            ]});
            let reduce = json!({"calcs": ["lastNotNull"], "fields": "", "values": false});
            (
                "stat",
                json!({
                    "reduceOptions": reduce, "colorMode": "background", "graphMode": "none", "justifyMode": "auto",
                    "textMode": "auto", "wideLayout": true, "showPercentChange": false,
                    "percentChangeColorMode": "standard", "orientation": "auto"
                }),
            )
        }
        Show::Lines | Show::Stack => {
            let mode = if of.show == Show::Stack { "normal" } else { "none" };
            defaults["custom"] = json!({
                "fillOpacity": if of.show == Show::Stack { 40 } else { 0 },
                "stacking": {"mode": mode, "group": "A"}, "showPoints": "never"
            });
            let legend =
                json!({"displayMode": "list", "placement": "bottom", "showLegend": true, "calcs": []});
            ("timeseries", json!({"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}))
        }
        Show::Table => ("table", json!({"showHeader": true, "frameIndex": 0})),
        Show::Heat => (
            "heatmap",
            json!({
                "calculate": false, "yAxis": {"unit": of.unit, "axisPlacement": "left"},
                "color": {
                    "mode": "scheme", "scheme": "Turbo", "fill": "dark-orange", "exponent": 0.5, "steps": 64, "reverse": false
                },
                "showValue": "auto", "tooltip": {"mode": "single", "yHistogram": false, "showColorScale": false},
                "exemplars": {"color": "rgba(255,255,255,0.8)"}, "legend": {"show": true}
            }),
        ),
    };
    let mut panel = json!({
        "id": id, "type": kind, "title": of.title, "description": of.about,
        "datasource": {"type": "prometheus", "uid": SERIES},
        "gridPos": {"x": at.0, "y": at.1, "w": of.size.0, "h": of.size.1},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options, "targets": targets
    });
    if of.show == Show::Table {
        panel["fieldConfig"]["overrides"] = json!([to_host()]);
        let hidden = json!({"Time": true, "__name__": true, "job": true});
        panel["transformations"] = json!([{"id": "organize", "options": {"excludeByName": hidden}}]);
    }
    panel
}

/// Services that spans of rooms are under: engines' processes, and the agent where it does not know the process.
pub(crate) const SERVICES: [&str; 2] = ["sglang", "roomtrace"];

/// A column whose values lead somewhere.
fn leading(column: &str, title: &str, url: &str) -> Value {
    json!({
        "matcher": {"id": "byName", "options": column},
        "properties": [{"id": "links", "value": [{"title": title, "url": url, "targetBlank": false}]}]
    })
}

/// From a row to its host.
fn to_host() -> Value {
    leading(
        "instance",
        "This host",
        "/d/roomtrace-host?var-prometheus=${prometheus}&var-instance=${__value.text:percentencode}&${__url_time_range}",
    )
}

/// Height of the list of a room's traces.
const FOUND: u32 = 7;

/// The room's traces, found by its number; a click on one shows its path below.
fn found(id: usize, y: u32) -> Value {
    let search = |(reference, service): (&str, &str)| {
        json!({
            "refId": reference, "datasource": {"type": "jaeger", "uid": TRACES},
            "queryType": "search", "service": service, "tags": "sglang.pd.room=\"$room\"", "limit": 20
        })
    };
    let targets: Vec<Value> = ["A", "B"].into_iter().zip(SERVICES).map(search).collect();
    let to_path = leading(
        "traceID",
        "Its path",
        "/d/roomtrace-room?var-prometheus=${prometheus}&var-traces=${traces}&var-room=${room:percentencode}&var-trace=${__value.raw}&${__url_time_range}",
    );
    json!({
        "id": id, "type": "table", "title": "Traces of room $room",
        "description": "Choose one to see its path below. A pinned room has spans `room_pinned` before it ends.",
        "datasource": {"type": "jaeger", "uid": TRACES},
        "gridPos": {"x": 0, "y": y, "w": 24, "h": FOUND},
        "fieldConfig": {"defaults": {}, "overrides": [to_path]},
        "options": {"showHeader": true, "frameIndex": 0},
        "transformations": [{"id": "merge", "options": {}}],
        "targets": targets
    })
}

/// One trace: phases and messages of both hosts, and the link to the engine's own trace.
fn path(id: usize, y: u32) -> Value {
    json!({
        "id": id, "type": "traces", "title": "Path of trace $trace",
        "description": "Both hosts' phases and messages on one time axis; links of a span lead to the engine's own trace.",
        "datasource": {"type": "jaeger", "uid": TRACES},
        "gridPos": {"x": 0, "y": y, "w": 24, "h": 16},
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {},
        "targets": [{"refId": "A", "datasource": {"type": "jaeger", "uid": TRACES}, "query": "$trace"}]
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn the_checked_in_dashboards_are_fresh() {
        for dashboard in ALL {
            let written = std::fs::read_to_string(file(dashboard)).unwrap_or_default();
            let name = dashboard.uid;
            assert!(
                written == text(dashboard),
                "dashboards/{name}.json is stale: run `cargo xtask dashboards`"
            );
        }
    }

    #[test]
    fn panels_lie_side_by_side() {
        for dashboard in ALL {
            let whole = whole(dashboard);
            let at = |p: &Value, name: &str| p["gridPos"][name].as_u64().unwrap();
            let panels = whole["panels"].as_array().unwrap();
            for (n, one) in panels.iter().enumerate() {
                assert!(at(one, "x") + at(one, "w") <= 24, "{one}");
                for other in &panels[n + 1..] {
                    let apart = |from: &str, size: &str| {
                        at(one, from) + at(one, size) <= at(other, from)
                            || at(other, from) + at(other, size) <= at(one, from)
                    };
                    assert!(apart("x", "w") || apart("y", "h"), "{one} {other}");
                }
            }
        }
    }

    /// Values of `url` below a value.
    fn urls(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Array(all) => all.iter().for_each(|value| urls(value, found)),
            Value::Object(fields) => {
                found.extend(fields.get("url").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|value| urls(value, found));
            }
            _ => {}
        }
    }

    #[test]
    fn links_lead_to_dashboards_and_fill_in_variables_that_these_have() {
        let (mut checked, mut from) = (0, Vec::new());
        for dashboard in ALL {
            let mut found = Vec::new();
            urls(&whole(dashboard), &mut found);
            // The drop-down of all dashboards has none of its own.
            for url in found.iter().filter(|url| !url.is_empty()) {
                let (uid, query) = url.strip_prefix("/d/").unwrap().split_once('?').unwrap();
                let to = ALL.iter().find(|d| d.uid == uid).unwrap();
                let names: Vec<Value> = variables(to).iter().map(|v| v["name"].clone()).collect();
                for part in query.split('&').filter(|part| *part != "${__url_time_range}") {
                    let (name, _) = part.strip_prefix("var-").unwrap().split_once('=').unwrap();
                    assert!(names.contains(&name.into()), "{uid} has no variable {name}");
                }
                checked += 1;
                from.push((dashboard.uid, to.uid));
            }
        }
        assert!(checked >= 4, "{checked}");
        for pair in [("roomtrace-fleet", "roomtrace-host"), ("roomtrace-room", "roomtrace-room")] {
            assert!(from.contains(&pair), "{pair:?} is missing");
        }
    }

    #[test]
    fn one_rooms_path_is_the_trace_that_was_chosen() {
        let room = ALL.iter().find(|d| d.room).unwrap();
        let whole = whole(room);
        let panels = whole["panels"].as_array().unwrap();
        let path = panels.iter().find(|p| p["type"] == "traces").unwrap();
        assert_eq!(path["targets"][0]["query"], "$trace");
    }
}
