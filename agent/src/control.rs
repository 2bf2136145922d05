//! Socket events → what the rooms are told: stream offsets, ZMTP and SGLang decoding put together.
//!
//! Pure: no I/O, no clock (time is an argument), no unsafe code. Every table is bounded by [`Limits`] and
//! counts what it turns away ([`Counters`]).

use crate::event::{Mono, SocketEvent, SocketId};
use crate::rooms::model::Input;

/// Bounds of everything that grows with traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sockets followed at a time.
    pub sockets: usize,
    /// Bytes of calls held back in all, waiting for an earlier call of the same stream.
    pub held_bytes: usize,
    /// Bytes of unfinished messages kept in all.
    pub partial_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { sockets: 65_536, held_bytes: 4 << 20, partial_bytes: 16 << 20 }
    }
}

/// What a socket turned out to be: the source may stop shipping bytes of a foreign one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Judgement {
    /// Control traffic: ship every call.
    Zmtp,
    /// Nothing that is read here (HTTP, another protocol, another ZMTP socket type, encrypted).
    Foreign,
}

/// A shape of messages that no layout has: counts and lengths, no bytes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Frames of the message.
    pub frames: u32,
    /// Lengths of its first frames.
    pub lengths: Vec<u64>,
}

/// Counts since the start; gauges are named as such.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Socket events taken in.
    pub events: u64,
    /// Inputs given to the sink.
    pub inputs: u64,
}

/// Follows every socket from its events to messages.
#[derive(Debug)]
pub struct Control {
    limits: Limits,
    counters: Counters,
    judgements: Vec<(SocketId, Judgement)>,
}

impl Control {
    /// Nothing seen yet.
    pub fn new(limits: Limits) -> Self {
        Self { limits, counters: Counters::default(), judgements: Vec::new() }
    }

    /// Takes one event and gives `sink` what it means for the rooms, in order.
    pub fn handle(&mut self, event: &SocketEvent<'_>, sink: &mut impl FnMut(Input<'_>)) {
        let _ = (event, sink, self.limits);
        self.counters.events += 1;
    }

    /// Lets time pass: gives up waiting for calls that never came, forgets closed sockets. Call it at least
    /// every 100 ms while events are few.
    pub fn tick(&mut self, now: Mono, sink: &mut impl FnMut(Input<'_>)) {
        let _ = (now, sink);
    }

    /// Sockets judged since the last call.
    pub fn judgements(&mut self) -> impl Iterator<Item = (SocketId, Judgement)> + '_ {
        self.judgements.drain(..)
    }

    /// Counts so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Shapes of unknown messages with how often each was seen (bounded; more are only counted).
    pub fn unknown_shapes(&self) -> impl Iterator<Item = (&Shape, u64)> {
        std::iter::empty()
    }
}
