//! Slot at the store: its commands and outcomes, and the trait engines implement.
//!
//! A window's counter is the number of slots scheduled in it, under any version of the config. A window without a counter
//! is empty. The window after a closed one always has a counter. So the first open counter after a window marks the end
//! of a run of full windows, and a search skips the run without visiting each window.

mod plan;

use std::time::Duration;

use async_trait::async_trait;
use weir_core::slot::{Pace, WindowStatus};
use weir_core::{ConfigName, EventId, Timestamp};

pub use self::plan::{AssignPlan, PlanStep, WindowCounter, WindowQuery};
use crate::{Batch, Result};

/// The present version of a named pace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotConfig {
    pub name: ConfigName,
    /// Incremented with every change.
    pub version: u32,
    pub pace: Pace,
    /// When this version was created.
    pub created_at: Timestamp,
}

/// A version of a config, as the history of the config shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotConfigVersion {
    pub config: SlotConfig,
    /// Of all versions of a config one is active, or none after it was deactivated.
    pub is_active: bool,
}

/// Formats a window's length as an ISO 8601 duration in hours and smaller units: `PT4S`, `PT1H30M`, `PT0.25S`.
#[must_use]
pub fn window_text(pace: &Pace) -> String {
    span_text(pace.window())
}

/// Formats a duration of whole milliseconds in ISO 8601, in hours and smaller units.
#[must_use]
pub fn span_text(span: std::time::Duration) -> String {
    let (seconds, ms) = (span.as_secs(), span.subsec_millis());
    let (hours, minutes, seconds) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    let part = |count: u64, unit: &str| if count > 0 { format!("{count}{unit}") } else { String::new() };
    let fraction = if ms > 0 { format!(".{ms:03}").trim_end_matches('0').to_owned() } else { String::new() };
    let rest = if seconds > 0 || ms > 0 { format!("{seconds}{fraction}S") } else { String::new() };
    format!("PT{}{}{rest}", part(hours, "H"), part(minutes, "M"))
}

/// Assigns a slot to an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assign {
    pub event: EventId,
    pub config: ConfigName,
    pub requested: Timestamp,
}

/// The time assigned to an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    pub event: EventId,
    pub config: ConfigName,
    pub requested: Timestamp,
    pub window_start: Timestamp,
    pub scheduled: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AssignOutcome {
    New(Slot),
    /// The event had a slot already.
    Existing(Slot),
    /// The config does not exist or was deactivated.
    UnknownConfig,
    /// All windows up to the end of time are full.
    Exhausted,
    /// The windows of the config are being recounted and nothing was done. Submit the returned command again after
    /// [`SlotStore::wait_for_recount`].
    Recounting(Assign),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveOutcome {
    Moved(Slot),
    /// The event has no slot.
    UnknownEvent,
    /// The slot's config was deactivated; the slot is unchanged.
    UnknownConfig(ConfigName),
    /// All windows up to the end of time are full; the slot is unchanged.
    Exhausted,
}

/// A window and how many slots it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowCount {
    pub start: Timestamp,
    pub count: u32,
    pub status: WindowStatus,
}

/// A place in the list of a config's slots. Every slot of its time comes after it that has no event, or a smaller one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotPosition {
    pub scheduled: Timestamp,
    /// `None` stands before all events of that time.
    pub event: Option<EventId>,
}

/// Checks of the slot tables, read in one snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotAudit {
    pub slots: u64,
    /// The sum of all counters. Must equal `slots`.
    pub counted: u64,
    /// Some of the windows whose counter differs from the number of their slots. There must be none.
    pub different: Vec<String>,
    /// Windows with more slots than the present maximum, filled under an earlier version.
    pub above_maximum: u64,
}

#[async_trait]
pub trait SlotStore: Send + Sync + 'static {
    /// Activates a new version of a config and updates the counters: a new maximum opens or closes windows, and a new window
    /// size counts what is already scheduled in each of the new windows.
    async fn put_config(&self, name: &ConfigName, pace: Pace) -> Result<SlotConfig>;
    /// The active version of a config.
    async fn config(&self, name: &ConfigName) -> Result<Option<SlotConfig>>;
    /// Active configs in order of name, after the one named `after`.
    async fn configs(&self, after: Option<&ConfigName>, limit: usize) -> Result<Vec<SlotConfig>>;
    /// All versions of a config, newest first, before version `before`. Empty if the config never existed.
    async fn config_versions(
        &self,
        name: &ConfigName,
        before: Option<u32>,
        limit: usize,
    ) -> Result<Vec<SlotConfigVersion>>;
    /// Deactivates a config. Returns `false` if it is not active.
    async fn deactivate(&self, name: &ConfigName) -> Result<bool>;
    /// Assigns slots to events in order and in one commit. An event that has a slot keeps it. The batch grows until the engine
    /// takes it. Events of a config that is being recounted are returned unprocessed, so that the others need not wait.
    async fn assign_batch(&self, batch: Batch<Assign>) -> Result<Vec<AssignOutcome>>;
    /// Waits until a config is not being recounted. Fails if too many calls wait already. An engine that never returns
    /// [`AssignOutcome::Recounting`] need not implement it.
    async fn wait_for_recount(&self, _config: &ConfigName) -> Result<()> {
        Ok(())
    }
    async fn find_slot(&self, event: &EventId) -> Result<Option<Slot>>;
    /// Frees an event's slot and returns it, or `None` if it has none.
    async fn release_slot(&self, event: &EventId) -> Result<Option<Slot>>;
    /// Gives an event another slot of its config, in one commit with freeing the one it has. The freed place may be the new one.
    async fn move_slot(&self, event: &EventId, requested: Timestamp) -> Result<MoveOutcome>;
    /// The counters of a config's windows that start at or after `from` and before `to`, in order, without empty windows.
    async fn windows(
        &self,
        config: &ConfigName,
        from: Timestamp,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<WindowCount>>;
    /// The slots of a config that are scheduled before `to` and come after `after`, in order of time and event.
    async fn slots(
        &self,
        config: &ConfigName,
        after: SlotPosition,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<Slot>>;
    /// Deletes up to about `limit` rows of what is older than `keep`, a few at a time: slots and counters of windows that ended
    /// longer ago, and versions of configs that were replaced longer ago. A slot that waits to be dispatched stays, and so do
    /// those after it. Returns how many rows were deleted.
    async fn purge_slots(&self, keep: Duration, limit: usize) -> Result<u64>;
    async fn audit_slots(&self) -> Result<SlotAudit>;
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn window_sizes_are_formatted_in_iso_8601() {
        let text = |ms| window_text(&Pace::new(1, Duration::from_millis(ms)).unwrap());
        assert_eq!(text(4_000), "PT4S");
        assert_eq!(text(250), "PT0.25S");
        assert_eq!(text(5_400_000), "PT1H30M");
        assert_eq!(text(86_400_000), "PT24H");
        assert_eq!(text(61_001), "PT1M1.001S");
    }
}
