//! Which sockets are followed: those open before the capture (also in another network namespace), listeners and
//! connect attempts of engine processes, endpoints and ports that were named, and what user space answers.
//!
//! This process calls itself an engine (its main thread's name), so everything it opens is watched; the tests tell
//! their sockets apart by port.
#![allow(
    unsafe_code,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::undocumented_unsafe_blocks,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "tests"
)]

#[path = "support/live.rs"]
mod live;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::MetadataExt as _;

use live::{Kept, Seen};
use roomtrace::event::{Direction, NotCaptured, TcpState};
use roomtrace::kernel::{CaptureConfig, Judgement};

/// Gives this process the name of an engine.
fn call_engine(name: &str) -> CaptureConfig {
    std::fs::write("/proc/self/comm", name).unwrap();
    CaptureConfig { engine_comms: vec!["rt-engine".to_owned()], ..CaptureConfig::default() }
}

fn with_port(events: &[Seen], port: u16) -> Vec<Seen> {
    let is = |e: &&Seen| e.addresses.local.port() == port || e.addresses.peer.port() == port;
    events.iter().filter(is).cloned().collect()
}

fn pair(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (client, listener.accept().unwrap().0)
}

#[test]
fn sockets_opened_before_the_capture_are_found_and_followed() {
    let config = call_engine("rt-engine-before");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (mut client, mut server) = pair(&listener);
    let mut into = [0u8; 64];
    client.write_all(b"in the middle of something").unwrap();
    server.read_exact(&mut into[..26]).unwrap();

    let Some(mut live) = live::start(&config) else { return };
    client.write_all(b"goes on").unwrap();
    server.read_exact(&mut into[..7]).unwrap();
    live.drain();
    let of_it = with_port(&live.events, port);
    let listens = of_it.iter().find(|e| e.found().is_some_and(|f| f.state == TcpState::Listen));
    assert_eq!(listens.unwrap().addresses.local, listener.local_addr().unwrap());
    let found: Vec<_> =
        of_it.iter().filter(|e| e.found().is_some_and(|f| f.state == TcpState::Established)).collect();
    assert_eq!(found.len(), 2, "{of_it:#?}");
    for end in &found {
        assert_eq!(end.task.unwrap().tgid, std::process::id());
        assert_eq!(end.found().unwrap().base.is_some(), end.addresses.local.port() == port, "{end:?}");
    }
    let client_found = found.iter().find(|e| e.addresses.peer.port() == port).unwrap();
    let (start, body) = of_it
        .iter()
        .find_map(|e| match &e.what {
            Kept::Bytes { direction: Direction::Sent, end, len, body } => {
                Some((end.wrapping_sub(*len), body.clone()))
            }
            _ => None,
        })
        .unwrap();
    assert_eq!(body, Ok(b"goes on".to_vec()));
    assert_eq!(start, client_found.found().unwrap().sequence.write, "it goes on where it was found");

    // Nothing that a greeting could judge: user space does.
    let counts = live.capture.sockets().unwrap();
    assert!(counts.pending >= 2 && counts.listening >= 1, "{counts:?}");
    live.capture.judge(client_found.socket, Judgement::Foreign).unwrap();
    let server_id = live.socket(listener.local_addr().unwrap(), client.local_addr().unwrap()).unwrap();
    live.capture.judge(server_id, Judgement::Follow).unwrap();
    live.events.clear();
    client.write_all(b"once more").unwrap();
    server.read_exact(&mut into[..9]).unwrap();
    live.drain();
    let after = with_port(&live.events, port);
    assert!(after.iter().all(|e| e.socket == server_id), "the foreign one is mute: {after:#?}");
    assert!(matches!(&after[0].what, Kept::Bytes { body: Ok(b), .. } if b == b"once more"));
    assert!(live.capture.sockets().unwrap().zmtp >= 1);
}

#[test]
fn what_is_shipped_before_a_judgement_is_bounded() {
    let config = CaptureConfig { found_budget: 100, ..call_engine("rt-engine-budget") };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (mut client, _server) = pair(&listener);
    let Some(mut live) = live::start(&config) else { return };
    for _ in 0..3 {
        client.write_all(&[1; 60]).unwrap();
    }
    live.drain();
    let bodies: Vec<_> = with_port(&live.events, listener.local_addr().unwrap().port())
        .into_iter()
        .filter_map(
            |e| if let Kept::Bytes { body, .. } = e.what { Some(body.map(|b| b.len())) } else { None },
        )
        .collect();
    assert_eq!(bodies, [Ok(60), Err(NotCaptured::Budget), Err(NotCaptured::Budget)]);
}

#[test]
fn listeners_and_connect_attempts_of_engines_are_reported_with_their_result() {
    let config = call_engine("rt-engine-connect");
    let Some(mut live) = live::start(&config) else { return };
    let (_held, at) = held_port();
    let listener = TcpListener::bind(at).unwrap();
    let (client, server) = pair(&listener);
    drop((client, server));
    drop(listener);
    assert!(TcpStream::connect(at).is_err(), "refused now");
    live.drain();
    let of_it = with_port(&live.events, at.port());
    let states: Vec<_> = of_it.iter().filter_map(|e| e.state().map(|s| (e, s.old, s.new, s.error))).collect();
    let has = |old, new, error| states.iter().find(|s| (s.1, s.2, s.3) == (old, new, error)).map(|s| s.0);
    let listens = has(TcpState::Close, TcpState::Listen, 0).expect("the listener");
    assert_eq!(listens.task.unwrap().tgid, std::process::id());
    assert!(has(TcpState::Listen, TcpState::Close, 0).is_some(), "{states:#?}");
    let attempt = has(TcpState::Close, TcpState::SynSent, 0).expect("the attempt");
    assert_eq!((attempt.addresses.peer, attempt.task.unwrap().tgid), (at, std::process::id()));
    assert!(has(TcpState::SynSent, TcpState::Established, 0).is_some());
    // The accepted socket is watched because its listener is, before any byte.
    assert!(has(TcpState::SynRecv, TcpState::Established, 0).is_some(), "{states:#?}");
    let refused =
        has(TcpState::SynSent, TcpState::Close, libc::ECONNREFUSED.cast_unsigned()).expect("the refusal");
    assert_eq!(refused.addresses.peer, at);
}

#[test]
fn attempts_to_named_endpoints_and_named_ports_are_reported_whoever_makes_them() {
    // Three ports that refuse, held so that no other test gets one of them, and a process whose name says nothing.
    let held = [held_port(), held_port(), held_port()];
    let [endpoint, port, neither] = held.each_ref().map(|(_, address)| *address);
    let config = CaptureConfig {
        engine_comms: vec!["no-such-process".to_owned()],
        ports: vec![port.port()],
        ..CaptureConfig::default()
    };
    let Some(mut live) = live::start(&config) else { return };
    assert!(live.capture.watch_endpoint(endpoint).unwrap());
    for address in [endpoint, port, neither] {
        assert!(TcpStream::connect(address).is_err());
    }
    let six: SocketAddr = "[::1]:9".parse().unwrap();
    live.capture.watch_endpoint(six).unwrap();
    assert!(TcpStream::connect(six).is_err());
    live.drain();
    let refused: Vec<_> = live
        .events
        .iter()
        .filter(|e| e.state().is_some_and(|s| s.new == TcpState::Close && s.error == 111))
        .map(|e| e.addresses.peer)
        // Whatever else this host refuses meanwhile is not of this test.
        .filter(|peer| [endpoint, port, neither, six].contains(peer))
        .collect();
    assert_eq!(refused, [endpoint, port, six]);
    live.capture.forget_endpoint(endpoint);
    live.events.clear();
    assert!(TcpStream::connect(endpoint).is_err());
    live.drain();
    // Other sockets of the host may speak ZMTP meanwhile; those are rightly reported.
    let of_it = with_port(&live.events, endpoint.port());
    assert!(of_it.is_empty(), "{of_it:#?}");
}

/// A loopback port that refuses connections as long as the socket lives: bound, and never listening. Bound for reuse: whoever
/// names it can listen there.
fn held_port() -> (socket2::Socket, SocketAddr) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, address)
}

#[test]
fn sockets_of_another_network_namespace_are_found() {
    let config = call_engine("rt-engine-netns");
    // The namespace belongs to this thread alone, and its loopback must be switched on.
    let (to_test, from_there) = std::sync::mpsc::channel();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let inside = std::thread::spawn(move || {
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            to_test.send(None).unwrap();
            return;
        }
        loopback_up();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (mut client, mut server) = pair(&listener);
        client.write_all(b"there").unwrap();
        let mut into = [0u8; 5];
        server.read_exact(&mut into).unwrap();
        let namespace = std::fs::metadata("/proc/thread-self/ns/net").unwrap().ino();
        to_test.send(Some((namespace as u32, listener.local_addr().unwrap()))).unwrap();
        let _ = stopped.recv();
        client.write_all(b"still there").unwrap();
    });
    let Some((namespace, at)) = from_there.recv().unwrap() else {
        return live::skip("this process may not make a network namespace");
    };
    let Some(mut live) = live::start(&config) else { return };
    stop.send(()).unwrap();
    inside.join().unwrap();
    live.drain();
    let of_it: Vec<_> = live.events.iter().filter(|e| e.netns == namespace).collect();
    let states: Vec<_> = of_it.iter().filter_map(|e| e.found()).map(|f| f.state).collect();
    assert_eq!(states.iter().filter(|s| **s == TcpState::Listen).count(), 1, "{of_it:#?}");
    assert_eq!(states.iter().filter(|s| **s == TcpState::Established).count(), 2, "{of_it:#?}");
    assert!(of_it.iter().any(|e| e.addresses.local == at));
    assert!(of_it.iter().any(|e| matches!(&e.what, Kept::Bytes { body: Ok(b), .. } if b == b"still there")));
}

fn loopback_up() {
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = from.cast_signed();
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    assert_eq!(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) }, 0);
}

#[test]
fn after_dropping_all_but_two_capabilities_answers_and_searches_still_work() {
    let config = call_engine("rt-engine-caps");
    let Some(mut live) = live::start(&config) else { return };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    // Capabilities belong to a thread: this one is thrown away afterwards.
    std::thread::scope(|scope| {
        scope
            .spawn(|| {
                live.capture.drop_privileges(false).unwrap();
                assert!(live.capture.watch_endpoint("127.0.0.1:9".parse().unwrap()).unwrap());
                live.capture.search().unwrap();
                live.capture.counters().unwrap();
                assert_eq!(caps::read(None, caps::CapSet::Permitted).unwrap().len(), 2, "the rest is gone");
            })
            .join()
            .unwrap();
    });
    drop(listener);
}

/// What is announced from its establishment on must be there from its first byte on, also while the programs are
/// being attached one after the other.
#[test]
fn connections_that_open_while_the_capture_starts_are_whole_or_older_than_it() {
    // Nobody empties the ring until the capture has started.
    let config = CaptureConfig { ring_bytes: 64 << 20, ..call_engine("rt-engine-during") };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let opening = std::thread::spawn(move || {
        let mut greeting = [0u8; 64];
        greeting[..12].copy_from_slice(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x01");
        greeting[12..16].copy_from_slice(b"NULL");
        let mut open = std::collections::VecDeque::new();
        while stopped.try_recv().is_err() {
            // Not so fast that the ports run out.
            std::thread::sleep(std::time::Duration::from_millis(1));
            let (mut client, mut server) = pair(&listener);
            client.write_all(&greeting).unwrap();
            server.read_exact(&mut [0; 64]).unwrap();
            client.write_all(b"more").unwrap();
            open.push_back((client, server));
            if open.len() > 100 {
                open.pop_front();
            }
        }
        open
    });
    let live = live::start(&config);
    stop.send(()).ok();
    let _open = opening.join().unwrap();
    let Some(mut live) = live else { return };
    live.drain();
    let events = with_port(&live.events, port);
    let established = events.iter().filter_map(|e| Some((e, e.state()?)));
    for (e, change) in established.filter(|(_, s)| s.new == TcpState::Established) {
        // The client sends, the server receives.
        let (way, base) = if e.addresses.peer.port() == port {
            (Direction::Sent, change.sequence.write)
        } else {
            (Direction::Received, change.sequence.copied)
        };
        let first = events.iter().filter(|b| b.socket == e.socket).find_map(|b| match &b.what {
            Kept::Bytes { direction, end, len, .. } if *direction == way => Some(end.wrapping_sub(*len)),
            _ => None,
        });
        assert_eq!(first, Some(base), "{way:?} of {e:?}");
    }
}
