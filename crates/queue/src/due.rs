//! Slots whose time has come: the seam through which a dispatcher takes them, and the event it publishes for each.

use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;
use weir_core::{EventId, Timestamp};
use weir_store::Result;
use weir_store::slot::Slot;

use crate::{ClaimReceipt, rfc3339};

/// What the lease of the dispatcher stands under, beside those of topics. No topic has a space in its name.
pub const DUE_LEASE: &str = "slots due";

/// Slots that are due, handed out to one dispatcher.
#[derive(Clone, Debug, Default)]
pub struct DueSlots {
    /// In order of time.
    pub slots: Vec<Slot>,
    /// Noted as due, but given back since: nothing to publish.
    pub released: Vec<(Timestamp, EventId)>,
    /// What [`DueStore::settle_due`] needs to know them by.
    pub receipt: ClaimReceipt,
    /// With nothing due: how long until something will be, if something is noted.
    pub next_due_in: Option<Duration>,
}

impl DueSlots {
    /// Whether there is nothing to settle.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty() && self.released.is_empty()
    }
}

/// What became of the slots of a [`DueSlots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DispatchOutcome<'a> {
    /// So many of them, from the first on, are with a broker. The rest is handed out again.
    Published(usize),
    /// All of them go on this topic of the store's own queue, in the commit that settles them.
    Enqueue(&'a str),
}

/// Where slots that are to be dispatched are noted.
#[async_trait]
pub trait DueStore: Send + Sync + 'static {
    /// Notes slots whose time is still to come, a page at a time in order of id: those assigned while nothing was
    /// dispatched. Returns where the next page begins; `None` after the last one.
    async fn record_due(&self, after: Option<&EventId>) -> Result<Option<EventId>>;
    /// Hands out up to `max` slots whose time has come, in order of time. Until they are settled or `lease` has
    /// passed nobody else gets any, so that order is kept.
    async fn claim_due(&self, max: usize, lease: Duration) -> Result<DueSlots>;
    /// Settles what was taken, in one commit. False when the lease had run out: then nothing was done.
    async fn settle_due(&self, due: &DueSlots, dispatched: DispatchOutcome<'_>) -> Result<bool>;
    /// Returns when something may be due sooner than was known: at once when this process has assigned something
    /// since the last call, at the latest after `at_most`.
    async fn wait_due(&self, at_most: Duration);
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DueEvent<'a> {
    event_id: &'a str,
    config_name: &'a str,
    requested_time: jiff::Timestamp,
    window_start: jiff::Timestamp,
    scheduled_time: jiff::Timestamp,
}

/// The JSON of a due slot.
#[must_use]
pub fn encode(slot: &Slot) -> Vec<u8> {
    let event = DueEvent {
        event_id: slot.event.as_str(),
        config_name: slot.config.as_str(),
        requested_time: rfc3339(slot.requested),
        window_start: rfc3339(slot.window_start),
        scheduled_time: rfc3339(slot.scheduled),
    };
    serde_json::to_vec(&event).expect("strings and times always become JSON")
}

#[cfg(test)]
mod tests {
    use weir_core::ConfigName;

    use super::*;

    #[test]
    fn a_due_slot_is_told_as_it_was_answered() {
        let at = Timestamp::from_seconds;
        let slot = Slot {
            event: EventId::parse("e \"1\"").unwrap(),
            config: ConfigName::parse("default").unwrap(),
            requested: at(1_767_225_601),
            window_start: at(1_767_225_600),
            scheduled: at(1_767_225_602),
        };
        let json: serde_json::Value = serde_json::from_slice(&encode(&slot)).unwrap();
        assert_eq!(
            json,
            serde_json::json!({
                "eventId": "e \"1\"", "configName": "default", "requestedTime": "2026-01-01T00:00:01Z",
                "windowStart": "2026-01-01T00:00:00Z", "scheduledTime": "2026-01-01T00:00:02Z",
            })
        );
    }
}
