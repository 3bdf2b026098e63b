//! Settings of the audit.

use std::time::Duration;

use super::parse::{duration, number_from_zero};
use super::source::{SettingError, SettingsReader};

/// Settings of the audit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuditSettings {
    /// `audit.rows_max`: the most rows that an audit reads while its caller waits.
    pub rows_max: u64,
    /// `audit.recount_every`: how often all rows are read, by one of the servers.
    pub recount_every: Duration,
}

impl AuditSettings {
    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let rows = "a number of rows from 0 to 1000000";
        Ok(Self {
            rows_max: reader.get("audit.rows_max", 250_000, number_from_zero(1_000_000), rows)?,
            recount_every: reader.get(
                "audit.recount_every",
                Duration::from_secs(6 * 3_600),
                duration,
                "a duration from 1ms to a day, such as 6h",
            )?,
        })
    }
}
