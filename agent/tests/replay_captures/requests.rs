//! Requests in packet captures: what the rooms are told of them at either end.

use std::io::Cursor;

use roomtrace::control::{Control, Limits};
use roomtrace::http::event::Rooms;
use roomtrace::replay::Replay;
use roomtrace::rooms::model::{Input, RequestStep};

use super::talk::{CLIENT, SERVER, Talk};

fn told(talk: &Talk) -> [Vec<String>; 2] {
    let file = talk.file();
    let mut control = Control::new(Limits::default());
    let mut told = [Vec::new(), Vec::new()];
    Replay::from_reader(Cursor::new(&file))
        .unwrap()
        .run(&mut |event| {
            control.handle(&event, &mut |input| {
                let Input::Request { server, n, step, .. } = input else { return };
                let step = match step {
                    RequestStep::Asked { work, .. } => match &work.rooms {
                        Rooms::Named { rooms, seen, .. } => format!("asked {rooms:?} {seen:?}"),
                        other => format!("{other:?}"),
                    },
                    step => format!("{step:?}"),
                };
                told[usize::from(!server)].push(format!("{n} {step}"));
            });
        })
        .unwrap();
    told
}

fn generate(text: &str, room: u64) -> Vec<u8> {
    let body = format!(r#"{{"text":"{text}","rid":"r","bootstrap_room":{room}}}"#);
    format!("POST /generate HTTP/1.1\r\nHost: h\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

const ANSWER: &[u8] =
    b"HTTP/1.1 200 OK\r\nContent-Length: 47\r\n\r\n{\"meta_info\":{\"finish_reason\":{\"type\":\"stop\"}}}";

#[test]
fn a_kept_connection_says_the_same_at_both_ends() {
    let mut talk = Talk::v4();
    talk.handshake();
    // A number straddles two segments; the second prompt is long.
    let (first, second) = (generate("why", 123_456), generate(&"x".repeat(200_000), 8));
    let at = first.len() - 5;
    talk.data(CLIENT, &first[..at]).ack(SERVER).data(CLIENT, &first[at..]).ack(SERVER);
    talk.data(SERVER, ANSWER).ack(CLIENT);
    for segment in second.chunks(1400) {
        talk.data(CLIENT, segment).ack(SERVER);
    }
    talk.data(SERVER, ANSWER).ack(CLIENT);
    talk.fin(CLIENT).ack(SERVER).fin(SERVER).ack(CLIENT);
    let answered = "Answered { status: Some(200), how: ContentLength, outcome: Finished }";
    let expected: Vec<String> = [(0, 123_456), (1, 8)]
        .into_iter()
        .flat_map(|(n, room)| {
            [
                format!("{n} asked [Some({room})] Whole"),
                format!("{n} FirstBodyByte"),
                format!("{n} {answered}"),
            ]
        })
        .collect();
    let [at_server, at_client] = told(&talk);
    assert_eq!((&at_server, &at_client), (&expected, &expected));
}

#[test]
fn a_hang_up_and_a_reset_name_who_it_was() {
    for reset in [false, true] {
        let mut talk = Talk::v4();
        talk.handshake().data(CLIENT, &generate("why", 7)).ack(SERVER);
        if reset {
            talk.rst(CLIENT)
        } else {
            talk.fin(CLIENT)
        };
        talk.ack(SERVER);
        let expected = ["0 asked [Some(7)] Whole", "0 HungUp { by: Client, answer_begun: false }"];
        let [at_server, at_client] = told(&talk);
        assert_eq!(
            (&at_server[..], &at_client[..]),
            (&expected.map(str::to_owned)[..], &expected.map(str::to_owned)[..])
        );
    }
}

#[test]
fn a_capture_that_begins_in_the_middle() {
    let mut talk = Talk::v4();
    talk.data(SERVER, b"data: {\"text\":\"of an answer\"}\n\n").ack(CLIENT);
    talk.data(SERVER, b"0\r\n\r\n").ack(CLIENT);
    talk.data(CLIENT, &generate("why", 7)).ack(SERVER).data(SERVER, ANSWER).ack(CLIENT);
    let [at_server, at_client] = told(&talk);
    assert_eq!(at_server.len(), 3, "{at_server:?}");
    assert_eq!(at_server, at_client);
}
