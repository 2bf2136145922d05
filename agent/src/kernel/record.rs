//! One record of the ring → one [`Event`]. Copies the head, borrows the bytes.
//!
//! Pure: no I/O, no clock. Any bytes give an event or `None`, never a panic.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use roomtrace_common::{Caller, END, RECORD, Record, direction, flag, kind, reason, trouble};

use crate::event::{
    Addresses, Body, Bytes, Carried, Comm, Direction, Event, Found, Mono, NotCaptured, Sequence, SocketEvent,
    SocketId, Stand, StateChange, Task, TaskChange, TaskEvent, TcpState, Trouble, What,
};

/// The event in `item`, or `None` when it is none that this version knows.
pub(super) fn decode(item: &[u8]) -> Option<Event<'_>> {
    let (head, rest) = item.split_at_checked(RECORD)?;
    let record = super::ring::record(head)?;
    let what = match record.kind {
        kind::BYTES => What::Bytes(bytes(&record, rest)?),
        kind::STATE => What::State(StateChange {
            old: TcpState::from_kernel(record.old),
            new: TcpState::from_kernel(record.new),
            error: record.error,
            sequence: sequence(&record),
        }),
        kind::FOUND => What::Found(Found {
            state: TcpState::from_kernel(record.old),
            sequence: sequence(&record),
            base: (record.flags & flag::BASE != 0).then_some((record.base[0], record.base[1])),
        }),
        kind::TROUBLE => What::Trouble(trouble(&record)?),
        kind::STAND => What::Stand(Stand {
            state: TcpState::from_kernel(record.old),
            sequence: sequence(&record),
            sent: record.end,
            retransmits: record.len,
        }),
        kind::EXIT => return Some(Event::Task(ended(&record))),
        kind::CARRIED => return Some(Event::Carried(carried(&record))),
        _ => return None,
    };
    Some(Event::Socket(SocketEvent {
        at: Mono(record.at),
        socket: SocketId(record.cookie),
        netns: record.ends.netns,
        addresses: Addresses {
            local: address(&record.ends.local, record.ends.local_port, record.flags),
            peer: address(&record.ends.peer, record.ends.peer_port, record.flags),
        },
        task: (record.flags & flag::TASK != 0).then_some(task(&record.caller)),
        what,
    }))
}

const fn task(caller: &Caller) -> Task {
    Task { tgid: caller.tgid, tid: caller.tid, comm: Comm(caller.comm), cgroup: caller.cgroup }
}

fn carried(record: &Record) -> Carried {
    let whole = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    Carried {
        at: Mono(record.at),
        socket: SocketId(record.cookie),
        process: record.caller.tgid,
        acked: whole(record.write_seq, record.snd_una),
        received: whole(record.copied_seq, record.rcv_nxt),
        opened: record.flags & flag::BASE != 0,
        closed: TcpState::from_kernel(record.new) == TcpState::Close,
    }
}

const fn ended(record: &Record) -> TaskEvent {
    TaskEvent {
        at: Mono(record.at),
        task: task(&record.caller),
        name: Comm(record.ends.local),
        what: TaskChange::Exited { code: record.error, process: record.new != 0 },
    }
}

const fn trouble(record: &Record) -> Option<Trouble> {
    Some(match record.old {
        trouble::RETRANSMITTED => Trouble::Retransmitted { una: record.snd_una, write: record.write_seq },
        trouble::RESET_SENT => Trouble::ResetSent,
        trouble::RESET_RECEIVED => Trouble::ResetReceived,
        _ => return None,
    })
}

fn bytes<'a>(record: &Record, rest: &'a [u8]) -> Option<Bytes<'a>> {
    let body = match not_captured(record.reason)? {
        Some(why) => Body::Absent(why),
        None if record.flags & flag::ENDS != 0 => ends(record, rest)?,
        None => Body::Whole(rest.get(..usize::try_from(record.len).ok()?)?),
    };
    Some(Bytes {
        direction: if record.direction == direction::SENT { Direction::Sent } else { Direction::Received },
        end: record.end,
        len: record.len,
        body,
        snd_una: record.snd_una,
        rcv_nxt: record.rcv_nxt,
    })
}

/// The two ends of a call whose middle is not there.
fn ends<'a>(record: &Record, rest: &'a [u8]) -> Option<Body<'a>> {
    let head = rest.get(..usize::from(record.head))?;
    let tail = match usize::from(record.tail) {
        0 => &[],
        len => rest.get(END..END.checked_add(len)?)?,
    };
    let together = u32::from(record.head).saturating_add(u32::from(record.tail));
    (head.len() <= END && together < record.len).then_some(Body::Ends { head, tail })
}

/// The outer `None`: a number that this version does not know.
#[allow(clippy::option_option, reason = "unknown, captured and absent are three different things")]
const fn not_captured(number: u8) -> Option<Option<NotCaptured>> {
    Some(Some(match number {
        reason::NONE => return Some(None),
        reason::TOO_LONG => NotCaptured::TooLong,
        reason::SYSCALL => NotCaptured::Syscall,
        reason::KERNEL_THREAD => NotCaptured::KernelThread,
        reason::OTHER_DESCRIPTOR => NotCaptured::OtherDescriptor,
        reason::FLAGS => NotCaptured::Flags,
        reason::VECTORS => NotCaptured::Vectors,
        reason::FAULT => NotCaptured::Fault,
        reason::BUDGET => NotCaptured::Budget,
        reason::MIDDLE => NotCaptured::Middle,
        _ => return None,
    }))
}

/// The reason with this number in the records and counters.
pub(super) const fn reason_of(number: u8) -> Option<NotCaptured> {
    match not_captured(number) {
        Some(why) => why,
        None => None,
    }
}

const fn sequence(record: &Record) -> Sequence {
    Sequence {
        write: record.write_seq,
        una: record.snd_una,
        copied: record.copied_seq,
        rcv_nxt: record.rcv_nxt,
    }
}

fn address(bytes: &[u8; 16], port: u16, flags: u8) -> SocketAddr {
    let ip = if flags & flag::V6 == 0 {
        let [a, b, c, d, ..] = *bytes;
        IpAddr::V4(Ipv4Addr::new(a, b, c, d))
    } else {
        Ipv6Addr::from(*bytes).to_canonical()
    };
    SocketAddr::new(ip, port)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

    use super::*;
    use proptest::prelude::*;

    fn raw(record: &Record, body: &[u8]) -> Vec<u8> {
        let mut out = crate::kernel::ring::bytes_of(record).to_vec();
        out.extend_from_slice(body);
        out
    }

    #[test]
    fn mapped_addresses_become_ipv4_and_listeners_keep_their_family() {
        let mapped = Ipv4Addr::new(10, 1, 2, 3).to_ipv6_mapped().octets();
        assert_eq!(address(&mapped, 7, flag::V6), "10.1.2.3:7".parse().unwrap());
        assert_eq!(address(&[0; 16], 0, flag::V6), "[::]:0".parse().unwrap());
        assert_eq!(address(&[0; 16], 0, 0), "0.0.0.0:0".parse().unwrap());
    }

    #[test]
    fn a_record_whose_body_is_shorter_than_its_length_is_no_event() {
        let record = Record { kind: kind::BYTES, len: 5, ..Record::default() };
        assert!(decode(&raw(&record, b"1234")).is_none());
        let item = raw(&record, b"12345---");
        let Event::Socket(SocketEvent { what: What::Bytes(bytes), .. }) = decode(&item).unwrap() else {
            panic!()
        };
        assert_eq!(bytes.body, Body::Whole(b"12345"));
    }

    #[test]
    fn the_halves_of_what_was_carried_are_put_together() {
        let caller = Caller { tgid: 7, ..Caller::default() };
        let record = Record {
            kind: kind::CARRIED,
            caller,
            write_seq: 5,
            snd_una: 1,
            rcv_nxt: 2,
            new: 7,
            ..Record::default()
        };
        let Some(Event::Carried(told)) = decode(&raw(&record, b"")) else { panic!() };
        assert_eq!((told.process, told.acked, told.received), (7, (1 << 32) + 5, 2 << 32));
        assert!(told.closed && !told.opened);
    }

    #[test]
    fn two_ends_are_no_more_than_the_record_says() {
        let body = [[b'h'; END], [b't'; END]].concat();
        let of = |len, head, tail, body: &[u8]| {
            let flags = flag::ENDS;
            let record = Record { kind: kind::BYTES, flags, len, head, tail, ..Record::default() };
            match decode(&raw(&record, body)) {
                Some(Event::Socket(SocketEvent { what: What::Bytes(bytes), .. })) => match bytes.body {
                    Body::Ends { head, tail } => Some((head.to_vec(), tail.to_vec())),
                    _ => panic!("no ends"),
                },
                _ => None,
            }
        };
        assert_eq!(of(3000, 1024, 1024, &body), Some((vec![b'h'; 1024], vec![b't'; 1024])));
        assert_eq!(of(3000, 5, 7, &body), Some((vec![b'h'; 5], vec![b't'; 7])));
        assert_eq!(of(3000, 5, 0, &body[..8]), Some((vec![b'h'; 5], Vec::new())));
        // Cut short, longer than an end, not shorter than the call.
        assert_eq!(of(3000, 1024, 1024, &body[..2047]), None);
        assert_eq!(of(3000, 1025, 1, &body), None);
        assert_eq!(of(12, 5, 7, &body), None);
    }

    #[test]
    fn an_unknown_trouble_is_no_event_and_the_known_ones_are_three() {
        let of = |old| {
            let record = Record { kind: kind::TROUBLE, old, snd_una: 5, write_seq: 9, ..Record::default() };
            match decode(&raw(&record, b"")) {
                Some(Event::Socket(SocketEvent { what: What::Trouble(t), .. })) => Some(t),
                _ => None,
            }
        };
        assert_eq!(of(trouble::RETRANSMITTED), Some(Trouble::Retransmitted { una: 5, write: 9 }));
        assert_eq!(of(trouble::RESET_SENT), Some(Trouble::ResetSent));
        assert_eq!(of(trouble::RESET_RECEIVED), Some(Trouble::ResetReceived));
        assert_eq!((of(0), of(4)), (None, None));
    }

    #[test]
    fn every_reason_of_the_programs_has_its_own_name() {
        let all: std::collections::BTreeSet<_> =
            (1..=reason::MIDDLE).map(|n| reason_of(n).unwrap()).collect();
        assert_eq!(all.len(), usize::from(reason::MIDDLE));
        assert!(reason_of(reason::MIDDLE + 1).is_none());
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(item in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = decode(&item);
        }
    }
}
