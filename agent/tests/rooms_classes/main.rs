//! Every class that frames and connections can show, from each view, with its timing.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, clippy::float_cmp, reason = "tests")]

mod completeness;
mod lives;
mod overview;
mod peers;
mod requests;
#[path = "../rooms_support/mod.rs"]
mod rooms_support;
mod transfer;

use rooms_support::{Sees, World, decode, prefill};

const ROOM: u64 = 9_000_000_000_000_000_001;

fn world(sees: Sees) -> World {
    let mut w = World::new(sees);
    w.register(&decode(0), &prefill(0));
    w
}
