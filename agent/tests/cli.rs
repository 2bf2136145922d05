//! The command line: bad input gives one clear message and the promised exit code.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

use std::io::Write as _;
use std::process::{Command, Output};

fn roomtrace(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_roomtrace"));
    command.env_clear().args(args).output().unwrap()
}

/// Exit code and the one line on standard error.
fn refused(args: &[&str]) -> (i32, String) {
    let out = roomtrace(args);
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(!text.contains("panicked"), "{text}");
    (out.status.code().unwrap(), text)
}

fn file(text: &[u8]) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text).unwrap();
    file
}

#[test]
fn a_wrong_configuration_is_named_with_its_place() {
    let wrong = file(b"http:\n  lsiten: 127.0.0.1:1\n");
    let path = wrong.path().to_str().unwrap();
    for args in [["config", "check", path], ["run", "--config", path]] {
        let (code, text) = refused(&args);
        assert_eq!(code, 2, "{text}");
        assert!(text.contains(&format!("{path}:2:")) && text.contains("did you mean `listen`"), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}

#[test]
fn an_unreadable_configuration_is_named() {
    let (code, text) = refused(&["config", "check", "/nonexistent/roomtrace.yaml"]);
    assert_eq!(code, 2);
    assert!(text.contains("cannot read configuration /nonexistent/roomtrace.yaml"), "{text}");
}

#[test]
fn the_default_configuration_is_shown_and_checks() {
    let out = roomtrace(&["config", "show", "--floor", "12s", "--port", "4711"]);
    assert!(out.status.success());
    let shown = file(&out.stdout);
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.contains("floor: 12s") && text.contains("4711"), "{text}");
    assert!(roomtrace(&["config", "check", shown.path().to_str().unwrap()]).status.success(), "{text}");
}

#[test]
fn a_value_out_of_range_is_named_with_place_and_key() {
    let wrong = file(b"rooms:\n  factor: -1\n");
    let path = wrong.path().to_str().unwrap();
    let (code, text) = refused(&["config", "check", path]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains(&format!("{path}:2:11: rooms.factor: `-1`")), "{text}");
    let (code, text) = refused(&["config", "show", "--floor", "0s"]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("command line") && text.contains("rooms.floor: `0s`"), "{text}");
}

#[test]
fn a_password_is_not_shown_and_must_be_put_back() {
    let given = file(b"export:\n  trace_salt: secret1\n  otlp: {headers: {authorization: secret2}}\n");
    let (path, url) = (given.path().to_str().unwrap(), "https://me:secret3@host:4317");
    let out = roomtrace(&["config", "show", "--config", path, "--otlp-endpoint", url]);
    assert!(out.status.success());
    let shown = file(&out.stdout);
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.contains("https://<hidden>@host:4317") && !text.contains("secret"), "{text}");
    let (code, text) = refused(&["config", "check", shown.path().to_str().unwrap()]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("export.trace_salt: the value is hidden"), "{text}");
    // What goes wrong with the address does not tell it either, nor does the help.
    let (code, text) = refused(&["config", "show", "--otlp-endpoint", "ftp://me:secret@host"]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("export.otlp.endpoint") && !text.contains("secret"), "{text}");
    let mut help = Command::new(env!("CARGO_BIN_EXE_roomtrace"));
    let help = help.env("ROOMTRACE_OTLP_ENDPOINT", url).args(["run", "--help"]).output().unwrap();
    assert!(!String::from_utf8(help.stdout).unwrap().contains("secret"));
}

#[test]
fn one_switch_turns_requests_off() {
    let key = file(b"capture: {requests: false}\n");
    let key = ["--config", key.path().to_str().unwrap()];
    for (args, variable, on) in [
        (&[][..], None, true),
        (&["--no-requests"], None, false),
        (&[], Some("1"), false),
        (&[], Some("0"), true),
        (&key, None, false),
    ] {
        let mut show = Command::new(env!("CARGO_BIN_EXE_roomtrace"));
        show.args(["config", "show"]).args(args).env_remove("ROOMTRACE_NO_REQUESTS");
        if let Some(value) = variable {
            show.env("ROOMTRACE_NO_REQUESTS", value);
        }
        let text = String::from_utf8(show.output().unwrap().stdout).unwrap();
        assert!(text.contains(&format!("requests: {on}\n")), "{args:?} {variable:?}: {text}");
    }
}

#[test]
fn what_is_no_capture_is_named() {
    let cases: [(&[u8], &str); 3] = [
        (b"", "empty"),
        (b"PK\x03\x04 some archive, much longer than any header", "not a packet capture"),
        (b"\xd4\xc3\xb2\xa1\x02\x00", "cut short"),
    ];
    for (bytes, expected) in cases {
        let wrong = file(bytes);
        let (code, text) = refused(&["replay", wrong.path().to_str().unwrap()]);
        assert_eq!(code, 2, "{text}");
        assert!(text.contains(expected), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
    }
    let (code, text) = refused(&["replay", "/nonexistent.pcap"]);
    assert_eq!(code, 2, "{text}");
}

#[test]
fn packets_that_were_captured_in_part_are_told() {
    let whole = std::fs::read("tests/fixtures/captures/c.pcap").unwrap();
    let (head, mut rest) = whole.split_at(24);
    let mut cut = head.to_vec();
    while let Some((packet, tail)) = rest.split_at_checked(16) {
        let len = u32::from_le_bytes(packet[8..12].try_into().unwrap());
        let keep = len.min(96);
        cut.extend([&packet[..8], &keep.to_le_bytes(), &packet[12..]].concat());
        cut.extend(&tail[..keep as usize]);
        rest = &tail[len as usize..];
    }
    let cut = file(&cut);
    let replay = |path: &str| {
        let done = Command::new(env!("CARGO_BIN_EXE_roomtrace")).args(["replay", path]).output().unwrap();
        String::from_utf8(done.stderr).unwrap()
    };
    let told = replay(cut.path().to_str().unwrap());
    assert!(told.contains("hold only a part of their bytes (snap length)"), "{told}");
    assert_eq!(replay("tests/fixtures/captures/c.pcap"), "");
}

/// A pcapng file with one packet on an interface of each link type.
fn pcapng(link_types: &[u16]) -> Vec<u8> {
    let block = |kind: u32, body: &[u8]| {
        let len = u32::try_from(body.len() + 12).unwrap().to_le_bytes();
        [&kind.to_le_bytes(), &len, body, &len].concat()
    };
    let section = [&0x1a2b_3c4d_u32.to_le_bytes()[..], &[1, 0, 0, 0], &[0xff; 8]].concat();
    let mut bytes = block(0x0a0d_0d0a, &section);
    for link in link_types {
        bytes.extend(block(1, &[&link.to_le_bytes()[..], &[0; 6]].concat()));
    }
    for n in 0..u32::try_from(link_types.len()).unwrap() {
        let words = [n, 0, 0, 60, 60].map(u32::to_le_bytes).concat();
        bytes.extend(block(6, &[words, vec![0; 60]].concat()));
    }
    bytes
}

#[test]
fn a_link_type_that_is_not_read_is_told() {
    let foreign = file(&pcapng(&[127]));
    let (code, text) = refused(&["replay", foreign.path().to_str().unwrap()]);
    assert_eq!(code, 2, "{text}");
    assert!(
        text.contains("link type 127 (802.11 with radiotap header) is not supported (Ethernet 1"),
        "{text}"
    );
    let mixed = file(&pcapng(&[1, 127]));
    let (code, text) = refused(&["replay", mixed.path().to_str().unwrap()]);
    assert_eq!(code, 0, "{text}");
    assert!(
        text.contains("WARN") && text.contains("1 of 2 packets") && text.contains("1 of link type 127"),
        "{text}"
    );
}

#[test]
fn no_agent_is_said_so_with_the_way_out() {
    let api = "--api=http://127.0.0.1:9";
    for args in [["rooms", "--pinned", api], ["explain", "7", api]] {
        let (code, text) = refused(&args);
        assert_eq!(code, 3, "{text}");
        assert!(text.contains("no agent answers at http://127.0.0.1:9"), "{text}");
    }
}

#[test]
fn usage_errors_end_with_2_and_help_with_0() {
    assert_eq!(refused(&["explain", "not-a-room"]).0, 2);
    assert_eq!(refused(&["frobnicate"]).0, 2);
    assert_eq!(refused(&["replay"]).0, 2);
    assert!(roomtrace(&["--help"]).status.success());
    assert!(roomtrace(&["--version"]).status.success());
}

/// As an unprivileged user: `run` ends with 3 and says what is missing, `doctor` lists it, neither panics.
#[test]
fn without_privileges_it_is_said_so() {
    if !is_root() {
        let (code, text) = refused(&["run", "--no-http"]);
        assert_eq!(code, 3, "{text}");
        return;
    }
    // `nobody` cannot read the build directory: give it a copy.
    let dir = tempfile::tempdir_in("/tmp").unwrap();
    let copy = dir.path().join("roomtrace");
    std::fs::copy(env!("CARGO_BIN_EXE_roomtrace"), &copy).unwrap();
    std::fs::set_permissions(dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let as_nobody = |args: &[&str]| {
        use std::os::unix::process::CommandExt as _;
        Command::new(&copy).args(args).uid(65534).gid(65534).output().unwrap()
    };
    let out = as_nobody(&["run", "--no-http"]);
    let text = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(3), "{text}");
    assert!(text.contains("CAP_BPF"), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    let out = as_nobody(&["doctor", "--json"]);
    assert_eq!(out.status.code(), Some(3));
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["ok"], false);
}

fn is_root() -> bool {
    std::fs::read_to_string("/proc/self/status").unwrap().contains("\nUid:\t0\t")
}
