//! What to do about a pinned room: commands that work, with what they do and whom else they hurt.
//!
//! Pure. The request id is never on the wire between the ranks, so the first action finds it. Words in
//! capitals are to be filled in.

use crate::rooms::model::Role;
use crate::verdict::explain::named;
use crate::verdict::explain_requests::plain_rid;
use crate::verdict::facts::Facts;
use crate::verdict::judge::{Judgement, Who};
use crate::verdict::model::{Action, Class, Party};

/// What to do, the gentlest first.
pub(crate) fn actions(f: &Facts, j: &Judgement) -> Vec<Action> {
    if !j.class.pins() {
        return Vec::new();
    }
    let mut list: Vec<_> = plain_rid(f).is_none().then(|| find_request(f)).into_iter().collect();
    match j.class {
        Class::StatusLost | Class::AwaitingPrefill | Class::PeerNotTold | Class::StagingReplyMissing => list.push(abort(f, Role::Decode)),
        Class::StaleEndpoint => list.extend([abort(f, Role::Decode), check_connects(f)]),
        Class::MetadataIncomplete | Class::MetadataMissing => {
            list.extend([abort(f, Role::Prefill), abort(f, Role::Decode)]);
        }
        Class::PeerLost => {
            list.push(abort(f, j.role));
        }
        _ => list.push(abort(f, Role::Prefill)),
    }
    if matches!(
        j.class,
        Class::TransferWorkerSilent | Class::ReceiverSilent | Class::RanksDisagree | Class::AbortBeforeEntry
    ) {
        list.push(abort_all(f));
    }
    if let Some(party) = restart_target(f, j) {
        list.push(restart(&party));
    }
    if j.class == Class::AwaitingPrefill {
        list.push(look_at_prefill(f));
    }
    list
}

fn find_request(f: &Facts) -> Action {
    Action {
        command: format!("grep -hF '{}' PREFILL_LOG DECODE_LOG ROUTER_LOG", f.room),
        effect:
            "finds the request id (rid): the engines' error lines and the router's log name room and rid \
                 together; the rid is not on the wire between the ranks"
                .to_owned(),
        blast_radius: "none".to_owned(),
        clears: false,
    }
}

fn host(party: &Party) -> String {
    party.endpoint.map_or_else(
        || "HOST".to_owned(),
        |e| match e {
            std::net::SocketAddr::V4(a) => a.ip().to_string(),
            std::net::SocketAddr::V6(a) => format!("[{}]", a.ip()),
        },
    )
}

fn post(f: &Facts, role: Role, body: &str) -> String {
    let [prefill, decode] = f.request.servers;
    let (server, party) = match role {
        Role::Prefill => (prefill, &f.prefill),
        Role::Decode => (decode, &f.decode),
    };
    let at = server.map_or_else(|| format!("{}:HTTP_PORT", host(party)), |s| s.to_string());
    format!("curl -sS -X POST http://{at}/abort_request -H 'Content-Type: application/json' -d '{body}'")
}

fn abort(f: &Facts, role: Role) -> Action {
    let party = if role == Role::Prefill { &f.prefill } else { &f.decode };
    Action {
        command: post(f, role, &format!(r#"{{"rid":"{}"}}"#, plain_rid(f).unwrap_or("FULL_RID"))),
        effect: format!(
            "ends the request at {}, at that engine's own port and not at the router's; it answers 200 and \
             does nothing once the HTTP side has forgotten the rid",
            named(party)
        ),
        blast_radius: "this request only, if the rid is given in full: it matches by prefix".to_owned(),
        clears: true,
    }
}

fn abort_all(f: &Facts) -> Action {
    Action {
        command: post(f, Role::Prefill, r#"{"abort_all":true}"#),
        effect: "ends every request of that engine, also those whose rid the HTTP side has forgotten"
            .to_owned(),
        blast_radius: format!(
            "every running and queued request at {} ({} of this rank unanswered)",
            named(&f.prefill),
            f.others.silent_at_rank.max(1)
        ),
        clears: !matches!(f.phase, crate::rooms::model::Phase::Conclude),
    }
}

fn restart_target(f: &Facts, j: &Judgement) -> Option<Party> {
    match (j.class, j.act_on) {
        (Class::StatusLost, _) => Some(f.prefill.clone()),
        (Class::AwaitingPrefill | Class::PeerNotTold | Class::PeerLost | Class::DuplicateRoom, _)
        | (_, Who::Nobody | Who::Router) => None,
        (_, who) => f.party(who),
    }
}

fn restart(party: &Party) -> Action {
    let command = match (party.task, party.local) {
        (Some(task), Some(true)) => format!("kill -TERM {}", task.tgid),
        _ => format!("kill -TERM PID_OF_RANK   # at {}", host(party)),
    };
    Action {
        command,
        effect: format!("ends {}; its supervisor starts the engine again", named(party)),
        blast_radius: "every request of that engine; its peers notice by heartbeat".to_owned(),
        clears: true,
    }
}

fn check_connects(f: &Facts) -> Action {
    let port = f.prefill.endpoint.map_or_else(|| "PORT".to_owned(), |e| e.port().to_string());
    Action {
        command: format!("ss -tnp state all '( dport = :{port} )'"),
        effect: "shows whether decode still connects to a port that prefill has given up".to_owned(),
        blast_radius: "none".to_owned(),
        clears: false,
    }
}

fn look_at_prefill(f: &Facts) -> Action {
    Action {
        command: format!("roomtrace explain {}", f.room),
        effect: format!("to be run at {}: only that side can tell queueing from a pin", named(&f.prefill)),
        blast_radius: "none".to_owned(),
        clears: false,
    }
}
