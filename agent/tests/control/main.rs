//! Socket events in, room inputs out: what real connections do, and what goes wrong on them.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]

mod foreign;
mod joined;
mod losses;
mod properties;
mod rig;
mod streams;
mod web;
mod web_ends;
mod web_properties;
#[path = "../support/wire.rs"]
mod wire;
