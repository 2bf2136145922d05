//! Makes a record's strings fit to be shown: nothing in them moves the cursor, turns the direction of the text, or goes on for pages.
//!
//! Pure. Names of processes, request ids and containers are whatever somebody chose.

use std::fmt::Write as _;

use serde_json::Value;

/// Characters of one string that are shown. The longest that is made on purpose is a command line of some hundred.
const LONGEST: usize = 1000;

/// Every string of a record, at any depth. Markup is not this function's business: whoever writes HTML escapes it.
pub(crate) fn make(value: &mut Value) {
    match value {
        Value::String(text) => {
            if text.chars().any(hidden) || text.len() > LONGEST {
                *text = plain(text);
            }
        }
        Value::Array(all) => all.iter_mut().for_each(make),
        Value::Object(all) => all.values_mut().for_each(make),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// What does not show itself stands as its number (`\u{202e}`); what is longer than [`LONGEST`] is cut, and says so.
pub(crate) fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(4 * LONGEST));
    let mut rest = text.chars();
    for c in rest.by_ref().take(LONGEST) {
        if hidden(c) { out.extend(c.escape_unicode()) } else { out.push(c) }
    }
    let more = rest.count();
    if more > 0 {
        let _ = write!(out, "… ({more} more characters)");
    }
    out
}

/// Control characters, and what Unicode has of marks without a width or with a direction (UAX #9, and the zero-width ones of general
/// category Cf that names are forged with).
fn hidden(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_hides_is_shown_and_what_is_long_is_cut_at_any_depth() {
        let mut value =
            json!({"comm": "a\u{1b}[2J\nb", "list": [{"rid": "x\u{202e}gnp"}, 7, null], "path": "ä<b>é"});
        make(&mut value);
        let shown = json!({"comm": "a\\u{1b}[2J\\u{a}b", "list": [{"rid": "x\\u{202e}gnp"}, 7, null], "path": "ä<b>é"});
        assert_eq!(value, shown);
        let long = plain(&"é".repeat(10_000));
        assert!(long.ends_with("é… (9000 more characters)") && long.chars().count() < 1100, "{long}");
    }
}
