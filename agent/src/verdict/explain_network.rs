//! What RDMA ports and the engines' own connections moved, in words.
//!
//! Pure. Evidence and nothing else: a port is every room's and other engines' too, and bytes that stand still are what a queue at prefill
//! looks like. So nothing here decides whether a room is pinned, nor how sure that is; what holds certainty back is in `judge_moving`.

use crate::gpu::windows::Link;
use crate::rooms::model::NetworkWindow;
use crate::verdict::facts::Facts;
use crate::verdict::judge_gpus::{moved, whose_rooms};

/// Lines about them at most: a rank has a few.
const MAX_LINES: usize = 8;

/// Sentences of evidence.
pub(super) fn evidence(f: &Facts, lines: &mut Vec<String>) {
    for window in f.network.iter().take(MAX_LINES) {
        lines.push(words(f, window));
    }
    let faults = f.network.iter().filter(|w| !w.faults.is_empty());
    lines.extend(faults.take(MAX_LINES).map(suffered));
}

/// What one of them moved.
fn words(f: &Facts, w: &NetworkWindow) -> String {
    let (name, whole) = match (w.link, w.pid) {
        (Link::Tcp, Some(pid)) => (
            format!("TCP connections of {} process {pid} that are no control connections", w.role.label()),
            "all of them together",
        ),
        _ => (format!("RDMA port {} ({})", w.name, w.role.label()), "the whole port"),
    };
    let what = w.moved.as_ref().map_or_else(|| "what moved is not measured".to_owned(), |m| moved(f, m));
    format!("{name}: {what}; {whole}, {}", whose_rooms(w.overlapping))
}

/// What a port counted of errors.
fn suffered(w: &NetworkWindow) -> String {
    let kinds = crate::network::model::Fault::ALL.into_iter().filter_map(|kind| {
        let n: u64 = w.faults.iter().filter(|f| f.what == kind).map(|f| f.count).sum();
        (n > 0).then(|| format!("{n} {} ({})", kind.label(), kind.meaning()))
    });
    let kinds: Vec<String> = kinds.collect();
    format!("RDMA port {} counted errors in that time: {}", w.name, kinds.join(", "))
}
