//! Packet captures as a source of [`SocketEvent`]s: pcap and pcapng files, any size, read once from front
//! to back.
//!
//! Does the file I/O of `replay` and nothing else: it owns no clock (time is the packets' own), it does not
//! judge what a connection carries, and it cannot panic on any file. Memory is bounded whatever the file
//! holds; what does not fit is counted in [`Summary`].
//!
//! # What a packet is evidence for
//!
//! A connection has two ends, and each gets a [`SocketId`](crate::event::SocketId) of its own. A segment shows
//! that the sender's socket accepted those bytes: [`Sent`](crate::event::Direction::Sent) there, in stream
//! order. An acknowledgement that covers them shows that the peer's *kernel* has them:
//! [`Received`](crate::event::Direction::Received) at the peer. No packet shows that a process read them. A
//! capture without acknowledgements for one direction therefore yields `Sent` alone.
//!
//! # Order
//!
//! `SocketEvent::at` never decreases: it is the time of the packet that let the event out, moved up to the
//! highest time stamp before it (files merged or captured on several queues step back; those packets are
//! counted in [`Summary::backwards`]). So the caller moves its clock to `event.at` before it handles the
//! event, and to [`Summary::last`] after the last one.

mod connection;
mod direction;
mod file;
mod link;
mod packet;
pub mod recorded;
mod table;
mod unacked;

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::event::{Mono, SocketEvent};

use self::file::{Capture, Record};
pub use self::link::{LinkType, LinkTypes, SUPPORTED};
use self::packet::{Skip, tcp_segment};
use self::table::Table;

/// Why a file cannot be replayed at all.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The file could not be opened.
    #[error("cannot open the capture {}: {source}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The path is a directory, a device or something else that holds no capture.
    #[error("{} is not a file: give the path of a pcap or pcapng file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// Reading failed; everything before `offset` was delivered.
    #[error("reading the capture failed at byte {offset}: {source}; everything before it was replayed")]
    Read {
        /// Bytes from the start of the file.
        offset: u64,
        /// What the system said.
        source: io::Error,
    },
    /// Nothing in it.
    #[error("the capture is empty (0 bytes): was the capturing program stopped before it wrote anything?")]
    Empty,
    /// Some other kind of file.
    #[error("not a packet capture: the file begins with {start}{hint}; pcap or pcapng is needed")]
    NotACapture {
        /// Its first bytes, in hexadecimal.
        start: String,
        /// What it looks like and what to do about it, or nothing.
        hint: &'static str,
    },
    /// The file ends within its header.
    #[error("the capture is cut short within its header, at byte {length}: no packet in it")]
    HeaderCut {
        /// Length of the file.
        length: u64,
    },
    /// Every packet of the file has a link layer that is not understood.
    #[error(
        "nothing in the capture can be read: its link type {0} is not supported ({supported} are): capture again on \
         another interface or with `-i any`", supported = SUPPORTED
    )]
    LinkType(LinkTypes),
}

/// Where and how a file stops making sense. Everything before that place was delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// The file ends within a packet or block: the capture was still being written, or was copied in part.
    #[error(
        "the capture is cut short: at byte {offset} begins a record of {need} bytes, but only {have} follow"
    )]
    CutShort {
        /// Where the incomplete record begins, bytes from the start of the file.
        offset: u64,
        /// How long it says it is (its header alone, if that is incomplete).
        need: u64,
        /// How many bytes of it are there.
        have: u64,
    },
    /// A record is longer than any packet can be.
    #[error(
        "the capture is damaged: the record at byte {offset} claims {length} bytes; nothing after it can be read"
    )]
    Length {
        /// Where the record begins, bytes from the start of the file.
        offset: u64,
        /// The length it claims.
        length: u64,
    },
    /// A pcapng block contradicts itself.
    #[error(
        "the capture is damaged: the block of type {kind:#x} at byte {offset} contradicts itself; nothing after it can be read"
    )]
    Block {
        /// Where the block begins, bytes from the start of the file.
        offset: u64,
        /// Its type number.
        kind: u32,
    },
}

impl Damage {
    /// Where it begins, in bytes from the start of the file.
    pub const fn offset(&self) -> u64 {
        match self {
            Self::CutShort { offset, .. } | Self::Length { offset, .. } | Self::Block { offset, .. } => {
                *offset
            }
        }
    }
}

/// Packets that gave no TCP segment, by reason. Counts of packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// ARP, LLDP and whatever else is not IPv4 or IPv6.
    pub not_ip: u64,
    /// IP, but not TCP (UDP, ICMP, tunnels).
    pub not_tcp: u64,
    /// Fragments of IP packets: they are not put together.
    pub fragments: u64,
    /// Cut by the snap length before the TCP header's end.
    pub cut_headers: u64,
    /// Headers that contradict themselves.
    pub malformed: u64,
    /// On a pcapng interface with a link type that is not understood, or with none at all.
    pub link_type: u64,
    /// With a pcapng time resolution finer than 2^-63 or 10^-19 s.
    pub time_resolution: u64,
}

/// What TCP reassembly had to leave out or give up. Counts since the start of the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Repairs {
    /// Segments, or fronts of segments, that were seen before.
    pub retransmitted: u64,
    /// Segments that came before their turn and were put in order.
    pub reordered: u64,
    /// Gaps that were given up: the capture lacks those bytes. Later stages see them by sequence numbers.
    pub holes: u64,
    /// Of those, gaps given up because a connection held as much as it may out of order.
    pub window_overflow: u64,
    /// Segments without all their bytes, because of the capture's snap length.
    pub snaplen: u64,
    /// Bytes known to have been received of which only the length was kept, because too much was
    /// unacknowledged at once.
    pub unacked_overflow: u64,
    /// Resets whose sequence number was outside the window: a kernel ignores them, so they are ignored.
    pub resets_ignored: u64,
}

/// What a replay read, kept and left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Packets in the file, up to damage.
    pub packets: u64,
    /// Bytes of the file that were read.
    pub bytes: u64,
    /// Time stamp of the first packet.
    pub first: Option<Mono>,
    /// Highest time stamp.
    pub last: Option<Mono>,
    /// TCP segments.
    pub segments: u64,
    /// Packets that gave no segment.
    pub skipped: Skipped,
    /// Reassembly.
    pub repairs: Repairs,
    /// Connections seen.
    pub connections: u64,
    /// Of those, connections that were already open when the capture began.
    pub found: u64,
    /// Connections forgotten because more than [`MAX_CONNECTIONS`] were there at once.
    pub evicted: u64,
    /// Packets whose time stamp was before an earlier packet's.
    pub backwards: u64,
    /// Packets without a time stamp of their own (pcapng simple packet blocks): they take the last one.
    pub untimed: u64,
    /// Where the file stops making sense, if it does.
    pub damage: Option<Damage>,
    /// Link types that are not understood.
    pub link_types: LinkTypes,
}

impl Summary {
    fn skip(&mut self, skip: Skip) {
        let s = &mut self.skipped;
        let counter = match skip {
            Skip::NotIp => &mut s.not_ip,
            Skip::NotTcp => &mut s.not_tcp,
            Skip::Fragment => &mut s.fragments,
            Skip::CutHeaders => &mut s.cut_headers,
            Skip::Malformed => &mut s.malformed,
            Skip::LinkType(link) => {
                if let Some(link) = link {
                    self.link_types.count(link);
                }
                &mut s.link_type
            }
            Skip::TimeResolution => &mut s.time_resolution,
        };
        *counter += 1;
    }
}

/// Most connections followed at once; the longest idle ones are forgotten for new ones.
pub const MAX_CONNECTIONS: usize = 32_768;

/// Whether there is more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A packet was replayed. The clock stands at this time (never before the last one's).
    Packet(Mono),
    /// The capture is finished, at its end or at damage ([`Summary::damage`]).
    End,
}

/// A capture being replayed.
#[derive(Debug)]
pub struct Replay<R = File> {
    capture: Capture<R>,
    table: Table,
    summary: Summary,
    ended: bool,
}

impl Replay<File> {
    /// Opens a pcap or pcapng file and reads its header.
    ///
    /// # Errors
    /// The file cannot be opened or read, is empty, is of another kind or has an unsupported link type.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, ReplayError> {
        let path = path.as_ref();
        let open = |source| ReplayError::Open { path: path.to_path_buf(), source };
        let file = File::open(path).map_err(open)?;
        if file.metadata().map_err(open)?.is_dir() {
            return Err(ReplayError::NotAFile { path: path.to_path_buf() });
        }
        Self::from_reader(file)
    }
}

impl<R: Read> Replay<R> {
    /// Reads the header of a capture that comes from anywhere. Reads in large pieces: no buffering is needed.
    ///
    /// # Errors
    /// Reading fails, or the bytes are not a capture with a supported link type.
    pub fn from_reader(reader: R) -> Result<Self, ReplayError> {
        let capture = Capture::open(reader)?;
        Ok(Self { capture, table: Table::default(), summary: Summary::default(), ended: false })
    }

    /// Replays one packet. A packet yields any number of events, also none.
    ///
    /// # Errors
    /// Reading the file failed, or all of it has link types that are not supported. Damage is no error: it ends the replay and stands in [`Summary::damage`].
    pub fn step(&mut self, sink: &mut impl FnMut(SocketEvent<'_>)) -> Result<Progress, ReplayError> {
        if self.ended {
            return Ok(Progress::End);
        }
        let record = match self.capture.next() {
            Ok(Some(record)) => record,
            Ok(None) => return self.end(None, sink),
            Err(file::Stop::Damage(damage)) => return self.end(Some(damage), sink),
            Err(file::Stop::Read { offset, source }) => {
                self.end(None, sink)?;
                return Err(ReplayError::Read { offset, source });
            }
        };
        self.summary.packets += 1;
        let now = clock(&mut self.summary, &record);
        match record.link.and_then(|link| tcp_segment(link, record.data, record.length)) {
            Ok(segment) => {
                self.summary.segments += 1;
                self.table.segment(now, &segment, &mut self.summary, sink);
            }
            Err(skip) => self.summary.skip(skip),
        }
        self.table.give_up_old_gaps(now, &mut self.summary, sink);
        Ok(Progress::Packet(now))
    }

    /// Replays the whole file.
    ///
    /// # Errors
    /// As [`step`](Self::step); what came before was delivered.
    pub fn run(&mut self, sink: &mut impl FnMut(SocketEvent<'_>)) -> Result<Summary, ReplayError> {
        while let Progress::Packet(_) = self.step(sink)? {}
        Ok(self.summary())
    }

    /// What was read so far.
    pub fn summary(&self) -> Summary {
        Summary { bytes: self.capture.offset(), ..self.summary }
    }

    fn end(
        &mut self,
        damage: Option<Damage>,
        sink: &mut impl FnMut(SocketEvent<'_>),
    ) -> Result<Progress, ReplayError> {
        self.ended = true;
        self.summary.damage = damage;
        let now = self.summary.last.unwrap_or_default();
        self.table.give_up_all_gaps(now, &mut self.summary, sink);
        let Summary { packets, skipped, link_types, .. } = self.summary;
        if skipped.link_type == packets && link_types != LinkTypes::default() {
            return Err(ReplayError::LinkType(link_types));
        }
        Ok(Progress::End)
    }
}

/// The replay's time at a packet: its own stamp, or the highest before it.
fn clock(summary: &mut Summary, record: &Record<'_>) -> Mono {
    let before = summary.last;
    let Some(stamp) = record.at else {
        summary.untimed += 1;
        return before.unwrap_or_default();
    };
    summary.first.get_or_insert(stamp);
    let now = before.map_or(stamp, |last| last.max(stamp));
    summary.backwards += u64::from(stamp < now);
    summary.last = Some(now);
    now
}
