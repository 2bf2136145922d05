//! What an engine has said in numbers lately: answers of the same content, one after the other, are one.
//!
//! Pure: no I/O, no clock (time is an argument). Bounded: [`MAX_ANSWERS`].

use std::collections::VecDeque;

use crate::event::Mono;
use crate::rooms::model::{EngineGauges, EngineNumbers, Role};

/// Different answers remembered of one engine: of a busy one, in which every answer differs, eight minutes at the default interval.
const MAX_ANSWERS: usize = 32;

/// Of these that one room is told at most, the latest.
const MAX_TOLD: usize = 16;

/// The latest answers.
#[derive(Debug, Default)]
pub(super) struct Answers {
    list: VecDeque<EngineNumbers>,
}

impl Answers {
    /// Takes an answer. `moves`: whether progress did since the one before; `None`: not known.
    pub(super) fn take(&mut self, at: Mono, g: &EngineGauges, moves: Option<bool>) {
        let said = EngineNumbers {
            role: Role::Prefill,
            from: at,
            to: at,
            answers: 1,
            inflight: g.inflight,
            bootstrap: g.bootstrap,
            waiting: g.waiting,
            running: g.running,
            paused: g.paused,
            moves,
            stale: g.stale,
        };
        if let Some(last) = self.list.back_mut()
            && last.counts() == said.counts()
            // Between the first of them and this one it moved, or did not.
            && (last.moves == moves || last.moves.is_none())
        {
            (last.to, last.moves) = (at, moves);
            last.answers = last.answers.saturating_add(1);
            return;
        }
        if self.list.len() >= MAX_ANSWERS {
            self.list.pop_front();
        }
        self.list.push_back(said);
    }

    /// Those from `from` to `to`, of an engine that is this to the room.
    pub(super) fn between(
        &self,
        role: Role,
        from: Mono,
        to: Mono,
    ) -> impl Iterator<Item = EngineNumbers> + '_ {
        let within = move |said: &&EngineNumbers| said.to >= from && said.from <= to;
        let n = self.list.iter().filter(within).count();
        let latest = self.list.iter().filter(within).skip(n.saturating_sub(MAX_TOLD));
        latest.map(move |said| EngineNumbers { role, ..*said })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn say(answers: &mut Answers, at: u64, inflight: u64, moves: Option<bool>) {
        let g = EngineGauges { inflight: Some(inflight), ..EngineGauges::default() };
        answers.take(Mono(at), &g, moves);
    }

    fn told(answers: &Answers, from: u64, to: u64) -> Vec<(u64, u64, u32, Option<bool>)> {
        let all = answers.between(Role::Decode, Mono(from), Mono(to));
        all.map(|n| (n.from.0, n.to.0, n.answers, n.moves)).collect()
    }

    #[test]
    fn answers_of_the_same_content_are_one_and_a_room_is_told_those_of_its_time() {
        let mut a = Answers::default();
        say(&mut a, 1, 1, None);
        say(&mut a, 2, 1, Some(false));
        say(&mut a, 3, 1, Some(false));
        say(&mut a, 4, 1, Some(true));
        say(&mut a, 5, 2, Some(true));
        assert_eq!(told(&a, 0, 9), [(1, 3, 3, Some(false)), (4, 4, 1, Some(true)), (5, 5, 1, Some(true))]);
        assert_eq!(told(&a, 4, 4), [(4, 4, 1, Some(true))]);
        assert_eq!(told(&a, 6, 9), []);
        assert!(a.between(Role::Decode, Mono(0), Mono(9)).all(|n| n.role == Role::Decode));
    }

    #[test]
    fn they_are_bounded_and_the_latest_stay() {
        let mut a = Answers::default();
        for at in 0..1000 {
            say(&mut a, at, at, Some(true));
        }
        assert_eq!(a.list.len(), MAX_ANSWERS);
        let told = told(&a, 0, 2000);
        assert_eq!((told.len(), told.last().unwrap().0), (MAX_TOLD, 999));
    }
}
