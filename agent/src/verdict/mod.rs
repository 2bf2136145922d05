//! Evidence → class, confidence, debtor, candidates, actions.
//!
//! Pure: no I/O, no clock (time is an argument), no unsafe code. [`facts`](self) are collected by the rooms,
//! judged by rules (`judge`), and put into words only when someone reads them (`explain`).

pub(crate) mod actions;
mod candidates;
pub(crate) mod explain;
mod explain_network;
mod explain_requests;
pub(crate) mod explain_threads;
pub(crate) mod facts;
pub(crate) mod judge;
mod judge_gpus;
mod judge_moving;
mod judge_requests;
mod judge_spans;
pub(crate) mod judge_threads;
pub mod known;
pub mod model;

pub use known::known_issues;
