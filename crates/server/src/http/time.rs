//! Times as callers write them.

use weir_core::Timestamp;

use super::error::ApiError;

/// The start of the year 1.
pub(crate) const EARLIEST: Timestamp = Timestamp::from_seconds(-62_135_596_800);
/// The end of the year 9998: leaves room for times that are computed from it.
pub(crate) const LATEST: Timestamp = Timestamp::from_seconds(253_370_764_800);

/// Parses a time; digits below a microsecond are dropped.
pub(crate) fn parse_time(field: &str, text: &str) -> Result<Timestamp, ApiError> {
    let time = text.parse::<jiff::Timestamp>().ok();
    let time = time.map(|time| Timestamp::from_micros(time.as_microsecond()));
    time.filter(|time| (EARLIEST..LATEST).contains(time)).ok_or_else(|| {
        let allowed = "must be an RFC 3339 time in the years 1 to 9998, such as 2026-01-01T12:00:00Z";
        ApiError::invalid_field(field, allowed)
    })
}
