//! Whether the disk takes what is written. The writer notes it with every commit, so that health checks tell of a write
//! that failed at once and not when they happen to fail themselves.

use parking_lot::Mutex;
use rusqlite::ErrorCode;
use weir_store::Error;

/// Whether the disk takes what is written.
#[derive(Debug, Default)]
pub(crate) struct Storage(Mutex<Option<&'static str>>);

impl Storage {
    /// What is wrong; `None` while writes succeed.
    pub(crate) fn problem(&self) -> Option<&'static str> {
        *self.0.lock()
    }

    /// Takes note of a write that failed. Errors that are not the disk's change nothing.
    pub(super) fn failed(&self, error: &Error) {
        if let Some(problem) = problem_of(error) {
            *self.0.lock() = Some(problem);
        }
    }

    /// Takes note of a write that is on disk.
    pub(super) fn succeeded(&self) {
        *self.0.lock() = None;
    }
}

fn problem_of(error: &Error) -> Option<&'static str> {
    let error = error.cause()?.downcast_ref::<rusqlite::Error>()?;
    match error.sqlite_error_code()? {
        ErrorCode::DiskFull => {
            Some("the disk that holds the data directory is full; writes fail until there is space")
        }
        ErrorCode::SystemIoFailure | ErrorCode::ReadOnly => {
            Some("the data directory takes no writes; look at the disk, its quota and the file size limit")
        }
        _ => None,
    }
}
