//! What to do about a pinned room or a finding: commands that work, with what they do and whom else they hurt.
//!
//! Pure. The request id is never on the wire between the ranks: where no HTTP port has shown it, the first action finds
//! it. Words in capitals are to be filled in.

use crate::rooms::model::{Phase, Role, RoomSnapshot};
use crate::sglang::message::Kind;
use crate::verdict::explain::named;
use crate::verdict::facts::Facts;
use crate::verdict::judge::{Judgement, Who};
use crate::verdict::model::{Action, Class, Confidence, Party};

/// Stands for the request id until one is known.
const RID: &str = "FULL_RID";

/// What to do about a room, the gentlest first.
pub(crate) fn actions(f: &Facts, j: &Judgement) -> Vec<Action> {
    if !j.class.pins() {
        return Vec::new();
    }
    let mut list = vec![find_request(f.room)];
    let elsewhere = f.elsewhere.as_ref().filter(|_| j.class == Class::RanksDisagree).map(|e| &e.party);
    if let Some(silent) = elsewhere {
        list.push(look_at_other_ranks(f.room));
        // Of the engine: none of its ranks here is at fault.
        let engine = Party { rank: None, endpoint: None, ..silent.clone() };
        list.extend([abort(&engine), abort(&f.decode), abort_all(&engine, 0, f.phase)]);
    } else {
        list.extend(ends_request(f, j));
    }
    if elsewhere.is_none() && j.owes != Who::Decode && stops_all(j.class) && !f.prefill.ended {
        list.push(abort_all(&f.prefill, f.others.silent_at_rank, f.phase));
    }
    if let Some(party) = restart_target(f, j).filter(|p| elsewhere.is_none() || p.endpoint.is_some())
        && !party.ended
    {
        if j.class == Class::EngineStalled {
            list.push(look_at_threads(&party));
        }
        list.push(restart(&party));
    }
    if j.class == Class::AwaitingPrefill {
        list.push(look_at_prefill(f));
    }
    list
}

/// What to do about the common cause of `rooms` rooms: nothing that ends only one of them. `owes` has the next move, `act`
/// is whom to act on. Of what is only possible the rooms are to be looked at before anything is ended.
pub(crate) fn of_cause(
    class: Class,
    confidence: Confidence,
    owes: &Party,
    act: &Party,
    rooms: u32,
) -> Vec<Action> {
    let mut list = Vec::new();
    if confidence == Confidence::Possible {
        list.push(look_at_pinned());
    }
    if stops_all(class) && !act.ended {
        let phase = if class == Class::RanksDisagree { Phase::Conclude } else { Phase::Transfer };
        list.push(abort_all(act, rooms, phase));
    }
    match class {
        // Prefill's socket to decode does not connect anew.
        Class::StatusLost => {
            list.push(check_connects(act));
            list.extend(restart_living(owes));
        }
        // Nothing else is wrong there.
        Class::PeerLost | Class::AwaitingPrefill | Class::PeerNotTold | Class::DuplicateRoom => {}
        Class::EngineStalled if !act.ended => list.extend([look_at_threads(act), restart(act)]),
        _ => list.extend(restart_living(act)),
    }
    if list.is_empty() {
        // One engine alone has the requests, or whoever was to be acted on has ended.
        list.push(look_at_pinned());
    }
    list
}

fn look_at_pinned() -> Action {
    look(
        "roomtrace rooms --pinned".to_owned(),
        "lists the rooms; each request is to be ended by itself at the side that still has it",
    )
}

/// What to do about a finding that has no pinned room. What searches an operator's own logs comes last: it clears nothing,
/// and only the operator knows where they are.
pub(crate) fn of_finding(class: Class, engine: &Party) -> Vec<Action> {
    let mut list = of_living(class, engine);
    // Its process was seen to end: its number may be another's by now.
    list.retain(|a| !engine.ended || !a.clears);
    list
}

fn of_living(class: Class, engine: &Party) -> Vec<Action> {
    let restarts = restart(engine);
    match class {
        Class::LocalGhost => vec![
            look_at_loads(engine),
            Action { clears: false, ..abort_all(engine, 0, Phase::Transfer) },
            restarts,
        ],
        Class::GaugeUnexplained => vec![look_at_loads(engine), restarts],
        Class::AbortUnanswered => vec![
            look_at_setting(engine),
            restarts,
            look(
                "grep -F 'Deferred KV release for room' DECODE_LOG".to_owned(),
                "shows at decode how many releases of KV pages ran into their 30 s",
            ),
        ],
        Class::SessionBlacklisted => vec![
            Action {
                command: "kill -TERM PID_OF_DECODE_RANK   # of that session".to_owned(),
                effect: "its supervisor starts that decode engine again, which then registers anew: that takes it off the \
                         list"
                    .to_owned(),
                blast_radius: "every request of that decode engine; its weights are loaded again".to_owned(),
                clears: true,
            },
            restarts,
            look(
                "grep -E 'Session .+ failed' PREFILL_LOG".to_owned(),
                "shows the write whose failure put the session on prefill's list",
            ),
        ],
        Class::ThreadDied | Class::EngineStalled => vec![look_at_threads(engine), restarts],
        Class::EnginePaused => vec![Action {
            command: post(engine, "continue_generation", "{}"),
            effect: format!("lets {} go on; its rooms move again{KEY}", named(engine)),
            blast_radius: "whoever paused it may not be done (weights half updated): ask first".to_owned(),
            clears: true,
        }],
        Class::NothingReadable => vec![look(
            "roomtrace doctor".to_owned(),
            "names what of this host can be observed; docs/limits.md names what cannot be read (TLS, gRPC, ZMTP \
             encryption, io_uring) and what to switch instead",
        )],
        Class::RankNotRegistered => vec![
            look(
                format!("curl -sS 'http://{}:BOOTSTRAP_PORT/health'", host(engine)),
                "shows whether the bootstrap server answers",
            ),
            restarts,
        ],
        Class::QueryUnanswered => vec![
            look(
                format!("curl -sS 'http://{}:BOOTSTRAP_PORT/health'", host(engine)),
                "shows whether the bootstrap server answers",
            ),
            look(
                "grep -F 'query_dp_ranks' DECODE_LOG".to_owned(),
                "shows which rooms decode still asks for; end those requests at decode's own port",
            ),
        ],
        _ => Vec::new(),
    }
}

/// Puts the request id that was seen into the commands of a room's verdict.
pub(crate) fn name_request(room: &mut RoomSnapshot) {
    let rid = room.request.as_ref().and_then(|r| r.rid.as_deref());
    if let Some(verdict) = room.verdict.as_deref_mut() {
        name(&mut verdict.actions, rid);
    }
}

/// Puts a request id into commands, and leaves out how to find it. One that cannot be written down safely stays out.
pub(crate) fn name(actions: &mut Vec<Action>, rid: Option<&str>) {
    let Some(rid) = rid.filter(|r| !r.is_empty() && r.bytes().all(|b| b.is_ascii_graphic())) else { return };
    // JSON within single quotes of a shell.
    let rid = rid.replace('\\', "\\\\").replace('"', "\\\"").replace('\'', r"'\''");
    actions.retain(|a| !a.command.starts_with(FIND));
    for action in actions {
        action.command = action.command.replace(RID, &rid);
    }
}

/// How the command begins that looks for a request id.
const FIND: &str = "grep -hF";

fn find_request(room: u64) -> Action {
    Action {
        command: format!("{FIND} '{room}' PREFILL_LOG DECODE_LOG ROUTER_LOG"),
        effect:
            "finds the request id (rid): the engines' error lines and the router's log name room and rid \
                 together; the rid is not on the wire between the ranks"
                .to_owned(),
        blast_radius: "none".to_owned(),
        clears: false,
    }
}

/// The requests whose end helps, at the engines that have them.
fn ends_request(f: &Facts, j: &Judgement) -> Vec<Action> {
    let (prefill, decode) = (|| abort(&f.prefill), || abort(&f.decode));
    match j.class {
        Class::StatusLost | Class::AwaitingPrefill | Class::PeerNotTold => vec![decode()],
        Class::StaleEndpoint if j.expected == Some(Kind::Abort) => {
            vec![prefill(), check_connects(&f.prefill)]
        }
        Class::StaleEndpoint => vec![decode(), check_connects(&f.prefill)],
        Class::MetadataIncomplete | Class::MetadataMissing => vec![prefill(), decode()],
        Class::StagingReplyMissing => vec![decode(), Action { clears: false, ..prefill() }],
        Class::PeerLost => vec![abort(if j.role == Role::Prefill { &f.prefill } else { &f.decode })],
        Class::ConcludedButHeld if j.act_on == Who::Decode => vec![decode()],
        // Prefill has cleared the room and counts it all the same (M17): nothing says that it can still be ended.
        Class::ConcludedButHeld => vec![Action { clears: false, ..prefill() }],
        // Its loop does not run: whatever is asked of it waits as well.
        Class::EngineStalled => Vec::new(),
        Class::ReceiverSilent if j.owes == Who::Decode => {
            let mut only = decode();
            only.effect
                .push_str("; every later room of that rank hangs the same way until it is started again");
            vec![only]
        }
        _ if j.owes == Who::Decode => vec![decode()],
        Class::ReceiverSilent => {
            let mut only = prefill();
            only.effect
                .push_str("; every later room of that rank hangs the same way until it is started again");
            vec![only, decode()]
        }
        // Decode has given it up itself.
        Class::AbortBeforeEntry | Class::AbortIgnored => vec![prefill()],
        _ => vec![prefill(), decode()],
    }
}

/// Where ending one request is mostly not enough.
const fn stops_all(class: Class) -> bool {
    matches!(
        class,
        Class::TransferWorkerSilent | Class::ReceiverSilent | Class::RanksDisagree | Class::AbortBeforeEntry
    )
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

fn http(party: &Party) -> String {
    party.http.map_or_else(|| format!("{}:HTTP_PORT", host(party)), |at| at.to_string())
}

fn post(party: &Party, path: &str, body: &str) -> String {
    let at = http(party);
    format!("curl -sS -X POST http://{at}/{path} -H 'Content-Type: application/json' -d '{body}'")
}

/// What `/abort_request` does (`abort_request` of `managers/tokenizer_manager.py`, `http_server.py` and
/// `managers/scheduler.py`, 0.5.23).
fn abort(party: &Party) -> Action {
    // Prefill fails its own room and says nothing of it (M11); decode says it with ABORT, from 0.5.13 on.
    let peer = match party.role {
        Some(Role::Prefill) => {
            "; decode is not told, and waits until its own timeout or until its request is ended as well"
        }
        Some(Role::Decode) => "; from 0.5.13 on it tells prefill so (ABORT)",
        None => "",
    };
    Action {
        command: post(party, "abort_request", &format!(r#"{{"rid":"{RID}"}}"#)),
        effect: format!(
            "ends the request at {}, at that engine's own port and not at the router's; it answers 200 and \
             does nothing once the HTTP side has forgotten the rid, or has tried to end it before{peer}{KEY}",
            named(party)
        ),
        blast_radius: "this request only, if the rid is given in full: the scheduler matches by prefix, so also one whose rid \
                       begins with it"
            .to_owned(),
        clears: true,
    }
}

/// An engine that was started with `--api-key` or `--admin-api-key` answers 401 without it.
const KEY: &str = " (an engine with an API key wants -H 'Authorization: Bearer KEY')";

/// `rooms`: those of the rank that are unanswered, as far as is known; some may have ended unseen.
fn abort_all(party: &Party, rooms: u32, phase: Phase) -> Action {
    let rooms = if rooms == 0 { String::new() } else { format!(" (up to {rooms} of this rank unanswered)") };
    Action {
        command: post(party, "abort_request", r#"{"abort_all":true}"#),
        effect: format!(
            "ends every request of that engine, also those whose rid the HTTP side has forgotten{KEY}"
        ),
        blast_radius: format!("every running and queued request at {}{rooms}", named(party)),
        clears: !matches!(phase, Phase::Conclude),
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

/// The process on this host, or what stands for it.
fn pid(party: &Party) -> Option<u32> {
    party.task.filter(|_| party.local == Some(true)).map(|t| t.tgid)
}

/// SIGTERM ends a rank at once, and its server with it within seconds; a server waits after it until every request is over,
/// a pinned one too, and SIGQUIT ends the engine at once (`sigterm_watchdog`, `running_phase_sigquit_handler`,
/// `managers/tokenizer_manager.py` of 0.5.23).
fn restart(party: &Party) -> Action {
    let whole = party.endpoint.is_none();
    let command = match pid(party) {
        Some(pid) if whole => format!("kill -QUIT {pid}"),
        Some(pid) => format!("kill -TERM {pid}"),
        None => format!("kill -TERM PID_OF_RANK   # at {}", host(party)),
    };
    let waits = if whole && pid(party).is_some() {
        "; SIGTERM would wait for its pinned requests, for ever"
    } else {
        ""
    };
    Action {
        command,
        effect: format!("ends {}{waits}; its supervisor starts the engine again", named(party)),
        blast_radius:
            "every request of that engine, and its service until the weights are loaded again; its peers \
                       notice by heartbeat, after about 20 s"
                .to_owned(),
        clears: true,
    }
}

/// The same of one whose process was not seen to end: its number may be another's by then.
fn restart_living(party: &Party) -> Option<Action> {
    (!party.ended).then(|| restart(party))
}

fn look(command: String, effect: &str) -> Action {
    Action { command, effect: effect.to_owned(), blast_radius: "none".to_owned(), clears: false }
}

fn check_connects(party: &Party) -> Action {
    let port = party.endpoint.map_or_else(|| "PORT".to_owned(), |e| e.port().to_string());
    look(
        format!("ss -tnp state all '( dport = :{port} )'"),
        "shows, on the host that connects, whether it still tries a port that is given up or cannot be reached",
    )
}

fn look_at_threads(party: &Party) -> Action {
    let pid = pid(party).map_or_else(|| "PID_OF_RANK".to_owned(), |pid| pid.to_string());
    look(
        format!("grep -H . /proc/{pid}/task/*/comm /proc/{pid}/task/*/wchan"),
        "shows which threads the rank still has and what in the kernel each waits for",
    )
}

fn look_at_loads(party: &Party) -> Action {
    look(
        format!("curl -sS http://{}/v1/loads", http(party)),
        "shows the engine's own queue counts and whether its progress counters still move",
    )
}

fn look_at_setting(party: &Party) -> Action {
    let pid = pid(party).map_or_else(|| "PID_OF_RANK".to_owned(), |pid| pid.to_string());
    look(
        format!(r"tr '\0' '\n' < /proc/{pid}/environ | grep SGLANG_DISAGGREGATION"),
        "shows whether prefill is set to acknowledge ABORTs; both sides must be of releases that agree on it",
    )
}

fn look_at_other_ranks(room: u64) -> Action {
    look(
        format!("roomtrace explain {room}"),
        "to be run at the hosts of prefill's other ranks: shows which of them has not concluded, and why",
    )
}

fn look_at_prefill(f: &Facts) -> Action {
    Action {
        command: format!("roomtrace explain {}", f.room),
        effect: format!("to be run at {}: only that side can tell queueing from a pin", named(&f.prefill)),
        blast_radius: "none".to_owned(),
        clears: false,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]
    use super::*;
    use crate::export::testing::pinned;
    use crate::rooms::model::RequestView;

    fn party(local: bool) -> Party {
        Party {
            role: Some(Role::Prefill),
            rank: Some(3),
            endpoint: Some("10.0.0.1:41003".parse().unwrap()),
            task: Some(crate::export::testing::task(4711)),
            local: Some(local),
            ..Party::default()
        }
    }

    fn all_of_findings() -> Vec<(Class, Action)> {
        let each = |class: Class, local| {
            let party = party(local);
            let mut list = of_finding(class, &party);
            if class.pins() {
                list.extend(of_cause(class, Confidence::Likely, &party, &party, 12));
            }
            list.into_iter().map(move |a| (class, a))
        };
        Class::ALL.into_iter().flat_map(|c| each(c, true).chain(each(c, false))).collect()
    }

    #[test]
    fn what_is_only_possible_is_looked_at_before_anything_is_ended() {
        for class in Class::ALL.into_iter().filter(|c| c.pins()) {
            let of = |confidence| of_cause(class, confidence, &party(true), &party(true), 12);
            let (possible, likely) = (of(Confidence::Possible), of(Confidence::Likely));
            let looks = |list: &[Action]| list.iter().filter(|a| **a == look_at_pinned()).count();
            assert_eq!(possible.first(), Some(&look_at_pinned()), "{}", class.label());
            assert_eq!(looks(&possible), 1, "{}", class.label());
            // Who is sure is told what clears it, where anything does.
            assert!(likely.len() == 1 || looks(&likely) == 0, "{}: {likely:?}", class.label());
        }
    }

    #[test]
    fn every_class_that_can_be_found_says_what_to_do() {
        for class in Class::ALL.into_iter().filter(|c| c.finds()) {
            assert!(all_of_findings().iter().any(|(c, _)| *c == class), "{}", class.label());
        }
        for class in Class::ALL.into_iter().filter(|c| !c.finds()) {
            assert!(all_of_findings().iter().all(|(c, _)| *c != class), "{}", class.label());
        }
    }

    #[test]
    fn what_searches_logs_comes_after_what_helps() {
        for class in Class::ALL {
            let list = of_finding(class, &party(true));
            let first = list.iter().position(|a| a.command.contains("_LOG")).unwrap_or(list.len());
            assert!(first > 0 || list.is_empty(), "{}: {:?}", class.label(), list[0]);
            assert!(list[first..].iter().all(|a| !a.clears), "{}", class.label());
        }
    }

    #[test]
    fn commands_are_whole_and_say_what_they_cost() {
        for (class, a) in all_of_findings() {
            let quotes = a.command.matches('\'').count();
            assert!(quotes % 2 == 0, "{}: {}", class.label(), a.command);
            assert!(!a.effect.is_empty() && !a.blast_radius.is_empty(), "{}", a.command);
            // What changes something costs somebody something.
            let changes = ["kill", "-X POST"].iter().any(|c| a.command.contains(c));
            assert_eq!(changes, a.blast_radius != "none", "{}", a.command);
            assert!(changes || !a.clears, "looking clears nothing: {}", a.command);
        }
    }

    #[test]
    fn a_process_is_named_only_on_its_own_host() {
        assert_eq!(restart(&party(true)).command, "kill -TERM 4711");
        assert_eq!(restart(&party(false)).command, "kill -TERM PID_OF_RANK   # at 10.0.0.1");
        assert!(look_at_threads(&party(false)).command.contains("PID_OF_RANK"));
    }

    #[test]
    fn a_server_is_not_asked_to_wait_for_what_is_pinned() {
        // A whole engine is known by the process that serves its HTTP.
        let engine = Party { endpoint: None, ..party(true) };
        let action = restart(&engine);
        assert_eq!(action.command, "kill -QUIT 4711");
        assert!(action.effect.contains("SIGTERM would wait"), "{}", action.effect);
    }

    #[test]
    fn ending_a_request_says_what_the_other_engine_hears_of_it() {
        let of = |role| abort(&Party { role: Some(role), ..party(true) }).effect;
        assert!(of(Role::Prefill).contains("decode is not told"));
        assert!(of(Role::Decode).contains("tells prefill"));
        assert!(of(Role::Decode).contains("has tried to end it before"));
    }

    fn named_by(rid: &str) -> Vec<String> {
        let mut room = pinned(7);
        room.request = Some(RequestView { rid: Some(rid.into()), ..RequestView::default() });
        room.verdict.as_mut().unwrap().actions = vec![find_request(7), abort(&party(true))];
        name_request(&mut room);
        room.verdict.unwrap().actions.into_iter().map(|a| a.command).collect()
    }

    #[test]
    fn a_known_request_is_named_and_not_searched_for() {
        let commands = named_by("9f3c-77");
        assert_eq!(commands.len(), 1);
        assert!(commands[0].ends_with(r#"-d '{"rid":"9f3c-77"}'"#), "{}", commands[0]);
        assert!(commands[0].contains("http://10.0.0.1:HTTP_PORT/abort_request"), "{}", commands[0]);
    }

    #[test]
    fn a_request_id_of_a_client_breaks_out_of_no_quote() {
        let commands = named_by(r#"a'; reboot "b\"#);
        assert_eq!(commands.len(), 2, "with a blank in it: not taken");
        let commands = named_by(r#"a';reboot;"b\"#);
        assert!(commands[0].ends_with(r#"-d '{"rid":"a'\'';reboot;\"b\\"}'"#), "{}", commands[0]);
        for odd in ["", "a\nb", "ä", "\u{202e}x"] {
            assert_eq!(named_by(odd).len(), 2, "{odd:?}");
        }
    }
}
