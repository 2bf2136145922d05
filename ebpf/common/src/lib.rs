//! Records that the kernel programs write and the agent reads: plain `repr(C)` data, no padding left implicit.
#![no_std]
