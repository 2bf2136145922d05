//! How connections with open requests end: FIN, reset, eviction, a restart of the agent.

use std::collections::BTreeSet;

use roomtrace::control::{ConnectionState, Control, Limits};
use roomtrace::event::{Comm, Direction, Sequence, StateChange, Task, TcpState, Trouble, What};
use roomtrace::rooms::Survivors;

use super::rig::{Rig, Told};
use super::web::{LAST, STREAM_HEAD, answer, chunk, client, finished, generate, post, server};

impl Rig {
    /// The peer's FIN comes while `unread` bytes before it wait to be read.
    fn peer_fin(&mut self, old: TcpState, new: TcpState, unread: u32) {
        let rcv_nxt = self.received.wrapping_add(unread).wrapping_add(1);
        let sequence = Sequence { rcv_nxt, ..self.sequence() };
        self.event(What::State(StateChange { old, new, error: 0, sequence }));
    }
}

#[test]
fn a_client_hangs_up_before_and_in_the_answer() {
    let mut rig = server();
    rig.ask(&generate(7));
    rig.web();
    rig.peer_fin(TcpState::Established, TcpState::CloseWait, 0);
    assert_eq!(rig.web(), ["s0 hung up Client"]);
    assert_eq!(rig.connections(ConnectionState::Http), 1, "nothing is lost");
    rig.state(TcpState::CloseWait, TcpState::LastAck);
    rig.close(TcpState::LastAck, 0);
    assert_eq!(rig.web(), [""; 0]);

    let mut rig = server();
    rig.ask(&generate(7));
    rig.send(STREAM_HEAD);
    rig.web();
    rig.peer_fin(TcpState::Established, TcpState::CloseWait, 0);
    assert_eq!(rig.web(), ["s0 hung up Client in answer"]);
}

#[test]
fn a_fin_that_overtakes_the_request_waits_until_it_is_read() {
    let mut rig = server();
    let whole = generate(7);
    rig.ask(&whole[..50]);
    rig.peer_fin(TcpState::Established, TcpState::CloseWait, u32::try_from(whole.len() - 50).unwrap());
    assert_eq!(rig.web(), [""; 0]);
    rig.ask(&whole[50..]);
    assert_eq!(rig.web(), ["s0 asked 7 Whole [r7]", "s0 hung up Client"]);
    // It is never read: the end of the connection says it.
    let mut rig = server();
    rig.ask(&generate(7));
    rig.peer_fin(TcpState::Established, TcpState::CloseWait, 500);
    rig.web();
    rig.close(TcpState::CloseWait, 0);
    assert_eq!(rig.web(), ["s0 hung up Client"]);
}

#[test]
fn a_muted_answer_that_may_be_over_is_no_hang_up() {
    let mut rig = server();
    rig.ask(&generate(7));
    rig.send(STREAM_HEAD);
    rig.send_muted(1_000);
    rig.web();
    rig.una = rig.sent;
    rig.peer_fin(TcpState::Established, TcpState::CloseWait, 0);
    assert_eq!(rig.web(), ["s0 first byte", "s0 answered 200 Unseen Unknown"]);
    // Of one whose end is known by its length nothing is in doubt.
    let mut rig = server();
    rig.ask(&generate(7));
    rig.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n");
    rig.send_muted(999);
    rig.web();
    rig.una = rig.sent;
    rig.peer_fin(TcpState::Established, TcpState::CloseWait, 0);
    assert_eq!(rig.web(), ["s0 first byte", "s0 hung up Client in answer"]);
}

#[test]
fn an_engine_hangs_up() {
    let mut rig = server();
    rig.ask(&generate(7));
    rig.web();
    rig.state(TcpState::Established, TcpState::FinWait1);
    assert_eq!(rig.web(), ["s0 hung up Server"]);
    // An answer that ends with the connection.
    let mut rig = server();
    rig.ask(&generate(7));
    rig.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{\"meta_info\":{\"finish_reason\":{\"type\":\"stop\"}}}");
    rig.web();
    rig.state(TcpState::Established, TcpState::FinWait1);
    assert_eq!(rig.web(), ["s0 answered 200 Close Finished"]);
}

#[test]
fn resets_by_either_side_and_by_nobody() {
    for (old, error, by) in [
        (TcpState::Established, 104, "Client"),
        (TcpState::Established, 0, "Server"),
        (TcpState::Established, 110, "Unknown"),
    ] {
        let mut rig = server();
        rig.ask(&generate(7));
        rig.web();
        rig.close(old, error);
        assert_eq!(rig.web(), [format!("s0 hung up {by}")]);
    }
    let mut rig = client();
    rig.send(&generate(7));
    rig.web();
    rig.close(TcpState::Established, 104);
    assert_eq!(rig.web(), ["c0 hung up Server"]);
}

#[test]
fn a_request_that_never_became_whole_is_not_told() {
    let mut rig = server();
    let whole = generate(7);
    rig.ask(&whole[..whole.len() - 1]);
    rig.close(TcpState::Established, 104);
    assert_eq!(rig.web(), [""; 0]);
}

#[test]
fn calls_held_back_come_before_the_end() {
    let mut rig = server();
    let whole = generate(7);
    rig.ask(&whole[..60]);
    // Ten bytes that no call brought, and a call behind them.
    rig.received = rig.received.wrapping_add(10);
    rig.ask(&whole[70..]);
    assert_eq!(rig.web(), [""; 0]);
    rig.peer_fin(TcpState::Established, TcpState::CloseWait, 0);
    let told = rig.web();
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[0].starts_with("s0 asked") && told[1] == "s0 hung up Client", "{told:?}");
}

#[test]
fn an_evicted_connection_leaves_its_requests_out_of_sight() {
    let mut rig = Rig::with(Limits { sockets: 1, ..Limits::default() });
    rig.state(TcpState::SynRecv, TcpState::Established);
    rig.ask(&generate(7));
    rig.web();
    rig.now = rig.now.plus(700_000_000_000);
    rig.id.0 += 1;
    rig.state(TcpState::SynRecv, TcpState::Established);
    assert_eq!(rig.web(), ["s0 out of sight"]);
    assert_eq!(rig.control.counters().evicted, 1);
}

#[test]
fn after_a_restart_open_requests_are_out_of_sight_and_new_ones_are_read() {
    let mut before = server();
    before.ask(&generate(7));
    before.send(&finished());
    before.ask(&generate(8));
    before.send(STREAM_HEAD);
    let saved = before.control.save();
    assert_eq!(saved.sockets.len(), 1);
    let text = serde_json::to_string(&saved).unwrap();
    let saved: roomtrace::control::SavedControl = serde_json::from_str(&text).unwrap();
    for (found, gone, requests) in [(true, false, true), (false, true, true), (true, false, false)] {
        let limits = Limits { requests, ..Limits::default() };
        let survivors = Survivors { alive: BTreeSet::new(), ..Survivors::default() };
        let control = Control::restore(limits, saved.clone(), &survivors, before.now);
        let mut rig = Rig { control, told: Vec::new(), ..server() };
        (rig.sent, rig.received, rig.now) = (before.sent, before.received, before.now.plus(1_000_000));
        if found {
            rig.sent = rig.sent.wrapping_add(5_000);
            rig.found(None);
        }
        let (now, told) = (rig.now, &mut rig.told);
        let returned = rig.control.returned(now, &mut |input| told.push(super::rig::told(&input)));
        assert_eq!((returned.found, returned.gone), (u64::from(found), u64::from(gone)));
        assert_eq!(rig.web(), ["s1 out of sight"]);
        rig.ask(&generate(9));
        let told = rig.web();
        match (found, requests) {
            (_, false) => assert_eq!(told, [""; 0]),
            // No number is used twice.
            (true, _) => assert_eq!(told, ["s2 asked 9 Whole [r9]"]),
            (false, _) => assert_eq!(told, ["s0 asked 9 Whole [r9]"]),
        }
    }
    // What has no request under way is joined anew without being written down.
    before.send(LAST);
    assert_eq!(before.control.save().sockets.len(), 0);
}

/// The process that serves.
fn task(tgid: u32) -> Task {
    Task { tgid, tid: tgid, comm: Comm::default(), cgroup: 0 }
}

/// A connection whose second request waits, with `begun` of its answer, and another agent that takes it on.
fn taken_on(begun: &[u8], between: impl Fn(&mut Rig)) -> Rig {
    let mut rig = Rig { task: Some(task(90)), ..server() };
    rig.ask(&generate(7));
    rig.send(&finished());
    rig.ask(&generate(8));
    if !begun.is_empty() {
        rig.send(begun);
    }
    let saved = serde_json::to_string(&rig.control.save()).unwrap();
    let saved = serde_json::from_str(&saved).unwrap();
    let survivors = Survivors { alive: [90].into(), ..Survivors::default() };
    rig.now = rig.now.plus(1_000_000);
    rig.control = Control::restore(Limits::default(), saved, &survivors, rig.now);
    rig.told.clear();
    between(&mut rig);
    rig.found(None);
    let (now, told) = (rig.now, &mut rig.told);
    assert_eq!(rig.control.returned(now, &mut |input| told.push(super::rig::told(&input))).found, 1);
    rig
}

fn json_head() -> Vec<u8> {
    let whole = finished();
    let body = whole.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
    whole[..body].to_vec()
}

#[test]
fn a_request_that_waits_goes_on_where_nothing_has_passed() {
    let events =
        [chunk("data: {\"meta_info\":{\"finish_reason\":{\"type\":\"stop\"}}}\n\n"), LAST.to_vec()].concat();
    let (body, to_end) = (finished()[json_head().len()..].to_vec(), b"HTTP/1.1 200 OK\r\n\r\n");
    let ways: [(&[u8], &[u8], &str); 3] = [
        (b"", &finished(), "ContentLength"),
        (&json_head(), &body, "ContentLength"),
        (STREAM_HEAD, &events, "LastChunk"),
    ];
    for (begun, rest, how) in ways {
        let mut rig = taken_on(begun, |_| {});
        assert_eq!(rig.web(), [""; 0], "nothing is news");
        assert_eq!(rig.connections(ConnectionState::Http), 1);
        assert_eq!(rig.judged(), [roomtrace::control::Judgement::Http]);
        // And to the next agent.
        assert_eq!(rig.control.save().sockets.len(), 1);
        rig.send(rest);
        assert_eq!(rig.web(), ["s1 first byte".to_owned(), format!("s1 answered 200 {how} Finished")]);
        rig.ask(&generate(9));
        assert_eq!(rig.web(), ["s2 asked 9 Whole [r9]"]);
    }
    let mut rig = taken_on(to_end, |_| {});
    rig.state(TcpState::Established, TcpState::FinWait1);
    assert_eq!(rig.web(), ["s1 answered 200 Close Unknown"]);
    let mut rig = taken_on(b"", |_| {});
    rig.peer_fin(TcpState::Established, TcpState::CloseWait, 0);
    assert_eq!(rig.web(), ["s1 hung up Client"]);
    let mut rig = taken_on(b"", |_| {});
    rig.send(&answer(500, "no"));
    assert_eq!(rig.web(), ["s1 first byte", "s1 answered 500 ContentLength Unknown"]);
}

/// Whatever passed may have been the answer, or its end.
#[test]
fn a_request_is_out_of_sight_where_anything_has_passed() {
    let ways: [fn(&mut Rig); 5] = [
        |rig| rig.sent = rig.sent.wrapping_add(1),
        |rig| rig.received = rig.received.wrapping_add(1),
        // So much that the numbers have gone round.
        |rig| rig.sent = rig.sent.wrapping_sub(1),
        // Another process has it now.
        |rig| rig.task = Some(task(91)),
        |rig| rig.task = None,
    ];
    for between in ways {
        for begun in [b"".as_slice(), STREAM_HEAD] {
            let mut rig = taken_on(begun, between);
            assert_eq!(rig.web(), ["s1 out of sight"]);
            rig.ask(&generate(9));
            assert_eq!(rig.web(), ["s2 asked 9 Whole [r9]"]);
        }
    }
    // An answer of which part has come: what was read of it is not written down.
    let mut rig = taken_on(&[STREAM_HEAD, &chunk("data: {}\n\n")].concat(), |_| {});
    assert_eq!(rig.web(), ["s1 out of sight"]);
    // A request is under way behind it.
    let mut rig = Rig { task: Some(task(90)), ..server() };
    rig.ask(&generate(7));
    rig.ask(&generate(8)[..20]);
    let saved = rig.control.save();
    assert!(!serde_json::to_string(&saved).unwrap().contains("\"waits\""), "{saved:?}");
}

/// The answer comes when the new agent looks already, but has not met the connection yet.
#[test]
fn what_passes_before_the_connection_is_found_is_read() {
    let mut rig = taken_on(b"", |rig| rig.send(&finished()));
    assert_eq!(rig.web(), ["s1 first byte", "s1 answered 200 ContentLength Finished"]);
    rig.ask(&generate(9));
    assert_eq!(rig.web(), ["s2 asked 9 Whole [r9]"]);
    // Something before it was missed.
    let mut rig = taken_on(b"", |rig| {
        rig.send_muted(100);
        rig.send(&finished());
    });
    assert_eq!(rig.web(), ["s1 out of sight"]);
}

#[test]
fn troubles_and_stands_of_followed_sockets_are_passed_on() {
    let mut rig = server();
    rig.ask(&generate(7));
    rig.told.clear();
    rig.event(What::Trouble(Trouble::ResetSent));
    let stand = roomtrace::event::Stand {
        state: TcpState::Established,
        sequence: rig.sequence(),
        sent: rig.sent,
        retransmits: 0,
    };
    rig.event(What::Stand(stand));
    assert_eq!(rig.told(), [Told::Other("trouble"), Told::Other("stand")]);
    // Not of one that is foreign.
    let mut rig = server();
    rig.ask(b"\0\0 nothing that is known");
    rig.told.clear();
    rig.event(What::Trouble(Trouble::ResetSent));
    rig.event(What::Stand(stand));
    assert_eq!(rig.told(), []);
}

#[test]
fn no_byte_of_a_prompt_is_in_any_state_or_input() {
    const SECRET: &str = "XYZZY-PROMPT";
    let as_numbers: Vec<String> = SECRET.bytes().map(|b| b.to_string()).collect();
    let as_numbers = as_numbers.join(", ");
    let clean = |place: &str, text: &str| {
        assert!(!text.contains(SECRET) && !text.contains(&as_numbers), "{place}: {text}");
    };
    let text = format!("{SECRET} ").repeat(30_000);
    let body = format!(r#"{{"{SECRET}":"{text}","x":"{text}","bootstrap_room":7,"z":"{SECRET}"}}"#);
    let whole = post(&format!("/generate?{SECRET}"), &body);
    let mut inputs = String::new();
    for cut in [30, 100, whole.len() - 100, whole.len()] {
        let mut rig = server();
        rig.move_ends(Direction::Received, &whole[..cut], 2048, 2048);
        clean("saved while it comes", &serde_json::to_string(&rig.control.save()).unwrap());
        rig.close(TcpState::Established, 104);
        inputs.push_str(&rig.web().concat());
        clean("broken off", &format!("{:?}", rig.control));
    }
    let mut rig = server();
    rig.move_ends(Direction::Received, &whole, 2048, 2048);
    inputs.push_str(&rig.web().concat());
    clean("asked", &format!("{:?}", rig.control));
    assert!(inputs.contains("asked 7 Tail"), "{inputs}");
    rig.send(STREAM_HEAD);
    rig.send(&chunk(&format!("data: {{\"text\":\"{SECRET}\"}}\n\n")));
    clean("while it is answered", &format!("{:?}", rig.control));
    clean("saved", &serde_json::to_string(&rig.control.save()).unwrap());
    rig.send(LAST);
    inputs.push_str(&rig.web().concat());
    clean("told", &inputs);
}
