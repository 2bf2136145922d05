//! How `top` writes numbers and breaks lines. Pure. What is not measured is [`NONE`], never 0.

use std::fmt::Write as _;

/// Not measured.
pub(super) const NONE: &str = "–";

/// A number, or that it was not measured.
pub(super) fn count(n: Option<u64>) -> String {
    n.map_or_else(|| NONE.to_owned(), |n| n.to_string())
}

/// A number of something per second in at most five characters.
pub(super) fn rate(n: Option<f64>) -> String {
    match n {
        None => NONE.to_owned(),
        Some(0.0) => "0".to_owned(),
        Some(n) if n < 0.1 => "<0.1".to_owned(),
        Some(n) if n < 9.95 => format!("{n:.1}"),
        Some(n) if n < 9_999.5 => format!("{n:.0}"),
        Some(n) if n < 999_500.0 => format!("{:.0}k", n / 1e3),
        Some(n) => format!("{:.0}M", n / 1e6),
    }
}

/// A share of one CPU, in percent.
pub(super) fn percent(share: Option<f64>) -> String {
    match share {
        None => NONE.to_owned(),
        Some(s) if s > 0.0 && s < 0.0005 => "<0.1%".to_owned(),
        Some(s) if s < 0.0995 => format!("{:.1}%", s * 100.0),
        Some(s) => format!("{:.0}%", s * 100.0),
    }
}

/// Bytes of memory.
pub(super) fn mebibytes(bytes: Option<f64>) -> String {
    bytes.map_or_else(|| NONE.to_owned(), |b| format!("{:.0} MiB", b / 1_048_576.0))
}

/// A length of time in at most six characters: `47s`, `3m12s`, `2h05m`, `3d04h`, `4000d`.
pub(super) fn age(seconds: Option<f64>) -> String {
    let Some(s) = seconds.filter(|s| s.is_finite() && *s >= 0.0) else { return NONE.to_owned() };
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and ages end far below 2^64"
    )]
    let s = s as u64;
    match s {
        0..60 => format!("{s}s"),
        60..3_600 => format!("{}m{:02}s", s / 60, s % 60),
        3_600..86_400 => format!("{}h{:02}m", s / 3_600, s % 3_600 / 60),
        86_400..8_640_000 => format!("{}d{:02}h", s / 86_400, s % 86_400 / 3_600),
        _ => format!("{}d", s / 86_400),
    }
}

/// Cells that a character takes. What gets here is clean: letters from CJK radicals on are the wide ones (Unicode Standard
/// Annex 11), and one that is taken for wide and is not only leaves a gap.
const fn cells(c: char) -> usize {
    if c != '\u{fffd}' && matches!(c, '\u{1100}'..='\u{115f}' | '\u{2e80}'..) { 2 } else { 1 }
}

/// Cells that a text takes.
pub(super) fn width(s: &str) -> usize {
    s.chars().map(cells).sum()
}

/// As much as fits into `room` cells; where something is left out the last of them says so.
pub(super) fn cut(s: &str, room: usize) -> String {
    if width(s) <= room {
        return s.to_owned();
    }
    let mut out = String::new();
    let mut used = 1;
    for c in s.chars() {
        used += cells(c);
        if used > room {
            break;
        }
        out.push(c);
    }
    if room > 0 {
        out.push('…');
    }
    out
}

/// The longest of the texts that fits, else the last of them, cut. The longest comes first.
pub(super) fn fitting<'a>(texts: impl IntoIterator<Item = &'a str>, room: usize) -> String {
    let mut last = "";
    for text in texts {
        if width(text) <= room {
            return text.to_owned();
        }
        last = text;
    }
    cut(last, room)
}

/// Breaks a line where it takes more than `room` cells, at a space where there is one; what follows is indented.
pub(super) fn wrap(line: &str, room: usize) -> Vec<String> {
    let indent = line.chars().take_while(|c| *c == ' ').count() + 4;
    let indent = if indent * 2 > room { 0 } else { indent };
    let mut out = vec![String::new()];
    let mut used = 0;
    let mut breakable = false;
    for word in line.split_inclusive(' ') {
        let long = width(word.trim_end());
        if breakable && used + long > room {
            out.push(" ".repeat(indent));
            used = indent;
        }
        for c in word.chars() {
            if used + cells(c) > room && used > 0 {
                if c == ' ' {
                    continue;
                }
                out.push(" ".repeat(indent));
                used = indent;
            }
            if let Some(last) = out.last_mut() {
                last.push(c);
            }
            used += cells(c);
        }
        breakable |= long > 0;
    }
    out
}

/// Several parts as a line.
pub(super) fn joined(parts: &[String]) -> String {
    let mut out = String::new();
    for (n, part) in parts.iter().enumerate() {
        let _ = write!(out, "{}{part}", if n > 0 { " · " } else { "" });
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_nothing_measured_is_not_zero() {
        assert_eq!(
            (count(None), count(Some(0)), rate(None), rate(Some(0.0))),
            ("–".into(), "0".into(), "–".into(), "0".into())
        );
        let rates = [0.04, 0.1, 9.94, 9.96, 812.4, 9_999.0, 10_400.0, 999_400.0, 1.5e6];
        let shown = ["<0.1", "0.1", "9.9", "10", "812", "9999", "10k", "999k", "2M"];
        for (n, text) in rates.into_iter().zip(shown) {
            assert_eq!(rate(Some(n)), text);
        }
        let ages = [0.0, 59.9, 60.0, 3_599.0, 7_500.0, 86_400.0 * 3.0, 1e9];
        let shown = ["0s", "59s", "1m00s", "59m59s", "2h05m", "3d00h", "11574d"];
        for (s, text) in ages.into_iter().zip(shown) {
            assert_eq!(age(Some(s)), text);
        }
        assert_eq!((age(None), age(Some(f64::NAN)), age(Some(-1.0))), ("–".into(), "–".into(), "–".into()));
        assert_eq!(
            (percent(Some(0.0)), percent(Some(0.0123)), percent(Some(1.5))),
            ("0.0%".into(), "1.2%".into(), "150%".into())
        );
        assert_eq!(mebibytes(Some(43_000_000.0)), "41 MiB");
    }

    #[test]
    fn lines_are_broken_between_words_and_lose_none() {
        let line =
            "  - prefill 10.0.0.1:41207 owes STATUS to decode · do: kill -TERM 2817 and look again later";
        for room in 0..100 {
            let broken = wrap(line, room);
            let words = |s: &str| s.chars().filter(|c| *c != ' ').collect::<String>();
            assert_eq!(words(&broken.concat()), words(line), "{room}");
            assert!(room == 0 || broken.iter().all(|l| width(l.trim_end()) <= room), "{room}: {broken:?}");
        }
        assert_eq!(wrap("short", 80), ["short"]);
        assert_eq!(wrap("", 80), [""]);
        assert_eq!(cut("abcdef", 4), "abc…");
        assert_eq!((cut("abc", 3), cut("abc", 0)), ("abc".to_owned(), String::new()));
        assert_eq!((cut("請求請求", 5), width("請求a\u{fffd}")), ("請求…".to_owned(), 6));
        assert_eq!(fitting(["long text", "text", "t"], 5), "text");
    }
}
