//! Every file format, byte order, time resolution and link layer yields the same events.

use roomtrace::event::{Mono, NotCaptured};
use roomtrace::replay::{LinkType, ReplayError, Summary};

use super::collect::{Said, replay, streams};
use super::talk::{CLIENT, SERVER, START, Talk};
use super::write::{Layer, Packet, PcapNg, ipv4, ipv6, pcap};

fn talk(v4: bool) -> Talk {
    let mut talk = if v4 { Talk::v4() } else { Talk::new("[fd00::1]:40000", "[fd00::2]:5000", [1000, 9000]) };
    talk.handshake().data(CLIENT, b"hello").data(SERVER, b"world!").ack(CLIENT);
    talk
}

/// Both ends said and got what the other said.
fn check(file: &[u8], talk: &Talk) -> Summary {
    let (events, summary) = replay(file).unwrap();
    let streams = streams(&events);
    let (c, s) = (talk.client, talk.server);
    for (key, seq, bytes) in [
        ((c, s, true), 1001, &b"hello"[..]),
        ((s, c, false), 1001, b"hello"),
        ((s, c, true), 9001, b"world!"),
        ((c, s, false), 9001, b"world!"),
    ] {
        assert_eq!(streams.get(&key), Some(&vec![(seq, bytes.to_vec())]), "{key:?}");
    }
    assert_eq!(summary.damage, None);
    assert_eq!(summary.bytes, file.len() as u64);
    summary
}

#[test]
fn every_link_layer_in_both_byte_orders_and_both_resolutions() {
    for v4 in [true, false] {
        let talk = talk(v4);
        for layer in Layer::ALL {
            for big_endian in [false, true] {
                let packets = talk.packets(layer, big_endian);
                for nanoseconds in [false, true] {
                    let file = pcap(layer.number(v4), nanoseconds, big_endian, &packets);
                    let summary = check(&file, &talk);
                    assert_eq!(summary.segments, 6, "{layer:?}");
                    assert_eq!(summary.first, Some(Mono(START + 1_000_000)));
                    assert_eq!(summary.last, Some(Mono(START + 6_000_000)));
                }
            }
        }
    }
}

#[test]
fn a_frame_check_sequence_named_in_the_header_does_no_harm() {
    let talk = talk(true);
    let packets: Vec<Packet> = talk
        .packets(Layer::Ethernet, false)
        .into_iter()
        .map(|p| Packet::new(p.at, [p.bytes, vec![1, 2, 3, 4]].concat()))
        .collect();
    check(&pcap(0x2400_0001, true, false, &packets), &talk);
}

#[test]
fn pcapng_interfaces_have_their_own_link_and_clock() {
    let talk = talk(true);
    for big_endian in [false, true] {
        let mut f = PcapNg::new(big_endian);
        f.interface(1, 0, None, None);
        f.interface(113, 0, Some(9), None);
        f.interface(276, 0, Some(0x8a), None); // 2^-10 s
        f.interface(0, 0, Some(6), Some(1_600_000_000));
        let layers = [Layer::Ethernet, Layer::Cooked1, Layer::Cooked2, Layer::Null];
        for (i, (at, tcp)) in talk.packets.iter().enumerate() {
            let n = i % 4;
            let p = Packet::new(*at, layers[n].frame(tcp, big_endian));
            let ticks = match n {
                0 => at / 1000,
                1 => *at,
                2 => at / 1_000_000_000 * 1024 + (at % 1_000_000_000) * 1024 / 1_000_000_000 + 1,
                _ => (at - 1_600_000_000 * 1_000_000_000) / 1000,
            };
            f.enhanced(u32::try_from(n).unwrap(), ticks, &p, i % 2 == 0);
            // Blocks of no interest, one of them large.
            f.block(5, &[0; 24]);
            f.block(0x0bad, &vec![7; 1 << 20]);
        }
        let summary = check(&f.bytes, &talk);
        assert_eq!(summary.first, Some(Mono(START + 1_000_000)));
        assert!(summary.last.unwrap().0.abs_diff(START + 6_000_000) < 1_000_000);
        assert_eq!(summary.untimed, 0);
    }
}

#[test]
fn simple_packets_take_the_last_time_and_the_interfaces_snap_length() {
    let talk = talk(true);
    let mut f = PcapNg::new(false);
    f.interface(101, 0, None, None);
    for (i, p) in talk.packets(Layer::Raw(101), false).iter().enumerate() {
        if i == 0 { f.enhanced(0, p.at / 1000, p, false) } else { f.simple(p) }
    }
    let summary = check(&f.bytes, &talk);
    assert_eq!((summary.untimed, summary.last), (5, Some(Mono(START + 1_000_000))));

    let mut f = PcapNg::new(true);
    f.interface(101, 54, None, None);
    for p in talk.packets(Layer::Raw(101), false) {
        f.simple(&Packet { captured: p.bytes.len().min(54), ..p });
    }
    let (events, summary) = replay(&f.bytes).unwrap();
    assert_eq!(summary.repairs.snaplen, 2);
    assert_eq!(streams(&events)[&(talk.client, talk.server, true)], vec![(1001, b"he".to_vec())]);
}

#[test]
fn a_new_section_forgets_the_interfaces() {
    let talk = talk(true);
    let mut f = PcapNg::new(false);
    f.interface(1, 0, None, None);
    f.section();
    f.interface(101, 0, Some(9), None);
    for p in talk.packets(Layer::Raw(101), false) {
        f.enhanced(0, p.at, &p, false);
    }
    f.enhanced(1, START, &talk.packets(Layer::Ethernet, false)[0], false);
    let summary = check(&f.bytes, &talk);
    assert_eq!(summary.skipped.link_type, 1);
}

#[test]
fn interfaces_that_cannot_be_read_are_counted() {
    let talk = talk(true);
    let mut f = PcapNg::new(false);
    f.interface(147, 0, None, None);
    f.interface(101, 0, Some(20), None);
    f.interface(101, 0, Some(9), None);
    for p in talk.packets(Layer::Raw(101), false) {
        f.enhanced(0, 1, &p, false);
        f.enhanced(1, 1, &p, false);
        f.enhanced(2, p.at, &p, false);
    }
    let summary = check(&f.bytes, &talk);
    assert_eq!((summary.skipped.link_type, summary.skipped.time_resolution), (6, 6));
    assert_eq!(summary.link_types.iter().collect::<Vec<_>>(), [(LinkType(147), 6)]);
}

#[test]
fn mapped_addresses_are_ipv4() {
    let mut talk = Talk::new("[::ffff:10.0.0.1]:40000", "[::ffff:10.0.0.2]:5000", [1000, 9000]);
    talk.handshake().data(CLIENT, b"hello").data(SERVER, b"world!").ack(CLIENT);
    let file = talk.file();
    check(&file, &Talk::v4());
}

#[test]
fn what_is_not_tcp_is_counted_by_reason() {
    let talk = talk(true);
    let mut packets = talk.packets(Layer::Ethernet, false);
    let at = packets[5].at;
    let (a, b) = ([10, 0, 0, 1], [10, 0, 0, 2]);
    let mut add =
        |ethertype, ip: &[u8]| packets.push(Packet::new(at, Layer::Ethernet.wrap(ethertype, ip, false)));
    add(0x0806, &[0; 28]);
    add(0x88cc, &[0; 28]);
    add(0x0800, &ipv4(a, b, 17, 0, &[0; 20]));
    add(0x86dd, &ipv6([1; 16], [2; 16], 58, &[0; 20]));
    // First and later fragments.
    add(0x0800, &ipv4(a, b, 6, 0x2000, &[0; 40]));
    add(0x0800, &ipv4(a, b, 6, 0x0010, &[0; 40]));
    add(0x86dd, &ipv6([1; 16], [2; 16], 44, &[&[6, 0, 0, 1, 0, 0, 0, 1][..], &[0; 40]].concat()));
    // A TCP header that does not fit, an IP length beyond the frame, an unknown IP version.
    add(0x0800, &ipv4(a, b, 6, 0, &[0; 10]));
    add(0x0800, &{
        let mut long = ipv4(a, b, 6, 0, &[0x50; 40]);
        long[2] = 9;
        long
    });
    add(0x0800, &[0x75; 40]);
    let whole = packets[0].clone();
    packets.push(Packet { captured: 40, ..whole });
    let s = check(&pcap(1, true, false, &packets), &talk).skipped;
    let counts = (s.not_ip, s.not_tcp, s.fragments, s.malformed, s.cut_headers, s.link_type);
    assert_eq!(counts, (2, 2, 3, 3, 1, 0));
}

#[test]
fn ipv6_extension_headers_are_passed_over() {
    let (a, b) = (Talk::new("[fd00::1]:1", "[fd00::2]:2", [5, 6]), [0, 1]);
    let mut talk = a;
    talk.handshake().data(CLIENT, b"x");
    let packets: Vec<Packet> = talk
        .packets
        .iter()
        .map(|(at, tcp)| {
            let mut ip = tcp.ip();
            // Hop-by-hop options with padding, then TCP.
            ip.splice(40..40, [6, 0, 1, 4, 0, 0, 0, 0]);
            ip[6] = b[0];
            let len = u16::from_be_bytes([ip[4], ip[5]]) + 8;
            ip[4..6].copy_from_slice(&len.to_be_bytes());
            Packet::new(*at, ip)
        })
        .collect();
    let (events, _) = replay(&pcap(101, true, false, &packets)).unwrap();
    assert_eq!(streams(&events)[&(talk.client, talk.server, true)], vec![(6, b"x".to_vec())]);
}

#[test]
fn cut_packets_give_their_front_and_the_length_of_the_rest() {
    let mut talk = Talk::v4();
    talk.handshake().data(CLIENT, &[7; 100]).ack(SERVER).data(CLIENT, b"after").ack(SERVER);
    let packets: Vec<Packet> = talk
        .packets(Layer::Cooked1, false)
        .into_iter()
        .map(|p| Packet { captured: p.bytes.len().min(16 + 20 + 32 + 30), ..p })
        .collect();
    let (events, summary) = replay(&pcap(113, true, false, &packets)).unwrap();
    assert_eq!(summary.repairs.snaplen, 1);
    let said: Vec<_> = events
        .iter()
        .filter_map(|e| match &e.said {
            Said::Bytes { end, len, body, .. } if e.local == talk.client => Some((*end, *len, body.clone())),
            _ => None,
        })
        .collect();
    assert_eq!(
        said,
        [
            (1031, 30, Ok(vec![7; 30])),
            (1101, 70, Err(NotCaptured::Snaplen)),
            (1106, 5, Ok(b"after".to_vec()))
        ]
    );
    let received =
        events.iter().filter(|e| e.local == talk.server && matches!(e.said, Said::Bytes { .. })).count();
    assert_eq!(received, 3, "the receiver gets the same three");
}

#[test]
fn more_than_64_kib_in_one_packet() {
    // Linux BIG TCP: the IP header's length is 0, the capture's own counts.
    let mut talk = Talk::v4();
    talk.handshake().data(CLIENT, &vec![3; 100_000]).ack(SERVER);
    let (events, summary) = replay(&talk.file()).unwrap();
    assert_eq!(streams(&events)[&(talk.server, talk.client, false)], vec![(1001, vec![3; 100_000])]);
    assert_eq!(summary.repairs.snaplen, 0);

    // Cut by the snap length, its own length still counts.
    let packets: Vec<Packet> = talk
        .packets(Layer::Raw(101), false)
        .into_iter()
        .map(|p| Packet { captured: p.bytes.len().min(1000), ..p })
        .collect();
    let (events, summary) = replay(&pcap(101, true, false, &packets)).unwrap();
    let received: u32 =
        events.iter().map(|e| if let Said::Bytes { len, .. } = e.said { len } else { 0 }).sum();
    assert_eq!((summary.repairs.snaplen, received), (1, 200_000));
}

#[test]
fn time_never_goes_back() {
    let mut talk = talk(true);
    talk.packets[4].0 -= 3_000_000;
    let summary = check(&talk.file(), &talk);
    assert_eq!(summary.backwards, 1);
}

#[test]
fn unsupported_link_types_are_named() {
    let error = replay(&pcap(147, false, false, &[])).unwrap_err();
    assert!(matches!(error, ReplayError::LinkType(_)));
    assert!(
        error.to_string().contains("link type 147 (private use) is not supported (Ethernet 1"),
        "{error}"
    );
}

#[test]
fn a_file_of_unsupported_interfaces_alone_is_no_empty_result() {
    let packets = talk(true).packets(Layer::Ethernet, false);
    let mut f = PcapNg::new(false);
    f.interface(127, 0, None, None);
    f.interface(247, 0, None, None);
    f.enhanced(0, 1, &packets[0], false);
    f.enhanced(1, 2, &packets[1], false);
    let error = replay(&f.bytes).unwrap_err().to_string();
    assert!(
        error.contains("127 (802.11 with radiotap header), 247 (InfiniBand) is not supported"),
        "{error}"
    );
    // Without a packet on it, an interface that cannot be read takes nothing away.
    let mut f = PcapNg::new(false);
    f.interface(127, 0, None, None);
    assert_eq!(replay(&f.bytes).unwrap().1.packets, 0);
}
