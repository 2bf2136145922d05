//! A strict JSON lexer for bodies of which not every byte is here.
//!
//! It never takes text inside a string for structure. From the first byte of a body it is in step by itself. Of the
//! *end* of a body it is put in step by [`Lexer::behind_hole`], which walks backward from the last byte: there the
//! state is known (outside every string, depth 0), and a quote is a delimiter exactly if an even number of
//! backslashes stands before it. Only wanted values are ever copied.

use arrayvec::ArrayVec;

use super::RID_MAX;

/// Containers within each other at most. Deeper bodies are given up at that point.
const DEPTH_MAX: u32 = 64;

/// Longest key or wanted string, bytes. Behind it the text is dropped.
const TEXT_MAX: usize = RID_MAX;

/// Longest wanted number or literal, bytes.
const ATOM_MAX: usize = 40;

/// One piece of a wanted value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Item<'a> {
    /// A string without escapes.
    Text(&'a [u8]),
    /// A number or a literal.
    Atom(&'a [u8]),
    /// A string or a number that is too long, or a string with escapes.
    Unread,
    /// A list begins; its items follow.
    Open,
    /// It ends.
    Close,
    /// An object, or a list in a list.
    Nested,
}

/// Is told the keys and the wanted values.
pub(super) trait Reader {
    /// Keys up to this depth are told: 1 are those of the outermost object.
    const KEYS_TO: u32;

    /// A key; `None`: it has escapes. Whether its value is wanted. Keys longer than [`TEXT_MAX`] are not told: written with
    /// escapes or not, they are longer than any that is wanted.
    fn key(&mut self, depth: u32, name: Option<&[u8]>) -> bool;

    /// The wanted value begins, and it is a string; its piece is told where it ends.
    fn text_begins(&mut self) {}

    /// A piece of the wanted value.
    fn value(&mut self, item: Item<'_>);

    /// Bytes are missing here: what follows is behind them.
    fn pass_hole(&mut self);
}

/// Why the lexer stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stopped {
    /// Not JSON.
    NotJson,
    /// More than [`DEPTH_MAX`] containers within each other.
    TooDeep,
}

/// What may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expect {
    Top,
    FirstKey,
    Key,
    Colon,
    FirstValue,
    Value,
    Next,
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Within {
    Nothing,
    Text { key: bool, kept: bool, escape: bool },
    Atom { kept: bool },
}

/// Containers around the position: their number, and of each whether it is an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Nest {
    depth: u32,
    objects: u64,
}

impl Nest {
    fn enter(&mut self, object: bool) -> bool {
        if self.depth >= DEPTH_MAX {
            return false;
        }
        let bit = 1u64 << self.depth;
        self.objects = if object { self.objects | bit } else { self.objects & !bit };
        self.depth += 1;
        true
    }

    const fn in_object(self) -> bool {
        self.depth > 0 && self.objects >> (self.depth - 1) & 1 == 1
    }

    const fn in_list(self) -> bool {
        self.depth > 0 && !self.in_object()
    }
}

/// The lexer: holds a position in the grammar, and of the text under way at most [`TEXT_MAX`] bytes, only if it is a
/// key or wanted.
#[derive(Clone, Debug)]
pub(super) struct Lexer {
    nest: Nest,
    expect: Expect,
    within: Within,
    /// Depth of the object that the wanted value is a member of; 0: none wanted.
    wanted: u32,
    text: ArrayVec<u8, TEXT_MAX>,
    /// The text under way has an escape.
    escapes: bool,
    /// It did not fit.
    long: bool,
}

const fn is_space(b: u8) -> bool {
    matches!(b, b' ' | b'\t' | b'\n' | b'\r')
}

/// Bytes of numbers and literals (Python's `NaN` and `Infinity` included).
const fn is_atom(b: u8) -> bool {
    b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.')
}

/// Length of the part before the first quote or backslash, eight bytes at a time: most of a body is text.
fn plain_len(bytes: &[u8]) -> usize {
    const ONES: u64 = u64::MAX / 0xff;
    const QUOTES: u64 = ONES * 0x22;
    const BACKSLASHES: u64 = ONES * 0x5c;
    /// The highest bit of every byte that is zero; above the lowest of them others may be set too.
    const fn zeros(word: u64) -> u64 {
        word.wrapping_sub(ONES) & !word & (ONES << 7)
    }
    let (words, rest) = bytes.as_chunks::<8>();
    for (i, word) in words.iter().enumerate() {
        let word = u64::from_le_bytes(*word);
        let special = zeros(word ^ QUOTES) | zeros(word ^ BACKSLASHES);
        if special != 0 {
            return 8 * i + usize::try_from(special.trailing_zeros() / 8).unwrap_or(0);
        }
    }
    let plain = rest.iter().position(|b| matches!(b, b'"' | b'\\')).unwrap_or(rest.len());
    bytes.len() - rest.len() + plain
}

impl Lexer {
    /// Before the first byte of a body.
    pub(super) const fn new() -> Self {
        Self {
            nest: Nest { depth: 0, objects: 0 },
            expect: Expect::Top,
            within: Within::Nothing,
            wanted: 0,
            text: ArrayVec::new_const(),
            escapes: false,
            long: false,
        }
    }

    /// In step with the end of a body whose last bytes are `tail`, bytes before them missing; with the place in `tail`
    /// from which it can be fed. `None`: this is no end of a JSON object or list.
    pub(super) fn behind_hole(tail: &[u8]) -> Option<(Self, usize)> {
        let (nest, from) = walk_back(tail)?;
        let mut lexer = Self::new();
        lexer.nest = nest;
        lexer.expect = if nest.depth == 0 { Expect::Done } else { Expect::Next };
        Some((lexer, from))
    }

    /// Whether the outermost value is complete.
    pub(super) const fn is_done(&self) -> bool {
        matches!(self.expect, Expect::Done)
    }

    /// Takes the next bytes.
    pub(super) fn feed(&mut self, mut bytes: &[u8], reader: &mut impl Reader) -> Result<(), Stopped> {
        while let Some((&first, rest)) = bytes.split_first() {
            bytes = match self.within {
                Within::Text { key, kept, escape } => self.in_text(bytes, key, kept, escape, reader),
                Within::Atom { kept } => self.in_atom(bytes, kept, reader),
                Within::Nothing => {
                    self.structure(first, reader)?;
                    // The first byte of a number belongs to it.
                    if matches!(self.within, Within::Atom { .. }) { bytes } else { rest }
                }
            };
        }
        Ok(())
    }

    fn keep(&mut self, bytes: &[u8], max: usize) {
        if self.long || self.text.len() + bytes.len() > max || self.text.try_extend_from_slice(bytes).is_err()
        {
            self.long = true;
        }
    }

    fn begin(&mut self) {
        self.text.clear();
        self.escapes = false;
        self.long = false;
    }

    fn in_text<'b>(
        &mut self,
        bytes: &'b [u8],
        key: bool,
        kept: bool,
        escape: bool,
        reader: &mut impl Reader,
    ) -> &'b [u8] {
        if escape {
            self.within = Within::Text { key, kept, escape: false };
            let (escaped, rest) = bytes.split_at_checked(1).unwrap_or((bytes, &[]));
            if kept {
                self.keep(escaped, TEXT_MAX);
            }
            return rest;
        }
        let (plain, rest) = bytes.split_at_checked(plain_len(bytes)).unwrap_or((bytes, &[]));
        if kept {
            self.keep(plain, TEXT_MAX);
        }
        let Some((&special, rest)) = rest.split_first() else { return rest };
        if special == b'\\' {
            self.escapes = true;
            if kept {
                self.keep(b"\\", TEXT_MAX);
            }
            self.within = Within::Text { key, kept, escape: true };
        } else {
            self.end_text(key, kept, reader);
        }
        rest
    }

    fn end_text(&mut self, key: bool, kept: bool, reader: &mut impl Reader) {
        self.within = Within::Nothing;
        if key {
            let name = (!self.escapes).then_some(self.text.as_slice());
            // Keys of objects in a wanted list are no members of their own.
            if kept && !self.long && self.wanted == 0 && reader.key(self.nest.depth, name) {
                self.wanted = self.nest.depth;
            }
            self.expect = Expect::Colon;
        } else {
            if kept {
                let unread = self.escapes || self.long;
                reader.value(if unread { Item::Unread } else { Item::Text(&self.text) });
            }
            self.value_over();
        }
        self.text.clear();
    }

    fn in_atom<'b>(&mut self, bytes: &'b [u8], kept: bool, reader: &mut impl Reader) -> &'b [u8] {
        let len = bytes.iter().position(|b| !is_atom(*b)).unwrap_or(bytes.len());
        let (atom, rest) = bytes.split_at_checked(len).unwrap_or((bytes, &[]));
        if kept {
            self.keep(atom, ATOM_MAX);
        }
        if !rest.is_empty() {
            self.within = Within::Nothing;
            if kept {
                reader.value(if self.long { Item::Unread } else { Item::Atom(&self.text) });
            }
            self.text.clear();
            self.value_over();
        }
        rest
    }

    /// Behind a value of the container around it.
    fn value_over(&mut self) {
        if self.wanted == self.nest.depth {
            self.wanted = 0;
        }
        self.expect = if self.nest.depth == 0 { Expect::Done } else { Expect::Next };
    }

    /// Whether a value that begins here is wanted: the member's own, or an item of its list.
    const fn is_wanted(&self) -> bool {
        self.wanted > 0
            && (self.nest.depth == self.wanted || (self.nest.depth == self.wanted + 1 && self.nest.in_list()))
    }

    fn structure(&mut self, b: u8, reader: &mut impl Reader) -> Result<(), Stopped> {
        if is_space(b) {
            return Ok(());
        }
        let value = matches!(self.expect, Expect::Value | Expect::FirstValue);
        let key = matches!(self.expect, Expect::Key | Expect::FirstKey);
        match b {
            b'"' if key || value => {
                self.begin();
                let kept = if key { self.nest.depth <= keys_to(reader) } else { self.is_wanted() };
                if !key && kept && self.nest.depth == self.wanted {
                    reader.text_begins();
                }
                self.within = Within::Text { key, kept, escape: false };
            }
            b'{' | b'[' if value || self.expect == Expect::Top => self.enter(b == b'{', reader)?,
            b'}' if self.nest.in_object() && matches!(self.expect, Expect::FirstKey | Expect::Next) => {
                self.leave(reader);
            }
            b']' if self.nest.in_list() && matches!(self.expect, Expect::FirstValue | Expect::Next) => {
                self.leave(reader);
            }
            b',' if self.expect == Expect::Next => {
                self.expect = if self.nest.in_object() { Expect::Key } else { Expect::Value };
            }
            b':' if self.expect == Expect::Colon => self.expect = Expect::Value,
            _ if value && is_atom(b) => {
                self.begin();
                self.within = Within::Atom { kept: self.is_wanted() };
            }
            _ => return Err(Stopped::NotJson),
        }
        Ok(())
    }

    fn enter(&mut self, object: bool, reader: &mut impl Reader) -> Result<(), Stopped> {
        if self.is_wanted() {
            let list = !object && self.nest.depth == self.wanted;
            reader.value(if list { Item::Open } else { Item::Nested });
            if object && self.nest.depth == self.wanted {
                self.wanted = 0;
            }
        }
        self.expect = if object { Expect::FirstKey } else { Expect::FirstValue };
        if self.nest.enter(object) { Ok(()) } else { Err(Stopped::TooDeep) }
    }

    fn leave(&mut self, reader: &mut impl Reader) {
        if self.wanted > 0 && self.nest.depth == self.wanted + 1 {
            reader.value(Item::Close);
        }
        self.nest.depth -= 1;
        self.value_over();
    }
}

const fn keys_to<R: Reader>(_: &R) -> u32 {
    R::KEYS_TO
}

/// From the last byte of a body back as far as every token is certain: the containers around the earliest comma between
/// tokens, and its place. Without a comma: nothing around, and the end.
fn walk_back(tail: &[u8]) -> Option<(Nest, usize)> {
    let mut rest = tail.trim_ascii_end();
    let mut nest = Nest::default();
    let mut found = (nest, tail.len());
    if !matches!(rest.last(), Some(b'}' | b']')) {
        return None;
    }
    while let Some((&b, before)) = rest.split_last() {
        rest = before;
        match b {
            b'}' | b']' => {
                if !nest.enter(b == b'}') {
                    return Some(found);
                }
            }
            b'{' | b'[' => {
                // The outermost one began before the missing bytes.
                if nest.depth < 2 || nest.in_object() != (b == b'{') {
                    return None;
                }
                nest.depth -= 1;
            }
            b',' => found = (nest, rest.len()),
            b'"' => match back_over_text(before) {
                Back::Over(behind) => rest = behind,
                Back::OutOfSight => return Some(found),
                Back::Wrong => return None,
            },
            b':' => {}
            b if is_space(b) || is_atom(b) => {}
            _ => return None,
        }
    }
    Some(found)
}

/// Where a walk back over a string leads.
enum Back<'a> {
    /// To what lies before its opening quote.
    Over(&'a [u8]),
    /// Its beginning, or that of the backslashes before a quote, is not here.
    OutOfSight,
    /// Its closing quote is escaped: it is none.
    Wrong,
}

/// `before` is what lies before a closing quote.
fn back_over_text(before: &[u8]) -> Back<'_> {
    match is_escaped(before) {
        None => return Back::OutOfSight,
        Some(true) => return Back::Wrong,
        Some(false) => {}
    }
    let mut rest = before;
    while let Some(quote) = rest.iter().rposition(|b| *b == b'"') {
        rest = rest.get(..quote).unwrap_or_default();
        match is_escaped(rest) {
            None => return Back::OutOfSight,
            Some(false) => return Back::Over(rest),
            Some(true) => {}
        }
    }
    Back::OutOfSight
}

/// Whether a quote behind `before` is escaped; `None`: what stands before its backslashes is not here.
fn is_escaped(before: &[u8]) -> Option<bool> {
    let plain = before.iter().rposition(|b| *b != b'\\')?;
    Some((before.len() - plain - 1) % 2 == 1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    /// Writes down what it is told.
    #[derive(Debug, Default, PartialEq)]
    struct Tape(Vec<String>);

    impl Reader for Tape {
        const KEYS_TO: u32 = 2;

        fn key(&mut self, depth: u32, name: Option<&[u8]>) -> bool {
            let name = name.map(|n| String::from_utf8_lossy(n).into_owned());
            self.0.push(format!("{depth} {name:?}"));
            name.is_some_and(|n| n.starts_with('w'))
        }

        fn value(&mut self, item: Item<'_>) {
            self.0.push(match item {
                Item::Text(text) => format!("text {}", String::from_utf8_lossy(text)),
                Item::Atom(atom) => format!("atom {}", String::from_utf8_lossy(atom)),
                other => format!("{other:?}"),
            });
        }

        fn pass_hole(&mut self) {}
    }

    fn read(body: &str) -> Result<Vec<String>, Stopped> {
        let (mut lexer, mut tape) = (Lexer::new(), Tape::default());
        lexer.feed(body.as_bytes(), &mut tape)?;
        if lexer.is_done() { Ok(tape.0) } else { Err(Stopped::NotJson) }
    }

    #[test]
    fn only_wanted_values_are_told() {
        let told =
            read(r#"{"a":"x","w":"y","w2":[1,"z",[2],{"w":3},null],"o":{"w":true,"p":{"w":4}},"w\u0031":5}"#);
        let expected = [
            "1 Some(\"a\")",
            "1 Some(\"w\")",
            "text y",
            "1 Some(\"w2\")",
            "Open",
            "atom 1",
            "text z",
            "Nested",
            "Nested",
            "atom null",
            "Close",
            "1 Some(\"o\")",
            "2 Some(\"w\")",
            "atom true",
            "2 Some(\"p\")",
            "1 None",
        ];
        assert_eq!(told.unwrap(), expected);
    }

    #[test]
    fn the_first_quote_or_backslash_is_found_wherever_it_stands() {
        for len in 0..40 {
            for (special, at) in [b'"', b'\\'].into_iter().flat_map(|s| (0..=len).map(move |at| (s, at))) {
                // Neighbours in value, high bits, and a second one behind it.
                let mut bytes: Vec<u8> =
                    b"!#[]\x80\xa2\xdc\x00\x01\xff\x23\x5d".iter().copied().cycle().take(len).collect();
                for place in bytes.iter_mut().skip(at).step_by(3) {
                    *place = special;
                }
                let expected = bytes.iter().position(|b| *b == special).unwrap_or(len);
                assert_eq!(plain_len(&bytes), expected, "{bytes:?}");
            }
        }
    }

    #[test]
    fn what_is_no_json_stops_it() {
        for body in [
            "",
            "7",
            "x",
            "{",
            "{]",
            "[}",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{a:1}",
            "{\"a\":1}{",
            "{,}",
            "[1,]",
            "[1 2]",
            "{\"a\":'b'}",
            "\u{feff}{}",
        ] {
            assert_eq!(read(body), Err(Stopped::NotJson), "{body}");
        }
        assert_eq!(read(&"[".repeat(65)), Err(Stopped::TooDeep));
        assert_eq!(read(&format!("{}{}", "[".repeat(64), "]".repeat(64))), Ok(vec![]));
    }

    #[test]
    fn the_way_back_ends_where_a_token_is_not_certain() {
        let from = |tail: &str| Lexer::behind_hole(tail.as_bytes()).map(|(_, from)| from);
        // Cut inside a string, before its closing quote, inside a number, inside its backslashes.
        assert_eq!(from(r#"\"a\",","w":1}"#), Some(7));
        assert_eq!(from(r#"","w":1}"#), Some(1));
        assert_eq!(from(r#"34,"w":1}"#), Some(2));
        assert_eq!(from(r#"\\","w":1}"#), Some(3));
        // Nothing to begin at.
        assert_eq!(from(r#"w":1}"#), Some(5));
        assert_eq!(from("}\n "), Some(3));
        // No end of a body, or one that began here.
        for wrong in ["", " ", "\"", "1", "},", r#"{"w":1}"#, r#"a\"}"#, "w'}"] {
            assert_eq!(from(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn what_stands_behind_a_hole_has_its_true_depth() {
        let tail = br#"ext, \"w\":1","o":{"x":[1,{"y":2}],"w":3},"w":4}"#;
        let (mut lexer, from) = Lexer::behind_hole(tail).unwrap();
        let mut tape = Tape::default();
        lexer.feed(tail.split_at(from).1, &mut tape).unwrap();
        assert!(lexer.is_done());
        let expected =
            ["1 Some(\"o\")", "2 Some(\"x\")", "2 Some(\"w\")", "atom 3", "1 Some(\"w\")", "atom 4"];
        assert_eq!(tape.0, expected);
    }
}
