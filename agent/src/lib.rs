//! Roomtrace: which room of a disaggregated LLM serving pair is pinned, who owes the next move, and why.
//!
//! Data flows one way through closed enums; see `docs/architecture.md`:
//!
//! ```text
//! kernel | replay ─▶ event::SocketEvent ─▶ stream ─▶ zmtp ─▶ sglang ─▶ rooms ─▶ verdict ─▶ export
//! ```
//!
//! `stream`, `zmtp`, `http`, `sglang`, `spans`, `rooms` and `verdict` are pure: no I/O, no clock (time is an argument), no
//! unsafe code. `kernel` is the only module with unsafe code, but for one file that calls the GPU driver (`gpu/driver.rs`).
#![deny(unsafe_code)]

mod accept;
pub mod batch;
pub mod cli;
pub mod control;
pub mod duration_text;
pub mod engine;
pub mod event;
pub mod export;
pub mod gpu;
pub mod http;
pub mod kernel;
pub mod network;
pub mod pipeline;
mod prose;
pub mod replay;
pub mod room_text;
pub mod rooms;
pub mod sglang;
pub mod spans;
pub mod state;
pub mod stream;
pub mod verdict;
pub mod zmtp;
