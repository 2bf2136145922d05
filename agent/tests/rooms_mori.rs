//! Life cycles of rooms on mori: frames as its releases send them, through the decoder and into the rooms.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, clippy::panic, reason = "tests")]
#![allow(
    clippy::many_single_char_names,
    reason = "decode ranks, prefill ranks, worlds, as in the other tests"
)]

mod rooms_support;
use std::fmt::Write as _;

use rooms_support::*;
use roomtrace::event::{Direction, TcpState};
use roomtrace::rooms::Config;
use roomtrace::rooms::model::{Outcome, Phase, Role};
use roomtrace::sglang;
use roomtrace::sglang::message::{Backend, Kind, KvPoll, Release};
use roomtrace::verdict::model::{Class, Confidence};
use roomtrace::zmtp::{BYTES_KEPT, FrameMeta, Multipart};

const ROOM: u64 = 9_000_000_000_000_000_001;

/// Releases with layouts of their own, oldest first.
const RELEASES: [Release; 6] = [r(5, 9), r(5, 12), r(5, 13), r(5, 14), r(5, 22), r(5, 23)];
/// Drops ABORT.
const OLD: Release = r(5, 13);
/// May or may not drop ABORT: its messages do not tell.
const OPEN: Release = r(5, 20);
/// Acts on ABORT and acknowledges it.
const NEW: Release = r(5, 23);

/// What must never be seen outside the decoder.
const PAGE: u32 = 0x5ec2_e7a1;
const POINTER: u64 = 0x7fa1_5ec2_e7b2_0000;
const TEXT: &[u8] = b"NeverToBeSeen";

type Frames = Vec<Vec<u8>>;

#[allow(clippy::needless_pass_by_value, reason = "numbers")]
fn text(n: impl ToString) -> Vec<u8> {
    n.to_string().into_bytes()
}

/// msgpack: a string of up to 255 bytes.
fn packed_text(s: &str) -> Vec<u8> {
    [&[0xd9, u8::try_from(s.len()).unwrap()], s.as_bytes()].concat()
}

/// `EngineDesc.pack()`: key, host name, host, port; later releases of mori have a node before and a pid behind.
fn engine(d: &Rank, release: Release) -> Vec<u8> {
    let newer = release >= r(5, 14);
    let mut out = vec![if newer { 0x96 } else { 0x94 }];
    out.extend(packed_text(&d.session));
    if newer {
        out.extend(packed_text("node"));
    }
    out.extend(packed_text("host"));
    out.extend(packed_text(&d.endpoint.ip().to_string()));
    out.extend([0xcd, 0x1f, 0x90]);
    if newer {
        out.extend([0xcd, 0x10, 0x92]);
    }
    out
}

/// Memory descriptors as binaries in an array, each with a pointer and a text.
fn memory(n: u8) -> Vec<u8> {
    let one = [&[0xcf], &POINTER.to_be_bytes()[..], TEXT].concat();
    let item = [&[0xc4, u8::try_from(one.len()).unwrap()], &one[..]].concat();
    [&[0x90 | n], &item.repeat(usize::from(n))[..]].concat()
}

/// `pack_int_lists` of one list.
fn packed(list: &[u32]) -> Vec<u8> {
    let len = u32::try_from(4 * list.len()).unwrap();
    [1, len].iter().chain(list).flat_map(|n| n.to_le_bytes()).collect()
}

fn plain(list: &[u32]) -> Vec<u8> {
    list.iter().flat_map(|n| n.to_le_bytes()).collect()
}

fn head(second: Vec<u8>, d: &Rank) -> Frames {
    let (ip, port) = (d.endpoint.ip(), d.endpoint.port());
    vec![b"MoriMsgGuard".to_vec(), second, text(ip), text(port)]
}

fn register(d: &Rank, release: Release) -> Frames {
    let mut f = head(b"None".to_vec(), d);
    f.extend([engine(d, release), memory(4), memory(2), memory(1)]);
    f.extend([text(0), text(d.size), text(d.number), text(131_072)]);
    match release.parts[2] {
        9..=11 => {}
        12 => f.extend([plain(&[4096]), plain(&[8])]),
        _ => f.extend([packed(&[4096]), packed(&[8])]),
    }
    if release >= r(5, 22) {
        f.extend([text(1), text(0), packed(&[0, 1]), plain(&[0, 1])]);
    }
    f
}

/// What a METADATA asks for.
#[derive(Clone, Copy)]
struct Ask {
    pages: u32,
    dummy: bool,
    required: u32,
    prefix: u32,
}

fn metadata(room: u64, d: &Rank, ask: Ask, release: Release) -> Frames {
    let state: &[u32] = &[PAGE, PAGE + 1];
    let mut f = head(text(room), d);
    f.push(text(&d.session));
    f.push(if ask.dummy { vec![] } else { plain(&vec![PAGE; ask.pages as usize]) });
    f.push(if ask.dummy { vec![] } else { text(room % 1000) });
    f.push(match release.parts[2] {
        _ if ask.dummy => vec![],
        9..=11 => vec![],
        12 => plain(state),
        _ => packed(state),
    });
    f.push(text(ask.required));
    if release >= r(5, 14) {
        f.push(if ask.prefix == 0 { vec![] } else { text(ask.prefix) });
    }
    f
}

fn status(room: u64, p: &Rank, status: KvPoll, reason: &str) -> Frames {
    let guard = b"MoriMsgGuard".to_vec();
    vec![guard, text(room), text(status as u8), text(p.number), reason.as_bytes().to_vec()]
}

fn aux_data(room: u64, buffer: u32) -> Frames {
    let data = TEXT.repeat(30);
    let len = u32::try_from(data.len()).unwrap().to_be_bytes();
    vec![b"AUX_DATA".to_vec(), text(room), text(buffer), text(room % 1000), len.to_vec(), data]
}

/// A world whose messages are frames of one release of mori.
struct Mori {
    w: World,
    release: Release,
    /// Everything that came out of the decoder, in words.
    decoded: String,
}

fn mori_decode(n: u8, size: u32) -> Rank {
    let mut d = decode_of(n, size);
    d.session = format!("io-decode-dp0-tp{n}-pid{}-{}-a1b2c3d4", d.pid, d.endpoint.ip());
    d
}

impl Mori {
    fn new(sees: Sees, release: Release) -> Self {
        Self { w: World::with(sees, MORI_OLD, Config::default()), release, decoded: String::new() }
    }

    fn put(&mut self, from: &Rank, to: &Rank, frames: &Frames, arrives: bool) {
        let (mut store, mut metas) = (Vec::new(), Vec::new());
        for f in frames {
            let kept = f.len().min(BYTES_KEPT);
            metas.push(FrameMeta {
                at: u32::try_from(store.len()).unwrap(),
                kept: u16::try_from(kept).unwrap(),
                len: u64::try_from(f.len()).unwrap(),
            });
            store.extend_from_slice(&f[..kept]);
        }
        let parts = Multipart::new(&store, &metas, u32::try_from(frames.len()).unwrap());
        let decoded = sglang::decode(&parts).unwrap_or_else(|e| panic!("{e:?}: {frames:?}"));
        assert_eq!(decoded.extra_frames, 0, "{decoded:?}");
        if decoded.backend != Backend::Shared {
            assert_eq!(decoded.backend, Backend::Mori);
            let (min, max) = (decoded.releases.min, decoded.releases.max);
            assert!(min <= self.release && self.release <= max, "{decoded:?}");
        }
        writeln!(self.decoded, "{decoded:?}").unwrap();
        self.w.deliver(from, to, &decoded, arrives);
    }

    fn register(&mut self, d: &Rank, p: &Rank) {
        self.put(d, p, &register(d, self.release), true);
    }

    fn ask(&mut self, room: u64, d: &Rank, p: &Rank, dummy: bool) {
        let ask = Ask { pages: 8, dummy, required: d.size, prefix: 0 };
        self.put(d, p, &metadata(room, d, ask, self.release), true);
    }

    fn metadata(&mut self, room: u64, d: &Rank, p: &Rank) {
        self.ask(room, d, p, false);
    }

    fn aux(&mut self, room: u64, p: &Rank, d: &Rank) {
        for buffer in 0..2 {
            self.put(p, d, &aux_data(room, buffer), true);
        }
    }

    fn status(&mut self, room: u64, p: &Rank, d: &Rank, s: KvPoll) {
        self.put(p, d, &status(room, p, s, ""), true);
    }

    fn healthy(&mut self, room: u64, d: &Rank, p: &Rank) {
        self.metadata(room, d, p);
        self.w.wait(20);
        self.aux(room, p, d);
        self.status(room, p, d, KvPoll::Success);
    }
}

/// One rank on each side that has introduced itself.
fn pair(sees: Sees, release: Release) -> (Mori, Rank, Rank) {
    let (d, p) = (mori_decode(0, 1), prefill(0));
    let mut m = Mori::new(sees, release);
    m.register(&d, &p);
    (m, d, p)
}

const VANTAGES: [Sees; 3] = [Sees::Prefill, Sees::Decode, Sees::Both];

#[test]
fn a_healthy_room_of_every_release_from_every_side() {
    for release in RELEASES {
        for sees in VANTAGES {
            let (mut m, d, p) = pair(sees, release);
            m.healthy(ROOM, &d, &p);
            m.w.to(60_000);
            assert_eq!(m.w.names(ROOM), ["room_closed"], "{release:?} {sees:?}");
            assert_eq!(m.w.outcomes(ROOM), [Outcome::Success]);
            let s = m.w.last(ROOM);
            assert_eq!(s.backend, Some(Backend::Mori));
            let releases = s.releases.unwrap();
            assert!(releases.min <= release && release <= releases.max);
            let view = if sees == Sees::Decode { s.decode } else { s.prefill }.unwrap();
            assert_eq!((view.got, view.required), (1, Some(1)));
            assert_eq!(view.sessions.iter().map(|s| &**s).collect::<Vec<_>>(), [&*d.session]);
            let kinds: Vec<_> = s.messages.iter().map(|m| m.kind).collect();
            assert!(kinds.contains(&Kind::AuxData) && kinds.contains(&Kind::Status));
        }
    }
}

#[test]
fn a_failure_is_told_with_its_reason() {
    for sees in VANTAGES {
        let (mut m, d, p) = pair(sees, NEW);
        m.metadata(ROOM, &d, &p);
        m.put(&p, &d, &status(ROOM, &p, KvPoll::Failed, "KV transfer exceeded SLA 1000ms"), true);
        m.w.wait(2000);
        assert_eq!(m.w.outcomes(ROOM), [Outcome::Failed]);
        assert!(m.decoded.contains("exceeded SLA"));
    }
}

#[test]
fn a_room_that_is_never_answered() {
    for release in RELEASES {
        let (mut m, d, p) = pair(Sees::Prefill, release);
        m.metadata(ROOM, &d, &p);
        m.w.to(1);
        let v = m.w.pinned_in_time(ROOM, 0.0, 10.0);
        assert_eq!((v.class, v.confidence), (Class::TransferNotConcluded, Confidence::Possible));
        assert_eq!(m.w.last(ROOM).prefill.unwrap().phase, Phase::Transfer);
        let classes = readings(&v);
        assert!(classes.contains(&Class::TransferWorkerSilent));
        assert!(!classes.contains(&Class::ReceiverSilent), "its receive loop does not die");
    }
    let (mut m, d, p) = pair(Sees::Decode, NEW);
    m.metadata(ROOM, &d, &p);
    let v = m.w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!(v.class, Class::AwaitingPrefill);
}

#[test]
fn abort_before_entry() {
    for sees in VANTAGES {
        let (mut m, d, p) = pair(sees, NEW);
        m.w.abort(ROOM, &d, &p, None);
        let v = m.w.pinned_in_time(ROOM, 0.0, 10.0);
        assert_eq!((v.class, v.confidence), (Class::AbortBeforeEntry, Confidence::Possible));
        assert_eq!(v.owed_by.unwrap().role, Some(Role::Prefill));
        assert!(
            v.ends_by_itself.unwrap().timer.contains("BOOTSTRAP"),
            "mori has that timer in every release"
        );
        assert!(v.candidates.iter().all(|c| !c.modes.contains(&"M17")), "that one is NIXL's");
    }
}

#[test]
fn an_abort_that_a_new_release_acknowledges_ends_the_room() {
    for sees in VANTAGES {
        let (mut m, d, p) = pair(sees, NEW);
        m.metadata(ROOM, &d, &p);
        m.w.wait(500);
        m.w.abort(ROOM, &d, &p, Some(1));
        m.w.ack(ROOM, &p, &d);
        m.w.to(60_000);
        assert_eq!(m.w.names(ROOM), ["room_closed"]);
        assert_eq!(m.w.outcomes(ROOM), [Outcome::Failed]);
    }
}

#[test]
fn an_abort_that_an_old_release_drops_changes_nothing_at_prefill() {
    let (mut m, d, p) = pair(Sees::Prefill, OLD);
    m.metadata(ROOM, &d, &p);
    m.w.wait(1000);
    m.w.abort(ROOM, &d, &p, None);
    let v = m.w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::AbortIgnored, Confidence::Possible));
    assert!(readings(&v).contains(&Class::TransferNotConcluded));
    m.status(ROOM, &p, &d, KvPoll::Success);
    m.w.wait(2000);
    assert_eq!(m.w.outcomes(ROOM), [Outcome::Success]);
}

#[test]
fn an_abort_of_which_nothing_tells_whether_it_was_dropped_is_unknown_and_no_pin() {
    let (mut m, d, p) = pair(Sees::Prefill, OPEN);
    m.metadata(ROOM, &d, &p);
    m.w.wait(1000);
    m.w.abort(ROOM, &d, &p, None);
    m.w.to(20_000);
    let v = m.w.verdict(ROOM);
    assert_eq!(v.class, Class::Unknown);
    assert_eq!(readings(&v), [Class::Unknown, Class::AbortIgnored]);
    assert!(v.evidence.iter().any(|e| e.contains("before 0.5.19")), "{:?}", v.evidence);
    // The older ones go on, and say so.
    m.status(ROOM, &p, &d, KvPoll::Success);
    m.w.wait(2000);
    assert_eq!(m.w.names(ROOM), ["verdict_changed", "room_closed"]);
    assert_eq!(m.w.outcomes(ROOM), [Outcome::Success]);
    // Without a word it is given up, and nobody claims how it ended.
    m.metadata(ROOM + 1, &d, &p);
    m.w.abort(ROOM + 1, &d, &p, None);
    m.w.wait(500_000);
    assert_eq!(m.w.outcomes(ROOM + 1), [Outcome::Unknown]);
    assert!(m.w.pin(ROOM + 1).is_none());
    // Decode alone is done with it.
    let (mut m, d, p) = pair(Sees::Decode, OPEN);
    m.metadata(ROOM, &d, &p);
    m.w.abort(ROOM, &d, &p, None);
    m.w.to(60_000);
    assert_eq!(m.w.names(ROOM), ["room_closed"]);
    assert_eq!(m.w.outcomes(ROOM), [Outcome::Failed]);
}

#[test]
fn an_open_abort_takes_a_pin_its_certainty_but_not_its_life() {
    let (mut m, d, p) = pair(Sees::Prefill, OPEN);
    m.metadata(ROOM, &d, &p);
    m.w.pinned_in_time(ROOM, 0.0, 10.0);
    m.w.to(60_000);
    m.w.abort(ROOM, &d, &p, None);
    m.w.wait(20_000);
    assert_eq!(m.w.class(ROOM), Some(Class::Unknown));
    assert!(!m.w.names(ROOM).contains(&"room_closed"));
    assert!(!m.w.names(ROOM).contains(&"room_recovered"), "it may hang as before: {:?}", m.w.names(ROOM));
}

#[test]
fn metadata_incomplete_names_the_decode_rank_by_its_engine_key() {
    for release in RELEASES {
        let mut m = Mori::new(Sees::Prefill, release);
        let (d, p): (Vec<_>, _) = ((0..4).map(|n| mori_decode(n, 4)).collect(), prefill(0));
        for rank in &d {
            m.register(rank, &p);
        }
        for n in [0, 1, 3] {
            m.metadata(ROOM, &d[n], &p);
        }
        let v = m.w.pinned_in_time(ROOM, 0.0, 10.0);
        assert_eq!((v.class, v.expected), (Class::MetadataIncomplete, Some(Kind::Metadata)));
        let owed = v.owed_by.unwrap();
        assert_eq!((owed.role, owed.rank), (Some(Role::Decode), Some(2)));
        assert_eq!(owed.endpoint, Some(d[2].endpoint));
        let view = m.w.last(ROOM).prefill.unwrap();
        assert_eq!((view.got, view.required), (3, Some(4)));
        m.metadata(ROOM, &d[2], &p);
        for rank in &d {
            m.status(ROOM, &p, rank, KvPoll::Success);
        }
        m.w.wait(2000);
        assert_eq!(m.w.outcomes(ROOM), [Outcome::Success]);
    }
}

#[test]
fn no_metadata_at_all_of_the_second_rank_is_seen_at_decode() {
    let mut m = Mori::new(Sees::Decode, NEW);
    let (d0, d1, p) = (mori_decode(0, 2), mori_decode(1, 2), prefill(0));
    m.register(&d0, &p);
    m.register(&d1, &p);
    m.metadata(ROOM, &d0, &p);
    let v = m.w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!((v.class, v.owed_by.unwrap().rank), (Class::MetadataIncomplete, Some(1)));
}

#[test]
fn more_sessions_than_required_are_enough() {
    let (mut m, d, p) = pair(Sees::Prefill, NEW);
    m.metadata(ROOM, &d, &p);
    m.metadata(ROOM, &mori_decode(1, 1), &p);
    let v = m.w.pinned_in_time(ROOM, 0.0, 10.0);
    assert_eq!(v.class, Class::TransferNotConcluded, "mori tests for at least as many");
    assert_eq!(m.w.last(ROOM).prefill.unwrap().state, KvPoll::WaitingForInput);
}

#[test]
fn status_lost_is_certain_when_the_connection_was_reset_before_it_arrived() {
    for sees in [Sees::Prefill, Sees::Both] {
        let (mut m, d, p) = pair(sees, NEW);
        m.healthy(1, &d, &p);
        let una = m.w.sent_to(&p, &d);
        m.w.acknowledge(&p, &d, una);
        m.metadata(ROOM, &d, &p);
        m.put(&p, &d, &status(ROOM, &p, KvPoll::Success, ""), false);
        m.w.wait(300);
        m.w.state(&p, &d, Direction::Sent, TcpState::Established, TcpState::Close, 104);
        let (_, v) = m.w.pin(ROOM).unwrap();
        assert_eq!((v.class, v.confidence), (Class::StatusLost, Confidence::Certain));
        assert_eq!(m.w.outcomes(1), [Outcome::Success]);
    }
}

#[test]
fn what_mori_cannot_read_silences_nobody_and_a_silent_rank_has_a_blocked_worker() {
    let (mut m, d, p) = pair(Sees::Prefill, NEW);
    m.healthy(1, &d, &p);
    m.w.to(1000);
    m.w.foreign(&p);
    for n in 0..4 {
        m.metadata(ROOM + n, &d, &p);
    }
    let v = m.w.pinned_in_time(ROOM, 1.0, 10.0);
    assert_eq!((v.class, v.confidence), (Class::TransferWorkerSilent, Confidence::Possible));
}

// Dummies: MLA with prefill TP above decode TP. One prefill rank has the work, the others are only told.

/// METADATA of one decode rank to four prefill ranks, all but the first of which are dummies.
fn with_dummies(m: &mut Mori, room: u64, d: &Rank) -> Vec<Rank> {
    let p: Vec<_> = (0..4).map(prefill).collect();
    for (n, rank) in p.iter().enumerate() {
        m.ask(room, d, rank, n > 0);
    }
    p
}

#[test]
fn dummies_that_stay_silent_owe_nothing() {
    for sees in VANTAGES {
        let (mut m, d, _) = pair(sees, NEW);
        let p = with_dummies(&mut m, ROOM, &d);
        if sees != Sees::Prefill {
            let view = m.w.last(ROOM).decode.unwrap();
            assert_eq!((view.got, view.required), (0, Some(1)));
        }
        m.status(ROOM, &p[0], &d, KvPoll::Success);
        m.w.to(60_000);
        assert_eq!(m.w.names(ROOM), ["room_closed"], "{sees:?}");
        assert_eq!(m.w.outcomes(ROOM), [Outcome::Success]);
    }
}

#[test]
fn a_dummy_with_a_prefix_is_one() {
    let (mut m, d, p) = pair(Sees::Prefill, NEW);
    let ask = Ask { pages: 0, dummy: true, required: 1, prefix: 128 };
    m.put(&d, &p, &metadata(ROOM, &d, ask, NEW), true);
    m.w.to(15_000);
    assert_eq!(m.w.class(ROOM), Some(Class::NotApplicable));
}

#[test]
fn a_full_cache_hit_is_no_dummy() {
    let (mut m, d, p) = pair(Sees::Prefill, NEW);
    let ask = Ask { pages: 0, dummy: false, required: 1, prefix: 128 };
    m.put(&d, &p, &metadata(ROOM, &d, ask, NEW), true);
    m.w.to(15_000);
    assert_eq!(m.w.class(ROOM), Some(Class::TransferNotConcluded));
}

#[test]
fn dummies_of_old_releases_speak_and_do_not_answer_for_the_rank_that_owes() {
    // At prefill each STATUS is its process's.
    for sees in [Sees::Prefill, Sees::Both] {
        let (mut m, d, _) = pair(sees, OLD);
        let p = with_dummies(&mut m, ROOM, &d);
        m.w.wait(1000);
        for rank in &p[1..] {
            m.status(ROOM, rank, &d, KvPoll::Success);
        }
        m.w.wait(2000);
        let s = m.w.last(ROOM);
        let view = s.prefill.clone().unwrap();
        assert_eq!((view.phase, view.state), (Phase::Conclude, KvPoll::WaitingForInput), "{sees:?}");
        assert_eq!(s.closed_at, None);
        let v = m.w.pinned_in_time(ROOM, 1.0, 10.0);
        assert_eq!(v.class, Class::RanksDisagree);
        assert_eq!(v.owed_by.unwrap().endpoint, Some(p[0].endpoint));
        assert!(v.evidence.iter().any(|e| e.contains(&format!("{} said Success", p[2].endpoint))));
        m.status(ROOM, &p[0], &d, KvPoll::Success);
        m.w.wait(2000);
        assert_eq!(m.w.outcomes(ROOM), [Outcome::Success]);
    }
}

#[test]
fn decode_alone_concludes_with_the_first_of_them_as_its_engine_does_and_learns_nothing_wrong() {
    let (mut m, d, _) = pair(Sees::Decode, OLD);
    let p: Vec<_> = (0..4).map(prefill).collect();
    for room in ROOM..ROOM + 5 {
        // The rank that has the work is asked last.
        for n in [3, 2, 1, 0] {
            m.ask(room, &d, &p[n], n > 0);
        }
        m.w.wait(100);
        m.status(room, &p[2], &d, KvPoll::Success);
        m.w.wait(2000);
        assert_eq!(m.w.outcomes(room), [Outcome::Success]);
        for n in [1, 0, 3] {
            m.status(room, &p[n], &d, KvPoll::Success);
        }
    }
    // None of these numbers is the name of that rank for sure.
    m.metadata(ROOM + 9, &d, &p[0]);
    m.w.wait(11_500);
    let owed = m.w.verdict(ROOM + 9).owed_by.unwrap();
    assert_eq!((owed.endpoint, owed.rank), (Some(p[0].endpoint), None));
}

#[test]
fn a_dummy_that_failed_fails_the_room() {
    for sees in VANTAGES {
        let (mut m, d, _) = pair(sees, OLD);
        let p = with_dummies(&mut m, ROOM, &d);
        m.status(ROOM, &p[3], &d, KvPoll::Failed);
        m.w.wait(2000);
        assert_eq!(m.w.outcomes(ROOM), [Outcome::Failed], "{sees:?}");
    }
}

#[test]
fn a_host_of_dummies_that_have_all_spoken_is_done() {
    let (mut m, d, _) = pair(Sees::Prefill, OLD);
    let p = [prefill(1), prefill(2)];
    for rank in &p {
        m.ask(ROOM, &d, rank, true);
    }
    m.status(ROOM, &p[0], &d, KvPoll::Success);
    m.w.wait(2000);
    assert_eq!(m.w.outcomes(ROOM), []);
    m.status(ROOM, &p[1], &d, KvPoll::Success);
    m.w.wait(2000);
    assert_eq!(m.w.outcomes(ROOM), [Outcome::Success]);
    assert_eq!(m.w.table.counters().turned_away.late, 0);
}

// What stays in the decoder.

#[test]
fn indices_pointers_descriptors_and_auxiliary_bytes_never_leave_the_decoder() {
    for release in RELEASES {
        for sees in VANTAGES {
            let (mut m, d, p) = pair(sees, release);
            m.healthy(ROOM, &d, &p);
            m.metadata(ROOM + 1, &d, &p);
            m.w.wait(60_000);
            let seen = format!("{}{:?}{:?}", m.decoded, m.w.out, [m.w.last(ROOM), m.w.last(ROOM + 1)])
                .to_lowercase();
            assert!(seen.contains("io-decode-dp0") && seen.contains("auxdata"), "{seen}");
            let bytes = |b: &[u8]| format!("{b:?}").trim_matches(['[', ']']).to_owned();
            for secret in [
                PAGE.to_string(),
                (PAGE + 1).to_string(),
                format!("{PAGE:x}"),
                bytes(&PAGE.to_le_bytes()),
                POINTER.to_string(),
                format!("{POINTER:x}"),
                bytes(&POINTER.to_be_bytes()),
                String::from_utf8(TEXT.to_ascii_lowercase()).unwrap(),
                bytes(TEXT),
            ] {
                assert!(!seen.contains(&secret), "{secret} of {release:?} in {seen}");
            }
        }
    }
}

#[test]
fn a_descriptor_of_another_shape_leaves_the_key_open_and_the_rest_readable() {
    let (d, p) = (mori_decode(0, 1), prefill(0));
    for blob in [b"opaque".to_vec(), vec![0x81, 0xa1, b'k', 1], vec![0x91, 0xd9, 200, b'x'], vec![0x91, 7]] {
        let mut m = Mori::new(Sees::Both, NEW);
        let mut frames = register(&d, NEW);
        frames[4] = blob;
        m.put(&d, &p, &frames, true);
        assert!(m.decoded.contains(r#"session: """#), "{}", m.decoded);
        m.healthy(ROOM, &d, &p);
        m.w.wait(2000);
        assert_eq!(m.w.outcomes(ROOM), [Outcome::Success]);
    }
    let mut m = Mori::new(Sees::Both, NEW);
    m.register(&d, &p);
    let named = format!("session: \"{}\"", d.session);
    for field in [&named, "kv_buffers: Some(4)", "aux_buffers: Some(2)", "kv_item_len: Some(131072)"] {
        assert!(m.decoded.contains(field), "{field}: {}", m.decoded);
    }
}
