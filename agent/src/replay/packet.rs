//! One packet's headers: link layer, IP, TCP. No state, no I/O.
//!
//! Checksums are not verified: captures of sending hosts hold packets whose checksums the network card would have
//! filled in. Tunnels are not entered and fragments not put together; both are counted by the caller.

use std::net::SocketAddr;

use etherparse::{IpNumber, LaxIpSlice, TcpSlice};

use super::link::{Link, LinkType};

/// Most payload bytes that a packet may lack: no packet is longer (see `MAX_RECORD` of `file`).
const MAX_MISSING: usize = 1 << 20;

/// Why a packet gives no segment. Counted in `Skipped`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Skip {
    NotIp,
    NotTcp,
    Fragment,
    CutHeaders,
    Malformed,
    /// Of an interface with this type, or of one that the file does not describe.
    LinkType(Option<LinkType>),
    TimeResolution,
}

/// One TCP segment. Addresses are canonical: IPv4-mapped IPv6 is IPv4.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment<'a> {
    pub(super) from: SocketAddr,
    pub(super) to: SocketAddr,
    pub(super) seq: u32,
    /// The acknowledgement number, if the flag says it counts.
    pub(super) ack: Option<u32>,
    pub(super) syn: bool,
    pub(super) fin: bool,
    pub(super) rst: bool,
    /// Payload bytes on the wire.
    pub(super) len: u32,
    /// Those of them that were captured, from the first.
    pub(super) payload: &'a [u8],
}

/// Finds the TCP segment in a packet of `length` bytes of which `data` was captured.
pub(super) fn tcp_segment(link: Link, data: &[u8], length: usize) -> Result<Segment<'_>, Skip> {
    let cut = length > data.len();
    // A header that does not fit: the snap length's fault, or the packet's own.
    let short = if cut { Skip::CutHeaders } else { Skip::Malformed };
    let packet = network_layer(link, data).ok_or(short)??;
    let (ip, _) = LaxIpSlice::from_slice(packet).map_err(|_| short)?;
    let body = ip.payload();
    if body.fragmented {
        return Err(Skip::Fragment);
    }
    if body.ip_number != IpNumber::TCP {
        // An IPv6 extension header that is cut stops the walk before it gets to TCP.
        let unfinished = body.incomplete && is_extension(body.ip_number);
        return Err(if unfinished { short } else { Skip::NotTcp });
    }
    let missing = missing_bytes(&ip, packet, length - data.len())?;
    let tcp = TcpSlice::from_slice(body.payload).map_err(|_| short)?;
    let payload = tcp.payload();
    Ok(Segment {
        from: SocketAddr::new(ip.source_addr().to_canonical(), tcp.source_port()),
        to: SocketAddr::new(ip.destination_addr().to_canonical(), tcp.destination_port()),
        seq: tcp.sequence_number(),
        ack: tcp.ack().then(|| tcp.acknowledgment_number()),
        syn: tcp.syn(),
        fin: tcp.fin(),
        rst: tcp.rst(),
        len: u32::try_from(payload.len() + missing).map_err(|_| Skip::Malformed)?,
        payload,
    })
}

/// How many bytes at the packet's end were not captured, of `cut` that are missing from the frame.
fn missing_bytes(ip: &LaxIpSlice<'_>, packet: &[u8], cut: usize) -> Result<usize, Skip> {
    let claimed = match ip {
        LaxIpSlice::Ipv4(v4) => usize::from(v4.header().total_len()),
        LaxIpSlice::Ipv6(v6) => match usize::from(v6.header().payload_length()) {
            0 => 0,
            n => n + 40,
        },
    };
    // A total of 0 stands for "more than 64 KiB" (Linux BIG TCP): then the capture's own length counts.
    let missing = if claimed == 0 { cut } else { claimed.saturating_sub(packet.len()) };
    // A kernel drops a packet that is shorter than its header says (`ip_rcv_core`).
    if missing > cut || missing > MAX_MISSING { Err(Skip::Malformed) } else { Ok(missing) }
}

fn is_extension(number: IpNumber) -> bool {
    matches!(
        number,
        IpNumber::IPV6_HEADER_HOP_BY_HOP
            | IpNumber::IPV6_ROUTE_HEADER
            | IpNumber::IPV6_DESTINATION_OPTIONS
            | IpNumber::IPV6_FRAGMENTATION_HEADER
            | IpNumber::AUTHENTICATION_HEADER
    )
}

/// The packet from its IP header on; `None` when the link layer's header does not fit.
fn network_layer(link: Link, data: &[u8]) -> Option<Result<&[u8], Skip>> {
    match link {
        Link::Raw => Some(Ok(data)),
        Link::Loopback => {
            // The family's value differs between systems (IPv6 is 10, 24, 28 or 30), so the IP version decides; 2 is IPv4
            // on all. Either byte order: its one nonzero byte is the first or the last.
            let (family, packet) = data.split_at_checked(4)?;
            let family = match family {
                [n, 0, 0, 0] | [0, 0, 0, n] => *n,
                _ => 0,
            };
            Some(if matches!(family, 2 | 10 | 24 | 28 | 30) { Ok(packet) } else { Err(Skip::NotIp) })
        }
        Link::Ethernet => ether_payload(data.get(12..)?),
        // Protocol in bytes 14 and 15, then the packet.
        Link::Cooked1 => ether_payload(data.get(14..)?),
        // Protocol first, the packet after 20 bytes.
        Link::Cooked2 => {
            let protocol = data.first_chunk::<2>()?;
            let packet = data.get(20..)?;
            match u16::from_be_bytes(*protocol) {
                0x8100 | 0x88a8 | 0x9100 => ether_payload(packet.get(2..)?),
                protocol => Some(by_protocol(protocol, packet)),
            }
        }
    }
}

/// From the two bytes of protocol on, through any VLAN tags (802.1Q, 802.1ad and the older 0x9100).
fn ether_payload(mut data: &[u8]) -> Option<Result<&[u8], Skip>> {
    loop {
        let (protocol, rest) = data.split_first_chunk::<2>()?;
        match u16::from_be_bytes(*protocol) {
            0x8100 | 0x88a8 | 0x9100 => data = rest.get(2..)?,
            protocol => return Some(by_protocol(protocol, rest)),
        }
    }
}

const fn by_protocol(protocol: u16, packet: &[u8]) -> Result<&[u8], Skip> {
    match protocol {
        0x0800 | 0x86dd => Ok(packet),
        _ => Err(Skip::NotIp),
    }
}
