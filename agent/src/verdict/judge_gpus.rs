//! What the GPUs of a room's engines say of it.
//!
//! Pure. A reading is of a whole device: that it moves bytes says nothing of one room, for another room's may be what moves; that
//! it does nothing at all is true of every room. So a GPU never makes a room `queued` alone, and all of prefill's that do nothing for
//! long exclude computing. What waits while nothing computes (for a grammar, for pages from storage, behind a pause) is excluded by
//! what the engine or its HTTP port says.

use crate::event::{Mono, SECOND};
use crate::gpu::model::{Ailment, Trouble, recovery_meaning, slowed, xid_meaning};
use crate::gpu::windows::Window;
use crate::rooms::model::{GpuWindow, Phase, Role};
use crate::verdict::explain::{ago, seconds};
use crate::verdict::facts::Facts;
use crate::verdict::judge_spans;

/// Lines of evidence about GPUs at most, and about what they suffered: a rank has a few.
const MAX_LINES: usize = 8;

/// Whether prefill neither queues nor computes the room, as all of its GPUs show: none of them ran a kernel or moved anything for
/// the floor, where the engine has said since the room was there that nothing waits in it; for the ceiling, where it says nothing and
/// the request is seen open (then its pauses are seen as well, and what waits for a grammar or for storage is done or given up).
pub(super) fn silent(f: &Facts) -> bool {
    let Some(silent) = f.gpu.silent else { return false };
    let limit = match f.request.said_to_wait {
        Some(_) => return false,
        _ if f.gpu.clear => f.limits.floor,
        _ if f.request.is_open(Role::Prefill) => f.limits.ceiling,
        _ => return false,
    };
    let moves = f.engine_idle == Some(false) || f.request.stopped.is_some();
    f.phase == Phase::Transfer
        && f.role == Role::Prefill
        && !moves
        && silent.read.saturating_sub(f.request.stood) >= limit
}

/// Whether an engine that tells nothing of its progress works through a queue: requests wait in it, as it says; one of its GPUs
/// computes; and its rank still answers rooms. Each alone says nothing: a collective that hangs keeps a GPU busy for ever, what
/// waits may wait behind this very room, and what is answered may have overtaken it. A count that can be old is enough: the rank has
/// answered since, so its scheduler runs and writes.
pub(super) fn works_off_a_queue(f: &Facts) -> bool {
    let lately = |at: Option<Mono>| at.is_some_and(|at| f.now.since(at) < f.limits.floor);
    f.engine_idle.is_none()
        && f.request.said_to_wait.is_some()
        && lately(f.gpu.works)
        && lately(f.others.last_answer)
}

/// Sentences of evidence.
pub(super) fn evidence(f: &Facts, lines: &mut Vec<String>) {
    for window in f.gpu.windows.iter().take(MAX_LINES) {
        lines.push(words(f, window));
    }
    let troubles = f.gpu.windows.iter().flat_map(|w| w.troubles.iter().map(move |t| (w, t)));
    // The newest.
    let all: Vec<_> = troubles.collect();
    for (window, trouble) in all.iter().skip(all.len().saturating_sub(MAX_LINES)) {
        lines.push(suffered(f, window, trouble));
    }
    if f.role != Role::Prefill || f.phase != Phase::Transfer {
        return;
    }
    if let Some(s) = f.gpu.silent.filter(|s| s.read >= f.limits.floor) {
        let which = if s.gpus == 1 { "the GPU".to_owned() } else { format!("all {} GPUs", s.gpus) };
        lines.push(format!(
            "{which} of prefill's engine ran no kernel and moved nothing but idle noise from {} to {} ({} s of it read): \
             nothing is computed there, and nothing handed over",
            f.moment(s.from),
            f.moment(s.to),
            seconds(s.read)
        ));
        if let Some(n) = f.request.said_to_wait {
            lines.push(format!(
                "prefill says that {n} requests wait in it: a silent GPU raises nothing then, whatever they wait for"
            ));
        }
    } else if works_off_a_queue(f) && !judge_spans::computed(f) {
        lines.push(
            "requests wait in prefill, as it says, a GPU of it computes, and its rank still answers rooms: it works through a queue"
                .to_owned(),
        );
    }
}

/// What one GPU did.
fn words(f: &Facts, w: &GpuWindow) -> String {
    let whose = format!("{} of {} process {}", w.gpu, w.role.label(), w.pid);
    let links: Vec<String> = w.links.iter().map(|l| moved(f, l)).collect();
    let moved = if links.is_empty() { "what it moved is not measured".to_owned() } else { links.join("; ") };
    format!("{whose}: {moved}; the whole GPU, {}", whose_rooms(w.overlapping))
}

/// Of how many rooms a reading is.
pub(super) fn whose_rooms(overlapping: Option<u32>) -> String {
    match overlapping {
        Some(1) => "no other room was handed over by that engine then".to_owned(),
        Some(n) => format!("of {n} rooms that were handed over by that engine then, and never of one"),
        None => "of every room that was handed over then, and never of one".to_owned(),
    }
}

/// What moved on one link.
pub(super) fn moved(f: &Facts, l: &Window) -> String {
    let read = if l.coverage >= 950 { String::new() } else { format!(", {} % of it read", l.coverage / 10) };
    format!(
        "{}: {} out, {} in from {} to {} ({}{read})",
        l.link.label(),
        bytes(l.out),
        bytes(l.into),
        ago(f, l.from).trim_start_matches("at "),
        f.moment(l.to),
        l.source.label()
    )
}

/// Bytes in words.
pub(super) fn bytes(n: u64) -> String {
    let units = [(1_u64 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    let unit = units.into_iter().find(|(size, _)| n >= *size);
    unit.map_or_else(
        || format!("{n} B"),
        |(size, name)| {
            let tenths = u128::from(n) * 10 / u128::from(size);
            format!("{}.{} {name}", tenths / 10, tenths % 10)
        },
    )
}

fn suffered(f: &Facts, w: &GpuWindow, t: &Trouble) -> String {
    let when = ago(f, t.from);
    let still = t.to.map_or_else(String::new, |to| {
        if to.since(t.from) < SECOND { String::new() } else { format!(", until {}", f.moment(to)) }
    });
    let gpu = &w.gpu;
    match t.what {
        Ailment::Xid(n) => {
            let meaning = xid_meaning(n).map(|m| format!(" ({m})")).unwrap_or_default();
            format!("Xid {n}{meaning} on {gpu} of {} process {} {when}", w.role.label(), w.pid)
        }
        Ailment::Event(bits) => format!("the driver reports trouble (event {bits:#x}) with {gpu} {when}"),
        Ailment::Lost => {
            format!(
                "{gpu} of {} process {} does not answer the driver: lost {when}{still}",
                w.role.label(),
                w.pid
            )
        }
        Ailment::Recovery(action) => {
            format!("the driver asks to {} for {gpu}, first seen {when}{still}", recovery_meaning(action))
        }
        Ailment::Slowed(reasons) => {
            let why: Vec<&str> = slowed(reasons).collect();
            format!("{gpu} is slowed down ({}), first seen {when}{still}", why.join(", "))
        }
    }
}
