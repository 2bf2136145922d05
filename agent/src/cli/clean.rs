//! Takes out of strings what would command a terminal instead of standing on it: names of processes, containers and requests are
//! chosen by others.
//!
//! Pure. What is taken out leaves [`MARK`], so that it is seen that something was there.

use serde_json::Value;

/// Stands where something was taken out.
const MARK: char = '\u{fffd}';

/// Cleans every string of an answer, keys aside: those are the agent's own.
pub(super) fn json(value: &mut Value) {
    match value {
        Value::String(s) if s.chars().any(|c| !harmless(c)) => *s = text(s),
        Value::Array(list) => list.iter_mut().for_each(json),
        Value::Object(fields) => fields.values_mut().for_each(json),
        _ => {}
    }
}

/// Cleans one string; a line break in it goes too.
pub(super) fn text(s: &str) -> String {
    s.chars().map(|c| if harmless(c) { c } else { MARK }).collect()
}

/// Whether a character only ever takes its own place: a letter, a digit, or a sign that this program itself uses. Not so are
/// control characters, the marks that turn the direction of writing (Unicode Standard Annex 9), those without width, and pictures,
/// of whose width terminals hold different opinions.
fn harmless(c: char) -> bool {
    // Dashes, quotation marks, bullets, the ellipsis; arrows; mathematics; lines, blocks and shapes.
    let sign = matches!(c, '\u{a1}'..='\u{ac}' | '\u{ae}'..='\u{ff}' | '\u{2010}'..='\u{2027}' | '\u{2030}'..='\u{205e}')
        || matches!(c, '\u{2190}'..='\u{22ff}' | '\u{2500}'..='\u{25ff}' | MARK);
    let letter = c.is_alphanumeric() && c < '\u{10000}' && !fills(c);
    matches!(c, ' '..='~') || sign || letter
}

/// Letters by name that show nothing (Unicode, `Default_Ignorable_Code_Point`).
const fn fills(c: char) -> bool {
    matches!(c, '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{3164}' | '\u{ffa0}')
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing, reason = "tests")]
    use super::*;

    #[test]
    fn what_commands_a_terminal_is_taken_out_and_leaves_a_mark() {
        for (hostile, clean) in [
            ("a\u{1b}[2Jb", "a\u{fffd}[2Jb"),
            ("\u{9b}31mred", "\u{fffd}31mred"),
            (
                "two\nlines\r\tand\u{7f}\u{8}\u{0}",
                "two\u{fffd}lines\u{fffd}\u{fffd}and\u{fffd}\u{fffd}\u{fffd}",
            ),
            ("nimda\u{202e}admin\u{2066}\u{200f}\u{61c}", "nimda\u{fffd}admin\u{fffd}\u{fffd}\u{fffd}"),
            ("zero\u{200b}\u{200d}\u{feff}\u{ad}width", "zero\u{fffd}\u{fffd}\u{fffd}\u{fffd}width"),
            ("\u{2028}\u{2029}\u{e0041}\u{1f600}\u{fe0f}", "\u{fffd}\u{fffd}\u{fffd}\u{fffd}\u{fffd}"),
            ("e\u{301}\u{3164}", "e\u{fffd}\u{fffd}"),
        ] {
            assert_eq!(text(hostile), clean, "{hostile:?}");
        }
    }

    #[test]
    fn what_is_only_written_stays() {
        for s in ["sglang::schedul", "rid-ä ß 請求 запрос", "1 of 3 · … – → █ ≥", "~!@#$%^&*()"]
        {
            assert_eq!(text(s), s);
        }
    }

    #[test]
    fn every_string_of_an_answer_is_cleaned() {
        let mut value = serde_json::json!({"rooms": [{"rid": "a\u{1b}b", "n": 1, "no": null}], "x": "\u{7}"});
        json(&mut value);
        assert_eq!(value["rooms"][0]["rid"], "a\u{fffd}b");
        assert_eq!((&value["rooms"][0]["n"], &value["x"]), (&1.into(), &"\u{fffd}".into()));
    }
}
