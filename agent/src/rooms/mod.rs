//! Rooms: one request's hand-over of KV cache each, followed from every role seen on this host.
//!
//! Pure: no I/O, no clock (time is an argument), no unsafe code. Input is [`model::Input`], output
//! [`model::Event`]; verdicts come from [`crate::verdict`].

mod assess;
mod batches;
mod connections;
pub mod counts;
mod deaf;
mod engines;
mod estimate;
mod facts;
pub mod findings;
mod gpus;
mod groups;
mod messages;
pub mod model;
mod moving;
mod network;
pub mod overview;
pub(crate) mod peers;
mod rates;
mod requests;
mod room;
mod saved;
mod slab;
mod snapshot;
mod spans;
mod status;
pub mod table;
mod tcp;
mod threads;
mod transport;
mod wheel;

pub use saved::{SavedRooms, Survivors};
pub use table::{Config, Peer, RoomTable};
