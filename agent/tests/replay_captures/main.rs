//! Replay of packet captures: file formats, TCP, damage, and the bundled captures of a real engine.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::type_complexity,
    reason = "tests"
)]

mod collect;
mod cut;
mod damage;
mod fixtures;
mod formats;
mod requests;
mod talk;
mod tcp;
mod write;
