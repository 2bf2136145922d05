//! What an operator is told of connections of engines that cannot be read: what they carry, what that hides, what to do.

use crate::rooms::model::{Connection, Unreadable};

/// What it means that connections carry something.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meaning {
    /// As it is told to the rooms.
    pub(super) cause: Unreadable,
    /// What happened, to what, why, and what to do.
    pub(super) sentence: &'static str,
}

/// Of a reason in `roomtrace_connections_unread_total`. `None`: it hides nothing that should be read (something that is not on an
/// engine's own port, a peer that speaks HTTP badly).
pub(super) fn meaning(reason: &str) -> Option<Meaning> {
    let (cause, sentence) = match reason {
        "zmtp1" | "zmtp2" => (
            Unreadable::ZmtpVersion,
            "connections of engines speak an old ZMTP (1.0 or 2.0), which is not read: rooms on them are not seen; \
             SGLang uses 3.x, so look which program is at the other end",
        ),
        "plain" | "curve" | "other_mechanism" => (
            Unreadable::ZmtpMechanism,
            "connections of engines use a security mechanism of ZMTP, which is not read: rooms on them are not seen; \
             SGLang uses NULL, so look which program is at the other end",
        ),
        "tls" => (
            Unreadable::Tls,
            "connections of engines are encrypted (TLS), which is not read: rooms and requests on them are not seen; \
             leave engine ports out of a service mesh, or end TLS in front of the engine",
        ),
        "http2" => (
            Unreadable::Http2,
            "connections of engines speak HTTP/2 (gRPC), which is not read: requests on them are not seen; \
             let the router talk to the engine by HTTP/1, or do without requests",
        ),
        "neither" => (
            Unreadable::Other,
            "connections of engines carry neither the engines' messages (ZMTP) nor requests (HTTP/1) and were let go: \
             nothing is wrong if they are KV data (a TCP transfer backend), a tensor store or another protocol of the engine; \
             if `last` names an engine's HTTP, bootstrap or rank port, what passes there is not seen: \
             look what talks to that port (ss -tnp)",
        ),
        _ => return None,
    };
    Some(Meaning { cause, sentence })
}

/// Whose connection it is, from where to where.
pub(super) fn named(c: &Connection) -> String {
    let who = c
        .task
        .map_or_else(|| "an unknown process".to_owned(), |t| format!("{} ({})", t.comm.to_text(), t.tgid));
    format!("{who}: {} with {}", c.addresses.local, c.addresses.peer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{Control, Limits};

    #[test]
    fn what_is_counted_is_told_but_for_what_hides_nothing() {
        let control = Control::new(Limits::default());
        let untold: Vec<&str> =
            control.unread().map(|(reason, _)| reason).filter(|r| meaning(r).is_none()).collect();
        for hides_nothing in ["other_socket_type", "unrecognised"] {
            assert!(untold.contains(&hides_nothing), "{untold:?}");
        }
        for reason in ["zmtp1", "zmtp2", "plain", "curve", "other_mechanism", "tls", "http2", "neither"] {
            assert!(control.unread().any(|(r, _)| r == reason), "{reason} is counted");
            let words = meaning(reason).map(|m| m.sentence).unwrap_or_default();
            assert!(words.contains("not") && words.contains(';'), "{reason}: {words}");
        }
    }
}
