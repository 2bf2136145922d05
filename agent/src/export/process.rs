//! What the agent's own process costs, from `/proc/self`. Reads those files and nothing else; what cannot be
//! read is absent.

use std::fs;

/// Clock ticks per second of `/proc` (`USER_HZ`): 100 on every architecture Linux reports to user space
/// (`include/asm-generic/param.h`).
const USER_HZ: f64 = 100.0;

/// Standard `process_*` metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Process {
    /// User and system time, seconds.
    pub(super) cpu_seconds: Option<f64>,
    /// Resident memory, bytes.
    pub(super) resident_bytes: Option<u64>,
    /// Open descriptors.
    pub(super) open_fds: Option<u64>,
    /// Start, seconds since the epoch.
    pub(super) start_seconds: Option<f64>,
}

impl Process {
    /// Reads it now.
    pub(super) fn read() -> Self {
        let stat = fs::read_to_string("/proc/self/stat").ok();
        // The name in parentheses may itself hold spaces and parentheses; numbers follow the last one.
        // Field 14 and 15 are utime and stime, 22 starttime (proc_pid_stat(5)); the first after the name is 3.
        let field = |n: usize| -> Option<f64> {
            stat.as_deref()?.rsplit_once(')')?.1.split_ascii_whitespace().nth(n - 3)?.parse().ok()
        };
        let boot = fs::read_to_string("/proc/stat").ok().and_then(|s| after(&s, "btime "));
        let boot = boot.and_then(|b| b.parse::<f64>().ok());
        Self {
            cpu_seconds: field(14).zip(field(15)).map(|(user, system)| (user + system) / USER_HZ),
            resident_bytes: resident(),
            open_fds: fs::read_dir("/proc/self/fd").ok().and_then(|d| u64::try_from(d.count()).ok()),
            start_seconds: boot.zip(field(22)).map(|(boot, ticks)| boot + ticks / USER_HZ),
        }
    }
}

fn resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let kib: u64 = after(&status, "VmRSS:")?.trim().trim_end_matches("kB").trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Rest of the line that begins with `key`.
fn after(text: &str, key: &str) -> Option<String> {
    text.lines().find_map(|l| l.strip_prefix(key)).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn the_running_test_is_measured() {
        let p = Process::read();
        assert!(p.cpu_seconds.unwrap() >= 0.0);
        assert!(p.resident_bytes.unwrap() > 1 << 20);
        assert!(p.open_fds.unwrap() >= 3);
        assert!(p.start_seconds.unwrap() > 1_600_000_000.0);
    }
}
