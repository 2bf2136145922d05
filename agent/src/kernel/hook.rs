//! The back ends that can see a socket call, and why one was not used.
//!
//! Pure data, no I/O.

use std::fmt;
use std::str::FromStr;

/// Where in the kernel socket calls are seen. Every back end fills the same record; they are tried in this
/// order by loading them, never by kernel version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Hook {
    /// BTF tracepoints `sock_send_length` and `sock_recv_length` (kernels from 6.3).
    Sock,
    /// fentry/fexit on `tcp_sendmsg` and `tcp_recvmsg`.
    Fentry,
    /// kprobe/kretprobe on the same functions.
    Kprobe,
}

impl Hook {
    /// In the order of trying.
    pub const ALL: [Self; 3] = [Self::Sock, Self::Fentry, Self::Kprobe];

    /// Its name on the command line and in `/status`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sock => "sock",
            Self::Fentry => "fentry",
            Self::Kprobe => "kprobe",
        }
    }
}

impl fmt::Display for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Hook {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|hook| hook.name() == text)
            .ok_or_else(|| format!("unknown hook `{text}`: one of sock, fentry, kprobe"))
    }
}

/// A back end that was tried and not used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedHook {
    /// Which.
    pub hook: Hook,
    /// Why, for the operator.
    pub why: String,
}

impl fmt::Display for RefusedHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.hook, self.why)
    }
}
