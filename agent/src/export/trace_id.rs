//! Trace and span ids that two agents agree on (traces) or cannot confuse (spans) without talking.
//!
//! Pure.

use opentelemetry::{SpanId, TraceId};
use sha2::{Digest as _, Sha256};

use crate::rooms::model::Role;

/// Trace of a room: SHA-256 of a fixed label, the salt and the room number, first 16 bytes, never zero. The
/// incarnation is left out on purpose: agents that start at different times count it differently.
pub fn trace_id(room: u64, salt: &str) -> TraceId {
    let hash = Sha256::new()
        .chain_update(b"roomtrace room\0")
        .chain_update(salt.as_bytes())
        .chain_update(b"\0")
        .chain_update(room.to_be_bytes())
        .finalize();
    let id = first::<16>(&hash);
    TraceId::from_bytes(if id == [0; 16] { [1; 16] } else { id })
}

/// Names one span of a room's trace. The host keeps the agents of both sides apart, the role the two views
/// of one host.
#[derive(Clone, Copy, Debug)]
pub struct SpanName<'a> {
    /// Trace it belongs to.
    pub trace: TraceId,
    /// Host that reports it.
    pub host_id: &'a str,
    /// View it belongs to.
    pub role: Role,
    /// Use of the room number, as this host counts.
    pub incarnation: u32,
    /// Which of the view's spans: `root`, a phase, an event.
    pub what: &'a str,
    /// Which of several: a rank, a time.
    pub which: u64,
}

impl SpanName<'_> {
    /// First 8 bytes of SHA-256 over all of it, never zero.
    pub fn id(&self) -> SpanId {
        let hash = Sha256::new()
            .chain_update(b"roomtrace span\0")
            .chain_update(self.trace.to_bytes())
            .chain_update(self.host_id.as_bytes())
            .chain_update(b"\0")
            .chain_update(self.role.label().as_bytes())
            .chain_update(b"\0")
            .chain_update(self.what.as_bytes())
            .chain_update(b"\0")
            .chain_update(self.incarnation.to_be_bytes())
            .chain_update(self.which.to_be_bytes())
            .finalize();
        let id = first::<8>(&hash);
        SpanId::from_bytes(if id == [0; 8] { [1; 8] } else { id })
    }
}

fn first<const N: usize>(hash: &[u8]) -> [u8; N] {
    hash.first_chunk::<N>().copied().unwrap_or([0; N])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(host_id: &str, role: Role, incarnation: u32) -> SpanId {
        let trace = trace_id(7, "");
        SpanName { trace, host_id, role, incarnation, what: "root", which: 0 }.id()
    }

    /// The values are written down because another release must agree with this one: half a fleet is always
    /// being upgraded.
    #[test]
    fn ids_do_not_change_between_releases() {
        assert_eq!(trace_id(7, "").to_string(), "027428c85c4d4e22148fd448f73bf5c8");
        assert_eq!(trace_id(u64::MAX, "salt").to_string(), "fdb3bd017265ecf1846823a2566bc87c");
        assert_eq!(root("a", Role::Prefill, 0).to_string(), "50480beaf4764d3c");
    }

    #[test]
    fn a_trace_depends_on_room_and_salt_only() {
        assert_eq!(trace_id(7, "s"), trace_id(7, "s"));
        assert_ne!(trace_id(7, "s"), trace_id(8, "s"));
        assert_ne!(trace_id(7, "s"), trace_id(7, "t"));
    }

    #[test]
    fn roots_of_two_hosts_roles_and_incarnations_differ() {
        let ids = [
            root("a", Role::Prefill, 0),
            root("b", Role::Prefill, 0),
            root("a", Role::Decode, 0),
            root("a", Role::Prefill, 1),
        ];
        for (i, a) in ids.iter().enumerate() {
            assert!(ids.iter().skip(i + 1).all(|b| a != b));
        }
    }
}
