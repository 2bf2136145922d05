//! TCP: order, gaps, acknowledgements, and the states both kernels go through.

use std::collections::BTreeMap;

use proptest::prelude::*;
use roomtrace::event::{Direction, NotCaptured, Sequence, TcpState};

use super::collect::{Event, Said, replay, states, streams};
use super::talk::{CLIENT, SECOND, SERVER, START, Talk};
use super::write::{ACK, FIN, Layer, RST, SYN, Tcp, pcap};

use TcpState::{Close, CloseWait, Closing, Established, FinWait1, FinWait2, LastAck, SynRecv, SynSent};

fn bytes(events: &[Event], sent: bool) -> Vec<(u64, u32, u32)> {
    let of = |e: &Event| match e.said {
        Said::Bytes { direction, end, len, .. } if (direction == Direction::Sent) == sent => {
            Some((e.at.0 - START, end, len))
        }
        _ => None,
    };
    events.iter().filter_map(of).collect()
}

#[test]
fn received_comes_with_the_acknowledgement() {
    let mut talk = Talk::v4();
    talk.handshake().data(CLIENT, b"one").data(CLIENT, b"two").wait(SECOND).ack(SERVER);
    let (events, _) = replay(&talk.file()).unwrap();
    assert_eq!(bytes(&events, true), [(4_000_000, 1004, 3), (5_000_000, 1007, 3)]);
    // One acknowledgement, one piece.
    assert_eq!(bytes(&events, false), [(SECOND + 6_000_000, 1007, 6)]);
    let una: Vec<_> = events
        .iter()
        .filter_map(|e| match e.said {
            Said::Bytes { una, nxt, .. } => Some((e.local.port(), una, nxt)),
            _ => None,
        })
        .collect();
    assert_eq!(una, [(40000, 1001, 9001), (40000, 1001, 9001), (5000, 9001, 1007)]);
}

#[test]
fn an_old_acknowledgement_takes_nothing_back() {
    let mut talk = Talk::v4();
    talk.handshake().data(CLIENT, b"one").ack(SERVER).raw(SERVER, 9001, 1001, ACK, &[]).data(CLIENT, b"two");
    let (events, _) = replay(&talk.file()).unwrap();
    let last = events.last().map(|e| e.said.clone());
    assert!(matches!(last, Some(Said::Bytes { end: 1007, una: 1004, .. })), "{last:?}");
}

#[test]
fn an_acknowledgement_may_cover_half_a_segment() {
    let mut talk = Talk::v4();
    talk.handshake().data(CLIENT, b"abcdef").raw(SERVER, 9001, 1004, ACK, &[]).ack(SERVER);
    let (events, _) = replay(&talk.file()).unwrap();
    assert_eq!(bytes(&events, false).iter().map(|b| b.2).collect::<Vec<_>>(), [3, 3]);
    assert_eq!(streams(&events)[&(talk.server, talk.client, false)], vec![(1001, b"abcdef".to_vec())]);
}

#[test]
fn opened_and_closed() {
    let mut talk = Talk::v4();
    talk.handshake().data(CLIENT, b"hi").ack(SERVER).fin(CLIENT).ack(SERVER).fin(SERVER).ack(CLIENT);
    // A retransmitted FIN and its answer change nothing.
    talk.raw(SERVER, 9001, 1004, FIN | ACK, &[]).ack(CLIENT);
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!(
        states(&events, talk.client),
        [
            (Close, SynSent, 0),
            (SynSent, Established, 0),
            (Established, FinWait1, 0),
            (FinWait1, FinWait2, 0),
            (FinWait2, Close, 0)
        ]
    );
    assert_eq!(
        states(&events, talk.server),
        [
            (SynRecv, Established, 0),
            (Established, CloseWait, 0),
            (CloseWait, LastAck, 0),
            (LastAck, Close, 0)
        ]
    );
    let base = events.iter().find_map(|e| match e.said {
        Said::State { new: Established, sequence, .. } if e.local == talk.client => Some(sequence),
        _ => None,
    });
    assert_eq!(base, Some(Sequence { write: 1001, una: 1001, copied: 9001, rcv_nxt: 9001 }));
    assert_eq!((summary.connections, summary.found), (1, 0));
}

#[test]
fn closed_by_both_at_once() {
    let mut talk = Talk::v4();
    talk.handshake().fin(CLIENT).raw(SERVER, 9001, 1001, FIN | ACK, &[]);
    talk.raw(CLIENT, 1002, 9002, ACK, &[]).raw(SERVER, 9002, 1002, ACK, &[]);
    let (events, _) = replay(&talk.file()).unwrap();
    assert_eq!(
        states(&events, talk.client)[2..],
        [(Established, FinWait1, 0), (FinWait1, Closing, 0), (Closing, Close, 0)]
    );
    assert_eq!(states(&events, talk.server).last(), Some(&(FinWait2, Close, 0)));
}

#[test]
fn refused() {
    let mut talk = Talk::v4();
    talk.say(CLIENT, SYN, &[]).raw(SERVER, 0, 7, RST | ACK, &[]).raw(SERVER, 0, 1001, RST | ACK, &[]);
    // The next attempt from the same port is another connection, and gets through.
    talk.seq = [5000, 9000];
    talk.handshake();
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!(
        states(&events, talk.client),
        [(Close, SynSent, 0), (SynSent, Close, 111), (Close, SynSent, 0), (SynSent, Established, 0)]
    );
    assert_eq!(states(&events, talk.server), [(SynRecv, Established, 0)]);
    assert_eq!((summary.connections, summary.repairs.resets_ignored), (2, 1));
    assert_ne!(events[0].socket, events[2].socket);
}

#[test]
fn an_unanswered_connect_stays_open() {
    let mut talk = Talk::v4();
    talk.say(CLIENT, SYN, &[]).raw(CLIENT, 1000, 0, SYN, &[]).raw(CLIENT, 1000, 0, SYN, &[]);
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!(states(&events, talk.client), [(Close, SynSent, 0)]);
    assert_eq!(summary.connections, 1);
}

#[test]
fn reset() {
    let mut talk = Talk::v4();
    talk.handshake().data(CLIENT, b"hi").ack(SERVER);
    // Outside the window: a kernel would ignore it.
    talk.raw(SERVER, 8000, 1003, RST | ACK, &[]).rst(SERVER);
    // What comes after is no event.
    talk.data(CLIENT, b"late");
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!(states(&events, talk.client).last(), Some(&(Established, Close, 104)));
    assert_eq!(states(&events, talk.server).last(), Some(&(Established, Close, 0)));
    assert_eq!(summary.repairs.resets_ignored, 1);
    assert_eq!(bytes(&events, true).len(), 1);

    let mut talk = Talk::v4();
    talk.handshake().fin(SERVER).ack(CLIENT).rst(SERVER);
    let (events, _) = replay(&talk.file()).unwrap();
    assert_eq!(states(&events, talk.client).last(), Some(&(CloseWait, Close, 32)), "EPIPE after a FIN");
}

#[test]
fn joined_in_the_middle() {
    let mut talk = Talk::new("10.0.0.1:40000", "10.0.0.2:5000", [u32::MAX - 2, 9000]);
    talk.data(CLIENT, b"abcdef").data(SERVER, b"xy").data(CLIENT, b"ghi").ack(SERVER);
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!((summary.connections, summary.found), (1, 1));
    let found: Vec<_> = events
        .iter()
        .filter_map(|e| match e.said {
            Said::Found(f) => Some((e.local, f.state, f.sequence, f.base)),
            _ => None,
        })
        .collect();
    let (c, s) = (u32::MAX - 2, 9000);
    let sequence = |own, peer| Sequence { write: own, una: own, copied: peer, rcv_nxt: peer };
    assert_eq!(
        found,
        [(talk.client, Established, sequence(c, s), None), (talk.server, Established, sequence(s, c), None)]
    );
    // The sequence numbers wrap.
    assert_eq!(streams(&events)[&(talk.server, talk.client, false)], vec![(c, b"abcdefghi".to_vec())]);
    assert_eq!(summary.repairs.holes, 0);
}

#[test]
fn a_keepalive_probe_at_the_start_is_no_gap() {
    let mut talk = Talk::v4();
    talk.raw(CLIENT, 999, 9000, ACK, &[]).raw(SERVER, 9000, 1000, ACK, &[]).wait(SECOND);
    talk.data(CLIENT, b"hello").ack(SERVER);
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!(summary.repairs.holes, 0);
    assert_eq!(streams(&events)[&(talk.server, talk.client, false)], vec![(1000, b"hello".to_vec())]);
    assert_eq!(bytes(&events, true), [(SECOND + 3_000_000, 1005, 5)]);
}

#[test]
fn one_direction_alone() {
    let mut talk = Talk::v4();
    talk.handshake().data(CLIENT, b"one").ack(SERVER).data(CLIENT, b"two").data(SERVER, b"xx").fin(CLIENT);
    talk.packets.retain(|(_, t)| t.from == talk.client);
    let (events, _) = replay(&talk.file()).unwrap();
    assert_eq!(
        states(&events, talk.client),
        [(Close, SynSent, 0), (SynSent, Established, 0), (Established, FinWait1, 0)]
    );
    assert_eq!(bytes(&events, true).len(), 2);
    assert_eq!(bytes(&events, false), [], "nothing shows that the peer has it");
    // No acknowledgement was seen, so none is missed.
    let unacknowledged = events.iter().any(|e| matches!(e.said, Said::Bytes { una, end, .. } if una != end));
    assert!(!unacknowledged);
}

#[test]
fn a_gap_the_peer_has_acknowledged_is_given_up_soon() {
    let mut talk = Talk::v4();
    talk.handshake().data(CLIENT, b"one").ack(SERVER).data(CLIENT, b"LOST").data(CLIENT, b"two").ack(SERVER);
    talk.packets.remove(5);
    let lost_at = talk.at;
    // Another gap that has lasted as long is given up at once.
    let mut late = talk.clone();
    late.packets.truncate(5);
    late.seq[0] = 1008;
    late.ack(SERVER).wait(SECOND).data(CLIENT, b"two");
    let (events, summary) = replay(&late.wait(SECOND).ack(SERVER).file()).unwrap();
    assert_eq!(summary.repairs.holes, 1);
    assert_eq!(bytes(&events, true)[1].0 + START, late.at - SECOND - 1_000_000);

    // Traffic of the other direction moves time on.
    for _ in 0..20 {
        talk.wait(10_000_000).data(SERVER, b".");
    }
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!((summary.repairs.holes, summary.repairs.window_overflow), (1, 0));
    assert_eq!(
        streams(&events)[&(talk.client, talk.server, true)],
        vec![(1001, b"one".to_vec()), (1008, b"two".to_vec())]
    );
    assert_eq!(
        streams(&events)[&(talk.server, talk.client, false)],
        vec![(1001, b"one".to_vec()), (1008, b"two".to_vec())]
    );
    let at = bytes(&events, true).iter().find(|b| b.1 == 1011).unwrap().0 + START;
    assert!(at > lost_at + SECOND / 20 && at < lost_at + SECOND / 5, "{}", at - lost_at);
}

#[test]
fn a_gap_the_peer_lacks_too_waits_for_the_retransmission() {
    let mut talk = Talk::v4();
    talk.handshake().raw(CLIENT, 1004, 9001, ACK, b"two").raw(SERVER, 9001, 1001, ACK, &[]);
    talk.wait(10 * SECOND).raw(SERVER, 9001, 1001, ACK, &[]);
    talk.wait(10 * SECOND).raw(CLIENT, 1001, 9001, ACK, b"one").raw(SERVER, 9001, 1007, ACK, &[]);
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!((summary.repairs.holes, summary.repairs.reordered), (0, 1));
    assert_eq!(streams(&events)[&(talk.server, talk.client, false)], vec![(1001, b"onetwo".to_vec())]);
}

#[test]
fn what_waits_at_the_end_of_the_capture_is_delivered() {
    let mut talk = Talk::v4();
    talk.handshake().raw(CLIENT, 1004, 9001, ACK, b"two").raw(CLIENT, 1010, 9001, FIN | ACK, b"end");
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!(summary.repairs.holes, 2);
    assert_eq!(
        streams(&events)[&(talk.client, talk.server, true)],
        vec![(1004, b"two".to_vec()), (1010, b"end".to_vec())]
    );
    assert_eq!(states(&events, talk.client).last(), Some(&(Established, FinWait1, 0)));
}

#[test]
fn the_window_is_bounded() {
    // By bytes, and by segments.
    for (size, count) in [(60_000_u16, 40_u32), (10, 3000)] {
        let mut talk = Talk::v4();
        talk.handshake();
        let mut seq = 1002_u32; // the byte at 1001 never comes
        for _ in 0..count {
            talk.raw(CLIENT, seq, 9001, ACK, &vec![5; size.into()]);
            seq += u32::from(size);
        }
        let (events, summary) = replay(&talk.file()).unwrap();
        assert_eq!((summary.repairs.holes, summary.repairs.window_overflow), (1, 1));
        let all = vec![5; usize::from(size) * count as usize];
        assert_eq!(streams(&events)[&(talk.client, talk.server, true)], vec![(1002, all)]);
    }
}

#[test]
fn too_much_unacknowledged_is_kept_by_length() {
    let mut talk = Talk::v4();
    talk.handshake();
    for _ in 0..200 {
        talk.data(CLIENT, &vec![5; 60_000]);
    }
    talk.ack(SERVER).data(CLIENT, b"more").ack(SERVER);
    let (events, summary) = replay(&talk.file()).unwrap();
    assert!(summary.repairs.unacked_overflow > 0);
    let received: Vec<_> = events
        .iter()
        .filter_map(|e| match &e.said {
            Said::Bytes { direction: Direction::Received, len, body, .. } => {
                Some((*len, body.as_ref().err().copied()))
            }
            _ => None,
        })
        .collect();
    assert_eq!(received.iter().map(|r| r.0).sum::<u32>(), 12_000_004);
    assert_eq!(received[1].1, Some(NotCaptured::Budget));
    assert_eq!(received[2], (4, None));
}

#[test]
fn ports_used_again_are_another_connection() {
    let mut talk = Talk::v4();
    talk.handshake().data(CLIENT, b"old").raw(CLIENT, 1010, 9001, ACK, b"held");
    talk.seq = [777_000, 888_000];
    talk.handshake().data(CLIENT, b"new");
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!(summary.connections, 2);
    assert_eq!(
        states(&events, talk.client),
        [
            (Close, SynSent, 0),
            (SynSent, Established, 0),
            (Established, Close, 0),
            (Close, SynSent, 0),
            (SynSent, Established, 0)
        ]
    );
    assert_eq!(
        streams(&events)[&(talk.client, talk.server, true)],
        vec![(1001, b"old".to_vec()), (1010, b"held".to_vec()), (777_001, b"new".to_vec())]
    );
    let sockets: Vec<_> = events.iter().map(|e| e.socket).collect();
    assert_ne!(sockets.first(), sockets.last());
}

#[test]
fn ports_used_again_without_their_syn() {
    let mut talk = Talk::v4();
    talk.handshake().fin(CLIENT).ack(SERVER).fin(SERVER).ack(CLIENT);
    // Late and near: of the closed connection. Far: another one.
    talk.raw(CLIENT, 1001, 9001, ACK, b"x");
    talk.seq = [77_000_000, 88_000_000];
    talk.data(CLIENT, b"new");
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!((summary.connections, summary.found), (2, 1));
    assert_eq!(bytes(&events, true).iter().map(|b| b.1).collect::<Vec<_>>(), [77_000_003]);
}

#[test]
fn more_connections_than_are_followed() {
    let mut talk = Talk::v4();
    for n in 0..40_000_u32 {
        talk.client = format!("10.1.{}.{}:4000", n / 200, n % 200).parse().unwrap();
        talk.seq = [1000, 9000];
        talk.data(CLIENT, b"x");
    }
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!(summary.connections, 40_000);
    assert!(summary.evicted > 7_000 && summary.evicted < 20_000, "{}", summary.evicted);
    assert_eq!(bytes(&events, true).len(), 40_000);
}

/// Segments of a stream of `len` bytes: cut anywhere, some sent twice, some overlapping.
fn pieces(len: usize) -> impl Strategy<Value = Vec<(usize, usize)>> {
    let cuts = prop::collection::btree_set(1..len, 0..12);
    let extra = prop::collection::vec((0..len, 1..len), 0..6);
    (cuts, extra).prop_map(move |(cuts, extra)| {
        let mut edges = vec![0];
        edges.extend(cuts);
        edges.push(len);
        let mut pieces: Vec<_> = edges.windows(2).map(|w| (w[0], w[1])).collect();
        pieces.extend(extra.into_iter().map(|(a, n)| (a, (a + n).min(len))));
        pieces
    })
}

fn shuffled() -> impl Strategy<Value = (Vec<(usize, usize)>, Vec<u8>, u32, Vec<u16>)> {
    (2..400_usize).prop_flat_map(|len| {
        (
            pieces(len).prop_shuffle(),
            prop::collection::vec(any::<u8>(), len),
            prop_oneof![any::<u32>(), (u32::MAX - 500)..=u32::MAX],
            prop::collection::vec(0..500_u16, 24),
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// However a stream is cut, repeated and shuffled, and whatever is acknowledged in between: the same bytes.
    #[test]
    fn order_does_not_matter((pieces, data, isn, acks) in shuffled()) {
        let mut talk = Talk::new("[fd00::1]:1", "[fd00::2]:2", [isn, 9000]);
        talk.handshake();
        let first = isn.wrapping_add(1);
        let mut have = vec![false; data.len()];
        for (i, (a, b)) in pieces.iter().enumerate() {
            talk.raw(CLIENT, first.wrapping_add(u32::try_from(*a).unwrap()), 9001, ACK, &data[*a..*b]);
            have[*a..*b].fill(true);
            // The peer acknowledges what it has in order, or an older part of that, or nothing.
            let most = have.iter().position(|h| !h).unwrap_or(data.len());
            let ack = usize::from(acks.get(i).copied().unwrap_or(0)).min(most);
            talk.raw(SERVER, 9001, first.wrapping_add(u32::try_from(ack).unwrap()), ACK, &[]);
        }
        let len = u32::try_from(data.len()).unwrap();
        talk.raw(SERVER, 9001, first.wrapping_add(len), ACK, &[]);
        talk.raw(CLIENT, first.wrapping_add(len), 9001, ACK | FIN, &[]);
        let (events, summary) = replay(&talk.file()).unwrap();
        let streams = streams(&events);
        prop_assert_eq!(&streams[&(talk.client, talk.server, true)], &vec![(first, data.clone())]);
        prop_assert_eq!(&streams[&(talk.server, talk.client, false)], &vec![(first, data)]);
        prop_assert_eq!(summary.repairs.holes, 0);
        prop_assert_eq!(states(&events, talk.client).last().copied(), Some((Established, FinWait1, 0)));
    }

    /// Any packets at all between two addresses: no panic, no byte twice.
    #[test]
    fn nonsense_is_survived(packets in prop::collection::vec(
        (any::<bool>(), any::<u8>(), 0..2000_u32, 0..2000_u32, prop::collection::vec(any::<u8>(), 0..20), 0..SECOND),
        0..60,
    )) {
        let mut talk = Talk::v4();
        for (client, flags, seq, ack, payload, wait) in packets {
            talk.wait(wait).raw(client, seq.wrapping_sub(1000), ack.wrapping_sub(1000), flags & 0x17, &payload);
        }
        let (events, _) = replay(&talk.file()).unwrap();
        let mut ends: BTreeMap<_, u32> = BTreeMap::new();
        for e in &events {
            if let Said::Bytes { direction, end, len, .. } = e.said {
                let start = end.wrapping_sub(len);
                if let Some(before) = ends.insert((e.socket, direction), end) {
                    prop_assert!(start.wrapping_sub(before).cast_signed() >= 0);
                }
            }
        }
    }
}

#[test]
fn retransmissions_with_other_bytes_change_nothing() {
    let mut talk = Talk::v4();
    talk.handshake().data(CLIENT, b"abc").raw(CLIENT, 1001, 9001, ACK, b"XYZdef").raw(
        SERVER,
        9001,
        1007,
        ACK,
        &[],
    );
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!(streams(&events)[&(talk.server, talk.client, false)], vec![(1001, b"abcdef".to_vec())]);
    assert_eq!(summary.repairs.retransmitted, 1);
}

#[test]
fn many_connections_at_once_do_not_mix() {
    let mut all: Vec<(u64, Tcp)> = Vec::new();
    for n in 0..50_u16 {
        let mut talk =
            Talk::new(&format!("10.0.0.1:{}", 40_000 + n), "10.0.0.2:5000", [u32::from(n) * 7, 9000]);
        talk.handshake().data(CLIENT, &n.to_be_bytes()).ack(SERVER);
        all.extend(talk.packets);
    }
    all.sort_by_key(|p| p.0);
    let talk = Talk { packets: all, ..Talk::v4() };
    let (events, summary) = replay(&pcap(1, true, false, &talk.packets(Layer::Ethernet, false))).unwrap();
    assert_eq!(summary.connections, 50);
    let streams = streams(&events);
    for n in 0..50_u16 {
        let client = format!("10.0.0.1:{}", 40_000 + n).parse().unwrap();
        assert_eq!(streams[&(talk.server, client, false)][0].1, n.to_be_bytes());
    }
}
