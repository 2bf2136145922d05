//! Small writers of capture files, so that the tests do not depend on the code they test.

use std::net::{IpAddr, SocketAddr};

/// Flags of a TCP segment.
pub(crate) const FIN: u8 = 1;
pub(crate) const SYN: u8 = 2;
pub(crate) const RST: u8 = 4;
pub(crate) const ACK: u8 = 16;

/// A TCP segment to be written.
#[derive(Clone, Debug)]
pub(crate) struct Tcp {
    pub(crate) from: SocketAddr,
    pub(crate) to: SocketAddr,
    pub(crate) seq: u32,
    pub(crate) ack: u32,
    pub(crate) flags: u8,
    pub(crate) payload: Vec<u8>,
}

impl Tcp {
    fn segment(&self) -> Vec<u8> {
        let mut b = Vec::new();
        b.extend(self.from.port().to_be_bytes());
        b.extend(self.to.port().to_be_bytes());
        b.extend(self.seq.to_be_bytes());
        b.extend(self.ack.to_be_bytes());
        // Eight words: the header and the 12 bytes of options that Linux sends (NOP, NOP, time stamps).
        b.extend([0x80, self.flags, 0x10, 0, 0, 0, 0, 0, 1, 1, 8, 10, 0, 0, 0, 1, 0, 0, 0, 2]);
        b.extend(&self.payload);
        b
    }

    /// From the IP header on.
    pub(crate) fn ip(&self) -> Vec<u8> {
        let tcp = self.segment();
        match (self.from.ip(), self.to.ip()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => ipv4(a.octets(), b.octets(), 6, 0x4000, &tcp),
            (IpAddr::V6(a), IpAddr::V6(b)) => ipv6(a.octets(), b.octets(), 6, &tcp),
            _ => panic!("both ends are of one family"),
        }
    }

    fn ethertype(&self) -> u16 {
        if self.from.is_ipv4() { 0x0800 } else { 0x86dd }
    }
}

/// An IPv4 packet; `fragment` is its field of flags and offset.
pub(crate) fn ipv4(from: [u8; 4], to: [u8; 4], protocol: u8, fragment: u16, body: &[u8]) -> Vec<u8> {
    let mut b = vec![0x45, 0];
    b.extend(u16::try_from(20 + body.len()).unwrap_or(0).to_be_bytes());
    b.extend([0, 1]);
    b.extend(fragment.to_be_bytes());
    b.extend([64, protocol, 0, 0]);
    b.extend(from);
    b.extend(to);
    b.extend(body);
    b
}

/// An IPv6 packet.
pub(crate) fn ipv6(from: [u8; 16], to: [u8; 16], next: u8, body: &[u8]) -> Vec<u8> {
    let mut b = vec![0x60, 0, 0, 0];
    b.extend(u16::try_from(body.len()).unwrap_or(0).to_be_bytes());
    b.extend([next, 64]);
    b.extend(from);
    b.extend(to);
    b.extend(body);
    b
}

/// A link layer, with the number that stands in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layer {
    Null,
    Loop,
    Ethernet,
    Vlan,
    DoubleVlan,
    Raw(u32),
    Cooked1,
    Cooked2,
}

impl Layer {
    pub(crate) const ALL: [Self; 11] = [
        Self::Null,
        Self::Loop,
        Self::Ethernet,
        Self::Vlan,
        Self::DoubleVlan,
        Self::Raw(12),
        Self::Raw(14),
        Self::Raw(101),
        Self::Raw(0xffff),
        Self::Cooked1,
        Self::Cooked2,
    ];

    /// `Raw(0xffff)` stands for 228 or 229, whichever fits.
    pub(crate) fn number(self, v4: bool) -> u32 {
        match self {
            Self::Null => 0,
            Self::Loop => 108,
            Self::Ethernet | Self::Vlan | Self::DoubleVlan => 1,
            Self::Raw(0xffff) => {
                if v4 {
                    228
                } else {
                    229
                }
            }
            Self::Raw(n) => n,
            Self::Cooked1 => 113,
            Self::Cooked2 => 276,
        }
    }

    pub(crate) fn wrap(self, ethertype: u16, ip: &[u8], big_endian: bool) -> Vec<u8> {
        let ether = ethertype.to_be_bytes();
        let family: u32 = if ethertype == 0x0800 { 2 } else { 30 };
        let macs = [2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2];
        let head: Vec<u8> = match self {
            Self::Null if big_endian => family.to_be_bytes().to_vec(),
            Self::Null => family.to_le_bytes().to_vec(),
            Self::Loop => family.to_be_bytes().to_vec(),
            Self::Ethernet => [&macs[..], &ether].concat(),
            Self::Vlan => [&macs[..], &[0x81, 0, 0, 7], &ether].concat(),
            Self::DoubleVlan => [&macs[..], &[0x88, 0xa8, 0, 8, 0x81, 0, 0, 7], &ether].concat(),
            Self::Raw(_) => vec![],
            Self::Cooked1 => [&[0, 0, 0, 1, 0, 6, 2, 0, 0, 0, 0, 1, 0, 0][..], &ether].concat(),
            Self::Cooked2 => [&ether[..], &[0, 0, 0, 0, 0, 3, 0, 1, 0, 6, 2, 0, 0, 0, 0, 1, 0, 0]].concat(),
        };
        [head, ip.to_vec()].concat()
    }

    pub(crate) fn frame(self, tcp: &Tcp, big_endian: bool) -> Vec<u8> {
        self.wrap(tcp.ethertype(), &tcp.ip(), big_endian)
    }
}

/// A packet of a file: time in nanoseconds, bytes, and how many of them are captured.
#[derive(Clone, Debug)]
pub(crate) struct Packet {
    pub(crate) at: u64,
    pub(crate) bytes: Vec<u8>,
    pub(crate) captured: usize,
}

impl Packet {
    pub(crate) fn new(at: u64, bytes: Vec<u8>) -> Self {
        Self { at, captured: bytes.len(), bytes }
    }
}

fn half(n: u32, big_endian: bool) -> [u8; 2] {
    let n = u16::try_from(n).unwrap();
    if big_endian { n.to_be_bytes() } else { n.to_le_bytes() }
}

fn word(n: u32, big_endian: bool) -> [u8; 4] {
    if big_endian { n.to_be_bytes() } else { n.to_le_bytes() }
}

fn length(n: usize) -> u32 {
    u32::try_from(n).unwrap()
}

/// A classic pcap file.
pub(crate) fn pcap(link: u32, nanoseconds: bool, big_endian: bool, packets: &[Packet]) -> Vec<u8> {
    let w = |n| word(n, big_endian);
    let mut f = Vec::new();
    f.extend(w(if nanoseconds { 0xa1b2_3c4d } else { 0xa1b2_c3d4 }));
    f.extend(half(2, big_endian));
    f.extend(half(4, big_endian));
    for n in [0, 0, 262_144, link] {
        f.extend(w(n));
    }
    let unit = if nanoseconds { 1 } else { 1000 };
    for p in packets {
        f.extend(w(u32::try_from(p.at / 1_000_000_000).unwrap()));
        f.extend(w(u32::try_from(p.at % 1_000_000_000 / unit).unwrap()));
        f.extend(w(length(p.captured)));
        f.extend(w(length(p.bytes.len())));
        f.extend(&p.bytes[..p.captured]);
    }
    f
}

/// A pcapng file, block by block.
pub(crate) struct PcapNg {
    pub(crate) bytes: Vec<u8>,
    big_endian: bool,
}

impl PcapNg {
    pub(crate) fn new(big_endian: bool) -> Self {
        let mut f = Self { bytes: Vec::new(), big_endian };
        f.section();
        f
    }

    /// Another section begins.
    pub(crate) fn section(&mut self) {
        let mut body = word(0x1a2b_3c4d, self.big_endian).to_vec();
        body.extend(half(1, self.big_endian));
        body.extend(half(0, self.big_endian));
        body.extend([0xff; 8]);
        self.block(0x0a0d_0d0a, &body);
    }

    pub(crate) fn block(&mut self, kind: u32, body: &[u8]) {
        let mut body = body.to_vec();
        body.resize(body.len().next_multiple_of(4), 0);
        let len = word(length(body.len() + 12), self.big_endian);
        self.bytes.extend(word(kind, self.big_endian));
        self.bytes.extend(len);
        self.bytes.extend(body);
        self.bytes.extend(len);
    }

    /// An interface with options for its time resolution and offset.
    pub(crate) fn interface(&mut self, link: u32, snaplen: u32, resolution: Option<u8>, offset: Option<i64>) {
        let be = self.big_endian;
        let mut body = half(link, be).to_vec();
        body.extend([0, 0]);
        body.extend(word(snaplen, be));
        if let Some(n) = resolution {
            body.extend([half(9, be), half(1, be)].concat());
            body.extend([n, 0, 0, 0]);
        }
        if let Some(n) = offset {
            body.extend([half(14, be), half(8, be)].concat());
            body.extend(if be { n.to_be_bytes() } else { n.to_le_bytes() });
        }
        if resolution.is_some() || offset.is_some() {
            body.extend([0; 4]);
        }
        self.block(1, &body);
    }

    /// A packet with its time in the interface's units, and with a comment if asked for.
    pub(crate) fn enhanced(&mut self, interface: u32, ticks: u64, p: &Packet, comment: bool) {
        let be = self.big_endian;
        let mut body = Vec::new();
        let (high, low) = (u32::try_from(ticks >> 32).unwrap(), u32::try_from(ticks & 0xffff_ffff).unwrap());
        for n in [interface, high, low, length(p.captured), length(p.bytes.len())] {
            body.extend(word(n, be));
        }
        body.extend(&p.bytes[..p.captured]);
        body.resize(body.len().next_multiple_of(4), 0);
        if comment {
            body.extend([half(1, be), half(2, be)].concat());
            body.extend(*b"hi\0\0");
            body.extend([0; 4]);
        }
        self.block(6, &body);
    }

    pub(crate) fn simple(&mut self, p: &Packet) {
        let mut body = word(length(p.bytes.len()), self.big_endian).to_vec();
        body.extend(&p.bytes[..p.captured]);
        self.block(3, &body);
    }
}
