//! Reads the numbers that `top` shows out of Prometheus text.
//!
//! Pure. Lines that are none are passed over: the agent may be newer. The text format is that of
//! <https://prometheus.io/docs/instrumenting/exposition_formats/>, as `export/prometheus.rs` writes it.

/// One line.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Sample {
    pub(super) name: String,
    pub(super) labels: Vec<(String, String)>,
    pub(super) value: f64,
}

impl Sample {
    /// Value of a label; empty where there is none.
    pub(super) fn label(&self, name: &str) -> &str {
        self.labels.iter().find(|(n, _)| n == name).map_or("", |(_, v)| v)
    }
}

/// Lines of the metrics that `wanted` names.
pub(super) fn read(text: &str, wanted: &[&str]) -> Vec<Sample> {
    text.lines().filter_map(|line| sample(line, wanted)).collect()
}

fn sample(line: &str, wanted: &[&str]) -> Option<Sample> {
    let end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at_checked(end)?;
    if !wanted.contains(&name) {
        return None;
    }
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    let value: f64 = rest.split_whitespace().next()?.parse().ok()?;
    value.is_finite().then(|| Sample { name: name.to_owned(), labels, value })
}

/// Labels behind the opening brace, and what follows the closing one.
fn labels(mut rest: &str) -> Option<(Vec<(String, String)>, &str)> {
    let mut out = Vec::new();
    loop {
        if let Some(after) = rest.strip_prefix('}') {
            return Some((out, after));
        }
        let (name, value) = rest.split_once("=\"")?;
        let mut text = String::new();
        let mut chars = value.char_indices();
        let end = loop {
            match chars.next()? {
                (at, '"') => break at,
                (_, '\\') => text.push(match chars.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, c) => text.push(c),
            }
        };
        out.push((name.trim().to_owned(), text));
        rest = value.get(end + 1..)?;
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn wanted_lines_are_read_with_their_labels() {
        let text = "# HELP a b\n# TYPE a gauge\na{x=\"1\",y=\"q\\\"u}o\\\\t\\ne\"} 3.5 1700000000\nb 2e3\nc 1\na{} NaN\n";
        let read = read(text, &["a", "b"]);
        let labels = vec![("x".to_owned(), "1".to_owned()), ("y".to_owned(), "q\"u}o\\t\ne".to_owned())];
        assert_eq!(read.first().unwrap(), &Sample { name: "a".to_owned(), labels, value: 3.5 });
        assert_eq!((read.len(), read.last().unwrap().value), (2, 2000.0));
        assert_eq!(read.first().unwrap().label("z"), "");
    }

    #[test]
    fn what_is_no_line_is_passed_over() {
        for torn in [
            "a",
            "a{",
            "a{x",
            "a{x=\"",
            "a{x=\"1\"",
            "a{x=\"1\\",
            "a{x=\"1\"}",
            "a{x=\"1\"} x",
            "a é",
            "{} 1",
            "",
        ] {
            assert_eq!(read(torn, &["a"]), [], "{torn}");
        }
    }
}
