//! What GPUs, RDMA ports and connections moved against the phases of a room, drawn as text.
//!
//! Pure: from the JSON record that scripts get. Bars are readings as they were made: what was not read is blank, and nothing is divided
//! among rooms.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]
#![allow(
    clippy::float_arithmetic,
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a drawing"
)]

use std::fmt::Write as _;

use serde_json::Value;

use super::{list, seconds, text};

/// Columns of the text.
const COLUMNS: usize = 60;

/// Rows drawn at most: two for each link of each GPU and for each port of a room.
const ROWS: usize = 32;

/// Heights of a column in text.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// One reading: from, to (seconds since the room opened), bytes a second.
type Bar = (f64, f64, f64);

/// One link of one GPU, one port, or one rank's connections, in one direction.
struct Row {
    title: String,
    role: String,
    bars: Vec<Bar>,
}

/// What is drawn.
struct Chart {
    /// Seconds from the room's opening to its end, or to now.
    length: f64,
    rows: Vec<Row>,
    /// For each role seen: when its KV cache could move.
    phases: Vec<(String, f64, f64)>,
    /// What GPUs and ports suffered.
    troubles: Vec<(f64, String)>,
    most: f64,
    /// What the readings are of.
    wholes: Vec<&'static str>,
}

impl Chart {
    /// `None`: no reading is listed.
    fn of(record: &Value) -> Option<Self> {
        let opened = record["opened_at"].as_str()?;
        let end = record["closed_at"].as_str().or_else(|| record["time"].as_str())?;
        let length = seconds(opened, end)?.max(0.001);
        let mut chart = Self {
            length,
            rows: Vec::new(),
            phases: Vec::new(),
            troubles: Vec::new(),
            most: 0.0,
            wholes: Vec::new(),
        };
        for moved in list(&record["gpu"]).iter().chain(list(&record["network"])) {
            chart.moved(moved, opened);
        }
        chart.rows.truncate(ROWS);
        let rates = chart.rows.iter().flat_map(|r| &r.bars).map(|b| b.2);
        chart.most = rates.fold(0.0, f64::max);
        Some(chart).filter(|c| !c.rows.is_empty())
    }

    fn moved(&mut self, of: &Value, opened: &str) {
        let role = text(&of["role"]).to_owned();
        let moment = |v: &Value| v.as_str().and_then(|t| seconds(opened, t));
        if !self.phases.iter().any(|(of, ..)| *of == role)
            && let (Some(from), Some(to)) = (moment(&of["transfer"][0]), moment(&of["transfer"][1]))
        {
            self.phases.push((role.clone(), from, to));
        }
        for t in list(&of["troubles"]) {
            let number = t["value"].as_u64().map(|n| format!(" {n}")).unwrap_or_default();
            let trouble = moment(&t["from"]).map(|at| (at, format!("{}{number}", text(&t["what"]))));
            // Every link of a GPU carries what it suffered.
            self.troubles.extend(trouble.filter(|t| !self.troubles.contains(t)));
        }
        let series = list(&of["series"]);
        if series.is_empty() {
            return;
        }
        let whole = match of["link"].as_str() {
            Some("rdma") => "RDMA ports",
            Some("tcp") => "processes' connections",
            _ => "GPUs",
        };
        if !self.wholes.contains(&whole) {
            self.wholes.push(whole);
        }
        for (direction, place) in [("out", 2), ("in", 3)] {
            let bars = series.iter().filter_map(|s| {
                let (from, to) = (s[0].as_f64()?, s[1].as_f64()?);
                let (bytes, lasts) = (s[place].as_u64()? as f64, to - from);
                (lasts > 0.0).then_some((from, to, bytes / lasts))
            });
            let title = format!("{} {direction}", name(of));
            self.rows.push(Row { title, role: role.clone(), bars: bars.collect() });
        }
    }

    /// What is drawn, in words.
    fn bytes(&self) -> &'static str {
        if self.wholes == ["GPUs"] { "GPU bytes" } else { "bytes" }
    }

    /// Where a moment is, of `width` from left to right; nothing of before the room or after it.
    fn place(&self, at: f64, width: f64) -> f64 {
        (at / self.length).clamp(0.0, 1.0) * width
    }
}

/// Rows of characters; nothing where no reading is listed.
pub(crate) fn draw(out: &mut String, record: &Value) {
    let Some(chart) = Chart::of(record) else { return };
    let titles = chart.rows.iter().map(|r| r.title.chars().count());
    let wide = titles.max().unwrap_or(0).max("prefill phases".len());
    let _ = writeln!(
        out,
        "\n{} against the room's phases (whole {}, of every room that was handed over then; · nothing to speak of, blank not measured)",
        chart.bytes(),
        chart.wholes.join(", ")
    );
    for (role, from, to) in &chart.phases {
        let title = format!("{role} phases");
        let cell = |n| match middle(n, chart.length) {
            at if at < *from => 'b',
            at if at <= *to => 't',
            _ => '-',
        };
        let cells: String = (0..COLUMNS).map(cell).collect();
        let _ = writeln!(out, "  {title:wide$} |{cells}| b bootstrap, t transfer");
    }
    for row in &chart.rows {
        let peak = row.bars.iter().map(|b| b.2).fold(0.0, f64::max);
        let cells: String = (0..COLUMNS).map(|n| cell(row, n, &chart)).collect();
        let _ = writeln!(out, "  {:wide$} |{cells}| {}, peak {}", row.title, row.role, rate(peak));
    }
    if !chart.troubles.is_empty() {
        let mut cells = [' '; COLUMNS];
        for (at, _) in &chart.troubles {
            if let Some(c) = cells.get_mut((chart.place(*at, COLUMNS as f64) as usize).min(COLUMNS - 1)) {
                *c = '!';
            }
        }
        let cells: String = cells.iter().collect();
        let names: Vec<&str> = chart.troubles.iter().map(|(_, name)| name.as_str()).collect();
        let _ = writeln!(out, "  {:wide$} |{cells}| {}", "troubles", names.join(", "));
    }
    let end = format!("+{:.3} s", chart.length);
    let _ = writeln!(out, "  {:wide$}  +0{end:>width$}", "", width = COLUMNS - 2);
}

/// The middle of a column, seconds.
fn middle(column: usize, length: f64) -> f64 {
    (column as f64 + 0.5) * length / COLUMNS as f64
}

/// The most that any reading with a share in the column shows.
fn cell(row: &Row, column: usize, chart: &Chart) -> char {
    let width = chart.length / COLUMNS as f64;
    let (from, to) = (column as f64 * width, (column as f64 + 1.0) * width);
    let inside = row.bars.iter().filter(|b| b.0 < to && b.1 > from).map(|b| b.2);
    match inside.fold(None, |most: Option<f64>, rate| Some(most.map_or(rate, |m| m.max(rate)))) {
        None => ' ',
        Some(rate) if rate <= crate::gpu::quiet::IDLE_NOISE as f64 || chart.most <= 0.0 => '·',
        Some(rate) => {
            let height = (rate / chart.most * BARS.len() as f64).ceil() as usize;
            BARS.get(height.clamp(1, BARS.len()) - 1).copied().unwrap_or('█')
        }
    }
}

/// Bytes a second in words.
pub(crate) fn rate(bytes: f64) -> String {
    format!("{}/s", scaled(bytes))
}

/// Bytes in words.
pub(crate) fn amount(bytes: u64) -> String {
    scaled(bytes as f64)
}

fn scaled(bytes: f64) -> String {
    let units = [(1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    let unit = units.into_iter().find(|(size, _)| bytes >= *size);
    unit.map_or_else(|| format!("{bytes:.0} B"), |(size, name)| format!("{:.1} {name}", bytes / size))
}

/// A link of a GPU, a port, or a rank's connections.
pub(crate) fn name(of: &Value) -> String {
    match (of["link"].as_str(), of["pid"].as_u64()) {
        (Some("rdma"), _) => format!("RDMA {}", text(&of["name"])),
        (Some("tcp"), Some(pid)) => format!("TCP of process {pid}"),
        (Some(link), _) => format!("{} {link}", text(&of["uuid"])),
        (None, _) => text(&of["uuid"]).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use serde_json::json;

    use super::*;

    fn record() -> Value {
        let gpu = |uuid: &str, series: Value| {
            json!({
                "uuid": uuid, "role": "prefill", "pid": 1, "link": "pcie",
                "transfer": ["2026-01-01T00:00:10Z", "2026-01-01T00:00:50Z"],
                "troubles": [{"what": "xid", "value": 79, "from": "2026-01-01T00:00:30Z"}], "series": series,
            })
        };
        json!({
            "room": "7", "opened_at": "2026-01-01T00:00:00Z", "closed_at": null, "time": "2026-01-01T00:01:00Z",
            "views": {"prefill": {"messages": [{"time": "2026-01-01T00:00:10Z", "kind": "METADATA"}]}},
            "gpu": [
                gpu("GPU-<a>", json!([[0.0, 20.0, 0, 0], [20.0, 30.0, 80_000_000_000_u64, 0], [40.0, 60.0, 20_000_000_000_u64, 0]])),
                {"uuid": "GPU-b", "role": "decode", "link": null, "series": []},
            ],
        })
    }

    #[test]
    fn columns_show_what_was_read_and_blanks_what_was_not() {
        let mut out = String::new();
        draw(&mut out, &record());
        let row = |title: &str| {
            let line = out.lines().find(|l| l.contains(title)).unwrap();
            line.split('|').nth(1).unwrap().to_owned()
        };
        let [b, t, e] = ["b".repeat(10), "t".repeat(40), "-".repeat(10)];
        assert_eq!(row("prefill phases"), format!("{b}{t}{e}"));
        let [none, high, gap, low] = ["·".repeat(20), "█".repeat(10), " ".repeat(10), "▁".repeat(20)];
        assert_eq!(row("GPU-<a> pcie out"), format!("{none}{high}{gap}{low}"), "{out}");
        assert_eq!(row("troubles").find('!'), Some(30));
        assert!(out.contains("peak 8.0 GB/s") && out.contains("xid 79"), "{out}");
        assert!(!out.contains("GPU-b"));
    }

    #[test]
    fn without_readings_nothing_is_drawn() {
        for gpu in [json!(null), json!([]), json!([{"uuid": "GPU-a", "series": []}])] {
            let mut record = record();
            record["gpu"] = gpu;
            let mut out = String::new();
            draw(&mut out, &record);
            assert!(out.is_empty());
        }
    }
}
