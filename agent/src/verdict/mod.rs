//! Evidence → class, confidence, debtor, candidates, actions.
//!
//! Pure: no I/O, no clock (time is an argument), no unsafe code.

pub mod known;
pub mod model;

pub use known::known_issues;
