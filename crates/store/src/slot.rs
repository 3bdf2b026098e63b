//! Slot at the store: its commands and outcomes, and the trait an engine implements.
//!
//! A window's counter is the number of slots scheduled inside it, whatever version of the config put them there. Windows
//! without a counter are empty. Behind every closed window stands a counter for the next one, so the first open counter
//! after a window is the end of the run of full ones: nobody walks them one by one, and nothing is left out.

mod plan;

use async_trait::async_trait;
use weir_core::slot::{Pace, WindowStatus};
use weir_core::{ConfigName, EventId, Timestamp};

pub use self::plan::{AssignPlan, PlanStep, WindowCounter, WindowQuery};
use crate::{Batch, Result};

/// A named pace, as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotConfig {
    /// Its name.
    pub name: ConfigName,
    /// Counts up with every change.
    pub version: u32,
    /// What it allows.
    pub pace: Pace,
    /// Since when.
    pub created_at: Timestamp,
}

/// A window's length in ISO 8601, hours and smaller: `PT4S`, `PT1H30M`, `PT0.25S`.
#[must_use]
pub fn window_text(pace: &Pace) -> String {
    span_text(pace.window())
}

/// A length of whole milliseconds in ISO 8601, hours and smaller.
#[must_use]
pub fn span_text(span: std::time::Duration) -> String {
    let (seconds, ms) = (span.as_secs(), span.subsec_millis());
    let (hours, minutes, seconds) = (seconds / 3_600, seconds / 60 % 60, seconds % 60);
    let part = |count: u64, unit: &str| if count > 0 { format!("{count}{unit}") } else { String::new() };
    let fraction = if ms > 0 { format!(".{ms:03}").trim_end_matches('0').to_owned() } else { String::new() };
    let rest = if seconds > 0 || ms > 0 { format!("{seconds}{fraction}S") } else { String::new() };
    format!("PT{}{}{rest}", part(hours, "H"), part(minutes, "M"))
}

/// One event's wish for a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assign {
    /// The event.
    pub event: EventId,
    /// The pace it follows.
    pub config: ConfigName,
    /// When it wants to run.
    pub requested: Timestamp,
}

/// Where an event was put.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The event.
    pub event: EventId,
    /// The pace it followed.
    pub config: ConfigName,
    /// When it wanted to run.
    pub requested: Timestamp,
    /// The start of its window.
    pub window_start: Timestamp,
    /// When it is to run.
    pub scheduled: Timestamp,
}

/// What became of an [`Assign`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AssignOutcome {
    /// It has a slot now.
    New(Slot),
    /// It had one already.
    Existing(Slot),
    /// Nobody configured that pace, or it was taken out of service.
    UnknownConfig,
    /// No window within the headroom has room, and none is held by others.
    Exhausted,
    /// The windows of its config are being counted anew and nothing was done. Here is the event, to be sent again after
    /// [`SlotStore::wait_for_recount`].
    Recounting(Assign),
}

/// A window and how full it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowCount {
    /// Its start.
    pub start: Timestamp,
    /// Slots scheduled inside it.
    pub count: u32,
    /// Whether it has room.
    pub status: WindowStatus,
}

/// The books of slot, read in one snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotAudit {
    /// Events that have a slot.
    pub slots: u64,
    /// The sum of all counters: the same number.
    pub counted: u64,
    /// Some of the windows whose counter is not the number of their slots: there must be none.
    pub different: Vec<String>,
    /// Windows that were filled under a higher maximum than the present one.
    pub above_maximum: u64,
}

/// Where slots live.
#[async_trait]
pub trait SlotStore: Send + Sync + 'static {
    /// Makes a new version of a config the active one. Counters follow it: a new maximum opens or closes windows, a new
    /// size counts what is already scheduled inside each of its windows.
    async fn put_config(&self, name: &ConfigName, pace: Pace) -> Result<SlotConfig>;
    /// The active version.
    async fn config(&self, name: &ConfigName) -> Result<Option<SlotConfig>>;
    /// Active configs in order of name, after the one named `after`.
    async fn configs(&self, after: Option<&ConfigName>, limit: usize) -> Result<Vec<SlotConfig>>;
    /// Takes a config out of service; false when it is not in service.
    async fn deactivate(&self, name: &ConfigName) -> Result<bool>;
    /// Gives each event a slot, in order, one commit for all. An event that has one keeps it. The batch grows until the
    /// engine takes it. Events of a config that is being counted anew are handed back, so that the others need not wait.
    async fn assign_batch(&self, batch: Batch<Assign>) -> Result<Vec<AssignOutcome>>;
    /// Waits until a config is not being counted anew, or refuses when too many wait already. An engine that never answers
    /// [`AssignOutcome::Recounting`] has nothing to wait for.
    async fn wait_for_recount(&self, _config: &ConfigName) -> Result<()> {
        Ok(())
    }
    /// An event's slot.
    async fn find_slot(&self, event: &EventId) -> Result<Option<Slot>>;
    /// Gives an event's place back, and says what it was.
    async fn release_slot(&self, event: &EventId) -> Result<Option<Slot>>;
    /// The counters of a config's windows that begin at or after `from` and before `to`, in order. Empty ones are left out.
    async fn windows(
        &self,
        config: &ConfigName,
        from: Timestamp,
        to: Timestamp,
        limit: usize,
    ) -> Result<Vec<WindowCount>>;
    /// Reads the books.
    async fn audit_slots(&self) -> Result<SlotAudit>;
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn window_sizes_are_spelled_in_iso_8601() {
        let text = |ms| window_text(&Pace::new(1, Duration::from_millis(ms)).unwrap());
        assert_eq!(text(4_000), "PT4S");
        assert_eq!(text(250), "PT0.25S");
        assert_eq!(text(5_400_000), "PT1H30M");
        assert_eq!(text(86_400_000), "PT24H");
        assert_eq!(text(61_001), "PT1M1.001S");
    }
}
