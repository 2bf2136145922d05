//! The capture file itself: finds each packet's bytes, time and link layer. Reads forward through one
//! buffer; never seeks, so a pipe will do.
//!
//! Framing by `pcap-parser`. Lengths are checked here before any of them is believed.

use std::io::{self, Read};

use pcap_parser::nom::IResult;
use pcap_parser::{
    EPB_MAGIC, IDB_MAGIC, InterfaceDescriptionBlock, LegacyPcapBlock, OptionCode, PcapError, SHB_MAGIC,
    SPB_MAGIC, parse_enhancedpacketblock_be, parse_enhancedpacketblock_le,
    parse_interfacedescriptionblock_be, parse_interfacedescriptionblock_le, parse_pcap_frame,
    parse_pcap_frame_be, parse_pcap_frame_modified, parse_pcap_header, parse_simplepacketblock_be,
    parse_simplepacketblock_le,
};

use super::link::{Link, LinkType, LinkTypes};
use super::packet::Skip;
use super::{Damage, ReplayError};
use crate::event::{Mono, SECOND};

/// Read from the file in pieces of this many bytes.
const READ: usize = 256 * 1024;

/// Longest packet or block that is believed, in bytes. The largest packets a Linux capture holds are BIG TCP's of 512 KiB
/// (`GSO_MAX_SIZE`, 8 × 65 535, in `include/linux/netdevice.h`); the rest leaves room for options.
const MAX_RECORD: usize = 1 << 20;

/// Most interfaces remembered per pcapng section (each takes some bytes; a file has a handful).
const MAX_INTERFACES: usize = 4096;

/// Length of a classic pcap file's header.
const PCAP_HEADER: usize = 24;

/// `pcapng`: length of a block's type and length fields, and least length of a block.
const BLOCK_HEADER: usize = 8;
const BLOCK_MIN: u64 = 12;

/// One packet as the file holds it.
#[derive(Debug)]
pub(super) struct Record<'a> {
    /// Its time stamp, if it has one.
    pub(super) at: Option<Mono>,
    /// Its link layer, or why that is of no use.
    pub(super) link: Result<Link, Skip>,
    /// What was captured of it.
    pub(super) data: &'a [u8],
    /// How long it was.
    pub(super) length: usize,
}

/// Why there is no next packet.
#[derive(Debug)]
pub(super) enum Stop {
    /// The file makes no sense from here on.
    Damage(Damage),
    /// Reading failed.
    Read { offset: u64, source: io::Error },
}

/// An open capture, behind its header.
#[derive(Debug)]
pub(super) struct Capture<R> {
    input: Input<R>,
    format: Format,
}

#[derive(Debug)]
enum Format {
    Pcap(Pcap),
    PcapNg(PcapNg),
}

type Frame = fn(&[u8]) -> IResult<&[u8], LegacyPcapBlock<'_>, PcapError<&[u8]>>;

#[derive(Debug)]
struct Pcap {
    link: Link,
    /// Nanoseconds of one unit of the fraction.
    unit: u64,
    big_endian: bool,
    header: usize,
    frame: Frame,
}

#[derive(Debug, Default)]
struct PcapNg {
    big_endian: bool,
    interfaces: Vec<Interface>,
}

#[derive(Clone, Copy, Debug)]
struct Interface {
    link: Result<Link, Skip>,
    snaplen: u32,
    clock: Clock,
}

/// How a pcapng time stamp counts.
#[derive(Clone, Copy, Debug)]
struct Clock {
    /// Ticks per second.
    rate: u64,
    /// Added to every stamp, in seconds.
    offset: i64,
}

impl<R: Read> Capture<R> {
    pub(super) fn open(reader: R) -> Result<Self, ReplayError> {
        let mut input = Input { reader, buffer: Vec::new(), start: 0, offset: 0 };
        let read = |stop| match stop {
            Stop::Read { offset, source } => ReplayError::Read { offset, source },
            Stop::Damage(_) => ReplayError::Empty,
        };
        let have = input.fill(PCAP_HEADER).map_err(read)?;
        let head = input.data();
        if head.is_empty() {
            return Err(ReplayError::Empty);
        }
        if head.starts_with(&SHB_MAGIC.to_le_bytes()) {
            if have < PCAP_HEADER {
                return Err(ReplayError::HeaderCut { length: have as u64 });
            }
            return Ok(Self { input, format: Format::PcapNg(PcapNg::default()) });
        }
        let header = match parse_pcap_header(head) {
            Ok((_, header)) => header,
            Err(pcap_parser::nom::Err::Incomplete(_)) if looks_like_a_capture(head) => {
                return Err(ReplayError::HeaderCut { length: have as u64 });
            }
            Err(_) => return Err(not_a_capture(head)),
        };
        // The upper bits say whether a frame check sequence follows each frame (libpcap: LT_LINKTYPE).
        let number = u32::from_ne_bytes(header.network.0.to_ne_bytes()) & 0x03ff_ffff;
        let link = Link::from_number(number)
            .ok_or_else(|| ReplayError::LinkType(LinkTypes::only(LinkType(number))))?;
        let big_endian = header.is_bigendian();
        let (frame, header_len): (Frame, usize) = match (header.is_modified_format(), big_endian) {
            (true, _) => (parse_pcap_frame_modified, 24),
            (false, true) => (parse_pcap_frame_be, 16),
            (false, false) => (parse_pcap_frame, 16),
        };
        let unit = if header.is_nanosecond_precision() { 1 } else { 1_000 };
        input.consume(PCAP_HEADER);
        Ok(Self { input, format: Format::Pcap(Pcap { link, unit, big_endian, header: header_len, frame }) })
    }

    /// The next packet, `None` at the end of the file.
    pub(super) fn next(&mut self) -> Result<Option<Record<'_>>, Stop> {
        match &mut self.format {
            Format::Pcap(pcap) => pcap.next(&mut self.input),
            Format::PcapNg(pcapng) => pcapng.next(&mut self.input),
        }
    }

    /// Bytes of the file consumed so far.
    pub(super) fn offset(&self) -> u64 {
        self.input.offset
    }
}

impl Pcap {
    fn next<'a, R: Read>(&self, input: &'a mut Input<R>) -> Result<Option<Record<'a>>, Stop> {
        if input.at_end()? {
            return Ok(None);
        }
        let offset = input.offset;
        input.need(self.header, self.header as u64)?;
        let captured = u32_at(input.data(), 8, self.big_endian) as usize;
        if captured > MAX_RECORD {
            return Err(Stop::Damage(Damage::Length { offset, length: captured as u64 }));
        }
        let whole = self.header + captured;
        input.need(whole, whole as u64)?;
        let (_, frame) = (self.frame)(input.take(whole))
            .map_err(|_| Stop::Damage(Damage::Length { offset, length: captured as u64 }))?;
        let at = u64::from(frame.ts_sec) * SECOND + u64::from(frame.ts_usec) * self.unit;
        Ok(Some(Record {
            at: Some(Mono(at)),
            link: Ok(self.link),
            data: frame.data,
            length: (frame.origlen as usize).max(frame.data.len()),
        }))
    }
}

impl PcapNg {
    fn next<'a, R: Read>(&mut self, input: &'a mut Input<R>) -> Result<Option<Record<'a>>, Stop> {
        loop {
            if input.at_end()? {
                return Ok(None);
            }
            let offset = input.offset;
            let (kind, length) = self.block(input)?;
            if !matches!(kind, SHB_MAGIC | IDB_MAGIC | EPB_MAGIC | SPB_MAGIC) {
                input.skip(length)?;
                continue;
            }
            let whole = usize::try_from(length)
                .ok()
                .filter(|n| *n <= MAX_RECORD)
                .ok_or(Stop::Damage(Damage::Length { offset, length }))?;
            input.need(whole, length)?;
            let broken = Stop::Damage(Damage::Block { offset, kind });
            match kind {
                SHB_MAGIC => {
                    input.consume(whole);
                    self.interfaces.clear();
                }
                IDB_MAGIC => {
                    let Some(interface) = self.interface(input.take(whole)) else { return Err(broken) };
                    if self.interfaces.len() < MAX_INTERFACES {
                        self.interfaces.push(interface);
                    }
                }
                EPB_MAGIC => return self.enhanced(input.take(whole)).map(Some).ok_or(broken),
                _ => return self.simple(input.take(whole)).map(Some).ok_or(broken),
            }
        }
    }

    /// Type and length of the block that begins here; a section header sets the byte order.
    fn block<R: Read>(&mut self, input: &mut Input<R>) -> Result<(u32, u64), Stop> {
        let offset = input.offset;
        input.need(BLOCK_HEADER, BLOCK_MIN)?;
        if input.data().starts_with(&SHB_MAGIC.to_le_bytes()) {
            input.need(12, 28)?;
            self.big_endian = match input.data().get(8..12) {
                Some([0x1a, 0x2b, 0x3c, 0x4d]) => true,
                Some([0x4d, 0x3c, 0x2b, 0x1a]) => false,
                _ => return Err(Stop::Damage(Damage::Block { offset, kind: SHB_MAGIC })),
            };
        }
        let kind = u32_at(input.data(), 0, self.big_endian);
        let length = u64::from(u32_at(input.data(), 4, self.big_endian));
        if length < BLOCK_MIN || length % 4 != 0 {
            return Err(Stop::Damage(Damage::Length { offset, length }));
        }
        Ok((kind, length))
    }

    fn interface(&self, block: &[u8]) -> Option<Interface> {
        let parse = if self.big_endian {
            parse_interfacedescriptionblock_be
        } else {
            parse_interfacedescriptionblock_le
        };
        let (_, idb) = parse(block).ok()?;
        let number = u32::try_from(idb.linktype.0).ok()?;
        let clock = Clock::of(&idb, self.big_endian);
        let link = Link::from_number(number).ok_or(Skip::LinkType(Some(LinkType(number))));
        Some(Interface {
            link: link.and_then(|link| clock.map(|_| link).ok_or(Skip::TimeResolution)),
            snaplen: idb.snaplen,
            clock: clock.unwrap_or(Clock { rate: 1_000_000, offset: 0 }),
        })
    }

    fn enhanced<'a>(&self, block: &'a [u8]) -> Option<Record<'a>> {
        let parse = if self.big_endian { parse_enhancedpacketblock_be } else { parse_enhancedpacketblock_le };
        let (_, epb) = parse(block).ok()?;
        let data = epb.data.get(..epb.caplen as usize)?;
        let ticks = u64::from(epb.ts_high) << 32 | u64::from(epb.ts_low);
        let interface = self.interfaces.get(epb.if_id as usize);
        Some(Record {
            at: interface.filter(|i| i.link != Err(Skip::TimeResolution)).map(|i| i.clock.at(ticks)),
            link: interface.map_or(Err(Skip::LinkType(None)), |i| i.link),
            data,
            length: (epb.origlen as usize).max(data.len()),
        })
    }

    fn simple<'a>(&self, block: &'a [u8]) -> Option<Record<'a>> {
        let parse = if self.big_endian { parse_simplepacketblock_be } else { parse_simplepacketblock_le };
        let (_, spb) = parse(block).ok()?;
        let interface = self.interfaces.first();
        // The captured length is not in the block: it is the packet's, cut to the interface's snap length.
        let snaplen = interface.map_or(0, |i| i.snaplen);
        let captured = if snaplen == 0 { spb.origlen } else { spb.origlen.min(snaplen) };
        let data = spb.data.get(..captured as usize).unwrap_or(spb.data);
        Some(Record {
            at: None,
            link: interface.map_or(Err(Skip::LinkType(None)), |i| i.link),
            data,
            length: (spb.origlen as usize).max(data.len()),
        })
    }
}

impl Clock {
    /// From an interface's options; `None` where the resolution is finer than 64 bits can hold.
    ///
    /// Read here and not by `pcap-parser` (0.17), which takes big-endian offsets for little-endian ones and refuses
    /// resolutions that are powers of two.
    fn of(idb: &InterfaceDescriptionBlock<'_>, big_endian: bool) -> Option<Self> {
        let option = |code| idb.options.iter().find(|o| o.code == code).and_then(|o| o.as_bytes().ok());
        let rate = match option(OptionCode::IfTsresol).and_then(|v| v.first().copied()) {
            None => 1_000_000,
            Some(n) if n & 0x80 == 0 => 10_u64.checked_pow(u32::from(n))?,
            Some(n) => 1_u64.checked_shl(u32::from(n & 0x7f))?,
        };
        let offset =
            option(OptionCode::IfTsoffset).and_then(|v| v.first_chunk::<8>().copied()).unwrap_or_default();
        let offset = if big_endian { i64::from_be_bytes(offset) } else { i64::from_le_bytes(offset) };
        Some(Self { rate, offset })
    }

    /// Nanoseconds since the epoch, saturating.
    fn at(self, ticks: u64) -> Mono {
        let nanos = u128::from(ticks) * u128::from(SECOND) / u128::from(self.rate.max(1));
        let nanos = i128::try_from(nanos).unwrap_or(i128::MAX);
        let nanos = nanos.saturating_add(i128::from(self.offset) * i128::from(SECOND));
        Mono(u64::try_from(nanos.max(0)).unwrap_or(u64::MAX))
    }
}

/// The bytes of the file, through one buffer.
#[derive(Debug)]
struct Input<R> {
    reader: R,
    buffer: Vec<u8>,
    /// Bytes at the front of `buffer` that are consumed.
    start: usize,
    /// Where in the file `buffer[start..]` begins.
    offset: u64,
}

impl<R: Read> Input<R> {
    fn data(&self) -> &[u8] {
        self.buffer.get(self.start..).unwrap_or_default()
    }

    fn consume(&mut self, n: usize) {
        let n = n.min(self.buffer.len() - self.start);
        self.start += n;
        self.offset += n as u64;
    }

    /// The next `n` bytes (fewer only if [`Input::need`] did not ask for them), consumed.
    fn take(&mut self, n: usize) -> &[u8] {
        let from = self.start;
        self.consume(n);
        self.buffer.get(from..self.start).unwrap_or_default()
    }

    /// Reads until `n` bytes are there or the file ends; how many are there.
    fn fill(&mut self, n: usize) -> Result<usize, Stop> {
        if self.data().len() < n {
            self.buffer.drain(..self.start);
            self.start = 0;
            let missing = n - self.buffer.len();
            let before = self.buffer.len();
            // `take` keeps this to one buffer; `read_to_end` retries interrupted reads and keeps what came
            // before an error.
            let limit = missing.max(READ) as u64;
            if let Err(source) = Read::take(&mut self.reader, limit).read_to_end(&mut self.buffer) {
                let offset = self.offset + self.buffer.len() as u64;
                if self.buffer.len() == before {
                    return Err(Stop::Read { offset, source });
                }
            }
        }
        Ok(self.data().len())
    }

    /// Sees to it that `n` bytes are there, of a record of `length` bytes.
    fn need(&mut self, n: usize, length: u64) -> Result<(), Stop> {
        let have = self.fill(n)?;
        if have < n {
            return Err(Stop::Damage(Damage::CutShort {
                offset: self.offset,
                need: length,
                have: have as u64,
            }));
        }
        Ok(())
    }

    fn at_end(&mut self) -> Result<bool, Stop> {
        Ok(self.fill(1)? == 0)
    }

    /// Consumes a record of `length` bytes without holding it.
    fn skip(&mut self, length: u64) -> Result<(), Stop> {
        let offset = self.offset;
        let mut left = length;
        while left > 0 {
            let have = self.fill(1)?;
            if have == 0 {
                let have = length - left;
                return Err(Stop::Damage(Damage::CutShort { offset, need: length, have }));
            }
            let n = usize::try_from(left).unwrap_or(usize::MAX).min(have);
            self.consume(n);
            left -= n as u64;
        }
        Ok(())
    }
}

fn u32_at(data: &[u8], at: usize, big_endian: bool) -> u32 {
    let bytes = data.get(at..).and_then(|d| d.first_chunk::<4>().copied()).unwrap_or_default();
    if big_endian { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) }
}

/// Whether the file begins as a capture does, as far as it goes.
fn looks_like_a_capture(head: &[u8]) -> bool {
    const MAGICS: [u32; 6] = [SHB_MAGIC, 0xa1b2_c3d4, 0xa1b2_3c4d, 0xa1b2_cd34, 0xd4c3_b2a1, 0x4d3c_b2a1];
    MAGICS.iter().any(|m| m.to_le_bytes().iter().zip(head).all(|(a, b)| a == b))
}

/// Names the kinds of file that are most often given by mistake.
fn not_a_capture(head: &[u8]) -> ReplayError {
    const KINDS: [(&[u8], &str); 8] = [
        (&[0x1f, 0x8b], ", a gzip file: decompress it first (`gunzip`)"),
        (&[0x28, 0xb5, 0x2f, 0xfd], ", a zstd file: decompress it first (`unzstd`)"),
        (&[0xfd, b'7', b'z', b'X', b'Z'], ", an xz file: decompress it first (`unxz`)"),
        (b"BZh", ", a bzip2 file: decompress it first (`bunzip2`)"),
        (&[0x04, 0x22, 0x4d, 0x18], ", an lz4 file: decompress it first (`unlz4`)"),
        (b"PK", ", a zip archive: unpack it first"),
        (b"snoop\0", ", a snoop file: convert it (`editcap -F pcapng`)"),
        (b"{", ", which looks like JSON"),
    ];
    let hint = KINDS.iter().find(|(magic, _)| head.starts_with(magic)).map_or("", |(_, hint)| hint);
    let start: Vec<String> = head.iter().take(8).map(|b| format!("{b:02x}")).collect();
    ReplayError::NotACapture { start: start.join(" "), hint }
}
