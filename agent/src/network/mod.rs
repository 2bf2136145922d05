//! What moves through the RDMA ports of this host and over the engines' own TCP connections: further windows beside those of the GPUs.
//!
//! Readings of a port are of the whole port, readings of connections are of a whole process: neither is of one room, and nothing is
//! divided. `ports` reads files of the kernel on a thread of its own, where a call into a card's driver may hang; `carriers` adds up
//! what the kernel programs tell of connections and is pure, as `model` is. What was not read is not measured, never zero.

pub mod carriers;
pub mod model;
mod ports;

pub use ports::{PortReaders, PortStanding, Settings, Standing, look_once};
