//! One room's time line as a picture: a lane for each side with its phases and messages, below it what engines, GPUs and ports say of the
//! same time.
//!
//! Pure: SVG from the JSON record that scripts get. Places are shares of the width, so that it fills whatever room it is given and its
//! letters stay as large as they are. What was not read is hatched, never empty; nothing is divided among rooms.
#![allow(clippy::indexing_slicing, reason = "indexing a JSON value gives null for what is not there")]
#![allow(clippy::cast_precision_loss, reason = "a drawing")]

mod lane;
mod moved;

use maud::{Markup, html};
use serde_json::Value;

use super::{list, seconds, text};

/// Colours and letters, by the names of classes.
pub(crate) const STYLE: &str = include_str!("picture/picture.css");

/// Rows below the lanes: two for each link of each GPU and for each port, one for each stage.
const ROWS: usize = 40;

/// Share of the width that a letter takes at most, where the picture is as narrow as on a telephone.
const LETTER: f64 = 2.0;

/// A row: how high it is, and what it shows.
struct Row {
    height: f64,
    body: Markup,
}

/// Where moments are. All times are seconds since the room opened.
struct Scale<'a> {
    opened: &'a str,
    /// To its end, or to now.
    length: f64,
}

impl<'a> Scale<'a> {
    fn of(record: &'a Value) -> Self {
        let opened = record["opened_at"].as_str().unwrap_or_default();
        let end = record["closed_at"].as_str().or_else(|| record["time"].as_str()).unwrap_or_default();
        Self { opened, length: seconds(opened, end).unwrap_or_default().max(0.001) }
    }

    fn moment(&self, time: &Value) -> Option<f64> {
        time.as_str().and_then(|t| seconds(self.opened, t))
    }

    /// Hundredths of the width; what was before the room or is after it stands at its edge.
    fn place(&self, at: f64) -> f64 {
        1.0 + 98.0 * (at / self.length).clamp(0.0, 1.0)
    }

    /// A rectangle from one moment to another, wide enough to be seen.
    fn bar(&self, (from, to): (f64, f64), (y, height): (f64, f64), class: &str) -> Markup {
        let (x, end) = (self.place(from), self.place(to));
        html! {
            rect class=(class) x=(percent(x)) y=(y) width=(percent((end - x).max(0.3))) height=(height) {}
        }
    }
}

fn percent(share: f64) -> String {
    format!("{share:.2}%")
}

/// Text at a place, so that it stays inside on either side.
fn label(x: f64, y: f64, class: &str, what: &str) -> Markup {
    let anchor = if x > 50.0 { "end" } else { "start" };
    html! { text class=(class) x=(percent(x)) y=(y) text-anchor=(anchor) { (what) } }
}

/// The picture for a page that has [`STYLE`].
pub(crate) fn inline(record: &Value) -> Markup {
    let (height, body) = drawing(record);
    html! {
        svg class="picture" role="img" aria-label="time line of the room" width="100%" height=(height) {
            (hatchings()) (body)
        }
    }
}

/// The picture as a file of its own.
pub(crate) fn standalone(record: &Value) -> String {
    let (height, body) = drawing(record);
    let heading = format!("room {}: {}", text(&record["room"]), text(&record["opened_at"]));
    let drawn = html! {
        svg xmlns="http://www.w3.org/2000/svg" class="picture" width="900" height=(height + 24.0 + 18.0 * KEY.len() as f64) {
            style { (maud::PreEscaped(STYLE)) }
            rect class="paper" width="100%" height="100%" {}
            (hatchings())
            (label(1.0, 16.0, "title", &heading))
            g transform="translate(0,24)" { (body) }
            @for (n, line) in KEY.iter().enumerate() {
                (label(1.0, height + 36.0 + 18.0 * n as f64, "small", line))
            }
        }
    };
    drawn.into_string()
}

/// How to read it.
pub(crate) const KEY: [&str; 4] = [
    "Bands: phases of each side (grey bootstrap, blue transfer, green conclude, violet abort). Dots: messages, filled sent, hollow received.",
    "Striped red: who owes the next move, since when (striped grey: only silence says so). Thin line below a band: its request at the HTTP port.",
    "GPUs and ports are whole devices, of every room that was handed over then; connections are a whole process's.",
    "Grey hatching: not measured. A flat line: measured, and nothing moved.",
];

/// Hatchings. Their names are referred to by the sheet.
fn hatchings() -> Markup {
    html! {
        defs {
            @for (id, class) in [("hatch-owed", "stripe-owed"), ("hatch-silent", "stripe-silent"), ("hatch-unread", "stripe-unread")] {
                pattern id=(id) width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)" {
                    rect class=(class) width="3" height="8" {}
                }
            }
        }
    }
}

fn drawing(record: &Value) -> (f64, Markup) {
    let scale = Scale::of(record);
    let mut rows = vec![lane::row(record, "prefill", &scale), lane::row(record, "decode", &scale)];
    let mut below = stages(record, &scale);
    below.extend(moved::rows(record, &scale));
    let more = below.len().saturating_sub(ROWS);
    below.truncate(ROWS);
    rows.extend(below);
    if more > 0 {
        let say = format!("({more} more rows are not drawn; all readings are in the record)");
        rows.push(Row { height: 18.0, body: label(1.0, 13.0, "small", &say) });
    }
    let top = 34.0;
    let height = top + rows.iter().map(|r| r.height).sum::<f64>();
    let below = |row: &Row, y: &mut f64| std::mem::replace(y, *y + row.height);
    let placed = rows.iter().scan(top, |y, row| Some((below(row, y), row)));
    let body = html! {
        (axis(&scale, height))
        (judged(record, &scale, height))
        @for (y, row) in placed {
            g transform=(format!("translate(0,{y})")) { (row.body) }
        }
    };
    (height, body)
}

/// Round moments, with a line through everything.
fn axis(scale: &Scale<'_>, height: f64) -> Markup {
    let step = step(scale.length);
    let ticks = (0..=10_u32).map(|n| f64::from(n) * step).take_while(|at| *at <= scale.length);
    html! {
        @for at in ticks {
            @let x = percent(scale.place(at));
            line class="grid" x1=(x) x2=(x) y1="30" y2=(height) {}
            @if at == 0.0 {
                text class="small" x=(x) y="28" { "opened" }
            } @else if scale.place(at) < 88.0 {
                text class="small" x=(x) y="28" text-anchor="middle" { "+" (short(at)) }
            }
        }
        text class="small" x="99%" y="28" text-anchor="end" { "+" (short(scale.length)) }
    }
}

/// The least of 1, 2, 5 × 10ⁿ of which at most six fit.
fn step(length: f64) -> f64 {
    let mut unit = 0.001;
    loop {
        for n in [1.0, 2.0, 5.0] {
            if unit * n * 6.0 >= length {
                return unit * n;
            }
        }
        unit *= 10.0;
    }
}

/// Seconds in as few letters as tell them.
fn short(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 10.0 => format!("{s:.1} s"),
        s if s < 600.0 => format!("{s:.0} s"),
        s => format!("{:.0} min", s / 60.0),
    }
}

/// Since when the verdict holds.
fn judged(record: &Value, scale: &Scale<'_>, height: f64) -> Markup {
    let verdict = &record["verdict"];
    let Some(at) = scale.moment(&verdict["since"]) else { return html! {} };
    let x = scale.place(at);
    let pinned = record["pinned"].as_bool() == Some(true);
    let class = if pinned { lane::weight(verdict) } else { "was" };
    let word = if pinned { "pinned" } else { "judged" };
    html! {
        line class={ "since " (class) } x1=(percent(x)) x2=(percent(x)) y1="31" y2=(height) {}
        (label(x, 11.0, &format!("mark {class}"), &format!("{word} +{}: {}", short(at), text(&verdict["class"]))))
    }
}

/// Stages of the request, as the engines' schedulers say.
fn stages(record: &Value, scale: &Scale<'_>) -> Vec<Row> {
    let stage = |s: &Value| {
        let ended = scale.moment(&s["ended"])?;
        let begun = scale.moment(&s["begun"]).unwrap_or(ended);
        let name = format!("{} {}", s["role"].as_str().unwrap_or("engine"), text(&s["stage"]));
        let body = html! {
            (label(scale.place(begun), 11.0, "small", &format!("{name}, {}", short((ended - begun).max(0.0)))))
            (scale.bar((begun, ended), (14.0, 6.0), "stage"))
        };
        Some(Row { height: 24.0, body })
    };
    list(&record["scheduler"]["stages"]).iter().filter_map(stage).collect()
}
