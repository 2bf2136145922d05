//! Link types of captures: which are understood, and what the others are called. Pure.
//!
//! Numbers and names: <https://www.tcpdump.org/linktypes.html>.

use std::fmt;

/// Link layers that are understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// 0 and 108: four bytes of address family, in the byte order of the capturing host (0) or big endian (108).
    Loopback,
    /// 1.
    Ethernet,
    /// 12, 14, 101, 228, 229: the IP header comes first.
    Raw,
    /// 113: Linux cooked, version 1.
    Cooked1,
    /// 276: Linux cooked, version 2.
    Cooked2,
}

/// Link types that are understood, for people.
pub const SUPPORTED: &str =
    "Ethernet 1, Linux cooked 113 and 276, BSD loopback 0 and 108, raw IP 12, 14, 101, 228 and 229";

impl Link {
    /// From the number in a capture's header.
    pub(super) const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            0 | 108 => Self::Loopback,
            1 => Self::Ethernet,
            // 12 and 14 are DLT_RAW of different systems, written raw by some tools; 228 and 229 are IPv4 and IPv6 alone.
            12 | 14 | 101 | 228 | 229 => Self::Raw,
            113 => Self::Cooked1,
            276 => Self::Cooked2,
            _ => return None,
        })
    }
}

/// Names of link types that are met in practice and not understood here.
const NAMES: &[(u32, &str)] = &[
    (6, "token ring"),
    (9, "PPP"),
    (10, "FDDI"),
    (50, "PPP in HDLC"),
    (51, "PPPoE"),
    (104, "Cisco HDLC"),
    (105, "802.11"),
    (107, "frame relay"),
    (117, "OpenBSD pflog"),
    (119, "802.11 with Prism header"),
    (127, "802.11 with radiotap header"),
    (187, "Bluetooth HCI"),
    (189, "USB, Linux"),
    (192, "PPI"),
    (195, "802.15.4"),
    (201, "Bluetooth HCI with direction"),
    (220, "USB, Linux, memory mapped"),
    (227, "CAN"),
    (239, "Linux nflog"),
    (242, "IP over InfiniBand"),
    (247, "InfiniBand"),
    (249, "USB, Windows"),
    (253, "Linux netlink"),
    (254, "Bluetooth monitor"),
    (258, "Apple pktap"),
    (271, "Linux vsock"),
];

/// A link type that is not understood, by its number. Written with its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkType(pub u32);

impl fmt::Display for LinkType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = NAMES.iter().find(|(number, _)| *number == self.0).map(|(_, name)| *name);
        let private = (147..=162).contains(&self.0).then_some("private use");
        write!(f, "{} ({})", self.0, known.or(private).unwrap_or("no name known here"))
    }
}

/// Packets by the link type that is not understood: the first four types of a file, the rest in
/// [`Skipped::link_type`](super::Skipped::link_type) alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkTypes([Option<(LinkType, u64)>; 4]);

impl LinkTypes {
    /// One type, no packets.
    pub(super) const fn only(link: LinkType) -> Self {
        Self([Some((link, 0)), None, None, None])
    }

    pub(super) fn count(&mut self, link: LinkType) {
        let place = self.0.iter_mut().find(|place| place.is_none_or(|(known, _)| known == link));
        if let Some(place) = place {
            place.get_or_insert((link, 0)).1 += 1;
        }
    }

    /// Each type with its packets.
    pub fn iter(&self) -> impl Iterator<Item = (LinkType, u64)> + '_ {
        self.0.iter().copied().flatten()
    }
}

impl fmt::Display for LinkTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (link, _)) in self.iter().enumerate() {
            write!(f, "{}{link}", if n == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}
