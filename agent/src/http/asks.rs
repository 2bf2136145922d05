//! The stream that carries the requests.

use std::collections::VecDeque;

use super::answers::Answers;
use super::body::Body;
use super::chunked::{Chunked, Step};
use super::decoder::{Open, Out, try_head};
use super::event::{Event, Lost, Method, NotSeen, Unread};
use super::framing::{Collected, Head, Stage, check_request};
use super::head::{self, Framing, Request};

/// Requests of one connection.
#[derive(Clone, Debug)]
pub(super) struct Asks {
    stage: Stage,
    head: Collected,
    /// Number of the next request.
    next: u64,
    /// The request whose body is under way.
    body: Option<(u64, Box<Body>)>,
    /// No byte of that body has come.
    untouched: bool,
}

impl Asks {
    pub(super) const fn new(stage: Stage) -> Self {
        Self { stage, head: Collected::new(), next: 0, body: None, untouched: true }
    }

    pub(super) const fn stage(&self) -> Stage {
        self.stage
    }

    /// Whether no request is under way.
    pub(super) const fn is_between(&self) -> bool {
        matches!(self.stage, Stage::Head) && self.head.is_empty()
    }

    pub(super) fn held(&self) -> usize {
        self.head.held() + self.body.as_ref().map_or(0, |(_, body)| size_of::<Body>() + body.held())
    }

    /// The number of a request that begins.
    pub(super) const fn number(&mut self) -> u64 {
        let n = self.next;
        self.next += 1;
        n
    }

    pub(super) fn regain(&mut self) {
        self.stage = Stage::Head;
        self.head.take();
    }

    pub(super) fn drop_body(&mut self) {
        self.body = None;
        self.head.take();
        self.stage = Stage::Lost;
    }

    /// Collects a head. Empty lines before it do not count (RFC 9112, section 2.2).
    pub(super) fn head<'b>(&mut self, bytes: &'b [u8]) -> Head<'b> {
        let mut bytes = bytes;
        if self.head.is_empty() {
            let blank = bytes.iter().take_while(|b| matches!(b, b'\r' | b'\n')).count();
            bytes = bytes.get(blank..).unwrap_or_default();
            if bytes.is_empty() {
                return Head::More;
            }
        }
        self.head.add(bytes, check_request)
    }

    pub(super) fn try_head<'b>(&mut self, bytes: &'b [u8], opens: bool) -> Option<(Request, &'b [u8])> {
        let found = try_head(&mut self.head, bytes, opens);
        self.stage = if self.head.is_empty() { Stage::Lost } else { Stage::Trial };
        found
    }

    pub(super) fn begin<F: FnMut(Event)>(
        &mut self,
        n: u64,
        request: &Request,
        open: &mut VecDeque<Open>,
        answers: &mut Answers,
        out: &mut Out<'_, F>,
    ) {
        self.body = Some((n, Box::new(Body::new(request))));
        self.untouched = true;
        self.stage = match request.framing {
            Framing::Empty => Stage::Head,
            Framing::ToEnd => Stage::ToEnd,
            Framing::Length(length) => Stage::Fixed(length),
            Framing::Chunked => Stage::Chunks(Chunked::new()),
        };
        if self.stage == Stage::Head {
            self.whole(open, answers, out);
        }
    }

    /// Takes bytes of a body; the rest.
    pub(super) fn body<'b, F: FnMut(Event)>(
        &mut self,
        bytes: &'b [u8],
        open: &mut VecDeque<Open>,
        answers: &mut Answers,
        out: &mut Out<'_, F>,
    ) -> Result<&'b [u8], Unread> {
        self.untouched = false;
        match &mut self.stage {
            Stage::Fixed(left) => {
                let take = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                let (data, rest) = bytes.split_at_checked(take).unwrap_or((bytes, &[]));
                *left = left.saturating_sub(u64::try_from(data.len()).unwrap_or(u64::MAX));
                let over = *left == 0;
                self.say(data);
                if over {
                    self.whole(open, answers, out);
                }
                Ok(rest)
            }
            Stage::Chunks(chunks) => match chunks.step(bytes) {
                Step::Data(data, rest) => {
                    self.say(data);
                    Ok(rest)
                }
                Step::End(rest) => {
                    self.whole(open, answers, out);
                    Ok(rest)
                }
                Step::More => Ok(&[]),
                Step::Refused(why) => Err(why),
            },
            _ => Ok(&[]),
        }
    }

    fn say(&mut self, data: &[u8]) {
        if let Some((_, body)) = &mut self.body {
            body.bytes(data);
        }
    }

    /// The last byte of a request has passed.
    fn whole<F: FnMut(Event)>(
        &mut self,
        open: &mut VecDeque<Open>,
        answers: &mut Answers,
        out: &mut Out<'_, F>,
    ) {
        self.stage = Stage::Head;
        self.finish(true, open, out);
        answers.replay_early(open, out);
    }

    fn finish<F: FnMut(Event)>(&mut self, end_seen: bool, open: &mut VecDeque<Open>, out: &mut Out<'_, F>) {
        let Some((n, body)) = self.body.take() else { return };
        if let Some(open) = open.iter_mut().find(|open| open.n == n) {
            open.whole = end_seen;
        }
        let said = body.finish(end_seen, out.counters);
        out.give(Event::RequestWhole { n, end_seen, said });
    }

    /// Lets bytes pass unseen; why the position is lost, if it is.
    pub(super) fn skip<F: FnMut(Event)>(
        &mut self,
        len: u64,
        open: &mut VecDeque<Open>,
        answers: &mut Answers,
        out: &mut Out<'_, F>,
    ) -> Option<Lost> {
        self.untouched = false;
        match &mut self.stage {
            Stage::Fixed(left) => {
                let (here, beyond) = (len.min(*left), len.saturating_sub(*left));
                *left -= here;
                let over = *left == 0;
                self.say_hole();
                if over {
                    self.whole(open, answers, out);
                }
                (beyond > 0).then_some(Lost::HoleAtHead)
            }
            Stage::Chunks(chunks) => {
                let inside = chunks.skip(len);
                self.say_hole();
                (!inside).then_some(Lost::HoleInChunks)
            }
            Stage::Head => Some(Lost::HoleAtHead),
            _ => {
                out.counters.lost_bytes = out.counters.lost_bytes.saturating_add(len);
                self.head.take();
                self.stage = Stage::Lost;
                None
            }
        }
    }

    fn say_hole(&mut self) {
        if let Some((_, body)) = &mut self.body {
            body.hole();
        }
    }

    /// What the first line of a head under way says, when the rest of it is missing: a request is open all the same.
    pub(super) fn cut(&mut self) -> Option<Request> {
        let head = self.head.take();
        head::request_line(&head).filter(|_| self.stage == Stage::Head).map(|(m, r)| Request::cut(m, r))
    }

    /// The position is lost; whether it was known.
    pub(super) fn lose<F: FnMut(Event)>(&mut self, open: &mut VecDeque<Open>, out: &mut Out<'_, F>) -> bool {
        self.finish(false, open, out);
        self.head.take();
        !std::mem::replace(&mut self.stage, Stage::Lost).is_lost()
    }

    /// Whether the request under way announced its body, and got a final answer before it sent any of it.
    pub(super) fn is_refused(&self, open: &VecDeque<Open>) -> bool {
        let Some((n, _)) = &self.body else { return false };
        let answered = open.iter().find(|open| open.n == *n).is_none_or(|open| open.answer_begun);
        self.untouched && answered
    }
}

impl Request {
    /// Of which only the first line is known, and not where its body ends.
    const fn cut(method: Method, route: super::event::Route) -> Self {
        Self {
            method,
            route,
            query: super::event::RouteQuery { dp_rank: None, cp_rank: None, tp_rank: None, pp_rank: None },
            framing: Framing::ToEnd,
            expects_continue: false,
            unreadable: Some(NotSeen::HeadCut),
            names_host: false,
        }
    }
}
