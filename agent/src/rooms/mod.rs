//! Rooms: one request's hand-over of KV cache each, followed from every role seen on this host.
//!
//! Pure: no I/O, no clock (time is an argument), no unsafe code. Input is [`model::Input`], output
//! [`model::Event`]; verdicts come from [`crate::verdict`].

pub mod counts;
pub mod model;
pub mod table;

pub use table::{Config, Peer, RoomTable};
