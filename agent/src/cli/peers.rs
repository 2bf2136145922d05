//! What an operator is told of the ranks that hand rooms to each other. Pure: text from the room table's own counts.

use serde_json::{Value, json};

use crate::rooms::{Peer, RoomTable};
use crate::sglang::message::Backend;

/// Pairs that are listed.
const LISTED: usize = 100;

/// Their part of `/status`: the pairs that handed rooms over last, and how many pairs there are.
pub(super) fn status(table: &RoomTable) -> Value {
    let (peers, total) = table.latest_peers(LISTED);
    let listed: Vec<Value> = peers.iter().map(|p| pair(p, table)).collect();
    json!({ "total": total, "listed": listed })
}

fn pair(p: &Peer, table: &RoomTable) -> Value {
    let ago = p.last_concluded.map(|at| {
        #[allow(clippy::cast_precision_loss, reason = "an age to read")]
        let millis = (table.now().since(at) / 1_000_000) as f64;
        millis / 1000.0
    });
    json!({
        "prefill": p.prefill.to_string(), "decode": p.decode.to_string(), "session": p.session,
        "decode_rank": p.decode_rank.map(|(rank, _)| rank), "backend": p.backend.map(Backend::label),
        "concluded": concluded(p), "last_concluded_s": ago,
    })
}

/// Rooms that prefill said were over. NIXL says so since 0.5.23 only: none of it is not measured, and not 0.
fn concluded(p: &Peer) -> Option<u64> {
    (p.concluded > 0 || p.backend.is_some_and(|b| b != Backend::Nixl)).then_some(p.concluded)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::indexing_slicing, clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn rooms_of_a_back_end_that_does_not_tell_their_end_are_not_counted_as_none() {
        let peer = |backend, concluded| Peer {
            prefill: "10.0.0.1:4000".parse().unwrap(),
            decode: "10.0.0.2:4001".parse().unwrap(),
            session: "s".to_owned(),
            decode_rank: Some((3, 8)),
            backend,
            releases: None,
            concluded,
            last_concluded: None,
        };
        let table = RoomTable::new(crate::rooms::Config::default());
        let counted = |backend, n| pair(&peer(backend, n), &table)["concluded"].clone();
        assert_eq!(counted(Some(Backend::Nixl), 0), Value::Null);
        assert_eq!(counted(None, 0), Value::Null);
        assert_eq!(
            (counted(Some(Backend::Nixl), 7), counted(Some(Backend::Mooncake), 0)),
            (7.into(), 0.into())
        );
        let all = pair(&peer(Some(Backend::Mooncake), 1), &table);
        assert_eq!((&all["decode_rank"], &all["last_concluded_s"]), (&3.into(), &Value::Null));
        assert_eq!(status(&table), json!({ "total": 0, "listed": [] }));
    }
}
