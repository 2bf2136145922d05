//! A conversation between two hosts, packet by packet.

use std::net::SocketAddr;

use super::write::{ACK, FIN, Layer, Packet, RST, SYN, Tcp, pcap};

pub(crate) const SECOND: u64 = 1_000_000_000;
/// When conversations begin.
pub(crate) const START: u64 = 1_700_000_000 * SECOND;

/// Both ends of a connection and where their streams stand.
#[derive(Clone, Debug)]
pub(crate) struct Talk {
    pub(crate) client: SocketAddr,
    pub(crate) server: SocketAddr,
    /// Next sequence number of client and server.
    pub(crate) seq: [u32; 2],
    pub(crate) at: u64,
    pub(crate) packets: Vec<(u64, Tcp)>,
}

pub(crate) const CLIENT: bool = true;
pub(crate) const SERVER: bool = false;

impl Talk {
    pub(crate) fn new(client: &str, server: &str, seq: [u32; 2]) -> Self {
        let (client, server) = (client.parse().unwrap(), server.parse().unwrap());
        Self { client, server, seq, at: START, packets: Vec::new() }
    }

    pub(crate) fn v4() -> Self {
        Self::new("10.0.0.1:40000", "10.0.0.2:5000", [1000, 9000])
    }

    /// A packet as it stands; the streams do not move.
    pub(crate) fn raw(&mut self, client: bool, seq: u32, ack: u32, flags: u8, payload: &[u8]) -> &mut Self {
        let (from, to) = if client { (self.client, self.server) } else { (self.server, self.client) };
        self.at += 1_000_000;
        self.packets.push((self.at, Tcp { from, to, seq, ack, flags, payload: payload.to_vec() }));
        self
    }

    /// The next segment of one end.
    pub(crate) fn say(&mut self, client: bool, flags: u8, payload: &[u8]) -> &mut Self {
        let [c, s] = self.seq;
        let (seq, ack) = if client { (c, s) } else { (s, c) };
        let ack = if flags & ACK == 0 { 0 } else { ack };
        self.raw(client, seq, ack, flags, payload);
        let len = u32::try_from(payload.len()).unwrap() + u32::from(flags & (SYN | FIN) != 0);
        let side = usize::from(!client);
        self.seq[side] = self.seq[side].wrapping_add(len);
        self
    }

    pub(crate) fn handshake(&mut self) -> &mut Self {
        self.say(CLIENT, SYN, &[]).say(SERVER, SYN | ACK, &[]).say(CLIENT, ACK, &[])
    }

    pub(crate) fn data(&mut self, client: bool, payload: &[u8]) -> &mut Self {
        self.say(client, ACK, payload)
    }

    pub(crate) fn ack(&mut self, client: bool) -> &mut Self {
        self.say(client, ACK, &[])
    }

    pub(crate) fn fin(&mut self, client: bool) -> &mut Self {
        self.say(client, FIN | ACK, &[])
    }

    pub(crate) fn rst(&mut self, client: bool) -> &mut Self {
        self.say(client, RST | ACK, &[])
    }

    pub(crate) fn wait(&mut self, nanos: u64) -> &mut Self {
        self.at += nanos;
        self
    }

    pub(crate) fn packets(&self, layer: Layer, big_endian: bool) -> Vec<Packet> {
        self.packets.iter().map(|(at, tcp)| Packet::new(*at, layer.frame(tcp, big_endian))).collect()
    }

    /// As a pcap file of raw IP packets.
    pub(crate) fn file(&self) -> Vec<u8> {
        pcap(101, true, false, &self.packets(Layer::Raw(101), false))
    }
}
