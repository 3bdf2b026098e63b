//! Which of SQLite's errors pass by themselves, and which do not.

use rusqlite::ErrorCode;
use weir_store::Error;

use crate::ENGINE;

/// A full disk, a lock or a failing device may be mended while Weir runs; anything else is a fault.
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
