//! Durations as people write them: `10s`, `1m 30s`, `250ms`.
//!
//! Pure: for arguments, and for `#[serde(with = …)]`.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serializer, de::Error as _};

/// Parses one.
///
/// # Errors
///
/// Text that says what is wrong.
pub fn parse(text: &str) -> Result<Duration, String> {
    let signed: jiff::SignedDuration =
        text.parse().map_err(|_| format!("`{text}` is not a duration such as `10s` or `1m 30s`"))?;
    Duration::try_from(signed).map_err(|_| format!("`{text}` is negative"))
}

/// Writes one as [`parse`] reads it.
pub fn show(duration: Duration) -> String {
    jiff::SignedDuration::try_from(duration)
        .map_or_else(|_| format!("{}s", duration.as_secs()), |d| format!("{d:#}"))
}

/// # Errors
///
/// What the serializer says.
pub fn serialize<S: Serializer>(duration: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&show(*duration))
}

/// # Errors
///
/// Text that is no duration.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Duration, D::Error> {
    parse(&String::deserialize(from)?).map_err(D::Error::custom)
}

/// One that may be left out.
pub mod optional {
    use super::{Deserialize, Deserializer, Duration, Serializer, parse, show};
    use serde::de::Error as _;

    /// # Errors
    ///
    /// What the serializer says.
    #[allow(clippy::ref_option, reason = "serde's signature")]
    pub fn serialize<S: Serializer>(duration: &Option<Duration>, to: S) -> Result<S::Ok, S::Error> {
        match duration {
            Some(duration) => to.serialize_str(&show(*duration)),
            None => to.serialize_none(),
        }
    }

    /// # Errors
    ///
    /// Text that is no duration.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(|t| parse(&t).map_err(D::Error::custom)).transpose()
    }
}
