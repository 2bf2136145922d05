//! Words for ended threads and processes and for TCP's own troubles.
//!
//! Pure. "The peer's kernel has it" is all that TCP says, never that the peer has read it.

use crate::event::Mono;
use crate::verdict::explain::{ago, named};
use crate::verdict::facts::{AgainFact, Facts, ForeignFact, ThreadFact, UnreadFact, Was};
use crate::verdict::model::Party;

/// What ended, lies unread, or stands still.
pub(crate) fn threads(f: &Facts, lines: &mut Vec<String>) {
    if let Some(t) = &f.thread {
        lines.push(format!("{}, {}", named_thread(t), ago(f, t.at)));
        if let Was::Reader(x) | Was::Status(x) = &t.was {
            let rank = if matches!(t.was, Was::Status(_)) { &f.decode } else { &f.prefill };
            lines.push(format!(
                "{} had come to {} from {}, {}",
                foreign_words(x),
                named(rank),
                x.peer,
                ago(f, x.at)
            ));
        }
        lines.push(reading(&t.was).to_owned());
    }
    lines.extend(f.in_transfer.map(|n| {
        format!("decode says that {n} requests wait in it for their KV (decode_transfer_queue_reqs), that STATUS having come")
    }));
    for (party, unread) in [(&f.prefill, f.unread_prefill), (&f.decode, f.unread_decode)] {
        lines.extend(unread.map(|u| not_read(f, party, u)));
    }
    if let Some(s) = f.stall.filter(|s| s.several && f.now.since(s.spoke) >= f.limits.ceiling) {
        let also = if s.aborts { " and acknowledgements of ABORT" } else { "" };
        lines.push(format!(
            "its process last sent anything {}, none of its threads was seen to end, and it owes {} rooms{also}",
            ago(f, s.spoke),
            s.rooms
        ));
    }
    let old = f.decode_wrote.filter(|at| f.now.since(*at) >= f.limits.ceiling);
    lines.extend(old.map(|at| {
        format!(
            "decode's HTTP server answers with numbers that its scheduler last wrote {}: it is in one long step, or stands",
            ago(f, at)
        )
    }));
    let old = f.wrote.filter(|at| f.stall.is_some() && f.now.since(*at) >= f.limits.ceiling);
    lines.extend(old.map(|at| {
        format!(
            "prefill's HTTP server answers with numbers that its scheduler last wrote {}: it is in one long step, or stands",
            ago(f, at)
        )
    }));
}

/// A thread that ended.
pub(crate) fn named_thread(t: &ThreadFact) -> String {
    let name = t.name.to_text();
    format!(
        "thread {} ({name}) of process {} ended ({}) while the process lives",
        t.tid,
        t.tgid,
        code(t.code)
    )
}

/// What it was, and from what that follows.
pub(crate) const fn reading(was: &Was) -> &'static str {
    match was {
        Was::Reader(_) => "it read for its rank: the rank has answered nothing that was asked of it since",
        Was::Status(_) => {
            "it took STATUS in for its rank: libzmq reads on and the kernel acknowledges, but no room whose STATUS came since \
             shows that it was taken in"
        }
        Was::Worker { answered: true } => {
            "it moved KV for this session: nothing of the session was answered since, other sessions of the rank were"
        }
        Was::Worker { answered: false } => {
            "it moved KV for this session: nothing of the session was answered since, and the rank still acknowledges ABORTs"
        }
        Was::Unknown { .. } => {
            "the rank has answered nothing since: which of its threads it was, the one that reads or one that moves KV, is \
             not known"
        }
    }
}

/// How a thread or a process ended (`wait(2)`).
pub(crate) fn code(code: u32) -> String {
    match (code & 0x7f, code >> 8) {
        (0, 0) => "returned".to_owned(),
        (0, status) => format!("status {status}"),
        (signal, _) => format!("signal {signal}"),
    }
}

/// A message that no rank sends.
pub(crate) fn foreign_words(x: &ForeignFact) -> String {
    if x.unsure {
        return "an ABORT, of which the receive loop of NIXL 0.5.13–0.5.15 dies (sglang#30352): whether this is one of these its \
                messages do not tell, and the engine does not say it,"
            .to_owned();
    }
    if x.abort {
        return "an ABORT, of which the receive loop of NIXL 0.5.13–0.5.15 dies (sglang#30352),".to_owned();
    }
    if x.frames == 0 {
        return "bytes that are not ZMTP".to_owned();
    }
    format!("a message of no known kind with {} frames, the first of {} bytes,", x.frames, x.first_len)
}

/// A message that the peer's kernel had not taken when that was last read.
pub(crate) fn not_acknowledged(
    f: &Facts,
    what: &str,
    (sent, read): (Mono, Mono),
    again: Option<AgainFact>,
) -> String {
    let again = match again {
        Some(a) if a.count == 1 => format!(" (1 retransmission, {})", ago(f, a.since)),
        Some(a) => {
            let last = f.moment(a.last[0].max(a.since));
            format!(" ({} retransmissions, the first {}, the last at {last})", a.count, ago(f, a.since))
        }
        None => String::new(),
    };
    let (sent, read) = (f.moment(sent), f.moment(read));
    format!("the peer's kernel has not acknowledged the {what} sent at {sent}{again}, as of {read}")
}

fn not_read(f: &Facts, party: &Party, u: UnreadFact) -> String {
    let n = u.sockets;
    let sockets = if n == 1 {
        "on one socket of its process".to_owned()
    } else {
        format!("on {n} sockets of its process")
    };
    format!(
        "{} does not read: {} bytes lie in this host's kernel, {sockets}, {}",
        named(party),
        u.bytes,
        since(f, u.since)
    )
}

fn since(f: &Facts, at: Mono) -> String {
    format!("seen first {}", ago(f, at))
}
