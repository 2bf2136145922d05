//! What bootstrap servers tell.

use roomtrace::http::event::{RankRegistration, Topology};
use roomtrace::rooms::model::{BootstrapStep, Outcome};

use super::ROOM;
use super::rooms_support::*;
use super::web::*;

#[test]
fn the_policy_that_a_rank_registers_makes_an_early_abort_harmless() {
    for by_topology in [false, true] {
        let mut w = Web::new(Sees::Prefill);
        let c = w.connection("10.0.0.1:8998".parse().unwrap(), true, None);
        if by_topology {
            let t = Topology { prefill_complete: Some(true), ..Topology::default() };
            w.boot(c, true, 0, BootstrapStep::Topology(&t));
        } else {
            let rank = RankRegistration {
                ip: Some(prefill(0).endpoint.ip()),
                port: Some(prefill(0).endpoint.port()),
                prefill_complete: Some(true),
                ..RankRegistration::default()
            };
            w.boot(c, true, 0, BootstrapStep::Rank(&rank));
        }
        w.abort(ROOM, &decode(0), &prefill(0), None);
        w.to(60_000);
        assert_eq!(w.outcomes(ROOM), [Outcome::Failed], "a tombstone fails the sender");
        assert!(w.pin(ROOM).is_none());
    }
}
