//! Multipart ZMTP messages → typed SGLang messages, by backend and release.
//!
//! Pure: no I/O, no clock, no unsafe code.

pub mod message;
