//! Reads columns, and converts numbers to and from Postgres's integers.

use tokio_postgres::Row;
use tokio_postgres::types::FromSql;
use weir_core::Timestamp;
use weir_store::{Error, Result};

use crate::{ENGINE, time};

pub(crate) fn column<'a, T: FromSql<'a>>(row: &'a Row, index: usize) -> Result<T> {
    row.try_get(index).map_err(unreadable)
}

pub(crate) fn timestamp(row: &Row, index: usize) -> Result<Timestamp> {
    column(row, index).map(time::from_system)
}

/// Reads a `bigint` that is a count.
pub(crate) fn count(row: &Row, index: usize) -> Result<u64> {
    column::<i64>(row, index).map(i64::unsigned_abs)
}

/// The error for a value that Weir does not write.
pub(crate) fn unreadable(cause: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::failed(ENGINE, cause)
}

/// Converts a limit or a count. Neither exceeds the maximum of `integer`.
pub(crate) fn int(number: u32) -> i32 {
    i32::try_from(number).unwrap_or(i32::MAX)
}

/// Converts an `integer`. Weir does not write negative numbers; they count as 0.
pub(crate) fn unsigned(number: i32) -> u32 {
    u32::try_from(number).unwrap_or(0)
}

/// Converts a length or a limit.
pub(crate) fn bigint(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
