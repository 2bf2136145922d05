//! Which boot this is, and whether a process is still the one that had its number. Reads `/proc`.

use std::fs;
use std::io;

/// This boot.
pub(super) fn boot() -> io::Result<String> {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map(|id| id.trim().to_owned())
}

/// When a process started, in clock ticks since boot. `None`: there is none, or it has ended and only waits for its
/// parent.
pub(super) fn start(pid: u32) -> Option<u64> {
    started(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Effective user of this process.
pub(super) fn user() -> Option<u32> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("Uid:"))?;
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Field 22 of `proc_pid_stat(5)`. The name in parentheses may itself hold spaces and parentheses; the field behind the
/// last one is the third.
fn started(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X" | "x") {
        return None;
    }
    fields.nth(22 - 3 - 1)?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    fn the_start_stands_behind_whatever_name_a_process_gives_itself() {
        let rest = "1 4 4 0 -1 0 1 2 3 4 5 6 7 8 20 0 1 0 98765 1000 7";
        assert_eq!(started(&format!("4711 (a) S 9) S {rest}")), Some(98765));
        assert_eq!(started(&format!("4711 (a) Z {rest}")), None, "a zombie has ended");
        assert_eq!(started("4711 (a) S 1 4"), None);
        assert_eq!(started(""), None);
        assert!(start(std::process::id()).is_some());
        assert_eq!(start(u32::MAX), None);
        assert!(!boot().unwrap().is_empty() && user().is_some());
    }
}
