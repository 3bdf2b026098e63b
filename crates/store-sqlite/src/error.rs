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

/// A row that only a hand-edited file can hold.
pub(crate) fn fault(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> rusqlite::Error {
    let cause = Box::new(Error::failed(ENGINE, cause));
    rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Integer, cause)
}
