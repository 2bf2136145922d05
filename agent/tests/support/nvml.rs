//! A driver's library that answers as a test says.
#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "shared by several test programs"
)]

use std::path::PathBuf;
use std::time::Duration;

use roomtrace::gpu::Settings;

/// The built library; it lies beside the test's own program.
pub fn built() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let library = program.parent().unwrap().join("libnvml_stand_in.so");
    assert!(library.exists(), "{} is not there: it is built with the tests", library.display());
    library
}

/// A driver that a test scripts.
pub struct Driver {
    folder: tempfile::TempDir,
}

impl Driver {
    pub fn new(script: &str) -> Self {
        Self::without(&[], script)
    }

    /// One whose library lacks these symbols: they have other names in its copy.
    pub fn without(missing: &[&str], script: &str) -> Self {
        let driver = Self { folder: tempfile::tempdir().unwrap() };
        let mut bytes = std::fs::read(built()).unwrap();
        for name in missing {
            let name = format!("\0{name}\0").into_bytes();
            let places: Vec<usize> = bytes
                .windows(name.len())
                .enumerate()
                .filter(|(_, window)| *window == name.as_slice())
                .map(|(n, _)| n)
                .collect();
            assert!(!places.is_empty(), "{}", String::from_utf8_lossy(&name));
            for place in places {
                bytes[place + 1] = b'x';
            }
        }
        std::fs::write(driver.lib(), bytes).unwrap();
        driver.script(script);
        driver
    }

    pub fn lib(&self) -> PathBuf {
        self.folder.path().join("libnvidia-ml.so.1")
    }

    /// From now on it answers like this.
    pub fn script(&self, text: &str) {
        let new = self.folder.path().join("new");
        std::fs::write(&new, text).unwrap();
        std::fs::rename(new, self.folder.path().join("libnvidia-ml.so.1.script")).unwrap();
    }

    pub fn settings(&self) -> Settings {
        Settings { lib_path: Some(self.lib()), idle: Duration::from_millis(125), ..Settings::default() }
    }
}
