//! Members of a JSON body: the values of a few named keys, nothing else of it.

use super::json::{Item, Reader};
use super::{RID_MAX, ROOMS_MAX};

/// A value, as far as values are kept.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Int(u64),
    /// A number with a fraction, an exponent or a sign.
    Float(f64),
    /// Printable ASCII of at most [`RID_MAX`] bytes.
    Text(Box<str>),
    List(List),
    /// Of a key of which only the shape counts.
    Shape(Shape),
    /// Anything else.
    Unread,
}

/// A list.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct List {
    pub(super) items: Vec<Value>,
    /// How many more it had than [`ROOMS_MAX`].
    pub(super) over: u64,
    /// Its end was seen.
    pub(super) closed: bool,
}

/// How a prompt is written: nothing of what it says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub(super) struct Shape {
    /// It is a list.
    list: bool,
    /// Texts and lists in it.
    prompts: u64,
    /// It has numbers: it is one prompt, as tokens.
    tokens: bool,
    /// It is a text, of which at least the beginning was seen.
    text: bool,
    /// It is null: as if it were not there.
    null: bool,
    /// Its end was seen.
    closed: bool,
}

impl Shape {
    /// Whether it says anything.
    pub(super) const fn is_there(self) -> bool {
        !self.null
    }

    /// How many prompts it holds, `None` where that was not seen. One that is no list, or a list of tokens, is one; so is a text of
    /// which only the beginning was seen.
    pub(super) const fn prompts(self) -> Option<u64> {
        match self {
            Self { list: false, .. } | Self { tokens: true, .. } => Some(1),
            Self { closed: true, prompts, .. } => Some(prompts),
            Self { .. } => None,
        }
    }

    /// Takes a piece of it; whether more may come.
    const fn take(&mut self, item: Item<'_>) -> bool {
        match item {
            Item::Open => self.list = true,
            Item::Close => self.closed = true,
            Item::Atom(b"null") if !self.list => self.null = true,
            Item::Atom(_) => self.tokens = true,
            Item::Text(_) | Item::Unread | Item::Nested => self.prompts = self.prompts.saturating_add(1),
        }
        self.list && !self.closed
    }
}

impl Value {
    fn of_atom(atom: &[u8]) -> Self {
        let text = str::from_utf8(atom).unwrap_or_default();
        match text {
            "null" => Self::Null,
            "true" => Self::Bool(true),
            "false" => Self::Bool(false),
            _ if text.bytes().all(|b| b.is_ascii_digit()) => text.parse().map_or(Self::Unread, Self::Int),
            _ if text.starts_with(|c: char| c == '-' || c.is_ascii_digit()) => {
                text.parse().map_or(Self::Unread, Self::Float)
            }
            _ => Self::Unread,
        }
    }

    fn of_text(text: &[u8]) -> Self {
        match str::from_utf8(text) {
            Ok(text) if text.len() <= RID_MAX && text.bytes().all(|b| b.is_ascii_graphic()) => {
                Self::Text(text.into())
            }
            _ => Self::Unread,
        }
    }

    /// As a room number: an integer, a whole float below 2^53, or decimal digits as text; what the engine's request
    /// models take (pydantic, lax mode), as far as a double still tells it from its neighbours.
    pub(super) fn room(&self) -> Option<u64> {
        const EXACT: f64 = 9_007_199_254_740_991.0;
        match self {
            Self::Int(n) => Some(*n),
            #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole and in range")]
            Self::Float(f) if *f >= 0.0 && *f <= EXACT && f.fract() == 0.0 => Some(*f as u64),
            Self::Text(text) if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) => {
                text.parse().ok()
            }
            _ => None,
        }
    }

    /// As a small number (also written as text, which the bootstrap server takes too).
    pub(super) fn number<T: TryFrom<u64>>(&self) -> Option<T> {
        match self {
            Self::Int(n) => T::try_from(*n).ok(),
            Self::Text(text) => text.parse::<u64>().ok().and_then(|n| T::try_from(n).ok()),
            _ => None,
        }
    }

    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }
}

/// How each prompt is worked on.
pub(super) const PARAMS: &str = "sampling_params";

/// Which keys of the outermost object are wanted.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wanted {
    Keys(&'static [&'static str]),
    /// Those of the first list, and of the second only the shape; `n` also within [`PARAMS`].
    KeysAndShapes(&'static [&'static str], &'static [&'static str]),
    /// Those that are decimal numbers.
    Numbers,
}

/// Collects them. Of a key that stands twice the last one counts, as in the engine (Python's `json`).
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools, reason = "independent facts")]
pub(super) struct Members {
    wanted: Wanted,
    found: Vec<Member>,
    /// The value of the last found member is under way.
    under_way: bool,
    /// A key could not be read.
    pub(super) odd_key: bool,
    /// The outermost member whose inner keys may count.
    inside: Inside,
    /// The last `n` stood within an object.
    pub(super) inner_n: bool,
    /// Behind a hole.
    behind_hole: bool,
    /// Bytes of memory that the values take.
    held: usize,
}

/// What the keys of an object belong to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Inside {
    /// Another member.
    Other,
    /// `sampling_params`.
    Params,
    /// A member whose key is in the missing bytes.
    Unknown,
}

#[derive(Clone, Debug)]
struct Member {
    /// Index among the wanted keys, or the number that the key is.
    key: u64,
    value: Value,
    behind_hole: bool,
}

impl Members {
    pub(super) const fn new(wanted: Wanted) -> Self {
        Self {
            wanted,
            found: Vec::new(),
            under_way: false,
            odd_key: false,
            inside: Inside::Other,
            inner_n: false,
            behind_hole: false,
            held: 0,
        }
    }

    /// The value of a key, and whether it stood behind a hole.
    pub(super) fn get_placed(&self, key: &str) -> Option<(&Value, bool)> {
        let index = self.number_of(key.as_bytes()).filter(|_| !matches!(self.wanted, Wanted::Numbers))?;
        let member = self.found.iter().find(|m| m.key == index)?;
        Some((&member.value, member.behind_hole))
    }

    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        self.get_placed(key).map(|(value, _)| value)
    }

    /// Keys that are numbers, with their values.
    pub(super) fn numbered(&self) -> impl Iterator<Item = (u64, &Value)> {
        self.found.iter().map(|m| (m.key, &m.value))
    }

    /// Bytes of memory taken (values that were overwritten included).
    pub(super) const fn held(&self) -> usize {
        self.held
    }

    fn number_of(&self, name: &[u8]) -> Option<u64> {
        match self.wanted {
            Wanted::Keys(keys) => keys.iter().position(|k| k.as_bytes() == name)?.try_into().ok(),
            Wanted::KeysAndShapes(keys, shapes) => {
                keys.iter().chain(shapes).position(|k| k.as_bytes() == name)?.try_into().ok()
            }
            Wanted::Numbers if name.iter().all(u8::is_ascii_digit) => str::from_utf8(name).ok()?.parse().ok(),
            Wanted::Numbers => None,
        }
    }

    fn is_shape(&self, key: u64) -> bool {
        match self.wanted {
            Wanted::KeysAndShapes(keys, _) => usize::try_from(key).is_ok_and(|key| key >= keys.len()),
            Wanted::Keys(_) | Wanted::Numbers => false,
        }
    }

    fn add(&mut self, value: Value, ends: bool) {
        let Some(member) = self.found.last_mut().filter(|_| self.under_way) else { return };
        match &mut member.value {
            Value::List(list) => {
                if list.items.len() < ROOMS_MAX {
                    self.held += size_of::<Value>() + value.text().map_or(0, str::len);
                    list.items.push(value);
                } else {
                    list.over += 1;
                }
            }
            place => {
                *place = value;
                self.under_way = !ends;
            }
        }
    }
}

impl Reader for Members {
    const KEYS_TO: u32 = 2;

    fn key(&mut self, depth: u32, name: Option<&[u8]>) -> bool {
        let inner = depth > 1;
        let counts = matches!(self.wanted, Wanted::KeysAndShapes(..)) && self.inside != Inside::Other;
        if inner && !(name == Some(b"n") && counts) {
            return false;
        }
        if !inner {
            self.inside = if name == Some(PARAMS.as_bytes()) { Inside::Params } else { Inside::Other };
        }
        self.under_way = false;
        let Some(name) = name else {
            self.odd_key = true;
            return false;
        };
        let Some(key) = self.number_of(name) else { return false };
        if !matches!(self.wanted, Wanted::Numbers) {
            self.found.retain(|m| m.key != key);
        }
        if self.found.len() >= ROOMS_MAX {
            self.odd_key = true;
            return false;
        }
        if name == b"n" {
            self.inner_n = inner;
        }
        self.held += size_of::<Member>() + RID_MAX;
        let value = if self.is_shape(key) { Value::Shape(Shape::default()) } else { Value::Unread };
        self.found.push(Member { key, value, behind_hole: self.behind_hole });
        self.under_way = true;
        true
    }

    fn text_begins(&mut self) {
        if let Some(Member { value: Value::Shape(shape), .. }) =
            self.found.last_mut().filter(|_| self.under_way)
        {
            shape.text |= !shape.list;
        }
    }

    fn value(&mut self, item: Item<'_>) {
        if let Some(Member { value: Value::Shape(shape), .. }) =
            self.found.last_mut().filter(|_| self.under_way)
        {
            self.under_way = shape.take(item);
            return;
        }
        match item {
            Item::Text(text) => self.add(Value::of_text(text), true),
            Item::Atom(atom) => self.add(Value::of_atom(atom), true),
            Item::Unread | Item::Nested => self.add(Value::Unread, true),
            Item::Open => self.add(Value::List(List::default()), false),
            Item::Close => {
                self.under_way = false;
                if let Some(Value::List(list)) = self.found.last_mut().map(|m| &mut m.value) {
                    list.closed = true;
                }
            }
        }
    }

    fn pass_hole(&mut self) {
        self.behind_hole = true;
        if self.inside == Inside::Params {
            // It may end in the hole, and more of it stand there.
            let params = self.number_of(PARAMS.as_bytes());
            self.found.retain(|m| Some(m.key) != params);
        }
        self.inside = Inside::Unknown;
        let unread = |m: &Member| match m.value {
            Value::Unread => true,
            Value::Shape(shape) => shape == Shape::default(),
            _ => false,
        };
        if std::mem::take(&mut self.under_way) && self.found.last().is_some_and(unread) {
            // Its value is in the hole.
            self.found.pop();
        }
    }
}
