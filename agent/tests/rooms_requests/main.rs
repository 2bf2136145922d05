//! What requests at the engines' HTTP ports do to rooms and verdicts.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, clippy::float_cmp, reason = "tests")]

mod aborts;
mod bootstrap;
mod classes;
mod completion;
mod gpus;
mod modes;
mod numbers;
mod pauses;
mod policies;
mod properties;
mod roles;
#[path = "../rooms_support/mod.rs"]
mod rooms_support;
mod stopped;
mod threads;
mod unsent;
mod web;
mod workers;

const ROOM: u64 = 9_000_000_000_000_000_001;
