//! Limits of batching.

use super::parse::count;
use super::source::{SettingError, SettingsReader};

/// Limits of batching. How many lanes there are depends on the engine (`engines/store.rs`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaneLimits {
    /// `lane.capacity`: calls that may wait in one lane; further ones are answered 503.
    pub capacity: usize,
    /// `lane.batch_max`: the most calls in one commit.
    pub batch_max: usize,
    /// `lane.postgres_lanes`: concurrent commits on Postgres.
    pub postgres_lanes: usize,
}

impl LaneLimits {
    pub(crate) fn read(reader: &mut SettingsReader) -> Result<Self, SettingError> {
        let number = "a number from 1 to 1000000";
        Ok(Self {
            capacity: reader.get("lane.capacity", 8_192, count(1_000_000), number)?,
            batch_max: reader.get("lane.batch_max", 512, count(1_000_000), number)?,
            postgres_lanes: reader.get("lane.postgres_lanes", 4, count(64), "a number from 1 to 64")?,
        })
    }
}
