//! The stream that carries the answers.

use std::collections::VecDeque;

use super::answer::AnswerBody;
use super::chunked::{Chunked, Step};
use super::decoder::{Open, Out, nothing_read};
use super::event::{AnswerEnd, Answered, Event, Lost, Method, Unread};
use super::framing::{Collected, Head, Stage, check_answer};
use super::head::{self, Answer, Framing};

/// What was seen of an answer before its request: the two streams are not delivered in step, so that the answer can
/// come first by a few milliseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Early {
    status: u16,
    streamed: bool,
    first_byte: bool,
    end: Option<AnswerEnd>,
}

/// Answers of one connection.
#[derive(Clone, Debug)]
pub(super) struct Answers {
    pub(super) stage: Stage,
    pub(super) head: Collected,
    pub(super) body: Option<Box<AnswerBody>>,
    pub(super) first_byte: bool,
    pub(super) early: Option<Early>,
    /// The answer under way belongs to no request that was seen.
    pub(super) unasked: bool,
    /// Something came since the oldest open request began.
    pub(super) moved: bool,
}

/// The last chunk, as servers send it: in a call of its own, or behind the data of the call.
const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

impl Answers {
    pub(super) const fn new(stage: Stage) -> Self {
        Self {
            stage,
            head: Collected::new(),
            body: None,
            first_byte: false,
            early: None,
            unasked: false,
            moved: false,
        }
    }

    pub(super) const fn stage(&self) -> Stage {
        self.stage
    }

    /// Whether no head is under way.
    pub(super) const fn is_between(&self) -> bool {
        matches!(self.stage, Stage::Head) && self.head.is_empty()
    }

    /// A request begins while none is open.
    pub(super) const fn expect(&mut self) {
        self.moved = false;
    }

    /// Whether the end of the oldest open request's answer may be among what is missing.
    pub(super) const fn may_have_missed(&self) -> bool {
        self.moved && self.stage.is_unknown()
    }

    pub(super) fn held(&self) -> usize {
        self.head.held() + self.body.as_ref().map_or(0, |body| size_of::<AnswerBody>() + body.held())
    }

    pub(super) fn bytes<F: FnMut(Event)>(
        &mut self,
        mut bytes: &[u8],
        opens: bool,
        asks_known: bool,
        open: &mut VecDeque<Open>,
        out: &mut Out<'_, F>,
    ) -> Result<(), Unread> {
        let mut opens = opens;
        // The first that comes since the oldest open request began is its answer. Of what comes later, behind missing
        // bytes, that cannot be said: the answer, and a whole other exchange, may be among them.
        let first = !std::mem::replace(&mut self.moved, true);
        while !bytes.is_empty() {
            bytes = match self.stage {
                Stage::Head => self.at_head(bytes, asks_known, open, out)?,
                Stage::Fixed(left) => {
                    let take = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                    let (data, rest) = bytes.split_at_checked(take).unwrap_or((bytes, &[]));
                    let left = left.saturating_sub(u64::try_from(data.len()).unwrap_or(u64::MAX));
                    self.stage = Stage::Fixed(left);
                    self.say(data, open, out);
                    if left == 0 {
                        self.over(AnswerEnd::ContentLength, true, open, out);
                    }
                    rest
                }
                Stage::Chunks(mut chunks) => {
                    let step = chunks.step(bytes);
                    self.stage = Stage::Chunks(chunks);
                    match step {
                        Step::Data(data, rest) => {
                            self.say(data, open, out);
                            rest
                        }
                        Step::End(rest) => {
                            self.over(AnswerEnd::LastChunk, true, open, out);
                            rest
                        }
                        Step::More => &[],
                        Step::Refused(why) => return Err(why),
                    }
                }
                Stage::ToEnd => {
                    self.say(bytes, open, out);
                    &[]
                }
                Stage::Adrift { chunked } => {
                    self.adrift(bytes, opens, chunked, open, out);
                    &[]
                }
                Stage::Trial => self.search(bytes, opens, true, asks_known, open, out)?,
                Stage::Lost => self.search(bytes, opens, first, asks_known, open, out)?,
            };
            opens = false;
        }
        Ok(())
    }

    fn at_head<'b, F: FnMut(Event)>(
        &mut self,
        bytes: &'b [u8],
        asks_known: bool,
        open: &mut VecDeque<Open>,
        out: &mut Out<'_, F>,
    ) -> Result<&'b [u8], Unread> {
        let (answer, rest) = match self.head.add(bytes, check_answer) {
            Head::More => return Ok(&[]),
            Head::Refused(why) => return Err(why),
            Head::Here(head, rest) => (head::answer(head)?, rest),
            Head::Collected(head, rest) => (head::answer(&head)?, rest),
        };
        self.begin(&answer, asks_known, open, out)?;
        Ok(rest)
    }

    fn begin<F: FnMut(Event)>(
        &mut self,
        answer: &Answer,
        asks_known: bool,
        open: &mut VecDeque<Open>,
        out: &mut Out<'_, F>,
    ) -> Result<(), Unread> {
        let front = open.front_mut();
        let connect = front.as_ref().is_some_and(|open| open.method == Method::Connect);
        if answer.status == 101 || (connect && (200..300).contains(&answer.status)) {
            return Err(Unread::Upgraded);
        }
        self.stage = Stage::Head;
        if answer.status < 200 {
            if let Some(front) = front {
                front.waits &= answer.status != 100;
                out.give(Event::Interim { n: front.n, status: answer.status });
            }
            return Ok(());
        }
        self.first_byte = false;
        let no_body = matches!(answer.status, 204 | 304)
            || front.as_ref().is_some_and(|open| open.method == Method::Head);
        let (status, streamed) = (answer.status, answer.streamed);
        if let Some(front) = front {
            front.answer_begun = true;
            let body = AnswerBody::new(front.route, status, streamed, answer.encoded);
            self.body = Some(Box::new(body));
            out.give(Event::AnswerHead { n: front.n, status, streamed });
        } else {
            out.counters.answers_unasked += 1;
            if !asks_known {
                // Its request was missed. Was it a HEAD? Then this has no body, whatever its head says.
                self.stage = Stage::Lost;
                return Ok(());
            }
            self.unasked = true;
            self.early = Some(Early { status, streamed, first_byte: false, end: None });
        }
        match answer.framing {
            _ if no_body => self.over(AnswerEnd::NoBody, true, open, out),
            Framing::Empty => self.over(AnswerEnd::ContentLength, true, open, out),
            Framing::Length(length) => self.stage = Stage::Fixed(length),
            Framing::Chunked => self.stage = Stage::Chunks(Chunked::new()),
            Framing::ToEnd => self.stage = Stage::ToEnd,
        }
        Ok(())
    }

    fn touch<F: FnMut(Event)>(&mut self, open: &VecDeque<Open>, out: &mut Out<'_, F>) {
        if std::mem::replace(&mut self.first_byte, true) {
            return;
        }
        if self.unasked {
            if let Some(early) = &mut self.early {
                early.first_byte = true;
            }
        } else if let Some(front) = open.front() {
            out.give(Event::AnswerFirstBodyByte { n: front.n });
        }
    }

    fn say<F: FnMut(Event)>(&mut self, data: &[u8], open: &VecDeque<Open>, out: &mut Out<'_, F>) {
        if data.is_empty() {
            return;
        }
        self.touch(open, out);
        if let Some(body) = &mut self.body {
            body.bytes(data);
        }
    }

    fn say_hole<F: FnMut(Event)>(&mut self, open: &VecDeque<Open>, out: &mut Out<'_, F>) {
        self.touch(open, out);
        if let Some(body) = &mut self.body {
            body.hole();
        }
    }

    /// The answer under way is over.
    fn over<F: FnMut(Event)>(
        &mut self,
        how: AnswerEnd,
        end_seen: bool,
        open: &mut VecDeque<Open>,
        out: &mut Out<'_, F>,
    ) {
        self.stage = Stage::Head;
        out.counters.answers += 1;
        let body = self.body.take();
        if std::mem::replace(&mut self.unasked, false) {
            if let Some(early) = &mut self.early {
                early.end = Some(how);
            }
            return;
        }
        let Some(front) = open.pop_front() else { return };
        let said = body.map_or_else(|| nothing_read(front.route), |body| body.finish(end_seen));
        out.give(Event::AnswerEnd { n: front.n, how, said });
    }

    /// A request that was just seen whole may have its answer already.
    pub(super) fn replay_early<F: FnMut(Event)>(&mut self, open: &mut VecDeque<Open>, out: &mut Out<'_, F>) {
        let Some(early) = self.early.take() else { return };
        let Some(front) = open.front_mut() else { return };
        let (n, route) = (front.n, front.route);
        front.answer_begun = true;
        self.unasked = false;
        out.give(Event::AnswerHead { n, status: early.status, streamed: early.streamed });
        if early.first_byte {
            out.give(Event::AnswerFirstBodyByte { n });
        }
        if let Some(how) = early.end {
            open.pop_front();
            out.give(Event::AnswerEnd { n, how, said: nothing_read(route) });
        }
    }

    /// An answer that came before its request cannot be matched any more.
    pub(super) fn drop_early(&mut self) {
        if self.early.take().is_some() {
            self.body = None;
            self.unasked = false;
            self.moved = true;
            self.head.take();
            self.stage = Stage::Lost;
        }
    }

    /// Bytes of a body whose framing is lost.
    fn adrift<F: FnMut(Event)>(
        &mut self,
        bytes: &[u8],
        opens: bool,
        chunked: bool,
        open: &mut VecDeque<Open>,
        out: &mut Out<'_, F>,
    ) {
        let last = chunked
            && bytes
                .strip_suffix(LAST_CHUNK)
                .is_some_and(|before| if before.is_empty() { opens } else { before.ends_with(b"\r\n") });
        // Only lines can be read without framing.
        if let Some(body) = self.body.as_deref_mut()
            && matches!(body, AnswerBody::Events(..))
        {
            body.bytes(bytes);
        }
        if last {
            self.over(AnswerEnd::LastChunk, false, open, out);
        }
    }

    /// The position is lost: an answer's head where a call begins, while exactly one request waits for one and this is
    /// `first` that comes.
    fn search<'b, F: FnMut(Event)>(
        &mut self,
        bytes: &'b [u8],
        opens: bool,
        first: bool,
        asks_known: bool,
        open: &mut VecDeque<Open>,
        out: &mut Out<'_, F>,
    ) -> Result<&'b [u8], Unread> {
        out.counters.count_lost_bytes(bytes);
        let waits = first && open.len() == 1 && open.front().is_some_and(|open| !open.answer_begun);
        if opens && bytes.starts_with(b"HTTP/1.") {
            self.head.take();
        }
        if !waits || (!opens && self.head.is_empty()) {
            self.head.take();
            self.stage = Stage::Lost;
            return Ok(&[]);
        }
        let (answer, rest) = match self.head.add(bytes, check_answer) {
            Head::More => {
                self.stage = Stage::Trial;
                return Ok(&[]);
            }
            Head::Refused(_) => (None, bytes),
            Head::Here(head, rest) => (head::answer(head).ok(), rest),
            Head::Collected(head, rest) => (head::answer(&head).ok(), rest),
        };
        let Some(answer) = answer else {
            self.head.take();
            self.stage = Stage::Lost;
            return Ok(&[]);
        };
        out.regained(false);
        self.begin(&answer, asks_known, open, out)?;
        Ok(rest)
    }

    /// Lets bytes pass unseen; why the position is lost, if it is and that needs telling.
    pub(super) fn skip<F: FnMut(Event)>(
        &mut self,
        len: u64,
        open: &mut VecDeque<Open>,
        out: &mut Out<'_, F>,
    ) -> Option<Lost> {
        self.moved = true;
        match self.stage {
            Stage::Fixed(left) => {
                self.stage = Stage::Fixed(left.saturating_sub(len));
                self.say_hole(open, out);
                if len >= left {
                    self.over(AnswerEnd::ContentLength, true, open, out);
                }
                (len > left).then(|| self.lose())
            }
            Stage::Chunks(mut chunks) => {
                let inside = chunks.skip(len);
                self.stage = if inside { Stage::Chunks(chunks) } else { Stage::Adrift { chunked: true } };
                self.say_hole(open, out);
                None
            }
            Stage::ToEnd | Stage::Adrift { .. } => {
                self.say_hole(open, out);
                None
            }
            Stage::Head => Some(self.lose()),
            Stage::Lost | Stage::Trial => {
                out.counters.lost_bytes = out.counters.lost_bytes.saturating_add(len);
                self.head.take();
                self.stage = Stage::Lost;
                None
            }
        }
    }

    fn lose(&mut self) -> Lost {
        self.early = None;
        self.unasked = false;
        self.head.take();
        self.stage = Stage::Lost;
        Lost::HoleAtHead
    }

    /// The order of what comes is not known; whether the position was.
    pub(super) fn disorder(&mut self) -> bool {
        self.moved = true;
        if let Some(body) = &mut self.body {
            body.hole();
        }
        match self.stage {
            Stage::Head => {
                self.lose();
                true
            }
            Stage::Fixed(_) => {
                self.stage = Stage::Adrift { chunked: false };
                true
            }
            Stage::Chunks(_) => {
                self.stage = Stage::Adrift { chunked: true };
                true
            }
            Stage::ToEnd | Stage::Adrift { .. } | Stage::Lost | Stage::Trial => false,
        }
    }

    /// Every open request is over, as is known from elsewhere.
    pub(super) fn conclude<F: FnMut(Event)>(
        &mut self,
        open: &mut VecDeque<Open>,
        how: AnswerEnd,
        out: &mut Out<'_, F>,
    ) {
        while !open.is_empty() {
            self.conclude_front(how, open, out);
        }
        if matches!(self.stage, Stage::Adrift { .. } | Stage::Trial) {
            self.head.take();
            self.stage = Stage::Lost;
        }
    }

    fn conclude_front<F: FnMut(Event)>(
        &mut self,
        how: AnswerEnd,
        open: &mut VecDeque<Open>,
        out: &mut Out<'_, F>,
    ) {
        let Some(front) = open.pop_front() else { return };
        out.counters.ends_concluded += 1;
        let read = self.body.take().filter(|_| front.answer_begun);
        let said: Answered = read.map_or_else(|| nothing_read(front.route), |body| body.finish(false));
        out.give(Event::AnswerEnd { n: front.n, how, said });
    }

    /// The server has said its last: some answers end so.
    pub(super) fn end_with_connection<F: FnMut(Event)>(
        &mut self,
        open: &mut VecDeque<Open>,
        out: &mut Out<'_, F>,
    ) {
        if self.stage == Stage::ToEnd {
            self.over(AnswerEnd::Close, true, open, out);
        }
    }
}
