//! What is known of RDMA ports and of the engines' own connections: readings as they come, and what they add up to. Pure.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::event::Mono;
use crate::gpu::windows::{Stretch, Track};

/// Ports at most; a host has 16 at most today.
pub const MAX_PORTS: usize = 64;

/// Processes whose connections are known at most; a host runs one rank per GPU and role.
pub const MAX_PROCESSES: usize = 64;

/// Troubles kept per port, the newest.
const MAX_FAULTS: usize = 64;

/// Something that was read. Part of the format of recordings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// When.
    pub at: Mono,
    /// Of what.
    pub of: Of,
    /// What.
    pub what: What,
}

/// What a reading is of. Part of the format of recordings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Of {
    /// A port of an RDMA card, as a whole: `mlx5_0/1`.
    Port(Box<str>),
    /// All connections of a process that are no control connections.
    Process(u32),
}

/// What was read. Part of the format of recordings.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// Bytes moved.
    Moved(Stretch),
    /// So many more errors of a kind from that moment to [`Reading::at`].
    Faults(Mono, Fault, u64),
}

/// What an RDMA port counts beside bytes: errors of the way, not of one room. Part of the format of recordings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Fault {
    /// The peer did not acknowledge in time.
    AckTimeout,
    /// A packet came out of its order.
    OutOfSequence,
    /// The peer said that one was missing.
    PacketSequence,
    /// The peer had no buffer, more often than is tried.
    ReceiverNotReady,
    /// The link went down.
    LinkDowned,
    /// Bits that are no symbol.
    Symbol,
}

impl Fault {
    /// Every one.
    pub const ALL: [Self; 6] = [
        Self::AckTimeout,
        Self::OutOfSequence,
        Self::PacketSequence,
        Self::ReceiverNotReady,
        Self::LinkDowned,
        Self::Symbol,
    ];

    /// The kernel's name for its counter, which is the label too (`Documentation/ABI/stable/sysfs-class-infiniband`; those in
    /// `hw_counters` are of NVIDIA's `mlx5` and not in every driver).
    pub const fn label(self) -> &'static str {
        match self {
            Self::AckTimeout => "local_ack_timeout_err",
            Self::OutOfSequence => "out_of_sequence",
            Self::PacketSequence => "packet_seq_err",
            Self::ReceiverNotReady => "rnr_nak_retry_err",
            Self::LinkDowned => "link_downed",
            Self::Symbol => "symbol_error",
        }
    }

    /// In words.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::AckTimeout => "the peer did not acknowledge in time",
            Self::OutOfSequence => "packets came out of order",
            Self::PacketSequence => "the peer missed packets",
            Self::ReceiverNotReady => "the peer had no buffer for too long",
            Self::LinkDowned => "the link went down",
            Self::Symbol => "bit errors on the link",
        }
    }

    /// Directory of its counter below the port's.
    pub(super) const fn directory(self) -> &'static str {
        match self {
            Self::LinkDowned | Self::Symbol => "counters",
            _ => "hw_counters",
        }
    }
}

/// Errors of a port, with the time in which they were counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Not before this.
    pub from: Mono,
    /// Not after this.
    pub to: Mono,
    /// Of which kind.
    pub what: Fault,
    /// How many.
    pub count: u64,
}

/// One RDMA port.
#[derive(Clone, Debug, Default)]
pub struct Port {
    /// What it moved.
    pub track: Track,
    /// Bytes since the agent started, out and in, of time that was read.
    pub moved: (u64, u64),
    /// Errors, oldest first.
    faults: VecDeque<Faults>,
}

impl Port {
    /// Errors of which some may have been from `from` to `to`, in order.
    pub fn faults(&self, from: Mono, to: Mono) -> impl Iterator<Item = Faults> + '_ {
        self.faults.iter().copied().filter(move |f| f.from <= to && f.to >= from)
    }

    fn fault(&mut self, fault: Faults) {
        if self.faults.len() >= MAX_FAULTS {
            self.faults.pop_front();
        }
        self.faults.push_back(fault);
    }
}

/// All ports, and the connections of all processes of engines.
#[derive(Clone, Debug, Default)]
pub struct Network {
    ports: BTreeMap<Arc<str>, Port>,
    processes: BTreeMap<u32, Track>,
    /// Bytes of all processes' connections since the agent started, out and in.
    carried: (u64, u64),
    turned_away: u64,
    disorder: u64,
}

impl Network {
    /// Takes a reading.
    pub fn take(&mut self, reading: &Reading) {
        match (&reading.of, &reading.what) {
            (Of::Port(name), what) => self.port(reading.at, name, what),
            (Of::Process(pid), What::Moved(stretch)) => self.process(*pid, *stretch),
            (Of::Process(_), What::Faults(..)) => {}
        }
    }

    fn port(&mut self, at: Mono, name: &str, what: &What) {
        if !self.ports.contains_key(name) {
            if self.ports.len() >= MAX_PORTS {
                self.turned_away += 1;
                return;
            }
            self.ports.insert(Arc::from(name), Port::default());
        }
        let Some(port) = self.ports.get_mut(name) else { return };
        match what {
            What::Moved(stretch) if port.track.moved(*stretch) => add(&mut port.moved, stretch),
            What::Moved(_) => self.disorder += 1,
            What::Faults(from, what, count) => {
                port.fault(Faults { from: *from, to: at, what: *what, count: *count });
            }
        }
    }

    fn process(&mut self, pid: u32, stretch: Stretch) {
        if self.processes.len() >= MAX_PROCESSES && !self.processes.contains_key(&pid) {
            // Whoever was read of least lately has ended, or carries nothing.
            let last = |track: &Track| track.last().map(|s| s.to);
            let oldest = self.processes.iter().min_by_key(|(_, track)| last(track)).map(|(pid, _)| *pid);
            oldest.map(|pid| self.processes.remove(&pid));
        }
        if self.processes.entry(pid).or_default().moved(stretch) {
            add(&mut self.carried, &stretch);
        } else {
            self.disorder += 1;
        }
    }

    /// Every port, by name.
    pub fn ports(&self) -> impl Iterator<Item = (&Arc<str>, &Port)> {
        self.ports.iter()
    }

    /// A port.
    pub fn port_named(&self, name: &str) -> Option<&Port> {
        self.ports.get(name)
    }

    /// What the connections of a process carried; `None`: none of it was ever read.
    pub fn of(&self, pid: u32) -> Option<&Track> {
        self.processes.get(&pid)
    }

    /// Bytes of all processes' connections, out and in, of time that was read; `None`: none was.
    pub fn carried(&self) -> Option<(u64, u64)> {
        (!self.processes.is_empty()).then_some(self.carried)
    }

    /// Whether nothing was ever read.
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty() && self.processes.is_empty()
    }

    /// Readings of ports beyond [`MAX_PORTS`].
    pub const fn turned_away(&self) -> u64 {
        self.turned_away
    }

    /// Readings that were not in order of time.
    pub const fn disorder(&self) -> u64 {
        self.disorder
    }
}

const fn add(sum: &mut (u64, u64), stretch: &Stretch) {
    sum.0 = sum.0.saturating_add(stretch.out);
    sum.1 = sum.1.saturating_add(stretch.into);
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;
    use crate::event::SECOND;
    use crate::gpu::windows::{Link, Source};

    fn at(s: u64) -> Mono {
        Mono(s * SECOND)
    }

    fn moved(link: Link, from: u64, to: u64, out: u64) -> What {
        What::Moved(Stretch { link, source: Source::Counters, from: at(from), to: at(to), out, into: 1 })
    }

    fn take(network: &mut Network, of: Of, to: u64, what: What) {
        network.take(&Reading { at: at(to), of, what });
    }

    #[test]
    fn a_port_and_the_connections_of_a_process_have_windows_of_their_own() {
        let mut network = Network::default();
        assert!(network.is_empty() && network.carried().is_none());
        for n in 0..4 {
            take(&mut network, Of::Port("a/1".into()), n + 1, moved(Link::Rdma, n, n + 1, 10));
            take(&mut network, Of::Process(7), n + 1, moved(Link::Tcp, n, n + 1, 3));
        }
        let window = network.port_named("a/1").unwrap().track.window(at(1), at(3)).unwrap();
        assert_eq!((window.link, window.out, window.into, window.coverage), (Link::Rdma, 20, 2, 1000));
        assert_eq!(network.of(7).unwrap().window(at(1), at(3)).unwrap().out, 6);
        assert_eq!((network.carried(), network.of(8).is_none()), (Some((12, 4)), true));
        take(&mut network, Of::Port("a/1".into()), 2, moved(Link::Rdma, 1, 2, 99));
        assert_eq!((network.disorder(), network.port_named("a/1").unwrap().moved.0), (1, 40));
    }

    #[test]
    fn errors_are_of_the_time_in_which_they_were_counted() {
        let mut network = Network::default();
        take(&mut network, Of::Port("a/1".into()), 5, What::Faults(at(4), Fault::AckTimeout, 3));
        let port = network.port_named("a/1").unwrap();
        assert_eq!(port.faults(at(0), at(4)).map(|f| f.count).sum::<u64>(), 3);
        assert_eq!((port.faults(at(0), at(3)).count(), port.faults(at(6), at(9)).count()), (0, 0));
    }

    #[test]
    fn everything_is_bounded() {
        let mut network = Network::default();
        for n in 0..100_u32 {
            let n = u64::from(n);
            take(&mut network, Of::Port(format!("a/{n}").into()), n + 1, moved(Link::Rdma, n, n + 1, 1));
            take(&mut network, Of::Process(u32::try_from(n).unwrap()), n + 1, moved(Link::Tcp, n, n + 1, 1));
            take(&mut network, Of::Port("a/0".into()), n, What::Faults(at(n), Fault::Symbol, 1));
        }
        assert_eq!((network.ports().count(), network.turned_away()), (MAX_PORTS, 100 - 64));
        assert_eq!(
            (network.processes.len(), network.of(99).is_some(), network.of(0).is_none()),
            (64, true, true)
        );
        assert_eq!(network.port_named("a/0").unwrap().faults.len(), MAX_FAULTS);
    }
}
