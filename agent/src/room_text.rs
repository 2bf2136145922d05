//! Room numbers in JSON: text, because they lie above 2^53, which many readers of JSON round.
//!
//! Pure: for `#[serde(with = …)]`.

use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer, Serializer};

/// # Errors
///
/// What the serializer says.
pub fn serialize<S: Serializer>(room: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(room)
}

/// # Errors
///
/// Text that is no number of 64 bits.
pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    <&str>::deserialize(from)?.parse().map_err(D::Error::custom)
}

/// Lists of room numbers, some of them not there.
pub mod list {
    use serde::de::Error as _;
    use serde::ser::SerializeSeq as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    /// # Errors
    ///
    /// What the serializer says.
    pub fn serialize<S: Serializer>(rooms: &[Option<u64>], to: S) -> Result<S::Ok, S::Error> {
        let mut list = to.serialize_seq(Some(rooms.len()))?;
        for room in rooms {
            list.serialize_element(&room.map(|r| r.to_string()))?;
        }
        list.end()
    }

    /// # Errors
    ///
    /// Text that is no number of 64 bits.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<Option<u64>>, D::Error> {
        let texts = Vec::<Option<&str>>::deserialize(from)?;
        texts.into_iter().map(|t| t.map(|t| t.parse().map_err(D::Error::custom)).transpose()).collect()
    }
}
