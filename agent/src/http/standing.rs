//! Where a decoder stands that waits for an answer, in so few words that another can go on from there.
//!
//! Pure. Framing only: no byte of a request or of an answer, nothing that was read in them. An answer of which part of the
//! body has come is not taken on: what was read of it would be missing.

use serde::{Deserialize, Serialize};

use super::answer::AnswerBody;
use super::answers::Answers;
use super::chunked::Chunked;
use super::decoder::{Decoder, Open, Roles};
use super::event::{Method, Route};
use super::framing::{Collected, Stage};
use crate::event::Direction;

/// How far the answer to the one open request has come, which is whole and asks for work. Part of the state file's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Standing {
    /// Nothing of it.
    Asked,
    /// Its head, and no byte of its body.
    Begun {
        /// The body is server-sent events.
        streamed: bool,
        /// It is encoded: not read.
        encoded: bool,
        /// Where it ends.
        rest: Rest,
    },
}

/// What ends an answer. Part of the state file's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rest {
    /// So many bytes.
    Length(u64),
    /// A last chunk.
    Chunks,
    /// The connection's end.
    Close,
}

impl Decoder {
    /// Where it stands, if it waits for one answer, all that came before is over, and nothing is in doubt.
    pub fn standing(&self) -> Option<Standing> {
        let mut open = self.open.iter();
        let (Some(one), None) = (open.next(), open.next()) else { return None };
        let waits = one.whole && !one.hung_up && one.method == Method::Post && one.route.is_work();
        let quiet = waits && !self.dead && self.requests().is_some() && self.asks.is_between();
        if quiet { self.answers.standing(one.answer_begun) } else { None }
    }

    /// Of a connection whose requests another has followed up to there. The open one has number 0.
    pub fn resumed(requests: Direction, standing: Standing) -> Self {
        let mut decoder = Self::at_start();
        decoder.from_start = false;
        decoder.judged = true;
        decoder.roles = Roles::Known(requests);
        // Which work it asks for makes no difference any more.
        let mut one = Open::new(decoder.asks.number(), Method::Post, Route::OtherWork, false);
        one.whole = true;
        one.answer_begun = standing != Standing::Asked;
        decoder.open.push_back(one);
        decoder.answers = Answers::resumed(standing);
        decoder
    }
}

impl Answers {
    fn standing(&self, begun: bool) -> Option<Standing> {
        if self.early.is_some() || self.unasked {
            return None;
        }
        if !begun {
            return self.is_between().then_some(Standing::Asked);
        }
        let rest = match self.stage {
            Stage::Fixed(left) => Rest::Length(left),
            Stage::Chunks(chunks) if chunks == Chunked::new() => Rest::Chunks,
            Stage::ToEnd => Rest::Close,
            _ => return None,
        };
        let (streamed, encoded) = match self.body.as_deref()? {
            AnswerBody::Unread => (false, true),
            AnswerBody::Json(..) => (false, false),
            AnswerBody::Events(..) => (true, false),
            AnswerBody::Route(..) | AnswerBody::DpRanks(..) => return None,
        };
        (!self.first_byte).then_some(Standing::Begun { streamed, encoded, rest })
    }

    fn resumed(standing: Standing) -> Self {
        let Standing::Begun { streamed, encoded, rest } = standing else { return Self::new(Stage::Head) };
        let stage = match rest {
            Rest::Length(left) => Stage::Fixed(left),
            Rest::Chunks => Stage::Chunks(Chunked::new()),
            Rest::Close => Stage::ToEnd,
        };
        let body = AnswerBody::new(Route::OtherWork, 200, streamed, encoded);
        Self { head: Collected::new(), body: Some(Box::new(body)), moved: true, ..Self::new(stage) }
    }
}
