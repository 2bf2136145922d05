//! Where in a YAML text the value of a key stands. Pure.

use std::fmt;

use serde::Deserializer;
use serde::de::{Deserialize as _, DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde_saphyr::{Location, Spanned};

/// `:line:column` of the value of `key` (`rooms.factor`), or of the section around it where it is not written;
/// empty when nothing of it is.
pub(super) fn of(text: &str, key: &str) -> String {
    let found = serde_saphyr::with_deserializer_from_str(text, |d| Within(key).deserialize(d));
    shown(found.ok().flatten())
}

/// `:line:column`, empty where it is not known.
pub(super) fn shown(location: Option<Location>) -> String {
    location.map_or_else(String::new, |l| format!(":{}:{}", l.line(), l.column()))
}

/// Looks for the rest of a key; the part of it that is not found is left out.
struct Within<'k>(&'k str);

impl Within<'_> {
    /// What of the key is left behind `name`.
    fn behind(&self, name: &str) -> Option<Self> {
        let rest = self.0.strip_prefix(name)?;
        rest.strip_prefix('.').or(rest.is_empty().then_some(rest)).map(Self)
    }
}

impl<'de> DeserializeSeed<'de> for Within<'_> {
    type Value = Option<Location>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        if self.0.is_empty() {
            return Ok(Some(Spanned::<IgnoredAny>::deserialize(from)?.referenced));
        }
        from.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Within<'_> {
    type Value = Option<Location>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mapping")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut found = None;
        while let Some(name) = map.next_key::<Spanned<String>>()? {
            match self.behind(&name.value) {
                Some(rest) => found = map.next_value_seed(rest)?.or(Some(name.referenced)),
                None => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_found_or_else_the_section_around_it() {
        let text = "rooms:\n  floor: 90s\nexport: {otlp: {headers: {a.b: c}}}\n";
        assert_eq!(of(text, "rooms.floor"), ":2:10");
        assert_eq!(of(text, "rooms.ceiling"), ":1:1");
        assert_eq!(of(text, "export.otlp.headers.a.b"), ":3:32");
        assert_eq!(of(text, "http.listen"), "");
        assert_eq!(of("rooms: [1\n", "rooms.floor"), "");
    }
}
