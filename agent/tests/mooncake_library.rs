//! Which transfer engine a process has mapped, whether a probe may sit on it, and how it lays out requests.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "tests")]

use roomtrace::batch::{Layout, Request};
use roomtrace::engine::mooncake::library;

fn laid_out(stride: usize, code: u32, address: u64, len: u64) -> Vec<u8> {
    let mut one = vec![0xaa; stride];
    one.splice(0..4, code.to_ne_bytes());
    one.splice(24..32, address.to_ne_bytes());
    one.splice(32..40, len.to_ne_bytes());
    one
}

#[test]
fn requests_are_read_by_their_layout_and_nonsense_is_none() {
    for stride in [48, 56] {
        let layout = Layout { stride: stride as u64 };
        let two = [laid_out(stride, 1, 0x7000_0000_0000, 4096), laid_out(stride, 0, 64, 1)].concat();
        let read = layout.read(&two).unwrap();
        assert_eq!(
            read,
            [
                Request { write: true, address: 0x7000_0000_0000, len: 4096 },
                Request { write: false, address: 64, len: 1 }
            ]
        );
        assert_eq!(layout.read(&two[..stride + 8]), None, "cut short");
        assert_eq!(Layout { stride: 104 - layout.stride }.read(&two), None, "the other layout");
        for bad in [laid_out(stride, 2, 64, 1), laid_out(stride, 1, 64, 0), laid_out(stride, 1, u64::MAX, 2)]
        {
            assert_eq!(layout.read(&bad), None);
        }
    }
    assert_eq!(Layout { stride: 48 }.read(&[]), Some(Vec::new()));
    assert_eq!(Layout { stride: 0 }.read(&[1]), None);
}

const PACKAGES: &str = "usr/lib/python3/site-packages";

/// A process that has mapped the library, with these names beside it.
fn process(names: &[&str]) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("7/root").join(PACKAGES);
    for name in names {
        std::fs::create_dir_all(root.join(name)).unwrap();
    }
    std::fs::create_dir_all(root.join("mooncake")).unwrap();
    let map = format!(
        "55d0-55d1 r--p 00000000 08:01 12 /usr/bin/python3.11\n7f00-7f01 rw-p 00000000 00:00 0 \n\
         7f10-7f20 r-xp 000cb000 08:01 4711                       /{PACKAGES}/mooncake/engine.so\n"
    );
    std::fs::write(dir.path().join("7/maps"), map).unwrap();
    let proc = dir.path().to_str().unwrap().to_owned();
    (dir, proc)
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_known_version_has_its_layout() {
    for (version, stride) in [("0.3.9", 48), ("0.3.12.post1", 48), ("0.3.13", 56), ("0.3.13.post1", 56)] {
        for package in ["mooncake_transfer_engine", "mooncake_transfer_engine_non_cuda"] {
            let (_dir, proc) =
                process(&["torch-2.14.1.dist-info", &format!("{package}-{version}.dist-info")]);
            let found = library(&proc, 7).unwrap().unwrap();
            assert_eq!(found.layout, Ok(Layout { stride }), "{version}");
            assert_eq!((found.file, found.version.as_deref()), (("08:01".to_owned(), 4711), Some(version)));
            assert!(found.reachable.ends_with(format!("7/root/{PACKAGES}/mooncake/engine.so")));
        }
    }
}

#[test]
#[cfg(target_arch = "x86_64")]
fn what_is_not_known_exactly_is_refused_with_its_reason() {
    let refused = |names: &[&str]| {
        let (_dir, proc) = process(names);
        library(&proc, 7).unwrap().unwrap().layout.unwrap_err()
    };
    let why = refused(&["mooncake_transfer_engine-0.4.0.dist-info"]);
    assert_eq!(
        why,
        "version 0.4.0 of Mooncake is not known to this agent, which knows 0.3.8.post1 to 0.3.13.post1"
    );
    // Its functions are inline there, so the library has no such symbols.
    assert!(refused(&["mooncake_transfer_engine-0.3.7.post2.dist-info"]).contains("0.3.7.post2"));
    assert!(refused(&[]).contains("built from source?"));
    let two =
        ["mooncake_transfer_engine-0.3.9.dist-info", "mooncake_transfer_engine_non_cuda-0.3.12.dist-info"];
    assert!(refused(&two).contains("more than one"));
}

#[test]
fn a_process_without_it_has_none_and_one_that_is_gone_says_so() {
    let (dir, proc) = process(&[]);
    std::fs::write(
        dir.path().join("7/maps"),
        "7f10-7f20 r-xp 0 08:01 4 /x/engine.so\n7f r x 0 y /mooncake/engine.so",
    )
    .unwrap();
    assert_eq!(library(&proc, 7), Ok(None));
    assert!(library(&proc, 8).unwrap_err().contains("cannot read"));
}
