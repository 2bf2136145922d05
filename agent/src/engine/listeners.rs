//! Where an engine's HTTP server can be reached from here: what listens on its port, in whose network namespace.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Lines read of each table at most: listeners come first.
const MAX_LINES: usize = 16_384;

/// State of a listener (`TCP_LISTEN`, kernel `include/net/tcp_states.h`).
const LISTEN: &str = "0A";

/// The address at which the server `pid`, told to listen at `host` and `port`, answers on this machine. Always one of this
/// machine's own: nothing that is asked there leaves it.
///
/// # Errors
///
/// A sentence for the operator.
pub(super) fn address(proc: &Path, pid: u32, host: Option<&str>, port: u16) -> Result<SocketAddr, String> {
    let of = |whose: &str, file: &str| proc.join(whose).join("net").join(file);
    let server = pid.to_string();
    // Files of one network namespace are the same file, whoever looks: that needs no privilege, unlike `ns/net`.
    let namespace = |whose: &str| std::fs::metadata(of(whose, "tcp")).map(|m| m.ino());
    match (namespace(&server), namespace("self")) {
        (Ok(theirs), Ok(ours)) if theirs == ours => {}
        (Ok(_), Ok(_)) => {
            return Err("it runs in another network namespace; run the agent in the host's, and the engine too, or do \
                        without its gauges"
                .to_owned());
        }
        (Err(e), _) | (_, Err(e)) => {
            return Err(format!("its network namespace cannot be told from ours: {e}"));
        }
    }
    let mut found = Vec::new();
    for table in ["tcp", "tcp6"].into_iter().filter_map(|file| listening(&of(&server, file))) {
        found.extend(table.filter_map(|line| listener(&line)).filter(|a| a.port() == port));
    }
    choose(&found, host)
        .ok_or_else(|| format!("nothing listens on its port {port} (not ready yet, or a Unix socket)"))
}

/// Lines of listeners, which come first. `None`: there is no such table; without IPv6 there is no tcp6.
fn listening(table: &Path) -> Option<impl Iterator<Item = String> + use<>> {
    let table = File::open(table).ok()?;
    let lines = BufReader::new(std::io::Read::take(table, 4 << 20)).lines().skip(1).take(MAX_LINES);
    Some(lines.map_while(Result::ok).take_while(|line| listener(line).is_some()))
}

/// The listener that is meant.
fn choose(found: &[SocketAddr], host: Option<&str>) -> Option<SocketAddr> {
    let wanted: Option<IpAddr> = host.and_then(|h| h.trim_matches(['[', ']']).parse().ok());
    let exact = found.iter().find(|a| Some(a.ip()) == wanted);
    let any = found.iter().find(|a| a.ip().is_unspecified());
    let chosen = exact.or(any).or_else(|| found.first())?;
    let ip = match chosen.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        // It may take IPv6 alone.
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    Some(SocketAddr::new(ip, chosen.port()))
}

/// The address of a listener's line of `/proc/net/tcp` or `tcp6` (`proc_pid_net(5)`): each 32-bit word of it in the byte order
/// of this machine. `None`: it is no listener's, and none follows.
fn listener(line: &str) -> Option<SocketAddr> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, _, state) = (fields.next()?, fields.next()?, fields.next()?);
    if state != LISTEN {
        return None;
    }
    let (ip, port) = local.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let mut bytes = Vec::with_capacity(16);
    for n in 0..ip.len().div_ceil(8).min(4) {
        let word = u32::from_str_radix(ip.get(n * 8..n * 8 + 8)?, 16).ok()?;
        bytes.extend_from_slice(&word.to_ne_bytes());
    }
    let ip = match <[u8; 4]>::try_from(bytes.as_slice()) {
        Ok(v4) => IpAddr::from(v4),
        Err(_) => IpAddr::from(<[u8; 16]>::try_from(bytes.as_slice()).ok()?).to_canonical(),
    };
    Some(SocketAddr::new(ip, port))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_endian = "little")]
    fn listeners_are_read_and_others_end_the_list() {
        let line = |local, state| {
            format!("   0: {local} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 1")
        };
        assert_eq!(listener(&line("0100007F:7918", "0A")), Some("127.0.0.1:31000".parse().unwrap()));
        assert_eq!(listener(&line("00000000:7530", "0A")), Some("0.0.0.0:30000".parse().unwrap()));
        let six = "00000000000000000000000001000000:7918";
        assert_eq!(listener(&line(six, "0A")), Some("[::1]:31000".parse().unwrap()));
        let mapped = "0000000000000000FFFF00000100007F:7918";
        assert_eq!(listener(&line(mapped, "0A")), Some("127.0.0.1:31000".parse().unwrap()));
        assert_eq!(listener(&line("0100007F:7918", "01")), None);
        for odd in [
            "",
            "x",
            "0: 01:1 x 0A",
            "0: zz00007F:7918 x 0A",
            "0: 0100007F:99999 x 0A",
            "0: \u{e9}\u{e9}\u{e9}\u{e9}:1 x 0A",
        ] {
            assert_eq!(listener(odd), None, "{odd}");
        }
    }

    #[test]
    fn the_address_that_is_meant_is_chosen() {
        let at = |s: &str| s.parse::<SocketAddr>().unwrap();
        let two = [at("0.0.0.0:1"), at("10.0.0.5:1")];
        assert_eq!(choose(&two, Some("10.0.0.5")), Some(at("10.0.0.5:1")));
        assert_eq!(choose(&two, Some("node-a")), Some(at("127.0.0.1:1")));
        assert_eq!(choose(&[at("[::]:1")], Some("::")), Some(at("[::1]:1")));
        assert_eq!(choose(&[at("10.0.0.5:1")], None), Some(at("10.0.0.5:1")));
        assert_eq!(choose(&[], None), None);
    }

    #[test]
    fn our_own_listener_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        let pid = std::process::id();
        assert_eq!(address(Path::new("/proc"), pid, Some("127.0.0.1"), here.port()), Ok(here));
        drop(listener);
        let gone = address(Path::new("/proc"), pid, None, here.port()).unwrap_err();
        assert!(gone.contains(&here.port().to_string()), "{gone}");
        assert!(address(Path::new("/proc"), u32::MAX, None, 1).is_err());
    }
}
