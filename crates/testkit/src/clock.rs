//! A settable clock for a server under test: a library preloaded into its process changes the time that the system returns.

use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::Mutex;
use tempfile::TempDir;

const SOURCE: &str = include_str!("clock/preload.c");

/// The clock of one or more processes, which can be set while they run.
#[derive(Debug)]
pub struct FakeClock {
    offsets: File,
    directory: TempDir,
    /// The offset of the time of day, and the time that the machine was suspended, in seconds.
    offsets_seconds: Mutex<(i64, i64)>,
}

impl FakeClock {
    /// A clock without an offset.
    ///
    /// # Panics
    /// If the library cannot be built or its file cannot be written.
    #[must_use]
    pub fn new() -> Self {
        let directory = tempfile::Builder::new().prefix("weir-clock-").tempdir().expect("a directory");
        // The processes may run as another user than the tests.
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).expect("its mode can be set");
        let path = directory.path().join("offsets");
        let offsets = OpenOptions::new().create_new(true).write(true).open(&path).expect("a new file");
        let clock = Self { offsets, directory, offsets_seconds: Mutex::default() };
        clock.change(|_| {});
        clock
    }

    /// The environment variables of a process that uses this clock.
    #[must_use]
    pub fn environment(&self) -> [(&'static str, PathBuf); 2] {
        [("LD_PRELOAD", library().to_owned()), ("WEIR_TEST_CLOCK", self.directory.path().join("offsets"))]
    }

    /// Sets the time of day `seconds` ahead of the system's. The time since boot is unaffected, as when a clock is set.
    pub fn set(&self, seconds: i64) {
        self.change(|(set, _)| *set = seconds);
    }

    /// Advances both clocks as if the machine had been suspended for `span`.
    pub fn suspend(&self, span: Duration) {
        let seconds = i64::try_from(span.as_secs()).expect("the span fits into i64");
        self.change(|(_, slept)| *slept += seconds);
    }

    /// Writes both numbers at once, so that no process sees one without the other.
    fn change(&self, change: impl FnOnce(&mut (i64, i64))) {
        let mut offsets_seconds = self.offsets_seconds.lock();
        change(&mut offsets_seconds);
        let (set, slept) = *offsets_seconds;
        let nanos = [set + slept, slept].map(|seconds| (seconds * 1_000_000_000).to_ne_bytes());
        self.offsets.write_all_at(nanos.as_flattened(), 0).expect("the file can be written");
    }
}

impl Default for FakeClock {
    fn default() -> Self {
        Self::new()
    }
}

/// The library, built once per process. Building Weir needs a C compiler anyway.
fn library() -> &'static Path {
    static LIBRARY: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = LIBRARY.get_or_init(|| {
        let directory = tempfile::Builder::new().prefix("weir-clock-").tempdir().expect("a directory");
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).expect("its mode can be set");
        let (source, path) = (directory.path().join("preload.c"), directory.path().join("libclock.so"));
        fs::write(&source, SOURCE).expect("the directory can be written");
        let output = Command::new("cc")
            .args(["-shared", "-fPIC", "-O2", "-Wall", "-o"])
            .args([&path, &source])
            .arg("-ldl")
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| panic!("cannot run cc, the C compiler: {error}"));
        assert!(output.status.success(), "cc failed: {}", String::from_utf8_lossy(&output.stderr));
        (directory, path)
    });
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offsets_seconds(clock: &FakeClock) -> i64 {
        let output = Command::new("date").arg("+%s").envs(clock.environment()).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().parse().unwrap()
    }

    #[test]
    fn a_process_sees_the_time_that_is_set() {
        let clock = FakeClock::new();
        let now = || std::time::UNIX_EPOCH.elapsed().unwrap().as_secs().cast_signed();
        for seconds in [0, 7_200, -7_200] {
            clock.set(seconds);
            let (before, offsets_seconds, after) = (now(), offsets_seconds(&clock), now());
            assert!(
                (before..=after).contains(&(offsets_seconds - seconds)),
                "{offsets_seconds} after setting it to {seconds}"
            );
        }
    }
}
