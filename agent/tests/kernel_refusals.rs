//! What an operator is told when live capture cannot start, and what `doctor` finds.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "support/live.rs"]
mod live;

use std::net::SocketAddr;

use roomtrace::kernel::{Capture, CaptureConfig, Hook, KernelError, preflight};

fn refusal(config: &CaptureConfig) -> KernelError {
    Capture::start(config).expect_err("must be refused")
}

#[test]
fn without_privileges_the_missing_capabilities_and_the_remedy_are_named() {
    // Capabilities belong to a thread: this one throws its own away.
    let (error, checks) = std::thread::spawn(|| {
        caps::clear(None, caps::CapSet::Effective).unwrap();
        (refusal(&CaptureConfig::default()), preflight())
    })
    .join()
    .unwrap();
    assert!(matches!(error, KernelError::NotPrivileged { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("lacks CAP_BPF and CAP_PERFMON") && text.contains("Run the agent as root"),
        "{text}"
    );
    let check = checks.iter().find(|c| c.name == "capabilities").unwrap();
    assert!(!check.ok && check.what_to_do.contains("setcap"), "{check:?}");
}

#[test]
fn a_forced_hook_that_is_not_there_is_refused_with_its_reason() {
    if live::start(&CaptureConfig::default()).is_none() {
        return;
    }
    for hook in [Hook::Fentry, Hook::Kprobe] {
        let error = refusal(&CaptureConfig { hook: Some(hook), ..CaptureConfig::default() });
        assert!(matches!(&error, KernelError::ForcedHook { refused } if refused.hook == hook), "{error}");
        assert!(error.to_string().contains(hook.name()), "{error}");
    }
    let forced =
        Capture::start(&CaptureConfig { hook: Some(Hook::Sock), ..CaptureConfig::default() }).unwrap();
    assert_eq!((forced.hook(), forced.refused()), (Hook::Sock, &[][..]));
}

#[test]
fn settings_that_make_no_sense_are_refused_before_anything_is_loaded() {
    let sane = CaptureConfig::default;
    let bad = [
        (CaptureConfig { ring_bytes: 100_000, ..sane() }, "ring_bytes"),
        (CaptureConfig { ring_bytes: 4096, ..sane() }, "ring_bytes"),
        (CaptureConfig { ports: (0..65).collect(), ..sane() }, "ports"),
        (CaptureConfig { engine_comms: vec![String::new()], ..sane() }, "engine_comms"),
        (CaptureConfig { engine_comms: vec!["sixteen-letters-".to_owned()], ..sane() }, "engine_comms"),
        (CaptureConfig { engine_comms: vec!["x".to_owned(); 9], ..sane() }, "engine_comms"),
    ];
    for (config, name) in bad {
        let error = refusal(&config);
        assert!(matches!(&error, KernelError::Setting { setting, .. } if *setting == name), "{error}");
    }
}

#[test]
fn doctor_finds_everything_where_capture_works() {
    if live::start(&CaptureConfig::default()).is_none() {
        return;
    }
    let checks = preflight();
    assert!(checks.iter().all(|c| c.ok), "{checks:#?}");
    for name in
        ["kernel", "capabilities", "BTF", "tracepoint", "socket iterator", "socket storage", "lockdown"]
    {
        assert!(checks.iter().any(|c| c.name == name), "{name}");
    }
}

#[test]
fn a_full_table_of_endpoints_is_said_and_counted() {
    let Some(mut live) = live::start(&CaptureConfig::default()) else { return };
    let endpoint = |n: u16| SocketAddr::from(([10, 0, 0, 1], n));
    let taken = (1..=5000).filter(|n| live.capture.watch_endpoint(endpoint(*n)).unwrap()).count();
    assert_eq!(taken, 4096);
    assert_eq!(live.capture.counters().unwrap().endpoints_refused, 5000 - 4096);
    live.capture.forget_endpoint(endpoint(1));
    assert!(live.capture.watch_endpoint(endpoint(5000)).unwrap());
}

#[test]
fn a_full_table_of_processes_is_said_and_counted() {
    let Some(mut live) = live::start(&CaptureConfig::default()) else { return };
    // Above the kernel's greatest process id (`PID_MAX_LIMIT`, include/linux/threads.h).
    let pid = |n: u32| (4 << 20) + n;
    let taken = (1..=1100).filter(|n| live.capture.watch_process(pid(*n)).unwrap()).count();
    assert_eq!(taken, 1024);
    assert!(live.capture.watch_process(pid(1)).unwrap(), "one that is there already needs no place");
    assert_eq!(live.capture.counters().unwrap().processes_refused, 1100 - 1024);
    live.capture.forget_process(pid(1));
    assert!(live.capture.watch_process(pid(1100)).unwrap());
}
