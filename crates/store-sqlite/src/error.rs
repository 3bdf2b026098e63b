//! What SQLite's errors mean: which are transient, and which say that the disk rejects writes.

use parking_lot::Mutex;
use rusqlite::ErrorCode;
use weir_store::Error;

use crate::ENGINE;

/// Errors that an operator can mend while Weir runs (a full disk, a lock, a failing device) are transient; all others are
/// permanent.
pub(crate) fn classify(error: rusqlite::Error) -> Error {
    match error.sqlite_error_code() {
        Some(
            ErrorCode::DiskFull
            | ErrorCode::SystemIoFailure
            | ErrorCode::DatabaseBusy
            | ErrorCode::DatabaseLocked
            | ErrorCode::OutOfMemory
            | ErrorCode::CannotOpen
            | ErrorCode::ReadOnly
            | ErrorCode::OperationInterrupted,
        ) => Error::unavailable(ENGINE, error),
        _ => Error::failed(ENGINE, error),
    }
}

/// The error for a row that Weir cannot have written: only a file edited by hand contains one.
pub(crate) fn fault(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> rusqlite::Error {
    let cause = Box::new(Error::failed(ENGINE, cause));
    rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Integer, cause)
}

/// Whether the disk accepts writes. The writer updates it with every commit, so that health checks report a failed write
/// at once, not only when their own write fails.
#[derive(Debug, Default)]
pub(crate) struct DiskHealth(Mutex<Option<&'static str>>);

impl DiskHealth {
    /// What is wrong with the disk, or `None` while writes succeed.
    pub(crate) fn problem(&self) -> Option<&'static str> {
        *self.0.lock()
    }

    /// Records a failed write, unless the disk is not the cause.
    pub(crate) fn record_failure(&self, error: &Error) {
        if let Some(problem) = disk_problem(error) {
            *self.0.lock() = Some(problem);
        }
    }

    pub(crate) fn record_success(&self) {
        *self.0.lock() = None;
    }
}

fn disk_problem(error: &Error) -> Option<&'static str> {
    let error = error.cause()?.downcast_ref::<rusqlite::Error>()?;
    match error.sqlite_error_code()? {
        ErrorCode::DiskFull => {
            Some("the disk that holds the data directory is full; writes fail until there is space")
        }
        ErrorCode::SystemIoFailure | ErrorCode::ReadOnly => Some(
            "writes to the data directory fail; check the disk, whether it is mounted read-only, its quota and the file \
             size limit",
        ),
        _ => None,
    }
}
