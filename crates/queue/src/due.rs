//! Due slots: the interface through which a dispatcher claims them, and the event it publishes for each.

use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;
use weir_core::{EventId, Timestamp};
use weir_store::Result;
use weir_store::slot::Slot;

use crate::{ClaimReceipt, MillisTime};

/// The name of the dispatcher's lease in the table of topic leases. No topic has a space in its name.
pub const DUE_LEASE: &str = "slots due";

/// Due slots, leased to one dispatcher.
#[derive(Clone, Debug, Default)]
pub struct DueSlots {
    pub slots: Vec<Slot>,
    /// Slots that were recorded as due and have been released since: not to be published.
    pub released: Vec<(Timestamp, EventId)>,
    /// Passed back to [`DueStore::settle_due`].
    pub receipt: ClaimReceipt,
    /// If nothing is due: the time until the next recorded slot is.
    pub next_due_in: Option<Duration>,
}

impl DueSlots {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty() && self.released.is_empty()
    }
}

/// What the dispatcher has done with [`DueSlots`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DispatchOutcome<'a> {
    /// The first slots, this many, are with a broker. The rest are claimed again.
    Published(usize),
    /// All slots are enqueued on this topic of the store's own queue, in the commit that settles them.
    Enqueue(&'a str),
}

/// The record of slots to dispatch.
#[async_trait]
pub trait DueStore: Send + Sync + 'static {
    /// Records future slots that were assigned while dispatching was off, a page at a time in order of id. Returns where the
    /// next page begins, or `None` after the last one.
    async fn record_due(&self, after: Option<&EventId>) -> Result<Option<EventId>>;
    /// Claims up to `max` due slots in order of time. Until they are settled or `lease` has passed, no other dispatcher gets
    /// any, which keeps the order.
    async fn claim_due(&self, max: usize, lease: Duration) -> Result<DueSlots>;
    /// Settles claimed slots in one commit. Returns `false`, having done nothing, if the lease had expired.
    async fn settle_due(&self, due: &DueSlots, dispatched: DispatchOutcome<'_>) -> Result<bool>;
    /// Returns when a slot may be due earlier than known before: at once if this process assigned slots since the last call,
    /// and after `at_most` at the latest.
    async fn wait_due(&self, at_most: Duration);
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DueEvent<'a> {
    event_id: &'a str,
    config_name: &'a str,
    requested_time: MillisTime,
    window_start: MillisTime,
    scheduled_time: MillisTime,
}

/// The JSON of a due slot.
#[must_use]
pub fn encode(slot: &Slot) -> Vec<u8> {
    let event = DueEvent {
        event_id: slot.event.as_str(),
        config_name: slot.config.as_str(),
        requested_time: slot.requested.into(),
        window_start: slot.window_start.into(),
        scheduled_time: slot.scheduled.into(),
    };
    serde_json::to_vec(&event).expect("strings and times always become JSON")
}

#[cfg(test)]
mod tests {
    use weir_core::ConfigName;

    use super::*;

    #[test]
    fn the_event_of_a_due_slot_has_the_fields_of_the_response() {
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
                "eventId": "e \"1\"", "configName": "default", "requestedTime": "2026-01-01T00:00:01.000Z",
                "windowStart": "2026-01-01T00:00:00.000Z", "scheduledTime": "2026-01-01T00:00:02.000Z",
            })
        );
    }
}
